"""The metadata of a checkpoint: what `save` adds to Orbax's, and what is read of both.

Our record (schema 1, in Orbax's custom metadata) holds what resolving needs of the
saved tree (sections, origins of optimizer state, random state, layouts on the variables
themselves), so that rules apply to a checkpoint exactly as to the live tree; and the
leaves that Orbax would not return unchanged (Python numbers, PRNG keys, empty arrays).
It has shape and dtype of every stored array, for which Orbax would open the array.

A checkpoint that Orbax wrote without us is resolved as the nested dict that it is;
paths lose the `value` that NNX Variables and Linen boxes add.
"""

import dataclasses
import functools
import importlib.metadata
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from flax_layoutmap._core.checksums import json_digest
from flax_layoutmap._core.errors import CheckpointError, LayoutError
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._resolve.leaves import Leaves, Mark, mark_of
from flax_layoutmap._resolve.optimizer_state import Origin, known_origins
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.resolve import resolve as resolve_tree
from flax_layoutmap._resolve.resolve import resolve_origins
from flax_layoutmap._rules.files import (
    mesh_from_json,
    mesh_to_json,
    rules_from_json,
    rules_to_json,
)
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._tree.paths import Flat, Section, unescape
from flax_layoutmap.checkpoint import _orbax
from flax_layoutmap.checkpoint._leaves import (
    TYPES,
    Leaf,
    key_data,
    key_dtype,
    leaf_of,
    nested,
)
from flax_layoutmap.checkpoint._options import Options, Rename, renamed
from flax_layoutmap.checkpoint._places import METADATA_FILE, Place, find

KEY = "flax_layoutmap"
CheckpointKind = Literal["flax_layoutmap", "orbax-v1", "orbax-v0", "safetensors"]

_LIBRARIES = ("flax-layoutmap", "jax", "flax", "orbax-checkpoint")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """A checkpoint of Orbax whose metadata has been read.

    `leaves` maps names (after `rename`) to leaves with their path in the checkpoint,
    `held` these paths to Orbax's metadata, and `tree` is the tree of these. `flat` is
    the saved tree without its leaves, None without our record. `rules` are JSON.
    """

    place: Place
    kind: CheckpointKind
    held: dict[str, Any]
    tree: Any
    custom: dict[str, Any]
    leaves: dict[str, Leaf]
    flat: Flat | None = None
    origins: Mapping[str, Origin] = dataclasses.field(default_factory=dict)
    mesh: DeviceMesh | None = None
    rules: dict[str, Any] | None = None
    versions: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    checksums: Mapping[str, str] | None = None

    @property
    def where(self) -> str:
        return self.place.path

    def rule_set(self, mesh: Any) -> RuleSet | None:
        if self.rules is None:
            return None
        rules = _rules(json.dumps(self.rules))
        return rules if mesh is None else rules.on(mesh)

    def read(
        self,
        wanted: Mapping[str, Any],
        host_memory: int | None = None,
        replica_axis: int | None = None,
    ) -> dict[str, Any]:
        """Read leaves: path in the checkpoint → target of Orbax, to path → value."""
        every = [wanted.get(path, ...) for path in self.held]
        target = jax.tree.unflatten(jax.tree.structure(self.tree), every)
        values = _orbax.read_arrays(
            self.where, target, self.place.item, host_memory, replica_axis
        )
        pairs = zip(self.held, values, strict=True)
        return {path: value for path, value in pairs if path in wanted}

    def resolve(self, rules: RuleSet) -> Resolution:
        """Resolve the saved tree, as the live tree would be."""
        if self.flat is None:
            abstract = {path: leaf.abstract for path, leaf in self.leaves.items()}
            return resolve_tree(nested(abstract, unescape), rules)
        leaves = list(self.leaves.values())
        shapes = [leaf.shape for leaf in leaves]
        dtypes = [None if x.kind == "string" else x.numpy_dtype for x in leaves]
        origins = [self.origins.get(path) for path in self.leaves]
        read = Leaves(self.flat, shapes, dtypes, jax.tree.structure(leaves))
        return resolve_origins(known_origins(read, origins), rules)

    def changed(self, leaves: Sequence[Leaf], sums: Mapping[str, str]) -> list[str]:
        recorded = self.checksums or {}
        return [
            f"{leaf.name}: its data are not those that were saved; restore another "
            "checkpoint, or the rest of this one with exclude="
            for leaf in leaves
            if sums[leaf.path] != recorded.get(leaf.path)
        ]

    def no_checksums(self) -> str:
        return (
            f"cannot verify {self.where}: it was saved without checksums; restore it "
            "and save it again with flm.checkpoint.save"
        )


