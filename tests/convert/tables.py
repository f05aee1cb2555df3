"""Published tables as data, and how their libraries read them.

Tables: EasyLM `llama_model.py` (fe5b2c3), scalax `llama_fsdp_tp.ipynb` (e0d0d4a),
EasyDeL `llama_configuration.py` (ee4fff26).
"""

import re
from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec as P
from presets.spellings import SPELLINGS, shape_of
from shapes import nested, struct

import flax_layoutmap as flm

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


MP = flm.DeviceMesh.abstract("fsdp=2,mp=4")
TP = flm.DeviceMesh.abstract("fsdp=2,sp=1,tp=4")


def shapes_of(family: str, spelling: str) -> dict[str, tuple[int, ...]]:
    return {path: shape_of(x) for path, x in SPELLINGS[family, spelling].items()}


LINEN, EASY = shapes_of("llama", "linen"), shapes_of("llama", "easylm")
# Library → its table, a model, and the mesh.
LISTS = {
    "EasyLM": (EASYLM, EASY, MP),
    "scalax": (SCALAX, LINEN, TP),
    "EasyDeL": (EASYDEL, LINEN, TP),
}


def resolved(layout_map: flm.LayoutMap, shapes: Mapping[str, Any]) -> flm.Resolution:
    tree = nested({path: struct(*shape) for path, shape in shapes.items()})
    return layout_map.resolve(tree)


def dims_of(spec: Any, ndim: int) -> tuple[tuple[str, ...], ...]:
    """The axes of each dim of a spec, a tuple or None."""
    dims = [(dim,) if isinstance(dim, str) else tuple(dim or ()) for dim in spec or ()]
    return (*dims, *[()] * (ndim - len(dims)))
