"""Plan a restore: join the leaves of a checkpoint with those of the target."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding

from flax_layoutmap._birth.slices import arrays_of
from flax_layoutmap._core.errors import ResolveError
from flax_layoutmap._place.annotations import settle_metadata
from flax_layoutmap._place.place import with_leaves
from flax_layoutmap._resolve.leaves import leaves_of
from flax_layoutmap._resolve.origins import Origin, find_origins, known_origins
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.resolve import resolve_origins
from flax_layoutmap._rules.records import show_shape
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._tree.flatten import flatten, plain_tree
from flax_layoutmap._tree.flax_internals import is_nnx_object, nnx_split, nnx_state
from flax_layoutmap._tree.paths import Flat, is_train_state, parameter_keys, unescape
from flax_layoutmap._tree.trace import Traced, trace
from flax_layoutmap.checkpoint._leaves import Leaf, leaf_of, nested, result_of
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
        """Path → leaf, concrete or abstract."""
        return dict(zip(self.flat.full_paths(), self.flat.leaves, strict=True))

    def resolve(self, rules: Any, saved: Mapping[str, Origin]) -> Resolution:
        """Resolve its leaves.

        `saved` has the origins of the checkpoint's optimizer state. Where it knows all
        of the target's, they are taken, which needs no trace of the optimizer.
        """
        leaves = leaves_of(self.flat, self.tree)
        origins = [saved.get(path) for path in self.leaves]
        owners = {None, *parameter_keys(self.flat).values()}
        for section in self.flat.sections:
            for at in range(section.start, section.stop):
                origin = origins[at]
                if section.role != "optimizer":
                    origins[at] = None
                elif origin is None or origin.owner not in owners:
                    return resolve_origins(find_origins(leaves), rules)
                elif origin.owner is None and leaves.shapes[at] != ():
                    return resolve_origins(find_origins(leaves), rules)
        return resolve_origins(known_origins(leaves, origins), rules)

    def filled(
        self,
        values: Mapping[str, Any],
        made: Mapping[str, Any],
        resolution: Resolution | None,
    ) -> Any:
        """Return the target with the values that were read.

        `made` gives the shardings of leaves that the target's function initializes.
        """
        new = self.leaves | dict(values)
        if made and self.traced is not None:
            new |= _made(self.traced, self.flat, made)
        if self.traced is not None:
            result = self.traced.rebuild([*new.values()])
        else:
            kinds = set(map(type, self.flat.leaves))
            is_abstract = jax.ShapeDtypeStruct in kinds
            tree = _with_new_objects(self.tree) if is_abstract else self.tree
            result = with_leaves(tree, [*new.values()], self.flat.treedef)
        if resolution is None or not (
            self.flat.annotations or resolution.rules.optimizer
        ):
            return result
        return settle_metadata(result, resolution)


def opened(target: Any, rules: RuleSet | None = None) -> Target:
    """Flatten a tree, or trace a function that makes one; for these rules, if any."""
    is_object = is_nnx_object(target) or is_train_state(target)
    traced = trace(target) if callable(target) and not is_object else None
    tree = target if traced is None else traced.abstract
    flat = flatten(tree) if rules is None else flatten(tree, rules.matcher.fold_part)
    if flat.treedef is None:
        flat.treedef = jax.tree.structure(plain_tree(tree))
    return Target(tree, flat, traced)


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """One leaf to restore.

    `stored` describes it in the checkpoint and `result` in the restored tree.
    `sharding` is None for a Python value or a NumPy array. `exactly` refuses a dtype
    conversion that changes a number.
    """

    stored: Leaf
    result: Leaf
    sharding: Any
    exactly: bool = True


@dataclasses.dataclass(frozen=True)
class Held:
    """The leaves of a checkpoint, by path in the tree to restore.

    `absent` maps paths of the target that the checkpoint lacks to the reason, `sources`
    maps paths to the origin of their data (a suffix for messages), and `ignored` lists
    unused paths of the checkpoint.
    """

    leaves: Mapping[str, Leaf]
    absent: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which leaves to read, keep and initialize, and every problem.

    `kept` leaves keep the target's values, `made` ones are initialized by the target's
    function in the sharding given here. Nothing is read if there is a problem. `target`
    is None for a nested dict; `rules` is None if the target's own shardings are used,
    and `resolution` also if the rules do not fit.
    """

    reads: Mapping[str, Read]
    kept: tuple[str, ...]
    made: Mapping[str, Any]
    ignored: tuple[str, ...]
    problems: tuple[str, ...]
    target: Target | None
    rules: RuleSet | None
    resolution: Resolution | None

    def tree(self, values: Mapping[str, Any]) -> Any:
        """Return the restored tree, given the values that were read."""
        if self.target is None:
            return nested(values, unescape)
        return self.target.filled(values, self.made, self.resolution)


