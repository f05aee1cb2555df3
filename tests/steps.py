"""A model for tests of steps, its rules, and the expected shardings."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from shards import Dims

import flax_layoutmap as flm

X = np.linspace(-1.0, 1.0, 64, dtype=np.float32).reshape(8, 8)
Y = np.linspace(1.0, -1.0, 64, dtype=np.float32).reshape(8, 8)
COLUMN, ROW, BATCH = ((), ("model",)), (("model",), ()), (("data",), ())

# Path → the axes of the kernels and the bias that the rules shard.
DIMS: dict[str, Dims] = {
    "up/kernel": COLUMN,
    "up/bias": (("model",),),
    "down/kernel": ROW,
}


def counting(key: Any, shape: Any, dtype: Any = jnp.float32, *_: Any) -> Any:
    """An initialiser that compiles in no time."""
    del key
    values = np.sin(np.arange(np.prod(shape), dtype=np.float32)).reshape(shape) / 3
    return jnp.asarray(values, dtype)


class Model(nnx.Module):
    """Two sharded kernels, BatchNorm statistics, and a Dropout that counts."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.up = nnx.Linear(8, 16, kernel_init=counting, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(16, 8, kernel_init=counting, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(self.drop(nnx.relu(self.up(self.norm(x)))))


def make() -> Any:
    return Model(nnx.Rngs(0))


def rules(mesh: Any = None, **options: Any) -> flm.LayoutMap:
    mesh = flm.DeviceMesh((2, 4), ("data", "model")) if mesh is None else mesh
    layout_map = flm.LayoutMap(mesh, strict=False, **options)
    layout_map["up/kernel"] = (None, "model")
    layout_map["up/bias"] = ("model",)
    layout_map["down/kernel"] = ("model", None)
    layout_map.names["hidden"] = ("data", None)
    return layout_map
