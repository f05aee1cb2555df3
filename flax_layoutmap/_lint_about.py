"""How findings speak of a rule: its name, and code that changes it."""

import re
from typing import Any

from flax_layoutmap._issues import Issue
from flax_layoutmap._rules import Rule

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
