"""Find LoRA matrices and their kernels by names and shapes.

A LoRA adapter adds `A @ B` to a kernel: A has the kernel's in-dims and a rank, B the
rank and the kernel's out-dims. Their names in the libraries:

- `lora_a`, `lora_b` (Flax's `nn.LoRA`, below `lora/` in `LoRALinear`), `lora_A`,
  `lora_B`, `lora_down`, `lora_up`; also as modules, `lora_a/kernel`;
- `kernel_lora_a` (qwix, tunix, openpi) and `lora_kernel_a` (Keras), which name it;
- `lora/a`, `lora/b` (gemma).
"""

import bisect
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from flax_layoutmap._resolve.leaves import Leaves
from flax_layoutmap._rules.records import Shape
from flax_layoutmap._tree.paths import Section

# Per dim of a matrix: the dim of the kernel that it has, or None for the rank.
KernelDims = tuple[int | None, ...]

_MATRIX = re.compile(
    r"(?:(?P<before>.+)_)?lora_(?:(?P<within>.+)_)?(?P<role>[abAB]|down|up)"
)
_MODULE = re.compile(r"(?:(?P<before>.+)_)?lora(?:_(?P<after>.+))?", re.IGNORECASE)
_PARTNER = {"a": "b", "b": "a", "A": "B", "B": "A", "down": "up", "up": "down"}
_FIRST = ("a", "A", "down")
# Names of the matrix in a Dense module, if LoRA matrices are such modules.
_WEIGHTS = ("kernel", "weight", "w")

# Names of kernels, which are preferred if several arrays have a fitting shape.
_KERNELS = ("kernel", "embedding", "weight", "w", "qvalue")
# How far below a module its kernel may be: `base_module/kernel/array/qvalue`.
_DEPTH = 3

# The attribute of `nnx.LoRA` for the module that it wraps.
_BASE = "base_module"


class Matrix(NamedTuple):
    """The parts of the path of a LoRA matrix.

    Attributes:
        role: `"A"` (in-dims and rank) or `"B"` (rank and out-dims).
        holder: path of the module that holds it, or empty.
        kernel: name of the kernel in that module, or None if the path does not say.
        partner: path of the other matrix.
    """

    role: Literal["A", "B"]
    holder: str
    kernel: str | None
    partner: str


class Adapter(NamedTuple):
    """A LoRA matrix: `"A"` (in-dims and rank) or `"B"` (rank and out-dims).

    `kernels` has the positions of the kernels that it may belong to, the nearest first,
    and the dims that it has of each.
    """

    role: Literal["A", "B"]
    kernels: Sequence[tuple[int, KernelDims]]


# ------------------------------------------------------------- matrices of a tree


def find_adapters(leaves: Leaves) -> tuple[dict[int, Adapter], dict[int, str]]:
    """Find LoRA matrices by paths and shapes; see `Origins.adapters` and `.plain`."""
    adapters: dict[int, Adapter] = {}
    plain: dict[int, str] = {}
    text = "\n".join(leaves.flat.paths)
    if is_about_lora(text) or _BASE in text:
        for section in leaves.flat.sections:
            if section.role == "parameter":
                found, wrapped, index = _adapters_in(section, leaves)
                adapters |= found
                plain |= _without(wrapped, index)
    return adapters, plain


def _adapters_in(
    section: Section, leaves: Leaves
) -> "tuple[dict[int, Adapter], set[str], Index]":
    """The matrices of a section, the modules that LoRA wraps, and its other paths."""
    flat, shapes = leaves.flat, leaves.shapes
    paths = {flat.paths[at]: at for at in range(section.start, section.stop)}
    matrices = {
        at: matrix
        for path, at in paths.items()
        if is_about_lora(path) and len(shapes[at]) > 1
        for matrix in [matrix_of(path)]
        if matrix is not None
    }
    others = {
        path: at
        for path, at in paths.items()
        if at not in matrices and at not in flat.fixed
    }
    index = Index(others)
    # Also without its matrices, as in a State of frozen parameters.
    wrapped = set().union(*(_base_modules(path) for path in others if _BASE in path))
    found: dict[int, Adapter] = {}
    for at, matrix in matrices.items():
        partner = paths.get(matrix.partner)
        shape = None if partner is None else shapes[partner]
        found[at] = Adapter(matrix.role, ())
        for place in places_of(matrix):
            kernels = _kernels_at(index, place, matrix, shapes[at], shape, shapes)
            if kernels:
                found[at] = Adapter(matrix.role, kernels)
                if matrix.kernel is None:
                    wrapped |= _wrapped(index, place, kernels[0][0], shapes)
                break
    return found, wrapped, index


