"""Leaves as a table that fits a width: which columns, how long, and in what groups."""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

from flax_layoutmap._show.table import Grid, Line, cut_path, total_width, widest
from flax_layoutmap._tree.fold import Fold

# Below these widths a column says too little to be worth its place. Rules are given
# more of it than shards, and less than it takes to repeat the beginnings of paths.
_RULE, _SHORT_RULE, _PATH = 26, 16, 16

_CELL = re.compile(r"((?:  )?)(.*?)( ×\d+)?")
_NUMBER = re.compile(r"float|uint|int|complex")


class Texts(NamedTuple):
    """Columns: what is said of each leaf, or of several that are alike.

    Attributes:
        folds: the path, and how many leaves it stands for.
        shapes: global shape, `(64,256)`.
        dtypes: name of the dtype, or `-`.
        specs: `P(-, model)`.
        rules: number and pattern of the rule, or why there is none.
        codes: the same in a few characters.
        shards: shape of one device's part, or `-`.
        bytes: the sum over the leaves, of one device.
        marks: `""` or `"warning"`.
    """

    folds: Sequence[Fold]
    shapes: Sequence[str]
    dtypes: Sequence[str]
    specs: Sequence[str]
    rules: Sequence[str]
    codes: Sequence[str]
    shards: Sequence[str]
    bytes: Sequence[str]
    marks: Sequence[str]


def path_cell(fold: Fold, start: int = 0) -> str:
    """The path from a position on, and how many leaves it stands for."""
    many = f" ×{len(fold.members)}" if len(fold.members) > 1 else ""
    return f"{fold.text[start:]}{many}"


def short_dtype(dtype: str) -> str:
    """`bfloat16` → `bf16`, as JAX writes it."""
    return _NUMBER.sub(lambda found: found.group()[0], dtype)


@functools.lru_cache(maxsize=4096)
def array(shape: str, dtype: str) -> str:
    """`f32[64,256]`, as JAX writes it; `-` for what is no array."""
    if dtype == "-":
        return "-"
    return f"{short_dtype(dtype)}[{shape.strip('()').removesuffix(',')}]"


def full(texts: Texts) -> Grid:
    """All columns, each as wide as it needs."""
    return _Table(texts).grid(_FULL[0])


def fitted(texts: Texts, width: int) -> Grid:
    """As much as fits: the first of these that does.

    Everything; long rules cut; shape and dtype as one; no shards; the beginnings of
    paths as headings, with the rules cut or as numbers. What is cut keeps its end.
    """
    table = _Table(texts)
    if not texts.folds or table.room(_FULL[0], width) >= 0:
        return table.grid(_FULL[0])
    for names in _FULL:
        if table.cut_rules(names, width, _RULE):
            return table.grid(names)
    heads, paths = headed(texts.folds, width)
    table.put("path", paths)
    if not table.cut_rules(_FULL[-1], width, _SHORT_RULE):
        return _shortest(table, width)
    return with_headings(table.grid(_FULL[-1]), heads)


def _shortest(table: "_Table", width: int) -> Grid:
    """Rules as numbers; where that is not enough, no shapes and dtypes either."""
    table.put("rule", table.texts.codes)
    room, names = 0, _FULL[-1]
    for names in _SHORTEST:
        room = table.room(names, width, "path")
        if room >= _PATH:
            break
    heads, paths = headed(table.texts.folds, max(room, _PATH))
    table.put("path", [cut_cell(path, max(room, _PATH)) for path in paths])
    return with_headings(table.grid(names), heads)


# The columns of a table, from the widest choice to the narrowest.
_FULL = (
    ("path", "shape", "dtype", "spec", "rule", "shard", "bytes/device"),
    ("path", "array", "spec", "rule", "shard", "per device"),
    ("path", "array", "spec", "rule", "per device"),
)
_SHORTEST = (_FULL[-1], ("path", "spec", "rule", "per device"))


class _Table:
    """The columns that a table may have, and how wide they are."""

    def __init__(self, texts: Texts) -> None:
        self.texts = texts
        self.columns: dict[str, Sequence[str]] = {}
        self.widths: dict[str, int] = {}
        self.put("path", list(map(path_cell, texts.folds)))
        self.put("shape", texts.shapes)
        self.put("dtype", texts.dtypes)
        self.put("array", list(map(array, texts.shapes, texts.dtypes)))
        self.put("spec", texts.specs)
        self.put("rule", texts.rules)
        self.put("shard", texts.shards)
        self.put("bytes/device", texts.bytes)
        self.put("per device", texts.bytes)

    def put(self, name: str, cells: Sequence[str]) -> None:
        self.columns[name] = cells
        self.widths[name] = widest((name, *cells))

    def room(self, names: Sequence[str], width: int, column: str = "") -> int:
        """What is left of a width for a column; below 0: too little for the others."""
        taken = [0 if name == column else self.widths[name] for name in names]
        return width - total_width(taken)

    def cut_rules(self, names: Sequence[str], width: int, least: int) -> bool:
        """Gives the rules the place that is left, if that is enough."""
        rules = self.texts.rules
        room = self.room(names, width, "rule")
        if room < min(least, max(map(len, rules))):
            return False
        self.put("rule", [cut_rule(rule, room) for rule in rules])
        return True

    def grid(self, names: tuple[str, ...]) -> Grid:
        cells = zip(*(self.columns[name] for name in names), strict=True)
        lines = tuple(map(Line, cells, self.texts.marks))
        right = tuple(name in ("bytes/device", "per device") for name in names)
        return Grid(names, right, lines)


def headed(folds: Sequence[Fold], width: int) -> tuple[list[str], list[str]]:
    """The beginning of each path as a heading, or `""`, and the cell for the rest.

    Neighbours that begin alike up to their last index share a heading; so do those
    whose paths are too long for the width.
    """
    ends = [fold.head for fold in folds]
    starts = [fold.text[:end] for fold, end in zip(folds, ends, strict=True)]
    kept = []
    for fold, start, before, after in zip(
        folds, starts, [None, *starts], [*starts[1:], None], strict=False
    ):
        head = len(start) if start in (before, after) else 0
        if not head and len(path_cell(fold)) > width:
            head = len(start)
        kept.append(_longer(fold, head, width))
    heads = [fold.text[:head] for fold, head in zip(folds, kept, strict=True)]
    _adopt(heads, folds)
    cells = []
    for at, fold in enumerate(folds):
        head, many = heads[at], len(fold.members)
        if not head:
            cells.append(path_cell(fold))
        elif many > 1 and len(head) >= ends[at]:
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
