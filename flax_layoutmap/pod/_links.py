"""The least time that collectives take on the links of a topology.

Bandwidth alone: no latency, no overlap with computing or with each other.
"""

from collections.abc import Mapping, Sequence

from flax_layoutmap._hybrid import over_slices
from flax_layoutmap._topologies import Topology
from flax_layoutmap.pod._placed import placed
from flax_layoutmap.pod._records import Collective
from flax_layoutmap.pod._report_text import axes_text


def dcn_axes(sizes: Mapping[str, int], topology: Topology | None) -> dict[str, int]:
    """The mesh axes that cross slices → over how many; the first axes cross them."""
    if topology is None:
        return {}
    between = over_slices(tuple(sizes.values()), topology.slices) or ()
    return {name: n for name, n in zip(sizes, between, strict=False) if n > 1}


def seconds_bound(
    collectives: Sequence[Collective], sizes: Mapping[str, int], topology: Topology
) -> dict[str, float]:
    """Axes (`"fsdp"`, `"data+fsdp"`, `"data (DCN)"`) → seconds in a step, at least.

    An axis that has whole dims of the slice has their links; one that shares a dim may
    use every link of a chip. What has no links, or links of an unknown bandwidth, is
    left out.

    Args:
        collectives: of a step.
        sizes: axis name → number of devices.
        topology: where it runs.
    """
    spans = placed(tuple(sizes), tuple(sizes.values()), topology).spans
    dims = dict(zip(sizes, spans, strict=True))
    found: dict[str, float] = {}
    for one in collectives:
        if not one.axes:
            continue
        speed = _speed(one, dims, topology)
        if speed:
            key = axes_text(one)
            found[key] = found.get(key, 0.0) + one.wire_bytes_per_step / speed
    return found


def _speed(
    one: Collective, dims: Mapping[str, tuple[int, ...] | None], topology: Topology
) -> float | None:
    """Bytes per second that a device can send for a collective."""
    generation = topology.generation
    each = generation.devices_per_chip
    if one.over_dcn:
        dcn = generation.dcn_bytes_per_second
        return None if dcn is None else dcn / each
    if generation.link_bytes_per_second is None:
        return None
    used: set[int] = set()
    for axis in one.axes:
        spanned = dims.get(axis)
        if spanned is None:
            used.update(dim for dim, size in enumerate(topology.shape) if size > 1)
        else:
            used.update(spanned)
    links = sum(2 if topology.wrap[dim] else 1 for dim in used)
    return links * generation.link_bytes_per_second / each
