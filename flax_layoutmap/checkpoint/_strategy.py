"""Choose how to read each leaf: directly into its shards, or with fewer bytes."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from flax_layoutmap._rules.records import Shape, show_shape, show_spec
from flax_layoutmap.checkpoint import _orbax
from flax_layoutmap.checkpoint._join import Plan, Read
from flax_layoutmap.checkpoint._leaves import in_portions
from flax_layoutmap.checkpoint._options import Options
from flax_layoutmap.checkpoint._reads import (
    Extent,
    PerProcess,
    aligned_sharding,
    extent_of,
    processes_of,
)
from flax_layoutmap.checkpoint._stored import Stored, no_checksums

Strategy = Literal["direct", "aligned", "broadcast"]

# Smaller leaves are read directly, as a collective takes longer.
_SMALL_BYTES = 1 << 20
# Another strategy is taken when it reads this many times less.
_WORTH = 1.25
# Arrays that change their dtype are read so many bytes at a time, as both dtypes are on
# the devices for a while.
_CAST_BYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class Way:
    """How one leaf is read.

    `sharding` is the one it is read in, None for NumPy arrays and Python values;
    `replica_axis` the number of the mesh axis to broadcast along. `host` is an upper
    bound of the bytes on the host of the busiest process.
    """

    strategy: Strategy
    sharding: Any
    replica_axis: int | None
    needed: PerProcess
    read: PerProcess
    host: int


@dataclasses.dataclass(frozen=True)
class Portion:
    """Leaves that are read together; `replica_axis` as in `Way`."""

    paths: tuple[str, ...]
    replica_axis: int | None


@dataclasses.dataclass(frozen=True)
class Reads:
    """How a checkpoint is read for a plan.

    `ways` omits leaves that need no read of an array. `recorded` has the checksum to
    compare of each path in the checkpoint; None skips the comparison. `problems`
    includes the plan's; nothing is read if there is one.
    """

    stored: Stored
    plan: Plan
    ways: Mapping[str, Way]
    portions: tuple[Portion, ...]
    recorded: Mapping[str, str] | None
    problems: tuple[str, ...]

    @property
    def own_bytes(self) -> int:
        """Bytes that this process reads."""
        own = jax.process_index()
        return int(sum(way.read.get(own, 0) for way in self.ways.values()))

    def same_checkpoint(self) -> dict[str, str]:
        """Text that differs if another process found another checkpoint."""
        stored = self.stored
        leaves = list(stored.leaves.items())
        return {"checkpoint": str((stored.where, stored.item, leaves, stored.custom))}

    def same_reads(self) -> dict[str, Any]:
        """Texts that differ if another process reads in another way."""
        ways = [(path, way.strategy) for path, way in self.ways.items()]
        how = [self.portions, self.recorded is None, ways]
        return {
            "leaves": [_line(*item) for item in self.plan.reads.items()],
            "strategy, host_memory or verify": str(how),
        }


def _line(path: str, read: Read) -> str:
    """How a leaf is restored, in a line that all processes must agree on."""
    where = read.sharding
    if isinstance(where, NamedSharding):
        where = f"{show_spec(where.spec)} {where.memory_kind or ''}"
    stored, result = read.stored, read.result
    kinds = f"{stored.path} {stored.kind} {stored.dtype} → {result.kind} {result.dtype}"
    return f"{path} {show_shape(result.shape)}, {where}, {kinds} {read.exactly}"


def choose_reads(
    stored: Stored, plan: Plan, options: Options, *, measure: bool
) -> Reads:
    """Choose how each leaf of a plan is read, and which leaves are read together.

    `measure` looks up the compressed size of each leaf, which the byte counts need.
    """
    sizes: dict[str, int] = {}
    if measure:
        with _orbax.translated(f"the checkpoint {stored.where} is damaged"):
            sizes = _orbax.stored_bytes(_orbax.folder_of(stored.where, stored.item))
    ways = {
        path: way
        for path, read in plan.reads.items()
        if (way := _way(stored, read, options, sizes)) is not None
    }
    problems = list(plan.problems)
    if options.host_memory is not None:
        problems += _too_large(plan, ways, options.host_memory)
    recorded = None if options.verify is False else stored.record.checksums
    if options.verify and recorded is None:
        problems.append(no_checksums(stored))
    portions = tuple(_portions(plan, ways, options.host_memory))
    return Reads(stored, plan, ways, portions, recorded, tuple(problems))


def _portions(
    plan: Plan, ways: Mapping[str, Way], host_memory: int | None
) -> Iterator[Portion]:
    def host_bytes(path: str) -> int:
        return ways[path].host if path in ways else 0

    groups: dict[tuple[int | None, bool], list[str]] = {}
    for path, read in plan.reads.items():
        if not read.stored.is_empty:
            axis = ways[path].replica_axis if path in ways else None
            is_cast = path in ways and read.stored.dtype != read.result.dtype
            groups.setdefault((axis, is_cast), []).append(path)
    for (axis, is_cast), paths in groups.items():
        limit = math.inf if host_memory is None else host_memory
        limit = min(limit, _CAST_BYTES) if is_cast else limit
        for portion in in_portions(paths, host_bytes, limit):
            yield Portion(tuple(portion), axis)


def _too_large(plan: Plan, ways: Mapping[str, Way], limit: int) -> list[str]:
    """A problem for each leaf that needs more than `limit` bytes on the host."""
    return [
        f"{plan.reads[path].stored.name}: needs {way.host:,} bytes on the host, more "
        f"than host_memory={limit:,}; a restore needs at least one leaf at a time: "
        "raise the limit, or shard the leaf further"
        for path, way in ways.items()
        if way.host > limit
    ]


# ------------------------------------------------------------------- one leaf


def _way(
    stored: Stored, read: Read, options: Options, sizes: Mapping[str, int]
) -> Way | None:
    """How a leaf is read; None if there is no array to read."""
    held = stored.held.get(read.stored.path)
    if held is None or not hasattr(held, "shape"):
        return None
    shape, sharding = tuple(held.shape), read.sharding
    size = np.dtype(held.dtype).itemsize
    count = math.prod(shape) * size
    in_files = sizes.get(read.stored.path.replace("/", "."), 0)
    ratio = in_files / count if in_files and count else 1.0
    if not isinstance(sharding, NamedSharding):  # each process reads all of it
        devices = getattr(sharding, "device_set", ())
        own = sorted({device.process_index for device in devices})
        own = own or list(range(jax.process_count()))
        each = PerProcess(tuple(own), np.full(len(own), count * ratio))
        return Way("direct", sharding, None, each, each, count)
    # Numbers of PRNG keys come back as keys, of one dim less.
    is_key = held.dtype == np.uint32 and not stored.is_ours
    is_key |= read.stored.kind == "key"
    chosen = _chosen(
        shape,
        _orbax.chunk_of(held) or shape,
        sharding,
        size,
        "direct" if is_key else options.strategy,
        options.devices_per_process,
    )
    return dataclasses.replace(
        chosen, needed=chosen.needed * ratio, read=chosen.read * ratio
    )


@functools.lru_cache(maxsize=4096)  # many leaves are alike
def _chosen(
    shape: Shape,
    chunk: Shape,
    sharding: NamedSharding,
    size: int,
    wanted: str,
    devices_per_process: int | None,
) -> Way:
    """The way to read leaves of one shape and layout, if nothing is compressed."""
    found = dict(_ways(shape, chunk, sharding, devices_per_process))
    strategy: Strategy = "direct"
    if wanted == "auto":
        strategy = _best(found, math.prod(shape) * size)
    elif wanted in found:  # else it is not possible for this leaf
        strategy = cast(Strategy, wanted)
    own, extent, axis = found[strategy]
    names = processes_of(sharding.mesh, devices_per_process).names
    needed = found["direct"][1].needed
    host = int(max(extent.read.max(), extent.needed.max(), needed.max())) * size
    return Way(
        strategy,
        own,
        axis,
        PerProcess(names, needed * float(size)),
        PerProcess(names, extent.read * float(size)),
        host,
    )


def _ways(
    shape: Shape, chunk: Shape, sharding: NamedSharding, devices: int | None
) -> Iterator[tuple[Strategy, tuple[Any, Extent, int | None]]]:
    """Each possible strategy: its sharding, extent, and mesh axis of the broadcast."""
    direct = extent_of(shape, chunk, sharding, devices)
    yield "direct", (sharding, direct, None)
    aligned = aligned_sharding(shape, chunk, sharding.mesh)
    yield "aligned", (aligned, extent_of(shape, chunk, aligned, devices), None)
    axis = _replica_axis(sharding, devices) if len(direct.needed) > 1 else None
    if axis is not None:
        first = _first_replica(sharding.mesh, axis, devices)
        own = Extent(direct.needed, np.where(first, direct.read, 0))
        yield "broadcast", (sharding, own, axis)


def _best(found: Mapping[Any, tuple[Any, Extent, Any]], size: int) -> Strategy:
    """The strategy by which the busiest process reads least; the simplest of equals."""
    if size < _SMALL_BYTES:
        return "direct"
    best: Strategy = "direct"
    least = float(found["direct"][1].read.max())
    for strategy, (_, extent, _) in found.items():
        most = float(extent.read.max())
        total, before = extent.read.sum(), found[best][1].read.sum()
        if most * _WORTH < least or (most <= least and total * _WORTH < before):
            best, least = strategy, most
    return best


def _replica_axis(
    sharding: NamedSharding, devices_per_process: int | None
) -> int | None:
    """A mesh axis of replication whose replicas share no process."""
    used = {
        axis
        for entry in sharding.spec
        for axis in ((entry,) if isinstance(entry, str) else entry or ())
    }
    mesh = sharding.mesh
    for at, (name, size) in enumerate(mesh.shape.items()):
        if name in used or size == 1:
            continue
        processes = processes_of(mesh, devices_per_process)
        grid = np.moveaxis(
            processes.of_device.reshape(tuple(mesh.shape.values())), at, 0
        )
        replicas = [set(part.reshape(-1).tolist()) for part in grid]
        if sum(map(len, replicas)) == processes.count:
            return at
    return None


def _first_replica(
    mesh: Mesh | AbstractMesh, axis: int, devices_per_process: int | None
) -> np.ndarray:
    """Mask of the processes that hold the first replica along an axis."""
    processes = processes_of(mesh, devices_per_process)
    grid = processes.of_device.reshape(tuple(mesh.shape.values()))
    first = np.take(grid, 0, axis=axis).reshape(-1)
    return np.isin(np.arange(processes.count), first)
