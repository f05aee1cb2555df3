"""The report of a Resolution: a table, totals and remarks; JSON and Markdown."""

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from flax_layoutmap._core.errors import visible
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._rules.files import rules_to_json
from flax_layoutmap._rules.records import (
    Columns,
    Decision,
    Shape,
    because,
    leaf_bytes,
    leaf_json,
    section_of,
    show_shape,
    show_spec,
)
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._show.fold import Fold, relation
from flax_layoutmap._show.remarks import UNMATCHED, remarks
from flax_layoutmap._show.resolved_table import ResolvedTable, folds_of
from flax_layoutmap._show.table import (
    Grid,
    fitted,
    grid_of,
    human_bytes,
    human_share,
    markdown_table,
    path_cell,
)
from flax_layoutmap._show.terminal import coloured_grid, coloured_lines, wrapped
from flax_layoutmap._tree.paths import Role

if TYPE_CHECKING:
    from rich.text import Text

ROLES: dict[Role, str] = {
    "parameter": "parameters",
    "optimizer": "optimizer state",
    "other": "other",
}

# Reasons in a word, where the first word of the reason does not tell.
_WORDS = {"no rule": "none", "not an array": "-", "flax metadata": "metadata"}

_NUMBER = re.compile(r"float|uint|int|complex")


def report(
    table: ResolvedTable,
    format: Literal["text", "markdown"] = "text",
    *,
    folded: bool = True,
    width: int | None = None,
) -> str:
    """The whole report as `"text"` or `"markdown"`; see `Resolution.report`."""
    is_text = format == "text"
    grid, lines = _grid_and_lines(table, folded, width if is_text else None)
    if is_text:
        return "\n".join([grid.text(), "", *lines])
    return "\n".join([markdown_table(grid), "", *(f"    {line}" for line in lines)])


def coloured_report(
    table: ResolvedTable, width: int | None, *, folded: bool = True
) -> "Iterator[Text]":
    grid, lines = _grid_and_lines(table, folded, width)
    axes = () if table.mesh is None else table.mesh.axis_names
    yield from coloured_grid(grid, axes)
    yield from coloured_lines(["", *lines], axes)


