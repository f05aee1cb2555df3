"""Rewrite a StableHLO module before it is laid out.

Calls are inlined: a program without them is laid out in less time, and in the same way
(with jax 0.8.1 Shardy's passes stop at calls).

For Shardy's estimate, CHLO (`erf`, `square`, `top_k`) becomes an operation that is laid
out alike, as XLA expands it before; a broadcast that adds dims of one element becomes a
reshape, through which Shardy keeps shardings.

For the partitioner, as the compiler for TPUs does it: a scatter in which each row has
its own place, such as the gradient of `jnp.take_along_axis`, gets iota indices; `top_k`
becomes a sort, for which rows stay where they are; a product with a vector in each
batch becomes a multiplication and a sum, and what is transposed for it is computed in
that order. The compiler does so before it asks Shardy, which therefore lays out another
program than the one that is written.
"""

import math
from typing import Any

import numpy as np

from flax_layoutmap.pod._mlir import source_line

_CALLS = ("func.call", "call")
_BROADCAST = "stablehlo.broadcast_in_dim"


def inline_calls(functions: dict[str, Any]) -> set[str]:
    """Put the bodies of functions in the place of their calls.

    Args:
        functions: the functions of a module by name, which are changed. Those that were
            called stay: something else may name them.

    Returns:
        The names of all operations.
    """
    names: set[str] = set()
    done: set[str] = set()

    def flatten(name: str) -> None:
        """Inline the calls in a function, once for all that call it."""
        if name not in done:
            done.add(name)
            walk(functions[name].regions[0].blocks[0])

    def walk(block: Any) -> None:
        for op in list(block.operations):
            names.add(op.operation.name)
            if op.operation.name in _CALLS:
                callee = str(op.attributes["callee"]).lstrip("@").strip('"')
                flatten(callee)
                _inline(op, functions[callee])
                continue
            for region in op.regions:
                for inner in region.blocks:
                    walk(inner)

    flatten("main")
    return names


def _inline(call: Any, callee: Any) -> None:
    copy = callee.operation.clone()
    block = copy.regions[0].blocks[0]
    # Within the copy, where none of what stays is in the way.
    for argument, operand in zip(block.arguments, call.operands, strict=True):
        argument.replace_all_uses_with(operand)
    *body, end = block.operations
    _give_location(body, call.operation.location, {})
    for op in body:
        op.operation.move_before(call.operation)
    for result, value in zip(call.results, end.operation.operands, strict=True):
        result.replace_all_uses_with(value)
    call.operation.erase()
    copy.erase()


def _give_location(operations: Any, caller: Any, known: dict[Any, Any]) -> None:
    """Give operations without a line that of their call, behind their own name.

    A function of JAX is lowered once for all that call it, and says no line.

    Args:
        operations: the operations, which are changed; and those in their regions.
        caller: where the call is.
        known: what was given before, by their own locations.
    """
    from jaxlib.mlir import ir

    for one in operations:
        op = one.operation
        own = op.location.attr
        if own not in known:
            text = str(op.location)
            name = text.partition('"')[2].partition('"')[0]
            known[own] = None
            if source_line(text) is None:
                known[own] = ir.Location.name(name, caller) if name else caller
        if known[own] is not None:
            op.location = known[own]
        for region in op.regions:
            for block in region.blocks:
                _give_location(block.operations, caller, known)


def replace_early(block: Any) -> None:
    """Replace such operations in a block and below.

    Args:
        block: the block, which is changed. What has no like stays.
    """
    from jaxlib.mlir import ir

    for op in list(block.operations):
        operation = op.operation
        for region in operation.regions:
            for inner in region.blocks:
                replace_early(inner)
        if operation.name == _BROADCAST:
            _replace_broadcast(operation)
            continue
        if not operation.name.startswith("chlo."):
            continue
        name, operands, attributes = _like(operation)
        if not name:
            continue
        made = ir.Operation.create(
            name,
            results=[result.type for result in operation.results],
            operands=operands,
            attributes=attributes,
            loc=operation.location,
            ip=ir.InsertionPoint(operation),
        )
        for result, new in zip(operation.results, made.results, strict=True):
            result.replace_all_uses_with(new)
        operation.erase()


