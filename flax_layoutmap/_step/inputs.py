"""The inputs of a jitted function, where the rules want them.

State must be where the rules say, or is an error; data on the host is split over the
batch axes. One spelling for equal placements keeps one compiled program for them.
"""

import collections
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from flax_layoutmap._core.errors import (
    LayoutError,
    MeshError,
    RuleError,
    StructureError,
    bullet_list,
    warn,
)
from flax_layoutmap._core.layout import TensorLayout, clash, dim_axes, normal_spec
from flax_layoutmap._core.mesh import DeviceMesh, same_grid
from flax_layoutmap._place.place import put
from flax_layoutmap._resolve.lay import fits
from flax_layoutmap._rules.announce import Remark, announce
from flax_layoutmap._rules.records import closest_rule, show_shape, show_spec
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._step.arguments import Argument
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.paths import Flat, Roots

# What Flax calls the matrices of its layers; a batch has none that is called so.
_PARAMETER = re.compile(r"(?:^|/)(?:kernel|embedding)$")
_ABSTRACT = (Tracer, bool, int, float, complex, jax.ShapeDtypeStruct)


def holds_parameters(argument: Argument, rules: RuleSet) -> bool:
    """Whether an argument is a container of what a rule shards.

    A rule that replicates does not count, so that a catch-all makes no batch a state.
    """
    if not argument.is_container:
        return False
    try:
        flat = flatten(Roots({argument.name: argument.value}))
    except StructureError:
        return False  # without paths no rule can mean it
    found = any(
        _is_sharded(rules, flat.forms(at), np.ndim(leaf))
        for at, leaf in enumerate(flat.leaves)
    )
    if not found:
        _tell_of_parameters(argument.name, flat, rules)
    return found


def _tell_of_parameters(name: str, flat: Flat, rules: RuleSet) -> None:
    """Warns once where an argument looks like parameters and no rule matches any.

    As after a renaming: it would silently be split like a batch.

    Raises:
        ResolveError: the rule set is strict.
    """
    if rules.strict is False or all(rule.layout.is_replicated for rule in rules.rules):
        return
    missed = [
        at
        for at, (path, leaf) in enumerate(zip(flat.paths, flat.leaves, strict=True))
        if np.ndim(leaf) > 1 and _PARAMETER.search(path)
        if not rules.matcher.matching_forms(flat.forms(at))
    ]
    if not missed:
        return
    path, shape = flat.paths[missed[0]], np.shape(flat.leaves[missed[0]])
    near = closest_rule(path, rules.rules)
    hint = f"; the closest is rule {near[0]} {near[1].pattern!r}" if near else ""
    more = f", and {len(missed) - 1} more like it" if len(missed) > 1 else ""
    text = (
        f"no rule matches {path} {show_shape(shape)} in the argument {name!r}{more}"
        f"{hint}; as no rule shards anything in it, it is taken for data, and what is "
        f"on no mesh is split over the batch axes {rules.batch}"
    )
    paths = frozenset(flat.paths[at] for at in missed)
    announce(rules, [Remark(text, "taken for data", paths)])


def _is_sharded(rules: RuleSet, own: tuple[str, ...], ndim: int) -> bool:
    if not ndim:
        return False
    found = [rules.rules[at].layout for at in rules.matcher.matching_forms(own)]
    fitting = [layout for layout in found if fits(layout, ndim)]
    if rules.overlap != "error":
        fitting = fitting[-1:] if rules.overlap == "last" else fitting[:1]
    return any(not layout.is_replicated for layout in fitting)


def note_pins(argument: Argument) -> None:
    """Notes where a data container lies, if all of it was on a mesh from the start."""
    if argument.raw and argument.is_container and all(map(_on_a_mesh, argument.raw)):
        own = [own_sharding(leaf) for leaf in argument.leaves]
        argument.pins = tuple(sharding for sharding in own if sharding is not None)


