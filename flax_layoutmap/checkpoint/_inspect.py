"""flm.checkpoint.inspect and verify; descriptions of a checkpoint and of a restore."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from flax_layoutmap._core.checksums import checksums
from flax_layoutmap._core.errors import CheckpointError, visible
from flax_layoutmap._core.layout import is_offloaded, own_memory_kind
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._core.processes import Agreement
from flax_layoutmap._rules.records import Shape, because, show_shape, show_spec
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._show.table import grid_of, human_bytes
from flax_layoutmap._show.terminal import shown_progress
from flax_layoutmap._tree.paths import Role
from flax_layoutmap.checkpoint import _orbax
from flax_layoutmap.checkpoint._join import Plan
from flax_layoutmap.checkpoint._leaves import Leaf, grouped, problem_list
from flax_layoutmap.checkpoint._metadata import (
    KEY,
    CheckpointKind,
    Stored,
    open_checkpoint,
)
from flax_layoutmap.checkpoint._options import check_bytes
from flax_layoutmap.checkpoint._places import absolute, find, is_safetensors, is_url
from flax_layoutmap.checkpoint._safetensors import read_headers


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafInfo:
    """One leaf of a checkpoint, or one that a restore reads.

    Attributes:
        path: its path, as in the live tree, or in the result of the restore.
        shape: its shape; `()` for a Python value.
        dtype: name of its dtype, of a plan in the result; of a Python value, its type.
        spec: its spec in the result, or when it was saved; None if unknown, or for a
            NumPy array or a Python value.
        bytes: bytes of the whole array, uncompressed; 0 for a Python value.
        source: its path in the checkpoint.
        role: `"parameter"`, `"optimizer"` or `"other"`; of a plan, None.
        rule: of a plan, the rule that chose its spec, or why there is none.
        bytes_per_device: of a plan, bytes of one device's shard of the result.
    """

    path: str
    shape: Shape
    dtype: str
    spec: PartitionSpec | None
    bytes: int
    source: str
    role: Role | None = None
    rule: str = ""
    bytes_per_device: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """The description of a checkpoint.

    Attributes:
        path: its directory.
        kind: `"flax_layoutmap"` (an Orbax checkpoint of `save`), `"orbax-v1"`,
            `"orbax-v0"` (also of a `CheckpointManager`) or `"safetensors"`.
        leaves: its leaves, in the order of the tree that was saved.
        step: its step; None if it is not one of a directory of steps.
        steps: all steps of that directory, ascending.
        rules: the rules that it was saved with, as JSON; None without any.
        mesh: the mesh that it was saved on, abstract; None if unknown.
        versions: library → version that wrote it, if known.
        metadata: other metadata, of the user or of Orbax.
    """

    path: str
    kind: CheckpointKind
    leaves: tuple[LeafInfo, ...]
    step: int | None = None
    steps: tuple[int, ...] = ()
    rules: Mapping[str, Any] | None = None
    mesh: DeviceMesh | None = None
    versions: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Bytes of all arrays, uncompressed."""
        return sum(leaf.bytes for leaf in self.leaves)

    def __str__(self) -> str:
        title = f"{self.path}: {self.kind}"
        if self.steps:
            number = self.steps.index(self.step or 0) + 1
            title += f", step {self.step} ({number} of {len(self.steps)})"
        lines = [title, f"{len(self.leaves)} leaves, {human_bytes(self.total_bytes)}"]
        if self.mesh is not None:
            lines.append(f"saved on {self.mesh!r}")
        if self.rules is not None:
            lines.append(f"rules: {len(self.rules['rules'])}")
        size = [human_bytes(leaf.bytes) for leaf in self.leaves]
        role = [leaf.role or "" for leaf in self.leaves]
        return _table(self.leaves, {"role": role, "bytes": size}, lines)


@dataclasses.dataclass(frozen=True)
class RestorePlan:
    """The plan of a restore.

    Attributes:
        leaves: the leaves that will be read.
        bytes_per_device: bytes of the result in the memory of one device.
    """

    path: str
    leaves: tuple[LeafInfo, ...]
    bytes_per_device: int

    def __str__(self) -> str:
        lines = [
            f"{self.path}: {len(self.leaves)} leaves to read",
            f"{human_bytes(self.bytes_per_device)} per device",
        ]
        size = [human_bytes(leaf.bytes_per_device) for leaf in self.leaves]
        rule = [leaf.rule for leaf in self.leaves]
        return _table(self.leaves, {"rule": rule, "bytes/device": size}, lines)


def _table(
    leaves: Sequence[LeafInfo], more: Mapping[str, Sequence[str]], below: Sequence[str]
) -> str:
    columns = {
        "path": [leaf.path for leaf in leaves],
        "shape": [show_shape(leaf.shape) for leaf in leaves],
        "dtype": [leaf.dtype for leaf in leaves],
        "spec": ["" if x.spec is None else show_spec(x.spec) for x in leaves],
        **more,
    }
    text = grid_of(columns).text()
    return "\n".join([text, "", *map(visible, below)])


