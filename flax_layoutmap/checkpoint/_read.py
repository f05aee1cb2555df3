"""Read the arrays of a checkpoint, and compare them with their checksums."""

import dataclasses
import functools
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from flax_layoutmap._core.checksums import checksums
from flax_layoutmap._core.errors import CheckpointError, visible
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._core.processes import Agreement
from flax_layoutmap._place.place import put
from flax_layoutmap._show.progress import shown_progress
from flax_layoutmap._show.table import human_bytes
from flax_layoutmap._tree.flax_internals import no_mesh
from flax_layoutmap.checkpoint import _orbax
from flax_layoutmap.checkpoint._join import Read
from flax_layoutmap.checkpoint._leaves import (
    TYPES,
    Leaf,
    in_portions,
    is_floating,
    key_data_shape,
    problem_list,
)
from flax_layoutmap.checkpoint._places import absolute, find
from flax_layoutmap.checkpoint._record import check_intact
from flax_layoutmap.checkpoint._stored import Stored, no_checksums, open_checkpoint
from flax_layoutmap.checkpoint._strategy import Portion, Reads, Way

# A process that cannot read waits this long for the others, which still read.
_PATIENCE_SECONDS = 1800.0


def read_leaves(reads: Reads, mesh: DeviceMesh | None) -> dict[str, Any]:
    """Read every leaf of a plan; return path → value, in its sharding.

    Each process reads on its own, then all agree that every read succeeded before the
    arrays are used. Only leaves that are broadcast along a mesh axis are read together.
    """
    made: dict[str, Any] = {}
    problems: list[str] = []

    def take(path: str, value: Any) -> None:
        read = reads.plan.reads[path]
        try:
            made[path] = _as_wanted(read, value, is_ours=reads.stored.is_ours)
        except CheckpointError as error:
            problems.append(f"{read.stored.name}: {error}")

    for portion in reads.portions:
        values = _values(reads, portion, mesh)
        problems += _damaged(reads, values)
        for path in portion.paths:
            value = values.pop(reads.plan.reads[path].stored.path)
            take(path, _placed(reads, path, value))
    for path, read in reads.plan.reads.items():
        if read.stored.is_empty:
            take(path, _empty(read.stored))
    if problems:
        raise problem_list(f"cannot restore {reads.stored.where}", problems)
    return {path: made[path] for path in reads.plan.reads}


def _values(reads: Reads, portion: Portion, mesh: DeviceMesh | None) -> dict[str, Any]:
    """Path in the checkpoint → the value that Orbax returns."""
    stored, axis = reads.stored, portion.replica_axis
    targets: dict[str, Any] = dict.fromkeys(stored.held, ...)
    for path in portion.paths:
        read = reads.plan.reads[path]
        held = stored.held[read.stored.path]
        as_stored = reads.recorded is not None
        targets[read.stored.path] = _orbax_target(
            read, held, reads.ways.get(path), as_stored
        )
    after = f"using what was read of {stored.where}"
    with Agreement(after, mesh, patience=_PATIENCE_SECONDS):
        values = _orbax.read_arrays(
            stored.where,
            targets,
            stored.tree,
            item=stored.item,
            replica_axis=axis,
            alone=axis is None,
        )
    sources = [reads.plan.reads[path].stored.path for path in portion.paths]
    return {source: values[source] for source in sources}


def _damaged(reads: Reads, values: dict[str, Any]) -> list[str]:
    """A problem for each value that differs from its checksum; a collective."""
    if reads.recorded is None:
        return []
    leaves = [leaf for leaf in reads.stored.leaves.values() if leaf.path in values]
    return _changed(leaves, checksums(values), reads.recorded)


def _changed(
    leaves: Sequence[Leaf], found: Mapping[str, str], recorded: Mapping[str, str]
) -> list[str]:
    """A problem for each leaf whose checksum is not the recorded one."""
    return [
        f"{leaf.name}: its data are not those that were saved; restore another "
        f"checkpoint, or the rest of this one: exclude={f'^{re.escape(leaf.path)}$'!r}"
        if leaf.path in recorded
        else f"{leaf.name}: there is no checksum of it in the metadata, which is "
        "damaged; restore another checkpoint, or this one with verify=False"
        for leaf in leaves
        if found[leaf.path] != recorded.get(leaf.path)
    ]


def _placed(reads: Reads, path: str, value: Any) -> Any:
    """Move an array to its final sharding and dtype."""
    read, way = reads.plan.reads[path], reads.ways.get(path)
    if way is not None and way.strategy == "aligned":
        value = _laid_out(value, read.sharding, None)
    if reads.recorded is not None and _is_to_be_cast(value, read):
        value = _laid_out(value, read.sharding, read.result.dtype)
    return value


def _orbax_target(read: Read, held: Any, way: Way | None, as_stored: bool) -> Any:
    """The target of a leaf for Orbax."""
    stored, result = read.stored, read.result
    if stored.kind in ("int", "float", "string"):
        return held
    if read.sharding is None or stored.is_python:
        return np.ndarray
    dtype = held.dtype if stored.kind == "key" or as_stored else result.dtype
    sharding = read.sharding if way is None else way.sharding
    return jax.ShapeDtypeStruct(held.shape, dtype, sharding=sharding)


def _is_to_be_cast(value: Any, read: Read) -> bool:
    is_array = isinstance(value, jax.Array) and read.result.kind == "array"
    # An array that Orbax has cut to 32 bits must not be cast further.
    return is_array and value.dtype == read.stored.dtype != read.result.dtype