def _on_a_mesh(leaf: Any) -> bool:
    if own_sharding(leaf) is None or isinstance(leaf, Tracer):
        return False
    return bool(getattr(leaf, "committed", True))


def place_data(argument: Argument, rules: RuleSet | None) -> None:
    """Puts the arrays of a data argument where they belong; changes its leaves.

    Host arrays are split over the batch axes. Arrays on the mesh keep their layout.

    Raises:
        LayoutError: an array does not divide, or lives on other devices.
    """
    mesh = None if rules is None else rules.mesh
    if mesh is None or rules is None or not isinstance(mesh.jax_mesh, Mesh):
        argument.leaves = [_respelled(leaf) for leaf in argument.leaves]
        return
    problems: list[str] = []
    for at, leaf in enumerate(argument.leaves):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
            # On a single device, every placement is the same as that of a host array.
            single = mesh.size == 1 and leaf.devices() == set(mesh.devices.flat)
            if leaf.committed and not single:
                where = _on_mesh(leaf.sharding, mesh, leaf.ndim)
                if where is None:
                    problems.append(
                        f"{argument.path(at)} {show_shape(leaf.shape)} is "
                        f"{show_sharding(leaf.sharding)}"
                    )
                elif isinstance(where, NamedSharding) and where != leaf.sharding:
                    argument.leaves[at] = put(leaf, where)
                continue
        elif isinstance(leaf, _ABSTRACT) and getattr(leaf, "sharding", 0) is not None:
            continue
        argument.leaves[at] = split_leaf(argument, at, leaf, rules, mesh)
    if problems:
        raise LayoutError(
            f"{len(problems)} arrays are not on the mesh of the rules, {mesh}:\n"
            f"{bullet_list(problems)}\nplace them with flm.distribute_tensor, or pass "
            "them as NumPy arrays, which are split over the batch axes"
        )


def tell_of_whole_batches(arguments: Sequence[Argument], name: str) -> bool:
    """Warns where data of the host meets a mesh, and no rules say how to split it.

    Returns:
        Whether it did.
    """
    leaves = [leaf for argument in arguments for leaf in argument.leaves]
    found = (own.mesh for leaf in leaves if (own := own_sharding(leaf)) is not None)
    mesh = next((mesh for mesh in found if mesh.size > 1), None)
    whole = [
        f"{argument.path(at)} {show_shape(np.shape(leaf))}"
        for argument in arguments
        if not argument.is_state
        for at, leaf in enumerate(argument.leaves)
        if np.ndim(leaf) and not isinstance(leaf, _ABSTRACT) and not _on_a_mesh(leaf)
    ]
    if mesh is None or not whole:
        return False
    more = f" and {len(whole) - 4} more" if len(whole) > 4 else ""
    warn(
        f"{name} has no rules, so what comes from the host is not split, but whole on "
        f"each device of the mesh {DeviceMesh(mesh)}: {', '.join(whole[:4])}{more}; "
        "give it the rules, @flm.jit(layout_map=layout_map), or place it yourself, "
        "batch = flm.distribute_batch(batch, layout_map)"
    )
    return True


def split_leaf(
    argument: Argument, at: int, leaf: Any, rules: RuleSet, mesh: DeviceMesh
) -> Any:
    """A host array over the batch axes; scalars and PRNG keys are replicated.

    Of a `jax.ShapeDtypeStruct`, one with that sharding.

    Old-style keys too: a plain array of two or four uint32, of `jax.random.PRNGKey`.
    """
    shape = leaf.shape
    sizes = mesh.axis_sizes
    parts = math.prod(sizes[axis] for axis in rules.batch)
    is_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) or (
        leaf.dtype == np.uint32 and shape in ((2,), (4,))
    )
    axes = (rules.batch, ...) if shape and not is_key else ()
    if axes and shape[0] % parts:
        raise LayoutError(
            f"the batch does not divide over the batch axes {rules.batch}:\n"
            f"  - {argument.path(at)} {show_shape(shape)}: "
            f"{clash(0, shape[0], rules.batch, sizes)}\npad it, batch, mask = "
            "flm.pad_batch(batch, layout_map), drop the rest, or place it yourself "
            "with flm.distribute_tensor"
        )
    sharding = TensorLayout(axes, mesh).sharding(len(shape))
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)
    return put(leaf, sharding)


