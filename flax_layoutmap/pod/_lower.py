"""Lower a step on an abstract mesh, with the arguments sharded by the rules."""

import contextlib
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding

from flax_layoutmap._core.errors import LayoutError, MeshError
from flax_layoutmap._core.mesh import DeviceMesh, as_mesh
from flax_layoutmap._core.mesh_shape import fill, sizes_and_names
from flax_layoutmap._resolve.resolve import resolve, rule_set_of
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._step.arguments import (
    Argument,
    call_with,
    names_of,
    slots_of,
    spans,
    take_apart,
)
from flax_layoutmap._step.inputs import holds_parameters
from flax_layoutmap._step.jit import Jitted, jit
from flax_layoutmap._step.shardings import abstract, avals_of
from flax_layoutmap._step.trace import mesh_context
from flax_layoutmap._tree.flax_internals import is_nnx_object
from flax_layoutmap._tree.paths import Roots
from flax_layoutmap.pod._ask import split_over_slices
from flax_layoutmap.pod._leaves import (
    Leaf,
    leaves_of,
    notes_of,
    same_trees,
    split_data,
)
from flax_layoutmap.pod._topologies import Topology


@dataclasses.dataclass(frozen=True, slots=True)
class Lowered:
    """A step, lowered for a mesh without devices.

    Attributes:
        name: of the step.
        program: the `jax.stages.Lowered`.
        leaves: one for each argument of the program, in order.
        updates: position of a result → that of the argument in the same place of an
            equal tree: its new value, or its gradient.
        constants: shape and bytes of each array that the step closes over.
        notes: warnings about the arguments.
    """

    name: str
    program: Any
    leaves: list[Leaf]
    updates: dict[int, int]
    constants: list[tuple[tuple[int, ...], int]]
    notes: tuple[str, ...] = ()

    def state(self) -> list[tuple[int, int]]:
        """The updates of parameters, then those of optimizer state.

        In this order a sum that both are computed from counts as the parameter's.
        """
        return [
            (result, at)
            for role in ("parameter", "optimizer")
            for result, at in self.updates.items()
            if self.leaves[at].role == role
        ]


# ------------------------------------------------------------------ rules and mesh


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
    chosen = _abstract_mesh(mesh, topology)
    if chosen is None and rules is not None and rules.mesh is not None:
        chosen = _abstract_mesh(rules.mesh, topology)
    if chosen is None and rules is None:
        chosen = _mesh_of_arguments(args, kwargs)
    if chosen is None:
        raise MeshError(
            'a mesh is missing: pass mesh="fsdp=16,tensor=4", or rules that have one'
        )
    types = zip(chosen.axis_names, chosen.axis_types, strict=True)
    manual = [name for name, kind in types if kind == AxisType.Manual]
    if manual:
        raise MeshError(
            f"the axes {', '.join(map(repr, manual))} of the mesh {chosen} are manual, "
            f'as inside of a shard_map; plan for a mesh of auto axes: mesh="{chosen}"'
        )
    if topology is not None:
        split_over_slices(chosen.axis_sizes, topology)
    return None if rules is None else rules.on(chosen), chosen


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


# -------------------------------------------------------------------------- errors

# Errors of a step that needs the values of its arguments.
_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
# Another mesh than the plan's.
_OTHER_DEVICES = re.compile("AbstractMesh size: .* does not match the device")
# Axes are named, and no mesh is in context.
_LACKS_MESH = re.compile(
    r"mesh.*empty|empty.*mesh|not found in mesh: \(\)|not under a mesh context",
    re.DOTALL | re.IGNORECASE,
)
_WITHOUT_MESH = (
    ": in a NamedSharding, a jax.shard_map(mesh=…), or in out_shardings; name axes "
    'alone, jax.lax.with_sharding_constraint(x, PartitionSpec("data")), '
    'flm.distribute_tensor(x, ("data", None)), jax.shard_map without mesh=, or take '
    "jax.sharding.get_abstract_mesh() in the step"
)


