"""What XLA replaces before Shardy sees a program, replaced by what is laid out alike.

XLA lowers CHLO (`erf`, `square`, `top_k`) before it lays a program out, by passes that
jaxlib does not offer. Only layouts are read here, so that any operation will do that
works element by element, or on the same dim. A broadcast that adds dims of one element
becomes a reshape, and a loop uses what is the same in every round from outside: Shardy
propagates otherwise through these.
"""

import math
from typing import Any

from flax_layoutmap.pod._operations import maker_of
from flax_layoutmap.pod._product_dims import PRODUCT

BROADCAST, LOOP = "stablehlo.broadcast_in_dim", "stablehlo.while"
_ELEMENTS = "stablehlo.maximum"
_TOP_K = "chlo.top_k"


def replace_early(block: Any) -> None:
    """Replaces such operations in a block and below.

    Args:
        block: the block, which is changed. What has no like stays.
    """
    from jaxlib.mlir import ir

    for op in list(block.operations):
        operation = op.operation
        for region in operation.regions:
            for inner in region.blocks:
                replace_early(inner)
        if operation.name == LOOP:
            _use_from_outside(operation)
            continue
        if operation.name == BROADCAST:
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


def multiply_whole_arrays(block: Any) -> None:
    """Makes of products of two flattened arrays products of the arrays: `jnp.vdot`.

    So the compiler for TPUs has them; those for others move the arrays to flatten them.

    Args:
        block: the block, which is changed, and what is below.
    """
    from jaxlib.mlir.dialects import stablehlo

    for op in list(block.operations):
        operation = op.operation
        for region in operation.regions:
            for inner in region.blocks:
                multiply_whole_arrays(inner)
        if operation.name != PRODUCT or operation.results[0].type.shape:
            continue
        arrays = [_before_it_was_flat(value) for value in operation.operands]
        left, right = (array.type.shape for array in arrays)
        if left == right and len(left) > 1:
            dims = list(range(len(left)))
            numbers = stablehlo.DotDimensionNumbers.get([], [], dims, dims)
            operation.attributes["dot_dimension_numbers"] = numbers
            for at, array in enumerate(arrays):
                operation.operands[at] = array


def _before_it_was_flat(value: Any) -> Any:
    maker = maker_of(value)
    if maker is None or maker.name != "stablehlo.reshape":
        return value
    return maker.operands[0]


def _replace_broadcast(op: Any) -> None:
    """Makes a reshape of a broadcast that repeats nothing and keeps the order."""
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


def _use_from_outside(loop: Any) -> None:
    """Uses what a loop begins with in place of what it gives on unchanged."""
    condition, body = (region.blocks[0] for region in loop.regions)
    end = body.operations[len(body.operations) - 1].operation
    for at, given in enumerate(end.operands):
        if given == body.arguments[at]:
            first = loop.operands[at]
            condition.arguments[at].replace_all_uses_with(first)
            body.arguments[at].replace_all_uses_except(first, end)
            loop.results[at].replace_all_uses_with(first)


def _like(op: Any) -> tuple[str, list[Any], dict[str, Any]]:
    """Name, operands and attributes of what is laid out alike; "" where nothing is."""
    from jaxlib.mlir import ir

    operands = list(op.operands)
    if op.name == _TOP_K:
        target = ir.StringAttr.get("mhlo.topk")
        return "stablehlo.custom_call", operands, {"call_target_name": target}
    types = {value.type for value in (*operands, *op.results)}
    if len(op.results) == 1 and len(types) == 1:
        return _ELEMENTS, [operands[0], operands[-1]], {}
    return "", [], {}
