"""How each leaf is read: straight into its shards, or another way that reads less."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from flax_layoutmap._core.errors import CheckpointError, did_you_mean
from flax_layoutmap._rules.records import Shape, show_shape
from flax_layoutmap.checkpoint import _orbax
from flax_layoutmap.checkpoint._ocdbt import stored_bytes
from flax_layoutmap.checkpoint._plan import Read
from flax_layoutmap.checkpoint._reads import (
    Extent,
    PerProcess,
    aligned_sharding,
    extent_of,
    processes_of,
)
from flax_layoutmap.checkpoint._stored import Stored

Strategy = Literal["direct", "aligned", "broadcast"]
STRATEGIES = ("auto", "direct", "aligned", "broadcast")

# Below this many bytes a leaf is read directly: a collective takes longer.
_SMALL_BYTES = 1 << 20
# Another strategy is taken when it reads this many times less.
_WORTH = 1.25


@dataclasses.dataclass(frozen=True)
class Way:
    """How one leaf is read.

    Attributes:
        strategy: `"direct"`, `"aligned"` or `"broadcast"`.
        sharding: the sharding it is read in; None for NumPy arrays and Python values.
        replica_axis: for `"broadcast"`, the number of the mesh axis.
        needed: process → bytes of the files that hold its shards.
        read: process → bytes of the files that it reads.
        host: bytes that the busiest process holds on the host for it, at most.
    """

    strategy: Strategy
    sharding: Any
    replica_axis: int | None
    needed: PerProcess
    read: PerProcess
    host: int


@dataclasses.dataclass(frozen=True)
class _Chosen:
    """A way, for all leaves of one shape and layout; elements per process."""

    strategy: Strategy
    sharding: Any
    replica_axis: int | None
    names: tuple[int, ...]
    needed: np.ndarray
    read: np.ndarray
    host: int


class Chooser:
    """Chooses the way for each leaf of a plan.

    Args:
        stored: the checkpoint.
        strategy: one for all leaves that can; `"auto"` for the best for each.
        devices_per_process: for a mesh without devices.
        exact: whether to ask the files how well each leaf is compressed.
    """

    def __init__(
        self,
        stored: Stored,
        strategy: str,
        devices_per_process: int | None = None,
        exact: bool = True,
    ) -> None:
        if strategy not in STRATEGIES:
            raise CheckpointError(
                f"strategy={strategy!r} is none of {', '.join(STRATEGIES)}"
                f"{did_you_mean(strategy, STRATEGIES)}"
            )
        self._stored = stored
        self._strategy = strategy
        self._devices = devices_per_process
        self._known: dict[Any, _Chosen] = {}
        self._sizes: dict[str, int] = {}
        if exact:
            with _orbax.translated(f"the checkpoint {stored.where} is damaged"):
                self._sizes = stored_bytes(_orbax.folder_of(stored.where, stored.item))

    def way(self, read: Read) -> Way | None:
        """How a leaf is read; None where nothing has to be."""
        held = self._stored.held.get(read.stored.path)
        if held is None or not hasattr(held, "shape"):
            return None
        shape, sharding = tuple(held.shape), read.sharding
        chunk = _orbax.chunk_of(held) or shape
        size = np.dtype(held.dtype).itemsize
        if not isinstance(sharding, NamedSharding):
            return self._whole(read, shape, size)
        # Numbers of PRNG keys come back as keys, of one dim less.
        is_key = held.dtype == np.uint32 and not self._stored.is_ours
        is_key |= read.stored.kind == "key"
        question = shape, chunk, sharding, size, is_key
        chosen = self._known.get(question)
        if chosen is None:  # many leaves are alike
            chosen = self._known[question] = self._chosen(*question)
        own_bytes = size * self._ratio(read.stored.path, shape, size)
        return Way(
            chosen.strategy,
            chosen.sharding,
            chosen.replica_axis,
            PerProcess(chosen.names, chosen.needed * own_bytes),
            PerProcess(chosen.names, chosen.read * own_bytes),
            chosen.host,
        )

    def _chosen(
        self, shape: Shape, chunk: Shape, sharding: NamedSharding, size: int, key: bool
    ) -> _Chosen:
        found: dict[Strategy, tuple[Any, Extent, int | None]] = dict(
            self._ways(shape, chunk, sharding)
        )
        if key:
            found = {"direct": found["direct"]}
        strategy: Strategy = "direct"
        if self._strategy == "auto":
            strategy = _best(found, math.prod(shape) * size)
        elif self._strategy in found:  # else it is not possible for this leaf
            strategy = cast(Strategy, self._strategy)
        own, extent, axis = found[strategy]
        names = processes_of(sharding.mesh, self._devices).names
        needed = found["direct"][1].needed
        host = int(max(extent.read.max(), extent.needed.max(), needed.max())) * size
        return _Chosen(strategy, own, axis, names, needed, extent.read, host)

    def _ways(
        self, shape: Any, chunk: Any, sharding: NamedSharding
    ) -> Iterator[tuple[Strategy, tuple[Any, Extent, int | None]]]:
        direct = extent_of(shape, chunk, sharding, self._devices)
        yield "direct", (sharding, direct, None)
        aligned = aligned_sharding(shape, chunk, sharding.mesh)
        yield (
            "aligned",
            (aligned, extent_of(shape, chunk, aligned, self._devices), None),
        )
        if len(direct.needed) == 1:
            return
        axis = _replica_axis(sharding, len(shape), self._devices)
        if axis is not None:
            first = _first_replica(sharding.mesh, axis, self._devices)
            own = Extent(direct.needed, np.where(first, direct.read, 0))
            yield "broadcast", (sharding, own, axis)

    def _whole(self, read: Read, shape: Any, size: int) -> Way:
        """A NumPy array, or one with a sharding of another kind: each reads all."""
        count = math.prod(shape) * size
        held = count * self._ratio(read.stored.path, shape, size)
        devices = getattr(read.sharding, "device_set", ())
        own = sorted({device.process_index for device in devices})
        own = own or list(range(jax.process_count()))  # each reads its own
        each = PerProcess(tuple(own), np.full(len(own), float(held)))
        return Way("direct", read.sharding, None, each, each, count)

    def _ratio(self, path: str, shape: Any, size: int) -> float:
        """Bytes in the files ÷ bytes of the array."""
        name = path.replace("/", ".")
        count = math.prod(shape) * size
        return self._sizes[name] / count if self._sizes.get(name) and count else 1.0


def _best(found: Mapping[Any, tuple[Any, Extent, Any]], size: int) -> Strategy:
    """The way on which the busiest process reads least; the simplest of those."""
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
    sharding: NamedSharding, ndim: int, devices_per_process: int | None
) -> int | None:
    """A mesh axis on which an array is replicated, each time on other processes."""
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
    """Which processes have the first replica along an axis."""
    processes = processes_of(mesh, devices_per_process)
    grid = processes.of_device.reshape(tuple(mesh.shape.values()))
    first = np.take(grid, 0, axis=axis).reshape(-1)
    return np.isin(np.arange(processes.count), first)


def check_host_memory(ways: Mapping[str, tuple[Read, Way]], limit: int) -> list[str]:
    """A problem for each leaf that the host cannot hold within a limit, in bytes."""
    return [
        f"{read.stored.path} {show_shape(read.stored.shape)}: needs {way.host:,} bytes "
        f"on the host, more than host_memory={limit:,}; a restore needs at least one "
        "leaf at a time: raise the limit, or shard the leaf further"
        for read, way in ways.values()
        if way.host > limit
    ]
