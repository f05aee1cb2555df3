"""The shape of a mesh: sizes, names and types of its axes, and its devices in order.

Devices of several slices, or processes, are ordered for two kinds of network.
"""

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType

from flax_layoutmap._core.errors import MeshError

Shape = Sequence[int] | int | np.integer | np.ndarray | Mapping[str, int] | str
_AXIS_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
# The number of slices and ids that a message lists.
_SHOWN = 8
# Kinds of devices whose physical axes jax.make_mesh splits by default.
_SPLIT_UNASKED = ("TPU v5 lite", "TPU v5e")
# What JAX raises for devices that it cannot order: where they make no whole slice, and
# for some sizes where it may split (20 chips along a dim, up to jax 0.10.2).
_UNORDERED = (AssertionError, TypeError, ValueError)


def sizes_and_names(
    shape: Shape, names: Sequence[str] | None
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    if isinstance(shape, str | Mapping):
        if names is not None:
            kind = "line" if isinstance(shape, str) else "mapping"
            raise MeshError(
                f"the {kind} {shape!r} has axis names; leave out axis_names"
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


def fill(sizes: tuple[int, ...], names: tuple[str, ...], count: int) -> tuple[int, ...]:
    check_one_open(sizes)
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


def _filled(shape: Mapping[str, int] | str, count: int) -> dict[str, int]:
    """Axis → size, with a -1 computed from the number of devices."""
    sizes, names = sizes_and_names(shape, None)
    return dict(zip(names, fill(sizes, names, count), strict=True))


def check_one_open(sizes: Sequence[int]) -> None:
    if list(sizes).count(-1) > 1:
        raise MeshError(f"only one axis may have size -1, got {tuple(sizes)}")


def wrong_count(
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
    virtual = "set JAX_PLATFORMS=cpu for virtual CPU devices, " if took_all else ""
    return (
        f"{text}; change a size, let one be -1, {virtual}or use "
        "flm.DeviceMesh.abstract(...)"
    )


def axis_types_of(kinds: Any, count: int) -> tuple[AxisType, ...]:
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


def granules_of(devices: Sequence[Any]) -> tuple[str, dict[int, list[Any]]]:
    """The devices by slice number, or by process where they report no slices."""
    slices = {getattr(device, "slice_index", None) for device in devices}
    # CPUs and GPUs of several processes say that all of them are slice 0.
    is_tpu = devices[0].platform == "tpu"
    knows = None not in slices and (len(slices) > 1 or is_tpu)
    attribute = "slice_index" if knows else "process_index"
    found: dict[int, list[Any]] = defaultdict(list)
    for device in devices:
        found[getattr(device, attribute)].append(device)
    return ("slice" if knows else "process"), dict(sorted(found.items()))


def one_slice_grid(
    sizes: Sequence[int],
    names: Sequence[str],
    devices: Sequence[Any],
    allow_split_physical_axes: bool,
) -> np.ndarray:
    """The devices as a grid, in the order of `jax.make_mesh`."""
    kind, granules = granules_of(devices)
    line = ",".join(f"{name}={n}" for name, n in zip(names, sizes, strict=True))
    if kind == "slice" and len(granules) > 1:
        raise MeshError(
            f"the devices are of {len(granules)} slices, and the mesh {line} does not "
            f"say which axes are over them; {_how_over_slices(sizes, names, granules)}"
        )
    split = allow_split_physical_axes or devices[0].device_kind in _SPLIT_UNASKED
    with _explained(
        f"the mesh {line}",
        "the slice",
        "pass devices=jax.devices() to take them in the order of their numbers",
    ):
        return mesh_utils.create_device_mesh(
            sizes, list(devices), allow_split_physical_axes=split
        )


@contextlib.contextmanager
def _explained(what: str, links: str, otherwise: str) -> Iterator[None]:
    """Raise JAX's error about the order of devices as a MeshError."""
    try:
        yield
    except NotImplementedError as error:
        raise MeshError(
            f"{what} does not fit the links of {links} without splitting one of its "
            "physical axes; choose sizes that do, or pass "
            f"allow_split_physical_axes=True (some axes are slower then): {error}"
        ) from error
    except _UNORDERED as error:
        raise MeshError(
            f"JAX finds no order of the devices for {what}; {otherwise}: {error}"
        ) from error


def over_slices(sizes: Sequence[int], slices: int) -> list[int] | None:
    """Over how many slices each axis is split, first axes first; None if impossible.

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


def _hybrid_call(
    sizes: Sequence[int], names: Sequence[str], between: Sequence[int]
) -> str:
    """`flm.DeviceMesh.hybrid(ici={"fsdp": 16}, dcn={"data": 2})`."""
    last = max((at for at, n in enumerate(between) if n > 1), default=0)
    dcn = dict(zip(names[: last + 1], between[: last + 1], strict=True))
    inside = {
        name: size // n for name, size, n in zip(names, sizes, between, strict=True)
    }
    ici = {name: n for name, n in inside.items() if n > 1 or name not in dcn}
    ici = ici or {names[-1]: 1}
    inner, outer = (str(some).replace("'", '"') for some in (ici, dcn))
    return f"flm.DeviceMesh.hybrid(ici={inner}, dcn={outer})"


def _how_over_slices(
    sizes: Sequence[int], names: Sequence[str], granules: Mapping[int, Any]
) -> str:
    between = over_slices(sizes, len(granules))
    if between is None:
        return f"put an axis of size {len(granules)} first, and use DeviceMesh.hybrid"
    return f"write {_hybrid_call(sizes, names, between)}"


def hybrid_grid(
    ici: Mapping[str, int] | str,
    dcn: Mapping[str, int] | str,
    devices: Sequence[Any],
    allow_split_physical_axes: bool,
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The devices as a grid, and the axis names: axes over slices (`dcn`) first."""
    kind, granules = granules_of(devices)
    ici = _filled(ici, min(map(len, granules.values())))
    dcn = _filled(dcn, len(granules))
    names = tuple(dict.fromkeys((*dcn, *ici)))
    inner = [ici.get(name, 1) for name in names]
    outer = [dcn.get(name, 1) for name in names]
    counts = {len(some) for some in granules.values()}
    if len(counts) > 1:
        raise MeshError(
            f"the {_many(kind)} have different numbers of devices, so they make no "
            f"mesh: {listed(kind, granules)}"
        )
    if math.prod(outer) != len(granules):
        raise MeshError(
            f"dcn={dcn} is for {math.prod(outer)} {_many(kind)}, but there are "
            f"{len(granules)}: {listed(kind, granules)}"
        )
    (each,) = counts
    if math.prod(inner) != each:
        raise MeshError(
            f"ici={ici} is for {math.prod(inner)} devices in each {kind}, but "
            f"there are {each}: {listed(kind, granules)}"
        )
    with _explained(
        f"ici={ici}",
        f"a {kind}",
        "choose other sizes, or use DeviceMesh with devices=jax.devices() to take them "
        "in the order of their numbers",
    ):
        grid = mesh_utils.create_hybrid_device_mesh(
            inner,
            outer,
            list(devices),
            process_is_granule=kind == "process",
            allow_split_physical_axes=allow_split_physical_axes,
        )
    return grid, names


def listed(kind: str, granules: Mapping[int, Sequence[Any]]) -> str:
    """`slice 0: 4 devices of the processes 0, 1; …`."""
    texts = []
    for number, devices in list(granules.items())[:_SHOWN]:
        hosts = sorted({device.process_index for device in devices})
        ids = [device.id for device in devices]
        text = f"{kind} {number} has {len(devices)} devices ({_run(ids)})"
        if kind == "slice":
            text += f" of {len(hosts)} hosts (processes {_run(hosts)})"
        texts.append(text)
    if len(granules) > _SHOWN:
        texts.append(f"… {len(granules) - _SHOWN} more")
    return "; ".join(texts)


def _run(numbers: Sequence[int]) -> str:
    """`0 to 7`, or the numbers themselves."""
    low, high = min(numbers), max(numbers)
    if len(numbers) > 2 and sorted(numbers) == [*range(low, high + 1)]:
        return f"{low} to {high}"
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    return shown if len(numbers) <= _SHOWN else f"{shown}, …"


def _many(kind: str) -> str:
    return {"slice": "slices", "process": "processes"}[kind]
