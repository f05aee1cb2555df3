"""CheckpointInfo and RestorePlan: descriptions of a checkpoint and of a restore."""

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from flax_layoutmap._core.errors import CheckpointError, visible
from flax_layoutmap._core.layout import is_offloaded, own_memory_kind
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._rules.records import Shape, because, show_shape, show_spec
from flax_layoutmap._show.table import Grid, Line, human_bytes
from flax_layoutmap._tree.paths import Role
from flax_layoutmap.checkpoint import _orbax, _record
from flax_layoutmap.checkpoint._join import Plan, Read
from flax_layoutmap.checkpoint._options import Options
from flax_layoutmap.checkpoint._places import absolute, find, is_safetensors, is_url
from flax_layoutmap.checkpoint._reads import total_of
from flax_layoutmap.checkpoint._safetensors_header import open_safetensors
from flax_layoutmap.checkpoint._stored import Stored, open_checkpoint
from flax_layoutmap.checkpoint._strategy import Reads, Way

CheckpointKind = Literal["flax_layoutmap", "orbax-v1", "orbax-v0", "safetensors"]

_INFO_HEADER = ("path", "shape", "dtype", "saved spec", "chunks", "bytes", "role")
_INFO_RIGHT = (False, False, False, False, False, True, False)


@dataclasses.dataclass(frozen=True)
class LeafInfo:
    """One leaf of a checkpoint.

    Attributes:
        path: its path, as in the live tree.
        shape: its shape; `()` for a Python value.
        dtype: name of its dtype; for a Python value, of its type.
        role: `"parameter"`, `"optimizer"` or `"other"`.
        spec: its spec when it was saved; None if unknown.
        mesh: axis → size of the mesh that it was saved on, empty for one device; None
            if unknown.
        chunk: the shape of the chunks it is stored in; None if unknown.
        bytes: bytes of the array, uncompressed; 0 for a Python value.
    """

    path: str
    shape: Shape
    dtype: str
    role: Role
    spec: PartitionSpec | None
    mesh: Mapping[str, int] | None
    chunk: Shape | None
    bytes: int


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """The description of a checkpoint.

    Attributes:
        path: its directory.
        kind: `"flax_layoutmap"` (an Orbax checkpoint of `save`), `"orbax-v1"`,
            `"orbax-v0"` (also of a `CheckpointManager`) or `"safetensors"`.
        step: its step; None if it is not one of a directory of steps.
        steps: all steps of that directory, ascending.
        items: names of the trees that it holds in separate folders.
        leaves: its leaves, in the order of the tree that was saved.
        rules: the rules that it was saved with, as JSON; None without any.
        mesh: the mesh that it was saved on, abstract; None if unknown.
        versions: library → version that wrote it, if known.
        metadata: other metadata, of the user or of Orbax.
    """

    path: str
    kind: CheckpointKind
    step: int | None
    steps: tuple[int, ...]
    items: tuple[str, ...]
    leaves: tuple[LeafInfo, ...]
    rules: Mapping[str, Any] | None
    mesh: DeviceMesh | None
    versions: Mapping[str, str | None]
    metadata: Mapping[str, Any]

    @property
    def total_bytes(self) -> int:
        """Bytes of all arrays, uncompressed."""
        return sum(leaf.bytes for leaf in self.leaves)

    def __str__(self) -> str:
        rows = [
            (
                leaf.path,
                show_shape(leaf.shape),
                leaf.dtype,
                "?" if leaf.spec is None else show_spec(leaf.spec),
                "?" if leaf.chunk is None else show_shape(leaf.chunk),
                human_bytes(leaf.bytes),
                leaf.role,
            )
            for leaf in self.leaves
        ]
        table = Grid(_INFO_HEADER, _INFO_RIGHT, tuple(map(Line, rows))).text()
        lines = [f"{self.path}: {self.kind}"]
        if self.steps:
            at = self.steps.index(self.step or 0) + 1
            lines[-1] += f", step {self.step} ({at} of {len(self.steps)})"
        lines.append(f"{len(self.leaves)} leaves, {human_bytes(self.total_bytes)}")
        if self.mesh is not None:
            lines.append(f"saved on {self.mesh!r}")
        if self.rules is not None:
            count = len(self.rules["rules"])
            lines.append(f"with {count} rule{'s' if count > 1 else ''}")
        written = [f"{name} {v}" for name, v in self.versions.items() if v is not None]
        lines += [f"by {', '.join(written)}"] if written else []
        return "\n".join([table, "", *map(visible, lines)])


