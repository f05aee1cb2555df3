"""The custom metadata of a checkpoint, schema 1: what Orbax does not store.

It holds what resolving needs of the saved tree (sections, origins of
optimizer state, random state, layouts on the variables themselves), so that rules apply
to a checkpoint exactly as to the live tree; and the leaves that
Orbax would not return unchanged (Python numbers, PRNG keys, empty arrays).
"""

import dataclasses
import functools
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import linen, nnx

from flax_layoutmap._core.checksums import json_digest
from flax_layoutmap._core.errors import CheckpointError, LayoutError
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._resolve.leaves import Leaves, Mark, mark_of, without_arrays
from flax_layoutmap._resolve.origins import Origin, known_origins
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.resolve import resolve_origins
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._rules.serialise import (
    mesh_from_json,
    mesh_to_json,
    rules_from_json,
    rules_to_json,
)
from flax_layoutmap._tree.flax_internals import without_eager_sharding
from flax_layoutmap._tree.paths import Flat, Role, Section
from flax_layoutmap.checkpoint._leaves import TYPES, Kind, Leaf, key_leaf
from flax_layoutmap.checkpoint._places import METADATA_FILE

KEY = "flax_layoutmap"

# The entries of records of versions that wrote no digest.
_ENTRIES = {
    *("schema", "versions", "mesh", "rules", "sections", "leaves"),
    *("random", "layouts", "checksums"),
}

_LIBRARIES = ("flax-layoutmap", "jax", "flax", "orbax-checkpoint")


@functools.lru_cache(maxsize=4)
def _recorded(text: str) -> RuleSet:
    """The rules of a record, cached by its text, so that warnings are emitted once."""
    return rules_from_json(json.loads(text))


def to_json(
    flat: Flat,
    leaves: Sequence[Leaf],
    owners: Mapping[str, tuple[str | None, tuple[int | None, ...] | None]],
    rules: RuleSet | None,
) -> dict[str, Any]:
    """The record of a flattened tree; `owners` is `Resolution.owners()`."""
    paths = flat.full_paths()
    sections = []
    for section in flat.sections:
        span = slice(section.start, section.stop)
        entry: dict[str, Any] = {"prefix": section.prefix, "role": section.role}
        entry["paths"] = flat.paths[span]
        if section.role == "optimizer":
            entry["owners"] = [owners.get(path, (None, None)) for path in paths[span]]
        sections.append(entry)
    special = {leaf.path: _leaf_json(leaf) for leaf in leaves}
    marks = {paths[at]: mark_of(box) for at, box in flat.annotations.items()}
    layouts = {path: _mark_json(mark) for path, mark in marks.items()}
    return {
        "schema": 1,
        "versions": {name: _version(name) for name in _LIBRARIES},
        "mesh": None if rules is None else mesh_to_json(rules.mesh),
        "rules": None if rules is None else rules_to_json(rules),
        "sections": sections,
        "leaves": {path: entry for path, entry in special.items() if entry},
        "random": [paths[at] for at in sorted(flat.fixed)],
        "layouts": {path: entry for path, entry in layouts.items() if entry},
    }


def sealed(custom: Mapping[str, Any]) -> dict[str, Any]:
    """Add a digest of all custom metadata to our record."""
    record = {name: v for name, v in custom[KEY].items() if name != "digest"}
    digest = json_digest({**custom, KEY: record})
    return {**custom, KEY: {**record, "digest": digest}}


def check_intact(custom: Mapping[str, Any], where: str) -> None:
    """Compare custom metadata with its digest.

    Older versions wrote none; entries that those did not write are then a sign of
    damage.
    """
    record = custom.get(KEY)
    if not isinstance(record, dict):  # of plain Orbax, or its name is damaged
        intact = not any(map(_holds_record, custom.values()))
    elif "digest" in record:
        intact = sealed(custom)[KEY]["digest"] == record["digest"]
    else:
        intact = record.keys() <= _ENTRIES
    if not intact:
        raise CheckpointError(
            f"the checkpoint {where} is damaged: its metadata are not those that were "
            f"saved ('custom_metadata' in its file {METADATA_FILE}); restore another "
            "checkpoint, or this one as it seems to be, with verify=False"
        )


