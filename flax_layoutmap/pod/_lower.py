"""Lower a step on an abstract mesh, with the arguments sharded by the rules."""

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding

from flax_layoutmap._core.errors import LayoutError, MeshError
from flax_layoutmap._core.mesh import DeviceMesh, as_mesh
from flax_layoutmap._core.mesh_shape import fill, sizes_and_names
from flax_layoutmap._core.topologies import Topology
from flax_layoutmap._resolve.resolve import rule_set_of
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._step.arguments import (
    Argument,
    Slot,
    call_with,
    names_of,
    signature_of,
    slots_of,
    take_apart,
)
from flax_layoutmap._step.inputs import holds_parameters
from flax_layoutmap._step.jit import Jitted, jit
from flax_layoutmap._step.program import Program
from flax_layoutmap._step.shardings import abstract
from flax_layoutmap._step.trace import Job, mesh_context
from flax_layoutmap._tree.flax_internals import is_nnx_object
from flax_layoutmap.pod._aot import split_over_slices
from flax_layoutmap.pod._lowered import (
    Layouts,
    Lowered,
    constants_of,
    kept_by,
    leaves_of,
    lower,
    notes_of,
    split_data,
)
from flax_layoutmap.pod._mlir import meshes
from flax_layoutmap.pod._pairs import Results, comes_back, look_at, pairs_of


def rules_and_mesh(
    step: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mesh: Any,
    layout_map: Any,
    topology: Topology | None,
) -> tuple[RuleSet | None, DeviceMesh]:
    """The rules on an abstract mesh, and that mesh: the first that is given.

    The step may bring rules, the rules a mesh, and the arguments of a step of `jax.jit`
    shardings.
    """
    if layout_map is None and isinstance(step, Jitted):
        layout_map = step.layout_map
    rules = None if layout_map is None else rule_set_of(layout_map, "layout_map=")
    own = _abstract_mesh(mesh, topology)
    if own is None and rules is not None and rules.mesh is not None:
        own = _abstract_mesh(rules.mesh, topology)
    if own is None and rules is None:
        own = _mesh_of_arguments(args, kwargs)
    if own is None:
        raise MeshError(
            'a mesh is missing: pass mesh="fsdp=16,tensor=4", or rules that have one'
        )
    types = zip(own.axis_names, own.axis_types, strict=True)
    manual = [name for name, kind in types if kind == AxisType.Manual]
    if manual:
        raise MeshError(
            f"the axes {', '.join(map(repr, manual))} of the mesh {own} are manual, "
            f'as inside of a shard_map; plan for a mesh of auto axes: mesh="{own}"'
        )
    if topology is not None:
        split_over_slices(own.axis_sizes, topology)
    return None if rules is None else rules.on(own), own


def _abstract_mesh(mesh: Any, topology: Topology | None) -> DeviceMesh | None:
    """A mesh without devices; a size of -1 takes what the topology has left."""
    if mesh is None:
        return None
    if isinstance(mesh, str | Mapping):
        sizes, names = sizes_and_names(mesh, None)
        if topology is not None:
            sizes = fill(sizes, names, topology.devices)
        return DeviceMesh.abstract(sizes, names)
    given = as_mesh(mesh)
    assert given is not None
    jax_mesh: Any = given.jax_mesh
    # The abstract mesh of these devices: a shard_map compares the kind of device, too.
    return given if given.is_abstract else as_mesh(jax_mesh.abstract_mesh)


def _mesh_of_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> DeviceMesh | None:
    """The mesh that shardings of the arguments are on."""
    for leaf in jax.tree.leaves((args, kwargs)):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            return _abstract_mesh(sharding.mesh, None)
    return None


# Errors of a step that needs the values of its arguments.
_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
# A mesh of devices that has another size than the plan's.
_OTHER_DEVICES = re.compile("AbstractMesh size: .* does not match the device")
_WITHOUT_MESH = (
    ": in a NamedSharding, a jax.shard_map(mesh=…), or in out_shardings; name axes "
    'alone, jax.lax.with_sharding_constraint(x, PartitionSpec("data")), '
    'flm.distribute_tensor(x, ("data", None)), jax.shard_map without mesh=, or take '
    "jax.sharding.get_abstract_mesh() in the step"
)
# Axes are named, and no mesh is in context.
_LACKS_MESH = re.compile(
    r"mesh.*empty|empty.*mesh|not found in mesh: \(\)|not under a mesh context",
    re.DOTALL | re.IGNORECASE,
)


