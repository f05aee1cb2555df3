"""One structure of arguments, traced once and compiled: what `jit` keeps.

The user's function becomes a function on leaves. State has the layouts of the rules on
both sides; what the function changed in NNX objects comes out beside its results.
"""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from flax.errors import TraceContextError
from jax.core import Tracer, eval_jaxpr
from jax.extend.core import ClosedJaxpr
from jax.sharding import AxisType

from flax_layoutmap._core.errors import StructureError, warn
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._rules.scope import call_with_rules, trace_key
from flax_layoutmap._step.activations import call_activated, forget_path
from flax_layoutmap._step.arguments import (
    Argument,
    Slot,
    call_with,
    check_apart,
    check_plain,
    no_array,
    refuse_integers,
    strong,
)
from flax_layoutmap._step.closures import Closures
from flax_layoutmap._step.shardings import (
    Pin,
    abstract,
    pin_results,
    wanted_after,
    wanted_before,
)
from flax_layoutmap._tree.flax_internals import (
    check_can_write,
    is_nnx_object,
    named_objects_of,
    objects_of,
    write_value,
)
from flax_layoutmap._tree.graph import (
    Change,
    Graph,
    change_of,
    drain,
    is_value,
    with_objects,
    without_objects,
)
from flax_layoutmap._tree.jaxprs import with_own_arrays
from flax_layoutmap._tree.paths import join_keys

# JAX settings that change what a trace gives.
_settings = operator.attrgetter(
    "jax_debug_infs",
    "jax_debug_nans",
    "jax_default_device",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_disable_jit",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_threefry_partitionable",
)


def surroundings() -> tuple[Any, ...]:
    """What a trace depends on besides the arguments: contexts and settings."""
    return jax.sharding.get_abstract_mesh(), _settings(jax.config), trace_key()


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """What to compile, whatever the arguments.

    Attributes:
        fun: the user's function.
        signature: its signature.
        in_shardings: argument name → prefix tree of layouts, over the rules.
        out_shardings: prefix tree of layouts for the result, or None.
        runs: whether its programs run; if not, no value in them can become stale.
    """

    fun: Callable[..., Any]
    signature: inspect.Signature
    in_shardings: Mapping[str, Any]
    out_shardings: Any
    runs: bool = True

    @property
    def name(self) -> str:
        """The function's name, for messages and programs."""
        return getattr(self.fun, "__name__", "a_function")

    def in_sharding(self, slot: Slot) -> Any:
        """What `in_shardings` says of an argument; None where it says nothing."""
        by_parameter = self.in_shardings.get(slot.parameter)
        return self.in_shardings.get(slot.name, by_parameter)


