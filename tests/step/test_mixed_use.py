"""Models trained by other steps in between; what is frozen stays."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from shards import leaves_of, plain
from steps import X, Y, make, rules

import flax_layoutmap as flm

BATCHES = [(X * scale, Y) for scale in (1.0, 0.5, -0.8, 0.3, 0.9, -0.2, 0.7)]
# Its large epsilon keeps rounding errors small where gradients are.
TX = optax.adam(1e-2, eps=1e-2)


def loss_of(model: Any, x: Any, y: Any) -> Any:
    return ((model(x) - y) ** 2).mean()


def train(model: Any, optimizer: Any, x: Any, y: Any, wrt: Any = nnx.Param) -> Any:
    gradient = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, wrt))
    loss, grads = gradient(model, x, y)
    optimizer.update(model, grads)
    return loss


def pair(make: Any, wrt: Any = nnx.Param, layout_map: Any = None) -> tuple[Any, Any]:
    model = make()
    nodes = model, nnx.Optimizer(model, TX, wrt=wrt)
    if layout_map is not None:
        layout_map.place(dict(zip(("model", "optimizer"), nodes, strict=True)))
    return nodes


def named(model: Any, optimizer: Any) -> dict[str, Any]:
    return leaves_of({"model": model, "optimizer": optimizer})


@pytest.fixture
def compilations() -> Iterator[list[float]]:
    """How long each compilation of XLA took so far."""
    seen: list[float] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


# Each binds a model and its optimizer before the first of our steps.
OTHERS: dict[str, Any] = {
    "nnx.jit": lambda *nodes: functools.partial(nnx.jit(train), *nodes),
    "cached_partial": lambda *nodes: nnx.cached_partial(nnx.jit(train), *nodes),
    "eager": lambda *nodes: functools.partial(train, *nodes),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_ways_between_our_steps(
    kind: str, mesh: flm.DeviceMesh, compilations: list[float]
) -> None:
    """The values are those of `nnx.jit` alone; ours compile nothing again."""
    layout_map = rules(mesh)
    nodes, expected = pair(make, layout_map=layout_map), pair(make)
    step = flm.jit(train, layout_map=layout_map, donate_argnames=("model", "optimizer"))
    other, reference = OTHERS[kind](*nodes), nnx.jit(train)
    shardings = {path: leaf.sharding for path, leaf in named(*nodes).items()}
    for at, batch in enumerate(BATCHES):
        del compilations[:]
        loss = other(*batch) if at in (2, 4) else step(*nodes, *batch)
        assert at not in (3, 5, 6) or not compilations
        np.testing.assert_allclose(loss, reference(*expected, *batch), rtol=1e-4)
    found, wanted = named(*nodes), named(*expected)
    for path, leaf in found.items():
        np.testing.assert_allclose(plain(leaf), plain(wanted[path]), 2e-4, 2e-5)
        assert leaf.sharding.is_equivalent_to(shardings[path], leaf.ndim), path
