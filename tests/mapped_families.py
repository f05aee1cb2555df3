"""Each family of `checkpoint.mappings`: its tensors, its leaves, and published sizes.

Tables go from a name to the names of its dims; `{n}` is the number of a layer. Sizes
and names are those of the published configurations and files.
"""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable
from functools import partial
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
    mapping: Callable[..., list[Any]]
    tensors: Table
    leaves: Table
    published: Sizes
    tiny: Sizes
    parameters: int | None = None
    left_out: str = "(?!)"

    def entries(self, sizes: Sizes, scanned: bool) -> list[Any]:
        """The mapping."""
        own = {"dense_layers": sizes["D"]} if "D" in sizes else {}
        return self.mapping(scanned=scanned, **own)

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


def layered(prefix: str, table: Table) -> Table:
    return {f"{prefix}{name}": dims for name, dims in table.items()}


TINY = {"L": 2, "V": 64, "d": 32, "H": 4, "K": 2, "s": 8, "Hs": 32, "Ks": 16, "f": 48}


def heads(L: int, V: int, d: int, H: int, K: int, s: int, f: int, **more: int) -> Sizes:
    """The sizes of a decoder, with the heads side by side."""
    own = {"L": L, "V": V, "d": d, "H": H, "K": K, "s": s, "f": f}
    return {**own, "Hs": H * s, "Ks": K * s, **more}


LAYER = "model.layers.{n}"

# ------------------------------------------------------------------------ decoders

HUGGING_FACE: Table = {
    "model.embed_tokens.weight": "V d",
    "model.layers.{n}.self_attn.q_proj.weight": "Hs d",
    "model.layers.{n}.self_attn.k_proj.weight": "Ks d",
    "model.layers.{n}.self_attn.v_proj.weight": "Ks d",
    "model.layers.{n}.self_attn.o_proj.weight": "d Hs",
    "model.layers.{n}.mlp.gate_proj.weight": "f d",
    "model.layers.{n}.mlp.up_proj.weight": "f d",
    "model.layers.{n}.mlp.down_proj.weight": "d f",
    "model.layers.{n}.input_layernorm.weight": "d",
    "model.layers.{n}.post_attention_layernorm.weight": "d",
    "model.norm.weight": "d",
    "lm_head.weight": "V d",
}
FLAX: Table = {
    "embed/embedding": "V d",
    "layers/{n}/attention/query/kernel": "d H s",
    "layers/{n}/attention/key/kernel": "d K s",
    "layers/{n}/attention/value/kernel": "d K s",
    "layers/{n}/attention/out/kernel": "H s d",
    "layers/{n}/mlp/gate/kernel": "d f",
    "layers/{n}/mlp/up/kernel": "d f",
    "layers/{n}/mlp/down/kernel": "f d",
    "layers/{n}/attention_norm/scale": "d",
    "layers/{n}/mlp_norm/scale": "d",
    "norm/scale": "d",
    "lm_head/kernel": "d V",
}


def tied(table: Table) -> Table:
    """The same without a head, which is the embedding."""
    return {path: dims for path, dims in table.items() if "lm_head" not in path}


BIASES = {f"{LAYER}.self_attn.{x}_proj.bias": "Ks" for x in "kv"} | {
    f"{LAYER}.self_attn.q_proj.bias": "Hs"
}
BIAS_LEAVES = {f"layers/{{n}}/attention/{x}/bias": "K s" for x in ("key", "value")} | {
    "layers/{n}/attention/query/bias": "H s"
}
HEAD_NORMS = {f"{LAYER}.self_attn.{x}_norm.weight": "s" for x in "qk"}
HEAD_NORM_LEAVES = {
    f"layers/{{n}}/attention/{x}_norm/scale": "s" for x in ("query", "key")
}
POST_NORMS = {f"{LAYER}.{x}_feedforward_layernorm.weight": "d" for x in ("pre", "post")}
POST_NORM_LEAVES = {
    f"layers/{{n}}/{x}_post_norm/scale": "d" for x in ("attention", "mlp")
}
VISION = {
    "vision_tower.vision_model.embeddings.patch_embedding.weight": "1152 3 14 14",
    "multi_modal_projector.mm_input_projection_weight": "1152 d",
}
GEMMA3 = tied(HUGGING_FACE) | POST_NORMS | HEAD_NORMS
GEMMA3_LEAVES = tied(FLAX) | POST_NORM_LEAVES | HEAD_NORM_LEAVES

