"""What single operations of a laid-out module say, through jaxlib's bindings."""

import collections
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from flax_layoutmap.pod._attributes import Attributes, AxisRef, Dims
from flax_layoutmap.pod._records import Kind
from flax_layoutmap.pod._sources import operation_name, source_line
from flax_layoutmap.pod._values import Value

MOVING: dict[str, Kind] = {
    "sdy.all_gather": "all-gather",
    "sdy.all_to_all": "all-to-all",
    "sdy.collective_permute": "collective-permute",
}
RAGGED_DOT = "chlo.ragged_dot"
# What somebody asks for is done before a lookup or a slice, or after it.
_ASKED = "sharding_constraint"
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


def is_asked(op: Any, attributes: Attributes) -> bool:
    """Whether a value is moved because a constraint asks for it."""
    return operation_name(attributes.location(op)) == _ASKED


def users_of(op: Any) -> list[Any]:
    """The operations that use the first result of an operation."""
    return [use.owner.operation for use in op.results[0].uses]


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
    if name == "sdy.collective_permute":
        # Devices that have the same part before and after are told apart by others.
        parts = [_without_equal_start(old, new) for old, new in pairs]
        return tuple(dict.fromkeys(axis for part in parts for axis in part))
    moved = [axis for old, new in pairs for axis in old if axis not in new]
    if not moved:  # the same axes in another order
        moved = [axis for old, new in pairs if old != new for axis in old]
    return tuple(dict.fromkeys(moved))


def _without_equal_start(
    old: Sequence[AxisRef], new: Sequence[AxisRef]
) -> list[AxisRef]:
    """The axes of a dim before and after, from the first that differs."""
    equal = 0
    while equal < min(len(old), len(new)) and old[equal] == new[equal]:
        equal += 1
    return [*old[equal:], *new[equal:]]


def multiplications(op: Any, of: Callable[[Any], Value]) -> tuple[int, int]:
    """Multiplications of a matrix product or a convolution, each with its addition.

    Args:
        op: the operation.
        of: the value of an operand or a result, made when it is asked for.

    Returns:
        Those of one device; those of all if none does another's work.
    """
    from jaxlib.mlir.dialects import stablehlo

    if op.name == "stablehlo.dot_general":
        left, result = of(op.operands[0]), of(op.results[0])
        numbers = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
        dims, shape = numbers.lhs_contracting_dimensions, left.local_shape
        local = prod(result.local_shape) * prod(shape[dim] for dim in dims)
        return local, prod(result.shape) * prod(left.shape[dim] for dim in dims)
    left, right, result = map(of, (*op.operands[:2], op.results[0]))
    if op.name == RAGGED_DOT:
        dims, shape = _rows_of(op, len(right.shape)), right.local_shape
        local = prod(left.local_shape) * prod(shape[dim] for dim in dims)
        return local, prod(left.shape) * prod(right.shape[dim] for dim in dims)
    numbers = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    features, shape = numbers.kernel_output_feature_dimension, right.local_shape
    local = prod(result.local_shape) * (prod(shape) // max(1, shape[features]))
    shape = right.shape
    return local, prod(result.shape) * (prod(shape) // max(1, shape[features]))


def in_groups(op: Any) -> bool:
    """Whether a convolution is in groups that XLA's partitioner does in its own way.

    So it does where a kernel has several channels for each group, and for the gradients
    of all kernels in groups.
    """
    from jaxlib.mlir.dialects import stablehlo

    batches, features = groups_of(op)
    numbers = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    kernel = op.operands[1].type.shape
    wide = kernel[numbers.kernel_input_feature_dimension] > 1
    return batches > 1 or (features > 1 and wide)


def groups_of(op: Any) -> tuple[int, int]:
    """The groups of a convolution: of its batch, of its features."""
    from jaxlib.mlir import ir

    batches = ir.IntegerAttr(op.attributes["batch_group_count"])
    features = ir.IntegerAttr(op.attributes["feature_group_count"])
    return batches.value, features.value


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
