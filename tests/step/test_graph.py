"""Functions that change the structure of their NNX arguments."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.core import Tracer
from jax.sharding import PartitionSpec as P
from shards import leaves_of, plain

import flax_layoutmap as flm

X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(8, 8, rngs=rngs)
        self.down = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(jnp.tanh(self.up(x)))


class Model(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([Block(rngs) for _ in range(2)])
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.table = nnx.data({"a": nnx.Param(jnp.ones(8)), "list": [nnx.Param(X)]})
        self.pair = nnx.Variable({"sum": jnp.zeros(8), "count": jnp.zeros(())})
        self.raw = nnx.data(jnp.ones(8))
        self.scale = 1.0

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.scale * self.drop(x)


def rules(mesh: Any) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map["kernel"] = (None, "model")
    layout_map["layers/0/up/kernel"] = ("model", None)
    layout_map["cache"] = ("data",)
    return layout_map


@pytest.fixture
def layout_map(mesh: flm.DeviceMesh) -> flm.LayoutMap:
    return rules(mesh)


def placed(layout_map: Any) -> Any:
    return layout_map.place(Model())


def assert_same(ours: Any, theirs: Any) -> None:
    """The same structure, the same values."""
    assert nnx.split(ours)[0] == nnx.split(theirs)[0]
    one, other = leaves_of(ours), leaves_of(theirs)
    assert list(one) == list(other)
    for path in one:
        pair = plain(one[path]), plain(other[path])
        np.testing.assert_allclose(*pair, atol=1e-5, err_msg=path)


def objects(model: Any) -> list[Any]:
    kinds = nnx.Pytree | nnx.Variable
    return [node for _, node in nnx.iter_graph(model) if isinstance(node, kinds)]


def places(nodes: list[Any], among: list[Any]) -> list[int | None]:
    """Where these very objects are among others."""
    number = {id(node): at for at, node in enumerate(among)}
    return [number.get(id(node)) for node in nodes]


# ------------------------------------------------------------- what a step may do


def makes_a_cache(model: Any) -> Any:
    if not hasattr(model, "cache"):
        model.cache = nnx.Cache(jnp.zeros(8))
    model.cache[...] = model.cache[...] + 1
    return model.cache[...].sum()


def sows(model: Any) -> Any:
    model.layers[0].sow(nnx.Intermediate, "seen", jnp.ones(2))


def sows_and_pops(model: Any) -> Any:
    sows(model)
    return nnx.to_pure_dict(nnx.pop(model, nnx.Intermediate))


def replaces_in_a_container(model: Any) -> None:
    model.table["list"].append(nnx.Param(model.table["a"][...] + 1))
    model.table["a"][...] = model.table["a"][...] * 5


def inserts_lora(model: Any) -> None:
    up = model.layers[0].up
    model.layers[0].up = nnx.LoRA(8, 2, 8, base_module=up, rngs=nnx.Rngs(1))


def ties_and_unties(model: Any) -> None:
    first, second = model.layers[0].up, model.layers[1].up
    is_tied = second.kernel is first.kernel
    second.kernel = nnx.Param(first.kernel[...] + 1) if is_tied else first.kernel
    first.kernel[...] += 1


def goes_to_eval(model: Any) -> None:
    model.eval()
    model.raw = model.raw + model(X).sum() * 0


def grows(model: Any) -> None:
    model.table["a"].set_value(jnp.concatenate([model.table["a"][...]] * 2))


def adds_to_a_dict_in_a_variable(model: Any) -> None:
    old = model.pair.get_value()
    model.pair.set_value({**old, "sum": old["sum"] + 1, "max": jnp.ones(3)})


def changes_an_array_without_a_variable(model: Any) -> None:
    model.raw = model.raw * 2


def empties_a_variable(model: Any) -> None:
    model.pair.set_value(None)


STEPS = [
    sows_and_pops,
    replaces_in_a_container,
    inserts_lora,
    ties_and_unties,
    goes_to_eval,
    grows,
    adds_to_a_dict_in_a_variable,
    changes_an_array_without_a_variable,
    empties_a_variable,
]


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize("step", STEPS)
def test_as_without_jit(step: Callable[[Any], Any], layout_map: flm.LayoutMap) -> None:
    """The same objects, structure and values as the same lines of Python give."""
    model, eager = placed(layout_map), Model()
    ours, theirs = objects(model), objects(eager)
    jitted = flm.jit(step, layout_map=layout_map, donate_argnames="model")
    for _ in range(1 if step is inserts_lora else 3):  # not inside of another one
        result, expected = jitted(model), step(eager)
        assert jax.tree.structure(result) == jax.tree.structure(expected)
        jax.tree.map(np.testing.assert_allclose, result, expected)
        assert_same(model, eager)
        parameters = nnx.state(model, nnx.Param)
        lies = jax.tree.map(
            lambda x, at: x.sharding.is_equivalent_to(at, x.ndim),
            parameters,
            layout_map.shardings(parameters),
        )
        assert all(jax.tree.leaves(lies)), lies
    # What was there before is still the same object, or gone, as in plain Python.
    assert places(ours, objects(model)) == places(theirs, objects(eager))


def test_modules_as_results(layout_map: flm.LayoutMap) -> None:
    model = placed(layout_map)

    def returns(model: Any, x: Any) -> Any:
        new = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        lone = nnx.Param(x.sum(0))
        up = model.layers[0].up
        return {"all": (model, up, up.kernel), "new": [new, new.kernel], "lone": lone}

    step = flm.jit(returns, layout_map=layout_map)
    for _ in range(2):
        result = step(model, X)
        up = model.layers[0].up
        assert list(map(id, result["all"])) == [id(model), id(up), id(up.kernel)]
        new, kernel = result["new"]
        assert type(new) is nnx.Linear and new.kernel is kernel
        twin = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        np.testing.assert_allclose(kernel[...], twin.kernel[...], atol=1e-6)
        assert kernel[...].sharding.spec == P(None, "model")
        assert type(result["lone"]) is nnx.Param
        np.testing.assert_allclose(result["lone"][...], X.sum(0), atol=1e-6)
    assert step._cache_size() == 1
    shapes = step.eval_shape(model, X)
    assert type(shapes["all"][0]) is Model and type(shapes["new"][0]) is nnx.Linear
    assert shapes["new"][0].kernel is shapes["new"][1]
    assert shapes["all"][1] is shapes["all"][0].layers[0].up
    assert isinstance(shapes["new"][1].get_value(), jax.ShapeDtypeStruct)
    # A State is a copy of values; it does not hold the caller's Variables.
    state = flm.jit(lambda m: nnx.state(m), layout_map=layout_map)(model)
    mine = set(map(id, objects(model)))
    assert not mine & set(map(id, jax.tree.leaves(state, is_leaf=is_variable)))


def is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


@pytest.mark.usefixtures("donation_after_reads")
def test_own_modules_as_results(layout_map: flm.LayoutMap) -> None:
    """Returned beside values that change: no change of structure, so donated."""
    model = placed(layout_map)

    def step(model: Any) -> Any:
        model.layers[0].up.kernel[...] += 1
        return model, model.layers[0].up

    jitted = flm.jit(step, layout_map=layout_map, donate_argnames="model")
    old = model.layers[0].up.kernel.get_value()
    before = np.asarray(old)
    assert jitted.eval_shape(model)[1].kernel.shape == (8, 8)
    for number in (1, 2, 3):
        same, up = jitted(model)
        assert same is model and up is model.layers[0].up
        np.testing.assert_allclose(up.kernel[...], before + number, atol=1e-6)
    assert old.is_deleted() and jitted._cache_size() == 1


def test_a_new_place_may_ask_for_a_new_layout(layout_map: flm.LayoutMap) -> None:
    model = placed(layout_map)
    other = model.layers[1].up.kernel.get_value()

    def step(model: Any) -> None:
        first, second = model.layers[0].up, model.layers[1].up
        first.kernel, second.kernel = second.kernel, first.kernel

    flm.jit(step, layout_map=layout_map)(model)
    moved = model.layers[0].up.kernel.get_value()
    np.testing.assert_array_equal(moved, other)
    assert moved.sharding.spec == P("model")
    assert other.sharding.spec == P(None, "model")


def test_a_cache_is_made_once(layout_map: flm.LayoutMap) -> None:
    """After the call that makes it, calls are like any other."""
    model = placed(layout_map)
    step = flm.jit(makes_a_cache, layout_map=layout_map, donate_argnames="model")
    totals = [float(step(model)) for _ in range(20)]
    assert totals == [8.0 * number for number in range(1, 21)]
    assert step._cache_size() == 2
    assert model.cache.get_value().sharding.spec == P("data")


# ------------------------------------------------------------------- nothing is lost


def test_no_tracer_and_no_model_stays(layout_map: flm.LayoutMap) -> None:
    model = placed(layout_map)
    step = flm.jit(inserts_lora, layout_map=layout_map, donate_argnames="model")
    with jax.checking_leaks():
        step(model)
    assert not any(isinstance(x, Tracer) for x in leaves_of(model).values())
    dead = [weakref.ref(model), weakref.ref(model.layers[0].up)]
    array = weakref.ref(model.layers[0].up.lora_a.get_value())
    del model
    gc.collect()
    assert [ref() for ref in (*dead, array)] == [None] * 3


def test_what_is_refused(layout_map: flm.LayoutMap) -> None:
    model, other = placed(layout_map), placed(layout_map)

    def shares(model: Any, other: Any) -> None:
        other.head = model.layers[0].up

    text = "^model/layers/0/up/bias and other/head/bias are one Param"
    with pytest.raises(flm.errors.StructureError, match=text):
        flm.jit(shares, layout_map=layout_map)(model, other)
    assert not hasattr(other, "head")


@pytest.mark.filterwarnings("ignore:Using .Module.sow:DeprecationWarning")
def test_what_no_rule_names_stays_where_xla_puts_it(
    mesh: flm.DeviceMesh, layout_map: flm.LayoutMap
) -> None:
    """A sown activation is not gathered, then or in the calls after."""

    class Sower(nnx.Module):
        def __init__(self) -> None:
            self.up = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

        def __call__(self, x: Any) -> Any:
            self.sow(nnx.Intermediate, "seen", jnp.tanh(self.up(x)))
            return x.sum()

    model = layout_map.place(Sower())
    step = flm.jit(lambda model, x: model(x), layout_map=layout_map)
    captured = flm.jit(
        nnx.capture(lambda model, x: model(x), nnx.Intermediate), layout_map=layout_map
    )
    for each in (step, captured):
        text = each.lower(model, X).compile().as_text()
        assert "all-gather" not in text
    for _ in range(3):
        step(model, X)
        nnx.pop(model, nnx.Intermediate)
    # Statistics that no rule names stay where they are, too.
    model.up.mean = nnx.BatchStat(jnp.zeros(8))
    keep = flm.jit(lambda model, x: model(x), layout_map=layout_map)
    for count, spec in ((1, P("model")), (2, P()), (3, P("model"))):
        where = jax.sharding.NamedSharding(mesh.jax_mesh, spec)  # type: ignore[arg-type]
        model.up.mean.set_value(jax.device_put(np.zeros(8, np.float32), where))
        keep(model, X)
        mean: Any = model.up.mean.get_value()
        assert mean.sharding.spec == spec
        seen = model.seen.get_value()
        assert len(seen) == count
        assert seen[0].sharding.spec == P("data", "model")


@pytest.mark.parametrize("option", ["ref", "hijax"])
def test_variables_that_are_references(option: str, layout_map: flm.LayoutMap) -> None:
    holder = nnx.Dict(w=nnx.Param(jnp.ones(4), **{option: True}))
    step = flm.jit(lambda holder: holder.w[...].sum(), layout_map=layout_map)
    with pytest.raises(flm.errors.StructureError, match=r"^holder/w is a .* with ref"):
        step(holder)
