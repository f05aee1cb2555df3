"""Write new values and new structures back to NNX objects.

A function may add, remove, replace or swap Variables and modules, and return them. It
does so to copies, inside of a trace. Here the graph after it is compared with the one
before, by identity, so that the caller's own objects become what the copies have
become: an object that is still there stays the object that it is.
"""

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from flax_layoutmap._tree.flax_internals import (
    attributes_of,
    check_can_write,
    constants_of,
    is_nnx_object,
    metadata_of,
    named_objects_of,
    nnx_split,
    objects_of,
    write_metadata,
    write_value,
)
from flax_layoutmap._tree.objects import is_object
from flax_layoutmap._tree.paths import key_of
from flax_layoutmap._tree.watch import comparable, contents, is_hashable

# Exhausts an iterator in C. Interrupts come between steps of Python, never in one call.
drain = collections.deque[Any](maxlen=0).extend


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, slots=True)
class Own:
    """Stands for an NNX object or a Variable, by its number, in a function's result."""

    at: int


class Graph:
    """The graph below some NNX objects, which it keeps alive.

    `holders` has, per leaf of its State, the Variable that holds it and its number in
    there, or None; `mutable` has the constants that cannot be hashed, in order.
    """

    def __init__(self, nodes: Sequence[Any]) -> None:
        self.graphdef, state = nnx_split(list(nodes))
        self.leaves, self.treedef = jax.tree.flatten(state)
        self.holders = holders_of(state)
        self.objects = objects_of(list(nodes))
        self.mutable = _mutable_constants(self.objects)
        # As they are now: a function may change such a constant in place.
        self._contents = contents(self.mutable)
        self._structure = comparable((self.graphdef, self.treedef))

    def is_like(self, other: "Graph") -> bool:
        """Whether it has the same objects, in the same structure and shapes."""
        return (
            len(self.objects) == len(other.objects)
            and all(a is b for a, b in zip(self.objects, other.objects, strict=True))
            and self._structure == other._structure
            and list(map(np.shape, self.leaves)) == list(map(np.shape, other.leaves))
        )

    def keeps_constants(self, after: "Graph") -> bool:
        """Whether a function has neither set nor edited an unhashable constant."""
        known = set(map(id, self.mutable))
        is_known = all(id(constant) in known for constant in after.mutable)
        return is_known and contents(self.mutable) == self._contents


def holders_of(tree: Any) -> list[tuple[Any, int] | None]:
    """Per leaf of a tree, the Variable that it is in, and its number in there."""
    holders: list[tuple[Any, int] | None] = []
    for part in jax.tree.leaves(tree, is_leaf=_is_variable):
        if _is_variable(part):
            holders += [(part, k) for k in range(len(jax.tree.leaves(part)))]
        else:
            holders.append(None)
    return holders