def _on_mesh(sharding: Sharding, mesh: DeviceMesh, ndim: int) -> Sharding | None:
    """The same placement in its one spelling; None if it is on other devices."""
    if isinstance(sharding, NamedSharding):
        own = sharding.mesh
        if own == mesh.jax_mesh:
            return normal_sharding(sharding)
        grid = DeviceMesh(own)
        if list(grid.devices.flat) != list(mesh.devices.flat):
            return None
        if same_grid(grid, mesh):
            # Only the axis types differ.
            spec = normal_sharding(sharding).spec
            kind = sharding.memory_kind
            return NamedSharding(mesh.jax_mesh, spec, memory_kind=kind)
        return normal_sharding(sharding)
    if sharding.device_set != set(mesh.devices.flat):
        return None
    replicated = NamedSharding(mesh.jax_mesh, PartitionSpec())
    if sharding.is_equivalent_to(replicated, ndim):
        return replicated
    return sharding


def normal_sharding(sharding: NamedSharding) -> NamedSharding:
    """The sharding with its spec in normal form."""
    spec = sharding.spec
    plain = all(entry is None or isinstance(entry, str) for entry in spec)
    if plain and (not spec or spec[-1] is not None):
        return sharding
    normal = normal_spec([dim_axes(entry) for entry in spec])
    if normal == spec and len(normal) == len(spec):
        return sharding
    return NamedSharding(sharding.mesh, normal, memory_kind=sharding.memory_kind)


def _respelled(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer):
        sharding = leaf.sharding
        if isinstance(sharding, NamedSharding):
            normal = normal_sharding(sharding)
            return leaf if normal is sharding else put(leaf, normal)
    return leaf


