"""Products whose operands are sharded over one axis along two dims."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import flax_layoutmap as flm


def planned(tokens: int, *, asked: bool = False) -> flm.pod.PodReport:
    rules = flm.LayoutMap(batch="fsdp")
    rules["w"] = ("fsdp", "tensor")

    def step(params: Any, x: Any) -> Any:
        if asked:
            x = jax.lax.with_sharding_constraint(x, P(None, "fsdp"))
        return x @ params["w"]

    return flm.pod.plan(
        step,
        {"w": jax.ShapeDtypeStruct((256, 512), jnp.float32)},
        jax.ShapeDtypeStruct((tokens, 256), jnp.float32),
        mesh="fsdp=4,tensor=2",
        layout_map=rules,
    )


def test_a_kernel_is_gathered_for_many_tokens() -> None:
    report = planned(4096)
    assert not report.unrecognised
    with pytest.raises(AssertionError, match="params/w"):
        report.forbid(path="w", kind="all-gather")


def test_for_few_tokens_shardy_and_xla_differ() -> None:
    """XLA gathers the kernel there, too, which a plan does not count."""
    report = planned(16)
    assert [one.kind for one in report.collectives] == ["all-to-all", "reduce-scatter"]
    assert list(report.unrecognised.values()) == [1]
    with pytest.raises(
        AssertionError, match="(?s)did not read all of.*gathers the kernel"
    ):
        report.forbid(path="w", kind="all-gather")


@pytest.mark.optimised
def test_xla_gathers_the_kernel_for_few_tokens(mesh: flm.DeviceMesh) -> None:
    rules = flm.LayoutMap(flm.DeviceMesh("fsdp=4,tensor=2"), batch="fsdp")
    rules["w"] = ("fsdp", "tensor")
    params = rules.place({"w": jnp.ones((256, 512))})
    step = flm.jit(lambda params, x: x @ params["w"], layout_map=rules)
    text = step.lower(params, jnp.ones((16, 256))).compile().as_text()
    assert "all-gather(" in text and "all-to-all(" not in text


def test_what_a_constraint_asks_for_is_done() -> None:
    assert not planned(4096, asked=True).unrecognised
