"""flm.pod.plan: gradients of kernels that the model itself gathers, by a constraint."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import flax_layoutmap as flm

ASKED = jax.lax.with_sharding_constraint
FLOAT = jnp.float32
X = jax.ShapeDtypeStruct((8192, 1024), jnp.bfloat16)
KERNEL, HEADS = (1024, 4096), (1024, 16, 128)


def planned(
    product: Any,
    shape: tuple[int, ...],
    dtype: Any = jnp.bfloat16,
    *,
    spec: Any = ("fsdp", "tensor"),
    axis_types: Any = "auto",
) -> flm.pod.PodReport:
    """A step with one kernel, which it gathers over "fsdp"."""
    mesh = flm.DeviceMesh.abstract("fsdp=4,tensor=2", axis_types=axis_types)
    layout_map = flm.LayoutMap(mesh, batch="fsdp")
    layout_map["w"] = (*spec, *(None,) * (len(shape) - len(spec)))

    def step(state: Any, x: Any) -> Any:
        def loss(state: Any) -> Any:
            return (product(x, state["w"]).astype(FLOAT) ** 2).mean()

        return jax.tree.map(lambda w, g: w - g, state, jax.grad(loss)(state))

    state = {"w": jax.ShapeDtypeStruct(shape, dtype)}
    return flm.pod.plan(step, state, X, layout_map=layout_map, donate_argnames="state")


def plain(x: Any, w: Any) -> Any:
    return x @ ASKED(w, P(None, "tensor"))


def cast(x: Any, w: Any) -> Any:
    return x @ ASKED(w.astype(x.dtype), P(None, "tensor"))


def heads(x: Any, w: Any) -> Any:
    return jnp.einsum("bd,dhk->bhk", x, ASKED(w, P(None, "tensor")))


def flattened(x: Any, w: Any) -> Any:
    return x @ ASKED(w, P(None, "tensor")).reshape(1024, -1)


def explicit(x: Any, w: Any) -> Any:
    return x @ jax.sharding.reshard(w, P(None, "tensor"))


GATHERED: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "plain": (plain, KERNEL, {}),
    "of another dtype": (cast, KERNEL, {"dtype": FLOAT}),
    "heads": (heads, HEADS, {}),
    "flattened": (flattened, HEADS, {}),
    "explicit": (explicit, KERNEL, {"axis_types": "explicit"}),
}


@pytest.mark.parametrize("name", GATHERED)
def test_sums_that_are_sliced_behind_a_transpose_are_scattered(name: str) -> None:
    """As libtpu 0.0.42 does for all of these on v5e:2x4: they were compiled once."""
    product, shape, options = GATHERED[name]
    report = planned(product, shape, **options)
    found = [one for one in report.collectives if "fsdp" in one.axes]
    gathers = [(one.kind, one.path, one.bytes) for one in found]
    size = 1024 * 4096 if shape == KERNEL else 1024 * 16 * 128
    assert gathers == [
        ("all-gather", "state/w", size),
        ("reduce-scatter", "state/w", size),
    ]


def test_sums_that_are_needed_whole_are_not_scattered() -> None:
    def step(state: Any, x: Any) -> Any:
        def loss(state: Any) -> Any:
            return (plain(x, state["w"]).astype(FLOAT) ** 2).mean()

        gradients = jax.grad(loss)(state)
        whole = ASKED(gradients["w"] * 2, P(None, "tensor"))
        return jax.tree.map(lambda w, g: w - g, state, gradients), whole

    layout_map = flm.LayoutMap(batch="fsdp")
    layout_map["w"] = ("fsdp", "tensor")
    state = {"w": jax.ShapeDtypeStruct(KERNEL, jnp.bfloat16)}
    report = flm.pod.plan(step, state, X, mesh="fsdp=4,tensor=2", layout_map=layout_map)
    found = {one.kind for one in report.collectives if one.path == "state/w"}
    assert found == {"all-gather", "all-reduce"}


def test_slices_across_dims_that_a_reshape_joins_are_not_scattered() -> None:
    """A dim of the kernel that is sliced lies within one of the sum."""

    def inner(x: Any, w: Any) -> Any:
        return x @ ASKED(w, P()).reshape(1024, -1)

    report = planned(inner, HEADS, spec=(None, None, "fsdp"))
    found = {one.kind for one in report.collectives if "fsdp" in one.axes}
    assert found == {"all-gather", "all-reduce"}


@pytest.mark.parametrize("transposed", [False, True])
def test_an_embedding_that_is_also_the_head_has_two_sums(transposed: bool) -> None:
    """As libtpu 0.0.42 makes them; of two equal uses of a kernel it makes one."""

    def step(params: Any, tokens: Any) -> Any:
        def loss(params: Any) -> Any:
            table = params["table"]
            x = table[tokens]
            logits = x @ table.T if transposed else jnp.einsum("bsd,vd->bsv", x, table)
            return (logits.astype(jnp.float32) ** 2).mean()

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    rules = flm.LayoutMap(batch="fsdp")
    rules["table"] = ("tensor", None)
    params = {"table": jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)}
    tokens = jax.ShapeDtypeStruct((16, 64), jnp.int32)
    report = flm.pod.plan(
        step, params, tokens, mesh="fsdp=4,tensor=2", layout_map=rules
    )
    assert report.wire_bytes("fsdp", "all-reduce") == 2 * 1_572_864
    sums = [one for one in report.collectives if one.axes == ("fsdp",)]
    assert {one.path for one in sums} == {"params/table"}
