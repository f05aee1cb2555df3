"""The tables of the families in `mappings`: modules, their tensors, and steps.

A line of a table is `kind, path of the module, name of the tensors`, and several lines
where it has `[choices]`. `_KINDS` has the leaves of a kind. A leaf that a model lacks,
such as a bias, does nothing.
"""

import re
from collections.abc import Sequence
from typing import Any

from flax_layoutmap.checkpoint._steps import (
    dequantize,
    linear,
    split,
    stack,
    transpose,
    unflatten,
)

Row = tuple[str, str, tuple[Any, ...]]
Entry = tuple[Any, ...]

_BIAS: Row = ("/bias", ".bias", ())
_KINDS: dict[str, list[Row]] = {
    "embed": [("/embedding", ".weight", ())],
    "norm": [("/scale", ".weight", ()), _BIAS],
    "dense": [("/kernel", ".weight", (linear(),)), _BIAS],
    # Heads may be dims of their own.
    "heads": [("/kernel", ".weight", (linear(),)), ("/bias", ".bias", (unflatten(),))],
    "out": [("/kernel", ".weight", (linear(outputs=1),)), _BIAS],
    # Kernels that are (in, out) in the file, too.
    "plain": [("/kernel", ".weight", ()), _BIAS],
    "plain_out": [("/kernel", ".weight", (transpose(), linear(outputs=1))), _BIAS],
    "conv1d": [("/kernel", ".weight", (transpose(2, 1, 0),)), _BIAS],
    "conv2d": [("/kernel", ".weight", (transpose(2, 3, 1, 0),)), _BIAS],
    # Experts that are modules; the leaf is (experts, in, out).
    "experts": [("/kernel", ".weight", (linear(), stack(0, field="expert")))],
    "leaf": [("", "", ())],
}


def rows(table: str) -> list[Row]:
    """The leaves, tensors and steps of a table."""
    found: list[Row] = []
    for line in table.splitlines():
        choices = [part.split(",") for part in re.findall(r"\[([\w,]+)\]", line)]
        for chosen in zip(*choices, strict=True) if choices else [()]:
            words = iter(chosen)
            filled = re.sub(r"\[[\w,]+\]", lambda _, words=words: next(words), line)
            for kind, leaf, tensor in [filled.split()] if filled.strip() else ():
                kinds = _KINDS[kind]
                found += [(leaf + end, tensor + name, how) for end, name, how in kinds]
    return found


def names(prefixes: str | Sequence[str], name: str) -> tuple[str, ...]:
    """The names of a tensor, to try in turn."""
    several = [prefixes] if isinstance(prefixes, str) else prefixes
    return tuple(f"{prefix}{name}" for prefix in several)


def whole(table: str, prefixes: str | Sequence[str] = "") -> list[Entry]:
    """Entries about the model, with what is before the names of their tensors."""
    return [(path, names(prefixes, name), steps) for path, name, steps in rows(table)]


def layers(
    of: Sequence[Row],
    leaf: str,
    tensor: str | Sequence[str],
    scanned: bool,
    start: int = 0,
) -> list[Entry]:
    """The entries of layers that are numbered in a list, or stacked along dim 0.

    `leaf` and `tensor` are before the number of the layer, which is `start` for the
    first one of a stack.
    """
    number, before = (r"\1", rf"{leaf}/(\d+)")
    stacked: tuple[Any, ...] = ()
    if scanned:
        number, before, stacked = "{layer}", leaf, (stack(0, start=start),)
    return [
        (f"{before}/{path}", names(tensor, f".{number}.{name}"), (*steps, *stacked))
        for path, name, steps in of
    ]


def decoder(
    of: Sequence[Row],
    scanned: bool,
    tied: bool = False,
    prefixes: str | Sequence[str] = "model.",
) -> list[Entry]:
    """A decoder with these rows in a layer, and the names that most share."""
    entries = around(tied, prefixes)
    return [*entries, *layers(of, "layers", names(prefixes, "layers"), scanned)]


