"""Checks of rules alone: patterns and axes that cannot work, overlapping rules.

Each function takes `Rules` and yields findings; the table in `lint` has their texts.
"""

import difflib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flax_layoutmap._core.errors import RuleError, closest
from flax_layoutmap._lint.findings import Finding, Numbered, Refused
from flax_layoutmap._rules.automata import difference, is_literal, sample, witness
from flax_layoutmap._rules.matching import (
    Match,
    Matcher,
    Rule,
    first_match,
    is_for_outputs,
)
from flax_layoutmap._rules.pattern_cost import QUICKER, slow_because
from flax_layoutmap._rules.rules import SECTIONS, RuleSet

# What was written for `search`, where it means "begins a part"; at the start of a path
# there is no slash.
_PART_START = re.compile(r"\((?:\?:)?(?:\^\|/|/\|\^)\)")
_ANCHOR = re.compile(r"(?<!\\)(?:\\\\)*(?:\^|\$|\\A|\\Z)")


class Example(NamedTuple):
    """A path that a rule decides, or at least matches.

    Attributes:
        path: the path; `""` where there is none, and None where that is not known.
        matching: positions of the rules that match it; an exact key wins alone.
    """

    path: str | None
    matching: Sequence[int]


class Rules:
    """The rules that are checked.

    Attributes:
        all: the rule set.
        refused: what was given and is no rule.
        matchers: section → asks its rules.
    """

    def __init__(self, rules: RuleSet, refused: Sequence[Refused] = ()) -> None:
        self.all, self.refused = rules, refused
        state = Matcher(rules.optimizer, rules.match)
        self.matchers = {"rules": rules.matcher, "optimizer": state}

    def numbered(self, *sections: str) -> list[Numbered]:
        """The rules of some sections; of all where none is named."""
        return [
            Numbered(section, number, rule)
            for section in sections or SECTIONS
            for number, rule in enumerate(getattr(self.all, section), start=1)
        ]

    @functools.cached_property
    def examples(self) -> list[tuple[Numbered, Example]]:
        """The rules for parameters and optimizer state, each with an example."""
        return [
            (one, self._example(one))
            for one in self.numbered("rules", "optimizer")
            if "output" not in one.pattern or not is_for_outputs(one.rule)
        ]

    def _example(self, one: Numbered) -> Example:
        pattern, match = one.pattern, self.all.match
        matcher = self.matchers[one.section]
        path = sample(pattern, match)
        if path:
            matching = matcher.matching(path)
            if one.number - 1 in matching:
                return Example(path, matching)
        path = witness(pattern, match)
        return Example(path, matcher.matching(path) if path else ())


def read_pairs(given: Any) -> Rules:
    """Rules from pairs or a mapping, of which some may be none."""
    entries = given.items() if isinstance(given, Mapping) else given
    made: dict[str, Rule] = {}
    refused = []
    for number, (pattern, layout) in enumerate(_pairs(entries), start=1):
        try:
            if isinstance(layout, RuleError):
                raise layout
            rule = layout if isinstance(layout, Rule) else Rule(pattern, layout)
            if made.setdefault(rule.pattern, rule) is not rule:
                raise RuleError(f"the pattern {rule.pattern!r} has a rule already")
        except RuleError as error:
            text = pattern if isinstance(pattern, str) else None
            refused.append(Refused("rules", number, text, error))
    return Rules(RuleSet(tuple(made.values()), overlap="first"), refused)


