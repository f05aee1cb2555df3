"""The steps of a mapping: operations that turn tensors into a leaf.

A step works both ways: from the shape of its result it gives the inputs it needs, and
the place of an input's block in the result. The shape of the leaf gives all sizes, so
that a mapping holds no numbers of a model, and the same steps save as well.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap._rules.records import Shape, show_shape
from flax_layoutmap.checkpoint._leaves import is_floating
from flax_layoutmap.checkpoint._mapping_blocks import Block, full_index, regroup


class Input(NamedTuple):
    """One input of a step: its shape, and the fields of its tensor's name."""

    fields: dict[str, str]
    shape: Shape


Axes = Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Regroup:
    """The step of `transpose`, `linear`, `unflatten` and `rearrange`.

    `axes` gives, for the shape of the leaf, the names of the axes in each dim of the
    tensor and of the leaf, and the size of each axis.
    """

    axes: Callable[[Shape], tuple[Axes, Axes, dict[str, int]]]

    def inputs(self, shape: Shape) -> list[Input]:
        left, _, sizes = self.axes(shape)
        return [Input({}, tuple(math.prod(sizes[n] for n in group) for group in left))]

    def place(self, block: Block, at: int, shape: Shape) -> Iterator[Block]:
        yield from regroup(block, *self.axes(shape))


def _in_leaf(groups: Sequence[Sequence[int]], shape: Shape) -> Any:
    """Axes that are the dims of the leaf, grouped to the dims of the tensor."""
    names = [str(dim) for dim in range(len(shape))]
    left = [[names[dim] for dim in group] for group in groups]
    return left, [[name] for name in names], dict(zip(names, shape, strict=True))


def transpose(*axes: int) -> Regroup:
    """Permute the dims of a tensor, as `numpy.transpose`.

    Args:
        *axes: for each dim of the result, which dim of the tensor; none reverses them.
    """

    def axes_of(shape: Shape) -> Any:
        order = axes or tuple(reversed(range(len(shape))))
        if sorted(order) != list(range(len(shape))):
            raise ValueError(f"transpose{axes} is no order of {len(shape)} dims")
        return _in_leaf([[order.index(dim)] for dim in range(len(shape))], shape)

    return Regroup(axes_of)


def linear(*, inputs: int | None = None, outputs: int | None = None) -> Regroup:
    """Convert the weight `(outputs, inputs)` of `torch.nn.Linear` to a Flax kernel.

    A kernel of `nnx.Linear` has two dims, one of `nnx.LinearGeneral` may have several
    for inputs or outputs: `(dim, heads, head_dim)`. The leaf's shape decides.

    Args:
        inputs: how many dims of the kernel are inputs; 1 unless `outputs` is given.
        outputs: how many are outputs, where the rest are inputs (as after attention).
    """
    if inputs is not None and outputs is not None:
        raise CheckpointError(
            "linear takes inputs= or outputs=; the rest are the other"
        )

    def axes_of(shape: Shape) -> Any:
        rank = len(shape)
        count = (1 if inputs is None else inputs) if outputs is None else rank - outputs
        if not 0 < count < rank:
            raise ValueError(
                f"{show_shape(shape)} is no kernel with dims for inputs and for outputs"
            )
        return _in_leaf([range(count, rank), range(count)], shape)

    return Regroup(axes_of)


def unflatten() -> Regroup:
    """Reshape a tensor of one dim to the leaf: `(heads * dim,)` → heads, dim."""
    return Regroup(lambda shape: _in_leaf([range(len(shape))], shape))


