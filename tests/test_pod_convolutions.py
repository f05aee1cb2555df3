"""flm.pod.plan: convolutions of few images, whose kernels are sharded."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import needs_libtpu, sent_as_on_cpus
from jax.sharding import PartitionSpec as P

import flax_layoutmap as flm
from flax_layoutmap.pod._hlo import read_program

IMAGES = jax.ShapeDtypeStruct((32, 4, 4, 64), jnp.float32)
SHAPES = {"first": (3, 3, 64, 128), "second": (3, 3, 128, 128), "head": (128, 64)}
PARAMETERS = {
    path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in SHAPES.items()
}
# What one gather of a kernel sends.
FIRST, SECOND = (4 * 7 * size // 8 for size in (73_728, 147_456))


def convolved(x: Any, kernel: Any, groups: int = 1) -> Any:
    dims = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=dims, feature_group_count=groups
    )


def loss(params: Any, x: Any) -> Any:
    x = jax.nn.relu(convolved(x, params["first"]))
    x = jax.nn.relu(convolved(x, params["second"])).mean((1, 2))
    return ((x @ params["head"]) ** 2).mean()


def train(params: Any, x: Any) -> Any:
    gradients = jax.grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def rules(mesh: dict[str, int]) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(flm.DeviceMesh(mesh), batch="fsdp")
    layout_map["first|second"] = None, None, None, "fsdp"
    layout_map["head"] = "fsdp", None
    return layout_map


@pytest.mark.optimised
@pytest.mark.parametrize("images", [8, 32, 256])
def test_convolutions_as_the_compiler_has_them(images: int) -> None:
    """Few images were moved before, to the columns of a kernel that a device has."""
    x = jax.ShapeDtypeStruct((images, *IMAGES.shape[1:]), jnp.float32)
    layout_map = rules({"fsdp": 8})
    step = flm.jit(train, layout_map=layout_map)
    text = step.lower(PARAMETERS, x).compile().as_text() or ""
    program = read_program(text, {"fsdp": 8}, [8])
    report = flm.pod.plan(step, PARAMETERS, x, platform="cpu")
    assert not report.unrecognised and not program.unrecognised
    assert sent_as_on_cpus(report.collectives) == sent_as_on_cpus(program.collectives)


def gathers(report: flm.pod.PodReport) -> dict[str | None, int]:
    found: dict[str | None, int] = {}
    for one in report.collectives:
        if one.kind == "all-gather":
            found[one.path] = found.get(one.path, 0) + one.wire_bytes_per_step
    return found


def test_kernels_are_gathered_and_their_gradients_scattered() -> None:
    report = flm.pod.plan(train, PARAMETERS, IMAGES, layout_map=rules({"fsdp": 8}))
    assert not report.unrecognised
    scattered = {one.path for one in report.collectives if one.kind == "reduce-scatter"}
    assert scattered == {"params/first", "params/second", "params/head"}
    found = gathers(report)
    assert found["params/first"] == FIRST and found["params/second"] == SECOND


def test_a_kernel_that_is_transposed_is_gathered_again_on_others_than_tpus() -> None:
    layout_map = rules({"fsdp": 8})
    report = flm.pod.plan(
        train, PARAMETERS, IMAGES, layout_map=layout_map, platform="cuda"
    )
    found = gathers(report)
    assert found["params/first"] == FIRST and found["params/second"] == 2 * SECOND


def depthwise(params: Any, x: Any) -> Any:
    return convolved(jnp.tanh(x), params["kernel"], groups=64)


WIDE = {"kernel": jax.ShapeDtypeStruct((5, 5, 1, 64), jnp.float32)}
POINTS = jax.ShapeDtypeStruct((8, 1, 1, 64), jnp.float32)


@pytest.mark.optimised
def test_convolutions_in_groups_are_left() -> None:
    layout_map = flm.LayoutMap(flm.DeviceMesh({"fsdp": 8}), batch="fsdp")
    layout_map["kernel"] = None, None, None, "fsdp"
    step = flm.jit(depthwise, layout_map=layout_map)
    text = step.lower(WIDE, POINTS).compile().as_text() or ""
    program = read_program(text, {"fsdp": 8}, [8])
    report = flm.pod.plan(step, WIDE, POINTS, platform="cpu")
    assert not report.unrecognised and not program.unrecognised
    found = sent_as_on_cpus(report.collectives)
    assert found == sent_as_on_cpus(program.collectives)
    assert found == {("fsdp", "all-to-all"): 2 * 224}


@pytest.mark.parametrize("platform", ["tpu", "cpu"])
def test_slices_of_what_is_reversed_are_others(platform: str) -> None:
    """Only the kernels of convolutions count as what they were."""

    def step(params: Any, x: Any) -> Any:
        kernel = params["head"].T
        some = kernel[:8], jnp.flip(kernel, 0)[:8]
        return x, [jax.lax.with_sharding_constraint(one, P()) for one in some]

    layout_map = rules({"fsdp": 8})
    report = flm.pod.plan(
        step, PARAMETERS, IMAGES, layout_map=layout_map, platform=platform
    )
    kinds = [one.kind for one in report.collectives]
    assert kinds == ["all-gather", "all-gather"] and not report.unrecognised


@needs_libtpu
def test_the_compiler_for_tpus() -> None:
    step = flm.jit(train, layout_map=rules({"fsdp": 8}))
    with jax.default_matmul_precision("highest"):
        report = flm.pod.plan(step, PARAMETERS, IMAGES, topology="v5e:2x4")
        compiled = flm.pod.compile(step, PARAMETERS, IMAGES, topology="v5e:2x4")
    assert not report.unrecognised
    assert sent_as_on_cpus(report.collectives) == sent_as_on_cpus(compiled.collectives)
