"""Read the layout of an array, and whether it is traced."""

import functools
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.core.meta import AxisMetadata
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding

from flax_layoutmap._core.axes import dim_axes, normal_spec
from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._core.jax_internals import concrete_value
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._core.mesh import DeviceMesh

_NUMBERS = bool | int | float | complex


def fetch_layout(x: Any) -> TensorLayout | None:
    """Return the layout of an array: its mesh, and the axes of each dim.

    Reads what is there and moves nothing.

    Args:
        x: an array on a mesh; an `nnx.Variable` or a Linen box, which hold one; a
            traced value whose mesh has Explicit axes only; an abstract
            `jax.ShapeDtypeStruct` with a sharding.

    Returns:
        The layout, with one entry per dim; None for a Python number or None.

    Raises:
        LayoutError: an array on no mesh; or a value of `jit` on Auto axes, which has no
            layout that could be read (JAX shows it as if it were replicated).

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> mesh = flm.DeviceMesh("data=2,model=4")
        >>> layout = flm.TensorLayout(("data", None), mesh)
        >>> x = flm.relayout(jax.numpy.ones((8, 8)), layout)
        >>> flm.dtensor.fetch_layout(x)
        TensorLayout(('data', None), DeviceMesh('data=2,model=4'))

    Plain JAX: `x.sharding` of an array; `jax.typeof(x).sharding` of a value on Explicit
    axes.
    """
    x = unboxed(x)
    if x is None or isinstance(x, _NUMBERS):
        return None
    found = known_layout(x)
    if found is None:
        raise LayoutError(f"fetch_layout of {_unknown(x)}")
    return found


def is_distributed(x: Any) -> bool:
    """Return whether a value is an array on a mesh, even of one device.

    Args:
        x: anything; an `nnx.Variable` or a Linen box stands for what it holds.

    Raises:
        LayoutError: a value of `jit` on Auto axes, where that is unknown.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> flm.dtensor.is_distributed(jax.numpy.ones(8))
        False

    Plain JAX: `isinstance(x.sharding, jax.sharding.NamedSharding)`.
    """
    x = unboxed(x)
    found = known_layout(x)
    if found is None and isinstance(x, Tracer) and concrete(x) is None:
        raise LayoutError(f"is_distributed of {_unknown(x)}")
    return found is not None


def check_layout(x: Any, layout: Any) -> None:
    """Raise if an array does not have this layout.

    Args:
        x: what `fetch_layout` takes, or a tree of arrays.
        layout: anything that `TensorLayout` takes; without a mesh, only the dims are
            compared. Meshes are equal when axes, sizes and devices are; an abstract one
            has no devices to compare.

    Raises:
        LayoutError: another layout, or none; or no array at all.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> layout = flm.TensorLayout(("data",), flm.DeviceMesh("data=8"))
        >>> flm.dtensor.check_layout(flm.relayout(jax.numpy.ones(8), layout), layout)

    Plain JAX: `assert x.sharding.is_equivalent_to(sharding, x.ndim)`.
    """
    wanted = TensorLayout(layout)
    leaves = jax.tree.leaves_with_path(x, is_leaf=is_box)
    if not leaves:
        raise LayoutError(f"check_layout takes arrays, and there is none in {x!r}")
    for keys, leaf in leaves:
        found = fetch_layout(leaf)
        if found is None:
            raise LayoutError(f"check_layout takes arrays, got {leaf!r}")
        ndim = len(found.axes) if found.rank is not None else 0
        if not _same(found, wanted, ndim):
            where = f" at {jax.tree_util.keystr(keys)}" if keys else ""
            raise LayoutError(
                f"an array {unboxed(leaf).shape}{where} has the layout {found!r}, not "
                f"{wanted!r}; flm.relayout(x, layout) moves it"
            )