def rearrange(pattern: str, **sizes: int) -> Regroup:
    """Split, reorder and join the dims of a tensor, as `einops.rearrange`.

    Sizes are inferred from the shape of the leaf where possible.

    Args:
        pattern: the dims of the tensor and of the leaf:
            `"(heads three dim) inputs -> three inputs heads dim"`.
        **sizes: sizes of axes that cannot be inferred, since the leaf joins them.

    Raises:
        CheckpointError: the pattern is invalid.
    """
    sides = pattern.split("->")
    groups = [_groups(side) for side in sides]
    names = [[name for group in side or () for name in group] for side in groups]
    if len(sides) != 2 or None in groups or sorted(names[0]) != sorted(names[1]):
        raise CheckpointError(
            f"rearrange({pattern!r}) needs the same names on both sides of '->', with "
            "brackets around those that are one dim: '(heads dim) inputs -> inputs "
            "heads dim'"
        )
    if len(set(names[0])) < len(names[0]) or not set(sizes) <= set(names[0]):
        raise CheckpointError(
            f"rearrange({pattern!r}) has a name twice, or sizes for others: {sizes}"
        )
    left, right = (side or [] for side in groups)
    return Regroup(lambda shape: (left, right, _sizes(pattern, right, sizes, shape)))


def _sizes(
    pattern: str, right: Axes, given: Mapping[str, int], shape: Shape
) -> dict[str, int]:
    """The size of each axis of a pattern, for a leaf of this shape."""
    if len(shape) != len(right):
        raise ValueError(
            f"{pattern!r} makes {len(right)} dims, not {show_shape(shape)}"
        )
    sizes = dict(given)
    for names, size in zip(right, shape, strict=True):
        unknown = [name for name in names if name not in sizes]
        if len(unknown) > 1:
            raise ValueError(
                f"{pattern!r} leaves the sizes of {' and '.join(unknown)} open; name "
                f"one, as in rearrange({pattern!r}, {unknown[0]}=2)"
            )
        known = math.prod(sizes[name] for name in names if name in sizes)
        if unknown and known and size % known == 0:
            sizes[unknown[0]] = size // known
        elif unknown or known != size:
            raise ValueError(
                f"{pattern!r} does not fit {show_shape(shape)}: "
                f"{' × '.join(names)} is {size} there, with {dict(given)}"
            )
    return sizes


_GROUP = re.compile(r"\(([\w ]*)\)|(\w+)|\s+")


def _groups(side: str) -> list[tuple[str, ...]] | None:
    """The names in each dim of one side of a pattern; None if it is malformed."""
    groups, at = [], 0
    while at < len(side):
        found = _GROUP.match(side, at)
        if found is None:
            return None
        at = found.end()
        if found[1] is not None or found[2]:
            groups.append(tuple((found[1] or found[2] or "").split()))
    return groups


@dataclasses.dataclass(frozen=True)
class Stack:
    """The step of `stack`."""

    axis: int
    over: tuple[str, ...] | None
    field: str
    start: int = 0

    def inputs(self, shape: Shape) -> list[Input]:
        axis = _axis(self.axis, shape)
        numbers = range(self.start, self.start + shape[axis])
        names = self.over or tuple(map(str, numbers))
        if len(names) != shape[axis]:
            raise ValueError(
                f"it has {shape[axis]} entries in dim {axis}, and {len(names)} tensors "
                "are stacked"
            )
        inner = (*shape[:axis], *shape[axis + 1 :])
        return [Input({self.field: name}, inner) for name in names]

    def place(self, block: Block, at: int, shape: Shape) -> Iterator[Block]:
        axis = _axis(self.axis, shape)
        yield dataclasses.replace(
            block,
            start=(*block.start[:axis], at, *block.start[axis:]),
            dims=(*block.dims[:axis], (), *block.dims[axis:]),
        )


def stack(
    axis: int = 0,
    over: Sequence[Any] | None = None,
    *,
    field: str = "layer",
    start: int = 0,
) -> Stack:
    """Stack tensors along a new dim, as in a model that scans over its layers.

    Args:
        axis: the dim of the result.
        over: what to fill in for `{layer}` in the name of the tensor, one for each
            entry of the dim. None: consecutive numbers, as many as the leaf has.
        field: another name for `layer`, to stack experts within layers.
        start: the first of the consecutive numbers.
    """
    names = None if over is None else tuple(map(str, over))
    return Stack(axis, names, field, start)


