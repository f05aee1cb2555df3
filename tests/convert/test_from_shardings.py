"""Rules from shardings: few of them, and each leaf gets what it had."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
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


TX = optax.adamw(1e-3)


def placed(layers: int, layout_map: flm.LayoutMap | None = None) -> dict[str, Any]:
    """Shapes of a decoder and of its optimizer state, with their shardings."""
    params = llama(layers)
    tree = {"params": params, "opt_state": jax.eval_shape(TX.init, params)}
    return (layout_map or flm.presets.llama(MESH)).abstract(tree, tx=TX)


def sharded(*axes: str | None, kind: str | None = None) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(JAX_MESH, PartitionSpec(*axes), memory_kind=kind)
    return jax.ShapeDtypeStruct((8, 8), "float32", sharding=sharding)


def assert_same(tree: Any, layout_map: flm.LayoutMap, **options: Any) -> None:
    """Each leaf of a sharded tree gets its sharding by the rules."""
    wanted = jax.tree.leaves(tree)
    found = jax.tree.leaves(layout_map.shardings(tree, **options))
    assert len(wanted) == len(found) > 0
    for leaf, sharding in zip(wanted, found, strict=True):
        assert sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
        assert sharding.memory_kind == leaf.sharding.memory_kind


COLUMN, ROW, WHOLE = (None, "tensor"), ("tensor",), ()


@pytest.mark.parametrize(
    ("leaves", "patterns"),
    [
        # Indices, names that differ in one part, and a catch for the others.
        (
            {
                **dict.fromkeys(["h/0/up/w", "h/1/up/w", "h/0/gate/w"], COLUMN),
                "h/0/down/w": ROW,
            },
            {"(gate|up)/w": COLUMN, "down/w": ROW},
        ),
        # A pattern begins where a part does.
        (
            {"a/up/w": COLUMN, "a/group/w": WHOLE},
            {"(^|/)up/w": COLUMN, "group/w": WHOLE},
        ),
        # The end of a path tells it from a longer one, and the start from another.
        ({"a/w": COLUMN, "a/w_x/y": ROW}, {"a/w$": COLUMN, "w_x/y": ROW}),
        ({"a/w": COLUMN, "b/a/w": ROW}, {"^a/w": COLUMN, "b/a/w": ROW}),
        # Layers that differ.
        (
            {f"h/{n}/w": COLUMN if n < 2 else ROW for n in range(4)},
            {"(0|1)/w": COLUMN, "(2|3)/w": ROW},
        ),
        ({"w.a": COLUMN, "w+a": ROW}, {r"w\.a": COLUMN, r"w\+a": ROW}),
        ({"u": COLUMN, "w": COLUMN, "v": ROW}, {"(^|/)(u|w)$": COLUMN, "v": ROW}),
    ],
)
def test_patterns_are_those_that_a_user_would_write(
    leaves: dict[str, Any], patterns: dict[str, Any]
) -> None:
    tree = nested({path: sharded(*axes) for path, axes in leaves.items()})
    found = flm.convert.from_shardings(tree).items()
    specs = {pattern: layout.spec(2) for pattern, layout in found}
    assert specs == {x: PartitionSpec(*axes) for x, axes in patterns.items()}


PARTS = st.sampled_from(["a", "b", "ab", "up", "group", "0", "1", "12", "x_1", "k.e"])
# Each path ends in a name of its own, so that no leaf is inside of another.
PATHS = st.tuples(st.lists(PARTS, max_size=3), st.sampled_from(["w", "w2", "uw"]))


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        PATHS.map(lambda path: "/".join([*path[0], path[1]])),
        st.sampled_from([COLUMN, ROW, WHOLE]),
        min_size=1,
        max_size=15,
    )
)
def test_each_leaf_gets_its_layout(leaves: dict[str, Any]) -> None:
    tree = nested({path: sharded(*axes) for path, axes in leaves.items()})
    found = flm.convert.from_shardings(tree)
    assert len(found) <= len(leaves)
    assert_same(tree, found)


def test_a_large_model_with_its_optimizer_has_few_rules() -> None:
    tree = placed(32)
    found = flm.convert.from_shardings(tree, tx=TX)
    # 10 roles: embedding, head, four of attention, three of mlp, norms.
    assert len(found) <= 10 and not found.optimizer
    assert found.device_mesh == MESH
    assert_same(tree, found, tx=TX)


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
    mesh = flm.DeviceMesh("data=2,tensor=4")
    tree = placed(2, flm.presets.zero1(flm.presets.llama(mesh)))
    found = flm.convert.from_shardings(tree, tx=TX)
    assert found.optimizer
    assert_same(tree, found, tx=TX)


def test_a_memory_kind_is_part_of_a_layout() -> None:
    tree = {"a": sharded("fsdp", kind="pinned_host"), "b": sharded("fsdp")}
    found = flm.convert.from_shardings(tree)
    assert len(found) == 2
    assert_same(tree, found)


def test_the_rules_can_be_put_on_another_mesh() -> None:
    there = flm.DeviceMesh.abstract("fsdp=16,tensor=8")
    found = flm.convert.from_shardings({"w": sharded("fsdp")}, there)
    assert found.device_mesh == there


def test_a_checkpoint_without_its_model(tmp_path: Path) -> None:
    tree = placed(2)
    arrays = jax.tree.map(
        lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding),
        tree,
    )
    flm.checkpoint.save(tmp_path / "run", arrays, layout_map=flm.presets.llama(MESH))
    found = flm.convert.from_shardings(tmp_path / "run")
    assert len(found) <= 10 and not found.optimizer
    assert_same(tree, found.on(MESH), tx=TX)


def test_a_checkpoint_of_one_device(tmp_path: Path) -> None:
    flm.checkpoint.save(tmp_path / "run", {"w": jax.numpy.ones((8, 8))})
    with pytest.raises(RuleError, match="does not say how its leaves were"):
        flm.convert.from_shardings(tmp_path / "run")


def test_leaves_without_a_sharding_are_named() -> None:
    tree = {"up": sharded("fsdp"), "down": struct(8, 8), "bias": jax.numpy.ones(8)}
    with pytest.raises(RuleError) as caught:
        flm.convert.from_shardings(tree)
    text = str(caught.value)
    assert "down (8,8) has no sharding" in text
    assert "bias (8,) has a SingleDeviceSharding" in text
    assert "layout_map.place(tree)" in text


def test_leaves_on_several_meshes() -> None:
    other = flm.LayoutMap(flm.DeviceMesh("x=8"), strict=False)
    tree = {"a": sharded("fsdp"), "b": other.abstract({"w": struct(8, 8)})}
    with pytest.raises(RuleError, match="a is on .*\n.*b/w is on"):
        flm.convert.from_shardings(tree)


def test_there_have_to_be_parameters() -> None:
    for tree in (placed(1)["opt_state"], {"step": struct()}):
        with pytest.raises(RuleError, match="convert optimizer state together with"):
            flm.convert.from_shardings(tree)


def test_state_that_no_rule_can_say() -> None:
    """Both moments of a parameter have one rule."""
    params, mu = {"w": sharded("fsdp")}, {"w": sharded("tensor")}
    state = optax.ScaleByAdamState(count=struct(), mu=mu, nu=params)
    tree = {"params": params, "opt_state": (state, (), ())}
    with pytest.raises(RuleError) as caught:
        flm.convert.from_shardings(tree, tx=TX)
    assert "1 leaves cannot be expressed as rules" in str(caught.value)
    assert " (8,8): it has" in str(caught.value)
