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
(`flm.presets.load("llama", mesh)`). Layers are numbered (`layers/0/…`) or, with
`scanned=True`, stacked along dim 0 of each leaf (`layers/…`); in decoders, `mlp/` may
be absent. Kernels may have the heads as a dim of their own (`nnx.LinearGeneral`) or not
(`nnx.Linear`).

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
layers stacked along dim 0; `tied`, that its output is its embedding (a `lm_head.weight`
in the checkpoint is then ignored); `fused`, that the experts of a layer are one tensor,
as in the modules of `transformers` 5, where the published files have one for each.
"""

from typing import Any

from flax_layoutmap.checkpoint import _families as f
from flax_layoutmap.checkpoint._steps import dequantize as dequantize
from flax_layoutmap.checkpoint._steps import linear as linear
from flax_layoutmap.checkpoint._steps import merge as merge
from flax_layoutmap.checkpoint._steps import split as split
from flax_layoutmap.checkpoint._steps import stack as stack
from flax_layoutmap.checkpoint._steps import transpose as transpose
from flax_layoutmap.checkpoint._steps import unflatten as unflatten

Entry = tuple[Any, ...]
_DENSE = f.rows(f.NORMS + f.ATTENTION + f.GATED)
_SPARSE = f.rows(f.NORMS + f.ATTENTION)


def llama(*, scanned: bool = False, tied: bool = False) -> list[Entry]:
    """Mapping for Llama 2 and 3, and others with the same names.

    Rotary embeddings use the half-split convention of `transformers`.
    """
    return f.decoder(_DENSE, scanned, tied)


def mistral(*, scanned: bool = False) -> list[Entry]:
    """Mapping for Mistral: that of `llama`."""
    return llama(scanned=scanned)


def qwen2(*, scanned: bool = False, tied: bool = False) -> list[Entry]:
    """Mapping for Qwen 2 and 2.5: that of `llama`, with biases of query, key and value.

    Models up to 3B are tied.
    """
    return llama(scanned=scanned, tied=tied)


def qwen3(*, scanned: bool = False, tied: bool = False) -> list[Entry]:
    """Mapping for Qwen 3: that of `llama`, with norms of queries and keys.

    Weights in float8 are multiplied by their scales; see `dequantize`. Models up to 4B
    are tied.
    """
    return f.decoder(f.float8(_DENSE), scanned, tied)


def gemma(
    *, post_norms: bool = False, scanned: bool = False, tied: bool = True
) -> list[Entry]:
    """Mapping for Gemma; with `post_norms`, for Gemma 2 and the text of Gemma 3.

    The model multiplies by 1 + scale in its norms, and the embedding by the square root
    of the width. Tensors of Gemma 3's vision are left out.

    Args:
        post_norms: whether the outputs of attention and mlp are normed, too, by
            `attention_post_norm/scale` and `mlp_post_norm/scale`.
    """
    norms = f.FOUR_NORMS if post_norms else f.NORMS
    prefixes = ("model.", "language_model.model.", "model.language_model.")
    return [
        *f.decoder(f.rows(norms + f.ATTENTION + f.GATED), scanned, tied, prefixes),
        (None, r"(?:model\.)?(?:vision_tower|multi_modal_projector)\..*"),
    ]


def mixtral(*, scanned: bool = False, fused: bool = False) -> list[Entry]:
    """Mapping for Mixtral."""
    fused_rows = [*f.rows(f.ROUTER), *f.FUSED_EXPERTS]
    experts = fused_rows if fused else f.rows(f.MIXTRAL_EXPERTS)
    return f.decoder([*_SPARSE, *experts], scanned)


def qwen3_moe(*, scanned: bool = False, fused: bool = False) -> list[Entry]:
    """Mapping for Qwen 3 with experts.

    Weights in float8 are multiplied by their scales; see `dequantize`.
    """
    experts = f.FUSED_EXPERTS if fused else f.rows(f.QWEN_EXPERTS)
    weights = f.float8([*_DENSE, *experts])
    return f.decoder([*weights, *f.rows(f.ROUTER)], scanned)


def deepseek_v3(
    *,
    scanned: bool = False,
    fused: bool = False,
    dense_layers: int = 3,
    layers: int = 61,
) -> list[Entry]:
    """Mapping for DeepSeek V2, V3 and R1, and Kimi K2.

    Attention has `q_a/kernel`, `q_a_norm/scale`, `q_b/kernel` (or `query/kernel`,
    without a low rank), `kv_a/kernel`, `kv_a_norm/scale`, `kv_b/kernel` and
    `out/kernel`. The router has a bias, `mlp/router/bias`, and besides the experts
    there are `mlp/shared_experts/(gate, up, down)/kernel`. Scanned, the first layers
    are `dense_layers/…`, and those with experts `moe_layers/…`.

    Args:
        dense_layers: how many layers have no experts.
        layers: how many layers there are; the tensors of one more, which predicts the
            next token but one, are left out.
    """
    shared = f.float8(f.rows(f.NORMS + f.LATENT_ATTENTION))
    dense = f.float8(f.rows(f.GATED))
    experts = f.FUSED_EXPERTS if fused else f.rows(f.QWEN_EXPERTS)
    weights = f.float8([*experts, *f.rows(f.SHARED_EXPERTS)])
    moe = [*f.rows(f.DEEPSEEK_ROUTER), *weights]
    entries = [*f.around(False), (None, rf"model\.layers\.{layers}\..*")]
    if not scanned:
        every = [*shared, *dense, *moe]
        return [*entries, *f.layers(every, "layers", "model.layers", False)]
    return [
        *entries,
        *f.layers([*shared, *dense], "dense_layers", "model.layers", True),
        *f.layers([*shared, *moe], "moe_layers", "model.layers", True, dense_layers),
    ]


def gpt_oss(*, scanned: bool = False, mxfp4: bool = True) -> list[Entry]:
    """Mapping for gpt-oss.

    Attention has biases and `attention/sinks`; router and experts have biases. Gate and
    up, whose outputs alternate in the file, are apart.

    Args:
        mxfp4: whether the experts are in MXFP4, as in the published files. They are
            multiplied by their scales: see `dequantize`. Pass False for files in
            bfloat16, and to save.
    """
    more = "leaf attention/sinks self_attn.sinks\ndense mlp/router mlp.router\n"
    experts = f.gpt_oss_experts(mxfp4)
    return f.decoder([*_SPARSE, *f.rows(more), *experts], scanned)


def gpt2(*, scanned: bool = False, tied: bool = True) -> list[Entry]:
    """Mapping for GPT-2, with or without the prefix `transformer.`.

    Besides, there are `positions/embedding`, and biases of norms and of kernels.
    """
    prefixes = ("transformer.", "")
    head = ("lm_head.weight", *f.names(prefixes, "wte.weight"))
    return [
        *f.whole("embed embed wte\nembed positions wpe\nnorm norm ln_f", prefixes),
        ("lm_head/kernel", head, linear()),
        # Masks, which old checkpoints hold.
        (None, r"(?:transformer\.)?h\.\d+\.attn\.(?:masked_)?bias"),
        *([(None, r"lm_head\.weight")] if tied else []),
        *f.layers(f.gpt2_layer(), "layers", f.names(prefixes, "h"), scanned),
    ]


def t5(*, gated: bool = True, scanned: bool = False, tied: bool = False) -> list[Entry]:
    """Mapping for T5, mT5 and UMT5.

    The layers are `encoder/layers/N/…` and `decoder/layers/N/…`, where those of the
    decoder also have `cross_attention/…` and `cross_attention_norm/scale`; each side
    has `norm/scale` and `relative_attention_bias/embedding` (of UMT5 in `attention/`).

    Args:
        gated: whether mlp has a gate, as in T5 1.1, mT5 and UMT5; T5 1.0 has none, and
            is tied.
    """
    bias = "relative_attention_bias"
    entries: list[Entry] = [
        ("embed/embedding", "shared.weight"),
        ("lm_head/kernel", ("lm_head.weight", "shared.weight"), linear()),
        *([(None, r"lm_head\.weight")] if tied else []),
        # Copies of old checkpoints, and a bias that no layer has.
        (None, r"(?:encoder|decoder)\.embed_tokens\.weight"),
        (None, rf"decoder\.block\.0\.layer\.1\.EncDecAttention\.{bias}\.weight"),
    ]
    for side in ("encoder", "decoder"):
        first = f"{side}.block.0.layer.0.SelfAttention.{bias}"
        table = f"embed {side}/{bias} {first}\nnorm {side}/norm {side}.final_layer_norm"
        of = f.t5_layer(side == "decoder", gated)
        entries += f.whole(table)
        entries += f.layers(of, f"{side}/layers", f"{side}.block", scanned)
    return entries


def whisper(*, scanned: bool = False) -> list[Entry]:
    """Mapping for Whisper, whose output is its embedding.

    The layers are `encoder/layers/N/…` and `decoder/layers/N/…`, where those of the
    decoder also have `cross_attention/…` and `cross_attention_norm/…`. There are
    `encoder/(conv1, conv2)/(kernel, bias)`, `decoder/embed/embedding`, and on each side
    `positions/embedding` and `norm/(scale, bias)`.
    """
    table = """
        embed decoder/embed decoder.embed_tokens
        conv1d encoder/conv1 encoder.conv1
        conv1d encoder/conv2 encoder.conv2
        embed encoder/positions encoder.embed_positions
        embed decoder/positions decoder.embed_positions
        norm encoder/norm encoder.layer_norm
        norm decoder/norm decoder.layer_norm
    """
    entries = [*f.whole(table, "model."), (None, r"proj_out\.weight")]
    for side in ("encoder", "decoder"):
        of = f.whisper_layer(side == "decoder")
        entries += f.layers(of, f"{side}/layers", f"model.{side}.layers", scanned)
    return entries


def vit(*, scanned: bool = False) -> list[Entry]:
    """Mapping for ViT, with or without the prefix `vit.`.

    There are `cls_token`, `position_embeddings`, `patch_embedding/(kernel, bias)` and
    `classifier/(kernel, bias)`; a pooler is left out.
    """
    prefixes = ("vit.", "")
    table = """
        leaf cls_token embeddings.cls_token
        leaf position_embeddings embeddings.position_embeddings
        conv2d patch_embedding embeddings.patch_embeddings.projection
        norm norm layernorm
    """
    tensor = f.names(prefixes, "encoder.layer")
    return [
        *f.whole(table, prefixes),
        *f.whole("dense classifier classifier"),
        (None, r"(?:vit\.)?pooler\.dense\.(?:weight|bias)"),
        *f.layers(f.rows(f.VIT_LAYER), "layers", tensor, scanned),
    ]


def clip(*, scanned: bool = False) -> list[Entry]:
    """Mapping for CLIP, or for one of its towers.

    The towers are `text/…`, with `embed/embedding`, and `vision/…`, with
    `class_embedding`, `patch_embedding/kernel` and `pre_norm/(scale, bias)`; both have
    `positions/embedding`, `layers/N/…` and `norm/(scale, bias)`. Besides, there are
    `(text, visual)_projection/kernel` and `logit_scale`.
    """
    table = """
        embed text/embed text_model.embeddings.token_embedding
        embed text/positions text_model.embeddings.position_embedding
        norm text/norm text_model.final_layer_norm
        leaf vision/class_embedding vision_model.embeddings.class_embedding
        conv2d vision/patch_embedding vision_model.embeddings.patch_embedding
        embed vision/positions vision_model.embeddings.position_embedding
        norm vision/pre_norm vision_model.pre_layrnorm
        norm vision/norm vision_model.post_layernorm
        dense text_projection text_projection
        dense visual_projection visual_projection
        leaf logit_scale logit_scale
    """
    entries = f.whole(table)
    entries += [(None, r"(?:text|vision)_model\.embeddings\.position_ids")]
    for side in ("text", "vision"):
        tensor = f"{side}_model.encoder.layers"
        of = f.rows(f.CLIP_LAYER)
        entries += f.layers(of, f"{side}/layers", tensor, scanned)
    return entries
