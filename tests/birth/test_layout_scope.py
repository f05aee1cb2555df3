"""layout_map_scope: NNX and Linen models made in a block, by their final paths."""

import asyncio
import copy
import functools
import logging
import math
import operator
import pickle
import threading
import warnings
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from shards import Dims, bare, plain
from shards import assert_lies as lies_on

import flax_layoutmap as flm
from flax_layoutmap._rules.scope import current_rules

X = jnp.ones((4, 8))


def rules(mesh: Any, **more: Any) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map.update(more)
    return layout_map


def assert_lies(array: Any, dims: Dims) -> None:
    lies_on(array, dims, flm.DeviceMesh((2, 4), ("data", "model")))


def values(node: Any) -> list[np.ndarray]:
    return [plain(leaf) for leaf in jax.tree.leaves(nnx.state(node))]


def assert_same(first: Any, second: Any) -> None:
    """The same graph, with values that differ by the rounding of `jit` at most."""
    assert nnx.graphdef(first) == nnx.graphdef(second)
    for one, other in zip(values(first), values(second), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


class _Subclass(nnx.Module):
    """The page's `SubclassModel`: two layers, found by attribute."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.d1 = nnx.Linear(8, 16, rngs=rngs)
        self.d2 = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.d2(self.d1(x))


Subclass: Any = _Subclass  # typed as Any: the tests set attributes on it


# ------------------------------------------------------------- the page's examples


def page_rules(mesh: Any) -> tuple[flm.LayoutMap, list[flm.TensorLayout]]:
    """`layout_map["d1.kernel"] = layout_1` and so on, as there."""
    axes = [("data", "model"), ("model",), ("model", "data"), ("data",)]
    layouts = [flm.TensorLayout(own, mesh) for own in axes]
    layout_map = flm.LayoutMap(mesh)
    for key, layout in zip(
        ("d1.kernel", "d1.bias", "d2.kernel", "d2.bias"), layouts, strict=True
    ):
        layout_map[key] = layout
    return layout_map, layouts


def assert_of_page(d1: Any, d2: Any, layouts: list[flm.TensorLayout]) -> None:
    parts = (d1["kernel"], d1["bias"], d2["kernel"], d2["bias"])
    for part, layout in zip(parts, layouts, strict=True):
        assert flm.dtensor.fetch_layout(part) == layout
        lies_on(part[...], layout.dims(part.ndim), layout.mesh)  # type: ignore[arg-type]


def test_subclass_model(mesh: flm.DeviceMesh) -> None:
    layout_map, layouts = page_rules(mesh)
    with flm.layout_map_scope(layout_map):
        model = Subclass(nnx.Rngs(0))
    plain = Subclass(nnx.Rngs(0))
    assert_same(model, plain)
    assert_of_page(vars(model.d1), vars(model.d2), layouts)
    np.testing.assert_allclose(model(X), plain(X), rtol=1e-5)


@pytest.mark.parametrize("within", [True, False])
def test_functional_model(mesh: flm.DeviceMesh, within: bool) -> None:
    """Layers by name: Linen's. Weights may be made in the block or after it."""
    layout_map, layouts = page_rules(mesh)

    class Functional(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return linen.Dense(8, name="d2")(linen.Dense(16, name="d1")(x))

    made: Any = None
    with flm.layout_map_scope(layout_map):
        model = Functional()
        if within:
            made = model.init(jax.random.key(0), X)
    if not within:
        made = model.init(jax.random.key(0), X)
    assert_of_page(made["params"]["d1"], made["params"]["d2"], layouts)


def test_sequential_model(mesh: flm.DeviceMesh) -> None:
    """Its layers are made before it, under no name."""
    layout_map = rules(mesh, **{"layers/0/kernel": (None, "model")})
    layout_map["layers/1/kernel"] = ("model", None)
    rngs, other = nnx.Rngs(0), nnx.Rngs(0)
    with layout_map.scope():
        model: Any = nnx.Sequential(
            nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
        )
    plain = nnx.Sequential(nnx.Linear(8, 16, rngs=other), nnx.Linear(16, 8, rngs=other))
    assert_same(model, plain)
    assert_same(rngs, other)
    assert_lies(model.layers[0].kernel[...], ((), ("model",)))
    assert_lies(model.layers[1].kernel[...], (("model",), ()))
    assert_lies(model.layers[1].bias[...], ((),))


class Lm(linen.Module):
    """The page's functional model has named layers; so has Linen."""

    @linen.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        x = linen.Dense(16, name="d1")(x)
        x = linen.BatchNorm(use_running_average=not train, name="norm")(x)
        return linen.Dense(8, name="d2")(x)


@pytest.mark.parametrize("when", ["in the block", "after it", "made before it"])
@pytest.mark.parametrize("method", ["init", "init_with_output", "lazy_init"])
def test_linen(mesh: flm.DeviceMesh, when: str, method: str) -> None:
    layout_map = rules(mesh, **{"d1/kernel": (None, "model")})
    model, made = Lm(), None
    with flm.layout_map_scope(layout_map):
        if when != "made before it":
            model = Lm()
        if when != "after it":
            made = getattr(model, method)(jax.random.key(0), X, train=True)
    if when == "after it":
        made = getattr(model, method)(jax.random.key(0), X, train=True)
    plain = Lm().init_with_output(jax.random.key(0), X, train=True)
    assert made is not None
    if method == "init_with_output":
        output, made = made
        np.testing.assert_allclose(output, plain[0], rtol=1e-4, atol=1e-5)
    assert jax.tree.structure(made) == jax.tree.structure(plain[1])
    for one, other in zip(*map(jax.tree.leaves, (made, plain[1])), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    assert_lies(made["params"]["d1"]["kernel"], ((), ("model",)))
    assert_lies(made["params"]["d2"]["kernel"], ((), ()))
    assert_lies(made["batch_stats"]["norm"]["mean"], ((),))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("method", ["init", "init_with_output", "lazy_init"])
def test_linen_under_jit_is_constrained(kind: str, method: str) -> None:
    grid = flm.DeviceMesh((2, 4), ("data", "model"), axis_types=kind)
    layout_map = rules(grid, **{"d1/kernel": (None, "model")})
    made: list[Any] = []
    old, key = Lm(), jax.random.key(0)
    with flm.layout_map_scope(layout_map):
        model = Lm()
    # On Explicit axes JAX asks for this.
    context = jax.set_mesh(bare(grid)) if kind == "explicit" else nullcontext()
    with context:
        with flm.layout_map_scope(layout_map):
            shapes = jax.eval_shape(getattr(model, method), key, X)
            made += [jax.jit(getattr(m, method))(key, X) for m in (model, old)]
        made += [jax.jit(getattr(model, method))(key, X)]
    plain = getattr(Lm(), method)(key, X)
    for own in made:
        assert jax.tree.structure(shapes) == jax.tree.structure(own)
        if method == "init_with_output":
            _, own = own
        assert_lies(own["params"]["d1"]["kernel"], ((), ("model",)))
        assert_lies(own["batch_stats"]["norm"]["mean"], ((),))
    again = jax.jit(getattr(old, method))(key, X)  # outside: as ever
    for one, other in zip(*map(jax.tree.leaves, (again, plain)), strict=True):
        assert len(one.sharding.device_set) == 1
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_linen_under_jit_must_fit(mesh: flm.DeviceMesh) -> None:
    with flm.layout_map_scope(rules(mesh, **{"d1/kernel": ("model",)})):
        model = Lm()
    with pytest.raises(flm.errors.ResolveError, match="d1/kernel"):
        jax.jit(model.init)(jax.random.key(0), X)


def test_linen_boxes_under_jit(mesh: flm.DeviceMesh) -> None:
    class Boxed(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            init = linen.with_partitioning(linen.initializers.ones, ("data", None))
            return linen.Dense(8, kernel_init=init, name="d1")(x)

    with flm.layout_map_scope(rules(mesh, **{"d1/kernel": (None, "model")})):
        made: Any = jax.jit(Boxed().init)(jax.random.key(0), X)
    box = made["params"]["d1"]["kernel"]
    assert box.names == (None, "model")
    assert_lies(box.value, ((), ("model",)))


def test_fields_and_methods_that_are_called_init(mesh: flm.DeviceMesh) -> None:
    class Field(linen.Module):
        init: Any = linen.initializers.ones
        lazy_init: Any = None

        @linen.compact
        def __call__(self, x: Any) -> Any:
            return x @ self.param("kernel", self.init, (x.shape[-1], 8))

    class Needed(linen.Module):
        init_with_output: Any

        @linen.compact
        def __call__(self, x: Any) -> Any:
            return Field(init=self.init_with_output, name="d1")(x)

    class Method(linen.Module):
        def init(self, key: Any) -> Any:  # type: ignore[override]
            return linen.Module.init(self, key, X)

        @linen.compact
        def __call__(self, x: Any) -> Any:
            return linen.Dense(8, name="d1")(x)

    with flm.layout_map_scope(rules(mesh, **{"d1/kernel": (None, "model")})):
        field, needed = Field(), Needed(linen.initializers.zeros)
        method = Method()
        own = method.init(jax.random.key(0))
    assert field.init is linen.initializers.ones and field.lazy_init is None
    assert needed.init_with_output is linen.initializers.zeros
    assert vars(method).keys().isdisjoint({"init"})
    assert_lies(own["params"]["d1"]["kernel"], ((), ("model",)))


def test_linen_modules_of_a_block_are_what_they_were(mesh: flm.DeviceMesh) -> None:
    with flm.layout_map_scope(rules(mesh)):
        model = Lm()
    assert model == Lm() and hash(model) == hash(Lm())
    assert repr(model) == repr(Lm())
    clone = model.clone()
    made = clone.init(jax.random.key(0), X)
    assert len(jax.tree.leaves(made)[0].sharding.device_set) == 1
    twin = copy.deepcopy(model)
    made = twin.init(jax.random.key(0), X)
    assert len(jax.tree.leaves(made)[0].sharding.device_set) == 8


# ---------------------------------------------------------------- final object paths


class Tree(nnx.Module):
    """Lists, dicts, a tied layer, statistics, random state, a bare Variable."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.heads = nnx.Dict(a=nnx.Linear(8, 8, rngs=rngs), b=self.blocks[0])
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(8))
        self.rngs = rngs


def test_every_kind_of_place(mesh: flm.DeviceMesh) -> None:
    layout_map = rules(mesh, **{"blocks/1/kernel": (None, "model")})
    layout_map["heads/a/kernel"] = ("model", None)
    layout_map["^scale"] = ("data",)
    rngs = nnx.Rngs(3)
    with flm.layout_map_scope(layout_map):
        model = Tree(rngs)
    assert_same(model, Tree(nnx.Rngs(3)))
    assert model.rngs is rngs
    assert model.heads.b is model.blocks[0]
    assert_lies(model.blocks[0].kernel[...], ((), ()))
    assert_lies(model.blocks[1].kernel[...], ((), ("model",)))
    assert_lies(model.heads.a.kernel[...], (("model",), ()))
    assert_lies(model.scale[...], (("data",),))
    for leaf in jax.tree.leaves(nnx.state(model)):
        assert leaf.committed and len(leaf.sharding.device_set) == 8


class _Pair(nnx.Module):
    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second
        self.gain = nnx.Param(jnp.full(8, 2.0))


Pair: Any = _Pair


def test_parts_made_first_and_assembled_later(mesh: flm.DeviceMesh) -> None:
    layout_map = flm.LayoutMap(mesh, match="fullmatch")
    layout_map["first/kernel"] = (None, "model")
    layout_map["second/(kernel|first/kernel)"] = ("model", None)
    layout_map["later/kernel"] = ("data", None)
    layout_map[".*(bias|gain|second/second.*)"] = None
    rngs, other = nnx.Rngs(0), nnx.Rngs(0)
    old = nnx.Linear(8, 8, rngs=rngs)
    with flm.layout_map_scope(layout_map):
        one, two = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
        model = Pair(one, Pair(two, old))
        model.later = nnx.Linear(8, 8, rngs=rngs)
        nnx.Linear(8, 8, rngs=rngs)  # nobody keeps it
    parts = [nnx.Linear(8, 8, rngs=other) for _ in range(4)]
    plain = Pair(parts[1], Pair(parts[2], parts[0]))
    plain.later = parts[3]
    assert_same(model, plain)
    assert model.first is one and model.second.second is old
    assert_lies(one.kernel[...], ((), ("model",)))
    assert_lies(two.kernel[...], (("model",), ()))
    assert_lies(old.kernel[...], ((), ()))
    assert_lies(model.later.kernel[...], (("data",), ()))
    assert_lies(model.gain[...], ((),))


def test_a_part_that_is_replaced_is_not_made(mesh: flm.DeviceMesh) -> None:
    with flm.layout_map_scope(rules(mesh)):
        model = Subclass(nnx.Rngs(0))
        model.d2 = nnx.Linear(16, 4, rngs=nnx.Rngs(1))
        del model.d1
    assert sorted(nnx.to_pure_dict(nnx.state(model))) == ["d2"]
    assert model.d2.kernel.shape == (16, 4)


def test_one_value_in_two_variables(mesh: flm.DeviceMesh) -> None:
    layout_map = rules(mesh, **{"d1/kernel": (None, "model")})
    with flm.layout_map_scope(layout_map):
        model = Subclass(nnx.Rngs(0))
        model.copy = nnx.Param(model.d1.kernel.get_raw_value())
    np.testing.assert_array_equal(model.copy[...], model.d1.kernel[...])
    assert_lies(model.copy[...], ((), ()))
    assert_lies(model.d1.kernel[...], ((), ("model",)))


def test_two_models_one_map(mesh: flm.DeviceMesh) -> None:
    """Each has its own paths; a rule that one of them uses is not unused."""
    layout_map = flm.LayoutMap(mesh, match="fullmatch", strict=True)
    layout_map["d1/kernel"] = (None, "model")
    layout_map["layers/0/kernel"] = ("model", None)
    layout_map["d[12]/bias|d2/kernel|layers/0/bias"] = None
    with flm.layout_map_scope(layout_map):
        first = Subclass(nnx.Rngs(0))
        second: Any = nnx.Sequential(nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    assert_lies(first.d1.kernel[...], ((), ("model",)))
    assert_lies(second.layers[0].kernel[...], (("model",), ()))
    layout_map["nothing"] = None
    kept: list[Any] = []
    with pytest.raises(flm.errors.ResolveError, match="unused: rule 4 'nothing'"):
        with flm.layout_map_scope(layout_map):
            kept += [Subclass(nnx.Rngs(0)), nnx.Linear(2, 2, rngs=nnx.Rngs(0))]
    assert isinstance(kept[0].d1.kernel.get_raw_value(), jax.ShapeDtypeStruct)


def test_unused_rules_are_told_once(mesh: flm.DeviceMesh) -> None:
    layout_map = flm.LayoutMap(mesh)
    layout_map["d3/kernel"] = (None, "model")
    with pytest.warns(flm.LayoutWarning, match="'d3/kernel' matches no leaf") as seen:
        with flm.layout_map_scope(layout_map):
            model = Subclass(nnx.Rngs(0))
    assert len(seen) == 1 and model is not None
    assert seen[0].filename == __file__


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_in_other_meshes_and_contexts(kind: str) -> None:
    grid = flm.DeviceMesh((2, 4), ("data", "model"), axis_types=kind)
    layout_map = rules(grid, **{"d1/kernel": (None, "model")})
    with jax.set_mesh(bare(grid)), flm.layout_map_scope(layout_map):
        model = Pair(Subclass(nnx.Rngs(0)), Subclass(nnx.Rngs(1)))
    assert_lies(model.first.d1.kernel[...], ((), ("model",)))
    assert model.first.d1.kernel[...].sharding.mesh == grid.jax_mesh
    assert_lies(model.gain[...], ((),))


def test_afterwards_it_is_a_model_like_any_other(mesh: flm.DeviceMesh) -> None:
    layout_map = rules(mesh, **{"d1/kernel": (None, "model")})
    with flm.layout_map_scope(layout_map):
        model = Subclass(nnx.Rngs(0))
    optimizer = flm.create_optimizer(model, optax.adam(0.1))

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    jitted = flm.jit(step, layout_map=layout_map, donate_argnames=("model",))
    losses = [float(jitted(model, optimizer, X)) for _ in range(3)]
    assert losses[2] < losses[0]
    assert_lies(model.d1.kernel[...], ((), ("model",)))
    model.d3 = nnx.Linear(8, 8, rngs=nnx.Rngs(0))  # outside: eager, as ever
    assert len(model.d3.kernel[...].sharding.device_set) == 1


# ---------------------------------------------------------------------------- nesting


def test_nested_blocks(mesh: flm.DeviceMesh) -> None:
    outer = rules(mesh, **{"kernel": ("data", None)})
    inner = rules(mesh, **{"kernel": (None, "model")})
    with flm.layout_map_scope(outer) as given:
        assert given is outer and current_rules() is outer.freeze()
        first = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        with flm.layout_map_scope(inner):
            assert current_rules() is inner.freeze()
            second = nnx.Linear(8, 8, rngs=nnx.Rngs(1))
        assert_lies(second.kernel[...], ((), ("model",)))
        assert current_rules() is outer.freeze()
        model = Pair(first, second)
    assert current_rules() is None
    assert_lies(model.first.kernel[...], (("data",), ()))
    assert_lies(model.second.kernel[...], ((), ("model",)))


def test_other_threads_are_not_touched(mesh: flm.DeviceMesh) -> None:
    found: list[Any] = []

    def work() -> None:
        found.append(Subclass(nnx.Rngs(0)))
        found.append(Lm().init(jax.random.key(0), X))

    with flm.layout_map_scope(rules(mesh)):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(found) == 2
    for leaf in [*jax.tree.leaves(nnx.state(found[0])), *jax.tree.leaves(found[1])]:
        assert len(leaf.sharding.device_set) == 1


def hooks() -> list[Any]:
    names = ("__post_init__", "init", "init_with_output", "lazy_init")
    return [type(nnx.Pytree).__call__, *(vars(linen.Module)[name] for name in names)]


def test_errors_leave_nothing_behind(mesh: flm.DeviceMesh) -> None:
    before = hooks()
    layout_map, model = rules(mesh), None
    with pytest.raises(ZeroDivisionError):
        with flm.layout_map_scope(layout_map):
            with pytest.raises(KeyError):
                with flm.layout_map_scope(layout_map):
                    raise KeyError
            assert hooks() != before
            model = Subclass(nnx.Rngs(0))
            raise ZeroDivisionError
    assert hooks() == before and current_rules() is None
    assert model is not None
    assert isinstance(model.d1.kernel.get_raw_value(), jax.ShapeDtypeStruct)
    plain = Subclass(nnx.Rngs(0))
    assert len(plain.d1.kernel[...].sharding.device_set) == 1


def test_what_does_not_fit_is_told_before_anything_is_made(
    mesh: flm.DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flax_layoutmap._birth import scope_birth as _scope_birth

    made: list[Any] = []
    plain = _scope_birth.arrays_of

    def arrays_of(traced: Any, shardings: Any, **names: Any) -> Any:
        made.extend(s for s in shardings if s is not None)
        return plain(traced, shardings, **names)

    monkeypatch.setattr(_scope_birth, "arrays_of", arrays_of)
    layout_map = rules(mesh, **{"d1/kernel": ("model",), "d2/bias": ("model", None)})
    model = None
    with pytest.raises(flm.errors.ResolveError) as caught:
        with flm.layout_map_scope(layout_map):
            Pair(Subclass(nnx.Rngs(0)), None).second = None
            model = Subclass(nnx.Rngs(0))
    assert "d1/kernel" in str(caught.value) and "d2/bias" in str(caught.value)
    assert not made and model is not None and current_rules() is None


def test_what_is_made_whole_is_named(
    mesh: flm.DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    init = nnx.initializers.orthogonal()
    with caplog.at_level(logging.INFO, "flax_layoutmap"):
        with flm.layout_map_scope(rules(mesh, kernel=("data", None))):
            model = nnx.List(
                [nnx.Linear(8, 8, kernel_init=init, rngs=nnx.Rngs(0)) for _ in "ab"]
            )
    told = [
        text for text in caplog.messages if text.startswith("initialized replicated")
    ]
    assert len(model) == 2 and len(told) == 2
    assert "'0/kernel'" in told[0] and "'1/kernel'" in told[1]


# ------------------------------------------------------------ what cannot be traced


class Reads(nnx.Module):
    runs = 0

    def __init__(self, rngs: nnx.Rngs) -> None:
        type(self).runs += 1
        self.inner = nnx.Linear(8, 8, rngs=rngs)
        total = float(self.inner.kernel[...].sum())
        self.scale = nnx.Param(jnp.full(8, total))


def test_a_constructor_that_reads_values(mesh: flm.DeviceMesh) -> None:
    rngs = nnx.Rngs(0)
    with pytest.warns(flm.LayoutWarning, match="constructor of Reads ran at once"):
        with flm.layout_map_scope(rules(mesh, **{"inner/kernel": (None, "model")})):
            model = Reads(rngs)
    other = nnx.Rngs(0)
    assert_same(model, Reads(other))
    assert_same(rngs, other)
    assert_lies(model.inner.kernel[...], ((), ("model",)))
    assert_lies(model.scale[...], ((),))


@nnx.split_rngs(splits=3)
@nnx.vmap
def stacked(rngs: nnx.Rngs) -> Any:
    return nnx.Linear(8, 8, rngs=rngs)


def test_modules_that_are_lost_among_others_of_their_class(
    mesh: flm.DeviceMesh,
) -> None:
    layout_map = rules(mesh, **{"kernel": (..., "model"), "bias": None})
    for make in (lambda: stacked(nnx.Rngs(1)), nnx.jit(lambda: linear(1))):
        with pytest.warns(flm.LayoutWarning, match="Linear was made inside of a tra"):
            with flm.layout_map_scope(layout_map):
                model = Subclass(nnx.Rngs(0))
                lost = make()
        assert len(lost.kernel[...].sharding.device_set) == 1
        assert_lies(model.d1.kernel[...], ((), ("model",)))


def test_modules_that_become_a_part_are_not_lost(mesh: flm.DeviceMesh) -> None:
    """Where others of their class are made too, in this block or in one inside."""
    layout_map = rules(mesh, **{"kernel": (..., "model"), "bias": None})
    with warnings.catch_warnings():
        warnings.simplefilter("error", flm.LayoutWarning)
        with flm.layout_map_scope(layout_map):
            model = Subclass(nnx.Rngs(0))
            model.head = nnx.jit(lambda: linear(1))()
            model.stack = stacked(nnx.Rngs(2))
            with flm.layout_map_scope(layout_map):
                inner = linear(3)
            model.inner = inner
    assert_lies(model.head.kernel[...], ((), ("model",)))
    assert_lies(model.stack.kernel[...], ((), (), ("model",)))
    with pytest.warns(flm.LayoutWarning, match="Linear was made inside of a tra"):
        with flm.layout_map_scope(layout_map):
            with flm.layout_map_scope(layout_map):
                inner = linear(3)
            model = nnx.List([inner, linear(4)])
            nnx.jit(lambda: linear(1))()


def linear(seed: int) -> Any:
    return nnx.Linear(8, 8, rngs=nnx.Rngs(seed))


def test_rngs_of_another_mesh(mesh: flm.DeviceMesh) -> None:
    """Of the same devices: made in its context, or moved there."""

    class Drops(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.d1 = nnx.Linear(8, 16, rngs=rngs)

    other = flm.DeviceMesh("x=8")
    grid: Any = other.jax_mesh
    with jax.set_mesh(grid):
        made = nnx.Rngs(0)
    moved = nnx.Rngs(0)
    flm.LayoutMap(other, strict=False).place(moved)
    plain = nnx.Rngs(0)
    expected = Drops(plain)
    for rngs in (made, moved):
        with flm.layout_map_scope(rules(mesh, **{"d1/kernel": ("data", "model")})):
            model = Drops(rngs)
        assert_same(model, expected)
        assert_lies(model.d1.kernel[...], (("data",), ("model",)))
        assert int(rngs.default.count[...]) == int(plain.default.count[...])
    with jax.set_mesh(grid):
        with flm.layout_map_scope(rules(mesh, **{"d1/kernel": ("data", "model")})):
            model = Drops(nnx.Rngs(0))
    assert_same(model, expected)
    assert_lies(model.d1.kernel[...], (("data",), ("model",)))


def test_create_in_the_block(mesh: flm.DeviceMesh) -> None:
    """It makes what it makes at once; nobody has lost anything."""
    layout_map = rules(mesh, **{"d1/kernel": (None, "model")})
    with warnings.catch_warnings():
        warnings.simplefilter("error", flm.LayoutWarning)
        with flm.layout_map_scope(layout_map):
            model = flm.create(lambda: Subclass(nnx.Rngs(0)), layout_map)
            assert_lies(model.d1.kernel[...], ((), ("model",)))


def test_a_value_of_the_block_as_an_argument(mesh: flm.DeviceMesh) -> None:
    class Copy(nnx.Module):
        def __init__(self, value: Any) -> None:
            self.value = nnx.Param(value)

    layout_map = rules(mesh, **{"^value": (None, "model"), "d1": None})
    with flm.layout_map_scope(layout_map):
        model = Subclass(nnx.Rngs(0))
        other = Copy(model.d1.kernel.get_raw_value())
    np.testing.assert_array_equal(other.value[...], model.d1.kernel[...])
    assert_lies(other.value[...], ((), ("model",)))
    assert_lies(model.d1.kernel[...], ((), ()))


def test_tied_parts_as_arguments(mesh: flm.DeviceMesh) -> None:
    with flm.layout_map_scope(rules(mesh, **{"first/again/kernel": (None, "model")})):
        part = Subclass(nnx.Rngs(0))
        part.again = part.d1
        model = Pair(part, part)
    assert model.first is model.second and part.again is part.d1
    assert_lies(part.d1.kernel[...], ((), ("model",)))


def value_of(model: Any) -> Any:
    return model.d1.kernel.get_value()


USES: dict[str, Any] = {
    "call": lambda model: model(X),
    "item": lambda model: model.d1.kernel[0],
    "whole": lambda model: model.d1.kernel[...],
    "add": lambda model: model.d1.kernel + 1,
    "matmul": lambda model: X @ model.d1.kernel.get_value(),
    "numpy": lambda model: np.asarray(model.d1.kernel.get_value()),
    "jax": lambda model: jnp.asarray(model.d1.kernel.get_value()),
    "mean": lambda model: model.d1.kernel.mean(),
    "float": lambda model: float(model.d1.kernel.get_value()),
    "write": lambda model: model.d1.bias.__setitem__(..., jnp.ones(16)),
    "map": lambda model: jax.tree.map(lambda a: a * 0, nnx.state(model)),
    "zeros_like": lambda model: jnp.zeros_like(value_of(model)),
    "np.zeros_like": lambda model: np.zeros_like(value_of(model)),
    "ufunc": lambda model: np.multiply(value_of(model), 2),
    "jit": lambda model: jax.jit(lambda a: a + 1)(value_of(model)),
    "grad": lambda model: jax.grad(lambda a: a.sum())(value_of(model)),
    "device_get": lambda model: jax.device_get(value_of(model)),
    "at": lambda model: value_of(model).at[0].set(1),
    "devices": lambda model: value_of(model).devices(),
    "equal": lambda model: value_of(model) == 1,
    "in": lambda model: 1 in value_of(model),
    "iterate": lambda model: list(value_of(model)),
    "if": lambda model: not value_of(model),
    "len": lambda model: len(value_of(model)),
    "round": lambda model: round(value_of(model)),
    "format": lambda model: f"{value_of(model):.3f}",
    "in place": lambda model: operator.iadd(value_of(model), 1),
    "write an item": lambda model: operator.setitem(value_of(model), 0, 1),
    "pickle": lambda model: pickle.dumps(value_of(model)),
    "optax": lambda model: optax.adam(0.1).init(nnx.state(model)),
    "copy": lambda model: copy.deepcopy(model),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_of_a_value_says_when_there_is_one(
    mesh: flm.DeviceMesh, use: str
) -> None:
    model: Any = None
    with pytest.raises(flm.errors.StructureError, match="exists only after the block"):
        with flm.layout_map_scope(rules(mesh)):
            model = Subclass(nnx.Rngs(0))
            USES[use](model)
    with pytest.raises(
        flm.errors.StructureError, match="the layout_map_scope block failed"
    ):
        USES[use](model)


def test_what_is_known_of_a_value(mesh: flm.DeviceMesh) -> None:
    with flm.layout_map_scope(rules(mesh)):
        value: Any = nnx.Linear(8, 4, rngs=nnx.Rngs(0)).kernel.get_value()
        assert (value.shape, value.ndim, value.size) == ((8, 4), 2, 32)
        assert not hasattr(value, "addressable_shards")
        assert not hasattr(value, "no_such_thing") and "(8, 4)" in repr(value)
        assert value == value and value is not None and value != "text"
        assert value in {value} and jnp.shape(value) == np.shape(value) == (8, 4)
        shape = jax.eval_shape(lambda a: a.T @ a, value)
        assert (shape.shape, shape.dtype) == ((4, 4), jnp.float32)


def test_every_operator_says_so_too(mesh: flm.DeviceMesh) -> None:
    binary = "add sub mul matmul truediv floordiv mod pow and_ or_ xor lshift rshift"
    calls: list[Any] = [divmod, lambda one, other: divmod(other, one)]
    for name in f"{binary} lt le gt ge eq ne".split():
        call = getattr(operator, name)
        calls += [call, lambda one, other, call=call: call(other, one)]
    for unary in (
        *(operator.neg, operator.pos, operator.abs, operator.inv, operator.index),
        *(int, complex, reversed, math.trunc, math.floor, math.ceil),
        lambda one: operator.delitem(one, 0),
    ):
        calls.append(lambda one, _, unary=unary: unary(one))
    with flm.layout_map_scope(rules(mesh)):
        value: Any = nnx.Linear(8, 4, rngs=nnx.Rngs(0)).kernel.get_value()
        for at, call in enumerate(calls):
            for other in (2, np.ones(4)):
                with pytest.raises(
                    flm.errors.StructureError, match="exists only after the block"
                ):
                    call(value, other)
                    pytest.fail(f"call {at} with {other!r}")


def test_a_variable_may_be_given_another_value(mesh: flm.DeviceMesh) -> None:
    with flm.layout_map_scope(rules(mesh, **{"d1/bias": ("model",)})):
        model = Subclass(nnx.Rngs(0))
        model.d1.bias.set_value(jnp.arange(16.0))
    np.testing.assert_array_equal(model.d1.bias[...], np.arange(16.0))
    assert_lies(model.d1.bias[...], (("model",),))


def test_copies_that_are_made_in_the_block(mesh: flm.DeviceMesh) -> None:
    """Those that are part of a model, and what shares its Variables, are filled."""
    with flm.layout_map_scope(rules(mesh, **{"d1/kernel": (None, "model")})):
        model = Subclass(nnx.Rngs(0))
        lost = nnx.clone(model)
        model.ema = nnx.clone(model.d1)
        parts = nnx.split(model)
        old, model.d2 = model.d2, nnx.Linear(16, 8, rngs=nnx.Rngs(1))
    np.testing.assert_array_equal(model.ema.kernel[...], model.d1.kernel[...])
    merged = nnx.merge(*parts)
    np.testing.assert_array_equal(merged.d1.kernel[...], model.d1.kernel[...])
    for part in (lost.d1, old):
        with pytest.raises(flm.errors.StructureError, match="copy .* after the block"):
            part(jnp.ones((4, part.in_features)))


def test_a_value_of_a_block_that_failed_in_another_one(mesh: flm.DeviceMesh) -> None:
    part, model = None, None
    with pytest.raises(KeyError), flm.layout_map_scope(rules(mesh)):
        part = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        raise KeyError
    with pytest.raises(
        flm.errors.StructureError, match="the layout_map_scope block failed"
    ):
        with flm.layout_map_scope(rules(mesh)):
            model = Pair(part, None)
    assert model is not None and model.first is part


# ------------------------------------------------------ attributes that are arrays


class Rope(nnx.Module):
    """A table that is no Variable."""

    def __init__(self, size: int) -> None:
        self.table = jnp.arange(size, dtype=jnp.float32)
        self.other: Any = nnx.data(jnp.ones((size, 8)))

    def __call__(self, x: Any) -> Any:
        return x * self.table


class WithTables(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.rope, self.mask = Rope(8), jnp.tril(jnp.ones((8, 8)))
        self.tables = nnx.List([jnp.ones(8)])

    def __call__(self, x: Any) -> Any:
        return self.rope(self.linear(x)) @ self.mask * self.tables[0]


@pytest.mark.parametrize("way", ["scope", "create"])
def test_arrays_as_attributes(mesh: flm.DeviceMesh, way: str) -> None:
    layout_map = rules(
        mesh,
        **{
            "^(rope/)?other": (None, "model"),
        },
    )
    layout_map["mask"] = ("data", None)
    if way == "scope":
        with flm.layout_map_scope(layout_map):
            alone, model = Rope(4), WithTables(nnx.Rngs(0))
    else:
        alone = flm.create(lambda: Rope(4), layout_map)
        model = flm.create(lambda: WithTables(nnx.Rngs(0)), layout_map)
    plain = WithTables(nnx.Rngs(0))
    assert_same(alone, Rope(4))
    assert_same(model, plain)
    np.testing.assert_allclose(model(X), plain(X), rtol=1e-5)
    np.testing.assert_allclose(jax.jit(model)(X), plain(X), rtol=1e-5)
    for own in (alone, model.rope):
        assert_lies(own.table, ((),))
        assert_lies(own.other, ((), ("model",)))
    assert_lies(model.mask, (("data",), ()))
    assert_lies(model.tables[0], ((),))


REGISTRY: list[Any] = []


class Holds(nnx.Module):
    """Keeps itself and its parts: in functions, in a closure, in a registry."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.parts = nnx.data({"first": nnx.Linear(8, 8, rngs=rngs)})
        self.method: Any = self.inner
        self.closure: Any = lambda x: self.linear(x)
        self.partial: Any = (functools.partial(nnx.Linear.__call__, self.linear),)
        REGISTRY.extend([self, self.linear, self.parts["first"]])

    def inner(self, x: Any) -> Any:
        return self.linear(x)


@pytest.mark.parametrize("way", ["scope", "create"])
def test_what_an_init_keeps_of_its_module(mesh: flm.DeviceMesh, way: str) -> None:
    """It is the module itself, not a copy of it that lives in a trace."""
    layout_map = rules(mesh, **{"linear/kernel": (None, "model")})
    REGISTRY.clear()
    model: Any
    if way == "create":
        model = flm.create(lambda: Holds(nnx.Rngs(0)), layout_map)
    else:
        with flm.layout_map_scope(layout_map):
            model = Holds(nnx.Rngs(0))
    assert_lies(model.linear.kernel[...], ((), ("model",)))
    kept = REGISTRY.copy()
    REGISTRY.clear()
    assert len(kept) == 3  # the constructor ran once
    assert kept[0] is model and kept[1] is model.linear
    assert kept[2] is model.parts["first"]
    for call in (model.method, model.closure, model.partial[0]):
        np.testing.assert_array_equal(call(X), model.linear(X))
    model.linear.kernel[...] = jnp.zeros((8, 8))  # it belongs to no trace
    model.more = nnx.Linear(8, 8, rngs=nnx.Rngs(1))
    np.testing.assert_array_equal(model.closure(X), jnp.zeros((4, 8)))
    assert jax.tree.structure(nnx.state(nnx.clone(model))) is not None


class Table:
    """A table, in a class of no library."""

    def __init__(self, size: int) -> None:
        self.sin = jnp.sin(jnp.arange(size) * 0.1)


def kept_in(kind: str, value: Any) -> Any:
    if kind == "object":
        return Table(8)
    if kind == "keyword":
        return lambda *, table=value: table[0]
    return lambda: value[0]


@pytest.mark.parametrize("kind", ["variable", "array", "keyword", "object"])
def test_what_holds_a_value(mesh: flm.DeviceMesh, kind: str) -> None:
    class Closes(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(8, 8, rngs=rngs)
            kernel = self.linear.kernel
            self.kept: Any = kept_in(
                kind, kernel if kind == "variable" else kernel[...]
            )

    def make() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error", flm.LayoutWarning)
            return flm.create(lambda: Closes(nnx.Rngs(0)), layout_map)

    layout_map = rules(mesh, **{"linear/kernel": (None, "model")})
    if kind == "variable":
        model = make()
        np.testing.assert_array_equal(model.kept(), model.linear.kernel[0])
        return
    what = "static Table with an array" if kind == "object" else "function that holds a"
    with pytest.raises(flm.errors.StructureError, match=rf"Closes\.kept is a {what}"):
        make()
    with pytest.warns(flm.LayoutWarning, match="constructor of Closes ran at once"):
        with flm.layout_map_scope(layout_map):
            model = Closes(nnx.Rngs(0))
    if kind == "object":
        np.testing.assert_array_equal(model.kept.sin, Table(8).sin)
    else:
        np.testing.assert_array_equal(model.kept(), model.linear.kernel[0])
    assert_lies(model.linear.kernel[...], ((), ("model",)))


CACHE: list[Any] = []


def cached() -> Any:
    if not CACHE:
        CACHE.append(jnp.sin(jnp.arange(8.0)))
    return CACHE[0]


class Cached(nnx.Module):
    def __init__(self, kind: str) -> None:
        self.d1 = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.table = nnx.Variable(cached() * 2 if kind == "used" else cached())


@pytest.mark.parametrize("kind", ["kept", "used"])
def test_a_cache_that_a_trace_has_filled(mesh: flm.DeviceMesh, kind: str) -> None:
    """In the same block, in a later one, and in `create`: never a tracer."""
    layout_map = rules(mesh, **{"d1/kernel": (None, "model")})
    CACHE.clear()
    text = r"float32\[8\] that an earlier trace .* \(made in cached, .*: it has no numb"
    with pytest.raises(flm.errors.StructureError, match=text):
        with flm.layout_map_scope(layout_map):
            Cached(kind)
            Cached(kind)
    with pytest.raises(flm.errors.StructureError, match=text):
        with flm.layout_map_scope(layout_map):
            Cached(kind)
    with pytest.raises(flm.errors.StructureError, match=text):
        flm.create(lambda: Cached(kind), layout_map)
    CACHE.clear()
    table = cached()  # as the message says
    with flm.layout_map_scope(layout_map):
        models = [Cached(kind), Cached(kind)]
    for model in models:
        assert_lies(model.d1.kernel[...], ((), ("model",)))
        np.testing.assert_array_equal(model.table[...], table * (1 + (kind == "used")))


@pytest.mark.parametrize("use", [lambda x: x, lambda x: x * 2], ids=["kept", "used"])
def test_a_cache_that_the_trace_has_filled_before_it_failed(
    mesh: flm.DeviceMesh, use: Any
) -> None:
    class Reads(nnx.Module):
        def __init__(self) -> None:
            self.table = nnx.Variable(use(cached()))
            self.d1 = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
            assert float(self.d1.kernel[0, 0]) < 9

    CACHE.clear()
    layout_map = rules(mesh, **{"d1/kernel": (None, "model")})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", flm.LayoutWarning)
        with pytest.raises(
            flm.errors.StructureError, match="that an earlier trace .* left"
        ):
            with flm.layout_map_scope(layout_map):
                model = Reads()
        CACHE.clear()
        table = cached()
        with flm.layout_map_scope(layout_map):
            model = Reads()
    np.testing.assert_array_equal(model.table[...], use(table))
    assert_lies(model.d1.kernel[...], ((), ("model",)))


def test_what_was_there_before_is_not_adopted(mesh: flm.DeviceMesh) -> None:
    """`create` of a function that gives what exists: a copy, as ever."""
    old = Subclass(nnx.Rngs(0))
    made = flm.create(lambda: old, rules(mesh, **{"d1/kernel": (None, "model")}))
    assert made is not old and made.d1 is not old.d1
    assert len(old.d1.kernel[...].sharding.device_set) == 1
    assert_lies(made.d1.kernel[...], ((), ("model",)))


def test_a_value_of_the_block_as_an_attribute(mesh: flm.DeviceMesh) -> None:
    def build() -> None:
        with flm.layout_map_scope(rules(mesh, **{"^copy": ("model", None)})):
            model.append(nnx.Dict(part=nnx.Linear(8, 8, rngs=nnx.Rngs(0))))
            model[0].copy = model[0]["part"].kernel.get_raw_value()

    model: list[Any] = []
    build()
    np.testing.assert_array_equal(model[0].copy, model[0]["part"].kernel[...])
    assert_lies(model[0].copy, (("model",), ()))


# ------------------------------------------------------------------- blocks in blocks


def test_an_outer_block_leaves_alone_what_is_laid_out(mesh: flm.DeviceMesh) -> None:
    """Neither its rules nor its axes need to fit."""
    init = nnx.with_metadata(nnx.initializers.ones, out_sharding=(None, None))
    outer = rules(mesh, **{"kernel": ("model", None)})
    inner = rules(flm.DeviceMesh("rows=8"), **{"kernel": (None, "rows")})
    with flm.layout_map_scope(outer):
        with flm.layout_map_scope(inner):
            part = nnx.Linear(3, 8, kernel_init=init, rngs=nnx.Rngs(0))
        before: Any = part.kernel[...]
        model = Pair(part, nnx.Linear(8, 8, rngs=nnx.Rngs(1)))
    assert model.first.kernel[...] is before
    assert part.kernel.get_metadata()["out_sharding"] == (None, "rows")
    assert part.bias is not None
    lies_on(part.bias[...], ((),), flm.DeviceMesh("rows=8"))
    assert_lies(model.second.kernel[...], (("model",), ()))
    assert_lies(model.gain[...], ((),))


def test_an_inner_block_leaves_alone_what_is_made_later(mesh: flm.DeviceMesh) -> None:
    outer = rules(mesh, **{"kernel": ("data", None)})
    with flm.layout_map_scope(outer):
        part = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        with flm.layout_map_scope(rules(mesh, **{"gain": ("model",)})):
            model = Pair(part, None)
        assert_lies(model.gain[...], (("model",),))
    assert_lies(model.first.kernel[...], (("data",), ()))
    assert_lies(model.gain[...], (("model",),))


def test_one_scope_is_entered_twice(mesh: flm.DeviceMesh) -> None:
    scope = rules(mesh, **{"kernel": (None, "model")}).scope()
    for _ in range(2):
        with scope:
            with scope:
                inner = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
            assert_lies(inner.kernel[...], ((), ("model",)))
            model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        assert_lies(model.kernel[...], ((), ("model",)))


def test_a_task_that_outlives_its_block(mesh: flm.DeviceMesh) -> None:
    async def later(begin: Any) -> Any:
        await begin.wait()
        assert current_rules() is not None  # that much is in its context
        return nnx.Linear(8, 8, rngs=nnx.Rngs(0)), Lm().init(jax.random.key(0), X)

    async def main() -> Any:
        begin = asyncio.Event()
        with flm.layout_map_scope(rules(mesh)):
            task = asyncio.create_task(later(begin))
            await asyncio.sleep(0)
        with flm.layout_map_scope(rules(mesh)):
            begin.set()
            return await task

    module, made = asyncio.run(main())
    for leaf in [module.kernel[...], *jax.tree.leaves(made)]:
        assert len(leaf.sharding.device_set) == 1


@pytest.mark.parametrize("how", ["threads", "tasks"])
def test_blocks_at_the_same_time(mesh: flm.DeviceMesh, how: str) -> None:
    """Each makes its own models by its own rules; who ends first ends nothing else."""
    layouts: dict[str, Any] = {
        "first": ("model", None),
        "second": (None, "data"),
        "third": ("data", "model"),
    }
    begun, ended = [], []
    before = hooks()

    def check(name: str, model: Any) -> None:
        dims = tuple(() if axis is None else (axis,) for axis in layouts[name])
        assert_lies(model.layers[0].kernel[...], dims)

    def build(name: str) -> Any:
        return nnx.Linear(8, 8, rngs=nnx.Rngs(len(name)))

    def layout_map(name: str) -> flm.LayoutMap:
        return rules(mesh, **{"layers/0/kernel": layouts[name]})

    async def task(name: str) -> None:
        with flm.layout_map_scope(layout_map(name)):
            part = build(name)
            begun.append(name)
            while len(begun) < 3:
                await asyncio.sleep(0)
            assert hooks() != before
            model = nnx.Sequential(part)
            await asyncio.sleep(0)
        check(name, model)
        ended.append(name)

    async def tasks() -> None:
        await asyncio.gather(*map(task, layouts))
        outside = build("outside")
        assert len(outside.kernel[...].sharding.device_set) == 1

    def work(name: str) -> None:
        with flm.layout_map_scope(layout_map(name)):
            part = build(name)
            barrier.wait(60)
            model = nnx.Sequential(part)
            if name == "third":
                barrier_of_two.wait(60)
        check(name, model)
        ended.append(name)
        if name != "third":
            again = build(name)  # out of the block, while another one is open
            assert len(again.kernel[...].sharding.device_set) == 1
            barrier_of_two.wait(60)

    if how == "tasks":
        asyncio.run(tasks())
    else:
        barrier, barrier_of_two = threading.Barrier(3), threading.Barrier(3)
        threads = [threading.Thread(target=work, args=(name,)) for name in layouts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(ended) == sorted(layouts) and hooks() == before


def test_a_thread_that_copies_the_context(mesh: flm.DeviceMesh) -> None:
    """`asyncio.to_thread` takes the block along; a thread alone does not."""

    async def main() -> Any:
        with flm.layout_map_scope(rules(mesh, **{"d1/kernel": (None, "model")})):
            model = await asyncio.to_thread(lambda: Subclass(nnx.Rngs(0)))
        return model

    assert_lies(asyncio.run(main()).d1.kernel[...], ((), ("model",)))


def test_arguments_that_jax_cannot_flatten(mesh: flm.DeviceMesh) -> None:
    class Config(nnx.Module):
        def __init__(self, config: Any, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(config["size"], 8, rngs=rngs)

    config = {"size": 8, 1: "one"}
    layout_map = rules(mesh, **{"linear/kernel": (None, "model")})
    with warnings.catch_warnings():
        warnings.simplefilter("error", flm.LayoutWarning)
        with flm.layout_map_scope(layout_map):
            model = Config(config, nnx.Rngs(0))
        made = flm.create(Config, layout_map, config, nnx.Rngs(0))
    for own in (model, made):
        assert_lies(own.linear.kernel[...], ((), ("model",)))


def test_parts_in_a_dict_that_jax_cannot_flatten(mesh: flm.DeviceMesh) -> None:
    class Holder(nnx.Module):
        def __init__(self, parts: Any) -> None:
            self.part = parts["part"]

    with flm.layout_map_scope(rules(mesh, **{"part/kernel": (None, "model")})):
        part = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        model = Holder({"part": part, 1: None})
    assert model.part is part
    assert_lies(part.kernel[...], ((), ("model",)))


def test_a_bridge_module_is_made_as_ever(mesh: flm.DeviceMesh) -> None:
    class Bridged(nnx.bridge.Module):
        @nnx.bridge.compact
        def __call__(self, x: Any) -> Any:
            return x @ self.param("kernel", linen.initializers.ones, (8, 4))

    layout_map = rules(mesh, **{"kernel": (None, "model")})
    with flm.layout_map_scope(layout_map):
        model = Bridged()
        variables = model.init(jax.random.key(0), X)
        made = flm.create(model.init, layout_map, jax.random.key(0), X)
    assert variables["params"]["kernel"].shape == (8, 4)
    assert_lies(made["params"]["kernel"], ((), ("model",)))


def test_shapes_in_the_block(mesh: flm.DeviceMesh) -> None:
    with pytest.warns(flm.LayoutWarning, match=r"unless it is abstract \(nnx\.eval_sh"):
        with flm.layout_map_scope(rules(mesh)):
            shapes = nnx.eval_shape(lambda: Subclass(nnx.Rngs(0)))
    assert shapes.d1.kernel.shape == (8, 16)


def test_an_optimizer_of_another_model(mesh: flm.DeviceMesh) -> None:
    old = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    with flm.layout_map_scope(rules(mesh)):
        optimizer = nnx.Optimizer(old, optax.sgd(0.1), wrt=nnx.Param)
    assert isinstance(optimizer, nnx.Optimizer)


def test_a_scope_needs_rules_and_a_mesh() -> None:
    with pytest.raises(
        flm.errors.MeshError, match="layout_map_scope needs a mesh of devices"
    ):
        with flm.layout_map_scope(flm.LayoutMap()):
            pass
    with pytest.raises(flm.errors.RuleError, match="layout_map_scope"):
        with flm.layout_map_scope({"kernel": (None, "model")}):
            pass


def test_without_the_metaclass(
    mesh: flm.DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flax_layoutmap._birth import layout_scope as _layout_scope

    monkeypatch.setattr(_layout_scope, "metaclass_of_objects", lambda: None)
    layout_map = rules(mesh, **{"d1/kernel": (None, "model")})
    with pytest.raises(flm.errors.StructureError, match=r"flm\.create\(lambda: Model"):
        with flm.layout_map_scope(layout_map):
            pass
    model = flm.create(lambda: Subclass(nnx.Rngs(0)), layout_map)
    assert_lies(model.d1.kernel[...], ((), ("model",)))


def test_names_of_the_scope(mesh: flm.DeviceMesh) -> None:
    layout_map = rules(mesh)
    layout_map.names["hidden"] = ("data", None)
    with flm.layout_map_scope(layout_map):
        x = flm.distribute_tensor(np.ones((4, 2)), "hidden")
    assert_lies(x, (("data",), ()))


# ------------------------------------------------- what is kept in unusual places


def test_a_module_from_around_the_constructor_stays_tied(mesh: flm.DeviceMesh) -> None:
    """Not passed as an argument: found where the class was written."""
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map["embedding"] = ("data", "model")
    before = nnx.Param(jnp.ones((8, 8)))

    class Model(nnx.Module):
        def __init__(self, embed: nnx.Embed, head: nnx.Module) -> None:
            self.embed, self.head = embed, head

    with pytest.warns(flm.LayoutWarning, match="keeps a Param that was there before"):
        with flm.layout_map_scope(layout_map):
            embed = nnx.Embed(8, 8, rngs=nnx.Rngs(0))

            class Head(nnx.Module):
                def __init__(self) -> None:
                    self.embed = embed
                    self.other = before

            model = Model(embed, Head())
    head: Any = model.head
    assert head.embed is model.embed is embed and head.other is before
    lies_on(embed.embedding.get_value(), (("data",), ("model",)), mesh)
    assert len(jax.tree.leaves(nnx.state(model))) == 2


@pytest.mark.parametrize("how", ["create", "scope"])
def test_a_variable_that_a_plain_object_keeps(mesh: flm.DeviceMesh, how: str) -> None:
    kept: list[Any] = []

    class Holder:
        kernel: Any

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(8, 16, rngs=rngs)
            self.holder = Holder()
            self.holder.kernel = self.linear.kernel
            kept.append(self.linear.kernel)

    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map["kernel"] = ("data", "model")
    if how == "create":
        model = flm.create(lambda: Model(nnx.Rngs(0)), layout_map)
    else:
        with flm.layout_map_scope(layout_map):
            model = Model(nnx.Rngs(0))
    assert model.holder.kernel is model.linear.kernel is kept[-1]
    lies_on(kept[-1].get_value(), (("data",), ("model",)), mesh)
    kept[-1].set_value(kept[-1].get_value() * 0)  # it belongs to no trace any more
    assert not np.asarray(model.linear.kernel.get_value()).any()