def around(tied: bool, prefixes: str | Sequence[str] = "model.") -> list[Entry]:
    """What a decoder has besides its layers."""
    embed = names(prefixes, "embed_tokens.weight")
    return [
        ("embed/embedding", embed),
        ("norm/scale", names(prefixes, "norm.weight")),
        ("lm_head/kernel", ("lm_head.weight", *embed), linear()),
        # Of old checkpoints.
        (None, r"model\.(?:layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),
        *([(None, r"lm_head\.weight")] if tied else []),
    ]


# ------------------------------------------------------------------------ decoders

NORMS = """
norm attention_norm input_layernorm
norm mlp_norm post_attention_layernorm
"""
# Gemma 2 and 3 also norm what attention and mlp return.
FOUR_NORMS = """
norm attention_norm input_layernorm
norm attention_post_norm post_attention_layernorm
norm mlp_norm pre_feedforward_layernorm
norm mlp_post_norm post_feedforward_layernorm
"""
ATTENTION = """
heads attention/[query,key,value] self_attn.[q,k,v]_proj
out attention/out self_attn.o_proj
norm attention/[query,key]_norm self_attn.[q,k]_norm
"""
GATED = "dense (?:mlp/)?[gate,up,down] mlp.[gate,up,down]_proj\n"
# V2 Lite has queries without a low rank.
LATENT_ATTENTION = """
dense attention/q_a self_attn.q_a_proj
norm attention/q_a_norm self_attn.q_a_layernorm
dense attention/q_b self_attn.q_b_proj
dense attention/query self_attn.q_proj
dense attention/kv_a self_attn.kv_a_proj_with_mqa
norm attention/kv_a_norm self_attn.kv_a_layernorm
dense attention/kv_b self_attn.kv_b_proj
out attention/out self_attn.o_proj
"""
SHARED_EXPERTS = """
dense mlp/shared_experts/[gate,up,down] mlp.shared_experts.[gate,up,down]_proj
"""
ROUTER = "dense mlp/router mlp.gate\n"
DEEPSEEK_ROUTER = f"leaf mlp/router/bias mlp.gate.e_score_correction_bias\n{ROUTER}"
QWEN_EXPERTS = """
experts mlp/experts/[gate,up,down] mlp.experts.{expert}.[gate,up,down]_proj
"""
MIXTRAL_EXPERTS = """
dense mlp/router block_sparse_moe.gate
experts mlp/experts/[gate,up,down] block_sparse_moe.experts.{expert}.[w1,w3,w2]
"""
_TURNED = (transpose(0, 2, 1),)
# All experts of a layer as (experts, out, in), gate before up.
FUSED_EXPERTS: list[Row] = [
    ("mlp/experts/gate/kernel", "mlp.experts.gate_up_proj", (split(1, 0, 2), *_TURNED)),
    ("mlp/experts/up/kernel", "mlp.experts.gate_up_proj", (split(1, 1, 2), *_TURNED)),
    ("mlp/experts/down/kernel", "mlp.experts.down_proj", _TURNED),
]


def gpt_oss_experts(mxfp4: bool) -> list[Row]:
    """Experts as (experts, in, out), where outputs of gate and up alternate."""
    kernel = ("kernel", "_blocks" if mxfp4 else "", 2)
    found: list[Row] = []
    for leaf, end, dim in (kernel, ("bias", "_bias", 1)):
        steps = (dequantize("mxfp4"), *_TURNED) if end == "_blocks" else ()
        for at, part in enumerate(("gate", "up")):
            half = split(dim, at, 2, alternating=True)
            tensor = f"mlp.experts.gate_up_proj{end}"
            found.append((f"mlp/experts/{part}/{leaf}", tensor, (*steps, half)))
        found.append((f"mlp/experts/down/{leaf}", f"mlp.experts.down_proj{end}", steps))
    return found


def float8(of: Sequence[Row]) -> list[Row]:
    """Rows whose matrices are multiplied by their scales if they are in float8."""
    return [
        (path, name, (dequantize(), *steps) if path.endswith("/kernel") else steps)
        for path, name, steps in of
    ]


# ----------------------------------------------------------------- other families

_GPT2 = """
norm attention_norm ln_1
norm mlp_norm ln_2
plain_out attention/out attn.c_proj
plain (?:mlp/)?up mlp.c_fc
plain (?:mlp/)?down mlp.c_proj
"""


def gpt2_layer() -> list[Row]:
    """A layer of GPT-2, whose query, key and value are one tensor."""
    found = rows(_GPT2)
    for at, part in enumerate(("query", "key", "value")):
        leaf, kernel = f"attention/{part}", (split(1, at, 3), transpose(), linear())
        found.append((f"{leaf}/kernel", "attn.c_attn.weight", kernel))
        bias = (split(0, at, 3), unflatten())
        found.append((f"{leaf}/bias", "attn.c_attn.bias", bias))
    return found


T5_ATTENTION = """
norm {leaf}_norm layer.{at}.layer_norm
heads {leaf}/[query,key,value] layer.{at}.{tensor}.[q,k,v]
out {leaf}/out layer.{at}.{tensor}.o
"""
T5_MLP = """
norm mlp_norm layer.{at}.layer_norm
dense mlp/down layer.{at}.DenseReluDense.wo
"""
T5_GATED = "dense mlp/[gate,up] layer.{at}.DenseReluDense.[wi_0,wi_1]\n"
WHISPER_ATTENTION = """
heads {leaf}/[query,key,value] {tensor}.[q,k,v]_proj
out {leaf}/out {tensor}.out_proj
norm {leaf}_norm {tensor}_layer_norm
"""
WHISPER_MLP = """
norm mlp_norm final_layer_norm
dense mlp/[up,down] [fc1,fc2]
"""
VIT_LAYER = """
norm attention_norm layernorm_before
heads attention/[query,key,value] attention.attention.[query,key,value]
out attention/out attention.output.dense
norm mlp_norm layernorm_after
dense mlp/up intermediate.dense
dense mlp/down output.dense
"""
CLIP_LAYER = """
norm attention_norm layer_norm1
heads attention/[query,key,value] self_attn.[q,k,v]_proj
out attention/out self_attn.out_proj
norm mlp_norm layer_norm2
dense mlp/[up,down] mlp.[fc1,fc2]
"""


def t5_layer(is_decoder: bool, gated: bool) -> list[Row]:
    """A layer of T5's encoder or decoder."""
    table = T5_ATTENTION.format(leaf="attention", at=0, tensor="SelfAttention")
    bias = "relative_attention_bias"  # in each layer of UMT5
    table += f"embed attention/{bias} layer.0.SelfAttention.{bias}\n"
    if is_decoder:
        cross = {"leaf": "cross_attention", "tensor": "EncDecAttention"}
        table += T5_ATTENTION.format(at=1, **cross)
    up = T5_GATED if gated else "dense mlp/up layer.{at}.DenseReluDense.wi"
    return rows(table + (T5_MLP + up).format(at=2 if is_decoder else 1))


def whisper_layer(is_decoder: bool) -> list[Row]:
    """A layer of Whisper's encoder or decoder."""
    table = WHISPER_ATTENTION.format(leaf="attention", tensor="self_attn")
    if is_decoder:
        cross = {"leaf": "cross_attention", "tensor": "encoder_attn"}
        table += WHISPER_ATTENTION.format(**cross)
    return rows(table + WHISPER_MLP)
