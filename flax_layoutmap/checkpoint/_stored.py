"""Read the metadata of a checkpoint: its leaves by their canonical paths.

The canonical path of a leaf is the one it has in a live tree: without the `value` that
NNX Variables and Linen boxes add. In a checkpoint that Orbax wrote without us, sections
are known by the names that Flax, optax, T5X and MaxText give them: `params` and `model`
hold parameters, `opt_state` and `optimizer` the state of an optimizer, whose leaves
belong to the parameters that their paths end with.
"""

import dataclasses
import os
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap._resolve.leaves import Leaves
from flax_layoutmap._resolve.origins import find_origins
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._tree.paths import Flat, Role, Section
from flax_layoutmap.checkpoint import _orbax, _record
from flax_layoutmap.checkpoint._leaves import Leaf, leaf_of
from flax_layoutmap.checkpoint._options import (
    Options,
    Rename,
    checked_options,
    renamed,
)
from flax_layoutmap.checkpoint._places import Place, find

_OPTIMIZER = ("optimizer", "optimizer_state", "opt")
# The folder and the leaves of an NNX random stream.
_STREAM, _RANDOM = "rngs", ("count", "key")


@dataclasses.dataclass(frozen=True)
class Stored:
    """A checkpoint whose metadata has been read.

    `leaves` maps names (after `rename`) to leaves with their path in the checkpoint, in
    the order of the saved tree. `held` maps paths in the checkpoint to Orbax's
    metadata, `tree` is the tree of these. `item` is the folder of the tree, None if
    that is the place itself. Without a record of ours, `record` is inferred from the
    paths.
    """

    place: Place
    item: str | None
    record: _record.Record
    is_ours: bool
    is_v1: bool
    leaves: dict[str, Leaf]
    held: dict[str, Any]
    tree: Any
    custom: dict[str, Any]

    @property
    def where(self) -> str:
        """Its directory."""
        return self.place.path


def open_checkpoint(
    place: Place, item: str | None = None, rename: Rename = ()
) -> Stored:
    """Read the metadata of a checkpoint, or of one of several trees in it."""
    read = _orbax.read_metadata(place.path, item)
    ours = _record.KEY in read.custom
    held = _orbax.leaves_of(read.tree, escaped=ours)
    if ours:
        record = _record.from_json(read.custom[_record.KEY], place.path)
        leaves = _recorded(place.path, record, held)
    else:
        leaves = _named(place.path, held)
        record = _guessed(leaves)
    if rename:
        new = renamed(list(leaves), rename)
        leaves = dict(zip(new, leaves.values(), strict=True))
        known = _guessed(leaves)
        record = dataclasses.replace(
            record, paths=known.paths, origins=known.origins, flat=known.flat
        )
    return Stored(
        place, read.item, record, ours, read.is_v1, leaves, held, read.tree, read.custom
    )


def resolve(
    path: str | os.PathLike[str],
    *,
    layout_map: Any = None,
    mesh: Any = None,
    step: int | str | None = None,
    item: str | None = None,
    rename: Any = None,
) -> Resolution:
    """Resolve the layout of every leaf of a checkpoint, without the model's code.

    Reads no array, and needs no devices: the mesh may be abstract.

    Args:
        path: a checkpoint, or a directory of steps (then its latest, unless `step`).
        layout_map: the rules; None: those that the checkpoint was saved with.
        mesh: the mesh for them; None: their own, or that of the save, abstract.
        step: as in `restore`.
        item: as in `restore`.
        rename: as in `restore`.

    Returns:
        The Resolution: read it with `.report()`, `.explain(path)`.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or it was saved
            without rules (or mesh) and none are given.
        ResolveError: its leaves do not fit the rules; all of them are listed.

    Example:
        >>> import tempfile, jax.numpy as jnp, flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap("data=-1")
        >>> layout_map["w"] = ("data", None)
        >>> path = tempfile.mkdtemp() + "/weights"
        >>> flm.checkpoint.save(path, {"w": jnp.ones((64, 8))}, layout_map=layout_map)
        >>> mesh = flm.DeviceMesh.abstract("data=16")
        >>> found = flm.checkpoint.resolve(path, mesh=mesh)
        >>> found["w"].shard_shape
        (4, 8)
    """
    checked = checked_options(path, layout_map=layout_map, mesh=mesh, rename=rename)
    place = find(checked.path, step, newest=True)
    stored = open_checkpoint(place, item, checked.rename)
    return stored.record.resolve(stored.leaves, _rules_for(stored, checked))


