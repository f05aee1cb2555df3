"""Collectives that cross slices, as the TPU compiler takes them apart.

It works within each slice first, or last, so that only a share goes over the network
between slices. Found by compiling single collectives for two slices of v5e, v6e, v5p
and tpu7x with libtpu 0.0.42, on 2026-11-22.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from flax_layoutmap._topologies import Topology
from flax_layoutmap.pod._hlo import wire_bytes
from flax_layoutmap.pod._links import dcn_axes
from flax_layoutmap.pod._records import Collective, Kind
from flax_layoutmap.pod._spread import Found
from flax_layoutmap.pod._values import bytes_of, parts
from flax_layoutmap.pod._whole_sums import scatters_over

# Elements of a tile, whatever their dtype. What has no tile for each device of a slice
# is not scattered.
_TILE = 8 * 128


def within_and_between(
    whole: Collective, one: Found, sizes: Mapping[str, int], topology: Topology
) -> Iterator[Collective]:
    """What a collective is made of: the part within slices and the one between them.

    Args:
        whole: the collective, as if there were one slice.
        one: the same as it was found.
        sizes: axis name → number of devices.
        topology: where the step runs.
    """
    crosses = dcn_axes(sizes, topology)
    slices = math.prod(crosses.get(name, 1) for name in whole.axes)
    within = parts(one.axes) // slices
    # An axis that crosses slices must be there as a whole.
    is_whole = all(sizes[name] == part for name, part in one.axes if name in crosses)
    if within == 1 or slices == 1 or not is_whole:
        yield dataclasses.replace(whole, over_dcn=slices > 1)
        return
    inner = [name for name in whole.axes if sizes[name] > crosses.get(name, 1)]
    outer = [name for name in whole.axes if name in crosses]

    def part(kind: Kind, axes: Sequence[str], share: int) -> Collective:
        members = slices if axes is outer else within
        shape = whole.shape
        if share > 1:
            shape = (-(-math.prod(shape) // share),)
        size = bytes_of(shape, one.element)
        return dataclasses.replace(
            whole,
            kind=kind,
            axes=tuple(axes),
            shape=shape,
            bytes=size,
            wire_bytes=wire_bytes(kind, size, members),
            over_dcn=axes is outer,
        )

    if one.kind in ("all-reduce", "reduce-scatter"):
        if -(-math.prod(one.shape) // _TILE) <= within:
            yield part("all-reduce", inner, 1)
            yield part("all-reduce", outer, 1)
            return
        # Every device gets the whole sum, also where it keeps only a part of it.
        is_scattered = scatters_over(within, topology) and not one.is_whole
        yield part("reduce-scatter" if is_scattered else "all-reduce", inner, 1)
        yield part("all-reduce", outer, within)
        yield part("all-gather", inner, 1)
        return
    moves_all = one.kind in ("all-to-all", "collective-permute")
    # Of an all-to-all, what stays within a slice need not be sent twice.
    yield part(one.kind, inner, slices if one.kind == "all-to-all" else 1)
    yield part(one.kind, outer, 1 if moves_all else within)
