"""Changes of a lowered module before Shardy: calls inlined, operations replaced.

The TPU compiler itself changes some (`rewrite_for_tpus`). It gives a scatter in which
each row has its own place, such as the gradient of `jnp.take_along_axis`, iota indices,
and starts one of rows with what its result is added to; `top_k` becomes a sort, for
which rows stay where they are; a product with a vector in each batch becomes a
multiplication and a sum, and its transposed operands are computed in that order. Found
by compiling with libtpu 0.0.42.
"""

import math
from typing import Any

import numpy as np

from flax_layoutmap.pod._mlir import is_shared, maker_of, source_line

_CALLS = ("func.call", "call")
_BROADCAST = "stablehlo.broadcast_in_dim"


def inline_calls(functions: dict[str, Any]) -> set[str]:
    """Inline the calls in `main`, and return the names of all operations.

    Functions that were called stay: something else may name them.
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
    # Uses are replaced in the copy, where there are few.
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
    """Give operations without a source line that of their call.

    A function of JAX is lowered once for all calls, without a source line. `known` maps
    the locations of operations to those that they get.
    """
    from jax.extend.mlir import ir

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
    """Replace operations that Shardy does not know by others with the same layout.

    XLA expands CHLO (`erf`, `square`, `top_k`) before Shardy runs. A broadcast that
    only adds dims of one element becomes a reshape, through which Shardy keeps
    shardings.
    """
    from jax.extend.mlir import ir

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
    """Replace a broadcast that repeats nothing and keeps the order by a reshape."""
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import stablehlo

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
    """Name, operands and attributes of one with the same layout; "" without one."""
    from jax.extend.mlir import ir

    operands = list(op.operands)
    if op.name == "chlo.top_k":
        target = ir.StringAttr.get("mhlo.topk")
        return "stablehlo.custom_call", operands, {"call_target_name": target}
    types = {value.type for value in (*operands, *op.results)}
    if len(op.results) == 1 and len(types) == 1:
        return "stablehlo.maximum", [operands[0], operands[-1]], {}
    return "", [], {}


# ---------------------------------------------------------------------- for TPUs


def rewrite_for_tpus(block: Any, *, products: bool) -> None:
    """Rewrite the operations in a block and its regions as the TPU compiler does.

    Without `products` these stay, to be counted.
    """
    for op in list(block.operations):
        operation = op.operation
        for region in operation.regions:
            for inner in region.blocks:
                rewrite_for_tpus(inner, products=products)
        if operation.name in _REWRITES:
            _REWRITES[operation.name](operation)
        elif products and operation.name == "stablehlo.dot_general":
            _write_product(operation)


def _add_in_place(op: Any) -> None:
    """Rewrite `x + scatter(y, …)`, which adds rows to `y`, to `scatter(x + y, …)`.

    XLA does so before Shardy runs. The two gradients of a tied embedding, of the lookup
    and of the logits, are then summed over devices one after the other.
    """
    makers = [maker_of(value) for value in op.operands]
    adds = [_adds_rows(one) and one.block == op.block for one in makers]
    if adds[0] == adds[1]:
        return
    at = adds.index(True)
    scatter = makers[at]
    op.results[0].replace_all_uses_with(scatter.results[0])
    op.operands[at] = scatter.operands[0]
    scatter.operands[0] = op.results[0]
    scatter.move_after(op)


def _adds_rows(op: Any) -> bool:
    """Whether an operation is a scatter that adds rows to one array, and is used once.

    A scatter of elements, such as a gradient of `jnp.take_along_axis`, is no scatter
    any more when XLA looks for these.
    """
    from jax.extend.mlir.dialects import stablehlo

    if getattr(op, "name", "") != "stablehlo.scatter" or len(op.results) > 1:
        return False
    body = [one.operation.name for one in op.regions[0].blocks[0].operations]
    if body != ["stablehlo.add", "stablehlo.return"] or is_shared(op.results[0]):
        return False
    numbers = stablehlo.ScatterDimensionNumbers(
        op.attributes["scatter_dimension_numbers"]
    )
    return len(numbers.update_window_dims) > 0


def _index_rows(op: Any) -> None:
    """Replace the batch dims of a scatter of elements by iota indices."""
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import stablehlo

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
        joined = stablehlo.ConcatenateOp([*rows, places], at)
        op.operands[place] = joined.result
    gone = sorted([*numbers.inserted_window_dims, *own])
    indexed = [*own, *numbers.scattered_dims_to_operand_dims]
    with op.context:
        made = stablehlo.ScatterDimensionNumbers.get([], gone, [], [], indexed, at)
        op.attributes[name] = made


def _sort_all(op: Any) -> None:
    """Replace `top_k` by a sort and a slice of it."""
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import stablehlo

    operand = op.operands[0]
    shape, last = list(operand.type.shape), len(operand.type.shape) - 1
    element, place = operand.type.element_type, op.results[1].type.element_type
    with ir.InsertionPoint(op), op.location:
        kind = ir.RankedTensorType.get(shape, place)
        places = stablehlo.IotaOp(kind, last).result
        # The order has no effect on the layout.
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
    """Swap the operands of a matrix product; write out one with a vector."""
    from jax.extend.mlir.dialects import stablehlo

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
    """Swap the operands of a product whose only use is its transpose."""
    from jax.extend.mlir.dialects import stablehlo

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
    """Replace a product by a multiplication of broadcast operands and a sum."""
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import stablehlo

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


# A transpose of these is the operation on transposed operands.
_ELEMENTWISE = ("convert", "multiply", "add", "subtract", "select", "compare")


# Operations before a product that are transposed at most: a residual stream is long.
_FAR = 100


def _transposed(
    value: Any, order: list[int], done: dict[Any, Any], left: int = _FAR
) -> Any:
    """Transpose a value, by transposing what it is computed from if possible.

    `done` has the values that were transposed in this order; `left` is the number of
    operations that it may still go back.
    """
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import stablehlo

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
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import stablehlo
    from jax.interpreters import mlir

    scalar = ir.RankedTensorType.get([], kind.element_type)
    zero = stablehlo.convert(scalar, mlir.ir_constant(np.int32(0)))
    made = stablehlo.ReduceOp([kind], [value], [zero], ir.DenseI64ArrayAttr.get(dims))
    body = made.body.blocks.append(scalar, scalar)
    with ir.InsertionPoint(body):
        stablehlo.return_([stablehlo.add(*body.arguments)])
    return made.result


_REWRITES = {
    "stablehlo.add": _add_in_place,
    "stablehlo.scatter": _index_rows,
    "chlo.top_k": _sort_all,
}
