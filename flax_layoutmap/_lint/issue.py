"""The issues of lint, and their subjects: a rule, or a group of similar leaves."""

import dataclasses
import re
from typing import Any, Literal, NamedTuple

from flax_layoutmap._core.errors import visible
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._rules.matching import Rule
from flax_layoutmap._rules.records import Decision, show_shape
from flax_layoutmap._rules.rules import SECTIONS, RuleSet

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")

NUMBER = re.compile(r"\d+")
_KINDS = {"rules": "rule", "optimizer": "optimizer rule", "names": "name"}


@dataclasses.dataclass(frozen=True, slots=True)
class LintIssue:
    """An issue that `flm.lint` reports.

    Attributes:
        code: for example `"LM101"`; the documentation has a section for each.
        severity: `"error"` (cannot work), `"warning"` (most likely a mistake) or
            `"info"` (good to know).
        message: the leaf, the rule and the problem.
        fix: how to fix it, as code where possible.
        path: path of the first leaf concerned, or None.
        pattern: the pattern of the rule, or None.
        rule_number: the rule's number within its section, from 1, or None.
        section: `"rules"`, `"activations"`, `"names"` or `"optimizer"`.
        leaves: number of leaves concerned.
        bytes: bytes of their global arrays.
    """

    code: str
    severity: Severity
    message: str
    fix: str
    path: str | None = None
    pattern: str | None = None
    rule_number: int | None = None
    section: str = "rules"
    leaves: int = 0
    bytes: int = 0

    def __str__(self) -> str:
        text = f"{self.code} {self.severity}: {self.message}\n  fix: {self.fix}"
        return visible(text, "\n")


class Numbered(NamedTuple):
    """A rule with its number; `str` gives `rule 3 'up/kernel' → (None, 'model')`."""

    section: str
    number: int
    rule: Rule

    def __str__(self) -> str:
        kind = _KINDS.get(self.section, "activation rule")
        return f"{kind} {self.number} {self.pattern!r} → {self.rule.layout}"

    @property
    def pattern(self) -> str:
        return self.rule.pattern

    @property
    def key(self) -> str:
        """`layout_map.optimizer["kernel"]`."""
        return self.key_of(self.pattern)

    def key_of(self, pattern: str) -> str:
        name = "" if self.section == "rules" else f".{self.section}"
        return f"layout_map{name}[{quoted(pattern)}]"

    def with_pattern(self, pattern: str) -> str:
        """The rule with another pattern, as code."""
        return f"{self.key_of(pattern)} = {as_code(self.rule.layout)}"


def numbered(rules: RuleSet, *sections: str) -> list[Numbered]:
    """The rules of these sections, or of all sections."""
    return [
        Numbered(section, number, rule)
        for section in sections or SECTIONS
        for number, rule in enumerate(getattr(rules, section), start=1)
    ]


def nth(rules: RuleSet, position: int, section: str = "rules") -> Numbered:
    """The rule at a position, from 0."""
    return Numbered(section, position + 1, getattr(rules, section)[position])


@dataclasses.dataclass(slots=True)
class Group:
    """Similar leaves with the same decision; path and shape are those of the first.

    `str` gives `layers/0/up/kernel (64,256) and 79 more alike`.
    """

    row: Decision
    path: str
    shape: tuple[int, ...]
    rule: Numbered | None = None  # the rule that decided
    leaves: int = 0
    bytes: int = 0  # of all their global arrays
    share: float = 0.0  # of the tree's bytes

    def __str__(self) -> str:
        more = f" and {self.leaves - 1} more alike" if self.leaves > 1 else ""
        return f"{self.path or 'the leaf'} {show_shape(self.shape)}{more}"

    @property
    def in_full(self) -> str:
        """`every device holds it in full (12.5% of the bytes)`."""
        each = "it" if self.leaves == 1 else f"all {self.leaves}"
        return f"every device holds {each} in full ({self.share:.1%} of the bytes)"


def key_for(path: str) -> str:
    """The key of a rule for leaves like this, as code: `layout_map["up/kernel"]`."""
    ending = "/".join(NUMBER.sub(r"\\d+", path).split("/")[-2:])
    quote = "r" if "\\" in ending else ""
    return f'layout_map[{quote}"{ending or ".*"}"]'


def as_code(layout: Any) -> str:
    """A layout, or the mesh axes of each dim, as code: `(None, 'model')` or `None`."""
    if not isinstance(layout, TensorLayout):
        layout = TensorLayout(tuple(layout))
    return "None" if layout.is_replicated else str(layout)


def quoted(pattern: str) -> str:
    """A pattern as code: `"up/kernel"`."""
    is_plain = not set(pattern) & set("\"\\'\n")
    return f'"{pattern}"' if is_plain else repr(pattern)


def issue(
    code: str,
    severity: Severity,
    message: str,
    fix: str,
    about: Group | Numbered | None = None,
) -> LintIssue:
    """An issue about leaves and the rule that decided them, or about a rule."""
    where: dict[str, Any] = {}
    if isinstance(about, Group):
        where = {"path": about.path, "leaves": about.leaves, "bytes": about.bytes}
        about = about.rule
    if about is not None:
        where |= {"pattern": about.pattern, "rule_number": about.number}
        where |= {"section": about.section}
    return LintIssue(code, severity, message, fix, **where)
