"""Progress of long work, on the terminal of process 0."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import jax

from flax_layoutmap._core.errors import visible

if TYPE_CHECKING:
    from rich.progress import Progress

# Without being asked, show work that takes longer than this.
_FROM_SECONDS = 2.0
_EVERY_SECONDS = 0.2


def is_shown(shown: bool | None) -> bool:
    """Whether this process may show progress; None: on a terminal."""
    if jax.distributed.is_initialized() and jax.process_index() != 0:
        return False
    return sys.stderr.isatty() if shown is None else shown


@contextlib.contextmanager
def shown_progress(
    what: str | Callable[[], str],
    total: int | None = None,
    shown: bool | None = None,
    count: Callable[[], int] = lambda: 0,
) -> Iterator[None]:
    """Show on process 0 how far a block is.

    Args:
        what: what the block does: "restoring model"; or a function that returns it, if
            it changes.
        total: bytes that it reads, writes or moves; None shows the seconds alone.
        shown: whether to show it; None: on a terminal, once the block has taken 2
            seconds.
        count: returns the bytes so far.
    """
    if total == 0 or not is_shown(shown):
        yield
        return
    before, start, ended = count(), time.monotonic(), threading.Event()
    delay = _FROM_SECONDS if shown is None else 0.0
    is_complete = False

    def watch() -> None:
        if delay and ended.wait(delay):
            return
        with _bar(is_counted=total is not None) as bar:
            task = bar.add_task("", total=total)
            bar.tasks[task].start_time = start
            is_last = False
            while not is_last:
                is_last = ended.wait(_EVERY_SECONDS)
                done = total if is_complete else min(count() - before, total or 0)
                text = visible(what() if callable(what) else what)
                bar.update(task, description=text, completed=done, refresh=True)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
        is_complete = True
    finally:
        ended.set()
        watcher.join()


def _bar(*, is_counted: bool) -> "Progress":
    from rich import progress
    from rich.console import Console

    text = progress.TextColumn("{task.description}", markup=False)
    columns = (progress.SpinnerColumn(), progress.TimeElapsedColumn())
    if is_counted:
        columns = (
            progress.BarColumn(),
            progress.DownloadColumn(binary_units=True),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
        )
    # In a notebook rich needs ipywidgets, or prints a warning.
    console = Console(stderr=True, force_jupyter=False)
    return progress.Progress(text, *columns, console=console)
