"""Activation rules: layouts of layer outputs by the paths of their modules."""

import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from shards import Dims, assert_lies, grid

import flax_layoutmap as flm

X = np.arange(8.0 * 4 * 16, dtype=np.float32).reshape(8, 4, 16) / 100
LAYOUT = ("data", None, "model")
HIDDEN: Dims = (("data",), (), ("model",))
OTHER: Dims = (("model",), (), ())


@pytest.fixture
def layout_map() -> flm.LayoutMap:
    return rules()


def rules(**options: Any) -> flm.LayoutMap:
    """Parameters are all replicated."""
    layout_map = flm.LayoutMap(grid(), **{"strict": None, **options})
    layout_map["kernel|bias"] = None
    return layout_map


def forward(model: Any, x: Any) -> Any:
    return model(x)


def layers(count: int = 1, width: int = 16) -> Any:
    linear = [nnx.Linear(16, width, rngs=nnx.Rngs(at)) for at in range(count)]
    return nnx.Sequential(*linear)


def assert_clean(model: Any) -> None:
    """No note is left on a model, and nothing in the classes."""
    assert "flax_layoutmap" not in str(nnx.graphdef(model))
    assert nnx.Linear.__call__.__module__.startswith("flax")


# ------------------------------------------------------------------- in a scope


