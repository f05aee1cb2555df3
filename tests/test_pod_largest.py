"""flm.pod.plan: the largest elements of arrays that are sharded along that dim."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import flax_layoutmap as flm
from flax_layoutmap.pod._hlo import read_program

P = PartitionSpec
TOP_K = "top_k along a sharded dim, not counted as XLA moves it"


def counted(collectives: Any) -> Counter[Any]:
    return Counter((one.kind, one.axes, one.shape) for one in collectives)


def given(mesh: flm.DeviceMesh, spec: PartitionSpec) -> Any:
    jax_mesh: Any = mesh.jax_mesh
    sharding = NamedSharding(jax_mesh, spec)
    return jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=sharding)


@pytest.mark.parametrize(
    "function, spec, axes, shape",
    [
        (lambda x: jnp.argmax(x, 1), P("data", "model"), ("model",), (32, 4)),
        (lambda x: jnp.argmin(x, 0), P("data", "model"), ("data",), (2, 8)),
        (
            lambda x: jnp.argmax(x, 1),
            P(None, ("data", "model")),
            ("data", "model"),
            (64, 8),
        ),
    ],
    ids=["argmax", "argmin", "over two axes"],
)
def test_places_of_the_largest_are_gathered(
    function: Any, spec: Any, axes: Any, shape: Any, mesh: flm.DeviceMesh
) -> None:
    """Each device's largest element, and its place; as compiled for 8 CPU devices."""
    x, jitted = given(mesh, spec), jax.jit(function)
    report = flm.pod.plan(jitted, x)
    text: Any = jitted.lower(x).compile().as_text()
    compiled = read_program(text, mesh.axis_names, mesh.shape).collectives
    assert counted(report.collectives) == counted(compiled)
    assert counted(report.collectives) == {("all-gather", axes, shape): 2}


def test_the_largest_few_along_a_sharded_dim_are_said(mesh: flm.DeviceMesh) -> None:
    jitted = jax.jit(lambda x: jax.lax.top_k(x, 2)[0])
    for spec, said in ((P("data", "model"), {TOP_K: 1}), (P("data", None), {})):
        report = flm.pod.plan(jitted, given(mesh, spec))
        assert report.unrecognised == said


def test_the_largest_few_of_a_batch_are_gathered_but_on_tpus(
    mesh: flm.DeviceMesh,
) -> None:
    """The compiler for CPUs gathers the batch; that for TPUs moves nothing."""
    jitted = jax.jit(lambda x: jax.lax.top_k(x, 2)[0])
    x = given(mesh, P("data", None))
    text: Any = jitted.lower(x).compile().as_text()
    compiled = read_program(text, mesh.axis_names, mesh.shape).collectives
    assert {one.kind for one in compiled} == {"all-gather"}
    for platform in ("cpu", "cuda"):
        report = flm.pod.plan(jitted, x, platform=platform)
        assert report.unrecognised == {TOP_K: 1}
    assert not flm.pod.plan(jitted, x).unrecognised
    whole = flm.pod.plan(jitted, given(mesh, P(None, None)), platform="cpu")
    assert not whole.unrecognised
