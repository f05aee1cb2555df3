"""Recognise a call that equals an earlier one, and run its program at once.

NNX objects are not flattened for it. An object is unchanged if its attributes, and
those of the objects below it, are the very same objects, and constants that can change
in place hold the same. What is not recognised takes the way of a new call.
"""

import collections
import contextlib
import gc
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
from flax_layoutmap._step.donation import are_deleted, note_apart, sharing
from flax_layoutmap._step.program import Program, check_level
from flax_layoutmap._step.trace import context_key, mesh_needed
from flax_layoutmap._tree.flax_internals import (
    is_bookkeeping,
    is_nnx_object,
    read_metadata,
    reader_of,
    write_value,
)
from flax_layoutmap._tree.watch import Uncomparable, contents, is_hashable

# How many calls one function remembers: modes of its objects, shapes of its batches.
_CALLS = 16

# Types of constants that cannot change.
_ATOMS = (bool, int, float, complex, str, bytes, type(None), np.dtype)


class KnownCalls:
    """The calls of one function that can be recognised, the last one first."""

    def __init__(self) -> None:
        self._calls: list[_KnownCall] = []

    def run(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], rules: RuleSet | None
    ) -> tuple[bool, Any]:
        """Run the program of an equal call: whether there was one, and its result."""
        kind = _kind(args, kwargs, rules)
        values = (*args, *kwargs.values())
        for known in self._calls:
            leaves = known.leaves(values) if known.kind == kind else None
            if leaves is None:
                continue
            if self._calls[:1] != [known]:  # others may have gone meanwhile
                self._calls = [known, *(x for x in self._calls if x is not known)]
            known.program.misses = 1
            return True, known.run(leaves)
        return False, None

    def remember(self, call: Call, program: Program, leaves: Sequence[Any]) -> None:
        """Remember a call that has run with these leaves, if it can be recognised."""
        # From the second call of a program on, as the first may have edited constants
        # in place; and not each time, as some calls are never recognised.
        program.misses = misses = program.misses + 1
        if (
            misses == 1
            or misses & (misses - 1)
            or program.outcome.structure
            or program.outcome.returns_objects
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
        others = [
            x
            for x in self._calls
            if x.watch.ids[0] != known.watch.ids[0] or x.watch.ids == known.watch.ids
        ]
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
        data = [pair for a, span in trees for pair in zip(span, a.raw, strict=True)]
        moved = [at for at, x in data if leaves[at] is not x]
        objects = [(a, span) for a, span in pairs if a.objects]
        held = [at for _, span in objects for at in span]
        # State is placed only once; and each Variable has to hold one array.
        if {*moved} & {*program.state} or len(held) != len(call.parts):
            raise Uncomparable
        self._moves = [(at, leaves[at].sharding) for at in moved]
        # PRNG keys, for whose shardings JAX has several spellings.
        every = enumerate(zip(leaves, program.wanted, strict=True))
        keys = [(at, x, where) for at, (x, where) in every if where and _is_key(x)]
        self._moves += [(at, where) for at, x, where in keys if x.sharding != where]
        self._trees = [place[a.name] for a, _ in trees]
        self._treedef = jax.tree.structure([a.value for a, _ in trees])
        self._data = _arrays([x for _, x in data])
        self._objects = [place[a.name] for a, _ in objects]
        # The Variables, those that the program changes first.
        changed = list(program.outcome.changed)
        numbers = [*changed, *sorted({*range(len(held))} - {*changed})]
        variables = [call.parts[number] for number in numbers]
        held = [held[number] for number in numbers]
        self._changed = variables[: len(changed)]
        self._kept = _picker(held[len(changed) :])
        self._held = _arrays([leaves[at] for at in held])
        self.watch = _Watch([a.value for a, _ in objects], variables, on_death)
        order = [*(at for at, _ in data), *held]
        self._order = _picker(sorted(range(len(order)), key=order.__getitem__))
        self._written: list[Any] = []  # references to what the Variables held after it

    def leaves(self, values: Sequence[Any]) -> Sequence[Any] | None:
        """The leaves for the program, if a call with these values equals this one."""
        for at, kind, value in self._static:
            if type(values[at]) is not kind or values[at] != value:
                return None
        data, treedef = jax.tree.flatten([values[at] for at in self._trees])
        if treedef != self._treedef or _arrays(data) != self._data:
            return None
        held = self.watch.values([values[at] for at in self._objects])
        if held is None or are_deleted(held) or are_deleted(data):
            return None
        try:  # whether these are the very arrays after the last run
            refs = [*map(weakref.ref, held)]
        except TypeError:  # not arrays
            return None
        is_written = bool(self._written) and all(map(operator.is_, refs, self._written))
        if not is_written and _arrays(held) != self._held:
            return None
        leaves = self._order([*data, *held])
        if self._moves:
            leaves = list(leaves)
            for at, where in self._moves:
                leaves[at] = put(leaves[at], where)
        program = self.program
        # What the last run has written shares no memory.
        is_sure = is_written and not program.gives_trees
        if program.donated and sharing(program, leaves, is_sure=is_sure):
            return None
        return leaves

    def run(self, leaves: Sequence[Any]) -> Any:
        """Run the program, and write its changes into the Variables."""
        check_level(self._changed)
        mesh = self._mesh
        with jax.sharding.use_abstract_mesh(mesh) if mesh else contextlib.nullcontext():
            new, result = self.program.run(leaves)
        collections.deque(map(write_value, self._changed, new), maxlen=0)
        self._written = [*map(weakref.ref, (*new, *self._kept(leaves)))]
        note_apart(self.program, self._written, new, result, id(self))
        return result


def _is_key(leaf: Any) -> bool:
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that picks these positions of a list."""
    if len(positions) < 2:
        return lambda values: [values[at] for at in positions]
    return operator.itemgetter(*positions)


_GETTERS = tuple(map(operator.attrgetter, ("aval", "sharding", "committed")))


def _arrays(leaves: Sequence[Any]) -> list[Any]:
    """What arrays are to a program, to compare."""
    try:
        return [each for getter in _GETTERS for each in map(getter, leaves)]
    except (AttributeError, TypeError):  # not only arrays of JAX
        return [(type(x), jax.typeof(x), getattr(x, "sharding", None)) for x in leaves]


class _Watch:
    """The structure and the constants of NNX objects, to see whether they change.

    The outermost objects themselves are not kept alive, but what is in them.
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
        self.ids = [*map(id, roots)], set(map(id, variables))
        # Below the roots: objects; the dicts and lists of attributes and entries;
        # constants that can change in place.
        self._objects: list[Any] = []
        self._containers: list[Any] = []
        self._constants: list[Any] = []
        seen: dict[int, Any] = {}
        for root in roots:
            self._look_below(root, seen, roots)
        in_graph = {at for at, x in seen.items() if isinstance(x, nnx.Variable)}
        # The garbage collector lists what they hold in one call, types included.
        self._held = gc.get_referents(*roots, *self._objects, *self._containers)
        inside = {id(x) for each in self._containers for x in _values(each)}
        if in_graph != self.ids[1] or not inside.issubset(map(id, self._held)):
            raise Uncomparable
        self._keys = [*map(list, self._containers)]
        self._variables, self._types = variables, [*map(type, variables)]
        self._read = reader_of(variables)
        shared: dict[Any, dict[str, Any]] = {}  # as few differ
        self._metadata = [
            shared.setdefault((*own, *map(id, own.values())), {**own})
            for own in self._read()[1]
        ]
        self._described = [*map(_description, self._constants)]

    def values(self, roots: Sequence[Any]) -> list[Any] | None:
        """The values of the Variables, if these are the objects, and as they were."""
        if not all(ref() is root for ref, root in zip(self._roots, roots, strict=True)):
            return None
        held = gc.get_referents(*roots, *self._objects, *self._containers)
        values, metadata = self._read()
        try:
            # By identity, as equal Variables are not the same; then keys, in order.
            is_same = (
                all(map(operator.is_, held, self._held))
                and [*map(list, self._containers)] == self._keys
                and [*map(type, self._variables)] == self._types
                and metadata == self._metadata
                and [*map(_description, self._constants)] == self._described
            )
        except (TypeError, ValueError):  # not comparable
            return None
        return values if is_same else None

    def _look_below(self, node: Any, seen: dict[int, Any], roots: Any) -> None:
        """Find the objects, containers and constants that a node refers to."""
        if type(node) in _ATOMS:
            return
        is_root = any(node is root for root in roots)
        if id(node) in seen:
            if is_root:
                raise Uncomparable  # what refers to it would keep it alive
            return
        seen[id(node)] = node
        children: Iterable[Any] = ()
        if isinstance(node, nnx.Variable):
            children = read_metadata(node).values()
        elif isinstance(node, nnx.Pytree):
            self._objects += [] if is_root else [node]
            self._containers.append(vars(node))
            children = [x for key, x in vars(node).items() if not is_bookkeeping(key)]
        elif isinstance(node, nnx.State) or type(node) in (dict, list):
            held = node.raw_mapping if isinstance(node, nnx.State) else node
            self._containers.append(held)
            children = _values(held)
        elif isinstance(node, tuple):
            children = node
        elif type(node).__hash__ is not object.__hash__:
            self._constants.append(node)
        for child in children:
            self._look_below(child, seen, roots)


def _values(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, Mapping) else container


def _description(constant: Any) -> Any:
    """What tells whether a constant has changed in place."""
    return hash(constant) if is_hashable(constant) else contents(constant)
