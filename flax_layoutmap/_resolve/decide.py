"""Stage "decide": matching rules and origins → one Decision per leaf.

Precedence, for a parameter: an explicit layout on the variable, a rule, Flax metadata,
the kernel that it belongs to, replicated. For optimizer state: an optimizer rule, the
layout of its parameter, its current layout, replicated. Random state and whatever is
not an array are replicated.
"""

import dataclasses
from collections.abc import Mapping, Sequence
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
    Layer,
    applicable,
    fits,
    listing,
    naming,
    picked,
    rank_fix,
    show_rank,
)
from flax_layoutmap._resolve.leaves import Mark, mesh_axes
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
    layer = Layer(rules, leaves)
    rows = layer.rows
    keys = list(zip(map(id, matches.parameters), shapes, strict=True))
    distinct = dict(zip(keys, matches.parameters, strict=True))
    made = {key: layer.by_match(match, key[1]) for key, match in distinct.items()}
    rows += map(made.__getitem__, keys)
    for at, match in matches.plain.items():
        note = f"without the LoRA module around it, its path is {origins.plain[at]!r}"
        rows[at] = dataclasses.replace(layer.by_match(match, shapes[at]), note=note)
    for at, mark in marks.items():
        rows[at] = _annotated(layer, mark, rows[at], shapes[at])
    for at in origins.adapters:
        rows[at] = lay_adapter(layer, matches, at)
    lay_scales(layer)
    for at, layout in leaves.layouts.items():
        rows[at] = _given(layout, shapes[at])
    live = _on_the_grid(leaves.live, rules)
    for at, origin in enumerate(origins.state or ()):
        if origin is not None:
            row = rows[at] = _state(layer, matches, origin, at, live.get(at))
            if at in marks:
                rows[at] = _annotated(layer, marks[at], row, shapes[at])
    for at in _not_sharded(leaves.flat.fixed, leaves.dtypes):
        is_array = leaves.dtypes[at] is not None
        reason: Reason = "random state" if is_array else "not an array"
        rows[at] = layer.replicated(reason, shapes[at], rows[at].matched)
    return rows


def _given(layout: TensorLayout, shape: Shape) -> Decision:
    """The decision for a parameter that has its layout already."""
    dims = layout.dims(len(shape))
    return Decision(
        dims,
        normal_spec(dims),
        layout.device_mesh,
        None,
        "own layout",
        memory_kind=layout.memory_kind,
    )


def _not_sharded(fixed: set[int], dtypes: Sequence[Any]) -> set[int]:
    """Positions of random state, and of what is no array."""
    # Nearly all are NumPy's: their few types are looked at, not each of the leaves.
    others = {kind for kind in set(map(type, dtypes)) if not issubclass(kind, np.dtype)}
    if not others:
        return fixed
    return fixed | {
        at
        for at, dtype in enumerate(dtypes)
        if type(dtype) in others
        if dtype is None or jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)
    }


# ----------------------------------------------------------------------- metadata


def _annotated(layer: Layer, mark: Mark, row: Decision, shape: Shape) -> Decision:
    """Apply layout metadata of a Variable or box, where it has precedence."""
    if row.owner is not None or row.reason in ("unknown optimizer state", "own layout"):
        return row  # a copy of the parameter's metadata, for another shape maybe
    if mark.problem is not None:
        return layer.trouble(f"its metadata: {mark.problem}", shape, row.matched)
    if mark.layout is not None:
        return _explicit(layer, mark.layout, shape, row.matched)
    if mark.names is None or row.reason != "no rule" or row.matched or not shape:
        return row
    bare = tuple(dim[0] if len(dim) == 1 else dim or None for dim in mark.names)
    name = f"Flax metadata {bare!r}"  # as a user writes it
    mesh = layer.rules.mesh
    try:
        axes, lost = mesh_axes(mark)
        if mesh is not None:
            off = [a for dim in axes for a in dim if a not in mesh.axis_names]
            axes = tuple(tuple(a for a in dim if a not in off) for dim in axes)
            lost = (*lost, *off)
        layout = TensorLayout((*axes, ...))
    except RuleError as error:
        return layer.trouble(f"{name}: {error}", shape)
    if len(axes) > len(shape):
        problem = f"{name} names {len(axes)} dims, the leaf has {len(shape)}"
        return layer.trouble(f"{problem}; {_ANNOTATION_FIX}", shape)
    decision = layer.lay(layout, shape, name, "flax metadata")
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
    # Linen itself replicates names without a rule.
    warns = bool(lost) and (mark.kind != "linen" or not any(decision.dims))
    return dataclasses.replace(decision, fallback="; ".join(texts) or None, warns=warns)


