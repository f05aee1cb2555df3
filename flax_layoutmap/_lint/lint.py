"""`lint`, which finds mistakes in a layout before it runs, and its list of checks."""

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from flax_layoutmap._core.errors import (
    ResolveError,
    RuleError,
    bullet_list,
    did_you_mean,
)
from flax_layoutmap._lint import leaves, matches
from flax_layoutmap._lint.issue import SEVERITIES, LintIssue, Severity
from flax_layoutmap._lint.leaves import swapped
from flax_layoutmap._lint.matches import Model
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.resolve import rule_set_of
from flax_layoutmap._rules.matching import Matcher, Rule
from flax_layoutmap._show.terminal import Shown, coloured_lines, wrapped

if TYPE_CHECKING:
    from rich.text import Text

# Code → its subject. `docs/lint.md` has a section for each.
CODES = {
    "LM001": "a pattern is not a regular expression",
    "LM002": "an invalid layout, or a pattern given twice",
    "LM003": "an axis that the mesh does not have",
    "LM101": "a rule that matches no leaf",
    "LM102": "large leaves that no rule matches",
    "LM103": "a dim that is not divisible by its axes",
    "LM104": "a vocabulary that is not divisible by its axes",
    "LM105": "large leaves that are replicated",
    "LM106": "optimizer state that is replicated, of sharded parameters",
    "LM108": "fewer heads than the axis has devices",
    "LM110": "a layout that looks swapped",
    "LM111": "a rule that decides no leaf that it matches",
    "LM112": "a mesh axis that nothing uses",
    "LM113": "a pattern that matches inside of a name",
    "LM114": "a leaf that does not fit the rules",
    "LM115": "more is replicated than is allowed",
}
# For every Resolution; other inputs: `matches.refused`, `matches.unknown_axes`.
_CHECKS: list[Callable[[Model], Iterator[LintIssue]]] = [
    matches.unused,
    matches.never_decides,
    matches.inside_names,
    leaves.unfit,
]
# Only for a Resolution on more than one device.
_CHECKS_OF_SEVERAL_DEVICES: list[Callable[[Model], Iterator[LintIssue]]] = [
    leaves.unmatched,
    leaves.indivisible,
    leaves.replicated,
    leaves.replicated_state,
    leaves.too_much_replicated,
    leaves.idle_axes,
    swapped,
]


class LintReport(Shown, tuple[LintIssue, ...]):
    """The issues that `flm.lint` found, a tuple that prints as a report.

    Sorted by severity (errors first), then by code, then by size (largest first).
    """

    def __new__(cls, issues: Iterable[LintIssue] = ()) -> "LintReport":
        ranks = {severity: rank for rank, severity in enumerate(SEVERITIES)}
        order = sorted(issues, key=lambda i: (ranks[i.severity], i.code, -i.bytes))
        return super().__new__(cls, order)

    def _lines(self, width: int | None) -> "Iterator[Text]":
        lines = [str(issue) for issue in self]
        severities = [issue.severity for issue in self]
        counts = [(severities.count(name), name) for name in SEVERITIES]
        listed = ", ".join(f"{n} {name}{'s' * (n > 1)}" for n, name in counts if n)
        lines.append(listed or "no findings")
        return coloured_lines(wrapped("\n".join(lines).splitlines(), width), ())

    def __repr__(self) -> str:
        return self.report()

    def problems(self, level: Severity = "error") -> list[str]:
        """The text of each issue of this severity or higher."""
        if level not in SEVERITIES:
            hint = did_you_mean(str(level), SEVERITIES)
            raise RuleError(f"level must be one of {SEVERITIES}, got {level!r}{hint}")
        counted = SEVERITIES[: SEVERITIES.index(level) + 1]
        issues = [issue for issue in self if issue.severity in counted]
        return [str(issue).replace("\n", "\n  ") for issue in issues]

    def raise_if_any(self, level: Severity = "error") -> None:
        """Raise a ResolveError that lists the issues of this severity or higher."""
        texts = self.problems(level)
        if texts:
            count = "1 problem" if len(texts) == 1 else f"{len(texts)} problems"
            raise ResolveError(f"{count} in the layout:\n{bullet_list(texts)}", texts)


