"""Integer arithmetic of grids: coordinates, shards, elements moved between layouts."""

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

Shape = tuple[int, ...]


def whole(value: Any) -> int | None:
    """The whole number that this is, or None.

    >>> whole(3), whole(3.0), whole("3")
    (3, None, None)
    """
    try:
        return operator.index(value)
    except TypeError:
        return None


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """The distance of neighbours along each axis, row-major.

    >>> strides_of((2, 4, 2))
    (8, 2, 1)
    """
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if shape else ()


def coords_of(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The coordinates of the place with this number, row-major."""
    return tuple(
        index // stride % size
        for stride, size in zip(strides_of(shape), shape, strict=True)
    )


def index_of(coords: Sequence[int], shape: Sequence[int]) -> int:
    """The number of the place with these coordinates, row-major."""
    return sum(
        at * stride for at, stride in zip(coords, strides_of(shape), strict=True)
    )


def shard_offsets(
    shape: Sequence[int], dims: Sequence[Sequence[int]]
) -> list[tuple[int, ...]]:
    """The position in each dim of the shard at each place of a mesh, row-major.

    `dims` has, per dim of the array, the positions of the mesh axes that shard it; the
    first of them varies slowest.

    >>> shard_offsets((3, 2), [(0,), ()])
    [(0, 0), (0, 0), (1, 0), (1, 0), (2, 0), (2, 0)]
    """
    return [tuple(place) for place in _offsets(shape, dims).tolist()]


def _offsets(shape: Sequence[int], dims: Sequence[Sequence[int]]) -> np.ndarray:
    """`shard_offsets`, a row for each place of the mesh."""
    coords = np.indices(shape).reshape(len(shape), math.prod(shape))
    offsets = np.zeros((math.prod(shape), len(dims)), np.int64)
    for dim, axes in enumerate(dims):
        for axis in axes:
            offsets[:, dim] = offsets[:, dim] * shape[axis] + coords[axis]
    return offsets


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """How an array is sharded: the mesh axes, by position, that shard each dim."""

    mesh_shape: Shape
    dims: tuple[tuple[int, ...], ...]


def received(
    shape: Shape,
    before: Placement,
    after: Placement,
    same: Sequence[int] | None = None,
) -> np.ndarray:
    """How many elements each device receives when the layout changes.

    Every device keeps what its old and its new shard have in common. `same` has, per
    device of the new mesh, its number in the old mesh, or -1; None: equal numbers are
    the same device.

    >>> rows, columns = Placement((2,), ((0,), ())), Placement((2,), ((), (0,)))
    >>> received((4, 4), rows, columns).tolist()
    [4, 4]
    """
    old, new = _shard(shape, before), _shard(shape, after)
    held = _offsets(before.mesh_shape, before.dims) * np.array(old, np.int64)
    wanted = _offsets(after.mesh_shape, after.dims) * np.array(new, np.int64)
    if same is None:
        count = len(held)
        same = [at if at < count else -1 for at in range(len(wanted))]
    where = np.asarray(same)
    kept = np.ones(len(wanted), np.int64)
    for dim in range(len(shape)):
        starts, others = wanted[:, dim], held[where, dim]
        ends = np.minimum(starts + new[dim], others + old[dim])
        kept *= np.maximum(ends - np.maximum(starts, others), 0)
    kept[where < 0] = 0
    return math.prod(new) - kept


def _shard(shape: Shape, placed: Placement) -> Shape:
    return tuple(
        size // math.prod(placed.mesh_shape[axis] for axis in axes)
        for size, axes in zip(shape, placed.dims, strict=True)
    )
