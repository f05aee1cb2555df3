"""Published tables as data, and how their libraries read them.

Tables: EasyLM `llama_model.py` (fe5b2c3), scalax `llama_fsdp_tp.ipynb` (e0d0d4a),
EasyDeL `llama_configuration.py` (ee4fff26), KerasHub `llama_backbone.py` (71453d0).
"""

import re
from typing import Any

from jax.sharding import PartitionSpec as P

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


def searched(rules: Any, path: str) -> Any:
    """EasyLM, EasyDeL, scalax: the first pattern that is found in the path."""
    return next(spec for pattern, spec in rules if re.search(pattern, path))


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
