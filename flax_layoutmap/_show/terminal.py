"""Print grids and lines of text in the colours of a terminal."""

import io
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING

from rich.cells import cell_len

from flax_layoutmap._core.errors import visible
from flax_layoutmap._show.table import Grid

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text

# By the position of an axis in its mesh. The first two are distinct for all readers
# of a terminal; red is for warnings.
_AXES = ("cyan", "magenta", "yellow", "green", "blue", "bright_cyan", "bright_magenta")

_MARKS = {"header": "bold", "rule": "dim", "heading": "bold"}
_CHANGES = {"added": "green", "removed": "red", "reshaped": "yellow", "moved": "bold"}
_LINES = {"  - ": "red", "  + ": "green"}
_WARNINGS = ("unused", "unmatched", "fallback")
_NARROWEST = 20
# Red, green, yellow, blue, magenta, cyan, white: legible on light and dark pages.
_ON_ANY_PAGE = [
    (205, 60, 60),
    (50, 140, 60),
    (165, 120, 0),
    (70, 125, 210),
    (175, 80, 175),
    (20, 140, 150),
    (128, 128, 128),
]
_GREY = (128, 128, 128)
NOTEBOOK_WIDTH = 110  # a cell's output is about as wide
_WORD = re.compile(r"[^\s:]+(?: [^\s:]+){0,2}(?=:(?: |$))")
_FOLDED = r"\{[\d.,…]+\}| ×\d+"


def axis_styles(axes: Sequence[str]) -> dict[str, str]:
    """Mesh axis → its colour; the same in everything that shows one mesh."""
    return {name: _AXES[at % len(_AXES)] for at, name in enumerate(axes)}


def wrapped(lines: Sequence[str], width: int | None) -> list[str]:
    """Wrap lines between words at `width`; None for any length.

    Lines after the first are indented by two; a longer word is not broken.
    """
    found: list[str] = []
    for line in map(visible, lines):
        if width is None or cell_len(line) <= width:
            found.append(line)
            continue
        found += textwrap.wrap(
            line,
            max(width - (cell_len(line) - len(line)), _NARROWEST),
            subsequent_indent=" " * (len(line) - len(line.lstrip()) + 2),
            break_long_words=False,
            break_on_hyphens=False,
        )
    return found


def coloured_grid(grid: Grid, axes: Sequence[str]) -> "Iterator[Text]":
    """The lines of the table, with the axes in the specs in their colours."""
    from rich.text import Text

    styles = axis_styles(axes)
    for cells, mark in grid.padded():
        if mark in _MARKS:
            yield _folded(Text("  ".join(cells).rstrip(), style=_MARKS[mark]))
            continue
        row = dict(zip(grid.names, cells, strict=True))
        parts = [_cell(name, row, mark, styles) for name in grid.names]
        line = Text("  ").join(parts)
        line.rstrip()
        yield line


def coloured_lines(lines: Sequence[str], axes: Sequence[str]) -> "Iterator[Text]":
    """Lines of words: what they are about in bold, or in red where it is a warning."""
    from rich.text import Text

    styles = axis_styles(axes)
    for line in lines:
        text = Text(line, style=_LINES.get(line[:4], ""))
        word = _WORD.match(line)
        if word is not None:
            is_warning = word[0].startswith(_WARNINGS)
            text.stylize("bold red" if is_warning else "bold", 0, word.end())
        for name, style in styles.items():
            text.highlight_regex(rf"(?<![\w'/]){re.escape(name)}(?==\d)", style)
        yield _folded(text)


