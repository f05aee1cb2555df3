"""Checks for every published model, from any library."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.traverse_util import flatten_dict
from shards import Dims, assert_lies

import flax_layoutmap as flm

DATA, MODEL = "data", "model"
ROW: Dims = (("model",), ("data",))
COLUMN: Dims = (("data",), ("model",))
TOKENS = np.arange(64, dtype=np.int32).reshape(8, 8) % 60


def strict_map(mesh: flm.DeviceMesh, rules: Mapping[str, Any]) -> flm.LayoutMap:
    """Rules that raise where one is unused, or a large leaf is placed by none."""
    layout_map = flm.LayoutMap(mesh, strict=True)
    for pattern, layout in rules.items():
        layout_map[pattern] = layout
    return layout_map


def leaves_of(model: Any) -> dict[str, Any]:
    """Path → array of an NNX object, of its State, or of Linen variables."""
    if isinstance(model, dict):
        return flatten_dict(model, sep="/")
    flat = nnx.to_flat_state(nnx.state(model) if _is_object(model) else model)
    return {"/".join(map(str, path)): leaf.get_value() for path, leaf in flat}


def _is_object(model: Any) -> bool:
    return isinstance(model, nnx.Module | nnx.Optimizer)


def by_jit(make: Callable[[], Any]) -> Any:
    """What `jax.jit` of the same constructor makes: a State, or Linen variables."""

    def arrays() -> Any:
        made = make()
        return nnx.state(made) if _is_object(made) else made

    return jax.jit(arrays)()


def bits(array: Any) -> Any:
    """The values, also of typed keys."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array)


def assert_equal(model: Any, other: Any) -> None:
    """The same paths, dtypes and bits."""
    found, wanted = leaves_of(model), leaves_of(other)
    assert found.keys() == wanted.keys()
    for path, array in found.items():
        assert array.dtype == wanted[path].dtype, path
        np.testing.assert_array_equal(bits(array), bits(wanted[path]), err_msg=path)


def assert_model_lies(
    model: Any, dims: Mapping[str, Dims], mesh: flm.DeviceMesh
) -> None:
    """Each leaf of the table lies as it says, by its shards; all others are whole."""
    leaves = leaves_of(model)
    assert dims.keys() <= leaves.keys(), dims.keys() - leaves.keys()
    for path, array in leaves.items():
        assert_lies(array, dims[path] if path in dims else ((),) * array.ndim, mesh)


def born(make: Callable[[], Any], layout_map: flm.LayoutMap) -> Any:
    """`create`, in which nothing of ours warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", flm.LayoutWarning)
        return flm.create(make, layout_map)


def made_in_scope(make: Callable[[], Any], layout_map: flm.LayoutMap) -> Any:
    """`layout_map_scope`, in which nothing of ours warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", flm.LayoutWarning)
        with flm.layout_map_scope(layout_map):
            return make()


def next_token_loss(logits: Any, tokens: Any) -> Any:
    """Mean cross entropy of each next token."""
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits[:, :-1].astype(jnp.float32), tokens[:, 1:]
    )
    return losses.mean()


def shardings(model: Any) -> dict[str, Any]:
    """Path → sharding."""
    return {path: array.sharding for path, array in leaves_of(model).items()}


def trained(
    model: nnx.Module,
    tx: optax.GradientTransformation,
    layout_map: flm.LayoutMap,
    loss_of: Callable[[Any, Any], Any],
) -> tuple[nnx.Optimizer, list[float]]:
    """Two steps of `flm.jit`, after which every layout is what it was."""
    optimizer = flm.create_optimizer(model, tx, layout_map, wrt=nnx.Param)
    before = shardings(model), shardings(optimizer)

    @flm.jit(layout_map=layout_map, donate_argnames=("model", "optimizer"))
    def step(model: Any, optimizer: Any, tokens: Any) -> Any:
        loss, gradients = nnx.value_and_grad(loss_of)(model, tokens)
        optimizer.update(model, gradients)
        return loss

    losses = [float(step(model, optimizer, TOKENS)) for _ in range(2)]
    assert (shardings(model), shardings(optimizer)) == before
    assert np.isfinite(losses).all() and losses[1] < losses[0]
    return optimizer, losses
