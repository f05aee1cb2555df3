"""The steps of a mapping: operations that turn tensors into a leaf.

A step works both ways. From the shape of its result it gives the inputs that it needs,
so that a mapping holds no numbers of a model; `forward` makes the result of the inputs,
and `back` the inputs of the result, to save.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap._rules.records import Shape, show_shape
from flax_layoutmap.checkpoint._lazy import (
    MXFP4_BLOCK,
    Array,
    concatenated,
    flattened,
    part,
    transposed,
    unflattened,
)
from flax_layoutmap.checkpoint._leaves import is_floating


class Input(NamedTuple):
    """One input of a step: its shape, and the fields of its tensor's name."""

    fields: dict[str, str]
    shape: Shape


# ------------------------------------------------------------- one tensor, other dims

Axes = Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Regroup:
    """Splits dims to axes, orders the axes, and joins them to dims.

    `axes` gives, for the shape of the leaf, the names of the axes in each dim of the
    tensor and of the leaf, and their sizes. `key` names the step and its arguments.
    """

    key: tuple[Any, ...]
    axes: Callable[[Shape], tuple[Axes, Axes, Mapping[str, int]]] = dataclasses.field(
        compare=False
    )

    def inputs(self, shape: Shape) -> list[Input]:
        left, _, sizes = self.axes(shape)
        return [Input({}, tuple(math.prod(sizes[n] for n in group) for group in left))]

    def forward(self, parts: Sequence[Array], shape: Shape, dtype: Any) -> Array:
        left, right, sizes = self.axes(shape)
        return _regrouped(parts[0], left, right, sizes)

    def back(self, value: Array) -> list[Array]:
        left, right, sizes = self.axes(value.shape)
        return [_regrouped(value, right, left, sizes)]


def _regrouped(x: Array, left: Axes, right: Axes, sizes: Mapping[str, int]) -> Array:
    names = [name for group in left for name in group]
    order = [names.index(name) for group in right for name in group]
    apart = unflattened(x, [[sizes[name] for name in group] for group in left])
    groups = [[sizes[name] for name in group] for group in right]
    return flattened(transposed(apart, order), groups)


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
            raise ValueError(f"transpose{axes} is not an order of {len(shape)} dims")
        return _in_leaf([[order.index(dim)] for dim in range(len(shape))], shape)

    return Regroup(("transpose", axes), axes_of)


def linear(*, inputs: int | None = None, outputs: int | None = None) -> Regroup:
    """Convert the weight `(outputs, inputs)` of `torch.nn.Linear` to a Flax kernel.

    A kernel of `nnx.Linear` has two dims, one of `nnx.LinearGeneral` may have several
    for inputs or outputs: `(dim, heads, head_dim)`. The leaf's shape decides.

    Args:
        inputs: how many dims of the kernel are inputs; 1 unless `outputs` is given.
        outputs: how many are outputs, where the rest are inputs (as after attention).
    """
    if inputs is not None and outputs is not None:
        raise CheckpointError("linear takes inputs= or outputs=, not both")

    def axes_of(shape: Shape) -> Any:
        rank = len(shape)
        count = (1 if inputs is None else inputs) if outputs is None else rank - outputs
        if not 0 < count < rank:
            raise ValueError(
                f"{show_shape(shape)} is not a kernel with dims for inputs and outputs"
            )
        return _in_leaf([range(count, rank), range(count)], shape)

    return Regroup(("linear", inputs, outputs), axes_of)


def unflatten() -> Regroup:
    """Reshape a tensor of one dim to the leaf: `(heads * dim,)` → heads, dim."""
    return Regroup(("unflatten",), lambda shape: _in_leaf([range(len(shape))], shape))


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
    sides = [_groups(side) for side in pattern.split("->")]
    names = [sorted(name for group in side or () for name in group) for side in sides]
    if len(sides) != 2 or None in sides or names[0] != names[1]:
        raise CheckpointError(
            f"rearrange({pattern!r}) needs the same names on both sides of '->', with "
            "brackets around those that are one dim: '(heads dim) inputs -> inputs "
            "heads dim'"
        )
    if len(set(names[0])) < len(names[0]) or not set(sizes) <= set(names[0]):
        raise CheckpointError(
            f"rearrange({pattern!r}) has a name twice, or sizes for others: {sizes}"
        )
    left, right = (side or () for side in sides)
    return Regroup(
        ("rearrange", left, right, tuple(sizes.items())),
        lambda shape: (left, right, _sizes(pattern, right, sizes, shape)),
    )


