"""SigLIP and SigLIP 2: Hugging Face, big_vision, the towers of Tunix and bonsai."""

from presets.models._layers import (
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
    stacked,
)
from presets.models.llama import Shapes
from presets.models.vit import BLOCK, patches, pooling, tower

D_VISION = 96


def layers(prefix: str, d: int) -> Shapes:
    """The layers of one tower, as `transformers` names them for CLIP too."""
    found: Shapes = {}
    for layer in range(LAYERS):
        at = f"{prefix}encoder.layers.{layer}"
        for role in ("q", "k", "v", "out"):
            found |= dense(f"{at}.self_attn.{role}_proj", d, d)
        found |= dense(f"{at}.mlp.fc1", d, 4 * d) | dense(f"{at}.mlp.fc2", 4 * d, d)
        found |= norm(f"{at}.layer_norm1", d) | norm(f"{at}.layer_norm2", d)
    return found


def vision(prefix: str = "", d: int = D_VISION) -> Shapes:
    """The vision tower without the pooling head."""
    found = conv(f"{prefix}embeddings.patch_embedding", 3, d, PATCH, PATCH)
    found[f"{prefix}embeddings.position_embedding.weight"] = (PATCHES, d)
    return found | layers(prefix, d) | norm(f"{prefix}post_layernorm", d)


def hugging_face(patches_are_rows: bool = False) -> Shapes:
    """Weights as `transformers` saves them; patches are rows in SigLIP 2 NaFlex."""
    found: Shapes = {"logit_scale": (1,), "logit_bias": (1,)}
    found["text_model.embeddings.token_embedding.weight"] = (VOCAB, D)
    found["text_model.embeddings.position_embedding.weight"] = (LENGTH, D)
    found |= layers("text_model.", D) | norm("text_model.final_layer_norm", D)
    found |= dense("text_model.head", D, D_VISION) | vision("vision_model.")
    if patches_are_rows:
        patch = 3 * PATCH * PATCH
        found["vision_model.embeddings.patch_embedding.weight"] = (D_VISION, patch)
    at = "vision_model.head"
    found[f"{at}.probe"] = (1, 1, D_VISION)
    found[f"{at}.attention.in_proj_weight"] = (3 * D_VISION, D_VISION)
    found[f"{at}.attention.in_proj_bias"] = (3 * D_VISION,)
    found |= dense(f"{at}.attention.out_proj", D_VISION, D_VISION)
    found |= norm(f"{at}.layernorm", D_VISION)
    found |= dense(f"{at}.mlp.fc1", D_VISION, 4 * D_VISION)
    return found | dense(f"{at}.mlp.fc2", 4 * D_VISION, D_VISION)


def tunix() -> Shapes:
    """The vision tower of google-tunix, NNX."""
    at = "siglip_encoder"
    found = conv(f"{at}.embedding", 3, D, PATCH, PATCH)
    for layer in range(LAYERS):
        block = f"{at}.transformer.blocks.{layer}"
        for role in ("query", "key", "value", "out"):
            found |= dense(f"{block}.attn.{role}_proj", D, D)
        found |= dense(f"{block}.mlp.fc1", D, 4 * D)
        found |= dense(f"{block}.mlp.fc2", 4 * D, D)
        found |= norm(f"{block}.ln1", D) | norm(f"{block}.ln2", D)
    found |= norm(f"{at}.transformer.encoder_norm", D)
    return flax(found) | {f"{at}/pos_embedding": (1, PATCHES, D)}


def big_vision() -> Shapes:
    """Both towers of big_vision, Linen."""
    found: Shapes = {"t": (1,), "b": (1,), "txt/Embed_0/embedding": (VOCAB, D)}
    found["txt/pos_embedding"] = (1, LENGTH, D)
    found |= tower("txt/", "Encoder_0") | flax(dense("txt.head", D, D_VISION))
    found |= patches("img/", D_VISION) | tower("img/", d=D_VISION)
    return found | pooling("img/", D_VISION)


SPELLINGS = {
    "hugging face": hugging_face(),
    "hugging face, patches as rows": hugging_face(patches_are_rows=True),
    "bonsai": flax(vision()),
    "tunix": tunix(),
    "big_vision": big_vision(),
    "big_vision, stacked": stacked(big_vision(), BLOCK, "encoderblock/"),
}
