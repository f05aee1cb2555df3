"""Whole-number arithmetic of grids: strides, coordinates, which shard lies where."""

import itertools
import operator
from collections.abc import Sequence
from typing import Any


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
    """How far apart neighbours along each axis are, counted row by row.

    >>> strides_of((2, 4, 2))
    (8, 2, 1)
    """
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if shape else ()


def coords_of(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The coordinates of the place with this number, counted row by row."""
    return tuple(
        index // stride % size
        for stride, size in zip(strides_of(shape), shape, strict=True)
    )


def index_of(coords: Sequence[int], shape: Sequence[int]) -> int:
    """The number of the place with these coordinates, counted row by row."""
    return sum(
        at * stride for at, stride in zip(coords, strides_of(shape), strict=True)
    )


def shard_offsets(
    shape: Sequence[int], dims: Sequence[Sequence[int]]
) -> list[tuple[int, ...]]:
    """Which shard of an array lies at each place of a mesh.

    Args:
        shape: sizes of the mesh axes.
        dims: per dim of the array, the positions of the mesh axes that it lies on;
            the first of them changes most slowly.

    Returns:
        Per place of the mesh, row by row, the position of its shard in each dim.

    >>> shard_offsets((3, 2), [(0,), ()])
    [(0, 0), (0, 0), (1, 0), (1, 0), (2, 0), (2, 0)]
    """
    sizes = [[shape[axis] for axis in axes] for axes in dims]
    return [
        tuple(
            index_of([place[axis] for axis in axes], of)
            for axes, of in zip(dims, sizes, strict=True)
        )
        for place in itertools.product(*map(range, shape))
    ]
