"""What rules match of a model: nothing, nothing of their own, or more than they say."""

import functools
import itertools
import re
from collections.abc import Callable, Container, Iterator, Sequence
from typing import get_args

from flax_layoutmap._lint.about import about, axes_code, key_code, later, name_of
from flax_layoutmap._lint.groups import NUMBER
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._rules.issues import Issue
from flax_layoutmap._rules.rules import (
    Match,
    Matcher,
    Rule,
    first_match,
    is_for_outputs,
)
from flax_layoutmap._show.remarks import nearest

# Rules that match nothing for which another spelling is looked for, and where.
_HINTS = 5
# More than these are rules for other models: no spelling mends that.
_MANY = 40
_MOST_PATHS = 2000
# Two neighbours of which the second goes on with what the first is part of.
_GOES_ON = {"a-z": re.compile("[A-Za-z][a-z]"), "0-9": re.compile("[0-9][0-9]")}
# Above this likeness a path is taken for what the pattern was to be.
_SURELY_MEANT = 0.8


# The section of a rule, and its number in there.
Number = tuple[str, int | None]
# Paths, found when they are needed; and whether no rule matches them.
_Paths = Callable[[], Sequence[str]]
_NearPaths = Callable[[], Sequence[tuple[str, bool]]]


def lint_matches(
    resolution: Resolution, unused: Sequence[Number], explained: Container[Number]
) -> Iterator[Issue]:
    """Rules that match nothing, decide nothing, or match more than they seem to.

    Args:
        resolution: the Resolution.
        unused: the rules that match nothing.
        explained: those of which it is told already why.
    """
    yield from _unused(resolution, unused, explained)
    yield from _never_decides(resolution)
    some = tuple(resolution._flat.representatives())
    yield from _inside_of_names(resolution, some)
    yield from _goes_on(resolution, some)


def unused_numbers(resolution: Resolution) -> list[Number]:
    """The rules that match nothing."""
    unused = set(map(id, resolution.unused_rules))
    return [
        (section, number)
        for section in ("rules", "optimizer")
        for number, rule in enumerate(getattr(resolution.rules, section), start=1)
        if id(rule) in unused
    ]


def _unused(
    resolution: Resolution, unused: Sequence[Number], explained: Container[Number]
) -> Iterator[Issue]:
    rules = resolution.rules
    paths = functools.cache(lambda: _paths(resolution))
    near = functools.cache(lambda: list(resolution.parameter_paths()))
    severity = "info" if rules.strict is False else "warning"
    hints = _HINTS if len(unused) <= _MANY else 1
    for at, (section, number) in enumerate(unused):
        if (section, number) in explained or number is None:
            continue
        rule = getattr(rules, section)[number - 1]
        if at < hints:
            given = rules.match, paths, near
            yield later(
                "LM101", severity, section, number, rule, _spelt_otherwise, given
            )
        else:
            yield later("LM101", severity, section, number, rule, _told_to_go)


def _told_to_go(section: str, rule: Rule, _: None) -> tuple[str, str]:
    return " matches no leaf", f"del {key_code(section, rule.pattern)}"


def _paths(resolution: Resolution) -> list[str]:
    """The paths that the rules see, in all their forms; of equal layers, the first."""
    every = map(resolution._flat.forms, resolution._flat.representatives())
    found: dict[str, str] = {}
    for form in itertools.chain.from_iterable(every):
        if len(found) < _MOST_PATHS:
            found.setdefault(NUMBER.sub("0", form), form)
    return sorted(found.values())


def _spelt_otherwise(
    section: str, rule: Rule, given: tuple[Match, _Paths, _NearPaths]
) -> tuple[str, str]:
    """The same, with what the rule may have meant."""
    match, paths, near = given
    hint, fix = _meant(match, paths(), section, rule, near)
    return f" matches no leaf{hint}", fix


