"""jit: in and out shardings from the rules, for NNX objects and pure trees."""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from flax_layoutmap._core.errors import LayoutError, StructureError
from flax_layoutmap._core.jax_internals import executables_of
from flax_layoutmap._core.processes import (
    Agreement,
    Parts,
    digest_of_values,
    tell_of_others,
)
from flax_layoutmap._place.place import need_devices
from flax_layoutmap._resolve.resolve import rule_set_of
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._step.arguments import (
    Argument,
    Call,
    first_four,
    names_of,
    slots_of,
)
from flax_layoutmap._step.inputs import Placer, bind, fit, is_for
from flax_layoutmap._step.program import (
    Program,
    abstract_result,
    make_program,
    run_program,
)
from flax_layoutmap._step.recognise import KnownCalls
from flax_layoutmap._step.refusals import deleted_paths
from flax_layoutmap._step.shardings import avals_of
from flax_layoutmap._step.trace import Job, context_key, mesh_context
from flax_layoutmap._tree.graph import Uncomparable, contents, is_hashable

# Compiled programs that one function keeps; the oldest is dropped.
_PROGRAMS = 64


def jit(
    fun: Callable[..., Any] | None = None,
    *,
    layout_map: Any = None,
    in_shardings: Mapping[str, Any] | None = None,
    out_shardings: Any = None,
    static_argnames: str | Iterable[str] = (),
    static_argnums: int | Iterable[int] = (),
    donate_argnames: str | Iterable[str] = (),
    donate_argnums: int | Iterable[int] = (),
    explicit: bool = False,
) -> Any:
    """`jax.jit` with in and out shardings from the rules; accepts NNX objects.

    NNX objects, States, TrainStates and optax states, containers in which a rule shards
    a leaf, and donated arguments are state: they come in and go out in the layouts of
    the rules. Other arguments are data: arrays on the mesh stay as they are, those on
    the host are split over the map's `batch` axes. Objects are updated in place, as by
    `nnx.jit`. A part of the result with the structure of an argument gets its layouts.
    docs/jit.md says what makes it trace again.

    Args:
        fun: the function; leave out to use `jit(...)` as a decorator.
        layout_map: a `LayoutMap` or `RuleSet`; an edit takes effect at the next call.
            None: every array stays where it is, and host batches are not split.
        in_shardings: argument name → sharding, spec, `TensorLayout` or its axes, such
            as `("data", None)` (or a prefix tree of them), which overrides the rules.
        out_shardings: the same for the function's result.
        static_argnames: arguments that are compile-time constants (hashable).
        static_argnums: the same by position.
        donate_argnames: arguments whose buffers may be reused for the results. Of an
            NNX object only what the function changes is donated.
        donate_argnums: the same by position.
        explicit: on an Explicit mesh, trace the function with its types of layouts,
            for code that gives them (`out_sharding=`, `jax.sharding.reshard`).

    Returns:
        A function with `fun`'s signature, and `.trace`, `.lower` and `.eval_shape`.

    Raises:
        LayoutError: an option names no argument; or, when called, state or a batch
            does not fit, or the function does what docs/jit.md does not support.
        ProcessError: at the first call, when the processes were given different
            rules, meshes, states or host batches: each of them passes the whole batch.

    Example:
        >>> import jax.numpy as jnp, flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap("model=-1")
        >>> layout_map["kernel"] = (None, "model")
        >>> @flm.jit(layout_map=layout_map, donate_argnames="params")
        ... def step(params, x):
        ...     loss = (x @ params["kernel"]).sum()
        ...     return {"kernel": params["kernel"] * 0.9}, loss
        >>> params = layout_map.place({"kernel": jnp.ones((4, 8))})
        >>> params, loss = step(params, jnp.ones((8, 4)))
        >>> float(loss), tuple(params["kernel"].sharding.spec)
        (256.0, (None, 'model'))

    Plain JAX: `jax.jit(fun, in_shardings=…, out_shardings=…, donate_argnums=…)`.
    """
    if not isinstance(in_shardings, Mapping | None):
        raise LayoutError(
            "in_shardings is a mapping from the name of an argument to its sharding, "
            f"{{'batch': sharding}}; got {in_shardings!r}"
        )
    if layout_map is not None:
        rule_set_of(layout_map, "jit(layout_map=)")
    given = dict(in_shardings or {})

    def decorated(fun: Callable[..., Any]) -> Jitted:
        names = functools.partial(names_of, signature := inspect.signature(fun))
        static = names(static_argnames, static_argnums, "static_argnames")
        donated = names(donate_argnames, donate_argnums, "donate_argnames")
        both = sorted(static & (donated | names(given, (), "in_shardings")))
        if both:
            raise LayoutError(f"static arguments have no buffers or shardings: {both}")
        options = (given, out_shardings, static, donated)
        return Jitted(Job(fun, signature, *options, explicit=explicit), layout_map)

    return decorated if fun is None else decorated(fun)


