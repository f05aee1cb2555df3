"""What lint finds: one record per finding, and the table of all kinds of them."""

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

from flax_layoutmap._core.errors import visible

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")

# Code → what it is about. `docs/lint.md` has a section for each.
CODES = {
    "LM001": "a pattern is no regular expression",
    "LM002": "a layout is none, or a rule is given twice",
    "LM003": "an axis that the mesh does not have",
    "LM004": "an axis that looks misspelt",
    "LM005": "a pattern that no path can match",
    "LM006": "an anchor that no path can meet",
    "LM007": "a rule that another one always overrides",
    "LM008": "two rules that always clash",
    "LM009": "two rules for the same paths, for arrays of another rank",
    "LM010": "a pattern that was written for another way of matching",
    "LM011": "a pattern that may take very long",
    "LM101": "a rule that matches no leaf",
    "LM102": "large leaves that no rule matches",
    "LM103": "a dim that does not divide by its axes",
    "LM104": "a vocabulary that does not divide by its axes",
    "LM105": "large leaves that are replicated",
    "LM106": "optimizer state that is replicated, of sharded parameters",
    "LM107": "an axis of size 1",
    "LM108": "fewer heads than the axis has devices",
    "LM109": "shards below the tile of the hardware",
    "LM110": "a layout that looks swapped",
    "LM111": "a rule that decides no leaf that it matches",
    "LM112": "a mesh axis that shards nothing",
    "LM113": "a pattern that matches inside of a name",
    "LM114": "a leaf that does not fit the rules",
}


URLS = {code: f"docs/lint.md#{code.lower()}" for code in CODES}
_RANKS = {severity: rank for rank, severity in enumerate(SEVERITIES)}


class _Unwritten:
    """What writes the texts of a finding, where nobody has read them yet.

    Of a thousand findings a program mostly counts those that are errors.
    """

    __slots__ = ("_write",)
    _write: tuple[Any, ...]  # a function, and what it is given

    if not TYPE_CHECKING:  # it would tell type checkers that there is every attribute

        def __getattr__(self, name: str) -> str:
            if name not in ("message", "fix"):
                kind = type(self).__name__
                raise AttributeError(f"{kind!r} object has no attribute {name!r}")
            write, *given = self._write
            for field, text in zip(("message", "fix"), write(*given), strict=True):
                object.__setattr__(self, field, text)
            return object.__getattribute__(self, name)


@dataclasses.dataclass(frozen=True, slots=True)
class Issue(_Unwritten):
    """One finding of `flm.lint`.

    Attributes:
        code: `"LM101"`; see `docs/lint.md`.
        severity: `"error"` (it cannot work), `"warning"` (it is most likely not what is
            wanted), `"info"` (good to know).
        message: which leaf, which rule, what clashes.
        fix: what to do, as code where there is code for it.
        path: path of the first leaf concerned, or None.
        pattern: the pattern of the rule, or None.
        rule_number: the rule's number within its section, from 1, or None.
        section: `"rules"`, `"activations"`, `"names"` or `"optimizer"`.
        leaves: number of leaves concerned.
        bytes: bytes of their global arrays.
        url: where the documentation tells more.
    """

    __module__ = "flax_layoutmap"
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
    url: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", f"docs/lint.md#{self.code.lower()}")

    def __str__(self) -> str:
        text = f"{self.code} {self.severity}: {self.message}\n  fix: {self.fix}"
        return visible(text, "\n")


def in_order(issues: Iterable[Issue]) -> tuple[Issue, ...]:
    """Errors first; within a severity by code, and the largest first."""
    return tuple(
        sorted(
            issues,
            key=lambda issue: (
                _RANKS[issue.severity],
                issue.code,
                -issue.bytes,
            ),
        )
    )


def format_issues(issues: Iterable[Issue]) -> str:
    """Findings as lines for a terminal, and how many there are of each severity.

    Args:
        issues: what `flm.lint` returned.

    Example:
        >>> import flax_layoutmap as flm
        >>> print(flm.format_issues(flm.lint({"up/kernel": (None, "model")})))
        no findings
    """
    issues = tuple(issues)
    if not issues:
        return "no findings"
    lines = [f"{issue}\n  see: {issue.url}" for issue in issues]
    counts = []
    for severity, many in (
        ("error", "errors"),
        ("warning", "warnings"),
        ("info", "infos"),
    ):
        count = sum(issue.severity == severity for issue in issues)
        if count:
            counts.append(f"{count} {severity if count == 1 else many}")
    return "\n".join([*lines, ", ".join(counts)])
