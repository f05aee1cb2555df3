"""The steps of a mapping: operations that turn tensors into a leaf.

A step works both ways, and the shapes of its inputs follow from that of the leaf, so
that a mapping holds no numbers of a model.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap._rules.records import Shape, show_shape
from flax_layoutmap.checkpoint._lazy import (
    MXFP4_BLOCK,
    Array,
    assembled,
    entries,
    entry,
    flattened,
    from_mxfp4,
    nothing,
    replaced,
    scaled,
    transposed,
    unflattened,
    with_dim,
)

Inputs = list[tuple[Callable[[str], str], Array]]
Place = tuple[Shape, int, slice]


@dataclasses.dataclass(frozen=True)
class Step:
    """An operation, named by its function and arguments.

    `forward` makes the leaf of its inputs, for a shape and a dtype; `back` gives the
    inputs of a leaf, each with the change of the name, where a value may take the place
    of `{field}`. `place` is for parts of a tensor: the shape of the whole, and the dim
    and place in it.
    """

    key: tuple[Any, ...]
    back: Callable[[Array], Inputs] = dataclasses.field(compare=False)
    forward: Callable[[Sequence[Array], Shape, Any], Array] = dataclasses.field(
        compare=False
    )
    field: str = ""
    place: Callable[[Shape], Place] | None = dataclasses.field(
        default=None, compare=False
    )


# ------------------------------------------------------------- one tensor, other dims


def _regroup(
    key: tuple[Any, ...], groups_of: Callable[[int], Sequence[Sequence[int]]]
) -> Step:
    """Split dims of the tensor, and put all into another order.

    `groups_of` gives, for the rank of the leaf, its dims in each dim of the tensor.
    """

    def back(leaf: Array) -> Inputs:
        groups = groups_of(len(leaf.shape))
        moved = transposed(leaf, [dim for group in groups for dim in group])
        sizes = [[leaf.shape[dim] for dim in group] for group in groups]
        return [(str, flattened(moved, sizes))]

    def forward(parts: Sequence[Array], shape: Shape, dtype: Any) -> Array:
        groups = groups_of(len(shape))
        dims = [dim for group in groups for dim in group]
        apart = unflattened(parts[0], [[shape[dim] for dim in g] for g in groups])
        return transposed(apart, [dims.index(dim) for dim in range(len(shape))])

    return Step(key, back, forward)


def transpose(*axes: int) -> Step:
    """Permute the dims of a tensor, as `numpy.transpose`.

    Args:
        *axes: for each dim of the result, which dim of the tensor; none reverses them.
    """

    def groups(rank: int) -> Sequence[Sequence[int]]:
        order = axes or tuple(reversed(range(rank)))
        if sorted(order) != list(range(rank)):
            raise ValueError(f"transpose{axes} is not an order of {rank} dims")
        return [[order.index(dim)] for dim in range(rank)]

    return _regroup(("transpose", axes), groups)


def linear(*, inputs: int | None = None, outputs: int | None = None) -> Step:
    """Convert the weight `(outputs, inputs)` of `torch.nn.Linear` to a Flax kernel.

    A kernel of `nnx.Linear` has two dims, one of `nnx.LinearGeneral` may have several
    for inputs or outputs: `(dim, heads, head_dim)`. The leaf's shape decides.

    Args:
        inputs: how many dims of the kernel are inputs; 1 unless `outputs` is given.
        outputs: how many are outputs, where the rest are inputs (as after attention).
    """
    if inputs is not None and outputs is not None:
        raise CheckpointError("linear takes inputs= or outputs=, not both")

    def groups(rank: int) -> Sequence[Sequence[int]]:
        count = rank - outputs if outputs is not None else inputs or 1
        if not 0 < count < rank:
            raise ValueError("it is not a kernel with dims for inputs and outputs")
        return [range(count, rank), range(count)]

    return _regroup(("linear", inputs, outputs), groups)


def unflatten() -> Step:
    """Reshape a tensor of one dim to the leaf: `(heads * dim,)` → heads, dim."""
    return _regroup(("unflatten",), lambda rank: [range(rank)])


# ------------------------------------------------------ several tensors, parts of one


def stack(
    axis: int = 0,
    over: Sequence[Any] | None = None,
    *,
    field: str = "layer",
    start: int = 0,
) -> Step:
    """Stack tensors along a new dim, as in a model that scans over its layers.

    Args:
        axis: the dim of the result.
        over: what to fill in for `{layer}` in the name of the tensor, one for each
            entry of the dim. None: consecutive numbers, as many as the leaf has.
        field: another name for `layer`, to stack experts within layers.
        start: the first of the consecutive numbers.
    """

    def back(leaf: Array) -> Inputs:
        dim = _dim(axis, leaf.shape)
        size = leaf.shape[dim]
        names = range(start, start + size) if over is None else over
        if len(names) != size:
            raise ValueError(
                f"it has {size} entries in dim {axis}, and {len(names)} tensors are "
                "stacked"
            )
        parts = [entry(leaf, dim, at) for at in range(size)]
        return [*zip(_filled(field, names), parts, strict=True)]

    def forward(parts: Sequence[Array], shape: Shape, dtype: Any) -> Array:
        dim = _dim(axis, shape)
        placed = [(slice(at, at + 1), with_dim(x, dim)) for at, x in enumerate(parts)]
        return assembled(shape, dim, placed, dtype)

    names = None if over is None else tuple(over)
    return Step(("stack", axis, names, start), back, forward, field)


def merge(
    axis: int,
    over: Sequence[str],
    sizes: Sequence[int] | None = None,
    *,
    field: str = "part",
) -> Step:
    """Concatenate tensors along a dim: a fused leaf from separate tensors.

    Args:
        axis: the dim.
        over: what to fill in for `{part}` in the name, as `("q_proj", "k_proj")`.
        sizes: how many entries each has in that dim; None if equally many.
        field: another name for `part`.
    """

    def slices(size: int) -> list[slice]:
        count = len(over)
        each = sizes or (size // count,) * count
        if len(each) != count or sum(each) != size:
            raise ValueError(
                f"dim {axis} has {size} entries, which are not {count} parts of "
                f"{sizes or 'equal size; pass sizes=(…)'}"
            )
        return [_from_to(each, at) for at in range(count)]

    def back(leaf: Array) -> Inputs:
        dim = _dim(axis, leaf.shape)
        parts = [entries(leaf, dim, chosen) for chosen in slices(leaf.shape[dim])]
        return [*zip(_filled(field, over), parts, strict=True)]

    def forward(parts: Sequence[Array], shape: Shape, dtype: Any) -> Array:
        dim = _dim(axis, shape)
        placed = [*zip(slices(shape[dim]), parts, strict=True)]
        return assembled(shape, dim, placed, dtype)

    key = ("merge", axis, tuple(over), None if sizes is None else tuple(sizes))
    return Step(key, back, forward, field)


def split(
    axis: int, index: int, of: int | Sequence[int], *, alternating: bool = False
) -> Step:
    """Take one part of a fused tensor, such as the queries of `c_attn`.

    Args:
        axis: the dim that is split.
        index: which part, from 0.
        of: how many equal parts there are, or the size of each.
        alternating: whether the parts alternate, so that one has every `of`-th entry.

    Raises:
        CheckpointError: there is no such part.
    """
    count = of if isinstance(of, int) else len(of)
    if not 0 <= index < count or (alternating and not isinstance(of, int)):
        raise CheckpointError(
            f"split({axis}, {index}, {of}): there is no part {index} of {count}, or "
            "alternating parts are not equal"
        )

    def place(shape: Shape) -> tuple[Shape, int, slice]:
        dim = _dim(axis, shape)
        sizes = (shape[dim],) * of if isinstance(of, int) else of
        if sizes[index] != shape[dim]:
            raise ValueError(
                f"part {index} of {of} has {sizes[index]} entries, not {shape[dim]}"
            )
        chosen = _from_to(sizes, index)
        if alternating:
            chosen = slice(index, sum(sizes), len(sizes))
        return replaced(shape, dim, sum(sizes)), dim, chosen

    def back(leaf: Array) -> Inputs:
        whole, dim, chosen = place(leaf.shape)
        return [(str, assembled(whole, dim, [(chosen, leaf)], None))]

    def forward(parts: Sequence[Array], shape: Shape, dtype: Any) -> Array:
        return entries(parts[0], *place(shape)[1:])

    sizes = of if isinstance(of, int) else tuple(of)
    return Step(("split", axis, index, sizes, alternating), back, forward, "", place)


def _dim(axis: int, shape: Shape) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"there is no dim {axis} in {show_shape(shape)}")
    return axis % len(shape)


def _filled(field: str, values: Iterable[Any]) -> list[Callable[[str], str]]:
    """Functions that put a value in the place of `{field}` in a name."""
    return [
        lambda name, value=str(value): name.replace(f"{{{field}}}", value)
        for value in values
    ]


def _from_to(sizes: Sequence[int], at: int) -> slice:
    return slice(sum(sizes[:at]), sum(sizes[: at + 1]))


# ------------------------------------------------------------------ scaled blocks


def dequantize(
    format: Literal["float8", "mxfp4"] = "float8",
    *,
    block: int = 128,
    suffix: str = "_scale_inv",
) -> Step:
    """Multiply a float8 or MXFP4 tensor by the scale of each of its blocks.

    It is done before the other steps, wherever it stands among them.

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
    if format not in ("float8", "mxfp4") or block < 1:
        raise CheckpointError(
            f"dequantize({format!r}, block={block}): write dequantize('mxfp4'), or "
            "dequantize('float8'), with blocks of at least 1 row"
        )
    return _mxfp4() if format == "mxfp4" else _float8(block, suffix)


