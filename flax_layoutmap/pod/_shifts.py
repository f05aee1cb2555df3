"""Operations whose result on one device needs elements of other devices.

Shardy leaves them as they are, and XLA's partitioner adds a collective afterwards: a
permute of the border (a convolution, `jnp.roll`), or a gather of all (`jnp.cumsum`).
"""

from collections.abc import Callable, Sequence
from typing import Any

from flax_layoutmap.pod._attributes import Attributes, Dims
from flax_layoutmap.pod._values import parts


def shifts(op: Any, dims: Dims, attributes: Attributes) -> bool:
    """Whether an operation moves elements along a sharded dim.

    Args:
        op: one of those in `SHIFTING`.
        dims: the axes of each dim of its result; of a convolution, of its operand.
        attributes: reads the operation.
    """
    counts = [parts(axes) for axes in dims]
    if max(counts, default=1) == 1:
        return False
    moved = SHIFTING[op.name](op, counts, attributes)
    return any(counts[dim] > 1 for dim in moved)


def _sliced(op: Any, counts: Sequence[int], attributes: Attributes) -> list[int]:
    before = attributes.type_of(op.operands[0])[0]
    after = attributes.type_of(op.results[0])[0]
    return [dim for dim in range(len(counts)) if before[dim] != after[dim]]


def _padded(op: Any, counts: Sequence[int], attributes: Attributes) -> list[int]:
    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    given = [list(op.attributes[name]) for name in names]
    return [dim for dim in range(len(counts)) if any(one[dim] for one in given)]


def _reversed(op: Any, counts: Sequence[int], attributes: Attributes) -> list[int]:
    return list(op.attributes["dimensions"])


def _joined(op: Any, counts: Sequence[int], attributes: Attributes) -> list[int]:
    from jaxlib.mlir import ir

    return [ir.IntegerAttr(op.attributes["dimension"]).value]


def _windowed(op: Any, counts: Sequence[int], attributes: Attributes) -> list[int]:
    sizes = attributes.type_of(op.operands[0])[0]
    window = list(op.attributes["window_dimensions"])
    dilations = ("base_dilations", "window_dilations")
    own = _own_windows(op, sizes, window, counts, dilations)
    return [dim for dim in range(len(counts)) if not own[dim]]


def _convolved(op: Any, counts: Sequence[int], attributes: Attributes) -> list[int]:
    from jaxlib.mlir.dialects import stablehlo

    numbers = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    shape, kernel = (attributes.type_of(one)[0] for one in op.operands)
    dims = list(numbers.input_spatial_dimensions)
    sizes, cuts = [shape[dim] for dim in dims], [counts[dim] for dim in dims]
    window = [kernel[dim] for dim in numbers.kernel_spatial_dimensions]
    own = _own_windows(op, sizes, window, cuts, ("lhs_dilation", "rhs_dilation"))
    return [dim for at, dim in enumerate(dims) if not own[at]]


def _own_windows(
    op: Any,
    sizes: Sequence[int],
    window: Sequence[int],
    cuts: Sequence[int],
    dilations: Sequence[str],
) -> list[bool]:
    """For each dim, whether a device has all that it needs.

    Every window lies within its part; or the only one is cut as what it lies on.
    """
    import numpy as np

    count, given = len(sizes), op.attributes
    strides = [1] * count
    if "window_strides" in given:
        strides = list(given["window_strides"])
    widened = np.zeros(count, bool)
    for name in dilations:
        if name in given:
            widened |= np.array(list(given[name])) != 1
    if "padding" in given:
        widened |= (np.array(given["padding"]).reshape(count, 2) != 0).any(axis=1)
    return [
        not widened[dim]
        and (
            (window[dim] == strides[dim] and size % (strides[dim] * cuts[dim]) == 0)
            or window[dim] == size
        )
        for dim, size in enumerate(sizes)
    ]


SHIFTING: dict[str, Callable[[Any, Sequence[int], Attributes], list[int]]] = {
    "stablehlo.slice": _sliced,
    "stablehlo.pad": _padded,
    "stablehlo.reverse": _reversed,
    "stablehlo.concatenate": _joined,
    "stablehlo.reduce_window": _windowed,
    "stablehlo.select_and_scatter": _windowed,
    "stablehlo.convolution": _convolved,
}
