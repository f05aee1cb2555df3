"""Rewrite the layout metadata of Variables and boxes to what a Resolution says."""

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from flax.core.meta import AxisMetadata, Partitioned
from jax.sharding import NamedSharding

from flax_layoutmap._core.errors import RuleError
from flax_layoutmap._resolve.leaves import Mark, mark_of, mesh_axes
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._rules.records import ResolvedLeaf
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.flax_internals import is_nnx_object, metadata_of
from flax_layoutmap._tree.paths import parameter_keys


def settle_metadata(tree: Any, resolution: Resolution) -> Any:
    """Rewrite Flax's layout metadata where it differs from the actual layout.

    It differs where a rule has overruled it, where it did not fit fully (an axis that
    the mesh lacks), and where it names another mesh; a later `nnx.Optimizer` or `unbox`
    would follow it. Metadata that agrees is kept, and with it the structure of the
    tree. NNX Variables are changed in place; Linen boxes are replaced.
    """
    flat = flatten(tree)
    mesh = resolution.mesh
    if not flat.annotations:
        return tree
    own = None if mesh is None or mesh.is_abstract else mesh.jax_mesh
    owners = {key: at for at, key in parameter_keys(flat).items()}
    new: dict[int, Any] = {}
    for at, box in flat.annotations.items():
        leaf, other = resolution.leaf(at), _mesh_of_box(box)
        is_elsewhere = other is not None and own is not None and other != own
        decisive, mark = leaf, mark_of(box)
        if leaf.role == "optimizer" and leaf.owner in owners:
            # Moments are mapped with parameters, so that their boxes must be equal.
            decisive = resolution.leaf(owners[leaf.owner])
            same_rank = len(leaf.shape) == len(decisive.shape)
            if not isinstance(box, nnx.Variable):
                leaf = decisive
            elif not same_rank:
                continue
        by_role = leaf.reason == "optimizer rule"
        if by_role or _is_overruled(decisive, mark) or _is_bound(box) or is_elsewhere:
            dims = leaf.layout.dims(len(leaf.shape))
            axes = () if mesh is None else mesh.axis_names
            names, rules = _settled_names(mark, dims, axes)
            kept = own if other is not None or _is_bound(box) else None
            new[id(box)] = _reannotated(box, names, rules, kept)

    def settled(node: Any) -> Any:
        return new.get(id(node), node) if isinstance(node, AxisMetadata) else node

    if is_nnx_object(tree):
        return tree
    return jax.tree.map(
        settled, tree, is_leaf=lambda n: isinstance(n, AxisMetadata) or is_nnx_object(n)
    )


def _is_overruled(leaf: ResolvedLeaf, mark: Mark) -> bool:
    """Whether the sharding of a leaf differs from its metadata."""
    if leaf.reason == "flax metadata":
        # Linen replicates dims whose names have no rule.
        return leaf.fallback is not None and mark.kind != "linen"
    return leaf.reason in ("rule", "exact key", "explicit layout")


def _is_bound(box: Any) -> bool:
    """Whether a Variable is annotated by a NamedSharding, not by names.

    Flax reads those when a Variable is made, and fails on them later.
    """
    if not isinstance(box, nnx.Variable):
        return False
    value = metadata_of(box).get("out_sharding")
    return isinstance(getattr(value, "sharding", value), NamedSharding)


def _mesh_of_box(box: Any) -> Any:
    """The mesh that a Variable or box was annotated with, or None."""
    if isinstance(box, nnx.Variable):
        return metadata_of(box).get("mesh")
    return getattr(box, "mesh", None)


def _settled_names(
    mark: Mark, dims: Sequence[tuple[str, ...]], axes: Sequence[str]
) -> tuple[tuple[Any, ...], tuple[tuple[str, None], ...]]:
    """Axis names for the layout of a leaf, and rules for names that are not mesh axes.

    The name of a dim that is on no mesh axis is kept, with a rule that says so:
    `nnx.scan` looks for the name that it gave the dim of the layers.
    """
    try:
        were = mesh_axes(mark)[0]
    except RuleError:
        were = ()
    names: list[Any] = []
    for dim, own in enumerate(dims):
        name = own[0] if len(own) == 1 else own or None
        if name is None and dim < len(were) and not set(were[dim]) & set(axes):
            name = (mark.names or ())[dim][:1] or None
            name = None if name is None or name[0] in names else name[0]
        names.append(name)
    kept = {name for name in names if isinstance(name, str)} - set(axes)
    return tuple(names), tuple((name, None) for name in sorted(kept))


def _reannotated(
    box: Any, names: tuple[Any, ...], rules: tuple[tuple[str, None], ...], mesh: Any
) -> Any:
    """A Variable, changed in place, or a new Linen box, with these names, one per dim.

    `rules` are for names that are not mesh axes; a `mesh` of None leaves that to the
    context.
    """
    if isinstance(box, nnx.Variable):
        metadata = metadata_of(box)
        if metadata.get("out_sharding") is not None:
            box.set_metadata("out_sharding", names)
        if rules or metadata.get("sharding_rules"):
            box.set_metadata("sharding_rules", rules or None)
        if mesh is not None:
            box.set_metadata("mesh", mesh)
        return box
    kept = {name for name, _ in rules}
    axes: Any = tuple(None if name in kept else name for name in names)
    kind: Any = SettledBox if kept else Partitioned
    return kind(box.value, names=axes, mesh=mesh)


class SettledBox(Partitioned[Any]):
    """A Linen box that names mesh axes alone.

    `nn.scan` removes the dim of the layers by its position, whatever name it gave that
    dim.
    """

    def add_axis(self, index: int, params: dict[Any, Any]) -> "SettledBox":
        """The box of stacked layers."""
        names: list[Any] = list(self.names)
        names += [None] * (index - len(names))
        names.insert(index, None)
        return self.replace(names=tuple(names))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> "SettledBox":
        """The box of one layer."""
        names = list(self.names)
        del names[index]
        return self.replace(names=tuple(names))
