"""Which parameter an optimizer moves something for, between a gradient and an update.

An optimizer may multiply a momentum with itself (Muon), and what it gathers for that is
gathered for one parameter, though data is in it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from flax_layoutmap.pod._dataflow import Dataflow, decided
from flax_layoutmap.pod._spread import Spread

# A value that is the same for all parameters, and one that has activations in it.
_ANY, _NONE = -1, -2


def name_updates(
    found: Spread, values: Dataflow, roles: Sequence[str], owners: Mapping[Any, int]
) -> None:
    """Names the collectives of what is made of the gradient of one parameter.

    Args:
        found: what was read of a program; those without a name are changed.
        values: its values.
        roles: the role of each of its arguments.
        owners: value → the argument of which it is a part of the new value.
    """
    owned = _Owned(found, values, roles, owners)
    for one in found.collectives:
        if one.leaf is None and not one.made_of and one.source is not None:
            owner = owned.of(one.source)
            one.leaf = owner if owner >= 0 else None


class _Owned:
    """The parameters that values belong to, each looked for once."""

    def __init__(
        self,
        found: Spread,
        values: Dataflow,
        roles: Sequence[str],
        owners: Mapping[Any, int],
    ) -> None:
        self._arguments = found.arguments
        self._values = values
        self._roles = roles
        self._owners = owners
        self._known: dict[Any, int] = {}

    def of(self, value: Any) -> int:
        """The argument that a value belongs to; else `_ANY` or `_NONE`."""
        return decided(value, self._known, self._look)

    def _look(self, value: Any) -> Any:
        """Decides of a value, or says of which one to decide before."""
        self._known[value] = _NONE
        size = math.prod(self._values.attributes.type_of(value)[0])
        owner, leaf = self._owners.get(value), self._values.leaf_of(value)
        if size == 1 or leaf is not None:  # a norm, a rate, or an argument
            if leaf is None or self._roles[leaf] != "data":
                self._known[value] = _ANY
            return None
        if owner is not None and size == math.prod(self._arguments[owner].shape):
            self._known[value] = owner
            return None
        sources, _ = self._values.ingredients(value)
        if sources is None:
            return None
        found = set()
        for one in sources:
            if one not in self._known:
                del self._known[value]
                return one
            if self._known[one] == _NONE:
                return None
            found.add(self._known[one])
        found.discard(_ANY)
        if len(found) < 2:
            self._known[value] = found.pop() if found else _ANY
        return None
