"""Change the layout of arrays; gradients return in the original layout.

DTensor's `relayout`, `relayout_like` and `copy_to_mesh`.
"""

import contextlib
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import sdy
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from flax_layoutmap._core.axes import dim_axes
from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._core.fetch import (
    concrete,
    is_box,
    known_layout,
    own_mesh,
    unboxed,
)
from flax_layoutmap._core.jax_internals import is_in_a_loop
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._place.place import (
    as_array,
    check_same_devices,
    checked_dims,
    distribute,
    explicit_axes,
    manual_axes,
    mesh_of,
    move,
    wanted_layout,
)
from flax_layoutmap._tree.flax_internals import is_nnx_object

_MESHES = DeviceMesh | Mesh | AbstractMesh


def relayout(
    x: Any, layout: Any, *, gradient: Any = "input", name: str | None = None
) -> Any:
    """Give an array another layout; its gradient has the original layout.

    As `flm.distribute_tensor`, but the cotangent gets the layout of the forward input,
    at every order of differentiation. Outside of `jit`, and on Explicit axes, that is
    always so (except for an uncommitted array, whose gradient has the layout of the
    result). Under `jit` on Auto axes a value has no layout to read, and JAX's own
    constraint gives the cotangent the layout of the result. There, `gradient` chooses:

    - `"input"`: the cotangent is constrained to the sharding of `x`. It is exact where
      the layout of `x` is fixed (an argument of `jit`, the result of another relayout).
      Otherwise, as in the body of a `scan` or `jax.checkpoint`, or in a function under
      `jax.jit` that another one calls several times, the compiler chooses one for `x`,
      and possibly another for the gradient. `x` is kept until the backward pass, where
      every device gathers the whole cotangent.
    - a layout: that of `x`, which is fixed too. It is exact, `x` is not kept, and
      nothing is gathered: use it for large activations. (The carry of a `scan` has its
      own layout, whatever is set inside.)
    - `"output"`: the behaviour of JAX. On Auto axes only.

    Args:
        x: an array, a traced value, or a tree of them; None leaves stay None.
        layout: anything that `TensorLayout` takes, or a name, as for
            `distribute_tensor`; the last choice for the mesh is that of `x`.
            `TensorLayout.MATCH` keeps the axes of a dim. A mesh keeps the dims, and
            moves them to that mesh; an array on no mesh is replicated there.
        gradient: `"input"`, `"output"`, or the layout that `x` has.
        name: shown in profiles, as by `jax.named_scope`.

    Returns:
        The array (or tree) with that layout; the same object where it has it already.

    Raises:
        LayoutError: another rank, a dim that does not divide, not an array, or an
            unknown layout that should be kept.
        MeshError: no mesh, or one without devices; in a trace, one with another number
            of devices (as for `distribute_tensor`).
        RuleError: no such name or axis.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> mesh = flm.DeviceMesh("data=2,model=4")
        >>> x = flm.relayout(jax.numpy.ones((8, 8)), mesh)
        >>> x = flm.relayout(x, ("data", None))
        >>> x = flm.relayout(x, (flm.TensorLayout.MATCH, "model"))
        >>> tuple(x.sharding.spec)
        ('data', 'model')

    Plain JAX: `jax.device_put(x, s)`, `jax.sharding.reshard(x, s)`, or
    `jax.lax.with_sharding_constraint(x, s)`, twice to fix the input's layout too.
    """
    _check_gradient(gradient)

    def moved(keys: Any, leaf: Any) -> Any:
        leaf = as_array(leaf, keys, "relayout")
        if isinstance(layout, _MESHES):
            wanted = _on_mesh(leaf, DeviceMesh(layout))
        else:
            wanted = wanted_layout(layout, own_mesh(leaf))
        return _relayout(leaf, wanted, gradient)

    with _named(name):
        return jax.tree_util.tree_map_with_path(moved, x, is_leaf=is_nnx_object)


