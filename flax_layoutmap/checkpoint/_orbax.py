"""The one place that calls Orbax, by the public names of its v1 API."""

import contextlib
import glob
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from flax_layoutmap._errors import CheckpointError, LayoutError, did_you_mean

_UNFINISHED = ".orbax-checkpoint-tmp"
_METADATA_FILE = "_CHECKPOINT_METADATA"
# Suffixes beside a checkpoint while it is replaced: the new one, and the old one.
_NEW, _OLD = ".replacement", ".replaced"

# Below this, one process writes a replicated array whole. Cut among the replicas, a
# bias of 8 numbers on 8 devices would become 8 chunks.
_MIN_SLICE_BYTES = 1 << 20


def absolute(path: str | os.PathLike[str]) -> str:
    """The absolute path, which Orbax asks for; URLs (`gs://…`) stay as they are."""
    text = os.fspath(path)
    return text if _is_url(text) else os.path.abspath(os.path.expanduser(text))


def _is_url(path: str) -> bool:
    return "://" in path


# -------------------------------------------------------------------- writing


def cannot_write(path: str, overwrite: bool) -> str | None:
    """Why nothing can be written to a path, or None."""
    if _is_url(path):
        return None
    if not os.path.lexists(path):
        return _no_place(Path(path).parent)
    if not overwrite:
        return "the path exists; save to another one, or pass overwrite=True"
    if not os.path.isfile(os.path.join(path, _METADATA_FILE)):
        return (
            "the path exists and is no checkpoint, so overwrite=True does not replace "
            "it; remove it yourself, or save to another path"
        )
    return None


def _no_place(parent: Path) -> str | None:
    """Why no directory can be made in another one, or None.

    Orbax finds out too late: after such a failure its threads hold up the end of the
    program for five minutes.
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
    """Writes a checkpoint; returns when all of it is there.

    An existing one stays until the new one is complete beside it.
    """
    from orbax.checkpoint import v1

    replace = overwrite and not _is_url(path) and os.path.exists(path)
    if replace:
        path = os.path.realpath(path)  # a link stays, what it leads to is replaced
    with translated(f"cannot save to {path}"), saving_context():
        v1.save(
            path + _NEW if replace else path,
            tree,
            overwrite=overwrite,
            custom_metadata=metadata,
        )
    if replace:
        _on_first_process(lambda: _swap(path), f"cannot replace {path}")


def saving_context() -> Any:
    """Orbax's options for writing, as a context manager."""
    from orbax.checkpoint import v1

    context = v1.Context()
    saving = context.array.saving
    saving.min_slice_bytes_for_replica_parallel = _MIN_SLICE_BYTES
    # Shardings come from rules or the target, never from the checkpoint; the file
    # would hold the whole mesh once per array.
    saving.enable_write_sharding_file = False
    return context


def _swap(path: str) -> None:
    """Puts the new checkpoint in the place of the old one."""
    if os.path.lexists(path + _OLD):
        shutil.rmtree(path + _OLD)  # of an earlier swap that was interrupted
    os.rename(path, path + _OLD)
    os.rename(path + _NEW, path)
    shutil.rmtree(path + _OLD)


def _on_first_process(action: Callable[[], None], failing: str) -> None:
    """Runs an action on process 0; all processes wait, and all learn of a failure."""
    error: OSError | None = None
    if jax.process_index() == 0:
        try:
            action()
        except OSError as caught:
            error = caught
    failed = error is not None
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        failed = bool(multihost_utils.broadcast_one_to_all(np.bool_(failed)))
    if failed:
        raise CheckpointError(
            f"{failing}: {error or 'process 0 failed'}; beside it are the new one "
            f"({_NEW!r} added) and the old one ({_OLD!r}), where they are not in place"
        ) from error


# -------------------------------------------------------------------- reading


