"""Recognise a call that equals an earlier one, and run its program at once.

NNX objects are not flattened for it. An object is unchanged if its attributes, and
those of the objects below it, are the very same objects, and constants that can change
in place hold the same. What is not recognised takes the way of a new call.
"""

import collections
import copy
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
from flax_layoutmap._step.arguments import Call, spans
from flax_layoutmap._step.donation import are_apart, are_deleted, note_outputs
from flax_layoutmap._step.program import Program, check_level
from flax_layoutmap._step.trace import context_key, mesh_needed
from flax_layoutmap._tree.flax_internals import (
    is_bookkeeping,
    is_nnx_object,
    read_metadata,
    read_value,
    write_value,
)
from flax_layoutmap._tree.watch import Uncomparable, contents, is_hashable

# How many calls one function remembers: modes of its objects, shapes of its batches.
_CALLS = 16

# Types of constants that cannot change.
_ATOMS = (bool, int, float, complex, str, bytes, type(None), np.dtype)

_flat = itertools.chain.from_iterable


class KnownCalls:
    """The calls of one function that can be recognised, the last one first."""

    def __init__(self) -> None:
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
        for known in self._calls:
            leaves = known.leaves(values) if known.kind == kind else None
            if leaves is None:
                continue
            if self._calls[:1] != [known]:  # others may have gone meanwhile
                self._calls = [known, *(x for x in self._calls if x is not known)]
            return True, known.run(leaves)
        return False, None

    def remember(self, call: Call, program: Program, leaves: Sequence[Any]) -> None:
        """Remember a call that has run with these leaves, if it can be recognised."""
        outcome = program.outcome
        # From the second call of a program on, as the first may have edited constants
        # in place; and not each time, as some calls are never recognised.
        self._count[id(program)] = count = self._count.get(id(program), 0) + 1
        if (
            outcome.structure
            or outcome.returns_objects
            or count == 1
            or count & (count - 1)
            or any(slot.name != slot.parameter for slot, _ in call.slots)
            or any(isinstance(leaf, Tracer) for leaf in leaves)
            # It needs `jax.set_mesh`.
            or (mesh_needed(call.rules) and not any(map(own_sharding, leaves)))
        ):
            return

        def forget(_: Any) -> None:
            self._calls = [x for x in self._calls if x is not known]

        try:
            known = _KnownCall(call, program, leaves, forget)
        except Uncomparable:
            return
        # What a call with other Variables in the same objects holds is not kept alive.
        others = [x for x in self._calls if not x.is_outdated_by(known)]
        self._calls = [known, *others[: _CALLS - 1]]


def _kind(args: Sequence[Any], kwargs: Mapping[str, Any], rules: Any) -> Any:
    """What an equal call has in common besides its arguments."""
    return len(args), tuple(kwargs), id(rules), context_key()


