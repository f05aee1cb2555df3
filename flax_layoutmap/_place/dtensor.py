"""DTensor's `pack`, `unpack` and `call_with_layout`."""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from flax_layoutmap._core.axes import normal_spec
from flax_layoutmap._core.errors import LayoutError, MeshError, StructureError
from flax_layoutmap._core.fetch import unboxed
from flax_layoutmap._core.layout import TensorLayout, named_sharding
from flax_layoutmap._place.place import (
    as_array,
    distribute,
    explicit_axes,
    is_eager,
    mesh_of,
    move,
    wanted_layout,
)


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


def call_with_layout(
    fn: Callable[..., Any], layout: Any, *args: Any, **kwargs: Any
) -> Any:
    """Call a function so that its results are computed in this layout.

    The function is compiled, so that on Auto axes no device holds more of a result
    than its part. On Explicit axes a result has the layout that the function gives it,
    and is moved. It is compiled at every call: this is for what is made once,
    `jnp.zeros` or an initialiser; in a loop, use `jax.jit`.

    Args:
        fn: the function. Inside of `jit` it is called as it is, and its results are
            given the layout.
        layout: anything that `TensorLayout` takes, for every result; or a tree of
            `TensorLayout`s, `NamedSharding`s and None (as the compiler likes) that is a
            prefix of the results; or None, which calls `fn` and does nothing else.
        args: for the function. Arrays are traced; anything else is a constant.
        kwargs: for the function, too.

    Returns:
        What the function returns.

    Raises:
        LayoutError: another rank, or a dim that does not divide.
        MeshError: no mesh to be found, or one without devices.
        StructureError: a tree of layouts that is no prefix of the results.

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
    layouts = jax.tree.map(wanted_layout, layout, is_leaf=_is_layout)
    if not is_eager():
        return _given(fn(*args, **kwargs), layouts)
    leaves, treedef = jax.tree.flatten((args, kwargs))
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array | np.ndarray)]

    def call(arrays: list[Any]) -> Any:
        traced = iter(arrays)
        filled = [
            next(traced) if isinstance(leaf, jax.Array | np.ndarray) else leaf
            for leaf in leaves
        ]
        own_args, own_kwargs = jax.tree.unflatten(treedef, filled)
        return _given(fn(*own_args, **own_kwargs), layouts)

    found: list[TensorLayout] = jax.tree.leaves(layouts)
    with contextlib.ExitStack() as stack:
        for each in found:
            move(np.zeros(()), TensorLayout((), each.device_mesh), ())
        if found and explicit_axes(mesh_of(found[0])):
            # Constants on Explicit axes ask for a mesh in the context.
            bare: Any = mesh_of(found[0]).jax_mesh
            stack.enter_context(jax.set_mesh(bare))
        return jax.jit(call)(arrays)


def _given(results: Any, layouts: Any) -> Any:
    wanted, treedef = jax.tree.flatten(layouts, is_leaf=lambda node: node is None)
    try:
        parts = treedef.flatten_up_to(results)
    except ValueError as error:
        raise StructureError(
            f"call_with_layout: the layouts are no prefix of the results: {error}"
        ) from error

    def give(layout: TensorLayout | None, part: Any) -> Any:
        if layout is None:
            return part
        return jax.tree.map(
            lambda leaf: distribute(leaf, layout, what="call_with_layout"), part
        )

    return treedef.unflatten(map(give, wanted, parts))


def _is_layout(node: Any) -> bool:
    """Whether a node of a tree of layouts is a layout; None is not."""
    if isinstance(node, tuple | list) and not isinstance(node, PartitionSpec):
        dims = [dim for dim in node if dim is not None and dim is not ...]
        return all(
            isinstance(name, str)
            for dim in dims
            for name in (dim if isinstance(dim, tuple | list) else (dim,))
        )
    return not isinstance(node, dict) and node is not None
