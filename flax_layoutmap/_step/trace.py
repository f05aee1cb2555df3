"""What a function is traced with: its options, contexts, activation rules and axes."""

import contextlib
import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from flax_layoutmap._core.fetch import is_eager
from flax_layoutmap._place.place import explicit_axes
from flax_layoutmap._rules.rules import RuleSet, trace_key, using_rules
from flax_layoutmap._step.activations import activated, forget_path
from flax_layoutmap._step.arguments import Slot, call_with
from flax_layoutmap._tree.flax_internals import is_nnx_object
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
    wanted: Any = mesh.jax_mesh.abstract_mesh
    needed = bool(context.axis_names) or bool(explicit_axes(mesh))
    return None if not needed or context == wanted else wanted


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
    """A function to compile, and its options."""

    fun: Callable[..., Any]
    signature: inspect.Signature
    # Layouts that override the rules: prefix trees, by argument and for the result.
    in_shardings: Mapping[str, Any]
    out_shardings: Any
    static: frozenset[str]  # the arguments that are constants
    donated: frozenset[str]  # the arguments whose buffers may be reused
    runs: bool = True  # if not, no value in its programs can become stale
    explicit: bool = False  # whether it is traced on the Explicit axes of the mesh

    @property
    def name(self) -> str:
        return getattr(self.fun, "__name__", "a_function")


def call_job(
    job: Job,
    given: Sequence[tuple[Slot, Any]],
    rules: RuleSet | None,
    parameters: Iterable[str],
    remarks: list[str],
) -> Any:
    """Call the user's function with its rules in force, also those of activations.

    `parameters` are the paths of parameters among the arguments, in all their forms;
    warnings about rules are added to `remarks`.
    """
    roots = [root for _, value in given for root in roots_of(value)]
    with using_rules(rules), activated(rules, roots, parameters, remarks.append):
        result = call_with(job.fun, given)
        for _, node in roots_of(result):
            forget_path(node)
        return result


def roots_of(value: Any) -> list[tuple[str, Any]]:
    """The NNX objects in a tree, each with the prefix of its paths there."""
    try:
        leaves, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=is_nnx_object)
    except (TypeError, ValueError):  # a constant that JAX cannot flatten
        return []
    named = [(join_keys(keys), leaf) for keys, leaf in leaves if is_nnx_object(leaf)]
    return [(f"{path}/" if path else "", leaf) for path, leaf in named]


# --------------------------------------------------------------- Explicit axes


def on_auto_axes(fun: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
    """A function of arrays, traced as if the Explicit axes of a mesh were Auto.

    As by `jax.sharding.auto_axes`, inputs lose the axes of their types, at no cost.
    State gets them back by the `out_shardings` of `jax.jit`, scalars in the trace,
    other results after the program, by `typed`.
    """
    types: Any = mesh.jax_mesh.abstract_mesh
    auto = types.update_axis_types(dict.fromkeys(types.axis_names, AxisType.Auto))
    whole = functools.partial(jax.sharding.reshard, out_shardings=PartitionSpec())

    @functools.wraps(fun)
    def on_auto(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(auto):
            outputs = fun(*whole(args))
        with jax.sharding.use_abstract_mesh(types):
            return jax.tree.map(
                lambda x: x if not isinstance(x, jax.Array) or x.ndim else whole(x),
                outputs,
            )

    return on_auto


def typed(outputs: Any, places: Sequence[Any], mesh: Any) -> Any:
    """The outputs of such a program with the types of the mesh, in the same buffers.

    In an outer trace an output without a place is replicated, and in `grad` or `vmap`
    all are.
    """
    jax_mesh = mesh.jax_mesh
    whole = NamedSharding(jax_mesh, PartitionSpec())

    def label(x: Any, place: Any) -> Any:
        if isinstance(x, Tracer):
            return jax.device_put(x, whole if place is None or is_eager() else place)
        if place is not None or not isinstance(own := x.sharding, NamedSharding):
            return x
        kind = own.memory_kind
        return jax.device_put(x, NamedSharding(jax_mesh, own.spec, memory_kind=kind))

    flat, treedef = jax.tree.flatten(outputs)
    return treedef.unflatten(map(label, flat, places))