class _KnownCall:
    """A call that has run, and its program."""

    def __init__(
        self,
        call: Call,
        program: Program,
        leaves: Sequence[Any],
        on_death: Callable[[Any], None],
    ) -> None:
        """`on_death` is called when one of its NNX objects is gone."""
        self.program = program
        self.kind = _kind(call.args, call.kwargs, call.rules)
        self._rules = call.rules  # lives on, so that its id stays its own
        self._mesh = mesh_needed(call.rules)
        # Positional arguments are the first of the signature.
        names = [slot.name for slot, _ in call.slots[: len(call.args)]]
        place = {name: at for at, name in enumerate((*names, *call.kwargs))}
        self._static = [(place[s.name], type(v), v) for s, v in call.static.items()]
        pairs = list(zip(call.arguments, spans(call.arguments), strict=True))
        trees = [(a, span) for a, span in pairs if not a.objects]
        data = [
            (a, at, x) for a, span in trees for at, x in zip(span, a.raw, strict=True)
        ]
        moved = [(a, at) for a, at, x in data if leaves[at] is not x]
        objects = [(a, span) for a, span in pairs if a.objects]
        held = [at for _, span in objects for at in span]
        # State is placed only once; and each Variable has to hold one array.
        if any(a.is_state for a, _ in moved) or len(held) != len(call.parts):
            raise Uncomparable
        self._trees = [place[argument.name] for argument, _ in trees]
        self._treedef = jax.tree.structure([argument.value for argument, _ in trees])
        self._data = _arrays([x for *_, x in data])
        self._objects = [place[argument.name] for argument, _ in objects]
        roots = [argument.value for argument, _ in objects]
        self._watch = _Watch(roots, call.parts, on_death)
        self._held = _arrays([leaves[at] for at in held])
        order = [*(at for _, at, _ in data), *held]
        self._order = sorted(range(len(order)), key=order.__getitem__)
        self._moves = [(at, leaves[at].sharding) for _, at in moved]
        # PRNG keys, for whose shardings JAX has several spellings.
        every = enumerate(zip(leaves, program.wanted, strict=True))
        keys = [(at, x, where) for at, (x, where) in every if where and _is_key(x)]
        self._moves += [(at, where) for at, x, where in keys if x.sharding != where]
        self._changed = [call.parts[at] for at in program.outcome.changed]
        self._after: list[Any] = []  # references to the state after the last run

    def is_outdated_by(self, other: "_KnownCall") -> bool:
        """Whether these are calls with the same objects and other Variables."""
        return self._watch.is_outdated_by(other._watch)

    def leaves(self, values: Sequence[Any]) -> list[Any] | None:
        """The leaves for the program, if a call with these values equals this one."""
        for at, kind, value in self._static:
            if type(values[at]) is not kind or values[at] != value:
                return None
        data, treedef = jax.tree.flatten([values[at] for at in self._trees])
        if treedef != self._treedef or _arrays(data) != self._data:
            return None
        if not self._watch.is_unchanged([values[at] for at in self._objects]):
            return None
        held = self._watch.values()
        both = [*data, *held]
        leaves = [both[at] for at in self._order]
        state = [leaves[at] for at in self.program.state]
        if are_deleted(state) or are_deleted(data):
            return None
        is_written = self._are_written(state)
        if not is_written and _arrays(held) != self._held:
            return None
        for at, where in self._moves:
            leaves[at] = put(leaves[at], where)
        if self.program.donated:
            is_single = len(set(map(id, leaves))) == len(leaves)
            if not is_single or not (is_written or are_apart(state)):
                return None
        return leaves

    def _are_written(self, state: Sequence[Any]) -> bool:
        """Whether these are the very arrays after the last run."""
        try:
            refs = map(weakref.ref, state)
            return bool(self._after) and all(map(operator.is_, refs, self._after))
        except TypeError:  # not arrays
            return False

    def run(self, leaves: list[Any]) -> Any:
        """Run the program, and write its changes into the Variables."""
        check_level(self._changed)
        if self._mesh is None:
            new, result = self.program.run(leaves)
        else:
            with jax.sharding.use_abstract_mesh(self._mesh):
                new, result = self.program.run(leaves)
        if new:
            collections.deque(map(write_value, self._changed, new), maxlen=0)
        self._after = note_outputs(self.program, leaves, new, result)
        return result


def _is_key(leaf: Any) -> bool:
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


_GETTERS = tuple(map(operator.attrgetter, ("aval", "sharding", "committed")))


def _arrays(leaves: Sequence[Any]) -> list[Any]:
    """What arrays are to a program, to compare."""
    try:
        return [*_flat(map(getter, leaves) for getter in _GETTERS)]
    except (AttributeError, TypeError):  # not only arrays of JAX
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            return [object()]  # equals nothing
        names = "aval", "shape", "dtype", "sharding", "committed"
        return [(type(x), *(getattr(x, name, None) for name in names)) for x in leaves]