def _replace_broadcast(op: Any) -> None:
    """Make a reshape of a broadcast that repeats nothing and keeps the order."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    given, wanted = op.operands[0].type, op.results[0].type
    dims = list(ir.DenseI64ArrayAttr(op.attributes["broadcast_dimensions"]))
    repeats = math.prod(given.shape) != math.prod(wanted.shape)
    if repeats or not dims or dims != sorted(dims):
        return
    with ir.InsertionPoint(op), op.location:
        made = stablehlo.ReshapeOp(wanted, op.operands[0])
    op.results[0].replace_all_uses_with(made.result)
    op.erase()


def _like(op: Any) -> tuple[str, list[Any], dict[str, Any]]:
    """Name, operands and attributes of what is laid out alike; "" where nothing is."""
    from jaxlib.mlir import ir

    operands = list(op.operands)
    if op.name == "chlo.top_k":
        target = ir.StringAttr.get("mhlo.topk")
        return "stablehlo.custom_call", operands, {"call_target_name": target}
    types = {value.type for value in (*operands, *op.results)}
    if len(op.results) == 1 and len(types) == 1:
        return "stablehlo.maximum", [operands[0], operands[-1]], {}
    return "", [], {}


def rewrite_for_tpus(block: Any) -> None:
    """Write operations in a block and below as the compiler for TPUs does.

    Args:
        block: the block, which is changed. Nothing of it is laid out yet.
    """
    for op in list(block.operations):
        operation = op.operation
        for region in operation.regions:
            for inner in region.blocks:
                rewrite_for_tpus(inner)
        if operation.name in _REWRITES:
            _REWRITES[operation.name](operation)


def _count(op: Any) -> None:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    name = "scatter_dimension_numbers"
    numbers = stablehlo.ScatterDimensionNumbers(op.attributes[name])
    own, own_places = (
        list(numbers.input_batching_dims),
        list(numbers.scatter_indices_batching_dims),
    )
    place, at = (len(op.operands) - 1) // 2, numbers.index_vector_dim
    places = op.operands[place]
    shape = list(places.type.shape)
    # Of slices, such as what is written to a cache, both ways are laid out alike.
    if not own or len(numbers.update_window_dims) or at != len(shape) - 1:
        return
    with ir.InsertionPoint(op), op.location:
        kind = ir.RankedTensorType.get([*shape[:at], 1], places.type.element_type)
        rows = [stablehlo.IotaOp(kind, dim).result for dim in own_places]
        joined = stablehlo.ConcatenateOp([*rows, *_columns(places)], at)
        op.operands[place] = joined.result
    gone = sorted([*numbers.inserted_window_dims, *own])
    indexed = [*own, *numbers.scattered_dims_to_operand_dims]
    with op.context:
        made = stablehlo.ScatterDimensionNumbers.get([], gone, [], [], indexed, at)
        op.attributes[name] = made


def _columns(places: Any) -> list[Any]:
    """The elements of each place, one by one."""
    from jaxlib.mlir.dialects import stablehlo

    shape = list(places.type.shape)
    if shape[-1] == 1:
        return [places]
    columns = []
    for at in range(shape[-1]):
        start, end = [0] * len(shape), list(shape)
        start[-1], end[-1] = at, at + 1
        made = stablehlo.SliceOp(places, start, end, [1] * len(shape))
        columns.append(made.result)
    return columns


def _sort(op: Any) -> None:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    operand = op.operands[0]
    shape, last = list(operand.type.shape), len(operand.type.shape) - 1
    element, place = operand.type.element_type, op.results[1].type.element_type
    with ir.InsertionPoint(op), op.location:
        kind = ir.RankedTensorType.get(shape, place)
        places = stablehlo.IotaOp(kind, last).result
        # The order is of no matter to where the rows are.
        made = stablehlo.SortOp(
            [operand.type, kind], [operand, places], dimension=last, is_stable=True
        )
        scalars = [ir.RankedTensorType.get([], one) for one in (element, place)]
        body = made.comparator.blocks.append(*(2 * [scalars[0]] + 2 * [scalars[1]]))
        with ir.InsertionPoint(body):
            direction = stablehlo.ComparisonDirectionAttr.get("GT")
            first, second = body.arguments[2:]
            stablehlo.return_([stablehlo.compare(first, second, direction)])
        count = list(op.results[0].type.shape)
        for result, whole in zip(op.results, made.results, strict=True):
            zeros, ones = [0] * len(shape), [1] * len(shape)
            taken = stablehlo.SliceOp(whole, zeros, count, ones).result
            result.replace_all_uses_with(taken)
    op.erase()


_DIMS = "dot_dimension_numbers"


def _write_product(op: Any) -> None:
    from jaxlib.mlir.dialects import stablehlo

    numbers = stablehlo.DotDimensionNumbers(op.attributes[_DIMS])
    batch = numbers.lhs_batching_dimensions, numbers.rhs_batching_dimensions
    summed = numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions
    own = [
        [dim for dim in range(value.type.rank) if dim not in (*batch[at], *summed[at])]
        for at, value in enumerate(op.operands)
    ]
    if len(summed[0]) and all(own):
        _swap(op, batch, own, summed)
    else:
        _multiply(op, batch, own, summed)


def _swap(op: Any, batch: Any, own: Any, summed: Any) -> None:
    """Swap the operands of a product that is only used transposed to that order."""
    from jaxlib.mlir.dialects import stablehlo

    users = [use.owner.operation for use in op.results[0].uses]
    if len(users) != 1 or users[0].name != "stablehlo.transpose":
        return
    (user,), count, end = users, len(batch[0]), op.results[0].type.rank
    second = count + len(own[0])
    order = [*range(count), *range(second, end), *range(count, second)]
    if list(user.attributes["permutation"]) != order:
        return
    first, last = op.operands
    op.operands[0], op.operands[1] = last, first
    with op.context:
        op.attributes[_DIMS] = stablehlo.DotDimensionNumbers.get(
            list(batch[1]), list(batch[0]), list(summed[1]), list(summed[0])
        )
    op.results[0].set_type(user.results[0].type)
    user.results[0].replace_all_uses_with(op.results[0])
    user.erase()


def _multiply(op: Any, batch: Any, own: Any, summed: Any) -> None:
    """Write a product as a multiplication of arrays with all dims, and a sum."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    result, shape = op.results[0], list(op.operands[0].type.shape)
    count, end = len(batch[0]), result.type.rank
    every = [*result.type.shape, *[shape[dim] for dim in summed[0]]]
    places = [range(count, count + len(own[0])), range(count + len(own[0]), end)]
    with ir.InsertionPoint(op), op.location:
        wanted = ir.RankedTensorType.get(every, result.type.element_type)
        factors = []
        for at, value in enumerate(op.operands):
            kind = ir.RankedTensorType.get(value.type.shape, wanted.element_type)
            order = [*batch[at], *own[at], *summed[at]]
            turned = _transposed(stablehlo.convert(kind, value), order, {})
            dims = [*range(count), *places[at], *range(end, len(every))]
            dims = ir.DenseI64ArrayAttr.get(dims)
            factors.append(stablehlo.broadcast_in_dim(wanted, turned, dims))
        made = stablehlo.multiply(*factors)
        if len(summed[0]):
            made = _sum(made, result.type, list(range(end, len(every))))
    result.replace_all_uses_with(made)
    op.erase()


