"""Products whose operands are sharded over one axis along two dims."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import needs_libtpu, sent_as_on_cpus
from jax.sharding import PartitionSpec as P

import flax_layoutmap as flm
from flax_layoutmap.pod._hlo import read_program

MESH = "fsdp=4,tensor=2"
RULES = {"up": ("fsdp", "tensor"), "down": ("tensor", "fsdp")}
SHAPES = {"up": (256, 512), "down": (512, 256)}
KINDS = re.compile(r" (all-gather|all-reduce|reduce-scatter|all-to-all)(?:-start)?\(")


def one(params: Any, x: Any) -> Any:
    return x @ params["up"]


def both(params: Any, x: Any) -> Any:
    return jax.nn.silu(x @ params["up"]) @ params["down"]


def gradients(params: Any, x: Any) -> Any:
    return jax.grad(lambda params: (both(params, x) ** 2).sum())(params)


def in_a_loop(params: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, _: (both(params, x), None), x, None, length=3)[0]


def rules(mesh: Any = None) -> flm.LayoutMap:
    made = flm.LayoutMap(mesh, batch="fsdp")
    for path, spec in RULES.items():
        made[path] = spec
    return made


def planned(step: Callable[[Any, Any], Any], tokens: int) -> flm.pod.PodReport:
    params = {
        path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in SHAPES.items()
    }
    x = jax.ShapeDtypeStruct((tokens, 256), jnp.float32)
    return flm.pod.plan(step, params, x, mesh=MESH, layout_map=rules())


def kinds(report: flm.pod.PodReport) -> list[str]:
    """Kinds in the program; a sum and a slice are two operations on CPUs."""
    found = [one.kind for one in report.collectives]
    return ["all-reduce" if kind == "reduce-scatter" else kind for kind in found]


def test_a_kernel_is_gathered_for_many_tokens() -> None:
    report = planned(one, 4096)
    assert not report.unrecognised
    with pytest.raises(AssertionError, match="params/up"):
        report.forbid(path="up", kind="all-gather")


def test_a_kernel_is_gathered_for_few_tokens_too() -> None:
    report = planned(one, 16)
    assert not report.unrecognised and not report.reshards
    (only,) = report.collectives
    assert (only.kind, only.axes, only.path) == ("all-gather", ("fsdp",), "params/up")
    assert only.shape == (256, 256)
    with pytest.raises(AssertionError, match="params/up"):
        report.forbid(path="up", kind="all-gather")


def test_gradients_of_few_tokens_are_summed_where_they_are_made() -> None:
    report = planned(gradients, 16)
    found = [one.kind for one in report.collectives if one.path == "params/up"]
    assert found == ["all-gather", "reduce-scatter"]
    report.forbid(kind="all-to-all")


def test_so_it_is_in_a_loop() -> None:
    report = planned(in_a_loop, 16)
    (gather,) = [one for one in report.collectives if one.path == "params/up"]
    assert (gather.kind, gather.executions) == ("all-gather", 3)
    report.forbid(kind="all-to-all")


def test_so_it_is_for_other_rules() -> None:
    report = planned(one, 16)
    other = rules()
    other.replace("up", ("fsdp", None))
    again = report.with_layout(other)
    (only,) = again.collectives
    assert (only.kind, only.shape) == ("all-gather", (256, 512))
    assert not again.unrecognised


@pytest.mark.optimised
@pytest.mark.parametrize("tokens", [16, 4096])
@pytest.mark.parametrize("step", [one, both])
def test_so_does_xla(
    step: Callable[[Any, Any], Any], tokens: int, mesh: flm.DeviceMesh
) -> None:
    made = rules(flm.DeviceMesh(MESH))
    params = made.place({path: jnp.ones(shape) for path, shape in SHAPES.items()})
    compiled = flm.jit(step, layout_map=made).lower(params, jnp.ones((tokens, 256)))
    text = compiled.compile().as_text()
    assert sorted(KINDS.findall(text)) == sorted(kinds(planned(step, tokens)))


def test_operands_that_are_moved_to_be_summed_are_said() -> None:
    def step(params: Any, x: Any) -> Any:
        return jax.lax.with_sharding_constraint(jnp.tanh(x) @ params["up"], P())

    report = planned(step, 16)
    ((what, times),) = report.unrecognised.items()
    assert what.startswith("product with an operand that is moved to be sharded")
    (line,) = report.unrecognised_at[what]
    at = step.__code__.co_firstlineno + 1
    assert times == 1 and line.startswith(f"test_pod_products.py:{at} ")


def test_what_a_constraint_asks_for_is_done() -> None:
    def step(params: Any, x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, P(None, "fsdp")) @ params["up"]

    report = planned(step, 4096)
    assert not report.unrecognised
    assert "all-to-all" in {one.kind for one in report.collectives}


def of_a_lookup(params: Any, tokens: Any) -> Any:
    """Rows of a table with sharded columns, that meet a kernel with sharded rows."""

    def loss(params: Any) -> Any:
        logits = params["down"][tokens] @ params["up"]
        return (jax.nn.logsumexp(logits, -1) ** 2).mean()

    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))


def in_parts(params: Any, x: Any) -> Any:
    """Gradients of the parts of a batch, added up."""

    def loss(params: Any, part: Any) -> Any:
        return ((part @ params["up"]) ** 2).mean()

    parts = [jax.grad(loss)(params, part) for part in jnp.split(x, 4)]
    return jax.tree.map(lambda *gradients: sum(gradients), *parts)


@pytest.mark.optimised
@pytest.mark.parametrize(
    ("step", "data"),
    [
        (of_a_lookup, jax.ShapeDtypeStruct((256, 16), jnp.int32)),
        (in_parts, jax.ShapeDtypeStruct((1024, 256), jnp.float32)),
    ],
)
def test_every_byte_as_xla_sends_it(
    step: Callable[[Any, Any], Any], data: Any, mesh: flm.DeviceMesh
) -> None:
    made = rules(flm.DeviceMesh(MESH))
    params = {
        path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in SHAPES.items()
    }
    wrapped = flm.jit(step, layout_map=made, donate_argnames="params")
    text = wrapped.lower(params, data).compile().as_text() or ""
    program = read_program(text, ("fsdp", "tensor"), (4, 2))
    assert not program.unrecognised
    report = flm.pod.plan(wrapped, params, data, mesh=MESH)
    assert sent_as_on_cpus(report.collectives) == sent_as_on_cpus(program.collectives)
    assert not report.unrecognised


def test_parts_of_a_batch_are_moved_together() -> None:
    report = planned(in_parts, 1024)
    moved = [one for one in report.collectives if one.kind == "all-to-all"]
    assert [(one.axes, one.shape) for one in moved] == [(("fsdp",), (1024, 64))]


def inner(params: Any, x: Any) -> Any:
    return jnp.vdot(params["up"], jnp.tanh(params["up"])) + x.sum()


def sent(report: flm.pod.PodReport) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in report.collectives:
        found[one.kind] = found.get(one.kind, 0) + one.wire_bytes_per_step
    return found


def test_inner_products_of_whole_arrays_move_nothing_on_tpus() -> None:
    report = planned(inner, 16)
    assert not report.unrecognised
    assert sent(report).keys() == {"all-reduce"} and sent(report)["all-reduce"] < 32


@needs_libtpu
def test_so_does_the_compiler_for_tpus() -> None:
    params = {
        path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in SHAPES.items()
    }
    x = jax.ShapeDtypeStruct((16, 256), jnp.float32)
    given: Any = {"mesh": MESH, "layout_map": rules(), "topology": "v5e:2x4"}
    compiled = sent(flm.pod.compile(inner, params, x, **given))
    planned = sent(flm.pod.plan(inner, params, x, **given))
    assert compiled.keys() == planned.keys() == {"all-reduce"}
    assert compiled["all-reduce"] < 64


def test_other_compilers_move_the_arrays_to_flatten_them(mesh: flm.DeviceMesh) -> None:
    params = {
        path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in SHAPES.items()
    }
    x = jax.ShapeDtypeStruct((16, 256), jnp.float32)
    made = rules(flm.DeviceMesh(MESH))
    report = flm.pod.plan(inner, params, x, layout_map=made, platform="cpu")
    step = flm.jit(inner, layout_map=made)
    text = step.lower(params, x).compile().as_text() or ""
    program = read_program(text, {"fsdp": 4, "tensor": 2}, (4, 2))
    gathered = sent_as_on_cpus(report.collectives)["tensor", "all-gather"]
    assert gathered == sent_as_on_cpus(program.collectives)["tensor", "all-gather"] > 0


def test_vectors_and_arrays_of_other_shapes_stay() -> None:
    def step(params: Any, x: Any) -> Any:
        flat = params["up"].reshape(-1)
        return jnp.vdot(flat, params["down"].reshape(-1)) + jnp.vdot(x[0], x[1])

    assert "all-gather" in sent(planned(step, 16))
