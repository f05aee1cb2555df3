"""The tables of the families in `mappings`: leaf, tensor, steps.

A row is about one layer, `("mlp/up/kernel", "mlp.up_proj.weight", steps)`, or about the
model. A row that a model has no leaf for, such as a bias, does nothing.
"""

from collections.abc import Sequence
from typing import Any

from flax_layoutmap.checkpoint._steps import (
    dequantize,
    linear,
    rearrange,
    split,
    stack,
    transpose,
    unflatten,
)

Row = tuple[str, str, tuple[Any, ...]]
Entry = tuple[Any, ...]

OUT = (linear(outputs=1),)


def layers(
    rows: Sequence[Row],
    leaf: str,
    tensor: str | Sequence[str],
    *,
    scanned: bool,
    start: int = 0,
) -> list[Entry]:
    """The entries of layers that are numbered in a list, or stacked along dim 0.

    Args:
        rows: the rows of one layer.
        leaf: what is before the number of the layer in a path.
        tensor: likewise in the name of a tensor; several are tried in turn.
        scanned: whether the layers are stacked.
        start: the number of the first layer, if they are.
    """
    number, before = (r"\1", rf"{leaf}/(\d+)")
    stacked: tuple[Any, ...] = ()
    if scanned:
        number, before, stacked = "{layer}", leaf, (stack(0, start=start),)
    return [
        (
            f"{before}/{path}",
            names(tensor, f".{number}.{name}"),
            (*steps, *stacked),
        )
        for path, name, steps in rows
    ]


def names(prefixes: str | Sequence[str], name: str) -> tuple[str, ...]:
    """The names of a tensor, to try in turn."""
    return tuple(
        f"{prefix}{name}"
        for prefix in ([prefixes] if isinstance(prefixes, str) else prefixes)
    )


# ----------------------------------------------------------------- shared by layers


def norm(leaf: str, tensor: str) -> list[Row]:
    """A norm with a scale, and perhaps a bias."""
    return [(f"{leaf}/scale", f"{tensor}.weight", ()), _bias(leaf, tensor)]


def dense(leaf: str, tensor: str) -> list[Row]:
    """A linear layer, perhaps with a bias."""
    return [(f"{leaf}/kernel", f"{tensor}.weight", (linear(),)), _bias(leaf, tensor)]


def _bias(leaf: str, tensor: str) -> Row:
    return f"{leaf}/bias", f"{tensor}.bias", ()


def attention(leaf: str, query: str, key: str, value: str, out: str) -> list[Row]:
    """Attention, whose heads may be dims of their own, perhaps with biases."""
    rows: list[Row] = []
    for part, tensor in (("query", query), ("key", key), ("value", value)):
        rows.append((f"{leaf}/{part}/kernel", f"{tensor}.weight", (linear(),)))
        rows.append((f"{leaf}/{part}/bias", f"{tensor}.bias", (unflatten(),)))
    return [
        *rows,
        (f"{leaf}/out/kernel", f"{out}.weight", OUT),
        _bias(f"{leaf}/out", out),
    ]


# ------------------------------------------------------------------------ decoders

NORMS = [
    *norm("attention_norm", "input_layernorm"),
    *norm("mlp_norm", "post_attention_layernorm"),
]
# Gemma 2 and 3 also norm what attention and mlp return.
FOUR_NORMS = [
    *norm("attention_norm", "input_layernorm"),
    *norm("attention_post_norm", "post_attention_layernorm"),
    *norm("mlp_norm", "pre_feedforward_layernorm"),
    *norm("mlp_post_norm", "post_feedforward_layernorm"),
]
ATTENTION = [
    *attention("attention", *(f"self_attn.{name}_proj" for name in "qkvo")),
    *norm("attention/query_norm", "self_attn.q_norm"),
    *norm("attention/key_norm", "self_attn.k_norm"),
]
LATENT_ATTENTION = [
    *dense("attention/q_a", "self_attn.q_a_proj"),
    *norm("attention/q_a_norm", "self_attn.q_a_layernorm"),
    *dense("attention/q_b", "self_attn.q_b_proj"),
    *dense("attention/query", "self_attn.q_proj"),  # of V2 Lite, without a low rank
    *dense("attention/kv_a", "self_attn.kv_a_proj_with_mqa"),
    *norm("attention/kv_a_norm", "self_attn.kv_a_layernorm"),
    *dense("attention/kv_b", "self_attn.kv_b_proj"),
    ("attention/out/kernel", "self_attn.o_proj.weight", OUT),
]
GATED = [
    row
    for name in ("gate", "up", "down")
    for row in dense(f"(?:mlp/)?{name}", f"mlp.{name}_proj")
]


