"""Steps on Explicit axes, traced as on Auto axes.

As by `jax.sharding.auto_axes`, what enters the step loses the Explicit axes of its
type, which is no operation. What comes out gets the types of the mesh: state by the
`out_shardings` of `jax.jit`, scalars in the trace, other results after the program.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from flax_layoutmap._core.fetch import is_eager
from flax_layoutmap._place.place import explicit_axes


def has_explicit_axes(mesh: Any) -> bool:
    """Whether a mesh of ours or of JAX has Explicit axes; None has not."""
    return mesh is not None and bool(explicit_axes(mesh))


def on_auto_axes(fun: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
    """A function of arrays, traced as if all axes of a `DeviceMesh` were Auto."""
    if not has_explicit_axes(mesh):
        return fun
    types: Any = mesh.jax_mesh.abstract_mesh
    auto = types.update_axis_types(dict.fromkeys(types.axis_names, AxisType.Auto))
    whole = functools.partial(jax.sharding.reshard, out_shardings=PartitionSpec())

    @functools.wraps(fun)
    def on_auto(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(auto):
            outputs = fun(*whole(args))
        with jax.sharding.use_abstract_mesh(types):
            return jax.tree.map(
                lambda x: x if not isinstance(x, jax.Array) or x.ndim else whole(x),
                outputs,
            )

    return on_auto


def typed(outputs: Any, places: Sequence[Any], mesh: Any) -> Any:
    """The outputs of such a program with the types of the mesh, in the same buffers.

    In an outer trace an output without a place is replicated, and in `grad` or `vmap`
    all are.
    """
    jax_mesh = mesh.jax_mesh
    whole = NamedSharding(jax_mesh, PartitionSpec())

    def label(x: Any, place: Any) -> Any:
        if isinstance(x, Tracer):
            return jax.device_put(x, whole if place is None or is_eager() else place)
        if place is not None or not isinstance(own := x.sharding, NamedSharding):
            return x
        kind = own.memory_kind
        return jax.device_put(x, NamedSharding(jax_mesh, own.spec, memory_kind=kind))

    flat, treedef = jax.tree.flatten(outputs)
    return treedef.unflatten(map(label, flat, places))
