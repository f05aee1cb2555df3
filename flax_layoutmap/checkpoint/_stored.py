"""Read the metadata of a checkpoint: its leaves by their canonical paths.

The canonical path of a leaf is the one it has in a live tree: without the `value` that
NNX Variables and Linen boxes add. In a checkpoint that Orbax wrote without us, sections
are known by the names that Flax, optax, T5X and MaxText give them: `params` and `model`
hold parameters, `opt_state` and `optimizer` the state of an optimizer, whose leaves
belong to the parameters that their paths end with.
"""

import dataclasses
import functools
import re
from collections.abc import Container, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap._resolve.leaves import Leaves
from flax_layoutmap._resolve.origins import find_origins
from flax_layoutmap._tree.paths import Flat, Role, Section, parameter_keys
from flax_layoutmap.checkpoint import _orbax, _record
from flax_layoutmap.checkpoint._leaves import Leaf
from flax_layoutmap.checkpoint._places import Place
from flax_layoutmap.checkpoint._rename import Rename, renamed

_OPTIMIZER = ("optimizer", "optimizer_state", "opt")
# What the random state of an NNX stream is called, and where.
_STREAM, _RANDOM = "rngs", ("count", "key")


@dataclasses.dataclass(frozen=True)
class Stored:
    """A checkpoint whose metadata has been read.

    Attributes:
        place: where it is.
        item: the folder that holds the tree; None where that is the place itself.
        record: what flax_layoutmap wrote into it, or what its paths tell.
        is_ours: whether flax_layoutmap wrote it.
        is_v1: whether Orbax's v1 API did.
        leaves: path that the leaf goes by → leaf, with its path in the checkpoint; in
            the order of the tree that was saved.
        held: path in the checkpoint → Orbax's own metadata, of what Orbax holds.
        tree: the tree of these, as Orbax has it.
        custom: all custom metadata.
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
        """Its path."""
        return self.place.path

    @functools.cached_property
    def by_source(self) -> dict[str, Leaf]:
        """Path in the checkpoint → leaf."""
        return {leaf.path: leaf for leaf in self.leaves.values()}


def open_checkpoint(
    place: Place, item: str | None = None, rename: Rename = ()
) -> Stored:
    """Read the metadata of a checkpoint.

    Args:
        place: where it is.
        item: which of several trees in it.
        rename: other names for its leaves.

    Raises:
        CheckpointError: there is none, it is damaged, or the names do not fit.
    """
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
        record = _renamed_record(record, dict(zip(leaves, new, strict=True)))
        leaves = dict(zip(new, leaves.values(), strict=True))
    return Stored(
        place, read.item, record, ours, read.is_v1, leaves, held, read.tree, read.custom
    )


def _recorded(
    where: str, record: _record.Record, held: dict[str, Any]
) -> dict[str, Leaf]:
    leaves: dict[str, Leaf] = {}
    for path in record.paths:
        metadata = held.get(path)
        if (metadata is None) != record.is_empty(path):
            raise CheckpointError(
                f"the checkpoint {where} is damaged: Orbax has "
                f"{'no' if metadata is None else 'an unexpected'} leaf {path!r}"
            )
        try:
            leaves[path] = record.leaf(path, metadata)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint {where}: leaf {path!r} cannot be read: {error}"
            ) from error
    extra = sorted(set(held) - set(leaves))
    if extra:
        raise CheckpointError(
            f"the checkpoint {where} is damaged: Orbax holds leaves that its metadata "
            f"does not list, such as {extra[0]!r}"
        )
    return leaves


def _named(where: str, held: dict[str, Any]) -> dict[str, Leaf]:
    """The leaves of a checkpoint that has no record, by their canonical names."""
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
    flat = flat_of(list(leaves))
    return _record.Record(flat.full_paths(), origins_of(flat, leaves), flat)


def _renamed_record(record: _record.Record, names: Mapping[str, str]) -> _record.Record:
    """The record of the same leaves under other names; sections go by these.

    Args:
        record: the record.
        names: path → new path, for all leaves.
    """
    old, flat = record.flat, flat_of(list(names.values()))
    flat.annotations.update(old.annotations)
    flat.fixed.update(old.fixed)
    keys = parameter_keys(flat)
    owners = {key: keys.get(at) for at, key in parameter_keys(old).items()}
    origins = {
        names[path]: dataclasses.replace(
            origin, owner=owners.get(origin.owner or "", origin.owner)
        )
        for path, origin in record.origins.items()
    }
    special = {names[path]: entry for path, entry in record.special.items()}
    return dataclasses.replace(
        record,
        paths=list(names.values()),
        origins=origins,
        flat=flat,
        special=special,
    )


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
    """The leaf that Orbax's metadata describes; None if it is of no known kind."""
    if hasattr(held, "shape"):
        dtype = np.dtype(held.dtype)
        # Only arrays of JAX have a recorded sharding.
        is_numpy = not hasattr(held, "sharding_metadata")
        return Leaf(path, "array", tuple(held.shape), dtype, is_numpy=is_numpy)
    if isinstance(held, bool):
        return None
    if isinstance(held, int):
        return Leaf(path, "int")
    if isinstance(held, float):
        return Leaf(path, "float")
    return Leaf(path, "string") if isinstance(held, str) else None


