"""Move arrays to layouts; the only place that chooses the JAX primitive.

`jax.device_put` for arrays that exist, `jax.sharding.reshard` for traced values on
Explicit axes, `jax.lax.with_sharding_constraint` for traced values on Auto axes.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding

from flax_layoutmap._core.axes import clash, dim_axes, normal_spec
from flax_layoutmap._core.errors import (
    LayoutError,
    MeshError,
    RuleError,
    StructureError,
    did_you_mean,
)
from flax_layoutmap._core.fetch import concrete, is_eager, known_layout, own_mesh
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._core.processes import Agreement, digest_of_value
from flax_layoutmap._resolve.lay import unknown_memory
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._rules.matching import Matcher
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._rules.scope import current_rules, get_default_mesh, split_axes
from flax_layoutmap._tree.flatten import flatten, plain_tree
from flax_layoutmap._tree.flax_internals import is_nnx_object
from flax_layoutmap._tree.graph import update
from flax_layoutmap._tree.objects import NO_NUMBERS
from flax_layoutmap._tree.paths import join_keys

# Per dim, the mesh axes that shard it.
_Dims = tuple[tuple[str, ...], ...]

# Fixes a traced value on Auto axes: `with_sharding_constraint`, or one like it.
_Pin = Callable[[Any, NamedSharding], Any]


def distribute_tensor(x: Any, layout: Any) -> Any:
    """Give an array a layout, eagerly or inside a traced function.

    Outside of `jit` the array is moved; inside, its layout is fixed: by a sharding
    constraint on Auto axes, by a reshard on Explicit axes (both, on a mesh that mixes
    them). Rank and divisibility are always checked: JAX alone silently drops an
    indivisible constraint under `jit`.

    Arrays go to other devices only outside of `jit` and `vmap`. A trace shows how many
    devices there are, not which: with as many others, the error is JAX's own.

    Args:
        x: an array, a traced value, or a tree of them; None leaves stay None.
        layout: anything that `TensorLayout` takes, or the name of a layout in
            `layout_map.names` of the surrounding `flm.jit`. Axes without a mesh take
            that of the surrounding `flm.jit`, else that of `flm.dtensor.default_mesh`,
            else that of `jax.set_mesh`.

    Returns:
        The array (or tree) with that layout; the same object where it has it already.

    Raises:
        LayoutError: another rank, a dim that does not divide, or no array.
        RuleError: no such name or axis.
        MeshError: no mesh to be found; an axis that is manual inside `shard_map`; in a
            trace, a mesh with another number of devices.
        StructureError: an NNX object, which `layout_map.place` moves.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> mesh = flm.DeviceMesh("data=-1")
        >>> layout = flm.TensorLayout(("data",), mesh)
        >>> x = flm.distribute_tensor(jax.numpy.ones(8), layout)
        >>> tuple(x.sharding.spec)
        ('data',)

    Plain JAX: `jax.device_put(x, s)`, `jax.lax.with_sharding_constraint(x, s)` or
    `jax.sharding.reshard(x, s)`.
    """
    wanted = wanted_layout(layout)
    with _name_of(layout):
        return jax.tree_util.tree_map_with_path(
            lambda keys, leaf: distribute(leaf, wanted, keys), x, is_leaf=is_nnx_object
        )


def _name_of(layout: Any) -> contextlib.AbstractContextManager[Any]:
    """Put the name of a layout in those of operations, for programs and profiles."""
    if isinstance(layout, str):
        return jax.named_scope(f"names[{layout}]")
    return contextlib.nullcontext()


def place(tree: Any, resolution: Resolution) -> Any:
    """Move every leaf of a tree to its layout in a Resolution of the tree.

    All are moved before anything is written back, so that a failure leaves the tree
    unchanged.
    """
    leaves = flatten(tree).leaves
    check_movable("place", leaves, resolution)
    with Agreement("moving a tree", resolution.mesh) as agreement:
        named = list(zip(resolution.paths, leaves, strict=True))
        agreement.add(
            lambda: {"values": [f"{path}: {digest_of_value(x)}" for path, x in named]}
        )
        agreement.add(resolution.fingerprint_lines)
        shardings = resolution.sharding_list()
    moved = [
        put(leaf, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)
    ]
    return with_leaves(tree, moved)


def check_movable(what: str, leaves: Sequence[Any], resolution: Resolution) -> None:
    """Raise LayoutError where a leaf is nothing that can be moved."""
    for path, leaf in zip(resolution.paths, leaves, strict=True):
        path = path or "the leaf"
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise LayoutError(
                f"{what} moves arrays, but {path} is abstract, a jax.ShapeDtypeStruct "
                f"{tuple(leaf.shape)} without values: make the tree with "
                "flm.create, or restore it from a checkpoint; "
                "layout_map.abstract(tree) gives it its shardings"
            )
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in NO_NUMBERS:
            raise LayoutError(
                f"{what} moves arrays of numbers, but {path} is a NumPy array of "
                f"{leaf.dtype}: take it out of the tree"
            )


def with_leaves(tree: Any, leaves: list[Any], treedef: Any = None) -> Any:
    """The tree with new leaves; NNX objects are updated in place.

    `treedef` is the structure of `plain_tree(tree)`, if it is known.
    """
    if treedef is None:
        treedef = jax.tree.structure(plain_tree(tree))
    new = jax.tree.unflatten(treedef, leaves)
    objects, outer = jax.tree.flatten(tree, is_leaf=is_nnx_object)
    parts = outer.flatten_up_to(new)
    for at, node in enumerate(objects):
        if is_nnx_object(node):
            update(node, parts[at])
            parts[at] = node
    return jax.tree.unflatten(outer, parts)


def need_devices(rules: RuleSet | Resolution, what: str) -> None:
    """Raise MeshError where rules or a Resolution have no mesh of devices."""
    if rules.mesh is None or rules.mesh.is_abstract:
        have = "no mesh" if rules.mesh is None else f"{rules.mesh!r}"
        raise MeshError(
            f"{what} needs a mesh of devices, the rules have {have}; use "
            "layout_map.on(flm.DeviceMesh(...))"
        )


def put(x: Any, sharding: NamedSharding) -> Any:
    """Move one concrete value to a sharding; no copy where it has it already.

    A value that is not an array or a number (a string, a function) is returned as it
    is.
    """
    if not hasattr(x, "dtype") and not isinstance(x, bool | int | float | complex):
        return x
    if is_placed(x, sharding):
        return x
    if jax.process_count() > 1:
        return _put_across_processes(x, sharding)
    return jax.device_put(x, sharding)


def is_placed(x: Any, sharding: NamedSharding) -> bool:
    """Whether a value is an array on its devices, with this sharding."""
    return isinstance(x, jax.Array) and x.sharding == sharding and x.committed


def _put_across_processes(x: Any, sharding: NamedSharding) -> Any:
    """Move a value that all processes hold: each supplies its own shards."""
    if isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        # JAX moves the data of keys between processes, not keys.
        data = _put_across_processes(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        try:
            return jax.device_put(x, sharding)
        except NotImplementedError as error:
            raise MeshError(
                f"an array {tuple(x.shape)} on devices of other processes "
                "too can only be moved to a mesh of the same devices, not to "
                f"{DeviceMesh(sharding.mesh)!r}; save a checkpoint and restore it there"
            ) from error
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def wanted_layout(layout: Any, otherwise: DeviceMesh | None = None) -> TensorLayout:
    """The layout, or that of this name, with the ambient mesh if it has none.

    Without an ambient mesh it gets the mesh `otherwise`, or raises MeshError.
    """
    if isinstance(layout, str):
        layout = _named(layout)
    layout = layout if isinstance(layout, TensorLayout) else TensorLayout(layout)
    layout = _without(layout, split_axes())
    if layout.device_mesh is None:
        mesh = _ambient_mesh() or otherwise
        if mesh is None:
            raise MeshError(
                f"no mesh for the layout {layout}: give it one, "
                "flm.TensorLayout(axes, mesh); or call inside a "
                "flm.jit(layout_map=…), flm.dtensor.default_mesh(mesh) or "
                "jax.set_mesh(mesh)"
            )
        own = otherwise.jax_mesh if otherwise is not None else None
        if isinstance(own, Mesh) and own.abstract_mesh == mesh.jax_mesh:
            mesh = otherwise  # the same one, with its devices
        layout = layout.on(mesh)
    mesh = mesh_of(layout)
    there = mesh_in_context(mesh)
    return layout if there is mesh else layout.on(there)


def mesh_in_context(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh; where its Explicit axes are Auto in context, with these types.

    So they are inside of a function of `flm.jit`, and of `jax.sharding.auto_axes`.
    """
    context: Any = jax.sharding.get_abstract_mesh()
    if not explicit_axes(mesh) - explicit_axes(context) - manual_axes(context):
        return mesh
    if context.axis_names != mesh.axis_names or context.axis_sizes != mesh.shape:
        return mesh
    if mesh.is_abstract:
        return DeviceMesh(context)
    types = context.axis_types
    return DeviceMesh(Mesh(mesh.devices, mesh.axis_names, axis_types=types))


