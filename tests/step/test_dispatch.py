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
        scale = self.scale * self.config.scale * self.sizes[0]
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


def nothing(model: Any) -> None:
    del model


def adds(model: Any) -> None:
    model.extra = nnx.Param(jnp.full(8, 0.5))


def replaces(model: Any) -> None:
    model.layers[0].bias = nnx.Param(model.layers[0].bias[...] + 1)


def replaces_a_module(model: Any) -> None:
    model.layers[1] = nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(7))


def swaps(model: Any) -> None:
    model.layers[0], model.layers[1] = model.layers[1], model.layers[0]


def ties(model: Any) -> None:
    model.layers[1].kernel = model.layers[0].kernel


def edits_static(model: Any) -> None:
    model.scale = 2.0


def edits_in_place(model: Any) -> None:
    model.config.scale = 3.0


def edits_a_list(model: Any) -> None:
    model.sizes[0] = 3.0


def edits_metadata_in_place(model: Any) -> None:
    model.layers[0].bias.get_metadata()["tags"][0] = 3.0


def new_value(model: Any) -> None:
    model.layers[0].bias.set_value(jnp.full(8, 0.25))


def numpy_value(model: Any) -> None:
    model.layers[0].bias.set_raw_value(np.full(8, 0.25, np.float32))


def to_eval(model: Any) -> None:
    model.eval()


CHANGES = [
    nothing,
    adds,
    replaces,
    replaces_a_module,
    swaps,
    ties,
    edits_static,
    edits_in_place,
    edits_a_list,
    edits_metadata_in_place,
    new_value,
    numpy_value,
    to_eval,
]


@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_calls(
    change: Callable[[Any], None], layout_map: flm.LayoutMap
) -> None:
    """Whatever a user does to a model, the next call sees it, as an eager one does."""
    jitted = flm.jit(step, layout_map=layout_map, donate_argnames="model")
    ours, theirs = layout_map.place(Model()), Model()
    for _ in range(4):
        jitted(ours, X)
        step(theirs, X)
    change(ours)
    change(theirs)
    layout_map.place(ours)
    for _ in range(4):
        np.testing.assert_allclose(
            jitted(ours, X), step(theirs, X), rtol=1e-2, atol=1e-2
        )
    a, b = (jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (ours, theirs))
    for one, other in zip(a, b, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


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


def test_the_function_runs_once_for_each_program(layout_map: flm.LayoutMap) -> None:
    ran: list[int] = []

    def counted(model: Any, x: Any) -> Any:
        ran.append(1)
        return step(model, x)

    model = layout_map.place(Model())
    jitted = flm.jit(counted, layout_map=layout_map, donate_argnames="model")
    jitted.lower(model, X)
    assert jitted.eval_shape(model, X).shape == X.shape
    for _ in range(4):
        jitted(model, X)
    assert len(ran) == jitted._cache_size() == 1
    jitted(model, X[:4])
    assert len(ran) == jitted._cache_size() == 2
