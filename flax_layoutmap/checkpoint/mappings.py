r"""Mappings from the leaves of Flax models to tensors of Hugging Face checkpoints.

A mapping is a list of entries `(path of a leaf, name of a tensor, steps)`; see
`restore_safetensors`. Those here are plain lists: put entries of your own before
them, since the first that matches counts.

    mapping = [
        (r"blocks/(\d+)/attn/q/kernel", r"model.layers.\1.self_attn.q_proj.weight",
         mappings.linear()),
        *mappings.llama(),
    ]

The paths that they expect, for layers in a list (`layers/0/…`) or, with
`scanned=True`, stacked along dim 0 of each leaf (`layers/…`); `mlp/` may be absent.
Kernels may have the heads as a dim of their own (`nnx.LinearGeneral`) or not
(`nnx.Linear`).

| leaf | Llama, Gemma | GPT-2 |
|---|---|---|
| embed/embedding | model.embed_tokens | wte |
| positions/embedding | | wpe |
| layers/N/attention_norm/scale (and bias) | input_layernorm | ln_1 |
| layers/N/attention/(query, key, value)/kernel (and bias) | q_proj … | c_attn, split |
| layers/N/attention/out/kernel (and bias) | o_proj | attn.c_proj |
| layers/N/mlp_norm/scale (and bias) | post_attention_layernorm | ln_2 |
| layers/N/mlp/(gate, up, down)/kernel (and bias) | gate_proj … | up c_fc, down c_proj |
| norm/scale (and bias) | model.norm | ln_f |
| lm_head/kernel | lm_head, else the embedding | lm_head, else wte |
"""

from typing import Any

from flax_layoutmap.checkpoint._mapping_steps import cast as cast
from flax_layoutmap.checkpoint._mapping_steps import linear as linear
from flax_layoutmap.checkpoint._mapping_steps import merge as merge
from flax_layoutmap.checkpoint._mapping_steps import rearrange as rearrange
from flax_layoutmap.checkpoint._mapping_steps import split as split
from flax_layoutmap.checkpoint._mapping_steps import stack as stack
from flax_layoutmap.checkpoint._mapping_steps import transpose as transpose
from flax_layoutmap.checkpoint._mapping_steps import unflatten as unflatten

Entry = tuple[Any, ...]

# Norm of a layer → its name in the checkpoint.
_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_POST_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def llama(*, scanned: bool = False, tied: bool = False) -> list[Entry]:
    """Mapping for Llama, Mistral, Qwen 2 and others with the same names.

    Rotary positions turn the first half of a head against the second, as in
    `transformers`.

    Args:
        scanned: whether the model has its layers stacked along dim 0.
        tied: whether the model's output is its embedding; a `lm_head.weight` in the
            checkpoint is then ignored.
    """
    return _decoder(_NORMS, scanned, tied)


def gemma(
    *, post_norms: bool = False, scanned: bool = False, tied: bool = True
) -> list[Entry]:
    """Mapping for Gemma; with `post_norms`, for Gemma 2 and Gemma 3 text models.

    The norms of these models multiply by 1 + scale, and the embedding is multiplied by
    the square root of the width; that is the model's to do.

    Args:
        post_norms: whether what attention and mlp return is normed, too, by
            `attention_post_norm/scale` and `mlp_post_norm/scale`.
        scanned: whether the model has its layers stacked along dim 0.
        tied: whether the model's output is its embedding.
    """
    return _decoder(_POST_NORMS if post_norms else _NORMS, scanned, tied)