def _holds_record(value: Any) -> bool:
    """Whether a value is, or holds, our record under a damaged name."""
    return isinstance(value, dict) and (
        KEY in value or value.keys() >= {"schema", "sections", "leaves"}
    )


@dataclasses.dataclass(frozen=True)
class Record:
    """The parsed record of a checkpoint.

    `paths` are in the order of the saved tree; `flat` is that tree without its leaves,
    `origins` gives the origin of each leaf of optimizer state, `special` what Orbax
    does not keep of a leaf. `mesh` is abstract, `rules` are JSON, `checksums` are by
    path in the checkpoint; each is None if it was not saved.
    """

    paths: list[str]
    origins: dict[str, Origin]
    flat: Flat
    special: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    mesh: DeviceMesh | None = None
    rules: dict[str, Any] | None = None
    versions: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    checksums: Mapping[str, str] | None = None

    def rule_set(self, mesh: Any) -> RuleSet | None:
        """The saved rules on a mesh; None if there are none."""
        if self.rules is None:
            return None
        rules = _recorded(json.dumps(self.rules))
        return rules if mesh is None else rules.on(mesh)

    def roles(self) -> dict[str, Role]:
        """Path → role of the leaf."""
        full, roles = self.flat.full_paths(), {}
        for section in self.flat.sections:
            for at in range(section.start, section.stop):
                fixed = at in self.flat.fixed
                roles[full[at]] = "other" if fixed else section.role
        return roles

    def is_empty(self, path: str) -> bool:
        """Whether a leaf has no elements, so that Orbax does not store it."""
        return "shape" in self.special.get(path, {})

    def leaf(self, path: str, held: Any) -> Leaf:
        """The saved leaf; `held` is Orbax's metadata, None if Orbax does not store it.

        Raises KeyError, TypeError or ValueError for an inconsistent record or an
        unknown PRNG implementation.
        """
        entry = self.special.get(path, {})
        kind: Kind = entry.get("kind", "array")
        if kind in TYPES:
            return Leaf(path, kind)
        if held is not None and not hasattr(held, "shape"):
            raise ValueError(f"it is not an array, but {held!r}")
        shape = tuple(entry["shape"] if held is None else held.shape)
        if kind == "key":
            own = shape if held is None else shape[:-1]
            return key_leaf(path, own, entry["implementation"])
        if kind != "array":
            raise ValueError(f"it is of the unknown kind {kind!r}")
        dtype = np.dtype(entry["dtype"] if held is None else held.dtype)
        return Leaf(path, kind, shape, dtype, is_numpy=entry.get("numpy", False))

    def resolve(self, leaves: Mapping[str, Leaf], rules: RuleSet) -> Resolution:
        """Resolve the saved tree, as the live tree would be."""
        paths = self.flat.full_paths()
        shapes = [leaves[path].shape for path in paths]
        dtypes = [_resolving_dtype(leaves[path]) for path in paths]
        origins = [self.origins.get(path) for path in paths]
        treedef = jax.tree.structure(paths)
        read = Leaves(without_arrays(self.flat), shapes, dtypes, treedef)
        return resolve_origins(known_origins(read, origins), rules)


def from_json(data: Any, where: str) -> Record:
    """Parse the record of the checkpoint `where`."""
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != 1:
        by = data.get("versions") if isinstance(data, dict) else None
        raise CheckpointError(
            f"the checkpoint {where} has metadata of flax_layoutmap with the schema "
            f"{schema!r}, written by {by}; this version reads schema 1. Read it with "
            "orbax.checkpoint.v1.load and targets from layout_map.abstract(tree)"
        )
    try:
        return _read(data)
    except (KeyError, TypeError, ValueError, AttributeError, LayoutError) as error:
        raise CheckpointError(
            f"the metadata of flax_layoutmap in the checkpoint {where} is damaged: "
            f"{error!r}; restore another checkpoint"
        ) from error


