"""The shape of a mesh: sizes, names and types of its axes, and its devices in order."""

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType

from flax_layoutmap._core.dtensor_format import MATCH, UNSHARDED
from flax_layoutmap._core.errors import MeshError

Shape = Sequence[int] | int | np.integer | np.ndarray | Mapping[str, int] | str
_AXIS_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def sizes_and_names(
    shape: Shape, names: Sequence[str] | None
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    sizes: Any = shape
    if isinstance(shape, str | Mapping) and names is None:
        pairs = _pairs(shape) if isinstance(shape, str) else list(shape.items())
        sizes, names = [size for _, size in pairs], [name for name, _ in pairs]
    if isinstance(shape, int | np.integer | np.ndarray):
        sizes = np.atleast_1d(shape).tolist()  # 8 for one axis; a NumPy shape
    is_list = isinstance(sizes, Sequence) and not isinstance(sizes, str)
    if not is_list or not names or isinstance(names, str) or len(sizes) != len(names):
        raise MeshError(
            "DeviceMesh needs a size and a name for each axis, got "
            f"shape={shape!r} and axis_names={names!r}; for example ((2, 4), "
            "('data', 'model')), or the one line \"data=2,model=4\""
        )
    numbers: list[Any] = list(sizes)
    for size, name in zip(numbers, names, strict=True):
        if not isinstance(name, str) or name in ("", UNSHARDED, MATCH):
            raise MeshError(
                "an axis name must be a non-empty string, and not a word of DTensor, "
                f"got {name!r}"
            )
        is_whole = isinstance(size, int | np.integer) and not isinstance(size, bool)
        if not is_whole or (size < 1 and size != -1):
            raise MeshError(
                f"the size of axis {name!r} must be an int of 1 or more, or -1, got "
                f"{size!r}"
            )
    if len(set(names)) != len(names):
        raise MeshError(f"axis names must differ, got {tuple(names)}")
    if numbers.count(-1) > 1:
        raise MeshError(f"only one axis may have size -1, got {tuple(sizes)}")
    return tuple(map(int, numbers)), tuple(names)


def _pairs(line: str) -> list[tuple[str, int]]:
    try:
        parts = [part.partition("=") for part in line.split(",")]
        return [(name.strip(), int(size)) for name, _, size in parts]
    except ValueError as error:
        raise MeshError(
            f'cannot read the mesh line {line!r}; write "data=2,model=4" (one size may '
            "be -1)"
        ) from error


def fill(sizes: tuple[int, ...], names: tuple[str, ...], count: int) -> tuple[int, ...]:
    """The sizes with a -1 computed from the number of devices."""
    if -1 not in sizes:
        return sizes
    known = -math.prod(sizes)
    if count % known:
        open_axis = names[sizes.index(-1)]
        raise MeshError(
            f"cannot compute axis {open_axis!r} (-1): {count} devices are not "
            f"divisible by the other axes, {known}"
        )
    return tuple(count // known if size == -1 else size for size in sizes)


def grid_shape(
    shape: Shape, names: Sequence[str] | None, count: int
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Sizes and names of the axes of a mesh of this many devices."""
    sizes, names = sizes_and_names(shape, names)
    sizes = fill(sizes, names, count)
    need = math.prod(sizes)
    if need == count:
        return sizes, names
    advice = f"to use only some, pass devices=jax.devices()[:{need}]"
    if need > count:
        advice = (
            "change a size, plan with flm.DeviceMesh.abstract(...), or for virtual CPU "
            f'devices call jax.config.update("jax_num_cpu_devices", {need}) before any '
            "other use of JAX"
        )
    raise MeshError(
        f"the mesh {_line(sizes, names)} needs {need} devices, but there are {count}; "
        f"{advice}"
    )


def _line(sizes: Sequence[int], names: Sequence[str]) -> str:
    return ",".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))


def axis_types_of(kinds: Any, count: int) -> tuple[AxisType, ...]:
    given = {*kinds} if isinstance(kinds, list | tuple) else {kinds}
    types: set[Any] = {_AXIS_TYPES.get(kind, kind) for kind in given}
    if len(types) != 1 or not types <= {*_AXIS_TYPES.values()}:
        raise MeshError(
            'axis_types must be "auto" or "explicit" (or jax.sharding.AxisType.Auto or '
            f".Explicit), one type for all axes, got {kinds!r}"
        )
    return (types.pop(),) * count


def one_slice_grid(
    sizes: Sequence[int],
    names: Sequence[str],
    devices: Sequence[Any],
    allow_split_physical_axes: bool,
) -> np.ndarray:
    """The devices as a grid, in the order of `jax.make_mesh`."""
    with _errors_of_jax(f"the mesh {_line(sizes, names)}"):
        if allow_split_physical_axes:
            return mesh_utils.create_device_mesh(
                sizes, list(devices), allow_split_physical_axes=True
            )
        types = (AxisType.Auto,) * len(sizes)
        return jax.make_mesh(tuple(sizes), tuple(names), types, devices=devices).devices


def hybrid_grid(
    ici: Mapping[str, int] | str,
    dcn: Mapping[str, int] | str,
    devices: Sequence[Any],
    allow_split_physical_axes: bool,
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The devices as a grid, and the axis names: axes over slices (`dcn`) first."""
    by_slice = _by_slice(devices)
    numbers = [d.slice_index if by_slice else d.process_index for d in devices]
    slices = len(set(numbers))
    inner = _filled(ici, len(numbers) // slices)
    outer = _filled(dcn, slices)
    names = tuple(dict.fromkeys((*outer, *inner)))
    kind = "slices" if by_slice else "processes"
    what = f"ici={inner} and dcn={outer} on {len(numbers)} devices of {slices} {kind}"
    with _errors_of_jax(what):
        grid = mesh_utils.create_hybrid_device_mesh(
            [inner.get(name, 1) for name in names],
            [outer.get(name, 1) for name in names],
            list(devices),
            process_is_granule=not by_slice,
            allow_split_physical_axes=allow_split_physical_axes,
        )
    return grid, names


def _filled(shape: Mapping[str, int] | str, count: int) -> dict[str, int]:
    sizes, names = sizes_and_names(shape, None)
    return dict(zip(names, fill(sizes, names, count), strict=True))


def _by_slice(devices: Sequence[Any]) -> bool:
    """Whether devices have slice numbers; else each process counts as a slice.

    CPUs and GPUs of several processes all report slice 0.
    """
    slices = {getattr(device, "slice_index", None) for device in devices}
    return None not in slices and (len(slices) > 1 or devices[0].platform == "tpu")


@contextlib.contextmanager
def _errors_of_jax(what: str) -> Iterator[None]:
    """Raise JAX's errors about the order of devices as MeshError."""
    try:
        yield
    except (AssertionError, NotImplementedError, TypeError, ValueError) as error:
        raise MeshError(
            f"JAX cannot place {what}: {error}; choose sizes that fit the links, pass "
            "allow_split_physical_axes=True (some axes are slower then), use "
            "flm.DeviceMesh.hybrid for several slices, or pass devices=jax.devices() "
            "to take them in the order of their ids"
        ) from error


def over_slices(sizes: Sequence[int], slices: int) -> list[int] | None:
    """How many slices to split each axis over, first axes first; None if impossible.

    >>> over_slices((4, 8), 8), over_slices((4, 12), 3)
    ([4, 2], None)
    """
    between, left = [], slices
    for size in sizes:
        part = math.gcd(left, size)
        between.append(part)
        left //= part
        if part < size:
            break
    return None if left != 1 else between + [1] * (len(sizes) - len(between))


# ------------------------------------------------------------- devices by name

# "TPU:0", "/device:TPU:0" and "/job:localhost/replica:0/task:0/device:TPU:0".
_NAME = re.compile(r"(?:/(?:job|replica|task):[^/]+)*/?(?:device:)?([A-Za-z]\w*):(\d+)")
Key = tuple[str, int]


def key_of(device: Any) -> Key:
    """Platform and id of a device or a device name, which are unique in the job."""
    if isinstance(device, str):
        match = _NAME.fullmatch(device)
        if match is None:
            raise MeshError(
                f'cannot read the device {device!r}; write its platform and id, "cpu:0"'
            )
        return match[1].lower(), int(match[2])
    if not hasattr(device, "device_kind"):
        raise MeshError(
            "devices must be JAX devices, such as jax.devices()[:4], or names like "
            f'"cpu:0", got {device!r}'
        )
    return device.platform, device.id


def long_name(device: Any) -> str:
    """DTensor's name of a device; the number is JAX's id, which is global."""
    return (
        f"/job:localhost/replica:0/task:{device.process_index}/device:"
        f"{device.platform.upper()}:{device.id}"
    )


def devices_here(given: Sequence[Any]) -> list[Any | None]:
    """The devices, given as objects or names; None where a device does not exist."""
    keys = [key_of(device) for device in given]
    if len(set(keys)) != len(keys):
        raise MeshError(f"devices holds one device twice: {list(given)}")
    known = {}
    for platform in {key_of(name)[0] for name in given if isinstance(name, str)}:
        with contextlib.suppress(RuntimeError):  # unknown, or without devices
            known |= {(platform, d.id): d for d in jax.devices(platform)}
    pairs = zip(keys, given, strict=True)
    return [known.get(key) if isinstance(d, str) else d for key, d in pairs]


def require_here(given: Sequence[Any]) -> list[Any]:
    """The same devices; raises if some are missing."""
    devices = devices_here(given)
    pairs = zip(given, devices, strict=True)
    if missing := [key_of(name) for name, device in pairs if device is None]:
        raise MeshError(
            f"there are no devices {_listed(missing)}; this job has "
            f"{_listed(map(key_of, jax.devices()))}"
        )
    return devices


def _listed(keys: Iterable[Key]) -> str:
    names = [f"{platform}:{number}" for platform, number in keys]
    return ", ".join(names if len(names) < 9 else [*names[:7], "…", names[-1]])
