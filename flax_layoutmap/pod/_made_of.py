"""Which parameter a value is made of, where it is made of parameters alone.

A kernel is scaled, masked, joined with others or merged with an adapter before it is
gathered, and the gather is still one of that kernel. So is one of a cache to which rows
were written.
"""

import math
from collections.abc import Sequence
from typing import Any

from flax_layoutmap.pod._dataflow import Dataflow, decided
from flax_layoutmap.pod._operations import maker_of
from flax_layoutmap.pod._values import Value

# Bytes of an argument, its position, and those of others that were joined with it; None
# where no argument is as large a part.
_Largest = tuple[int, tuple[int, ...]] | None
_JOINED = "stablehlo.concatenate"
# Of others, such as a cache, those that are matrices; not of a counter or a random key.
_NAMED = ("parameter", "optimizer")


class MadeOf:
    """The parameters that values are made of, of one module.

    Args:
        values: its values.
        arguments: those of the step.
        roles: the role of each; without them nothing is a parameter.
    """

    def __init__(
        self, values: Dataflow, arguments: Sequence[Value], roles: Sequence[str]
    ) -> None:
        self._values = values
        self._arguments = arguments
        self._roles = roles
        self._known: dict[Any, tuple[bool, _Largest]] = {}

    def parameters(self, value: Any) -> tuple[int, ...]:
        """The argument that is the largest part of a value; none where data is in it.

        With it those that it was joined with. A result with fewer elements than what it
        is made from, such as a norm, is no part of that any more.
        """
        if not self._roles:
            return ()
        largest = decided(value, self._known, self._look)[1]
        return () if largest is None else largest[1]

    def _look(self, value: Any) -> Any:
        """Decides of a value, or says of which one to decide before."""
        leaf = self._values.leaf_of(value)
        if leaf is not None:
            role, argument = self._roles[leaf], self._arguments[leaf]
            is_named = role in _NAMED or role != "data" and len(argument.shape) > 1
            largest = (argument.bytes, (leaf,)) if is_named else None
            self._known[value] = role != "data", largest
            return None
        sources, is_part = self._values.ingredients(value)
        parts: list[tuple[int, tuple[int, ...]]] = []
        for one in sources or ():
            if one not in self._known:
                return one
            is_made, other = self._known[one]
            if not is_made:
                sources = None
                break
            if other and (is_part or self._elements(one) <= self._elements(value)):
                parts.append(other)
        is_made = sources is not None
        self._known[value] = is_made, _largest(parts, value) if is_made else None
        return None

    def _elements(self, value: Any) -> int:
        return math.prod(self._values.attributes.type_of(value)[0])


def _largest(parts: Sequence[tuple[int, tuple[int, ...]]], value: Any) -> _Largest:
    """What of the parts of a value it is named by."""
    if len(parts) < 2:
        return parts[0] if parts else None
    ordered = sorted(parts, key=lambda part: -part[0])
    size, leaves = ordered[0]
    maker = maker_of(value)
    if maker is not None and maker.name == _JOINED:
        every = (leaf for _, some in ordered for leaf in some)
        leaves = tuple(dict.fromkeys(every))
    return size, leaves
