"""DTensor's `relayout`, `relayout_like` and `copy_to_mesh`."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import sdy
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._core.fetch import (
    concrete,
    is_box,
    is_traced,
    known_layout,
    own_mesh,
    unboxed,
)
from flax_layoutmap._core.jax_internals import is_in_a_loop
from flax_layoutmap._core.layout import TensorLayout
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

    As `flm.distribute_tensor`, but the cotangent gets the layout of the forward input,
    at every order of differentiation. Under `jit` on Auto axes a value has no layout to
    read; there, `gradient` chooses:

    - `"input"`: the sharding that the compiler gives `x`. It is exact where the layout
      of `x` is fixed (an argument of `jit`, the result of another relayout), and any
      elsewhere. `x` is kept until the backward pass, where every device gathers the
      whole cotangent.
    - a layout: that of `x`, which is fixed too. It is exact, and nothing is kept or
      gathered: use it for large activations.
    - `"output"`: the layout of the result, as JAX's own constraint does.

    Args:
        x: an array, a traced value, or a tree of them; None leaves stay None.
        layout: as for `distribute_tensor`; the last choice for the mesh is that of `x`.
            A mesh keeps the dims, and moves them to that mesh; an array on no mesh is
            replicated there.
        gradient: `"input"`, `"output"`, or the layout that `x` has.
        name: shown in profiles, as by `jax.named_scope`.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> mesh = flm.DeviceMesh("data=2,model=4")
        >>> x = flm.relayout(jax.numpy.ones((8, 8)), mesh)
        >>> x = flm.relayout(x, ("data", None))
        >>> x = flm.relayout(x, (flm.TensorLayout.MATCH, "model"))
        >>> tuple(x.sharding.spec)
        ('data', 'model')

    Plain JAX: as of `flm.distribute_tensor`; twice, to fix the input's layout too.
    """
    if not isinstance(gradient, str):
        gradient = TensorLayout(gradient)
    elif gradient not in ("input", "output"):
        raise LayoutError(
            f"gradient={gradient!r}: use 'input', 'output', or the layout that the "
            "array has"
        )
    is_mesh = isinstance(layout, DeviceMesh | Mesh | AbstractMesh)
    is_named = isinstance(layout, str)
    what = f"relayout(x, {layout!r})" if is_named else "relayout"

    def move(keys: Any, leaf: Any) -> Any:
        leaf = as_array(leaf, keys, "relayout")
        if is_mesh:
            wanted = _kept_dims(leaf, DeviceMesh(layout))
        else:
            wanted = wanted_layout(layout, own_mesh(leaf))
        return _relayout(leaf, wanted, gradient, what, is_named=is_named)

    with jax.named_scope(name or "relayout"):
        return jax.tree_util.tree_map_with_path(move, x, is_leaf=is_nnx_object)


