"""Elements that each device receives, compared with sets and JAX's own indices."""

import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import flax_layoutmap as flm
from flax_layoutmap._core.grid import Placement, received

Elements = list[set[tuple[int, ...]]]


def elements(shape: tuple[int, ...], placed: Placement) -> Elements:
    """The elements that each device holds, found one by one."""
    held: Elements = []
    for place in itertools.product(*map(range, placed.mesh_shape)):
        ranges = []
        for size, axes in zip(shape, placed.dims, strict=True):
            at, count = 0, 1
            for axis in axes:
                at = at * placed.mesh_shape[axis] + place[axis]
                count *= placed.mesh_shape[axis]
            part = size // count
            ranges.append(range(at * part, (at + 1) * part))
        held.append(set(itertools.product(*ranges)))
    return held


@st.composite
def placements(draw: st.DrawFn, rank: int) -> Placement:
    mesh_shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3]), max_size=3)))
    axes = draw(st.permutations(range(len(mesh_shape))))
    dims: list[list[int]] = [[] for _ in range(rank)]
    for axis in axes:
        dim = draw(st.integers(-1, rank - 1))
        if dim >= 0:
            dims[dim].append(axis)
    return Placement(mesh_shape, tuple(map(tuple, dims)))


@given(st.data(), st.integers(0, 3))
def test_it_is_what_is_not_there_yet(data: st.DataObject, rank: int) -> None:
    before, after = data.draw(placements(rank)), data.draw(placements(rank))
    # Every dim divides by whatever lies on it, of both meshes.
    shape = tuple(
        math.lcm(
            *(
                math.prod(placed.mesh_shape[axis] for axis in placed.dims[dim])
                for placed in (before, after)
            )
        )
        for dim in range(rank)
    )
    old, new = elements(shape, before), elements(shape, after)
    same = data.draw(
        st.none()
        | st.lists(st.integers(-1, len(old) - 1), min_size=len(new), max_size=len(new))
    )
    where = same or [at if at < len(old) else -1 for at in range(len(new))]
    expected = [
        len(wanted - (old[at] if at >= 0 else set()))
        for wanted, at in zip(new, where, strict=True)
    ]
    assert received(shape, before, after, same).tolist() == expected


SPECS = [
    (),
    ("data",),
    (None, "model"),
    (("data", "model"),),
    (("model", "data"), None),
]


@pytest.mark.parametrize("before", SPECS)
@pytest.mark.parametrize("after", SPECS)
def test_it_agrees_with_the_indices_of_jax(
    mesh: flm.DeviceMesh, before: tuple[object, ...], after: tuple[object, ...]
) -> None:
    shape = (16, 8)

    def masks(spec: tuple[object, ...]) -> dict[object, np.ndarray]:
        jax_mesh = mesh.jax_mesh
        assert isinstance(jax_mesh, jax.sharding.Mesh)
        sharding = NamedSharding(jax_mesh, PartitionSpec(*spec))
        found: dict[object, np.ndarray] = {}
        for device, index in sharding.devices_indices_map(shape).items():
            found[device] = np.zeros(shape, bool)
            found[device][index] = True
        return found

    def placed(spec: tuple[object, ...]) -> Placement:
        layout = flm.TensorLayout(PartitionSpec(*spec), mesh)
        dims = tuple(
            tuple(map(mesh.axis_names.index, axes)) for axes in layout.dims(len(shape))
        )
        return Placement(mesh.shape, dims)

    old, new = masks(before), masks(after)
    counts = received(shape, placed(before), placed(after)).tolist()
    assert counts == [int((new[d] & ~old[d]).sum()) for d in mesh.devices.flat]


def test_nothing_moves_where_nothing_changes() -> None:
    placed = Placement((2, 4), ((1,), (0,)))
    assert received((8, 8), placed, placed).tolist() == [0] * 8


def test_a_device_that_is_new_lacks_everything() -> None:
    one, two = Placement((1,), ((),)), Placement((2,), ((),))
    assert received((6,), one, two).tolist() == [0, 6]
    assert received((6,), two, one).tolist() == [0]


def test_an_array_without_elements() -> None:
    placed = Placement((2,), ((0,), ()))
    assert received((0, 4), placed, Placement((2,), ((), (0,)))).tolist() == [0, 0]
