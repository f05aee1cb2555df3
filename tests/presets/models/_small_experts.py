"""A small decoder of Flax's own layers, with experts as each family has them."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

VOCAB, DIM, HEADS, KV_HEADS, SIZE, RANK, EXPERTS, HIDDEN = 64, 16, 4, 2, 8, 8, 4, 24


def attend(query: Any, key: Any, value: Any, sinks: Any) -> jax.Array:
    """Causal attention; the sink of a head is a score for no position."""
    scores = jnp.einsum("bthk,bshk->bhts", query, key) / SIZE**0.5
    scores = jnp.where(jnp.tri(query.shape[1], dtype=bool), scores, -1e30)
    none = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, none], -1))[..., :-1]
    return jnp.einsum("bhts,bshk->bthk", weights, value)


class Attention(nnx.Module):
    def __init__(self, family: str, rngs: nnx.Rngs) -> None:
        linear = partial(nnx.LinearGeneral, use_bias=family == "gpt_oss", rngs=rngs)
        self.query = linear(DIM, (HEADS, SIZE))
        self.key = linear(DIM, (KV_HEADS, SIZE))
        self.value = linear(DIM, (KV_HEADS, SIZE))
        self.out = linear((HEADS, SIZE), DIM, axis=(-2, -1))
        if family == "gpt_oss":
            self.sinks = nnx.Param(jnp.linspace(-1.0, 1.0, HEADS))
        if family == "qwen3_moe":
            self.query_norm = nnx.RMSNorm(SIZE, rngs=rngs)
            self.key_norm = nnx.RMSNorm(SIZE, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        query, key, value = self.query(x), self.key(x), self.value(x)
        if hasattr(self, "query_norm"):
            query, key = self.query_norm(query), self.key_norm(key)
        sinks = self.sinks if hasattr(self, "sinks") else jnp.full(HEADS, -1e30)
        key, value = (jnp.repeat(one, HEADS // KV_HEADS, 2) for one in (key, value))
        return self.out(attend(query, key, value, sinks))


class LatentAttention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        linear = partial(nnx.LinearGeneral, use_bias=False, rngs=rngs)
        self.q_a, self.kv_a = linear(DIM, RANK), linear(DIM, RANK)
        self.q_a_norm = nnx.RMSNorm(RANK, rngs=rngs)
        self.kv_a_norm = nnx.RMSNorm(RANK, rngs=rngs)
        self.q_b = linear(RANK, (HEADS, SIZE))
        self.kv_b = linear(RANK, (HEADS, 2 * SIZE))
        self.out = linear((HEADS, SIZE), DIM, axis=(-2, -1))

    def __call__(self, x: jax.Array) -> jax.Array:
        query = self.q_b(self.q_a_norm(self.q_a(x)))
        key, value = jnp.split(self.kv_b(self.kv_a_norm(self.kv_a(x))), 2, -1)
        return self.out(attend(query, key, value, jnp.full(HEADS, -1e30)))


class Experts(nnx.Module):
    def __init__(self, bias: bool, rngs: nnx.Rngs) -> None:
        def linear(inputs: int, outputs: int, of: str) -> nnx.Einsum:
            shapes = (EXPERTS, inputs, outputs), (EXPERTS, outputs) if bias else None
            return nnx.Einsum(of, *shapes, rngs=rngs)

        self.gate = linear(DIM, HIDDEN, "btd,edf->betf")
        self.up = linear(DIM, HIDDEN, "btd,edf->betf")
        self.down = linear(HIDDEN, DIM, "betf,efd->betd")

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    def __init__(self, family: str, rngs: nnx.Rngs) -> None:
        latent, bias = family == "deepseek_v3", family == "gpt_oss"
        norm, linear = partial(nnx.RMSNorm, DIM), partial(nnx.Linear, use_bias=False)
        self.attention_norm, self.mlp_norm = norm(rngs=rngs), norm(rngs=rngs)
        self.attention = LatentAttention(rngs) if latent else Attention(family, rngs)
        self.router = nnx.Linear(DIM, EXPERTS, use_bias=bias, rngs=rngs)
        self.experts = Experts(bias, rngs)
        if latent:
            self.shared = nnx.Dict(
                up=linear(DIM, HIDDEN, rngs=rngs), down=linear(HIDDEN, DIM, rngs=rngs)
            )

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        y = self.mlp_norm(x)
        scores = self.router(y)
        best = scores >= jax.lax.top_k(scores, 2)[0][..., -1:]
        weights = jax.nn.softmax(jnp.where(best, scores, -1e30))
        x = x + jnp.einsum("bte,betd->btd", weights, self.experts(y))
        if hasattr(self, "shared"):
            x = x + self.shared["down"](nnx.silu(self.shared["up"](y)))
        return x


class Decoder(nnx.Module):
    def __init__(self, family: str, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.layers = nnx.List([Block(family, rngs)])
        self.norm = nnx.RMSNorm(DIM, rngs=rngs)
        self.lm_head = nnx.Linear(DIM, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))
