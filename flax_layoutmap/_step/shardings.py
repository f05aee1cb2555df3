"""The in and out shardings of a program, chosen before it is compiled.

State has the layouts of the rules on both sides. A result like an argument has its
sharding; other state is laid out by the rules.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding
from jax.tree_util import DictKey, GetAttrKey

from flax_layoutmap._core.errors import LayoutError, MeshError, RuleError
from flax_layoutmap._core.fetch import own_sharding
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.resolve import resolve
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._step.arguments import Argument, Call, shape_key, spans
from flax_layoutmap._step.trace import Job, Traced
from flax_layoutmap._tree.flatten import plain_tree
from flax_layoutmap._tree.graph import Change
from flax_layoutmap._tree.paths import Roots, is_optax_state, is_train_state, join_keys

# Of one leaf of the result: whether it is state, and its sharding.
Pin = tuple[bool, Any]

# A placeholder for such a sharding until the rules are resolved.
_BY_RULE = object()

# The root of the result in messages; no argument can have this name.
RESULT = "the result"


@dataclasses.dataclass(frozen=True, slots=True)
class Resolved:
    """Trees by name, and their Resolution; None if there are no trees."""

    trees: dict[str, Any]
    resolution: Resolution | None

    @property
    def shardings(self) -> Sequence[NamedSharding]:
        """One sharding per leaf of all trees."""
        return [] if self.resolution is None else self.resolution.sharding_list()


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


def wanted_before(job: Job, call: Call) -> tuple[list[Any], Resolved]:
    """One sharding per leaf of all arguments; None leaves it to JAX."""
    trees: dict[str, Any] = {}
    if call.rules is not None:
        trees = {
            argument.name: _without_arrays(argument)
            for argument in call.arguments
            if argument.is_state and job.in_sharding(argument.slot) is None
        }
    resolved = _resolved(trees, call.rules)
    by_rule = iter(resolved.shardings)
    found: list[Any] = []
    for argument in call.arguments:
        prefix, leaves = job.in_sharding(argument.slot), argument.leaves
        if prefix is not None:
            what = f"in_shardings[{argument.name!r}]"
            found += broadcast(prefix, argument.plain(), call.mesh, what)
        elif argument.name in trees:
            found += [next(by_rule) for _ in leaves]
        else:
            found += [own_sharding(x) if argument.is_state else None for x in leaves]
    return found, resolved


def _resolved(trees: dict[str, Any], rules: RuleSet | None) -> Resolved:
    """Resolve the rules for trees, if there are any."""
    if rules is None or not trees:
        return Resolved(trees, None)
    return Resolved(trees, resolve(Roots(trees), rules))


def _without_arrays(argument: Argument) -> Any:
    """The tree to resolve the rules for, without arrays, as a Resolution is cached."""
    if argument.has_objects:
        return argument.value
    return argument.plain([abstract(leaf, None) for leaf in argument.leaves])


def wanted_after(
    job: Job, call: Call, wanted: Sequence[Any], traced: Traced, change: Change
) -> tuple[list[Any], Resolved]:
    """One sharding per leaf of the objects after a change; None leaves it to JAX.

    `wanted` are the shardings of the leaves of all arguments.
    """
    outcome = traced.outcome
    avals = traced.closed.out_avals[: outcome.count]
    every = call.leaves
    given: list[Any] = [None] * len(every)
    for at in change.stays:
        shape, dtype = every[at].shape, every[at].dtype
        given[at] = jax.ShapeDtypeStruct(shape, dtype, sharding=wanted[at])
    new = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    leaves = change.leaves(given, new)
    nodes = iter(change.merged(leaves))
    found: dict[int, Any] = {}  # by the id of an abstract leaf
    trees: dict[str, Any] = {}
    for argument in call.arguments:
        tree, prefix = argument.with_objects(nodes), job.in_sharding(argument.slot)
        if prefix is not None and argument.has_objects:
            plain = plain_tree(tree)
            name = argument.name
            what = f"in_shardings[{name!r}] (after {name} has changed)"
            layouts = broadcast(prefix, plain, call.mesh, what)
            found.update(zip(map(id, jax.tree.leaves(plain)), layouts, strict=True))
        elif prefix is None and argument.is_state:
            whole = argument.has_objects
            trees[argument.name] = tree if whole else _without_arrays(argument)
    names = [f"{RESULT}/{path}".removesuffix("/") for path in outcome.returned]
    trees.update(zip(names, nodes, strict=True))
    if call.rules is None:
        own = [getattr(leaf, "sharding", None) for leaf in leaves]
        return list(map(found.get, map(id, leaves), own)), Resolved({}, None)
    resolved = _resolved(trees, call.rules)
    ids = map(id, jax.tree.leaves(plain_tree(Roots(trees))))
    for key, sharding in zip(ids, resolved.shardings, strict=True):
        found.setdefault(key, sharding)
    return [found[id(leaf)] for leaf in leaves], resolved


def pin_results(
    job: Job, call: Call, wanted: Sequence[Any], traced: Traced, resolved: Resolved
) -> tuple[list[Pin], Resolved]:
    """Per leaf of the result: whether it is state, and its sharding or None.

    None leaves it to the compiler. A part of the result with the structure of an
    argument keeps its layouts. Other state is laid out by the rules. `wanted` are the
    shardings of the leaves of all arguments, `resolved` the trees so far.
    """
    # Types have Explicit axes in every version of JAX; shapes may not.
    types = traced.closed.out_avals[traced.outcome.count :]
    known: dict[Any, list[list[Pin]]] = {}
    data: dict[Any, list[list[Pin]]] = {}
    for argument, span in zip(call.arguments, spans(call.arguments), strict=True):
        key = (argument.treedef, shape_key(argument.leaves))
        if argument.is_state and span:
            known.setdefault(key, []).append([(True, wanted[at]) for at in span])
        elif argument.pins:
            data.setdefault(key, []).append([(False, at) for at in argument.pins])
    # Without the types of Explicit axes, which the rules override.
    plain = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in types]
    result = jax.tree.unflatten(traced.outcome.out_tree, plain)
    chosen: list[Any] = [None] * len(plain)  # by the user
    if job.out_shardings is not None:
        chosen = broadcast(job.out_shardings, result, call.mesh, "out_shardings")
    by_rules = call.rules is not None and None in chosen
    made: dict[str, Any] = {}
    found = _pin_tree(result, {**data, **known}, made if by_rules else None, RESULT)
    if made:
        # With the arguments: optimizer state follows parameters among them.
        resolved = _resolved({**made, **resolved.trees}, call.rules)
        every = iter(resolved.shardings)
        found = [(s, next(every) if at is _BY_RULE else at) for s, at in found]
    typed = [_typed(aval, call.mesh) for aval in types]
    return [
        (state, given or sharding or own)
        for (state, sharding), given, own in zip(found, chosen, typed, strict=True)
    ], resolved


def _typed(aval: Any, mesh: DeviceMesh | None) -> NamedSharding | None:
    """The sharding on Explicit axes from the type of a result.

    Without this, a program of no arguments would not know its devices.
    """
    own = getattr(aval, "sharding", None)
    if mesh is None or not isinstance(own, NamedSharding):
        return None
    jax_mesh: Any = mesh.jax_mesh
    is_explicit = all(kind is AxisType.Explicit for kind in mesh.axis_types)
    same = is_explicit and own.mesh == jax_mesh.abstract_mesh
    if not same:
        return None
    is_on_host = getattr(aval, "memory_space", None) is jax.memory.Space.Host
    kind = "pinned_host" if is_on_host else None
    return NamedSharding(jax_mesh, own.spec, memory_kind=kind)


def _pin_tree(
    tree: Any,
    known: Mapping[Any, list[list[Pin]]],
    made: dict[str, Any] | None,
    path: str,
) -> list[Pin]:
    """Look for the structures of arguments in a result, from the outside in.

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
        for entry in _pin_tree(part, known, made, path + _below(keys))
    ]


