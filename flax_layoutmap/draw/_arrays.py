"""The scenes of a mesh and of an array: which device holds which slice."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from flax_layoutmap._core.errors import LayoutError, MeshError, visible
from flax_layoutmap._core.fetch import known_layout, unboxed
from flax_layoutmap._core.grid import coords_of, index_of, shard_offsets
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import DeviceMesh, as_mesh
from flax_layoutmap._rules.records import (
    ResolvedLeaf,
    leaf_bytes,
    show_shape,
    show_spec,
)
from flax_layoutmap._show.table import human_bytes
from flax_layoutmap.draw._scene import (
    COLOURS,
    NEUTRAL,
    Box,
    Grid,
    GridScene,
    Label,
    Picture,
)

Shape = tuple[int, ...]

# The most rows and columns to draw; others are a gap before the last one.
_SHOWN = 16
_PANELS = 8

# Replaces rows and columns that are left out.
GAP = "…"

_LINE = 18.0  # height of a line of labels
_LETTER = 6.9  # width of a letter, about
_STRONG = 8.4  # of a bold one
_SPACE = 22.0  # between panels
_WIDE = 760.0  # panels go on in the next line from here


# --------------------------------------------------- cells in rows and columns


class Cell(NamedTuple):
    """The content of one box; see `Box`."""

    colour: int
    group: int
    lines: tuple[str, ...]
    detail: str


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """What the rows, the columns or the panels of a picture count.

    `name` precedes an index in the title of a panel; `title` is that of rows or
    columns.
    """

    name: str
    title: str
    count: int
    label: Callable[[int], str]


_NO_SIDE = Side("", "", 1, lambda at: "")


def picture(
    title: str,
    sides: Sequence[Side],
    cell: Callable[[Shape], Cell],
    size: Callable[[int, int, int], tuple[float, float]],
) -> Picture:
    """Draw cells of any rank: the last two sides are rows and columns.

    `size` gives the least width and height of a cell, in points, from the numbers of
    rows, columns and panels.
    """
    rank = len(sides)
    *outer, down, across = (*(_NO_SIDE,) * (2 - rank), *sides)
    counts = tuple(side.count for side in outer)
    leads = [
        coords_of(at, counts)
        for at in _shown(math.prod(counts), _PANELS)
        if at is not None
    ]
    frame = _Frame(down, across, size, len(leads), has_names=bool(outer))
    boxes: list[Box] = []
    labels: list[Label] = []
    grids: list[Grid] = []
    left = top = right = bottom = 0.0
    for lead in leads:
        pairs = zip(outer, lead, strict=True)
        name = ", ".join(f"{side.name} {side.label(at)}" for side, at in pairs)
        wide = frame.indent + max(frame.inner, len(name) * _STRONG) + 2
        if left and left + wide > _WIDE:
            left, top = 0.0, bottom + _SPACE
        labels += frame.labels(name, left, top)
        positions: list[tuple[int | None, ...]] = []
        for y, row in zip(frame.tops, frame.rows, strict=True):
            own: list[int | None] = []
            for x, column in zip(frame.lefts, frame.columns, strict=True):
                if row is None or column is None:
                    own.append(None)
                    continue
                own.append(len(boxes))
                index = (*lead, row, column)[max(0, 2 - rank) :]
                corner, (width, height) = (left + x + 1.5, top + y + 1.5), frame.cell
                boxes.append(Box(*corner, width - 3, height - 3, *cell(index)))
            positions.append(tuple(own))
        texts = (frame.row_labels, frame.column_labels, down.title, across.title)
        grids.append(Grid(name, *texts, tuple(positions)))
        right, bottom = max(right, left + wide), max(bottom, top + frame.height)
        left += wide + _SPACE
    return Picture(title, right, bottom, tuple(boxes), tuple(labels), tuple(grids))


class _Frame:
    """The positions of rows, columns and labels within each panel."""

    def __init__(
        self,
        down: Side,
        across: Side,
        size: Callable[[int, int, int], tuple[float, float]],
        panels: int,
        has_names: bool,
    ) -> None:
        self.down, self.across = down, across
        self.rows, self.columns = (_shown(s.count, _SHOWN) for s in (down, across))
        self.row_labels = _labels(down, self.rows)
        self.column_labels = _labels(across, self.columns)
        width, height = size(len(self.rows), len(self.columns), panels)
        width = max(width, _longest(self.column_labels) * _LETTER + 8)
        names = max(_longest(self.row_labels) * _LETTER, len(down.title) * _STRONG)
        above = (has_names, bool(across.title), any(self.column_labels))
        self.indent = names + 10 if names else 2.0
        self.head = sum(above) * _LINE + 4
        self.cell = width, height
        self.lefts = [self.indent + at * width for at in range(len(self.columns))]
        self.tops = [self.head + at * height for at in range(len(self.rows))]
        self.middle = self.indent + len(self.columns) * width / 2
        self.inner = max(len(self.columns) * width, len(across.title) * _STRONG)
        self.height = self.head + len(self.rows) * height + 2

    def labels(self, name: str, left: float, top: float) -> Iterator[Label]:
        """The labels of the panel with this name and corner."""
        edge, line = left + self.indent - 8, top + _LINE / 2
        if name:
            yield Label(left, line, name, "start", True)
            line += _LINE
        if self.across.title:
            yield Label(left + self.middle, line, self.across.title, "middle", True)
            line += _LINE
        if self.down.title:
            y = top + self.head - _LINE / 2 - 4
            yield Label(edge, y, self.down.title, "end", True)
        width, height = self.cell
        for x, text in zip(self.lefts, self.column_labels, strict=True):
            if text:
                yield Label(left + x + width / 2, line, text)
        for y, text in zip(self.tops, self.row_labels, strict=True):
            if text:
                yield Label(edge, top + y + height / 2, text, "end")


def _shown(count: int, limit: int) -> list[int | None]:
    """The rows or panels to draw, None for a gap: 9 with limit 4 give 0, 1, None, 8."""
    if count <= limit:
        return list(range(count))
    return [*range(limit - 2), None, count - 1]


def _labels(side: Side, places: Sequence[int | None]) -> tuple[str, ...]:
    return tuple(GAP if at is None else side.label(at) for at in places)


def _longest(texts: Sequence[str]) -> int:
    return max(map(len, texts))


# ------------------------------------------------------------------------- meshes


def mesh_scene(given: Any) -> GridScene:
    """The scene of `flm.draw.mesh`."""
    mesh = _mesh(given)
    if mesh is None:
        raise MeshError(
            'there is no mesh to draw; use flm.draw.mesh("data=2,model=4"), a '
            "flm.DeviceMesh or a jax.sharding.Mesh"
        )
    devices = _Devices(mesh)
    ordered = sorted(set(devices.processes))
    several = len(ordered) > 1

    def cell(place: int) -> Cell:
        process = ordered.index(devices.processes[place]) if several else 0
        colour = process % COLOURS if several else NEUTRAL
        number, detail = devices.number(place), devices.where(place)
        return Cell(colour, process, (number,), detail)

    lines = [f"{_count(mesh.size)}{devices.kind}"]
    if several:
        lines.append(f"{len(ordered)} processes, one colour each")
    drawn = devices.picture("devices", cell, lines=1)
    return GridScene(f"mesh {mesh}", tuple(lines), (drawn,))


def _mesh(given: Any) -> DeviceMesh | None:
    """A mesh given as text is abstract, unless it counts the devices (-1)."""
    sizes = given.values() if isinstance(given, Mapping) else str(given).split(",")
    if isinstance(given, str | Mapping) and "-1" not in "".join(map(str, sizes)):
        return DeviceMesh.abstract(given)
    return as_mesh(given)


class _Devices:
    """The texts about the devices of a mesh, by their positions in it."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.names = list(map(visible, mesh.axis_names))
        self.flat = [] if mesh.is_abstract else list(mesh.devices.flat)
        self.processes = [device.process_index for device in self.flat] or (
            [0] * mesh.size
        )
        self._several = len(set(self.processes)) > 1

    @property
    def kind(self) -> str:
        """The kind of device, to follow their number."""
        return f", {self.flat[0].device_kind}" if self.flat else ", abstract"

    def number(self, place: int) -> str:
        """JAX's id of a device, or its position in an abstract mesh."""
        return str(self.flat[place].id if self.flat else place)

    def where(self, place: int) -> str:
        """The device with its coordinates and process."""
        at = zip(self.names, coords_of(place, self.mesh.shape), strict=True)
        words = [f"{name}={index}" for name, index in at]
        if self._several:
            words.append(f"process {self.processes[place]}")
        return f"device {self.number(place)} ({', '.join(words)})"

    def few(self, places: Sequence[int]) -> str:
        """Several devices, short enough for a box."""
        text = ", ".join(self.number(place) for place in places[:5])
        if len(places) > 4 or len(text) > 9:
            return _count(len(places))
        return f"on {text}"

    def picture(
        self, title: str, cell: Callable[[int], Cell], *, lines: int
    ) -> Picture:
        """The mesh, with a cell of `lines` lines per position."""
        shape = self.mesh.shape
        sides = [
            Side(name, name, size, str)
            for name, size in zip(self.names, shape, strict=True)
        ]
        return picture(
            title,
            sides,
            lambda index: cell(index_of(index, shape)),
            lambda rows, columns, panels: (
                64.0 if columns <= 8 else 44.0,
                14.0 + 18.0 * lines,
            ),
        )


