"""A Llama-like decoder, with sizes of 1B to 405B, rules and a training step.

Nothing here needs devices: the large sizes are only traced.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import flax_layoutmap as flm


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a decoder, and how it is written.

    Attributes:
        scanned: whether the layers are stacked, for `nnx.scan`, or in a list.
        named: whether the model asks for the layout `residual`, which only `flm.jit`
            knows; without, any `jit` runs it.
    """

    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int = 128256
    dtype: Any = jnp.bfloat16
    scanned: bool = True
    named: bool = True

    def residual(self, x: jax.Array) -> jax.Array:
        """The residual stream, in its layout."""
        return flm.distribute_tensor(x, "residual") if self.named else x

    def options(self, rngs: nnx.Rngs) -> dict[str, Any]:
        """What every layer is made with."""
        return {"dtype": self.dtype, "param_dtype": self.dtype, "rngs": rngs}


CONFIGS = {
    "1B": Config(dim=2048, layers=16, heads=32, kv_heads=8, hidden=8192),
    "8B": Config(dim=4096, layers=32, heads=32, kv_heads=8, hidden=14336),
    "70B": Config(dim=8192, layers=80, heads=64, kv_heads=8, hidden=28672),
    "405B": Config(dim=16384, layers=126, heads=128, kv_heads=8, hidden=53248),
}


def rotate(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 1e4 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


class Attention(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        def linear(fan_in: Any, fan_out: Any, axis: Any = -1) -> nnx.LinearGeneral:
            options = config.options(rngs)
            return nnx.LinearGeneral(
                fan_in, fan_out, axis=axis, use_bias=False, **options
            )

        heads = (config.heads, config.dim // config.heads)
        kv_heads = (config.kv_heads, config.dim // config.heads)
        self.query = linear(config.dim, heads)
        self.key = linear(config.dim, kv_heads)
        self.value = linear(config.dim, kv_heads)
        self.out = linear(heads, config.dim, (-2, -1))

    def __call__(self, x: jax.Array) -> jax.Array:
        query, key = rotate(self.query(x)), rotate(self.key(x))
        mixed = jax.nn.dot_product_attention(query, key, self.value(x), is_causal=True)
        return self.out(mixed)


class Block(nnx.Module):
    """Nine arrays."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        options, self.config = config.options(rngs), config
        wide = {"use_bias": False, **options}
        self.attention = Attention(config, rngs)
        self.gate = nnx.Linear(config.dim, config.hidden, **wide)
        self.up = nnx.Linear(config.dim, config.hidden, **wide)
        self.down = nnx.Linear(config.hidden, config.dim, **wide)
        self.norm1 = nnx.RMSNorm(config.dim, **options)
        self.norm2 = nnx.RMSNorm(config.dim, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.config.residual(x + self.attention(self.norm1(x)))
        y = self.norm2(x)
        y = self.down(nnx.silu(self.gate(y)) * self.up(y))
        return self.config.residual(x + y)


class Decoder(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        options, self.config = config.options(rngs), config
        self.embed = nnx.Embed(config.vocab, config.dim, **options)
        self.norm = nnx.RMSNorm(config.dim, **options)
        self.head = nnx.Linear(config.dim, config.vocab, use_bias=False, **options)

        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap
        def make_stack(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs)

        if config.scanned:
            self.layers: Any = make_stack(rngs)
        else:
            self.layers = nnx.List(Block(config, rngs) for _ in range(config.layers))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.config.residual(self.embed(tokens))

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def through(x: jax.Array, block: Block) -> jax.Array:
            return block(x)

        if self.config.scanned:
            x = through(x, self.layers)
        else:
            for block in self.layers:
                x = block(x)
        return self.head(self.norm(x))


# ------------------------------------------------------------------ rules and a step

RULES = flm.LayoutMap(batch=("data", "fsdp"))
RULES["embed/embedding"] = ("tensor", "fsdp")
RULES["head/kernel"] = ("fsdp", "tensor")
RULES["(query|key|value)/kernel"] = (None, "fsdp", "tensor", None)
RULES["out/kernel"] = (None, "tensor", None, "fsdp")
RULES["(gate|up)/kernel"] = (None, "fsdp", "tensor")
RULES["down/kernel"] = (None, "tensor", "fsdp")
RULES["norm"] = None
RULES.names["residual"] = (("data", "fsdp"), None, None)


def step(model: Decoder, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    def loss_of(model: Decoder) -> jax.Array:
        logits = model(tokens[:, :-1]).astype(jnp.float32)
        wanted = tokens[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, wanted).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


train_step = flm.jit(step, layout_map=RULES, donate_argnames=("model", "optimizer"))


def abstract_state(config: Config) -> tuple[Decoder, nnx.Optimizer]:
    def make() -> tuple[Decoder, nnx.Optimizer]:
        model = Decoder(config, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(3e-4), wrt=nnx.Param)

    return nnx.eval_shape(make)
