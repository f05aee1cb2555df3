"""A value of a program: what it is a copy, a part or a sum of."""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

from flax_layoutmap.pod._attributes import AxisRef, Dims

Shape = tuple[int, ...]

# Bits of an element where its name does not say them; `i1` takes a byte in memory.
_BITS = {"i1": 8, "ui1": 8, "complex<f32>": 64, "complex<f64>": 128}
# The first number in a name is the width: `bf16`, `ui4`, `f8E4M3FN`.
_WIDTH = re.compile(r"\d+")
_SMALL_FLOAT = re.compile(r"f(\d)(E\w+)")

# How a dtype is called in Python.
_NAMES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
    "i1": "bool",
    "complex<f32>": "complex64",
    "complex<f64>": "complex128",
}

# Every device makes these by itself, in any layout.
UNIFORM = frozenset({"stablehlo.constant", "sdy.constant", "stablehlo.iota"})

# What moves or converts elements and changes none of them.
MOVES = frozenset(
    {
        "stablehlo.transpose",
        "stablehlo.reshape",
        "stablehlo.convert",
        "stablehlo.optimization_barrier",
        "stablehlo.slice",
        "stablehlo.dynamic_slice",
        "sdy.sharding_constraint",
        "sdy.all_gather",
        "sdy.all_slice",
        "sdy.all_to_all",
        "sdy.collective_permute",
        "sdy.reshard",
    }
)

# Through these an update reaches a parameter, and from them a gradient is found.
UPDATES = MOVES | {
    "stablehlo.add",
    "stablehlo.subtract",
    "stablehlo.multiply",
    "stablehlo.divide",
    "stablehlo.negate",
    "stablehlo.select",
    "stablehlo.sqrt",
    "stablehlo.rsqrt",
    "stablehlo.power",
    "stablehlo.maximum",
    "stablehlo.minimum",
    "stablehlo.clamp",
    "stablehlo.abs",
    "stablehlo.sign",
    "stablehlo.concatenate",
    "stablehlo.dynamic_update_slice",
    "stablehlo.while",
    "stablehlo.custom_call",
}


@dataclasses.dataclass(slots=True, eq=False)
class Value:
    """One value.

    Attributes:
        name: the operation, or `"argument"`.
        shape: global shape.
        element: MLIR's name of the element type.
        dims: mesh axes of each dim.
        leaf: the argument of the step that it is, or a part of, in any layout.
        base: the value that it is a transposed or converted copy of; None for itself.
        order: for each of its dims, that of the base.
        shared: whether it is used more than once.
        sums: the all-reduces that it is the sum of, by position in the list of all
            collectives; empty where something else is in it.
        index: position of its collective in that list, or None.
        is_uniform: whether every device can make any part of it by itself, such as
            zeros.
    """

    name: str
    shape: Shape
    element: str
    dims: Dims
    leaf: int | None = None
    base: "Value | None" = None
    order: tuple[int, ...] = ()
    shared: bool = False
    sums: tuple[int, ...] = ()
    index: int | None = None
    is_uniform: bool = False

    @property
    def root(self) -> "Value":
        """The value that it is a copy of, or itself."""
        return self if self.base is None else self.base

    @property
    def local_shape(self) -> Shape:
        """The shape of one device's part."""
        if not any(self.dims):
            return self.shape
        return tuple(
            -(-size // parts(axes))
            for size, axes in zip(self.shape, self.dims, strict=True)
        )

    @property
    def bytes(self) -> int:
        """Bytes of all of it."""
        return bytes_of(self.shape, self.element)

    @property
    def local_bytes(self) -> int:
        """Bytes of one device's part."""
        return bytes_of(self.local_shape, self.element)

    def laid_out(self, dims: Dims) -> "Value":
        """A copy in another layout."""
        order = self.order or tuple(range(len(self.shape)))
        return dataclasses.replace(self, dims=dims, base=self.root, order=order)

    def root_dims(self) -> Dims:
        """The axes of each dim, in the order of the root's dims."""
        if self.base is None or not self.order:
            return self.dims
        found: list[Any] = [()] * len(self.order)
        for dim, axes in zip(self.order, self.dims, strict=True):
            found[dim] = axes
        return tuple(found)


def parts(axes: Sequence[AxisRef]) -> int:
    """Into how many parts axes cut a dim."""
    return math.prod(size for _, size in axes)


def bytes_of(shape: Shape, element: str) -> int:
    """Bytes of an array."""
    bits = _BITS.get(element)
    if bits is None:
        width = _WIDTH.search(element)
        bits = int(width[0]) if width else 32
    return -(-math.prod(shape) * bits // 8)


def dtype_name(element: str) -> str:
    """`bf16` → `bfloat16`."""
    if element in _NAMES:
        return _NAMES[element]
    small = _SMALL_FLOAT.fullmatch(element)
    if small:
        return f"float{small[1]}_{small[2].lower()}"
    for short, long in (("ui", "uint"), ("i", "int")):
        if element.startswith(short) and element[len(short) :]:
            return long + element[len(short) :].lower()
    return element


def spec_text(dims: Dims) -> str:
    """`P(data, -)`, or `replicated`."""
    if not any(dims):
        return "replicated"
    entries = ["+".join(name for name, _ in axes) or "-" for axes in dims]
    while entries[-1] == "-":
        entries.pop()
    return f"P({', '.join(entries)})"
