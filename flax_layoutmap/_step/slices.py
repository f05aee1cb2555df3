"""Update large offloaded leaves slice by slice, along their first dim.

An optimizer computes each element of its state by itself. Where such equations lead
from a large leaf in host memory to the outputs, they run in a loop: each iteration
fetches a slice, and returns it to the same place. What they also read, such as the
parameters and their gradients, is sliced on the device. Explicit axes are Auto there.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from flax_layoutmap._step.auto_axes import Crossing, as_type, on_auto_axes

# Operations that compute each element from those at the same place.
_ELEMENTWISE = frozenset(
    """
    abs add add_any and cbrt ceil clamp convert_element_type copy cos div eq erf exp
    exp2 expm1 floor ge gt imag integer_pow is_finite le log log1p logistic lt max min
    mul ne neg nextafter not or pow real reduce_precision rem reshard round rsqrt
    select_n sign sin sqrt square stop_gradient sub tanh xor
    """.split()
)

Values = dict[Any, Any]  # by variable


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """Elementwise equations on arrays of one shape, which run in a loop.

    They depend on the inputs of the program and on `before`, not on other regions.

    Attributes:
        rows: how many rows a slice has.
        inputs: the arrays that they read.
        outputs: the arrays that others read, each with whether it goes to the host.
    """

    shape: tuple[int, ...]
    rows: int
    eqns: tuple[JaxprEqn, ...]
    inputs: tuple[Any, ...]
    outputs: Mapping[Any, bool]

    def run(self, device: Values, host: Values) -> Values:
        """The outputs, given values on the device and the offloaded leaves."""
        crossing, space = Crossing(), jax.memory.Space
        every = (v for e in self.eqns for v in e.invars if not isinstance(v, Literal))
        read = dict.fromkeys(every)
        device = {v: crossing.enter(device[v]) for v in read if v in device}
        own = device | {v: crossing.enter(host[v]) for v in self.inputs if v in host}
        places = self._places(host)

        def body(step: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            at = step * self.rows
            now = {**own, **dict(zip(places, carry, strict=True))}
            values = dict(device)
            for var in self.inputs:
                part = jax.lax.dynamic_slice_in_dim(now[var], at, self.rows)
                values[var] = (
                    jax.device_put(part, space.Device) if var in host else part
                )
            evaluate(self.eqns, values)
            parts = [
                jax.device_put(values[var], space.Host) if goes else values[var]
                for var, goes in self.outputs.items()
            ]
            return tuple(
                jax.lax.dynamic_update_slice_in_dim(whole, part, at, 0)
                for whole, part in zip(carry, parts, strict=True)
            )

        with on_auto_axes():
            start = []
            for place, (out, goes) in zip(places, self.outputs.items(), strict=True):
                if place is None:
                    new = jax.lax.full_like(device[self.inputs[0]], 0, out.aval.dtype)
                    start.append(jax.device_put(new, space.Host) if goes else new)
                else:
                    start.append(own[place])
            count = self.shape[0] // self.rows
            after = jax.lax.fori_loop(0, count, body, tuple(start))
        pairs = zip(self.outputs, after, strict=True)
        return {out: as_type(x, out.aval) for out, x in pairs}

    def _places(self, host: Values) -> list[Any]:
        """The input that each output is written over, or None; parameters first."""
        free = list(self.inputs)
        found = []
        for out, goes in self.outputs.items():
            fitting = (
                v
                for v in free
                if v.aval.dtype == out.aval.dtype and (v in host) is goes
            )
            found.append(next(fitting, None))
            if found[-1] is not None:
                free.remove(found[-1])
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """The equations of a function: before the regions, in them, and after them."""

    before: Sequence[JaxprEqn]
    regions: Sequence[Region]
    after: Sequence[JaxprEqn]


def find_regions(
    jaxpr: Jaxpr,
    row_bytes: Mapping[Any, int],
    on_host: Iterable[int],
    chunk_bytes: float,
) -> Parts:
    """Find what can run in slices.

    `row_bytes` has the large offloaded inputs, with the bytes of a row on one device;
    `on_host` are the positions of the outputs that go to the host.
    """
    # A function whose outputs nothing reads is an equation without outputs.
    jaxpr = jaxpr.replace(eqns=[eqn for eqn in jaxpr.eqns if eqn.outvars])
    region_of = _regions_of(jaxpr, row_bytes)
    users: dict[Any, set[Any]] = {}  # variable → the regions of what reads it
    for v in jaxpr.outvars:
        if not isinstance(v, Literal):
            users.setdefault(v, set()).add(None)
    source: Values = {}  # what is elementwise of one array → that array
    for eqn in jaxpr.eqns:
        read = {source.get(v, v) for v in _arrays(eqn)}
        if len(read) == 1 and _is_elementwise(eqn):
            source[eqn.outvars[0]] = read.pop()
    parts: dict[Any, list[JaxprEqn]] = {None: [], (): []}
    for at, eqn in reversed(list(enumerate(jaxpr.eqns))):
        region, uses = region_of[at], users.get(eqn.outvars[0], set())
        if region is None and len(uses) == 1 and eqn.outvars[0] in source:
            # What is made of one array for one region, such as a clipped gradient.
            (only,) = uses
            region = only or None
        parts.setdefault(region, []).append(eqn)
        for v in eqn.invars:
            if not isinstance(v, Literal):
                users.setdefault(v, set()).add(region)
    before, after = parts.pop(None)[::-1], parts.pop(())[::-1]
    goes = set(on_host)
    kept = {v for at, v in enumerate(jaxpr.outvars) if at not in goes}
    order = {v: at for at, v in enumerate(jaxpr.invars)}
    regions = []
    for shape, eqns in parts.items():
        made = dict.fromkeys(eqn.outvars[0] for eqn in eqns)  # in order
        read = dict.fromkeys(v for eqn in eqns for v in _arrays(eqn) if v not in made)
        size = sum(row_bytes.get(v, 0) for v in read)
        fitting = [n for n in range(1, shape[0] + 1) if n * size <= chunk_bytes]
        rows = max((n for n in fitting if shape[0] % n == 0), default=1)
        outputs = {
            v: v not in kept and users[v] <= {shape, None}
            for v in (v for v in jaxpr.outvars if v in made)
        } | {v: False for v in made if users[v] - {shape, None}}
        inputs = tuple(sorted(read, key=lambda v: order.get(v, len(order))))
        regions.append(Region(shape, rows, tuple(eqns[::-1]), inputs, outputs))
    return Parts(before, regions, after)


def _regions_of(jaxpr: Jaxpr, large: Mapping[Any, int]) -> list[Any]:
    """The region of each equation, by shape: None before the regions, () after them."""
    leads = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    for eqn in reversed(jaxpr.eqns):
        if _is_elementwise(eqn) and eqn.outvars[0] in leads:
            leads.update(_arrays(eqn))
    made_in: dict[Any, Any] = {}  # by variable
    found: list[Any] = []
    for eqn in jaxpr.eqns:
        read = [v for v in eqn.invars if not isinstance(v, Literal)]
        own = {made_in[v] for v in read if v in made_in}
        shape = _shape(eqn.outvars[0])
        if not (_is_elementwise(eqn) and eqn.outvars[0] in leads and own <= {shape}):
            region = () if own else None
        else:
            region = shape if own or not large.keys().isdisjoint(read) else None
        if region is not None:
            made_in.update(dict.fromkeys(eqn.outvars, region))
        found.append(region)
    return found


def _is_elementwise(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name not in _ELEMENTWISE:
        return False
    out = eqn.outvars[0]
    arrays = [v for v in eqn.invars if _shape(v)]
    return bool(_shape(out)) and all(_shape(v) == _shape(out) for v in arrays)


def _shape(var: Any) -> tuple[int, ...]:
    return getattr(var.aval, "shape", ())


def _arrays(eqn: JaxprEqn) -> list[Any]:
    """The variables that it reads, other than scalars."""
    return [v for v in eqn.invars if not isinstance(v, Literal) and _shape(v)]


def evaluate(eqns: Iterable[JaxprEqn], values: Values) -> None:
    """Evaluate elementwise equations, on arrays of any shape; adds to `values`."""
    for eqn in eqns:
        read = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
        if eqn.primitive.name == "reshard":
            (values[eqn.outvars[0]],) = read  # a layout of the whole array
        else:
            values[eqn.outvars[0]] = eqn.primitive.bind(*read, **eqn.params)
