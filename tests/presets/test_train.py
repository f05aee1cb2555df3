"""A train step by a preset on eight devices is the step on one, and lies as it says."""

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from shards import Dims, assert_lies, lies, on_axes_of

import flax_layoutmap as flm

pytestmark = pytest.mark.slow

VOCAB, D, HEADS, HIDDEN, EXPERTS = 64, 32, 8, 64, 4
# With so large an epsilon a step is a smooth function of the gradients, also of those
# that are nearly 0, and differs as little as they do.
ADAMW = optax.adamw(1e-2, eps=1e-3)


class MLP(nnx.Module):
    """Gated, as in Llama."""

    def __init__(self, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.gate, self.up = linear(D, HIDDEN), linear(D, HIDDEN)
        self.down = linear(HIDDEN, D)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Experts(nnx.Module):
    """Each expert sees each token; the two best of a token count."""

    def __init__(self, rngs: nnx.Rngs):
        def linear(fan_in: int, fan_out: int, formula: str) -> nnx.Einsum:
            return nnx.Einsum(formula, (EXPERTS, fan_in, fan_out), rngs=rngs)

        self.router = nnx.Linear(D, EXPERTS, use_bias=False, rngs=rngs)
        self.experts = nnx.Dict(
            gate=linear(D, HIDDEN, "btd,edf->betf"),
            up=linear(D, HIDDEN, "btd,edf->betf"),
            down=linear(HIDDEN, D, "betf,efd->betd"),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        scores, experts = self.router(x), self.experts
        best = scores >= jax.lax.top_k(scores, 2)[0][..., -1:]
        weights = jax.nn.softmax(jnp.where(best, scores, -1e30))
        made = experts["down"](nnx.silu(experts["gate"](x)) * experts["up"](x))
        return jnp.einsum("bte,betd->btd", weights, made)


class Layer(nnx.Module):
    def __init__(self, mlp: Callable[..., Any], rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(D, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, D, use_bias=False, decode=False, rngs=rngs
        )
        self.mlp_norm, self.mlp = nnx.RMSNorm(D, rngs=rngs), mlp(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nnx.Module):
    """One layer of Llama, or of Mixtral."""

    def __init__(self, mlp: Callable[..., Any], rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, D, rngs=rngs)
        self.layers = nnx.List([Layer(mlp, rngs)])
        self.norm = nnx.RMSNorm(D, rngs=rngs)
        self.lm_head = nnx.Linear(D, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


BATCH = np.random.default_rng(0)
TOKENS = BATCH.integers(0, VOCAB, (8, 12), np.int32)
F, T, E, BOTH = ("fsdp",), ("tensor",), ("expert",), ("fsdp", "expert")
# What a path ends with (a pattern), and the axes of each dim; all else is replicated.
DIMS: dict[str, Dims] = {
    "embed/embedding": (T, BOTH),
    "(query|key|value)/kernel": (BOTH, T, ()),
    "out/kernel": (T, (), BOTH),
    "mlp/(gate|up)/kernel": (BOTH, T),
    "mlp/down/kernel": (T, BOTH),
    "router/kernel": (BOTH, ()),
    "experts/(gate|up)/kernel": (E, F, T),
    "experts/down/kernel": (E, T, F),
    "lm_head/kernel": (BOTH, T),
}
# Family → its model, what that takes, and the mesh.
CASES: dict[str, tuple[Callable[[nnx.Rngs], nnx.Module], np.ndarray, str]] = {
    "llama": (functools.partial(Decoder, MLP), TOKENS, "fsdp=2,tensor=4"),
    "mixtral": (
        functools.partial(Decoder, Experts),
        TOKENS,
        "fsdp=2,expert=2,tensor=2",
    ),
}


def train_step(model: Any, optimizer: Any, inputs: Any) -> Any:
    def mean_loss(model: Any) -> jax.Array:
        made = model(inputs)
        wanted = jnp.linspace(-1, 1, made.shape[-1])
        return jnp.mean((made - wanted) ** 2)

    loss, gradients = nnx.value_and_grad(mean_loss)(model)
    optimizer.update(model, gradients)
    return loss


def leaves_of(node: Any) -> dict[str, Any]:
    """Path → array."""
    flat = nnx.to_flat_state(nnx.state(node))
    return {"/".join(map(str, path)): leaf.get_value() for path, leaf in flat}


def dims_of(path: str, array: Any) -> Dims:
    dims = [dims for end, dims in DIMS.items() if re.search(f"(^|/){end}$", path)]
    return dims[0] if dims else ((),) * array.ndim


@functools.cache
def on_one_device(family: str) -> tuple[Any, Any, Any, Any]:
    """Parameters before a step; these and the optimizer after it; and the loss."""
    make, inputs, _ = CASES[family]
    model = make(nnx.Rngs(0))
    before = jax.tree.map(np.asarray, leaves_of(model))
    optimizer = nnx.Optimizer(model, ADAMW, wrt=nnx.Param)
    loss = nnx.jit(train_step)(model, optimizer, inputs)
    after = (jax.tree.map(np.asarray, leaves_of(node)) for node in (model, optimizer))
    return before, *after, loss


@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "explicit"), ("mixtral", "auto")],
)
def test_a_step_on_8_devices_is_that_on_one(family: str, kind: str) -> None:
    make, inputs, axes = CASES[family]
    mesh = flm.DeviceMesh(axes, axis_types=kind)
    layout_map = flm.presets.load(family, mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("error", flm.LayoutWarning)
        model = flm.create(lambda: make(nnx.Rngs(0)), layout_map)
        optimizer = flm.create_optimizer(model, ADAMW, layout_map, wrt=nnx.Param)
        loss = flm.jit(train_step, layout_map=layout_map)(model, optimizer, inputs)
    before, wanted, state, wanted_loss = on_one_device(family)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    for node, values in ((model, wanted), (optimizer, state)):
        assert leaves_of(node).keys() == values.keys()
        for path, array in leaves_of(node).items():
            assert_lies(array, on_axes_of(mesh, dims_of(path, array)), mesh)
            np.testing.assert_allclose(
                array, values[path], rtol=1e-4, atol=1e-5, err_msg=path
            )
    for path in before:  # a step that changes nothing would show nothing
        assert np.abs(wanted[path] - before[path]).max() > 1e-4, path


def test_the_comparison_of_shards_finds_another_layout() -> None:
    """The control: one rule of the preset is changed."""
    mesh = flm.DeviceMesh(CASES["mixtral"][2])
    layout_map = flm.presets.mixtral(mesh)
    layout_map["experts/down/kernel"] = (None, "tensor", "fsdp")
    model = flm.create(lambda: CASES["mixtral"][0](nnx.Rngs(0)), layout_map)
    arrays = leaves_of(model).items()
    wrong = {
        path for path, array in arrays if not lies(array, dims_of(path, array), mesh)
    }
    assert wrong == {"layers/0/mlp/experts/down/kernel"}


def test_outputs_of_layers_lie_as_the_activation_rules_say() -> None:
    make, tokens, axes = CASES["llama"]
    mesh = flm.DeviceMesh(axes)
    layout_map = flm.presets.llama(mesh)
    model: Any = flm.create(lambda: make(nnx.Rngs(0)), layout_map)
    x = model.embed(tokens)
    with flm.activation_scope(layout_map, model):
        residual, query = model.layers[0](x), model.layers[0].attention.query(x)
    assert_lies(residual, (F, (), ()), mesh)
    assert_lies(query, (F, (), T, ()), mesh)


@pytest.mark.parametrize("family", CASES)
def test_the_model_is_of_its_family(family: str) -> None:
    model = nnx.eval_shape(lambda: CASES[family][0](nnx.Rngs(0)))
    assert flm.presets.family_of(model) == family
