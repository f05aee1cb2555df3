"""Format columns of plain values as text or Markdown."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from rich.cells import cell_len

from flax_layoutmap._core.errors import visible
from flax_layoutmap._tree.fold import Fold

# What Markdown would read as markup.
_MARKUP = re.compile(
    r"[*`<&~\\]|\](?=[(\[:])|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|(?:^|(?<=^  ))[#>+-]"
)
_TICKS = re.compile("`+")
_PATH_CELL = re.compile(r"((?:  )?)(.*?)( ×\d+)?")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class Line(NamedTuple):
    """One line of a Grid."""

    cells: tuple[str, ...]  # one per column; of a heading, one that spans all
    mark: str = ""  # for its colour: "warning", "heading", or the kind of a change


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """A table before it is written."""

    names: tuple[str, ...]  # the header
    right: tuple[bool, ...]  # whether a column is aligned to the right
    lines: tuple[Line, ...]  # control characters in them are escaped

    def __post_init__(self) -> None:
        cells = itertools.chain.from_iterable(line.cells for line in self.lines)
        if not "".join(cells).isprintable():
            seen = (Line(tuple(map(visible, own)), mark) for own, mark in self.lines)
            object.__setattr__(self, "lines", tuple(seen))

    def _columns(self) -> list[tuple[str, ...]]:
        """Header and cells of each column, without the headings."""
        rows = (line.cells for line in self.lines if line.mark != "heading")
        return list(zip(self.names, *rows, strict=True))

    def widths(self) -> list[int]:
        """Width of each column, in cells of a terminal."""
        return list(map(widest, self._columns()))

    def width(self) -> int:
        """Width of the whole table, in cells of a terminal."""
        return total_width(self.widths())

    def padded(self) -> Iterator[tuple[list[str], str]]:
        """The cells of each line, filled to the width of their columns, and its mark.

        The header (mark `"header"`) and a line below it (mark `"rule"`) come first.
        """
        columns = self._columns()
        widths = list(map(widest, columns))
        filled = zip(*map(_filled, columns, widths, self.right), strict=True)
        yield list(next(filled)), "header"
        yield ["─" * width for width in widths], "rule"
        for cells, mark in self.lines:
            yield list(cells if mark == "heading" else next(filled)), mark

    def text(self) -> str:
        """The table with two spaces between columns."""
        return "\n".join("  ".join(cells).rstrip() for cells, _ in self.padded())


class Cells:
    """Texts by column, of which a Grid shows those that fit.

    `marks` are those of the rows, as in `Line`; `right` has the names of the columns
    that are aligned to the right; `widths` are in cells of a terminal.
    """

    def __init__(self, marks: Sequence[str], right: Sequence[str]) -> None:
        self.marks, self.right = marks, right
        self.columns: dict[str, Sequence[str]] = {}
        self.widths: dict[str, int] = {}

    def put(self, name: str, cells: Sequence[str]) -> None:
        """Set a column."""
        self.columns[name] = cells
        self.widths[name] = widest((name, *cells))

    def room(self, names: Sequence[str], width: int, column: str | None = None) -> int:
        """What is left of a width for a column; below 0: too little for the others."""
        taken = [0 if name == column else self.widths[name] for name in names]
        return width - total_width(taken)

    def grid(self, names: Sequence[str]) -> Grid:
        """The table of these columns."""
        cells = zip(*(self.columns[name] for name in names), strict=True)
        right = tuple(name in self.right for name in names)
        return Grid(tuple(names), right, tuple(map(Line, cells, self.marks)))


def text_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]
) -> str:
    """Align columns with two spaces between them and a line below the header."""
    lines = tuple(Line(tuple(row)) for row in rows)
    return Grid(tuple(header), tuple(right), lines).text()


def markdown_table(grid: Grid, code: Sequence[str]) -> str:
    """A table of Markdown, with the columns of some names as code."""
    rule = ["--:" if flag else ":--" for flag in grid.right]
    rows = [
        [
            (_code(cell) if name in code else markdown_text(cell)).replace("|", "\\|")
            for name, cell in zip(grid.names, line.cells, strict=True)
        ]
        for line in grid.lines
    ]
    rows = [list(grid.names), rule, *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def as_markdown(grid: Grid, lines: Sequence[str]) -> str:
    """A table, with paths, specs and rules as code, and a list."""
    table = markdown_table(grid, ("path", "spec", "rule"))
    return f"{table}\n\n{markdown_list(lines)}"


def markdown_list(lines: Sequence[str]) -> str:
    """One item per line; an indented line is an item below the one before it."""
    items = map(markdown_text, lines)
    return "\n".join(
        f"  - {item.lstrip()}" if item.startswith("  ") else f"- {item}"
        for item in items
    )


def markdown_text(text: str) -> str:
    """A text that Markdown shows as it is."""
    return _MARKUP.sub(r"\\\g<0>", visible(text))


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
    return max(map(len if _is_narrow("".join(texts)) else cell_len, texts))


def total_width(widths: Collection[int]) -> int:
    """Cells of a terminal that a table takes, from those of its columns."""
    return sum(widths) + 2 * (len(widths) - 1)


def _is_narrow(text: str) -> bool:
    """Whether each character takes one cell, as `…` and `×` do."""
    return text.isascii() or text.replace("…", "").replace("×", "").isascii()


def _filled(texts: Sequence[str], width: int, right: bool) -> Iterator[str]:
    fill = str.rjust if right else str.ljust
    if _is_narrow("".join(texts)):
        return map(fill, texts, itertools.repeat(width))
    return (fill(text, width - cell_len(text) + len(text)) for text in texts)


def _characters(text: str, width: int) -> int:
    """About how many characters of a text take so many cells."""
    return width * len(text) // max(cell_len(text), 1)


def cut(text: str, width: int) -> str:
    """A text with its middle left out, where it is too long; the end counts for more.

    >>> cut("4 attention/(query|key|value)/kernel", 20)
    '4 atten…alue)/kernel'
    """
    if cell_len(text) <= width:
        return text
    width = _characters(text, width)
    end = (2 * (width - 1)) // 3
    return f"{text[: width - 1 - end]}…{text[len(text) - end :]}"


def cut_path(path: str, width: int) -> str:
    """A path with parts left out, where it is too long; never the end of it.

    >>> cut_path("opt_state/0/mu/layers/7/attention/query/kernel", 30)
    'opt_state/…/query/kernel'
    """
    if cell_len(path) <= width:
        return path
    width = _characters(path, width)
    first = path.find("/") + 1
    for start, fewest in ((f"{path[:first]}…", 2), ("…", 1)):
        at = path.find("/", max(first, len(path) + len(start) - width))
        if at >= 0 and path.count("/", at) >= fewest:
            return f"{start}{path[at:]}"
    return f"…{path[max(len(path) - width + 1, 0) :]}"


def _code(cell: str) -> str:
    """A cell as code, with more marks around it than it holds in a row."""
    if cell in ("", "-"):
        return cell
    if "`" not in cell:
        return f"`{cell}`"
    marks = "`" * (1 + max(map(len, _TICKS.findall(cell))))
    return f"{marks} {cell} {marks}"


# ------------------------------------------------- leaves in the column of paths


def path_cell(fold: Fold, start: int = 0) -> str:
    """The path from a position on, and how many leaves it stands for."""
    many = f" ×{len(fold.members)}" if len(fold.members) > 1 else ""
    return f"{fold.text[start:]}{many}"


def headed(folds: Sequence[Fold], width: int) -> tuple[list[str], list[str]]:
    """Split paths into headings for what they share (or `""`), and cells.

    Neighbours that begin alike up to their last index share a heading; so do those
    whose paths are too long for the width.
    """
    ends = [fold.head for fold in folds]
    starts = [fold.text[:end] for fold, end in zip(folds, ends, strict=True)]
    kept = []
    for fold, start, before, after in zip(
        folds, starts, [None, *starts], [*starts[1:], None], strict=False
    ):
        head = len(start) if start in (before, after) else 0
        if not head and len(path_cell(fold)) > width:
            head = len(start)
        kept.append(_longer(fold, head, width))
    heads = [fold.text[:head] for fold, head in zip(folds, kept, strict=True)]
    _adopt(heads, folds)
    cells = []
    for at, fold in enumerate(folds):
        head, many = heads[at], len(fold.members)
        if not head:
            cells.append(path_cell(fold))
        elif many > 1 and len(head) >= ends[at]:
            heads[at] = f"{head} ×{many}"
            cells.append(f"  {fold.text[len(head) :]}")
        else:
            cells.append(f"  {path_cell(fold, len(head))}")
    return heads, cells


def _longer(fold: Fold, head: int, width: int) -> int:
    """Where the rest of a path begins that fits."""
    indent = 2 if head else 0
    while len(fold.text) - head + indent > width:
        indent = 2
        found = fold.text.find("/", head) + 1
        if not found:
            break
        head = found
    return head


def _adopt(heads: list[str], folds: Sequence[Fold]) -> None:
    """Give the heading of a neighbour to paths that begin with it and have none."""
    for order in (range(1, len(heads)), range(len(heads) - 2, -1, -1)):
        step = -1 if order.step == 1 else 1
        for at in order:
            near = heads[at + step]
            if not heads[at] and near and folds[at].text.startswith(near):
                heads[at] = near


def with_headings(grid: Grid, heads: Sequence[str]) -> Grid:
    """The grid with each heading above the run of its lines."""
    lines: list[Line] = []
    last = ""
    for head, line in zip(heads, grid.lines, strict=True):
        if head and head != last:
            lines.append(Line((head,), "heading"))
        last = head
        lines.append(line)
    return dataclasses.replace(grid, lines=tuple(lines))


def cut_under_headings(
    cells: Cells, names: Sequence[str], folds: Sequence[Fold], width: int
) -> Grid:
    """The table of some columns, with its paths cut to a width, below headings."""
    heads, paths = headed(folds, width)
    cells.put("path", [_cut_cell(path, width) for path in paths])
    return with_headings(cells.grid(names), heads)


def _cut_cell(cell: str, width: int) -> str:
    """A cell of paths, cut; what is indented stays so, and the count stays."""
    found = _PATH_CELL.fullmatch(cell)
    assert found is not None
    indent, path, count = found[1], found[2], found[3] or ""
    return f"{indent}{cut_path(path, width - len(indent) - len(count))}{count}"
