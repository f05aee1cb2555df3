"""Activation rules: layouts of layer outputs by the paths of their modules."""

import gc
import re
import warnings
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from shards import Dims, bare
from shards import assert_lies as lies_on

import flax_layoutmap as flm
from flax_layoutmap._step import activations as _activations

X = jnp.arange(8.0 * 4 * 16).reshape(8, 4, 16) / 100
HIDDEN: Dims = (("data",), (), ("model",))


@pytest.fixture
def layout_map(mesh: flm.DeviceMesh) -> flm.LayoutMap:
    return flm.LayoutMap(mesh, strict=None, unmatched="replicate")


def quiet(layout_map: flm.LayoutMap) -> flm.LayoutMap:
    """Parameters are all replicated, on purpose."""
    layout_map["kernel|bias|scale"] = None
    return layout_map


def assert_lies(array: Any, dims: Dims) -> None:
    lies_on(array, dims, flm.DeviceMesh((2, 4), ("data", "model")))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        hidden = self.up(x)
        jax.debug.inspect_array_sharding(hidden, callback=SEEN.append)
        return x + self.down(jax.nn.relu(hidden))


class Model(nnx.Module):
    """Blocks in a list, stacked, or under remat."""

    def __init__(self, rngs: nnx.Rngs, kind: str = "list") -> None:
        self.inp = nnx.Linear(16, 16, rngs=rngs)
        self.kind = kind
        if kind == "scan":
            self.layers: Any = nnx.split_rngs(splits=2)(nnx.vmap(Block))(rngs)
        else:
            self.layers = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, x: Any) -> Any:
        x = self.inp(x)
        if self.kind == "scan":
            return jax.lax.scan(lambda c, layer: (layer(c), None), x, self.layers)[0]
        for layer in self.layers:
            if self.kind == "remat":
                x = nnx.remat(lambda layer, x: layer(x))(layer, x)
            else:
                x = layer(x)
        return x


SEEN: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    SEEN.clear()


def assert_hidden(dims: Dims, mesh: flm.DeviceMesh) -> None:
    """What the compiler says of every hidden activation."""
    jax.effects_barrier()
    spec = [axes[0] if axes else None for axes in dims]
    wanted = jax.sharding.NamedSharding(bare(mesh), jax.P(*spec))
    assert SEEN
    for sharding in SEEN:
        assert sharding.is_equivalent_to(wanted, len(dims)), sharding


def forward(model: Any, x: Any) -> Any:
    return model(x)


def loss(model: Any, x: Any) -> Any:
    return (model(x) ** 2).mean()


def grads(model: Any, x: Any) -> Any:
    return nnx.to_pure_dict(nnx.grad(loss)(model, x))


@pytest.mark.parametrize("kind", ["list", "scan", "remat"])
@pytest.mark.parametrize("fun", [forward, grads])
def test_hidden_layers(
    kind: str, fun: Any, mesh: flm.DeviceMesh, layout_map: flm.LayoutMap
) -> None:
    layout_map.activations[r"layers(/\d+)?/up"] = ("data", None, "model")
    model = Model(nnx.Rngs(0), kind)
    plain = jax.tree.map(np.asarray, fun(Model(nnx.Rngs(0), kind), X))
    SEEN.clear()
    result = flm.jit(fun, layout_map=quiet(layout_map))(model, X)
    assert_hidden(HIDDEN, mesh)
    for one, other in zip(jax.tree.leaves(result), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-5)
    assert "flax_layoutmap" not in str(nnx.graphdef(model))


def test_without_the_rule_it_lies_otherwise(
    mesh: flm.DeviceMesh, layout_map: flm.LayoutMap
) -> None:
    flm.jit(forward, layout_map=quiet(layout_map))(Model(nnx.Rngs(0)), X)
    with pytest.raises(AssertionError):
        assert_hidden(HIDDEN, mesh)


