"""All calls to Orbax's v1 API, and to TensorStore for its database files.

Orbax stores a tree of arrays in an OCDBT database: a folder with `manifest.ocdbt`,
which leads to the nodes of a B+tree in files below `d`, whose entries lead to chunks in
files below `d`, of this folder or of one that a process wrote (`ocdbt.process_0`). A
"location" is TensorStore's text for a part of a file, as in
`value:ocdbt.process_0/:d/8bc1…:0:453`: kind, folder, file, first byte, number of bytes.
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import PartitionSpec

from flax_layoutmap._core.errors import CheckpointError, LayoutError, did_you_mean
from flax_layoutmap._rules.records import Shape
from flax_layoutmap._tree.paths import escape, key_of
from flax_layoutmap.checkpoint._places import (
    METADATA_FILE,
    NEW,
    OLD,
    cannot_name,
    check_place,
    is_url,
    on_first_process,
)

# Below this, one process writes a replicated array whole. Cut among the replicas, a
# bias of 8 numbers on 8 devices would become 8 chunks.
_MIN_SLICE_BYTES = 1 << 20
# Chunks are no larger, so that several processes can share the reading of an array that
# one wrote. (Orbax's `shard_axes` would cut a dim down to single elements.)
_CHUNK_BYTES = 16 << 20
# The metric by which TensorStore counts the bytes that it reads from files.
_COUNTER = "/tensorstore/kvstore/file/bytes_read"

# A file that only the v1 API writes, and one that every tree of arrays has.
_V1_FILE, _TREE_FILE = "orbax.checkpoint", "_METADATA"


# Threads take turns. Orbax numbers its operations by one counter of the process: a save
# during whose start another thread saves or loads loses track of its own directories,
# and fails or hangs. Once a save runs in the background, others may start.
TURN = threading.RLock()


# -------------------------------------------------------------------- writing


def cannot_write(path: str, overwrite: bool) -> str | None:
    """The reason why nothing can be written to a path, or None."""
    if is_url(path):
        return cannot_name(path)
    if not os.path.lexists(path):
        return cannot_name(path) or _no_place(Path(path).parent)
    if not overwrite:
        return "the path exists; save to another one, or pass overwrite=True"
    if not os.path.isfile(os.path.join(path, METADATA_FILE)):
        return (
            "the path exists and is no checkpoint, so overwrite=True does not replace "
            "it; remove it yourself, or save to another path"
        )
    return cannot_name(os.path.realpath(path))  # see `write`


def _no_place(parent: Path) -> str | None:
    """The reason why no directory can be created in another one, or None.

    Orbax fails too late: its threads then block the program's exit for five minutes.
    """
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        return f"{parent} is a file, so no directory can be made in it"
    if not os.access(parent, os.W_OK | os.X_OK):
        return f"the directory {parent} cannot be written to"
    return None


def write(
    path: str, tree: dict[str, Any], metadata: dict[str, Any], overwrite: bool
) -> None:
    """Write a checkpoint; return when it is complete.

    An existing one is replaced only when the new one is complete beside it.
    """
    from orbax.checkpoint import v1

    replace = overwrite and not is_url(path) and os.path.exists(path)
    if replace:
        path = os.path.realpath(path)  # replaces the target of a link, not the link
    with translated(f"cannot save to {path}"), saving_context():
        v1.save(
            path + NEW if replace else path,
            tree,
            overwrite=overwrite,
            custom_metadata=metadata,
        )
    if replace:
        on_first_process(
            lambda: _swap(path),
            lambda why: (
                f"cannot replace {path}: {why}; beside it are the new one ({NEW!r} "
                f"added) and the old one ({OLD!r}), where they are not in place"
            ),
        )


def saving_context() -> Any:
    """Orbax's options for writing, as a context manager."""
    from orbax.checkpoint import v1

    context = v1.Context()
    saving = context.array.saving
    saving.min_slice_bytes_for_replica_parallel = _MIN_SLICE_BYTES
    saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    # Shardings come from rules or the target, never from the checkpoint; the file
    # would hold the whole mesh once per array.
    saving.enable_write_sharding_file = False
    return context


