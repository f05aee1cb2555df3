"""Llama 2 and 3, and all decoders with the same parameters."""

from presets.models import Shapes as Shapes
from presets.models._decoders import CONSOLIDATED as CONSOLIDATED
from presets.models._decoders import (
    EASYLM,
    FLAX,
    HUGGING_FACE,
    JAX_LLM_EXAMPLES,
    KERAS_HUB,
    MAXTEXT,
    TUNIX,
    as_flax,
    flat_heads,
    shapes,
    stacked,
    tied,
)
from presets.models._decoders import HEADS as HEADS
from presets.models._decoders import HIDDEN as HIDDEN
from presets.models._decoders import KV_HEADS as KV_HEADS
from presets.models._decoders import LAYERS as LAYERS
from presets.models._decoders import SIZE as SIZE
from presets.models._decoders import VOCAB as VOCAB
from presets.models._decoders import D as D

SPELLINGS = {
    "hugging face": shapes(HUGGING_FACE),
    "hugging face, tied": shapes(tied(HUGGING_FACE)),
    "meta": shapes(CONSOLIDATED),
    "linen": shapes(as_flax(HUGGING_FACE, "weight")),
    "easydel": shapes(as_flax(HUGGING_FACE, "kernel")),
    "easylm": shapes(EASYLM),
    "tunix": shapes(TUNIX),
    "tunix, tied": shapes(tied(TUNIX)),
    "keras hub": shapes(KERAS_HUB),
    "maxtext": shapes(MAXTEXT),
    "maxtext, scanned": shapes(stacked(MAXTEXT, dim=1)),
    "jax-llm-examples": shapes(JAX_LLM_EXAMPLES),
    "flax": shapes(FLAX),
    "flax, one dim for heads": shapes(flat_heads(FLAX)),
    "flax, stacked": shapes(stacked(FLAX)),
    "flax, stacked, one dim for heads": shapes(flat_heads(stacked(FLAX))),
}
