"""flm.checkpoint.restore, plan, inspect, resolve and verify."""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from flax_layoutmap._core.checksums import checksums
from flax_layoutmap._core.errors import CheckpointError, visible
from flax_layoutmap._core.layout import is_offloaded, own_memory_kind
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._core.processes import Agreement
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._rules.records import Shape, because, show_shape, show_spec
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._show.table import grid_of, human_bytes
from flax_layoutmap._show.terminal import shown_progress
from flax_layoutmap._tree.paths import Role
from flax_layoutmap.checkpoint import _orbax
from flax_layoutmap.checkpoint._join import (
    Missing,
    Options,
    Unexpected,
    planned,
    restored,
)
from flax_layoutmap.checkpoint._leaves import Leaf, grouped, problem_list
from flax_layoutmap.checkpoint._metadata import KEY
from flax_layoutmap.checkpoint._places import absolute, is_safetensors, is_url
from flax_layoutmap.checkpoint._safetensors import read_headers
from flax_layoutmap.checkpoint._stored import (
    CheckpointKind,
    Stored,
    open_checkpoint,
)

# Bytes of arrays that `verify` reads at a time; a larger one is read alone.
_PORTION_BYTES = 1 << 29


def restore(
    path: str | os.PathLike[str],
    target: Any = None,
    *,
    layout_map: Any = None,
    mesh: Any = None,
    step: int | str | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    rename: Any = None,
    dtype: Any = None,
    missing: Missing = "error",
    unexpected: Unexpected = "error",
    host_memory: int | None = None,
    broadcast: str | None = None,
    verify: bool | None = None,
    progress: bool | None = None,
) -> Any:
    r"""Restore a checkpoint of `save` or of Orbax, each leaf directly into its shards.

    Leaves are joined with those of the target by path. Everything is checked before any
    array is read; one `CheckpointError` lists every problem.

    Args:
        path: the checkpoint, a directory of steps, or one of several trees in a
            checkpoint (`runs/100/params`).
        target: any tree, concrete or abstract, or a function that returns one, which is
            only traced. None restores every leaf as a nested dict.
        layout_map: the rules. None keeps the shardings of the target's leaves.
        mesh: a mesh for these rules, or for those that the checkpoint was saved with.
        step: a number or `"latest"`, if `path` is a directory of steps.
        include: regular expressions; only leaves in whose full path (`model/decoder/…`)
            one of them is found are restored. The others keep the target's values.
        exclude: the opposite.
        rename: pairs of a regular expression and its replacement, or a dict of them.
            The first one found in a path of the checkpoint renames it, before all else.
        dtype: a floating-point dtype for all floating-point arrays, `"target"` for the
            target's, or pairs of a regular expression and one of these.
        missing: for leaves that only the target has: `"error"`, `"keep"` them, or
            `"init"`ialize them with the function that is the target.
        unexpected: for leaves that only the checkpoint has: `"error"` or `"ignore"`.
        host_memory: bytes that Orbax may be reading at a time on each host, more than
            the largest leaf takes.
        broadcast: a mesh axis. Arrays that are replicated along it over processes are
            read by the first replica, which sends them (Orbax's load-and-broadcast).
        verify: whether to compare with checksums: None if there are any, True always.
        progress: whether process 0 shows the time on stderr; None: on a terminal.

    Returns:
        A tree of the target's type. Concrete NNX objects are updated in place once all
        leaves have been read. Numbers have the target's kind.

    Example:
        >>> import tempfile, jax.numpy as jnp, flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap("data=-1", strict=False)
        >>> path = tempfile.mkdtemp() + "/weights"
        >>> flm.checkpoint.save(path, {"w": jnp.ones((8, 4)), "step": 3})
        >>> flm.checkpoint.restore(path, layout_map=layout_map)["step"]
        3

    Plain JAX: `orbax.checkpoint.v1.load(path, layout_map.abstract(tree))`.
    """
    options = Options(
        path,
        target,
        layout_map=layout_map,
        mesh=mesh,
        include=include,
        exclude=exclude,
        rename=rename,
        dtype=dtype,
        missing=missing,
        unexpected=unexpected,
        host_memory=host_memory,
        broadcast=broadcast,
        verify=verify,
    )
    return restored("restore", _opener(options, step), options, progress)


def _opener(options: Options, step: int | str | None) -> Callable[[], Stored]:
    return functools.partial(
        open_checkpoint, options.path, step, options.rename, verify=options.verify
    )