def relayout_like(x: Any, like: Any, *, name: str | None = None) -> Any:
    """Give an array the mesh and layout of another; gradients keep its own.

    Where the layout of `like` is known (an array, one closed over, a value on Explicit
    axes), `like` may have any shape of the same rank and any dtype. If it is on no
    mesh, `x` is replicated on its own mesh.

    Under `jit` on Auto axes a traced `like` has no layout to read, so both are
    constrained alike. That costs a gather, forward and backward, and both are kept
    until the backward pass. It is exact where the layouts of both are fixed, as those
    of arguments are; for other values, and in a function under `jax.jit` that another
    one calls several times, the compiler may choose any layout. In the body of a loop
    (`scan`, `while_loop`) it raises, as the layout of the carry would be mixed in:
    there, pass the layout, `flm.relayout(x, layout)`.

    Args:
        x: an array or a traced value; an `nnx.Variable` or a Linen box too.
        like: the array to follow, or a Variable or box. It gets no gradient.
        name: shown in profiles, as by `jax.named_scope`.

    Returns:
        The array with that layout; of a Variable or box, a new one that holds it.

    Raises:
        LayoutError: another rank; a dim that does not divide; neither is on a mesh;
            or a traced `like` on Auto axes that has another shape, or is inside
            a loop or `shard_map`, or on a mesh with Explicit axes too.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> mesh = flm.DeviceMesh("data=8")
        >>> layout = flm.TensorLayout(("data", None), mesh)
        >>> like = flm.relayout(jax.numpy.ones((8, 8)), layout)
        >>> y = flm.relayout_like(jax.numpy.ones((16, 4)), like, name="like_data")
        >>> flm.dtensor.fetch_layout(y)
        TensorLayout(('data', None), DeviceMesh('data=8'))

    Plain JAX: `jax.device_put(x, like.sharding)`;
    `jax.sharding.reshard(x, jax.typeof(like).sharding)` on Explicit axes.
    """
    if is_box(x):
        return jax.tree.map(lambda held: relayout_like(held, like, name=name), x)
    x, like = (as_array(unboxed(each), (), "relayout_like") for each in (x, like))
    if len(x.shape) != len(like.shape):
        raise LayoutError(
            f"relayout_like of an array {tuple(x.shape)}: the other one, "
            f"{tuple(like.shape)}, has {len(like.shape)} dims, not {len(x.shape)}"
        )
    with _named(name):
        layout = known_layout(like)
        if layout is not None:
            return _relayout(x, layout, "input", "relayout_like")
        if isinstance(like, Tracer) and concrete(like) is None:
            return _like_traced(x, like)
        mesh = own_mesh(x)
        if mesh is None:
            raise _no_mesh(x, like)
        return _relayout(x, TensorLayout((), mesh), "input", "relayout_like")


def copy_to_mesh(x: Any, layout: Any) -> Any:
    """Copy arrays to another mesh; DTensor's older name for `relayout`.

    Args:
        x: an array, or a tree of them.
        layout: a mesh, which keeps the dims; or a layout on it.

    Returns:
        The arrays there. Gradients come back to the mesh of `x`.

    Raises:
        LayoutError: as `relayout`.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> x = flm.dtensor.copy_to_mesh(jax.numpy.ones(8), flm.DeviceMesh("data=8"))
        >>> x.sharding.is_fully_replicated
        True

    Plain JAX: `jax.device_put(x, NamedSharding(mesh, x.sharding.spec))`.
    """
    return relayout(x, layout)


def _check_gradient(gradient: Any) -> None:
    if not isinstance(gradient, str):
        TensorLayout(gradient)
    elif gradient not in ("input", "output"):
        raise LayoutError(
            f"gradient={gradient!r}: use 'input', 'output', or the layout that the "
            "array has"
        )


def _named(name: str | None) -> Any:
    return contextlib.nullcontext() if name is None else jax.named_scope(name)


def _on_mesh(x: Any, mesh: DeviceMesh) -> TensorLayout:
    """The layout of an array, on another mesh."""
    known = known_layout(x)
    if known is not None:
        return known.on(mesh)
    if isinstance(x, Tracer) and concrete(x) is None:
        raise LayoutError(
            f"relayout of a traced array {tuple(x.shape)} to the mesh {mesh!r} keeps "
            "its layout, but on Auto axes the compiler chooses that later; pass the "
            "layout, flm.TensorLayout(axes, mesh)"
        )
    return TensorLayout((), mesh)


