"""Checks of rules alone: patterns and axes that cannot work, overlapping rules.

A check takes `Rules` and yields findings; the table in `lint` has their texts.
"""

import difflib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flax_layoutmap._core.errors import RuleError, closest
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

_KINDS = {"rules": "rule", "optimizer": "optimizer rule", "names": "name"}

# The beginning of a part of a path, as written for `search`.
_PART_START = re.compile(r"\((?:\?:)?(?:\^\|/|/\|\^)\)")
_ANCHOR = re.compile(r"(?<!\\)(?:\\\\)*(?:\^|\$|\\A|\\Z)")


class Numbered(NamedTuple):
    """A rule with its number; as text `rule 3 'up/kernel' → (None, 'model')`."""

    section: str
    number: int
    rule: Rule

    def __str__(self) -> str:
        return f"{self.name} → {self.rule.layout}"

    @property
    def name(self) -> str:
        """`rule 3 'up/kernel'`."""
        kind = _KINDS.get(self.section, "activation rule")
        return f"{kind} {self.number} {self.pattern!r}"

    @property
    def pattern(self) -> str:
        return self.rule.pattern

    @property
    def key(self) -> str:
        """`layout_map.optimizer["kernel"]`."""
        return self._key_of(self.pattern)

    def with_pattern(self, pattern: str) -> str:
        """The rule with another pattern, as code."""
        return f"{self._key_of(pattern)} = {self.axes}"

    def _key_of(self, pattern: str) -> str:
        section = "" if self.section == "rules" else f".{self.section}"
        return f"layout_map{section}[{_quoted(pattern)}]"

    @property
    def quoted(self) -> str:
        """The pattern as code: `"up/kernel"`."""
        return _quoted(self.pattern)

    @property
    def axes(self) -> str:
        """The layout as code: `(None, 'model')`, or `None`."""
        return "None" if self.rule.layout.is_replicated else str(self.rule.layout)


def _quoted(pattern: str) -> str:
    is_plain = not set(pattern) & set("\"\\'\n")
    return f'"{pattern}"' if is_plain else repr(pattern)


class Refused(NamedTuple):
    """An entry that is no rule; as text with the reason."""

    number: int
    pattern: str | None
    error: RuleError
    section: str = "rules"

    def __str__(self) -> str:
        return f"rule {self.number}: {self.error}"


class Finding:
    """What a check found.

    Attributes:
        row: the name of its row in the table, `"LM101"` or `"LM105, on purpose"`.
        rule: the rule, `{rule}` in the texts of the row.
        leaf: the leaves, `{leaf}` in the texts.
        words: what else the texts name; and `severity`, where it differs from that of
            the row, or `section`, `path` and number of `leaves` where there is no
            `rule` or no `leaf`; and the rules `mended`, where a step costs less then.
    """

    __slots__ = ("row", "rule", "leaf", "words")

    def __init__(
        self,
        row: str,
        rule: Numbered | Refused | None = None,
        leaf: Any = None,
        **words: Any,
    ) -> None:
        self.row, self.rule, self.leaf, self.words = row, rule, leaf, words


class Example(NamedTuple):
    """A path that a rule matches, and the positions of the rules that match it.

    The path is `""` where there is none, and None where that is not known.
    """

    path: str | None
    matching: Sequence[int]


