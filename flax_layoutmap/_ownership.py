"""Which parameters of a tree each optimizer state in it belongs to.

An optimizer knows its parameters by the paths of the tree it was given. The whole tree
may hold several models with the same paths, or its parameters below a prefix.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from flax_layoutmap._flax_internals import is_nnx_object, nnx_state
from flax_layoutmap._optimizer_state import (
    Origin,
    Owners,
    Shape,
    best_origins,
    owner_of,
    paths_below,
    prefixes,
    tagged_dims,
    try_tagged_dims,
)
from flax_layoutmap._paths import (
    Flat,
    Section,
    is_optimizer_with_model,
    is_train_state,
    parameter_keys,
    unescape,
)


def find_origins(
    tree: Any, flat: Flat, shapes: Sequence[Shape], dtypes: Sequence[Any], tx: Any
) -> list[Origin | None] | None:
    """Origin of each leaf in the optimizer sections; None where there are none.

    Args:
        tree: the tree, for the modules in it.
        flat: the tree, flattened.
        shapes: shape of each leaf.
        dtypes: dtype of each leaf.
        tx: the optax transformation; None takes that of an `nnx.Optimizer` or
            TrainState in the tree.
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
        tags = _section_tags(tree, section, flat, state, dtypes, tx)
        own = groups
        if is_optimizer_with_model(section.node):  # it is about no other model
            own = _parameter_groups(flat, shapes, f"{section.prefix}model/") or groups
        result[span] = best_origins(state, own, tags)
    return result


def _parameter_groups(
    flat: Flat, shapes: Sequence[Shape], prefix: str = ""
) -> list[Owners]:
    """One group for each section of parameters: a model, Linen's `params`, …

    An optimizer may have been given what is in the section, or what the section is in:
    each form of a path counts.
    """
    keys = parameter_keys(flat)
    groups = []
    for section in flat.sections:
        if not section.prefix.startswith(prefix):
            continue
        own = [at for at in range(section.start, section.stop) if at in keys]
        if own:
            every = [(form, at) for at in own for form in flat.forms(at)]
            groups.append(
                Owners(
                    {form: shapes[at] for form, at in every},
                    {form: keys[at] for form, at in every},
                )
            )
    return groups


def _section_tags(
    tree: Any,
    section: Section,
    flat: Flat,
    state: Mapping[str, Shape],
    dtypes: Sequence[Any],
    tx: Any,
) -> Mapping[str, Any]:
    """Traces the optimizer of one section over the parameters of the tree, if known."""
    node = section.node
    tx = tx if tx is not None else getattr(node, "tx", None)
    if tx is None:
        return {}
    if is_train_state(node):
        return tagged_dims(tx.init, node.params)
    best: Mapping[str, Any] = {}
    for params in _candidates(tree, node, flat, state, dtypes):
        tags = try_tagged_dims(tx.init, params)
        for own in _parts_at(section.prefix, tags):
            for prefix in ("opt_state/", ""):
                fits = all(
                    state.get(prefix + p) == shape for p, (shape, _) in own.items()
                )
                if fits and len(own) > len(best):
                    best = own
        if len(best) >= len(state) - 1:  # an nnx.Optimizer adds its `step`
            break
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
    dtypes: Sequence[Any],
) -> Iterator[Any]:
    """Trees of parameters that an optimizer state may have been made from."""
    if is_optimizer_with_model(node):
        yield nnx_state(node.model, node.wrt)
    if node is not None:
        for module in _modules(tree):
            yield nnx_state(module, node.wrt)
    for section in flat.sections:
        if section.role == "parameter":
            own = [at for at in range(section.start, section.stop) if flat.paths[at]]
            structs = {
                flat.paths[at]: jax.ShapeDtypeStruct(flat.leaves[at].shape, dtypes[at])
                for at in own
                if at not in flat.fixed and hasattr(flat.leaves[at], "shape")
            }
            for prefix in ("", *prefixes(state, structs)):
                below = paths_below(prefix, structs)
                owned = {owner_of(path, below) for path in state}
                trained = {p: leaf for p, leaf in below.items() if p in owned}
                yield from map(_nest, filter(None, (below, trained)))


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
