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
import numpy as np
from flax import nnx
from jax.core import Tracer

from flax_layoutmap._core.errors import LayoutError, warn
from flax_layoutmap._place.place import distribute_tensor, explicit_axes
from flax_layoutmap._step import refusals, shardings, trace
from flax_layoutmap._step.arguments import (
    Call,
    is_array,
    named_objects,
    put_together,
    strong,
    write,
)
from flax_layoutmap._step.trace import Job
from flax_layoutmap._tree.flax_internals import was_made_here, write_value
from flax_layoutmap._tree.graph import TAG, Graph, with_objects, without_objects


@dataclasses.dataclass(frozen=True, slots=True)
class Structure:
    """NNX objects after a function that has changed their structure."""

    graphdefs: tuple[Any, ...]  # of the given objects, then of new ones in the result
    treedef: Any  # of their values
    sources: tuple[int | None, ...]  # per leaf: position of the input; None: an output
    returned: tuple[str, ...]  # where in the result the new objects are

    def leaves(self, given: Sequence[Any], outputs: Iterable[Any]) -> list[Any]:
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
    """What a function does to its NNX objects, and its result. Holds no tracer."""

    changed: tuple[int, ...]  # numbers of the parts of objects that get new values
    leaves: tuple[int, ...]  # positions of the leaves of these
    structure: Structure | None  # the objects afterwards, if their structure changes
    out_tree: Any  # the structure of the result
    returns_objects: bool  # NNX objects or their Variables are in it


@dataclasses.dataclass(eq=False)
class Program:
    """The program for one structure of arguments. Holds no array of the caller.

    Leaves are those of all arguments, and are named by their positions.
    """

    jitted: Any  # from leaves to the new values of Variables, and the result
    wanted: Sequence[Any]  # one sharding (or None: any) per leaf
    free: Sequence[int]  # whose sharding no rule has decided
    inside: Sequence[int]  # in NNX objects
    state: Sequence[int]
    loose: Sequence[int]  # state in no NNX object
    kept: Sequence[int]  # of these, what is not donated
    donated: Sequence[int]
    alike: Sequence[int]  # donated leaves, and data of their shapes
    outcome: Outcome
    places: Sequence[Any]  # one sharding (or None: any) per output
    # After a change of structure: numbers of leaves that stay and have to be moved.
    moved: Mapping[int, Any]
    shapes: tuple[Any, Any]  # abstract outputs
    fingerprints: Mapping[str, Sequence[str]]
    mesh: Any  # the Explicit mesh, if it is traced as on Auto axes
    agreed: bool = False  # the processes have compared the fingerprints
    misses: int = 0  # how many calls of it in a row were not recognised

    def run(self, leaves: Sequence[Any], parts: Sequence[Any]) -> tuple[Any, Any]:
        """Run it, and write the new values into these Variables; also the result.

        No bytecode runs in between, so that Ctrl-C comes before or after both: what is
        donated is gone once the program has run.
        """
        call = self.jitted if self.mesh is None else self._typed
        outputs, again = itertools.tee(itertools.starmap(call, [leaves]))
        written = map(write_value, parts, itertools.chain.from_iterable(outputs))
        collections.deque(written, maxlen=0)
        *new, result = next(again)
        return new, result

    def _typed(self, *leaves: Any) -> Any:
        return trace.typed(self.jitted(*leaves), self.places, self.mesh)


