"""Progress bars on the terminal of process 0."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

import jax

from flax_layoutmap._core.errors import visible

_SECONDS = 0.2


def is_shown(shown: bool | None) -> bool:
    """Whether this process shows progress; None: if it is process 0 on a terminal."""
    if jax.process_index() != 0:
        return False
    return sys.stderr.isatty() if shown is None else shown


@contextlib.contextmanager
def shown_progress(
    what: str,
    total: int,
    shown: bool | None,
    count: Callable[[], int],
) -> Iterator[None]:
    """Show on process 0 how many bytes a block reads, writes or moves.

    `shown=None` shows it on a terminal only; `count` returns the bytes so far.
    """
    if total <= 0 or not is_shown(shown):
        yield
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    before = count()
    ended = threading.Event()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(visible(what), total=total)

        def watch() -> None:
            while not ended.wait(_SECONDS):
                done = min(count() - before, total)
                progress.update(task, completed=done)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
            progress.update(task, completed=total)
        finally:
            ended.set()
            watcher.join()


@contextlib.contextmanager
def shown_after(
    seconds: float, shown: bool | None, text: Callable[[], str]
) -> Iterator[None]:
    """Show on process 0 that a block is at work, if it takes longer than some seconds.

    `shown` is as for `shown_progress`; `text` says what was found so far.
    """
    if not is_shown(shown):
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn()
    progress = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True))
    task = progress.add_task("", total=None)
    ended = threading.Event()

    def watch() -> None:
        if ended.wait(seconds):
            return
        with progress:
            while not ended.wait(_SECONDS):
                progress.update(task, description=visible(text()))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
