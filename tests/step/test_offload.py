"""State that rules keep in host memory: steps, donation, kinds, bits, messages."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from helpers import needs_libtpu
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType

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


@pytest.mark.parametrize("axis_types", ["auto", "explicit"])
def test_axis_types(axis_types: Any) -> None:
    mesh = flm.DeviceMesh("fsdp=8", axis_types=axis_types)
    found = []
    for kind in ("device", "pinned_host"):
        layout_map = flm.LayoutMap(mesh)
        layout_map["w"] = flm.TensorLayout(("fsdp", None), memory_kind=kind)

        @flm.jit(layout_map=layout_map, donate_argnames="params")
        def step(params: Any) -> Any:
            return {"w": params["w"] * 0.5 + 1}

        params = layout_map.place({"w": jnp.arange(32.0).reshape(8, 4)})
        params = step(step(params))
        assert kinds(params) == {kind}
        assert step._cache_size() == 1
        found.append(np.asarray(params["w"]))
    np.testing.assert_array_equal(*found)


def test_donated_leaves_are_deleted_and_others_stay() -> None:
    layout_map = rules(optimizer="pinned_host")
    _, model, optimizer, step = train(layout_map, optax.adamw(1e-2), steps=1)
    before = jax.tree.leaves(nnx.state((model, optimizer)))
    step(model, optimizer, np.ones((8, 16), np.float32))
    assert all(leaf.is_deleted() for leaf in before)
    kept = flm.jit(lambda model, optimizer, x: x * 2, layout_map=layout_map)
    before = jax.tree.leaves(nnx.state((model, optimizer)))
    kept(model, optimizer, np.ones((8, 16), np.float32))
    assert not any(leaf.is_deleted() for leaf in before)


def test_linen_and_optax() -> None:
    module: Any = nn.Dense(8)
    tx = optax.adamw(1e-2)
    found = []
    for kind in ("device", "pinned_host"):
        layout_map = rules(optimizer=kind)
        x = np.ones((8, 16), np.float32)
        variables = flm.create(module.init, layout_map, jax.random.key(0), x)
        params: Any = variables["params"]
        state = flm.create_optimizer(params, tx, layout_map=layout_map)

        @flm.jit(layout_map=layout_map, donate_argnames=("params", "state"))
        def step(params: Any, state: Any, x: Any) -> Any:
            def loss_fn(params: Any) -> Any:
                return (module.apply({"params": params}, x) ** 2).mean()

            grads = jax.grad(loss_fn)(params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        for _ in range(2):
            params, state = step(params, state, x)
        assert step._cache_size() == 1
        assert (kinds(params), kinds(state)) == ({"device"}, {kind})
        found.append(jax.tree.map(np.asarray, (params, state)))
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_parameters_for_inference() -> None:
    layout_map = rules(params="pinned_host")
    model = flm.create(lambda: Model(nnx.Rngs(0)), layout_map)
    assert kinds(nnx.state(model)) == {"pinned_host"}
    predict = flm.jit(lambda model, x: model(x), layout_map=layout_map)
    x = np.ones((8, 16), np.float32)
    out = predict(model, x)
    assert out.sharding.memory_kind == "device"
    expected = flm.create(lambda: Model(nnx.Rngs(0)), rules())
    own = flm.jit(lambda model, x: model(x), layout_map=rules())
    np.testing.assert_array_equal(np.asarray(out), np.asarray(own(expected, x)))
    assert kinds(nnx.state(model)) == {"pinned_host"}


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


def test_a_step_that_moves_its_state_itself() -> None:
    layout_map = flm.LayoutMap(MESH)
    layout_map["w"] = flm.TensorLayout(("fsdp",), memory_kind="pinned_host")

    @flm.jit(layout_map=layout_map, donate_argnames="state")
    def step(state: Any) -> Any:
        own = jax.device_put(state["w"], jax.memory.Space.Device) + 1
        return {"w": jax.device_put(own, jax.memory.Space.Host)}

    state = step(step(layout_map.place({"w": jnp.zeros(8)})))
    assert kinds(state) == {"pinned_host"}
    np.testing.assert_array_equal(np.asarray(state["w"]), 2.0)


def on_either(kind: str) -> Any:
    """Parameters in this memory, a loss of them, and a step, by `flm.jit`."""
    layout_map = flm.LayoutMap(MESH)
    layout_map["kernel"] = flm.TensorLayout((None, "fsdp"), memory_kind=kind)

    @flm.jit(layout_map=layout_map)
    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        return ((x @ params["kernel"]) ** 2).mean()

    @flm.jit(layout_map=layout_map)
    def step(params: Any, x: jax.Array) -> Any:
        return {"kernel": params["kernel"] * 0.5 + x.mean()}

    params = {"kernel": np.linspace(-1, 1, 128, dtype=np.float32).reshape(16, 8)}
    return layout_map.place(params), loss_fn, step


@pytest.mark.parametrize(
    "call",
    [
        lambda params, loss_fn, step, x: jax.jit(step)(params, x),
        lambda params, loss_fn, step, x: jax.jit(lambda p: step(step(p, x), x))(params),
        lambda params, loss_fn, step, x: jax.jit(
            lambda p: jax.lax.scan(lambda p, x: (step(p, x), None), p, x[None])[0]
        )(params),
        lambda params, loss_fn, step, x: jax.grad(loss_fn)(params, x),
        lambda params, loss_fn, step, x: jax.jit(jax.grad(loss_fn))(params, x),
        lambda params, loss_fn, step, x: jax.vmap(loss_fn, (None, 0))(params, x[None]),
    ],
    ids=["jit", "twice", "scan", "grad", "jit of grad", "vmap"],
)
def test_inside_transformations_of_jax(call: Any) -> None:
    """New state, and gradients, are in the memory of the state, as by JAX."""
    x = np.ones((8, 16), np.float32)
    found, expected = (call(*on_either(kind), x) for kind in ("pinned_host", "device"))
    assert kinds(found) == ({"pinned_host"} if isinstance(found, dict) else {"device"})
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_disable_jit() -> None:
    tx = optax.sgd(0.1, momentum=0.9)
    layout_map = rules(optimizer="pinned_host", params="pinned_host")
    with jax.disable_jit():
        losses, *trained, _ = train(layout_map, tx, steps=2)
        expected, *_ = train(rules(optimizer="device"), tx, steps=2)
        params, loss_fn, _ = on_either("pinned_host")
        gradients = jax.grad(loss_fn)(params, np.ones((8, 16), np.float32))
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert kinds(nnx.state(trained)) == kinds(gradients) == {"pinned_host"}


@pytest.mark.parametrize("layout_map", [None, rules()], ids=["no rules", "rules"])
def test_data_on_the_host(layout_map: Any) -> None:
    layout = flm.TensorLayout(("data", None), MESH)
    near = flm.distribute_tensor(np.ones((8, 16), np.float32), layout)
    far = flm.distribute_tensor(near, layout.on_host())
    double = flm.jit(lambda x: x * 2 + jnp.ones(16), layout_map=layout_map)
    on_tree = flm.jit(lambda tree: jax.tree.map(double, tree), layout_map=layout_map)
    for _ in range(2):
        assert kinds([double(near), double(far)]) == {"device"}
        assert kinds(on_tree([near])) == {"device"}
        np.testing.assert_array_equal(np.asarray(on_tree([far])[0]), 3)
    assert double._cache_size() == on_tree._cache_size() == 2


def test_without_rules_state_comes_back_as_it_came() -> None:
    layout_map = rules(optimizer="pinned_host")
    _, model, optimizer, _ = train(layout_map, optax.adamw(1e-2), steps=1)

    @flm.jit
    def decay(optimizer: Any) -> None:
        state = nnx.state(optimizer, nnx.optimizer.OptState)
        nnx.update(optimizer, jax.tree.map(lambda x: x * 0, state))

    decay(optimizer)
    state = nnx.state(optimizer, nnx.optimizer.OptState)
    assert kinds(state) == {"pinned_host"}
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(state))


def test_a_checkpoint_keeps_the_kinds(tmp_path: Path) -> None:
    layout_map = rules(optimizer="pinned_host")
    _, model, optimizer, step = train(layout_map, optax.adamw(1e-2), steps=1)
    tree = {"model": model, "optimizer": optimizer}
    flm.checkpoint.save(tmp_path / "1", tree)
    x = np.ones((8, 16), np.float32)
    wanted = float(step(model, optimizer, x))
    plan = flm.checkpoint.plan(tmp_path / "1", tree, layout_map=layout_map)
    moments = [
        leaf for leaf in plan.leaves if "/mu/" in leaf.path or "/nu/" in leaf.path
    ]
    on_host = sum(leaf.bytes_per_device for leaf in moments)
    every = sum(leaf.bytes_per_device for leaf in plan.leaves)
    assert on_host and plan.bytes_per_device == every - on_host
    restored = flm.checkpoint.restore(tmp_path / "1", tree, layout_map=layout_map)
    state = nnx.state(restored["optimizer"], nnx.optimizer.OptState)
    assert kinds(state) == {"pinned_host"}
    assert kinds(nnx.state(restored["model"])) == {"device"}
    assert float(step(restored["model"], restored["optimizer"], x)) == wanted
    assert step._cache_size() == 1


class Named(Model):
    """A model of NNX that names its activation."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(checkpoint_name(jnp.sin(self.up(x)), "hidden"))


