"""flm.checkpoint.verify."""

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from flax_layoutmap._core.checksums import checksums
from flax_layoutmap._core.errors import CheckpointError, visible
from flax_layoutmap._show.progress import shown_progress
from flax_layoutmap._show.table import human_bytes
from flax_layoutmap.checkpoint import _orbax
from flax_layoutmap.checkpoint._leaves import Leaf, problem_list
from flax_layoutmap.checkpoint._places import absolute, find
from flax_layoutmap.checkpoint._read import changed
from flax_layoutmap.checkpoint._record import check_intact
from flax_layoutmap.checkpoint._stored import Stored, no_checksums, open_checkpoint

_HOST_MEMORY = 1 << 29


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
    host_memory: int = _HOST_MEMORY,
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
        host_memory: bytes of arrays to read at a time. A larger leaf is read alone,
            but whole.
        progress: whether process 0 shows on stderr how much has been read; None: as
            in `restore`.

    Returns:
        How much was compared.

    Raises:
        CheckpointError: leaves cannot be read or are not as they were saved (one error
            names all of them), or there are no checksums to compare with.

    Example:
        >>> import tempfile, jax.numpy as jnp, flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap("data=-1")
        >>> layout_map["w"] = ("data", None)
        >>> path = tempfile.mkdtemp() + "/weights"
        >>> tree = layout_map.place({"w": jnp.ones((8, 4)), "step": 3})
        >>> flm.checkpoint.save(path, tree, layout_map=layout_map)
        >>> flm.checkpoint.verify(path).leaves
        2

    Plain JAX: none; Orbax restores an array with a flipped bit as it is.
    """
    place = find(absolute(path), step, newest=True)
    stored = open_checkpoint(place, item)
    check_intact(stored.custom, stored.where)
    recorded = stored.record.checksums
    if recorded is None:
        raise CheckpointError(no_checksums(stored))
    leaves = [leaf for leaf in stored.leaves.values() if not leaf.is_empty]
    size = {leaf.path: _bytes(stored.held[leaf.path]) for leaf in leaves}
    share = leaves[jax.process_index() :: jax.process_count()]
    total, done, problems = sum(size[leaf.path] for leaf in share), 0, []
    with shown_progress(f"verifying {place.path}", total, progress, lambda: done):
        for portion in _portions(share, size, host_memory):
            problems += _problems(stored, portion, recorded)
            done += sum(size[leaf.path] for leaf in portion)
    problems = _of_all_processes(problems)
    if problems:
        raise problem_list(f"the checkpoint {place.path} is damaged", problems)
    return Verified(place.path, len(leaves), sum(size.values()))


def _portions(
    leaves: Sequence[Leaf], size: Mapping[str, int], limit: int
) -> Iterator[list[Leaf]]:
    """Leaves in groups of at most `limit` bytes; a larger one is alone."""
    portion: list[Leaf] = []
    for leaf in leaves:
        held = sum(size[other.path] for other in portion)
        if portion and held + size[leaf.path] > limit:
            yield portion
            portion = []
        portion.append(leaf)
    if portion:
        yield portion


def _problems(
    stored: Stored, leaves: Sequence[Leaf], recorded: Mapping[str, str]
) -> list[str]:
    """Read leaves and list the problems with them."""
    wanted: dict[str, Any] = dict.fromkeys(stored.held, ...)
    for leaf in leaves:
        is_value = leaf.kind in ("int", "float", "string")
        wanted[leaf.path] = stored.held[leaf.path] if is_value else np.ndarray
    try:
        values = _orbax.read_arrays(
            stored.where, wanted, stored.tree, item=stored.item, alone=True
        )
    except CheckpointError as error:
        if len(leaves) == 1:
            return [f"{leaves[0].name}: {error}"]
        return [text for leaf in leaves for text in _problems(stored, [leaf], recorded)]
    sums = checksums({leaf.path: values[leaf.path] for leaf in leaves}, alone=True)
    return changed(leaves, sums, recorded)


def _bytes(held: Any) -> int:
    """Bytes of an array, by its metadata; 0 for a Python value."""
    if not hasattr(held, "shape"):
        return 0
    return math.prod(held.shape) * np.dtype(held.dtype).itemsize


def _of_all_processes(problems: list[str]) -> list[str]:
    """Gather the problems of all processes."""
    if jax.process_count() == 1:
        return problems
    from jax.experimental import multihost_utils

    text = np.frombuffer(json.dumps(problems).encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.int32(text.size)))
    row = np.zeros(int(sizes.max()), np.uint8)
    row[: text.size] = text
    rows = np.asarray(multihost_utils.process_allgather(row))
    return [
        problem
        for line, count in zip(rows, sizes.ravel(), strict=True)
        for problem in json.loads(bytes(line[:count]))
    ]
