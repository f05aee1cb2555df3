"""Remarks about a Resolution: unused rules, unmatched leaves, fallbacks."""

import difflib
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from flax_layoutmap._rules.records import Decision, Totals, leaf_bytes, show_shape
from flax_layoutmap._rules.rules import Remark
from flax_layoutmap._show.resolved_table import ResolvedTable, folds_of
from flax_layoutmap._show.table import human_share, path_cell
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


class _Unplaced(NamedTuple):
    """Leaves that are alike, and that a rule or metadata does not fully place."""

    name: str  # their path, and how many there are
    shape: str
    row: Decision
    role: Role
    paths: list[str]
    bytes: int


class _Line(NamedTuple):
    """A remark about some leaves."""

    text: str
    about: str  # the text without the leaves
    leaf: str  # the leaves alone
    some: _Unplaced


def remarks(
    table: ResolvedTable, *, large_only: bool = False, folded: bool = False
) -> list[str]:
    """Return unused rules, unmatched leaves and fallbacks, one line each.

    Args:
        table: the Resolution.
        large_only: only those that are worth a warning.
        folded: whether leaves that are alike share a line.
    """
    if large_only:
        return [one.text for one in warnings(table)]
    lines = [head + hint for head, hint, _ in _unused(table, hints=True)]
    sums = table.totals()
    found = [_line(some, sums) for some in _unplaced(table, folded)]
    if not folded:
        return lines + [one.text for one in found]
    same: dict[str, list[_Line]] = {}
    for one in found:
        same.setdefault(one.about, []).append(one)
    for about, group in same.items():
        if len(group) < _MANY:
            lines += [one.text for one in group]
            continue
        leaves = sum(len(one.some.paths) for one in group)
        share = sum(one.some.bytes for one in group) / (sums.total_bytes or 1)
        lines.append(f"{about}: {leaves} leaves, {human_share(share)} of the bytes")
        lines += [f"  {one.leaf}" for one in group]
    return lines


def warnings(
    table: ResolvedTable, besides: Sequence[ResolvedTable] = ()
) -> list[Remark]:
    """The remarks that are worth a warning; leaves that are alike share one.

    Left out are fallbacks other than of annotations that name no axis of the mesh, and
    leaves that are few, of their kind: with less than 1 % of the bytes and 10 % of what
    a device holds.

    Args:
        table: the Resolution.
        besides: others of the same rules: what they use is not unused.
    """
    inner = functools.cache(table.inner_paths)
    # Only unmatched paths are compared: other hints take longer than all else.
    found = [
        Remark(head + hint, head, frozenset(inner(role).values()))
        for head, hint, role in _unused(table, besides, hints=False)
    ]
    sums = table.totals()
    for some in _unplaced(table, folded=True):
        row = some.row
        named = f"{some.name} {some.shape}: {row.fallback}"
        if row.warns and row.reason == "explicit layout":
            about = f"explicit layout: {row.fallback}"
            text = f"explicit layout: {named}"
        elif not is_large(some.bytes, sums.total_bytes, sums.bytes_per_device):
            continue
        elif row.reason in UNMATCHED:
            about, text = row.reason, _line(some, sums).text
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

    Args:
        size: their bytes.
        total: bytes of the whole tree.
        held: bytes that each device holds.
    """
    return size > LARGE_SHARE * (total or 1) or size > _LARGE_HELD * (held or 1)


def _unplaced(table: ResolvedTable, folded: bool) -> list[_Unplaced]:
    leaves = table.columns(lambda row: row.reason in UNMATCHED or bool(row.fallback))
    found = []
    for fold in folds_of(leaves, folded) if leaves.rows else ():
        at, count = fold.members[0], len(fold.members)
        shape = leaves.shapes[at]
        found.append(
            _Unplaced(
                name=path_cell(fold),
                shape=show_shape(shape),
                row=leaves.rows[at],
                role=leaves.roles[at],
                paths=[leaves.paths[member] for member in fold.members],
                bytes=count * leaf_bytes(shape, leaves.dtypes[at]),
            )
        )
    return found


def _line(some: _Unplaced, sums: Totals) -> _Line:
    row, total, held = some.row, sums.total_bytes or 1, sums.bytes_per_device or 1
    if row.reason not in UNMATCHED:
        line = f"fallback: {some.name}: {row.fallback}"
        return _Line(line, f"fallback: {row.fallback}", some.name, some)
    why = UNMATCHED[row.reason] + (f" ({row.fallback})" if row.fallback else "")
    share, more = human_share(some.bytes / total), ""
    if some.bytes <= LARGE_SHARE * total and is_large(some.bytes, total, held):
        more = f", {human_share(some.bytes / held)} of what each device holds"
    name = f"{some.name} {some.shape}"
    return _Line(
        f"unmatched: {name} {why}, so every device holds "
        f"{'it' if len(some.paths) == 1 else 'each'} in full "
        f"({share} of the bytes{more})",
        f"unmatched: every device holds in full what {why}",
        f"{name}, {share}" + (f" of the bytes{more}" if more else ""),
        some,
    )


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
    """A path that a rule without a match may have been meant for.

    Attributes:
        ending: its last parts, as many as the pattern has.
        likeness: of the two, 0 to 1.
        is_free: whether no rule matches it, as after a renaming.
    """

    ending: str
    likeness: float
    is_free: bool

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

    Args:
        pattern: the pattern.
        paths: paths, and whether no rule matches them.
        free_only: whether to look at those alone.
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
