"""jit: in and out shardings from the rules, for NNX objects and pure trees.

Arguments are sorted into two kinds. **State** is laid out by the rules and stays there:
NNX objects, TrainStates, optax states, and whatever is donated. **Data** is everything
else: arrays that are on the mesh keep their layout, host arrays are split over the
batch axes. The function is traced once for each structure and set of shapes; what it
changed in NNX objects is written back into the caller's own objects.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import AxisType

from flax_layoutmap._arguments import (
    Argument,
    Slot,
    call_with,
    check_not_shared,
    leaves_after,
    names_of,
    results_of,
    shape_key,
    slots_of,
    static_key,
    strong,
    take_apart,
)
from flax_layoutmap._errors import LayoutError, warn
from flax_layoutmap._inputs import (
    broadcast,
    check_not_donated_twice,
    fit,
    own_sharding,
    place_data,
)
from flax_layoutmap._paths import Roots
from flax_layoutmap._place import need_devices
from flax_layoutmap._processes import Agreement, digest_of_values
from flax_layoutmap._resolve import resolve
from flax_layoutmap._rules import RuleSet
from flax_layoutmap._scope import using_rules

# Compiled programs that one function keeps; the oldest is dropped.
_PROGRAMS = 64

# JAX settings that change what a trace gives.
_SETTINGS = (
    "jax_debug_infs",
    "jax_debug_nans",
    "jax_default_device",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_threefry_partitionable",
)


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
) -> Any:
    """`jax.jit` with in and out shardings from the rules; NNX objects are welcome.

    State comes in and goes out in the layouts of the rules, so that nothing drifts and
    the second call compiles nothing: arguments that hold an NNX object, an `nnx.State`,
    a TrainState or an optax state, and donated arguments. NNX objects are updated in
    place, as by `nnx.jit`. An output tree with the structure and shapes of a state
    argument is pinned to that argument's layouts. Arguments of other kinds are data:
    arrays on the mesh stay as they are, those on the host are split over the map's
    `batch` axes (scalars and PRNG keys are replicated).

    Inside, `flm.distribute_tensor(x, "hidden")` finds `layout_map.names["hidden"]`.

    Args:
        fun: the function; leave out to use `jit(...)` as a decorator.
        layout_map: a `LayoutMap` or `RuleSet`; it may be edited later: a new rule takes
            effect at the next call. None keeps every array where it is.
        in_shardings: argument name → sharding, spec or `TensorLayout` (or a prefix
            tree of them), which overrides the rules for that argument.
        out_shardings: the same for the function's result; None leaves what is no state
            to the compiler.
        static_argnames: arguments that are compile-time constants (hashable).
        static_argnums: the same by position.
        donate_argnames: arguments whose buffers may be reused for the results. Of an
            NNX object only what the function changes is donated; the rest stays valid.
        donate_argnums: the same by position.

    Returns:
        A function with `fun`'s signature, and `.trace`, `.lower` and `.eval_shape`,
        which take the same arguments.

    Raises:
        LayoutError: an option names no argument; or, when called: state is not where
            the rules say, a batch does not divide, the function changes the structure
            of an NNX object, or two NNX arguments share a Variable. Nothing was run.
        ProcessError: at the first call, when the processes were given different
            rules, meshes, states or host batches: each of them passes the whole batch.

    Plain JAX: `jax.jit(fun, in_shardings=…, out_shardings=…, donate_argnums=…)` on the
    split state.
    """
    if fun is None:
        return functools.partial(
            jit,
            layout_map=layout_map,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            static_argnames=static_argnames,
            static_argnums=static_argnums,
            donate_argnames=donate_argnames,
            donate_argnums=donate_argnums,
        )
    return _Jitted(
        fun,
        layout_map,
        in_shardings,
        out_shardings,
        (static_argnames, static_argnums),
        (donate_argnames, donate_argnums),
    )


@dataclasses.dataclass(slots=True)
class _Program:
    """What one structure of arguments compiled to. Holds no array of the caller.

    Attributes:
        jitted: (donated leaves, other leaves) → (changed state, results).
        wanted: one sharding (or None: as it is) per leaf of all arguments.
        donated: positions, over all leaves, of those whose buffers are given away.
        kept: positions of the others.
        changed: positions of the state that the function changed.
        out_tree: structure of the function's result.
        out_shapes: its abstract leaves.
        cacheable: whether nothing of an outer trace is inside.
        fingerprints: of rules, mesh and table; empty where there is one process.
        agreed: whether the processes have compared them.
    """

    jitted: Any
    wanted: list[Any]
    donated: tuple[int, ...]
    kept: tuple[int, ...]
    changed: tuple[int, ...]
    out_tree: Any
    out_shapes: list[Any]
    cacheable: bool
    fingerprints: Mapping[str, str]
    agreed: bool = False

    def inputs(self, leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The leaves of all arguments as `jitted` takes them."""
        donated = [leaves[at] for at in self.donated]
        return donated, [leaves[at] for at in self.kept]


