"""The memory at rest of a step, and the least time of its collectives on the links."""

import itertools
import math
from collections.abc import Mapping, Sequence

from flax_layoutmap._core.mesh_shape import over_slices
from flax_layoutmap.pod._hlo_text import Array
from flax_layoutmap.pod._leaves import Leaf
from flax_layoutmap.pod._records import Collective, Memory, axes_text
from flax_layoutmap.pod._topologies import Topology

_ROLES = ("parameter", "optimizer", "data", "other")


def memory_of(
    arguments: Sequence[Array], leaves: Sequence[Leaf], topology: Topology | None
) -> Memory:
    """Bytes of the arguments on one device, by role; `arguments` are their shards."""
    sums: dict[str, int] = dict.fromkeys(_ROLES, 0)
    on_host = dict(sums)
    for shard, leaf in zip(arguments, leaves, strict=True):
        (on_host if leaf.is_on_host else sums)[leaf.role] += shard.bytes
    return Memory(
        at_rest={role: size for role, size in sums.items() if size},
        host_at_rest={role: size for role, size in on_host.items() if size},
        limit_bytes=None if topology is None else topology.generation.hbm_limit_bytes,
        note="what the step needs besides, such as activations, is not in it",
    )


def dcn_axes(sizes: Mapping[str, int], topology: Topology | None) -> dict[str, int]:
    """The mesh axes that cross slices → the number of slices along each."""
    if topology is None:
        return {}
    between = over_slices(tuple(sizes.values()), topology.slices) or ()
    return {name: n for name, n in zip(sizes, between, strict=False) if n > 1}


def seconds_bound(
    collectives: Sequence[Collective], sizes: Mapping[str, int], topology: Topology
) -> dict[str, float]:
    """Axes (`"fsdp"`, `"data+fsdp"`, `"data (DCN)"`) → seconds in a step, at least.

    Bandwidth alone: no latency, no overlap. An axis that covers whole dims of the slice
    uses their links; another may use every link of a chip. Links of unknown bandwidth
    are left out.
    """
    crossing = dcn_axes(sizes, topology)
    within = {name: size // crossing.get(name, 1) for name, size in sizes.items()}
    dims = _dims_of_axes(within, topology.shape)
    seconds: dict[str, float] = {}
    for collective in collectives:
        speed = _speed(collective, dims, topology) if collective.axes else None
        if speed:
            key = axes_text(collective)
            sent = collective.wire_bytes_per_step / speed
            seconds[key] = seconds.get(key, 0.0) + sent
    return seconds


def _dims_of_axes(
    sizes: Mapping[str, int], shape: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """The dims of a slice that each axis covers in full; all where it shares one."""
    every = tuple(dim for dim, size in enumerate(shape) if size > 1)
    left, dims = list(every), dict[str, tuple[int, ...]]()
    for name, size in sizes.items():
        choices = (
            some
            for count in range(len(left) + 1)
            for some in itertools.combinations(left, count)
            if math.prod(shape[dim] for dim in some) == size
        )
        dims[name] = next(choices, every)
        left = [dim for dim in left if dim not in dims[name] or dims[name] == every]
    return dims


def _speed(
    collective: Collective, dims: Mapping[str, tuple[int, ...]], topology: Topology
) -> float | None:
    """Bytes per second that a device can send for a collective."""
    generation = topology.generation
    each = generation.devices_per_chip
    if collective.over_dcn:
        dcn = generation.dcn_bytes_per_second
        return None if dcn is None else dcn / each
    if generation.link_bytes_per_second is None:
        return None
    used = {dim for axis in collective.axes for dim in dims[axis]}
    links = sum(2 if topology.wrap[dim] else 1 for dim in used)
    return links * generation.link_bytes_per_second / each
