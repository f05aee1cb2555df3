"""DeepSeek V2 and V3: multi-head latent attention, a dense layer, shared experts.

Dims besides those of `_experts`: `q` and `r` ranks of queries, and of keys and values;
`p` dims of positions; `s+p` and `2s` of a head of queries, and of keys and values.
"""

from presets.models._decoders import HEADS, HIDDEN, SIZE, D, Table, as_flax, stacked
from presets.models._experts import each_of, float8, fused, in_files, shapes, stacks

RANKS = {"q": 16, "r": 8, "p": 4, "r+p": 12, "s+p": SIZE + 4, "2s": 2 * SIZE}
FLAT = {"H(s+p)": HEADS * (SIZE + 4), "H2s": HEADS * 2 * SIZE}
SIZES = RANKS | FLAT | {"F": 4 * HIDDEN, "2d": 2 * D}

ENDS: Table = {
    "model.embed_tokens.weight": "V d",
    "model.norm.weight": "d",
    "lm_head.weight": "V d",
}
LATENT: Table = {
    **{"q_a_proj": "q d", "q_b_proj": "H(s+p) q", "kv_a_proj_with_mqa": "r+p d"},
    **{"kv_b_proj": "H2s r", "o_proj": "d Hs"},
}
LATENT_NORMS: Table = {"q_a_layernorm": "q", "kv_a_layernorm": "r"}
LAYER_NORMS: Table = {"input_layernorm": "d", "post_attention_layernorm": "d"}


def layer(number: str, dense: bool = False, query_rank: bool = True) -> Table:
    """A layer in Hugging Face's files, without its experts."""
    prefix = f"model.layers.{number}"
    latent = LATENT | LATENT_NORMS
    if not query_rank:
        latent = {"q_proj": "H(s+p) d"} | {
            name: dims for name, dims in latent.items() if name[0] != "q"
        }
    found = each_of(f"{prefix}.self_attn.*.weight", latent)
    found |= each_of(f"{prefix}.*.weight", LAYER_NORMS)
    if dense:
        return found | {
            name: dims.replace("f", "F")
            for name, dims in in_files(f"{prefix}.mlp").items()
        }
    return found | {
        f"{prefix}.mlp.gate.weight": "E d",
        f"{prefix}.mlp.gate.e_score_correction_bias": "E",
        **in_files(f"{prefix}.mlp.shared_experts"),
    }


WITHOUT_EXPERTS = ENDS | layer("0", dense=True) | layer("1")
IN_FILES = WITHOUT_EXPERTS | in_files("model.layers.1.mlp.experts.{e}")
LITE = ENDS | layer("0", dense=True, query_rank=False) | layer("1", query_rank=False)
LITE |= in_files("model.layers.1.mlp.experts.{e}")
# The layer that predicts one more token has an embedding and a head of its own.
ONE_MORE = layer("2") | {
    **in_files("model.layers.2.mlp.experts.{e}"),
    "model.layers.2.embed_tokens.weight": "V d",
    "model.layers.2.eh_proj.weight": "d 2d",
    "model.layers.2.shared_head.head.weight": "V d",
    **each_of("model.layers.2.*.weight", {"enorm": "d", "hnorm": "d"}),
    "model.layers.2.shared_head.norm.weight": "d",
}
EASYDEL = as_flax(WITHOUT_EXPERTS, "kernel") | stacks(
    "model/layers/1/mlp/experts/*/kernel", "gate_proj", "up_proj", "down_proj"
)
EASYDEL = {path.replace("bias/kernel", "bias"): dims for path, dims in EASYDEL.items()}


def heads_apart(table: Table) -> Table:
    """NNX modules whose heads are a dim of their own, with Flax's names of norms."""
    apart = {"H(s+p)": "H s+p", "H2s": "H 2s", "Hs": "H s"}
    found: Table = {}
    for path, dims in table.items():
        path = path.replace("norm/kernel", "norm/scale").replace("self_attn", "attn")
        found[path] = " ".join(apart.get(dim, dim) for dim in dims.split())
    return found


