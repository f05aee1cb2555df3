"""Find LoRA matrices and their kernels by names and shapes.

A LoRA adapter adds `A @ B` to a kernel: A has the kernel's in-dims and a rank, B the
rank and the kernel's out-dims. Their names in the libraries:

- `lora_a`, `lora_b` (Flax's `nn.LoRA`, below `lora/` in `LoRALinear`), `lora_A`,
  `lora_B`, `lora_down`, `lora_up`; also as modules, `lora_a/kernel`;
- `kernel_lora_a` (qwix, tunix, openpi) and `lora_kernel_a` (Keras), which name it;
- `lora/a`, `lora/b` (gemma).
"""

import functools
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

Shape = tuple[int, ...]
# Per dim of a matrix: the dim of the kernel that it has, or None for the rank.
KernelDims = tuple[int | None, ...]

_MATRIX = re.compile(
    r"(?:(?P<before>.+)_)?lora_(?:(?P<within>.+)_)?(?P<role>[abAB]|down|up)"
)
_MODULE = re.compile(r"(?:(?P<before>.+)_)?lora(?:_(?P<after>.+))?", re.IGNORECASE)
_PARTNER = {"a": "b", "b": "a", "A": "B", "B": "A", "down": "up", "up": "down"}
_FIRST = ("a", "A", "down")
# What a Dense module calls its matrix, where LoRA's are such modules.
_WEIGHTS = ("kernel", "weight", "w")


class Matrix(NamedTuple):
    """The parts of the path of a LoRA matrix.

    Attributes:
        role: `"A"` (in-dims and rank) or `"B"` (rank and out-dims).
        holder: path of the module that holds it, or empty.
        kernel: name of the kernel in that module, if it tells.
        partner: path of the other matrix.
    """

    role: Literal["A", "B"]
    holder: str
    kernel: str | None
    partner: str


def is_about_lora(path: str) -> bool:
    """Whether a path may be that of a LoRA matrix."""
    return "lora" in path or "LoRA" in path


def matrix_of(path: str) -> Matrix | None:
    """Read the path of a LoRA matrix; None for any other path."""
    parts = path.split("/")
    at = len(parts) - 1
    if parts[at] in _WEIGHTS and at:
        at -= 1
    found = _MATRIX.fullmatch(parts[at])
    if found is None:
        is_short = at > 0 and parts[at] in _PARTNER and _MODULE.fullmatch(parts[at - 1])
        if not is_short:
            return None
        role, kernel, start = parts[at], None, 0
    else:
        role, start = found["role"], found.start("role")
        kernel = found["before"] or found["within"]
    partner = parts[at][:start] + _PARTNER[role]
    return Matrix(
        "A" if role in _FIRST else "B",
        "/".join(parts[:at]),
        kernel,
        "/".join([*parts[:at], partner, *parts[at + 1 :]]),
    )


def places_of(matrix: Matrix) -> list[str]:
    """Where the kernel of a matrix may be: a leaf, or what holds it; likely ones first.

    An empty text is the whole tree.
    """
    holder = matrix.holder
    if matrix.kernel is not None:
        below = f"{holder}/" if holder else ""
        return [below + matrix.kernel]
    parent, slash, name = holder.rpartition("/")
    found = _MODULE.fullmatch(name)
    if found is None:
        return [holder]
    beside = found["before"] or found["after"]
    own = [parent + slash + beside] if beside else []
    return [holder, *own, parent]


@functools.lru_cache(maxsize=1024)
def kernel_dims(
    kernel: Shape, matrix: Shape, partner: Shape | None, role: Literal["A", "B"]
) -> tuple[KernelDims, ...]:
    """The dims of a kernel that a LoRA matrix may have, by the shapes.

    Dims at the start that all three have are those of stacked layers. Several in-dims
    or out-dims may have become one, whose layout is that of the first. Where sizes are
    equal, the in-dims are the first, as in the layers of Flax.

    Args:
        kernel: shape of the kernel.
        matrix: shape of the matrix.
        partner: shape of the other matrix, if it is known.
        role: whether the matrix is A or B.

    Returns:
        Each possibility once; none where the shapes do not fit.
    """
    a, b = (matrix, partner) if role == "A" else (partner, matrix)
    first: dict[KernelDims, None] = {}
    others: dict[KernelDims, None] = {}
    for lead, into, out in _splits(len(kernel)):
        dims = _fits_a(kernel, lead, into, a), _fits_b(kernel, lead, out, b)
        if None in dims or (a and b and a[-1] != b[lead]):
            continue
        found = dims[0] if role == "A" else dims[1]
        if found:
            in_order = into[-1] < out[0]
            (first if in_order else others)[found] = None
    return tuple(first or others)


def _splits(ndim: int) -> Iterator[tuple[int, Sequence[int], Sequence[int]]]:
    """Ways to see the dims of a kernel: how many stacked, which in, which out."""
    for lead in range(max(0, ndim - 1)):
        rest = range(lead, ndim)
        for count in range(1, len(rest)):
            for into in itertools.combinations(rest, count):
                yield lead, into, [dim for dim in rest if dim not in into]


def _fits_a(
    kernel: Shape, lead: int, into: Sequence[int], a: Shape | None
) -> KernelDims | None:
    """The dims of A under a split; empty if A is unknown, None if that is not so."""
    if a is None:
        return ()
    own = _merged(kernel, into, a[lead:-1])
    if own is None or a[:lead] != kernel[:lead]:
        return None
    return (*range(lead), *own, None)


def _fits_b(
    kernel: Shape, lead: int, out: Sequence[int], b: Shape | None
) -> KernelDims | None:
    """The dims of B under a split, likewise."""
    if b is None:
        return ()
    own = _merged(kernel, out, b[lead + 1 :])
    if own is None or b[:lead] != kernel[:lead]:
        return None
    return (*range(lead), None, *own)


def _merged(kernel: Shape, dims: Sequence[int], shape: Shape) -> tuple[int, ...] | None:
    """The dims if they have this shape, the first alone if it is their product."""
    sizes = tuple(kernel[dim] for dim in dims)
    if shape == sizes:
        return tuple(dims)
    return (dims[0],) if shape == (math.prod(sizes),) else None
