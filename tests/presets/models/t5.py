"""T5 1.0 (tied, `wi`) and 1.1 (`wi_0`, `wi_1`, a head), and UMT5."""

from presets.models import Shapes, written_out
from presets.models._decoders import Table

# All heads together are not `d` wide; `B` buckets of distances.
SIZES = {"L": 2, "V": 512, "d": 128, "H": 8, "Hs": 256, "f": 192, "B": 32}
SIDES = ("encoder", "decoder")


def torch_names(gated: bool = True, bias_in_each: bool = False) -> Table:
    """Names of Hugging Face without `.weight`; projections are (in, out)."""
    found: Table = {f"{side}.final_layer_norm": "d" for side in SIDES}
    for side in SIDES:
        parts = ["SelfAttention"] + ["EncDecAttention"] * (side == "decoder")
        block = f"{side}.block.{{n}}.layer"
        for number, part in enumerate(parts):
            found |= {f"{block}.{number}.{part}.{name}": "d Hs" for name in "qkv"}
            found[f"{block}.{number}.{part}.o"] = "Hs d"
        last = f"{block}.{len(parts)}.DenseReluDense"
        wide = ("wi_0", "wi_1") if gated else ("wi",)
        found |= {f"{last}.{name}": "d f" for name in wide} | {f"{last}.wo": "f d"}
        found |= {
            f"{block}.{number}.layer_norm": "d" for number in range(len(parts) + 1)
        }
        bias = "0.SelfAttention.relative_attention_bias"
        first = block if bias_in_each else f"{side}.block.0.layer"
        found[f"{first}.{bias}"] = "B H"
    return found


def files(gated: bool) -> Table:
    """Hugging Face's files: (out, in)."""
    found: Table = {"shared.weight": "V d"}
    for name, dims in torch_names(gated).items():
        is_bias = name.endswith("bias")
        found[f"{name}.weight"] = dims if is_bias else " ".join(dims.split()[::-1])
    return found | ({"lm_head.weight": "V d"} if gated else {})


def modules(gated: bool = True, umt5: bool = False) -> Table:
    """Linen modules of transformers 4; or UMT5 as NNX modules of bonsai."""
    found: Table = {"shared/embedding": "V d"}
    if umt5:
        found = {f"{side}/embed_tokens/embedding": "V d" for side in SIDES}
    for name, dims in torch_names(gated, bias_in_each=umt5).items():
        leaf = "embedding" if name.endswith("bias") else "kernel"
        if " " not in dims:
            leaf = "scale" if umt5 else "weight"
        found[f"{name.replace('.', '/')}/{leaf}"] = dims
    return found | ({"lm_head/kernel": "d V"} if gated else {})


def t5x() -> Table:
    """Linen modules of T5X."""
    found: Table = {
        "token_embedder/embedding": "V d",
        "decoder/logits_dense/kernel": "d V",
    }
    attentions = {
        "encoder": ["attention"],
        "decoder": ["self_attention", "encoder_decoder_attention"],
    }
    for side, names in attentions.items():
        layer = f"{side}/layers_{{n}}"
        for name in names:
            for part in ("query", "key", "value"):
                found[f"{layer}/{name}/{part}/kernel"] = "d Hs"
            found[f"{layer}/{name}/out/kernel"] = "Hs d"
            found[f"{layer}/pre_{name}_layer_norm/scale"] = "d"
        found |= {f"{layer}/mlp/{name}/kernel": "d f" for name in ("wi_0", "wi_1")}
        found[f"{layer}/mlp/wo/kernel"] = "f d"
        found[f"{layer}/pre_mlp_layer_norm/scale"] = "d"
        found[f"{side}/relpos_bias/rel_embedding"] = "H B"
        found[f"{side}/{side}_norm/scale"] = "d"
    return found


def keras_hub() -> Table:
    found: Table = {
        "token_embedding/embeddings": "V d",
        "self_attention/embeddings": "B H",
    }
    for side in SIDES:
        layer = f"transformer_{side}_layer_{{n}}"
        for name in ["self"] + ["cross"] * (side == "decoder"):
            for part in ("query", "key", "value"):
                found[f"{layer}/{name}_attention/{part}_projector/kernel"] = "d Hs"
            found[f"{layer}/{name}_attention/output_projector/kernel"] = "Hs d"
        found |= {
            f"{layer}/{name}_projector/kernel": "d f" for name in ("input", "gate")
        }
        found[f"{layer}/output_projector/kernel"] = "f d"
        found[f"{layer}/t5_layer_norm_1/weight"] = "d"
        found[f"{side}_output_layer_norm/weight"] = "d"
    return found


def of(table: Table) -> Shapes:
    return written_out(table, SIZES)


SPELLINGS = {
    "hugging face, 1.0": of(files(gated=False)),
    "hugging face, 1.1": of(files(gated=True)),
    "hugging face, encoder": of(
        {name: dims for name, dims in files(True).items() if "decoder" not in name}
    ),
    "linen, 1.0": of(modules(gated=False)),
    "linen, 1.1": of(modules()),
    "bonsai": of(modules(umt5=True)),
    "t5x": of(t5x()),
    "keras hub": of(keras_hub()),
}
