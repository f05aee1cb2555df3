"""The arrays that a jaxpr and those inside of it hold."""

import operator
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn

from flax_layoutmap._core.jax_internals import (
    opened,
    with_eqns,
)


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
