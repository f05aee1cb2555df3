"""The devices of a mesh, and the scene of a mesh alone."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flax_layoutmap._core.errors import MeshError, visible
from flax_layoutmap._core.grid import coords_of
from flax_layoutmap._core.mesh import DeviceMesh, as_mesh
from flax_layoutmap.draw._grids import GAP, Cell, Panel, picture, shown, shown_panels
from flax_layoutmap.draw._scene import COLOURS, NEUTRAL, GridScene, Picture


def scene(given: Any) -> GridScene:
    """The scene of `flm.draw.mesh`."""
    mesh = _mesh(given)
    if mesh is None:
        raise MeshError(
            'there is no mesh to draw; use flm.draw.mesh("data=2,model=4"), a '
            "flm.DeviceMesh or a jax.sharding.Mesh"
        )
    devices = Devices(mesh)
    ordered = sorted(set(devices.processes))
    several = len(ordered) > 1

    def cell(place: int) -> Cell:
        process = ordered.index(devices.processes[place]) if several else 0
        colour = process % COLOURS if several else NEUTRAL
        number, detail = devices.number(place), devices.where(place)
        return Cell(colour, process, (number,), detail)

    lines = [f"{count_devices(mesh.size)}{devices.kind}"]
    if several:
        lines.append(f"{len(ordered)} processes, one colour each")
    drawn = devices.picture(cell, lines=1)
    return GridScene(f"mesh {mesh}", tuple(lines), (drawn,))


def _mesh(given: Any) -> DeviceMesh | None:
    """A mesh in words is drawn without its devices, unless it counts them."""
    sizes = given.values() if isinstance(given, Mapping) else str(given).split(",")
    if isinstance(given, str | Mapping) and "-1" not in "".join(map(str, sizes)):
        return DeviceMesh.abstract(given)
    return as_mesh(given)


class Devices:
    """What a picture says of the devices of a mesh, by their places in it."""

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
        """What the devices are, to stand behind their number."""
        return f", {self.flat[0].device_kind}" if self.flat else ", abstract"

    def number(self, place: int) -> str:
        """JAX's id of a device, or its place in a mesh that has no devices."""
        return str(self.flat[place].id if self.flat else place)

    def where(self, place: int) -> str:
        """Which device it is, in words."""
        at = zip(self.names, coords_of(place, self.mesh.shape), strict=True)
        words = [f"{name}={index}" for name, index in at]
        if self._several:
            words.append(f"process {self.processes[place]}")
        return f"device {self.number(place)} ({', '.join(words)})"

    def few(self, places: Sequence[int]) -> str:
        """Some devices, in the room of one box."""
        text = ", ".join(self.number(place) for place in places[:5])
        if len(places) > 4 or len(text) > 9:
            return count_devices(len(places))
        return f"on {text}"

    def picture(self, cell: Callable[[int], Cell], *, lines: int) -> Picture:
        """The mesh with a cell per place: the last two axes are rows and columns.

        Args:
            cell: what stands at a place.
            lines: number of lines in a cell.
        """
        shape, names = self.mesh.shape, self.names
        down, across = (1, *shape[-2:])[-2:]
        rows, columns = shown(down), shown(across)
        panels = []
        for panel in shown_panels(math.prod(shape[:-2])):
            lead = zip(names[:-2], coords_of(panel, shape[:-2]), strict=True)
            start = panel * down * across
            panels.append(
                Panel(
                    title=", ".join(f"{name} {at}" for name, at in lead),
                    rows=tuple(map(_index, rows)) if len(names) > 1 else ("",),
                    columns=tuple(map(_index, columns)),
                    row_title=names[-2] if len(names) > 1 else "",
                    column_title=names[-1],
                    cells=tuple(
                        tuple(
                            None
                            if row is None or column is None
                            else cell(start + row * across + column)
                            for column in columns
                        )
                        for row in rows
                    ),
                )
            )
        width = 64.0 if len(columns) <= 8 else 44.0
        title = "devices" if lines == 1 else "devices, each with its slice"
        return picture(title, panels, width, 14.0 + 18.0 * lines)


def count_devices(count: int) -> str:
    """`1 device`, `4,096 devices`."""
    return "1 device" if count == 1 else f"{count:,} devices"


def _index(at: int | None) -> str:
    return GAP if at is None else str(at)