def _count(devices: int) -> str:
    """`1 device`, `4,096 devices`."""
    return "1 device" if devices == 1 else f"{devices:,} devices"


# ------------------------------------------------------------------------- arrays


class _Array(NamedTuple):
    """An array on a mesh."""

    layout: TensorLayout
    mesh: DeviceMesh
    shape: Shape
    dtype: Any  # None where it is not known


def array_scene(x: Any, shape: Sequence[int] | None) -> GridScene:
    """The scene of `flm.draw.array`."""
    array = _array(x, shape)
    kind = "" if array.dtype is None else f" {array.dtype}"
    spec = show_spec(array.layout.spec(len(array.shape)))
    slices = _Slices(array)
    title = "devices, each with its slice"
    return GridScene(
        f"array {show_shape(array.shape)}{kind} as {spec} on {array.mesh}",
        slices.lines(array.dtype),
        (slices.picture(), slices.devices.picture(title, slices.at_place, lines=2)),
    )


class _Slices:
    """The slices of an array, and the positions in the mesh that hold them."""

    def __init__(self, array: _Array) -> None:
        mesh = array.mesh
        self.sizes, self.devices = array.shape, _Devices(mesh)
        self.shard = array.layout.shard_shape(array.shape)
        self.dims = array.layout.dims(len(array.shape))
        at = mesh.axis_names.index
        axes = [[at(name) for name in dim] for dim in self.dims]
        self.parts = tuple(math.prod(mesh.shape[axis] for axis in dim) for dim in axes)
        self.offsets = shard_offsets(mesh.shape, axes)
        self.holders: dict[Shape, list[int]] = {}
        for place, offset in enumerate(self.offsets):
            self.holders.setdefault(offset, []).append(place)

    def at_place(self, place: int) -> Cell:
        """The slice of a device."""
        offset = self.offsets[place]
        number, name = self.devices.number(place), self._name(offset)
        detail = f"{self.devices.where(place)} holds {name} = {self._text(offset)}"
        return self._cell(offset, (number, name), detail)

    def at_offset(self, offset: Shape) -> Cell:
        """The devices of a slice."""
        places, name = self.holders[offset], self._name(offset)
        noun = "device" if len(places) == 1 else "devices"
        held = ", ".join(map(self.devices.number, places))
        detail = f"{name} = {self._text(offset)}, held by {noun} {held}"
        return self._cell(offset, (name, self.devices.few(places)), detail)

    def _cell(self, offset: Shape, lines: tuple[str, ...], detail: str) -> Cell:
        group, many = index_of(offset, self.parts), math.prod(self.parts)
        colour = group
        if many > COLOURS:
            # The first sharded dim: neighbours along it differ.
            colour = offset[next(d for d, count in enumerate(self.parts) if count > 1)]
        return Cell(NEUTRAL if many == 1 else colour % COLOURS, group, lines, detail)

    def _name(self, offset: Shape) -> str:
        return letters(index_of(offset, self.parts))

    def _text(self, offset: Shape) -> str:
        """The slice as Python writes it."""
        spans = [
            ":" if count == 1 else _range(at, step)
            for at, count, step in zip(offset, self.parts, self.shard, strict=True)
        ]
        return f"x[{', '.join(spans)}]" if spans else "x"

    def picture(self) -> Picture:
        """The array, cut into its slices."""
        title = "array, each slice with its devices"
        sides = list(map(self._side, range(len(self.parts))))
        return picture(title, sides, self.at_offset, self._cell_size)

    def _side(self, dim: int) -> Side:
        name, axes, step = f"dim {dim}", "+".join(self.dims[dim]), self.shard[dim]
        title = f"{name} on {visible(axes)}" if axes else name
        return Side(name, title, self.parts[dim], lambda at: _range(at, step))

    def _cell_size(self, rows: int, columns: int, panels: int) -> tuple[float, float]:
        """A cell that fits two lines, with about the aspect ratio of a slice."""
        tall, wide = (1, 1, *self.sizes)[-2:]
        ratio = min(2.0, max(0.6, wide / max(1, tall)))
        side = 150.0 if panels < 3 else 96.0
        height = max(44.0, side / rows) if len(self.sizes) > 1 else 50.0
        return min(240.0, max(78.0, height * rows * ratio / columns)), height

    def lines(self, dtype: Any) -> tuple[str, ...]:
        """The number of slices, and their size."""
        mesh, many = self.devices.mesh, math.prod(self.parts)
        each = f"each device holds {show_shape(self.shard)}"
        if dtype is not None:
            each += f", {human_bytes(leaf_bytes(self.shard, dtype))}"
        if many == 1:
            return (f"replicated: {each}, which is all of it",)
        used = set(itertools.chain(*self.dims))
        spare = [name for name in mesh.axis_names if name not in used]
        copies = [visible(name) for name in spare if mesh.axis_sizes[name] > 1]
        along = f", copied along {' and '.join(copies)}" if copies else ""
        return (f"{many} slices, {_count(mesh.size // many)} each{along}", each)


