"""Explain one leaf; remarks about unused rules, unmatched leaves, fallbacks."""

import difflib
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from flax_layoutmap._core.errors import visible
from flax_layoutmap._rules.records import (
    Decision,
    ResolvedLeaf,
    because,
    closest_rule,
    layout_of,
    leaf_bytes,
    section_of,
    show_shape,
)
from flax_layoutmap._rules.rules import Remark, RuleSet
from flax_layoutmap._show.resolved_table import ResolvedTable, folds_of
from flax_layoutmap._show.table import human_bytes, human_share, path_cell
from flax_layoutmap._tree.paths import Role

# Unmatched leaves that are alike are worth a warning when they hold this share of the
# bytes, or that share of what each device holds: the first is small on many devices.
LARGE_SHARE = 0.01
_LARGE_HELD = 0.1

# Looking for similar paths is slow: it is done for so many unused rules, among so many
# paths.
_HINTS = 10
_MOST_PATHS = 2000
# Similarity of a path and a pattern: below the first the path is not what was meant;
# for an unmatched path, below the second; above the third the pattern is misspelt, and
# the path was not renamed.
_ALIKE, _RENAMED, _MISSPELT = 0.4, 0.6, 0.85

# So many lines with the same text are merged.
_MANY = 4

# Reasons of leaves that no rule and no metadata places.
UNMATCHED = {
    "no rule": "is matched by no rule",
    "unknown optimizer state": "is optimizer state of an unknown kind",
}


def explain(leaf: ResolvedLeaf, row: Decision, rules: RuleSet) -> str:
    """Explain in a few lines why a leaf got its layout, or none."""
    lines = [f"{leaf.path} {show_shape(leaf.shape)} {leaf.dtype}: {layout_of(row)}"]
    note = f": {row.note}" if row.note else ""
    lines.append(f"  because: {because(row, rules)}{note}")
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
        per_device = human_bytes(leaf.bytes_per_device)
        where = f" in {row.memory_kind}" if row.memory_kind else ""
        shard = show_shape(row.shard_shape)
        lines.append(f"  each device holds {shard}, {per_device}{where}")
    return "\n".join(map(visible, lines))


def _near_miss(path: str, rules: RuleSet) -> str:
    if not rules.rules:
        return "there are no rules"
    near = closest_rule(path, rules.rules)
    if near is None:
        return f"{path!r} is matched by no rule, and none comes close"
    number, rule = near
    return f"{path!r} is matched by no rule; rule {number} {rule.pattern!r} is closest"


class _Line(NamedTuple):
    """A remark about similar leaves that a rule or metadata does not fully place."""

    text: str
    about: str  # the text without the leaves
    leaf: str  # the leaves alone
    name: str  # their path, how many there are, and their shape
    row: Decision
    role: Role
    paths: list[str]
    bytes: int


def remarks(
    table: ResolvedTable, *, large_only: bool = False, folded: bool = False
) -> list[str]:
    """Return unused rules, unmatched leaves and fallbacks, one line each.

    With `large_only`, those that are worth a warning; if `folded`, leaves that are
    alike share a line.
    """
    if large_only:
        return [one.text for one in warnings(table)]
    lines = [head + hint for head, hint, _ in _unused(table, hints=True)]
    found = _unplaced(table, folded)
    if not folded:
        return lines + [one.text for one in found]
    same: dict[str, list[_Line]] = {}
    for one in found:
        same.setdefault(one.about, []).append(one)
    for about, group in same.items():
        if len(group) < _MANY:
            lines += [one.text for one in group]
            continue
        leaves = sum(len(one.paths) for one in group)
        share = sum(one.bytes for one in group) / (table.total_bytes or 1)
        lines.append(f"{about}: {leaves} leaves, {human_share(share)} of the bytes")
        lines += [f"  {one.leaf}" for one in group]
    return lines


def warnings(
    table: ResolvedTable, besides: Sequence[ResolvedTable] = ()
) -> list[Remark]:
    """The remarks that are worth a warning; leaves that are alike share one.

    Left out are fallbacks other than of annotations that name no axis of the mesh, and
    leaves that are few, of their kind: with less than 1 % of the bytes and 10 % of what
    a device holds. What the Resolutions `besides`, of the same rules, use is not
    unused.
    """
    inner = functools.cache(table.inner_paths)
    # Only unmatched paths are compared: other hints take longer than all else.
    found = [
        Remark(head + hint, head, frozenset(inner(role).values()))
        for head, hint, role in _unused(table, besides, hints=False)
    ]
    sums = table.totals()
    for some in _unplaced(table, folded=True):
        row, named = some.row, f"{some.name}: {some.row.fallback}"
        if row.warns and row.reason == "explicit layout":
            about = f"explicit layout: {row.fallback}"
            text = f"explicit layout: {named}"
        elif not is_large(some.bytes, sums.total_bytes, sums.bytes_per_device):
            continue
        elif row.reason in UNMATCHED:
            about, text = row.reason, some.text
        elif row.warns:
            about = f"annotation: {row.fallback}"
            text = (
                f"annotation: {named}; map the names by Flax's logical_axis_rules, or "
                "add a rule for it"
            )
        else:
            continue
        own = inner("optimizer" if some.role == "optimizer" else "parameter")
        found.append(Remark(text, about, frozenset(own.get(n, n) for n in some.paths)))
    return found


