"""DeviceMesh: a named grid of devices, with or without the devices."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from flax_layoutmap._core import dtensor_format
from flax_layoutmap._core.errors import MeshError, did_you_mean, visible, warn
from flax_layoutmap._core.mesh_shape import (
    Shape,
    axis_types_of,
    devices_here,
    grid_shape,
    hybrid_grid,
    long_name,
    one_slice_grid,
    require_here,
    sizes_and_names,
)


@dataclasses.dataclass(
    frozen=True, slots=True, weakref_slot=True, init=False, repr=False
)
class DeviceMesh:
    """A named grid of devices.

    Keras's `DeviceMesh`, which can also be made from one line, a dict or an existing
    mesh. Immutable, hashable, and equal if shape, axis names, axis types and devices
    are. The members of DTensor's `Mesh` number the devices in row-major order.

    Args:
        shape: sizes of the axes, `(2, 4)`, one of which may be -1; or one line,
            `"data=2,model=-1"`; or a mapping, `{"data": 2, "model": -1}`; or a
            `jax.sharding.Mesh`, `AbstractMesh` or `DeviceMesh`.
        axis_names: one name per axis, unless `shape` has the names.
        devices: the devices in the order of the grid (row-major), or their names,
            `"cpu:0"`; None: all devices of the job, in the order of `jax.make_mesh`.
        axis_types: `"auto"` (the compiler decides what no layout sets) or `"explicit"`,
            or the `jax.sharding.AxisType`; one type for all axes.
        allow_split_physical_axes: allow a mesh axis to use part of a physical TPU axis
            (`jax.experimental.mesh_utils`); not for explicit `devices`.

    Example:
        >>> import flax_layoutmap as flm
        >>> flm.DeviceMesh.abstract("data=2,model=4")
        DeviceMesh('data=2,model=4', abstract)

    Plain JAX: `jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * n)`.
    """

    __module__ = "flax_layoutmap"
    _mesh: Mesh | AbstractMesh

    def __init__(
        self,
        shape: "Shape | Mesh | AbstractMesh | DeviceMesh",
        axis_names: Sequence[str] | None = None,
        devices: Sequence[Any] | np.ndarray | None = None,
        *,
        axis_types: Any = "auto",
        allow_split_physical_axes: bool = False,
    ) -> None:
        if isinstance(shape, DeviceMesh | Mesh | AbstractMesh):
            if axis_names is not None or devices is not None or axis_types != "auto":
                raise MeshError(
                    "DeviceMesh(mesh) takes an existing mesh as it is; leave out "
                    "axis_names, devices and axis_types"
                )
            mesh = shape._mesh if isinstance(shape, DeviceMesh) else shape
            if {AxisType.Auto, AxisType.Explicit} <= {*mesh.axis_types}:
                raise MeshError(
                    f"the mesh has Auto and Explicit axes, {mesh}; make it with axes "
                    "of one type"
                )
        else:
            chosen = jax.devices() if devices is None else _checked_devices(devices)
            sizes, names = grid_shape(shape, axis_names, len(chosen))
            types = axis_types_of(axis_types, len(sizes))
            if devices is None:
                grid = one_slice_grid(sizes, names, chosen, allow_split_physical_axes)
            else:
                grid = np.array(chosen, dtype=object).reshape(sizes)
            mesh = Mesh(grid, names, axis_types=types)
        object.__setattr__(self, "_mesh", mesh)

    @classmethod
    def abstract(
        cls,
        shape: Shape,
        axis_names: Sequence[str] | None = None,
        *,
        axis_types: Any = "auto",
    ) -> "DeviceMesh":
        """Make a mesh without devices, to plan for 4,096 chips on a laptop.

        The arguments are those of `DeviceMesh`; no size may be -1.
        """
        sizes, names = sizes_and_names(shape, axis_names)
        if -1 in sizes:
            raise MeshError(f"an abstract mesh needs every size, got {sizes}")
        types = axis_types_of(axis_types, len(sizes))
        return cls(AbstractMesh(sizes, names, axis_types=types))

    @classmethod
    def hybrid(
        cls,
        ici: Mapping[str, int] | str,
        dcn: Mapping[str, int] | str,
        *,
        devices: Sequence[Any] | None = None,
        axis_types: Any = "auto",
        allow_split_physical_axes: bool = False,
    ) -> "DeviceMesh":
        """Make a mesh over several slices, which a slower network connects.

        The axes of `dcn` come first; an axis in both is split over the slices, then
        within each slice. For CPUs and GPUs, each process counts as a slice. The other
        arguments are those of `DeviceMesh`.

        Args:
            ici: axis → size within a slice (inter-chip interconnect), or one line,
                `"fsdp=16,tensor=4"`; one size may be -1.
            dcn: the same over the slices (data-centre network).

        Example:
            >>> import flax_layoutmap as flm
            >>> flm.DeviceMesh.hybrid(ici={"fsdp": -1}, dcn={"data": -1}).axis_names
            ('data', 'fsdp')

        Plain JAX: `mesh_utils.create_hybrid_device_mesh`, and `jax.sharding.Mesh`.
        """
        given = jax.devices() if devices is None else _checked_devices(devices)
        grid, names = hybrid_grid(ici, dcn, given, allow_split_physical_axes)
        types = axis_types_of(axis_types, len(names))
        return cls(Mesh(grid, names, axis_types=types))

    @classmethod
    def from_dtensor(
        cls,
        devices: Sequence[Any],
        dims: Sequence[tuple[str, int]] | Mapping[str, int],
    ) -> "DeviceMesh":
        """Make a mesh with the arguments of DTensor's `Mesh`.

        Args:
            devices: names such as `"TPU:0"` in row-major order, or JAX devices. If
                some do not exist here, the mesh is abstract, with a LayoutWarning.
            dims: name and size of each axis; one size may be -1.

        >>> import flax_layoutmap as flm
        >>> flm.DeviceMesh.from_dtensor(["CPU:0", "CPU:1"], [("x", 2), ("y", 1)])
        DeviceMesh('x=2,y=1')
        """
        mesh = _of_devices(devices, dims)
        if mesh.is_abstract:
            listed = ", ".join(map(str, devices))
            warn(
                f"DeviceMesh.from_dtensor: some of these devices are not available in "
                f"this job, so the mesh is abstract: {listed[:200]}; name devices of "
                "flm.keras.list_devices(), or plan without a warning on "
                f"flm.DeviceMesh.abstract({str(mesh)!r})"
            )
        return mesh

    @property
    def jax_mesh(self) -> Mesh | AbstractMesh:
        """The mesh as a JAX `Mesh` or `AbstractMesh`."""
        return self._mesh

    @property
    def backend_mesh(self) -> Mesh | AbstractMesh:
        """Keras's name for `jax_mesh`."""
        return self._mesh

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes, in devices."""
        return tuple(self._mesh.axis_sizes)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the axes, in the order of `shape`."""
        return tuple(self._mesh.axis_names)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Axis name → number of devices along the axis."""
        return dict(zip(self.axis_names, self.shape, strict=True))

    @property
    def axis_types(self) -> tuple[AxisType, ...]:
        """One `jax.sharding.AxisType` per axis."""
        return tuple(self._mesh.axis_types)

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.shape)

    @property
    def is_abstract(self) -> bool:
        """Whether the mesh has no devices."""
        return not isinstance(self._mesh, Mesh)

    @property
    def _flat(self) -> list[Any]:
        """The devices in row-major order; none for an abstract mesh."""
        return [] if self.is_abstract else list(self.devices.flat)

    @property
    def devices(self) -> np.ndarray:
        """The devices, as an array in the shape of the mesh."""
        if not isinstance(self._mesh, Mesh):
            raise MeshError(
                f"{self!r} has no devices; use a concrete mesh, "
                f'flm.DeviceMesh("{self}")'
            )
        return self._mesh.devices

    # ------------------------------------------------- the members of DTensor's Mesh

    @property
    def dim_names(self) -> list[str]:
        """DTensor's name for `axis_names`."""
        return list(self.axis_names)

    def dim_size(self, name: str) -> int:
        """Return the number of devices along an axis."""
        if name not in self.axis_names:
            raise MeshError(
                f"the mesh {str(self)!r} has no axis {name!r}"
                f"{did_you_mean(str(name), self.axis_names)}"
            )
        return self.axis_sizes[name]

    def contains_dim(self, name: str) -> bool:
        """Return whether the mesh has an axis of this name; also `name in mesh`."""
        return name in self.axis_names

    __contains__ = contains_dim

    @property
    def strides(self) -> list[int]:
        """Difference between the ids of neighbours along each axis."""
        return [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]

    def coords(self, device_id: int) -> tuple[int, ...]:
        """Return the coordinates of a device, by its place in the mesh."""
        try:
            return tuple(map(int, np.unravel_index(device_id, self.shape)))
        except (TypeError, ValueError) as error:
            raise MeshError(
                f"the mesh {str(self)!r} has the device ids 0 to {self.size - 1}, got "
                f"{device_id!r}"
            ) from error

    def unravel_index(self) -> dict[int, dict[str, int]]:
        """Return device id → axis name → position along that axis."""
        places = enumerate(np.ndindex(self.shape))
        names = self.axis_names
        return {number: dict(zip(names, p, strict=True)) for number, p in places}

    def global_device_ids(self) -> np.ndarray:
        """Return the device ids, from 0, in the shape of the mesh."""
        return np.arange(self.size).reshape(self.shape)

    def local_device_ids(self) -> list[int]:
        """Return the ids of this process's devices; none for an abstract mesh."""
        here = jax.process_index()
        return [n for n, d in enumerate(self._flat) if d.process_index == here]

    def num_local_devices(self) -> int:
        """Return the number of this process's devices; 0 for an abstract mesh."""
        return len(self.local_device_ids())

    def local_devices(self) -> list[str]:
        """Return DTensor's names of this process's devices, with JAX's ids."""
        return [long_name(self._flat[number]) for number in self.local_device_ids()]

    def local_device_locations(self) -> list[dict[str, int]]:
        """Return axis name → position for each device of this process."""
        places = self.unravel_index()
        return [places[number] for number in self.local_device_ids()]

    def device_type(self) -> str:
        """Return `"CPU"`, `"GPU"` or `"TPU"`."""
        return self.devices.flat[0].platform.upper()

    def as_proto(self) -> Any:
        """Return a message with the bytes of TensorFlow's `MeshProto`.

        Axis types are not written, nor devices of an abstract mesh.
        """
        names, local = [long_name(d) for d in self._flat], self.local_device_ids()
        return dtensor_format.mesh_proto(
            list(self.axis_sizes.items()),
            global_device_ids=range(self.size),
            local_device_ids=local,
            local_devices=[names[number] for number in local],
            global_devices=names if len(local) < self.size else (),
        )

    @classmethod
    def from_proto(cls, proto: Any) -> "DeviceMesh":
        """Read a `MeshProto`, from here or TensorFlow, or its bytes.

        The mesh has devices if the message lists all of them and they exist here, else
        it is abstract. Its axes are Auto.
        """
        return mesh_from_proto(dtensor_format.read_mesh_proto(proto))

    def to_string(self) -> str:
        """Return the text of DTensor's `Mesh.to_string`; see `as_proto`."""
        return dtensor_format.mesh_text(self.as_proto())

    @classmethod
    def from_string(cls, text: str) -> "DeviceMesh":
        """Read the text of `to_string`, or of TensorFlow's; see `from_proto`."""
        return mesh_from_proto(dtensor_format.read_mesh_text(text))

    # ------------------------------------------------------------ Python's protocols

    def __str__(self) -> str:
        sizes = self.axis_sizes.items()
        return ",".join(f"{visible(name)}={size}" for name, size in sizes)

    def __repr__(self) -> str:
        notes = ["abstract"] if self.is_abstract else []
        kinds = dict.fromkeys(kind.name.lower() for kind in self.axis_types)
        if [*kinds] != ["auto"]:
            notes.append(f"axis_types={'/'.join(kinds)}")
        return f"DeviceMesh({', '.join([repr(str(self)), *notes])})"

    def __deepcopy__(self, memo: Any) -> "DeviceMesh":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        types = tuple(kind.name for kind in self.axis_types)
        devices = [f"{d.platform}:{d.id}" for d in self._flat]
        return _rebuild, (self.shape, self.axis_names, types, devices)