def _groups(side: str) -> tuple[tuple[str, ...], ...] | None:
    """The names in each dim of one side of a pattern; None if it is malformed."""
    if not re.fullmatch(r"(?:\([\w ]*\)|\w+|\s+)*", side):
        return None
    groups = re.findall(r"\(([\w ]*)\)|(\w+)", side)
    return tuple(tuple((joined or single).split()) for joined, single in groups)


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
        if unknown and known:
            sizes[unknown[0]] = size // known
        if math.prod(sizes.get(name, 0) for name in names) != size:
            raise ValueError(
                f"{pattern!r} does not fit {show_shape(shape)}: "
                f"{' × '.join(names)} is {size} there, with {dict(given)}"
            )
    return sizes


# ------------------------------------------------------ several tensors, parts of one


@dataclasses.dataclass(frozen=True)
class Merge:
    """Concatenates tensors along a dim, or stacks them along a new one (`is_new`)."""

    axis: int
    field: str
    over: tuple[str, ...] | None
    sizes: tuple[int, ...] | None = None
    start: int = 0
    is_new: bool = False

    def inputs(self, shape: Shape) -> list[Input]:
        axis = _axis(self.axis, shape)
        sizes, found = self._sizes(shape[axis]), []
        numbers = range(self.start, self.start + len(sizes))
        names = map(str, numbers) if self.over is None else self.over
        for name, size in zip(names, sizes, strict=True):
            middle = () if self.is_new else (size,)
            inner = (*shape[:axis], *middle, *shape[axis + 1 :])
            found.append(Input({self.field: name}, inner))
        return found

    def forward(self, parts: Sequence[Array], shape: Shape, dtype: Any) -> Array:
        axis = _axis(self.axis, shape)
        if self.is_new:
            sizes = _with_dim(parts[0].shape, axis)
            parts = [flattened(x, sizes) for x in parts]
        return concatenated(parts, axis, dtype)

    def back(self, value: Array) -> list[Array]:
        axis = _axis(self.axis, value.shape)
        start, parts = 0, []
        for size in self._sizes(value.shape[axis]):
            parts.append(part(value, axis, start, start + size))
            start += size
        if self.is_new:
            rest = (*value.shape[:axis], *value.shape[axis + 1 :])
            parts = [unflattened(x, _with_dim(rest, axis)) for x in parts]
        return parts

    def _sizes(self, size: int) -> Sequence[int]:
        if not self.is_new:
            return _part_sizes(size, self.sizes or len(self.over or ()))
        if self.over is not None and len(self.over) != size:
            raise ValueError(
                f"it has {size} entries in dim {self.axis}, and {len(self.over)} "
                "tensors are stacked"
            )
        return [1] * size


def _with_dim(shape: Shape, axis: int) -> list[tuple[int, ...]]:
    """The dims of a shape as groups, with an empty one at `axis`."""
    groups = [(size,) for size in shape]
    return [*groups[:axis], (), *groups[axis:]]


