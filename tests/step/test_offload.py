"""State that rules keep in host memory: steps, donation, kinds, bits, messages."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import flax_layoutmap as flm

MESH = flm.DeviceMesh("data=2,fsdp=4")


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x)))


def rules(
    *, optimizer: str | None = None, params: str | None = None, mesh: Any = MESH
) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh)
    layout_map["kernel"] = flm.TensorLayout((None, "fsdp"), memory_kind=params)
    layout_map["bias"] = flm.TensorLayout(None, memory_kind=params)
    if optimizer is not None:
        layout_map.optimizer[".*"] = flm.TensorLayout(
            (..., "fsdp"), memory_kind=optimizer
        )
    return layout_map


def kinds(tree: Any) -> set[str]:
    """The memory kinds of the arrays that have dims."""
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}


def train(layout_map: flm.LayoutMap, tx: Any, steps: int = 3) -> tuple[Any, ...]:
    """Train for some steps, as without host memory."""
    model = flm.create(lambda: Model(nnx.Rngs(0)), layout_map)
    optimizer = flm.create_optimizer(model, tx, layout_map=layout_map)

    @flm.jit(layout_map=layout_map, donate_argnames=("model", "optimizer"))
    def step(model: Model, optimizer: Any, x: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    x = np.arange(128, dtype=np.float32).reshape(8, 16) / 128
    losses = [float(step(model, optimizer, x)) for _ in range(steps)]
    return losses, model, optimizer, step


TX = {
    "adamw": lambda: optax.adamw(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
}


@functools.cache
def on_device(name: str) -> tuple[Any, ...]:
    """Training with state on the device."""
    return train(rules(optimizer="device"), TX[name]())


@pytest.mark.optimised
@pytest.mark.parametrize("name", TX)
@pytest.mark.parametrize("params", [None, "pinned_host"])
def test_an_unmodified_step(name: str, params: str | None) -> None:
    offloaded = train(rules(optimizer="pinned_host", params=params), TX[name]())
    losses, model, optimizer, step = offloaded
    assert kinds(nnx.state(optimizer, nnx.optimizer.OptState)) == {"pinned_host"}
    assert kinds(nnx.state(model)) == {params or "device"}
    assert step._cache_size() == 1
    expected = on_device(name)
    assert losses == expected[0]
    for one, other in zip(
        jax.tree.leaves(nnx.state((model, optimizer))),
        jax.tree.leaves(nnx.state(expected[1:3])),
        strict=True,
    ):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_a_leaf_that_stays_is_not_moved() -> None:
    """It would cross to the device and back."""
    layout_map = flm.LayoutMap(MESH)
    layout_map["w|v"] = flm.TensorLayout(("fsdp",), memory_kind="pinned_host")

    @flm.jit(layout_map=layout_map, donate_argnames="state")
    def step(state: Any) -> Any:
        return {**state, "w": state["w"] + 1}, state["v"].sum()

    state = layout_map.place({"w": jnp.zeros(8), "v": jnp.arange(8.0)})
    jaxpr = step.trace(state).jaxpr.jaxpr
    assert jaxpr.outvars[0] is jaxpr.invars[0] and jaxpr.outvars[1] not in jaxpr.invars
    state, total = step(state)
    assert kinds(state) == {"pinned_host"} and float(total) == 28
    np.testing.assert_array_equal(np.asarray(state["v"]), np.arange(8.0))


def on_either(kind: str | None) -> Any:
    """Parameters in this memory, a loss of them, and a step; None: plain functions."""
    layout_map = flm.LayoutMap(MESH)
    layout_map["kernel"] = flm.TensorLayout((None, "fsdp"), memory_kind=kind)
    jit: Any = flm.jit(layout_map=layout_map) if kind else lambda fun: fun

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        return ((x @ params["kernel"]) ** 2).mean()

    def step(params: Any, x: jax.Array) -> Any:
        return {"kernel": params["kernel"] * 0.5 + x.mean()}

    params = {"kernel": jnp.linspace(-1, 1, 128).reshape(16, 8)}
    return layout_map.place(params) if kind else params, jit(loss_fn), jit(step)


@pytest.mark.parametrize(
    "call",
    [
        lambda params, loss_fn, step, x: jax.jit(step)(params, x),
        lambda params, loss_fn, step, x: jax.grad(loss_fn)(params, x),
        lambda params, loss_fn, step, x: jax.jit(jax.grad(loss_fn))(params, x),
        lambda params, loss_fn, step, x: jax.vmap(loss_fn, (None, 0))(params, x[None]),
    ],
    ids=["jit", "grad", "jit of grad", "vmap"],
)
def test_inside_transformations_of_jax(call: Any) -> None:
    """Gradients are in the memory of the state, as by JAX."""
    x, expected = np.ones((8, 16), np.float32), None
    for kind in (None, "device", "pinned_host"):
        found = call(*on_either(kind), x)
        expected = found if kind is None else expected
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, 1e-5), found, expected
        )
        assert kinds(found) <= {kind or "device", "device"}
