"""Collectives that a program asks for itself, inside of `jax.shard_map`."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from flax_layoutmap.pod._attributes import AxisRef
from flax_layoutmap.pod._records import Kind

_KINDS: dict[str, Kind] = {
    "stablehlo.all_reduce": "all-reduce",
    "stablehlo.all_gather": "all-gather",
    "stablehlo.reduce_scatter": "reduce-scatter",
    "stablehlo.all_to_all": "all-to-all",
    "stablehlo.collective_permute": "collective-permute",
}


def manual_collective(
    name: str, op: Any, sizes: Mapping[str, int]
) -> tuple[Kind | None, tuple[AxisRef, ...]]:
    """What a collective is, and over which mesh axes it runs.

    Args:
        name: name of the operation.
        op: the operation.
        sizes: axis name → size, in the order of the mesh.

    Returns:
        None and no axes where its groups of devices are no axes of the mesh.
    """
    kind = _KINDS.get(name)
    wanted = "source_target_pairs" if kind == "collective-permute" else "replica_groups"
    if kind is None or wanted not in op.attributes:
        return None, ()
    groups = _numbers(op.attributes[wanted])
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