@dataclasses.dataclass(slots=True)
class Program:
    """What one structure of arguments compiled to. Holds no array of the caller.

    Attributes:
        jitted: what `inputs` gives → what the function changed in NNX objects, and the
            result as last entry.
        wanted: one sharding (or None: as it is) per leaf of all arguments.
        donated: positions, over all leaves, of those in NNX objects whose buffers are
            given away.
        kept: positions of the others in NNX objects.
        given: the pure trees that are donated; a program takes their leaves.
        rest: the other pure trees.
        changed: positions of what the function changed in NNX objects; each of them is
            the value of a Variable.
        nested: positions of what else it changed: in a value that is a tree, or outside
            of Variables. Not donated, as they are not written in one step.
        change: what else it did to them, if it did; `changed` is empty then.
        out_tree: structure of the function's result.
        out_shapes: its abstract leaves.
        changed_shapes: the outputs before it, abstract.
        returns_objects: whether NNX objects or their Variables are in the result.
        cacheable: whether nothing of an outer trace is inside, and the function sets
            or edits no constant that cannot be hashed, for the next call's.
        fingerprints: lines of rules, mesh and table; empty where there is one process,
            and once the processes have agreed.
        agreed: whether the processes have compared them.
    """

    jitted: Any
    wanted: list[Any]
    donated: tuple[int, ...]
    kept: tuple[int, ...]
    given: tuple["Tree", ...]
    rest: tuple["Tree", ...]
    changed: tuple[int, ...]
    nested: tuple[int, ...]
    change: Change | None
    out_tree: Any
    out_shapes: list[Any]
    changed_shapes: list[Any]
    returns_objects: bool
    cacheable: bool
    fingerprints: Mapping[str, Sequence[str]]
    agreed: bool = False

    def inputs(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The leaves of all arguments as `jitted` takes them."""
        return _inputs(self.donated, self.kept, self.given, self.rest, leaves)

    @property
    def gives_away(self) -> list[int]:
        """Positions of all leaves that are donated."""
        trees = [at for tree in self.given for at in tree.positions]
        return [*self.donated, *trees]


@dataclasses.dataclass(frozen=True, slots=True)
class Tree:
    """A pure tree among the arguments.

    Attributes:
        slot: where it stands.
        treedef: its structure.
        start: position of its first leaf, over all leaves.
    """

    slot: Slot
    treedef: Any
    start: int

    @property
    def positions(self) -> range:
        """Positions of its leaves."""
        return range(self.start, self.start + self.treedef.num_leaves)


class OtherArgumentsError(Exception):
    """A program is not that of its arguments: they, or what is around, have changed."""


def _inputs(
    donated: Sequence[int],
    kept: Sequence[int],
    given: Sequence[Tree],
    rest: Sequence[Tree],
    leaves: Sequence[Any],
) -> tuple[Any, ...]:
    return (
        [leaves[at] for at in donated],
        [leaves[at] for at in kept],
        [[leaves[at] for at in tree.positions] for tree in given],
        tuple(
            jax.tree.unflatten(tree.treedef, [leaves[at] for at in tree.positions])
            for tree in rest
        ),
    )


def make_program(
    job: Job,
    slots: Sequence[tuple[Slot, Any]],
    static: Mapping[Slot, Any],
    arguments: Sequence[Argument],
    rules: RuleSet | None,
) -> Program:
    """Decides the layouts, traces the function, and makes the program of it.

    Args:
        job: what to compile.
        slots: all arguments in the order of the signature.
        static: those that are constants.
        arguments: the others, taken apart.
        rules: the rule set, or None.

    Raises:
        LayoutError: rules, options or the function do not fit the arguments.
    """
    check_plain(arguments)
    wanted, asked = wanted_before(arguments, job.in_sharding, rules)
    leaves = [leaf for argument in arguments for leaf in argument.leaves]
    avals = [
        leaf if sharding is None else abstract(leaf, sharding)
        for leaf, sharding in zip(leaves, wanted, strict=True)
    ]
    order = [slot for slot, _ in slots]
    seen = _Seen()

    made = asked.resolution
    known = () if made is None else tuple(made._flat.every_form())
    told: list[str] = []

    given = [(slot.name, value) for slot, value in slots]
    closures = Closures(job.fun, job.name, given)

    def flat(leaves: list[Any]) -> Any:
        call = functools.partial(call_job, job, order, rules, known, tell=told.append)
        on_leaves = functools.partial(_on_leaves, call, static, arguments, leaves, seen)
        return closures.call(on_leaves) if job.runs else on_leaves()

    def traced() -> Any:
        with mesh_context(rules, leaves):
            return jax.make_jaxpr(flat, return_shape=True)(avals)

    try:
        closed, shapes = call_with_rules(rules, traced)
    except TypeError as error:
        refuse_integers(arguments, job.name, error)
        raise
    closures.check(closed.jaxpr)
    closed = with_own_arrays(closed)
    # The types know about Explicit axes in every version of JAX; the shapes do not.
    types, change = closed.out_avals, seen.change
    layouts: list[Any] = [wanted[at] for at in (*seen.changed, *seen.nested)]
    moved: list[int] = []
    if change is not None:
        new = seen.returned, types[: seen.count]
        after, asked = wanted_after(
            arguments, wanted, change, *new, job.in_sharding, rules
        )
        stays = {at: wanted[at] != where for at, where in change.at(after, stays=True)}
        moved = [at for at, moves in stays.items() if moves]
        change = change.moving(moved)
        layouts = [where for _, where in sorted(change.at(after, stays=False))]
    out = (seen.out_tree, types[seen.count :])
    pinned, asked = pin_results(arguments, wanted, out, job.out_shardings, rules, asked)
    fingerprints: Mapping[str, Sequence[str]] = {}
    for text in told:
        warn(text)
    if asked.resolution is not None:
        asked.resolution.announce()
        if jax.process_count() > 1:
            fingerprints = asked.resolution.fingerprint_lines()
    places = _places(arguments, set(seen.changed))
    program = _from_jaxpr(closed, seen.count, moved, seen.out_tree, pinned, places)
    program.__name__ = job.name
    result = jax.tree.unflatten(seen.out_tree, [sharding for _, sharding in pinned])
    donated, kept, given, rest = places
    return Program(
        jitted=jax.jit(
            program,
            in_shardings=_inputs(*places, wanted),
            out_shardings=[*layouts, result],
            donate_argnums=(0, 2),
        ),
        wanted=wanted,
        donated=donated,
        kept=kept,
        given=given,
        rest=rest,
        changed=seen.changed,
        nested=seen.nested,
        change=change,
        out_tree=seen.out_tree,
        out_shapes=list(shapes[1]),
        changed_shapes=[*shapes[0], *(abstract(leaves[at], None) for at in moved)],
        returns_objects=seen.returns_objects,
        cacheable=seen.keeps_constants
        and not any(isinstance(const, Tracer) for const in closed.consts),
        fingerprints=fingerprints,
    )


def mesh_needed(rules: RuleSet | None) -> Any:
    """The abstract mesh that tracing and running need as context; None if none.

    Explicit axes need their mesh in context; and with rules on one mesh, another one
    that happens to be in context must not count.
    """
    mesh = None if rules is None else rules.mesh
    if mesh is None:
        return None
    context: Any = jax.sharding.get_abstract_mesh()
    own: Any = mesh.jax_mesh.abstract_mesh
    needed = bool(context.axis_names) or AxisType.Explicit in mesh.axis_types
    return None if not needed or context == own else own


def mesh_context(rules: RuleSet | None, leaves: Sequence[Any]) -> Any:
    """That mesh as context; inside of an outer trace, that of its tracers."""
    mesh = mesh_needed(rules)
    if mesh is None or any(isinstance(x, Tracer) for x in leaves):
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)


def run_program(
    program: Program, arguments: Sequence[Argument], leaves: Sequence[Any]
) -> Any:
    """Runs a program, and writes what it changed into the caller's NNX objects.

    Both at once, as far as an interrupt can see. If the structure changes, the program
    has donated nothing of the objects, so that they are whole in between.

    Returns:
        The function's result.
    """
    change = program.change
    nodes = [node for argument in arguments for node in argument.objects]
    objects: list[Any] = []
    if change is not None or program.returns_objects:
        objects = objects_of(nodes)
    if change is not None:
        check_apart(arguments, [a.objects for a in arguments], object)
    changed: list[Any] = []
    if program.changed:
        holders = [holder for argument in arguments for holder in argument.holders()]
        changed = [holder[0] for at in program.changed if (holder := holders[at])]
        check_can_write(changed)
    results = itertools.chain.from_iterable(
        itertools.starmap(program.jitted, (program.inputs(leaves),))
    )
    drain(map(write_value, changed, results))
    *outputs, result = results
    if change is not None:
        objects = change.apply(objects, change.leaves(leaves, outputs))
    else:
        write_back(arguments, dict(zip(program.nested, outputs, strict=True)))
    return with_objects(result, objects) if program.returns_objects else result


def abstract_result(program: Program, arguments: Sequence[Argument]) -> Any:
    """The function's result without arrays; no object is changed."""
    result = jax.tree.unflatten(program.out_tree, program.out_shapes)
    if not program.returns_objects:
        return result
    every = [leaf for argument in arguments for leaf in argument.leaves]
    given = [abstract(leaf, None) for leaf in every]
    if program.change is not None:
        leaves = program.change.leaves(given, program.changed_shapes)
        return with_objects(result, objects_of(program.change.merged(leaves)))
    merged: list[Any] = []
    for argument in arguments:
        own, given = given[: len(argument.leaves)], given[len(argument.leaves) :]
        merged += argument.among_objects(argument.rebuild(own)[1])
    return with_objects(result, objects_of(merged))


def write_back(arguments: Sequence[Argument], new: Mapping[int, Any]) -> None:
    """Writes new values (by position over all leaves) into the caller's objects."""
    start = 0
    for argument in arguments:
        stop = start + len(argument.leaves)
        own = {at - start: new[at] for at in range(start, stop) if at in new}
        if own and argument.has_objects:
            argument.write_back(own)
        start = stop


# ------------------------------------------------------------------------ tracing


@dataclasses.dataclass(slots=True)
class _Seen:
    """What the trace of a function showed. Holds no tracer.

    Attributes:
        changed: positions of the values that it changed.
        nested: positions of what else it changed.
        change: what else it did to NNX objects, or None.
        returned: where in its result the new NNX objects are.
        count: how many outputs come before its result.
        out_tree: the structure of its result.
        returns_objects: whether NNX objects or their Variables are in it.
        keeps_constants: whether it set and edited no constant that cannot be hashed.
    """

    changed: tuple[int, ...] = ()
    nested: tuple[int, ...] = ()
    change: Change | None = None
    returned: tuple[str, ...] = ()
    count: int = 0
    out_tree: Any = None
    returns_objects: bool = False
    keeps_constants: bool = True


def call_job(
    job: Job,
    order: Sequence[Slot],
    rules: RuleSet | None,
    parameters: Iterable[str],
    values: Mapping[Slot, Any],
    tell: Callable[[str], None] = warn,
) -> Any:
    """Calls the user's function; the layers lay out what they return.

    Args:
        job: the function.
        order: the arguments in the order of the signature.
        rules: the rule set, or None.
        parameters: paths of the parameters among the arguments, in all their forms,
            for rules `…/output`.
        values: the arguments.
        tell: is told of activation rules that never fired.
    """
    roots = [root for slot in order for root in _roots(values[slot])]
    given = [(slot, values[slot]) for slot in order]

    def call() -> Any:
        result = call_with(job.fun, job.signature, given)
        for _, node in _roots(result):
            forget_path(node)
        return result

    return call_activated(call, rules, roots, parameters, tell)


def _roots(value: Any) -> list[tuple[str, Any]]:
    """The NNX objects in an argument, each with what its paths begin with there."""
    try:
        leaves, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=is_nnx_object)
    except (TypeError, ValueError):  # a constant that JAX cannot flatten
        return []
    found = [(join_keys(keys), leaf) for keys, leaf in leaves if is_nnx_object(leaf)]
    return [(f"{path}/" if path else "", leaf) for path, leaf in found]


