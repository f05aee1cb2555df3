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

What other families have besides is said at each.
"""

from collections.abc import Sequence
from typing import Any

from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap.checkpoint import _mapping_families as _families
from flax_layoutmap.checkpoint._steps import cast as cast
from flax_layoutmap.checkpoint._steps import dequantize as dequantize
from flax_layoutmap.checkpoint._steps import linear as linear
from flax_layoutmap.checkpoint._steps import merge as merge
from flax_layoutmap.checkpoint._steps import rearrange as rearrange
from flax_layoutmap.checkpoint._steps import split as split
from flax_layoutmap.checkpoint._steps import stack as stack
from flax_layoutmap.checkpoint._steps import transpose as transpose
from flax_layoutmap.checkpoint._steps import unflatten as unflatten

Entry = tuple[Any, ...]


def llama(*, scanned: bool = False, tied: bool = False) -> list[Entry]:
    """Mapping for Llama 2 and 3, and others with the same names.

    Rotary positions turn the first half of a head against the second, as in
    `transformers`.

    Args:
        scanned: whether the model has its layers stacked along dim 0.
        tied: whether the model's output is its embedding; a `lm_head.weight` in the
            checkpoint is then ignored.
    """
    rows = [*_families.NORMS, *_families.ATTENTION, *_families.GATED]
    return _families.decoder(rows, scanned=scanned, tied=tied)


def mistral(*, scanned: bool = False) -> list[Entry]:
    """Mapping for Mistral: that of `llama`."""
    return llama(scanned=scanned)


def qwen2(*, scanned: bool = False, tied: bool = False) -> list[Entry]:
    """Mapping for Qwen 2 and 2.5: that of `llama`, with biases of query, key and value.

    Args:
        scanned: as for `llama`.
        tied: as for `llama`; true of the models up to 3B.
    """
    return llama(scanned=scanned, tied=tied)


def qwen3(*, scanned: bool = False, tied: bool = False) -> list[Entry]:
    """Mapping for Qwen 3: that of `llama`, with norms of queries and keys.

    Weights in float8 are multiplied by their scales; see `dequantize`.

    Args:
        scanned: as for `llama`.
        tied: as for `llama`; true of the models up to 4B.
    """
    rows = _families.float8([*_families.NORMS, *_families.ATTENTION, *_families.GATED])
    return _families.decoder(rows, scanned=scanned, tied=tied)


def gemma(
    *, post_norms: bool = False, scanned: bool = False, tied: bool = True
) -> list[Entry]:
    """Mapping for Gemma; with `post_norms`, for Gemma 2 and the text of Gemma 3.

    The norms of these models multiply by 1 + scale, and the embedding is multiplied by
    the square root of the width; that is the model's to do. Tensors of Gemma 3's vision
    are left out.

    Args:
        post_norms: whether what attention and mlp return is normed, too, by
            `attention_post_norm/scale` and `mlp_post_norm/scale`.
        scanned: whether the model has its layers stacked along dim 0.
        tied: whether the model's output is its embedding.
    """
    rows = _families.FOUR_NORMS if post_norms else _families.NORMS
    rows = [*rows, *_families.ATTENTION, *_families.GATED]
    prefixes = ("model.", "language_model.model.", "model.language_model.")
    return [
        *_families.decoder(rows, scanned=scanned, tied=tied, prefixes=prefixes),
        (None, r"(?:model\.)?(?:vision_tower|multi_modal_projector)\..*"),
    ]


def mixtral(*, scanned: bool = False, fused: bool = False) -> list[Entry]:
    """Mapping for Mixtral.

    Args:
        scanned: whether the model has its layers stacked along dim 0.
        fused: whether the experts of a layer are one tensor, as in the modules of
            `transformers` 5; the published files have one for each.
    """
    block = "mlp" if fused else "block_sparse_moe"
    experts = _families.experts(f"{block}.experts", "w1", "w3", "w2")
    rows = [
        *(*_families.NORMS, *_families.ATTENTION, *_families.router(f"{block}.gate")),
        *(_families.fused_experts("mlp.experts") if fused else experts),
    ]
    return _families.decoder(rows, scanned=scanned, tied=False)


def qwen3_moe(*, scanned: bool = False, fused: bool = False) -> list[Entry]:
    """Mapping for Qwen 3 with experts.

    Weights in float8 are multiplied by their scales; see `dequantize`.

    Args:
        scanned: as for `mixtral`.
        fused: as for `mixtral`.
    """
    experts = (
        _families.fused_experts("mlp.experts") if fused else _families.QWEN_EXPERTS
    )
    shared = [*_families.NORMS, *_families.ATTENTION, *_families.GATED]
    rows = [*_families.float8([*shared, *experts]), *_families.router("mlp.gate")]
    return _families.decoder(rows, scanned=scanned, tied=False)


def deepseek_v3(
    *,
    scanned: bool = False,
    fused: bool = False,
    keep_float8: bool = False,
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
        scanned: whether the model has its layers stacked along dim 0, in two stacks.
        fused: as for `mixtral`.
        keep_float8: whether the leaves stay in float8 if the weights are, with the
            scales of their blocks in `kernel_scale` beside each `kernel`, laid out as
            `(in / 128, out / 128)`. Otherwise they are multiplied: see `dequantize`.
        dense_layers: how many layers have no experts.
        layers: how many layers there are; the tensors of one more, which predicts the
            next token but one, are left out.
    """
    latent = _families.float8(
        [*_families.NORMS, *_families.LATENT_ATTENTION], keep_float8
    )
    dense = _families.float8(_families.GATED, keep_float8)
    experts = (
        _families.fused_experts("mlp.experts") if fused else _families.QWEN_EXPERTS
    )
    own = _families.float8([*experts, *_families.SHARED_EXPERTS], keep_float8)
    moe = [*_families.DEEPSEEK_ROUTER, *own]
    entries = [*_families.around(tied=False), (None, rf"model\.layers\.{layers}\..*")]
    if not scanned:
        rows = [*latent, *dense, *moe]
        return [
            *entries,
            *_families.layers(rows, "layers", "model.layers", scanned=False),
        ]
    for stack_of, rows, start in (("dense", dense, 0), ("moe", moe, dense_layers)):
        entries += _families.layers(
            [*latent, *rows],
            f"{stack_of}_layers",
            "model.layers",
            scanned=True,
            start=start,
        )
    return entries


