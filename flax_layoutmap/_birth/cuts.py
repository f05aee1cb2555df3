"""Stage "cuts": split the jaxpr of a constructor into programs, in order.

Each large array is computed by a part of the jaxpr, cut out of it. Cuts that are equal
but for their inputs (the layers of a model, each with its own key) share a program, so
that compile time does not grow with depth. Small integers and keys are computed one
equation at a time, which is exact on every backend.
"""

import collections
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from flax_layoutmap._birth.programs import Cut, Plan, Step, is_split, sharding_of
from flax_layoutmap._core.mesh import retyped
from flax_layoutmap._place.place import is_eager
from flax_layoutmap._tree.jaxprs import SMALL, size_of

_LOG = logging.getLogger(__name__)

# An output that is not needed.
SKIP = object()

# The most elements of small arrays of keys, typed or raw: all keys of a model may be
# split from one.
_MANY = 2**16


def cuts_of(
    jaxpr: Jaxpr,
    values: Mapping[Any, Any],
    wanted: Sequence[Any],
    mesh: Mesh | None,
    *,
    names: Sequence[str] = (),
    exact: bool = False,
) -> Plan:
    """Plan the programs for outputs of a jaxpr.

    Args:
        jaxpr: the jaxpr.
        values: its inputs and constants, by variable.
        wanted: the sharding of each output, None for any, or `SKIP`.
        mesh: where to compute small values, with Auto axes; None for anywhere.
        names: names of the first outputs, for the log.
        exact: whether to compute numbers that are rounded replicated, then slice.
    """
    at = [at for at, sharding in enumerate(wanted) if sharding is not SKIP]
    outputs = [(number, jaxpr.outvars[number]) for number in at]
    eager = is_eager()
    if jaxpr.effects or not eager:
        _LOG.debug("one program for %d arrays: effects, or inside of a trace", len(at))
        small = _Small(jaxpr, values, None)
        cuts = {tuple(at): Cut(jaxpr, tuple(jaxpr.eqns), _vars(outputs))}
    else:
        graph = _Graph(jaxpr)
        small = _Small(jaxpr, values, mesh and NamedSharding(mesh, PartitionSpec()))
        small.plan(jaxpr.eqns[n] for n in graph.needed(_vars(outputs), values))
        for number, var in outputs:
            small.make_empty(var, wanted[number])
        small.plan_constants(_vars(outputs))
        large = [pair for pair in outputs if not small.knows(pair[1])]
        cuts = dict(graph.cuts(large, small.values))
        _LOG.debug("%d arrays in %d programs to run", len(large), len(cuts))
    steps = list(small.steps)
    for group, cut in cuts.items():
        shardings = tuple(wanted[number] for number in group)
        called = tuple(_name(names, number) for number in group)
        whole = exact and eager and cut.rounds()
        steps.append(_large_step(cut, group, shardings, small.values, called, whole))
    made = {number for group in cuts for number in group}
    results = [
        (number if number in made else var, wanted[number]) for number, var in outputs
    ]
    return Plan(small.values | small.folded, tuple(steps), tuple(results))


def _vars(outputs: Iterable[tuple[int, Any]]) -> tuple[Any, ...]:
    return tuple(var for _, var in outputs)


def _name(names: Sequence[str], number: int) -> str:
    return names[number] if number < len(names) else f"output {number}"


