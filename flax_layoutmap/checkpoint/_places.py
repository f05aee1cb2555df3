"""Checkpoint locations: paths, directories of steps, and storage."""

import glob
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from flax_layoutmap._core.errors import CheckpointError

METADATA_FILE = "_CHECKPOINT_METADATA"
# Suffixes beside a checkpoint while it is replaced: the new one, and the old one.
NEW, OLD = ".replacement", ".replaced"
# Files that a tree of arrays has; the second one if Orbax's processes merged theirs.
_TREE_FILES = "_METADATA", "manifest.ocdbt"
# Orbax's own suffix while it writes.
UNFINISHED = ".orbax-checkpoint-tmp"

# A directory of one step: `1000`, `step_1000`, `checkpoint-00001000`.
_STEP = re.compile(r"(?:[A-Za-z][A-Za-z_]*[_-])?(\d+)")


def absolute(path: str | os.PathLike[str]) -> str:
    """The absolute path, which Orbax requires; URLs (`gs://…`) are unchanged."""
    text = os.fspath(path).removeprefix("file://")
    return text if is_url(text) else os.path.abspath(os.path.expanduser(text))


def is_url(path: str) -> bool:
    return "://" in path


def find(
    path: str, step: int | str | None
) -> tuple[str, int | None, tuple[int, ...], str | None]:
    """Find a checkpoint, one tree of a checkpoint, or one step of a directory of steps.

    Returns its directory; of a step its number, and all steps; the folder of one tree.
    """
    if is_url(path):
        if step == "latest":
            raise CheckpointError(f'step="latest" is for a disk, not {path}; name one')
        place = path if step is None else f"{path.rstrip('/')}/{step}"
        return place, None, (), None
    above, name = os.path.split(path)
    if step is None and os.path.isfile(os.path.join(path, METADATA_FILE)):
        return path, None, (), None
    if step is None and name in items_in(above):
        return above, None, (), name
    steps = _steps_in(path)
    if not steps:
        check_place(path)
        raise CheckpointError(
            f"{path} is a checkpoint, not a directory of steps; leave step={step!r} out"
        )
    numbers = tuple(sorted(steps))
    wanted: Any = numbers[-1] if step in (None, "latest") else step
    if wanted not in steps:
        raise CheckpointError(
            f"{path} has no step {step!r}; it has {', '.join(map(str, numbers[-9:]))}"
        )
    return os.path.join(path, steps[wanted]), int(wanted), numbers, None


def items_in(path: str) -> list[str]:
    """Names of the trees that a checkpoint has in separate folders."""
    if not os.path.isfile(os.path.join(path, METADATA_FILE)):
        return []
    if os.path.isfile(os.path.join(path, _TREE_FILES[0])):
        return []  # the directory is the tree
    return sorted(
        child.name
        for child in Path(path).iterdir()
        if any((child / name).is_file() for name in _TREE_FILES)
    )


def _steps_in(path: str) -> dict[int, str]:
    """Step → directory name of each complete checkpoint in a directory."""
    steps: dict[int, str] = {}
    names = sorted(os.listdir(path)) if os.path.isdir(path) else []
    for name in names:
        match = _STEP.fullmatch(name)
        if match and os.path.isfile(os.path.join(path, name, METADATA_FILE)):
            other = steps.setdefault(int(match[1]), name)
            if other != name:
                raise CheckpointError(
                    f"{path} has two checkpoints of step {int(match[1])}: {other} and "
                    f"{name}; pass the path of the one that you want"
                )
    return steps


def is_safetensors(path: str) -> bool:
    """Whether a path is a file of safetensors, their index, or a directory of them."""
    place = Path(path)
    if place.is_dir():
        is_orbax = (place / METADATA_FILE).exists()
        return not is_orbax and any(place.glob("*.safetensors"))
    return path.endswith((".safetensors", ".safetensors.index.json"))


def cannot_name(path: str) -> str | None:
    if glob.escape(path) == path:
        return None
    return (
        "the path contains '*', '?' or '[', so Orbax, which finds its files with glob, "
        f"would miss them; save to {re.sub(r'[][*?]', '_', path)!r}"
    )


def check_place(path: str) -> None:
    place = Path(path)
    is_finished = UNFINISHED not in place.name
    if is_finished and (place / METADATA_FILE).is_file():
        return
    if not place.exists():
        left = sorted(glob.glob(f"{glob.escape(path)}.*"))
        hint = f"; an interrupted save left {', '.join(left)}" if left else ""
        raise CheckpointError(f"there is no checkpoint at {path}{hint}")
    hint = f"it has no file {METADATA_FILE}" if is_finished else "its save did not end"
    if is_safetensors(path):
        hint = "it holds safetensors; use flm.checkpoint.restore_safetensors"
    raise CheckpointError(f"{path} is not a checkpoint: {hint}")


def common_number() -> int:
    """A random number of 64 bits, the same on all processes."""
    number = np.frombuffer(os.urandom(8), np.uint32)
    if jax.process_count() > 1:
        number = multihost_utils.broadcast_one_to_all(number)
    return int.from_bytes(np.asarray(number).tobytes())


def check_shared(path: str) -> None:
    """Check that every process sees a file that process 0 writes; a collective."""
    if jax.process_count() == 1 or is_url(path):
        return
    folder = next(parent for parent in Path(path).parents if parent.exists())
    # A new name, which no cache of the file system can know as missing.
    file = folder / f".flax_layoutmap-{common_number():016x}"
    on_first_process(file.touch, lambda why: f"cannot save to {path}: {why}")
    seen = multihost_utils.process_allgather(np.bool_(file.exists()))
    if jax.process_index() == 0:
        file.unlink(missing_ok=True)
    blind = [str(number) for number, sees in enumerate(np.ravel(seen)) if not sees]
    if blind:
        raise CheckpointError(
            f"cannot save to {path}: processes {', '.join(blind)} of "
            f"{jax.process_count()} do not see what process 0 writes to {folder}; a "
            "checkpoint needs storage that all processes share, at one path"
        )


def on_first_process(action: Callable[[], None], failing: Callable[[str], str]) -> None:
    """Run a file operation on process 0; if it fails, every process raises."""
    error: OSError | None = None
    try:
        if jax.process_index() == 0:
            action()
    except OSError as caught:
        error = caught
    failed = error is not None
    if jax.process_count() > 1:
        failed = bool(multihost_utils.broadcast_one_to_all(np.bool_(failed)))
    if failed:
        why = "process 0 failed" if error is None else error.strerror or str(error)
        raise CheckpointError(failing(why)) from error
