"""NNX objects that outlive the trace that they were made in.

What comes out of a trace is a copy. But an `__init__` may have kept `self`: in a
registry, in a method that is bound to it, in a closure. So the object itself gets what
the copy holds, and is the result.
"""

from collections.abc import Sequence
from typing import Any

import jax

from flax_layoutmap._flax_internals import (
    is_nnx_object,
    objects_of,
    was_made_here,
)
from flax_layoutmap._parts import is_object


def originals_of(node: Any) -> list[Any]:
    """The objects of a graph, in order, for `adopt`; to be asked inside of the trace.

    None for Variables, and for objects that were there before the trace.
    """
    return [
        part if is_nnx_object(part) and was_made_here(part) else None
        for part in objects_of(node)
    ]


def adopt(originals: Sequence[Any], copy: Any) -> Any:
    """Gives the content of a copy to the objects that it is a copy of.

    Args:
        originals: from `originals_of`.
        copy: a graph of the same structure, with Variables of its own.

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

    for new in filter(is_nnx_object, copies):
        attributes = {name: content(value) for name, value in vars(new).items()}
        # Past Flax, for which the original belongs to the trace still.
        object.__setattr__(ours(new), "__dict__", attributes)
    return ours(copy)