def _on_leaves(
    call: Callable[[Mapping[Slot, Any]], Any],
    static: Mapping[Slot, Any],
    arguments: Sequence[Argument],
    leaves: Sequence[Any],
    seen: _Seen,
) -> tuple[list[Any], list[Any]]:
    """The user's function on leaves; traced once."""
    values: dict[Slot, Any] = dict(static)
    copies: list[list[Any]] = []  # of the NNX objects of each argument
    positions: list[int] = []  # of the leaves in them
    start = 0
    for argument in arguments:
        own = leaves[start : start + len(argument.leaves)]
        values[argument.slot], merged = argument.rebuild(own)
        copies.append(argument.among_objects(merged))
        pure = argument.pure_leaves()
        positions += [start + at for at in range(len(own)) if not pure[at]]
        start += len(own)
    nodes = [node for own in copies for node in own]
    before = Graph(nodes)
    result = call(values)
    after = Graph(nodes)
    known = set(map(id, after.objects))
    made = [(path, node) for path, node in _roots(result) if id(node) not in known]
    returned = [node for _, node in made]
    new = None if returned else _changed_values(before, after, positions, seen)
    if new is None:
        check_apart(arguments, copies, nnx.Variable)
        after = Graph([*nodes, *returned])
        _check_new(arguments, copies, returned, before)
        seen.change, new = change_of(before, after, positions, leaves)
        seen.returned = tuple(path for path, _ in made)
        seen.keeps_constants = before.keeps_constants(after)
    plain, seen.returns_objects = without_objects(result, after.objects)
    results, seen.out_tree = jax.tree.flatten(plain)
    seen.count = len(new)
    return list(map(strong, new)), results


