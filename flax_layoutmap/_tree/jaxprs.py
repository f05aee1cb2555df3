"""Jaxprs inside of equations, and the arrays that they hold."""

import operator
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from flax_layoutmap._core.jax_internals import (
    opened,
    with_eqns,
)


def inner_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs that an equation has as parameters."""
    found = []
    for value in eqn.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if (inner := opened(part)) is not None:
                found.append(inner[0])
    return found


def results_read(jaxpr: Jaxpr, prefix: str) -> set[str]:
    """The called functions of these names whose results are used."""
    found: set[str] = set()
    jaxprs, seen = [jaxpr], {id(jaxpr)}
    for one in jaxprs:
        made = {
            var: name
            for eqn in one.eqns
            if (name := str(eqn.params.get("name"))).startswith(prefix)
            for var in eqn.outvars
        }
        read = [*one.outvars, *(var for eqn in one.eqns for var in eqn.invars)]
        found.update(made[var] for var in read if isinstance(var, Var) and var in made)
        for inner in (inner for eqn in one.eqns for inner in inner_jaxprs(eqn)):
            if id(inner) not in seen:
                seen.add(id(inner))
                jaxprs.append(inner)
    return found


def with_own_arrays(program: ClosedJaxpr) -> ClosedJaxpr:
    """The same with copies of its NumPy arrays, which their owners may change.

    While a jaxpr holds JAX's version of an array, later traces reuse that, even if the
    array has changed (jax 0.10.2). Inner jaxprs without such arrays stay the same
    objects, so that what is called twice is lowered once.
    """
    known: dict[int, ClosedJaxpr] = {}

    def own(part: Any) -> Any:
        if type(part) is tuple or type(part) is list:
            parts = type(part)(map(own, part))
            return part if all(map(operator.is_, parts, part)) else parts
        if isinstance(part, np.ndarray):
            return part.copy()
        if isinstance(part, JaxprEqn):
            params = {name: own(value) for name, value in part.params.items()}
            same = all(map(operator.is_, params.values(), part.params.values()))
            return part if same else part.replace(params=params)
        if (inner := opened(part)) is None:
            return part
        if id(part) not in known:
            jaxpr, consts = inner
            eqns, copies = own(jaxpr.eqns), own(consts)
            same = eqns is jaxpr.eqns and copies is consts
            known[id(part)] = part if same else with_eqns(part, eqns, copies)
        return known[id(part)]

    return own(program)
