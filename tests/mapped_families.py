"""Each family of `checkpoint.mappings`: its tensors, its leaves, and published sizes.

Lines of a table are a name and the names of its dims. `{n}` is the number of a layer,
`L` at the beginning the layers of a decoder, and a line with `[several,names]` stands
for as many. Sizes and names are those of the published configurations and files.
"""

import dataclasses
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

from flax_layoutmap.checkpoint import mappings

Shapes = dict[str, tuple[int, ...]]
Sizes = dict[str, int]
Table = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Family:
    """A family, or a variant of one.

    `published` has the sizes of a model, and `parameters` how many it has, where that
    is known. `left_out` is a pattern of the tensors that no leaf needs.
    """

    preset: str
    tensors: Table
    leaves: Table
    published: Sizes
    parameters: int | None = None
    options: dict[str, bool] = dataclasses.field(default_factory=dict)
    left_out: str = "(?!)"

    def entries(self, sizes: Sizes, scanned: bool) -> list[Any]:
        """The mapping."""
        own = {"dense_layers": sizes["D"]} if self.preset == "deepseek_v3" else {}
        make = getattr(mappings, self.preset)
        return make(scanned=scanned, **self.options, **own)

    def stored(self, sizes: Sizes) -> Shapes:
        """Name → shape of the tensors."""
        return written(self.tensors, sizes)

    def model(self, sizes: Sizes, scanned: bool) -> Shapes:
        """Path → shape of the leaves."""
        return written(stacked(self.leaves) if scanned else self.leaves, sizes)


def ranges(sizes: Sizes) -> dict[str, range]:
    """What each placeholder in a name stands for."""
    layers, dense = sizes["L"], sizes.get("D", 0)
    return {
        "n": range(layers),
        "dec": range(sizes.get("Ldec", layers)),
        "dense": range(dense),
        "moe": range(dense, layers),
        "e": range(sizes.get("E", 0)),
    }


def written(table: Table, sizes: Sizes) -> Shapes:
    """Name → shape, with all placeholders filled in."""
    found: Shapes = {}
    for name, dims in table.items():
        shape = tuple(size(dim, sizes) for dim in dims.split())
        fields = re.findall(r"\{(\w+)\}", name)
        for numbers in itertools.product(*(ranges(sizes)[field] for field in fields)):
            found[name.format(**dict(zip(fields, numbers, strict=True)))] = shape
    return found