@dataclasses.dataclass(frozen=True)
class Merge:
    """The step of `merge`."""

    axis: int
    over: tuple[str, ...]
    sizes: tuple[int, ...] | None
    field: str

    def inputs(self, shape: Shape) -> list[Input]:
        axis = _axis(self.axis, shape)
        sizes = _part_sizes(shape[axis], self.sizes or len(self.over))
        return [
            Input({self.field: name}, (*shape[:axis], size, *shape[axis + 1 :]))
            for name, size in zip(self.over, sizes, strict=True)
        ]

    def place(self, block: Block, at: int, shape: Shape) -> Iterator[Block]:
        axis = _axis(self.axis, shape)
        sizes = _part_sizes(shape[axis], self.sizes or len(self.over))
        yield _moved(block, axis, sum(sizes[:at]))


def merge(
    axis: int,
    over: Sequence[str],
    sizes: Sequence[int] | None = None,
    *,
    field: str = "part",
) -> Merge:
    """Concatenate tensors along a dim: a fused leaf from separate tensors.

    Args:
        axis: the dim.
        over: what to fill in for `{part}` in the name: `("q_proj", "k_proj")`, say.
        sizes: how many entries each has in that dim; None if equally many.
        field: another name for `part`.
    """
    if not over or (sizes is not None and len(sizes) != len(over)):
        raise CheckpointError(f"merge needs parts, and as many sizes: {over}, {sizes}")
    parts = None if sizes is None else tuple(sizes)
    return Merge(axis, tuple(over), parts, field)


@dataclasses.dataclass(frozen=True)
class Split:
    """The step of `split`."""

    axis: int
    index: int
    of: int | tuple[int, ...]

    def inputs(self, shape: Shape) -> list[Input]:
        axis = _axis(self.axis, shape)
        sizes = self._sizes(shape[axis])
        return [Input({}, (*shape[:axis], sum(sizes), *shape[axis + 1 :]))]

    def place(self, block: Block, at: int, shape: Shape) -> Iterator[Block]:
        axis = _axis(self.axis, shape)
        sizes = self._sizes(shape[axis])
        index = list(full_index((*shape[:axis], sum(sizes), *shape[axis + 1 :])))
        begin = sum(sizes[: self.index])
        index[axis] = (begin, begin + shape[axis])
        for part in block.cut(index):
            yield _moved(part, axis, -begin)

    def _sizes(self, size: int) -> list[int]:
        if isinstance(self.of, int):
            return [size] * self.of
        if self.of[self.index] != size:
            raise ValueError(
                f"part {self.index} of {self.of} has {self.of[self.index]} entries, "
                f"not {size}"
            )
        return list(self.of)


def split(axis: int, index: int, of: int | Sequence[int]) -> Split:
    """Take one part of a fused tensor, such as the queries of `c_attn`.

    Args:
        axis: the dim that is split.
        index: which part, from 0.
        of: how many equal parts there are, or the size of each.

    Raises:
        CheckpointError: there is no such part.
    """
    parts = of if isinstance(of, int) else tuple(of)
    count = parts if isinstance(parts, int) else len(parts)
    if not 0 <= index < count:
        raise CheckpointError(
            f"split has {count} parts, so index={index} is out of range"
        )
    return Split(axis, index, parts)


@dataclasses.dataclass(frozen=True)
class Cast:
    """The step of `cast`."""

    dtype: np.dtype[Any]

    def inputs(self, shape: Shape) -> list[Input]:
        return [Input({}, shape)]

    def place(self, block: Block, at: int, shape: Shape) -> Iterator[Block]:
        yield block


def cast(dtype: Any) -> Cast:
    """Cast a tensor to another floating-point dtype, before it is compared to the leaf.

    Saving writes the dtype that the leaf has.

    Raises:
        CheckpointError: it is no floating-point dtype.
    """
    try:
        found = np.dtype(dtype)
    except TypeError as error:
        raise CheckpointError(f"cast({dtype!r}): it is no dtype: {error}") from error
    if not is_floating(found):
        raise CheckpointError(f"cast({found}): only floating-point dtypes are cast")
    return Cast(found)