def own_sharding(leaf: Any) -> NamedSharding | None:
    """Where an array on a mesh is; None for all else."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return normal_sharding(sharding)
    return None


def fit(
    arguments: Sequence[Argument], wanted: Sequence[Any], rules: RuleSet | None
) -> None:
    """Gives the leaves of all arguments exactly the wanted shardings.

    Uncommitted arrays are placed, and equal placements respelled, as `jax.jit` would
    do in every call. Changes the leaves of the arguments.

    Raises:
        LayoutError: arrays are deleted, abstract, or committed somewhere else.
    """
    problems: list[str] = []
    deleted: list[str] = []
    hints: dict[str, None] = {}
    position = -1
    for argument in arguments:
        leaves = argument.leaves
        for at, leaf in enumerate(leaves):
            position += 1
            sharding = wanted[position]
            if isinstance(leaf, jax.ShapeDtypeStruct):
                raise LayoutError(
                    f"{argument.path(at)} {show_shape(leaf.shape)} is abstract: a call "
                    "needs arrays; make the model with flm.create(make, layout_map), "
                    "or use .lower or .eval_shape"
                )
            if isinstance(leaf, _ABSTRACT):
                continue
            if not isinstance(leaf, jax.Array):
                if sharding is not None:
                    leaves[at] = put(leaf, sharding)
                continue
            if leaf.is_deleted():
                deleted.append(argument.path(at))
                continue
            if sharding is None:
                continue
            own = leaf.sharding
            if own == sharding and leaf.committed:
                continue
            if not leaf.committed or own.is_equivalent_to(sharding, leaf.ndim):
                leaves[at] = put(leaf, sharding)
            else:
                problems.append(
                    f"{argument.path(at)} {show_shape(leaf.shape)}: wanted "
                    f"{show_sharding(sharding)}, it is {show_sharding(own)}"
                )
                hints[_hint(arguments, argument, at, rules)] = None
    if deleted:  # given to a program, some backends end the process
        more = f" and {len(deleted) - 4} more" if len(deleted) > 4 else ""
        raise LayoutError(
            f"{', '.join(deleted[:4])}{more}: deleted, as an earlier call donated "
            "them; go on with what that call returned, or do not donate them"
        )
    if problems:
        raise LayoutError(
            f"{len(problems)} arrays are not where this jit wants them:\n"
            f"{bullet_list(problems)}\n{'; '.join(hints)}"
        )


def deleted_paths(arguments: Mapping[str, Any]) -> list[str]:
    """Paths of the arrays that are deleted, in arguments by name."""
    flat = flatten(Roots(arguments))
    return [
        path
        for path, leaf in zip(flat.full_paths(), flat.leaves, strict=True)
        if isinstance(leaf, jax.Array)
        and not isinstance(leaf, Tracer)
        and leaf.is_deleted()
    ]


def _hint(
    arguments: Sequence[Argument], argument: Argument, at: int, rules: RuleSet | None
) -> str:
    """What to do with a leaf that is elsewhere."""
    flat, name = flatten(Roots({argument.name: argument.value})), argument.name
    if flat.section(at).role != "optimizer":
        if rules is not None and _goes_by_its_name(flat, at, rules):
            return (
                f"the rules name the argument {name!r}, so the model has to be called "
                f"so where it is made or moved, too: layout_map.place({{{name!r}: "
                f"{name}}}), or flm.create(lambda: {{{name!r}: make()}}, layout_map)"
            )
        is_ruled = rules is None or rules.matcher.matching_forms(flat.forms(at))
        if not is_ruled and not argument.leaves[at].sharding.is_fully_replicated:
            return (
                f"no rule is for them in the argument {name!r}: if rules name what "
                "they were made in, such as 'policy', pass them as that, "
                f"{{'policy': {name}}}, or call the argument so; if not, move them "
                f"first, layout_map.place({name})"
            )
        return (
            "move them first, layout_map.place(model), or make the model with "
            "flm.create(make, layout_map)"
        )
    # By itself, the state of an optimizer does not show whose parameters it follows.
    more = ", layout_map=layout_map" if rules is not None and rules.optimizer else ""
    named = [one.name for one in arguments if one.has_objects or one is argument]
    named = ["model", name] if len(named) == 1 else named
    both = ", ".join(f"{one!r}: {one}" for one in named)
    return (
        f"make the optimizer with flm.create_optimizer(model, tx{more}), or place the "
        f"tree that holds both, layout_map.place({{{both}}})"
    )


def _goes_by_its_name(flat: Flat, at: int, rules: RuleSet) -> bool:
    """Whether the rules of a leaf depend on the name of its argument."""
    whole, *within = flat.forms(at)
    ask = rules.matcher.matching_forms
    return bool(within) and ask((whole, *within)) != ask(within)


def show_sharding(sharding: Any) -> str:
    """A sharding in a few words, for messages."""
    if isinstance(sharding, NamedSharding):
        return f"{show_spec(sharding.spec)} on mesh {DeviceMesh(sharding.mesh)}"
    devices = getattr(sharding, "device_set", ())
    if len(devices) == 1:
        return f"on the single device {next(iter(devices))}"
    return str(sharding)


def check_not_donated_twice(
    arguments: Sequence[Argument], donated: Sequence[int]
) -> None:
    """Raises LayoutError where one array is donated and used elsewhere too.

    JAX fails on that only while running, and may hang.
    """
    every = [leaf for argument in arguments for leaf in argument.leaves]
    count: dict[int, int] = {}
    for leaf in every:
        if isinstance(leaf, jax.Array):
            count[id(leaf)] = count.get(id(leaf), 0) + 1
    twice = {key for key, times in count.items() if times > 1}
    given_away = {id(every[at]) for at in donated}
    if not twice & given_away:
        return
    paths = [
        argument.path(at)
        for argument in arguments
        for at, leaf in enumerate(argument.leaves)
        if id(leaf) in twice & given_away
    ]
    raise LayoutError(
        f"{' and '.join(paths[:4])} are one array, which is donated: it cannot be used "
        "twice; copy it first, jax.numpy.copy(x), or do not donate it"
    )


def give_own_memory(arguments: Sequence[Argument], donated: Sequence[int]) -> None:
    """Copies what is donated and shares its memory with another array.

    So it is with two arrays that were put on a mesh from one. Donating them may end the
    process (jax 0.10.2). Changes the leaves of the arguments.
    """
    every = [leaf for argument in arguments for leaf in argument.leaves]
    parts = list(map(buffers_of, every))
    count = collections.Counter(itertools.chain.from_iterable(parts))
    shared = {at for at in donated if any(count[part] > 1 for part in parts[at])}
    position = -1
    for argument in arguments:
        for at, leaf in enumerate(argument.leaves):
            position += 1
            if position in shared:
                argument.leaves[at] = put(jax.numpy.copy(leaf), leaf.sharding)


def buffers_of(leaf: Any) -> set[Any]:
    """The memory of an array in this process, to compare; empty where it is unknown."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer) or not leaf.size:
        return set()
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    count = len(leaf.sharding.addressable_devices)
    parts = [leaf.addressable_data(at) for at in range(count)]
    try:
        return {(*part.devices(), part.unsafe_buffer_pointer()) for part in parts}
    except (NotImplementedError, jax.errors.JaxRuntimeError):
        return {id(leaf)}  # a backend that does not tell


