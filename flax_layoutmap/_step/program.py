"""The compiled program for one structure of arguments, cached by `jit`.

State has the layouts of the rules on both sides. Changes of NNX objects are extra
outputs, which are written into the caller's own objects.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.core import Tracer

from flax_layoutmap._core.errors import warn
from flax_layoutmap._step.arguments import (
    Argument,
    Call,
    Slot,
    named_objects,
    spans,
    strong,
)
from flax_layoutmap._step.explicit import has_explicit_axes, typed_as_mesh
from flax_layoutmap._step.memory import evaluate, is_on_host, type_on_device
from flax_layoutmap._step.refusals import check_apart, check_plain
from flax_layoutmap._step.shardings import (
    Pin,
    abstract,
    pin_results,
    wanted_after,
    wanted_before,
)
from flax_layoutmap._step.trace import Job, Outcome, Traced, mesh_context, trace_job
from flax_layoutmap._tree.flax_internals import (
    check_can_write,
    objects_of,
    write_value,
)
from flax_layoutmap._tree.graph import drain, with_objects


@dataclasses.dataclass(frozen=True, slots=True)
class Tree:
    """A pure tree among the arguments; `positions` are over all leaves."""

    slot: Slot
    treedef: Any
    positions: range


@dataclasses.dataclass(frozen=True, slots=True)
class Places:
    """The leaves of all arguments, sorted into the inputs of a program.

    Attributes:
        donated: positions, over all leaves, of those in NNX objects that are donated.
        kept: positions of the others in NNX objects; those that change come first.
        given: the pure trees that are donated; a program takes their leaves.
        rest: the other pure trees.
    """

    donated: tuple[int, ...]
    kept: tuple[int, ...]
    given: tuple[Tree, ...]
    rest: tuple[Tree, ...]

    def inputs(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The leaves of all arguments as the program takes them."""

        def of(positions: Sequence[int]) -> list[Any]:
            return [leaves[at] for at in positions]

        rest = [jax.tree.unflatten(t.treedef, of(t.positions)) for t in self.rest]
        given = [of(tree.positions) for tree in self.given]
        return of(self.donated), of(self.kept), given, tuple(rest)


@dataclasses.dataclass(frozen=True)
class Program:
    """The program for one structure of arguments. Holds no array of the caller.

    Attributes:
        jitted: from `places.inputs` to the changes of NNX objects, and the function's
            result as last entry.
        wanted: one sharding (or None: any) per leaf of all arguments.
        places: the positions of the leaves among its inputs.
        outcome: what its outputs are. Changes that are `nested` in a value or outside
            Variables are not donated, as they are not written in one step.
        shapes: abstract outputs: the changes, and the leaves of the result.
        cacheable: whether it closes over no outer trace, and the function sets or edits
            no constant that cannot be hashed, for the next call's.
        fingerprints: lines of rules, mesh and table; empty for one process, and once
            the processes have agreed.
        agreed: whether the processes have compared them.
    """

    jitted: Any
    wanted: Sequence[Any]
    places: Places
    outcome: Outcome
    shapes: tuple[Sequence[Any], Sequence[Any]]
    cacheable: bool
    fingerprints: Mapping[str, Sequence[str]]
    agreed: bool = False
    mesh: Any = None  # of outputs that have the types of Auto axes

    @property
    def donated(self) -> list[int]:
        """Positions of all leaves that are donated."""
        trees = [at for tree in self.places.given for at in tree.positions]
        return [*self.places.donated, *trees]


class StaleProgramError(Exception):
    """The program was traced for other arguments, or in another context."""


