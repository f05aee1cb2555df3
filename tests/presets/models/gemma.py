"""Gemma 1, 2 and 3 (text); the head is the embedding."""

from presets.models import Shapes
from presets.models._decoders import (
    HUGGING_FACE,
    MAXTEXT,
    Table,
    as_flax,
    shapes,
    stacked,
    tied,
)


def einsums(package: str, generation: int, transposed: bool = True) -> Table:
    """Modules with the fused arrays that Gemma began with.

    Args:
        package: `tunix`, `flax` (the example of its repository) or `gemma`.
        generation: 1, 2 or 3.
        transposed: whether gate and up are (2, hidden, model), in `gemma`.
    """
    leaf = "kernel" if package == "flax" else "w"
    layer = "layer_{n}" if package == "gemma" else "layers/{n}"
    embedding = "embedding" if package == "flax" else "input_embedding"
    found: Table = {f"embedder/{embedding}": "V d", "final_norm/scale": "d"}
    found[f"{layer}/attn/q_einsum/{leaf}"] = "H d s"
    found[f"{layer}/attn/kv_einsum/{leaf}"] = "two K d s"
    found[f"{layer}/attn/attn_vec_einsum/{leaf}"] = "H s d"
    names = ["pre_attention_norm", "pre_ffw_norm"]
    if generation > 1:
        after = "attn" if package == "tunix" and generation == 2 else "attention"
        names += ["post_ffw_norm", f"post_{after}_norm"]
    found |= {f"{layer}/{name}/scale": "d" for name in names}
    if generation == 3:
        found |= {f"{layer}/attn/_{name}_norm/scale": "s" for name in ("query", "key")}
    if package == "gemma":
        gates = "two f d" if transposed else "two d f"
        return found | {
            f"{layer}/mlp/gating_einsum": gates,
            f"{layer}/mlp/linear": "f d",
        }
    found |= {f"{layer}/mlp/{name}_proj/kernel": "d f" for name in ("gate", "up")}
    return found | {f"{layer}/mlp/down_proj/kernel": "f d"}


def without_groups(table: Table) -> Table:
    """The same with as many heads of keys as of queries, in one array."""
    found: Table = {}
    for path, dims in table.items():
        if "/kv_einsum/" in path:
            found[path.replace("kv_einsum", "qkv_einsum")] = "three H d s"
        elif "/q_einsum/" not in path:
            found[path] = dims
    return found


def of(table: Table, **sizes: int) -> Shapes:
    return shapes(table, two=2, three=3, **sizes)


NORMS = "model.layers.{n}.{name}_layernorm.weight"
FILES_1 = tied(HUGGING_FACE)
FILES_2 = FILES_1 | {
    NORMS.replace("{name}", f"{when}_feedforward"): "d" for when in ("pre", "post")
}
FILES_3 = FILES_2 | {
    f"model.layers.{{n}}.self_attn.{name}_norm.weight": "s" for name in "qk"
}
# Inside of the multimodal model.
BONSAI = {
    path.replace("model/embed_tokens/", "embed_tokens/weight/").replace(
        "model/", "language_model/"
    ): dims
    for path, dims in as_flax(FILES_3, "scale").items()
}
KERAS_HUB: Table = {
    "token_embedding/embeddings": "V d",
    "decoder_block_{n}/attention/query/kernel": "H d s",
    "decoder_block_{n}/attention/key/kernel": "K d s",
    "decoder_block_{n}/attention/value/kernel": "K d s",
    "decoder_block_{n}/attention/attention_output/kernel": "H s d",
    "decoder_block_{n}/ffw_gating/kernel": "d f",
    "decoder_block_{n}/ffw_gating_2/kernel": "d f",
    "decoder_block_{n}/ffw_linear/kernel": "f d",
    "decoder_block_{n}/pre_attention_norm/scale": "d",
    "decoder_block_{n}/pre_ffw_norm/scale": "d",
    "final_normalization/scale": "d",
}
IN_MAXTEXT = {
    path.replace("pre_self_attention_layer_norm", "pre_self_attention_norm").replace(
        "post_self_attention_layer_norm", "pre_ffw_norm"
    ): dims
    for path, dims in tied(MAXTEXT).items()
}

SPELLINGS = {
    "hugging face, 1": of(FILES_1),
    "hugging face, 2": of(FILES_2),
    "hugging face, 3": of(FILES_3),
    "hugging face, 3, in a multimodal model": of(
        {f"language_model.{path}": dims for path, dims in FILES_3.items()}
    ),
    "linen, 1": of(as_flax(FILES_1, "weight")),
    "easydel, 2": of(as_flax(FILES_2, "kernel")),
    "bonsai, 3": of(BONSAI),
    "keras hub": of(KERAS_HUB),
    "maxtext, 1": of(IN_MAXTEXT),
    "maxtext, 1, scanned": of(stacked(IN_MAXTEXT, dim=1)),
    "gemma, 2": of(einsums("gemma", 2)),
    "gemma, 3": of(einsums("gemma", 3)),
    **{
        f"{package}, {generation}": of(einsums(package, generation))
        for package in ("tunix", "flax")
        for generation in (1, 2, 3)
    },
    "tunix, 1, without groups": of(without_groups(einsums("tunix", 1))),
}
# A single head of keys, which no axis divides.
ONE_KEY_HEAD = {
    "tunix": of(einsums("tunix", 3), K=1, Ks=16),
    "gemma": of(einsums("gemma", 3), K=1, Ks=16),
    "keras hub": of(KERAS_HUB, K=1, Ks=16),
}
