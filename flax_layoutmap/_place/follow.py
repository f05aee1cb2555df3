"""Sharding constraints on Auto axes that follow another array, forward or backward.

Under `jit` with Auto axes a traced value has no sharding to read: the compiler chooses
it, later. What can be expressed is that two values have the same sharding,
`jax.experimental.shard_alike`. Here it relates a cotangent to the input of the
forward pass, or one array to another.

It is a primitive of JAX (`jax.extend.core`), since nothing smaller keeps forward mode,
reverse mode, higher orders and `vmap` alike: `custom_vjp` loses the first,
`custom_derivatives.linear_call` the last.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.shard_alike import shard_alike
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

# JAX lowers equal calls of a primitive once, and `shard_alike` names its group when it
# is lowered: all pairs of one shape in a program would be one group. A number for each
# of them in the context keeps them apart.
_NUMBERS = itertools.count()


def constrained(x: Any, sharding: NamedSharding) -> Any:
    """A sharding constraint whose cotangent has the sharding of `x`.

    `x` itself is what says how, so it is kept until the backward pass; and the
    cotangent is gathered on its way.

    Args:
        x: a traced value; of floating point, or there is nothing to send back.
        sharding: on Auto axes only; dims may be `PartitionSpec.UNCONSTRAINED`.

    Plain JAX: `jax.lax.with_sharding_constraint(x, sharding)`, whose cotangent has
    the sharding of the result.
    """
    if jnp.issubdtype(x.dtype, jnp.inexact):
        x = _relayout.bind(x, x, there=sharding, back=None, mesh=sharding.mesh)
    # JAX looks for the devices of a program in its own constraints only; and this one
    # knows the `spmd_axis_name` of `jax.vmap`.
    return jax.lax.with_sharding_constraint(x, sharding)


def alike(x: Any, like: Any, mesh: Any) -> Any:
    """`x` in the sharding of `like` on Auto axes; its cotangent in that of `x`."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return _follow(x, like, mesh)
    return _relayout.bind(x, like, x, there=None, back=None, mesh=mesh)


def _follow(x: Any, like: Any, mesh: Any) -> Any:
    # shard_alike is symmetric: an x in any sharding must come first. The barrier
    # keeps that constraint from spreading to `like`.
    x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))
    x = jax.lax.optimization_barrier(x)
    with set_xla_metadata(pair=next(_NUMBERS)):
        return shard_alike(like, x)[1]


def _value(x: Any, *leaders: Any, there: Any, back: Any, mesh: Any) -> Any:
    """What the primitive does: constrain x to `there`, or as its leader is."""
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
    tangent = ad.instantiate_zeros(tangents[0])
    moved = [_relayout.bind(value, *leaders, **params) for value in (x, tangent)]
    return moved[0], moved[1]


def _transpose(
    cotangent: Any, x: Any, *leaders: Any, there: Any, back: Any, mesh: Any
) -> list[Any]:
    nothing = [None] * len(leaders)
    if any(ad.is_undefined_primal(leader) for leader in leaders):
        # jax.linear_transpose of a bare relayout: there is no value to follow.
        return [cotangent, *nothing]
    back_again = _relayout.bind(
        cotangent, *reversed(leaders), there=back, back=there, mesh=mesh
    )
    return [back_again, *nothing]


def _batch(args: Any, at: Any, *, there: Any, back: Any, mesh: Any) -> tuple[Any, int]:
    """The new dim goes first and is left open."""
    size = next(a.shape[d] for a, d in zip(args, at, strict=True) if d is not None)
    args = [
        jnp.broadcast_to(a, (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0)
        for a, d in zip(args, at, strict=True)
    ]
    there, back = _with_free_dim(there), _with_free_dim(back)
    return _relayout.bind(*args, there=there, back=back, mesh=mesh), 0


def _with_free_dim(sharding: NamedSharding | None) -> NamedSharding | None:
    if sharding is None:
        return None
    spec = PartitionSpec(PartitionSpec.UNCONSTRAINED, *sharding.spec)
    return NamedSharding(sharding.mesh, spec)


# The leaders are the arrays to follow, forward and backward, without a sharding.
_relayout = Primitive("relayout")
_relayout.def_impl(_eager)
_relayout.def_abstract_eval(lambda x, *leaders, **params: x)
ad.primitive_jvps[_relayout] = _jvp
ad.primitive_transposes[_relayout] = _transpose
batching.primitive_batchers[_relayout] = _batch
mlir.register_lowering(
    _relayout,
    mlir.lower_fun(_value, multiple_results=False),
    cacheable=False,  # so that every one has its own number
)
