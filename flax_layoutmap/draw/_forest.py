"""The tree of modules and leaves, with repeated layers folded, as a tree-map."""

import dataclasses
import re
from collections.abc import Iterable, Sequence

import numpy as np

from flax_layoutmap._tree.paths import spell_indices
from flax_layoutmap.draw._scene import UNIT, Forest, Kind

# Width by height of the two canvases: a screen, and a phone held upright.
WIDE = 2.0
TALL = 0.72

# `layers_3` of Linen, `3` of NNX.
_INDEX = re.compile(r"(?P<stem>(?:.*_)?)(?P<index>0|[1-9]\d*)")


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """A module or a leaf; `like` is equal for equal contents, -1 until folded."""

    name: str
    kind: int = -1
    count: int = 1
    children: "list[Node]" = dataclasses.field(default_factory=list)
    like: int = -1


def grow(paths: Iterable[str], kinds: Iterable[int]) -> Node:
    """The tree of these paths; `kinds` has the position of the kind of each leaf."""
    root = Node("")
    modules: dict[str, Node] = {}

    for path, kind in zip(paths, kinds, strict=True):
        new = [path]
        # A key may be empty, so that "/w" is not at the top.
        above, slash, _ = path.rpartition("/")
        while slash and above not in modules:
            new.append(above)
            above, slash, _ = above.rpartition("/")
        parent = modules[above] if slash else root
        for module in reversed(new[1:]):
            made = modules[module] = Node(module.rpartition("/")[2])
            parent.children.append(made)
            parent = made
        parent.children.append(Node(path.rpartition("/")[2], kind))
    for found in (root, *modules.values()):
        found.children = _in_order(found.children)
    return root


def _in_order(children: list[Node]) -> list[Node]:
    """Sort siblings with an index by it, from the position of the first of them.

    Keys of a dict are sorted as text, so that layer 10 comes before layer 2.
    """
    starts: dict[str, int] = {}
    keys: dict[int, tuple[int, int]] = {}
    for at, child in enumerate(children):
        found = _indexed(child.name)
        stem, index = found or ("", 0)
        keys[id(child)] = (starts.setdefault(stem, at) if found else at, index)
    return sorted(children, key=lambda child: keys[id(child)]) if starts else children


def _indexed(name: str) -> tuple[str, int] | None:
    """`layers_3` → `("layers_", 3)`."""
    if not name[-1:].isdecimal():
        return None
    found = _INDEX.fullmatch(name)
    return None if found is None else (found["stem"], int(found["index"]))


def joined(node: Node) -> Node:
    """The tree with each module that has one child merged with it, except the root."""
    made: dict[int, Node] = {}
    for each in _from_below(node):
        children = [
            _with_its_child(made[id(child)]) if child.children else child
            for child in each.children
        ]
        made[id(each)] = Node(each.name, each.kind, each.count, children, each.like)
    return made[id(node)]


def _from_below(root: Node) -> list[Node]:
    """The root and all modules, children before parents, without recursion."""
    found = [root]
    for node in found:
        found += [child for child in node.children if child.children]
    return found[::-1]


def _with_its_child(node: Node) -> Node:
    if len(node.children) == 1:
        (only,) = node.children
        name, count = f"{node.name}/{only.name}", node.count * only.count
        return Node(name, only.kind, count, only.children, only.like)
    return node


def folded(root: Node, alike: Sequence[int]) -> Node:
    """The tree with siblings merged that differ in their index alone.

    They must hold leaves of the same kinds under the same names; `alike` has per kind
    the first kind that counts as the same.
    """
    known: dict[tuple[object, ...], int] = {}
    made: dict[int, Node] = {}
    for node in _from_below(root):
        made[id(node)] = _folded(node, alike, known, made)
    return made[id(root)]


def _folded(
    node: Node,
    alike: Sequence[int],
    known: dict[tuple[object, ...], int],
    inner: dict[int, Node],
) -> Node:
    """Fold one node, after its children; an unchanged one stays the same object."""
    groups: dict[tuple[str, int | None], list[tuple[int, Node]]] = {}
    for child in node.children:
        if child.children:
            child = inner[id(child)]
        else:
            child.like = known.setdefault((alike[child.kind],), len(known))
        found = _indexed(child.name)
        key = (child.name, None) if found is None else (found[0], child.like)
        groups.setdefault(key, []).append((found[1] if found else 0, child))
    made = [_merged(stem, group) for (stem, _), group in groups.items()]
    contents = tuple([part for at in made for part in (at.name, at.like, at.count)])
    like = known.setdefault(contents, len(known))
    if made != node.children:
        return Node(node.name, node.kind, 1, made, like)
    node.like = like
    return node


def _merged(stem: str, group: list[tuple[int, Node]]) -> Node:
    first = group[0][1]
    if len(group) == 1:
        return first
    name = stem + spell_indices(sorted(index for index, _ in group))
    return Node(name, first.kind, len(group), first.children, first.like)


def forest(root: Node, kinds: Sequence[Kind]) -> Forest:
    """The tree as columns, with its tree-maps."""
    names: list[str] = []
    parents: list[int] = []
    own: list[int] = []
    counts: list[int] = []
    likes: list[int] = []
    times: list[int] = []  # how many leaves of the tree a node stands for
    stack = [(root, -1, 1)]
    while stack:
        node, parent, above = stack.pop()
        at = len(names)
        names.append(node.name)
        parents.append(parent)
        own.append(node.kind)
        likes.append(node.like)
        counts.append(node.count)
        times.append(above * node.count)
        stack.extend((child, at, times[at]) for child in reversed(node.children))
    weights = [
        kinds[kind].bytes_per_device * many if kind >= 0 else 0
        for kind, many in zip(own, times, strict=True)
    ]
    for at in range(len(names) - 1, 0, -1):
        weights[parents[at]] += weights[at]
    maps = [layout(parents, weights, likes, each) for each in (WIDE, TALL)]
    return Forest(
        tuple(names), tuple(parents), tuple(own), tuple(counts), maps[0], maps[1]
    )


