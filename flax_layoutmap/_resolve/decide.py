"""Stage "decide": matching rules and origins → one Decision per leaf.

Precedence, for a parameter: an explicit layout on the variable, a rule, Flax metadata,
the kernel that it belongs to, replicated. For optimizer state: an optimizer rule, the
layout of its parameter, its current layout, replicated. Random state and whatever is
not an array are replicated.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from flax_layoutmap._core.axes import normal_spec
from flax_layoutmap._core.errors import RuleError
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import same_grid, same_places
from flax_layoutmap._resolve.kernels import lay_adapter, lay_scales
from flax_layoutmap._resolve.lay import (
    CONFLICT_FIX,
    Decisions,
    applicable,
    fits,
    listing,
    naming,
    picked,
    rank_fix,
    show_rank,
)
from flax_layoutmap._resolve.leaves import Mark, Names, mesh_axes
from flax_layoutmap._resolve.match import Matches
from flax_layoutmap._resolve.optimizer_state import Origin
from flax_layoutmap._rules.matching import MatchedRules
from flax_layoutmap._rules.records import Decision, Reason, Shape
from flax_layoutmap._rules.rules import RuleSet

_RULE_WINS = "a rule for it wins over the metadata"
_ANNOTATION_FIX = f"name one axis or None for each dim; {_RULE_WINS}"
_STACKED_FIX = (
    "for layers stacked by nnx.vmap, transform_metadata={nnx.PARTITION_NAME: None} "
    "adds the new dim to it"
)
_NO_PARAMETERS = "its parameters are not in the tree: pass params= and tx= to resolve"


def decide(matches: Matches, rules: RuleSet) -> list[Decision]:
    """Decide every leaf: parameters, then what follows them.

    `rules` are those that were matched, possibly on another mesh.
    """
    leaves, origins = matches.origins.leaves, matches.origins
    shapes, marks = leaves.shapes, leaves.flat.annotations
    made = Decisions(rules, leaves)
    rows = made.rows
    keys = list(zip(map(id, matches.parameters), shapes, strict=True))
    distinct = dict(zip(keys, matches.parameters, strict=True))
    by_key = {key: made.by_match(match, key[1]) for key, match in distinct.items()}
    rows += map(by_key.__getitem__, keys)
    for at, match in matches.plain.items():
        note = f"without the LoRA module around it, its path is {origins.plain[at]!r}"
        rows[at] = dataclasses.replace(made.by_match(match, shapes[at]), note=note)
    for at, mark in marks.items():
        rows[at] = _annotated(made, mark, rows[at], shapes[at])
    for at, kernels in origins.adapters.items():
        match = matches.adapters.get(at, MatchedRules())
        rows[at] = lay_adapter(made, at, kernels, match)
    lay_scales(made)
    for at, layout in leaves.layouts.items():
        rows[at] = _given(layout, shapes[at])
    for at, origin in enumerate(origins.state or ()):
        if origin is not None:
            rows[at] = _state(made, matches, origin, at)
            if at in marks:
                rows[at] = _annotated(made, marks[at], rows[at], shapes[at])
    for at, dtype in enumerate(leaves.dtypes):
        if at in leaves.flat.fixed or not isinstance(dtype, np.dtype):
            if reason := _not_sharded(dtype, at in leaves.flat.fixed):
                rows[at] = made.replicated(reason, shapes[at], rows[at].matched)
    return rows


def _given(layout: TensorLayout, shape: Shape) -> Decision:
    """The decision for a parameter that has its layout already."""
    dims, mesh, kind = layout.dims(len(shape)), layout.device_mesh, layout.memory_kind
    return Decision(dims, normal_spec(dims), mesh, None, "own layout", memory_kind=kind)


def _not_sharded(dtype: Any, is_fixed: bool) -> Reason | None:
    """Why no rule is asked of a leaf: random state, or not an array."""
    if dtype is None:
        return "not an array"
    is_key = is_fixed or jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)
    return "random state" if is_key else None


# ----------------------------------------------------------------------- metadata


def _annotated(made: Decisions, mark: Mark, row: Decision, shape: Shape) -> Decision:
    """Apply layout metadata of a Variable or box, where it has precedence."""
    if row.owner is not None or row.reason in ("unknown optimizer state", "own layout"):
        return row  # a copy of the parameter's metadata, for another shape maybe
    if mark.problem is not None:
        return made.trouble(f"its metadata: {mark.problem}", shape, row.matched)
    if mark.layout is not None:
        return _explicit(made, mark.layout, shape, row.matched)
    if mark.names is None or row.reason != "no rule" or row.matched or not shape:
        return row
    key = ("metadata", mark.names, mark.rules, mark.kind, shape)
    return made.once(key, lambda: _by_flax(made, mark, mark.names or (), shape))


def _by_flax(made: Decisions, mark: Mark, names: Names, shape: Shape) -> Decision:
    """The layout of Flax's axis names."""
    bare = tuple(dim[0] if len(dim) == 1 else dim or None for dim in names)
    name = f"Flax metadata {bare!r}"  # as a user writes it
    try:
        axes, lost = mesh_axes(mark)
        if made.rules.mesh is not None:
            known = made.rules.mesh.axis_names
            lost = (*lost, *(a for dim in axes for a in dim if a not in known))
            axes = tuple(tuple(a for a in dim if a in known) for dim in axes)
        layout = TensorLayout((*axes, ...))
    except RuleError as error:
        return made.trouble(f"{name}: {error}", shape)
    if len(axes) > len(shape):
        problem = f"{name} names {len(axes)} dims, the leaf has {len(shape)}"
        return made.trouble(f"{problem}; {_ANNOTATION_FIX}", shape)
    decision = made.lay(layout, shape, name, "flax metadata")
    if decision.problem is not None:
        stacked = f"; {_STACKED_FIX}" if 0 < len(axes) < len(shape) else ""
        problem = f"{decision.problem}; {_RULE_WINS}{stacked}"
        return dataclasses.replace(decision, problem=problem)
    texts = [f"{name}: no mesh axis for {', '.join(map(repr, lost))}"] if lost else []
    if decision.fallback:
        texts.append(decision.fallback)
    if 1 < len(axes) < len(shape) and any(decision.dims):
        dims = f"{len(axes)} of {len(shape)} dims, the first ones"
        texts.append(f"{name} names {dims}; {_STACKED_FIX}")
    # Linen itself replicates names without a rule.
    warns = bool(lost) and (mark.kind != "linen" or not any(decision.dims))
    return dataclasses.replace(decision, fallback="; ".join(texts) or None, warns=warns)