def _relayout(
    x: Any, layout: TensorLayout, gradient: Any, what: str = "relayout"
) -> Any:
    given = None
    if not isinstance(gradient, str):
        given = wanted_layout(gradient, layout.device_mesh)
    if not isinstance(x, Tracer):
        if given is not None:
            checked_dims(given, x, f"gradient= of {what}")
        return distribute(x, layout, what=what)
    if given is not None:
        x, gradient = _relayout(x, given, "output", what), "output"
    array = concrete(x)
    if array is not None and own_mesh(x) != layout.device_mesh and _committed(array):
        # A tracer of `jax.grad` outside of jit: device_put is differentiable.
        return move(x, layout, checked_dims(layout, x, what))
    known = known_layout(x)
    if array is not None and known is not None and gradient == "input":
        # Two constraints, since the cotangent passes them in the other order.
        x, gradient = distribute(x, known, what=what), "output"
    inside_manual = bool(manual_axes(jax.sharding.get_abstract_mesh()))
    # On Explicit axes JAX's own reshard does the same.
    own = gradient == "output" or inside_manual
    own = own or array is not None or known is not None
    pin: Any = jax.lax.with_sharding_constraint if own else constrained
    if layout.has_match and known is None:
        return _keeping(x, layout, pin, what)
    return distribute(x, layout, what=what, pin=pin)


def _committed(array: Any) -> bool:
    """Whether an array is to stay on its devices; under `grad` it may be NumPy's."""
    return bool(getattr(array, "committed", False))


def _keeping(x: Any, layout: TensorLayout, pin: Any, what: str) -> Any:
    """A constraint on Auto axes that leaves the `MATCH` dims unconstrained."""
    if explicit_axes(mesh_of(layout)):
        raise LayoutError(
            f"{what} of a traced array {tuple(x.shape)} to {layout}: on a mesh with "
            f"Auto and Explicit axes, {mesh_of(layout)!r}, it is unknown what a "
            "MATCH dim has; name its axes"
        )
    check_same_devices(x, mesh_of(layout), what)
    ndim = len(x.shape)
    checked_dims(layout.matched(((),) * ndim), x, what)
    axes = layout.axes
    if ... in axes:
        at = axes.index(...)
        axes = (*axes[:at], *(None,) * (ndim - len(axes) + 1), *axes[at + 1 :])
    free = PartitionSpec.UNCONSTRAINED
    entries = [free if d == TensorLayout.MATCH else dim_axes(d) for d in axes]
    return pin(x, NamedSharding(mesh_of(layout).jax_mesh, PartitionSpec(*entries)))


def _like_traced(x: Any, like: Any) -> Any:
    """`x` with the sharding of a traced value on Auto axes."""
    ways = (
        "pass its layout, flm.relayout(x, layout); or read it outside of jit, "
        "flm.dtensor.fetch_layout(like); or use Explicit axes"
    )
    what = f"relayout_like of an array {tuple(x.shape)} to a traced {tuple(like.shape)}"
    if manual_axes(jax.sharding.get_abstract_mesh()):
        raise LayoutError(f"{what} in shard_map, where its layout is unknown; {ways}")
    if is_in_a_loop(x) or is_in_a_loop(like):
        raise LayoutError(
            f"{what} in the body of a loop: the layout that the carry has would be "
            f"mixed in; {ways}"
        )
    mesh = own_mesh(like) or own_mesh(x)
    if mesh is None:
        raise _no_mesh(x, like)
    if explicit_axes(mesh):
        raise LayoutError(
            f"{what} on a mesh with Auto and Explicit axes, {mesh!r}: only a part of "
            f"its layout is known; {ways}"
        )
    key = jax.dtypes.prng_key
    kinds = [jax.numpy.issubdtype(value.dtype, key) for value in (x, like)]
    if tuple(x.shape) != tuple(like.shape) or kinds[0] != kinds[1]:
        raise LayoutError(
            f"{what}: on Auto axes only an array of the same shape can follow it, and "
            f"no PRNG key another array; {ways}"
        )
    return alike(x, like, mesh.jax_mesh)


def _no_mesh(x: Any, like: Any) -> LayoutError:
    return LayoutError(
        f"relayout_like of an array {tuple(x.shape)} to one {tuple(like.shape)}: "
        "neither is on a mesh; pass a layout, "
        "flm.relayout(x, flm.TensorLayout(axes, mesh))"
    )


# -------------------------------------------- constraints that follow another array

# Under `jit` on Auto axes a traced value has no sharding to read: the compiler chooses
# it later. What can be expressed is that two values have the same sharding, by a
# sharding group of Shardy: a cotangent that of the forward input, or one array that of
# another. It is a primitive of JAX, since nothing smaller supports forward and reverse
# mode, higher orders and `vmap`: `custom_vjp` has no forward mode, and
# `custom_derivatives.linear_call` no `vmap`.


# A number for each lowered pair: those of one number share one sharding. JAX itself
# counts from 0 (`jax.experimental.shard_alike`, up to 0.11.1).
_GROUPS = itertools.count(2**32)