def lower_step(
    step: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rules: RuleSet | None,
    donated: Any,
    platform: str,
    mesh: DeviceMesh,
) -> Lowered:
    """Lower a step without devices.

    The rules are on an abstract mesh; None is for a function of `jax.jit` alone. The
    `donated` arguments of a function of `jax.jit` are state, and not donated by this.
    """
    name = getattr(step, "__name__", "the step")
    call = functools.partial(_lower_step, step, args, kwargs, rules, donated, platform)
    try:
        found = _in_its_mesh(call, mesh)
        _check_mesh(found, mesh)
        return found
    except _NEEDS_VALUES as error:
        raise LayoutError(
            f"{name} needs the values of its arguments, and a plan has none: "
            f"{str(error).splitlines()[0]}; use jax.lax.cond, jnp.where or a shape "
            "instead, or make the argument static (flm.jit(static_argnames=…))"
        ) from error
    except (AttributeError, TypeError) as error:
        _check_arguments(step, name, args, kwargs)
        if "ShapeDtypeStruct" not in str(error):
            raise
        raise LayoutError(
            f"{name} uses a jax.ShapeDtypeStruct that is none of its arguments "
            f"({error}), such as a model in its closure; pass that as an argument"
        ) from error
    except ValueError as error:
        if not _OTHER_DEVICES.search(str(error)):
            raise
        raise MeshError(
            f"{name} is planned for the mesh {mesh}, and names a mesh of other devices "
            f"({error}){_WITHOUT_MESH}"
        ) from error


