"""Place a mesh on a topology, and bound the time of collectives on its links.

JAX orders the devices of a mesh along the links of the hardware. It asks the devices
for their place only, so that stand-ins will do. Times are by bandwidth alone: no
latency, no overlap with computing or with each other.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from flax_layoutmap._core.errors import MeshError
from flax_layoutmap._core.mesh_shape import (
    hybrid_call,
    hybrid_grid,
    one_slice_grid,
    over_slices,
)
from flax_layoutmap._core.topologies import Topology
from flax_layoutmap.pod._records import Collective
from flax_layoutmap.pod._report_text import axes_text


@dataclasses.dataclass(frozen=True, slots=True)
class Chip:
    """The attributes of a TPU device that JAX needs to order a mesh."""

    id: int
    process_index: int
    slice_index: int
    coords: tuple[int, ...]
    core_on_chip: int
    device_kind: str
    platform: str = "tpu"


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """A mesh on a topology.

    Attributes:
        process_of: host of each place of the mesh, row by row.
        spans: for each axis of the mesh, the dims of the slice that it has for itself;
            None where it has a part of one, or shares one.
        trouble: why `DeviceMesh` does not order the devices so by itself, with what to
            write; "" where it does.
    """

    process_of: np.ndarray
    spans: tuple[tuple[int, ...] | None, ...]
    trouble: str = ""


@functools.lru_cache(maxsize=16)
def placed(names: tuple[str, ...], sizes: tuple[int, ...], where: Topology) -> Placed:
    """The places of a mesh, as `DeviceMesh` and `flm.pod.compile` have them.

    Args:
        names: names of the mesh axes.
        sizes: their sizes; the first of them go over the slices.
        where: the topology, which the mesh fills.
    """
    devices = devices_of(where)
    between = over_slices(sizes, where.slices) or [1] * len(sizes)
    grid, trouble = None, ""
    for split in (False, True):
        try:
            grid = _ordered(names, sizes, between, devices, split)
            break
        except MeshError:
            trouble = _trouble(names, sizes, between, where, split)
    if grid is None:
        grid = np.array(devices, dtype=object).reshape(sizes)
    hosts = np.array([chip.process_index for chip in grid.flat])
    return Placed(hosts, tuple(_spans(grid, between, where)), trouble)


def devices_of(where: Topology) -> list[Any]:
    """Stand-ins of the devices of a topology, in the order of its hosts."""
    dims = (*where.shape, *(1,) * (3 - len(where.shape)))
    host = (*where.chips_per_host, *(1,) * (3 - len(where.chips_per_host)))
    cores, kind = where.generation.devices_per_chip, where.generation.device_kind
    hosts = [size // part for size, part in zip(dims, host, strict=True)]
    found: list[Chip] = []
    # The first dim changes fastest, among the hosts and on each of them.
    for process, (number, *corner) in enumerate(np.ndindex(where.slices, *hosts[::-1])):
        for *inner, core in np.ndindex(*host[::-1], cores):
            at = zip(corner[::-1], host, inner[::-1], strict=True)
            coords = tuple(first * size + more for first, size, more in at)
            found.append(Chip(len(found), process, number, coords, core, kind))
    return found


def _ordered(
    names: Sequence[str],
    sizes: Sequence[int],
    between: Sequence[int],
    devices: Sequence[Any],
    split: bool,
) -> np.ndarray:
    if math.prod(between) == 1:
        return one_slice_grid(sizes, names, devices, split)
    within = [size // n for size, n in zip(sizes, between, strict=True)]
    inner, outer = (dict(zip(names, some, strict=True)) for some in (within, between))
    return hybrid_grid(inner, outer, devices, split)[0]


def _trouble(
    names: Sequence[str],
    sizes: Sequence[int],
    between: Sequence[int],
    where: Topology,
    split: bool,
) -> str:
    line = ",".join(f"{name}={n}" for name, n in zip(names, sizes, strict=True))
    if split:
        return (
            f"JAX finds no order of the devices of {where.name} for the mesh {line}, "
            "split or not, so that they are taken in the order of their numbers: "
            f'flm.DeviceMesh("{line}", devices=jax.devices())'
        )
    more = "allow_split_physical_axes=True"
    call = f'flm.DeviceMesh("{line}", {more})'
    if where.slices > 1:
        call = hybrid_call(sizes, names, between, f", {more}")
    return (
        f"the mesh {line} does not fit the links of {where.name} without splitting a "
        "physical axis: its axes share links, so that some are slower, and DeviceMesh "
        f"makes it only where it is told to: {call}"
    )


def _spans(
    grid: np.ndarray, between: Sequence[int], where: Topology
) -> Iterator[tuple[int, ...] | None]:
    """For each axis of one slice, the dims that change along it and along no other."""
    first = grid[tuple(slice(n // m) for n, m in zip(grid.shape, between, strict=True))]
    places = np.array([[*chip.coords, chip.core_on_chip] for chip in first.flat])
    places = places.reshape(*first.shape, 4)
    sizes = (*where.shape, *(1,) * (3 - len(where.shape)))
    sizes = (*sizes, where.generation.devices_per_chip)
    for axis, count in enumerate(first.shape):
        moved = (places != places.take([0], axis=axis)).reshape(-1, 4).any(axis=0)
        dims = tuple(int(dim) for dim in np.flatnonzero(moved))
        whole = math.prod(sizes[dim] for dim in dims) == count
        yield tuple(dim for dim in dims if dim < 3) if whole else None


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
