"""The UNet of Stable Diffusion, and its autoencoder, by the names of diffusers."""

import re

from presets.models._layers import conv, dense, flax, norm
from presets.models.llama import Shapes

CHANNELS, TEXT, LATENTS = (64, 128), 96, 4
# Channels of each block of the way down; the first has attention.
TIME = 4 * CHANNELS[0]


def resnet(at: str, before: int, after: int, time: int = TIME) -> Shapes:
    """Two convolutions, and one beside them where the number of channels changes."""
    found = norm(f"{at}.norm1", before) | norm(f"{at}.norm2", after)
    found |= conv(f"{at}.conv1", before, after, 3, 3)
    found |= conv(f"{at}.conv2", after, after, 3, 3)
    if time:
        found |= dense(f"{at}.time_emb_proj", time, after)
    if before != after:
        found |= conv(f"{at}.conv_shortcut", before, after, 1, 1)
    return found


def attention(at: str, size: int, linear: bool) -> Shapes:
    """A transformer of one block, between linear layers in version 2 and XL."""
    found = norm(f"{at}.norm", size)
    for name in ("proj_in", "proj_out"):
        own = dense if linear else lambda *args: conv(*args, 1, 1)
        found |= own(f"{at}.{name}", size, size)
    block = f"{at}.transformer_blocks.0"
    for name, other in (("attn1", size), ("attn2", TEXT)):
        found |= dense(f"{block}.{name}.to_q", size, size, bias=False)
        found |= dense(f"{block}.{name}.to_k", other, size, bias=False)
        found |= dense(f"{block}.{name}.to_v", other, size, bias=False)
        found |= dense(f"{block}.{name}.to_out.0", size, size)
    found |= dense(f"{block}.ff.net.0.proj", size, 8 * size)
    found |= dense(f"{block}.ff.net.2", 4 * size, size)
    for number in (1, 2, 3):
        found |= norm(f"{block}.norm{number}", size)
    return found


def diffusers(linear: bool = False) -> Shapes:
    """Weights as diffusers saves them, (out, in)."""
    few, many = CHANNELS
    found = conv("conv_in", LATENTS, few, 3, 3) | norm("conv_norm_out", few)
    found |= dense("time_embedding.linear_1", few, TIME)
    found |= dense("time_embedding.linear_2", TIME, TIME)
    if linear:
        found |= dense("add_embedding.linear_1", 2 * TEXT, TIME)
        found |= dense("add_embedding.linear_2", TIME, TIME)
    found |= resnet("down_blocks.0.resnets.0", few, few)
    found |= attention("down_blocks.0.attentions.0", few, linear)
    found |= conv("down_blocks.0.downsamplers.0.conv", few, few, 3, 3)
    found |= resnet("down_blocks.1.resnets.0", few, many)
    found |= resnet("mid_block.resnets.0", many, many)
    found |= attention("mid_block.attentions.0", many, linear)
    found |= resnet("mid_block.resnets.1", many, many)
    found |= resnet("up_blocks.0.resnets.0", 2 * many, many)
    found |= resnet("up_blocks.0.resnets.1", many + few, many)
    found |= conv("up_blocks.0.upsamplers.0.conv", many, many, 3, 3)
    found |= resnet("up_blocks.1.resnets.0", many + few, few)
    found |= attention("up_blocks.1.attentions.0", few, linear)
    found |= resnet("up_blocks.1.resnets.1", 2 * few, few)
    found |= attention("up_blocks.1.attentions.1", few, linear)
    return found | conv("conv_out", few, LATENTS, 3, 3)


def autoencoder(old: bool = False) -> Shapes:
    """Weights of `AutoencoderKL`; older ones have other names for its attention."""
    few, many = CHANNELS
    query, key, value, out = ("to_q", "to_k", "to_v", "to_out.0")
    if old:
        query, key, value, out = ("query", "key", "value", "proj_attn")
    found = conv("quant_conv", 2 * LATENTS, 2 * LATENTS, 1, 1)
    found |= conv("post_quant_conv", LATENTS, LATENTS, 1, 1)
    for side, first, last in (("encoder", few, many), ("decoder", many, few)):
        ends = (3, 2 * LATENTS) if side == "encoder" else (LATENTS, 3)
        blocks = "down_blocks" if side == "encoder" else "up_blocks"
        sampler = blocks.replace("_blocks", "samplers")
        found |= conv(f"{side}.conv_in", ends[0], first, 3, 3)
        found |= norm(f"{side}.conv_norm_out", last)
        found |= conv(f"{side}.conv_out", last, ends[1], 3, 3)
        found |= resnet(f"{side}.{blocks}.0.resnets.0", first, first, time=0)
        found |= conv(f"{side}.{blocks}.0.{sampler}.0.conv", first, first, 3, 3)
        found |= resnet(f"{side}.{blocks}.1.resnets.0", first, last, time=0)
        at = f"{side}.mid_block"
        found |= resnet(f"{at}.resnets.0", many, many, time=0)
        found |= norm(f"{at}.attentions.0.group_norm", many)
        for role in (query, key, value, out):
            found |= dense(f"{at}.attentions.0.{role}", many, many)
        found |= resnet(f"{at}.resnets.1", many, many, time=0)
    return found


def linen(weights: Shapes) -> Shapes:
    """The same as Linen modules of diffusers and MaxDiffusion: `/0/` is `_0/`."""
    joined = {re.sub(r"\.(\d+)(?=\.)", r"_\1", path): s for path, s in weights.items()}
    return flax(joined)


SPELLINGS = {
    "diffusers": diffusers(),
    "diffusers, XL": diffusers(linear=True),
    "diffusers, linen": linen(diffusers()),
    "diffusers, linen, XL": linen(diffusers(linear=True)),
    "nnx": flax(diffusers()),
    "autoencoder": autoencoder(),
    "autoencoder, older": autoencoder(old=True),
    "autoencoder, linen": linen(autoencoder(old=True)),
}