GPT2 = {
    "wte.weight": "V d",
    "wpe.weight": "P d",
    "h.{n}.attn.c_attn.weight": "d 3*d",
    "h.{n}.attn.c_attn.bias": "3*d",
    "h.{n}.attn.c_proj.weight": "d d",
    "h.{n}.attn.c_proj.bias": "d",
    "h.{n}.mlp.c_fc.weight": "d f",
    "h.{n}.mlp.c_fc.bias": "f",
    "h.{n}.mlp.c_proj.weight": "f d",
    "h.{n}.mlp.c_proj.bias": "d",
    "h.{n}.ln_1.weight": "d",
    "h.{n}.ln_1.bias": "d",
    "h.{n}.ln_2.weight": "d",
    "h.{n}.ln_2.bias": "d",
    "ln_f.weight": "d",
    "ln_f.bias": "d",
}


def biased_layer(prefix: str, attentions: Table, ungated: bool = True) -> Table:
    """The leaves of a layer with norms that have a bias, and without a gate.

    Args:
        prefix: what is before each path.
        attentions: name of an attention → `key` where keys have a bias.
        ungated: whether there is an mlp.
    """
    found: Table = {}
    for name, key in attentions.items():
        for part in ("query", "key", "value"):
            found[f"{name}/{part}/kernel"] = "d H s"
            if part != "key" or key:
                found[f"{name}/{part}/bias"] = "H s"
        found |= {f"{name}/out/kernel": "H s d", f"{name}/out/bias": "d"}
    for name in [*attentions, *["mlp"] * ungated]:
        found |= {f"{name}_norm/scale": "d", f"{name}_norm/bias": "d"}
    found |= {"mlp/up/kernel": "d f", "mlp/up/bias": "f"}
    found |= {"mlp/down/kernel": "f d", "mlp/down/bias": "d"}
    return layered(prefix, found)


NORM_LEAVES = {"norm/scale": "d", "norm/bias": "d"}
GPT2_LEAVES = {
    "embed/embedding": "V d",
    "positions/embedding": "P d",
    **biased_layer("layers/{n}/", {"attention": "key"}),
    **NORM_LEAVES,
}

# ------------------------------------------------------------------------- experts

OTHERS = {name: dims for name, dims in HUGGING_FACE.items() if "mlp" not in name}
OTHER_LEAVES = {path: dims for path, dims in FLAX.items() if "/mlp/" not in path}


def experts(prefix: str, gate: str, up: str, down: str) -> Table:
    return {
        f"{prefix}.{{e}}.{gate}.weight": "m d",
        f"{prefix}.{{e}}.{up}.weight": "m d",
        f"{prefix}.{{e}}.{down}.weight": "d m",
    }


def expert_leaves(layer: str, bias: bool = False) -> Table:
    found = {
        f"{layer}/mlp/router/kernel": "d E",
        f"{layer}/mlp/experts/gate/kernel": "E d m",
        f"{layer}/mlp/experts/up/kernel": "E d m",
        f"{layer}/mlp/experts/down/kernel": "E m d",
    }
    if bias:
        found |= {
            f"{layer}/mlp/router/bias": "E",
            f"{layer}/mlp/experts/gate/bias": "E m",
            f"{layer}/mlp/experts/up/bias": "E m",
            f"{layer}/mlp/experts/down/bias": "E d",
        }
    return found


