"""Replica groups of a compiled program, as axes of the mesh.

`replica_groups` has four forms: lists, an iota with a transposition, a mesh with
anonymous axes, and such a mesh over other device ids. All are parsed to lists of places
in the mesh; the axes are those along which the places of a group differ.
"""

import collections
import itertools
import math
import re
from collections.abc import Sequence

import numpy as np

_IOTA = re.compile(
    r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?(?!T\()"
)
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"
    r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?\s*\{([^}]*)\}"
)
_LISTS = re.compile(r"replica_groups=\{((?:\{[\d, ]*\},?\s*)*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?\s*)*)\}")
_MESH_AXIS = re.compile(r"'([^']+)'=(\d+)")
# `'a'`, or a part of it: `'a':(2)4` is 4 of it, after a factor of 2.
_PICKED_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


class Grid:
    """The mesh as a compiled program numbers it.

    `slice_of` is that of each place of the mesh, row by row, or empty for one slice. A
    program of several slices may count the devices, its `partitions`, of one alone.
    """

    def __init__(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        slice_of: Sequence[int],
        partitions: int,
    ) -> None:
        self.names = names
        self.partitions = partitions
        self.slices = len(set(slice_of)) or 1
        places = np.arange(math.prod(sizes))
        self._slices = np.array(slice_of or [0] * len(places))
        if partitions != len(places):
            places = places[self._slices == self._slices[0]]
        # Of each id of the program: its coordinates, and its slice.
        self._coordinates = np.unravel_index(places, sizes)
        self._slice_of_id = self._slices[places]
        self._slices = self._slices.reshape(sizes)

    def axes(self, groups: np.ndarray) -> tuple[str, ...] | None:
        """The axes along which the members of a group differ; None if out of range."""
        if groups.size and groups.max() >= len(self._slice_of_id):
            return None
        coordinates = zip(self.names, self._coordinates, strict=True)
        return tuple(name for name, each in coordinates if _differ(each[groups]))

    def crosses(self, groups: np.ndarray) -> bool:
        """Whether members of one group are on different slices."""
        return _differ(self._slice_of_id[groups])

    def axes_between_slices(self) -> tuple[str, ...]:
        """The axes along which the slice changes."""
        return tuple(
            name
            for at, name in enumerate(self.names)
            if (self._slices != np.take(self._slices, [0], axis=at)).any()
        )


def _differ(groups: np.ndarray) -> bool:
    return bool((groups != groups[:, :1]).any())


def groups_of(attributes: str, partitions: int) -> np.ndarray | None:
    """The groups of a collective, one row each; None where they cannot be read."""
    try:
        if iota := _IOTA.search(attributes):
            return _ids(*iota.group(2, 3)).reshape(_numbers(iota[1]))
        if mesh := _MESH.search(attributes):
            return _of_mesh(*mesh.groups())
        if lists := _LISTS.search(attributes):
            rows = [_numbers(row) for row in re.findall(r"\{([^}]*)\}", lists[1])]
            # An empty list means all devices.
            return np.array(rows or [range(partitions)], dtype=np.int64)
    except (KeyError, ValueError):  # an unknown axis; sizes that do not fit
        pass
    return None


def pairs_of(attributes: str) -> np.ndarray | None:
    """Source and target of a permute, one row for each pair that moves something."""
    written = _PAIRS.search(attributes)
    if written is None:
        return None
    pairs = np.array(_numbers(written[1]), dtype=np.int64).reshape(-1, 2)
    return pairs[pairs[:, 0] != pairs[:, 1]]


def _numbers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


def _ids(shape: str, order: str | None) -> np.ndarray:
    """Devices `[2,4]` numbered row by row, then transposed by `T(1,0)`."""
    dims = _numbers(shape)
    ids = np.arange(math.prod(dims)).reshape(dims)
    return (ids if order is None else ids.transpose(_numbers(order))).reshape(-1)


def _of_mesh(
    written: str, shape: str | None, order: str | None, names: str
) -> np.ndarray:
    axes = {name: int(size) for name, size in _MESH_AXIS.findall(written)}
    ids = _ids(shape or str(math.prod(axes.values())), order)
    # Each axis is cut where a part of it begins or ends.
    sizes: list[int] = []
    picked: list[int] = []
    parts = collections.defaultdict(list)
    for name, before, size in _PICKED_AXIS.findall(names):
        start, whole = int(before or 1), axes[name]
        parts[name].append(range(start, start * int(size or whole)))
    for name, whole in axes.items():
        cuts = {
            1,
            whole,
            *(end for part in parts[name] for end in (part.start, part.stop)),
        }
        for start, end in itertools.pairwise(sorted(cuts)):
            if any(start in part for part in parts[name]):
                picked.append(len(sizes))
            sizes.append(end // start)
    rest = [at for at in range(len(sizes)) if at not in picked]
    width = math.prod(sizes[at] for at in picked)
    return ids.reshape(sizes).transpose(rest + picked).reshape(-1, width)
