"""Move a large array in slices, which are local to each device before and after."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from flax_layoutmap._place.place import put
from flax_layoutmap._tree.flax_internals import no_mesh


def in_slices(x: jax.Array, target: NamedSharding, max_bytes: int) -> Any:
    """Move an array in slices of about `max_bytes`; None if it had better move whole.

    One dim is seen as `parts` runs, a multiple of its shards before and after. A slice
    takes some elements of each run, so that no device needs another's to cut or to
    write it.
    """
    source, shape = x.sharding, x.shape
    default = next(iter(target.device_set)).default_memory().kind
    if (
        x.nbytes <= max_bytes
        or jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        or not isinstance(source, NamedSharding)
        or {source.memory_kind, target.memory_kind} != {default}
        or source.devices_indices_map(shape) == target.devices_indices_map(shape)
    ):
        return None
    shards = zip(shape, *(s.shard_shape(shape) for s in (source, target)), strict=True)
    parts = [math.lcm(size // before, size // after) for size, before, after in shards]
    runs = [size // count for size, count in zip(shape, parts, strict=True)]
    dim = max(range(x.ndim), key=runs.__getitem__)
    slices = min(runs[dim], math.ceil(x.nbytes / max_bytes))
    step = runs[dim] // slices
    # Of the caller, neither the mesh (`jax.set_mesh`) nor the transfer guard applies.
    with no_mesh(), jax.transfer_guard("allow"):
        moved = jnp.zeros(shape, x.dtype, device=target)
        for start in range(0, runs[dim], step):
            size, first = min(step, runs[dim] - start), np.uint32(start)
            take, _ = _programs(source, x.ndim, dim, runs[dim], size)
            _, write = _programs(target, x.ndim, dim, runs[dim], size)
            part = put(take(x, first), _with_runs(target, x.ndim, dim))
            moved = jax.block_until_ready(write(moved, part, first))
    return moved


def _with_runs(sharding: NamedSharding, ndim: int, dim: int) -> NamedSharding:
    """The sharding of a slice, in which the dim is two: parts, elements of each run."""
    entries: list[Any] = [*sharding.spec, *(None,) * ndim][:ndim]
    entries.insert(dim + 1, None)
    return NamedSharding(sharding.mesh, PartitionSpec(*entries))


@functools.lru_cache(maxsize=64)
def _programs(
    sharding: NamedSharding, ndim: int, dim: int, run: int, size: int
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Functions that cut a slice from an array of a sharding, and write one into it."""

    def as_runs(shard: Any) -> Any:
        return shard.reshape(*shard.shape[:dim], -1, run, *shard.shape[dim + 1 :])

    def take(shard: Any, start: Any) -> Any:
        return jax.lax.dynamic_slice_in_dim(as_runs(shard), start, size, dim + 1)

    def write(shard: Any, part: Any, start: Any) -> Any:
        runs = as_runs(shard)
        runs = jax.lax.dynamic_update_slice_in_dim(runs, part, start, dim + 1)
        return runs.reshape(shard.shape)

    whole, part = sharding.spec, _with_runs(sharding, ndim, dim).spec
    of_shards = functools.partial(jax.shard_map, mesh=sharding.mesh, check_vma=False)
    cut = of_shards(take, in_specs=(whole, PartitionSpec()), out_specs=part)
    paste = of_shards(write, in_specs=(whole, part, PartitionSpec()), out_specs=whole)
    return jax.jit(cut), jax.jit(paste, donate_argnums=0)
