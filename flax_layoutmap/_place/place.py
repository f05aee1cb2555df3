"""Move arrays to layouts; the only place that chooses the JAX primitive.

`jax.device_put` for arrays that exist, `jax.sharding.reshard` for traced values on
Explicit axes, `jax.lax.with_sharding_constraint` for traced values on Auto axes.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from flax_layoutmap._core.axes import dim_axes, divisible, normal_spec
from flax_layoutmap._core.errors import (
    LayoutError,
    MeshError,
    RuleError,
    StructureError,
    did_you_mean,
)
from flax_layoutmap._core.fetch import (
    concrete,
    is_eager,
    is_traced,
    known_layout,
    own_mesh,
)
from flax_layoutmap._core.layout import TensorLayout, named_sharding
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._core.processes import Agreement, digest_of_value
from flax_layoutmap._resolve.lay import unknown_memory
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._rules.rules import (
    RuleSet,
    current_rules,
    get_default_mesh,
    split_axes,
)
from flax_layoutmap._tree.flatten import flatten, plain_tree
from flax_layoutmap._tree.flax_internals import is_nnx_object
from flax_layoutmap._tree.objects import NO_NUMBERS
from flax_layoutmap._tree.paths import join_keys

# Per dim, the mesh axes that shard it; UNCONSTRAINED where MATCH keeps unknown ones.
_Dims = tuple[Any, ...]
_FREE = PartitionSpec.UNCONSTRAINED


def distribute_tensor(x: Any, layout: Any) -> Any:
    """Give an array a layout, eagerly or inside a traced function.

    Outside `jit`, the array is moved, also to other devices; inside, its layout is
    constrained. Rank and divisibility are always checked: JAX silently drops an
    indivisible constraint under `jit`.

    Args:
        x: an array, a traced value, or a tree of them; None leaves stay None.
        layout: anything that `TensorLayout` takes, or the name of a layout in
            `layout_map.names` of the surrounding `flm.jit`, whose `indivisible=` then
            applies too. Axes without a mesh use the mesh of the surrounding `flm.jit`,
            of `flm.dtensor.default_mesh`, of `jax.set_mesh`, or of `x`, in this order.

    Returns:
        The array (or tree) with that layout; arrays that already have it are returned
        as they are.

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
    is_named = isinstance(layout, str)
    what = f"distribute_tensor(x, {layout!r})" if is_named else "distribute_tensor"

    def move(keys: Any, leaf: Any) -> Any:
        leaf = as_array(leaf, keys, "distribute_tensor")
        wanted = wanted_layout(layout, own_mesh(leaf))
        return distribute(leaf, wanted, what, is_named=is_named)

    # Shown in programs and profiles.
    with jax.named_scope(f"names[{layout}]") if is_named else contextlib.nullcontext():
        return jax.tree_util.tree_map_with_path(move, x, is_leaf=is_nnx_object)


# ---------------------------------------------------------------- trees of arrays


def place(tree: Any, resolution: Resolution) -> Any:
    """Move every leaf of a tree to its layout in a Resolution of the tree.

    All leaves are moved before any is written back: a failure leaves the tree
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
    return with_leaves(tree, list(map(put, leaves, shardings)))


def check_movable(what: str, leaves: Sequence[Any], resolution: Resolution) -> None:
    """Raise LayoutError if a leaf cannot be moved."""
    for path, leaf in zip(resolution.paths, leaves, strict=True):
        if problem := _why_unmovable(leaf):
            raise _refusal(what, path, problem)


def as_array(x: Any, keys: Any, what: str) -> Any:
    """Convert to an array (traced, JAX or NumPy); errors show `keys` and `what`."""
    if is_nnx_object(x):
        raise StructureError(
            f"{what} takes arrays, not a {type(x).__name__}: move a module by rules, "
            "layout_map.place(module), or its arrays one by one"
        )
    is_array = hasattr(x, "shape") and not isinstance(x, np.generic)
    array = x if is_array else np.asarray(x)
    if problem := _why_unmovable(array):
        problem = problem if is_array else f"the {type(x).__name__} {x!r}"
        raise _refusal(what, join_keys(keys), problem)
    return array


def _refusal(what: str, path: str, problem: str) -> LayoutError:
    leaf = f"but {path} is" if path else "got"
    return LayoutError(f"{what} takes arrays and numbers, {leaf} {problem}")


def _why_unmovable(x: Any) -> str | None:
    """Describe a value that cannot be moved to a device; None if it can."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return (
            f"the abstract {x}: make the values, with flm.create or from a checkpoint; "
            "layout_map.abstract(tree) gives abstract trees their shardings"
        )
    if isinstance(x, np.ndarray) and x.dtype.kind in NO_NUMBERS:
        return f"a NumPy array of {x.dtype}"
    dtype_in_programs = jax.dtypes.canonicalize_dtype
    if isinstance(x, jax.Array) and x.dtype != dtype_in_programs(
        x.dtype, allow_extended_dtype=True
    ):
        # jax.device_put would cut its values to 32 bits without an error.
        return f"{x.dtype}, which JAX moves in a block of jax.enable_x64(True) alone"
    return None


