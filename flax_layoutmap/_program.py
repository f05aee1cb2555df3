"""One structure of arguments, traced once and compiled: what `jit` keeps.

The user's function becomes a function on leaves. State has the layouts of the rules on
both sides; what the function changed in NNX objects comes out beside its results.
"""

import contextlib
import dataclasses
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.core import Tracer, eval_jaxpr
from jax.extend.core import ClosedJaxpr
from jax.sharding import AxisType, NamedSharding

from flax_layoutmap._arguments import (
    Argument,
    Slot,
    call_with,
    leaves_after,
    results_of,
    shape_key,
    strong,
)
from flax_layoutmap._errors import warn
from flax_layoutmap._inputs import broadcast, own_sharding
from flax_layoutmap._paths import Roots, is_optax_state, is_train_state
from flax_layoutmap._resolution import Resolution
from flax_layoutmap._resolve import resolve
from flax_layoutmap._rules import RuleSet
from flax_layoutmap._scope import using_rules

# Of one leaf of the result: whether it is state, and its sharding.
_Pin = tuple[bool, Any]

# Stands for such a sharding until the rules were asked.
_BY_RULE = object()

# The root of the result in messages; no argument can have this name.
_RESULT = "the result"


# JAX settings that change what a trace gives.
_settings = operator.attrgetter(
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


def surroundings() -> tuple[Any, ...]:
    """What a trace depends on besides the arguments: mesh in context, settings."""
    return jax.sharding.get_abstract_mesh(), _settings(jax.config)


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """What to compile, whatever the arguments.

    Attributes:
        fun: the user's function.
        signature: its signature.
        in_shardings: argument name → prefix tree of layouts, over the rules.
        out_shardings: prefix tree of layouts for the result, or None.
    """

    fun: Callable[..., Any]
    signature: inspect.Signature
    in_shardings: Mapping[str, Any]
    out_shardings: Any

    @property
    def name(self) -> str:
        """The function's name, for messages and programs."""
        return getattr(self.fun, "__name__", "a_function")

    def in_sharding(self, slot: Slot) -> Any:
        """What `in_shardings` says of an argument; None where it says nothing."""
        by_parameter = self.in_shardings.get(slot.parameter)
        return self.in_shardings.get(slot.name, by_parameter)


@dataclasses.dataclass(slots=True)
class Program:
    """What one structure of arguments compiled to. Holds no array of the caller.

    Attributes:
        jitted: what `inputs` gives → what the function changed in NNX objects, and the
            result as last entry.
        wanted: one sharding (or None: as it is) per leaf of all arguments.
        donated: positions, over all leaves, of those in NNX objects whose buffers are
            given away.
        kept: positions of the others in NNX objects.
        given: the pure trees that are donated.
        rest: the other pure trees.
        changed: positions of what the function changed in NNX objects.
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
    given: tuple["Tree", ...]
    rest: tuple["Tree", ...]
    changed: tuple[int, ...]
    out_tree: Any
    out_shapes: list[Any]
    cacheable: bool
    fingerprints: Mapping[str, str]
    agreed: bool = False

    def inputs(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The leaves of all arguments as `jitted` takes them."""
        return _inputs(self.donated, self.kept, self.given, self.rest, leaves)

    @property
    def gives_away(self) -> list[int]:
        """Positions of all leaves that are donated."""
        trees = [at for tree in self.given for at in tree.positions]
        return [*self.donated, *trees]


@dataclasses.dataclass(frozen=True, slots=True)
class Tree:
    """A pure tree among the arguments.

    Attributes:
        slot: where it stands.
        treedef: its structure.
        start: position of its first leaf, over all leaves.
    """

    slot: Slot
    treedef: Any
    start: int

    @property
    def positions(self) -> range:
        """Positions of its leaves."""
        return range(self.start, self.start + self.treedef.num_leaves)


class OtherArgumentsError(Exception):
    """A program is not that of its arguments: they, or what is around, have changed."""


def _inputs(
    donated: Sequence[int],
    kept: Sequence[int],
    given: Sequence[Tree],
    rest: Sequence[Tree],
    leaves: Sequence[Any],
) -> tuple[Any, ...]:
    def trees(some: Sequence[Tree]) -> tuple[Any, ...]:
        return tuple(
            jax.tree.unflatten(tree.treedef, [leaves[at] for at in tree.positions])
            for tree in some
        )

    return (
        [leaves[at] for at in donated],
        [leaves[at] for at in kept],
        trees(given),
        trees(rest),
    )


def make_program(
    job: Job,
    slots: Sequence[tuple[Slot, Any]],
    static: Mapping[Slot, Any],
    arguments: Sequence[Argument],
    rules: RuleSet | None,
) -> Program:
    """Decides the layouts, traces the function, and makes the program of it.

    Args:
        job: what to compile.
        slots: all arguments in the order of the signature.
        static: those that are constants.
        arguments: the others, taken apart.
        rules: the rule set, or None.

    Raises:
        LayoutError: rules, options or the function do not fit the arguments.
    """
    wanted, asked, resolution = _wanted(job, arguments, rules)
    leaves = [leaf for argument in arguments for leaf in argument.leaves]
    avals = [
        leaf if sharding is None else abstract(leaf, sharding)
        for leaf, sharding in zip(leaves, wanted, strict=True)
    ]
    order = [slot for slot, _ in slots]
    seen: dict[str, Any] = {}

    def flat(leaves: list[Any]) -> Any:
        return _on_leaves(job, order, static, arguments, leaves, seen)

    with using_rules(rules), mesh_context(rules, leaves):
        closed, shapes = jax.make_jaxpr(flat, return_shape=True)(avals)
    changed: tuple[int, ...] = seen["changed"]
    # The types know about Explicit axes in every version of JAX; the shapes do not.
    out_types = (seen["out_tree"], closed.out_avals[len(changed) :])
    pinned, made = _pin(job, arguments, wanted, out_types, rules)
    if made and rules is not None:
        # With the arguments: optimizer state follows parameters among them.
        resolution = resolve(Roots({**made, **asked}), rules)
        every = iter(resolution.sharding_list())
        pinned = [(s, next(every) if at is _BY_RULE else at) for s, at in pinned]
    fingerprints: Mapping[str, str] = {}
    if resolution is not None:
        resolution.announce()
        _announce_activations(resolution.rules)
        if jax.process_count() > 1:
            fingerprints = resolution.fingerprints()
    places = _places(arguments, set(changed))
    program = _from_jaxpr(closed, len(changed), seen["out_tree"], pinned, places)
    program.__name__ = job.name
    out = jax.tree.unflatten(seen["out_tree"], [sharding for _, sharding in pinned])
    donated, kept, given, rest = places
    return Program(
        jitted=jax.jit(
            program,
            in_shardings=_inputs(*places, wanted),
            out_shardings=[*(wanted[at] for at in changed), out],
            donate_argnums=(0, 2),
        ),
        wanted=wanted,
        donated=donated,
        kept=kept,
        given=given,
        rest=rest,
        changed=changed,
        out_tree=seen["out_tree"],
        out_shapes=list(shapes[1]),
        cacheable=not any(isinstance(const, Tracer) for const in closed.consts),
        fingerprints=fingerprints,
    )


def abstract(leaf: Any, sharding: Any) -> Any:
    """An argument's leaf without its values; numbers and tracers stay."""
    if isinstance(leaf, Tracer | bool | int | float | complex):
        return leaf
    weak = bool(getattr(leaf, "weak_type", False))
    return jax.ShapeDtypeStruct(
        leaf.shape,
        jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True),
        sharding=sharding,
        weak_type=weak,
    )


