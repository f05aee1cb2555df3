"""The in and out shardings of a program, chosen before it is compiled.

State has the layouts of the rules on both sides. A result like an argument has its
sharding; other state is laid out by the rules.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._core.fetch import own_sharding
from flax_layoutmap._core.layout import TensorLayout, is_offloaded, own_memory_kind
from flax_layoutmap._place.place import wanted_layout
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.resolve import resolve
from flax_layoutmap._rules.rules import RuleSet, using_rules
from flax_layoutmap._step.arguments import (
    NUMBERS,
    Argument,
    Call,
    Slot,
    shape_key,
    spans,
    take_apart,
)
from flax_layoutmap._tree.flax_internals import is_object
from flax_layoutmap._tree.paths import Roots, is_optax_state, is_train_state, join_keys

# Of one leaf of the result: whether it is state, and its sharding.
Pin = tuple[bool, Any]

# Structures of arguments → what results like them get, for each such argument.
Known = Mapping[Any, Sequence[Sequence[Pin]]]

# A placeholder for such a sharding until the rules are resolved.
BY_RULE = object()

# The root of the result in messages; no argument can have this name.
RESULT = "the result"


@dataclasses.dataclass(frozen=True)
class Layouts:
    """The layouts that arguments have to have.

    Attributes:
        wanted: one sharding per leaf; None leaves it to JAX.
        free: positions of leaves that may lie anywhere, as no rule names them.
        trees: what the rules lay out, by name.
        resolution: its resolution; None if there is nothing to resolve.
    """

    wanted: Sequence[Any]
    free: Sequence[int]
    trees: Mapping[str, Any]
    resolution: Resolution | None


def layouts_of(arguments: Sequence[Argument], rules: RuleSet | None) -> Layouts:
    trees = {
        # Without arrays, as a Resolution is cached.
        a.name: a.value if a.objects else a.plain(abstract(a.leaves))
        for a in arguments
        if rules is not None and a.is_state and a.given is None
    }
    resolution, by_rule = None, iter(())
    if trees:
        resolution = resolve(Roots(trees), rules)
        unmatched = set(resolution.unmatched)
        has_rule = [path not in unmatched for path in resolution.paths]
        by_rule = zip(resolution.sharding_list(), has_rule, strict=True)
    wanted: list[Any] = []
    free: list[int] = []
    for argument in arguments:
        leaves = argument.leaves
        if argument.given is not None:
            tree, what = argument.plain(leaves), f"in_shardings[{argument.name!r}]"
            wanted += broadcast(argument.given, tree, rules, what)
        elif argument.name not in trees:
            wanted += [own_sharding(x) if argument.is_state else None for x in leaves]
        else:
            for leaf, owner in zip(leaves, argument.owners(), strict=True):
                sharding, has_rule = next(by_rule)
                if not has_rule and _may_lie_anywhere(owner):
                    free.append(len(wanted))
                    kept = own_sharding(leaf)
                    if kept is not None and not kept.is_fully_replicated:
                        sharding = kept
                wanted.append(sharding)
    return Layouts(wanted, free, trees, resolution)


def _may_lie_anywhere(owner: Any) -> bool:
    bound = nnx.Param | nnx.OptState
    return isinstance(owner, nnx.Variable) and not isinstance(owner, bound)


def abstract(leaves: Iterable[Any], shardings: Iterable[Any] = ()) -> list[Any]:
    """Leaves without their values; numbers and tracers stay."""
    every = itertools.chain(shardings, itertools.repeat(None))
    return [
        leaf
        if isinstance(leaf, Tracer | NUMBERS)
        else jax.ShapeDtypeStruct(
            leaf.shape,
            jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True),
            sharding=sharding,
            weak_type=bool(getattr(leaf, "weak_type", False)),
        )
        for leaf, sharding in zip(leaves, every, strict=False)
    ]


def avals_of(leaves: Sequence[Any], wanted: Sequence[Any]) -> list[Any]:
    """What a program with these in shardings is traced with."""
    own = [
        x.sharding if isinstance(x, jax.ShapeDtypeStruct) else own_sharding(x)
        for x in leaves
    ]
    return abstract(leaves, (a or b for a, b in zip(wanted, own, strict=True)))


def is_on_host(x: Any) -> bool:
    """Whether a sharding, or a traced array, is in another memory than the device's."""
    if isinstance(x, Tracer):
        return jax.typeof(x).memory_space is jax.memory.Space.Host
    return isinstance(x, Sharding) and is_offloaded(own_memory_kind(x))


# ----------------------------------------------------------------- what comes out


def layouts_after(
    call: Call, before: Layouts, outcome: Any, new: Any
) -> tuple[Sequence[Any], Layouts]:
    """Shardings of the new values of NNX objects, or of all after a change.

    Values of Variables stay where they are. After a change of structure the rules are
    asked again; new Variables that no rule names are left to XLA.
    """
    structure = outcome.structure
    if structure is None:
        return [before.wanted[at] for at in outcome.leaves], before
    given = abstract(call.leaves, before.wanted)
    leaves = structure.leaves(given, abstract(jax.tree.leaves(new)))
    objects = iter(structure.merged(leaves)[0])

    def renewed(value: Any) -> Any:
        return jax.tree.map(
            lambda node: next(objects) if is_object(node) else node,
            value,
            is_leaf=lambda node: is_object(node) or isinstance(node, nnx.State),
        )

    changed = [(a.slot, renewed(a.value)) for a in call.arguments if a.objects]
    names = [f"{RESULT}/{path}".removesuffix("/") for path in structure.returned]
    made = [(Slot(name, name, name), next(objects)) for name in names]
    by_hand = {argument.name: argument.given for argument in call.arguments}
    apart = iter(take_apart([*changed, *made], in_shardings=by_hand)[0])
    arguments = [next(apart) if a.objects else a for a in call.arguments]
    after = layouts_of(arguments := [*arguments, *apart], call.rules)
    # By the ids of leaves, as NNX takes abstract arrays in a tuple for constants.
    ids = [id(leaf) for argument in arguments for leaf in argument.leaves]
    where = dict(zip(ids, after.wanted, strict=True))
    left = {ids[at] for at in after.free}

    def place(leaf: Any, source: int | None) -> Any:
        if source is None:
            return None if id(leaf) in left else where.get(id(leaf))
        return where.get(id(leaf), before.wanted[source])

    return list(map(place, leaves, structure.sources)), after