def is_large(size: int, total: int, held: int) -> bool:
    """Whether unmatched leaves are worth a warning.

    All in bytes: theirs, of the whole tree, and what each device holds.
    """
    return size > LARGE_SHARE * (total or 1) or size > _LARGE_HELD * (held or 1)


def _unplaced(table: ResolvedTable, folded: bool) -> list[_Line]:
    leaves = table.columns(lambda row: row.reason in UNMATCHED or bool(row.fallback))
    sums = table.totals()
    total, held = sums.total_bytes or 1, sums.bytes_per_device or 1
    found = []
    for fold in folds_of(leaves, folded) if leaves.rows else ():
        at, count, path = fold.members[0], len(fold.members), path_cell(fold)
        row, shape = leaves.rows[at], leaves.shapes[at]
        name, size = f"{path} {show_shape(shape)}", leaf_bytes(shape, leaves.dtypes[at])
        size *= count
        if row.reason not in UNMATCHED:
            about, leaf = f"fallback: {row.fallback}", path
            text = f"fallback: {path}: {row.fallback}"
        else:
            why = UNMATCHED[row.reason] + (f" ({row.fallback})" if row.fallback else "")
            share, more = human_share(size / total), ""
            if size <= LARGE_SHARE * total and is_large(size, total, held):
                more = f", {human_share(size / held)} of what each device holds"
            each = "it" if count == 1 else "each"
            about = f"unmatched: every device holds in full what {why}"
            text = (
                f"unmatched: {name} {why}, so every device holds {each} in full "
                f"({share} of the bytes{more})"
            )
            leaf = f"{name}, {share}" + (f" of the bytes{more}" if more else "")
        paths = [leaves.paths[member] for member in fold.members]
        role = leaves.roles[at]
        found.append(_Line(text, about, leaf, name, row, role, paths, size))
    return found


def _unused(
    table: ResolvedTable, besides: Sequence[ResolvedTable] = (), *, hints: bool
) -> list[tuple[str, str, Role]]:
    """A line for each unused rule, with its hint, and the role that it is for."""
    numbers = {id(rule): at + 1 for at, rule in enumerate(table.rules.rules)}
    elsewhere = [set(map(id, other.unused_rules)) for other in besides]
    lines: list[tuple[str, str, Role]] = []
    for rule in table.unused_rules:
        if not all(id(rule) in unused for unused in elsewhere):
            continue
        number = numbers.get(id(rule))
        name = f"rule {number}" if number else "optimizer rule"
        near = None
        if len(lines) < _HINTS:
            near = nearest(rule.pattern, table.parameter_paths(), free_only=not hints)
        head = f"unused: {name} {rule.pattern!r} matches no leaf"
        role = "parameter" if number else "optimizer"
        lines.append((head, near.hint if near else "", role))
    return lines


class Near(NamedTuple):
    """A path that a rule without a match may have been meant for."""

    ending: str  # its last parts, as many as the pattern has
    likeness: float  # of the path and the pattern, 0 to 1
    is_free: bool  # whether no rule matches it, as after a renaming

    @property
    def hint(self) -> str:
        """The end of a message."""
        if self.is_free and self.likeness < _MISSPELT:
            return f"; {self.ending!r} is matched by none"
        return f"; the closest path ends in {self.ending!r}"


def nearest(
    pattern: str, paths: Iterable[tuple[str, bool]], *, free_only: bool = False
) -> Near | None:
    """The path that is most like a pattern, preferably one that no rule matches.

    `paths` has each path and whether no rule matches it; `free_only` takes those alone.
    """
    parts = pattern.count("/") + 1
    endings: dict[str, bool] = {}
    for path, is_free in itertools.islice(paths, _MOST_PATHS):
        ending = "/".join(path.split("/")[-parts:])
        endings[ending] = endings.get(ending, False) or is_free
    free = [ending for ending, is_free in endings.items() if is_free]
    found = difflib.get_close_matches(pattern, free, 1, _RENAMED)
    if not found and not free_only:
        found = difflib.get_close_matches(pattern, endings, 1, _ALIKE)
    if not found:
        return None
    likeness = difflib.SequenceMatcher(None, found[0], pattern).ratio()
    return Near(found[0], likeness, endings[found[0]])