def inspect(
    path: str | os.PathLike[str],
    *,
    step: int | str | None = None,
    item: str | None = None,
) -> CheckpointInfo:
    """Describe a checkpoint without devices and without reading an array.

    Args:
        path: a checkpoint of `save` or of Orbax, a directory of steps, or safetensors
            (a file, their directory, or their index).
        step: which step, a number or `"latest"`; None in a directory of steps is the
            latest.
        item: which tree, if the checkpoint holds several.

    Raises:
        CheckpointError: there is none, it is unfinished, or a file is damaged. Only the
            length of files with arrays is checked; `verify` compares their content.

    Example:
        >>> import tempfile, jax.numpy as jnp, flax_layoutmap as flm
        >>> path = tempfile.mkdtemp() + "/weights"
        >>> flm.checkpoint.save(path, {"w": jnp.ones((8, 4)), "step": 3})
        >>> info = flm.checkpoint.inspect(path)
        >>> [(leaf.path, leaf.shape, leaf.dtype) for leaf in info.leaves]
        [('step', (), 'int'), ('w', (8, 4), 'float32')]

    Plain JAX: `orbax.checkpoint.v1.metadata(path)`.
    """
    where = absolute(path)
    if not is_url(where) and is_safetensors(where):
        return _safetensors(where)
    place = find(where, step, newest=True)
    stored = open_checkpoint(place, item)
    damage = _orbax.damage_in(_orbax.folder_of(place.path, stored.item))
    if damage is not None:
        raise CheckpointError(f"the checkpoint {place.path} is damaged: {damage}")
    kind: CheckpointKind = "orbax-v1" if stored.is_v1 else "orbax-v0"
    custom = {key: v for key, v in stored.custom.items() if key != _record.KEY}
    return CheckpointInfo(
        place.path,
        "flax_layoutmap" if stored.is_ours else kind,
        place.step,
        place.steps,
        tuple(_orbax.items_in(place.path)),
        _leaves(stored),
        stored.record.rules,
        stored.record.mesh,
        stored.record.versions,
        custom,
    )


def _safetensors(where: str) -> CheckpointInfo:
    """Describe files of safetensors, by their headers."""
    tensors = open_safetensors(where).tensors.values()
    leaves = tuple(
        LeafInfo(t.name, t.shape, t.dtype.name, "parameter", None, None, None, t.nbytes)
        for t in tensors
    )
    return CheckpointInfo(
        where, "safetensors", None, (), (), leaves, None, None, {}, {}
    )


def _leaves(stored: Stored) -> tuple[LeafInfo, ...]:
    roles = stored.record.roles()
    specs, mesh = _specs(stored), stored.record.mesh
    axes = None if mesh is None else mesh.axis_sizes
    found = []
    for path, leaf in stored.leaves.items():
        held = stored.held.get(leaf.path)
        known = _orbax.layout_of(held)
        own = (axes, specs[path]) if known is None and path in specs else known
        size = 0 if leaf.is_python else math.prod(leaf.shape) * _itemsize_of(leaf, held)
        found.append(
            LeafInfo(
                path,
                leaf.shape,
                leaf.kind if leaf.is_python else str(leaf.dtype),
                "other" if leaf.is_python else roles[path],
                None if own is None else own[1],
                None if own is None else own[0],
                None if leaf.is_python else _orbax.chunk_of(held),
                size,
            )
        )
    return tuple(found)


def _itemsize_of(leaf: Any, held: Any) -> int:
    if leaf.kind == "key":  # the numbers behind one key
        own = 1 if held is None else math.prod(held.shape[len(leaf.shape) :])
        return own * np.dtype(np.uint32).itemsize
    return leaf.dtype.itemsize


def _specs(stored: Stored) -> dict[str, PartitionSpec]:
    """Path → spec, from the rules that the checkpoint was saved with."""
    record = stored.record
    if record.rules is None or record.mesh is None:
        return {}
    rules = record.rule_set(None)
    if rules is None:
        return {}
    resolution = record.resolve(stored.leaves, rules)
    return dict(zip(resolution.paths, resolution.specs, strict=True))


# ------------------------------------------------------------ plan of a restore


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
        bytes_per_device: bytes of the result in the memory of one device.
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
        rows = map(_row, self.leaves)
        table = Grid(_HEADER, _RIGHT, tuple(map(Line, rows))).text()
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
        sum(
            leaf.bytes_per_device
            for leaf, read in zip(leaves, plan.reads.values(), strict=True)
            if not is_offloaded(own_memory_kind(read.sharding))
        ),
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


def _row(leaf: LeafPlan) -> tuple[str, ...]:
    dtype = leaf.dtype or "Python"
    if leaf.stored_dtype not in (leaf.dtype, None):
        dtype = f"{leaf.stored_dtype} → {dtype}"
    return (
        leaf.path if leaf.path == leaf.source else f"{leaf.path} ← {leaf.source}",
        show_shape(leaf.shape),
        dtype,
        "host" if leaf.spec is None else show_spec(leaf.spec),
        leaf.rule,
        human_bytes(leaf.bytes_per_device),
        leaf.strategy,
        f"{leaf.amplification:.2f}",
    )


def _of(count: int | None, what: str) -> str:
    return "" if count is None else f" of {human_bytes(count)} {what}"
