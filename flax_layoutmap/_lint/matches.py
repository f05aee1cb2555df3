"""Checks of rules: invalid, unused, never in effect, or matching too much."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, get_args

from flax_layoutmap._core.errors import RuleError, closest
from flax_layoutmap._lint.issue import (
    NUMBER,
    Group,
    LintIssue,
    Numbered,
    Severity,
    as_code,
    issue,
    nth,
    numbered,
)
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._rules.matching import Matcher, MatchMode, Rule
from flax_layoutmap._rules.records import Decision, leaf_bytes
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._show.report import nearest

DECIDED = ("rule", "exact key")  # the reasons of leaves that a rule decides

# Searching for similar spellings is slow: limits on unused rules and on paths.
_HINTS, _MOST_PATHS = 5, 2000
# The pattern was surely meant for a path that is at least this similar.
_SURELY_MEANT = 0.8
# With more than this share replicated, a rule that matches nothing is an error.
_MOSTLY = 0.5

# Why a pattern may match nothing, and the replacement that corrects it.
_MISTAKES = (
    ("paths neither begin nor end with '/', nor have two in a row", "(?!)", ""),
    ("paths have no 'params/'", r"(?:\^|\\A)?params/", ""),
    ("a Variable's own 'value' is in no path", r"/value\$?$", ""),
    ("the parts of a path are joined by '/'", r"\\\.", "/"),
    ("paths are not bracketed", r"\\?\[\\?['\"]?|['\"]?\\?\]", "/"),
)
_SLASHES = re.compile(r"^(?:\^|\\A)?/+|\$?/+(?:\$|\\Z)?$")
_EXAMPLE = '("up/kernel", (None, "model")): one entry per dim'
# Two adjacent letters of a name, or digits of a number.
_NEIGHBOURS = re.compile("[A-Za-z][a-z]|[0-9][0-9]")


Wanted = Callable[[Decision], bool]


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A Resolution to check, with the options of `lint`."""

    resolution: Resolution
    max_replicated: float | None
    is_ignored: Callable[[str], bool]  # of the path of a leaf

    @property
    def sizes(self) -> dict[str, int]:
        """The mesh axes of more than one device, with their sizes."""
        sizes = self.resolution.mesh.axis_sizes if self.resolution.mesh else {}
        return {axis: size for axis, size in sizes.items() if size > 1}

    def groups(self, wanted: Wanted, role: str | None = None) -> list[Group]:
        """The leaves with wanted decisions, grouped if they differ only in numbers."""
        alike: dict[Any, Group] = {}
        resolution = self.resolution
        total = resolution.total_bytes or 1
        for at in resolution.positions(wanted):
            if role not in (None, resolution._roles[at]):
                continue
            path, shape = resolution.paths[at], resolution.shapes[at]
            row, size = resolution._rows[at], leaf_bytes(shape, resolution.dtypes[at])
            why = row.reason, row.rule, row.fallback, row.problem, row.owner
            key = why, row.dims, shape, NUMBER.sub("0", path)
            if key not in alike:
                section = "optimizer" if row.reason == "optimizer rule" else "rules"
                rule = None
                if row.rule is not None:
                    rule = nth(resolution.rules, row.rule, section)
                alike[key] = Group(row, path, shape, rule)
            group = alike[key]
            group.leaves += 1
            group.bytes += size
            group.share = group.bytes / total
        return list(alike.values())


def refused(given: Iterable[Any]) -> Iterator[LintIssue]:
    """LM001, LM002: pairs or entries of a mapping that are not valid rules."""
    known = set[str]()
    entries = given.items() if isinstance(given, Mapping) else given
    for number, entry in enumerate(entries, start=1):
        pattern = None
        try:
            if isinstance(entry, Rule):
                pattern = entry.pattern
            elif isinstance(entry, tuple | list) and len(entry) == 2:
                pattern = entry[0]
                Rule(*entry)
            else:
                raise RuleError(f"not a (pattern, layout) pair or a Rule: {entry!r}")
            if pattern in known:
                raise RuleError(f"the pattern {pattern!r} has a rule already")
            known.add(pattern)
        except RuleError as error:
            pattern = pattern if isinstance(pattern, str) else ""
            code, fix = "LM002", f"write (pattern, axes), such as {_EXAMPLE}"
            if "is not a regular expression" in str(error):
                code, fix = "LM001", f"escape it: {re.escape(pattern)!r}"
            text = f"rule {number}: {error}"
            yield LintIssue(code, "error", text, fix, None, pattern or None, number)


