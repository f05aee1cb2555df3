"""The in and out shardings of a program, decided before it is compiled.

State has the layouts of the rules on both sides. In the result, what is like an
argument lies as that; what else is state is laid out by the rules.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding
from jax.tree_util import DictKey, GetAttrKey

from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.resolve import resolve
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._step.arguments import Argument, Slot, shape_key
from flax_layoutmap._step.inputs import broadcast, own_sharding
from flax_layoutmap._tree.flatten import plain_tree
from flax_layoutmap._tree.graph import Change
from flax_layoutmap._tree.paths import Roots, is_optax_state, is_train_state, join_keys

# Of one leaf of the result: whether it is state, and its sharding.
Pin = tuple[bool, Any]

# Stands for such a sharding until the rules were asked.
_BY_RULE = object()

# The root of the result in messages; no argument can have this name.
RESULT = "the result"

# What the user says of an argument: a prefix tree of layouts, or None.
InSharding = Callable[[Slot], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """What the rules were asked about.

    Attributes:
        trees: the trees, by name.
        resolution: the answer; None where there are none.
    """

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


def wanted_before(
    arguments: Sequence[Argument], in_sharding: InSharding, rules: RuleSet | None
) -> tuple[list[Any], Asked]:
    """One sharding per leaf of all arguments; None leaves it to JAX."""
    found: dict[str, list[Any]] = {}
    trees: dict[str, Any] = {}
    for argument in arguments:
        prefix = in_sharding(argument.slot)
        if prefix is not None:
            what = f"in_shardings[{argument.name!r}]"
            mesh = None if rules is None else rules.mesh
            found[argument.name] = broadcast(prefix, argument.plain(), mesh, what)
        elif not argument.is_state:
            found[argument.name] = [None] * len(argument.leaves)
        elif rules is None:
            found[argument.name] = [own_sharding(leaf) for leaf in argument.leaves]
        else:
            trees[argument.name] = _without_arrays(argument)
    asked = Asked(trees, None)
    if trees and rules is not None:
        asked = Asked(trees, resolve(Roots(trees), rules))
        every = iter(asked.shardings)
        for argument in arguments:
            if argument.name in trees:
                found[argument.name] = [next(every) for _ in argument.leaves]
    return [s for a in arguments for s in found[a.name]], asked


def _without_arrays(argument: Argument) -> Any:
    """What the rules are asked about; a Resolution may be kept, arrays must not."""
    if argument.has_objects:
        return argument.value
    return argument.plain([abstract(leaf, None) for leaf in argument.leaves])


def wanted_after(
    arguments: Sequence[Argument],
    wanted: Sequence[Any],
    change: Change,
    returned: Sequence[str],
    avals: Sequence[Any],
    in_sharding: InSharding,
    rules: RuleSet | None,
) -> tuple[list[Any], Asked]:
    """One sharding per leaf of the graph that a function left; None leaves it to JAX.

    Args:
        arguments: the arguments.
        wanted: the shardings of their leaves.
        change: what the function did to the objects in them.
        returned: where in the result the new objects are: `policy/`.
        avals: the types of the outputs that are leaves after it.
        in_sharding: what the user says of an argument.
        rules: the rule set, or None.
    """
    every = [leaf for argument in arguments for leaf in argument.leaves]
    given: list[Any] = [None] * len(every)
    for at in change.stays:
        shape, dtype = every[at].shape, every[at].dtype
        given[at] = jax.ShapeDtypeStruct(shape, dtype, sharding=wanted[at])
    new = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    leaves = [
        _array(leaf) if bare else leaf
        for leaf, bare in zip(change.leaves(given, new), change.bare(), strict=True)
    ]
    nodes = change.merged(leaves)
    found: dict[int, Any] = {}  # by the id of an abstract leaf
    trees: dict[str, Any] = {}
    mesh = None if rules is None else rules.mesh
    for argument in arguments:
        tree, nodes = argument.with_objects(nodes)
        prefix = in_sharding(argument.slot)
        if prefix is not None and argument.has_objects:
            plain = plain_tree(tree)
            what = (
                f"in_shardings[{argument.name!r}] (after {argument.name} has changed)"
            )
            layouts = broadcast(prefix, plain, mesh, what)
            found.update(zip(map(id, jax.tree.leaves(plain)), layouts, strict=True))
        elif prefix is None and argument.is_state:
            whole = argument.has_objects
            trees[argument.name] = tree if whole else _without_arrays(argument)
    names = [f"{RESULT}/{path}".removesuffix("/") for path in returned]
    trees.update(zip(names, nodes, strict=True))
    if rules is None:
        own = [getattr(leaf, "sharding", None) for leaf in leaves]
        keys = map(id, leaves)
        return list(map(found.get, keys, own)), Asked({}, None)
    roots = Roots(trees)
    asked = Asked(trees, resolve(roots, rules))
    ids = map(id, jax.tree.leaves(plain_tree(roots)))
    for key, sharding in zip(ids, asked.shardings, strict=True):
        found.setdefault(key, sharding)
    return [found[id(leaf)] for leaf in leaves], asked


def _array(leaf: jax.ShapeDtypeStruct) -> Any:
    """An array of one element, spread: flax 0.12.4 takes nothing else for an array."""
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended):
        return leaf
    return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)


def pin_results(
    arguments: Sequence[Argument],
    wanted: Sequence[Any],
    out: tuple[Any, Sequence[Any]],
    out_shardings: Any,
    rules: RuleSet | None,
    asked: Asked,
) -> tuple[list[Pin], Asked]:
    """Per result: whether it is state, and its sharding (None: the compiler's).

    A part of the result with the structure of an argument keeps its layouts. What else
    is state is laid out by the rules.

    Args:
        arguments: the arguments.
        wanted: the shardings of their leaves.
        out: the structure of the result, and the types of its leaves.
        out_shardings: what the user says of it.
        rules: the rule set, or None.
        asked: what the rules were asked about so far.
    """
    known: dict[Any, list[list[Pin]]] = {}
    data: dict[Any, list[list[Pin]]] = {}
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
    if out_shardings is not None:
        said = broadcast(out_shardings, result, mesh, "out_shardings")
    asks = rules is not None and any(given is None for given in said)
    made: dict[str, Any] = {}
    found = _pin_tree(result, {**data, **known}, made if asks else None, RESULT)
    if made and rules is not None:
        # With the arguments: optimizer state follows parameters among them.
        trees = {**made, **asked.trees}
        asked = Asked(trees, resolve(Roots(trees), rules))
        every = iter(asked.shardings)
        found = [(s, next(every) if at is _BY_RULE else at) for s, at in found]
    typed = [_typed(aval, rules) for aval in out[1]]
    return [
        (state, given or sharding or own)
        for (state, sharding), given, own in zip(found, said, typed, strict=True)
    ], asked


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
    known: Mapping[Any, list[list[Pin]]],
    made: dict[str, Any] | None,
    path: str,
) -> list[Pin]:
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
        for entry in _pin_tree(part, known, made, path + _below(keys))
    ]


def _below(keys: tuple[Any, ...]) -> str:
    """How the path of a result goes on: `[1]`, or `/policy`, which rules may name."""
    named = isinstance(keys[0], DictKey | GetAttrKey) if keys else False
    return f"/{join_keys(keys)}" if named else jax.tree_util.keystr(keys)


def _is_made_state(tree: Any) -> bool:
    """Whether a result is a state by its kind: new, or of another structure."""
    return (
        is_train_state(tree)
        or is_optax_state(tree)
        or isinstance(tree, nnx.State)
        or (isinstance(tree, Mapping) and "params" in tree)
    )
