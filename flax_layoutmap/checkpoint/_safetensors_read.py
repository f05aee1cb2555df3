"""Read the parts of tensors that make the shards of leaves.

A part is a strided view of a tensor. Bytes that are closer together than `GAP_BYTES`
are read together, including the gap between them; longer gaps are skipped.
So rows are read exactly; narrow columns are cut from blocks of whole rows, instead of
in thousands of tiny reads. The amount is known in advance (`bytes_to_read`).

Not read by the package `safetensors`, which maps files into memory: there a truncated
file ends the process, and a column of a matrix loads all of it from the disk.
"""

import dataclasses
import functools
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import FileIO
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap._place.place import put
from flax_layoutmap._rules.records import Shape
from flax_layoutmap._show.progress import is_shown, shown_progress
from flax_layoutmap.checkpoint._join import Plan, Read
from flax_layoutmap.checkpoint._leaves import TYPES
from flax_layoutmap.checkpoint._mapping import Recipe, Scaled
from flax_layoutmap.checkpoint._mapping_blocks import Piece, Range, pieces_of
from flax_layoutmap.checkpoint._mapping_steps import MXFP4_BLOCK, Mxfp4
from flax_layoutmap.checkpoint._safetensors_header import Stored, Tensor
from flax_layoutmap.checkpoint._safetensors_scales import Scales, from_mxfp4

# Reading a gap of this size takes about as long as starting another read.
GAP_BYTES = 32 << 10
# Size of the buffer for reads that do not go straight into the result.
BLOCK_BYTES = 8 << 20
MOST_OPEN = 16
# Bytes; XLA copies arrays on the host that begin elsewhere.
_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Fetch:
    """One read of `count` elements from `start`, and the pieces it fills."""

    start: int
    count: int
    pieces: tuple[Piece, ...]


def bytes_to_read(tensor: Tensor, pieces: Iterable[Piece]) -> int:
    """Bytes that are read for pieces of one tensor."""
    count = sum(fetch.count for fetch in _fetches(pieces, tensor.dtype))
    return count * tensor.dtype.itemsize


# MXFP4 is planned in its numbers, of which NumPy has one in a byte.
_NUMBER = np.dtype(jnp.float4_e2m1fn)
_PACKED_BYTES = MXFP4_BLOCK // 2


def _mxfp4_blocks(fetch: Fetch) -> Range:
    """The blocks of MXFP4 with the numbers of a read."""
    last = fetch.start + fetch.count - 1
    return fetch.start // MXFP4_BLOCK, last // MXFP4_BLOCK + 1


def _mxfp4_bytes(pieces: Iterable[Piece]) -> int:
    """Bytes that are read for pieces of a tensor in MXFP4, scales included."""
    ranges = map(_mxfp4_blocks, _fetches(pieces, _NUMBER))
    return sum(stop - start for start, stop in ranges) * (_PACKED_BYTES + 1)


# ------------------------------------------------------------------ what to read


