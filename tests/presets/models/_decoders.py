"""Dense decoders in the spellings of the libraries that have them.

Dims: `V` vocabulary, `d` model, `H` heads, `K` heads of keys, `s` head dim, `f` hidden,
`L` layers; `Hs` and `Ks` are heads side by side.
"""

from presets.models import Shapes, written_out

LAYERS, D, VOCAB, HEADS, KV_HEADS, SIZE, HIDDEN = 2, 64, 256, 8, 4, 16, 96
SIZES = {
    **{"L": LAYERS, "V": VOCAB, "d": D, "H": HEADS, "K": KV_HEADS, "s": SIZE},
    **{"f": HIDDEN, "Hs": HEADS * SIZE, "Ks": KV_HEADS * SIZE},
}
Table = dict[str, str]

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
# consolidated.safetensors of Mistral AI, and Meta's own files.
CONSOLIDATED: Table = {
    "tok_embeddings.weight": "V d",
    "layers.{n}.attention.wq.weight": "Hs d",
    "layers.{n}.attention.wk.weight": "Ks d",
    "layers.{n}.attention.wv.weight": "Ks d",
    "layers.{n}.attention.wo.weight": "d Hs",
    "layers.{n}.feed_forward.w1.weight": "f d",
    "layers.{n}.feed_forward.w3.weight": "f d",
    "layers.{n}.feed_forward.w2.weight": "d f",
    "layers.{n}.attention_norm.weight": "d",
    "layers.{n}.ffn_norm.weight": "d",
    "norm.weight": "d",
    "output.weight": "V d",
}
TUNIX: Table = {
    "embedder/input_embedding": "V d",
    "layers/{n}/attn/q_proj/w": "d H s",
    "layers/{n}/attn/k_proj/w": "d K s",
    "layers/{n}/attn/v_proj/w": "d K s",
    "layers/{n}/attn/o_proj/w": "H s d",
    "layers/{n}/mlp/gate_proj/kernel": "d f",
    "layers/{n}/mlp/up_proj/kernel": "d f",
    "layers/{n}/mlp/down_proj/kernel": "f d",
    "layers/{n}/input_layernorm/w": "d",
    "layers/{n}/post_attention_layernorm/w": "d",
    "final_norm/w": "d",
    "lm_head/w": "d V",
}
EASYLM: Table = {
    "transformer/wte/embedding": "V d",
    "transformer/h/{n}/attention/wq/kernel": "d Hs",
    "transformer/h/{n}/attention/wk/kernel": "d Ks",
    "transformer/h/{n}/attention/wv/kernel": "d Ks",
    "transformer/h/{n}/attention/wo/kernel": "Hs d",
    "transformer/h/{n}/feed_forward/w1/kernel": "d f",
    "transformer/h/{n}/feed_forward/w3/kernel": "d f",
    "transformer/h/{n}/feed_forward/w2/kernel": "f d",
    "transformer/h/{n}/attention_norm/kernel": "d",
    "transformer/h/{n}/ffn_norm/kernel": "d",
    "transformer/ln_f/kernel": "d",
    "lm_head/kernel": "d V",
}
KERAS_HUB: Table = {
    "token_embedding/embeddings": "V d",
    "transformer_layer_{n}/self_attention/query/kernel": "d H s",
    "transformer_layer_{n}/self_attention/key/kernel": "d K s",
    "transformer_layer_{n}/self_attention/value/kernel": "d K s",
    "transformer_layer_{n}/self_attention/attention_output/kernel": "H s d",
    "transformer_layer_{n}/feedforward_gate_dense/kernel": "d f",
    "transformer_layer_{n}/feedforward_intermediate_dense/kernel": "d f",
    "transformer_layer_{n}/feedforward_output_dense/kernel": "f d",
    "transformer_layer_{n}/self_attention_layernorm/scale": "d",
    "transformer_layer_{n}/feedforward_layernorm/scale": "d",
    "sequence_output_layernorm/scale": "d",
    "token_embedding/reverse_embeddings": "d V",
}
MAXTEXT: Table = {
    "params/token_embedder/embedding": "V d",
    "params/decoder/layers_{n}/self_attention/query/kernel": "d H s",
    "params/decoder/layers_{n}/self_attention/key/kernel": "d K s",
    "params/decoder/layers_{n}/self_attention/value/kernel": "d K s",
    "params/decoder/layers_{n}/self_attention/out/kernel": "H s d",
    "params/decoder/layers_{n}/mlp/wi_0/kernel": "d f",
    "params/decoder/layers_{n}/mlp/wi_1/kernel": "d f",
    "params/decoder/layers_{n}/mlp/wo/kernel": "f d",
    "params/decoder/layers_{n}/pre_self_attention_layer_norm/scale": "d",
    "params/decoder/layers_{n}/post_self_attention_layer_norm/scale": "d",
    "params/decoder/decoder_norm/scale": "d",
    "params/decoder/logits_dense/kernel": "d V",
}
JAX_LLM_EXAMPLES: Table = {
    "embedding": "V d",
    "layers/{n}/q": "d H s",
    "layers/{n}/k": "d K s",
    "layers/{n}/v": "d K s",
    "layers/{n}/o": "H s d",
    "layers/{n}/w_gate": "d f",
    "layers/{n}/w_up": "d f",
    "layers/{n}/w_down": "f d",
    "layers/{n}/attn_pre_gamma": "d",
    "layers/{n}/attn_post_gamma": "d",
    "gamma_final": "d",
    "lm_head": "d V",
}
# The names of Flax's own layers, as the examples of this project have them.
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


def shapes(table: Table, **sizes: int) -> Shapes:
    """The shapes of a spelling; a family may have other sizes."""
    return written_out(table, SIZES | sizes)


def as_flax(table: Table, norm: str) -> Table:
    """The modules of Flax with the names of Hugging Face: kernels are (in, out).

    Args:
        table: names and dims in Hugging Face's files.
        norm: the leaf of norms: `weight` in transformers 4, `kernel` in EasyDeL.
    """
    found: Table = {}
    for name, dims in table.items():
        stem, _, leaf = name.replace(".", "/").rpartition("/")
        if "embed" in stem:
            leaf = "embedding"
        elif leaf == "weight" and " " in dims:
            leaf, dims = "kernel", " ".join(dims.split()[::-1])
        elif leaf == "weight":
            leaf = norm
        found[f"{stem}/{leaf}"] = dims
    return found


def flat_heads(table: Table) -> Table:
    """The same with the heads side by side."""
    return {
        path: dims.replace("H s", "Hs").replace("K s", "Ks")
        for path, dims in table.items()
    }


def stacked(table: Table, dim: int = 0) -> Table:
    """The same with the arrays of all layers as one, stacked along a dim."""
    found: Table = {}
    for path, dims in table.items():
        names = dims.split()
        if "{n}" in path:
            names.insert(dim, "L")
        path = path.replace("layers/{n}", "layers").replace("layers_{n}", "layers")
        found[path] = " ".join(names)
    return found


def tied(table: Table) -> Table:
    """The same without a head, which is the embedding."""
    heads = ("lm_head", "output.", "logits_dense", "reverse_embeddings")
    return {
        path: dims
        for path, dims in table.items()
        if not any(head in path for head in heads)
    }
