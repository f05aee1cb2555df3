"""jit: in and out shardings from the rules, for NNX objects and pure trees.

Arguments are sorted into two kinds. **State** is laid out by the rules and stays there:
NNX objects, TrainStates, and whatever is donated. **Data** is everything else: arrays
that are on a mesh already keep their layout, host arrays are split over the batch
axes. The function is traced once for each structure and set of shapes; what it changed
in NNX objects is written back into the caller's own objects.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import AxisType, NamedSharding

from flax_layoutmap._errors import (
    LayoutError,
    StructureError,
    bullet_list,
    warn,
)
from flax_layoutmap._flax_internals import is_nnx_object, nnx_split, variables_of
from flax_layoutmap._layout import TensorLayout, clash
from flax_layoutmap._mesh import DeviceMesh
from flax_layoutmap._paths import Roots, flatten, is_train_state
from flax_layoutmap._place import put
from flax_layoutmap._processes import Agreement, digest_of_values
from flax_layoutmap._records import show_shape, show_spec
from flax_layoutmap._resolve import resolve
from flax_layoutmap._rules import RuleSet
from flax_layoutmap._scope import using_rules


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

    State (NNX objects, TrainStates, and donated arguments) comes in and goes out in
    the layouts of the rules, so that nothing drifts and the second call compiles
    nothing. NNX objects are updated in place, as by `nnx.jit`. An output tree with the
    structure and shapes of a state argument is pinned to that argument's layouts.
    Data on the host is split over the map's `batch` axes.

    Inside, `flm.distribute_tensor(x, "hidden")` finds `layout_map.names["hidden"]`.

    Args:
        fun: the function; leave out to use `jit(...)` as a decorator.
        layout_map: a `LayoutMap` or `RuleSet`; it may be edited later: a new rule takes
            effect at the next call. None keeps every array where it is.
        in_shardings: argument name → sharding (or prefix tree of shardings), which
            overrides the rules for that argument.
        out_shardings: a sharding or prefix tree for the function's result; None leaves
            what is no state to the compiler.
        static_argnames: arguments that are compile-time constants (hashable).
        static_argnums: the same by position.
        donate_argnames: arguments whose buffers may be reused for the results.
        donate_argnums: the same by position.

    Returns:
        A function with `fun`'s signature, and `.trace`, `.lower` and `.eval_shape`,
        which take the same arguments.

    Raises:
        LayoutError: when called with state that is not where the rules say, with a
            batch that does not divide, or with a function that changes the structure
            of an NNX object. Nothing was run then.
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
        dict(in_shardings or {}),
        out_shardings,
        _names(fun, static_argnames, static_argnums),
        _names(fun, donate_argnames, donate_argnums),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Argument:
    """One dynamic argument, taken apart.

    Attributes:
        name: its name.
        value: as the caller gave it.
        outer: the structure with NNX objects as leaves.
        nodes: the leaves of `outer`.
        graphdefs: GraphDef of each node, None for what is no NNX object.
        leaves: all arrays.
        treedef: structure of the plain tree, `nnx.State` for each NNX object.
        is_state: whether the rules lay it out.
    """

    name: str
    value: Any
    outer: Any
    nodes: tuple[Any, ...]
    graphdefs: tuple[Any, ...]
    leaves: list[Any]
    treedef: Any
    is_state: bool

    def key(self) -> Any:
        avals = tuple(_aval_key(leaf) for leaf in self.leaves)
        return self.name, self.outer, self.graphdefs, self.treedef, avals, self.is_state

    def rebuild(self, leaves: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The argument again, from leaves; and its NNX objects."""
        parts = self.outer.flatten_up_to(jax.tree.unflatten(self.treedef, leaves))
        merged = [
            part if graphdef is None else nnx.merge(graphdef, part)
            for graphdef, part in zip(self.graphdefs, parts, strict=True)
        ]
        return jax.tree.unflatten(self.outer, merged), merged


@dataclasses.dataclass(slots=True)
class _Program:
    """What one structure of arguments compiled to.

    Attributes:
        jitted: (donated leaves, other state, data) → (changed state, results).
        shardings: per state argument, one sharding (or None) per leaf.
        changed: positions, over all state leaves, of what the function changed.
        out_tree: structure of the function's result.
        out_shapes: its abstract leaves.
        cacheable: whether nothing of an outer trace is inside.
        fingerprints: of rules, mesh and table; empty where there is one process.
        agreed: whether the processes have compared them.
    """

    jitted: Any
    shardings: dict[str, list[Any]]
    changed: tuple[int, ...]
    out_tree: Any
    out_shapes: list[Any]
    cacheable: bool
    fingerprints: Mapping[str, str]
    agreed: bool = False


