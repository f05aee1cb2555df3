"""gpt-oss: biases, a sink for each head, and experts as MXFP4."""

import re

from presets.models._decoders import (
    FLAX,
    HUGGING_FACE,
    JAX_LLM_EXAMPLES,
    KERAS_HUB,
    MAXTEXT,
    Table,
    as_flax,
    stacked,
)
from presets.models._experts import (
    FLAX_EXPERTS,
    attention,
    each_of,
    shapes,
    stacks,
)

# 32 inputs of an expert share a scale: `d/32` and `f/32` blocks.
BLOCKS = {"d/32": 2, "f/32": 3, "16": 16}
FLAT_BIASES = {"q_proj": "Hs", "k_proj": "Ks", "v_proj": "Ks", "o_proj": "d"}
HEADS_BIASES = {"query": "H s", "key": "K s", "value": "K s"}

FILES = attention(HUGGING_FACE) | {
    **each_of("model.layers.{n}.self_attn.*.bias", FLAT_BIASES),
    "model.layers.{n}.self_attn.sinks": "H",
    "model.layers.{n}.mlp.router.weight": "E d",
    "model.layers.{n}.mlp.router.bias": "E",
}
# Unlike the other modules of transformers, the experts are (experts, in, out).
IN_LAYER = "model.layers.{n}.mlp.experts"
BIASES = each_of(f"{IN_LAYER}.*_bias", {"gate_up_proj": "E 2f", "down_proj": "E d"})
ARRAYS = each_of(f"{IN_LAYER}.*", {"gate_up_proj": "E d 2f", "down_proj": "E f d"})
MXFP4: Table = {
    f"{IN_LAYER}.gate_up_proj_blocks": "E 2f d/32 16",
    f"{IN_LAYER}.gate_up_proj_scales": "E 2f d/32",
    f"{IN_LAYER}.down_proj_blocks": "E d f/32 16",
    f"{IN_LAYER}.down_proj_scales": "E d f/32",
}


def in_jax(table: Table) -> Table:
    """The same paths with `/`; arrays as they are."""
    return {path.replace(".", "/"): dims for path, dims in table.items()}


EASYDEL = as_flax(FILES, "kernel") | {
    **stacks(
        "model/layers/{n}/mlp/experts/*/kernel", "gate_proj", "up_proj", "down_proj"
    ),
    **each_of(
        "model/layers/{n}/mlp/experts/*/bias",
        {"gate_proj": "E f", "up_proj": "E f", "down_proj": "E d"},
    ),
}
IN_KERAS = "transformer_layer_{n}/sparse_moe_block"
# Its norms have the names of Hugging Face.
NORMS = {"self_attention_layernorm": "input", "feedforward_layernorm": "post_attention"}
IN_KERAS_HUB = {
    path.replace(name, f"{own}_layernorm"): dims
    for path, dims in attention(KERAS_HUB).items()
    for name, own in NORMS.items()
    if name in path or not any(other in path for other in NORMS)
} | {
    **each_of("transformer_layer_{n}/self_attention/*/bias", HEADS_BIASES),
    "transformer_layer_{n}/self_attention/attention_output/bias": "d",
    "transformer_layer_{n}/self_attention/sinks": "H",
    f"{IN_KERAS}/router/router_dense/kernel": "d E",
    f"{IN_KERAS}/router/router_dense/bias": "E",
    **each_of(
        f"{IN_KERAS}/experts/*",
        {
            **{"gate_up_proj": "E d 2f", "gate_up_proj_bias": "E 2f"},
            **{"down_proj": "E f d", "down_proj_bias": "E d"},
        },
    ),
}
IN_BLOCK = "params/decoder/layers_{n}/GptOssMlp"
IN_MAXTEXT = {
    path.replace("self_attention/", "GptOssAttention/"): dims
    for path, dims in attention(MAXTEXT).items()
} | {
    **each_of("params/decoder/layers_{n}/GptOssAttention/*/bias", HEADS_BIASES),
    "params/decoder/layers_{n}/GptOssAttention/out/bias": "d",
    "params/decoder/layers_{n}/GptOssAttention/sinks": "H",
    f"{IN_BLOCK}/gate/kernel": "d E",
    f"{IN_BLOCK}/gate/bias": "E",
    **stacks(f"{IN_BLOCK}/*", "wi_0", "wi_1", "wo"),
    **each_of(f"{IN_BLOCK}/*_bias", {"wi_0": "E f", "wi_1": "E f", "wo": "E d"}),
}
IN_EXAMPLES = attention(JAX_LLM_EXAMPLES, "attn") | {
    **each_of("layers/{n}/attn/*_bias", {"q": "H s", "k": "K s", "v": "K s"}),
    "layers/{n}/attn/o_bias": "d",
    "layers/{n}/attn/sinks": "H",
    "layers/{n}/ffw/w_router": "d E",
    "layers/{n}/ffw/w_router_bias": "E",
    "layers/{n}/ffw/we_gate_up": "E d 2f",
    "layers/{n}/ffw/we_gate_up_bias": "E 2f",
    "layers/{n}/ffw/we_down": "E f d",
    "layers/{n}/ffw/we_down_bias": "E d",
}
IN_FLAX = attention(FLAX) | {
    **FLAX_EXPERTS,
    **each_of(
        "layers/{n}/mlp/experts/*/bias", {"gate": "E f", "up": "E f", "down": "E d"}
    ),
    **each_of("layers/{n}/attention/*/bias", HEADS_BIASES | {"out": "d"}),
    "layers/{n}/attention/sinks": "H",
    "layers/{n}/mlp/router/bias": "E",
}


def in_blocks(table: Table) -> Table:
    """MaxText's scan over blocks of two layers: `layers/layers_0`, stacked on dim 1."""
    scanned = stacked(table, dim=1).items()
    return {
        path.replace("decoder/layers/", f"decoder/layers/layers_{number}/"): dims
        for path, dims in scanned
        for number in range(2 if re.search("decoder/layers/", path) else 1)
    }


SPELLINGS = {
    "hugging face": shapes(FILES | ARRAYS | BIASES),
    "hugging face, MXFP4": shapes(FILES | MXFP4 | BIASES, **BLOCKS),
    "easydel": shapes(EASYDEL),
    "easydel, stacked": shapes(stacked(EASYDEL)),
    "easydel, gate and up as one array": shapes(
        as_flax(FILES, "kernel") | in_jax(ARRAYS | BIASES)
    ),
    "keras hub": shapes(IN_KERAS_HUB),
    "maxtext": shapes(IN_MAXTEXT),
    "maxtext, scanned": shapes(in_blocks(IN_MAXTEXT)),
    "jax-llm-examples": shapes(IN_EXAMPLES),
    "flax": shapes(IN_FLAX),
    "flax, stacked": shapes(stacked(IN_FLAX)),
}
