"""What can be said about rules without a model: patterns and axes that cannot work."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flax_layoutmap._errors import closest
from flax_layoutmap._issues import Issue
from flax_layoutmap._languages import difference, is_literal, sample, witness
from flax_layoutmap._pattern_cost import slow_because
from flax_layoutmap._rules import Matcher, Rule, RuleSet, is_for_outputs

SECTIONS = ("rules", "activations", "names", "optimizer")

# What was written for `search`, where it means "begins a part"; at the start of a path
# there is no slash.
_PART_START = re.compile(r"\((?:\?:)?(?:\^\|/|/\|\^)\)")
_ANCHOR = re.compile(r"(?<!\\)(?:\\\\)*(?:\^|\$|\\A|\\Z)")
_LINEN = re.compile(r"(?:\^|\\A)params/")


def lint_rules(rules: RuleSet) -> Iterator[Issue]:
    """The findings about a rule set alone."""
    yield from _axes(rules)
    for section in SECTIONS:
        for number, rule in enumerate(getattr(rules, section), start=1):
            slow = slow_because(rule.pattern)
            if slow is not None:
                yield about(
                    "LM011",
                    "warning",
                    section,
                    number,
                    rule,
                    f" may take very long to try: {slow}",
                    "write it without a repetition inside of a repetition, and with "
                    'narrower characters, such as [^/]+ in place of ".*"',
                )
    for section in ("rules", "optimizer"):
        yield from _patterns(rules, section)
    yield from _ranks_of_state(rules)


# -------------------------------------------------------------------- helpers


def about(
    code: str,
    severity: Any,
    section: str,
    number: int,
    rule: Rule,
    message: str,
    fix: str,
    **more: Any,
) -> Issue:
    """A finding about one rule; the message goes on after the rule."""
    return Issue(
        code,
        severity,
        f"{name_of(section, number, rule)}{message}",
        fix,
        pattern=rule.pattern,
        rule_number=number,
        section=section,
        **more,
    )


def name_of(section: str, number: int, rule: Rule) -> str:
    """`rule 3 'up/kernel' → (None, 'model')`, with its section."""
    kind = {"rules": "rule", "optimizer": "optimizer rule", "names": "name"}
    return f"{kind.get(section, 'activation rule')} {number} {rule.pattern!r}" + (
        f" → {rule.layout}"
    )


def key_code(section: str, pattern: str) -> str:
    """`layout_map.optimizer["kernel"]`."""
    owner = "layout_map" if section == "rules" else f"layout_map.{section}"
    return f'{owner}["{pattern}"]' if _plain(pattern) else f"{owner}[{pattern!r}]"


def axes_code(rule: Rule) -> str:
    """The layout of a rule as code: `(None, 'model')`, or `None`."""
    return "None" if rule.layout.is_replicated else str(rule.layout)


def _plain(pattern: str) -> bool:
    return not set(pattern) & set("\"\\'\n")


# ----------------------------------------------------------------------- axes


def _axes(rules: RuleSet) -> Iterator[Issue]:
    users: dict[str, list[tuple[str, int, Rule]]] = {}
    for section in SECTIONS:
        for number, rule in enumerate(getattr(rules, section), start=1):
            for axis in rule.layout.axis_names:
                users.setdefault(axis, []).append((section, number, rule))
    if rules.mesh is None:
        yield from _misspelt(users)
        return
    known = rules.mesh.axis_names
    text = f"the mesh {str(rules.mesh)!r} has no axis"
    for axis, found in users.items():
        if axis in known:
            continue
        near = (closest(axis, known) or known)[0]
        for section, number, rule in found:
            own = rule.layout.device_mesh
            if own is None or own == rules.mesh:
                key = key_code(section, rule.pattern)
                axes = str(rule.layout).replace(repr(axis), repr(near))
                fix = f"{key} = {axes}"
                yield about(
                    "LM003", "error", section, number, rule, f": {text} {axis!r}", fix
                )
    for axis in rules.batch:
        if axis not in known:
            near = (closest(axis, known) or known)[0]
            yield Issue("LM003", "error", f"batch: {text} {axis!r}", f'batch="{near}"')


def _misspelt(users: Mapping[str, Sequence[tuple[str, int, Rule]]]) -> Iterator[Issue]:
    """An axis of one rule that is almost the axis of several others."""
    for axis, found in users.items():
        if len(found) > 1 or len(axis) < 4:
            continue
        for other, more in users.items():
            alike = difflib.SequenceMatcher(None, axis, other).ratio()
            same_word = re.sub(r"\d", "", axis) == re.sub(r"\d", "", other)
            if len(more) > 1 and alike >= 0.8 and not same_word:
                section, number, rule = found[0]
                axes = str(rule.layout).replace(repr(axis), repr(other))
                yield about(
                    "LM004",
                    "warning",
                    section,
                    number,
                    rule,
                    f" is the only one with the axis {axis!r}; {len(more)} others have "
                    f"{other!r}",
                    f"{key_code(section, rule.pattern)} = {axes}",
                )


# ------------------------------------------------------------------- patterns


def _patterns(rules: RuleSet, section: str) -> Iterator[Issue]:
    mode, own = rules.match, getattr(rules, section)
    matcher = Matcher(own, mode)
    for number, rule in enumerate(own, start=1):
        if is_for_outputs(rule):
            continue
        example = sample(rule.pattern, mode)
        met = _met(matcher, example)
        if number - 1 not in met:  # a guess that failed
            example = witness(rule.pattern, mode)
            met = _met(matcher, example)
        if example == "":
            yield _dead(rules, section, number, rule)
            continue
        if _LINEN.match(rule.pattern):
            short = _LINEN.sub("^", rule.pattern)
            yield about(
                "LM006",
                "warning",
                section,
                number,
                rule,
                " begins with 'params/', which is no part of the paths of Linen's "
                "parameters",
                f"{key_code(section, short)} = {axes_code(rule)}",
            )
        yield from _written_for_another_mode(rules, section, number, rule)
        yield from _meets_others(rules, section, number - 1, met)


def _met(matcher: Matcher, path: str | None) -> Sequence[int]:
    """Positions of the rules that match a path, by the quicker way."""
    if not path:
        return ()
    sure, maybe = matcher.fold("/".join(map(matcher.fold_part, path.split("/"))))
    return matcher.refine(path, sure, maybe)


def _dead(rules: RuleSet, section: str, number: int, rule: Rule) -> Issue:
    anchored = _ANCHOR.search(rule.pattern) is not None
    free = re.sub(r"(?<!\\)[\^$]|\\A|\\Z", "", rule.pattern)
    begins = free.startswith("/")
    if begins:
        why, free = "no path begins with '/'", free.lstrip("/")
    elif free.endswith("/"):
        why, free = "no path ends with '/'", free.rstrip("/")
    elif anchored:
        why = "^ holds only where a path begins, and $ only where it ends"
    else:
        why = "the parts of a path are not empty"
    if begins and rules.match != "search":
        free = f".*/{free}"
    free = re.sub("/+", "/", free)
    code = "LM006" if anchored or begins else "LM005"
    return about(
        code,
        "error",
        section,
        number,
        rule,
        f" can match no path (match={rules.match!r}): {why}",
        f"{key_code(section, free)} = {axes_code(rule)}",
    )


def _written_for_another_mode(
    rules: RuleSet, section: str, number: int, rule: Rule
) -> Iterator[Issue]:
    pattern, key = rule.pattern, key_code(section, rule.pattern)
    if rules.match == "search":
        # A leading ".*" does nothing here; fullmatch needs it, and ends with the path.
        if not pattern.startswith(".*") or rule.layout.is_replicated:
            return
        longer = difference(pattern, "search", pattern, "fullmatch")
        if longer:
            fix = key_code(section, f"{pattern}$")
            yield about(
                "LM010",
                "info",
                section,
                number,
                rule,
                " begins with '.*', which match='search' does not need: with "
                "match='fullmatch', for which such patterns are written, it would not "
                f"match {longer!r}, as it does now",
                f"{fix} = {axes_code(rule)}  # if the path is to end there",
            )
    elif _PART_START.match(pattern):
        free = _PART_START.sub("(.*/)?", pattern, count=1)
        yield about(
            "LM010",
            "warning",
            section,
            number,
            rule,
            f" is written for match='search': with match={rules.match!r} it begins "
            "where the path begins, and no path begins with '/'",
            f"{key_code(section, free)} = {axes_code(rule)}  # in place of {key}",
        )


def _meets_others(
    rules: RuleSet, section: str, at: int, met: Iterable[int]
) -> Iterator[Issue]:
    """Others that match every path that this rule matches.

    Args:
        rules: the rules.
        section: the section.
        at: position of the rule.
        met: positions of those that match one of its paths.
    """
    own, mode = getattr(rules, section), rules.match
    rule = own[at]
    literal = is_literal(rule.pattern)
    if literal and (mode == "fullmatch" or rules.overlap == "error"):
        return  # it may be a whole path, whose exact key wins
    for other_at in met:
        other = own[other_at]
        if other_at == at or other.layout == rule.layout or is_for_outputs(other):
            continue
        wins = other_at > at if rules.overlap == "last" else other_at < at
        if rules.overlap != "error" and not wins:
            continue
        if difference(rule.pattern, mode, other.pattern, mode) != "":
            continue
        issue = _clash(rules, section, at, other_at, literal)
        if issue is not None:
            yield issue
            return


def _clash(
    rules: RuleSet, section: str, at: int, other_at: int, literal: bool
) -> Issue | None:
    own = getattr(rules, section)
    rule, other = own[at], own[other_at]
    ranks = rule.layout.rank, other.layout.rank
    apart = None not in ranks and ranks[0] != ranks[1]
    if other.rank == "skip" and ranks[0] != ranks[1]:
        return None  # it may pass over the leaves of this one
    if rules.overlap == "error" and rule.rank == "skip" and apart:
        return None
    named = name_of(section, other_at + 1, other)
    key = key_code(section, other.pattern)
    skip = f'layout_map.add(flm.Rule({other.pattern!r}, {axes_code(other)}, rank="skip"'
    if apart:
        return about(
            "LM009",
            "info" if literal else "error",
            section,
            at + 1,
            rule,
            f" is for arrays of {ranks[0]} dims, but {named}, which matches every path "
            f"that it matches, is for {ranks[1]}",
            f"del {key}; {skip}))",
        )
    if rules.overlap == "error":
        return about(
            "LM008",
            "error",
            section,
            at + 1,
            rule,
            f" clashes with {named}, which matches every path that it matches",
            f'make {other.pattern!r} narrower, or use overlap="first" with the narrow '
            "rule in front",
        )
    behind = "behind" if rules.overlap == "last" else "in front of"
    whole = f", but for a leaf whose whole path is {rule.pattern!r}" if literal else ""
    return about(
        "LM007",
        "info" if literal else "warning",
        section,
        at + 1,
        rule,
        f" decides nothing{whole}: {named} matches every path that it matches, and "
        f"wins (overlap={rules.overlap!r})",
        f"put {rule.pattern!r} {behind} {other.pattern!r}",
    )


def _ranks_of_state(rules: RuleSet) -> Iterator[Issue]:
    """Optimizer rules are about the dims of the parameter, as its own rule is."""
    for number, rule in enumerate(rules.optimizer, start=1):
        if rule.layout.rank is None or rule.rank == "skip":
            continue
        for own_number, own in enumerate(rules.rules, start=1):
            if own.layout.rank in (None, rule.layout.rank) or own.rank == "skip":
                continue
            if difference(own.pattern, rules.match, rule.pattern, rules.match) == "":
                yield about(
                    "LM009",
                    "error",
                    "optimizer",
                    number,
                    rule,
                    f" is for parameters of {rule.layout.rank} dims, and matches all "
                    f"of {name_of('rules', own_number, own)}, of {own.layout.rank}",
                    f"layout_map.optimizer.add(flm.Rule({rule.pattern!r}, "
                    f'{axes_code(rule)}, rank="skip"))',
                )
                break
