"""Published tables as data, and how their libraries read them.

Tables: EasyLM `llama_model.py` (fe5b2c3), scalax `llama_fsdp_tp.ipynb` (e0d0d4a),
EasyDeL `llama_configuration.py` (ee4fff26), the GPT-Neo example of Hugging Face
(2678947), KerasHub `llama_backbone.py` and `gemma_backbone.py` (71453d0).
"""

import re
from typing import Any

from jax.sharding import PartitionSpec as P

Path = str
Shape = tuple[int, ...]

EASYLM = [
    ("transformer/wte/embedding", P("mp", "fsdp")),
    ("attention/(wq|wk|wv)/kernel", P("fsdp", "mp")),
    ("attention/wo/kernel", P("mp", "fsdp")),
    ("feed_forward/w1/kernel", P("fsdp", "mp")),
    ("feed_forward/w2/kernel", P("mp", "fsdp")),
    ("feed_forward/w3/kernel", P("fsdp", "mp")),
    ("attention_norm/kernel", P(None)),
    ("ffn_norm/kernel", P(None)),
    ("transformer/ln_f/kernel", P(None)),
    ("lm_head/kernel", P("fsdp", "mp")),
    (".*", P(None)),
]
SCALAX = [
    ("embedding", P("fsdp", "tp")),
    ("self_attn/(k|q|v)_proj/kernel", P("fsdp", "tp")),
    ("self_attn/o_proj/kernel", P("tp", "fsdp")),
    ("mlp/(up|gate)_proj/kernel", P("fsdp", "tp")),
    ("mlp/down_proj/kernel", P("tp", "fsdp")),
    ("lm_head/kernel", P("tp", "fsdp")),
    ("norm", P()),
]
_COLUMN, _ROW = P(("fsdp", "sp"), "tp"), P("tp", ("fsdp", "sp"))
EASYDEL = [
    ("embed_tokens/embedding", _COLUMN),
    ("self_attn/(q_proj|k_proj|v_proj)/kernel", _COLUMN),
    ("self_attn/o_proj/kernel", _ROW),
    ("self_attn/.*proj/bias", P(None)),
    ("mlp/(gate_proj|up_proj)/kernel", _COLUMN),
    ("mlp/down_proj/kernel", _ROW),
    ("mlp/.*proj/bias", P(None)),
    (".*(input_layernorm|post_attention_layernorm|norm)/kernel", P(None)),
    ("lm_head/kernel", _COLUMN),
    ("score/kernel", _ROW),
    (".*bias", P(None)),
    (".*", P(None)),
]
GPT_NEO = [
    (("transformer", "wpe", "embedding"), P("mp", None)),
    (("transformer", "wte", "embedding"), P("mp", None)),
    (("attention", "(q_proj|k_proj|v_proj)", "kernel"), P(None, "mp")),
    (("attention", "out_proj", "kernel"), P("mp", None)),
    (("attention", "out_proj", "bias"), None),
    (("mlp", "c_fc", "kernel"), P(None, "mp")),
    (("mlp", "c_fc", "bias"), P("mp")),
    (("mlp", "c_proj", "kernel"), P("mp", None)),
    (("mlp", "c_proj", "bias"), None),
    ((r"ln_\d+", "bias"), None),
    ((r"\d+", r"ln_\d+", "scale"), None),
    (("ln_f", "bias"), None),
    (("ln_f", "scale"), None),
]


def searched(rules: Any, path: Path, shape: Shape) -> Any:
    """EasyLM, EasyDeL, scalax: the first pattern that is found in the path."""
    del shape
    for pattern, spec in rules:
        if re.search(pattern, path):
            return spec
    raise ValueError(f"Partition rule not found for param: {path}")


def windows(rules: Any, path: Path, shape: Shape) -> Any:
    """Hugging Face's example: patterns of parts that follow each other."""
    del shape
    parts = path.split("/")
    for patterns, spec in rules:
        tests = [re.compile(f"{pattern}$") for pattern in patterns]
        for at in range(len(parts) - len(tests) + 1):
            own = parts[at : at + len(tests)]
            if all(test.match(part) for test, part in zip(tests, own, strict=True)):
                return spec
    raise ValueError(f"Incomplete partition spec: {path}")


D, H, K, SIZE, F, V = 32, 8, 4, 8, 64, 128


def easylm_llama() -> dict[Path, Shape]:
    found: dict[Path, Shape] = {
        "params/transformer/wte/embedding": (V, D),
        "params/transformer/ln_f/kernel": (D,),
        "params/lm_head/kernel": (D, V),
    }
    for n in range(2):
        layer = f"params/transformer/h/{n}"
        for name, shape in {
            "attention/wq/kernel": (D, H * SIZE),
            "attention/wk/kernel": (D, K * SIZE),
            "attention/wv/kernel": (D, K * SIZE),
            "attention/wo/kernel": (H * SIZE, D),
            "feed_forward/w1/kernel": (D, F),
            "feed_forward/w2/kernel": (F, D),
            "feed_forward/w3/kernel": (D, F),
            "attention_norm/kernel": (D,),
            "ffn_norm/kernel": (D,),
        }.items():
            found[f"{layer}/{name}"] = shape
    return found