class _Filled(list[Any]):
    """The shardings of one part: to JAX a leaf, as trees may hold lists."""


def broadcast(prefix: Any, tree: Any, mesh: DeviceMesh | None, what: str) -> list[Any]:
    """One sharding (or None) per leaf of `tree`, from a prefix tree of layouts.

    Raises:
        LayoutError: `prefix` is no prefix of the tree, or a layout does not fit.
    """

    def fill(layout: Any, part: Any) -> _Filled:
        leaves = jax.tree.leaves(part)
        return _Filled(_sharding_of(layout, leaf, mesh, what) for leaf in leaves)

    try:
        lists = jax.tree.map(fill, prefix, tree, is_leaf=_is_layout)
    except LayoutError:
        raise
    except (ValueError, TypeError, AttributeError) as error:
        raise LayoutError(
            f"{what} must be one sharding, or a tree of them that is a prefix of "
            f"{jax.tree.structure(tree)}: {error}"
        ) from error
    return [entry for part in jax.tree.leaves(lists) for entry in part]


def _is_layout(node: Any) -> bool:
    if node is None or isinstance(node, Sharding | TensorLayout | PartitionSpec):
        return True
    return type(node) is tuple and _names_axes(node)


def _names_axes(entries: tuple[Any, ...]) -> bool:
    """Whether a tuple is the axes of a layout, and not a tree of layouts."""
    axes = [entry for entry in entries if entry is not None and entry is not ...]
    return bool(axes) and all(
        isinstance(entry, str)
        or (type(entry) is tuple and all(isinstance(name, str) for name in entry))
        for entry in axes
    )


def _sharding_of(layout: Any, leaf: Any, mesh: DeviceMesh | None, what: str) -> Any:
    if layout is None or (
        isinstance(layout, Sharding) and not isinstance(layout, NamedSharding)
    ):
        return layout
    try:
        layout = TensorLayout(layout)
        if layout.device_mesh is None and mesh is not None:
            layout = layout.on(mesh)
    except RuleError as error:
        raise RuleError(f"{what}: {error}") from error
    if layout.device_mesh is None:
        raise MeshError(
            f"{what}: no mesh for the layout {layout}; give it one, "
            "flm.TensorLayout(axes, mesh), or give jit a layout_map with one"
        )
    try:
        layout.shard_shape(np.shape(leaf))
        return layout.sharding(np.ndim(leaf))
    except LayoutError as error:
        raise LayoutError(f"{what}: {layout}: {error}") from error
