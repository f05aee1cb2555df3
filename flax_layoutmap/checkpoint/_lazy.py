"""Arrays that are read a box at a time, and views of them.

A tensor of a file is a NumPy array of mapped memory, and NumPy makes views of it
without a copy. What NumPy cannot view (tensors stacked to one leaf, joined dims, scaled
blocks) is a `Lazy`, which turns a box of its result into boxes of its inputs. Boxes
may be read wider than needed where a dim was joined or split, never narrower.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from flax_layoutmap._rules.records import Shape

Box = tuple[slice, ...]  # starts and stops, without None and without steps
Sizes = Sequence[Sequence[int]]

# Elements that are multiplied by scales at a time, in float32.
_PRODUCTS = 1 << 20


@dataclasses.dataclass(frozen=True)
class Lazy:
    """An array that `read` gives a box of."""

    shape: Shape
    read: Callable[[Box], np.ndarray]

    def __getitem__(self, box: Box) -> np.ndarray:
        return self.read(box)


Array = np.ndarray | Lazy


def full(shape: Iterable[int]) -> Box:
    """The box of a whole array."""
    return tuple(slice(0, size) for size in shape)


def box_shape(box: Box) -> Shape:
    return tuple(part.stop - part.start for part in box)


def transposed(x: Array, axes: Sequence[int]) -> Array:
    """The dims in another order, as `numpy.transpose`."""
    if isinstance(x, np.ndarray):
        return x.transpose(axes)
    back = [axes.index(dim) for dim in range(len(axes))]
    return Lazy(
        tuple(x.shape[dim] for dim in axes),
        lambda box: x[tuple(box[dim] for dim in back)].transpose(axes),
    )


def part(x: Array, axis: int, start: int, stop: int) -> Array:
    """The entries from `start` to before `stop` of one dim."""
    if isinstance(x, np.ndarray):
        return x[_replaced(full(x.shape), axis, slice(start, stop))]

    def read(box: Box) -> np.ndarray:
        within = slice(start + box[axis].start, start + box[axis].stop)
        return x[_replaced(box, axis, within)]

    return Lazy(_replaced(x.shape, axis, stop - start), read)


def concatenated(parts: Sequence[Array], axis: int, dtype: Any) -> Array:
    """As `numpy.concatenate`; parts of other dtypes are cast."""

    def read(box: Box) -> np.ndarray:
        wanted, begin, made = box[axis], 0, None
        for x in parts:
            end = begin + x.shape[axis]
            low, high = max(wanted.start, begin), min(wanted.stop, end)
            if low < high:
                values = x[_replaced(box, axis, slice(low - begin, high - begin))]
                if made is None:
                    made = empty_like(values, box_shape(box), dtype)
                to = slice(low - wanted.start, high - wanted.start)
                made[_replaced(full(made.shape), axis, to)] = values
            begin = end
        return np.empty(box_shape(box), dtype) if made is None else made

    size = sum(x.shape[axis] for x in parts)
    return Lazy(_replaced(parts[0].shape, axis, size), read)


def unflattened(x: Array, sizes: Sizes) -> Array:
    """Each dim split to dims of these sizes; a dim of size 1 may become none."""
    shape = tuple(size for group in sizes for size in group)
    if isinstance(x, np.ndarray):
        return x.reshape(shape)

    def read(box: Box) -> np.ndarray:
        outer, rows, inner = [], [], []
        rest = list(box)
        for group in sizes:
            first, *others = (rest.pop(0) for _ in group) if group else (slice(0, 1),)
            stride = math.prod(group[1:])
            outer.append(slice(first.start * stride, first.stop * stride))
            if group:
                rows += [first.stop - first.start, *group[1:]]
                inner += [slice(None), *others]
        return x[tuple(outer)].reshape(rows)[tuple(inner)]

    return Lazy(shape, read)


def flattened(x: Array, sizes: Sizes) -> Array:
    """The reverse of `unflattened`: dims of these sizes joined to one each."""
    shape = tuple(math.prod(group) for group in sizes)
    if isinstance(x, np.ndarray) and all(len(group) < 2 for group in sizes):
        return x.reshape(shape)

    def read(box: Box) -> np.ndarray:
        covers = [
            _cover(group, wanted.start, wanted.stop)
            for group, wanted in zip(sizes, box, strict=True)
        ]
        values = x[tuple(part for cover, _ in covers for part in cover)]
        joined = values.reshape([math.prod(box_shape(cover)) for cover, _ in covers])
        within = zip(covers, box_shape(box), strict=True)
        return joined[tuple(slice(skip, skip + n) for (_, skip), n in within)]

    return Lazy(shape, read)


def _cover(sizes: Sequence[int], start: int, stop: int) -> tuple[Box, int]:
    """A box that holds a range of joined dims, and how much of it is before that."""
    if not sizes:
        return (), 0
    stride = max(1, math.prod(sizes[1:]))
    first, last = start // stride, -(-stop // stride)
    skip = start - first * stride
    if last - first == 1:
        inner, skip = _cover(sizes[1:], skip, stop - first * stride)
        return (slice(first, last), *inner), skip
    return (slice(first, last), *full(sizes[1:])), skip


def _replaced(items: tuple[Any, ...], axis: int, item: Any) -> tuple[Any, ...]:
    return (*items[:axis], item, *items[axis + 1 :])


def empty_like(values: np.ndarray, shape: Shape, dtype: Any) -> np.ndarray:
    """An empty array whose dims have the order in memory that those of `values` have.

    JAX transposes on the way to the device, faster than NumPy, and takes over memory at
    an address like this one without a copy, on CPUs.
    """
    order = sorted(range(values.ndim), key=lambda dim: -abs(values.strides[dim]))
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    held = np.empty(nbytes + 64, np.uint8)
    start = -held.ctypes.data % 64
    made = held[start : start + nbytes].view(dtype)
    made = made.reshape([shape[dim] for dim in order])
    return made.transpose([order.index(dim) for dim in range(values.ndim)])


# ------------------------------------------------------------------ scaled blocks


def scaled(weights: np.ndarray, scales: np.ndarray, block: int, dtype: Any) -> Lazy:
    """A matrix whose blocks of `block` rows and columns have a scale each."""

    def product(box: Box) -> np.ndarray:
        rows, columns = (np.arange(part.start, part.stop) // block for part in box)
        each = scales[np.ix_(rows, columns)].astype(np.float32)
        return weights[box].astype(np.float32) * each

    return Lazy(weights.shape, lambda box: _by_rows(product, box, dtype))


def _by_rows(product: Callable[[Box], np.ndarray], box: Box, dtype: Any) -> np.ndarray:
    """A box of products, some rows at a time, which bounds the memory in float32."""
    made = np.empty(box_shape(box), dtype)
    first, *rest = box
    rows = max(1, _PRODUCTS // max(1, math.prod(box_shape(tuple(rest)))))
    for start in range(first.start, first.stop, rows):
        some = slice(start, min(start + rows, first.stop))
        to = slice(some.start - first.start, some.stop - first.start)
        made[to] = product((some, *rest))
    return made


# Numbers of a block of MXFP4, which have one scale.
MXFP4_BLOCK = 32

# Each byte of MXFP4 as its two numbers: the low four bits come first.
_BYTES = np.arange(256, dtype=np.uint8)
_NUMBERS = np.stack([_BYTES & 15, _BYTES >> 4], axis=-1).view(jnp.float4_e2m1fn)
_PAIRS = _NUMBERS.astype(np.float32)


def from_mxfp4(blocks: np.ndarray, scales: np.ndarray, dtype: Any) -> Lazy:
    """Blocks (…, n / 32, 16) and scales (…, n / 32), both uint8, as numbers (…, n).

    A scale is a power of two, and its byte the exponent plus 127 (float8_e8m0fnu):
    https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
    """
    *lead, count = scales.shape

    def product(box: Box) -> np.ndarray:
        *before, last = box
        first, end = last.start // MXFP4_BLOCK, -(-last.stop // MXFP4_BLOCK)
        held = (*before, slice(first, end))
        numbers = _PAIRS[blocks[held]]
        exponents = np.ascontiguousarray(scales[held]).view(jnp.float8_e8m0fnu)
        numbers *= exponents.astype(np.float32)[..., None, None]
        joined = numbers.reshape(*box_shape(tuple(before)), -1)
        skip = last.start - first * MXFP4_BLOCK
        return joined[..., skip : skip + last.stop - last.start]

    shape = (*lead, count * MXFP4_BLOCK)
    if not lead:
        return Lazy(shape, lambda box: product(box).astype(dtype))
    return Lazy(shape, lambda box: _by_rows(product, box, dtype))
