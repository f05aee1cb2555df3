"""CheckpointInfo and RestorePlan: descriptions of a checkpoint and of a restore."""

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from flax_layoutmap._core.errors import visible
from flax_layoutmap._core.layout import is_offloaded, own_memory_kind
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._rules.records import Shape, because, show_shape, show_spec
from flax_layoutmap._show.table import Grid, Line, human_bytes
from flax_layoutmap._tree.paths import Role
from flax_layoutmap.checkpoint import _orbax, _record
from flax_layoutmap.checkpoint._join import Plan, Read
from flax_layoutmap.checkpoint._leaves import Leaf, key_data_shape
from flax_layoutmap.checkpoint._places import absolute, find, is_safetensors, is_url
from flax_layoutmap.checkpoint._safetensors import open_safetensors
from flax_layoutmap.checkpoint._stored import Stored, open_checkpoint

CheckpointKind = Literal["flax_layoutmap", "orbax-v1", "orbax-v0", "safetensors"]


@dataclasses.dataclass(frozen=True)
class LeafInfo:
    """One leaf of a checkpoint.

    Attributes:
        path: its path, as in the live tree.
        shape: its shape; `()` for a Python value.
        dtype: name of its dtype; for a Python value, of its type.
        role: `"parameter"`, `"optimizer"` or `"other"`.
        spec: its spec when it was saved; None if unknown.
        bytes: bytes of the array, uncompressed; 0 for a Python value.
    """

    path: str
    shape: Shape
    dtype: str
    role: Role
    spec: PartitionSpec | None
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
    step: int | None = None
    steps: tuple[int, ...] = ()
    items: tuple[str, ...] = ()
    leaves: tuple[LeafInfo, ...] = ()
    rules: Mapping[str, Any] | None = None
    mesh: DeviceMesh | None = None
    versions: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)

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
                human_bytes(leaf.bytes),
                leaf.role,
            )
            for leaf in self.leaves
        ]
        names = ("path", "shape", "dtype", "saved spec", "bytes", "role")
        lines = [f"{self.path}: {self.kind}"]
        if self.steps:
            number = self.steps.index(self.step or 0) + 1
            lines[-1] += f", step {self.step} ({number} of {len(self.steps)})"
        lines.append(f"{len(self.leaves)} leaves, {human_bytes(self.total_bytes)}")
        if self.mesh is not None:
            lines.append(f"saved on {self.mesh!r}")
        if self.rules is not None:
            count = len(self.rules["rules"])
            lines.append(f"with {count} rule{'s' if count > 1 else ''}")
        return _table(names, rows, lines)


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
        CheckpointError: there is none, it is unfinished, or its metadata cannot be
            read. Files with arrays are not looked at; `verify` compares their content.

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
        tensors = open_safetensors(where).tensors.values()
        leaves = tuple(
            LeafInfo(t.name, t.shape, t.dtype.name, "parameter", None, t.nbytes)
            for t in tensors
        )
        return CheckpointInfo(where, "safetensors", leaves=leaves)
    place = find(where, step, newest=True)
    stored = open_checkpoint(place, item)
    kind: CheckpointKind = "orbax-v1" if stored.is_v1 else "orbax-v0"
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
        {key: v for key, v in stored.custom.items() if key != _record.KEY},
    )


def _leaves(stored: Stored) -> tuple[LeafInfo, ...]:
    record, specs = stored.record, {}
    rules = None if record.mesh is None else record.rule_set(None)
    if rules is not None:
        resolution = record.resolve(stored.leaves, rules)
        specs = dict(zip(resolution.paths, resolution.specs, strict=True))
    roles = record.roles()
    return tuple(
        LeafInfo(
            path,
            leaf.shape,
            leaf.kind if leaf.is_python else str(leaf.dtype),
            "other" if leaf.is_python else roles[path],
            _orbax.spec_of(stored.held.get(leaf.path)) or specs.get(path),
            math.prod(leaf.shape) * _itemsize(leaf),
        )
        for path, leaf in stored.leaves.items()
    )


def _itemsize(leaf: Leaf) -> int:
    """Bytes of one element, or of the numbers behind one PRNG key."""
    if leaf.is_python:
        return 0
    if leaf.kind == "key":
        data = key_data_shape(leaf.implementation or "threefry2x32")
        return math.prod(data) * np.dtype(np.uint32).itemsize
    return leaf.dtype.itemsize


def _table(
    names: tuple[str, ...], rows: list[tuple[str, ...]], below: list[str]
) -> str:
    right = tuple(name.startswith("bytes") for name in names)
    text = Grid(names, right, tuple(map(Line, rows))).text()
    return "\n".join([text, "", *map(visible, below)])


# ------------------------------------------------------------ plan of a restore


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
    """

    path: str
    source: str
    shape: Shape
    stored_dtype: str | None
    dtype: str | None
    spec: PartitionSpec | None
    rule: str
    bytes_per_device: int


@dataclasses.dataclass(frozen=True)
class RestorePlan:
    """The plan of a restore.

    Attributes:
        path: the checkpoint.
        leaves: the leaves that will be read.
        kept: paths that keep the values of the target.
        made: paths that the function given as target initializes.
        ignored: paths of the checkpoint that are not read.
        bytes_per_device: bytes of the result in the memory of one device.
    """

    path: str
    leaves: tuple[LeafPlan, ...]
    kept: tuple[str, ...]
    made: tuple[str, ...]
    ignored: tuple[str, ...]
    bytes_per_device: int

    def __str__(self) -> str:
        names = ("path", "shape", "dtype", "spec", "rule", "bytes/device")
        lines = [
            f"{self.path}: {len(self.leaves)} leaves to read",
            f"{human_bytes(self.bytes_per_device)} per device",
        ]
        for name, paths in (
            ("kept as they are", self.kept),
            ("initialized by the target", self.made),
            ("not read", self.ignored),
        ):
            if paths:
                more = ", …" if len(paths) > 3 else ""
                lines.append(f"{name}: {len(paths)} ({', '.join(paths[:3])}{more})")
        return _table(names, list(map(_row, self.leaves)), lines)


def described(path: str, plan: Plan) -> RestorePlan:
    """Describe the plan of a restore for people."""
    rules: dict[str, str] = {}
    resolution = plan.resolution
    if resolution is not None:
        rows = zip(resolution.paths, resolution.columns().rows, strict=True)
        rules = {p: because(row, resolution.rules, short=True) for p, row in rows}
    leaves = {
        path: _leaf(path, read, rules.get(path, ""))
        for path, read in plan.reads.items()
    }
    on_device = sum(
        leaf.bytes_per_device
        for path, leaf in leaves.items()
        if not is_offloaded(own_memory_kind(plan.reads[path].sharding))
    )
    rows = tuple(leaves.values())
    made = tuple(plan.made)
    return RestorePlan(path, rows, plan.kept, made, plan.ignored, on_device)


def _leaf(path: str, read: Read, rule: str) -> LeafPlan:
    stored, result, sharding = read.stored, read.result, read.sharding
    shard = result.shape if sharding is None else sharding.shard_shape(result.shape)
    return LeafPlan(
        path,
        stored.path,
        stored.shape,
        None if stored.is_python else str(stored.dtype),
        None if result.is_python else str(result.dtype),
        sharding.spec if isinstance(sharding, NamedSharding) else None,
        rule,
        math.prod(shard) * _itemsize(result),
    )


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
    )