def gpt2(*, scanned: bool = False, tied: bool = True) -> list[Entry]:
    """Mapping for GPT-2, with or without the prefix `transformer.`.

    Args:
        scanned: whether the model has its layers stacked along dim 0.
        tied: whether the model's output is its embedding.
    """

    def names(name: str) -> tuple[str, str]:
        return f"transformer.{name}", name

    entries: list[Entry] = [
        ("embed/embedding", names("wte.weight")),
        ("positions/embedding", names("wpe.weight")),
        ("norm/scale", names("ln_f.weight")),
        ("norm/bias", names("ln_f.bias")),
        ("lm_head/kernel", ("lm_head.weight", *names("wte.weight")), (linear(),)),
        # Masks, which old checkpoints hold.
        (None, r"(?:transformer\.)?h\.\d+\.attn\.(?:masked_)?bias"),
    ]
    layer: list[Entry] = [
        ("attention_norm/scale", "ln_1.weight", ()),
        ("attention_norm/bias", "ln_1.bias", ()),
        ("mlp_norm/scale", "ln_2.weight", ()),
        ("mlp_norm/bias", "ln_2.bias", ()),
    ]
    # A Conv1D has its inputs first.
    for at, part in enumerate(("query", "key", "value")):
        kernel = (split(1, at, 3), transpose(), linear())
        layer.append((f"attention/{part}/kernel", "attn.c_attn.weight", kernel))
        bias = (split(0, at, 3), unflatten())
        layer.append((f"attention/{part}/bias", "attn.c_attn.bias", bias))
    back = (transpose(), linear(outputs=1))
    layer += [
        ("attention/out/kernel", "attn.c_proj.weight", back),
        ("attention/out/bias", "attn.c_proj.bias", ()),
    ]
    for path, name in (("up", "c_fc"), ("down", "c_proj")):
        own = (transpose(), linear())
        layer.append((f"(?:mlp/)?{path}/kernel", f"mlp.{name}.weight", own))
        layer.append((f"(?:mlp/)?{path}/bias", f"mlp.{name}.bias", ()))
    for path, name, steps in layer:
        path, number, steps = _of_layer(path, steps, scanned)
        entries.append((path, names(f"h.{number}.{name}"), steps))
    return entries + _tied(tied)


def _decoder(norms: dict[str, str], scanned: bool, tied: bool) -> list[Entry]:
    entries: list[Entry] = [
        ("embed/embedding", "model.embed_tokens.weight"),
        ("norm/scale", "model.norm.weight"),
        (
            "lm_head/kernel",
            ("lm_head.weight", "model.embed_tokens.weight"),
            (linear(),),
        ),
        (None, r"model\.(?:layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),
    ]
    layer: list[Entry] = [
        (f"{path}/scale", f"{name}.weight", ()) for path, name in norms.items()
    ]
    for path, name in (("query", "q"), ("key", "k"), ("value", "v")):
        of = f"self_attn.{name}"
        layer += [
            (f"attention/{path}/kernel", f"{of}_proj.weight", (linear(),)),
            (f"attention/{path}/bias", f"{of}_proj.bias", (unflatten(),)),
            (f"attention/{path}_norm/scale", f"{of}_norm.weight", ()),
        ]
    layer += [
        ("attention/out/kernel", "self_attn.o_proj.weight", (linear(outputs=1),)),
        ("attention/out/bias", "self_attn.o_proj.bias", ()),
    ]
    for path in ("gate", "up", "down"):
        own = (linear(),)
        layer.append((f"(?:mlp/)?{path}/kernel", f"mlp.{path}_proj.weight", own))
        layer.append((f"(?:mlp/)?{path}/bias", f"mlp.{path}_proj.bias", ()))
    for path, name, steps in layer:
        path, number, steps = _of_layer(path, steps, scanned)
        entries.append((path, f"model.layers.{number}.{name}", steps))
    return entries + _tied(tied)


def _of_layer(
    path: str, steps: tuple[Any, ...], scanned: bool
) -> tuple[str, str, tuple[Any, ...]]:
    """The path in a layer, its number in the name of the tensor, and the steps."""
    if scanned:
        return f"layers/{path}", "{layer}", (*steps, stack(0))
    return rf"layers/(\d+)/{path}", r"\1", steps


def _tied(tied: bool) -> list[Entry]:
    return [(None, r"lm_head\.weight")] if tied else []
