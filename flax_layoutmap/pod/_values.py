"""Records of a module that Shardy has laid out: values, collectives, reshards."""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flax_layoutmap.pod._mlir import AxisRef, Dims
from flax_layoutmap.pod._records import Kind

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


@dataclasses.dataclass(slots=True, eq=False)
class Value:
    """One value.

    Attributes:
        name: the operation, or `"argument"`.
        shape: global shape.
        element: MLIR's name of the element type.
        dims: mesh axes of each dim.
        leaf: the argument of the step that it is, or a part of, in any layout.
        shared: whether it is used more than once.
        sums: the all-reduces that it is the sum of, by position in the list of all
            collectives; empty where something else is in it.
        index: position of its collective in that list, or None.
    """

    name: str
    shape: Shape
    element: str
    dims: Dims
    leaf: int | None = None
    shared: bool = False
    sums: tuple[int, ...] = ()
    index: int | None = None

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


Scope = tuple[int, ...]  # the loops around an operation, by number


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where in the program the walk is.

    Attributes:
        times: how often what stands there runs in a step.
        scope: the loops around it.
        cuts: inside of a shard_map, into how many parts its axes cut the work; else 0.
    """

    times: int
    scope: Scope
    cuts: int = 0


@dataclasses.dataclass(slots=True)
class Found:
    """A collective as it stands in the program.

    Attributes:
        kind: what it does.
        axes: the axes it runs over.
        shape: payload on one device.
        element: MLIR's name of its element type.
        executions: how often it runs in a step.
        location: where it comes from, as MLIR writes it.
        scope: the loops around it.
        leaf: the argument that it moves, or whose gradient it sums.
        into: the collective that it is one with, or None.
    """

    kind: Kind
    axes: tuple[AxisRef, ...]
    shape: tuple[int, ...]
    element: str
    executions: int
    location: str
    scope: Scope = ()
    leaf: int | None = None
    into: int | None = None


@dataclasses.dataclass(slots=True)
class Move:
    """A value that changes its sharding, by one collective or several.

    Attributes:
        before: the value.
        after: the same in the other layout.
        executions: how often.
        location: where, as MLIR writes it.
        gathers_only: whether it is only gathered.
    """

    before: Value
    after: Value
    executions: int
    location: str
    gathers_only: bool


@dataclasses.dataclass(slots=True)
class Spread:
    """What was read from a module.

    Attributes:
        sizes: axis name → size.
        arguments: the arguments of the step.
        results: its results.
        collectives: in the order of the program.
        moves: values that change their sharding.
        flops: of matrix products and convolutions, on one device.
        flops_whole: the same on all devices if none did another's work.
        more_flops: what has matrix products that are not in these, each once.
        unrecognised: what could not be counted → the places in the program.
        branching: how many conditionals have any of this in a branch.
        operations: how many operations there are.
        gradients_of: position of a result → the sums that it is made from; and what was
            looked at before, which is not again.
    """

    sizes: dict[str, int]
    arguments: list[Value]
    results: list[Value] = dataclasses.field(default_factory=list)
    collectives: list[Found] = dataclasses.field(default_factory=list)
    moves: dict[int, Move] = dataclasses.field(default_factory=dict)
    flops: int = 0
    flops_whole: int = 0
    more_flops: dict[str, None] = dataclasses.field(default_factory=dict)
    unrecognised: dict[str, list[str]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )
    branching: int = 0
    operations: int = 0
    gradients_of: Callable[[int, set[Any]], Iterable[Value]] = lambda at, seen: ()
