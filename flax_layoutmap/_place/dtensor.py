"""DTensor's `pack`, `unpack` and `call_with_layout`."""

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, SingleDeviceSharding

from flax_layoutmap._core.axes import normal_spec
from flax_layoutmap._core.errors import LayoutError, MeshError
from flax_layoutmap._core.fetch import is_eager, unboxed
from flax_layoutmap._core.layout import TensorLayout, named_sharding
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._place.place import (
    as_array,
    distribute,
    explicit_axes,
    mesh_of,
    wanted_layout,
)


def pack(components: Sequence[Any], layout: Any, *, check: bool = True) -> jax.Array:
    """Make one array from per-device parts.

    Args:
        components: one array per device of this process, in the order of the mesh
            (row-major); all of one shape and dtype. Parts that are on their devices
            already are not copied.
        layout: as for `flm.distribute_tensor`.
        check: whether to compare parts that the layout says are equal, bit by bit. That
            copies all of them to the host, without other processes.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> layout = flm.TensorLayout(("data",), flm.DeviceMesh("data=8"))
        >>> x = flm.dtensor.pack([jax.numpy.full(2, n) for n in range(8)], layout)
        >>> x.shape, int(x[5])
        ((16,), 2)

    Plain JAX: `jax.make_array_from_single_device_arrays(shape, sharding, parts)`.
    """
    layout = wanted_layout(layout)
    mesh = _mesh_of_devices(layout, "pack")
    devices = _local_devices(mesh.jax_mesh)
    parts = _checked_parts(components, layout, len(devices))
    try:
        dims = layout.dims(parts[0].ndim)
    except LayoutError as error:
        raise LayoutError(f"pack of parts {parts[0].shape}: {error}") from None
    shape = tuple(
        size * math.prod(mesh.axis_sizes[axis] for axis in axes)
        for size, axes in zip(parts[0].shape, dims, strict=True)
    )
    sharding = named_sharding(mesh, normal_spec(dims), layout.memory_kind)
    if check:
        _check_replicas(parts, devices, sharding, shape)
    placed = [
        jax.device_put(part, SingleDeviceSharding(d, memory_kind=sharding.memory_kind))
        for part, d in zip(parts, devices, strict=True)
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)


def unpack(x: Any) -> list[jax.Array]:
    """Return the part of an array on each device of this process, without a copy.

    They are in the order of the mesh.

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
        what = "traced value" if isinstance(x, Tracer) else type(x).__name__
        raise LayoutError(
            f"unpack takes an array on a mesh, outside of jit, got a {what}; "
            "flm.relayout(x, layout) puts an array on a mesh"
        )
    held = {shard.device: shard.data for shard in x.addressable_shards}
    return [held[device] for device in _local_devices(sharding.mesh)]


def _mesh_of_devices(layout: TensorLayout, what: str) -> DeviceMesh:
    mesh = mesh_of(layout)
    if mesh.is_abstract:
        raise MeshError(f"{what} needs devices, {mesh!r} has none; use a concrete mesh")
    return mesh


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
    kinds = {f"{part.dtype} {tuple(part.shape)}": None for part in parts}
    if len(kinds) > 1:
        raise LayoutError(
            f"pack takes parts of one shape and dtype, got {', '.join(kinds)}"
        )
    return parts


def _check_replicas(
    parts: list[Any], devices: list[Any], sharding: NamedSharding, shape: Any
) -> None:
    indices = sharding.devices_indices_map(shape)
    first: dict[str, tuple[Any, Any]] = {}
    for part, device in zip(parts, devices, strict=True):
        other, same = first.setdefault(str(indices[device]), (device, part))
        if same is not part and _bytes(same) != _bytes(part):
            raise LayoutError(
                f"pack: the devices {other} and {device} hold the same part of an "
                f"array {shape}, but were given different values; make them equal, or "
                "use check=False"
            )


def _bytes(part: Any) -> bytes:
    if jax.numpy.issubdtype(part.dtype, jax.dtypes.prng_key):
        part = jax.random.key_data(part)
    return np.asarray(part).tobytes()


def call_with_layout(
    fn: Callable[..., Any], layout: Any, *args: Any, **kwargs: Any
) -> Any:
    """Call a function so that its results are computed in this layout.

    It is for what is made once, `jnp.zeros` or an initialiser: the function is compiled
    at every call, so that on Auto axes no device holds more of a result than its part.
    Inside of `jit` it is called as it is, and its results are given the layout.

    Args:
        fn: the function.
        layout: as for `flm.distribute_tensor`, for every result; None calls `fn` alone.
        args: for the function. Arrays are traced; anything else is a constant.
        kwargs: for the function, too.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> layout = flm.TensorLayout(("data", None), flm.DeviceMesh("data=8"))
        >>> x = flm.dtensor.call_with_layout(jax.numpy.zeros, layout, shape=(8, 4))
        >>> x.addressable_shards[0].data.shape
        (1, 4)

    Plain JAX: `jax.jit(fn, out_shardings=sharding)(*args)`.
    """
    if layout is None:
        return fn(*args, **kwargs)
    layout, what = wanted_layout(layout), "call_with_layout"
    leaves, treedef = jax.tree.flatten((args, kwargs))
    is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]

    def call(arrays: Sequence[Any]) -> Any:
        traced = iter(arrays)
        pairs = zip(leaves, is_array, strict=True)
        filled = [next(traced) if given else leaf for leaf, given in pairs]
        own_args, own_kwargs = treedef.unflatten(filled)
        return jax.tree.map(
            lambda x: distribute(as_array(x, (), what), layout, what),
            fn(*own_args, **own_kwargs),
        )

    arrays = list(itertools.compress(leaves, is_array))
    if not is_eager():
        return call(arrays)
    mesh: Any = _mesh_of_devices(layout, what)
    # Constants on Explicit axes ask for a mesh in the context.
    explicit = bool(explicit_axes(mesh))
    with jax.set_mesh(mesh.jax_mesh) if explicit else contextlib.nullcontext():
        return jax.jit(call)(arrays)
