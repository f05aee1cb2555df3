"""How findings speak of a rule: its name, and code that changes it."""

import re
from collections.abc import Callable
from typing import Any

from flax_layoutmap._rules.issues import URLS, Issue, Severity
from flax_layoutmap._rules.rules import Rule

_QUOTED = re.compile(r"[\"\\'\n]")


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


def later(
    code: str,
    severity: Severity,
    section: str,
    number: int,
    rule: Rule,
    write: Callable[[str, Rule, Any], tuple[str, str]],
    given: Any = None,
) -> Issue:
    """The same, where the message and the fix are written once somebody reads them.

    For what a rule set may have a thousand of.

    Args:
        code: as for `about`, and so are the others.
        severity: its severity.
        section: the section of the rule.
        number: its number.
        rule: the rule.
        write: makes both texts, of the section, the rule, and what is given.
        given: what else there is to know.
    """
    issue: Any = object.__new__(Issue)
    put = object.__setattr__
    put(issue, "code", code)
    put(issue, "severity", severity)
    put(issue, "path", None)
    put(issue, "pattern", rule.pattern)
    put(issue, "rule_number", number)
    put(issue, "section", section)
    put(issue, "leaves", 0)
    put(issue, "bytes", 0)
    put(issue, "url", URLS[code])
    put(issue, "_write", (_written, number, section, rule, write, given))
    return issue


def _written(
    number: int,
    section: str,
    rule: Rule,
    write: Callable[[str, Rule, Any], tuple[str, str]],
    given: Any,
) -> tuple[str, str]:
    message, fix = write(section, rule, given)
    return f"{name_of(section, number, rule)}{message}", fix


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
    return _QUOTED.search(pattern) is None