def mesh_needed(rules: RuleSet | None) -> Any:
    """The abstract mesh that tracing and running need as context; None if none.

    Explicit axes need their mesh in context; and with rules on one mesh, another one
    that happens to be in context must not count.
    """
    mesh = None if rules is None else rules.mesh
    if mesh is None:
        return None
    context: Any = jax.sharding.get_abstract_mesh()
    own: Any = mesh.jax_mesh.abstract_mesh
    needed = bool(context.axis_names) or AxisType.Explicit in mesh.axis_types
    return None if not needed or context == own else own


def mesh_context(rules: RuleSet | None, leaves: Sequence[Any]) -> Any:
    """That mesh as context; inside of an outer trace, that of its tracers."""
    mesh = mesh_needed(rules)
    if mesh is None or any(isinstance(x, Tracer) for x in leaves):
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)


def write_back(arguments: Sequence[Argument], new: Mapping[int, Any]) -> None:
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


# ------------------------------------------------------------------------ tracing


def _on_leaves(
    job: Job,
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
    result = call_with(job.fun, job.signature, [(slot, values[slot]) for slot in order])
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


_Places = tuple[tuple[int, ...], tuple[int, ...], tuple[Tree, ...], tuple[Tree, ...]]


def _from_jaxpr(
    closed: ClosedJaxpr,
    count: int,
    out_tree: Any,
    pinned: Sequence[_Pin],
    places: _Places,
) -> Callable[..., Any]:
    """The traced function on the inputs of a program; not traced a second time.

    Args:
        closed: the trace of the function on all leaves in order.
        count: how many of its results are changed state.
        out_tree: structure of the function's own result.
        pinned: of each of its leaves, whether it is state.
        places: where the leaves are among the inputs.
    """
    donated, kept, given, rest = places
    traced: list[bool] = []

    def program(*inputs: Any) -> Any:
        # Where JAX traces again, the user's function must be: something around it that
        # JAX knows of is another one, such as the size of a mapped axis.
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(inputs)):
            if traced:
                raise OtherArgumentsError
            traced.append(True)
        values: list[Any] = [None] * len(closed.in_avals)
        for at, leaf in zip((*donated, *kept), (*inputs[0], *inputs[1]), strict=True):
            values[at] = leaf
        for tree, own in zip((*given, *rest), (*inputs[2], *inputs[3]), strict=True):
            leaves, treedef = jax.tree.flatten(own)
            if treedef != tree.treedef:
                raise OtherArgumentsError
            for at, leaf in zip(tree.positions, leaves, strict=True):
                values[at] = leaf
        if any(map(_differ, values, closed.in_avals)):
            raise OtherArgumentsError
        # Not jaxpr_as_fun, after which debug_nans checks nothing any more (jax 0.10.2).
        after = eval_jaxpr(closed.jaxpr, closed.consts, *values)
        results = [
            strong(value) if is_state else value
            for value, (is_state, _) in zip(after[count:], pinned, strict=True)
        ]
        return [*after[:count], jax.tree.unflatten(out_tree, results)]

    return program


