"""Pair the results of a step with the arguments that they update.

A new value is computed from the old one element by element: `w - rate * gradient` from
`w`. A gradient is not: products and sums over dims stand between it and every argument.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from flax_layoutmap._step.arguments import Argument

Flow = frozenset[int]
_NOTHING: Flow = frozenset()

# An element of the result is made from others than that at its place.
_MIXES = frozenset(
    """
    all_gather all_to_all cholesky conv_general_dilated cumlogsumexp cummax cummin
    cumprod cumsum dot_general eigh fft gather ppermute psum_scatter qr ragged_dot rev
    sort svd top_k triangular_solve
    """.split()
)
# The result is the first operand with other values at some places.
_WRITES = ("dynamic_update_slice", "scatter")


def flows(jaxpr: Jaxpr) -> list[Flow]:
    """Of each output, the inputs of its shape that it is an element-by-element sum of.

    Args:
        jaxpr: what a step was traced to.

    Returns:
        Positions of inputs, one set per output.
    """
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
    """Per output of an equation, the operands that it may be a new value of."""
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
    """What an equation calls with its last operands, for all of its outputs.

    So do calls, `scan`, `cond` (after the index) and the body of a `while`.
    """
    for value in eqn.params.values():
        parts: Sequence[Any] = value if isinstance(value, tuple | list) else (value,)
        for part in parts:
            one = part.jaxpr if isinstance(part, ClosedJaxpr) else part
            if isinstance(one, Jaxpr) and len(one.outvars) == len(eqn.outvars):
                if len(one.invars) <= len(eqn.invars):
                    yield one


def _shape(var: Any) -> Any:
    return getattr(var.aval, "shape", None)


@dataclasses.dataclass(frozen=True, slots=True)
class Results:
    """The results of a step, beside its arguments.

    Attributes:
        found: position of a result → that of the leaf, over the leaves of all
            arguments, in whose place it stands in a tree of the same structure.
        gradients: those of them that are no new values.
        unchanged: those that are an argument as it came.
        flows: of each result, the leaves that it may be a new value of.
    """

    found: dict[int, int]
    gradients: frozenset[int]
    unchanged: frozenset[int]
    flows: list[frozenset[int]]


def look_at(
    traced: Any,
    order: Sequence[int],
    result: Any,
    start: int,
    arguments: Sequence[Argument],
) -> Results:
    """Look for the arguments in the results of a step.

    Args:
        traced: the step.
        order: position of an input of the trace → that of the leaf.
        result: a tree of shapes.
        start: position of its first leaf.
        arguments: the arguments.
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
    held = _of_containers(arguments)
    for leaves in _positions(arguments):
        some = [at for at, leaf in found.items() if leaf in leaves]
        # That of a tree is a new value as a whole, or a gradient as a whole.
        if not any(flowing[at] & held for at in some):
            gradients.update(some)
    return Results(found, frozenset(gradients), frozenset(unchanged), flowing)


def comes_back(results: Results, argument: Argument, positions: range) -> bool:
    """Whether an argument is state because it is returned, changed.

    A tuple of arrays may be any: `(x, y)` in, and another `(x, y)` out.
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
    """The leaf that each result is the new value, or the gradient of.

    Args:
        results: the results.
        arguments: the arguments.
        shapes: of all results.
        known: what is known to be a new value: position of a result → of the leaf.

    Returns:
        Position of a result → that of the leaf; and which of them are gradients.
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
    """New values of state that stand elsewhere than the state did, or alone."""
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
            # Of a parameter and its moments, the moments show first which is which.
            if len(fits) == 1:
                found[result] = fits.pop()
                paired.add(found[result])
                taken.add(result)
                more = True
    return found


def _alike(leaf: Any, shape: Any) -> bool:
    return tuple(np.shape(leaf)) == tuple(shape.shape) and leaf.dtype == shape.dtype


def _of_containers(arguments: Sequence[Argument]) -> frozenset[int]:
    positions = zip(arguments, _positions(arguments), strict=True)
    return frozenset(
        at for one, own in positions if one.is_container or one.is_state for at in own
    )


def _positions(arguments: Sequence[Argument]) -> Iterator[range]:
    """Of each argument, where its leaves are among those of all."""
    start = 0
    for one in arguments:
        yield range(start, start + len(one.leaves))
        start += len(one.leaves)


def same_trees(result: Any, arguments: Sequence[Argument]) -> dict[int, int]:
    """Find the trees of the arguments in a result, from the outside in.

    A dict with more entries than the argument's counts, too: a state and the loss.

    Args:
        result: a tree of shapes.
        arguments: the arguments.

    Returns:
        Position of a leaf of the result → that over the leaves of all arguments.
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
    """Of a dict those entries that the argument has, if it has them all."""
    if type(tree) is dict and type(argument.value) is dict:
        if tree.keys() > argument.value.keys():
            return {key: tree[key] for key in argument.value}
    return tree


def _is_state_like(treedef: Any, shapes: Sequence[tuple[int, ...]]) -> bool:
    """A single array, or scalars alone (a loss, a counter), are no state."""
    return any(shapes) and not jax.tree_util.treedef_is_leaf(treedef)