@dataclasses.dataclass(frozen=True)
class Dequantize:
    """The step of `dequantize()`, for float8."""

    block: int
    suffix: str

    def inputs(self, shape: Shape) -> list[Input]:
        return [Input({}, shape)]

    def place(self, block: Block, at: int, shape: Shape) -> Iterator[Block]:
        yield block

    def scales_shape(self, shape: Shape) -> Shape:
        """The shape of the scales of a tensor."""
        if len(shape) != 2:
            raise ValueError(
                f"dequantize is for tensors of two dims, not {show_shape(shape)}"
            )
        return tuple(-(-size // self.block) for size in shape)


# Numbers of a block of MXFP4, which have one scale.
MXFP4_BLOCK = 32


@dataclasses.dataclass(frozen=True)
class Mxfp4:
    """The step of `dequantize("mxfp4")`; its input is in numbers, two in each byte."""

    def inputs(self, shape: Shape) -> list[Input]:
        return [Input({}, shape)]

    def place(self, block: Block, at: int, shape: Shape) -> Iterator[Block]:
        yield block

    def scales_shape(self, shape: Shape) -> Shape:
        """The shape of the scales of a tensor."""
        if not shape or shape[-1] % MXFP4_BLOCK:
            raise ValueError(
                f"MXFP4 has blocks of {MXFP4_BLOCK} numbers along the last dim, which "
                f"do not make {show_shape(shape)}"
            )
        return (*shape[:-1], shape[-1] // MXFP4_BLOCK)

    def scales_name(self, tensor: str) -> str:
        """The name of the scales of a tensor."""
        return f"{tensor.removesuffix('_blocks')}_scales"


def dequantize(
    format: Literal["float8", "mxfp4"] = "float8",
    *,
    block: int = 128,
    suffix: str = "_scale_inv",
) -> Dequantize | Mxfp4:
    """Multiply a float8 or MXFP4 tensor by the scale of each of its blocks.

    - `"float8"`: the tensor `name` has its scales in the tensor `name + suffix`, one
      for each block of `block` rows and as many columns, as in DeepSeek-V3. The product
      is computed in float32. A tensor that is not in float8 is taken as it is. Saving
      writes the product, without scales.
    - `"mxfp4"`: the tensor `…_blocks` (…, n / 32, 16) of uint8 holds n numbers in its
      last two dims, two in each byte, and the tensor `…_scales` (…, n / 32) of uint8
      the exponent of each block of 32, as in gpt-oss. The result, (…, n), is exact in
      bfloat16. Each process reads the blocks and the scales of its own shards. It
      cannot be saved.

    The product counts as bfloat16; for another dtype, pass `dtype=`.

    Args:
        format: the format of the tensor.
        block: rows and columns of a block in float8; those at the ends may have fewer.
        suffix: what follows the name of a float8 tensor in that of its scales.

    Raises:
        CheckpointError: the arguments are invalid.
    """
    if format == "mxfp4":
        if (block, suffix) != (128, "_scale_inv"):
            raise CheckpointError(
                "block= and suffix= are for float8; write dequantize('mxfp4'), whose "
                f"blocks are {MXFP4_BLOCK} numbers"
            )
        return Mxfp4()
    if format != "float8":
        raise CheckpointError(
            f"dequantize({format!r}): the formats are 'float8' and 'mxfp4'"
        )
    if block < 1:
        raise CheckpointError(f"dequantize(block={block}): a block has at least 1 row")
    return Dequantize(block, suffix)


Step = Regroup | Stack | Merge | Split | Cast | Dequantize | Mxfp4
STEPS = (Regroup, Stack, Merge, Split, Cast, Dequantize, Mxfp4)


def _axis(axis: int, shape: Shape) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"there is no dim {axis} in {show_shape(shape)}")
    return axis % len(shape)


def _part_sizes(size: int, parts: int | tuple[int, ...]) -> list[int]:
    if not isinstance(parts, int):
        if sum(parts) != size:
            raise ValueError(f"parts of {parts} do not make {size}")
        return list(parts)
    if size % parts:
        raise ValueError(f"{size} is not {parts} equal parts; say sizes=(…)")
    return [size // parts] * parts


def _moved(block: Block, axis: int, by: int) -> Block:
    start = list(block.start)
    start[axis] += by
    return dataclasses.replace(block, start=tuple(start))
