"""Equal calls are recognised, and whatever differs from an equal call is seen."""

import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import flax_layoutmap as flm

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)


class Model(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.gain = nnx.Param(jnp.ones(()))  # a scalar, which `==` compares
        self.scale = 1.0
        self.config = types.SimpleNamespace(scale=1.0)
        self.sizes = [1.0]
        bias: Any = self.layers[0].bias
        bias.set_metadata("tags", [1.0])

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        extra = getattr(self, "extra", None)
        x = x if extra is None else x + extra[...]
        scale = self.gain[...] * self.scale * self.config.scale * self.sizes[0]
        bias: Any = self.layers[0].bias
        scale = scale * bias.get_metadata().get("tags", [1.0])[0]
        return scale * self.drop(self.norm(x))


def step(model: Any, x: Any) -> Any:
    for _, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.Param):
            variable[...] = variable[...] * 0.9
    return model(x)


@pytest.fixture
def layout_map(mesh: flm.DeviceMesh) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map["kernel"] = (None, "model")
    return layout_map


def set_bias(model: Any, values: Any) -> None:
    model.layers[0].bias.set_raw_value(values)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a value": lambda m: set_bias(m, jnp.full(8, 0.25)),
    "a value of NumPy": lambda m: set_bias(m, np.full(8, 0.5, np.float32)),
    "a constant": lambda m: setattr(m, "scale", 2.0),
    "in an object": lambda m: setattr(m.config, "scale", 3.0),
    "in a list": lambda m: m.sizes.__setitem__(0, 3.0),
    "metadata": lambda m: m.layers[0].bias.set_metadata("tags", [2.0]),
    "in metadata": lambda m: m.layers[0].bias.tags.__setitem__(0, 3.0),
    "all metadata": lambda m: m.layers[0].bias.set_metadata({"tags": [4.0]}),
    "a new Variable": lambda m: setattr(m, "extra", nnx.Param(jnp.full(8, 0.5))),
    "an equal Variable": lambda m: setattr(m, "gain", nnx.Param(m.gain[...])),
    "the order": lambda m: m.layers.reverse(),
    "tied": lambda m: setattr(m.layers[1], "kernel", m.layers[0].kernel),
    "a module": lambda m: m.layers.__setitem__(0, nnx.Linear(8, 8, rngs=nnx.Rngs(7))),
}


def test_changes_between_calls(layout_map: flm.LayoutMap) -> None:
    """Whatever a user does to a model, the next call sees it, as an eager one does."""
    jitted = flm.jit(step, layout_map=layout_map, donate_argnames="model")
    ours, theirs = layout_map.place(Model()), Model()
    for name, change in CHANGES.items():
        for _ in range(3):
            a, b = jitted(ours, X), step(theirs, X)
            np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-2, err_msg=name)
        change(ours)
        change(theirs)
        layout_map.place(ours)
        a, b = jitted(ours, X), step(theirs, X)
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-2, err_msg=name)


@pytest.fixture
def flattened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often `nnx.split_context` has been entered."""
    count: list[int] = []
    plain = nnx.split_context

    def counted(*args: Any) -> Any:
        count.append(1)
        return plain(*args)

    monkeypatch.setattr(nnx, "split_context", counted)
    return count


def train(model: Any, optimizer: Any, x: Any) -> Any:
    loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


def test_equal_calls_flatten_nothing(
    layout_map: flm.LayoutMap, flattened: list[int]
) -> None:
    """Also of modes, shapes and two steps that were seen before, in turn."""
    model = layout_map.place(Model())
    optimizer = flm.create_optimizer(model, optax.adam(1e-3), layout_map)
    donated = ("model", "optimizer")
    jitted = flm.jit(train, layout_map=layout_map, donate_argnames=donated)
    predict = flm.jit(lambda model, x: model(x).sum(), layout_map=layout_map)

    def turn() -> None:
        for rows in (8, 4):
            model.train()
            jitted(model, optimizer, X[:rows])
            model.eval()
            predict(model, X[:rows])

    for _ in range(3):
        turn()
    del flattened[:]
    for _ in range(3):
        turn()
    assert not flattened
    assert jitted._cache_size() == predict._cache_size() == 2
    model.layers[0].bias = nnx.Param(jnp.zeros(8))
    predict(model, X)
    assert flattened


def test_trees_of_several_structures(layout_map: flm.LayoutMap) -> None:
    traced: list[Any] = []

    def grow(state: Any, by: Any, *, how: str) -> Any:
        traced.append(how)
        sign = 1 if how == "up" else -1
        return jax.tree.map(lambda leaf: leaf + sign * by, state)

    jitted = flm.jit(
        grow, layout_map=layout_map, donate_argnames="state", static_argnames="how"
    )
    states = [
        layout_map.place({"kernel": jnp.zeros((8, 8)), "b": jnp.zeros(3)}),
        layout_map.place({"kernel": jnp.zeros((4, 8))}),
        layout_map.place({"kernel": jnp.zeros((8, 8)), "c": jnp.zeros(3)}),
    ]
    for count in range(1, 8):
        states = [jitted(state, 2.0, how="up") for state in states]
        for leaf in jax.tree.leaves(states):
            np.testing.assert_array_equal(leaf, 2.0 * count)
    states = [jitted(state, 14, how="down") for state in states]
    assert not np.any(states[0]["kernel"])
    assert traced == ["up"] * 3 + ["down"] * 3


def test_what_was_done_to_values_is_an_error(
    mesh: flm.DeviceMesh, layout_map: flm.LayoutMap
) -> None:
    """Of a call that would be recognised, too."""
    model = layout_map.place(Model())
    jitted = flm.jit(step, layout_map=layout_map, donate_argnames="model")
    for _ in range(4):
        jitted(model, X)
    one, two = (layer.bias for layer in model.layers)
    old, kept = one.get_value(), two.get_value()
    jitted(model, X)
    kept = one.get_value()
    one.set_raw_value(old)
    with pytest.raises(flm.LayoutError, match="^model/layers/0/bias: deleted"):
        jitted(model, X)
    one.set_raw_value(two.get_raw_value())
    with pytest.raises(flm.LayoutError, match="are one array, which is donated"):
        jitted(model, X)
    moved = flm.TensorLayout(("data",), mesh).sharding()
    one.set_raw_value(jax.device_put(kept, moved))
    with pytest.raises(flm.LayoutError, match=r"model/layers/0/bias .*: wanted"):
        jitted(model, X)
    # Two arrays in one piece of memory are copied before they are donated.
    both = np.ones(8, np.float32)
    for bias in (one, two):
        bias.set_raw_value(jax.device_put(both, kept.sharding))
    jitted(model, X)
    np.testing.assert_allclose(one[...], np.float32(0.9) * both)
    with pytest.raises(Exception, match="trace level"):
        jax.jit(lambda x: jitted(model, x))(X)
    jitted(model, X)
