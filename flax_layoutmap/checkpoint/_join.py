"""Plan a restore: join the leaves of a checkpoint with those of the target."""

import dataclasses
import functools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh

from flax_layoutmap._birth.slices import arrays_of
from flax_layoutmap._core.errors import CheckpointError, ResolveError
from flax_layoutmap._place.annotations import settle_metadata
from flax_layoutmap._place.place import with_leaves
from flax_layoutmap._resolve.leaves import leaves_of
from flax_layoutmap._resolve.optimizer_state import Origin, find_origins, known_origins
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.resolve import resolve_origins
from flax_layoutmap._rules.records import show_shape
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.flax_internals import is_nnx_object, nnx_split, nnx_state
from flax_layoutmap._tree.paths import Flat, is_train_state, parameter_keys
from flax_layoutmap._tree.trace import Traced, trace
from flax_layoutmap.checkpoint._leaves import Leaf, leaf_of, result_of
from flax_layoutmap.checkpoint._options import Options


@dataclasses.dataclass(frozen=True)
class Target:
    """A target and its flattened leaves.

    For a function, `tree` is the abstract tree that it returns and `traced` its trace.
    """

    tree: Any
    flat: Flat
    traced: Traced | None

    @functools.cached_property
    def leaves(self) -> dict[str, Any]:
        return dict(zip(self.flat.full_paths(), self.flat.leaves, strict=True))

    def by_first_name(self, leaves: Mapping[str, Any]) -> dict[str, Any]:
        """Leaves of a checkpoint, those of shared Variables by the target's name."""
        renamed = {}
        for leaf in self.flat.records:
            first, *others = leaf.names()
            saved = [name for name in others if name in leaves]
            if saved and first not in leaves:
                renamed[saved[0]] = first
        return {renamed.get(path, path): leaf for path, leaf in leaves.items()}

    def resolve(self, rules: Any, saved: Mapping[str, Origin]) -> Resolution:
        """Resolve its leaves.

        `saved` has the origins of the checkpoint's optimizer state. Where it knows all
        of the target's, they are taken, which needs no trace of the optimizer.
        """
        leaves = leaves_of(self.flat, self.tree)
        owners = {*parameter_keys(self.flat).values()}
        origins = [saved.get(path) for path in self.leaves]
        is_known = all(
            (origin := origins[at]) is not None
            and (origin.owner in owners or leaves.shapes[at] == ())
            for section in self.flat.sections
            if section.role == "optimizer"
            for at in range(section.start, section.stop)
        )
        found = known_origins(leaves, origins) if is_known else find_origins(leaves)
        return resolve_origins(found, rules)

    def filled(self, plan: "Plan", values: Mapping[str, Any]) -> Any:
        new, made, resolution = self.leaves | dict(values), plan.made, plan.resolution
        if self.traced is None:
            tree = self.tree
            if jax.ShapeDtypeStruct in map(type, self.flat.leaves):
                tree = _with_new_objects(tree)
            result = with_leaves(tree, [*new.values()])
        else:
            if made:
                new |= _made(self.traced, list(new), made)
            result = self.traced.rebuild([*new.values()])
        if resolution is None or not self.flat.annotations:
            return result
        return settle_metadata(result, resolution)


