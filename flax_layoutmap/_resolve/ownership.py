"""Which parameters of a tree each optimizer state in it belongs to.

An optimizer knows its parameters by the paths of the tree it was given. The whole tree
may hold several models with the same paths, or its parameters below a prefix. Shapes
tell such models apart, then where the optimizer is and what it is called.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from flax_layoutmap._resolve.optimizer_state import (
    Origin,
    Owners,
    Shape,
    best_origins,
    is_refusal,
    owner_of,
    paths_below,
    prefixes,
    tagged_dims,
)
from flax_layoutmap._tree.flax_internals import is_nnx_object, nnx_state
from flax_layoutmap._tree.paths import (
    Flat,
    Section,
    is_optimizer_with_model,
    is_train_state,
    parameter_keys,
    unescape,
)


def find_origins(
    tree: Any,
    flat: Flat,
    shapes: Sequence[Shape],
    dtypes: Sequence[Any],
    tx: Any,
    given: Sequence[Any] = (),
) -> list[Origin | None] | None:
    """Origin of each leaf in the optimizer sections; None where there are none.

    Args:
        tree: the tree, for the modules in it.
        flat: the tree, flattened.
        shapes: shape of each leaf.
        dtypes: dtype of each leaf.
        tx: the optax transformation; None takes that of an `nnx.Optimizer` or
            TrainState in the tree.
        given: trees of parameters that it may have been given, to be tried first.
    """
    if all(section.role != "optimizer" for section in flat.sections):
        return None
    groups = _parameter_groups(flat, shapes)
    result: list[Origin | None] = [None] * len(flat.paths)
    for section in flat.sections:
        if section.role != "optimizer":
            continue
        span = slice(section.start, section.stop)
        state = dict(zip(flat.paths[span], shapes[span], strict=True))
        tx_of = tx if tx is not None else getattr(section.node, "tx", None)
        guesses = _candidates(tree, section.node, flat, state, shapes, dtypes)
        tags = {}
        if tx_of is not None:
            tags = _section_tags(section, state, tx_of, given, guesses)
        own = groups
        if is_optimizer_with_model(section.node):  # it is about no other model
            below = f"{section.prefix}model/"
            own = {p: one for p, one in groups.items() if p.startswith(below)} or groups
        found = best_origins(state, list(own.values()), tags)
        if any(origin.others for origin in found):
            near = best_origins(state, _nearest(section.prefix, own), tags)
            found = near if _explained(near) == _explained(found) else found
        result[span] = found
    return result


def _explained(found: Sequence[Origin]) -> int:
    return sum(origin.dims is not None for origin in found)


def _nearest(prefix: str, groups: Mapping[str, Owners]) -> list[Owners]:
    """Of models with the same paths, the one that an optimizer is for by its place.

    It is beside the model, in one container that holds no other, or has its name in
    its own: `generator_optimizer`. All of them, where this tells none apart.
    """

    def nearness(other: str) -> tuple[int, bool]:
        pairs = list(zip(prefix.split("/"), other.split("/"), strict=False))
        same = list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        own, name = [*pairs, ("", "")][len(same)]
        return len(same), name != "" and name in own

    most = max(map(nearness, groups))
    return [one for other, one in groups.items() if nearness(other) == most]


def _parameter_groups(flat: Flat, shapes: Sequence[Shape]) -> dict[str, Owners]:
    """By its prefix, each section of parameters: a model, Linen's `params`, …

    An optimizer may have been given what is in the section, or what the section is in:
    each form of a path counts.
    """
    keys = parameter_keys(flat)
    groups: dict[str, Owners] = {}
    for section in flat.sections:
        own = [at for at in range(section.start, section.stop) if at in keys]
        if own:
            every = [(form, at) for at in own for form in flat.forms(at)]
            group = Owners(
                {form: shapes[at] for form, at in every},
                {form: keys[at] for form, at in every},
            )
            known = groups.get(section.prefix)
            groups[section.prefix] = group if known is None else known.merged(group)
    return groups


def _section_tags(
    section: Section,
    state: Mapping[str, Shape],
    tx: Any,
    given: Sequence[Any],
    guesses: Iterable[Any],
) -> Mapping[str, Any]:
    """Traces the optimizer of one section over the parameters that fit its state.

    It may refuse guesses; if it refuses what was given as well, that error is raised.
    """
    if is_train_state(section.node):
        return tagged_dims(tx.init, section.node.params)
    best: Mapping[str, Any] = {}
    refusals: list[Exception] = []
    tried = 0
    for params in itertools.chain(given, guesses):
        tried += 1
        try:
            tags = tagged_dims(tx.init, params)
        except Exception as error:
            if not is_refusal(error):
                raise
            refusals.append(error)
            continue
        for own in _parts_at(section.prefix, tags):
            for prefix in ("opt_state/", ""):
                fits = all(
                    state.get(prefix + p) == shape for p, (shape, _) in own.items()
                )
                if fits and len(own) > len(best):
                    best = own
        if len(best) >= len(state) - 1:  # an nnx.Optimizer adds its `step`
            break
    if given and len(refusals) == tried:
        refusals[0].add_note("raised by tx.init, traced over what was given as params=")
        raise refusals[0]
    return best


def _parts_at(prefix: str, tags: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The whole state, and what it holds at an end of a section's prefix.

    Where optax's state lies in that of a user's own wrapper, as in
    `{"optimizer": Wrapped(copy, inner)}`, the section is the inner state alone.
    """
    yield tags
    parts = prefix.split("/")[:-1]
    for start in range(len(parts)):
        inner = paths_below("/".join(parts[start:]) + "/", tags)
        if inner:
            yield inner


