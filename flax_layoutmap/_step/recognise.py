"""Recognise a call that equals an earlier one, and run its program at once.

NNX objects are not flattened for it. An object is unchanged if its attributes, and
those of the objects below it, are the very same objects, and constants that can change
in place hold the same. What is not recognised takes the way of a new call.
"""

import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer

from flax_layoutmap._core.fetch import own_sharding
from flax_layoutmap._place.place import put
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._step.arguments import Argument, Call, positional_names, spans
from flax_layoutmap._step.inputs import are_deleted
from flax_layoutmap._step.program import (
    Program,
    StaleProgramError,
    are_apart,
    note_outputs,
)
from flax_layoutmap._step.trace import context_key, mesh_needed
from flax_layoutmap._tree.flax_internals import (
    is_bookkeeping,
    is_nnx_object,
    read_metadata,
    write_value,
)
from flax_layoutmap._tree.watch import Uncomparable, contents, is_hashable

# How many calls one function remembers: modes of its objects, shapes of its batches.
_CALLS = 16

_read_value = nnx.Variable.get_raw_value

_flat = itertools.chain.from_iterable


class KnownCalls:
    """The calls of one function that can be recognised, the last one first."""

    def __init__(self, signature: Any) -> None:
        """Start without any."""
        self._names = positional_names(signature)
        self._calls: list[_KnownCall] = []
        self._count: dict[int, int] = {}  # calls by program that were not recognised

    def run(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], rules: RuleSet | None
    ) -> tuple[bool, Any]:
        """Run the program of an equal call, if there was one.

        Returns:
            Whether it ran, and the function's result. If not, nothing has happened.
        """
        kind = _kind(args, kwargs, rules)
        values = (*args, *kwargs.values())
        for number, known in enumerate(self._calls):
            leaves = known.leaves(values) if known.kind == kind else None
            if leaves is None:
                continue
            if number:
                self._calls.insert(0, self._calls.pop(number))
            try:
                return True, known.run(leaves)
            except StaleProgramError:  # while JAX traces it
                self.forget(known.program)
                break
        return False, None

    def remember(self, call: Call, program: Program, leaves: Sequence[Any]) -> None:
        """Remember a call that has run with these leaves, if it can be recognised."""
        outcome = program.outcome
        names = [*self._names[: len(call.args)], *call.kwargs]
        simple = all(slot.name == slot.parameter for slot, _ in call.slots)
        if outcome.structure or outcome.returns_objects or not simple:
            return
        # From the second call of a program on, as the first may have edited constants
        # in place; and not each time, as some calls are never recognised.
        self._count[id(program)] = count = self._count.get(id(program), 0) + 1
        if count == 1 or count & (count - 1):
            return
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            return
        if mesh_needed(call.rules) is not None and not any(map(own_sharding, leaves)):
            return  # needs `jax.set_mesh`
        try:
            known = _KnownCall(call, program, leaves, names, self.forget)
        except (_UnknownError, Uncomparable):
            return
        self._calls = [known, *self._calls[: _CALLS - 1]]

    def forget(self, program: Program | None = None) -> None:
        """Forget the calls of a program, and those whose objects are gone."""
        alive = [known for known in self._calls if known.is_alive()]
        self._calls = [known for known in alive if known.program is not program]


def _kind(args: Sequence[Any], kwargs: Mapping[str, Any], rules: Any) -> Any:
    """What an equal call has in common besides its arguments."""
    return len(args), tuple(kwargs), id(rules), context_key()


class _UnknownError(Exception):
    """An argument that cannot be recognised."""


