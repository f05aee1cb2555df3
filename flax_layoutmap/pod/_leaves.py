"""The leaves of a step's arguments: paths, roles, and the results that update them."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._resolve.lay import fits
from flax_layoutmap._rules.records import show_shape, show_spec
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._step.arguments import Argument, spans
from flax_layoutmap._step.inputs import split_leaf
from flax_layoutmap._step.shardings import is_on_host
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.paths import Roots

# A collection of Linen, an argument or an entry of that name, and what is in them.
_CACHE = re.compile(r"(?:^|/)(?:(?:kv_)?caches?|cached_(?:key|value))(?:/|$)")


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """An argument of the lowered program."""

    path: str  # starts with the name of the argument
    role: str  # "parameter", "optimizer", "data" or "other"
    is_donated: bool
    is_on_host: bool = False


def leaves_of(
    arguments: Sequence[Argument], donated: Sequence[bool], avals: Sequence[Any]
) -> list[Leaf]:
    """Path, role and memory of the leaves of all arguments.

    `avals` are the leaves with the shardings of the program.
    """
    named: list[tuple[str, str]] = []
    for argument in arguments:
        flat = argument.flat
        paths = flat.full_paths()
        roles = ["data"] * len(paths)
        if argument.is_state:
            caches = _caches(argument, paths)
            for section in flat.sections:
                for at in range(section.start, section.stop):
                    role = "other" if at in caches else section.role
                    roles[at] = _role(role, argument.leaves[at])
        named += zip(paths, roles, strict=True)
    hosted = [is_on_host(getattr(aval, "sharding", None)) for aval in avals]
    return [
        Leaf(path, role, is_donated, is_hosted)
        for (path, role), is_donated, is_hosted in zip(
            named, donated, hosted, strict=True
        )
    ]


def _caches(argument: Argument, paths: Sequence[str]) -> set[int]:
    """Positions of key-value caches, by type or by name."""
    owners = enumerate(argument.owners())
    by_type = {at for at, owner in owners if isinstance(owner, nnx.Cache)}
    return by_type | {at for at, path in enumerate(paths) if _CACHE.search(path)}


def _role(role: str, leaf: Any) -> str:
    """Counters and random state are not parameters; quantised matrices are."""
    dtype = getattr(leaf, "dtype", np.int32)
    is_key = jax.numpy.issubdtype(dtype, jax.dtypes.extended)
    if role != "parameter" or jax.numpy.issubdtype(dtype, np.inexact):
        return role
    return "other" if is_key or np.ndim(leaf) < 2 else role


# ----------------------------------------------------------------------------- data


def split_data(argument: Argument, rules: RuleSet | None) -> Sequence[Any]:
    """The leaves of an argument that is data, split over the batch axes.

    A leaf that came with a sharding over axes of the mesh keeps its spec.
    """
    if rules is None or rules.mesh is None:
        return argument.leaves
    return [
        leaf if _is_number(leaf) else _split(argument, at, rules, rules.mesh)
        for at, leaf in enumerate(argument.leaves)
    ]


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, bool | int | float | complex)


def _split(
    argument: Argument, at: int, rules: RuleSet, mesh: DeviceMesh
) -> jax.ShapeDtypeStruct:
    leaf = argument.raw[at]
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
    given = _given(leaf, mesh)
    if given is None:
        plain = jax.ShapeDtypeStruct(leaf.shape, dtype)
        return split_leaf(argument, at, plain, rules)
    try:
        TensorLayout(given).shard_shape(leaf.shape)
    except LayoutError as error:
        raise LayoutError(
            f"{argument.path(at)} {show_shape(leaf.shape)} came with the sharding "
            f"{show_spec(given.spec)}, which does not fit the mesh {mesh}: {error}; "
            "pass its shape alone, jax.ShapeDtypeStruct(x.shape, x.dtype)"
        ) from error
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=given)


def _given(leaf: Any, mesh: DeviceMesh) -> NamedSharding | None:
    """The sharding that a leaf came with, if the mesh has its axes."""
    sharding, jax_mesh = getattr(leaf, "sharding", None), mesh.jax_mesh
    if not isinstance(sharding, NamedSharding):
        return None
    has_axes = set(sharding.mesh.axis_names) <= set(mesh.axis_names)
    return NamedSharding(jax_mesh, sharding.spec) if has_axes else None  # type: ignore[arg-type]


# -------------------------------------------------------------------------- results


def same_trees(result: Any, arguments: Sequence[Argument]) -> dict[int, int]:
    """Find the trees of the arguments in a tree of shapes, outer trees first.

    A dict may have more entries than the argument's, such as the loss. Returns the
    position of a leaf of the result → that over the leaves of all arguments.
    """
    shapes, treedef = jax.tree.flatten(result)
    shapes = [tuple(np.shape(shape)) for shape in shapes]
    left = dict(enumerate(zip(arguments, spans(arguments), strict=True)))
    updates: dict[int, int] = {}

    def equals(tree: Any, argument: Argument) -> bool:
        places, structure = jax.tree.flatten(tree)
        if structure != argument.treedef or not argument.is_container:
            return False
        made = [shapes[at] for at in places]
        return any(made) and made == [tuple(np.shape(x)) for x in argument.leaves]

    def look(tree: Any) -> None:
        for number, (argument, positions) in left.items():
            part = _entries(tree, argument)
            if equals(part, argument):
                del left[number]
                updates.update(zip(jax.tree.leaves(part), positions, strict=True))
                rest = () if part is tree else set(tree) - set(part)
                for key in sorted(rest, key=str):
                    look(tree[key])
                return
        if not jax.tree_util.all_leaves([tree]):
            for part in jax.tree.leaves(tree, is_leaf=lambda node: node is not tree):
                look(part)

    look(jax.tree.unflatten(treedef, range(len(shapes))))
    return updates


def _entries(tree: Any, argument: Argument) -> Any:
    """The entries of a dict that the argument has, if these are all of the argument."""
    if type(tree) is dict and type(argument.value) is dict:
        if tree.keys() > argument.value.keys():
            return {key: tree[key] for key in argument.value}
    return tree


# ------------------------------------------------------------------------- warnings


def notes_of(arguments: Sequence[Argument], rules: RuleSet) -> tuple[str, ...]:
    """Warnings about arguments that seem to be state and were taken for data."""
    notes = [
        f"rule {pattern!r} cannot apply: {argument.name} is a bare array, which has no "
        f'path. Wrap it: {{"{argument.name}": {argument.name}}}'
        for argument in arguments
        for pattern in _meant(argument, arguments, rules)
    ]
    containers = [each.name for each in arguments if each.is_container and each.leaves]
    if notes or any(each.is_state for each in arguments):
        return tuple(notes)
    if len(arguments) < 2 or not containers:
        return ()
    return (
        f"no rule shards a leaf of {', '.join(containers)}, so every argument is taken "
        "for data and split over the batch axes; name the state: "
        f'donate_argnames="{containers[0]}"',
    )


def _meant(
    argument: Argument, arguments: Sequence[Argument], rules: RuleSet
) -> Iterator[str]:
    """The first rule that matches only the name of an argument that is one array."""
    if argument.is_container or not argument.leaves:
        return
    ndim = np.ndim(argument.leaves[0])
    others = {each.name: each.value for each in arguments if each.is_container}
    used: set[int] | None = None
    for at in rules.matching(argument.name):
        layout = rules.rules[at].layout
        if layout.is_replicated or not fits(layout, ndim):
            continue
        if used is None:
            forms = flatten(Roots(others)).every_form()
            used = {number for path in forms for number in rules.matching(path)}
        if at not in used:
            yield rules.rules[at].pattern
            return
