"""Descriptions of a checkpoint and of a restore, for people."""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from flax_layoutmap._core.errors import visible
from flax_layoutmap._core.layout import is_offloaded, own_memory_kind
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._rules.records import Shape, because, show_shape, show_spec
from flax_layoutmap._show.table import grid_of, human_bytes
from flax_layoutmap._tree.paths import Role
from flax_layoutmap.checkpoint import _orbax
from flax_layoutmap.checkpoint._join import Plan
from flax_layoutmap.checkpoint._leaves import Leaf
from flax_layoutmap.checkpoint._metadata import (
    KEY,
    CheckpointKind,
    Stored,
    open_checkpoint,
)
from flax_layoutmap.checkpoint._places import absolute, find, is_safetensors, is_url
from flax_layoutmap.checkpoint._safetensors import open_safetensors


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafInfo:
    """One leaf of a checkpoint, or one that a restore reads.

    Attributes:
        path: its path, as in the live tree, or in the result of the restore.
        shape: its shape; `()` for a Python value.
        dtype: name of its dtype in the result; for a Python value, of its type.
        spec: its spec in the result, or when it was saved; None if unknown, or for a
            NumPy array or a Python value.
        bytes: bytes of the whole array, uncompressed; 0 for a Python value.
        role: `"parameter"`, `"optimizer"` or `"other"`; of a plan, None.
        source: its path in the checkpoint.
        stored_dtype: as `dtype`, in the checkpoint.
        rule: of a plan, the rule that chose its spec, or why there is none.
        bytes_per_device: of a plan, bytes of one device's shard of the result.
    """

    path: str
    shape: Shape
    dtype: str
    spec: PartitionSpec | None
    bytes: int
    role: Role | None = None
    source: str
    stored_dtype: str
    rule: str = ""
    bytes_per_device: int = 0


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
        return _table(
            {
                "path": [leaf.path for leaf in self.leaves],
                "shape": [show_shape(leaf.shape) for leaf in self.leaves],
                "dtype": [leaf.dtype for leaf in self.leaves],
                "saved spec": [_spec(leaf, "?") for leaf in self.leaves],
                "bytes": [human_bytes(leaf.bytes) for leaf in self.leaves],
                "role": [leaf.role or "" for leaf in self.leaves],
            },
            lines,
        )


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
    leaves: tuple[LeafInfo, ...]
    kept: tuple[str, ...]
    made: tuple[str, ...]
    ignored: tuple[str, ...]
    bytes_per_device: int

    def __str__(self) -> str:
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
        leaves = self.leaves
        return _table(
            {
                "path": [_both(leaf.path, "←", leaf.source) for leaf in leaves],
                "shape": [show_shape(leaf.shape) for leaf in leaves],
                "dtype": [_both(leaf.stored_dtype, "→", leaf.dtype) for leaf in leaves],
                "spec": [_spec(leaf, "host") for leaf in leaves],
                "rule": [leaf.rule for leaf in leaves],
                "bytes/device": [human_bytes(leaf.bytes_per_device) for leaf in leaves],
            },
            lines,
        )


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
        tensors = [
            Leaf(tensor.name, "array", tensor.shape, tensor.dtype)
            for tensor in open_safetensors(where).tensors.values()
        ]
        leaves = (_leaf(leaf.path, leaf, leaf, role="parameter") for leaf in tensors)
        return CheckpointInfo(where, "safetensors", leaves=tuple(leaves))
    place = find(where, step, newest=True)
    stored = open_checkpoint(place, item)
    return CheckpointInfo(
        place.path,
        stored.kind,
        place.step,
        place.steps,
        tuple(_orbax.items_in(place.path)),
        _leaves(stored),
        stored.rules,
        stored.mesh,
        stored.versions,
        {key: value for key, value in stored.custom.items() if key != KEY},
    )


def _leaves(stored: Stored) -> tuple[LeafInfo, ...]:
    specs: dict[str, Any] = {}
    rules = None if stored.mesh is None else stored.rule_set(None)
    if rules is not None:
        resolution = stored.resolve(rules)
        specs = dict(zip(resolution.paths, resolution.specs, strict=True))
    roles = stored.roles()
    return tuple(
        _leaf(
            path,
            leaf,
            leaf,
            role="other" if leaf.is_python else roles[path],
            spec=_orbax.spec_of(stored.held.get(leaf.path)) or specs.get(path),
        )
        for path, leaf in stored.leaves.items()
    )


def described(path: str, plan: Plan) -> RestorePlan:
    """Describe the plan of a restore for people."""
    rules: dict[str, str] = {}
    resolution = plan.resolution
    if resolution is not None:
        rows = zip(resolution.paths, resolution.columns().rows, strict=True)
        rules = {p: because(row, resolution.rules, short=True) for p, row in rows}
    leaves, on_device = [], 0
    for name, read in plan.reads.items():
        sharding, shard = read.sharding, read.result.shape
        if sharding is not None:
            shard = sharding.shard_shape(shard)
        size = math.prod(shard) * read.result.itemsize
        spec = sharding.spec if isinstance(sharding, NamedSharding) else None
        rule = rules.get(name, "")
        options: dict[str, Any] = {"spec": spec, "rule": rule, "bytes_per_device": size}
        leaves.append(_leaf(name, read.stored, read.result, **options))
        on_device += 0 if is_offloaded(own_memory_kind(sharding)) else size
    made = tuple(plan.made)
    return RestorePlan(path, tuple(leaves), plan.kept, made, plan.ignored, on_device)


def _leaf(
    path: str,
    stored: Leaf,
    result: Leaf,
    *,
    spec: PartitionSpec | None = None,
    **more: Any,
) -> LeafInfo:
    return LeafInfo(
        path=path,
        shape=result.shape,
        dtype=_dtype(result),
        spec=spec,
        bytes=result.bytes,
        source=stored.path,
        stored_dtype=_dtype(stored),
        **more,
    )


def _dtype(leaf: Leaf) -> str:
    return leaf.kind if leaf.is_python else str(leaf.dtype)


def _spec(leaf: LeafInfo, without: str) -> str:
    return without if leaf.spec is None else show_spec(leaf.spec)


def _both(first: str, arrow: str, second: str) -> str:
    return first if first == second else f"{first} {arrow} {second}"


def _table(columns: Mapping[str, Sequence[str]], below: list[str]) -> str:
    text = grid_of(columns, [""] * len(columns["path"])).text()
    return "\n".join([text, "", *map(visible, below)])
