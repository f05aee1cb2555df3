"""Pictures of a mesh and of an array: which device holds which slice."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from flax_layoutmap._core.axes import shard_offsets
from flax_layoutmap._core.errors import LayoutError, MeshError, visible
from flax_layoutmap._core.fetch import known_layout, unboxed
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import DeviceMesh, as_mesh
from flax_layoutmap._rules.records import (
    ResolvedLeaf,
    leaf_bytes,
    show_shape,
    show_spec,
)
from flax_layoutmap._show.table import human_bytes

Shape = tuple[int, ...]
Dims = tuple[tuple[str, ...], ...]  # the mesh axes of each dim

# The most rows and columns, and the most panels, that are drawn.
_SHOWN = 16
_PANELS = 8


class Colour(NamedTuple):
    """A colour, and the character that replaces it without colours."""

    hex: str
    character: str
    is_warning: bool = False  # also has a dashed red outline


# Paul Tol's "light" scheme (Colour Schemes, technical note SRON/EPS/TN/09-002), for
# dark text and all kinds of colour vision: the contrast with INK is at least 8.
_HEX = "77aadd ee8866 eedd88 ffaabb 99ddff 44bb99 bbcc33 aaaa00".split()
PALETTE = [Colour(f"#{h}", c) for h, c in zip(_HEX, "█▓▒▚▞▄▀▌", strict=True)]
GREY = Colour("#dddddd", "░")  # replicated
OTHERS = Colour("#cbb8ea", "▗")  # layouts beyond the palette
NO_RULE = Colour("#dddddd", "?", is_warning=True)
INK = "#14181f"  # text on all of them


class Cell(NamedTuple):
    """A device or a slice: its lines of text and its tooltip."""

    lines: tuple[str, ...]
    colour: Colour
    about: str


class Panel(NamedTuple):
    """Cells in rows and columns, with labels."""

    title: str
    rows: list[str]
    columns: list[str]
    cells: list[list[Cell]]


class Grids(NamedTuple):
    """The picture of a mesh or of an array; a group has panels of the same kind."""

    title: str
    lines: list[str]
    groups: list[list[Panel]]


def _panels(
    what: str, cells: list[Cell], names: list[str], labels: list[list[str]]
) -> list[Panel]:
    """Cells of any rank: the last two dims are rows and columns, the others panels.

    `names` has the name of each dim, and `labels` the labels of its indices.
    """
    while len(names) < 2:
        names, labels = ["", *names], [[""], *labels]
    shape = tuple(map(len, labels))
    shown = np.arange(len(cells)).reshape(shape)[..., :_SHOWN, :_SHOWN]
    if max(shape[-2:]) > _SHOWN or math.prod(shape[:-2]) > _PANELS:
        what = f"the first {what}"
    axes = [f"{name} {way}" for name, way in zip(names[-2:], "↓→", strict=True) if name]
    panels = []
    for lead in itertools.islice(np.ndindex(shape[:-2]), _PANELS):
        place = zip(names, labels, lead, strict=False)
        words = [f"{name} {texts[index]}" for name, texts, index in place]
        title = f"{what}: {', '.join(words + axes)}"
        rows = [[cells[number] for number in row] for row in shown[lead]]
        panels.append(Panel(title, labels[-2][:_SHOWN], labels[-1][:_SHOWN], rows))
    return panels


def mesh_grids(given: Any) -> Grids:
    """The picture of `flm.draw.mesh`."""
    sizes = given.values() if isinstance(given, Mapping) else str(given).split("=")
    is_whole = not any(str(size).startswith("-1") for size in sizes)
    is_text = isinstance(given, str | Mapping) and is_whole
    mesh = DeviceMesh.abstract(given) if is_text else as_mesh(given)
    if mesh is None:
        raise MeshError(
            'there is no mesh to draw; use flm.draw.mesh("data=2,model=4"), a '
            "flm.DeviceMesh or a jax.sharding.Mesh"
        )
    devices = [] if mesh.is_abstract else list(mesh.devices.flat)
    kind = devices[0].device_kind if devices else "abstract"
    lines, holds = [f"{_count(mesh.size)}, {kind}"], [Cell((), GREY, "")] * mesh.size
    processes = [device.process_index for device in devices]
    if len(set(processes)) > 1:
        lines.append(f"{len(set(processes))} processes, a colour for each")
        colours = [PALETTE[process % len(PALETTE)] for process in processes]
        about = [f"process {process}" for process in processes]
        holds = list(map(Cell, [()] * mesh.size, colours, about))
    return Grids(f"mesh {mesh}", lines, [_device_panels(mesh, holds)])


def _device_panels(mesh: DeviceMesh, holds: Sequence[Cell]) -> list[Panel]:
    """Panels of the devices, with what each device holds."""
    names, cells = list(map(visible, mesh.axis_names)), list[Cell]()
    places = zip(_ids(mesh), np.ndindex(mesh.shape), holds, strict=True)
    for number, coords, held in places:
        where = ", ".join(map("{}={}".format, names, coords))
        about = f"device {number} ({where}): {held.about}".removesuffix(": ")
        cells.append(Cell((number, *held.lines), held.colour, about))
    labels = [list(map(str, range(size))) for size in mesh.shape]
    return _panels("devices", cells, names, labels)


def _ids(mesh: DeviceMesh) -> list[str]:
    """JAX's ids of the devices, or their positions in an abstract mesh."""
    if mesh.is_abstract:
        return list(map(str, range(mesh.size)))
    return [str(device.id) for device in mesh.devices.flat]


