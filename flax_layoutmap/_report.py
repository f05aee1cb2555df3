"""A resolved tree as text, Markdown or JSON, from plain records."""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from flax_layoutmap._errors import LayoutError, closest
from flax_layoutmap._fold import Fold, apart, fold, relation
from flax_layoutmap._leaf_table import Row, fitted, full, path_cell, printable
from flax_layoutmap._mesh import DeviceMesh
from flax_layoutmap._paths import Role
from flax_layoutmap._records import (
    Columns,
    Decision,
    ResolvedLeaf,
    Shape,
    Totals,
    because,
    leaf_bytes,
    leaf_json,
    show_shape,
    show_spec,
)
from flax_layoutmap._rules import Rule, RuleSet
from flax_layoutmap._serialise import mesh_to_json, rules_to_json
from flax_layoutmap._table import Grid, as_markdown, human_bytes, human_share
from flax_layoutmap._terminal import coloured_grid, coloured_lines, wrapped

if TYPE_CHECKING:
    from rich.text import Text

Format = Literal["text", "markdown", "json"]

# Unmatched leaves that are alike are worth a warning when they hold this share of the
# bytes, or that share of what each device holds: the first is small on many devices.
LARGE_SHARE = 0.01
_LARGE_HELD = 0.1

# Unused rules for which a path that looks alike is looked for; it takes a while.
_HINTS = 10

# So many lines that say the same are made one.
_MANY = 4

_ROLES: tuple[tuple[Role, str], ...] = (
    ("parameter", "parameters"),
    ("optimizer", "optimizer state"),
    ("other", "other"),
)