ROUTER = {f"{LAYER}.mlp.gate.weight": "E d"}
FUSED = {
    f"{LAYER}.mlp.experts.gate_up_proj": "E 2*m d",
    f"{LAYER}.mlp.experts.down_proj": "E d m",
}
QWEN_EXPERTS = experts(f"{LAYER}.mlp.experts", "gate_proj", "up_proj", "down_proj")
MIXTRAL = {
    f"{LAYER}.block_sparse_moe.gate.weight": "E d",
    **experts(f"{LAYER}.block_sparse_moe.experts", "w1", "w3", "w2"),
}
GPT_OSS = {
    **OTHERS,
    **BIASES,
    f"{LAYER}.self_attn.o_proj.bias": "d",
    f"{LAYER}.self_attn.sinks": "H",
    f"{LAYER}.mlp.router.weight": "E d",
    f"{LAYER}.mlp.router.bias": "E",
    f"{LAYER}.mlp.experts.gate_up_proj_bias": "E 2*m",
    f"{LAYER}.mlp.experts.down_proj_bias": "E d",
}
GPT_OSS_WEIGHTS = {
    f"{LAYER}.mlp.experts.gate_up_proj": "E d 2*m",
    f"{LAYER}.mlp.experts.down_proj": "E m d",
}
MXFP4 = {
    f"{LAYER}.mlp.experts.gate_up_proj_blocks": "E 2*m d/32 16",
    f"{LAYER}.mlp.experts.gate_up_proj_scales": "E 2*m d/32",
    f"{LAYER}.mlp.experts.down_proj_blocks": "E d m/32 16",
    f"{LAYER}.mlp.experts.down_proj_scales": "E d m/32",
}
GPT_OSS_LEAVES = {
    **OTHER_LEAVES,
    **BIAS_LEAVES,
    "layers/{n}/attention/out/bias": "d",
    "layers/{n}/attention/sinks": "H",
    **expert_leaves("layers/{n}", bias=True),
}
MIXTRAL_SIZES = heads(32, 32000, 4096, 32, 8, 128, 14336, m=14336, E=8)
QWEN_MOE_SIZES = heads(48, 151936, 2048, 32, 4, 128, 6144, m=768, E=128)
GPT_OSS_SIZES = heads(24, 201088, 2880, 64, 8, 64, 2880, m=2880, E=32)
TINY_EXPERTS = {**TINY, "m": 32, "E": 4}

# ----------------------------------------------------------------------- DeepSeek V3


def deepseek(layer: str) -> Table:
    attention = {
        "q_a_proj.weight": "qr d",
        "q_a_layernorm.weight": "qr",
        "q_b_proj.weight": "H*nr qr",
        "kv_a_proj_with_mqa.weight": "kr_r d",
        "kv_a_layernorm.weight": "kr",
        "kv_b_proj.weight": "H*nv kr",
        "o_proj.weight": "d H*v",
    }
    norms = {f"{x}_layernorm.weight": "d" for x in ("input", "post_attention")}
    return layered(f"{layer}.", norms | layered("self_attn.", attention))


def gated(prefix: str, hidden: str) -> Table:
    return {
        f"{prefix}.gate_proj.weight": f"{hidden} d",
        f"{prefix}.up_proj.weight": f"{hidden} d",
        f"{prefix}.down_proj.weight": f"d {hidden}",
    }


def deepseek_moe(layer: str) -> Table:
    return {
        f"{layer}.mlp.gate.weight": "E d",
        f"{layer}.mlp.gate.e_score_correction_bias": "E",
        **gated(f"{layer}.mlp.shared_experts", "m"),
        **gated(f"{layer}.mlp.experts.{{e}}", "m"),
        **deepseek(layer),
    }


def deepseek_leaves(layer: str) -> Table:
    return layered(
        f"{layer}/",
        {
            "attention_norm/scale": "d",
            "mlp_norm/scale": "d",
            "attention/q_a/kernel": "d qr",
            "attention/q_a_norm/scale": "qr",
            "attention/q_b/kernel": "qr H nr",
            "attention/kv_a/kernel": "d kr_r",
            "attention/kv_a_norm/scale": "kr",
            "attention/kv_b/kernel": "kr H nv",
            "attention/out/kernel": "H v d",
        },
    )


def gated_leaves(prefix: str, hidden: str) -> Table:
    return {
        f"{prefix}/gate/kernel": f"d {hidden}",
        f"{prefix}/up/kernel": f"d {hidden}",
        f"{prefix}/down/kernel": f"{hidden} d",
    }


