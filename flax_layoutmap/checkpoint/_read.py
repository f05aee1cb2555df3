"""Reads the leaves of a plan, each in its way, and looks at what came."""

import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._core.processes import Agreement
from flax_layoutmap._place.place import put
from flax_layoutmap._tree.flax_internals import no_mesh
from flax_layoutmap.checkpoint import _orbax
from flax_layoutmap.checkpoint._checksums import mismatches
from flax_layoutmap.checkpoint._leaves import (
    TYPES,
    Leaf,
    is_floating,
    key_data_shape,
    problem_list,
)
from flax_layoutmap.checkpoint._plan import Plan, Read
from flax_layoutmap.checkpoint._stored import Stored
from flax_layoutmap.checkpoint._strategy import Way
from flax_layoutmap.checkpoint._verify import not_as_saved, unrecorded

# Arrays that change their dtype are read so many bytes at a time, as both dtypes lie on
# the devices for a while.
_CAST_BYTES = 1 << 30
# A process that cannot read waits this long for the others, which still read.
_PATIENCE_SECONDS = 1800.0


def read_leaves(
    stored: Stored,
    plan: Plan,
    ways: Mapping[str, tuple[Read, Way]],
    host_memory: int | None,
    recorded: Mapping[str, str] | None,
    mesh: DeviceMesh | None,
) -> dict[str, Any]:
    """Reads every leaf of a plan.

    Each process reads by itself, and they agree that all could before the arrays are
    used; but for those that are sent along a mesh axis, which they read together.

    Args:
        stored: the checkpoint.
        plan: the plan, without problems.
        ways: path → how it is read.
        host_memory: bytes of arrays to read at a time; None: all at once.
        recorded: path in the checkpoint → checksum, to compare with; None: no.
        mesh: the mesh whose processes all read.

    Returns:
        Path → value, in its sharding.

    Raises:
        CheckpointError: leaves cannot be read, or are not what they should be.
        ProcessError: another process could not read.
    """
    reader = _Reader(stored, plan, ways, recorded, mesh)
    for paths, axis in portions(plan, ways, host_memory):
        reader.read(paths, axis)
    for path, read in plan.reads.items():
        if read.stored.is_empty:
            reader.take(path, _empty(read.stored))
    if reader.problems:
        raise problem_list(f"cannot restore {stored.where}", reader.problems)
    return {path: reader.made[path] for path in plan.reads}


class _Reader:
    """Reads leaves in portions; collects values and problems."""

    def __init__(
        self,
        stored: Stored,
        plan: Plan,
        ways: Mapping[str, tuple[Read, Way]],
        recorded: Mapping[str, str] | None,
        mesh: DeviceMesh | None,
    ) -> None:
        self.made: dict[str, Any] = {}
        self.problems: list[str] = []
        self._stored, self._plan, self._ways = stored, plan, ways
        self._recorded, self._mesh = recorded, mesh

    def read(self, paths: Sequence[str], axis: int | None) -> None:
        """Reads some leaves, which are sent along a mesh axis if one is given."""
        stored, reads = self._stored, self._plan.reads
        as_stored = self._recorded is not None
        targets: dict[str, Any] = dict.fromkeys(stored.held, ...)
        for path in paths:
            source = reads[path].stored.path
            way = self._ways[path][1] if path in self._ways else None
            held = stored.held[source]
            targets[source] = _orbax_target(reads[path], held, way, as_stored)
        after = f"using what was read of {stored.where}"
        with Agreement(after, self._mesh, patience=_PATIENCE_SECONDS):
            values = _orbax.read_arrays(
                stored.where,
                targets,
                stored.tree,
                item=stored.item,
                replica_axis=axis,
                alone=axis is None,
            )
        values = {
            reads[path].stored.path: values[reads[path].stored.path] for path in paths
        }
        if self._recorded is not None:
            for source in mismatches(values, self._recorded):
                self.problems.append(not_as_saved(stored.by_source[source]))
            for source in values.keys() - self._recorded.keys():
                self.problems.append(unrecorded(stored.by_source[source]))
        for path in paths:
            value = values.pop(reads[path].stored.path)
            if path in self._ways and self._ways[path][1].strategy == "aligned":
                value = _laid_out(value, reads[path].sharding, None)
            if as_stored and _is_to_be_cast(value, reads[path]):
                value = _laid_out(value, reads[path].sharding, reads[path].result.dtype)
            self.take(path, value)

    def take(self, path: str, value: Any) -> None:
        """Makes the result of a value that was read."""
        read = self._plan.reads[path]
        try:
            self.made[path] = _as_wanted(read, value, is_ours=self._stored.is_ours)
        except CheckpointError as error:
            self.problems.append(f"{read.stored.name}: {error}")


