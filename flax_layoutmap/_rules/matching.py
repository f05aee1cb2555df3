"""Rule, and Matcher, which finds the rules that match a path."""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

from flax_layoutmap._core.errors import RuleError
from flax_layoutmap._core.layout import TensorLayout

MatchMode = Literal["search", "match", "fullmatch"]
RankPolicy = Literal["error", "skip"]


@functools.lru_cache(maxsize=1 << 15)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


@dataclasses.dataclass(frozen=True, slots=True, init=False, repr=False)
class Rule:
    """One pattern and the layout of the leaves that it matches.

    Args:
        pattern: a regular expression over leaf paths, or a path itself.
        layout: anything that `TensorLayout` takes for its axes.
        rank: what to do if the layout does not fit the rank of a matched leaf:
            `"error"`, or `"skip"` (the rule does not apply to it).
        optional: whether the rule may match no leaf, without a warning; for tables
            that serve several models.

    Example:
        >>> import flax_layoutmap as flm
        >>> flm.Rule("mlp/(gate|up)/kernel", (None, "model"))
        Rule('mlp/(gate|up)/kernel', (None, 'model'))
    """

    __module__ = "flax_layoutmap"
    pattern: str
    layout: TensorLayout
    rank: RankPolicy
    optional: bool

    def __init__(
        self,
        pattern: str,
        layout: Any,
        *,
        rank: RankPolicy = "error",
        optional: bool = False,
    ) -> None:
        if not isinstance(pattern, str):
            raise RuleError(
                f"a pattern must be a string, got {pattern!r} of type "
                f"{type(pattern).__name__}"
            )
        try:
            _compiled(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise RuleError(
                f"the pattern {pattern!r} is not a regular expression: {error}; "
                "escape special characters with re.escape(...)"
            ) from error
        if rank not in get_args(RankPolicy):
            raise RuleError(f'rank must be "error" or "skip", got {rank!r}')
        if not isinstance(optional, bool):
            raise RuleError(f"optional must be True or False, got {optional!r}")
        try:
            layout = layout if type(layout) is TensorLayout else TensorLayout(layout)
        except RuleError as error:
            raise RuleError(f"rule {pattern!r}: {error}") from error
        if layout.has_match:
            raise RuleError(
                f"rule {pattern!r}: the layout {layout} has a MATCH dim, which only "
                "relayout and distribute_tensor support; name the axes, or None"
            )
        values = {"pattern": pattern, "layout": layout}
        for name, value in (values | {"rank": rank, "optional": optional}).items():
            object.__setattr__(self, name, value)

    def on(self, mesh: Any) -> "Rule":
        """Return the rule with its layout on another mesh."""
        try:
            layout = self.layout.on(mesh)
        except RuleError as error:
            raise RuleError(f"rule {self.pattern!r}: {error}") from error
        return self if layout is self.layout else self.with_layout(layout)

    def with_layout(self, layout: TensorLayout) -> "Rule":
        """Return the rule with another layout."""
        return Rule(self.pattern, layout, rank=self.rank, optional=self.optional)

    def __repr__(self) -> str:
        more = "" if self.rank == "error" else f", rank={self.rank!r}"
        more += ", optional=True" if self.optional else ""
        return f"Rule({self.pattern!r}, {self.layout}{more})"


# For how many paths a Matcher remembers the rules.
_MOST_PATHS = 1 << 16

_FOR_OUTPUTS = re.compile(r"[/.*+]output\$?\Z")


# A pattern can distinguish the digits that are written in it, and all digits if it has
# a range of some digits, a reference to a group, or a character code. Other ranges and
# classes of characters contain all digits or none.
_DIGITS = frozenset("0123456789")
_ANY_DIGIT = re.compile(r"(?<!\\)\[\^?0-9\]")
_TELLS_ALL = re.compile(r"[0-9]-|-[0-9]|\\[0-9xuUN]|\(\?P=")


def _digits_told(pattern: str) -> frozenset[str]:
    """The digits that a pattern may distinguish from others."""
    text = _ANY_DIGIT.sub("", pattern)
    return _DIGITS if _TELLS_ALL.search(text) else _DIGITS.intersection(text)


class MatchedRules(NamedTuple):
    """The positions of the rules that match a path, and of its exact key."""

    rules: tuple[int, ...] = ()
    key: int | None = None


class Matcher:
    """Finds the rules that match a path: the only place where patterns are tried.

    Every pattern sees the path within its section (`up/kernel`). A longer form of the
    path (`policy/up/kernel`, see `paths.forms`) is seen only by the patterns whose text
    names the section: `policy/up`, `^policy/`. With `to_end` a match must reach the end
    of the path: a rule for the output of `mlp` must not apply to `mlp/up`.
    """

    def __init__(
        self, rules: Sequence[Rule], match: MatchMode, *, to_end: bool = False
    ) -> None:
        self._rules = rules
        self._tests = [_test_of(rule.pattern, match, to_end) for rule in rules]
        self._positions = {rule.pattern: at for at, rule in enumerate(rules)}
        alike = _DIGITS.difference(*(_digits_told(rule.pattern) for rule in rules))
        self._alike = str.maketrans(dict.fromkeys(alike, min(alike, default="")))
        self._naming: dict[str, set[int]] = {}
        self._tried: dict[tuple[str, ...], set[int]] = {}

    def similar(self, paths: Sequence[str]) -> Sequence[str]:
        """A text for each path, equal for paths that the same rules match."""
        text = "\n".join(paths)
        # A path that contains the text of a class of digits may be an exact key.
        return paths if "[" in text else text.translate(self._alike).split("\n")

    def matching(self, path: str) -> tuple[int, ...]:
        """Positions of the rules that match exactly this path."""
        return self.match((path,)).rules

    def match(self, forms: Sequence[str]) -> MatchedRules:
        """The rules that match a path, given in all its forms, the longest first.

        The longest exact key wins alone, unless it may be skipped (`rank="skip"`).
        """
        keys = [self._positions[form] for form in forms if form in self._positions]
        for at in keys:
            if self._rules[at].rank == "error":
                return MatchedRules((at,), at)
        return MatchedRules(self.matching_patterns(forms), keys[0] if keys else None)

    def matching_patterns(self, forms: Sequence[str]) -> tuple[int, ...]:
        """Positions of all matching rules, also those that an exact key overrides."""
        alike = tuple([form.translate(self._alike) for form in forms])
        if alike not in self._tried:
            if len(self._tried) >= _MOST_PATHS:
                self._tried.clear()
            self._tried[alike] = self._try(alike)
        keys = {self._positions[form] for form in forms if form in self._positions}
        return tuple(sorted(self._tried[alike] | keys))

    def _try(self, forms: tuple[str, ...]) -> set[int]:
        """Positions of the rules whose pattern matches a form."""
        tests, path = self._tests, forms[-1]
        matched = {at for at, test in enumerate(tests) if test(path)}
        for form in forms[:-1]:
            naming = self._naming_of(form.removesuffix(path))
            matched |= {at for at in naming if tests[at](form)}
        return matched

    def _naming_of(self, prefix: str) -> set[int]:
        """Positions of the rules that name the section with this prefix."""
        if prefix not in self._naming:
            self._naming[prefix] = {
                at
                for at, rule in enumerate(self._rules)
                if names_section(rule.pattern, prefix)
            }
        return self._naming[prefix]


def _test_of(pattern: str, match: MatchMode, to_end: bool) -> Callable[[str], Any]:
    compiled = _compiled(pattern)
    if not to_end:
        return getattr(compiled, match)
    if match != "search":
        return compiled.fullmatch
    return lambda path: any(
        compiled.fullmatch(path, start) for start in range(len(path) + 1)
    )


def names_section(pattern: str, prefix: str) -> bool:
    r"""Whether the text of a pattern has one of the names that lead to a section.

    If such a name ends in a number, the pattern may match several numbers there.

    >>> names_section("^(?!head).*kernel", "model/")
    False
    >>> names_section(r"(policy|block_\d+)/up", "block_7/")
    True
    """
    return any(_in_text(name).search(pattern) for name in prefix.split("/") if name)


@functools.lru_cache(maxsize=1024)
def _in_text(name: str) -> re.Pattern[str]:
    """A regex that finds a name, possibly escaped, in the text of a pattern."""
    stem = name.rstrip("0123456789")
    text = "".join(rf"\\?{re.escape(letter)}" for letter in stem)
    if number := name[len(stem) :]:
        others = r"\\d|[\[(.]" if stem else r"\\d|\[0-9"
        text += rf"(?:{number}|{others})"
    start = r"(?:(?<!\w)|(?<=\\[AbBdDsSwW]))"
    return re.compile(rf"{start}{text}(?!\w)" if not number else rf"{start}{text}")


def is_for_outputs(rule: Rule) -> bool:
    """Whether a rule has Keras's spelling for the output of a layer, `…/output`.

    Keras's rules often write `.` for `/`, and `.*output` is for every layer.
    """
    return _FOR_OUTPUTS.search(rule.pattern) is not None
