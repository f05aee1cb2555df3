"""RestorePlan: a printable description of a restore."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from flax_layoutmap._core.errors import visible
from flax_layoutmap._rules.records import Shape, because, show_shape, show_spec
from flax_layoutmap._show.table import human_bytes, text_table
from flax_layoutmap.checkpoint._join import Plan, Read
from flax_layoutmap.checkpoint._options import Options
from flax_layoutmap.checkpoint._reads import total_of
from flax_layoutmap.checkpoint._strategy import Reads, Way

_HEADER = (
    *("path", "shape", "dtype", "spec", "rule"),
    *("bytes/device", "read by", "read/needed"),
)
_RIGHT = (False,) * 5 + (True, False, True)


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """How one leaf will be restored.

    Attributes:
        path: its path in the result.
        source: its path in the checkpoint.
        shape: its shape.
        stored_dtype: name of the dtype in the checkpoint; None for a Python value.
        dtype: name of the dtype of the result; None for a Python value.
        spec: its spec; None for a NumPy array or a Python value.
        rule: the rule that chose it, or why there is none.
        bytes_per_device: bytes of one device's shard of the result.
        strategy: `"direct"`, `"aligned"` or `"broadcast"`.
        needed: process → bytes in the files of the shards on its devices.
        read: process → bytes that it reads from the files.
    """

    path: str
    source: str
    shape: Shape
    stored_dtype: str | None
    dtype: str | None
    spec: PartitionSpec | None
    rule: str
    bytes_per_device: int
    strategy: str
    needed: Mapping[int, float]
    read: Mapping[int, float]

    @property
    def amplification(self) -> float:
        """Bytes read ÷ bytes needed, the maximum over processes."""
        pairs = [(self.read.get(p, 0.0), n) for p, n in self.needed.items() if n]
        return max((read / needed for read, needed in pairs), default=1.0)


@dataclasses.dataclass(frozen=True)
class RestorePlan:
    """The plan of a restore.

    Attributes:
        path: the checkpoint.
        leaves: the leaves that will be read.
        kept: paths that keep the values of the target.
        made: paths that the function given as target initializes.
        ignored: paths of the checkpoint that are not read.
        needed: process → bytes in the files of the shards on its devices.
        read: process → bytes that it reads from the files.
        bytes_per_device: bytes of the result on one device.
        host_bytes: upper bound of the bytes on the host of the busiest process, for
            all arrays or for one portion under `host_memory`.
        host_available: free bytes of memory on this host.
        device_available: free bytes on the fullest device of this process; None if the
            devices do not report it.
    """

    path: str
    leaves: tuple[LeafPlan, ...]
    kept: tuple[str, ...]
    made: tuple[str, ...]
    ignored: tuple[str, ...]
    needed: Mapping[int, int]
    read: Mapping[int, int]
    bytes_per_device: int
    host_bytes: int
    host_available: int
    device_available: int | None

    @property
    def fits(self) -> bool:
        """Whether it fits in device and host memory, as far as reported."""
        device = self.device_available
        on_device = device is None or self.bytes_per_device <= device
        return on_device and self.host_bytes <= self.host_available

    def __str__(self) -> str:
        rows = [_row(leaf) for leaf in self.leaves]
        table = text_table(_HEADER, rows, _RIGHT)
        return "\n".join([table, "", *map(visible, self._summary())])

    def _summary(self) -> list[str]:
        lines = [
            f"{self.path}: {len(self.leaves)} leaves to read",
            f"{human_bytes(self.bytes_per_device)} per device"
            + _of(self.device_available, "free"),
        ]
        for process, needed in self.needed.items():
            read = self.read.get(process, 0)
            lines.append(
                f"process {process}: needs {human_bytes(needed)}, reads "
                f"{human_bytes(read)}" + (f" ({read / needed:.2f} ×)" if needed else "")
            )
            if len(lines) == 10 and len(self.needed) > 9:
                total = human_bytes(sum(self.read.values()))
                lines.append(f"… {len(self.needed)} processes read {total} together")
                break
        lines.append(
            f"on the host: up to {human_bytes(self.host_bytes)}"
            + _of(self.host_available, "free")
        )
        for name, paths in (
            ("kept as they are", self.kept),
            ("initialized by the target", self.made),
            ("not read", self.ignored),
        ):
            if paths:
                more = ", …" if len(paths) > 3 else ""
                lines.append(f"{name}: {len(paths)} ({', '.join(paths[:3])}{more})")
        return lines


def described(reads: Reads, options: Options) -> RestorePlan:
    """Describe the reads of a restore for people."""
    plan, ways = reads.plan, reads.ways
    rules = _rules_of(plan)
    leaves = tuple(
        _leaf(path, read, ways.get(path), rules.get(path, ""))
        for path, read in plan.reads.items()
    )
    host = sum(way.host for way in ways.values())
    is_here = plan.rules is None or not getattr(plan.rules.mesh, "is_abstract", True)
    return RestorePlan(
        reads.stored.where,
        leaves,
        plan.kept,
        tuple(plan.made),
        plan.ignored,
        total_of(way.needed for way in ways.values()),
        total_of(way.read for way in ways.values()),
        sum(leaf.bytes_per_device for leaf in leaves),
        host if options.host_memory is None else min(host, options.host_memory),
        _host_available(),
        _device_available() if is_here else None,
    )


def _leaf(path: str, read: Read, way: Way | None, rule: str) -> LeafPlan:
    stored, result, sharding = read.stored, read.result, read.sharding
    own = sharding.shard_shape(result.shape) if sharding is not None else result.shape
    size = 0 if result.dtype is None else math.prod(own) * _itemsize(result.dtype)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else None
    return LeafPlan(
        path,
        stored.path,
        stored.shape,
        None if stored.is_python else str(stored.dtype),
        None if result.is_python else str(result.dtype),
        spec,
        rule,
        size,
        "direct" if way is None else way.strategy,
        {} if way is None else way.needed,
        {} if way is None else way.read,
    )


def _itemsize(dtype: Any) -> int:
    return int(getattr(dtype, "itemsize", np.dtype(np.uint32).itemsize))


def _rules_of(plan: Plan) -> dict[str, str]:
    resolution = plan.resolution
    if resolution is None:
        return {}
    return {
        path: because(row, resolution.rules, short=True)
        for path, row in zip(resolution.paths, resolution.columns().rows, strict=True)
    }


def _host_available() -> int:
    """Bytes of memory that are free on this host."""
    import psutil  # which Orbax brings

    return psutil.virtual_memory().available


def _device_available() -> int | None:
    """Bytes free on the fullest local device; None if unknown."""
    free = []
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats:
            free.append(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    return min(free, default=None)


def _row(leaf: LeafPlan) -> list[str]:
    dtype = leaf.dtype or "Python"
    if leaf.stored_dtype not in (leaf.dtype, None):
        dtype = f"{leaf.stored_dtype} → {dtype}"
    return [
        leaf.path if leaf.path == leaf.source else f"{leaf.path} ← {leaf.source}",
        show_shape(leaf.shape),
        dtype,
        "host" if leaf.spec is None else show_spec(leaf.spec),
        leaf.rule,
        human_bytes(leaf.bytes_per_device),
        leaf.strategy,
        f"{leaf.amplification:.2f}",
    ]


def _of(count: int | None, what: str) -> str:
    return "" if count is None else f" of {human_bytes(count)} {what}"