class _Jitted:
    """The function that `jit` returns."""

    def __init__(
        self,
        fun: Callable[..., Any],
        layout_map: Any,
        in_shardings: Mapping[str, Any] | None,
        out_shardings: Any,
        static: tuple[Any, Any],
        donated: tuple[Any, Any],
    ) -> None:
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._signature = inspect.signature(fun)
        self._layout_map = layout_map
        if not isinstance(in_shardings, Mapping | None):
            raise LayoutError(
                "in_shardings is a mapping from the name of an argument to its "
                f"sharding, {{'batch': sharding}}; got {in_shardings!r}"
            )
        self._in_shardings = dict(in_shardings or {})
        self._out_shardings = out_shardings
        self._static = names_of(self._signature, *static, "static_argnames")
        self._donated = names_of(self._signature, *donated, "donate_argnames")
        names_of(self._signature, self._in_shardings, (), "in_shardings")
        both = sorted(self._static & (self._donated | set(self._in_shardings)))
        if both:
            raise LayoutError(f"static arguments have no buffers or shardings: {both}")
        self._programs: dict[Any, _Program] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _settings("jax_disable_jit")[0]:
            with using_rules(self._rules()):
                return self._fun(*args, **kwargs)
        arguments, program = self._bind(args, kwargs, runs=True)
        placed = fit(arguments, program.wanted)
        if program.donated:
            check_not_donated_twice(arguments, program.donated)
        leaves = [leaf for argument in arguments for leaf in argument.leaves]
        changed, results = program.jitted(*program.inputs(leaves))
        new = {at: leaves[at] for at in placed}
        new.update(zip(program.changed, changed, strict=True))
        _write_back(arguments, new)
        return jax.tree.unflatten(program.out_tree, results)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(...).trace`, of the program on leaves."""
        return self._program_and_avals(args, kwargs, "trace")

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(...).lower`, of the program on leaves."""
        return self._program_and_avals(args, kwargs, "lower")

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result as `jax.ShapeDtypeStruct`s; no object is changed."""
        _, program = self._bind(args, kwargs)
        return jax.tree.unflatten(program.out_tree, program.out_shapes)

    def _cache_size(self) -> int:
        """How many executables there are, as `jax.jit(...)._cache_size()`."""
        return sum(program.jitted._cache_size() for program in self._programs.values())

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def _program_and_avals(self, args: Any, kwargs: Any, stage: str) -> Any:
        arguments, program = self._bind(args, kwargs)
        leaves = [leaf for argument in arguments for leaf in argument.leaves]
        avals = [
            _aval(leaf, wanted or own_sharding(leaf))
            for leaf, wanted in zip(leaves, program.wanted, strict=True)
        ]
        return getattr(program.jitted, stage)(*program.inputs(avals))

    # ------------------------------------------------------------ taking apart

    def _rules(self) -> RuleSet | None:
        rules = self._layout_map
        if rules is None:
            return None
        rules = rules if isinstance(rules, RuleSet) else rules.freeze()
        need_devices(rules, "jit")
        return rules

    def _bind(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, runs: bool = False
    ) -> tuple[list[Argument], _Program]:
        rules = self._rules()
        slots = slots_of(self._signature.bind(*args, **kwargs))
        static = {s: v for s, v in slots if _named(s, self._static)}
        arguments = [self._argument(s, v, rules) for s, v in slots if s not in static]
        check_not_shared(arguments)
        own = None
        if rules is None:
            own = tuple(
                own_sharding(x) for a in arguments if a.is_state for x in a.leaves
            )
        key = (
            static_key({slot.name: value for slot, value in static.items()}),
            rules,
            own,
            jax.sharding.get_abstract_mesh(),
            _settings(*_SETTINGS),
            *(argument.key() for argument in arguments),
        )
        program = self._programs.get(key)
        if program is None or (runs and not program.agreed):
            # Only what runs needs all processes; one alone may look at a lowering.
            mesh = rules.mesh if rules is not None and runs else None
            name = getattr(self._fun, "__name__", "a function")
            with Agreement(f"the first call of {name}", mesh) as agreement:
                if program is None:
                    program = self._make(slots, static, arguments, rules)
                fingerprints = program.fingerprints
                agreement.add(lambda: {**fingerprints, **_data_parts(arguments)})
            program.agreed = runs
            self._keep(key, program)
        return arguments, program

    def _keep(self, key: Any, program: _Program) -> None:
        if program.cacheable:
            self._programs[key] = program
            if len(self._programs) > _PROGRAMS:
                del self._programs[next(iter(self._programs))]

    def _argument(self, slot: Slot, value: Any, rules: RuleSet | None) -> Argument:
        donated = _named(slot, self._donated)
        argument = take_apart(slot, value, is_state=donated, is_donated=donated)
        if not argument.is_state and _option(slot, self._in_shardings) is None:
            place_data(argument, rules)
        return argument

    # --------------------------------------------------------------- compiling

    def _make(
        self,
        slots: Sequence[tuple[Slot, Any]],
        static: Mapping[Slot, Any],
        arguments: list[Argument],
        rules: RuleSet | None,
    ) -> _Program:
        wanted, fingerprints = self._wanted(arguments, rules)
        leaves = [leaf for argument in arguments for leaf in argument.leaves]
        avals = [
            leaf if sharding is None else _aval(leaf, sharding)
            for leaf, sharding in zip(leaves, wanted, strict=True)
        ]
        order = [slot for slot, _ in slots]
        seen: dict[str, Any] = {}

        def flat(leaves: list[Any]) -> Any:
            return self._flat(order, static, arguments, leaves, seen)

        with using_rules(rules), _explicit_context(rules):
            closed, shapes = jax.make_jaxpr(flat, return_shape=True)(avals)
        changed: tuple[int, ...] = seen["changed"]
        pinned = self._pin(arguments, wanted, seen["out_tree"], shapes[1], rules)
        donated = _donated(arguments, set(changed))
        kept = tuple(sorted(set(range(len(leaves))) - set(donated)))
        program = _from_jaxpr(closed, shapes, pinned, donated, kept, self._fun)
        out = [sharding for _, sharding in pinned]
        return _Program(
            jitted=jax.jit(
                program,
                in_shardings=([wanted[a] for a in donated], [wanted[a] for a in kept]),
                out_shardings=([wanted[at] for at in changed], out),
                donate_argnums=(0,),
            ),
            wanted=wanted,
            donated=donated,
            kept=kept,
            changed=changed,
            out_tree=seen["out_tree"],
            out_shapes=list(shapes[1]),
            cacheable=not any(isinstance(c, Tracer) for c in closed.consts),
            fingerprints=fingerprints,
        )

    def _flat(
        self,
        order: Sequence[Slot],
        static: Mapping[Slot, Any],
        arguments: Sequence[Argument],
        leaves: Sequence[Any],
        seen: dict[str, Any],
    ) -> tuple[list[Any], list[Any]]:
        """The user's function on leaves; traced once."""
        values: dict[Slot, Any] = dict(static)
        rebuilt: list[tuple[Argument, list[Any], Sequence[Any]]] = []
        start = 0
        for argument in arguments:
            own = leaves[start : start + len(argument.leaves)]
            start += len(own)
            values[argument.slot], merged = argument.rebuild(own)
            rebuilt.append((argument, merged, own))
        result = call_with(
            self._fun, self._signature, [(slot, values[slot]) for slot in order]
        )
        results, seen["out_tree"] = results_of(result)
        after: list[Any] = []
        for argument, merged, own in rebuilt:
            if argument.has_objects:
                after.extend(leaves_after(argument, merged, own))
            else:
                after.extend(own)
        seen["changed"] = tuple(
            at
            for at, (old, new) in enumerate(zip(leaves, after, strict=True))
            if old is not new
        )
        return [strong(after[at]) for at in seen["changed"]], results

    def _wanted(
        self, arguments: list[Argument], rules: RuleSet | None
    ) -> tuple[list[Any], dict[str, str]]:
        """One sharding per leaf of all arguments; None leaves it to JAX.

        And the fingerprints of the Resolution that they come from.
        """
        fingerprints: dict[str, str] = {}
        found: dict[str, list[Any]] = {}
        by_rule: dict[str, Any] = {}
        mesh = None if rules is None else rules.mesh
        for argument in arguments:
            prefix = _option(argument.slot, self._in_shardings)
            if prefix is not None:
                what = f"in_shardings[{argument.name!r}]"
                found[argument.name] = broadcast(prefix, argument.plain(), mesh, what)
            elif not argument.is_state:
                found[argument.name] = [None] * len(argument.leaves)
            elif rules is None:
                found[argument.name] = [own_sharding(leaf) for leaf in argument.leaves]
            else:
                by_rule[argument.name] = _without_arrays(argument)
        if by_rule and rules is not None:
            resolution = resolve(Roots(by_rule), rules)
            resolution.announce()
            _announce_activations(rules)
            if jax.process_count() > 1:
                fingerprints = resolution.fingerprints()
            every = iter(resolution.sharding_list())
            for argument in arguments:
                if argument.name in by_rule:
                    found[argument.name] = [next(every) for _ in argument.leaves]
        return [s for a in arguments for s in found[a.name]], fingerprints

    def _pin(
        self,
        arguments: Sequence[Argument],
        wanted: Sequence[Any],
        out_tree: Any,
        out_shapes: Sequence[Any],
        rules: RuleSet | None,
    ) -> list[tuple[bool, Any]]:
        """Per result: whether it is state, and its sharding (None: the compiler's).

        A part of the result with the structure of a state argument keeps its layouts.
        """
        known: dict[Any, list[list[Any]]] = {}
        start = 0
        for argument in arguments:
            own = list(wanted[start : start + len(argument.leaves)])
            start += len(own)
            if argument.is_state and own:
                key = (argument.treedef, shape_key(argument.leaves))
                known.setdefault(key, []).append(own)
        result = jax.tree.unflatten(out_tree, out_shapes)
        pinned = _pin_tree(result, known)
        if self._out_shardings is not None:
            mesh = None if rules is None else rules.mesh
            given = broadcast(self._out_shardings, result, mesh, "out_shardings")
            return [
                (state, sharding if said is None else said)
                for (state, sharding), said in zip(pinned, given, strict=True)
            ]
        return pinned


