"""Lower a step on an abstract mesh, with the arguments laid out by the rules."""

import dataclasses
import functools
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from flax_layoutmap._core.errors import LayoutError, MeshError
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import DeviceMesh, as_mesh
from flax_layoutmap._core.mesh_shape import fill, sizes_and_names
from flax_layoutmap._resolve.resolve import rule_set_of
from flax_layoutmap._rules.records import show_shape
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._show.table import human_bytes
from flax_layoutmap._step.arguments import NUMBERS, Argument, spans
from flax_layoutmap._step.inputs import split_leaf
from flax_layoutmap._step.jit import Jitted, jit
from flax_layoutmap._step.shardings import avals_of, is_on_host
from flax_layoutmap._step.trace import mesh_context
from flax_layoutmap.pod._topologies import Topology, split_over_slices

# Smaller arrays, in bytes, are not worth a warning.
MANY_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """An argument of the lowered program."""

    path: str  # starts with the name of the argument
    role: str  # "parameter", "optimizer", "data" or "other"
    is_donated: bool
    is_on_host: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Lowered:
    """A step, lowered for a mesh without devices."""

    name: str
    program: Any  # the `jax.stages.Lowered`
    leaves: list[Leaf]  # the arguments of the program, in order
    # Position of a result (a new value or a gradient) → position of the argument at the
    # same place of an equal tree.
    updates: dict[int, int]
    notes: list[str]  # warnings about the arguments


# ------------------------------------------------------------------ rules and mesh


def rules_and_mesh(
    step: Any, mesh: Any, layout_map: Any, topology: Topology | None
) -> tuple[RuleSet | None, DeviceMesh]:
    """The rules on an abstract mesh, and this mesh.

    Without `layout_map` the rules are those of the step; without `mesh` the mesh is
    that of the rules.
    """
    if layout_map is None and isinstance(step, Jitted):
        layout_map = step.layout_map
    rules = None if layout_map is None else rule_set_of(layout_map, "layout_map=")
    chosen = _abstract_mesh(mesh, topology)
    if chosen is None and rules is not None:
        chosen = _abstract_mesh(rules.mesh, topology)
    if chosen is None:
        raise MeshError(
            'a mesh is missing: pass mesh="fsdp=16,tensor=4", or rules that have one'
        )
    if topology is not None:
        split_over_slices(chosen.axis_sizes, topology)
    return None if rules is None else rules.on(chosen), chosen


def _abstract_mesh(mesh: Any, topology: Topology | None) -> DeviceMesh | None:
    """A mesh without devices; the topology determines a size of -1."""
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
    # JAX's abstract mesh keeps the device kind, which shard_map compares.
    return given if given.is_abstract else as_mesh(jax_mesh.abstract_mesh)


# -------------------------------------------------------------------------- errors

# The step uses another mesh than the plan.
_OTHER_DEVICES = re.compile("AbstractMesh size: .* does not match the device")
# The step names axes, but there is no mesh in the context.
_LACKS_MESH = re.compile(
    r"mesh.*empty|empty.*mesh|not found in mesh: \(\)|not under a mesh context",
    re.DOTALL | re.IGNORECASE,
)
_MESH = re.compile(r'"([^"]+)"=(\d+)')


def lower_step(
    step: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rules: RuleSet,
    donated: str | Iterable[str],
) -> Lowered:
    """Lower a step without devices, by rules on an abstract mesh."""
    while not isinstance(step, Jitted) and hasattr(step, "lower"):
        owner = getattr(step, "__self__", None)  # of a method
        step = step.__wrapped__  # of jax.jit or nnx.jit
        step = step if owner is None else types.MethodType(step, owner)
    if not isinstance(step, Jitted):
        step = jit(step, layout_map=rules)
    name = getattr(step, "__name__", "the step")
    call = functools.partial(_lower_step, step, args, kwargs, rules, donated)
    try:
        lowered = _in_its_mesh(call, rules.mesh)
        _check_mesh(lowered, rules.mesh)
        return lowered
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
        raise _other_mesh(name, rules.mesh, str(error)) from error


def _in_its_mesh(call: Callable[[], Lowered], mesh: Any) -> Lowered:
    """Lower; if the step needs a mesh in its context, retry with one.

    Constraints without a mesh, as under `jax.set_mesh`, need a mesh in the context,
    but a shard_map with a mesh of devices rejects an abstract mesh there.
    """
    try:
        return call()
    except (RuntimeError, ValueError) as error:
        context: Any = jax.sharding.get_abstract_mesh()
        if isinstance(error, LayoutError) or context.axis_names:
            raise
        if not _LACKS_MESH.search(str(error)):
            raise
    with jax.sharding.use_abstract_mesh(mesh.jax_mesh):
        return call()


