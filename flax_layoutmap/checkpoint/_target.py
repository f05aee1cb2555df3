"""What to restore into: any tree of the user's, or a function that makes one."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding

from flax_layoutmap._birth.create import give_birth
from flax_layoutmap._place.place import settle_metadata, with_leaves
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.flax_internals import is_nnx_object, nnx_split, nnx_state
from flax_layoutmap._tree.paths import Flat, is_train_state
from flax_layoutmap._tree.trace import Traced, trace
from flax_layoutmap.checkpoint._leaves import Leaf


@dataclasses.dataclass(frozen=True)
class Target:
    """A target whose leaves are known by their paths.

    Attributes:
        tree: the tree, which can be resolved; of a function, what it would make.
        flat: the same, flattened.
        traced: the trace of a function; None for a tree.
    """

    tree: Any
    flat: Flat
    traced: Traced | None

    @property
    def leaves(self) -> dict[str, Any]:
        """Path → leaf, concrete or abstract."""
        return dict(zip(self.flat.full_paths(), self.flat.leaves, strict=True))

    def filled(
        self,
        values: Mapping[str, Any],
        made: Mapping[str, Any],
        resolution: Resolution | None,
    ) -> Any:
        """The target with new values.

        Args:
            values: path → value, of what was read.
            made: path → sharding, of what the function of the target makes.
            resolution: the layouts, which annotations of the target then say too.
        """
        new = self.leaves | dict(values)
        if made and self.traced is not None:
            new |= _made(self.traced, self.flat, made)
        if self.traced is not None:
            result = self.traced.rebuild([*new.values()])
        else:
            result = with_leaves(_with_new_objects(self.tree), [*new.values()])
        return result if resolution is None else settle_metadata(result, resolution)


def opened(target: Any) -> Target:
    """Flattens a tree, or traces a function that makes one."""
    is_object = is_nnx_object(target) or is_train_state(target)
    traced = trace(target) if callable(target) and not is_object else None
    tree = target if traced is None else traced.abstract
    return Target(tree, flatten(tree), traced)


def _made(traced: Traced, flat: Flat, shardings: Mapping[str, Any]) -> dict[str, Any]:
    """Computes some of the leaves of a traced function, in their shards."""
    paths = traced.values_of(flat.full_paths())
    wanted = [shardings.get(path) for path in paths]
    values, _ = give_birth(traced, wanted, names=paths)
    names = [path for path in paths if path in shardings]
    return dict(zip(names, values, strict=True))


def _with_new_objects(tree: Any) -> Any:
    """The tree with a new object for each abstract NNX object, to be filled."""
    nodes, treedef = jax.tree.flatten(tree, is_leaf=is_nnx_object)
    abstract = [
        at
        for at, node in enumerate(nodes)
        if is_nnx_object(node)
        and any(
            isinstance(leaf, jax.ShapeDtypeStruct)
            for leaf in jax.tree.leaves(nnx_state(node))
        )
    ]
    if not abstract:
        return tree
    # Split together, so that what they share stays shared; the identity makes new
    # Variables, where the State still has those of the target.
    graphdef, state = nnx_split([nodes[at] for at in abstract])
    copies = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf, state))
    for at, copy in zip(abstract, copies, strict=True):
        nodes[at] = copy
    return jax.tree.unflatten(treedef, nodes)


def own_sharding(leaf: Leaf, value: Any) -> tuple[Any, str | None]:
    """The sharding that a leaf of the target has, or what is wrong with it."""
    if leaf.is_python or leaf.is_numpy:
        return None, None
    sharding = value.sharding
    if sharding is None:
        return None, "the target has no sharding for it; pass layout_map="
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        return None, "the target's sharding has no devices; pass layout_map="
    try:
        sharding.shard_shape(leaf.shape)
    except ValueError as error:
        return None, f"the target's sharding does not fit it: {error}"
    return sharding, None