def make_program(job: Job, call: Call) -> Program:
    """Choose the layouts, trace the function, and make its program."""
    named, rules = named_objects(call.arguments), call.rules
    refusals.check_parts(named)
    if job.runs:
        given = {slot.name for slot, _ in call.slots}
        refusals.refuse_closures(job.fun, job.name, given)
    before = shardings.layouts_of(call.arguments, rules)
    outcomes, remarks = list[Outcome](), list[str]()
    flat = _flat_function(job, call, before.resolution, outcomes, remarks)
    mesh = call.mesh if call.mesh and explicit_axes(call.mesh) else None
    if mesh := None if job.explicit else mesh:
        flat = trace.on_auto_axes(flat, mesh)
    options: Any = {"in_shardings": tuple(before.wanted)}
    avals = shardings.avals_of(call.leaves, before.wanted)
    with trace.mesh_context(rules, avals):
        traced = jax.jit(flat, **options).trace(*avals)
    if job.runs:
        refusals.refuse_captured(traced.jaxpr.consts, named, job.name)
    outcome, (*new, result) = outcomes[-1], traced.out_info
    after, layouts = shardings.layouts_after(call, before, outcome, new)
    known, made = shardings.known_of(call.arguments, before.wanted), layouts.resolution
    results = shardings.places_of_result(result, job, known, rules)
    structure = outcome.structure
    sources = [None] * len(after) if structure is None else structure.sources
    pairs = list(zip(sources, after, strict=True))
    places = [*(where for source, where in pairs if source is None), *results]
    for text in remarks:
        warn(text)
    fingerprints: Mapping[str, Sequence[str]] = {}
    if made is not None:
        made.announce()
        fingerprints = made.fingerprint_lines() if jax.process_count() > 1 else {}
    if trace.mesh_needed(rules) is not None and not any(places):
        options["keep_unused"] = True  # JAX knows the devices by its inputs alone
    options["out_shardings"] = jax.tree.structure([*new, result]).unflatten(places)
    table = list(enumerate(call.table))
    inside = [at for at, (a, number) in table if a.in_objects[number]]
    state = [at for at, (a, _) in table if a.is_state]
    # A leaf that stays as it is in an NNX object remains in use, so its buffer must not
    # be reused for a result that happens to have the same shape.
    kept = {*inside} - {*(() if structure else outcome.leaves)}
    options["donate_argnums"] = donated = tuple(
        at for at, (argument, _) in table if argument.is_donated and at not in kept
    )
    return Program(
        jitted=jax.jit(flat, **options),
        wanted=before.wanted,
        free=before.free,
        inside=inside,
        state=state,
        loose=(loose := sorted({*state} - {*inside})),
        kept=[at for at in loose if at not in donated],
        donated=donated,
        alike=_alike(call, donated),
        outcome=outcome,
        places=places,
        moved={n: at for n, (old, at) in enumerate(pairs) if old is not None and at},
        shapes=(new, result),
        fingerprints=fingerprints,
        mesh=mesh,
    )


def _alike(call: Call, donated: Sequence[int]) -> list[int]:
    """Positions of donated leaves and data of one shape, which may share memory."""
    kinds = [(np.shape(x), getattr(x, "dtype", None)) for x in call.leaves]
    data = [at for at, (argument, _) in enumerate(call.table) if not argument.is_state]
    both = {kinds[at] for at in donated} & {kinds[at] for at in data}
    return [at for at in (*data, *donated) if kinds[at] in both]


# ---------------------------------------------------------------------- the trace


def _flat_function(
    job: Job,
    call: Call,
    resolution: Any,
    outcomes: list[Outcome],
    remarks: list[str],
) -> Callable[..., Any]:
    """The user's function on the leaves of its arguments, for `jax.jit`.

    Each trace of it adds to `outcomes` and `remarks`. It holds no arrays of arguments.
    """
    structures = [argument.structure for argument in call.arguments]
    names = [name for name, _ in named_objects(call.arguments)]
    slots, static, rules = [x for x, _ in call.slots], call.static, call.rules
    parameters = () if resolution is None else tuple(resolution._flat.every_form())
    positions = [n for n, (a, at) in enumerate(call.table) if a.in_objects[at]]

    def flat(*leaves: Any) -> Any:
        space = jax.memory.Space.Device
        hosted = [isinstance(x, Tracer) and shardings.is_on_host(x) for x in leaves]
        pairs = zip(leaves, hosted, strict=True)
        inputs = [jax.device_put(x, space) if moves else x for x, moves in pairs]
        values, objects = put_together(structures, inputs)
        graph, rest = Graph(objects), iter(values)
        given = [(x, static[x] if x in static else next(rest)) for x in slots]
        result = trace.call_job(job, given, rules, parameters, remarks)
        outcome, new, result = _outcome(graph, objects, result, inputs, positions)
        if outcome.structure is not None:
            refusals.check_parts(zip(names, objects, strict=True))
        outcomes.append(outcome)
        if outcome != outcomes[0]:
            raise LayoutError(
                f"{job.name} was traced again, and changed its arguments in another "
                "way: that must depend on its arguments alone; pass what decides it, "
                "as in static_argnames"
            )
        # What stays as it is does not leave the memory of the host.
        host = {id(x): leaf for x, leaf in zip(inputs, leaves, strict=True)}
        result = jax.tree.map(lambda x: host.get(id(x), x), result)
        return jax.tree.map(strong, [*new, result])

    flat.__name__ = job.name
    return flat


