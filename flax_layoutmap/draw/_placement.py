"""Which device of a mesh holds which slice of an array."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from flax_layoutmap._core.errors import LayoutError, MeshError, visible
from flax_layoutmap._core.fetch import known_layout, unboxed
from flax_layoutmap._core.grid import coords_of, index_of, shard_offsets
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._rules.records import (
    ResolvedLeaf,
    leaf_bytes,
    show_shape,
    show_spec,
)
from flax_layoutmap._show.table import human_bytes
from flax_layoutmap.draw._devices import Devices, count_devices
from flax_layoutmap.draw._grids import (
    GAP,
    Cell,
    Panel,
    letters,
    picture,
    shown,
    shown_panels,
)
from flax_layoutmap.draw._scene import COLOURS, NEUTRAL, GridScene, Picture

Shape = tuple[int, ...]


class Placed(NamedTuple):
    """An array on a mesh."""

    layout: TensorLayout
    mesh: DeviceMesh
    shape: Shape
    dtype: Any  # None where it is not known


def scene(x: Any, shape: Sequence[int] | None) -> GridScene:
    """The scene of `flm.draw.array`."""
    array = placed(x, shape)
    kind = "" if array.dtype is None else f" {array.dtype}"
    spec = show_spec(array.layout.spec(len(array.shape)))
    slices = _Slices(array)
    return GridScene(
        f"array {show_shape(array.shape)}{kind} as {spec} on {array.mesh}",
        slices.lines(array.dtype),
        (slices.picture(), slices.devices.picture(slices.at_place, lines=2)),
    )


class _Slices:
    """The slices of an array, and the places of the mesh that hold them."""

    def __init__(self, array: Placed) -> None:
        mesh, rank = array.mesh, len(array.shape)
        self.sizes, self.devices = array.shape, Devices(mesh)
        self.shard = array.layout.shard_shape(array.shape)
        self.dims = array.layout.dims(rank)
        at = mesh.axis_names.index
        axes = [[at(name) for name in dim] for dim in self.dims]
        self.parts = tuple(math.prod(mesh.shape[axis] for axis in dim) for dim in axes)
        self.offsets = shard_offsets(mesh.shape, axes)
        self.holders: dict[Shape, list[int]] = {}
        for place, offset in enumerate(self.offsets):
            self.holders.setdefault(offset, []).append(place)

    def at_place(self, place: int) -> Cell:
        """What a device holds."""
        offset = self.offsets[place]
        number, name = self.devices.number(place), self._name(offset)
        detail = f"{self.devices.where(place)} holds {name} = {self._text(offset)}"
        return self._cell(offset, (number, name), detail)

    def at_offset(self, offset: Shape) -> Cell:
        """Who holds a slice."""
        places, name = self.holders[offset], self._name(offset)
        noun = "device" if len(places) == 1 else "devices"
        held = ", ".join(map(self.devices.number, places))
        detail = f"{name} = {self._text(offset)}, held by {noun} {held}"
        return self._cell(offset, (name, self.devices.few(places)), detail)

    def _cell(self, offset: Shape, lines: tuple[str, ...], detail: str) -> Cell:
        group = index_of(offset, self.parts)
        many = math.prod(self.parts)
        colour = group
        if many == 1:
            colour = NEUTRAL
        elif many > COLOURS:
            # The first dim that is cut: neighbours along it differ.
            colour = offset[next(d for d, count in enumerate(self.parts) if count > 1)]
        return Cell(colour if many == 1 else colour % COLOURS, group, lines, detail)

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
        """The array, cut into its slices: its last two dims are rows and columns."""
        rank, outer = len(self.parts), self.parts[:-2]
        down, across = (1, 1, *self.parts)[-2:]
        rows, columns = shown(down), shown(across)
        panels = []
        for panel in shown_panels(math.prod(outer)):
            lead = coords_of(panel, outer)
            panels.append(
                Panel(
                    title=", ".join(
                        f"dim {dim} {self._span(at, dim)}"
                        for dim, at in enumerate(lead)
                    ),
                    rows=tuple(self._span(row, rank - 2) for row in rows),
                    columns=tuple(self._span(column, rank - 1) for column in columns),
                    row_title=self._dim_title(rank - 2),
                    column_title=self._dim_title(rank - 1),
                    cells=tuple(
                        tuple(
                            None
                            if row is None or column is None
                            else self.at_offset((*lead, row, column)[-rank or 2 :])
                            for column in columns
                        )
                        for row in rows
                    ),
                )
            )
        width, height = self._cell_size(len(rows), len(columns), len(panels))
        return picture("array, each slice with its devices", panels, width, height)

    def _cell_size(self, rows: int, columns: int, panels: int) -> tuple[float, float]:
        """Cells in which two lines fit, and that show which side is the longer."""
        tall, wide = (1, 1, *self.sizes)[-2:]
        ratio = min(2.0, max(0.6, wide / max(1, tall)))
        side = 150.0 if panels < 3 else 96.0
        height = max(44.0, side / rows) if len(self.sizes) > 1 else 50.0
        return min(240.0, max(78.0, height * rows * ratio / columns)), height

    def _span(self, at: int | None, dim: int) -> str:
        if dim < 0:
            return ""
        return GAP if at is None else _range(at, self.shard[dim])

    def _dim_title(self, dim: int) -> str:
        if dim < 0:
            return ""
        axes = visible("+".join(self.dims[dim]))
        return f"dim {dim} on {axes}" if axes else f"dim {dim}"

    def lines(self, dtype: Any) -> tuple[str, ...]:
        """How many slices there are, and how large they are."""
        mesh, many = self.devices.mesh, math.prod(self.parts)
        size = "" if dtype is None else human_bytes(leaf_bytes(self.shard, dtype))
        each = f"each device holds {show_shape(self.shard)}"
        each += f", {size}" if size else ""
        if many == 1:
            return (f"replicated: {each}, which is all of it",)
        used = set(itertools.chain(*self.dims))
        spare = [name for name in mesh.axis_names if name not in used]
        copies = [visible(name) for name in spare if mesh.axis_sizes[name] > 1]
        along = f", copied along {' and '.join(copies)}" if copies else ""
        held = count_devices(mesh.size // many)
        return (f"{many} slices, {held} each{along}", each)


def _range(at: int, step: int) -> str:
    return f"{at * step}:{(at + 1) * step}"


def placed(x: Any, shape: Sequence[int] | None) -> Placed:
    """Layout, mesh, shape and dtype of what `flm.draw.array` was given.

    Raises:
        LayoutError: it is no array, or says nothing of its layout, or of its shape.
        MeshError: there is no mesh.
    """
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
                f"flm.draw.array of a {type(x).__name__}, which says nothing of "
                "devices; pass a jax.Array, a jax.ShapeDtypeStruct with a sharding, a "
                "leaf of a Resolution, or a layout and a shape"
            )
        mesh = DeviceMesh((1,), ("device",), list(sharding.device_set))
        found = TensorLayout((None,) * x.ndim, mesh)
    return _on_mesh(found, _same_shape(tuple(x.shape), shape), x.dtype)


def _on_mesh(layout: TensorLayout, shape: Shape, dtype: Any) -> Placed:
    mesh = layout.device_mesh
    if mesh is None:
        raise MeshError(
            f"the layout {layout} has no mesh to draw it on; give it one: "
            'flm.draw.array(layout.on(flm.DeviceMesh.abstract("data=2,model=4")), '
            "shape)"
        )
    return Placed(layout, mesh, shape, dtype)


def _same_shape(own: Shape, given: Sequence[int] | None) -> Shape:
    if given is not None and tuple(given) != own:
        raise LayoutError(
            f"flm.draw.array was given the shape {tuple(given)}, but the array has "
            f"{own}; leave it out"
        )
    return own