TOP = {name: dims for name, dims in HUGGING_FACE.items() if "layers" not in name}
TOP_LEAVES = {path: dims for path, dims in FLAX.items() if "layers" not in path}
DEEPSEEK = {
    **TOP,
    **deepseek("model.layers.{dense}"),
    **gated("model.layers.{dense}.mlp", "f"),
    **deepseek_moe("model.layers.{moe}"),
}
NEXT_TOKEN = {
    **deepseek_moe("model.layers.61"),
    "model.layers.61.enorm.weight": "d",
    "model.layers.61.hnorm.weight": "d",
    "model.layers.61.eh_proj.weight": "d 2*d",
    "model.layers.61.embed_tokens.weight": "V d",
    "model.layers.61.shared_head.norm.weight": "d",
    "model.layers.61.shared_head.head.weight": "V d",
}
DEEPSEEK_LEAVES = {
    **TOP_LEAVES,
    **deepseek_leaves("layers/{dense}"),
    **gated_leaves("layers/{dense}/mlp", "f"),
    **deepseek_leaves("layers/{moe}"),
    **expert_leaves("layers/{moe}"),
    **gated_leaves("layers/{moe}/mlp/shared_experts", "m"),
    "layers/{moe}/mlp/router/bias": "E",
}
DEEPSEEK_SIZES = {
    **{"L": 61, "D": 3, "Lmoe": 58, "V": 129280, "d": 7168, "H": 128, "f": 18432},
    **{"nr": 192, "nv": 256, "v": 128, "qr": 1536, "kr": 512, "kr_r": 576},
    **{"m": 2048, "E": 256},
}
TINY_DEEPSEEK = {
    **{"L": 3, "D": 1, "Lmoe": 2, "V": 64, "d": 32, "H": 4, "f": 48, "nr": 12},
    **{"nv": 14, "v": 6, "qr": 16, "kr": 20, "kr_r": 24, "m": 24, "E": 4},
}


def without(table: Table, pattern: str) -> Table:
    return {name: dims for name, dims in table.items() if not re.search(pattern, name)}


def lite(table: Table) -> Table:
    """DeepSeek V2 Lite: queries of full rank, two shared experts, no router bias."""
    found = without(table, "q_a|q_b|router/bias|e_score")
    for name, dims in found.items():
        if "shared_experts" in name:
            found[name] = dims.replace("m", "2*m")
    for kind in ("dense", "moe"):
        if "embed/embedding" in table:
            found[f"layers/{{{kind}}}/attention/query/kernel"] = "d H nr"
        else:
            found[f"model.layers.{{{kind}}}.self_attn.q_proj.weight"] = "H*nr d"
    return found


LITE_SIZES = {
    **{"L": 27, "D": 1, "Lmoe": 26, "V": 102400, "d": 2048, "H": 16, "f": 10944},
    **{"nr": 192, "nv": 256, "v": 128, "kr": 512, "kr_r": 576, "m": 1408, "E": 64},
}


def with_scales(table: Table) -> Table:
    """With the scales of the matrices that are in float8."""
    found = dict(table)
    for name, dims in table.items():
        if re.search(r"_proj(_with_mqa)?\.weight$", name) and "eh_proj" not in name:
            found[f"{name}_scale_inv"] = " ".join(f"{dim}/128" for dim in dims.split())
    return found


# ----------------------------------------------------------- encoders and decoders


