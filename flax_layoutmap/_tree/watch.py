"""Detect changes to a graph of NNX objects without flattening it.

A graph is what it was if its objects and Variables are the very ones they were, and all
constants equal: a comparison done in C, which takes a few per cent of the time of
`nnx.split`, but for constants that cannot be hashed: they are read each time. Values of
Variables do not count, their metadata does.
"""

import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from flax import nnx

from flax_layoutmap._core.constants import contents, is_hashable
from flax_layoutmap._tree.flax_internals import (
    BOOK_KEEPING,
    attributes_of,
    is_nnx_object,
    is_plain_variable,
    metadata_of,
    read_metadata,
)

_ATTRIBUTES = operator.attrgetter("__dict__")

# Among so many kinds of metadata equal ones are looked for.
_KINDS = 8

# Static attributes that cannot change in place.
_ATOMS = (bool, int, float, complex, str, bytes, type(None), type, np.dtype)


_flat = itertools.chain.from_iterable


def _equal_as_one(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same, where equal ones are one object: less memory to go through."""
    kinds: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    for entry in entries:
        for kind in kinds:
            if list(kind) == list(entry) and all(
                map(operator.is_, kind.values(), entry.values())
            ):
                entry = kind
                break
        else:
            if len(kinds) < _KINDS:
                kinds.append(entry)
        found.append(entry)
    return found


def _is_node(name: str, value: Any) -> bool:
    """Whether an attribute must not be compared by `==`.

    That of a Variable or an array compares elements. Other values that change at all
    are equal only if they are alike.
    """
    return (
        not isinstance(value, _ATOMS)
        and type(value).__eq__ is not object.__eq__
        and not name.startswith("_pytree__")
    )


class Watch:
    """What was seen of the graph below some NNX objects, which it does not keep alive.

    Attributes:
        variables: the Variables of the graph, in no particular order.
        exact: whether every change would be seen. If not, it must not be used: there
            is a node of an unknown kind, or an array that is no Variable.
    """

    def __init__(
        self, roots: Sequence[Any], on_death: Callable[[Any], None] | None = None
    ) -> None:
        self.variables: list[nnx.Variable[Any]] = []
        self.exact = True
        self._objects: list[Any] = []
        self._dicts: list[dict[Any, Any]] = []
        self._lists: list[list[Any]] = []
        self._hashed: dict[int, Any] = {}
        self._read: dict[int, Any] = {}
        self._roots = set(map(id, roots))
        self._alive = [weakref.ref(root, on_death) for root in roots]
        seen: set[int] = set()
        for root in roots:
            self._object(root, seen)
        self._hashes = list(map(hash, self._hashed.values()))
        self._contents = list(map(contents, self._read.values()))
        self._metadata = _equal_as_one([dict(metadata_of(v)) for v in self.variables])
        self._typed = [*self._objects, *self.variables]
        self._types = list(map(type, self._typed))
        mappings = self._mappings(roots)
        self._lengths = [*map(len, mappings), *map(len, self._lists)]
        self._keys = list(_flat(mappings))
        self._values = self._all_values(mappings)
        places = list(enumerate(zip(self._keys, self._values, strict=False)))
        count = sum(map(len, mappings[: len(roots) + len(self._objects)]))
        nodes = [at for at, (name, value) in places[:count] if _is_node(name, value)]
        nodes += range(count, len(self._values))
        self._nodes = [self._values[at] for at in nodes]
        self._pick = operator.itemgetter(*nodes, *nodes[:1]) if nodes else None
        self._noted = [at for at, (name, _) in places[:count] if name == BOOK_KEEPING]

    @property
    def ids(self) -> set[int]:
        """The ids of the Variables."""
        return set(map(id, self.variables))

    def fits(self, roots: Sequence[Any]) -> bool:
        """Whether these are the objects, and their graph is what it was.

        What takes time is to fetch from memory what lay idle during the last step; so
        what is compared with is in few lists, and no object is looked into twice.
        """
        for alive, root in zip(self._alive, roots, strict=True):
            if alive() is not root:
                return False
        mappings = self._mappings(roots)
        try:
            if [*map(len, mappings), *map(len, self._lists)] != self._lengths or list(
                _flat(mappings)
            ) != self._keys:
                return False
            values = self._all_values(mappings)
            # The order matters: after the first, `==` meets no Variable that is another
            # one, whose `==` would be that of its array.
            return (
                all(map(operator.is_, self._picked(values), self._nodes))
                and (values == self._values or self._is_renewed(values))
                and list(map(read_metadata, self.variables)) == self._metadata
                and list(map(type, self._typed)) == self._types
                and list(map(hash, self._hashed.values())) == self._hashes
                and list(map(contents, self._read.values())) == self._contents
            )
        except (TypeError, ValueError):  # metadata that cannot be compared
            return False

    def _is_renewed(self, values: list[Any]) -> bool:
        """Whether only the book-keeping of the objects differs, as after `nnx.jit`."""
        renewed = list(self._values)
        for at in self._noted:
            renewed[at] = values[at]
        if renewed != values:
            return False
        self._values = renewed
        return True

    def _mappings(self, roots: Sequence[Any]) -> list[Any]:
        return [
            *map(_ATTRIBUTES, roots),
            *map(_ATTRIBUTES, self._objects),
            *self._dicts,
        ]

    def _all_values(self, mappings: Sequence[Any]) -> list[Any]:
        return [*_flat(map(dict.values, mappings)), *_flat(self._lists)]

    def _picked(self, values: list[Any]) -> Sequence[Any]:
        """What of them is compared by identity."""
        return values[:0] if self._pick is None else self._pick(values)

    # ------------------------------------------------------------------ looking

    def _look(self, node: Any, seen: set[int]) -> None:
        """Look at a node of the graph; tuples are seen by what holds them."""
        if isinstance(node, tuple):
            for child in node:
                self._look(child, seen)
        elif id(node) in self._roots:
            self.exact = False  # keeping what refers to it would keep it alive
        elif node is None or id(node) in seen:
            pass
        elif is_nnx_object(node):
            self._objects.append(node)
            self._object(node, seen)
        else:
            seen.add(id(node))
            self._container(node, seen)

    def _container(self, node: Any, seen: set[int]) -> None:
        if isinstance(node, nnx.Variable):
            self.variables.append(node)
            self.exact = self.exact and is_plain_variable(node)
            for value in metadata_of(node).values():
                if not is_hashable(value):
                    self._read[id(value)] = value
        elif isinstance(node, nnx.State):
            self._mapping(node.raw_mapping, seen)
        elif type(node) is dict:
            self._mapping(node, seen)
        elif type(node) is list:
            self._lists.append(node)
            for child in node:
                self._look(child, seen)
        else:
            self.exact = False

    def _mapping(self, node: Any, seen: set[int]) -> None:
        if type(node) is not dict:
            self.exact = False
            return
        self._dicts.append(node)
        for child in node.values():
            self._look(child, seen)

    def _object(self, node: Any, seen: set[int]) -> None:
        if id(node) in seen:
            return
        seen.add(id(node))
        attributes = attributes_of(node)
        if attributes is None:
            self.exact = False
            return
        data, static = attributes
        for child in data.values():
            self._look(child, seen)
        for value in static.values():
            self._static(value)

    def _static(self, value: Any) -> None:
        """A static attribute is compared by identity, and by hash if it has its own.

        By what it holds if it cannot be hashed.
        """
        if not is_hashable(value):
            self._read[id(value)] = value
        elif type(value) is tuple:
            for part in value:
                self._static(part)
        elif not isinstance(value, _ATOMS):
            if type(value).__hash__ is not object.__hash__:
                self._hashed[id(value)] = value
