"""CLIP: Hugging Face, clip-jax (stacked), and OpenAI's names, also of open_clip."""

from presets.models._layers import (
    HEADS,
    LAYERS,
    LENGTH,
    PATCH,
    PATCHES,
    VOCAB,
    D,
    conv,
    dense,
    flax,
    norm,
)
from presets.models.llama import Shapes
from presets.models.siglip import D_VISION, layers

PROJECTION = 32


def hugging_face() -> Shapes:
    """Weights as `transformers` saves them."""
    found: Shapes = {"logit_scale": ()}
    found["text_model.embeddings.token_embedding.weight"] = (VOCAB, D)
    found["text_model.embeddings.position_embedding.weight"] = (LENGTH, D)
    found |= layers("text_model.", D) | norm("text_model.final_layer_norm", D)
    at = "vision_model.embeddings"
    found[f"{at}.class_embedding"] = (D_VISION,)
    found |= conv(f"{at}.patch_embedding", 3, D_VISION, PATCH, PATCH, bias=False)
    found[f"{at}.position_embedding.weight"] = (PATCHES + 1, D_VISION)
    found |= layers("vision_model.", D_VISION)
    found |= norm("vision_model.pre_layrnorm", D_VISION)
    found |= norm("vision_model.post_layernorm", D_VISION)
    found |= dense("text_projection", D, PROJECTION, bias=False)
    return found | dense("visual_projection", D_VISION, PROJECTION, bias=False)


def clip_jax() -> Shapes:
    """Linen modules of clip-jax: layers are stacked, heads a dim of their own."""
    found: Shapes = {
        "logit_scale": (),
        "text/embeddings/token_embedding/embedding": (VOCAB, D),
        "text/embeddings/position_embedding/embedding": (LENGTH, D),
        "vision/embeddings/class_embedding": (1, 1, D_VISION),
        "vision/embeddings/patch_embedding/kernel": (PATCH, PATCH, 3, D_VISION),
        "vision/embeddings/position_embedding/embedding": (PATCHES + 1, D_VISION),
        "text_projection/kernel": (D, PROJECTION),
        "visual_projection/kernel": (D_VISION, PROJECTION),
    }
    for tower, d in (("text", D), ("vision", D_VISION)):
        at = f"{tower}/encoder/layers"
        for role in ("query", "key", "value"):
            found[f"{at}/attention/{role}/kernel"] = (LAYERS, d, HEADS, d // HEADS)
            found[f"{at}/attention/{role}/bias"] = (LAYERS, HEADS, d // HEADS)
        found[f"{at}/attention/out/kernel"] = (LAYERS, HEADS, d // HEADS, d)
        found[f"{at}/attention/out/bias"] = (LAYERS, d)
        found[f"{at}/mlp/wi/kernel"] = (LAYERS, d, 4 * d)
        found[f"{at}/mlp/wi/bias"] = (LAYERS, 4 * d)
        found[f"{at}/mlp/wo/kernel"] = (LAYERS, 4 * d, d)
        found[f"{at}/mlp/wo/bias"] = (LAYERS, d)
        for name in ("pre_attention_norm", "pre_mlp_norm"):
            found[f"{at}/{name}/scale"] = found[f"{at}/{name}/bias"] = (LAYERS, d)
        last = f"{tower}/final_norm"
        found[f"{last}/scale"] = found[f"{last}/bias"] = (d,)
    return found


def openai() -> Shapes:
    """The names of OpenAI's code and of open_clip, (out, in)."""
    found: Shapes = {"logit_scale": (), "token_embedding.weight": (VOCAB, D)}
    found["positional_embedding"] = (LENGTH, D)
    found["text_projection"] = (D, PROJECTION)
    found["visual.class_embedding"] = (D_VISION,)
    found["visual.positional_embedding"] = (PATCHES + 1, D_VISION)
    found["visual.proj"] = (D_VISION, PROJECTION)
    found |= conv("visual.conv1", 3, D_VISION, PATCH, PATCH, bias=False)
    for prefix, d in (("", D), ("visual.", D_VISION)):
        for layer in range(LAYERS):
            at = f"{prefix}transformer.resblocks.{layer}"
            found[f"{at}.attn.in_proj_weight"] = (3 * d, d)
            found[f"{at}.attn.in_proj_bias"] = (3 * d,)
            found |= dense(f"{at}.attn.out_proj", d, d)
            found |= dense(f"{at}.mlp.c_fc", d, 4 * d)
            found |= dense(f"{at}.mlp.c_proj", 4 * d, d)
            found |= norm(f"{at}.ln_1", d) | norm(f"{at}.ln_2", d)
    found |= norm("visual.ln_pre", D_VISION) | norm("visual.ln_post", D_VISION)
    return found | norm("ln_final", D)


SPELLINGS = {
    "hugging face": hugging_face(),
    "linen": flax(hugging_face()),
    "clip-jax": clip_jax(),
    "openai": openai(),
}
