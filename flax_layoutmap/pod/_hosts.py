"""What each host of a topology holds and reads."""

from collections.abc import Mapping, Sequence

import numpy as np

from flax_layoutmap._topologies import Topology
from flax_layoutmap.pod._lowered import Leaf
from flax_layoutmap.pod._placed import placed
from flax_layoutmap.pod._records import Host
from flax_layoutmap.pod._values import Value


def hosts_of(
    arguments: Sequence[Value],
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
    arguments: Sequence[Value], leaves: Sequence[Leaf]
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
