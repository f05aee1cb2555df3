"""flm.suggest: rules that are found by search."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from suggest.steps_of_decoders import TOKENS, large, make, train_step

import flax_layoutmap as flm
from flax_layoutmap._suggest import price, search
from flax_layoutmap._suggest.moves import fully_sharded
from flax_layoutmap._suggest.problem import Problem, seed_rules
from flax_layoutmap.pod._lower import lower_step

MESH = "data=4,tensor=2"
WIDE = "data=16,tensor=4"
# Less than full sharding over both axes needs.
LITTLE: Any = {"mesh": WIDE, "hbm": 6 << 30}


@pytest.fixture(scope="module")
def wide() -> flm.Suggestion:
    return flm.suggest(*large(), **LITTLE)


# ------------------------------------------------------------------ the rules


@pytest.mark.parametrize("given", [{}, {"check": False}, {"limit_seconds": 0.001}])
def test_a_batch_that_does_not_divide_by_all_axes(given: Any) -> None:
    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return (jnp.tanh(x @ params["up"]) @ params["down"]).sum()

        return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params))

    params = {"up": jnp.ones((16, 64)), "down": jnp.ones((64, 16))}
    x = jnp.ones((4, 16))
    found = flm.suggest(
        step, params, x, mesh="data=4,tensor=2", donate_argnames="params", **given
    )
    for layout_map in (found.layout_map, found.second_layout_map):
        if layout_map is not None:
            assert "tensor" not in layout_map.freeze().batch
            flm.jit(step, layout_map=layout_map.on("data=4,tensor=2"))(params, x)


def test_rules_of_today_that_do_not_fit_are_a_note() -> None:
    today = flm.LayoutMap(MESH)
    today["kernel"] = ("tensor",)
    model, optimizer = nnx.eval_shape(make)
    given = model, optimizer, TOKENS
    found = flm.suggest(
        train_step, *given, layout_map=today, check=False, limit_seconds=0.001
    )
    assert found.today is None and "rules of today do not fit this step" in str(found)


def test_a_limit_is_a_number() -> None:
    with pytest.raises(flm.LayoutError, match="hbm='16GB' is no number of bytes"):
        flm.suggest(jnp.sin, jnp.ones(8), mesh="data=8", hbm="16GB")  # pyright: ignore


def test_a_step_runs_with_the_rules() -> None:
    model, optimizer = nnx.eval_shape(make)
    found = flm.suggest(train_step, model, optimizer, TOKENS, mesh=MESH, check=False)
    layout_map = found.layout_map.on(flm.DeviceMesh(MESH))
    model, optimizer = flm.create(make, layout_map=layout_map)
    tokens = jax.random.randint(jax.random.key(0), TOKENS.shape, 0, 512)
    step = flm.jit(train_step, layout_map=layout_map)
    loss = step(model, optimizer, tokens)
    assert 0 < loss < 2 * np.log(512)
    assert found.layout_map.resolve(model).diff(layout_map.resolve(model)).is_empty


def test_classes_of_dims_are_found_without_names(wide: flm.Suggestion) -> None:
    assert wide.layout_map.freeze().batch == ("data",)
    dims = [
        wide.layout_map[f"g/{name}/kernel"].dims(ndim)  # type: ignore[union-attr]
        for name, ndim in zip("abcde", (5, 4, 3, 3, 3), strict=True)
    ]
    # Megatron's: heads, and hidden units.
    assert [spec.index(("tensor",)) for spec in dims] == [3, 1, 2, 2, 1]
    assert len(wide.layout_map) <= 7 and len(wide.layout_map.activations) <= 2


def test_the_cost_is_the_estimate_of_a_plan(wide: flm.Suggestion) -> None:
    step, *given = large()
    step = flm.jit(step, layout_map=wide.layout_map)
    estimate = flm.pod.plan(step, *given, mesh=WIDE).with_layout(wide.layout_map)
    assert estimate.wire_bytes() == wide.cost.total_sent_bytes
    assert estimate.memory.at_rest == wide.cost.at_rest
    assert not estimate.drift


def test_names_and_their_order_do_not_matter(wide: flm.Suggestion) -> None:
    other = flm.suggest(*large("hgfedcba"), **LITTLE, check=False)
    assert other.cost == wide.cost and other.trail == wide.trail


# --------------------------------------------------------------------- limits


def mlp_step(params: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        return (jnp.tanh(x @ params["up"]) @ params["down"]).sum()

    return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params))


SMALL = "data=4,tensor=2"
OPTIONS: Any = {"mesh": SMALL, "donate_argnames": "params", "check": False}
GIVEN = (
    mlp_step,
    {
        "up": jax.ShapeDtypeStruct((1024, 4096), jnp.float32),
        "down": jax.ShapeDtypeStruct((4096, 1024), jnp.float32),
    },
    jax.ShapeDtypeStruct((1 << 14, 1024), jnp.float32),
)


@pytest.fixture(scope="module")
def small() -> flm.Suggestion:
    return flm.suggest(*GIVEN, **OPTIONS)


def test_a_limit_of_memory(small: flm.Suggestion) -> None:
    none = flm.suggest(*GIVEN, **OPTIONS, hbm=1000)
    least, most = none.cost.peak_bytes, small.cost.peak_bytes
    assert least is not None and most is not None and least < most
    assert small.fits and not none.fits
    text = str(none)
    assert "does not fit: the least peak that was found is" in text
    assert "gradients and activations" in text
    limit = (least + most) // 2
    between = flm.suggest(*GIVEN, **OPTIONS, hbm=limit)
    assert between.fits and (between.cost.peak_bytes or most) <= limit
    assert between.cost.seconds >= small.cost.seconds


# ------------------------------------------------------- what it is told, and tells


def test_the_text(wide: flm.Suggestion) -> None:
    heading, code, table, notes = str(wide).split("\n\n")
    assert heading == f"suggestion for train_step on mesh {WIDE}: 64 devices"
    space: dict[str, Any] = {}
    abstract = flm.DeviceMesh.abstract(WIDE)
    exec(code.replace(f'"{WIDE}"', "mesh"), {"flm": flm, "mesh": abstract}, space)
    assert space["layout_map"] == wide.layout_map
    assert all(len(line) <= 80 for line in (*code.splitlines(), *table.splitlines()))
    assert "links and products of v5p are assumed" in notes
    assert "checked by XLA's partitioner" in notes and "not priced" in notes


def test_explain_prices_the_second_choice(wide: flm.Suggestion) -> None:
    text = wide.explain("g/c/kernel")
    assert text.startswith("g/c/kernel: (None, ")
    assert "the second choice, (" in text and "makes a step" in text
    with pytest.raises(KeyError, match="no parameter has the path 'x'"):
        wide.explain("x")


def test_the_rules_of_today_are_priced_beside() -> None:
    today = flm.LayoutMap(batch="data")
    today["up"] = (None, "tensor")
    today["down"] = ("tensor", None)
    found = flm.suggest(*GIVEN, **OPTIONS, layout_map=today)
    assert found.today is not None
    assert found.cost.seconds <= found.today.seconds
    assert found.cost.seconds <= found.fully_sharded.seconds
    assert " today\n" in str(found)


def test_rules_of_today_for_another_mesh() -> None:
    today = flm.LayoutMap(batch="data")
    today["up"] = (None, "model")
    found = flm.suggest(*GIVEN, **OPTIONS, layout_map=today)
    assert found.today is None
    assert "the rules of today do not fit this mesh" in str(found)


def test_a_limit_of_time_gives_the_best_so_far() -> None:
    ended = flm.suggest(*GIVEN, **(OPTIONS | {"check": True}), limit_seconds=0.0)
    assert not ended.is_complete and ended.report is None
    assert ended.cost.seconds <= ended.fully_sharded.seconds
    assert "interrupted: the best so far" in str(ended)


@pytest.mark.parametrize("calls", [1, 3, 12])
def test_an_interrupt_at_any_price(calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    priced, numbers = price.Pricer._of, itertools.count(1)

    def interrupted(*args: Any) -> Any:
        if next(numbers) == calls:
            raise KeyboardInterrupt
        return priced(*args)

    monkeypatch.setattr(price.Pricer, "_of", interrupted)
    found = flm.suggest(*GIVEN, **OPTIONS)
    assert not found.is_complete
    assert found.cost.seconds <= found.fully_sharded.seconds


def test_rules_for_activations_end_with_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = flm.DeviceMesh.abstract(MESH)
    arguments = *nnx.eval_shape(make), TOKENS
    rules = seed_rules(mesh).freeze()
    lowered = lower_step(train_step, arguments, {}, rules, (), "tpu", mesh)
    problem = Problem(lowered, mesh)
    monkeypatch.setattr(search, "_CLOSE", -1.0)  # as if no rules were good enough
    start = fully_sharded(problem)
    whole = search.Search(problem, price.Pricer(problem, None), None)
    best = whole.price.of(whole.with_rules(start))
    for ending in (search.Stopped, KeyboardInterrupt):

        def end(ending: type[BaseException] = ending) -> bool:
            raise ending

        ended = search.Search(problem, price.Pricer(problem, None), None, is_over=end)
        found = ended.with_rules(start)
        assert not ended.is_complete and found.fixed is not None
        assert ended.price.count == 3 < whole.price.count
        assert best.seconds <= ended.price.of(found).seconds


# --------------------------------------------------------------------- errors


def test_arguments_without_state() -> None:
    with pytest.raises(
        flm.LayoutError,
        match="mlp_step has no state to lay out: each of params, x is taken for data; "
        "say what is state: donate_argnames=",
    ):
        flm.suggest(*GIVEN, mesh=SMALL)


def test_meshes_that_are_refused() -> None:
    explicit = jax.sharding.AbstractMesh(
        (2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2
    )
    with pytest.raises(flm.LayoutError, match="suggest rules for a mesh of auto axes"):
        flm.suggest(*GIVEN, mesh=explicit, donate_argnames="params")
    with pytest.raises(flm.errors.MeshError, match="has one device"):
        flm.suggest(*GIVEN, mesh="data=1", donate_argnames="params")
    with pytest.raises(flm.errors.MeshError, match="needs a mesh"):
        flm.suggest(*GIVEN, donate_argnames="params")
