"""Stock models on Explicit meshes, by activation rules: as on Auto meshes."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from pods import compiled
from shards import Dims, assert_lies
from steps import counting

import flax_layoutmap as flm

NAMES = ("data", "fsdp", "tensor")
BATCH = ("data", "fsdp")
ROWS: Dims = (BATCH, (), ())
D, VOCAB, HEADS, HIDDEN, LENGTH = 16, 64, 4, 32, 9
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (8, LENGTH), np.int32)
IMAGES = np.random.default_rng(1).normal(size=(8, 8, 8, 4)).astype(np.float32)
LABELS = np.arange(8, dtype=np.int32) % 4
# With so large an epsilon, a gradient that is nearly 0 makes no step.
ADAM = optax.adam(1e-2, eps=1e-3)
TYPES: dict[str, Any] = {
    "auto": "auto",
    "explicit": "explicit",
    "mixed: batch explicit": ("explicit", "explicit", "auto"),
    "mixed: tensor explicit": ("auto", "auto", "explicit"),
}


MIXED = [kind for kind in TYPES if kind.startswith("mixed")]


def grid(kind: str) -> flm.DeviceMesh:
    return flm.DeviceMesh((2, 2, 2), NAMES, axis_types=TYPES[kind])


# ---------------------------------------------------------------------- stock models


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(D, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, D, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(D, rngs=rngs)
        self.up = nnx.Linear(D, HIDDEN, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, D, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.down(self.drop(nnx.gelu(self.up(self.norm2(x)))))


class Decoder(nnx.Module):
    """A block in a list, or two stacked for a scan, whose body is rematerialised."""

    def __init__(self, rngs: nnx.Rngs, kind: str = "list") -> None:
        self.embed = nnx.Embed(VOCAB, D, rngs=rngs)
        self.kind = kind
        if kind == "list":
            self.layers: Any = nnx.List([Block(rngs)])
        else:
            self.layers = nnx.split_rngs(splits=2)(nnx.vmap(Block))(rngs)
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.head = nnx.Linear(D, VOCAB, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        if self.kind == "list":
            for layer in self.layers:
                x = layer(x)
        else:
            run = nnx.scan(remat, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            x = run(x, self.layers)
        return self.head(self.norm(x))


def remat(x: Any, layer: Any) -> Any:
    return nnx.remat(lambda layer, x: layer(x))(layer, x)


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x: Any, _: Any = None) -> Any:
        attention = linen.MultiHeadDotProductAttention(HEADS, name="attention")
        x = x + attention(linen.LayerNorm(name="norm1")(x))
        y = linen.Dense(HIDDEN, name="up")(linen.LayerNorm(name="norm2")(x))
        y = linen.Dropout(0.1, deterministic=False)(linen.gelu(y))
        return x + linen.Dense(D, name="down")(y), None


class LinenDecoder(linen.Module):
    """The same in Linen."""

    kind: str = "list"

    @linen.compact
    def __call__(self, tokens: Any) -> Any:
        x = linen.Embed(VOCAB, D, name="embed")(tokens)
        if self.kind == "list":
            x, _ = LinenBlock(name="layers_0")(x)
        else:
            stacked = linen.scan(
                linen.remat(LinenBlock),
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                length=2,
            )
            x, _ = stacked(name="layers")(x, None)
        return linen.Dense(VOCAB, name="head")(linen.LayerNorm(name="norm")(x))


def decoder_rules(mesh: Any, heads: Any = None) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh, batch=BATCH)
    layout_map["embed/embedding"] = ("tensor", "fsdp")
    layout_map["(query|key|value)/kernel"] = (..., "fsdp", "tensor", None)
    layout_map["(query|key|value)/bias"] = (..., "tensor", None)
    layout_map["attention/out/kernel"] = (..., "tensor", None, "fsdp")
    layout_map["(up|head)/kernel"] = (..., "fsdp", "tensor")
    layout_map["(up|head)/bias"] = (..., "tensor")
    layout_map["down/kernel"] = (..., "tensor", "fsdp")
    layout_map["norm.*/(scale|bias)|(out|down)/bias"] = None
    layout_map.activations["embed|norm"] = (BATCH, None, None)
    layout_map.activations[r"layers([/_]\d+)?(/0)?"] = (BATCH, None, None)
    layout_map.activations["head"] = (BATCH, None, heads)
    return layout_map


def layer_rules(mesh: Any) -> flm.LayoutMap:
    """Rules for the layers in a block instead of the block."""
    layout_map = decoder_rules(mesh)
    del layout_map.activations[r"layers([/_]\d+)?(/0)?"]
    layout_map.activations["(query|key|value)"] = (BATCH, None, "tensor", None)
    layout_map.activations["attention/out|down"] = (BATCH, None, None)
    layout_map.activations["up|Dropout_0"] = (BATCH, None, "tensor")
    return layout_map


class Mean(nnx.Module):
    def __call__(self, x: Any) -> Any:
        return x.mean((1, 2))


class Convolutions(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(4, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.conv2 = nnx.Conv(8, 16, (3, 3), rngs=rngs)
        self.pool = Mean()
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = nnx.max_pool(nnx.relu(self.norm(self.conv1(x))), (2, 2), (2, 2))
        return self.head(self.pool(nnx.relu(self.conv2(self.drop(x)))))


class LinenConvolutions(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.Conv(8, (3, 3), name="conv1")(x)
        x = linen.BatchNorm(use_running_average=False, name="norm")(x)
        x = linen.max_pool(linen.relu(x), (2, 2), (2, 2))
        x = linen.Dropout(0.1, deterministic=False)(x)
        x = linen.relu(linen.Conv(16, (3, 3), name="conv2")(x)).mean((1, 2))
        return linen.Dense(4, name="head")(x)


def convolution_rules(mesh: Any) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh, batch=BATCH)
    layout_map["conv1/kernel"] = (..., "tensor")
    layout_map["conv2/kernel"] = (..., "tensor", None)
    layout_map["head/kernel"] = ("fsdp", None)
    layout_map["conv1/bias"] = layout_map["norm/.*"] = ("tensor",)
    layout_map["(conv2|head)/bias"] = None
    layout_map.activations["conv1|norm"] = (BATCH, None, None, "tensor")
    layout_map.activations["drop|Dropout_0"] = (BATCH, None, None, "tensor")
    layout_map.activations["conv2"] = (BATCH, None, None, None)
    layout_map.activations["head|pool"] = (BATCH, None)
    return layout_map


# --------------------------------------------------------------------- how they train


def language_loss(logits: Any, tokens: Any) -> Any:
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    return cross_entropy(logits, tokens[:, 1:]).mean()


def class_loss(logits: Any, labels: Any) -> Any:
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    return cross_entropy(logits, labels).mean()


def run_nnx(make: Callable[[], Any], layout_map: Any, x: Any, loss_of: Any) -> Any:
    """Losses of three steps, the state after them, and the collectives of a step."""
    model = flm.create(make, layout_map)
    optimizer = flm.create_optimizer(model, ADAM, layout_map, wrt=nnx.Param)

    @flm.jit(layout_map=layout_map, donate_argnames=("model", "optimizer"))
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda model: loss_of(model, x))(model)
        optimizer.update(model, grads)
        return loss

    found = sent(step, model, optimizer, x, mesh=layout_map.device_mesh)
    losses = [float(step(model, optimizer, x)) for _ in range(3)]
    assert step._cache_size() == 1
    return losses, nnx.to_pure_dict(nnx.state(model)), found


def run_linen(net: Any, layout_map: Any, x: Any, loss_of: Any) -> Any:
    def make() -> Any:
        keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        variables = net.init(keys, x[0] if isinstance(x, tuple) else x[:, :-1])
        state = TrainState.create(
            apply_fn=net.apply, params=variables.pop("params"), tx=ADAM
        )
        return state, variables

    state, rest = flm.create(make, layout_map)

    @flm.jit(layout_map=layout_map, donate_argnames=("state", "rest"))
    def step(state: Any, rest: Any, key: Any, x: Any) -> Any:
        def whole(params: Any) -> Any:
            def run(inputs: Any) -> Any:
                return state.apply_fn(
                    {"params": params, **rest},
                    inputs,
                    rngs={"dropout": jax.random.fold_in(key, state.step)},
                    mutable=list(rest),
                )

            return loss_of(run, x)

        (loss, new), grads = jax.value_and_grad(whole, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), new, loss

    key = jax.random.key(2)
    found = sent(step, state, rest, key, x, mesh=layout_map.device_mesh)
    losses = []
    for _ in range(3):
        state, rest, loss = step(state, rest, key, x)
        losses.append(float(loss))
    assert step._cache_size() == 1
    return losses, {"params": state.params, **rest}, found


def sent(step: Any, *args: Any, mesh: Any) -> Counter[Any]:
    """Bytes in a step by kind and axes."""
    found: Counter[Any] = Counter()
    for one in compiled(step, *args, mesh=mesh):
        found[one.kind, one.axes] += one.bytes_per_step
    return found


def nnx_language(model: Any, tokens: Any) -> Any:
    return language_loss(model(tokens[:, :-1]), tokens)


def linen_language(run: Any, tokens: Any) -> Any:
    logits, new = run(tokens[:, :-1])
    return language_loss(logits, tokens), new


def nnx_classes(model: Any, batch: Any) -> Any:
    return class_loss(model(batch[0]), batch[1])


def linen_classes(run: Any, batch: Any) -> Any:
    logits, new = run(batch[0])
    return class_loss(logits, batch[1]), new


def decoder(kind: str) -> Any:
    return lambda: Decoder(nnx.Rngs(0), kind)


NNX = (TOKENS, nnx_language)
LINEN = (TOKENS, linen_language)
CASES: dict[str, Any] = {
    "nnx": (run_nnx, decoder("list"), decoder_rules, *NNX),
    "nnx, rules of layers": (run_nnx, decoder("list"), layer_rules, *NNX),
    "nnx.scan, nnx.remat": (run_nnx, decoder("scan"), decoder_rules, *NNX),
    "nnx CNN": (
        run_nnx,
        lambda: Convolutions(nnx.Rngs(0)),
        convolution_rules,
        (IMAGES, LABELS),
        nnx_classes,
    ),
    "linen": (run_linen, LinenDecoder(), decoder_rules, *LINEN),
    "linen, rules of layers": (run_linen, LinenDecoder(), layer_rules, *LINEN),
    "nn.scan, nn.remat": (run_linen, LinenDecoder("scan"), decoder_rules, *LINEN),
    "linen CNN": (
        run_linen,
        LinenConvolutions(),
        convolution_rules,
        (IMAGES, LABELS),
        linen_classes,
    ),
}


@functools.cache
def trained(name: str, kind: str) -> Any:
    run, model, rules, x, loss_of = CASES[name]
    return run(model, rules(grid(kind)), x, loss_of)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "explicit") for name in CASES),
        ("nnx", "mixed: batch explicit"),
        ("nn.scan, nn.remat", "mixed: tensor explicit"),
    ],
)
def test_training_is_as_on_auto_axes(name: str, kind: str) -> None:
    losses, state, found = trained(name, kind)
    wanted_losses, wanted_state, wanted = trained(name, "auto")
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-6)
    assert losses[2] < losses[0]
    for (path, leaf), other in zip(
        jax.tree.leaves_with_path(state), jax.tree.leaves(wanted_state), strict=True
    ):
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(leaf, other, atol=1e-6, err_msg=str(path))
    if name == "linen CNN":
        # Its mean is in no module, so that no rule fixes the layout of its gradient.
        # Types do, where on Auto axes XLA moves more, and so does a rule.
        assert found.total() < wanted.total()
        assert found == trained("nnx CNN", "auto")[2]
    else:
        assert found == wanted


# -------------------------------------------------------------------- optimizer state


def by_nnx(model: Any, tx: Any, layout_map: Any) -> Any:
    """A step on parameters, state and a batch, and the first two of these."""
    optimizer = flm.create_optimizer(model, tx, layout_map, wrt=nnx.Param)

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(squares)(model, x)
        optimizer.update(model, grads)
        return model, optimizer, loss

    return step, model, optimizer


def by_train_state(model: Any, tx: Any, layout_map: Any) -> Any:
    graphdef, params = nnx.split(model)
    state = layout_map.place(
        TrainState.create(apply_fn=graphdef.apply, params=params, tx=tx)
    )

    def step(params: Any, state: Any, x: Any) -> Any:
        def loss_of(params: Any) -> Any:
            return squares(lambda x: state.apply_fn(params)(x)[0], x)

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return params, state.apply_gradients(grads=grads), loss

    return step, {}, state


def by_optax(model: Any, tx: Any, layout_map: Any) -> Any:
    graphdef, params = nnx.split(model)
    state = flm.create_optimizer(params, tx, layout_map=layout_map)

    def step(params: Any, state: Any, x: Any) -> Any:
        def loss_of(params: Any) -> Any:
            return squares(nnx.merge(graphdef, params), x)

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = tx.update(grads, state, params=params)
        return optax.apply_updates(params, updates), state, loss

    return step, params, state


def squares(model: Any, x: Any) -> Any:
    return (model(x) ** 2).mean()


WAYS: dict[str, Any] = {
    "nnx.Optimizer": (by_nnx, ADAM),
    "TrainState": (by_train_state, ADAM),
    "optax": (by_optax, optax.chain(optax.clip_by_global_norm(1.0), ADAM)),
    "optax.MultiSteps": (by_optax, optax.MultiSteps(ADAM, 2)),
}


@functools.cache
def with_state_elsewhere(way: str, kind: str) -> list[float]:
    """The losses of three steps."""
    layout_map = pair_rules(grid(kind))
    layout_map.activations["^$"] = (BATCH, ...)
    layout_map.optimizer["kernel"] = ("tensor", "data")
    run, tx = WAYS[way]
    step, params, state = run(make(Pair, layout_map), tx, layout_map)
    step = flm.jit(step, layout_map=layout_map, donate_argnums=(0, 1))
    losses = []
    for _ in range(3):
        params, state, loss = step(params, state, X)
        losses.append(float(loss))
    assert step._cache_size() == 1
    leaves = jax.tree.leaves(getattr(state, "opt_state", state))
    moments = [leaf for leaf in leaves if leaf.ndim == 2]
    assert len(moments) in (4, 6)
    for leaf in moments:
        assert_lies(leaf, (("tensor",), ("data",)), grid(kind))
    return losses


@pytest.mark.parametrize(
    ("way", "kind"),
    [*((way, "explicit") for way in WAYS), *(("nnx.Optimizer", one) for one in MIXED)],
)
def test_optimizer_state_elsewhere_than_parameters(way: str, kind: str) -> None:
    losses = with_state_elsewhere(way, kind)
    np.testing.assert_allclose(losses, with_state_elsewhere(way, "auto"), rtol=1e-6)
    assert losses[2] != losses[0]


@pytest.mark.parametrize(
    "way", ["of the class", "without params", "unchanged", "a line search"]
)
def test_updates_of_optax_are_called_as_they_are(way: str) -> None:
    layout_map = flm.LayoutMap(grid("explicit"), batch=BATCH, strict=False)
    layout_map["w"] = (None, "tensor")
    params = layout_map.place({"w": jnp.ones((D, HIDDEN))})
    sgd = optax.sgd(0.1)
    unchanged: Any = lambda updates, state: (updates, state)  # noqa: E731
    tx: Any = {
        "of the class": optax.MultiSteps(sgd, 1),
        "without params": optax.GradientTransformation(lambda params: (), unchanged),
        "unchanged": optax.identity(),
        "a line search": optax.chain(
            optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5)
        ),
    }[way]

    def loss_of(params: Any, x: Any) -> Any:
        return (x * params["w"]).sum() ** 2

    @flm.jit(layout_map=layout_map)
    def step(params: Any, state: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss_of)(params, x)
        if way == "of the class":
            return optax.MultiSteps.update(tx, grads, state, params)[0]
        if way == "without params":
            grads = {"w": flm.distribute_tensor(grads["w"], along)}
            return tx.update(grads, state)[0]
        if way == "unchanged":
            grads = {"w": flm.distribute_tensor(grads["w"], along)}
            updates = tx.update(grads, state, params)[0]
            assert jax.typeof(updates["w"]).sharding == jax.typeof(params["w"]).sharding
            return updates
        more = {"value": value, "grad": grads, "value_fn": loss_of, "x": x}
        return tx.update(grads, state, params, **more)[0]

    along = flm.TensorLayout(("data", "tensor"), grid("explicit"))
    updates = step(params, tx.init(params), jnp.full((D, 1), 0.01))
    assert np.isfinite(updates["w"]).all() and np.abs(updates["w"]).max() > 0
    assert tuple(updates["w"].sharding.spec) == (None, "tensor")


# -------------------------------------------------------------------- one part of it


X = np.linspace(-1.0, 1.0, 8 * 4 * D, dtype=np.float32).reshape(8, 4, D)


class Pair(nnx.Module):
    """Two layers, of which the second sums over a sharded dim."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(D, HIDDEN, kernel_init=counting, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, D, kernel_init=counting, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(self.up(x))


