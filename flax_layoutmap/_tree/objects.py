"""Find NNX objects in arguments, and move them out of the trace that made them.

The result of a trace is a copy. But an `__init__` may have stored `self`, in a registry
or a bound method, or a Variable in a plain object. So the original objects get the
content of the copies, and are returned.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer

from flax_layoutmap._core.errors import StructureError
from flax_layoutmap._tree.flax_internals import (
    constants_of,
    is_nnx_object,
    is_object,
    is_plain_variable,
    metadata_of,
    objects_of,
    replace_content,
    variables_of,
    was_made_here,
)

# Kinds of NumPy dtypes that no device holds: objects, texts, dates.
NO_NUMBERS = "OSUMm"


def has_mixed_keys(node: Any) -> bool:
    """Whether a node is a dict that JAX cannot flatten, as its keys do not sort."""
    return isinstance(node, dict) and len(set(map(type, node))) > 1


def leaves_in(tree: Any) -> list[Any]:
    """The leaves of arguments, including the arrays in NNX objects."""
    held = [v.get_raw_value() for node in objects_in(tree) for v in variables_of(node)]
    return [part for part in _flat(tree) if not is_object(part)] + jax.tree.leaves(held)


def objects_in(tree: Any) -> list[Any]:
    """The NNX objects and Variables in a tree, each once."""
    return list({id(part): part for part in _flat(tree) if is_object(part)}.values())


def _flat(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda x: is_object(x) or has_mixed_keys(x))


def unfit(leaf: Any) -> str | None:
    """Describe a NumPy array that JAX cannot hold without changing its values."""
    if not isinstance(leaf, np.ndarray | np.generic):
        return None
    if leaf.dtype.kind in NO_NUMBERS or leaf.dtype.names:
        return f"a NumPy array of {leaf.dtype}"
    held = jax.dtypes.canonicalize_dtype(leaf.dtype)
    if leaf.dtype.kind in "iu" and np.any(leaf.astype(held) != leaf):
        return f"a NumPy array of {leaf.dtype} with numbers that {held} does not hold"
    return None


# ------------------------------------------------ objects that a trace has made


def originals_of(node: Any) -> list[Any]:
    """The objects of a graph, with None for those that this trace did not make."""
    return [part if was_made_here(part) else None for part in objects_of(node)]


def adopt(originals: Sequence[Any], copy: Any) -> Any:
    """Give the content of a copied graph to the originals, and return these."""
    copies = objects_of(copy)
    kept = {
        id(new): old
        for old, new in zip(originals, copies, strict=True)
        if old is not None
    }

    def original(value: Any) -> Any:
        return kept.get(id(value), value)

    def content(value: Any) -> Any:
        if is_object(value):
            return original(value)
        parts = jax.tree.leaves(value, is_leaf=is_object)
        if not any(id(part) in kept for part in parts):
            return value
        return jax.tree.map(original, value, is_leaf=is_object)

    for new in copies:
        if not is_nnx_object(new):
            if original(new) is not new:
                replace_content(original(new), new)
            continue
        attributes = {name: content(value) for name, value in vars(new).items()}
        # Not through Flax, for which the original still belongs to the trace.
        object.__setattr__(original(new), "__dict__", attributes)
    return original(copy)


# ------------------------------------------------ objects that depend on a trace


def settle_constants(node: Any) -> None:
    """Turn static attributes that are traced arrays into data of their NNX objects.

    Flax decides what is data when an attribute is set, and Flax 0.12.8 with jax 0.10.2
    does not recognise a traced array. Other static attributes that contain one raise
    StructureError.
    """
    refuse_references(node)
    # Objects that this trace made become part of the result.
    objects = objects_of(node)
    made = {id(part) for part in objects if was_made_here(part)}
    for owner in filter(is_nnx_object, objects):
        for name, value in constants_of(owner).items():
            if isinstance(value, Tracer):
                # Bypass the class's own __setattr__, which may have effects.
                nnx.Pytree.__setattr__(owner, name, nnx.data(value))
                continue
            held = [part for part in _flat(value) if id(part) not in made]
            if any(isinstance(leaf, Tracer) for leaf in leaves_in(held)):
                raise StructureError(
                    f"{type(owner).__name__}.{name} is a static {type(value).__name__} "
                    "with an array in it: set it as nnx.data(...), or keep the array "
                    "in an nnx.Variable of the module"
                )


def refuse_references(node: Any) -> None:
    """Raise if a Variable of an NNX object is a reference to its value."""
    for variable in variables_of(node):
        if not is_plain_variable(variable):
            is_hijax = metadata_of(variable).get("hijax")
            raise reference_error("hijax" if is_hijax else "ref")


def reference_error(kind: str) -> StructureError:
    return StructureError(
        f"a Variable with {kind}=True is a reference, which cannot be made in shards: "
        "make the model and its optimizer without it, and convert both then: "
        f"nnx.with_vars((model, optimizer), {kind}=True)"
    )