def constrained(x: Any, sharding: NamedSharding) -> Any:
    """A sharding constraint whose cotangent has the sharding of `x`.

    `x` is kept until the backward pass, as a reference for its sharding, and the
    cotangent is gathered there. `sharding` is on Auto axes; dims may be unconstrained.

    Plain JAX: `jax.lax.with_sharding_constraint(x, sharding)`, whose cotangent has
    the sharding of the result.
    """
    if jnp.issubdtype(x.dtype, jnp.inexact):
        x = _constraint.bind(x, x, there=sharding, back=None, mesh=sharding.mesh)
    # JAX finds the devices of a program in its own constraints only, and this one
    # applies the `spmd_axis_name` of `jax.vmap`.
    return jax.lax.with_sharding_constraint(x, sharding)


def alike(x: Any, like: Any, mesh: Any) -> Any:
    """`x` in the sharding of `like` on Auto axes; its cotangent in that of `x`."""
    return _constraint.bind(x, like, x, there=None, back=None, mesh=mesh)


def _follow(x: Any, like: Any, mesh: Any) -> Any:
    # A group is symmetric: an x in any sharding must come first. The barrier keeps
    # that constraint from spreading to `like`.
    x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))
    return _grouped.bind(jax.lax.optimization_barrier(x), like)


def _lower_grouped(context: Any, x: Any, like: Any) -> list[Any]:
    group = next(_GROUPS)
    sdy.ShardingGroupOp(x, group)
    sdy.ShardingGroupOp(like, group)
    return [x]


# The first operand, in one sharding with the second.
_grouped = Primitive("share_sharding")
_grouped.def_abstract_eval(lambda x, like: x)
mlir.register_lowering(_grouped, _lower_grouped, cacheable=False)


def _value(x: Any, *leaders: Any, there: Any, back: Any, mesh: Any) -> Any:
    """The primitive's computation: constrain x to `there`, or as its leader is."""
    if there is None:
        return _follow(x, leaders[0], mesh)
    return jax.lax.with_sharding_constraint(x, there)


def _eager(x: Any, *leaders: Any, **params: Any) -> Any:
    return _compiled(**params)(x, *leaders)


@functools.lru_cache(maxsize=256)
def _compiled(**params: Any) -> Any:
    return jax.jit(functools.partial(_value, **params))


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    x, *leaders = primals
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return _constraint.bind(x, *leaders, **params), tangents[0]
    tangent = ad.instantiate_zeros(tangents[0])
    moved = [_constraint.bind(value, *leaders, **params) for value in (x, tangent)]
    return moved[0], moved[1]


def _transpose(
    cotangent: Any, x: Any, *leaders: Any, there: Any, back: Any, mesh: Any
) -> list[Any]:
    nothing = [None] * len(leaders)
    if any(ad.is_undefined_primal(leader) for leader in leaders):
        # jax.linear_transpose of a bare relayout: there is no value to follow.
        return [cotangent, *nothing]
    back_again = _constraint.bind(
        cotangent, *reversed(leaders), there=back, back=there, mesh=mesh
    )
    return [back_again, *nothing]


def _batch(args: Any, at: Any, *, there: Any, back: Any, mesh: Any) -> tuple[Any, int]:
    """The batch dim goes first, unconstrained."""
    size = next(a.shape[d] for a, d in zip(args, at, strict=True) if d is not None)
    args = [
        jnp.broadcast_to(a, (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0)
        for a, d in zip(args, at, strict=True)
    ]
    there, back = _with_free_dim(there), _with_free_dim(back)
    return _constraint.bind(*args, there=there, back=back, mesh=mesh), 0


def _with_free_dim(sharding: NamedSharding | None) -> NamedSharding | None:
    if sharding is None:
        return None
    spec = PartitionSpec(PartitionSpec.UNCONSTRAINED, *sharding.spec)
    return NamedSharding(sharding.mesh, spec)


# The leaders are the arrays to follow, forward and backward, without a sharding.
_constraint = Primitive("relayout")
_constraint.def_impl(_eager)
_constraint.def_abstract_eval(lambda x, *leaders, **params: x)
ad.primitive_jvps[_constraint] = _jvp
ad.primitive_transposes[_constraint] = _transpose
batching.primitive_batchers[_constraint] = _batch
mlir.register_lowering(
    _constraint,
    mlir.lower_fun(_value, multiple_results=False),
    cacheable=False,  # so that each has its own number
)