def _meant(
    match: Match, paths: Sequence[str], section: str, rule: Rule, near: _NearPaths
) -> tuple[str, str]:
    """What the rule may have meant: the end of a message, and a fix."""
    pattern = rule.pattern
    old, axes = key_code(section, pattern), axes_code(rule)

    def fits(other: str) -> bool:
        if other == pattern or not _compiles(other):
            return False
        return _first_match(Rule(other, None), match, paths) is not None

    for mode in get_args(Match):
        found = _first_match(rule, mode, paths) if mode != match else None
        if found is not None:
            wide = next(filter(fits, _wider(pattern)), pattern)
            return (
                f" with match={match!r}; with match={mode!r} it would match {found!r}",
                f"{key_code(section, wide)} = {axes}  # in place of {old}",
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
            return f": {why}", f"{key_code(section, other)} = {axes}  # not {old}"
    found = nearest(pattern, near())
    if found is None:
        return "", f"del {old}"
    if found.likeness < _SURELY_MEANT and not found.is_free:
        return found.hint, f"del {old}, or make it match"
    key = key_code(section, NUMBER.sub(r"\\d+", found.ending))
    return found.hint, f"{key} = {axes}  # not {old}"


def _wider(pattern: str) -> tuple[str, ...]:
    """The same for a way of matching that is narrower than `search`."""
    flags = re.match(r"(?:\(\?[aiLmsux]+\))?", pattern)
    assert flags is not None
    rest = pattern[flags.end() :]
    ends = ((".*", ""), ("", ".*"), (".*", ".*"))
    rest = f"({rest})" if "|" in rest else rest
    return tuple(f"{flags[0]}{before}{rest}{after}" for before, after in ends)


def _first_match(rule: Rule, match: Match, paths: Sequence[str]) -> str | None:
    matcher = Matcher((rule,), match)
    return next((path for path in paths if matcher.matching(path)), None)


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _never_decides(resolution: Resolution) -> Iterator[Issue]:
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
    for at, winner in over.items():
        if at not in decided:
            named = name_of("rules", winner + 1, rules[winner])
            place = "before" if resolution.rules.overlap == "first" else "behind"
            yield about(
                "LM111",
                "warning",
                "rules",
                at + 1,
                rules[at],
                f" decides no leaf: all that it matches are decided by others, such as "
                f"{named} (overlap={resolution.rules.overlap!r})",
                f"put {rules[at].pattern!r} {place} {rules[winner].pattern!r}, or del "
                f"{key_code('rules', rules[at].pattern)}",
            )


def _inside_of_names(resolution: Resolution, some: Sequence[int]) -> Iterator[Issue]:
    """Rules that match some names as a whole and others in their middle."""
    rules = resolution.rules
    if rules.match == "fullmatch":
        return
    users: dict[int, set[int]] = {}
    for key, row in resolution._distinct.items():
        if row.rule is not None and row.reason in ("rule", "exact key"):
            users.setdefault(row.rule, set()).add(key)
    by_key: dict[int, set[tuple[str, ...]]] = {}
    digits = {at for at in users if _ends_in_a_digit(rules.rules[at].pattern)}
    whole = {key for at in digits for key in users[at]}
    for at in range(len(resolution)) if whole else some:
        key, own = id(resolution._rows[at]), resolution._flat.forms(at)
        by_key.setdefault(key, set()).add(own)
    for at, keys in users.items():
        rule = rules.rules[at]
        if rule.layout.is_replicated or not _begins_or_ends_a_name(rule.pattern):
            continue
        every = {own for key in keys for own in by_key.get(key, ())}
        found = sorted({_matched(rule, rules.match, own) for own in every})
        kind = "0-9" if at in digits else "a-z"
        likely = [path for path in found if _cuts(rule, kind, rules.match, path)]
        clean = _cleanly(rule, kind, rules.match) if likely else None
        if clean is None:
            continue
        inside = [path for path in likely if not clean.matching(path)]
        if not inside or len(inside) == len(found):
            continue
        good = next(path for path in found if clean.matching(path))
        narrow = _narrower(rule, rules.match, good, inside[0])
        yield about(
            "LM113",
            "warning" if at in digits else "info",
            "rules",
            at + 1,
            rule,
            f" matches {good!r}, and {inside[0]!r} too, in the middle of a "
            f"{'number' if at in digits else 'name'}",
            f"{key_code('rules', narrow)} = {axes_code(rule)}"
            if narrow
            else "write '/', '^' or '$' where a name begins or ends",
            path=inside[0],
            leaves=len(inside),
        )


def _narrower(rule: Rule, match: Match, good: str, bad: str) -> str | None:
    """The pattern with its ends fixed, so that it tells the two paths apart."""
    inner = f"({rule.pattern})" if "|" in rule.pattern else rule.pattern
    for pattern in (f"(^|/){inner}", f"{inner}(/|$)", f"(^|/){inner}(/|$)"):
        matcher = Matcher((Rule(pattern, None),), match)
        if matcher.matching(good) and not matcher.matching(bad):
            return pattern
    return None


def _goes_on(resolution: Resolution, some: Sequence[int]) -> Iterator[Issue]:
    """Rules written for fullmatch that match paths which go on behind them here."""
    rules = resolution.rules
    if rules.match != "search":
        return
    decisions = resolution._distinct.values()
    deciding = {row.rule for row in decisions if row.reason == "rule"}
    untold = {
        at for at in deciding if at is not None and _is_for_fullmatch(rules.rules[at])
    }
    for at in some if untold else ():
        row, path = resolution._rows[at], resolution.paths[at]
        if row.rule not in untold or row.reason != "rule":
            continue
        rule = rules.rules[row.rule]
        own = resolution._flat.forms(at)
        if not Matcher((rule,), "fullmatch").matching_forms(own):
            untold.discard(row.rule)
            key = key_code("rules", f"{rule.pattern}$")
            yield about(
                "LM010",
                "info",
                "rules",
                row.rule + 1,
                rule,
                " begins with '.*', as for match='fullmatch', with which it would not "
                f"match {path!r}; with match='search' it does",
                f"{key} = {axes_code(rule)}  # if paths are to end there",
                path=path,
                leaves=1,
            )


def _is_for_fullmatch(rule: Rule) -> bool:
    """Whether it looks so, and shards something."""
    shards = rule.pattern.startswith(".*") and not rule.layout.is_replicated
    return shards and not is_for_outputs(rule)


def _begins_or_ends_a_name(pattern: str) -> bool:
    ends = pattern[:1], pattern[-1:] if pattern[-2:-1] != "\\" else ""
    return any(end.isalnum() for end in ends)


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
    goes_on = _GOES_ON[kind]
    return any(goes_on.fullmatch(pair) is not None for pair in pairs)


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
