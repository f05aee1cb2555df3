"""Arrays born in their shards, by one program for each distinct way to make them.

What makes one large array is cut out of the jaxpr of a constructor. Cuts that are the
same but for their inputs (the layers of a model, each with its own key) share a
program, so that its compilation does not grow with depth. Whole numbers and keys are
computed at once, one by one, which is exact everywhere.
"""

import collections
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer, eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from flax_layoutmap._flax_internals import no_mesh
from flax_layoutmap._place import is_eager, put

_LOG = logging.getLogger(__name__)

# An output that nobody wants.
SKIP = object()

# Whole numbers and keys of up to this many elements are computed at once.
_SMALL = 64

# Programs that are kept, over all models; the oldest is dropped.
_KEPT = 256
_PROGRAMS: collections.OrderedDict[Any, Any] = collections.OrderedDict()

# Parameters of equations that change no value: names, and how to differentiate.
_NO_VALUES = {
    "jit": {"name"},
    "pjit": {"name"},
    "custom_jvp_call": {"jvp_jaxpr_fun", "jvp_jaxpr_thunk"},
    "custom_vjp_call": {"fwd_jaxpr_thunk", "bwd", "out_trees"},
    "custom_vjp_call_jaxpr": {"fwd_jaxpr_thunk", "bwd", "out_trees"},
}


def compute(
    closed: ClosedJaxpr,
    consts: Sequence[Any],
    inputs: Sequence[Any],
    wanted: Sequence[Any],
    mesh: Mesh | None = None,
) -> list[Any]:
    """Computes outputs of a jaxpr, each in its shards.

    The values are those of one `jax.jit` of the whole with these out_shardings.

    Args:
        closed: the jaxpr.
        consts: its constants.
        inputs: its inputs.
        wanted: for each output its sharding, None for any, or `SKIP`.
        mesh: where to compute what is small, with Auto axes; None: wherever it is.

    Returns:
        The outputs that are wanted, in order.
    """
    jaxpr = closed.jaxpr
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values |= dict(zip(jaxpr.invars, inputs, strict=True))
    places = [at for at, sharding in enumerate(wanted) if sharding is not SKIP]
    if jaxpr.effects or not is_eager() or _rounds_by_program(jaxpr):
        _LOG.debug(
            "one program for %d arrays: effects, inside of a trace, or rbg keys on an "
            "old JAX",
            len(places),
        )
        cuts = [_Cut(jaxpr.eqns, [jaxpr.outvars[at] for at in places])]
        groups = [places]
    else:
        producer = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        outputs = [jaxpr.outvars[at] for at in places]
        needed = _needed(outputs, producer, values)
        needed_eqns = [eqn for eqn in jaxpr.eqns if id(eqn) in needed]
        everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        _compute_small(needed_eqns, values, jaxpr, everywhere)
        for at in places:
            _make_empty(jaxpr.outvars[at], values, wanted[at])
        open_ = [at for at in places if not _is_known(jaxpr.outvars[at], values)]
        groups = _groups(open_, jaxpr, producer, values)
        cuts = []
        for group in groups:
            own = [jaxpr.outvars[at] for at in group]
            needed = _needed(own, producer, values)
            cuts.append(_Cut([e for e in jaxpr.eqns if id(e) in needed], own))
        _LOG.debug("%d arrays in %d programs to run", len(open_), len(groups))
    made: dict[int, Any] = {}
    for group, cut in zip(groups, cuts, strict=True):
        shardings = [wanted[at] for at in group]
        results = _run(cut, values, shardings, jaxpr)
        made.update(zip(group, results, strict=True))
    results = [
        made[at] if at in made else _known(jaxpr.outvars[at], values, wanted[at])
        for at in places
    ]
    return [_spelled(x, wanted[at]) for x, at in zip(results, places, strict=True)]


def _spelled(value: Any, sharding: Any) -> Any:
    """A key whose data says how it lies as they do after a first call of `jax.jit`.

    A later call says P() where that says P(None), and JAX's caches tell these apart.
    """
    if sharding is None or isinstance(value, Tracer):
        return value
    if not jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value
    data = jax.random.key_data(value)
    spec = (*sharding.spec, *(None,) * (data.ndim - len(sharding.spec)))
    where = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    impl = jax.random.key_impl(value)
    return jax.random.wrap_key_data(jax.device_put(data, where), impl=impl)


def _rounds_by_program(jaxpr: Jaxpr) -> bool:
    """Whether normals may differ by one ulp between a cut and the whole.

    Seen with rbg keys on jax 0.8.1; not on 0.10.2, and not with threefry.
    """
    if jax.__version_info__ >= (0, 10):
        return False
    made = [*jaxpr.constvars, *jaxpr.invars]
    made += [var for eqn in jaxpr.eqns for var in eqn.outvars]
    return any("rbg" in str(getattr(var.aval, "dtype", "")) for var in made)


class _Cut:
    """A part of a jaxpr.

    Attributes:
        eqns: its equations, in order.
        outputs: its outputs.
        inputs: what it reads, in the order of first use.
    """

    def __init__(self, eqns: Sequence[JaxprEqn], outputs: Sequence[Any]) -> None:
        self.eqns, self.outputs = list(eqns), list(outputs)
        own = {var for eqn in self.eqns for var in eqn.outvars}
        read = [var for eqn in self.eqns for var in eqn.invars] + self.outputs
        self.inputs = list(
            dict.fromkeys(
                v for v in read if not isinstance(v, Literal) and v not in own
            )
        )

    def structure(self) -> Any:
        """Equal for cuts that differ in their inputs only."""
        return _structure(self.inputs, self.eqns, self.outputs, {})


def _is_known(var: Any, values: Mapping[Any, Any]) -> bool:
    return isinstance(var, Literal) or var in values


