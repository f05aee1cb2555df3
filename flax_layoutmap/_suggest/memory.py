"""An estimate of the memory that a step needs besides its arguments.

Values live from the operation that makes them to the last that uses them, in the order
of the program. What an operation computes element by element is assumed to be fused
into its users, so that its operands live on instead, unless it is smaller than these.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from flax_layoutmap.pod._mlir import Attributes, functions

# Operations that keep their operands instead of a result.
_FUSED = frozenset(
    f"stablehlo.{name}"
    for name in """
    abs add and atan2 broadcast_in_dim cbrt ceil clamp compare concatenate constant
    convert cosine divide exponential exponential_minus_one floor iota is_finite log
    log_plus_one logistic maximum minimum multiply negate not or pad popcnt power
    remainder reshape reverse rng_bit_generator round_nearest_afz round_nearest_even
    rsqrt select shift_left shift_right_arithmetic shift_right_logical sign sine slice
    sqrt subtract tan tanh transpose tuple get_tuple_element xor
    """.split()
) | {
    "sdy.all_reduce",
    "sdy.all_slice",
    "sdy.constant",
    "sdy.reshard",
    "sdy.sharding_constraint",
}


def peak_bytes(module: Any, attributes: Attributes) -> int:
    """The most bytes of one device that values of a step take at a time."""
    main = functions(module)["main"].regions[0].blocks[0]
    return _Walk(attributes).block(main)


@dataclasses.dataclass(slots=True)
class _Value:
    """A value that is held in memory."""

    bytes: int
    made_at: int
    used_at: int


class _Walk:
    """One walk through the blocks of a module."""

    def __init__(self, attributes: Attributes) -> None:
        self.attributes = attributes

    def bytes_of(self, op: Any, result: Any) -> int:
        dims = self.attributes.dims(op, result)
        return self.attributes.array(result, dims).local_bytes

    def block(self, block: Any) -> int:
        """The most bytes that a block's own values take; its arguments are others'."""
        held: dict[Any, list[_Value]] = {one: [] for one in block.arguments}
        values: list[_Value] = []
        inner: list[int] = []
        for at, each in enumerate(block.operations):
            op = each.operation
            sources = _merged(held.get(one, ()) for one in op.operands)
            for one in sources:
                one.used_at = at
            inner.append(
                max(
                    (self.block(b) for region in op.regions for b in region.blocks),
                    default=0,
                )
                if op.regions
                else 0
            )
            passed = _unchanged(op)
            fused = op.name in _FUSED
            for number, result in enumerate(op.results):
                if number in passed:
                    held[result] = held.get(op.operands[number], [])
                    continue
                size = self.bytes_of(op, result)
                if fused and sum(one.bytes for one in sources) <= size:
                    held[result] = sources
                    continue
                value = _Value(size, at, at)
                values.append(value)
                held[result] = [value]
        return _most(values, inner)


def _merged(lists: Iterable[Iterable[_Value]]) -> list[_Value]:
    """The distinct values of several lists."""
    found = {id(one): one for own in lists for one in own}
    return list(found.values())


def _unchanged(op: Any) -> set[int]:
    """The results of a loop or a barrier that are its operands."""
    if op.name == "stablehlo.optimization_barrier":
        return {*range(len(op.results))}
    if op.name != "stablehlo.while":
        return set()
    body = op.regions[1].blocks[0]
    ends = body.operations[len(body.operations) - 1].operation.operands
    pairs = zip(ends, body.arguments, strict=True)
    return {at for at, (end, argument) in enumerate(pairs) if end == argument}


def _most(values: Iterable[_Value], inner: list[int]) -> int:
    change = [0] * (len(inner) + 1)
    for one in values:
        change[one.made_at] += one.bytes
        change[one.used_at + 1] -= one.bytes
    most = live = 0
    for at, own in enumerate(inner):
        live += change[at]
        most = max(most, live + own)
    return most
