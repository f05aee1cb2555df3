"""Compute the arrays of a traced constructor: trace → cuts → programs → arrays.

Each stage is called once: `trace` gives the jaxpr of the constructor, `cuts_of` plans
what is computed by which program, `compiled` compiles these programs, and here they are
run, each of them once for each array that it makes.
"""

import collections
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from flax_layoutmap._birth.cuts import SKIP, cuts_of
from flax_layoutmap._birth.programs import (
    Plan,
    Step,
    compiled,
    is_split,
    run,
    temporary_bytes,
)
from flax_layoutmap._core.errors import warn
from flax_layoutmap._core.jax_internals import settings_of
from flax_layoutmap._core.mesh import retyped, spread
from flax_layoutmap._place.place import is_eager, put
from flax_layoutmap._show.progress import shown_progress
from flax_layoutmap._show.table import human_bytes
from flax_layoutmap._tree.jaxprs import SMALL, calls_in_line, every, size_of
from flax_layoutmap._tree.trace import Traced

_LOG = logging.getLogger(__name__)

# Warnings that this process has emitted.
_TOLD: set[str] = set()


def arrays_of(
    traced: Traced,
    shardings: Sequence[NamedSharding | None],
    *,
    names: Sequence[str] = (),
    exact: bool = False,
) -> tuple[list[Any], list[Any]]:
    """Compute the leaves of a traced constructor, each in its shards.

    The values are those of one `jax.jit` of the whole with these out_shardings.

    Args:
        traced: the trace.
        shardings: one for each computed leaf; None to skip it.
        names: names of the leaves, for the log.
        exact: whether the values are to be those without shardings: numbers that are
            rounded are computed replicated, one program at a time, and sliced.

    Returns:
        The arrays of the leaves that are not skipped, and the new state of NNX
            arguments.
    """
    wanted = [SKIP if sharding is None else sharding for sharding in shardings]
    wanted += [None] * traced.updates
    jaxpr, values, mesh = _on_the_mesh(traced, shardings)
    _warn_of_keys(jaxpr, wanted)
    plan = cuts_of(jaxpr, values, wanted, mesh, names=names, exact=exact)
    with shown_progress(f"creating {len(shardings)} arrays"):
        programs = compiled(plan.steps)
        arrays = _run(plan, programs)
    count = len(arrays) - traced.updates
    return arrays[:count], arrays[count:]


def _on_the_mesh(
    traced: Traced, shardings: Sequence[NamedSharding | None]
) -> tuple[Jaxpr, dict[Any, Any], Mesh | None]:
    """The jaxpr, the values of its inputs and constants, and the mesh to compute on.

    All on Auto axes: on Explicit axes JAX would need the sharding of a product of them,
    which a constructor does not give. The results have the user's axis types.
    """
    closed = traced.closed
    jaxpr, values = calls_in_line(closed.jaxpr)
    values |= zip(jaxpr.constvars, closed.consts, strict=True)
    values |= zip(jaxpr.invars, traced.inputs, strict=True)
    meshes = [s.mesh for s in shardings if s is not None and isinstance(s.mesh, Mesh)]
    if not meshes:
        return jaxpr, values, None
    mesh = meshes[0]
    # Values that are returned to the arguments stay unchanged.
    back = {v for v in jaxpr.outvars[len(shardings) :] if not isinstance(v, Literal)}
    for var, value in values.items():
        own = value if var in back else _from_host(value, mesh)
        values[var] = _on_auto_axes(own, mesh)
    return jaxpr, values, retyped(mesh, AxisType.Auto)


def _from_host(value: Any, mesh: Mesh) -> Any:
    """A large array of one device as a host array.

    So that it is sliced, and not copied as a whole to each device.
    """
    if not isinstance(value, jax.Array) or isinstance(value, Tracer):
        return value
    is_key = jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)
    alone = value.committed and len(value.sharding.device_set) == 1
    if is_key or not alone or value.size <= SMALL or mesh.size == 1:
        return value
    return np.asarray(value) if value.is_fully_addressable else value


def _on_auto_axes(value: Any, mesh: Mesh) -> Any:
    """An input of the program, on the mesh and with Auto axes.

    Another mesh of the same devices does not work: JAX folds no number of one mesh into
    a key of another one.
    """
    if not isinstance(value, jax.Array) or isinstance(value, Tracer):
        return value
    own, auto = value.sharding, retyped(mesh, AxisType.Auto)
    if isinstance(own, NamedSharding) and isinstance(own.mesh, Mesh):
        if retyped(own.mesh, AxisType.Auto) == auto:
            return put(value, NamedSharding(auto, own.spec))
    elif not value.committed or own.device_set == set(mesh.devices.flat):
        return value
    if value.size <= SMALL or own.is_fully_replicated:
        return put(value, NamedSharding(auto, PartitionSpec()))
    return put(value, spread(value.shape, mesh))


