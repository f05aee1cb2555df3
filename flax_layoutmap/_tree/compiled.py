"""Programs that make cuts of a jaxpr, each compiled once, several at a time."""

import collections
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import jax
from jax.core import Tracer, eval_jaxpr
from jax.extend.core import Jaxpr
from jax.sharding import NamedSharding, PartitionSpec

from flax_layoutmap._tree.flax_internals import no_mesh
from flax_layoutmap._tree.jaxprs import Cut, size_of

# Programs that are kept, over all models; the oldest is dropped.
_KEPT = 256
_PROGRAMS: collections.OrderedDict[Any, Any] = collections.OrderedDict()
_LOCK = threading.Lock()


class Call:
    """A cut, what it is given, and how its results are to lie.

    Attributes:
        inputs: values for the inputs of the cut.
    """

    def __init__(
        self,
        cut: Cut,
        inputs: Sequence[Any],
        shardings: Sequence[Any],
        of: Jaxpr,
        place: Any = None,
    ) -> None:
        """Takes a cut of the jaxpr `of`; a sharding may be None for any.

        Inputs that lie nowhere yet are taken as if they came in the sharding `place`.
        """
        self.inputs = list(inputs)
        self._cut, self._of, self._shardings = cut, of, tuple(shardings)
        self._places = [_place_of(value) or place for value in self.inputs]
        self._key = (cut.structure(), self._shardings, *self._places)

    def jitted(self) -> Any:
        """The cut as a function."""
        part = self._cut.jaxpr(self._of)

        def born(*inputs: Any) -> list[Any]:
            # Not jaxpr_as_fun, after which debug_nans checks nothing any more.
            with no_mesh():
                return eval_jaxpr(part, [], *inputs)

        return jax.jit(born, out_shardings=list(self._shardings))

    def compiled(self) -> Any:
        """The cut as a program."""
        pairs = zip(self.inputs, self._places, strict=True)
        inputs = [_placed(value, place) for value, place in pairs]
        # What `jax.disable_jit` shows has been seen when the constructor was traced.
        with jax.disable_jit(False):
            return self.jitted().lower(*inputs).compile()

    def traced(self) -> list[Any]:
        """The results, by `jax.jit`: inside of a trace, say."""
        with no_mesh(), jax.disable_jit(False):
            return self.jitted()(*self.inputs)

    def run(self, programs: Mapping[Any, Any] = MappingProxyType({})) -> list[Any]:
        """The results, by a program that was compiled for this structure.

        Args:
            programs: from `prepare`; what is not in it is compiled now.
        """
        if not self.is_ahead:
            return self.traced()
        program = self._program(programs)
        with jax.disable_jit(False):
            return program(*self.inputs)

    def temporary_bytes(self, programs: Mapping[Any, Any]) -> int:
        """What a device needs beside inputs and results; 0 where nobody says."""
        if not self.is_ahead:
            return 0
        found = self._program(programs).memory_analysis()
        return getattr(found, "temp_size_in_bytes", 0)

    def _program(self, programs: Mapping[Any, Any]) -> Any:
        program = programs.get(self._key)
        return prepare([self])[self._key] if program is None else program

    @property
    def is_ahead(self) -> bool:
        """Whether its program can be compiled ahead of time.

        Not where an input is of a trace, such as that of `jax.grad`; nor where JAX
        looks for NaNs: only `jax.jit` itself then says which operation made one.
        """
        config: Any = jax.config
        looks = config.jax_debug_nans or config.jax_debug_infs
        return not looks and not any(isinstance(x, Tracer) for x in self.inputs)

    @property
    def size(self) -> int:
        """How many elements it makes."""
        return sum(map(size_of, self._cut.outputs))

    @property
    def key(self) -> Any:
        """Equal for calls that can share a program."""
        return self._key


def prepare(calls: Iterable[Call]) -> dict[Any, Any]:
    """The programs of calls, by key; what is not there yet is compiled side by side."""
    wanted = {call.key: call for call in calls if call.is_ahead}
    with _LOCK:
        programs = {key: _PROGRAMS[key] for key in wanted if key in _PROGRAMS}
    new = {key: call for key, call in wanted.items() if key not in programs}
    programs |= zip(new, _compile(list(new.values())), strict=True)
    with _LOCK:
        for key, program in programs.items():
            _PROGRAMS[key] = program
            _PROGRAMS.move_to_end(key)
        while len(_PROGRAMS) > _KEPT:
            _PROGRAMS.popitem(last=False)
    return programs


def _compile(calls: Sequence[Call]) -> list[Any]:
    """Compiles several at a time, each as soon as it is lowered.

    What makes most takes longest, and comes first, so that nothing waits for it alone.
    """
    if len(calls) < 2:
        with no_mesh():
            return [call.compiled() for call in calls]
    order = sorted(range(len(calls)), key=lambda at: -calls[at].size)
    with ThreadPoolExecutor(min(len(calls), os.cpu_count() or 1)) as pool, no_mesh():
        programs = {at: pool.submit(calls[at].compiled) for at in order}
        return [programs[at].result() for at in range(len(calls))]


def _placed(value: Any, place: Any) -> Any:
    """What a program is lowered for: a value, or one that lies nowhere yet, there."""
    if place is None or _place_of(value) is not None:
        return value
    aval: Any = jax.typeof(value)
    weak = aval.weak_type
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=place, weak_type=weak)


def _place_of(value: Any) -> Any:
    """Where a value has to lie for the program that was compiled for it."""
    if isinstance(value, Tracer):
        return None
    if not isinstance(value, jax.ShapeDtypeStruct):  # of what a program will give
        if not getattr(value, "committed", False):
            return None
    own = value.sharding
    if isinstance(own, NamedSharding) and own.is_fully_replicated:
        # JAX says P() and P(None) by turns of keys.
        return NamedSharding(own.mesh, PartitionSpec(), memory_kind=own.memory_kind)
    return own
