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

from flax_layoutmap._core.errors import LayoutError, StructureError, warn
from flax_layoutmap._place.place import distribute_tensor, explicit_axes
from flax_layoutmap._step.arguments import (
    Call,
    is_array,
    named_objects,
    no_array,
    put_together,
    strong,
    write,
)
from flax_layoutmap._step.refusals import (
    check_parts,
    named_parts,
    note_apart,
    refuse_captured,
    refuse_closures,
)
from flax_layoutmap._step.shardings import (
    Known,
    Layouts,
    abstract,
    avals_of,
    is_on_host,
    known_of,
    layouts_after,
    layouts_of,
    pins_of,
    places_of_result,
)
from flax_layoutmap._step.trace import (
    Job,
    call_job,
    mesh_context,
    mesh_needed,
    on_auto_axes,
    roots_of,
    typed,
)
from flax_layoutmap._tree.flax_internals import was_made_here, write_value
from flax_layoutmap._tree.graph import TAG, Graph, with_objects, without_objects


@dataclasses.dataclass(frozen=True, slots=True)
class Structure:
    """NNX objects after a function that has changed their structure.

    Attributes:
        graphdefs: those of the given objects, then of new ones in the result.
        treedef: the structure of their values.
        sources: per leaf, its position among the arguments; None: the next output.
        returned: where in the result the new objects are.
    """

    graphdefs: tuple[Any, ...]
    treedef: Any
    sources: tuple[int | None, ...]
    returned: tuple[str, ...]

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
    """What a function does to its NNX objects, and its result. Holds no tracer.

    Attributes:
        changed: numbers of the parts of NNX objects that get new values.
        leaves: positions of the leaves of these.
        structure: the objects afterwards if their structure changes, else None.
        out_tree: the structure of the result.
        returns_objects: whether NNX objects or their Variables are in it.
    """

    changed: tuple[int, ...]
    leaves: tuple[int, ...]
    structure: Structure | None
    out_tree: Any
    returns_objects: bool


@dataclasses.dataclass(eq=False)
class Program:
    """The program for one structure of arguments. Holds no array of the caller.

    Attributes:
        jitted: from the leaves of all arguments to new values, and the result.
        wanted: one sharding (or None: any) per leaf of all arguments.
        free: positions of the leaves whose sharding no rule has decided.
        inside: positions of the leaves in NNX objects.
        state: positions of the leaves of state; `loose` are those in no NNX object.
        alike: positions of donated leaves and data of one shape.
        places: one sharding (or None: any) per output.
        moved: after a change of structure, numbers of leaves that stay as they are and
            get another sharding, which has to be put there.
        shapes: abstract outputs.
        mesh: the Explicit mesh, if it is traced as on Auto axes; or None.
        agreed: whether the processes have compared the fingerprints.
        misses: how many calls of it in a row were not recognised.
    """

    jitted: Any
    wanted: Sequence[Any]
    free: Sequence[int]
    inside: Sequence[int]
    state: Sequence[int]
    loose: Sequence[int]
    donated: Sequence[int]
    alike: Sequence[int]
    outcome: Outcome
    places: Sequence[Any]
    moved: Mapping[int, Any]
    shapes: tuple[Any, Any]
    fingerprints: Mapping[str, Sequence[str]]
    mesh: Any
    agreed: bool = False
    misses: int = 0

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
        return typed(self.jitted(*leaves), self.places, self.mesh)


