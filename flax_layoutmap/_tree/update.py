"""New values for an NNX object, also where a tuple holds them."""

from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from flax_layoutmap._tree.flax_internals import (
    attributes_of,
    is_nnx_object,
    named_objects_of,
)
from flax_layoutmap._tree.parts import is_object


def update(node: Any, state: Any) -> None:
    """Gives an NNX object the values of a State.

    As `nnx.update`, which cannot write an array that a tuple holds, or another
    container that does not change: such an attribute becomes a new container.
    """
    if not isinstance(state, nnx.State):  # that of a Variable is one
        nnx.update(node, state)
        return
    new = dict(nnx.to_flat_state(state))
    before = len(new)
    for path, owner in named_objects_of(node):
        found = attributes_of(owner) if is_nnx_object(owner) else None
        for name, value in found[0].items() if found else ():
            if not _is_fixed(value):
                continue
            leaves = []
            parts, treedef = _flatten(value)
            for keys, leaf in parts:
                where = (*path, name, *map(_plain, keys))
                is_other = is_object(leaf) or where not in new
                leaves.append(leaf if is_other else new.pop(where))
            if any(a is not b for a, (_, b) in zip(leaves, parts, strict=True)):
                # The class's own __setattr__ may do more than to set.
                changed = nnx.data(jax.tree.unflatten(treedef, leaves))
                nnx.Pytree.__setattr__(owner, name, changed)
    nnx.update(node, state if len(new) == before else nnx.from_flat_state(new.items()))


def _flatten(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
    return jax.tree_util.tree_flatten_with_path(value, is_leaf=is_object)


def _is_fixed(value: Any) -> bool:
    """Whether a value is, or holds, a container with arrays that does not change."""
    return any(
        not is_object(leaf) and hasattr(leaf, "shape")
        for part in _fixed_parts(value)
        for _, leaf in _flatten(part)[0]
    )


def _fixed_parts(value: Any) -> Iterator[Any]:
    """The outermost containers in a value that are no dict and no list."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _fixed_parts(part)
    elif not is_object(value) and not jax.tree_util.all_leaves([value]):
        yield value


def _plain(key: Any) -> Any:
    """What a key of JAX says, as Flax has it in paths."""
    for name in ("key", "idx", "name"):
        if hasattr(key, name):
            return getattr(key, name)
    return key
