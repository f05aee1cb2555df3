"""Stage "programs": compile the steps of a plan in parallel, cache and run them."""

import collections
import dataclasses
import functools
import os
import threading
from collections.abc import Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.core import Tracer, eval_jaxpr
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.sharding import NamedSharding, PartitionSpec

from flax_layoutmap._core.jax_internals import part_of
from flax_layoutmap._place.place import is_eager, put
from flax_layoutmap._tree.flax_internals import no_mesh
from flax_layoutmap._tree.jaxprs import (
    CALLS,
    SMALL,
    every,
    inner_jaxprs,
    size_of,
    structure,
)

# Equations that only call their inner jaxprs.
_TRANSPARENT = {
    *CALLS,
    *("scan", "while", "cond"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
}

# Operations that make or move elements, or compute each one by itself.
_ELEMENTWISE = frozenset(
    """
    abs add add_any and bitcast_convert_type broadcast_in_dim cbrt ceil clamp clz
    complex concatenate conj convert_element_type copy copy_p cos cosh device_put div
    dynamic_slice dynamic_update_slice eq erf erf_inv erfc exp exp2 expm1 floor gather
    ge gt imag integer_pow iota is_finite le log log1p logistic lt max min mul ne neg
    nextafter not optimization_barrier or pad population_count pow random_bits
    random_clone random_fold_in random_seed random_split random_unwrap random_wrap real
    reduce_precision rem reshape rev rng_bit_generator round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh slice split sqrt square
    squeeze stop_gradient sub tan tanh threefry2x32 transpose unstack xor
    """.split()
)

# Operations that XLA does not partition: each device needs the whole matrix.
_UNPARTITIONED = frozenset(
    """
    cholesky eig eigh geqp3 geqrf hessenberg householder_product lu qr schur svd
    triangular_solve tridiagonal tridiagonal_solve
    """.split()
)


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """Some equations of the jaxpr `of`, in order, and the outputs that they compute."""

    of: Jaxpr
    eqns: tuple[JaxprEqn, ...]
    outputs: tuple[Any, ...]

    @functools.cached_property
    def inputs(self) -> tuple[Any, ...]:
        """The variables that it reads, in the order of first use."""
        own = {var for eqn in self.eqns for var in eqn.outvars}
        read = (*(var for eqn in self.eqns for var in eqn.invars), *self.outputs)
        found = (v for v in read if not isinstance(v, Literal) and v not in own)
        return tuple(dict.fromkeys(found))

    @functools.cached_property
    def structure(self) -> Hashable:
        """Equal for cuts that differ in their inputs only."""
        return structure(self.inputs, self.eqns, self.outputs)

    def jaxpr(self) -> Jaxpr:
        """The cut as a jaxpr of its own."""
        return part_of(self.of, self.inputs, self.eqns, self.outputs)

    def rounds(self) -> bool:
        """Whether any number in it is rounded: a quantised matrix is made of others."""
        made = (var for eqn in every(self.eqns) for var in eqn.outvars)
        dtypes = (getattr(var.aval, "dtype", None) for var in (*self.inputs, *made))
        return any(
            dtype is not None and jax.numpy.issubdtype(dtype, np.inexact)
            for dtype in dtypes
        )

    def is_elementwise(self) -> bool:
        """Whether each element is computed by itself."""
        return all(
            eqn.primitive.name in _ELEMENTWISE
            or (eqn.primitive.name in _TRANSPARENT and inner_jaxprs(eqn))
            for eqn in every(self.eqns)
        )

    def keeps_shape(self) -> bool:
        """Whether everything large in it has the shape of its only output."""
        if len(self.outputs) != 1:
            return False
        used = [v for eqn in self.eqns for v in (*eqn.invars, *eqn.outvars)]
        shape = self.outputs[0].aval.shape
        return all(
            getattr(v.aval, "shape", ()) == shape or size_of(v) <= 1 for v in used
        )

    def unpartitioned(self) -> list[str]:
        """Names of its operations that XLA does not partition."""
        return sorted({eqn.primitive.name for eqn in every(self.eqns)} & _UNPARTITIONED)


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A program to run: a cut, its inputs, and the shardings of its results.

    Attributes:
        given: the value of each input; a `jax.ShapeDtypeStruct` for an earlier result.
        places: the sharding of each input; None for that of its value.
        shardings: the sharding of each output; None for any.
        results: the key of each output among the results of all steps.
        names: names of the outputs, for the log.
        wanted: the shardings that the outputs are moved to afterwards, if any.
    """

    cut: Cut
    given: tuple[Any, ...]
    places: tuple[Any, ...]
    shardings: tuple[Any, ...]
    results: tuple[Any, ...]
    names: tuple[str, ...] = ()
    wanted: tuple[Any, ...] | None = None

    @functools.cached_property
    def key(self) -> Hashable:
        """Equal for steps that can share a program."""
        placed = zip(map(sharding_of, self.given), self.places, strict=True)
        inputs = tuple(own or place for own, place in placed)
        return self.cut.structure, self.shardings, inputs

    @property
    def size(self) -> int:
        """The number of elements of its results."""
        return sum(map(size_of, self.cut.outputs))


@dataclasses.dataclass(frozen=True)
class Plan:
    """The programs to run, in order; nothing is computed yet.

    `values` are known values by variable; `outputs` has the key of each output among
    values and results (or the literal that it is), and its sharding.
    """

    values: Mapping[Any, Any]
    steps: tuple[Step, ...]
    outputs: tuple[tuple[Any, Any], ...]


def is_split(sharding: Any) -> bool:
    """Whether a sharding gives each device a part."""
    return isinstance(sharding, NamedSharding) and not sharding.is_fully_replicated


def sharding_of(value: Any) -> Any:
    """The sharding in which a program takes a value; None for any."""
    if isinstance(value, Tracer):
        return None
    if not isinstance(value, jax.ShapeDtypeStruct):  # of what a program will give
        if not getattr(value, "committed", False):
            return None
    own = value.sharding
    if isinstance(own, NamedSharding) and own.is_fully_replicated:
        # For keys, JAX returns P() or P(None).
        return NamedSharding(own.mesh, PartitionSpec(), memory_kind=own.memory_kind)
    return own


# ------------------------------------------------------------- compiling and running

# The cache of compiled programs of all models, by the key of a step, oldest first.
_KEPT = 256
_PROGRAMS: collections.OrderedDict[Any, Any] = collections.OrderedDict()
_LOCK = threading.Lock()


def compiled(steps: Sequence[Step]) -> dict[Any, Any]:
    """The programs of steps, by key; new ones are compiled in parallel.

    A step has none if `jax.jit` has to run it: inside a trace, with an input of one
    (that of `jax.grad`, say), or with JAX's check for NaNs: only `jax.jit` itself then
    says which operation made one.
    """
    config: Any = jax.config
    if not is_eager() or config.jax_debug_nans or config.jax_debug_infs:
        return {}
    wanted = {step.key: step for step in steps if not _has_tracers(step.given)}
    with _LOCK:
        programs = {key: _PROGRAMS[key] for key in wanted if key in _PROGRAMS}
    new = {key: step for key, step in wanted.items() if key not in programs}
    programs |= zip(new, _compile(list(new.values())), strict=True)
    with _LOCK:
        for key, program in programs.items():
            _PROGRAMS[key] = program
            _PROGRAMS.move_to_end(key)
        while len(_PROGRAMS) > _KEPT:
            _PROGRAMS.popitem(last=False)
    return programs


def run(
    step: Step, results: Mapping[Any, Any], programs: Mapping[Any, Any]
) -> list[Any]:
    """Run one step, given the results of earlier ones and the `compiled` programs."""
    given = zip(step.cut.inputs, step.given, step.places, strict=True)
    inputs = [
        _moved(results[var] if type(value) is jax.ShapeDtypeStruct else value, place)
        for var, value, place in given
    ]
    with no_mesh(), jax.disable_jit(False):
        if step.key not in programs or _has_tracers(inputs):
            return _jitted(step)(*inputs)
        return programs[step.key](*inputs)


def temporary_bytes(step: Step, programs: Mapping[Any, Any]) -> int:
    """Temporary bytes of a program on a device; 0 if unknown."""
    if step.key not in programs:
        return 0
    found = programs[step.key].memory_analysis()
    return getattr(found, "temp_size_in_bytes", 0)


def _has_tracers(values: Iterable[Any]) -> bool:
    return any(isinstance(value, Tracer) for value in values)


def _compile(steps: Sequence[Step]) -> list[Any]:
    """Compile several at a time, each as soon as it is lowered, the largest first.

    Lowered in this thread, as its settings (`jax.enable_x64`) do not apply in others.
    """
    if len(steps) < 2:
        return [_lowered(step).compile() for step in steps]
    order = sorted(range(len(steps)), key=lambda at: -steps[at].size)
    with ThreadPoolExecutor(min(len(steps), os.cpu_count() or 1)) as pool:
        programs = {at: pool.submit(_lowered(steps[at]).compile) for at in order}
        return [programs[at].result() for at in range(len(steps))]


def _lowered(step: Step) -> Any:
    inputs = [
        _template(value, place)
        for value, place in zip(step.given, step.places, strict=True)
    ]
    # `jax.disable_jit` applied when the constructor was traced.
    with no_mesh(), jax.disable_jit(False):
        return _jitted(step).lower(*inputs)


def _jitted(step: Step) -> Any:
    """The cut of a step as a function."""
    part = step.cut.jaxpr()

    def part_of_init(*inputs: Any) -> list[Any]:
        # Not jaxpr_as_fun, after which debug_nans checks nothing.
        with no_mesh():
            return eval_jaxpr(part, [], *inputs)

    return jax.jit(part_of_init, out_shardings=list(step.shardings))


def _template(value: Any, place: Any) -> Any:
    """An input to lower a program for: a value, or its shape if it will be moved."""
    if place is None or sharding_of(value) is not None:
        return value
    aval: Any = jax.typeof(value)
    weak = aval.weak_type
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=place, weak_type=weak)


def _moved(value: Any, place: Any) -> Any:
    """A value in the sharding of a program; JAX moves small ones with the call."""
    if place is None or value.size <= SMALL or getattr(value, "committed", False):
        return value
    return put(value, place)
