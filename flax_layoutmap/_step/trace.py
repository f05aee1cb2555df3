"""Trace the user's function once on the leaves of its arguments."""

import contextlib
import dataclasses
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from flax.errors import TraceContextError
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr
from jax.sharding import AxisType, Mesh, NamedSharding

from flax_layoutmap._core.errors import StructureError, warn
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._rules.scope import call_with_rules, trace_key
from flax_layoutmap._step.activations import call_activated, forget_path
from flax_layoutmap._step.arguments import (
    Argument,
    Call,
    Slot,
    call_with,
    named_objects,
    no_array,
    rebuilt,
    spans,
    strong,
)
from flax_layoutmap._step.explicit import on_auto_axes
from flax_layoutmap._step.refusals import (
    check_apart,
    named_parts,
    refuse_captured,
    refuse_closures,
    refuse_integers,
)
from flax_layoutmap._tree.flax_internals import (
    check_can_write,
    is_nnx_object,
)
from flax_layoutmap._tree.graph import (
    Change,
    Graph,
    change_of,
    is_value,
    without_objects,
)
from flax_layoutmap._tree.jaxprs import with_own_arrays
from flax_layoutmap._tree.paths import join_keys

# JAX settings that change the result of a trace.
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


def context_key() -> tuple[Any, ...]:
    """What a trace depends on besides the arguments: contexts and settings."""
    return jax.sharding.get_abstract_mesh(), _settings(jax.config), trace_key()


def mesh_needed(rules: RuleSet | None) -> Any:
    """The abstract mesh that tracing and running need as context, or None.

    Explicit axes need their mesh in context; and with rules on one mesh, another mesh
    in context must not apply.
    """
    mesh = None if rules is None else rules.mesh
    if mesh is None:
        return None
    context: Any = jax.sharding.get_abstract_mesh()
    own: Any = mesh.jax_mesh.abstract_mesh
    needed = bool(context.axis_names) or AxisType.Explicit in mesh.axis_types
    return None if not needed or context == own else own