# ---------------------------------------------------------------------- tree-maps

# The algorithm is that of M. Bruls, K. Huizing and J. J. van Wijk, "Squarified
# Treemaps" (Data Visualization 2000): children fill their parent row by row, along its
# shorter side, the largest first, and a row takes the next child as long as that brings
# its worst shape closer to a square.

Rectangle = tuple[float, float, float, float]  # left, top, right, bottom


def squarify(weights: Sequence[float], space: Rectangle) -> list[Rectangle]:
    """Cut a rectangle into areas in proportion to weights, largest first, all above 0.

    >>> squarify([2, 1, 1], (0.0, 0.0, 4.0, 2.0))
    [(0.0, 0.0, 2.0, 2.0), (2.0, 0.0, 4.0, 1.0), (2.0, 1.0, 4.0, 2.0)]
    """
    placed: list[Rectangle] = []
    left, top, right, bottom = space
    remaining, at = float(sum(weights)), 0
    while at < len(weights):
        width, height = right - left, bottom - top
        side, scale = min(width, height), width * height / remaining
        stop, row = _row(weights, at, side, scale)
        # The last row takes what is left, so that rounding leaves no gap.
        is_last = stop == len(weights)
        depth = max(width, height) if is_last else row * scale / side if side else 0.0
        if width >= height:
            strip = (left, top, left + depth, bottom)
            left += depth
        else:
            strip = (left, top, right, top + depth)
            top += depth
        placed += _fill(weights[at:stop], row, strip, upright=width >= height)
        remaining, at = remaining - row, stop
    return placed


def _row(
    weights: Sequence[float], start: int, side: float, scale: float
) -> tuple[int, float]:
    """Where the row that starts here ends, and the sum of its weights."""
    total, largest, best = 0.0, weights[start], float("inf")
    square = side * side
    for at in range(start, len(weights)):
        weight = weights[at]
        area = (total + weight) * scale
        area *= area
        # The worst ratio of the sides in this row; weights never grow along it.
        worst = 0.0
        if area and square:
            flat = square * largest * scale / area
            worst = max(flat, area / (square * weight * scale))
        if worst > best:
            return at, total
        best, total = worst, total + weight
    return len(weights), total


def _fill(
    weights: Sequence[float], total: float, strip: Rectangle, *, upright: bool
) -> list[Rectangle]:
    """Cut one strip; `upright` ones from top to bottom, others from left to right."""
    left, top, right, bottom = strip
    length = bottom - top if upright else right - left
    placed, done = [], 0.0
    for weight in weights:
        start, done = done, done + weight
        low, high = length * start / total, length * done / total
        if upright:
            placed.append((left, top + low, right, top + high))
        else:
            placed.append((left + low, top, left + high, bottom))
    return placed


def layout(
    parents: Sequence[int], weights: Sequence[int], likes: Sequence[int], aspect: float
) -> tuple[int, ...]:
    """Rectangles of all nodes of a tree, each within that of its parent.

    Args:
        parents: position of each node's parent, which precedes it; -1 for the root.
        weights: of each node; that of a module is the sum of its children's.
        likes: equal for nodes whose contents are equal in proportion; -1 if unknown.
        aspect: width of the canvas, divided by its height.

    Returns:
        Four numbers per node: left, top, right, bottom, from 0 to `UNIT`. Nodes without
        weight have no area.
    """
    children: dict[int, list[int]] = {}
    ends = list(range(1, len(parents) + 1))
    for node in range(len(parents) - 1, 0, -1):
        parent = parents[node]
        ends[parent] = max(ends[parent], ends[node])
        if weights[node] > 0:
            children.setdefault(parent, []).append(node)
    spaces: list[Rectangle] = [(0.0, 0.0, 0.0, 0.0)] * len(parents)
    spaces[0] = (0.0, 0.0, aspect, 1.0)
    # Equal layers in equal rectangles are cut alike: by kind and sides, the first one.
    known: dict[tuple[int, float, float], int] = {}
    node = 0
    while node < len(parents):
        inner = children.get(node)
        if not inner:
            node += 1
            continue
        left, top, right, bottom = spaces[node]
        key = (likes[node], round(right - left, 9), round(bottom - top, 9))
        first = known.get(key) if likes[node] >= 0 else None
        if first is not None:
            across, down = left - spaces[first][0], top - spaces[first][1]
            for at in range(1, ends[node] - node):
                a, b, c, d = spaces[first + at]
                if weights[node + at] > 0:
                    spaces[node + at] = (a + across, b + down, c + across, d + down)
            node = ends[node]
            continue
        known[key] = node
        inner.sort(key=lambda child: (-weights[child], child))
        found = squarify([weights[child] for child in inner], spaces[node])
        for child, space in zip(inner, found, strict=True):
            spaces[child] = space
        node += 1
    scaled = np.array(spaces) * (UNIT / aspect, UNIT, UNIT / aspect, UNIT)
    return tuple(np.rint(scaled).clip(0, UNIT).astype(int).ravel().tolist())