def unknown_axes(rules: RuleSet) -> Iterator[LintIssue]:
    """LM003: axes that the mesh does not have."""
    mesh = rules.mesh
    if mesh is None:
        return
    known = mesh.axis_names
    for rule in numbered(rules):
        layout = rule.rule.layout
        if layout.device_mesh is None or layout.device_mesh == mesh:
            for axis in (name for name in layout.axis_names if name not in known):
                near = (closest(axis, known) or known)[0]
                axes = as_code(layout).replace(repr(axis), repr(near))
                text = f"{rule}: the mesh {str(mesh)!r} has no axis {axis!r}"
                yield issue("LM003", "error", text, f"{rule.key} = {axes}", rule)
    for axis in (name for name in rules.batch if name not in known):
        near = (closest(axis, known) or known)[0]
        text = f"batch: the mesh {str(mesh)!r} has no axis {axis!r}"
        yield issue("LM003", "error", text, f'batch="{near}"')


def unused(model: Model) -> Iterator[LintIssue]:
    """LM101: rules that match nothing, the first few with a suggestion."""
    resolution = model.resolution
    rules, known = resolution.rules, set(map(id, resolution.unused_rules))
    every = [r for r in numbered(rules, "rules", "optimizer") if id(r.rule) in known]
    severity: Severity = "warning" if rules.strict is not False else "info"
    share, also = resolution.replicated_share, ""
    if resolution.mesh is None or any(row.problem for row in resolution._rows):
        share = 0.0  # not known
    if severity == "warning" and share > max(_MOSTLY, model.max_replicated or 0):
        severity = "error"
        also = f", and {share:.1%} of the bytes are replicated"
    paths = _paths(resolution) if every else []
    for position, rule in enumerate(every):
        hint, fix = "", f"del {rule.key}"
        if position < _HINTS:
            hint, fix = _meant(rule, resolution, paths)
        text = f"{rule} matches no leaf{also}{hint}"
        yield issue("LM101", severity, text, fix, rule)


def _paths(resolution: Resolution) -> list[str]:
    """The paths of parameters, in all their forms; only the first of equal layers."""
    flat, roles = resolution._flat, resolution._roles
    parameters = (at for at in flat.representatives() if roles[at] == "parameter")
    every = itertools.chain.from_iterable(map(flat.forms, parameters))
    some = [*itertools.islice(every, _MOST_PATHS)]
    return sorted({NUMBER.sub("0", form): form for form in reversed(some)}.values())


def _meant(rule: Numbered, resolution: Resolution, paths: list[str]) -> tuple[str, str]:
    """Guess what the rule was meant for: the end of a message, and a fix."""
    match, pattern = resolution.rules.match, rule.pattern
    path = _first_match(pattern, match, paths)
    if path is not None:
        hint = f": only a pattern that names what leads to the model sees {path!r}"
        return hint, "name it, or match the path within the model"
    for mode in get_args(MatchMode):
        path = _first_match(pattern, mode, paths) if mode != match else None
        if path is not None:
            hint = f" with match={match!r}; with match={mode!r} it would match {path!r}"
            return hint, f"match={mode!r}, or write '.*' for the rest of the path"
    for why, wrong, right in _MISTAKES:
        other = _SLASHES.sub("", re.sub("/+", "/", re.sub(wrong, right, pattern)))
        if other != pattern and _first_match(other, match, paths) is not None:
            return f": {why}", f"{rule.with_pattern(other)}  # not {rule.key}"
    near = nearest(pattern, resolution.parameter_paths)
    if near is None:
        return "", f"del {rule.key}"
    if near.likeness < _SURELY_MEANT and not near.is_free:
        return near.hint, f"del {rule.key}, or make it match"
    other = rule.with_pattern(NUMBER.sub(r"\\d+", near.ending))
    return near.hint, f"{other}  # not {rule.key}"


