"""flm.checkpoint.verify."""

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from flax_layoutmap._core.checksums import checksums
from flax_layoutmap._core.errors import CheckpointError, visible
from flax_layoutmap._show.progress import shown_progress
from flax_layoutmap._show.table import human_bytes
from flax_layoutmap.checkpoint import _orbax
from flax_layoutmap.checkpoint._leaves import Leaf, problem_list
from flax_layoutmap.checkpoint._metadata import Stored, check_intact, open_checkpoint
from flax_layoutmap.checkpoint._places import absolute, find
from flax_layoutmap.checkpoint._read import changed


@dataclasses.dataclass(frozen=True)
class Verified:
    """The result of `verify` for an undamaged checkpoint.

    Attributes:
        path: its directory.
        leaves: how many leaves were read and compared.
        bytes: bytes of their arrays, uncompressed.
    """

    path: str
    leaves: int
    bytes: int

    def __str__(self) -> str:
        what = "1 leaf is" if self.leaves == 1 else f"{self.leaves} leaves are"
        return visible(f"{self.path}: {what} as saved ({human_bytes(self.bytes)})")


def verify(
    path: str | os.PathLike[str],
    *,
    step: int | str | None = None,
    item: str | None = None,
    host_memory: int = 1 << 29,
    progress: bool | None = None,
) -> Verified:
    """Read a checkpoint and compare it with the checksums in its metadata.

    Needs no mesh, no rules and no accelerator. In a job of several processes all of
    them call it, each reads a share of the leaves, and all get the same answer.

    Args:
        path: a checkpoint of `save` or `Checkpointer`, or a directory of steps.
        step: which step, a number or `"latest"`; None in a directory of steps is the
            latest.
        item: which tree, if the checkpoint holds several.
        host_memory: bytes of arrays to read at a time; a larger leaf is read alone.
        progress: as in `restore`.

    Raises:
        CheckpointError: leaves cannot be read or are not as they were saved (one error
            names all of them), or there are no checksums to compare with.

    Example:
        >>> import tempfile, jax.numpy as jnp, flax_layoutmap as flm
        >>> path = tempfile.mkdtemp() + "/weights"
        >>> flm.checkpoint.save(path, {"w": jnp.ones((8, 4)), "step": 3})
        >>> flm.checkpoint.verify(path).leaves
        2

    Plain JAX: none; Orbax restores an array with a flipped bit as it is.
    """
    place = find(absolute(path), step, newest=True)
    stored = open_checkpoint(place, item)
    check_intact(stored.custom, stored.where)
    if stored.checksums is None:
        raise CheckpointError(stored.no_checksums())
    leaves = [leaf for leaf in stored.leaves.values() if not leaf.is_empty]
    problems: list[str] = []
    with shown_progress(f"verifying {place.path}", None, progress):
        share = leaves[jax.process_index() :: jax.process_count()]
        for portion in _portions(share, host_memory):
            problems += _problems(stored, portion)
    problems = _of_all_processes(problems)
    if problems:
        raise problem_list(f"the checkpoint {place.path} is damaged", problems)
    return Verified(place.path, len(leaves), sum(leaf.bytes for leaf in leaves))


def _portions(leaves: Sequence[Leaf], limit: int) -> Iterator[list[Leaf]]:
    """Leaves in groups of at most `limit` bytes; a larger one is alone."""
    portion: list[Leaf] = []
    used = 0
    for leaf in leaves:
        if portion and used + leaf.bytes > limit:
            yield portion
            portion, used = [], 0
        portion.append(leaf)
        used += leaf.bytes
    yield portion


def _problems(stored: Stored, leaves: Sequence[Leaf]) -> list[str]:
    """Read leaves and list the problems with them."""
    wanted: dict[str, Any] = dict.fromkeys(stored.held, ...)
    for leaf in leaves:
        held = stored.held[leaf.path]
        wanted[leaf.path] = np.ndarray if hasattr(held, "shape") else held
    place = (stored.where, wanted, stored.tree)
    try:
        values = _orbax.read_arrays(*place, item=stored.item, alone=True)
    except CheckpointError as error:
        if len(leaves) == 1:
            return [f"{leaves[0].name}: {error}"]
        return [text for leaf in leaves for text in _problems(stored, [leaf])]
    sums = checksums({leaf.path: values[leaf.path] for leaf in leaves}, alone=True)
    return changed(leaves, sums, stored.checksums or {})


def _of_all_processes(problems: list[str]) -> list[str]:
    if jax.process_count() == 1:
        return problems
    from jax.experimental.multihost_utils import process_allgather

    text = np.frombuffer(json.dumps(problems).encode(), np.uint8)
    longest = int(process_allgather(np.int32(text.size)).max())
    rows = process_allgather(np.pad(text, (0, longest - text.size)))
    return sum((json.loads(bytes(row).strip(b"\0")) for row in rows), [])