def inspect(
    path: str | os.PathLike[str], *, step: int | str | None = None
) -> CheckpointInfo:
    """Describe a checkpoint without devices and without reading an array.

    Args:
        path: a checkpoint of `save` or of Orbax, one of several trees in it, a
            directory of steps, or safetensors (a file, their folder, or index).
        step: a number or `"latest"`; None in a directory of steps is the latest.

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
        leaves = tuple(
            _described(
                t.name, Leaf(t.name, "array", t.shape, t.dtype), role="parameter"
            )
            for t in read_headers(where).values()
        )
        return CheckpointInfo(path=where, kind="safetensors", leaves=leaves)
    place = find(where, step, newest=True)
    stored = open_checkpoint(place)
    return CheckpointInfo(
        path=place.path,
        kind=stored.kind,
        step=place.step,
        steps=place.steps,
        leaves=_leaves(stored),
        rules=stored.rules,
        mesh=stored.mesh,
        versions=stored.versions,
        metadata={key: value for key, value in stored.custom.items() if key != KEY},
    )


def _leaves(stored: Stored) -> tuple[LeafInfo, ...]:
    rules = None if stored.mesh is None else stored.rule_set(None)
    resolution = stored.resolve(rules or RuleSet(strict=False))
    specs = resolution.specs if rules else [None] * len(resolution.paths)
    resolved = zip(resolution, specs, strict=True)
    known = {leaf.path: (leaf.role, spec) for leaf, spec in resolved}
    return tuple(
        _described(
            path,
            leaf,
            role="other" if leaf.is_python else known[path][0],
            spec=_orbax.spec_of(stored.held.get(leaf.path)) or known[path][1],
        )
        for path, leaf in stored.leaves.items()
    )


def described(path: str, plan: Plan) -> RestorePlan:
    rules: dict[str, str] = {}
    resolution = plan.resolution
    if resolution is not None:
        rows = zip(resolution.paths, resolution._rows, strict=True)
        rules = {p: because(row, resolution.rules, short=True) for p, row in rows}
    leaves, on_device = [], 0
    for name, read in plan.reads.items():
        sharding, shard = read.sharding, read.result.shape
        if sharding is not None:
            shard = sharding.shard_shape(shard)
        size = read.result.bytes_of(shard)
        leaves.append(
            _described(
                name,
                read.result,
                source=read.stored.path,
                spec=sharding.spec if isinstance(sharding, NamedSharding) else None,
                rule=rules.get(name, ""),
                bytes_per_device=size,
            )
        )
        on_device += 0 if is_offloaded(own_memory_kind(sharding)) else size
    return RestorePlan(path, tuple(leaves), on_device)


def _described(path: str, leaf: Leaf, **more: Any) -> LeafInfo:
    known: dict[str, Any] = {"source": leaf.path, "spec": None, **more}
    dtype = leaf.kind if leaf.is_python else str(leaf.dtype)
    return LeafInfo(path=path, shape=leaf.shape, dtype=dtype, bytes=leaf.bytes, **known)


# ------------------------------------------------------------------------- verify


@dataclasses.dataclass(frozen=True)
class Verified:
    """The result of `verify`: how many leaves are as saved, and their bytes."""

    path: str
    leaves: int
    bytes: int

    def __str__(self) -> str:
        what = "1 leaf is" if self.leaves == 1 else f"{self.leaves} leaves are"
        return visible(f"{self.path}: {what} as saved ({human_bytes(self.bytes)})")


def verify(
    path: str | os.PathLike[str],
    *,
    step: int | str | None = None,
    host_memory: int = 1 << 29,
    progress: bool | None = None,
) -> Verified:
    """Read a checkpoint and compare it with the checksums in its metadata.

    Needs no mesh, no rules and no accelerator. In a job of several processes all of
    them call it, each reads a share of the leaves, and all raise if one does.

    Args:
        path: a checkpoint of `save` or `Checkpointer`, or a directory of steps.
        step: as in `inspect`.
        host_memory: bytes of arrays to read at a time; a larger leaf is read alone.
        progress: as in `restore`.

    Example:
        >>> import tempfile, jax.numpy as jnp, flax_layoutmap as flm
        >>> path = tempfile.mkdtemp() + "/weights"
        >>> flm.checkpoint.save(path, {"w": jnp.ones((8, 4)), "step": 3})
        >>> flm.checkpoint.verify(path).leaves
        2
    """
    check_bytes("host_memory", host_memory)
    place = find(absolute(path), step, newest=True)
    every = DeviceMesh((jax.device_count(),), ("all",))
    with Agreement(f"verifying {place.path}", every):
        stored = open_checkpoint(place)
        if stored.checksums is None:
            raise CheckpointError(stored.no_checksums())
        leaves = [leaf for leaf in stored.leaves.values() if not leaf.is_empty]
        share = leaves[jax.process_index() :: jax.process_count()]
        problems: list[str] = []
        with shown_progress(f"verifying {place.path}", None, progress):
            for portion in grouped(share, lambda leaf: leaf.bytes, host_memory):
                wanted = {
                    x.path: x.abstract if x.is_text else np.ndarray for x in portion
                }
                values = stored.read(wanted)
                problems += stored.changed(portion, checksums(values, alone=True))
        if problems:
            raise problem_list(f"the checkpoint {place.path} is damaged", problems)
    return Verified(place.path, len(leaves), sum(leaf.bytes for leaf in leaves))
