"""RuleSet, all rules and options of a LayoutMap as one frozen value; its warnings."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax

from flax_layoutmap._core.errors import (
    MeshError,
    ResolveError,
    RuleError,
    bullet_list,
    did_you_mean,
    warn,
)
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import DeviceMesh, as_mesh
from flax_layoutmap._rules.matching import Matcher, MatchMode, Rule

Overlap = Literal["error", "first", "last"]
Unmatched = Literal["replicate", "error"]
Indivisible = Literal["error", "replicate"]

SECTIONS = ("rules", "activations", "names", "optimizer")
OPTIONS = ("match", "overlap", "unmatched", "indivisible", "strict")


@dataclasses.dataclass(slots=True)
class Caches:
    """What a rule set remembers; not a part of its value."""

    matchers: dict[str, Matcher] = dataclasses.field(default_factory=dict)
    # Keys of emitted remarks; shared by the same rules on other meshes.
    announced: set[str] = dataclasses.field(default_factory=set)
    # Ids of the activation rules that matched.
    fired: set[int] = dataclasses.field(default_factory=set)
    # The last structures of trees and their Resolutions, newest first.
    resolved: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, eq=False)
class RuleSet:
    """All rules and options of a LayoutMap, frozen and hashable.

    Consumers hold this value: a LayoutMap that is edited later gives a new one.

    Attributes:
        rules: the parameter rules, in order; rule numbers in messages count from 1.
        mesh: the mesh, or None.
        match, overlap, unmatched, indivisible, strict: as for `LayoutMap`.
        batch: the mesh axes that the first dim of a batch lies on.
        activations: output layouts by module path.
        names: layouts that model code asks for by name.
        optimizer: rules for optimizer state, by the path of its parameter.
    """

    __module__ = "flax_layoutmap"
    rules: tuple[Rule, ...] = ()
    mesh: DeviceMesh | None = None
    match: MatchMode = "search"
    overlap: Overlap = "error"
    unmatched: Unmatched = "replicate"
    indivisible: Indivisible = "error"
    batch: tuple[str, ...] = ()
    strict: bool | None = None
    activations: tuple[Rule, ...] = ()
    names: tuple[Rule, ...] = ()
    optimizer: tuple[Rule, ...] = ()

    _key: tuple[Any, ...] = dataclasses.field(init=False, repr=False)
    _hash: int = dataclasses.field(init=False, repr=False)
    _caches: Caches = dataclasses.field(init=False, repr=False, default_factory=Caches)

    def __post_init__(self) -> None:
        put = functools.partial(object.__setattr__, self)
        put("mesh", as_mesh(self.mesh))
        put("batch", (self.batch,) if isinstance(self.batch, str) else (*self.batch,))
        for name in SECTIONS:
            put(name, _unique(make_rules(getattr(self, name))))
        check_options(**{name: getattr(self, name) for name in OPTIONS})
        fields = [field.name for field in dataclasses.fields(self) if field.init]
        put("_key", tuple(getattr(self, name) for name in fields))
        put("_hash", hash(self._key))

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, RuleSet) or self._hash != other._hash:
            return False
        return bool(self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return RuleSet, self._key

    def matching(self, path: str) -> tuple[int, ...]:
        """Return the positions (from 0) of the parameter rules that match a path.

        An exact key wins alone, unless it may be skipped (`rank="skip"`); otherwise
        every pattern that matches is listed.
        """
        return self.matcher.matching(path)

    @property
    def matcher(self) -> Matcher:
        """The matcher of the parameter rules."""
        return self.matcher_of("rules")

    def matcher_of(self, section: str) -> Matcher:
        """The matcher of a section, made on first use."""
        matchers = self._caches.matchers
        if section not in matchers:
            mode = "fullmatch" if section == "names" else self.match
            matchers[section] = Matcher(getattr(self, section), mode)
        return matchers[section]

    def layout_in(self, section: str, path: str) -> TensorLayout | None:
        """Look up a path in a section: exact key, then patterns; None for a miss."""
        rules, matched = getattr(self, section), self.matcher_of(section).match((path,))
        if matched.key is not None:
            return rules[matched.key].layout
        if not matched.rules:
            return None
        winner = self.winner(rules, matched.rules)
        if winner is None:
            listed = ", ".join(repr(rules[at].pattern) for at in matched.rules)
            raise RuleError(
                f"{path!r} is matched by rules with different layouts: {listed}; make "
                'one narrower, or use overlap="first" or "last"'
            )
        return rules[winner].layout

    def winner(self, section: Sequence[Rule], matched: Sequence[int]) -> int | None:
        """Pick the winner of the rules that match, in order; None: they conflict."""
        if self.overlap == "error":
            if len({section[at].layout for at in matched}) > 1:
                return None
        return matched[-1] if self.overlap == "last" else matched[0]

    def with_changes(self, **changes: Any) -> "RuleSet":
        """Return the rules with other options; warnings are still emitted once."""
        changed = dataclasses.replace(self, **changes)
        changed._caches.announced = self._caches.announced
        return changed

    def on(self, mesh: Any) -> "RuleSet":
        """Return the same rules on another mesh, anything that `DeviceMesh` accepts.

        `batch` keeps the axes that the new mesh has; if it has none, its first axis.
        """
        new = as_mesh(mesh)
        if new is None:
            raise MeshError("on(mesh) needs a mesh, got None")
        if new == self.mesh:
            return self
        sections = {
            name: tuple(rule.on(new) for rule in getattr(self, name))
            for name in SECTIONS
        }
        batch = tuple(axis for axis in self.batch if axis in new.axis_names)
        if not batch and (self.batch or self.mesh is None):
            batch = new.axis_names[:1]
        return self.with_changes(mesh=new, batch=batch, **sections)


_CHOICES: dict[str, tuple[Any, ...]] = {
    "match": get_args(MatchMode),
    "overlap": get_args(Overlap),
    "unmatched": get_args(Unmatched),
    "indivisible": get_args(Indivisible),
    "strict": (None, True, False),
}


def check_options(**options: Any) -> None:
    """Raise RuleError for a value that an option does not have."""
    for name, value in options.items():
        choices = _CHOICES[name]
        # Of the same type, as 0 == False.
        if not any(type(value) is type(known) and value == known for known in choices):
            words = [known for known in choices if isinstance(known, str)]
            hint = did_you_mean(value, words) if isinstance(value, str) else ""
            raise RuleError(f"{name} must be one of {choices}, got {value!r}{hint}")


def batch_axes(batch: Any, mesh: DeviceMesh | None) -> tuple[str, ...]:
    """The mesh axes of the first dim of a batch; None: the first axis of the mesh."""
    if batch is None:
        return () if mesh is None else mesh.axis_names[:1]
    axes = (batch,) if isinstance(batch, str) else tuple(batch)
    for axis in axes:
        if mesh is not None and axis not in mesh.axis_names:
            raise RuleError(
                f"batch names the axis {axis!r}, but the mesh {str(mesh)!r} has no "
                f"such axis{did_you_mean(str(axis), mesh.axis_names)}"
            )
        if not isinstance(axis, str):
            raise RuleError(f"batch names mesh axes, got {axis!r}")
    return axes


def make_rules(rules: Iterable[Any]) -> tuple[Rule, ...]:
    """Make Rules of `Rule` objects and `(pattern, layout)` pairs, in order."""
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
    seen: dict[str, int] = {}
    for number, rule in enumerate(rules, start=1):
        if (first := seen.setdefault(rule.pattern, number)) != number:
            raise RuleError(
                f"rules {first} and {number} have the same pattern {rule.pattern!r}: "
                "keep one"
            )
    return rules


class Remark(NamedTuple):
    """A warning, and what it is about: paths within the section, with the reason."""

    text: str
    keys: frozenset[str]


def announce(rules: RuleSet, remarks: Sequence[Remark]) -> None:
    """Emit warnings, each once for a rule set, and in one process of a job.

    A strict rule set raises ResolveError instead; one with `strict=False` is quiet.
    """
    if rules.strict is False or not remarks:
        return
    if rules.strict:
        texts = [remark.text for remark in remarks]
        raise ResolveError(f"strict: {_listed(texts)}", texts)
    texts = news(rules, remarks)
    if texts and _is_first(rules.mesh):
        warn(
            f"{_listed(texts, limit=10)}\n  (a rule None says that a leaf is "
            "to be replicated; strict=False is quiet, strict=True raises)"
        )


def _listed(texts: Sequence[str], limit: int = 50) -> str:
    count = "1 finding" if len(texts) == 1 else f"{len(texts)} findings"
    return f"{count}\n{bullet_list(texts, limit=limit)}"


def news(rules: RuleSet, remarks: Sequence[Remark]) -> list[str]:
    """The texts of the remarks about something that none was about before."""
    announced = rules._caches.announced
    new = [remark for remark in remarks if not remark.keys <= announced]
    announced.update(*(remark.keys for remark in new))
    return [remark.text for remark in new]


def _is_first(mesh: DeviceMesh | None) -> bool:
    if mesh is None or mesh.is_abstract:
        return True
    return mesh.devices.flat[0].process_index == jax.process_index()