class _KnownCall:
    """A call that has run, and its program."""

    def __init__(
        self,
        call: Call,
        program: Program,
        leaves: Sequence[Any],
        names: Sequence[str],
        on_death: Callable[[], None],
    ) -> None:
        """`names` are those of the values in the call, positional ones first."""
        self.program = program
        self.kind = _kind(call.args, call.kwargs, call.rules)
        self._rules = call.rules  # lives on, so that its id stays its own
        self._mesh = mesh_needed(call.rules)
        place = {name: at for at, name in enumerate(names)}
        self._static = [(place[s.name], type(v), v) for s, v in call.static.items()]
        self._sources: list[tuple[int, _Tree | _Object]] = []
        for argument, span in zip(call.arguments, spans(call.arguments), strict=True):
            placed = leaves[span.start : span.stop]
            source = (
                _Object(argument, placed, on_death)
                if argument.objects
                else _Tree(argument, placed)
            )
            self._sources.append((place[argument.name], source))
        # Objects come last, as comparing them takes longest.
        numbered = enumerate(self._sources)
        self._order = sorted(numbered, key=lambda x: isinstance(x[1][1], _Object))
        # PRNG keys, for whose shardings JAX has several spellings.
        pairs = enumerate(zip(leaves, program.wanted, strict=True))
        keys = [(at, x, where) for at, (x, where) in pairs if where and _is_key(x)]
        self._keys = [(at, where) for at, x, where in keys if x.sharding != where]
        parts = call.parts
        self._changed = [parts[at] for at in program.outcome.changed]

    def is_alive(self) -> bool:
        return all(source.is_alive() for _, source in self._sources)

    def leaves(self, values: Sequence[Any]) -> list[Any] | None:
        """The leaves for the program, if a call with these values equals this one."""
        for at, kind, value in self._static:
            if type(values[at]) is not kind or values[at] != value:
                return None
        below: list[Any] = [None] * len(self._order)
        for number, (at, source) in self._order:
            below[number] = source.leaves_of(values[at])
            if below[number] is None:
                return None
        leaves: list[Any] = list(_flat(below))
        state = [leaves[at] for at in self.program.state]
        if are_deleted(state):
            return None
        if self.program.donated and not (
            len(set(map(id, leaves))) == len(leaves) and are_apart(state)
        ):
            return None
        for at, where in self._keys:
            leaves[at] = put(leaves[at], where)
        return leaves

    def run(self, leaves: list[Any]) -> Any:
        """Run the program, and write its changes into the Variables."""
        if self._mesh is None:
            new, result = self.program.run(leaves)
        else:
            with jax.sharding.use_abstract_mesh(self._mesh):
                new, result = self.program.run(leaves)
        if new:
            # Raises an error if this is another level of tracing.
            self._changed[0].set_raw_value(new[0])
            for variable, value in zip(self._changed, new, strict=True):
                write_value(variable, value)
        note_outputs(self.program, leaves, new, result)
        return result


def _is_key(leaf: Any) -> bool:
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


_GETTERS = tuple(map(operator.attrgetter, ("aval", "sharding", "committed")))


def _arrays(leaves: Sequence[Any]) -> list[Any]:
    """What arrays are to a program, to compare."""
    try:
        return [*_flat(map(getter, leaves) for getter in _GETTERS)]
    except AttributeError:
        return list(map(_description, leaves))


def _description(leaf: Any) -> Any:
    if isinstance(leaf, Tracer):
        return object()  # equals nothing
    if isinstance(leaf, jax.Array):
        return tuple(getter(leaf) for getter in _GETTERS)
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.shape, leaf.dtype
    return type(leaf)


class _Tree:
    """An argument without NNX objects."""

    def __init__(self, argument: Argument, placed: Sequence[Any]) -> None:
        self._treedef = argument.form.outer
        self._arrays = _arrays(argument.raw)
        pairs = list(zip(argument.raw, placed, strict=True))
        self._moves = [None if a is b else b.sharding for a, b in pairs]
        self._stays = not any(self._moves)
        if argument.is_state and not self._stays:
            raise _UnknownError  # comes once

    def is_alive(self) -> bool:
        return True

    def leaves_of(self, value: Any) -> list[Any] | None:
        """The leaves of an equal tree, placed; None for another one."""
        leaves, treedef = jax.tree.flatten(value)
        if treedef != self._treedef or _arrays(leaves) != self._arrays:
            return None
        if self._stays:
            return leaves
        pairs = zip(leaves, self._moves, strict=True)
        return [x if where is None else put(x, where) for x, where in pairs]