def decoder(
    rows: Sequence[Row],
    *,
    scanned: bool,
    tied: bool,
    prefixes: str | Sequence[str] = "model.",
) -> list[Entry]:
    """A decoder with these layers, and the names that most share."""
    return [
        *around(tied, prefixes),
        *layers(rows, "layers", names(prefixes, "layers"), scanned=scanned),
    ]


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


# ------------------------------------------------------------------------- experts


def experts(tensor: str, gate: str, up: str, down: str) -> list[Row]:
    """Experts that are modules of their own; the leaves are (experts, in, out)."""
    steps = (linear(), stack(0, field="expert"))
    return [
        (f"mlp/experts/{leaf}/kernel", f"{tensor}.{{expert}}.{name}.weight", steps)
        for leaf, name in (("gate", gate), ("up", up), ("down", down))
    ]


def fused_experts(tensor: str) -> list[Row]:
    """All experts of a layer as (experts, out, in), gate before up."""
    rows: list[Row] = [
        (
            f"mlp/experts/{leaf}/kernel",
            f"{tensor}.gate_up_proj",
            (split(1, part, 2), transpose(0, 2, 1)),
        )
        for part, leaf in enumerate(("gate", "up"))
    ]
    down = "mlp/experts/down/kernel"
    return [*rows, (down, f"{tensor}.down_proj", (transpose(0, 2, 1),))]


def router(tensor: str) -> list[Row]:
    """The router, (in, experts), perhaps with a bias."""
    return dense("mlp/router", tensor)


QWEN_EXPERTS = experts("mlp.experts", "gate_proj", "up_proj", "down_proj")
SHARED_EXPERTS = [
    row
    for name in ("gate", "up", "down")
    for row in dense(f"mlp/shared_experts/{name}", f"mlp.shared_experts.{name}_proj")
]
DEEPSEEK_ROUTER: list[Row] = [
    ("mlp/router/kernel", "mlp.gate.weight", (linear(),)),
    ("mlp/router/bias", "mlp.gate.e_score_correction_bias", ()),
]


def gpt_oss_experts(mxfp4: bool, keep: bool) -> list[Row]:
    """Experts as (experts, in, out), where outputs of gate and up alternate.

    Tensors in MXFP4 are (experts, out, blocks, bytes), with the scales of the blocks,
    and so are their leaves if they are kept.
    """
    # Leaf, the end of the tensor's name, steps, and the dims around its outputs.
    parts: list[tuple[str, str, tuple[Any, ...], str, str]]
    if mxfp4 and keep:
        parts = [
            ("blocks", "_blocks", (), "e", "block byte"),
            ("scales", "_scales", (), "e", "block"),
        ]
    elif mxfp4:
        steps = (dequantize("mxfp4"), transpose(0, 2, 1))
        parts = [("kernel", "_blocks", steps, "e i", "")]
    else:
        parts = [("kernel", "", (), "e i", "")]
    tensor, leaf = "mlp.experts", "mlp/experts"
    rows: list[Row] = []
    for last, end, steps, before, after in (*parts, ("bias", "_bias", (), "e", "")):
        rows.append((f"{leaf}/down/{last}", f"{tensor}.down_proj{end}", steps))
        for part, name in enumerate(("gate", "up")):
            own = (*steps, *_every_other(part, before, after))
            rows.append((f"{leaf}/{name}/{last}", f"{tensor}.gate_up_proj{end}", own))
    return rows


def _every_other(part: int, before: str, after: str = "") -> tuple[Any, ...]:
    """Every other entry of a dim, with the names of the dims before and after it."""
    pattern = f"{before} (out two) {after} -> {before} (two out) {after}"
    return rearrange(pattern, two=2), split(len(before.split()), part, 2)


# -------------------------------------------------------------------------- float8


