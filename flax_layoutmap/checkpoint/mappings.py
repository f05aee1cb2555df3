r"""Mappings from the leaves of Flax models to tensors of Hugging Face checkpoints.

A mapping is a list of entries `(path of a leaf, name of a tensor, steps)`; see
`restore_safetensors`. Those here are plain lists: put entries of your own before
them, since the first that matches counts.

    mapping = [
        (r"blocks/(\d+)/attn/q/kernel", r"model.layers.\1.self_attn.q_proj.weight",
         mappings.linear()),
        *mappings.llama(),
    ]

The paths that they expect are those that the presets of the same names lay out
(`flm.presets.load("llama", mesh)`). In decoders, `mlp/` may be absent. Kernels may have
the heads as a dim of their own (`nnx.LinearGeneral`) or not (`nnx.Linear`).

| leaf | tensor |
|---|---|
| embed/embedding, norm/scale | model.embed_tokens, model.norm |
| lm_head/kernel | lm_head, else the embedding |
| layers/N/attention_norm/scale | input_layernorm |
| layers/N/mlp_norm/scale | post_attention_layernorm |
| layers/N/attention/(query, key, value, out)/(kernel, bias) | (q, k, v, o)_proj |
| layers/N/attention/(query, key)_norm/scale | (q, k)_norm |
| layers/N/mlp/(gate, up, down)/kernel | (gate, up, down)_proj |
| layers/N/mlp/router/kernel | the router |
| layers/N/mlp/experts/(gate, up, down)/kernel | all experts: (experts, in, out) |

What other families have besides is said at each. `scanned` says that the model has its
layers stacked along dim 0 (`layers/…` in place of `layers/0/…`); `tied`, that its
output is its embedding. Weights in float8 are multiplied by their scales; see
`dequantize`. Rotary embeddings use the half-split convention of `transformers`.
"""

from flax_layoutmap.checkpoint._mapping import Entry, entries
from flax_layoutmap.checkpoint._steps import dequantize as dequantize
from flax_layoutmap.checkpoint._steps import linear as linear
from flax_layoutmap.checkpoint._steps import merge as merge
from flax_layoutmap.checkpoint._steps import split as split
from flax_layoutmap.checkpoint._steps import stack as stack
from flax_layoutmap.checkpoint._steps import transpose as transpose
from flax_layoutmap.checkpoint._steps import unflatten as unflatten

# ------------------------------------------------------------------------- decoders

_TOP = r"""
embed embed ^embed_tokens
norm norm ^norm
head lm_head lm_head|^embed_tokens
ignore model\.(?:layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq
"""
_TIED = r"ignore lm_head\.weight" + "\n"
_NORMS = """
norm [attention,mlp]_norm [input,post_attention]_layernorm
"""
# Gemma 2 and 3 also norm what attention and mlp return.
_FOUR_NORMS = """
norm attention_[norm,post_norm] [input,post_attention]_layernorm
norm mlp_[norm,post_norm] [pre,post]_feedforward_layernorm
"""
_ATTENTION = """
heads attention/[query,key,value] self_attn.[q,k,v]_proj
out attention/out self_attn.o_proj
norm attention/[query,key]_norm self_attn.[q,k]_norm
"""
_GATED = """
dense (?:mlp/)?[gate,up,down] mlp.[gate,up,down]_proj
"""
_LAYERS = _TOP + "at layers/# ^layers.#\n"
_SPARSE = _LAYERS + _NORMS + _ATTENTION
_DENSE = _SPARSE + _GATED


def llama(*, scanned: bool = False, tied: bool = False) -> list[Entry]:
    """Mapping for Llama 2 and 3, and others with the same names."""
    return entries(_DENSE + tied * _TIED, scanned)


def mistral(*, scanned: bool = False) -> list[Entry]:
    """Mapping for Mistral: that of `llama`."""
    return llama(scanned=scanned)


