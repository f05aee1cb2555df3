"""All-reduces in a laid-out module: which of them are one, and which scatter."""

from collections.abc import Sequence
from typing import Any

from flax_layoutmap.pod._attributes import Attributes, AxisRef
from flax_layoutmap.pod._dataflow import Dataflow
from flax_layoutmap.pod._operations import maker_of
from flax_layoutmap.pod._spread import Found


def scattered(
    op: Any, axes: Sequence[AxisRef], attributes: Attributes
) -> tuple[AxisRef, ...]:
    """The axes over which every user takes its own slice of the sum."""
    users = [use.owner for use in op.results[0].uses]
    if not users or any(user.operation.name != "sdy.all_slice" for user in users):
        return ()
    sliced = attributes.axes_in(users[0].operation.attributes["slicing_axes"])
    return tuple(axis for axis in axes if axis in sliced)


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
    for at, (_, other) in zip(first, pairs, strict=True):
        other.into = at
    return first


def gathered_from(op: Any, values: Dataflow) -> int | None:
    """The argument from which a `gather` took what is summed here: an embedding."""
    maker = maker_of(op.operands[0])
    if maker is None or maker.name != "stablehlo.gather":
        return None
    return values.of(maker.operands[0]).leaf