class _Jitted:
    """The function that `jit` returns."""

    def __init__(
        self,
        fun: Callable[..., Any],
        layout_map: Any,
        in_shardings: dict[str, Any],
        out_shardings: Any,
        static: frozenset[str],
        donated: frozenset[str],
    ) -> None:
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._signature = inspect.signature(fun)
        self._layout_map = layout_map
        self._in_shardings = in_shardings
        self._out_shardings = out_shardings
        self._static, self._donated = static, donated
        self._programs: dict[Any, _Program] = {}
        for name in (*in_shardings, *static, *donated):
            if name not in self._signature.parameters:
                raise LayoutError(
                    f"jit names the argument {name!r}, which "
                    f"{getattr(fun, '__name__', 'the function')} does not have; it has "
                    f"{list(self._signature.parameters)}"
                )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments, program = self._bind(args, kwargs, runs=True)
        inputs = self._inputs(arguments, program, check=True)
        changed, results = program.jitted(*inputs)
        self._write_back(arguments, program, changed)
        return jax.tree.unflatten(program.out_tree, results)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(...).trace`, of the program on leaves."""
        arguments, program = self._bind(args, kwargs)
        return program.jitted.trace(*self._inputs(arguments, program, check=False))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(...).lower`, of the program on leaves."""
        arguments, program = self._bind(args, kwargs)
        return program.jitted.lower(*self._inputs(arguments, program, check=False))

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result as `jax.ShapeDtypeStruct`s; no object is changed."""
        _, program = self._bind(args, kwargs)
        return jax.tree.unflatten(program.out_tree, program.out_shapes)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    # ------------------------------------------------------------ taking apart

    def _rules(self) -> RuleSet | None:
        if self._layout_map is None or isinstance(self._layout_map, RuleSet):
            return self._layout_map
        return self._layout_map.freeze()

    def _bind(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, runs: bool = False
    ) -> tuple[list[_Argument], _Program]:
        bound = self._signature.bind(*args, **kwargs)
        static = tuple(
            (name, bound.arguments[name])
            for name in bound.arguments
            if name in self._static
        )
        rules = self._rules()
        arguments = [
            self._argument(name, value, rules)
            for name, value in bound.arguments.items()
            if name not in self._static
        ]
        context = jax.sharding.get_abstract_mesh()
        key = (static, rules, context, _config(), *(a.key() for a in arguments))
        program = self._programs.get(key)
        if program is None or (runs and not program.agreed):
            # Only what runs needs all processes; one alone may look at a lowering.
            mesh = rules.mesh if rules is not None and runs else None
            name = getattr(self._fun, "__name__", "a function")
            with Agreement(f"the first call of {name}", mesh) as agreement:
                if program is None:
                    program = self._make(bound, dict(static), arguments, rules)
                fingerprints = program.fingerprints
                agreement.add(lambda: {**fingerprints, **_data_parts(arguments)})
            program.agreed = runs
            if program.cacheable:
                self._programs[key] = program
        return arguments, program

    def _argument(self, name: str, value: Any, rules: RuleSet | None) -> _Argument:
        nodes, outer = jax.tree.flatten(value, is_leaf=_stops)
        graphdefs, parts = [], []
        is_state = name in self._donated
        for node in nodes:
            graphdef, part = nnx_split(node) if is_nnx_object(node) else (None, node)
            is_state = is_state or graphdef is not None or is_train_state(node)
            graphdefs.append(graphdef)
            parts.append(part)
        leaves, treedef = jax.tree.flatten(jax.tree.unflatten(outer, parts))
        if is_state:
            leaves = [_strong(leaf) for leaf in leaves]
        elif rules is not None and name not in self._in_shardings:
            leaves = _placed_batch(name, value, leaves, rules)
        return _Argument(
            name,
            value,
            outer,
            tuple(nodes),
            tuple(graphdefs),
            leaves,
            treedef,
            is_state,
        )

    # ---------------------------------------------------------------- the call

    def _inputs(
        self, arguments: list[_Argument], program: _Program, *, check: bool
    ) -> tuple[list[Any], list[Any], list[list[Any]]]:
        """(donated state, other state, data), state in the layouts of the program."""
        donated: list[Any] = []
        kept: list[Any] = []
        data: list[list[Any]] = []
        problems: list[str] = []
        for argument in arguments:
            if not argument.is_state:
                data.append(argument.leaves)
                continue
            target = donated if argument.name in self._donated else kept
            for at, (leaf, wanted) in enumerate(
                zip(argument.leaves, program.shardings[argument.name], strict=True)
            ):
                if check and wanted is not None and isinstance(leaf, jax.Array):
                    leaf = _fitted(leaf, wanted, argument, at, problems)
                target.append(leaf)
        if problems:
            raise LayoutError(
                f"{len(problems)} arrays are not where the rules of this jit say:\n"
                f"{bullet_list(problems)}\nmove them first, layout_map.place(model), "
                "or make the model with flm.create(make, layout_map)"
            )
        return donated, kept, data

    def _write_back(
        self, arguments: list[_Argument], program: _Program, changed: Sequence[Any]
    ) -> None:
        """Writes new values into the caller's NNX objects."""
        new = dict(zip(program.changed, changed, strict=True))
        position = 0
        for argument in arguments:
            if not argument.is_state:
                continue
            count = len(argument.leaves)
            if any(at in new for at in range(position, position + count)):
                leaves = [
                    new.get(position + at, leaf)
                    for at, leaf in enumerate(argument.leaves)
                ]
                plain = jax.tree.unflatten(argument.treedef, leaves)
                parts = argument.outer.flatten_up_to(plain)
                for node, graphdef, part in zip(
                    argument.nodes, argument.graphdefs, parts, strict=True
                ):
                    if graphdef is not None:
                        nnx.update(node, part)
            position += count

    # --------------------------------------------------------------- compiling

    def _make(
        self,
        bound: inspect.BoundArguments,
        static: dict[str, Any],
        arguments: list[_Argument],
        rules: RuleSet | None,
    ) -> _Program:
        _check_not_shared(arguments)
        shardings, fingerprints = self._state_shardings(arguments, rules)
        seen: dict[str, Any] = {}

        def flat(donated: list[Any], kept: list[Any], data: list[Any]) -> Any:
            return self._flat(bound, static, arguments, donated, kept, data, seen)

        avals = self._avals(arguments, shardings)
        with using_rules(rules), _explicit_context(rules):
            closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*avals)
        changed: tuple[int, ...] = seen["changed"]
        _, out_shapes = shapes
        every = [s for a in arguments if a.is_state for s in shardings[a.name]]
        pinned = self._pin(arguments, shardings, seen["out_tree"], out_shapes)
        in_sharding = _by_kind(
            arguments,
            self._donated,
            lambda a: shardings[a.name],
            lambda a: self._data_shardings(a),
        )
        program = _from_jaxpr(closed, jax.tree.structure(shapes), self._fun)
        jitted = jax.jit(
            program,
            in_shardings=in_sharding,
            out_shardings=([every[at] for at in changed], pinned),
            donate_argnums=(0,),
        )
        return _Program(
            jitted=jitted,
            shardings=shardings,
            changed=changed,
            out_tree=seen["out_tree"],
            out_shapes=list(out_shapes),
            cacheable=not any(isinstance(c, Tracer) for c in closed.consts),
            fingerprints=fingerprints,
        )

    def _flat(
        self,
        bound: inspect.BoundArguments,
        static: dict[str, Any],
        arguments: list[_Argument],
        donated: list[Any],
        kept: list[Any],
        data: list[Any],
        seen: dict[str, Any],
    ) -> tuple[list[Any], list[Any]]:
        """The user's function on leaves; traced once."""
        sources = {True: iter(donated), False: iter(kept)}
        values, before, merged_of = dict(static), [], []
        data_iter = iter(data)
        for argument in arguments:
            if argument.is_state:
                source = sources[argument.name in self._donated]
                leaves = [next(source) for _ in argument.leaves]
                before.extend(leaves)
            else:
                leaves = next(data_iter)
            values[argument.name], merged = argument.rebuild(leaves)
            if argument.is_state:
                merged_of.append((argument, merged, leaves))
        call = inspect.BoundArguments(
            bound.signature,
            type(bound.arguments)((name, values[name]) for name in bound.arguments),
        )
        result = self._fun(*call.args, **call.kwargs)
        results, seen["out_tree"] = _results(result)
        after: list[Any] = []
        for argument, merged, leaves in merged_of:
            after.extend(_after(argument, merged, leaves))
        seen["changed"] = tuple(
            at
            for at, (old, new) in enumerate(zip(before, after, strict=True))
            if old is not new
        )
        return [after[at] for at in seen["changed"]], results

    def _state_shardings(
        self, arguments: list[_Argument], rules: RuleSet | None
    ) -> tuple[dict[str, list[Any]], dict[str, str]]:
        """One sharding per leaf of each state argument; None leaves it to JAX.

        And the fingerprints of the Resolution that they come from.
        """
        state = [argument for argument in arguments if argument.is_state]
        if rules is None or rules.mesh is None:
            own = {a.name: [_own_sharding(leaf) for leaf in a.leaves] for a in state}
            return own, {}
        by_rule = {a.name: a.value for a in state if a.name not in self._in_shardings}
        if not by_rule:
            return {a.name: self._data_shardings(a) for a in state}, {}
        resolution = resolve(Roots(by_rule), rules)
        resolution.announce()
        if rules.activations:
            warn(
                "layout_map.activations has rules, which this version stores but does "
                "not apply; use flm.distribute_tensor in the model"
            )
        every = iter(resolution.sharding_list())
        found: dict[str, list[Any]] = {}
        for argument in state:
            if argument.name in self._in_shardings:
                found[argument.name] = self._data_shardings(argument)
            else:
                found[argument.name] = [next(every) for _ in argument.leaves]
        # The Resolution itself would keep the arrays of the first call alive.
        alone = jax.process_count() == 1
        return found, {} if alone else resolution.fingerprints()

    def _data_shardings(self, argument: _Argument) -> list[Any]:
        """What `in_shardings` says, one entry per leaf; else None: as the array is."""
        if argument.name not in self._in_shardings:
            return [None] * len(argument.leaves)
        prefix = self._in_shardings[argument.name]
        plain = jax.tree.unflatten(argument.treedef, argument.leaves)
        return _broadcast(prefix, plain)

    def _avals(
        self, arguments: list[_Argument], shardings: dict[str, list[Any]]
    ) -> tuple[list[Any], list[Any], list[list[Any]]]:
        def state_avals(argument: _Argument) -> list[Any]:
            return [
                _aval(leaf, sharding)
                for leaf, sharding in zip(
                    argument.leaves, shardings[argument.name], strict=True
                )
            ]

        return _by_kind(arguments, self._donated, state_avals, lambda a: a.leaves)

    def _pin(
        self,
        arguments: list[_Argument],
        shardings: dict[str, list[Any]],
        out_tree: Any,
        out_shapes: list[Any],
    ) -> list[Any]:
        """One sharding (or None) per result: states keep their layouts."""
        result = jax.tree.unflatten(out_tree, out_shapes)
        if self._out_shardings is not None:
            return _broadcast(self._out_shardings, result)
        known = {
            (a.treedef, tuple(_shape_key(leaf) for leaf in a.leaves)): shardings[a.name]
            for a in arguments
            if a.is_state and len(a.leaves) > 0
        }
        return _pin_tree(result, known)


