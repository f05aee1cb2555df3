"""Mixtral."""

from presets.models._experts import EXPERTS, attention, easydel, fused, own, stacked
from presets.models.llama import HIDDEN, LAYERS, D, Shapes


def hugging_face() -> Shapes:
    """Weights as `transformers` saves them: each expert is a module of its own."""
    found = attention()
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}.block_sparse_moe"
        found[f"{prefix}.gate.weight"] = (EXPERTS, D)
        for expert in range(EXPERTS):
            for name in ("w1", "w3"):
                found[f"{prefix}.experts.{expert}.{name}.weight"] = (HIDDEN, D)
            found[f"{prefix}.experts.{expert}.w2.weight"] = (D, HIDDEN)
    return found


def modules() -> Shapes:
    """The modules of `transformers` 5."""
    found = attention()
    for layer in range(LAYERS):
        found[f"model.layers.{layer}.mlp.gate.weight"] = (EXPERTS, D)
        found |= fused(f"model.layers.{layer}.mlp.experts")
    return found


SPELLINGS = {
    "hugging face": hugging_face(),
    "hugging face, fused": modules(),
    "easydel": easydel(hugging_face()),
    "easydel, stacked": stacked(easydel(hugging_face())),
    "flax": own(),
    "flax, stacked": stacked(own()),
}