def t5(is_gated: bool, is_tied: bool) -> Table:
    wide = ("wi_0", "wi_1") if is_gated else ("wi",)
    found = {"shared.weight": "V d"} | ({} if is_tied else {"lm_head.weight": "V d"})
    for side, n in (("encoder", "n"), ("decoder", "dec")):
        parts = ["SelfAttention"] + ["EncDecAttention"] * (side == "decoder")
        block = f"{side}.block.{{{n}}}.layer"
        for number, part in enumerate(parts):
            for name in "qkv":
                found[f"{block}.{number}.{part}.{name}.weight"] = "Hs d"
            found[f"{block}.{number}.{part}.o.weight"] = "d Hs"
        last = f"{block}.{len(parts)}.DenseReluDense"
        found |= {f"{last}.{name}.weight": "f d" for name in wide}
        found[f"{last}.wo.weight"] = "d f"
        for number in range(len(parts) + 1):
            found[f"{block}.{number}.layer_norm.weight"] = "d"
        bias = "layer.0.SelfAttention.relative_attention_bias.weight"
        found[f"{side}.block.0.{bias}"] = "B H"
        found[f"{side}.final_layer_norm.weight"] = "d"
    return found


def t5_leaves(is_gated: bool, is_tied: bool) -> Table:
    wide = ("gate", "up") if is_gated else ("up",)
    found = {"embed/embedding": "V d"} | ({} if is_tied else {"lm_head/kernel": "d V"})
    for side, n in (("encoder", "n"), ("decoder", "dec")):
        layer = f"{side}/layers/{{{n}}}"
        parts = ["attention"] + ["cross_attention"] * (side == "decoder")
        for part in parts:
            for name in ("query", "key", "value"):
                found[f"{layer}/{part}/{name}/kernel"] = "d H s"
            found[f"{layer}/{part}/out/kernel"] = "H s d"
        found |= {f"{layer}/{part}_norm/scale": "d" for part in [*parts, "mlp"]}
        found |= {f"{layer}/mlp/{name}/kernel": "d f" for name in wide}
        found[f"{layer}/mlp/down/kernel"] = "f d"
        found[f"{side}/relative_attention_bias/embedding"] = "B H"
        found[f"{side}/norm/scale"] = "d"
    return found


def torch_dense(name: str, inputs: str, outputs: str, bias: bool = True) -> Table:
    found = {f"{name}.weight": f"{outputs} {inputs}"}
    return found | ({f"{name}.bias": outputs} if bias else {})


def torch_norm(name: str, dim: str = "d") -> Table:
    return {f"{name}.weight": dim, f"{name}.bias": dim}


def whisper() -> Table:
    found = {
        "model.encoder.conv1.weight": "d mel 3",
        "model.encoder.conv1.bias": "d",
        "model.encoder.conv2.weight": "d d 3",
        "model.encoder.conv2.bias": "d",
        "model.encoder.embed_positions.weight": "1500 d",
        "model.decoder.embed_tokens.weight": "V d",
        "model.decoder.embed_positions.weight": "448 d",
    }
    for side, n in (("encoder", "n"), ("decoder", "dec")):
        layer = f"model.{side}.layers.{{{n}}}"
        for part in ["self_attn"] + ["encoder_attn"] * (side == "decoder"):
            for name in ("q", "k", "v", "out"):
                own = f"{layer}.{part}.{name}_proj"
                found |= torch_dense(own, "d", "d", bias=name != "k")
            found |= torch_norm(f"{layer}.{part}_layer_norm")
        found |= torch_dense(f"{layer}.fc1", "d", "f")
        found |= torch_dense(f"{layer}.fc2", "f", "d")
        found |= torch_norm(f"{layer}.final_layer_norm")
        found |= torch_norm(f"model.{side}.layer_norm")
    return found


WHISPER_LEAVES = {
    "encoder/conv1/kernel": "3 mel d",
    "encoder/conv1/bias": "d",
    "encoder/conv2/kernel": "3 d d",
    "encoder/conv2/bias": "d",
    "encoder/positions/embedding": "1500 d",
    "decoder/embed/embedding": "V d",
    "decoder/positions/embedding": "448 d",
    **layered("encoder/", NORM_LEAVES),
    **layered("decoder/", NORM_LEAVES),
    **biased_layer("encoder/layers/{n}/", {"attention": ""}),
    **biased_layer("decoder/layers/{dec}/", {"attention": "", "cross_attention": ""}),
}


