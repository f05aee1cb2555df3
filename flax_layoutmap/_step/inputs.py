"""Place the inputs of a jitted function as the rules require.

State must have the sharding of its rules, or is an error; host data is split over the
batch axes. Equal placements get one spelling, so that they share a compiled program.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from flax_layoutmap._core.errors import LayoutError, StructureError, bullet_list
from flax_layoutmap._core.fetch import normal_sharding, own_sharding
from flax_layoutmap._core.layout import own_memory_kind
from flax_layoutmap._core.mesh import DeviceMesh, same_grid
from flax_layoutmap._place.batch import clash_of_rows, has_rows, rows_sharding
from flax_layoutmap._place.place import put
from flax_layoutmap._resolve.lay import fits
from flax_layoutmap._rules.records import show_spec
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._step.arguments import (
    NUMBERS,
    Argument,
    Call,
    first_four,
    is_array,
    slots_of,
    take_apart,
)
from flax_layoutmap._step.program import Program
from flax_layoutmap._step.refusals import are_deleted, deleted_paths, separate
from flax_layoutmap._step.trace import Job
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.paths import Roots

# Places the leaves of an argument that is data.
Placer = Callable[[Argument, RuleSet | None], Sequence[Any]]


def bind(
    job: Job,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rules: RuleSet | None,
    place: Placer | None = None,
) -> Call:
    """Take the arguments of a call apart; `place`, or `place_data`, places data."""
    slots = slots_of(job.signature.bind(*args, **kwargs))
    static = {slot: value for slot, value in slots if slot.is_among(job.static)}
    apart, graph = take_apart(
        [pair for pair in slots if pair[0] not in static],
        donated=job.donated,
        in_shardings=job.in_shardings,
    )
    arguments: list[Argument] = []
    for argument in apart:
        if argument.is_state:
            pass
        elif rules and argument.is_container and _is_ruled(*argument.shapes, rules):
            argument = argument.as_state()
        elif argument.given is None:
            leaves = (place or place_data)(argument, rules)
            argument = dataclasses.replace(argument, leaves=leaves)
        arguments.append(argument)
    return Call(args, kwargs, rules, slots, static, arguments, graph)


@functools.lru_cache(maxsize=256)
def _is_ruled(name: str, treedef: Any, shapes: tuple[Any, ...], rules: RuleSet) -> bool:
    """Whether a rule shards a leaf of this container.

    Rules that replicate are ignored; otherwise a catch-all rule would turn every batch
    into state.
    """
    leaves = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    try:
        flat = flatten(Roots({name: treedef.unflatten(leaves)}))
    except StructureError:
        return False  # without paths no rule can mean it
    for at, shape in enumerate(shapes):
        matching = rules.matcher.match(flat.forms(at)).rules
        layouts = [rules.rules[number].layout for number in matching]
        fitting = [x for x in layouts if shape and fits(x, len(shape))]
        if rules.overlap != "error":
            fitting = fitting[-1:] if rules.overlap == "last" else fitting[:1]
        if not all(layout.is_replicated for layout in fitting):
            return True
    return False


# ------------------------------------------------------------------------ data


def place_data(argument: Argument, rules: RuleSet | None) -> list[Any]:
    """The leaves of data: host arrays are split, others keep their layout."""
    mesh: Any = None if rules is None else rules.mesh
    placed: list[Any] = []
    problems: list[str] = []
    for at, leaf in enumerate(argument.leaves):
        sharding: Any = getattr(leaf, "sharding", None)
        if isinstance(leaf, Tracer | NUMBERS):
            pass
        elif mesh is None:
            leaf = leaf if (own := own_sharding(leaf)) is None else put(leaf, own)
        elif is_array(leaf) and leaf.committed:
            where = _on_mesh(leaf, mesh)
            if where is None:
                problems.append(f"{argument.label(at)} is {show_sharding(sharding)}")
            leaf = put(leaf, where or sharding)
        elif sharding is None or is_array(leaf):
            leaf = split_leaf(argument, at, leaf, rules)
        placed.append(leaf)
    if problems:
        raise LayoutError(
            f"{len(problems)} arrays are not on the mesh of the rules, {mesh}:\n"
            f"{bullet_list(problems)}\nplace them with flm.distribute_tensor, or pass "
            "them as NumPy arrays, which are split over the batch axes"
        )
    return placed


def split_leaf(argument: Argument, at: int, leaf: Any, rules: Any) -> Any:
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


def _on_mesh(leaf: Any, mesh: DeviceMesh) -> NamedSharding | None:
    """The placement of an array in normal form; None if it is on other devices."""
    sharding, jax_mesh = leaf.sharding, mesh.jax_mesh
    if not isinstance(sharding, NamedSharding):
        whole = NamedSharding(jax_mesh, PartitionSpec())  # type: ignore[arg-type]
        return whole if sharding.is_equivalent_to(whole, leaf.ndim) else None
    normal = normal_sharding(sharding)
    if sharding.mesh == jax_mesh:
        return normal
    grid = DeviceMesh(sharding.mesh)
    if list(grid.devices.flat) != list(mesh.devices.flat):
        return None
    if not same_grid(grid, mesh):  # the same devices under other names
        return normal
    return NamedSharding(jax_mesh, normal.spec, memory_kind=normal.memory_kind)  # type: ignore[arg-type]


# ------------------------------------------------------------------ every input


def fit(program: Program, call: Call) -> list[Any]:
    """The leaves of all arguments, in exactly the shardings of a program.

    Uncommitted arrays are placed, and equal placements get one spelling, as `jax.jit`
    would do in every call. A donated leaf shares no memory with another one.
    """
    if are_deleted(call.leaves):  # given to a program, some backends end the process
        named = {argument.name: argument.value for argument in call.arguments}
        raise LayoutError(
            f"{first_four(deleted_paths(named))}: deleted, as an earlier call donated "
            "them; go on with what that call returned, or do not donate them"
        )
    leaves = list(call.leaves)
    misplaced: list[str] = []
    for at, (leaf, sharding) in enumerate(zip(leaves, program.wanted, strict=True)):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            argument, number = call.table[at]
            raise LayoutError(
                f"{argument.label(number)} is abstract: a call needs arrays; make the "
                "model with flm.create(make, layout_map), or use .lower or .eval_shape"
            )
        if sharding is None or getattr(leaf, "sharding", None) == sharding:
            continue
        if _is_elsewhere(leaf, sharding):
            argument, number = call.table[at]
            misplaced.append(
                f"{argument.label(number)}: wanted {show_sharding(sharding)}, it is "
                f"{show_sharding(leaf.sharding)}"
            )
        elif not isinstance(leaf, Tracer | NUMBERS):
            leaves[at] = put(leaf, sharding)
    if misplaced:
        names = [a.name for a in call.arguments if a.is_state or a.given is not None]
        tree = ", ".join(f"{name!r}: {name}" for name in names)
        raise LayoutError(
            f"{len(misplaced)} arrays are not where this jit wants them:\n"
            f"{bullet_list(misplaced)}\nmake state with flm.create and "
            "flm.create_optimizer, or place all of it first, under these names: "
            f"layout_map.place({{{tree}}})"
        )
    if program.donated:
        separate(program, call, leaves)
    return leaves


def is_for(program: Program, call: Call) -> bool:
    """Whether a program with the key of a call is for it.

    State that no rule names has to be where the program expects it.
    """
    leaves = call.leaves
    return not any(_is_elsewhere(leaves[at], program.wanted[at]) for at in program.free)


def _is_elsewhere(leaf: Any, sharding: Any) -> bool:
    if not is_array(leaf) or not leaf.committed:
        return False
    return not leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def show_sharding(sharding: Any) -> str:
    if isinstance(sharding, NamedSharding):
        kind = own_memory_kind(sharding)
        spec = show_spec(sharding.spec) + (f" {kind}" if kind else "")
        return f"{spec} on mesh {DeviceMesh(sharding.mesh)}"
    return str(sharding)
