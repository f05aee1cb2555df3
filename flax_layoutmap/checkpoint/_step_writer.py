"""Write the steps of a training loop with Orbax in the background."""

import os
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from flax_layoutmap._core.errors import CheckpointError, visible
from flax_layoutmap.checkpoint._data_state import DATA_FOLDER, StateFiles
from flax_layoutmap.checkpoint._orbax import TURN, saving_context, translated
from flax_layoutmap.checkpoint._places import is_url

# Orbax's own name for the tree of a step.
_STATE = "state"

# How long a save may go on after the end of the main thread.
_LAST_SECONDS = 20.0
# How often the end of the main thread is polled.
_LOOK_SECONDS = 0.25

# Saves that run, or whose failure was not raised yet; and the thread that guards them.
_UNTOLD: set["_Pending"] = set()
_guard: threading.Thread | None = None


def steps_in(directory: str) -> list[int]:
    """The finished steps below a directory, in order; reads nothing but names.

    An unfinished one has a longer name, until Orbax renames it at the end.
    """
    if is_url(directory):
        from orbax.checkpoint import v1

        # On storage services a file marks a finished step.
        found = v1.path.step.standard_name_format().find_all(directory)
        return sorted(metadata.step for metadata in found)
    try:
        entries = os.scandir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    with entries:
        names = [entry.name for entry in entries if entry.is_dir()]
    # Orbax names a step by its number, without leading zeros.
    return sorted(int(n) for n in names if n.isdecimal() and str(int(n)) == n)


# --------------------------------------------------------------------- saving


def _takes_work(pool: ThreadPoolExecutor) -> bool:
    """Whether executors still accept work; they do not once the program is ending."""
    try:
        pool.submit(int)
    except RuntimeError:
        return False
    return True


class _Pending(threading.Thread):
    """Waits for a save, and keeps its failure until that is raised."""

    def __init__(self, what: str, response: Any) -> None:
        super().__init__(name=what, daemon=True)
        self._response = response
        self.error: BaseException | None = None
        self.ended = threading.Event()

    def start(self) -> None:
        """Start to wait, and the guard if need be."""
        _guard_the_end()
        _UNTOLD.add(self)
        super().start()

    def run(self) -> None:
        """Wait for the save."""
        try:
            self._response.result()
        except BaseException as error:
            # Of any kind: it is raised again in the thread that saves.
            self.error = error
        else:
            _UNTOLD.discard(self)
        self.ended.set()


def _guard_the_end() -> None:
    """Start the guard once: a program must not exit with code 0 and a save lost.

    Orbax cannot go on when the main thread has ended: a save that is under way then is
    lost, after five minutes and with exit code 0. `atexit` comes too late for that; a
    thread that is no daemon is waited for. The main thread may itself wait for Orbax's
    threads in its end: that no executor takes new work any more is the first sign.
    """
    global _guard
    if _guard is None:
        _guard = threading.Thread(target=_at_the_end, name="flax_layoutmap saves")
        _guard.start()


def _at_the_end() -> None:
    main = threading.main_thread()
    with ThreadPoolExecutor(1) as pool:
        while main.is_alive() and _takes_work(pool):
            main.join(_LOOK_SECONDS)
    until = time.monotonic() + _LAST_SECONDS
    for pending in list(_UNTOLD):
        pending.ended.wait(max(0.0, until - time.monotonic()))
    lost = list(_UNTOLD)
    for pending in lost:
        print(
            visible(
                f"flax_layoutmap: {pending.name} is lost, as the program ended before "
                "it was complete; leave the `with` block of the Checkpointer, or call "
                f"its close(), before that ({pending.error!r})"
            ),
            file=sys.stderr,
            flush=True,
        )
    if lost:
        os._exit(1)


class StepWriter:
    """`orbax.checkpoint.v1.training.Checkpointer`, with at most one save under way.

    The first save, and the next one after a failure, remove what interrupted saves have
    left, which only the one program that writes may do.

    Args:
        directory: where the steps are.
        every: a number of steps, or one of Orbax's save policies.
        keep: how many of the latest steps to keep, None for all, or one of Orbax's
            preservation policies.
        keep_every: of which number the multiples are kept as well.
    """

    def __init__(
        self, directory: str, every: Any, keep: Any, keep_every: int | None
    ) -> None:
        self._directory = directory
        self._every, self._keep, self._keep_every = every, keep, keep_every
        self._inner: Any = None
        self._is_clean = False
        self._pending: _Pending | None = None

    def is_due(self, step: int) -> bool:
        """Whether the policy wants a step."""
        if isinstance(self._every, int):
            return step % self._every == 0
        with TURN, translated("the save policy failed"), saving_context():
            return bool(self._opened(clean=False).should_save(step))

    def start(
        self, step: int, values: Mapping[str, Any], custom: Any, data: str | None
    ) -> None:
        """Start to write a step; return when all values have been copied.

        Args:
            step: its number.
            values: a nested dict of what Orbax is to write.
            custom: the custom metadata, JSON values.
            data: the states of this process's data iterators, or None.
        """
        self.wait()
        what = self._what(step)
        parts: dict[str, Any] = {_STATE: values}
        if data is not None:
            parts[DATA_FOLDER] = StateFiles(data)
        metrics = (
            custom.get("metadata") if hasattr(self._keep, "should_preserve") else None
        )
        try:
            with translated(f"cannot save {what}"), saving_context():
                response = self._opened(clean=True).save_checkpointables_async(
                    step, parts, force=True, metrics=metrics, custom_metadata=custom
                )
        except CheckpointError:
            self._inner = None
            raise
        self._pending = _Pending(f"the save of {what}", response)
        self._pending.start()

    def check(self) -> None:
        """Raise the failure of a save that has ended; wait for none."""
        if self._pending is not None and self._pending.ended.is_set():
            self.wait()

    def wait(self) -> None:
        """Wait for the save that is under way.

        Raises:
            CheckpointError: it failed.
        """
        pending = self._pending
        if pending is None:
            return
        pending.ended.wait()
        with TURN:
            if self._pending is pending:  # not the next save, of another thread
                self._pending = None
        _UNTOLD.discard(pending)
        if pending.error is not None:
            # It does not know any more which steps there are; a new one removes what
            # has been written of this one.
            self._inner = None
            with translated(f"{pending.name} failed, nothing of it is kept"):
                raise pending.error

    def close(self) -> None:
        """Wait for the save that is under way, and close Orbax's Checkpointer.

        Raises:
            CheckpointError: it failed.
        """
        self.wait()
        inner, self._inner = self._inner, None
        if inner is not None:
            with translated(f"cannot finish the saves to {self._directory}"):
                inner.close()

    def _what(self, step: int) -> str:
        return f"step {step} to {self._directory}"

    def _opened(self, *, clean: bool) -> Any:
        """Orbax's object; `clean` where this is the one program that writes."""
        from orbax.checkpoint import v1

        if self._inner is None or clean > self._is_clean:
            is_number = isinstance(self._every, int)
            self._inner = v1.training.Checkpointer(
                self._directory,
                context=saving_context(),
                save_decision_policy=None if is_number else self._every,
                preservation_policy=self._preservation(),
                cleanup_tmp_directories=clean,
            )
            self._is_clean = clean
        return self._inner

    def _preservation(self) -> Any:
        from orbax.checkpoint import v1

        policies = v1.training.preservation_policies
        if not isinstance(self._keep, int):
            return self._keep
        latest = policies.LatestN(self._keep)
        if self._keep_every is None:
            return latest
        return policies.AnyPreservationPolicy(
            [latest, policies.EveryNSteps(self._keep_every)]
        )
