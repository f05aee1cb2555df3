"""Format columns of plain values as text or Markdown."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rich.cells import cell_len

from flax_layoutmap._core.errors import visible
from flax_layoutmap._show.fold import Fold

_TICKS = re.compile("`+")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_OF_BYTES = ("bytes", "bytes/device", "per device", "to send")
_CODE = ("path", "spec", "rule")
_LEAST = 16  # characters of a path

Columns = Mapping[str, Sequence[str]]  # texts by the name of the column


class Line(NamedTuple):
    """One line of a Grid."""

    cells: tuple[str, ...]  # one per column
    mark: str = ""  # for its colour: "warning", or the kind of a change


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """A table before it is written."""

    names: tuple[str, ...]  # the header
    right: tuple[bool, ...]  # whether a column is aligned to the right
    lines: tuple[Line, ...]  # control characters in them are escaped

    def __post_init__(self) -> None:
        cells = itertools.chain.from_iterable(line.cells for line in self.lines)
        if not "".join(cells).isprintable():
            lines = (Line(tuple(map(visible, row)), mark) for row, mark in self.lines)
            object.__setattr__(self, "lines", tuple(lines))

    def _columns(self) -> list[tuple[str, ...]]:
        return list(zip(self.names, *(line.cells for line in self.lines), strict=True))

    def widths(self) -> list[int]:
        return list(map(widest, self._columns()))

    def width(self) -> int:
        widths = self.widths()
        return sum(widths) + 2 * (len(widths) - 1)

    def padded(self) -> Iterator[tuple[list[str], str]]:
        """The cells of each line, filled to the width of their columns, and its mark.

        The header (mark `"header"`) and a line below it (mark `"rule"`) come first.
        """
        columns = self._columns()
        widths = list(map(widest, columns))
        filled = zip(*map(_filled, columns, widths, self.right), strict=True)
        yield list(next(filled)), "header"
        yield ["─" * width for width in widths], "rule"
        for line in self.lines:
            yield list(next(filled)), line.mark

    def text(self) -> str:
        return "\n".join("  ".join(cells).rstrip() for cells, _ in self.padded())


def grid_of(columns: Columns, marks: Sequence[str]) -> Grid:
    """The table of these columns; those of bytes are aligned to the right."""
    cells = zip(*columns.values(), strict=True)
    lines = tuple(map(Line, cells, marks))
    return Grid(tuple(columns), tuple(name in _OF_BYTES for name in columns), lines)


def fitted(
    columns: Columns, marks: Sequence[str], width: int | None, spare: str
) -> Grid:
    """The table in a width; None for any.

    Where it is too wide, the column `spare` is left out; where it still is, the middle
    of paths, whose ends stay.
    """
    grid = grid_of(columns, marks)
    if width is None or grid.width() <= width:
        return grid
    columns = {name: cells for name, cells in columns.items() if name != spare}
    over = grid_of(columns, marks).width() - width
    if over > 0:
        room = max(widest(("path", *columns["path"])) - over, _LEAST)
        columns["path"] = [cut_path(path, room) for path in columns["path"]]
    return grid_of(columns, marks)


def markdown_table(grid: Grid) -> str:
    rows = [grid.names, tuple("--:" if right else ":--" for right in grid.right)]
    for line in grid.lines:
        cells = zip(grid.names, line.cells, strict=True)
        rows.append(tuple(_code(t) if name in _CODE else t for name, t in cells))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


@functools.lru_cache(maxsize=4096)
def human_bytes(count: int | float) -> str:
    """`1536` → `'1.5 KiB'`."""
    value, power = float(count), 0
    while value >= 1024 and power < len(_UNITS) - 1:
        value, power = value / 1024, power + 1
    return f"{value:.{min(power, 1)}f} {_UNITS[power]}"


def human_share(share: float) -> str:
    """`0.0312` → `'3.1%'`; a small share is never shown as 0."""
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def widest(texts: Sequence[str]) -> int:
    """Cells of a terminal that the widest of some texts takes."""
    return max(map(len if "".join(texts).isascii() else cell_len, texts))


def _filled(texts: Sequence[str], width: int, right: bool) -> Iterator[str]:
    fill = str.rjust if right else str.ljust
    if "".join(texts).isascii():
        return map(fill, texts, itertools.repeat(width))
    return (fill(text, width - cell_len(text) + len(text)) for text in texts)


def cut_path(path: str, width: int) -> str:
    """A path with parts left out, where it is too long; never the end of it.

    >>> cut_path("opt_state/0/mu/layers/7/attention/query/kernel", 30)
    'opt_state/…/query/kernel'
    """
    if cell_len(path) <= width:
        return path
    first, *parts = path.split("/")
    for start, fewest in ((f"{first}/…/", 2), ("…/", 1)):
        for at in range(1, len(parts) - fewest + 1):
            short = start + "/".join(parts[at:])
            if cell_len(short) <= width:
                return short
    short = f"…{path}"
    while cell_len(short) > max(width, 1):
        short = f"…{short[2:]}"
    return short


def _code(cell: str) -> str:
    """A cell as code, with more marks around it than it holds in a row."""
    marks = "`" * (1 + max(map(len, _TICKS.findall(cell)), default=0))
    space = " " if "`" in cell else ""
    text = cell.replace("|", "\\|")
    return f"{marks}{space}{text}{space}{marks}"


def path_cell(fold: Fold) -> str:
    """The path of some leaves, and how many they are."""
    many = f" ×{len(fold.members)}" if len(fold.members) > 1 else ""
    return f"{fold.text}{many}"
