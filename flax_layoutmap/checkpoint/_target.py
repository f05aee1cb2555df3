"""What to restore into: any tree of the user's, or a function that makes one."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding

from flax_layoutmap._birth.arrays import arrays_of
from flax_layoutmap._place.place import with_leaves
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.flax_internals import is_nnx_object, nnx_split, nnx_state
from flax_layoutmap._tree.paths import is_train_state
from flax_layoutmap._tree.trace import Traced, trace
from flax_layoutmap.checkpoint._leaves import Leaf


@dataclasses.dataclass(frozen=True)
class Opened:
    """A target, opened.

    Attributes:
        tree: a tree with paths.
        rebuild: makes the result of new leaves, in the order of the tree.
        made: for a function: path of some leaves → sharding, to path → value: runs
            what it does to make these.
    """

    tree: Any
    rebuild: Callable[[list[Any]], Any]
    made: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None


def opened(target: Any) -> Opened:
    """Opens a target: any tree, or a function that makes one, which is traced."""
    is_object = is_nnx_object(target) or is_train_state(target)
    if callable(target) and not is_object:
        traced = trace(target)
        return Opened(traced.abstract, traced.rebuild, functools.partial(_made, traced))
    return Opened(target, lambda leaves: with_leaves(_with_new_objects(target), leaves))


def _made(traced: Traced, shardings: Mapping[str, Any]) -> dict[str, Any]:
    """Computes some of the leaves of a traced function, in their shards."""
    paths = flatten(traced.abstract).full_paths()
    wanted = [shardings.get(path) for path in traced.values_of(paths)]
    values, _ = arrays_of(traced, wanted, names=traced.values_of(paths))
    names = [path for path in traced.values_of(paths) if path in shardings]
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


def shardings_by_path(resolution: Resolution | None) -> dict[str, NamedSharding]:
    """Path → sharding; empty without rules."""
    if resolution is None:
        return {}
    return dict(zip(resolution.paths, resolution.sharding_list(), strict=True))