def to_json(table: ResolvedTable) -> dict[str, Any]:
    """The table as plain JSON values, schema 1."""
    leaves = list(table)
    return {
        "schema": 1,
        "rules": rules_to_json(table.rules),
        "leaves": [leaf_json(leaf, table.mesh) for leaf in leaves],
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


def _other_names(table: ResolvedTable, fold: Fold) -> str:
    path, *others = table._flat.records[fold.members[0]].label().split(" = ")
    return "".join(f" = {fold.spell(relation(path, other))}" for other in others)


def _grid_and_lines(
    table: ResolvedTable, folded: bool, width: int | None
) -> tuple[Grid, list[str]]:
    leaves = table.columns()
    folds = folds_of(leaves, folded)
    if len(folds) < len(leaves.rows):
        firsts = [fold.members[0] for fold in folds]
        leaves = Columns._make([column[at] for at in firsts] for column in leaves)
    rows = list(map(_with_folded_owner, folds, leaves.paths, leaves.rows))
    marks = [
        "warning" if row.reason in UNMATCHED or row.fallback else "" for row in rows
    ]
    full = _full(table, leaves, folds, rows)
    grid, below = grid_of(full, marks), list[str]()
    if width is not None and grid.width() > width:
        narrow = {
            "path": full["path"],
            "array": list(map(array_text, leaves.shapes, full["dtype"])),
            "spec": full["spec"],
            "rule": list(map(_number, rows)),
            "per device": full["bytes/device"],
        }
        grid = fitted(narrow, marks, width, spare="array")
        below = _numbered_rules(rows, table.rules)
    most = max((len(fold.members) for fold in folds), default=1)
    if most > 1:
        below.append(
            f"×{most}: {most} leaves that are alike, with the sum of their bytes"
        )
    below += [*_totals(table), *remarks(table, folded=folded)]
    return grid, wrapped(below, width)


def _full(
    table: ResolvedTable,
    leaves: Columns,
    folds: Sequence[Fold],
    rows: Sequence[Decision],
) -> dict[str, list[str]]:
    names = {d: "-" if d is None else str(d) for d in set(leaves.dtypes)}
    shards = [row.shard_shape for row in rows]
    return {
        "path": [path_cell(fold) + _other_names(table, fold) for fold in folds],
        "shape": [
            "-" if dtype is None else show_shape(shape)
            for shape, dtype in zip(leaves.shapes, leaves.dtypes, strict=True)
        ],
        "dtype": [names[dtype] for dtype in leaves.dtypes],
        "spec": [placed(row, table.mesh) for row in rows],
        "rule": [visible(because(row, table.rules, short=True)) for row in rows],
        "shard": ["-" if shape is None else show_shape(shape) for shape in shards],
        "bytes/device": [
            human_bytes(len(fold.members) * leaf_bytes(shard or shape, dtype))
            for fold, shard, shape, dtype in zip(
                folds, shards, leaves.shapes, leaves.dtypes, strict=True
            )
        ],
    }


def _with_folded_owner(fold: Fold, path: str, row: Decision) -> Decision:
    """The decision of several leaves, with the indices of all in its owner."""
    if row.owner is None or len(fold.members) == 1:
        return row
    return dataclasses.replace(row, owner=fold.spell(relation(path, row.owner)))


@functools.lru_cache(maxsize=4096)
def array_text(shape: Shape, dtype: str) -> str:
    """`bf16[64,256]`, as JAX writes it; `-` for the dtype of what is not an array."""
    if dtype == "-":
        return "-"
    short = _NUMBER.sub(lambda match: match.group()[0], dtype)
    return f"{short}[{','.join(map(str, shape))}]"


def placed(row: Decision, mesh: DeviceMesh | None) -> str:
    """Spec and kind of memory, and the mesh where it is another one."""
    where = "" if row.mesh in (None, mesh) else f" on {row.mesh}"
    return show_spec(row.spec, row.memory_kind) + where


def _number(row: Decision) -> str:
    if row.rule is None:
        return _WORDS.get(row.reason, row.reason.split()[0])
    return f"{'opt ' * (row.reason == 'optimizer rule')}{row.rule + 1}"


def _numbered_rules(rows: Sequence[Decision], rules: RuleSet) -> list[str]:
    """A line for each rule that decided a row: `rule 2: up/kernel`."""
    lines = {}
    for row in rows:
        if row.rule is not None:
            kind = "optimizer " * (row.reason == "optimizer rule")
            pattern = section_of(row, rules)[row.rule].pattern
            lines[kind, row.rule] = f"{kind}rule {row.rule + 1}: {pattern}"
    return [line for _, line in sorted(lines.items())]


def held(on_device: int, on_host: int) -> str:
    """`4.0 KiB per device`, and the bytes per device in host memory."""
    more = f" and {human_bytes(on_host)} per device in host memory" if on_host else ""
    return f"{human_bytes(on_device)} per device{more}"


def _totals(table: ResolvedTable) -> Iterator[str]:
    sums = [(name, table.totals(role)) for role, name in ROLES.items()]
    sums = [(name, total) for name, total in sums if total.leaves]
    for name, total in sums:
        leaves = "1 leaf" if total.leaves == 1 else f"{total.leaves} leaves"
        in_memory = held(total.bytes_per_device, total.host_bytes_per_device)
        line = f"{name}: {leaves}, {human_bytes(total.total_bytes)}, {in_memory}"
        # With only one role, the last line has it; counters are never sharded.
        several = len(sums) > 1 and name != ROLES["other"]
        if several and total.total_bytes and table.replicated_share:
            share = human_share(total.replicated_bytes / total.total_bytes)
            line += f"; {share} replicated"
        yield line
    where = "no mesh" if table.mesh is None else f"mesh {table.mesh}"
    in_memory = held(table.bytes_per_device, table.host_bytes_per_device)
    share = human_share(table.replicated_share)
    size = human_bytes(table.total_bytes)
    yield f"{where}: {in_memory} of {size}; {share} of the bytes replicated"