WAYS = {
    "jax.jit of a module": lambda scoped, model: jax.jit(scoped)(model, X),
    "nnx.jit": lambda scoped, model: nnx.jit(scoped)(model, X),
    "merged in jax.jit": lambda scoped, model: jax.jit(
        lambda state: scoped(nnx.merge(nnx.graphdef(model), state), X)
    )(nnx.state(model)),
    "nnx.jit inside": lambda scoped, model: scoped(model, X, nnx.jit(forward)),
    "eager": lambda scoped, model: scoped(model, X),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("given", [True, False])
def test_in_a_scope(
    way: str, given: bool, mesh: flm.DeviceMesh, layout_map: flm.LayoutMap
) -> None:
    layout_map.activations["layers/./up"] = ("data", None, "model")
    model = quiet(layout_map).place(Model(nnx.Rngs(0)))

    def scoped(model: Any, x: Any, call: Any = forward) -> Any:
        with flm.activation_scope(layout_map, *([model] if given else [])):
            return call(model, x)

    WAYS[way](scoped, model)
    assert_hidden(HIDDEN, mesh)
    assert all(
        "_flax_layoutmap_path" not in vars(m) for _, m in nnx.iter_modules(model)
    )


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_axis_types(kind: str) -> None:
    grid = flm.DeviceMesh((2, 4), ("data", "model"), axis_types=kind)
    layout_map = quiet(flm.LayoutMap(grid))
    layout_map.activations["layers/0"] = (("data", "model"), None, None)
    layout_map.activations["layers/1"] = ("model", None, None)
    y = flm.jit(forward, layout_map=layout_map)(
        nnx.Sequential(*[nnx.Linear(16, 16, rngs=nnx.Rngs(0)) for _ in range(2)]), X
    )
    lies_on(y, (("model",), (), ()), grid)


class Attention(nnx.Module):
    """Several outputs: an array, a dict, a loss, a text, nothing."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.proj = nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        y = self.proj(x)
        weights = {"w": jnp.ones((8, 4)), "loss": y.mean()}
        return y, weights, "text", None


def run_attention(model: Any, x: Any) -> Any:
    y, weights, text, nothing = model.attn(x)
    assert text == "text" and nothing is None
    return y, weights


def attention() -> Any:
    model = nnx.Module()
    model.attn = Attention(nnx.Rngs(0))  # type: ignore[attr-defined]
    return model


def test_outputs_one_by_one(layout_map: flm.LayoutMap) -> None:
    layout_map.activations["attn"] = ("data", None, "model")
    layout_map.activations["attn/1/w"] = ("model", None)
    y, weights = flm.jit(run_attention, layout_map=quiet(layout_map))(attention(), X)
    assert_lies(y, HIDDEN)
    assert_lies(weights["w"], (("model",), ()))
    assert weights["loss"].shape == ()


def test_an_output_of_another_rank(layout_map: flm.LayoutMap) -> None:
    layout_map.activations["attn"] = ("data", None, "model")
    with pytest.raises(flm.LayoutError) as caught:
        flm.jit(run_attention, layout_map=quiet(layout_map))(attention(), X)
    assert str(caught.value) == (
        "the rule 'attn' for the output of 'attn' (8, 4): distribute_tensor of an "
        "array (8, 4): the layout ('data', None, 'model') has 3 dims, the array has 2; "
        "it has several outputs, of which this one may have a rule of its own: "
        "layout_map.activations['attn/1/w'] = …"
    )
    layout_map = flm.LayoutMap(layout_map.device_mesh)
    layout_map.activations.add(flm.Rule("attn", ("data", None, "model"), rank="skip"))
    y, _ = flm.jit(run_attention, layout_map=quiet(layout_map))(attention(), X)
    assert_lies(y, HIDDEN)


def test_what_does_not_divide(mesh: flm.DeviceMesh, layout_map: flm.LayoutMap) -> None:
    model = nnx.Sequential(nnx.Linear(16, 6, rngs=nnx.Rngs(0)))
    layout_map.activations["layers/0"] = ("data", None, "model")
    with pytest.raises(flm.LayoutError, match="rule 'layers/0' for the output of 'lay"):
        flm.jit(forward, layout_map=quiet(layout_map))(model, X)
    # The model is what it was, and nothing is left in the classes.
    assert "flax_layoutmap" not in str(nnx.graphdef(model))
    assert nnx.Linear.__call__.__module__.startswith("flax")
    other = quiet(flm.LayoutMap(mesh, indivisible="replicate"))
    other.activations["layers/0"] = ("data", None, "model")
    assert_lies(flm.jit(forward, layout_map=other)(model, X), (("data",), (), ()))


# ------------------------------------------------------------------- which rule it is


def called(patterns: Any, paths: Any, **options: Any) -> dict[str, Any]:
    """Path → the axes that a rule gives its output."""
    layout_map = flm.LayoutMap(flm.DeviceMesh.abstract("data=2,model=4"), **options)
    layout_map.activations.update(patterns)
    active = _activations.Active(layout_map.freeze())
    rules = {path: active._rule(path) for path in paths}
    return {path: rule and rule.layout.axes for path, rule in rules.items()}


def test_a_rule_must_reach_the_end_of_the_path() -> None:
    paths = ["mlp", "a/mlp", "mlp/up", "mlp2", "mlp/output", "output", "output/up"]
    hits = called({"mlp": ("data",), "output": ("model",)}, paths)
    assert hits == {
        "mlp": ("data",),
        "a/mlp": ("data",),
        "mlp/up": None,
        "mlp2": None,
        "mlp/output": ("model",),  # a module that is itself called output
        "output": ("model",),
        "output/up": None,
    }


@pytest.mark.parametrize(
    ("match", "hits"),
    [
        ("search", ["b/c", "a/b/c", "xb/c"]),
        ("match", ["b/c"]),
        ("fullmatch", ["b/c"]),
    ],
)
def test_matching_modes(match: Any, hits: list[str]) -> None:
    found = called({"b/.": ("data",)}, ["b/c", "a/b/c", "xb/c", "b/c/d"], match=match)
    assert [path for path, axes in found.items() if axes] == hits


def test_patterns_that_look_around() -> None:
    found = called({"^b$": ("data",)}, ["b", "ab"])
    assert found == {"b": ("data",), "ab": None}
    found = called({"(?<=a/)b": ("data",)}, ["b", "a/b"])
    assert found == {"b": None, "a/b": ("data",)}


def test_overlap() -> None:
    rules = {"mlp": ("data",), "a/mlp": ("model",)}
    with pytest.raises(
        flm.errors.RuleError, match="'mlp' → .*'a/mlp' → .*|'mlp'.*narrower"
    ):
        called(rules, ["b/a/mlp"])
    assert called(rules, ["a/mlp"]) == {"a/mlp": ("model",)}  # an exact key
    assert called(rules, ["b/a/mlp"], overlap="first")["b/a/mlp"] == ("data",)
    assert called(rules, ["b/a/mlp"], overlap="last")["b/a/mlp"] == ("model",)


def test_keras_spelling(layout_map: flm.LayoutMap) -> None:
    """A key of the map itself that ends in /output, where no parameter has it."""
    layout_map["layers/1/output"] = ("data", None, "model")
    model = nnx.Sequential(*[nnx.Linear(16, 16, rngs=nnx.Rngs(0)) for _ in range(2)])
    with warnings.catch_warnings():
        warnings.simplefilter("error", flm.LayoutWarning)
        y = flm.jit(forward, layout_map=quiet(layout_map))(model, X)
    assert_lies(y, HIDDEN)


class Named(nnx.Module):
    """A module that is itself called output."""

    def __init__(self) -> None:
        self.output = nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(0))

    def __call__(self, x: Any) -> Any:
        return self.output(x) + 0.0


def test_a_rule_for_parameters_never_hits_outputs(mesh: flm.DeviceMesh) -> None:
    layout_map = flm.LayoutMap(mesh)
    layout_map["/output|output"] = (None, "model")  # for output/kernel
    y = flm.jit(forward, layout_map=layout_map)(Named(), X)
    assert y.shape == X.shape  # its rank, 3, would not have fitted
    layout_map = flm.LayoutMap(mesh)
    layout_map["output/kernel"] = (None, "model")
    layout_map.activations["output"] = ("data", None, "model")
    y = flm.jit(lambda m, x: m.output(x), layout_map=layout_map)(Named(), X)
    assert_lies(y, HIDDEN)


class LinenNamed(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dense(16, name="output")(x)


class LinenOuter(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return LinenNamed(name="mlp")(x)


class Outer(nnx.Module):
    def __init__(self) -> None:
        self.mlp = Named()

    def __call__(self, x: Any) -> Any:
        return self.mlp(x)


@pytest.mark.parametrize("kind", ["NNX", "Linen"])
def test_a_rule_for_parameters_in_a_scope(kind: str, mesh: flm.DeviceMesh) -> None:
    """`mlp/output` is for `mlp/output/kernel`, where there is one, not for `mlp`."""
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map["mlp/output"] = (None, "model")  # no output has this rank
    model = LinenOuter()
    variables = jax.jit(model.init)(jax.random.key(0), X)
    with flm.activation_scope(layout_map):
        y: Any = Outer()(X) if kind == "NNX" else model.apply(variables, X)
    assert y.shape == X.shape


def test_names_in_a_scope(mesh: flm.DeviceMesh) -> None:
    layout_map = flm.LayoutMap(mesh)
    layout_map.names["hidden"] = ("data", None, "model")
    with flm.activation_scope(layout_map):
        assert_lies(flm.distribute_tensor(X, "hidden"), HIDDEN)


def test_rules_that_never_fire(mesh: flm.DeviceMesh) -> None:
    def run(**options: Any) -> None:
        layout_map = quiet(flm.LayoutMap(mesh, **options))
        del layout_map["kernel|bias|scale"]
        layout_map["kernel|bias"] = None
        layout_map.activations["layers/0"] = ("data", None, None)
        layout_map.activations["layer/1"] = ("data", None, None)
        model = nnx.Sequential(nnx.Linear(16, 16, rngs=nnx.Rngs(0)))
        step = flm.jit(forward, layout_map=layout_map)
        for rows in (8, 4):
            step(model, X[:rows])

    with pytest.warns(flm.LayoutWarning, match="'layer/1'; the closest is") as seen:
        run()
    assert len(seen) == 1 and "'layers/0'" not in str(seen[0].message).split(";")[0]
    with pytest.raises(
        flm.errors.RuleError, match="strict: activation rules that match"
    ):
        run(strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", flm.LayoutWarning)
        run(strict=False)


def test_two_models_have_their_own_paths(layout_map: flm.LayoutMap) -> None:
    layout_map.activations["layers/0"] = ("data", None, "model")

    def both(pair: Any, x: Any) -> Any:
        return pair["a"](x), pair["b"](x)

    model = nnx.Sequential(nnx.Linear(16, 16, rngs=nnx.Rngs(0)))
    other = nnx.Sequential(nnx.Linear(16, 16, rngs=nnx.Rngs(0)))
    y, z = flm.jit(both, layout_map=quiet(layout_map))({"a": model, "b": other}, X)
    assert_lies(y, HIDDEN)
    assert_lies(z, HIDDEN)


class Parent(nnx.Linear):
    """`super().__call__` is not the end of the layer."""

    def __call__(self, x: Any) -> Any:  # type: ignore[override]
        return super().__call__(x).reshape(8, -1)


def test_the_outermost_call_of_a_layer_counts(layout_map: flm.LayoutMap) -> None:
    layout_map.activations["^$"] = ("data", "model")
    model = Parent(16, 16, rngs=nnx.Rngs(0))
    y = flm.jit(forward, layout_map=quiet(layout_map))(model, X)
    assert_lies(y, (("data",), ("model",)))


def test_a_training_step(layout_map: flm.LayoutMap, mesh: flm.DeviceMesh) -> None:
    layout_map.activations["layers/./up"] = ("data", None, "model")

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        value, gradients = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, gradients)
        return value

    def run(layout_map: Any) -> list[float]:
        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        jitted = flm.jit(step, layout_map=layout_map, donate_argnames=("model",))
        losses = [float(jitted(model, optimizer, X)) for _ in range(3)]
        assert jitted._cache_size() == 1
        return losses

    with_rules = run(quiet(layout_map))
    assert_hidden(HIDDEN, mesh)
    np.testing.assert_allclose(with_rules, run(quiet(flm.LayoutMap(mesh))), rtol=1e-4)


def test_a_function_may_change_the_model(layout_map: flm.LayoutMap) -> None:
    """The mark is no part of the structure."""
    layout_map.activations["layers/0"] = ("data", None, "model")

    def grow(model: Any, x: Any) -> Any:
        y = model(x)
        model.layers.append(nnx.Linear(16, 16, rngs=nnx.Rngs(1)))
        return y

    model = nnx.Sequential(nnx.Linear(16, 16, rngs=nnx.Rngs(0)))
    assert_lies(flm.jit(grow, layout_map=quiet(layout_map))(model, X), HIDDEN)
    assert len(model.layers) == 2
    assert "flax_layoutmap" not in str(nnx.graphdef(model))


def test_a_rule_that_is_changed_counts(
    mesh: flm.DeviceMesh, layout_map: flm.LayoutMap
) -> None:
    layout_map.activations["layers/0"] = ("data", None, "model")
    model = nnx.Sequential(nnx.Linear(16, 16, rngs=nnx.Rngs(0)))
    inner = nnx.jit(forward)

    def scoped(model: Any, x: Any) -> Any:
        with flm.activation_scope(layout_map, model):
            return inner(model, x)

    placed = quiet(layout_map).place(model)
    assert_lies(scoped(placed, X), HIDDEN)
    layout_map.activations.replace("layers/0", ("model", None, None))
    assert_lies(scoped(placed, X), (("model",), (), ()))


def test_scopes_in_scopes(mesh: flm.DeviceMesh, layout_map: flm.LayoutMap) -> None:
    """The inner rules count inside; what jit keeps does not depend on a scope."""
    layout_map.activations["layers/0"] = ("data", None, "model")
    other = quiet(flm.LayoutMap(mesh))
    other.activations["layers/0"] = ("model", None, None)
    model = quiet(layout_map).place(
        nnx.Sequential(nnx.Linear(16, 16, rngs=nnx.Rngs(0)))
    )
    inner, plain = (
        nnx.jit(forward),
        flm.jit(forward, layout_map=quiet(flm.LayoutMap(mesh))),
    )
    with flm.activation_scope(layout_map, model):
        assert_lies(inner(model, X), HIDDEN)
        with flm.activation_scope(other, model):
            assert_lies(inner(model, X), (("model",), (), ()))
        assert_lies(inner(model, X), HIDDEN)
        with pytest.raises(AssertionError):
            assert_lies(plain(model, X), HIDDEN)
    assert "flax_layoutmap" not in str(nnx.graphdef(model))


def test_models_are_not_kept(layout_map: flm.LayoutMap) -> None:
    layout_map.activations["layers/0"] = ("data", None, "model")
    model = nnx.Sequential(nnx.Linear(16, 16, rngs=nnx.Rngs(0)))
    flm.jit(forward, layout_map=quiet(layout_map))(model, X)
    ref = weakref.ref(model)
    del model
    gc.collect()
    assert ref() is None


def test_under_disable_jit(layout_map: flm.LayoutMap) -> None:
    layout_map.activations["layers/0"] = ("data", None, "model")
    model = quiet(layout_map).place(
        nnx.Sequential(nnx.Linear(16, 16, rngs=nnx.Rngs(0)))
    )
    with jax.disable_jit():
        assert_lies(flm.jit(forward, layout_map=layout_map)(model, X), HIDDEN)


def test_a_scope_wants_rules_a_mesh_and_modules(layout_map: flm.LayoutMap) -> None:
    with pytest.raises(
        flm.errors.MeshError, match="activation_scope needs rules with a mesh"
    ):
        flm.activation_scope(flm.LayoutMap())
    with pytest.raises(flm.errors.RuleError, match="takes NNX modules, got a dict"):
        flm.activation_scope(layout_map, {})
    with pytest.raises(flm.errors.RuleError, match="activation_scope"):
        flm.activation_scope([("a", None)])


# ------------------------------------------------------------------------------ Linen


class LinenBlock(linen.Module):
    inspects: bool = True  # an effect, which nn.scan of Flax 0.12.12 refuses

    @linen.compact
    def __call__(self, x: Any) -> Any:
        hidden = linen.Dense(32, name="up")(x)
        if self.inspects:
            jax.debug.inspect_array_sharding(hidden, callback=SEEN.append)
        return x + linen.Dense(16, name="down")(jax.nn.relu(hidden))


class LinenModel(linen.Module):
    kind: str = "list"

    @linen.compact
    def __call__(self, x: Any) -> Any:
        if self.kind == "scan":
            scan = linen.scan(
                lambda block, carry, _: (block(carry), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=2,
            )
            return scan(LinenBlock(inspects=False, name="layers"), x, None)[0]
        block: Any = linen.remat(LinenBlock) if self.kind == "remat" else LinenBlock
        for number in range(2):
            x = block(name=f"layers_{number}")(x)
        return x


@pytest.mark.parametrize("kind", ["list", "scan", "remat"])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("spelling", ["section", "Keras's"])
def test_linen(
    kind: str,
    gradients: bool,
    spelling: str,
    mesh: flm.DeviceMesh,
    layout_map: flm.LayoutMap,
) -> None:
    layout = ("data", None, "model")
    if spelling == "section":
        layout_map.activations[r"layers(_\d)?/up"] = layout
    else:
        layout_map[r"layers(_\d)?/up/output"] = layout
    model = LinenModel(kind)
    variables = model.init(jax.random.key(0), X)

    def apply(variables: Any, x: Any) -> Any:
        out: Any = model.apply(variables, x)
        return (out**2).mean()

    fun = jax.grad(apply) if gradients else apply
    plain = jax.tree.map(np.asarray, jax.jit(fun)(variables, X))
    SEEN.clear()
    jitted = flm.jit(fun, layout_map=quiet(layout_map), donate_argnames=())
    result = jitted(layout_map.place(variables), X)
    if kind == "scan":
        text = jitted.lower(variables, X).as_text()
        assert re.search(
            r'sharding_constraint .*{"data"}, {}, {"model"}.*x32xf32', text
        )
    else:
        assert_hidden(HIDDEN, mesh)
    for one, other in zip(jax.tree.leaves(result), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-5)


def test_linen_in_a_scope(mesh: flm.DeviceMesh, layout_map: flm.LayoutMap) -> None:
    layout_map.activations["up"] = ("data", None, "model")
    model = LinenModel()
    variables = quiet(layout_map).place(model.init(jax.random.key(0), X))
    SEEN.clear()

    @jax.jit
    def apply(variables: Any, x: Any) -> Any:
        with flm.activation_scope(layout_map):
            return model.apply(variables, x)

    apply(variables, X)
    assert_hidden(HIDDEN, mesh)


# --------------------------------------------------------- what a mark may not change


class Ensemble(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.heads: Any = nnx.Dict(
            a=nnx.Linear(16, 16, rngs=rngs), b=nnx.Linear(16, 16, rngs=rngs)
        )
        self.layers: Any = nnx.List([nnx.Linear(16, 16, rngs=rngs)])

    def __call__(self, x: Any) -> Any:
        for name, head in self.heads.items():
            assert name in "ab"
            x = x + head(x)
        for layer in self.layers:
            x = x + layer(x)
        return x / len(self.heads) / len(self.layers)


def test_containers_are_what_they_were(layout_map: flm.LayoutMap) -> None:
    layout_map.activations["heads/a"] = ("data", None, "model")
    model = Ensemble(nnx.Rngs(0))
    plain = np.asarray(model(X))
    y = flm.jit(forward, layout_map=quiet(layout_map))(model, X)
    np.testing.assert_allclose(y, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("what", ["names", "activations", "Linen"])
def test_functions_under_jit_are_traced_again_for_other_rules(
    what: str, mesh: flm.DeviceMesh
) -> None:
    first, second = quiet(flm.LayoutMap(mesh)), quiet(flm.LayoutMap(mesh))
    layouts = {0: ("data", None, "model"), 1: ("model", None, None)}
    layer = nnx.Sequential(nnx.Linear(16, 16, rngs=nnx.Rngs(0)))
    dense = linen.Dense(16)
    variables = dense.init(jax.random.key(0), X)
    inner: Any = {
        "names": jax.jit(lambda m, v, x: flm.distribute_tensor(x, "hidden")),
        "activations": jax.jit(lambda m, v, x: m(x)),
        "Linen": jax.jit(lambda m, v, x: dense.apply(v, x)),
    }[what]
    for number, layout_map in enumerate((first, second)):
        layout_map.names["hidden"] = layouts[number]
        layout_map.activations["layers/0" if what != "Linen" else "^$"] = layouts[
            number
        ]
        outer = flm.jit(lambda m, v, x: inner(m, v, x), layout_map=layout_map)
        assert_lies(outer(layer, variables, X), (HIDDEN, (("model",), (), ()))[number])
    if what != "names":  # outside of all of them there is nothing left
        plain = inner(layer, variables, X)
        assert not any(getattr(plain.sharding, "spec", ()))


class Unbound(linen.Module):
    def zeros(self, rows: int) -> Any:
        return jnp.zeros((rows, 4, 16))

    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dense(16, name="d")(x)


def test_methods_of_unbound_linen_modules(layout_map: flm.LayoutMap) -> None:
    layout_map.activations["d"] = ("data", None, "model")
    model = Unbound()
    variables = model.init(jax.random.key(0), X)

    def run(variables: Any, x: Any) -> Any:
        out: Any = model.apply(variables, x)
        return out + model.zeros(8)

    assert run(variables, X).shape == X.shape
    y = flm.jit(run, layout_map=quiet(layout_map))(variables, X)
    assert y.shape == X.shape


class Two(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.enc = nnx.Linear(16, 16, rngs=rngs)
        self.dec = nnx.Linear(16, 16, rngs=rngs)

    def encode(self, x: Any) -> Any:
        return self.enc(x)

    def decode(self, x: Any) -> Any:
        return self.dec(x)


def test_rules_for_what_another_function_calls(mesh: flm.DeviceMesh) -> None:
    layout_map = flm.LayoutMap(mesh, strict=True)
    layout_map["kernel|bias"] = None
    layout_map.activations["enc"] = ("data", None, "model")
    layout_map.activations["dec"] = ("model", None, None)
    model = Two(nnx.Rngs(0))
    encode = flm.jit(lambda m, x: m.encode(x), layout_map=layout_map)
    decode = flm.jit(lambda m, x: m.decode(x), layout_map=layout_map)
    assert_lies(encode(model, X), HIDDEN)
    assert_lies(decode(model, X), (("model",), (), ()))
    layout_map.activations["nonsense"] = ("model", None, None)
    with pytest.warns(flm.LayoutWarning, match="match the output of no module: 'nonse"):
        encode(model, X)
    with pytest.raises(flm.errors.RuleError, match="strict: .*'nonsense'"):
        flm.jit(lambda m, x: m.encode(m.decode(x)) + m(x), layout_map=layout_map)(
            Sum(nnx.Rngs(0)), X
        )


class Sum(Two):
    def __call__(self, x: Any) -> Any:
        return x


def test_copies_have_no_path(layout_map: flm.LayoutMap) -> None:
    layout_map.activations["layers/0"] = ("data", None, "model")
    model = nnx.Sequential(nnx.Linear(16, 16, rngs=nnx.Rngs(0)))
    copy = flm.jit(lambda m: nnx.clone(m), layout_map=quiet(layout_map))(model)
    assert nnx.graphdef(copy) == nnx.graphdef(model)
    placed = layout_map.place(model)
    with flm.activation_scope(layout_map, placed):
        with flm.activation_scope(layout_map, placed):
            pass
        assert_lies(placed.layers[0](X), HIDDEN)
        kept = nnx.clone(placed)
    other = quiet(flm.LayoutMap(layout_map.device_mesh))
    other.activations["layers/1"] = ("data", None, "model")
    with flm.activation_scope(other):
        assert not any(kept.layers[0](X).sharding.spec)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_rule_for_an_output_has_no_memory_kind(kind: Any) -> None:
    mesh = flm.DeviceMesh(jax.make_mesh((8,), ("data",), axis_types=(kind,)))
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map.activations["0"] = flm.TensorLayout(
        ("data", None), memory_kind="pinned_host"
    )
    model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    model = layout_map.place(model)
    with pytest.raises(flm.LayoutError) as error:
        flm.jit(lambda model, x: model(x), layout_map=layout_map)(
            model, np.ones((8, 4), np.float32)
        )
    named = "checkpoint_name(x, 'hidden')"
    checkpointed = (
        "jax.checkpoint(f, policy=jax.checkpoint_policies."
        "save_and_offload_only_these_names(names_which_can_be_saved=[], "
        "names_which_can_be_offloaded=['hidden'], offload_src='device', "
        "offload_dst='pinned_host'))"
    )
    assert str(error.value) == (
        "the rule '0' for the output of 'layers/0' (8, 4) has "
        "memory_kind='pinned_host', and what reads the output needs it on the device: "
        f"leave the kind out, name the value in the model, {named} of "
        f"jax.ad_checkpoint, and call what holds it as {checkpointed}"
    )

    def f(x: jax.Array) -> jax.Array:
        known = {"checkpoint_name": checkpoint_name, "x": jnp.sin(x)}
        return jnp.sin(eval(named, known)).sum()

    text = str(jax.make_jaxpr(jax.grad(eval(checkpointed, {"jax": jax, "f": f})))(X))
    assert text.count("<host>[") == 2  # to the host, and back