def mesh_context(rules: RuleSet | None, leaves: Sequence[Any]) -> Any:
    """That mesh as context; inside an outer trace, that of its tracers."""
    mesh = mesh_needed(rules)
    if mesh is None or any(isinstance(x, Tracer) for x in leaves):
        return contextlib.nullcontext()
    if not any(isinstance(getattr(x, "sharding", None), NamedSharding) for x in leaves):
        devices = None if rules is None or rules.mesh is None else rules.mesh.jax_mesh
        if isinstance(devices, Mesh):
            return jax.set_mesh(devices)  # JAX would not know them
    return jax.sharding.use_abstract_mesh(mesh)


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A function to compile, and its options.

    Attributes:
        in_shardings: argument name → prefix tree of layouts, which override the rules.
        out_shardings: prefix tree of layouts for the result, or None.
        static: the arguments that are constants.
        donated: the arguments whose buffers may be reused.
        runs: whether its programs run; if not, no value in them can become stale.
        explicit: whether the function is traced on Explicit axes as such.
    """

    fun: Callable[..., Any]
    signature: inspect.Signature
    in_shardings: Mapping[str, Any]
    out_shardings: Any
    static: frozenset[str]
    donated: frozenset[str]
    runs: bool = True
    explicit: bool = False

    @property
    def name(self) -> str:
        """The function's name, for messages and programs."""
        return getattr(self.fun, "__name__", "a_function")

    def in_sharding(self, slot: Slot) -> Any:
        """The entry of `in_shardings` for an argument, or None."""
        by_parameter = self.in_shardings.get(slot.parameter)
        return self.in_shardings.get(slot.name, by_parameter)


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The changes of NNX objects by a function, and its result. Holds no tracer.

    Attributes:
        changed: positions of the values that it changed; those of donated arguments
            come first.
        nested: positions of other changed leaves.
        change: the change of structure, or None.
        returned: where in its result the new NNX objects are.
        count: how many outputs precede its result.
        out_tree: the structure of its result.
        returns_objects: whether NNX objects or their Variables are in it.
        keeps_constants: whether it set and edited no constant that cannot be hashed.
    """

    changed: tuple[int, ...]
    nested: tuple[int, ...]
    change: Change | None
    returned: tuple[str, ...]
    count: int
    out_tree: Any
    returns_objects: bool
    keeps_constants: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Traced:
    """A function, traced on leaves.

    Attributes:
        closed: from all leaves in order to the changes and the leaves of its result.
        shapes: abstract values of both.
        outcome: what these are.
        remarks: warnings to emit: in a trace, one would point at JAX's code.
    """

    closed: ClosedJaxpr
    shapes: tuple[list[Any], list[Any]]
    outcome: Outcome
    remarks: Sequence[str]


def trace_job(
    job: Job, call: Call, avals: Sequence[Any], parameters: Iterable[str]
) -> Traced:
    """Trace the user's function on `avals` of all leaves.

    `parameters` are the paths of parameters among the arguments, in all their forms.

    Raises:
        StructureError: the function uses NNX objects as `flm.jit` does not allow.
    """
    remarks: list[str] = []
    outcomes: list[Outcome] = []
    if job.runs:
        refuse_closures(job.fun, job.name, {slot.name for slot, _ in call.slots})

    def flat(leaves: list[Any]) -> Any:
        new, results, outcome = _on_leaves(
            job, call, leaves, parameters, remarks.append
        )
        outcomes.append(outcome)
        return new, results

    def traced() -> Any:
        with mesh_context(call.rules, call.leaves):
            mesh = None if call.rules is None or job.explicit else call.rules.mesh
            fun = on_auto_axes(flat, mesh)
            return jax.make_jaxpr(fun, return_shape=True)(avals)

    try:
        closed, shapes = call_with_rules(call.rules, traced)
    except TypeError as error:
        refuse_integers(_differentiable(call.arguments), job.name, error)
        raise
    if job.runs:
        refuse_captured(closed.consts, named_objects(call.arguments), job.name)
    return Traced(with_own_arrays(closed), shapes, outcomes[-1], remarks)


def _differentiable(arguments: Iterable[Argument]) -> Iterator[tuple[str, Any]]:
    """Params, and the leaves of states without objects, with their paths."""
    for argument in arguments:
        pairs = zip(argument.leaves, argument.holders(), strict=True)
        for at, (leaf, holder) in enumerate(pairs):
            of_param = holder is None or isinstance(holder[0], nnx.Param)
            if argument.is_state and of_param:
                yield argument.path(at), leaf


def call_job(
    job: Job,
    given: Sequence[tuple[Slot, Any]],
    rules: RuleSet | None,
    parameters: Iterable[str],
    report: Callable[[str], None] = warn,
) -> Any:
    """Call the user's function on its arguments, with activation rules applied.

    `parameters` are the paths of parameters among the arguments, in all their forms,
    for rules `…/output`; `report` gets the warnings about rules that matched nothing.
    """

    def call() -> Any:
        result = call_with(job.fun, job.signature, given)
        for _, node in _roots(result):
            forget_path(node)
        return result

    roots = [root for _, value in given for root in _roots(value)]
    return call_activated(call, rules, roots, parameters, report)


def _roots(value: Any) -> list[tuple[str, Any]]:
    """The NNX objects in an argument, each with the prefix of its paths there."""
    try:
        leaves, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=is_nnx_object)
    except (TypeError, ValueError):  # a constant that JAX cannot flatten
        return []
    found = [(join_keys(keys), leaf) for keys, leaf in leaves if is_nnx_object(leaf)]
    return [(f"{path}/" if path else "", leaf) for path, leaf in found]


def _on_leaves(
    job: Job,
    call: Call,
    leaves: Sequence[Any],
    parameters: Iterable[str],
    report: Callable[[str], None],
) -> tuple[list[Any], list[Any], Outcome]:
    """Call the function on leaves: its changes, result leaves and outcome."""
    values, copies, positions = rebuilt(call.arguments, leaves)
    values |= call.static
    donated: set[int] = set()
    for argument, span in zip(call.arguments, spans(call.arguments), strict=True):
        donated.update(span if argument.is_donated else ())
    nodes = [node for own in copies for node in own]
    before = Graph(nodes)
    given = [(slot, values[slot]) for slot, _ in call.slots]
    result = call_job(job, given, call.rules, parameters, report)
    after = Graph(nodes)
    known = set(map(id, after.objects))
    made = [(path, node) for path, node in _roots(result) if id(node) not in known]
    simple: list[int] = []
    nested: list[int] = []
    change, keeps_constants = None, True
    if not made and after.is_like(before):
        simple, nested = _changed(before, after)
        simple.sort(key=lambda at: positions[at] not in donated)
        new = [after.leaves[at] for at in (*simple, *nested)]
    else:
        returned = [node for _, node in made]
        check_apart(named_objects(call.arguments, copies))
        _check_new(call.arguments, copies, returned, before)
        after = Graph([*nodes, *returned])
        change, new = change_of(before, after, positions, leaves)
        keeps_constants = before.keeps_constants(after)
    plain, returns_objects = without_objects(result, after.objects)
    results, out_tree = jax.tree.flatten(plain)
    outcome = Outcome(
        changed=tuple(positions[at] for at in simple),
        nested=tuple(positions[at] for at in nested),
        change=change,
        returned=tuple(path for path, _ in made),
        count=len(new),
        out_tree=out_tree,
        returns_objects=returns_objects,
        keeps_constants=keeps_constants,
    )
    return list(map(strong, new)), results, outcome


def _changed(before: Graph, after: Graph) -> tuple[list[int], list[int]]:
    """Positions of the leaves that changed: whole values of Variables, and others."""
    pairs = enumerate(zip(before.leaves, after.leaves, strict=True))
    changed = [at for at, (old, new) in pairs if old is not new]
    is_whole = [is_value(after.leaves[at], after.holders[at]) for at in changed]
    pairs = list(zip(changed, is_whole, strict=True))
    return [at for at, whole in pairs if whole], [at for at, w in pairs if not w]


def _check_new(
    arguments: Sequence[Argument],
    copies: Sequence[Sequence[Any]],
    returned: Sequence[Any],
    before: Graph,
) -> None:
    """Raise StructureError where objects are not of this trace, or hold no arrays."""
    known = set(map(id, before.objects))
    named = [("the result", node) for node in returned]
    for argument, own in zip(arguments, copies, strict=True):
        named += [(argument.name, node) for node in own]
    for where, part in named_parts(named):
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
