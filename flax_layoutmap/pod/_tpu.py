"""Measured rules of the TPU compiler: sums and slices.

Where every device keeps its part of a sum, the compiler makes a reduce-scatter, which
moves chunks of 4 KiB: 8 rows of 512 bytes. It makes an all-reduce, with twice the
bytes,

- where the part of a device is no multiple of that along the lanes, or is cut across a
  dim of one element;
- over all devices of a slice that is a square of at least 4 x 4 or has three dims;
- over 256 devices of a slice with three dims, for some widths with few rows;
- where the chunks do not divide into equal pieces that fit on the core (a padded
  vocabulary with a large prime factor).

On a slice with three dims, a gather over all devices is an all-reduce, too, if an axis
of the mesh covers a part of a dim, such as those of 8 x 8 on 4 x 4 x 4.

A collective over several slices is one within each slice, and one of a share between
them.

Found by compiling single gradients and collectives for v2 to tpu7x with libtpu 0.0.42,
on 2026-11-22.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from flax_layoutmap._core.topologies import Topology
from flax_layoutmap.pod._hlo import members_of, wire_bytes
from flax_layoutmap.pod._placement import dcn_axes, placed
from flax_layoutmap.pod._records import Collective, Kind

# Rows and lanes of a tile, and bytes of a row of a chunk.
_ROWS, _LANES, _ROW_BYTES = 8, 128, 512
# Over so many devices, sums of few rows are all-reduces, too.
_MANY = 256
# Generation → the fewest and most tiles, of elements of two bytes, that all devices of
# a group move at a time; each lies between two sizes that were compiled.
_PIECES = {
    "v4": (176, 1440),
    "v5p": (176, 1440),
    "v5e": (208, 1600),
    "v6e": (400, 3408),
}
# These sum outside of the cores, in parts of any shape.
_SCATTER_ANYTHING = ("tpu7x",)


def scatters(
    topology: Topology, longer: tuple[int, int] = (1, 1)
) -> Callable[[tuple[int, ...], int, int, int, str], bool]:
    """Return the test whether the compiler makes a sum with a reduce-scatter.

    `longer` is for programs on a shortened mesh: the size of the axis there, and the
    factor to its real size.
    """
    generation = topology.generation.name
    has_three_dims = len(_sides(topology)) == 3

    def is_scattered(
        part: tuple[int, ...], cut: int, item: int, members: int, name: str
    ) -> bool:
        if generation in _SCATTER_ANYTHING:
            return True
        # The rows of an embedding are added up in other ways.
        if name.rpartition("/")[2].startswith("scatter"):
            return True
        if longer[1] > 1 and members % longer[0] == 0:
            sliced = -(-part[cut] // longer[1])
            part = (*part[:cut], sliced, *part[cut + 1 :])
            members *= longer[1]
        within = min(members, topology.devices // topology.slices)
        many = within == _MANY and has_three_dims
        pieces = _PIECES.get(generation)
        return _scatters_over(within, topology) and not _is_whole(
            part, cut, item, members, many, pieces
        )

    return is_scattered


def _scatters_over(count: int, topology: Topology) -> bool:
    """Whether the compiler has a reduce-scatter over so many devices of a slice."""
    if topology.generation.name in _SCATTER_ANYTHING:
        return True
    everywhere = topology.devices // topology.slices
    return count < everywhere or not _has_all_links(topology)


def _gathers_over(count: int, sizes: Mapping[str, int], topology: Topology) -> bool:
    """Whether the compiler has an all-gather over so many devices of a slice."""
    if count < topology.devices // topology.slices or len(_sides(topology)) < 3:
        return True
    return None not in placed(tuple(sizes), tuple(sizes.values()), topology).spans


def _has_all_links(topology: Topology) -> bool:
    """Whether the compiler has an all-reduce over all links of such a slice."""
    sides, cores = _sides(topology), topology.generation.devices_per_chip
    if len(sides) == 2:
        return sides[0] == sides[1] and sides[0] * cores >= 4
    return len(sides) == 3


def _sides(topology: Topology) -> list[int]:
    return [size for size in topology.shape if size > 1]


def _is_whole(
    shape: tuple[int, ...],
    cut: int,
    item: int,
    members: int,
    many: bool,
    pieces: tuple[int, int] | None,
) -> bool:
    """Whether the shape of a device's part is not scattered.

    `cut` is the sharded dim, `item` the bytes of an element, `many` whether `members`
    are 256 devices of a slice with three dims, `pieces` those of the generation.
    """
    if sum(size > 1 for size in shape) < 2:
        return False
    row, lane = tiled_dims(shape)
    if cut not in (row, lane):
        lanes = _padded(shape[cut], _LANES) * item
        return cut == len(shape) - 1 and lanes % _ROW_BYTES > 0
    others = math.prod(shape) // (shape[row] * shape[lane])
    if cut == lane:
        if _padded(shape[lane], _LANES) * item % _ROW_BYTES > 0:
            return True
        tiles = _padded(shape[row], _ROWS) // _ROWS * others
        return pieces is not None and item == 2 and _is_odd(tiles, members, pieces)
    # Such as the kernel of keys with one head on a device.
    between = shape[min(row, lane) + 1 : max(row, lane)]
    if cut == row and len(between) > 0 and others == 1:
        return True
    wide = _padded(shape[lane], _LANES) // _LANES * others
    return cut == row and many and _falls_apart(shape[row], wide)


def _is_odd(tiles: int, count: int, pieces: tuple[int, int]) -> bool:
    """Whether no piece size in the range `pieces` divides the tiles of a device."""
    least, most = (-(-pieces[0] // count), pieces[1] // count)
    return tiles > most and all(tiles % rows for rows in range(least, most + 1))


def _falls_apart(rows: int, tiles: int) -> bool:
    """Whether the pieces of a sum over 256 devices are uneven.

    The rule is from some forty compiled shapes; `tiles` counts those in a row.
    """
    while tiles % 2 == 0 or tiles % 3 == 0:
        tiles //= 2 if tiles % 2 == 0 else 3
    return rows < 64 and (rows < 16 or tiles > 1)


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


# Elements of a tile, whatever their dtype. What has no tile for each device of a slice
# is not scattered.
_TILE = 8 * 128


def as_compiled(
    whole: Collective, sizes: Mapping[str, int], topology: Topology | None
) -> Iterator[Collective]:
    """What the compiler makes of a collective over axes of a mesh."""
    if topology is not None and topology.slices > 1:
        return _within_and_between(whole, sizes, topology)
    members = members_of(whole, sizes)
    if topology is not None and members is not None:
        made = {
            "all-gather": _gathers_over(members, sizes, topology),
            "reduce-scatter": _scatters_over(members, topology),
        }
        if not made.get(whole.kind, True):
            sent = wire_bytes("all-reduce", whole.bytes, members)
            whole = dataclasses.replace(whole, kind="all-reduce", wire_bytes=sent)
    return iter((whole,))


def _within_and_between(
    whole: Collective, sizes: Mapping[str, int], topology: Topology
) -> Iterator[Collective]:
    """Split a collective, as of one slice, into those within slices and between."""
    crosses = dcn_axes(sizes, topology)
    slices = math.prod(crosses.get(name, 1) for name in whole.axes)
    members = members_of(whole, sizes)
    if slices == 1 or members is None or members % slices or members == slices:
        yield dataclasses.replace(whole, over_dcn=slices > 1)
        return
    within = members // slices
    inner = [name for name in whole.axes if sizes[name] > crosses.get(name, 1)]
    outer = [name for name in whole.axes if name in crosses]

    def part(kind: Kind, axes: Sequence[str], share: int) -> Collective:
        members = slices if axes is outer else within
        shape = whole.shape
        if share > 1:
            shape = (-(-math.prod(shape) // share),)
        size = -(-whole.bytes // share)
        return dataclasses.replace(
            whole,
            kind=kind,
            axes=tuple(axes),
            shape=shape,
            bytes=size,
            wire_bytes=wire_bytes(kind, size, members),
            over_dcn=axes is outer,
        )

    if whole.kind in ("all-reduce", "reduce-scatter"):
        if -(-math.prod(whole.shape) // _TILE) <= within:
            yield part("all-reduce", inner, 1)
            yield part("all-reduce", outer, 1)
            return
        # Every device gets the whole sum, also where it keeps only a part of it.
        yield part(
            "reduce-scatter" if _scatters_over(within, topology) else "all-reduce",
            inner,
            1,
        )
        yield part("all-reduce", outer, within)
        yield part("all-gather", inner, 1)
        return
    moves_all = whole.kind in ("all-to-all", "collective-permute")
    # Of an all-to-all, what stays within a slice need not be sent twice.
    yield part(whole.kind, inner, slices if whole.kind == "all-to-all" else 1)
    yield part(whole.kind, outer, 1 if moves_all else within)