def _same(found: TensorLayout, wanted: TensorLayout, ndim: int) -> bool:
    if wanted.device_mesh is None:
        wanted = wanted.matched(found.dims(ndim))
        return wanted.rank in (None, ndim) and found.dims(ndim) == wanted.dims(ndim)
    mine, yours = found.device_mesh, wanted.device_mesh
    assert mine is not None  # known_layout reads it off a mesh
    if not mine.is_abstract and not yours.is_abstract:
        if mine.devices.tolist() != yours.devices.tolist():
            return False
    if wanted.rank not in (None, ndim):
        return False
    return found.equivalent(wanted.matched(found.dims(ndim)), ndim)


def known_layout(x: Any) -> TensorLayout | None:
    """The layout of an array on a mesh; None if it has none or it is unknown.

    It is known for arrays, for traced values on Explicit axes, and for values that are
    differentiated outside of `jit`, whose tracer holds the array.
    """
    value = concrete(x)
    sharding = getattr(x if value is None else value, "sharding", None)
    if isinstance(x, Tracer) and value is None:
        sharding = jax.typeof(x).sharding
        kinds = sharding.mesh.axis_types
        # On a mesh of both types, JAX shows the Explicit axes only.
        if not kinds or any(kind is not AxisType.Explicit for kind in kinds):
            return None
    if not isinstance(sharding, NamedSharding):
        return None
    ndim, layout = len(x.shape), TensorLayout(sharding)
    if ndim == 0:
        return TensorLayout.replicated(layout.device_mesh, 0)
    return TensorLayout(
        layout.dims(ndim), layout.device_mesh, memory_kind=layout.memory_kind
    )


def own_mesh(x: Any) -> DeviceMesh | None:
    """The mesh of an array or a traced value; None if it has none."""
    known = known_layout(x)
    if known is not None:
        return known.device_mesh
    if isinstance(x, Tracer) and concrete(x) is None:
        mesh = jax.typeof(x).sharding.mesh
        return DeviceMesh(mesh) if mesh.axis_names else None
    return None


def own_sharding(leaf: Any) -> NamedSharding | None:
    """The sharding of an array on a mesh of devices; None for all else."""
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
    """The array, or the one that a tracer of differentiation holds; else None."""
    if isinstance(x, Tracer):
        return concrete_value(x)
    return x if isinstance(x, jax.Array) else None


def is_eager() -> bool:
    """Whether this runs outside of `jit` and the like (`grad` and `vmap` do not count).

    A constant in `jit` is not a tracer, but a value computed from no argument is one.
    """
    return not isinstance(jax.lax.full((), 0), Tracer)


def unboxed(x: Any) -> Any:
    """What a Variable or a Linen box holds; anything else as it is."""
    while is_box(x):
        if isinstance(x, nnx.Variable):
            x = x.get_value()
        else:
            # `unbox()` of Linen's own boxes would move the value.
            x = x.value if hasattr(x, "value") else x.unbox()
    return x


def is_box(x: Any) -> bool:
    """Whether this is a Variable or a Linen box."""
    return isinstance(x, nnx.Variable | AxisMetadata)


def _unknown(x: Any) -> str:
    """Why this has no known layout, and what to do."""
    if isinstance(x, Tracer) and concrete(x) is None:
        return (
            f"a traced value {x.shape}: on Auto axes the compiler chooses its layout "
            "later; fix it, x = flm.relayout(x, layout), and use that layout; or read "
            "it outside of jit; or use Explicit axes, flm.DeviceMesh(..., "
            'axis_types="explicit"), and flm.jit(..., explicit=True)'
        )
    what = f"a {type(x).__name__}"
    if isinstance(x, dict | list | tuple):
        return f"{what}, which is no array: pass its leaves, one by one"
    if isinstance(x, np.ndarray | np.generic):
        what = f"a NumPy array {x.shape}, which is on no mesh"
    elif isinstance(x, jax.ShapeDtypeStruct):
        what = f"the abstract {x}, which has no sharding"
    elif isinstance(x, jax.Array | Tracer):
        sharding = getattr(concrete(x), "sharding", None)
        one = isinstance(sharding, SingleDeviceSharding)
        where = "on one device" if one else f"with a {type(sharding).__name__}"
        what = f"an array {x.shape} {where} and on no mesh"
    return f"{what}; flm.relayout(x, layout) puts an array on a mesh"