def make_program(job: Job, call: Call) -> Program:
    """Choose the layouts, trace the function, and make its program."""
    named, rules = named_objects(call.arguments), call.rules
    check_parts(named)
    if job.runs:
        refuse_closures(job.fun, job.name, {slot.name for slot, _ in call.slots})
    before = layouts_of(call.arguments, rules)
    known = known_of(call.arguments, before.wanted)
    outcomes: list[Outcome] = []
    remarks: list[str] = []
    flat = _flat_function(job, call, before, known, outcomes, remarks.append)
    mesh = call.mesh if call.mesh and explicit_axes(call.mesh) else None
    if mesh := None if job.explicit else mesh:
        flat = on_auto_axes(flat, mesh)
    options: Any = {"in_shardings": tuple(before.wanted)}
    avals = avals_of(call.leaves, before.wanted)
    with mesh_context(rules, avals):
        traced = jax.jit(flat, **options).trace(*avals)
    if job.runs:
        refuse_captured(traced.jaxpr.consts, named, job.name)
    outcome, (*new, result) = outcomes[-1], traced.out_info
    after, layouts = layouts_after(call, before, outcome, new)
    results, made = places_of_result(result, job.out_shardings, known, layouts, rules)
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
    if mesh_needed(rules) is not None and not any(places):
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
        loose=sorted({*state} - {*inside}),
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
    layouts: Layouts,
    known: Known,
    outcomes: list[Outcome],
    report: Callable[[str], None],
) -> Callable[..., Any]:
    """The user's function on the leaves of its arguments, for `jax.jit`.

    Each trace of it appends to `outcomes`. It holds the structure of the arguments,
    and none of their arrays.
    """
    structures = [argument.structure for argument in call.arguments]
    names = [name for name, _ in named_objects(call.arguments)]
    slots, static, rules = [x for x, _ in call.slots], call.static, call.rules
    wanted, made = layouts.wanted, layouts.resolution
    parameters = () if made is None else tuple(made._flat.every_form())
    positions = [n for n, (a, at) in enumerate(call.table) if a.in_objects[at]]

    def flat(*leaves: Any) -> Any:
        inputs = list(map(_on_device, leaves))
        values, objects = put_together(structures, inputs)
        graph, rest = Graph(objects), iter(values)
        given = [(x, static[x] if x in static else next(rest)) for x in slots]
        result = call_job(job, given, rules, parameters, report)
        outcome, new, result, made = _outcome(graph, objects, result, inputs, positions)
        if outcome.structure is not None:
            _check_after([*zip(names, objects, strict=True)], made)
        outcomes.append(outcome)
        if outcome != outcomes[0]:
            raise LayoutError(
                f"{job.name} was traced again, and what it does to its arguments was "
                "another thing: that must not depend on what is outside of its "
                "arguments; pass what decides it, as in static_argnames"
            )
        # What stays as it is does not leave the memory of the host.
        host = {id(x): leaf for x, leaf in zip(inputs, leaves, strict=True)}

        def pinned(x: Any, pin: Any) -> Any:
            return _kept(host.get(id(x), x), pin[1]) if pin[0] else x

        where = [wanted[at] for at in outcome.leaves] or itertools.repeat(None)
        results = _mapped(pinned, result, pins_of(result, known)[0])
        return [*_mapped(_kept, new, where), results]

    flat.__name__ = job.name
    return flat


def _mapped(function: Callable[..., Any], tree: Any, others: Iterable[Any]) -> Any:
    """`jax.tree.map` with a list of the others."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(map(function, leaves, others))


def _on_device(leaf: Any) -> Any:
    if not isinstance(leaf, Tracer) or not is_on_host(leaf):
        return leaf
    return jax.device_put(leaf, jax.memory.Space.Device)


def _kept(x: Any, sharding: Any) -> Any:
    """A value of state, in the memory that it is kept in."""
    moves = is_on_host(sharding) and not is_on_host(x)
    return jax.device_put(strong(x), jax.memory.Space.Host) if moves else strong(x)


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
    made = {path: node for path, node in roots_of(result) if id(node) not in known}
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
    return outcome, new, plain, list(made.values())


def _check_after(named: Sequence[tuple[str, Any]], made: Sequence[Any]) -> None:
    check_parts(named)
    for path, part in named_parts([*named, *(("the result", node) for node in made)]):
        held = part.get_raw_value() if isinstance(part, nnx.Variable) else ()
        for problem in filter(None, map(no_array, jax.tree.leaves(held))):
            raise StructureError(
                f"{path} holds the {problem}, which is not an array: make it a static "
                "attribute"
            )


# ------------------------------------------------------------------------- running


def run_program(program: Program, call: Call, leaves: Sequence[Any]) -> Any:
    """Run a program, and write its changes into the caller's NNX objects.

    If it fails, nothing of these has changed. If the structure changes, the program has
    donated nothing of the objects.
    """
    outcome, graph = program.outcome, call.graph
    changed = [graph.parts[at] for at in outcome.changed]
    check_level(changed)
    with mesh_context(call.rules, leaves):
        new, result = program.run(leaves, changed)
    if outcome.structure is not None:
        after = outcome.structure.leaves(leaves, jax.tree.leaves(new))
        for at, where in program.moved.items():
            after[at] = distribute_tensor(after[at], where)
        return with_objects(result, outcome.structure.apply(call.objects, after))
    write(graph, [leaves[at] for at in program.inside], {*outcome.changed})
    kept = [leaves[at] for at in program.state] if program.donated else []
    arrays = [*jax.tree.leaves(new), *filter(is_array, kept)]
    note_apart(program, [*map(weakref.ref, arrays)], leaves, result)
    if not outcome.returns_objects:
        return result
    return with_objects(result, Graph(call.objects).nodes)


def check_level(parts: Sequence[Any]) -> None:
    """Raise Flax's error if Variables are of another level, before a program runs."""
    if parts and not was_made_here(parts[0]):
        parts[0].set_raw_value(parts[0].get_raw_value())


def abstract_result(program: Program, call: Call) -> Any:
    structure, (new, result) = program.outcome.structure, program.shapes
    given = abstract(call.leaves)
    if structure is None:
        structures = [
            (argument.outer, argument.graphdefs) for argument in call.arguments
        ]
        nodes: Any = Graph(put_together(structures, given)[1]).nodes
    else:
        nodes = structure.merged(structure.leaves(given, jax.tree.leaves(new)))[1]
    return with_objects(result, nodes)
