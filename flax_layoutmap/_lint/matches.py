"""Checks of what rules match: no leaf, only leaves of other rules, or too many."""

import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import get_args

from flax_layoutmap._lint.findings import NUMBER, Finding, Model, Numbered
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._rules.matching import (
    Match,
    Matcher,
    Rule,
    first_match,
    is_for_outputs,
)
from flax_layoutmap._show.remarks import nearest

# For so many unused rules another spelling is looked for, in so many paths.
_HINTS = 5
# More unused rules than these are for other models: no spelling helps.
_MANY = 40
_MOST_PATHS = 2000
# Two neighbours of which the second goes on with what the first is part of.
_GOES_ON = {"a-z": re.compile("[A-Za-z][a-z]"), "0-9": re.compile("[0-9][0-9]")}
# Above this likeness a path is taken for what the pattern was to be.
_SURELY_MEANT = 0.8


def unused(model: Model) -> Iterator[Finding]:
    """Rules that match nothing, the first of them with what they may have meant."""
    resolution, found = model.resolution, model.unused
    severity = "info" if resolution.rules.strict is False else None
    hints = _HINTS if len(found) <= _MANY else 1
    paths = functools.cache(lambda: _paths(resolution))
    for at, one in enumerate(found):
        hint, fix = "", f"del {one.key}"
        if at < hints:
            hint, fix = _meant(one, resolution, paths())
        yield Finding("LM101", one, severity=severity, hint=hint, mend=fix)


def _paths(resolution: Resolution) -> list[str]:
    """The paths that the rules see, in all their forms; of equal layers, the first."""
    every = map(resolution._flat.forms, resolution._flat.representatives())
    found: dict[str, str] = {}
    for form in itertools.chain.from_iterable(every):
        if len(found) < _MOST_PATHS:
            found.setdefault(NUMBER.sub("0", form), form)
    return sorted(found.values())


def _meant(
    one: Numbered, resolution: Resolution, paths: Sequence[str]
) -> tuple[str, str]:
    """What the rule may have meant: the end of a message, and a fix."""
    match, pattern = resolution.rules.match, one.rule.pattern

    def fits(other: str) -> bool:
        if other == pattern or not _compiles(other):
            return False
        return _first_match(Rule(other, None), match, paths) is not None

    for mode in get_args(Match):
        found = _first_match(one.rule, mode, paths) if mode != match else None
        if found is not None:
            wide = next(filter(fits, _wider(pattern)), pattern)
            return (
                f" with match={match!r}; with match={mode!r} it would match {found!r}",
                f"{one.key_of(wide)} = {one.axes}  # in place of {one.key}",
            )
    for why, other in (
        ("paths have no 'params/'", re.sub(r"(?:\^|\\A)?params/", "", pattern)),
        ("a Variable's own 'value' is in no path", re.sub(r"/value\$?$", "", pattern)),
        ("the parts of a path are joined by '/'", pattern.replace(r"\.", "/")),
        (
            "paths are not bracketed",
            re.sub(r"\\?\[\\?['\"]?|['\"]?\\?\]", "/", pattern),
        ),
    ):
        other = re.sub("/+", "/", other).strip("/")
        if fits(other):
            return f": {why}", f"{one.key_of(other)} = {one.axes}  # not {one.key}"
    near = nearest(pattern, resolution.parameter_paths())
    if near is None:
        return "", f"del {one.key}"
    if near.likeness < _SURELY_MEANT and not near.is_free:
        return near.hint, f"del {one.key}, or make it match"
    key = one.key_of(NUMBER.sub(r"\\d+", near.ending))
    return near.hint, f"{key} = {one.axes}  # not {one.key}"


def _wider(pattern: str) -> Iterator[str]:
    """The same for a way of matching that is narrower than `search`."""
    flags = re.match(r"(?:\(\?[aiLmsux]+\))?", pattern)
    assert flags is not None
    rest = pattern[flags.end() :]
    rest = f"({rest})" if "|" in rest else rest
    for before, after in ((".*", ""), ("", ".*"), (".*", ".*")):
        yield f"{flags[0]}{before}{rest}{after}"


def _first_match(rule: Rule, match: Match, paths: Sequence[str]) -> str | None:
    matcher = Matcher((rule,), match)
    return next((path for path in paths if matcher.matching(path)), None)


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def never_decides(model: Model) -> Iterator[Finding]:
    """Rules that match leaves, all of which others decide."""
    resolution = model.resolution
    rules = resolution.rules.rules
    decided, over = set(), {}
    for row in resolution._distinct.values():
        if row.reason not in ("rule", "exact key") or row.rule is None:
            decided.update(row.matched)  # what came first was no rule
            continue
        for at in row.matched:
            if at == row.rule or rules[at].layout == rules[row.rule].layout:
                decided.add(at)
            else:
                over.setdefault(at, row.rule)
    overlap = resolution.rules.overlap
    for at, winner in over.items():
        if at not in decided and not rules[at].optional:
            one = Numbered("rules", at + 1, rules[at])
            wins = Numbered("rules", winner + 1, rules[winner])
            where = "before" if overlap == "first" else "behind"
            yield Finding("LM111", one, winner=wins, overlap=overlap, where=where)


