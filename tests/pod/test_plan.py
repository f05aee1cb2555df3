"""flm.pod.plan: its collectives compared with those of compiled steps."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P
from pods import (
    FULLY,
    MEGATRON,
    PARAMS,
    ROWS,
    SQUARE,
    X,
    compiled,
    kinds,
    loss_of,
    payload,
    plan,
    rules,
    sgd,
    struct,
)

import flax_layoutmap as flm

# A step, its arguments, and layouts of its state.
Made = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def descends(loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def step(state: Any, x: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, jax.grad(loss)(state, x))

    return step


# ------------------------------------------------------------------ steps of many kinds


def accumulating_step() -> Made:
    tx = optax.MultiSteps(optax.adam(1e-3), 4)

    def step(state: Any, x: Any) -> Any:
        params, opt_state = state["params"], state["opt_state"]
        loss, gradients = jax.value_and_grad(loss_of)(params, x)
        updates, opt_state = tx.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
        return {"params": params, "opt_state": opt_state}, loss

    state = {"params": PARAMS, "opt_state": jax.eval_shape(tx.init, PARAMS)}
    return step, (state, X), FULLY


def shard_map_step() -> Made:
    def loss(state: Any, x: Any) -> Any:
        product = jax.shard_map(
            lambda x, w: jax.lax.psum(x @ w, "model"),
            in_specs=(P("data", "model"), P("model", None)),
            out_specs=P("data", None),
        )
        return (product(x, state["w"]) ** 2).mean()

    return descends(loss), (SQUARE, X), ROWS


def while_loop(state: Any, x: Any) -> Any:
    def body(carry: Any) -> Any:
        return jnp.tanh(carry[0] @ state["w"]), carry[1] + 1

    return jax.lax.while_loop(lambda carry: carry[1] < 5, body, (x, 0))[0]


STACK = {"w": struct(6, 16, 32), "v": struct(6, 32, 16)}
STACKED = {"w": (None, "data", "model"), "v": (None, "model", "data")}


def layer(x: Any, one: Any) -> Any:
    return x + jnp.tanh(x @ one["w"]) @ one["v"], None


def scanned(params: Any, x: Any) -> Any:
    return (jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2).mean()


def layers(loss: Callable[[Any, Any], Any]) -> Callable[[], Made]:
    return lambda: (descends(loss), (STACK, X), STACKED)


STEPS: dict[str, Callable[[], Made]] = {
    "tensor parallel": lambda: (descends(loss_of), (PARAMS, X), MEGATRON),
    "fully sharded": lambda: (descends(loss_of), (PARAMS, X), FULLY),
    "optax.MultiSteps": accumulating_step,
    "shard_map": shard_map_step,
    "while_loop": lambda: (while_loop, (SQUARE, X), ROWS),
    "layers in a scan": layers(scanned),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_compiler_agrees(name: str, mesh: flm.DeviceMesh) -> None:
    """Same axes, kinds and payloads as in the program for 8 CPU devices."""
    step, args, layouts = STEPS[name]()
    layout_map = rules(**layouts)
    report = flm.pod.plan(
        step, *args, mesh=mesh, layout_map=layout_map, donate_argnames="state"
    )
    assert not report.unread
    jitted = flm.jit(step, layout_map=layout_map.on(mesh), donate_argnames="state")
    jax_mesh: Any = mesh.jax_mesh
    with jax.set_mesh(jax_mesh):
        wanted = payload(compiled(jitted, *args, mesh=mesh))
    assert wanted and payload(report.collectives) == wanted


def test_tensor_parallel_and_data_parallel() -> None:
    report = plan(sgd, PARAMS, X, layout_map=rules(**MEGATRON))
    assert kinds(report) == {
        ("all-reduce", ("model",), None): 1,
        ("all-reduce", ("data",), "params/up"): 1,
        ("all-reduce", ("data",), "params/down"): 1,
        ("all-reduce", ("data",), None): 1,  # the mean of the loss
    }
    (forward,) = (one for one in report.collectives if one.axes == ("model",))
    size = 256 * 16 * 4
    assert (forward.shape, forward.dtype, forward.bytes) == ((256, 16), "float32", size)
    assert forward.wire_bytes == 2 * size * 3 // 4
    assert forward.source is not None
    assert forward.source.startswith("pods.py:")
    assert forward.source.endswith(" loss_of")
    assert report.flops_per_device * 8 == report.flops_total == 5 * 2 * 512 * 16 * 32


def test_fully_sharded_parameters_are_gathered_and_their_gradients_scattered() -> None:
    report = plan(sgd, PARAMS, X, layout_map=rules(**FULLY))
    found = kinds(report)
    for path in ("params/up", "params/down"):
        assert found["all-gather", ("data",), path] == 1
        assert found["reduce-scatter", ("data",), path] == 1
    (gather,) = (
        one
        for one in report.collectives
        if one.kind == "all-gather" and one.path == "params/up"
    )
    # Of 16 × 8 floats on each device half is there already.
    assert (gather.shape, gather.bytes, gather.wire_bytes) == ((16, 8), 512, 256)


def test_one_device() -> None:
    report = plan(sgd, PARAMS, X, layout_map=rules(**FULLY), mesh="data=1,model=1")
    assert report.collectives == () and report.unread == {}
    assert report.memory.at_rest == {"parameter": 2 * 16 * 32 * 4, "data": 512 * 16 * 4}
    assert report.flops_per_device == report.flops_total == 5 * 2 * 512 * 16 * 32
    assert ": 1 device, by partitioner" in report.report()


def test_paths_of_gradients_that_are_summed_in_a_branch() -> None:
    step, args, _ = accumulating_step()
    report = plan(step, *args, layout_map=rules(**MEGATRON), donate_argnames="state")
    found = kinds(report)
    for path in ("state/params/up", "state/params/down"):
        assert found["all-reduce", ("data",), path] == 1


def test_lines_of_functions_of_jax_that_are_jitted(mesh: flm.DeviceMesh) -> None:
    """JAX lowers them once for all their calls, with no line; `sort` has a region."""

    def step(state: Any, x: Any) -> Any:
        return jnp.sort(jax.nn.log_softmax(x @ state["w"]), 1).sum()

    layout_map = rules(w=(None, "model"))
    report = plan(step, SQUARE, X, layout_map=layout_map)
    sources = {each.source for each in report.collectives}
    line = step.__code__.co_firstlineno + 1
    name = "test_lines_of_functions_of_jax_that_are_jitted.step"
    assert sources == {f"test_plan.py:{line} {name}"}
    # The compiler's word names the line in the same way.
    jitted = flm.jit(step, layout_map=layout_map.on(mesh))
    found = compiled(jitted, SQUARE, X, mesh=mesh)
    named = {one.source for one in found} & {*sources, f"{__name__}.py:{line}"}
    assert named, [one.source for one in found]


def test_a_plan_counts_host_memory_apart() -> None:
    params, tx = {"w": struct(64, 64)}, optax.adamw(1e-3)
    layout_map = rules(w=(None, "model"))
    layout = flm.TensorLayout((None, "model"), memory_kind="pinned_host")
    layout_map.optimizer["w"] = layout

    @flm.jit(layout_map=layout_map, donate_argnames=("params", "opt_state"))
    def step(params: Any, opt_state: Any, x: jax.Array) -> Any:
        gradients = jax.grad(lambda p: jnp.tanh(x @ p["w"]).sum())(params)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    report = plan(step, params, jax.eval_shape(tx.init, params), struct(8, 64))
    moment = 64 * 64 * 4 // 4  # bytes on one device
    assert report.memory.at_rest["parameter"] == moment
    assert report.memory.at_rest["optimizer"] == 4
    assert report.memory.host_at_rest == {"optimizer": 2 * moment}
    line = "at rest in host memory: 8.0 KiB per device"
    assert line in report.report().splitlines()
