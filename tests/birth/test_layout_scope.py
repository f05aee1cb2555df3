"""layout_map_scope: NNX and Linen models made in a block, by their final paths."""

import asyncio
import copy
import threading
from contextlib import nullcontext
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from hypothesis import strategies as st
from shards import Dims, assert_as_eager, bare
from shards import assert_lies as lies_on

import flax_layoutmap as flm

X = jnp.ones((4, 8))
COLUMN, ROW = (None, "model"), ("model", None)


def rules(mesh: Any, **more: Any) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map.update(more)
    return layout_map


def assert_lies(array: Any, dims: Dims) -> None:
    lies_on(array, dims, flm.DeviceMesh((2, 4), ("data", "model")))


def linear(seed: int = 0) -> Any:
    return nnx.Linear(8, 8, rngs=nnx.Rngs(seed))


def is_abstract(variable: Any) -> bool:
    return type(variable.get_raw_value()) is jax.ShapeDtypeStruct


class _Subclass(nnx.Module):
    """The page's `SubclassModel`: two layers, found by attribute."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.d1 = nnx.Linear(8, 16, rngs=rngs)
        self.d2 = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.d2(self.d1(x))


class _Pair(nnx.Module):
    """It is given its parts, and has a parameter besides them."""

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second
        self.gain = nnx.Param(jnp.full(8, 2.0))


Subclass: Any = _Subclass  # typed as Any: the tests set attributes on them
Pair: Any = _Pair


# ------------------------------------------------------------- the page's examples


def functional(rngs: nnx.Rngs) -> Any:
    """Layers are made one by one, and joined to a model then."""
    first, second = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
    return nnx.Dict(d1=first, d2=second)


def sequential(rngs: nnx.Rngs) -> Any:
    """Its layers are made before it, under no name."""
    first, second = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
    return nnx.Sequential(first, nnx.relu, second)


EXAMPLES: list[Any] = [
    (Subclass, "d1", "d2"),
    (functional, "d1", "d2"),
    (sequential, "layers.0", "layers.2"),
]
# By key of the page, in the order of the leaves.
AXES: dict[str, Any] = {
    "d1.bias": ("model",),
    "d1.kernel": ("data", "model"),
    "d2.bias": ("data",),
    "d2.kernel": ("model", "data"),
}


def assert_of_page(tree: Any) -> None:
    for leaf, axes in zip(jax.tree.leaves(tree), AXES.values(), strict=True):
        assert_lies(leaf, tuple((axis,) for axis in axes))


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize(("build", "first", "second"), EXAMPLES)
def test_the_models_of_the_page(build: Any, first: str, second: str, kind: Any) -> None:
    mesh = flm.DeviceMesh((2, 4), ("data", "model"), axis_types=kind)
    layout_map = flm.LayoutMap(mesh)
    for key, axes in AXES.items():
        layout_map[key.replace("d1", first).replace("d2", second)] = axes
    rngs, other = nnx.Rngs(0), nnx.Rngs(0)
    with jax.set_mesh(bare(mesh)) if kind == "explicit" else nullcontext():
        with layout_map.scope():
            model = build(rngs)
            leaves = jax.tree.leaves(nnx.state(model))
            assert {type(leaf) for leaf in leaves} == {jax.ShapeDtypeStruct}
    assert_as_eager(model, build(other), layout_map)
    assert (rngs.params() == other.params()).all()
    assert_of_page(nnx.state(model))


class Functional(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dense(8, name="d2")(linen.Dense(16, name="d1")(x))


@pytest.mark.parametrize("when", ["in the block", "after it", "made before it"])
def test_functional_model_of_linen(mesh: flm.DeviceMesh, when: str) -> None:
    model, made, key = Functional(), None, jax.random.key(0)
    with flm.layout_map_scope(rules(mesh, **AXES)):
        if when != "made before it":
            model = Functional()
        if when != "after it":
            made = model.init(key, X)
    made = made or model.init(key, X)
    assert_of_page(made)
    plain = Functional().init(key, X)
    for leaf, other in zip(*map(jax.tree.leaves, (made, plain)), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-6)


# ---------------------------------------------------------------- final object paths

TREES = st.recursive(
    st.just(None),
    lambda parts: (
        st.lists(parts, min_size=1, max_size=3)
        | st.dictionaries(st.sampled_from("abc"), parts, min_size=1, max_size=3)
    ),
    max_leaves=6,
)


@hypothesis.settings(max_examples=15)
@hypothesis.given(tree=TREES, rule=st.sampled_from(["kernel", "a.*kernel", "1/.*bias"]))
def test_any_tree_of_layers(tree: Any, rule: str) -> None:
    """As the eager one, with the layouts of its final paths."""

    def build(node: Any, rngs: nnx.Rngs) -> Any:
        if node is None:
            return nnx.Linear(4, 4, rngs=rngs)
        if isinstance(node, list):
            return nnx.List([build(part, rngs) for part in node])
        return nnx.Dict({name: build(part, rngs) for name, part in node.items()})

    layout_map = rules("data=2,model=4", **{rule: (..., "model")})
    with flm.layout_map_scope(layout_map):
        model = build(tree, nnx.Rngs(0))
    assert_as_eager(model, build(tree, nnx.Rngs(0)), layout_map)


def test_parts_of_parts_replaced_and_lost(mesh: flm.DeviceMesh) -> None:
    layout_map = flm.LayoutMap(mesh, match="fullmatch")
    layout_map["first/kernel"] = COLUMN
    layout_map["second/(kernel|first/kernel)"] = ROW
    layout_map["later/kernel"] = ("data", None)
    layout_map[".*(bias|gain|second/second.*)"] = None
    rngs, other = nnx.Rngs(0), nnx.Rngs(0)
    old = nnx.Linear(8, 8, rngs=rngs)
    with flm.layout_map_scope(layout_map):
        one, two = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
        model = Pair(nnx.Linear(3, 3, rngs=nnx.Rngs(1)), Pair(two, old))
        model.first = one
        model.later = nnx.Linear(8, 8, rngs=rngs)
        nnx.Linear(7, 7, rngs=rngs)  # nobody keeps it: its rules need not fit
    parts = [nnx.Linear(8, 8, rngs=other) for _ in range(4)]
    eager = Pair(parts[1], Pair(parts[2], parts[0]))
    eager.later = parts[3]
    assert_as_eager(model, eager, layout_map)
    assert model.first is one and model.second.second is old


def test_values_that_are_shared_set_or_copied(mesh: flm.DeviceMesh) -> None:
    layout_map = rules(mesh, **{"^d1/kernel": COLUMN, "d1/bias": ("model",)})
    with flm.layout_map_scope(layout_map):
        model = Subclass(nnx.Rngs(0))
        model.copy = nnx.Param(model.d1.kernel.get_raw_value())
        model.ema = nnx.clone(model.d1)
        model.d1.bias.set_value(jnp.arange(16.0))
    for copied in (model.copy, model.ema.kernel):
        np.testing.assert_array_equal(copied[...], model.d1.kernel[...])
        assert_lies(copied[...], ((), ()))
    assert_lies(model.d1.kernel[...], ((), ("model",)))
    np.testing.assert_array_equal(model.d1.bias[...], np.arange(16.0))
    assert_lies(model.d1.bias[...], (("model",),))


def test_two_models_one_map(mesh: flm.DeviceMesh) -> None:
    """Each has its own paths; a rule that one of them uses is not unused."""
    layout_map = flm.LayoutMap(mesh, match="fullmatch", strict=True)
    layout_map.update({"d1/kernel": COLUMN, ".*bias|d2/kernel": None, "kernel": ROW})
    with flm.layout_map_scope(layout_map):
        first, second = Subclass(nnx.Rngs(0)), linear()
    assert_lies(first.d1.kernel[...], ((), ("model",)))
    assert_lies(second.kernel[...], (("model",), ()))


# -------------------------------------------------------------------------- Linen


class Lm(linen.Module):
    @linen.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        init = linen.with_partitioning(linen.initializers.ones, ("data", None))
        x = linen.Dense(16, name="d1", kernel_init=init)(x)
        return linen.BatchNorm(use_running_average=not train, name="norm")(x)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("method", ["init", "lazy_init"])
def test_linen_as_it_is_and_under_jit(kind: str, method: str) -> None:
    """Boxes say how their values lie."""
    grid = flm.DeviceMesh((2, 4), ("data", "model"), axis_types=kind)
    layout_map = rules(grid, **{"d1/kernel": COLUMN})
    with flm.layout_map_scope(layout_map):
        model = Lm()
    made = [getattr(model, method)(jax.random.key(0), X, train=True)]
    # On Explicit axes JAX asks for this.
    with jax.set_mesh(bare(grid)) if kind == "explicit" else nullcontext():
        shapes = jax.eval_shape(getattr(model, method), jax.random.key(0), X)
        made += [jax.jit(getattr(model, method))(jax.random.key(0), X)]
    for variables in made:
        assert jax.tree.structure(variables) == jax.tree.structure(shapes)
        box = variables["params"]["d1"]["kernel"]
        assert box.names == COLUMN
        assert_lies(box.value, ((), ("model",)))
        assert_lies(variables["batch_stats"]["norm"]["mean"], ((),))
        assert (np.asarray(box.value) == 1).all()


class Field(linen.Module):
    init: Any = linen.initializers.ones


def test_linen_modules_of_a_block_are_what_they_were(mesh: flm.DeviceMesh) -> None:
    with flm.layout_map_scope(rules(mesh)):
        model, field = Lm(), Field()
    assert field.init is linen.initializers.ones
    assert model == Lm() and hash(model) == hash(Lm()) and repr(model) == repr(Lm())
    for twin, count in ((model.clone(), 1), (copy.deepcopy(model), 8)):
        made = twin.init(jax.random.key(0), X)
        assert len(jax.tree.leaves(made)[0].sharding.device_set) == count


# ------------------------------------------------------- blocks in blocks, and threads


def test_nested_blocks(mesh: flm.DeviceMesh) -> None:
    """Each lays out what is made in it; it leaves alone what another one does."""
    init = nnx.with_metadata(nnx.initializers.ones, out_sharding=(None, None))
    outer, rows = rules(mesh, kernel=ROW, gain=("data",)), flm.DeviceMesh("rows=8")
    outer.names["hidden"] = ("data", None)
    with flm.layout_map_scope(outer) as given:
        assert given is outer
        early = linear()
        with flm.layout_map_scope(rules(rows, kernel=(None, "rows"), gain=("rows",))):
            part = nnx.Linear(3, 8, kernel_init=init, rngs=nnx.Rngs(0))
            pair = Pair(part, early)
        before: Any = part.kernel[...]
        assert is_abstract(early.kernel)
        made = flm.create(linear, rules(mesh, kernel=COLUMN))
        assert_lies(made.kernel[...], ((), ("model",)))
        model = Pair(pair, linear(1))
        x = flm.distribute_tensor(np.ones((4, 2)), "hidden")
    assert part.kernel[...] is before
    assert part.kernel.get_metadata()["out_sharding"] == (None, "rows")
    lies_on(before, ((), ("rows",)), rows)
    lies_on(pair.gain[...], (("rows",),), rows)
    assert_lies(early.kernel[...], (("model",), ()))
    assert_lies(model.second.kernel[...], (("model",), ()))
    assert_lies(model.gain[...], (("data",),))
    assert_lies(x, (("data",), ()))


def test_a_scope_decorates(mesh: flm.DeviceMesh) -> None:
    decorated: Any = rules(mesh, kernel=COLUMN).scope()
    made = decorated(linear)
    for model in (made(), made()):
        assert_lies(model.kernel[...], ((), ("model",)))


def hooks() -> list[Any]:
    names = ("__post_init__", "init", "lazy_init")
    return [type(nnx.Pytree).__call__, *(vars(linen.Module)[name] for name in names)]


def assert_plain() -> None:
    leaves = jax.tree.leaves((nnx.state(linear()), Lm().init(jax.random.key(0), X)))
    assert all(len(leaf.sharding.device_set) == 1 for leaf in leaves)


def test_blocks_in_threads_at_the_same_time(mesh: flm.DeviceMesh) -> None:
    """Each makes its own models by its own rules; who ends first ends nothing else."""
    before, ended, barrier = hooks(), [], threading.Barrier(2)

    def work(layout: Any, dims: Any) -> None:
        with flm.layout_map_scope(rules(mesh, **{"layers/0/kernel": layout})):
            part = linear()
            barrier.wait(60)
            model: Any = nnx.Sequential(part)
            if layout is ROW:
                barrier.wait(60)
        assert_lies(model.layers[0].kernel[...], dims)
        if layout is COLUMN:
            assert hooks() != before
            assert_plain()  # out of the block, while another one is open
            barrier.wait(60)
        ended.append(layout)

    pairs = [(ROW, (("model",), ())), (COLUMN, ((), ("model",)))]
    threads = [threading.Thread(target=work, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ended) == 2 and hooks() == before


def test_blocks_in_tasks(mesh: flm.DeviceMesh) -> None:
    """A task has the block that it was begun in, as long as this is open."""

    async def make(until: asyncio.Event) -> Any:
        await until.wait()
        return linear()

    async def main() -> Any:
        now, later = asyncio.Event(), asyncio.Event()
        with flm.layout_map_scope(rules(mesh, kernel=COLUMN)):
            tasks = [asyncio.create_task(make(event)) for event in (now, later)]
            with flm.layout_map_scope(rules(mesh, kernel=ROW)):
                now.set()
                first = await tasks[0]
        with flm.layout_map_scope(rules(mesh)):
            later.set()
            return first, await tasks[1]

    first, late = asyncio.run(main())
    assert_lies(first.kernel[...], ((), ("model",)))
    assert len(late.kernel[...].sharding.device_set) == 1


# ---------------------------------------------------------------------------- errors


def test_errors_leave_nothing_behind(mesh: flm.DeviceMesh) -> None:
    before, model = hooks(), None
    with pytest.raises(ZeroDivisionError), flm.layout_map_scope(rules(mesh)):
        with pytest.raises(KeyError), flm.layout_map_scope(rules(mesh)):
            raise KeyError
        assert hooks() != before
        model = linear()
        raise ZeroDivisionError
    assert hooks() == before and model is not None and is_abstract(model.kernel)
    assert_plain()
    layout_map = rules(mesh, **{"d1/kernel": ("model",), "d2/bias": ROW})
    with pytest.raises(flm.errors.ResolveError, match="d1/kernel(?s:.)*d2/bias"):
        with flm.layout_map_scope(layout_map):
            model = Subclass(nnx.Rngs(0))
    assert is_abstract(model.d1.kernel)


@pytest.mark.parametrize("use", [lambda m: m(X), lambda m: Pair(m.d1.bias * 2, 0)])
def test_a_use_of_a_value_in_the_block(mesh: flm.DeviceMesh, use: Any) -> None:
    with pytest.raises((AttributeError, TypeError), match="ShapeDtypeS") as told:
        with flm.layout_map_scope(rules(mesh)):
            use(Subclass(nnx.Rngs(0)))
    (note,) = told.value.__notes__
    assert "until the block ends" in note and "flm.create(make, layout_map)" in note


OLD = linear()


class Bad(nnx.Module):
    def __init__(self, is_read: bool) -> None:
        self.inner = linear() if is_read else OLD
        if is_read:
            assert float(self.inner.kernel[0, 0]) < 9


@pytest.mark.parametrize("is_read", [True, False])
def test_a_constructor_that_cannot_be_traced(
    mesh: flm.DeviceMesh, is_read: bool
) -> None:
    text = "reads the value of an array" if is_read else "that was made outside"
    with pytest.raises(flm.errors.StructureError, match=f"{text}(?s:.)*flm.create"):
        with flm.layout_map_scope(rules(mesh, kernel=COLUMN)):
            Bad(is_read)


class Holds(nnx.Module):
    """Keeps itself and its parts: in functions, in a closure, in a registry."""

    registry: Any = []

    def __init__(self, config: Any, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(config["size"], 8, rngs=rngs)
        self.parts: Any = nnx.data({"first": self.linear})
        self.closure: Any = lambda x: self.linear(x)
        self.registry.extend([self, self.linear, self.linear.kernel])


def test_what_an_init_keeps_of_its_module(mesh: flm.DeviceMesh, born: Any) -> None:
    """It is the module itself, not a copy of it that lives in a trace."""
    Holds.registry.clear()
    config = {"size": 8, 1: "a dict that JAX cannot flatten"}
    model = born(Holds, rules(mesh, **{"linear/kernel": COLUMN}), config, nnx.Rngs(0))
    assert_lies(model.linear.kernel[...], ((), ("model",)))
    parts = (model, model.linear, model.linear.kernel)
    assert len(Holds.registry) == 3  # the constructor ran once
    assert all(a is b for a, b in zip(parts, Holds.registry, strict=True))
    model.linear.kernel[...] = jnp.zeros((8, 8))  # it belongs to no trace
    for call in (model.closure, model.parts["first"]):
        np.testing.assert_array_equal(call(X), jnp.zeros((4, 8)))