def is_value(leaf: Any, holder: tuple[Any, int] | None) -> bool:
    """Whether a leaf is the whole value of its Variable."""
    return holder is not None and holder[0].get_raw_value() is leaf


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """How a function changed the structure of the objects that it was given.

    `origins` has, per object afterwards, its number before, or None if it is new.
    `sources` has, per leaf afterwards, (True, its position among the arguments) or
    (False, its number among the outputs). `mutable` has the constants from before that
    cannot be hashed: the caller's equal ones stay in their place.
    """

    graphdef: Any  # of the objects and of the result, afterwards
    treedef: Any  # of their State
    origins: tuple[int | None, ...]
    sources: tuple[tuple[bool, int], ...]
    mutable: tuple[Any, ...]

    @property
    def stays(self) -> list[int]:
        """Positions of the leaves of the arguments that stay what they are."""
        return [at for stays, at in self.sources if stays]

    def at(self, entries: Iterable[Any], *, stays: bool) -> list[tuple[int, Any]]:
        """Of entries per leaf after it, those that stay (or not), and their numbers."""
        pairs = zip(self.sources, entries, strict=True)
        return [(at, entry) for (kind, at), entry in pairs if kind is stays]

    def moving(self, positions: Iterable[int]) -> "Change":
        """The same, where these leaves of the arguments become outputs, at the end."""
        moved = {(True, at): number for number, at in enumerate(positions)}
        count = sum(not stays for stays, _ in self.sources)
        sources = [
            (False, count + moved[source]) if source in moved else source
            for source in self.sources
        ]
        return dataclasses.replace(self, sources=tuple(sources))

    def leaves(self, given: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """The leaves after the function."""
        return [(given if stays else outputs)[at] for stays, at in self.sources]

    def merged(self, leaves: Sequence[Any]) -> list[Any]:
        """New objects of the structure after the function, with these leaves."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))

    def apply(self, before: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        """Apply the changes of the function's copies to the caller's objects.

        The writes run in one call of C, so an interrupt comes before or after all of
        them. Returns the objects and Variables after the function, in the order of the
        graph.
        """
        check_can_write(before)
        made = objects_of(self.merged(leaves))
        own = {
            id(new): new if origin is None else before[origin]
            for new, origin in zip(made, self.origins, strict=True)
        }
        constants = zip(self.mutable, _mutable_constants(before), strict=True)
        own.update((id(traced), constant) for traced, constant in constants)
        values: list[tuple[Any, Any]] = []
        metadata: list[tuple[Any, Any]] = []
        attributes: list[tuple[Any, str, Any]] = []
        for new in made:
            ours = own[id(new)]
            if not _is_variable(new):
                attributes.append((ours, "__dict__", _contents(new, own)))
            elif ours is not new:
                values.append((ours, new.get_raw_value()))
                entries = metadata_of(new).items()
                metadata.append((ours, {k: own.get(id(v), v) for k, v in entries}))
        drain(
            itertools.chain(
                itertools.starmap(write_value, values),
                itertools.starmap(write_metadata, metadata),
                itertools.starmap(object.__setattr__, attributes),
            )
        )
        return [own[id(new)] for new in made]


def change_of(
    before: Graph, after: Graph, positions: Sequence[int], leaves: Sequence[Any]
) -> tuple[Change, list[Any]]:
    """How `after` came from `before`, and the leaves that become the first outputs.

    `after` is the graph of all objects of `before` and of the function's result;
    `positions` has the position of each leaf of `before` among all `leaves`.
    """
    number = {id(node): at for at, node in enumerate(before.objects)}
    place = {
        (id(holder[0]), holder[1]): at
        for holder, at in zip(before.holders, positions, strict=True)
        if holder is not None
    }
    sources: list[tuple[bool, int]] = []
    new: list[Any] = []
    for holder, leaf in zip(after.holders, after.leaves, strict=True):
        at = None if holder is None else place.get((id(holder[0]), holder[1]))
        if at is not None and leaves[at] is leaf:
            sources.append((True, at))
        else:
            sources.append((False, len(new)))
            new.append(leaf)
    origins = tuple(number.get(id(node)) for node in after.objects)
    mutable = tuple(before.mutable)
    return Change(after.graphdef, after.treedef, origins, tuple(sources), mutable), new


def without_objects(tree: Any, objects: Iterable[Any]) -> tuple[Any, bool]:
    """A result with `Own` for each of these objects, and whether there is one.

    An `nnx.State` has none: it holds values.
    """
    number = {id(node): at for at, node in enumerate(objects)}
    found = False

    def own(node: Any) -> Any:
        nonlocal found
        if id(node) not in number:
            return node
        found = True
        return Own(number[id(node)])

    def stops(node: Any) -> bool:
        return id(node) in number or isinstance(node, nnx.State)

    return jax.tree.map(own, tree, is_leaf=stops), found


def with_objects(tree: Any, objects: Sequence[Any]) -> Any:
    """The result again; the inverse of `without_objects`."""
    return jax.tree.map(
        lambda node: objects[node.at] if isinstance(node, Own) else node,
        tree,
        is_leaf=lambda node: isinstance(node, Own),
    )


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _contents(node: Any, own: Mapping[int, Any]) -> dict[str, Any]:
    """The attributes of an object, with the caller's objects in them."""
    attributes = attributes_of(node)
    data = vars(node) if attributes is None else attributes[0]
    return {
        name: _translated(value, own) if name in data else own.get(id(value), value)
        for name, value in vars(node).items()
    }


def _mutable_constants(objects: Iterable[Any]) -> list[Any]:
    """Static attributes and metadata that cannot be hashed."""
    constants = (value for node in objects for value in constants_of(node).values())
    return list(itertools.filterfalse(is_hashable, constants))


def _translated(value: Any, own: Mapping[int, Any]) -> Any:
    leaves, treedef = jax.tree.flatten(value, is_leaf=lambda node: id(node) in own)
    if not any(id(leaf) in own for leaf in leaves):
        return value
    return treedef.unflatten([own.get(id(leaf), leaf) for leaf in leaves])


# ---------------------------------------------------------------------- new values only


def update(node: Any, state: Any) -> None:
    """Give an NNX object the values of a State.

    As `nnx.update`, which cannot write an array in a tuple or another immutable
    container: here such an attribute gets a new container.
    """
    if not isinstance(state, nnx.State):  # that of a Variable is one
        nnx.update(node, state)
        return
    new = dict(nnx.to_flat_state(state))
    before = len(new)
    for path, owner in named_objects_of(node):
        found = attributes_of(owner) if is_nnx_object(owner) else None
        for name, value in found[0].items() if found else ():
            if not _is_fixed(value):
                continue
            leaves = []
            parts, treedef = _flatten(value)
            for keys, leaf in parts:
                where = (*path, name, *map(key_of, keys))
                is_other = is_object(leaf) or where not in new
                leaves.append(leaf if is_other else new.pop(where))
            if any(a is not b for a, (_, b) in zip(leaves, parts, strict=True)):
                # Bypass the class's own __setattr__, which may have effects.
                changed = nnx.data(jax.tree.unflatten(treedef, leaves))
                nnx.Pytree.__setattr__(owner, name, changed)
    nnx.update(node, state if len(new) == before else nnx.from_flat_state(new.items()))


def _flatten(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
    return jax.tree_util.tree_flatten_with_path(value, is_leaf=is_object)


def _is_fixed(value: Any) -> bool:
    """Whether a value is, or holds, an immutable container with arrays."""
    return any(
        not is_object(leaf) and hasattr(leaf, "shape")
        for part in _fixed_parts(value)
        for _, leaf in _flatten(part)[0]
    )


def _fixed_parts(value: Any) -> Iterator[Any]:
    """The outermost containers in a value that are no dict and no list."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _fixed_parts(part)
    elif not is_object(value) and not jax.tree_util.all_leaves([value]):
        yield value