WAYS: dict[str, Any] = {
    "jax.jit of a module": lambda scoped, model: jax.jit(scoped)(model, X),
    "nnx.jit": lambda scoped, model: nnx.jit(scoped)(model, X),
    "merged in jax.jit": lambda scoped, model: jax.jit(
        lambda state: scoped(nnx.merge(nnx.graphdef(model), state), X)
    )(nnx.state(model)),
    "nnx.jit inside": lambda scoped, model: scoped(model, X, nnx.jit(forward)),
    "eager": lambda scoped, model: scoped(model, X),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_given", [True, False])
def test_in_a_scope(way: str, is_given: bool, layout_map: flm.LayoutMap) -> None:
    layout_map.activations["layers/1"] = LAYOUT
    model = layout_map.place(layers(2))

    def scoped(model: Any, x: Any, call: Any = forward) -> Any:
        with flm.activation_scope(layout_map, *([model] if is_given else [])):
            return call(model, x)

    assert_lies(WAYS[way](scoped, model), HIDDEN, grid())
    assert_clean(model)


def test_linen_and_names_in_a_scope(layout_map: flm.LayoutMap) -> None:
    layout_map.activations["^$"] = layout_map.names["hidden"] = LAYOUT
    dense = linen.Dense(16)
    variables = layout_map.place(dense.init(jax.random.key(0), X))
    with flm.activation_scope(layout_map):
        y: Any = jax.jit(dense.apply)(variables, X)
        assert_lies(y, HIDDEN, grid())
        assert_lies(flm.distribute_tensor(X, "hidden"), HIDDEN, grid())


def test_functions_are_traced_again_for_other_rules(layout_map: flm.LayoutMap) -> None:
    """The inner scope counts; what jit keeps does not depend on a scope."""
    layout_map.activations["layers/0"] = LAYOUT
    other = rules()
    other.activations["layers/0"] = ("model", None, None)
    model, inner = layout_map.place(layers()), nnx.jit(forward)
    plain = flm.jit(forward, layout_map=rules())
    with flm.activation_scope(layout_map, model):
        assert_lies(inner(model, X), HIDDEN, grid())
        with flm.activation_scope(other, model):
            assert_lies(inner(model, X), OTHER, grid())
        assert_lies(inner(model, X), HIDDEN, grid())
        assert not any(plain(model, X).sharding.spec[1:])
    assert not any(inner(model, X).sharding.spec)
    layout_map.activations.replace("layers/0", ("model", None, None))
    with flm.activation_scope(layout_map, model):
        assert_lies(inner(model, X), OTHER, grid())
    assert_clean(model)


def test_a_scope_wants_rules_a_mesh_and_modules(layout_map: flm.LayoutMap) -> None:
    with pytest.raises(flm.errors.MeshError, match="needs rules with a mesh"):
        flm.activation_scope(flm.LayoutMap())
    with pytest.raises(flm.errors.RuleError, match="takes NNX modules, got a dict"):
        flm.activation_scope(layout_map, {})
    with pytest.raises(flm.errors.RuleError, match="activation_scope"):
        flm.activation_scope([("a", None)])


# ------------------------------------------------------------- outputs and layouts


class Attention(nnx.Module):
    """Several outputs: an array, a dict, a loss, a text, nothing."""

    def __init__(self) -> None:
        self.proj = nnx.Linear(16, 16, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        y = self.proj(x)
        return y, {"w": jnp.ones((8, 4)), "loss": y.mean()}, "text", None


def attend(model: Any, x: Any) -> Any:
    y, weights, text, nothing = model["attn"](x)
    assert text == "text" and nothing is None
    return y, weights


def test_outputs_one_by_one(layout_map: flm.LayoutMap) -> None:
    layout_map.activations["attn"] = LAYOUT
    model = {"attn": Attention()}
    with pytest.raises(flm.LayoutError) as caught:
        flm.jit(attend, layout_map=layout_map)(model, X)
    assert str(caught.value) == (
        "activation rule 1 'attn' for the output of 'attn' (for this one alone: "
        "layout_map.activations['attn/1/w']) of an array (8, 4): the layout ('data', "
        "None, 'model') has 3 dims, the array has 2"
    )
    layout_map.activations["attn/1/w"] = ("model", None)
    y, weights = flm.jit(attend, layout_map=layout_map)(model, X)
    assert_lies(y, HIDDEN, grid())
    assert_lies(weights["w"], OTHER[:2], grid())
    skipping = rules()
    skipping.activations.add(flm.Rule("attn", LAYOUT, rank="skip"))
    assert_lies(flm.jit(attend, layout_map=skipping)(model, X)[0], HIDDEN, grid())


def test_what_does_not_divide(layout_map: flm.LayoutMap) -> None:
    model = layers(width=6)
    layout_map.activations["layers/0"] = LAYOUT
    with pytest.raises(flm.LayoutError, match="rule 1 'layers/0' for the output"):
        flm.jit(forward, layout_map=layout_map)(model, X)
    assert_clean(model)
    other = rules(indivisible="replicate")
    other.activations["layers/0"] = LAYOUT
    y = flm.jit(forward, layout_map=other)(model, X)
    assert_lies(y, (("data",), (), ()), grid())


# ---------------------------------------------------------------- which rule it is


PATHS = ("mlp", "a/mlp", "mlp2", "b/c", "a/b/c", "xb/c", "output", "mlp/output", "b")
PATTERNS = ("mlp", "b/.", "^b$", "(?<=a/)b/c", "output", "mlp|b", "a/.*", "lp", "b/c")


class Leaves(nnx.Module):
    """Modules in modules, one for each of some paths."""

    def __init__(self, *paths: str) -> None:
        parts = [path.partition("/") for path in paths]
        for name in dict.fromkeys(name for name, _, _ in parts):
            inner = [rest for own, _, rest in parts if own == name and rest]
            setattr(self, name, Leaves(*inner))

    def __call__(self, x: Any) -> Any:
        return x + 0.0


def axis_at(layout_map: flm.LayoutMap, path: str) -> Any:
    """The axis of the output, of one dim, of the module at a path."""
    root = module = Leaves(*PATHS)
    for name in path.split("/"):
        module = getattr(module, name)
    x = flm.distribute_tensor(np.zeros(8), flm.TensorLayout((None,), grid()))
    with flm.activation_scope(layout_map, root):
        return (*module(x).sharding.spec, None)[0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("match", ["search", "match", "fullmatch"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_rule_must_reach_the_end_of_the_path(pattern: str, match: Any) -> None:
    """As Python matches the pattern with the end of the path after it."""
    for path in PATHS:
        layout_map = flm.LayoutMap(grid(), match=match, strict=False)
        layout_map.activations[pattern] = ("data",)
        does = getattr(re, match)(rf"(?:{pattern})\Z", path) or path == pattern
        assert axis_at(layout_map, path) == ("data" if does else None), path


def test_overlap() -> None:
    def chosen(path: str, **options: Any) -> Any:
        layout_map = flm.LayoutMap(grid(), strict=False, **options)
        layout_map.activations["mlp"] = ("data",)
        layout_map.activations["a/ml."] = ("model",)
        return axis_at(layout_map, path)

    assert chosen("mlp") == "data"  # an exact key
    assert chosen("a/mlp", overlap="first") == "data"
    assert chosen("a/mlp", overlap="last") == "model"
    with pytest.raises(
        flm.errors.RuleError, match=r"of 'a/mlp': activation rule 1 'mlp' → "
    ):
        chosen("a/mlp")


class Named(nnx.Module):
    """A module that is itself called output."""

    def __init__(self) -> None:
        self.output = nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.output(x) + 0.0


class LinenNamed(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dense(16, use_bias=False, name="output")(x)


def test_a_rule_for_parameters_never_hits_outputs() -> None:
    """`output` is for `output/kernel` here; no output has its rank."""
    layout_map = flm.LayoutMap(grid(), strict=False)
    layout_map["^output|/output"] = (None, "model")
    linen_model = LinenNamed()
    variables = linen_model.init(jax.random.key(0), X[..., :16])
    with flm.activation_scope(layout_map):
        outputs: list[Any] = [Named()(X), linen_model.apply(variables, X)]
    outputs += [flm.jit(forward, layout_map=layout_map)(Named(), X)]
    assert [y.shape for y in outputs] == [X.shape] * 3
    layout_map.activations["output"] = LAYOUT
    step = flm.jit(lambda model, x: model.output(x), layout_map=layout_map)
    assert_lies(step(Named(), X), HIDDEN, grid())


def test_keras_spelling(layout_map: flm.LayoutMap) -> None:
    """A key of the map itself that ends in /output, where no parameter has it."""
    layout_map["layers[/_]1/output"] = LAYOUT
    model: Any = linen.Sequential([linen.Dense(16), linen.Dense(16)])
    variables = jax.jit(model.init)(jax.random.key(0), X)
    with warnings.catch_warnings():
        warnings.simplefilter("error", flm.LayoutWarning)
        y = flm.jit(forward, layout_map=layout_map)(layers(2), X)
        z = flm.jit(model.apply, layout_map=layout_map)(variables, X)
    assert_lies(y, HIDDEN, grid())
    assert_lies(z, HIDDEN, grid())


# ------------------------------------------------------------- rules without a use


def test_rules_that_never_fire() -> None:
    def run(**options: Any) -> None:
        layout_map = rules(**options)
        layout_map.activations["layers/0"] = LAYOUT
        layout_map.activations["layer/1"] = LAYOUT
        step = flm.jit(forward, layout_map=layout_map)
        for rows in (8, 4):
            step(layers(), X[:rows])

    with pytest.warns(flm.LayoutWarning, match="'layer/1'; did you mean") as seen:
        run()
    assert len(seen) == 1
    with pytest.raises(flm.errors.RuleError, match="strict: activation rules that mat"):
        run(strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", flm.LayoutWarning)
        run(strict=False)


def test_a_rule_may_be_for_what_another_function_calls() -> None:
    layout_map = rules(strict=True)
    layout_map.activations["layers/0"] = layout_map.activations["layers/1"] = LAYOUT
    step = flm.jit(lambda model, x: model.layers[0](x), layout_map=layout_map)
    assert_lies(step(layers(2), X), HIDDEN, grid())


# --------------------------------------------------------- what a note may not change


class Parent(nnx.Linear):
    """`super().__call__` is not the end of the layer."""

    def __call__(self, x: Any) -> Any:  # type: ignore[override]
        return super().__call__(x).reshape(8, -1)


def test_the_outermost_call_of_a_layer_counts(layout_map: flm.LayoutMap) -> None:
    layout_map.activations["^$"] = ("data", "model")
    y = flm.jit(forward, layout_map=layout_map)(Parent(16, 16, rngs=nnx.Rngs(0)), X)
    assert_lies(y, (("data",), ("model",)), grid())


def test_a_function_may_change_the_model(layout_map: flm.LayoutMap) -> None:
    layout_map.activations["layers/0"] = LAYOUT

    def grow(models: Any, x: Any) -> Any:
        results = [model(x) for model in models.values()]  # each with its own paths
        for name, child in nnx.Dict(a=models["a"]).items():  # without the note
            assert name == "a" and child is models["a"]
        models["a"].layers.append(nnx.Linear(16, 16, rngs=nnx.Rngs(1)))
        return results, nnx.clone(models["b"])

    models = {"a": layers(), "b": layers()}
    results, copy = flm.jit(grow, layout_map=layout_map)(models, X)
    for y in results:
        assert_lies(y, HIDDEN, grid())
    assert len(models["a"].layers) == 2
    assert_clean(models["a"])
    assert nnx.graphdef(copy) == nnx.graphdef(models["b"])