class _Object:
    """An argument that is an NNX object.

    It is recognised if its structure and constants are as they were. The object itself
    is not kept alive, but what is in it.
    """

    def __init__(
        self, argument: Argument, placed: Sequence[Any], on_death: Callable[[], None]
    ) -> None:
        root = argument.value
        if not is_nnx_object(root):  # it is further inside, or a Variable
            raise _UnknownError
        self._alive = weakref.ref(root, lambda _: on_death())
        self._seen: dict[int, Any] = {}
        self._dicts: list[dict[Any, Any]] = []
        self._lists: list[list[Any]] = []
        self._variables: list[nnx.Variable[Any]] = argument.parts  # type: ignore[assignment]
        self._hashed: list[Any] = []
        self._read: list[Any] = []
        self._look_below(root)
        self._seen[id(root)] = None
        known = [v for v in self._seen.values() if isinstance(v, nnx.Variable)]
        if {*map(id, known)} != {*map(id, argument.parts)} or len(known) < len(placed):
            raise _UnknownError
        self._arrays = _arrays(placed)
        self._keys = self._all_keys()
        keys = enumerate(_flat(self._dicts))
        compared = [at for at, key in keys if not is_bookkeeping(key)]
        count = sum(map(len, self._dicts))
        compared += range(count, count + sum(map(len, self._lists)))
        self._pick = operator.itemgetter(*compared, *compared[:1])
        self._values = self._pick(self._all_values())
        self._constants = self._all_constants()

    def is_alive(self) -> bool:
        return self._alive() is not None

    def leaves_of(self, value: Any) -> list[Any] | None:
        """The values of its Variables, if it is this object and unchanged."""
        if self._alive() is not value:
            return None
        try:
            if (
                self._all_keys() != self._keys
                or not all(
                    map(operator.is_, self._pick(self._all_values()), self._values)
                )
                or self._all_constants() != self._constants
            ):
                return None
        except (IndexError, TypeError, ValueError):  # no such value, or not comparable
            return None
        leaves = list(map(_read_value, self._variables))
        return leaves if _arrays(leaves) == self._arrays else None

    def _all_keys(self) -> list[Any]:
        return [*_flat(self._dicts), *map(len, self._lists)]

    def _all_values(self) -> list[Any]:
        return [*_flat(map(dict.values, self._dicts)), *_flat(self._lists)]

    def _all_constants(self) -> list[Any]:
        return [
            *map(read_metadata, self._variables),
            *map(type, self._variables),
            *map(hash, self._hashed),
            *map(contents, self._read),
        ]

    def _look_below(self, node: Any) -> None:
        """Find the containers, Variables and constants that a node refers to."""
        if id(node) in self._seen:
            if node is self._alive():
                raise _UnknownError  # what refers to it would keep it alive
            return
        if not isinstance(node, tuple):  # whose id may be another's afterwards
            self._seen[id(node)] = node
        children: Iterable[Any] = ()
        if isinstance(node, nnx.Variable):
            children = read_metadata(node).values()
        elif isinstance(node, nnx.Pytree):
            attributes = vars(node)
            self._dicts.append(attributes)
            children = [v for k, v in attributes.items() if not is_bookkeeping(k)]
        elif isinstance(node, nnx.State):
            children = [node.raw_mapping]
        elif type(node) is dict:
            self._dicts.append(node)
            children = node.values()
        elif type(node) is list:
            self._lists.append(node)
            children = node
        elif isinstance(node, tuple):
            children = node
        elif not is_hashable(node):
            self._read.append(node)
        elif type(node).__hash__ is not object.__hash__:
            self._hashed.append(node)
        for child in children:
            if type(child) not in _ATOMS:
                self._look_below(child)


# Types of constants that cannot change.
_ATOMS = (bool, int, float, complex, str, bytes, type(None), np.dtype)