# -------------------------------------------------------------- what a checkpoint holds


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
        bytes_per_device: of a plan, bytes of the result in the memory of one device.
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
    """The description of a checkpoint, or of what a restore reads of it.

    Attributes:
        path: its directory.
        kind: `"flax_layoutmap"` (an Orbax checkpoint of `save`), `"orbax-v1"`,
            `"orbax-v0"` (also of a `CheckpointManager`) or `"safetensors"`.
        leaves: its leaves, in the order of the tree that was saved; of a plan, those
            that are read, in the order of the target.
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

    @property
    def bytes_per_device(self) -> int:
        """Of a plan, bytes of the result in the memory of one device."""
        return sum(leaf.bytes_per_device for leaf in self.leaves)

    def __str__(self) -> str:
        leaves, title = self.leaves, f"{self.path}: {self.kind}"
        if self.steps:
            number = self.steps.index(self.step or 0) + 1
            title += f", step {self.step} ({number} of {len(self.steps)})"
        lines = [title, f"{len(leaves)} leaves, {human_bytes(self.total_bytes)}"]
        if self.bytes_per_device:
            lines.append(f"{human_bytes(self.bytes_per_device)} per device")
        if self.mesh is not None:
            lines.append(f"saved on {self.mesh!r}")
        if self.rules is not None:
            lines.append(f"rules: {len(self.rules['rules'])}")
        columns = {
            "path": [leaf.path for leaf in leaves],
            "shape": [show_shape(leaf.shape) for leaf in leaves],
            "dtype": [leaf.dtype for leaf in leaves],
            "spec": ["" if x.spec is None else show_spec(x.spec) for x in leaves],
            "role": [leaf.role or "" for leaf in leaves],
            "rule": [leaf.rule for leaf in leaves],
            "bytes": [human_bytes(leaf.bytes) for leaf in leaves],
        }
        if self.bytes_per_device:
            size = [human_bytes(leaf.bytes_per_device) for leaf in leaves]
            columns["bytes/device"] = size
        columns = {name: cells for name, cells in columns.items() if any(cells)}
        text = grid_of(columns).text()
        return "\n".join([text, "", *map(visible, lines)])


def plan(
    path: str | os.PathLike[str],
    target: Any = None,
    *,
    step: int | str | None = None,
    **options: Any,
) -> CheckpointInfo:
    """Plan what `restore` with the same arguments reads; raise the same errors.

    No array byte is read. The mesh may be abstract: a plan for a pod slice needs none.
    `options` are those of `restore`, without `verify` and `progress`.

    Returns:
        The leaves to read, as they will be in the result; print it.

    Example:
        >>> import tempfile, jax.numpy as jnp, flax_layoutmap as flm
        >>> path = tempfile.mkdtemp() + "/weights"
        >>> flm.checkpoint.save(path, {"w": jnp.ones((64, 8))})
        >>> layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("data=16"))
        >>> layout_map["w"] = ("data", None)
        >>> plan = flm.checkpoint.plan(path, layout_map=layout_map)
        >>> plan.leaves[0].rule, plan.bytes_per_device
        ('1 w', 128)
    """
    checked = Options(path, target, **options)
    opener = _opener(checked, step)
    stored, _, joined = planned("planning to restore", opener, checked)
    rules, resolution = dict[str, str](), joined.resolution
    if resolution is not None:
        rows = zip(resolution.paths, resolution._rows, strict=True)
        rules = {p: because(row, resolution.rules, short=True) for p, row in rows}
    leaves = []
    for name, read in joined.reads.items():
        leaf, sharding, size = read.result, read.sharding, 0
        if sharding is not None and not is_offloaded(own_memory_kind(sharding)):
            size = leaf.bytes_of(sharding.shard_shape(leaf.shape))
        known = {"source": read.stored.path, "spec": getattr(sharding, "spec", None)}
        more = {"rule": rules.get(name, ""), "bytes_per_device": size}
        leaves.append(_info(name, leaf, **known, **more))
    return _described(stored, leaves)


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
            _info(t.name, Leaf(t.name, "array", t.shape, t.dtype), role="parameter")
            for t in read_headers(where).values()
        )
        return CheckpointInfo(path=where, kind="safetensors", leaves=leaves)
    stored = open_checkpoint(where, step, newest=True)
    rules = None if stored.mesh is None else stored.rule_set(None)
    resolution = stored.resolve(rules or RuleSet(strict=False))
    specs = resolution.specs if rules else [None] * len(resolution.paths)
    leaves = []
    for leaf, resolved, spec in zip(
        stored.leaves.values(), resolution, specs, strict=True
    ):
        role = "other" if leaf.is_python else resolved.role
        spec = _orbax.spec_of(stored.held.get(leaf.path)) or spec
        leaves.append(_info(resolved.path, leaf, role=role, spec=spec))
    return _described(stored, leaves)


def _described(stored: Stored, leaves: Sequence[LeafInfo]) -> CheckpointInfo:
    return CheckpointInfo(
        path=stored.where,
        kind=stored.kind,
        step=stored.place.step,
        steps=stored.place.steps,
        leaves=tuple(leaves),
        rules=stored.rules,
        mesh=stored.mesh,
        versions=stored.versions,
        metadata={key: value for key, value in stored.custom.items() if key != KEY},
    )


def _info(path: str, leaf: Leaf, **more: Any) -> LeafInfo:
    known: dict[str, Any] = {"source": leaf.path, "spec": None, **more}
    dtype = leaf.kind if leaf.is_python else str(leaf.dtype)
    return LeafInfo(path=path, shape=leaf.shape, dtype=dtype, bytes=leaf.bytes, **known)


def resolve(
    path: str | os.PathLike[str],
    *,
    layout_map: Any = None,
    mesh: Any = None,
    step: int | str | None = None,
    rename: Any = None,
) -> Resolution:
    """Resolve the layout of every leaf of a checkpoint, without the model's code.

    Reads no array, and needs no devices: the mesh may be abstract.

    Args:
        path: a checkpoint, or a directory of steps (then its latest, unless `step`).
        layout_map: the rules; None: those that the checkpoint was saved with.
        mesh: the mesh for them; None: their own, or that of the save, abstract.
        step: as in `restore`.
        rename: as in `restore`.

    Example:
        >>> import tempfile, jax.numpy as jnp, flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap("data=-1")
        >>> layout_map["w"] = ("data", None)
        >>> path = tempfile.mkdtemp() + "/weights"
        >>> flm.checkpoint.save(path, {"w": jnp.ones((64, 8))}, layout_map=layout_map)
        >>> mesh = flm.DeviceMesh.abstract("data=16")
        >>> flm.checkpoint.resolve(path, mesh=mesh)["w"].shard_shape
        (4, 8)
    """
    options = Options(path, layout_map=layout_map, mesh=mesh, rename=rename)
    stored = open_checkpoint(options.path, step, options.rename, newest=True)
    rules = options.rules or stored.rule_set(options.mesh)
    if rules is not None and rules.mesh is None and stored.mesh is not None:
        rules = rules.on(stored.mesh)
    if rules is None or rules.mesh is None:
        lacking = "rules; pass layout_map=" if rules is None else "a mesh; pass mesh="
        raise CheckpointError(f"{stored.where} was saved without {lacking}")
    return stored.resolve(rules)


def verify(
    path: str | os.PathLike[str],
    *,
    step: int | str | None = None,
    progress: bool | None = None,
) -> int:
    """Read a checkpoint and compare it with the checksums in its metadata.

    Needs no mesh, no rules and no accelerator. In a job of several processes all of
    them call it, each reads a share of the leaves, and all raise if one does.

    Args:
        path: a checkpoint of `save` or `Checkpointer`, or a directory of steps.
        step: as in `inspect`.
        progress: as in `restore`.

    Returns:
        The number of leaves, which are as they were saved.

    Example:
        >>> import tempfile, jax.numpy as jnp, flax_layoutmap as flm
        >>> path = tempfile.mkdtemp() + "/weights"
        >>> flm.checkpoint.save(path, {"w": jnp.ones((8, 4)), "step": 3})
        >>> flm.checkpoint.verify(path)
        2
    """
    where = absolute(path)
    every = DeviceMesh((jax.device_count(),), ("all",))
    with Agreement(f"verifying {where}", every):
        stored = open_checkpoint(where, step, newest=True)
        if stored.checksums is None:
            raise CheckpointError(stored.no_checksums())
        leaves = [leaf for leaf in stored.leaves.values() if not leaf.is_empty]
        share = leaves[jax.process_index() :: jax.process_count()]
        problems: list[str] = []
        with shown_progress(f"verifying {stored.where}", None, progress):
            for portion in grouped(share, lambda leaf: leaf.bytes, _PORTION_BYTES):
                wanted = {
                    x.path: x.abstract if x.is_text else np.ndarray for x in portion
                }
                sums = checksums(stored.arrays(wanted), alone=True)
                problems += stored.changed(portion, sums)
        if problems:
            raise problem_list(f"the checkpoint {stored.where} is damaged", problems)
    return len(leaves)
