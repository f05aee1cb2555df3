"""Plan a restore: join the leaves of a checkpoint with those of the target."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding

from flax_layoutmap._birth.arrays import arrays_of
from flax_layoutmap._core.errors import ResolveError
from flax_layoutmap._place.annotations import settle_metadata
from flax_layoutmap._place.place import with_leaves
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._rules.records import show_shape
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.flax_internals import is_nnx_object, nnx_split, nnx_state
from flax_layoutmap._tree.paths import Flat, is_train_state, unescape
from flax_layoutmap._tree.trace import Traced, trace
from flax_layoutmap.checkpoint._leaves import Leaf, leaf_of, result_of
from flax_layoutmap.checkpoint._options import Options
from flax_layoutmap.checkpoint._orbax import nested


@dataclasses.dataclass(frozen=True)
class Target:
    """A target whose leaves are known by their paths.

    Attributes:
        tree: the tree, which can be resolved; of a function, what it would make.
        flat: the same, flattened.
        traced: the trace of a function; None for a tree.
    """

    tree: Any
    flat: Flat
    traced: Traced | None

    @property
    def leaves(self) -> dict[str, Any]:
        """Path → leaf, concrete or abstract."""
        return dict(zip(self.flat.full_paths(), self.flat.leaves, strict=True))

    def filled(
        self,
        values: Mapping[str, Any],
        made: Mapping[str, Any],
        resolution: Resolution | None,
    ) -> Any:
        """The target with new values.

        Args:
            values: path → value, of what was read.
            made: path → sharding, of what the function of the target makes.
            resolution: the layouts, which annotations of the target then say too.
        """
        new = self.leaves | dict(values)
        if made and self.traced is not None:
            new |= _made(self.traced, self.flat, made)
        if self.traced is not None:
            result = self.traced.rebuild([*new.values()])
        else:
            result = with_leaves(_with_new_objects(self.tree), [*new.values()])
        return result if resolution is None else settle_metadata(result, resolution)


def opened(target: Any) -> Target:
    """Flatten a tree, or trace a function that makes one."""
    is_object = is_nnx_object(target) or is_train_state(target)
    traced = trace(target) if callable(target) and not is_object else None
    tree = target if traced is None else traced.abstract
    return Target(tree, flatten(tree), traced)


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """One leaf to restore.

    Attributes:
        stored: the leaf in the checkpoint, with its path there.
        result: the leaf to make of it.
        sharding: where it goes; None for a Python value or a NumPy array.
        exactly: whether a number has to be the same after a conversion.
    """

    stored: Leaf
    result: Leaf
    sharding: Any
    exactly: bool = True


@dataclasses.dataclass(frozen=True)
class Held:
    """What a checkpoint has, by the paths of the tree to restore.

    Attributes:
        leaves: path → the leaf that the checkpoint has for it.
        absent: path of the target → why the checkpoint has nothing for it.
        sources: path → what a message says of where its data are, if anything.
        ignored: paths of the checkpoint that nothing is done about.
        problems: what is wrong with these already, one text each.
    """

    leaves: Mapping[str, Leaf]
    absent: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to read, what to do about the rest, and what is wrong.

    Attributes:
        reads: path → leaf to restore.
        kept: paths of the target that keep its values.
        made: path of a leaf that the target makes itself → its sharding.
        ignored: paths of the checkpoint that nothing is done about.
        problems: one text each; nothing is read unless this is empty.
        target: what to restore into; None for a nested dict.
        rules: the rules, those of the checkpoint perhaps; None goes by the target.
        resolution: what the rules say; None without rules, or if they do not fit.
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
        """The result of a restore, of the values that were read."""
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
    """Plan to restore what a checkpoint has, leaf by leaf.

    Args:
        held: what it has.
        target: what to restore into; None: a nested dict of all that is selected.
        rules: the rules; None takes the shardings that the leaves of the target have.
        resolve: resolves the tree to restore by the rules, where there are some.
        options: the options of the restore.
    """
    wanted = {} if target is None else target.leaves
    problems, resolution = options.selection.useless([*held.leaves, *wanted]), None
    if rules is not None:
        try:
            resolution = resolve()
        except ResolveError as error:
            problems += error.problems or [str(error)]
    draft = _Draft(held, problems, rules, resolution, options)
    if target is None:
        for path in filter(options.selection.__contains__, held.leaves):
            draft.read(path, None, draft.shardings.get(path))
    for path, value in wanted.items():
        if path not in options.selection:
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


class _Draft:
    """A plan while it is made."""

    def __init__(
        self,
        held: Held,
        problems: list[str],
        rules: RuleSet | None,
        resolution: Resolution | None,
        options: Options,
    ) -> None:
        self.reads: dict[str, Read] = {}
        self.kept: list[str] = []
        self.made: dict[str, Any] = {}
        self.problems = [*problems, *held.problems]
        self.shardings: dict[str, Any] = {}
        if resolution is not None:
            pairs = zip(resolution.paths, resolution.sharding_list(), strict=True)
            self.shardings = dict(pairs)
        self._held, self._rules, self._options = held, rules, options

    def join(self, path: str, value: Any) -> None:
        """Note a leaf that both sides have."""
        leaf = leaf_of(path, value)
        if leaf is None:
            kind = type(value).__qualname__
            self.problems.append(f"{path}: the {kind} in the target is no array")
            return
        sharding, problem = self.shardings.get(path), None
        if self._rules is None:
            sharding, problem = _own_sharding(leaf, value)
        if problem is not None:
            self.problems.append(f"{leaf.name}: {problem}")
        else:
            self.read(path, leaf, sharding)

    def read(self, path: str, target: Leaf | None, sharding: Any) -> None:
        """Note a leaf to restore, or why it cannot be made of what is stored."""
        stored = self._held.leaves[path]
        dtype = self._options.dtype_of(path)
        result = result_of(stored, target, dtype)
        if isinstance(result, str):
            source = self._held.sources.get(path, "")
            self.problems.append(f"{stored.name}: {result}{source}")
            return
        if sharding is None and target is not None and target.is_numpy:
            result = dataclasses.replace(result, is_numpy=True)
        if result.is_python or result.is_numpy:
            sharding = None
        self.reads[path] = Read(stored, result, sharding, exactly=dtype is None)

    def keep(self, path: str, value: Any, why: str) -> None:
        """Note a leaf that keeps the value that the target has."""
        if isinstance(value, jax.ShapeDtypeStruct):
            self.problems.append(
                f"{_name(path, value)}: {why}, and the target is abstract, so there is "
                "no value to keep; give a concrete target"
            )
        self.kept.append(path)

    def miss(self, path: str, value: Any, why: str, can_make: bool) -> None:
        """Note a leaf that the checkpoint has nothing for."""
        if self._options.missing == "keep":
            self.keep(path, value, why)
        elif self._options.missing == "error":
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
    """Path and shape, as messages begin."""
    return f"{path} {show_shape(np.shape(value))}"


# ------------------------------------------------------------------- the target


def _made(traced: Traced, flat: Flat, shardings: Mapping[str, Any]) -> dict[str, Any]:
    """Compute some of the leaves of a traced function, in their shards."""
    paths = traced.values_of(flat.full_paths())
    wanted = [shardings.get(path) for path in paths]
    values, _ = arrays_of(traced, wanted, names=paths)
    names = [path for path in paths if path in shardings]
    return dict(zip(names, values, strict=True))


def _with_new_objects(tree: Any) -> Any:
    """The tree with a new object for each abstract NNX object, to be filled."""
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
    """The sharding that a leaf of the target has, or what is wrong with it."""
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
