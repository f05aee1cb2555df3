"""gpt-oss: biases, a sink for each head, and experts as MXFP4."""

from presets.models._experts import EXPERTS, attention, easydel, own, stacked
from presets.models.llama import HEADS, HIDDEN, LAYERS, D, Shapes

# Inputs that share a scale.
BLOCK = 32


def hugging_face(mxfp4: bool = False) -> Shapes:
    """The published weights, or the modules, whose experts are (experts, in, out)."""
    found = attention(bias=True)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        found[f"{prefix}.self_attn.sinks"] = (HEADS,)
        found[f"{prefix}.mlp.router.weight"] = (EXPERTS, D)
        found[f"{prefix}.mlp.router.bias"] = (EXPERTS,)
        for name, inputs, outputs in (
            ("gate_up_proj", D, 2 * HIDDEN),
            ("down_proj", HIDDEN, D),
        ):
            stem = f"{prefix}.mlp.experts.{name}"
            found[f"{stem}_bias"] = (EXPERTS, outputs)
            if mxfp4:
                blocks = (EXPERTS, outputs, inputs // BLOCK)
                found |= {f"{stem}_blocks": (*blocks, 16), f"{stem}_scales": blocks}
            else:
                found[stem] = (EXPERTS, inputs, outputs)
    return found


def easydel_with_biases() -> Shapes:
    """NNX modules of EasyDeL: gate and up are modules, and all have a bias."""
    found: Shapes = {}
    for path, shape in easydel(hugging_face()).items():
        if "/experts/" not in path:
            found[path] = shape
    for layer in range(LAYERS):
        prefix = f"model/layers/{layer}/mlp/experts"
        for name, inputs, outputs in (
            ("gate_proj", D, HIDDEN),
            ("up_proj", D, HIDDEN),
            ("down_proj", HIDDEN, D),
        ):
            found[f"{prefix}/{name}/kernel"] = (EXPERTS, inputs, outputs)
            found[f"{prefix}/{name}/bias"] = (EXPERTS, outputs)
    return found


def one_array() -> Shapes:
    """NNX modules with gate and up as one array, as older EasyDeL and KerasHub."""
    weights = hugging_face()
    found = easydel({name: weights[name] for name in weights if "experts" not in name})
    experts = {name: weights[name] for name in weights if "experts" in name}
    return found | {name.replace(".", "/"): experts[name] for name in experts}


SPELLINGS = {
    "hugging face": hugging_face(),
    "hugging face, MXFP4": hugging_face(mxfp4=True),
    "easydel": easydel_with_biases(),
    "easydel, stacked": stacked(easydel_with_biases()),
    "easydel, gate and up as one array": one_array(),
    "flax": own(bias=True, sinks=True),
    "flax, stacked": stacked(own(bias=True, sinks=True)),
}