# ------------------------------------------------------------------ functions


def _names(
    fun: Callable[..., Any], names: str | Iterable[str], numbers: int | Iterable[int]
) -> frozenset[str]:
    listed = [names] if isinstance(names, str) else list(names)
    parameters = list(inspect.signature(fun).parameters)
    for number in [numbers] if isinstance(numbers, int) else numbers:
        try:
            listed.append(parameters[number])
        except IndexError:
            raise LayoutError(
                f"there is no argument number {number}; the function has {parameters}"
            ) from None
    return frozenset(listed)


def _stops(node: Any) -> bool:
    return is_nnx_object(node)


# JAX settings that change what a trace gives.
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_debug_nans",
)


def _config() -> tuple[Any, ...]:
    return tuple(getattr(jax.config, name) for name in _SETTINGS)


def _aval_key(leaf: Any) -> Any:
    if isinstance(leaf, bool | int | float | complex):
        return type(leaf)
    sharding = getattr(leaf, "sharding", None)
    explicit = isinstance(sharding, NamedSharding) and any(
        kind is AxisType.Explicit for kind in sharding.mesh.axis_types
    )
    return (
        leaf.shape,
        leaf.dtype,
        getattr(leaf, "weak_type", False),
        sharding if explicit else None,
    )


def _shape_key(leaf: Any) -> tuple[Any, Any]:
    return tuple(np.shape(leaf)), jax.dtypes.result_type(leaf) if not hasattr(
        leaf, "dtype"
    ) else leaf.dtype


