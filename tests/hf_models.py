"""NNX decoders equivalent to Llama, Gemma and GPT-2 of `transformers`."""

import dataclasses
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

GOLDEN = Path(__file__).parent / "golden"
DIM, HEADS, HEAD_DIM, LAYERS, VOCABULARY = 32, 4, 8, 2, 64


@dataclasses.dataclass(frozen=True)
class Style:
    """What tells the models apart."""

    kv_heads: int = 2
    hidden: int = 64
    one_plus: bool = False  # norms multiply by 1 + scale, and the embedding is scaled
    post_norms: bool = False
    layer_norm: bool = False  # with biases everywhere, learned positions, and no gate
    tied: bool = True
    scale: float = HEAD_DIM**-0.5
    attention_cap: float = math.inf
    logits_cap: float = math.inf
    windows: tuple[int, ...] = (VOCABULARY,) * LAYERS


STYLES = {
    "llama": Style(tied=False),
    "gemma": Style(one_plus=True),
    "gemma2": Style(
        one_plus=True,
        post_norms=True,
        scale=0.25,
        attention_cap=50.0,
        logits_cap=30.0,
        windows=(4, VOCABULARY),
    ),
    "gpt2": Style(kv_heads=4, hidden=128, layer_norm=True),
}


class Norm(nnx.Module):
    """RMSNorm, of Llama or Gemma."""

    def __init__(self, one_plus: bool):
        self.scale = nnx.Param(jnp.ones(DIM))
        self.offset = float(one_plus)

    def __call__(self, x: jax.Array) -> jax.Array:
        mean = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(mean + 1e-6) * (self.offset + self.scale[...])


def norm(style: Style, rngs: nnx.Rngs) -> Any:
    if style.layer_norm:
        return nnx.LayerNorm(DIM, epsilon=1e-5, rngs=rngs)
    return Norm(style.one_plus)


def capped(x: jax.Array, cap: float) -> jax.Array:
    return x if cap == math.inf else jnp.tanh(x / cap) * cap


def rotate(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None, None] / 10_000 ** (jnp.arange(half) / half)
    (a, b), sin, cos = jnp.split(x, 2, axis=-1), jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Attention(nnx.Module):
    def __init__(self, style: Style, flat: bool, rngs: nnx.Rngs):
        self.style, self.flat = style, flat
        general = partial(nnx.LinearGeneral, use_bias=style.layer_norm, rngs=rngs)

        def heads(count: int) -> Any:
            return (count * HEAD_DIM,) if flat else (count, HEAD_DIM)

        self.query = general(DIM, heads(HEADS))
        self.key = general(DIM, heads(style.kv_heads))
        self.value = general(DIM, heads(style.kv_heads))
        self.out = general(heads(HEADS), DIM, axis=(-1,) if flat else (-2, -1))

    def __call__(self, x: jax.Array, window: Any) -> jax.Array:
        style, shape = self.style, (*x.shape[:2], -1, HEAD_DIM)
        layers = (self.query, self.key, self.value)
        query, key, value = (layer(x).reshape(shape) for layer in layers)
        if not style.layer_norm:
            query, key = rotate(query), rotate(key)
        times = HEADS // style.kv_heads
        key, value = (jnp.repeat(y, times, axis=2) for y in (key, value))
        scores = jnp.einsum("bihd,bjhd->bhij", query, key) * style.scale
        scores = capped(scores, style.attention_cap)
        at = jnp.arange(x.shape[1])
        back = at[:, None] - at[None]
        scores = jnp.where((back >= 0) & (back < window), scores, -jnp.inf)
        made = jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(scores), value)
        return self.out(made.reshape(*x.shape[:2], -1) if self.flat else made)


class Mlp(nnx.Module):
    def __init__(self, style: Style, rngs: nnx.Rngs):
        linear = partial(nnx.Linear, use_bias=style.layer_norm, rngs=rngs)
        if not style.layer_norm:
            self.gate = linear(DIM, style.hidden)
        self.up, self.down = linear(DIM, style.hidden), linear(style.hidden, DIM)
        self.style = style

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.style.layer_norm:
            return self.down(nnx.gelu(self.up(x)))
        act = nnx.gelu if self.style.one_plus else nnx.silu
        return self.down(act(self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    def __init__(self, style: Style, flat: bool, rngs: nnx.Rngs):
        self.attention_norm, self.mlp_norm = norm(style, rngs), norm(style, rngs)
        self.attention, self.mlp = Attention(style, flat, rngs), Mlp(style, rngs)
        self.attention_post_norm = norm(style, rngs) if style.post_norms else None
        self.mlp_post_norm = norm(style, rngs) if style.post_norms else None

    def __call__(self, x: jax.Array, window: Any) -> jax.Array:
        y = self.attention(self.attention_norm(x), window)
        x = x + (self.attention_post_norm(y) if self.attention_post_norm else y)
        y = self.mlp(self.mlp_norm(x))
        return x + (self.mlp_post_norm(y) if self.mlp_post_norm else y)


class Decoder(nnx.Module):
    """A decoder; `scanned` stacks its layers, `flat` kernels have no dim for heads."""

    def __init__(self, style: str, scanned: bool, flat: bool, rngs: nnx.Rngs):
        own = self.style = STYLES[style]
        self.embed = nnx.Embed(VOCABULARY, DIM, rngs=rngs)
        if own.layer_norm:
            self.positions = nnx.Embed(64, DIM, rngs=rngs)
        if scanned:
            make = nnx.vmap(lambda rngs: Layer(own, flat, rngs))
            self.layers: Any = nnx.split_rngs(splits=LAYERS)(make)(rngs)
        else:
            self.layers = nnx.List(Layer(own, flat, rngs) for _ in range(LAYERS))
        self.norm = norm(own, rngs)
        if not own.tied:
            self.lm_head = nnx.Linear(DIM, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        if self.style.one_plus:
            x = x * math.sqrt(DIM)
        if self.style.layer_norm:
            x = x + self.positions(jnp.arange(tokens.shape[1]))
        if isinstance(self.layers, nnx.List):
            for layer, window in zip(self.layers, self.style.windows, strict=True):
                x = layer(x, window)
        else:
            windows = jnp.array(self.style.windows)
            axes: Any = (nnx.Carry, 0, 0)
            scan = nnx.scan(in_axes=axes, out_axes=nnx.Carry)
            x = scan(lambda x, layer, window: layer(x, window))(x, self.layers, windows)
        x = self.norm(x)
        logits = self.embed.attend(x) if self.style.tied else self.lm_head(x)
        return capped(logits, self.style.logits_cap)


def golden(name: str) -> tuple[np.ndarray, np.ndarray]:
    """The tokens, and PyTorch's logits of them."""
    run = json.loads((GOLDEN / f"hf_{name}" / "run.json").read_text())
    return np.array(run["tokens"]), np.array(run["logits"], np.float32)