def _swap(path: str) -> None:
    """Replace the old checkpoint by the new one."""
    if os.path.lexists(path + OLD):
        shutil.rmtree(path + OLD)  # of an earlier swap that was interrupted
    os.rename(path, path + OLD)
    os.rename(path + NEW, path)
    shutil.rmtree(path + OLD)


# -------------------------------------------------------------------- reading


@dataclasses.dataclass(frozen=True)
class Metadata:
    """The metadata of a checkpoint.

    `tree` holds Orbax's metadata of the leaves in dicts and lists; `item` is the folder
    of the tree, None if that is the checkpoint itself.
    """

    tree: Any
    custom: dict[str, Any]
    item: str | None
    is_v1: bool


def read_metadata(path: str, item: str | None = None) -> Metadata:
    """Read the metadata of a checkpoint, or of one of several trees in it."""
    if not is_url(path):
        check_place(path)
        _check_readable(path)
        item = _item(path, item)
    from orbax.checkpoint import v1

    own = {} if item is None else {"checkpointable_name": item}
    try:
        with translated(f"{path} is no readable checkpoint"), v1.Context():
            read = v1.metadata(path, **own)
    except CheckpointError as error:
        damage = damage_in(folder_of(path, item))
        if damage is None:
            raise
        raise CheckpointError(f"the checkpoint {path} is damaged: {damage}") from error
    if hasattr(read.metadata, "shape"):
        raise CheckpointError(
            f"the checkpoint {path} is a single array, which has no path for rules to "
            "match; read it with orbax.checkpoint.v1.load, and save it under a name"
        )
    # For a damaged file Orbax logs the reason and returns None.
    if not isinstance(read.metadata, dict | list):
        unknown = "Orbax cannot read it, and has logged why (it writes Python bools, "
        unknown += "which it cannot read)"
        raise CheckpointError(
            f"the checkpoint {path} is damaged: "
            f"{damage_in(folder_of(path, item)) or unknown}"
        )
    custom = read.custom_metadata
    return Metadata(
        read.metadata,
        custom if isinstance(custom, dict) else {},
        item,
        os.path.exists(os.path.join(path, _V1_FILE)),
    )


def folder_of(path: str, item: str | None) -> str:
    """The folder that holds the files of a tree."""
    return os.path.join(path, item) if item else path


def _check_readable(path: str) -> None:
    """Raise for a damaged metadata file, which Orbax would treat as an empty one."""
    name = os.path.join(path, METADATA_FILE)
    try:
        with open(name, encoding="utf-8") as file:
            read = json.load(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint {path} is damaged: its file {METADATA_FILE} cannot be "
            f"read: {error}"
        ) from error
    if not isinstance(read, dict):
        raise CheckpointError(
            f"the checkpoint {path} is damaged: its file {METADATA_FILE} holds "
            f"{type(read).__name__}, no JSON object"
        )


def _item(path: str, item: str | None) -> str | None:
    """The folder of the tree to read; None leaves the choice to Orbax."""
    items = items_in(path)
    if item is not None:
        if item not in items:
            raise CheckpointError(
                f"the checkpoint {path} has no tree {item!r}"
                f"{did_you_mean(item, items)}; it has {', '.join(items) or 'one only'}"
            )
        return item
    if len(items) > 1:
        raise CheckpointError(
            f"the checkpoint {path} holds several trees; name one: "
            + " or ".join(f"item={name!r}" for name in items)
        )
    return items[0] if items else None


def items_in(path: str) -> list[str]:
    """Names of the trees that a checkpoint has in separate folders."""
    if is_url(path) or os.path.isfile(os.path.join(path, _TREE_FILE)):
        return []  # the directory is the tree
    return sorted(
        child.name
        for child in Path(path).iterdir()
        if (child / _TREE_FILE).is_file() or (child / "manifest.ocdbt").is_file()
    )


