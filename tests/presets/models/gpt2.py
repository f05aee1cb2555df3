"""GPT-2 with kernels that are (in, out). No axis divides the vocabulary."""

from presets.models import Shapes, written_out
from presets.models._decoders import Table

# One head is 16 wide. As of 50257, no axis divides the 259 rows of the embedding.
SIZES = {"L": 2, "V": 259, "d": 128, "P": 32, "ddd": 3 * 128, "f": 4 * 128}
SIZES |= {"H": 8, "s": 16, "one": 1}

HUGGING_FACE: Table = {
    "wte.weight": "V d",
    "wpe.weight": "P d",
    "h.{n}.ln_1.weight": "d",
    "h.{n}.ln_1.bias": "d",
    "h.{n}.attn.c_attn.weight": "d ddd",
    "h.{n}.attn.c_attn.bias": "ddd",
    "h.{n}.attn.c_proj.weight": "d d",
    "h.{n}.attn.c_proj.bias": "d",
    "h.{n}.ln_2.weight": "d",
    "h.{n}.ln_2.bias": "d",
    "h.{n}.mlp.c_fc.weight": "d f",
    "h.{n}.mlp.c_fc.bias": "f",
    "h.{n}.mlp.c_proj.weight": "f d",
    "h.{n}.mlp.c_proj.bias": "d",
    "ln_f.weight": "d",
    "ln_f.bias": "d",
}
KERAS_HUB: Table = {
    "token_embedding/embeddings": "V d",
    "position_embedding/embeddings": "P d",
    **{
        f"transformer_layer_{{n}}/self_attention/{name}/{leaf}": dims
        for name in ("query", "key", "value")
        for leaf, dims in (("kernel", "d H s"), ("bias", "H s"))
    },
    "transformer_layer_{n}/self_attention/attention_output/kernel": "H s d",
    "transformer_layer_{n}/self_attention/attention_output/bias": "d",
    "transformer_layer_{n}/feedforward_intermediate_dense/kernel": "d f",
    "transformer_layer_{n}/feedforward_intermediate_dense/bias": "f",
    "transformer_layer_{n}/feedforward_output_dense/kernel": "f d",
    "transformer_layer_{n}/feedforward_output_dense/bias": "d",
    **{
        f"{norm}/{leaf}": "d"
        for leaf in ("gamma", "beta")
        for norm in (
            "transformer_layer_{n}/self_attention_layer_norm",
            "transformer_layer_{n}/feedforward_layer_norm",
            "layer_norm",
        )
    },
}


def of(table: Table) -> Shapes:
    return written_out(table, SIZES)


def modules(prefix: str = "", transposed: bool = False) -> Table:
    """Modules of Flax with the names of Hugging Face."""
    found: Table = {}
    for name, dims in HUGGING_FACE.items():
        stem, _, leaf = name.replace(".", "/").rpartition("/")
        if leaf == "weight" and stem in ("wte", "wpe"):
            leaf = "embedding"
        elif leaf == "weight" and " " in dims:
            leaf = "kernel"
            dims = " ".join(dims.split()[::-1]) if transposed else dims
        elif leaf == "weight":
            leaf = "scale"
        found[f"{prefix}{stem}/{leaf}"] = dims
    return found


def stacked(table: Table) -> Table:
    """The same with the arrays of all layers as one, along dim 0."""
    return {
        path.replace("h/{n}", "h"): f"L {dims}" if "{n}" in path else dims
        for path, dims in table.items()
    }


SPELLINGS = {
    "hugging face": of(HUGGING_FACE | {"h.{n}.attn.bias": "one one P P"}),
    "hugging face, with a prefix": of(
        {f"transformer.{name}": dims for name, dims in HUGGING_FACE.items()}
    ),
    "flax": of(modules()),
    "flax, stacked": of(stacked(modules())),
    "keras hub": of(KERAS_HUB),
}
