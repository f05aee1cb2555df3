"""Scenes as lines of text in the colours of a terminal."""

from collections.abc import Iterator, Sequence

from rich.text import Text

from flax_layoutmap._show.table import human_bytes
from flax_layoutmap._show.terminal import wrapped
from flax_layoutmap.draw._scene import (
    INK,
    BarScene,
    Grid,
    GridScene,
    ModelScene,
    Picture,
    Scene,
    Shade,
    colour,
    fill,
)

# The longest line without a terminal.
WIDTH = 80

_BETWEEN = 4  # columns between two grids
_SHORTEST = 10  # columns of a bar
_GAP = "…"


def plain(scene: Scene, width: int) -> str:
    """The scene in lines of at most `width` characters, as far as it can be done."""
    return "\n".join(line.plain.rstrip() for line in lines(scene, width))


def lines(scene: Scene, width: int) -> Iterator[Text]:
    """The same in colours."""
    shown = scene.bars if isinstance(scene, ModelScene) else scene
    for text in wrapped((shown.title, *shown.lines), width):
        yield Text(text)
    yield Text()
    if isinstance(shown, GridScene):
        yield from _grids(shown, width)
    else:
        yield from _bars(shown, width)


# ---------------------------------------------------------------- boxes in a grid


def _grids(scene: GridScene, width: int) -> Iterator[Text]:
    """All grids side by side, if they fit; else each picture by itself."""
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
        row: list[list[Text]] = []
        if at:
            yield Text()
        for block in blocks:
            if row and _together([*row, block]) > width:
                yield from _beside(row)
                yield Text()
                row = []
            row.append(block)
        yield from _beside(row)


def _together(blocks: Sequence[Sequence[Text]]) -> int:
    return sum(map(_width, blocks)) + _BETWEEN * (len(blocks) - 1)


def _width(block: Sequence[Text]) -> int:
    return max(map(len, block))


def _beside(blocks: Sequence[Sequence[Text]]) -> Iterator[Text]:
    widths = list(map(_width, blocks))
    for at in range(max(map(len, blocks), default=0)):
        line = Text()
        for block, width in zip(blocks, widths, strict=True):
            own = block[at] if at < len(block) else Text()
            line.append_text(own).append(" " * (width - len(own) + _BETWEEN))
        yield line


def _block(picture: Picture, grid: Grid, width: int, title: str) -> list[Text]:
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

    def edge(start: str, middle: str, end: str) -> str:
        return " " * left + start + middle.join("─" * side for side in sides) + end

    head = [text for text in (title, grid.title) if text]
    if grid.column_title:
        head.append(" " * (left + 1) + grid.column_title.center(inner))
    shown = [_GAP if at is None else grid.columns[at] for at in columns]
    if any(shown) or grid.row_title:
        names = [name.center(side) for name, side in zip(shown, sides, strict=True)]
        start = f"{grid.row_title:>{left - 1}} " if left else ""
        head.append(f"{start} {' '.join(names)}")
    body = []
    for row, own, label in zip(grid.boxes, texts, grid.rows, strict=True):
        line = Text(f"{label:>{left - 1}} │" if left else "│")
        for column, side in zip(columns, sides, strict=True):
            box = None if column is None else row[column]
            text = _GAP if column is None else own[column]
            paper = box is not None and f"{INK} on {colour(picture.boxes[box].colour)}"
            line.append(text.center(side), paper or "").append("│")
        body.append(line)
    top, bottom = edge("┌", "┬", "┐"), edge("└", "┴", "┘")
    return [*map(Text, (*head, top)), *body, Text(bottom)]


def _columns(count: int, room: int) -> list[int | None]:
    """The columns that fit; None for those that are left out."""
    if count <= max(1, room):
        return list(range(count))
    # The gap takes less room than a column, but some.
    return [*range(max(1, room - 2)), None, *([count - 1] if room > 2 else [])]


# ---------------------------------------------------------------- bars


def _bars(scene: BarScene, width: int) -> Iterator[Text]:
    several = len(scene.names) > 1
    rows = (row for bar in scene.bars for row in scene.rows(bar))
    sums = [sum(size for _, size in parts) for _, parts, _ in rows]
    largest = max(sums, default=0)
    labels = [_shortened(bar.label, width * 2 // 5) for bar in scene.bars]
    left = max(map(len, labels), default=0)
    names = max(map(len, scene.names)) + 2 if several else 0
    room = max(_SHORTEST, width - left - names - 2 - 20)
    for label, bar in zip(labels, scene.bars, strict=True):
        for at, (name, parts, total) in enumerate(scene.rows(bar)):
            start = (label if at == 0 else "").ljust(left + 2)
            start += name.ljust(names) if several else ""
            size = sum(count for _, count in parts)
            share = f"{size / total:.1%}" if total else "-"
            bar_text = _bar(parts, scene.shades, largest, room)
            bar_text.pad_right(room - len(bar_text))
            end = f"{human_bytes(size):>12}{share:>8}"
            yield Text.assemble(start, bar_text, end)
    yield Text()
    yield from _legend(scene.shades, width)


def _bar(
    parts: Sequence[tuple[int, int]], shades: Sequence[Shade], largest: int, room: int
) -> Text:
    """A bar; the ends of its parts are rounded, so that lengths add up."""
    bar, done = Text(), 0
    for shade, size in parts:
        done += size
        end = round(room * done / largest) if largest else 0
        number = shades[shade].colour
        bar.append(fill(number) * max(0, end - len(bar)), colour(number))
    if not bar and done:
        bar.append("▏", colour(shades[parts[0][0]].colour))
    return bar


def _legend(shades: Sequence[Shade], width: int) -> Iterator[Text]:
    line = Text()
    for shade in shades:
        text = f" {shade.text}   "
        if line and len(line) + len(text) + 2 > width:
            yield line
            line = Text()
        line.append(fill(shade.colour) * 2, colour(shade.colour)).append(text)
    yield line


def _shortened(text: str, room: int) -> str:
    """Shorten a path at its beginning, as its end matters more."""
    return text if len(text) <= room else "…" + text[len(text) - room + 1 :]
