"""Collectives that a program asks for itself, inside of `jax.shard_map`."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from flax_layoutmap.pod._attributes import Attributes, AxisRef, Dims
from flax_layoutmap.pod._records import Kind

_KINDS: dict[str, Kind] = {
    "stablehlo.all_reduce": "all-reduce",
    "stablehlo.all_gather": "all-gather",
    "stablehlo.reduce_scatter": "reduce-scatter",
    "stablehlo.all_to_all": "all-to-all",
    "stablehlo.collective_permute": "collective-permute",
}
# A custom call: how many rows go where is in the data.
RAGGED = "ragged_all_to_all"
_KINDS[RAGGED] = "all-to-all"
# Custom calls without matrix products, which a plan has nothing to say of.
_PLAIN = ("mhlo.topk", "Sharding", "annotate_device_placement", "xla.sdy")


def operands_of(op: Any, attributes: Attributes) -> tuple[list[Dims], int]:
    """How the body of a shard_map sees its operands.

    Args:
        op: the manual computation.
        attributes: reads it.

    Returns:
        The axes of each dim that are left to the compiler; and into how many parts the
        manual axes cut the work, if each that shards an operand cuts all of it.
    """
    manual = {name for name, _ in attributes.axes_in(op.attributes["manual_axes"])}
    given = attributes.per_value(op, "in_shardings")
    left = [
        tuple(tuple(axis for axis in axes if axis[0] not in manual) for axes in dims)
        for dims in given
    ]
    cuts = {axis for dims in given for axes in dims for axis in axes}
    return left, math.prod(size for name, size in cuts if name in manual)


def target_of(op: Any) -> str:
    """What a custom call calls; the name of another operation."""
    if "call_target_name" in op.attributes:
        return str(op.attributes["call_target_name"]).strip('"')
    return op.name


def hides_work(op: Any) -> bool:
    """Whether an operation of another compiler may do more than its results show."""
    if op.name == "stablehlo.custom_call":
        return not target_of(op).startswith(_PLAIN)
    shapes = {
        str(getattr(one.type, "shape", ())) for one in (*op.operands, *op.results)
    }
    return len(op.regions) > 0 or len(shapes) > 1


def manual_collective(
    name: str, op: Any, sizes: Mapping[str, int]
) -> tuple[Kind | None, tuple[AxisRef, ...]]:
    """What a collective is, and over which mesh axes it runs.

    Args:
        name: name of the operation, or of what it calls.
        op: the operation.
        sizes: axis name → size, in the order of the mesh.

    Returns:
        None and no axes where its groups of devices are no axes of the mesh.
    """
    kind = _KINDS.get(name)
    wanted = "source_target_pairs" if kind == "collective-permute" else "replica_groups"
    given = op.attributes
    if name == RAGGED:
        given = given["backend_config"] if "backend_config" in given else {}
    if kind is None or wanted not in given:
        return None, ()
    groups = _numbers(given[wanted])
    if groups is None:
        return None, ()
    axes = _axes_of(groups, sizes, pairs=kind == "collective-permute")
    return (kind, axes) if axes is not None else (None, ())


def _numbers(attribute: Any) -> np.ndarray | None:
    from jaxlib.mlir import ir

    try:
        return np.array(ir.DenseIntElementsAttr(attribute))
    except ValueError:  # groups in another spelling
        return None


def _axes_of(
    groups: np.ndarray, sizes: Mapping[str, int], *, pairs: bool
) -> tuple[AxisRef, ...] | None:
    """The axes along which the devices of a group differ; None if not whole axes."""
    shape = tuple(sizes.values())
    if groups.ndim != 2 or groups.size == 0 or groups.max() >= math.prod(shape):
        return None
    places = np.stack(np.unravel_index(groups, shape))
    varies = (places != places[:, :, :1]).any(axis=(1, 2))
    found = tuple(
        axis for axis, flag in zip(sizes.items(), varies, strict=True) if flag
    )
    if not pairs and math.prod(size for _, size in found) != groups.shape[1]:
        return None
    return found
