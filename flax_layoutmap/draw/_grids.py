"""Boxes in rows and columns, with their labels: the geometry of meshes and arrays."""

import dataclasses
from collections.abc import Sequence

from flax_layoutmap.draw._scene import Box, Grid, Label, Picture

# Rows and columns that are drawn; more become a gap before the last one.
_SHOWN = 16
_PANELS = 8

# What stands for rows and columns that are left out.
GAP = "…"

_LINE = 18.0  # height of a line of labels
_LETTER = 6.9  # width of a letter, about
_STRONG = 8.4  # of a bold one
_SPACE = 22.0  # between panels
_WIDE = 760.0  # panels go on in the next line from here


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """What stands in one box."""

    colour: int
    group: int
    lines: tuple[str, ...]
    detail: str


@dataclasses.dataclass(frozen=True, slots=True)
class Panel:
    """Cells in rows and columns; None is a gap."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    row_title: str
    column_title: str
    cells: tuple[tuple[Cell | None, ...], ...]


def shown(count: int, limit: int = _SHOWN) -> list[int | None]:
    """Which of so many rows or panels are drawn; None for those between.

    >>> shown(3), shown(9, limit=4)
    ([0, 1, 2], [0, 1, None, 8])
    """
    if count <= limit:
        return list(range(count))
    return [*range(limit - 2), None, count - 1]


def shown_panels(count: int) -> list[int]:
    """The same for panels, which leave no gap."""
    return [at for at in shown(count, _PANELS) if at is not None]


def letters(number: int) -> str:
    """The name of a slice: A to Z, then AA.

    >>> letters(0), letters(25), letters(26)
    ('A', 'Z', 'AA')
    """
    name = ""
    number += 1
    while number:
        number, letter = divmod(number - 1, 26)
        name = chr(ord("A") + letter) + name
    return name


def picture(
    title: str, panels: Sequence[Panel], width: float, height: float
) -> Picture:
    """Places the panels side by side.

    Args:
        title: what they are of.
        panels: at least one.
        width: of one cell, in points, where the labels are no longer.
        height: of one cell, in points.
    """
    longest = max(len(text) for panel in panels for text in panel.columns)
    width = max(width, longest * _LETTER + 8)
    boxes: list[Box] = []
    labels: list[Label] = []
    grids: list[Grid] = []
    left = top = right = bottom = 0.0
    for panel in panels:
        frame = _Frame(panel, width, height)
        if left and left + frame.width > _WIDE:
            left, top = 0.0, bottom + _SPACE
        grids.append(frame.place(left, top, boxes, labels))
        right = max(right, left + frame.width)
        bottom = max(bottom, top + frame.height)
        left += frame.width + _SPACE
    return Picture(title, right, bottom, tuple(boxes), tuple(labels), tuple(grids))


class _Frame:
    """Where the parts of one panel lie within it."""

    def __init__(self, panel: Panel, width: float, height: float) -> None:
        self.panel = panel
        self.cell = (width, height)
        names = max(map(len, panel.rows)) * _LETTER
        names = max(names, len(panel.row_title) * _STRONG)
        self.left = names + 10 if names else 2.0
        above = (panel.title, panel.column_title, any(panel.columns))
        self.top = sum(map(bool, above)) * _LINE + 4
        inner = len(panel.columns) * width
        heading = max(len(panel.title), len(panel.column_title)) * _STRONG
        self.width = self.left + max(inner, heading) + 2
        self.height = self.top + len(panel.rows) * height + 2

    def place(
        self, left: float, top: float, boxes: list[Box], labels: list[Label]
    ) -> Grid:
        """Adds the boxes and labels of the panel; its corner is given."""
        panel, (width, height) = self.panel, self.cell
        x, y = left + self.left, top + self.top
        line = top + _LINE / 2
        if panel.title:
            labels.append(Label(left, line, panel.title, "start", True))
            line += _LINE
        if panel.column_title:
            middle = x + len(panel.columns) * width / 2
            labels.append(Label(middle, line, panel.column_title, "middle", True))
            line += _LINE
        if panel.row_title:
            labels.append(Label(x - 8, y - _LINE / 2 - 4, panel.row_title, "end", True))
        for at, text in enumerate(panel.columns):
            if text:
                labels.append(Label(x + (at + 0.5) * width, line, text))
        for at, text in enumerate(panel.rows):
            if text:
                labels.append(Label(x - 8, y + (at + 0.5) * height, text, "end"))
        positions = []
        for row, cells in enumerate(panel.cells):
            positions.append(
                tuple(
                    self._box(cell, x + column * width, y + row * height, boxes)
                    for column, cell in enumerate(cells)
                )
            )
        return Grid(
            panel.title,
            panel.rows,
            panel.columns,
            panel.row_title,
            panel.column_title,
            tuple(positions),
        )

    def _box(
        self, cell: Cell | None, left: float, top: float, boxes: list[Box]
    ) -> int | None:
        if cell is None:
            return None
        width, height = self.cell
        boxes.append(
            Box(
                left + 1.5,
                top + 1.5,
                width - 3,
                height - 3,
                cell.colour,
                cell.group,
                cell.lines,
                cell.detail,
            )
        )
        return len(boxes) - 1
