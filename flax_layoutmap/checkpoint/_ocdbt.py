"""Read the index of TensorStore's OCDBT, the database in which Orbax stores arrays.

A tree of arrays is a folder with `manifest.ocdbt`, which leads to the nodes of a
B+tree in files below `d`, whose entries lead to chunks in files below `d` too, of this
folder or of one that a process wrote (`ocdbt.process_0`). What is called a location
here is TensorStore's text for a part of a file, `value:ocdbt.process_0/:d/8bc1…:0:453`:
its kind, a folder, the file in it, the first byte and how many.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from flax_layoutmap.checkpoint._places import is_url

_TREE_FILE, _MANIFEST = "_METADATA", "manifest.ocdbt"
# Databases with more keys are not listed.
_MOST_KEYS = 200_000


def stored_bytes(folder: str) -> dict[str, int]:
    """Name of a leaf (its keys joined by `.`) → bytes it takes in the files.

    Empty where the folder is not one OCDBT database, or it is too large to ask.
    """
    sizes: dict[str, int] = {}
    for name, location in _entries(folder):
        leaf = name.split("/", 1)[0]
        # Small values are stored in the index itself.
        sizes[leaf] = sizes.get(leaf, 0) + (_part(location)[2] if location else 0)
    return sizes


def damage_in(folder: str) -> str | None:
    """Which file of a tree of arrays is damaged, and how; None if none seems to be.

    Looks at the files that describe the tree, and whether those with its arrays are
    there and long enough; reads no array.
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
    """Every key of a database and where its value is; None where that is beside it.

    Raises:
        ValueError: a file of the index is damaged; begins with its name.
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