def _without(layout: TensorLayout, axes: Collection[str]) -> TensorLayout:
    """The layout without these axes."""
    if not set(axes).intersection(layout.axis_names):
        return layout
    dims = [
        dim if dim is ... else tuple(axis for axis in dim_axes(dim) if axis not in axes)
        for dim in layout.axes
    ]
    return TensorLayout(dims, layout.device_mesh, memory_kind=layout.memory_kind)


def mesh_of(layout: TensorLayout) -> DeviceMesh:
    """The mesh of a layout that `wanted_layout` gave one."""
    assert layout.device_mesh is not None
    return layout.device_mesh


def _ambient_mesh() -> DeviceMesh | None:
    rules = current_rules()
    if rules is not None and rules.mesh is not None:
        return rules.mesh
    default = get_default_mesh()
    if default is not None:
        return default
    context: Any = jax.sharding.get_abstract_mesh()
    if is_eager() and not manual_axes(context):
        with contextlib.suppress(ValueError):
            # JAX raises under `grad` and `vmap`, even eagerly.
            found = jax.sharding.get_mesh()
            context = context if found.empty else found
    return DeviceMesh(context) if context.axis_names else None


def _named(name: str) -> TensorLayout:
    rules = current_rules()
    if rules is None:
        raise RuleError(
            f"{name!r} is the name of a layout only inside a flm.jit(layout_map=…) "
            f"whose layout_map.names[{name!r}] is set; elsewhere pass the layout itself"
        )
    found = Matcher(rules.names, "fullmatch").matching(name)
    if not found:
        names = [rule.pattern for rule in rules.names]
        raise RuleError(
            f"layout_map.names has no {name!r}{did_you_mean(name, names)}; it has "
            f"{names}"
        )
    winner = rules.winner(rules.names, found)
    if winner is None:
        listed = ", ".join(repr(rules.names[at].pattern) for at in found)
        raise RuleError(
            f"several names with different layouts match {name!r}: {listed}; make one "
            'narrower, or use overlap="first" or "last"'
        )
    return rules.names[winner].layout


