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
from jax.sharding import PartitionSpec as P
from presets.spellings import SPELLINGS, shape_of
from shapes import nested, struct

import flax_layoutmap as flm
from flax_layoutmap.errors import RuleError

MESH = flm.DeviceMesh((2, 4), ("fsdp", "tensor"))
COLUMN, ROW, WHOLE = (None, "tensor"), ("tensor",), ()
TX = optax.adamw(1e-3)


def placed(layers: int, layout_map: flm.LayoutMap | None = None) -> dict[str, Any]:
    """Shapes of a decoder and of its optimizer state, with their shardings."""
    shapes = {
        path.replace("/0/", f"/{n}/"): struct(*shape_of(dims))
        for path, dims in SPELLINGS["llama", "flax"].items()
        for n in range(layers)
    }
    params = nested(shapes)
    tree = {"params": params, "opt_state": jax.eval_shape(TX.init, params)}
    return (layout_map or flm.presets.llama(MESH)).abstract(tree, tx=TX)


def sharded(*axes: str | None, kind: str | None = None) -> jax.ShapeDtypeStruct:
    sharding = flm.TensorLayout(P(*axes), MESH, memory_kind=kind).sharding()
    return jax.ShapeDtypeStruct((8, 8), "float32", sharding=sharding)


def assert_same(tree: Any, layout_map: flm.LayoutMap, **options: Any) -> None:
    """Each leaf of a sharded tree gets its sharding by the rules."""
    wanted = jax.tree.leaves(tree)
    found = jax.tree.leaves(layout_map.shardings(tree, **options))
    assert len(wanted) == len(found) > 0
    for leaf, sharding in zip(wanted, found, strict=True):
        assert sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
        assert sharding.memory_kind == leaf.sharding.memory_kind


@pytest.mark.parametrize(
    ("leaves", "patterns"),
    [
        # Indices, names that differ in one part, and a catch for the others.
        (
            {"h/0/up/w": COLUMN, "h/1/up/w": COLUMN, "gate/w": COLUMN, "down/w": ROW},
            {"(gate|up)/w": COLUMN, "down/w": ROW},
        ),
        # A pattern begins where a part does.
        ({"a/up/w": ROW, "group/w": WHOLE}, {"(^|/)up/w": ROW, "group/w": WHOLE}),
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
    assert specs == {x: P(*axes) for x, axes in patterns.items()}


PARTS = st.sampled_from(["a", "b", "ab", "up", "group", "0", "1", "12", "x_1", "k.e"])
# No leaf is inside of another.
PATHS = st.lists(PARTS, min_size=1, max_size=4).map(
    lambda parts: "/".join([*parts, "w"])
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(PATHS, st.sampled_from([COLUMN, ROW, WHOLE]), min_size=1))
def test_each_leaf_gets_its_layout(leaves: dict[str, Any]) -> None:
    # No leaf is inside of another.
    tree = nested({f"{path}/w": sharded(*axes) for path, axes in leaves.items()})
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
    def make() -> Any:
        rngs = nnx.Rngs(0)
        return nnx.Sequential(
            nnx.Linear(8, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
        )

    layout_map = flm.LayoutMap(MESH, strict=False)
    layout_map["0/kernel"] = ("fsdp", "tensor")
    model = flm.create(make, layout_map)
    assert_same(nnx.state(model), flm.convert.from_shardings(model))


def test_state_with_a_layout_of_its_own_gets_rules() -> None:
    llama = flm.presets.llama(flm.DeviceMesh("data=2,tensor=4"))
    tree = placed(2, flm.presets.zero1(llama))
    found = flm.convert.from_shardings(tree, tx=TX)
    assert found.optimizer
    assert_same(tree, found, tx=TX)


def test_a_memory_kind_is_part_of_a_layout_and_the_mesh_may_be_another() -> None:
    tree = {"a": sharded("fsdp", kind="pinned_host"), "b": sharded("fsdp")}
    found = flm.convert.from_shardings(tree)
    assert len(found) == 2
    assert_same(tree, found)
    there = flm.DeviceMesh.abstract("fsdp=16,tensor=8")
    assert flm.convert.from_shardings(tree, there) == found.on(there)


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
    flm.checkpoint.save(tmp_path / "one", {"w": jax.numpy.ones((8, 8))})
    with pytest.raises(RuleError, match="does not say how its leaves were"):
        flm.convert.from_shardings(tmp_path / "one")


OTHER = flm.LayoutMap(flm.DeviceMesh("x=8"), strict=False).abstract({"b": struct(8)})
# Both moments of a parameter have one rule.
MOMENTS: Any = {"mu": {"w": sharded("tensor")}, "nu": {"w": sharded()}}
STATE = (optax.ScaleByAdamState(count=jax.numpy.zeros(()), **MOMENTS), (), ())


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({"a": sharded(), "b": struct(8, 8)}, r"b \(8,8\) has no sharding"),
        ({"a": jax.numpy.ones(8)}, r"a \(8,\) has a SingleDeviceSharding"),
        ({"a": sharded(), **OTHER}, "a is on .*\n.*b is on"),
        ({}, "the tree is empty"),
        ({"step": struct()}, "convert optimizer state together with"),
        (
            {"params": {"w": sharded()}, "opt_state": STATE},
            r"1 leaves cannot be expressed as rules .*:\n.* \(8,8\): it has",
        ),
    ],
)
def test_what_cannot_be_rules(tree: Any, text: str) -> None:
    with pytest.raises(RuleError, match=text):
        flm.convert.from_shardings(tree, tx=TX)
