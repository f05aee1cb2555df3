"""Progress of long work, on the terminal of process 0."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from flax_layoutmap._core.errors import visible

# Without being asked, show work that takes longer than this.
_FROM_SECONDS = 2.0


def is_shown(shown: bool | None) -> bool:
    """Whether this process may show progress; None: on a terminal."""
    if jax.distributed.is_initialized() and jax.process_index() != 0:
        return False
    return sys.stderr.isatty() if shown is None else shown


@contextlib.contextmanager
def shown_progress(
    what: str,
    total: int | None = None,
    shown: bool | None = None,
    count: Callable[[], int] = lambda: 0,
) -> Iterator[None]:
    """Show on process 0 how far a block is.

    Args:
        what: what the block does: "restoring model".
        total: bytes that it reads, writes or moves; None shows the seconds alone.
        shown: whether to show it; None: on a terminal, once the block has taken 2
            seconds.
        count: returns the bytes so far.
    """
    if total == 0 or not is_shown(shown):
        yield
        return
    from rich import console, progress

    before, is_complete = count(), False

    class Bar(progress.Progress):
        def get_renderables(self) -> Iterable[Any]:
            done = total if is_complete else min(count() - before, total or 0)
            for task in self.task_ids:
                self.update(task, completed=done)
            return super().get_renderables()

    columns = [progress.BarColumn(), progress.TimeElapsedColumn()]
    if total is not None:
        columns += [
            progress.DownloadColumn(binary_units=True),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
        ]
    bar = Bar(
        progress.TextColumn("{task.description}", markup=False),
        *columns,
        # In a notebook rich needs ipywidgets, or prints a warning.
        console=console.Console(stderr=True, force_jupyter=False),
    )
    bar.add_task(visible(what), total=total)
    later = threading.Timer(_FROM_SECONDS, bar.start)
    later.daemon = True
    (bar if shown else later).start()
    try:
        yield
        is_complete = True
    finally:
        if not shown:
            later.cancel()
            later.join()
        if bar.live.is_started:
            bar.stop()