def read_metadata(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads what a checkpoint holds, but no array.

    Returns:
        Path → Orbax's metadata of the leaf, and the custom metadata.

    Raises:
        CheckpointError: there is no checkpoint, or its metadata cannot be read.
    """
    if not _is_url(path):
        _check_place(path)
    from orbax.checkpoint import v1

    with translated(f"{path} is no readable checkpoint"), v1.Context():
        read = v1.metadata(path)
    # Orbax logs what is wrong with a file, and answers None.
    if not isinstance(read.metadata, dict):
        raise CheckpointError(
            f"the checkpoint {path} is damaged: in its folder 'state', _METADATA, "
            "manifest.ocdbt or a file below d is missing or cut; Orbax has logged which"
        )
    custom = read.custom_metadata
    return unnested(read.metadata), custom if isinstance(custom, dict) else {}


def read_arrays(path: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """Reads leaves.

    Args:
        path: the checkpoint.
        wanted: path → what Orbax takes as target of each leaf that it holds: a
            `jax.ShapeDtypeStruct` with sharding, `np.ndarray`, a Python value, or
            `...` to pass over the leaf.

    Returns:
        Path → value; `...` for what was passed over.
    """
    if all(value is ... for value in wanted.values()):
        return wanted
    from orbax.checkpoint import v1

    with translated(f"cannot read the checkpoint {path}"), v1.Context():
        return unnested(v1.load(path, nested(wanted)))


def nested(leaves: Mapping[str, Any], key: Callable[[str], str] = str) -> Any:
    """Path → leaf, as a nested dict with one level for each part of the paths."""
    root: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = (key(part) for part in path.split("/"))
        node = root
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = leaf
    return root


def unnested(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The inverse of `nested`."""
    leaves: dict[str, Any] = {}
    for key, node in tree.items():
        if isinstance(node, dict):
            leaves.update(unnested(node, f"{prefix}{key}/"))
        else:
            leaves[f"{prefix}{key}"] = node
    return leaves


def _check_place(path: str) -> None:
    """Says in plain words what is wrong with a path, where that can be seen."""
    place = Path(path)
    if _UNFINISHED in place.name:
        raise CheckpointError(
            f"{path} is an unfinished checkpoint: its save was interrupted; restore an "
            "earlier one"
        )
    if not place.exists():
        raise CheckpointError(f"there is no checkpoint at {path}{_near(place)}")
    if not place.is_dir():
        raise CheckpointError(f"{path} is a file; a checkpoint is a directory")
    if (place / _METADATA_FILE).is_file():
        return
    inside = sorted(
        child.name for child in place.iterdir() if (child / _METADATA_FILE).is_file()
    )
    if inside:
        hint = f"; it holds checkpoints: {', '.join(inside[:5])}"
    elif (place.parent / _METADATA_FILE).is_file():
        hint = f"; the checkpoint is the directory above it, {place.parent}"
    elif not any(place.iterdir()):
        hint = ": the directory is empty"
    else:
        hint = f": it has no file {_METADATA_FILE}"
    raise CheckpointError(f"{path} is no checkpoint{hint}")


def _near(place: Path) -> str:
    """What lies beside a path that does not exist."""
    kept = [f"{place}{end}" for end in (_OLD, _NEW) if os.path.exists(f"{place}{end}")]
    if kept:
        return (
            f": overwriting it was interrupted, and {' and '.join(kept)} "
            f"{'are' if len(kept) > 1 else 'is'} there ({_OLD!r} is the old one, "
            f"{_NEW!r} the new one); rename the one that you want"
        )
    unfinished = glob.glob(f"{glob.escape(str(place))}{_UNFINISHED}*")
    if unfinished:
        return f": its save did not finish ({unfinished[0]} is there)"
    if not place.parent.is_dir():
        return f"; there is no directory {place.parent}"
    beside = [child.name for child in place.parent.iterdir() if child.is_dir()]
    return did_you_mean(place.name, beside)


@contextlib.contextmanager
def translated(failing: str) -> Iterator[None]:
    """Re-raises what Orbax or TensorStore raise, with its root cause in one line."""
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
    # TensorStore adds its whole configuration, and places in its own source.
    text = re.split(r" \[(?:tensorstore_spec|source locations)", str(error))[0]
    text = text if len(text) <= 600 else f"{text[:600]} …"
    stored = re.search(r'"([^"]+?)/(?:c/[^"]*|c|zarr\.json)"', text)
    leaf = f"leaf {stored[1].replace('.', '/')!r}: " if stored else ""
    name = "" if isinstance(error, ValueError) and " " in text else type(error).__name__
    return f"{leaf}{name}{': ' if name and text else ''}{text}"