def _pairs(entries: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    for entry in entries:
        if isinstance(entry, Rule):
            yield entry.pattern, entry
        elif isinstance(entry, tuple | list) and len(entry) == 2:
            yield entry[0], entry[1]
        else:
            text = f"neither a (pattern, layout) pair nor a Rule: {entry!r}"
            yield None, RuleError(text)


def no_rules(rules: Rules) -> Iterator[Finding]:
    """Entries that are no rules."""
    for one in rules.refused:
        bad_pattern = "is not a regular expression" in str(one.error)
        yield Finding("LM001" if bad_pattern else "LM002", one)


# ------------------------------------------------------------------------------ axes


def axis_users(rules: RuleSet) -> dict[str, list[Numbered]]:
    """Mesh axis → the rules that name it."""
    users: dict[str, list[Numbered]] = {}
    for one in Rules(rules).numbered():
        for axis in one.rule.layout.axis_names:
            users.setdefault(axis, []).append(one)
    return users


def unknown_axes(rules: Rules) -> Iterator[Finding]:
    """Axes that the mesh does not have."""
    mesh = rules.all.mesh
    if mesh is None:
        return
    known = mesh.axis_names

    for axis, users in axis_users(rules.all).items():
        near = (closest(axis, known) or known)[0]
        for one in users if axis not in known else ():
            layout = one.rule.layout
            if layout.device_mesh is None or layout.device_mesh == mesh:
                axes = str(layout).replace(repr(axis), repr(near))
                yield Finding("LM003", one, mesh=str(mesh), axis=axis, axes=axes)
    for axis in rules.all.batch:
        if axis not in known:
            near = (closest(axis, known) or known)[0]
            yield Finding("LM003, batch", mesh=str(mesh), axis=axis, near=near)


def misspelt_axes(rules: Rules) -> Iterator[Finding]:
    """An axis of one rule that is almost the axis of several others."""
    users = {} if rules.all.mesh is not None else axis_users(rules.all)
    for axis, (one, *more) in users.items():
        if more or len(axis) < 4:
            continue
        for other, others in users.items():
            alike = difflib.SequenceMatcher(None, axis, other).ratio()
            same_word = re.sub(r"\d", "", axis) == re.sub(r"\d", "", other)
            if len(others) > 1 and alike >= 0.8 and not same_word:
                axes = str(one.rule.layout).replace(repr(axis), repr(other))
                count = len(others)
                yield Finding(
                    "LM004", one, axis=axis, other=other, axes=axes, count=count
                )


# -------------------------------------------------------------------------- patterns


def slow_patterns(rules: Rules) -> Iterator[Finding]:
    """Patterns that may take very long."""
    for one in rules.numbered():
        slow = slow_because(one.pattern)
        if slow is not None:
            yield Finding("LM011", one, slow=slow, quicker=QUICKER)


def dead_patterns(rules: Rules) -> Iterator[Finding]:
    """Patterns that no path can match."""
    match = rules.all.match
    for one, example in rules.examples:
        if example.path != "":
            continue
        pattern = one.pattern
        is_anchored = _ANCHOR.search(pattern) is not None
        free = re.sub(r"(?<!\\)[\^$]|\\A|\\Z", "", pattern)
        begins = free.startswith("/")
        if begins:
            why = "no path begins with '/'"
        elif free.endswith("/"):
            why = "no path ends with '/'"
        elif is_anchored:
            why = "^ holds only where a path begins, and $ only where it ends"
        else:
            why = "the parts of a path are not empty"
        keeps_end = begins and match != "fullmatch"
        free = free.lstrip("/") if keeps_end else free.strip("/")
        free = re.sub("/+", "/", free)
        if begins and match != "search":
            free = f".*/{free}"
        row = "LM006" if is_anchored or begins else "LM005"
        yield Finding(row, one, match=match, why=why, free=one.key_of(free))


def for_another_match(rules: Rules) -> Iterator[Finding]:
    """Patterns that were written for another way of matching."""
    match = rules.all.match
    for one, (example, _) in rules.examples:
        rule = one.rule
        if example == "":
            continue
        if match != "search" and _PART_START.match(rule.pattern):
            free = _PART_START.sub("(.*/)?", rule.pattern, count=1)
            yield Finding("LM010", one, match=match, free=one.key_of(free))
        # A leading ".*" does nothing in search; fullmatch needs it, and ends with it.
        if match == "search" and rule.pattern.startswith(".*"):
            longer = None if rule.layout.is_replicated else _going_on(rule, example)
            if longer:
                end = one.key_of(f"{rule.pattern}$")
                yield Finding("LM010, search", one, longer=longer, end=end)


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


# ------------------------------------------------------ rules in each other's way


def overridden(rules: Rules) -> Iterator[Finding]:
    """Rules of which another one matches every path that they match."""
    match, overlap = rules.all.match, rules.all.overlap
    for one, example in rules.examples:
        rule, at = one.rule, one.number - 1
        literal = is_literal(rule.pattern)
        if literal and (match == "fullmatch" or overlap == "error"):
            continue  # it may be a whole path, whose exact key wins
        others = getattr(rules.all, one.section)
        for other_at in example.matching:
            other = others[other_at]
            wins = overlap == "error" or (other_at > at) == (overlap == "last")
            if other_at == at or not wins or other.layout == rule.layout:
                continue
            if is_for_outputs(other) or not _is_within(rule, other, match):
                continue
            beside = Numbered(one.section, other_at + 1, other)
            found = _clash(one, beside, rules.all, literal)
            if found is not None:
                yield found
                break


def _is_within(rule: Rule, other: Rule, match: Match) -> bool:
    """Whether each path that a rule matches is matched by another one, for certain."""
    if match == "search" and is_literal(other.pattern):
        if any(other.pattern in text for text in rule.view.texts):
            return True
    return difference(rule.pattern, match, other.pattern, match) == ""


def _clash(
    one: Numbered, other: Numbered, rules: RuleSet, literal: bool
) -> Finding | None:
    ranks = one.rule.layout.rank, other.rule.layout.rank
    apart = None not in ranks and ranks[0] != ranks[1]
    if other.rule.rank == "skip" and ranks[0] != ranks[1]:
        return None  # it may pass over the leaves of this one
    if rules.overlap == "error" and one.rule.rank == "skip" and apart:
        return None
    if rules.overlap == "error" and not apart:
        return Finding("LM008", one, other=other)
    but = f", but for a leaf whose whole path is {one.pattern!r}" if literal else ""
    return Finding(
        "LM009" if apart else "LM007",
        one,
        severity="info" if literal else None,
        other=other,
        ranks=ranks,
        overlap=rules.overlap,
        where="behind" if rules.overlap == "last" else "in front of",
        but=but,
    )


def ranks_of_state(rules: Rules) -> Iterator[Finding]:
    """Optimizer rules are about the dims of the parameter, as its own rule is."""
    known: set[int] = set()
    for own, example in rules.examples if rules.all.optimizer else ():
        rank = own.rule.layout.rank
        if own.section != "rules" or rank is None or own.rule.rank == "skip":
            continue
        if not example.path or own.number - 1 not in example.matching:
            continue
        for at in rules.matchers["optimizer"].matching(example.path):
            rule = rules.all.optimizer[at]
            if at in known or rule.rank == "skip" or rule.layout.rank in (None, rank):
                continue
            if _is_within(own.rule, rule, rules.all.match):
                known.add(at)
                state = Numbered("optimizer", at + 1, rule)
                ranks = rule.layout.rank, rank
                yield Finding("LM009, state", state, own=own, ranks=ranks)
