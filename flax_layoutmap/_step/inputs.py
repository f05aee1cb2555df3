"""Place the inputs of a jitted function as the rules require.

State must have the sharding of its rules, or is an error; host data is split over the
batch axes. Equal placements get one spelling, so that they share a compiled program.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from flax_layoutmap._core.errors import (
    LayoutError,
    StructureError,
    bullet_list,
    warn,
)
from flax_layoutmap._core.fetch import normal_sharding, own_sharding
from flax_layoutmap._core.jax_internals import memory_of
from flax_layoutmap._core.layout import own_memory_kind
from flax_layoutmap._core.mesh import DeviceMesh, same_grid
from flax_layoutmap._place.batch import clash_of_rows, has_rows, rows_sharding
from flax_layoutmap._place.place import put
from flax_layoutmap._resolve.lay import fits
from flax_layoutmap._rules.records import closest_rule, show_shape, show_spec
from flax_layoutmap._rules.rules import Remark, RuleSet, announce
from flax_layoutmap._step.arguments import (
    NUMBERS,
    Argument,
    Call,
    first_four,
    is_on_mesh,
    named_objects,
    shape_key,
    slots_of,
    take_apart,
)
from flax_layoutmap._step.program import Program, are_apart
from flax_layoutmap._step.refusals import check_apart
from flax_layoutmap._step.trace import Job
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.paths import Roots

# Flax's names of the matrices of layers, which no batch has.
_OF_LAYERS = ("kernel", "embedding")

# Places the leaves of an argument that is data.
Placer = Callable[[Argument, RuleSet | None], Sequence[Any]]

# ----------------------------------------------------------------------- a call


def bind(
    job: Job,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rules: RuleSet | None,
    place: Placer | None = None,
) -> Call:
    """Take the arguments of a call apart; data is placed by `place`, or `place_data`.

    Raises:
        LayoutError: an argument is no tree of arrays, or data does not fit the mesh.
    """
    slots = slots_of(job.signature.bind(*args, **kwargs))
    static = {slot: value for slot, value in slots if slot.is_among(job.static)}
    arguments: list[Argument] = []
    for slot, value in slots:
        if slot in static:
            continue
        given, donated = job.in_sharding(slot) is not None, slot.is_among(job.donated)
        argument = take_apart(
            slot, value, is_state=donated, is_donated=donated, is_given=given
        )
        if not argument.is_state and rules and holds_parameters(argument, rules):
            argument = argument.as_state()
        elif not argument.is_state and not given:
            leaves = (place or place_data)(argument, rules)
            argument = dataclasses.replace(argument, leaves=leaves)
        arguments.append(argument)
    parts = [part for argument in arguments for part in argument.parts]
    if len(set(map(id, parts))) < len(parts):
        check_apart(named_objects(arguments))
    leaves = [leaf for argument in arguments for leaf in argument.leaves]
    return Call(args, kwargs, rules, slots, static, arguments, leaves)


# ------------------------------------------------------------- state, or data


def holds_parameters(argument: Argument, rules: RuleSet) -> bool:
    """Whether an argument is a container with a leaf that a rule shards.

    Rules that replicate are ignored; otherwise a catch-all rule would turn every batch
    into state.
    """
    return _searched(argument, rules)[0]


def _searched(argument: Argument, rules: RuleSet) -> tuple[bool, dict[str, str]]:
    """Whether a rule shards a leaf; and what looks like parameters that none names."""
    if not argument.is_container:
        return False, {}
    return _search(argument.name, argument.treedef, shape_key(argument.leaves), rules)


@functools.lru_cache(maxsize=256)
def _search(
    name: str, treedef: Any, shapes: tuple[Any, ...], rules: RuleSet
) -> tuple[bool, dict[str, str]]:
    leaves = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    try:
        flat = flatten(Roots({name: treedef.unflatten(leaves)}))
    except StructureError:
        return False, {}  # without paths no rule can mean it
    pairs = list(zip(map(flat.forms, range(len(leaves))), flat.leaves, strict=True))
    return any(_is_sharded(rules, forms, len(x.shape)) for forms, x in pairs), {
        path: f"{path} {show_shape(leaf.shape)}"
        for path, (forms, leaf) in zip(flat.paths, pairs, strict=True)
        if len(leaf.shape) > 1 and path.split("/")[-1] in _OF_LAYERS
        if not rules.matcher.matching_forms(forms)
    }


def _is_sharded(rules: RuleSet, forms: tuple[str, ...], ndim: int) -> bool:
    layouts = [rules.rules[at].layout for at in rules.matcher.matching_forms(forms)]
    fitting = [layout for layout in layouts if ndim and fits(layout, ndim)]
    if rules.overlap != "error":
        fitting = fitting[-1:] if rules.overlap == "last" else fitting[:1]
    return any(not layout.is_replicated for layout in fitting)


def warn_of_parameters(call: Call) -> None:
    """Warn where data looks like parameters that no rule names, as after a renaming.

    Raises:
        ResolveError: the rule set is strict.
    """
    rules = call.rules
    if rules is None or all(rule.layout.is_replicated for rule in rules.rules):
        return
    for argument in call.arguments:
        if argument.is_state or argument.is_given:
            continue
        _, missed = _searched(argument, rules)
        if not missed:
            continue
        near, rule = closest_rule(next(iter(missed)), rules.rules) or (0, None)
        hint = f"; the closest is rule {near} {rule.pattern!r}" if rule else ""
        text = (
            f"no rule matches {first_four(list(missed.values()))} in the argument "
            f"{argument.name!r}{hint}; as no rule shards anything in it, it is taken "
            "for data, and what is on no mesh is split over the batch axes "
            f"{rules.batch}"
        )
        announce(rules, [Remark(text, "taken for data", frozenset(missed))])


# ------------------------------------------------------------------------ data


def place_data(argument: Argument, rules: RuleSet | None) -> list[Any]:
    """The leaves of data: host arrays are split, those on the mesh keep their layout.

    Raises:
        LayoutError: an array does not divide, or is on other devices.
    """
    if rules is None or rules.mesh is None:
        return list(map(_respelled, argument.leaves))
    placed: list[Any] = []
    problems: list[str] = []
    for at, leaf in enumerate(argument.leaves):
        if _is_committed(leaf):
            where = _on_mesh(leaf.sharding, rules.mesh, leaf.ndim)
            if where is None:
                where = leaf.sharding
                problems.append(f"{argument.label(at)} is {show_sharding(where)}")
            leaf = put(leaf, where) if isinstance(where, NamedSharding) else leaf
        elif not isinstance(leaf, Tracer | NUMBERS) and (
            not isinstance(leaf, jax.ShapeDtypeStruct) or leaf.sharding is None
        ):
            leaf = split_leaf(argument, at, leaf, rules)
        placed.append(leaf)
    if problems:
        raise LayoutError(
            f"{len(problems)} arrays are not on the mesh of the rules, {rules.mesh}:\n"
            f"{bullet_list(problems)}\nplace them with flm.distribute_tensor, or pass "
            "them as NumPy arrays, which are split over the batch axes"
        )
    return placed


def split_leaf(argument: Argument, at: int, leaf: Any, rules: RuleSet) -> Any:
    """Split a host array over the batch axes; scalars and PRNG keys are replicated.

    Also old-style keys, a plain array of two or four uint32 (`jax.random.PRNGKey`). A
    `jax.ShapeDtypeStruct` gets the sharding.
    """
    is_old_key = leaf.dtype == np.uint32 and leaf.shape in ((2,), (4,))
    rows = has_rows(leaf) and not is_old_key
    if rows and (clash := clash_of_rows(leaf.shape[0], rules)):
        raise LayoutError(
            f"the batch does not divide over the batch axes {rules.batch}:\n"
            f"  - {argument.label(at)}: {clash}\n"
            "pad it, batch, mask = flm.pad_batch(batch, layout_map), drop the rest, or "
            "place it yourself with flm.distribute_tensor"
        )
    sharding = rows_sharding(rules.batch if rows else (), rules.mesh)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    return put(leaf, sharding)


def _on_mesh(sharding: Sharding, mesh: DeviceMesh, ndim: int) -> Sharding | None:
    """The same placement in normal form; None if it is on other devices."""
    if isinstance(sharding, NamedSharding):
        normal = normal_sharding(sharding)
        if sharding.mesh == mesh.jax_mesh:
            return normal
        grid = DeviceMesh(sharding.mesh)
        if list(grid.devices.flat) != list(mesh.devices.flat):
            return None
        own = mesh.jax_mesh if same_grid(grid, mesh) else sharding.mesh
        return NamedSharding(own, normal.spec, memory_kind=sharding.memory_kind)  # type: ignore[arg-type]
    if sharding.device_set != set(mesh.devices.flat):
        return None
    replicated = NamedSharding(mesh.jax_mesh, PartitionSpec())  # type: ignore[arg-type]
    return replicated if sharding.is_equivalent_to(replicated, ndim) else sharding


def _respelled(leaf: Any) -> Any:
    normal = None if isinstance(leaf, Tracer) else own_sharding(leaf)
    return leaf if normal is None else put(leaf, normal)


def warn_of_whole_batches(call: Call, name: str) -> bool:
    """Warn if host data is used with a mesh and without rules; say whether it did."""
    meshes = [sharding.mesh for sharding in map(own_sharding, call.leaves) if sharding]
    mesh = next((mesh for mesh in meshes if mesh.size > 1), None)
    whole = [
        argument.label(at)
        for argument in call.arguments
        for at, leaf in enumerate(argument.leaves)
        if not argument.is_state and np.ndim(leaf) and not is_on_mesh(leaf)
        if not isinstance(leaf, Tracer | jax.ShapeDtypeStruct)
    ]
    if mesh is None or not whole:
        return False
    warn(
        f"{name} has no rules, so host arrays are replicated, not split, on the mesh "
        f"{DeviceMesh(mesh)}: {first_four(whole)}; "
        "give it the rules, @flm.jit(layout_map=layout_map), or place it yourself, "
        "batch = flm.distribute_batch(batch, layout_map)"
    )
    return True


# ------------------------------------------------------------------ every input


def fit(program: Program, call: Call) -> list[Any]:
    """The leaves of all arguments, in exactly the shardings of a program.

    Uncommitted arrays are placed, and equal placements get one spelling, as `jax.jit`
    would do in every call. A donated leaf shares no memory with another one.

    Raises:
        LayoutError: arrays are deleted, abstract, committed somewhere else, or donated
            and used twice.
    """
    if are_deleted(call.leaves):  # given to a program, some backends end the process
        named = {argument.name: argument.value for argument in call.arguments}
        raise LayoutError(
            f"{first_four(deleted_paths(named))}: deleted, as an earlier call donated "
            "them; go on with what that call returned, or do not donate them"
        )
    leaves = list(call.leaves)
    misplaced: list[int] = []
    for at, (leaf, sharding) in enumerate(zip(leaves, program.wanted, strict=True)):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            argument, number = call.owner(at)
            raise LayoutError(
                f"{argument.label(number)} is abstract: a call needs arrays; make the "
                "model with flm.create(make, layout_map), or use .lower or .eval_shape"
            )
        if sharding is None or getattr(leaf, "sharding", None) == sharding:
            continue
        if _is_elsewhere(leaf, sharding):
            misplaced.append(at)
        elif not isinstance(leaf, Tracer | NUMBERS):
            leaves[at] = put(leaf, sharding)
    if misplaced:
        raise _misplaced(program, call, misplaced)
    if program.donated:
        _check_not_donated_twice(call, leaves, program.donated)
        if not are_apart([call.leaves[at] for at in program.state]):
            _copy_shared_memory(leaves, program)
    return leaves


def is_for(program: Program, call: Call) -> bool:
    """Whether a program with the key of a call is for it.

    State that no rule names has to be where the program expects it.
    """
    leaves = call.leaves
    return not any(_is_elsewhere(leaves[at], program.wanted[at]) for at in program.free)


def _is_elsewhere(leaf: Any, sharding: Any) -> bool:
    if not _is_committed(leaf):
        return False
    return not leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def _is_committed(leaf: Any) -> bool:
    """Whether a leaf is an array that was put on its devices."""
    return _is_array(leaf) and leaf.committed


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)


def _misplaced(program: Program, call: Call, numbers: Sequence[int]) -> LayoutError:
    problems: list[str] = []
    hints: dict[str, None] = {}
    for number in numbers:
        argument, at = call.owner(number)
        wanted, leaf = program.wanted[number], call.leaves[number]
        problems.append(
            f"{argument.label(at)}: wanted {show_sharding(wanted)}, it is "
            f"{show_sharding(leaf.sharding)}"
        )
        hints[_hint(call, argument, at)] = None
    return LayoutError(
        f"{len(problems)} arrays are not where this jit wants them:\n"
        f"{bullet_list(problems)}\n{'; '.join(hints)}"
    )


def are_deleted(leaves: Sequence[Any]) -> bool:
    """Whether one of these is a deleted array."""
    try:
        # The method of the type is much faster than an attribute of each array.
        return any(map(type(leaves[0]).is_deleted, leaves))
    except (AttributeError, IndexError, TypeError):  # none, or other things too
        return any(x.is_deleted() for x in leaves if _is_array(x))


def _check_not_donated_twice(
    call: Call, leaves: Sequence[Any], donated: Sequence[int]
) -> None:
    """Raise LayoutError where one array is donated and used elsewhere too.

    JAX fails on that only while running, and may hang.
    """
    count = collections.Counter(id(x) for x in leaves if isinstance(x, jax.Array))
    twice = [id(leaves[at]) for at in donated if count[id(leaves[at])] > 1]
    if twice:
        same = (at for at, x in enumerate(leaves) if id(x) == twice[0])
        owners = list(map(call.owner, same))
        paths = [argument.path(at) for argument, at in owners[:4]]
        raise LayoutError(
            f"{' and '.join(paths)} are one array, which is donated: it cannot be "
            "used twice; copy it first, jax.numpy.copy(x), or do not donate it"
        )


def _copy_shared_memory(leaves: list[Any], program: Program) -> None:
    """Copy donated arrays that share their memory with other arguments.

    As two arrays do that were put on a mesh from one. Donating them ends the process
    (jax 0.10.2), or hangs (jax 0.12.0).
    """
    parts = list(map(_buffers_of, leaves))
    count = collections.Counter(itertools.chain.from_iterable(parts))
    for at in program.donated:
        if any(count[part] > 1 for part in parts[at]):
            leaves[at] = put(jax.numpy.copy(leaves[at]), leaves[at].sharding)


def _buffers_of(leaf: Any) -> set[Any]:
    """The memory of an array in this process, to compare; empty if unknown."""
    if not _is_array(leaf) or not leaf.size:
        return set()
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    count = len(leaf.sharding.addressable_devices)
    parts = [leaf.addressable_data(at) for at in range(count)]
    return set(map(memory_of, parts)) - {None} or {id(leaf)}


def deleted_paths(arguments: Mapping[str, Any]) -> list[str]:
    """Paths of the arrays that are deleted, in arguments by name."""
    flat = flatten(Roots(arguments))
    pairs = zip(flat.full_paths(), flat.leaves, strict=True)
    return [path for path, leaf in pairs if are_deleted([leaf])]


def _hint(call: Call, argument: Argument, at: int) -> str:
    """The fix for a leaf that is placed elsewhere."""
    name, rules = argument.name, call.rules
    if argument.flat.section(at).role == "optimizer":
        # The state of an optimizer alone does not say which parameters it follows.
        return (
            "make the optimizer with flm.create_optimizer(model, tx, layout_map), or "
            "place the tree that holds both, "
            f"layout_map.place({{'model': model, {name!r}: {name}}})"
        )
    whole, *within = argument.flat.forms(at)
    if rules is not None and within:
        ask = rules.matcher.matching_forms
        if ask((whole, *within)) != ask(within):
            return (
                f"these rules match paths that start with {name!r}, so create and "
                "place the model under that name: "
                f"layout_map.place({{{name!r}: {name}}})"
            )
    is_ruled = rules is None or rules.matcher.matching_forms(argument.flat.forms(at))
    if not is_ruled and not argument.leaves[at].sharding.is_fully_replicated:
        return (
            f"no rule matches them in the argument {name!r}: if rules name what they "
            f"were made in, such as 'policy', pass {{'policy': {name}}}, or rename the "
            f"argument; if not, move them first, layout_map.place({name})"
        )
    return (
        "move them first, layout_map.place(model), or make the model with "
        "flm.create(make, layout_map)"
    )


def show_sharding(sharding: Any) -> str:
    """A sharding in a few words, for messages."""
    if isinstance(sharding, NamedSharding):
        kind = own_memory_kind(sharding)
        spec = show_spec(sharding.spec) + (f" {kind}" if kind else "")
        return f"{spec} on mesh {DeviceMesh(sharding.mesh)}"
    devices = getattr(sharding, "device_set", ())
    if len(devices) == 1:
        return f"on the single device {next(iter(devices))}"
    return str(sharding)
