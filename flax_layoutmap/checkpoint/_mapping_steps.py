"""The steps of a mapping, as a user writes them."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap.checkpoint._leaves import is_floating
from flax_layoutmap.checkpoint._mapping_transforms import (
    Cast,
    Linear,
    Merge,
    Rearrange,
    Split,
    Stack,
    Transpose,
    Unflatten,
)


def transpose(*axes: int) -> Transpose:
    """The tensor with its dims in another order, as `numpy.transpose`.

    Args:
        *axes: for each dim of the result, which dim of the tensor; none reverses them.
    """
    return Transpose(axes)


def linear(*, inputs: int | None = None, outputs: int | None = None) -> Linear:
    """The weight `(outputs, inputs)` of a `torch.nn.Linear` as a kernel of Flax.

    A kernel of `nnx.Linear` has two dims, one of `nnx.LinearGeneral` may have several
    for inputs or outputs: `(dim, heads, head_dim)`. The leaf's shape tells.

    Args:
        inputs: how many dims of the kernel are inputs; 1 unless `outputs` is given.
        outputs: how many are outputs, where the rest are inputs (as after attention).
    """
    if inputs is not None and outputs is not None:
        raise CheckpointError(
            "linear takes inputs= or outputs=; the rest are the other"
        )
    return Linear(1 if inputs is None and outputs is None else inputs, outputs)


def unflatten() -> Unflatten:
    """A tensor of one dim with the shape of the leaf: `(heads * dim,)` → heads, dim."""
    return Unflatten()


def rearrange(pattern: str, **sizes: int) -> Rearrange:
    """The tensor with its dims split, reordered and joined, as `einops.rearrange`.

    Sizes come from the shape of the leaf, as far as it tells.

    Args:
        pattern: the dims of the tensor and of the leaf:
            `"(heads three dim) inputs -> three inputs heads dim"`.
        **sizes: sizes of axes that the leaf does not tell, since it joins them.

    Raises:
        CheckpointError: the pattern is none.
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
    left, right = (tuple(side or ()) for side in groups)
    return Rearrange(pattern, left, right, tuple(sizes.items()))


_GROUP = re.compile(r"\(([\w ]*)\)|(\w+)|\s+")


def _groups(side: str) -> list[tuple[str, ...]] | None:
    """The names in each dim of one side of a pattern; None where it is no such side."""
    groups, at = [], 0
    while at < len(side):
        found = _GROUP.match(side, at)
        if found is None:
            return None
        at = found.end()
        if found[1] is not None or found[2]:
            groups.append(tuple((found[1] or found[2] or "").split()))
    return groups


def stack(
    axis: int = 0, over: Sequence[Any] | None = None, *, field: str = "layer"
) -> Stack:
    """Several tensors along a new dim, as a model that scans over its layers has them.

    Args:
        axis: the dim of the result.
        over: what to fill in for `{layer}` in the name of the tensor, one for each
            entry of the dim. None: 0, 1, 2, … as many as the leaf has.
        field: another name for `layer`, to stack experts within layers.
    """
    return Stack(axis, None if over is None else tuple(map(str, over)), field)


def merge(
    axis: int,
    over: Sequence[str],
    sizes: Sequence[int] | None = None,
    *,
    field: str = "part",
) -> Merge:
    """Several tensors one after another along a dim: a fused leaf of separate tensors.

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


def split(axis: int, index: int, of: int | Sequence[int]) -> Split:
    """One part of a fused tensor, such as the queries of `c_attn`.

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
        raise CheckpointError(f"split has {count} parts, so index={index} is none")
    return Split(axis, index, parts)


def cast(dtype: Any) -> Cast:
    """The tensor as another floating-point dtype, before it is compared to the leaf's.

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