def vit() -> Table:
    at, layer = "vit.embeddings", "vit.encoder.layer.{n}"
    found = {
        f"{at}.cls_token": "1 1 d",
        f"{at}.position_embeddings": "1 P d",
        f"{at}.patch_embeddings.projection.weight": "d 3 p p",
        f"{at}.patch_embeddings.projection.bias": "d",
    }
    for name in ("query", "key", "value"):
        found |= torch_dense(f"{layer}.attention.attention.{name}", "d", "d")
    found |= torch_dense(f"{layer}.attention.output.dense", "d", "d")
    found |= torch_dense(f"{layer}.intermediate.dense", "d", "f")
    found |= torch_dense(f"{layer}.output.dense", "f", "d")
    for name in ("before", "after"):
        found |= torch_norm(f"{layer}.layernorm_{name}")
    return found | torch_norm("vit.layernorm") | torch_dense("classifier", "d", "N")


VIT_LEAVES = {
    "cls_token": "1 1 d",
    "position_embeddings": "1 P d",
    "patch_embedding/kernel": "p p 3 d",
    "patch_embedding/bias": "d",
    **biased_layer("layers/{n}/", {"attention": "key"}),
    **NORM_LEAVES,
    "classifier/kernel": "d N",
    "classifier/bias": "N",
}


def of_vision(table: Table) -> Table:
    """The same with the sizes of CLIP's tower of images."""
    own = {"d": "dv", "f": "fv", "H": "Hv"}
    return {
        name: " ".join(own.get(dim, dim) for dim in dims.split())
        for name, dims in table.items()
    }


def clip() -> Table:
    text, vision = "text_model.embeddings", "vision_model.embeddings"
    found = {
        "logit_scale": "",
        f"{text}.token_embedding.weight": "V d",
        f"{text}.position_embedding.weight": "77 d",
        f"{text}.position_ids": "1 77",
        f"{vision}.class_embedding": "dv",
        f"{vision}.patch_embedding.weight": "dv 3 p p",
        f"{vision}.position_embedding.weight": "P dv",
        f"{vision}.position_ids": "1 P",
        "text_projection.weight": "proj d",
        "visual_projection.weight": "proj dv",
        **torch_norm("text_model.final_layer_norm"),
        **torch_norm("vision_model.pre_layrnorm", "dv"),
        **torch_norm("vision_model.post_layernorm", "dv"),
    }
    own: Table = {}
    for name in ("q", "k", "v", "out"):
        own |= torch_dense(f"self_attn.{name}_proj", "d", "d")
    own |= torch_dense("mlp.fc1", "d", "f") | torch_dense("mlp.fc2", "f", "d")
    own |= torch_norm("layer_norm1") | torch_norm("layer_norm2")
    found |= layered("text_model.encoder.layers.{n}.", own)
    return found | layered("vision_model.encoder.layers.{n}.", of_vision(own))


CLIP_LEAVES = {
    "logit_scale": "",
    "text/embed/embedding": "V d",
    "text/positions/embedding": "77 d",
    "vision/class_embedding": "dv",
    "vision/patch_embedding/kernel": "p p 3 dv",
    "vision/positions/embedding": "P dv",
    "text_projection/kernel": "d proj",
    "visual_projection/kernel": "dv proj",
    **layered("text/", NORM_LEAVES),
    **layered("vision/", of_vision(NORM_LEAVES)),
    **layered("vision/pre_", of_vision(NORM_LEAVES)),
    **biased_layer("text/layers/{n}/", {"attention": "key"}),
    **of_vision(biased_layer("vision/layers/{n}/", {"attention": "key"})),
}


