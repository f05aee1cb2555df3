"""The picture of a model: its leaves in their modules, coloured by layout."""

import collections
import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._rules.records import show_spec
from flax_layoutmap._show.report import UNMATCHED, explain, held, report_lines
from flax_layoutmap._show.resolved_table import ResolvedTable
from flax_layoutmap._show.table import Fold, human_bytes, human_share
from flax_layoutmap._show.terminal import plain
from flax_layoutmap.draw._arrays import GREY, NO_RULE, OTHERS, PALETTE, Colour

_NO_RULE = "no rule: replicated"


@dataclasses.dataclass(slots=True)
class Node:
    """A module, or a leaf without children; repeated layers share a node."""

    name: str  # path from the parent
    size: int  # bytes per device of all its leaves
    about: str  # the text of the tooltip
    layout: str = ""  # only of a leaf
    colour: Colour = GREY
    children: "list[Node]" = dataclasses.field(default_factory=list)

    def leaves(self) -> "Iterator[Node]":
        if not self.children:
            yield self
        for child in self.children:
            yield from child.leaves()


class Tree(NamedTuple):
    """The picture of a model."""

    title: str
    lines: list[str]
    legend: list[tuple[str, Colour]]
    root: Node
    report: str  # the table of all leaves


def tree(table: ResolvedTable) -> Tree:
    """The picture of `flm.draw.model`."""
    known = isinstance(table, ResolvedTable)
    if not (known and len(table)):
        why = "no leaves" if known else f"a {type(table).__name__} is not a Resolution"
        raise LayoutError(
            f"there is nothing to draw: {why}; resolve a model: "
            "flm.draw.model(layout_map.resolve(model))"
        )
    leaves = [_leaf(fold, table) for fold in table.folds()]
    legend = _coloured(leaves)
    per_device = held(table.bytes_per_device, table.host_bytes_per_device)
    share = human_share(table.replicated_share)
    lines = [
        f"{per_device} of {human_bytes(table.total_bytes)}; {share} replicated",
        "Bytes per device of every array; colour = layout",
    ]
    where = "no mesh" if table.mesh is None else f"mesh {table.mesh}"
    root = _module("", [(leaf.name.split("/"), leaf) for leaf in leaves])
    return Tree(f"Layouts on {where}", lines, legend, root, plain(report_lines(table)))


def _leaf(fold: Fold, table: ResolvedTable) -> Node:
    """A leaf, or the leaf of repeated layers, named by its full path, still grey."""
    first, many = fold.members[0], len(fold.members)
    row, leaf = table._rows[first], table.leaf(first)
    is_unmatched = row.reason in UNMATCHED
    layout = f"{show_spec(row.spec)} {row.memory_kind or ''}".rstrip()
    size = leaf.bytes_per_device * many
    # For an unmatched leaf, `explain` searches for the closest rule, which is slow.
    why = f"{leaf.path} {UNMATCHED.get(row.reason)}"
    why = why if is_unmatched else explain(leaf, row, table.rules)
    about = f"{fold.cell}: {human_bytes(size)} per device\n{why}"
    return Node(fold.text, size, about, _NO_RULE if is_unmatched else layout)


def _coloured(leaves: list[Node]) -> list[tuple[str, Colour]]:
    """Give each leaf the colour of its layout, and return the legend.

    The layouts with the most bytes have colours that no other layout shares.
    """
    sizes = collections.Counter[str]()
    for leaf in leaves:
        sizes[leaf.layout] += leaf.size
    colours, free = {"replicated": GREY, _NO_RULE: NO_RULE}, iter(PALETTE)
    for layout, _ in sizes.most_common():
        colours[layout] = colours.get(layout) or next(free, OTHERS)
    for leaf in leaves:
        leaf.colour = colours[leaf.layout]
    return [
        (f"{layout} {human_bytes(size)}", colours[layout])
        for layout, size in sizes.most_common()
    ]


def _module(path: str, leaves: list[tuple[list[str], Node]]) -> Node:
    """The module with this path, from its leaves and their names split into parts.

    A module with a single child is joined with it. Children are sorted by size.
    """
    groups: dict[str, list[tuple[list[str], Node]]] = {}
    children: list[Node] = []
    for (part, *rest), leaf in leaves:
        if rest:
            groups.setdefault(part, []).append((rest, leaf))
        else:
            leaf.name = part or "(the array)"
            children.append(leaf)
    for part, inner in groups.items():
        children.append(_module(f"{path}{part}/", inner))
    name = path[:-1].rpartition("/")[2]
    if len(children) == 1 and path:
        children[0].name = f"{name}/{children[0].name}"
        return children[0]
    children.sort(key=lambda child: -child.size)
    size = sum(child.size for child in children)
    about = f"{path}\n{human_bytes(size)} per device"
    return Node(name, size, about, children=children)