def with_leaves(tree: Any, leaves: list[Any]) -> Any:
    """Return the tree with new leaves; NNX objects are updated in place."""
    new = jax.tree.unflatten(jax.tree.structure(plain_tree(tree)), leaves)
    objects, outer = jax.tree.flatten(tree, is_leaf=is_nnx_object)
    parts = outer.flatten_up_to(new)
    for at, node in enumerate(objects):
        if is_nnx_object(node):
            nnx.update(node, parts[at])
            parts[at] = node
    return jax.tree.unflatten(outer, parts)


def need_devices(rules: RuleSet | Resolution, what: str) -> None:
    """Raise MeshError if rules or a Resolution have no mesh of devices."""
    if rules.mesh is None or rules.mesh.is_abstract:
        have = "no mesh" if rules.mesh is None else f"{rules.mesh!r}"
        raise MeshError(
            f"{what} needs a mesh of devices, the rules have {have}; use "
            "layout_map.on(flm.DeviceMesh(...))"
        )


# ---------------------------------------------------------------- one concrete value


def put(x: Any, sharding: NamedSharding) -> Any:
    """Move an array or number, unless it is already there; return others unchanged."""
    is_number = isinstance(x, bool | int | float | complex)
    if is_placed(x, sharding) or not (is_number or hasattr(x, "dtype")):
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
        # JAX cannot move keys between processes, only their data.
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


# ---------------------------------------------------------------- the wanted layout


def wanted_layout(layout: Any, otherwise: DeviceMesh | None = None) -> TensorLayout:
    """Look up a layout given by name, and give it a mesh if it has none.

    That is the ambient mesh or else `otherwise`; MeshError if there is neither.
    """
    layout = TensorLayout(_named(layout) if isinstance(layout, str) else layout)
    split = set(split_axes())
    if split.intersection(layout.axis_names):
        dims = [
            dim if dim is ... else tuple(a for a in dim_axes(dim) if a not in split)
            for dim in layout.axes
        ]
        layout = TensorLayout(dims, layout.device_mesh, memory_kind=layout.memory_kind)
    mesh = layout.device_mesh or _ambient_mesh() or otherwise
    if mesh is None:
        raise MeshError(
            f"no mesh for the layout {layout}: give it one, "
            "flm.TensorLayout(axes, mesh); or call inside a "
            "flm.jit(layout_map=…), flm.dtensor.default_mesh(mesh) or "
            "jax.set_mesh(mesh)"
        )
    if otherwise is not None and layout.device_mesh is None:
        bare = otherwise.jax_mesh
        if isinstance(bare, Mesh) and bare.abstract_mesh == mesh.jax_mesh:
            mesh = otherwise  # the same one, with its devices
    return layout.on(_mesh_in_context(mesh))


def _named(name: str) -> TensorLayout:
    rules = current_rules()
    if rules is None:
        raise RuleError(
            f"{name!r} is the name of a layout only inside a flm.jit(layout_map=…) "
            f"whose layout_map.names[{name!r}] is set; elsewhere pass the layout itself"
        )
    layout = rules.layout_in("names", name)
    if layout is None:
        names = [rule.pattern for rule in rules.names]
        raise RuleError(
            f"layout_map.names has no {name!r}{did_you_mean(name, names)}; it has "
            f"{names}"
        )
    return layout


def _ambient_mesh() -> DeviceMesh | None:
    rules = current_rules()
    mesh = get_default_mesh() if rules is None or rules.mesh is None else rules.mesh
    if mesh is not None:
        return mesh
    context: Any = jax.sharding.get_abstract_mesh()
    if is_eager() and not manual_axes():
        with contextlib.suppress(ValueError):
            # JAX raises under `grad` and `vmap`, even eagerly.
            concrete_mesh = jax.sharding.get_mesh()
            context = context if concrete_mesh.empty else concrete_mesh
    return DeviceMesh(context) if context.axis_names else None


