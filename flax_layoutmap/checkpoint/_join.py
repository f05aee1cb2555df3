"""Plan a restore: join the leaves of a checkpoint with those of the target."""

import dataclasses
import functools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding

from flax_layoutmap._birth.slices import arrays_of
from flax_layoutmap._core.errors import CheckpointError, ResolveError
from flax_layoutmap._place.annotations import settle_metadata
from flax_layoutmap._place.place import with_leaves
from flax_layoutmap._resolve.leaves import leaves_of
from flax_layoutmap._resolve.origins import Origin, find_origins, known_origins
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.resolve import resolve_origins
from flax_layoutmap._rules.records import show_shape
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
        owners = set(parameter_keys(self.flat).values())
        origins: list[Origin | None] = [None] * len(self.leaves)
        paths, is_known = list(self.leaves), True
        for section in self.flat.sections:
            if section.role == "optimizer":
                for at in range(section.start, section.stop):
                    origins[at] = origin = saved.get(paths[at])
                    is_number = leaves.shapes[at] == ()
                    known = owners | {None} if is_number else owners
                    is_known &= origin is not None and origin.owner in known
        found = known_origins(leaves, origins) if is_known else find_origins(leaves)
        return resolve_origins(found, rules)

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


def opened(target: Any) -> Target:
    """Flatten a tree, or trace a function that makes one."""
    is_object = is_nnx_object(target) or is_train_state(target)
    traced = trace(target) if callable(target) and not is_object else None
    tree = target if traced is None else traced.abstract
    flat = flatten(tree)
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
class Plan:
    """Which leaves to read, keep and initialize, and every problem.

    `kept` leaves keep the target's values, `made` ones are initialized by the target's
    function in the sharding given here. Nothing is read if there is a problem. `target`
    is None for a nested dict; `resolution` is None if the target's own shardings are
    used, or if the rules do not fit.
    """

    reads: Mapping[str, Read]
    kept: tuple[str, ...]
    made: Mapping[str, Any]
    ignored: tuple[str, ...]
    problems: tuple[str, ...]
    target: Target | None
    resolution: Resolution | None

    def tree(self, values: Mapping[str, Any]) -> Any:
        """Return the restored tree, given the values that were read."""
        if self.target is None:
            return nested(values, unescape)
        return self.target.filled(values, self.made, self.resolution)


def join(
    leaves: Mapping[str, Leaf],
    target: Target | None,
    options: Options,
    resolve: Callable[[], Resolution],
    *,
    absent: Mapping[str, str],
    sources: Mapping[str, str] | None = None,
    ignored: Sequence[str] = (),
    problems: Sequence[str] = (),
) -> Plan:
    """Plan which leaves of a checkpoint to restore.

    Without rules, the target's own shardings are used; without a target, every selected
    leaf is restored. Rules need to fit only the leaves that are restored.

    Args:
        leaves: those of the checkpoint, by path in the tree to restore.
        target: the tree to restore into.
        options: those of the restore.
        resolve: resolves the tree to restore, if there are rules.
        absent: path of the target that the checkpoint lacks → why.
        sources: path → the origin of its data, as a suffix for messages.
        ignored: paths of the checkpoint that are not used.
        problems: what is already known not to fit.
    """
    wanted: dict[str, Any] = dict.fromkeys(leaves) if target is None else target.leaves
    every, selection = {**leaves, **wanted}, options.selection
    all_problems = [*selection.useless(every), *problems]
    resolution, shardings = None, {}
    if options.rules is not None:
        others = {path for path in every if path not in selection}
        resolution, misfits = _resolved(resolve, others)
        all_problems = [*misfits, *all_problems]
    if resolution is not None:
        pairs = zip(resolution.paths, resolution.sharding_list(), strict=True)
        shardings = dict(pairs)
    reads: dict[str, Read] = {}
    kept: list[str] = []
    made: dict[str, Any] = {}
    for path, value in wanted.items():
        is_selected, sharding = path in selection, shardings.get(path)
        try:
            if is_selected and path in leaves:
                of_target = () if target is None else (value,)
                reads[path] = _read(path, leaves[path], sharding, options, *of_target)
            elif is_selected and path in absent and options.missing != "keep":
                is_placed = path in shardings or bool(all_problems)
                _check_init(absent[path], target, options, is_placed)
                made[path] = sharding
            elif target is not None and (not is_selected or path in absent):
                left_out = "include or exclude leaves it out"
                _check_kept(value, absent[path] if is_selected else left_out)
                kept.append(path)
        except CheckpointError as error:
            leaf = leaves.get(path)
            name = leaf.name if leaf else f"{path} {show_shape(np.shape(value))}"
            all_problems.append(f"{name}: {error}{(sources or {}).get(path, '')}")
    found = tuple(all_problems)
    return Plan(reads, tuple(kept), made, tuple(ignored), found, target, resolution)


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


def _read(
    path: str, stored: Leaf, sharding: Any, options: Options, *value: Any
) -> Read:
    """How to restore a leaf to be like a value of the target, if there is one."""
    target = leaf_of(path, value[0]) if value else None
    if value and target is None:
        kind = type(value[0]).__qualname__
        raise CheckpointError(f"the {kind} in the target is not an array")
    if target is not None and options.rules is None:
        sharding = _own_sharding(target, value[0])
    dtype = options.dtype_of(path)
    result = result_of(stored, target, dtype)
    if sharding is None and target is not None and target.is_numpy:
        result = dataclasses.replace(result, is_numpy=True)
    if result.is_python or result.is_numpy:
        sharding = None
    return Read(stored, result, sharding, exactly=dtype is None)


def _own_sharding(leaf: Leaf, value: Any) -> Any:
    """The sharding of a leaf of the target; None for one on the host."""
    if leaf.is_python or leaf.is_numpy:
        return None
    sharding, advice = value.sharding, "pass layout_map="
    if sharding is None:
        raise CheckpointError(f"the target has no sharding for it; {advice}")
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        raise CheckpointError(f"the target's sharding has no devices; {advice}")
    try:
        sharding.shard_shape(leaf.shape)
    except ValueError as error:
        raise CheckpointError(
            f"the target's sharding does not fit it: {error}"
        ) from error
    return sharding


def _check_kept(value: Any, why: str) -> None:
    if isinstance(value, jax.ShapeDtypeStruct):
        raise CheckpointError(
            f"{why}, and the target is abstract, so there is no value to keep; give a "
            "concrete target"
        )


def _check_init(
    why: str, target: Target | None, options: Options, is_placed: bool
) -> None:
    """Raise if a leaf that the checkpoint lacks is not to be made, or cannot be."""
    if options.missing == "error":
        raise CheckpointError(why)
    if target is None or target.traced is None:
        raise CheckpointError(
            f'{why}; missing="init" needs a function as target, which makes it: '
            "lambda: Model(rngs=nnx.Rngs(0))"
        )
    if not is_placed:
        raise CheckpointError(
            f'{why}; missing="init" needs layout_map= to say where it goes'
        )


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
        and jax.ShapeDtypeStruct in map(type, jax.tree.leaves(nnx_state(node)))
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