def _differ(value: Any, aval: Any) -> bool:
    """Whether a value is of another type than the one that was traced."""
    own: Any = jax.typeof(value)
    return (
        own.shape != aval.shape
        or own.dtype != aval.dtype
        or own.weak_type != aval.weak_type
    )


def _places(arguments: Sequence[Argument], changed: set[int]) -> _Places:
    """Where the leaves are: in lists, those of NNX objects; in trees, the others.

    What a function leaves unchanged in an NNX object stays in use, so its buffer must
    not be taken for a result that happens to have the same shape: it is not donated.
    """
    donated: list[int] = []
    kept: list[int] = []
    given: list[Tree] = []
    rest: list[Tree] = []
    start = 0
    for argument in arguments:
        span = range(start, start + len(argument.leaves))
        start = span.stop
        if argument.has_objects:
            pure = argument.pure_leaves()
            for at in span:
                gone = argument.is_donated and (at in changed or pure[at - span.start])
                (donated if gone else kept).append(at)
        else:
            tree = Tree(argument.slot, argument.treedef, span.start)
            (given if argument.is_donated else rest).append(tree)
    return tuple(donated), tuple(kept), tuple(given), tuple(rest)


# ------------------------------------------------------------------------ layouts


def _wanted(
    job: Job, arguments: Sequence[Argument], rules: RuleSet | None
) -> tuple[list[Any], dict[str, Any], Resolution | None]:
    """One sharding per leaf of all arguments; None leaves it to JAX.

    And the trees that the rules were asked about, with their Resolution.
    """
    found: dict[str, list[Any]] = {}
    by_rule: list[Argument] = []
    mesh = None if rules is None else rules.mesh
    for argument in arguments:
        prefix = job.in_sharding(argument.slot)
        if prefix is not None:
            what = f"in_shardings[{argument.name!r}]"
            found[argument.name] = broadcast(prefix, argument.plain(), mesh, what)
        elif not argument.is_state:
            found[argument.name] = [None] * len(argument.leaves)
        elif rules is None:
            found[argument.name] = [own_sharding(leaf) for leaf in argument.leaves]
        else:
            by_rule.append(argument)
    resolution: Resolution | None = None
    trees = {argument.name: _without_arrays(argument) for argument in by_rule}
    if trees and rules is not None:
        resolution = resolve(Roots(trees), rules)
        every = iter(resolution.sharding_list())
        for argument in by_rule:
            found[argument.name] = [next(every) for _ in argument.leaves]
    return [s for a in arguments for s in found[a.name]], trees, resolution