def _laid_out(value: jax.Array, sharding: Any, dtype: Any) -> jax.Array:
    """Move an array to its final sharding and dtype, and delete the original."""
    with no_mesh(), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Some donated buffers were not usable"
        )
        new = _moved_to(sharding, dtype)(value)
    if not value.is_deleted():
        value.delete()
    return new


@functools.lru_cache(maxsize=256)
def _moved_to(sharding: Any, dtype: Any) -> Callable[[Any], Any]:
    def moved(x: Any) -> Any:
        return x if dtype is None else x.astype(dtype)

    donated = 0 if dtype is None else ()
    return jax.jit(moved, out_shardings=sharding, donate_argnums=donated)


def _empty(leaf: Leaf) -> Any:
    """An array without elements, which Orbax does not store."""
    if leaf.implementation is None:
        return np.zeros(leaf.shape, leaf.dtype)
    data = key_data_shape(leaf.implementation)
    return np.zeros((*leaf.shape, *data), np.uint32)


def _as_wanted(read: Read, value: Any, *, is_ours: bool) -> Any:
    """Convert what Orbax returned to the requested leaf, and check it."""
    result, sharding = read.result, read.sharding
    if result.kind == "key":
        return _checked(_keys(read, value), read)
    if result.is_python:
        value = value.item() if isinstance(value, np.ndarray) else value
        if not isinstance(value, TYPES[result.kind]):
            raise CheckpointError(f"Orbax read the {type(value).__name__} {value!r}")
        return value
    if not is_ours and result.kind == "array" and _is_keys(value):
        return value  # Orbax knows that they are keys; its metadata does not
    if isinstance(value, np.ndarray | bool | int | float | complex):
        value = _converted(np.asarray(value), result, read.exactly)
        if sharding is not None:
            value = put(value, sharding)
    return _checked(value, read)


def _is_keys(value: Any) -> bool:
    is_array = isinstance(value, jax.Array)
    return is_array and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)


def _converted(value: np.ndarray, result: Leaf, exactly: bool) -> np.ndarray:
    """Convert a host array to the result's dtype."""
    new = value.astype(result.dtype)
    exactly = exactly or not is_floating(result.dtype)
    if exactly and not np.array_equal(new, value, equal_nan=is_floating(value.dtype)):
        raise CheckpointError(
            f"the number {value} of the checkpoint is not exact in {result.dtype}; "
            'dtype="target" rounds a float'
        )
    return new


def _keys(read: Read, value: Any) -> Any:
    """Typed PRNG keys; Orbax returns key data if it has lost the implementation."""
    if isinstance(value, jax.Array) and value.dtype == read.stored.dtype:
        return value
    wrap = functools.partial(jax.random.wrap_key_data, impl=read.stored.implementation)
    return jax.jit(wrap, out_shardings=read.sharding)(value)


def _checked(value: Any, read: Read) -> Any:
    """Check shape, dtype and sharding of an array."""
    result, sharding = read.result, read.sharding
    if isinstance(value, jax.Array):
        placed = sharding is not None
        placed = placed and value.sharding.is_equivalent_to(sharding, value.ndim)
    else:
        placed = isinstance(value, np.ndarray) and sharding is None
    right = placed and (value.shape, value.dtype) == (result.shape, result.dtype)
    if not right:
        found = getattr(value, "sharding", "no sharding")
        raise CheckpointError(
            f"Orbax read {type(value).__name__} {getattr(value, 'dtype', '')} "
            f"{getattr(value, 'shape', '')} with {found}, asked for {result} with "
            f"{sharding}"
        )
    return value


# ------------------------------------------------------------------------- verify


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
    own = _share(leaves, size)
    total, done, found = sum(size[leaf.path] for leaf in own), 0, []
    with shown_progress(f"verifying {place.path}", total, progress, lambda: done):
        for portion in in_portions(own, lambda leaf: size[leaf.path], host_memory):
            found += _problems(stored, portion, recorded)
            done += sum(size[leaf.path] for leaf in portion)
    problems = _of_all_processes(found)
    if problems:
        raise problem_list(f"the checkpoint {place.path} is damaged", problems)
    return Verified(place.path, len(leaves), sum(size.values()))


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
        # Bisect to find the unreadable ones with few reads.
        middle = len(leaves) // 2
        first = _problems(stored, leaves[:middle], recorded)
        return first + _problems(stored, leaves[middle:], recorded)
    found = checksums({leaf.path: values[leaf.path] for leaf in leaves}, alone=True)
    return _changed(leaves, found, recorded)


# ------------------------------------------------------------------ who reads what


def _bytes(held: Any) -> int:
    """Bytes of an array, by its metadata; 0 for a Python value."""
    if not hasattr(held, "shape"):
        return 0
    return math.prod(held.shape) * np.dtype(held.dtype).itemsize


def _share(leaves: Sequence[Leaf], size: Mapping[str, int]) -> list[Leaf]:
    """The leaves that this process reads, so that all read about equally many bytes."""
    held = [0] * jax.process_count()
    own = []
    for leaf in sorted(leaves, key=lambda leaf: -size[leaf.path]):
        process = held.index(min(held))
        held[process] += size[leaf.path] + 1
        if process == jax.process_index():
            own.append(leaf)
    return own


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
