"""Rule and RuleSet: frozen rules, patterns compiled once, the matching policies."""

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args

from flax_layoutmap._core.errors import MeshError, RuleError, did_you_mean
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import DeviceMesh, as_mesh
from flax_layoutmap._rules.patterns import Folding, View, key_chunks, view_of, words_of

Match = Literal["search", "match", "fullmatch"]
Overlap = Literal["error", "first", "last"]
Unmatched = Literal["replicate", "error"]
Indivisible = Literal["error", "replicate"]
RankPolicy = Literal["error", "skip"]


class Rule:
    """One pattern and the layout of the leaves that it matches.

    Args:
        pattern: a regular expression over leaf paths, or a path itself.
        layout: anything that `TensorLayout` takes for its axes.
        rank: what to do with a matched leaf whose number of dims the layout does not
            fit: `"error"`, or `"skip"` (the rule does not apply to it). LoRA matrices
            and scales that the rule of their kernel matches too follow the kernel.

    Raises:
        RuleError: the pattern is no regular expression, or the layout is none.

    Example:
        >>> import flax_layoutmap as flm
        >>> flm.Rule("mlp/(gate|up)/kernel", (None, "model"))
        Rule('mlp/(gate|up)/kernel', (None, 'model'))
    """

    __module__ = "flax_layoutmap"
    __slots__ = ("pattern", "layout", "rank", "_compiled", "view")
    pattern: str
    layout: TensorLayout
    rank: RankPolicy
    _compiled: re.Pattern[str]
    view: View  # what is known of the pattern without trying it

    def __init__(
        self, pattern: str, layout: Any, *, rank: RankPolicy = "error"
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
        try:
            layout = layout if type(layout) is TensorLayout else TensorLayout(layout)
        except RuleError as error:
            raise RuleError(f"rule {pattern!r}: {error}") from error
        if layout.has_match:
            raise RuleError(
                f"rule {pattern!r}: the layout {layout} keeps what a dim has (MATCH), "
                "which only relayout and distribute_tensor can; name the axes, or None"
            )
        put = object.__setattr__
        put(self, "pattern", pattern)
        put(self, "layout", layout)
        put(self, "rank", rank)
        put(self, "_compiled", compiled)
        put(self, "view", view_of(pattern))

    def on(self, mesh: Any) -> "Rule":
        """The same rule with its layout on another mesh (an own one is replaced)."""
        try:
            layout = self.layout.on(mesh)
        except RuleError as error:
            raise RuleError(f"rule {self.pattern!r}: {error}") from error
        return self if layout is self.layout else self._with(layout)

    def _with(self, layout: TensorLayout) -> "Rule":
        rule = object.__new__(Rule)
        put = object.__setattr__
        for name in ("pattern", "rank", "_compiled", "view"):
            put(rule, name, getattr(self, name))
        put(rule, "layout", layout)
        return rule

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Rule is immutable: cannot set {name!r}")

    def _key(self) -> tuple[Any, ...]:
        return (self.pattern, self.layout, self.rank)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rule) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash((self.pattern, self.layout, self.rank))

    def __repr__(self) -> str:
        rank = "" if self.rank == "error" else f", rank={self.rank!r}"
        return f"Rule({self.pattern!r}, {self.layout}{rank})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_rule, (self.pattern, self.layout, self.rank)


def _rebuild_rule(pattern: str, layout: TensorLayout, rank: RankPolicy) -> Rule:
    return Rule(pattern, layout, rank=rank)


@dataclasses.dataclass(frozen=True, eq=False)
class RuleSet:
    """All rules and options of a LayoutMap, frozen and hashable.

    Consumers hold this value: a LayoutMap that is edited later gives a new one.

    Attributes:
        rules: the parameter rules, in order; rule numbers in messages count from 1.
        mesh: the mesh, or None.
        match: how a pattern meets a path: `"search"` (anywhere in it), `"match"`
            (from its start), `"fullmatch"` (all of it).
        overlap: several rules with different layouts match one leaf: `"error"`, or
            the `"first"` or the `"last"` of them wins.
        unmatched: no rule matches a leaf: `"replicate"`, or `"error"`.
        indivisible: a dim does not divide by its axes: `"error"`, or `"replicate"`
            that dim (recorded as a fallback). A dim of size 1 is no error in the scale
            of a quantised kernel that the same rule lays out: a leaf beside one of 8
            bits or fewer, or called a scale or zero point, with its shape but for
            blocks and ones. Anywhere else it is, as the rule cannot be meant for it.
        batch: the mesh axes that the first dim of a batch lies on.
        strict: unused rules and large unmatched leaves: None warns, True is an error,
            False is quiet.
        activations: output layouts by module path.
        names: layouts that model code asks for by name.
        optimizer: rules for optimizer state, by the path of its parameter; they win
            over the parameter's own layout.
    """

    __module__ = "flax_layoutmap"
    rules: tuple[Rule, ...] = ()
    mesh: DeviceMesh | None = None
    match: Match = "search"
    overlap: Overlap = "error"
    unmatched: Unmatched = "replicate"
    indivisible: Indivisible = "error"
    batch: tuple[str, ...] = ()
    strict: bool | None = None
    activations: tuple[Rule, ...] = ()
    names: tuple[Rule, ...] = ()
    optimizer: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "mesh", as_mesh(self.mesh))
        batch = (self.batch,) if isinstance(self.batch, str) else tuple(self.batch)
        object.__setattr__(self, "batch", batch)
        for name in ("rules", "activations", "names", "optimizer"):
            object.__setattr__(self, name, _unique(make_rules(getattr(self, name))))
        check_options(
            match=self.match,
            overlap=self.overlap,
            unmatched=self.unmatched,
            indivisible=self.indivisible,
            strict=self.strict,
        )
        key = tuple(getattr(self, field.name) for field in dataclasses.fields(self))
        object.__setattr__(self, "_key", key)
        object.__setattr__(self, "_hash", hash(key))
        object.__setattr__(self, "_told", {})  # leaves → what was told of them
        object.__setattr__(self, "_fired", set())  # ids of activation rules in use
        object.__setattr__(self, "_matcher", None)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, RuleSet) or self._hash != other._hash:
            return False
        return bool(self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    def __getattr__(self, name: str) -> Any:
        # Only for the private slots that __post_init__ sets; typed as Any here.
        raise AttributeError(f"RuleSet has no attribute {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return RuleSet, self._key

    def matching(self, path: str) -> tuple[int, ...]:
        """Positions (from 0) of the parameter rules that match a path.

        An exact key wins alone, unless it may be skipped (`rank="skip"`); otherwise
        every pattern that matches is listed.
        """
        return self.matcher.matching(path)

    @property
    def matcher(self) -> "Matcher":
        """Asks the parameter rules (made on first use)."""
        made: Matcher | None = self._matcher
        if made is None:
            made = Matcher(self.rules, self.match)
            object.__setattr__(self, "_matcher", made)
        return made

    def with_changes(self, **changes: Any) -> "RuleSet":
        """The rules of this set, used otherwise: what was told of them is known."""
        changed = dataclasses.replace(self, **changes)
        object.__setattr__(changed, "_told", self._told)
        return changed

    def on(self, mesh: Any) -> "RuleSet":
        """The same rules on another mesh.

        `batch` keeps the axes that the new mesh has; if it has none, its first axis.

        Args:
            mesh: anything that `DeviceMesh` accepts.

        Raises:
            RuleError: a rule names an axis that the mesh does not have.
            MeshError: `mesh` is none.
        """
        new = as_mesh(mesh)
        if new is None:
            raise MeshError("on(mesh) needs a mesh, got None")
        if new == self.mesh:
            return self
        sections = {
            name: tuple(rule.on(new) for rule in getattr(self, name))
            for name in ("rules", "activations", "names", "optimizer")
        }
        batch = tuple(axis for axis in self.batch if axis in new.axis_names)
        if not batch and (self.batch or self.mesh is None):
            batch = new.axis_names[:1]
        return self.with_changes(mesh=new, batch=batch, **sections)


_CHOICES: dict[str, tuple[Any, ...]] = {
    "match": get_args(Match),
    "overlap": get_args(Overlap),
    "unmatched": get_args(Unmatched),
    "indivisible": get_args(Indivisible),
    "strict": (None, True, False),
}


def check_options(**options: Any) -> None:
    """Raises RuleError for an option value that is none of its choices."""
    for name, value in options.items():
        # By identity where not a string: 0 == False, but 0 is no choice.
        if not any(
            value is known or (isinstance(value, str) and value == known)
            for known in _CHOICES[name]
        ):
            words = [known for known in _CHOICES[name] if isinstance(known, str)]
            hint = did_you_mean(value, words) if isinstance(value, str) else ""
            raise RuleError(
                f"{name} must be one of {_CHOICES[name]}, got {value!r}{hint}"
            )


_FOR_OUTPUTS = re.compile(r"[/.*+]output\$?\Z")


class Matcher:
    """Which rules match which paths: the only place where patterns are tried.

    A question is asked once for all paths that fold to one (see `Folding`); patterns
    that are not understood are tried path by path. A pattern is tried where the path
    has its rarest word alone, so that of ten thousand rules for a layer each, one path
    tries those of its own layer.

    Attributes:
        fold_part: folds one part of a path, as `fold` expects it.
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
        self._tried = functools.cache(
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
        return self.refine(path, *self.fold(path))

    def fold(self, folded: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Asks about all paths whose parts fold to `folded`.

        Returns:
            Positions that match all of them, and positions that may match some: those
            are to be asked path by path, with `refine`.
        """
        if folded in self._exact:
            return (self._exact[folded],), ()
        tests = self._tests
        sure = {
            at
            for part in ("", *folded.split("/"))
            for at, first, rest in self._tried(part)
            if first in folded
            and (not rest or all(text in folded for text in rest))
            and tests[at](folded)
        }
        own = self._optional.get(folded)
        if own is None:
            return tuple(sorted(sure)), self._others
        others = tuple(at for at in self._others if at != own)
        return tuple(sorted({*sure, own})), others

    def refine(
        self, path: str, sure: tuple[int, ...], maybe: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Positions that match this path, after `fold` answered for its kind."""
        found = [at for at in maybe if self._tests[at](path)]
        return tuple(sorted((*sure, *found))) if found else sure

    def fold_path(self, path: str) -> str:
        """A path with each of its parts folded."""
        return "/".join(map(self.fold_part, path.split("/")))

    # A leaf below a section has its path in several forms (see `paths.forms`). A rule
    # is for the leaf if it matches one of them; of exact keys, the longest wins alone.

    def matching_forms(self, forms: Sequence[str]) -> tuple[int, ...]:
        """Positions of the rules that match a path in one of its forms."""
        if len(forms) == 1:
            return self.matching(forms[0])
        for form in forms:
            if form in self._exact:
                return (self._exact[form],)
        return tuple(sorted({at for form in forms for at in self.matching(form)}))

    def fold_forms(
        self, folded: Sequence[str]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """As `fold`, of all paths whose forms fold to these."""
        if len(folded) == 1:
            return self.fold(folded[0])
        for form in folded:
            if form in self._exact:
                return (self._exact[form],), ()
        answers = [self.fold(form) for form in folded]
        sure = {at for answer, _ in answers for at in answer}
        maybe = {at for _, answer in answers for at in answer} - sure
        return tuple(sorted(sure)), tuple(sorted(maybe))

    def refine_forms(
        self, forms: Sequence[str], sure: tuple[int, ...], maybe: tuple[int, ...]
    ) -> tuple[int, ...]:
        """As `refine`, after `fold_forms`."""
        if len(forms) == 1:
            return self.refine(forms[0], sure, maybe)
        found = {at for form in forms for at in self.refine(form, (), maybe)}
        return tuple(sorted({*sure, *found})) if found else sure


def is_for_outputs(rule: Rule) -> bool:
    """Whether a rule has Keras's spelling for the output of a layer, `…/output`.

    Keras's rules often write `.` for `/`, and `.*output` is for every layer.
    """
    return _FOR_OUTPUTS.search(rule.pattern) is not None


def reaching_the_end(
    rules: Sequence[Rule], match: Match, forms: Sequence[str]
) -> tuple[int, ...]:
    """Positions of the rules that match a path up to its end; an exact key wins alone.

    So that a rule for the output of `mlp` is none for that of `mlp/up`.

    Args:
        rules: the rules.
        match: `"search"` begins anywhere in the path, the others at its start.
        forms: the forms of the path.
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


def first_match(rule: Rule, match: Match, path: str) -> tuple[int, int] | None:
    """Where in a path its pattern begins and ends to match; None if it does not."""
    found = getattr(rule._compiled, match)(path)
    return None if found is None else found.span()


def make_rules(rules: Iterable[Any]) -> tuple[Rule, ...]:
    """Makes Rules of `Rule` objects and `(pattern, layout)` pairs, in order.

    Raises:
        RuleError: an entry is neither.
    """
    made = []
    for number, entry in enumerate(rules, start=1):
        if isinstance(entry, Rule):
            made.append(entry)
        elif isinstance(entry, tuple | list) and len(entry) == 2:
            made.append(Rule(entry[0], entry[1]))
        else:
            raise RuleError(
                f"rule {number} is neither a (pattern, layout) pair nor a flm.Rule: "
                f"{entry!r}"
            )
    return tuple(made)


def _unique(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The same rules; raises RuleError where two have one pattern."""
    seen: dict[str, int] = {}
    for number, rule in enumerate(rules, start=1):
        if seen.setdefault(rule.pattern, number) != number:
            raise RuleError(
                f"rules {seen[rule.pattern]} and {number} have the same pattern "
                f"{rule.pattern!r}: keep one"
            )
    return rules
