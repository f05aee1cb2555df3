"""flm.pod.plan: kernels that are changed before they are gathered keep their path."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import flax_layoutmap as flm

MESH = "data=4,model=2"
F8 = jnp.float8_e4m3fn


def struct(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


X, W = struct(512, 16), struct(16, 64)
INT8, MASK = struct(16, 64, dtype=jnp.int8), struct(16, 64, dtype=jnp.bool_)
FLOAT = jnp.float32


def planned(step: Any, params: Any, sharded: str = "w") -> flm.pod.PodReport:
    """A plan with the last dim but one of a parameter over the batch axis."""
    layout_map = flm.LayoutMap(batch="data", strict=False)
    shape = params[sharded].shape
    layout_map[f"^{sharded}$"] = (None,) * (len(shape) - 2) + ("data", None)
    return flm.pod.plan(step, params, X, mesh=MESH, layout_map=layout_map)


def scanned(params: Any, x: Any) -> Any:
    scale = 1 + params["scale"]

    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ (w * scale)), None

    return jax.lax.scan(layer, x, params["layers"])[0].sum()


def rematerialised(params: Any, x: Any) -> Any:
    @jax.checkpoint
    def loss(params: Any) -> Any:
        return (jnp.tanh(x @ (params["w"] * params["scale"])) ** 2).mean()

    return jax.grad(loss)(params)


CHANGED: dict[str, tuple[Any, dict[str, Any]]] = {
    "scaled": (
        lambda params, x: x @ (params["w"].astype(x.dtype) * params["scale"]),
        {"w": INT8, "scale": struct(1, 64, dtype=FLOAT)},
    ),
    "merged with an adapter": (
        lambda params, x: x @ (params["w"] + params["a"] @ params["b"]),
        {"w": W, "a": struct(16, 4), "b": struct(4, 64)},
    ),
    "standardised": (
        lambda params, x: x @ jax.nn.standardize(params["w"], axis=1),
        {"w": W},
    ),
    "joined": (
        lambda params, x: x @ jnp.concatenate([params["bias"], params["w"]], 1),
        {"w": W, "bias": struct(16, 8)},
    ),
    "masked": (
        lambda params, x: x @ jnp.where(params["mask"], params["w"], 0),
        {"mask": MASK, "w": W},
    ),
    "one plus": (
        lambda params, x: x @ (params["w"] * (1 + params["scale"])),
        {"w": W, "scale": struct(16, 1)},
    ),
    "in eight bits": (
        lambda params, x: x.astype(F8) @ (params["w"] / params["scale"]).astype(F8),
        {"w": W, "scale": struct(dtype=FLOAT)},
    ),
    "in a gradient": (rematerialised, {"w": W, "scale": struct(16, 1)}),
    "as a table": (
        lambda params, x: (params["w"] * 8)[x[:, 0].astype(int)],
        {"w": struct(16, 4)},
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_kernel_that_is_changed_keeps_its_path(name: str) -> None:
    step, params = CHANGED[name]
    report = planned(step, params)
    paths = {one.path for one in report.collectives if one.kind == "all-gather"}
    assert "params/w" in paths, paths
    with pytest.raises(AssertionError, match="all-gather over data of params/w"):
        report.forbid(path="params/w", kind="all-gather")


def test_every_kernel_that_is_joined_is_found() -> None:
    """As a step does with queries, keys and values, to multiply once."""

    def step(params: Any, x: Any) -> Any:
        return x @ jnp.concatenate([params["key"] * 2, params["w"], params["bias"]], 1)

    params = {"w": W, "key": struct(16, 32), "bias": struct(16, 8)}
    report = planned(step, params)
    (one,) = report.collectives
    assert one.path == "params/w" and one.joined == ("params/key", "params/bias")
    for path in ("key", "w", "bias"):
        with pytest.raises(AssertionError, match="all-gather over data"):
            report.forbid(path=f"params/{path}$", kind="all-gather")
    # As other parameters that are gathered to be used, it is no reshard.
    assert report.reshards == ()
    assert report.to_json()["collectives"][0]["joined"] == ["params/key", "params/bias"]


def test_kernels_of_a_scan_that_are_changed_in_each_round() -> None:
    """What they are scaled by is made outside of it."""
    params = {"layers": struct(3, 16, 16), "scale": struct(16, 1)}
    report = planned(scanned, params, "layers")
    (one,) = [one for one in report.collectives if one.kind == "all-gather"]
    assert (one.path, one.executions) == ("params/layers", 3)


def test_a_kernel_that_is_changed_before_a_shard_map() -> None:
    mesh: Any = flm.DeviceMesh.abstract(MESH).jax_mesh

    def inside(x: Any, w: Any) -> Any:
        return x @ jax.lax.all_gather(w * 2, "data", tiled=True)

    def step(params: Any, x: Any) -> Any:
        specs = P("data"), P("data")
        mapped = jax.shard_map(inside, mesh=mesh, in_specs=specs, out_specs=P("data"))
        return mapped(x, params["w"] * params["scale"])

    report = planned(step, {"w": W, "scale": struct(16, 1)})
    (one,) = report.collectives
    assert (one.kind, one.path) == ("all-gather", "params/w")


def test_a_cache_that_is_written_to_keeps_its_path() -> None:
    """Data is in it now; and it is no parameter."""

    def step(state: Any, x: Any, at: Any) -> Any:
        rows = jnp.broadcast_to(x[:, None, :8], (512, 1, 8)).astype(jnp.int8)
        cache = jax.lax.dynamic_update_slice(state["cache"], rows, (0, at, 0))
        whole = jax.lax.with_sharding_constraint(cache * state["scale"], P())
        return {**state, "cache": cache}, whole

    layout_map = flm.LayoutMap(batch="data", strict=False)
    layout_map["cache"] = ("data", None, None)
    cache = struct(512, 4, 8, dtype=jnp.int8)
    args = {"cache": cache, "scale": struct(8)}, X, struct(dtype=jnp.int32)
    options: Any = {"donate_argnames": "state", "layout_map": layout_map}
    report = flm.pod.plan(step, *args, mesh=MESH, **options)
    assert [one.path for one in report.collectives] == ["state/cache"]


def test_what_has_data_in_it_is_no_parameter() -> None:
    """Nor is a norm of a parameter; a counter makes no difference."""

    def step(params: Any, x: Any) -> Any:
        whole = jax.lax.with_sharding_constraint(x + params["bias"], P())
        norms = jax.lax.with_sharding_constraint(jnp.abs(params["w"]).sum(1), P())
        return whole.sum() + norms.sum() + (params["w"] ** 2).sum() + params["count"]

    count = struct(dtype=jnp.int32)
    params = {"w": struct(512, 64), "bias": struct(512, 16), "count": count}
    report = planned(step, params)
    found = {(one.kind, one.path) for one in report.collectives}
    assert found == {("all-gather", None), ("all-reduce", None)}


def test_a_gradient_keeps_the_path_of_its_parameter() -> None:
    """Of products of parameters alone, too: those of a regulariser."""

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return ((params["w"] @ params["other"]) ** 2).sum()

        gradients = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - g, params, gradients), x

    params = {"w": struct(64, 16), "other": struct(16, 128)}
    report = planned(step, params)
    paths = {one.path for one in report.collectives if one.kind != "all-gather"}
    assert paths == {"params/other"}
