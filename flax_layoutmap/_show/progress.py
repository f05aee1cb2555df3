"""Progress of long work on the terminal, or in the notebook, of process 0."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax

from flax_layoutmap._core.errors import visible
from flax_layoutmap._show.terminal import as_html

if TYPE_CHECKING:
    from rich.progress import Progress

# Without being asked, show work that takes longer than this.
_FROM_SECONDS = 2.0
_EVERY_SECONDS = 0.2


def is_shown(shown: bool | None) -> bool:
    """Whether this process may show progress; None: on a terminal or in a notebook."""
    if jax.distributed.is_initialized() and jax.process_index() != 0:
        return False
    return (sys.stderr.isatty() or _in_notebook()) if shown is None else shown


def _in_notebook() -> bool:
    if "IPython" not in sys.modules:
        return False
    from rich.console import Console

    return Console().is_jupyter


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
        shown: whether to show it; None: where there is a terminal or a notebook, once
            the block has taken 2 seconds.
        count: returns the bytes so far.
    """
    if total == 0 or not is_shown(shown):
        yield
        return
    before, start, ended = count(), time.monotonic(), threading.Event()
    delay = _FROM_SECONDS if shown is None else 0.0

    def text() -> str:
        return visible(what() if callable(what) else what)

    def watch() -> None:
        if delay and ended.wait(delay):
            return
        bar = _bar(is_counted=total is not None)
        task = bar.add_task(text(), total=total)
        bar.tasks[task].start_time = start
        with _shown(bar) as refresh:
            while not ended.wait(_EVERY_SECONDS):
                if total is not None:
                    bar.update(task, completed=min(count() - before, total))
                if callable(what):
                    bar.update(task, description=text())
                refresh()
            if total is not None and succeeded:
                bar.update(task, completed=total)
            refresh()

    succeeded = False
    watcher = threading.Thread(target=watch, daemon=True)
    try:
        watcher.start()
        yield
        succeeded = True
    finally:
        ended.set()
        if watcher.is_alive():
            watcher.join()


def _bar(*, is_counted: bool) -> "Progress":
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    text = TextColumn("{task.description}", markup=False)
    bytes_so_far = (
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    columns = bytes_so_far if is_counted else (SpinnerColumn(), TimeElapsedColumn())
    return Progress(text, *columns, console=Console(stderr=True))


@contextlib.contextmanager
def _shown(bar: "Progress") -> Iterator[Callable[[], object]]:
    """Show a bar while the context is open; the value draws it again."""
    if not _in_notebook():
        with bar:
            yield bar.refresh
        return
    # rich's own way needs ipywidgets.
    from IPython.display import HTML, display

    cell: Any = display(HTML(""), display_id=True)
    yield lambda: cell.update(HTML(as_html([bar.get_renderable()])))