def as_mesh(mesh: Any) -> DeviceMesh | None:
    """Convert anything that a mesh argument accepts to a `DeviceMesh`; keep None."""
    if mesh is None or isinstance(mesh, DeviceMesh):
        return mesh
    if isinstance(mesh, Mesh | AbstractMesh | str | Mapping):
        return DeviceMesh(mesh)
    raise MeshError(
        f"not a mesh: {mesh!r}; use flm.DeviceMesh((2, 4), ('data', 'model')), a "
        'jax.sharding.Mesh or AbstractMesh, or a line like "data=2,model=-1"'
    )


def same_grid(first: DeviceMesh, second: DeviceMesh) -> bool:
    """Whether two meshes have the same axes, whatever their devices and axis types."""
    return first.axis_names == second.axis_names and first.shape == second.shape


def same_places(first: DeviceMesh, second: DeviceMesh) -> bool:
    """Whether two meshes place arrays alike; abstract meshes match any devices."""
    if not same_grid(first, second) or first.is_abstract or second.is_abstract:
        return same_grid(first, second)
    return list(first.devices.flat) == list(second.devices.flat)


def retyped(mesh: Mesh, kind: AxisType) -> Mesh:
    """The same devices and axis names with all axes of one type."""
    if all(axis_type is kind for axis_type in mesh.axis_types):
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, (kind,) * len(mesh.axis_names))