def known_of(arguments: Sequence[Argument], wanted: Sequence[Any]) -> Known:
    """What results with the structure of an argument get; state comes first."""
    state: dict[Any, list[list[Pin]]] = {}
    data: dict[Any, list[list[Pin]]] = {}
    for argument, span in zip(arguments, spans(arguments), strict=True):
        if span and (argument.is_state or argument.is_container):
            key = argument.treedef, shape_key(argument.leaves)
            every = zip(wanted[span.start : span.stop], argument.leaves, strict=True)
            pins = [(argument.is_state, where or own_sharding(x)) for where, x in every]
            (state if argument.is_state else data).setdefault(key, []).append(pins)
    return data | state


def pins_of(result: Any, known: Known) -> tuple[list[Pin], dict[str, Any]]:
    """Per leaf of a result: whether it is state, and its sharding, `BY_RULE` or None.

    Also the states in it that are like no argument, by path. The structures that are
    `known` are looked for from the outside in; where several arguments have one, these
    are taken in turn.
    """
    turns = {key: itertools.cycle(pins) for key, pins in known.items()}
    pins: list[Pin] = []
    made: dict[str, Any] = {}

    def turn_of(node: Any) -> Any:
        leaves, treedef = jax.tree.flatten(node)
        return turns.get((treedef, shape_key(leaves)))

    for keys, node in jax.tree.leaves_with_path(
        result, is_leaf=lambda node: turn_of(node) is not None or _is_made_state(node)
    ):
        if (turn := turn_of(node)) is not None:
            pins += next(turn)
        elif _is_made_state(node):
            made["/".join((RESULT, *(join_keys([key]) for key in keys)))] = node
            pins += [(True, BY_RULE)] * len(jax.tree.leaves(node))
        else:
            pins.append((False, None))
    return pins, made


def _is_made_state(tree: Any) -> bool:
    """Whether a result is a state by its type: a new one, or of another structure."""
    return (
        is_train_state(tree)
        or is_optax_state(tree)
        or isinstance(tree, nnx.State)
        or (isinstance(tree, Mapping) and "params" in tree)
    )


def places_of_result(
    result: Any, chosen: Any, known: Known, after: Layouts, rules: RuleSet | None
) -> tuple[list[Any], Resolution | None]:
    """Per leaf of an abstract result, its sharding or None, and the resolution.

    None leaves it to the compiler; `chosen` are the user's out shardings.
    """
    # Without the types of Explicit axes, which the rules override.
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), result)
    pins, made = pins_of(plain, known)
    given: list[Any] = [None] * len(pins)
    if chosen is not None:
        given = broadcast(chosen, plain, rules, "out_shardings")
    resolution, by_rule = after.resolution, itertools.repeat(None)
    if made and rules is not None and None in given:
        # With the arguments: optimizer state follows parameters among them.
        resolution = resolve(Roots({**made, **after.trees}), rules)
        by_rule = iter(resolution.sharding_list())
    shardings = [next(by_rule) if at is BY_RULE else at for _, at in pins]
    return [a or b for a, b in zip(given, shardings, strict=True)], resolution


# ------------------------------------------------------- layouts given by hand


def broadcast(prefix: Any, tree: Any, rules: RuleSet | None, what: str) -> list[Any]:
    """One sharding (or None) per leaf of `tree`, from a prefix tree of layouts."""
    try:
        layouts, treedef = jax.tree.flatten(prefix, is_leaf=_is_layout)
        numbers = jax.tree.broadcast(treedef.unflatten(range(len(layouts))), tree)
    except (ValueError, TypeError, AttributeError) as error:
        raise LayoutError(
            f"{what} must be one sharding, or a tree of them that is a prefix of "
            f"{jax.tree.structure(tree)}: {error}"
        ) from error
    pairs = zip(jax.tree.leaves(numbers), jax.tree.leaves(tree), strict=True)
    return [_sharding_of(layouts[at], leaf, rules, what) for at, leaf in pairs]


def _is_layout(node: Any) -> bool:
    """Whether a node is a layout, also as a tuple of axes, and not a tree of them."""
    if type(node) is not tuple:
        return node is None or isinstance(node, Sharding | TensorLayout | PartitionSpec)
    axes = [entry for entry in node if entry is not None and entry is not ...]
    parts = [name for x in axes for name in (x if type(x) is tuple else (x,))]
    return bool(axes) and all(isinstance(name, str) for name in parts)


def _sharding_of(layout: Any, leaf: Any, rules: RuleSet | None, what: str) -> Any:
    if layout is None or (
        isinstance(layout, Sharding) and not isinstance(layout, NamedSharding)
    ):
        return layout
    try:
        with using_rules(rules):
            layout = wanted_layout(TensorLayout(layout))
        layout.shard_shape(np.shape(leaf))
        return layout.sharding(np.ndim(leaf))
    except LayoutError as error:
        raise type(error)(f"{what}: {error}") from error
