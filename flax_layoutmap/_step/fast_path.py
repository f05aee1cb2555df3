"""The fast path: a call like an earlier one runs the same program directly.

A route caches what was found out about a call: its program, the Variables it reads and
writes. The next equal call splits no argument. What a route does not compare (the
leaves of a pure tree, the values of Variables) the program compares when JAX traces it:
it then raises, the route is dropped, and the call takes the slow path.
"""

import collections
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer

from flax_layoutmap._place.place import put
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._step.arguments import Argument, Call, Slot, spans
from flax_layoutmap._step.inputs import buffers_of
from flax_layoutmap._step.program import Program, StaleProgramError, Tree
from flax_layoutmap._step.trace import context_key, mesh_needed
from flax_layoutmap._tree.flax_internals import (
    can_write,
    is_nnx_object,
    read_value,
    variables_of,
    write_value,
)
from flax_layoutmap._tree.graph import drain
from flax_layoutmap._tree.watch import Watch

# Kinds of calls that one function caches; each has up to `_STATES` routes, for the
# states of its objects (modes such as train and eval).
_KINDS = 64
_STATES = 8

# After so many stale routes in a row, a kind of call keeps none: states of several
# shapes in turn would make JAX trace a program for nothing at every call.
_PATIENCE = 4

# The part of a key for an argument that cannot be recognised; no kept key has it.
_UNKNOWN = object()


class FastPath:
    """The routes of one function with these positional parameters."""

    def __init__(self, names: Sequence[str]) -> None:
        """Start without routes; `names` are the positional parameters, in order."""
        self._names = tuple(names)
        # (name, type) of an argument → function that returns its part of the key.
        self._parts: dict[tuple[str, type], Any] = {}
        self._routes: dict[Any, Sequence[_Route]] = {}
        # How many of a kind's routes were stale since one of them ran.
        self._stale: dict[Any, int] = {}

    def call(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], rules: RuleSet | None
    ) -> tuple[bool, Any]:
        """Call the program, if there is a route to it.

        Returns:
            Whether it ran, and the function's result. If not, nothing has happened.
        """
        key, roots = self._look(args, kwargs, rules)
        try:
            known = self._routes.get(key, ())
        except TypeError:  # a constant that cannot be hashed
            return False, None
        for route in known:
            if not route.fits(roots):
                continue
            try:
                ran, result = route.run(args, kwargs)
            except StaleProgramError:  # leaves of other shapes, in a pure tree
                self._keep(key, [other for other in known if other is not route])
                self._stale[key] = self._stale.get(key, 0) + 1
                continue
            if ran:
                if self._stale:
                    self._stale.pop(key, None)
                return True, result
        return False, None

    def _look(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], rules: RuleSet | None
    ) -> tuple[Any, list[Any]]:
        """The key of a call, and the NNX objects among its arguments.

        Calls with equal keys may share a route; None is the key of a call of no known
        kind. Routes keep the rule set alive, so that its id stays unique.
        """
        key: list[Any] = [id(rules), len(args), *context_key()]
        roots: list[Any] = []
        if len(args) > len(self._names):
            return None, roots
        values = (*args, *kwargs.values())
        names = (*self._names[: len(args)], *kwargs)
        for name, value in zip(names, values, strict=True):
            kind = type(value)
            part = self._parts.get((name, kind))
            if part is None:
                return None, roots
            if part is id:
                roots.append(value)
            key += (name, kind, part(value))
        return tuple(key), roots

    def remember(self, call: Call, program: Program, leaves: Sequence[Any]) -> None:
        """Keep the route of a call that took the slow path, if it can have one.

        `leaves` are those that the program was given.
        """
        if call.rules is None:
            return  # the program depends on the shardings of its state
        outcome = program.outcome
        if outcome.change or outcome.nested or outcome.returns_objects:
            return  # a change of structure comes once
        config: Any = jax.config
        if program.mesh is not None:
            return
        if not program.cacheable or config.jax_debug_nans or config.jax_debug_infs:
            return  # `jit` sets these two again for each call
        places = dict(zip(self._names, range(len(call.args)), strict=False))
        parts: dict[tuple[str, type], Any]
        parts = {(slot.name, type(value)): _itself for slot, value in call.slots}
        variables: dict[int, nnx.Variable[Any]] = {}
        fetches: dict[Slot, _Fetch] = {}
        arguments = call.arguments
        for argument, span in zip(arguments, spans(arguments), strict=True):
            slot, own = argument.slot, leaves[span.start : span.stop]
            if slot.key is not None or not _has_route(argument, own):
                return
            if argument.has_objects:
                variables.update(zip(span, variables_of(argument.value), strict=True))
            else:
                at = places.get(slot.name, slot.name)
                fetches[slot] = _Fetch(at, _moved(argument, own))
            parts[slot.name, type(argument.value)] = _part_of(argument)
        self._parts.update(parts)
        key, roots = self._look(call.args, call.kwargs, call.rules)
        if key is None or any(part is _UNKNOWN for part in key):
            return
        if self._stale.get(key, 0) > _PATIENCE:
            return
        watch = Watch(roots, lambda _: self._keep(key, []))
        if not watch.exact or watch.ids != set(map(id, variables.values())):
            return
        route = _Route(program, call.rules, watch, variables, fetches)
        # Drop routes of this program, or with other Variables: these are no longer in
        # the objects, and a route would keep them alive.
        others = [
            other
            for other in self._routes.pop(key, ())
            if other.program is not program and other.watch.ids == watch.ids
        ]
        self._keep(key, [route, *others][:_STATES])
        for kinds in (self._routes, self._stale):
            if len(kinds) > _KINDS:
                kinds.pop(next(iter(kinds)), None)

    def forget(self, program: Program) -> None:
        """Drop the routes to a program."""
        for key, known in list(self._routes.items()):
            self._keep(key, [route for route in known if route.program is not program])

    def _keep(self, key: Any, routes: Sequence["_Route"]) -> None:
        """Replace the routes of a kind of call."""
        if routes:
            self._routes[key] = routes
        else:
            self._routes.pop(key, None)


