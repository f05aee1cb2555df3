"""DTensor's functions: relayouts, arrays from per-device parts, calls in a layout."""

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import sdy
from jax.interpreters import ad, batching, mlir
from jax.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

from flax_layoutmap._core.axes import normal_spec
from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._core.fetch import (
    concrete,
    is_box,
    is_eager,
    is_traced,
    known_layout,
    own_mesh,
    unboxed,
)
from flax_layoutmap._core.jax_internals import is_in_a_loop
from flax_layoutmap._core.layout import TensorLayout, named_sharding
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._place.place import (
    as_array,
    checked_dims,
    distribute,
    explicit_axes,
    manual_axes,
    wanted_layout,
)
from flax_layoutmap._tree.flax_internals import is_nnx_object


def relayout(
    x: Any, layout: Any, *, gradient: Any = "input", name: str | None = None
) -> Any:
    """Give an array another layout; its gradient has the original layout.

    Like `flm.distribute_tensor`, but the cotangent gets the layout of `x`, at every
    order of differentiation. Under `jit` on Auto axes, this is the sharding that the
    compiler chooses for `x`: predictable only where it is fixed (an argument of `jit`,
    the result of another relayout). It also keeps `x` until the backward pass, where
    every device gathers the whole cotangent. With `gradient=` the layout is exact, and
    nothing is kept or gathered: use it for large activations.

    Args:
        x: an array, a traced value, or a tree of them; None leaves stay None.
        layout: as for `distribute_tensor`; or a mesh, to which the array is moved with
            its current layout.
        gradient: the layout of `x`, to which `x` is constrained too; or `"input"`.
        name: shown in profiles, as by `jax.named_scope`.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> mesh = flm.DeviceMesh("data=2,model=4")
        >>> x = flm.relayout(jax.numpy.ones((8, 8)), mesh)
        >>> x = flm.relayout(x, ("data", None))
        >>> x = flm.relayout(x, (flm.TensorLayout.MATCH, "model"))
        >>> tuple(x.sharding.spec)
        ('data', 'model')

    Plain JAX: as for `flm.distribute_tensor`; twice, to fix the input's layout too.
    """
    if gradient != "input":
        if isinstance(gradient, str):
            raise LayoutError(
                f"gradient={gradient!r}: use 'input', or the layout that the array has"
            )
        gradient = TensorLayout(gradient)
    is_mesh = isinstance(layout, DeviceMesh | Mesh | AbstractMesh)
    is_named = isinstance(layout, str)
    what = f"relayout(x, {layout!r})" if is_named else "relayout"

    def move(keys: Any, leaf: Any) -> Any:
        leaf = as_array(leaf, keys, "relayout")
        to = layout
        if is_mesh:
            to = TensorLayout((TensorLayout.MATCH,) * len(leaf.shape), layout)
        wanted = wanted_layout(to, own_mesh(leaf))
        return _relayout(leaf, wanted, gradient, what, is_named=is_named)

    with jax.named_scope(name or "relayout"):
        return jax.tree_util.tree_map_with_path(move, x, is_leaf=is_nnx_object)


copy_to_mesh = relayout  # DTensor's older name


