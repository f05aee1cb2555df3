"""Steps on Explicit meshes, which `jax.make_mesh` gives, as on Auto axes.

The models are those of users: unrolled and scanned, with Dropout and `remat`; so are
the losses and optimizers.
"""

import contextlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from shards import assert_lies

import flax_layoutmap as flm

NAMES = ("data", "model")
EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
D, HIDDEN, CLASSES = 8, 16, 4
X = np.random.default_rng(0).normal(size=(8, D)).astype(np.float32)
LABELS = np.arange(8, dtype=np.int32) % CLASSES
# The operation of a program that lays out a hidden activation by a rule.
OPERATION = r'sharding_constraint .*{"data"}, {"model"}.*8x16xf32'


def grid(*types: Any) -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), NAMES, axis_types=types or (EXPLICIT, EXPLICIT))


def rules(mesh: Any, **options: Any) -> flm.LayoutMap:
    """A product sums over a sharded dim, and the classes of the head are sharded."""
    layout_map = flm.LayoutMap(mesh, **options)
    layout_map["(up|head)/kernel"] = (..., "model")
    layout_map["down/kernel"] = (..., "model", None)
    layout_map["bias"] = None
    return layout_map


# ------------------------------------------- stock models, losses and optimizers


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(D, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, D, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return x + self.drop(self.down(nnx.gelu(self.up(x))))


class Model(nnx.Module):
    def __init__(self, is_scanned: bool) -> None:
        rngs = nnx.Rngs(0)
        self.is_scanned = is_scanned
        if is_scanned:
            self.layers: Any = nnx.split_rngs(splits=2)(nnx.vmap(Block))(rngs)
        else:
            self.layers = nnx.List([Block(rngs), Block(rngs)])
        self.head = nnx.Linear(D, CLASSES, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        if self.is_scanned:
            run = nnx.scan(remat, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            x = run(x, self.layers)
        else:
            for layer in self.layers:
                x = layer(x)
        return self.head(x)


def remat(x: Any, layer: Any) -> Any:
    return nnx.remat(lambda layer, x: layer(x))(layer, x)


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        y = linen.Dense(D, name="down")(linen.gelu(linen.Dense(HIDDEN, name="up")(x)))
        return x + linen.Dropout(0.2, deterministic=False)(y), None


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        scan = linen.scan(
            linen.remat(LinenBlock),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=2,
        )
        x, _ = scan(name="layers")(x, None)
        return linen.Dense(CLASSES, name="head")(x)


TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-3))
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def nnx_step(model: Any, optimizer: Any, x: Any, labels: Any) -> Any:
    def loss_of(model: Any) -> Any:
        return cross_entropy(model(x), labels).mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def linen_step(state: Any, x: Any, labels: Any) -> Any:
    def loss_of(params: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(1), state.step)
        logits = state.apply_fn({"params": params}, x, rngs={"dropout": key})
        return cross_entropy(logits, labels).mean()

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


def linen_state() -> Any:
    model = LinenModel()
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = model.init(keys, X)["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=TX)


def train(kind: str, layout_map: Any = None) -> Any:
    """The losses of three steps, parameters, optimizer state and text of the program.

    Without a map, on one device by Flax alone.
    """
    is_nnx, is_plain = kind != "Linen", layout_map is None
    make: Any = (lambda: Model(kind == "scanned")) if is_nnx else linen_state
    fun: Any = nnx_step if is_nnx else linen_step
    options = {"layout_map": layout_map, "donate_argnums": (0, 1) if is_nnx else 0}
    step: Any = nnx.jit(fun) if is_plain else flm.jit(fun, **options)
    args: Any = (make() if is_plain else flm.create(make, layout_map),)
    if is_nnx:
        model = args[0]
        if is_plain:
            optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
        else:
            optimizer = flm.create_optimizer(model, TX, layout_map, wrt=nnx.Param)
        args = (model, optimizer)
    text, losses = step.lower(*args, X, LABELS).as_text(), []
    for _ in range(3):
        loss = step(*args, X, LABELS)
        if not is_nnx:
            *args, loss = loss
        losses.append(loss)
    assert is_plain or step._cache_size() == 1
    if is_nnx:
        params = nnx.to_pure_dict(nnx.state(args[0], nnx.Param))
        return losses, params, nnx.state(args[1]), text
    return losses, args[0].params, args[0].opt_state, text


@pytest.mark.parametrize("kind", ["unrolled", "scanned", "Linen"])
def test_training_is_that_on_one_device(kind: str) -> None:
    wanted_losses, wanted, *_ = train(kind)
    for mesh in (grid(AUTO, AUTO), grid()):
        layout_map = rules(mesh)
        layout_map.optimizer["kernel"] = (..., "data", None)
        layout_map.activations[r"layers([/_]\d)?/up"] = NAMES
        is_in_context = (mesh == grid()) == (kind != "Linen")
        with jax.set_mesh(mesh) if is_in_context else contextlib.nullcontext():
            losses, params, state, text = train(kind, layout_map)
        np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), params, wanted
        )
        leaves = jax.tree.leaves((losses, params, state))
        assert {x.sharding.mesh for x in leaves} == {mesh}
        assert params["head"]["kernel"].sharding.spec == jax.P(None, "model")
        moments = [x for x in jax.tree.leaves(state) if "data" in x.sharding.spec]
        assert len(moments) == (10 if kind == "unrolled" else 6)
        assert re.search(OPERATION, text)


# ------------------------------------------------------------------------- results


@pytest.fixture
def layout_map() -> flm.LayoutMap:
    return rules(grid(), strict=False)


def parameters(layout_map: flm.LayoutMap) -> Any:
    return layout_map.place({"up": {"kernel": jnp.ones((D, HIDDEN))}})