def _strong(leaf: Any) -> Any:
    """A Python number in a state as an array, so that the next call looks the same."""
    if isinstance(leaf, bool | int | float | complex):
        return np.asarray(leaf, jax.dtypes.result_type(leaf))
    return leaf


def _aval(leaf: Any, sharding: Any) -> Any:
    if isinstance(leaf, Tracer):
        return leaf
    weak = bool(getattr(leaf, "weak_type", False))
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak
    )


def _own_sharding(leaf: Any) -> Any:
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def _fitted(
    leaf: Any, wanted: Any, argument: _Argument, at: int, problems: list[str]
) -> Any:
    """The leaf with exactly the wanted sharding; notes it where that is not so."""
    if isinstance(leaf, Tracer) or leaf.sharding == wanted:
        return leaf
    if not leaf.committed or leaf.sharding.is_equivalent_to(wanted, leaf.ndim):
        # The same placement in other words: one form keeps one compiled program.
        return put(leaf, wanted)
    plain = Roots({argument.name: argument.value})
    path = flatten(plain).full_paths()[at]
    problems.append(
        f"{path} {show_shape(leaf.shape)}: the rules say "
        f"{show_spec(wanted.spec)}, it is {_show_sharding(leaf.sharding)}"
    )
    return leaf


def _show_sharding(sharding: Any) -> str:
    if isinstance(sharding, NamedSharding):
        return f"{show_spec(sharding.spec)} on mesh {DeviceMesh(sharding.mesh)}"
    return str(sharding)


