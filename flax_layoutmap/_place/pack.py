"""Convert between arrays and their per-device parts: DTensor's pack and unpack."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from flax_layoutmap._core.axes import normal_spec
from flax_layoutmap._core.errors import LayoutError, MeshError
from flax_layoutmap._core.fetch import unboxed
from flax_layoutmap._core.layout import TensorLayout, named_sharding
from flax_layoutmap._place.place import as_array, mesh_of, wanted_layout


def pack(components: Sequence[Any], layout: Any, *, check: bool = True) -> jax.Array:
    """Make one array from per-device parts.

    Args:
        components: one array per device of this process, in the order of the mesh
            (row-major); all of one shape and dtype. `nnx.Variable`s and Linen boxes
            stand for what they hold. Parts that are on their devices already are not
            copied.
        layout: anything that `TensorLayout` takes; axes without a mesh take that of
            `flm.dtensor.default_mesh` or `jax.set_mesh`.
        check: whether to compare parts that the layout says are equal, bit by bit. That
            copies all of them to the host, without other processes.

    Returns:
        The array: per dim, its size is that of a part times the number of parts.

    Raises:
        LayoutError: another number of parts, parts that differ in shape or dtype,
            another rank, replicas that differ, a traced value, or no array.
        MeshError: no mesh of devices.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> layout = flm.TensorLayout(("data",), flm.DeviceMesh("data=8"))
        >>> x = flm.dtensor.pack([jax.numpy.full(2, n) for n in range(8)], layout)
        >>> x.shape, int(x[5])
        ((16,), 2)

    Plain JAX: `jax.make_array_from_single_device_arrays(shape, sharding, parts)`, which
    checks no replicas.
    """
    layout = wanted_layout(layout)
    mesh = mesh_of(layout)
    if mesh.is_abstract:
        raise MeshError(f"pack needs devices, {mesh!r} has none; use a concrete mesh")
    devices = _local_devices(mesh.jax_mesh)
    parts = _checked_parts(components, layout, len(devices))
    shape, sharding = _whole(layout, parts[0].shape)
    if check:
        _check_replicas(parts, devices, sharding, shape)
    memory = sharding.memory_kind
    placed = [
        jax.device_put(part, jax.sharding.SingleDeviceSharding(d, memory_kind=memory))
        for part, d in zip(parts, devices, strict=True)
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)


def unpack(x: Any) -> list[jax.Array]:
    """Return the parts of an array on the devices of this process.

    Nothing is copied.

    Args:
        x: an array on a mesh; an `nnx.Variable` or a Linen box too.

    Returns:
        One array per device, on that device, in the order of the mesh.

    Raises:
        LayoutError: an array on no mesh, a traced value, or no array.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> layout = flm.TensorLayout(("data",), flm.DeviceMesh("data=8"))
        >>> parts = flm.dtensor.unpack(flm.relayout(jax.numpy.arange(8), layout))
        >>> [int(part[0]) for part in parts]
        [0, 1, 2, 3, 4, 5, 6, 7]

    Plain JAX: `[shard.data for shard in x.addressable_shards]`, in no set order.
    """
    x = unboxed(x)
    sharding = None if isinstance(x, Tracer) else getattr(x, "sharding", None)
    if not isinstance(x, jax.Array) or not isinstance(sharding, NamedSharding):
        what = "a traced value" if isinstance(x, Tracer) else f"a {type(x).__name__}"
        raise LayoutError(
            f"unpack takes an array on a mesh, outside of jit, got {what}; "
            "flm.relayout(x, layout) puts an array on a mesh"
        )
    held = {shard.device: shard.data for shard in x.addressable_shards}
    return [held[device] for device in _local_devices(sharding.mesh)]


def _local_devices(mesh: Any) -> list[Any]:
    """Those of this process, in the order of the mesh."""
    here = jax.process_index()
    return [device for device in mesh.devices.flat if device.process_index == here]


def _checked_parts(
    components: Sequence[Any], layout: TensorLayout, count: int
) -> list[Any]:
    held = [unboxed(part) for part in components]
    if any(isinstance(part, Tracer) for part in held):
        raise LayoutError("pack takes arrays, not values that jit or grad traces")
    parts = [as_array(part, (), "pack") for part in held]
    if len(parts) != count:
        raise LayoutError(
            f"pack takes one part per device of {mesh_of(layout)!r} in this process, "
            f"{count}, got {len(parts)}"
        )
    first = parts[0]
    for at, part in enumerate(parts):
        if part.shape != first.shape or part.dtype != first.dtype:
            raise LayoutError(
                f"pack takes parts of one shape and dtype: part 0 is {first.dtype} "
                f"{tuple(first.shape)}, part {at} is {part.dtype} {tuple(part.shape)}"
            )
    return parts


def _whole(
    layout: TensorLayout, part: tuple[int, ...]
) -> tuple[tuple[int, ...], NamedSharding]:
    """The shape and sharding of the array whose parts have this shape."""
    try:
        dims = layout.dims(len(part))
    except LayoutError as error:
        raise LayoutError(f"pack of parts {tuple(part)}: {error}") from None
    sizes = mesh_of(layout).axis_sizes
    shape = tuple(
        size * math.prod(sizes[axis] for axis in axes)
        for size, axes in zip(part, dims, strict=True)
    )
    return shape, named_sharding(mesh_of(layout), normal_spec(dims), layout.memory_kind)


def _check_replicas(
    parts: list[Any],
    devices: list[Any],
    sharding: NamedSharding,
    shape: tuple[int, ...],
) -> None:
    indices = sharding.devices_indices_map(shape)
    held = [_show(indices[device]) for device in devices]
    if len(set(held)) == len(held):
        return
    first: dict[str, tuple[Any, bytes]] = {}
    for part, device, index in zip(parts, devices, held, strict=True):
        data = _bytes(part)
        other, same = first.setdefault(index, (device, data))
        if data != same:
            raise LayoutError(
                f"pack: the devices {other} and {device} hold the same part of an "
                f"array {shape}, {index}, but were given different "
                "values; make them equal, or use check=False"
            )


def _bytes(part: Any) -> bytes:
    if jax.numpy.issubdtype(part.dtype, jax.dtypes.prng_key):
        part = jax.random.key_data(part)
    return np.asarray(part).tobytes()


def _show(index: tuple[slice, ...]) -> str:
    bounds = (f"{'' if s.start is None else s.start}:{s.stop or ''}" for s in index)
    return f"[{', '.join(bounds)}]"
