"""Deciding: rules and origins → one Decision per leaf."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from flax_layoutmap._core.errors import RuleError
from flax_layoutmap._core.layout import TensorLayout, clash, normal_spec
from flax_layoutmap._core.mesh import DeviceMesh, same_grid, same_places
from flax_layoutmap._resolve.metadata import Mark, mesh_axes
from flax_layoutmap._resolve.optimizer_state import Origin
from flax_layoutmap._rules.records import Decision, Reason, Shape
from flax_layoutmap._rules.rules import Matcher, Rule, RuleSet
from flax_layoutmap._tree.paths import Flat, forms, parameter_keys


@dataclasses.dataclass(frozen=True, slots=True)
class OwnerLayout:
    """The layout that a parameter has, for the optimizer state that follows it."""

    shape: Shape
    dims: tuple[tuple[str, ...], ...]
    mesh: DeviceMesh | None
    memory_kind: str | None = None
    forms: tuple[str, ...] = ()  # of its path; what optimizer rules see
    key: str = ""  # among all parameters of the tree


class _Laid(NamedTuple):
    """A layout on a leaf of some shape; texts go on after whose layout it is."""

    dims: tuple[tuple[str, ...], ...] = ()
    spec: PartitionSpec = PartitionSpec()
    mesh: DeviceMesh | None = None
    shard_shape: Shape | None = None
    fallback: str | None = None
    problem: str | None = None


class Decider:
    """Decides leaf after leaf; asks each question once."""

    def __init__(
        self,
        rule_set: RuleSet,
        matcher: Matcher,
        flat: Flat,
        shapes: Sequence[Shape],
        live: Mapping[int, TensorLayout] | None = None,
    ) -> None:
        self.rules, self.flat, self.shapes = rule_set, flat, shapes
        self.live = live or {}
        self.mesh = rule_set.mesh
        self.sizes = {} if self.mesh is None else self.mesh.axis_sizes
        self.matcher = matcher
        self.made: dict[Any, Decision] = {}
        self.laid: dict[tuple[TensorLayout, Shape], _Laid] = {}
        self.troubled = False

    def by_rules(self, skip: Sequence[Any] | None = None) -> list[Any]:
        """Decides all leaves by the rules; None where `skip` has something.

        The questions are folded paths with shapes; blocks with equal questions, as
        layers have them, get one list of answers. Sections whose prefixes fold to one
        ask the same.
        """
        shapes, flat = self.shapes, self.flat
        asked: dict[str, tuple[dict[Any, Decision], dict[Any, Any]]] = {}
        known: dict[Any, Decision] = {}
        blocks: dict[Any, tuple[Sequence[Shape], list[Any]]] = {}
        rows: list[Any] = []
        stop, prefixes = 0, ("", "")
        for start, folded, names in flat.blocks:
            if start >= stop:
                section = flat.section(start)
                stop, prefix = section.stop, section.seen
                prefixes = prefix, self.matcher.fold_path(prefix)
                known, blocks = asked.setdefault(prefixes[1], ({}, {}))
            own = shapes[start : start + len(names)]
            block = folded, names
            answered = blocks.get(block)
            if answered is not None and answered[0] == own:
                rows += answered[1]
                continue
            answers: list[Any] = []
            is_sure = skip is None
            for at, name in enumerate(names, start):
                if skip is not None and skip[at] is not None:
                    answers.append(None)
                    continue
                question = folded + name, shapes[at]
                row = known.get(question)
                if row is None:
                    row = self.ask(known, question, prefixes, at)
                    is_sure = is_sure and question in known
                answers.append(row)
            if is_sure:
                blocks[block] = own, answers
            rows += answers
        return rows

    def ask(
        self,
        known: dict[Any, Decision],
        question: tuple[str, Shape],
        prefixes: tuple[str, str],
        at: int,
    ) -> Decision:
        """Decides a leaf; notes the answer if it is one for the folded path.

        Args:
            known: question → answer.
            question: the folded path within the section, and the shape.
            prefixes: what leads to the section, plain and folded.
            at: position of the leaf.
        """
        (path, shape), matcher = question, self.matcher
        folded = forms(prefixes[1], path)
        sure, maybe = matcher.fold_forms(folded)
        if maybe:
            own = forms(prefixes[0], self.flat.paths[at])
            return self.decide(own, matcher.refine_forms(own, sure, maybe), shape)
        # A path that folds to a key is that key.
        row = known[question] = self.decide(folded, sure, shape)
        return row

    def by_origins(
        self,
        rows: list[Any],
        found: Sequence[Origin | None],
        owners: Mapping[str, OwnerLayout] | None,
        plain: Mapping[int, str],
    ) -> None:
        """Decides optimizer state by the parameter it belongs to.

        Args:
            rows: the decisions about the parameters; None for the optimizer state.
            found: the origin of each leaf of optimizer state; None for the others.
            owners: layouts of the parameters, where the tree does not hold them.
            plain: position → path that the rules know a parameter by, if another.
        """
        own = dict(owners or {})
        matcher = Matcher(self.rules.optimizer, self.rules.match)
        if owners is None:
            for at, key in parameter_keys(self.flat).items():
                row, seen = rows[at], self.flat.forms(at)
                if row is not None:
                    if at in plain and not matcher.matching_forms(seen):
                        seen = self.flat.forms(at, plain[at])
                    own[key] = OwnerLayout(
                        self.shapes[at], row.dims, row.mesh, row.memory_kind, seen, key
                    )
        for at, origin in enumerate(found):
            if origin is not None:
                rows[at] = self.follow(at, origin, own, matcher)

    # ------------------------------------------------------------ one decision

    def decide(
        self, own: tuple[str, ...], matched: tuple[int, ...], shape: Shape
    ) -> Decision:
        """The decision for a leaf of this shape that these rules match.

        Args:
            own: the forms of its path, or what they fold to.
            matched: positions of the rules.
            shape: its shape.
        """
        rules = self.rules.rules
        if len(matched) > 1:
            alone = _exact_alone(rules, matched, own)
            if len(alone) == 1 and fits(rules[alone[0]].layout, len(shape)):
                matched = alone
        exact = len(matched) == 1 and rules[matched[0]].pattern in own
        key = (matched, shape, exact)
        row = self.made.get(key)
        if row is None:
            row = self.made[key] = self._decide(matched, shape, exact)
        return row

    def _decide(self, matched: tuple[int, ...], shape: Shape, exact: bool) -> Decision:
        if not shape:
            return self.replicated("scalar", shape, matched)
        rules = self.rules.rules
        fitting = tuple(
            at
            for at in matched
            if rules[at].rank == "error" or fits(rules[at].layout, len(shape))
        )
        if not fitting:
            if self.rules.unmatched == "error":
                return self.trouble(
                    "no rule matches it; add one (None says: replicated), or use "
                    'unmatched="replicate"',
                    shape,
                )
            return self.replicated("no rule", shape, ())
        winner = winner_of(self.rules, fitting)
        if winner is None:
            listed = f"rules with different layouts match it: {_listed(rules, fitting)}"
            return self.trouble(f"{listed}; {_CONFLICT_FIX}", shape, fitting)
        reason: Reason = "exact key" if exact else "rule"
        layout = rules[winner].layout
        return self.lay(layout, shape, None, reason, rule=winner, matched=fitting)

    def lay(
        self,
        layout: TensorLayout,
        shape: Shape,
        name: str | None,
        reason: Reason,
        **more: Any,
    ) -> Decision:
        """Lays a leaf out, or says why that is impossible.

        Args:
            layout: the layout wanted.
            shape: shape of the leaf.
            name: whose layout it is, for messages; None where it is that of a rule.
            reason: the reason of the Decision.
            **more: other fields of the Decision.
        """
        matched = more.get("matched", ())
        key = layout, shape
        laid = self.laid.get(key)
        if laid is None:
            laid = self.laid[key] = self._lay(layout, shape)
        if name is None and (laid.problem or laid.fallback):
            name = f"rule {_named(self.rules.rules, more['rule'])}"
        if laid.problem:
            return self.trouble(f"{name}{laid.problem}", shape, matched)
        if laid.fallback:
            more["fallback"] = f"{name}{laid.fallback}"
        return Decision(
            laid.dims,
            laid.spec,
            laid.mesh,
            laid.shard_shape,
            reason,
            memory_kind=layout.memory_kind,
            **more,
        )

    def _lay(self, layout: TensorLayout, shape: Shape) -> _Laid:
        mesh, own = self.mesh or layout.device_mesh, layout.device_mesh
        if own is not None and mesh is not None and own != mesh:
            if not (same_grid(own, mesh) and (own.is_abstract or mesh.is_abstract)):
                return _Laid(
                    problem=f" is on another mesh, {own!r}, than the rules, {mesh!r}; "
                    "a tree lies on one mesh: leave the mesh of the layout out"
                )
        if not fits(layout, len(shape)):
            return _Laid(
                problem=f" has {_rank(layout)} dims, the leaf has {len(shape)}; "
                f"{_rank_fix(layout, shape)}"
            )
        dims = layout.dims(len(shape))
        if mesh is None:
            return _Laid(dims, normal_spec(dims))
        sizes = self.sizes if mesh is self.mesh else mesh.axis_sizes
        for axis in (axis for axes in dims for axis in axes):
            if axis not in sizes:
                return _Laid(problem=f": the mesh {str(mesh)!r} has no axis {axis!r}")
        dims, clashes = _divisible(dims, shape, sizes)
        if clashes and self.rules.indivisible == "error":
            return _Laid(problem=f": {'; '.join(clashes)}; {_INDIVISIBLE_FIX}")
        fallback = None
        if clashes:
            texts = [f"{text}, so that dim is replicated" for text in clashes]
            fallback = f": {'; '.join(texts)}"
        shard = tuple(
            size // math.prod(sizes[axis] for axis in axes)
            for size, axes in zip(shape, dims, strict=True)
        )
        return _Laid(dims, normal_spec(dims), mesh, shard, fallback)

    def replicated(
        self, reason: Reason, shape: Shape, matched: tuple[int, ...] = (), **more: Any
    ) -> Decision:
        shard = None if self.mesh is None else shape
        return Decision(
            ((),) * len(shape),
            PartitionSpec(),
            self.mesh,
            shard,
            reason,
            matched=matched,
            **more,
        )

    def trouble(
        self, problem: str, shape: Shape, matched: tuple[int, ...] = ()
    ) -> Decision:
        self.troubled = True
        return self.replicated("no rule", shape, matched, problem=problem)

    # -------------------------------------------------------- optimizer state

    def follow(
        self, at: int, origin: Origin, own: Mapping[str, OwnerLayout], matcher: Matcher
    ) -> Decision:
        """The decision for a leaf of an optimizer state."""
        shape = self.shapes[at]
        if not shape:
            return self.once(("scalar",), lambda: self.replicated("scalar", shape))
        if not own and origin.owner is None:
            # The state came without its parameters: its own path must do.
            return self.alone(at, matcher)
        owner, problem = self.owner_of(at, origin, own)
        if owner is None or problem is not None or origin.dims is None:
            return self.unknown(at, problem or origin.how, origin.owner)
        key = (origin, owner, shape)
        return self.once(key, lambda: self._follow(origin, owner, shape, matcher))

    def owner_of(
        self, at: int, origin: Origin, own: Mapping[str, OwnerLayout]
    ) -> tuple[OwnerLayout | None, str | None]:
        """The parameter that a leaf follows, or what stands against it.

        Where it may belong to several with different layouts, the layout that it has
        already tells which, if it has one.
        """
        names = [name for name in (origin.owner, *origin.others) if name is not None]
        found = {name: _owner(name, own) for name in names}
        owners = {name: owner for name, owner in found.items() if owner is not None}
        if not owners:
            return None, None
        if len({_laid(owner) for owner in owners.values()}) == 1:
            return next(iter(owners.values())), None
        live = self.live.get(at)
        fitting = {
            name: owner
            for name, owner in owners.items()
            if live is not None
            and origin.dims is not None
            and live.dims(len(origin.dims))
            == tuple(() if dim is None else owner.dims[dim] for dim in origin.dims)
        }
        if len({_laid(owner) for owner in fitting.values()}) == 1:
            return next(iter(fitting.values())), None
        listed = " or ".join(repr(name) for name in owners)
        return None, f"may belong to {listed}, which have different layouts"

    def unknown(self, at: int, why: str | None, owner: str | None = None) -> Decision:
        """Optimizer state of an unknown kind: it stays as it is, or is replicated."""
        shape, live = self.shapes[at], self.live.get(at)
        if live is not None and not live.is_replicated:
            name = "the layout that it has"
            return self.lay(live, shape, name, "own layout", owner=owner)
        return self.replicated(
            "unknown optimizer state", shape, fallback=why, owner=owner
        )

    def once(self, key: Any, make: Callable[[], Decision]) -> Decision:
        row = self.made.get(key)
        if row is None:
            row = self.made[key] = make()
        return row

    def _follow(
        self, origin: Origin, owner: OwnerLayout, shape: Shape, matcher: Matcher
    ) -> Decision:
        dims, rules = origin.dims or (), self.rules.optimizer
        seen = owner.forms or (origin.owner or "",)
        matched = tuple(
            at
            for at in matcher.matching_forms(seen)
            if owner.shape  # no rule lays out a scalar, nor what belongs to one
            if rules[at].rank == "error" or fits(rules[at].layout, len(owner.shape))
        )
        matched = _exact_alone(rules, matched, seen)
        axes, mesh, memory_kind = owner.dims, owner.mesh, owner.memory_kind
        parameter = owner.key or origin.owner
        name = f"the layout of its parameter {parameter!r}"
        reason: Reason = "follows parameter"
        more: dict[str, Any] = {}
        if matched:
            if _differ(rules, matched) and self.rules.overlap == "error":
                return self.trouble(
                    "optimizer rules with different layouts match its parameter "
                    f"{parameter!r}: {_listed(rules, matched)}; {_CONFLICT_FIX}",
                    shape,
                )
            winner = matched[-1] if self.rules.overlap == "last" else matched[0]
            layout = rules[winner].layout
            name = f"optimizer rule {_named(rules, winner)}"
            if not fits(layout, len(owner.shape)):
                return self.trouble(
                    f"{name} has {_rank(layout)} dims, its parameter {parameter!r} "
                    f"has {len(owner.shape)}; {_rank_fix(layout, owner.shape)}",
                    shape,
                )
            axes, reason = layout.dims(len(owner.shape)), "optimizer rule"
            mesh = layout.device_mesh or mesh
            memory_kind = layout.memory_kind or memory_kind
            more = {"rule": winner, "matched": matched}
        own_axes = tuple(() if dim is None else axes[dim] for dim in dims)
        layout = TensorLayout(own_axes, mesh, memory_kind=memory_kind)
        return self.lay(
            layout, shape, name, reason, owner=parameter, owner_dims=dims, **more
        )

    def alone(self, at: int, matcher: Matcher) -> Decision:
        """State without its parameters: the rules see its path from some part on.

        Only a rule that names every dim of the leaf applies: the leaf may have lost
        some dims of its parameter, and nothing tells which.
        """
        shape, parts = self.shapes[at], self.flat.forms(at)[0].split("/")
        why = "its parameters are not in the tree: pass params= and tx= to resolve"
        if math.prod(shape) <= 1:  # a placeholder
            return self.unknown(at, why)
        for rules, asked in (
            (self.rules.optimizer, matcher),
            (self.rules.rules, self.matcher),
        ):
            for start in range(len(parts)):
                matched = asked.matching("/".join(parts[start:]))
                exact = tuple(
                    m for m in matched if _names_every_dim(rules[m].layout, len(shape))
                )
                if exact and (
                    self.rules.overlap != "error" or not _differ(rules, exact)
                ):
                    winner = exact[-1] if self.rules.overlap == "last" else exact[0]
                    own = rules is self.rules.optimizer
                    reason: Reason = "optimizer rule" if own else "rule"
                    name = f"{'optimizer ' if own else ''}rule {_named(rules, winner)}"
                    layout = rules[winner].layout
                    more: dict[str, Any] = {"rule": winner, "matched": exact}
                    return self.lay(layout, shape, name, reason, **more)
        return self.unknown(at, why)

    # --------------------------------------------------------------- overrides

    def override(self, rows: list[Decision], dtypes: Sequence[Any]) -> None:
        """Random state is replicated, and so is what is no array."""
        fixed = set(self.flat.fixed)
        for kind in {type(dtype) for dtype in dtypes}:
            if not issubclass(kind, np.dtype):
                fixed.update(
                    at for at, dtype in enumerate(dtypes) if _is_key_or_none(dtype)
                )
        for at in fixed:
            reason: Reason = "not an array" if dtypes[at] is None else "random state"
            rows[at] = self.replicated(reason, self.shapes[at], rows[at].matched)

    def annotate(self, rows: list[Any]) -> None:
        """Applies what is written on the variables and boxes; None stays None."""
        for at, mark in self.flat.annotations.items():
            if rows[at] is not None:
                rows[at] = self.annotated(mark, rows[at], self.shapes[at])

    def annotated(self, mark: Mark, row: Decision, shape: Shape) -> Decision:
        """Layout metadata on a Variable or box against what the rules say."""
        if row.owner is not None or row.reason in _OF_STATE:
            return row  # a copy of the parameter's metadata, for another shape maybe
        if mark.problem is not None:
            return self.trouble(f"its metadata: {mark.problem}", shape, row.matched)
        if mark.layout is not None:
            return self.explicit(mark.layout, shape, row.matched)
        if mark.names is None or row.reason != "no rule" or row.matched or not shape:
            return row
        axes, lost = (), ()
        name = f"Flax metadata {_show(mark.names)}"
        try:
            axes, lost = mesh_axes(mark)
            if self.mesh is not None:
                off = [axis for dim in axes for axis in dim if axis not in self.sizes]
                axes = tuple(tuple(a for a in dim if a not in off) for dim in axes)
                lost = (*lost, *off)
            layout = TensorLayout((*axes, ...))
        except RuleError as error:
            return self.trouble(f"{name}: {error}", shape)
        if len(axes) > len(shape):
            problem = f"{name} names {len(axes)} dims, the leaf has {len(shape)}"
            return self.trouble(f"{problem}; {_ANNOTATION_FIX}", shape)
        decision = self.lay(layout, shape, name, "flax metadata")
        if decision.problem is not None:
            stacked = f"; {_STACKED_FIX}" if 0 < len(axes) < len(shape) else ""
            problem = f"{decision.problem}; {_RULE_WINS}{stacked}"
            return dataclasses.replace(decision, problem=problem)
        texts = [] if decision.fallback is None else [decision.fallback]
        if lost:
            texts.insert(0, f"{name}: no mesh axis for {', '.join(map(repr, lost))}")
        if 1 < len(axes) < len(shape) and any(decision.dims):
            texts.append(
                f"{name} names {len(axes)} of {len(shape)} dims, the first ones; "
                f"{_STACKED_FIX}"
            )
        # Linen itself leaves names without a rule whole.
        warns = bool(lost) and (mark.kind != "linen" or not any(decision.dims))
        fallback = "; ".join(texts) or None
        return dataclasses.replace(decision, fallback=fallback, warns=warns)

    def explicit(
        self, layout: TensorLayout, shape: Shape, matched: tuple[int, ...]
    ) -> Decision:
        """The layout of a Variable itself, on the mesh of the rules if there is one."""
        own, mesh = layout.device_mesh, self.mesh
        bare = layout if mesh is None else layout.on(None)
        name = f"the explicit layout {bare}"
        if own is None or mesh is None or same_places(own, mesh):
            return self.lay(bare, shape, name, "explicit layout", matched=matched)
        name += f" of another mesh, {own!r}"
        row = self.lay(bare, shape, name, "explicit layout", matched=matched)
        moved = (
            f"its layout is on {own!r}, the rules are on {mesh!r}, and so is this leaf "
            "now: write layout.on(mesh) with the mesh of the rules, or a layout "
            "without a mesh"
        )
        texts = [moved] if row.fallback is None else [moved, row.fallback]
        return dataclasses.replace(row, fallback="; ".join(texts), warns=True)


# Reasons of optimizer state whose parameter is not known.
_OF_STATE = ("unknown optimizer state", "own layout")

_CONFLICT_FIX = (
    'make one pattern narrower, use the path itself as key, or overlap="first" or '
    '"last"'
)
_INDIVISIBLE_FIX = (
    "change the size, use another layout (None for this dim), or "
    'indivisible="replicate"'
)
_RULE_WINS = "a rule for it wins over the metadata"
_ANNOTATION_FIX = f"name one axis or None for each dim; {_RULE_WINS}"
_STACKED_FIX = (
    "of layers stacked by nnx.vmap, transform_metadata={nnx.PARTITION_NAME: None} "
    "tells it the new dim"
)


def _divisible(
    dims: tuple[tuple[str, ...], ...], shape: Shape, sizes: dict[str, int]
) -> tuple[tuple[tuple[str, ...], ...], list[str]]:
    """The dims with those replicated that do not divide, and what clashed."""
    clashes: list[str] = []
    kept = list(dims)
    for dim, axes in enumerate(dims):
        if shape[dim] % math.prod(sizes[axis] for axis in axes):
            clashes.append(clash(dim, shape[dim], axes, sizes))
            kept[dim] = ()
    return tuple(kept), clashes


def _owner(path: str, own: Mapping[str, OwnerLayout]) -> OwnerLayout | None:
    """The parameter at a path, or the only one whose path ends so.

    A checkpoint says `dense/kernel` of what is `model/dense/kernel` in another tree.
    """
    found = own.get(path)
    if found is None:
        ends = [key for key in own if key.endswith(f"/{path}")]
        found = own[ends[0]] if len(ends) == 1 else None
    return found


def winner_of(rules: RuleSet, matched: Sequence[int]) -> int | None:
    """Which of the parameter rules that match a leaf applies; None: they conflict."""
    if rules.overlap == "error" and _differ(rules.rules, matched):
        return None
    return matched[-1] if rules.overlap == "last" else matched[0]


def _differ(rules: Sequence[Rule], at_each: Sequence[int]) -> bool:
    return len({rules[at].layout for at in at_each}) > 1


def _exact_alone(
    rules: Sequence[Rule], at_each: tuple[int, ...], own: tuple[str, ...]
) -> tuple[int, ...]:
    """The exact key among rules (one with `rank="skip"`), else all of them."""
    exact = {rules[at].pattern: at for at in at_each if rules[at].pattern in own}
    return next(((exact[form],) for form in own if form in exact), at_each)


def _named(rules: Sequence[Rule], at: int) -> str:
    return f"{at + 1} {rules[at].pattern!r} → {rules[at].layout}"


def _listed(rules: Sequence[Rule], at_each: Sequence[int]) -> str:
    return ", ".join(f"rule {_named(rules, at)}" for at in at_each)


def _show(names: Sequence[tuple[str, ...]]) -> str:
    """Names as a user writes them: `('embed', None, ('a', 'b'))`."""
    return repr(tuple(dim[0] if len(dim) == 1 else dim or None for dim in names))


def _is_key_or_none(dtype: Any) -> bool:
    return dtype is None or jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def fits(layout: TensorLayout, ndim: int) -> bool:
    return layout.rank == ndim or (layout.rank is None and ndim >= len(layout.axes) - 1)


def _names_every_dim(layout: TensorLayout, ndim: int) -> bool:
    """Whether a layout says of each of `ndim` dims where it lies.

    A spec such as `P(None, "model")` does so for a matrix; of a vector nobody knows
    which dim of a matrix it was.
    """
    if layout.rank is not None or layout.is_replicated:
        return layout.is_replicated or layout.rank == ndim
    return layout.axes[-1] is ... and len(layout.axes) - 1 == ndim > 1


def _laid(owner: OwnerLayout) -> Any:
    return owner.dims, owner.mesh, owner.memory_kind


def _rank(layout: TensorLayout) -> str:
    return (
        str(layout.rank)
        if layout.rank is not None
        else f"{len(layout.axes) - 1} or more"
    )


def _rank_fix(layout: TensorLayout, shape: Shape) -> str:
    """The real choices when a layout has another rank than a leaf, as code."""
    if layout.rank is None or layout.rank > len(shape):
        return 'narrow the pattern, or Rule(pattern, layout, rank="skip")'
    open_rank = TensorLayout((..., *layout.axes))
    return (
        f"for leading dims that are not sharded (a stacked layer) write {open_rank}, "
        'or pass over leaves of another rank with Rule(pattern, layout, rank="skip")'
    )
