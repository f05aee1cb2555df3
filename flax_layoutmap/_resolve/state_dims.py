"""Trace which dims of its parameter each leaf of an optimizer state has.

`tx.init` is traced once, abstractly, on a made-up mesh whose axes all have size 1 and
are named by dim number. JAX's sharding-in-types then writes on every state leaf the
parameter dims it was made from: an Adafactor row statistic of a square kernel says
`d0`, the column statistic `d1`. Size-1 axes divide everything, so no shape can fail.
State that is made of bare shapes, `jnp.zeros(p.shape[:-1])`, carries no sharding.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from flax_layoutmap._core.jax_internals import is_sharding_type_error
from flax_layoutmap._rules.records import Shape
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.flax_internals import no_mesh, without_eager_sharding
from flax_layoutmap._tree.paths import Flat

# Per dim of a state leaf: the dim of its parameter, or None.
Dims = tuple[int | None, ...]


def tagged_dims(
    init: Callable[[Any], Any], params: Any
) -> dict[str, tuple[Shape, Dims | None]]:
    """Trace `init(params)`: path of each state leaf → its shape and parameter dims.

    The dims are None, or all None, where the trace does not determine them.
    """
    shapes = jax.tree.map(_shape_of, params)
    with without_eager_sharding():
        # A mistake in `init` raises its own error here.
        plain = flatten(jax.eval_shape(init, shapes))
        dims = _dims_by_sharding(init, shapes, plain)
    return {
        path: (tuple(leaf.shape), told)
        for path, leaf, told in zip(plain.full_paths(), plain.leaves, dims, strict=True)
    }


def _dims_by_sharding(
    init: Callable[[Any], Any], shapes: Any, plain: Flat
) -> list[Dims | None]:
    """Trace on a mesh whose axes are the dim numbers; one entry per leaf of `plain`.

    All None if the trace is impossible: an `init` that contracts parameters (`p @
    p.T`).
    """
    ndim = max((leaf.ndim for leaf in jax.tree.leaves(shapes)), default=0) or 1
    names = tuple(f"d{number}" for number in range(ndim))
    mesh = AbstractMesh((1,) * ndim, names, axis_types=(AxisType.Explicit,) * ndim)

    def tag(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, PartitionSpec(*names[: leaf.ndim]))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    with no_mesh(), jax.sharding.use_abstract_mesh(mesh):
        leaves = _try_init(init, jax.tree.map(tag, shapes), plain)
    if leaves is None:
        return [None] * len(plain.leaves)
    dims: list[Dims | None] = []
    for leaf in leaves:
        spec = tuple(leaf.sharding.spec) if leaf.sharding is not None else ()
        padded = spec + (None,) * (leaf.ndim - len(spec))
        dims.append(tuple(_dim_number(entry) for entry in padded))
    return dims


def _try_init(init: Callable[[Any], Any], params: Any, plain: Flat) -> Any:
    """Leaves of `init(params)`; None where it fails or has another structure."""
    try:
        made = flatten(jax.eval_shape(init, params))
    except Exception as error:
        if not is_refusal(error):
            raise
        return None
    return made.leaves if made.full_paths() == plain.full_paths() else None


def is_refusal(error: Exception) -> bool:
    """Whether `init` refused these inputs; a real mistake fails the plain trace."""
    return isinstance(error, _REFUSALS) or is_sharding_type_error(error)


_REFUSALS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    TypeError,
    ValueError,
)


def tells(dims: Dims) -> bool:
    return any(dim is not None for dim in dims)


def owner_of(path: str, owners: Mapping[str, Any]) -> str | None:
    """The parameter whose path is the longest run of parts of a state path.

    A run at the end wins over one in the middle (sm3 appends an index).
    """
    stop = len(path)
    while stop > 0:
        start = 0
        while True:
            candidate = path[start:stop]
            if candidate in owners:
                return candidate
            slash = path.find("/", start, stop)
            if slash < 0:
                break
            start = slash + 1
        stop = path.rfind("/", 0, stop)
    # A parameter that is the whole tree has the empty path.
    return "" if len(owners) == 1 and "" in owners else None


def _shape_of(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
        return leaf
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return jax.eval_shape(lambda: jax.numpy.asarray(leaf))


def _dim_number(entry: Any) -> int | None:
    """`'d3'` → 3; None, and the rare dim made of several, → None."""
    return int(entry[1:]) if isinstance(entry, str) else None