def _known(var: Any, values: Mapping[Any, Any], sharding: Any) -> Any:
    """A value that needs no program."""
    value = var.val if isinstance(var, Literal) else values[var]
    if isinstance(var, Literal):
        aval: Any = var.aval
        value = jax.numpy.asarray(value, aval.dtype)
    return value if sharding is None else put(value, sharding)


def _size(var: Any) -> int:
    return math.prod(getattr(var.aval, "shape", ()))


def _needed(
    outputs: Iterable[Any], producer: Mapping[Any, JaxprEqn], values: Mapping[Any, Any]
) -> set[int]:
    """Ids of the equations that outputs need, as far as values are not known."""
    found: set[int] = set()
    stack = list(outputs)
    while stack:
        var = stack.pop()
        if _is_known(var, values):
            continue
        eqn = producer[var]
        if id(eqn) not in found:
            found.add(id(eqn))
            stack.extend(eqn.invars)
    return found


def _compute_small(
    eqns: Iterable[JaxprEqn], values: dict[Any, Any], jaxpr: Jaxpr, sharding: Any
) -> None:
    """Computes whole numbers and keys, as far as they need nothing else."""
    for eqn in eqns:
        known = all(_is_known(v, values) and _is_small(v) for v in eqn.invars)
        if known and all(_is_small(v) and _is_exact(v) for v in eqn.outvars):
            cut = _Cut([eqn], eqn.outvars)
            results = _run(cut, values, [sharding] * len(eqn.outvars), jaxpr)
            values.update(zip(eqn.outvars, results, strict=True))


def _is_small(var: Any) -> bool:
    return 0 < _size(var) <= _SMALL


def _make_empty(var: Any, values: dict[Any, Any], sharding: Any) -> None:
    """Makes an array without elements: a program for it alone has wrong shards."""
    aval = var.aval
    is_key = jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key)
    if _size(var) or sharding is None or is_key or _is_known(var, values):
        return
    host = np.zeros(aval.shape, aval.dtype)
    values[var] = jax.make_array_from_callback(
        aval.shape, sharding, lambda index: host[index]
    )


def _is_exact(var: Any) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and not jax.numpy.issubdtype(dtype, np.inexact)


def _groups(
    places: Sequence[int],
    jaxpr: Jaxpr,
    producer: Mapping[Any, JaxprEqn],
    values: Mapping[Any, Any],
) -> list[list[int]]:
    """Outputs that share a large intermediate value, together."""
    leader = {at: at for at in places}

    def find(at: int) -> int:
        while leader[at] != at:
            leader[at] = at = leader[leader[at]]
        return at

    first: dict[int, int] = {}
    large = {
        id(eqn) for eqn in jaxpr.eqns if any(_size(v) > _SMALL for v in eqn.outvars)
    }
    for at in places:
        var = jaxpr.outvars[at]
        for eqn in _needed([var], producer, values):
            if eqn in large or eqn == id(producer[var]):
                leader[find(at)] = find(first.setdefault(eqn, at))
    groups: dict[int, list[int]] = {}
    for at in places:
        groups.setdefault(find(at), []).append(at)
    return list(groups.values())


def _part(jaxpr: Jaxpr, cut: _Cut) -> Jaxpr:
    return jaxpr.replace(
        constvars=[],
        invars=cut.inputs,
        outvars=cut.outputs,
        eqns=cut.eqns,
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )


def _run(
    cut: _Cut, values: Mapping[Any, Any], shardings: Sequence[Any], jaxpr: Jaxpr
) -> list[Any]:
    """Runs the program of a cut, or that of an earlier one of the same structure."""
    key = (cut.structure(), tuple(shardings))
    program = _PROGRAMS.get(key)
    if program is None:
        part = _part(jaxpr, cut)

        def born(*inputs: Any) -> list[Any]:
            # Not jaxpr_as_fun, after which debug_nans checks nothing any more.
            with no_mesh():
                return eval_jaxpr(part, [], *inputs)

        program = _PROGRAMS[key] = jax.jit(born, out_shardings=list(shardings))
        if len(_PROGRAMS) > _KEPT:
            _PROGRAMS.popitem(last=False)
    with no_mesh():
        return program(*[values[var] for var in cut.inputs])


# -------------------------------------------------------------------------- structure


class _Same:
    """Equal to what holds the very same object, which it keeps alive."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def _structure(
    inputs: Sequence[Any],
    eqns: Iterable[JaxprEqn],
    outputs: Sequence[Any],
    seen: dict[int, Any],
) -> Any:
    """Equations with numbers in place of variables; hashable."""
    numbers: dict[Any, int] = {}
    for var in inputs:
        numbers[var] = len(numbers)

    def atom(var: Any) -> Any:
        if isinstance(var, Literal):
            host = np.asarray(var.val)  # of a type of its own in some versions of JAX
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
        context = tuple(
            _plain(getattr(eqn.ctx, name, None), seen)
            for name in ("compute_type", "threefry_partitionable", "xla_metadata")
        )
        avals = tuple(var.aval for var in eqn.outvars)
        lines.append((eqn.primitive, read, params, context, avals))
    given = tuple(var.aval for var in inputs)
    return given, tuple(lines), tuple(map(atom, outputs))


def _plain(value: Any, seen: dict[int, Any]) -> Any:
    """A value as something hashable that is equal for equal values only."""
    if isinstance(value, ClosedJaxpr):
        inner = _plain(value.jaxpr, seen)
        return inner, tuple(map(_Same, value.consts))
    if isinstance(value, Jaxpr):
        if id(value) not in seen:
            inputs = [*value.constvars, *value.invars]
            seen[id(value)] = _structure(inputs, value.eqns, value.outvars, seen)
        return seen[id(value)]
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
        return _Same(value)
    return type(value), value