def relayout_like(x: Any, like: Any, *, name: str | None = None) -> Any:
    """Give an array the mesh and layout of another; its gradient keeps its layout.

    `like` may have any shape of the same rank; if it is not on a mesh, `x` is
    replicated on the mesh of `x`. Under `jit` on Auto axes, the layout of a traced
    `like` cannot be read, so the compiler is told to give both the same sharding: they
    must have the same shape, each device gathers `x`, and both are kept until the
    backward pass. This is exact where their layouts are fixed, as for arguments of
    `jit`, and an error in loops, where it would also constrain the carry.

    Args:
        x: an array, a traced value, an `nnx.Variable` or a Linen box.
        like: the array, Variable or box to follow. It gets no gradient.
        name: shown in profiles, as by `jax.named_scope`.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> mesh = flm.DeviceMesh("data=8")
        >>> layout = flm.TensorLayout(("data", None), mesh)
        >>> like = flm.relayout(jax.numpy.ones((8, 8)), layout)
        >>> y = flm.relayout_like(jax.numpy.ones((16, 4)), like, name="like_data")
        >>> flm.dtensor.fetch_layout(y)
        TensorLayout(('data', None), DeviceMesh('data=8'))

    Plain JAX: `jax.device_put(x, like.sharding)`.
    """
    if is_box(x):
        return jax.tree.map(lambda held: relayout_like(held, like, name=name), x)
    x, like = (as_array(unboxed(value), (), "relayout_like") for value in (x, like))
    what = f"relayout_like of an array {tuple(x.shape)} to one {tuple(like.shape)}"
    layout, mesh = known_layout(like), own_mesh(like) or own_mesh(x)
    if len(x.shape) != len(like.shape):
        raise LayoutError(f"{what}: they have different numbers of dims")
    if mesh is None:
        raise LayoutError(
            f"{what}: neither is on a mesh; pass a layout, "
            "flm.relayout(x, flm.TensorLayout(axes, mesh))"
        )
    with jax.named_scope(name or "relayout_like"):
        if layout is not None or not _is_unknown(like):
            layout = layout or TensorLayout((), mesh)
            return _relayout(x, layout, "input", "relayout_like")
        if not _can_follow(x, like):
            raise LayoutError(
                f"{what}, which is traced on Auto axes: it can only be followed by an "
                "array of its shape (keys by keys), outside of loops and shard_map; "
                "pass its layout, flm.relayout(x, layout); or read it outside of jit, "
                "flm.dtensor.fetch_layout(like); or use Explicit axes"
            )
        x = _alike.bind(x, x, is_forward=False, mesh=mesh.jax_mesh)
        return _alike.bind(x, like, is_forward=True, mesh=mesh.jax_mesh)


def _relayout(
    x: Any, layout: TensorLayout, gradient: Any, what: str, *, is_named: bool = False
) -> Any:
    before = None
    if isinstance(gradient, TensorLayout):
        before = wanted_layout(gradient, layout.device_mesh)
        checked_dims(before, x, "gradient= of relayout")
    elif _is_unknown(x) and not manual_axes():
        mesh: Any = layout.device_mesh
        x = _alike.bind(x, x, is_forward=False, mesh=mesh.jax_mesh)
    elif isinstance(x, Tracer):
        # Outside `jit`, `grad` traces an array with a known layout.
        before = known_layout(concrete(x))
    if before is not None and isinstance(x, Tracer):
        # The cotangent passes the two constraints in reverse order.
        x = distribute(x, before, what)
    return distribute(x, layout, what, is_named=is_named)


def _is_unknown(x: Any) -> bool:
    """Whether the compiler will choose the layout of a value."""
    return is_traced(x) and known_layout(x) is None


def _can_follow(x: Any, like: Any) -> bool:
    if manual_axes() or is_in_a_loop(x) or is_in_a_loop(like):
        return False
    keys = [jnp.issubdtype(value.dtype, jax.dtypes.prng_key) for value in (x, like)]
    return tuple(x.shape) == tuple(like.shape) and keys[0] == keys[1]


# ------------------------------------------------------ one array follows another

# Under `jit` on Auto axes the compiler chooses the sharding of a value later, but a
# sharding group of Shardy makes it choose the same sharding for two values. `_alike`
# returns `x`, in the sharding of `like` if `is_forward`; otherwise its cotangent gets
# that sharding. It is a primitive because `jax.custom_vjp` has no forward mode and
# `jax.custom_derivatives.linear_call` has no `vmap`.
_alike = Primitive("alike")

# A number for each group; jax.experimental.shard_alike counts from 0.
_GROUPS = itertools.count(2**32)


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    (x, like), tangent = primals, tangents[0]
    if jnp.issubdtype(x.dtype, jnp.inexact):
        tangent = _alike.bind(ad.instantiate_zeros(tangent), like, **params)
    return _alike.bind(x, like, **params), tangent


def _transpose(
    cotangent: Any, x: Any, like: Any, *, is_forward: bool, mesh: Any
) -> list[Any]:
    if not ad.is_undefined_primal(like):  # as in jax.linear_transpose
        cotangent = _alike.bind(cotangent, like, is_forward=not is_forward, mesh=mesh)
    return [cotangent, None]


