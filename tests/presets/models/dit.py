"""Diffusion transformers: DiT, PixArt, Stable Diffusion 3, Flux and Wan."""

import re

from presets.models._layers import CLASSES, HEADS, LAYERS, D, conv, dense, flax, stacked
from presets.models.llama import Shapes

LATENTS, TEXT, POOLED, FREQUENCIES, HIDDEN = 4, 96, 48, 32, 160


def two(
    at: str, fan_in: int, first: str = "linear_1", last: str = "linear_2"
) -> Shapes:
    """Two linear layers: of the time, the text or the class."""
    return dense(f"{at}.{first}", fan_in, D) | dense(f"{at}.{last}", D, D)


def feed_forward(at: str, hidden: int = 4 * D) -> Shapes:
    found = dense(f"{at}.net.0.proj", D, hidden)
    return found | dense(f"{at}.net.2", hidden, D)


def attention(at: str, *roles: str) -> Shapes:
    found: Shapes = {}
    for role in roles or ("to_q", "to_k", "to_v", "to_out.0"):
        found |= dense(f"{at}.{role}", D, D)
    return found


def dit() -> Shapes:
    """DiT of diffusers: each block has layers for the time and the class."""
    found = conv("pos_embed.proj", LATENTS, D, 2, 2)
    for layer in range(LAYERS):
        at = f"transformer_blocks.{layer}"
        found |= two(f"{at}.norm1.emb.timestep_embedder", FREQUENCIES)
        table = f"{at}.norm1.emb.class_embedder.embedding_table.weight"
        found[table] = (CLASSES + 1, D)
        found |= dense(f"{at}.norm1.linear", D, 6 * D)
        found |= attention(f"{at}.attn1") | feed_forward(f"{at}.ff")
    return found | dense("proj_out_1", D, 2 * D) | dense("proj_out_2", D, 8 * LATENTS)


def dit_original() -> Shapes:
    """DiT as its authors name it."""
    found = conv("x_embedder.proj", LATENTS, D, 2, 2) | {"pos_embed": (1, 16, D)}
    found |= two("t_embedder", FREQUENCIES, "mlp.0", "mlp.2")
    found["y_embedder.embedding_table.weight"] = (CLASSES + 1, D)
    for layer in range(LAYERS):
        at = f"blocks.{layer}"
        found |= dense(f"{at}.attn.qkv", D, 3 * D) | dense(f"{at}.attn.proj", D, D)
        found |= dense(f"{at}.mlp.fc1", D, 4 * D) | dense(f"{at}.mlp.fc2", 4 * D, D)
        found |= dense(f"{at}.adaLN_modulation.1", D, 6 * D)
    found |= dense("final_layer.linear", D, 8 * LATENTS)
    return found | dense("final_layer.adaLN_modulation.1", D, 2 * D)


def pixart() -> Shapes:
    """PixArt of diffusers: one layer makes the shifts and scales of all blocks."""
    found = conv("pos_embed.proj", LATENTS, D, 2, 2)
    found |= two("adaln_single.emb.timestep_embedder", FREQUENCIES)
    found |= dense("adaln_single.linear", D, 6 * D) | two("caption_projection", TEXT)
    for layer in range(LAYERS):
        at = f"transformer_blocks.{layer}"
        found[f"{at}.scale_shift_table"] = (6, D)
        found |= attention(f"{at}.attn1") | attention(f"{at}.attn2")
        found |= feed_forward(f"{at}.ff")
    found["scale_shift_table"] = (2, D)
    return found | dense("proj_out", D, 8 * LATENTS)