# ------------------------------------------------------------------ functions


def _settings(*names: str) -> tuple[Any, ...]:
    return tuple(getattr(jax.config, name) for name in names)


def _named(slot: Slot, names: frozenset[str]) -> bool:
    return slot.name in names or slot.parameter in names


def _option(slot: Slot, options: Mapping[str, Any]) -> Any:
    return options.get(slot.name, options.get(slot.parameter))


def _aval(leaf: Any, sharding: Any) -> Any:
    if isinstance(leaf, Tracer | bool | int | float | complex):
        return leaf
    weak = bool(getattr(leaf, "weak_type", False))
    return jax.ShapeDtypeStruct(
        leaf.shape,
        jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True),
        sharding=sharding,
        weak_type=weak,
    )


def _without_arrays(argument: Argument) -> Any:
    """What the rules are asked about; a Resolution may be kept, arrays must not."""
    if argument.has_objects:
        return argument.value
    return argument.plain([_aval(leaf, None) for leaf in argument.leaves])


def _data_parts(arguments: Sequence[Argument]) -> dict[str, str]:
    """What the processes must have in common of the data: host values too."""
    data = [argument for argument in arguments if not argument.is_state]
    shapes = [(a.name, shape_key(a.leaves)) for a in data]
    values = digest_of_values(jax.tree.leaves([a.value for a in data]))
    return {"batch shapes": repr(shapes), "batch values": values}


