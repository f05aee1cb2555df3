"""Leaves as a table that fits a width: which columns, how long, and in what groups."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from flax_layoutmap._fold import Fold
from flax_layoutmap._table import Grid, Line, cut_path, human_bytes

# Below these widths a column says too little to be worth its place. Rules are given
# more of it than shards, and less than it takes to repeat the beginnings of paths.
_RULE, _SHORT_RULE, _PATH = 26, 16, 16

# Two columns, one, or neither.
_Shapes = Literal["apart", "merged", "none"]

_CELL = re.compile(r"((?:  )?)(.*?)( ×\d+)?")
_NUMBER = re.compile(r"float|uint|int|complex")


class Row(NamedTuple):
    """One leaf, or several that are alike, as texts.

    Attributes:
        fold: the path, and how many leaves it stands for.
        shape: global shape, `(64,256)`.
        dtype: name of the dtype, or `-`.
        spec: `P(-, model)`.
        rule: number and pattern of the rule, or why there is none.
        code: the same in a few characters.
        shard: shape of one device's part, or `-`.
        bytes_per_device: the sum over the leaves.
        mark: `""` or `"warning"`.
    """

    fold: Fold
    shape: str
    dtype: str
    spec: str
    rule: str
    code: str
    shard: str
    bytes_per_device: int
    mark: str = ""


def path_cell(fold: Fold, start: int = 0) -> str:
    """The path from a position on, and how many leaves it stands for."""
    many = f" ×{len(fold.members)}" if len(fold.members) > 1 else ""
    return f"{fold.text[start:]}{many}"


def short_dtype(dtype: str) -> str:
    """`bfloat16` → `bf16`, as JAX writes it."""
    return _NUMBER.sub(lambda found: found.group()[0], dtype)


def array(row: Row) -> str:
    """`f32[64,256]`, as JAX writes it; `-` for what is no array."""
    if row.dtype == "-":
        return "-"
    return f"{short_dtype(row.dtype)}[{row.shape.strip('()').removesuffix(',')}]"


def full(rows: Sequence[Row]) -> Grid:
    """All columns, each as wide as it needs."""
    return _grid(
        rows, [path_cell(row.fold) for row in rows], [row.rule for row in rows]
    )


def fitted(rows: Sequence[Row], width: int) -> Grid:
    """As much as fits: the first of these that does.

    Everything; long rules cut; shape and dtype as one; no shards; the beginnings of
    paths as headings, with the rules cut or as numbers. What is cut keeps its end.
    """
    grid = full(rows)
    if grid.width() <= width or not rows:
        return grid
    paths = [path_cell(row.fold) for row in rows]
    options: tuple[tuple[_Shapes, bool], ...] = (
        ("apart", True),
        ("merged", True),
        ("merged", False),
    )
    for shapes, shards in options:
        found = _cut_rules(rows, paths, width, _RULE, shapes, shards)
        if found is not None:
            return found
    folds = [row.fold for row in rows]
    heads, paths = headed(folds, width)
    found = _cut_rules(rows, paths, width, _SHORT_RULE, "merged", False)
    if found is None:
        heads, found = _shortest(rows, width)
    return with_headings(found, heads)


def _shortest(rows: Sequence[Row], width: int) -> tuple[list[str], Grid]:
    """Rules as numbers; where that is not enough, no shapes and dtypes either."""
    codes = [row.code for row in rows]
    room, shapes = 0, "merged"
    for shapes in get_args(_Shapes)[1:]:
        bare = _grid(rows, [""] * len(rows), codes, shapes, False)
        room = width - bare.width() + len("path")
        if room >= _PATH:
            break
    heads, paths = headed([row.fold for row in rows], max(room, _PATH))
    paths = [cut_cell(path, max(room, _PATH)) for path in paths]
    return heads, _grid(rows, paths, codes, shapes, False)


def headed(folds: Sequence[Fold], width: int) -> tuple[list[str], list[str]]:
    """The beginning of each path as a heading, or `""`, and the cell for the rest.

    Neighbours that begin alike up to their last index share a heading; so do those
    whose paths are too long for the width.
    """
    starts = [fold.text[: fold.head] for fold in folds]
    kept = []
    for at, fold in enumerate(folds):
        beside = starts[max(at - 1, 0) : at] + starts[at + 1 : at + 2]
        head = fold.head if starts[at] in beside else 0
        if not head and len(path_cell(fold)) > width:
            head = fold.head
        kept.append(_longer(fold, head, width))
    heads = [fold.text[:head] for fold, head in zip(folds, kept, strict=True)]
    _adopt(heads, folds)
    cells = []
    for at, fold in enumerate(folds):
        head, many = heads[at], len(fold.members)
        if not head:
            cells.append(path_cell(fold))
        elif many > 1 and len(head) >= fold.head:
            heads[at] = f"{head} ×{many}"
            cells.append(f"  {fold.text[len(head) :]}")
        else:
            cells.append(f"  {path_cell(fold, len(head))}")
    return heads, cells


def _longer(fold: Fold, head: int, width: int) -> int:
    """Where the rest of a path begins that fits."""
    indent = 2 if head else 0
    while len(fold.text) - head + indent > width:
        indent = 2
        found = fold.text.find("/", head) + 1
        if not found:
            break
        head = found
    return head


def _adopt(heads: list[str], folds: Sequence[Fold]) -> None:
    """Gives the heading of a neighbour to paths that begin with it and have none."""
    for order in (range(1, len(heads)), range(len(heads) - 2, -1, -1)):
        step = -1 if order.step == 1 else 1
        for at in order:
            near = heads[at + step]
            if not heads[at] and near and folds[at].text.startswith(near):
                heads[at] = near


def with_headings(grid: Grid, heads: Sequence[str]) -> Grid:
    """The grid with each heading above the run of its lines."""
    lines: list[Line] = []
    last = ""
    for head, line in zip(heads, grid.lines, strict=True):
        if head and head != last:
            lines.append(Line((head,), "heading"))
        last = head
        lines.append(line)
    return dataclasses.replace(grid, lines=tuple(lines))


def cut_cell(cell: str, width: int) -> str:
    """A cell of paths, cut; what is indented stays so, and the count stays."""
    found = _CELL.fullmatch(cell)
    assert found is not None
    indent, path, count = found[1], found[2], found[3] or ""
    return f"{indent}{cut_path(path, width - len(indent) - len(count))}{count}"


def cut_rule(rule: str, width: int) -> str:
    """A cell of rules, cut: its number and its end stay.

    >>> cut_rule("4 attention/(query|key|value)/kernel", 20)
    '4 …key|value)/kernel'
    >>> cut_rule("follows layers/7/attention/key/kernel", 20)
    'follows …/key/kernel'
    """
    if len(rule) <= width:
        return rule
    first, space, rest = rule.partition(" ")
    if first == "optimizer":
        number, space, rest = rest.partition(" ")
        first = f"optimizer {number}"
    room = width - len(first) - len(space)
    if first == "follows":
        return f"follows {cut_path(rest, room)}"
    return f"{first}{space}…{rest[max(len(rest) - room + 1, 0) :]}"


def _cut_rules(
    rows: Sequence[Row],
    paths: Sequence[str],
    width: int,
    least: int,
    shapes: _Shapes,
    shards: bool,
) -> Grid | None:
    """The table with the rules in the place that is left, if that is enough."""
    bare = _grid(rows, paths, ["rule"] * len(rows), shapes, shards)
    room = width - bare.width() + len("rule")
    widest = max(len(row.rule) for row in rows)
    if room < min(least, widest):
        return None
    rules = [cut_rule(row.rule, room) for row in rows]
    return _grid(rows, paths, rules, shapes, shards)


def _grid(
    rows: Sequence[Row],
    paths: Sequence[str],
    rules: Sequence[str],
    shapes: _Shapes = "apart",
    shards: bool = True,
) -> Grid:
    columns: list[tuple[str, Sequence[str]]] = [("path", paths)]
    if shapes == "merged":
        columns.append(("array", [array(row) for row in rows]))
    elif shapes == "apart":
        columns += [
            ("shape", [row.shape for row in rows]),
            ("dtype", [row.dtype for row in rows]),
        ]
    columns += [("spec", [row.spec for row in rows]), ("rule", rules)]
    if shards:
        columns.append(("shard", [row.shard for row in rows]))
    count = "bytes/device" if shapes == "apart" else "per device"
    columns.append((count, [human_bytes(row.bytes_per_device) for row in rows]))
    names = tuple(name for name, _ in columns)
    right = tuple(name == count for name in names)
    cells = zip(*(cells for _, cells in columns), strict=True)
    lines = [Line(tuple(row), r.mark) for row, r in zip(cells, rows, strict=True)]
    return Grid(names, right, tuple(lines))
