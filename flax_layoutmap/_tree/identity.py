"""NNX objects that outlive the trace that they were made in.

What comes out of a trace is a copy. But an `__init__` may have kept `self`: in a
registry, in a method that is bound to it, in a closure; or a Variable in an object of
its own. So the objects themselves get what the copies hold, and are the result.
"""

from collections.abc import Sequence
from typing import Any

import jax

from flax_layoutmap._tree.flax_internals import (
    is_nnx_object,
    objects_of,
    replace_content,
    was_made_here,
)
from flax_layoutmap._tree.parts import is_object


def originals_of(node: Any) -> list[Any]:
    """The objects of a graph, in order, for `adopt`; to be asked inside of the trace.

    None for those that were there before the trace.
    """
    return [part if was_made_here(part) else None for part in objects_of(node)]


def adopt(originals: Sequence[Any], copy: Any) -> Any:
    """Gives the content of a copy to the objects that it is a copy of.

    Args:
        originals: from `originals_of`.
        copy: a graph of the same structure.

    Returns:
        The graph, of the originals where there are such.
    """
    copies = objects_of(copy)
    own = {
        id(new): old
        for old, new in zip(originals, copies, strict=True)
        if old is not None
    }

    def ours(value: Any) -> Any:
        return own.get(id(value), value)

    def content(value: Any) -> Any:
        if is_object(value):
            return ours(value)
        parts = jax.tree.leaves(value, is_leaf=is_object)
        if not any(id(part) in own for part in parts):
            return value
        return jax.tree.map(ours, value, is_leaf=is_object)

    for new in copies:
        if not is_nnx_object(new):
            if ours(new) is not new:
                replace_content(ours(new), new)
            continue
        attributes = {name: content(value) for name, value in vars(new).items()}
        # Past Flax, for which the original belongs to the trace still.
        object.__setattr__(ours(new), "__dict__", attributes)
    return ours(copy)
