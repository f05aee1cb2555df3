"""A plan of a step that names a mesh, or uses shapes, that are not the plan's."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import flax_layoutmap as flm

P = PartitionSpec
X = jax.ShapeDtypeStruct((512, 16), jnp.float32)
PARAMS = {"w": jax.ShapeDtypeStruct((16, 16), jnp.float32)}


def plan(step: Any, mesh: str) -> flm.pod.PodReport:
    layout_map = flm.LayoutMap(batch="data")
    layout_map["w"] = ("data", "model")
    return flm.pod.plan(step, PARAMS, X, mesh=mesh, layout_map=layout_map)


def constrained(mesh: flm.DeviceMesh) -> Any:
    jax_mesh: Any = mesh.jax_mesh
    sharding = NamedSharding(jax_mesh, P("data"))
    return lambda p, x: jax.lax.with_sharding_constraint(x @ p["w"], sharding)


def mapped(mesh: flm.DeviceMesh) -> Any:
    def body(w: Any, x: Any) -> Any:
        return x @ w

    jax_mesh: Any = mesh.jax_mesh
    call = jax.shard_map(
        body, mesh=jax_mesh, in_specs=(P(), P("data")), out_specs=P("data")
    )
    return lambda p, x: call(p["w"], x)


def given_out(mesh: flm.DeviceMesh) -> Any:
    jax_mesh: Any = mesh.jax_mesh
    return jax.jit(
        lambda p, x: x @ p["w"], out_shardings=NamedSharding(jax_mesh, P("data"))
    )


@pytest.mark.parametrize("make", [constrained, mapped, given_out])
def test_a_step_that_names_another_mesh(make: Any, mesh: flm.DeviceMesh) -> None:
    """Silently it would be without layouts where the number of devices is the same."""
    step = make(mesh)
    for other in ("data=4,model=2", "model=4,data=2"):
        with pytest.raises(flm.MeshError) as caught:
            plan(step, other)
        assert str(caught.value) == (
            f"<lambda> is planned for the mesh {other}, and names another one, "
            "data=2,model=4: in a NamedSharding, a jax.shard_map(mesh=…), or in "
            "out_shardings; name axes alone, jax.lax.with_sharding_constraint(x, "
            'PartitionSpec("data")), flm.distribute_tensor(x, ("data", None)), '
            "jax.shard_map without mesh=, or take jax.sharding.get_abstract_mesh() in "
            "the step"
        )
    with pytest.raises(flm.MeshError) as caught:
        plan(step, "data=16,model=4")
    assert str(caught.value).startswith(
        "<lambda> is planned for the mesh data=16,model=4, and names a mesh of other "
        "devices (AbstractMesh size: 64 does not match"
    )
    assert plan(step, "data=2,model=4").collectives


def test_what_the_error_says_to_write() -> None:
    def without_mesh(p: Any, x: Any) -> Any:
        call = jax.shard_map(
            lambda w, x: x @ w, in_specs=(P(), P("data")), out_specs=P("data")
        )
        return call(p["w"], x)

    def from_context(p: Any, x: Any) -> Any:
        sharding = NamedSharding(jax.sharding.get_abstract_mesh(), P("data"))
        return jax.lax.with_sharding_constraint(x @ p["w"], sharding)

    steps = [
        without_mesh,
        from_context,
        lambda p, x: jax.lax.with_sharding_constraint(x @ p["w"], P("data")),
        lambda p, x: flm.distribute_tensor(x @ p["w"], ("data", None)),
        lambda p, x: flm.distribute_tensor(
            x @ p["w"], flm.TensorLayout(("data", None))
        ),
    ]
    for step in steps:
        report = plan(step, "data=16,model=4")
        assert report.collectives and not report.unrecognised


def test_a_layout_on_another_mesh(mesh: flm.DeviceMesh) -> None:
    layout = flm.TensorLayout(("data", None), mesh)
    with pytest.raises(flm.MeshError, match=r"or name axes alone, TensorLayout\("):
        plan(lambda p, x: flm.distribute_tensor(x @ p["w"], layout), "data=16,model=4")


@pytest.mark.parametrize("use", [lambda w: w.reshape(16, 4), lambda w: w.astype("f2")])
def test_an_abstract_model_in_a_closure(use: Any) -> None:
    closed = jax.ShapeDtypeStruct((64,), jnp.float32)
    with pytest.raises(flm.LayoutError) as caught:
        plan(lambda p, x: x @ use(closed), "data=2,model=4")
    assert str(caught.value).startswith(
        "<lambda> uses a jax.ShapeDtypeStruct that is none of its arguments "
        "('ShapeDtypeStruct' object has no attribute "
    )
    assert str(caught.value).endswith(
        "a model in its closure; pass that as an argument"
    )


def test_other_attributes_that_are_missing_are_the_users() -> None:
    with pytest.raises(AttributeError, match="nosuch"):
        plan(lambda p, x: x.nosuch, "data=2,model=4")


def moved(before: P, after: P) -> flm.pod.PodReport:
    """A plan of an array that changes its layout."""
    mesh = jax.sharding.AbstractMesh((2, 2, 2), ("data", "fsdp", "tensor"))

    def step(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, after)

    given = NamedSharding(mesh, before)
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=given)
    return flm.pod.plan(jax.jit(step), x, mesh=mesh)


@pytest.mark.parametrize(
    ("before", "after", "axes"),
    [
        (P("fsdp"), P("tensor"), ("fsdp", "tensor")),
        (P("fsdp"), P("data"), ("data", "fsdp")),
        (P(("data", "fsdp")), P(("data", "tensor")), ("fsdp", "tensor")),
        (P(("fsdp", "tensor")), P(("tensor", "fsdp")), ("fsdp", "tensor")),
    ],
)
def test_a_permute_is_over_all_axes_that_tell_its_devices_apart(
    before: P, after: P, axes: tuple[str, ...]
) -> None:
    (permute,) = moved(before, after).collectives
    assert (permute.kind, permute.axes) == ("collective-permute", axes)


def test_axes_are_in_the_order_of_the_mesh() -> None:
    found = moved(P(("tensor", "fsdp")), P()).collectives
    assert {one.axes for one in found} == {("fsdp", "tensor")}


def test_an_explicit_mesh_and_a_reshard_by_names_alone() -> None:
    mesh = jax.sharding.AbstractMesh(
        (4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 2
    )

    def step(w: Any, x: Any) -> Any:
        return x @ jax.sharding.reshard(w, P(None, "tensor"))

    w, x = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in (((64, 32), P("fsdp", "tensor")), ((16, 64), P("fsdp")))
    )
    report = flm.pod.plan(jax.jit(step), w, x, mesh=mesh)
    assert [(one.kind, one.axes) for one in report.collectives] == [
        ("all-gather", ("fsdp",))
    ]


def test_what_a_loop_asks_before_each_round_is_counted() -> None:
    def step(p: Any, x: Any) -> Any:
        return jax.lax.while_loop(
            lambda x: (jnp.sin(x) @ p["w"]).sum() < 1, lambda x: x + 1, x
        )

    report = plan(step, "data=2,model=4")
    assert report.flops_per_device > 0
    assert "all-reduce" in {one.kind for one in report.collectives}
