"""Mixtral."""

from presets.models._decoders import (
    FLAX,
    HUGGING_FACE,
    KERAS_HUB,
    MAXTEXT,
    as_flax,
    flat_heads,
    stacked,
)
from presets.models._experts import (
    FLAX_EXPERTS,
    attention,
    each_of,
    fused,
    shapes,
    stacks,
)

IN_FILES = attention(HUGGING_FACE) | {
    "model.layers.{n}.block_sparse_moe.gate.weight": "E d",
    **each_of(
        "model.layers.{n}.block_sparse_moe.experts.{e}.*.weight",
        {"w1": "f d", "w3": "f d", "w2": "d f"},
    ),
}
MODULES = attention(HUGGING_FACE) | {
    "model.layers.{n}.mlp.gate.weight": "E d",
    **fused("model.layers.{n}.mlp.experts"),
}
EASYDEL = as_flax(attention(HUGGING_FACE), "kernel") | {
    "model/layers/{n}/block_sparse_moe/gate/kernel": "d E",
    **stacks("model/layers/{n}/block_sparse_moe/experts/*/kernel", "w1", "w3", "w2"),
}
IN_KERAS = "transformer_layer_{n}/mixtral_sparse_moe_block"
IN_KERAS_HUB = attention(KERAS_HUB) | {
    f"{IN_KERAS}/sparse_feedforward_gate_dense/kernel": "d E",
    **stacks(
        f"{IN_KERAS}/experts/expert_feedforward_*_dense",
        "gate",
        "intermediate",
        "output",
    ),
}
IN_MAXTEXT = attention(MAXTEXT) | {
    "params/decoder/layers_{n}/MoeBlock_0/gate/kernel": "d E",
    **stacks("params/decoder/layers_{n}/MoeBlock_0/*", "wi_0", "wi_1", "wo"),
}
IN_FLAX = attention(FLAX) | FLAX_EXPERTS

SPELLINGS = {
    "hugging face": shapes(IN_FILES),
    "hugging face, fused": shapes(MODULES),
    "easydel": shapes(EASYDEL),
    "easydel, stacked": shapes(stacked(EASYDEL)),
    "keras hub": shapes(IN_KERAS_HUB),
    "maxtext": shapes(IN_MAXTEXT),
    "maxtext, scanned": shapes(stacked(IN_MAXTEXT, dim=1)),
    "flax": shapes(IN_FLAX),
    "flax, one dim for heads": shapes(flat_heads(IN_FLAX)),
    "flax, stacked": shapes(stacked(IN_FLAX)),
}