def _rules_for(stored: Stored, options: Options) -> RuleSet:
    """The rules on a mesh, by default those of the checkpoint."""
    rules, record, lacking = options.rules, stored.record, "a mesh; pass mesh="
    if rules is None:
        rules = record.rule_set(options.mesh or record.mesh)
        lacking = "rules; pass layout_map=" if rules is None else lacking
    elif rules.mesh is None and record.mesh is not None:
        rules = rules.on(record.mesh)
    if rules is None or rules.mesh is None:
        raise CheckpointError(f"{stored.where} was saved without {lacking}")
    return rules


def _recorded(
    where: str, record: _record.Record, held: dict[str, Any]
) -> dict[str, Leaf]:
    try:
        for path in record.paths:
            if (path in held) == record.is_empty(path):
                raise KeyError(path)
        leaves = {path: record.leaf(path, held.get(path)) for path in record.paths}
        if unknown := held.keys() - leaves.keys():
            raise KeyError(min(unknown))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint {where} is damaged: the metadata of flax_layoutmap does "
            f"not fit Orbax's: {error!r}; restore another checkpoint"
        ) from error
    return leaves


def _named(where: str, held: dict[str, Any]) -> dict[str, Leaf]:
    """The leaves of a checkpoint without a record, by canonical path."""
    leaves: dict[str, Leaf] = {}
    names = canonical_names(list(held))
    for name, (path, metadata) in zip(names, held.items(), strict=True):
        leaf = leaf_of_held(path, metadata)
        if leaf is None:
            raise CheckpointError(
                f"the checkpoint {where}: leaf {path!r} is of a kind that cannot be "
                f"restored: {metadata!r}"
            )
        leaves[name] = leaf
    return leaves


def _guessed(leaves: dict[str, Leaf]) -> _record.Record:
    """The record of leaves, from their paths and shapes alone."""
    flat = flat_of(list(leaves))
    paths = flat.full_paths()
    shapes = [leaves[path].shape for path in paths]
    dtypes = [leaves[path].dtype for path in paths]
    origins = find_origins(Leaves(flat, shapes, dtypes)).state or []
    known = {p: origin for p, origin in zip(paths, origins, strict=False) if origin}
    return _record.Record(paths, known, flat)


# -------------------------------------------- checkpoints that Orbax wrote without us


def canonical_names(paths: Sequence[str]) -> list[str]:
    """The path of each leaf in a live tree."""
    parents = [path.rpartition("/")[0] for path in paths]
    # A Variable holds nothing else; siblings make `value` an ordinary name.
    children: dict[str, int] = {}
    for path in paths:
        parent = ""
        for part in path.split("/"):
            here = f"{parent}/{part}"
            if here not in children:
                children[here] = 0
                children[parent] = children.get(parent, 0) + 1
            parent = here
    return [
        parent if path.endswith("/value") and children[f"/{parent}"] == 1 else path
        for path, parent in zip(paths, parents, strict=True)
    ]


def leaf_of_held(path: str, held: Any) -> Leaf | None:
    """The leaf that Orbax's metadata describes; None for an unknown kind."""
    if hasattr(held, "shape"):
        dtype = np.dtype(held.dtype)
        # Only arrays of JAX have a recorded sharding.
        is_numpy = not hasattr(held, "sharding_metadata")
        return Leaf(path, "array", tuple(held.shape), dtype, is_numpy=is_numpy)
    return None if isinstance(held, bool) else leaf_of(path, held)


def flat_of(names: Sequence[str]) -> Flat:
    """Flatten paths into sections, recognized by their names."""
    flat = Flat()
    for (prefix, role), run in groupby(map(_section, names)):
        start = len(flat.paths)
        for _ in run:
            at = len(flat.paths)
            flat.paths.append(names[at].removeprefix(prefix))
            parts = names[at].split("/")
            if _STREAM in parts[:-1] and parts[-1] in _RANDOM:
                flat.fixed.add(at)
        flat.sections.append(Section(start, len(flat.paths), prefix, role))
    return flat


def _section(name: str) -> tuple[str, Role]:
    """The section of a leaf: the prefix of its path, and its role."""
    parts = name.split("/")
    folders = parts[:-1]
    if "opt_state" in folders:
        return "/".join(parts[: folders.index("opt_state") + 1]) + "/", "optimizer"
    if folders and folders[0] in _OPTIMIZER:
        return folders[0] + "/", "optimizer"
    if "params" in folders:
        last = len(folders) - folders[::-1].index("params")
        return "/".join(parts[:last]) + "/", "parameter"
    if folders and folders[0] == "model":
        return "model/", "parameter"
    return "", "parameter"


# ----------------------------------------------------- messages about checksums


def no_checksums(stored: Stored) -> str:
    """The message that a checkpoint has no checksums."""
    by = "with checksums=False, or by an older version"
    return (
        f"cannot verify {stored.where}: it has no checksums, as it was saved "
        f"{by if stored.is_ours else 'by Orbax alone'}; restore it and save it again "
        "with flm.checkpoint.save to have them"
    )
