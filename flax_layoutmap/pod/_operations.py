"""What single operations of a laid-out module say, through jaxlib's bindings."""

import collections
from collections.abc import Sequence
from math import prod
from typing import Any

from flax_layoutmap.pod._attributes import Attributes, AxisRef, Dims
from flax_layoutmap.pod._records import Kind
from flax_layoutmap.pod._sources import source_line
from flax_layoutmap.pod._values import Value

MOVING: dict[str, Kind] = {
    "sdy.all_gather": "all-gather",
    "sdy.all_to_all": "all-to-all",
    "sdy.collective_permute": "collective-permute",
}
RAGGED_DOT = "chlo.ragged_dot"
ENDS = ("func.return", "stablehlo.return", "sdy.return")


def last_of(block: Any) -> Any:
    """The operation that ends a block."""
    operations = block.operations
    return operations[len(operations) - 1].operation


def maker_of(value: Any) -> Any:
    """The operation that makes a value; None for an argument of a block."""
    return getattr(value.owner, "operation", None)


def location_of(op: Any, attributes: Attributes) -> str:
    """Where a collective comes from: of one that moves a value, where that is used.

    The pass that adds it says where the value was made.
    """
    if op.name in MOVING:
        for use in op.results[0].uses:
            user = use.owner.operation
            if user.name not in (*MOVING, *ENDS, "sdy.all_slice"):
                text = attributes.location(user)
                if source_line(text) is not None:
                    return text
    return attributes.location(op)


def is_shared(result: Any) -> bool:
    """Whether a value is used more than once."""
    uses = iter(result.uses)
    next(uses, None)
    return next(uses, None) is not None


def changed_axes(name: str, before: Dims, after: Dims) -> tuple[AxisRef, ...]:
    """The axes that a value changes, or loses, from one sharding to another."""
    if name == "sdy.all_gather":
        left = collections.Counter(axis for axes in after for axis in axes)
        gone = collections.Counter(axis for axes in before for axis in axes) - left
        return tuple(gone.elements())
    pairs = list(zip(before, after, strict=True))
    moved = [axis for old, new in pairs for axis in old if axis not in new]
    if not moved:  # the same axes in another order
        moved = [axis for old, new in pairs if old != new for axis in old]
    return tuple(dict.fromkeys(moved))


def multiplications(
    op: Any, left: Value, right: Value, result: Value
) -> tuple[int, int]:
    """Multiplications of a matrix product or a convolution, each with its addition.

    Args:
        op: the operation.
        left: its first operand.
        right: its second.
        result: what it makes.

    Returns:
        Those of one device; those of all if none does another's work.
    """
    from jaxlib.mlir.dialects import stablehlo

    sides = (
        (left.local_shape, right.local_shape, result.local_shape),
        (left.shape, right.shape, result.shape),
    )
    if op.name == RAGGED_DOT:
        dims = _rows_of(op, len(right.shape))
        local, whole = (prod(a) * prod(b[dim] for dim in dims) for a, b, _ in sides)
    elif op.name == "stablehlo.convolution":
        numbers = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
        out = max(1, right.local_shape[numbers.kernel_output_feature_dimension])
        local, whole = (prod(c) * (prod(b) // out) for _, b, c in sides)
    else:
        numbers = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
        dims = numbers.lhs_contracting_dimensions
        local, whole = (prod(c) * prod(a[dim] for dim in dims) for a, _, c in sides)
    return local, whole


def _rows_of(op: Any, ndim: int) -> Sequence[int]:
    """The dims of the second operand of a ragged product that only it has.

    Every row of the first operand is in one group.
    """
    from jaxlib.mlir.dialects import chlo

    numbers = chlo.RaggedDotDimensionNumbers(
        op.attributes["ragged_dot_dimension_numbers"]
    )
    shared = {
        *numbers.rhs_batching_dimensions,
        *numbers.rhs_contracting_dimensions,
        *numbers.rhs_group_dimensions,
    }
    return [dim for dim in range(ndim) if dim not in shared]