class _Watch:
    """The structure and the constants of NNX objects, to see whether they change.

    The objects themselves are not kept alive, but what is in them.
    """

    def __init__(
        self,
        roots: Sequence[Any],
        variables: Sequence[Any],
        on_death: Callable[[Any], None],
    ) -> None:
        if not all(map(is_nnx_object, roots)):  # in a tree, or a Variable
            raise Uncomparable
        self._roots = [weakref.ref(root, on_death) for root in roots]
        self._variables = variables
        self._seen: dict[int, Any] = {}
        self._dicts: list[dict[Any, Any]] = []
        self._lists: list[list[Any]] = []
        # Constants that can change in place, each with what describes it.
        self._constants: list[tuple[Callable[[Any], Any], Any]] = []
        for root in roots:
            self._look_below(root, roots)
        for root in roots:
            del self._seen[id(root)]
        self._types = list(map(type, roots))
        seen = {at for at, x in self._seen.items() if isinstance(x, nnx.Variable)}
        if seen != set(map(id, variables)):
            raise Uncomparable
        keys = [not is_bookkeeping(key) for key in _flat(self._dicts)]
        self._mask = [*keys, *itertools.repeat(True, sum(map(len, self._lists)))]
        self._contents = list(self._all_contents())
        self._description = list(map(copy.copy, self._described()))

    def is_unchanged(self, roots: Sequence[Any]) -> bool:
        """Whether these are the objects, and as they were."""
        if not all(ref() is root for ref, root in zip(self._roots, roots, strict=True)):
            return False
        if list(map(type, roots)) != self._types:
            return False
        try:
            return self._described() == self._description and all(
                map(operator.is_, self._all_contents(), self._contents)
            )
        except (TypeError, ValueError):  # not comparable
            return False

    def is_outdated_by(self, other: "_Watch") -> bool:
        """Whether these are the same objects with other Variables."""
        roots = [ref() for ref in self._roots]
        if not roots or [id(x) for x in roots] != [id(ref()) for ref in other._roots]:
            return False
        return set(map(id, self._variables)) != set(map(id, other._variables))

    def values(self) -> list[Any]:
        """The values of their Variables."""
        return list(map(read_value, self._variables))

    def _all_contents(self) -> Iterable[Any]:
        contents = _flat((*map(dict.values, self._dicts), *self._lists))
        return itertools.compress(contents, self._mask)

    def _described(self) -> list[Any]:
        """What is compared by value: keys, metadata, constants."""
        return [
            *_flat(self._dicts),
            *map(len, self._dicts),
            *map(type, self._seen.values()),
            *map(len, self._lists),
            *map(read_metadata, self._variables),
            *(describe(constant) for describe, constant in self._constants),
        ]

    def _look_below(self, node: Any, roots: Sequence[Any]) -> None:
        """Find the containers, Variables and constants that a node refers to."""
        if type(node) in _ATOMS:
            return
        if id(node) in self._seen:
            if any(node is root for root in roots):
                raise Uncomparable  # what refers to it would keep it alive
            return
        if not isinstance(node, tuple):  # whose id may be another's afterwards
            self._seen[id(node)] = node
        children: Iterable[Any] = ()
        if isinstance(node, nnx.Variable):
            children = read_metadata(node).values()
        elif isinstance(node, nnx.Pytree | nnx.State) or type(node) is dict:
            held = vars(node) if isinstance(node, nnx.Pytree) else node
            held = held.raw_mapping if isinstance(held, nnx.State) else held
            self._dicts.append(held)
            children = [x for key, x in held.items() if not is_bookkeeping(key)]
        elif type(node) is list:
            self._lists.append(node)
            children = node
        elif isinstance(node, tuple):
            children = node
        elif not is_hashable(node):
            self._constants.append((contents, node))
        elif type(node).__hash__ is not object.__hash__:
            self._constants.append((hash, node))
        for child in children:
            self._look_below(child, roots)
