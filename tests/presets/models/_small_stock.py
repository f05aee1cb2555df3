"""Small models of Flax's own layers, by the names that their families have."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

VOCAB, D, HEADS, HIDDEN, PIXELS, PATCH, CLASSES = 32, 16, 4, 32, 8, 4, 8
TEXT, PATCHES = 8, (PIXELS // PATCH) ** 2


class Attention(nnx.Module):
    """Heads side by side; `names` are of queries, keys, values and the output."""

    def __init__(self, names: str, rngs: nnx.Rngs, bias: bool = True) -> None:
        self.names = names.split()
        for name in self.names:
            setattr(self, name, nnx.Linear(D, D, use_bias=bias, rngs=rngs))

    def __call__(self, x: Any, memory: Any = None) -> Any:
        query, key, value, out = (getattr(self, name) for name in self.names)
        memory = x if memory is None else memory
        parts = (query(x), key(memory), value(memory))
        heads = [part.reshape(*part.shape[:2], HEADS, -1) for part in parts]
        mixed = jax.nn.dot_product_attention(*heads)
        return out(mixed.reshape(x.shape))


class Fused(nnx.Module):
    """Queries, keys and values by one layer."""

    def __init__(self, fused: str, out: str, rngs: nnx.Rngs) -> None:
        self.names = fused, out
        setattr(self, fused, nnx.Linear(D, 3 * D, rngs=rngs))
        setattr(self, out, nnx.Linear(D, D, rngs=rngs))

    def __call__(self, x: Any) -> Any:
        fused, out = (getattr(self, name) for name in self.names)
        heads = [
            one.reshape(*x.shape[:2], HEADS, -1) for one in jnp.split(fused(x), 3, -1)
        ]
        return out(jax.nn.dot_product_attention(*heads).reshape(x.shape))


class MLP(nnx.Module):
    def __init__(self, first: str, second: str, rngs: nnx.Rngs, bias: bool = True):
        self.names = first, second
        setattr(self, first, nnx.Linear(D, HIDDEN, use_bias=bias, rngs=rngs))
        setattr(self, second, nnx.Linear(HIDDEN, D, use_bias=bias, rngs=rngs))

    def __call__(self, x: Any) -> Any:
        first, second = (getattr(self, name) for name in self.names)
        return second(nnx.gelu(first(x)))


class Block(nnx.Module):
    """Parts of a residual layer by name, each after a norm."""

    def __init__(self, rngs: nnx.Rngs, norm: str, **parts: Any) -> None:
        self.parts = tuple(parts)
        self.norms = tuple(norm.format(n + 1, name) for n, name in enumerate(parts))
        for norm_name, (name, part) in zip(self.norms, parts.items(), strict=True):
            setattr(self, norm_name, nnx.LayerNorm(D, rngs=rngs))
            setattr(self, name, part)

    def __call__(self, x: Any, memory: Any = None) -> Any:
        for norm, name in zip(self.norms, self.parts, strict=True):
            given = () if name != "encoder_attn" else (memory,)
            x = x + getattr(self, name)(getattr(self, norm)(x), *given)
        return x


class GPT2(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.wte, self.wpe = (
            nnx.Embed(VOCAB, D, rngs=rngs),
            nnx.Embed(TEXT, D, rngs=rngs),
        )
        self.h = nnx.List(
            [
                Block(
                    rngs,
                    "ln_{0}",
                    attn=Fused("c_attn", "c_proj", rngs),
                    mlp=MLP("c_fc", "c_proj", rngs),
                )
            ]
        )
        self.ln_f = nnx.LayerNorm(D, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x = self.wte(tokens) + self.wpe(jnp.arange(tokens.shape[1]))
        for layer in self.h:
            x = layer(x)
        return self.wte.attend(self.ln_f(x))


class T5Attention(nnx.Module):
    def __init__(self, name: str, rngs: nnx.Rngs) -> None:
        self.layer_norm = nnx.RMSNorm(D, rngs=rngs)
        self.name = name
        setattr(self, name, Attention("q k v o", rngs, bias=False))

    def __call__(self, x: Any, memory: Any = None) -> Any:
        return x + getattr(self, self.name)(self.layer_norm(x), memory)


class T5FeedForward(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layer_norm = nnx.RMSNorm(D, rngs=rngs)
        self.DenseReluDense = MLP("wi", "wo", rngs, bias=False)

    def __call__(self, x: Any) -> Any:
        return x + self.DenseReluDense(self.layer_norm(x))


class T5Block(nnx.Module):
    def __init__(self, cross: bool, rngs: nnx.Rngs) -> None:
        own: list[Any] = [T5Attention("SelfAttention", rngs)]
        own += [T5Attention("EncDecAttention", rngs)] if cross else []
        self.layer: Any = nnx.List([*own, T5FeedForward(rngs)])

    def __call__(self, x: Any, memory: Any = None) -> Any:
        x = self.layer[0](x)
        if len(self.layer) == 3:
            x = self.layer[1](x, memory)
        return self.layer[-1](x)


class T5Stack(nnx.Module):
    def __init__(self, cross: bool, rngs: nnx.Rngs) -> None:
        self.block = nnx.List([T5Block(cross, rngs)])
        self.final_layer_norm = nnx.RMSNorm(D, rngs=rngs)

    def __call__(self, x: Any, memory: Any = None) -> Any:
        for block in self.block:
            x = block(x, memory)
        return self.final_layer_norm(x)


class T5(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.shared = nnx.Embed(VOCAB, D, rngs=rngs)
        self.encoder, self.decoder = T5Stack(False, rngs), T5Stack(True, rngs)
        self.lm_head = nnx.Linear(D, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x = self.shared(tokens)
        return self.lm_head(self.decoder(x, self.encoder(x)))


class WhisperSide(nnx.Module):
    def __init__(self, cross: bool, rngs: nnx.Rngs) -> None:
        attention = partial(Attention, "q_proj k_proj v_proj out_proj", rngs)
        more = {"encoder_attn": attention()} if cross else {}
        if cross:
            self.embed_tokens = nnx.Embed(VOCAB, D, rngs=rngs)
        else:
            self.conv1 = nnx.Conv(6, D, 3, rngs=rngs)
            self.conv2 = nnx.Conv(D, D, 3, strides=2, rngs=rngs)
        self.embed_positions = nnx.Embed(TEXT, D, rngs=rngs)
        feed = Block(rngs, "final_layer_norm", mlp=MLP("fc1", "fc2", rngs))
        self.layers = nnx.List(
            [Block(rngs, "{1}_layer_norm", self_attn=attention(), **more), feed]
        )
        self.layer_norm = nnx.LayerNorm(D, rngs=rngs)

    def __call__(self, x: Any, memory: Any = None) -> Any:
        if memory is None:
            x = nnx.gelu(self.conv2(nnx.gelu(self.conv1(x))))
        else:
            x = self.embed_tokens(x)
        x = x + self.embed_positions(jnp.arange(x.shape[1]))
        for layer in self.layers:
            x = layer(x, memory)
        return self.layer_norm(x)


class WhisperModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.encoder, self.decoder = WhisperSide(False, rngs), WhisperSide(True, rngs)

    def __call__(self, sound: Any, tokens: Any) -> Any:
        return self.decoder(tokens, self.encoder(sound))


class Whisper(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.model = WhisperModel(rngs)

    def __call__(self, sound: Any, tokens: Any) -> Any:
        x = self.model(sound, tokens)
        return self.model.decoder.embed_tokens.attend(x)


class TextEmbeddings(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.token_embedding = nnx.Embed(VOCAB, D, rngs=rngs)
        self.position_embedding = nnx.Embed(TEXT, D, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        positions = jnp.arange(tokens.shape[1])
        return self.token_embedding(tokens) + self.position_embedding(positions)


class VisionEmbeddings(nnx.Module):
    """With a class token, as in CLIP, or without one, as in SigLIP."""

    def __init__(self, with_class: bool, rngs: nnx.Rngs) -> None:
        size, bias = (PATCH, PATCH), not with_class
        self.patch_embedding = nnx.Conv(
            3, D, size, strides=size, use_bias=bias, rngs=rngs
        )
        self.class_embedding = nnx.Param(jnp.ones(D)) if with_class else None
        self.position_embedding = nnx.Embed(PATCHES + with_class, D, rngs=rngs)

    def __call__(self, images: Any) -> Any:
        x = self.patch_embedding(images)
        x = x.reshape(len(x), PATCHES, D)
        if self.class_embedding is not None:
            first = jnp.broadcast_to(self.class_embedding[...], (len(x), 1, D))
            x = jnp.concatenate([first, x], 1)
        return x + self.position_embedding(jnp.arange(x.shape[1]))


class Encoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        attention = Attention("q_proj k_proj v_proj out_proj", rngs)
        mlp = MLP("fc1", "fc2", rngs)
        self.layers = nnx.List(
            [Block(rngs, "layer_norm{0}", self_attn=attention, mlp=mlp)]
        )

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class Tower(nnx.Module):
    def __init__(self, embeddings: Any, last: str, rngs: nnx.Rngs) -> None:
        self.embeddings, self.encoder, self.last = embeddings, Encoder(rngs), last
        setattr(self, last, nnx.LayerNorm(D, rngs=rngs))

    def __call__(self, x: Any) -> Any:
        return getattr(self, self.last)(self.encoder(self.embeddings(x)))


class TwoTowers(nnx.Module):
    """CLIP, or SigLIP: how alike each image and each text are."""

    def __init__(self, clip: bool, rngs: nnx.Rngs) -> None:
        self.text_model = Tower(TextEmbeddings(rngs), "final_layer_norm", rngs)
        self.vision_model = Tower(VisionEmbeddings(clip, rngs), "post_layernorm", rngs)
        linear = partial(nnx.Linear, D, D, use_bias=False, rngs=rngs)
        self.text_projection = linear() if clip else None
        self.visual_projection = linear() if clip else None
        self.logit_scale = nnx.Param(jnp.ones(()))

    def __call__(self, images: Any, tokens: Any) -> Any:
        image, text = self.vision_model(images).mean(1), self.text_model(tokens)[:, -1]
        if self.text_projection is not None and self.visual_projection is not None:
            image, text = self.visual_projection(image), self.text_projection(text)
        return self.logit_scale[...] * (image @ text.T)


CLIP, SigLIP = partial(TwoTowers, True), partial(TwoTowers, False)


class DiTBlock(nnx.Module):
    """Shifted and scaled by the time."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        norm = partial(nnx.LayerNorm, D, use_bias=False, use_scale=False, rngs=rngs)
        self.norm1, self.norm2 = norm(), norm()
        self.attn = Fused("qkv", "proj", rngs)
        self.mlp = MLP("fc1", "fc2", rngs)
        self.adaLN_modulation = nnx.List([nnx.silu, nnx.Linear(D, 6 * D, rngs=rngs)])

    def __call__(self, x: Any, time: Any) -> Any:
        activate, linear = self.adaLN_modulation
        parts = jnp.split(linear(activate(time))[:, None], 6, -1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        x = x + gate1 * self.attn(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        size = (PATCH, PATCH)
        self.x_embedder = nnx.Dict(proj=nnx.Conv(3, D, size, strides=size, rngs=rngs))
        self.t_embedder = nnx.Dict(
            mlp=nnx.List(
                [nnx.Linear(D, D, rngs=rngs), nnx.silu, nnx.Linear(D, D, rngs=rngs)]
            )
        )
        self.y_embedder = nnx.Dict(embedding_table=nnx.Embed(CLASSES, D, rngs=rngs))
        self.pos_embed = nnx.Param(jnp.ones((1, PATCHES, D)))
        self.blocks = nnx.List([DiTBlock(rngs)])
        self.final_layer = nnx.Dict(linear=nnx.Linear(D, PATCH * PATCH * 3, rngs=rngs))

    def __call__(self, images: Any, time: Any, classes: Any) -> Any:
        x = self.x_embedder["proj"](images)
        x = x.reshape(len(x), PATCHES, D) + self.pos_embed[...]
        time = time[:, None] * jnp.linspace(0, 1, D)
        for part in self.t_embedder["mlp"]:
            time = part(time)
        time = time + self.y_embedder["embedding_table"](classes)
        for block in self.blocks:
            x = block(x, time)
        return self.final_layer["linear"](x)
