"""Private or moved names of JAX that this package uses.

Seen in jax 0.10.2, 0.11.2 and 0.12.0; `tests/core/test_jax_internals.py` fails when one
of them moves. `jaxlib.xla_client` is used by `pod/_child.py` alone, in a process of its
own.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn


def opened(value: Any) -> tuple[Jaxpr, Sequence[Any]] | None:
    """A jaxpr and its constants, or None for any other value.

    From jax 0.11 on ClosedJaxpr is Jaxpr, and `jaxpr.jaxpr` is the same jaxpr.
    """
    if not isinstance(value, ClosedJaxpr | Jaxpr):
        return None
    jaxpr: Any = getattr(value, "jaxpr", value)
    return jaxpr, getattr(value, "consts", ())


def part_of(
    jaxpr: Jaxpr, inputs: Sequence[Any], eqns: Sequence[Any], outputs: Sequence[Any]
) -> Jaxpr:
    """A jaxpr with some equations of another (`debug_info.with_unknown_names`)."""
    return jaxpr.replace(
        constvars=[],
        invars=list(inputs),
        outvars=list(outputs),
        eqns=list(eqns),
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )


def settings_of(eqn: JaxprEqn) -> dict[str, Any]:
    """The settings (`JaxprEqn.ctx`) that the result of an equation depends on."""
    names = ("compute_type", "threefry_partitionable", "xla_metadata")
    return {name: getattr(eqn.ctx, name, None) for name in names}


def is_unspecified(sharding: Any) -> bool:
    """Whether this is `jax.jit`'s placeholder for a sharding that was not given."""
    return type(sharding).__name__ == "UnspecifiedValue"


def concrete_value(tracer: Tracer) -> Any:
    """The array that a tracer of differentiation holds; None for other tracers.

    None also if JAX has no such method: the value then counts as traced.
    """
    read = getattr(tracer, "to_concrete_value", None)
    return None if read is None else read()


def executables_of(jitted: Any) -> int:
    """How many executables a function of `jax.jit` has."""
    return jitted._cache_size()


def memory_of(array: jax.Array) -> Any:
    """Device and address of an array on one device, to compare; None if unknown."""
    try:
        return (*array.devices(), array.unsafe_buffer_pointer())
    except (AttributeError, NotImplementedError, jax.errors.JaxRuntimeError):
        return None


def is_sharding_type_error(error: BaseException) -> bool:
    """Whether JAX raised this because a layout on Explicit axes is ambiguous."""
    return type(error).__name__ == "ShardingTypeError"


@contextlib.contextmanager
def tracers_without_sharding() -> Iterator[None]:
    """Within the block, tracers of jax 0.10 have no `sharding`.

    Flax reads it for every key that an `nnx.Rngs` makes, and JAX searches the whole
    program to word an AttributeError, which Flax then ignores.
    """
    if ClosedJaxpr is Jaxpr or "sharding" not in vars(Tracer):
        yield
        return
    none: Any = property(_no_sharding)
    with patched(Tracer, "sharding", lambda _: none):
        yield


def _no_sharding(tracer: Tracer) -> Any:
    raise AttributeError(f"a traced value has no sharding: {tracer.aval}")


# JAX's names for the bodies of loops.
_LOOPS = {"scan", "fori_loop", "while_loop", "while_body", "while_cond"}


def is_in_a_loop(x: Any) -> bool:
    """Whether a value is traced for the body of `scan` or `while_loop`.

    JAX has no public way to ask this.
    """
    trace = getattr(x, "_trace", None)
    while trace is not None:
        info = getattr(getattr(trace, "frame", None), "debug_info", None)
        if getattr(info, "traced_for", None) in _LOOPS:
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


class _Patch(NamedTuple):
    plain: Any  # the original
    blocks: set[object]  # the active ones


# Re-entrant: the garbage collector may end an abandoned block at any point of the code
# below, in the thread that holds the lock. The record is correct at each of them.
_LOCK = threading.RLock()
_PATCHED: dict[tuple[type, str], _Patch] = {}


@contextlib.contextmanager
def patched(owner: type, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a method (or slot) of a class by `wrap(original)`, in all threads.

    Blocks nest, and the last to end restores the original, so `wrap` must not depend
    on the block.
    """
    key, block = (owner, name), object()
    try:
        with _LOCK:
            patch = _PATCHED.get(key) or _Patch(vars(owner)[name], set())
            patch.blocks.add(block)
            _PATCHED[key] = patch
            setattr(owner, name, wrap(patch.plain))
        yield
    finally:
        with _LOCK:
            patch = _PATCHED.get(key)
            if patch is not None:
                patch.blocks.discard(block)
                if not patch.blocks:
                    setattr(owner, name, patch.plain)
                    _PATCHED.pop(key, None)
