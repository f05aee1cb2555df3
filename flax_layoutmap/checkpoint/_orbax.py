"""All calls to Orbax, by its v1 interface alone."""

import contextlib
import dataclasses
import glob
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import PartitionSpec

from flax_layoutmap._core.errors import CheckpointError, LayoutError
from flax_layoutmap._tree.paths import escape, key_of
from flax_layoutmap.checkpoint._places import (
    METADATA_FILE,
    NEW,
    OLD,
    cannot_name,
    check_place,
    common_number,
    is_url,
    items_in,
    on_first_process,
)

# Below this, one process writes a replicated array whole. Cut among the replicas, a
# bias of 8 numbers on 8 devices would become 8 chunks.
_MIN_SLICE_BYTES = 1 << 20
# Chunks are no larger, so that several processes can share the reading of an array that
# one wrote. (Orbax's `shard_axes` would cut a dim down to single elements.)
_CHUNK_BYTES = 16 << 20
# The longest cause that a message quotes.
_CAUSE_CHARACTERS = 600
_ADVICE = "; if a file is damaged or missing, restore another checkpoint"


# Threads take turns. Orbax numbers its operations by one counter of the process: a save
# during whose start another thread saves or loads loses track of its own directories,
# and fails or hangs. Once a save runs in the background, others may start.
TURN = threading.RLock()


def v1() -> Any:
    """Orbax's v1 interface, which is to become the top level of its package."""
    import orbax.checkpoint

    return getattr(orbax.checkpoint, "v1", orbax.checkpoint)


# -------------------------------------------------------------------- writing


def cannot_write(path: str, overwrite: bool) -> str | None:
    if is_url(path):
        return cannot_name(path)
    if not os.path.lexists(path):
        return cannot_name(path) or _no_place(Path(path))
    if not overwrite:
        return "the path exists; save to another one, or pass overwrite=True"
    if not os.path.isfile(os.path.join(path, METADATA_FILE)):
        return (
            "the path exists and is not a checkpoint, so overwrite=True does not "
            "replace it; remove it yourself, or save to another path"
        )
    real = os.path.realpath(path)  # see `write`
    return cannot_name(real) or _no_place(Path(f"{real}{NEW}-{0:016x}"))


def _no_place(path: Path) -> str | None:
    """The reason why a directory cannot be made, or None. Process 0 tries it.

    When Orbax fails, its threads block the program's exit for five minutes.
    """
    if jax.process_index() != 0:
        return None
    missing = [parent for parent in path.parents if not os.path.lexists(parent)]
    try:
        os.makedirs(path.parent, exist_ok=True)
        # A name as long as that of Orbax, and beside it.
        name = f"{path.name}.flax_layoutmap-"
        os.rmdir(tempfile.mkdtemp(prefix=name, dir=path.parent))
    except (OSError, ValueError) as error:
        return f"the directory {path} cannot be made: {error}"
    finally:
        for parent in missing:
            with contextlib.suppress(OSError, ValueError):
                os.rmdir(parent)
    return None


def write(
    path: str, tree: dict[str, Any], metadata: dict[str, Any], overwrite: bool
) -> None:
    if not overwrite or is_url(path) or not os.path.exists(path):
        _save(path, tree, metadata, overwrite)
        return
    path = os.path.realpath(path)  # replaces the target of a link, not the link
    number = common_number()
    new, old = f"{path}{NEW}-{number:016x}", f"{path}{OLD}-{number:016x}"

    def swap() -> None:
        os.rename(path, old)
        os.rename(new, path)

    try:
        _save(new, tree, metadata, overwrite=False)
        on_first_process(swap, lambda why: f"cannot replace {path}: {why}")
    finally:
        if jax.process_index() == 0:
            if os.path.lexists(old) and not os.path.lexists(path):
                os.rename(old, path)
            for left in [*glob.glob(f"{new}*"), old]:
                shutil.rmtree(left, ignore_errors=True)


def _save(
    path: str, tree: dict[str, Any], metadata: dict[str, Any], overwrite: bool
) -> None:
    with translated(f"cannot save to {path}"), saving_context():
        v1().save(path, tree, overwrite=overwrite, custom_metadata=metadata)


def saving_context() -> Any:
    context = v1().Context()
    saving = context.array.saving
    saving.min_slice_bytes_for_replica_parallel = _MIN_SLICE_BYTES
    saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    # Shardings come from rules or the target, never from the checkpoint; the file
    # would hold the whole mesh once per array.
    saving.enable_write_sharding_file = False
    return context


# -------------------------------------------------------------------- reading


@dataclasses.dataclass(frozen=True)
class Metadata:
    tree: Any  # Orbax's metadata of the leaves in dicts and lists
    custom: dict[str, Any]
    item: str | None  # the folder of the tree; None if that is the checkpoint itself


def read_metadata(
    path: str,
    item: str | None = None,
    tree_of: Callable[[dict[str, Any]], Any] = lambda custom: None,
) -> Metadata:
    """Read the metadata of a checkpoint, or of one of several trees in it.

    `tree_of` returns the tree if the custom metadata have it. Else Orbax opens arrays.
    """
    if not is_url(path):
        check_place(path)
        custom = _read_custom(path)
        item = item or _item(path)
        if (tree := tree_of(custom)) is not None:
            return Metadata(tree, custom, item)
    options = {} if item is None else {"checkpointable_name": item}
    with translated(f"cannot read the metadata of {path}", _ADVICE), v1().Context():
        read = v1().metadata(path, **options)
    # For a damaged file Orbax logs the reason and returns None.
    if not isinstance(read.metadata, dict | list):
        raise CheckpointError(
            f"Orbax finds no tree in {path}: it is a single array (then read it with "
            "orbax.checkpoint.v1.load), or a file is missing or damaged, or it holds a "
            "Python bool, which Orbax writes and cannot read, and Orbax has logged why"
        )
    custom = read.custom_metadata
    return Metadata(read.metadata, custom if isinstance(custom, dict) else {}, item)


