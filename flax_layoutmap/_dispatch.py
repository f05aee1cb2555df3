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
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer

from flax_layoutmap._arguments import Argument, Slot
from flax_layoutmap._flax_internals import (
    can_write,
    is_nnx_object,
    read_value,
    variables_of,
    write_value,
)
from flax_layoutmap._graph import drain
from flax_layoutmap._inputs import buffers_of
from flax_layoutmap._place import put
from flax_layoutmap._program import OtherArgumentsError, Program, surroundings
from flax_layoutmap._rules import RuleSet
from flax_layoutmap._watch import Watch

# Kinds of calls that one function remembers, and states of objects for each of them
# (modes such as train and eval).
_KINDS, _STATES = 64, 8

# Roles of arguments.
_OBJECT, _STATE, _DATA, _STATIC = range(4)

# Kinds of leaves.
_ARRAY, _HOST, _NUMBER, _CONTAINER = range(4)

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
    """

    at: int | str
    shardings: tuple[Any, ...] | None

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


class Left:
    """Which values the last call of a route left in the Variables, by their ids.

    What a program has written shares memory with nothing; what is kept was compared
    once, where the route donates. So none of them has to be looked at again, whichever
    of the last few routes it was.
    """

    _recent: ClassVar[tuple["weakref.ref[Left]", ...]] = ()

    def __init__(self, donates: int) -> None:
        """Begins with none.

        Args:
            donates: how many values, the first ones, the route donates.
        """
        self.donates = donates
        self.ids: list[int] = []
        self.written: list[int] = []
        self._ref: weakref.ref[Left] = weakref.ref(self)

    def has(self, ids: list[int]) -> bool:
        """Whether values are known."""
        if ids == self.ids:
            return True
        recent = [left for ref in Left._recent if (left := ref()) is not None]
        # Among what is kept there may be arrays that share memory.
        if any(left.donates == self.donates and ids == left.ids for left in recent):
            return True
        count = self.donates
        own = set(ids)
        written = {at for left in recent for at in left.written}
        return (
            len(own) == len(ids)
            and own.issubset(written.union(self.ids))
            and written.union(self.ids[:count]).issuperset(ids[:count])
        )

    def note(self, ids: list[int], written: list[int]) -> None:
        """Notes what a call has left, and what of it its program has written."""
        self.ids, self.written = ids, written
        recent = Left._recent
        if not recent or recent[0] is not self._ref:
            others = [ref for ref in recent if ref is not self._ref]
            Left._recent = (self._ref, *others[: _STATES - 1])


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
        positions = (*program.donated, *program.kept)
        self.variables = [variables[at] for at in positions]
        self.wanted = [program.wanted[at] for at in positions]
        self.changed = [variables[at] for at in program.changed]
        self.given = [(fetches[tree.slot], tree.treedef) for tree in program.given]
        self.rest = [fetches[tree.slot] for tree in program.rest]
        self.left = Left(len(program.donated))
        self.written = len(self.changed)
        first = self.variables[: self.written]
        self.writes_first = all(map(operator.is_, self.changed, first))
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
        inputs = self._inputs(args, kwargs)
        if inputs is None:
            return False, None
        # One expression in C runs the step and writes every value back: an interrupt
        # comes between two steps of Python, so it cannot fall in between.
        outputs: dict[int, list[Any]] = {}
        results = itertools.chain.from_iterable(
            map(
                functools.partial(outputs.setdefault, 0),
                itertools.starmap(self.program.jitted, (inputs,)),
            )
        )
        try:
            if self.mesh is None:
                drain(map(write_value, self.changed, results))
                result = next(results)
            else:
                with jax.sharding.use_abstract_mesh(self.mesh):
                    drain(map(write_value, self.changed, results))
                    result = next(results)
        except OtherArgumentsError:
            return False, None  # other shapes
        except (RuntimeError, TypeError, ValueError) as error:
            # Either the arguments were refused, or the program failed while it ran.
            if isinstance(error, jax.errors.JaxRuntimeError):
                raise
            if self._are_as_wanted(inputs):
                raise
            return False, None
        written = list(map(id, outputs[0][:-1]))
        if self.writes_first:
            self.left.note([*written, *self.left.ids[self.written :]], written)
        else:
            self.left.note(list(map(id, map(read_value, self.variables))), written)
        self.hits += 1
        return True, result

    def _inputs(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...] | None:
        """The inputs of the program; None if they are not as it wants them.

        A deleted array, or one that is donated and comes twice, may be the end of the
        process. Other layouts are refused by JAX.
        """
        given: list[Any] = []
        for fetch, treedef in self.given:
            leaves, own = jax.tree.flatten(fetch.tree(args, kwargs))
            if own != treedef:
                return None
            given.append(leaves)
        rest = tuple([fetch.tree(args, kwargs) for fetch in self.rest])
        values = list(map(read_value, self.variables))
        if are_deleted(values):
            return None
        count = len(self.program.donated)
        donated, kept = values[:count], values[count:]
        ids = list(map(id, values))
        if not self.left.has(ids):
            # Somebody else has put values there.
            if not all(map(_is_placed, values, self.wanted)):
                return None
            if donated and not are_apart(values, count):
                return None
        self.left.ids = ids
        if donated or given:
            others = jax.tree.leaves(rest)
            if are_deleted(others):
                return None
            own_ids = set(map(id, others))
            for leaves in given:
                if are_deleted(leaves):
                    return None
                size = len(own_ids) + len(leaves)
                own_ids.update(map(id, leaves))
                if len(own_ids) < size:
                    return None
            if not own_ids.isdisjoint(ids):
                return None
        return donated, kept, given, rest

    def _are_as_wanted(self, inputs: tuple[Any, ...]) -> bool:
        """Whether inputs have the structures and layouts of the program."""
        donated, kept, given, rest = inputs
        if not all(map(_is_placed, (*donated, *kept), self.wanted)):
            return False
        program = self.program
        leaves = [leaf for own in given for leaf in own]
        positions = [at for tree in program.given for at in tree.positions]
        for place, tree in zip(program.rest, rest, strict=True):
            own, treedef = jax.tree.flatten(tree)
            if treedef != place.treedef:
                return False
            leaves += own
            positions += place.positions
        for at, leaf in zip(positions, leaves, strict=True):
            wanted = program.wanted[at]
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                # Before the call: what it gave away itself is to be told as lost.
                return are_deleted([leaf for own in given for leaf in own])
            if wanted is not None and getattr(leaf, "sharding", None) != wanted:
                return False
        return True


def are_deleted(leaves: Sequence[Any]) -> bool:
    """Whether one of these is a deleted array."""
    if not leaves:
        return False
    try:
        # The method of the type: far less work than one attribute after the other.
        return any(map(type(leaves[0]).is_deleted, leaves))
    except (AttributeError, TypeError):  # other things among them
        return any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves)


def are_apart(values: Sequence[Any], count: int) -> bool:
    """Whether the first of these arrays share no memory with others of them."""
    seen = collections.Counter(part for value in values for part in buffers_of(value))
    return all(seen[part] == 1 for v in values[:count] for part in buffers_of(v))


def _is_placed(value: Any, wanted: Any) -> bool:
    """Whether it is an array that lies where it should, or has been given away."""
    if not isinstance(value, jax.Array):
        return False
    if wanted is None or value.is_deleted():
        return True
    return value.committed and value.sharding == wanted


class Routes:
    """The routes of one function."""

    def __init__(self, names: Sequence[str]) -> None:
        """Begins without any.

        Args:
            names: the positional parameters, in order.
        """
        self._names = tuple(names)
        self._roles: dict[tuple[str, type], int] = {}
        self._plans: dict[tuple[Any, ...], tuple[int, ...]] = {}  # by types
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
        values = (*args, *kwargs.values())
        kinds = (len(args), *kwargs, *map(type, values))
        plan = self._plans.get(kinds)
        if plan is None:
            plan = self._plan(args, kwargs)
            if plan is None:
                return None
            self._plans[kinds] = plan
        parts: list[Any] = [id(rules), surroundings(), kinds]
        roots: list[Any] = []
        for role, value in zip(plan, values, strict=True):
            if role == _OBJECT:
                roots.append(value)
                parts.append(id(value))
            elif role == _DATA:
                part = self._data(value)
                if part is None:
                    return None
                parts.append(part)
            elif role == _STATIC:
                parts.append(value)
        return Look(tuple(parts), roots)

    def _plan(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[int, ...] | None:
        """The roles of arguments of these types; None if one is not known yet."""
        if len(args) > len(self._names):
            return None
        names = (*self._names[: len(args)], *kwargs)
        values = (*args, *kwargs.values())
        roles = [
            self._roles.get((name, type(value)))
            for name, value in zip(names, values, strict=True)
        ]
        return None if None in roles else tuple(roles)  # type: ignore[arg-type]

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
        for route in tuple(known or ()):
            if route.fits(look.roots):
                ran, result = route.run(args, kwargs)
                if ran:
                    return True, result
                self._missed(look, route)
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
        if not program.cacheable or program.change or program.nested:
            return None  # a change of structure comes once
        if program.returns_objects:
            return None
        if rules is None:
            return None  # a program depends on where its state lies
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
                fetches[slot] = Fetch(at, _moved(argument))
            roles[slot.name, type(argument.value)] = role
            start += len(argument.leaves)
        if self._roles != {**self._roles, **roles}:
            self._roles.update(roles)
            self._plans.clear()
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
            # Others of that program are of Variables that are there no more, and so are
            # those that know other Variables: they would keep them alive.
            own = route.watch.ids
            known[:] = [
                other
                for other in known
                if other.program is not route.program and other.watch.ids == own
            ]
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


def _kind_of_leaf(leaf: Any) -> int:
    if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
        return _ARRAY
    if isinstance(leaf, np.ndarray | np.generic):
        return _HOST
    if isinstance(leaf, bool | int | float | complex):
        return _NUMBER
    return _CONTAINER
