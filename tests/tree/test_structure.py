"""Recognise equal trees, and tell unequal ones apart."""

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.core import freeze

import flax_layoutmap as flm
from flax_layoutmap._tree.structure import structure_of


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def param(*shape: int, **metadata: Any) -> nnx.Param[Any]:
    return nnx.Param(struct(*shape), **metadata)


def make() -> Any:
    return {
        "layers": [{"w": struct(4, 8), "b": struct(8)}, {"w": struct(4, 8)}],
        "embed": struct(16, 4),
    }


TREES: dict[str, Callable[[], Any]] = {
    "dicts and lists": make,
    "a state": lambda: nnx.State({"a": {"w": param(4, 8)}, "b": param(8)}),
    "states in a dict": lambda: {"model": nnx.State({"w": param(4)}), "x": struct(2)},
    "a variable that holds a dict": lambda: nnx.State(
        {"v": nnx.Variable({"a": struct(2), "b": [struct(3)]})}
    ),
    "nothing": dict,
    "one array": lambda: struct(3),
}


@pytest.mark.parametrize("case", TREES)
def test_a_tree_fits_its_own_structure_only(case: str) -> None:
    for name, other in TREES.items():
        structure = structure_of(TREES[case]())
        assert structure is not None
        assert structure.fits(other()) == (name == case), name


def changed(change: Callable[[Any], None]) -> Any:
    tree = make()
    change(tree)
    return tree


@pytest.mark.parametrize(
    "other",
    [
        changed(lambda tree: tree.update(embed=struct(16, 5))),
        changed(lambda tree: tree.update(embed=struct(16, 4, dtype=jnp.int32))),
        changed(lambda tree: tree.update(embed=np.zeros((16, 4), np.float32))),
        changed(lambda tree: tree.update(embed={"w": struct(16, 4)})),
        changed(lambda tree: tree.update(embed=None)),
        changed(lambda tree: tree.update(embed="text")),
        changed(lambda tree: tree.update(more=struct(1))),
        changed(lambda tree: tree.pop("embed")),
        changed(lambda tree: tree["layers"].pop()),
        changed(lambda tree: tree["layers"].append({})),
        changed(lambda tree: tree["layers"][0].update(W=tree["layers"][0].pop("w"))),
        changed(lambda tree: tree.update(layers=tuple(tree["layers"]))),
        changed(lambda tree: tree.update(layers=collections.UserList(tree["layers"]))),
        # JAX flattens these in another order, or to another structure.
        collections.OrderedDict(make()),
        collections.defaultdict(dict, make()),
        freeze(make()),
        changed(
            lambda tree: tree["layers"].__setitem__(
                0, collections.OrderedDict(tree["layers"][0])
            )
        ),
    ],
)
def test_another_tree_does_not_fit(other: Any) -> None:
    structure = structure_of(make())
    assert structure is not None
    assert structure.fits(make()) and not structure.fits(other)


def test_the_order_of_insertion_does_not_count() -> None:
    structure = structure_of({"a": struct(1), "b": struct(2)})
    assert structure is not None
    assert structure.fits({"b": struct(2), "a": struct(1)})
    assert not structure.fits({"b": struct(1), "a": struct(2)})


def test_types_and_metadata_of_variables_count() -> None:
    structure = structure_of(nnx.State({"w": param(2, name="x")}))
    assert structure is not None
    assert structure.fits(nnx.State({"w": param(2, name="x")}))
    assert not structure.fits(nnx.State({"w": param(2, name="y")}))
    assert not structure.fits(nnx.State({"w": param(2)}))
    assert not structure.fits(nnx.State({"w": nnx.BatchStat(struct(2), name="x")}))
    assert not structure.fits(nnx.State({"w": struct(2)}))


def test_metadata_is_remembered_as_it_was() -> None:
    state = nnx.State({"w": param(2, name="x")})
    structure = structure_of(state)
    assert structure is not None
    before = jax.tree.map(lambda leaf: leaf, state)
    state["w"].set_metadata("name", "y")  # pyright: ignore[reportCallIssue]
    assert structure.fits(before) and not structure.fits(state)


def test_what_has_no_structure() -> None:
    assert structure_of({"step": 3}) is None
    assert structure_of((struct(2), struct(3))) is None
    # Metadata that cannot be compared.
    odd = np.ones(2)
    state = nnx.State({"v": param(2, scale=odd), "w": param(2, scale=odd.copy())})
    assert structure_of(state) is None
    alone = structure_of(nnx.State({"v": param(2, scale=odd)}))
    assert alone is not None
    assert not alone.fits(nnx.State({"v": param(2, scale=odd.copy())}))


def test_state_of_an_unknown_kind_is_not_remembered(mesh: flm.DeviceMesh) -> None:
    """Placed or not, it has the same structure, but not the same layouts."""
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map["w"] = ("data", "model")
    tree: Any = {
        "params": {"w": jnp.ones((8, 8))},
        "opt_state": {"sum": jnp.zeros((8, 24))},
    }
    before = layout_map.resolve(tree)
    assert before["opt_state/sum"].reason == "unknown optimizer state"
    tree["opt_state"] = jax.device_put(
        tree["opt_state"], flm.TensorLayout(("data", None), mesh).sharding()
    )
    after = layout_map.resolve(tree)
    assert after["opt_state/sum"].reason == "own layout"
    assert after["opt_state/sum"].shard_shape == (4, 24)