def _check_mesh(lowered: Lowered, mesh: Any) -> None:
    """Raise MeshError if the step uses another mesh than the plan."""
    for op in lowered.program.compiler_ir("stablehlo").body.operations:
        if op.operation.name == "sdy.mesh":
            axes = _MESH.findall(str(op.attributes["mesh"]))
            sizes = {name: int(size) for name, size in axes}
            if sizes and [*sizes.items()] != [*mesh.axis_sizes.items()]:
                other = ",".join(f"{name}={size}" for name, size in sizes.items())
                raise _other_mesh(lowered.name, mesh, other)


def _other_mesh(name: str, mesh: Any, other: str) -> MeshError:
    return MeshError(
        f"{name} is planned for the mesh {mesh}, but names another mesh, {other}, in a "
        "NamedSharding or a jax.shard_map(mesh=…); name only axes, "
        'jax.lax.with_sharding_constraint(x, PartitionSpec("data")), '
        'flm.distribute_tensor(x, ("data", None)), jax.shard_map without mesh=, or '
        "take jax.sharding.get_abstract_mesh() in the step"
    )


# ------------------------------------------------------------------------ lowering


def _lower_step(
    step: Jitted,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rules: RuleSet,
    donated: str | Iterable[str],
) -> Lowered:
    job, arguments, program = step.without_running(
        args, kwargs, rules, _split_data, donated
    )
    leaves = [leaf for argument in arguments for leaf in argument.leaves]
    avals = avals_of(leaves, program.wanted)
    with mesh_context(rules, leaves):
        traced = program.jitted.trace(*avals)
        lowered = _lower(traced, job.name)
    # The program only has the arguments that it uses, as `leaves[3]`.
    main = functions_of(lowered.compiler_ir("stablehlo").operation)["main"]
    names = [str(argument.location) for argument in main.arguments]
    kept = [int(name.partition("[")[2].partition("]")[0]) for name in names]
    place = {leaf: at for at, leaf in enumerate(kept)}
    new, result = program.shapes
    updates = dict(enumerate(program.outcome.leaves))
    count = len(jax.tree.leaves(new))
    updates |= {count + at: leaf for at, leaf in same_trees(result, arguments).items()}
    every = _leaves_of(arguments, set(program.donated), avals)
    return Lowered(
        job.name,
        lowered,
        [every[at] for at in kept],
        {result: place[leaf] for result, leaf in updates.items() if leaf in place},
        [*_notes_of(arguments, rules), *_closed_over(traced, job.name)],
    )


def _lower(traced: Any, name: str) -> Any:
    """Lower a trace for TPUs; callbacks into Python are errors."""
    try:
        return traced.lower(lowering_platforms=("tpu",))
    except ValueError as error:
        text = str(error)
        if _OTHER_DEVICES.search(text) or not re.search("AbstractMesh|backend", text):
            raise
        raise LayoutError(
            f"{name} cannot be lowered without devices ({error}): leave "
            "calls back into Python (jax.debug.print, jax.pure_callback and the like) "
            "out of the planned step"
        ) from error


def functions_of(module: Any) -> dict[str, Any]:
    """The functions of a module by name; the step itself is `main`."""
    return {
        str(op.name).strip('"'): op
        for op in module.regions[0].blocks[0].operations
        if op.operation.name == "func.func"
    }


def operations_in(above: Any) -> Iterator[Any]:
    """All operations inside an operation."""
    for region in above.regions:
        for block in region.blocks:
            for op in block.operations:
                yield op.operation
                yield from operations_in(op)


# -------------------------------------------------------------------------- leaves


def _leaves_of(
    arguments: Sequence[Argument], donated: set[int], avals: Sequence[Any]
) -> list[Leaf]:
    """Path, role and memory kind of all leaves; `avals` have the shardings."""
    leaves: list[Leaf] = []
    for argument in arguments:
        paths, owners = argument.flat.full_paths(), argument.owners()
        roles = ["data"] * len(paths)
        for section in argument.flat.sections if argument.is_state else ():
            for at in range(section.start, section.stop):
                is_cache = isinstance(owners[at], nnx.Cache)
                is_cache = is_cache or "cache" in paths[at].split("/")
                role = "other" if is_cache else section.role
                roles[at] = _role(role, argument.leaves[at])
        for path, role in zip(paths, roles, strict=True):
            at = len(leaves)
            on_host = is_on_host(getattr(avals[at], "sharding", None))
            leaves.append(Leaf(path, role, at in donated, on_host))
    return leaves


