"""Move a large array in slices, which are local to each device before and after."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from flax_layoutmap._place.place import put
from flax_layoutmap._tree.flax_internals import no_mesh


@dataclasses.dataclass(frozen=True)
class Cut:
    """How an array is cut along one dim, the same way before and after the move.

    The dim is seen as runs of `run` elements; their number is a multiple of its shards
    before and after. A slice takes `step` elements of each run, so it is cut from, and
    written into, each shard without communication.
    """

    dim: int
    run: int
    step: int


def cut_of(x: Any, target: NamedSharding, max_bytes: int) -> Cut | None:
    """The cut of a large array into slices of at most `max_bytes`, of the longest run.

    None: it is no larger, or every device keeps its part; it is on the host, or not in
    the devices' default memory before and after; each of its dims is sharded to single
    elements; or it has JAX's weak type, which a slice would lose, or is of PRNG keys.
    """
    if not isinstance(x, jax.Array) or x.nbytes <= max_bytes or not x.ndim:
        return None
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or x.weak_type:
        return None
    source = _on_mesh(x.sharding)
    default = next(iter(target.device_set)).default_memory().kind
    if source is None or {memory_kind(source), memory_kind(target)} != {default}:
        return None
    if source.devices_indices_map(x.shape) == target.devices_indices_map(x.shape):
        return None
    before, after = (s.shard_shape(x.shape) for s in (source, target))
    runs = []
    for n, b, a in zip(x.shape, before, after, strict=True):
        shards = math.lcm(n // b, n // a)
        runs.append(n // shards if n % shards == 0 else 1)
    dim = max(range(x.ndim), key=lambda at: runs[at])
    if runs[dim] == 1:
        return None
    slices = min(runs[dim], math.ceil(x.nbytes / max_bytes))
    return Cut(dim, runs[dim], runs[dim] // slices)


def _on_mesh(sharding: Sharding) -> NamedSharding | None:
    """The sharding, or for a single device that on a mesh of it; or None."""
    if isinstance(sharding, NamedSharding):
        return sharding
    if len(sharding.device_set) > 1:
        return None
    mesh = Mesh(np.array(list(sharding.device_set)), ("device",))
    return NamedSharding(mesh, PartitionSpec(), memory_kind=sharding.memory_kind)


def memory_kind(sharding: Sharding) -> str:
    """The kind of memory of a sharding, by its name."""
    default = next(iter(sharding.device_set)).default_memory().kind
    return sharding.memory_kind or default


def in_slices(
    x: Any, target: NamedSharding, cut: Cut, report: Callable[[int], None]
) -> Any:
    """Move an array slice by slice; `report` gets the bytes of each."""
    # Of the caller, neither the mesh (`jax.set_mesh`) nor the transfer guard applies.
    with no_mesh(), jax.transfer_guard("allow"):
        x = jax.device_put(x, _on_mesh(x.sharding))
        moved = jnp.zeros(x.shape, x.dtype, device=target)
        for start in range(0, cut.run, cut.step):
            size = min(cut.step, cut.run - start)
            part = _taker(cut, size, x.sharding)(x, np.uint32(start))
            part = put(part, target)
            report(part.nbytes)
            moved = _writer(cut, size, target)(moved, part, np.uint32(start))
            moved.block_until_ready()
    return moved


@functools.lru_cache(maxsize=64)
def _taker(cut: Cut, size: int, sharding: NamedSharding) -> Callable[..., Any]:
    """A function of an array and a start: the slice, in the layout of the array."""

    def take(shard: Any, start: Any) -> Any:
        runs = _as_runs(shard, cut)
        part = jax.lax.dynamic_slice_in_dim(runs, start, size, cut.dim + 1)
        return part.reshape(_with_dim(shard.shape, cut.dim, -1))

    return jax.jit(_local(take, sharding, 1))


@functools.lru_cache(maxsize=64)
def _writer(cut: Cut, size: int, sharding: NamedSharding) -> Callable[..., Any]:
    """A function of an array, a slice and its start: the array with the slice."""

    def write(shard: Any, part: Any, start: Any) -> Any:
        runs = _as_runs(shard, cut)
        part = part.reshape(_with_dim(runs.shape, cut.dim + 1, size))
        runs = jax.lax.dynamic_update_slice_in_dim(runs, part, start, cut.dim + 1)
        return runs.reshape(shard.shape)

    return jax.jit(_local(write, sharding, 2), donate_argnums=0)


def _as_runs(shard: Any, cut: Cut) -> Any:
    """A shard with its cut dim as two: its parts, and the run of each."""
    shape = shard.shape
    return shard.reshape(
        (*shape[: cut.dim], shape[cut.dim] // cut.run, cut.run, *shape[cut.dim + 1 :])
    )


def _with_dim(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _local(function: Any, sharding: NamedSharding, arrays: int) -> Callable[..., Any]:
    """The function of shards as one of `arrays` arrays of a sharding and a number."""
    spec = sharding.spec
    return jax.shard_map(
        function,
        mesh=sharding.mesh,
        in_specs=(*itertools.repeat(spec, arrays), PartitionSpec()),
        out_specs=spec,
        check_vma=False,
    )
