"""How often a loop of a lowered program runs."""

from typing import Any

from flax_layoutmap.pod._operations import last_of, maker_of

_CONSTANTS = ("stablehlo.constant", "sdy.constant")


def trip_count(condition: Any, body: Any, operands: Any) -> int | None:
    """The rounds of a `stablehlo.while`; None where the program does not tell.

    Args:
        condition: the block that says whether to go on; `i < n`, as scan writes it.
        body: the block that is repeated; it adds a constant to `i`.
        operands: what the loop begins with.
    """
    compare = maker_of(last_of(condition).operands[0])
    if compare is None or compare.name != "stablehlo.compare":
        return None
    if "LT" not in str(compare.attributes["comparison_direction"]):
        return None
    at = _position(condition, compare.operands[0])
    bound = _number(compare.operands[1], condition, operands)
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


def _number(value: Any, block: Any, operands: Any) -> int | None:
    at = _position(block, value)
    return constant_of(value) if at is None else constant_of(operands[at])


def _position(block: Any, value: Any) -> int | None:
    for at, argument in enumerate(block.arguments):
        if argument == value:
            return at
    return None


def constant_of(value: Any) -> int | None:
    """A whole number that stands in the program; None for others."""
    maker = maker_of(value)
    if getattr(maker, "name", None) not in _CONSTANTS:
        return None
    from jaxlib.mlir import ir

    numbers = maker.attributes["value"]
    if not isinstance(numbers, ir.DenseIntElementsAttr) or len(numbers) != 1:
        return None
    return int(numbers[0])
