"""Lower a step on an abstract mesh, with the arguments sharded by the rules."""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding

from flax_layoutmap._core.errors import LayoutError, MeshError
from flax_layoutmap._core.mesh import DeviceMesh, as_mesh
from flax_layoutmap._core.topologies import Topology
from flax_layoutmap._resolve.resolve import rule_set_of
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._step.arguments import Argument, signature_of
from flax_layoutmap._step.jit import Jitted, jit
from flax_layoutmap._step.program import Program
from flax_layoutmap._step.shardings import abstract
from flax_layoutmap._step.trace import Job, mesh_context
from flax_layoutmap._tree.flax_internals import is_nnx_object
from flax_layoutmap.pod._aot import split_over_slices
from flax_layoutmap.pod._layouts import Layouts, split_data
from flax_layoutmap.pod._lower_jit import lower_jitted
from flax_layoutmap.pod._lowered import (
    Lowered,
    constants_of,
    kept_by,
    leaves_of,
    lower,
    notes_of,
)
from flax_layoutmap.pod._mlir import meshes
from flax_layoutmap.pod._pairs import look_at, pairs_of


def rules_and_mesh(
    step: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mesh: Any,
    layout_map: Any,
    topology: Topology | None,
) -> tuple[RuleSet | None, DeviceMesh]:
    """The rules on an abstract mesh, and that mesh.

    Args:
        step: the step, which may bring rules.
        args: its arguments, which may be on a mesh.
        kwargs: those by name.
        mesh: what the user says.
        layout_map: what the user says.
        topology: where the mesh is to be; None where that is not known.

    Raises:
        MeshError: there is none, it has manual axes, or it does not fill the topology.
        RuleError: a rule names an axis that the mesh does not have.
    """
    if layout_map is None and isinstance(step, Jitted):
        layout_map = step.layout_map
    rules = None if layout_map is None else rule_set_of(layout_map, "plan(layout_map=)")
    own = _abstract_mesh(mesh, topology)
    if own is None and rules is not None and rules.mesh is not None:
        own = _abstract_mesh(rules.mesh, topology)
    if own is None and rules is None:
        own = _mesh_of_arguments(args, kwargs)
    if own is None:
        raise MeshError(
            'plan needs a mesh: pass mesh="fsdp=16,tensor=4", or rules that have one'
        )
    types = zip(own.axis_names, own.axis_types, strict=True)
    manual = [name for name, kind in types if kind == AxisType.Manual]
    if manual:
        line = _line(own.axis_sizes)
        raise MeshError(
            f"the axes {', '.join(map(repr, manual))} of the mesh {line} are manual, "
            "as inside of a shard_map; plan for a mesh of auto axes: "
            f'mesh="{line}"'
        )
    if topology is not None and own.size != topology.devices:
        raise MeshError(
            f"the mesh {own} has {own.size} devices, and {topology} has "
            f"{topology.devices}; change a size, or write -1 for one of them"
        )
    if topology is not None:
        split_over_slices(own.shape, topology)
    return None if rules is None else rules.on(own), own


def _abstract_mesh(mesh: Any, topology: Topology | None) -> DeviceMesh | None:
    """A mesh without devices; a size of -1 takes what the topology has left."""
    if mesh is None:
        return None
    if isinstance(mesh, str | Mapping):
        sizes = dict(mesh) if isinstance(mesh, Mapping) else _sizes_of(mesh)
        if topology is not None and list(sizes.values()).count(-1) == 1:
            rest, left = divmod(
                topology.devices,
                math.prod(size for size in sizes.values() if size != -1) or 1,
            )
            if left:
                raise MeshError(
                    f"the mesh {_line(sizes)} does not fill {topology}, which has "
                    f"{topology.devices} devices; change a size"
                )
            sizes = {name: rest if n == -1 else n for name, n in sizes.items()}
        return DeviceMesh.abstract(sizes)
    given = as_mesh(mesh)
    assert given is not None
    jax_mesh: Any = given.jax_mesh
    # That of devices, as a shard_map over them compares the kind of device, too.
    return given if given.is_abstract else as_mesh(jax_mesh.abstract_mesh)


def _sizes_of(line: str) -> dict[str, int]:
    """`"fsdp=16,tensor=-1"` as a mapping; DeviceMesh refuses what is no such line."""
    found = re.findall(r"([^,=\s]+)\s*=\s*(-?\d+)", line)
    if not found or line.count("=") != len(found) or len(dict(found)) != len(found):
        return DeviceMesh.abstract(line).axis_sizes
    return {name: int(size) for name, size in found}


def _line(sizes: Mapping[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in sizes.items())


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
# A mesh of devices, of another number than the plan's.
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
    mesh: DeviceMesh | None = None,
) -> Lowered:
    """Lower a step without devices.

    Args:
        step: a function, or what `flm.jit`, `jax.jit` or `nnx.jit` made of one.
        args: its arguments; abstract or not.
        kwargs: those by name.
        rules: the rules, on an abstract mesh; None only for a function of `jax.jit`.
        donated: names of arguments whose buffers are given away, for a function.
        platform: what to lower for.
        mesh: the mesh; None takes that of the rules.

    Raises:
        LayoutError: the step needs real values, has no rules, or uses what JAX does not
            lower without devices.
        MeshError: the step names another mesh.
    """
    name = getattr(step, "__name__", "the step")
    if rules is not None and mesh is None:
        mesh = rules.mesh
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
    """Raise LayoutError where a step that failed was given too much, or too little."""
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
    """What an argument is, in a word: `float32[8,16]`, `dict`."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    return type(value).__name__


def _in_its_mesh(call: Callable[[], Lowered], mesh: DeviceMesh | None) -> Lowered:
    """Call; again with the mesh as context where the step needs one and has none.

    So it is where its constraints name axes alone, as under `jax.set_mesh`.
    """
    try:
        return call()
    except (RuntimeError, ValueError) as error:
        context: Any = jax.sharding.get_abstract_mesh()
        lacks_mesh = _LACKS_MESH.search(str(error))
        if isinstance(error, LayoutError) or context.axis_names or mesh is None:
            raise
        if not lacks_mesh:
            raise
    jax_mesh: Any = mesh.jax_mesh
    with jax.sharding.use_abstract_mesh(jax_mesh):
        return call()


def _check_mesh(lowered: Lowered, mesh: DeviceMesh | None) -> None:
    """Raise MeshError where the step names a mesh that is not that of the plan."""
    if mesh is None:
        return
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
    is_nnx = _is_nnx_jit(step)
    if not isinstance(step, Jitted):
        if not is_nnx and callable(getattr(step, "trace", None)):
            return lower_jitted(step, args, kwargs, rules, platform)
        # nnx.jit wraps the user's function; its own options do not count here.
        fun: Any = step.__wrapped__ if is_nnx else step
        step = jit(fun, layout_map=rules, donate_argnames=donated)
    if rules is None:
        raise LayoutError(
            "plan needs rules for a step that is no function of jax.jit; pass "
            "layout_map=layout_map"
        )
    job, arguments, program = step.without_running(args, kwargs, rules, split_data)
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
        leaves_of(arguments, kept, [at in donated for at in kept]),
        {result: place[leaf] for result, leaf in found.items() if leaf in place},
        kept,
        Layouts(arguments, fixed),
        constants_of(traced),
        notes=notes_of(arguments, rules),
        gradients=gradients,
    )


def _is_nnx_jit(step: Any) -> bool:
    return type(step).__module__.startswith("flax.") and hasattr(step, "__wrapped__")
