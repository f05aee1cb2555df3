"""Bytes of the arguments of a step: on one device by role, and on each host."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from flax_layoutmap._core.topologies import Topology
from flax_layoutmap.pod._links import placed
from flax_layoutmap.pod._lowered import Leaf
from flax_layoutmap.pod._mlir import Array
from flax_layoutmap.pod._records import Host, Memory

_ROLES: tuple[str, ...] = ("parameter", "optimizer", "data", "other")

# A TPU lays out the two fastest dims in tiles of 8 rows (of 4 bytes) and 128 lanes; one
# or few rows take a smaller tile, and nothing takes less than 512 bytes.
_ROWS, _LANES, _LEAST = 8, 128, 512


def memory_of(
    arguments: Sequence[Array], leaves: Sequence[Leaf], topology: Topology | None
) -> Memory:
    """What is at rest between steps, by shard arithmetic.

    Args:
        arguments: the arguments, with their shardings.
        leaves: what each of them is.
        topology: where it is, for the limit; None where that is not known.
    """
    sums: dict[str, int] = dict.fromkeys(_ROLES, 0)
    padding = 0
    for value, leaf in zip(arguments, leaves, strict=True):
        size = value.local_bytes
        sums[leaf.role] += size
        padding += max(0, tiled_bytes(value) - size)
    return Memory(
        at_rest={role: size for role, size in sums.items() if size},
        padding_bytes=padding,
        limit_bytes=None if topology is None else topology.generation.hbm_limit_bytes,
        note="a plan does not know what the step needs besides, such as activations",
    )


def tiled_bytes(value: Array) -> int:
    """Bytes of one device's part in the tiles of a TPU; the compiler's best choice."""
    size = value.local_bytes
    shape = [n for n in value.local_shape if n > 1]
    if not size or not shape:
        return max(size, _LEAST) if size else 0
    count = 1
    for n in shape:
        count *= n
    item = max(1, size // count)
    rows = _ROWS * max(1, 4 // item)
    if len(shape) == 1:
        return max(_LEAST, -(-shape[0] // _LANES) * _LANES * item)
    best = min(
        _padded_rows(row, rows) / row * (-(-lane // _LANES) * _LANES) / lane
        for row, lane in itertools.permutations(shape, 2)
    )
    return max(_LEAST, round(size * best))


def _padded_rows(count: int, rows: int) -> int:
    """Few rows take the next power of two, many a multiple of the tile."""
    if count >= rows:
        return -(-count // rows) * rows
    return 1 << (count - 1).bit_length()


def hosts_of(
    arguments: Sequence[Array],
    leaves: Sequence[Leaf],
    sizes: Mapping[str, int],
    topology: Topology | None,
) -> tuple[Host, ...]:
    """What each host holds, where JAX puts the places of the mesh.

    Args:
        arguments: the arguments of the step, with their shardings.
        leaves: what each of them is.
        sizes: axis name → size, in the order of the mesh.
        topology: where it runs; None gives no hosts.
    """
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
    """The axes that cut a leaf → bytes of a part of state, and of data."""
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
    """How many different parts the devices of each host hold."""
    if not coords:
        return np.ones(len(places), np.int64)
    key = np.zeros_like(places)
    for one in coords:
        key = key * (int(one.max()) + 1) + one
    ordered = np.sort(key, axis=1)
    return 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(axis=1)
