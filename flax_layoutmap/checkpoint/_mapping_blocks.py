"""Leaves as blocks of tensors: the position of each element in the files.

A dim of a block is a tuple of factors `(size, stride)`, outermost first: one for an
ordinary dim, several where dims were flattened, none where a new dim was made. So
transposing, splitting and flattening dims move no number, and any slice of a leaf is
known as parts of tensors before a byte is read.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from flax_layoutmap._rules.records import Shape

Factors = tuple[tuple[int, int], ...]
Range = tuple[int, int]  # from, to before


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
class Block:
    """A box of a leaf whose elements belong to one tensor.

    `start` is its first index in the leaf, `offset` its first element in the tensor,
    and `dims` has the factors of each dim.
    """

    tensor: str
    start: tuple[int, ...]
    offset: int
    dims: tuple[Factors, ...]

    @property
    def shape(self) -> Shape:
        """Its size in each dim of the leaf."""
        return tuple(_size(dim) for dim in self.dims)

    def cut(self, index: Sequence[Range]) -> Iterator["Block"]:
        """The part within a box of the leaf, as one or several blocks."""
        parts = []
        for start, dim, (low, high) in zip(self.start, self.dims, index, strict=True):
            low, high = max(low, start), min(high, start + _size(dim))
            parts.append(
                [
                    (start + at, *rest)
                    for at, *rest in _cut(dim, low - start, high - start)
                ]
                if low < high
                else []
            )
        for chosen in itertools.product(*parts):
            yield Block(
                self.tensor,
                tuple(part[0] for part in chosen),
                self.offset + sum(part[1] for part in chosen),
                tuple(part[2] for part in chosen),
            )

    def piece(self, index: Sequence[Range], out: np.ndarray) -> Piece:
        """The piece of the tensor to read for the block.

        `index` is a box of the leaf around the block, `out` the array of that box.
        """
        low = [
            first - begin for first, (begin, _) in zip(self.start, index, strict=True)
        ]
        box = [slice(a, a + n) for a, n in zip(low, self.shape, strict=True)]
        part = out[*box, ...]  # a view, even where there are no dims
        factors = [factor for dim in self.dims for factor in dim]
        # Dims are only split, for which NumPy makes a view.
        part = part.reshape([size for size, _ in factors])
        return Piece(self.offset, tuple(stride for _, stride in factors), part)


def whole(tensor: str, shape: Shape) -> Block:
    """An entire tensor as one block."""
    strides = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
    pairs = zip(shape, strides, strict=True)
    dims = tuple(((size, stride),) for size, stride in pairs)
    return Block(tensor, (0,) * len(shape), 0, dims)


def pieces_of(
    blocks: Sequence[Block], index: Sequence[Range], out: np.ndarray
) -> Iterator[tuple[str, Piece]]:
    """(tensor name, piece to read) for one box of a leaf."""
    for block in blocks:
        for part in block.cut(index):
            yield part.tensor, part.piece(index, out)


def full_index(shape: Shape) -> tuple[Range, ...]:
    """The box of a whole array."""
    return tuple((0, size) for size in shape)


def regroup(
    block: Block,
    left: Sequence[Sequence[str]],
    right: Sequence[Sequence[str]],
    sizes: dict[str, int],
) -> Iterator[Block]:
    """Split dims into axes, reorder these, and join them to new dims.

    `left` and `right` name the axes in each dim of the block and of the result. Raises
    ValueError if the block ends within an axis that stays in one dim.
    """
    choices = [
        _split(start, dim, [sizes[name] for name in names])
        for start, dim, names in zip(block.start, block.dims, left, strict=True)
    ]
    names = [name for group in left for name in group]
    for chosen in itertools.product(*choices):
        axes = dict(zip(names, itertools.chain(*(c[1] for c in chosen)), strict=True))
        offset = block.offset + sum(c[0] for c in chosen)
        joined = [_join([axes[n] for n in g], [sizes[n] for n in g]) for g in right]
        for parts in itertools.product(*joined):
            yield Block(
                block.tensor,
                tuple(part[0] for part in parts),
                offset + sum(part[1] for part in parts),
                tuple(part[2] for part in parts),
            )


# ------------------------------------------------------------------- single dims


def _size(dim: Factors) -> int:
    return math.prod(size for size, _ in dim)


def range_boxes(
    low: int, high: int, sizes: Sequence[int]
) -> Iterator[tuple[Range, ...]]:
    """Split a range of flattened dims into boxes, in order."""
    if low >= high:
        return
    if not sizes:
        yield ()
        return
    inner = math.prod(sizes[1:])
    first, last = low // inner, high // inner
    if low % inner:
        stop = min(high, (first + 1) * inner)
        rest = range_boxes(low - first * inner, stop - first * inner, sizes[1:])
        yield from (((first, first + 1), *box) for box in rest)
        first += 1
    if first < last:
        yield ((first, last), *full_index(tuple(sizes[1:])))
    if first <= last and high % inner:
        rest = range_boxes(0, high - last * inner, sizes[1:])
        yield from (((last, last + 1), *box) for box in rest)


def _cut(dim: Factors, low: int, high: int) -> list[tuple[int, int, Factors]]:
    """Cut a range from a dim: start, offset and factors of each part."""
    sizes = [size for size, _ in dim]
    parts = []
    at = low
    for box in range_boxes(low, high, sizes):
        offset = sum(
            first * stride for (first, _), (_, stride) in zip(box, dim, strict=True)
        )
        factors = tuple(
            (stop - first, stride)
            for (first, stop), (_, stride) in zip(box, dim, strict=True)
        )
        parts.append((at, offset, factors))
        at += _size(factors)
    return parts


# An axis of a block: where it begins, and its factors.
_Axis = tuple[int, Factors]


def _split(
    start: int, dim: Factors, sizes: list[int]
) -> list[tuple[int, tuple[_Axis, ...]]]:
    """Split a dim into axes: offset and axes of each part."""
    if len(sizes) == 1:
        return [(0, ((start, dim),))]
    found = []
    for box in range_boxes(start, start + _size(dim), sizes):
        counts = [stop - first for first, stop in box]
        strides = [math.prod(sizes[at + 1 :]) for at in range(len(sizes))]
        low = sum(f * s for (f, _), s in zip(box, strides, strict=True)) - start
        parts = _cut(dim, low, low + math.prod(counts))
        if len(parts) > 1:
            raise ValueError("a part ends within an axis; rearrange it before")
        _, offset, factors = parts[0]
        starts = [first for first, _ in box]
        found.append(
            (offset, tuple(zip(starts, _factored(factors, counts), strict=True)))
        )
    return found


def _factored(dim: Factors, sizes: Sequence[int]) -> list[Factors]:
    """Split the factors of one dim at the boundaries of its axes."""
    rest = [factor for factor in dim if factor[0] != 1]
    axes: list[Factors] = []
    for size in reversed(sizes):
        axis: list[tuple[int, int]] = []
        while size > 1:
            count, stride = rest.pop()
            if count > size:
                if count % size:
                    raise ValueError("its axes lie across those of an earlier step")
                rest.append((count // size, stride * size))
                count = size
            elif size % count:
                raise ValueError("its axes lie across those of an earlier step")
            axis.insert(0, (count, stride))
            size //= count
        axes.insert(0, tuple(axis))
    return axes


def _join(axes: list[_Axis], sizes: list[int]) -> list[tuple[int, int, Factors]]:
    """Join axes to one dim: start, offset and factors of each part."""
    if len(axes) == 1:
        return [(axes[0][0], 0, axes[0][1])]
    counts = [_size(factors) for _, factors in axes]
    partial = [at for at, size in enumerate(sizes) if counts[at] < size]
    last = partial[-1] if partial else 0
    strides = [math.prod(sizes[at + 1 :]) for at in range(len(sizes))]
    begin = sum(first * s for (first, _), s in zip(axes, strides, strict=True))
    found = []
    # Each index before the last partial axis begins a part of its own.
    for index in itertools.product(*(range(count) for count in counts[:last])):
        where = begin + sum(at * s for at, s in zip(index, strides, strict=False))
        offset, factors = 0, ()
        for axis, (_, own) in enumerate(axes):
            if axis < last:
                [(_, more, own)] = _cut(own, index[axis], index[axis] + 1)
                offset += more
            factors += own
        found.append((where, offset, _collapsed(factors)))
    return found


def _collapsed(dim: Factors) -> Factors:
    """Merge adjacent factors that are contiguous."""
    found: list[tuple[int, int]] = []
    for size, stride in dim:
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            found[-1] = (found[-1][0] * size, stride)
        else:
            found.append((size, stride))
    return tuple(found)