def _mesh_in_context(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh, with the axis types of the context if its Explicit axes are Auto there.

    They are Auto inside `flm.jit` and `jax.sharding.auto_axes`.
    """
    context: Any = jax.sharding.get_abstract_mesh()
    if not explicit_axes(mesh) - explicit_axes(context) - manual_axes():
        return mesh
    if context.axis_names != mesh.axis_names or context.axis_sizes != mesh.shape:
        return mesh
    if mesh.is_abstract:
        return DeviceMesh(context)
    types = context.axis_types
    return DeviceMesh(Mesh(mesh.devices, mesh.axis_names, axis_types=types))


def explicit_axes(mesh: Any) -> set[str]:
    """The names of the Explicit axes of a `DeviceMesh` or a JAX mesh."""
    return _axes_of_type(mesh, AxisType.Explicit)


def manual_axes() -> set[str]:
    """The names of the axes that the surrounding `shard_map` has taken over."""
    return _axes_of_type(jax.sharding.get_abstract_mesh(), AxisType.Manual)


def _axes_of_type(mesh: Any, wanted: AxisType) -> set[str]:
    pairs = zip(mesh.axis_names, mesh.axis_types or (), strict=False)
    return {name for name, kind in pairs if kind is wanted}


# ---------------------------------------------------------------- one array or value


def distribute(
    x: Any, layout: TensorLayout, what: str, *, is_named: bool = False
) -> Any:
    """Give one array a layout on a mesh, as `distribute_tensor` does.

    `what` shows the call in messages; `is_named`: the user gave the layout's name.
    """
    mesh = layout._some_mesh()
    dims = checked_dims(layout, x, what, is_named=is_named)
    if not is_eager() or (isinstance(x, Tracer) and not _is_elsewhere(x, mesh)):
        return _constrain(x, layout, dims)
    _ = mesh.devices  # raises for an abstract mesh
    sharding = named_sharding(mesh, normal_spec(dims), layout.memory_kind)
    return jax.device_put(x, sharding) if isinstance(x, Tracer) else put(x, sharding)


def _is_elsewhere(x: Any, mesh: DeviceMesh) -> bool:
    """Whether eager `grad` traces an array that was put on another mesh."""
    is_committed = getattr(concrete(x), "committed", False)
    return is_committed and not mesh.is_abstract and own_mesh(x) != mesh


def _constrain(x: Any, layout: TensorLayout, dims: _Dims) -> Any:
    mesh, kind = layout._some_mesh(), layout.memory_kind
    spec = PartitionSpec(*dims) if _FREE in dims else normal_spec(dims)
    # Inside shard_map, only the mesh of the context marks its axes as manual.
    jax_mesh = jax.sharding.get_abstract_mesh() if manual_axes() else mesh.jax_mesh
    if explicit_axes(mesh):
        x = jax.sharding.reshard(x, NamedSharding(jax_mesh, spec))
    else:
        x = jax.lax.with_sharding_constraint(x, NamedSharding(jax_mesh, spec))
    if kind is not None:
        # Neither of these functions applies a memory kind.
        x = jax.device_put(x, NamedSharding(jax_mesh, spec, memory_kind=kind))
    return x


def checked_dims(
    layout: TensorLayout, x: Any, what: str, *, is_named: bool = False
) -> _Dims:
    """The mesh axes of each dim of this array; raises if the layout does not fit.

    JAX checks less than this, or nothing. Indivisible dims are replicated if the layout
    is given by name and the rules have `indivisible="replicate"`.
    """
    shape, mesh = tuple(x.shape), layout._some_mesh()
    known = known_layout(x) if layout.has_match else None
    what = f"{what} of an array {shape}"
    try:
        # An array without a mesh is not sharded.
        axes = known.dims(len(shape)) if known else ((),) * len(shape)
        dims = layout.matched(axes).dims(len(shape))
    except LayoutError as error:
        raise LayoutError(f"{what}: {error}") from None
    if problem := unknown_memory(layout.memory_kind, mesh):
        raise LayoutError(f"{what} to {layout}{problem}")
    kept, clashes = divisible(shape, dims, mesh.axis_sizes)
    rules = current_rules()
    if clashes and not (is_named and rules and rules.indivisible == "replicate"):
        raise LayoutError(f"{what} to {layout}: {'; '.join(clashes)}")
    if layout.has_match and known is None and is_traced(x):
        written = layout._written_out(len(shape))
        return tuple(
            _FREE if dim == TensorLayout.MATCH else axes
            for dim, axes in zip(written, kept, strict=True)
        )
    return kept