def _role(role: str, leaf: Any) -> str:
    """Counters and random state are not parameters, but quantised matrices are."""
    dtype = getattr(leaf, "dtype", np.int32)
    is_key = jax.numpy.issubdtype(dtype, jax.dtypes.extended)
    if role != "parameter" or jax.numpy.issubdtype(dtype, np.inexact):
        return role
    return "other" if is_key or np.ndim(leaf) < 2 else role


def _split_data(argument: Argument, rules: RuleSet | None) -> Sequence[Any]:
    """The leaves of a data argument, split over the batch axes.

    A leaf with a sharding over axes of the mesh keeps its spec.
    """
    mesh: Any = None if rules is None else rules.mesh
    placed: list[Any] = []
    for at, leaf in enumerate(argument.raw):
        if isinstance(leaf, NUMBERS) or mesh is None:
            placed.append(leaf)
            continue
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
        plain = jax.ShapeDtypeStruct(leaf.shape, dtype)
        given = getattr(leaf, "sharding", None)
        if isinstance(given, NamedSharding) and {*given.mesh.axis_names} <= {
            *mesh.axis_names
        }:
            sharding = NamedSharding(mesh.jax_mesh, given.spec)
            try:
                TensorLayout(sharding).shard_shape(leaf.shape)
            except LayoutError as error:
                raise LayoutError(
                    f"{argument.label(at)} came with a sharding that does not fit the "
                    f"mesh {mesh}: {error}; pass its shape alone, "
                    "jax.ShapeDtypeStruct(x.shape, x.dtype)"
                ) from error
            placed.append(plain.update(sharding=sharding))
        else:
            placed.append(split_leaf(argument, at, plain, rules))
    return placed


def same_trees(result: Any, arguments: Sequence[Argument]) -> dict[int, int]:
    """Find the trees of arguments in a result, a tree of shapes.

    Each is found once. Returns positions of the result's leaves → positions among the
    leaves of all arguments.
    """
    shapes, treedef = jax.tree.flatten(result)
    numbers = treedef.unflatten(range(len(shapes)))
    updates: dict[int, int] = {}

    def is_of(argument: Argument, tree: Any) -> bool:
        places, structure = jax.tree.flatten(tree)
        if structure != argument.treedef or not updates.keys().isdisjoint(places):
            return False
        pairs = zip(places, argument.leaves, strict=True)
        return all(np.shape(shapes[at]) == np.shape(leaf) for at, leaf in pairs)

    for argument, positions in zip(arguments, spans(arguments), strict=True):
        is_same = functools.partial(is_of, argument)
        if argument.is_container and any(map(np.shape, argument.leaves)):
            trees = jax.tree.leaves(numbers, is_leaf=is_same)
            for tree in filter(is_same, trees):
                updates.update(zip(jax.tree.leaves(tree), positions, strict=True))
                break
    return updates


def _notes_of(arguments: Sequence[Argument], rules: RuleSet) -> Iterator[str]:
    """Warn if all arguments count as data, although some seem to be state."""
    if any(each.is_state for each in arguments) or len(arguments) < 2:
        return
    containers = [each.name for each in arguments if each.is_container and each.leaves]
    names = containers or [each.name for each in arguments]
    if containers or rules.rules:
        yield (
            f"no rule shards a leaf of {', '.join(names)}, so every argument is taken "
            "for data and split over the batch axes; name the state: "
            f'donate_argnames="{names[0]}"; a bare array has no path, so wrap it: '
            f'{{"w": w}}'
        )


def _closed_over(traced: Any, name: str) -> Iterator[str]:
    """Warn about large arrays that a traced function closes over."""
    constants = {id(array): array for array in traced.jaxpr.consts}.values()
    large = [array for array in constants if array.nbytes >= MANY_BYTES]
    if large:
        shapes = ", ".join(show_shape(np.shape(array)) for array in large[:4])
        size = human_bytes(sum(array.nbytes for array in large))
        yield (
            f"{name} closes over arrays ({shapes}; {size}): constants of the program, "
            "which every device holds in full; pass them as arguments"
        )
