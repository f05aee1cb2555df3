"""Elements that each device receives, compared with sets."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from flax_layoutmap._core.axes import Placement, received

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
    # Every dim divides by the mesh axes on it, of both meshes.
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
