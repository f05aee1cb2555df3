"""Single operations of a module that Shardy has laid out."""

import collections
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from flax_layoutmap.pod._hlo_groups import Grid
from flax_layoutmap.pod._mlir import Array, Attributes, AxisRef, Dims, source_line
from flax_layoutmap.pod._records import Kind

MOVES: dict[str, Kind] = {
    "sdy.all_gather": "all-gather",
    "sdy.all_to_all": "all-to-all",
    "sdy.collective_permute": "collective-permute",
}
BARRIER = "stablehlo.optimization_barrier"
# What copies or converts elements, or takes some, and changes none of them.
COPIES = frozenset(
    f"stablehlo.{name}"
    for name in """
    transpose reshape convert slice dynamic_slice optimization_barrier
    """.split()
)
# Through these an update reaches a parameter, and from them a gradient is found.
UPDATES = COPIES.union(
    MOVES,
    ("sdy.all_slice", "sdy.sharding_constraint", "sdy.reshard"),
    (
        f"stablehlo.{name}"
        for name in """
        abs add clamp concatenate custom_call divide dynamic_update_slice maximum
        minimum multiply negate power rsqrt select sign sqrt subtract while
        """.split()
    ),
)
RAGGED_DOT = "chlo.ragged_dot"
_ENDS = ("func.return", "stablehlo.return", "sdy.return")


def last_of(block: Any) -> Any:
    """The operation that ends a block."""
    operations = block.operations
    return operations[len(operations) - 1].operation


def maker_of(value: Any) -> Any:
    """The operation that makes a value; None for an argument of a block."""
    return getattr(value.owner, "operation", None)


def copied_operand(value: Any, op: Any) -> Any:
    """The operand that a result of an operation is a copy of."""
    at = list(op.results).index(value) if op.name == BARRIER else 0
    return op.operands[at]


def location_of(op: Any, attributes: Attributes) -> str:
    """Where a collective comes from: of one that moves a value, where that is used.

    The pass that adds it says where the value was made.
    """
    if op.name in MOVES:
        for use in op.results[0].uses:
            user = use.owner.operation
            if user.name not in (*MOVES, *_ENDS, "sdy.all_slice"):
                text = attributes.location(user)
                if source_line(text) is not None:
                    return text
    return attributes.location(op)


def is_shared(result: Any) -> bool:
    """Whether a value is used more than once."""
    uses = iter(result.uses)
    next(uses, None)
    return next(uses, None) is not None


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
            elif user.name in _LOOKED_THROUGH:
                todo.append(user.results[0])
            else:
                return ()
        if not users:
            return ()
    return left


def changed_axes(name: str, before: Dims, after: Dims) -> tuple[AxisRef, ...]:
    """The axes that a value changes, or loses, from one sharding to another."""
    if name == "sdy.all_gather":
        left = collections.Counter(axis for axes in after for axis in axes)
        gone = collections.Counter(axis for axes in before for axis in axes) - left
        return tuple(gone.elements())
    pairs = list(zip(before, after, strict=True))
    if name == "sdy.collective_permute":
        # Devices with the same part before and after are distinguished by other axes.
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


