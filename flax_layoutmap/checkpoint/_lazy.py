"""Arrays that are read a box at a time, and views of them.

A tensor of a file is a NumPy array of mapped memory; an operation on it is a `Lazy`,
which turns a box of its result into boxes of its inputs, so that NumPy makes views as
far as it can. Boxes may be read wider than needed where a dim was joined or split,
never narrower.
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


def nothing(shape: Iterable[int]) -> Lazy:
    return Lazy(tuple(shape), lambda box: np.empty(box_shape(box)))


def full(shape: Iterable[int]) -> Box:
    return tuple(slice(0, size) for size in shape)


def box_shape(box: Box) -> Shape:
    return tuple(part.stop - part.start for part in box)


def replaced(items: tuple[Any, ...], axis: int, *new: Any) -> tuple[Any, ...]:
    return (*items[:axis], *new, *items[axis + 1 :])


def transposed(x: Array, axes: Sequence[int]) -> Lazy:
    back = [axes.index(dim) for dim in range(len(axes))]
    return Lazy(
        tuple(x.shape[dim] for dim in axes),
        lambda box: x[tuple(box[dim] for dim in back)].transpose(axes),
    )


def entries(x: Array, axis: int, chosen: slice) -> Lazy:
    start, _, step = chosen.indices(x.shape[axis])
    size = len(range(*chosen.indices(x.shape[axis])))

    def read(box: Box) -> np.ndarray:
        first, count = start + box[axis].start * step, box_shape(box)[axis]
        within = slice(first, first + max(0, (count - 1) * step + 1))
        every = (*[slice(None)] * axis, slice(None, None, step))
        return x[replaced(box, axis, within)][every]

    return Lazy(replaced(x.shape, axis, size), read)


def entry(x: Array, axis: int, at: int) -> Lazy:
    def read(box: Box) -> np.ndarray:
        return x[(*box[:axis], slice(at, at + 1), *box[axis:])].squeeze(axis)

    return Lazy(replaced(x.shape, axis), read)


def with_dim(x: Array, axis: int) -> Lazy:
    shape = (*x.shape[:axis], 1, *x.shape[axis:])
    return Lazy(shape, lambda box: np.expand_dims(x[replaced(box, axis)], axis))


def assembled(
    shape: Shape, axis: int, parts: Sequence[tuple[slice, Array]], dtype: Any
) -> Lazy:
    """An array whose entries along a dim come from several, which are cast."""

    def read(box: Box) -> np.ndarray:
        wanted, made = range(box[axis].start, box[axis].stop), None
        for chosen, x in parts:
            held = range(*chosen.indices(shape[axis]))
            low, high = (
                min(max(0, -(-(end - held.start) // held.step)), len(held))
                for end in (wanted.start, wanted.stop)
            )
            if low < high:
                values = x[replaced(box, axis, slice(low, high))]
                if made is None:
                    made = np.empty_like(values, dtype, "K", shape=box_shape(box))
                first = held[low] - wanted.start
                to = slice(first, first + (high - low - 1) * held.step + 1, held.step)
                made[replaced(full(made.shape), axis, to)] = values
        return np.empty(box_shape(box), dtype) if made is None else made

    return Lazy(shape, read)


def unflattened(x: Array, sizes: Sizes) -> Lazy:
    def read(box: Box) -> np.ndarray:
        outer, rows, inner = [], [], []
        rest = list(box)
        for group in sizes:
            first, *others = (rest.pop(0) for _ in group)
            stride = math.prod(group[1:])
            outer.append(slice(first.start * stride, first.stop * stride))
            rows += [first.stop - first.start, *group[1:]]
            inner += [slice(None), *others]
        return x[tuple(outer)].reshape(rows)[tuple(inner)]

    return Lazy(tuple(size for group in sizes for size in group), read)


def flattened(x: Array, sizes: Sizes) -> Lazy:
    """The reverse of `unflattened`; dims that are joined are read whole."""

    def read(box: Box) -> np.ndarray:
        pairs = [*zip(sizes, box, strict=True)]
        inner = [full(group) if len(group) > 1 else (part,) for group, part in pairs]
        values = x[tuple(part for parts in inner for part in parts)]
        joined = values.reshape([math.prod(box_shape(parts)) for parts in inner])
        rest = (part if len(group) > 1 else slice(None) for group, part in pairs)
        return joined[tuple(rest)]

    return Lazy(tuple(math.prod(group) for group in sizes), read)


# ------------------------------------------------------------------ scaled blocks


def scaled(weights: Array, scales: Array, block: int, dtype: Any) -> Lazy:
    """A matrix whose blocks of `block` rows and columns have a scale each."""

    def product(box: Box) -> np.ndarray:
        rows, columns = (np.arange(part.start, part.stop) // block for part in box)
        each = scales[full(scales.shape)][np.ix_(rows, columns)].astype(np.float32)
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


def from_mxfp4(blocks: Array, scales: Array, dtype: Any) -> Lazy:
    """Blocks (…, n / 32, 16) and scales (…, n / 32), both uint8, as numbers (…, n).

    A scale is a power of two, and its byte the exponent plus 127 (float8_e8m0fnu):
    https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
    """

    def product(box: Box) -> np.ndarray:
        *before, last = box
        first, end = last.start // MXFP4_BLOCK, -(-last.stop // MXFP4_BLOCK)
        held = (*before, slice(first, end))
        numbers = _PAIRS[blocks[(*held, slice(0, 16))]]
        exponents = np.ascontiguousarray(scales[held]).view(jnp.float8_e8m0fnu)
        numbers *= exponents.astype(np.float32)[..., None, None]
        joined = numbers.reshape(*box_shape(tuple(before)), -1)
        skip = last.start - first * MXFP4_BLOCK
        return joined[..., skip : skip + last.stop - last.start]

    shape = (*scales.shape[:-1], scales.shape[-1] * MXFP4_BLOCK)
    return Lazy(shape, lambda box: _by_rows(product, box, dtype))
