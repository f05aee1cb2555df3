"""The geometry of meshes and arrays: cells in rows and columns, with labels."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from flax_layoutmap._core.grid import coords_of
from flax_layoutmap.draw._scene import Box, Grid, Label, Picture

# Rows and columns that are drawn; more become a gap before the last one.
_SHOWN = 16
_PANELS = 8

# In place of rows and columns that are left out.
GAP = "…"

_LINE = 18.0  # height of a line of labels
_LETTER = 6.9  # width of a letter, about
_STRONG = 8.4  # of a bold one
_SPACE = 22.0  # between panels
_WIDE = 760.0  # panels go on in the next line from here

Index = tuple[int, ...]


class Cell(NamedTuple):
    """The content of one box; see `Box`."""

    colour: int
    group: int
    lines: tuple[str, ...]
    detail: str


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """What the rows, the columns or the panels of a picture count.

    Attributes:
        name: stands before an index in the title of a panel.
        title: of rows or columns.
        count: how many there are.
        label: the label of one of them.
    """

    name: str
    title: str
    count: int
    label: Callable[[int], str]


_NO_SIDE = Side("", "", 1, lambda at: "")


def picture(
    title: str,
    sides: Sequence[Side],
    cell: Callable[[Index], Cell],
    size: Callable[[int, int, int], tuple[float, float]],
) -> Picture:
    """Draw cells of any rank: the last two sides are rows and columns.

    Args:
        title: what they are of.
        sides: one per index of a cell.
        cell: the cell at an index.
        size: width and height of a cell, in points, by the numbers of rows, columns
            and panels; it is wider where the labels are longer.
    """
    rank = len(sides)
    *outer, down, across = (*(_NO_SIDE,) * (2 - rank), *sides)
    counts = tuple(side.count for side in outer)
    leads = [
        coords_of(at, counts)
        for at in _shown(math.prod(counts), _PANELS)
        if at is not None
    ]
    frame = _Frame(down, across, size, len(leads), has_names=bool(outer))
    boxes: list[Box] = []
    labels: list[Label] = []
    grids: list[Grid] = []
    left = top = right = bottom = 0.0
    for lead in leads:
        pairs = zip(outer, lead, strict=True)
        name = ", ".join(f"{side.name} {side.label(at)}" for side, at in pairs)
        wide = frame.indent + max(frame.inner, len(name) * _STRONG) + 2
        if left and left + wide > _WIDE:
            left, top = 0.0, bottom + _SPACE
        labels += frame.labels(name, left, top)
        positions: list[tuple[int | None, ...]] = []
        for y, row in zip(frame.tops, frame.rows, strict=True):
            own: list[int | None] = []
            for x, column in zip(frame.lefts, frame.columns, strict=True):
                if row is None or column is None:
                    own.append(None)
                    continue
                own.append(len(boxes))
                index = (*lead, row, column)[max(0, 2 - rank) :]
                corner, (width, height) = (left + x + 1.5, top + y + 1.5), frame.cell
                boxes.append(Box(*corner, width - 3, height - 3, *cell(index)))
            positions.append(tuple(own))
        texts = (frame.row_labels, frame.column_labels, down.title, across.title)
        grids.append(Grid(name, *texts, tuple(positions)))
        right, bottom = max(right, left + wide), max(bottom, top + frame.height)
        left += wide + _SPACE
    return Picture(title, right, bottom, tuple(boxes), tuple(labels), tuple(grids))


class _Frame:
    """Where rows, columns and labels are within each panel."""

    def __init__(
        self,
        down: Side,
        across: Side,
        size: Callable[[int, int, int], tuple[float, float]],
        panels: int,
        has_names: bool,
    ) -> None:
        self.down, self.across = down, across
        self.rows, self.columns = (_shown(s.count, _SHOWN) for s in (down, across))
        self.row_labels = _labels(down, self.rows)
        self.column_labels = _labels(across, self.columns)
        width, height = size(len(self.rows), len(self.columns), panels)
        width = max(width, _longest(self.column_labels) * _LETTER + 8)
        names = max(_longest(self.row_labels) * _LETTER, len(down.title) * _STRONG)
        above = (has_names, bool(across.title), any(self.column_labels))
        self.indent = names + 10 if names else 2.0
        self.head = sum(above) * _LINE + 4
        self.cell = width, height
        self.lefts = [self.indent + at * width for at in range(len(self.columns))]
        self.tops = [self.head + at * height for at in range(len(self.rows))]
        self.middle = self.indent + len(self.columns) * width / 2
        self.inner = max(len(self.columns) * width, len(across.title) * _STRONG)
        self.height = self.head + len(self.rows) * height + 2

    def labels(self, name: str, left: float, top: float) -> Iterator[Label]:
        """The labels of the panel with this name and corner."""
        edge, line = left + self.indent - 8, top + _LINE / 2
        if name:
            yield Label(left, line, name, "start", True)
            line += _LINE
        if self.across.title:
            yield Label(left + self.middle, line, self.across.title, "middle", True)
            line += _LINE
        if self.down.title:
            y = top + self.head - _LINE / 2 - 4
            yield Label(edge, y, self.down.title, "end", True)
        width, height = self.cell
        for x, text in zip(self.lefts, self.column_labels, strict=True):
            if text:
                yield Label(left + x + width / 2, line, text)
        for y, text in zip(self.tops, self.row_labels, strict=True):
            if text:
                yield Label(edge, top + y + height / 2, text, "end")


def _shown(count: int, limit: int) -> list[int | None]:
    """Which of so many rows or panels are drawn; None for those between.

    >>> _shown(3, limit=4), _shown(9, limit=4)
    ([0, 1, 2], [0, 1, None, 8])
    """
    if count <= limit:
        return list(range(count))
    return [*range(limit - 2), None, count - 1]


def _labels(side: Side, places: Sequence[int | None]) -> tuple[str, ...]:
    return tuple(GAP if at is None else side.label(at) for at in places)


def _longest(texts: Sequence[str]) -> int:
    return max(map(len, texts))
