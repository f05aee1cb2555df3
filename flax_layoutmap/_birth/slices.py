"""Compute the arrays of a traced constructor, each in its shards.

Keys and counters are computed first, one equation at a time. Then each array is made by
a separate program, from the equations of the trace that it needs. Programs that differ
only in their inputs (the layers of a model, each with its key) are compiled once, so
compile time does not grow with depth.
"""

import dataclasses
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.core import Tracer, eval_jaxpr
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core.primitives import jit_p, remat_p
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from flax_layoutmap._core.errors import StructureError
from flax_layoutmap._core.jax_internals import (
    is_unspecified,
    opened,
    part_of,
    settings_of,
)
from flax_layoutmap._core.mesh import retyped, spread
from flax_layoutmap._core.processes import digest_of_value
from flax_layoutmap._place.place import is_eager, put
from flax_layoutmap._rules.records import show_shape
from flax_layoutmap._show.terminal import shown_progress
from flax_layoutmap._tree.flax_internals import no_mesh
from flax_layoutmap._tree.trace import Traced

# A variable of the trace, and its sharding; None for any sharding.
_Output = tuple[Any, NamedSharding | None]

# Most elements of counters, and of arrays of keys, which are computed unsharded.
_SMALL, _MANY = 64, 2**16

# Larger arrays are finished before the next begins, as their programs may need memory
# for the full array (for example a QR).
_LARGE = 2**20


def arrays_of(
    traced: Traced, shardings: Sequence[NamedSharding | None]
) -> tuple[list[Any], list[Any]]:
    """Compute the leaves with shardings of a traced constructor.

    The values are the same as with `jax.jit` of all leaves with these out_shardings.
    Also returns the new state of NNX arguments.
    """
    meshes = [s.mesh for s in shardings if s is not None and isinstance(s.mesh, Mesh)]
    trace = _Trace.of(traced, meshes[0] if meshes else _set_mesh())
    leaves, after = trace.outputs[: len(shardings)], trace.outputs[len(shardings) :]
    pairs = zip(leaves, shardings, strict=True)
    wanted: list[_Output] = [(v, s) for v, s in pairs if s is not None]
    count = len(wanted)
    given = traced.closed.jaxpr.invars[: len(after)]
    changed = [at for at, var in enumerate(after) if var is not given[at]]
    wanted += [(after[at], None) for at in changed]
    with shown_progress(f"creating {count} arrays"):
        arrays = _computed(trace, wanted)
    inputs = list(traced.inputs[: len(after)])
    for at, new in zip(changed, arrays[count:], strict=True):
        if getattr(inputs[at], "committed", False) and not isinstance(new, Tracer):
            new = put(new, inputs[at].sharding)
        inputs[at] = new
    return arrays[:count], inputs


def trace_lines(traced: Traced) -> list[str]:
    """The program and inputs of all arrays as lines, to compare between processes."""
    trace = _Trace.of(traced, None)
    part, read = trace.part(trace.outputs, trace.values)
    digests = [digest_of_value(trace.values[var]) for var in read]
    # Functions in parameters are printed with their address.
    lines = re.sub(r" at 0x[0-9a-f]+", "", str(part)).splitlines()
    return [
        *map(str.strip, lines),
        *(f"input {at}: {text}" for at, text in enumerate(digests)),
    ]


# ---------------------------------------------------------------------- the trace


@dataclasses.dataclass
class _Trace:
    """The equations of a trace, with calls inlined, and the known values."""

    jaxpr: Jaxpr
    eqns: list[JaxprEqn]
    outputs: list[Any]
    values: dict[Any, Any]
    mesh: Mesh | None
    producers: dict[Any, int]  # variable → number of its equation
    effects: set[int]  # numbers of equations with side effects

    @classmethod
    def of(cls, traced: Traced, mesh: Mesh | None) -> "_Trace":
        """Take a trace apart; its constants, inputs and literal outputs are known."""
        jaxpr = traced.closed.jaxpr
        given = [*traced.closed.consts, *traced.inputs]
        variables = [*jaxpr.constvars, *jaxpr.invars]
        values: dict[Any, Any] = dict(zip(variables, given, strict=True))
        names: dict[Any, Any] = {}
        eqns = list(_in_line(jaxpr.eqns, names, values))
        outputs = [_renamed(var, names) for var in jaxpr.outvars]
        for at, var in enumerate(outputs):
            if isinstance(var, Literal):
                aval: Any = var.aval
                outputs[at] = Var(aval)
                values[outputs[at]] = np.asarray(var.val, aval.dtype)
        producers = {var: at for at, eqn in enumerate(eqns) for var in eqn.outvars}
        effects = {at for at, eqn in enumerate(eqns) if eqn.effects}
        return cls(jaxpr, eqns, outputs, values, mesh, producers, effects)

    def part(
        self, outputs: Sequence[Any], known: Mapping[Any, Any]
    ) -> tuple[Jaxpr, list[Any]]:
        """The equations that outputs need, and the known variables that they read."""
        needed = self.effects.copy()
        read: dict[Any, None] = {}
        left = [*outputs, *(var for at in needed for var in self.eqns[at].invars)]
        while left:
            var = left.pop()
            if isinstance(var, Literal):
                continue
            if var in known:
                read[var] = None
            elif (at := self.producers[var]) not in needed:
                needed.add(at)
                left += self.eqns[at].invars
        eqns = [self.eqns[at] for at in sorted(needed)]
        return part_of(self.jaxpr, list(read), eqns, outputs), list(read)


