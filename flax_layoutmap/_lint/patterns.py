"""Lint of patterns: those that no path can match, and those that others override."""

import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from flax_layoutmap._core.axes import dim_axes
from flax_layoutmap._lint.about import about, axes_code, key_code, later, name_of
from flax_layoutmap._lint.examples import Examples
from flax_layoutmap._rules.issues import Issue
from flax_layoutmap._rules.languages import difference, is_literal, other_sample
from flax_layoutmap._rules.pattern_tree import WORD, NotUnderstood, parse, shape_of
from flax_layoutmap._rules.rules import (
    Match,
    Overlap,
    Rule,
    RuleSet,
    first_match,
    is_for_outputs,
)

# What was written for `search`, where it means "begins a part"; at the start of a path
# there is no slash.
_PART_START = re.compile(r"\((?:\?:)?(?:\^\|/|/\|\^)\)")
_ANCHOR = re.compile(r"(?<!\\)(?:\\\\)*(?:\^|\$|\\A|\\Z)")


def lint_patterns(rules: RuleSet, section: str, examples: Examples) -> Iterator[Issue]:
    """The findings about the patterns of one section."""
    for at, rule in enumerate(examples.rules):
        if "output" in rule.pattern and is_for_outputs(rule):
            continue
        number = at + 1
        example, likely = examples.of(at)
        if example == "":
            yield _dead(rules, section, number, rule)
            continue
        if rules.match != "search" or rule.pattern.startswith(".*"):
            yield from _written_for_another_mode(rules, section, number, rule, example)
        if example and likely and (rules.overlap != "first" or likely[0] < at):
            others = _others(rules, at, example, likely, examples)
            if others:
                yield from _meets(rules, section, at, others, examples)


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
    rules: RuleSet, section: str, number: int, rule: Rule, example: str | None
) -> Iterator[Issue]:
    pattern = rule.pattern
    if rules.match == "search":
        # A leading ".*" does nothing here; fullmatch needs it, and ends with the path.
        if _shards(rule.layout.axes) and _goes_on(rule, example):
            yield later(
                "LM010", "info", section, number, rule, _read_by_search, example
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
            f"{key_code(section, free)} = {axes_code(rule)}  # in place of "
            f"{key_code(section, pattern)}",
        )


@functools.lru_cache(maxsize=256)
def _shards(axes: tuple[Any, ...]) -> bool:
    return any(map(dim_axes, axes))


def _goes_on(rule: Rule, example: str | None) -> bool:
    """Whether there is a path as in `_going_on`."""
    if example and _ends_in_a_word(shape_of(rule.pattern)[0]):
        if first_match(rule, "fullmatch", example) is not None:
            return True  # and one more character is none of that word
    return bool(_going_on(rule, example))


@functools.lru_cache(maxsize=1024)
def _ends_in_a_word(shape: str) -> bool:
    """Whether all that a pattern of this shape matches, as a whole, ends in its word.

    And search matches what goes on behind it, too: there is no anchor.
    """
    try:
        node = parse(shape)
    except (NotUnderstood, RecursionError):
        return False
    ends = node[0] == "cat" and node[1] and node[1][-1][0] == "text"
    return bool(ends) and shape.endswith(WORD) and not _ANCHOR.search(shape)


def _read_by_search(section: str, rule: Rule, example: str | None) -> tuple[str, str]:
    """The text of a finding: what a rule matches, and how it would not."""
    longer, key = _going_on(rule, example), key_code(section, f"{rule.pattern}$")
    return (
        " begins with '.*', which match='search' does not need: with "
        "match='fullmatch', for which such patterns are written, it would not "
        f"match {longer!r}, as it does now",
        f"{key} = {axes_code(rule)}  # if the path is to end there",
    )


def _going_on(rule: Rule, example: str | None) -> str | None:
    """A path that a pattern which begins with `.*` matches, but not as a whole."""
    pattern = rule.pattern
    if pattern.endswith(".*") and "|" not in pattern and pattern[-3:-2] != "\\":
        return None
    # What comes behind a path has no part in its match, but where there is an anchor.
    for whole in (example[1:], example) if example else ():
        if whole[:1] in ("", "/") or _ANCHOR.search(pattern):
            continue
        if first_match(rule, "fullmatch", whole) is not None:
            char = next((char for char in "xkernalbiup_" if char not in pattern), "x")
            if first_match(rule, "fullmatch", whole + char) is None:
                return whole + char
    return difference(pattern, "search", pattern, "fullmatch")


