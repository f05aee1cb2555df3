"""Which parameters of a tree each optimizer state in it belongs to.

An optimizer knows its parameters by the paths of the tree it was given. The whole tree
may hold several models with the same paths, or its parameters below a prefix.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from flax_layoutmap._flax_internals import is_nnx_object, nnx_state
from flax_layoutmap._optimizer_state import (
    Origin,
    Shape,
    origins,
    owner_of,
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

# A prefix is looked for among so many candidates.
_MOST_PREFIXES = 8


@dataclasses.dataclass(frozen=True, slots=True)
class _Owners:
    """Parameters by the paths that an optimizer may know them under.

    Attributes:
        shapes: path → shape.
        keys: path → the key of `parameter_keys`.
    """

    shapes: dict[str, Shape]
    keys: dict[str, str]

    def merged(self, other: "_Owners") -> "_Owners":
        """Both; where they disagree, the other's."""
        return _Owners(self.shapes | other.shapes, self.keys | other.keys)

    def below(self, prefix: str) -> "_Owners":
        """Those below a prefix, without it."""
        return _Owners(_below(prefix, self.shapes), _below(prefix, self.keys))


def _below(prefix: str, paths: Mapping[str, Any]) -> dict[str, Any]:
    start = len(prefix)
    return {
        path[start:]: value for path, value in paths.items() if path.startswith(prefix)
    }


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
        result[span] = _best_origins(state, own, tags)
    return result


def _parameter_groups(
    flat: Flat, shapes: Sequence[Shape], prefix: str = ""
) -> list[_Owners]:
    """One group for each section of parameters: a model, Linen's `params`, …"""
    keys = parameter_keys(flat)
    groups = []
    for section in flat.sections:
        if not section.prefix.startswith(prefix):
            continue
        own = [at for at in range(section.start, section.stop) if at in keys]
        if own:
            groups.append(
                _Owners(
                    {flat.paths[at]: shapes[at] for at in own},
                    {flat.paths[at]: keys[at] for at in own},
                )
            )
    return groups


def _best_origins(
    state: Mapping[str, Shape], groups: Sequence[_Owners], tags: Mapping[str, Any]
) -> list[Origin]:
    """The origins under that view of the parameters which explains most of a state.

    Where several views explain as much, the other owners are named, too.
    """
    best: list[list[Origin]] = []
    best_score = 0
    for owners in _views(state, groups):
        found = origins(list(state), list(state.values()), owners.shapes, tags)
        score = sum(origin.dims is not None for origin in found)
        if score < best_score:
            continue
        if score > best_score:
            best, best_score = [], score
        best.append(
            [
                dataclasses.replace(o, owner=owners.keys[o.owner]) if o.owner else o
                for o in found
            ]
        )
    first, *more = best
    return [
        dataclasses.replace(origin, others=_others(origin, same_leaf))
        for origin, *same_leaf in zip(first, *more, strict=True)
    ]


def _others(origin: Origin, same_leaf: Sequence[Origin]) -> tuple[str, ...]:
    """Owners other than the first, each once."""
    names = dict.fromkeys(o.owner for o in same_leaf if o.owner is not None)
    return tuple(name for name in names if name != origin.owner)


def _views(state: Mapping[str, Shape], groups: Sequence[_Owners]) -> Iterator[_Owners]:
    """Ways to see the parameters: all of them; with one model (of several that have
    the same paths) first; below a prefix that the optimizer did not know."""
    every = _Owners({}, {})
    for group in reversed(groups):
        every = every.merged(group)
    yield every
    if len(every.shapes) < sum(len(group.shapes) for group in groups):
        for group in groups:
            yield every.merged(group)
    for prefix in _prefixes(state, every.shapes):
        yield every.merged(every.below(prefix))


def _prefixes(state: Mapping[str, Shape], owners: Mapping[str, Any]) -> list[str]:
    """Prefixes of parameter paths without which they would be parts of a state path.

    A tree `{"model": {"params": …}, "opt_state": tx.init(params)}` has them.
    """
    orphans = (p for p, shape in state.items() if shape and not owner_of(p, owners))
    orphan = next(orphans, None)
    if orphan is None:
        return []
    whole = orphan.split("/")
    found: set[str] = set()
    for owner in owners:
        parts = owner.split("/")
        # The last part of a state path may be an index behind the parameter's (sm3).
        same = max(_common_ending(parts, whole), _common_ending(parts, whole[:-1]))
        for count in range(1, min(same, len(parts) - 1) + 1):
            found.add("/".join(parts[:-count]) + "/")
    # The prefix of a whole tree of parameters is shorter than that of a part.
    return sorted(found, key=lambda prefix: (len(prefix), prefix))[:_MOST_PREFIXES]


def _common_ending(first: Sequence[str], second: Sequence[str]) -> int:
    """How many of the last parts are the same."""
    same = 0
    for one, other in zip(reversed(first), reversed(second), strict=False):
        if one != other:
            break
        same += 1
    return same


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
        for prefix in ("opt_state/", ""):
            fits = all(state.get(prefix + p) == shape for p, (shape, _) in tags.items())
            if fits and len(tags) > len(best):
                best = tags
        if len(best) >= len(state) - 1:  # an nnx.Optimizer adds its `step`
            break
    return best


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
            prefixes = ["", *_prefixes(state, structs)]
            for below in (_below(prefix, structs) for prefix in prefixes):
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
