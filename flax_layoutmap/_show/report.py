"""The report of a Resolution (table, totals, remarks) and the text of `explain`."""

import dataclasses
import difflib
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from flax_layoutmap._core.errors import visible
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._rules.files import rules_to_json
from flax_layoutmap._rules.records import (
    Decision,
    Remark,
    ResolvedLeaf,
    Shape,
    Totals,
    because,
    closest_rule,
    leaf_bytes,
    leaf_json,
    section_of,
    show_shape,
    show_spec,
)
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._show.resolved_table import ResolvedTable
from flax_layoutmap._show.table import (
    Grid,
    fitted,
    human_bytes,
    human_share,
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

# Similar unmatched leaves are worth a warning if they are this share of all bytes, or
# the second share of the bytes per device, which matters on many devices.
LARGE_SHARE = 0.01
_LARGE_HELD = 0.1

# Searching for similar paths is slow: limits on unused rules and on paths.
_HINTS, _MOST_PATHS = 10, 2000

# Reasons of leaves that neither a rule nor metadata places.
UNMATCHED = {
    "no rule": "is matched by no rule",
    "unknown optimizer state": "is optimizer state of an unknown kind",
}

# Short reasons, where the first word of the reason is unclear.
_WORDS = {"no rule": "none", "not an array": "-", "flax metadata": "metadata"}

_NUMBER = re.compile(r"float|uint|int|complex")


# ------------------------------------------------------------------------ the report


def report_lines(table: ResolvedTable, width: int | None = None) -> "Iterator[Text]":
    """The coloured lines of `Resolution.report`."""
    grid, below = _grid_and_lines(table, width)
    axes = () if table.mesh is None else table.mesh.axis_names
    yield from coloured_grid(grid, axes)
    yield from coloured_lines(["", *wrapped(below, width)], axes)


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


def _grid_and_lines(table: ResolvedTable, width: int | None) -> tuple[Grid, list[str]]:
    folds = table.folds()
    firsts = [fold.members[0] for fold in folds]
    rows = [table._rows[at] for at in firsts]
    arrays = [(table.shapes[at], table.dtypes[at]) for at in firsts]
    columns = {
        "path": [fold.cell for fold in folds],
        "array": [array_text(shape, str(dtype or "-")) for shape, dtype in arrays],
        "spec": [placed(row, table.mesh) for row in rows],
        "rule": list(map(_rule, rows)),
        "per device": [
            human_bytes(len(fold.members) * leaf_bytes(row.shard_shape or shape, dtype))
            for fold, row, (shape, dtype) in zip(folds, rows, arrays, strict=True)
        ],
    }
    marks = ["warning" if _is_unplaced(row) else "" for row in rows]
    below = _numbered_rules(rows, table.rules)
    most = max((len(fold.members) for fold in folds), default=1)
    if most > 1:
        below.append(
            f"×{most}: {most} leaves that are alike, with the sum of their bytes"
        )
    below += [*_totals(table), *remarks(table)]
    return fitted(columns, marks, width), below


@functools.lru_cache(maxsize=4096)
def array_text(shape: Shape, dtype: str) -> str:
    """`bf16[64,256]`, as JAX writes it; `-` if the leaf is not an array (dtype `-`)."""
    if dtype == "-":
        return "-"
    short = _NUMBER.sub(lambda match: match.group()[0], dtype)
    return f"{short}[{','.join(map(str, shape))}]"


def placed(row: Decision, mesh: DeviceMesh | None) -> str:
    """Spec and memory kind, and the mesh if it is not `mesh`."""
    where = "" if row.mesh in (None, mesh) else f" on {row.mesh}"
    return show_spec(row.spec, row.memory_kind) + where


def _rule(row: Decision) -> str:
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
        # With a single role, the last line shows it; counters are never sharded.
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


# -------------------------------------------------------------------------- one leaf


def explain(leaf: ResolvedLeaf, row: Decision, rules: RuleSet) -> str:
    """Explain in a few lines why a leaf got its layout."""
    note = f": {row.note}" if row.note else ""
    lines = [
        f"{' = '.join((leaf.path, *leaf.others))} {show_shape(leaf.shape)} "
        f"{leaf.dtype}: {leaf.layout}",
        f"  because: {because(row, rules)}{note}",
    ]
    section = section_of(row, rules)
    for other in row.matched:
        rule = section[other]
        text = f"rule {other + 1} {rule.pattern!r} → {rule.layout}"
        if row.rule is None:
            lines.append(f"  {text} matches its path, but does not apply")
        elif other != row.rule:
            same = rule.layout == section[row.rule].layout
            effect = "which agrees" if same else "overridden"
            lines.append(f"  also matched by {text}, {effect}")
    if row.fallback:
        lines.append(f"  fallback: {row.fallback}")
    if row.reason == "no rule":
        lines.append(f"  {_near_miss(leaf.path, rules)}")
    if row.shard_shape is not None:
        size, shard = human_bytes(leaf.bytes_per_device), show_shape(row.shard_shape)
        where = f" in {row.memory_kind}" if row.memory_kind else ""
        lines.append(f"  each device holds {shard}, {size}{where}")
    return "\n".join(map(visible, lines))


def _near_miss(path: str, rules: RuleSet) -> str:
    if not rules.rules:
        return "there are no rules"
    near = closest_rule(path, rules.rules)
    text = f"{path!r} is matched by no rule"
    if near is None:
        return f"{text}, and none comes close"
    return f"{text}; rule {near[0]} {near[1].pattern!r} is closest"


# --------------------------------------- unused rules, unmatched leaves, fallbacks


def remarks(table: ResolvedTable) -> list[str]:
    """Unused rules, unmatched leaves and fallbacks; similar leaves share a line."""
    return [text for text, _ in (*_unused(table), *_unplaced(table))]


def warnings(
    table: ResolvedTable, besides: Sequence[ResolvedTable] = ()
) -> list[Remark]:
    """The remarks that are worth a warning; similar leaves share one.

    Left out are leaves with less than 1 % of all bytes and 10 % of the bytes per
    device, and fallbacks, except of annotations that do not name an axis of the mesh.
    Rules that the Resolutions `besides`, of the same rules, use are not unused.
    """
    every = (*_unused(table, besides), *_unplaced(table))
    return [warning for _, warning in every if warning is not None]


def is_large(size: int, total: int, held: int) -> bool:
    """Whether unmatched leaves of `size` bytes are worth a warning."""
    return size > LARGE_SHARE * (total or 1) or size > _LARGE_HELD * (held or 1)


def _is_unplaced(row: Decision) -> bool:
    return row.reason in UNMATCHED or bool(row.fallback)


def _unplaced(table: ResolvedTable) -> Iterator[tuple[str, Remark | None]]:
    """Unmatched leaves and fallbacks, each with its warning if it is worth one."""
    sums = table.totals()
    for fold in table.folds(_is_unplaced):
        at, count = fold.members[0], len(fold.members)
        row, name = table._rows[at], f"{fold.cell} {show_shape(table.shapes[at])}"
        size = count * leaf_bytes(table.shapes[at], table.dtypes[at])
        large = is_large(size, sums.total_bytes, sums.bytes_per_device)
        about, text, warning = row.reason, f"fallback: {fold.cell}: {row.fallback}", ""
        if row.reason in UNMATCHED:
            why = UNMATCHED[row.reason] + (f" ({row.fallback})" if row.fallback else "")
            text = (
                f"unmatched: {name} {why}, so every device holds "
                f"{'it' if count == 1 else 'each'} in full ({_shares(size, sums)})"
            )
            warning = text if large else ""
        elif row.warns and (large or row.reason == "explicit layout"):
            is_explicit = row.reason == "explicit layout"
            about = f"{row.reason if is_explicit else 'annotation'}: {row.fallback}"
            warning = about.replace(": ", f": {name}: ", 1)
            if not is_explicit:
                warning += (
                    "; map the names by Flax's logical_axis_rules, or add a rule for it"
                )
        keys = (f"{about}: {table._flat.paths[member]}" for member in fold.members)
        yield text, Remark(warning, frozenset(keys)) if warning else None


def _shares(size: int, sums: Totals) -> str:
    """The share of all bytes, and of the bytes per device if only that is large."""
    total, held = sums.total_bytes or 1, sums.bytes_per_device or 1
    text = f"{human_share(size / total)} of the bytes"
    if size <= LARGE_SHARE * total and size > _LARGE_HELD * held:
        text += f", {human_share(size / held)} of what each device holds"
    return text


def _unused(
    table: ResolvedTable, besides: Sequence[ResolvedTable] = ()
) -> Iterator[tuple[str, Remark]]:
    numbers = {id(rule): at + 1 for at, rule in enumerate(table.rules.rules)}
    others = [set(map(id, other.unused_rules)) for other in besides]
    rules = [r for r in table.unused_rules if all(id(r) in other for other in others)]
    for at, rule in enumerate(rules):
        number = numbers.get(id(rule))
        name = f"rule {number}" if number else "optimizer rule"
        text = about = f"unused: {name} {rule.pattern!r} matches no leaf"
        if at < _HINTS and (near := nearest(rule.pattern, table.parameter_paths)):
            text += near.hint
        yield text, Remark(text, frozenset([about]))


class Near(NamedTuple):
    """A path that a rule without a match may have been meant for."""

    ending: str  # as many parts of the path as the pattern has
    likeness: float  # to the pattern, 0 to 1
    is_free: bool  # whether no rule matches it, as after renaming

    @property
    def hint(self) -> str:
        """The end of a message."""
        return f"; the closest path ends in {self.ending!r}"


def nearest(pattern: str, paths: Iterable[tuple[str, bool]]) -> Near | None:
    """The path most similar to a pattern, preferably without a matching rule."""
    parts = pattern.count("/") + 1
    endings: dict[str, bool] = {}
    for path, is_free in itertools.islice(paths, _MOST_PATHS):
        ending = "/".join(path.split("/")[-parts:])
        endings[ending] = endings.get(ending, False) or is_free
    free = [ending for ending, is_free in endings.items() if is_free]
    for candidates in (free, endings):
        for ending in difflib.get_close_matches(pattern, candidates, 1):
            likeness = difflib.SequenceMatcher(None, ending, pattern).ratio()
            return Near(ending, likeness, endings[ending])
    return None