class NamedLinen(nn.Module):
    """The same of Linen."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(16)(checkpoint_name(jnp.sin(nn.Dense(32)(x)), "hidden"))


def of_nnx(policy: Any) -> tuple[Any, Any]:
    """How to make a model, and its gradients, with a policy for activations."""
    call = nnx.remat(lambda model, x: model(x), policy=policy)
    grad = nnx.grad(lambda model, x: (call(model, x) ** 2).mean())
    return lambda: Named(nnx.Rngs(0)), grad


def of_linen(policy: Any) -> tuple[Any, Any]:
    module: Any = nn.remat(NamedLinen, policy=policy)()
    grad = jax.grad(lambda variables, x: (module.apply(variables, x) ** 2).mean())
    return lambda: module.init(jax.random.key(0), np.ones((8, 16), np.float32)), grad


@pytest.mark.parametrize("of", [of_nnx, of_linen])
def test_activations_by_name(of: Any) -> None:
    policies = jax.checkpoint_policies
    offloading = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["hidden"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    layout_map, x = rules(params="pinned_host"), np.ones((8, 16), np.float32)
    found = []
    for policy in (policies.save_only_these_names("hidden"), offloading):
        make, grad = of(policy)
        model, gradients = (
            flm.create(make, layout_map),
            flm.jit(grad, layout_map=layout_map),
        )
        text = str(gradients.trace(model, x).jaxpr)
        # The activation goes to the host and comes back.
        assert text.count("<host>[8,32]") == (2 if policy is offloading else 0)
        found.append(gradients(model, x))
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_result_that_the_step_moves_to_the_host(kind: Any) -> None:
    mesh = flm.DeviceMesh(jax.make_mesh((8,), ("data",), axis_types=(kind,)))
    layout_map = flm.LayoutMap(mesh)
    layout = flm.TensorLayout(("data", None), memory_kind="pinned_host")

    @flm.jit(layout_map=layout_map)
    def step(x: Any) -> Any:
        return flm.distribute_tensor(x * 2, layout)

    moved = step(np.ones((8, 4), np.float32))
    assert moved.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(np.asarray(moved), 2 * np.ones((8, 4)))


@needs_libtpu
@pytest.mark.usefixtures("own_temporary_folder")
def test_a_layer_at_a_time_on_a_tpu() -> None:
    """The figures of docs/jit.md: 17 MiB per device, and 129 for the whole leaf."""

    def predict(params: Any, x: jax.Array, *, whole: bool) -> jax.Array:
        def layer(x: jax.Array, kernel: Any) -> Any:
            return x + jnp.tanh(x @ jax.device_put(kernel, near)), None

        near = jax.memory.Space.Device
        layers = jax.device_put(params["layers"], near) if whole else params["layers"]
        return jax.lax.scan(layer, x, layers)[0]

    layout_map = flm.LayoutMap(batch="data")
    layout_map["layers"] = flm.TensorLayout(
        (None, None, "model"), memory_kind="pinned_host"
    )
    peaks = []
    for whole in (False, True):
        report = flm.pod.compile(
            jax.jit(functools.partial(predict, whole=whole)),
            {"layers": jax.ShapeDtypeStruct((8, 4096, 4096), jnp.float32)},
            jax.ShapeDtypeStruct((64, 4096), jnp.float32),
            mesh="data=1,model=4",
            topology="v5e:2x2",
            layout_map=layout_map,
        )
        peaks.append(round((report.memory.peak_bytes or 0) / 2**20))
    assert peaks == [17, 129]
