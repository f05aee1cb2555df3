"""Mistral 7B: the parameters of Llama."""

from presets.models._decoders import (
    CONSOLIDATED,
    HUGGING_FACE,
    KERAS_HUB,
    MAXTEXT,
    as_flax,
    shapes,
)

SPELLINGS = {
    "hugging face": shapes(HUGGING_FACE),
    "consolidated": shapes(CONSOLIDATED),
    "linen": shapes(as_flax(HUGGING_FACE, "weight")),
    "easydel": shapes(as_flax(HUGGING_FACE, "kernel")),
    "keras hub": shapes(KERAS_HUB),
    "maxtext": shapes(MAXTEXT),
}