def _placed_batch(
    name: str, value: Any, leaves: list[Any], rules: RuleSet
) -> list[Any]:
    """Host arrays split over the batch axes; arrays on a mesh as they are."""
    mesh = rules.mesh
    if mesh is None or mesh.is_abstract:
        return leaves
    if all(_is_placed(leaf) for leaf in leaves):
        return leaves
    paths = flatten(Roots({name: value})).full_paths()
    problems: list[str] = []
    placed = []
    sizes = mesh.axis_sizes
    parts = math.prod(sizes[axis] for axis in rules.batch)
    for path, leaf in zip(paths, leaves, strict=True):
        if _is_placed(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
            placed.append(leaf)
            continue
        shape = leaf.shape
        is_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        if shape and not is_key and shape[0] % parts:
            problems.append(
                f"{path} {show_shape(shape)}: {clash(0, shape[0], rules.batch, sizes)}"
            )
            continue
        axes = (rules.batch, ...) if shape and not is_key else ()
        placed.append(put(leaf, TensorLayout(axes, mesh).sharding(len(shape))))
    if problems:
        raise LayoutError(
            f"the batch does not divide over the batch axes {rules.batch}:\n"
            f"{bullet_list(problems)}\npad it, drop the rest, or place it yourself "
            "with flm.distribute_tensor"
        )
    return placed


def _data_parts(arguments: Sequence[_Argument]) -> dict[str, str]:
    """What the processes must have in common of the data: host values too."""
    data = [argument for argument in arguments if not argument.is_state]
    shapes = [(a.name, [_shape_key(leaf) for leaf in a.leaves]) for a in data]
    values = digest_of_values(jax.tree.leaves([a.value for a in data]))
    return {"batch shapes": repr(shapes), "batch values": values}


def _is_placed(leaf: Any) -> bool:
    if isinstance(leaf, Tracer | bool | int | float | complex):
        return True
    return isinstance(leaf, jax.Array) and leaf.committed


def _check_not_shared(arguments: list[_Argument]) -> None:
    owners: dict[int, str] = {}
    for argument in arguments:
        for number, node in enumerate(argument.nodes):
            if not is_nnx_object(node):
                continue
            here = f"{argument.name} (object {number})"
            for variable in variables_of(node):
                if owners.setdefault(id(variable), here) != here:
                    raise StructureError(
                        f"{owners[id(variable)]} and {here} share a "
                        f"{type(variable).__name__}: pass one object that holds both"
                    )


def _results(result: Any) -> tuple[list[Any], Any]:
    leaves, tree = jax.tree.flatten(result, is_leaf=is_nnx_object)
    for leaf in leaves:
        if is_nnx_object(leaf):
            raise StructureError(
                f"the function returns a {type(leaf).__name__}: return its arrays, "
                "nnx.state(module), or make it with flm.create; arguments are updated "
                "in place and need not be returned"
            )
    return leaves, tree


def _after(argument: _Argument, merged: list[Any], leaves: Sequence[Any]) -> list[Any]:
    """The leaves of an argument after the call; its structure must be the same."""
    parts = []
    for node, graphdef, part in zip(
        merged,
        argument.graphdefs,
        argument.outer.flatten_up_to(jax.tree.unflatten(argument.treedef, leaves)),
        strict=True,
    ):
        if graphdef is None:
            parts.append(part)
            continue
        new_graphdef, state = nnx_split(node)
        if new_graphdef != graphdef:
            raise StructureError(_changed_structure(argument.name, part, state))
        parts.append(state)
    return jax.tree.leaves(jax.tree.unflatten(argument.outer, parts))


def _changed_structure(name: str, before: Any, after: Any) -> str:
    old, new = set(flatten(before).paths), set(flatten(after).paths)
    added = ", ".join(f"{name}/{path}" for path in sorted(new - old)[:5])
    gone = ", ".join(f"{name}/{path}" for path in sorted(old - new)[:5])
    what = "; ".join(
        text
        for text in (
            f"added {added}" if added else "",
            f"removed {gone}" if gone else "",
        )
        if text
    )
    return (
        f"the function changed the structure of {name!r} "
        f"({what or 'a static attribute, a type or metadata'}); this jit writes values "
        "back, not structure: do that outside of the step, or use nnx.jit"
    )


def _by_kind(
    arguments: list[_Argument],
    donated_names: frozenset[str],
    state: Callable[[_Argument], list[Any]],
    data: Callable[[_Argument], list[Any]],
) -> tuple[list[Any], list[Any], list[list[Any]]]:
    """(donated, kept, data) in the order that the program takes them."""
    donated: list[Any] = []
    kept: list[Any] = []
    rest: list[list[Any]] = []
    for argument in arguments:
        if not argument.is_state:
            rest.append(data(argument))
        elif argument.name in donated_names:
            donated.extend(state(argument))
        else:
            kept.extend(state(argument))
    return donated, kept, rest


def _from_jaxpr(
    closed: ClosedJaxpr, out_tree: Any, fun: Callable[..., Any]
) -> Callable[..., Any]:
    """The traced function on leaves; not traced a second time."""
    run = jaxpr_as_fun(closed)

    def program(*groups: Any) -> Any:
        return jax.tree.unflatten(out_tree, run(*jax.tree.leaves(groups)))

    program.__name__ = getattr(fun, "__name__", "step")
    return program


def _explicit_context(rules: RuleSet | None) -> Any:
    """Explicit axes need their mesh in context while a function is traced."""
    import contextlib

    mesh = None if rules is None else rules.mesh
    explicit = mesh is not None and AxisType.Explicit in mesh.axis_types
    if mesh is None or not explicit or jax.sharding.get_abstract_mesh().axis_names:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh.jax_mesh.abstract_mesh)


def _broadcast(prefix: Any, tree: Any) -> list[Any]:
    """One entry per leaf of `tree`, from a prefix tree of shardings."""
    if prefix is None or isinstance(prefix, jax.sharding.Sharding):
        return [prefix] * len(jax.tree.leaves(tree))
    return jax.tree.leaves(
        jax.tree.map(
            lambda sharding, part: jax.tree.map(lambda _: sharding, part), prefix, tree
        )
    )


def _pin_tree(tree: Any, known: Mapping[Any, list[Any]]) -> list[Any]:
    """Looks for the structures of state arguments in a result, from the outside in."""
    leaves, treedef = jax.tree.flatten(tree)
    found = known.get((treedef, tuple(_shape_key(leaf) for leaf in leaves)))
    if found is not None:
        return list(found)
    if jax.tree_util.treedef_is_leaf(treedef):
        return [None] * len(leaves)
    parts = jax.tree.leaves(tree, is_leaf=lambda node: node is not tree)
    return [entry for part in parts for entry in _pin_tree(part, known)]
