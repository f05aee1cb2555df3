"""Update the layout metadata of Variables and boxes to match a Resolution."""

from collections.abc import Sequence
from typing import Any

import jax
from flax import linen, nnx
from flax.core.meta import AxisMetadata, Partitioned
from jax.sharding import NamedSharding

from flax_layoutmap._core.errors import RuleError
from flax_layoutmap._resolve.leaves import Mark, mark_of, mesh_axes, variable_metadata
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._rules.records import ResolvedLeaf
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.flax_internals import is_nnx_object
from flax_layoutmap._tree.paths import parameter_keys


def settle_metadata(tree: Any, resolution: Resolution) -> Any:
    """Rewrite Flax's layout metadata where it differs from the actual layout.

    A later `nnx.Optimizer` or `unbox` would follow the old metadata. Metadata that
    agrees and the structure of the tree are kept. Variables are changed in place, boxes
    are replaced.
    """
    flat = flatten(tree)
    if not flat.annotations:
        return tree
    owners = {key: at for at, key in parameter_keys(flat).items()}
    new: dict[int, Any] = {}
    for at, box in flat.annotations.items():
        leaf = decisive = resolution.leaf(at)
        if leaf.role == "optimizer" and leaf.owner in owners:
            # `jax.tree.map` over moments and parameters needs equal boxes.
            decisive = resolution.leaf(owners[leaf.owner])
            if not isinstance(box, nnx.Variable):
                leaf = decisive
            elif len(leaf.shape) != len(decisive.shape):
                continue
        if leaf.reason == "optimizer rule" or _differs(box, decisive, resolution):
            new[id(box)] = _settled(box, leaf, resolution)
    if is_nnx_object(tree):
        return tree
    return jax.tree.map(
        lambda node: new.get(id(node), node),
        tree,
        is_leaf=lambda n: isinstance(n, AxisMetadata) or is_nnx_object(n),
    )


def _differs(box: Any, leaf: ResolvedLeaf, resolution: Resolution) -> bool:
    mesh, annotated = _mesh_of_devices(resolution), _mesh_of_box(box)
    if annotated is not None and mesh is not None and annotated != mesh:
        return True
    if _is_bound(box):
        return True
    if leaf.reason == "flax metadata":
        # Linen replicates dims whose names have no rule.
        return leaf.fallback is not None and mark_of(box).kind != "linen"
    return leaf.reason in ("rule", "exact key", "explicit layout")


def _mesh_of_devices(resolution: Resolution) -> Any:
    mesh = resolution.mesh
    return None if mesh is None or mesh.is_abstract else mesh.jax_mesh


def _mesh_of_box(box: Any) -> Any:
    metadata = variable_metadata(box)
    return getattr(box, "mesh", None) if metadata is None else metadata.get("mesh")


def _is_bound(box: Any) -> bool:
    """Whether a Variable has a NamedSharding, not names; Flax fails on it later."""
    value = (variable_metadata(box) or {}).get("out_sharding")
    return isinstance(getattr(value, "sharding", value), NamedSharding)


def _settled(box: Any, leaf: ResolvedLeaf, resolution: Resolution) -> Any:
    """The Variable, changed in place, or a new box, with the axis names of a layout."""
    axes = () if resolution.mesh is None else resolution.mesh.axis_names
    names = _names(mark_of(box), leaf.layout.dims(len(leaf.shape)), axes)
    kept = {name for name in names if isinstance(name, str)} - set(axes)
    mesh = None
    if _mesh_of_box(box) is not None or _is_bound(box):
        mesh = _mesh_of_devices(resolution)
    metadata = variable_metadata(box)
    if metadata is None:
        if not kept:
            return Partitioned(box.value, names=names, mesh=mesh)
        # Some logical names are not mapped to a mesh axis.
        meanings = [(name, None if name in kept else name) for name in names if name]
        logical: Any = linen.LogicallyPartitioned
        return logical(box.value, names=names, mesh=mesh, rules=tuple(meanings))
    changes: dict[str, Any] = {}
    if metadata.get("out_sharding") is not None:
        changes["out_sharding"] = names
    if kept or metadata.get("sharding_rules"):
        rules = tuple((name, None) for name in sorted(kept))
        changes["sharding_rules"] = rules or None
    if mesh is not None:
        changes["mesh"] = mesh
    if not isinstance(box, nnx.Variable):
        return box.replace(metadata={**metadata, **changes})
    if changes:
        box.set_metadata(**changes)
    return box


def _names(
    mark: Mark, dims: Sequence[tuple[str, ...]], axes: Sequence[str]
) -> tuple[Any, ...]:
    """Axis names for a layout, with the logical names that `nnx.scan` looks for."""
    try:
        before = mesh_axes(mark)[0]
    except RuleError:
        before = ()
    names: list[Any] = []
    for dim, on_axes in enumerate(dims):
        name = on_axes[0] if len(on_axes) == 1 else on_axes or None
        if name is None and dim < len(before) and not set(before[dim]) & set(axes):
            (name,) = (mark.names or ())[dim][:1] or (None,)
            name = None if name in names else name
        names.append(name)
    return tuple(names)
