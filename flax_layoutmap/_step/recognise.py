"""Recognise a call that equals an earlier one, and run its program at once.

NNX objects are not flattened for it. An object is unchanged if its attributes, and
those of the objects below it, are the very same objects, and constants that can change
in place hold the same. What is not recognised takes the way of a new call.
"""

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
from flax_layoutmap._step.arguments import Call
from flax_layoutmap._step.program import Program, check_level
from flax_layoutmap._step.refusals import are_deleted, note_apart, sharing
from flax_layoutmap._step.trace import context_key, mesh_needed
from flax_layoutmap._tree.flax_internals import (
    is_bookkeeping,
    is_nnx_object,
    read_metadata,
    read_value,
)
from flax_layoutmap._tree.graph import Uncomparable, contents

# How many calls one function remembers: modes of its objects, shapes of its batches.
_CALLS = 16

# The hashes of constants that cannot change, or are compared by identity.
_ATOMS = (bool, int, float, complex, str, bytes, type(None), np.dtype, object)
_UNCHANGING = {kind.__hash__ for kind in _ATOMS}


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
            inputs = known.inputs(values) if known.kind == kind else None
            if inputs is None:
                continue
            if self._calls[:1] != [known]:  # others may have gone meanwhile
                self._calls = [known, *(x for x in self._calls if x is not known)]
            known.program.misses = 1
            return True, known.run(*inputs)
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
        ids = known.watch.ids
        pairs = [(x, x.watch.ids) for x in self._calls[: _CALLS - 1]]
        others = [x for x, own in pairs if own == ids or own[0] != ids[0]]
        self._calls = [known, *others]


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
        forget: Callable[[Any], None],  # it is called when an NNX object is gone
    ) -> None:
        self.program = program
        self.kind = _kind(call.args, call.kwargs, call.rules)
        self._rules = call.rules  # lives on, so that its id stays its own
        self._mesh = mesh_needed(call.rules)
        # Positional arguments are the first of the signature.
        names = [slot.name for slot, _ in call.slots[: len(call.args)]]
        place = [*names, *call.kwargs].index
        self._static = [(place(s.name), type(v), v) for s, v in call.static.items()]
        trees = [a for a in call.arguments if not a.objects]
        objects = [a for a in call.arguments if a.objects]
        self._trees = [place(a.name) for a in trees]
        self._objects = [place(a.name) for a in objects]
        self._treedef = jax.tree.structure([a.value for a in trees])
        table = list(enumerate(call.table))
        data = [at for at, (a, _) in table if not a.objects]
        held = [at for at, (a, _) in table if a.objects]
        raw = [a.raw[number] for a, number in call.table]
        moved = [at for at, leaf in enumerate(leaves) if leaf is not raw[at]]
        # State is placed only once, but for PRNG keys, for whose shardings JAX has
        # several spellings; and each Variable has to hold one array.
        is_kind, key = jax.numpy.issubdtype, jax.dtypes.prng_key
        once = {at for at in moved if not is_kind(leaves[at].dtype, key)}
        if once & {*program.state} or len(held) != len(call.graph.parts):
            raise Uncomparable
        self._moves = [(at, program.wanted[at] or leaves[at].sharding) for at in moved]
        # The Variables, those that the program changes first.
        changed = program.outcome.changed
        numbers = [*changed, *sorted({*range(len(held))} - {*changed})]
        variables = [call.graph.parts[number] for number in numbers]
        held = [held[number] for number in numbers]
        self._changed = variables[: len(changed)]
        self._data = _arrays([raw[at] for at in data])
        self._held = _arrays([leaves[at] for at in held])
        self.watch = _Watch([a.value for a in objects], variables, forget)
        order = sorted(range(len(leaves)), key=[*held, *data].__getitem__)
        is_sorted = order == [*range(len(order))]
        self._in_order: Any = list if is_sorted else operator.itemgetter(*order)
        self._written: list[Any] = []  # references to what the Variables held after it

    def inputs(self, values: Sequence[Any]) -> tuple[Sequence[Any], list[Any]] | None:
        """If a call is equal: leaves for the program, and what the Variables hold."""
        for at, kind, value in self._static:
            if type(values[at]) is not kind or values[at] != value:
                return None
        data, treedef = jax.tree.flatten([values[at] for at in self._trees])
        if treedef != self._treedef or _arrays(data) != self._data:
            return None
        held = self.watch.values([values[at] for at in self._objects])
        if held is None or are_deleted(held) or are_deleted(data):
            return None
        # Whether these are the very arrays after the last run.
        last = map(operator.call, self._written)
        is_written = bool(self._written) and all(map(operator.is_, held, last))
        if not is_written and _arrays(held) != self._held:
            return None
        leaves = self._in_order([*held, *data])
        if self._moves:
            leaves = list(leaves)
            for at, where in self._moves:
                leaves[at] = put(leaves[at], where)
        # What the last run has written shares no memory.
        state = self.program.loose if is_written else self.program.state
        if self.program.donated and sharing(self.program, leaves, state):
            return None
        return leaves, held

    def run(self, leaves: Sequence[Any], held: Sequence[Any]) -> Any:
        """Run the program, and write its changes into the Variables."""
        check_level(self._changed)
        mesh = self._mesh
        with jax.sharding.use_abstract_mesh(mesh) if mesh else contextlib.nullcontext():
            new, result = self.program.run(leaves, self._changed)
        self._written = [*map(weakref.ref, (*new, *held[len(new) :]))]
        apart = self._written if self.program.donated else self._written[: len(new)]
        note_apart(self.program, apart, leaves, result)
        return result


