"""flm.checkpoint.inspect and .resolve: read only the metadata of a checkpoint."""

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any, Literal, Unpack

import numpy as np
from jax.sharding import PartitionSpec

from flax_layoutmap._core.errors import CheckpointError, visible
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._rules.records import Shape, show_shape, show_spec
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._show.table import human_bytes, text_table
from flax_layoutmap._tree.paths import Role
from flax_layoutmap.checkpoint import _orbax, _record
from flax_layoutmap.checkpoint._leaves import problem_list
from flax_layoutmap.checkpoint._options import (
    LayoutOptions,
    Options,
    check_names,
    checked_options,
)
from flax_layoutmap.checkpoint._orbax import damage_in
from flax_layoutmap.checkpoint._places import absolute, find, is_safetensors, is_url
from flax_layoutmap.checkpoint._safetensors_header import open_safetensors
from flax_layoutmap.checkpoint._stored import Stored, open_checkpoint

CheckpointKind = Literal["flax_layoutmap", "orbax-v1", "orbax-v0", "safetensors"]

_HEADER = ("path", "shape", "dtype", "saved spec", "chunks", "bytes", "role")
_RIGHT = (False, False, False, False, False, True, False)


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
            [
                leaf.path,
                show_shape(leaf.shape),
                leaf.dtype,
                "?" if leaf.spec is None else show_spec(leaf.spec),
                "?" if leaf.chunk is None else show_shape(leaf.chunk),
                human_bytes(leaf.bytes),
                leaf.role,
            ]
            for leaf in self.leaves
        ]
        table = text_table(_HEADER, rows, _RIGHT)
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
    damage = damage_in(_orbax.folder_of(place.path, stored.item))
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
        size = 0 if leaf.is_python else math.prod(leaf.shape) * _itemsize(leaf, held)
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


def _itemsize(leaf: Any, held: Any) -> int:
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


def resolve(
    path: str | os.PathLike[str],
    *,
    rename: Any = None,
    **options: Unpack[LayoutOptions],
) -> Resolution:
    """Resolve the layout of every leaf of a checkpoint, without the model's code.

    Reads no array, and needs no devices: the mesh may be abstract.

    Args:
        path: a checkpoint, or a directory of steps (then its latest, unless `step`).
        rename: other names for the leaves, as in `restore`.
        **options: `layout_map`, `mesh`, `step`, `item`, `include` and `exclude` of
            `restore`. Without `layout_map` the rules are those that the checkpoint was
            saved with; without `mesh` they are on their own mesh, or on that of the
            save, abstract. A selection includes the parameters that selected optimizer
            state follows.

    Returns:
        The Resolution: read it with `.report()`, `.explain(path)`.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or it was saved
            without rules (or mesh) and none are given.
        ResolveError: its leaves do not fit the rules; all of them are listed.

    Example:
        >>> import tempfile, jax.numpy as jnp, flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap("data=-1")
        >>> layout_map["w"] = ("data", None)
        >>> path = tempfile.mkdtemp() + "/weights"
        >>> flm.checkpoint.save(path, {"w": jnp.ones((64, 8))}, layout_map=layout_map)
        >>> mesh = flm.DeviceMesh.abstract("data=16")
        >>> found = flm.checkpoint.resolve(path, mesh=mesh)
        >>> found["w"].shard_shape
        (4, 8)
    """
    check_names("resolve", options, LayoutOptions)
    checked = checked_options(path, rename=rename, **options)
    place = find(checked.path, checked.step, newest=True)
    stored = open_checkpoint(place, checked.item, checked.rename)
    selection = checked.selection.among(stored.record.flat)
    problems = selection.useless(stored.leaves)
    if problems:
        raise problem_list(f"cannot lay out {stored.where}", problems)
    selected = None
    if not selection.is_everything:
        selected = [path for path in stored.leaves if path in selection]
    rules = _rules_for(stored, checked)
    return stored.record.resolve(stored.leaves, rules, selected)


def _rules_for(stored: Stored, options: Options) -> RuleSet:
    """The rules on a mesh, by default those of the checkpoint."""
    rules, record, lacking = options.rules, stored.record, "a mesh; pass mesh="
    if rules is None:
        rules = record.rule_set(options.mesh or record.mesh)
        lacking = "rules; pass layout_map=" if rules is None else lacking
    elif rules.mesh is None and record.mesh is not None:
        rules = rules.on(record.mesh)
    if rules is None or rules.mesh is None:
        raise CheckpointError(f"{stored.where} was saved without {lacking}")
    return rules
