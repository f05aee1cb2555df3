"""Reading: a flattened tree → the columns of its leaves, without its arrays."""

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._resolve.metadata import mark_of
from flax_layoutmap._resolve.stages import Leaves
from flax_layoutmap._rules.records import Shape
from flax_layoutmap._tree.flatten import plain_tree
from flax_layoutmap._tree.paths import Flat, Section

_SHAPE, _DTYPE = operator.attrgetter("shape"), operator.attrgetter("dtype")


def leaves_of(flat: Flat, tree: Any) -> Leaves:
    """Reads the leaves of a tree.

    Args:
        flat: the tree, flattened.
        tree: the tree.
    """
    shapes, dtypes, others = _columns(flat.leaves)
    treedef = flat.treedef
    if treedef is None:
        treedef = jax.tree.structure(plain_tree(tree) if flat.has_objects else tree)
    live = {
        at: TensorLayout(flat.leaves[at].sharding)
        for section in flat.sections
        if section.role == "optimizer"
        for at in range(section.start, section.stop)
        if isinstance(getattr(flat.leaves[at], "sharding", None), NamedSharding)
    }
    return Leaves(without_arrays(flat), shapes, dtypes, treedef, others, live)


def without_arrays(flat: Flat) -> Flat:
    """The flattened tree with a `Mark` for each annotation and no objects or arrays."""
    return dataclasses.replace(
        flat,
        leaves=[],
        annotations={at: mark_of(box) for at, box in flat.annotations.items()},
        sections=[dataclasses.replace(part, node=None) for part in flat.sections],
    )


def as_one_state(flat: Flat) -> Flat:
    """The whole tree as one optimizer state."""
    section = Section(0, len(flat.paths), "", "optimizer")
    return dataclasses.replace(flat, sections=[section], paths=flat.full_paths())


def beside(
    params: Leaves, state: Leaves, given: Sequence[TensorLayout] | None
) -> Leaves:
    """The leaves of an optimizer state, behind those of its parameters.

    Args:
        params: the parameters.
        state: the optimizer state.
        given: the layouts that the parameters have; None where the rules say.
    """
    count, one, other = len(params.shapes), params.flat, state.flat
    moved = [
        dataclasses.replace(part, start=part.start + count, stop=part.stop + count)
        for part in other.sections
    ]
    flat = dataclasses.replace(
        other,
        paths=one.paths + other.paths,
        blocks=one.blocks + [b._replace(start=b.start + count) for b in other.blocks],
        sections=one.sections + moved,
        annotations=one.annotations | _moved(other.annotations, count),
        fixed=one.fixed | {at + count for at in other.fixed},
    )
    return dataclasses.replace(
        state,
        flat=flat,
        shapes=[*params.shapes, *state.shapes],
        dtypes=[*params.dtypes, *state.dtypes],
        live={**params.live, **_moved(state.live, count)},
        given=dict(enumerate(given or ())),
        start=count,
    )


def _moved(entries: Mapping[int, Any], count: int) -> dict[int, Any]:
    return {at + count: entry for at, entry in entries.items()}


def shown(leaves: Leaves) -> Leaves:
    """The leaves of the tree itself, without parameters that were given beside it."""
    start, flat = leaves.start, leaves.flat
    if not start:
        return leaves
    (section,) = flat.sections[-1:]
    flat = dataclasses.replace(
        flat,
        paths=flat.paths[start:],
        blocks=[
            block._replace(start=block.start - start)
            for block in flat.blocks
            if block.start >= start
        ],
        sections=[dataclasses.replace(section, start=0, stop=section.stop - start)],
        annotations={},
        fixed=set(),
    )
    return dataclasses.replace(
        leaves, flat=flat, shapes=leaves.shapes[start:], dtypes=leaves.dtypes[start:]
    )


def _columns(leaves: Sequence[Any]) -> tuple[list[Shape], list[Any], dict[int, Any]]:
    """Shape and dtype of each leaf, and the leaves that are no arrays."""
    try:
        columns = list(map(_SHAPE, leaves)), list(map(_DTYPE, leaves)), {}
        if set(map(type, columns[0])) <= {tuple}:
            return columns
    except AttributeError:
        pass  # one of them is no array
    shapes: list[Shape] = []
    dtypes: list[Any] = []
    others: dict[int, Any] = {}
    for leaf in leaves:
        shape = getattr(leaf, "shape", None)
        if isinstance(shape, tuple) and hasattr(leaf, "dtype"):
            shapes.append(shape)
            dtypes.append(leaf.dtype)
        else:
            dtype = None
            if isinstance(leaf, bool | int | float | complex):
                dtype = jax.dtypes.result_type(leaf)
            else:
                others[len(shapes)] = leaf
            shapes.append(())
            dtypes.append(dtype)
    return shapes, dtypes, others