def _candidates(
    tree: Any,
    node: Any,
    flat: Flat,
    state: Mapping[str, Shape],
    shapes: Sequence[Shape],
    dtypes: Sequence[Any],
) -> Iterator[Any]:
    """Trees of parameters that an optimizer state may have been made from."""
    if is_optimizer_with_model(node):
        yield nnx_state(node.model, node.wrt)
    if node is not None:
        for module in _modules(tree):
            yield nnx_state(module, node.wrt)
    for structs in _sections_and_around(flat, shapes, dtypes):
        for prefix in ("", *prefixes(state, structs)):
            below = paths_below(prefix, structs)
            owned = {owner_of(path, below) for path in state}
            trained = {p: leaf for p, leaf in below.items() if p in owned}
            yield from map(_nest, filter(None, (below, trained)))


def _sections_and_around(
    flat: Flat, shapes: Sequence[Shape], dtypes: Sequence[Any]
) -> Iterator[dict[str, Any]]:
    """The parameters of each section, by path; then those of what sections are in.

    Of `{"model": {"params": …, "batch_stats": …}}`: of the model, and of all.
    """
    full, every, starts = flat.full_paths(), {}, {}
    for section in flat.sections:
        if section.role == "parameter":
            own = {
                at: jax.ShapeDtypeStruct(shapes[at], dtypes[at])
                for at in range(section.start, section.stop)
                if at not in flat.fixed and dtypes[at] is not None
            }
            yield {flat.paths[at]: leaf for at, leaf in own.items() if flat.paths[at]}
            every |= {full[at]: leaf for at, leaf in own.items()}
            parts = section.prefix.split("/")[:-1]
            for count in reversed(range(len(parts))):
                starts["".join(f"{part}/" for part in parts[:count])] = None
    for start in starts:
        yield paths_below(start, every)


def _modules(tree: Any) -> list[Any]:
    nodes = jax.tree.leaves(tree, is_leaf=is_nnx_object)
    return [
        node for node in nodes if is_nnx_object(node) and not hasattr(node, "opt_state")
    ]


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, last = map(unescape, path.split("/"))
        node = root
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = leaf
    return root