def gpt_oss(
    *, scanned: bool = False, mxfp4: bool = True, keep_mxfp4: bool = False
) -> list[Entry]:
    """Mapping for gpt-oss.

    Attention has biases and `attention/sinks`; router and experts have biases. Gate and
    up, whose outputs alternate in the file, are apart.

    Args:
        scanned: whether the model has its layers stacked along dim 0.
        mxfp4: whether the experts are in MXFP4, as in the published files. They are
            multiplied by their scales: see `dequantize`. Pass False for files in
            bfloat16, and to save.
        keep_mxfp4: whether the leaves stay in MXFP4, where `kernel` is `blocks`, uint8
            (experts, out, in / 32, 16) with two numbers in a byte, and `scales`, uint8
            (experts, out, in / 32).
    """
    if keep_mxfp4 and not mxfp4:
        raise CheckpointError(
            "gpt_oss(mxfp4=False, keep_mxfp4=True): files in bfloat16 have no MXFP4 to "
            "keep; leave one of them out"
        )
    sinks: list[Any] = [("attention/sinks", "self_attn.sinks", ())]
    experts = _families.gpt_oss_experts(mxfp4, keep_mxfp4)
    experts = [*_families.router("mlp.router"), *experts]
    rows = [*_families.NORMS, *_families.ATTENTION, *sinks, *experts]
    return _families.decoder(rows, scanned=scanned, tied=False)


def gpt2(*, scanned: bool = False, tied: bool = True) -> list[Entry]:
    """Mapping for GPT-2, with or without the prefix `transformer.`.

    Besides, there are `positions/embedding`, and biases of norms and of kernels.

    Args:
        scanned: whether the model has its layers stacked along dim 0.
        tied: whether the model's output is its embedding.
    """
    prefixes = ("transformer.", "")
    embed = _families.names(prefixes, "wte.weight")
    return [
        ("embed/embedding", embed),
        ("positions/embedding", _families.names(prefixes, "wpe.weight")),
        *_whole(_families.norm("norm", "ln_f"), prefixes),
        ("lm_head/kernel", ("lm_head.weight", *embed), linear()),
        # Masks, which old checkpoints hold.
        (None, r"(?:transformer\.)?h\.\d+\.attn\.(?:masked_)?bias"),
        *([(None, r"lm_head\.weight")] if tied else []),
        *_families.layers(
            _families.gpt2_layer(),
            "layers",
            _families.names(prefixes, "h"),
            scanned=scanned,
        ),
    ]


