"""Slices along sharded dims that a program takes, or writes, at a place it computes.

Shardy leaves a write as it is, and moves what is sliced to other dims; the partitioner
of XLA gathers either whole along those dims. It writes a slice where it is if that has
one element along the dim, or lies in the part of one device at a constant place.
"""

from collections.abc import Iterator
from typing import Any

from flax_layoutmap.pod._attributes import Attributes, Dims
from flax_layoutmap.pod._dataflow import Dataflow
from flax_layoutmap.pod._loops import constant_of
from flax_layoutmap.pod._operations import MOVING, is_asked, maker_of
from flax_layoutmap.pod._values import Value, parts

WRITE, TAKE = "stablehlo.dynamic_update_slice", "stablehlo.dynamic_slice"
# A custom call: the largest are a slice of what is sorted.
TOP_K = "mhlo.topk"


def written_whole(op: Any, dims: Dims, attributes: Attributes) -> list[int]:
    """The dims along which XLA gathers what a slice is written into.

    Args:
        op: the write.
        dims: the axes of each dim of its result.
        attributes: reads it.
    """
    shape, sizes = (attributes.type_of(one)[0] for one in op.operands[:2])
    cut = _sliced(shape, sizes, dims)
    for dim in cut:
        if sizes[dim] == 1:
            continue
        start = constant_of(op.operands[2 + dim])
        part = -(-shape[dim] // parts(dims[dim]))
        if start is None or start // part != (start + sizes[dim] - 1) // part:
            return cut
    return []


def gathered(value: Value, dims: list[int]) -> Iterator[Value]:
    """A value after each gather along one of some dims, the last dim first."""
    left = list(value.dims)
    for dim in reversed(dims):
        left[dim] = ()
        yield value.laid_out(tuple(left))


def moved_to_slice(op: Any, values: Dataflow) -> Any:
    """What is moved to take a slice of it along a dim that it was sharded along.

    Args:
        op: the operation that takes the slice.
        values: the values of the program.

    Returns:
        What it is before it is moved; None where nothing is.
    """
    value, taken = op.operands[0], values.attributes.type_of(op.results[0])[0]
    while True:
        maker = maker_of(value)
        if maker is None or maker.name not in MOVING:
            return None
        # What is moved before a loop is moved once, and sliced in it as it is then.
        if is_asked(maker, values.attributes) or maker.block != op.block:
            return None
        value = maker.operands[0]
        known = values.of(value)
        if _sliced(known.shape, taken, known.dims):
            return value


def _sliced(whole: tuple[int, ...], part: tuple[int, ...], dims: Dims) -> list[int]:
    """The sharded dims along which an array is a part of another."""
    return [
        dim
        for dim, axes in enumerate(dims)
        if whole[dim] != part[dim] and parts(axes) > 1
    ]