class Rules:
    """The rules to check, and the entries that are no rules."""

    def __init__(self, rules: RuleSet, refused: Sequence[Refused] = ()) -> None:
        self.all, self.refused = rules, refused
        state = Matcher(rules.optimizer, rules.match)
        self.matchers = {"rules": rules.matcher, "optimizer": state}

    @functools.cached_property
    def examples(self) -> list[tuple[Numbered, Example]]:
        """The rules for parameters and optimizer state, each with an example."""
        return [
            (one, self._example(one))
            for one in numbered(self.all, "rules", "optimizer")
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


def numbered(rules: RuleSet, *sections: str) -> list[Numbered]:
    """The rules of some sections; of all where none is named."""
    return [
        Numbered(section, number, rule)
        for section in sections or SECTIONS
        for number, rule in enumerate(getattr(rules, section), start=1)
    ]


def nth(rules: RuleSet, at: int, section: str = "rules") -> Numbered:
    """The rule at a position, from 0."""
    return Numbered(section, at + 1, getattr(rules, section)[at])


def read_pairs(given: Any) -> Rules:
    """Rules from pairs or a mapping, of which some may be invalid."""
    made: dict[str, Rule] = {}
    refused: list[Refused] = []
    entries = given.items() if isinstance(given, Mapping) else given
    for number, entry in enumerate(entries, start=1):
        pattern: Any = None
        try:
            if isinstance(entry, Rule):
                layout = entry
            elif isinstance(entry, tuple | list) and len(entry) == 2:
                pattern, layout = entry
            else:
                text = f"neither a (pattern, layout) pair nor a Rule: {entry!r}"
                raise RuleError(text)
            rule = layout if isinstance(layout, Rule) else Rule(pattern, layout)
            if made.setdefault(rule.pattern, rule) is not rule:
                raise RuleError(f"the pattern {rule.pattern!r} has a rule already")
        except RuleError as error:
            text = pattern if isinstance(pattern, str) else None
            refused.append(Refused(number, text, error))
    return Rules(RuleSet(tuple(made.values()), overlap="first"), refused)


def invalid(rules: Rules) -> Iterator[Finding]:
    """Entries that are no rules."""
    for one in rules.refused:
        bad_pattern = "is not a regular expression" in str(one.error)
        escaped = re.escape(one.pattern or "")
        yield Finding("LM001" if bad_pattern else "LM002", one, escaped=escaped)


# ------------------------------------------------------------------------------ axes


def axis_users(rules: RuleSet) -> dict[str, list[Numbered]]:
    """Mesh axis → the rules that name it."""
    users: dict[str, list[Numbered]] = {}
    for one in numbered(rules):
        for axis in one.rule.layout.axis_names:
            users.setdefault(axis, []).append(one)
    return users


def unknown_axes(rules: Rules) -> Iterator[Finding]:
    """Axes that the mesh does not have."""
    mesh = rules.all.mesh
    if mesh is None:
        return
    known, users = mesh.axis_names, axis_users(rules.all)
    for axis in {**users, **dict.fromkeys(rules.all.batch)}:
        if axis in known:
            continue
        near = (closest(axis, known) or known)[0]
        words: dict[str, Any] = {"mesh": str(mesh), "axis": axis, "near": near}
        for one in users.get(axis, ()):
            layout = one.rule.layout
            if layout.device_mesh is None or layout.device_mesh == mesh:
                axes = str(layout).replace(repr(axis), repr(near))
                yield Finding("LM003", one, axes=axes, **words)
        if axis in rules.all.batch:
            yield Finding("LM003, batch", **words)


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
                words = {"axis": axis, "other": other, "axes": axes}
                yield Finding("LM004", one, count=len(others), **words)


# -------------------------------------------------------------------------- patterns


def slow_patterns(rules: Rules) -> Iterator[Finding]:
    """Patterns that may take very long."""
    for one in numbered(rules.all):
        slow = slow_because(one.pattern)
        if slow is not None:
            yield Finding("LM011", one, slow=slow, mend=QUICKER)


def dead_patterns(rules: Rules) -> Iterator[Finding]:
    """Patterns that no path can match."""
    match = rules.all.match
    for one, example in rules.examples:
        if example.path != "":
            continue
        is_anchored = _ANCHOR.search(one.pattern) is not None
        free = re.sub(r"(?<!\\)[\^$]|\\A|\\Z", "", one.pattern)
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
        yield Finding(row, one, match=match, why=why, mend=one.with_pattern(free))


def for_another_match(rules: Rules) -> Iterator[Finding]:
    """Patterns that were written for another `match=`."""
    match = rules.all.match
    for one, (example, _) in rules.examples:
        pattern = one.pattern
        if example == "":
            continue
        if match != "search" and _PART_START.match(pattern):
            free = _PART_START.sub("(.*/)?", pattern, count=1)
            yield Finding("LM010", one, match=match, mend=one.with_pattern(free))
        # A leading ".*" does nothing in search; fullmatch needs it, and ends with it.
        if match == "search" and is_for_fullmatch(one.rule):
            longer = _longer_path(one.rule, example)
            if longer:
                mend = one.with_pattern(f"{pattern}$")
                yield Finding("LM010, search", one, example=longer, mend=mend)


def is_for_fullmatch(rule: Rule) -> bool:
    return rule.pattern.startswith(".*") and not rule.layout.is_replicated


def _longer_path(rule: Rule, example: str | None) -> str | None:
    """A path that a pattern which begins with `.*` matches, but not as a whole."""
    pattern = rule.pattern
    if pattern.endswith(".*") and "|" not in pattern and pattern[-3:-2] != "\\":
        return None
    # Without anchors, a longer path matches too, with `search`.
    for path in (example[1:], example) if example else ():
        if path[:1] in ("", "/") or _ANCHOR.search(pattern):
            continue
        char = next((char for char in "xkernalbiup_" if char not in pattern), "x")
        if first_match(rule, "fullmatch", path) is not None:
            if first_match(rule, "fullmatch", path + char) is None:
                return path + char
    return difference(pattern, "search", pattern, "fullmatch")


# ------------------------------------------------------------------ overlapping rules


def overridden(rules: Rules) -> Iterator[Finding]:
    """Rules of which another one matches every path that they match."""
    match, overlap = rules.all.match, rules.all.overlap
    for one, example in rules.examples:
        rule, at = one.rule, one.number - 1
        literal = is_literal(rule.pattern)
        if literal and (match == "fullmatch" or overlap == "error"):
            continue  # it may be a whole path, whose exact key wins
        for other_at in example.matching:
            other = nth(rules.all, other_at, one.section)
            wins = overlap == "error" or (other_at > at) == (overlap == "last")
            if other_at == at or not wins or other.rule.layout == rule.layout:
                continue
            if is_for_outputs(other.rule) or not _is_within(rule, other.rule, match):
                continue
            found = _clash(one, other, rules.all, literal)
            if found is not None:
                yield found
                break


def _is_within(rule: Rule, other: Rule, match: Match) -> bool:
    """Whether each path that a rule matches is certainly matched by another one."""
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
    if one.rule.optional and not apart:
        return None
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
    """Optimizer rules are for the dims of the parameter, as its own rule is."""
    known: set[int] = set()
    for own, example in rules.examples if rules.all.optimizer else ():
        rank = own.rule.layout.rank
        if own.section != "rules" or rank is None or own.rule.rank == "skip":
            continue
        if not example.path or own.number - 1 not in example.matching:
            continue
        for at in rules.matchers["optimizer"].matching(example.path):
            state = nth(rules.all, at, "optimizer")
            ranks = state.rule.layout.rank, rank
            if at in known or state.rule.rank == "skip" or ranks[0] in (None, rank):
                continue
            if _is_within(own.rule, state.rule, rules.all.match):
                known.add(at)
                yield Finding("LM009, state", state, own=own, ranks=ranks)
