"""Apply a layout to a shape, checking rank, mesh and divisibility."""

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from flax_layoutmap._core.axes import divisible, normal_spec
from flax_layoutmap._core.errors import did_you_mean
from flax_layoutmap._core.layout import TensorLayout, memory_kinds
from flax_layoutmap._core.mesh import DeviceMesh, same_grid
from flax_layoutmap._resolve.leaves import Leaves
from flax_layoutmap._rules.matching import MatchedRules, Rule
from flax_layoutmap._rules.records import Decision, Reason, Shape
from flax_layoutmap._rules.rules import RuleSet

CONFLICT_FIX = (
    'make one pattern narrower, use the path itself as key, or overlap="first" or '
    '"last"'
)
_UNMATCHED = (
    'no rule matches it; add one (None replicates it), or use unmatched="replicate"'
)
_INDIVISIBLE_FIX = (
    "change the size, use another layout (None for this dim), or "
    'indivisible="replicate"'
)


@dataclasses.dataclass(slots=True)
class Decisions:
    """The decisions made so far for the leaves of a tree, under one rule set."""

    rules: RuleSet
    leaves: Leaves
    rows: list[Decision] = dataclasses.field(default_factory=list)
    _shared: dict[Any, Decision] = dataclasses.field(default_factory=dict)

    def once(self, key: Any, make: Callable[[], Decision]) -> Decision:
        """The decision with this key; leaves that are decided alike share it."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def by_match(self, match: MatchedRules, shape: Shape) -> Decision:
        """The decision of the parameter rules that match a leaf."""
        return self.once((match, shape), lambda: self._by_match(match, shape))

    def _by_match(self, match: MatchedRules, shape: Shape) -> Decision:
        rules, matched = self.rules.rules, match.rules
        if match.key is not None and fits(rules[match.key].layout, len(shape)):
            matched = (match.key,)
        if not shape:
            return self.replicated("scalar", shape, matched)
        fitting = applicable(rules, matched, len(shape))
        if not fitting:
            if self.rules.unmatched == "error":
                return self.trouble(_UNMATCHED, shape)
            return self.replicated("no rule", shape)
        winner = self.rules.winner(rules, fitting)
        if winner is None:
            listed = f"rules with different layouts match it: {listing(rules, fitting)}"
            return self.trouble(f"{listed}; {CONFLICT_FIX}", shape, fitting)
        reason: Reason = "exact key" if matched == (match.key,) else "rule"
        name = f"rule {naming(rules, winner)}"
        more = {"rule": winner, "matched": fitting}
        return self.lay(rules[winner].layout, shape, name, reason, **more)

    def lay(
        self, layout: TensorLayout, shape: Shape, name: str, reason: Reason, **more: Any
    ) -> Decision:
        """Check a layout for a leaf; the decision records a problem, if there is one.

        `name` is the layout's name in messages.
        """
        mesh, matched = self.rules.mesh or layout.device_mesh, more.get("matched", ())
        if problem := _misfit(layout, shape, mesh):
            return self.trouble(f"{name}{problem}", shape, matched)
        dims, shard = layout.dims(len(shape)), None
        if mesh is not None:
            sizes = mesh.axis_sizes
            dims, clashes = divisible(shape, dims, sizes)
            if clashes and self.rules.indivisible == "error":
                problem = f"{name}: {'; '.join(clashes)}; {_INDIVISIBLE_FIX}"
                return self.trouble(problem, shape, matched)
            if clashes:
                texts = [f"{text}, so that dim is replicated" for text in clashes]
                more["fallback"] = f"{name}: {'; '.join(texts)}"
            parts = (math.prod(sizes[axis] for axis in axes) for axes in dims)
            shard = tuple(map(operator.floordiv, shape, parts))
        more["memory_kind"] = layout.memory_kind
        return Decision(dims, normal_spec(dims), mesh, shard, reason, **more)

    def replicated(
        self, reason: Reason, shape: Shape, matched: tuple[int, ...] = (), **more: Any
    ) -> Decision:
        mesh, dims, more["matched"] = self.rules.mesh, ((),) * len(shape), matched
        shard = None if mesh is None else shape
        return Decision(dims, PartitionSpec(), mesh, shard, reason, **more)

    def trouble(
        self, problem: str, shape: Shape, matched: tuple[int, ...] = ()
    ) -> Decision:
        """The decision for a leaf that does not fit the rules."""
        return self.replicated("no rule", shape, matched, problem=problem)


def _misfit(layout: TensorLayout, shape: Shape, mesh: DeviceMesh | None) -> str | None:
    """The problem with a layout on a mesh for a leaf of this rank; None if it fits."""
    own_mesh = layout.device_mesh
    if own_mesh is not None and mesh is not None and own_mesh != mesh:
        has_abstract = own_mesh.is_abstract or mesh.is_abstract
        if not (has_abstract and same_grid(own_mesh, mesh)):
            return (
                f" is on another mesh, {own_mesh!r}, than the rules, {mesh!r}; a tree "
                "has one mesh: leave out the mesh of the layout"
            )
    if not fits(layout, len(shape)):
        has = f" has {show_rank(layout)} dims, the leaf has {len(shape)}"
        return f"{has}; {rank_fix(layout, shape)}"
    if mesh is None:
        return None
    for axis in itertools.chain(*layout.dims(len(shape))):
        if axis not in mesh.axis_names:
            return f": the mesh {str(mesh)!r} has no axis {axis!r}"
    return unknown_memory(layout.memory_kind, mesh)


def unknown_memory(kind: str | None, mesh: DeviceMesh) -> str | None:
    """The problem with a kind of memory that the devices do not have."""
    if kind is None or mesh.is_abstract:
        return None
    device = mesh.devices.flat[0]
    kinds = memory_kinds(device)
    if not kinds or kind in kinds:
        return None
    return (
        f": devices of {device.platform!r} have no memory {kind!r}"
        f"{did_you_mean(kind, kinds)}; they have {', '.join(map(repr, kinds))}"
    )


def fits(layout: TensorLayout, ndim: int) -> bool:
    """Whether a layout fits an array with this many dims."""
    return layout.rank == ndim or (layout.rank is None and ndim >= len(layout.axes) - 1)


def picked(
    dims: Sequence[int | None], axes: Sequence[tuple[str, ...]]
) -> tuple[tuple[str, ...], ...]:
    """The axes of a leaf with these dims of another leaf, which has `axes`."""
    return tuple(() if dim is None else axes[dim] for dim in dims)


def applicable(
    rules: Sequence[Rule], matched: Sequence[int], ndim: int
) -> tuple[int, ...]:
    """The matched rules, without those that skip leaves of this rank."""
    return tuple(
        at
        for at in matched
        if rules[at].rank == "error" or fits(rules[at].layout, ndim)
    )


def naming(rules: Sequence[Rule], at: int) -> str:
    """A rule as messages show it: `1 'kernel' → ('data', None)`."""
    return f"{at + 1} {rules[at].pattern!r} → {rules[at].layout}"


def listing(rules: Sequence[Rule], at_each: Sequence[int]) -> str:
    """Several rules as messages show them."""
    return ", ".join(f"rule {naming(rules, at)}" for at in at_each)


def show_rank(layout: TensorLayout) -> str:
    """`2`, or `2 or more`."""
    if layout.rank is not None:
        return str(layout.rank)
    return f"{len(layout.axes) - 1} or more"


def rank_fix(layout: TensorLayout, shape: Shape) -> str:
    """The real choices when a layout has another rank than a leaf, as code."""
    if layout.rank is None or layout.rank > len(shape):
        return 'narrow the pattern, or Rule(pattern, layout, rank="skip")'
    open_rank = TensorLayout((..., *layout.axes))
    return (
        f"for leading dims that are not sharded (a stacked layer) write {open_rank}, "
        'or pass over leaves of another rank with Rule(pattern, layout, rank="skip")'
    )
