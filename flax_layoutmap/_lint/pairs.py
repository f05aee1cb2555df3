"""Rules as a user wrote them, of which some may be none."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flax_layoutmap._core.errors import RuleError
from flax_layoutmap._rules.issues import Issue
from flax_layoutmap._rules.rules import Rule, RuleSet


def read_pairs(given: Any) -> tuple[RuleSet, list[Issue]]:
    """Rules from pairs or a mapping, and what keeps the others from being rules."""
    entries = given.items() if isinstance(given, Mapping) else given
    made: dict[str, Rule] = {}
    issues: list[Issue] = []
    for number, entry in enumerate(_entries(entries), start=1):
        if isinstance(entry, RuleError):
            issues.append(_no_rule(entry, None, number))
            continue
        pattern, layout = entry
        try:
            rule = layout if isinstance(layout, Rule) else Rule(pattern, layout)
        except RuleError as error:
            issues.append(_no_rule(error, pattern, number))
            continue
        if made.setdefault(rule.pattern, rule) is not rule:
            error = RuleError(f"the pattern {rule.pattern!r} has a rule already")
            issues.append(_no_rule(error, pattern, number))
    return RuleSet(tuple(made.values()), overlap="first"), issues


def _entries(entries: Iterable[Any]) -> Iterator[tuple[Any, Any] | RuleError]:
    for entry in entries:
        if isinstance(entry, Rule):
            yield entry.pattern, entry
        elif isinstance(entry, tuple | list) and len(entry) == 2:
            yield entry[0], entry[1]
        else:
            yield RuleError(f"neither a (pattern, layout) pair nor a Rule: {entry!r}")


def _no_rule(error: RuleError, pattern: Any, number: int) -> Issue:
    bad_pattern = "is not a regular expression" in str(error)
    return Issue(
        "LM001" if bad_pattern else "LM002",
        "error",
        f"rule {number}: {error}",
        f"escape it: {re.escape(pattern)!r}"
        if bad_pattern
        else 'write (pattern, axes) with one entry per dim, such as (None, "model")',
        pattern=pattern if isinstance(pattern, str) else None,
        rule_number=number,
    )