def make_program(job: Job, call: Call) -> Program:
    """Choose the layouts, trace the function, and make its program.

    Raises:
        LayoutError: rules, options or the function do not fit the arguments.
    """
    arguments, leaves = call.arguments, call.leaves
    check_plain(named_objects(arguments))
    wanted, resolved = wanted_before(job, call)
    avals = [
        type_on_device(leaf if sharding is None else abstract(leaf, sharding))
        for leaf, sharding in zip(leaves, wanted, strict=True)
    ]
    made = resolved.resolution
    parameters = () if made is None else tuple(made._flat.every_form())
    traced = trace_job(job, call, avals, parameters)
    outcome, change = traced.outcome, traced.outcome.change
    layouts = [wanted[at] for at in (*outcome.changed, *outcome.nested)]
    moved: list[int] = []  # leaves that are as they were, and come out elsewhere
    if change is not None:
        after, resolved = wanted_after(job, call, wanted, traced, change)
        stays = {at: wanted[at] != where for at, where in change.at(after, stays=True)}
        moved = [at for at, moves in stays.items() if moves]
        change = change.moving(moved)
        layouts = [where for _, where in sorted(change.at(after, stays=False))]
    pinned, resolved = pin_results(job, call, wanted, traced, resolved)
    for text in traced.remarks:
        warn(text)
    fingerprints: Mapping[str, Sequence[str]] = {}
    if resolved.resolution is not None:
        resolved.resolution.announce()
        if jax.process_count() > 1:
            fingerprints = resolved.resolution.fingerprint_lines()
    places = _places(arguments, set(outcome.changed))
    outs = [*layouts[: outcome.count], *(sharding for _, sharding in pinned)]
    to_host = [at for at, sharding in enumerate(outs) if is_on_host(sharding)]
    fun = _on_inputs(traced, moved, pinned, places, to_host)
    fun.__name__ = job.name
    result = jax.tree.unflatten(outcome.out_tree, [sharding for _, sharding in pinned])
    jitted = jax.jit(
        fun,
        in_shardings=places.inputs(wanted),
        out_shardings=[*layouts, result],
        donate_argnums=(0, 2),
    )
    shapes, out_shapes = traced.shapes
    holds_tracers = any(isinstance(const, Tracer) for const in traced.closed.consts)
    return Program(
        jitted=jitted,
        wanted=wanted,
        places=places,
        outcome=dataclasses.replace(outcome, change=change),
        shapes=([*shapes, *(abstract(leaves[at], None) for at in moved)], out_shapes),
        cacheable=outcome.keeps_constants and not holds_tracers,
        fingerprints=fingerprints,
        mesh=_mesh_of_untyped(job, call, outs, traced.closed.out_avals),
    )


def _mesh_of_untyped(
    job: Job, call: Call, shardings: Sequence[Any], avals: Sequence[Any]
) -> Any:
    mesh = None if call.rules is None or job.explicit else call.rules.mesh
    pairs = zip(shardings, avals, strict=False)
    is_traced = any(isinstance(leaf, Tracer) for leaf in call.leaves)
    is_untyped = any(at is None and aval.shape for at, aval in pairs)
    return mesh if has_explicit_axes(mesh) and (is_untyped or is_traced) else None


def _places(arguments: Sequence[Argument], changed: set[int]) -> Places:
    """Sort the leaves: those of NNX objects into lists, the others into trees.

    A leaf that a function leaves unchanged in an NNX object stays in use, so its buffer
    must not be reused for a result that happens to have the same shape: it is not
    donated.
    """
    donated: list[int] = []
    kept: list[int] = []
    given: list[Tree] = []
    rest: list[Tree] = []
    for argument, span in zip(arguments, spans(arguments), strict=True):
        if argument.has_objects:
            for at, is_pure in zip(span, argument.pure_leaves(), strict=True):
                gone = argument.is_donated and (at in changed or is_pure)
                (donated if gone else kept).append(at)
        else:
            tree = Tree(argument.slot, argument.treedef, span)
            (given if argument.is_donated else rest).append(tree)
    kept.sort(key=lambda at: at not in changed)
    return Places(tuple(donated), tuple(kept), tuple(given), tuple(rest))


