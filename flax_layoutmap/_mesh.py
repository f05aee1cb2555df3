"""DeviceMesh: a named grid of devices, with or without the devices."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from flax_layoutmap._errors import MeshError

_Shape = Sequence[int] | int | np.integer | np.ndarray | Mapping[str, int] | str
_AXIS_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


class DeviceMesh:
    """A named grid of devices.

    The constructor is Keras's (`keras.distribution.DeviceMesh`) and more: the shape
    may hold one `-1`, be one line (`"data=2,model=-1"`) or a dict, or be a mesh that
    exists.
    Values are immutable, hashable, and equal when shape, axis names, axis types and
    devices are equal.

    Args:
        shape: sizes of the axes, `(2, 4)`; or one line, `"data=2,model=-1"`; or a
            mapping, `{"data": 2, "model": -1}`; or a `jax.sharding.Mesh`,
            `AbstractMesh` or `DeviceMesh`.
        axis_names: one name per axis; must be left out when `shape` brings names.
        devices: the devices to use, in the order of the grid (row-major). None takes
            all devices of all processes, ordered by `jax.make_mesh` for the hardware.
            To use only some, pass them: `devices=jax.devices()[:4]`.
        axis_types: `"auto"` (the default: the compiler decides what no layout says),
            `"explicit"`, or one of these (or a `jax.sharding.AxisType`) per axis. A
            mesh that exists keeps its own.

    Raises:
        MeshError: sizes, names and devices do not fit together.

    Example:
        >>> import flax_layoutmap as flm
        >>> flm.DeviceMesh.abstract("data=2,model=4")
        DeviceMesh('data=2,model=4', abstract)

    Plain JAX: `jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * n)`; note
    that `jax.make_mesh` without `axis_types` makes Explicit axes.
    """

    __module__ = "flax_layoutmap"
    __slots__ = ("_mesh", "__weakref__")
    _mesh: Mesh | AbstractMesh

    def __init__(
        self,
        shape: "_Shape | Mesh | AbstractMesh | DeviceMesh",
        axis_names: Sequence[str] | None = None,
        devices: Sequence[Any] | np.ndarray | None = None,
        *,
        axis_types: Any = "auto",
    ) -> None:
        if isinstance(shape, DeviceMesh | Mesh | AbstractMesh):
            if axis_names is not None or devices is not None or axis_types != "auto":
                raise MeshError(
                    "DeviceMesh(mesh) takes an existing mesh as it is; leave out "
                    "axis_names, devices and axis_types"
                )
            mesh = shape._mesh if isinstance(shape, DeviceMesh) else shape
            object.__setattr__(self, "_mesh", mesh)
            return
        sizes, names = _sizes_and_names(shape, axis_names)
        given = None if devices is None else np.asarray(devices, dtype=object).ravel()
        available = jax.devices() if given is None else _checked_devices(given)
        sizes = _fill(sizes, names, len(available))
        if math.prod(sizes) != len(available):
            raise MeshError(_wrong_count(sizes, names, len(available), given is None))
        types = _axis_types(axis_types, len(sizes))
        if given is None:
            # make_mesh orders the devices for the links of the hardware.
            mesh = jax.make_mesh(sizes, names, axis_types=types)
        else:
            mesh = Mesh(given.reshape(sizes), names, axis_types=types)
        object.__setattr__(self, "_mesh", mesh)

    @classmethod
    def abstract(
        cls,
        shape: "_Shape",
        axis_names: Sequence[str] | None = None,
        *,
        axis_types: Any = "auto",
    ) -> "DeviceMesh":
        """Makes a mesh without devices, for planning: a 4,096-chip layout on a laptop.

        Args:
            shape: sizes of the axes, or one line, `"data=256,model=16"`, or a mapping;
                no `-1`.
            axis_names: one name per axis, unless `shape` brings them.
            axis_types: as for `DeviceMesh`.

        Raises:
            MeshError: sizes and names do not fit together.
        """
        sizes, names = _sizes_and_names(shape, axis_names)
        if -1 in sizes:
            raise MeshError(
                f"an abstract mesh has no devices to compute -1 from: {sizes}; "
                "write the size"
            )
        types = _axis_types(axis_types, len(sizes))
        return cls(AbstractMesh(sizes, names, axis_types=types))

    @property
    def jax_mesh(self) -> Mesh | AbstractMesh:
        """The mesh as JAX knows it."""
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
        """Axis name → number of devices along it."""
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
        """Whether the mesh is without devices."""
        return not isinstance(self._mesh, Mesh)

    @property
    def devices(self) -> np.ndarray:
        """The devices, as an array in the shape of the mesh.

        Raises:
            MeshError: the mesh is abstract.
        """
        if not isinstance(self._mesh, Mesh):
            raise MeshError(
                f"{self!r} has no devices; use a concrete mesh, "
                f'flm.DeviceMesh("{self}")'
            )
        return self._mesh.devices

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"DeviceMesh is immutable: cannot set {name!r}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceMesh) and self._mesh == other._mesh

    def __hash__(self) -> int:
        return hash(self._mesh)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axis_sizes.items())

    def __repr__(self) -> str:
        notes = ["abstract"] if self.is_abstract else []
        if any(kind is not AxisType.Auto for kind in self.axis_types):
            kinds = "/".join(kind.name.lower() for kind in self.axis_types)
            notes.append(f"axis_types={kinds}")
        return f"DeviceMesh({', '.join([repr(str(self)), *notes])})"

    def __copy__(self) -> "DeviceMesh":
        return self

    def __deepcopy__(self, memo: Any) -> "DeviceMesh":
        # Immutable; so that settings that hold a LayoutMap can be copied.
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self._mesh, Mesh):
            raise TypeError(
                "a DeviceMesh with devices cannot be pickled: devices belong to one "
                f'process. Pickle its line, "{self}", and build it again'
            )
        types = tuple(kind.name.lower() for kind in self.axis_types)
        return _rebuild_abstract, (self.shape, self.axis_names, types)


def as_mesh(mesh: Any) -> DeviceMesh | None:
    """Makes a `DeviceMesh` of anything that a mesh argument accepts; None stays None.

    Raises:
        MeshError: `mesh` is something else.
    """
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


def retyped(mesh: Mesh, kind: AxisType) -> Mesh:
    """The same devices and axis names with all axes of one type."""
    if all(axis_type is kind for axis_type in mesh.axis_types):
        return mesh
    types = (kind,) * len(mesh.axis_names)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def _rebuild_abstract(
    shape: tuple[int, ...], names: tuple[str, ...], types: tuple[str, ...]
) -> DeviceMesh:
    return DeviceMesh.abstract(shape, names, axis_types=types)


def _sizes_and_names(
    shape: _Shape, names: Sequence[str] | None
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    if isinstance(shape, str | Mapping):
        if names is not None:
            kind = "line" if isinstance(shape, str) else "mapping"
            raise MeshError(
                f"the {kind} {shape!r} brings axis names; leave out the rest"
            )
        shape, names = (
            _parse(shape)
            if isinstance(shape, str)
            else (list(shape.values()), list(shape))
        )
    if isinstance(names, str):
        raise MeshError(f"axis_names is one string, {names!r}; write ({names!r},)")
    if isinstance(shape, int | np.integer | np.ndarray):
        shape = np.atleast_1d(shape).tolist()  # 8 for one axis; a NumPy shape
    if not isinstance(shape, Sequence) or not shape or not names:
        raise MeshError(
            f"DeviceMesh needs a size and a name for each axis, got shape={shape!r} "
            f"and axis_names={names!r}; for example ((2, 4), ('data', 'model'))"
        )
    if len(shape) != len(names):
        raise MeshError(
            f"{len(shape)} sizes but {len(names)} names: shape={tuple(shape)}, "
            f"axis_names={tuple(names)}"
        )
    sizes = []
    for size, name in zip(shape, names, strict=True):
        if not isinstance(name, str) or not name:
            raise MeshError(f"an axis name must be a non-empty string, got {name!r}")
        if isinstance(size, bool) or not isinstance(size, int | np.integer):
            raise MeshError(f"axis {name!r} must have an int size, got {size!r}")
        if size < 1 and size != -1:
            raise MeshError(f"axis {name!r} must have a size of 1 or more, got {size}")
        sizes.append(int(size))
    if len(set(names)) != len(names):
        raise MeshError(f"axis names must differ, got {tuple(names)}")
    return tuple(sizes), tuple(names)


def _parse(line: str) -> tuple[list[int], list[str]]:
    sizes, names = [], []
    for part in line.split(","):
        name, equals, size = part.partition("=")
        try:
            sizes.append(int(size))
        except ValueError:
            equals = ""
        if not equals or not name.strip():
            raise MeshError(
                f"cannot read {part!r} in the mesh line {line!r}; "
                'write "data=2,model=4" (one size may be -1)'
            )
        names.append(name.strip())
    return sizes, names


def _checked_devices(given: np.ndarray) -> list[Any]:
    devices = list(given)
    for device in devices:
        if not hasattr(device, "device_kind"):
            raise MeshError(
                "devices must be JAX devices, such as jax.devices()[:4], got "
                f"{device!r}"
            )
    if not devices:
        raise MeshError("devices is empty; leave it out to use all devices")
    if len(set(devices)) != len(devices):
        raise MeshError("DeviceMesh was given the same device twice in devices")
    return devices


def _fill(
    sizes: tuple[int, ...], names: tuple[str, ...], count: int
) -> tuple[int, ...]:
    if sizes.count(-1) > 1:
        raise MeshError(f"only one axis may have size -1, got {sizes}")
    if -1 not in sizes:
        return sizes
    known = -math.prod(sizes)
    if count % known:
        open_axis = names[sizes.index(-1)]
        raise MeshError(
            f"cannot compute axis {open_axis!r} (-1): {count} devices do not divide "
            f"by the other axes, {known}"
        )
    return tuple(count // known if size == -1 else size for size in sizes)


def _wrong_count(
    sizes: tuple[int, ...], names: tuple[str, ...], count: int, took_all: bool
) -> str:
    grid = ",".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
    need = math.prod(sizes)
    text = f"the mesh {grid} needs {need} devices, but there are {count}"
    if took_all and need < count:
        return f"{text}; to use only some, pass devices=jax.devices()[:{need}]"
    if took_all and jax.default_backend() == "cpu":
        return (
            f"{text}; for virtual CPU devices call "
            f'jax.config.update("jax_num_cpu_devices", {need}) before any other use of '
            "JAX, or plan with flm.DeviceMesh.abstract(...)"
        )
    return f"{text}; change a size, let one be -1, or use flm.DeviceMesh.abstract(...)"


def _axis_types(kinds: Any, count: int) -> tuple[AxisType, ...]:
    if isinstance(kinds, str | AxisType):
        kinds = (kinds,) * count
    if not isinstance(kinds, Sequence):
        raise MeshError(_not_a_type(kinds))
    kinds = tuple(kinds)
    if len(kinds) != count:
        raise MeshError(f"{len(kinds)} axis types for {count} axes: {kinds}")
    types = []
    for kind in kinds:
        kind = _AXIS_TYPES.get(kind, kind) if isinstance(kind, str) else kind
        if kind not in (AxisType.Auto, AxisType.Explicit):
            raise MeshError(_not_a_type(kind))
        types.append(kind)
    return tuple(types)


def _not_a_type(kind: Any) -> str:
    return (
        'an axis type must be "auto" or "explicit" (or jax.sharding.AxisType.Auto or '
        f".Explicit), got {kind!r}"
    )
