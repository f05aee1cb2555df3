"""A step with fewer operations, and the same layouts and collectives.

Most operations of a train step are those of its optimizer, a few dozen for each
parameter, and the time of Shardy's passes is that of the operations.
"""

from typing import Any

from flax_layoutmap.pod._mlir import functions, maker_of
from flax_layoutmap.pod._shardy_ops import ELEMENTWISE

_PRODUCTS = ("stablehlo.dot_general", "stablehlo.convolution", "stablehlo.while")


def shorten(module: Any) -> None:
    """Drop scalings of single arrays behind the last matrix product of a step.

    `-rate * update` becomes `update`. Before, operations count: a kernel is gathered
    again for a use that is many of them away.
    """
    block = functions(module)["main"].regions[0].blocks[0]
    operations = [one.operation for one in block.operations]
    products = [at for at, op in enumerate(operations) if op.name in _PRODUCTS]
    with module.context:
        for op in operations[max(products, default=len(operations)) + 1 :]:
            if op.name in ELEMENTWISE:
                (result,) = op.results
                arrays = {one for one in op.operands if not _is_scalar(one)}
                if len(arrays) == 1 and {one.type for one in arrays} == {result.type}:
                    result.replace_all_uses_with(arrays.pop())
        for op in reversed(operations):
            is_used = any(True for result in op.results for _ in result.uses)
            if op.name.startswith("stablehlo.") and not is_used:
                op.erase()


def _is_scalar(value: Any) -> bool:
    """Whether all elements of an array are one, which has no layout of its own."""
    op = maker_of(value)
    if op is not None and op.name == "stablehlo.broadcast_in_dim":
        return not op.operands[0].type.shape
    return op is not None and op.name == "stablehlo.constant"
