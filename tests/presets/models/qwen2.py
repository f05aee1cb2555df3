"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values."""

from presets.models._decoders import (
    FLAX,
    HUGGING_FACE,
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


def biases(template: str, short: bool, flat: bool) -> Table:
    """The biases of a layer; a template such as `layers/{n}/attn/{name}_bias`."""
    return {
        template.replace("{name}", name[0] if short else name): heads
        + ("s" if flat else " s")
        for name, heads in (("query", "H"), ("key", "K"), ("value", "K"))
    }


IN_FILES = biases("model.layers.{n}.self_attn.{name}_proj.bias", True, True)
IN_MAXTEXT = biases(
    "params/decoder/layers_{n}/self_attention/{name}/bias", False, False
)
IN_FLAX = FLAX | biases("layers/{n}/attention/{name}/bias", False, False)

SPELLINGS = {
    "hugging face": shapes(HUGGING_FACE | IN_FILES),
    "hugging face, tied": shapes(tied(HUGGING_FACE) | IN_FILES),
    "easydel": shapes(as_flax(HUGGING_FACE | IN_FILES, "kernel")),
    "tunix": shapes(TUNIX | biases("layers/{n}/attn/{name}_bias", True, True)),
    "keras hub": shapes(
        KERAS_HUB
        | biases("transformer_layer_{n}/self_attention/{name}/bias", False, False)
    ),
    "maxtext": shapes(MAXTEXT | IN_MAXTEXT),
    "maxtext, scanned": shapes(stacked(MAXTEXT | IN_MAXTEXT, dim=1)),
    "flax": shapes(IN_FLAX),
    "flax, one dim for heads": shapes(flat_heads(IN_FLAX)),
    "flax, stacked": shapes(stacked(IN_FLAX)),
}
