"""The report of a Resolution: a table fitted to a width, totals, remarks; JSON."""

import dataclasses
import functools
import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from flax_layoutmap._core.errors import LayoutError, visible
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._rules.records import (
    Columns,
    Decision,
    ResolvedLeaf,
    Shape,
    because,
    leaf_bytes,
    leaf_json,
    show_shape,
    show_spec,
)
from flax_layoutmap._rules.serialise import mesh_to_json, rules_to_json
from flax_layoutmap._show.remarks import UNMATCHED, remarks
from flax_layoutmap._show.resolved_table import ResolvedTable, folds_of
from flax_layoutmap._show.table import (
    Cells,
    Grid,
    as_markdown,
    cut_path,
    cut_under_headings,
    headed,
    human_bytes,
    human_share,
    path_cell,
    with_headings,
)
from flax_layoutmap._show.terminal import coloured_grid, coloured_lines, wrapped
from flax_layoutmap._tree.paths import Fold, Role, relation

if TYPE_CHECKING:
    from rich.text import Text

Format = Literal["text", "markdown", "json"]

ROLES: dict[Role, str] = {
    "parameter": "parameters",
    "optimizer": "optimizer state",
    "other": "other",
}

# Reasons in a few characters.
_CODES = {
    "explicit layout": "explicit",
    "flax metadata": "metadata",
    "follows kernel": "kernel's",
    "follows parameter": "follows",
    "no rule": "none",
    "not an array": "no array",
    "own layout": "own",
    "random state": "random",
    "unknown optimizer state": "unknown",
}

# Least widths of columns. Rules get more room than shards, and less than repeating the
# beginnings of paths takes.
_RULE, _SHORT_RULE, _PATH = 26, 16, 16

# The columns of a table, from the widest choice to the narrowest.
_FULL = (
    ("path", "shape", "dtype", "spec", "rule", "shard", "bytes/device"),
    ("path", "array", "spec", "rule", "shard", "per device"),
    ("path", "array", "spec", "rule", "per device"),
)
_SHORTEST = ("path", "spec", "rule", "per device")

# A cell of the column "rule" with the number of one.
_NUMBERED = re.compile(r"(optimizer |)(\d+) (.*)", re.DOTALL)
_NUMBER = re.compile(r"float|uint|int|complex")


def report(
    table: ResolvedTable,
    format: Format,
    *,
    folded: bool = True,
    width: int | None = None,
) -> str:
    """The whole table, then totals and remarks; see `Resolution.report`."""
    if format == "json":
        return json.dumps(to_json(table), indent=1)
    if format == "text":
        grid, lines = _parts(table, folded, width)
        return "\n".join([grid.text(), "", *lines])
    if format == "markdown":
        return as_markdown(*_parts(table, folded, None))
    raise LayoutError(f'format must be "text", "markdown" or "json", got {format!r}')


def coloured(
    table: ResolvedTable, width: int, *, folded: bool = True
) -> "Iterator[Text]":
    """The lines of the report for rich; without colours, those of the text."""
    grid, lines = _parts(table, folded, width)
    axes = () if table.mesh is None else table.mesh.axis_names
    yield from coloured_grid(grid, axes)
    yield from coloured_lines(["", *lines], axes)


def to_json(table: ResolvedTable) -> dict[str, Any]:
    """Return the table as plain JSON values, schema 1."""
    leaves = list(table)
    return {
        "schema": 1,
        "rules": rules_to_json(table.rules),
        "leaves": [_leaf_json(leaf, table.mesh) for leaf in leaves],
        "totals": {role: dataclasses.asdict(table.totals(role)) for role in ROLES},
        "total_bytes": table.total_bytes,
        "bytes_per_device": table.bytes_per_device,
        "host_bytes_per_device": table.host_bytes_per_device,
        "replicated_share": table.replicated_share,
        "unused_rules": [rule.pattern for rule in table.unused_rules],
        "unmatched": [leaf.path for leaf in leaves if leaf.reason in UNMATCHED],
        "fallbacks": {
            leaf.path: leaf.fallback
            for leaf in leaves
            if leaf.fallback and leaf.reason not in UNMATCHED
        },
    }


