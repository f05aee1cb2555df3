"""Qwen 3 with experts."""

from presets.models._decoders import TUNIX, shapes
from presets.models._experts import (
    EXPERTS,
    attention,
    easydel,
    fused,
    gated,
    own,
    stacked,
)
from presets.models.llama import HIDDEN, LAYERS, SIZE, D, Shapes


def hugging_face(dense: tuple[int, ...] = (), as_modules: bool = False) -> Shapes:
    """Weights as `transformers` saves them, or its modules.

    Args:
        dense: layers without experts.
        as_modules: all experts of a layer together, as in the modules of version 5.
    """
    found = attention(norms=True)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}.mlp"
        if layer in dense:
            found |= gated(prefix, hidden=4 * HIDDEN)
            continue
        found[f"{prefix}.gate.weight"] = (EXPERTS, D)
        if as_modules:
            found |= fused(f"{prefix}.experts")
        for expert in range(0 if as_modules else EXPERTS):
            found |= gated(f"{prefix}.experts.{expert}")
    return found


def tunix_with_experts() -> Shapes:
    """NNX modules of google-tunix: the experts' arrays are in the layer itself."""
    found = {
        path: shape for path, shape in shapes(TUNIX).items() if "/mlp/" not in path
    }
    for layer in range(LAYERS):
        prefix = f"layers/{layer}"
        found[f"{prefix}/attn/q_norm/w"] = (SIZE,)
        found[f"{prefix}/attn/k_norm/w"] = (SIZE,)
        found[f"{prefix}/mlp/router/kernel"] = (D, EXPERTS)
        found[f"{prefix}/mlp/gate_proj"] = (EXPERTS, D, HIDDEN)
        found[f"{prefix}/mlp/up_proj"] = (EXPERTS, D, HIDDEN)
        found[f"{prefix}/mlp/down_proj"] = (EXPERTS, HIDDEN, D)
    return found


SPELLINGS = {
    "hugging face": hugging_face(),
    "hugging face, a dense layer": hugging_face(dense=(0,)),
    "hugging face, fused": hugging_face(as_modules=True),
    "easydel": easydel(hugging_face()),
    "easydel, a dense layer": easydel(hugging_face(dense=(0,))),
    "easydel, stacked": stacked(easydel(hugging_face())),
    "tunix": tunix_with_experts(),
    "flax": own(norms=True),
    "flax, stacked": stacked(own(norms=True)),
}
