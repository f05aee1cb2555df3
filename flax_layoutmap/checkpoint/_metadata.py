"""What is known of a checkpoint: its description, and our record in it.

The record (schema 1, in Orbax's custom metadata) holds what resolving needs of the
saved tree (sections, origins of optimizer state, random state, layouts on the Variables
themselves), so that rules apply to a checkpoint exactly as to the live tree; and the
leaves that Orbax would not return unchanged (Python numbers, PRNG keys, empty arrays).
It has shape and dtype of every stored array, for which Orbax would open the array.
"""

import dataclasses
import functools
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import PartitionSpec

from flax_layoutmap._core.checksums import json_digest
from flax_layoutmap._core.errors import CheckpointError, LayoutError, visible
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._resolve.leaves import Mark, Origin, mark_of
from flax_layoutmap._rules.files import mesh_from_json, mesh_to_json, rules_to_json
from flax_layoutmap._rules.records import Shape, show_shape, show_spec
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._show.table import grid_of, human_bytes
from flax_layoutmap._tree.paths import Flat, Role, Section
from flax_layoutmap.checkpoint._leaves import TYPES, Leaf, key_data, key_dtype, nested
from flax_layoutmap.checkpoint._places import METADATA_FILE

KEY = "flax_layoutmap"

_LIBRARIES = ("flax-layoutmap", "jax", "flax", "orbax-checkpoint")


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
        kind: `"flax_layoutmap"` (an Orbax checkpoint of `save`), `"orbax"` or
            `"safetensors"`.
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
    kind: Literal["flax_layoutmap", "orbax", "safetensors"]
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
            "bytes/device": [
                human_bytes(x.bytes_per_device) if self.bytes_per_device else ""
                for x in leaves
            ],
        }
        columns = {name: cells for name, cells in columns.items() if any(cells)}
        text = grid_of(columns).text()
        return "\n".join([text, "", *map(visible, lines)])


# --------------------------------------------------------------- write our record


def to_json(
    flat: Flat,
    leaves: Sequence[Leaf],
    owners: Mapping[str, tuple[str | None, tuple[int | None, ...] | None]],
    rules: RuleSet | None,
) -> dict[str, Any]:
    paths = flat.full_paths()
    sections = []
    for section in flat.sections:
        span = slice(section.start, section.stop)
        prefix, role, inner = section.prefix, section.role, flat.paths[span]
        entry: dict[str, Any] = {"prefix": prefix, "role": role, "paths": inner}
        if role == "optimizer":
            entry["owners"] = [owners.get(path, (None, None)) for path in paths[span]]
        sections.append(entry)
    special = {leaf.path: _leaf_json(leaf) for leaf in leaves}
    layouts = {paths[at]: _mark_json(box) for at, box in flat.annotations.items()}
    return {
        "schema": 1,
        "versions": {name: _version(name) for name in _LIBRARIES},
        "mesh": None if rules is None else mesh_to_json(rules.mesh),
        "rules": None if rules is None else rules_to_json(rules),
        "sections": sections,
        "leaves": {path: entry for path, entry in special.items() if entry},
        # Shape and dtype of what Orbax stores; None for a Python value.
        "stored": {
            x.path: None if x.is_text else [list(x.data[0]), x.data[1].name]
            for x in leaves
            if not x.is_empty
        },
        "random": [paths[at] for at in sorted(flat.fixed)],
        "layouts": {path: entry for path, entry in layouts.items() if entry},
    }


@functools.cache
def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None  # the package runs from a checkout


def _leaf_json(leaf: Leaf) -> dict[str, Any]:
    """What Orbax does not keep of a leaf; empty for an ordinary array."""
    is_key, is_array = leaf.kind == "key", leaf.kind == "array"
    entry = {
        "kind": None if is_array else leaf.kind,
        "implementation": key_data(leaf.dtype)[0] if is_key else None,
        "numpy": leaf.is_numpy,
        "shape": list(leaf.shape) if leaf.is_empty else None,
        "dtype": leaf.dtype.name if leaf.is_empty and is_array else None,
    }
    return {key: value for key, value in entry.items() if value}


def _mark_json(box: Any) -> dict[str, Any]:
    mark = mark_of(box)
    if mark.layout is not None:
        axes = ["..." if dim is ... else dim for dim in mark.layout.axes]
        return {"axes": axes, "memory_kind": mark.layout.memory_kind}
    if mark.names is None:
        return {}
    return {"names": mark.names, "logical": mark.rules, "kind": mark.kind}


def sealed(custom: Mapping[str, Any]) -> dict[str, Any]:
    """Add a digest of all custom metadata to our record."""
    record = {k: v for k, v in custom.get(KEY, {}).items() if k != "digest"}
    digest = json_digest({**custom, KEY: record})
    return {**custom, KEY: {**record, "digest": digest}}