def _leaf_json(leaf: ResolvedLeaf, mesh: DeviceMesh | None) -> dict[str, Any]:
    own = leaf.layout.device_mesh
    return {
        **leaf_json(leaf),
        "note": leaf.note,
        "memory_kind": leaf.layout.memory_kind,
        "mesh": None if own in (None, mesh) else mesh_to_json(own),
    }


def _parts(
    table: ResolvedTable, folded: bool, width: int | None
) -> tuple[Grid, list[str]]:
    """The table, and the lines below it."""
    leaves = table.columns()
    folds = folds_of(leaves, folded)
    cells = _cells(folds, leaves, table)
    rules = cells.columns["rule"]
    grid = cells.grid(_FULL[0]) if width is None else _fitted(cells, folds, width)
    notes = _notes(rules, grid, folds)
    lines = [*notes, *_totals(table), *remarks(table, folded=folded)]
    return grid, wrapped(lines, width)


def _cells(folds: Sequence[Fold], leaves: Columns, table: ResolvedTable) -> Cells:
    """The texts of each row, by column."""
    if len(folds) < len(leaves.rows):
        firsts = [found.members[0] for found in folds]
        leaves = Columns._make([column[at] for at in firsts] for column in leaves)
    rows = list(map(_with_folded_owner, folds, leaves.paths, leaves.rows))
    names = {one: None if one is None else str(one) for one in set(leaves.dtypes)}
    dtypes = [names[dtype] for dtype in leaves.dtypes]
    shards = [row.shard_shape for row in rows]
    sizes = [
        human_bytes(len(fold.members) * leaf_bytes(shard or shape, dtype))
        for fold, shard, shape, dtype in zip(
            folds, shards, leaves.shapes, leaves.dtypes, strict=True
        )
    ]
    marks = [
        "warning" if row.reason in UNMATCHED or row.fallback else "" for row in rows
    ]
    cells = Cells(marks, ("bytes/device", "per device"))
    cells.put("path", list(map(path_cell, folds)))
    shapes = [
        "-" if dtype is None else show_shape(shape)
        for shape, dtype in zip(leaves.shapes, dtypes, strict=True)
    ]
    cells.put("shape", shapes)
    cells.put("dtype", [name or "-" for name in dtypes])
    cells.put("array", list(map(array_text, leaves.shapes, dtypes)))
    cells.put("spec", [_spec(row, table.mesh) for row in rows])
    cells.put("rule", [visible(because(row, table.rules, short=True)) for row in rows])
    cells.put("code", list(map(_code, rows)))
    cells.put("shard", ["-" if own is None else show_shape(own) for own in shards])
    cells.put("bytes/device", sizes)
    cells.put("per device", sizes)
    return cells


def _fitted(cells: Cells, folds: Sequence[Fold], width: int) -> Grid:
    """As much as fits: the first of these that does.

    Everything; long rules cut; shape and dtype as one; no shards; the beginnings of
    paths as headings, with the rules cut or as numbers. What is cut keeps its end.
    """
    rules = cells.columns["rule"]

    def cut_rules(names: Sequence[str], least: int) -> bool:
        """Cut the rules to the room that is left, if that is enough."""
        room = cells.room(names, width, "rule")
        if room < min(least, max(map(len, rules))):
            return False
        cells.put("rule", [cut_rule(rule, room) for rule in rules])
        return True

    if not folds or cells.room(_FULL[0], width) >= 0:
        return cells.grid(_FULL[0])
    for names in _FULL:
        if cut_rules(names, _RULE):
            return cells.grid(names)
    heads, paths = headed(folds, width)
    cells.put("path", paths)
    if cut_rules(_FULL[-1], _SHORT_RULE):
        return with_headings(cells.grid(_FULL[-1]), heads)
    # Rules as numbers; where that is not enough, no shapes and dtypes either.
    cells.put("rule", cells.columns["code"])
    names, room = _FULL[-1], cells.room(_FULL[-1], width, "path")
    if room < _PATH:
        names, room = _SHORTEST, cells.room(_SHORTEST, width, "path")
    return cut_under_headings(cells, names, folds, max(room, _PATH))


