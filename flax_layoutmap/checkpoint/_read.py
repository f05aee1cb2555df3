"""Read arrays, and compare them with their checksums: of a plan, or all of them."""

import dataclasses
import functools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from flax_layoutmap._core.axes import dim_axes
from flax_layoutmap._core.checksums import checksums
from flax_layoutmap._core.errors import CheckpointError, visible
from flax_layoutmap._core.processes import Agreement
from flax_layoutmap._place.place import put
from flax_layoutmap._show.progress import shown_progress
from flax_layoutmap._show.table import human_bytes
from flax_layoutmap._tree.flax_internals import no_mesh
from flax_layoutmap.checkpoint._join import Plan, Read
from flax_layoutmap.checkpoint._leaves import (
    TYPES,
    Leaf,
    is_floating,
    key_data_shape,
    problem_list,
)
from flax_layoutmap.checkpoint._metadata import Stored, check_intact, open_checkpoint
from flax_layoutmap.checkpoint._options import Options
from flax_layoutmap.checkpoint._places import absolute, find


def read_leaves(stored: Stored, plan: Plan, options: Options) -> dict[str, Any]:
    """Read every leaf of a plan; return path → value, in its sharding."""
    recorded = None if options.verify is False else stored.checksums
    reads = [read for read in plan.reads.values() if not read.stored.is_empty]
    values = _loaded(stored, reads, options, as_stored=recorded is not None)
    problems = []
    if recorded is not None:
        problems = _changed([r.stored for r in reads], checksums(values), recorded)
    restored = {}
    for path, read in plan.reads.items():
        source = read.stored
        value = _empty(source) if source.is_empty else values.pop(source.path)
        try:
            restored[path] = _as_wanted(read, value)
        except CheckpointError as error:
            problems.append(f"{source.name}: {error}")
    if problems:
        raise problem_list(f"cannot restore {stored.where}", problems)
    return restored


def _loaded(
    stored: Stored, reads: Sequence[Read], options: Options, as_stored: bool
) -> dict[str, Any]:
    """Path in the checkpoint → value; `as_stored`: with the dtype that it has there.

    Each process reads on its own, then all agree that every read succeeded before the
    arrays are used. Only leaves that are broadcast along a mesh axis are read together.
    """
    groups: dict[int | None, dict[str, Any]] = {None: {}}
    for read in reads:
        path, axis = read.stored.path, _replica_axis(read, options.broadcast)
        target = _orbax_target(read, stored.held[path], as_stored)
        groups.setdefault(axis, {})[path] = target
    values: dict[str, Any] = {}
    for axis, wanted in groups.items():
        after = f"using what was read of {stored.where}"
        with Agreement(after, options.job_mesh):
            values |= stored.read(
                wanted, replica_axis=axis, host_memory=options.host_memory
            )
    return values


def _changed(
    leaves: Sequence[Leaf], sums: Mapping[str, str], recorded: Mapping[str, str]
) -> list[str]:
    """A problem for each leaf whose checksum is not the recorded one."""
    return [
        f"{leaf.name}: its data are not those that were saved; restore another "
        f"checkpoint, or the rest of this one: exclude={f'^{re.escape(leaf.path)}$'!r}"
        if leaf.path in recorded
        else f"{leaf.name}: there is no checksum of it in the metadata, which is "
        "damaged; restore another checkpoint, or this one with verify=False"
        for leaf in leaves
        if sums[leaf.path] != recorded.get(leaf.path)
    ]


def _replica_axis(read: Read, name: str | None) -> int | None:
    """The number of a mesh axis along which Orbax can broadcast a leaf, or None."""
    sharding, stored = read.sharding, read.stored
    if name is None or not isinstance(sharding, NamedSharding):
        return None
    # uint32 may be the data of PRNG keys, which come back with a dim less.
    if stored.dtype == np.uint32 or stored.kind == "key":
        return None
    used = {axis for dim in sharding.spec for axis in dim_axes(dim)}
    return None if name in used else _axis_of_processes(sharding.mesh, name)


@functools.lru_cache(maxsize=16)
def _axis_of_processes(mesh: Mesh | AbstractMesh, name: str) -> int | None:
    """The number of an axis along which no two parts share a process, or None."""
    if name not in mesh.axis_names or isinstance(mesh, AbstractMesh):
        return None
    number = mesh.axis_names.index(name)
    rows = np.moveaxis(mesh.devices, number, 0).reshape(mesh.shape[name], -1)
    replicas = [{device.process_index for device in row} for row in rows]
    apart = sum(map(len, replicas)) == len(set().union(*replicas))
    return number if apart and len(replicas) > 1 else None