def qwen2(*, scanned: bool = False, tied: bool = False) -> list[Entry]:
    """Mapping for Qwen 2 and 2.5: that of `llama`. Models up to 3B are tied."""
    return llama(scanned=scanned, tied=tied)


def qwen3(*, scanned: bool = False, tied: bool = False) -> list[Entry]:
    """Mapping for Qwen 3, also in float8. Models up to 4B are tied."""
    return entries(_DENSE + tied * _TIED, scanned, float8=True)


def gemma(
    *, post_norms: bool = False, scanned: bool = False, tied: bool = True
) -> list[Entry]:
    """Mapping for Gemma; with `post_norms`, for Gemma 2 and the text of Gemma 3.

    These also norm the outputs of attention and mlp, by `attention_post_norm/scale` and
    `mlp_post_norm/scale`. Norms multiply by 1 + scale, and the embedding is multiplied
    by the square root of the width.
    """
    norms = _FOUR_NORMS if post_norms else _NORMS
    vision = r"ignore (?:model\.)?(?:vision_tower|multi_modal_projector)\..*"
    table = _LAYERS + norms + _ATTENTION + _GATED + tied * _TIED + vision
    prefixes = ("model.", "language_model.model.", "model.language_model.")
    return entries(table, scanned, prefixes)


# -------------------------------------------------------------------------- experts

_EXPERTS = """
router mlp/router mlp.gate
experts mlp/experts/[gate,up,down] mlp.experts.{expert}.[gate,up,down]_proj
"""
_MIXTRAL_EXPERTS = """
router mlp/router block_sparse_moe.gate
experts mlp/experts/[gate,up,down] block_sparse_moe.experts.{expert}.[w1,w3,w2]
"""
# V2 Lite has queries without a low rank.
_LATENT_ATTENTION = """
dense attention/[query,q_a,q_b,kv_b] self_attn.[q,q_a,q_b,kv_b]_proj
dense attention/kv_a self_attn.kv_a_proj_with_mqa
norm attention/[q_a,kv_a]_norm self_attn.[q_a,kv_a]_layernorm
out attention/out self_attn.o_proj
"""
# The bias comes before the router, which may have another one.
_SHARED_EXPERTS = """
leaf mlp/router/bias mlp.gate.e_score_correction_bias
dense mlp/shared_experts/[gate,up,down] mlp.shared_experts.[gate,up,down]_proj
"""
_GPT_OSS = """
leaf attention/sinks self_attn.sinks
router mlp/router mlp.router
flat[0,1] mlp/experts/[gate,up] mlp.experts.gate_up_proj
flat mlp/experts/down mlp.experts.down_proj
"""


def mixtral(*, scanned: bool = False) -> list[Entry]:
    """Mapping for Mixtral."""
    return entries(_SPARSE + _MIXTRAL_EXPERTS, scanned)


def qwen3_moe(*, scanned: bool = False) -> list[Entry]:
    """Mapping for Qwen 3 with experts, also in float8."""
    return entries(_DENSE + _EXPERTS, scanned, float8=True)


def deepseek_v3(
    *, scanned: bool = False, dense_layers: int = 3, layers: int = 61
) -> list[Entry]:
    """Mapping for DeepSeek V2, V3 and R1, and Kimi K2, also in float8.

    Attention has `(q_a, q_b, kv_a, kv_b, out)/kernel` (`query/kernel` for queries
    without a low rank) and `(q_a, kv_a)_norm/scale`; besides the experts there are
    `mlp/router/bias` and `mlp/shared_experts/(gate, up, down)/kernel`. Scanned, the
    first `dense_layers` layers are `dense_layers/…`, and those with experts
    `moe_layers/…`. The tensors of a layer after the `layers` ones are left out.
    """
    table = _TOP + rf"ignore model\.layers\.{layers}\..*" + "\n"
    shared = _NORMS + _LATENT_ATTENTION
    experts = _SHARED_EXPERTS + _EXPERTS
    if scanned:
        table += "at dense_layers/# model.layers.#" + shared + _GATED
        table += f"at moe_layers/# model.layers.# {dense_layers}" + shared + experts
    else:
        table += "at layers/# model.layers.#" + shared + _GATED + experts
    return entries(table, scanned, float8=True)