def goes_on(model: Model) -> Iterator[Finding]:
    """Rules written for fullmatch that match paths which go on behind them here."""
    resolution = model.resolution
    rules = resolution.rules
    if rules.match != "search":
        return
    decisions = resolution._distinct.values()
    untold = {
        at
        for at in {row.rule for row in decisions if row.reason == "rule"}
        if at is not None
        if rules.rules[at].pattern.startswith(".*")
        if not rules.rules[at].layout.is_replicated
        if not is_for_outputs(rules.rules[at])
    }
    for at in resolution._flat.representatives() if untold else ():
        row = resolution._rows[at]
        if row.reason != "rule" or row.rule not in untold:
            continue
        rule = rules.rules[row.rule]
        if not Matcher((rule,), "fullmatch").matching_forms(resolution._flat.forms(at)):
            untold.discard(row.rule)
            one = Numbered("rules", row.rule + 1, rule)
            path, end = resolution.paths[at], one.key_of(f"{rule.pattern}$")
            yield Finding("LM010, model", one, path=path, leaves=1, end=end)


# --------------------------------------------------------- in the middle of a name


def inside_of_names(model: Model) -> Iterator[Finding]:
    """Rules that match some names as a whole and others in their middle."""
    resolution = model.resolution
    rules, match = resolution.rules.rules, resolution.rules.match
    if match == "fullmatch":
        return
    users: dict[int, set[int]] = {}  # rule → the decisions that it made
    for key, row in resolution._distinct.items():
        if row.rule is not None and row.reason in ("rule", "exact key"):
            if _may_cut(rules[row.rule]):
                users.setdefault(row.rule, set()).add(key)
    forms: dict[int, set[tuple[str, ...]]] = {}
    # Of layers that are alike one will do, but where a pattern ends in a number.
    every = any(_ends_in_a_digit(rules[at].pattern) for at in users)
    some = range(len(resolution)) if every else resolution._flat.representatives()
    for at in some if users else ():
        key = id(resolution._rows[at])
        forms.setdefault(key, set()).add(resolution._flat.forms(at))
    for at, keys in users.items():
        rule = rules[at]
        own = {form for key in keys for form in forms.get(key, ())}
        found = sorted({_matched(rule, match, form) for form in own})
        kind = "0-9" if _ends_in_a_digit(rule.pattern) else "a-z"
        likely = [path for path in found if _cuts(rule, kind, match, path)]
        clean = _cleanly(rule, kind, match) if likely else None
        if clean is None:
            continue
        inside = [path for path in likely if not clean.matching(path)]
        if not inside or len(inside) == len(found):
            continue
        good = next(path for path in found if clean.matching(path))
        one = Numbered("rules", at + 1, rule)
        narrow = _narrower(rule, match, good, inside[0])
        mend = "write '/', '^' or '$' where a name begins or ends"
        yield Finding(
            "LM113",
            one,
            severity="warning" if kind == "0-9" else "info",
            path=inside[0],
            leaves=len(inside),
            good=good,
            what="number" if kind == "0-9" else "name",
            mend=f"{one.key_of(narrow)} = {one.axes}" if narrow else mend,
        )


def _may_cut(rule: Rule) -> bool:
    """Whether the pattern begins or ends with part of a name, and shards something."""
    first, last = rule.pattern[:1], rule.pattern[-1:]
    ends = first.isalnum() or (last.isalnum() and rule.pattern[-2:-1] != "\\")
    return ends and not rule.layout.is_replicated


def _ends_in_a_digit(pattern: str) -> bool:
    return pattern[-1:].isdigit() and pattern[-2:-1] != "\\"


def _matched(rule: Rule, match: Match, own: tuple[str, ...]) -> str:
    """The form of a path that a rule matches; the whole one for its exact key."""
    matched = (form for form in own if first_match(rule, match, form) is not None)
    return next(matched, own[0])


def _cuts(rule: Rule, kind: str, match: Match, path: str) -> bool:
    """Whether the first match begins or ends where a letter (or digit) goes on."""
    span = first_match(rule, match, path)
    begin, end = span or (0, len(path))  # decided by its exact key
    pairs = [path[end - 1 : end + 1] if end else ""]
    if match != "match":
        pairs.append(path[begin - 1 : begin + 1] if begin else "")
    return any(map(_GOES_ON[kind].fullmatch, pairs))


def _cleanly(rule: Rule, kind: str, match: Match) -> Matcher | None:
    """What matches where no letter (or digit) goes on before or behind it."""
    letters = "A-Za-z" if kind == "a-z" else kind
    before = "" if match == "match" else f"(?<![{letters}](?=[{kind}]))"
    behind = f"(?!(?<=[{letters}])[{kind}])"
    try:
        clean = Rule(f"{before}(?:{rule.pattern}){behind}", None)
    except ValueError:
        return None  # flags, which stand at the beginning only
    return Matcher((clean,), match)


def _narrower(rule: Rule, match: Match, good: str, bad: str) -> str | None:
    """The pattern with its ends anchored, so that it distinguishes the two paths."""
    inner = f"({rule.pattern})" if "|" in rule.pattern else rule.pattern
    for pattern in (f"(^|/){inner}", f"{inner}(/|$)", f"(^|/){inner}(/|$)"):
        matcher = Matcher((Rule(pattern, None),), match)
        if matcher.matching(good) and not matcher.matching(bad):
            return pattern
    return None