def _orbax_target(read: Read, held: Any, as_stored: bool) -> Any:
    """The target of a leaf for Orbax; `as_stored`: it is converted later."""
    stored, result = read.stored, read.result
    if stored.kind in ("int", "float", "string"):
        return held
    if read.sharding is None or stored.is_python:
        return np.ndarray
    dtype = held.dtype if stored.kind == "key" or as_stored else result.dtype
    return jax.ShapeDtypeStruct(held.shape, dtype, sharding=read.sharding)


def _empty(leaf: Leaf) -> Any:
    """An array without elements, which Orbax does not store."""
    if leaf.implementation is None:
        return np.zeros(leaf.shape, leaf.dtype)
    data = key_data_shape(leaf.implementation)
    return np.zeros((*leaf.shape, *data), np.uint32)


# ------------------------------------------------------------------- one value


def _as_wanted(read: Read, value: Any) -> Any:
    """Convert what Orbax returned to the requested leaf, and check it."""
    stored, result, sharding = read.stored, read.result, read.sharding
    if result.is_python:
        value = value.item() if isinstance(value, np.ndarray) else value
        if not isinstance(value, TYPES[result.kind]):
            raise CheckpointError(f"Orbax read the {type(value).__name__} {value!r}")
        return value
    if stored.kind == "key" and getattr(value, "dtype", None) != stored.dtype:
        # Orbax returns the data of keys if it has lost the implementation.
        wrap = functools.partial(jax.random.wrap_key_data, impl=stored.implementation)
        value = jax.jit(wrap, out_shardings=sharding)(value)
    elif isinstance(value, jax.Array):
        # An array that Orbax has cut to 32 bits must not be cast further.
        if value.dtype == stored.dtype != result.dtype:
            value = _cast(value, sharding, result.dtype)
    elif isinstance(value, np.ndarray | bool | int | float | complex):
        value = _converted(np.asarray(value), result, read.exactly)
        value = value if sharding is None else put(value, sharding)
    where = getattr(value, "sharding", None)
    is_right = isinstance(value, np.ndarray if sharding is None else jax.Array)
    if is_right and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        # Orbax knows of keys that it has written alone; its metadata does not.
        if stored.kind == "array" and stored.dtype == np.uint32:
            return value
    if is_right and (value.shape, value.dtype) == (result.shape, result.dtype):
        if where is None or where.is_equivalent_to(sharding, value.ndim):
            return value
    raise CheckpointError(
        f"Orbax read {type(value).__name__} {getattr(value, 'dtype', '')} "
        f"{getattr(value, 'shape', '')} with {where}, asked for {result} with "
        f"{sharding}"
    )


def _cast(value: jax.Array, sharding: Any, dtype: Any) -> jax.Array:
    """Convert an array on its devices, and delete the original."""
    with no_mesh():
        new = _caster(sharding, dtype)(value)
    value.delete()
    return new


@functools.lru_cache(maxsize=256)
def _caster(sharding: Any, dtype: Any) -> Callable[[Any], Any]:
    return jax.jit(lambda x: x.astype(dtype), out_shardings=sharding)


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


# ------------------------------------------------------------------------ verify


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
    held = {leaf.path: stored.held[leaf.path] for leaf in leaves}
    wanted = {p: np.ndarray if hasattr(h, "shape") else h for p, h in held.items()}
    try:
        values = stored.read(wanted)
    except CheckpointError as error:
        if len(leaves) == 1:
            return [f"{leaves[0].name}: {error}"]
        return [text for leaf in leaves for text in _problems(stored, [leaf])]
    return _changed(leaves, checksums(values, alone=True), stored.checksums or {})


def _of_all_processes(problems: list[str]) -> list[str]:
    if jax.process_count() == 1:
        return problems
    from jax.experimental.multihost_utils import process_allgather

    text = np.frombuffer(json.dumps(problems).encode(), np.uint8)
    longest = int(process_allgather(np.int32(text.size)).max())
    rows = process_allgather(np.pad(text, (0, longest - text.size)))
    return sum((json.loads(bytes(row).strip(b"\0")) for row in rows), [])
