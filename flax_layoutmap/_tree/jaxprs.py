"""Jaxpr analysis: equations, inlined calls, equal structure, hashes of outputs."""

import hashlib
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from flax_layoutmap._core.jax_internals import (
    is_unspecified,
    opened,
    settings_of,
    with_eqns,
)
from flax_layoutmap._tree.watch import Same

# Values of up to this many elements are small.
SMALL = 64

# Parameters of equations that change no value: names, the mesh that was in context,
# and how to differentiate.
_NO_VALUES = {
    "jit": {"name", "ctx_mesh"},
    "pjit": {"name", "ctx_mesh"},
    "custom_jvp_call": {"jvp_jaxpr_fun", "jvp_jaxpr_thunk"},
    "custom_vjp_call": {"fwd_jaxpr_thunk", "bwd", "out_trees"},
    "custom_vjp_call_jaxpr": {"fwd_jaxpr_thunk", "bwd", "out_trees"},
}

# Calls that compute exactly their inner jaxpr.
CALLS = {"jit", "pjit", "remat2", "checkpoint", "closed_call", "core_call"}


def size_of(var: Any) -> int:
    """How many elements a variable of a jaxpr has."""
    return math.prod(getattr(var.aval, "shape", ()))


def needed_inputs(jaxpr: Jaxpr) -> set[Any]:
    """The inputs that any of its outputs is computed from."""
    needed = {var for var in jaxpr.outvars if not isinstance(var, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars):
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
    return needed.intersection(jaxpr.invars)


def inner_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs that an equation has as parameters."""
    found = []
    for value in eqn.params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            if (inner := opened(part)) is not None:
                found.append(inner[0])
    return found


def every(eqns: Iterable[JaxprEqn], seen: set[int] | None = None) -> Iterator[JaxprEqn]:
    """All equations, those of inner jaxprs too, each jaxpr once."""
    seen = set() if seen is None else seen
    for eqn in eqns:
        yield eqn
        for jaxpr in inner_jaxprs(eqn):
            if id(jaxpr) not in seen:
                seen.add(id(jaxpr))
                yield from every(jaxpr.eqns, seen)


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


# ---------------------------------------------------------------- inlined calls


def calls_in_line(jaxpr: Jaxpr) -> tuple[Jaxpr, dict[Any, Any]]:
    """The jaxpr with some calls inlined, and variable → value of their constants.

    A call (`jax.jit`, `jax.checkpoint`) that makes several large arrays, or one from
    another, would tie them together; one that closes over an array would put it in its
    own program.
    """
    if not any(map(_goes_in_line, jaxpr.eqns)):
        return jaxpr, {}
    names: dict[Any, Any] = {}
    values: dict[Any, Any] = {}
    eqns = list(_in_line(jaxpr.eqns, names, values))
    outvars = [_renamed(v, names) for v in jaxpr.outvars]
    return jaxpr.replace(eqns=eqns, outvars=outvars), values


def _renamed(var: Any, names: Mapping[Any, Any]) -> Any:
    return var if isinstance(var, Literal) else names.get(var, var)


def _goes_in_line(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name not in CALLS:
        return False
    made = sum(size_of(var) > SMALL for var in eqn.outvars)
    read = sum(size_of(var) > SMALL for var in eqn.invars)
    inner = opened(eqn.params.get("jaxpr"))
    if inner is None or len(inner[0].constvars) != len(inner[1]):
        return False
    closes_over = _keeps_arrays([eqn])
    if not closes_over and (made + read < 2 or not made):
        return False
    asked = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return all(map(is_unspecified, asked))


def _keeps_arrays(eqns: Iterable[JaxprEqn]) -> bool:
    """Whether calls among equations, or calls in them, close over arrays."""
    calls = (eqn for eqn in eqns if eqn.primitive.name in CALLS)
    called = filter(None, (opened(v) for eqn in calls for v in eqn.params.values()))
    return any(consts or _keeps_arrays(jaxpr.eqns) for jaxpr, consts in called)


def _in_line(
    eqns: Iterable[JaxprEqn], names: dict[Any, Any], values: dict[Any, Any]
) -> Iterator[JaxprEqn]:
    for eqn in eqns:
        read = [_renamed(var, names) for var in eqn.invars]
        if not _goes_in_line(eqn):
            made = [names.get(var, var) for var in eqn.outvars]
            yield eqn.replace(invars=read, outvars=made)
            continue
        found = opened(eqn.params["jaxpr"])
        assert found is not None  # as _goes_in_line has seen
        inner, consts = found
        # The same jaxpr may be called several times: its variables get new names.
        own: dict[Any, Any] = dict(zip(inner.invars, read, strict=True))
        for var, value in zip(inner.constvars, consts, strict=True):
            own[var] = Var(var.aval)
            values[own[var]] = value
        for var in (v for e in inner.eqns for v in e.outvars):
            own[var] = Var(var.aval)
        yield from _in_line(inner.eqns, own, values)
        for var, result in zip(eqn.outvars, inner.outvars, strict=True):
            names[var] = _renamed(result, own)


# -------------------------------------------------------------------------- structure


def structure(
    inputs: Sequence[Any],
    eqns: Iterable[JaxprEqn],
    outputs: Sequence[Any],
    seen: dict[int, Any] | None = None,
) -> Any:
    """Equations with numbers in place of variables; hashable."""
    seen = {} if seen is None else seen
    numbers: dict[Any, int] = {}
    for var in inputs:
        numbers[var] = len(numbers)

    def atom(var: Any) -> Any:
        if isinstance(var, Literal):
            host = np.asarray(var.val)
            return "literal", str(host.dtype), host.tobytes(), var.aval
        return numbers[var]

    lines = []
    for eqn in eqns:
        read = tuple(map(atom, eqn.invars))
        for var in eqn.outvars:
            numbers[var] = len(numbers)
        left_out = _NO_VALUES.get(eqn.primitive.name, ())
        params = tuple(
            (name, _plain(value, seen))
            for name, value in sorted(eqn.params.items())
            if name not in left_out
        )
        context = tuple(_plain(value, seen) for value in settings_of(eqn).values())
        avals = tuple(var.aval for var in eqn.outvars)
        lines.append((eqn.primitive, read, params, context, avals))
    given = tuple(var.aval for var in inputs)
    return given, tuple(lines), tuple(map(atom, outputs))


def _plain(value: Any, seen: dict[int, Any]) -> Any:
    """A value as something hashable that is equal for equal values only."""
    if (inner := opened(value)) is not None:
        jaxpr, consts = inner
        if id(jaxpr) not in seen:
            inputs = [*jaxpr.constvars, *jaxpr.invars]
            seen[id(jaxpr)] = structure(inputs, jaxpr.eqns, jaxpr.outvars, seen)
        return seen[id(jaxpr)], tuple(map(Same, consts))
    if isinstance(value, tuple | list):
        return (type(value), *(_plain(part, seen) for part in value))
    if isinstance(value, dict):
        pairs = sorted(value.items(), key=lambda pair: str(pair[0]))
        return "dict", tuple((key, _plain(part, seen)) for key, part in pairs)
    if isinstance(value, float | complex):
        return type(value), repr(value)  # 0.0 is -0.0, and nan is not nan
    if isinstance(value, np.ndarray | np.generic):
        return str(value.dtype), value.shape, value.tobytes()
    try:
        hash(value)
    except TypeError:
        return Same(value)
    return type(value), value


# ----------------------------------------------------------------------------- hashes


def hashes_of_outputs(
    closed: ClosedJaxpr, inputs: Sequence[Any], digest: Callable[[Any], str]
) -> list[str]:
    """For each output, a hash of the equations and numbers that it depends on.

    It is the same in every process that traces the same function: names, functions and
    devices among the parameters do not count. `digest` summarizes a number or an array;
    an empty text skips it.
    """
    given = [*_digested(closed.consts, digest), *map(digest, inputs)]
    return _hashes(closed.jaxpr, given, digest, {})


def _digested(consts: Iterable[Any], digest: Callable[[Any], str]) -> list[str]:
    return [digest(x if isinstance(x, jax.Array) else np.asarray(x)) for x in consts]


def _hashes(
    jaxpr: Jaxpr, given: Sequence[str], digest: Callable[[Any], str], seen: Any
) -> list[str]:
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], given, strict=True))

    def atom(var: Any) -> str:
        return digest(np.asarray(var.val)) if isinstance(var, Literal) else known[var]

    for eqn in jaxpr.eqns:
        left_out = _NO_VALUES.get(eqn.primitive.name, ())
        params = [
            (name, _hashed(value, digest, seen))
            for name, value in sorted(eqn.params.items())
            if name not in left_out
        ]
        text = repr((eqn.primitive.name, *map(atom, eqn.invars), params))
        short = hashlib.sha256(text.encode()).hexdigest()[:16]
        known |= {var: f"{short}.{at}" for at, var in enumerate(eqn.outvars)}
    return list(map(atom, jaxpr.outvars))


def _hashed(value: Any, digest: Callable[[Any], str], seen: dict[int, Any]) -> Any:
    """The numbers in a parameter of an equation, those of inner jaxprs too."""
    if (inner := opened(value)) is not None:
        jaxpr, consts = inner
        if id(jaxpr) not in seen:
            count = len(jaxpr.constvars) + len(jaxpr.invars)
            given = [f"input {at}" for at in range(count)]
            seen[id(jaxpr)] = _hashes(jaxpr, given, digest, seen)
        return seen[id(jaxpr)], _digested(consts, digest)
    if isinstance(value, tuple | list):
        return [_hashed(part, digest, seen) for part in value]
    is_number = isinstance(value, int | float | complex | np.ndarray | np.generic)
    return digest(np.asarray(value)) if is_number else ""