class Stack(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([Pair(rngs) for _ in range(2)])

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def pair_rules(mesh: Any) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh, batch=BATCH)
    layout_map["up/kernel"] = ("fsdp", "tensor")
    layout_map["down/kernel"] = ("tensor", "fsdp")
    layout_map["bias"] = None
    return layout_map


@pytest.fixture
def explicit() -> flm.LayoutMap:
    return pair_rules(grid("explicit"))


def forward(model: Any, x: Any) -> Any:
    return model(x)


def make(kind: Any, layout_map: flm.LayoutMap) -> Any:
    return flm.create(lambda: kind(nnx.Rngs(0)), layout_map)


def test_a_missing_rule_is_named_and_helps(explicit: flm.LayoutMap) -> None:
    model = make(Stack, explicit)
    step = flm.jit(forward, layout_map=explicit)
    with pytest.raises(flm.LayoutError) as caught:
        step(model, X)
    lines = str(caught.value).splitlines()
    assert lines[:4] == [
        "layers/0/down (Linear): on Explicit axes JAX cannot choose the layout of a "
        "result from those of its operands:",
        "  - argument 0 (8,4,32): P(data+fsdp, -, tensor)",
        "  - bias (16,): P(-)",
        "  - kernel (32,16): P(tensor, fsdp)",
    ]
    assert lines[4].startswith("Contracting dimensions are sharded")
    text = "add a rule for the output of this module, which then runs as on Auto axes: "
    assert lines[5].startswith(text) and len(lines) == 6
    code = lines[5].removeprefix(text)
    assert code == (
        """layout_map.activations["layers/.*/down"] = (('data', 'fsdp'), ...)"""
    )
    exec(code, {"layout_map": explicit})
    y = step(model, X)
    assert_lies(y, ROWS, grid("explicit"))
    auto = pair_rules(grid("auto"))
    wanted = flm.jit(forward, layout_map=auto)(make(Stack, auto), X)
    np.testing.assert_allclose(y, wanted, rtol=1e-6)