# Operations of which a transpose is the operation of transposes.
_ELEMENTWISE = ("convert", "multiply", "add", "subtract", "select", "compare")


# So many operations before a product are looked through: a residual stream may be long.
_FAR = 100


def _transposed(
    value: Any, order: list[int], done: dict[Any, Any], left: int = _FAR
) -> Any:
    """Make a transpose of a value, of what it is computed from where that is possible.

    Args:
        value: an array.
        order: its dims in the new order.
        done: what was transposed in this order before, by the value.
        left: how many operations back it may still go.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    if value.type.rank < len(order) or order == sorted(order):
        return value
    if value in done:
        return done[value]
    shape: list[int] = [value.type.shape[dim] for dim in order]
    op: Any = value.owner  # a block, which has no name, for an argument of one
    kind = ir.RankedTensorType.get(shape, value.type.element_type)
    name = getattr(op, "name", "").removeprefix("stablehlo.")
    if name == "broadcast_in_dim" and left:
        dims = [order.index(dim) for dim in op.attributes["broadcast_dimensions"]]
        inner = sorted(range(len(dims)), key=lambda at: dims[at])
        given = _transposed(op.operands[0], inner, {}, left - 1)
        places = ir.DenseI64ArrayAttr.get(sorted(dims))
        done[value] = stablehlo.broadcast_in_dim(kind, given, places)
    elif name in _ELEMENTWISE and left:
        done[value] = ir.Operation.create(
            op.name,
            results=[kind],
            operands=[_transposed(one, order, done, left - 1) for one in op.operands],
            attributes={each: op.attributes[each] for each in op.attributes},
        ).results[0]
    else:
        done[value] = stablehlo.transpose(value, ir.DenseI64ArrayAttr.get(order))
    return done[value]


def _sum(value: Any, kind: Any, dims: list[int]) -> Any:
    from jax.interpreters import mlir
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    scalar = ir.RankedTensorType.get([], kind.element_type)
    zero = stablehlo.convert(scalar, mlir.ir_constant(np.int32(0)))
    made = stablehlo.ReduceOp([kind], [value], [zero], ir.DenseI64ArrayAttr.get(dims))
    body = made.body.blocks.append(scalar, scalar)
    with ir.InsertionPoint(body):
        stablehlo.return_([stablehlo.add(*body.arguments)])
    return made.result


_REWRITES = {
    "stablehlo.scatter": _count,
    "chlo.top_k": _sort,
    "stablehlo.dot_general": _write_product,
}