def _check_new(
    arguments: Sequence[Argument],
    copies: Sequence[Sequence[Any]],
    returned: Sequence[Any],
    before: Graph,
) -> None:
    """Raises StructureError where objects come from elsewhere, or hold no arrays."""
    known = set(map(id, before.objects))
    named = [("the result", node) for node in returned]
    for argument, own in zip(arguments, copies, strict=True):
        named += [(argument.name, node) for node in own]
    for name, node in named:
        for path, part in named_objects_of(node):
            where = "/".join((name, *map(str, path)))
            if id(part) not in known:
                try:
                    check_can_write([part])
                except TraceContextError as error:
                    raise StructureError(
                        f"{where} comes from outside of the function: pass it as an "
                        "argument, or as part of one, so that it stays the same object"
                    ) from error
            if isinstance(part, nnx.Variable):
                for problem in map(no_array, jax.tree.leaves(part.get_raw_value())):
                    if problem:
                        raise StructureError(
                            f"{where} holds the {problem}, which is no array: make it "
                            "a static attribute"
                        )


def _changed_values(
    before: Graph, after: Graph, positions: Sequence[int], seen: _Seen
) -> list[Any] | None:
    """The new values of Variables; None if there is more to it than that."""
    if not after.is_like(before):
        return None
    changed = [
        at
        for at, (old, new) in enumerate(zip(before.leaves, after.leaves, strict=True))
        if old is not new
    ]
    simple = [at for at in changed if is_value(after.leaves[at], after.holders[at])]
    nested = sorted(set(changed).difference(simple))
    seen.changed = tuple(positions[at] for at in simple)
    seen.nested = tuple(positions[at] for at in nested)
    return [after.leaves[at] for at in (*simple, *nested)]