def test_the_rule_for_a_layer_without_parameters_is_the_layout_of_its_input() -> None:
    mesh = grid("explicit")
    layout_map = flm.LayoutMap(mesh, batch=BATCH)
    drop = linen.Dropout(0.5, deterministic=False)
    x = flm.distribute_tensor(X, flm.TensorLayout((BATCH, None, "tensor"), mesh))
    step = flm.jit(
        lambda key, x: drop.apply({}, x, rngs={"dropout": key}), layout_map=layout_map
    )
    with pytest.raises(flm.LayoutError, match="Dropout") as caught:
        step(jax.random.key(0), x)
    assert str(caught.value).endswith(
        """layout_map.activations["^$"] = (('data', 'fsdp'), None, 'tensor')"""
    )
    layout_map.activations["^$"] = (BATCH, None, "tensor")
    y = step(jax.random.key(0), x)
    assert_lies(y, (BATCH, (), ("tensor",)), mesh)
    wanted = jax.jit(lambda x: drop.apply({}, x, rngs={"dropout": jax.random.key(0)}))
    np.testing.assert_array_equal(y, wanted(X))


def test_outside_of_modules_the_error_has_the_code(explicit: flm.LayoutMap) -> None:
    explicit.activations["down"] = (BATCH, None, "tensor")
    model = make(Pair, explicit)

    def loss_of(model: Any, x: Any, labels: Any) -> Any:
        return language_loss(model(x), labels)

    labels = np.zeros((8, 5), np.int32)
    with pytest.raises(flm.LayoutError) as caught:
        flm.jit(loss_of, layout_map=explicit)(model, X, labels)
    lines = str(caught.value).splitlines()
    name = "optax.softmax_cross_entropy_with_integer_labels"
    assert lines[:3] == [
        f"loss_of, outside of the calls of its modules, in {name}: on Explicit axes "
        "JAX cannot choose the layout of a result from those of its operands:",
        "  - logits (8,4,16): P(data+fsdp, -, tensor)",
        "  - labels (8,4): P(data+fsdp, -)",
    ]
    text = (
        "lay out an operand, x = flm.distribute_tensor(x, layout), or by a rule for "
        "the output of a module; or compute it as on Auto axes (out_sharding is the "
        "layout of the result, jax.P() for a scalar): "
    )
    assert lines[-1].startswith(text)
    code = lines[-1].removeprefix(text)
    assert code == (
        f"jax.sharding.auto_axes({name}, out_sharding=jax.P(('data', 'fsdp')))"
        "(logits, labels)"
    )

    def by_auto_axes(model: Any, x: Any, labels: Any) -> Any:
        values = {"logits": model(x), "labels": labels[:, 1:]}
        return eval(code, {"jax": jax, "optax": optax}, values).mean()

    found = flm.jit(by_auto_axes, layout_map=explicit)(model, X, labels)
    auto = pair_rules(grid("auto"))
    wanted = flm.jit(loss_of, layout_map=auto)(make(Pair, auto), X, labels)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_outside_of_modules_the_error_names_the_function(
    explicit: flm.LayoutMap,
) -> None:
    def product(model: Any, x: Any) -> Any:
        return model.up.kernel[...] @ model.down.kernel[...]

    with pytest.raises(flm.LayoutError) as caught:
        flm.jit(product, layout_map=explicit)(make(Pair, explicit), X)
    text = str(caught.value)
    assert text.startswith(
        "product, outside of the calls of its modules: on Explicit axes JAX cannot "
        "choose the layout of a result: Contracting dimensions are sharded"
    )
    assert text.endswith(
        "lay out an operand, x = flm.distribute_tensor(x, layout), or by a rule for "
        "the output of a module; or compute this part as on Auto axes, "
        "jax.sharding.auto_axes(f, out_sharding=jax.P(…))(x)"
    )