def flat_of(names: Sequence[str]) -> Flat:
    """The tree that has these paths, cut into sections by their names."""
    flat = Flat()
    optimizers = _nnx_optimizers(names)
    ends = [_section(name, optimizers) for name in names]
    for (prefix, role), run in groupby(ends):
        start = len(flat.paths)
        for _ in run:
            at = len(flat.paths)
            flat.paths.append(names[at].removeprefix(prefix))
            parts = names[at].split("/")
            if _STREAM in parts[:-1] and parts[-1] in _RANDOM:
                flat.fixed.add(at)
        flat.sections.append(Section(start, len(flat.paths), prefix, role))
    return flat


def origins_of(flat: Flat, leaves: Mapping[str, Leaf]) -> dict[str, Any]:
    """Path of each leaf of optimizer state → where it came from, by path and shape."""
    paths = flat.full_paths()
    shapes = [leaves[path].shape for path in paths]
    dtypes = [leaves[path].dtype for path in paths]
    found = find_origins(Leaves(flat, shapes, dtypes)).state or []
    return {
        path: origin
        for path, origin in zip(paths, found, strict=False)
        if origin is not None
    }


def _nnx_optimizers(names: Sequence[str]) -> set[str]:
    """The folders that hold `opt_state` and `step` alone, as an `nnx.Optimizer` does.

    A TrainState has parameters beside them.
    """
    parts = [name.split("/") for name in names]
    inside: dict[str, set[str]] = {
        "/".join(own[: own.index("opt_state")]): set()
        for own in parts
        if "opt_state" in own[:-1]
    }
    for own in parts:
        for at, part in enumerate(own):
            folder = "/".join(own[:at])
            if folder in inside:
                inside[folder].add(part)
    return {folder for folder, held in inside.items() if held == {"opt_state", "step"}}


def _section(name: str, optimizers: Container[str]) -> tuple[str, Role]:
    """The section that a leaf is in: how its path begins, and its role."""
    parts = name.split("/")
    own = parts[:-1]
    if parts[-1] == "step" and "/".join(own) in optimizers:
        return name.removesuffix("step"), "optimizer"
    if "opt_state" in own:
        return "/".join(parts[: own.index("opt_state") + 1]) + "/", "optimizer"
    if own and own[0] in _OPTIMIZER:
        return own[0] + "/", "optimizer"
    if "params" in own:
        last = len(own) - own[::-1].index("params")
        return "/".join(parts[:last]) + "/", "parameter"
    if own and own[0] == "model":
        return "model/", "parameter"
    return "", "parameter"


# ----------------------------------------------------- messages about checksums


def no_checksums(stored: Stored) -> str:
    """The problem of a checkpoint without checksums."""
    by = "with checksums=False, or by an older version"
    return (
        f"cannot verify {stored.where}: it has no checksums, as it was saved "
        f"{by if stored.is_ours else 'by Orbax alone'}; restore it and save it again "
        "with flm.checkpoint.save to have them"
    )


def not_as_saved(leaf: Leaf) -> str:
    """The problem of a leaf whose checksum is not the recorded one."""
    return (
        f"{leaf.name}: its data are not those that were saved; restore another "
        f"checkpoint, or the rest of this one: exclude={f'^{re.escape(leaf.path)}$'!r}"
    )


def unrecorded(leaf: Leaf) -> str:
    """The problem of a leaf without a checksum, where others have one."""
    return (
        f"{leaf.name}: there is no checksum of it in the metadata, which is damaged; "
        "restore another checkpoint, or this one with verify=False"
    )
