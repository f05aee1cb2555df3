"""Which arguments a result is computed from element by element, as a new value is.

`w - rate * gradient` is so from `w`. A gradient is not: products and sums over dims
stand between it and every argument.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

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