def distribute(
    x: Any,
    layout: TensorLayout,
    keys: Any = (),
    *,
    what: str = "distribute_tensor",
    pin: _Pin = jax.lax.with_sharding_constraint,
) -> Any:
    """Give one array a layout on a mesh, as `distribute_tensor` does.

    For messages: `keys`, the key path of the array, and `what`, the calling function.
    `pin` constrains a traced value on Auto axes.
    """
    x = as_array(x, keys, what)
    mesh = mesh_of(layout)
    # Before rank and divisibility, which inside shard_map are those of a part.
    manual = manual_axes(jax.sharding.get_abstract_mesh())
    for axis in layout.axis_names:
        if axis in manual:
            raise MeshError(
                f"{what} names the mesh axis {axis!r}, which is manual here: inside "
                "shard_map each device already holds its part, so drop the call or "
                "name other axes only"
            )
    dims = checked_dims(layout, x, what)
    if manual.issuperset(mesh.axis_names):
        return x  # no axis is left that could be constrained
    eager = is_eager()
    if eager and (not isinstance(x, Tracer) or _held_elsewhere(x, mesh)):
        return move(x, layout, dims)
    check_same_devices(x, mesh, what)

    def constrain(value: Any) -> Any:
        return _constrain(value, layout, dims, bool(manual), what, pin)

    if eager and AxisType.Auto in mesh.axis_types and explicit_axes(mesh):
        # Eagerly, under `grad`, the two steps for a mixed mesh have types that do not
        # fit together; in one compiled step they do.
        return jax.jit(constrain)(x)
    return constrain(x)


def as_array(x: Any, keys: Any = (), what: str = "distribute_tensor") -> Any:
    """An array, traced or on the host; raises for anything else."""
    if is_nnx_object(x):
        raise StructureError(
            f"{what} takes arrays, not a {type(x).__name__}: move a module by rules, "
            "layout_map.place(module), or its arrays one by one"
        )
    if isinstance(x, jax.ShapeDtypeStruct):
        where = f" at {join_keys(keys)}" if keys else ""
        raise LayoutError(
            f"{what} takes arrays and numbers, got the abstract {x}{where}; "
            "layout_map.abstract(tree) gives abstract trees their shardings"
        )
    if hasattr(x, "shape") and not isinstance(x, np.ndarray | np.generic):
        return x
    array = np.asarray(x)
    if array.dtype.kind in NO_NUMBERS:
        raise LayoutError(
            f"{what} takes arrays and numbers, got the {type(x).__name__} {x!r}"
        )
    return array


def move(x: Any, layout: TensorLayout, dims: _Dims) -> Any:
    """Move an array to a mesh of devices, eagerly; also one that `grad` traces."""
    mesh = mesh_of(layout)
    if mesh.is_abstract:
        raise MeshError(
            f"{mesh!r} has no devices to move an array to; use a concrete mesh"
        )
    spec = normal_spec(dims)
    sharding = NamedSharding(mesh.jax_mesh, spec, memory_kind=layout.memory_kind)
    return jax.device_put(x, sharding) if isinstance(x, Tracer) else put(x, sharding)


