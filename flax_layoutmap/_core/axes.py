"""Read the dims of a layout from axes, a spec, or DTensor's words."""

import dataclasses
import math
from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from flax_layoutmap._core.dtensor_format import UNSHARDED
from flax_layoutmap._core.errors import RuleError

# One dim: not sharded, on one axis (or MATCH), on several axes, or (once) any number
# of dims.
Dim = None | str | tuple[str, ...] | EllipsisType


def clash(dim: int, size: int, names: Sequence[str], sizes: dict[str, int]) -> str:
    """Describe a dim whose size is not divisible by its mesh axes."""
    if len(names) == 1:
        axes = f"mesh axis {names[0]!r} of size {sizes[names[0]]}"
    else:
        listed = " × ".join(f"{name!r} ({sizes[name]})" for name in names)
        axes = f"mesh axes {listed}, {math.prod(sizes[n] for n in names)} together"
    return f"dim {dim} of size {size} is not divisible by {axes}"


def divides(
    shape: Sequence[int], dims: Sequence[Sequence[str]], sizes: dict[str, int]
) -> str | None:
    """Describe the first dim that is not divisible by its axes; None if all are."""
    return next(iter(divisible(shape, dims, sizes)[1]), None)


def divisible(
    shape: Sequence[int], dims: Sequence[Sequence[str]], sizes: dict[str, int]
) -> tuple[tuple[tuple[str, ...], ...], list[str]]:
    """The dims, with indivisible ones replicated, and a text about each of these."""
    clashes: list[str] = []
    kept = [tuple(names) for names in dims]
    for dim, (size, names) in enumerate(zip(shape, dims, strict=True)):
        if size % math.prod(sizes[name] for name in names):
            clashes.append(clash(dim, size, names, sizes))
            kept[dim] = ()
    return tuple(kept), clashes


def dim_axes(dim: Dim) -> tuple[str, ...]:
    if dim is None or dim is ...:
        return ()
    return (dim,) if isinstance(dim, str) else dim


def normal_spec(dims: Sequence[tuple[str, ...]]) -> PartitionSpec:
    """The normal `PartitionSpec` for these dims: no trailing None, no 1-tuples.

    JAX recompiles a function for `P("data", None)` after `P("data")`.
    """
    entries = [
        None if not names else names[0] if len(names) == 1 else names for names in dims
    ]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def spec_entries(spec: PartitionSpec) -> tuple[Any, ...]:
    """A `PartitionSpec` as axes: missing trailing dims are not sharded."""
    if spec.unreduced or spec.reduced:
        raise RuleError(
            f"{spec!r} has reduced or unreduced axes, which a layout cannot have: give "
            "only the axes of the dims"
        )
    return (*spec, ...)


def read_dims(axes: tuple[Any, ...], given: Any) -> tuple[Dim, ...]:
    """The dims of a layout in normal form; errors quote `given`."""
    if sum(dim is ... for dim in axes) > 1:
        raise RuleError(f"a layout may hold one '...', got {given!r}")
    dims: list[Dim] = []
    for dim in axes:
        if dim is PartitionSpec.UNCONSTRAINED:
            raise RuleError(
                f"{given!r} leaves a dim unconstrained, which a layout cannot do: use "
                "None for a dim that is not sharded"
            )
        if isinstance(dim, tuple | list) and all(isinstance(n, str) for n in dim):
            dim = tuple(dim) if len(dim) > 1 else dim[0] if dim else None
        elif dim is not None and dim is not ... and not isinstance(dim, str):
            raise RuleError(not_a_layout(given))
        dims.append(None if dim == UNSHARDED else dim)
    if ... in dims and not any(map(dim_axes, dims)):
        # Only unsharded dims and a "...": replicated, if at least that many dims.
        return (...,)
    return tuple(dims)


def not_a_layout(value: Any) -> str:
    """Say that a value is not a layout, and what to write instead."""
    if isinstance(value, str):
        return (
            f"a layout cannot be a string, got {value!r}; write a tuple with one entry "
            f"per dim, such as ({value!r},) for a 1-D array or (None, {value!r})"
        )
    if isinstance(value, jax.Array):
        return "a layout cannot be an array; pass array.sharding"
    return (
        f"not a layout: {value!r}; use a tuple such as (None, 'model'), None for "
        "replicated, a PartitionSpec, a NamedSharding or a flm.TensorLayout"
    )


Shape = tuple[int, ...]


def shard_offsets(shape: Sequence[int], dims: Sequence[Sequence[int]]) -> np.ndarray:
    """The index along each dim of each device's shard; devices in row-major order.

    `dims` lists, per dim of the array, the positions of the mesh axes that shard it.
    """
    coords = np.indices(shape).reshape(len(shape), math.prod(shape))
    offsets = np.zeros((math.prod(shape), len(dims)), np.int64)
    for dim, axes in enumerate(dims):
        for axis in axes:
            offsets[:, dim] = offsets[:, dim] * shape[axis] + coords[axis]
    return offsets


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """How an array is sharded: the mesh axes, by position, that shard each dim."""

    mesh_shape: Shape
    dims: tuple[tuple[int, ...], ...]

    def shard(self, shape: Shape) -> np.ndarray:
        """The shard shape of an array of this shape."""
        sizes = np.array(self.mesh_shape, np.int64)
        parts = [sizes[[*axes]].prod() for axes in self.dims]
        return np.array(shape, np.int64) // np.array(parts, np.int64)


def received(
    shape: Shape,
    before: Placement,
    after: Placement,
    same: Sequence[int] | None = None,
) -> np.ndarray:
    """How many elements each device receives when the layout changes.

    `same` lists, per device of the new mesh, its number in the old mesh, or -1. None
    means that equal numbers are the same device.
    """
    old, new = before.shard(shape), after.shard(shape)
    held = shard_offsets(before.mesh_shape, before.dims) * old
    wanted = shard_offsets(after.mesh_shape, after.dims) * new
    if same is None:
        same = [number if number < len(held) else -1 for number in range(len(wanted))]
    where = np.asarray(same)
    ends = np.minimum(wanted + new, held[where] + old)
    kept = np.maximum(ends - np.maximum(wanted, held[where]), 0).prod(axis=1)
    kept[where < 0] = 0
    return new.prod() - kept
