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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer

from flax_layoutmap._core.errors import StructureError, warn
from flax_layoutmap._place.place import distribute_tensor
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
from flax_layoutmap._step.trace import (
    Job,
    call_job,
    mesh_context,
    mesh_needed,
    roots_of,
)
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
        sources: per leaf, its position among the arguments; None: the next output.
        free: per leaf, whether a new Variable holds it that may lie anywhere.
    """

    graphdefs: tuple[Any, ...]
    treedef: Any
    sources: tuple[int | None, ...]
    free: tuple[bool, ...]

    def leaves(self, given: Sequence[Any], outputs: Iterable[Any]) -> list[Any]:
        """The leaves after the function."""
        rest = iter(outputs)
        return [next(rest) if at is None else given[at] for at in self.sources]

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
    pairs = zip(call.leaves, before.wanted, strict=True)
    avals = [abstract(x, where) if where else x for x, where in pairs]
    traced = _traced(job, call, jax.jit(flat, **options), avals)
    if job.runs:
        refuse_captured(traced.jaxpr.consts, named, job.name)
    outcome, (new, result) = outcomes[-1], traced.out_info
    after = after_change(job, call, before, outcome, new)
    results, resolved = pin_results(job, call, after, result)
    outputs: Sequence[Any] = after.after
    moved: dict[int, Any] = {}
    if outcome.structure is not None:
        sources = list(zip(outcome.structure.sources, after.after, strict=True))
        outputs = [where for at, where in sources if at is None]
        moved = {n: x for n, (at, x) in enumerate(sources) if at is not None and x}
    for text in remarks:
        warn(text)
    fingerprints: Mapping[str, Sequence[str]] = {}
    if resolved is not None:
        resolved.announce()
        if jax.process_count() > 1:
            fingerprints = resolved.fingerprint_lines()
    donated = _donated(call.arguments, outcome)
    spanned = zip(call.arguments, spans(call.arguments), strict=True)
    places = [*outputs, *results]
    layouts = jax.tree.unflatten(jax.tree.structure((new, result)), places)
    if mesh_needed(call.rules) is not None and not any(places):
        options["keep_unused"] = True  # JAX knows the devices by its inputs alone
    return Program(
        jitted=jax.jit(flat, out_shardings=layouts, donate_argnums=donated, **options),
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
        places=places,
    )


def _traced(job: Job, call: Call, jitted: Any, avals: Sequence[Any]) -> Any:
    """Trace the flat function, once."""
    try:
        with mesh_context(call.rules, avals):
            return jitted.trace(*avals)
    except TypeError as error:
        candidates = [
            (argument.path(at), argument.leaves[at])
            for argument in call.arguments
            if argument.is_state
            for at, owner in enumerate(argument.owners())
            if owner is None or isinstance(owner, nnx.Param)
        ]
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
        outcome, new, result, made = _outcome(graph, objects, result, inputs, positions)
        if outcome.structure is not None:
            _check_new(forms, nested, graph, made)
        outcomes.append(outcome)
        if outcome != outcomes[0]:
            raise StaleProgramError
        leaves_of_new, structure = jax.tree.flatten(new)
        where = [wanted[at] for at in outcome.leaves] or [None] * len(leaves_of_new)
        # What stays as it is does not leave the memory of the host.
        host = {id(x): leaf for x, leaf in zip(inputs, leaves, strict=True)}
        results, treedef = jax.tree.flatten(result)
        pins, _ = pins_of(result, known)
        pairs = zip(results, pins, strict=True)
        results = [
            _kept(host.get(id(x), x), where) if state else x
            for x, (state, where) in pairs
        ]
        kept = map(_kept, leaves_of_new, where)
        return structure.unflatten(kept), treedef.unflatten(results)

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


def _outcome(
    before: Graph,
    objects: Sequence[Any],
    result: Any,
    inputs: Sequence[Any],
    positions: Sequence[int],
) -> tuple[Outcome, Any, Any, list[Any]]:
    """What a function has done to these objects.

    Also the new values, its result without objects, and the new objects in it.
    """
    after = Graph(objects)
    known = set(map(id, after.nodes))
    named = [(path, node) for path, node in roots_of(result) if id(node) not in known]
    made = [node for _, node in named]
    structure, changed, leaves = None, (), ()
    same = not made and after.is_like(before)
    # An array in no Variable is an attribute.
    if same and all(map(operator.is_, before.parts, after.parts)):
        is_new = list(map(operator.is_not, before.leaves, after.leaves))
        held = after.spans()
        changed = tuple(
            at for at, span in enumerate(held) if any(is_new[n] for n in span)
        )
        leaves = tuple(positions[n] for at in changed for n in held[at])
        values = jax.tree.unflatten(after.treedef, after.leaves)
        new = [values[at] for at in changed]
    else:
        after = before.after([*objects, *made])
        position = {id(inputs[at]): at for at in positions}
        sources = tuple(position.get(id(leaf)) for leaf in after.leaves)
        new = [x for x, at in zip(after.leaves, sources, strict=True) if at is None]
        old = set(map(id, before.nodes))
        free = tuple(id(x) not in old and is_free(x) for x in after.owners())
        structure = Structure(after.graphdefs, after.treedef, sources, free)
    plain, returns = without_objects(result, after.nodes)
    paths, out_tree = tuple(path for path, _ in named), jax.tree.structure(plain)
    outcome = Outcome(changed, leaves, structure, paths, out_tree, returns)
    return outcome, new, plain, made


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
    check_apart(given)
    known = set(map(id, before.nodes))
    for where, part in named_parts([*(("the result", node) for node in made), *given]):
        if id(part) not in known and was_made_elsewhere(part):
            raise StructureError(
                f"{where} comes from outside of the function: pass it as an "
                "argument, or as part of one, so that it stays the same object"
            )
        held = part.get_raw_value() if isinstance(part, nnx.Variable) else ()
        for problem in filter(None, map(no_array, jax.tree.leaves(held))):
            raise StructureError(
                f"{where} holds the {problem}, which is not an array: make it a static "
                "attribute"
            )


# The state after the last few calls, by the ids of weak references: arrays that share
# memory with no others, as programs have written them, or they were compared before.
_APART: collections.deque[dict[int, Any]] = collections.deque(maxlen=8)


def are_apart(arrays: Sequence[Any]) -> bool:
    """Whether all of these are known to share memory with no others."""
    try:
        # An array has one reference while that lives.
        left = set(map(id, map(weakref.ref, arrays)))
    except TypeError:  # not arrays
        return False
    for known in _APART:
        left.difference_update(known)
        if not left:
            break
    return not left


def note_outputs(
    program: Program, leaves: Sequence[Any], new: Any, result: Any
) -> list[Any]:
    """Record the arrays that share memory with no others after a call.

    Returns:
        References to the state after it; none if something there is not an array.
    """
    refs = map(weakref.ref, jax.tree.leaves(new))
    changed = dict(zip(program.outcome.leaves, refs, strict=True))
    try:
        after = [changed.get(at) or weakref.ref(leaves[at]) for at in program.state]
    except TypeError:
        after = []
    apart = after if program.donated else [*changed.values()]
    if program.gives_trees:
        apart = [*apart, *map(weakref.ref, jax.tree.leaves(result))]
    if apart:
        _APART.appendleft(dict(zip(map(id, apart), apart, strict=True)))
    return after


# ------------------------------------------------------------------------- running


def run_program(program: Program, call: Call, leaves: Sequence[Any]) -> Any:
    """Run a program, and write its changes into the caller's NNX objects.

    If it fails, nothing of these has changed. If the structure changes, the program has
    donated nothing of the objects.
    """
    outcome, parts = program.outcome, call.parts
    if outcome.structure is not None:
        check_apart(named_objects(call.arguments), nnx.Pytree | nnx.Variable)
    check_level([parts[at] for at in outcome.changed])
    with mesh_context(call.rules, leaves):
        is_traced = any(isinstance(leaf, Tracer) for leaf in leaves)
        new, result = program.run(leaves, is_traced=is_traced)
    if outcome.structure is not None:
        after = outcome.structure.leaves(leaves, jax.tree.leaves(new))
        for at, where in program.moved.items():
            after[at] = distribute_tensor(after[at], where)
        nodes = outcome.structure.apply(call.objects, after)
        return with_objects(result, nodes) if outcome.returns_objects else result
    note_outputs(program, leaves, new, result)
    _keep_placed(call.arguments, leaves)
    for at, value in zip(outcome.changed, new, strict=True):
        parts[at].set_raw_value(value)
    if outcome.returns_objects:
        # Object by object, as they were merged: they may share what holds no Variable.
        nodes = [node for each in call.objects for node in Graph([each]).nodes]
        return with_objects(result, nodes)
    return result


def check_level(parts: Sequence[Any]) -> None:
    """Raise Flax's error if Variables are of another level of tracing.

    Before anything runs, as their arrays may be donated.
    """
    if parts:
        parts[0].set_raw_value(parts[0].get_raw_value())


def _keep_placed(arguments: Sequence[Argument], leaves: Sequence[Any]) -> None:
    """Write leaves that were placed for the program into their objects."""
    for argument, span in zip(arguments, spans(arguments), strict=True):
        argument.write(leaves[span.start : span.stop])


def abstract_result(program: Program, call: Call) -> Any:
    """The function's result without arrays; no object is changed."""
    outcome, (new, result) = program.outcome, program.shapes
    given = [abstract(leaf, None) for leaf in call.leaves]
    if not outcome.returns_objects:
        nodes: Any = ()
    elif outcome.structure is None:
        _, nested, _ = rebuilt([argument.form for argument in call.arguments], given)
        nodes = Graph(itertools.chain.from_iterable(nested)).nodes
    else:
        leaves = outcome.structure.leaves(given, jax.tree.leaves(new))
        nodes = outcome.structure.merged(leaves)[1]
    return with_objects(result, nodes)