def t5(*, gated: bool = True, scanned: bool = False, tied: bool = False) -> list[Entry]:
    """Mapping for T5, mT5 and UMT5.

    The layers are `encoder/layers/N/…` and `decoder/layers/N/…`, where those of the
    decoder also have `cross_attention/…` and `cross_attention_norm/scale`; each side
    has `norm/scale` and `relative_attention_bias/embedding` (of UMT5 in `attention/`).

    Args:
        gated: whether mlp has a gate, as in T5 1.1, mT5 and UMT5.
        scanned: whether the model has its layers stacked along dim 0.
        tied: whether the model's output is its embedding, as in T5 1.0.
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
        first = f"{side}.block.0.layer.0.SelfAttention.{bias}.weight"
        rows = _families.t5_layer(is_decoder=side == "decoder", gated=gated)
        entries += [
            (f"{side}/{bias}/embedding", first),
            (f"{side}/norm/scale", f"{side}.final_layer_norm.weight"),
            *_families.layers(rows, f"{side}/layers", f"{side}.block", scanned=scanned),
        ]
    return entries


def whisper(*, scanned: bool = False) -> list[Entry]:
    """Mapping for Whisper, whose output is its embedding.

    The layers are `encoder/layers/N/…` and `decoder/layers/N/…`, where those of the
    decoder also have `cross_attention/…` and `cross_attention_norm/…`. There are
    `encoder/(conv1, conv2)/(kernel, bias)`, `decoder/embed/embedding`, and on each side
    `positions/embedding` and `norm/(scale, bias)`.

    Args:
        scanned: whether the model has its layers stacked along dim 0.
    """
    entries: list[Entry] = [
        ("decoder/embed/embedding", "model.decoder.embed_tokens.weight"),
        *_whole(_families.convolution("encoder/conv1", "encoder.conv1", 1), "model."),
        *_whole(_families.convolution("encoder/conv2", "encoder.conv2", 1), "model."),
        (None, r"proj_out\.weight"),
    ]
    for side in ("encoder", "decoder"):
        rows = _families.whisper_layer(is_decoder=side == "decoder")
        tensor = f"model.{side}"
        entries += [
            (f"{side}/positions/embedding", f"{tensor}.embed_positions.weight"),
            *_families.norm(f"{side}/norm", f"{tensor}.layer_norm"),
            *_families.layers(
                rows, f"{side}/layers", f"{tensor}.layers", scanned=scanned
            ),
        ]
    return entries


def vit(*, scanned: bool = False) -> list[Entry]:
    """Mapping for ViT, with or without the prefix `vit.`.

    There are `cls_token`, `position_embeddings`, `patch_embedding/(kernel, bias)` and
    `classifier/(kernel, bias)`; a pooler is left out.

    Args:
        scanned: whether the model has its layers stacked along dim 0.
    """
    prefixes, patches = ("vit.", ""), "embeddings.patch_embeddings.projection"
    return [
        ("cls_token", _families.names(prefixes, "embeddings.cls_token")),
        (
            "position_embeddings",
            _families.names(prefixes, "embeddings.position_embeddings"),
        ),
        *_whole(_families.convolution("patch_embedding", patches, 2), prefixes),
        *_whole(_families.norm("norm", "layernorm"), prefixes),
        *_families.dense("classifier", "classifier"),
        (None, r"(?:vit\.)?pooler\.dense\.(?:weight|bias)"),
        *_families.layers(
            _families.VIT_LAYER,
            "layers",
            _families.names(prefixes, "encoder.layer"),
            scanned=scanned,
        ),
    ]


def clip(*, scanned: bool = False) -> list[Entry]:
    """Mapping for CLIP, or for one of its towers.

    The towers are `text/…`, with `embed/embedding`, and `vision/…`, with
    `class_embedding`, `patch_embedding/kernel` and `pre_norm/(scale, bias)`; both have
    `positions/embedding`, `layers/N/…` and `norm/(scale, bias)`. Besides, there are
    `(text, visual)_projection/kernel` and `logit_scale`.

    Args:
        scanned: whether the model has its layers stacked along dim 0.
    """
    text, vision = "text_model.embeddings", "vision_model.embeddings"
    entries: list[Entry] = [
        ("text/embed/embedding", f"{text}.token_embedding.weight"),
        *_families.norm("text/norm", "text_model.final_layer_norm"),
        ("vision/class_embedding", f"{vision}.class_embedding"),
        *_families.convolution(
            "vision/patch_embedding", f"{vision}.patch_embedding", 2
        ),
        *_families.norm("vision/pre_norm", "vision_model.pre_layrnorm"),
        *_families.norm("vision/norm", "vision_model.post_layernorm"),
        *_families.dense("text_projection", "text_projection"),
        *_families.dense("visual_projection", "visual_projection"),
        ("logit_scale", "logit_scale"),
        (None, r"(?:text|vision)_model\.embeddings\.position_ids"),
    ]
    for side in ("text", "vision"):
        tensor = f"{side}_model"
        positions = f"{tensor}.embeddings.position_embedding.weight"
        entries += [
            (f"{side}/positions/embedding", positions),
            *_families.layers(
                _families.CLIP_LAYER,
                f"{side}/layers",
                f"{tensor}.encoder.layers",
                scanned=scanned,
            ),
        ]
    return entries


def _whole(rows: Sequence[Any], prefixes: str | Sequence[str]) -> list[Entry]:
    """Rows about the model, with what is before the names of their tensors."""
    return [
        (path, _families.names(prefixes, name), steps) for path, name, steps in rows
    ]