def check_intact(custom: Mapping[str, Any], where: str) -> None:
    """Compare custom metadata with its digest, which older versions did not write."""
    dicts = [entry for entry in custom.values() if isinstance(entry, dict)]
    # Also that of a record whose own name is damaged.
    digests = [d["digest"] for d in dicts if d.keys() >= {"schema", "digest"}]
    if digests and digests != [sealed(custom)[KEY]["digest"]]:
        raise CheckpointError(
            f"the checkpoint {where} is damaged: its metadata are not those that were "
            f"saved ('custom_metadata' in its file {METADATA_FILE}); restore another "
            "checkpoint, or this one as it seems to be, with verify=False"
        )


# ---------------------------------------------------------------- read our record


def recorded_tree(custom: Mapping[str, Any]) -> Any:
    """The tree as Orbax's metadata have it; None if the record is old or damaged."""
    try:
        record = custom[KEY]
        return nested(
            {
                path: TYPES[record["leaves"][path]["kind"]]()
                if array is None
                else jax.ShapeDtypeStruct(tuple(array[0]), np.dtype(array[1]))
                for path, array in record["stored"].items()
            }
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return None


@dataclasses.dataclass(frozen=True)
class Record:
    """The leaves of a checkpoint, and what our record has besides."""

    leaves: dict[str, Leaf]  # by their names after `rename=`
    flat: Flat | None = None
    origins: Mapping[str, Origin] = dataclasses.field(default_factory=dict)
    checksums: Mapping[str, str] | None = None
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def read_record(data: Any, held: Mapping[str, Any], where: str) -> Record:
    """Read our record; `held` maps paths to Orbax's metadata."""
    record = data if isinstance(data, dict) else {}
    if record.get("schema") != 1:
        raise CheckpointError(
            f"the checkpoint {where} has metadata of flax_layoutmap with the schema "
            f"{record.get('schema')!r}, written by {record.get('versions')}; this "
            "version reads schema 1"
        )
    try:
        return _record(record, held)
    except (KeyError, TypeError, ValueError, AttributeError, LayoutError) as error:
        raise CheckpointError(
            f"the checkpoint {where} is damaged: the metadata of flax_layoutmap are "
            f"not whole, or do not fit Orbax's: {error!r}; restore another checkpoint"
        ) from error


def _record(record: Mapping[str, Any], held: Mapping[str, Any]) -> Record:
    inner, sections, owners = list[str](), list[Section](), {}
    for entry in record["sections"]:
        start, paths = len(inner), entry["paths"]
        inner += paths
        sections.append(Section(start, len(inner), entry["prefix"], entry["role"]))
        if entry["role"] == "optimizer":
            owners |= zip(range(start, len(inner)), entry["owners"], strict=True)
    full, origins = Flat(inner, sections).full_paths(), {}
    for at, (owner, dims) in owners.items():
        dims = None if dims is None else tuple(dims)
        origins[full[at]] = Origin(owner, dims, "unknown when it was saved")
    special, sums = record["leaves"], record.get("checksums")
    positions = {path: at for at, path in enumerate(full)}
    marks = {positions[path]: _mark(x) for path, x in record["layouts"].items()}
    fixed = {positions[path] for path in record["random"]}
    leaves = {path: _leaf(path, special.get(path, {}), held) for path in full}
    stored = {path for path, leaf in leaves.items() if not leaf.is_empty}
    if wrong := (stored ^ held.keys()) | (special.keys() - positions.keys()):
        raise KeyError(min(wrong))
    abstract = [leaf.abstract for leaf in leaves.values()]
    flat = Flat(inner, sections, abstract, annotations=marks, fixed=fixed)
    sums = sums and {path: f"{int(text, 16):016x}" for path, text in sums.items()}
    about = {"rules": record["rules"], "versions": dict(record["versions"])}
    about["mesh"] = mesh_from_json(record["mesh"])
    return Record(leaves, flat, origins, sums, about)


def _leaf(path: str, entry: Mapping[str, Any], held: Mapping[str, Any]) -> Leaf:
    """A saved leaf; an empty one is in our record alone."""
    kind = entry.get("kind", "array")
    if kind in TYPES:
        return Leaf(path, kind)
    array = held.get(path)
    shape = tuple(entry["shape"] if array is None else array.shape)
    if kind == "key":
        # Orbax keeps the key data, which have a dim more.
        shape = shape if array is None else shape[:-1]
        return Leaf(path, kind, shape, key_dtype(entry["implementation"]))
    dtype = np.dtype(entry["dtype"] if array is None else array.dtype)
    return Leaf(path, kind, shape, dtype, is_numpy=entry.get("numpy", False))


def _mark(entry: Mapping[str, Any]) -> Mark:
    if "names" in entry:
        names = tuple(map(tuple, entry["names"]))
        rules = tuple((name, _dim(axes)) for name, axes in entry["logical"])
        return Mark(names=names, rules=rules, kind=entry["kind"])
    axes = [... if dim == "..." else _dim(dim) for dim in entry["axes"]]
    layout = TensorLayout(axes, memory_kind=entry["memory_kind"])
    return Mark(layout=layout, kind="nnx")


def _dim(dim: Any) -> Any:
    return tuple(dim) if isinstance(dim, list) else dim
