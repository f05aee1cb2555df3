"""Changes of a lowered module before Shardy: calls inlined, operations replaced."""

import math
from typing import Any

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
    """Replace operations that Shardy does not know by others with the same layout.

    XLA expands CHLO (`erf`, `square`, `top_k`) before Shardy runs. A broadcast that
    only adds dims of one element becomes a reshape, through which Shardy keeps
    shardings.
    """
    from jaxlib.mlir import ir

    for op in list(block.operations):
        operation = op.operation
        for region in operation.regions:
            for inner in region.blocks:
                replace_early(inner)
        if operation.name in _REWRITES:
            _REWRITES[operation.name](operation)
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


def add_in_place(op: Any) -> None:
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
    from jaxlib.mlir.dialects import stablehlo

    if getattr(op, "name", "") != "stablehlo.scatter" or len(op.results) > 1:
        return False
    body = [one.operation.name for one in op.regions[0].blocks[0].operations]
    if body != ["stablehlo.add", "stablehlo.return"] or is_shared(op.results[0]):
        return False
    numbers = stablehlo.ScatterDimensionNumbers(
        op.attributes["scatter_dimension_numbers"]
    )
    return len(numbers.update_window_dims) > 0


def _like(op: Any) -> tuple[str, list[Any], dict[str, Any]]:
    """Name, operands and attributes of one with the same layout; "" without one."""
    from jaxlib.mlir import ir

    operands = list(op.operands)
    if op.name == "chlo.top_k":
        target = ir.StringAttr.get("mhlo.topk")
        return "stablehlo.custom_call", operands, {"call_target_name": target}
    types = {value.type for value in (*operands, *op.results)}
    if len(op.results) == 1 and len(types) == 1:
        return "stablehlo.maximum", [operands[0], operands[-1]], {}
    return "", [], {}


_REWRITES = {_BROADCAST: _replace_broadcast, "stablehlo.add": add_in_place}
