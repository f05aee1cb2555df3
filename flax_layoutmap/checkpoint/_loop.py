"""Checks, the write lock and SIGTERM handling for training loops."""

import operator
import os
import signal
import socket
import sys
import threading
from types import FrameType
from typing import Any

import jax

from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap.checkpoint._leaves import Leaf, leaf_of
from flax_layoutmap.checkpoint._places import METADATA_FILE, cannot_name, is_url

if sys.platform != "win32":
    import fcntl

_LOCK_FILE = ".flax_layoutmap.lock"

# Directories that this process has locked; `lockf` does not exclude its own locks.
_HELD: set[str] = set()


def check_numbers(every: Any, keep: Any, keep_every: Any) -> None:
    """Raise CheckpointError for invalid `every`, `keep` or `keep_every`."""
    if not hasattr(every, "should_save") and not _is_count(every):
        raise CheckpointError(
            f"every={every!r}: give a number of steps, such as 1000, or one of "
            "orbax.checkpoint.v1.training.save_decision_policies"
        )
    if keep is not None and not hasattr(keep, "should_preserve"):
        if not _is_count(keep):
            raise CheckpointError(
                f"keep={keep!r}: give how many steps to keep, None for all, or one of "
                "orbax.checkpoint.v1.training.preservation_policies"
            )
    if keep_every is not None and not (_is_count(keep_every) and isinstance(keep, int)):
        raise CheckpointError(
            f"keep_every={keep_every!r}, keep={keep!r}: it is a number of steps, and "
            "goes with a number to keep: keep=3, keep_every=10_000"
        )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def check_directory(directory: str) -> None:
    """Raise CheckpointError for a directory that cannot hold steps."""
    unnamed = cannot_name(directory)
    if unnamed:
        raise CheckpointError(f"cannot save to {directory}: {unnamed}")
    if is_url(directory):
        return
    if os.path.lexists(directory) and not os.path.isdir(directory):
        raise CheckpointError(
            f"{directory} is a file; the steps need a directory"
            if os.path.exists(directory)
            else f"{directory} is a link to what does not exist"
        )
    if os.path.isfile(os.path.join(directory, METADATA_FILE)):
        raise CheckpointError(
            f"{directory} is a checkpoint itself; a Checkpointer needs the directory "
            "that holds the steps: the one above it, or a new one"
        )


def described(tree: Any) -> dict[str, str]:
    """Path → description of the leaf's kind.

    Numbers and arrays without dims count as one kind, since a restore accepts either.
    """
    flat = flatten(tree)
    leaves = zip(flat.full_paths(), flat.leaves, strict=True)
    return {path: _kind(leaf_of(path, value), value) for path, value in leaves}


def _kind(leaf: Leaf | None, value: Any) -> str:
    if leaf is None:
        return str(type(value))
    is_number = leaf.shape == () and leaf.kind not in ("key", "string")
    return "a number" if is_number else str(leaf)


def difference(before: dict[str, str], now: dict[str, str]) -> str:
    """The message that two trees differ, with the first differences."""
    texts = [
        f"{path} was {before[path]}, and is {now[path]}"
        for path in before
        if path in now and before[path] != now[path]
    ]
    texts += [f"{path} is missing" for path in before if path not in now]
    texts += [f"{path} is new" for path in now if path not in before]
    more = f"; and {len(texts) - 5} more" if len(texts) > 5 else ""
    return (
        "the tree is not the one that was created, restored or saved before, so that "
        f"it could not be restored by the same program: {'; '.join(texts[:5])}{more}; "
        "let create_fn return what save gets"
    )


def listed(steps: list[int]) -> str:
    shown = ", ".join(str(step) for step in steps[-5:])
    return shown if len(steps) <= 5 else f"{len(steps)} steps, the last ones {shown}"


def add_context(failure: BaseException, error: BaseException) -> None:
    """Chain a failure to the exception that was being handled when it was raised."""
    first: BaseException = failure
    while first.__cause__ is not None:
        first = first.__cause__
    if first is not error:
        first.__context__, first.__suppress_context__ = error, False


def next_step(step: Any, last: int, directory: str) -> int:
    """Check that a step is a number that comes after the last one (-1 for none)."""
    try:
        number = operator.index(step)
    except TypeError as error:
        raise CheckpointError(
            f"a step is a whole number, not {step!r}; a counter in an array is "
            "int(counter)"
        ) from error
    if number < 0:
        raise CheckpointError(f"a step is not negative, and {number} is")
    if number == last:
        raise CheckpointError(
            f"step {number} in {directory} is saved already; call save once in a "
            "step, with force=step == steps - 1 for the last one"
        )
    if number < last:
        raise CheckpointError(
            f"step {number} comes before {last}, which is saved in {directory}; "
            "restore_or_init says where to go on; to go back, remove the later steps, "
            "or use another directory"
        )
    return number


