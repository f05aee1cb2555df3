"""Scans over large offloaded leaves: the parameters of all layers, in host memory.

Each iteration of `jax.lax.scan` (of `nnx.scan`, `nn.scan`) reads a row of the leaf, and
fetches that alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.core import eval_jaxpr
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from flax_layoutmap._step.memory import on_device

Values = Mapping[Any, Any]  # by variable


def scans_any(eqn: JaxprEqn, leaves: Values) -> bool:
    """Whether an equation is a scan over the rows of one of these leaves."""
    if eqn.primitive.name != "scan":
        return False
    return any(v in leaves for v in eqn.invars[_first_row(eqn) :])


def _first_row(eqn: JaxprEqn) -> int:
    """The position of the first input of which a scan reads rows, never a Literal."""
    return eqn.params["num_consts"] + eqn.params["num_carry"]


def scan_by_layer(eqn: JaxprEqn, device: Values, host: Values) -> list[Any]:
    """The outputs of a scan, given values on the device and the offloaded leaves."""
    body, first = eqn.params["jaxpr"], _first_row(eqn)
    whole, rows = eqn.invars[:first], eqn.invars[first:]
    given = [v.val if isinstance(v, Literal) else device[v] for v in whole]
    given += [host[v] if v in host else device[v] for v in rows]
    spaces = [jax.typeof(value).memory_space for value in given]
    types = [
        aval.update(memory_space=space)
        for aval, space in zip(body.in_avals, spaces, strict=True)
    ]

    def fetching(*args: Any) -> Any:
        return eval_jaxpr(body.jaxpr, body.consts, *map(on_device, args))

    params = {**eqn.params, "jaxpr": jax.make_jaxpr(fetching)(*types)}
    return eqn.primitive.bind(*given, **params)


def without_copies(jaxpr: Jaxpr) -> Jaxpr:
    """The same function, without the copies of stacks that scans make row by row.

    `nnx.remat` also returns the Variables that it only reads, and a scan then stacks
    them again.
    """
    same = _copies(jaxpr)

    def originals(variables: Sequence[Any]) -> list[Any]:
        return [v if isinstance(v, Literal) else same.get(v, v) for v in variables]

    eqns = [eqn.replace(invars=originals(eqn.invars)) for eqn in jaxpr.eqns]
    return jaxpr.replace(eqns=eqns, outvars=originals(jaxpr.outvars))


def _copies(jaxpr: Jaxpr) -> dict[Any, Any]:
    """Results of scans and `jax.checkpoint` that are inputs of them → these inputs."""
    same: dict[Any, Any] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            inner, first = eqn.params["jaxpr"].jaxpr, _first_row(eqn)
            carried = eqn.params["num_carry"]
        elif eqn.primitive.name == "remat2":
            inner, first, carried = eqn.params["jaxpr"], 0, 0
        else:
            continue
        within = _copies(inner)
        given = dict(zip(inner.invars[first:], eqn.invars[first:], strict=True))
        results = zip(eqn.outvars[carried:], inner.outvars[carried:], strict=True)
        for result, v in results:
            origin = None if isinstance(v, Literal) else given.get(within.get(v, v))
            if origin is not None and not isinstance(origin, Literal):
                same[result] = same.get(origin, origin)
    return same
