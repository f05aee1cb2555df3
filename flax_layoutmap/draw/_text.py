"""Pictures as lines of text in the colours of a terminal."""

import collections
from collections.abc import Iterable, Iterator

from rich.cells import cell_len
from rich.text import Text

from flax_layoutmap._show.table import human_bytes, human_share
from flax_layoutmap._show.terminal import wrapped
from flax_layoutmap.draw._arrays import INK, Colour, Grids, Panel
from flax_layoutmap.draw._model import Node, Tree

_BETWEEN = 4  # columns between two panels
_WORTH = 1 / 30  # modules and leaves with a smaller share of the bytes have no bar


def lines(picture: Grids | Tree, width: int) -> Iterator[Text]:
    """The picture as lines of at most `width` characters."""
    yield from map(Text, wrapped((picture.title, *picture.lines), width))
    yield Text()
    if isinstance(picture, Tree):
        drawn = [*_bars(picture, width), Text(), *_legend(picture, width)]
    else:
        groups = (_flow(map(_panel, group), width) for group in picture.groups)
        drawn = _flow(groups, width)
    for line in drawn:
        line.truncate(width, overflow="ellipsis")
        yield line


def _flow(blocks: Iterable[list[Text]], width: int) -> list[Text]:
    """Blocks side by side, in as many rows as they need."""
    rows: list[list[Text]] = []
    for block in blocks:
        left = _width(rows[-1]) + _BETWEEN if rows else 0
        if not rows or left + _width(block) > width:
            rows.append(block)
            continue
        rows[-1] += [Text() for _ in block[len(rows[-1]) :]]
        for line, part in zip(rows[-1], block, strict=False):
            line.append(" " * (left - line.cell_len)).append(part)
    return [line for row in rows for line in (Text(), *row)][1:]


def _width(block: list[Text]) -> int:
    return max(line.cell_len for line in block)


def _panel(panel: Panel) -> list[Text]:
    rows = [
        [(" ".join(cell.lines), f"{INK} on {cell.colour.hex}") for cell in row]
        for row in panel.cells
    ]
    rows.insert(0, [(label, "") for label in panel.columns])
    wide = max(cell_len(text) for row in rows for text, _ in row) + 2
    left = max(map(cell_len, panel.rows))
    block = [Text(panel.title)]
    for label, row in zip(["", *panel.rows], rows, strict=True):
        line = Text(" " * (left - cell_len(label)) + label)
        for text, style in row:
            text = text.center(wide + len(text) - cell_len(text))
            line.append(" ").append(text, style)
        block.append(line)
    return block


def _bars(tree: Tree, width: int) -> Iterator[Text]:
    """A bar of bytes per device for each large module and leaf."""
    whole = tree.root.size
    rows = list(_rows(tree.root, whole * _WORTH, ""))
    left = min(width * 2 // 5, max(cell_len(name) for name, _ in rows))
    room = max(10, width - left - 22)
    for name, node in rows:
        share = human_share(node.size / whole) if whole else "-"
        line, bar = Text(name), _bar(node, whole, room)
        line.truncate(left, overflow="ellipsis", pad=True)
        line.append("  ").append(bar).append(" " * (room - bar.cell_len))
        yield line.append(f"{human_bytes(node.size):>12}{share:>8}")


def _rows(node: Node, least: float, indent: str) -> Iterator[tuple[str, Node]]:
    """Name and node of each bar; small nodes next to a large node share a bar."""
    small = [child for child in node.children if child.size < least]
    if indent and len(small) == len(node.children):
        return
    for child in node.children:
        if child.size >= least or len(small) == 1:
            yield indent + child.name, child
            yield from _rows(child, least, f"{indent}  ")
    if len(small) > 1:
        size = sum(child.size for child in small)
        yield f"{indent}{len(small)} others", Node("", size, "", children=small)


def _bar(node: Node, whole: int, room: int) -> Text:
    """A bar; cumulative sizes are rounded, so that the lengths add up."""
    sizes = collections.Counter[Colour]()
    for leaf in node.leaves():
        sizes[leaf.colour] += leaf.size
    bar, done = Text(), 0
    for colour, size in sizes.most_common():
        done += size
        end = round(room * done / whole) if whole else 0
        bar.append(colour.character * (end - len(bar)), colour.hex)
    return bar if bar or not done else Text("▏")


def _legend(tree: Tree, width: int) -> list[Text]:
    entries = (
        [Text(colour.character * 2, colour.hex).append(f" {text}", "none")]
        for text, colour in tree.legend
    )
    return [line for line in _flow(entries, width) if line]