def leaves_of(tree: Any, *, escaped: bool) -> dict[str, Any]:
    """Path → leaf of an Orbax tree of dicts and lists; None is no leaf.

    `escaped`: the keys are already escaped parts of paths, as `save` writes them.
    """
    part = str if escaped else escape
    return {
        "/".join(part(key_of(entry)) for entry in keys): leaf
        for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def read_arrays(
    path: str,
    wanted: Mapping[str, Any],
    tree: Any,
    *,
    item: str | None = None,
    replica_axis: int | None = None,
    alone: bool = False,
) -> dict[str, Any]:
    """Read leaves; return path → value.

    `wanted` has a target of Orbax for every leaf of `tree`, in the order of
    `leaves_of`: a `jax.ShapeDtypeStruct` with sharding, `np.ndarray`, a Python value,
    or `...` to skip the leaf (which is then its value, too). With `replica_axis`, the
    number of a mesh axis on which all wanted leaves are replicated, only the first
    replica is read and then broadcast. With `alone`, this process reads without waiting
    for the others.
    """
    if all(value is ... for value in wanted.values()):
        return dict(wanted)
    from orbax.checkpoint import v1

    own = {} if item is None else {"checkpointable_name": item}
    context = v1.Context()
    if replica_axis is not None:
        loading = context.array.loading
        loading.use_load_and_broadcast = True
        loading.load_and_broadcast_options.replica_axis_index = replica_axis
    if alone and jax.process_count() > 1:
        own_number = jax.process_index()
        context.multiprocessing.primary_host = own_number
        context.multiprocessing.active_processes = {own_number}
        context.multiprocessing.barrier_sync_key_prefix = f"alone_{own_number}"
    target = jax.tree.unflatten(jax.tree.structure(tree), list(wanted.values()))
    with TURN, translated(f"cannot read the checkpoint {path}"), context:
        read = v1.load(path, target, **own)
    return dict(zip(wanted, jax.tree.leaves(read), strict=True))


def bytes_read() -> int:
    """Bytes that TensorStore has read from files since this process started."""
    import tensorstore

    found = tensorstore.experimental_collect_matching_metrics(_COUNTER)
    return sum(
        int(value["value"]) for metric in found for value in metric.get("values", ())
    )


def chunk_of(held: Any) -> Shape | None:
    """The chunk shape of a stored array, or None."""
    storage = getattr(held, "storage_metadata", None)
    chunk = getattr(storage, "chunk_shape", None)
    return None if chunk is None else tuple(chunk)


def layout_of(held: Any) -> tuple[dict[str, int], PartitionSpec] | None:
    """The mesh (axis → size) and the spec that Orbax recorded, or None."""
    saved = getattr(held, "sharding_metadata", None)
    if hasattr(saved, "device_str"):
        return {}, PartitionSpec()  # whole, on one device
    spec = getattr(saved, "partition_spec", None)
    if saved is None or spec is None:
        return None
    entries = [tuple(e) if isinstance(e, list) else e for e in spec]
    # `shape` is that of the mesh.
    sizes = dict(zip(saved.axis_names, map(int, saved.shape), strict=True))
    return sizes, PartitionSpec(*entries)


@contextlib.contextmanager
def translated(failing: str) -> Iterator[None]:
    """Re-raise errors of Orbax and TensorStore, with their root cause in one line."""
    try:
        yield
    except LayoutError:
        raise
    except Exception as error:
        # Broad on purpose: a damaged chunk arrives as a bare `Exception`, a damaged
        # file as a ValueError, JSONDecodeError or one of Orbax's own.
        raise CheckpointError(f"{failing}: {_root_cause(error)}") from error


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    # TensorStore appends its configuration, and locations in its own source.
    text = re.split(r" \[(?:tensorstore_spec|source locations)", str(error))[0]
    text = text if len(text) <= 600 else f"{text[:600]} …"
    stored = re.search(r'"([^"]+?)/(?:c/[^"]*|c|zarr\.json)"', text)
    leaf = f"leaf {stored[1].replace('.', '/')!r}: " if stored else ""
    name = "" if isinstance(error, ValueError) and " " in text else type(error).__name__
    return f"{leaf}{name}{': ' if name and text else ''}{text}"


# ------------------------------------------------------------ database files


_TREE_FILE, _MANIFEST = "_METADATA", "manifest.ocdbt"
# Databases with more keys are not listed.
_MOST_KEYS = 200_000


def stored_bytes(folder: str) -> dict[str, int]:
    """Name of a leaf (its keys joined by `.`) → its bytes on disk.

    Empty if the folder is not one OCDBT database, or the database is too large to list.
    """
    sizes: dict[str, int] = {}
    for name, location in _entries(folder):
        leaf = name.split("/", 1)[0]
        # Small values are stored in the index itself.
        sizes[leaf] = sizes.get(leaf, 0) + (_part(location)[2] if location else 0)
    return sizes


def damage_in(folder: str) -> str | None:
    """Which file of a tree of arrays is damaged and how, or None.

    Checks the files that describe the tree, and that those with arrays exist and are
    long enough; reads no array.
    """
    if is_url(folder):
        return None
    tree_file = os.path.join(folder, _TREE_FILE)
    try:
        with open(tree_file, encoding="utf-8") as file:
            tree = json.load(file)
    except (OSError, ValueError) as error:
        return f"{tree_file}: {_without_path(error)}"
    manifest = os.path.join(folder, _MANIFEST)
    if not os.path.isfile(manifest):
        has_database = isinstance(tree, dict) and tree.get("use_ocdbt")
        return f"{manifest}: is missing" if has_database else None
    try:
        return _missing_part(folder)
    except ValueError as error:
        return str(error)


def _missing_part(folder: str) -> str | None:
    ends: dict[str, int] = {}
    for _, location in _entries(folder):
        if location:
            name, start, count = _part(location)
            ends[name] = max(ends.get(name, 0), start + count)
    for name, end in sorted(ends.items()):
        file = os.path.join(folder, name)
        if not os.path.isfile(file):
            return f"{file}: is missing"
        if os.path.getsize(file) < end:
            size = os.path.getsize(file)
            return f"{file}: is cut, it has {size:,} bytes of at least {end:,}"
    return None


def _entries(folder: str) -> Iterator[tuple[str, str | None]]:
    """Each key of a database, and the location of its value (None if stored inline).

    A damaged index raises a ValueError that begins with the name of its file.
    """
    if is_url(folder) or not os.path.isfile(os.path.join(folder, _MANIFEST)):
        return
    manifest = _dumped(folder, None)
    if not manifest["versions"]:
        return
    root = manifest["versions"][-1]["root"]
    if root["statistics"]["num_keys"] > _MOST_KEYS:
        return
    below = [(root["location"], "")]
    while below:
        where, prefix = below.pop()
        for entry in _dumped(folder, where)["entries"]:
            if "location" in entry:
                common = entry["subtree_common_prefix"].decode()
                below.append((entry["location"], prefix + common))
            else:
                yield prefix + entry["key"].decode(), entry.get("indirect_value")


def _dumped(folder: str, location: str | None) -> Mapping[str, Any]:
    import tensorstore

    base = tensorstore.KvStore.open({"driver": "file", "path": f"{folder}/"}).result()
    try:
        return tensorstore.ocdbt.dump(base, location).result()
    except ValueError as error:
        name = _MANIFEST if location is None else _part(location)[0]
        file = os.path.join(folder, name)
        if not os.path.isfile(file):
            raise ValueError(f"{file}: is missing") from error
        why = re.split(r" \[(?:tensorstore_spec|source locations)", str(error))[0]
        raise ValueError(f"{file}: {why}") from error


def _part(location: str) -> tuple[str, int, int]:
    """File, first byte and number of bytes of a location."""
    _, folder, rest = location.split(":", 2)
    name, start, count = rest.rsplit(":", 2)
    return folder + name, int(start), int(count)


def _without_path(error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        return "is missing"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
