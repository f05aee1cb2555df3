"""Arrays born in their shards, by one program for each distinct way to make them.

What makes one large array is cut out of the jaxpr of a constructor. Cuts that are the
same but for their inputs (the layers of a model, each with its own key) share a
program, so that its compilation does not grow with depth. Whole numbers and keys are
computed at once, one by one, which is exact everywhere.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from flax_layoutmap._core.errors import warn
from flax_layoutmap._core.mesh import retyped
from flax_layoutmap._place.place import is_eager, put
from flax_layoutmap._show.table import human_bytes
from flax_layoutmap._tree.compiled import Call, prepare
from flax_layoutmap._tree.jaxprs import SMALL, Cut, calls_in_line, every, size_of
from flax_layoutmap._tree.small import Small

_LOG = logging.getLogger(__name__)

# An output that nobody wants.
SKIP = object()

# Warnings that this process has seen.
_TOLD: set[str] = set()


def compute(
    closed: ClosedJaxpr,
    consts: Sequence[Any],
    inputs: Sequence[Any],
    wanted: Sequence[Any],
    mesh: Mesh | None = None,
    *,
    names: Sequence[str] = (),
    exact: bool = False,
) -> list[Any]:
    """Computes outputs of a jaxpr, each in its shards.

    The values are those of one `jax.jit` of the whole with these out_shardings.

    Args:
        closed: the jaxpr.
        consts: its constants.
        inputs: its inputs.
        wanted: for each output its sharding, None for any, or `SKIP`.
        mesh: where to compute what is small, with Auto axes; None: wherever it is.
        names: what to call the first outputs in the log.
        exact: whether the values are to be those without shardings, also where an
            element is computed from several others: that is then computed whole, one
            program at a time.

    Returns:
        The outputs that are wanted, in order.
    """
    jaxpr, values = calls_in_line(closed.jaxpr)
    values |= zip(jaxpr.constvars, consts, strict=True)
    values |= dict(zip(jaxpr.invars, inputs, strict=True))
    places = [at for at, sharding in enumerate(wanted) if sharding is not SKIP]
    if any(_is_split(wanted[at]) for at in places):
        _tell_of_keys(jaxpr)
    rounds = _rounds_by_program(jaxpr)
    programs: dict[Any, Any] = {}
    if jaxpr.effects or not is_eager() or rounds:
        _LOG.debug(
            "one program for %d arrays: effects, inside of a trace, or rbg keys on an "
            "old JAX",
            len(places),
        )
        cuts = {tuple(places): Cut(jaxpr.eqns, [jaxpr.outvars[at] for at in places])}
        plan = None
    else:
        plan = _Plan(jaxpr, places, wanted, mesh)
        cuts = plan.cuts(values)
    jobs = {
        group: _Job(
            cut,
            jaxpr,
            [wanted[at] for at in group],
            exact and is_eager() and (rounds or not cut.is_one_by_one()),
        )
        for group, cut in cuts.items()
    }
    if plan is not None:
        # All programs at once: several are compiled side by side.
        ready = [job for job in jobs.values() if not job.free(plan.values)]
        programs = prepare([*plan.calls, *(job.call(plan.values) for job in ready)])
        plan.settle(values, programs)
    made: dict[int, Any] = {}
    for group, job in jobs.items():
        called = [names[at] if at < len(names) else f"output {at}" for at in group]
        made.update(zip(group, job.make(values, called, programs), strict=True))
    results = [
        made[at] if at in made else _known(jaxpr.outvars[at], values, wanted[at])
        for at in places
    ]
    return [_spelled(x, wanted[at]) for x, at in zip(results, places, strict=True)]


class _Plan:
    """What is computed by which program; nothing is computed yet.

    Attributes:
        values: values by variable; a `jax.ShapeDtypeStruct` for what will be computed.
        calls: what computes what is small.
    """

    def __init__(
        self, jaxpr: Jaxpr, places: Sequence[int], wanted: Sequence[Any], mesh: Any
    ) -> None:
        self.values: dict[Any, Any] = {}
        self.calls: list[Call] = []
        self._jaxpr, self._outputs = jaxpr, [(at, jaxpr.outvars[at]) for at in places]
        self._wanted = wanted
        self._everywhere = mesh and NamedSharding(mesh, PartitionSpec())
        self._producer = {v: at for at, e in enumerate(jaxpr.eqns) for v in e.outvars}
        self._needed: list[int] = []

    def cuts(self, values: Mapping[Any, Any]) -> dict[tuple[int, ...], Cut]:
        """Outputs that are made together → how."""
        self.values = dict(values)
        outputs = [var for _, var in self._outputs]
        self._needed = self._equations(outputs, self.values)
        known = self._settled(self.values, plan=self.calls.append)
        open_ = [
            (at, var)
            for at, var in self._outputs
            if not _is_known(var, self.values) and var not in known
        ]
        cuts = {}
        for group in self._groups(open_):
            own = [self._jaxpr.outvars[at] for at in group]
            eqns = [self._jaxpr.eqns[n] for n in self._equations(own, self.values)]
            cuts[tuple(group)] = Cut(eqns, own)
        _LOG.debug("%d arrays in %d programs to run", len(open_), len(cuts))
        return cuts

    def settle(self, values: dict[Any, Any], programs: dict[Any, Any]) -> None:
        """Adds what is small, or empty, to the values."""
        values |= self._settled(values, programs=programs)

    def _settled(self, values: dict[Any, Any], **how: Any) -> dict[Any, Any]:
        """Adds to the values; returns those of outputs that no program may read.

        In the programs these are folded.
        """
        small = Small(self._jaxpr, values, self._everywhere, **how)
        small.compute(self._jaxpr.eqns[at] for at in self._needed)
        for at, var in self._outputs:
            _make_empty(var, values, self._wanted[at])
        return small.constants_of([var for _, var in self._outputs])

    def _equations(
        self, outputs: Sequence[Any], values: Mapping[Any, Any]
    ) -> list[int]:
        """Numbers of the equations that outputs need, as far as values are unknown."""
        found: set[int] = set()
        stack = list(outputs)
        while stack:
            var = stack.pop()
            if not _is_known(var, values) and self._producer[var] not in found:
                found.add(self._producer[var])
                stack.extend(self._jaxpr.eqns[self._producer[var]].invars)
        return sorted(found)

    def _groups(self, outputs: Sequence[tuple[int, Any]]) -> list[list[int]]:
        """Outputs that share a large intermediate value, together."""
        leader = {at: at for at, _ in outputs}

        def find(at: int) -> int:
            while leader[at] != at:
                leader[at] = at = leader[leader[at]]
            return at

        first: dict[int, int] = {}
        for at, var in outputs:
            for number in self._equations([var], self.values):
                made = self._jaxpr.eqns[number].outvars
                is_large = any(size_of(v) > SMALL for v in made)
                if is_large or number == self._producer[var]:
                    leader[find(at)] = find(first.setdefault(number, at))
        groups: dict[int, list[int]] = {}
        for at, _ in outputs:
            groups.setdefault(find(at), []).append(at)
        return list(groups.values())


def _is_split(sharding: Any) -> bool:
    return isinstance(sharding, NamedSharding) and not sharding.is_fully_replicated


def _tell_of_keys(jaxpr: Jaxpr) -> None:
    """Warns, once, of random numbers that cost or mean more than one expects."""
    for eqn in every(jaxpr.eqns):
        if eqn.primitive.name != "random_bits" or size_of(eqn.outvars[0]) <= SMALL:
            continue
        kind = str(getattr(eqn.invars[0].aval, "dtype", ""))
        if "rbg" in kind:
            _tell_once(
                f"the keys of this model are {kind}: JAX does not promise that their "
                "random numbers are the same for every sharding and backend, so that "
                "the same seed may give other weights on another mesh; "
                "jax.random.key(seed, impl='threefry2x32') gives the same everywhere"
            )
        elif "fry" in kind and not _is_partitionable(eqn):
            _tell_once(
                "jax_threefry_partitionable is off: each device computes all the "
                "random bits of a parameter, and keeps those of its shard, so that it "
                "needs memory for the whole of one; jax.config.update("
                "'jax_threefry_partitionable', True) ends that, with other weights "
                "for the same seed"
            )


def _is_partitionable(eqn: JaxprEqn) -> bool:
    config: Any = jax.config
    return getattr(eqn.ctx, "threefry_partitionable", config.jax_threefry_partitionable)


def _tell_once(text: str) -> None:
    if text not in _TOLD:
        _TOLD.add(text)
        warn(text)


class _Job:
    """Arrays that are made by one program."""

    def __init__(
        self, cut: Cut, jaxpr: Jaxpr, shardings: Sequence[Any], exact: bool
    ) -> None:
        self._cut, self._jaxpr, self._shardings = cut, jaxpr, list(shardings)
        self._exact = exact
        self._asked = list(map(_unsplit, shardings)) if exact else self._shardings

    def call(self, values: Mapping[Any, Any]) -> Call:
        """The program, and what it is given.

        `jax.jit` would copy a large value of the host to each device as a whole.
        """
        free = self.free(values)
        if free:
            auto = retyped(self._asked[0].mesh, AxisType.Auto)
            where = NamedSharding(auto, self._asked[0].spec)
            values = {**values, **{var: put(values[var], where) for var in free}}
        inputs = [values[var] for var in self._cut.inputs]
        return Call(self._cut, inputs, self._asked, self._jaxpr)

    def free(self, values: Mapping[Any, Any]) -> list[Any]:
        """Large inputs that lie on no mesh yet, and may lie as the result does."""
        large = [var for var in self._cut.inputs if size_of(var) > SMALL]
        free = [v for v in large if not getattr(values[v], "committed", False)]
        fits = _is_split(self._asked[0]) and self._cut.keeps_shape()
        return free if free and fits and self._cut.is_one_by_one() else []

    def make(
        self, values: Mapping[Any, Any], names: Sequence[str], programs: dict[Any, Any]
    ) -> list[Any]:
        """The arrays; what needs memory for whole ones is done by itself."""
        if len(names) > 1:
            _LOG.debug("one program for what has a large origin in common: %s", names)
        if not is_eager():
            return self.call(values).traced()
        call = self.call(values)
        try:
            results = call.run(programs)
        except FloatingPointError as error:  # of jax.debug_nans
            raise FloatingPointError(f"{', '.join(names)}: {error}") from error
        if self._exact:
            pairs = zip(results, self._shardings, strict=True)
            results = [x if s is None else put(x, s) for x, s in pairs]
        whole = self._cut.needs_whole()
        if self._exact or whole:
            why = "exact=True" if self._exact else ", ".join(whole)
            _LOG.info("made whole on each device, then split (%s): %s", why, names)
        else:
            needed = call.temporary_bytes(programs)
            if needed <= self._expected_bytes():
                return results
            text = "made with %s on each device, more than whole arrays take: %s"
            _LOG.info(text, human_bytes(needed), names)
        jax.block_until_ready(results)  # or the next one would need memory too
        return results

    def _expected_bytes(self) -> float:
        """Temporaries up to this are no whole array: of what is split, parts only.

        Random numbers take three or four words beside each element of a part.
        """
        expected = 0.0
        for var, sharding in zip(self._cut.outputs, self._shardings, strict=True):
            words = 4 * size_of(var) * max(1, var.aval.dtype.itemsize // 4)
            if not _is_split(sharding):
                return math.inf
            part = math.prod(sharding.shard_shape(var.aval.shape)) / size_of(var)
            expected += words * max(1, 4 * part)
        return expected


def _unsplit(sharding: Any) -> Any:
    return sharding and NamedSharding(sharding.mesh, PartitionSpec())


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


def _is_known(var: Any, values: Mapping[Any, Any]) -> bool:
    return isinstance(var, Literal) or var in values


def _known(var: Any, values: Mapping[Any, Any], sharding: Any) -> Any:
    """A value that needs no program."""
    value = var.val if isinstance(var, Literal) else values[var]
    if isinstance(var, Literal) or isinstance(value, np.ndarray):
        aval: Any = var.aval
        value = jax.numpy.asarray(value, aval.dtype)
    return value if sharding is None else put(value, sharding)


def _make_empty(var: Any, values: dict[Any, Any], sharding: Any) -> None:
    """Makes an array without elements: a program for it alone has wrong shards."""
    aval = var.aval
    is_key = jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key)
    if size_of(var) or sharding is None or is_key or _is_known(var, values):
        return
    host = np.zeros(aval.shape, aval.dtype)
    values[var] = jax.make_array_from_callback(
        aval.shape, sharding, lambda index: host[index]
    )