def relayout_like(x: Any, like: Any, *, name: str | None = None) -> Any:
    """Give an array the mesh and layout of another; gradients keep its own.

    `like` may have any shape of the same rank; if it is on no mesh, `x` is replicated
    on its own. Under `jit` on Auto axes a traced `like` has no layout to read, so both
    are constrained alike: they have one shape, each device gathers `x`, and both are
    kept until the backward pass. That is exact where their layouts are fixed, as those
    of arguments are. It raises in the body of a loop, where the layout of the carry
    would be mixed in.

    Args:
        x: an array or a traced value; an `nnx.Variable` or a Linen box too.
        like: the array to follow, or a Variable or box. It gets no gradient.
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
            return _relayout(
                x, layout or TensorLayout((), mesh), "input", "relayout_like"
            )
        if why := _why_not_alike(x, like, mesh):
            raise LayoutError(
                f"{what}, which is traced on Auto axes, {why}; pass its layout, "
                "flm.relayout(x, layout); or read it outside of jit, "
                "flm.dtensor.fetch_layout(like); or use Explicit axes"
            )
        x = _alike.bind(x, x, is_forward=False, mesh=mesh.jax_mesh)
        return _alike.bind(x, like, is_forward=True, mesh=mesh.jax_mesh)


def copy_to_mesh(x: Any, layout: Any) -> Any:
    """Copy arrays to another mesh, or to a layout on it; see `flm.relayout`.

    >>> import jax.numpy as jnp, flax_layoutmap as flm
    >>> x = flm.dtensor.copy_to_mesh(jnp.ones((8, 4)), flm.DeviceMesh("data=8"))
    >>> x.sharding.is_fully_replicated
    True
    """
    return relayout(x, layout)


def _is_unknown(x: Any) -> bool:
    """Whether the compiler will choose the layout of a value."""
    return is_traced(x) and known_layout(x) is None


def _kept_dims(x: Any, mesh: DeviceMesh) -> TensorLayout:
    if _is_unknown(x):
        raise LayoutError(
            f"relayout of a traced array {tuple(x.shape)} to the mesh {mesh!r} keeps "
            "its layout, but on Auto axes the compiler chooses that later; pass the "
            "layout, flm.TensorLayout(axes, mesh)"
        )
    return (known_layout(x) or TensorLayout(())).on(mesh)


def _relayout(
    x: Any, layout: TensorLayout, gradient: Any, what: str, *, is_named: bool = False
) -> Any:
    before = None
    if isinstance(gradient, TensorLayout):
        before = wanted_layout(gradient, layout.device_mesh)
        checked_dims(before, x, "gradient= of relayout")
    elif gradient == "input" and _is_unknown(x) and not _inside_shard_map():
        mesh: Any = layout.device_mesh
        x = _alike.bind(x, x, is_forward=False, mesh=mesh.jax_mesh)
    elif gradient == "input" and isinstance(x, Tracer):
        # Outside of jit, `grad` traces an array of a known layout.
        before = known_layout(concrete(x))
    if before is not None and isinstance(x, Tracer):
        # The cotangent passes the two constraints in the other order.
        x = distribute(x, before, what)
    return distribute(x, layout, what, is_named=is_named)


def _inside_shard_map() -> bool:
    return bool(manual_axes(jax.sharding.get_abstract_mesh()))


def _why_not_alike(x: Any, like: Any, mesh: DeviceMesh) -> str:
    keys = [jnp.issubdtype(value.dtype, jax.dtypes.prng_key) for value in (x, like)]
    if _inside_shard_map():
        return "cannot be followed in shard_map"
    if is_in_a_loop(x) or is_in_a_loop(like):
        return "cannot be followed in the body of a loop"
    if explicit_axes(mesh):
        return f"cannot be followed on a mesh with Explicit axes too, {mesh!r}"
    if tuple(x.shape) != tuple(like.shape) or keys[0] != keys[1]:
        return "can only be followed by an array of its shape, PRNG keys by keys"
    return ""


# ------------------------------------------------------ one array follows another

# Under `jit` on Auto axes the compiler chooses the sharding of a value later. What can
# be said is that two values have the same one, by a sharding group of Shardy. `_alike`
# returns `x`, in the sharding of `like` if `is_forward`; otherwise its cotangent has
# that sharding. It is a primitive, since nothing smaller has forward and reverse mode,
# higher orders and `vmap`: `jax.custom_vjp` has no forward mode, and
# `jax.custom_derivatives.linear_call` no `vmap`.
_alike = Primitive("alike")

# A number for each group; JAX's own (jax.experimental.shard_alike) count from 0.
_GROUPS = itertools.count(2**32)

_compiled = jax.jit(_alike.bind, static_argnames=("is_forward", "mesh"))


def _eager(x: Any, like: Any, **params: Any) -> Any:
    return _compiled(x, like, **params) if params["is_forward"] else x


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
    args = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for x, d in zip(args, dims, strict=True)
    ]
    return _alike.bind(*args, **params), 0


def _lower(context: Any, x: Any, like: Any, *, is_forward: bool, mesh: Any) -> Any:
    if not is_forward:
        return [x]

    def gathered(x: Any, like: Any) -> Any:
        # A group is symmetric, so an `x` in any sharding must come first; the barrier
        # keeps that constraint from spreading to `like`.
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))
        return jax.lax.optimization_barrier(x)

    (x,) = mlir.lower_fun(gathered, multiple_results=False)(context, x, like)
    group = next(_GROUPS)
    sdy.ShardingGroupOp(x, group)
    sdy.ShardingGroupOp(like, group)
    return [x]


_alike.def_impl(_eager)
_alike.def_abstract_eval(lambda x, like, **params: x)
ad.primitive_jvps[_alike] = _jvp
ad.primitive_transposes[_alike] = _transpose
batching.primitive_batchers[_alike] = _batch
mlir.register_lowering(_alike, _lower, cacheable=False)  # a group for each
