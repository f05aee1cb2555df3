"""Whole numbers and keys: computed one by one, which is exact everywhere."""

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from flax_layoutmap._tree.compiled import Call
from flax_layoutmap._tree.jaxprs import SMALL, Cut, size_of

# So many elements may have keys, and what raw ones are made of: all the keys of a
# model, say, which are split from one.
_MANY = 2**16


class Small:
    """What is small in a jaxpr, as far as it needs nothing else.

    Whole numbers that are made from nothing (`jnp.arange(8)`) are computed only for
    keys and outputs. Elsewhere they stay in the program: XLA computes with constants
    when it compiles, and may round otherwise than with inputs.
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        values: dict[Any, Any],
        sharding: Any,
        *,
        plan: Callable[[Call], None] | None = None,
        programs: Mapping[Any, Any] = MappingProxyType({}),
    ) -> None:
        """Takes what is known already.

        Args:
            jaxpr: the jaxpr.
            values: values by variable.
            sharding: how results are to lie; None: anywhere.
            plan: is given each call that would compute something; then nothing is
                computed, and values are of `jax.ShapeDtypeStruct`.
            programs: those that were compiled for these calls.
        """
        self._jaxpr, self._values, self._sharding = jaxpr, values, sharding
        self._plan, self._programs = plan, programs
        self._producer = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self._constant: set[Any] = set()  # those that are made from nothing
        self._folded: dict[Any, Any] = {}  # their values, where these were asked for

    def compute(self, eqns: Iterable[JaxprEqn]) -> None:
        """Adds to the values what some equations make, in order."""
        for eqn in eqns:
            read = [v for v in eqn.invars if not isinstance(v, Literal)]
            if not all(v in self._values or v in self._constant for v in read):
                continue
            if not all(map(_is_small, eqn.invars)):
                continue
            if not all(_is_small(v) and _is_exact(v) for v in eqn.outvars):
                continue
            keys = any(map(_is_key, [*read, *eqn.outvars]))
            if not keys and all(v in self._constant for v in read):
                self._constant.update(eqn.outvars)
            else:
                self._values.update(self._run(eqn))

    def constants_of(self, outputs: Sequence[Any]) -> dict[Any, Any]:
        """Outputs that are made from nothing, and their values."""
        found = [v for v in outputs if not isinstance(v, Literal)]
        return {var: self._fold(var) for var in found if var in self._constant}

    def _fold(self, var: Any) -> Any:
        if var not in self._folded:
            self._folded.update(self._run(self._producer[var]))
        return self._folded[var]

    def _run(self, eqn: JaxprEqn) -> dict[Any, Any]:
        for var in eqn.invars:
            if not isinstance(var, Literal) and var in self._constant:
                self._fold(var)
        given = collections.ChainMap(self._values, self._folded)
        on_host = self._sharding and _on_host(eqn, given)
        if on_host is not None:
            return {eqn.outvars[0]: on_host}
        cut, inputs = _numbers_as_inputs(eqn, given)
        asked = [self._sharding] * len(eqn.outvars)
        # A number lies as what is computed does, so that both share a program.
        call = Call(cut, inputs, asked, self._jaxpr, place=self._sharding)
        if self._plan is None:
            return dict(zip(eqn.outvars, call.run(self._programs), strict=True))
        self._plan(call)
        return {var: _to_come(var.aval, self._sharding) for var in eqn.outvars}


# What a counter of keys goes through.
_ON_HOST: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "mul": np.multiply,
    "sub": np.subtract,
}


def _on_host(eqn: JaxprEqn, values: Mapping[Any, Any]) -> np.ndarray | None:
    """The result of whole numbers of the host; None where that needs a program."""
    # A literal is of a type of its own in some versions of JAX.
    read = [
        np.asarray(v.val) if isinstance(v, Literal) else values[v] for v in eqn.invars
    ]
    aval: Any = eqn.outvars[0].aval
    name = eqn.primitive.name
    if not all(isinstance(value, np.ndarray | np.generic | int) for value in read):
        return None
    if getattr(aval, "weak_type", True) or any(map(_is_key, eqn.outvars)):
        return None
    if name == "broadcast_in_dim" and len(read) == 1 and np.ndim(read[0]) == 0:
        return np.full(aval.shape, read[0], aval.dtype)
    if name not in _ON_HOST:
        return None
    with np.errstate(over="ignore"):  # they wrap around, as on a device
        result = _ON_HOST[name](*(np.asarray(value, aval.dtype) for value in read))
    return np.asarray(result)


def _to_come(aval: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=sharding, weak_type=weak
    )


def _numbers_as_inputs(
    eqn: JaxprEqn, values: Mapping[Any, Any]
) -> tuple[Cut, list[Any]]:
    """An equation whose literals are inputs, with the values of its inputs.

    The number that is folded into a key is another one in each layer.
    """
    found: dict[Any, Any] = {}
    read: list[Any] = []
    for var in eqn.invars:
        if isinstance(var, Literal):
            aval: Any = var.aval
            read.append(Var(aval))
            found[read[-1]] = np.asarray(var.val, aval.dtype)
        else:
            read.append(var)
            found[var] = values[var]
    return Cut([eqn.replace(invars=read)], eqn.outvars), list(found.values())


def _is_small(var: Any) -> bool:
    of_keys = _is_key(var) or getattr(var.aval, "dtype", None) == np.uint32
    return 0 < size_of(var) <= (_MANY if of_keys else SMALL)


def _is_exact(var: Any) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and not jax.numpy.issubdtype(dtype, np.inexact)


def _is_key(var: Any) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)
