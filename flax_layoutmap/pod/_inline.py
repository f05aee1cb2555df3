"""Calls replaced by what they call.

A program without calls is laid out in less time, and in the same way: the passes look
through calls, or (of jax 0.8.1) stop at them.
"""

from typing import Any

from flax_layoutmap.pod._sources import source_line

_CALLS = ("func.call", "call")


def inline_calls(functions: dict[str, Any]) -> set[str]:
    """Puts the bodies of functions in the place of their calls.

    Args:
        functions: the functions of a module by name, which are changed. Those that were
            called stay: something else may name them.

    Returns:
        The names of all operations.
    """
    names: set[str] = set()
    done: set[str] = set()

    def flatten(name: str) -> None:
        """Inlines the calls in a function, once for all that call it."""
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
    """Gives operations without a line that of their call, behind their own name.

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
