"""Each family of `checkpoint.mappings`: its leaves, their tensors, and published sizes.

A line of a table is a leaf with the names of its dims, `|`, and the tensor that holds
it with its own. `H*s` is a dim of the tensor that is two of the leaf; `3*s` and `s*2`
are parts of a fused tensor, one after the other or alternating. A line with `[a,b]`
stands for two, each of which has the part of its number. `{n}` is the number of a
layer, `{e}` that of an expert, `L` at the beginning the layers of a decoder. A line
without a leaf is a tensor that no leaf needs. Sizes and names are those of the
published files.
"""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flax_layoutmap.checkpoint import mappings

Shapes = dict[str, tuple[int, ...]]
Sizes = dict[str, int]
STACKS = {"n": "layers", "dense": "dense_layers", "moe": "moe_layers"}


def ranges(sizes: Sizes) -> dict[str, range]:
    """What each placeholder in a name stands for."""
    layers, dense = sizes["L"], sizes.get("D", 0)
    numbers = {"n": range(layers), "dense": range(dense), "moe": range(dense, layers)}
    return {**numbers, "e": range(sizes.get("E", 0))}


def size(dim: str, sizes: Sizes) -> int:
    """The size of a dim: a number, a name, a product `2*f`, or blocks `d/32`."""
    dim, _, block = dim.partition("/")
    factors = (int(x) if x.isdigit() else sizes[x] for x in dim.split("*"))
    return -(-math.prod(factors) // int(block or 1))


def shape(dims: list[str], sizes: Sizes) -> tuple[int, ...]:
    return tuple(size(dim, sizes) for dim in dims)


@dataclasses.dataclass(frozen=True)
class Line:
    leaf: str
    dims: list[str]
    tensor: str
    tensor_dims: list[str]
    part: int

    def leaves(self, sizes: Sizes, scanned: bool) -> dict[str, list[dict[str, int]]]:
        """Path → the layers in it."""
        field = re.search(r"layers/\{(\w+)\}", self.leaf)
        if field is None:
            return {self.leaf: [{}]} if self.leaf else {}
        layers = [{field[1]: number} for number in ranges(sizes)[field[1]]]
        if scanned:
            return {self.leaf.replace(field[0], STACKS[field[1]]): layers}
        return {self.leaf.format(**layer): [layer] for layer in layers}

    def tensors(self, sizes: Sizes) -> list[str]:
        fields = re.findall(r"\{(\w+)\}", self.tensor)
        numbers = itertools.product(*(ranges(sizes)[field] for field in fields))
        filled = (dict(zip(fields, each, strict=True)) for each in numbers)
        return [self.tensor.format(**each) for each in filled]

    def value(
        self, held: Mapping[str, np.ndarray], sizes: Sizes, layer: dict[str, int]
    ) -> np.ndarray:
        """The leaf of a layer, by the names of its dims."""
        dims = [name for dim in self.tensor_dims for name in dim.split("*")]
        if "{e}" in self.tensor:
            names = (self.tensor.format(e=at, **layer) for at in range(sizes["E"]))
            x, dims = np.stack([held[name] for name in names]), ["E", *dims]
        else:
            x = held[self.tensor.format(**layer)]
        x = x.reshape(shape(dims, sizes))
        x = x[tuple(slice(None) if d in self.dims else self.part for d in dims)]
        kept = [dim for dim in dims if dim in self.dims]
        return x.transpose([kept.index(dim) for dim in self.dims])


def lines(text: str) -> list[Line]:
    made = []
    for row in filter(str.strip, text.splitlines()):
        row = re.sub(r"(^|\| )L([/.])", _of_layer, row)
        several = re.search(r"\[([\w,]+)\]", row)
        for part in range(several[1].count(",") + 1 if several else 1):
            filled = re.sub(
                r"\[([\w,]+)\]", lambda m, at=part: m[1].split(",")[at], row
            )
            left, _, right = filled.partition("|")
            (leaf, *dims), (tensor, *held) = left.split() or [""], right.split()
            made.append(Line(leaf, dims, tensor, held, part))
    return made


def _of_layer(match: re.Match[str]) -> str:
    return match[1] + ("layers/{n}/" if match[2] == "/" else "model.layers.{n}.")


@dataclasses.dataclass(frozen=True)
class Family:
    """A family, or a variant of one.

    `published` has the sizes of a model, and `parameters` how many it has, where that
    is known.
    """

    preset: str
    table: str
    published: Sizes
    parameters: int | None = None
    options: dict[str, bool] = dataclasses.field(default_factory=dict)

    @property
    def lines(self) -> list[Line]:
        return lines(self.table)

    def entries(self, sizes: Sizes, scanned: bool) -> list[Any]:
        """The mapping."""
        more = {"dense_layers": sizes["D"]} if self.preset == "deepseek_v3" else {}
        make = getattr(mappings, self.preset)
        return make(scanned=scanned, **self.options, **more)

    def stored(self, sizes: Sizes, *, needed: bool = False) -> Shapes:
        """Name → shape of the tensors, or of those that a leaf needs."""
        return {
            name: shape(line.tensor_dims, sizes)
            for line in self.lines
            if line.leaf or not needed
            for name in line.tensors(sizes)
        }

    def model(self, sizes: Sizes, scanned: bool) -> Shapes:
        """Path → shape of the leaves."""
        return {
            path: (len(layers),) * (scanned and layers != [{}])
            + shape(line.dims, sizes)
            for line in self.lines
            for path, layers in line.leaves(sizes, scanned).items()
        }

    def values(
        self, held: Mapping[str, np.ndarray], sizes: Sizes, scanned: bool
    ) -> dict[str, np.ndarray]:
        """Path → leaf, of tensors of these sizes."""
        return {
            path: np.stack([line.value(held, sizes, layer) for layer in layers])
            if scanned and layers != [{}]
            else line.value(held, sizes, layers[0])
            for line in self.lines
            for path, layers in line.leaves(sizes, scanned).items()
        }


# The sizes of a small model of any family.
TINY = {
    **{"L": 3, "D": 1, "V": 64, "d": 32, "c": 32, "f": 48, "m": 32, "E": 4, "H": 4},
    **{"K": 2, "s": 8, "nr": 12, "nv": 14, "v": 6, "B": 8, "qr": 16, "kr": 20},
    **{"kr_r": 24, "mel": 8, "p": 4, "q": 4, "P": 17, "N": 8, "one": 1},
    **{"dv": 64, "fv": 96, "Hv": 8, "proj": 16},
}


def without(text: str, pattern: str) -> str:
    rows = (row for row in text.splitlines() if not re.search(pattern, row))
    return "\n".join(rows) + "\n"


def at(number: str, *texts: str) -> str:
    """With another number, or placeholder, of the layer."""
    text = re.sub(r"(?m)(^|\| )L([/.])", _of_layer, "".join(texts))
    return text.replace("{n}", number)


def heads(L: int, V: int, d: int, H: int, K: int, s: int, f: int, **more: int) -> Sizes:
    """The sizes of a decoder."""
    return {"L": L, "V": V, "d": d, "H": H, "K": K, "s": s, "f": f, **more}


def encoder(L: int, d: int, H: int, f: int, **more: int) -> Sizes:
    """The sizes of a model whose heads together are as wide as the model."""
    own = {"L": L, "d": d, "c": d, "H": H, "s": d // H, "f": f, "one": 1}
    return {**own, "q": more.get("p", 0), **more}


# ------------------------------------------------------------------------ decoders

TOP = """
embed/embedding V d | model.embed_tokens.weight V d
norm/scale d | model.norm.weight d
lm_head/kernel d V | lm_head.weight V d
"""
NORMS = """
L/[attention,mlp]_norm/scale d | L.[input,post_attention]_layernorm.weight d
"""
ATTENTION = """
L/attention/query/kernel d H s | L.self_attn.q_proj.weight H*s d
L/attention/[key,value]/kernel d K s | L.self_attn.[k,v]_proj.weight K*s d
L/attention/out/kernel H s d | L.self_attn.o_proj.weight d H*s
"""
MLP = """
L/mlp/[gate,up]/kernel d f | L.mlp.[gate,up]_proj.weight f d
L/mlp/down/kernel f d | L.mlp.down_proj.weight d f
"""
OTHERS = TOP + NORMS + ATTENTION
DENSE, TIED = OTHERS + MLP, without(OTHERS + MLP, "lm_head")
BIASES = """
L/attention/query/bias H s | L.self_attn.q_proj.bias H*s
L/attention/[key,value]/bias K s | L.self_attn.[k,v]_proj.bias K*s
"""
HEAD_NORMS = """
L/attention/[query,key]_norm/scale s | L.self_attn.[q,k]_norm.weight s
"""
POST_NORMS = """
L/attention_[norm,post_norm]/scale d | L.[input,post_attention]_layernorm.weight d
L/mlp_[norm,post_norm]/scale d | L.[pre,post]_feedforward_layernorm.weight d
"""
GEMMA3 = without(TIED, "_layernorm") + POST_NORMS + HEAD_NORMS
VISION = """
| vision_tower.vision_model.embeddings.patch_embedding.weight 1152 3 14 14
| multi_modal_projector.mm_input_projection_weight 1152 d
"""
GEMMA3_VISION = at("{n}", GEMMA3).replace("| ", "| language_model.") + VISION
GPT2 = """
embed/embedding V d | wte.weight V d
positions/embedding P d | wpe.weight P d
norm/[scale,bias] d | ln_f.[weight,bias] d
L/attention_norm/[scale,bias] d | h.{n}.ln_1.[weight,bias] d
L/attention/[query,key,value]/kernel d H s | h.{n}.attn.c_attn.weight d 3*H*s
L/attention/[query,key,value]/bias H s | h.{n}.attn.c_attn.bias 3*H*s
L/attention/out/kernel H s d | h.{n}.attn.c_proj.weight H*s d
L/attention/out/bias d | h.{n}.attn.c_proj.bias d
L/mlp_norm/[scale,bias] d | h.{n}.ln_2.[weight,bias] d
L/mlp/up/kernel d f | h.{n}.mlp.c_fc.weight d f
L/mlp/up/bias f | h.{n}.mlp.c_fc.bias f
L/mlp/down/kernel f d | h.{n}.mlp.c_proj.weight f d
L/mlp/down/bias d | h.{n}.mlp.c_proj.bias d
| h.{n}.attn.bias 1 1 P P
| h.{n}.attn.masked_bias 1
"""

# ------------------------------------------------------------------------- experts

EXPERTS = """
L/mlp/router/kernel d E | L.mlp.gate.weight E d
L/mlp/experts/[gate,up]/kernel E d m | L.mlp.experts.{e}.[gate,up]_proj.weight m d
L/mlp/experts/down/kernel E m d | L.mlp.experts.{e}.down_proj.weight d m
"""
MIXTRAL = """
L/mlp/router/kernel d E | L.block_sparse_moe.gate.weight E d
L/mlp/experts/[gate,up]/kernel E d m | L.block_sparse_moe.experts.{e}.[w1,w3].weight m d
L/mlp/experts/down/kernel E m d | L.block_sparse_moe.experts.{e}.w2.weight d m
"""
GPT_OSS = """
L/attention/out/bias d | L.self_attn.o_proj.bias d
L/attention/sinks H | L.self_attn.sinks H
L/mlp/router/kernel d E | L.mlp.router.weight E d
L/mlp/router/bias E | L.mlp.router.bias E
L/mlp/experts/[gate,up]/bias E m | L.mlp.experts.gate_up_proj_bias E m*2
L/mlp/experts/down/bias E d | L.mlp.experts.down_proj_bias E d
"""
GPT_OSS_PLAIN = """
L/mlp/experts/[gate,up]/kernel E d m | L.mlp.experts.gate_up_proj E d m*2
L/mlp/experts/down/kernel E m d | L.mlp.experts.down_proj E m d
"""
GPT_OSS_MXFP4 = """
L/mlp/experts/[gate,up]/kernel E d m | L.mlp.experts.gate_up_proj_blocks E m*2 d/32 16
| L.mlp.experts.gate_up_proj_scales E m*2 d/32
L/mlp/experts/down/kernel E m d | L.mlp.experts.down_proj_blocks E d m/32 16
| L.mlp.experts.down_proj_scales E d m/32
"""
GPT_OSS_SIZES = heads(24, 201088, 2880, 64, 8, 64, 2880, m=2880, E=32)

# ----------------------------------------------------------------------- DeepSeek V3

LATENT = """
L/attention/q_a/kernel d qr | L.self_attn.q_a_proj.weight qr d
L/attention/q_a_norm/scale qr | L.self_attn.q_a_layernorm.weight qr
L/attention/q_b/kernel qr H nr | L.self_attn.q_b_proj.weight H*nr qr
L/attention/kv_a/kernel d kr_r | L.self_attn.kv_a_proj_with_mqa.weight kr_r d
L/attention/kv_a_norm/scale kr | L.self_attn.kv_a_layernorm.weight kr
L/attention/kv_b/kernel kr H nv | L.self_attn.kv_b_proj.weight H*nv kr
L/attention/out/kernel H v d | L.self_attn.o_proj.weight d H*v
"""
SHARED = """
L/mlp/router/bias E | L.mlp.gate.e_score_correction_bias E
L/mlp/shared_experts/[gate,up]/kernel d m | L.mlp.shared_experts.[gate,up]_proj.weight m d
L/mlp/shared_experts/down/kernel m d | L.mlp.shared_experts.down_proj.weight d m
"""  # noqa: E501
SPARSE = NORMS + LATENT + SHARED + EXPERTS
DEEPSEEK = TOP + at("{dense}", NORMS, LATENT, MLP) + at("{moe}", SPARSE)
NEXT_TOKEN = re.sub(r"(?m)^[^|\n]+", "", at("61", SPARSE))
NEXT_TOKEN += """
| model.layers.61.[enorm,hnorm].weight d
| model.layers.61.eh_proj.weight d 2*d
| model.layers.61.embed_tokens.weight V d
| model.layers.61.shared_head.norm.weight d
| model.layers.61.shared_head.head.weight V d
"""
DEEPSEEK_SIZES = {
    **{"L": 61, "D": 3, "V": 129280, "d": 7168, "H": 128, "f": 18432, "nr": 192},
    **{"nv": 256, "v": 128, "qr": 1536, "kr": 512, "kr_r": 576, "m": 2048, "E": 256},
}
# A matrix of a layer, which may be in float8.
MATRIX = r"(?<!eh)_proj(_with_mqa)?\.weight"


def with_scales(text: str) -> str:
    """With the scales of the matrices that are in float8."""
    found = re.findall(rf"\| (\S+{MATRIX}) (\S+) (\S+)", text)
    scales = [f"| {name}_scale_inv {a}/128 {b}/128" for name, _, a, b in found]
    return text + "\n".join(scales)


# ----------------------------------------------------------- encoders and decoders

T5 = """
embed/embedding V d | shared.weight V d
lm_head/kernel d V | lm_head.weight V d
"""
T5_SIDE = """
{side}/norm/scale d | {side}.final_layer_norm.weight d
{side}/relative_attention_bias/embedding B H | {side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight B H
{side}/layers/{n}/attention_norm/scale d | {block}.layer.0.layer_norm.weight d
{side}/layers/{n}/attention/[query,key,value]/kernel d H s | {block}.layer.0.SelfAttention.[q,k,v].weight H*s d
{side}/layers/{n}/attention/out/kernel H s d | {block}.layer.0.SelfAttention.o.weight d H*s
{side}/layers/{n}/mlp_norm/scale d | {block}.layer.{last}.layer_norm.weight d
{side}/layers/{n}/mlp/[gate,up]/kernel d f | {block}.layer.{last}.DenseReluDense.[wi_0,wi_1].weight f d
{side}/layers/{n}/mlp/down/kernel f d | {block}.layer.{last}.DenseReluDense.wo.weight d f
"""  # noqa: E501
T5_CROSS = """
{side}/layers/{n}/cross_attention_norm/scale d | {block}.layer.1.layer_norm.weight d
{side}/layers/{n}/cross_attention/[query,key,value]/kernel d H s | {block}.layer.1.EncDecAttention.[q,k,v].weight H*s d
{side}/layers/{n}/cross_attention/out/kernel H s d | {block}.layer.1.EncDecAttention.o.weight d H*s
"""  # noqa: E501
# A layer with biases, without a gate.
BIASED = """
{leaf}/attention_norm/[scale,bias] d | {block}.{norm}.[weight,bias] d
{leaf}/attention/[query,key,value]/kernel d H s | {block}.{qkv}.weight H*s d
{leaf}/attention/[query,key,value]/bias H s | {block}.{qkv}.bias H*s
{leaf}/attention/out/kernel H s d | {block}.{out}.weight d H*s
{leaf}/attention/out/bias d | {block}.{out}.bias d
{leaf}/mlp_norm/[scale,bias] d | {block}.{mlp_norm}.[weight,bias] d
{leaf}/mlp/up/kernel d f | {block}.{up}.weight f d
{leaf}/mlp/up/bias f | {block}.{up}.bias f
{leaf}/mlp/down/kernel f d | {block}.{down}.weight d f
{leaf}/mlp/down/bias d | {block}.{down}.bias d
"""
WHISPER = """
encoder/conv1/kernel 3 mel d | model.encoder.conv1.weight d mel 3
encoder/conv2/kernel 3 d c | model.encoder.conv2.weight c d 3
encoder/[conv1,conv2]/bias d | model.encoder.[conv1,conv2].bias d
encoder/positions/embedding 1500 d | model.encoder.embed_positions.weight 1500 d
decoder/embed/embedding V d | model.decoder.embed_tokens.weight V d
decoder/positions/embedding 448 d | model.decoder.embed_positions.weight 448 d
encoder/norm/[scale,bias] d | model.encoder.layer_norm.[weight,bias] d
decoder/norm/[scale,bias] d | model.decoder.layer_norm.[weight,bias] d
"""
VIT = """
cls_token 1 one d | vit.embeddings.cls_token 1 one d
position_embeddings 1 P d | vit.embeddings.position_embeddings 1 P d
patch_embedding/kernel p q 3 d | vit.embeddings.patch_embeddings.projection.weight d 3 p q
patch_embedding/bias d | vit.embeddings.patch_embeddings.projection.bias d
norm/[scale,bias] d | vit.layernorm.[weight,bias] d
classifier/kernel d N | classifier.weight N d
classifier/bias N | classifier.bias N
"""  # noqa: E501
CLIP = """
logit_scale | logit_scale
text/embed/embedding V d | text_model.embeddings.token_embedding.weight V d
text/positions/embedding 77 d | text_model.embeddings.position_embedding.weight 77 d
text/norm/[scale,bias] d | text_model.final_layer_norm.[weight,bias] d
text_projection/kernel d proj | text_projection.weight proj d
vision/class_embedding dv | vision_model.embeddings.class_embedding dv
vision/patch_embedding/kernel p q 3 dv | vision_model.embeddings.patch_embedding.weight dv 3 p q
vision/positions/embedding P dv | vision_model.embeddings.position_embedding.weight P dv
vision/norm/[scale,bias] dv | vision_model.post_layernorm.[weight,bias] dv
vision/pre_norm/[scale,bias] dv | vision_model.pre_layrnorm.[weight,bias] dv
visual_projection/kernel dv proj | visual_projection.weight proj dv
| text_model.embeddings.position_ids 1 77
| vision_model.embeddings.position_ids 1 P
"""  # noqa: E501


def fill(text: str, **words: str) -> str:
    for word, by in words.items():
        text = text.replace(f"{{{word}}}", by)
    return text


for side, last in (("encoder", "1"), ("decoder", "2")):
    T5 += fill(T5_SIDE, side=side, block=f"{side}.block.{{n}}", last=last)
    where = {"leaf": f"{side}/layers/{{n}}", "block": f"model.{side}.layers.{{n}}"}
    whisper = fill(BIASED, **where, up="fc1", down="fc2", mlp_norm="final_layer_norm")
    # Keys have no bias.
    whisper = whisper.replace("[query,key,value]/bias", "[query,value]/bias")
    whisper = whisper.replace("{qkv}.bias", "{attn}.[q,v]_proj.bias")
    names = {"qkv": "{attn}.[q,k,v]_proj", "out": "{attn}.out_proj"}
    whisper = fill(whisper, **names, norm="{attn}_layer_norm")
    WHISPER += fill(whisper, attn="self_attn")
cross = without(whisper, "/mlp").replace("/attention", "/cross_attention")
WHISPER += fill(cross, attn="encoder_attn")
T5 += fill(T5_CROSS, side="decoder", block="decoder.block.{n}")
T5_1_0 = without(T5, "lm_head").replace("[gate,up]", "up").replace("[wi_0,wi_1]", "wi")
VIT += fill(
    BIASED,
    **{"leaf": "L", "block": "vit.encoder.layer.{n}", "norm": "layernorm_before"},
    **{"qkv": "attention.attention.[query,key,value]", "mlp_norm": "layernorm_after"},
    **{"out": "attention.output.dense"},
    **{"up": "intermediate.dense", "down": "output.dense"},
)
for side in ("text", "vision"):
    layer = fill(
        BIASED,
        leaf=f"{side}/layers/{{n}}",
        block=f"{side}_model.encoder.layers.{{n}}",
        **{"qkv": "self_attn.[q,k,v]_proj", "out": "self_attn.out_proj"},
        **{"norm": "layer_norm1", "mlp_norm": "layer_norm2"},
        **{"up": "mlp.fc1", "down": "mlp.fc2"},
    )
    CLIP += layer if side == "text" else re.sub(r"\b([dfH])\b", r"\1v", layer)


POST = {"post_norms": True}
FAMILIES = {
    "llama": Family(
        *("llama", DENSE, heads(32, 128256, 4096, 32, 8, 128, 14336), 8_030_261_248),
    ),
    "qwen2": Family(  # 2.5 7B
        *("qwen2", DENSE + BIASES, heads(28, 152064, 3584, 28, 4, 128, 18944)),
        7_615_616_512,
    ),
    "qwen3": Family(  # 8B
        *("qwen3", DENSE + HEAD_NORMS, heads(36, 151936, 4096, 32, 8, 128, 12288)),
        8_190_735_360,
    ),
    "gemma": Family(  # 2B
        *("gemma", TIED, heads(18, 256000, 2048, 8, 1, 256, 16384), 2_506_172_416),
    ),
    "gemma 3": Family(  # 1B
        *("gemma", GEMMA3, heads(26, 262144, 1152, 4, 1, 256, 6912)),
        *(999_885_952, POST),
    ),
    "gemma 3, with vision": Family(  # 4B
        *("gemma", GEMMA3_VISION, heads(34, 262208, 2560, 8, 4, 256, 10240)),
        *(None, POST),
    ),
    "gpt2": Family(
        "gpt2", GPT2, encoder(12, 768, 12, 3072, V=50257, P=1024), 124_439_808
    ),
    "mixtral": Family(  # 8x7B
        *("mixtral", OTHERS + MIXTRAL),
        heads(32, 32000, 4096, 32, 8, 128, 14336, m=14336, E=8),
        46_702_792_704,
    ),
    "qwen3_moe": Family(  # 30B-A3B
        *("qwen3_moe", OTHERS + HEAD_NORMS + EXPERTS),
        heads(48, 151936, 2048, 32, 4, 128, 6144, m=768, E=128),
        30_532_122_624,
    ),
    "deepseek_v3": Family(  # in bfloat16, the first layers
        "deepseek_v3", DEEPSEEK, DEEPSEEK_SIZES | {"L": 5}
    ),
    "deepseek_v3, float8": Family(  # as published
        *("deepseek_v3", with_scales(DEEPSEEK + NEXT_TOKEN)),
        *(DEEPSEEK_SIZES, 671_026_419_200),
    ),
    "gpt_oss": Family(  # 20B, in bfloat16
        *("gpt_oss", OTHERS + BIASES + GPT_OSS + GPT_OSS_PLAIN, GPT_OSS_SIZES),
        *(20_914_757_184, {"mxfp4": False}),
    ),
    "gpt_oss, MXFP4": Family(  # as published
        *("gpt_oss", OTHERS + BIASES + GPT_OSS + GPT_OSS_MXFP4, GPT_OSS_SIZES),
        20_914_757_184,
    ),
    "t5": Family(  # 1.1 base
        "t5", T5, encoder(12, 768, 12, 2048, V=32128, B=32), 247_577_856
    ),
    "t5, 1.0": Family(  # small
        *("t5", T5_1_0, encoder(6, 512, 8, 2048, V=32128, B=32), 60_506_624),
        {"gated": False, "tied": True},
    ),
    "whisper": Family(  # large-v3
        *("whisper", WHISPER, encoder(32, 1280, 20, 5120, V=51866, mel=128)),
        1_543_490_560,
    ),
    "vit": Family(  # B/16, for ImageNet
        *("vit", VIT),
        *(encoder(12, 768, 12, 3072, p=16, P=197, N=1000), 86_567_656),
    ),
    "clip": Family(  # B/32
        *("clip", CLIP),
        encoder(12, 512, 8, 2048, V=49408, p=32, P=50)
        | {"dv": 768, "fv": 3072, "Hv": 12, "proj": 512},
        151_277_313,
    ),
}


# -------------------------------------------------------------------------- files

BYTES = {"I64": 8, "F32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1}


def stored_dtype(name: str, float8: bool) -> str:
    """The dtype of a tensor in the file, as safetensors names it."""
    if name.endswith("position_ids"):
        return "I64"
    if name.endswith(("_blocks", "_scales")):
        return "U8"
    if name.endswith(("_scale_inv", "e_score_correction_bias")):
        return "F32"
    return "F8_E4M3" if float8 and re.search(f"{MATRIX}$", name) else "BF16"


def write_headers(folder: Path, tensors: Shapes, files: int = 3) -> None:
    """A checkpoint of headers: the files have holes in the place of numbers."""
    float8 = any(name.endswith("_scale_inv") for name in tensors)
    each = -(-len(tensors) // files)
    weight_map = {}
    for number in range(files):
        header, end = dict[str, Any](), 0
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        for name in list(tensors)[number * each :][:each]:
            dtype = stored_dtype(name, float8)
            begin, end = end, end + math.prod(tensors[name]) * BYTES[dtype]
            held = {"dtype": dtype, "shape": tensors[name]}
            header[name] = {**held, "data_offsets": [begin, end]}
            weight_map[name] = file
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + end)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
