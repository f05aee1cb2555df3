"""flm.pod.plan: slices that are taken, or written, along sharded dims."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import sent_as_on_cpus
from jax.sharding import NamedSharding, PartitionSpec

import flax_layoutmap as flm
from flax_layoutmap.pod._hlo import read_program

P = PartitionSpec
BOTH = P("data", "model")
WHOLE = (64, 32)
write = jax.lax.dynamic_update_slice


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def counted(collectives: Any) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for one in collectives:
        found[one.kind, one.axes, one.shape] += one.executions
    return found


def planned_and_compiled(
    function: Any, mesh: flm.DeviceMesh, *args: Any, spec: PartitionSpec = BOTH
) -> tuple[flm.pod.PodReport, Counter[Any]]:
    """A plan, and the collectives of the program for 8 CPU devices.

    The first argument and the result have the spec.
    """
    jax_mesh: Any = mesh.jax_mesh
    sharding = NamedSharding(jax_mesh, spec)
    first, *others = args
    given = jax.ShapeDtypeStruct(first.shape, first.dtype, sharding=sharding)
    jitted = jax.jit(function, out_shardings=sharding)
    report = flm.pod.plan(jitted, given, *others, mesh=mesh)
    text: Any = jitted.lower(given, *others).compile().as_text()
    return report, counted(read_program(text, mesh.axis_names, mesh.shape).collectives)


def in_a_scan(w: Any, u: Any) -> Any:
    def body(carry: Any, u: Any) -> Any:
        at, w = carry
        return (at + 8, write(w, u, (at, 0))), None

    return jax.lax.scan(body, (0, w), u)[0][1]


AT = struct(dtype=jnp.int32)
WRITES: dict[str, tuple[Any, Any, int]] = {
    "at a place from data": (lambda w, u, i: write(w, u, (0, i)), (64, 8), 1),
    "along two dims": (lambda w, u, i: write(w, u, (i, i)), (32, 8), 2),
    "one element of a dim, and eight": (lambda w, u, i: write(w, u, (i, i)), (1, 8), 2),
    "at a constant, over a border": (lambda w, u, i: write(w, u, (0, 4)), (64, 8), 1),
    "past the end": (lambda w, u, i: write(w, u, (0, 28)), (64, 8), 1),
    "two after each other": (
        lambda w, u, i: write(write(w, u, (0, i)), u, (0, i + 3)),
        (64, 8),
        1,
    ),
    "two of one": (
        lambda w, u, i: write(w, u, (0, i)) + write(w, u, (0, i + 3)),
        (64, 8),
        1,
    ),
    "in a scan": (lambda w, u, i: in_a_scan(w, u), (4, 8, 32), 4),
    # Each device writes what is its own.
    "one element": (lambda w, u, i: write(w, u, (0, i)), (64, 1), 0),
    "at a constant": (lambda w, u, i: write(w, u, (0, 8)), (64, 8), 0),
    "all of a dim": (lambda w, u, i: write(w, u, (0, i)), (1, 32), 0),
    "into zeros": (
        lambda w, u, i: w + write(jnp.zeros(WHOLE), u, (0, i)),
        (64, 8),
        0,
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_as_the_partitioner_does_them(name: str, mesh: flm.DeviceMesh) -> None:
    """What is written into is gathered along the sharded dims of the slice."""
    function, shape, gathers = WRITES[name]
    args = struct(*WHOLE), struct(*shape), AT
    report, compiled = planned_and_compiled(function, mesh, *args)
    found = counted(report.collectives)
    assert found == compiled and not report.unrecognised
    assert found.total() == gathers
    assert {kind for kind, _, _ in found} <= {"all-gather"}


def test_a_cache_that_is_sharded_along_its_positions() -> None:
    layout_map = flm.LayoutMap(batch="data")
    layout_map["cache"] = ("data", "model", None)

    def prefill(state: Any, keys: Any, at: Any) -> Any:
        return {"cache": write(state["cache"], keys, (0, at, 0))}

    args = {"cache": struct(8, 1024, 64)}, struct(8, 16, 64), AT
    report = flm.pod.plan(
        prefill,
        *args,
        mesh="data=4,model=2",
        layout_map=layout_map,
        donate_argnames="state",
    )
    (one,) = report.collectives
    assert (one.kind, one.axes, one.path) == ("all-gather", ("model",), "state/cache")
    assert one.bytes == 2 * 1024 * 64 * 4 and not report.unrecognised
    with pytest.raises(AssertionError, match="all-gather over model of state/cache"):
        report.expect(axis="model", kinds=set())


def test_slices_that_the_partitioner_moves_otherwise(mesh: flm.DeviceMesh) -> None:
    def take(w: Any, i: Any) -> Any:
        return jax.lax.dynamic_slice(w, (0, i), (64, 8))

    report, compiled = planned_and_compiled(take, mesh, struct(*WHOLE), AT)
    assert compiled != counted(report.collectives)
    what = "dynamic_slice along a sharded dim, not counted as XLA moves it"
    assert report.unrecognised == {what: 1}

    def others(w: Any, i: Any) -> Any:
        asked = jax.lax.with_sharding_constraint(w, NamedSharding(jax_mesh, ROWS))
        return jax.lax.dynamic_slice(asked, (0, i), (64, 8))

    jax_mesh: Any = mesh.jax_mesh
    ROWS = P(("data", "model"))
    report, _ = planned_and_compiled(others, mesh, struct(*WHOLE), AT)
    assert not report.unrecognised


# ------------------------------------------------------------- slices in every round

PARAMS = {"up": struct(16, 32), "down": struct(32, 16)}
LARGE = struct(4096, 16)


def accumulated(state: Any, x: Any) -> Any:
    """Gradients of four parts of a batch, one after the other."""

    def loss(params: Any, x: Any) -> Any:
        return ((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2).mean()

    def body(total: Any, x: Any) -> Any:
        return jax.tree.map(jnp.add, total, jax.grad(loss)(state, x)), None

    zeros = jax.tree.map(jnp.zeros_like, state)
    return jax.lax.scan(body, zeros, x)[0]


def accumulated_plan(step: Any, mesh: flm.DeviceMesh, x: Any = LARGE) -> Any:
    layout_map = flm.LayoutMap(batch="data")
    layout_map["up"], layout_map["down"] = ("data", "model"), ("model", "data")
    report = flm.pod.plan(
        step, PARAMS, x, mesh=mesh, layout_map=layout_map, donate_argnames="state"
    )
    return report, [text for text in report.warnings if "each round" in text]


def test_batches_that_a_scan_cuts_along_the_batch_axis(mesh: flm.DeviceMesh) -> None:
    def step(state: Any, x: Any) -> Any:
        return accumulated(state, x.reshape(4, -1, 16))

    report, (text,) = accumulated_plan(step, mesh)
    assert "(4 rounds)" in text and "x (4,1024,16) P(data) at test_pod" in text
    assert 'flm.distribute_tensor(x, (None, "data", None)) in a step of flm.jit' in text
    assert text.endswith('with_sharding_constraint(x, P(None, "data"))')
    assert not report.unrecognised
    # Of little it is not said.
    assert accumulated_plan(step, mesh, struct(64, 16))[1] == []


@pytest.mark.optimised
def test_such_batches_are_moved_as_by_the_partitioner(
    mesh: flm.DeviceMesh,
) -> None:
    def step(state: Any, x: Any) -> Any:
        return accumulated(state, x.reshape(4, -1, 16))

    layout_map = flm.LayoutMap(mesh, batch="data")
    layout_map["up"], layout_map["down"] = ("data", "model"), ("model", "data")
    wrapped = flm.jit(step, layout_map=layout_map, donate_argnames="state")
    text = wrapped.lower(PARAMS, LARGE).compile().as_text() or ""
    program = read_program(text, mesh.axis_names, mesh.shape)
    report, _ = accumulated_plan(step, mesh)
    found = sent_as_on_cpus(program.collectives)
    assert sent_as_on_cpus(report.collectives) == found


def test_batches_that_are_moved_before_the_scan(mesh: flm.DeviceMesh) -> None:
    """What the warning says to do."""

    def step(state: Any, x: Any) -> Any:
        parts = x.reshape(4, -1, 16)
        asked = jax.lax.with_sharding_constraint(parts, P(None, "data"))
        return accumulated(state, asked)

    def ours(state: Any, x: Any) -> Any:
        parts = x.reshape(4, -1, 16)
        return accumulated(state, flm.distribute_tensor(parts, (None, "data", None)))

    for one in (step, ours):
        report, texts = accumulated_plan(one, mesh)
        assert texts == []
        moves = [one for one in report.collectives if one.path == "x"]
        assert [(one.kind, one.executions) for one in moves] == [("all-to-all", 1)]


def test_layers_that_are_sharded_along_the_dim_of_a_scan(mesh: flm.DeviceMesh) -> None:
    def step(state: Any, x: Any) -> Any:
        layer = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
        return jax.lax.scan(layer, x, state["w"])[0]

    layout_map = flm.LayoutMap(batch="data")
    layout_map["w"] = ("model", None, None)
    state = {"w": struct(8, 64, 64)}
    report = flm.pod.plan(step, state, struct(64, 64), mesh=mesh, layout_map=layout_map)
    (text,) = report.warnings
    assert 'P(None, "model")' in text and "(8 rounds)" in text
    assert "state/w (8,64,64) P(model) at" in text
