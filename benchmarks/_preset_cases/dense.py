"""Dense families: models of two layers with published sizes, and published tables.

The names of the models are those of Flax's own layers, and of Gemma, GPT-2 and T5 where
these have arrays of another form. A table says for each role what its source says, with
other names of axes: what splits batch and parameters is `fsdp`, the other `tensor`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from _preset_cases import Case, Table

BFLOAT16: Any = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}


def linear(fan_in: Any, fan_out: Any, rngs: nnx.Rngs, bias: bool = False) -> Any:
    axis = tuple(range(-len(fan_in), 0)) if isinstance(fan_in, tuple) else -1
    return nnx.LinearGeneral(
        fan_in, fan_out, axis=axis, use_bias=bias, rngs=rngs, **BFLOAT16
    )


def norm(size: int, rngs: nnx.Rngs) -> Any:
    return nnx.RMSNorm(size, rngs=rngs, **BFLOAT16)


# ------------------------------------------------- Llama, Mistral, Qwen 2 and 3


class Attention(nnx.Module):
    """Attention with groups; with biases or norms of queries and keys."""

    def __init__(self, sizes: dict[str, Any], rngs: nnx.Rngs):
        d, size, bias = sizes["d"], sizes["size"], sizes.get("bias", False)
        self.query = linear(d, (sizes["heads"], size), rngs, bias)
        self.key = linear(d, (sizes["kv_heads"], size), rngs, bias)
        self.value = linear(d, (sizes["kv_heads"], size), rngs, bias)
        self.out = linear((sizes["heads"], size), d, rngs)
        normed = sizes.get("norms", False)
        self.query_norm = norm(size, rngs) if normed else None
        self.key_norm = norm(size, rngs) if normed else None

    def __call__(self, x: jax.Array) -> jax.Array:
        query, key = self.query(x), self.key(x)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        mixed = jax.nn.dot_product_attention(query, key, self.value(x), is_causal=True)
        return self.out(mixed)


class Gated(nnx.Module):
    def __init__(self, d: int, hidden: int, rngs: nnx.Rngs):
        self.gate = linear(d, hidden, rngs)
        self.up = linear(d, hidden, rngs)
        self.down = linear(hidden, d, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    """A layer with norms before its parts."""

    def __init__(self, d: int, attention: Any, mlp: Any, rngs: nnx.Rngs):
        self.attention, self.mlp = attention, mlp
        self.attention_norm, self.mlp_norm = norm(d, rngs), norm(d, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nnx.Module):
    def __init__(self, sizes: dict[str, Any], rngs: nnx.Rngs):
        d = sizes["d"]
        self.embed = nnx.Embed(sizes["vocab"], d, rngs=rngs, **BFLOAT16)
        self.layers = nnx.List(
            Layer(d, Attention(sizes, rngs), Gated(d, sizes["hidden"], rngs), rngs)
            for _ in range(2)
        )
        self.norm = norm(d, rngs)
        tied = sizes.get("tied", False)
        self.lm_head = None if tied else linear(d, sizes["vocab"], rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        return self.embed.attend(x) if self.lm_head is None else self.lm_head(x)


# ------------------------------------------------------------------------- Gemma


class Einsum(nnx.Module):
    def __init__(self, shape: tuple[int, ...], rngs: nnx.Rngs):
        draw = nnx.initializers.normal(0.02)
        self.w = nnx.Param(draw(rngs.params(), shape, jnp.bfloat16))

    def __call__(self, form: str, x: jax.Array) -> jax.Array:
        return jnp.einsum(form, x, self.w[...])


class GemmaAttention(nnx.Module):
    def __init__(self, sizes: dict[str, Any], rngs: nnx.Rngs):
        d, size = sizes["d"], sizes["size"]
        self.q_einsum = Einsum((sizes["heads"], d, size), rngs)
        self.kv_einsum = Einsum((2, sizes["kv_heads"], d, size), rngs)
        self.attn_vec_einsum = Einsum((sizes["heads"], size, d), rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        query = self.q_einsum("btd,hds->bths", x)
        key, value = self.kv_einsum("btd,ckds->cbtks", x)
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return self.attn_vec_einsum("bths,hsd->btd", mixed)


class GemmaGates(nnx.Module):
    """Gate and up in one array, (2, hidden, model) or (2, model, hidden)."""

    def __init__(self, d: int, hidden: int, transposed: bool, rngs: nnx.Rngs):
        draw = nnx.initializers.normal(0.02)
        shape = (2, hidden, d) if transposed else (2, d, hidden)
        self.form = "btd,cfd->cbtf" if transposed else "btd,cdf->cbtf"
        self.gating_einsum = nnx.Param(draw(rngs.params(), shape, jnp.bfloat16))
        self.linear = nnx.Param(draw(rngs.params(), (hidden, d), jnp.bfloat16))

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.einsum(self.form, x, self.gating_einsum[...])
        return (nnx.gelu(gate) * up) @ self.linear[...]


class Gemma(nnx.Module):
    def __init__(self, sizes: dict[str, Any], rngs: nnx.Rngs):
        d = sizes["d"]
        transposed = sizes.get("transposed", True)
        self.embed = nnx.Embed(sizes["vocab"], d, rngs=rngs, **BFLOAT16)
        self.layers = nnx.List(
            Layer(
                d,
                GemmaAttention(sizes, rngs),
                GemmaGates(d, sizes["hidden"], transposed, rngs),
                rngs,
            )
            for _ in range(2)
        )
        self.final_norm = norm(d, rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(self.final_norm(x))


# ------------------------------------------------------------------------- GPT-2


class GPT2Attention(nnx.Module):
    def __init__(self, sizes: dict[str, Any], rngs: nnx.Rngs):
        self.heads = sizes["heads"]
        self.c_attn = linear(sizes["d"], 3 * sizes["d"], rngs, bias=True)
        self.c_proj = linear(sizes["d"], sizes["d"], rngs, bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        apart = jnp.split(self.c_attn(x), 3, axis=-1)
        split = [one.reshape(*one.shape[:2], self.heads, -1) for one in apart]
        mixed = jax.nn.dot_product_attention(*split, is_causal=True)
        return self.c_proj(mixed.reshape(x.shape))


class GPT2MLP(nnx.Module):
    def __init__(self, d: int, rngs: nnx.Rngs):
        self.c_fc = linear(d, 4 * d, rngs, bias=True)
        self.c_proj = linear(4 * d, d, rngs, bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.c_proj(nnx.gelu(self.c_fc(x)))


class GPT2Block(nnx.Module):
    def __init__(self, sizes: dict[str, Any], rngs: nnx.Rngs):
        self.ln_1 = nnx.LayerNorm(sizes["d"], rngs=rngs, **BFLOAT16)
        self.attn = GPT2Attention(sizes, rngs)
        self.ln_2 = nnx.LayerNorm(sizes["d"], rngs=rngs, **BFLOAT16)
        self.mlp = GPT2MLP(sizes["d"], rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nnx.Module):
    def __init__(self, sizes: dict[str, Any], rngs: nnx.Rngs):
        d = sizes["d"]
        self.wte = nnx.Embed(sizes["vocab"], d, rngs=rngs, **BFLOAT16)
        self.wpe = nnx.Embed(sizes["positions"], d, rngs=rngs, **BFLOAT16)
        self.h = nnx.List(GPT2Block(sizes, rngs) for _ in range(2))
        self.ln_f = nnx.LayerNorm(d, rngs=rngs, **BFLOAT16)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.wte(tokens) + self.wpe(jnp.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.wte.attend(self.ln_f(x))


# ---------------------------------------------------------------------------- T5


class T5Attention(nnx.Module):
    def __init__(self, sizes: dict[str, Any], rngs: nnx.Rngs):
        d, self.heads = sizes["d"], sizes["heads"]
        wide = sizes["heads"] * sizes["size"]
        self.query = linear(d, wide, rngs)
        self.key = linear(d, wide, rngs)
        self.value = linear(d, wide, rngs)
        self.out = linear(wide, d, rngs)

    def __call__(self, x: jax.Array, other: jax.Array, bias: Any, causal: bool) -> Any:
        flat = (self.query(x), self.key(other), self.value(other))
        split = [one.reshape(*one.shape[:2], self.heads, -1) for one in flat]
        mixed = jax.nn.dot_product_attention(*split, bias=bias, is_causal=causal)
        return self.out(mixed.reshape(*x.shape[:2], -1))


class T5MLP(nnx.Module):
    def __init__(self, d: int, hidden: int, rngs: nnx.Rngs):
        self.wi_0 = linear(d, hidden, rngs)
        self.wi_1 = linear(d, hidden, rngs)
        self.wo = linear(hidden, d, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.wo(nnx.gelu(self.wi_0(x)) * self.wi_1(x))


class T5Layer(nnx.Module):
    def __init__(self, sizes: dict[str, Any], is_decoder: bool, rngs: nnx.Rngs):
        d = sizes["d"]
        self.self_attention = T5Attention(sizes, rngs)
        self.self_norm = norm(d, rngs)
        self.encoder_decoder_attention = (
            T5Attention(sizes, rngs) if is_decoder else None
        )
        self.cross_norm = norm(d, rngs) if is_decoder else None
        self.mlp, self.mlp_norm = T5MLP(d, sizes["hidden"], rngs), norm(d, rngs)

    def __call__(self, x: jax.Array, bias: jax.Array, encoded: Any = None) -> Any:
        y = self.self_norm(x)
        x = x + self.self_attention(y, y, bias, encoded is not None)
        if self.encoder_decoder_attention is not None and self.cross_norm is not None:
            y = self.cross_norm(x)
            x = x + self.encoder_decoder_attention(y, encoded, None, False)
        return x + self.mlp(self.mlp_norm(x))


class T5Side(nnx.Module):
    def __init__(self, sizes: dict[str, Any], is_decoder: bool, rngs: nnx.Rngs):
        draw = nnx.initializers.normal(0.02)
        shape = (sizes["heads"], 32)
        self.rel_embedding = nnx.Param(draw(rngs.params(), shape, jnp.bfloat16))
        self.layers = nnx.List(T5Layer(sizes, is_decoder, rngs) for _ in range(2))
        self.norm = norm(sizes["d"], rngs)

    def __call__(self, x: jax.Array, encoded: Any = None) -> jax.Array:
        at = jnp.arange(x.shape[1])
        buckets = jnp.clip(at[:, None] - at[None, :], 0, 31)
        bias = self.rel_embedding[...][:, buckets][None]
        for layer in self.layers:
            x = layer(x, bias, encoded)
        return self.norm(x)


class T5(nnx.Module):
    def __init__(self, sizes: dict[str, Any], rngs: nnx.Rngs):
        d = sizes["d"]
        self.token_embedder = nnx.Embed(sizes["vocab"], d, rngs=rngs, **BFLOAT16)
        self.encoder = T5Side(sizes, False, rngs)
        self.decoder = T5Side(sizes, True, rngs)
        self.logits_dense = linear(d, sizes["vocab"], rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.token_embedder(tokens)
        return self.logits_dense(self.decoder(x, self.encoder(x)))


# ------------------------------------------------------------- published tables

COLUMN, ROW = ("fsdp", "tensor"), ("tensor", "fsdp")
Q, OUT = ("fsdp", "tensor", None), ("tensor", None, "fsdp")
# Where the residual stream is, of sources that say it; the others leave it to XLA.
BATCH, BATCH_AND_MODEL = ("fsdp", None, None), ("fsdp", None, "tensor")


def decoder(
    embed: Any, heads: Any, out: Any, wide: Any, down: Any, head: Any, norms: Any = None
) -> Table:
    """The table of a decoder by roles."""
    return {
        "embed/embedding": embed,
        "(query|key|value)/kernel": heads,
        "out/kernel": out,
        "(gate|up)/kernel": wide,
        "down/kernel": down,
        "lm_head/kernel": head,
        "(^|/)(attention_norm|mlp_norm|norm)/scale": norms,
    }


EASYLM = decoder(ROW, Q, OUT, COLUMN, ROW, COLUMN)
EASYDEL = decoder(COLUMN, Q, OUT, COLUMN, ROW, COLUMN)
TUNIX = decoder(ROW, Q, OUT, COLUMN, ROW, COLUMN, ("tensor",))
KERAS_HUB = decoder(ROW, ("tensor", "fsdp", None), OUT, COLUMN, ROW, None)
EASYLM_AT = "EasyLM fe5b2c35, models/llama/llama_model.py"
EASYDEL_AT = "EasyDeL da8f9c0d, modules/{0}/{0}_configuration.py"
TUNIX_AT = "Tunix c7d8950f, models/{0}/model.py"
KERAS_AT = "KerasHub 71453d08, models/{0}/{0}_backbone.py"
EASYDEL_MORE: Table = {"bias": None, "(query|key)_norm/scale": None}
BIAS_OVER_HEADS: Table = {"(query|key|value)/bias": ("tensor", None)}
# On the head dim, which is the same for all heads.
TUNIX_NORMS: Table = {"(query|key)_norm/scale": ("tensor",)}
BONSAI = decoder(ROW, ("tensor", "fsdp", None), OUT, COLUMN, ROW, COLUMN, ("tensor",))

GEMMA_TUNIX: Table = {
    "embed/embedding": ROW,
    "q_einsum/w": ("tensor", "fsdp", None),
    "kv_einsum/w": (None, "tensor", "fsdp", None),
    "attn_vec_einsum/w": OUT,
    "gating_einsum": (None, "tensor", "fsdp"),
    "mlp/linear": ROW,
    "norm/scale": ("tensor",),
}
GEMMA_ONE_HEAD = GEMMA_TUNIX | {"kv_einsum/w": (None, None, "fsdp", None)}
# EasyDeL's heads are side by side, and its embedding is by columns.
GEMMA_EASYDEL = GEMMA_TUNIX | {"embed/embedding": COLUMN, "norm/scale": None}
GEMMA_KERAS = GEMMA_TUNIX | {"norm/scale": None}
IN_OUT: Table = {"gating_einsum": (None, "fsdp", "tensor")}

# EasyDeL's kernels are (out, in); its rules name their dims as if they were (in, out).
GPT2_EASYDEL: Table = {
    "wte/embedding": (None, "tensor"),  # `fsdp` does not divide the rows
    "wpe/embedding": None,
    "(c_attn|c_fc)/kernel": ROW,
    "c_proj/kernel": COLUMN,
    "bias": None,
    "ln_.*/scale": None,
}
GPT2_AS_MEANT = GPT2_EASYDEL | {
    "(c_attn|c_fc)/kernel": COLUMN,
    "c_proj/kernel": ROW,
}

T5X: Table = {
    "token_embedder/embedding": ROW,
    "(query|key|value)/kernel": COLUMN,
    "out/kernel": ROW,
    "wi_[01]/kernel": COLUMN,
    "wo/kernel": ROW,
    "rel_embedding": ("tensor", None),
    "norm/scale": ("fsdp",),
    "logits_dense/kernel": COLUMN,
}
T5X_MODEL = T5X | {"norm/scale": ("tensor",)}
T5X_AT = "T5X cc342d41, partitioning.py, parameter dims 2"

# ------------------------------------------------------------------------- cases

LLAMA_8B = {"vocab": 128256, "d": 4096, "heads": 32, "kv_heads": 8, "size": 128}
LLAMA_8B |= {"hidden": 14336}
LLAMA_1B = {"vocab": 128256, "d": 2048, "heads": 32, "kv_heads": 8, "size": 64}
LLAMA_1B |= {"hidden": 8192, "tied": True}
MISTRAL_7B = LLAMA_8B | {"vocab": 32000}
QWEN2_7B = {"vocab": 152064, "d": 3584, "heads": 28, "kv_heads": 4, "size": 128}
QWEN2_7B |= {"hidden": 18944, "bias": True}
QWEN3_8B = {"vocab": 151936, "d": 4096, "heads": 32, "kv_heads": 8, "size": 128}
QWEN3_8B |= {"hidden": 12288, "norms": True}
GEMMA3_4B = {"vocab": 262144, "d": 2560, "heads": 8, "kv_heads": 4, "size": 256}
GEMMA3_4B |= {"hidden": 10240}
GEMMA3_1B = {"vocab": 262144, "d": 1152, "heads": 4, "kv_heads": 1, "size": 256}
GEMMA3_1B |= {"hidden": 6912}
GEMMA2_2B = {"vocab": 256128, "d": 2304, "heads": 8, "kv_heads": 4, "size": 256}
GEMMA2_2B |= {"hidden": 9216, "transposed": False}
GPT2_MEDIUM = {"vocab": 50257, "positions": 1024, "d": 1024, "heads": 16}
T5_XL = {"vocab": 32128, "d": 2048, "heads": 32, "size": 64, "hidden": 5120}


def made(model: Callable[..., nnx.Module], sizes: dict[str, Any]) -> Any:
    """What makes the model."""
    return functools.partial(model, sizes)


CASES = [
    Case(
        "llama",
        "Llama 3 8B",
        made(Decoder, LLAMA_8B),
        "fsdp=8,tensor=8",
        {
            EASYLM_AT: (EASYLM, BATCH_AND_MODEL),
            EASYDEL_AT.format("llama"): (EASYDEL, BATCH),
            TUNIX_AT.format("llama3"): (TUNIX, BATCH_AND_MODEL),
            KERAS_AT.format("llama"): (KERAS_HUB, None),
        },
        variant="untied",
    ),
    Case(
        "llama",
        "Llama 3.2 1B, tied",
        made(Decoder, LLAMA_1B),
        "fsdp=8,tensor=8",
        {
            EASYLM_AT: (EASYLM, BATCH_AND_MODEL),
            EASYDEL_AT.format("llama"): (EASYDEL, BATCH),
            TUNIX_AT.format("llama3"): (TUNIX, BATCH_AND_MODEL),
            KERAS_AT.format("llama"): (KERAS_HUB, None),
        },
    ),
    Case(
        "mistral",
        "Mistral 7B",
        made(Decoder, MISTRAL_7B),
        "fsdp=8,tensor=8",
        {EASYDEL_AT.format("mistral"): (EASYDEL, BATCH)},
    ),
    Case(
        "qwen2",
        "Qwen2 7B",
        made(Decoder, QWEN2_7B),
        "fsdp=16,tensor=4",
        {
            EASYDEL_AT.format("qwen2"): (EASYDEL | EASYDEL_MORE, BATCH),
            TUNIX_AT.format("qwen2"): (TUNIX | BIAS_OVER_HEADS, BATCH_AND_MODEL),
            KERAS_AT.format("qwen"): (KERAS_HUB | EASYDEL_MORE, None),
        },
        variant="untied",
    ),
    Case(
        "qwen3",
        "Qwen3 8B",
        made(Decoder, QWEN3_8B),
        "fsdp=8,tensor=8",
        {
            EASYDEL_AT.format("qwen3"): (EASYDEL | EASYDEL_MORE, BATCH),
            TUNIX_AT.format("qwen3"): (TUNIX | TUNIX_NORMS, BATCH_AND_MODEL),
            "bonsai 3628425, models/qwen3/modeling.py": (BONSAI | EASYDEL_MORE, BATCH),
        },
        variant="untied",
    ),
    Case(
        "gemma",
        "Gemma 3 4B",
        made(Gemma, GEMMA3_4B),
        "fsdp=16,tensor=4",
        {
            TUNIX_AT.format("gemma3"): (GEMMA_TUNIX, BATCH_AND_MODEL),
            EASYDEL_AT.format("gemma3"): (GEMMA_EASYDEL, BATCH),
        },
    ),
    Case(
        "gemma",
        "Gemma 3 1B, one head of keys",
        made(Gemma, GEMMA3_1B),
        "fsdp=8,tensor=4",
        {TUNIX_AT.format("gemma3"): (GEMMA_ONE_HEAD, BATCH_AND_MODEL)},
    ),
    Case(
        "gemma1",
        "Gemma 2 2B",
        made(Gemma, GEMMA2_2B),
        "fsdp=16,tensor=4",
        {
            TUNIX_AT.format("gemma"): (GEMMA_TUNIX | IN_OUT, BATCH_AND_MODEL),
            EASYDEL_AT.format("gemma2"): (GEMMA_EASYDEL | IN_OUT, BATCH),
            KERAS_AT.format("gemma"): (GEMMA_KERAS | IN_OUT, None),
        },
    ),
    Case(
        "gpt2",
        "GPT-2 medium",
        made(GPT2, GPT2_MEDIUM),
        "fsdp=8,tensor=8",
        {
            EASYDEL_AT.format("gpt2"): (GPT2_EASYDEL, BATCH),
            "the same, as its names are meant": (GPT2_AS_MEANT, BATCH),
        },
    ),
    Case(
        "t5",
        "T5 1.1 XL",
        made(T5, T5_XL),
        "fsdp=8,tensor=8",
        {
            T5X_AT: (T5X, BATCH),
            f"{T5X_AT}, activation dims 2": (T5X_MODEL, BATCH_AND_MODEL),
        },
        variant="untied",
    ),
]