def _batch(args: Any, dims: Any, **params: Any) -> tuple[Any, int]:
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    pairs = zip(args, dims, strict=True)
    moved = (batching.bdim_at_front(x, d, size) for x, d in pairs)
    return _alike.bind(*moved, **params), 0


def _lower(context: Any, x: Any, like: Any, *, is_forward: bool, mesh: Any) -> Any:
    if not is_forward:
        return [x]

    def gathered(x: Any, like: Any) -> Any:
        # A group is symmetric, so `x` must first accept any sharding; the barrier
        # keeps that constraint from spreading to `like`.
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))
        return jax.lax.optimization_barrier(x)

    (x,) = mlir.lower_fun(gathered, multiple_results=False)(context, x, like)
    group = next(_GROUPS)
    sdy.ShardingGroupOp(x, group)
    sdy.ShardingGroupOp(like, group)
    return [x]


_alike.def_impl(jax.jit(_alike.bind, static_argnames=("is_forward", "mesh")))
_alike.def_abstract_eval(lambda x, like, **params: x)
ad.primitive_jvps[_alike] = _jvp
ad.primitive_transposes[_alike] = _transpose
batching.primitive_batchers[_alike] = _batch
mlir.register_lowering(_alike, _lower, cacheable=False)  # each needs its group


# ------------------------------------------------- parts of devices, calls in a layout


def pack(components: Sequence[Any], layout: Any, *, check: bool = True) -> jax.Array:
    """Make one array from per-device parts.

    Args:
        components: one array per device of this process, in the order of the mesh
            (row-major), all of the same shape and dtype. Parts that are already on
            their device are not copied.
        layout: as for `flm.distribute_tensor`.
        check: whether to compare, bit by bit, parts that must be equal in this layout.
            This copies all of them to the host, and compares only this process's parts.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> layout = flm.TensorLayout(("data",), flm.DeviceMesh("data=8"))
        >>> x = flm.dtensor.pack([jax.numpy.full(2, n) for n in range(8)], layout)
        >>> x.shape, int(x[5])
        ((16,), 2)

    Plain JAX: `jax.make_array_from_single_device_arrays(shape, sharding, parts)`.
    """
    layout = wanted_layout(layout)
    mesh = layout._some_mesh()
    devices = _local_devices(mesh)
    parts = [as_array(unboxed(part), (), "pack") for part in components]
    if len(parts) != len(devices):
        raise LayoutError(
            f"pack takes a part for each device of {mesh!r} in this process, "
            f"{len(devices)}, got {len(parts)}"
        )
    dims = layout.dims(parts[0].ndim)
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
    """The part of an array on each device of this process, in the order of the mesh.

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


def _local_devices(mesh: Any) -> list[Any]:
    """The mesh's devices of this process, in the order of the mesh."""
    here = jax.process_index()
    return [device for device in mesh.devices.flat if device.process_index == here]


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

    For arrays that are made once, by `jnp.zeros` or an initialiser: the function is
    compiled at every call. On Auto axes no device then holds more than its part.

    Args:
        fn: the function.
        layout: the layout of every result, as for `flm.distribute_tensor`; None: just
            call `fn`.
        args: passed to `fn`. Arrays are traced, everything else is constant.
        kwargs: passed to `fn` in the same way.

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
    arrays = [x if isinstance(x, jax.Array | np.ndarray) else None for x in leaves]

    def call(arrays: Sequence[Any]) -> Any:
        pairs = zip(arrays, leaves, strict=True)
        filled = [leaf if array is None else array for array, leaf in pairs]
        traced_args, traced_kwargs = treedef.unflatten(filled)
        return jax.tree.map(
            lambda x: distribute(as_array(x, (), what), layout, what),
            fn(*traced_args, **traced_kwargs),
        )

    if not is_eager():
        return call(arrays)
    mesh = layout._some_mesh()
    bare: Any = mesh.jax_mesh
    _ = mesh.devices  # raises for an abstract mesh
    # On Explicit axes, constants need a mesh in the context.
    with jax.set_mesh(bare) if explicit_axes(mesh) else nullcontext():
        return jax.jit(call)(arrays)