_Places = tuple[tuple[int, ...], tuple[int, ...], tuple[Tree, ...], tuple[Tree, ...]]


def _from_jaxpr(
    closed: ClosedJaxpr,
    count: int,
    moved: Sequence[int],
    out_tree: Any,
    pinned: Sequence[Pin],
    places: _Places,
) -> Callable[..., Any]:
    """The traced function on the inputs of a program; not traced a second time.

    Args:
        closed: the trace of the function on all leaves in order.
        count: how many of its results are changed state.
        moved: positions of leaves that come out as they are, after these.
        out_tree: structure of the function's own result.
        pinned: of each of its leaves, whether it is state.
        places: where the leaves are among the inputs.
    """
    donated, kept, given, rest = places
    traced: list[bool] = []

    def program(*inputs: Any) -> Any:
        # Where JAX traces again, the user's function must be: something around it that
        # JAX knows of is another one, such as the size of a mapped axis.
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(inputs)):
            if traced:
                raise OtherArgumentsError
            traced.append(True)
        values: list[Any] = [None] * len(closed.in_avals)
        for at, leaf in zip((*donated, *kept), (*inputs[0], *inputs[1]), strict=True):
            values[at] = leaf
        for tree, leaves in zip(given, inputs[2], strict=True):
            values[tree.start : tree.start + len(leaves)] = leaves
        for tree, own in zip(rest, inputs[3], strict=True):
            leaves, treedef = jax.tree.flatten(own)
            if treedef != tree.treedef:
                raise OtherArgumentsError
            values[tree.start : tree.start + len(leaves)] = leaves
        if any(map(_differ, values, closed.in_avals)):
            raise OtherArgumentsError
        # Not jaxpr_as_fun, after which debug_nans checks nothing any more (jax 0.10.2).
        after = eval_jaxpr(closed.jaxpr, closed.consts, *values)
        results = [
            strong(value) if is_state else value
            for value, (is_state, _) in zip(after[count:], pinned, strict=True)
        ]
        others = [values[at] for at in moved]
        return [*after[:count], *others, jax.tree.unflatten(out_tree, results)]

    return program


def _differ(value: Any, aval: Any) -> bool:
    """Whether a value is of another type than the one that was traced."""
    own: Any = jax.typeof(value)
    return (
        own.shape != aval.shape
        or own.dtype != aval.dtype
        or own.weak_type != aval.weak_type
    )


def _places(arguments: Sequence[Argument], changed: set[int]) -> _Places:
    """Where the leaves are: in lists, those of NNX objects; in trees, the others.

    What a function leaves unchanged in an NNX object stays in use, so its buffer must
    not be taken for a result that happens to have the same shape: it is not donated.
    """
    donated: list[int] = []
    kept: list[int] = []
    given: list[Tree] = []
    rest: list[Tree] = []
    start = 0
    for argument in arguments:
        span = range(start, start + len(argument.leaves))
        start = span.stop
        if argument.has_objects:
            pure = argument.pure_leaves()
            for at in span:
                gone = argument.is_donated and (at in changed or pure[at - span.start])
                (donated if gone else kept).append(at)
        else:
            tree = Tree(argument.slot, argument.treedef, span.start)
            (given if argument.is_donated else rest).append(tree)
    return tuple(donated), tuple(kept), tuple(given), tuple(rest)
