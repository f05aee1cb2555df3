"""Scenes: the content of a picture as plain numbers and words.

All geometry is done before a scene is made. A renderer loops over boxes and labels,
scales them, and chooses type and colours. Every scene is frozen and converts to JSON
directly (`dataclasses.asdict`).

Lengths in a `Picture` are in points. Rectangles of a tree-map are integers from 0 to
`UNIT`, for a canvas of any size. Colours are numbers: `NEUTRAL` for what is replicated,
0 and up for the others, which a renderer looks up in one palette.
"""

import dataclasses
from typing import Literal

# Length of the side of a tree-map.
UNIT = 65535

# The mark of a leaf without a rule, or with a fallback.
Mark = Literal["", "unmatched", "fallback"]

# The colour of replicated arrays.
NEUTRAL = -1
GREY = "#dddddd"

# Colours for every kind of colour vision: Paul Tol's "light"
# scheme (Colour Schemes, technical note SRON/EPS/TN/09-002), made for cells with dark
# words in them; each has a contrast of at least 8 to `INK`. The style sheet of the page
# of a model has the same, and darker ones for dark screens.
PALETTE = (
    "#77aadd",
    "#ee8866",
    "#eedd88",
    "#ffaabb",
    "#99ddff",
    "#44bb99",
    "#bbcc33",
    "#aaaa00",
)
COLOURS = len(PALETTE)

# The colour of text on any of them.
INK = "#14181f"

# Patterns for the second, third and fourth use of a colour, as in matplotlib.
_HATCHES = (None, "....", "----", "xxxx")

# One character per colour, for output without colours, and for repeated ones.
_FILLS, _NEUTRAL_FILL = "█▓▒▚▞▄▀▌▙▜▟▛▐▂▆╬", "░"


def colour(number: int) -> str:
    """The colour of a number in a scene, as `#rrggbb`."""
    return GREY if number == NEUTRAL else PALETTE[number % COLOURS]


def hatch(number: int) -> str | None:
    """The pattern that distinguishes colours that repeat."""
    if number == NEUTRAL:
        return "////"
    return _HATCHES[min(number // COLOURS, len(_HATCHES) - 1)]


def fill(number: int) -> str:
    """The character that stands for a colour."""
    return _NEUTRAL_FILL if number == NEUTRAL else _FILLS[number % len(_FILLS)]


@dataclasses.dataclass(frozen=True, slots=True)
class Box:
    """A rectangle: a slice of an array, or a device.

    Boxes that hold the same slice have the same `group`. `lines` are drawn in it, the
    most important first; `detail` is the full description.
    """

    left: float
    top: float
    width: float
    height: float
    colour: int
    group: int
    lines: tuple[str, ...]
    detail: str


@dataclasses.dataclass(frozen=True, slots=True)
class Label:
    """Text beside the boxes; `top` is the middle of its line, `left` its `anchor`.

    A `strong` one names something (an axis), not a position on it.
    """

    left: float
    top: float
    text: str
    anchor: Literal["start", "middle", "end"] = "middle"
    strong: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """The same boxes by row and column, for renderers that have only characters.

    `boxes` has per row the positions of its boxes in the picture; None for a gap.
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    row_title: str
    column_title: str
    boxes: tuple[tuple[int | None, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Picture:
    """Boxes and labels on a canvas of `width` by `height` points."""

    title: str
    width: float
    height: float
    boxes: tuple[Box, ...]
    labels: tuple[Label, ...]
    grids: tuple[Grid, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class GridScene:
    """A mesh, or an array and its mesh; `lines` has one sentence each."""

    title: str
    lines: tuple[str, ...]
    pictures: tuple[Picture, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Shade:
    """One spec, its colour, and the bytes per device of all leaves with it."""

    text: str
    colour: int
    bytes_per_device: int


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """Leaves that differ in their paths alone.

    Attributes:
        shade: position of the spec in the list of shades.
        rule: the rule or reason, as in the report.
        shard: shape of one device's part, as text.
        outline: the array and one device's part of it, in points: width and height,
            then those of the part; of the last two dims. Empty for a scalar.
        explain: the text of `Resolution.explain`, in pieces. A number stands for the
            path of the leaf: 0 for all of it, n for its last n parts, -n for its
            first n.
    """

    shape: str
    dtype: str
    shade: int
    rule: str
    shard: str
    total_bytes: int
    bytes_per_device: int
    mark: Mark
    outline: tuple[int, ...]
    explain: tuple[str | int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Forest:
    """Leaves in the modules that hold them; node 0 holds all, a parent comes first.

    Attributes:
        names: name of each node within its parent.
        parents: position of the parent of each node; -1 for node 0.
        kinds: position of the kind of each leaf; -1 for a module.
        counts: how many modules a node stands for, within its parent: 1, unless
            repeated layers were folded into one.
        wide: rectangles on a wide canvas: left, top, right, bottom of each node.
        tall: rectangles on a tall canvas.
    """

    names: tuple[str, ...]
    parents: tuple[int, ...]
    kinds: tuple[int, ...]
    counts: tuple[int, ...]
    wide: tuple[int, ...]
    tall: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """The leaves of one role.

    `folded` has repeated layers folded into one; `flat` has every leaf, None if that is
    the same. `replicated_bytes` are those of leaves that every device holds in full.
    """

    title: str
    leaves: int
    total_bytes: int
    bytes_per_device: int
    replicated_bytes: int
    folded: Forest
    flat: Forest | None


@dataclasses.dataclass(frozen=True, slots=True)
class Bar:
    """Bytes per device of one module; `*` in its label stands for the index of a layer.

    `parts` are positions of shades with bytes, and `before` those of the Resolution
    that it is compared with.
    """

    label: str
    parts: tuple[tuple[int, int], ...]
    before: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class BarScene:
    """Bytes per device by module, of one Resolution or of two.

    Bars are sorted, the largest first. `names` are those of `parts` and `before`.
    """

    title: str
    lines: tuple[str, ...]
    shades: tuple[Shade, ...]
    bars: tuple[Bar, ...]
    names: tuple[str, ...]
    total: int
    total_before: int | None = None

    def rows(self, bar: Bar) -> list[tuple[str, tuple[tuple[int, int], ...], int]]:
        """Name, parts and total of the rows of a bar: before and after, or one."""
        after = (self.names[-1], bar.parts, self.total)
        if len(self.names) == 1:
            return [after]
        return [(self.names[0], bar.before, self.total_before or 0), after]


@dataclasses.dataclass(frozen=True, slots=True)
class ModelScene:
    """A whole model: every leaf, and how much of each device it takes.

    Attributes:
        mesh: as text; empty for none.
        devices: their number; 0 without a mesh.
        shades: by bytes per device, the largest first.
        views: one per role that has leaves.
        remarks: unused rules, unmatched leaves, fallbacks: one line each.
        bars: the same by module, for renderers without room for a tree-map.
    """

    title: str
    mesh: str
    devices: int
    shades: tuple[Shade, ...]
    kinds: tuple[Kind, ...]
    views: tuple[View, ...]
    remarks: tuple[str, ...]
    bars: BarScene


Scene = GridScene | BarScene | ModelScene