def _below(keys: tuple[Any, ...]) -> str:
    """The key of a part of a result: `[1]`, or `/policy`, which rules may name."""
    named = isinstance(keys[0], DictKey | GetAttrKey) if keys else False
    return f"/{join_keys(keys)}" if named else jax.tree_util.keystr(keys)


def _is_made_state(tree: Any) -> bool:
    """Whether a result is a state by its type: a new one, or of another structure."""
    return (
        is_train_state(tree)
        or is_optax_state(tree)
        or isinstance(tree, nnx.State)
        or (isinstance(tree, Mapping) and "params" in tree)
    )


# ------------------------------------------------------- layouts given by hand


class _Filled(list[Any]):
    """The shardings of one part: to JAX a leaf, as trees may hold lists."""


def broadcast(prefix: Any, tree: Any, mesh: DeviceMesh | None, what: str) -> list[Any]:
    """One sharding (or None) per leaf of `tree`, from a prefix tree of layouts.

    Raises:
        LayoutError: `prefix` is no prefix of the tree, or a layout does not fit.
    """

    def fill(layout: Any, part: Any) -> _Filled:
        leaves = jax.tree.leaves(part)
        return _Filled(_sharding_of(layout, leaf, mesh, what) for leaf in leaves)

    try:
        lists = jax.tree.map(fill, prefix, tree, is_leaf=_is_layout)
    except LayoutError:
        raise
    except (ValueError, TypeError, AttributeError) as error:
        raise LayoutError(
            f"{what} must be one sharding, or a tree of them that is a prefix of "
            f"{jax.tree.structure(tree)}: {error}"
        ) from error
    return [entry for part in jax.tree.leaves(lists) for entry in part]


def _is_layout(node: Any) -> bool:
    if node is None or isinstance(node, Sharding | TensorLayout | PartitionSpec):
        return True
    return type(node) is tuple and _names_axes(node)


def _names_axes(entries: tuple[Any, ...]) -> bool:
    """Whether a tuple is the axes of a layout, and not a tree of layouts."""
    axes = [entry for entry in entries if entry is not None and entry is not ...]
    return bool(axes) and all(
        isinstance(entry, str)
        or (type(entry) is tuple and all(isinstance(name, str) for name in entry))
        for entry in axes
    )


def _sharding_of(layout: Any, leaf: Any, mesh: DeviceMesh | None, what: str) -> Any:
    if layout is None or (
        isinstance(layout, Sharding) and not isinstance(layout, NamedSharding)
    ):
        return layout
    try:
        layout = TensorLayout(layout)
        if layout.device_mesh is None and mesh is not None:
            layout = layout.on(mesh)
    except RuleError as error:
        raise RuleError(f"{what}: {error}") from error
    if layout.device_mesh is None:
        raise MeshError(
            f"{what}: no mesh for the layout {layout}; give it one, "
            "flm.TensorLayout(axes, mesh), or give jit a layout_map with one"
        )
    try:
        layout.shard_shape(np.shape(leaf))
        return layout.sharding(np.ndim(leaf))
    except LayoutError as error:
        raise LayoutError(f"{what}: {layout}: {error}") from error
