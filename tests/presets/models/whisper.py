"""Whisper, all sizes."""

import re

from presets.models._layers import (
    HEADS,
    HIDDEN,
    LAYERS,
    VOCAB,
    D,
    conv,
    dense,
    flax,
    norm,
)
from presets.models.llama import Shapes

MEL, FRAMES, TOKENS = 16, 8, 8


def hugging_face(vocab: int = VOCAB) -> Shapes:
    """Weights as `transformers` saves them; the output layer is the embedding's."""
    found = conv("encoder.conv1", MEL, D, 3) | conv("encoder.conv2", D, D, 3)
    found["encoder.embed_positions.weight"] = (FRAMES, D)
    found["decoder.embed_tokens.weight"] = (vocab, D)
    found["decoder.embed_positions.weight"] = (TOKENS, D)
    for side, attentions in (
        ("encoder", ["self_attn"]),
        ("decoder", ["self_attn", "encoder_attn"]),
    ):
        found |= norm(f"{side}.layer_norm", D)
        for layer in range(LAYERS):
            prefix = f"{side}.layers.{layer}"
            for attention in attentions:
                for role in ("q", "k", "v", "out"):
                    name = f"{prefix}.{attention}.{role}_proj"
                    found |= dense(name, D, D, bias=role != "k")
                found |= norm(f"{prefix}.{attention}_layer_norm", D)
            found |= dense(f"{prefix}.fc1", D, HIDDEN)
            found |= dense(f"{prefix}.fc2", HIDDEN, D)
            found |= norm(f"{prefix}.final_layer_norm", D)
    return {f"model.{name}": shape for name, shape in found.items()}


def bonsai() -> Shapes:
    """NNX modules of bonsai: heads are a dim of their own, and keys have a bias."""
    found: Shapes = {}
    size = D // HEADS
    for path, shape in flax(hugging_face()).items():
        path = path.removeprefix("model/")
        role = re.search(r"(q|k|v|out)_proj/(kernel|bias)", path)
        if role is None:
            found[path] = shape
            continue
        kind = {"q": "query", "k": "key", "v": "value", "out": "out"}[role[1]]
        own = path.replace(f"{role[1]}_proj", kind)
        if kind == "out":
            found[own] = (HEADS, size, D) if role[2] == "kernel" else (D,)
        else:
            found[own] = (D, HEADS, size) if role[2] == "kernel" else (HEADS, size)
            found[own.replace("kernel", "bias")] = (HEADS, size)
    return found


SPELLINGS = {
    "hugging face": hugging_face(),
    "linen": flax(hugging_face()),
    "bonsai": bonsai(),
}
