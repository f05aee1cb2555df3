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
from flax_layoutmap._place.place import distribute_tensor


def has_explicit_axes(mesh: Any) -> bool:
    """Whether a mesh of ours or of JAX has Explicit axes; None has not."""
    return mesh is not None and AxisType.Explicit in (mesh.axis_types or ())


def on_auto_axes(fun: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
    """A function of arrays, traced as if all axes of a `DeviceMesh` were Auto.

    Scalars that it returns have the types of the mesh. Other arrays get them from the
    `out_shardings` of `jax.jit`, or by `typed_as_mesh` after the program has run.
    """
    if not has_explicit_axes(mesh):
        return fun
    types: Any = mesh.jax_mesh.abstract_mesh
    auto = types.update_axis_types(dict.fromkeys(types.axis_names, AxisType.Auto))

    @functools.wraps(fun)
    def on_auto(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(auto):
            outputs = fun(*jax.sharding.reshard(args, PartitionSpec()))
        with jax.sharding.use_abstract_mesh(types):
            return jax.tree.map(_typed_scalar, outputs)

    return on_auto


def _typed_scalar(x: Any) -> Any:
    is_scalar = isinstance(x, jax.Array) and not x.ndim
    return jax.sharding.reshard(x, PartitionSpec()) if is_scalar else x


def typed_as_mesh(x: Any, mesh: Any, sharding: Any = None) -> Any:
    """An output of such a program with the types of the mesh, in the same buffers.

    In an outer trace it gets the type of `sharding`, or is replicated.
    """
    jax_mesh: Any = mesh.jax_mesh
    if isinstance(x, Tracer):
        whole = NamedSharding(jax_mesh, PartitionSpec())
        if is_eager():  # in `grad` or `vmap`
            return jax.device_put(x, whole)
        with jax.sharding.use_abstract_mesh(jax_mesh.abstract_mesh):
            return distribute_tensor(x, sharding or whole)
    given = getattr(x, "sharding", None)
    if not isinstance(given, NamedSharding) or given.mesh == jax_mesh:
        return x
    wanted = NamedSharding(jax_mesh, given.spec, memory_kind=given.memory_kind)
    shards = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, wanted, shards)
