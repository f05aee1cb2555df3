"""The steps of a mapping: operations that turn tensors into a leaf.

A step works both ways, and the shapes of its inputs follow from that of the leaf, so
that a mapping holds no numbers of a model.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap._rules.records import Shape, show_shape
from flax_layoutmap.checkpoint._safetensors import (
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

# What a leaf is made of, each with the change of the tensor's name.
Inputs = list[tuple[Callable[[str], str], Array]]
Parts = list[tuple[Any, slice]]


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """An operation, with a key that says which it is.

    `back` undoes it, and `forward` does it, for the shape and the dtype of the leaf.
    `field` is what `back` fills in in names. `place` is for parts of a tensor: the
    shape of the whole, the dim, and the place in it.
    """

    key: tuple[Any, ...]
    back: Callable[[Array], Inputs]
    forward: Callable[[Sequence[Array], Shape, Any], Array]
    field: str = ""
    place: Callable[[Shape], tuple[Shape, int, slice]] | None = None


# ------------------------------------------------------------- one tensor, other dims


def _regroup(
    key: tuple[Any, ...], groups_of: Callable[[int], Sequence[Sequence[int]]]
) -> Step:
    """Split dims of the tensor, and put all into another order.

    `groups_of` gives, for the rank of the leaf, its dims in each dim of the tensor.
    """

    def back(leaf: Array) -> Inputs:
        groups = groups_of(len(leaf.shape))
        moved = transposed(leaf, [*itertools.chain(*groups)])
        sizes = [[leaf.shape[dim] for dim in group] for group in groups]
        return [(str, flattened(moved, sizes))]

    def forward(parts: Sequence[Array], shape: Shape, dtype: Any) -> Array:
        groups = groups_of(len(shape))
        dims = [*itertools.chain(*groups)]
        apart = unflattened(parts[0], [[shape[dim] for dim in g] for g in groups])
        return transposed(apart, [dims.index(dim) for dim in range(len(shape))])

    return Step(key, back, forward)


def transpose(*axes: int) -> Step:
    """Permute the dims of a tensor, as `numpy.transpose`; none reverses them."""

    def groups(rank: int) -> Sequence[Sequence[int]]:
        order = axes or tuple(reversed(range(rank)))
        if sorted(order) != list(range(rank)):
            raise ValueError(f"transpose{axes} is not an order of {rank} dims")
        return [[order.index(dim)] for dim in range(rank)]

    return _regroup(("transpose", axes), groups)


def linear(*, inputs: int | None = None, outputs: int | None = None) -> Step:
    """Convert the weight `(outputs, inputs)` of `torch.nn.Linear` to a Flax kernel.

    A kernel of `nnx.LinearGeneral` may have several dims for inputs or outputs, such as
    `(dim, heads, head_dim)`. Its first dim is the inputs, unless `inputs` says how many
    are, or `outputs` how many of the last are outputs (1 after attention).
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


def _join(
    key: tuple[Any, ...],
    axis: int,
    field: str,
    parts_of: Callable[[int], Parts],
    new_dim: bool,
) -> Step:
    """Put tensors one after another along a dim, which may be one that they lack.

    `parts_of` gives for the size of the dim what to fill in for each, and its place.
    """

    def back(leaf: Array) -> Inputs:
        dim = _dim(axis, leaf.shape)
        return [
            (
                lambda name, value=value: name.replace(f"{{{field}}}", str(value)),
                entry(leaf, dim, at.start) if new_dim else entries(leaf, dim, at),
            )
            for value, at in parts_of(leaf.shape[dim])
        ]

    def forward(parts: Sequence[Array], shape: Shape, dtype: Any) -> Array:
        dim = _dim(axis, shape)
        places = [at for _, at in parts_of(shape[dim])]
        parts = [with_dim(x, dim) for x in parts] if new_dim else parts
        return assembled(shape, dim, [*zip(places, parts, strict=True)], dtype)

    return Step(key, back, forward, field)


def stack(
    axis: int = 0,
    over: Sequence[Any] | None = None,
    *,
    field: str = "layer",
    start: int = 0,
) -> Step:
    """Stack tensors along a new dim, as in a model that scans over its layers.

    `over` has what to fill in for `{layer}` in the name of the tensor, for each entry
    of the dim `axis`; None stands for consecutive numbers from `start`. `field` is
    another name for `layer`, to stack experts within layers.
    """

    def parts_of(size: int) -> Parts:
        names = range(start, start + size) if over is None else over
        if len(names) != size:
            text = f"{size} entries in dim {axis}, and {len(names)} tensors are stacked"
            raise ValueError(f"it has {text}")
        return [*zip(names, _slices([1] * size), strict=True)]

    names = None if over is None else tuple(over)
    return _join(("stack", axis, names, start), axis, field, parts_of, True)


