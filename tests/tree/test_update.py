"""Update modules that hold arrays in tuples."""

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct
from shards import assert_lies

import flax_layoutmap as flm
from flax_layoutmap._tree.flax_internals import nnx_state
from flax_layoutmap._tree.graph import update


class Pair(NamedTuple):
    array: Any
    other: Any


@struct.dataclass
class Frozen:
    array: Any
    name: str = struct.field(pytree_node=False)


class Holder(nnx.Module):
    """Arrays in all kinds of containers."""

    def __init__(self) -> None:
        self.kernel = nnx.Param(jnp.arange(64.0).reshape(8, 8))
        self.table = nnx.data((jnp.arange(3.0), 2, None, (jnp.ones(2),)))
        self.pair = nnx.data(Pair(jnp.zeros(8), nnx.Param(jnp.ones(8))))
        self.nested = nnx.data({"a": [(jnp.full(2, 3.0),)], "b": jnp.ones(1)})
        self.frozen = nnx.data(Frozen(jnp.full(2, 4.0), "name"))
        self.plain = nnx.data([jnp.full(2, 5.0)])


PLACES = ("data", "model")


def rules(mesh: flm.DeviceMesh) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map["kernel"] = PLACES
    layout_map["pair"] = ("model",)
    return layout_map


def assert_placed(model: Any, mesh: flm.DeviceMesh) -> None:
    plain = Holder()
    assert nnx.graphdef(model) == nnx.graphdef(plain)
    assert type(model.pair) is Pair and model.table[1:3] == (2, None)
    assert model.frozen.name == "name"
    assert_lies(model.kernel[...], (("data",), ("model",)), mesh, plain.kernel[...])
    assert_lies(model.pair.array, (("model",),), mesh, plain.pair.array)
    assert_lies(model.pair.other[...], (("model",),), mesh, plain.pair.other[...])
    for own, other in zip(
        jax.tree.leaves([model.table, model.nested, model.frozen, model.plain]),
        jax.tree.leaves([plain.table, plain.nested, plain.frozen, plain.plain]),
        strict=True,
    ):
        if hasattr(own, "shape"):
            assert_lies(own, ((),), mesh, other)


def test_values() -> None:
    model = nnx.List([Holder(), Holder()])
    variable, plain = model[1].pair.other, model[1].plain
    state = jax.tree.map(lambda x: x + 1, nnx_state(model))
    expected = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    update(model, state)
    for one, other in zip(jax.tree.leaves(nnx_state(model)), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(model[1].table[3][0], [2, 2])
    # What can be changed in place is.
    assert model[1].pair.other is variable and model[1].plain is plain


def test_some_values() -> None:
    model = Holder()
    before = model.table, model.pair, model.nested
    update(model, nnx_state(model, nnx.Param))
    assert all(
        a is b
        for a, b in zip(before, (model.table, model.pair, model.nested), strict=True)
    )
    only = nnx.from_flat_state([(("table", 0), jnp.zeros(3))])
    update(model, only)
    np.testing.assert_array_equal(model.table[0], [0, 0, 0])
    assert model.pair is before[1]


@pytest.mark.parametrize("way", ["place", "create", "scope", "jit"])
def test_a_model_with_arrays_in_tuples(mesh: flm.DeviceMesh, way: str) -> None:
    layout_map = rules(mesh)
    if way == "place":
        layout_map.place(model := Holder())
    elif way == "create":
        model = flm.create(Holder, layout_map)
    elif way == "scope":
        with warnings.catch_warnings():
            warnings.simplefilter("error", flm.LayoutWarning)
            with flm.layout_map_scope(layout_map):
                model = Holder()
    else:
        model = Holder()
        flm.jit(lambda model: model.table[0].sum(), layout_map=layout_map)(model)
    assert_placed(model, mesh)


def test_an_argument_with_arrays_in_tuples(mesh: flm.DeviceMesh) -> None:
    def make(given: Holder) -> Any:
        given.table = nnx.data((given.table[0] + 1, *given.table[1:]))
        return nnx.Linear(8, 8, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))

    holder = Holder()
    flm.create(make, rules(mesh), holder)
    np.testing.assert_array_equal(holder.table[0], [1, 2, 3])
    assert holder.table[1:3] == (2, None)
