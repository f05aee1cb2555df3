"""Calls that look like an earlier one go straight to their program.

What was found out about a call is kept as a route: which program it has, which
Variables go in, which come out. The next call that looks the same takes no argument
apart.
"""

import functools
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer

from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._step.arguments import Argument, Slot
from flax_layoutmap._step.program import Program, surroundings
from flax_layoutmap._step.route import STATES, Fetch, Route
from flax_layoutmap._tree.flax_internals import is_nnx_object, read_value, variables_of
from flax_layoutmap._tree.watch import Watch

# Kinds of calls that one function remembers; each has up to `STATES` routes, for the
# states of its objects (modes such as train and eval).
_KINDS = 64

# Roles of arguments.
_OBJECT, _STATE, _DATA, _STATIC = range(4)

# How many more misses than hits a route may have.
_PATIENCE = 4

_call: Any = operator.call

# Stands for an argument of which nothing can be told; no kept look has it.
_UNKNOWN = object()


class Look(NamedTuple):
    """What a call looks like.

    Attributes:
        key: equal for calls that may share a route.
        roots: the NNX objects among the arguments.
    """

    key: tuple[Any, ...]
    roots: list[Any]


class Plan(NamedTuple):
    """How to look at the arguments of a call, whose types are known.

    Attributes:
        parts: what gives the part of the key, for each argument.
        objects: whether it is an NNX object, for each argument.
        has_objects: whether one is.
    """

    parts: tuple[Any, ...]
    objects: tuple[bool, ...]
    has_objects: bool


class Routes:
    """The routes of one function."""

    def __init__(self, names: Sequence[str]) -> None:
        """Begins without any.

        Args:
            names: the positional parameters, in order.
        """
        self._names = tuple(names)
        self._roles: dict[tuple[str, type], int] = {}
        self._plans: dict[tuple[Any, ...], Plan] = {}  # by types
        self._routes: dict[Any, list[Route] | None] = {}
        self._last: tuple[Any, list[Route] | None] = (None, None)

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
        parts = map(_call, plan.parts, values)
        key = (id(rules), *surroundings(), kinds, *parts)
        if not plan.has_objects:
            return Look(key, [])
        return Look(key, list(itertools.compress(values, plan.objects)))

    def _plan(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Plan | None:
        """How to look at arguments of these types; None if one is not known yet."""
        if len(args) > len(self._names):
            return None
        names = (*self._names[: len(args)], *kwargs)
        values = (*args, *kwargs.values())
        roles = [
            self._roles.get((name, type(value)))
            for name, value in zip(names, values, strict=True)
        ]
        if None in roles:
            return None
        parts = tuple(map(_part_of, roles, values))
        objects = tuple(role == _OBJECT for role in roles)
        return Plan(parts, objects, any(objects))

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
        key, roots = look
        try:
            last, known = self._last
            if key != last:
                known = self._routes.get(key)
                self._last = key, known
        except TypeError:  # a constant that cannot be hashed
            return False, None
        for route in tuple(known or ()):
            if route.fits(roots):
                ran, result = route.run(args, kwargs)
                if ran:
                    return True, result
                self._missed(look, route)
        return False, None

    def _set(self, key: Any, known: list[Route] | None) -> None:
        """Sets the routes of a kind of call."""
        self._routes[key] = known
        self._last = None, None

    def _delete(self, key: Any) -> None:
        """Forgets a kind of call."""
        self._routes.pop(key, None)
        self._last = None, None

    def _missed(self, look: Look, route: Route) -> None:
        """Notes that a route did not fit after all; too often, and its kind has none.

        So it is with trees of several structures in turn, which a route does not see.
        """
        route.misses += 1
        if route.misses > _PATIENCE + route.hits:
            self._set(look.key, None)

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
        config: Any = jax.config
        if config.jax_debug_nans or config.jax_debug_infs:
            return None  # `jit` has to tell JAX so at each call
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
        if look is None or any(part is _UNKNOWN for part in look.key):
            return None
        if self._routes.get(look.key, ()) is None:
            return None
        key = look.key  # all that the function below may keep
        watch = Watch(look.roots, lambda _: self._delete(key))
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
                    self._delete(key)

    def keep(self, look: Look, route: Route) -> None:
        """Keeps the route of a call that went well."""
        known = self._routes.get(look.key, [])
        self._set(look.key, known)
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
            del known[STATES:]
        if len(self._routes) > _KINDS:
            self._delete(next(iter(self._routes)))


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


def _part_of(role: Any, value: Any) -> Any:
    """What gives the part of the key for an argument of this role and type."""
    if role == _OBJECT:
        return id
    if role == _STATIC:
        return _itself
    return type if role == _STATE else _part_of_leaf(type(value)) or _part_of_container


def _itself(value: Any) -> Any:
    return value


_part_of_array = operator.attrgetter("shape", "dtype", "sharding", "committed")
_part_of_host_array = operator.attrgetter("shape", "dtype")


@functools.lru_cache(maxsize=256)
def _part_of_leaf(kind: type) -> Any:
    """What gives the part of the key for a leaf of a type; None for a container."""
    if issubclass(kind, Tracer):
        return None
    if issubclass(kind, jax.Array):
        return _part_of_array
    if issubclass(kind, np.ndarray | np.generic):
        return _part_of_host_array
    return type if issubclass(kind, bool | int | float | complex) else None


def _part_of_container(value: Any) -> Any:
    leaves, treedef = jax.tree.flatten(value)
    kinds = tuple(map(type, leaves))
    parts = tuple(map(_part_of_leaf, kinds))
    if None in parts:
        return _UNKNOWN
    return treedef, kinds, *map(_call, parts, leaves)