def joint(layer: int, norms: bool) -> Shapes:
    """A block for images and text of Stable Diffusion 3 and Flux."""
    at = f"transformer_blocks.{layer}"
    found = dense(f"{at}.norm1.linear", D, 6 * D)
    found |= dense(f"{at}.norm1_context.linear", D, 6 * D)
    found |= attention(f"{at}.attn")
    added = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    found |= attention(f"{at}.attn", *added)
    if norms:
        for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            found[f"{at}.attn.{name}.weight"] = (D // HEADS,)
    return found | feed_forward(f"{at}.ff") | feed_forward(f"{at}.ff_context")


def sd3() -> Shapes:
    """Stable Diffusion 3 of diffusers."""
    found = conv("pos_embed.proj", LATENTS, D, 2, 2)
    found["pos_embed.pos_embed"] = (1, 16, D)
    found |= two("time_text_embed.timestep_embedder", FREQUENCIES)
    found |= two("time_text_embed.text_embedder", POOLED)
    found |= dense("context_embedder", TEXT, D)
    for layer in range(LAYERS):
        found |= joint(layer, norms=False)
    found |= dense("norm_out.linear", D, 2 * D)
    return found | dense("proj_out", D, 4 * LATENTS)


def flux() -> Shapes:
    """Flux of diffusers."""
    found = dense("context_embedder", TEXT, D) | dense("x_embedder", 4 * LATENTS, D)
    for name, size in (
        ("timestep", FREQUENCIES),
        ("guidance", FREQUENCIES),
        ("text", POOLED),
    ):
        found |= two(f"time_text_embed.{name}_embedder", size)
    for layer in range(LAYERS):
        found |= joint(layer, norms=True)
        at = f"single_transformer_blocks.{layer}"
        found |= dense(f"{at}.norm.linear", D, 3 * D)
        found |= dense(f"{at}.proj_mlp", D, 4 * D) | dense(f"{at}.proj_out", 5 * D, D)
        found |= attention(f"{at}.attn", "to_q", "to_k", "to_v")
        for name in ("norm_q", "norm_k"):
            found[f"{at}.attn.{name}.weight"] = (D // HEADS,)
    found |= dense("norm_out.linear", D, 2 * D)
    return found | dense("proj_out", D, 4 * LATENTS)


def flux_original() -> Shapes:
    """Flux as its authors name it: queries, keys and values are one array."""
    found = dense("img_in", 4 * LATENTS, D) | dense("txt_in", TEXT, D)
    for name, size in (
        ("time_in", FREQUENCIES),
        ("guidance_in", FREQUENCIES),
        ("vector_in", POOLED),
    ):
        found |= two(name, size, "in_layer", "out_layer")
    for layer in range(LAYERS):
        for kind in ("img", "txt"):
            at = f"double_blocks.{layer}.{kind}"
            found |= dense(f"{at}_mod.lin", D, 6 * D)
            found |= dense(f"{at}_attn.qkv", D, 3 * D)
            found |= dense(f"{at}_attn.proj", D, D)
            found[f"{at}_attn.norm.query_norm.scale"] = (D // HEADS,)
            found[f"{at}_attn.norm.key_norm.scale"] = (D // HEADS,)
            found |= dense(f"{at}_mlp.0", D, 4 * D) | dense(f"{at}_mlp.2", 4 * D, D)
        at = f"single_blocks.{layer}"
        found |= dense(f"{at}.modulation.lin", D, 3 * D)
        found |= dense(f"{at}.linear1", D, 7 * D) | dense(f"{at}.linear2", 5 * D, D)
        found[f"{at}.norm.query_norm.scale"] = (D // HEADS,)
        found[f"{at}.norm.key_norm.scale"] = (D // HEADS,)
    found |= dense("final_layer.linear", D, 4 * LATENTS)
    return found | dense("final_layer.adaLN_modulation.1", D, 2 * D)


def flux_maxdiffusion() -> Shapes:
    """Linen modules of MaxDiffusion: blocks are stacked."""
    found = dense("img_in", 4 * LATENTS, D) | dense("txt_in", TEXT, D)
    for name, size in (("timestep", FREQUENCIES), ("text", POOLED)):
        found |= two(f"time_text_embed.FlaxTimestepEmbedding_{name}", size)
    for layer in range(LAYERS):
        at = f"scanned_double_blocks.{layer}"
        for kind, letter in (("img", "i"), ("txt", "e")):
            found |= dense(f"{at}.{kind}_norm1.lin", D, 6 * D)
            found |= dense(f"{at}.attn.{letter}_qkv", D, 3 * D)
            found |= dense(f"{at}.attn.{letter}_proj", D, D)
            found |= dense(f"{at}.{kind}_mlp.layers_0", D, 4 * D)
            found |= dense(f"{at}.{kind}_mlp.layers_2", 4 * D, D)
        at = f"scanned_single_blocks.{layer}"
        found |= dense(f"{at}.norm.lin", D, 3 * D) | dense(f"{at}.lin_qkv", D, 3 * D)
        found |= dense(f"{at}.mlp_and_out.lin_mlp", D, 4 * D)
        found |= dense(f"{at}.linear2", 5 * D, D)
    found |= dense("norm_out.linear", D, 2 * D) | dense("proj_out", D, 4 * LATENTS)
    found = stacked(flax(found), r"double_blocks/\d+/", "double_blocks/")
    return stacked(found, r"single_blocks/\d+/", "single_blocks/")


def wan() -> Shapes:
    """Wan of diffusers: patches of a video, the norms of queries are over all heads."""
    found = conv("patch_embedding", LATENTS, D, 1, 2, 2)
    found["scale_shift_table"] = (1, 2, D)
    found |= dense("condition_embedder.time_proj", D, 6 * D)
    found |= two("condition_embedder.time_embedder", FREQUENCIES)
    found |= two("condition_embedder.text_embedder", TEXT)
    for layer in range(LAYERS):
        at = f"blocks.{layer}"
        found[f"{at}.scale_shift_table"] = (1, 6, D)
        for name in ("attn1", "attn2"):
            found |= attention(f"{at}.{name}")
            found[f"{at}.{name}.norm_q.weight"] = (D,)
            found[f"{at}.{name}.norm_k.weight"] = (D,)
        found[f"{at}.norm2.weight"] = found[f"{at}.norm2.bias"] = (D,)
        found |= feed_forward(f"{at}.ffn", HIDDEN)
    return found | dense("proj_out", D, 4 * LATENTS)


def wan_maxdiffusion() -> Shapes:
    """NNX modules of MaxDiffusion."""
    names = {
        "to_q": "query",
        "to_k": "key",
        "to_v": "value",
        "to_out/0": "proj_attn",
        "net/0/proj": "act_fn/proj",
        "net/2": "proj_out",
        "norm2": "norm2/layer_norm",
    }
    found: Shapes = {}
    for path, shape in flax(wan()).items():
        for theirs, own in names.items():
            path = path.replace(f"/{theirs}/", f"/{own}/")
        block = r"(blocks/\d+/)(scale_shift_table)"
        found[re.sub(block, r"\1adaln_\2", path)] = shape
    return found


SPELLINGS = {
    "dit": dit(),
    "dit, original": dit_original(),
    "dit, nnx": flax(dit()),
    "pixart": pixart(),
    "sd3": sd3(),
    "flux": flux(),
    "flux, original": flux_original(),
    "flux, nnx": flax(flux()),
    "flux, maxdiffusion": flux_maxdiffusion(),
    "wan": wan(),
    "wan, maxdiffusion": wan_maxdiffusion(),
    "wan, maxdiffusion, stacked": stacked(
        wan_maxdiffusion(), r"blocks/\d+/", "blocks/"
    ),
}