def test_results_without_a_rule_lie_as_the_compiler_chooses(
    layout_map: flm.LayoutMap,
) -> None:
    def forward(params: Any, x: Any) -> Any:
        y = x @ params["up"]["kernel"]
        return y, y.sum()

    step = flm.jit(forward, layout_map=layout_map)
    step(parameters(layout_map), X)
    y, total = step(parameters(layout_map), X)  # as an earlier call
    for x, spec in (
        (y, jax.P("data", "model")),
        (total, jax.P()),
    ):
        assert x.sharding == jax.sharding.NamedSharding(grid(), spec)
    np.testing.assert_allclose(y, X @ np.ones((D, HIDDEN)), rtol=1e-5)
    with jax.set_mesh(grid()):  # and can be used with other arrays there
        assert (y + parameters(layout_map)["up"]["kernel"]).shape == y.shape


@pytest.mark.parametrize("explicit", [False, True])
def test_results_that_no_argument_gives(
    explicit: bool, layout_map: flm.LayoutMap
) -> None:
    """JAX knows no devices then: it drops arguments that are not used."""
    for expected in (None, np.ones((8, 2))):
        step = flm.jit(
            lambda params, expected=expected: jax.tree.map(jnp.asarray, expected),
            layout_map=layout_map,
            explicit=explicit,
        )
        for _ in range(3):
            np.testing.assert_array_equal(step(parameters(layout_map)), expected)
        assert step._cache_size() == 1
    copy = flm.jit(nnx.clone, layout_map=layout_map, explicit=explicit)
    model = flm.create(lambda: nnx.Linear(D, 8, rngs=nnx.Rngs(0)), layout_map)
    np.testing.assert_array_equal(copy(model).kernel[...], model.kernel[...])


def product(params: Any, x: Any) -> Any:
    return x @ params["up"]["kernel"]


OUTER = {
    "jit": lambda step, params, x: jax.jit(lambda p, x: step(p, x) * 2)(params, x),
    "grad": lambda step, params, x: jax.grad(lambda x: step(params, x).sum())(x),
    "vmap": lambda step, params, x: jax.vmap(lambda x: step(params, x))(x[:, None]),
    "none": lambda step, params, x: flm.jit(
        lambda: (jnp.ones(3), jnp.ones(())), layout_map=step.layout_map
    )(),
    "eval_shape": lambda step, params, x: jax.tree.map(
        lambda shape: np.zeros(shape.shape), step.eval_shape(params, x)
    ),
}


@pytest.mark.parametrize("way", OUTER)
def test_in_outer_transformations(way: str, layout_map: flm.LayoutMap) -> None:
    found = []
    for own in (layout_map, rules(grid(AUTO, AUTO), strict=False)):
        step = flm.jit(product, layout_map=own)
        x = flm.distribute_tensor(X, flm.TensorLayout(("data", None), own.device_mesh))
        with jax.set_mesh(own.device_mesh.jax_mesh):  # type: ignore[union-attr]
            found.append(OUTER[way](step, parameters(own), x))
    jax.tree.map(np.testing.assert_array_equal, *found)


# --------------------------------------------------------- layouts in the function


def test_layouts_in_the_function() -> None:
    layout_map = rules(grid())
    layout_map.names["hidden"] = (None, "model")
    layout_map.activations["layers/.*/up"] = ("data", "model")
    layout_map.activations["head"] = (("data", "model"), None)
    model = flm.create(lambda: Model(False), layout_map)

    @flm.jit(layout_map=layout_map)
    def forward(model: Any, x: Any) -> Any:
        own = flm.TensorLayout(("model", None), layout_map.device_mesh)
        bare = jax.lax.with_sharding_constraint(x, jax.P(None, "data"))
        named = flm.distribute_tensor(x, "hidden")
        return model(x), named, flm.distribute_tensor(x, own), bare

    results = forward(model, X)
    dims = [((*NAMES,), ()), ((), ("model",)), (("model",), ()), ((), ("data",))]
    for x, wanted in zip(results, dims, strict=True):
        assert_lies(x, wanted, layout_map.device_mesh)  # type: ignore[arg-type]
        assert x.sharding.mesh == grid()


# ------------------------------------------------------------------- explicit=True


def forward(model: Any, x: Any) -> Any:
    return model(x)


@pytest.mark.parametrize(
    ("is_scanned", "wanted"),
    [(False, "layers/0/down (Linear)"), (True, "layers/down (Linear)")],
)
def test_errors_of_jax_have_the_path(
    is_scanned: bool, wanted: str, layout_map: flm.LayoutMap
) -> None:
    model = flm.create(lambda: Model(is_scanned), layout_map)
    step = flm.jit(forward, layout_map=layout_map, explicit=True)
    with pytest.raises(Exception, match="ambiguous how the output") as caught:
        step(model, X)
    assert caught.value.__notes__[0] == f"in the call of the module {wanted}"


def test_the_types_are_those_of_the_user(layout_map: flm.LayoutMap) -> None:
    class Written(Block):
        def __call__(self, x: Any) -> Any:
            assert jax.typeof(x).sharding.spec == jax.P("data", None)
            return self.down(self.up(x), out_sharding=jax.P("data", None))

    layout_map.activations["^$"] = ("data", "model")
    model = flm.create(lambda: Written(nnx.Rngs(0)), layout_map)
    step = flm.jit(forward, layout_map=layout_map, explicit=True)
    for is_in_context in (False, True):
        with jax.set_mesh(grid()) if is_in_context else contextlib.nullcontext():
            y = step(model, X)
        assert y.sharding == jax.sharding.NamedSharding(grid(), jax.P(*NAMES))
    block: Any = Block(nnx.Rngs(0))
    np.testing.assert_allclose(y, block.down(block.up(X)), rtol=1e-5, atol=1e-6)
