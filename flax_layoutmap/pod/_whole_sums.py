"""Gradients that the TPU compiler sums whole, where Shardy has a reduce-scatter.

Its reduce-scatter moves chunks of 4 KiB: 8 rows of 512 bytes. Where the part of a
device is no multiple of that along the lanes, or lies across a dim of one element,
every device sums all of the gradient and takes its slice: an all-reduce, with twice the
bytes. So it does over all devices of a slice, where that is a square of at least 4 x 4
or has three dims: for these it has an all-reduce over all links at a time. And so over
256 devices of a slice with three dims, for some widths where a device has few rows.
Chunks are moved in equal pieces that fit on the core and are not too small; a sum that
does not come out even in such pieces, as its rows have a large prime factor (a padded
vocabulary), is whole, too. Found by compiling single gradients for v2 to v6e with
libtpu 0.0.42, on 2026-11-22.
"""

import math
from collections.abc import Sequence

from flax_layoutmap._topologies import Topology
from flax_layoutmap.pod._links import dcn_axes
from flax_layoutmap.pod._sources import operation_name
from flax_layoutmap.pod._spread import Found, Spread
from flax_layoutmap.pod._values import Value, bytes_of, parts

# Rows and lanes of a tile, and bytes of a row of a chunk.
_ROWS, _LANES, _ROW_BYTES = 8, 128, 512
# Over so many, sums of few rows are whole, too.
_MANY = 256
# Generation → the fewest and most tiles that are moved at a time by all devices of a
# group, of elements of two bytes; each lies between two sizes that were compiled.
_PIECES = {
    "v4": (176, 1440),
    "v5p": (176, 1440),
    "v5e": (208, 1600),
    "v6e": (400, 3408),
}
# Their sums are made beside the cores, in parts of any shape.
_SCATTER_ANYTHING = ("tpu7x",)


def sum_whole(found: Spread, topology: Topology) -> None:
    """Makes all-reduces of the reduce-scatters that the compiler does not do.

    Args:
        found: what was read from a module, with the leaves of its sums; it is changed.
        topology: where the step runs.
    """
    if topology.generation.name in _SCATTER_ANYTHING:
        return
    crosses = dcn_axes(found.sizes, topology)
    has_three_dims = len(_sides(topology)) == 3
    for one in found.collectives:
        if one.kind != "reduce-scatter" or one.leaf is None:
            continue
        # The rows of an embedding are added up in other ways.
        if operation_name(one.location).startswith("scatter"):
            continue
        names = {name for name, _ in one.axes}
        within = parts(one.axes) // math.prod(crosses.get(name, 1) for name in names)
        many = within == _MANY and has_three_dims
        leaf = found.arguments[one.leaf]
        pieces = _PIECES.get(topology.generation.name)
        if not scatters_over(within, topology) or _is_whole(one, leaf, many, pieces):
            one.kind, one.is_whole = "all-reduce", True


def scatters_over(count: int, topology: Topology) -> bool:
    """Whether the compiler has a reduce-scatter for groups of so many devices.

    Args:
        count: how many devices of a slice.
        topology: where the step runs.
    """
    if topology.generation.name in _SCATTER_ANYTHING:
        return True
    everywhere = topology.devices // topology.slices
    return count < everywhere or not _has_all_links(topology)


def _has_all_links(topology: Topology) -> bool:
    """Whether the compiler has an all-reduce for all links of such a slice."""
    sides, cores = _sides(topology), topology.generation.devices_per_chip
    if len(sides) == 2:
        return sides[0] == sides[1] and sides[0] * cores >= 4
    return len(sides) == 3


def _sides(topology: Topology) -> list[int]:
    return [size for size in topology.shape if size > 1]


def _is_whole(
    one: Found, leaf: Value, many: bool, pieces: tuple[int, int] | None
) -> bool:
    """Whether the part of a device has a shape that is not scattered.

    Args:
        one: a reduce-scatter.
        leaf: the parameter whose gradient it sums.
        many: whether it is over 256 devices, of a slice with three dims.
        pieces: the fewest and most tiles that are moved at a time, where that is known.
    """
    first = _first_dim(one, leaf)
    if first is None:
        return False
    shape, dims = leaf.local_shape[first:], leaf.dims[first:]
    cut = [dim for dim, axes in enumerate(dims) if not set(axes).isdisjoint(one.axes)]
    item = bytes_of((1,), one.element)
    if len(cut) != 1 or sum(size > 1 for size in shape) < 2:
        return False
    row, lane = tiled_dims(shape)
    others = math.prod(shape) // (shape[row] * shape[lane])
    if cut == [lane]:
        if _padded(shape[lane], _LANES) * item % _ROW_BYTES > 0:
            return True
        tiles = _padded(shape[row], _ROWS) // _ROWS * others
        return pieces is not None and item == 2 and _is_odd(tiles, one, pieces)
    # Such as the kernel of keys with one head on a device.
    between = shape[min(row, lane) + 1 : max(row, lane)]
    if cut == [row] and len(between) > 0 and others == 1:
        return True
    wide = _padded(shape[lane], _LANES) // _LANES * others
    return cut == [row] and many and _falls_apart(shape[row], wide)


def _is_odd(tiles: int, one: Found, pieces: tuple[int, int]) -> bool:
    """Whether no piece of a size that is moved divides what a device has.

    Args:
        tiles: how many tiles of rows a device has.
        one: the reduce-scatter.
        pieces: the fewest and most tiles of all devices of a group at a time.
    """
    count = parts(one.axes)
    least, most = (-(-pieces[0] // count), pieces[1] // count)
    return tiles > most and all(tiles % rows for rows in range(least, most + 1))


def _falls_apart(rows: int, tiles: int) -> bool:
    """Whether the pieces of a sum over 256 devices do not come out even.

    Found by trying some forty shapes; we know no reason.

    Args:
        rows: rows of the part of a device.
        tiles: how many tiles lie beside each other.
    """
    while tiles % 2 == 0 or tiles % 3 == 0:
        tiles //= 2 if tiles % 2 == 0 else 3
    return rows < 64 and (rows < 16 or tiles > 1)


def _first_dim(one: Found, leaf: Value) -> int | None:
    """The first dim of a parameter that its gradient has; a scan takes others away."""
    size, rest = divmod(math.prod(one.shape), parts(one.axes))
    shape = leaf.local_shape
    firsts = (at for at in range(len(shape)) if math.prod(shape[at:]) == size)
    return None if rest else next(firsts, None)


def tiled_dims(shape: Sequence[int]) -> tuple[int, int]:
    """The dims that the compiler lays in the rows and lanes of its tiles.

    They are the two largest; the one goes along the lanes that wastes less, and the
    last of the two where they waste the same.

    >>> tiled_dims((128, 4, 128)), tiled_dims((512, 8, 64)), tiled_dims((128, 16032))
    ((0, 2), (2, 0), (1, 0))
    """
    first, last = sorted(
        sorted(range(len(shape)), key=lambda dim: (shape[dim], dim))[-2:]
    )

    def waste(row: int, lane: int) -> float:
        rows, lanes = _padded(shape[row], _ROWS), _padded(shape[lane], _LANES)
        return rows * lanes / (shape[row] * shape[lane])

    swapped = waste(last, first) < waste(first, last)
    return (last, first) if swapped else (first, last)


def _padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
