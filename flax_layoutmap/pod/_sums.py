"""All-reduces in a laid-out module: which of them are one, and which scatter."""

import math
from collections.abc import Sequence
from typing import Any

from flax_layoutmap.pod._attributes import Attributes, AxisRef
from flax_layoutmap.pod._dataflow import Dataflow
from flax_layoutmap.pod._operations import maker_of
from flax_layoutmap.pod._spread import Found
from flax_layoutmap.pod._values import parts

# Between a sum and the slices that are taken of it, the compiler moves these behind.
_LOOKED_THROUGH = ("stablehlo.transpose", "stablehlo.convert", "stablehlo.reshape")


def scattered(
    op: Any, axes: Sequence[AxisRef], attributes: Attributes
) -> tuple[AxisRef, ...]:
    """The axes over which every user takes its own slice of the sum."""
    left = tuple(axes)
    todo = [op.results[0]]
    for value in todo:
        users = [use.owner.operation for use in value.uses]
        for user in users:
            if user.name == "sdy.all_slice":
                sliced = attributes.axes_in(user.attributes["slicing_axes"])
                left = tuple(axis for axis in left if axis in sliced)
            elif user.name in _LOOKED_THROUGH and _keeps_dims(user, left, attributes):
                todo.append(user.results[0])
            else:
                return ()
        if not users:
            return ()
    return left


def _keeps_dims(op: Any, axes: Sequence[AxisRef], attributes: Attributes) -> bool:
    """Whether the dims that are sliced after an operation are dims before it, too."""
    if op.name != "stablehlo.reshape":
        return True
    ends = op.operands[0], op.results[0]
    before, after = (attributes.type_of(one)[0] for one in ends)
    same = {(math.prod(before[:dim]), size) for dim, size in enumerate(before)}
    for use in op.results[0].uses:
        user = use.owner.operation
        if user.name != "sdy.all_slice":
            return False
        for dim, own in enumerate(attributes.of(user.attributes["out_sharding"])):
            if not set(axes).isdisjoint(own):
                if (math.prod(after[:dim]), after[dim]) not in same:
                    return False
    return True


def partial_results(op: Any, values: Dataflow) -> tuple[int, ...] | None:
    """The shape in which XLA gathers what each device found, instead of a sum.

    So it does where several arrays are reduced together (`argmax`: the largest element
    and its place); each device reduces what it has, and then what all have.
    """
    maker = maker_of(op.operands[0])
    if maker is None or maker.name != "stablehlo.reduce" or len(maker.results) == 1:
        return None
    whole, gone = values.of(maker.operands[0]), set(maker.attributes["dimensions"])
    return tuple(
        parts(axes) if dim in gone else size
        for dim, (size, axes) in enumerate(
            zip(whole.local_shape, whole.dims, strict=True)
        )
    )


def added(
    found: Sequence[Found], first: tuple[int, ...], second: tuple[int, ...]
) -> tuple[int, ...]:
    """The sums in a sum; those of the second become one with those of the first.

    Args:
        found: all collectives.
        first: positions of the sums in one value.
        second: of those in the value that is added.
    """
    if not first or not second:
        return ()  # with something else between them, the compiler adds them apart
    if first == second or len(first) != len(second):
        return first
    pairs = [(found[a], found[b]) for a, b in zip(first, second, strict=True)]
    if any((a.kind, a.axes, a.scope) != (b.kind, b.axes, b.scope) for a, b in pairs):
        return first
    # Such as those of a head that is the embedding, too.
    if any(a.of_rows != b.of_rows for a, b in pairs):
        return (*first, *second)
    for at, (_, other) in zip(first, pairs, strict=True):
        other.into = at
    return first


def gathered_from(op: Any, values: Dataflow) -> int | None:
    """The argument from which a `gather` took what is summed here: an embedding."""
    maker = maker_of(op.operands[0])
    if maker is None or maker.name != "stablehlo.gather":
        return None
    return values.of(maker.operands[0]).leaf