def _announce_activations(rules: RuleSet) -> None:
    if rules.activations and "activations" not in rules._warned:
        rules._warned.add("activations")
        warn(
            "layout_map.activations has rules, which this version stores but does not "
            "apply; use flm.distribute_tensor in the model"
        )


def _write_back(arguments: Sequence[Argument], new: Mapping[int, Any]) -> None:
    """Writes new values (by position over all leaves) into the caller's objects."""
    start = 0
    for argument in arguments:
        count = len(argument.leaves)
        changed = any(at in new for at in range(start, start + count))
        if changed and argument.has_objects:
            argument.write_back(
                [new.get(start + at, leaf) for at, leaf in enumerate(argument.raw)]
            )
        start += count


def _donated(arguments: Sequence[Argument], changed: set[int]) -> tuple[int, ...]:
    """Positions of the leaves that are given away.

    What a function leaves unchanged in an NNX object stays in use, so its buffer must
    not be taken for a result that happens to have the same shape.
    """
    positions: list[int] = []
    start = 0
    for argument in arguments:
        span = range(start, start + len(argument.leaves))
        start = span.stop
        if not argument.is_donated:
            continue
        pure = argument.pure_leaves()
        positions.extend(at for at in span if at in changed or pure[at - span.start])
    return tuple(positions)


