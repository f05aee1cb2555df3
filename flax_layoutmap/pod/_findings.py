"""Warnings about a planned step, and the shardings of its values."""

import collections
import re
from collections.abc import Iterator, Sequence
from typing import Any

from flax_layoutmap._core.axes import dim_axes
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._core.topologies import Topology
from flax_layoutmap._rules.records import show_shape, show_spec
from flax_layoutmap._show.table import human_bytes
from flax_layoutmap.pod._links import placed
from flax_layoutmap.pod._lowered import Lowered
from flax_layoutmap.pod._mlir import (
    Attributes,
    Dims,
    dtype_name,
    functions,
    mesh_sizes,
    operation_name,
    parts,
    source_line,
    spec_text,
)
from flax_layoutmap.pod._shardy import LaidOut

# Arrays in a closure below this are tables of constants.
_CLOSED_OVER = 1 << 20
# So many equal layers one after the other are slow to compile.
_DEEP = 12
# State below this is not worth donating.
_UNDONATED = 1 << 20

# `layers/3/`, `layers_3/` and `Dense_3/` of Linen, `block3/`; `weights/3` of a list.
_INDEX = re.compile(r"(?<=[A-Za-z_./-])\d+(?=/|$)")


def warnings_of(
    found: LaidOut, lowered: Lowered, mesh: DeviceMesh, topology: Topology | None = None
) -> Iterator[str]:
    """One text per finding.

    Args:
        found: what was read from the program.
        lowered: the program.
        mesh: the mesh.
        topology: where it is to be made; None where that is not known.
    """
    yield from lowered.notes
    if topology is not None:
        trouble = placed(mesh.axis_names, mesh.shape, topology).trouble
        if trouble:
            yield trouble
    yield from _unsharded(found, mesh)
    yield from _overruled(found, lowered, mesh)
    yield from _closed_over(lowered)
    yield from _undonated(found, lowered)
    for what in found.more_flops:
        yield f"matrix products that are not all counted: {what}"
    if found.branching:
        count = found.branching
        which = "a conditional" if count == 1 else f"{count} conditionals"
        yield f"each device takes one branch of {which}; all branches are counted"
    layers = _layers(found, lowered)
    if layers > _DEEP:
        yield (
            f"{layers} layers stand one after the other in the program, "
            f"{found.operations} operations: with nnx.scan the compiler takes a half "
            "to a quarter of the time, and a fifth of the memory"
        )


def _unsharded(found: LaidOut, mesh: DeviceMesh) -> Iterator[str]:
    values = found.arguments
    if mesh.size == 1 or not values or found.collectives:
        return
    if not any(parts(axes) > 1 for value in values for axes in value.dims):
        yield (
            f"no argument is sharded over {mesh}, so that every device does the whole "
            "step; pass layout_map=layout_map, or arguments with shardings"
        )


def _overruled(found: LaidOut, lowered: Lowered, mesh: DeviceMesh) -> Iterator[str]:
    """Where in_shardings of jax.jit differ from the rules."""
    gone = []
    for at, spec in lowered.wanted.items():
        value = found.arguments[at]
        entries = [dim_axes(entry) for entry in spec]
        entries += [()] * (len(value.dims) - len(entries))
        wanted = [
            [a for a in axes if mesh.axis_sizes.get(a, 1) > 1] for axes in entries
        ]
        own = [[name for name, size in axes if size > 1] for axes in value.dims]
        if own != wanted:
            where = lowered.leaves[at].path, spec_text(value.dims), show_spec(spec)
            gone.append(where)
    if gone:
        path, own, spec = gone[0]
        yield (
            f"{lowered.name} has in_shardings of its own, which count here and not the "
            f"rules: {_leaves(gone)}, such as {path}, which is {own}, and {spec} by "
            "the rules; a call would refuse arrays that lie by the rules"
        )


def _closed_over(lowered: Lowered) -> Iterator[str]:
    large = [one for one in lowered.constants if one[1] >= _CLOSED_OVER]
    if large:
        shapes = ", ".join(show_shape(shape) for shape, _ in large[:4])
        size = human_bytes(sum(size for _, size in large))
        arrays = "1 array" if len(large) == 1 else f"{len(large)} arrays"
        yield (
            f"{lowered.name} closes over {arrays} ({shapes}; {size}): constants of the "
            "program, which every device holds in full; pass them as arguments"
        )


def _undonated(found: LaidOut, lowered: Lowered) -> Iterator[str]:
    kept = [
        at
        for at in lowered.updates.values()
        if not lowered.leaves[at].is_donated and lowered.leaves[at].role != "data"
    ]
    size = sum(found.arguments[at].local_bytes for at in kept)
    if size >= _UNDONATED:
        yield (
            f"{_leaves(kept)} of state, such as {lowered.leaves[kept[0]].path}, "
            f"{'is' if len(kept) == 1 else 'are'} not donated: old and new are held at "
            f"the same time, {human_bytes(size)} more per device; use donate_argnames"
        )


def _leaves(some: Sequence[object]) -> str:
    return "1 leaf" if len(some) == 1 else f"{len(some)} leaves"


def _layers(found: LaidOut, lowered: Lowered) -> int:
    """How many equal layers the parameters are numbered by."""
    indices: dict[Any, set[str]] = {}
    for leaf, value in zip(lowered.leaves, found.arguments, strict=True):
        if leaf.role == "parameter":
            for index in _INDEX.finditer(leaf.path):
                place = leaf.path[: index.start()] + leaf.path[index.end() :]
                indices.setdefault((place, value.shape), set()).add(index[0])
    return max(map(len, indices.values()), default=0)


def listing(module: Any, pattern: str) -> list[tuple[str, str, str]]:
    """Operations, their types, and how they are laid out; equal ones once.

    Args:
        module: a module that was laid out.
        pattern: regex, searched in `"dot_general model.py:36 Attention.__call__"`.
    """
    found: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for name, location, type_text, dims in _arrays(module):
        source = source_line(location)
        text = f"{operation_name(location) or name} {source or ''}".strip()
        if re.search(pattern, text):
            found[text, type_text, spec_text(dims)] += 1
    return list(found)


def _arrays(module: Any) -> Iterator[tuple[str, str, str, Dims]]:
    """Every array in a module: its operation, its place, its type, its axes."""
    attributes = Attributes(mesh_sizes(module))

    def walk(block: Any) -> Iterator[tuple[str, str, str, Dims]]:
        for op in block.operations:
            operation = op.operation
            for result, dims in zip(
                operation.results, attributes.per_value(operation), strict=False
            ):
                shape, element = attributes.type_of(result)
                sizes = ",".join(map(str, shape))
                kind = f"{dtype_name(element)}[{sizes}]"
                name = operation.name.rpartition(".")[2]
                yield name, attributes.location(operation), kind, dims
            for region in operation.regions:
                for inner in region.blocks:
                    yield from walk(inner)

    for function in functions(module).values():
        for block in function.regions[0].blocks:
            yield from walk(block)