def in_two_stacks(table: Table, dim: int = 0) -> Table:
    """The dense layers and the others in a stack each."""
    return stacked(
        {
            path.replace("layers/0", "dense_layers/{n}")
            .replace("layers/1", "moe_layers/{n}")
            .replace("layers_0", "layers_{n}"): dims
            for path, dims in table.items()
        },
        dim=dim,
    )


def in_maxtext() -> Table:
    """Blocks of dense and of other layers, numbered apart."""
    attention: Table = {
        **{"wq_a/kernel": "d q", "wq_b/kernel": "q H s+p", "wkv_a/kernel": "d r+p"},
        **{"wkv_b/kernel": "r H 2s", "out/kernel": "H s d"},
        **{"q_norm/scale": "q", "kv_norm/scale": "r"},
    }
    names = ("pre_self_attention_layer_norm", "post_self_attention_layer_norm")
    found: Table = {
        "params/token_embedder/embedding": "V d",
        "params/decoder/decoder_norm/scale": "d",
        "params/decoder/logits_dense/kernel": "d V",
    }
    for kind in ("dense", "moe"):
        prefix = f"params/decoder/{kind}_layers_0"
        found |= each_of(f"{prefix}/self_attention/*", attention)
        found |= each_of(f"{prefix}/*/scale", dict.fromkeys(names, "d"))
    inner = "params/decoder/moe_layers_0/DeepSeekMoeBlock_0"
    dense = {"wi_0": "d F", "wi_1": "d F", "wo": "F d"}
    shared = {"wi_0": "d f", "wi_1": "d f", "wo": "f d"}
    return found | {
        **each_of("params/decoder/dense_layers_0/mlp/*/kernel", dense),
        **each_of(f"{inner}/shared_experts/*/kernel", shared),
        **stacks(f"{inner}/MoeBlock_0/*", "wi_0", "wi_1", "wo"),
        f"{inner}/MoeBlock_0/gate/kernel": "d E",
        f"{inner}/MoeBlock_0/gate/bias": "E",
    }


def in_examples() -> Table:
    """jax-llm-examples: keys, values and positions are arrays of their own."""
    attention: Table = {
        **{"q_a": "d q", "q_b": "q H s+p", "kv_a": "d r", "k_pe": "d p"},
        **{"k_b": "r H s", "v_b": "r H s", "o": "H s d"},
        **{"q_gamma": "q", "kv_gamma": "r"},
    }
    found: Table = {"embedding": "V d", "gamma_final": "d", "lm_head": "d V"}
    for number in range(2):
        found |= each_of(f"layers/{number}/attn/*", attention)
        found |= each_of(f"layers/{number}/gamma_*_attn", {"pre": "d", "post": "d"})
    return found | {
        **each_of("layers/0/mlp/w_*", {"gate": "d F", "up": "d F", "down": "F d"}),
        **each_of("layers/1/mlp/ws_*", {"gate": "d f", "up": "d f", "down": "f d"}),
        **stacks("layers/1/mlp/we_*", "gate", "up", "down"),
        "layers/1/mlp/w_router": "d E",
        "layers/1/mlp/b_router": "E",
    }


SPELLINGS = {
    "hugging face": shapes(IN_FILES, **SIZES),
    "hugging face, fused": shapes(
        WITHOUT_EXPERTS | fused("model.layers.1.mlp.experts"), **SIZES
    ),
    "hugging face, V2 Lite": shapes(LITE, **SIZES),
    "hugging face, float8": float8(IN_FILES | ONE_MORE, **SIZES),
    "easydel": shapes(EASYDEL, **SIZES),
    "maxtext": shapes(in_maxtext(), **SIZES),
    "maxtext, scanned": shapes(in_two_stacks(in_maxtext(), dim=1), **SIZES),
    "jax-llm-examples": shapes(in_examples(), **SIZES),
    "flax": shapes(heads_apart(EASYDEL), **SIZES),
    "flax, stacked": shapes(in_two_stacks(heads_apart(EASYDEL)), **SIZES),
}