class Index:
    """Sorted paths, to find those below a module."""

    def __init__(self, positions: Mapping[str, int]) -> None:
        self.paths = sorted(positions)
        self.positions = positions

    def below(self, place: str) -> Iterator[tuple[str, int]]:
        """The rest of each path at or below `place`, and its position."""
        if not place:
            for path in self.paths:
                yield path, self.positions[path]
            return
        if place in self.positions:
            yield "", self.positions[place]
        start = bisect.bisect_left(self.paths, f"{place}/")
        for path in itertools.islice(self.paths, start, None):
            if not path.startswith(f"{place}/"):
                break
            yield path[len(place) + 1 :], self.positions[path]


def _kernels_at(
    index: Index,
    place: str,
    matrix: Matrix,
    shape: Shape,
    partner: Shape | None,
    shapes: Sequence[Shape],
) -> Sequence[tuple[int, KernelDims]]:
    """The kernels at or below a place that a matrix fits; the nearest ones only."""
    by_depth: dict[int, list[tuple[str, int, KernelDims]]] = {}
    for rest, at in index.below(place):
        depth = rest.count("/")
        if depth <= _DEPTH:
            for dims in kernel_dims(shapes[at], shape, partner, matrix.role):
                by_depth.setdefault(depth, []).append((rest, at, dims))
    if not by_depth:
        return ()
    nearest = by_depth[min(by_depth)]
    named = [entry for entry in nearest if entry[0].rpartition("/")[2] in _KERNELS]
    return [(at, dims) for _, at, dims in named or nearest]


def _wrapped(
    index: Index, place: str, kernel: int, shapes: Sequence[Shape]
) -> set[str]:
    """The module that a LoRA module at `place` wraps; empty if there is none.

    It is the only one there: `up/base_module/kernel` was `up/kernel`.
    """
    below = [(rest, at) for rest, at in index.below(place) if len(shapes[at]) > 1]
    inner = {rest.partition("/")[0] for rest, _ in below if "/" in rest}
    (path,) = (rest for rest, at in below if at == kernel)
    name = path.partition("/")[0]
    has_own = any("/" not in rest for rest, _ in below)
    if inner != {name} or has_own or name in _KERNELS:
        return set()
    return {f"{place}/{name}" if place else name}


def _base_modules(path: str) -> set[str]:
    """The modules on a path that `nnx.LoRA` wraps."""
    parts = path.split("/")
    return {
        "/".join(parts[:end]) for end in range(1, len(parts)) if parts[end - 1] == _BASE
    }


def _without(wrapped: set[str], index: Index) -> dict[int, str]:
    """Position → path without the parts that only a LoRA module around it adds."""
    plain: dict[int, str] = {}
    for module in wrapped:
        for rest, at in index.below(module):
            parts = f"{module}/{rest}".split("/")
            path = "/".join(
                part
                for end, part in enumerate(parts, 1)
                if "/".join(parts[:end]) not in wrapped
            )
            if path not in index.positions:
                plain[at] = path
    return plain


# -------------------------------------------------------------- names and shapes


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
    """Where the kernel may be, most likely first: a leaf, or the module that holds it.

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

    Leading dims that all three have are those of stacked layers. Several in-dims or
    out-dims may be flattened into one, which has the layout of the first. If sizes are
    equal, the in-dims come first, as in the layers of Flax.
    """
    a, b = (matrix, partner) if role == "A" else (partner, matrix)
    first: dict[KernelDims, None] = {}
    others: dict[KernelDims, None] = {}
    for lead, into, out in _splits(len(kernel)):
        dims = _fits(kernel, lead, into, a, "A"), _fits(kernel, lead, out, b, "B")
        if None in dims or (a and b and a[-1] != b[lead]):
            continue
        found = dims[0] if role == "A" else dims[1]
        if found:
            in_order = into[-1] < out[0]
            (first if in_order else others)[found] = None
    return tuple(first or others)


def _splits(ndim: int) -> Iterator[tuple[int, Sequence[int], Sequence[int]]]:
    """Ways to split the dims of a kernel: how many stacked, in-dims, out-dims."""
    for lead in range(max(0, ndim - 1)):
        rest = range(lead, ndim)
        for count in range(1, len(rest)):
            for into in itertools.combinations(rest, count):
                yield lead, into, [dim for dim in rest if dim not in into]


def _fits(
    kernel: Shape, lead: int, dims: Sequence[int], matrix: Shape | None, role: str
) -> KernelDims | None:
    """The dims of a matrix under a split; empty if it is unknown, None if none fit."""
    if matrix is None:
        return ()
    inner = matrix[lead:-1] if role == "A" else matrix[lead + 1 :]
    own = _merged(kernel, dims, inner)
    if own is None or matrix[:lead] != kernel[:lead]:
        return None
    return (*range(lead), *own, None) if role == "A" else (*range(lead), None, *own)


def _merged(kernel: Shape, dims: Sequence[int], shape: Shape) -> tuple[int, ...] | None:
    """The dims if they have this shape, the first alone if it is their product."""
    sizes = tuple(kernel[dim] for dim in dims)
    if shape == sizes:
        return tuple(dims)
    return (dims[0],) if shape == (math.prod(sizes),) else None