def stack(
    axis: int = 0,
    over: Sequence[Any] | None = None,
    *,
    field: str = "layer",
    start: int = 0,
) -> Merge:
    """Stack tensors along a new dim, as in a model that scans over its layers.

    Args:
        axis: the dim of the result.
        over: what to fill in for `{layer}` in the name of the tensor, one for each
            entry of the dim. None: consecutive numbers, as many as the leaf has.
        field: another name for `layer`, to stack experts within layers.
        start: the first of the consecutive numbers.
    """
    names = None if over is None else tuple(map(str, over))
    return Merge(axis, field, names, start=start, is_new=True)


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
        over: what to fill in for `{part}` in the name, as `("q_proj", "k_proj")`.
        sizes: how many entries each has in that dim; None if equally many.
        field: another name for `part`.
    """
    if not over or (sizes is not None and len(sizes) != len(over)):
        raise CheckpointError(f"merge needs parts, and as many sizes: {over}, {sizes}")
    return Merge(axis, field, tuple(over), None if sizes is None else tuple(sizes))


@dataclasses.dataclass(frozen=True)
class Split:
    """The step of `split`; to undo it needs the other parts: see `save_safetensors`."""

    axis: int
    index: int
    of: int | tuple[int, ...]

    def inputs(self, shape: Shape) -> list[Input]:
        axis = _axis(self.axis, shape)
        total = sum(self._sizes(shape[axis]))
        return [Input({}, (*shape[:axis], total, *shape[axis + 1 :]))]

    def forward(self, parts: Sequence[Array], shape: Shape, dtype: Any) -> Array:
        axis, start = self.place(shape)
        return part(parts[0], axis, start, start + shape[axis])

    def place(self, shape: Shape) -> tuple[int, int]:
        """The dim that is split, and where a part of this shape begins in it."""
        axis = _axis(self.axis, shape)
        return axis, sum(self._sizes(shape[axis])[: self.index])

    def _sizes(self, size: int) -> Sequence[int]:
        if isinstance(self.of, int):
            return [size] * self.of
        if self.of[self.index] != size:
            raise ValueError(
                f"part {self.index} of {self.of} has {self.of[self.index]} entries, "
                f"not {size}"
            )
        return self.of


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


def _axis(axis: int, shape: Shape) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"there is no dim {axis} in {show_shape(shape)}")
    return axis % len(shape)


def _part_sizes(size: int, parts: int | tuple[int, ...]) -> Sequence[int]:
    if isinstance(parts, int):
        if size % parts:
            raise ValueError(f"{size} is not {parts} equal parts; pass sizes=(…)")
        return [size // parts] * parts
    if sum(parts) != size:
        raise ValueError(f"parts of {parts} do not make {size}")
    return parts


# ----------------------------------------------------------- numbers of other dtypes


@dataclasses.dataclass(frozen=True)
class Cast:
    """The step of `cast`."""

    dtype: np.dtype[Any]


def cast(dtype: Any) -> Cast:
    """Cast a tensor to another floating-point dtype, before it is compared to the leaf.

    Saving writes the dtype that the leaf has.

    Raises:
        CheckpointError: it is not a floating-point dtype.
    """
    try:
        found = np.dtype(dtype)
    except TypeError as error:
        raise CheckpointError(f"cast({dtype!r}): not a dtype: {error}") from error
    if not is_floating(found):
        raise CheckpointError(f"cast({found}): only floating-point dtypes are cast")
    return Cast(found)


@dataclasses.dataclass(frozen=True)
class Dequantize:
    """The step of `dequantize`; `block` is 0 for MXFP4."""

    block: int
    suffix: str

    @property
    def is_mxfp4(self) -> bool:
        return not self.block

    def scales(self, name: str, shape: Shape) -> tuple[str, Shape]:
        """Name and shape of the scales of a tensor with numbers in this shape."""
        if not self.is_mxfp4:
            if len(shape) != 2:
                raise ValueError(
                    f"dequantize is for tensors of two dims, not {show_shape(shape)}"
                )
            return name + self.suffix, tuple(-(-size // self.block) for size in shape)
        if not shape or shape[-1] % MXFP4_BLOCK:
            raise ValueError(
                f"MXFP4 has blocks of {MXFP4_BLOCK} numbers along the last dim, which "
                f"do not make {show_shape(shape)}"
            )
        name = name.removesuffix("_blocks") + self.suffix
        return name, (*shape[:-1], shape[-1] // MXFP4_BLOCK)


def dequantize(
    format: Literal["float8", "mxfp4"] = "float8",
    *,
    block: int = 128,
    suffix: str = "_scale_inv",
) -> Dequantize:
    """Multiply a float8 or MXFP4 tensor by the scale of each of its blocks.

    - `"float8"`: the tensor `name` has its scales in the tensor `name + suffix`, one
      for each block of `block` rows and as many columns, as in DeepSeek-V3. The product
      is computed in float32. A tensor that is not in float8 is taken as it is. Saving
      writes the product, without scales.
    - `"mxfp4"`: the tensor `…_blocks` (…, n / 32, 16) of uint8 holds n numbers in its
      last two dims, two in each byte, and the tensor `…_scales` (…, n / 32) of uint8
      the exponent of each block of 32, as in gpt-oss. The result, (…, n), is exact in
      bfloat16. It cannot be saved.

    The product counts as bfloat16; for another dtype, pass `dtype=`.

    Args:
        format: the format of the tensor.
        block: rows and columns of a block in float8; those at the ends may have fewer.
        suffix: what follows the name of a float8 tensor in that of its scales.

    Raises:
        CheckpointError: the arguments are invalid.
    """
    if format == "mxfp4" and (block, suffix) == (128, "_scale_inv"):
        return Dequantize(0, "_scales")
    if format != "float8" or block < 1:
        raise CheckpointError(
            f"dequantize({format!r}, block={block}, suffix={suffix!r}): write "
            "dequantize('mxfp4'), whose blocks have 32 numbers, or "
            "dequantize('float8'), with blocks of at least 1 row"
        )
    return Dequantize(block, suffix)


STEPS = (Regroup, Merge, Split, Cast, Dequantize)


def filled(name: str, fields: Mapping[str, str]) -> str:
    """The name of a tensor with values in the place of its `{fields}`."""
    for field, value in fields.items():
        name = name.replace(f"{{{field}}}", value)
    return name
