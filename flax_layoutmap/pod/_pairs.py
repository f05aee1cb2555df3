"""Pair the results of a step with the arguments that they update.

A new value is computed from the old one element by element: `w - rate * gradient` from
`w`. A gradient is not: it is computed by products and sums over dims.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, Literal

from flax_layoutmap._core.jax_internals import opened
from flax_layoutmap._step.arguments import Argument

Flow = frozenset[int]
_NOTHING: Flow = frozenset()

# Elements of the result depend on elements at other positions.
_MIXES = frozenset(
    """
    all_gather all_to_all cholesky conv_general_dilated cumlogsumexp cummax cummin
    cumprod cumsum dot_general eigh fft gather ppermute psum_scatter qr ragged_dot rev
    sort svd top_k triangular_solve
    """.split()
)
# The result is the first operand, updated at some positions.
_WRITES = ("dynamic_update_slice", "scatter")


def flows(jaxpr: Jaxpr) -> list[Flow]:
    """Positions of the inputs that each output is computed from elementwise."""
    return _flows(jaxpr, {})


def _flows(jaxpr: Jaxpr, seen: dict[int, list[Flow]]) -> list[Flow]:
    if id(jaxpr) in seen:
        return seen[id(jaxpr)]
    known: dict[Any, Flow] = {
        var: frozenset((at,)) for at, var in enumerate(jaxpr.invars)
    }

    def of(var: Any) -> Flow:
        return _NOTHING if isinstance(var, Literal) else known.get(var, _NOTHING)

    for eqn in jaxpr.eqns:
        sources = _sources(eqn, seen)
        for var, places in zip(eqn.outvars, sources, strict=True):
            found = [
                of(eqn.invars[at])
                for at in places
                if _shape(eqn.invars[at]) == _shape(var)
            ]
            known[var] = _NOTHING.union(*found)
    seen[id(jaxpr)] = [of(var) for var in jaxpr.outvars]
    return seen[id(jaxpr)]


def _sources(eqn: Any, seen: dict[int, list[Flow]]) -> list[Flow]:
    """For each output of an equation, the operands that it may update."""
    name, places = eqn.primitive.name, range(len(eqn.invars))
    if name in _MIXES:
        return [_NOTHING] * len(eqn.outvars)
    if name.startswith(_WRITES):
        return [frozenset(places[:1])]
    inner = list(_inner(eqn))
    if inner:
        parts = [
            (_flows(one, seen), len(eqn.invars) - len(one.invars)) for one in inner
        ]
        return [
            _NOTHING.union(*({start + at for at in own[k]} for own, start in parts))
            for k in range(len(eqn.outvars))
        ]
    return [frozenset(places)] * len(eqn.outvars)


def _inner(eqn: Any) -> Iterator[Jaxpr]:
    """The jaxprs that an equation calls with its last operands, for all its outputs.

    These are calls, `scan`, `cond` (after the index) and the body of a `while`.
    """
    for value in eqn.params.values():
        parts: Sequence[Any] = value if isinstance(value, tuple | list) else (value,)
        for part in parts:
            inner = opened(part)
            if inner is not None and len(inner[0].outvars) == len(eqn.outvars):
                if len(inner[0].invars) <= len(eqn.invars):
                    yield inner[0]


def _shape(var: Any) -> Any:
    return getattr(var.aval, "shape", None)


@dataclasses.dataclass(frozen=True, slots=True)
class Results:
    """The results of a step, compared with its arguments."""

    # Position of a result → that of the leaf, over the leaves of all arguments, at the
    # same place of a tree of the same structure.
    found: dict[int, int]
    # Those of `found` that are gradients.
    gradients: frozenset[int]
    # Results that are an argument itself.
    unchanged: frozenset[int]
    # The leaves that each result may update.
    flows: list[frozenset[int]]


def look_at(
    traced: Any,
    order: Sequence[int],
    result: Any,
    start: int,
    arguments: Sequence[Argument],
) -> Results:
    """Compare the results of a traced step with its arguments.

    `order` maps inputs of the trace to leaves. The result is a tree of shapes, whose
    first leaf is result number `start`.
    """
    jaxpr = traced.jaxpr.jaxpr
    flowing = [frozenset(order[at] for at in some) for some in flows(jaxpr)]
    own = set(jaxpr.invars)
    unchanged = {
        at
        for at, var in enumerate(jaxpr.outvars)
        if not isinstance(var, Literal) and var in own
    }
    found = {start + at: leaf for at, leaf in same_trees(result, arguments).items()}
    gradients: set[int] = set()
    positions = list(zip(arguments, _positions(arguments), strict=True))
    held = {
        at for one, own in positions if one.is_container or one.is_state for at in own
    }
    for _, leaves in positions:
        some = [at for at, leaf in found.items() if leaf in leaves]
        # A tree is updated as a whole, or a gradient as a whole.
        if not any(flowing[at] & held for at in some):
            gradients.update(some)
    return Results(found, frozenset(gradients), frozenset(unchanged), flowing)


def comes_back(results: Results, argument: Argument, positions: range) -> bool:
    """Whether an argument is state, as it is returned with other values.

    A tuple of arrays is not: `(x, y)` in and out may be unrelated.
    """
    some = {at for at, leaf in results.found.items() if leaf in positions}
    is_tuple = argument.treedef == jax.tree.structure(tuple(argument.leaves))
    return not is_tuple and not some <= results.unchanged


def pairs_of(
    results: Results,
    arguments: Sequence[Argument],
    shapes: Sequence[Any],
    known: Mapping[int, int],
) -> tuple[dict[int, int], frozenset[int]]:
    """Position of a result → the leaf that it updates or is the gradient of.

    The second value has the gradients. `known` are updates that are certain.
    """
    updates = {r: leaf for r, leaf in results.found.items() if r not in known}
    updates = {r: leaf for r, leaf in updates.items() if r not in results.gradients}
    updates |= known
    updates |= _by_value(results, arguments, shapes, updates)
    pairs = {**results.found, **updates}
    return pairs, results.gradients - updates.keys()


def _by_value(
    results: Results,
    arguments: Sequence[Argument],
    shapes: Sequence[Any],
    known: Mapping[int, int],
) -> dict[int, int]:
    """Updates of state that are elsewhere in the results, or alone."""
    taken, paired = set(known), set(known.values())
    leaves = [leaf for one in arguments for leaf in one.leaves]
    positions = zip(arguments, _positions(arguments), strict=True)
    state = {at for one, own in positions if one.is_state for at in own}
    found: dict[int, int] = {}
    more = True
    while more:
        more = False
        for result, flow in enumerate(results.flows):
            if result in taken or not np.ndim(shapes[result]):
                continue
            fits = {at for at in flow & state if _alike(leaves[at], shapes[result])}
            fits -= paired
            # A parameter depends on its moments; once these are paired, it is unique.
            if len(fits) == 1:
                found[result] = fits.pop()
                paired.add(found[result])
                taken.add(result)
                more = True
    return found


def _alike(leaf: Any, shape: Any) -> bool:
    return tuple(np.shape(leaf)) == tuple(shape.shape) and leaf.dtype == shape.dtype


def _positions(arguments: Sequence[Argument]) -> Iterator[range]:
    """The positions of each argument's leaves among those of all."""
    start = 0
    for one in arguments:
        yield range(start, start + len(one.leaves))
        start += len(one.leaves)


