"""flm.pod.plan: what an optimizer gathers for a parameter has the path of that."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import flax_layoutmap as flm

WIDE, HIGH = (256, 512), (512, 256)


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def planned(optimizer: Any, mesh: str = "fsdp=4,tensor=2") -> flm.pod.PodReport:
    layout_map = flm.LayoutMap(batch="fsdp")
    layout_map["up"], layout_map["down"] = ("fsdp", "tensor"), ("tensor", "fsdp")
    params = {"up": struct(*WIDE), "down": struct(*HIGH)}
    state = {"params": params, "opt": jax.eval_shape(optimizer.init, params)}

    def step(state: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return ((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2).mean()

        gradients = jax.grad(loss)(state["params"])
        updates, opt = optimizer.update(gradients, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    x = struct(4096, 256)
    options: Any = {"layout_map": layout_map, "donate_argnames": "state"}
    return flm.pod.plan(step, state, x, mesh=mesh, **options)


def test_what_muon_gathers_has_a_path() -> None:
    report = planned(optax.contrib.muon(1e-3))
    gathers = [one for one in report.collectives if one.kind == "all-gather"]
    inside = [one for one in gathers if "newton_schulz" in str(one.source)]
    assert len(inside) == 20
    paths = [one.path for one in inside]
    assert {*paths} == {"state/params/up", "state/params/down"}
    assert paths.count("state/params/up") == 10
    with pytest.raises(AssertionError, match="newton_schulz"):
        report.forbid(path="params/up", kind="all-gather", source="newton_schulz")
    # Activations, and norms, belong to no parameter.
    (activations,) = [one for one in report.collectives if one.shape == (1024, 256)]
    assert activations.path is None
    norms = [one for one in report.collectives if one.shape in ((), (1,))]
    assert norms and {one.path for one in norms} == {None}


def test_what_no_optimizer_gathers_has_no_other_path() -> None:
    report = planned(optax.adamw(1e-3))
    found = {(one.kind, one.path) for one in report.collectives}
    assert found == {
        (kind, f"state/params/{name}")
        for kind in ("all-gather", "reduce-scatter")
        for name in ("up", "down")
    } | {("all-reduce", None)}
