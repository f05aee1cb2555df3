"""Operations that Shardy has no rule for, replaced by ones that are laid out alike.

XLA lowers CHLO (`erf`, `square`, `top_k`) before it lays a program out, by passes that
jaxlib does not offer. Only layouts are read here, so that any operation will do that
works element by element, or on the same dim.
"""

from typing import Any

_ELEMENTS = "stablehlo.maximum"
_TOP_K = "chlo.top_k"


def replace_chlo(block: Any) -> None:
    """Replaces CHLO operations in a block and below.

    Args:
        block: the block, which is changed. What has no like stays.
    """
    from jaxlib.mlir import ir

    for op in list(block.operations):
        operation = op.operation
        for region in operation.regions:
            for inner in region.blocks:
                replace_chlo(inner)
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
