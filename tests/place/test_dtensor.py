"""pack, unpack and call_with_layout: parts in the order of the mesh, and results."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from multiprocess import launch
from shards import Dims, assert_lies, grid

import flax_layoutmap as flm
from flax_layoutmap._core.jax_internals import memory_of

SQUARE = flm.DeviceMesh((2, 2), ("x", "y"), jax.devices()[:4])
WHOLE = np.arange(8, dtype=np.int32).reshape(2, 4)
DIMS: list[Dims] = [
    *(((), ()), (("x",), ()), (("y",), ()), ((), ("x",)), ((), ("y",))),
    *((("x",), ("y",)), (("y",), ("x",)), ((), ("x", "y"))),
]


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_there_and_back(dims: Dims) -> None:
    """In the order of the mesh, with the parts that JAX gives each device."""
    layout = flm.TensorLayout(dims, SQUARE)
    indices = layout.sharding(2).devices_indices_map(WHOLE.shape)
    devices = list(SQUARE.devices.flat)
    parts = [WHOLE[indices[device]] for device in devices]
    whole = flm.dtensor.pack(parts, layout)
    assert_lies(whole, dims, SQUARE, WHOLE)
    assert flm.dtensor.fetch_layout(whole) == layout
    again = flm.dtensor.unpack(whole)
    assert [part.devices() for part in again] == [{device} for device in devices]
    for part, wanted in zip(again, parts, strict=True):
        np.testing.assert_array_equal(part, wanted)
    assert_lies(flm.dtensor.pack(again, layout), dims, SQUARE, WHOLE)


def test_the_order_is_that_of_the_mesh() -> None:
    mesh = flm.DeviceMesh((2, 4), ("x", "y"), jax.devices()[::-1])
    whole = flm.dtensor.pack(list(range(8)), flm.TensorLayout((), mesh), check=False)
    parts = flm.dtensor.unpack(whole)
    assert [int(part) for part in parts] == list(range(8))
    assert parts[0].devices() == {jax.devices()[7]}


def test_keys(mesh: flm.DeviceMesh) -> None:
    keys = jax.random.split(jax.random.key(0), 8)
    layout = flm.TensorLayout((("data", "model"),), mesh)
    whole = flm.dtensor.pack([keys[n : n + 1] for n in range(8)], layout)
    assert_lies(whole, (("data", "model"),), mesh, jax.random.key_data(keys))
    same = flm.dtensor.pack([keys[0]] * 8, flm.TensorLayout((), mesh))
    assert_lies(same, (), mesh, jax.random.key_data(keys[0]))


def test_parts_that_are_there_are_not_copied(mesh: flm.DeviceMesh) -> None:
    parts = [jax.device_put(np.ones(2), device) for device in mesh.devices.flat]
    again = flm.dtensor.unpack(flm.dtensor.pack(parts, flm.TensorLayout(None, mesh)))
    for part, found in zip(parts, again, strict=True):
        assert memory_of(part) == memory_of(found)


def test_variables_boxes_and_lists() -> None:
    box: Any = linen.Partitioned
    layout = flm.TensorLayout(("x", "y"), SQUARE)
    parts = [nnx.Param(jnp.full((1, 1), n)) for n in range(4)]
    boxes = [box(part, names=("x", "y")) for part in parts]
    for given in (parts, boxes, [[[n]] for n in range(4)]):
        whole = flm.dtensor.pack(given, layout)
        np.testing.assert_array_equal(whole, [[0, 1], [2, 3]])
    unpacked = flm.dtensor.unpack(nnx.Param(whole))
    assert [int(part[0, 0]) for part in unpacked] == [0, 1, 2, 3]


@pytest.mark.parametrize("part", ["a", np.str_("a"), np.array("a"), None, object()])
def test_pack_refuses_what_is_no_number(part: Any) -> None:
    with pytest.raises(flm.LayoutError, match="pack takes arrays and numbers, got"):
        flm.dtensor.pack([part] * 4, flm.TensorLayout((), SQUARE))


@pytest.mark.parametrize("wrong", range(8))
def test_any_replica_that_differs_is_noticed(wrong: int) -> None:
    layout = flm.TensorLayout(("data", None), grid())
    parts = [np.full((2, 2), n // 4) for n in range(8)]
    flm.dtensor.pack(parts, layout)
    parts[wrong] = parts[wrong] + 5
    with pytest.raises(flm.LayoutError, match="different values"):
        flm.dtensor.pack(parts, layout)


def test_replicas_are_compared_bit_by_bit(mesh: flm.DeviceMesh) -> None:
    whole = flm.TensorLayout(None, mesh)
    flm.dtensor.pack([np.full(2, np.nan, np.float32)] * 8, whole)
    with pytest.raises(flm.LayoutError, match="different values"):
        flm.dtensor.pack([np.zeros(1), -np.zeros(1)] * 4, whole)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("job_part", "count"),
    [("relayouts-2", 42), pytest.param("relayouts-4", 18, marks=pytest.mark.slow)],
    indirect=["job_part"],
)
def test_several_processes(job_part: launch.Part, count: int) -> None:
    """With relayouts and their gradients, which need no process to hold it all."""
    launch.all_hold(job_part.ended, count)


# --------------------------------------------------------------------- call_with_layout


X = np.arange(64, dtype=np.float32).reshape(8, 8)


@pytest.mark.parametrize("kinds", ["auto", "explicit"])
def test_constructors(kinds: Any) -> None:
    """What is not an array stays as it is: shapes, dtypes, functions."""
    mesh, dims = grid(kinds), (("data",), ("model",))
    layout, call = flm.TensorLayout(dims, mesh), flm.dtensor.call_with_layout
    zeros = call(jnp.zeros, layout, shape=(8, 8), dtype=jnp.int32)
    assert_lies(zeros, dims, mesh, np.zeros((8, 8), np.int32))
    make, key = nnx.initializers.uniform(), jax.random.key(0)
    wanted = jax.jit(lambda key: make(key, (8, 8)))(key)
    assert_lies(call(make, layout, key, (8, 8)), dims, mesh, wanted)
    assert_lies(call(jnp.square, layout, X), dims, mesh, X * X)


def test_trees(mesh: flm.DeviceMesh) -> None:
    """Every result has the layout."""
    rows = flm.TensorLayout(("data", ...), mesh)
    made = flm.dtensor.call_with_layout(lambda x: {"a": x, "b": [x[0], x]}, rows, X)
    assert_lies(made["a"], (("data",), ()), mesh, X)
    assert_lies(made["b"][0], (("data",),), mesh, X[0])


def test_an_abstract_mesh(abstract_mesh: flm.DeviceMesh) -> None:
    layout = flm.TensorLayout(("data",), abstract_mesh)
    with pytest.raises(flm.errors.MeshError, match="has no devices; use a concrete"):
        flm.dtensor.call_with_layout(jnp.ones, layout, (8,))


def test_inside_jit(mesh: flm.DeviceMesh) -> None:
    layout, call = flm.TensorLayout((None, "model"), mesh), flm.dtensor.call_with_layout
    squared = jax.jit(lambda x: call(jnp.square, layout, x))(X)
    assert_lies(squared, ((), ("model",)), mesh, X * X)
