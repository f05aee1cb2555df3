"""Plan and run the byte reads for parts of tensors.

A part is a strided view of a tensor. Bytes that are closer together than `GAP_BYTES`
are read together, including the gap between them; longer gaps are skipped.
So rows are read exactly; narrow columns are cut from blocks of whole rows, instead of
in thousands of tiny reads. The amount is known in advance (`bytes_to_read`).

Not read by the package `safetensors`, which maps files into memory: there a truncated
file ends the process, and a column of a matrix loads all of it from the disk.
"""

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from io import FileIO
from types import TracebackType
from typing import Any

import numpy as np

from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap.checkpoint._safetensors_header import Tensor

# Reading a gap of this size takes about as long as starting another read.
GAP_BYTES = 32 << 10
# Size of the buffer for reads that do not go straight into the result.
BLOCK_BYTES = 8 << 20
MOST_OPEN = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A strided view of a tensor, and the array to fill with it.

    `offset` is the first element, `strides` are in elements, one per dim of `out`.
    """

    offset: int
    strides: tuple[int, ...]
    out: np.ndarray

    @property
    def span(self) -> int:
        """Elements from the first to the last one, including those between."""
        steps = zip(self.out.shape, self.strides, strict=True)
        return 1 + sum((size - 1) * stride for size, stride in steps)

    def ordered(self) -> "Piece":
        """The piece with its dims in file order, without those of size 1."""
        dims = [at for at, size in enumerate(self.out.shape) if size > 1]
        dims.sort(key=lambda at: -self.strides[at])
        ones = [at for at, size in enumerate(self.out.shape) if size == 1]
        out = self.out.transpose(dims + ones)
        out = out.squeeze(tuple(range(len(dims), out.ndim)))
        return Piece(self.offset, tuple(self.strides[at] for at in dims), out)

    def rows(self, start: int, stop: int) -> "Piece":
        """Some rows of the first dim."""
        offset = self.offset + start * self.strides[0]
        return Piece(offset, self.strides, self.out[start:stop])

    def row(self, at: int) -> "Piece":
        """One row, without the first dim."""
        offset = self.offset + at * self.strides[0]
        return Piece(offset, self.strides[1:], self.out[at, ...])


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

    def read(self, tensor: Tensor, pieces: Sequence[Piece]) -> None:
        """Fill the arrays of some pieces of a tensor."""
        dtype = tensor.dtype
        for fetch in _fetches(pieces, dtype):
            only = fetch.pieces[0]
            alone = len(fetch.pieces) == 1 and only.strides
            is_direct = alone and _is_direct(only, dtype)
            if is_direct:
                buffer = only.out.reshape(-1).view(np.uint8)
            else:
                buffer = self._block(fetch.count * dtype.itemsize)
            self._fill(tensor, fetch, buffer)
            _check_bools(tensor, fetch, buffer)
            if is_direct:
                continue
            for piece in fetch.pieces:
                steps = [stride * dtype.itemsize for stride in piece.strides]
                begin = (piece.offset - fetch.start) * dtype.itemsize
                found = np.ndarray(piece.out.shape, dtype, buffer, begin, steps)
                np.copyto(piece.out, found, casting="unsafe")

    def _block(self, nbytes: int) -> Any:
        if nbytes > self._buffer.size:
            self._buffer = np.empty(nbytes, np.uint8)
        return self._buffer[:nbytes]

    def _fill(self, tensor: Tensor, fetch: Fetch, buffer: Any) -> None:
        """Read bytes of a tensor, in as many calls as the system needs."""
        at = tensor.offset + fetch.start * tensor.dtype.itemsize
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
