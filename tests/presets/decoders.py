"""A small decoder of Flax's own layers, with what the dense families differ in."""

from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

D, VOCAB, HEADS, SIZE, HIDDEN, LENGTH = 32, 64, 8, 8, 64, 12
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (8, LENGTH + 1), np.int32)


def linear(fan_in: Any, fan_out: Any, rngs: nnx.Rngs, bias: bool = False) -> Any:
    axis = tuple(range(-len(fan_in), 0)) if isinstance(fan_in, tuple) else -1
    return nnx.LinearGeneral(fan_in, fan_out, axis=axis, use_bias=bias, rngs=rngs)


class Attention(nnx.Module):
    def __init__(self, kv_heads: int, bias: bool, norms: bool, rngs: nnx.Rngs):
        self.query = linear(D, (HEADS, SIZE), rngs, bias)
        self.key = linear(D, (kv_heads, SIZE), rngs, bias)
        self.value = linear(D, (kv_heads, SIZE), rngs, bias)
        self.out = linear((HEADS, SIZE), D, rngs)
        self.query_norm = nnx.RMSNorm(SIZE, rngs=rngs) if norms else None
        self.key_norm = nnx.RMSNorm(SIZE, rngs=rngs) if norms else None

    def __call__(self, x: jax.Array) -> jax.Array:
        query, key = self.query(x), self.key(x)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        mixed = jax.nn.dot_product_attention(query, key, self.value(x), is_causal=True)
        return self.out(mixed)


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.gate, self.up = linear(D, HIDDEN, rngs), linear(D, HIDDEN, rngs)
        self.down = linear(HIDDEN, D, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    def __init__(self, kv_heads: int, bias: bool, norms: bool, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(D, rngs=rngs)
        self.attention = Attention(kv_heads, bias, norms, rngs)
        self.mlp_norm, self.mlp = nnx.RMSNorm(D, rngs=rngs), MLP(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nnx.Module):
    """One layer.

    Args:
        kv_heads: heads of keys and values.
        bias: of queries, keys and values, as in Qwen2.
        norms: of queries and keys, as in Qwen3.
        tied: whether the head is the embedding.
    """

    def __init__(
        self,
        kv_heads: int = 4,
        bias: bool = False,
        norms: bool = False,
        tied: bool = False,
    ):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(VOCAB, D, rngs=rngs)
        self.layers = nnx.List([Layer(kv_heads, bias, norms, rngs)])
        self.norm = nnx.RMSNorm(D, rngs=rngs)
        self.lm_head = None if tied else linear(D, VOCAB, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.embed.attend(x) if self.lm_head is None else self.lm_head(x)


def train_step(model: Any, optimizer: Any, tokens: Any) -> Any:
    def loss_of(model: Any) -> Any:
        losses = optax.softmax_cross_entropy_with_integer_labels(
            model(tokens[:, :-1]), tokens[:, 1:]
        )
        return losses.mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss
