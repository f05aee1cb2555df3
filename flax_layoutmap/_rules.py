"""Rule and RuleSet: frozen rules, patterns compiled once, the matching policies."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args

from flax_layoutmap._errors import RuleError, did_you_mean
from flax_layoutmap._layout import TensorLayout
from flax_layoutmap._mesh import DeviceMesh, as_mesh
from flax_layoutmap._paths import fold_digits

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
            fit: `"error"`, or `"skip"` (the rule does not apply to it).

    Raises:
        RuleError: the pattern is no regular expression, or the layout is none.

    Example:
        >>> import flax_layoutmap as flm
        >>> flm.Rule("mlp/(gate|up)/kernel", (None, "model"))
        Rule('mlp/(gate|up)/kernel', (None, 'model'))
    """

    __module__ = "flax_layoutmap"
    __slots__ = ("pattern", "layout", "rank", "_compiled", "_view")
    pattern: str
    layout: TensorLayout
    rank: RankPolicy
    _compiled: re.Pattern[str]
    _view: tuple[bool, str] | None

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
        except re.error as error:
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
        put = object.__setattr__
        put(self, "pattern", pattern)
        put(self, "layout", layout)
        put(self, "rank", rank)
        put(self, "_compiled", compiled)
        put(self, "_view", None)

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
        for name in ("pattern", "rank", "_compiled", "_view"):
            put(rule, name, getattr(self, name))
        put(rule, "layout", layout)
        return rule

    @property
    def view(self) -> tuple[bool, str]:
        """What is known of the pattern without trying it (found on first use).

        Whether it treats all digits alike, and a text, with its digits folded, that
        every folded path it matches must hold (empty where nothing is known).
        """
        found = self._view
        if found is None:
            found = _view_of(self.pattern)
            object.__setattr__(self, "_view", found)
        return found

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
            that dim (recorded as a fallback).
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
        object.__setattr__(self, "_resolved", [])
        object.__setattr__(self, "_warned", set())

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

        An exact key wins alone; otherwise every pattern that matches is listed.
        """
        return Matcher(self.rules, self.match).matching(path)

    def on(self, mesh: Any) -> "RuleSet":
        """The same rules on another mesh.

        Args:
            mesh: anything that `DeviceMesh` accepts.

        Raises:
            RuleError: a rule names an axis that the mesh does not have.
        """
        new = as_mesh(mesh)
        if new is None or new == self.mesh:
            return self
        sections = {
            name: tuple(rule.on(new) for rule in getattr(self, name))
            for name in ("rules", "activations", "names", "optimizer")
        }
        batch = tuple(axis for axis in self.batch if axis in new.axis_names)
        batch = batch or new.axis_names[:1]
        return dataclasses.replace(self, mesh=new, batch=batch, **sections)


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
        if value not in _CHOICES[name]:
            hint = did_you_mean(value, _CHOICES[name]) if isinstance(value, str) else ""
            raise RuleError(
                f"{name} must be one of {_CHOICES[name]}, got {value!r}{hint}"
            )


class Matcher:
    """Which rules match which paths: the only place where patterns are tried.

    A question is asked once per path with its digits folded, where no pattern can
    tell the digits apart; the others are tried path by path.
    """

    def __init__(self, rules: Sequence[Rule], match: Match) -> None:
        self._exact = {rule.pattern: at for at, rule in enumerate(rules)}
        self._exact_folded = {fold_digits(pattern) for pattern in self._exact}
        self._tests: list[Callable[[str], Any]] = [
            getattr(rule._compiled, match) for rule in rules
        ]
        # (position, text that must occur, test) for patterns that see no digits, and
        # (position, text) for those that may see them.
        self._blind: list[tuple[int, str, Callable[[str], Any]]] = []
        self._seeing: list[tuple[int, str]] = []
        for at, rule in enumerate(rules):
            blind, text = rule.view
            if blind:
                self._blind.append((at, text, self._tests[at]))
            else:
                self._seeing.append((at, text))

    def matching(self, path: str) -> tuple[int, ...]:
        """Positions of the rules that match this very path."""
        if path in self._exact:
            return (self._exact[path],)
        return tuple(at for at, test in enumerate(self._tests) if test(path))

    def fold(self, folded: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Asks about all paths that fold to `folded`.

        Returns:
            Positions that match all of them, and positions that may match some (to
            be asked path by path with `refine`); None where a path may be a key
            itself, so that `matching` must be asked for each.
        """
        if folded in self._exact_folded:
            return None
        sure = tuple(
            at for at, text, test in self._blind if text in folded and test(folded)
        )
        maybe = tuple(at for at, text in self._seeing if text in folded)
        return sure, maybe

    def refine(
        self, path: str, sure: tuple[int, ...], maybe: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Positions that match this path, after `fold` answered for its kind."""
        found = [at for at in maybe if self._tests[at](path)]
        return tuple(sorted((*sure, *found))) if found else sure


# A {m,n} quantifier that re will read as one; other braces are literal.
_QUANTIFIER = re.compile(r"\{(?:\d+(?:,\d*)?|,\d+)\}")
# Escapes that treat all digits alike, inside and outside of a class.
_PLAIN_ESCAPES = frozenset("dDwWsSbBAZ")
_GROUP = re.compile(r"\(\?(?::|P<[A-Za-z_]+>|=|!|<=|<!|>)")


def _view_of(pattern: str) -> tuple[bool, str]:
    """Reads a pattern once; see `Rule.view`. What is not understood gives (False, "").

    Digits in a quantifier or in the class range `0-9` split nothing; every other
    digit may. The text is the longest run of plain characters that is neither in a
    group, nor optional, nor in one of several alternatives.
    """
    blind, depth, at = True, 0, 0
    run, texts, alternatives = "", [""], False
    while at < len(pattern):
        char, literal = pattern[at], ""
        width = 1
        if char == "\\":
            width = 2
            escaped = pattern[at + 1]
            if escaped.isalnum():
                if escaped not in _PLAIN_ESCAPES:
                    return False, ""  # \1, \x31, \u0031, \N{DIGIT ONE} …
            else:
                literal = escaped
        elif char == "[":
            end = _class_end(pattern, at)
            if end is None:
                return False, ""
            blind = blind and _class_is_blind(pattern[at + 1 : end])
            width = end + 1 - at
        elif char == "{":
            quantifier = _QUANTIFIER.match(pattern, at)
            if quantifier is None:
                return False, ""
            run, width = run[:-1], len(quantifier.group())
        elif char == "(":
            depth += 1
            if pattern.startswith("(?", at):
                group = _GROUP.match(pattern, at)
                if group is None:
                    return False, ""  # flags, comments, conditions, back-references
                width = len(group.group())
        elif char == ")":
            depth -= 1
        elif char == "}":
            return False, ""
        elif char in "*?":
            run = run[:-1]
        elif char == "|":
            alternatives = alternatives or depth == 0
        elif char not in "+.^$":
            if char.isdigit():
                blind = False
            literal = char
        if literal and depth == 0:
            run += literal
        else:
            texts.append(run)
            run = ""
        at += width
    texts.append(run)
    text = "" if alternatives else max(texts, key=len)
    return blind, fold_digits(text)


def _class_end(pattern: str, start: int) -> int | None:
    """Position of the `]` that closes the class opened at `start`."""
    at = start + 1
    if pattern.startswith("^", at):
        at += 1
    if pattern.startswith("]", at):
        at += 1
    while at < len(pattern):
        if pattern[at] == "\\":
            at += 2
        elif pattern[at] == "]":
            return at
        else:
            at += 1
    return None


def _class_is_blind(body: str) -> bool:
    """Whether a character class holds all digits or none.

    A range whose ends are no digits holds all of them or none, as the digits are
    neighbours; so only a digit, other than in `0-9`, can split them.
    """
    at = 0
    while at < len(body):
        if body.startswith("0-9", at):
            at += 3
            continue
        for end in (False, True):
            char = body[at : at + 1]
            if char == "\\":
                char = body[at + 1]
                if char.isalnum() and char not in _PLAIN_ESCAPES:
                    return False
                at += 1
            elif char.isdigit():
                return False
            at += 1
            # A "-" with something behind it makes a range: read its other end too.
            if end or body[at : at + 1] != "-" or at + 1 >= len(body):
                break
            at += 1
    return True


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
