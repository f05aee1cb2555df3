"""Squarified tree-maps: rectangles for a tree whose nodes have weights.

The algorithm is that of M. Bruls, K. Huizing and J. J. van Wijk, "Squarified Treemaps"
(Data Visualization 2000): children fill their parent row by row, along its shorter
side, the largest first, and a row takes the next child as long as that brings its
worst shape closer to a square.
"""

from collections.abc import Sequence

import numpy as np

from flax_layoutmap.draw._scene import UNIT

Rectangle = tuple[float, float, float, float]  # left, top, right, bottom


def squarify(weights: Sequence[float], space: Rectangle) -> list[Rectangle]:
    """Cut a rectangle into areas in proportion to weights.

    Args:
        weights: the largest first; all above 0.
        space: the rectangle to fill.

    Returns:
        One rectangle per weight.

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
        parents: position of the parent of each node; -1 for the first, which is the
            root. What is below a node follows it.
        weights: of each node; that of a module is the sum of its own.
        likes: equal for nodes below which is the same, in proportion; -1 where that is
            not known.
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
