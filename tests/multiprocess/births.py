"""Models and optimizers that are created in their shards; see `whole_line`."""

from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

import flax_layoutmap as flm


class Model(nnx.Module):
    """Kernels, statistics, a counter, random state, tied weights, a table."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.head = self.embed
        self.steps = nnx.Variable(jnp.zeros((), jnp.int32))
        table = np.arange(128.0, dtype=np.float32).reshape(8, 16)
        self.table = nnx.Variable(jnp.asarray(table) * 2)


class Linen(nn.Module):
    """Two layers, one of them under remat."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.remat(nn.Dense)(8)(nn.relu(nn.Dense(16)(x)))


def rules(kind: str) -> flm.LayoutMap:
    mesh = flm.DeviceMesh("data=2,model=4", axis_types=kind)
    layout_map = flm.LayoutMap(mesh, strict=False, indivisible="replicate")
    layout_map["kernel|embedding|table"] = ("data", "model")
    layout_map["bias"] = ("model",)
    return layout_map


def orthogonal() -> dict[str, Any]:
    """A matrix of which each element is computed from many."""
    initialise = nnx.initializers.orthogonal()
    return {"kernel": initialise(jax.random.key(2), (16, 16))}


def linen_state(key: Any) -> TrainState:
    """Parameters and their optimizer in one."""
    model = Linen()
    params = model.init(key, jnp.ones((2, 8)))["params"]
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))


def births() -> Iterator[tuple[str, Any]]:
    """(name, tree) of each thing that is made."""
    for kind in ("auto", "explicit"):
        layout_map = rules(kind)
        rngs = nnx.Rngs(3, dropout=4)
        model = flm.create(Model, layout_map, rngs)
        yield f"{kind}: model", nnx.state(model)
        # Its counters have gone on.
        yield f"{kind}: again", nnx.state(flm.create(Model, layout_map, rngs))
        tx = optax.adafactor(1e-3, min_dim_size_to_factor=4)
        optimizer = flm.create_optimizer(model, tx, layout_map)
        yield f"{kind}: adafactor", nnx.state(optimizer)
    layout_map = rules("auto")
    with flm.layout_map_scope(layout_map):
        model = Model(nnx.Rngs(3, dropout=4))
        optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    yield "scope: model", nnx.state(model)
    yield "scope: optimizer", nnx.state(optimizer)
    key = jax.random.key(5)
    yield "Linen", flm.create(Linen().init, layout_map, key, jnp.ones((2, 8)))
    yield "TrainState", flm.create(linen_state, layout_map, key)
    yield "orthogonal", flm.create(orthogonal, layout_map)