class _Graph:
    """The equations of a jaxpr, by the variables that they define."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self._jaxpr = jaxpr
        self._producer = {v: at for at, e in enumerate(jaxpr.eqns) for v in e.outvars}

    def needed(self, outputs: Sequence[Any], values: Mapping[Any, Any]) -> list[int]:
        """Numbers of the equations that outputs need, without those of known values."""
        found: set[int] = set()
        stack = list(outputs)
        while stack:
            var = stack.pop()
            if not _is_known(var, values) and self._producer[var] not in found:
                found.add(self._producer[var])
                stack.extend(self._jaxpr.eqns[self._producer[var]].invars)
        return sorted(found)

    def cuts(
        self, outputs: Sequence[tuple[int, Any]], values: Mapping[Any, Any]
    ) -> Iterator[tuple[tuple[int, ...], Cut]]:
        """Groups of outputs that share a large intermediate value, and their cuts."""
        eqns = self._jaxpr.eqns
        leader = {at: at for at, _ in outputs}

        def find(at: int) -> int:
            while leader[at] != at:
                leader[at] = at = leader[leader[at]]
            return at

        first: dict[int, int] = {}
        for at, var in outputs:
            for number in self.needed([var], values):
                is_large = any(size_of(v) > SMALL for v in eqns[number].outvars)
                if is_large or number == self._producer[var]:
                    leader[find(at)] = find(first.setdefault(number, at))
        groups: dict[int, list[tuple[int, Any]]] = {}
        for at, var in outputs:
            groups.setdefault(find(at), []).append((at, var))
        for group in groups.values():
            own = _vars(group)
            needed = tuple(eqns[number] for number in self.needed(own, values))
            yield tuple(at for at, _ in group), Cut(self._jaxpr, needed, own)


def _large_step(
    cut: Cut,
    group: tuple[int, ...],
    shardings: tuple[Any, ...],
    values: Mapping[Any, Any],
    names: tuple[str, ...],
    whole: bool,
) -> Step:
    """The program of a cut.

    A large value that is on no mesh yet is put into the shards of the result if
    possible: `jax.jit` would copy it to each device as a whole.
    """
    asked = tuple(map(_replicated, shardings)) if whole else shardings
    given = tuple(values[var] for var in cut.inputs)
    pairs = zip(cut.inputs, given, strict=True)
    free = [size_of(var) > SMALL and _is_unplaced(value) for var, value in pairs]
    where = None
    fits = any(free) and is_split(asked[0])
    if fits and cut.keeps_shape() and cut.is_elementwise():
        where = NamedSharding(retyped(asked[0].mesh, AxisType.Auto), asked[0].spec)
    places = tuple(where if is_free else None for is_free in free)
    wanted = shardings if whole else None
    return Step(cut, given, places, asked, group, names, wanted)


def _is_unplaced(value: Any) -> bool:
    is_to_come = isinstance(value, jax.ShapeDtypeStruct)
    return not is_to_come and not getattr(value, "committed", False)


def _replicated(sharding: Any) -> Any:
    return sharding and NamedSharding(sharding.mesh, PartitionSpec())


def _is_known(var: Any, values: Any) -> bool:
    return isinstance(var, Literal) or var in values


# -------------------------------------------------------------------- small values


class _Small:
    """Plans the steps for small integers and keys that depend on nothing else.

    Integers made without inputs (`jnp.arange(8)`) are computed only for keys and
    outputs. Otherwise they stay in the program: XLA folds constants when it compiles,
    and may round otherwise than with inputs.

    Attributes:
        values: values by variable, `jax.ShapeDtypeStruct` for the result of a step.
        folded: likewise, for requested values that are made without inputs.
        steps: the steps, in order.
    """

    def __init__(self, jaxpr: Jaxpr, values: Mapping[Any, Any], place: Any) -> None:
        """Start from known values, with the sharding of results; None for any."""
        self.values = dict(values)
        self.folded: dict[Any, Any] = {}
        self.steps: list[Step] = []
        self._jaxpr, self._place = jaxpr, place
        self._constant: dict[Any, JaxprEqn] = {}  # made without inputs, by equation

    def plan(self, eqns: Iterable[JaxprEqn]) -> None:
        """Plan the results of equations, in order."""
        for eqn in eqns:
            read = [v for v in eqn.invars if not isinstance(v, Literal)]
            if not all(v in self.values or v in self._constant for v in read):
                continue
            if not all(map(_is_small, eqn.invars)):
                continue
            if not all(_is_small(v) and _is_exact(v) for v in eqn.outvars):
                continue
            keys = any(map(_is_key, [*read, *eqn.outvars]))
            if not keys and all(v in self._constant for v in read):
                self._constant |= dict.fromkeys(eqn.outvars, eqn)
            else:
                self.values |= self._computed(eqn)

    def plan_constants(self, outputs: Sequence[Any]) -> None:
        """Plan outputs that are made without inputs; no other program reads them."""
        for var in outputs:
            if not isinstance(var, Literal) and var in self._constant:
                self._fold(var)

    def knows(self, var: Any) -> bool:
        """Whether a value needs no other program."""
        return _is_known(var, self.values) or var in self.folded

    def make_empty(self, var: Any, sharding: Any) -> None:
        """Make an array without elements: a program for it alone has wrong shards."""
        aval = var.aval
        if size_of(var) or sharding is None or _is_key(var):
            return
        if not _is_known(var, self.values):
            host = np.zeros(aval.shape, aval.dtype)
            self.values[var] = jax.make_array_from_callback(
                aval.shape, sharding, lambda index: host[index]
            )

    def _fold(self, var: Any) -> None:
        if var not in self.folded:
            self.folded |= self._computed(self._constant[var])

    def _computed(self, eqn: JaxprEqn) -> dict[Any, Any]:
        """The results of an equation: computed on the host, or by a step."""
        for var in eqn.invars:
            if not isinstance(var, Literal) and var in self._constant:
                self._fold(var)
        known = collections.ChainMap(self.values, self.folded)
        on_host = self._place and _on_host(eqn, known)
        if on_host is not None:
            return {eqn.outvars[0]: on_host}
        cut, given = _with_numbers_as_inputs(self._jaxpr, eqn, known)
        # A literal gets the sharding of a computed number: both share a program.
        place = self._place or _place_among(given)
        places, shardings = (place,) * len(given), (place,) * len(eqn.outvars)
        self.steps.append(Step(cut, given, places, shardings, tuple(eqn.outvars)))
        return {var: _to_come(var.aval, place) for var in eqn.outvars}


def _place_among(values: Iterable[Any]) -> Any:
    """The sharding of what is computed from values; None for anywhere."""
    for own in filter(None, map(sharding_of, values)):
        if isinstance(own, NamedSharding):
            return NamedSharding(own.mesh, PartitionSpec())
        return own
    return None


# The operations of a counter of keys.
_ON_HOST: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "mul": np.multiply,
    "sub": np.subtract,
}


def _on_host(eqn: JaxprEqn, values: Mapping[Any, Any]) -> np.ndarray | None:
    """The result of integers on the host; None if that needs a program."""
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


def _with_numbers_as_inputs(
    jaxpr: Jaxpr, eqn: JaxprEqn, values: Mapping[Any, Any]
) -> tuple[Cut, tuple[Any, ...]]:
    """An equation whose literals are inputs, with the values of its inputs.

    So that the number that is folded into a key differs by layer, and not the program.
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
    cut = Cut(jaxpr, (eqn.replace(invars=read),), tuple(eqn.outvars))
    return cut, tuple(found.values())


def _is_small(var: Any) -> bool:
    of_keys = _is_key(var) or getattr(var.aval, "dtype", None) == np.uint32
    return 0 < size_of(var) <= (_MANY if of_keys else SMALL)


def _is_exact(var: Any) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and not jax.numpy.issubdtype(dtype, np.inexact)


def _is_key(var: Any) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)