def _from_jaxpr(
    closed: ClosedJaxpr,
    shapes: Any,
    pinned: Sequence[tuple[bool, Any]],
    donated: Sequence[int],
    kept: Sequence[int],
    fun: Callable[..., Any],
) -> Callable[..., Any]:
    """The traced function on donated and other leaves; not traced a second time."""
    run = jaxpr_as_fun(closed)
    count = len(shapes[0])

    def program(given: list[Any], rest: list[Any]) -> Any:
        by_position = dict(zip((*donated, *kept), (*given, *rest), strict=True))
        values = run(*(by_position[at] for at in range(len(by_position))))
        results = [
            strong(value) if is_state else value
            for value, (is_state, _) in zip(values[count:], pinned, strict=True)
        ]
        return list(values[:count]), results

    program.__name__ = getattr(fun, "__name__", "step")
    return program


def _explicit_context(rules: RuleSet | None) -> Any:
    """Explicit axes need their mesh in context while a function is traced."""
    mesh = None if rules is None else rules.mesh
    explicit = mesh is not None and AxisType.Explicit in mesh.axis_types
    if mesh is None or not explicit or jax.sharding.get_abstract_mesh().axis_names:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh.jax_mesh.abstract_mesh)


def _pin_tree(
    tree: Any, known: Mapping[Any, list[list[Any]]]
) -> list[tuple[bool, Any]]:
    """Looks for the structures of state arguments in a result, from the outside in.

    Where several state arguments have one structure, they are taken in turn.
    """
    leaves, treedef = jax.tree.flatten(tree)
    found = known.get((treedef, shape_key(leaves)))
    if found is not None:
        shardings = found.pop(0) if len(found) > 1 else found[0]
        return [(True, sharding) for sharding in shardings]
    if jax.tree_util.treedef_is_leaf(treedef):
        return [(False, None)] * len(leaves)
    parts = jax.tree.leaves(tree, is_leaf=lambda node: node is not tree)
    return [entry for part in parts for entry in _pin_tree(part, known)]
