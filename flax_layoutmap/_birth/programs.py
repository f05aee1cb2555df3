"""Stage "programs": steps of a plan, compiled several at a time, kept, and run."""

import collections
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.core import Tracer, eval_jaxpr

from flax_layoutmap._birth.steps import Step, sharding_of
from flax_layoutmap._place.place import put
from flax_layoutmap._tree.flax_internals import no_mesh
from flax_layoutmap._tree.jaxprs import SMALL

# The cache of compiled programs, over all models, by the key of a step; the oldest is
# dropped.
_KEPT = 256
_PROGRAMS: collections.OrderedDict[Any, Any] = collections.OrderedDict()
_LOCK = threading.Lock()


def compiled(steps: Sequence[Step]) -> dict[Any, Any]:
    """The programs of steps, by key; new ones are compiled side by side."""
    wanted = {step.key: step for step in steps if _is_ahead(step)}
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
    """Runs one step.

    Args:
        step: the step.
        results: those of earlier steps.
        programs: from `compiled`.
    """
    given = zip(step.cut.inputs, step.given, step.places, strict=True)
    inputs = [
        _moved(results[var] if type(value) is jax.ShapeDtypeStruct else value, place)
        for var, value, place in given
    ]
    is_traced = any(isinstance(x, Tracer) for x in inputs)
    with no_mesh(), jax.disable_jit(False):
        if is_traced or step.key not in programs:
            return _jitted(step)(*inputs)
        return programs[step.key](*inputs)


def temporary_bytes(step: Step, programs: Mapping[Any, Any]) -> int:
    """What a device needs beside inputs and results; 0 where nobody says."""
    if step.key not in programs:
        return 0
    found = programs[step.key].memory_analysis()
    return getattr(found, "temp_size_in_bytes", 0)


def _is_ahead(step: Step) -> bool:
    """Whether a program can be compiled ahead of time.

    Not where an input is of a trace, such as that of `jax.grad`; nor where JAX looks
    for NaNs: only `jax.jit` itself then says which operation made one.
    """
    config: Any = jax.config
    looks = config.jax_debug_nans or config.jax_debug_infs
    return not looks and not any(isinstance(x, Tracer) for x in step.given)


def _compile(steps: Sequence[Step]) -> list[Any]:
    """Compiles several at a time, each as soon as it is lowered.

    What makes most takes longest, and comes first, so that nothing waits for it alone.
    """
    if len(steps) < 2:
        return list(map(_ahead, steps))
    order = sorted(range(len(steps)), key=lambda at: -steps[at].size)
    with ThreadPoolExecutor(min(len(steps), os.cpu_count() or 1)) as pool:
        programs = {at: pool.submit(_ahead, steps[at]) for at in order}
        return [programs[at].result() for at in range(len(steps))]


def _ahead(step: Step) -> Any:
    inputs = [
        _template(value, place)
        for value, place in zip(step.given, step.places, strict=True)
    ]
    # What `jax.disable_jit` shows has been seen when the constructor was traced.
    with no_mesh(), jax.disable_jit(False):
        return _jitted(step).lower(*inputs).compile()


def _jitted(step: Step) -> Any:
    """The cut of a step as a function."""
    part = step.cut.jaxpr()

    def born(*inputs: Any) -> list[Any]:
        # Not jaxpr_as_fun, after which debug_nans checks nothing any more.
        with no_mesh():
            return eval_jaxpr(part, [], *inputs)

    return jax.jit(born, out_shardings=list(step.shardings))


def _template(value: Any, place: Any) -> Any:
    """What a program is lowered for: a value, or one that lies nowhere yet, there."""
    if place is None or sharding_of(value) is not None:
        return value
    aval: Any = jax.typeof(value)
    weak = aval.weak_type
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=place, weak_type=weak)


def _moved(value: Any, place: Any) -> Any:
    """A value in the sharding of a program; small ones JAX moves with the call."""
    if place is None or value.size <= SMALL or getattr(value, "committed", False):
        return value
    return put(value, place)
