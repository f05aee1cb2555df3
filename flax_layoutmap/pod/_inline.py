"""Calls replaced by what they call, for versions of Shardy that stop at a call."""

from typing import Any


def inline_calls(module: Any, functions: dict[str, Any]) -> None:
    """Puts the bodies of functions in the place of their calls.

    Args:
        module: a module, which is changed.
        functions: its functions by name; all but `main` are removed.
    """
    _in_block(functions["main"].regions[0].blocks[0], functions)
    for name, function in functions.items():
        if name != "main":
            function.operation.erase()


def _in_block(block: Any, functions: dict[str, Any]) -> None:
    for op in list(block.operations):
        if op.operation.name in ("func.call", "call"):
            _inline(op, functions)
            continue
        for region in op.regions:
            for inner in region.blocks:
                _in_block(inner, functions)


def _inline(call: Any, functions: dict[str, Any]) -> None:
    callee = functions[str(call.attributes["callee"]).lstrip("@").strip('"')]
    copy = callee.operation.clone()
    block = copy.regions[0].blocks[0]
    # Within the copy, where none of what stays is in the way.
    _in_block(block, functions)
    for argument, operand in zip(block.arguments, call.operands, strict=True):
        argument.replace_all_uses_with(operand)
    *body, end = block.operations
    for op in body:
        op.operation.move_before(call.operation)
    for result, value in zip(call.results, end.operation.operands, strict=True):
        result.replace_all_uses_with(value)
    call.operation.erase()
    copy.erase()