def size(dim: str, sizes: Sizes) -> int:
    """The size of a dim: a number, a name, a product `2*f`, or blocks `d/32`."""
    if "/" in dim:
        name, block = dim.split("/")
        return -(-size(name, sizes) // int(block))
    factors = dim.split("*")
    return math.prod(int(x) if x.isdigit() else sizes[x] for x in factors)


def stacked(table: Table) -> Table:
    """The leaves with their layers stacked along dim 0."""
    kinds = {
        "n": ("layers", "L"),
        "dec": ("layers", "Ldec"),
        "dense": ("dense_layers", "D"),
        "moe": ("moe_layers", "Lmoe"),
    }
    found: Table = {}
    for path, dims in table.items():
        kind = re.search(r"layers/\{(\w+)\}", path)
        if kind is not None:
            stack, count = kinds[kind[1]]
            path, dims = path.replace(kind[0], stack), f"{count} {dims}"
        found[path] = dims
    return found


def table(*texts: str) -> Table:
    """Name → its dims."""
    made: Table = {}
    for line in filter(str.strip, "\n".join(texts).splitlines()):
        line = re.sub(r"^L(?=\.)", "model.layers.{n}", line)
        line = re.sub(r"^L(?=/)", "layers/{n}", line)
        choices = [part.split(",") for part in re.findall(r"\[([\w,]+)\]", line)]
        for chosen in zip(*choices, strict=True) if choices else [()]:
            words = iter(chosen)
            filled = re.sub(r"\[[\w,]+\]", lambda _, it=words: next(it), line)
            name, _, dims = filled.partition(" ")
            made[name] = dims
    return made


def without(held: Table, pattern: str) -> Table:
    return {name: dims for name, dims in held.items() if not re.search(pattern, name)}


def replaced(held: Table, **words: str) -> Table:
    """The same with other names of dims."""
    return {
        name: " ".join(words.get(dim, dim) for dim in dims.split())
        for name, dims in held.items()
    }


def below(prefix: str, held: Table) -> Table:
    return {f"{prefix}{name}": dims for name, dims in held.items()}


# The sizes of a small model of any family.
TINY = {
    **{
        "L": 3,
        "Ldec": 3,
        "D": 1,
        "Lmoe": 2,
        "V": 64,
        "d": 32,
        "f": 48,
        "m": 32,
        "E": 4,
    },
    **{"H": 4, "K": 2, "s": 8, "Hs": 32, "Ks": 16, "nr": 12, "nv": 14, "v": 6, "B": 8},
    **{"qr": 16, "kr": 20, "kr_r": 24, "mel": 8, "p": 4, "P": 17, "N": 8},
    **{"dv": 64, "fv": 96, "Hv": 8, "proj": 16},
}


def heads(L: int, V: int, d: int, H: int, K: int, s: int, f: int, **more: int) -> Sizes:
    """The sizes of a decoder, with the heads side by side."""
    own = {"L": L, "V": V, "d": d, "H": H, "K": K, "s": s, "f": f}
    return {**own, "Hs": H * s, "Ks": K * s, **more}


# ------------------------------------------------------------------------ decoders

TOP = table("""
model.embed_tokens.weight V d
model.norm.weight d
lm_head.weight V d
""")
TOP_LEAVES = table("""
embed/embedding V d
norm/scale d
lm_head/kernel d V
""")
ATTENTION = table("""
L.self_attn.q_proj.weight Hs d
L.self_attn.[k,v]_proj.weight Ks d
L.self_attn.o_proj.weight d Hs
L.[input,post_attention]_layernorm.weight d
""")
ATTENTION_LEAVES = table("""
L/attention/query/kernel d H s
L/attention/[key,value]/kernel d K s
L/attention/out/kernel H s d
L/[attention,mlp]_norm/scale d
""")
MLP = table("""
L.mlp.[gate,up]_proj.weight f d
L.mlp.down_proj.weight d f
""")
MLP_LEAVES = table("""
L/mlp/[gate,up]/kernel d f
L/mlp/down/kernel f d
""")
HUGGING_FACE, FLAX = TOP | ATTENTION | MLP, TOP_LEAVES | ATTENTION_LEAVES | MLP_LEAVES
TIED, TIED_FLAX = without(HUGGING_FACE, "lm_head"), without(FLAX, "lm_head")
BIASES = table("""
L.self_attn.q_proj.bias Hs
L.self_attn.[k,v]_proj.bias Ks
""")
BIAS_LEAVES = table("""
L/attention/query/bias H s
L/attention/[key,value]/bias K s
""")
HEAD_NORMS = table("L.self_attn.[q,k]_norm.weight s")
HEAD_NORM_LEAVES = table("L/attention/[query,key]_norm/scale s")
POST_NORMS = table("L.[pre,post]_feedforward_layernorm.weight d")
POST_NORM_LEAVES = table("L/[attention,mlp]_post_norm/scale d")
VISION = table("""
vision_tower.vision_model.embeddings.patch_embedding.weight 1152 3 14 14
multi_modal_projector.mm_input_projection_weight 1152 d
""")
GEMMA3 = TIED | POST_NORMS | HEAD_NORMS
GEMMA3_LEAVES = TIED_FLAX | POST_NORM_LEAVES | HEAD_NORM_LEAVES
GPT2 = table("""
wte.weight V d
wpe.weight P d
h.{n}.attn.c_attn.weight d 3*d
h.{n}.attn.c_attn.bias 3*d
h.{n}.attn.c_proj.weight d d
h.{n}.attn.c_proj.bias d
h.{n}.mlp.c_fc.weight d f
h.{n}.mlp.c_fc.bias f
h.{n}.mlp.c_proj.weight f d
h.{n}.mlp.c_proj.bias d
h.{n}.ln_1.[weight,bias] d
h.{n}.ln_2.[weight,bias] d
ln_f.[weight,bias] d
h.{n}.attn.bias 1 1 P P
h.{n}.attn.masked_bias 1
""")
# A layer of models whose norms have a bias, and whose mlp has no gate.
BIASED_ATTENTION = """
L/attention/[query,key,value]/kernel d H s
L/attention/[query,key,value]/bias H s
L/attention/out/kernel H s d
L/attention/out/bias d
L/attention_norm/[scale,bias] d
"""
BIASED_MLP = """
L/mlp_norm/[scale,bias] d
L/mlp/up/kernel d f
L/mlp/up/bias f
L/mlp/down/kernel f d
L/mlp/down/bias d
"""
BIASED = table(BIASED_ATTENTION, BIASED_MLP)
NORM_LEAVES = table("norm/[scale,bias] d")
GPT2_LEAVES = BIASED | NORM_LEAVES
GPT2_LEAVES |= table("embed/embedding V d", "positions/embedding P d")

# ------------------------------------------------------------------------- experts

OTHERS, OTHER_LEAVES = TOP | ATTENTION, TOP_LEAVES | ATTENTION_LEAVES
EXPERT_LEAVES = table("""
L/mlp/router/kernel d E
L/mlp/experts/[gate,up]/kernel E d m
L/mlp/experts/down/kernel E m d
""")
ROUTER = table("L.mlp.gate.weight E d")
QWEN_EXPERTS = table("""
L.mlp.experts.{e}.[gate,up]_proj.weight m d
L.mlp.experts.{e}.down_proj.weight d m
""")
MIXTRAL = table("""
L.block_sparse_moe.gate.weight E d
L.block_sparse_moe.experts.{e}.[w1,w3].weight m d
L.block_sparse_moe.experts.{e}.w2.weight d m
""")
GPT_OSS = OTHERS | BIASES
GPT_OSS |= table("""
L.self_attn.o_proj.bias d
L.self_attn.sinks H
L.mlp.router.weight E d
L.mlp.router.bias E
L.mlp.experts.gate_up_proj_bias E 2*m
L.mlp.experts.down_proj_bias E d
""")
GPT_OSS_WEIGHTS = table("""
L.mlp.experts.gate_up_proj E d 2*m
L.mlp.experts.down_proj E m d
""")
MXFP4 = table("""
L.mlp.experts.gate_up_proj_blocks E 2*m d/32 16
L.mlp.experts.gate_up_proj_scales E 2*m d/32
L.mlp.experts.down_proj_blocks E d m/32 16
L.mlp.experts.down_proj_scales E d m/32
""")
GPT_OSS_LEAVES = OTHER_LEAVES | BIAS_LEAVES | EXPERT_LEAVES
GPT_OSS_LEAVES |= table("""
L/attention/out/bias d
L/attention/sinks H
L/mlp/router/bias E
L/mlp/experts/[gate,up]/bias E m
L/mlp/experts/down/bias E d
""")
MIXTRAL_SIZES = heads(32, 32000, 4096, 32, 8, 128, 14336, m=14336, E=8)
QWEN_MOE_SIZES = heads(48, 151936, 2048, 32, 4, 128, 6144, m=768, E=128)
GPT_OSS_SIZES = heads(24, 201088, 2880, 64, 8, 64, 2880, m=2880, E=32)

# ----------------------------------------------------------------------- DeepSeek V3

LATENT = table("""
L.self_attn.q_a_proj.weight qr d
L.self_attn.q_a_layernorm.weight qr
L.self_attn.q_b_proj.weight H*nr qr
L.self_attn.kv_a_proj_with_mqa.weight kr_r d
L.self_attn.kv_a_layernorm.weight kr
L.self_attn.kv_b_proj.weight H*nv kr
L.self_attn.o_proj.weight d H*v
L.[input,post_attention]_layernorm.weight d
""")
SHARED = table("""
L.mlp.gate.weight E d
L.mlp.gate.e_score_correction_bias E
L.mlp.shared_experts.[gate,up]_proj.weight m d
L.mlp.shared_experts.down_proj.weight d m
""")
LATENT_LEAVES = table("""
L/[attention,mlp]_norm/scale d
L/attention/q_a/kernel d qr
L/attention/q_a_norm/scale qr
L/attention/q_b/kernel qr H nr
L/attention/kv_a/kernel d kr_r
L/attention/kv_a_norm/scale kr
L/attention/kv_b/kernel kr H nv
L/attention/out/kernel H v d
""")
SHARED_LEAVES = table("""
L/mlp/router/bias E
L/mlp/shared_experts/[gate,up]/kernel d m
L/mlp/shared_experts/down/kernel m d
""")


def at(number: str, *tables: Table) -> Table:
    """With another number, or placeholder, of the layer."""
    held = {name: dims for one in tables for name, dims in one.items()}
    return {name.replace("{n}", number): dims for name, dims in held.items()}


DEEPSEEK = TOP | at("{dense}", LATENT, MLP) | at("{moe}", LATENT, SHARED, QWEN_EXPERTS)
NEXT_TOKEN = at("61", LATENT, SHARED, QWEN_EXPERTS)
NEXT_TOKEN |= table("""
model.layers.61.[enorm,hnorm].weight d
model.layers.61.eh_proj.weight d 2*d
model.layers.61.embed_tokens.weight V d
model.layers.61.shared_head.norm.weight d
model.layers.61.shared_head.head.weight V d
""")
DEEPSEEK_LEAVES = TOP_LEAVES | at("{dense}", LATENT_LEAVES, MLP_LEAVES)
DEEPSEEK_LEAVES |= at("{moe}", LATENT_LEAVES, EXPERT_LEAVES, SHARED_LEAVES)
DEEPSEEK_SIZES = {
    **{"L": 61, "D": 3, "Lmoe": 58, "V": 129280, "d": 7168, "H": 128, "f": 18432},
    **{"nr": 192, "nv": 256, "v": 128, "qr": 1536, "kr": 512, "kr_r": 576},
    **{"m": 2048, "E": 256},
}


def with_scales(held: Table) -> Table:
    """With the scales of the matrices that are in float8."""
    made = dict(held)
    for name, dims in held.items():
        if re.search(r"_proj(_with_mqa)?\.weight$", name) and "eh_proj" not in name:
            made[f"{name}_scale_inv"] = " ".join(f"{dim}/128" for dim in dims.split())
    return made


# ----------------------------------------------------------- encoders and decoders

T5_TOP = table("""
shared.weight V d
[encoder,decoder].final_layer_norm.weight d
[encoder,decoder].block.0.layer.0.SelfAttention.relative_attention_bias.weight B H
""")
T5_ENCODER = table("""
layer.0.SelfAttention.[q,k,v].weight Hs d
layer.0.SelfAttention.o.weight d Hs
layer.[0,1].layer_norm.weight d
layer.1.DenseReluDense.[wi_0,wi_1].weight f d
layer.1.DenseReluDense.wo.weight d f
""")
T5_DECODER = table("""
layer.0.SelfAttention.[q,k,v].weight Hs d
layer.0.SelfAttention.o.weight d Hs
layer.1.EncDecAttention.[q,k,v].weight Hs d
layer.1.EncDecAttention.o.weight d Hs
layer.[0,1,2].layer_norm.weight d
layer.2.DenseReluDense.[wi_0,wi_1].weight f d
layer.2.DenseReluDense.wo.weight d f
""")
T5 = below("encoder.block.{n}.", T5_ENCODER) | below("decoder.block.{dec}.", T5_DECODER)
T5 |= T5_TOP | table("lm_head.weight V d")
T5_1_0 = {x.replace("wi_0", "wi"): T5[x] for x in without(T5, "lm_head|wi_1")}
T5_LAYER = MLP_LEAVES | table("""
L/attention/[query,key,value]/kernel d H s
L/attention/out/kernel H s d
L/[attention,mlp]_norm/scale d
""")
T5_CROSS = table("""
L/cross_attention/[query,key,value]/kernel d H s
L/cross_attention/out/kernel H s d
L/cross_attention_norm/scale d
""")
T5_LEAVES = below("encoder/", T5_LAYER)
T5_LEAVES |= below("decoder/", at("{dec}", T5_LAYER, T5_CROSS))
T5_LEAVES |= table("""
embed/embedding V d
lm_head/kernel d V
[encoder,decoder]/relative_attention_bias/embedding B H
[encoder,decoder]/norm/scale d
""")
WHISPER_LAYER = table("""
self_attn.[q,k,v,out]_proj.weight d d
self_attn.[q,v,out]_proj.bias d
self_attn_layer_norm.[weight,bias] d
fc1.weight f d
fc1.bias f
fc2.weight d f
fc2.bias d
final_layer_norm.[weight,bias] d
""")
WHISPER_CROSS = table("""
encoder_attn.[q,k,v,out]_proj.weight d d
encoder_attn.[q,v,out]_proj.bias d
encoder_attn_layer_norm.[weight,bias] d
""")
WHISPER = table("""
model.encoder.conv1.weight d mel 3
model.encoder.conv2.weight d d 3
model.encoder.[conv1,conv2].bias d
model.encoder.embed_positions.weight 1500 d
model.encoder.layer_norm.[weight,bias] d
model.decoder.embed_tokens.weight V d
model.decoder.embed_positions.weight 448 d
model.decoder.layer_norm.[weight,bias] d
""")
WHISPER |= below("model.encoder.layers.{n}.", WHISPER_LAYER)
WHISPER |= below("model.decoder.layers.{dec}.", WHISPER_LAYER | WHISPER_CROSS)
# Keys have no bias.
WHISPER_SIDE = without(BIASED, "key/bias")
CROSS_LEAVES = without(
    table(BIASED_ATTENTION.replace("attention", "cross_attention")), "key/bias"
)
WHISPER_LEAVES = table("""
encoder/conv1/kernel 3 mel d
encoder/conv2/kernel 3 d d
encoder/[conv1,conv2]/bias d
encoder/positions/embedding 1500 d
decoder/embed/embedding V d
decoder/positions/embedding 448 d
[encoder,decoder]/norm/scale d
[encoder,decoder]/norm/bias d
""")
WHISPER_LEAVES |= below("encoder/", WHISPER_SIDE)
WHISPER_LEAVES |= below("decoder/", at("{dec}", WHISPER_SIDE, CROSS_LEAVES))
VIT = table("""
vit.embeddings.cls_token 1 1 d
vit.embeddings.position_embeddings 1 P d
vit.embeddings.patch_embeddings.projection.weight d 3 p p
vit.embeddings.patch_embeddings.projection.bias d
vit.encoder.layer.{n}.attention.attention.[query,key,value].weight d d
vit.encoder.layer.{n}.attention.attention.[query,key,value].bias d
vit.encoder.layer.{n}.attention.output.dense.weight d d
vit.encoder.layer.{n}.attention.output.dense.bias d
vit.encoder.layer.{n}.intermediate.dense.weight f d
vit.encoder.layer.{n}.intermediate.dense.bias f
vit.encoder.layer.{n}.output.dense.weight d f
vit.encoder.layer.{n}.output.dense.bias d
vit.encoder.layer.{n}.layernorm_[before,after].weight d
vit.encoder.layer.{n}.layernorm_[before,after].bias d
vit.layernorm.[weight,bias] d
classifier.weight N d
classifier.bias N
""")
VIT_LEAVES = BIASED | NORM_LEAVES
VIT_LEAVES |= table("""
cls_token 1 1 d
position_embeddings 1 P d
patch_embedding/kernel p p 3 d
patch_embedding/bias d
classifier/kernel d N
classifier/bias N
""")
OF_VISION = {"d": "dv", "f": "fv", "H": "Hv"}
CLIP_LAYER = table("""
self_attn.[q,k,v,out]_proj.weight d d
self_attn.[q,k,v,out]_proj.bias d
mlp.fc1.weight f d
mlp.fc1.bias f
mlp.fc2.weight d f
mlp.fc2.bias d
layer_norm1.[weight,bias] d
layer_norm2.[weight,bias] d
""")
CLIP = table("""
logit_scale
text_model.embeddings.token_embedding.weight V d
text_model.embeddings.position_embedding.weight 77 d
text_model.embeddings.position_ids 1 77
text_model.final_layer_norm.[weight,bias] d
vision_model.embeddings.class_embedding dv
vision_model.embeddings.patch_embedding.weight dv 3 p p
vision_model.embeddings.position_embedding.weight P dv
vision_model.embeddings.position_ids 1 P
vision_model.pre_layrnorm.[weight,bias] dv
vision_model.post_layernorm.[weight,bias] dv
text_projection.weight proj d
visual_projection.weight proj dv
""")
CLIP |= below("text_model.encoder.layers.{n}.", CLIP_LAYER)
CLIP |= below("vision_model.encoder.layers.{n}.", replaced(CLIP_LAYER, **OF_VISION))
CLIP_LEAVES = table("""
logit_scale
text/embed/embedding V d
text/positions/embedding 77 d
text/norm/[scale,bias] d
vision/class_embedding dv
vision/patch_embedding/kernel p p 3 dv
vision/positions/embedding P dv
vision/norm/[scale,bias] dv
vision/pre_norm/[scale,bias] dv
text_projection/kernel d proj
visual_projection/kernel dv proj
""")
CLIP_LEAVES |= below("text/", BIASED) | below("vision/", replaced(BIASED, **OF_VISION))


def encoder(L: int, d: int, H: int, f: int, **more: int) -> Sizes:
    """The sizes of a model whose heads together are as wide as the model."""
    own = {"L": L, "Ldec": L, "d": d, "H": H, "s": d // H, "Hs": d, "f": f}
    return {**own, **more}


EXPERTS, SPARSE = OTHER_LEAVES | EXPERT_LEAVES, OTHERS | HEAD_NORMS | ROUTER
POST = {"post_norms": True}
FAMILIES = {
    "llama": Family(
        *("llama", HUGGING_FACE, FLAX, heads(32, 128256, 4096, 32, 8, 128, 14336)),
        8_030_261_248,
    ),
    "qwen2": Family(  # 2.5 7B
        *("qwen2", HUGGING_FACE | BIASES, FLAX | BIAS_LEAVES),
        *(heads(28, 152064, 3584, 28, 4, 128, 18944), 7_615_616_512),
    ),
    "qwen3": Family(  # 8B
        *("qwen3", HUGGING_FACE | HEAD_NORMS, FLAX | HEAD_NORM_LEAVES),
        *(heads(36, 151936, 4096, 32, 8, 128, 12288), 8_190_735_360),
    ),
    "gemma": Family(  # 2B
        *("gemma", TIED, TIED_FLAX, heads(18, 256000, 2048, 8, 1, 256, 16384)),
        2_506_172_416,
    ),
    "gemma 3": Family(  # 1B
        *("gemma", GEMMA3, GEMMA3_LEAVES, heads(26, 262144, 1152, 4, 1, 256, 6912)),
        *(999_885_952, POST),
    ),
    "gemma 3, with vision": Family(  # 4B
        *("gemma", below("language_model.", GEMMA3) | VISION, GEMMA3_LEAVES),
        *(heads(34, 262208, 2560, 8, 4, 256, 10240), None, POST),
        "(vision_tower|multi_modal_projector).*",
    ),
    "gpt2": Family(
        *("gpt2", GPT2, GPT2_LEAVES, encoder(12, 768, 12, 3072, V=50257, P=1024)),
        *(124_439_808, {}, r"h\.\d+\.attn\.(masked_)?bias"),
    ),
    "mixtral": Family(  # 8x7B
        *("mixtral", OTHERS | MIXTRAL, EXPERTS, MIXTRAL_SIZES, 46_702_792_704),
    ),
    "qwen3_moe": Family(  # 30B-A3B
        *("qwen3_moe", SPARSE | QWEN_EXPERTS, EXPERTS | HEAD_NORM_LEAVES),
        *(QWEN_MOE_SIZES, 30_532_122_624),
    ),
    "deepseek_v3": Family(  # in bfloat16, the first layers
        *("deepseek_v3", DEEPSEEK, DEEPSEEK_LEAVES),
        DEEPSEEK_SIZES | {"L": 5, "Lmoe": 2},
    ),
    "deepseek_v3, float8": Family(  # as published
        *("deepseek_v3", with_scales(DEEPSEEK | NEXT_TOKEN), DEEPSEEK_LEAVES),
        *(DEEPSEEK_SIZES, 671_026_419_200, {}, r"model\.layers\.61\..*"),
    ),
    "gpt_oss": Family(  # 20B, in bfloat16
        *("gpt_oss", GPT_OSS | GPT_OSS_WEIGHTS, GPT_OSS_LEAVES, GPT_OSS_SIZES),
        *(20_914_757_184, {"mxfp4": False}),
    ),
    "gpt_oss, MXFP4": Family(  # as published
        *("gpt_oss", GPT_OSS | MXFP4, GPT_OSS_LEAVES, GPT_OSS_SIZES, 20_914_757_184),
    ),
    "t5": Family(  # 1.1 base
        *("t5", T5, T5_LEAVES, encoder(12, 768, 12, 2048, V=32128, B=32)),
        247_577_856,
    ),
    "t5, 1.0": Family(  # small
        *("t5", T5_1_0, without(T5_LEAVES, "lm_head|gate")),
        *(encoder(6, 512, 8, 2048, V=32128, B=32), 60_506_624),
        {"gated": False, "tied": True},
    ),
    "whisper": Family(  # large-v3
        *("whisper", WHISPER, WHISPER_LEAVES),
        *(encoder(32, 1280, 20, 5120, V=51866, mel=128), 1_543_490_560),
    ),
    "vit": Family(  # B/16, for ImageNet
        *("vit", VIT, VIT_LEAVES, encoder(12, 768, 12, 3072, p=16, P=197, N=1000)),
        86_567_656,
    ),
    "clip": Family(  # B/32
        *("clip", CLIP, CLIP_LEAVES),
        encoder(12, 512, 8, 2048, V=49408, p=32, P=50)
        | {"dv": 768, "fv": 3072, "Hv": 12, "proj": 512},
        *(151_277_313, {}, r".*position_ids"),
    ),
}


# -------------------------------------------------------------------------- files


def stored_dtype(name: str, float8: bool) -> str:
    """The dtype of a tensor in the file, as safetensors names it."""
    if name.endswith("position_ids"):
        return "I64"
    if name.endswith(("_blocks", "_scales")):
        return "U8"
    if name.endswith(("_scale_inv", "e_score_correction_bias")):
        return "F32"
    is_matrix = re.search(r"_proj(_with_mqa)?\.weight$", name) and "eh_proj" not in name
    return "F8_E4M3" if float8 and is_matrix else "BF16"


BYTES = {"I64": 8, "F32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1}


def write_headers(folder: Path, tensors: Shapes, files: int = 3) -> None:
    """A checkpoint of headers: the files have holes in the place of numbers."""
    float8 = any(name.endswith("_scale_inv") for name in tensors)
    held: list[dict[str, Any]] = [{} for _ in range(files)]
    ends, weight_map = [0] * files, {}
    for number, (name, shape) in enumerate(tensors.items()):
        at = number * files // len(tensors)
        dtype = stored_dtype(name, float8)
        end = ends[at] + math.prod(shape) * BYTES[dtype]
        offsets = [ends[at], end]
        held[at][name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        ends[at] = end
        weight_map[name] = f"model-{at + 1:05}-of-{files:05}.safetensors"
    for at, header in enumerate(held):
        text = json.dumps(header).encode()
        path = folder / f"model-{at + 1:05}-of-{files:05}.safetensors"
        with path.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + ends[at])
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
