"""Fold the leaves of a report into rows; tables of plain values as text."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rich.cells import cell_len

from flax_layoutmap._core.errors import visible

# ------------------------------------------------ leaves that differ only in indices

# A whole part of a path (`layers/0`), or a part of a name between underscores
# (`layers_0`); not `conv2`, and not numbers with more digits than a list index has.
_INDEX = re.compile(r"(?<![^/_])(0|[1-9][0-9]{0,8})(?=[/_]|$)")

# Most runs of indices that are written out.
_RUNS = 6

Indices = tuple[int, ...]


class Fold(NamedTuple):
    """Leaves that share a row."""

    text: str  # the path, with `{0..79}` for the indices 0 to 79
    members: tuple[int, ...]  # positions of the leaves, ascending

    @property
    def cell(self) -> str:
        """The path and the number of leaves."""
        many = f" ×{len(self.members)}" if len(self.members) > 1 else ""
        return f"{self.text}{many}"


def fold(paths: Sequence[str], alike: Sequence[Hashable]) -> list[Fold]:
    """Fold the paths that differ only in indices, in the order of their first members.

    Paths with different values in `alike` are not folded together.

    >>> [row.text for row in fold(["a/0/w", "a/1/w", "a/2/w", "b"], [0, 0, 0, 0])]
    ['a/{0..2}/w', 'b']
    >>> [row.text for row in fold(["a_0", "a_1", "a_2", "a_4"], "xxyx")]
    ['a_{0,1,4}', 'a_2']
    """
    groups: dict[tuple[tuple[str, ...], Hashable], dict[Indices, int]] = {}
    for at, (path, key) in enumerate(zip(paths, alike, strict=True)):
        pieces = _INDEX.split(path)
        group = groups.setdefault((tuple(pieces[::2]), key), {})
        group[tuple(map(int, pieces[1::2]))] = at
    folds: list[Fold] = []
    for ((first, *texts), _), group in groups.items():
        for box in _boxes(list(group)):
            members = sorted(group[indices] for indices in itertools.product(*box))
            slots = map(spell_indices, box)
            path = first + "".join(map("".join, zip(slots, texts, strict=True)))
            folds.append(Fold(path, tuple(members)))
    return sorted(folds, key=lambda row: row.members[0])


def _boxes(tuples: list[Indices]) -> list[list[list[int]]]:
    """Split a set of index tuples into products of sets, one set per slot."""
    if not tuples[0]:
        return [[]]
    rests: dict[int, list[Indices]] = {}
    for indices in tuples:
        rests.setdefault(indices[0], []).append(indices[1:])
    same: dict[tuple[Indices, ...], list[int]] = {}
    for first, rest in rests.items():
        same.setdefault(tuple(sorted(rest)), []).append(first)
    return [
        [sorted(firsts), *box]
        for rest, firsts in same.items()
        for box in _boxes(list(rest))
    ]


def spell_indices(indices: Sequence[int]) -> str:
    """Ascending indices in shell notation; many runs are abbreviated.

    >>> spell_indices([7]), spell_indices([0, 1, 2, 3, 5]), spell_indices([0, 2, 4, 6])
    ('7', '{0..3,5}', '{0..6..2}')
    """
    if len(indices) == 1:
        return str(indices[0])
    step = indices[1] - indices[0]
    regular = all(b - a == step for a, b in itertools.pairwise(indices))
    if step > 1 and regular and len(indices) > 3:
        return f"{{{indices[0]}..{indices[-1]}..{step}}}"
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    texts = [
        f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run))
        for run in runs
    ]
    if len(texts) > _RUNS:
        texts = [*texts[: _RUNS - 3], "…", texts[-1]]
    return f"{{{','.join(texts)}}}"


def natural_key(path: str) -> list[str | int]:
    """Sort `layers/2` before `layers/10`."""
    pieces = enumerate(re.split(r"([0-9]+)", path))
    return [int(piece) if at % 2 else piece for at, piece in pieces]


# ---------------------------------------------------------------------------- tables

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_OF_BYTES = ("bytes", "bytes/device", "per device", "to send")
_LEAST = 16  # characters of a shortened path


class Line(NamedTuple):
    """One line of a Grid."""

    cells: tuple[str, ...]  # one per column
    mark: str = ""  # selects its colour: "warning", or the kind of a change


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """A table as text cells."""

    names: tuple[str, ...]  # the header
    right: tuple[bool, ...]  # whether each column is right-aligned
    lines: tuple[Line, ...]  # control characters are escaped

    def __post_init__(self) -> None:
        lines = (Line(tuple(map(visible, row)), mark) for row, mark in self.lines)
        object.__setattr__(self, "lines", tuple(lines))

    def widths(self) -> list[int]:
        columns = zip(self.names, *(line.cells for line in self.lines), strict=True)
        return [max(map(cell_len, column)) for column in columns]

    def width(self) -> int:
        return sum(self.widths()) + 2 * (len(self.names) - 1)

    def padded(self) -> Iterator[tuple[list[str], str]]:
        """The cells of each line, padded to the width of their columns, and its mark.

        The header (mark `"header"`) and a line below it (mark `"rule"`) come first.
        """
        widths = self.widths()
        below = Line(tuple("─" * width for width in widths), "rule")
        for cells, mark in (Line(self.names, "header"), below, *self.lines):
            columns = zip(cells, widths, self.right, strict=True)
            yield [_filled(*column) for column in columns], mark

    def text(self) -> str:
        return "\n".join("  ".join(cells).rstrip() for cells, _ in self.padded())


def _filled(text: str, width: int, right: bool) -> str:
    space = " " * (width - cell_len(text))
    return space + text if right else text + space


def grid_of(
    columns: Mapping[str, Sequence[str]], marks: Sequence[str] | None = None
) -> Grid:
    """A table with these columns; columns of bytes are right-aligned."""
    rows = zip(*columns.values(), strict=True)
    lines = tuple(map(Line, rows, itertools.repeat("") if marks is None else marks))
    return Grid(tuple(columns), tuple(name in _OF_BYTES for name in columns), lines)


def fitted(
    columns: Mapping[str, Sequence[str]], marks: Sequence[str], width: int | None
) -> Grid:
    """A table at most `width` characters wide; None for any width.

    If it is too wide, the column "array" is left out; then paths are shortened.
    """
    grid = grid_of(columns, marks)
    if width is None or grid.width() <= width:
        return grid
    columns = {name: cells for name, cells in columns.items() if name != "array"}
    grid = grid_of(columns, marks)
    over = grid.width() - width
    if over > 0:
        room = max(grid.widths()[grid.names.index("path")] - over, _LEAST)
        columns["path"] = [cut_path(path, room) for path in columns["path"]]
    return grid_of(columns, marks)


@functools.lru_cache(maxsize=4096)
def human_bytes(count: int | float) -> str:
    """`1536` → `'1.5 KiB'`."""
    value, power = float(count), 0
    while value >= 1024 and power < len(_UNITS) - 1:
        value, power = value / 1024, power + 1
    return f"{value:.{min(power, 1)}f} {_UNITS[power]}"


def human_share(share: float) -> str:
    """`0.0312` → `'3.1%'`; a small share is never shown as 0."""
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def cut_path(path: str, width: int) -> str:
    """Shorten a path that is too long; its last characters are kept.

    >>> cut_path("opt_state/0/mu/layers/7/attention/query/kernel", 30)
    'opt_state/…/query/kernel'
    """
    if cell_len(path) <= width:
        return path
    first, *parts = path.split("/")
    for start, fewest in ((f"{first}/…/", 2), ("…/", 1)):
        for at in range(1, len(parts) - fewest + 1):
            short = start + "/".join(parts[at:])
            if cell_len(short) <= width:
                return short
    short = f"…{path}"
    while cell_len(short) > max(width, 1):
        short = f"…{short[2:]}"
    return short