def _explicit(
    layer: Layer, layout: TensorLayout, shape: Shape, matched: tuple[int, ...]
) -> Decision:
    """The layout of a Variable itself, on the mesh of the rules if there is one."""
    own, mesh = layout.device_mesh, layer.rules.mesh
    bare = layout if mesh is None else layout.on(None)
    name = f"the explicit layout {bare}"
    moved = None
    if own is not None and mesh is not None and not same_places(own, mesh):
        name += f" of another mesh, {own!r}"
        moved = (
            f"its layout is on {own!r}, the rules are on {mesh!r}, to which this leaf "
            "is moved: write layout.on(mesh) with the mesh of the rules, or a layout "
            "without a mesh"
        )
    row = layer.lay(bare, shape, name, "explicit layout", matched=matched)
    if moved is None:
        return row
    texts = [moved] if row.fallback is None else [moved, row.fallback]
    return dataclasses.replace(row, fallback="; ".join(texts), warns=True)


# ---------------------------------------------------------------- optimizer state


def _on_the_grid(
    live: Mapping[int, TensorLayout], rules: RuleSet
) -> dict[int, TensorLayout]:
    """The layouts that arrays have already, as far as they are on the rules' mesh."""
    return {
        at: layout.on(None)
        for at, layout in live.items()
        if rules.mesh and layout.device_mesh
        if same_grid(rules.mesh, layout.device_mesh)
    }


def _state(
    layer: Layer,
    matches: Matches,
    origin: Origin,
    at: int,
    live: TensorLayout | None,
) -> Decision:
    """The decision for a leaf of optimizer state, after those for the parameters."""
    shape, owners = layer.leaves.shapes[at], matches.origins.owners
    if not shape:
        return layer.by_match(MatchedRules(), shape)
    key, why = None, _NO_PARAMETERS
    if owners or origin.owner is not None:
        key, why = _owner(layer, owners, origin, live)
    if key is not None and origin.dims is not None:
        match = matches.state.get(key, MatchedRules())
        return layer.once(
            ("state", key, origin.dims, shape),
            lambda: _follow(layer, match, key, owners[key], origin.dims or (), shape),
        )
    if live is not None and not live.is_replicated:
        name = "the layout that it has"
        return layer.lay(live, shape, name, "own layout", owner=origin.owner)
    reason: Reason = "unknown optimizer state"
    return layer.replicated(reason, shape, fallback=why, owner=origin.owner)


def _owner(
    layer: Layer,
    owners: Mapping[str, int],
    origin: Origin,
    live: TensorLayout | None,
) -> tuple[str | None, str]:
    """The parameter that a leaf follows, or None and why it follows none.

    Among several candidates with different layouts, the leaf's current layout decides.
    """
    found = {
        name: (row.dims, row.mesh, row.memory_kind)
        for name in (origin.owner, *origin.others)
        if name is not None and name in owners
        for row in [layer.rows[owners[name]]]
    }
    fitting = found
    if len(set(found.values())) > 1:
        dims = origin.dims
        fitting = {
            name: layout
            for name, layout in found.items()
            if live is not None and dims is not None
            if live.dims(len(dims)) == picked(dims, layout[0])
        }
    if len(set(fitting.values())) == 1:
        return next(iter(fitting)), origin.how
    if not found:
        return None, origin.how
    listed = " or ".join(map(repr, found))
    return None, (
        f"may belong to {listed}, which have different layouts; name the optimizer "
        "after its model, as in 'policy_optimizer'"
    )


def _follow(
    layer: Layer,
    match: MatchedRules,
    key: str,
    owner: int,
    dims: tuple[int | None, ...],
    shape: Shape,
) -> Decision:
    """Decide a leaf whose dims are those of a parameter, as `dims` maps them.

    `match` has the optimizer rules of the parameter `key`, at position `owner`.
    """
    rules, row = layer.rules.optimizer, layer.rows[owner]
    of = layer.leaves.shapes[owner]
    # No rule lays out a scalar, nor the state of one.
    matched = applicable(rules, match.rules, len(of)) if of else ()
    if match.key is not None and match.key in matched:
        matched = (match.key,)
    axes, mesh, memory_kind = row.dims, row.mesh, row.memory_kind
    name = f"the layout of its parameter {key!r}"
    reason: Reason = "follows parameter"
    more: dict[str, Any] = {}
    if matched:
        winner = layer.rules.winner(rules, matched)
        if winner is None:
            return layer.trouble(
                "optimizer rules with different layouts match its parameter "
                f"{key!r}: {listing(rules, matched)}; {CONFLICT_FIX}",
                shape,
            )
        layout = rules[winner].layout
        name = f"optimizer rule {naming(rules, winner)}"
        if not fits(layout, len(of)):
            return layer.trouble(
                f"{name} has {show_rank(layout)} dims, its parameter {key!r} "
                f"has {len(of)}; {rank_fix(layout, of)}",
                shape,
            )
        axes, reason = layout.dims(len(of)), "optimizer rule"
        mesh = layout.device_mesh or mesh
        memory_kind = layout.memory_kind or memory_kind
        more = {"rule": winner, "matched": matched}
    layout = TensorLayout(picked(dims, axes), mesh, memory_kind=memory_kind)
    return layer.lay(layout, shape, name, reason, owner=key, owner_dims=dims, **more)