# Reasons that nobody asked for.
UNMATCHED = {
    "no rule": "is matched by no rule",
    "unknown optimizer state": "is optimizer state of an unknown kind",
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

# A cell of the column "rule" with the number of one.
_NUMBERED = re.compile(r"(optimizer |)(\d+) (.*)", re.DOTALL)


class Table(Protocol):
    """What of a Resolution is shown."""

    rules: RuleSet

    def __iter__(self) -> Iterator[ResolvedLeaf]: ...
    def columns(self, wanted: Callable[[Decision], bool] | None = None) -> Columns: ...
    def totals(self, role: Role | None = None) -> Totals: ...
    @property
    def paths(self) -> tuple[str, ...]: ...
    @property
    def mesh(self) -> DeviceMesh | None: ...
    @property
    def replicated_share(self) -> float: ...
    @property
    def unused_rules(self) -> tuple[Rule, ...]: ...


def report(
    table: Table, format: Format, *, folded: bool = True, width: int | None = None
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


def coloured(table: Table, width: int, *, folded: bool = True) -> "Iterator[Text]":
    """The lines of the report for rich; without colours, those of the text."""
    grid, lines = _parts(table, folded, width)
    axes = () if table.mesh is None else table.mesh.axis_names
    yield from coloured_grid(grid, axes)
    yield from coloured_lines(["", *lines], axes)


def remarks(
    table: Table,
    *,
    large_only: bool = False,
    besides: Sequence[Table] = (),
    folded: bool = False,
) -> list[str]:
    """Unused rules, unmatched leaves, fallbacks: one line each.

    Args:
        table: the Resolution.
        large_only: leave out fallbacks other than of annotations that name no axis of
            the mesh, and leaves that are few, of their kind: with less than 1 % of the
            bytes and 10 % of what a device holds. Those that are alike share a line.
        besides: others of the same rules: what they use is not unused.
        folded: whether leaves that are alike share a line.
    """
    # A warning has no hints: they take longer to find than all else.
    lines = _unused(table, besides, hints=not large_only)
    leaves = table.columns(lambda row: row.reason in UNMATCHED or bool(row.fallback))
    total = (table.totals().total_bytes or 1) if leaves.rows else 1
    held = (table.totals().bytes_per_device or 1) if leaves.rows else 1
    found: list[_Remark] = []
    for some in _folds(leaves, folded or large_only):
        at = some.members[0]
        shape, row = leaves.shapes[at], leaves.rows[at]
        whole = len(some.members) * leaf_bytes(shape, leaves.dtypes[at])
        if not large_only:
            found.append(_remark(some, shape, row, whole, total, held))
        elif is_large(whole, total, held):
            if row.reason in UNMATCHED:
                found.append(_remark(some, shape, row, whole, total, held))
            elif row.warns:
                lines.append(
                    f"annotation: {path_cell(some)} {show_shape(shape)}: "
                    f"{row.fallback}; map the names by Flax's logical_axis_rules, or "
                    "add a rule for it"
                )
    return lines + (_together(found, total) if folded else [one.line for one in found])


@dataclasses.dataclass(frozen=True, slots=True)
class _Remark:
    """A line about leaves that are alike, and what it shares with others."""

    line: str
    leaf: str  # the leaves alone
    about: str  # what is said of them
    leaves: int
    bytes: int


def is_large(whole: int, total: int, held: int) -> bool:
    """Whether so many bytes are worth a warning where no rule places them."""
    return whole > LARGE_SHARE * total or whole > _LARGE_HELD * held


def _remark(
    some: Fold, shape: Shape, row: Decision, whole: int, total: int, held: int
) -> _Remark:
    name, count = path_cell(some), len(some.members)
    reason, fallback = row.reason, row.fallback
    if reason not in UNMATCHED:
        line = f"fallback: {name}: {fallback}"
        return _Remark(line, name, f"fallback: {fallback}", count, whole)
    because = f" ({fallback})" if fallback else ""
    them = "it" if count == 1 else "each"
    share = f"{human_share(whole / total)} of the bytes"
    if whole <= LARGE_SHARE * total and is_large(whole, total, held):
        share += f", {human_share(whole / held)} of what each device holds"
    name += f" {show_shape(shape)}"
    return _Remark(
        f"unmatched: {name} {UNMATCHED[reason]}{because}, so every device holds "
        f"{them} in full ({share})",
        f"{name}, {share.removesuffix(' of the bytes')}",
        f"unmatched: every device holds in full what {UNMATCHED[reason]}{because}",
        count,
        whole,
    )


def _together(found: Sequence[_Remark], total: int) -> list[str]:
    """Lines that say the same of many leaves, as one and a list."""
    same: dict[str, list[_Remark]] = {}
    for one in found:
        same.setdefault(one.about, []).append(one)
    lines: list[str] = []
    for about, group in same.items():
        if len(group) < _MANY:
            lines += [one.line for one in group]
            continue
        leaves = sum(one.leaves for one in group)
        share = human_share(sum(one.bytes for one in group) / total)
        lines.append(f"{about}: {leaves} leaves, {share} of the bytes")
        lines += [f"  {one.leaf}" for one in group]
    return lines


def to_json(table: Table) -> dict[str, Any]:
    """The table as plain JSON values, schema 1."""
    sums = table.totals()
    leaves = list(table)
    return {
        "schema": 1,
        "rules": rules_to_json(table.rules),
        "leaves": [_leaf_json(leaf, table.mesh) for leaf in leaves],
        "totals": {role: dataclasses.asdict(table.totals(role)) for role, _ in _ROLES},
        "total_bytes": sums.total_bytes,
        "bytes_per_device": sums.bytes_per_device,
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


def _parts(table: Table, folded: bool, width: int | None) -> tuple[Grid, list[str]]:
    """The table, and the lines below it."""
    leaves = table.columns()
    folds = _folds(leaves, folded)
    rows = [_row(found, leaves, table) for found in folds]
    grid = full(rows) if width is None else fitted(rows, width)
    lines = [*_notes(rows, grid), *_totals(table), *remarks(table, folded=folded)]
    return grid, wrapped(lines, width)


def _folds(leaves: Columns, folded: bool) -> list[Fold]:
    """Leaves as rows: those that are alike in all but the indices in their paths."""
    if not folded:
        return apart(leaves.paths)
    numbers: dict[Hashable, int] = {}  # a number for each kind of leaf
    known: dict[int, int] = {}  # many leaves share one decision
    keys: list[int] = []
    for path, shape, dtype, row, role in zip(*leaves, strict=True):
        same = known.get(id(row))
        if same is None:
            why = (row.reason, row.rule, row.fallback, row.note)
            said = (row.spec, row.mesh, row.memory_kind, row.shard_shape, why)
            same = known[id(row)] = numbers.setdefault(said, len(numbers))
        owner = None if row.owner is None else _owner_key(path, row.owner)
        kind = (shape, dtype, role, owner, same)
        keys.append(numbers.setdefault(kind, len(numbers)))
    return fold(leaves.paths, keys)


def _owner_key(path: str, owner: str) -> Hashable:
    """Equal for leaves whose owners have the same relation to their paths."""
    # `mu/layers/7/w` ends in its owner: what is in front of it says enough.
    if path.endswith(f"/{owner}"):
        return path.count("/", 0, len(path) - len(owner))
    return relation(path, owner)


def _row(found: Fold, leaves: Columns, table: Table) -> Row:
    at, many = found.members[0], len(found.members)
    shape, dtype, row = leaves.shapes[at], leaves.dtypes[at], leaves.rows[at]
    if row.owner is not None and many > 1:
        owner = found.spell(relation(leaves.paths[at], row.owner))
        row = dataclasses.replace(row, owner=owner)
    return Row(
        fold=found,
        shape="-" if dtype is None else show_shape(shape),
        dtype="-" if dtype is None else _name(dtype),
        spec=_spec(row, table.mesh),
        rule=printable(because(row, table.rules, short=True)),
        code=_code(row),
        shard="-" if row.shard_shape is None else show_shape(row.shard_shape),
        bytes_per_device=many * leaf_bytes(row.shard_shape or shape, dtype),
        mark="warning" if row.reason in UNMATCHED or row.fallback else "",
    )


_name = functools.lru_cache(maxsize=256)(str)


def _spec(row: Decision, mesh: DeviceMesh | None) -> str:
    spec = show_spec(row.spec)
    spec += f" {row.memory_kind}" if row.memory_kind else ""
    return spec + (f" on {row.mesh}" if row.mesh not in (None, mesh) else "")


def _code(row: Decision) -> str:
    """Why, in a few characters."""
    if row.rule is None:
        return _CODES.get(row.reason, row.reason)
    return (
        f"opt {row.rule + 1}" if row.reason == "optimizer rule" else f"{row.rule + 1}"
    )


def _notes(rows: Sequence[Row], grid: Grid) -> Iterator[str]:
    """What the table does not say by itself."""
    cells = [line.cells for line in grid.lines if line.mark != "heading"]
    at = grid.names.index("rule")
    cut = {row.rule for row, c in zip(rows, cells, strict=True) if c[at] != row.rule}
    found = [match for rule in cut if (match := _NUMBERED.fullmatch(rule))]
    for match in sorted(found, key=lambda match: (match[1], int(match[2]))):
        yield f"{match[1]}rule {match[2]}: {match[3]}"
    many = max((len(row.fold.members) for row in rows), default=1)
    if many > 1:
        yield f"×{many}: {many} leaves that are alike, with the sum of their bytes"


def _totals(table: Table) -> list[str]:
    roles = [(role, name, table.totals(role)) for role, name in _ROLES]
    roles = [found for found in roles if found[2].leaves]
    lines = []
    for role, name, sums in roles:
        leaves = "1 leaf" if sums.leaves == 1 else f"{sums.leaves} leaves"
        line = (
            f"{name}: {leaves}, {human_bytes(sums.total_bytes)}, "
            f"{human_bytes(sums.bytes_per_device)} per device"
        )
        # Of one role alone, the last line says it; counters are never sharded.
        several = len(roles) > 1 and role != "other"
        if several and sums.total_bytes and table.replicated_share:
            share = human_share(sums.replicated_bytes / sums.total_bytes)
            line += f"; {share} replicated"
        lines.append(line)
    sums = table.totals()
    where = "no mesh" if table.mesh is None else f"mesh {table.mesh}"
    share = human_share(table.replicated_share)
    lines.append(
        f"{where}: {human_bytes(sums.bytes_per_device)} per device of "
        f"{human_bytes(sums.total_bytes)}; {share} of the bytes replicated"
    )
    return lines


def _unused(table: Table, besides: Sequence[Table], *, hints: bool) -> list[str]:
    numbers = {id(rule): at + 1 for at, rule in enumerate(table.rules.rules)}
    lines = []
    elsewhere = [set(map(id, other.unused_rules)) for other in besides]
    for rule in table.unused_rules:
        if not all(id(rule) in unused for unused in elsewhere):
            continue
        number = numbers.get(id(rule))
        name = f"rule {number}" if number else "optimizer rule"
        hint = ""
        if hints and len(lines) < _HINTS:
            hint = _closest_path(rule.pattern, table.paths)
        lines.append(f"unused: {name} {rule.pattern!r} matches no leaf{hint}")
    return lines


def _closest_path(pattern: str, paths: Sequence[str]) -> str:
    """A hint, from distinct endings of the paths as long as the pattern."""
    parts = pattern.count("/") + 1
    endings = {"/".join(path.split("/")[-parts:]) for path in paths}
    near = closest(pattern, sorted(endings)[:2000])
    return f"; the closest path ends in {near[0]!r}" if near else ""
