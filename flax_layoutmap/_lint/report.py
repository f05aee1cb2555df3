"""LintReport and LintIssue: the issues that lint found."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal, overload

from flax_layoutmap._core.errors import (
    ResolveError,
    RuleError,
    bullet_list,
    did_you_mean,
    visible,
)

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")


@dataclasses.dataclass(frozen=True, slots=True)
class LintIssue:
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
        url: its section in the documentation.
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
    url: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", f"docs/lint.md#{self.code.lower()}")

    def __str__(self) -> str:
        text = f"{self.code} {self.severity}: {self.message}\n  fix: {self.fix}"
        return visible(text, "\n")


class LintReport(Sequence[LintIssue]):
    """The issues that `flm.lint` found, a sequence that prints as a report.

    Errors come first; within a severity by code, and the largest first. It is equal to
    a list or tuple of the same issues, and false where there are none.

    Args:
        issues: what it holds.

    Example:
        >>> import flax_layoutmap as flm
        >>> flm.lint({"up/kernel": (None, "model")})
        no findings
    """

    __slots__ = ("_issues",)

    def __init__(self, issues: Iterable[LintIssue] = ()) -> None:
        ranks = {severity: rank for rank, severity in enumerate(SEVERITIES)}
        self._issues = tuple(
            sorted(issues, key=lambda one: (ranks[one.severity], one.code, -one.bytes))
        )

    @overload
    def __getitem__(self, at: int) -> LintIssue: ...
    @overload
    def __getitem__(self, at: slice) -> "LintReport": ...
    def __getitem__(self, at: int | slice) -> "LintIssue | LintReport":
        found = self._issues[at]
        return found if isinstance(found, LintIssue) else LintReport(found)

    def __len__(self) -> int:
        return len(self._issues)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LintReport | list | tuple):
            return NotImplemented
        return self._issues == tuple(other)

    def __hash__(self) -> int:
        return hash(self._issues)

    def __str__(self) -> str:
        if not self._issues:
            return "no findings"
        lines = [f"{issue}\n  see: {issue.url}" for issue in self._issues]
        counts = []
        for severity in SEVERITIES:
            count = sum(issue.severity == severity for issue in self._issues)
            if count:
                counts.append(f"{count} {severity if count == 1 else f'{severity}s'}")
        return "\n".join([*lines, ", ".join(counts)])

    __repr__ = __str__

    def problems(self, level: Severity = "error") -> list[str]:
        """The text of each issue that counts.

        Args:
            level: the lowest severity that counts.

        Raises:
            RuleError: `level` is no severity.
        """
        if level not in SEVERITIES:
            hint = did_you_mean(str(level), SEVERITIES)
            raise RuleError(f"level must be one of {SEVERITIES}, got {level!r}{hint}")
        counted = SEVERITIES[: SEVERITIES.index(level) + 1]
        found = [issue for issue in self if issue.severity in counted]
        return [str(issue).replace("\n", "\n  ") for issue in found]

    def raise_if_any(self, level: Severity = "error") -> None:
        """Raise a LayoutError if an issue counts, before anything is compiled.

        Args:
            level: the lowest severity that counts.

        Raises:
            ResolveError: there are issues that count; `.problems` has their texts.
            RuleError: `level` is no severity.

        Example:
            >>> import jax, flax_layoutmap as flm
            >>> layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("data=2,model=4"))
            >>> layout_map["kernel"] = (None, "model")
            >>> tree = {"kernel": jax.ShapeDtypeStruct((8, 16), "float32")}
            >>> flm.lint(layout_map.resolve(tree), max_replicated=0.02).raise_if_any()
        """
        texts = self.problems(level)
        if texts:
            count = "1 problem" if len(texts) == 1 else f"{len(texts)} problems"
            raise ResolveError(f"{count} in the layout:\n{bullet_list(texts)}", texts)
