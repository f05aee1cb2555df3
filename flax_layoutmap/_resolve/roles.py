"""Leaves that are laid out by what stands beside them: LoRA matrices, and scales.

A LoRA matrix has some dims of a kernel, and the scale of a quantised kernel has them at
size 1 or in blocks. A rule is written for the kernel. So a rule that matches the kernel
too is not about the matrix or the scale, which then follow the kernel, dim by dim; a
rule that matches a matrix and not its kernel is about the matrix, and wins.
"""

import bisect
import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._resolve.decide import Decider, fits, winner_of
from flax_layoutmap._resolve.lora import (
    KernelDims,
    Matrix,
    is_about_lora,
    kernel_dims,
    matrix_of,
    places_of,
)
from flax_layoutmap._rules.records import Decision, Shape, show_shape
from flax_layoutmap._tree.paths import Flat, Section

# Names of kernels, which count first where several arrays have a fitting shape.
_KERNELS = ("kernel", "embedding", "weight", "w", "qvalue")
# How far below a module its kernel may be: `base_module/kernel/array/qvalue`.
_DEPTH = 3

# What `nnx.LoRA` calls the module that it was put around.
_BASE = "base_module"

_NO_KERNEL = (
    "it is a LoRA matrix whose kernel is not in the tree: resolve the whole model, or "
    "add a rule for it"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Adapters:
    """The LoRA matrices of a tree; found from paths and shapes, before any rule.

    Attributes:
        matrices: position → what its path says.
        kernels: position of a matrix → positions of kernels that it may belong to, and
            the dims that it has of each.
        plain: position → path without the LoRA module around it, for what was at that
            path before LoRA was added.
    """

    matrices: Mapping[int, Matrix]
    kernels: Mapping[int, Sequence[tuple[int, KernelDims]]]
    plain: Mapping[int, str]


NO_ADAPTERS = Adapters({}, {}, {})


def find_adapters(flat: Flat, shapes: Sequence[Shape]) -> Adapters:
    """Finds the LoRA matrices of a tree, and what they may belong to."""
    text = "\n".join(flat.paths)
    if not is_about_lora(text) and _BASE not in text:
        return NO_ADAPTERS
    found = Adapters({}, {}, {})
    for section in flat.sections:
        if section.role == "parameter":
            own = _in_section(section, flat, shapes)
            found = Adapters(
                {**found.matrices, **own.matrices},
                {**found.kernels, **own.kernels},
                {**found.plain, **own.plain},
            )
    return found


def _in_section(section: Section, flat: Flat, shapes: Sequence[Shape]) -> Adapters:
    matrices: dict[int, Matrix] = {}
    others: dict[str, int] = {}
    paths = {flat.paths[at]: at for at in range(section.start, section.stop)}
    for path, at in paths.items():
        matrix = matrix_of(path) if is_about_lora(path) else None
        if matrix is not None and len(shapes[at]) > 1:
            matrices[at] = matrix
        elif at not in flat.fixed:
            others[path] = at
    index = _Index(others)
    # Without its matrices too, in a State of what is not trained.
    wrapped = set().union(*(_base_modules(path) for path in others if _BASE in path))
    kernels: dict[int, Sequence[tuple[int, KernelDims]]] = {}
    for at, matrix in matrices.items():
        partner = paths.get(matrix.partner)
        shape = None if partner is None else shapes[partner]
        for place in places_of(matrix):
            options = _options(index, place, matrix, shapes[at], shape, shapes)
            if options:
                kernels[at] = options
                if matrix.kernel is None:
                    wrapped |= _wrapped(index, place, options[0][0], shapes)
                break
    return Adapters(matrices, kernels, _without(wrapped, index))


class _Index:
    """Paths in order, to find those below a place."""

    def __init__(self, positions: Mapping[str, int]) -> None:
        self.paths = sorted(positions)
        self.positions = positions

    def below(self, place: str) -> Iterator[tuple[str, int]]:
        """The rest of each path below a place, and its position; not too deep."""
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


def _options(
    index: _Index,
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
    index: _Index, place: str, kernel: int, shapes: Sequence[Shape]
) -> set[str]:
    """The module at a place that a LoRA module was put around, if it is so.

    Then the place holds that one alone, and `up/base_module/kernel` was `up/kernel`.
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
    """The modules on a path that `nnx.LoRA` was put around."""
    parts = path.split("/")
    return {
        "/".join(parts[:end]) for end in range(1, len(parts)) if parts[end - 1] == _BASE
    }


def _without(wrapped: set[str], index: _Index) -> dict[int, str]:
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


# ------------------------------------------------------------------------- rules


def ask_without_lora(
    decider: Decider, rows: list[Any], plain: Mapping[int, str]
) -> None:
    """Asks the rules of what is inside of a LoRA module by its path without it."""
    rules = decider.rules.rules
    for at, path in plain.items():
        without = decider.flat.forms(at, path)
        if rows[at] is None or _own_rules(decider, rows[at], without):
            continue
        shape = decider.shapes[at]
        row = decider.decide(without, decider.matcher.matching_forms(without), shape)
        if row.matched and row.matched != rows[at].matched or row.problem:
            named = f"without the LoRA module around it, its path is {path!r}"
            rows[at] = dataclasses.replace(row, note=named if rules else None)


def follow_kernels(
    decider: Decider, rows: list[Any], dtypes: Sequence[Any], adapters: Adapters
) -> None:
    """Lays LoRA matrices and scales out by their kernels."""
    for at, matrix in adapters.matrices.items():
        if rows[at] is not None and rows[at].reason in ("rule", "no rule"):
            rows[at] = _matrix_row(decider, rows, at, matrix, adapters)
    _follow_as_scales(decider, rows, dtypes)


def _matrix_row(
    decider: Decider, rows: Sequence[Any], at: int, matrix: Matrix, adapters: Adapters
) -> Decision:
    row, options = rows[at], adapters.kernels.get(at, ())
    if not options:
        if row.problem:
            return dataclasses.replace(row, problem=f"{row.problem}; {_NO_KERNEL}")
        if row.reason == "no rule":
            return dataclasses.replace(row, fallback=_NO_KERNEL)
        return row
    kernel = options[0][0]
    flat = decider.flat
    asked = {flat.forms(kernel), flat.forms(kernel, adapters.plain.get(kernel))}
    own_rules = _own_rules(decider, row, *asked)
    if own_rules:
        return decider.decide(flat.forms(at), own_rules, decider.shapes[at])
    base = rows[kernel]
    if base is None or (base.reason == "no rule" and not base.problem):
        return row
    layouts = {_axes(rows[which], dims): which for which, dims in options}
    if len(layouts) > 1:
        return _unclear(decider, row, at, [which for which, _ in options])
    dims = "in-dims" if matrix.role == "A" else "out-dims"
    (own,) = layouts
    if sum(dim is not None for dim in options[0][1]) == 1:
        dims = dims[:-1]
    return _follow(decider, row, at, own, kernel, base, f"LoRA {matrix.role}", dims)


def _unclear(
    decider: Decider, row: Decision, at: int, kernels: Sequence[int]
) -> Decision:
    """What is said where the shapes do not tell which dims of which kernel it has."""
    paths = dict.fromkeys(decider.flat.paths[kernel] for kernel in kernels)
    listed = " or ".join(
        f"{path} {show_shape(decider.shapes[kernel])}"
        for path, kernel in zip(paths, dict.fromkeys(kernels), strict=True)
    )
    why = (
        f"it is a LoRA matrix, and its shape does not tell which dims of {listed} it "
        "has: add a rule for it"
    )
    if row.problem:
        return dataclasses.replace(row, problem=f"{row.problem}; {why}")
    if row.reason == "no rule":
        return dataclasses.replace(row, fallback=why)
    return decider.trouble(why, decider.shapes[at], row.matched)


def _follow(
    decider: Decider,
    row: Decision,
    at: int,
    axes: tuple[tuple[str, ...], ...],
    kernel: int,
    base: Decision,
    what: str,
    dims: str,
) -> Decision:
    """The decision for a leaf that has dims of a kernel."""
    path, shape = decider.flat.paths[kernel], decider.shapes[at]

    def lay() -> Decision:
        layout = TensorLayout(axes, base.mesh, memory_kind=base.memory_kind)
        name = f"the layout of its kernel {path!r}"
        return decider.lay(layout, shape, name, "follows kernel", matched=row.matched)

    key = ("kernel", axes, base.mesh, base.memory_kind, shape, row.matched)
    found = decider.once(key, lay)
    return dataclasses.replace(found, owner=path, note=f"{what} has its {dims}")


def _axes(base: Decision, dims: KernelDims) -> tuple[tuple[str, ...], ...]:
    return tuple(() if dim is None else base.dims[dim] for dim in dims)


def _own_rules(
    decider: Decider, row: Decision, *kernels: tuple[str, ...]
) -> tuple[int, ...]:
    """Rules that match a leaf, and not what it belongs to (the forms of its path)."""
    matcher = decider.matcher
    every = tuple(range(len(decider.rules.rules)))
    of_kernel = {
        at
        for own in kernels
        for at in (*matcher.matching_forms(own), *matcher.refine_forms(own, (), every))
    }
    return tuple(at for at in row.matched if at not in of_kernel)


# ------------------------------------------------------------------------ scales

_SCALE = re.compile(r"scale|zero|offset|absmax|step_size", re.IGNORECASE)


def _follow_as_scales(decider: Decider, rows: list[Any], dtypes: Sequence[Any]) -> None:
    """Lays out the scales of quantised kernels that the rules of the kernels match.

    A dim of size 1 cannot be split. Where the leaf is the scale of another one (its
    name says so, or the other has 8 bits or fewer) which the same rule lays out, that
    is no mistake: such dims are replicated, and the note of the leaf says so. Any other
    leaf with a dim of size 1 is an error as with any size: the rule is not about it.
    """
    if not any(row.problem or row.fallback for row in decider.made.values()):
        return
    index: _Index | None = None
    for at, row in enumerate(rows):
        if row is None or not row.matched or not (row.problem or row.fallback):
            continue
        winner = winner_of(decider.rules, row.matched)
        shape = decider.shapes[at]
        if winner is None or row.reason not in ("rule", "exact key", "no rule"):
            continue
        if index is None:
            index = _Index({p: at for at, p in _parameters(decider.flat)})
        for kernel in _partners(decider, rows, dtypes, index, at, winner):
            found = _scale_row(decider, row, at, kernel, rows[kernel], winner, shape)
            if found is not None:
                rows[at] = found
                break


def _parameters(flat: Flat) -> Iterator[tuple[int, str]]:
    """Position and whole path of each leaf of the parameters."""
    full = flat.full_paths()
    for section in flat.sections:
        if section.role == "parameter":
            for at in range(section.start, section.stop):
                yield at, full[at]


def _partners(
    decider: Decider,
    rows: Sequence[Any],
    dtypes: Sequence[Any],
    index: _Index,
    at: int,
    winner: int,
) -> Iterator[int]:
    """Leaves beside one, laid out by the same rule, that it may be the scale of."""
    path = decider.flat.full_paths()[at]
    parts = path.split("/")
    is_named = any(map(_SCALE.search, parts[-2:]))
    for up in (1, 2):
        place = "/".join(parts[:-up])
        for rest, other in index.below(place):
            beside = rows[other]
            if rest.count("/") > 1 or beside is None or other == at:
                continue
            if beside.rule != winner or beside.problem:
                continue
            if is_named or getattr(dtypes[other], "itemsize", 8) == 1:
                yield other


def _scale_row(
    decider: Decider,
    row: Decision,
    at: int,
    kernel: int,
    base: Decision,
    winner: int,
    shape: Shape,
) -> Decision | None:
    """The decision for the scale of a kernel; None where the shapes do not fit."""
    of, path = decider.shapes[kernel], decider.flat.paths[kernel]
    if len(shape) == len(of):
        ones = [dim for dim, size in enumerate(shape) if size == 1 and base.dims[dim]]
        if not ones or any(whole % size for whole, size in zip(of, shape, strict=True)):
            return None
        layout = decider.rules.rules[winner].layout
        axes = [
            () if dim in ones else axes
            for dim, axes in enumerate(layout.dims(len(shape)))
        ]
        listed = " and ".join(map(str, ones))
        return decider.lay(
            TensorLayout(axes, layout.device_mesh, memory_kind=layout.memory_kind),
            shape,
            f"rule {winner + 1} {decider.rules.rules[winner].pattern!r}",
            "rule",
            rule=winner,
            matched=row.matched,
            note=(
                f"dim{'s' * (len(ones) > 1)} {listed} of size 1 replicated: it is the "
                f"scale of {path} {show_shape(of)}"
            ),
        )
    if fits(decider.rules.rules[winner].layout, len(shape)):
        return None
    choices = {
        tuple(base.dims[dim] for dim in dims): dims
        for dims in itertools.combinations(range(len(of)), len(shape))
        if tuple(of[dim] for dim in dims) == shape
    }
    if len(choices) != 1:
        return None
    ((axes, dims),) = choices.items()
    named = f"dim{'s' * (len(dims) > 1)} {' and '.join(map(str, dims))}"
    return _follow(decider, row, at, axes, kernel, base, "as its scale, it", named)
