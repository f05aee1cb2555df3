"""Qwen3 with experts."""

from presets.models._decoders import (
    FLAX,
    HUGGING_FACE,
    JAX_LLM_EXAMPLES,
    KERAS_HUB,
    MAXTEXT,
    TUNIX,
    Table,
    as_flax,
    stacked,
)
from presets.models._experts import (
    FLAX_EXPERTS,
    attention,
    float8,
    fused,
    in_files,
    shapes,
    stacks,
)
from presets.models.qwen3 import norms

IN_LAYER = "model.layers.{n}.mlp"
FILES = attention(HUGGING_FACE) | norms("model.layers.{n}.self_attn.{name}_norm.weight")
ROUTER: Table = {f"{IN_LAYER}.gate.weight": "E d"}
IN_FILES = FILES | ROUTER | in_files(f"{IN_LAYER}.experts." + "{e}")
EASYDEL = as_flax(FILES | ROUTER, "kernel") | stacks(
    "model/layers/{n}/mlp/experts/*/kernel", "gate_proj", "up_proj", "down_proj"
)
# A layer without experts, as `mlp_only_layers` has them.
DENSE = in_files("model.layers.2.mlp")
IN_TUNIX = attention(TUNIX) | {
    **norms("layers/{n}/attn/{name}_norm/w"),
    "layers/{n}/mlp/router/kernel": "d E",
    **stacks("layers/{n}/mlp/*", "gate_proj", "up_proj", "down_proj"),
}
# KerasHub has gate and up side by side in one array.
IN_KERAS = "transformer_layer_{n}/qwen3_sparse_moe_block"
IN_KERAS_HUB = attention(KERAS_HUB) | {
    **norms("transformer_layer_{n}/self_attention/{name}_dense_layernorm/scale", False),
    f"{IN_KERAS}/sparse_feedforward_gate_dense/kernel": "d E",
    f"{IN_KERAS}/experts/expert_feedforward_gate_dense": "E d 2f",
    f"{IN_KERAS}/experts/expert_feedforward_output_dense": "E f d",
}
IN_MAXTEXT = attention(MAXTEXT) | {
    **norms("params/decoder/layers_{n}/self_attention/{name}_norm/scale", False),
    "params/decoder/layers_{n}/moe_block/gate/kernel": "d E",
    **stacks("params/decoder/layers_{n}/moe_block/*", "wi_0", "wi_1", "wo"),
}
IN_EXAMPLES = attention(JAX_LLM_EXAMPLES, "attn") | {
    **norms("layers/{n}/attn/{name}_gamma"),
    "layers/{n}/ffw/w_router": "d E",
    **stacks("layers/{n}/ffw/*", "we_gate", "we_up", "we_down"),
}
IN_FLAX = attention(FLAX) | FLAX_EXPERTS
IN_FLAX |= norms("layers/{n}/attention/{name}_norm/scale", False)

SPELLINGS = {
    "hugging face": shapes(IN_FILES),
    "hugging face, a dense layer": shapes(IN_FILES | DENSE),
    "hugging face, float8": float8(IN_FILES),
    "hugging face, fused": shapes(FILES | ROUTER | fused(f"{IN_LAYER}.experts")),
    "easydel": shapes(EASYDEL),
    "easydel, a dense layer": shapes(EASYDEL | as_flax(DENSE, "kernel")),
    "easydel, stacked": shapes(stacked(EASYDEL)),
    "tunix": shapes(IN_TUNIX),
    "keras hub": shapes(IN_KERAS_HUB),
    "maxtext": shapes(IN_MAXTEXT),
    "maxtext, scanned": shapes(stacked(IN_MAXTEXT, dim=1)),
    "jax-llm-examples": shapes(IN_EXAMPLES),
    "flax": shapes(IN_FLAX),
    "flax, stacked": shapes(stacked(IN_FLAX)),
}