def _with_folded_owner(fold: Fold, path: str, row: Decision) -> Decision:
    """The decision of several leaves, with the indices of all in its owner."""
    if row.owner is None or len(fold.members) == 1:
        return row
    return dataclasses.replace(row, owner=fold.spell(relation(path, row.owner)))


@functools.lru_cache(maxsize=4096)
def array_text(shape: Shape, dtype: str | None) -> str:
    """`bf16[64,256]`, as JAX writes it; `-` for what is no array."""
    if dtype is None:
        return "-"
    short = _NUMBER.sub(lambda found: found.group()[0], dtype)
    return f"{short}[{','.join(map(str, shape))}]"


def _spec(row: Decision, mesh: DeviceMesh | None) -> str:
    spec = show_spec(row.spec)
    spec += f" {row.memory_kind}" if row.memory_kind else ""
    return spec + (f" on {row.mesh}" if row.mesh not in (None, mesh) else "")


def _code(row: Decision) -> str:
    """Why, in a few characters."""
    if row.rule is None:
        return _CODES.get(row.reason, row.reason)
    return f"{'opt ' * (row.reason == 'optimizer rule')}{row.rule + 1}"


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


def _notes(rules: Sequence[str], grid: Grid, folds: Sequence[Fold]) -> Iterator[str]:
    """Notes on the table: the rules that were cut, and `×80`."""
    at = grid.names.index("rule")
    cells = [line.cells[at] for line in grid.lines if line.mark != "heading"]
    cut = {rule for rule, cell in zip(rules, cells, strict=True) if cell != rule}
    found = [match for rule in cut if (match := _NUMBERED.fullmatch(rule))]
    for match in sorted(found, key=lambda match: (match[1], int(match[2]))):
        yield f"{match[1]}rule {match[2]}: {match[3]}"
    many = max((len(fold.members) for fold in folds), default=1)
    if many > 1:
        yield f"×{many}: {many} leaves that are alike, with the sum of their bytes"


def held(on_device: int, on_host: int) -> str:
    """`4.0 KiB per device`, and what is on its host, in bytes.

    >>> held(4096, 8192)
    '4.0 KiB per device and 8.0 KiB per device in host memory'
    """
    text = f"{human_bytes(on_device)} per device"
    if on_host:
        text += f" and {human_bytes(on_host)} per device in host memory"
    return text


def _totals(table: ResolvedTable) -> Iterator[str]:
    roles = [(role, name, table.totals(role)) for role, name in ROLES.items()]
    roles = [found for found in roles if found[2].leaves]
    for role, name, sums in roles:
        line = (
            f"{name}: {sums.leaves} {'leaf' if sums.leaves == 1 else 'leaves'}, "
            f"{human_bytes(sums.total_bytes)}, "
            f"{held(sums.bytes_per_device, sums.host_bytes_per_device)}"
        )
        # With only one role, the last line has it; counters are never sharded.
        several = len(roles) > 1 and role != "other"
        if several and sums.total_bytes and table.replicated_share:
            share = human_share(sums.replicated_bytes / sums.total_bytes)
            line += f"; {share} replicated"
        yield line
    where = "no mesh" if table.mesh is None else f"mesh {table.mesh}"
    yield (
        f"{where}: {held(table.bytes_per_device, table.host_bytes_per_device)} of "
        f"{human_bytes(table.total_bytes)}; {human_share(table.replicated_share)} of "
        "the bytes replicated"
    )
