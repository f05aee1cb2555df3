"""A step lowered without devices: its arguments on an abstract mesh, by the rules."""

import contextlib
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from flax_layoutmap._arguments import Argument, call_with, slots_of, take_apart
from flax_layoutmap._errors import LayoutError
from flax_layoutmap._flatten import flatten
from flax_layoutmap._flax_internals import is_nnx_object
from flax_layoutmap._inputs import holds_parameters
from flax_layoutmap._jaxprs import every
from flax_layoutmap._jit import Jitted, jit
from flax_layoutmap._mesh import DeviceMesh
from flax_layoutmap._paths import Roots
from flax_layoutmap._program import Job, Program, mesh_context
from flax_layoutmap._rules import RuleSet
from flax_layoutmap._shardings import abstract
from flax_layoutmap.pod._state import Layouts, split_data

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
        kept: position of each argument over the leaves of the step's arguments.
        layouts: where these lie under other rules.
        constants: shape and bytes of each array that the step closes over.
        wanted: position of each argument → the spec that the rules gave it, where the
            step may have said another.
        notes: what of its arguments is worth a look.
    """

    name: str
    lowered: Any
    leaves: list[Leaf]
    pairs: dict[int, int]
    kept: list[int]
    layouts: Layouts
    constants: list[tuple[tuple[int, ...], int]]
    wanted: dict[int, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def specs_under(self, rules: RuleSet) -> dict[int, Any]:
        """Position → spec of the arguments that the rules decide."""
        every = self.layouts.under(rules)
        found = {at: every[leaf] for at, leaf in enumerate(self.kept)}
        return {at: one.spec for at, one in found.items() if one is not None}


def lower_step(
    step: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rules: RuleSet | None,
    donated: Any,
    platform: str,
    mesh: DeviceMesh | None = None,
) -> Lowered:
    """Lowers a step without devices.

    Args:
        step: a function, or what `flm.jit`, `jax.jit` or `nnx.jit` made of one.
        args: its arguments; abstract or not.
        kwargs: those by name.
        rules: the rules, on an abstract mesh; None only for a function of `jax.jit`.
        donated: names of arguments whose buffers are given away, for a function.
        platform: what to lower for.
        mesh: the mesh; None takes that of the rules.

    Raises:
        LayoutError: the step needs real values, has no rules, or uses what JAX does not
            lower without devices.
    """
    name = getattr(step, "__name__", "the step")
    if rules is not None and mesh is None:
        mesh = rules.mesh
    call = functools.partial(_lower_step, step, args, kwargs, rules, donated, platform)
    try:
        return _in_its_mesh(call, mesh)
    except _NEEDS_VALUES as error:
        raise LayoutError(
            f"{name} needs the values of its arguments, and a plan has none: "
            f"{str(error).splitlines()[0]}; use jax.lax.cond, jnp.where or a shape "
            "instead, or make the argument static (flm.jit(static_argnames=…))"
        ) from error
    except TypeError as error:
        if "ShapeDtypeStruct" not in str(error):
            raise
        raise LayoutError(
            f"{name} uses a jax.ShapeDtypeStruct that is none of its arguments "
            f"({error}), such as a model in its closure; pass that as an argument"
        ) from error


def _in_its_mesh(call: Callable[[], Lowered], mesh: DeviceMesh | None) -> Lowered:
    """Calls; again with the mesh as context where the step needs one and has none.

    So it is where its constraints name axes alone, as under `jax.set_mesh`.
    """
    try:
        return call()
    except (RuntimeError, ValueError) as error:
        context: Any = jax.sharding.get_abstract_mesh()
        lacks_mesh = "mesh" in str(error) and "empty" in str(error)
        if isinstance(error, LayoutError) or context.axis_names or mesh is None:
            raise
        if not lacks_mesh:
            raise
    jax_mesh: Any = mesh.jax_mesh
    with jax.sharding.use_abstract_mesh(jax_mesh):
        return call()


def _lower_step(
    step: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rules: RuleSet | None,
    donated: Any,
    platform: str,
) -> Lowered:
    _check_step(step)
    is_nnx = _is_nnx_jit(step)
    if not isinstance(step, Jitted):
        if not is_nnx and callable(getattr(step, "trace", None)):
            return _lower_jitted(step, args, kwargs, rules, platform)
        # nnx.jit wraps the user's function; its own options do not count here.
        fun: Any = step.__wrapped__ if is_nnx else step
        step = jit(fun, layout_map=rules, donate_argnames=donated)
    if rules is None:
        raise LayoutError(
            "plan needs rules for a step that is no function of jax.jit; pass "
            "layout_map=layout_map"
        )
    use = functools.partial(_lower_program, rules, platform)
    return step.without_running(args, kwargs, rules, split_data, use)


def _check_step(step: Any) -> None:
    owner = getattr(step, "__self__", step)
    if is_nnx_object(owner):
        kind = type(owner).__name__
        raise LayoutError(
            f"the step is a module ({kind}), whose arrays would be constants of the "
            "program; pass it as an argument: "
            "flm.pod.plan(lambda model, x: model(x), model, x, …)"
        )


def _lower(traced: Any, platform: str, name: str) -> Any:
    """Lowers for a platform.

    Raises:
        LayoutError: the step calls back into Python.
    """
    try:
        return traced.lower(lowering_platforms=(platform,))
    except ValueError as error:
        names = {eqn.primitive.name for eqn in every(traced.jaxpr.eqns)}
        calls = sorted(one for one in names if "callback" in one or "debug" in one)
        if not calls or not re.search("AbstractMesh|backend", str(error)):
            raise
        raise LayoutError(
            f"{name} calls back into Python ({', '.join(calls)}: jax.debug.print, "
            "jax.pure_callback and the like), which JAX lowers only where the devices "
            "are; leave it out of what is planned"
        ) from error


def _lower_program(
    rules: RuleSet,
    platform: str,
    job: Job,
    arguments: list[Argument],
    program: Program,
) -> Lowered:
    """Lowers what `flm.jit` would run."""
    leaves = [leaf for one in arguments for leaf in one.leaves]
    avals = [
        abstract(leaf, wanted or getattr(leaf, "sharding", None))
        for leaf, wanted in zip(leaves, program.wanted, strict=True)
    ]
    with mesh_context(rules, leaves):
        traced = program.jitted.trace(*program.inputs(avals))
        lowered = _lower(traced, platform, job.name)
    order = jax.tree.leaves(program.inputs(range(len(leaves))))
    kept = [order[at] for at in _kept(lowered, ["inputs"], variadic=True)]
    place = {leaf: at for at, leaf in enumerate(kept)}
    pairs: dict[int, int] = {}
    if program.change is None:
        state = (*program.changed, *program.nested)
        pairs = {r: place[at] for r, at in enumerate(state) if at in place}
    start = len(program.changed_shapes)
    plain = jax.tree.unflatten(program.out_tree, program.out_shapes)
    for result, leaf in same_trees(plain, arguments).items():
        if leaf in place:
            pairs.setdefault(start + result, place[leaf])
    fixed = [one.name for one in arguments if job.in_sharding(one.slot) is not None]
    gives_away = set(program.gives_away)
    return Lowered(
        job.name,
        lowered,
        _leaves(arguments, kept, [at in gives_away for at in kept]),
        pairs,
        kept,
        Layouts(arguments, fixed),
        _constants(traced),
        notes=_notes(arguments),
    )


def _is_nnx_jit(step: Any) -> bool:
    return type(step).__module__.startswith("flax.") and hasattr(step, "__wrapped__")


def _leaves(
    arguments: Sequence[Argument], kept: Sequence[int], donated: Sequence[bool]
) -> list[Leaf]:
    """What the arguments of a program are.

    Args:
        arguments: the arguments of the step.
        kept: positions, over their leaves, of those of the program.
        donated: of each of these, whether it is given away.
    """
    every: list[tuple[str, str]] = []
    for one in arguments:
        flat = flatten(Roots({one.name: one.value}))
        paths = flat.full_paths()
        roles = ["data"] * len(paths)
        if one.is_state:
            for section in flat.sections:
                for at in range(section.start, section.stop):
                    roles[at] = _role(section.role, one.leaves[at])
        every += zip(paths, roles, strict=True)
    return [Leaf(*every[at], gone) for at, gone in zip(kept, donated, strict=True)]


def _role(role: str, leaf: Any) -> str:
    """Counters and random state are no parameters; quantised matrices are."""
    dtype = getattr(leaf, "dtype", np.int32)
    is_key = jax.numpy.issubdtype(dtype, jax.dtypes.extended)
    if role != "parameter" or jax.numpy.issubdtype(dtype, np.inexact):
        return role
    return "other" if is_key or np.ndim(leaf) < 2 else role


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
    # What holds something else is static: nothing to lay out.
    arguments = {
        slot: take_apart(slot, value, is_state=False, is_donated=False)
        for slot, value in slots
        if all(map(_is_array_or_number, jax.tree.leaves(value)))
    }
    if rules is not None:
        _lay_out(list(arguments.values()), rules)
    values = [
        (slot, arguments[slot].plain() if slot in arguments else value)
        for slot, value in slots
    ]
    leaves = [leaf for one in arguments.values() for leaf in one.leaves]
    with contextlib.nullcontext() if rules is None else mesh_context(rules, leaves):
        traced = call_with(step.trace, signature, values)
        lowered = _lower(traced, platform, getattr(step, "__name__", "the step"))
    infos = jax.tree.leaves(lowered.args_info)
    taken = list(arguments.values())
    if sum(len(one.leaves) for one in taken) > len(infos):
        # Numbers that are static; which they are, only jax.jit knows.
        taken = [one for one in taken if any(map(_is_array, one.raw))]
    kept = _kept(lowered, [one.slot.parameter for one in taken])
    place = {leaf: at for at, leaf in enumerate(kept)}
    pairs = {
        result: place[leaf]
        for result, leaf in same_trees(lowered.out_info, taken).items()
        if leaf in place
    }
    return Lowered(
        getattr(step, "__name__", "the step"),
        lowered,
        _leaves(taken, kept, [infos[at].donated for at in kept]),
        pairs,
        kept,
        Layouts(taken),
        _constants(traced),
        {} if rules is None else _specs(taken, kept),
        () if rules is None else _notes(taken),
    )


def _specs(arguments: Sequence[Argument], kept: Sequence[int]) -> dict[int, Any]:
    """Position of each argument of a program → the spec that its leaf was given."""
    leaves = [leaf for one in arguments for leaf in one.leaves]
    found = {
        at: getattr(leaves[leaf], "sharding", None) for at, leaf in enumerate(kept)
    }
    return {at: one.spec for at, one in found.items() if one is not None}


def _notes(arguments: Sequence[Argument]) -> tuple[str, ...]:
    """Whether what is meant as state was taken for data."""
    containers = [one.name for one in arguments if one.is_container and one.leaves]
    if any(one.is_state for one in arguments) or len(arguments) < 2 or not containers:
        return ()
    return (
        f"no rule shards a leaf of {', '.join(containers)}, so that every argument is "
        "data, split over the batch axes; say what is state: "
        f'donate_argnames="{containers[0]}"',
    )


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "dtype")


def _is_array_or_number(leaf: Any) -> bool:
    return _is_array(leaf) or isinstance(leaf, bool | int | float | complex)


def _lay_out(arguments: Sequence[Argument], rules: RuleSet) -> None:
    """Gives the leaves of arguments the shardings of the rules."""
    for one in arguments:
        if not one.is_state and holds_parameters(one, rules):
            one.make_state()
    shardings = iter(Layouts(arguments).under(rules))
    for one in arguments:
        one.leaves = [abstract(leaf, next(shardings)) for leaf in one.leaves]


def same_trees(result: Any, arguments: Sequence[Argument]) -> dict[int, int]:
    """Finds the trees of the arguments in a result, from the outside in.

    Args:
        result: a tree of shapes.
        arguments: the arguments.

    Returns:
        Position of a leaf of the result → that over the leaves of all arguments.
    """
    known = [(one.treedef, one.leaves) for one in arguments]
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