def open_checkpoint(
    place: Place, rename: Rename = (), *, verify: bool | None = None
) -> Stored:
    """Read the metadata of a checkpoint; compare them with their digest."""
    read = _orbax.read_metadata(place.path, place.item, _recorded_tree)
    known: dict[str, Any]
    if verify is not False:
        check_intact(read.custom, place.path)
    is_ours = KEY in read.custom
    held = _orbax.leaves_of(read.tree, escaped=is_ours)
    if is_ours:
        known = {"kind": KEY, **_recorded(read.custom[KEY], held, place.path)}
    else:
        leaves = _named(held, place.path)
        known = {"kind": "orbax-v1" if read.is_v1 else "orbax-v0", "leaves": leaves}
    if rename:
        names = renamed(list(known["leaves"]), rename)
        leaves = zip(names, known["leaves"].values(), strict=True)
        known |= {"leaves": dict(leaves), "flat": None, "origins": {}}
    place = dataclasses.replace(place, item=read.item)
    known |= {"place": place, "held": held, "tree": read.tree}
    return Stored(custom=read.custom, **known)


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
    place = find(options.path, step, newest=True)
    stored = open_checkpoint(place, options.rename)
    rules = options.rules or stored.rule_set(options.mesh)
    if rules is not None and rules.mesh is None and stored.mesh is not None:
        rules = rules.on(stored.mesh)
    if rules is None or rules.mesh is None:
        lacking = "rules; pass layout_map=" if rules is None else "a mesh; pass mesh="
        raise CheckpointError(f"{stored.where} was saved without {lacking}")
    return stored.resolve(rules)


@functools.lru_cache(maxsize=4)
def _rules(text: str) -> RuleSet:
    """The rules of a record, cached by its text, so that warnings are emitted once."""
    return rules_from_json(json.loads(text))


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


def _recorded_tree(custom: Mapping[str, Any]) -> Any:
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


def _recorded(data: Any, held: Mapping[str, Any], where: str) -> dict[str, Any]:
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


def _fields(record: Mapping[str, Any], held: Mapping[str, Any]) -> dict[str, Any]:
    inner, sections, owners = list[str](), list[Section](), {}
    for entry in record["sections"]:
        start, paths = len(inner), entry["paths"]
        inner += paths
        sections.append(Section(start, len(inner), entry["prefix"], entry["role"]))
        if entry["role"] == "optimizer":
            owners |= zip(range(start, len(inner)), entry["owners"], strict=True)
    flat = Flat(inner, sections)
    full, origins = flat.full_paths(), {}
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
    return {
        "leaves": leaves,
        "flat": dataclasses.replace(flat, annotations=marks, fixed=fixed),
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


# -------------------------------------------- checkpoints that Orbax wrote without us


def _named(held: Mapping[str, Any], where: str) -> dict[str, Leaf]:
    """The leaves by the path that each has in a live tree."""
    folders = (p[: end.start()] for p in held for end in re.finditer("/", p))
    leaves_below, leaves = Counter(folders), {}
    for path, array in held.items():
        leaf = leaf_of(path, array)
        if hasattr(array, "shape"):
            # Only arrays of JAX have a recorded sharding.
            is_numpy = not hasattr(array, "sharding_metadata")
            dtype = np.dtype(array.dtype)
            leaf = Leaf(path, "array", tuple(array.shape), dtype, is_numpy=is_numpy)
        if leaf is None:
            raise CheckpointError(
                f"the checkpoint {where}: leaf {path!r} is of a kind that cannot be "
                f"restored: {array!r}"
            )
        parent, _, last = path.rpartition("/")
        # A Variable holds nothing else; siblings make `value` an ordinary name.
        is_variable = last == "value" and leaves_below[parent] == 1
        leaves[parent if is_variable else path] = leaf
    return leaves
