"""Placing rewrites the layout metadata that a rule overrules, and keeps the rest."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from shards import Dims, assert_lies

import flax_layoutmap as flm

X = np.arange(64, dtype=np.float32).reshape(8, 8)
NNXMeta: Any = nnx.bridge.NNXMeta


class Dense(nnx.Module):
    """A kernel with axis names, and metadata of its own."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        with nnx.use_eager_sharding(False):
            self.kernel = nnx.Param(jnp.asarray(X), out_sharding=("model",), note="own")

    def __call__(self, x: Any) -> Any:
        return x @ self.kernel[...]


def rules(mesh: flm.DeviceMesh, axes: Any = None) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh, strict=False)
    if axes is not None:
        layout_map["kernel"] = axes
    return layout_map


def test_a_linen_box(mesh: flm.DeviceMesh) -> None:
    box: Any = linen.Partitioned
    variables = {
        "kernel": box(jnp.asarray(X), ("data", None)),
        "other": box(jnp.asarray(X), ("data", None)),
    }
    placed = rules(mesh, (None, "model")).place(variables)
    assert placed["kernel"].names == (None, "model")
    assert placed["other"].names == ("data", None)
    assert variables["kernel"].names == ("data", None)


@pytest.mark.parametrize(
    ("axes", "wanted", "dims"),
    [
        (None, ("model",), (("model",), ())),
        ((None, "data"), (None, "data"), ((), ("data",))),
    ],
)
def test_a_box_of_the_bridge(
    mesh: flm.DeviceMesh, axes: Any, wanted: Any, dims: Dims
) -> None:
    """Its metadata is an annotation; its class and what else it holds are kept."""
    model: Any = nnx.bridge.ToLinen(Dense)
    with nnx.use_eager_sharding(False):
        variables = model.init(jax.random.key(0), jnp.asarray(X))
    before: Any = variables["params"]["kernel"]
    assert isinstance(before, NNXMeta)
    placed = rules(mesh, axes).place(variables)
    box: Any = placed["params"]["kernel"]
    assert_lies(box.value, dims, mesh, X)
    assert isinstance(box, NNXMeta) and box.var_type is nnx.Param
    assert box.metadata == before.metadata | {"out_sharding": wanted}
    assert before.metadata["out_sharding"] == ("model",)
    with nnx.use_eager_sharding(False):
        np.testing.assert_allclose(model.apply(placed, X), X @ X)


class Scanned(linen.Module):
    """Layers with logical names, whose dim is called "layers"."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        init = linen.with_logical_partitioning(
            linen.initializers.lecun_normal(), ("embed", "mlp")
        )
        stack: Any = linen.scan(
            lambda dense, x, _: (dense(x), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
            metadata_params={linen.PARTITION_NAME: "layers"},
        )
        dense = linen.Dense(8, use_bias=False, kernel_init=init)
        return stack(dense, x, None)[0]


@pytest.mark.parametrize(
    "axes", [(None, "data", None), (None, None, ("data", "model"))], ids=str
)
def test_logical_names_of_stacked_layers(mesh: flm.DeviceMesh, axes: Any) -> None:
    """`scan` goes on to see the name of the dim of layers, and to remove it."""
    model: Any = Scanned()
    variables: Any = model.init(jax.random.key(0), X)
    placed: Any = rules(mesh, axes).place(variables)
    (box,) = jax.tree.leaves(placed, is_leaf=lambda x: isinstance(x, linen.Partitioned))
    assert box.names[0] == "layers"
    layout = flm.TensorLayout(axes, mesh)
    assert box.value.sharding == layout.sharding(3)
    wanted = model.apply(variables, X)
    np.testing.assert_allclose(jax.jit(model.apply)(placed, X), wanted, rtol=1e-5)
    again = rules(mesh).resolve(placed)  # by the metadata alone
    assert again.leaf(0).layout.dims(3) == layout.dims(3)
