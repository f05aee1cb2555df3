"""RuleSet: all rules and options of a LayoutMap, frozen; and the ambient RuleSet."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Literal, TypeVar, get_args

import jax

from flax_layoutmap._core.errors import MeshError, RuleError, did_you_mean
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import DeviceMesh, as_mesh
from flax_layoutmap._rules.matching import Matcher, MatchMode, Rule

Overlap = Literal["error", "first", "last"]
Unmatched = Literal["replicate", "error"]
Indivisible = Literal["error", "replicate"]

SECTIONS = ("rules", "activations", "names", "optimizer")
OPTIONS = ("match", "overlap", "unmatched", "indivisible", "strict")

_T = TypeVar("_T")


def _memo(make: Any) -> Any:
    """A field for a cache of a rule set, which is not part of its value."""
    field = functools.partial(dataclasses.field, init=False, repr=False, compare=False)
    return field(default_factory=make)


@dataclasses.dataclass(frozen=True)
class RuleSet:
    """All rules and options of a LayoutMap, frozen and hashable.

    Consumers hold this value: a LayoutMap that is edited later gives a new one.

    Attributes:
        rules: the parameter rules, in order; rule numbers in messages count from 1.
        mesh: the mesh, or None.
        match, overlap, unmatched, indivisible, strict: as for `LayoutMap`.
        batch: the mesh axes that shard the first dim of a batch.
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

    # Keys of emitted remarks; shared by the same rules on other meshes.
    _announced: set[str] = _memo(set)
    # Ids of the activation rules that matched.
    _fired: set[int] = _memo(set)
    # The last structures of trees and their Resolutions, newest first.
    _resolved: list[tuple[Any, Any]] = _memo(list)

    def __post_init__(self) -> None:
        put = functools.partial(object.__setattr__, self)
        put("mesh", as_mesh(self.mesh))
        put("batch", (self.batch,) if isinstance(self.batch, str) else (*self.batch,))
        for name in SECTIONS:
            put(name, _unique(make_rules(getattr(self, name))))
        for name in OPTIONS:
            check_option(name, getattr(self, name))

    @functools.cached_property
    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, f.name) for f in dataclasses.fields(self) if f.init)

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._values)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return RuleSet, self._values

    def matching(self, path: str) -> tuple[int, ...]:
        """Return the positions (from 0) of the parameter rules that match a path.

        An exact key wins alone, unless it may be skipped (`rank="skip"`).
        """
        return self.matcher.matching(path)

    @property
    def matcher(self) -> Matcher:
        """The matcher of the parameter rules."""
        return self.matchers["rules"]

    @functools.cached_property
    def matchers(self) -> dict[str, Matcher]:
        """The matcher of each section."""
        modes: dict[str, MatchMode] = dict.fromkeys(SECTIONS, self.match)
        modes["names"] = "fullmatch"
        return {name: Matcher(getattr(self, name), modes[name]) for name in modes}

    def layout_in(self, section: str, path: str) -> TensorLayout | None:
        """Look up a path in a section: exact key, then patterns; None if not found."""
        rules, matched = getattr(self, section), self.matchers[section].match((path,))
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
        """Pick the winner of the matching rules, in order; None if they conflict."""
        if self.overlap == "error":
            if len({section[at].layout for at in matched}) > 1:
                return None
        return matched[-1] if self.overlap == "last" else matched[0]

    def with_changes(self, **changes: Any) -> "RuleSet":
        """Return the rules with other options; warnings are still emitted once."""
        changed = dataclasses.replace(self, **changes)
        object.__setattr__(changed, "_announced", self._announced)
        return changed

    def on(self, mesh: Any) -> "RuleSet":
        """Return the same rules on another mesh, anything that `DeviceMesh` accepts.

        `batch` keeps the axes that the new mesh has, or takes its first axis.
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


def check_option(name: str, value: Any) -> None:
    """Raise RuleError for an invalid value of an option."""
    choices = _CHOICES[name]
    # Types must match too, because 0 == False.
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


# ------------------------------- the ambient rules, the default mesh, split axes

_RULES: ContextVar[RuleSet | None] = ContextVar("rules", default=None)
_MESH: ContextVar[DeviceMesh | None] = ContextVar("default_mesh", default=None)
_SPLIT: ContextVar[tuple[str, ...]] = ContextVar("split", default=())

# Part of the key of JAX's own caches: a function under `jax.jit` that is called in a
# scope is traced again for other rules.
_TRACE_KEY: Any = jax.make_user_context(None)


def current_rules() -> RuleSet | None:
    return _RULES.get()


def trace_key() -> Any:
    """What the surrounding scopes add to the keys of JAX's caches, or None."""
    return _TRACE_KEY.value


def keyed(value: Any) -> contextlib.AbstractContextManager[Any]:
    """Add a hashable value to the keys of JAX's caches, within a block."""
    return _TRACE_KEY(value)


@contextlib.contextmanager
def _setting(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextlib.contextmanager
def using_rules(rules: RuleSet | None) -> Iterator[None]:
    """Make a rule set the ambient one inside the block; None leaves it as it is."""
    if rules is None:
        yield
        return
    # A trace depends on the rules only through their names.
    names = keyed(("names", rules)) if rules.names else contextlib.nullcontext()
    with _setting(_RULES, rules), names:
        yield


def split_axes() -> tuple[str, ...]:
    """The axes over which the surrounding `flm.accumulate` has split the batch."""
    return _SPLIT.get()


@contextlib.contextmanager
def split_over(axes: tuple[str, ...]) -> Iterator[None]:
    """Within the block layouts omit these axes: each device has different rows."""
    with _setting(_SPLIT, axes):
        yield


@contextlib.contextmanager
def default_mesh(mesh: Any) -> Iterator[DeviceMesh]:
    """Set the mesh of layouts that have no mesh, in a block or a decorated function.

    It takes precedence over `jax.set_mesh`, but not over a layout's own mesh or that of
    the surrounding `flm.jit(layout_map=…)`. It affects only this library, in the same
    thread or task, also inside of `jit` and with an abstract mesh. A function under
    `jax.jit` reads it when it is traced.

    Args:
        mesh: anything that `DeviceMesh` accepts.

    Returns:
        A context manager (and decorator) that yields the `DeviceMesh`.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> with flm.dtensor.default_mesh("data=8"):
        ...     x = flm.relayout(jax.numpy.ones(8), ("data",))
        >>> flm.dtensor.fetch_layout(x)
        TensorLayout(('data',), DeviceMesh('data=8'))

    Plain JAX: `with jax.set_mesh(mesh):`, which also affects arrays that JAX makes.
    """
    made = as_mesh(mesh)
    if made is None:
        raise MeshError("default_mesh takes a mesh, got None; use flm.DeviceMesh(...)")
    with _setting(_MESH, made):
        yield made


def get_default_mesh() -> DeviceMesh | None:
    """Return the mesh of the innermost `default_mesh`, or None.

    >>> import flax_layoutmap as flm
    >>> flm.dtensor.get_default_mesh() is None
    True
    """
    return _MESH.get()
