"""Explain one leaf; remarks about unused rules, unmatched leaves, fallbacks."""

import difflib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from flax_layoutmap._core.errors import visible
from flax_layoutmap._rules.records import (
    Decision,
    ResolvedLeaf,
    Totals,
    because,
    closest_rule,
    leaf_bytes,
    section_of,
    show_shape,
)
from flax_layoutmap._rules.rules import Remark, RuleSet
from flax_layoutmap._show.resolved_table import ResolvedTable, folds_of
from flax_layoutmap._show.table import human_bytes, human_share, path_cell

# Unmatched leaves that are alike are worth a warning when they hold this share of the
# bytes, or that share of what each device holds: the first is small on many devices.
LARGE_SHARE = 0.01
_LARGE_HELD = 0.1

# Looking for similar paths is slow: it is done for so many unused rules and paths.
_HINTS, _MOST_PATHS = 10, 2000

# Reasons of leaves that no rule and no metadata places.
UNMATCHED = {
    "no rule": "is matched by no rule",
    "unknown optimizer state": "is optimizer state of an unknown kind",
}


def explain(leaf: ResolvedLeaf, row: Decision, rules: RuleSet) -> str:
    """Explain in a few lines why a leaf got its layout, or none."""
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


def remarks(table: ResolvedTable, *, folded: bool = False) -> list[str]:
    """Return unused rules, unmatched leaves and fallbacks, one line each.

    If `folded`, leaves that are alike share a line.
    """
    return [text for text, _ in (*_unused(table), *_unplaced(table, folded))]


def warnings(
    table: ResolvedTable, besides: Sequence[ResolvedTable] = ()
) -> list[Remark]:
    """The remarks that are worth a warning; leaves that are alike share one.

    Left out are fallbacks other than of annotations that name no axis of the mesh, and
    leaves with less than 1 % of the bytes and 10 % of what a device holds. What the
    Resolutions `besides`, of the same rules, use is not unused.
    """
    every = (*_unused(table, besides), *_unplaced(table, folded=True))
    return [warning for _, warning in every if warning is not None]


def is_large(size: int, total: int, held: int) -> bool:
    """Whether unmatched leaves of this size, in bytes, are worth a warning."""
    return size > LARGE_SHARE * (total or 1) or size > _LARGE_HELD * (held or 1)


def _unplaced(
    table: ResolvedTable, folded: bool
) -> Iterator[tuple[str, Remark | None]]:
    """Leaves that no rule and no metadata places in full."""
    leaves = table.columns(lambda row: row.reason in UNMATCHED or bool(row.fallback))
    if not leaves.rows:
        return
    sums, inner = table.totals(), table.inner_paths
    for fold in folds_of(leaves, folded):
        at, count, path = fold.members[0], len(fold.members), path_cell(fold)
        row, name = leaves.rows[at], f"{path} {show_shape(leaves.shapes[at])}"
        size = count * leaf_bytes(leaves.shapes[at], leaves.dtypes[at])
        large = is_large(size, sums.total_bytes, sums.bytes_per_device)
        about, text, warning = row.reason, f"fallback: {path}: {row.fallback}", ""
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
        keys = (f"{about}: {inner[leaves.paths[member]]}" for member in fold.members)
        yield text, Remark(warning, frozenset(keys)) if warning else None


def _shares(size: int, sums: Totals) -> str:
    """The share of all bytes, and of a device's where that alone is large."""
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

    ending: str  # its last parts, as many as the pattern has
    likeness: float  # of the path and the pattern, 0 to 1
    is_free: bool  # whether no rule matches it, as after a renaming

    @property
    def hint(self) -> str:
        """The end of a message."""
        return f"; the closest path ends in {self.ending!r}"


def nearest(pattern: str, paths: Iterable[tuple[str, bool]]) -> Near | None:
    """The path that is most like a pattern, preferably one that no rule matches."""
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
