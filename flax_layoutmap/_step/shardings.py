"""The in and out shardings of a program, chosen before it is compiled.

State has the layouts of the rules on both sides. A result like an argument has its
sharding, and others are left to the compiler.
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
from flax_layoutmap._step.trace import Job
from flax_layoutmap._tree.flax_internals import is_object
from flax_layoutmap._tree.paths import Roots

# Structures and shapes of arguments → the places of results like them, one for each.
Known = Mapping[Any, Sequence[Sequence[Any]]]

# The root of the result in messages; no argument can have this name.
RESULT = "the result"


@dataclasses.dataclass(frozen=True)
class Layouts:
    """The layouts that arguments have to have."""

    wanted: Sequence[Any]  # one sharding per leaf; None leaves it to JAX
    free: Sequence[int]  # positions of leaves that no rule names
    resolution: Resolution | None  # None if there is nothing to resolve


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
                if not (has_rule or isinstance(owner, nnx.Param | nnx.OptState | None)):
                    free.append(len(wanted))
                    kept = own_sharding(leaf)
                    if kept is not None and not kept.is_fully_replicated:
                        sharding = kept
                wanted.append(sharding)
    return Layouts(wanted, free, resolution)


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
    state: dict[Any, list[list[Any]]] = {}
    data: dict[Any, list[list[Any]]] = {}
    for argument, span in zip(arguments, spans(arguments), strict=True):
        if span and (argument.is_state or argument.is_container):
            every = zip(wanted[span.start : span.stop], argument.leaves, strict=True)
            places = [where or own_sharding(x) for where, x in every]
            known = state if argument.is_state else data
            known.setdefault(argument.shapes[1:], []).append(places)
    return data | state


def places_of_result(
    result: Any, job: Job, known: Known, rules: RuleSet | None
) -> list[Any]:
    """Per leaf of an abstract result, its sharding; None leaves it to the compiler.

    The structures that are `known` are looked for from the outside in; where several
    arguments have one, these are taken in turn.
    """
    turns = {key: itertools.cycle(places) for key, places in known.items()}

    def turn_of(node: Any) -> Any:
        leaves, treedef = jax.tree.flatten(node)
        return turns.get((treedef, shape_key(leaves)))

    # Without the types of Explicit axes, which the rules override.
    plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), result)
    nodes = jax.tree.leaves(plain, is_leaf=lambda node: turn_of(node) is not None)
    each = [next(turn_of(node) or iter([[None]])) for node in nodes]
    places = [place for some in each for place in some]
    if job.out_shardings is None:
        return places
    given = broadcast(job.out_shardings, plain, rules, "out_shardings")
    return [a or b for a, b in zip(given, places, strict=True)]


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
