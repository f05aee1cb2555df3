"""Single operations of a module that Shardy has laid out."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from flax_layoutmap.pod._hlo_groups import Grid
from flax_layoutmap.pod._mlir import (
    Array,
    Attributes,
    AxisRef,
    Dims,
    maker_of,
    source_line,
)
from flax_layoutmap.pod._records import Kind

MOVES: dict[str, Kind] = {
    "sdy.all_gather": "all-gather",
    "sdy.all_to_all": "all-to-all",
    "sdy.collective_permute": "collective-permute",
}
# The attribute with the axes that move.
_AXES_OF = {"sdy.all_gather": "gathering_axes", "sdy.all_to_all": "params"}
BARRIER = "stablehlo.optimization_barrier"
# Operations that copy, convert or select elements.
COPIES = frozenset(
    f"stablehlo.{name}"
    for name in """
    transpose reshape convert slice dynamic_slice optimization_barrier
    """.split()
)
# Operations on arrays of one shape, element by element, as optimizers have them.
ELEMENTWISE = frozenset(
    f"stablehlo.{name}"
    for name in """
    abs add clamp divide maximum minimum multiply negate power rsqrt select sign sqrt
    subtract
    """.split()
)
# Operations of optimizers: a new parameter is computed from its gradient by these.
UPDATES = COPIES.union(
    MOVES,
    ELEMENTWISE,
    ("sdy.all_reduce", "sdy.all_slice", "sdy.sharding_constraint", "sdy.reshard"),
    (
        f"stablehlo.{name}"
        for name in "concatenate custom_call dynamic_update_slice while".split()
    ),
)
RAGGED_DOT = "chlo.ragged_dot"
_ENDS = ("func.return", "stablehlo.return", "sdy.return")


def last_of(block: Any) -> Any:
    """The operation that ends a block."""
    operations = block.operations
    return operations[len(operations) - 1].operation


def copied_operand(value: Any, op: Any) -> Any:
    """The operand that a result of an operation is a copy of."""
    at = list(op.results).index(value) if op.name == BARRIER else 0
    return op.operands[at]


def location_of(op: Any, attributes: Attributes) -> str:
    """The location of a collective; of one that moves a value, that of its first use.

    The pass gives it the location of the operation that made the value.
    """
    if op.name in MOVES:
        for use in op.results[0].uses:
            user = use.owner.operation
            if user.name not in (*MOVES, *_ENDS, "sdy.all_slice"):
                text = attributes.location(user)
                if source_line(text) is not None:
                    return text
    return attributes.location(op)


# The compiler moves these behind the slices that are taken of a sum.
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


def is_filled(value: Any) -> bool:
    """Whether all elements are one number, so that no device needs those of another."""
    op = maker_of(value)
    name = getattr(op, "name", None)
    return name in _CONSTANTS or (
        name == "stablehlo.broadcast_in_dim" and not op.operands[0].type.rank
    )


def looked_up(op: Any, before: Dims, after: Dims) -> Any:
    """The rows that a table is gathered for alone, if each has the gathered dims whole.

    None otherwise. XLA may look up parts of rows and move these.
    """
    from jax.extend.mlir.dialects import stablehlo

    uses = list(op.results[0].uses)
    user = uses[0].owner.operation if len(uses) == 1 else None
    if user is None or user.name != "stablehlo.gather" or uses[0].operand_number:
        return None
    numbers = stablehlo.GatherDimensionNumbers(user.attributes["dimension_numbers"])
    indexed = {*numbers.start_index_map, *numbers.operand_batching_dims}
    return None if indexed & changed_dims(before, after) else user.results[0]


def added_up(op: Any, result: Array, of: Callable[[Any], Array]) -> Any:
    """The rows that a scatter adds up before a sum of which devices keep whole dims.

    None otherwise; `of` gives the array of a value. XLA may move the rows first.
    """
    from jax.extend.mlir.dialects import stablehlo

    source = maker_of(op.operands[0])
    if source is None or source.name != "stablehlo.scatter" or len(source.operands) > 3:
        return None
    numbers = stablehlo.ScatterDimensionNumbers(
        source.attributes["scatter_dimension_numbers"]
    )
    indexed = {*numbers.scattered_dims_to_operand_dims, *numbers.input_batching_dims}
    for use in op.results[0].uses:
        user = use.owner.operation
        if user.name != "sdy.all_slice":
            return None
        if indexed & changed_dims(result.dims, of(user.results[0]).dims):
            return None
    return source.operands[2]


def changed_dims(before: Dims, after: Dims) -> set[int]:
    """The dims that are sharded over other axes afterwards."""
    pairs = enumerate(zip(before, after, strict=True))
    return {dim for dim, (old, new) in pairs if old != new}


def moved_axes(
    op: Any, before: Dims, after: Dims, attributes: Attributes
) -> tuple[AxisRef, ...]:
    """The axes that a collective of Shardy runs over."""
    if op.name in _AXES_OF:
        return attributes.axes_in(op.attributes[_AXES_OF[op.name]])
    # Devices with the same part before and after differ along other axes.
    pairs = zip(before, after, strict=True)
    changed = [axis for pair in pairs for axis in _without_equal_start(*pair)]
    # Equal names and sizes may still be different parts of an axis.
    return tuple(dict.fromkeys(changed or [axis for axes in before for axis in axes]))


def _without_equal_start(
    old: Sequence[AxisRef], new: Sequence[AxisRef]
) -> list[AxisRef]:
    """The axes of a dim before and after, from the first that differs."""
    equal = 0
    while equal < min(len(old), len(new)) and old[equal] == new[equal]:
        equal += 1
    return [*old[equal:], *new[equal:]]


def multiplications(op: Any, of: Callable[[Any], Array]) -> tuple[int, int]:
    """Multiply-adds of a matrix product or a convolution: on one device, and in all.

    The second counts work that several devices repeat once. `of` gives the array of an
    operand or a result.
    """
    from jax.extend.mlir.dialects import stablehlo

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
    from jax.extend.mlir.dialects import chlo

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

    As scan writes it, the condition is `i < n` with a constant `n`, and the body adds a
    constant to `i`. The operands are the initial values.
    """
    compare = maker_of(last_of(condition).operands[0])
    if compare is None or compare.name != "stablehlo.compare":
        return None
    if "LT" not in str(compare.attributes["comparison_direction"]):
        return None
    at = _position(condition, compare.operands[0])
    bound = compare.operands[1]
    given = _position(condition, bound)
    if given is not None:
        if last_of(body).operands[given] != body.arguments[given]:
            return None  # another bound in each iteration
        bound = operands[given]
    bound = constant_of(bound)
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