def spread(shape: Sequence[int], mesh: Mesh) -> NamedSharding:
    """Shard an array without a layout over all axes that divide it, as Auto axes."""
    auto = retyped(mesh, AxisType.Auto)
    left = list(shape)
    spec: list[tuple[str, ...]] = [()] * len(left)
    for name, size in sorted(auto.shape.items(), key=lambda axis: -axis[1]):
        for dim in sorted(range(len(left)), key=lambda dim: -left[dim]):
            if left[dim] and left[dim] % size == 0:
                left[dim] //= size
                spec[dim] = (*spec[dim], name)
                break
    return NamedSharding(auto, PartitionSpec(*spec))


def mesh_from_proto(proto: Any) -> DeviceMesh:
    """A mesh with devices if all are listed and present, else an abstract one."""
    dims = [(dim.name, dim.size) for dim in proto.mesh_dimensions]
    local = dict(zip(proto.local_device_ids, proto.local_devices, strict=True))
    devices = proto.global_devices or [local.get(n) for n in proto.global_device_ids]
    if not all(devices):
        return DeviceMesh.abstract(*_sizes_names(dims))
    return _of_devices(devices, dims)


def _of_devices(
    devices: Sequence[Any], dims: Sequence[tuple[str, int]] | Mapping[str, int]
) -> DeviceMesh:
    """A mesh of devices by name; an abstract one if some of them do not exist here."""
    here = devices_here(devices)
    pairs = dims.items() if isinstance(dims, Mapping) else dims
    sizes, names = grid_shape(*_sizes_names(pairs), len(here))
    if None in here:
        return DeviceMesh.abstract(sizes, names)
    return DeviceMesh(sizes, names, here)


def _sizes_names(pairs: Iterable[tuple[str, int]]) -> tuple[list[int], list[str]]:
    pairs = list(pairs)
    return [size for _, size in pairs], [name for name, _ in pairs]


def _rebuild(
    shape: tuple[int, ...],
    names: tuple[str, ...],
    types: tuple[str, ...],
    devices: Sequence[str],
) -> DeviceMesh:
    kinds = tuple(AxisType[kind] for kind in types)
    if not devices:
        return DeviceMesh(AbstractMesh(shape, names, axis_types=kinds))
    grid = np.array(require_here(devices), dtype=object).reshape(shape)
    return DeviceMesh(Mesh(grid, names, axis_types=kinds))


def _checked_devices(given: Sequence[Any] | np.ndarray) -> list[Any]:
    devices = list(np.asarray(given, dtype=object).ravel())
    if not devices:
        raise MeshError("devices is empty; leave it out to use all devices")
    return require_here(devices)