def same_trees(result: Any, arguments: Sequence[Argument]) -> dict[int, int]:
    """Find the trees of the arguments in a tree of shapes, outer trees first.

    A dict may have more entries than the argument's, such as the loss. Returns the
    position of a leaf of the result → that over the leaves of all arguments.
    """
    shapes, treedef = jax.tree.flatten(result)
    shapes = [tuple(np.shape(one)) for one in shapes]
    left = dict(enumerate(zip(arguments, _positions(arguments), strict=True)))
    found: dict[int, int] = {}

    def fits(tree: Any, argument: Argument) -> bool:
        places, own = jax.tree.flatten(tree)
        if own != argument.treedef:
            return False
        some = [shapes[at] for at in places]
        given = [tuple(np.shape(leaf)) for leaf in argument.leaves]
        return some == given and _is_state_like(own, some)

    def look(tree: Any) -> None:
        for number, (one, positions) in left.items():
            part = _entries(tree, one)
            if fits(part, one):
                del left[number]
                found.update(zip(jax.tree.leaves(part), positions, strict=True))
                rest = set(tree) - set(part) if part is not tree else ()
                for key in sorted(rest, key=str):
                    look(tree[key])
                return
        if not jax.tree_util.all_leaves([tree]):
            for part in jax.tree.leaves(tree, is_leaf=lambda node: node is not tree):
                look(part)

    look(jax.tree.unflatten(treedef, range(len(shapes))))
    return found


def _entries(tree: Any, argument: Argument) -> Any:
    """The entries of a dict that the argument has, if these are all of the argument."""
    if type(tree) is dict and type(argument.value) is dict:
        if tree.keys() > argument.value.keys():
            return {key: tree[key] for key in argument.value}
    return tree


def _is_state_like(treedef: Any, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether a tree may be state: not a single array, and not scalars alone."""
    return any(shapes) and not jax.tree_util.treedef_is_leaf(treedef)