def lower_step(
    step: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rules: RuleSet | None,
    donated: str | Iterable[str],
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
        lowered = _in_its_mesh(call, mesh)
        _check_mesh(lowered, mesh)
        return lowered
    except _NEEDS_VALUES as error:
        raise LayoutError(
            f"{name} needs the values of its arguments, and a plan has none: "
            f"{str(error).splitlines()[0]}; use jax.lax.cond, jnp.where or a shape "
            "instead, or make the argument static (flm.jit(static_argnames=…))"
        ) from error
    except (AttributeError, TypeError) as error:
        if "ShapeDtypeStruct" not in str(error):
            raise
        raise LayoutError(
            f"{name} uses a jax.ShapeDtypeStruct that is not among its arguments "
            f"({error}), such as a model in its closure; pass that as an argument"
        ) from error
    except ValueError as error:
        if isinstance(error, LayoutError) or not _OTHER_DEVICES.search(str(error)):
            raise
        raise MeshError(
            f"{name} is planned for the mesh {mesh}, and names another one ({error})"
            f"{_WITHOUT_MESH}"
        ) from error


def _in_its_mesh(call: Callable[[], Lowered], mesh: DeviceMesh) -> Lowered:
    """Lower, and again in the context of the mesh if the step needs one and has none.

    Constraints that name axes alone, as under `jax.set_mesh`, need one; a shard_map
    with a mesh of devices refuses an abstract one.
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


_MESH = re.compile(r'"((?:[^"\\]|\\.)+)"=(\d+)')


def _check_mesh(lowered: Lowered, mesh: DeviceMesh) -> None:
    """Raise MeshError where the step names another mesh than the plan's."""
    for op in lowered.program.compiler_ir("stablehlo").body.operations:
        if op.operation.name != "sdy.mesh":
            continue
        axes = _MESH.findall(str(op.attributes["mesh"]))
        sizes = [(_plain(name), int(size)) for name, size in axes]
        if sizes and sizes != list(mesh.axis_sizes.items()):
            other = ",".join(f"{name}={size}" for name, size in sizes)
            raise MeshError(
                f"{lowered.name} is planned for the mesh {mesh}, and names another "
                f"one, {other}{_WITHOUT_MESH}"
            )


# ------------------------------------------------------------------------ lowering


def _lower_step(
    step: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rules: RuleSet | None,
    donated: str | Iterable[str],
    platform: str,
) -> Lowered:
    owner = getattr(step, "__self__", step)
    if is_nnx_object(owner):
        raise LayoutError(
            f"the step is a module ({type(owner).__name__}), whose arrays would be "
            "constants of the program; pass it as an argument: "
            "flm.pod.plan(lambda model, x: model(x), model, x, …)"
        )
    is_nnx = type(step).__module__.startswith("flax.") and hasattr(step, "__wrapped__")
    if not isinstance(step, Jitted):
        if not is_nnx and callable(getattr(step, "trace", None)):
            return _lower_jitted(step, args, kwargs, rules, donated, platform)
        # nnx.jit wraps the user's function; its own options do not count here.
        step = jit(step.__wrapped__ if is_nnx else step, layout_map=rules)
    if rules is None:
        raise LayoutError(
            "plan needs layout_map= unless step is a jax.jit function whose arguments "
            "have shardings"
        )
    return _lower_ours(step, args, kwargs, rules, donated, platform)


def _lower_ours(
    step: Jitted,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rules: RuleSet,
    donated: str | Iterable[str],
    platform: str,
) -> Lowered:
    """Lower what `flm.jit` would run."""
    job, arguments, program = step.without_running(
        args, kwargs, rules, split_data, donated
    )
    leaves = [leaf for argument in arguments for leaf in argument.leaves]
    avals = avals_of(leaves, program.wanted)
    with mesh_context(rules, leaves):
        traced = program.jitted.trace(*avals)
        lowered = _lower(traced, platform, job.name)
    kept = [_number_of(name) for name in _arguments_of(lowered)]
    place = {leaf: at for at, leaf in enumerate(kept)}
    new, result = program.shapes
    updates = dict(enumerate(program.outcome.leaves))
    count = len(jax.tree.leaves(new))
    updates |= {count + at: leaf for at, leaf in same_trees(result, arguments).items()}
    gone = set(program.donated)
    every = leaves_of(arguments, [at in gone for at in range(len(leaves))], avals)
    return Lowered(
        job.name,
        lowered,
        [every[at] for at in kept],
        {result: place[leaf] for result, leaf in updates.items() if leaf in place},
        _constants(traced),
        notes=notes_of(arguments, rules),
    )


def _lower_jitted(
    step: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rules: RuleSet | None,
    state: str | Iterable[str],
    platform: str,
) -> Lowered:
    """Lower a `jax.jit` function, with its arguments sharded by the rules.

    `state` names arguments that are state, beside those that are donated, hold
    parameters by the rules, or come back. Numbers and other values stay as they are.
    The function is called in another one, where its in_shardings are constraints:
    arguments that the rules place otherwise are moved first.
    """
    signature = inspect.signature(step)
    named = names_of(signature, state, (), "donate_argnames")
    slots = slots_of(signature.bind(*args, **kwargs))
    arguments = take_apart([pair for pair in slots if _has_arrays(pair[1])], named)
    with contextlib.nullcontext() if rules is None else mesh_context(rules, ()):
        traced = step.trace(*args, **kwargs)
    donated = _donated(traced, arguments)
    result = traced.out_info
    arguments = _with_state(arguments, donated, result, rules)
    if rules is not None:
        arguments = _sharded(arguments, rules)
    placed = {
        argument.slot: (argument, span)
        for argument, span in zip(arguments, spans(arguments), strict=True)
    }

    def flat(*leaves: Any) -> Any:
        values = []
        for slot, value in slots:
            if slot in placed:
                argument, span = placed[slot]
                value = argument.plain(leaves[span.start : span.stop])
            values.append((slot, value))
        return call_with(step, values)

    flat.__name__ = name = getattr(step, "__name__", "the step")
    leaves = [leaf for argument in arguments for leaf in argument.leaves]
    avals = abstract(leaves, [getattr(leaf, "sharding", None) for leaf in leaves])
    gone = [at for at, is_donated in enumerate(donated) if is_donated]
    whole = jax.jit(flat, donate_argnums=gone)
    with contextlib.nullcontext() if rules is None else mesh_context(rules, leaves):
        lowered = _lower(whole.trace(*avals), platform, name)
    kept = [_number_of(name) for name in _arguments_of(lowered)]
    place = {leaf: at for at, leaf in enumerate(kept)}
    every = leaves_of(arguments, donated, avals)
    updates = same_trees(result, arguments)
    return Lowered(
        name,
        lowered,
        [every[at] for at in kept],
        {result: place[leaf] for result, leaf in updates.items() if leaf in place},
        _constants(traced),
        () if rules is None else notes_of(arguments, rules),
    )


def _has_arrays(value: Any) -> bool:
    """Whether an argument of `jax.jit` is a tree of arrays, and so is not static."""
    leaves = jax.tree.leaves(value)
    arrays = [hasattr(leaf, "dtype") for leaf in leaves]
    numbers = [isinstance(leaf, bool | int | float | complex) for leaf in leaves]
    return any(arrays) and all(map(max, arrays, numbers))


def _donated(traced: Any, arguments: Sequence[Argument]) -> list[bool]:
    """Whether a traced function of `jax.jit` donates each leaf of these arguments.

    It has more leaves: numbers that are not static.
    """
    infos = iter(jax.tree.leaves(traced.args_info))
    found = []
    for argument in arguments:
        for leaf in argument.leaves:
            shape = np.shape(leaf)
            found.append(next(info.donated for info in infos if info.shape == shape))
    return found


def _with_state(
    arguments: Sequence[Argument],
    donated: Sequence[bool],
    result: Any,
    rules: RuleSet | None,
) -> list[Argument]:
    """Mark the arguments that are state: donated, with parameters, or returned."""
    returned = {*same_trees(result, arguments).values()} if rules is None else set()
    marked = []
    for argument, span in zip(arguments, spans(arguments), strict=True):
        is_tuple = argument.treedef == jax.tree.structure(tuple(argument.leaves))
        is_donated = any(donated[at] for at in span)
        is_state = argument.is_state or (is_donated and argument.is_container)
        if rules is None:
            is_state |= is_donated or not (is_tuple or returned.isdisjoint(span))
        else:
            is_state = is_state or holds_parameters(argument, rules)
        marked.append(argument.as_state() if is_state else argument)
    return marked


def _sharded(arguments: Sequence[Argument], rules: RuleSet) -> list[Argument]:
    """Arguments whose leaves have the shardings of the rules."""
    trees = {
        argument.name: argument.plain(abstract(argument.leaves))
        for argument in arguments
        if argument.is_state
    }
    shardings: Any = ()
    if trees:
        resolution = resolve(Roots(trees), rules)
        resolution.announce()
        shardings = resolution.sharding_list()
    by_rule = iter(shardings)
    return [
        dataclasses.replace(
            argument,
            leaves=abstract(argument.leaves, by_rule)
            if argument.is_state
            else split_data(argument, rules),
        )
        for argument in arguments
    ]


def _lower(traced: Any, platform: str, name: str) -> Any:
    """Lower a trace for a platform; callbacks into Python are refused."""
    try:
        return traced.lower(lowering_platforms=(platform,))
    except ValueError as error:
        text = str(error)
        if _OTHER_DEVICES.search(text) or not re.search("AbstractMesh|backend", text):
            raise
        raise LayoutError(
            f"{name} cannot be lowered without devices ({error}): leave out of the "
            "planned step what calls back into Python (jax.debug.print, "
            "jax.pure_callback and the like)"
        ) from error


def _arguments_of(lowered: Any) -> list[str]:
    """What JAX calls the arguments of a program; it drops those that are unused."""
    operations = lowered.compiler_ir("stablehlo").body.operations
    (main,) = (op for op in operations if str(op.name) == '"main"')
    texts = [str(argument.location)[5:-2] for argument in main.arguments]
    return [_plain(text) for text in texts]


def _number_of(name: str) -> int:
    """The number of a leaf from the name of its argument, such as `leaves[3]`."""
    return int(name.partition("[")[2].removesuffix("]"))


def _plain(text: str) -> str:
    """A string as MLIR writes it, without its escapes."""

    def byte(escaped: re.Match[bytes]) -> bytes:
        code = escaped[1]
        return bytes.fromhex(code.decode()) if len(code) == 2 else code

    return re.sub(rb'\\([\\"]|[0-9A-F]{2})', byte, text.encode()).decode()


def _constants(traced: Any) -> list[tuple[tuple[int, ...], int]]:
    """Shape and bytes of the arrays that a traced function closes over."""
    constants = {id(array): array for array in traced.jaxpr.consts}
    return [(tuple(np.shape(each)), int(each.nbytes)) for each in constants.values()]
