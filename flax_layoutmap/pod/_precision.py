"""What the TPU compiler moves in bfloat16, though it is float32 in the program.

Its matrix products and convolutions take bfloat16 unless the program asks for more
precision (`jax.default_matmul_precision`). What is moved for them alone is converted
before that, which halves the bytes; gradients are summed in float32. Seen with libtpu
0.0.42, on 2026-11-22.
"""

from typing import Any

from flax_layoutmap.pod._operations import MOVING
from flax_layoutmap.pod._spread import Spread
from flax_layoutmap.pod._values import bytes_of

_NARROW = "bf16"
_PRODUCTS = frozenset({"stablehlo.dot_general", "stablehlo.convolution"})
_PASSED = frozenset({*MOVING, "sdy.all_slice"}) | {
    "stablehlo.transpose",
    "stablehlo.reshape",
    "stablehlo.slice",
    "stablehlo.dynamic_slice",
}


def convert_before_moves(found: Spread) -> None:
    """Says in which element type values are moved.

    Args:
        found: what was read from a module, while that is there; it is changed.
    """
    for one in found.collectives:
        if one.element == "f32" and one.moved:
            if all(map(_is_for_products, one.moved)):
                one.element = _NARROW


def _is_for_products(value: Any) -> bool:
    """Whether a value is used in products of no more precision alone."""
    todo, found = [value], False
    while todo:
        for use in todo.pop().uses:
            user = use.owner.operation
            if user.name in _PASSED:
                todo.append(user.results[0])
            elif user.name in _PRODUCTS and _is_of_default_precision(user):
                found = True
            elif user.name == "stablehlo.convert" and _is_narrow(user.results[0]):
                found = True
            else:
                return False
    return found


def _is_narrow(value: Any) -> bool:
    return bytes_of((1,), str(value.type.element_type)) < 4


def _is_of_default_precision(op: Any) -> bool:
    given = op.attributes
    asked = "precision_config" in given and "HIGH" in str(given["precision_config"])
    return not asked and "algorithm" not in given
