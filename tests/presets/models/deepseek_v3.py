"""DeepSeek V2 and V3: multi-head latent attention, a dense layer, shared experts."""

import re

from presets.models._experts import EXPERTS, easydel, fused, gated, stacked
from presets.models.llama import LAYERS, Shapes

# The rank of queries and of keys and values, and sizes of heads: without and with
# positions, and of values. Few enough that what is not sharded is below a twentieth.
D, VOCAB, HEADS, HIDDEN = 64, 256, 8, 96
QUERY_RANK, RANK, PLAIN, ROTARY, VALUE = 16, 8, 16, 4, 16


def hugging_face(
    as_modules: bool = False, query_rank: bool = True, next_token: bool = False
) -> Shapes:
    """Weights as `transformers` saves them, (out, in), or its modules.

    Args:
        as_modules: all experts of a layer together, as in the modules of version 5.
        query_rank: whether queries have a low rank, which V2 Lite has not.
        next_token: with the layer that predicts one more token.
    """
    found: Shapes = {
        "model.embed_tokens.weight": (VOCAB, D),
        "model.norm.weight": (D,),
        "lm_head.weight": (VOCAB, D),
    }
    for layer in range(LAYERS + next_token):
        prefix = f"model.layers.{layer}"
        found |= latent_attention(f"{prefix}.self_attn", query_rank)
        found[f"{prefix}.input_layernorm.weight"] = (D,)
        found[f"{prefix}.post_attention_layernorm.weight"] = (D,)
        if layer == 0:
            found |= gated(f"{prefix}.mlp", D, 4 * HIDDEN)
            continue
        found[f"{prefix}.mlp.gate.weight"] = (EXPERTS, D)
        found[f"{prefix}.mlp.gate.e_score_correction_bias"] = (EXPERTS,)
        found |= gated(f"{prefix}.mlp.shared_experts", D, HIDDEN)
        if as_modules:
            found |= fused(f"{prefix}.mlp.experts", D, HIDDEN)
        for expert in range(0 if as_modules else EXPERTS):
            found |= gated(f"{prefix}.mlp.experts.{expert}", D, HIDDEN)
    if next_token:
        prefix = f"model.layers.{LAYERS}"
        found[f"{prefix}.embed_tokens.weight"] = (VOCAB, D)
        found[f"{prefix}.eh_proj.weight"] = (D, 2 * D)
        found[f"{prefix}.shared_head.head.weight"] = (VOCAB, D)
        for name in ("enorm", "hnorm", "shared_head.norm"):
            found[f"{prefix}.{name}.weight"] = (D,)
    return found


def latent_attention(prefix: str, query_rank: bool = True) -> Shapes:
    """Multi-head latent attention, (out, in)."""
    query = HEADS * (PLAIN + ROTARY)
    found: Shapes = {f"{prefix}.q_proj.weight": (query, D)}
    if query_rank:
        found = {
            f"{prefix}.q_a_proj.weight": (QUERY_RANK, D),
            f"{prefix}.q_a_layernorm.weight": (QUERY_RANK,),
            f"{prefix}.q_b_proj.weight": (query, QUERY_RANK),
        }
    return found | {
        f"{prefix}.kv_a_proj_with_mqa.weight": (RANK + ROTARY, D),
        f"{prefix}.kv_a_layernorm.weight": (RANK,),
        f"{prefix}.kv_b_proj.weight": (HEADS * (PLAIN + VALUE), RANK),
        f"{prefix}.o_proj.weight": (D, HEADS * VALUE),
    }


def float8() -> Shapes:
    """The published weights: a scale for each block of 128 × 128.

    All dims are 128 times as large, so that there are as many blocks as numbers above.
    """
    found: Shapes = {}
    for name, shape in hugging_face(next_token=True).items():
        found[name] = tuple(128 * size for size in shape)
        if re.search(r"_proj(_with_mqa)?\.weight$", name) and "eh_proj" not in name:
            found[f"{name}_scale_inv"] = shape
    return found


def own() -> Shapes:
    """NNX modules whose heads are a dim of their own."""
    found: Shapes = {}
    for path, shape in easydel(hugging_face()).items():
        name = path.replace("norm/kernel", "norm/scale").replace("self_attn", "attn")
        if re.search(r"(q_b|kv_b)_proj/", name):
            shape = (shape[0], HEADS, shape[1] // HEADS)
        elif "o_proj/" in name:
            shape = (HEADS, VALUE, D)
        found[name] = shape
    return found


def in_two_stacks() -> Shapes:
    """The same with the dense layers and the others in a stack each."""
    found: Shapes = {}
    for path, shape in own().items():
        path = path.replace("layers/0", "dense_layers/0")
        found[path.replace("/layers/1", "/moe_layers/1")] = shape
    return stacked(found)


SPELLINGS = {
    "hugging face": hugging_face(),
    "hugging face, fused": hugging_face(as_modules=True),
    "hugging face, V2 Lite": hugging_face(query_rank=False),
    "hugging face, float8": float8(),
    "easydel": easydel(hugging_face()),
    "flax": own(),
    "flax, stacked": in_two_stacks(),
}
