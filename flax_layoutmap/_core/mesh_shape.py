"""The sizes, names and types of a mesh's axes, as a user writes them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

from flax_layoutmap._core.errors import MeshError

Shape = Sequence[int] | int | np.integer | np.ndarray | Mapping[str, int] | str
_AXIS_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def sizes_and_names(
    shape: Shape, names: Sequence[str] | None
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
    return f"{text}; change a size, let one be -1, or use flm.DeviceMesh.abstract(...)"


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
