"""Stage "leaves": a flattened tree → columns of its leaves, without the arrays."""

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding

from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._resolve.metadata import mark_of
from flax_layoutmap._resolve.stages import Leaves
from flax_layoutmap._rules.records import Shape
from flax_layoutmap._tree.flatten import plain_tree
from flax_layoutmap._tree.flax_internals import is_nnx_object, nnx_state
from flax_layoutmap._tree.paths import Flat, Section

_SHAPE, _DTYPE = operator.attrgetter("shape"), operator.attrgetter("dtype")


def leaves_of(flat: Flat, tree: Any) -> Leaves:
    """Read the leaves of a tree.

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
    nodes = [section.node for section in flat.sections]
    modules = []
    if any(node is not None for node in nodes):
        modules = [
            node
            for node in jax.tree.leaves(tree, is_leaf=is_nnx_object)
            if is_nnx_object(node) and not hasattr(node, "opt_state")
        ]
    return Leaves(
        without_arrays(flat),
        shapes,
        dtypes,
        treedef,
        others,
        live,
        nodes=nodes,
        modules=modules,
    )


def without_arrays(flat: Flat) -> Flat:
    """The flattened tree with a `Mark` for each annotation and no objects or arrays."""
    return dataclasses.replace(
        flat,
        leaves=[],
        annotations={at: mark_of(box) for at, box in flat.annotations.items()},
        sections=[dataclasses.replace(part, node=None) for part in flat.sections],
    )


def as_one_state(flat: Flat) -> Flat:
    """The tree as one section of optimizer state."""
    section = Section(0, len(flat.paths), "", "optimizer")
    return dataclasses.replace(flat, sections=[section], paths=flat.full_paths())


def beside(
    own: Leaves, state: Leaves, params: Any, layouts: Sequence[TensorLayout] | None
) -> Leaves:
    """The leaves of an optimizer state, behind those of its parameters.

    Args:
        own: the leaves of the parameters.
        state: the leaves of the optimizer state, in one section.
        params: the parameters.
        layouts: the layouts that they have; None where the rules say.
    """
    one, other, start = own.flat, state.flat, len(own.shapes)
    (section,) = other.sections
    stop = start + len(state.shapes)
    moved = dataclasses.replace(section, start=start, stop=stop)
    flat = dataclasses.replace(
        one,
        paths=one.paths + other.paths,
        blocks=one.blocks + [b._replace(start=b.start + start) for b in other.blocks],
        sections=[*one.sections, moved],
        annotations=one.annotations | _moved(other.annotations, start),
        fixed=one.fixed | {at + start for at in other.fixed},
    )
    return dataclasses.replace(
        state,
        flat=flat,
        shapes=[*own.shapes, *state.shapes],
        dtypes=[*own.dtypes, *state.dtypes],
        live={**own.live, **_moved(state.live, start)},
        layouts=dict(enumerate(layouts or ())),
        state=other,
        nodes=[*own.nodes, None],
        modules=own.modules,
        given=[params] if layouts else _given(params),
    )


def _given(params: Any) -> list[Any]:
    """What `tx.init` may have been given, of what the user calls the parameters."""
    if is_nnx_object(params):
        return [nnx_state(params, nnx.Param)]
    if isinstance(params, Mapping) and not isinstance(params, nnx.State):
        return [params["params"], params] if "params" in params else [params]
    return [params]


def _moved(entries: Mapping[int, Any], start: int) -> dict[int, Any]:
    return {at + start: entry for at, entry in entries.items()}


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