def existing_step(step: int | None, steps: list[int], directory: str) -> int:
    """The step to restore; None means the latest one."""
    if not steps:
        raise CheckpointError(f"there is no step in {directory}")
    chosen = steps[-1] if step is None else operator.index(step)
    if chosen not in steps:
        raise CheckpointError(
            f"there is no step {chosen} in {directory}, which has {listed(steps)}"
        )
    return chosen


def way_back(step: int, steps: list[int], directory: str) -> str:
    """The advice to add when a step cannot be restored."""
    earlier = [other for other in steps if other < step]
    if not earlier:
        return f"(step {step} is the first one in {directory})"
    return (
        f"(earlier steps in {directory}: {listed(earlier)}; nothing falls back to one "
        f"of them; if step {step} is damaged, remove {directory}/{step} to go on from "
        f"step {earlier[-1]})"
    )


class WriteLock:
    """A file lock on a local directory, for one writer at a time.

    The system releases it however the process ends. (A lock of `fcntl.lockf` belongs to
    the process, so forked workers do not keep it.) Every process gets it on file
    systems without locks.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._key = os.path.realpath(directory)
        self._file: int | None = None
        self.is_held = False

    def take(self) -> str | None:
        """Take the lock; return the owner if another process holds it."""
        if self.is_held:
            return None
        if self._key in _HELD:
            return "another Checkpointer of this program; close it first"
        os.makedirs(self._directory, exist_ok=True)
        owner = self._locked()
        if owner is None:
            self.is_held = True
            _HELD.add(self._key)
        return owner

    def release(self) -> None:
        """Release the lock."""
        if not self.is_held:
            return
        self.is_held = False
        _HELD.discard(self._key)
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _locked(self) -> str | None:
        if sys.platform == "win32":
            return None
        # The file is never removed, as another process may have locked it since.
        file = os.open(
            os.path.join(self._directory, _LOCK_FILE), os.O_RDWR | os.O_CREAT
        )
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            owner = os.read(file, 1000).decode(errors="replace")
            os.close(file)
            return f"{owner or 'another process'}; use another directory, or end it"
        except OSError:
            os.close(file)
            return None
        os.ftruncate(file, 0)
        os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
        self._file = file
        return None


class Preemption:
    """Detects SIGTERM, which preempts a job.

    Several processes agree on a step through JAX's preemption service, for which
    `jax.distributed.initialize` handles the signal. A single process handles the first
    SIGTERM here; a second one ends the program as usual.
    """

    def __init__(self) -> None:
        self._before: Any = None
        self._is_watching = False
        self._was_asked = False
        self.is_reached = False

    def watch(self) -> None:
        """Install a handler for SIGTERM, unless JAX or another language handles it."""
        if jax.distributed.is_initialized():
            return
        # Python runs handlers in the main thread, and only there they can be set.
        if threading.current_thread() is not threading.main_thread():
            return
        self._before = signal.getsignal(signal.SIGTERM)
        # None: a handler of another language. Leave that, and "ignore", as they are.
        if self._before not in (None, signal.SIG_IGN):
            signal.signal(signal.SIGTERM, self._notice)
            self._is_watching = True

    def reached(self, step: int) -> bool:
        """Whether to save this step and end, on all processes."""
        if self._was_asked:
            self.is_reached = True
        elif jax.distributed.is_initialized():
            from jax.experimental import multihost_utils

            try:
                if multihost_utils.reached_preemption_sync_point(step):
                    self.is_reached = True
            except RuntimeError:
                return False  # jax_enable_preemption_service is off
        return self.is_reached

    def stop(self, *, deliver: bool) -> None:
        """Restore the previous handler.

        `deliver` sends a signal for which no step was saved once more.
        """
        self._give_back()
        if deliver and self._was_asked and not self.is_reached:
            self._was_asked = False
            signal.raise_signal(signal.SIGTERM)

    def _notice(self, number: int, frame: FrameType | None) -> None:
        self._was_asked = True
        before = self._before
        self._give_back()
        if callable(before):
            before(number, frame)

    def _give_back(self) -> None:
        if self._is_watching:
            self._is_watching = False
            signal.signal(signal.SIGTERM, self._before)