def lint(
    x: Any, *, max_replicated: float | None = None, ignore: str | Iterable[str] = ()
) -> LintReport:
    """Find mistakes in rules, and in the layouts that they give a model.

    `docs/lint.md` describes each code. Nothing is compiled and no device is used.

    Args:
        x: a `Resolution` (`layout_map.resolve(model)`) for all checks, including one
            that does not fit (`ResolveError.resolution`); a `LayoutMap` or `RuleSet` to
            check only its axes; or `(pattern, layout)` pairs or a mapping, whose
            entries may be invalid.
        max_replicated: share (0 to 1) of the bytes that every device may hold in full;
            1 for data parallelism; None for no limit. Needs a Resolution.
        ignore: codes (`"LM104"`), and patterns that are searched in paths: issues about
            these leaves, and their bytes, are not counted.

    Returns:
        The issues, errors first. `print` shows them, and `.raise_if_any(level="error")`
        raises an error for them.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap("data=2,model=4")
        >>> layout_map["up/kernle"] = (None, "model")
        >>> tree = {"up": {"kernel": jax.ShapeDtypeStruct((8, 16), "float32")}}
        >>> [issue.code for issue in flm.lint(layout_map.resolve(tree))]
        ['LM101', 'LM102']
    """
    ignored = Ignored(ignore)
    if max_replicated is not None:
        _check_share(max_replicated, x)
    if isinstance(x, Resolution):
        is_ignored = functools.partial(ignored.is_about, x)
        model = Model(x, max_replicated, is_ignored)
        checks = _CHECKS + (_CHECKS_OF_SEVERAL_DEVICES if model.sizes else [])
        every = itertools.chain(
            matches.unknown_axes(x.rules), *(check(model) for check in checks)
        )
        issues = (i for i in every if i.path is None or not is_ignored(i.path))
    elif isinstance(x, dict | list | tuple):
        issues = matches.refused(x)
    else:
        issues = matches.unknown_axes(rule_set_of(x, "lint(x)"))
    return LintReport(issue for issue in issues if issue.code not in ignored.codes)


def _check_share(share: float, x: Any) -> None:
    if not isinstance(x, Resolution) or x.mesh is None:
        raise RuleError(
            "max_replicated needs a Resolution on a mesh, layout_map.resolve(model) or "
            f"resolution.on(mesh); got {x!r:.80}"
        )
    if not isinstance(share, int | float) or not 0 <= share <= 1:
        raise RuleError(f"max_replicated is a share, 0 to 1; got {share!r}")


class Ignored:
    """The codes and the path patterns in `ignore=`."""

    def __init__(self, ignore: str | Iterable[str]) -> None:
        given = [ignore] if isinstance(ignore, str) else list(ignore)
        for text in given:
            if not isinstance(text, str):
                wrong = f"ignore takes codes and patterns of paths, got {text!r}"
                raise RuleError(wrong)
        self.codes = {text for text in given if re.fullmatch(r"LM\d+", text)}
        for code in self.codes - set(CODES):
            raise RuleError(f"there is no code {code}{did_you_mean(code, CODES)}")
        patterns = [Rule(text, None) for text in given if text not in self.codes]
        self._matcher = Matcher(patterns, "search")

    def is_about(self, resolution: Resolution, path: str) -> bool:
        """Whether a pattern matches a leaf by any form of its path, as rules do."""
        position = resolution._positions.get(path)
        names = [(path,)]
        if position is not None:
            names = resolution._flat.forms_of_names(position)
        return any(self._matcher.match(forms).rules for forms in names)