def encoder(L: int, d: int, H: int, f: int, **more: int) -> Sizes:
    """The sizes of a model whose heads together are as wide as the model."""
    own = {"L": L, "Ldec": L, "d": d, "H": H, "s": d // H, "Hs": d, "f": f}
    return {**own, **more}


TINY_T5 = encoder(2, 32, 4, 48, V=64, B=8)
TINY_VISION = {"p": 4, "P": 17, "N": 8}

FAMILIES = {
    "llama": Family(
        *("llama", mappings.llama, HUGGING_FACE, FLAX),
        *(heads(32, 128256, 4096, 32, 8, 128, 14336), TINY, 8_030_261_248),
    ),
    "llama, tied": Family(  # Llama 3.2 1B
        *("llama", partial(mappings.llama, tied=True), tied(HUGGING_FACE), tied(FLAX)),
        *(heads(16, 128256, 2048, 32, 8, 64, 8192), TINY, 1_235_814_400),
    ),
    "mistral": Family(
        *("mistral", mappings.mistral, HUGGING_FACE, FLAX),
        *(heads(32, 32000, 4096, 32, 8, 128, 14336), TINY, 7_241_732_096),
    ),
    "qwen2": Family(  # Qwen 2.5 7B
        *("qwen2", mappings.qwen2, HUGGING_FACE | BIASES, FLAX | BIAS_LEAVES),
        *(heads(28, 152064, 3584, 28, 4, 128, 18944), TINY, 7_615_616_512),
    ),
    "qwen3": Family(  # 8B
        *("qwen3", mappings.qwen3, HUGGING_FACE | HEAD_NORMS, FLAX | HEAD_NORM_LEAVES),
        *(heads(36, 151936, 4096, 32, 8, 128, 12288), TINY, 8_190_735_360),
    ),
    "qwen3, float8": Family(
        *("qwen3", mappings.qwen3, with_scales(HUGGING_FACE | HEAD_NORMS)),
        FLAX | HEAD_NORM_LEAVES,
        *(heads(36, 151936, 4096, 32, 8, 128, 12288), TINY, 8_190_735_360),
    ),
    "gemma": Family(  # 2B
        *("gemma", mappings.gemma, tied(HUGGING_FACE), tied(FLAX)),
        *(heads(18, 256000, 2048, 8, 1, 256, 16384), TINY, 2_506_172_416),
    ),
    "gemma 2": Family(  # 9B
        *("gemma", partial(mappings.gemma, post_norms=True)),
        *(tied(HUGGING_FACE) | POST_NORMS, tied(FLAX) | POST_NORM_LEAVES),
        *(heads(42, 256000, 3584, 16, 8, 256, 14336), TINY, 9_241_705_984),
    ),
    "gemma 3": Family(  # 1B
        *("gemma", partial(mappings.gemma, post_norms=True), GEMMA3, GEMMA3_LEAVES),
        *(heads(26, 262144, 1152, 4, 1, 256, 6912), TINY, 999_885_952),
    ),
    "gemma 3, with vision": Family(  # 4B
        *("gemma", partial(mappings.gemma, post_norms=True)),
        *(layered("language_model.", GEMMA3) | VISION, GEMMA3_LEAVES),
        *(heads(34, 262208, 2560, 8, 4, 256, 10240), TINY),
        left_out="(vision_tower|multi_modal_projector).*",
    ),
    "gpt2": Family(
        *("gpt2", mappings.gpt2, GPT2, GPT2_LEAVES),
        encoder(12, 768, 12, 3072, V=50257, P=1024),
        encoder(2, 32, 4, 48, V=64, P=16),
        124_439_808,
    ),
    "mixtral": Family(  # 8x7B
        *("mixtral", mappings.mixtral, OTHERS | MIXTRAL),
        *(OTHER_LEAVES | expert_leaves("layers/{n}"), MIXTRAL_SIZES, TINY_EXPERTS),
        46_702_792_704,
    ),
    "mixtral, fused": Family(
        *("mixtral", partial(mappings.mixtral, fused=True), OTHERS | ROUTER | FUSED),
        *(OTHER_LEAVES | expert_leaves("layers/{n}"), MIXTRAL_SIZES, TINY_EXPERTS),
        46_702_792_704,
    ),
    "qwen3_moe": Family(  # 30B-A3B
        *("qwen3_moe", mappings.qwen3_moe),
        OTHERS | HEAD_NORMS | ROUTER | QWEN_EXPERTS,
        OTHER_LEAVES | HEAD_NORM_LEAVES | expert_leaves("layers/{n}"),
        *(QWEN_MOE_SIZES, TINY_EXPERTS, 30_532_122_624),
    ),
    "qwen3_moe, fused": Family(
        *("qwen3_moe", partial(mappings.qwen3_moe, fused=True)),
        OTHERS | HEAD_NORMS | ROUTER | FUSED,
        OTHER_LEAVES | HEAD_NORM_LEAVES | expert_leaves("layers/{n}"),
        *(QWEN_MOE_SIZES, TINY_EXPERTS, 30_532_122_624),
    ),
    "deepseek_v3": Family(  # in bfloat16, the first layers
        *("deepseek_v3", mappings.deepseek_v3, DEEPSEEK, DEEPSEEK_LEAVES),
        *(DEEPSEEK_SIZES | {"L": 5, "Lmoe": 2}, TINY_DEEPSEEK),
    ),
    "deepseek_v3, fused": Family(
        *("deepseek_v3", partial(mappings.deepseek_v3, fused=True)),
        without(DEEPSEEK, r"\.experts\.")
        | {
            "model.layers.{moe}.mlp.experts.gate_up_proj": "E 2*m d",
            "model.layers.{moe}.mlp.experts.down_proj": "E d m",
        },
        *(DEEPSEEK_LEAVES, DEEPSEEK_SIZES, TINY_DEEPSEEK, 671_026_419_200),
    ),
    "deepseek_v3, V2 Lite": Family(
        *("deepseek_v3", mappings.deepseek_v3, lite(DEEPSEEK), lite(DEEPSEEK_LEAVES)),
        *(LITE_SIZES, TINY_DEEPSEEK, 15_706_484_224),
    ),
    "deepseek_v3, float8": Family(  # as published
        *("deepseek_v3", mappings.deepseek_v3),
        *(with_scales(DEEPSEEK | NEXT_TOKEN), DEEPSEEK_LEAVES),
        *(DEEPSEEK_SIZES, TINY_DEEPSEEK, 671_026_419_200),
        left_out=r"model\.layers\.61\..*",
    ),
    "gpt_oss": Family(  # 20B, in bfloat16
        *("gpt_oss", partial(mappings.gpt_oss, mxfp4=False)),
        *(GPT_OSS | GPT_OSS_WEIGHTS, GPT_OSS_LEAVES),
        *(GPT_OSS_SIZES, TINY_EXPERTS, 20_914_757_184),
    ),
    "gpt_oss, MXFP4": Family(  # as published
        *("gpt_oss", mappings.gpt_oss, GPT_OSS | MXFP4, GPT_OSS_LEAVES),
        *(GPT_OSS_SIZES, TINY_EXPERTS, 20_914_757_184),
    ),
    "t5": Family(  # 1.1 base
        *("t5", mappings.t5, t5(True, False), t5_leaves(True, False)),
        *(encoder(12, 768, 12, 2048, V=32128, B=32), TINY_T5, 247_577_856),
    ),
    "t5, 1.0": Family(  # small
        *("t5", partial(mappings.t5, gated=False, tied=True)),
        *(t5(False, True), t5_leaves(False, True)),
        *(encoder(6, 512, 8, 2048, V=32128, B=32), TINY_T5, 60_506_624),
    ),
    "whisper": Family(  # large-v3
        *("whisper", mappings.whisper, whisper(), WHISPER_LEAVES),
        encoder(32, 1280, 20, 5120, V=51866, mel=128),
        encoder(2, 32, 4, 48, V=64, mel=8) | {"Ldec": 3},
        1_543_490_560,
    ),
    "vit": Family(  # B/16, for ImageNet
        *("vit", mappings.vit, vit(), VIT_LEAVES),
        encoder(12, 768, 12, 3072, p=16, P=197, N=1000),
        encoder(2, 32, 4, 48, **TINY_VISION),
        86_567_656,
    ),
    "clip": Family(  # B/32
        *("clip", mappings.clip, clip(), CLIP_LEAVES),
        encoder(12, 512, 8, 2048, V=49408, dv=768, fv=3072, Hv=12, p=32, P=50)
        | {"proj": 512},
        encoder(2, 32, 4, 48, V=64, dv=64, fv=96, Hv=8, **TINY_VISION) | {"proj": 16},
        151_277_313,
        left_out=r".*position_ids",
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