def portions(
    plan: Plan, ways: Mapping[str, tuple[Read, Way]], host_memory: int | None
) -> list[tuple[list[str], int | None]]:
    """Leaves that are read at a time, and the mesh axis that they are sent along."""
    groups: dict[tuple[int | None, bool], list[str]] = {}
    for path, read in plan.reads.items():
        if not read.stored.is_empty:
            axis = ways[path][1].replica_axis if path in ways else None
            is_cast = path in ways and read.stored.dtype != read.result.dtype
            groups.setdefault((axis, is_cast), []).append(path)
    found: list[tuple[list[str], int | None]] = []
    for (axis, is_cast), paths in groups.items():
        limit = math.inf if host_memory is None else host_memory
        limit = min(limit, _CAST_BYTES) if is_cast else limit
        used = math.inf
        for path in paths:
            host = ways[path][1].host if path in ways else 0
            if used + host > limit or used == math.inf:
                found.append(([], axis))
                used = 0
            found[-1][0].append(path)
            used += host
    return found


def _orbax_target(read: Read, held: Any, way: Way | None, as_stored: bool) -> Any:
    """What Orbax is to be asked for, to make a leaf."""
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
    # What Orbax has cut to 32 bits is no array to cast.
    return is_array and value.dtype == read.stored.dtype != read.result.dtype


def _laid_out(value: jax.Array, sharding: Any, dtype: Any) -> jax.Array:
    """An array in its final sharding and dtype; what was read is given up for it."""
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
    """Makes the result of what Orbax read.

    Raises:
        CheckpointError: a number does not fit the dtype, or Orbax read something else
            than it was asked for.
    """
    result, sharding = read.result, read.sharding
    if result.kind == "key":
        return _checked(_keys(read, value), read)
    if result.is_python:
        value = value.item() if isinstance(value, np.ndarray) else value
        if not isinstance(value, TYPES[result.kind]):
            raise CheckpointError(f"Orbax read the {type(value).__name__} {value!r}")
        return value
    if not is_ours and result.kind == "array" and _is_keys(value):
        return value  # Orbax knows better than the metadata
    if isinstance(value, np.ndarray | bool | int | float | complex):
        value = _converted(np.asarray(value), result, read.exactly)
        if sharding is not None:
            value = put(value, sharding)
    return _checked(value, read)


def _is_keys(value: Any) -> bool:
    is_array = isinstance(value, jax.Array)
    return is_array and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)


def _converted(value: np.ndarray, result: Leaf, exactly: bool) -> np.ndarray:
    """A host array with the result's dtype."""
    new = value.astype(result.dtype)
    exactly = exactly or not is_floating(result.dtype)
    if exactly and not np.array_equal(new, value, equal_nan=is_floating(value.dtype)):
        raise CheckpointError(
            f"the number {value} of the checkpoint is not exact in {result.dtype}; "
            'dtype="target" rounds a float'
        )
    return new


def _keys(read: Read, value: Any) -> Any:
    """Typed PRNG keys; Orbax gives their numbers where it has lost their kind."""
    if isinstance(value, jax.Array) and value.dtype == read.stored.dtype:
        return value
    wrap = functools.partial(jax.random.wrap_key_data, impl=read.stored.implementation)
    return jax.jit(wrap, out_shardings=read.sharding)(value)


def _checked(value: Any, read: Read) -> Any:
    """Our own last look: nothing abstract, cut, cast or misplaced gets through."""
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