def _warn_of_keys(jaxpr: Jaxpr, wanted: Sequence[Any]) -> None:
    """Warn once about random numbers that cost or mean more than expected."""
    if not any(map(is_split, wanted)):
        return
    for eqn in every(jaxpr.eqns):
        if eqn.primitive.name != "random_bits" or size_of(eqn.outvars[0]) <= SMALL:
            continue
        kind = str(getattr(eqn.invars[0].aval, "dtype", ""))
        if "rbg" in kind:
            _warn_once(
                f"the keys of this model are {kind}: JAX does not promise that their "
                "random numbers are the same for every sharding and backend, so that "
                "the same seed may give other weights on another mesh; "
                "jax.random.key(seed, impl='threefry2x32') gives the same everywhere"
            )
        elif "fry" in kind and not _is_partitionable(eqn):
            _warn_once(
                "jax_threefry_partitionable is off: each device computes all the "
                "random bits of a parameter, and keeps those of its shard, so that it "
                "needs memory for the whole of one; jax.config.update("
                "'jax_threefry_partitionable', True) ends that, with other weights "
                "for the same seed"
            )


def _is_partitionable(eqn: JaxprEqn) -> bool:
    return bool(settings_of(eqn)["threefry_partitionable"])


def _warn_once(text: str) -> None:
    if text not in _TOLD:
        _TOLD.add(text)
        warn(text)


# ------------------------------------------------------------------------ running


def _run(plan: Plan, programs: Mapping[Any, Any]) -> list[Any]:
    """Run the steps of a plan in order; return its outputs."""
    results: dict[Any, Any] = {}
    for step in plan.steps:
        if len(step.names) > 1:
            text = "one program for what has a large origin in common: %s"
            _LOG.debug(text, step.names)
        try:
            made = run(step, results, programs)
        except FloatingPointError as error:  # of jax.debug_nans
            text = f"{', '.join(step.names)}: {error}" if step.names else str(error)
            raise FloatingPointError(text) from error
        if step.names and is_eager():
            made = _sliced(step, made)
            if _took_whole_arrays(step, programs):
                # Else the next program would need memory for whole arrays too.
                jax.block_until_ready(made)
        results |= zip(step.results, made, strict=True)
    values = collections.ChainMap(results, dict(plan.values))
    return [_output(key, values, sharding) for key, sharding in plan.outputs]


def _sliced(step: Step, made: list[Any]) -> list[Any]:
    if step.wanted is None:
        return made
    pairs = zip(made, step.wanted, strict=True)
    return [x if sharding is None else put(x, sharding) for x, sharding in pairs]


def _took_whole_arrays(step: Step, programs: Mapping[Any, Any]) -> bool:
    """Whether a device needed memory for whole arrays; these are logged by name."""
    names = list(step.names)
    whole = step.cut.unpartitioned()
    if step.wanted is not None or whole:
        why = ", ".join(whole) if step.wanted is None else "exact=True"
        _LOG.info("initialized replicated, then sliced (%s): %s", why, names)
        return True
    needed = temporary_bytes(step, programs)
    if needed <= _expected_bytes(step):
        return False
    text = "%s of temporary memory on each device, more than whole arrays take: %s"
    _LOG.info(text, human_bytes(needed), names)
    return True


def _expected_bytes(step: Step) -> float:
    """Temporary bytes that sharded initialization needs at most.

    Random numbers take three or four words for each element of a shard.
    """
    expected = 0.0
    for var, sharding in zip(step.cut.outputs, step.shardings, strict=True):
        words = 4 * size_of(var) * max(1, var.aval.dtype.itemsize // 4)
        if not is_split(sharding):
            return math.inf
        part = math.prod(sharding.shard_shape(var.aval.shape)) / max(1, size_of(var))
        expected += words * max(1, 4 * part)
    return expected


def _output(key: Any, values: Mapping[Any, Any], sharding: Any) -> Any:
    """An output in its sharding: a literal, a known value or the result of a step."""
    value = key.val if isinstance(key, Literal) else values[key]
    if isinstance(key, Literal) or isinstance(value, np.ndarray):
        aval: Any = key.aval
        value = jax.numpy.asarray(value, aval.dtype)
    if sharding is not None and not isinstance(key, int):
        value = put(value, sharding)
    return _respelled(value, sharding)


def _respelled(value: Any, sharding: Any) -> Any:
    """A key whose data has the spec that a call of `jax.jit` returns.

    A later call has P() where that has P(None), and JAX's caches distinguish them.
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