def _fetches(pieces: Iterable[Piece], dtype: np.dtype[Any]) -> Iterator[Fetch]:
    """The reads for some pieces of one tensor."""
    groups: dict[Any, list[Piece]] = defaultdict(list)
    for piece in pieces:
        piece = piece.ordered()
        if piece.out.size == 0:
            continue
        if not piece.strides:
            yield Fetch(piece.offset, 1, (piece,))
            continue
        # Parts of the same rows are read together.
        pitch = piece.strides[0]
        groups[pitch, piece.offset // pitch, len(piece.out)].append(piece)
    for group in groups.values():
        yield from _fetches_of_rows(group, dtype)


def _fetches_of_rows(group: list[Piece], dtype: np.dtype[Any]) -> Iterator[Fetch]:
    """The reads for pieces that lie in the same rows."""
    first = group[0]
    pitch, rows = first.strides[0], len(first.out)
    if len(group) == 1 and _is_direct(first, dtype):
        yield Fetch(first.offset, first.out.size, (first,))
        return
    one_row = _joined(_fetches([piece.row(0) for piece in group], dtype), dtype)
    low = min(fetch.start for fetch in one_row)
    width = max(fetch.start + fetch.count for fetch in one_row) - low
    if len(one_row) == 1 and (pitch - width) * dtype.itemsize < max(GAP_BYTES, 1):
        many = max(1, BLOCK_BYTES // (pitch * dtype.itemsize))
        for start in range(0, rows, many):
            stop = min(start + many, rows)
            parts = tuple(piece.rows(start, stop) for piece in group)
            count = (stop - start - 1) * pitch + width
            yield Fetch(low + start * pitch, count, parts)
        return
    for at in range(rows):
        row = [piece.row(at) for piece in group]
        yield from _joined(_fetches(row, dtype), dtype)


def _is_direct(piece: Piece, dtype: np.dtype[Any]) -> bool:
    """Whether the bytes can be read straight into the array."""
    out = piece.out
    right = out.dtype == dtype and out.flags.c_contiguous and out.flags.writeable
    return right and piece.span == out.size


def _joined(fetches: Iterable[Fetch], dtype: np.dtype[Any]) -> list[Fetch]:
    """Merge neighbouring reads that fit into a block."""
    gap, block = GAP_BYTES // dtype.itemsize, BLOCK_BYTES // dtype.itemsize
    joined: list[Fetch] = []
    for fetch in sorted(fetches, key=lambda fetch: fetch.start):
        last = joined[-1] if joined else None
        end = fetch.start + fetch.count
        if last is not None and end - last.start <= block:
            if fetch.start - last.start - last.count < max(gap, 1):
                count = max(last.count, end - last.start)
                joined[-1] = Fetch(last.start, count, last.pieces + fetch.pieces)
                continue
        joined.append(fetch)
    return joined


# ----------------------------------------------------------------------- reading


class Files:
    """A context manager that reads from files, a few of them open at a time."""

    def __init__(self) -> None:
        self.bytes_read = 0
        self._open: OrderedDict[str, FileIO] = OrderedDict()
        self._buffer = np.empty(0, np.uint8)

    def __enter__(self) -> "Files":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for stream in self._open.values():
            stream.close()
        self._open.clear()

    def read(
        self, tensor: Tensor, pieces: Sequence[Piece], scales: Scales | None = None
    ) -> None:
        """Fill the arrays of some pieces of a tensor, multiplied by its scales."""
        dtype = tensor.dtype
        for fetch in _fetches(pieces, dtype):
            only = fetch.pieces[0]
            alone = len(fetch.pieces) == 1 and only.strides
            is_direct = alone and scales is None and _is_direct(only, dtype)
            if is_direct:
                buffer = only.out.reshape(-1).view(np.uint8)
            else:
                buffer = self._block(fetch.count * dtype.itemsize)
            self._fill(tensor, fetch.start * dtype.itemsize, buffer)
            _check_bools(tensor, fetch, buffer)
            if is_direct:
                continue
            for piece in fetch.pieces:
                found = _view(piece, fetch.start, buffer, dtype)
                if scales is None:
                    np.copyto(piece.out, found, casting="unsafe")
                else:
                    scales.multiply(piece, found)

    def read_mxfp4(
        self, blocks: Tensor, scales: Tensor, pieces: Sequence[Piece]
    ) -> None:
        """Fill the arrays of some pieces of a tensor in MXFP4."""
        for fetch in _fetches(pieces, _NUMBER):
            start, stop = _mxfp4_blocks(fetch)
            packed = self._block((stop - start) * _PACKED_BYTES)
            exponents = np.empty(stop - start, np.uint8)
            self._fill(blocks, start * _PACKED_BYTES, packed)
            self._fill(scales, start, exponents)
            numbers = from_mxfp4(packed.reshape(-1, _PACKED_BYTES), exponents)
            for piece in fetch.pieces:
                found = _view(piece, start * MXFP4_BLOCK, numbers, numbers.dtype)
                np.copyto(piece.out, found, casting="unsafe")

    def _block(self, nbytes: int) -> Any:
        if nbytes > self._buffer.size:
            self._buffer = np.empty(nbytes, np.uint8)
        return self._buffer[:nbytes]

    def _fill(self, tensor: Tensor, start: int, buffer: Any) -> None:
        """Read bytes of a tensor, in as many calls as the system needs."""
        at = tensor.offset + start
        view = memoryview(buffer)
        try:
            stream = self._stream(tensor.file)
            stream.seek(at)
            while view:
                count = stream.readinto(view)
                if not count:
                    raise CheckpointError(
                        f"{tensor}: the file ends at byte {at}; it was cut since its "
                        "header was read"
                    )
                self.bytes_read += count
                view, at = view[count:], at + count
        except OSError as error:
            raise CheckpointError(
                f"{tensor}: it cannot be read: {error.strerror}"
            ) from error

    def _stream(self, file: str) -> FileIO:
        if file in self._open:
            self._open.move_to_end(file)
            return self._open[file]
        if len(self._open) >= MOST_OPEN:
            self._open.popitem(last=False)[1].close()
        self._open[file] = FileIO(file)
        return self._open[file]


def _view(
    piece: Piece, start: int, buffer: np.ndarray, dtype: np.dtype[Any]
) -> np.ndarray:
    """The elements of a piece in a buffer that begins with the element `start`."""
    steps = [stride * dtype.itemsize for stride in piece.strides]
    begin = (piece.offset - start) * dtype.itemsize
    return np.ndarray(piece.out.shape, dtype, buffer, begin, steps)


def _check_bools(tensor: Tensor, fetch: Fetch, buffer: np.ndarray) -> None:
    """Raise CheckpointError for bytes that are no bools, which NumPy would accept."""
    if tensor.dtype != np.bool_ or buffer.max(initial=0) <= 1:
        return
    first = int(np.argmax(buffer > 1))
    raise CheckpointError(
        f"{tensor}: byte {tensor.offset + fetch.start + first} of the file is "
        f"{buffer[first]}, and a BOOL is 0 or 1; the file is damaged, or was written "
        "wrongly: download it again, or leave the leaf out with exclude="
    )


# ------------------------------------------------------------------------ leaves

Index = tuple[Range, ...]


@dataclasses.dataclass(frozen=True)
class TensorPlan:
    """A plan, and the recipe of each leaf."""

    stored: Stored
    plan: Plan
    recipes: Mapping[str, Recipe]


def read_tensors(
    planned: TensorPlan, progress: bool | Callable[[int, int], object] | None
) -> dict[str, Any]:
    """Path → restored value of every leaf of the plan."""
    stored, reads = planned.stored, planned.plan.reads
    made = {path: _empty(read) for path, read in reads.items() if _is_empty(read)}
    groups = _together(planned)
    tell = progress if callable(progress) else None
    shown = False if callable(progress) else progress
    total = 0
    if tell is not None or is_shown(shown):
        # The arrays are never touched, so they take no memory.
        total = sum(_bytes_of(stored, _buffers(planned, group)) for group in groups)
    with Files() as files:
        what = f"restoring {stored.where}"
        with shown_progress(what, total, shown, lambda: files.bytes_read):
            before: dict[str, Any] = {}
            for group in groups:
                new = _read_group(files, planned, group)
                # Transfers overlap with the reads of the next group.
                jax.block_until_ready([*before.values()])
                made |= new
                before = new
                if tell is not None:
                    tell(files.bytes_read, total)
    return {path: made[path] for path in reads}


def _together(planned: TensorPlan) -> list[list[str]]:
    """Group the paths of leaves that use the same tensors, which are read together."""
    groups: dict[Any, list[str]] = {}
    for path, read in planned.plan.reads.items():
        if not _is_empty(read):
            recipe = planned.recipes[path]
            key = frozenset(recipe.shapes), recipe.dequantize
            groups.setdefault(key, []).append(path)
    return list(groups.values())


@dataclasses.dataclass(frozen=True)
class _Buffers:
    """The reads of this process for some leaves.

    `arrays` maps path → box of the leaf → host array to fill; `pieces` maps tensor name
    → its parts that go into these arrays; `scales` has those of the tensors.
    """

    arrays: Mapping[str, Mapping[Index, np.ndarray]]
    pieces: Mapping[str, Sequence[Piece]]
    scales: Mapping[str, Scaled]


def _buffers(planned: TensorPlan, paths: Sequence[str]) -> _Buffers:
    pieces: dict[str, list[Piece]] = {}
    arrays: dict[str, dict[Index, np.ndarray]] = {}
    for path in paths:
        read, recipe = planned.plan.reads[path], planned.recipes[path]
        arrays[path] = {}
        for box in _boxes(read.sharding, read.result.shape):
            out = _buffer(read, recipe, tuple(stop - start for start, stop in box))
            arrays[path][box] = out
            for name, piece in pieces_of(recipe.blocks, box, out):
                pieces.setdefault(name, []).append(piece)
    tensors, recipe = planned.stored.tensors, planned.recipes[paths[0]]
    scales = {name: recipe.scales(name, tensors[name].dtype) for name in pieces}
    return _Buffers(
        arrays, pieces, {name: found for name, found in scales.items() if found}
    )


def _bytes_of(stored: Stored, buffers: _Buffers) -> int:
    """Bytes that this process reads to fill some buffers."""
    total = 0
    for name, pieces in buffers.pieces.items():
        scaled = buffers.scales.get(name)
        if scaled is not None and isinstance(scaled.step, Mxfp4):
            total += _mxfp4_bytes(pieces)
            continue
        total += bytes_to_read(stored.tensors[name], pieces)
        total += 0 if scaled is None else stored.tensors[scaled.name].nbytes
    return total


def _read_group(
    files: Files, planned: TensorPlan, paths: Sequence[str]
) -> dict[str, Any]:
    """Read leaves that share tensors; return path → value."""
    stored, buffers = planned.stored, _buffers(planned, paths)
    for name, parts in buffers.pieces.items():
        tensor, scaled = stored.tensors[name], buffers.scales.get(name)
        try:
            if scaled is None:
                files.read(tensor, parts)
            elif isinstance(scaled.step, Mxfp4):
                files.read_mxfp4(tensor, stored.tensors[scaled.name], parts)
            else:
                values = _scales(files, stored.tensors[scaled.name])
                scales = Scales(values, scaled.step.block, tensor.shape[1])
                files.read(tensor, parts, scales)
        except CheckpointError as error:
            users = [path for path in paths if name in planned.recipes[path].shapes]
            raise CheckpointError(f"{', '.join(users)}: {error}") from error
    return {
        path: _made(planned.plan.reads[path], arrays)
        for path, arrays in buffers.arrays.items()
    }


def _scales(files: Files, tensor: Tensor) -> np.ndarray:
    """Read the scales of a float8 tensor, in float32."""
    values = np.empty(tensor.shape, np.float32)
    files.read(tensor, [Piece(0, (tensor.shape[1], 1), values)])
    return values


def _buffer(read: Read, recipe: Recipe, shape: Shape) -> np.ndarray:
    """An array to read into, with memory in file order.

    The transposition is left to JAX, on the way to the device, which is faster than
    NumPy.
    """
    if read.sharding is None:
        dtype = read.stored.dtype if read.result.is_python else read.result.dtype
        return np.empty(shape, dtype)
    order = recipe.order
    made = _aligned([shape[dim] for dim in order], read.result.dtype)
    return made.transpose(np.argsort(order))


def _aligned(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
    """An empty array at an address that JAX takes over without a copy, on CPUs."""
    nbytes = math.prod(shape) * dtype.itemsize
    held = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -held.ctypes.data % _ALIGNMENT
    return held[start : start + nbytes].view(dtype).reshape(shape)


def _is_empty(read: Read) -> bool:
    return 0 in read.result.shape


def _empty(read: Read) -> Any:
    """A leaf without elements, which needs no read."""
    value = np.zeros(read.result.shape, read.result.dtype)
    return value if read.sharding is None else put(value, read.sharding)


@functools.lru_cache(maxsize=1024)
def _boxes(sharding: Any, shape: Shape) -> dict[Index, list[Any]]:
    """Box of an array that this process needs → its devices; many leaves agree."""
    if sharding is None:
        return {tuple((0, size) for size in shape): []}
    found: dict[Index, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        box = tuple(
            part.indices(size)[:2] for part, size in zip(index, shape, strict=True)
        )
        found.setdefault(box, []).append(device)
    return found


def _made(read: Read, buffers: Mapping[Index, np.ndarray]) -> Any:
    """Make a leaf from its boxes on the host; replicas share a buffer."""
    result, sharding = read.result, read.sharding
    if sharding is None:
        [value] = buffers.values()
        return TYPES[result.kind](value.item()) if result.is_python else value
    arrays = [
        jax.device_put(
            buffers[index],
            SingleDeviceSharding(device, memory_kind=sharding.memory_kind),
        )
        for index, devices in _boxes(sharding, result.shape).items()
        for device in devices
    ]
    # A process without a device of this mesh has no arrays, so pass the dtype.
    return jax.make_array_from_single_device_arrays(
        result.shape, sharding, arrays, dtype=result.dtype
    )
