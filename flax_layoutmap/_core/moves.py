"""Which part of an array each device has to be sent when its layout changes."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from flax_layoutmap._core.grid import strides_of

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """How one array lies on a mesh, as plain numbers.

    Attributes:
        mesh_shape: sizes of the mesh axes.
        dims: per dim of the array, the positions of the mesh axes that it lies on.
    """

    mesh_shape: Shape
    dims: tuple[tuple[int, ...], ...]


def received(
    shape: Shape,
    before: Placement,
    after: Placement,
    same: Sequence[int] | None = None,
) -> np.ndarray:
    """How many elements each device lacks of what it is to hold.

    Every device keeps what its old and its new shard have in common.

    Args:
        shape: the global shape.
        before: how the array lies.
        after: how it is to lie; every dim divides by the axes that it lies on.
        same: per device of the new mesh, row by row, which device of the old one it
            is, or -1; None takes those of equal number.

    Returns:
        One whole number per device of the new mesh.

    >>> rows, columns = Placement((2,), ((0,), ())), Placement((2,), ((), (0,)))
    >>> received((4, 4), rows, columns).tolist()
    [4, 4]
    """
    held, wanted = _starts(shape, before), _starts(shape, after)
    if same is None:
        count = len(held)
        same = [at if at < count else -1 for at in range(len(wanted))]
    where = np.asarray(same)
    old, new = _shard(shape, before), _shard(shape, after)
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


def _starts(shape: Shape, placed: Placement) -> np.ndarray:
    """The index of the first element of each device's shard, per dim."""
    count = math.prod(placed.mesh_shape)
    coords = np.indices(placed.mesh_shape).reshape(len(placed.mesh_shape), count)
    starts = np.zeros((count, len(shape)), np.int64)
    shard = _shard(shape, placed)
    for dim, axes in enumerate(placed.dims):
        strides = strides_of([placed.mesh_shape[axis] for axis in axes])
        for axis, stride in zip(axes, strides, strict=True):
            starts[:, dim] += coords[axis] * stride * shard[dim]
    return starts
