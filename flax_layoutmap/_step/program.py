"""The compiled program for one structure of arguments.

`jax.jit` traces a flat function: from the leaves of all arguments to the new values of
the Variables that the user's function changes, and its result. The trace tells which
these are; then the layouts of the outputs are chosen, and the same flat function is
compiled with them, for which JAX uses the trace again.

If the function changes the structure of its NNX objects, they are updated from their
GraphDefs afterwards, as by `nnx.jit`.
"""

import collections
import dataclasses
import itertools
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer

from flax_layoutmap._core.errors import StructureError, warn
from flax_layoutmap._place.place import put
from flax_layoutmap._step.arguments import (
    Argument,
    Call,
    Form,
    named_objects,
    no_array,
    rebuilt,
    spans,
    strong,
)
from flax_layoutmap._step.explicit import has_explicit_axes, on_auto_axes, typed_as_mesh
from flax_layoutmap._step.refusals import (
    check_apart,
    check_plain,
    named_parts,
    refuse_captured,
    refuse_closures,
    refuse_integers,
)
from flax_layoutmap._step.shardings import (
    Layouts,
    abstract,
    after_change,
    is_free,
    is_on_host,
    pin_results,
    pins_of,
    wanted_before,
)
from flax_layoutmap._step.trace import Job, call_job, mesh_context, roots_of
from flax_layoutmap._tree.flax_internals import was_made_elsewhere
from flax_layoutmap._tree.graph import (
    TAG,
    Graph,
    with_objects,
    without_objects,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Structure:
    """NNX objects after a function that has changed their structure.

    Attributes:
        graphdefs: those of the given objects, then of new ones in the result.
        treedef: the structure of their values.
        sources: per leaf, (True, its position among the arguments), or (False, its
            number among the outputs).
        free: per leaf, whether a new Variable holds it that may lie anywhere.
    """

    graphdefs: tuple[Any, ...]
    treedef: Any
    sources: tuple[tuple[bool, int], ...]
    free: tuple[bool, ...]

    def leaves(self, given: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """The leaves after the function."""
        return [(given if stays else outputs)[at] for stays, at in self.sources]

    def places(self, after: Sequence[Any]) -> tuple[list[Any], dict[int, Any]]:
        """The shardings of the outputs, and those of leaves that stay, by number."""
        pairs = list(zip(self.sources, after, strict=True))
        outputs = [where for (stays, _), where in pairs if not stays]
        numbered = enumerate(pairs)
        return outputs, {n: where for n, ((stays, _), where) in numbered if stays}

    def merged(
        self, leaves: Sequence[Any], tag: str | None = None
    ) -> tuple[list[Any], Any]:
        """The objects with these leaves, and all nodes in them by number."""
        values = iter(jax.tree.unflatten(self.treedef, leaves))
        with nnx.merge_context(tag, inner=False) as merging:
            objects = [
                merging.unflatten(each, [next(values) for _ in range(each.num_leaves)])
                for each in self.graphdefs
            ]
            return objects, dict(merging.index_ref)

    def apply(self, objects: Sequence[Any], leaves: Sequence[Any]) -> Any:
        """Update the caller's objects; returns all nodes by number."""
        with nnx.update_context(TAG):
            Graph(objects, TAG)
            return self.merged(leaves, TAG)[1]


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a function does to its NNX objects, and its result. Holds no tracer.

    Attributes:
        changed: numbers of the parts of NNX objects that get new values.
        leaves: positions of the leaves of these.
        structure: the objects afterwards if their structure changes, else None.
        returned: where in its result the new NNX objects are.
        out_tree: the structure of its result.
        returns_objects: whether NNX objects or their Variables are in it.
    """

    changed: tuple[int, ...]
    leaves: tuple[int, ...]
    structure: Structure | None
    returned: tuple[str, ...]
    out_tree: Any
    returns_objects: bool


@dataclasses.dataclass(frozen=True)
class Program:
    """The program for one structure of arguments. Holds no array of the caller.

    Attributes:
        jitted: from the leaves of all arguments to new values, and the result.
        wanted: one sharding (or None: any) per leaf of all arguments.
        free: positions of the leaves whose sharding no rule has decided.
        state: positions of the leaves of state.
        donated: positions of the leaves that are donated.
        gives_trees: whether some of these are in no NNX object.
        outcome: what its outputs are.
        moved: after a change of structure, numbers of leaves that stay as they are and
            get another sharding, which has to be put there.
        shapes: abstract outputs.
        fingerprints: lines of rules, mesh and table; empty for one process, and once
            the processes have agreed.
        agreed: whether the processes have compared them.
        mesh: that of outputs without its types, as they come from Auto axes, or None.
        places: the shardings of all outputs; used with `mesh`.
    """

    jitted: Any
    wanted: Sequence[Any]
    free: Sequence[int]
    state: Sequence[int]
    donated: tuple[int, ...]
    gives_trees: bool
    outcome: Outcome
    moved: Mapping[int, Any]
    shapes: tuple[Any, Any]
    fingerprints: Mapping[str, Sequence[str]]
    agreed: bool = False
    mesh: Any = None
    places: Sequence[Any] = ()

    def run(self, leaves: Sequence[Any], *, is_traced: bool = False) -> tuple[Any, Any]:
        """The new values and the result; in an outer trace, all outputs get types."""
        outputs = self.jitted(*leaves)
        if self.mesh is None or not (is_traced or None in self.places):
            return outputs
        flat, treedef = jax.tree.flatten(outputs)
        pairs = zip(flat, self.places, strict=True)
        return treedef.unflatten([typed_as_mesh(x, self.mesh, at) for x, at in pairs])


class StaleProgramError(Exception):
    """JAX has traced the function again, and it did something else."""


def make_program(job: Job, call: Call) -> Program:
    """Choose the layouts, trace the function, and make its program.

    Raises:
        LayoutError: rules, options or the function do not fit the arguments.
    """
    named = named_objects(call.arguments)
    check_plain(named)
    if job.runs:
        refuse_closures(job.fun, job.name, {slot.name for slot, _ in call.slots})
    before = wanted_before(job, call)
    outcomes: list[Outcome] = []
    remarks: list[str] = []
    flat = _flat_function(job, call, before, outcomes, remarks.append)
    options: Any = {"in_shardings": tuple(before.wanted)}
    traced = _traced(job, call, jax.jit(flat, **options), before.avals(call.leaves))
    if job.runs:
        refuse_captured(traced.jaxpr.consts, named, job.name)
    outcome, (new, result) = outcomes[-1], traced.out_info
    after = after_change(job, call, before, outcome, new)
    results, resolved = pin_results(job, call, after, result)
    outputs, moved = after.after, {}
    if outcome.structure is not None:
        outputs, moved = outcome.structure.places(after.after)
    for text in remarks:
        warn(text)
    fingerprints: Mapping[str, Sequence[str]] = {}
    if resolved is not None:
        resolved.announce()
        if jax.process_count() > 1:
            fingerprints = resolved.fingerprint_lines()
    donated = _donated(call.arguments, outcome)
    spanned = list(zip(call.arguments, spans(call.arguments), strict=True))
    layouts = [
        jax.tree.unflatten(jax.tree.structure(tree), shardings)
        for tree, shardings in ((new, outputs), (result, results))
    ]
    return Program(
        jitted=jax.jit(
            flat, out_shardings=tuple(layouts), donate_argnums=donated, **options
        ),
        wanted=before.wanted,
        free=before.free,
        state=[at for x, span in spanned if x.is_state for at in span],
        donated=donated,
        gives_trees=any(x.is_donated and not x.objects for x in call.arguments),
        outcome=outcome,
        moved=moved,
        shapes=(new, result),
        fingerprints=fingerprints,
        mesh=call.mesh if has_explicit_axes(call.mesh) and not job.explicit else None,
        places=[*outputs, *results],
    )


def _traced(job: Job, call: Call, jitted: Any, avals: Sequence[Any]) -> Any:
    """Trace the flat function, once."""
    try:
        with mesh_context(call.rules, avals):
            return jitted.trace(*avals)
    except TypeError as error:
        candidates = (
            (argument.path(at), leaf)
            for argument in call.arguments
            if argument.is_state
            for at, (leaf, owner) in enumerate(
                zip(argument.leaves, argument.owners(), strict=True)
            )
            if owner is None or isinstance(owner, nnx.Param)
        )
        refuse_integers(candidates, job.name, error)
        raise


def _donated(arguments: Sequence[Argument], outcome: Outcome) -> tuple[int, ...]:
    """Positions of the leaves to donate.

    A leaf that stays as it is in an NNX object remains in use, so its buffer must not
    be reused for a result that happens to have the same shape.
    """
    positions: list[int] = []
    for argument, span in zip(arguments, spans(arguments), strict=True):
        if argument.is_donated:
            inside = zip(span, argument.form.in_objects, strict=True)
            changed = set(outcome.leaves if outcome.structure is None else ())
            positions += [at for at, held in inside if not held or at in changed]
    return tuple(positions)


# ---------------------------------------------------------------------- the trace


def _flat_function(
    job: Job,
    call: Call,
    before: Layouts,
    outcomes: list[Outcome],
    report: Callable[[str], None],
) -> Callable[..., Any]:
    """The user's function on the leaves of its arguments, for `jax.jit`.

    Each trace of it appends to `outcomes`. It holds the structure of the arguments,
    and none of their arrays.
    """
    forms = [argument.form for argument in call.arguments]
    slots = [slot for slot, _ in call.slots]
    static, rules = call.static, call.rules
    parameters, known = before.parameters, before.known
    wanted = before.wanted

    def flat(*leaves: Any) -> Any:
        inputs = list(map(_on_device, leaves))
        values, nested, positions = rebuilt(forms, inputs)
        values |= static
        objects = [node for nodes in nested for node in nodes]
        graph = Graph(objects)
        given = [(slot, values[slot]) for slot in slots]
        result = call_job(job, given, rules, parameters, report)
        after = _After(graph, objects, result, inputs, positions)
        outcome = after.outcome
        if outcome.structure is not None:
            _check_new(forms, nested, graph, after.made)
        outcomes.append(outcome)
        if outcome != outcomes[0]:
            raise StaleProgramError
        results, treedef = jax.tree.flatten(after.result)
        pins = pins_of(after.result, known, {})
        pairs = zip(results, pins, strict=True)
        # What stays as it is does not leave the memory of the host.
        host = {id(x): leaf for x, leaf in zip(inputs, leaves, strict=True)}
        results = [
            _kept(host.get(id(x), x), where) if state else x
            for x, (state, where) in pairs
        ]
        return after.kept(wanted), treedef.unflatten(results)

    flat.__name__ = job.name
    return flat if job.explicit else on_auto_axes(flat, call.mesh)


def _on_device(leaf: Any) -> Any:
    """A leaf in the memory of the device."""
    if not isinstance(leaf, Tracer) or not is_on_host(leaf):
        return leaf
    return jax.device_put(leaf, jax.memory.Space.Device)


def _kept(x: Any, sharding: Any) -> Any:
    """A value of state, in the memory that it is kept in."""
    moves = is_on_host(sharding) and not is_on_host(x)
    return jax.device_put(strong(x), _HOST) if moves else strong(x)


_HOST = jax.memory.Space.Host


class _After:
    """The outputs of a function: new values, result and outcome."""

    def __init__(
        self,
        before: Graph,
        objects: Sequence[Any],
        result: Any,
        inputs: Sequence[Any],
        positions: Sequence[int],
    ) -> None:
        after = Graph(objects)
        known = set(map(id, after.nodes))
        named = [(p, node) for p, node in roots_of(result) if id(node) not in known]
        self.made = [node for _, node in named]
        structure, changed, leaves = None, (), ()
        pairs = list(zip(before.leaves, after.leaves, strict=False))
        if not named and after.is_like(before) and not _lone_changes(before, after):
            changed = tuple(
                number
                for number, span in enumerate(after.spans())
                if any(pairs[at][0] is not pairs[at][1] for at in span)
            )
            chosen = [after.spans()[number] for number in changed]
            leaves = tuple(positions[at] for span in chosen for at in span)
            values = jax.tree.unflatten(after.treedef, after.leaves)
            self.new: Any = [values[at] for at in changed]
        else:
            after = before.after([*objects, *self.made])
            place = {id(leaf): at for at, leaf in enumerate(inputs)}
            held = set(positions)
            sources: list[tuple[bool, int]] = []
            self.new = []
            for leaf in after.leaves:
                at = place.get(id(leaf))
                if at in held:
                    sources.append((True, at))
                else:
                    sources.append((False, len(self.new)))
                    self.new.append(strong(leaf))
            old = set(map(id, before.nodes))
            free = [id(v) not in old and is_free(v) for v in after.owners()]
            structure = Structure(
                after.graphdefs, after.treedef, tuple(sources), tuple(free)
            )
        self.result, returns = without_objects(result, after.nodes)
        self.outcome = Outcome(
            changed=changed,
            leaves=leaves,
            structure=structure,
            returned=tuple(path for path, _ in named),
            out_tree=jax.tree.structure(self.result),
            returns_objects=returns,
        )

    def kept(self, wanted: Sequence[Any]) -> Any:
        """The new values as they are kept; `wanted` are the shardings of all leaves."""
        leaves, treedef = jax.tree.flatten(self.new)
        if self.outcome.structure is not None:
            return self.new
        pairs = zip(leaves, self.outcome.leaves, strict=True)
        return treedef.unflatten([_kept(x, wanted[at]) for x, at in pairs])


def _lone_changes(before: Graph, after: Graph) -> bool:
    """Whether an array in no Variable has changed: that is an attribute."""
    return any(
        old is not new and not isinstance(new, nnx.Variable)
        for old, new in zip(before.parts, after.parts, strict=True)
    )


def _check_new(
    forms: Sequence[Form],
    nested: Sequence[Sequence[Any]],
    before: Graph,
    made: Sequence[Any],
) -> None:
    """Raise StructureError where objects are not of this trace, or hold no arrays."""
    given = [
        (form.slot.name, node)
        for form, nodes in zip(forms, nested, strict=True)
        for node in nodes
    ]
    check_apart(given, nnx.Variable)
    known = set(map(id, before.nodes))
    for where, part in named_parts([*(("the result", node) for node in made), *given]):
        if id(part) not in known and was_made_elsewhere(part):
            raise StructureError(
                f"{where} comes from outside of the function: pass it as an "
                "argument, or as part of one, so that it stays the same object"
            )
        if isinstance(part, nnx.Variable):
            for problem in map(no_array, jax.tree.leaves(part.get_raw_value())):
                if problem:
                    raise StructureError(
                        f"{where} holds the {problem}, which is not an array: make it "
                        "a static attribute"
                    )


# The state after the last few calls: arrays that share memory with no others, as a
# program has written them, or they were compared before it donated others.
_APART: collections.deque[list[weakref.ref[Any]]] = collections.deque(maxlen=8)


def are_apart(arrays: Sequence[Any]) -> bool:
    """Whether all of these are known to share memory with no others."""
    try:
        refs = list(map(weakref.ref, arrays))
    except TypeError:  # not arrays
        return False
    # An array has one reference while it lives.
    for known in _APART:
        if len(refs) == len(known) and all(map(operator.is_, refs, known)):
            return True
    every = set(map(id, itertools.chain.from_iterable(_APART)))
    return every.issuperset(map(id, refs))


def note_outputs(
    program: Program, leaves: Sequence[Any], new: Sequence[Any], result: Any
) -> None:
    """Record the arrays that share memory with no others after a call."""
    arrays = jax.tree.leaves(new)
    if program.donated:
        after = dict(zip(program.outcome.leaves, arrays, strict=True))
        arrays = [after.get(at, leaves[at]) for at in program.state]
        if program.gives_trees:
            arrays += jax.tree.leaves(result)
    if arrays:
        _APART.appendleft(list(map(weakref.ref, arrays)))


# ------------------------------------------------------------------------- running


def run_program(program: Program, call: Call, leaves: Sequence[Any]) -> Any:
    """Run a program, and write its changes into the caller's NNX objects.

    If it fails, nothing of these has changed. If the structure changes, the program has
    donated nothing of the objects.
    """
    outcome = program.outcome
    with mesh_context(call.rules, leaves):
        is_traced = any(isinstance(leaf, Tracer) for leaf in leaves)
        new, result = program.run(leaves, is_traced=is_traced)
    if outcome.structure is not None:
        after = outcome.structure.leaves(leaves, jax.tree.leaves(new))
        for at, where in program.moved.items():
            if isinstance(after[at], Tracer) and where is not None:
                after[at] = jax.lax.with_sharding_constraint(after[at], where)
            elif where is not None:
                after[at] = put(after[at], where)
        nodes = outcome.structure.apply(call.objects, after)
        return with_objects(result, nodes) if outcome.returns_objects else result
    note_outputs(program, leaves, new, result)
    parts = call.parts
    _keep_placed(call.arguments, leaves)
    for at, value in zip(outcome.changed, new, strict=True):
        parts[at].set_raw_value(value)
    if outcome.returns_objects:
        return with_objects(result, Graph(call.objects).nodes)
    return result


def _keep_placed(arguments: Sequence[Argument], leaves: Sequence[Any]) -> None:
    """Write leaves that were placed for the program into their objects."""
    for argument, span in zip(arguments, spans(arguments), strict=True):
        argument.write(leaves[span.start : span.stop])


def abstract_result(program: Program, call: Call) -> Any:
    """The function's result without arrays; no object is changed."""
    outcome, (new, result) = program.outcome, program.shapes
    if not outcome.returns_objects:
        return result
    given = [abstract(leaf, None) for leaf in call.leaves]
    if outcome.structure is None:
        forms = [argument.form for argument in call.arguments]
        _, nested, _ = rebuilt(forms, given)
        nodes: Any = Graph(node for nodes in nested for node in nodes).nodes
    else:
        leaves = outcome.structure.leaves(given, jax.tree.leaves(new))
        nodes = outcome.structure.merged(leaves)[1]
    return with_objects(result, nodes)
