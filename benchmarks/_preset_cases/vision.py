"""Encoders and diffusion models of two layers with published sizes, and their tables.

A table says for each role what its source says, with the source's axes renamed: what
splits batch and parameters is `fsdp`, the other `tensor`. Names of layers are those of
the presets.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from _preset_cases import Case, Table
from _preset_cases.dense import BFLOAT16, linear


def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def norm(size: int, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(size, rngs=rngs, **BFLOAT16)


def dense(inputs: int, outputs: int, rngs: nnx.Rngs, bias: bool = True) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, use_bias=bias, rngs=rngs, **BFLOAT16)


def conv(
    inputs: int, outputs: int, size: Any, rngs: nnx.Rngs, strides: Any = 1
) -> nnx.Conv:
    return nnx.Conv(inputs, outputs, size, strides, rngs=rngs, **BFLOAT16)


def learned(rngs: nnx.Rngs, *sizes: int) -> nnx.Param:
    draw = nnx.initializers.normal(0.02)
    return nnx.Param(draw(rngs.params(), sizes, jnp.bfloat16))


# ------------------------------------------------------- ViT, SigLIP, CLIP, Whisper


class Attention(nnx.Module):
    """Attention with biases; to another sequence where there is one."""

    def __init__(self, d: int, heads: int, rngs: nnx.Rngs):
        split = (heads, d // heads)
        self.query = linear(d, split, rngs, True)
        self.key = linear(d, split, rngs, True)
        self.value = linear(d, split, rngs, True)
        self.out = linear(split, d, rngs, True)

    def __call__(self, x: jax.Array, other: jax.Array, causal: bool) -> jax.Array:
        heads = self.query(x), self.key(other), self.value(other)
        return self.out(jax.nn.dot_product_attention(*heads, is_causal=causal))


class Layer(nnx.Module):
    """A layer of an encoder, or of a decoder that attends to an encoder."""

    def __init__(self, d: int, heads: int, cross: bool, rngs: nnx.Rngs):
        self.layer_norm1, self.layer_norm2 = norm(d, rngs), norm(d, rngs)
        self.self_attn = Attention(d, heads, rngs)
        self.fc1, self.fc2 = dense(d, 4 * d, rngs), dense(4 * d, d, rngs)
        self.encoder_attn = Attention(d, heads, rngs) if cross else None
        self.encoder_attn_layer_norm = norm(d, rngs) if cross else None

    def __call__(self, x: jax.Array, other: Any = None, causal: bool = False) -> Any:
        y = self.layer_norm1(x)
        x = x + self.self_attn(y, y, causal)
        if self.encoder_attn is not None and self.encoder_attn_layer_norm is not None:
            x = x + self.encoder_attn(self.encoder_attn_layer_norm(x), other, False)
        return x + self.fc2(nnx.gelu(self.fc1(self.layer_norm2(x))))


class Tower(nnx.Module):
    def __init__(self, d: int, heads: int, rngs: nnx.Rngs, cross: bool = False):
        self.layers = nnx.List(Layer(d, heads, cross, rngs) for _ in range(2))
        self.final_layer_norm = norm(d, rngs)

    def __call__(self, x: jax.Array, other: Any = None, causal: bool = False) -> Any:
        for layer in self.layers:
            x = layer(x, other, causal)
        return self.final_layer_norm(x)


class Vision(nnx.Module):
    """Patches, positions and layers of ViT; classes where there are some."""

    def __init__(self, sizes: dict[str, Any], rngs: nnx.Rngs):
        d, patch = sizes["d"], (sizes["patch"], sizes["patch"])
        self.patch_embedding = conv(3, d, patch, rngs, sizes["patch"])
        self.position_embedding = learned(rngs, sizes["patches"], d)
        self.encoder = Tower(d, sizes["heads"], rngs)
        classes = sizes.get("classes")
        self.head = dense(d, classes, rngs) if classes else None

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patch_embedding(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1]) + self.position_embedding[...]
        x = self.encoder(x)
        return x if self.head is None else self.head(x.mean(1))


class Clip(nnx.Module):
    """Two towers, and a product of all images with all texts."""

    def __init__(self, sizes: dict[str, Any], rngs: nnx.Rngs):
        text, common = sizes["text"], sizes["common"]
        self.vision = Vision(sizes, rngs)
        self.token_embedding = nnx.Embed(sizes["vocab"], text, rngs=rngs, **BFLOAT16)
        self.position_embedding = learned(rngs, sizes["length"], text)
        self.text = Tower(text, sizes["text_heads"], rngs)
        self.text_projection = dense(text, common, rngs, bias=False)
        self.visual_projection = dense(sizes["d"], common, rngs, bias=False)

    def __call__(self, images: jax.Array, tokens: jax.Array) -> jax.Array:
        x = self.token_embedding(tokens) + self.position_embedding[...]
        texts = self.text_projection(self.text(x, causal=True)[:, -1])
        seen = self.visual_projection(self.vision(images)[:, 0])
        unit = [one / jnp.linalg.norm(one, axis=-1)[:, None] for one in (seen, texts)]
        return unit[0] @ unit[1].T


class Whisper(nnx.Module):
    def __init__(self, sizes: dict[str, Any], rngs: nnx.Rngs):
        d, heads = sizes["d"], sizes["heads"]
        self.conv1 = conv(sizes["mel"], d, (3,), rngs)
        self.conv2 = conv(d, d, (3,), rngs, 2)
        self.embed_tokens = nnx.Embed(sizes["vocab"], d, rngs=rngs, **BFLOAT16)
        self.embed_positions = nnx.Embed(448, d, rngs=rngs, **BFLOAT16)
        self.encoder = Tower(d, heads, rngs)
        self.decoder = Tower(d, heads, rngs, cross=True)

    def __call__(self, mel: jax.Array, tokens: jax.Array) -> jax.Array:
        heard = self.encoder(nnx.gelu(self.conv2(nnx.gelu(self.conv1(mel)))))
        x = self.embed_tokens(tokens)
        x = x + self.embed_positions(jnp.arange(tokens.shape[1]))
        return self.embed_tokens.attend(self.decoder(x, heard, causal=True))


# ------------------------------------------------------------------------- diffusion


class FlatAttention(nnx.Module):
    """Attention whose heads are side by side, without biases."""

    def __init__(self, d: int, other: int, heads: int, rngs: nnx.Rngs):
        self.heads = heads
        self.to_q = dense(d, d, rngs, bias=False)
        self.to_k = dense(other, d, rngs, bias=False)
        self.to_v = dense(other, d, rngs, bias=False)
        self.to_out = nnx.List([dense(d, d, rngs)])

    def __call__(self, x: jax.Array, other: jax.Array) -> jax.Array:
        flat = self.to_q(x), self.to_k(other), self.to_v(other)
        split = [one.reshape(*one.shape[:2], self.heads, -1) for one in flat]
        return self.to_out[0](jax.nn.dot_product_attention(*split).reshape(x.shape))


class First(nnx.Module):
    def __init__(self, d: int, hidden: int, gated: bool, rngs: nnx.Rngs):
        self.gated = gated
        self.proj = dense(d, 2 * hidden if gated else hidden, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.proj(x)
        if not self.gated:
            return nnx.gelu(x)
        up, gate = jnp.split(x, 2, axis=-1)
        return up * nnx.gelu(gate)


class FeedForward(nnx.Module):
    def __init__(self, d: int, hidden: int, gated: bool, rngs: nnx.Rngs):
        first, last = First(d, hidden, gated, rngs), dense(hidden, d, rngs)
        self.net = nnx.List([first, nnx.Dropout(0.0), last])

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.net[2](self.net[0](x))


class UNetBlock(nnx.Module):
    """A transformer block of the UNet."""

    def __init__(self, d: int, text: int, heads: int, rngs: nnx.Rngs):
        self.norm1, self.norm2, self.norm3 = (norm(d, rngs) for _ in range(3))
        self.attn1 = FlatAttention(d, d, heads, rngs)
        self.attn2 = FlatAttention(d, text, heads, rngs)
        self.ff = FeedForward(d, 4 * d, True, rngs)

    def __call__(self, x: jax.Array, text: jax.Array) -> jax.Array:
        y = self.norm1(x)
        x = x + self.attn1(y, y)
        x = x + self.attn2(self.norm2(x), text)
        return x + self.ff(self.norm3(x))


class Transformer(nnx.Module):
    def __init__(self, d: int, text: int, heads: int, depth: int, rngs: nnx.Rngs):
        self.norm = nnx.GroupNorm(d, 32, rngs=rngs, **BFLOAT16)
        self.proj_in, self.proj_out = dense(d, d, rngs), dense(d, d, rngs)
        self.transformer_blocks = nnx.List(
            UNetBlock(d, text, heads, rngs) for _ in range(depth)
        )

    def __call__(self, x: jax.Array, text: jax.Array) -> jax.Array:
        y = self.norm(x)
        flat = self.proj_in(y.reshape(y.shape[0], -1, y.shape[-1]))
        for block in self.transformer_blocks:
            flat = block(flat, text)
        return x + self.proj_out(flat).reshape(x.shape)


class Resnet(nnx.Module):
    def __init__(self, inputs: int, outputs: int, time: int, rngs: nnx.Rngs):
        self.norm1 = nnx.GroupNorm(inputs, 32, rngs=rngs, **BFLOAT16)
        self.norm2 = nnx.GroupNorm(outputs, 32, rngs=rngs, **BFLOAT16)
        self.conv1 = conv(inputs, outputs, (3, 3), rngs)
        self.conv2 = conv(outputs, outputs, (3, 3), rngs)
        self.time_emb_proj = dense(time, outputs, rngs)
        other = inputs != outputs
        self.conv_shortcut = conv(inputs, outputs, (1, 1), rngs) if other else None

    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        y = self.conv1(nnx.silu(self.norm1(x)))
        y = y + self.time_emb_proj(nnx.silu(time))[:, None, None]
        y = self.conv2(nnx.silu(self.norm2(y)))
        return y + (x if self.conv_shortcut is None else self.conv_shortcut(x))


class TimeEmbedding(nnx.Module):
    def __init__(self, inputs: int, d: int, rngs: nnx.Rngs):
        self.linear_1, self.linear_2 = dense(inputs, d, rngs), dense(d, d, rngs)

    def __call__(self, time: jax.Array) -> jax.Array:
        return self.linear_2(nnx.silu(self.linear_1(time)))


class Sampler(nnx.Module):
    def __init__(self, d: int, up: bool, rngs: nnx.Rngs):
        self.up, self.conv = up, conv(d, d, (3, 3), rngs, 1 if up else 2)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.conv(x.repeat(2, axis=1).repeat(2, axis=2) if self.up else x)


class UNet(nnx.Module):
    """One block down, the middle and one block up, each of one layer."""

    def __init__(self, sizes: dict[str, Any], rngs: nnx.Rngs):
        few, many, text = sizes["few"], sizes["many"], sizes["text"]
        self.time_embedding = TimeEmbedding(few, 4 * few, rngs)
        self.conv_in = conv(4, few, (3, 3), rngs)
        self.resnets = nnx.List(
            Resnet(*pair, 4 * few, rngs)
            for pair in ((few, few), (few, many), (few + many, few))
        )
        self.attentions = nnx.List(
            Transformer(d, text, d // 64, depth, rngs)
            for d, depth in ((few, 1), (many, 2))
        )
        self.downsamplers = nnx.List([Sampler(few, False, rngs)])
        self.upsamplers = nnx.List([Sampler(many, True, rngs)])
        self.conv_norm_out = nnx.GroupNorm(few, 32, rngs=rngs, **BFLOAT16)
        self.conv_out = conv(few, 4, (3, 3), rngs)

    def __call__(self, x: jax.Array, time: jax.Array, text: jax.Array) -> jax.Array:
        time = self.time_embedding(time)
        x = self.resnets[0](self.conv_in(x), time)
        skip = x = self.attentions[0](x, text)
        x = self.resnets[1](self.downsamplers[0](x), time)
        x = self.upsamplers[0](self.attentions[1](x, text))
        x = self.resnets[2](jnp.concatenate([x, skip], axis=-1), time)
        return self.conv_out(nnx.silu(self.conv_norm_out(x)))


class DiTBlock(nnx.Module):
    """A block of Wan: shifts and scales of the time are made once for all blocks."""

    def __init__(self, d: int, hidden: int, heads: int, rngs: nnx.Rngs):
        self.scale_shift_table = learned(rngs, 1, 6, d)
        self.norm1, self.norm2, self.norm3 = (norm(d, rngs) for _ in range(3))
        self.attn1 = FlatAttention(d, d, heads, rngs)
        self.attn2 = FlatAttention(d, d, heads, rngs)
        self.ffn = FeedForward(d, hidden, False, rngs)

    def __call__(self, x: jax.Array, text: jax.Array, time: jax.Array) -> jax.Array:
        shifts = self.scale_shift_table[...] + time
        a, b, c, d, e, f = (shifts[:, i : i + 1] for i in range(6))
        y = self.norm1(x) * (1 + a) + b
        x = x + self.attn1(y, y) * c
        x = x + self.attn2(self.norm2(x), text)
        return x + self.ffn(self.norm3(x) * (1 + d) + e) * f


class DiT(nnx.Module):
    """Wan."""

    def __init__(self, sizes: dict[str, Any], rngs: nnx.Rngs):
        d, hidden, heads = sizes["d"], sizes["hidden"], sizes["heads"]
        self.patch_embedding = conv(16, d, (1, 2, 2), rngs, (1, 2, 2))
        self.text_embedder = TimeEmbedding(sizes["text"], d, rngs)
        self.time_embedder = TimeEmbedding(256, d, rngs)
        self.time_proj = dense(d, 6 * d, rngs)
        self.blocks = nnx.List(DiTBlock(d, hidden, heads, rngs) for _ in range(2))
        self.proj_out = dense(d, 64, rngs)

    def __call__(self, x: jax.Array, time: jax.Array, text: jax.Array) -> jax.Array:
        x = self.patch_embedding(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        text, time = self.text_embedder(text), self.time_embedder(time)
        shifts = self.time_proj(nnx.silu(time)).reshape(x.shape[0], 6, -1)
        for block in self.blocks:
            x = block(x, text, shifts)
        return self.proj_out(x)


# ------------------------------------------------------------- published tables

COLUMN, ROW = ("fsdp", "tensor"), ("tensor", "fsdp")
Q, OUT = ("fsdp", "tensor", None), ("tensor", None, "fsdp")
BATCH, BATCH_AND_MODEL = ("fsdp", None, None), ("fsdp", None, "tensor")
LAST = (..., "tensor")

WHISPER_EASYDEL: Table = {
    r"conv\d/kernel": (None, "tensor", "fsdp"),
    "embed_positions": None,
    "embed_tokens/embedding": COLUMN,
    "(query|key|value)/kernel": Q,
    "out/kernel": OUT,
    "fc1/kernel": COLUMN,
    "fc2/kernel": ROW,
    "bias|norm": None,
}
WHISPER_JAX: Table = {
    "conv1/kernel": (None, None, None),
    "conv2/kernel": (None, None, None),
    "embed_positions": None,
    "embed_tokens/embedding": ("tensor", None),
    "(query|key|value)/kernel": (None, "tensor", None),
    "(query|key|value)/bias": ("tensor", None),
    "out/kernel": ("tensor", None, None),
    "fc1/kernel": (None, "tensor"),
    "fc1/bias": ("tensor",),
    "fc2/kernel": ("tensor", None),
    "(out|fc2)/bias|norm": None,
}
SIGLIP_TUNIX: Table = {
    "patch_embedding/kernel": LAST,
    "position_embedding": (None, "tensor"),
    "(query|key|value)/kernel": Q,
    "(query|key|value)/bias": ("tensor", None),
    "out/kernel": OUT,
    "fc1/kernel": COLUMN,
    "fc1/bias": ("tensor",),
    "fc2/kernel": ROW,
    "(out|fc2)/bias": ("fsdp",),
    "(patch_embedding/bias|norm)": ("tensor",),
}
SIGLIP_BONSAI = SIGLIP_TUNIX | {
    "(query|key|value)/kernel": ("tensor", "fsdp", None),
    "(out|fc2)/bias": ("tensor",),
}
BIG_VISION: Table = {
    "patch_embedding/kernel": (..., "fsdp"),
    "position_embedding": (None, "fsdp"),
    "(query|key|value)/kernel": ("fsdp", None, None),
    "out/kernel": (None, None, "fsdp"),
    "fc1/kernel": (None, "fsdp"),
    "fc2/kernel": ("fsdp", None),
    "head/kernel": ("fsdp", None),
    "bias|norm": None,
}
CLIP_JAX: Table = {
    "patch_embedding/kernel": (..., "fsdp"),
    "token_embedding/embedding": ROW,
    "position_embedding": (None, "fsdp"),
    "(query|key|value)/kernel": Q,
    "out/kernel": OUT,
    "fc1/kernel": COLUMN,
    "fc2/kernel": ROW,
    "projection/kernel": COLUMN,
    "norm": ("fsdp",),
}
CLIP_JAX_1D = {
    key: axes and tuple(axis if axis in ("tensor", ...) else None for axis in axes)
    for key, axes in CLIP_JAX.items()
}
UNET_MAXDIFFUSION: Table = {
    "(conv|conv1|conv2|conv_in|conv_shortcut)/kernel": (..., "fsdp"),
    "to_[qkv]/kernel": COLUMN,
    "to_out/0/kernel": ROW,
    "proj_in/kernel": ("fsdp", None),
    "proj_out/kernel": (None, "fsdp"),
    "net|time|conv_out|bias|norm": None,
}
WAN_MAXDIFFUSION: Table = {
    "to_[qkv]/kernel": COLUMN,
    "to_out/0/kernel": ROW,
    "to_out/0/bias": ("fsdp",),
    "net/0/proj/kernel": COLUMN,
    "net/0/proj/bias": ("tensor",),
    "net/2/kernel": ROW,
    "linear_1/kernel": COLUMN,
    "linear_2/kernel": ROW,
    "time_proj/kernel": COLUMN,
    "(linear_1|time_proj)/bias": ("tensor",),
    "proj_out/kernel": ("fsdp", None),
    "patch_embedding|scale_shift_table|norm": None,
}

# ------------------------------------------------------------------------- cases

LARGE_V2 = {"d": 1280, "heads": 20, "mel": 80, "vocab": 51865}
SO400M = {"d": 1152, "heads": 16, "patch": 14, "patches": 256}
VIT_L = {"d": 1024, "heads": 16, "patch": 16, "patches": 196, "classes": 1000}
CLIP_L = VIT_L | {"patch": 14, "patches": 256, "classes": None, "text": 768}
CLIP_L |= {"vocab": 49408, "length": 77, "text_heads": 12, "common": 768}
XL = {"few": 640, "many": 1280, "text": 2048}
WAN_14B = {"d": 5120, "hidden": 13824, "heads": 40, "text": 4096}


def images(size: int) -> Callable[[int], Any]:
    return lambda batch: (shape(batch, size, size, 3),)


def images_and_tokens(batch: int) -> Any:
    return shape(batch, 224, 224, 3), shape(batch, 77, dtype=jnp.int32)


def sounds_and_tokens(batch: int) -> Any:
    return shape(batch, 3000, 80), shape(batch, 448, dtype=jnp.int32)


def latents(batch: int) -> Any:
    return shape(batch, 64, 64, 4), shape(batch, 640), shape(batch, 77, 2048)


def videos(batch: int) -> Any:
    return shape(batch, 5, 60, 104, 16), shape(batch, 256), shape(batch, 512, 4096)


def made(model: Callable[..., nnx.Module], sizes: dict[str, Any]) -> Any:
    """What makes the model."""
    return functools.partial(model, sizes)


CASES = [
    Case(
        "whisper",
        "Whisper large-v2",
        made(Whisper, LARGE_V2),
        "fsdp=16,tensor=4",
        {
            "EasyDeL da8f9c0d, modules/whisper/whisper_configuration.py": (
                WHISPER_EASYDEL,
                BATCH,
            ),
            "whisper-jax f983178, partitioner.py": (WHISPER_JAX, None),
        },
        inputs=sounds_and_tokens,
    ),
    Case(
        "siglip",
        "SigLIP So400m/14, vision tower",
        made(Vision, SO400M),
        "fsdp=16,tensor=4",
        {
            "Tunix c7d8950f, models/gemma3/vision.py": (SIGLIP_TUNIX, BATCH_AND_MODEL),
            "bonsai 3628425, models/gemma3/modeling.py": (
                SIGLIP_BONSAI,
                BATCH_AND_MODEL,
            ),
        },
        inputs=images(224),
    ),
    Case(
        "vit",
        "ViT-L/16",
        made(Vision, VIT_L),
        "fsdp=16",
        {"big_vision 0127fb6, sharding.py": (BIG_VISION, None)},
        inputs=images(224),
    ),
    Case(
        "clip",
        "CLIP L/14",
        made(Clip, CLIP_L),
        "fsdp=16,tensor=4",
        {
            "clip-jax 830e7e8, partitions.py, parameter dims 2": (CLIP_JAX, BATCH),
            "clip-jax 830e7e8, partitions.py, parameter dims 1": (CLIP_JAX_1D, BATCH),
        },
        inputs=images_and_tokens,
    ),
    Case(
        "unet",
        "Stable Diffusion XL, UNet",
        made(UNet, XL),
        "fsdp=16,tensor=4",
        {"MaxDiffusion 7cfb8801, configs/base_xl.yml": (UNET_MAXDIFFUSION, None)},
        inputs=latents,
    ),
    Case(
        "dit",
        "Wan 14B",
        made(DiT, WAN_14B),
        "fsdp=8,tensor=8",
        {"MaxDiffusion 7cfb8801, configs/base_wan_14b.yml": (WAN_MAXDIFFUSION, BATCH)},
        inputs=videos,
    ),
]