def _explicit(
    made: Decisions, layout: TensorLayout, shape: Shape, matched: tuple[int, ...]
) -> Decision:
    """The layout of a Variable itself, on the mesh of the rules if there is one."""
    own, mesh = layout.device_mesh, made.rules.mesh
    bare = layout if mesh is None else layout.on(None)
    name = f"the explicit layout {bare}"
    is_moved = own is not None and mesh is not None and not same_places(own, mesh)
    if is_moved:
        name += f" of another mesh, {own!r}"
    row = made.lay(bare, shape, name, "explicit layout", matched=matched)
    if not is_moved:
        return row
    moved = (
        f"its layout is on {own!r}, the rules are on {mesh!r}, to which this leaf is "
        "moved: write layout.on(mesh) with the mesh of the rules, or a layout without "
        "a mesh"
    )
    texts = [moved, row.fallback] if row.fallback else [moved]
    return dataclasses.replace(row, fallback="; ".join(texts), warns=True)


# ---------------------------------------------------------------- optimizer state


def _state(made: Decisions, matches: Matches, origin: Origin, at: int) -> Decision:
    """The decision for a leaf of optimizer state, after those for the parameters."""
    shape, owners = made.leaves.shapes[at], matches.origins.owners
    if not shape:
        return made.replicated("scalar", shape)
    key, why, live = None, _NO_PARAMETERS, _live_layout(made, at)
    if owners or origin.owner is not None:
        key, why = _owner(made, owners, origin, live)
    if key is not None and origin.dims is not None:
        match = matches.state.get(key, MatchedRules())
        return made.once(
            ("state", key, origin.dims, shape),
            lambda: _follow(made, match, key, owners[key], origin.dims or (), shape),
        )
    if live is not None and not live.is_replicated:
        name = "the layout that it has"
        return made.lay(live, shape, name, "own layout", owner=origin.owner)
    reason: Reason = "unknown optimizer state"
    return made.replicated(reason, shape, fallback=why, owner=origin.owner)