def _count(devices: int) -> str:
    return "1 device" if devices == 1 else f"{devices:,} devices"


def array_grids(x: Any, given: Sequence[int] | None) -> Grids:
    """The picture of `flm.draw.array`."""
    layout, shape, dtype = _array(x, given)
    mesh = layout.device_mesh
    if mesh is None:
        raise MeshError(
            f"the layout {layout} has no mesh to draw it on; give it one: "
            'flm.draw.array(layout.on(flm.DeviceMesh.abstract("data=2,model=4")), '
            "shape)"
        )
    kind = "" if dtype is None else f" {dtype}"
    spec = show_spec(layout.spec(len(shape)))
    title = f"array {show_shape(shape)}{kind} as {spec} on {mesh}"
    shard, dims = layout.shard_shape(shape), layout.dims(len(shape))
    return Grids(title, _lines(mesh, shard, dims, dtype), _groups(mesh, shard, dims))


def _array(x: Any, given: Sequence[int] | None) -> tuple[TensorLayout, Shape, Any]:
    """Layout, shape and dtype of an array; dtype None if it is unknown."""
    if isinstance(x, TensorLayout | NamedSharding | PartitionSpec):
        if given is None:
            raise LayoutError(
                "flm.draw.array of a layout or a sharding needs the shape of the "
                "array: flm.draw.array(layout, (256, 64))"
            )
        return TensorLayout(x), tuple(given), None
    x = unboxed(x)
    layout = x.layout if isinstance(x, ResolvedLeaf) else known_layout(x)
    if layout is None:
        raise LayoutError(
            f"flm.draw.array of a {type(x).__name__} that is not on a mesh; pass a "
            "jax.Array or a jax.ShapeDtypeStruct with a NamedSharding, a leaf of a "
            "Resolution, or a layout and a shape"
        )
    return layout, tuple(x.shape if given is None else given), x.dtype


def _lines(mesh: DeviceMesh, shard: Shape, dims: Dims, dtype: Any) -> list[str]:
    """Lines with the number and the size of the slices."""
    each = f"each device holds {show_shape(shard)}"
    if dtype is not None:
        each += f", {human_bytes(leaf_bytes(shard, dtype))}"
    used = set(itertools.chain(*dims))
    count = math.prod(mesh.axis_sizes[name] for name in used)
    if count == 1:
        return [f"replicated: {each}, which is all of it"]
    sizes = mesh.axis_sizes.items()
    spare = [visible(name) for name, size in sizes if name not in used and size > 1]
    along = f", copied along {' and '.join(spare)}" if spare else ""
    return [f"{count} slices, {_count(mesh.size // count)} each{along}", each]


def _groups(mesh: DeviceMesh, shard: Shape, dims: Dims) -> list[list[Panel]]:
    """Panels of the array, cut into slices, and of the devices."""
    axes = [[mesh.axis_names.index(name) for name in dim] for dim in dims]
    parts = [math.prod(mesh.shape[axis] for axis in dim) for dim in axes]
    names = [
        f"dim {dim} on {visible('+'.join(some))}" if some else f"dim {dim}"
        for dim, some in enumerate(dims)
    ]
    labels = [
        [f"{index * step}:{(index + 1) * step}" for index in range(count)]
        for count, step in zip(parts, shard, strict=True)
    ]
    slices = list(map(_slice, itertools.count(), itertools.product(*labels)))
    if len(slices) == 1:
        slices = [slices[0]._replace(colour=GREY)]
    # NumPy cannot ravel an empty index (rank 0).
    offsets = [(0, *offset) for offset in shard_offsets(mesh.shape, axes)]
    numbers = [int(np.ravel_multi_index(offset, (1, *parts))) for offset in offsets]
    holders: list[list[str]] = [[] for _ in slices]
    for number, device in zip(numbers, _ids(mesh), strict=True):
        holders[number].append(device)
    array = _panels("array", list(map(_with_holders, slices, holders)), names, labels)
    return [array, _device_panels(mesh, [slices[number] for number in numbers])]


def _slice(number: int, spans: tuple[str, ...]) -> Cell:
    name = chr(ord("A") + number) if number < 26 else f"#{number + 1}"
    text = f"{name} = x[{', '.join(spans) or '...'}]"
    return Cell((name,), PALETTE[number % len(PALETTE)], text)


def _with_holders(part: Cell, devices: list[str]) -> Cell:
    listed = ", ".join(devices)
    few = f"on {listed}" if len(listed) <= 9 else _count(len(devices))
    return Cell((*part.lines, few), part.colour, f"{part.about}, on device {listed}")