def test_code_for_explicit_axes_needs_a_module_without_a_rule(
    explicit: flm.LayoutMap,
) -> None:
    class Written(Pair):
        def __call__(self, x: Any) -> Any:
            return self.down(self.up(x), out_sharding=jax.P(BATCH))

    model = make(Written, explicit)
    step = flm.jit(forward, layout_map=explicit)
    assert_lies(step(model, X), ROWS, grid("explicit"))
    explicit.activations["^$"] = (BATCH, ...)
    with pytest.raises(ValueError, match="Auto") as caught:
        step(model, X)
    assert caught.value.__notes__[0] == (
        "In the model, which runs as on Auto axes because the rule '^$' lays out its "
        "output: there, no layout can be given for Explicit axes (out_sharding=, "
        "reshard), and a value that the module closes over must be an argument or in "
        "a Variable; without the rule it runs on Explicit axes"
    )


def test_every_output_needs_a_layout(explicit: flm.LayoutMap) -> None:
    class Several(Pair):
        def __call__(self, x: Any, mask: Any = None, name: str = "") -> Any:
            y = self.up(x)
            return {"y": self.down(y), "mask": mask, "mean": y.mean(), "n": name}, y

    model = make(Several, explicit)
    explicit.activations["^$"] = flm.Rule("^$", (BATCH, None, None), rank="skip")
    mask = flm.distribute_tensor(
        np.ones((4, 8)), flm.TensorLayout((None, "tensor"), explicit.device_mesh)
    )
    step = flm.jit(
        lambda model, x, mask: model(x, mask, "a")[0]["mask"], layout_map=explicit
    )
    assert_lies(step(model, X, mask), ((), ("tensor",)), grid("explicit"))

    class Wrong(Pair):
        def __call__(self, x: Any) -> Any:
            y = self.up(x)
            return self.down(y), y[0]

    with pytest.raises(flm.LayoutError) as caught:
        flm.jit(forward, layout_map=explicit)(make(Wrong, explicit), X)
    assert str(caught.value) == (
        "no rule lays out the output '1' (4,32) of a module that has a rule and so "
        "runs as on Auto axes, where outputs have no layouts of their own: "
        """layout_map.activations[".*"] = (('data', 'fsdp'), ...)"""
    )