def _check_arguments(
    step: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raise LayoutError if a step that failed does not take such arguments."""
    signature = signature_of(step)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        wanted = signature.parameters.values()
        names = [str(one.replace(annotation=one.empty)) for one in wanted]
        given = [*map(_kind, args), *(f"{key}={_kind(kwargs[key])}" for key in kwargs)]
        raise LayoutError(
            f"{name}({', '.join(names)}) cannot be called with ({', '.join(given)}): "
            f"{error}; pass one argument for each parameter"
        ) from None


def _kind(value: Any) -> str:
    """The type of an argument: `float32[8,16]`, `dict`."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    return type(value).__name__


def _in_its_mesh(call: Callable[[], Lowered], mesh: DeviceMesh) -> Lowered:
    """Lower, and again in the context of the mesh if the step needs one and has none.

    Constraints that name axes alone, as under `jax.set_mesh`, need one.
    """
    try:
        return call()
    except (RuntimeError, ValueError) as error:
        context: Any = jax.sharding.get_abstract_mesh()
        if isinstance(error, LayoutError) or context.axis_names:
            raise
        if not _LACKS_MESH.search(str(error)):
            raise
    jax_mesh: Any = mesh.jax_mesh
    with jax.sharding.use_abstract_mesh(jax_mesh):
        return call()


def _check_mesh(lowered: Lowered, mesh: DeviceMesh) -> None:
    """Raise MeshError where the step names another mesh than the plan's."""
    module = lowered.lowered.compiler_ir("stablehlo")
    for _, sizes in meshes(module.operation):
        if sizes and list(sizes.items()) != list(mesh.axis_sizes.items()):
            other = ",".join(f"{name}={size}" for name, size in sizes.items())
            raise MeshError(
                f"{lowered.name} is planned for the mesh {mesh}, and names another "
                f"one, {other}{_WITHOUT_MESH}"
            )


def _lower_step(
    step: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rules: RuleSet | None,
    donated: Any,
    platform: str,
) -> Lowered:
    _check_step(step)
    is_nnx = type(step).__module__.startswith("flax.") and hasattr(step, "__wrapped__")
    if not isinstance(step, Jitted):
        if not is_nnx and callable(getattr(step, "trace", None)):
            return lower_jitted(step, args, kwargs, rules, donated, platform)
        # nnx.jit wraps the user's function; its own options do not count here.
        step = jit(step.__wrapped__ if is_nnx else step, layout_map=rules)
    if rules is None:
        raise LayoutError(
            "plan needs rules for a step that is no function of jax.jit; pass "
            "layout_map=layout_map"
        )
    job, arguments, program = step.without_running(
        args, kwargs, rules, split_data, donated
    )
    return _lower_program(rules, platform, job, arguments, program)


def _check_step(step: Any) -> None:
    owner = getattr(step, "__self__", step)
    if is_nnx_object(owner):
        kind = type(owner).__name__
        raise LayoutError(
            f"the step is a module ({kind}), whose arrays would be constants of the "
            "program; pass it as an argument: "
            "flm.pod.plan(lambda model, x: model(x), model, x, …)"
        )


def _lower_program(
    rules: RuleSet,
    platform: str,
    job: Job,
    arguments: Sequence[Argument],
    program: Program,
) -> Lowered:
    """Lower what `flm.jit` would run."""
    leaves = [leaf for one in arguments for leaf in one.leaves]
    avals = [
        abstract(leaf, wanted or getattr(leaf, "sharding", None))
        for leaf, wanted in zip(leaves, program.wanted, strict=True)
    ]
    with mesh_context(rules, leaves):
        traced = program.jitted.trace(*program.places.inputs(avals))
        lowered = lower(traced, platform, job.name)
    order = jax.tree.leaves(program.places.inputs(range(len(leaves))))
    kept = [order[at] for at in kept_by(lowered, ["inputs"], variadic=True)]
    place = {leaf: at for at, leaf in enumerate(kept)}
    known: dict[int, int] = {}
    outcome, (changed, out_shapes) = program.outcome, program.shapes
    if outcome.change is None:
        known = dict(enumerate((*outcome.changed, *outcome.nested)))
    start = len(changed)
    plain = jax.tree.unflatten(outcome.out_tree, out_shapes)
    results = look_at(traced, order, plain, start, arguments)
    shapes = [*changed, *out_shapes]
    found, gradients = pairs_of(results, arguments, shapes, known)
    fixed = [one.name for one in arguments if job.in_sharding(one.slot) is not None]
    donated = set(program.donated)
    return Lowered(
        job.name,
        lowered,
        leaves_of(arguments, kept, [at in donated for at in kept], avals),
        {result: place[leaf] for result, leaf in found.items() if leaf in place},
        kept,
        Layouts(arguments, fixed),
        constants_of(traced),
        notes=notes_of(arguments, rules),
        gradients=gradients,
    )


def lower_jitted(
    step: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rules: RuleSet | None,
    state: str | Iterable[str],
    platform: str,
) -> Lowered:
    """Lower a `jax.jit` function, with its arguments sharded by the rules.

    `state` names arguments that are state, beside those that are taken for it.
    """
    signature = inspect.signature(step)
    named = names_of(signature, state, (), "donate_argnames")
    slots = slots_of(signature.bind(*args, **kwargs))
    # An argument that holds anything else is static.
    every = [
        take_apart(slot, value, is_state=slot.is_among(named), is_donated=False)
        for slot, value in slots
        if all(map(_is_array_or_number, jax.tree.leaves(value)))
    ]

    def trace() -> Any:
        own = {one.slot: one for one in every}
        values = [
            (slot, own[slot].plain() if slot in own else value) for slot, value in slots
        ]
        leaves = [leaf for one in every for leaf in one.leaves]
        with contextlib.nullcontext() if rules is None else mesh_context(rules, leaves):
            return call_with(step.trace, signature, values)

    if rules is not None:
        for at, one in enumerate(every):
            if not one.is_state and holds_parameters(one, rules):
                every[at] = one.as_state()
        if any(one.is_container and not one.is_state for one in every):
            every = _with_state(every, _donated(trace()))
        every = _laid_out(every, rules)
    traced = trace()
    lowered = lower(traced, platform, getattr(step, "__name__", "the step"))
    donated = _donated(lowered)
    taken = _taken(every, len(donated))
    kept = kept_by(lowered, [one.slot.parameter for one in taken])
    place = {leaf: at for at, leaf in enumerate(kept)}
    count = sum(len(one.leaves) for one in taken)
    results = look_at(traced, range(count), lowered.out_info, 0, taken)
    if rules is None:
        taken = _with_state(taken, donated, results)
    shapes = jax.tree.leaves(lowered.out_info)
    found, gradients = pairs_of(results, taken, shapes, {})
    return Lowered(
        getattr(step, "__name__", "the step"),
        lowered,
        leaves_of(
            taken,
            kept,
            [donated[at] for at in kept],
            [leaf for one in taken for leaf in one.leaves],
        ),
        {result: place[leaf] for result, leaf in found.items() if leaf in place},
        kept,
        Layouts(taken),
        constants_of(traced),
        {} if rules is None else _specs(taken, kept),
        () if rules is None else notes_of(taken, rules),
        gradients,
    )


def _donated(step: Any) -> list[bool]:
    """Whether each leaf that a traced or lowered step takes is donated."""
    return [info.donated for info in jax.tree.leaves(step.args_info)]


def _taken(arguments: Sequence[Argument], count: int) -> list[Argument]:
    """The arguments that are not static, where a step takes so many leaves."""
    if sum(len(one.leaves) for one in arguments) > count:
        # Static numbers; only jax.jit knows which.
        return [one for one in arguments if any(map(_is_array, one.raw))]
    return list(arguments)


def _with_state(
    arguments: Sequence[Argument],
    donated: Sequence[bool],
    results: Results | None = None,
) -> list[Argument]:
    """Mark donated arguments as state, and those that are returned with other values.

    With rules, which shard data over the batch axes, `results` is None: then only
    containers that are donated are state.
    """
    start = 0
    state: set[Slot] = set()
    for one in _taken(arguments, len(donated)):
        own = range(start, start + len(one.leaves))
        start = own.stop
        found = any(donated[at] for at in own)
        if results is None:
            found = found and one.is_container
        else:
            found = found or comes_back(results, one, own)
        if found and not one.is_state:
            state.add(one.slot)
    return [one.as_state() if one.slot in state else one for one in arguments]


def _specs(arguments: Sequence[Argument], kept: Sequence[int]) -> dict[int, Any]:
    """Position of each argument of a program → the spec of its leaf."""
    leaves = [leaf for one in arguments for leaf in one.leaves]
    found = {
        at: getattr(leaves[leaf], "sharding", None) for at, leaf in enumerate(kept)
    }
    return {at: one.spec for at, one in found.items() if one is not None}


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "dtype")


def _is_array_or_number(leaf: Any) -> bool:
    return _is_array(leaf) or isinstance(leaf, bool | int | float | complex)


def _laid_out(arguments: Sequence[Argument], rules: RuleSet) -> list[Argument]:
    """Arguments whose leaves have the shardings of the rules."""
    shardings = iter(Layouts(arguments).under(rules))
    return [
        one.with_leaves([abstract(leaf, next(shardings)) for leaf in one.leaves])
        for one in arguments
    ]