def join(
    held: Held,
    target: Target | None,
    rules: RuleSet | None,
    resolve: Callable[[], Resolution],
    options: Options,
) -> Plan:
    """Plan which leaves of a checkpoint to restore.

    Without rules, the target's own shardings are used; without a target, every selected
    leaf is restored. Rules need to fit only the leaves that are restored.
    """
    wanted = {} if target is None else target.leaves
    selection = options.selection
    problems, resolution = selection.useless([*held.leaves, *wanted]), None
    if rules is not None:
        try:
            resolution = resolve()
        except ResolveError as error:
            every = {*held.leaves, *wanted}
            left_out = {path for path in every if path not in selection}
            texts = error.problems or [str(error)]
            texts = [t for t in texts if t.split(" ")[0].strip(":") not in left_out]
            problems += texts
            resolution = None if texts else error.resolution
    shardings: dict[str, Any] = {}
    if resolution is not None:
        pairs = zip(resolution.paths, resolution.sharding_list(), strict=True)
        shardings = dict(pairs)
    draft = _Draft(held, rules, options, shardings, [*problems, *held.problems])
    if target is None:
        for path in filter(selection.__contains__, held.leaves):
            draft.read(path, None, shardings.get(path))
    for path, value in wanted.items():
        if path not in selection:
            draft.keep(path, value, "include or exclude leaves it out")
        elif path in held.leaves:
            draft.join(path, value)
        elif path in held.absent:
            can_make = target is not None and target.traced is not None
            draft.miss(path, value, held.absent[path], can_make)
    return Plan(
        draft.reads,
        tuple(draft.kept),
        draft.made,
        held.ignored,
        tuple(draft.problems),
        target,
        rules,
        resolution,
    )


@dataclasses.dataclass
class _Draft:
    """A plan under construction."""

    held: Held
    rules: RuleSet | None
    options: Options
    shardings: Mapping[str, Any]
    problems: list[str]
    reads: dict[str, Read] = dataclasses.field(default_factory=dict)
    kept: list[str] = dataclasses.field(default_factory=list)
    made: dict[str, Any] = dataclasses.field(default_factory=dict)

    def join(self, path: str, value: Any) -> None:
        """Add a leaf that both sides have."""
        leaf = leaf_of(path, value)
        if leaf is None:
            kind = type(value).__qualname__
            self.problems.append(f"{path}: the {kind} in the target is not an array")
            return
        sharding, problem = self.shardings.get(path), None
        if self.rules is None:
            sharding, problem = _own_sharding(leaf, value)
        if problem is not None:
            self.problems.append(f"{leaf.name}: {problem}")
        else:
            self.read(path, leaf, sharding)

    def read(self, path: str, target: Leaf | None, sharding: Any) -> None:
        """Add a leaf to restore, or the reason why it cannot be."""
        stored = self.held.leaves[path]
        dtype = self.options.dtype_of(path)
        result = result_of(stored, target, dtype)
        if isinstance(result, str):
            source = self.held.sources.get(path, "")
            self.problems.append(f"{stored.name}: {result}{source}")
            return
        if sharding is None and target is not None and target.is_numpy:
            result = dataclasses.replace(result, is_numpy=True)
        if result.is_python or result.is_numpy:
            sharding = None
        self.reads[path] = Read(stored, result, sharding, exactly=dtype is None)

    def keep(self, path: str, value: Any, why: str) -> None:
        """Add a leaf that keeps the target's value."""
        if isinstance(value, jax.ShapeDtypeStruct):
            self.problems.append(
                f"{_name(path, value)}: {why}, and the target is abstract, so there is "
                "no value to keep; give a concrete target"
            )
        self.kept.append(path)

    def miss(self, path: str, value: Any, why: str, can_make: bool) -> None:
        """Add a leaf that the checkpoint lacks."""
        if self.options.missing == "keep":
            self.keep(path, value, why)
        elif self.options.missing == "error":
            self.problems.append(f"{_name(path, value)}: {why}")
        elif not can_make:
            self.problems.append(
                f'{_name(path, value)}: {why}; missing="init" needs a function as '
                "target, which makes it: lambda: Model(rngs=nnx.Rngs(0))"
            )
        elif path not in self.shardings and not self.problems:
            self.problems.append(
                f'{_name(path, value)}: {why}; missing="init" needs layout_map= to say '
                "where it goes"
            )
        else:
            self.made[path] = self.shardings.get(path)


def _name(path: str, value: Any) -> str:
    """Path and shape: the beginning of a message."""
    return f"{path} {show_shape(np.shape(value))}"


# ------------------------------------------------------------------- the target


def _made(traced: Traced, flat: Flat, shardings: Mapping[str, Any]) -> dict[str, Any]:
    """Initialize some of the leaves of a traced function in their shards."""
    paths = traced.values_of(flat.full_paths())
    wanted = [shardings.get(path) for path in paths]
    values, _ = arrays_of(traced, wanted)
    names = [path for path in paths if path in shardings]
    return dict(zip(names, values, strict=True))


def _with_new_objects(tree: Any) -> Any:
    """Return the tree with each abstract NNX object replaced by a new object."""
    nodes, treedef = jax.tree.flatten(tree, is_leaf=is_nnx_object)
    abstract = [
        at
        for at, node in enumerate(nodes)
        if is_nnx_object(node)
        and any(
            isinstance(leaf, jax.ShapeDtypeStruct)
            for leaf in jax.tree.leaves(nnx_state(node))
        )
    ]
    if not abstract:
        return tree
    # Split together, so that what they share stays shared; the identity makes new
    # Variables, where the State still has those of the target.
    graphdef, state = nnx_split([nodes[at] for at in abstract])
    copies = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf, state))
    for at, copy in zip(abstract, copies, strict=True):
        nodes[at] = copy
    return jax.tree.unflatten(treedef, nodes)


def _own_sharding(leaf: Leaf, value: Any) -> tuple[Any, str | None]:
    """The sharding of a leaf of the target, or the problem with it."""
    if leaf.is_python or leaf.is_numpy:
        return None, None
    sharding = value.sharding
    if sharding is None:
        return None, "the target has no sharding for it; pass layout_map="
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        return None, "the target's sharding has no devices; pass layout_map="
    try:
        sharding.shard_shape(leaf.shape)
    except ValueError as error:
        return None, f"the target's sharding does not fit it: {error}"
    return sharding, None
