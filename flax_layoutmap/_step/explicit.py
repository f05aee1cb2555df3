"""Steps on Explicit axes, traced as on Auto axes.

As by `jax.sharding.auto_axes`, what enters the step loses the Explicit axes of its
type, which is no operation. The shardings that `jax.jit` gets for inputs and outputs
are on the mesh itself, so that state keeps its types between steps.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from flax_layoutmap._core.fetch import is_eager
from flax_layoutmap._place.place import distribute_tensor, explicit_axes


def has_explicit_axes(mesh: Any) -> bool:
    """Whether a mesh of ours or of JAX has Explicit axes; None has not."""
    return mesh is not None and bool(explicit_axes(mesh))


def on_auto_axes(fun: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
    """A function of arrays, traced as if all axes of a `DeviceMesh` were Auto.

    Scalars that it returns have the types of the mesh. Other arrays get them from the
    `out_shardings` of `jax.jit`, or by `typed_as_mesh` after the program has run.
    """
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


def typed_as_mesh(x: Any, mesh: Any, sharding: Any = None) -> Any:
    """An output of such a program with the types of the mesh, in the same buffers.

    In an outer trace it gets the type of `sharding`, or is replicated.
    """
    own = getattr(x, "sharding", None)
    whole = NamedSharding(mesh.jax_mesh, PartitionSpec())
    if isinstance(x, Tracer):
        if is_eager():  # in `grad` or `vmap`
            return jax.device_put(x, whole)
        with jax.sharding.use_abstract_mesh(mesh.jax_mesh.abstract_mesh):
            return distribute_tensor(x, sharding or whole)
    if not isinstance(own, NamedSharding) or own.mesh == mesh.jax_mesh:
        return x
    wanted = NamedSharding(mesh.jax_mesh, own.spec, memory_kind=own.memory_kind)
    shards = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, wanted, shards)
