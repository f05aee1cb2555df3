"""Call a function so that its results are computed in a layout."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from flax_layoutmap._core.errors import StructureError
from flax_layoutmap._core.layout import TensorLayout
from flax_layoutmap._place.place import (
    distribute,
    explicit_axes,
    is_eager,
    mesh_of,
    move,
    wanted_layout,
)


def call_with_layout(
    fn: Callable[..., Any], layout: Any, *args: Any, **kwargs: Any
) -> Any:
    """Call a function so that its results are computed in this layout.

    The function is compiled, so that on Auto axes no device holds more of a result
    than its part. On Explicit axes a result has the layout that the function gives it,
    and is moved. It is compiled at every call: this is for what is made once,
    `jnp.zeros` or an initialiser; in a loop, use `jax.jit`.

    Args:
        fn: the function. Inside of `jit` it is called as it is, and its results are
            given the layout.
        layout: anything that `TensorLayout` takes, for every result; or a tree of
            `TensorLayout`s, `NamedSharding`s and None (as the compiler likes) that is a
            prefix of the results; or None, which calls `fn` and does nothing else.
        args: for the function. Arrays are traced; anything else is a constant.
        kwargs: for the function, too.

    Returns:
        What the function returns.

    Raises:
        LayoutError: another rank, or a dim that does not divide.
        MeshError: no mesh to be found, or one without devices.
        StructureError: a tree of layouts that is no prefix of the results.

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
    layouts = jax.tree.map(wanted_layout, layout, is_leaf=_is_layout)
    if not is_eager():
        return _given(fn(*args, **kwargs), layouts)
    leaves, treedef = jax.tree.flatten((args, kwargs))
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array | np.ndarray)]

    def call(arrays: list[Any]) -> Any:
        traced = iter(arrays)
        filled = [
            next(traced) if isinstance(leaf, jax.Array | np.ndarray) else leaf
            for leaf in leaves
        ]
        own_args, own_kwargs = jax.tree.unflatten(treedef, filled)
        return _given(fn(*own_args, **own_kwargs), layouts)

    found: list[TensorLayout] = jax.tree.leaves(layouts)
    with contextlib.ExitStack() as stack:
        for each in found:
            move(np.zeros(()), TensorLayout((), each.device_mesh), ())
        if found and explicit_axes(mesh_of(found[0])):
            # Constants on Explicit axes ask for a mesh in the context.
            bare: Any = mesh_of(found[0]).jax_mesh
            stack.enter_context(jax.set_mesh(bare))
        return jax.jit(call)(arrays)


def _given(results: Any, layouts: Any) -> Any:
    wanted, treedef = jax.tree.flatten(layouts, is_leaf=lambda node: node is None)
    try:
        parts = treedef.flatten_up_to(results)
    except ValueError as error:
        raise StructureError(
            f"call_with_layout: the layouts are no prefix of the results: {error}"
        ) from error

    def give(layout: TensorLayout | None, part: Any) -> Any:
        if layout is None:
            return part
        return jax.tree.map(
            lambda leaf: distribute(leaf, layout, what="call_with_layout"), part
        )

    return treedef.unflatten(map(give, wanted, parts))


def _is_layout(node: Any) -> bool:
    """Whether a node of a tree of layouts is one: not None, which leaves things be."""
    if isinstance(node, tuple | list) and not isinstance(node, PartitionSpec):
        dims = [dim for dim in node if dim is not None and dim is not ...]
        return all(
            isinstance(name, str)
            for dim in dims
            for name in (dim if isinstance(dim, tuple | list) else (dim,))
        )
    return not isinstance(node, dict) and node is not None
