"""Move a tree of arrays to other layouts, in chunks.

For some pairs of layouts, XLA makes a full copy of the array on every device (95 of 582
pairs on eight devices, with jax 0.10.2 and 0.12.0). So leaves are moved in groups of
`max_bytes`, and larger leaves in slices.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from flax_layoutmap._core.errors import LayoutError, bullet_list
from flax_layoutmap._core.processes import Agreement
from flax_layoutmap._place.annotations import settle_metadata
from flax_layoutmap._place.place import (
    check_movable,
    is_placed,
    need_devices,
    put,
    with_leaves,
)
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.resolve import resolve, rule_set_of
from flax_layoutmap._rules.records import show_shape
from flax_layoutmap._show.terminal import shown_progress
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.flax_internals import no_mesh


def reshard(
    tree: Any,
    to: Any,
    *,
    max_bytes: int = 1 << 30,
    donate: bool = False,
    progress: bool | None = None,
) -> Any:
    """Move a whole tree to other layouts or another mesh, in chunks.

    A device holds at most its shards before and after, and the temporaries of one
    chunk. With several processes, all must call it, and both meshes must have the same
    devices.

    Args:
        tree: a module (updated in place and returned), or any tree of arrays.
        to: a `LayoutMap` or `RuleSet` with a mesh of devices.
        max_bytes: the size of a chunk: of leaves that are moved at the same time, or of
            a slice of a larger leaf.
        donate: delete the arrays of `tree` chunk by chunk, except where a device keeps
            its part. If interrupted, moved leaves are lost unless `tree` is a module.
        progress: whether to show a bar; None: on a terminal, after 2 seconds.

    Returns:
        The tree with its leaves in the new layouts; leaves that already have them are
        the same arrays. As with `jax.device_put`, shards that stay on their device may
        share memory with `tree`: a step that donates either tree deletes both.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> train, serve = (flm.LayoutMap(mesh) for mesh in ("fsdp=8", "tensor=8"))
        >>> train["kernel"], serve["kernel"] = ("fsdp", None), (None, "tensor")
        >>> params = train.place({"kernel": jax.numpy.ones((16, 16))})
        >>> params = flm.reshard(params, serve, donate=True)
        >>> tuple(params["kernel"].sharding.spec)
        (None, 'tensor')

    Plain JAX: `jax.device_put(tree, shardings)`.
    """
    if not isinstance(max_bytes, int | np.integer) or max_bytes < 1:
        raise LayoutError(f"max_bytes={max_bytes!r}: a chunk is a number of bytes")
    resolution = resolve(tree, rule_set_of(to, "reshard(tree, to)"))
    need_devices(resolution, "reshard")
    resolution.announce()
    leaves = flatten(tree).leaves
    check_movable("reshard", leaves, resolution)
    moves = _moves(leaves, resolution)
    with Agreement("moving a tree", resolution.mesh) as agreement:
        agreement.add(resolution.fingerprint_lines)
        paths = [move.path for move in moves]
        agreement.add(lambda: {"moved leaves": paths, "options": f"{max_bytes=}"})
    new, done = list(leaves), [0]
    total = sum(move.bytes for move in moves)
    kept = Counter(map(id, leaves))  # leaves that still need an array
    try:
        with shown_progress("moving", total, progress, lambda: sum(done)):
            for chunk in _chunks(moves, max_bytes):
                for move in chunk:
                    stays = _move(move, max_bytes, new)
                    kept[id(move.value)] -= 0 if stays else len(move.places)
                jax.block_until_ready([new[move.places[0]] for move in chunk])
                done.extend(move.bytes for move in chunk)
                for move in chunk if donate else ():
                    if isinstance(move.value, jax.Array) and not kept[id(move.value)]:
                        move.value.delete()
    except BaseException:  # an interrupt too leaves a module whole
        if donate:
            with_leaves(tree, new)
        raise
    return settle_metadata(with_leaves(tree, new), resolution)


class _Move(NamedTuple):
    """An array to move, its positions among the leaves, and its new sharding."""

    path: str
    places: list[int]
    value: Any
    sharding: NamedSharding

    @property
    def bytes(self) -> int:
        return getattr(self.value, "nbytes", 0)


def _moves(leaves: Sequence[Any], resolution: Resolution) -> list[_Move]:
    """A move for each array and new sharding, in the order of the leaves."""
    moves: dict[tuple[int, NamedSharding], _Move] = {}
    problems = []
    for at, sharding in enumerate(resolution.sharding_list()):
        leaf, path = leaves[at], resolution.paths[at]
        named = f"{path} {show_shape(np.shape(leaf))}"
        if isinstance(leaf, Tracer):
            problems.append(f"{named} is traced: call reshard outside of jit")
        elif isinstance(leaf, jax.Array) and leaf.is_deleted():
            problems.append(f"{named} was donated or deleted before")
        elif not is_placed(leaf, sharding):
            move = _Move(path, [], leaf, sharding)
            moves.setdefault((id(leaf), sharding), move).places.append(at)
    if problems:
        raise LayoutError(f"reshard moved nothing:\n{bullet_list(problems)}")
    return list(moves.values())


def _chunks(moves: Sequence[_Move], max_bytes: int) -> Iterator[list[_Move]]:
    """Consecutive moves of at most `max_bytes` together, or a larger one alone."""
    chunk: list[_Move] = []
    held = 0
    for move in moves:
        if chunk and held + move.bytes > max_bytes:
            yield chunk
            chunk, held = [], 0
        chunk.append(move)
        held += move.bytes
    if chunk:
        yield chunk


def _move(move: _Move, max_bytes: int, leaves: list[Any]) -> bool:
    """Move an array in the list of leaves; return whether a device keeps its part.

    JAX does not copy such a part, so deleting the old array would delete it too.
    """
    value, sharding = move.value, move.sharding
    is_array = isinstance(value, jax.Array)
    moved = _in_slices(value, sharding, max_bytes) if is_array else None
    is_kept = moved is None and _keeps_a_part(value, sharding)
    moved = put(value, sharding) if moved is None else moved
    for place in move.places:
        leaves[place] = moved
    return is_kept


def _keeps_a_part(x: Any, target: NamedSharding) -> bool:
    if not isinstance(x, jax.Array) or x.sharding.memory_kind != target.memory_kind:
        return False
    before = x.sharding.addressable_devices_indices_map(x.shape)
    after = target.addressable_devices_indices_map(x.shape)
    return any(before.get(device) == index for device, index in after.items())


# ------------------------------------------------------------------ slice by slice


def _in_slices(x: jax.Array, target: NamedSharding, max_bytes: int) -> Any:
    """Move an array in slices of about `max_bytes`; None if it should move whole.

    One dim is split into `parts` runs, a multiple of its shards before and after. A
    slice takes some elements of each run, so devices cut and write slices without
    communication.
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
    # Ignore the caller's mesh (`jax.set_mesh`) and transfer guard.
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
    """The sharding of a slice, whose dim is split into runs and their elements."""
    entries: list[Any] = [*sharding.spec, *(None,) * ndim][:ndim]
    entries.insert(dim + 1, None)
    return NamedSharding(sharding.mesh, PartitionSpec(*entries))


@functools.lru_cache(maxsize=64)
def _programs(
    sharding: NamedSharding, ndim: int, dim: int, run: int, size: int
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Functions that cut a slice from an array with this sharding, and write one."""

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
