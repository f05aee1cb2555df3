"""A small ViT and a small UNet of plain layers, named as in bonsai and diffusers."""

import jax
import jax.numpy as jnp
from flax import nnx

PIXELS, PATCH, CLASSES, D, HEADS = 8, 2, 16, 32, 4
CHANNELS, LATENTS, TEXT, TIME, GROUPS = (16, 32), 4, 24, 32, 4


class Block(nnx.Module):
    """A layer of ViT."""

    def __init__(self, rngs: nnx.Rngs):
        self.layernorm_before = nnx.LayerNorm(D, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, D, decode=False, rngs=rngs)
        self.layernorm_after = nnx.LayerNorm(D, rngs=rngs)
        self.linear1 = nnx.Linear(D, 4 * D, rngs=rngs)
        self.linear2 = nnx.Linear(4 * D, D, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.layernorm_before(x))
        return x + self.linear2(nnx.gelu(self.linear1(self.layernorm_after(x))))


class Patches(nnx.Module):
    """Patches to vectors, with positions and a class token."""

    def __init__(self, rngs: nnx.Rngs):
        count = (PIXELS // PATCH) ** 2
        draw = nnx.initializers.normal(0.1)
        sizes = (PATCH, PATCH)
        self.projection = nnx.Conv(3, D, sizes, strides=sizes, rngs=rngs)
        self.cls_token = nnx.Param(jnp.zeros((1, 1, D)))
        self.pos_embeddings = nnx.Param(draw(rngs.params(), (1, count + 1, D)))

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.projection(images).reshape(images.shape[0], -1, D)
        cls = jnp.broadcast_to(self.cls_token[...], (x.shape[0], 1, D))
        return jnp.concatenate([cls, x], axis=1) + self.pos_embeddings[...]


class ViT(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.pos_embeddings = Patches(rngs)
        self.layers = nnx.List([Block(rngs)])
        self.ln = nnx.LayerNorm(D, rngs=rngs)
        self.classifier = nnx.Linear(D, CLASSES, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.pos_embeddings(images)
        for layer in self.layers:
            x = layer(x)
        return self.classifier(self.ln(x)[:, 0])


class Resnet(nnx.Module):
    """Two convolutions, with what the time adds in between."""

    def __init__(self, before: int, after: int, rngs: nnx.Rngs):
        self.norm1 = nnx.GroupNorm(before, GROUPS, rngs=rngs)
        self.conv1 = nnx.Conv(before, after, (3, 3), rngs=rngs)
        self.time_emb_proj = nnx.Linear(TIME, after, rngs=rngs)
        self.norm2 = nnx.GroupNorm(after, GROUPS, rngs=rngs)
        self.conv2 = nnx.Conv(after, after, (3, 3), rngs=rngs)
        same = before == after
        self.conv_shortcut = (
            None if same else nnx.Conv(before, after, (1, 1), rngs=rngs)
        )

    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        y = self.conv1(nnx.silu(self.norm1(x)))
        y = y + self.time_emb_proj(nnx.silu(time))[:, None, None]
        y = self.conv2(nnx.silu(self.norm2(y)))
        return y + (x if self.conv_shortcut is None else self.conv_shortcut(x))


class Attention(nnx.Module):
    def __init__(self, size: int, other: int, rngs: nnx.Rngs):
        self.to_q = nnx.Linear(size, size, use_bias=False, rngs=rngs)
        self.to_k = nnx.Linear(other, size, use_bias=False, rngs=rngs)
        self.to_v = nnx.Linear(other, size, use_bias=False, rngs=rngs)
        self.to_out = nnx.List([nnx.Linear(size, size, rngs=rngs)])

    def __call__(self, x: jax.Array, other: jax.Array) -> jax.Array:
        flat = (self.to_q(x), self.to_k(other), self.to_v(other))
        split = [one.reshape(*one.shape[:2], HEADS, -1) for one in flat]
        return self.to_out[0](jax.nn.dot_product_attention(*split).reshape(x.shape))


class Gated(nnx.Module):
    def __init__(self, size: int, rngs: nnx.Rngs):
        self.proj = nnx.Linear(size, 8 * size, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        up, gate = jnp.split(self.proj(x), 2, axis=-1)
        return up * nnx.gelu(gate)


class FeedForward(nnx.Module):
    def __init__(self, size: int, rngs: nnx.Rngs):
        last = nnx.Linear(4 * size, size, rngs=rngs)
        self.net = nnx.List([Gated(size, rngs), nnx.Dropout(0.0), last])

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.net[2](self.net[0](x))


class TransformerBlock(nnx.Module):
    def __init__(self, size: int, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(size, rngs=rngs)
        self.attn1 = Attention(size, size, rngs)
        self.norm2 = nnx.LayerNorm(size, rngs=rngs)
        self.attn2 = Attention(size, TEXT, rngs)
        self.norm3 = nnx.LayerNorm(size, rngs=rngs)
        self.ff = FeedForward(size, rngs)

    def __call__(self, x: jax.Array, text: jax.Array) -> jax.Array:
        y = self.norm1(x)
        x = x + self.attn1(y, y)
        x = x + self.attn2(self.norm2(x), text)
        return x + self.ff(self.norm3(x))


class Transformer(nnx.Module):
    """Attention over the pixels of an image, and to the text."""

    def __init__(self, size: int, rngs: nnx.Rngs):
        self.norm = nnx.GroupNorm(size, GROUPS, rngs=rngs)
        self.proj_in = nnx.Conv(size, size, (1, 1), rngs=rngs)
        self.transformer_blocks = nnx.List([TransformerBlock(size, rngs)])
        self.proj_out = nnx.Conv(size, size, (1, 1), rngs=rngs)

    def __call__(self, x: jax.Array, text: jax.Array) -> jax.Array:
        y = self.proj_in(self.norm(x))
        flat = y.reshape(y.shape[0], -1, y.shape[-1])
        for block in self.transformer_blocks:
            flat = block(flat, text)
        return x + self.proj_out(flat.reshape(y.shape))


class Sampler(nnx.Module):
    """Halves the height and width of images, or doubles them."""

    def __init__(self, size: int, up: bool, rngs: nnx.Rngs):
        self.up = up
        self.conv = nnx.Conv(size, size, (3, 3), strides=1 if up else 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x.repeat(2, axis=1).repeat(2, axis=2) if self.up else x
        return self.conv(x)


class Down(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.resnets = nnx.List([Resnet(CHANNELS[0], CHANNELS[0], rngs)])
        self.attentions = nnx.List([Transformer(CHANNELS[0], rngs)])
        self.downsamplers = nnx.List([Sampler(CHANNELS[0], up=False, rngs=rngs)])


class Middle(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.resnets = nnx.List([Resnet(*CHANNELS, rngs)])
        self.attentions = nnx.List([Transformer(CHANNELS[1], rngs)])


class Up(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.upsamplers = nnx.List([Sampler(CHANNELS[1], up=True, rngs=rngs)])
        self.resnets = nnx.List([Resnet(sum(CHANNELS), CHANNELS[0], rngs)])


class TimeEmbedding(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.linear_1 = nnx.Linear(CHANNELS[0], TIME, rngs=rngs)
        self.linear_2 = nnx.Linear(TIME, TIME, rngs=rngs)

    def __call__(self, time: jax.Array) -> jax.Array:
        angles = time[:, None] * jnp.arange(CHANNELS[0])
        return self.linear_2(nnx.silu(self.linear_1(jnp.sin(angles))))


class UNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.time_embedding = TimeEmbedding(rngs)
        self.conv_in = nnx.Conv(LATENTS, CHANNELS[0], (3, 3), rngs=rngs)
        self.down_blocks = nnx.List([Down(rngs)])
        self.mid_block = Middle(rngs)
        self.up_blocks = nnx.List([Up(rngs)])
        self.conv_norm_out = nnx.GroupNorm(CHANNELS[0], GROUPS, rngs=rngs)
        self.conv_out = nnx.Conv(CHANNELS[0], LATENTS, (3, 3), rngs=rngs)

    def __call__(self, x: jax.Array, time: jax.Array, text: jax.Array) -> jax.Array:
        time = self.time_embedding(time)
        down, up = self.down_blocks[0], self.up_blocks[0]
        x = down.resnets[0](self.conv_in(x), time)
        skip = x = down.attentions[0](x, text)
        x = self.mid_block.resnets[0](down.downsamplers[0](x), time)
        x = up.upsamplers[0](self.mid_block.attentions[0](x, text))
        x = up.resnets[0](jnp.concatenate([x, skip], axis=-1), time)
        return self.conv_out(nnx.silu(self.conv_norm_out(x)))
