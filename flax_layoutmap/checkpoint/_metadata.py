"""What `save` adds to Orbax's metadata of a checkpoint, written and read.

Our record (schema 1, in Orbax's custom metadata) holds what resolving needs of the
saved tree (sections, origins of optimizer state, random state, layouts on the Variables
themselves), so that rules apply to a checkpoint exactly as to the live tree; and the
leaves that Orbax would not return unchanged (Python numbers, PRNG keys, empty arrays).
It has shape and dtype of every stored array, for which Orbax would open the array.
"""

import functools
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from flax_layoutmap._core.checksums import json_digest
from flax_layoutmap._core.errors import CheckpointError, LayoutError
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._resolve.leaves import Mark, Origin, mark_of
from flax_layoutmap._rules.files import (
    mesh_from_json,
    mesh_to_json,
    rules_to_json,
)
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._tree.paths import Flat, Section
from flax_layoutmap.checkpoint._leaves import (
    TYPES,
    Leaf,
    key_data,
    key_dtype,
    nested,
)
from flax_layoutmap.checkpoint._places import METADATA_FILE

KEY = "flax_layoutmap"

_LIBRARIES = ("flax-layoutmap", "jax", "flax", "orbax-checkpoint")


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
        entry: dict[str, Any] = {"prefix": section.prefix, "role": section.role}
        entry["paths"] = flat.paths[span]
        if section.role == "optimizer":
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
        "stored": {x.path: _stored_json(x) for x in leaves if not x.is_empty},
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
    entry: dict[str, Any] = {}
    if leaf.kind != "array":
        entry["kind"] = leaf.kind
    if leaf.kind == "key":
        entry["implementation"] = key_data(leaf.dtype)[0]
    if leaf.is_numpy:
        entry["numpy"] = True
    if leaf.is_empty:
        entry["shape"] = list(leaf.shape)
        if leaf.kind == "array":
            entry["dtype"] = leaf.dtype.name
    return entry


def _stored_json(leaf: Leaf) -> list[Any] | None:
    """Shape and dtype of the array that Orbax stores; None for a Python value."""
    if leaf.kind == "key":
        return [[*leaf.shape, *key_data(leaf.dtype)[1]], "uint32"]
    if leaf.is_text:
        return None
    return [list(leaf.shape), leaf.numpy_dtype.name]


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
    """The tree as Orbax's metadata have it; None if an older version wrote the record.

    None also for a damaged record, which is compared with Orbax's.
    """
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


def read_record(
    data: Any, held: Mapping[str, Any], where: str
) -> tuple[Flat, dict[str, Any]]:
    """The saved tree with abstract leaves, and what else is known of it.

    `held` maps paths to Orbax's metadata.
    """
    record = data if isinstance(data, dict) else {}
    if record.get("schema") != 1:
        raise CheckpointError(
            f"the checkpoint {where} has metadata of flax_layoutmap with the schema "
            f"{record.get('schema')!r}, written by {record.get('versions')}; this "
            "version reads schema 1"
        )
    try:
        return _fields(record, held)
    except (KeyError, TypeError, ValueError, AttributeError, LayoutError) as error:
        raise CheckpointError(
            f"the checkpoint {where} is damaged: the metadata of flax_layoutmap are "
            f"not whole, or do not fit Orbax's: {error!r}; restore another checkpoint"
        ) from error


def _fields(
    record: Mapping[str, Any], held: Mapping[str, Any]
) -> tuple[Flat, dict[str, Any]]:
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
    return flat, {
        "leaves": leaves,
        "origins": origins,
        "mesh": mesh_from_json(record["mesh"]),
        "rules": record["rules"],
        "versions": dict(record["versions"]),
        "checksums": sums and {p: f"{int(text, 16):016x}" for p, text in sums.items()},
    }


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
