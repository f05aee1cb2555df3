"""Deciding: rules and origins → one Decision per leaf."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from flax_layoutmap._flax_internals import metadata_of
from flax_layoutmap._layout import TensorLayout, clash, normal_spec
from flax_layoutmap._mesh import DeviceMesh
from flax_layoutmap._optimizer_state import Origin
from flax_layoutmap._paths import Flat
from flax_layoutmap._records import Decision, Reason, Shape
from flax_layoutmap._rules import Matcher, RuleSet


@dataclasses.dataclass(frozen=True, slots=True)
class OwnerLayout:
    """The layout that a parameter has, for the optimizer state that follows it."""

    shape: Shape
    dims: tuple[tuple[str, ...], ...]
    mesh: DeviceMesh | None
    memory_kind: str | None = None


class Decider:
    """Decides leaf after leaf; asks each question once."""

    def __init__(
        self,
        rule_set: RuleSet,
        matcher: Matcher,
        flat: Flat,
        shapes: Sequence[Shape],
    ) -> None:
        self.rules, self.flat, self.shapes = rule_set, flat, shapes
        self.mesh = rule_set.mesh
        self.sizes = {} if self.mesh is None else self.mesh.axis_sizes
        self.matcher = matcher
        self.made: dict[Any, Decision] = {}
        self.troubled = False

    def by_rules(self, skip: Sequence[Any] | None = None) -> list[Any]:
        """Decides all leaves by the rules; None where `skip` has something.

        The memo is keyed by the folded path of the parent, then by folded name and
        shape; so a leaf costs a lookup of a short string.
        """
        flat, shapes, names = self.flat, self.shapes, self.flat.names
        memo: dict[str, dict[Any, Decision]] = {}
        rows: list[Any] = []
        append = rows.append
        stops = [start for start, _ in flat.runs[1:]]
        stops.append(len(names))
        for (start, parent), stop in zip(flat.runs, stops, strict=False):
            known = memo.get(parent)
            if known is None:
                known = memo[parent] = {}
            for at in range(start, stop):
                if skip and skip[at] is not None:
                    append(None)
                    continue
                key = (names[at], shapes[at])
                row = known.get(key)
                append(self.ask(known, key, parent, at) if row is None else row)
        return rows

    def ask(
        self, known: dict[Any, Decision], key: Any, parent: str, at: int
    ) -> Decision:
        path, shape = self.flat.paths[at], self.shapes[at]
        sure, maybe = self.matcher.fold(parent + key[0])
        if maybe:
            return self.decide(path, self.matcher.refine(path, sure, maybe), shape)
        row = known[key] = self.decide(path, sure, shape)
        return row

    def by_rules_and_origins(
        self, found: Sequence[Origin | None], owners: Mapping[str, OwnerLayout] | None
    ) -> list[Decision]:
        """Parameters by rules; optimizer state by the parameter it belongs to."""
        rows: list[Decision | None] = self.by_rules(skip=found)
        own: dict[str, OwnerLayout] = dict(owners or {})
        if owners is None:
            for path, shape, row in zip(
                self.flat.paths, self.shapes, rows, strict=True
            ):
                if row is not None and path not in own:
                    own[path] = OwnerLayout(shape, row.dims, row.mesh, row.memory_kind)
        self.apply_explicit(rows, own)
        matcher = Matcher(self.rules.optimizer, self.rules.match)
        for at, origin in enumerate(found):
            if origin is not None:
                rows[at] = self.follow(at, origin, own, matcher)
        return [row for row in rows if row is not None]

    def apply_explicit(
        self, rows: list[Decision | None], own: dict[str, OwnerLayout]
    ) -> None:
        """State follows what its parameter will have, metadata included."""
        for at, box in self.flat.annotations.items():
            row = rows[at]
            if row is not None:
                new = self.annotated(box, row, self.shapes[at])
                path = self.flat.paths[at]
                own[path] = OwnerLayout(
                    self.shapes[at], new.dims, new.mesh, new.memory_kind
                )

    # ------------------------------------------------------------ one decision

    def decide(self, path: str, matched: tuple[int, ...], shape: Shape) -> Decision:
        """The decision for a leaf of this shape that these rules match."""
        exact = len(matched) == 1 and self.rules.rules[matched[0]].pattern == path
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
            if rules[at].rank == "error" or _fits(rules[at].layout, len(shape))
        )
        if not fitting:
            if self.rules.unmatched == "error":
                return self.trouble(
                    "no rule matches it; add one (None says: replicated), or use "
                    'unmatched="replicate"',
                    shape,
                )
            return self.replicated("no rule", shape, ())
        layouts = {rules[at].layout for at in fitting}
        winner = fitting[-1] if self.rules.overlap == "last" else fitting[0]
        if len(layouts) > 1 and self.rules.overlap == "error":
            return self.trouble(self.conflict(fitting), shape, fitting)
        return self.apply(winner, fitting, shape, "exact key" if exact else "rule")

    def conflict(self, matched: tuple[int, ...]) -> str:
        rules = self.rules.rules
        listed = ", ".join(
            f"rule {at + 1} {rules[at].pattern!r} → {rules[at].layout}"
            for at in matched
        )
        return (
            f"rules with different layouts match it: {listed}; make one pattern "
            'narrower, use the path itself as key, or overlap="first" or "last"'
        )

    def apply(
        self, winner: int, matched: tuple[int, ...], shape: Shape, reason: Reason
    ) -> Decision:
        rule = self.rules.rules[winner]
        name = f"rule {winner + 1} {rule.pattern!r} → {rule.layout}"
        return self.lay(rule.layout, shape, name, reason, rule=winner, matched=matched)

    def lay(
        self, layout: TensorLayout, shape: Shape, name: str, reason: Reason, **more: Any
    ) -> Decision:
        """Lays a leaf out, or says why that is impossible."""
        mesh = layout.device_mesh or self.mesh
        if not _fits(layout, len(shape)):
            return self.trouble(
                f"{name} has {_rank(layout)} dims, the leaf has {len(shape)}; "
                f"{_rank_fix(layout, shape)}",
                shape,
                more.get("matched", ()),
            )
        dims = layout.dims(len(shape))
        if mesh is None:
            return Decision(
                dims,
                normal_spec(dims),
                None,
                None,
                reason,
                memory_kind=layout.memory_kind,
                **more,
            )
        sizes = self.sizes if mesh is self.mesh else mesh.axis_sizes
        unknown = [axis for axes in dims for axis in axes if axis not in sizes]
        if unknown:
            return self.trouble(
                f"{name}: the mesh {str(mesh)!r} has no axis {unknown[0]!r}",
                shape,
                more.get("matched", ()),
            )
        fallback = None
        for dim, axes in enumerate(dims):
            parts = math.prod(sizes[axis] for axis in axes)
            if shape[dim] % parts == 0:
                continue
            text = clash(dim, shape[dim], axes, sizes)
            if self.rules.indivisible == "error":
                return self.trouble(
                    f"{name}: {text}; use a size that is a multiple of {parts}, "
                    'another layout, or indivisible="replicate"',
                    shape,
                    more.get("matched", ()),
                )
            dims = (*dims[:dim], (), *dims[dim + 1 :])
            fallback = f"{name}: {text}, so that dim is replicated"
        shard = tuple(
            size // math.prod(sizes[axis] for axis in axes)
            for size, axes in zip(shape, dims, strict=True)
        )
        return Decision(
            dims,
            normal_spec(dims),
            mesh,
            shard,
            reason,
            memory_kind=layout.memory_kind,
            fallback=fallback,
            **more,
        )

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
        owner = None if origin.owner is None else own.get(origin.owner)
        if owner is None and not own:
            # The state came without its parameters: its own path must do.
            return self.alone(self.flat.paths[at], shape)
        if owner is None or origin.dims is None or origin.owner is None:
            return self.replicated(
                "unknown optimizer state",
                shape,
                fallback=origin.how,
                owner=origin.owner,
            )
        key = (origin, shape)
        return self.once(key, lambda: self._follow(origin, owner, shape, matcher))

    def once(self, key: Any, make: Callable[[], Decision]) -> Decision:
        row = self.made.get(key)
        if row is None:
            row = self.made[key] = make()
        return row

    def _follow(
        self, origin: Origin, owner: OwnerLayout, shape: Shape, matcher: Matcher
    ) -> Decision:
        path, dims = origin.owner or "", origin.dims or ()
        matched = matcher.matching(path)
        reason: Reason = "follows parameter"
        axes, more = owner.dims, {}
        if matched:
            rule = self.rules.optimizer[matched[0]]
            name = f"optimizer rule {matched[0] + 1} {rule.pattern!r} → {rule.layout}"
            different = {self.rules.optimizer[m].layout for m in matched}
            if len(different) > 1 and self.rules.overlap == "error":
                return self.trouble(
                    f"several optimizer rules with different layouts match {path!r}",
                    shape,
                )
            if self.rules.overlap == "last":
                rule = self.rules.optimizer[matched[-1]]
            if not _fits(rule.layout, len(owner.shape)):
                return self.trouble(
                    f"{name} has {_rank(rule.layout)} dims, the parameter {path!r} has "
                    f"{len(owner.shape)}",
                    shape,
                )
            axes, reason = rule.layout.dims(len(owner.shape)), "optimizer rule"
            more = {"rule": self.rules.optimizer.index(rule), "matched": matched}
        else:
            name = f"the layout of its parameter {path!r}"
        own_axes = tuple(() if dim is None else axes[dim] for dim in dims)
        layout = TensorLayout(own_axes, owner.mesh, memory_kind=owner.memory_kind)
        if not shape or layout.rank not in (None, len(shape)):
            return self.replicated("scalar", shape)
        return self.lay(
            layout, shape, name, reason, owner=origin.owner, owner_dims=dims, **more
        )

    def alone(self, path: str, shape: Shape) -> Decision:
        """State without its parameters: the rules see its path from some part on."""
        parts = path.split("/")
        for start in range(len(parts)):
            matched = self.matcher.matching("/".join(parts[start:]))
            fitting = tuple(
                m for m in matched if _fits(self.rules.rules[m].layout, len(shape))
            )
            if fitting:
                return self._decide(fitting, shape, exact=False)
        return self.replicated("unknown optimizer state", shape)

    # --------------------------------------------------------------- overrides

    def override(self, rows: list[Decision], dtypes: Sequence[Any]) -> None:
        """Random state is replicated; layouts on the variables themselves apply."""
        fixed = set(self.flat.fixed)
        for kind in {type(dtype) for dtype in dtypes}:
            if not issubclass(kind, np.dtype):
                fixed.update(
                    at for at, dtype in enumerate(dtypes) if _is_key_or_none(dtype)
                )
        for at in fixed:
            reason: Reason = "not an array" if dtypes[at] is None else "random state"
            rows[at] = self.replicated(reason, self.shapes[at])
        for at, box in self.flat.annotations.items():
            if at not in fixed:
                rows[at] = self.annotated(box, rows[at], self.shapes[at])

    def annotated(self, box: Any, row: Decision, shape: Shape) -> Decision:
        """Layout metadata on a Variable or box against what the rules say."""
        metadata = metadata_of(box) if isinstance(box, nnx.Variable) else {}
        explicit = metadata.get("layout")
        if isinstance(explicit, TensorLayout):
            name = f"the explicit layout {explicit}"
            return self.lay(explicit, shape, name, "explicit layout")
        if row.reason != "no rule" or row.problem or not shape:
            return row
        names = _flax_names(box, metadata)
        if names is None:
            return row
        known = set(self.sizes) if self.mesh is not None else None
        lost: list[str] = []
        dims = tuple(_known_axes(entry, known, lost) for entry in names)
        layout = TensorLayout((*dims, ...))
        decision = self.lay(layout, shape, f"Flax metadata {names}", "flax metadata")
        if lost and decision.problem is None:
            text = f"Flax metadata {names}: no mesh axis {', '.join(map(repr, lost))}"
            decision = dataclasses.replace(decision, fallback=text)
        return decision


def _flax_names(box: Any, metadata: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Axis names on a Variable or Linen box, after Flax's logical rules."""
    if isinstance(box, nnx.Variable):
        value = metadata.get("out_sharding") or metadata.get("sharding_names")
        rules = tuple(metadata.get("sharding_rules") or ())
        value = getattr(value, "spec", value)  # a NamedSharding brings its spec
    else:
        value = getattr(box, "names", None)
        rules = tuple(getattr(box, "rules", None) or ())
    if not isinstance(value, tuple | PartitionSpec):
        return None
    mapping = {name: axis for name, axis in reversed((*rules, *_logical_rules()))}
    return tuple(
        mapping.get(entry, entry) if isinstance(entry, str) else entry
        for entry in value
    )


def _logical_rules() -> tuple[Any, ...]:
    """Flax's logical axis rules in context, of NNX and of Linen."""
    from flax import linen
    from flax.core.spmd import get_logical_axis_rules

    return (*get_logical_axis_rules(), *linen.get_logical_axis_rules())


def _known_axes(entry: Any, known: set[str] | None, lost: list[str]) -> Any:
    names = (
        () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
    )
    kept = []
    for name in names:
        if known is None or name in known:
            kept.append(name)
        else:
            lost.append(name)
    return tuple(kept) or None


def _is_key_or_none(dtype: Any) -> bool:
    return dtype is None or jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def _fits(layout: TensorLayout, ndim: int) -> bool:
    return layout.rank == ndim or (layout.rank is None and ndim >= len(layout.axes) - 1)


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