def _position(block: Any, value: Any) -> int | None:
    arguments = list(block.arguments)
    return arguments.index(value) if value in arguments else None


def constant_of(value: Any) -> int | None:
    """The value of an integer constant; None for other values."""
    maker = maker_of(value)
    if getattr(maker, "name", None) not in _CONSTANTS:
        return None
    from jax.extend.mlir import ir

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
# A custom call; its operands have the numbers of rows that are sent.
RAGGED = "ragged_all_to_all"
_KINDS[RAGGED] = "all-to-all"
# Custom calls without matrix products.
_PLAIN = ("mhlo.topk", "Sharding", "annotate_device_placement", "xla.sdy")


def operands_of(op: Any, attributes: Attributes) -> tuple[list[Dims], int]:
    """The automatic axes of each operand of a shard_map, and the parts of its work.

    The work is assumed to be split by every manual axis that shards an operand.
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
    """The target of a custom call; the name of another operation."""
    if "call_target_name" in op.attributes:
        return str(op.attributes["call_target_name"]).strip('"')
    return op.name


def hides_work(op: Any) -> bool:
    """Whether a custom operation may compute more than its results show."""
    if op.name == "stablehlo.custom_call":
        return not target_of(op).startswith(_PLAIN)
    shapes = {
        str(getattr(one.type, "shape", ())) for one in (*op.operands, *op.results)
    }
    return len(op.regions) > 0 or len(shapes) > 1


def manual_collective(
    name: str, op: Any, sizes: Mapping[str, int]
) -> tuple[Kind | None, tuple[AxisRef, ...]]:
    """Kind and axes of a collective in a shard_map, `name` by `target_of`.

    The kind is None if its groups of devices are not along axes of the mesh.
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
    from jax.extend.mlir import ir

    try:
        return np.array(ir.DenseIntElementsAttr(attribute))
    except ValueError:  # groups in another spelling
        return None
