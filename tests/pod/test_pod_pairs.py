"""Pairs of state arguments and the results that update them."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from pods import rules, struct

import flax_layoutmap as flm
from flax_layoutmap.pod._pairs import flows

P = PartitionSpec
MESH = "fsdp=4,tensor=2"
JAX_MESH: Any = flm.DeviceMesh.abstract(MESH).jax_mesh
X, W = struct(8192, 2048), struct(2048, 2048)


def on(shape: tuple[int, ...], *spec: Any) -> jax.ShapeDtypeStruct:
    """A shape with a sharding of its own."""
    sharding = NamedSharding(JAX_MESH, P(*spec))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


SHARDED = on((1024, 1024), "fsdp", "tensor")
SPLIT = on((4096, 1024), "fsdp")


def gradient(w: Any, x: Any) -> Any:
    return jax.grad(lambda w: ((x @ w) ** 2).mean())(w)


def moved(w: Any, x: Any) -> Any:
    """New values, in another layout."""
    return jax.lax.with_sharding_constraint(w - gradient(w, x), P(None, "tensor"))


DRIFT = ("P(fsdp, tensor)", "P(-, tensor)")


def test_a_training_step_of_jax_jit_without_rules() -> None:
    tx = optax.adam(1e-3)

    def step(params: Any, opt_state: Any, x: Any) -> Any:
        gradients = {"w": gradient(params["w"], x)}
        updates, opt_state = tx.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
        return jax.lax.with_sharding_constraint(params, P(None, "tensor")), opt_state

    params = {"w": SHARDED}
    shapes: Any = jax.eval_shape(tx.init, params)
    opt_state = jax.tree.map(lambda s: SHARDED if s.ndim else s, shapes)
    reports = [
        flm.pod.plan(jax.jit(step, donate_argnums=gone), params, opt_state, SPLIT)
        for gone in ((), (0, 1))
    ]
    for report in reports:
        part = 1024 * 1024 * 4 // 8
        assert report.memory.at_rest == {
            "parameter": part,
            "optimizer": 2 * part + 4,
            "data": 4096 * 1024 * 4 // 4,
        }
        (drift,) = report.drift
        assert (drift.path, drift.before, drift.after) == ("params/w", *DRIFT)
    (warning,) = reports[0].warnings
    assert warning.startswith("4 leaves of state, such as params/w, are not donated")
    assert reports[1].warnings == ()


@pytest.mark.parametrize(
    ("step", "params"),
    [
        (lambda p, x: {"w": moved(p["w"], x), "loss": x.sum()}, {"w": SHARDED}),
        (lambda p, x: ({"loss": x.sum()}, [{"w": moved(p["w"], x)}]), {"w": SHARDED}),
        (
            lambda p, x: {**p, "params": [moved(p["params"][0], x)], "loss": x.sum()},
            {"params": [SHARDED], "step": struct(dtype=jnp.int32)},
        ),
    ],
)
def test_state_that_comes_back_in_a_larger_tree(step: Any, params: Any) -> None:
    report = flm.pod.plan(jax.jit(step), params, SPLIT)
    assert [(one.before, one.after) for one in report.drift] == [DRIFT]
    assert report.memory.at_rest["parameter"] == 1024 * 1024 * 4 // 8


def test_an_array_alone_is_state_where_it_is_donated() -> None:
    kept = flm.pod.plan(jax.jit(moved), SHARDED, SPLIT)
    assert kept.memory.at_rest.keys() == {"data"} and kept.drift == ()
    donated = flm.pod.plan(jax.jit(moved, donate_argnums=0), SHARDED, SPLIT)
    assert [(one.path, one.before, one.after) for one in donated.drift] == [
        ("w", *DRIFT)
    ]
    assert donated.memory.at_rest.keys() == {"parameter", "data"}


@pytest.mark.parametrize(
    ("step", "args"),
    [
        (lambda params, x: x + 1, ({"w": SHARDED}, SPLIT)),
        (lambda params, x: x @ params["w"], ({"w": SHARDED}, SPLIT)),
        (lambda params, xy: (xy[0] * 2, xy[1] + 1), ({"w": SHARDED}, (SPLIT, SPLIT))),
        (lambda params, b: {**b, "y": b["x"] + 1}, ({"w": SHARDED}, {"x": SPLIT})),
    ],
)
def test_what_looks_like_a_result_is_no_state(step: Any, args: Any) -> None:
    report = flm.pod.plan(jax.jit(step), *args)
    assert report.memory.at_rest.keys() == {"data"}
    assert report.drift == () and report.warnings == ()


# ------------------------------------------------------------------ with rules


def plan(step: Any, *args: Any, **more: Any) -> flm.pod.PodReport:
    layout_map = rules("fsdp", w=("fsdp", "tensor"))
    return flm.pod.plan(step, *args, mesh=MESH, layout_map=layout_map, **more)


def test_gradients_are_no_new_values() -> None:
    def gradients(params: Any, x: Any) -> Any:
        return x.sum(), {"w": gradient(params["w"], x)}

    report = plan(gradients, {"w": W}, X)
    assert report.warnings == () and report.drift == ()
    # They still have the names of their parameters.
    assert {one.path for one in report.collectives if one.kind == "reduce-scatter"} == {
        "params/w"
    }

    def both(params: Any, x: Any) -> Any:
        _, found = gradients(params, x)
        return found, jax.tree.map(lambda w, g: w - g, params, found)

    (warning,) = plan(both, {"w": W}, X).warnings
    assert warning.startswith("1 leaf of state, such as params/w, is not donated")


def test_state_that_comes_back_in_parts() -> None:
    def step(params: Any, moments: Any, x: Any) -> Any:
        """Adam by hand; nothing comes back as it came."""
        g = gradient(params["w"], x)
        m, v = 0.9 * moments["w"] + g, 0.9 * moments["v"]["w"] + g * g
        new = jax.lax.with_sharding_constraint(params["w"] - m / v, P(None, "tensor"))
        return x.sum(), new, v, m

    given = {"w": W}, {"w": W, "v": {"w": W}}, X
    found = plan(step, *given)
    (warning,) = found.warnings
    assert warning.startswith("3 leaves of state, such as ")
    assert [one.path for one in found.drift] == ["params/w"]
    assert plan(step, *given, donate_argnames=("params", "moments")).warnings == ()


@pytest.mark.parametrize(
    ("step", "found"),
    [
        (lambda w, x: w - 0.1 * gradient(w, x), {0}),
        (gradient, set()),
        (lambda w, x: jnp.where(x.sum() > 0, w - gradient(w, x), w), {0}),
        (lambda w, x: w.at[0].add(x[0]), {0}),
        (lambda w, x: jax.lax.cond(x.sum() > 0, lambda: w * 2, lambda: x), {0, 1}),
        (jax.checkpoint(lambda w, x: jnp.tanh(w) + jnp.exp(x)), {0, 1}),
        (lambda w, x: jax.lax.scan(lambda c, r: (c * 2, r), w, x)[0], {0}),
        (lambda w, x: jax.lax.scan(lambda c, r: (c, r * 2), w, x)[1], {1}),
        (lambda w, x: jax.lax.fori_loop(0, 3, lambda i, c: c + x, w), {0, 1}),
        (lambda w, x: jnp.zeros_like(w).at[0].add(w[0]), set()),
    ],
)
def test_what_a_result_is_a_new_value_of(step: Any, found: set[int]) -> None:
    square = jnp.ones((4, 4))
    assert flows(jax.make_jaxpr(step)(square, square).jaxpr) == [found]
