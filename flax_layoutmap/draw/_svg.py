"""Pictures as SVG, with a background for light and dark pages, and as HTML."""

import html
import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size

from flax_layoutmap._show.table import human_bytes
from flax_layoutmap._show.terminal import wrapped
from flax_layoutmap.draw._arrays import Cell, Colour, Grids, Panel
from flax_layoutmap.draw._model import Node, Tree

_WIDTH, _HEIGHT, _MARGIN = 1000.0, 560.0, 16.0  # of a tree-map
_LINE, _LETTER = 16.0, 7.3  # height of a line and width of a letter, at 12 points

Rectangle = tuple[float, float, float, float]  # left, top, width, height

_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0:g} {1:g}" width="{0:g}" \
height="{1:g}" font-size="12" \
font-family="ui-monospace,Menlo,Consolas,DejaVu Sans Mono,monospace">
<title>{title}</title>
<style>
.flm-paper {{ fill: #ffffff }} .flm-frame {{ fill: #eceff3; stroke: #aab1bc }}
.flm-ink, .flm-words, .flm-title {{ fill: #14181f }} .flm-title {{ font-weight: 600 }}
@media (prefers-color-scheme: dark) {{
.flm-paper {{ fill: #14171c }} .flm-frame {{ fill: #262b34; stroke: #4a5261 }}
.flm-words, .flm-title {{ fill: #e8ebf0 }}
}}
</style>
<rect class="flm-paper" width="100%" height="100%" rx="6"/>
{body}
</svg>
"""

_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ max-width: 1040px; margin: auto; padding: 12px; font: 15px sans-serif }}
</style>
{body}
</html>
"""


def page(picture: Grids | Tree) -> str:
    """The picture as an HTML page."""
    return _PAGE.format(title=html.escape(picture.title), body=fragment(picture))


def fragment(picture: Grids | Tree) -> str:
    """The picture as part of a page; below a model, the table of its leaves."""
    drawn = f'<div style="overflow-x:auto">{svg(picture)}</div>'
    if isinstance(picture, Grids):
        return drawn
    return (
        f'{drawn}<details><summary style="cursor:pointer">Every leaf</summary>'
        f'<pre style="overflow-x:auto;font-size:13px">{html.escape(picture.report)}'
        "</pre></details>"
    )


def svg(picture: Grids | Tree) -> str:
    """The picture as SVG."""
    title, *lines = wrapped((picture.title, *picture.lines), 130)
    head = _flow([_words(title, "title"), *map(_words, lines)], 0, 2)
    if isinstance(picture, Tree):
        legend = _flow(itertools.starmap(_legend, picture.legend), _WIDTH, 8)
        drawn = "".join(_nested(picture.root, (0, 0, _WIDTH, _HEIGHT)))
        blocks = [head, legend, _Block(_WIDTH, _HEIGHT, drawn)]
    else:
        groups = (_flow(map(_panel, group), _WIDTH, 32) for group in picture.groups)
        blocks = [head, _flow(groups, _WIDTH, 32)]
    content = _flow(blocks, 0, 14)
    sides = content.width + 2 * _MARGIN, content.height + 2 * _MARGIN
    body = _moved(content, _MARGIN, _MARGIN)
    return _SVG.format(*sides, title=html.escape(picture.title), body=body)


class _Block(NamedTuple):
    """A part of a picture, with its upper left corner at 0, 0."""

    width: float
    height: float
    body: str


def _moved(block: _Block, left: float, top: float) -> str:
    return f'<g transform="translate({left:g} {top:g})">{block.body}</g>'


def _flow(blocks: Iterable[_Block], width: float, gap: float) -> _Block:
    """Blocks side by side, in as many rows as they need."""
    left = top = right = bottom = 0.0
    body = []
    for block in blocks:
        if left and left + block.width > width:
            left, top = 0.0, bottom + gap
        body.append(_moved(block, left, top))
        right, bottom = max(right, left + block.width), max(bottom, top + block.height)
        left += block.width + gap
    return _Block(right, bottom, "".join(body))


def _words(text: str, kind: str = "words") -> _Block:
    return _Block(cell_len(text) * _LETTER, _LINE, _label(text, 0, 0, kind=kind))


def _label(
    text: str, x: float, y: float, anchor: str = "start", kind: str = "words"
) -> str:
    """A line of text with its upper edge at y; kind `ink` is for coloured boxes."""
    return (
        f'<text class="flm-{kind}" x="{x:.1f}" y="{y + _LINE / 2:.1f}" dy="0.35em" '
        f'text-anchor="{anchor}">{html.escape(text)}</text>'
    )


def _box(about: str, space: Rectangle, colour: Colour | None, *labels: str) -> str:
    """A box with a tooltip; without a colour, a frame."""
    x, y, width, height = space
    gap = min(1.0, width / 4, height / 4)
    look = 'class="flm-frame"' if colour is None else f'fill="{colour.hex}"'
    if colour is not None and colour.is_warning:
        look += ' stroke="#b3261e" stroke-width="3" stroke-dasharray="4 3"'
    return (
        f"<g><title>{html.escape(about)}</title>"
        f'<rect x="{x + gap:.1f}" y="{y + gap:.1f}" width="{width - 2 * gap:.1f}" '
        f'height="{height - 2 * gap:.1f}" rx="2" {look}/>'
        f"{''.join(labels)}</g>"
    )


def _panel(panel: Panel) -> _Block:
    cells = [cell for row in panel.cells for cell in row]
    texts = [*panel.columns, *(line for cell in cells for line in cell.lines)]
    width = max(56.0, max(map(cell_len, texts)) * _LETTER + 12)
    height = len(cells[0].lines) * _LINE + 14
    left, top = max(map(cell_len, panel.rows)) * _LETTER + 8, 2 * _LINE + 6
    body = [_label(panel.title, 0, 0)]
    for column, text in enumerate(panel.columns):
        middle = left + (column + 0.5) * width
        body.append(_label(text, middle, _LINE + 2, "middle"))
    for text, row in zip(panel.rows, panel.cells, strict=True):
        body.append(_label(text, left - 8, top + (height - _LINE) / 2, "end"))
        for column, cell in enumerate(row):
            body.append(_cell(cell, (left + column * width, top, width, height)))
        top += height
    across = max(left + len(panel.columns) * width, cell_len(panel.title) * _LETTER)
    return _Block(across, top, "".join(body))


def _cell(cell: Cell, space: Rectangle) -> str:
    """A box with as many lines as fit."""
    x, y, width, height = space
    lines = cell.lines[: max(0, int((height - 4) / _LINE))]
    top = y + (height - len(lines) * _LINE) / 2
    labels = [
        _label(text, x + width / 2, top + number * _LINE, "middle", "ink")
        for number, text in enumerate(lines)
    ]
    return _box(cell.about, space, cell.colour, *labels)


def _legend(text: str, colour: Colour) -> _Block:
    width, height = cell_len(text) * _LETTER + 16, _LINE + 8
    cell = _cell(Cell((text,), colour, text), (0, 0, width, height))
    return _Block(width, height, cell)


def _nested(node: Node, space: Rectangle) -> Iterator[str]:
    """A leaf as a box; a module as a frame around its children."""
    x, y, width, height = space
    room, size = int((width - 10) / _LETTER), human_bytes(node.size)
    if not node.children:
        texts = _cut(node.name, room), node.layout, size
        lines = tuple(text for text in texts if 0 < cell_len(text) <= room)
        yield _cell(Cell(lines, node.colour, node.about), space)
        return
    if node.name:  # the root has no frame
        has_room = room > 3 and height > 44
        heading = _label(_cut(f"{node.name} {size}", room), x + 6, y + 2)
        yield _box(node.about, space, None, heading if has_room else "")
        head = _LINE + 3 if has_room else 3.0
        space = x + 3, y + head, width - 6, height - head - 3
    children = [child for child in node.children if child.size]
    spaces = _divided([child.size for child in children], space)
    for child, part in zip(children, spaces, strict=True):
        if min(part[2:]) > 0.5:
            yield from _nested(child, part)


def _cut(text: str, room: int) -> str:
    if cell_len(text) <= room:
        return text
    return f"{set_cell_size(text, room - 1).rstrip()}…" if room > 3 else ""


def _divided(weights: list[int], space: Rectangle) -> Iterator[Rectangle]:
    """Cut a rectangle into areas in proportion to positive weights, largest first.

    The longer side is cut in two parts of about equal weight, recursively.
    """
    x, y, width, height = space
    if len(weights) < 2:
        yield from [space] * len(weights)
    elif width < height:
        for down, across, tall, wide in _divided(weights, (y, x, height, width)):
            yield across, down, wide, tall
    else:
        sums = list(itertools.accumulate(weights))
        count = 1 + sum(total * 2 < sums[-1] for total in sums[:-2])
        left = width * sums[count - 1] / sums[-1]
        yield from _divided(weights[:count], (x, y, left, height))
        yield from _divided(weights[count:], (x + left, y, width - left, height))