def _outcome(
    before: Graph,
    objects: Sequence[Any],
    result: Any,
    inputs: Sequence[Any],
    positions: Sequence[int],
) -> tuple[Outcome, Any, Any]:
    """What a function has done to these objects, new values, result without objects."""
    after = Graph(objects)
    known, roots = set(map(id, after.nodes)), trace.roots_of(result)
    made = {path: node for path, node in roots if id(node) not in known}
    structure, changed, leaves = None, (), ()
    # An array in no Variable is an attribute.
    same = not made and all(map(operator.is_, before.parts, after.parts))
    if same and after.is_like(before):
        is_new = list(map(operator.is_not, before.leaves, after.leaves))
        held = list(enumerate(after.spans()))
        changed = tuple(at for at, span in held if any(is_new[n] for n in span))
        leaves = tuple(positions[n] for at in changed for n in held[at][1])
        values = jax.tree.unflatten(after.treedef, after.leaves)
        new = [values[at] for at in changed]
    else:
        after = before.after([*objects, *made.values()])
        position = {id(inputs[at]): at for at in positions}
        sources = tuple(position.get(id(leaf)) for leaf in after.leaves)
        new = [x for x, at in zip(after.leaves, sources, strict=True) if at is None]
        structure = Structure(after.graphdefs, after.treedef, sources, tuple(made))
    plain, returns = without_objects(result, after.nodes)
    outcome = Outcome(changed, leaves, structure, jax.tree.structure(plain), returns)
    return outcome, new, plain


# ------------------------------------------------------------------------- running


def run_program(program: Program, call: Call, leaves: Sequence[Any]) -> Any:
    """Run a program, and write its changes into the caller's NNX objects.

    If it fails, nothing of these has changed. If the structure changes, the program has
    donated nothing of the objects.
    """
    outcome, graph = program.outcome, call.graph
    objects = [node for _, node in named_objects(call.arguments)]
    changed = [graph.parts[at] for at in outcome.changed]
    check_level(changed)
    with trace.mesh_context(call.rules, leaves):
        new, result = program.run(leaves, changed)
    if outcome.structure is not None:
        after = outcome.structure.leaves(leaves, jax.tree.leaves(new))
        for at, where in program.moved.items():
            after[at] = distribute_tensor(after[at], where)
        return with_objects(result, outcome.structure.apply(objects, after))
    write(graph, [leaves[at] for at in program.inside], {*outcome.changed})
    kept = [leaves[at] for at in program.state] if program.donated else []
    arrays = [*jax.tree.leaves(new), *filter(is_array, kept)]
    refusals.note_apart(program, [*map(weakref.ref, arrays)], leaves, result)
    if not outcome.returns_objects:
        return result
    return with_objects(result, Graph(objects).nodes)


def check_level(parts: Sequence[Any]) -> None:
    """Raise Flax's error if Variables are of another level, before a program runs."""
    if parts and not was_made_here(parts[0]):
        parts[0].set_raw_value(parts[0].get_raw_value())


def abstract_result(program: Program, call: Call) -> Any:
    structure, (new, result) = program.outcome.structure, program.shapes
    given = shardings.abstract(call.leaves)
    if structure is None:
        structures = [argument.structure for argument in call.arguments]
        nodes: Any = Graph(put_together(structures, given)[1]).nodes
    else:
        nodes = structure.merged(structure.leaves(given, jax.tree.leaves(new)))[1]
    return with_objects(result, nodes)