def _read_custom(path: str) -> dict[str, Any]:
    """The custom metadata, from a file that Orbax takes for empty if it is damaged."""
    try:
        with open(os.path.join(path, METADATA_FILE), encoding="utf-8") as file:
            read = json.load(file)
        if not isinstance(read, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint {path} is damaged: its file {METADATA_FILE} cannot be "
            f"read: {error}; restore another one"
        ) from error
    custom = read.get("custom_metadata")
    return custom if isinstance(custom, dict) else {}


def _item(path: str) -> str | None:
    """The folder of the only tree; None if that is the checkpoint itself."""
    items = items_in(path)
    if len(items) > 1:
        paths = " or ".join(os.path.join(path, name) for name in items)
        raise CheckpointError(
            f"the checkpoint {path} holds several trees; give the path of one: {paths}"
        )
    return items[0] if items else None


def leaves_of(tree: Any, *, escaped: bool) -> dict[str, Any]:
    """Path → leaf of an Orbax tree of dicts and lists; None is not a leaf.

    `escaped`: the keys are already escaped parts of paths, as `save` writes them.
    """
    part = str if escaped else escape
    return {
        "/".join(part(key_of(entry)) for entry in keys): leaf
        for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def read_arrays(
    path: str,
    target: Any,
    item: str | None = None,
    host_memory: int | None = None,
    replica_axis: int | None = None,
) -> list[Any]:
    """Read leaves of a checkpoint; return them in the order of `leaves_of`.

    `target` is a tree of Orbax's targets, with `...` to skip a leaf. This process reads
    without waiting for the others; with `replica_axis`, the number of a mesh axis on
    which all leaves are replicated, Orbax reads the first replica and broadcasts it.
    """
    context = v1().Context()
    context.memory.read_concurrent_bytes = host_memory
    if replica_axis is not None:
        loading = context.array.loading
        loading.use_load_and_broadcast = True
        loading.load_and_broadcast_options.replica_axis_index = replica_axis
    elif jax.process_count() > 1:
        number = jax.process_index()
        context.multiprocessing.primary_host = number
        context.multiprocessing.active_processes = {number}
        context.multiprocessing.barrier_sync_key_prefix = f"alone_{number}"
    options = {} if item is None else {"checkpointable_name": item}
    with TURN, translated(f"cannot read the checkpoint {path}", _ADVICE), context:
        return jax.tree.leaves(v1().load(path, target, **options))


def spec_of(held: Any) -> PartitionSpec | None:
    """The spec that Orbax recorded for an array, or None."""
    saved = getattr(held, "sharding_metadata", None)
    if hasattr(saved, "device_str"):
        return PartitionSpec()  # whole, on one device
    spec = getattr(saved, "partition_spec", None)
    if spec is None:
        return None
    return PartitionSpec(*(tuple(e) if isinstance(e, list) else e for e in spec))


@contextlib.contextmanager
def translated(failing: str, advice: str = "") -> Iterator[None]:
    """Re-raise errors of Orbax and TensorStore, with their root cause in one line."""
    try:
        yield
    except LayoutError:
        raise
    except Exception as error:
        # Broad on purpose: a damaged chunk arrives as a bare `Exception`, a damaged
        # file as a ValueError, JSONDecodeError or one of Orbax's own.
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        # TensorStore appends its configuration, and locations in its own source.
        text = str(cause).partition(" [tensorstore_spec")[0]
        text = text.partition(" [source locations")[0][:_CAUSE_CHARACTERS]
        name = type(cause).__name__
        raise CheckpointError(f"{failing}: {name}: {text}{advice}") from error


# -------------------------------------------------------------- training loops


def open_steps(directory: str, every: Any, keep: Any) -> Any:
    """Open Orbax's Checkpointer, which removes what interrupted saves left.

    Numbers stand for Orbax's policies; `keep` None keeps all steps.
    """
    others = set(_numbered(directory)).difference(steps_below(directory))
    if others and keep is not None:
        raise CheckpointError(
            f"keep= would remove {directory}/{min(others)}, which is not a checkpoint; "
            "move it to another directory"
        )
    training = v1().training
    if isinstance(every, int):
        every = training.save_decision_policies.FixedIntervalPolicy(every)
    if isinstance(keep, int):
        keep = training.preservation_policies.LatestN(keep)
    with translated(f"cannot save steps to {directory}"):
        return training.Checkpointer(
            directory,
            context=saving_context(),
            save_decision_policy=every,
            preservation_policy=keep,
            cleanup_tmp_directories=True,
        )


def steps_below(directory: str) -> list[int]:
    if is_url(directory):
        # On storage services a file marks a finished step.
        names = v1().path.step.standard_name_format().find_all(directory)
        return sorted(metadata.step for metadata in names)
    return [
        step
        for step in _numbered(directory)
        if os.path.isfile(os.path.join(directory, str(step), METADATA_FILE))
    ]


def _numbered(directory: str) -> list[int]:
    """What Orbax takes for steps: numbers without leading zeros."""
    names = os.listdir(directory) if os.path.isdir(directory) else []
    return sorted(int(n) for n in names if n.isdecimal() and str(int(n)) == n)