def gpt_oss(*, scanned: bool = False, mxfp4: bool = True) -> list[Entry]:
    """Mapping for gpt-oss, with `attention/sinks`, and biases but in norms.

    The experts are in MXFP4, as in the published files (see `dequantize`); pass
    `mxfp4=False` for files in bfloat16, and to save.
    """
    experts = _GPT_OSS.replace("flat", "mxfp4") if mxfp4 else _GPT_OSS
    return entries(_SPARSE + experts, scanned)


# ------------------------------------------------------------------- other families

_GPT2 = r"""
embed embed ^wte
embed positions ^wpe
norm norm ^ln_f
head lm_head lm_head|^wte
ignore (?:transformer\.)?h\.\d+\.attn\.(?:masked_)?bias
at layers/# ^h.#
norm [attention,mlp]_norm [ln_1,ln_2]
third[0,1,2] attention/[query,key,value] attn.c_attn
plain_out attention/out attn.c_proj
plain (?:mlp/)?[up,down] mlp.[c_fc,c_proj]
"""
# Old checkpoints hold copies of the embedding, and a bias that no layer has.
_T5 = r"""
embed embed shared
head lm_head lm_head|shared
embed [encoder,decoder]/{bias} [encoder,decoder].block.0.layer.0.SelfAttention.{bias}
norm [encoder,decoder]/norm [encoder,decoder].final_layer_norm
ignore (?:encoder|decoder)\.embed_tokens\.weight
ignore decoder\.block\.0\.layer\.1\.EncDecAttention\.{bias}\.weight
"""
# UMT5 has the bias in each layer.
_T5_LAYER = """
at {side}/layers/# {side}.block.#.layer
embed attention/{bias} 0.SelfAttention.{bias}
norm mlp_norm {last}.layer_norm
dense mlp/{up} {last}.DenseReluDense.{wi}
dense mlp/down {last}.DenseReluDense.wo
norm attention_norm 0.layer_norm
heads attention/[query,key,value] 0.SelfAttention.[q,k,v]
out attention/out 0.SelfAttention.o
"""
_T5_CROSS = """
norm cross_attention_norm 1.layer_norm
heads cross_attention/[query,key,value] 1.EncDecAttention.[q,k,v]
out cross_attention/out 1.EncDecAttention.o
"""
_WHISPER = r"""
embed decoder/embed model.decoder.embed_tokens
conv1d encoder/[conv1,conv2] model.encoder.[conv1,conv2]
embed [encoder,decoder]/positions model.[encoder,decoder].embed_positions
norm [encoder,decoder]/norm model.[encoder,decoder].layer_norm
ignore proj_out\.weight
"""
_WHISPER_LAYER = """
at {side}/layers/# model.{side}.layers.#
heads attention/[query,key,value] self_attn.[q,k,v]_proj
out attention/out self_attn.out_proj
norm [attention,mlp]_norm [self_attn,final]_layer_norm
dense mlp/[up,down] [fc1,fc2]
"""
_WHISPER_CROSS = """
heads cross_attention/[query,key,value] encoder_attn.[q,k,v]_proj
out cross_attention/out encoder_attn.out_proj
norm cross_attention_norm encoder_attn_layer_norm
"""
_VIT = r"""
leaf cls_token ^embeddings.cls_token
leaf position_embeddings ^embeddings.position_embeddings
conv2d patch_embedding ^embeddings.patch_embeddings.projection
norm norm ^layernorm
dense classifier classifier
ignore (?:vit\.)?pooler\.dense\.(?:weight|bias)
at layers/# ^encoder.layer.#
norm [attention,mlp]_norm layernorm_[before,after]
heads attention/[query,key,value] attention.attention.[query,key,value]
out attention/out attention.output.dense
dense mlp/[up,down] [intermediate,output].dense
"""
_CLIP = r"""
embed text/embed text_model.embeddings.token_embedding
leaf vision/class_embedding vision_model.embeddings.class_embedding
conv2d vision/patch_embedding vision_model.embeddings.patch_embedding
embed [text,vision]/positions [text,vision]_model.embeddings.position_embedding
norm vision/pre_norm vision_model.pre_layrnorm
norm [text,vision]/norm [text,vision]_model.[final_layer_norm,post_layernorm]
dense [text,visual]_projection [text,visual]_projection
leaf logit_scale logit_scale
ignore (?:text|vision)_model\.embeddings\.position_ids
"""
_CLIP_LAYER = """
at {side}/layers/# {side}_model.encoder.layers.#
norm [attention,mlp]_norm [layer_norm1,layer_norm2]
heads attention/[query,key,value] self_attn.[q,k,v]_proj
out attention/out self_attn.out_proj
dense mlp/[up,down] mlp.[fc1,fc2]
"""