@pytest.mark.parametrize("way", ["checkpoint", "grad", "vmap", "scan"])
def test_inside_of_transformations_of_jax(way: str) -> None:
    """The module is of the outer level of tracing."""

    def inside(model: Any, x: Any) -> Any:
        if way == "checkpoint":
            return jax.checkpoint(lambda x: model(x))(x)
        if way == "grad":
            return jax.grad(lambda x: (model(x) ** 2).sum())(x)
        if way == "vmap":
            return jax.vmap(lambda x: model(x), in_axes=1, out_axes=1)(x)
        return jax.lax.scan(lambda x, _: (model(x), None), x, None, length=2)[0]

    found = []
    for kind in ("auto", "explicit"):
        layout_map = pair_rules(grid(kind))
        layout_map.activations["^$"] = (BATCH, ...)
        found.append(flm.jit(inside, layout_map=layout_map)(make(Pair, layout_map), X))
    assert_lies(found[1], ROWS, grid("explicit"))
    np.testing.assert_allclose(*found, rtol=1e-6)


class Changing(nnx.Module):
    """Changes, makes and reads Variables, arrays and random keys."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(D, D, kernel_init=counting, rngs=rngs)
        self.total = nnx.Variable(jnp.zeros((8, D)))
        self.table = nnx.data(jnp.arange(float(D)))
        self.cache: Any = nnx.data(None)
        self.fails = False

    def __call__(self, x: Any, rngs: nnx.Rngs) -> Any:
        y = self.linear(x) + self.table
        self.total[...] += y.sum(1)
        if self.cache is None:
            self.cache = nnx.Variable(y)
        if self.fails:
            raise RuntimeError("on purpose")
        return y + jax.random.normal(rngs.params(), y.shape)


def test_variables_of_a_module_change_in_it() -> None:
    found = []
    for kind in ("auto", "explicit"):
        layout_map = flm.LayoutMap(grid(kind), batch=BATCH, strict=False)
        layout_map["linear/kernel"] = ("fsdp", "tensor")
        layout_map["total"] = (BATCH, None)
        layout_map["cache"] = (BATCH, None, "tensor")
        layout_map.activations["^$"] = (BATCH, ...)
        model, rngs = make(Changing, layout_map), layout_map.place(nnx.Rngs(3))
        step = flm.jit(
            lambda model, rngs, x: model(x, rngs),
            layout_map=layout_map,
            donate_argnames="model",
        )
        kernel = model.linear.kernel[...]
        step(model, rngs, X)
        y = step(model, rngs, X)
        assert model.linear.kernel[...] is kernel and not kernel.is_deleted()
        assert model.total[...].sharding.spec == jax.P(BATCH)
        assert model.cache[...].sharding.spec == jax.P(BATCH, None, "tensor")
        mesh: Any = layout_map.device_mesh
        assert model.total[...].sharding.mesh.axis_types == mesh.axis_types
        assert int(rngs.params.count[...]) == 2
        found.append((y, model.total[...], model.cache[...]))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_a_module_that_fails_is_as_before(explicit: flm.LayoutMap) -> None:
    layout_map = flm.LayoutMap(grid("explicit"), batch=BATCH, strict=False)
    layout_map.activations["^$"] = (BATCH, ...)
    model, rngs = make(Changing, layout_map), layout_map.place(nnx.Rngs(3))
    model.fails = True
    mesh: Any = layout_map.device_mesh
    before = jax.tree.leaves(nnx.state(model))
    x = flm.distribute_tensor(X, flm.TensorLayout((BATCH, ...), mesh))
    with jax.set_mesh(mesh.jax_mesh), flm.activation_scope(layout_map, model):
        with pytest.raises(RuntimeError, match="on purpose"):
            model(x, rngs)
        after = nnx.state(model)
        del after["cache"]
        assert all(map(lambda a, b: a is b, jax.tree.leaves(after)[:2], before[:2]))
        model.fails = False
        y = model(x, rngs)
    assert jax.typeof(y).sharding.spec == jax.P(BATCH, None, None)


@pytest.mark.parametrize("kind", ["explicit", "mixed: batch explicit"])
def test_distribute_tensor_inside_of_auto_axes(kind: str) -> None:
    mesh: Any = grid(kind)
    layout = flm.TensorLayout((BATCH, None, "tensor"), mesh)
    x = flm.distribute_tensor(X, layout)

    @jax.sharding.auto_axes(out_sharding=jax.P(BATCH))
    def doubled(x: Any) -> Any:
        return flm.distribute_tensor(2 * x, layout)

    with jax.set_mesh(mesh.jax_mesh):
        for function in (doubled, jax.jit(doubled)):
            np.testing.assert_array_equal(function(x), 2 * X)
