"""Llama 2 and 3, and all decoders with the same parameters."""

Shapes = dict[str, tuple[int, ...]]

LAYERS, D, VOCAB, HEADS, KV_HEADS, SIZE, HIDDEN = 2, 64, 256, 8, 4, 16, 96


def hugging_face(tied: bool = False, bias: bool = False) -> Shapes:
    """Weights as `transformers` saves them, (out, in)."""
    query, kv = HEADS * SIZE, KV_HEADS * SIZE
    found: Shapes = {"model.embed_tokens.weight": (VOCAB, D), "model.norm.weight": (D,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q", query), ("k", kv), ("v", kv)):
            found[f"{prefix}.self_attn.{name}_proj.weight"] = (rows, D)
            if bias:
                found[f"{prefix}.self_attn.{name}_proj.bias"] = (rows,)
        found[f"{prefix}.self_attn.o_proj.weight"] = (D, query)
        found[f"{prefix}.mlp.gate_proj.weight"] = (HIDDEN, D)
        found[f"{prefix}.mlp.up_proj.weight"] = (HIDDEN, D)
        found[f"{prefix}.mlp.down_proj.weight"] = (D, HIDDEN)
        found[f"{prefix}.input_layernorm.weight"] = (D,)
        found[f"{prefix}.post_attention_layernorm.weight"] = (D,)
    return found if tied else found | {"lm_head.weight": (VOCAB, D)}


def linen(weights: Shapes) -> Shapes:
    """The same as Linen modules of `transformers` 4: kernels are (in, out)."""
    found: Shapes = {}
    for name, shape in weights.items():
        stem, _, leaf = name.replace(".", "/").rpartition("/")
        if "embed" in stem and leaf == "weight":
            found[f"{stem}/embedding"] = shape
        elif leaf == "weight" and len(shape) > 1:
            found[f"{stem}/kernel"] = shape[::-1]
        else:
            found[f"{stem}/{leaf}"] = shape
    return found


def tunix() -> Shapes:
    """NNX modules of google-tunix: heads are a dim of their own."""
    found: Shapes = {
        "embedder/input_embedding": (VOCAB, D),
        "final_norm/w": (D,),
        "lm_head/w": (D, VOCAB),
    }
    for layer in range(LAYERS):
        prefix = f"layers/{layer}"
        found[f"{prefix}/attn/q_proj/w"] = (D, HEADS, SIZE)
        found[f"{prefix}/attn/k_proj/w"] = (D, KV_HEADS, SIZE)
        found[f"{prefix}/attn/v_proj/w"] = (D, KV_HEADS, SIZE)
        found[f"{prefix}/attn/o_proj/w"] = (HEADS, SIZE, D)
        found[f"{prefix}/mlp/gate_proj/kernel"] = (D, HIDDEN)
        found[f"{prefix}/mlp/up_proj/kernel"] = (D, HIDDEN)
        found[f"{prefix}/mlp/down_proj/kernel"] = (HIDDEN, D)
        found[f"{prefix}/input_layernorm/w"] = (D,)
        found[f"{prefix}/post_attention_layernorm/w"] = (D,)
    return found


def own(stacked: bool = False, split_heads: bool = True) -> Shapes:
    """The names of Flax's own layers, as the examples of this project have them."""
    heads, kv = ((HEADS, SIZE), (KV_HEADS, SIZE))
    if not split_heads:
        heads, kv = (HEADS * SIZE,), (KV_HEADS * SIZE,)
    layer: Shapes = {
        "attention_norm/scale": (D,),
        "attention/query/kernel": (D, *heads),
        "attention/key/kernel": (D, *kv),
        "attention/value/kernel": (D, *kv),
        "attention/out/kernel": (*heads, D),
        "mlp_norm/scale": (D,),
        "mlp/gate/kernel": (D, HIDDEN),
        "mlp/up/kernel": (D, HIDDEN),
        "mlp/down/kernel": (HIDDEN, D),
    }
    found: Shapes = {
        "embed/embedding": (VOCAB, D),
        "norm/scale": (D,),
        "lm_head/kernel": (D, VOCAB),
    }
    for path, shape in layer.items():
        if stacked:
            found[f"layers/{path}"] = (LAYERS, *shape)
        else:
            for number in range(LAYERS):
                found[f"layers/{number}/{path}"] = shape
    return found


SPELLINGS = {
    "hugging face": hugging_face(),
    "hugging face, tied": hugging_face(tied=True),
    "linen": linen(hugging_face()),
    "tunix": tunix(),
    "flax": own(),
    "flax, one dim for heads": own(split_heads=False),
    "flax, stacked": own(stacked=True),
    "flax, stacked, one dim for heads": own(stacked=True, split_heads=False),
}