def _others(
    rules: RuleSet, at: int, example: str, likely: Sequence[int], examples: Examples
) -> list[int]:
    """Those that match an example of a rule, and would have it laid out otherwise."""
    own, overlap = examples.rules, rules.overlap
    layout = own[at].layout
    if overlap != "error":
        likely = [other for other in likely if (other > at) == (overlap == "last")]
    return [
        other
        for other in likely
        if other != at and own[other].layout != layout
        if examples.is_asked(other, example) and not is_for_outputs(own[other])
    ]


def _meets(
    rules: RuleSet, section: str, at: int, likely: Sequence[int], examples: Examples
) -> Iterator[Issue]:
    """Others that match every path that this rule matches.

    Args:
        rules: the rules.
        section: the section.
        at: position of the rule.
        likely: positions of others that match one of its paths.
        examples: the section.
    """
    own, mode = examples.rules, rules.match
    rule = own[at]
    literal = is_literal(rule.pattern)
    if literal and (mode == "fullmatch" or rules.overlap == "error"):
        return  # it may be a whole path, whose exact key wins
    kept = None
    for other_at in likely:
        if not _holds_its_text(own[other_at], rule, mode):
            kept = _still_likely(at, likely, examples) if kept is None else kept
            other = own[other_at].pattern
            if other_at not in kept:
                continue
            if difference(rule.pattern, mode, other, mode) != "":
                continue
        issue = _clash(rules, section, at, other_at, literal)
        if issue is not None:
            yield issue
            return


def _still_likely(at: int, likely: Sequence[int], examples: Examples) -> Sequence[int]:
    """Those of others that match another path of a rule, too."""
    further = other_sample(examples.rules[at].pattern, examples.mode)
    kept = examples.among(further, [at, *likely]) if further else ()
    return kept if at in kept else likely


def _holds_its_text(other: Rule, rule: Rule, mode: Match) -> bool:
    """Whether another rule is for a text that every path of a rule has."""
    if mode != "search":
        return False
    core = other.pattern.removeprefix(".*")
    core = core if core.endswith("\\.*") else core.removesuffix(".*")
    return is_literal(core) and any(core in text for text in rule.view.texts)


def _clash(
    rules: RuleSet, section: str, at: int, other_at: int, literal: bool
) -> Issue | None:
    own, overlap = getattr(rules, section), rules.overlap
    rule, other = own[at], own[other_at]
    ranks = rule.layout.rank, other.layout.rank
    apart = None not in ranks and ranks[0] != ranks[1]
    if other.rank == "skip" and ranks[0] != ranks[1]:
        return None  # it may pass over the leaves of this one
    if overlap == "error" and rule.rank == "skip" and apart:
        return None
    given = other_at + 1, other, literal, overlap
    if apart:
        severity = "info" if literal else "error"
        return later("LM009", severity, section, at + 1, rule, _of_other_rank, given)
    if overlap == "error":
        return later("LM008", "error", section, at + 1, rule, _clashes, given)
    severity = "info" if literal else "warning"
    return later("LM007", severity, section, at + 1, rule, _decides_nothing, given)


# The texts of these: number and rule of the other one, whether the rule may be a whole
# path, and which one wins.
_Other = tuple[int, Rule, bool, Overlap]


def _of_other_rank(section: str, rule: Rule, given: _Other) -> tuple[str, str]:
    number, other, _, _ = given
    skip = f'layout_map.add(flm.Rule({other.pattern!r}, {axes_code(other)}, rank="skip"'
    return (
        f" is for arrays of {rule.layout.rank} dims, but "
        f"{name_of(section, number, other)}, which matches every path that it matches, "
        f"is for {other.layout.rank}",
        f"del {key_code(section, other.pattern)}; {skip}))",
    )


def _clashes(section: str, rule: Rule, given: _Other) -> tuple[str, str]:
    number, other, _, _ = given
    return (
        f" clashes with {name_of(section, number, other)}, which matches every path "
        "that it matches",
        f'make {other.pattern!r} narrower, or use overlap="first" with the narrow '
        "rule in front",
    )


def _decides_nothing(section: str, rule: Rule, given: _Other) -> tuple[str, str]:
    number, other, literal, overlap = given
    behind = "behind" if overlap == "last" else "in front of"
    whole = f", but for a leaf whose whole path is {rule.pattern!r}" if literal else ""
    return (
        f" decides nothing{whole}: {name_of(section, number, other)} matches every "
        f"path that it matches, and wins (overlap={overlap!r})",
        f"put {rule.pattern!r} {behind} {other.pattern!r}",
    )
