"""Stage "origins": the parameter of each optimizer-state leaf, and LoRA's kernels.

An optimizer knows its parameters by the paths of the tree it was given. The whole tree
may hold several models with the same paths, or its parameters below a prefix. Shapes
distinguish such models, then the optimizer's position and name.
"""

import dataclasses
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from flax_layoutmap._resolve.leaves import Leaves
from flax_layoutmap._resolve.lora import Adapter, find_adapters
from flax_layoutmap._resolve.state_dims import (
    Dims,
    is_refusal,
    owner_of,
    tagged_dims,
    tells,
)
from flax_layoutmap._rules.records import Shape
from flax_layoutmap._tree.flax_internals import nnx_state
from flax_layoutmap._tree.paths import (
    is_optimizer_with_model,
    is_train_state,
    parameter_keys,
    unescape,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """The parameter that a leaf of optimizer state was made from.

    Attributes:
        owner: key of the parameter (see `parameter_keys`), or None.
        dims: per dim of the leaf, the parameter dim that it came from, or None; None
            if unknown.
        how: in words, for reports.
        others: other parameters that may equally be the owner.
    """

    owner: str | None
    dims: Dims | None
    how: str
    others: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Origins:
    """The origin of each leaf, from paths, shapes and the optimizer alone.

    Attributes:
        state: the origin of each leaf, None for a leaf outside optimizer state; None if
            the tree has no optimizer state.
        owners: key → position of each parameter, if there is optimizer state.
        adapters: position → LoRA matrix.
        plain: position → the path that a leaf had before LoRA was added.
    """

    leaves: Leaves
    state: Sequence[Origin | None] | None = None
    owners: Mapping[str, int] = dataclasses.field(default_factory=dict)
    adapters: Mapping[int, Adapter] = dataclasses.field(default_factory=dict)
    plain: Mapping[int, str] = dataclasses.field(default_factory=dict)


# From `tagged_dims`: path within the optax state → its shape and parameter dims.
Tags = Mapping[str, tuple[Shape, Dims | None]]


class Owner(NamedTuple):
    """A parameter, under a path that an optimizer may know it by."""

    key: str  # of `parameter_keys`
    shape: Shape


Owners = Mapping[str, Owner]


def find_origins(leaves: Leaves, tx: Any = None) -> Origins:
    """Find the origin of each leaf from paths, shapes and the optimizer alone.

    `tx` is the optax transformation; None takes that of an optimizer or TrainState in
    the tree.
    """
    flat, shapes = leaves.flat, leaves.shapes
    if all(section.role != "optimizer" for section in flat.sections):
        return known_origins(leaves, None)
    owners = parameter_keys(flat)
    groups = _parameter_groups(leaves, owners)
    found: list[Origin | None] = [None] * len(flat.paths)
    for section in flat.sections:
        if section.role != "optimizer":
            continue
        node: Any = leaves.nodes.get(section.prefix)
        span = slice(section.start, section.stop)
        state = dict(zip(flat.paths[span], shapes[span], strict=True))
        tx_of = tx if tx is not None else getattr(node, "tx", None)
        tags: Tags = {}
        if is_train_state(node) and tx_of is not None:
            tags = tagged_dims(tx_of.init, node.params)
        elif tx_of is not None:
            guesses = _candidates(leaves, node, state)
            tags = _section_tags(section.prefix, state, tx_of, leaves.given, guesses)
        own = groups
        if is_optimizer_with_model(node):  # it is about no other model
            below = f"{section.prefix}model/"
            own = {p: one for p, one in groups.items() if p.startswith(below)} or groups
        best = best_origins(state, list(own.values()), tags)
        if any(origin.others for origin in best):
            near = best_origins(state, _nearest(section.prefix, own), tags)
            best = near if _explained(near) == _explained(best) else best
        found[span] = best
    return _with_adapters(leaves, found, owners)


def known_origins(leaves: Leaves, found: Sequence[Origin | None] | None) -> Origins:
    """The origins if those of optimizer state are known, as from a checkpoint.

    `found` is None if the tree has no optimizer state.
    """
    if found is None:
        return _with_adapters(leaves, None, {})
    owners = parameter_keys(leaves.flat)
    keys = set(owners.values())
    names = {name for o in found if o is not None for name in (o.owner, *o.others)}
    # A checkpoint may have `dense/kernel` for `model/dense/kernel` of the tree.
    ends = {
        name: [key for key in keys if key.endswith(f"/{name}")]
        for name in names - keys - {None}
    }
    renamed = {name: one[0] for name, one in ends.items() if len(one) == 1}
    if renamed:
        found = [
            origin
            and dataclasses.replace(
                origin,
                owner=renamed.get(origin.owner, origin.owner),
                others=tuple(renamed.get(name) or name for name in origin.others),
            )
            for origin in found
        ]
    return _with_adapters(leaves, found, owners)


def _with_adapters(
    leaves: Leaves, state: Sequence[Origin | None] | None, owners: Mapping[int, str]
) -> Origins:
    leaves = dataclasses.replace(leaves, nodes={}, modules=(), given=())
    adapters, plain = find_adapters(leaves)
    by_key = {key: at for at, key in owners.items()}
    return Origins(leaves, state, by_key, adapters, plain)


def _explained(found: Sequence[Origin]) -> int:
    return sum(origin.dims is not None for origin in found)


def _nearest(prefix: str, groups: Mapping[str, Owners]) -> list[Owners]:
    """Of models with the same paths, those that an optimizer is for by its position.

    It is beside its model, in a container that holds no other, or has the model's name
    in its own: `generator_optimizer`.
    """

    def nearness(other: str) -> tuple[int, bool]:
        pairs = list(zip(prefix.split("/"), other.split("/"), strict=False))
        same = list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        own, name = [*pairs, ("", "")][len(same)]
        return len(same), name != "" and name in own

    most = max(map(nearness, groups))
    return [one for other, one in groups.items() if nearness(other) == most]


def _parameter_groups(leaves: Leaves, owners: Mapping[int, str]) -> dict[str, Owners]:
    """The parameters of each section (a model, Linen's `params`), by its prefix.

    A parameter is under each form of its path: the optimizer may have been given the
    section or a tree around it.
    """
    groups: dict[str, Owners] = {}
    for section in leaves.flat.sections:
        group = {
            form: Owner(owners[at], leaves.shapes[at])
            for at in range(section.start, section.stop)
            if at in owners
            for form in leaves.flat.forms(at)
        }
        if group:
            groups[section.prefix] = {**groups.get(section.prefix, {}), **group}
    return groups


# ------------------------------------------------------------------------- tracing


def _section_tags(
    prefix: str,
    state: Mapping[str, Shape],
    tx: Any,
    given: Sequence[Any],
    guesses: Iterable[Any],
) -> Tags:
    """Trace the optimizer of one section over the parameters that fit its state.

    An optimizer may refuse guesses; if it refuses `given` as well, that is an error.
    """
    best: Tags = {}
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
        for own in _parts_at(prefix, tags):
            for below in ("opt_state/", ""):
                fits = all(state.get(below + p) == one[0] for p, one in own.items())
                if fits and len(own) > len(best):
                    best = own
        if len(best) >= len(state) - 1:  # an nnx.Optimizer adds its `step`
            break
    if given and len(refusals) == tried:
        refusals[0].add_note("raised by tx.init, traced over what was given as params=")
        raise refusals[0]
    return best


def _parts_at(prefix: str, tags: Tags) -> Iterator[Tags]:
    """The whole state, and the part below each ending of a section's prefix.

    If optax's state is inside that of a user's own wrapper, as in
    `{"optimizer": Wrapped(copy, inner)}`, the section is the inner state alone.
    """
    yield tags
    parts = prefix.split("/")[:-1]
    for start in range(len(parts)):
        inner = paths_below("/".join(parts[start:]) + "/", tags)
        if inner:
            yield inner


def _candidates(leaves: Leaves, node: Any, state: Mapping[str, Shape]) -> Iterator[Any]:
    """Trees of parameters that an optimizer state may have been made from."""
    if is_optimizer_with_model(node):
        yield nnx_state(node.model, node.wrt)
    if node is not None:
        for module in leaves.modules:
            yield nnx_state(module, node.wrt)
    for structs in _sections_and_around(leaves):
        for prefix in ("", *prefixes(state, structs)):
            below = paths_below(prefix, structs)
            owned = {owner_of(path, below) for path in state}
            trained = {p: leaf for p, leaf in below.items() if p in owned}
            yield from map(_nest, filter(None, (below, trained)))


def _sections_and_around(leaves: Leaves) -> Iterator[dict[str, Any]]:
    """The parameters of each section, by path; then those of what sections are in.

    Of `{"model": {"params": …, "batch_stats": …}}`: of the model, and of all.
    """
    flat, shapes, dtypes = leaves.flat, leaves.shapes, leaves.dtypes
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


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, last = map(unescape, path.split("/"))
        node = root
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = leaf
    return root


# ------------------------------------------------------------------------- matching

# The most candidates for a prefix that are tried.
_MOST_PREFIXES = 8


def paths_below(prefix: str, paths: Mapping[str, Any]) -> dict[str, Any]:
    """The entries whose paths start with a prefix, without it."""
    start = len(prefix)
    return {
        path[start:]: value for path, value in paths.items() if path.startswith(prefix)
    }


def best_origins(
    state: Mapping[str, Shape], groups: Sequence[Owners], tags: Tags
) -> list[Origin]:
    """The origins under the view of the parameters that explains most of a state.

    If several views explain as much, the other owners are recorded, too.
    """
    best: list[list[Origin]] = []
    best_score = 0
    for owners in _views(state, groups):
        found = [
            _origin(path, shape, owners, tags.get(path.removeprefix("opt_state/")))
            for path, shape in state.items()
        ]
        score = _explained(found)
        if score > best_score:
            best, best_score = [], score
        if score == best_score:
            best.append(found)
    first, *more = best
    return [
        dataclasses.replace(origin, others=_others(origin, same_leaf))
        for origin, *same_leaf in zip(first, *more, strict=True)
    ]


def _others(origin: Origin, same_leaf: Sequence[Origin]) -> tuple[str, ...]:
    """Owners other than the first, each once."""
    names = dict.fromkeys(o.owner for o in same_leaf if o.owner is not None)
    return tuple(name for name in names if name != origin.owner)


def _views(state: Mapping[str, Shape], groups: Sequence[Owners]) -> Iterator[Owners]:
    """Ways to see the parameters that an optimizer was given.

    All of them; with one model first, of several that have the same paths; below a
    prefix that the optimizer did not know.
    """
    every: Owners = {}
    for group in reversed(groups):
        every = {**every, **group}
    yield every
    if len(every) < sum(map(len, groups)):
        for group in groups:
            yield {**every, **group}
    for prefix in prefixes(state, every):
        yield {**every, **paths_below(prefix, every)}


def prefixes(state: Mapping[str, Shape], owners: Mapping[str, Any]) -> list[str]:
    """Prefixes of parameter paths without which they would be parts of a state path.

    A tree `{"model": {"params": …}, "opt_state": tx.init(params)}` has them.
    """
    orphans = (p for p, shape in state.items() if shape and not owner_of(p, owners))
    found: set[str] = set()
    # The first ones may belong to no parameter (a random key), so try some more.
    for orphan in itertools.islice(orphans, _MOST_PREFIXES):
        whole = orphan.split("/")
        for owner in owners:
            parts = owner.split("/")
            # The last part may be an index after the path of the parameter (sm3).
            same = max(_common_ending(parts, whole), _common_ending(parts, whole[:-1]))
            for count in range(1, min(same, len(parts) - 1) + 1):
                found.add("/".join(parts[:-count]) + "/")
        if found:
            break
    # The prefix of a whole tree of parameters is shorter than that of a part.
    return sorted(found, key=lambda prefix: (len(prefix), prefix))[:_MOST_PREFIXES]


def _common_ending(first: list[str], second: list[str]) -> int:
    """How many of the last parts are the same."""
    return len(os.path.commonprefix([first[::-1], second[::-1]]))


def _origin(
    path: str,
    shape: Shape,
    owners: Owners,
    traced: tuple[Shape, Dims | None] | None,
) -> Origin:
    """The origin of a leaf where the optimizer knew its parameters by these paths."""
    found = owner_of(path, owners)
    owner, of = (None, ()) if found is None else owners[found]
    if not shape:
        return Origin(owner, (), "scalar")
    if owner is None:
        return Origin(None, None, "belongs to no parameter")
    tag_shape, tag = traced or (None, None)
    if tag is not None and tag_shape == shape and tells(tag):
        if all(
            dim is None or (dim < len(of) and of[dim] == size)
            for dim, size in zip(tag, shape, strict=True)
        ):
            return Origin(owner, tag, "dims traced")
    if shape == of:
        return Origin(owner, tuple(range(len(of))), "same shape")
    extra = len(shape) - len(of)
    if extra > 0 and shape[extra:] == of:
        dims = (None,) * extra + tuple(range(len(of)))
        return Origin(owner, dims, "leading dims added")
    dims = _only_subsequence(shape, of)
    if dims is not None:
        return Origin(owner, dims, "dims left out")
    if math.prod(shape) <= 1:
        return Origin(owner, (None,) * len(shape), "placeholder")
    return Origin(owner, None, f"no known relation to the parameter's shape {of}")


def _only_subsequence(shape: Shape, of: Shape) -> Dims | None:
    """Dims of `of` that make `shape` in order, if there is exactly one choice."""
    found = [
        dims
        for dims in itertools.combinations(range(len(of)), len(shape))
        if tuple(of[dim] for dim in dims) == shape
    ]
    return found[0] if len(found) == 1 else None
