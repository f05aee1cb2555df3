"""Scales of quantised kernels, which the rules of their kernels match.

A scale has the dims of its kernel at size 1 or in blocks, or some of them. A dim of
size 1 cannot be split. Where a leaf is the scale of another one (its name says so, or
the other has 8 bits or fewer) which the same rule lays out, that is no mistake: such
dims are replicated, and the note of the leaf says so. Any other leaf with a dim of size
1 is an error as with any size: the rule is not about it.
"""

import itertools
import re
from collections.abc import Iterator, Sequence

from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._resolve.adapters import Index, follow_kernel
from flax_layoutmap._resolve.lay import Layer, fits
from flax_layoutmap._resolve.stages import Leaves
from flax_layoutmap._rules.records import Decision, show_shape

_SCALE = re.compile(r"scale|zero|offset|absmax|step_size", re.IGNORECASE)


def lay_scales(layer: Layer, leaves: Leaves, rows: list[Decision]) -> None:
    """Lays out the scales among the leaves that their rule does not fit."""
    if not any(row.problem or row.fallback for row in layer.made.values()):
        return
    full, index = leaves.flat.full_paths(), None
    for at, row in enumerate(rows):
        if not row.matched or not (row.problem or row.fallback):
            continue
        winner = layer.winner(row.matched)
        if winner is None or row.reason not in ("rule", "exact key", "no rule"):
            continue
        if index is None:
            index = Index(
                {
                    full[other]: other
                    for section in leaves.flat.sections
                    if section.role == "parameter"
                    for other in range(section.start, section.stop)
                }
            )
        for kernel in _beside(index, full[at]):
            base = rows[kernel]
            if kernel == at or base.rule != winner or base.problem:
                continue
            is_named = any(map(_SCALE.search, full[at].split("/")[-2:]))
            if is_named or getattr(leaves.dtypes[kernel], "itemsize", 8) == 1:
                found = _as_scale(layer, leaves, rows, at, kernel, winner)
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


def _as_scale(
    layer: Layer,
    leaves: Leaves,
    rows: Sequence[Decision],
    at: int,
    kernel: int,
    winner: int,
) -> Decision | None:
    """The decision for the scale of a kernel; None where the shapes do not fit."""
    shape, of, base = leaves.shapes[at], leaves.shapes[kernel], rows[kernel]
    rule = layer.rules.rules[winner]
    if len(shape) == len(of):
        ones = [dim for dim, size in enumerate(shape) if size == 1 and base.dims[dim]]
        if not ones or any(whole % size for whole, size in zip(of, shape, strict=True)):
            return None
        axes = [
            () if dim in ones else axes
            for dim, axes in enumerate(rule.layout.dims(len(shape)))
        ]
        of_kernel = f"{leaves.flat.paths[kernel]} {show_shape(of)}"
        return layer.lay(
            TensorLayout(
                axes, rule.layout.device_mesh, memory_kind=rule.layout.memory_kind
            ),
            shape,
            f"rule {winner + 1} {rule.pattern!r}",
            "rule",
            rule=winner,
            matched=rows[at].matched,
            note=f"{_dims(ones)} of size 1 replicated: it is the scale of {of_kernel}",
        )
    if fits(rule.layout, len(shape)):
        return None
    choices = {
        tuple(base.dims[dim] for dim in dims): dims
        for dims in itertools.combinations(range(len(of)), len(shape))
        if tuple(of[dim] for dim in dims) == shape
    }
    if len(choices) != 1:
        return None
    ((axes, dims),) = choices.items()
    note = f"as its scale, it has its {_dims(dims)}"
    return follow_kernel(layer, leaves, rows, at, axes, kernel, note)


def _dims(dims: Sequence[int]) -> str:
    return f"dim{'s' * (len(dims) > 1)} {' and '.join(map(str, dims))}"
