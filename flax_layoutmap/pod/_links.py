"""The least time that collectives take on the links of a topology.

Bandwidth alone: no latency, no overlap with computing or with each other.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

from flax_layoutmap._topologies import Topology
from flax_layoutmap.pod._records import Collective


def dcn_axes(sizes: Mapping[str, int], topology: Topology | None) -> frozenset[str]:
    """The mesh axes that cross slices, the devices in order of their slices."""
    if topology is None or topology.slices == 1:
        return frozenset()
    stride, found = 1, []
    for name, size in reversed(list(sizes.items())):
        stride *= size
        if size > 1 and stride > topology.devices_per_slice:
            found.append(name)
    return frozenset(found)


def seconds_bound(
    collectives: Sequence[Collective], sizes: Mapping[str, int], topology: Topology
) -> dict[str, float]:
    """Axes (`"fsdp"`, `"data+fsdp"`) → seconds in a step, at least.

    Axes between chips are given whole dims of the slice, the largest axes first; one
    that fits no dims counts as having one. Axes of an unknown bandwidth are left out.

    Args:
        collectives: of a step.
        sizes: axis name → number of devices.
        topology: where it runs.
    """
    dcn = dcn_axes(sizes, topology)
    dims = _dims_of({a: n for a, n in sizes.items() if a not in dcn}, topology)
    found: dict[str, float] = {}
    for one in collectives:
        if not one.axes:
            continue
        speed = _speed(one, dims, topology)
        if speed:
            key = "+".join(one.axes)
            found[key] = found.get(key, 0.0) + one.wire_bytes_per_step / speed
    return found


def _speed(
    one: Collective, dims: Mapping[str, tuple[int, ...]], topology: Topology
) -> float | None:
    """Bytes per second that a device can send for a collective."""
    generation = topology.generation
    each = generation.devices_per_chip
    if one.over_dcn:
        dcn = generation.dcn_bytes_per_second
        return None if dcn is None else dcn / each
    if generation.link_bytes_per_second is None:
        return None
    used = {dim for axis in one.axes for dim in dims.get(axis, ())}
    links = sum(2 if topology.wrap[dim] else 1 for dim in used) or 1
    return links * generation.link_bytes_per_second / each


def _dims_of(
    sizes: Mapping[str, int], topology: Topology
) -> dict[str, tuple[int, ...]]:
    """Axis → the dims of the slice that it spans."""
    free = [dim for dim, size in enumerate(topology.shape) if size > 1]
    found: dict[str, tuple[int, ...]] = {}
    for axis, size in sorted(sizes.items(), key=lambda item: -item[1]):
        chosen = _product(free, topology.shape, size)
        if chosen is None and topology.generation.devices_per_chip > 1:
            # The devices of a chip are neighbours at no cost of links.
            chosen = _product(
                free, topology.shape, size // topology.generation.devices_per_chip
            )
        if chosen is not None:
            found[axis] = chosen
            free = [dim for dim in free if dim not in chosen]
    return found


def _product(
    free: Sequence[int], shape: Sequence[int], size: int
) -> tuple[int, ...] | None:
    """The dims whose sizes make up a product; as few as possible."""
    for count in range(1, len(free) + 1):
        for dims in itertools.combinations(free, count):
            if math.prod(shape[dim] for dim in dims) == size:
                return dims
    return None
