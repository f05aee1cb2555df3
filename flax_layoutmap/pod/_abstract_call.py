"""A step lowered without devices: its arguments on an abstract mesh, by the rules."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from flax_layoutmap._arguments import Argument, Slot, call_with, slots_of, take_apart
from flax_layoutmap._errors import LayoutError
from flax_layoutmap._flatten import flatten
from flax_layoutmap._inputs import _split, holds_parameters
from flax_layoutmap._jit import _Jitted
from flax_layoutmap._mesh import DeviceMesh
from flax_layoutmap._paths import Roots
from flax_layoutmap._program import Program, mesh_context
from flax_layoutmap._resolve import resolve, rule_set_of
from flax_layoutmap._rules import RuleSet
from flax_layoutmap._shardings import abstract

# What a step asks for that needs the values of its arguments.
_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """An argument of the lowered program.

    Attributes:
        path: path of the leaf, with the name of the argument first.
        role: `"parameter"`, `"optimizer"`, `"data"` or `"other"`.
        is_donated: whether its buffer is given away.
    """

    path: str
    role: str
    is_donated: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Lowered:
    """A step, lowered for a mesh without devices.

    Attributes:
        name: the step's name.
        lowered: as `jax.jit(...).lower` gives it.
        leaves: one per argument of the program that is used, in order.
        pairs: position of a result → that of the argument that it is the new value of.
        shardings_for: rules → the spec of each argument, by position; those that the
            rules do not decide are left out.
        constants: shape and bytes of each array that the step closes over.
    """

    name: str
    lowered: Any
    leaves: list[Leaf]
    pairs: dict[int, int]
    shardings_for: Callable[[RuleSet], dict[int, Any]]
    constants: list[tuple[tuple[int, ...], int]]


class _OnAbstractMesh(_Jitted):
    """`flm.jit` of a step that is only ever lowered."""

    def _rules(self) -> RuleSet | None:
        return rule_set_of(self._layout_map, "plan(layout_map=)")

    def _argument(self, slot: Slot, value: Any, rules: RuleSet | None) -> Argument:
        argument = super()._argument(slot, value, rules)
        if not argument.is_state and rules is not None and rules.mesh is not None:
            if self._job.in_sharding(slot) is None:
                argument.leaves = _split_leaves(argument, rules, rules.mesh)
        return argument

    def prepared(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], platform: str
    ) -> Lowered:
        rules = self._rules()
        assert rules is not None

        def lower(arguments: list[Argument], program: Program) -> Lowered:
            leaves = [leaf for one in arguments for leaf in one.leaves]
            avals = [
                abstract(leaf, wanted or getattr(leaf, "sharding", None))
                for leaf, wanted in zip(leaves, program.wanted, strict=True)
            ]
            inputs = program.inputs(avals)
            with mesh_context(rules, leaves):
                traced = program.jitted.trace(*inputs)
                lowered = traced.lower(lowering_platforms=(platform,))
            order = jax.tree.leaves(program.inputs(range(len(leaves))))
            kept = [order[at] for at in _kept(lowered, ["inputs"], variadic=True)]
            return self._described(arguments, program, traced, lowered, kept)

        return self._with_program(args, kwargs, rules, lower)

    def _described(
        self,
        arguments: list[Argument],
        program: Program,
        traced: Any,
        lowered: Any,
        kept: list[int],
    ) -> Lowered:
        """What is known of a lowered program.

        Args:
            arguments: the arguments.
            program: what they were traced to.
            traced: the trace.
            lowered: the lowered program.
            kept: positions, over the leaves of all arguments, of its arguments.
        """
        leaves = _described_leaves(arguments)
        gives_away = set(program.gives_away)
        place = {leaf: at for at, leaf in enumerate(kept)}
        pairs: dict[int, int] = {}
        if program.change is None:
            state = (*program.changed, *program.nested)
            pairs = {r: place[at] for r, at in enumerate(state) if at in place}
        start = len(program.changed_shapes)
        plain = jax.tree.unflatten(program.out_tree, program.out_shapes)
        known = [(one.treedef, one.leaves) for one in arguments]
        for result, leaf in same_trees(plain, known).items():
            if leaf in place:
                pairs.setdefault(start + result, place[leaf])

        def shardings_for(rules: RuleSet) -> dict[int, Any]:
            trees = {one.name: one.value for one in arguments if one.is_state}
            found = iter(resolve(Roots(trees), rules).sharding_list())
            specs: dict[int, Any] = {}
            start = 0
            for one in arguments:
                for at in range(start, start + len(one.leaves)):
                    spec = next(found).spec if one.is_state else None
                    if spec is not None and at in place:
                        specs[place[at]] = spec
                start += len(one.leaves)
            return specs

        return Lowered(
            self._job.name,
            lowered,
            [
                dataclasses.replace(leaves[at], is_donated=at in gives_away)
                for at in kept
            ],
            pairs,
            shardings_for,
            _constants(traced),
        )


def lower_step(
    step: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rules: RuleSet | None,
    donated: Any,
    platform: str,
) -> Lowered:
    """Lowers a step without devices.

    Args:
        step: a function, or what `flm.jit`, `jax.jit` or `nnx.jit` made of one.
        args: its arguments; abstract or not.
        kwargs: those by name.
        rules: the rules, on an abstract mesh; None only for a function of `jax.jit`.
        donated: names of arguments whose buffers are given away, for a function.
        platform: what to lower for.

    Raises:
        LayoutError: the step needs real values, or has no rules.
    """
    try:
        if isinstance(step, _Jitted):
            return _again(step, rules).prepared(args, kwargs, platform)
        is_nnx = _is_nnx_jit(step)
        if not is_nnx and callable(getattr(step, "trace", None)):
            return _lower_jitted(step, args, kwargs, rules, platform)
        # nnx.jit wraps the user's function; its own options do not count here.
        fun: Any = step.__wrapped__ if is_nnx else step
        if rules is None:
            raise LayoutError(
                "plan needs rules for a step that is no function of jax.jit; pass "
                "layout_map=layout_map"
            )
        made = _OnAbstractMesh(fun, rules, None, None, ((), ()), (donated, ()))
        return made.prepared(args, kwargs, platform)
    except _NEEDS_VALUES as error:
        name = getattr(step, "__name__", "the step")
        raise LayoutError(
            f"{name} needs the values of its arguments, and a plan has none: "
            f"{str(error).splitlines()[0]}; use jax.lax.cond, jnp.where or a shape "
            "instead, or make the argument static (flm.jit(static_argnames=…))"
        ) from error


def _again(step: _Jitted, rules: RuleSet | None) -> _OnAbstractMesh:
    """The same function with the same options, to be lowered only."""
    made = _OnAbstractMesh.__new__(_OnAbstractMesh)
    _OnAbstractMesh.__init__(
        made,
        step._job.fun,
        rules,
        step._job.in_shardings,
        step._job.out_shardings,
        (step._static, ()),
        (step._donated, ()),
    )
    return made


def _is_nnx_jit(step: Any) -> bool:
    return type(step).__module__.startswith("flax.") and hasattr(step, "__wrapped__")


def _split_leaves(argument: Argument, rules: RuleSet, mesh: DeviceMesh) -> list[Any]:
    """Data over the batch axes; what has a sharding keeps its spec."""
    found = []
    for at, leaf in enumerate(argument.leaves):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and set(sharding.mesh.axis_names) <= set(
            mesh.axis_names
        ):
            jax_mesh: Any = mesh.jax_mesh
            own = NamedSharding(jax_mesh, sharding.spec)
            found.append(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=own))
        elif isinstance(leaf, bool | int | float | complex):
            found.append(leaf)
        else:
            dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
            plain = jax.ShapeDtypeStruct(leaf.shape, dtype)
            found.append(_split(argument, at, plain, rules, mesh))
    return found


def _described_leaves(arguments: Sequence[Argument]) -> list[Leaf]:
    """Path and role of every leaf."""
    found: list[Leaf] = []
    for one in arguments:
        flat = flatten(Roots({one.name: one.value}))
        paths = flat.full_paths()
        roles = ["data"] * len(paths)
        if one.is_state:
            for section in flat.sections:
                for at in range(section.start, section.stop):
                    roles[at] = _role(section.role, one.leaves[at])
        found += [
            Leaf(path, role, False) for path, role in zip(paths, roles, strict=True)
        ]
    return found


def _role(role: str, leaf: Any) -> str:
    """Counters and random state among the parameters are no parameters."""
    if role == "parameter" and not jax.numpy.issubdtype(
        getattr(leaf, "dtype", np.int32), np.inexact
    ):
        return "other"
    return role


def _kept(lowered: Any, names: Sequence[str], *, variadic: bool = False) -> list[int]:
    """Which of its arguments a lowered program uses: JAX drops the others.

    Args:
        lowered: the program.
        names: its parameters.
        variadic: whether the first of them is `*args`.
    """
    entries, _ = jax.tree_util.tree_flatten_with_path(lowered.args_info)
    spelled = []
    for keys, _ in entries:
        rest = keys[1:] if variadic else keys[2:]
        at = getattr(keys[1], "idx", None)
        name = names[0] if variadic else keys[1].key if at is None else names[at]
        spelled.append(f"{name}{jax.tree_util.keystr(rest)}")
    block = lowered.compiler_ir("stablehlo").operation.regions[0].blocks[0]
    main = next(op for op in block.operations if _is_main(op))
    arguments = list(main.regions[0].blocks[0].arguments)
    if len(arguments) == len(spelled):
        return list(range(len(spelled)))
    texts = [str(argument.location) for argument in arguments]
    found = [text[5:-2].replace('\\"', '"') for text in texts]
    place = {name: at for at, name in enumerate(spelled)}
    if all(name in place for name in found):
        return [place[name] for name in found]
    raise LayoutError(
        f"the step leaves {len(spelled) - len(arguments)} of its arguments unused, and "
        "this version of JAX does not tell which; take them out of its arguments"
    )


def _is_main(op: Any) -> bool:
    return op.operation.name == "func.func" and "main" in str(op.attributes["sym_name"])


def _constants(traced: Any) -> list[tuple[tuple[int, ...], int]]:
    """Shape and bytes of what a trace closes over."""
    consts = traced.jaxpr.consts
    return [(tuple(np.shape(one)), int(getattr(one, "nbytes", 0))) for one in consts]


# ------------------------------------------------------------------ jax.jit's own


def _lower_jitted(
    step: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rules: RuleSet | None,
    platform: str,
) -> Lowered:
    """A function of `jax.jit`: as it is, with its arguments where the rules say."""
    signature = inspect.signature(step)
    slots = slots_of(signature.bind(*args, **kwargs))
    arguments: list[Argument] = []
    values: list[tuple[Slot, Any]] = []
    for slot, value in slots:
        if not all(map(_is_array_or_number, jax.tree.leaves(value))):
            values.append((slot, value))  # static: nothing to lay out
            continue
        argument = take_apart(slot, value, is_state=False, is_donated=False)
        if rules is not None:
            _lay_out(argument, rules)
        arguments.append(argument)
        plain = jax.tree.unflatten(jax.tree.structure(value), argument.leaves)
        values.append((slot, plain))
    traced = call_with(step.trace, signature, values)
    lowered = traced.lower(lowering_platforms=(platform,))
    infos = jax.tree.leaves(lowered.args_info)
    if sum(len(one.leaves) for one in arguments) > len(infos):
        # Numbers that are static; which they are, only jax.jit knows.
        arguments = [one for one in arguments if any(map(_is_array, one.raw))]
    kept = _kept(lowered, [one.slot.parameter for one in arguments])
    every = _described_leaves(arguments)
    donated = [info.donated for info in infos]
    place = {leaf: at for at, leaf in enumerate(kept)}
    known = [(one.treedef, one.leaves) for one in arguments]
    pairs = {
        result: place[leaf]
        for result, leaf in same_trees(lowered.out_info, known).items()
        if leaf in place
    }

    def shardings_for(other: RuleSet) -> dict[int, Any]:
        found: dict[int, Any] = {}
        start = 0
        for one in arguments:
            if one.is_state:
                tree = resolve(Roots({one.name: one.value}), other)
                for at, sharding in enumerate(tree.sharding_list(), start):
                    if at in place:
                        found[place[at]] = sharding.spec
            start += len(one.leaves)
        return found

    leaves = [dataclasses.replace(every[at], is_donated=donated[at]) for at in kept]
    name = getattr(step, "__name__", "the step")
    return Lowered(name, lowered, leaves, pairs, shardings_for, _constants(traced))


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "dtype")


def _is_array_or_number(leaf: Any) -> bool:
    return _is_array(leaf) or isinstance(leaf, bool | int | float | complex)


def _lay_out(argument: Argument, rules: RuleSet) -> None:
    """Gives the leaves of an argument the shardings of the rules."""
    if not argument.is_state and holds_parameters(argument, rules):
        argument.make_state()
    mesh = rules.mesh
    assert mesh is not None
    if not argument.is_state:
        argument.leaves = _split_leaves(argument, rules, mesh)
        return
    found = resolve(Roots({argument.name: argument.value}), rules).sharding_list()
    argument.leaves = [
        abstract(leaf, sharding)
        for leaf, sharding in zip(argument.leaves, found, strict=True)
    ]


def same_trees(
    result: Any, known: Sequence[tuple[Any, Sequence[Any]]]
) -> dict[int, int]:
    """Finds the trees of the arguments in a result, from the outside in.

    Args:
        result: a tree of shapes.
        known: structure and leaves of each argument.

    Returns:
        Position of a leaf of the result → that over the leaves of all arguments.
    """
    starts, total = [], 0
    for _, leaves in known:
        starts.append(total)
        total += len(leaves)
    left = list(range(len(known)))
    found: dict[int, int] = {}

    def look(tree: Any, start: int) -> int:
        leaves, treedef = jax.tree.flatten(tree)
        shapes = [tuple(np.shape(leaf)) for leaf in leaves]
        for at in left:
            own, given = known[at]
            if own == treedef and _is_state_like(treedef, shapes):
                if shapes == [tuple(np.shape(leaf)) for leaf in given]:
                    left.remove(at)
                    found.update(
                        (start + k, starts[at] + k) for k in range(len(leaves))
                    )
                    return start + len(leaves)
        if jax.tree_util.treedef_is_leaf(treedef):
            return start + len(leaves)
        parts = jax.tree.leaves(tree, is_leaf=lambda node: node is not tree)
        for part in parts:
            start = look(part, start)
        return start

    look(result, 0)
    return found


def _is_state_like(treedef: Any, shapes: Sequence[tuple[int, ...]]) -> bool:
    """A single array, or scalars alone (a loss, a counter), are no state."""
    return any(shapes) and not jax.tree_util.treedef_is_leaf(treedef)
