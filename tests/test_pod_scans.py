"""Plans of layers in loops, beside what the compiler makes of the same on CPUs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import sent_as_on_cpus

import flax_layoutmap as flm
from flax_layoutmap.pod._hlo import read_program

ONE, TWO = {"f": 8}, {"f": 4, "t": 2}
RULES = {
    "w1": lambda mesh: (None, "f", "t" if "t" in mesh else None),
    "w2": lambda mesh: (None, "t" if "t" in mesh else None, "f"),
}
PARAMETERS = {
    "w1": jax.ShapeDtypeStruct((4, 64, 256), jnp.float32),
    "w2": jax.ShapeDtypeStruct((4, 256, 64), jnp.float32),
}
X = jax.ShapeDtypeStruct((1024, 64), jnp.float32)
Wrap = Callable[[Any], Any]


def as_it_is(function: Any) -> Any:
    return function


def keeping_products(function: Any) -> Any:
    return jax.checkpoint(function, policy=jax.checkpoint_policies.dots_saveable)


def layer(x: Any, weights: Any) -> Any:
    return x + jax.nn.gelu(x @ weights["w1"]) @ weights["w2"], None


def trains(forward: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def step(params: Any, x: Any) -> Any:
        gradients = jax.grad(lambda params: (forward(params, x) ** 2).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    return step


def in_one_loop(wrap: Wrap) -> Callable[[Any, Any], Any]:
    return trains(lambda params, x: jax.lax.scan(wrap(layer), x, params)[0])


def in_two_loops(inner: Wrap, outer: Wrap) -> Callable[[Any, Any], Any]:
    def forward(params: Any, x: Any) -> Any:
        groups = jax.tree.map(lambda w: w.reshape(2, 2, *w.shape[1:]), params)
        group = outer(lambda x, group: jax.lax.scan(inner(layer), x, group))
        return jax.lax.scan(group, x, groups)[0]

    return trains(forward)


STEPS = {
    "plain": in_one_loop(as_it_is),
    "rematerialised": in_one_loop(jax.checkpoint),
    "keeping products": in_one_loop(keeping_products),
    "two loops": in_two_loops(as_it_is, as_it_is),
    "outer loop": in_two_loops(as_it_is, jax.checkpoint),
    "both loops": in_two_loops(jax.checkpoint, jax.checkpoint),
}


def rules(mesh: dict[str, int]) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(flm.DeviceMesh(mesh), batch="f")
    for path, layout in RULES.items():
        layout_map[path] = layout(mesh)
    return layout_map


def planned(step: Callable[[Any, Any], Any], mesh: dict[str, int]) -> flm.pod.PodReport:
    return flm.pod.plan(
        step, PARAMETERS, X, layout_map=rules(mesh), donate_argnames="params"
    )


@pytest.mark.optimised
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("plain", ONE),
        ("plain", TWO),
        ("keeping products", ONE),
        ("outer loop", TWO),
        ("both loops", TWO),
    ],
)
def test_layers_in_loops_as_the_compiler_has_them(
    name: str, mesh: dict[str, int]
) -> None:
    step = flm.jit(STEPS[name], layout_map=rules(mesh), donate_argnames="params")
    text = step.lower(PARAMETERS, X).compile().as_text() or ""
    program = read_program(text, mesh, mesh.values())
    assert not program.unrecognised
    assert sent_as_on_cpus(planned(STEPS[name], mesh).collectives) == sent_as_on_cpus(
        program.collectives
    )


@pytest.mark.parametrize("name", STEPS)
def test_kernels_are_gathered_and_their_gradients_scattered(name: str) -> None:
    report = planned(STEPS[name], ONE)
    assert not report.unrecognised
    assert {one.kind for one in report.collectives} == {"all-gather", "reduce-scatter"}
    assert {one.path for one in report.collectives if one.kind == "all-gather"} == {
        "params/w1",
        "params/w2",
    }
    again = report.with_layout(rules(ONE))
    assert sent_as_on_cpus(again.collectives) == sent_as_on_cpus(report.collectives)


# ----------------------------------------------------- what a loop uses from outside

VOCABULARY = {
    "embed": jax.ShapeDtypeStruct((512, 64), jnp.float32),
    "head": jax.ShapeDtypeStruct((64, 512), jnp.float32),
}
TOKENS = jax.ShapeDtypeStruct((256, 16), jnp.int32)


def loss_in_chunks(params: Any, tokens: Any) -> Any:
    """The loss of four parts of the sequences, one after the other."""

    def loss(params: Any) -> Any:
        x = params["embed"][tokens].reshape(256, 4, 4, 64).transpose(1, 0, 2, 3)

        @jax.checkpoint
        def chunk(total: Any, x: Any) -> Any:
            return total + jax.nn.logsumexp(x @ params["head"], -1).sum(), None

        return jax.lax.scan(chunk, 0.0, x)[0]

    gradients = jax.grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


@pytest.mark.optimised
def test_what_is_the_same_in_every_round_as_the_compiler_has_it() -> None:
    layout_map = flm.LayoutMap(flm.DeviceMesh(TWO), batch="f")
    layout_map["embed"], layout_map["head"] = ("t", "f"), ("f", "t")
    step = flm.jit(loss_in_chunks, layout_map=layout_map, donate_argnames="params")
    text = step.lower(VOCABULARY, TOKENS).compile().as_text() or ""
    report = flm.pod.plan(step, VOCABULARY, TOKENS)
    assert not report.unrecognised
    found = sent_as_on_cpus(read_program(text, TWO, TWO.values()).collectives)
    assert sent_as_on_cpus(report.collectives) == found