def multiplications(op: Any, of: Callable[[Any], Array]) -> tuple[int, int]:
    """Multiplications of a matrix product or a convolution, each with its addition.

    Args:
        op: the operation.
        of: gives the array that an operand or a result is.

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


_CONSTANTS = ("stablehlo.constant", "sdy.constant")


def trip_count(condition: Any, body: Any, operands: Any) -> int | None:
    """The trip count of a `stablehlo.while`; None if unknown.

    Args:
        condition: the block that says whether to go on; `i < n`, as scan writes it.
        body: the block that is repeated; it adds a constant to `i`.
        operands: what the loop begins with.
    """
    compare = maker_of(last_of(condition).operands[0])
    if compare is None or compare.name != "stablehlo.compare":
        return None
    if "LT" not in str(compare.attributes["comparison_direction"]):
        return None
    at = _position(condition, compare.operands[0])
    bound = _number(compare.operands[1], condition, operands)
    if at is None or bound is None:
        return None
    start = constant_of(operands[at])
    step = _step(body, at)
    if start is None or not step:
        return None
    return max(0, -(-(bound - start) // step))


def _step(body: Any, at: int) -> int | None:
    """What the body adds to its argument number `at`."""
    after = maker_of(last_of(body).operands[at])
    if after is None or after.name != "stablehlo.add":
        return None
    own = body.arguments[at]
    for one, other in (after.operands, tuple(after.operands)[::-1]):
        if one == own:
            return constant_of(other)
    return None


def _number(value: Any, block: Any, operands: Any) -> int | None:
    at = _position(block, value)
    return constant_of(value) if at is None else constant_of(operands[at])


def _position(block: Any, value: Any) -> int | None:
    for at, argument in enumerate(block.arguments):
        if argument == value:
            return at
    return None


def constant_of(value: Any) -> int | None:
    """A whole number that stands in the program; None for others."""
    maker = maker_of(value)
    if getattr(maker, "name", None) not in _CONSTANTS:
        return None
    from jaxlib.mlir import ir

    numbers = maker.attributes["value"]
    if not isinstance(numbers, ir.DenseIntElementsAttr) or len(numbers) != 1:
        return None
    return int(numbers[0])


_KINDS: dict[str, Kind] = {
    "stablehlo.all_reduce": "all-reduce",
    "stablehlo.all_gather": "all-gather",
    "stablehlo.reduce_scatter": "reduce-scatter",
    "stablehlo.all_to_all": "all-to-all",
    "stablehlo.collective_permute": "collective-permute",
}
OWN = frozenset({*_KINDS, "stablehlo.collective_broadcast"})
# A custom call: how many rows go where is in the data.
RAGGED = "ragged_all_to_all"
_KINDS[RAGGED] = "all-to-all"
# Custom calls without matrix products, which a plan has nothing to say of.
_PLAIN = ("mhlo.topk", "Sharding", "annotate_device_placement", "xla.sdy")


def operands_of(op: Any, attributes: Attributes) -> tuple[list[Dims], int]:
    """How the body of a shard_map sees its operands.

    Args:
        op: the manual computation.
        attributes: reads it.

    Returns:
        The axes of each dim that are left to the compiler; and into how many parts the
        manual axes cut the work, if each that shards an operand cuts all of it.
    """
    manual = {name for name, _ in attributes.axes_in(op.attributes["manual_axes"])}
    given = attributes.per_value(op, "in_shardings")
    left = [
        tuple(tuple(axis for axis in axes if axis[0] not in manual) for axes in dims)
        for dims in given
    ]
    cuts = {axis for dims in given for axes in dims for axis in axes}
    return left, prod(size for name, size in cuts if name in manual)


def target_of(op: Any) -> str:
    """What a custom call calls; the name of another operation."""
    if "call_target_name" in op.attributes:
        return str(op.attributes["call_target_name"]).strip('"')
    return op.name


def hides_work(op: Any) -> bool:
    """Whether an operation of another compiler may do more than its results show."""
    if op.name == "stablehlo.custom_call":
        return not target_of(op).startswith(_PLAIN)
    shapes = {
        str(getattr(one.type, "shape", ())) for one in (*op.operands, *op.results)
    }
    return len(op.regions) > 0 or len(shapes) > 1


def manual_collective(
    name: str, op: Any, sizes: Mapping[str, int]
) -> tuple[Kind | None, tuple[AxisRef, ...]]:
    """What a collective is, and over which mesh axes it runs.

    Args:
        name: name of the operation, or of what it calls.
        op: the operation.
        sizes: axis name → size, in the order of the mesh.

    Returns:
        None and no axes where its groups of devices are no axes of the mesh.
    """
    kind = _KINDS.get(name)
    wanted = "source_target_pairs" if kind == "collective-permute" else "replica_groups"
    given = op.attributes
    if name == RAGGED:
        given = given["backend_config"] if "backend_config" in given else {}
    if kind is None or wanted not in given:
        return None, ()
    groups = _numbers(given[wanted])
    if groups is None or groups.ndim != 2 or groups.size == 0:
        return None, ()
    mesh = Grid(tuple(sizes), tuple(sizes.values()), (), prod(sizes.values()))
    axes = tuple((name, sizes[name]) for name in mesh.axes(groups) or ())
    if kind != "collective-permute" and prod(s for _, s in axes) != groups.shape[1]:
        return None, ()
    return kind, axes


def _numbers(attribute: Any) -> np.ndarray | None:
    from jaxlib.mlir import ir

    try:
        return np.array(ir.DenseIntElementsAttr(attribute))
    except ValueError:  # groups in another spelling
        return None