def _constrain(
    x: Any,
    layout: TensorLayout,
    dims: _Dims,
    inside_manual: bool,
    what: str,
    pin: _Pin,
) -> Any:
    mesh = mesh_of(layout)
    explicit = explicit_axes(mesh)
    for dim, axes in enumerate(dims):
        if len({axis in explicit for axis in axes}) > 1:
            # JAX would silently drop the Auto axes.
            raise LayoutError(
                f"{what} of a traced array {tuple(x.shape)} to {layout}: dim {dim} "
                f"is on Explicit and on Auto axes of the mesh {mesh!r}; use axes of "
                "one type for it"
            )
    jax_mesh: Any = mesh.jax_mesh
    if inside_manual:
        # Inside shard_map only the mesh of the context has its manual axes.
        jax_mesh = jax.sharding.get_abstract_mesh()
    lies_on = None if inside_manual else own_mesh(x)
    if explicit or (lies_on is not None and explicit_axes(lies_on)):
        # From Explicit to Auto axes too: a constraint alone keeps the type of `x` as
        # that of the gradient, which then does not fit.
        own = [tuple(a for a in axes if a in explicit) for axes in dims]
        x = jax.sharding.reshard(x, NamedSharding(jax_mesh, normal_spec(own)))
    if len(explicit) < len(mesh.axis_names):
        auto = [tuple(a for a in axes if a not in explicit) for axes in dims]
        x = pin(x, NamedSharding(jax_mesh, normal_spec(auto)))
    if layout.memory_kind is not None:
        # Neither of the two applies a memory kind.
        spec, kind = normal_spec(dims), layout.memory_kind
        x = jax.device_put(x, NamedSharding(jax_mesh, spec, memory_kind=kind))
    return x


def _held_elsewhere(x: Tracer, mesh: DeviceMesh) -> bool:
    """Whether `grad` traces, eagerly, an array that is committed to other devices."""
    array = concrete(x)
    if mesh.is_abstract or not getattr(array, "committed", False):
        return False
    return array.sharding.device_set != set(mesh.devices.flat)


def check_same_devices(x: Any, mesh: DeviceMesh, what: str) -> None:
    """Raise MeshError where a traced value would move to other devices.

    A trace shows how many devices there are, not which.
    """
    context = None if is_eager() else jax.sharding.get_abstract_mesh()
    traced = isinstance(x, Tracer) and concrete(x) is None
    for known in (own_mesh(x) if traced else None, context):
        if known is not None and known.axis_names and known.size != mesh.size:
            raise MeshError(
                f"{what} of a traced array {tuple(x.shape)} to {mesh!r}: it is on "
                f"{known.size} devices, and goes to others only outside of jit and "
                f"vmap; call {what} there, or name axes alone, "
                'TensorLayout(("data", None)), for the devices that it is on'
            )


def explicit_axes(mesh: Any) -> set[str]:
    """The names of the Explicit axes of a mesh of ours or of JAX."""
    return _axes_of_type(mesh, AxisType.Explicit)


def manual_axes(context: Any) -> set[str]:
    """The names of the axes that the surrounding `shard_map` has taken over."""
    return _axes_of_type(context, AxisType.Manual)


def _axes_of_type(mesh: Any, wanted: AxisType) -> set[str]:
    pairs = zip(mesh.axis_names, mesh.axis_types or (), strict=False)
    return {name for name, kind in pairs if kind is wanted}


def checked_dims(layout: TensorLayout, x: Any, what: str) -> _Dims:
    """The mesh axes of each dim of this array; raises where the layout does not fit.

    JAX checks less of it, or nothing.
    """
    shape, mesh = tuple(x.shape), mesh_of(layout)
    known = known_layout(x) if layout.has_match else None
    try:
        if known is not None:
            layout = layout.matched(known.dims(len(shape)))
        elif layout.has_match and not isinstance(x, Tracer):
            # On no mesh yet, so that nothing is sharded.
            layout = layout.matched(((),) * len(shape))
        dims = layout.dims(len(shape))
    except LayoutError as error:
        raise LayoutError(f"{what} of an array {shape}: {error}") from None
    if problem := unknown_memory(layout.memory_kind, mesh):
        raise LayoutError(f"{what} of an array {shape} to {layout}{problem}")
    sizes = mesh.axis_sizes
    for dim, axes in enumerate(dims):
        if shape[dim] % math.prod(sizes[axis] for axis in axes):
            raise LayoutError(
                f"{what} of an array {shape} to {layout}: "
                f"{clash(dim, shape[dim], axes, sizes)}"
            )
    return dims