def _float8(block: int, suffix: str) -> Step:
    def back(leaf: Array) -> Inputs:
        if len(leaf.shape) != 2:
            raise ValueError(
                f"dequantize is for tensors of two dims, not {show_shape(leaf.shape)}"
            )
        scales = nothing(math.ceil(size / block) for size in leaf.shape)
        return [(str, leaf), (lambda name: name + suffix, scales)]

    def forward(parts: Sequence[Array], shape: Shape, dtype: Any) -> Array:
        return scaled(parts[0], parts[1], block, dtype)

    return Step(("float8", block, suffix), back, forward)


def _mxfp4() -> Step:
    def back(leaf: Array) -> Inputs:
        *lead, last = leaf.shape or (1,)
        if last % MXFP4_BLOCK:
            raise ValueError(
                f"MXFP4 has blocks of {MXFP4_BLOCK} numbers along the last dim, which "
                f"do not make {show_shape(leaf.shape)}"
            )
        blocks = (*lead, last // MXFP4_BLOCK)
        return [
            (str, nothing((*blocks, 16))),
            (lambda name: name.removesuffix("_blocks") + "_scales", nothing(blocks)),
        ]

    def forward(parts: Sequence[Array], shape: Shape, dtype: Any) -> Array:
        return from_mxfp4(parts[0], parts[1], dtype)

    return Step(("mxfp4",), back, forward)


def is_scaled(step: Step) -> bool:
    """Whether it is a step of `dequantize`."""
    return step.key[0] in ("float8", "mxfp4")