# ------------------------------------------------------------- keys of calls


def _has_route(argument: Argument, leaves: Sequence[Any]) -> bool:
    """Whether a later argument like this one can be recognised.

    A pure state must need no change; the Variables of an NNX object must hold the
    leaves, one each.
    """
    if any(isinstance(leaf, Tracer) for leaf in argument.raw):
        return False
    if argument.has_objects:
        if not is_nnx_object(argument.value):
            return False
        values = list(map(read_value, variables_of(argument.value)))
        are_arrays = all(isinstance(value, jax.Array) for value in values)
        return are_arrays and len(values) == len(leaves)
    return not argument.is_state or all(map(operator.is_, argument.raw, leaves))


def _moved(argument: Argument, leaves: Sequence[Any]) -> tuple[Any, ...] | None:
    """The shardings that the leaves of data were put in; None if all stayed."""
    shardings = tuple(
        None if new is old else new.sharding
        for old, new in zip(argument.raw, leaves, strict=True)
    )
    return None if all(sharding is None for sharding in shardings) else shardings


def _part_of(argument: Argument) -> Callable[[Any], Any]:
    """The function that returns the part of the key for an argument of this kind."""
    if argument.has_objects:
        return id
    if argument.is_state:
        return type
    return _part_of_leaf(type(argument.value)) or _part_of_container


def _itself(value: Any) -> Any:
    return value


_part_of_array = operator.attrgetter("shape", "dtype", "sharding", "committed")
_part_of_host_array = operator.attrgetter("shape", "dtype")


@functools.lru_cache(maxsize=256)
def _part_of_leaf(kind: type) -> Any:
    """The same for a leaf of a type; None for a container."""
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
    return treedef, kinds, *(part(x) for part, x in zip(parts, leaves, strict=True))


# ------------------------------------------------------------------------ routes


