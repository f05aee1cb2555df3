"""`flm.accumulate`: values, gradients, what changes, and the collectives of a step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import flax_layoutmap as flm

ROWS = 64


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, between: Callable[[nnx.Rngs], Any]) -> None:
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.between = between(rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(self.between(nnx.relu(self.up(x))))


def plain(rngs: nnx.Rngs) -> Any:
    return nnx.Sequential()


def batch_norm(rngs: nnx.Rngs) -> Any:
    return nnx.BatchNorm(16, rngs=rngs)


def dropout(rngs: nnx.Rngs) -> Any:
    return nnx.Dropout(0.5, rngs=rngs)


def loss_of(model: Any, batch: Any) -> Any:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def batch_of(rows: int = ROWS) -> Any:
    numbers = np.random.default_rng(0)
    return {name: numbers.normal(size=(rows, 8)).astype(np.float32) for name in "xy"}


def rules(mesh: Any, **layouts: Any) -> flm.LayoutMap:
    """Rules for the model; the batch is over `data` and `fsdp`."""
    mesh = flm.DeviceMesh(mesh) if isinstance(mesh, str) else mesh
    axes = [axis for axis in ("data", "fsdp") if axis in mesh.axis_names]
    layout_map = flm.LayoutMap(mesh, batch=axes, strict=False)
    for pattern, layout in layouts.items():
        layout_map[pattern] = layout
    return layout_map


def trained(layout_map: Any, between: Any = plain, steps: int = 0, **options: Any) -> Any:
    """A model after two steps, and their losses; without accumulation for 0."""
    model = flm.create(lambda: Mlp(nnx.Rngs(0), between), layout_map)
    optimizer = flm.create_optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @flm.jit(layout_map=layout_map, donate_argnames=("model", "optimizer"))
    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        gradient = nnx.value_and_grad(loss_of)
        if steps:
            gradient = flm.accumulate(loss_of, steps=steps, **options)
        loss, gradients = gradient(model, batch)
        optimizer.update(model, gradients)
        return loss

    losses = [float(train_step(model, optimizer, batch_of())) for _ in range(2)]
    assert train_step._cache_size() == 1
    return model, losses


LAYOUTS: dict[str, Any] = {
    "one device": rules(flm.DeviceMesh((1,), ("data",), devices=jax.devices()[:1])),
    "replicated": rules("data=8"),
    "fsdp over data": rules("data=8", kernel=(None, "data")),
    "fsdp": rules("data=4,fsdp=2", kernel=(None, "fsdp")),
    "tensor": rules("data=2,fsdp=2,tensor=2", **{"up/kernel": ("fsdp", "tensor")}),
    "explicit": rules(flm.DeviceMesh("data=8", axis_types="explicit")),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_the_step_without_it(name: str) -> None:
    expected, losses = trained(LAYOUTS[name])
    for steps, axes in ((1, None), (4, None), (8, None), (4, ())):
        model, found = trained(LAYOUTS[name], steps=steps, axes=axes)
        np.testing.assert_allclose(found, losses, rtol=1e-6)
        for one, other in zip(
            jax.tree.leaves(nnx.state(model)),
            jax.tree.leaves(nnx.state(expected)),
            strict=True,
        ):
            np.testing.assert_allclose(one, other, atol=1e-6)
            assert one.sharding == other.sharding
