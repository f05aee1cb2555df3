"""Cells in rows and columns, with their labels: the geometry of meshes and arrays."""

import dataclasses
import math
from collections.abc import Callable, Sequence
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
    """Draws cells of any rank: the last two sides are rows and columns.

    Args:
        title: what they are of.
        sides: one per index of a cell.
        cell: the cell at an index.
        size: width and height of a cell, in points, by the numbers of rows, columns
            and panels; it is wider where the labels are longer.
    """
    rank = len(sides)
    *outer, down, across = (*(_NO_SIDE,) * (2 - rank), *sides)
    rows, columns = _shown(down.count, _SHOWN), _shown(across.count, _SHOWN)
    row_labels, column_labels = _labels(down, rows), _labels(across, columns)
    counts = tuple(side.count for side in outer)
    leads = [
        coords_of(at, counts)
        for at in _shown(math.prod(counts), _PANELS)
        if at is not None
    ]
    width, height = size(len(rows), len(columns), len(leads))
    width = max(width, _longest(column_labels) * _LETTER + 8)
    names = max(_longest(row_labels) * _LETTER, len(down.title) * _STRONG)
    indent = names + 10 if names else 2.0
    above = (bool(outer), bool(across.title), any(column_labels))
    head = sum(above) * _LINE + 4
    inner, tall = len(columns) * width, head + len(rows) * height + 2

    boxes: list[Box] = []
    labels: list[Label] = []
    grids: list[Grid] = []
    left = top = right = bottom = 0.0
    for lead in leads:
        name = ", ".join(
            f"{side.name} {side.label(at)}"
            for side, at in zip(outer, lead, strict=True)
        )
        heading = max(len(name), len(across.title)) * _STRONG
        wide = indent + max(inner, heading) + 2
        if left and left + wide > _WIDE:
            left, top = 0.0, bottom + _SPACE
        x, y, line = left + indent, top + head, top + _LINE / 2
        if name:
            labels.append(Label(left, line, name, "start", True))
            line += _LINE
        if across.title:
            labels.append(Label(x + inner / 2, line, across.title, "middle", True))
            line += _LINE
        if down.title:
            labels.append(Label(x - 8, y - _LINE / 2 - 4, down.title, "end", True))
        labels += [
            Label(x + (at + 0.5) * width, line, text)
            for at, text in enumerate(column_labels)
            if text
        ]
        labels += [
            Label(x - 8, y + (at + 0.5) * height, text, "end")
            for at, text in enumerate(row_labels)
            if text
        ]
        positions: list[tuple[int | None, ...]] = []
        for at, row in enumerate(rows):
            own: list[int | None] = []
            for place, column in enumerate(columns):
                if row is None or column is None:
                    own.append(None)
                    continue
                own.append(len(boxes))
                index = (*lead, row, column)[max(0, 2 - rank) :]
                corner = x + place * width + 1.5, y + at * height + 1.5
                boxes.append(Box(*corner, width - 3, height - 3, *cell(index)))
            positions.append(tuple(own))
        texts = (name, row_labels, column_labels, down.title, across.title)
        grids.append(Grid(*texts, tuple(positions)))
        right, bottom = max(right, left + wide), max(bottom, top + tall)
        left += wide + _SPACE
    return Picture(title, right, bottom, tuple(boxes), tuple(labels), tuple(grids))


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
