"""Replica groups of a compiled program, as axes of the mesh.

`replica_groups` has four forms: lists, an iota with a transposition, a mesh with
anonymous axes, and such a mesh over other device ids. All are parsed to lists of places
in the mesh; the axes are those along which the places of a group differ.
"""

import dataclasses
import math
import re

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
_PICKED_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


@dataclasses.dataclass(frozen=True)
class Grid:
    """The mesh as a compiled program numbers it."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    slice_of: tuple[int, ...]  # of each place of the mesh, row by row; () for one slice
    partitions: int  # ids of the program: of several slices, those of one alone

    @property
    def slices(self) -> int:
        """How many slices there are."""
        return len(set(self.slice_of)) or 1

    def places(self) -> np.ndarray:
        """Place in the mesh of each id of the program."""
        every = np.arange(math.prod(self.sizes))
        if self.partitions == len(every) or not self.slice_of:
            return every
        return every[np.array(self.slice_of) == self.slice_of[0]]

    def axes(self, groups: np.ndarray) -> tuple[str, ...] | None:
        """The axes along which the members of a group differ; None if out of range."""
        places = self.places()
        if groups.size and (groups.min() < 0 or groups.max() >= len(places)):
            return None
        coords = np.unravel_index(places[groups], self.sizes)
        return tuple(
            name
            for name, coord in zip(self.names, coords, strict=True)
            if (coord != coord[:, :1]).any()
        )

    def crosses(self, groups: np.ndarray) -> bool:
        """Whether members of one group are on different slices."""
        if self.slices == 1 or self.partitions != len(self.slice_of):
            return False
        slices = np.array(self.slice_of)[groups]
        return bool((slices != slices[:, :1]).any())

    def axes_between_slices(self) -> tuple[str, ...]:
        """The axes along which the slice changes."""
        slices = np.array(self.slice_of or [0] * math.prod(self.sizes))
        slices = slices.reshape(self.sizes)
        return tuple(
            name
            for at, name in enumerate(self.names)
            if (slices != np.take(slices, [0], axis=at)).any()
        )


def groups_of(attributes: str, partitions: int) -> np.ndarray | None:
    """The groups of a collective, one row each; None where they cannot be read."""
    for read in (_iota, _mesh, _lists):
        groups = read(attributes, partitions)
        if groups is not None:
            return groups
    return None


def pairs_of(attributes: str) -> np.ndarray | None:
    """Source and target of a permute, one row for each pair that moves something."""
    found = _PAIRS.search(attributes)
    if found is None:
        return None
    ids = [int(digits) for digits in re.findall(r"\d+", found[1])]
    pairs = np.array(ids, dtype=np.int64).reshape(-1, 2)
    return pairs[pairs[:, 0] != pairs[:, 1]]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]


def _iota(attributes: str, partitions: int) -> np.ndarray | None:
    found = _IOTA.search(attributes)
    if found is None:
        return None
    shape, dims = _numbers(found[1]), _numbers(found[2])
    ids = _transposed(dims, found[3], partitions)
    if ids is None or len(shape) != 2 or math.prod(shape) != ids.size:
        return None
    return ids.reshape(shape)


def _transposed(dims: list[int], order: str | None, limit: int) -> np.ndarray | None:
    count = math.prod(dims)
    if not 0 < count <= limit:
        return None
    ids = np.arange(count).reshape(dims)
    if order is None:
        return ids.reshape(-1)
    axes = _numbers(order)
    if sorted(axes) != list(range(len(dims))):
        return None
    return ids.transpose(axes).reshape(-1)


def _mesh(attributes: str, partitions: int) -> np.ndarray | None:
    found = _MESH.search(attributes)
    if found is None:
        return None
    axes = [(name, int(size)) for name, size in _MESH_AXIS.findall(found[1])]
    count = math.prod(size for _, size in axes)
    if not axes or not 0 < count <= partitions:
        return None
    ids: np.ndarray | None = np.arange(count)
    if found[2] is not None:
        ids = _transposed(_numbers(found[2]), found[3], partitions)
    if ids is None or ids.size != count:
        return None
    sizes: list[int] = []
    picked: list[int] = []
    chosen = _PICKED_AXIS.findall(found[4])
    if {name for name, _, _ in chosen} - {name for name, _ in axes}:
        return None
    for name, size in axes:
        mine = [(before, part) for other, before, part in chosen if other == name]
        if mine and mine[0][0]:
            # A part of an axis: 'a':(2)4 is 4 of it, after a factor of 2.
            if len(mine) > 1:
                return None
            before, part = int(mine[0][0]), int(mine[0][1])
            if before * part < 1 or size % (before * part):
                return None
            picked.append(len(sizes) + 1)
            sizes += [before, part, size // (before * part)]
        else:
            if mine:
                picked.append(len(sizes))
            sizes.append(size)
    rest = [at for at in range(len(sizes)) if at not in picked]
    width = math.prod(sizes[at] for at in picked)
    return ids.reshape(sizes).transpose(rest + picked).reshape(-1, width)


def _lists(attributes: str, partitions: int) -> np.ndarray | None:
    found = _LISTS.search(attributes)
    if found is None:
        return None
    rows = [_numbers(row) for row in re.findall(r"\{([\d, ]*)\}", found[1])]
    if not rows:
        # An empty list means all devices.
        return np.arange(partitions).reshape(1, -1)
    if len({len(row) for row in rows}) != 1 or not rows[0]:
        return None
    return np.array(rows, dtype=np.int64)