def gpt2(*, scanned: bool = False, tied: bool = True) -> list[Entry]:
    """Mapping for GPT-2, with `positions/embedding`, and biases everywhere."""
    return entries(_GPT2 + tied * _TIED, scanned, ("transformer.", ""))


def t5(*, gated: bool = True, scanned: bool = False, tied: bool = False) -> list[Entry]:
    """Mapping for T5, mT5 and UMT5; `gated=False, tied=True` for T5 1.0.

    The layers are `encoder/layers/N/…` and `decoder/layers/N/…`, where those of the
    decoder also have `cross_attention/…` and `cross_attention_norm/scale`; each side
    has `norm/scale` and `relative_attention_bias/embedding` (of UMT5 in `attention/`).
    """
    up, wi = ("[gate,up]", "[wi_0,wi_1]") if gated else ("up", "wi")
    names = {"bias": "relative_attention_bias", "up": up, "wi": wi}
    table = _T5.format(**names) + tied * _TIED
    table += _T5_LAYER.format(side="encoder", last=1, **names)
    table += _T5_LAYER.format(side="decoder", last=2, **names) + _T5_CROSS
    return entries(table, scanned)


def whisper(*, scanned: bool = False) -> list[Entry]:
    """Mapping for Whisper, whose output is its embedding.

    The layers are those of `t5`. There are `encoder/(conv1, conv2)/(kernel, bias)`,
    `decoder/embed/embedding`, and on each side `positions/embedding` and `norm/…`.
    """
    sides = [_WHISPER_LAYER.format(side=side) for side in ("encoder", "decoder")]
    return entries(_WHISPER + "".join(sides) + _WHISPER_CROSS, scanned)


def vit(*, scanned: bool = False) -> list[Entry]:
    """Mapping for ViT, with or without the prefix `vit.`; a pooler is left out.

    There are `cls_token`, `position_embeddings`, `patch_embedding/(kernel, bias)` and
    `classifier/(kernel, bias)`.
    """
    return entries(_VIT, scanned, ("vit.", ""))


def clip(*, scanned: bool = False) -> list[Entry]:
    """Mapping for CLIP, or for one of its towers.

    The towers are `text/…`, with `embed/embedding`, and `vision/…`, with
    `class_embedding`, `patch_embedding/kernel` and `pre_norm/…`; both have
    `positions/embedding`, `layers/N/…` and `norm/…`. Besides, there are
    `(text, visual)_projection/kernel` and `logit_scale`.
    """
    sides = [_CLIP_LAYER.format(side=side) for side in ("text", "vision")]
    return entries(_CLIP + "".join(sides), scanned)
