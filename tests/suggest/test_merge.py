"""The operations of equal layers, merged into those of one, and their prices."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from suggest.test_suggest import problem_of

import flax_layoutmap as flm
from flax_layoutmap._suggest import merge
from flax_layoutmap._suggest.candidate import Candidate
from flax_layoutmap._suggest.moves import fully_sharded, storages, with_classes
from flax_layoutmap._suggest.price import Pricer
from flax_layoutmap._suggest.problem import Problem
from flax_layoutmap._suggest.search import Search
from flax_layoutmap.pod._mlir import functions

LAYERS = 14
MESH = "data=4,tensor=2"
STATE = "params", "state"
GIVEN: Any = {"mesh": MESH, "topology": "v5e:2x4", "check": False}


def arguments(layers: int = LAYERS) -> tuple[Any, ...]:
    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    one = {"norm": array(256), "up": array(256, 1024), "down": array(1024, 256)}
    params = {
        "embed": array(4096, 256),
        "layers": [{"mlp": dict(one)} for _ in range(layers)],
        "head": array(256, 4096),
    }
    state = jax.eval_shape(optax.adamw(1e-3).init, params)
    return params, state, jax.ShapeDtypeStruct((32, 64), jnp.int32)


def step(params: Any, state: Any, tokens: Any) -> Any:
    def loss(params: Any) -> Any:
        x = params["embed"][tokens]
        for layer in params["layers"]:
            one = layer["mlp"]
            y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)) * one["norm"]
            x = jnp.tanh(y @ one["up"]) @ one["down"]
        scores = jax.nn.log_softmax(x @ params["head"])
        return -jnp.take_along_axis(scores, tokens[..., None], -1).mean()

    updates, state = optax.adamw(1e-3).update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state


def operations(program: Any) -> list[Any]:
    block = functions(program.module)["main"].regions[0].blocks[0]
    return [one.operation for one in block.operations]


@pytest.fixture(scope="module")
def problem() -> Problem:
    return problem_of(step, *arguments(), mesh=MESH, donated=STATE)


@pytest.fixture(scope="module")
def found() -> flm.Suggestion:
    return flm.suggest(step, *arguments(), **GIVEN)


def candidates(problem: Problem) -> list[Candidate]:
    """Layouts of many kinds: stored over axes or not, with classes or without."""
    found = []
    for batch in problem.batches:
        full = fully_sharded(problem, batch)
        found += [full, *storages(problem, full)]
        for axis in set(problem.sizes) - {*batch}:
            split = with_classes(problem, full, axis, most_last=True)
            found += [split, *storages(problem, split)]
    return list(dict.fromkeys(found))


def test_a_merged_program_has_the_prices_of_the_whole(problem: Problem) -> None:
    whole, merged = (operations(one) for one in (problem.whole, problem.prepared))
    assert len(merged) < 0.5 * len(whole)
    topology = flm.pod.topology(GIVEN["topology"])
    pricers = [Pricer(problem, topology, whole=whole) for whole in (False, True)]
    tried = candidates(problem)
    assert len(tried) > 8
    for one in tried:
        cost, exact = (pricer.with_peak(one) for pricer in pricers)
        assert cost.compute_seconds == exact.compute_seconds
        assert cost.at_rest == exact.at_rest
        assert cost.seconds == pytest.approx(exact.seconds, rel=0.05)
        assert cost.peak_bytes == pytest.approx(exact.peak_bytes, rel=0.2)


def test_its_length_is_not_that_of_the_stack(problem: Problem) -> None:
    more = problem_of(step, *arguments(LAYERS + 8), mesh=MESH, donated=STATE)
    assert len(operations(more.whole)) > 1.3 * len(operations(problem.whole))
    # Constraints keep their positions, even if nothing is in them.
    merged = [len(operations(one.prepared)) for one in (problem, more)]
    assert merged[1] == merged[0]


def test_few_layers_are_not_merged() -> None:
    few = problem_of(step, *arguments(2), mesh=MESH, donated=STATE)
    assert few.prepared is few.whole


def test_rules_are_as_good_as_without(
    found: flm.Suggestion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "_SHORTER", 0.0)
    other = flm.suggest(step, *arguments(), **GIVEN)
    assert found.cost.seconds < 1.05 * other.cost.seconds
    # What is reported is of the whole program.
    full = "full sharding"
    assert found.choices[full].layout_map == other.choices[full].layout_map
    assert found.choices[full].cost == other.choices[full].cost


def test_a_limit_near_the_need_is_held_for_the_whole_program(
    found: flm.Suggestion,
) -> None:
    full, free = found.choices["full sharding"].cost.peak_bytes, found.cost.peak_bytes
    assert full is not None and free is not None and full < free
    limited = flm.suggest(step, *arguments(), **GIVEN, hbm=(full + free) // 2)
    peak = limited.cost.peak_bytes
    assert limited.fits and peak is not None and peak <= (full + free) // 2


def test_layers_that_differ_are_not_merged() -> None:
    """Every second layer has another activation."""

    def other(params: Any, state: Any, tokens: Any) -> Any:
        kinds = itertools.cycle([jnp.tanh, jnp.sin])

        def loss(params: Any) -> Any:
            x = params["embed"][tokens]
            for layer, kind in zip(params["layers"], kinds, strict=False):
                one = layer["mlp"]
                x = kind(x @ one["up"]) @ one["down"]
            return (x @ params["head"]).sum()

        grads = jax.grad(loss)(params)
        updates, state = optax.sgd(1e-3).update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, _, tokens = arguments(40)
    state = jax.eval_shape(optax.sgd(1e-3).init, params)
    own = problem_of(other, params, state, tokens, mesh=MESH, donated=STATE)
    names = {one.name for one in operations(own.prepared)}
    assert len(operations(own.prepared)) < len(operations(own.whole))
    assert {"stablehlo.tanh", "stablehlo.sine"} <= names


def test_a_program_with_branches_is_not_merged() -> None:
    def other(params: Any, tokens: Any) -> Any:
        def loss(params: Any) -> Any:
            x = params["embed"][tokens]
            for layer in params["layers"]:
                x = jnp.tanh(x @ layer["mlp"]["up"]) @ layer["mlp"]["down"]
                x = jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)
            return (x @ params["head"]).sum()

        return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params))

    params, _, tokens = arguments(20)
    own = problem_of(other, params, tokens, mesh=MESH, donated="params")
    assert own.prepared is own.whole


def test_outputs_with_equal_ends_and_unlike_starts() -> None:
    def other(params: Any) -> Any:
        def new(layer: int, one: Any) -> Any:
            y = one if layer == 0 else one @ one * jnp.sin(one)
            for _ in range(16):
                y = jnp.tanh(y)
            return y

        return [{"mlp": {"up": new(*one)}} for one in enumerate(params)]

    weight = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    own = problem_of(
        lambda params: other([one["mlp"]["up"] for one in params]),
        [{"mlp": {"up": weight}} for _ in range(40)],
        mesh=MESH,
        donated="params",
    )
    assert len(operations(own.prepared)) < len(operations(own.whole))
    # Its price is another one, so that a search takes the whole program.
    price = Pricer(own, None)
    assert price.of(fully_sharded(own)).collectives == 0
    search = Search(own, price, 1 << 40)
    assert search.price is search.exact
    assert search.price.of(search.best).collectives > 0