def opened(target: Any) -> Target:
    is_object = is_nnx_object(target) or is_train_state(target)
    traced = trace(target) if callable(target) and not is_object else None
    tree = target if traced is None else traced.abstract
    flat = flatten(tree, None if traced is None else traced.names)
    return Target(tree, flat, traced)


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """One leaf to restore.

    `stored` describes it in the checkpoint and `result` in the restored tree.
    `sharding` is None for a Python value or a NumPy array.
    """

    stored: Leaf
    result: Leaf
    sharding: Any

    def __str__(self) -> str:
        spec = getattr(self.sharding, "spec", self.sharding)
        return f"{self.stored} → {self.result}, {spec}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which leaves to read and initialize, and every problem.

    `made` leaves are initialized by the target's function in the sharding given here.
    `resolution` is None without rules, or if they do not fit.
    """

    reads: Mapping[str, Read]
    made: Mapping[str, Any]
    problems: Sequence[str]
    resolution: Resolution | None


@dataclasses.dataclass(frozen=True)
class Offer:
    """What a checkpoint has for a target, by the paths of the target.

    `absent` says why it lacks a leaf, `faults` why one that it has cannot be made.
    """

    leaves: Mapping[str, Leaf]
    absent: Mapping[str, str] = dataclasses.field(default_factory=dict)
    faults: Mapping[str, str] = dataclasses.field(default_factory=dict)
    problems: Sequence[str] = ()


def join(
    offer: Offer,
    target: Target,
    options: Options,
    resolve: Callable[[], Resolution] | None,
) -> Plan:
    """Plan which leaves of a checkpoint to restore.

    Without rules (`resolve` is None), the target's own shardings are used. Rules need
    to fit only the leaves that are restored.
    """
    leaves, selection = offer.leaves, options.selection
    every = {**leaves, **target.leaves}
    resolution, misfits, shardings = None, [], {}
    if resolve is not None:
        others = {path for path in every if path not in selection}
        resolution, misfits = _resolved(resolve, others)
    if resolution is not None:
        pairs = zip(resolution.paths, resolution.sharding_list(), strict=True)
        shardings = dict(pairs)
    all_problems = [*misfits, *selection.useless(every), *offer.problems]
    reads: dict[str, Read] = {}
    made: dict[str, Any] = {}
    for path, value in target.leaves.items():
        sharding = shardings.get(path)
        lacking = offer.absent.get(path, "is in the target, not in the checkpoint")
        try:
            if path not in selection:
                _check_kept(value, "include or exclude leaves it out")
            elif path in offer.faults:
                raise CheckpointError(offer.faults[path])
            elif path in leaves:
                leaf = leaf_of(path, value)
                if leaf is None:
                    kind = type(value).__qualname__
                    raise CheckpointError(f"the {kind} in the target is not an array")
                if resolve is None:
                    sharding = _own_sharding(leaf, value)
                result = result_of(leaves[path], leaf, options.dtype_of(path))
                if sharding is None and leaf.is_numpy:
                    result = dataclasses.replace(result, is_numpy=True)
                if result.is_python or result.is_numpy:
                    sharding = None
                reads[path] = Read(leaves[path], result, sharding)
            elif options.missing == "keep":
                _check_kept(value, lacking)
            else:
                is_traced = target.traced is not None
                _check_init(lacking, options, is_traced and resolve is not None)
                made[path] = sharding
        # A ValueError is JAX's, about a sharding that does not fit.
        except ValueError as error:
            shape = leaves[path].shape if path in leaves else np.shape(value)
            all_problems.append(f"{path} {show_shape(shape)}: {error}")
    return Plan(reads, made, all_problems, resolution)


def _resolved(
    resolve: Callable[[], Resolution], left_out: Container[str]
) -> tuple[Resolution | None, list[str]]:
    """The resolution of a tree, and its problems with leaves that are restored."""
    try:
        return resolve(), []
    except ResolveError as error:
        texts = [
            text
            for text in error.problems or [str(error)]
            if text.split(" ")[0].strip(":") not in left_out
        ]
        return None if texts else error.resolution, texts


def _own_sharding(leaf: Leaf, value: Any) -> Any:
    if leaf.is_python or leaf.is_numpy:
        return None
    sharding = value.sharding
    if sharding is None or isinstance(getattr(sharding, "mesh", None), AbstractMesh):
        raise CheckpointError(
            "the target has no sharding on devices for it; pass layout_map="
        )
    sharding.shard_shape(leaf.shape)  # raises ValueError
    return sharding


def _check_kept(value: Any, why: str) -> None:
    if isinstance(value, jax.ShapeDtypeStruct):
        raise CheckpointError(
            f"{why}, and the target is abstract, so there is no value to keep; give a "
            "concrete target"
        )


def _check_init(why: str, options: Options, is_makeable: bool) -> None:
    """Raise if a leaf that the checkpoint lacks is not to be made, or cannot be."""
    if options.missing == "error":
        raise CheckpointError(why)
    if not is_makeable:
        raise CheckpointError(
            f'{why}; missing="init" needs a function as target, which makes it '
            "(lambda: Model(rngs=nnx.Rngs(0))), and rules, which say where it goes"
        )


# ------------------------------------------------------------------- the target


def _made(
    traced: Traced, names: Sequence[str], shardings: Mapping[str, Any]
) -> dict[str, Any]:
    paths = traced.values_of(names)
    values, _ = arrays_of(traced, [shardings.get(path) for path in paths])
    made = [path for path in paths if path in shardings]
    return dict(zip(made, values, strict=True))


def _with_new_objects(tree: Any) -> Any:
    """Return the tree with each abstract NNX object replaced by a new object."""
    nodes, treedef = jax.tree.flatten(tree, is_leaf=is_nnx_object)
    abstract = [
        at
        for at, node in enumerate(nodes)
        if is_nnx_object(node)
        and jax.ShapeDtypeStruct in map(type, jax.tree.leaves(nnx_state(node)))
    ]
    # Split together, so that what they share stays shared; the identity makes new
    # Variables, where the State still has those of the target.
    graphdef, state = nnx_split([nodes[at] for at in abstract])
    copies = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf, state))
    for at, copy in zip(abstract, copies, strict=True):
        nodes[at] = copy
    return jax.tree.unflatten(treedef, nodes)
