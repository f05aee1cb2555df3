"""Calls that look like an earlier one go straight to their program.

What was found out about a call is kept as a route: which program it has, which
Variables go in, which come out. The next call that looks the same takes no argument
apart. What a route does not look at (the leaves of a pure tree, the values of
Variables), the program itself does when JAX traces it for them: it then raises, and the
call goes the long way.
"""

import collections
import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from flax_layoutmap._arguments import Argument, Slot
from flax_layoutmap._flax_internals import (
    can_write,
    is_nnx_object,
    read_value,
    variables_of,
    write_value,
)
from flax_layoutmap._place import put
from flax_layoutmap._program import OtherArgumentsError, Program
from flax_layoutmap._rules import RuleSet
from flax_layoutmap._watch import Watch

# Runs an iterator to its end, in C.
_drain = collections.deque[Any](maxlen=0).extend

# Kinds of calls that one function remembers, and states of objects for each of them
# (modes such as train and eval).
_KINDS, _STATES = 64, 8

# Roles of arguments.
_OBJECT, _STATE, _DATA, _STATIC = range(4)

# Kinds of leaves.
_ARRAY, _HOST, _NUMBER, _CONTAINER = range(4)

# How many leaves of a donated tree are looked at.
_PROBES = 8

# How many more misses than hits a route may have.
_PATIENCE = 4


class Look(NamedTuple):
    """What a call looks like.

    Attributes:
        key: equal for calls that may share a route.
        roots: the NNX objects among the arguments.
    """

    key: Any
    roots: list[Any]