def _read(data: dict[str, Any]) -> Record:
    flat, origins = Flat(), {}
    for entry in data["sections"]:
        start, prefix, role = len(flat.paths), entry["prefix"], entry["role"]
        flat.paths.extend(entry["paths"])
        flat.sections.append(Section(start, len(flat.paths), prefix, role))
        if role == "optimizer":
            full = flat.full_paths()[start:]
            for path, (owner, dims) in zip(full, entry["owners"], strict=True):
                dims = None if dims is None else tuple(dims)
                origins[path] = Origin(owner, dims, "unknown when it was saved")
    paths = list(flat.full_paths())
    positions = {path: at for at, path in enumerate(paths)}
    unknown = data["leaves"].keys() - positions.keys()
    if unknown:
        raise KeyError(min(unknown))
    flat.fixed.update(positions[path] for path in data["random"])
    flat.annotations.update(
        {positions[path]: _box(entry) for path, entry in data["layouts"].items()}
    )
    sums = data.get("checksums")
    sums = None if sums is None else sums.items()
    return Record(
        paths,
        origins,
        flat,
        dict(data["leaves"]),
        mesh_from_json(data["mesh"]),
        data["rules"],
        dict(data["versions"]),
        None if sums is None else {path: f"{int(t, 16):016x}" for path, t in sums},
    )


# ------------------------------------------------------------------- pieces


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None  # the package runs from a checkout


def _leaf_json(leaf: Leaf) -> dict[str, Any]:
    """What Orbax does not keep of a leaf; empty for an ordinary array."""
    entry: dict[str, Any] = {}
    if leaf.kind != "array":
        entry["kind"] = leaf.kind
    if leaf.kind == "key":
        entry["implementation"] = leaf.implementation
    if leaf.is_numpy:
        entry["numpy"] = True
    if leaf.is_empty:
        entry["shape"] = list(leaf.shape)
        if leaf.kind == "array":
            entry["dtype"] = leaf.dtype.name
    return entry


def _mark_json(mark: Mark) -> dict[str, Any]:
    """The layout metadata of a Variable or Linen box."""
    if mark.layout is not None:
        axes = ["..." if dim is ... else dim for dim in mark.layout.axes]
        return {"axes": axes, "memory_kind": mark.layout.memory_kind}
    if mark.names is None:
        return {}
    return {"names": mark.names, "logical": mark.rules, "kind": mark.kind}


def _box(entry: dict[str, Any]) -> Any:
    """A Variable or Linen box without a value, with this layout metadata."""
    if "names" not in entry:
        axes = [... if dim == "..." else _dim(dim) for dim in entry["axes"]]
        layout = TensorLayout(axes, memory_kind=entry["memory_kind"])
        return nnx.Variable(None, layout=layout)
    names: Any = tuple(
        dim[0] if len(dim) == 1 else tuple(dim) or None for dim in entry["names"]
    )
    logical = tuple((name, _dim(axes)) for name, axes in entry["logical"])
    if entry["kind"] == "mesh":
        return linen.Partitioned(None, names=names)
    if entry["kind"] == "linen":
        return linen.LogicallyPartitioned(None, names=names, rules=logical)
    with without_eager_sharding():
        return nnx.Variable(None, out_sharding=names, sharding_rules=logical)


def _dim(dim: Any) -> Any:
    return tuple(dim) if isinstance(dim, list) else dim


def _resolving_dtype(leaf: Leaf) -> Any:
    if leaf.kind == "string":
        return None
    return np.dtype(TYPES[leaf.kind]) if leaf.is_python else leaf.dtype