def _first_match(pattern: str, match: MatchMode, paths: Iterable[str]) -> str | None:
    """The first path that a pattern matches; None also for an invalid pattern."""
    try:
        matcher = Matcher((Rule(pattern, None),), match)
    except RuleError:
        return None
    return next(filter(matcher.matching, paths), None)


def never_decides(model: Model) -> Iterator[LintIssue]:
    """LM111: rules whose matches are all decided by other rules."""
    rules = model.resolution.rules
    decided, winners = set[int](), dict[int, int]()
    for row in model.resolution._distinct.values():
        if row.reason not in DECIDED or row.rule is None:
            decided.update(row.matched)  # something other than a rule decided
            continue
        for position in row.matched:
            if rules.rules[position].layout == rules.rules[row.rule].layout:
                decided.add(position)
            else:
                winners.setdefault(position, row.rule)
    where = "before" if rules.overlap == "first" else "behind"
    for position, other in winners.items():
        rule, winner = nth(rules, position), nth(rules, other)
        if position not in decided and not rule.rule.optional:
            yield issue(
                "LM111",
                "warning",
                f"{rule} never takes effect: every leaf that it matches is decided by "
                f"another rule, such as {winner} (overlap={rules.overlap!r})",
                f"put {rule.pattern!r} {where} {winner.pattern!r}, or del {rule.key}",
                rule,
            )


def inside_names(model: Model) -> Iterator[LintIssue]:
    """LM113: rules that match some names as a whole and others in the middle."""
    rules, flat = model.resolution.rules, model.resolution._flat
    decided: dict[int, list[str]] = {}
    for path, row in zip(flat.paths, model.resolution._rows, strict=True):
        if row.rule is not None and row.reason in DECIDED:
            decided.setdefault(row.rule, []).append(path)
    for number, paths in decided.items():
        rule = nth(rules, number)
        pattern = rule.pattern
        is_word = pattern[:1].isalnum() or re.search(r"(?<!\\)[^\W_]$", pattern)
        if not is_word or rule.rule.optional or rule.rule.layout.is_replicated:
            continue
        ends = [_cut_ends(pattern, rules.match, path) for path in paths]
        inside = [path for path, cut in zip(paths, ends, strict=True) if any(cut)]
        if not 0 < len(inside) < len(paths):
            continue
        whole = paths[ends.index((False, False))]
        begin, end = _cut_ends(pattern, rules.match, inside[0])
        inner = f"({pattern})" if "|" in pattern else pattern
        narrow = f"{'(^|/)' * begin}{inner}{'(/|$)' * end}"
        fix = "write '/', '^' or '$' where a name begins or ends"
        if _first_match(narrow, rules.match, [inside[0], whole]) == whole:
            fix = rule.with_pattern(narrow)
        what = "number" if pattern[-1].isdigit() else "name"
        text = f"{rule} matches {whole!r}, and {inside[0]!r} too, inside a {what}"
        severity: Severity = "warning" if what == "number" else "info"
        about_rule = issue("LM113", severity, text, fix, rule)
        yield dataclasses.replace(about_rule, path=inside[0], leaves=len(inside))


def _cut_ends(pattern: str, match: MatchMode, path: str) -> tuple[bool, bool]:
    """Whether a match begins, and ends, between two letters or two digits."""
    span = getattr(re, match)(pattern, path)
    two = [path[max(n - 1, 0) : n + 1] for n in (span.span() if span else (0, 0))]
    begin, end = map(bool, map(_NEIGHBOURS.fullmatch, two))
    return begin, end
