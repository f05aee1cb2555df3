"""ViT: Hugging Face (4 and 5), bonsai, and big_vision, whose layers may be stacked."""

from presets.models._layers import (
    CLASSES,
    HIDDEN,
    LAYERS,
    PATCH,
    PATCHES,
    D,
    conv,
    dense,
    flax,
    heads,
    norm,
    stacked,
)
from presets.models.llama import Shapes


def hugging_face(version: int = 4) -> Shapes:
    """Weights as `transformers` saves them; version 5 names modules otherwise."""
    found: Shapes = {
        "vit.embeddings.cls_token": (1, 1, D),
        "vit.embeddings.position_embeddings": (1, PATCHES + 1, D),
    }
    found |= conv("vit.embeddings.patch_embeddings.projection", 3, D, PATCH, PATCH)
    for layer in range(LAYERS):
        prefix = f"vit.encoder.layer.{layer}" if version == 4 else f"vit.layers.{layer}"
        if version == 4:
            for role in ("query", "key", "value"):
                found |= dense(f"{prefix}.attention.attention.{role}", D, D)
            found |= dense(f"{prefix}.attention.output.dense", D, D)
            found |= dense(f"{prefix}.intermediate.dense", D, HIDDEN)
            found |= dense(f"{prefix}.output.dense", HIDDEN, D)
        else:
            for role in "qkvo":
                found |= dense(f"{prefix}.attention.{role}_proj", D, D)
            found |= dense(f"{prefix}.mlp.fc1", D, HIDDEN)
            found |= dense(f"{prefix}.mlp.fc2", HIDDEN, D)
        found |= norm(f"{prefix}.layernorm_before", D)
        found |= norm(f"{prefix}.layernorm_after", D)
    return found | norm("vit.layernorm", D) | dense("classifier", D, CLASSES)


def bonsai() -> Shapes:
    """NNX modules of bonsai."""
    found: Shapes = {
        "pos_embeddings/cls_token": (1, 1, D),
        "pos_embeddings/pos_embeddings": (1, PATCHES + 1, D),
    }
    rest = conv("pos_embeddings.projection", 3, D, PATCH, PATCH)
    for layer in range(LAYERS):
        found |= heads(f"layers/{layer}/attention")
        rest |= dense(f"layers.{layer}.linear1", D, HIDDEN)
        rest |= dense(f"layers.{layer}.linear2", HIDDEN, D)
        rest |= norm(f"layers.{layer}.layernorm_before", D)
        rest |= norm(f"layers.{layer}.layernorm_after", D)
    return found | flax(rest | norm("ln", D) | dense("classifier", D, CLASSES))


def tower(prefix: str = "", blocks: str = "Transformer", d: int = D) -> Shapes:
    """The layers of big_vision and their last norm."""
    found: Shapes = {}
    for layer in range(LAYERS):
        block = f"{prefix}{blocks}/encoderblock_{layer}"
        found |= heads(f"{block}/MultiHeadDotProductAttention_0", d)
        rest = dense("MlpBlock_0.Dense_0", d, 4 * d) | norm("LayerNorm_0", d)
        rest |= dense("MlpBlock_0.Dense_1", 4 * d, d) | norm("LayerNorm_1", d)
        found |= {f"{block}/{path}": shape for path, shape in flax(rest).items()}
    return found | flax(norm(f"{prefix}{blocks}/encoder_norm", d))


def patches(prefix: str = "", d: int = D) -> Shapes:
    """Patches and positions of big_vision."""
    found = flax(conv(f"{prefix}embedding", 3, d, PATCH, PATCH))
    return found | {f"{prefix}pos_embedding": (1, PATCHES, d)}


def pooling(prefix: str = "", d: int = D) -> Shapes:
    """The attention that makes one vector of all patches, in big_vision."""
    at = f"{prefix}MAPHead_0"
    found = {f"{at}/probe": (1, 1, d)} | heads(
        f"{at}/MultiHeadDotProductAttention_0", d
    )
    rest = norm("LayerNorm_0", d)
    rest |= dense("MlpBlock_0.Dense_0", d, 4 * d)
    rest |= dense("MlpBlock_0.Dense_1", 4 * d, d)
    return found | {f"{at}/{path}": shape for path, shape in flax(rest).items()}


def big_vision(pool: str = "gap") -> Shapes:
    """Linen modules of big_vision, and of vision_transformer."""
    found = patches() | tower() | flax(dense("head", D, CLASSES))
    if pool == "tok":
        found |= {"cls": (1, 1, D)} | flax(dense("pre_logits", D, D))
    return found | pooling() if pool == "map" else found


BLOCK = r"encoderblock_\d+/"
SPELLINGS = {
    "hugging face": hugging_face(),
    "hugging face, version 5": hugging_face(5),
    "linen": flax(hugging_face()),
    "bonsai": bonsai(),
    "big_vision": big_vision(),
    "big_vision, class token": big_vision("tok"),
    "big_vision, stacked": stacked(big_vision("map"), BLOCK, "encoderblock/"),
}
