"""What the TPU compiler moves in bfloat16, where the program has float32."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import flax_layoutmap as flm

GATHERED = P(None, "t")


def narrow(params: Any, x: Any) -> Any:
    return (jnp.tanh(x @ params["w"]) ** 2).mean()


def asked(params: Any, x: Any) -> Any:
    w = jax.lax.with_sharding_constraint(params["w"], GATHERED)
    return (jnp.tanh(x @ w) ** 2).mean()


def converted_late(params: Any, x: Any) -> Any:
    w = jax.lax.with_sharding_constraint(params["w"], GATHERED).astype(jnp.bfloat16)
    return jnp.tanh(x.astype(jnp.bfloat16) @ w).astype(jnp.float32).mean()


def exact(params: Any, x: Any) -> Any:
    with jax.default_matmul_precision("highest"):
        return narrow(params, x)


def as_tensor_float(params: Any, x: Any) -> Any:
    with jax.default_matmul_precision("tensorfloat32"):
        return narrow(params, x)


def used_otherwise(params: Any, x: Any) -> Any:
    w = jax.lax.with_sharding_constraint(params["w"], GATHERED)
    return (jnp.tanh(x @ params["w"])).mean() + (w**2).sum()


# As libtpu 0.0.42 moves the kernel of each, compiled for v5e:2x4 with larger shapes.
COMPILED = [
    (narrow, "bfloat16"),
    (asked, "bfloat16"),
    (converted_late, "bfloat16"),
    (exact, "float32"),
    (as_tensor_float, "float32"),
    (used_otherwise, "float32"),
]


def planned(step: Callable[[Any, Any], Any], **where: Any) -> flm.pod.PodReport:
    layout_map = flm.LayoutMap(batch="f")
    layout_map["w"] = ("f", "t")
    params = {"w": jax.ShapeDtypeStruct((256, 512), jnp.float32)}
    x = jax.ShapeDtypeStruct((4096, 256), jnp.float32)
    mesh = "f=4,t=2"
    return flm.pod.plan(step, params, x, mesh=mesh, layout_map=layout_map, **where)


@pytest.mark.parametrize(("step", "dtype"), COMPILED)
def test_as_the_tpu_compiler_moves_kernels(
    step: Callable[[Any, Any], Any], dtype: str
) -> None:
    report = planned(step, topology="v5e:2x4")
    (gather,) = [one for one in report.collectives if one.kind == "all-gather"]
    assert (gather.path, gather.dtype) == ("params/w", dtype)
    assert gather.bytes == 256 * 256 * jnp.dtype(dtype).itemsize


def test_gradients_are_summed_as_they_are() -> None:
    report = planned(jax.grad(narrow), topology="v5e:2x4")
    assert {(one.kind, one.dtype) for one in report.collectives if one.path} == {
        ("all-gather", "bfloat16"),
        ("reduce-scatter", "float32"),
    }


def test_without_a_topology_a_plan_is_of_what_is_written() -> None:
    (gather,) = [one for one in planned(narrow).collectives if one.path]
    assert (gather.kind, gather.dtype) == ("all-gather", "float32")
