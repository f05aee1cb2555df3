"""Place a mesh on a topology: the bytes of its hosts, and the least time on its links.

JAX orders the devices of a mesh along the links of the hardware. It reads only their
coordinates, so that `Chip` replaces them. Times are by bandwidth alone: no latency, no
overlap with computation or with each other.
"""

import dataclasses
import functools
import itertools
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
from flax_layoutmap.pod._lowered import Leaf
from flax_layoutmap.pod._mlir import Array
from flax_layoutmap.pod._records import Collective, Host, Memory
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
    """A mesh on a topology."""

    # The host of each place of the mesh, row by row.
    process_of: np.ndarray
    # For each axis of the mesh, the dims of the slice that it alone covers in full;
    # None if it covers part of a dim or shares one.
    spans: tuple[tuple[int, ...] | None, ...]
    # Why `DeviceMesh` does not order the devices so by default, and the call that does.
    trouble: str = ""


@functools.lru_cache(maxsize=16)
def placed(names: tuple[str, ...], sizes: tuple[int, ...], where: Topology) -> Placed:
    """Order the devices of a topology as `DeviceMesh` and `flm.pod.compile` do."""
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
        f"makes it only if asked to: {call}"
    )


def _spans(
    grid: np.ndarray, between: Sequence[int], where: Topology
) -> Iterator[tuple[int, ...] | None]:
    """`Placed.spans`, by the coordinates that change along each axis of one slice."""
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
    """The mesh axes that cross slices → the number of slices along each."""
    if topology is None:
        return {}
    between = over_slices(tuple(sizes.values()), topology.slices) or ()
    return {name: n for name, n in zip(sizes, between, strict=False) if n > 1}


def seconds_bound(
    collectives: Sequence[Collective], sizes: Mapping[str, int], topology: Topology
) -> dict[str, float]:
    """Axes (`"fsdp"`, `"data+fsdp"`, `"data (DCN)"`) → seconds in a step, at least.

    An axis that covers whole dims of the slice uses their links; one that shares a dim
    may use every link of a chip. Links of unknown bandwidth are left out.
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


_ROLES: tuple[str, ...] = ("parameter", "optimizer", "data", "other")

# A TPU lays out the two fastest dims in tiles of 8 rows (of 4 bytes) and 128 lanes; one
# or few rows take a smaller tile, and nothing takes less than 512 bytes.
_ROWS, _LANES, _LEAST = 8, 128, 512


def memory_of(
    arguments: Sequence[Array], leaves: Sequence[Leaf], topology: Topology | None
) -> Memory:
    """Bytes of the arguments on one device, by role."""
    sums: dict[str, int] = dict.fromkeys(_ROLES, 0)
    on_host = dict(sums)
    padding = 0
    for value, leaf in zip(arguments, leaves, strict=True):
        size = value.local_bytes
        if leaf.is_on_host:
            on_host[leaf.role] += size
        else:
            sums[leaf.role] += size
            padding += max(0, tiled_bytes(value) - size)
    return Memory(
        at_rest={role: size for role, size in sums.items() if size},
        host_at_rest={role: size for role, size in on_host.items() if size},
        padding_bytes=padding,
        limit_bytes=None if topology is None else topology.generation.hbm_limit_bytes,
        note="a plan does not know what the step needs besides, such as activations",
    )


def tiled_bytes(value: Array) -> int:
    """Bytes of one device's part in the tiles of a TPU, in the best order of dims."""
    size = value.local_bytes
    shape = [n for n in value.local_shape if n > 1]
    if not size or not shape:
        return max(size, _LEAST) if size else 0
    item = max(1, size // math.prod(shape))
    rows = _ROWS * max(1, 4 // item)
    if len(shape) == 1:
        return max(_LEAST, -(-shape[0] // _LANES) * _LANES * item)
    best = min(
        _padded_rows(row, rows) / row * (-(-lane // _LANES) * _LANES) / lane
        for row, lane in itertools.permutations(shape, 2)
    )
    return max(_LEAST, round(size * best))


def _padded_rows(count: int, rows: int) -> int:
    """Rows with padding: up to a power of two, or a multiple of the tile."""
    if count >= rows:
        return -(-count // rows) * rows
    return 1 << (count - 1).bit_length()


def hosts_of(
    arguments: Sequence[Array],
    leaves: Sequence[Leaf],
    sizes: Mapping[str, int],
    topology: Topology | None,
) -> tuple[Host, ...]:
    """The bytes that each host holds and reads; none without a topology."""
    if topology is None:
        return ()
    each = topology.devices_per_host
    process_of = placed(tuple(sizes), tuple(sizes.values()), topology).process_of
    places = np.argsort(process_of, kind="stable").reshape(-1, each)
    coords = dict(
        zip(sizes, np.unravel_index(places, tuple(sizes.values())), strict=True)
    )
    held = np.zeros(len(places), np.int64)
    reads, data = held.copy(), held.copy()
    for axes, (state, batch) in _by_axes(arguments, leaves).items():
        distinct = _distinct([coords[axis] for axis in axes if axis in coords], places)
        held += state * each
        reads += state * distinct
        data += batch * distinct
    per_slice = topology.hosts // topology.slices
    return tuple(
        Host(
            index=at,
            slice_index=at // per_slice,
            devices=tuple(row),
            holds_bytes=int(held[at]),
            reads_bytes=int(reads[at]),
            data_bytes=int(data[at]),
        )
        for at, row in enumerate(places.tolist())
    )


def _by_axes(
    arguments: Sequence[Array], leaves: Sequence[Leaf]
) -> dict[frozenset[str], tuple[int, int]]:
    """The axes that shard a leaf → bytes of a shard of state, and of data."""
    found: dict[frozenset[str], tuple[int, int]] = {}
    for value, leaf in zip(arguments, leaves, strict=True):
        axes = frozenset(name for entry in value.dims for name, _ in entry)
        state, data = found.get(axes, (0, 0))
        if leaf.role == "data":
            data += value.local_bytes
        else:
            state += value.local_bytes
        found[axes] = state, data
    return found


def _distinct(coords: Sequence[np.ndarray], places: np.ndarray) -> np.ndarray:
    """The number of distinct shards on each host, by coordinates of its devices."""
    if not coords:
        return np.ones(len(places), np.int64)
    key = np.zeros_like(places)
    for one in coords:
        key = key * (int(one.max()) + 1) + one
    ordered = np.sort(key, axis=1)
    return 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1)
