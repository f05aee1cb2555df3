"""What to restore into: any tree of the user's, or a function that makes one."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from flax_layoutmap._flax_internals import is_nnx_object, nnx_split, nnx_state
from flax_layoutmap._paths import is_train_state
from flax_layoutmap._place import with_leaves
from flax_layoutmap._trace import trace


def opened(target: Any) -> tuple[Any, Callable[[list[Any]], Any]]:
    """A target as a tree with paths, and what makes the result of new leaves."""
    is_object = is_nnx_object(target) or is_train_state(target)
    if callable(target) and not is_object:
        traced = trace(target)
        return traced.abstract, traced.rebuild
    return target, lambda leaves: with_leaves(_with_new_objects(target), leaves)


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
