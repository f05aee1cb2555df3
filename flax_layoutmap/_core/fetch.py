"""Read the layout of an array, and whether it is traced."""

import functools
from typing import Any

import jax
from flax import nnx
from flax.core.meta import AxisMetadata
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding

from flax_layoutmap._core.axes import dim_axes, normal_spec
from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._core.jax_internals import concrete_value
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import DeviceMesh

_NUMBERS = bool | int | float | complex


def fetch_layout(x: Any) -> TensorLayout | None:
    """Return the layout of an array (or of what a Variable or Linen box holds).

    Returns None for a Python number or None. Raises LayoutError for a value that is not
    on a mesh, and inside `jit` for a value on Auto axes, whose layout is not known yet
    (JAX shows it as replicated).

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> mesh = flm.DeviceMesh("data=2,model=4")
        >>> layout = flm.TensorLayout(("data", None), mesh)
        >>> x = flm.relayout(jax.numpy.ones((8, 8)), layout)
        >>> flm.dtensor.fetch_layout(x)
        TensorLayout(('data', None), DeviceMesh('data=2,model=4'))

    Plain JAX: `x.sharding`; `jax.typeof(x).sharding` for a value on Explicit axes.
    """
    x = unboxed(x)
    if x is None or isinstance(x, _NUMBERS):
        return None
    layout = known_layout(x)
    if layout is None:
        raise LayoutError(f"fetch_layout of {_unknown(x)}")
    return layout


def is_distributed(x: Any) -> bool:
    """Return whether a value is an array on a mesh, even of one device.

    Raises LayoutError inside `jit` for a value on Auto axes, where it is not known.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> flm.dtensor.is_distributed(jax.numpy.ones(8))
        False

    Plain JAX: `isinstance(x.sharding, jax.sharding.NamedSharding)`.
    """
    x = unboxed(x)
    layout = known_layout(x)
    if layout is None and is_traced(x):
        raise LayoutError(f"is_distributed of {_unknown(x)}")
    return layout is not None


def check_layout(x: Any, layout: Any) -> None:
    """Raise LayoutError if an array does not have this layout.

    Only the dims are compared if `layout` has no mesh, and everything but the devices
    if its mesh is abstract.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> layout = flm.TensorLayout(("data",), flm.DeviceMesh("data=8"))
        >>> flm.dtensor.check_layout(flm.relayout(jax.numpy.ones(8), layout), layout)

    Plain JAX: `assert x.sharding.is_equivalent_to(sharding, x.ndim)`.
    """
    wanted, actual = TensorLayout(layout), fetch_layout(x)
    if actual is None:
        raise LayoutError(f"check_layout takes an array, got {x!r}")
    ndim = len(unboxed(x).shape)
    same = wanted.rank in (None, ndim)
    if same:
        wanted = wanted.matched(actual.dims(ndim))
        same = wanted.dims(ndim) == actual.dims(ndim)
        if wanted.device_mesh is not None:
            same = wanted.equivalent(actual, ndim)
    if not same:
        raise LayoutError(
            f"an array {unboxed(x).shape} has the layout {actual!r}, not {wanted!r}; "
            "flm.relayout(x, layout) moves it"
        )


def known_layout(x: Any) -> TensorLayout | None:
    """The layout of an array on a mesh; None if it has none or it is unknown.

    It is known for arrays, for traced values on Explicit axes, and for values that are
    differentiated outside of `jit`, whose tracer holds the array.
    """
    if is_traced(x):
        sharding = jax.typeof(x).sharding
        if {*sharding.mesh.axis_types} != {AxisType.Explicit}:
            return None
    else:
        sharding = getattr(concrete(x), "sharding", getattr(x, "sharding", None))
    if not isinstance(sharding, NamedSharding):
        return None
    layout = TensorLayout(sharding)
    dims, mesh = layout.dims(len(x.shape)), layout.device_mesh
    if not dims:
        return TensorLayout.replicated(mesh, 0)
    return TensorLayout(dims, mesh, memory_kind=layout.memory_kind)


def own_mesh(x: Any) -> DeviceMesh | None:
    """The mesh of an array or a traced value; None if it has none."""
    known = known_layout(x)
    if known is not None:
        return known.device_mesh
    if is_traced(x):
        mesh = jax.typeof(x).sharding.mesh
        return DeviceMesh(mesh) if mesh.axis_names else None
    return None


def own_sharding(leaf: Any) -> NamedSharding | None:
    """The sharding of an array on a mesh of devices; None for anything else."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return normal_sharding(sharding)
    return None


@functools.lru_cache(maxsize=256)
def normal_sharding(sharding: NamedSharding) -> NamedSharding:
    """The sharding with its spec in normal form."""
    spec = normal_spec([dim_axes(entry) for entry in sharding.spec])
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def concrete(x: Any) -> Any:
    """The array itself, or the array in a tracer of differentiation; else None."""
    if isinstance(x, Tracer):
        return concrete_value(x)
    return x if isinstance(x, jax.Array) else None


def is_traced(x: Any) -> bool:
    """Whether a value is traced and holds no array, so that its devices are unknown."""
    return isinstance(x, Tracer) and concrete(x) is None


def is_eager() -> bool:
    """Whether this runs outside of `jit` and loops (`grad` and `vmap` do not count).

    A constant in `jit` is not a tracer, but the result of an operation is, even without
    arguments.
    """
    return not isinstance(jax.lax.full((), 0), Tracer)


def unboxed(x: Any) -> Any:
    """The value in a Variable or a Linen box; anything else unchanged."""
    while is_box(x):
        if isinstance(x, nnx.Variable):
            x = x.get_value()
        else:
            # `unbox()` of Linen's own boxes would move the value.
            x = x.value if hasattr(x, "value") else x.unbox()
    return x


def is_box(x: Any) -> bool:
    return isinstance(x, nnx.Variable | AxisMetadata)


def _unknown(x: Any) -> str:
    """Explain why a value has no known layout, and what to do."""
    if is_traced(x):
        return (
            f"a traced value {x.shape}: on Auto axes the compiler chooses its layout "
            "later; fix it, x = flm.relayout(x, layout), and use that layout; or read "
            "it outside of jit; or use Explicit axes, flm.DeviceMesh(..., "
            'axis_types="explicit"), and flm.jit(..., explicit=True)'
        )
    return (
        f"a {type(x).__name__}, which is not an array on a mesh; "
        "flm.relayout(x, layout) puts an array on a mesh"
    )
