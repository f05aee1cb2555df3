"""What the families with experts share."""

import re

from presets.models.llama import HEADS, HIDDEN, KV_HEADS, LAYERS, SIZE, VOCAB, D, Shapes

EXPERTS = 8


def attention(bias: bool = False, norms: bool = False) -> Shapes:
    """All but the feed-forward layers, as `transformers` saves them, (out, in)."""
    found: Shapes = {
        "model.embed_tokens.weight": (VOCAB, D),
        "model.norm.weight": (D,),
        "lm_head.weight": (VOCAB, D),
    }
    query, kv = HEADS * SIZE, KV_HEADS * SIZE
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q", query), ("k", kv), ("v", kv)):
            found[f"{prefix}.self_attn.{name}_proj.weight"] = (rows, D)
            if bias:
                found[f"{prefix}.self_attn.{name}_proj.bias"] = (rows,)
            if norms and name != "v":
                found[f"{prefix}.self_attn.{name}_norm.weight"] = (SIZE,)
        found[f"{prefix}.self_attn.o_proj.weight"] = (D, query)
        if bias:
            found[f"{prefix}.self_attn.o_proj.bias"] = (D,)
        found[f"{prefix}.input_layernorm.weight"] = (D,)
        found[f"{prefix}.post_attention_layernorm.weight"] = (D,)
    return found


def gated(prefix: str, d: int = D, hidden: int = HIDDEN) -> Shapes:
    """One feed-forward layer, or one expert, as `transformers` saves it."""
    return {
        f"{prefix}.gate_proj.weight": (hidden, d),
        f"{prefix}.up_proj.weight": (hidden, d),
        f"{prefix}.down_proj.weight": (d, hidden),
    }


def fused(prefix: str, d: int = D, hidden: int = HIDDEN) -> Shapes:
    """All experts of a layer, as modules of `transformers` 5: (experts, out, in)."""
    return {
        f"{prefix}.gate_up_proj": (EXPERTS, 2 * hidden, d),
        f"{prefix}.down_proj": (EXPERTS, d, hidden),
    }


def easydel(weights: Shapes) -> Shapes:
    """The same as NNX modules of EasyDeL: (in, out), the experts as one kernel."""
    found: Shapes = {}
    for name, shape in weights.items():
        path = name.replace(".", "/")
        if re.search(r"/experts/\d+/", path):
            path = re.sub(r"/experts/\d+/", "/experts/", path)
            found[path.replace("/weight", "/kernel")] = (EXPERTS, *shape[::-1])
        elif "embed_tokens" in path:
            found[path.replace("/weight", "/embedding")] = shape
        else:
            found[path.replace("/weight", "/kernel")] = shape[::-1]
    return found


def stacked(shapes: Shapes) -> Shapes:
    """The same with its layers stacked along dim 0."""
    found: Shapes = {}
    for path, shape in shapes.items():
        name, layers = re.subn(r"layers/\d+/", "layers/", path)
        found[name] = (LAYERS, *shape) if layers else shape
    return found


def own(bias: bool = False, norms: bool = False, sinks: bool = False) -> Shapes:
    """The names of Flax's own layers, with `experts` and a `router` beside them."""
    heads, kv = (HEADS, SIZE), (KV_HEADS, SIZE)
    experts = {"gate": (D, HIDDEN), "up": (D, HIDDEN), "down": (HIDDEN, D)}
    layer: Shapes = {
        "attention_norm/scale": (D,),
        "attention/query/kernel": (D, *heads),
        "attention/key/kernel": (D, *kv),
        "attention/value/kernel": (D, *kv),
        "attention/out/kernel": (*heads, D),
        "mlp_norm/scale": (D,),
        "mlp/router/kernel": (D, EXPERTS),
    }
    for name, shape in experts.items():
        layer[f"mlp/experts/{name}/kernel"] = (EXPERTS, *shape)
        if bias:
            layer[f"mlp/experts/{name}/bias"] = (EXPERTS, shape[-1])
    if bias:
        layer["mlp/router/bias"] = (EXPERTS,)
        layer |= {f"attention/{name}/bias": kv for name in ("key", "value")}
        layer |= {"attention/query/bias": heads, "attention/out/bias": (D,)}
    if norms:
        layer |= {f"attention/{name}_norm/scale": (SIZE,) for name in ("query", "key")}
    if sinks:
        layer["attention/sinks"] = (HEADS,)
    found: Shapes = {
        "embed/embedding": (VOCAB, D),
        "norm/scale": (D,),
        "lm_head/kernel": (D, VOCAB),
    }
    for number in range(LAYERS):
        for path, shape in layer.items():
            found[f"layers/{number}/{path}"] = shape
    return found
