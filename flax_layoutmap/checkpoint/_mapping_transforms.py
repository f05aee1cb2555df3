"""What is done to tensors to make a leaf of them. Each step is known in both ways.

A step says from the shape of its result which inputs it needs, and where a block of an
input lies in the result. The shape of the leaf gives all sizes, so that a mapping holds
no numbers of a model, and the same steps save as well.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from flax_layoutmap._rules.records import Shape, show_shape
from flax_layoutmap.checkpoint._mapping_blocks import Block, full_index, regroup


class Input(NamedTuple):
    """One input of a step.

    Attributes:
        fields: what to fill into the name of the tensor.
        shape: its shape.
    """

    fields: dict[str, str]
    shape: Shape


@dataclasses.dataclass(frozen=True)
class Transpose:
    """See `mappings.transpose`."""

    axes: tuple[int, ...]

    def inputs(self, shape: Shape) -> list[Input]:
        """The one input."""
        found = [0] * len(shape)
        for axis, size in zip(self._axes(len(shape)), shape, strict=True):
            found[axis] = size
        return [Input({}, tuple(found))]

    def place(self, block: Block, at: int, shape: Shape) -> Iterator[Block]:
        """A block of it in the result."""
        axes = self._axes(len(shape))
        yield dataclasses.replace(
            block,
            start=tuple(block.start[axis] for axis in axes),
            dims=tuple(block.dims[axis] for axis in axes),
        )

    def _axes(self, rank: int) -> tuple[int, ...]:
        axes = self.axes or tuple(reversed(range(rank)))
        if sorted(axes) != list(range(rank)):
            raise ValueError(f"transpose{self.axes} is no order of {rank} dims")
        return axes


@dataclasses.dataclass(frozen=True)
class Rearrange:
    """See `mappings.rearrange`."""

    pattern: str
    left: tuple[tuple[str, ...], ...]
    right: tuple[tuple[str, ...], ...]
    given: tuple[tuple[str, int], ...]

    def inputs(self, shape: Shape) -> list[Input]:
        """The one input."""
        sizes = self._sizes(shape)
        return [Input({}, tuple(math.prod(sizes[n] for n in g) for g in self.left))]

    def place(self, block: Block, at: int, shape: Shape) -> Iterator[Block]:
        """A block of it in the result."""
        yield from regroup(block, self.left, self.right, self._sizes(shape))

    def _sizes(self, shape: Shape) -> dict[str, int]:
        if len(shape) != len(self.right):
            raise ValueError(
                f"{self.pattern!r} makes {len(self.right)} dims, not "
                f"{show_shape(shape)}"
            )
        sizes = dict(self.given)
        for names, size in zip(self.right, shape, strict=True):
            unknown = [name for name in names if name not in sizes]
            if len(unknown) > 1:
                raise ValueError(
                    f"{self.pattern!r} leaves the sizes of {' and '.join(unknown)} open"
                    f"; name one, as in rearrange({self.pattern!r}, {unknown[0]}=2)"
                )
            known = math.prod(sizes[name] for name in names if name in sizes)
            if unknown and known and size % known == 0:
                sizes[unknown[0]] = size // known
            elif unknown or known != size:
                raise ValueError(
                    f"{self.pattern!r} does not fit {show_shape(shape)}: "
                    f"{' × '.join(names)} is {size} there, with {dict(self.given)}"
                )
        return sizes


@dataclasses.dataclass(frozen=True)
class Linear:
    """See `mappings.linear`."""

    input_dims: int | None
    output_dims: int | None

    def inputs(self, shape: Shape) -> list[Input]:
        """The one input."""
        count = self._inputs(shape)
        return [Input({}, (math.prod(shape[count:]), math.prod(shape[:count])))]

    def place(self, block: Block, at: int, shape: Shape) -> Iterator[Block]:
        """A block of it in the result."""
        names = [str(number) for number in range(len(shape))]
        count = self._inputs(shape)
        sizes = dict(zip(names, shape, strict=True))
        left = [names[count:], names[:count]]
        yield from regroup(block, left, [[name] for name in names], sizes)

    def _inputs(self, shape: Shape) -> int:
        count = self.input_dims
        if count is None:
            count = len(shape) - (self.output_dims or 1)
        if not 0 < count < len(shape):
            raise ValueError(
                f"{show_shape(shape)} is no kernel with dims for inputs and for outputs"
            )
        return count


@dataclasses.dataclass(frozen=True)
class Unflatten:
    """See `mappings.unflatten`."""

    def inputs(self, shape: Shape) -> list[Input]:
        """The one input."""
        return [Input({}, (math.prod(shape),))]

    def place(self, block: Block, at: int, shape: Shape) -> Iterator[Block]:
        """A block of it in the result."""
        names = [str(number) for number in range(len(shape))]
        sizes = dict(zip(names, shape, strict=True))
        yield from regroup(block, [names], [[name] for name in names], sizes)


@dataclasses.dataclass(frozen=True)
class Stack:
    """See `mappings.stack`."""

    axis: int
    over: tuple[str, ...] | None
    field: str

    def inputs(self, shape: Shape) -> list[Input]:
        """One input per entry of the new dim."""
        axis = _axis(self.axis, shape)
        names = self.over or tuple(str(number) for number in range(shape[axis]))
        if len(names) != shape[axis]:
            raise ValueError(
                f"it has {shape[axis]} entries in dim {axis}, and {len(names)} tensors "
                "are stacked"
            )
        inner = (*shape[:axis], *shape[axis + 1 :])
        return [Input({self.field: name}, inner) for name in names]

    def place(self, block: Block, at: int, shape: Shape) -> Iterator[Block]:
        """A block of an input in the result."""
        axis = _axis(self.axis, shape)
        yield dataclasses.replace(
            block,
            start=(*block.start[:axis], at, *block.start[axis:]),
            dims=(*block.dims[:axis], (), *block.dims[axis:]),
        )


@dataclasses.dataclass(frozen=True)
class Merge:
    """See `mappings.merge`."""

    axis: int
    over: tuple[str, ...]
    sizes: tuple[int, ...] | None
    field: str

    def inputs(self, shape: Shape) -> list[Input]:
        """One input per part."""
        axis = _axis(self.axis, shape)
        sizes = _part_sizes(shape[axis], self.sizes or len(self.over))
        return [
            Input({self.field: name}, (*shape[:axis], size, *shape[axis + 1 :]))
            for name, size in zip(self.over, sizes, strict=True)
        ]

    def place(self, block: Block, at: int, shape: Shape) -> Iterator[Block]:
        """A block of an input in the result."""
        axis = _axis(self.axis, shape)
        sizes = _part_sizes(shape[axis], self.sizes or len(self.over))
        yield _moved(block, axis, sum(sizes[:at]))


@dataclasses.dataclass(frozen=True)
class Split:
    """See `mappings.split`."""

    axis: int
    index: int
    of: int | tuple[int, ...]

    def inputs(self, shape: Shape) -> list[Input]:
        """The one input, of which the result is a part."""
        axis = _axis(self.axis, shape)
        sizes = self._sizes(shape[axis])
        return [Input({}, (*shape[:axis], sum(sizes), *shape[axis + 1 :]))]

    def place(self, block: Block, at: int, shape: Shape) -> Iterator[Block]:
        """What of a block of it is in the result."""
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


@dataclasses.dataclass(frozen=True)
class Cast:
    """See `mappings.cast`."""

    dtype: np.dtype[Any]

    def inputs(self, shape: Shape) -> list[Input]:
        """The one input."""
        return [Input({}, shape)]

    def place(self, block: Block, at: int, shape: Shape) -> Iterator[Block]:
        """The same block."""
        yield block


Transform = Transpose | Rearrange | Linear | Unflatten | Stack | Merge | Split | Cast
KINDS = (Transpose, Rearrange, Linear, Unflatten, Stack, Merge, Split, Cast)


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