def _range(at: int, step: int) -> str:
    return f"{at * step}:{(at + 1) * step}"


def letters(number: int) -> str:
    """The name of a slice: A to Z, then AA."""
    name = ""
    number += 1
    while number:
        number, letter = divmod(number - 1, 26)
        name = chr(ord("A") + letter) + name
    return name


def _array(x: Any, shape: Sequence[int] | None) -> _Array:
    """Layout, mesh, shape and dtype of the argument of `flm.draw.array`."""
    if isinstance(x, ResolvedLeaf):
        return _on_mesh(x.layout, _same_shape(x.shape, shape), x.dtype)
    if isinstance(x, TensorLayout | NamedSharding | PartitionSpec):
        if shape is None:
            raise LayoutError(
                "flm.draw.array of a layout or a sharding needs the shape of the "
                "array: flm.draw.array(layout, (256, 64))"
            )
        return _on_mesh(TensorLayout(x), tuple(shape), None)
    x = unboxed(x)
    found = known_layout(x)
    if found is None:
        sharding = getattr(x, "sharding", None)
        if not isinstance(x, jax.Array) or not isinstance(
            sharding, SingleDeviceSharding
        ):
            raise LayoutError(
                f"flm.draw.array of a {type(x).__name__}, which has no "
                "sharding; pass a jax.Array, a jax.ShapeDtypeStruct with a sharding, a "
                "leaf of a Resolution, or a layout and a shape"
            )
        mesh = DeviceMesh((1,), ("device",), list(sharding.device_set))
        found = TensorLayout((None,) * x.ndim, mesh)
    return _on_mesh(found, _same_shape(tuple(x.shape), shape), x.dtype)


def _on_mesh(layout: TensorLayout, shape: Shape, dtype: Any) -> _Array:
    mesh = layout.device_mesh
    if mesh is None:
        raise MeshError(
            f"the layout {layout} has no mesh to draw it on; give it one: "
            'flm.draw.array(layout.on(flm.DeviceMesh.abstract("data=2,model=4")), '
            "shape)"
        )
    return _Array(layout, mesh, shape, dtype)


def _same_shape(own: Shape, given: Sequence[int] | None) -> Shape:
    if given is not None and tuple(given) != own:
        raise LayoutError(
            f"flm.draw.array was given the shape {tuple(given)}, but the array has "
            f"{own}; leave it out"
        )
    return own
