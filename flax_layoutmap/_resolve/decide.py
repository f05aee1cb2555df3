"""Match and decide: leaves and rules → one Decision per leaf.

Precedence, for a parameter: an explicit layout on the variable, a rule, Flax metadata,
the kernel that it belongs to, replicated. For optimizer state: an optimizer rule, the
layout of its parameter, its current layout, replicated. Random state and leaves that
are not arrays are replicated.
"""

import dataclasses
from collections.abc import Iterator, Sequence
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
from flax_layoutmap._resolve.leaves import Dims, Leaves, Mark, Names, Origin, mesh_axes
from flax_layoutmap._rules.matching import MatchedRules, Matcher
from flax_layoutmap._rules.records import Decision, Reason, Shape
from flax_layoutmap._rules.rules import RuleSet

_RULE_WINS = "a rule for it wins over the metadata"
_ANNOTATION_FIX = f"name one axis or None for each dim; {_RULE_WINS}"
_STACKED_FIX = (
    "for layers stacked by nnx.vmap, transform_metadata={nnx.PARTITION_NAME: None} "
    "adds the new dim to it"
)
_NO_PARAMETERS = "its parameters are not in the tree: pass params= and tx= to resolve"


def decide(leaves: Leaves, rules: RuleSet) -> list[Decision]:
    """Decide every leaf: parameters, then what follows them."""
    made = Decisions(rules, leaves)
    rows, shapes, marks = made.rows, leaves.shapes, leaves.flat.annotations
    _match_similar(made)
    _match_other_paths(made)
    for at, mark in marks.items():
        rows[at] = _annotated(made, mark, rows[at], shapes[at])
    for at, kernels in leaves.adapters.items():
        rows[at] = lay_adapter(made, at, kernels)
    lay_scales(made)
    for at, layout in leaves.given.items():
        rows[at] = _given(layout, shapes[at])
    for at, origin in leaves.origins.items():
        rows[at] = _state(made, origin, at)
        if at in marks:
            rows[at] = _annotated(made, marks[at], rows[at], shapes[at])
    for at, reason in _not_sharded(leaves):
        rows[at] = made.replicated(reason, shapes[at], rows[at].matched)
    return rows


def _given(layout: TensorLayout, shape: Shape) -> Decision:
    """The decision for a parameter that has its layout already."""
    dims, mesh, kind = layout.dims(len(shape)), layout.device_mesh, layout.memory_kind
    return Decision(dims, normal_spec(dims), mesh, None, "own layout", memory_kind=kind)


def _not_sharded(leaves: Leaves) -> Iterator[tuple[int, Reason]]:
    """Leaves that no rule applies to: random state, and those that are not arrays."""
    fixed = leaves.flat.fixed
    if fixed or not all(issubclass(x, np.dtype) for x in set(map(type, leaves.dtypes))):
        for at, dtype in enumerate(leaves.dtypes):
            if dtype is None:
                yield at, "not an array"
            elif at in fixed or jax.numpy.issubdtype(dtype, jax.dtypes.prng_key):
                yield at, "random state"


# ----------------------------------------------------------------------- matching


def _match_similar(made: Decisions) -> None:
    """Decide by the rules that match each path; similar leaves are matched once.

    Optimizer state is decided later.
    """
    flat, shapes, matcher = made.leaves.flat, made.leaves.shapes, made.rules.matcher
    for start, stop, *_ in flat.sections:
        if all(map(made.leaves.origins.__contains__, range(start, stop))):
            made.rows += [made.replicated("no rule", ())] * (stop - start)
            continue
        similar = matcher.similar(flat.paths[start:stop])
        keys = list(zip(similar, shapes[start:stop], strict=True))
        tried = dict(zip(keys, range(start, stop), strict=True))
        decisions = {
            key: made.by_match(matcher.match(flat.forms(at)), key[1])
            for key, at in tried.items()
        }
        made.rows += map(decisions.__getitem__, keys)


def _match_other_paths(made: Decisions) -> None:
    """Decide shared Variables by all their paths, and leaves in a LoRA module.

    These are decided by the path without the LoRA module, unless a rule matches only
    the path with it.
    """
    rows, leaves, matcher = made.rows, made.leaves, made.rules.matcher
    flat, shapes = leaves.flat, leaves.shapes
    for at in flat.others.keys() - leaves.origins.keys():
        match = _match_names(matcher, flat.forms_of_names(at))
        rows[at] = made.by_match(match, shapes[at])
    for at, path in leaves.plain.items():
        forms = flat.forms(at, path)
        inside, plain = matcher.match(flat.forms(at)).rules, matcher.match(forms)
        if plain.rules not in ((), inside):
            if {*inside} <= {*matcher.matching_patterns(forms)}:
                note = f"without the LoRA module around it, its path is {path!r}"
                row = made.by_match(plain, shapes[at])
                rows[at] = dataclasses.replace(row, note=note)


