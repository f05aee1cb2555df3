"""A checkpoint, as far as its metadata tells."""

import dataclasses
import functools
import re
from typing import Any

from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap.checkpoint import _foreign, _orbax, _record
from flax_layoutmap.checkpoint._leaves import Leaf
from flax_layoutmap.checkpoint._places import Place
from flax_layoutmap.checkpoint._rename import Rename, renamed


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
    """Reads the metadata of a checkpoint.

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
        record = record.renamed(dict(zip(leaves, new, strict=True)))
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
    names = _foreign.canonical_names(list(held))
    for name, (path, metadata) in zip(names, held.items(), strict=True):
        leaf = _foreign.leaf_of_held(path, metadata)
        if leaf is None:
            raise CheckpointError(
                f"the checkpoint {where}: leaf {path!r} is of a kind that cannot be "
                f"restored: {metadata!r}"
            )
        leaves[name] = leaf
    return leaves


def _guessed(leaves: dict[str, Leaf]) -> _record.Record:
    flat = _foreign.flat_of(list(leaves))
    return _record.Record(flat.full_paths(), _foreign.origins_of(flat, leaves), flat)


# ----------------------------------------------------- what is said of its damage


def no_checksums(stored: Stored) -> str:
    """What is said of a checkpoint that nothing can be compared with."""
    by = "with checksums=False, or by an older version"
    return (
        f"cannot verify {stored.where}: it has no checksums, as it was saved "
        f"{by if stored.is_ours else 'by Orbax alone'}; restore it and save it again "
        "with flm.checkpoint.save to have them"
    )


def not_as_saved(leaf: Leaf) -> str:
    """What is said of a leaf that has another checksum than the one recorded."""
    return (
        f"{leaf.name}: its data are not those that were saved; restore another "
        f"checkpoint, or the rest of this one: exclude={f'^{re.escape(leaf.path)}$'!r}"
    )


def unrecorded(leaf: Leaf) -> str:
    """What is said of a leaf without a checksum, where others have one."""
    return (
        f"{leaf.name}: there is no checksum of it in the metadata, which is damaged; "
        "restore another checkpoint, or this one with verify=False"
    )