def gpt_neo() -> dict[Path, Shape]:
    found: dict[Path, Shape] = {
        "transformer/wte/embedding": (V, D),
        "transformer/wpe/embedding": (64, D),
        "transformer/ln_f/scale": (D,),
        "transformer/ln_f/bias": (D,),
    }
    for n in range(2):
        layer = f"transformer/h/{n}"
        for name, shape in {
            "attn/attention/q_proj/kernel": (D, D),
            "attn/attention/k_proj/kernel": (D, D),
            "attn/attention/v_proj/kernel": (D, D),
            "attn/attention/out_proj/kernel": (D, D),
            "attn/attention/out_proj/bias": (D,),
            "mlp/c_fc/kernel": (D, F),
            "mlp/c_fc/bias": (F,),
            "mlp/c_proj/kernel": (F, D),
            "mlp/c_proj/bias": (D,),
            "ln_1/scale": (D,),
            "ln_1/bias": (D,),
            "ln_2/scale": (D,),
            "ln_2/bias": (D,),
        }.items():
            found[f"{layer}/{name}"] = shape
    return found


KERAS_LLAMA: dict[str, Any] = {
    "token_embedding/embeddings": ("model", "batch"),
    "transformer_layer.*self_attention.*(query|key|value).kernel": (
        "model",
        "batch",
        None,
    ),
    "transformer_layer.*attention_output.kernel": ("model", None, "batch"),
    "transformer_layer.*feedforward_intermediate_dense.kernel": ("batch", "model"),
    "transformer_layer.*feedforward_gate_dense.kernel": ("batch", "model"),
    "transformer_layer.*feedforward_output_dense.kernel": ("model", "batch"),
}
KERAS_GEMMA: dict[str, Any] = {
    "token_embedding/embeddings": ("model", "batch"),
    "decoder_block.*attention.*(query|key|value).kernel": ("model", "batch", None),
    "decoder_block.*attention_output.kernel": ("model", None, "batch"),
    "decoder_block.*ffw_gating.kernel": ("batch", "model"),
    "decoder_block.*ffw_gating_2.kernel": ("batch", "model"),
    "decoder_block.*ffw_linear.kernel": ("model", "batch"),
}


def keras_llama() -> dict[Path, tuple[Shape, Path]]:
    """Path of KerasHub's Llama → shape, and the path of Tunix's."""
    found: dict[Path, tuple[Shape, Path]] = {
        "token_embedding/embeddings": ((V, D), "embedder/input_embedding"),
        "token_embedding/reverse_embeddings": ((D, V), "lm_head/w"),
        "sequence_output_layernorm/scale": ((D,), "final_norm/w"),
    }
    for n in range(2):
        for own, shape, other in (
            ("self_attention/query/kernel", (D, H, SIZE), "attn/q_proj/w"),
            ("self_attention/key/kernel", (D, K, SIZE), "attn/k_proj/w"),
            ("self_attention/value/kernel", (D, K, SIZE), "attn/v_proj/w"),
            (
                "self_attention/attention_output/kernel",
                (H, SIZE, D),
                "attn/o_proj/w",
            ),
            ("feedforward_gate_dense/kernel", (D, F), "mlp/gate_proj/kernel"),
            ("feedforward_intermediate_dense/kernel", (D, F), "mlp/up_proj/kernel"),
            ("feedforward_output_dense/kernel", (F, D), "mlp/down_proj/kernel"),
            ("self_attention_layernorm/scale", (D,), "input_layernorm/w"),
            ("feedforward_layernorm/scale", (D,), "post_attention_layernorm/w"),
        ):
            found[f"transformer_layer_{n}/{own}"] = (shape, f"layers/{n}/{other}")
    return found


def keras_gemma() -> dict[Path, tuple[Shape, Path]]:
    """Path of KerasHub's Gemma → shape, and the path of Tunix's where it is one."""
    found: dict[Path, tuple[Shape, Path]] = {
        "token_embedding/embeddings": ((V, D), "embedder/input_embedding"),
        "final_normalization/scale": ((D,), "final_norm/scale"),
    }
    for n in range(2):
        for own, shape, other in (
            ("attention/query/kernel", (H, D, SIZE), "attn/q_einsum/w"),
            (
                "attention/attention_output/kernel",
                (H, SIZE, D),
                "attn/attn_vec_einsum/w",
            ),
            ("ffw_gating/kernel", (D, F), "mlp/gate_proj/kernel"),
            ("ffw_gating_2/kernel", (D, F), "mlp/up_proj/kernel"),
            ("ffw_linear/kernel", (F, D), "mlp/down_proj/kernel"),
            ("pre_attention_norm/scale", (D,), "pre_attention_norm/scale"),
            ("pre_ffw_norm/scale", (D,), "pre_ffw_norm/scale"),
        ):
            found[f"decoder_block_{n}/{own}"] = (shape, f"layers/{n}/{other}")
    return found


def in_keras(table: dict[str, Any], path: Path) -> Any:
    """Keras ≥ 3.14: an exact key, else the one pattern that matches all of the path."""
    if path in table:
        return table[path]
    found = [key for key in table if re.fullmatch(key, path)]
    if len(found) > 1:
        raise ValueError(f"Path '{path}' matches multiple layout specification keys")
    return table[found[0]] if found else None