class Jitted:
    """The function that `jit` returns."""

    def __init__(self, job: Job, layout_map: Any) -> None:
        functools.update_wrapper(self, job.fun)
        self.layout_map = layout_map
        self._job = job
        self._programs: dict[Any, list[Program]] = {}
        self._known = KnownCalls()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rules = self._rules()
        try:
            ran, result = self._known.run(args, kwargs, rules)
            if ran:
                return result
            call = bind(self._job, args, kwargs, rules)
            program = self._program(call, runs=True)
            leaves = fit(program, call)
            result = run_program(program, call, leaves)
            self._known.remember(call, program, leaves)
            return result
        except LayoutError:
            raise
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            # If JAX's own fast path runs a program, a failure is a ValueError.
            tell_of_others(error)
            self._raise_if_lost(args, kwargs, error)
            raise

    def _raise_if_lost(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception
    ) -> None:
        job, slots = self._job, slots_of(self._job.signature.bind(*args, **kwargs))
        lost = {slot.name: x for slot, x in slots if slot.is_among(job.donated)}
        if paths := deleted_paths(lost):
            raise LayoutError(
                f"{job.name} failed while it ran, and what was donated is gone "
                f"({first_four(paths)}): go back to the last checkpoint, "
                "flm.checkpoint.restore(path, target, layout_map=layout_map), or "
                "donate nothing while you look for the cause"
            ) from error

    # ------------------------------------------------------------- without running

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(...).trace`, of the program on leaves."""
        call = bind(self._job, args, kwargs, self._rules())
        program = self._program(call)
        avals = avals_of(call.leaves, program.wanted)
        with mesh_context(call.rules, avals):
            return program.jitted.trace(*avals)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(...).lower`, of the program on leaves."""
        return self.trace(*args, **kwargs).lower()

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result as `jax.ShapeDtypeStruct`s; no object is changed."""
        call = bind(self._job, args, kwargs, self._rules())
        return abstract_result(self._program(call), call)

    def without_running(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        rules: RuleSet,
        place: Placer,
        donated: Any = (),
    ) -> tuple[Job, Sequence[Argument], Program]:
        """Make the program of a call for a mesh that need not exist; for `flm.pod`.

        `rules` replace this function's own, on a mesh that may be abstract; `place`
        places arguments that are data. More arguments are `donated`, by name.
        """
        own = self._job
        more = names_of(own.signature, donated, (), "donate_argnames")
        job = dataclasses.replace(own, runs=False, donated=own.donated | more)
        call = bind(job, args, kwargs, rules, place)
        return job, call.arguments, make_program(job, call)

    def _cache_size(self) -> int:
        """How many executables there are, as `jax.jit(...)._cache_size()`."""
        every = itertools.chain.from_iterable(self._programs.values())
        return sum(executables_of(program.jitted) for program in every)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    # ------------------------------------------------------------ rules and programs

    def _rules(self) -> RuleSet | None:
        if self.layout_map is None:
            return None
        rules = rule_set_of(self.layout_map, "jit(layout_map=)")
        need_devices(rules, "jit")
        return rules

    def _program(self, call: Call, *, runs: bool = False) -> Program:
        """The program of a call; before it `runs`, all processes have to agree."""
        programs = self._programs_like(call)
        known = next((each for each in programs if is_for(each, call)), None)
        if known is not None and (known.agreed or not runs):
            return known
        mesh = call.mesh if runs else None
        with Agreement(f"the first call of {self._job.name}", mesh) as agreement:
            program = known or make_program(self._job, call)
            agreement.add(lambda: {**program.fingerprints, **_data_parts(call)})
        program.agreed = runs
        if known is None:
            programs.insert(0, program)
        return program

    def _programs_like(self, call: Call) -> list[Program]:
        key = _key(call)
        try:
            programs = self._programs.setdefault(key, [])
        except TypeError:  # a constant that cannot be hashed
            try:
                programs = self._programs.setdefault(contents(key), [])
            except Uncomparable as error:
                kind = type(error.args[0]).__name__
                raise StructureError(
                    f"an argument of {self._job.name} is or holds a {kind} as a static "
                    "attribute, which Python can neither hash nor copy, so no call "
                    f"could tell whether it changed: give {kind} a __hash__, or keep "
                    "it outside of the model"
                ) from error
        if len(self._programs) > _PROGRAMS:
            del self._programs[next(iter(self._programs))]
        return programs


def _key(call: Call) -> tuple[Any, ...]:
    """What a program depends on: rules, constants, contexts, settings, arguments."""
    for slot, value in call.static.items():
        if not is_hashable(value):
            raise LayoutError(
                f"the static argument {slot.name!r} cannot be hashed: {value!r}; make "
                "it a tuple or a frozen dataclass, or take it out of static_argnames"
            )
    # 1, 1.0 and True are equal, but give different programs.
    static = [(slot, type(value), value) for slot, value in call.static.items()]
    keys = [argument.key(call.rules) for argument in call.arguments]
    return call.rules, context_key(), *static, *keys


def _data_parts(call: Call) -> Parts:
    """The data that the processes must have in common: shapes and host values."""
    data = [argument for argument in call.arguments if not argument.is_state]
    shapes = [
        f"{a.label(at)} {getattr(x, 'dtype', type(x).__name__)}"
        for a in data
        for at, x in enumerate(a.leaves)
    ]
    values = digest_of_values(jax.tree.leaves([a.value for a in data]))
    return {"batch shapes": shapes, "batch values": values}