def show(
    lines: "Callable[[int], Iterable[Text]]",
    text: Callable[[int | None], str],
    file: IO[str] | None,
) -> None:
    """Print on a terminal in colour and as wide as it; else as plain text.

    `lines` and `text` give it for a width, or for None (any). In a job of several
    processes process 0 prints, unless there is a `file`.
    """
    import jax
    from rich.console import Console

    if file is None and jax.distributed.is_initialized() and jax.process_index() > 0:
        return
    console = Console(file=file, force_jupyter=None if file is None else False)
    if console.is_jupyter:
        from IPython.display import HTML, display

        display(HTML(as_html(lines(NOTEBOOK_WIDTH))))
        return
    if console.is_terminal:
        for line in lines(console.width):
            console.print(line, soft_wrap=True)
        return
    width = console.width if os.environ.get("COLUMNS", "").isdigit() else None
    print(text(width), file=console.file)


def as_html(lines: "Iterable[RenderableType]") -> str:
    """What rich prints, in the colours of the terminal, for a cell of a notebook."""
    from rich.console import Console
    from rich.terminal_theme import TerminalTheme

    console = Console(
        file=io.StringIO(),
        record=True,
        width=NOTEBOOK_WIDTH,
        force_jupyter=False,
        force_terminal=True,
        color_system="standard",
    )
    for line in lines:
        console.print(line, soft_wrap=True)
    frame = '<pre style="line-height:1.3;overflow-x:auto">{code}</pre>'
    theme = TerminalTheme(_GREY, _GREY, [_GREY, *_ON_ANY_PAGE], None)
    return console.export_html(theme=theme, code_format=frame, inline_styles=True)


class Shown:
    """Printing of a report, from its lines alone.

    A subclass gives `_lines(width)`: the lines in colour, for a width in characters,
    or for None (as long as they get).
    """

    def _lines(self, width: int | None) -> "Iterable[Text]":
        raise NotImplementedError

    def report(self, *, width: int | None = None) -> str:
        """The report as plain text.

        Args:
            width: wrap at that many characters; None: lines as long as they get.
        """
        return "\n".join(line.plain for line in self._lines(width))

    def show(self, file: IO[str] | None = None) -> None:
        """Print the report: in colour on a terminal, in a notebook as a cell.

        In a job of several processes process 0 prints, unless there is a `file`.
        """
        show(self._lines, lambda width: self.report(width=width), file)

    def __rich_console__(
        self, console: "Console", options: "ConsoleOptions"
    ) -> "Iterator[RenderableType]":
        yield from self._lines(options.max_width)

    def _repr_html_(self) -> str:
        return as_html(self._lines(NOTEBOOK_WIDTH))


def _cell(
    name: str, row: Mapping[str, str], mark: str, styles: Mapping[str, str]
) -> "Text":
    from rich.text import Text

    text = Text(row[name])
    if name == "path":
        return _folded(text)
    if name == "spec":
        return _spec(text, styles)
    if name in ("shape", "array"):
        return _dims(text, row["spec"], styles)
    if name == "rule":
        is_dim = text.plain.startswith("follows ")
        text.stylize("red" if mark == "warning" else "dim" if is_dim else "")
    elif name == "" or (name == "change" and "" not in row):
        text.stylize(_CHANGES.get(mark, ""))
    elif name == "change":
        return _spec(text, styles)
    elif name in ("shard", "dtype"):
        text.stylize("dim")
    return text


def _spec(text: "Text", styles: Mapping[str, str]) -> "Text":
    for name, style in styles.items():
        text.highlight_regex(rf"(?<![\w.]){re.escape(name)}(?![\w.])", style)
    text.highlight_regex(r"replicated|[P(),→]", "dim")
    return text


def _dims(text: "Text", spec: str, styles: Mapping[str, str]) -> "Text":
    """Each size in the colour of the first mesh axis that shards its dim."""
    inside = re.search(r"P\((.*)\)", spec)
    entries = inside[1].split(", ") if inside and "→" not in spec else []
    sizes = list(re.finditer(r"\d+(?=[,\])])", text.plain))
    for size, entry in zip(sizes, entries, strict=False):
        text.stylize(styles.get(entry.split("+")[0], ""), *size.span())
    return text


def _folded(text: "Text") -> "Text":
    text.highlight_regex(_FOLDED, "dim")
    return text