_GETTERS = tuple(map(operator.attrgetter, ("aval", "sharding", "committed")))


def _arrays(leaves: Sequence[Any]) -> list[Any]:
    """What arrays are to a program, to compare."""
    try:
        return [each for getter in _GETTERS for each in map(getter, leaves)]
    except (AttributeError, TypeError):  # not only arrays of JAX
        return [(type(x), jax.typeof(x), getattr(x, "sharding", None)) for x in leaves]


class _Watch:
    """The structure and the constants of NNX objects, to see whether they change.

    The outermost objects themselves are not kept alive, but what is in them. The
    garbage collector lists what all of them refer to in one call, types included.
    """

    def __init__(
        self,
        roots: Sequence[Any],
        variables: Sequence[Any],
        forget: Callable[[Any], None],
    ) -> None:
        if not all(map(is_nnx_object, roots)):  # in a tree, or a Variable
            raise Uncomparable
        self._roots = [weakref.ref(root, forget) for root in roots]
        self.ids = [*map(id, roots)], set(map(id, variables))
        # Below the roots: objects; the dicts and lists of attributes and entries;
        # constants that can change in place.
        self._objects: list[Any] = []
        self._containers: list[Any] = []
        self._constants: list[Any] = []
        in_graph = self._look_below(roots)
        self._held = gc.get_referents(*roots, *self._objects, *self._containers)
        inside = {id(x) for each in self._containers for x in _values(each)}
        if in_graph != self.ids[1] or not inside.issubset(map(id, self._held)):
            raise Uncomparable
        self._keys = [*map(list, self._containers)]
        self._described = [*map(contents, self._constants)]
        self._variables = variables
        # Of each Variable: value, level of tracing, metadata (a copy) and class.
        values, *columns = _columns(variables)
        if [*map(id, values)] != [*map(id, map(read_value, variables))]:
            raise Uncomparable
        self._columns = [
            [{**x} if isinstance(x, dict) else x for x in column] for column in columns
        ]

    def values(self, roots: Sequence[Any]) -> list[Any] | None:
        """The values of the Variables, if these are the objects, and as they were."""
        if not all(ref() is root for ref, root in zip(self._roots, roots, strict=True)):
            return None
        held = gc.get_referents(*roots, *self._objects, *self._containers)
        values, *columns = _columns(self._variables)
        try:
            # By identity, as equal Variables are not the same; then keys, in order.
            is_same = (
                all(map(operator.is_, held, self._held))
                and [*map(list, self._containers)] == self._keys
                and columns == self._columns
                and [*map(contents, self._constants)] == self._described
            )
        except (TypeError, ValueError):  # not comparable
            return None
        return values if is_same else None

    def _look_below(self, roots: Sequence[Any]) -> set[int]:
        """Find objects, containers and constants; the ids of the Variables."""
        nodes, seen, variables = [*roots], set[int](), set[int]()
        for at, node in enumerate(nodes):  # it grows
            if id(node) in seen:
                if any(node is root for root in roots):
                    raise Uncomparable  # what refers to it would keep it alive
                continue
            seen.add(id(node))
            if isinstance(node, nnx.Variable):
                variables.add(id(node))
                nodes += read_metadata(node).values()
            elif isinstance(node, nnx.Pytree):
                self._objects += [node] if at >= len(roots) else []
                self._containers.append(vars(node))
                nodes += [x for key, x in vars(node).items() if not is_bookkeeping(key)]
            elif isinstance(node, nnx.State) or type(node) in (dict, list):
                held = node.raw_mapping if isinstance(node, nnx.State) else node
                self._containers.append(held)
                nodes += _values(held)
            elif isinstance(node, tuple):
                nodes += node
            elif type(node).__hash__ not in _UNCHANGING:
                self._constants.append(node)
        return variables


def _columns(variables: Sequence[Any]) -> list[list[Any]]:
    """What Variables refer to: a list of their values, and lists of the rest."""
    held = gc.get_referents(*variables)
    width = len(held) // (len(variables) or 1)
    return [held[at::width] for at in range(width)] or [[]]


def _values(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, Mapping) else container
