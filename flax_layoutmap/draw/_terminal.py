"""Scenes as lines of characters, with the colours that a terminal may give them."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from flax_layoutmap._show.table import human_bytes
from flax_layoutmap._show.terminal import wrapped
from flax_layoutmap.draw._palette import fill
from flax_layoutmap.draw._scene import (
    BarScene,
    Grid,
    GridScene,
    ModelScene,
    Picture,
    Scene,
    Shade,
)

# Without a terminal, lines are so long at most.
WIDTH = 80

_BETWEEN = 4  # columns between two grids
_SHORTEST = 10  # columns of a bar
_GAP = "…"


class Span(NamedTuple):
    """Characters and the number of their colour.

    Attributes:
        text: the characters.
        colour: number of the colour; None for that of the terminal.
        is_paper: whether the colour is that of the paper and not of the ink.
    """

    text: str
    colour: int | None = None
    is_paper: bool = False


Line = list[Span]


def lines(scene: Scene, width: int) -> list[Line]:
    """The scene in lines of at most `width` characters, as far as it can be done."""
    if isinstance(scene, GridScene):
        return [*_head(scene.title, scene.lines, width), [], *_grids(scene, width)]
    if isinstance(scene, ModelScene):
        scene = scene.bars
    return [*_head(scene.title, scene.lines, width), [], *_bars(scene, width)]


def plain(scene: Scene, width: int) -> str:
    """The same without colours."""
    return "\n".join(
        "".join(span.text for span in line).rstrip() for line in lines(scene, width)
    )


def _head(title: str, more: Sequence[str], width: int) -> list[Line]:
    return [[Span(text)] for text in wrapped((title, *more), width)]


# ---------------------------------------------------------------- boxes in a grid


def _grids(scene: GridScene, width: int) -> Iterator[Line]:
    """All grids side by side, where there is room; else each picture by itself."""
    pictures = [
        [
            _block(picture, grid, width, "" if at else picture.title)
            for at, grid in enumerate(picture.grids)
        ]
        for picture in scene.pictures
    ]
    every = [block for blocks in pictures for block in blocks]
    if _together(every) <= width:
        yield from _beside(every)
        return
    for at, blocks in enumerate(pictures):
        row: list[list[Line]] = []
        if at:
            yield []
        for block in blocks:
            if row and _together([*row, block]) > width:
                yield from _beside(row)
                yield []
                row = []
            row.append(block)
        yield from _beside(row)


def _together(blocks: Sequence[Sequence[Line]]) -> int:
    return sum(map(_width, blocks)) + _BETWEEN * (len(blocks) - 1)


def _block(picture: Picture, grid: Grid, width: int, title: str) -> list[Line]:
    """One grid with its labels; columns that do not fit are left out."""
    texts = [
        [_GAP if at is None else " ".join(picture.boxes[at].lines) for at in row]
        for row in grid.boxes
    ]
    wide = max(len(text) for row in (*texts, grid.columns) for text in row) + 2
    left = max(map(len, (*grid.rows, grid.row_title)))
    left += bool(left)
    columns = _columns(len(grid.columns), (width - left - 1) // (wide + 1))
    sides = [len(_GAP) + 2 if at is None else wide for at in columns]
    inner = sum(sides) + len(sides) - 1

    def ruled(start: str, middle: str, end: str) -> Line:
        edge = middle.join("─" * side for side in sides)
        return [Span(" " * left + start + edge + end)]

    head: list[Line] = [[Span(text)] for text in (title, grid.title) if text]
    if grid.column_title:
        head.append([Span(" " * (left + 1) + grid.column_title.center(inner))])
    shown = [_GAP if at is None else grid.columns[at] for at in columns]
    if any(shown) or grid.row_title:
        names = [name.center(side) for name, side in zip(shown, sides, strict=True)]
        start = grid.row_title.rjust(max(0, left - 1))
        head.append(
            [Span(f"{start}  {' '.join(names)}" if left else f" {' '.join(names)}")]
        )
    body: list[Line] = []
    for at, (row, label) in enumerate(zip(grid.boxes, grid.rows, strict=True)):
        line = [Span(f"{label:>{max(0, left - 1)}}" + " " * bool(left) + "│")]
        for column, side in zip(columns, sides, strict=True):
            text = _GAP if column is None else texts[at][column]
            box = None if column is None else row[column]
            colour = None if box is None else picture.boxes[box].colour
            line += [Span(text.center(side), colour, True), Span("│")]
        body.append(line)
    return [*head, ruled("┌", "┬", "┐"), *body, ruled("└", "┴", "┘")]


def _columns(count: int, room: int) -> list[int | None]:
    """Which columns there is room for; None for those that are left out."""
    if count <= max(1, room):
        return list(range(count))
    # The gap takes less room than a column, but some.
    return [*range(max(1, room - 2)), None, *([count - 1] if room > 2 else [])]


def _width(block: Sequence[Line]) -> int:
    return max(sum(len(span.text) for span in line) for line in block)


def _beside(blocks: Sequence[Sequence[Line]]) -> Iterator[Line]:
    widths = list(map(_width, blocks))
    height = max(map(len, blocks), default=0)
    for at in range(height):
        line: Line = []
        for block, width in zip(blocks, widths, strict=True):
            own = block[at] if at < len(block) else []
            line += own
            used = sum(len(span.text) for span in own)
            line.append(Span(" " * (width - used + _BETWEEN)))
        yield line


# ---------------------------------------------------------------- bars


def _bars(scene: BarScene, width: int) -> Iterator[Line]:
    several = len(scene.names) > 1
    largest = max(
        (sum(size for _, size in parts) for parts in _every(scene)), default=0
    )
    labels = [_shortened(bar.label, width * 2 // 5) for bar in scene.bars]
    left = max(map(len, labels), default=0)
    names = max(map(len, scene.names)) + 2 if several else 0
    room = max(_SHORTEST, width - left - names - 2 - 20)
    for label, bar in zip(labels, scene.bars, strict=True):
        rows = [(scene.names[-1], bar.parts, scene.total)]
        if several:
            rows.insert(0, (scene.names[0], bar.before, scene.total_before or 0))
        for at, (name, parts, total) in enumerate(rows):
            start = (label if at == 0 else "").ljust(left + 2)
            start += name.ljust(names) if several else ""
            size = sum(count for _, count in parts)
            share = f"{size / total:.1%}" if total else "-"
            spans = _cells(parts, scene.shades, largest, room)
            used = sum(len(span.text) for span in spans)
            end = " " * (room - used) + f"{human_bytes(size):>12}{share:>8}"
            yield [Span(start), *spans, Span(end)]
    yield []
    yield from _legend(scene.shades, width)


def _every(scene: BarScene) -> Iterator[Iterable[tuple[int, int]]]:
    for bar in scene.bars:
        yield bar.parts
        yield bar.before


def _cells(
    parts: Sequence[tuple[int, int]], shades: Sequence[Shade], largest: int, room: int
) -> Line:
    """A bar: the ends of its parts are rounded, so that lengths add up."""
    spans: Line = []
    done = start = 0
    for shade, size in parts:
        done += size
        end = round(room * done / largest) if largest else 0
        if end > start:
            number = shades[shade].colour
            spans.append(Span(fill(number) * (end - start), number))
        start = end
    if not spans and done:
        spans.append(Span("▏", shades[parts[0][0]].colour))
    return spans


def _legend(shades: Sequence[Shade], width: int) -> Iterator[Line]:
    line: Line = []
    used = 0
    for shade in shades:
        text = f" {shade.text}   "
        if line and used + len(text) + 2 > width:
            yield line
            line, used = [], 0
        line += [Span(fill(shade.colour) * 2, shade.colour), Span(text)]
        used += len(text) + 2
    yield line


def _shortened(text: str, room: int) -> str:
    """The end of a path says more than its beginning."""
    return text if len(text) <= room else "…" + text[len(text) - room + 1 :]