class Fetch(NamedTuple):
    """Where a pure tree is found in a call, and where its leaves are put.

    Attributes:
        at: position, or name.
        shardings: one per leaf, None for leaves that stay; None if all do.
        probes: each finds a leaf in such a tree: the first below each child of the
            root, or some of them.
    """

    at: int | str
    shardings: tuple[Any, ...] | None
    probes: tuple[Callable[[Any], Any], ...]

    def is_alive(self, tree: Any) -> bool:
        """Whether a donated tree was not given away before, as far as the probes tell.

        To a program, arrays that are deleted are an error, or the end of the process.
        """
        try:
            return not any(probe(tree).is_deleted() for probe in self.probes)
        except (AttributeError, KeyError, IndexError, TypeError):
            return False  # a tree of another structure

    def tree(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The tree, placed."""
        tree = args[self.at] if isinstance(self.at, int) else kwargs[self.at]
        if self.shardings is None:
            return tree
        leaves, treedef = jax.tree.flatten(tree)
        placed = [
            leaf if sharding is None else put(leaf, sharding)
            for leaf, sharding in zip(leaves, self.shardings, strict=True)
        ]
        return jax.tree.unflatten(treedef, placed)


class Route:
    """The way of one kind of call to its program."""

    def __init__(
        self,
        program: Program,
        rules: RuleSet | None,
        watch: Watch,
        variables: Mapping[int, nnx.Variable[Any]],
        fetches: Mapping[Slot, Fetch],
        mesh: Any,
    ) -> None:
        """Keeps what a call needs.

        Args:
            program: the program.
            rules: the rule set, which the key holds by identity.
            watch: tells whether the objects are still the same.
            variables: position, over all leaves → the Variable.
            fetches: where the pure trees are.
            mesh: the abstract mesh that the program needs as context, or None.
        """
        self.program, self.rules, self.watch = program, rules, watch
        self.mesh = mesh
        self.donated = [variables[at] for at in program.donated]
        self.kept = [variables[at] for at in program.kept]
        self.changed = [variables[at] for at in program.changed]
        self.given = [fetches[tree.slot] for tree in program.given]
        self.rest = [fetches[tree.slot] for tree in program.rest]
        self.values = [*self.donated, *self.kept]
        self.wanted = [program.wanted[at] for at in (*program.donated, *program.kept)]
        self.ids: list[int] = []  # of the values that the last call left
        self.hits = self.misses = 0

    def fits(self, roots: Sequence[Any]) -> bool:
        """Whether the objects of a call are those of this route."""
        if not roots:
            return True
        if not self.watch.fits(roots):
            return False
        variables = self.watch.variables
        return not variables or can_write(variables[0])

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
        """Runs the program and writes back.

        Returns:
            Whether it ran, and the function's result. If not, nothing has happened.
        """
        given = tuple([fetch.tree(args, kwargs) for fetch in self.given])
        for fetch, tree in zip(self.given, given, strict=True):
            if not fetch.is_alive(tree):
                return False, None  # given away before
        rest = tuple([fetch.tree(args, kwargs) for fetch in self.rest])
        donated: list[Any] = []
        kept: list[Any] = []
        if self.values:
            values = list(map(read_value, self.values))
            if not self._are_well(values):
                return False, None
            count = len(self.donated)
            donated, kept = values[:count], values[count:]
            del values
        inputs = donated, kept, given, rest
        # One expression in C runs the step and writes every value back: an interrupt
        # comes between two steps of Python, so it cannot fall in between.
        results = itertools.chain.from_iterable(
            itertools.starmap(self.program.jitted, (inputs,))
        )
        try:
            if self.mesh is None:
                _drain(map(write_value, self.changed, results))
                result = next(results)
            else:
                with jax.sharding.use_abstract_mesh(self.mesh):
                    _drain(map(write_value, self.changed, results))
                    result = next(results)
        except (OtherArgumentsError, TypeError, ValueError):
            if any(map(_is_deleted, donated)):
                raise
            return False, None  # other shapes, structures or layouts
        if self.values:
            self.ids = list(map(id, map(read_value, self.values)))
        self.hits += 1
        return True, result

    def _are_well(self, values: Sequence[Any]) -> bool:
        """Whether values are different arrays that lie just as the program wants."""
        try:
            if any(map(_is_deleted, values)):
                return False
        except AttributeError:  # a value that is no array
            return False
        if list(map(id, values)) == self.ids:
            return True  # nobody put another one there since the last call
        return len(set(map(id, values))) == len(values) and all(
            wanted is None or (value.committed and value.sharding == wanted)
            for value, wanted in zip(values, self.wanted, strict=True)
        )


_is_deleted = operator.methodcaller("is_deleted")


class Routes:
    """The routes of one function."""

    def __init__(self, names: Sequence[str]) -> None:
        """Begins without any.

        Args:
            names: the positional parameters, in order.
        """
        self._names = tuple(names)
        self._roles: dict[tuple[str, type], int] = {}
        self._kinds: dict[type, int] = {}
        self._routes: dict[Any, list[Route] | None] = {}

    def look(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], rules: RuleSet | None
    ) -> Look | None:
        """What a call looks like; None if it is of no kind that was seen.

        Args:
            args: positional arguments.
            kwargs: the others.
            rules: the rule set, which routes keep alive: its id is no other's.
        """
        if len(args) > len(self._names):
            return None
        config: Any = jax.config
        debugs = config.jax_debug_nans, config.jax_debug_infs  # nothing is donated then
        parts: list[Any] = [id(rules), *debugs, len(args), *kwargs]
        roots: list[Any] = []
        roles = self._roles
        for name, value in itertools.chain(
            zip(self._names, args, strict=False), kwargs.items()
        ):
            kind = type(value)
            role = roles.get((name, kind))
            if role == _OBJECT:
                roots.append(value)
                parts.append(id(value))
            elif role == _STATE:
                parts.append(kind)
            elif role == _DATA:
                part = self._data(value)
                if part is None:
                    return None
                parts.append(part)
            elif role == _STATIC:
                parts += (kind, value)
            else:
                return None
        return Look(tuple(parts), roots)

    def _data(self, value: Any) -> Any:
        if self._kind(value) != _CONTAINER:
            return self._leaf(value)
        leaves, treedef = jax.tree.flatten(value)
        parts = [self._leaf(leaf) for leaf in leaves]
        return None if None in parts else (treedef, *parts)

    def _kind(self, leaf: Any) -> int:
        kind = type(leaf)
        known = self._kinds.get(kind)
        if known is None:
            known = self._kinds[kind] = _kind_of_leaf(leaf)
        return known

    def _leaf(self, leaf: Any) -> Any:
        kind = self._kind(leaf)
        if kind == _ARRAY:
            return leaf.shape, leaf.dtype, leaf.sharding, leaf.committed
        if kind == _HOST:
            return type(leaf), leaf.shape, leaf.dtype
        return type(leaf) if kind == _NUMBER else None

    def call(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], rules: RuleSet | None
    ) -> tuple[bool, Any]:
        """Calls the program, if there is a route to it.

        Returns:
            Whether it ran, and the function's result. If not, nothing has happened.
        """
        look = self.look(args, kwargs, rules)
        if look is None:
            return False, None
        try:
            known = self._routes.get(look.key)
        except TypeError:  # a constant that cannot be hashed
            return False, None
        for route in known or ():
            if route.fits(look.roots):
                ran, result = route.run(args, kwargs)
                if not ran:
                    self._missed(look, route)
                return ran, result
        return False, None

    def _missed(self, look: Look, route: Route) -> None:
        """Notes that a route did not fit after all; too often, and its kind has none.

        So it is with trees of several structures in turn, which a route does not see.
        """
        route.misses += 1
        if route.misses > _PATIENCE + route.hits:
            self._routes[look.key] = None

    def prepare(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        arguments: Sequence[Argument],
        program: Program,
        mesh: Any,
        rules: RuleSet | None,
    ) -> tuple[Look, Route] | None:
        """The route of a call that goes the long way, before it does; None without one.

        Args:
            args: positional arguments.
            kwargs: the others.
            arguments: those that are no constants, taken apart.
            program: their program.
            mesh: the abstract mesh that it needs as context, or None.
            rules: the rule set.
        """
        if not program.cacheable:
            return None
        given = dict(zip(self._names, args, strict=False)) | dict(kwargs)
        places = dict(zip(self._names, range(len(args)), strict=False))
        roles = {(name, type(value)): _STATIC for name, value in given.items()}
        variables: dict[int, nnx.Variable[Any]] = {}
        fetches: dict[Slot, Fetch] = {}
        start = 0
        for argument in arguments:
            slot = argument.slot
            if slot.key is not None or not _has_route(argument):
                return None
            if argument.has_objects:
                role = _OBJECT
                variables.update(enumerate(variables_of(argument.value), start))
            else:
                role = _STATE if argument.is_state else _DATA
                at = places.get(slot.name, slot.name)
                probes = _probes(argument.value) if argument.is_donated else ()
                fetches[slot] = Fetch(at, _moved(argument), probes)
            roles[slot.name, type(argument.value)] = role
            start += len(argument.leaves)
        self._roles.update(roles)
        look = self.look(args, kwargs, rules)
        if look is None or self._routes.get(look.key, ()) is None:
            return None
        routes, key = self._routes, look.key

        def forget(_: Any) -> None:
            routes.pop(key, None)

        watch = Watch(look.roots, forget)
        watched = set(map(id, watch.variables))
        if not watch.exact or watched != set(map(id, variables.values())):
            return None
        return look, Route(program, rules, watch, variables, fetches, mesh)

    def drop(self, program: Program) -> None:
        """Forgets the ways to a program."""
        for key, known in list(self._routes.items()):
            if known is not None:
                known[:] = [route for route in known if route.program is not program]
                if not known:
                    del self._routes[key]

    def keep(self, look: Look, route: Route) -> None:
        """Keeps the route of a call that went well."""
        known = self._routes.setdefault(look.key, [])
        if known is not None:
            known.insert(0, route)
            del known[_STATES:]
        if len(self._routes) > _KINDS:
            del self._routes[next(iter(self._routes))]


def _has_route(argument: Argument) -> bool:
    """Whether a later argument like this one can be recognised.

    A pure state must need no change; of an NNX object the Variables must be the leaves.
    """
    if any(isinstance(leaf, Tracer) for leaf in argument.raw):
        return False
    if argument.has_objects:
        if not is_nnx_object(argument.value):
            return False
        values = map(read_value, variables_of(argument.value))
        pairs = itertools.zip_longest(values, argument.raw)
        return all(value is leaf for value, leaf in pairs)
    if argument.is_state:
        return all(map(operator.is_, argument.raw, argument.leaves))
    return True


def _moved(argument: Argument) -> tuple[Any, ...] | None:
    """Where we put the leaves of data; None if all stayed."""
    shardings = tuple(
        None if new is old else new.sharding
        for old, new in zip(argument.raw, argument.leaves, strict=True)
    )
    return None if all(sharding is None for sharding in shardings) else shardings


def _probes(tree: Any) -> tuple[Callable[[Any], Any], ...]:
    """Ways to the first leaf below each child of the root, for the first few."""
    found: dict[Any, Callable[[Any], Any]] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if len(found) == _PROBES:
            break
        child = keys[:1]
        if child in found or not isinstance(leaf, jax.Array):
            continue
        steps = [_step(key) for key in keys]
        if all(step is not None for step in steps):
            probe = functools.partial(_walk_down, steps)
        else:
            probe = _first_leaf
        found[child] = probe if _finds(probe, tree, leaf) else _first_leaf
    return tuple(dict.fromkeys(found.values()))


def _step(key: Any) -> Callable[[Any], Any] | None:
    if isinstance(key, DictKey):
        return operator.itemgetter(key.key)
    if isinstance(key, SequenceKey):
        return operator.itemgetter(key.idx)
    if isinstance(key, GetAttrKey):
        return operator.attrgetter(key.name)
    return None


def _walk_down(steps: Sequence[Any], node: Any) -> Any:
    for step in steps:
        if isinstance(node, nnx.Variable):
            return node.get_raw_value()
        node = step(node)
    return node


def _finds(probe: Callable[[Any], Any], tree: Any, leaf: Any) -> bool:
    try:
        return probe(tree) is leaf
    except (AttributeError, KeyError, IndexError, TypeError):
        return False


def _first_leaf(tree: Any) -> Any:
    return jax.tree.leaves(tree)[0]


def _kind_of_leaf(leaf: Any) -> int:
    if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
        return _ARRAY
    if isinstance(leaf, np.ndarray | np.generic):
        return _HOST
    if isinstance(leaf, bool | int | float | complex):
        return _NUMBER
    return _CONTAINER
