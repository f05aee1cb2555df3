"""Qwen3: Llama with norms of queries and keys; all heads together are not `d` wide."""

from presets.models._decoders import (
    FLAX,
    HUGGING_FACE,
    JAX_LLM_EXAMPLES,
    KERAS_HUB,
    MAXTEXT,
    TUNIX,
    Table,
    as_flax,
    flat_heads,
    shapes,
    stacked,
    tied,
)

WIDE = {"s": 32, "Hs": 8 * 32, "Ks": 4 * 32}


def norms(template: str, short: bool = True) -> Table:
    """The norms of a layer; a template such as `layers/{n}/attn/{name}_norm/w`."""
    return {
        template.replace("{name}", name[0] if short else name): "s"
        for name in ("query", "key")
    }


def bonsai() -> Table:
    """As in Tunix, with Flax's own names of leaves, and a head also if it is tied."""
    found: Table = {}
    for path, dims in TUNIX.items():
        stem, _, leaf = path.rpartition("/")
        if "norm" in stem:
            leaf = "scale"
        elif leaf == "input_embedding":
            leaf = "embedding"
        else:
            leaf = "kernel"
        found[f"{stem}/{leaf}"] = dims
    return found | norms("layers/{n}/attn/{name}_norm/scale")


IN_FILES = norms("model.layers.{n}.self_attn.{name}_norm.weight")
IN_MAXTEXT = norms("params/decoder/layers_{n}/self_attention/{name}_norm/scale", False)
IN_KERAS = "transformer_layer_{n}/self_attention/{name}_dense_layernorm/scale"
IN_FLAX = FLAX | norms("layers/{n}/attention/{name}_norm/scale", False)

SPELLINGS = {
    "hugging face": shapes(HUGGING_FACE | IN_FILES, **WIDE),
    "hugging face, tied": shapes(tied(HUGGING_FACE) | IN_FILES, **WIDE),
    "easydel": shapes(as_flax(HUGGING_FACE | IN_FILES, "kernel"), **WIDE),
    "tunix": shapes(TUNIX | norms("layers/{n}/attn/{name}_norm/w"), **WIDE),
    "bonsai": shapes(bonsai(), **WIDE),
    "keras hub": shapes(KERAS_HUB | norms(IN_KERAS, False), **WIDE),
    "maxtext": shapes(MAXTEXT | IN_MAXTEXT, **WIDE),
    "maxtext, scanned": shapes(stacked(MAXTEXT | IN_MAXTEXT, dim=1), **WIDE),
    "jax-llm-examples": shapes(
        JAX_LLM_EXAMPLES | norms("layers/{n}/{name}_gamma"), **WIDE
    ),
    "flax": shapes(IN_FLAX, **WIDE),
    "flax, one dim for heads": shapes(flat_heads(IN_FLAX), **WIDE),
    "flax, stacked": shapes(stacked(IN_FLAX), **WIDE),
}