def _live_layout(made: Decisions, at: int) -> TensorLayout | None:
    """The layout that an array has already, if it is on the mesh of the rules."""
    live, mesh = made.leaves.live.get(at), made.rules.mesh
    if live is None or mesh is None or live.device_mesh is None:
        return None
    return live.on(None) if same_grid(mesh, live.device_mesh) else None


def _owner(
    made: Decisions,
    owners: Mapping[str, int],
    origin: Origin,
    live: TensorLayout | None,
) -> tuple[str | None, str]:
    """The parameter that a leaf follows, or None and why it follows none.

    Among several candidates with different layouts, the leaf's current layout decides.
    """
    if not origin.others:
        return (origin.owner if origin.owner in owners else None), origin.how
    names = [name for name in (origin.owner, *origin.others) if name in owners]
    rows = {name: made.rows[owners[name]] for name in names if name is not None}
    layouts = {x: (row.dims, row.mesh, row.memory_kind) for x, row in rows.items()}
    fitting = layouts
    if len(set(layouts.values())) > 1:
        dims = origin.dims
        fitting = {
            name: layout
            for name, layout in layouts.items()
            if live is not None and dims is not None
            if live.dims(len(dims)) == picked(dims, layout[0])
        }
    if len(set(fitting.values())) == 1:
        return next(iter(fitting)), origin.how
    if not layouts:
        return None, origin.how
    listed = " or ".join(map(repr, layouts))
    return None, (
        f"may belong to {listed}, which have different layouts; name the optimizer "
        "after its model, as in 'policy_optimizer'"
    )


def _follow(
    made: Decisions,
    match: MatchedRules,
    key: str,
    owner: int,
    dims: tuple[int | None, ...],
    shape: Shape,
) -> Decision:
    """Decide a leaf whose dims are those of a parameter, as `dims` maps them.

    `match` has the optimizer rules of the parameter `key`, at position `owner`.
    """
    rules, row = made.rules.optimizer, made.rows[owner]
    of = made.leaves.shapes[owner]
    # No rule lays out a scalar, nor the state of one.
    matched = applicable(rules, match.rules, len(of)) if of else ()
    if match.key is not None and match.key in matched:
        matched = (match.key,)
    more: dict[str, Any] = {"owner": key, "owner_dims": dims}
    if not matched:
        kind, name = row.memory_kind, f"the layout of its parameter {key!r}"
        layout = TensorLayout(picked(dims, row.dims), row.mesh, memory_kind=kind)
        return made.lay(layout, shape, name, "follows parameter", **more)
    winner = made.rules.winner(rules, matched)
    if winner is None:
        listed = f"match its parameter {key!r}: {listing(rules, matched)}"
        problem = f"optimizer rules with different layouts {listed}; {CONFLICT_FIX}"
        return made.trouble(problem, shape)
    layout, name = rules[winner].layout, f"optimizer rule {naming(rules, winner)}"
    if not fits(layout, len(of)):
        ranks = f"{show_rank(layout)} dims, its parameter {key!r} has {len(of)}"
        return made.trouble(f"{name} has {ranks}; {rank_fix(layout, of)}", shape)
    layout = TensorLayout(
        picked(dims, layout.dims(len(of))),
        layout.device_mesh or row.mesh,
        memory_kind=layout.memory_kind or row.memory_kind,
    )
    more |= {"rule": winner, "matched": matched}
    return made.lay(layout, shape, name, "optimizer rule", **more)
