"""Rule, and Matcher, which finds the rules that match a path."""

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from flax_layoutmap._core.errors import RuleError
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._rules.patterns import Folding, View, key_chunks, view_of, words_of

Match = Literal["search", "match", "fullmatch"]
RankPolicy = Literal["error", "skip"]

# Parts of paths whose candidate rules a Matcher caches.
_MOST_PARTS = 4096


@dataclasses.dataclass(frozen=True, slots=True, init=False, repr=False)
class Rule:
    """One pattern and the layout of the leaves that it matches.

    Args:
        pattern: a regular expression over leaf paths, or a path itself.
        layout: anything that `TensorLayout` takes for its axes.
        rank: what to do with a matched leaf whose number of dims the layout does not
            fit: `"error"`, or `"skip"` (the rule does not apply to it). LoRA matrices
            and scales that the rule of their kernel matches too follow the kernel.
        optional: whether the rule may match no leaf, without a warning; for tables
            that serve several models.

    Raises:
        RuleError: the pattern is no regular expression, or the layout is none.

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
    _compiled: re.Pattern[str] = dataclasses.field(compare=False)
    # What paths that match must have.
    view: View = dataclasses.field(compare=False)

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
            compiled = re.compile(pattern)
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
                f"rule {pattern!r}: the layout {layout} keeps what a dim has (MATCH), "
                "which only relayout and distribute_tensor can; name the axes, or None"
            )
        self._put(pattern, layout, rank, optional, compiled, view_of(pattern))

    def _put(
        self,
        pattern: str,
        layout: TensorLayout,
        rank: RankPolicy,
        optional: bool,
        compiled: re.Pattern[str],
        view: View,
    ) -> "Rule":
        put = object.__setattr__
        put(self, "pattern", pattern)
        put(self, "layout", layout)
        put(self, "rank", rank)
        put(self, "optional", optional)
        put(self, "_compiled", compiled)
        put(self, "view", view)
        return self

    def on(self, mesh: Any) -> "Rule":
        """Return the rule with its layout on another mesh."""
        try:
            layout = self.layout.on(mesh)
        except RuleError as error:
            raise RuleError(f"rule {self.pattern!r}: {error}") from error
        if layout is self.layout:
            return self
        return self.with_layout(layout)

    def with_layout(self, layout: TensorLayout) -> "Rule":
        """Return the rule with another layout."""
        rule = object.__new__(Rule)  # without compiling the pattern again
        return rule._put(
            self.pattern, layout, self.rank, self.optional, self._compiled, self.view
        )

    def __repr__(self) -> str:
        more = "" if self.rank == "error" else f", rank={self.rank!r}"
        more += ", optional=True" if self.optional else ""
        return f"Rule({self.pattern!r}, {self.layout}{more})"

    def __reduce__(self) -> tuple[Any, ...]:
        options = {"rank": self.rank, "optional": self.optional}
        return functools.partial(Rule, **options), (self.pattern, self.layout)


_FOR_OUTPUTS = re.compile(r"[/.*+]output\$?\Z")


class Matcher:
    """Finds the rules that match a path: the only place where patterns are tried.

    Paths that fold to one (see `Folding`) are matched once; patterns that the parser
    does not understand are tried path by path. A pattern is tried only where the path
    has its rarest word, so that of ten thousand rules for single layers, a path tries
    those of its own layer.
    """

    def __init__(self, rules: Sequence[Rule], match: Match) -> None:
        # An exact key that may be skipped does not hide the patterns.
        self._exact = {
            rule.pattern: at for at, rule in enumerate(rules) if rule.rank == "error"
        }
        self._optional = {
            rule.pattern: at for at, rule in enumerate(rules) if rule.rank == "skip"
        }
        self._tests: list[Callable[[str], Any]] = [
            getattr(rule._compiled, match) for rule in rules
        ]
        self._others = tuple(
            at for at, rule in enumerate(rules) if not rule.view.understood
        )
        views = [rule.view for rule in rules]
        counts = Counter(word for view in views for word in view.words)
        # A word that a path must have, or "" → positions, with the texts that it must
        # hold: the longest, and the others.
        understood: dict[str, list[tuple[int, str, tuple[str, ...]]]] = {}
        for at, view in enumerate(views):
            if view.understood:
                word = min(view.words, key=counts.__getitem__, default="")
                first, *rest = view.texts or ("",)
                understood.setdefault(word, []).append((at, first, tuple(rest)))
        # The same for a part of a path; for "", those that any path may match.
        self._tried = functools.lru_cache(maxsize=_MOST_PARTS)(
            lambda part: [
                test
                for word in words_of(part) or [""]
                for test in understood.get(word, ())
            ]
        )
        chunks = {chunk for view in views for chunk in view.chunks}
        for rule in rules:
            chunks |= key_chunks(rule.pattern, rule.view.chunks)
        self.fold_part = Folding(chunks)

    def matching(self, path: str) -> tuple[int, ...]:
        """Positions of the rules that match this very path."""
        return self.matching_forms((path,))

    # A leaf below a section has its path in several forms (see `paths.forms`). A rule
    # applies if it matches one of them; of exact keys, the longest wins alone.

    def matching_forms(self, forms: Sequence[str]) -> tuple[int, ...]:
        """Positions of the rules that match a path in one of its forms."""
        return self.refine_forms(forms, *self.fold_forms(forms))

    def fold_forms(
        self, folded: Sequence[str]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Match all paths whose forms fold to these.

        Returns positions that match all of them, and positions that may match some,
        which `refine_forms` decides path by path.
        """
        for form in folded:
            if form in self._exact:
                return (self._exact[form],), ()
        tests, others = self._tests, self._others
        sure = {
            at
            for form in folded
            for part in ("", *form.split("/"))
            for at, first, rest in self._tried(part)
            if first in form
            and (not rest or all(text in form for text in rest))
            and tests[at](form)
        }
        if self._optional:
            sure.update(self._optional[f] for f in folded if f in self._optional)
            others = tuple(at for at in others if at not in sure)
        return tuple(sorted(sure)), others

    def refine_forms(
        self, forms: Sequence[str], sure: tuple[int, ...], maybe: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Positions that match this path, after `fold_forms` answered for its kind."""
        tests = self._tests
        found = [at for at in maybe if any(tests[at](form) for form in forms)]
        return tuple(sorted((*sure, *found))) if found else sure

    def fold_path(self, path: str) -> str:
        """A path with each of its parts folded."""
        return "/".join(map(self.fold_part, path.split("/")))


def is_for_outputs(rule: Rule) -> bool:
    """Whether a rule has Keras's spelling for the output of a layer, `…/output`.

    Keras's rules often write `.` for `/`, and `.*output` is for every layer.
    """
    return _FOR_OUTPUTS.search(rule.pattern) is not None


def reaching_the_end(
    rules: Sequence[Rule], match: Match, forms: Sequence[str]
) -> tuple[int, ...]:
    """Positions of the rules that match a path up to its end; an exact key wins alone.

    A rule for the output of `mlp` must not apply to that of `mlp/up`.
    """
    exact = {rule.pattern: at for at, rule in enumerate(rules) if rule.rank == "error"}
    for form in forms:
        if form in exact:
            return (exact[form],)
    return tuple(
        at
        for at, rule in enumerate(rules)
        if any(_reaches_the_end(rule, match, form) for form in forms)
    )


def _reaches_the_end(rule: Rule, match: Match, path: str) -> bool:
    starts = range(len(path) + 1) if match == "search" else (0,)
    return rule.pattern == path or any(
        rule._compiled.fullmatch(path, start) for start in starts
    )