def _in_line(
    eqns: Iterable[JaxprEqn], names: dict[Any, Any], values: dict[Any, Any]
) -> Iterator[JaxprEqn]:
    """The equations, with calls replaced by the equations of the called functions.

    A call that makes several arrays would compute them together, and a call that closes
    over an array would make it a constant of its program.
    """
    for eqn in eqns:
        read = [_renamed(var, names) for var in eqn.invars]
        inner = _called(eqn)
        if inner is None:
            made = [names.get(var, var) for var in eqn.outvars]
            yield eqn.replace(invars=read, outvars=made)
            continue
        jaxpr, consts = inner
        inner_names: dict[Any, Any] = dict(zip(jaxpr.invars, read, strict=True))
        # A jaxpr may be called several times, so its variables get new names.
        new = [*jaxpr.constvars, *(v for e in jaxpr.eqns for v in e.outvars)]
        inner_names |= {var: Var(var.aval) for var in new}
        constants = zip(jaxpr.constvars, consts, strict=True)
        values |= {inner_names[var]: constant for var, constant in constants}
        yield from _in_line(jaxpr.eqns, inner_names, values)
        results = (_renamed(var, inner_names) for var in jaxpr.outvars)
        names |= zip(eqn.outvars, results, strict=True)


def _renamed(var: Any, names: Mapping[Any, Any]) -> Any:
    return var if isinstance(var, Literal) else names.get(var, var)


def _called(eqn: JaxprEqn) -> tuple[Jaxpr, Sequence[Any]] | None:
    """The jaxpr and constants of a call that does nothing but compute it."""
    if eqn.primitive not in (jit_p, remat_p):
        return None
    asked = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return opened(eqn.params["jaxpr"]) if all(map(is_unspecified, asked)) else None


# ----------------------------------------------------------------- known values


def _on_mesh(value: Any, mesh: Mesh) -> Any:
    """Shard a value that is large, or on other devices, on this mesh.

    Axes are Auto there, as constructors do not give the shardings of products, and JAX
    cannot fold a number on one mesh into a key on another.
    """
    if isinstance(value, Tracer) or not isinstance(value, jax.Array | np.ndarray):
        return value
    if not getattr(value, "committed", False) and value.size <= _MANY:
        return value
    given, auto = getattr(value, "sharding", None), retyped(mesh, AxisType.Auto)
    spec = PartitionSpec() if value.size <= _SMALL else spread(value.shape, auto).spec
    if isinstance(given, NamedSharding) and isinstance(given.mesh, Mesh):
        spec = given.spec if retyped(given.mesh, AxisType.Auto) == auto else spec
    return put(value, NamedSharding(auto, spec))


def _set_mesh() -> Mesh | None:
    """The mesh of a surrounding `jax.set_mesh`, if any."""
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # inside a transformation
        return None
    return None if mesh.empty else mesh


def _size(var: Any) -> int:
    return math.prod(getattr(var.aval, "shape", ()))


def _is_key(var: Any) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def _is_counter(var: Any) -> bool:
    """Whether it is a small array of keys, key data or integers."""
    dtype = getattr(var.aval, "dtype", None)
    if dtype is None or jax.numpy.issubdtype(dtype, np.inexact):
        return False
    of_keys = _is_key(var) or dtype == np.uint32
    return 0 < _size(var) <= (_MANY if of_keys else _SMALL)


def _counters(trace: _Trace, outputs: Sequence[Any]) -> dict[Any, Any]:
    """Compute the keys that arrays are made from, and outputs that are counters.

    Integers that arrays are made from stay in their programs: XLA folds constants when
    it compiles, and may round differently if they are inputs.
    """
    ready = {var for var in trace.values if _is_counter(var)}
    for eqn in trace.eqns:
        read = (var for var in eqn.invars if not isinstance(var, Literal))
        if ready.issuperset(read) and all(map(_is_counter, eqn.outvars)):
            ready.update(eqn.outvars)
    keys = dict.fromkeys(filter(_is_key, ready))
    counters = [v for v in outputs if v in ready and (v in keys or _size(v) <= _SMALL)]
    _, read = trace.part(outputs, keys | trace.values)
    new = [v for v in dict.fromkeys([*read, *counters]) if v not in trace.values]
    part, read = trace.part(new, trace.values)
    mesh = _set_mesh() and trace.mesh
    # Operations put their literals on the mesh of the context.
    with jax.set_mesh(retyped(mesh, AxisType.Auto)) if mesh else no_mesh():
        results = eval_jaxpr(part, [], *_inputs(trace, trace.values, read))
    return dict(zip(new, results, strict=True))


