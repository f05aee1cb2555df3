"""Lay out leaves that follow a kernel: LoRA matrices, scales of quantised kernels.

A LoRA matrix has some dims of a kernel, and a rule is written for the kernel. So a rule
that matches both is about the kernel, and the matrix follows it, dim by dim; a rule
that matches a matrix and not its kernel is about the matrix, and wins.

A scale has the dims of its kernel at size 1 or in blocks, or some of them. A dim of
size 1 cannot be split. If a leaf is the scale of another one (by its name, or the other
has 8 bits or fewer) that the same rule lays out, such dims are replicated, and the note
of the leaf says so. In any other leaf a dim of size 1 is an error as with any size.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence

from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._resolve.lay import Layer, fits, picked
from flax_layoutmap._resolve.leaves import Leaves
from flax_layoutmap._resolve.lora import Index
from flax_layoutmap._resolve.match import Matches
from flax_layoutmap._rules.records import Decision, show_shape

_NO_KERNEL = (
    "it is a LoRA matrix whose kernel is not in the tree: resolve the whole model, or "
    "add a rule for it"
)


# ----------------------------------------------------------------- LoRA matrices


def lay_adapter(layer: Layer, matches: Matches, at: int) -> Decision:
    """The decision for a LoRA matrix, after those for the kernels."""
    adapter, row = matches.origins.adapters[at], layer.rows[at]
    if row.reason not in ("rule", "no rule"):  # an exact key, or written on it
        return row
    if not adapter.kernels:
        return _explained(row, _NO_KERNEL)
    own = layer.by_match(matches.adapters[at], layer.leaves.shapes[at])
    if own.matched:
        return own
    kernel = adapter.kernels[0][0]
    base = layer.rows[kernel]
    if base.reason == "no rule" and not base.problem:
        return row
    axes = {picked(dims, layer.rows[other].dims) for other, dims in adapter.kernels}
    if len(axes) > 1:
        why = _unclear(layer.leaves, [other for other, _ in adapter.kernels])
        if row.problem or row.reason == "no rule":
            return _explained(row, why)
        return layer.trouble(why, layer.leaves.shapes[at], row.matched)
    dims = "in-dims" if adapter.role == "A" else "out-dims"
    if sum(dim is not None for dim in adapter.kernels[0][1]) == 1:
        dims = dims[:-1]
    note = f"LoRA {adapter.role} has its {dims}"
    return _follow_kernel(layer, at, kernel, axes.pop(), note)


def _explained(row: Decision, why: str) -> Decision:
    """The decision of a leaf without a layout, with the reason added."""
    if row.problem:
        return dataclasses.replace(row, problem=f"{row.problem}; {why}")
    return dataclasses.replace(row, fallback=why) if row.reason == "no rule" else row


def _unclear(leaves: Leaves, kernels: Sequence[int]) -> str:
    """The note for a matrix whose kernel or dims are ambiguous by the shapes."""
    listed = " or ".join(
        f"{leaves.flat.paths[kernel]} {show_shape(leaves.shapes[kernel])}"
        for kernel in dict.fromkeys(kernels)
    )
    return (
        f"it is a LoRA matrix, and its shape does not tell which dims of {listed} it "
        "has: add a rule for it"
    )


def _follow_kernel(
    layer: Layer, at: int, kernel: int, axes: tuple[tuple[str, ...], ...], note: str
) -> Decision:
    """The decision for a leaf with these axes of a kernel, and why (the note)."""
    path, base = layer.leaves.flat.paths[kernel], layer.rows[kernel]
    shape, matched = layer.leaves.shapes[at], layer.rows[at].matched
    layout = TensorLayout(axes, base.mesh, memory_kind=base.memory_kind)
    name = f"the layout of its kernel {path!r}"
    row = layer.once(
        ("kernel", layout, shape, matched),
        lambda: layer.lay(layout, shape, name, "follows kernel", matched=matched),
    )
    return dataclasses.replace(row, owner=path, note=note)


# ------------------------------------------------------------------------ scales

_SCALE = re.compile(r"scale|zero|offset|absmax|step_size", re.IGNORECASE)


def lay_scales(layer: Layer) -> None:
    """Lay out the scales among the leaves that their rule does not fit."""
    if not any(row.problem or row.fallback for row in layer.made.values()):
        return
    leaves, rows = layer.leaves, layer.rows
    full, index = leaves.flat.full_paths(), None
    for at, row in enumerate(rows):
        if not row.matched or not (row.problem or row.fallback):
            continue
        winner = layer.rules.winner(layer.rules.rules, row.matched)
        if winner is None or row.reason not in ("rule", "exact key", "no rule"):
            continue
        index = index or Index(
            {
                full[other]: other
                for section in leaves.flat.sections
                if section.role == "parameter"
                for other in range(section.start, section.stop)
            }
        )
        is_named = any(map(_SCALE.search, full[at].split("/")[-2:]))
        for kernel in _beside(index, full[at]):
            base = rows[kernel]
            if kernel == at or base.rule != winner or base.problem:
                continue
            if is_named or getattr(leaves.dtypes[kernel], "itemsize", 8) == 1:
                found = _as_scale(layer, at, kernel, winner)
                if found is not None:
                    rows[at] = found
                    break


def _beside(index: Index, path: str) -> Iterator[int]:
    """Leaves beside one, and beside the module that holds it; not deep below."""
    parts = path.split("/")
    for up in (1, 2):
        for rest, other in index.below("/".join(parts[:-up])):
            if rest.count("/") <= 1:
                yield other


def _as_scale(layer: Layer, at: int, kernel: int, winner: int) -> Decision | None:
    """The decision for the scale of a kernel; None where the shapes do not fit."""
    shapes, base = layer.leaves.shapes, layer.rows[kernel]
    shape, of, rule = shapes[at], shapes[kernel], layer.rules.rules[winner]
    layout = rule.layout
    if len(shape) == len(of):
        ones = [dim for dim, size in enumerate(shape) if size == 1 and base.dims[dim]]
        if not ones or any(whole % size for whole, size in zip(of, shape, strict=True)):
            return None
        own = layout.dims(len(shape))
        axes = [() if dim in ones else own[dim] for dim in range(len(shape))]
        of_kernel = f"{layer.leaves.flat.paths[kernel]} {show_shape(of)}"
        return layer.lay(
            TensorLayout(axes, layout.device_mesh, memory_kind=layout.memory_kind),
            shape,
            f"rule {winner + 1} {rule.pattern!r}",
            "rule",
            rule=winner,
            matched=layer.rows[at].matched,
            note=f"{_dims(ones)} of size 1 replicated: it is the scale of {of_kernel}",
        )
    if fits(layout, len(shape)):
        return None
    choices = {
        picked(dims, base.dims): dims
        for dims in itertools.combinations(range(len(of)), len(shape))
        if tuple(of[dim] for dim in dims) == shape
    }
    if len(choices) != 1:
        return None
    ((axes, dims),) = choices.items()
    note = f"as its scale, it has its {_dims(dims)}"
    return _follow_kernel(layer, at, kernel, axes, note)


def _dims(dims: Sequence[int]) -> str:
    return f"dim{'s' * (len(dims) > 1)} {' and '.join(map(str, dims))}"
