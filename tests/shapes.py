"""Trees of shapes, rules for them, and the decisions, for tests of resolving."""

from typing import Any

import jax
import jax.numpy as jnp

import flax_layoutmap as flm
from flax_layoutmap._rules.records import ResolvedLeaf

ABSTRACT = flm.DeviceMesh.abstract((2, 4), ("data", "model"))


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a leaf."""
    return jax.ShapeDtypeStruct(shape, dtype)


def nested(leaves: dict[str, Any]) -> dict[str, Any]:
    """The tree of dicts with these paths."""
    root: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        node = root
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = leaf
    return root


def mapped(
    rules: dict[str, Any] | None = None, mesh: Any = ABSTRACT, **options: Any
) -> flm.LayoutMap:
    """A map of rules, or of `flm.Rule` objects; on 2 (data) by 4 (model) devices."""
    made = flm.LayoutMap(mesh, **options)
    for key, value in (rules or {}).items():
        made.add(value) if isinstance(value, flm.Rule) else made.update({key: value})
    return made


def axes_of(leaf: ResolvedLeaf) -> tuple[Any, ...]:
    """One entry per dim of a leaf."""
    dims = leaf.layout.dims(len(leaf.shape))
    return tuple(dim[0] if len(dim) == 1 else dim or None for dim in dims)


def all_axes(resolution: flm.Resolution) -> dict[str, tuple[Any, ...]]:
    """Path → one entry per dim."""
    return {leaf.path: axes_of(leaf) for leaf in resolution}
