"""Detect changes to a graph of NNX objects without flattening it.

A graph is unchanged if its objects and Variables are the same objects, and all its
constants are equal. The comparison runs in C, in a few per cent of the time of
`nnx.split`.
Constants that cannot be hashed (a list, a dict, a dataclass) may change in place, so
their contents are recorded and compared each time. Values of Variables do not count,
their metadata does.
"""

import itertools
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from flax_layoutmap._tree.flax_internals import (
    BOOK_KEEPING,
    attributes_of,
    is_bookkeeping,
    is_nnx_object,
    is_plain_variable,
    metadata_of,
    read_metadata,
)

_NUMBERS = (bool, int, float, complex)
_BY_IDENTITY = (jax.Array, nnx.Pytree, nnx.Variable)
_STATIC = nnx.graph.Static


class Uncomparable(TypeError):
    """A constant that can neither be hashed nor copied; it is in `args`."""


def is_hashable(value: Any) -> bool:
    """Whether a value has a usable hash and `==`; a method, if its object has."""
    if type(value) is tuple:
        return all(map(is_hashable, value))
    if isinstance(value, types.MethodType):
        return is_hashable(value.__self__)
    if isinstance(value, _STATIC):
        return is_hashable(value.value)
    try:
        hash(value)
    except TypeError:
        return False
    if isinstance(value, nnx.GraphDef):
        return all(is_hashable(attribute) for _, attribute in value.attributes)
    return True


def comparable(value: Any) -> Any:
    """The value if it can be hashed, else `contents` of it."""
    return value if is_hashable(value) else contents(value)


def contents(value: Any) -> Any:
    """What a value holds, hashable: equal for values that hold the same.

    Hashable parts are compared by `==`, numbers with their types; JAX arrays and NNX
    objects by identity; all else part by part, as `copy.copy` would copy it. Raises
    Uncomparable for a part that can be neither hashed nor copied.
    """
    return _Reader().read(value)


class Same:
    """Equal to what holds the very same object, which it keeps alive."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class _Reader:
    """Reads one value, which may refer to itself."""

    def __init__(self) -> None:
        # id → number, and the value, which keeps its id while it is read.
        self.seen: dict[int, tuple[int, Any]] = {}

    def read(self, value: Any) -> Any:
        kind = type(value)
        if kind is str or value is None:
            return value
        if kind in _NUMBERS:
            return kind, repr(value)
        if kind not in _CONTAINERS:
            if isinstance(value, _BY_IDENTITY):
                return Same(value)
            if is_hashable(value):
                return kind, value
        if id(value) in self.seen:
            return kind, self.seen[id(value)][0]
        self.seen[id(value)] = len(self.seen), value
        return kind, tuple(map(self.read, _parts(value)))


def _parts(value: Any) -> Iterable[Any]:
    """The parts of a value; those that can change are its own, not copies."""
    take_apart = _CONTAINERS.get(type(value))
    if take_apart is not None:
        return take_apart(value)
    try:
        made = value.__reduce_ex__(4)
    except TypeError as error:
        raise Uncomparable(value) from error
    if isinstance(made, str):
        return (made,)
    # The items of lists and of dicts come as iterators.
    return [*made[:3], *(tuple(items or ()) for items in made[3:5])]


# Types that `copy.copy` cannot copy, or slowly, and the function for their parts.
_CONTAINERS: dict[type, Callable[[Any], Iterable[Any]]] = {
    tuple: iter,
    list: iter,
    set: iter,
    dict: lambda value: tuple(value.items()),
    types.MappingProxyType: lambda value: tuple(value.items()),
    types.MethodType: lambda value: (value.__func__, value.__self__),
    jax.tree_util.PyTreeDef: lambda value: (value.node_data(), *value.children()),
}


_ATTRIBUTES = operator.attrgetter("__dict__")

# The number of distinct metadata that are shared.
_KINDS = 8

# Static attributes that cannot change in place.
_ATOMS = (bool, int, float, complex, str, bytes, type(None), type, np.dtype)


_flat = itertools.chain.from_iterable


def _equal_as_one(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same entries, where equal ones are one object: less memory to read."""
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
    """Whether an attribute is compared by identity, as its `==` is elementwise."""
    return (
        not isinstance(value, _ATOMS)
        and type(value).__eq__ is not object.__eq__
        and not is_bookkeeping(name)
    )


class Watch:
    """A record of the graph below some NNX objects, which it does not keep alive.

    It must not be used unless it is `exact`: a node of unknown kind, or an array that
    is not a Variable, could change without being noticed.
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
        """Whether these are the same objects with an unchanged graph.

        Most of the time goes into fetching memory that was idle during the last step,
        so the expected values are in few lists, and each object is read once.
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
            # Identity comes first: then `==` compares no two different Variables, for
            # which it would compare their arrays.
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
        """Whether only NNX's bookkeeping of the objects differs, as after `nnx.jit`."""
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
        """Record a node of the graph; a tuple is compared by its owner."""
        if isinstance(node, tuple):
            for child in node:
                self._look(child, seen)
        elif id(node) in self._roots:
            self.exact = False  # the record would keep the root alive
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
        """Compare a static attribute by identity, by its hash, or by its contents."""
        if not is_hashable(value):
            self._read[id(value)] = value
        elif type(value) is tuple:
            for part in value:
                self._static(part)
        elif not isinstance(value, _ATOMS):
            if type(value).__hash__ is not object.__hash__:
                self._hashed[id(value)] = value