def _match_names(matcher: Matcher, names: Sequence[tuple[str, ...]]) -> MatchedRules:
    """The rules of a leaf by all its names; two keys of a shared Variable conflict."""
    matches = list(map(matcher.match, names))
    keys = {match.key for match in matches if match.key is not None}
    if len(keys) > 1:
        return MatchedRules(tuple(sorted(keys)))
    matched = {at for match in matches for at in match.rules}
    return MatchedRules(tuple(sorted(matched)), next(iter(keys), None))


def _match_owner(made: Decisions, owner: int) -> MatchedRules:
    """The optimizer rules of a parameter, by its path, else by that without LoRA."""
    flat, plain = made.leaves.flat, made.leaves.plain
    matcher = made.rules.matchers["optimizer"]
    match = _match_names(matcher, flat.forms_of_names(owner))
    if not match.rules and owner in plain:
        match = matcher.match(flat.forms(owner, plain[owner]))
    return match


# ----------------------------------------------------------------------- metadata


def _annotated(made: Decisions, mark: Mark, row: Decision, shape: Shape) -> Decision:
    """Apply layout metadata of a Variable or box, where it has precedence."""
    if row.owner is not None or row.reason in ("unknown optimizer state", "own layout"):
        return row  # metadata copied from the parameter, whose shape may differ
    if mark.problem is not None:
        return made.trouble(f"its metadata: {mark.problem}", shape, row.matched)
    if mark.layout is not None:
        return _explicit(made, mark.layout, shape, row.matched)
    if mark.names is None or row.reason != "no rule" or row.matched or not shape:
        return row
    names = mark.names
    return made.once((mark, shape), lambda: _by_flax(made, mark, names, shape))


def _by_flax(made: Decisions, mark: Mark, names: Names, shape: Shape) -> Decision:
    """The decision for Flax's axis names."""
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
    """The decision for a Variable's explicit layout, on the rules' mesh if any."""
    given, mesh = layout.device_mesh, made.rules.mesh
    bare = layout if mesh is None else layout.on(None)
    name = f"the explicit layout {bare}"
    is_moved = given is not None and mesh is not None and not same_places(given, mesh)
    if is_moved:
        name += f" of another mesh, {given!r}"
    row = made.lay(bare, shape, name, "explicit layout", matched=matched)
    if not is_moved:
        return row
    moved = (
        f"its layout is on {given!r}, the rules are on {mesh!r}, to which this leaf "
        "is moved: write layout.on(mesh) with the mesh of the rules, or a layout "
        "without a mesh"
    )
    texts = [moved, row.fallback] if row.fallback else [moved]
    return dataclasses.replace(row, fallback="; ".join(texts), warns=True)


# ---------------------------------------------------------------- optimizer state


def _state(made: Decisions, origin: Origin, at: int) -> Decision:
    """The decision for a leaf of optimizer state, after those for the parameters."""
    shape, owners = made.leaves.shapes[at], made.leaves.owners
    if not shape:
        return made.replicated("scalar", shape)
    key, why, dims = None, _NO_PARAMETERS, origin.dims
    if owners or origin.owner is not None:
        key, why = _owner(made, origin)
    if key is not None and dims is not None:
        state = ("state", key, dims, shape)
        return made.once(state, lambda: _follow(made, key, dims, shape))
    live = _live_layout(made, at)
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


def _owner(made: Decisions, origin: Origin) -> tuple[str | None, str]:
    """The parameter that a leaf follows, or None and why there is none."""
    owners = made.leaves.owners
    if not origin.others:
        return (origin.owner if origin.owner in owners else None), origin.why
    names = [name for name in (origin.owner, *origin.others) if name in owners]
    rows = [made.rows[owners[name]] for name in names if name is not None]
    if len({(row.dims, row.mesh, row.memory_kind) for row in rows}) < 2:
        return next(iter(names), None), origin.why
    listed = " or ".join(map(repr, names))
    return None, (
        f"may belong to {listed}, which have different layouts; name the optimizer "
        "after its model, as in 'policy_optimizer'"
    )


def _follow(made: Decisions, key: str, dims: Dims, shape: Shape) -> Decision:
    """Decide a leaf that has these dims of the parameter `key`."""
    owner = made.leaves.owners[key]
    rules, row, of = made.rules.optimizer, made.rows[owner], made.leaves.shapes[owner]
    # Rules do not apply to scalars and their state.
    match = _match_owner(made, owner) if rules and of else MatchedRules()
    matched = applicable(rules, match.rules, len(of))
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