def _without_arrays(argument: Argument) -> Any:
    """What the rules are asked about; a Resolution may be kept, arrays must not."""
    if argument.has_objects:
        return argument.value
    return argument.plain([abstract(leaf, None) for leaf in argument.leaves])


def _announce_activations(rules: RuleSet) -> None:
    if rules.activations and "activations" not in rules._warned:
        rules._warned.add("activations")
        warn(
            "layout_map.activations has rules, which this version stores but does not "
            "apply; use flm.distribute_tensor in the model"
        )


def _pin(
    job: Job,
    arguments: Sequence[Argument],
    wanted: Sequence[Any],
    out: tuple[Any, Sequence[Any]],
    rules: RuleSet | None,
) -> tuple[list[_Pin], dict[str, Any]]:
    """Per result: whether it is state, and its sharding (None: the compiler's).

    A part of the result with the structure of an argument keeps its layouts. What else
    the rules are to be asked about comes as trees by path, and has `_BY_RULE` here.
    """
    known: dict[Any, list[list[_Pin]]] = {}
    data: dict[Any, list[list[_Pin]]] = {}
    start = 0
    for argument in arguments:
        own = list(wanted[start : start + len(argument.leaves)])
        start += len(own)
        key = (argument.treedef, shape_key(argument.leaves))
        if argument.is_state and own:
            known.setdefault(key, []).append([(True, sharding) for sharding in own])
        elif argument.pins:
            data.setdefault(key, []).append([(False, at) for at in argument.pins])
    mesh = None if rules is None else rules.mesh
    # Without the types of Explicit axes, which are not what the rules say.
    plain = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in out[1]]
    result = jax.tree.unflatten(out[0], plain)
    said: list[Any] = [None] * len(plain)
    if job.out_shardings is not None:
        said = broadcast(job.out_shardings, result, mesh, "out_shardings")
    asks = rules is not None and any(given is None for given in said)
    made: dict[str, Any] = {}
    pinned = _pin_tree(result, {**data, **known}, made if asks else None, _RESULT)
    typed = [_typed(aval, rules) for aval in out[1]]
    return [
        (state, given or sharding or own)
        for (state, sharding), given, own in zip(pinned, said, typed, strict=True)
    ], made


def _typed(aval: Any, rules: RuleSet | None) -> NamedSharding | None:
    """On Explicit axes the type of a result says where it lies.

    Without this, a program of no arguments would not know its devices.
    """
    mesh = None if rules is None else rules.mesh
    own = getattr(aval, "sharding", None)
    if mesh is None or not isinstance(own, NamedSharding):
        return None
    if any(kind is not AxisType.Explicit for kind in mesh.axis_types):
        return None
    jax_mesh: Any = mesh.jax_mesh
    return (
        NamedSharding(jax_mesh, own.spec)
        if own.mesh == jax_mesh.abstract_mesh
        else None
    )


def _pin_tree(
    tree: Any,
    known: Mapping[Any, list[list[_Pin]]],
    made: dict[str, Any] | None,
    path: str,
) -> list[_Pin]:
    """Looks for the structures of arguments in a result, from the outside in.

    Where several arguments have one structure, they are taken in turn. States of
    another structure are added to `made`, unless that is None.
    """
    leaves, treedef = jax.tree.flatten(tree)
    found = known.get((treedef, shape_key(leaves)))
    if found is not None:
        return found.pop(0) if len(found) > 1 else found[0]
    if not leaves or jax.tree_util.treedef_is_leaf(treedef):
        return [(False, None)] * len(leaves)
    if made is not None and _is_made_state(tree):
        made[path] = tree
        return [(True, _BY_RULE)] * len(leaves)
    parts, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: node is not tree
    )
    return [
        entry
        for keys, part in parts
        for entry in _pin_tree(part, known, made, path + jax.tree_util.keystr(keys))
    ]


def _is_made_state(tree: Any) -> bool:
    """Whether a result is a state by its kind: new, or of another structure."""
    return (
        is_train_state(tree)
        or is_optax_state(tree)
        or isinstance(tree, nnx.State)
        or (isinstance(tree, Mapping) and "params" in tree)
    )