def merge(
    axis: int,
    over: Sequence[str],
    sizes: Sequence[int] | None = None,
    *,
    field: str = "part",
) -> Step:
    """Concatenate tensors along a dim: a fused leaf from separate tensors.

    `over` has what to fill in for `{part}` in the name, as `("q_proj", "k_proj")`, and
    `sizes` how many entries each has in that dim; None if equally many. `field` is
    another name for `part`.
    """

    def parts_of(size: int) -> Parts:
        each = sizes or (size // len(over),) * len(over)
        if len(each) != len(over) or sum(each) != size:
            raise ValueError(
                f"dim {axis} has {size} entries, which are not {len(over)} parts of "
                f"{sizes or 'equal size; pass sizes=(…)'}"
            )
        return [*zip(over, _slices(each), strict=True)]

    key = ("merge", axis, tuple(over), None if sizes is None else tuple(sizes))
    return _join(key, axis, field, parts_of, False)


def split(
    axis: int, index: int, of: int | Sequence[int], *, alternating: bool = False
) -> Step:
    """Take one part of a fused tensor, such as the queries of `c_attn`.

    It is part `index`, from 0, along the dim `axis`. `of` is how many equal parts there
    are, or the size of each. With `alternating` a part has every `of`-th entry.
    """
    count = of if isinstance(of, int) else len(of)
    if not 0 <= index < count or (alternating and not isinstance(of, int)):
        text = f"there is no part {index}, or alternating parts are not equal"
        raise CheckpointError(f"split({axis}, {index}, {of}): {text}")

    def place(shape: Shape) -> tuple[Shape, int, slice]:
        dim = _dim(axis, shape)
        sizes = (shape[dim],) * of if isinstance(of, int) else of
        if sizes[index] != shape[dim]:
            raise ValueError(
                f"part {index} of {of} has {sizes[index]} entries, not {shape[dim]}"
            )
        whole = replaced(shape, dim, sum(sizes))
        chosen = (
            slice(index, sum(sizes), count) if alternating else _slices(sizes)[index]
        )
        return whole, dim, chosen

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


def _slices(sizes: Iterable[int]) -> list[slice]:
    ends = [0, *itertools.accumulate(sizes)]
    return [slice(*pair) for pair in itertools.pairwise(ends)]


# ------------------------------------------------------------------ scaled blocks


def dequantize(
    format: Literal["float8", "mxfp4"] = "float8",
    *,
    block: int = 128,
    suffix: str = "_scale_inv",
) -> Step:
    """Multiply a float8 or MXFP4 tensor by the scale of each of its blocks.

    It is done before the other steps, wherever it stands among them. The product counts
    as bfloat16; for another dtype, pass `dtype=`.

    - `"float8"`, as in DeepSeek-V3: the tensor `name` has its scales in the tensor
      `name + suffix`, one for each block of `block` rows and columns (fewer at the
      ends). The product is computed in float32. A tensor that is not in float8 is taken
      as it is, and saving writes the product.
    - `"mxfp4"`, as in gpt-oss: the tensor `…_blocks` (…, n / 32, 16) of uint8 holds n
      numbers in its last two dims, and `…_scales` (…, n / 32) of uint8 the exponent of
      each block of 32. The result, (…, n), is exact in bfloat16. It cannot be saved.
    """
    if format not in ("float8", "mxfp4") or block < 1:
        raise CheckpointError(
            f"dequantize({format!r}, block={block}): write dequantize('mxfp4'), or "
            "dequantize('float8'), with blocks of at least 1 row"
        )

    def scales_of(leaf: Array) -> Inputs:
        if len(leaf.shape) != 2:
            raise ValueError(
                f"dequantize is for tensors of two dims, not {show_shape(leaf.shape)}"
            )
        scales = nothing(math.ceil(size / block) for size in leaf.shape)
        return [(str, leaf), (lambda name: name + suffix, scales)]

    if format == "float8":
        key = ("float8", block, suffix)
        return Step(
            key, scales_of, lambda x, _, dtype: scaled(x[0], x[1], block, dtype)
        )
    return Step(
        ("mxfp4",), _mxfp4_parts, lambda x, _, dtype: from_mxfp4(x[0], x[1], dtype)
    )


def _mxfp4_parts(leaf: Array) -> Inputs:
    *lead, last = leaf.shape or (1,)
    blocks = (*lead, last // MXFP4_BLOCK)
    if last % MXFP4_BLOCK:
        raise ValueError(
            f"MXFP4 has blocks of {MXFP4_BLOCK} numbers along the last dim, which do "
            f"not make {show_shape(leaf.shape)}"
        )
    return [
        (str, nothing((*blocks, 16))),
        (lambda name: name.removesuffix("_blocks") + "_scales", nothing(blocks)),
    ]


def is_scaled(step: Step) -> bool:
    return step.key[0] in ("float8", "mxfp4")