class _Fetch(NamedTuple):
    """A pure tree of a call, by position or name, and the shardings of its leaves.

    A leaf with None stays; `shardings` is None if all do.
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


class _Route:
    """The program of one kind of call, its Variables and pure trees."""

    # The last few of all functions that have run.
    _recent: ClassVar[tuple["weakref.ref[_Route]", ...]] = ()

    def __init__(
        self,
        program: Program,
        rules: RuleSet,
        watch: Watch,
        variables: Mapping[int, nnx.Variable[Any]],
        fetches: Mapping[Slot, _Fetch],
    ) -> None:
        """`variables` are by position over all leaves; `watch` compares the objects."""
        self.program, self.rules, self.watch = program, rules, watch
        self._mesh = mesh_needed(rules)
        places = program.places
        positions = (*places.donated, *places.kept)
        # Those that the program changes are the first.
        self._variables = [variables[at] for at in positions]
        self._wanted = [program.wanted[at] for at in positions]
        self._changed = self._variables[: len(program.outcome.changed)]
        self._donates = len(places.donated)

        def found(trees: Sequence[Tree]) -> list[_Fetch]:
            return [fetches[tree.slot] for tree in trees]

        treedefs = [tree.treedef for tree in places.given]
        self._given = list(zip(found(places.given), treedefs, strict=True))
        self._rest = found(places.rest)
        self._rest_is_flat = all(
            jax.tree_util.treedef_is_leaf(tree.treedef) for tree in places.rest
        )
        # Ids of the values that the last call left in the Variables, and of those that
        # its program wrote.
        self._ids: list[int] = []
        self._written: list[int] = []

    def fits(self, roots: Sequence[Any]) -> bool:
        """Whether the objects of a call are those of this route."""
        if not roots:
            return True
        if not self.watch.fits(roots):
            return False
        return not self._variables or can_write(self._variables[0])

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
        """Run the program and write back.

        Returns:
            Whether it ran, and the function's result. If not, nothing has happened.

        Raises:
            StaleProgramError: the program is not for these; nothing has happened.
        """
        inputs = self._inputs(args, kwargs)
        if inputs is None:
            return False, None
        outputs: dict[int, list[Any]] = {}
        try:
            if self._mesh is None:
                result = self._run(inputs, outputs)
            else:
                with jax.sharding.use_abstract_mesh(self._mesh):
                    result = self._run(inputs, outputs)
        except StaleProgramError:
            raise
        except (RuntimeError, TypeError, ValueError) as error:
            # Either the arguments were refused, or the program failed while it ran.
            if isinstance(error, jax.errors.JaxRuntimeError):
                raise
            if self._are_as_wanted(inputs):
                raise
            return False, None
        if self._changed:
            self._note(list(map(id, outputs[0][:-1])))
        return True, result

    def _run(self, inputs: Any, outputs: dict[int, list[Any]]) -> Any:
        """The function's result; the outputs of the program are kept in `outputs`.

        One expression in C runs the step and writes every value back: an interrupt
        comes between two steps of Python, so it cannot separate them.
        """
        if not self._changed:
            return self.program.jitted(*inputs)[-1]
        results = itertools.chain.from_iterable(
            map(
                functools.partial(outputs.setdefault, 0),
                itertools.starmap(self.program.jitted, (inputs,)),
            )
        )
        drain(map(write_value, self._changed, results))
        return next(results)

    def _inputs(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...] | None:
        """The inputs of the program; None if they do not fit it.

        A deleted array, or one that is donated and passed twice, may end the process
        (jax 0.10, several devices). JAX refuses other layouts.
        """
        given: list[Any] = []
        for fetch, treedef in self._given:
            leaves, own = jax.tree.flatten(fetch.tree(args, kwargs))
            if own != treedef:
                return None
            given.append(leaves)
        rest = tuple([fetch.tree(args, kwargs) for fetch in self._rest])
        count = self._donates
        values = list(map(read_value, self._variables))
        ids = list(map(id, values))
        if are_deleted(values):
            return None
        if ids != self._ids:
            # Values were set outside this route.
            if not self._knows(ids):
                if not all(map(_is_placed, values, self._wanted)):
                    return None
                if count and not _are_apart(values, count):
                    return None
            self._ids = ids
        if given or count:
            pure = list(itertools.chain.from_iterable(given))
            # Most data is a single array.
            others = rest if self._rest_is_flat else jax.tree.leaves(rest)
            if are_deleted(pure) or are_deleted(others):
                return None
            own_ids = set(map(id, pure))
            if len(own_ids) < len(pure) or not own_ids.isdisjoint(ids):
                return None
            if not set(map(id, others)).isdisjoint(own_ids.union(ids)):
                return None
        return values[:count], values[count:], given, rest

    # Values that a program has written share memory with no others; values that it left
    # unchanged have been compared once, if the route donates them. So values known to
    # one of the last few routes need no check.

    def _knows(self, ids: list[int]) -> bool:
        """Whether values were written by programs, or are those of the last call."""
        recent = [route for ref in _Route._recent if (route := ref()) is not None]
        count, own = self._donates, set(ids)
        # As after the same step in another mode; the cheapest check.
        if any(other._donates == count and other._ids == ids for other in recent):
            return True
        written = {at for other in recent for at in other._written}
        return (
            len(own) == len(ids)
            and own.issubset(written.union(self._ids))
            and written.union(self._ids[:count]).issuperset(ids[:count])
        )

    def _note(self, written: list[int]) -> None:
        """Record the ids that a call has written; the other values are unchanged."""
        self._ids = [*written, *self._ids[len(written) :]]
        self._written = written
        own: weakref.ref[_Route] = weakref.ref(self)
        recent = _Route._recent
        if not recent or recent[0] is not own:
            others = [ref for ref in recent if ref is not own]
            _Route._recent = (own, *others[: _STATES - 1])

    def _are_as_wanted(self, inputs: tuple[Any, ...]) -> bool:
        """Whether inputs have the structures and layouts of the program."""
        program, count = self.program, len(self.program.wanted)
        order, structure = jax.tree.flatten(program.places.inputs(range(count)))
        leaves, own = jax.tree.flatten(inputs)
        if own != structure:
            return False
        if are_deleted(leaves):
            # Deleted by the program itself, or else before the call.
            return bool(program.donated)
        wanted = (program.wanted[at] for at in order)
        return all(
            where is None or getattr(leaf, "sharding", None) == where
            for leaf, where in zip(leaves, wanted, strict=True)
        )


def are_deleted(leaves: Sequence[Any]) -> bool:
    """Whether one of these is a deleted array."""
    if not leaves:
        return False
    try:
        # The method of the type is much faster than an attribute of each array.
        return any(map(type(leaves[0]).is_deleted, leaves))
    except (AttributeError, TypeError):  # other things among them
        return any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves)


def _are_apart(values: Sequence[Any], count: int) -> bool:
    """Whether the first of these arrays share no memory with others of them."""
    seen = collections.Counter(part for value in values for part in buffers_of(value))
    return all(seen[part] == 1 for v in values[:count] for part in buffers_of(v))


def _is_placed(value: Any, wanted: Any) -> bool:
    """Whether it is an array with the right sharding."""
    if not isinstance(value, jax.Array):
        return False
    return wanted is None or (value.committed and value.sharding == wanted)
