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
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.tree_util import DictKey, GetAttrKey

from flax_layoutmap._core.errors import LayoutError, MeshError, RuleError
from flax_layoutmap._core.fetch import own_sharding
from flax_layoutmap._core.layout import TensorLayout, is_offloaded, own_memory_kind
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.resolve import resolve
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._step.arguments import Argument, Call, shape_key, spans
from flax_layoutmap._step.trace import Job
from flax_layoutmap._tree.flatten import plain_tree
from flax_layoutmap._tree.paths import Roots, is_optax_state, is_train_state, join_keys

# Of one leaf of the result: whether it is state, and its sharding.
Pin = tuple[bool, Any]

# Structures of arguments → what results like them get, for each such argument.
_Known = Mapping[Any, Sequence[Sequence[Pin]]]

# A placeholder for such a sharding until the rules are resolved.
_BY_RULE = object()

# The root of the result in messages; no argument can have this name.
RESULT = "the result"


@dataclasses.dataclass(frozen=True)
class Layouts:
    """The layouts of state, before a function or after it.

    Attributes:
        wanted: one sharding per leaf of all arguments; None leaves it to JAX.
        free: positions of leaves that keep the sharding they have, as no rule decides.
        after: one sharding per leaf of the NNX objects that the function changes, or of
            all after a change of structure; None as above.
        trees: what the rules lay out, by name.
        resolution: its resolution; None if there is nothing to resolve.
        known: structures of the arguments → what results like them get, a list each.
    """

    wanted: Sequence[Any]
    free: Sequence[int]
    after: Sequence[Any]
    trees: Mapping[str, Any]
    resolution: Resolution | None
    known: _Known

    @property
    def parameters(self) -> tuple[str, ...]:
        """The paths of parameters among the arguments, in all their forms."""
        made = self.resolution
        return () if made is None else tuple(made._flat.every_form())

    def avals(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves to trace with."""
        pairs = zip(leaves, self.wanted, strict=True)
        return [x if where is None else abstract(x, where) for x, where in pairs]


def pins_of(result: Any, known: _Known, made: dict[str, Any] | None) -> list[Pin]:
    """Per leaf of a result: whether it is state, and its sharding or None.

    `known` are the `Layouts.known`. States that are like no argument are added to
    `made`, unless that is None.
    """
    turns = {key: [list(pin) for pin in pins] for key, pins in known.items()}
    return _pin_tree(result, turns, made, RESULT)


def is_on_host(x: Any) -> bool:
    """Whether a sharding, or a traced array, is in another memory than the device's."""
    if isinstance(x, Tracer):
        return jax.typeof(x).memory_space is jax.memory.Space.Host
    return x is not None and x is not _BY_RULE and is_offloaded(own_memory_kind(x))


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


def wanted_before(job: Job, call: Call) -> Layouts:
    """The layouts of the arguments."""
    trees: dict[str, Any] = {}
    if call.rules is not None:
        trees = {
            argument.name: _without_arrays(argument)
            for argument in call.arguments
            if argument.is_state and job.in_sharding(argument.slot) is None
        }
    resolution = _resolved(trees, call.rules)
    by_rule = iter(_decisions(resolution))
    wanted: list[Any] = []
    free: list[int] = []
    for argument in call.arguments:
        prefix, leaves = job.in_sharding(argument.slot), argument.leaves
        if prefix is not None:
            what = f"in_shardings[{argument.name!r}]"
            wanted += broadcast(prefix, argument.plain(), call.mesh, what)
        elif argument.name in trees:
            for leaf, owner in zip(leaves, argument.owners(), strict=True):
                sharding, has_rule = next(by_rule)
                if not has_rule and is_free(owner):
                    free.append(len(wanted))
                    sharding = sharding_kept(leaf) or sharding
                wanted.append(sharding)
        else:
            keeps = argument.is_state
            wanted += [own_sharding(x) if keeps else None for x in leaves]
    return Layouts(wanted, free, (), trees, resolution, _known(call, wanted))


def is_free(owner: Any) -> bool:
    """Whether a Variable may lie anywhere if no rule names it."""
    bound = nnx.Param | nnx.OptState
    return isinstance(owner, nnx.Variable) and not isinstance(owner, bound)


def sharding_kept(leaf: Any) -> NamedSharding | None:
    """The sharding of an array that was put on a mesh, and is not replicated."""
    sharding = own_sharding(leaf)
    return None if sharding is None or sharding.is_fully_replicated else sharding


def _resolved(trees: Mapping[str, Any], rules: RuleSet | None) -> Resolution | None:
    """Resolve the rules for trees, if there are any."""
    return None if rules is None or not trees else resolve(Roots(trees), rules)


def _decisions(resolution: Resolution | None) -> list[tuple[NamedSharding, bool]]:
    """Per leaf, its sharding and whether a rule (or metadata) names it."""
    if resolution is None:
        return []
    unmatched = set(resolution.unmatched)
    named = [path not in unmatched for path in resolution.paths]
    return list(zip(resolution.sharding_list(), named, strict=True))


def _without_arrays(argument: Argument) -> Any:
    """The tree to resolve the rules for, without arrays, as a Resolution is cached."""
    if argument.objects:
        return argument.value
    return argument.plain([abstract(leaf, None) for leaf in argument.leaves])


def after_change(
    job: Job, call: Call, before: Layouts, outcome: Any, new: Any
) -> Layouts:
    """The layouts of the NNX objects after a function; `new` are its abstract outputs.

    Values of Variables stay where they are. After a change of structure the rules are
    asked again; new Variables that they do not name are left to XLA.
    """
    structure = outcome.structure
    if structure is None:
        after = [before.wanted[at] for at in outcome.leaves]
        return dataclasses.replace(before, after=after)
    given: list[Any] = [
        jax.ShapeDtypeStruct(np.shape(x), jax.typeof(x).dtype) for x in call.leaves
    ]
    leaves = structure.leaves(given, jax.tree.leaves(new))
    leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    objects = iter(structure.merged(leaves)[0])
    chosen: dict[int, Any] = {}  # by the id of an abstract leaf
    trees: dict[str, Any] = {}
    for argument in call.arguments:
        prefix, name = job.in_sharding(argument.slot), argument.name
        tree = argument.with_objects(objects)
        if prefix is not None and argument.objects:
            plain = plain_tree(tree)
            what = f"in_shardings[{name!r}] (after {name} has changed)"
            layouts = broadcast(prefix, plain, call.mesh, what)
            chosen.update(zip(map(id, jax.tree.leaves(plain)), layouts, strict=True))
        elif prefix is None and argument.is_state:
            trees[name] = tree if argument.objects else _without_arrays(argument)
    names = [f"{RESULT}/{path}".removesuffix("/") for path in outcome.returned]
    trees.update(zip(names, objects, strict=True))
    resolution = _resolved(trees, call.rules)
    ids = map(id, jax.tree.leaves(plain_tree(Roots(trees))))
    if resolution is not None:
        by_rule = dict(zip(ids, _decisions(resolution), strict=True))
    else:
        by_rule = {}
    after = []
    for leaf, is_free, (stays, at) in zip(
        leaves, structure.free, structure.sources, strict=True
    ):
        where, has_rule = by_rule.get(id(leaf), (None, False))
        if id(leaf) in chosen:
            where = chosen[id(leaf)]
        elif stays and (resolution is None or (not has_rule and at in before.free)):
            where = before.wanted[at]
        elif is_free and not has_rule:
            where = None
        after.append(where)
    return dataclasses.replace(before, after=after, trees=trees, resolution=resolution)


def _known(call: Call, wanted: Sequence[Any]) -> dict[Any, list[list[Pin]]]:
    """What results with the structure of an argument get; state comes first."""
    known: dict[Any, list[list[Pin]]] = {}
    data: dict[Any, list[list[Pin]]] = {}
    for argument, span in zip(call.arguments, spans(call.arguments), strict=True):
        key = (argument.treedef, shape_key(argument.leaves))
        if argument.is_state and span:
            known.setdefault(key, []).append([(True, wanted[at]) for at in span])
        elif argument.pins:
            data.setdefault(key, []).append([(False, where) for where in argument.pins])
    return {**data, **known}


def pin_results(
    job: Job, call: Call, after: Layouts, result: Any
) -> tuple[list[Any], Resolution | None]:
    """Per leaf of an abstract result, its sharding or None, and the resolution.

    None leaves it to the compiler. A part of the result with the structure of an
    argument keeps its layouts. Other state is laid out by the rules.
    """
    types, treedef = jax.tree.flatten(result)
    # Without the types of Explicit axes, which the rules override.
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in types]
    plain = treedef.unflatten(shapes)
    chosen: list[Any] = [None] * len(shapes)  # by the user
    if job.out_shardings is not None:
        chosen = broadcast(job.out_shardings, plain, call.mesh, "out_shardings")
    made: dict[str, Any] = {}
    by_rules = call.rules is not None and None in chosen
    pins = pins_of(plain, after.known, made if by_rules else None)
    resolution = after.resolution
    if made:
        # With the arguments: optimizer state follows parameters among them.
        resolution = _resolved({**made, **after.trees}, call.rules)
        assert resolution is not None
        every = iter(resolution.sharding_list())
        pins = [(s, next(every) if at is _BY_RULE else at) for s, at in pins]
    pairs = zip(pins, chosen, strict=True)
    return [given or sharding for (_, sharding), given in pairs], resolution


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
