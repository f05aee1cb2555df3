"""NNX objects and leaves in the arguments of a constructor."""

import collections
from typing import Any

import jax
import numpy as np
from flax import nnx

from flax_layoutmap._tree.flax_internals import is_nnx_object, variables_of

# Kinds of NumPy dtypes that no device holds: objects, texts, dates.
NO_NUMBERS = "OSUMm"


def is_object(node: Any) -> bool:
    """Whether a node is an NNX object or a Variable."""
    return is_nnx_object(node) or isinstance(node, nnx.Variable)


def has_mixed_keys(node: Any) -> bool:
    """Whether a node is a dict that JAX cannot flatten, as its keys have no order."""
    if type(node) not in (dict, collections.defaultdict):
        return False
    try:
        sorted(node)
    except TypeError:
        return True
    return False


def leaves_in(tree: Any) -> list[Any]:
    """The leaves of arguments: arrays, also those in NNX objects, and all else."""
    own = [v.get_raw_value() for node in objects_in(tree) for v in variables_of(node)]
    return [part for part in _parts(tree) if not is_object(part)] + jax.tree.leaves(own)


def objects_in(tree: Any) -> list[Any]:
    """The NNX objects and Variables in a tree, each once."""
    return list({id(part): part for part in _parts(tree) if is_object(part)}.values())


def _parts(tree: Any) -> list[Any]:
    """NNX objects, Variables and leaves of a tree; dicts may have any keys."""
    found: list[Any] = []
    for part in jax.tree.leaves(
        tree, is_leaf=lambda node: is_object(node) or has_mixed_keys(node)
    ):
        found += _parts(list(part.values())) if has_mixed_keys(part) else [part]
    return found


def unfit(leaf: Any) -> str | None:
    """What a leaf is, where JAX makes no array of it, or one with other numbers."""
    if isinstance(leaf, np.ma.MaskedArray):
        return "a masked NumPy array"
    if isinstance(leaf, bool) or not isinstance(leaf, np.ndarray | np.generic | int):
        return None
    if isinstance(leaf, np.ndarray | np.generic):
        if leaf.dtype.kind in NO_NUMBERS or leaf.dtype.names:
            return f"a NumPy array of {leaf.dtype}"
        if leaf.dtype.kind not in "iu" or not leaf.size:
            return None
    lowest, highest = int(np.min(leaf)), int(np.max(leaf))
    dtype = getattr(leaf, "dtype", np.int64)
    held = np.iinfo(jax.dtypes.canonicalize_dtype(dtype))
    if held.min <= lowest and highest <= held.max:
        return None
    number = lowest if lowest < held.min else highest
    where = "" if isinstance(leaf, int) else f"a NumPy array of {leaf.dtype} with "
    return f"{where}the number {number}, which {held.dtype} does not hold"
