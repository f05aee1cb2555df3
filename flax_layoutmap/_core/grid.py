"""Shards and their offsets in a mesh, and elements moved between two layouts."""

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


def shard_offsets(shape: Sequence[int], dims: Sequence[Sequence[int]]) -> np.ndarray:
    """The position in each dim of the shard at each place of a mesh, row-major.

    `dims` has, per dim of the array, the positions of the mesh axes that shard it; the
    first of them varies slowest.

    >>> shard_offsets((3, 2), [(0,), ()]).tolist()
    [[0, 0], [0, 0], [1, 0], [1, 0], [2, 0], [2, 0]]
    """
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

    def shard(self, shape: Shape) -> np.ndarray:
        """The shard shape of an array of this shape."""
        parts = [
            math.prod(self.mesh_shape[axis] for axis in axes) for axes in self.dims
        ]
        return np.array(shape, np.int64) // np.array(parts, np.int64)


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
    old, new = before.shard(shape), after.shard(shape)
    held = shard_offsets(before.mesh_shape, before.dims) * old
    wanted = shard_offsets(after.mesh_shape, after.dims) * new
    if same is None:
        same = [number if number < len(held) else -1 for number in range(len(wanted))]
    where = np.asarray(same)
    ends = np.minimum(wanted + new, held[where] + old)
    kept = np.maximum(ends - np.maximum(wanted, held[where]), 0).prod(axis=1)
    kept[where < 0] = 0
    return new.prod() - kept