def _on_inputs(
    traced: Traced,
    moved: Sequence[int],
    pinned: Sequence[Pin],
    places: Places,
    to_host: Sequence[int],
) -> Callable[..., Any]:
    """The traced function on the inputs of a program; not traced a second time.

    `moved` are positions of leaves that are unchanged but get another sharding, and
    follow the changes; `pinned` says of each leaf of the result whether it is state;
    `to_host` are positions of outputs that the rules keep on the host.
    """
    closed, outcome = traced.closed, traced.outcome
    was_traced: list[bool] = []

    def program(*inputs: Any) -> Any:
        donated, kept, given, rest = inputs
        # If JAX traces again, the user's function must be traced again: its context has
        # changed, such as the size of a mapped axis.
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(inputs)):
            if was_traced:
                raise StaleProgramError
            was_traced.append(True)
        values: list[Any] = [None] * len(closed.in_avals)
        lists = [
            *zip((places.donated, places.kept), (donated, kept), strict=True),
            *zip((tree.positions for tree in places.given), given, strict=True),
        ]
        for tree, own in zip(places.rest, rest, strict=True):
            leaves, treedef = jax.tree.flatten(own)
            if treedef != tree.treedef:
                raise StaleProgramError
            lists.append((tree.positions, leaves))
        for positions, leaves in lists:
            for at, leaf in zip(positions, leaves, strict=True):
                values[at] = leaf
        if any(map(_differ, values, closed.in_avals)):
            raise StaleProgramError
        after = evaluate(closed, values, to_host)
        new, results = after[: outcome.count], after[outcome.count :]
        results = [
            strong(value) if is_state else value
            for value, (is_state, _) in zip(results, pinned, strict=True)
        ]
        others = [values[at] for at in moved]
        return [*new, *others, jax.tree.unflatten(outcome.out_tree, results)]

    return program


def _differ(value: Any, aval: Any) -> bool:
    """Whether a value has another type than the traced one."""
    own: Any = jax.typeof(value)
    return (
        own.shape != aval.shape
        or own.dtype != aval.dtype
        or own.weak_type != aval.weak_type
    )


# ---------------------------------------------------------------------- running


def run_program(program: Program, call: Call, leaves: Sequence[Any]) -> Any:
    """Run a program, and write its changes into the caller's NNX objects.

    Without an interrupt in between. If the structure changes, the program has donated
    nothing of the objects, so that they stay valid.
    """
    outcome, arguments = program.outcome, call.arguments
    change = outcome.change
    objects: list[Any] = []
    if change is not None or outcome.returns_objects:
        objects = objects_of([node for one in arguments for node in one.objects])
    if change is not None:
        check_apart(named_objects(arguments), object)
    changed: list[Any] = []
    if outcome.changed:
        holders = [holder for argument in arguments for holder in argument.holders()]
        changed = [holder[0] for at in outcome.changed if (holder := holders[at])]
        check_can_write(changed)
    with mesh_context(call.rules, leaves):
        results = itertools.chain.from_iterable(
            itertools.starmap(program.jitted, (program.places.inputs(leaves),))
        )
        if program.mesh is not None:
            results = jax.tree.map(
                lambda x: typed_as_mesh(x, program.mesh), list(results)
            )
            results = iter(results)
        drain(map(write_value, changed, results))
        *outputs, result = results
    if change is not None:
        objects = change.apply(objects, change.leaves(leaves, outputs))
    else:
        # Keep leaves that were placed, or lost their weak type.
        raw = (leaf for argument in arguments for leaf in argument.raw)
        pairs = enumerate(zip(raw, leaves, strict=True))
        new = {at: leaf for at, (was, leaf) in pairs if was is not leaf}
        new.update(zip(outcome.nested, outputs, strict=True))
        _write_back(arguments, {at: new[at] for at in new.keys() - {*outcome.changed}})
    return with_objects(result, objects) if outcome.returns_objects else result


def _write_back(arguments: Sequence[Argument], new: Mapping[int, Any]) -> None:
    """Write new values (by position over all leaves) into the caller's objects."""
    for argument, span in zip(arguments, spans(arguments), strict=True):
        own = {at - span.start: new[at] for at in span if at in new}
        if own and argument.has_objects:
            argument.write_back(own)


def abstract_result(program: Program, call: Call) -> Any:
    """The function's result without arrays; no object is changed."""
    outcome, (changed, results) = program.outcome, program.shapes
    result = jax.tree.unflatten(outcome.out_tree, results)
    if not outcome.returns_objects:
        return result
    given = [abstract(leaf, None) for leaf in call.leaves]
    if outcome.change is not None:
        merged = outcome.change.merged(outcome.change.leaves(given, changed))
    else:
        merged = [
            node
            for argument, span in zip(
                call.arguments, spans(call.arguments), strict=True
            )
            for node in argument.rebuild(given[span.start : span.stop])[1]
        ]
    return with_objects(result, objects_of(merged))