def _inputs(trace: _Trace, known: Mapping[Any, Any], read: Iterable[Any]) -> list[Any]:
    """The values of variables; raises StructureError for an abstract value."""
    values = [known[var] for var in read]
    for value in values:
        if isinstance(value, jax.ShapeDtypeStruct):
            raise StructureError(
                f"an argument is abstract, a jax.ShapeDtypeStruct "
                f"{show_shape(value.shape)}, but its values are needed: pass an "
                "array"
            )
    mesh = trace.mesh
    return values if mesh is None else [_on_mesh(value, mesh) for value in values]


def _computed(trace: _Trace, outputs: Sequence[_Output]) -> list[Any]:
    """The arrays of outputs; by one program inside a trace or with side effects."""
    with no_mesh(), jax.disable_jit(False):
        if not outputs or trace.jaxpr.effects or not is_eager():
            return _run(_job(trace, outputs, trace.values)) if outputs else []
        counters = _counters(trace, [var for var, _ in outputs])
        keys = {var: value for var, value in counters.items() if _is_key(var)}
        known = trace.values | keys
        made = [_without_program(var, s, counters) for var, s in outputs]
        left = [at for at, array in enumerate(made) if array is None]
        jobs = []
        for at in left:
            source = counters if outputs[at][0] in counters else known
            jobs.append(_job(trace, [outputs[at]], source))
        _compile(jobs)
        for at, job in zip(left, jobs, strict=True):
            (made[at],) = _run(job)
    return made


def _without_program(
    var: Any, sharding: NamedSharding | None, counters: Mapping[Any, Any]
) -> Any:
    """An array that needs no program, or None."""
    if sharding is None:
        return counters.get(var)
    if _size(var) or _is_key(var):
        return None
    # Empty arrays from programs have unreadable shards (jax 0.10.2).
    return put(np.zeros(var.aval.shape, var.aval.dtype), sharding)


# -------------------------------------------------------------------- programs


@dataclasses.dataclass(frozen=True)
class _Job:
    program: Any
    inputs: list[Any]
    size: int


def _job(trace: _Trace, outputs: Sequence[_Output], known: Mapping[Any, Any]) -> _Job:
    """The program that computes the outputs, with its inputs."""
    variables = [var for var, _ in outputs]
    part, read = trace.part(variables, known)
    program = _program(part, tuple(sharding for _, sharding in outputs))
    return _Job(program, _inputs(trace, known, read), max(map(_size, variables)))


def _run(job: _Job) -> list[Any]:
    made = job.program(*job.inputs)
    job.inputs.clear()
    if job.size >= _LARGE and not any(isinstance(x, Tracer) for x in made):
        jax.block_until_ready(made)
    return made


# The programs of all models, most recently used last.
_KEPT = 256
_PROGRAMS: dict[Any, Any] = {}


def _program(part: Jaxpr, shardings: tuple[Any, ...]) -> Any:
    """A `jax.jit` function of a part, cached by its text and settings.

    It keeps the arrays in the part alive, so that no other array gets their ids.
    """
    settings = frozenset(str(settings_of(eqn)) for eqn in part.eqns)
    key = (str(part), tuple(map(id, _arrays_in(part))), settings, shardings)

    def create_arrays(*inputs: Any) -> list[Any]:
        with no_mesh():
            results = eval_jaxpr(part, [], *inputs)
        given = set(map(id, inputs))
        return [jax.numpy.copy(x) if id(x) in given else x for x in results]

    program = _PROGRAMS.pop(key, None)
    if program is None:
        program = jax.jit(create_arrays, out_shardings=list(shardings))
    _PROGRAMS[key] = program
    for oldest in list(_PROGRAMS)[:-_KEPT]:
        _PROGRAMS.pop(oldest, None)
    return program


def _arrays_in(value: Any) -> Iterator[Any]:
    """The arrays that a jaxpr holds: constants and literals."""
    parts = value if isinstance(value, tuple | list) else ()
    if (inner := opened(value)) is not None:
        jaxpr, consts = inner
        yield from consts
        read = (var for eqn in jaxpr.eqns for var in eqn.invars)
        yield from (
            var.val for var in read if isinstance(var, Literal) and _size(var) > 1
        )
        parts = [value for eqn in jaxpr.eqns for value in eqn.params.values()]
    for part in parts:
        yield from _arrays_in(part)


def _compile(jobs: Sequence[_Job]) -> None:
    """Compile new programs in several threads; later calls find them in JAX's cache.

    They are lowered in this thread, whose settings (`jax.enable_x64`) apply.
    """
    new = {job.program: job for job in jobs}.values()
    new = [job for job in new if not any(isinstance(x, Tracer) for x in job.inputs)]
    if len(new) < 2:
        return
    with ThreadPoolExecutor(min(len(new), os.cpu_count() or 1)) as pool:
        for job in sorted(new, key=lambda job: -job.size):
            pool.submit(job.program.lower(*job.inputs).compile)
