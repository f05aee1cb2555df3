"""Recognise a tree with the same structure, shapes, dtypes and metadata as before.

The signature of a tree is a tree of the same form, whose nodes equal the nodes they
describe. Python's own comparison of dicts and lists does the work, in less time than
`jax.tree.flatten` takes.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from flax_layoutmap._tree.flax_internals import (
    metadata_of,
    read_metadata,
    read_value,
)

ARRAYS = (jax.Array, np.ndarray, jax.ShapeDtypeStruct)


class Structure:
    """The structure that the layouts of a tree depend on; it holds no arrays."""

    def __init__(self, root: Any) -> None:
        self._root = root

    def fits(self, tree: Any) -> bool:
        """Whether a tree has this structure."""
        try:
            return bool(self._root == tree)
        except (TypeError, ValueError, RecursionError):
            return False  # metadata that cannot be compared, or very deep trees


def structure_of(tree: Any) -> Structure | None:
    """The structure of a tree of dicts, lists and States of arrays; else None."""
    try:
        return Structure(Signatures().of(tree))
    except (UnknownNodeError, TypeError, ValueError, RecursionError):
        return None  # metadata that cannot be compared, or a very deep tree


class UnknownNodeError(Exception):
    """A node that is not a dict, list, State, Variable, None or array."""


def container(kind: type, children: Any) -> Any:
    """The signature of a dict, a list or a State, from those of its children."""
    return _State(children) if kind is nnx.State else _Container(kind, children)


# Each of these equals the node that it describes; nothing else is compared or hashed.


class _Array:
    __slots__ = ("kind", "shape", "dtype")

    def __init__(self, kind: type, shape: tuple[int, ...], dtype: Any) -> None:
        self.kind, self.shape, self.dtype = kind, shape, dtype

    def __eq__(self, other: Any) -> bool:
        if type(other) is not self.kind or other.shape != self.shape:
            return False
        dtype = other.dtype
        return dtype is self.dtype or dtype == self.dtype


class _Container:
    """A dict or a list, and no subclass, which JAX may flatten in another order."""

    __slots__ = ("kind", "children")

    def __init__(self, kind: type, children: Any) -> None:
        self.kind, self.children = kind, children

    def __eq__(self, other: Any) -> bool:
        return type(other) is self.kind and self.children == other


class _State:
    __slots__ = ("children",)

    def __init__(self, children: Any) -> None:
        self.children = children

    def __eq__(self, other: Any) -> bool:
        return type(other) is nnx.State and self.children == other.raw_mapping


class _Nothing:
    def __eq__(self, other: Any) -> bool:
        return other is None


class _Variable:
    __slots__ = ("kind", "metadata", "content")

    def __init__(self, kind: type, metadata: dict[str, Any], content: Any) -> None:
        self.kind, self.metadata, self.content = kind, metadata, content

    def __eq__(self, other: Any) -> bool:
        return (
            type(other) is self.kind
            and self.content == read_value(other)
            and self.metadata == read_metadata(other)
        )


class Signatures:
    """Makes the signature of one tree; equal leaves share one object."""

    def __init__(self) -> None:
        self.makers: dict[type, Callable[[Any], Any]] = {}
        self.arrays: dict[Any, _Array] = {}
        self.variables: dict[Any, _Variable] = {}

    def of(self, node: Any) -> Any:
        make = self.makers.get(type(node))
        if make is None:
            make = self.makers[type(node)] = self.maker(node)
        return make(node)

    def maker(self, node: Any) -> Callable[[Any], Any]:
        """The function that makes the signatures of nodes of this type."""
        kind = type(node)
        if kind is dict:
            return lambda node: _Container(dict, self.children(node))
        if kind is list:
            return lambda node: _Container(list, [self.of(child) for child in node])
        if kind is nnx.State:
            return lambda node: _State(self.children(node.raw_mapping))
        if node is None:
            return lambda node: _Nothing()
        if isinstance(node, nnx.Variable):
            return self.variable
        if isinstance(node, ARRAYS):
            return self.array
        raise UnknownNodeError

    def children(self, node: dict[Any, Any]) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        makers = self.makers
        for key, child in node.items():
            make = makers.get(type(child))
            made[key] = self.of(child) if make is None else make(child)
        return made

    def array(self, leaf: Any) -> _Array:
        key = type(leaf), leaf.shape, leaf.dtype
        found = self.arrays.get(key)
        if found is None:
            found = self.arrays[key] = _Array(*key)
        return found

    def variable(self, node: Any) -> _Variable:
        metadata = metadata_of(node)
        content = self.of(node.get_raw_value())
        key = type(node), id(content)
        found = self.variables.get(key)
        if found is None or found.metadata != metadata:
            found = _Variable(type(node), dict(metadata), content)
            self.variables[key] = found
        return found
