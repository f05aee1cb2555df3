"""Rules from shardings: few of them, and each leaf gets what it had."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from presets.spellings import SPELLINGS, shape_of
from shapes import nested, struct

import flax_layoutmap as flm
from flax_layoutmap.errors import RuleError

MESH = flm.DeviceMesh((2, 4), ("fsdp", "tensor"))
JAX_MESH = jax.sharding.Mesh(
    np.array(jax.devices()[:8]).reshape(2, 4), ("fsdp", "tensor")
)


def llama(layers: int = 32) -> dict[str, Any]:
    """The shapes of a decoder's parameters."""
    return nested(
        {
            path.replace("/0/", f"/{n}/"): struct(*shape_of(dims))
            for path, dims in SPELLINGS["llama", "flax"].items()
            for n in range(layers)
        }
    )


def preset() -> flm.LayoutMap:
    return flm.presets.llama(MESH)


def assert_same(tree: Any, layout_map: flm.LayoutMap, **options: Any) -> None:
    """Each leaf of a sharded tree gets its sharding by the rules."""
    wanted = jax.tree.leaves(tree)
    found = jax.tree.leaves(layout_map.shardings(tree, **options))
    assert len(wanted) == len(found) > 0
    for leaf, sharding in zip(wanted, found, strict=True):
        assert sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
        assert sharding.memory_kind == leaf.sharding.memory_kind


def test_a_large_model_with_its_optimizer_has_few_rules() -> None:
    params, tx = llama(), optax.adamw(1e-3)
    tree = {"params": params, "opt_state": jax.eval_shape(tx.init, params)}
    placed = preset().abstract(tree, tx=tx)
    found = flm.convert.from_shardings(placed, tx=tx)
    # 10 roles: embedding, head, four of attention, three of mlp, norms.
    assert len(found) <= 10 and not found.optimizer
    assert found.device_mesh == MESH
    assert_same(placed, found, tx=tx)


def test_a_module_of_live_arrays() -> None:
    def make() -> nnx.Module:
        return nnx.Sequential(
            nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.BatchNorm(16, rngs=nnx.Rngs(0))
        )

    layout_map = flm.LayoutMap(MESH)
    layout_map["0/kernel"] = ("fsdp", "tensor")
    layout_map["0/bias"] = ("tensor",)
    layout_map["layers/1"] = None
    model = flm.create(make, layout_map)
    found = flm.convert.from_shardings(model)
    assert_same(nnx.state(model), found)
    layout = found["layers/0/kernel"]
    assert layout is not None and layout.axes == ("fsdp", "tensor")


def test_state_with_a_layout_of_its_own_gets_rules() -> None:
    params, tx = llama(2), optax.adamw(1e-3)
    layout_map = flm.presets.zero1(flm.presets.llama(flm.DeviceMesh("data=2,tensor=4")))
    tree = {"params": params, "opt_state": jax.eval_shape(tx.init, params)}
    placed = layout_map.abstract(tree, tx=tx)
    found = flm.convert.from_shardings(placed, tx=tx)
    assert found.optimizer
    assert_same(placed, found, tx=tx)


def test_a_memory_kind_is_part_of_a_layout() -> None:
    host = NamedSharding(JAX_MESH, PartitionSpec("fsdp"), memory_kind="pinned_host")
    tree = {"a": jax.ShapeDtypeStruct((8, 8), "float32", sharding=host)}
    found = flm.convert.from_shardings(tree)
    layout = found["a"]
    assert layout is not None and layout.memory_kind == "pinned_host"
    assert_same(tree, found)


def test_the_rules_can_be_put_on_another_mesh() -> None:
    placed = preset().abstract(llama(1))
    there = flm.DeviceMesh.abstract("fsdp=16,tensor=8")
    assert flm.convert.from_shardings(placed, there).device_mesh == there


def test_a_checkpoint_without_its_model(tmp_path: Path) -> None:
    params, tx = llama(2), optax.adamw(1e-3)
    tree = {"params": params, "opt_state": jax.eval_shape(tx.init, params)}
    placed = preset().abstract(tree, tx=tx)
    arrays = jax.tree.map(
        lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding),
        placed,
    )
    flm.checkpoint.save(tmp_path / "run", arrays, layout_map=preset())
    found = flm.convert.from_shardings(tmp_path / "run")
    assert len(found) <= 10 and not found.optimizer
    assert_same(placed, found.on(MESH), tx=tx)


def test_a_checkpoint_of_one_device(tmp_path: Path) -> None:
    flm.checkpoint.save(tmp_path / "run", {"w": jax.numpy.ones((8, 8))})
    with pytest.raises(RuleError, match="does not say how its leaves were"):
        flm.convert.from_shardings(tmp_path / "run")


class TestErrors:
    def test_a_leaf_without_a_sharding_is_named(self) -> None:
        tree = preset().abstract({"up": {"kernel": struct(8, 8)}})
        tree["down"] = {"kernel": struct(8, 8), "bias": jax.numpy.ones(8)}
        with pytest.raises(RuleError) as caught:
            flm.convert.from_shardings(tree)
        text = str(caught.value)
        assert "down/kernel (8,8) has no sharding" in text
        assert "down/bias (8,) has a SingleDeviceSharding" in text
        assert "layout_map.place(tree)" in text

    def test_leaves_on_several_meshes(self) -> None:
        other = flm.LayoutMap(flm.DeviceMesh("x=8"), strict=False)
        tree = {
            "a": flm.LayoutMap(MESH, strict=False).abstract({"w": struct(8, 8)}),
            "b": other.abstract({"w": struct(8, 8)}),
        }
        with pytest.raises(RuleError, match="a/w is on .*\n.*b/w is on"):
            flm.convert.from_shardings(tree)

    def test_optimizer_state_alone(self) -> None:
        params, tx = llama(1), optax.adamw(1e-3)
        tree = {"params": params, "opt_state": jax.eval_shape(tx.init, params)}
        placed = preset().abstract(tree, tx=tx)
        with pytest.raises(RuleError, match="convert optimizer state together with"):
            flm.convert.from_shardings(placed["opt_state"])

    def test_state_that_no_rule_can_say(self) -> None:
        """Both moments of a parameter have one rule."""
        params, tx = {"up": {"kernel": struct(8, 8)}}, optax.adamw(1e-3)
        tree = {"params": params, "opt_state": jax.eval_shape(tx.init, params)}
        placed = preset().abstract(tree, tx=tx)
        adam = placed["opt_state"][0]
        sharding = NamedSharding(JAX_MESH, PartitionSpec("tensor"))
        moved = jax.ShapeDtypeStruct((8, 8), "float32", sharding=sharding)
        state = (adam._replace(mu={"up": {"kernel": moved}}), *placed["opt_state"][1:])
        with pytest.raises(RuleError) as caught:
            flm.convert.from_shardings(placed | {"opt_state": state}, tx=tx)
        assert "cannot be expressed as rules" in str(caught.value)
        assert "u/up/kernel (8,8): it has" in str(caught.value)
