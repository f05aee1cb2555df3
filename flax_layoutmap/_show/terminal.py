"""Coloured reports and progress bars for the terminal."""

import contextlib
import itertools
import json
import os
import re
import sys
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any, Literal

import jax
from rich.cells import cell_len

from flax_layoutmap._core.errors import LayoutError, visible
from flax_layoutmap._show.table import Grid

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text

# By the position of an axis in its mesh. The first two are distinct for colour-blind
# readers too; red is for warnings.
_AXES = ("cyan", "magenta", "yellow", "green", "blue", "bright_cyan", "bright_magenta")

# By the mark of a line of a table.
_STYLES = {
    **{"header": "bold", "rule": "dim", "warning": "red"},
    **{"added": "green", "removed": "red", "reshaped": "yellow"},
}
_NO_AXES = ("path", "rule", "pattern")  # their names may equal those of axes

# Lines of text that begin with one of these are warnings.
_WARNINGS = ("unused", "unmatched", "fallback")

_NARROWEST = 20


def wrapped(lines: Iterable[str], width: int | None) -> list[str]:
    """Wrap lines between words at `width`; None for any length.

    Continuation lines are indented by two; longer words are not broken.
    """
    short: list[str] = []
    for line in map(visible, lines):
        if width is None or cell_len(line) <= width:
            short.append(line)
            continue
        short += textwrap.wrap(
            line,
            max(width - (cell_len(line) - len(line)), _NARROWEST),
            subsequent_indent=" " * (len(line) - len(line.lstrip()) + 2),
            break_long_words=False,
            break_on_hyphens=False,
        )
    return short


def coloured_grid(grid: Grid, axes: Sequence[str]) -> "Iterator[Text]":
    """The lines of a table, with the mesh axes in their colours."""
    from rich.text import Text

    for cells, mark in grid.padded():
        line = Text("  ".join(cells).rstrip(), style=_STYLES.get(mark, ""))
        end = 0
        for name, cell in zip(grid.names, cells, strict=True):
            start, end = end, end + len(cell) + 2
            if mark != "header" and name not in _NO_AXES:
                _colour(axes, line, r"(?![\w./])", start, end)
        yield line


def coloured_lines(lines: Iterable[str], axes: Sequence[str]) -> "Iterator[Text]":
    """Lines of text, with mesh axes in their colours and warnings in red."""
    from rich.text import Text

    for line in lines:
        text = Text(line, style="red" if line.startswith(_WARNINGS) else "")
        _colour(axes, text, r"(?==\d)", 0, len(line))
        yield text


def _colour(
    axes: Sequence[str], line: "Text", after: str, start: int, end: int
) -> None:
    """Colour the names of axes that the pattern `after` follows."""
    if axes:
        names = re.compile(rf"(?<![\w./])(?:{'|'.join(map(re.escape, axes))}){after}")
        colours = dict(zip(axes, itertools.cycle(_AXES), strict=False))
        for word in names.finditer(line.plain, start, end):
            line.stylize(colours[word[0]], *word.span())


def plain(lines: "Iterable[Text]") -> str:
    return "\n".join(line.plain.rstrip() for line in lines)


def show(lines: "Callable[[int | None], Iterable[Text]]", file: IO[str] | None) -> None:
    """Print the lines in colour on a terminal or in a notebook, else as plain text."""
    from rich.console import Console, Group

    if file is None and not _is_first_process():
        return
    console = Console(file=file, force_jupyter=None if file is None else False)
    if console.is_terminal or console.is_jupyter:
        console.print(Group(*lines(console.width)), soft_wrap=True)
    else:
        width = console.width if os.environ.get("COLUMNS", "").isdigit() else None
        print(plain(lines(width)), file=console.file)


class Shown:
    """Base class that prints a report; subclasses make its coloured lines."""

    def _lines(self, width: int | None) -> "Iterable[Text]":
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        raise NotImplementedError

    def report(
        self, format: Literal["text", "json"] = "text", *, width: int | None = None
    ) -> str:
        """The report as plain text, at most `width` characters wide, or as JSON."""
        if format == "text":
            return plain(self._lines(width))
        if format == "json":
            return json.dumps(self.to_json(), indent=1)
        raise LayoutError(f'format must be "text" or "json", got {format!r}')

    def show(self, file: IO[str] | None = None) -> None:
        """Print the report, with a colour per mesh axis on a terminal or in a notebook.

        To a pipe or a file it prints `report()`, with the width of the environment
        variable COLUMNS if that is set. Without a `file`, only process 0 prints.
        """
        show(self._lines, file)

    def __rich_console__(
        self, console: "Console", options: "ConsoleOptions"
    ) -> "Iterator[RenderableType]":
        yield from self._lines(options.max_width)


# -------------------------------------------------------------------------- progress

# With `shown=None`, work that takes longer than this is shown.
_FROM_SECONDS = 2.0


def _is_first_process() -> bool:
    return not jax.distributed.is_initialized() or jax.process_index() == 0


@contextlib.contextmanager
def shown_progress(
    what: str,
    total: int | None = None,
    shown: bool | None = None,
    count: Callable[[], int] = lambda: 0,
) -> Iterator[None]:
    """Show the progress of a block: seconds, and `count()` of `total` bytes.

    Only process 0 shows it. `shown=None`: on a terminal, after 2 seconds.
    """
    is_shown = sys.stderr.isatty() if shown is None else shown
    if total == 0 or not is_shown or not _is_first_process():
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
        # In a notebook, rich prints a warning without ipywidgets.
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