def float8(rows: Sequence[Row], keep: bool = False) -> list[Row]:
    """The same for matrices in float8, with the scales of their blocks.

    Args:
        rows: the rows of one layer.
        keep: whether the leaves stay in float8, with scales in leaves `kernel_scale`.
    """
    found: list[Row] = []
    for path, name, steps in rows:
        is_scaled = path.endswith("/kernel") and name.endswith(".weight")
        if is_scaled and keep:
            found.append((f"{path}_scale", f"{name}_scale_inv", steps))
        if is_scaled and not keep:
            steps = (dequantize(), *steps)
        found.append((path, name, steps))
    return found


# ----------------------------------------------------------------- other families


def gpt2_layer() -> list[Row]:
    """A layer of GPT-2, whose kernels are (in, out), as are Flax's."""
    rows = [*norm("attention_norm", "ln_1"), *norm("mlp_norm", "ln_2")]
    for at, part in enumerate(("query", "key", "value")):
        leaf, tensor = f"attention/{part}", "attn.c_attn"
        own = (split(1, at, 3), transpose(), linear())
        rows.append((f"{leaf}/kernel", f"{tensor}.weight", own))
        rows.append((f"{leaf}/bias", f"{tensor}.bias", (split(0, at, 3), unflatten())))
    back = (transpose(), *OUT)
    rows += [("attention/out/kernel", "attn.c_proj.weight", back)]
    rows += [_bias("attention/out", "attn.c_proj")]
    for path, name in (("up", "c_fc"), ("down", "c_proj")):
        leaf, tensor = f"(?:mlp/)?{path}", f"mlp.{name}"
        rows += [(f"{leaf}/kernel", f"{tensor}.weight", ()), _bias(leaf, tensor)]
    return rows


def t5_layer(*, is_decoder: bool, gated: bool) -> list[Row]:
    """A layer of T5's encoder or decoder."""

    def part(leaf: str, number: int, tensor: str) -> list[Row]:
        own = (f"layer.{number}.{tensor}.{name}" for name in "qkvo")
        return [
            *norm(f"{leaf}_norm", f"layer.{number}.layer_norm"),
            *attention(leaf, *own),
        ]

    bias = "relative_attention_bias"  # in each layer of UMT5
    rows = [
        *part("attention", 0, "SelfAttention"),
        (f"attention/{bias}/embedding", f"layer.0.SelfAttention.{bias}.weight", ()),
    ]
    if is_decoder:
        rows += part("cross_attention", 1, "EncDecAttention")
    last = 1 + is_decoder
    wide = {"gate": "wi_0", "up": "wi_1"} if gated else {"up": "wi"}
    rows += norm("mlp_norm", f"layer.{last}.layer_norm")
    for leaf, name in {**wide, "down": "wo"}.items():
        rows += dense(f"mlp/{leaf}", f"layer.{last}.DenseReluDense.{name}")
    return rows


def whisper_layer(*, is_decoder: bool) -> list[Row]:
    """A layer of Whisper's encoder or decoder."""
    parts = {"attention": "self_attn"}
    if is_decoder:
        parts["cross_attention"] = "encoder_attn"
    rows: list[Row] = []
    for leaf, tensor in parts.items():
        own = (f"{tensor}.{name}_proj" for name in ("q", "k", "v", "out"))
        rows += attention(leaf, *own)
        rows += norm(f"{leaf}_norm", f"{tensor}_layer_norm")
    rows += norm("mlp_norm", "final_layer_norm")
    return [*rows, *dense("mlp/up", "fc1"), *dense("mlp/down", "fc2")]


VIT_LAYER = [
    *norm("attention_norm", "layernorm_before"),
    *attention(
        "attention",
        "attention.attention.query",
        "attention.attention.key",
        "attention.attention.value",
        "attention.output.dense",
    ),
    *norm("mlp_norm", "layernorm_after"),
    *dense("mlp/up", "intermediate.dense"),
    *dense("mlp/down", "output.dense"),
]
CLIP_LAYER = [
    *norm("attention_norm", "layer_norm1"),
    *attention(
        "attention", *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "out"))
    ),
    *norm("mlp_norm", "layer_norm2"),
    *dense("mlp/up", "mlp.fc1"),
    *dense("mlp/down", "mlp.fc2"),
]


def convolution(leaf: str, tensor: str, dims: int) -> list[Row]:
    """A convolution over so many dims: (out, in, …) in the file, (…, in, out) here."""
    order = (*range(2, dims + 2), 1, 0)
    kernel = (f"{leaf}/kernel", f"{tensor}.weight", (transpose(*order),))
    return [kernel, _bias(leaf, tensor)]
