"""A resolved tree as text, Markdown or JSON, from plain records."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from flax_layoutmap._errors import LayoutError, closest
from flax_layoutmap._mesh import DeviceMesh
from flax_layoutmap._paths import Role
from flax_layoutmap._records import (
    Decision,
    ResolvedLeaf,
    Totals,
    because,
    leaf_bytes,
    leaf_json,
    show_shape,
    show_spec,
)
from flax_layoutmap._rules import Rule, RuleSet
from flax_layoutmap._serialise import rules_to_json
from flax_layoutmap._table import human_bytes, markdown_table, text_table

Format = Literal["text", "markdown", "json"]

# An unmatched leaf is worth a warning when it holds this share of the bytes.
LARGE_SHARE = 0.01

# Unused rules for which a path that looks alike is looked for; it takes a while.
_HINTS = 10

_HEADER = ("path", "shape", "dtype", "spec", "rule", "shard", "bytes/device")
_RIGHT = (False,) * 6 + (True,)
_ROLES: tuple[tuple[Role, str], ...] = (
    ("parameter", "parameters"),
    ("optimizer", "optimizer state"),
    ("other", "other"),
)


class Table(Protocol):
    """What of a Resolution is shown."""

    rules: RuleSet

    def rows(
        self, wanted: Callable[[Decision], bool] | None = None
    ) -> list[tuple[ResolvedLeaf, Decision]]: ...
    def totals(self, role: Role | None = None) -> Totals: ...
    @property
    def paths(self) -> tuple[str, ...]: ...
    @property
    def mesh(self) -> DeviceMesh | None: ...
    @property
    def replicated_share(self) -> float: ...
    @property
    def unused_rules(self) -> tuple[Rule, ...]: ...


def report(table: Table, format: Format) -> str:
    """The whole table, then totals and remarks; see `Resolution.report`."""
    if format == "json":
        return json.dumps(to_json(table), indent=1)
    if format not in ("text", "markdown"):
        raise LayoutError(
            f'format must be "text", "markdown" or "json", got {format!r}'
        )
    rows = [_table_row(leaf, row, table.rules) for leaf, row in table.rows()]
    summary = [*_totals(table), *remarks(table)]
    if format == "text":
        return "\n".join([text_table(_HEADER, rows, _RIGHT), "", *summary])
    items = "\n".join(f"- {line}" for line in summary)
    return f"{markdown_table(_HEADER, rows, _RIGHT)}\n\n{items}"


def remarks(
    table: Table, *, large_only: bool = False, besides: Sequence[Table] = ()
) -> list[str]:
    """Unused rules, unmatched leaves, fallbacks: one line each.

    Args:
        table: the Resolution.
        large_only: leave out fallbacks other than of annotations that name no axis of
            the mesh, and leaves with less than 1 % of the bytes.
        besides: others of the same rules: what they use is not unused.
    """
    # A warning has no hints: they take longer to find than all else.
    lines = _unused(table, besides, hints=not large_only)
    rows = table.rows(lambda row: row.reason in UNMATCHED or bool(row.fallback))
    total = (table.totals().total_bytes or 1) if rows else 1
    for leaf, row in rows:
        whole = leaf_bytes(leaf.shape, leaf.dtype)
        is_large = whole > LARGE_SHARE * total
        if leaf.reason not in UNMATCHED:
            if not large_only:
                lines.append(f"fallback: {leaf.path}: {leaf.fallback}")
            elif row.warns and is_large:
                lines.append(
                    f"annotation: {leaf.path} {show_shape(leaf.shape)}: "
                    f"{leaf.fallback}; map the names by Flax's logical_axis_rules, or "
                    "add a rule for it"
                )
            continue
        if large_only and not is_large:
            continue
        why = UNMATCHED[leaf.reason]
        why += f" ({leaf.fallback})" if leaf.fallback else ""
        lines.append(
            f"unmatched: {leaf.path} {show_shape(leaf.shape)} {why}, so every device "
            f"holds it in full ({whole / total:.1%} of the bytes)"
        )
    return lines


# Reasons that nobody asked for.
UNMATCHED = {
    "no rule": "is matched by no rule",
    "unknown optimizer state": "is optimizer state of an unknown kind",
}


def to_json(table: Table) -> dict[str, Any]:
    """The table as plain JSON values, schema 1."""
    sums = table.totals()
    leaves = [leaf for leaf, _ in table.rows()]
    return {
        "schema": 1,
        "rules": rules_to_json(table.rules),
        "leaves": [leaf_json(leaf) for leaf in leaves],
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


def _table_row(leaf: ResolvedLeaf, row: Decision, rules: RuleSet) -> list[str]:
    return [
        leaf.path,
        show_shape(leaf.shape),
        "-" if leaf.dtype is None else str(leaf.dtype),
        show_spec(row.spec),
        because(row, rules, short=True),
        "-" if leaf.shard_shape is None else show_shape(leaf.shard_shape),
        human_bytes(leaf.bytes_per_device),
    ]


def _totals(table: Table) -> list[str]:
    lines = []
    for role, name in _ROLES:
        sums = table.totals(role)
        if sums.leaves:
            leaves = "1 leaf" if sums.leaves == 1 else f"{sums.leaves} leaves"
            lines.append(
                f"{name}: {leaves}, {human_bytes(sums.total_bytes)}, "
                f"{human_bytes(sums.bytes_per_device)} per device"
            )
    sums = table.totals()
    where = "no mesh" if table.mesh is None else f"mesh {table.mesh}"
    lines.append(
        f"{where}: {human_bytes(sums.bytes_per_device)} per device of "
        f"{human_bytes(sums.total_bytes)}; {table.replicated_share:.1%} of the bytes "
        "replicated"
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
