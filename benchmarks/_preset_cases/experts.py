"""Families with experts: models of two layers with published sizes, and tables.

The names of the models are those of Flax's own layers. Each token goes to a few experts
by one-hot tensors, with room in each expert for its share of a sequence. A table says
for each role what its source says, with the source's axes renamed to those of presets.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import flax_layoutmap as flm
from _preset_cases import Case, Table
from _preset_cases.dense import BFLOAT16, Gated, Layer, linear, norm


class Experts(nnx.Module):
    """The weights of all experts as one array each."""

    def __init__(self, sizes: dict[str, Any], rngs: nnx.Rngs):
        def each(inputs: int, outputs: int, form: str) -> nnx.Einsum:
            shape = (sizes["experts"], inputs, outputs)
            bias = (shape[0], outputs) if sizes.get("bias") else None
            return nnx.Einsum(form, shape, bias, rngs=rngs, **BFLOAT16)

        d, width = sizes["d"], sizes["width"]
        self.gate = each(d, width, "ebcd,edf->ebcf")
        self.up = each(d, width, "ebcd,edf->ebcf")
        self.down = each(width, d, "ebcf,efd->ebcd")

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Sparse(nnx.Module):
    """A router, experts, and one for all tokens where the family has it."""

    def __init__(self, sizes: dict[str, Any], rngs: nnx.Rngs):
        self.count, self.chosen = sizes["experts"], sizes["chosen"]
        self.router = linear(sizes["d"], self.count, rngs, sizes.get("bias", False))
        self.experts = Experts(sizes, rngs)
        shared = sizes.get("shared")
        self.shared_experts = Gated(sizes["d"], shared, rngs) if shared else None

    def __call__(self, x: jax.Array) -> jax.Array:
        room = x.shape[1] * self.chosen // self.count
        scores = jax.nn.softmax(self.router(x).astype(jnp.float32))
        best, chosen = jax.lax.top_k(scores, self.chosen)
        picked = jax.nn.one_hot(chosen, self.count)
        order = (jnp.cumsum(picked.sum(2), 1)[:, :, None] * picked - 1).astype(int)
        places = jax.nn.one_hot(order, room, dtype=x.dtype)
        back = jnp.einsum("btk,btkec->btec", best.astype(x.dtype), places)
        sent = jnp.einsum("btec,btd->ebcd", places.sum(2), x)
        sent = flm.distribute_tensor(sent, "by_expert")
        made = self.experts(flm.distribute_tensor(sent, "experts"))
        made = flm.distribute_tensor(made, "experts")
        made = flm.distribute_tensor(made, "by_expert")
        made = jnp.einsum("btec,ebcd->btd", back, made)
        return made if self.shared_experts is None else made + self.shared_experts(x)


class Attention(nnx.Module):
    """Attention with groups; with norms, or with biases and sinks."""

    def __init__(self, sizes: dict[str, Any], rngs: nnx.Rngs):
        d, heads, size = sizes["d"], sizes["heads"], sizes["size"]
        bias = sizes.get("bias", False)
        self.query = linear(d, (heads, size), rngs, bias)
        self.key = linear(d, (sizes["kv_heads"], size), rngs, bias)
        self.value = linear(d, (sizes["kv_heads"], size), rngs, bias)
        self.out = linear((heads, size), d, rngs, bias)
        normed = sizes.get("norms", False)
        self.query_norm = norm(size, rngs) if normed else None
        self.key_norm = norm(size, rngs) if normed else None
        self.sinks = nnx.Param(jnp.zeros(heads, jnp.bfloat16)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        if self.sinks is not None:  # which take a share of each head's weights
            mixed = mixed * nnx.sigmoid(self.sinks[...])[:, None]
        return self.out(mixed)


class LatentAttention(nnx.Module):
    """Queries, keys and values of a low rank; the heads share keys with positions."""

    def __init__(self, sizes: dict[str, Any], rngs: nnx.Rngs):
        d, heads, size = sizes["d"], sizes["heads"], sizes["size"]
        self.rank, self.rotary = sizes["rank"], sizes["rotary"]
        self.q_a = linear(d, sizes["query_rank"], rngs)
        self.q_a_norm = norm(sizes["query_rank"], rngs)
        self.q_b = linear(sizes["query_rank"], (heads, size + self.rotary), rngs)
        self.kv_a = linear(d, self.rank + self.rotary, rngs)
        self.kv_a_norm = norm(self.rank, rngs)
        self.kv_b = linear(self.rank, (heads, 2 * size), rngs)
        self.out = linear((heads, size), d, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        query = self.q_b(self.q_a_norm(self.q_a(x)))
        latent, shared = jnp.split(self.kv_a(x), [self.rank], -1)
        key, value = jnp.split(self.kv_b(self.kv_a_norm(latent)), 2, -1)
        shared = jnp.broadcast_to(shared[:, :, None], (*key.shape[:3], self.rotary))
        key = jnp.concatenate([key, shared], -1)
        scores = jnp.einsum("bthk,bshk->bhts", query, key).astype(jnp.float32)
        causal = jnp.tri(x.shape[1], dtype=bool)
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e30)).astype(x.dtype)
        return self.out(jnp.einsum("bhts,bshk->bthk", weights, value))


class Decoder(nnx.Module):
    """Two layers with experts; the first one without where the family has such."""

    def __init__(self, sizes: dict[str, Any], rngs: nnx.Rngs):
        d, hidden = sizes["d"], sizes.get("hidden")
        attention = LatentAttention if "rank" in sizes else Attention
        self.embed = nnx.Embed(sizes["vocab"], d, rngs=rngs, **BFLOAT16)
        first = Gated(d, hidden, rngs) if hidden else Sparse(sizes, rngs)
        self.layers = nnx.List(
            Layer(d, attention(sizes, rngs), mlp, rngs)
            for mlp in (first, Sparse(sizes, rngs))
        )
        self.norm = norm(d, rngs)
        self.lm_head = linear(d, sizes["vocab"], rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


# ------------------------------------------------------------- published tables

COLUMN, ROW = ("fsdp", "tensor"), ("tensor", "fsdp")


def table(embed: Any, column: Any, row: Any, head: Any, wide: Any, down: Any) -> Table:
    """The table of a decoder by roles: matrices by columns and by rows, and experts."""
    return {
        "embed/embedding": embed,
        "(query|key|value|q_b|kv_b)/kernel": (*column, None),
        "out/kernel": (row[0], None, row[1]),
        "(q_a|kv_a)/kernel": (column[0], None),
        "(gate|up)/kernel": column,
        "down/kernel": row,
        "router/kernel": (column[0], None),
        "/experts/(gate|up)/kernel": wide,
        "/experts/down/kernel": down,
        "lm_head/kernel": head,
        "norm/scale": None,
        "(bias|sinks)$": None,
        "(query|key|value)/bias": ("tensor", None),
        "/experts/(gate|up)/bias": (wide[0], wide[2]),
        "/experts/down/bias": (wide[0], None),
    }


EASYDEL = table(COLUMN, COLUMN, ROW, COLUMN, (None, *COLUMN), (None, *ROW)) | {
    "(q_a|kv_a|router)/kernel": COLUMN,
}
# Its axis `fsdp` is called `expert` here, which presets put on all other weights, too.
TUNIX = table(
    ("tensor", "expert"),
    ("expert", "tensor"),
    ("tensor", "expert"),
    ("expert", "tensor"),
    ("expert", None, "tensor"),
    ("expert", "tensor", None),
) | {"norm/scale": ("tensor",), "router/kernel": None}
BOTH = ("fsdp", "expert")
MAXTEXT = table(
    ("tensor", BOTH),
    (BOTH, "tensor"),
    ("tensor", BOTH),
    (BOTH, "tensor"),
    ("expert", "fsdp", "tensor"),
    ("expert", "tensor", "fsdp"),
) | {"(^|/)(attention_norm|mlp_norm|norm)/scale": ("tensor",)}
# DeepSeek V3's plan replicates attention; this is the plan of DeepSeek V2.
TRANSFORMERS = table(
    ("tensor", None),
    (None, "tensor"),
    ("tensor", None),
    (None, "tensor"),
    (None, None, "tensor"),
    (None, "tensor", None),
)
# Of 5.0.0: later ones have no layouts for gpt-oss but the embedding and the head.
TRANSFORMERS_GPT_OSS = TRANSFORMERS | {
    "embed/embedding": None,
    "/experts/": ("tensor", ...),
    "sinks$": ("tensor",),
}
EASYDEL_EXPERT = EASYDEL | {
    "/experts/(gate|up)/kernel": ("expert", *COLUMN),
    "/experts/down/kernel": ("expert", *ROW),
}

EASYDEL_AT = "EasyDeL da8f9c0d, modules/{0}/{0}_configuration.py"
TUNIX_AT = "Tunix c7d8950f, models/qwen3/model.py"
MAXTEXT_AT = "MaxText e591f30, configs/base.yml"
TUNIX_STREAM = ("expert", None, "tensor")
TRANSFORMERS_AT = "transformers {1}, models/{0}/configuration_{0}.py"

# ------------------------------------------------------------------------- cases

GRID, WITH_EXPERTS = "fsdp=4,tensor=4", "fsdp=2,expert=4,tensor=2"
HEADS = "fsdp=1,tensor=4"
PLAN = ("5.24.0", TRANSFORMERS, (None, "fsdp", None, None))
OF_EXPERTS = (TRANSFORMERS_GPT_OSS, ("tensor", "fsdp", None, None))
MIXTRAL = {
    **{"d": 4096, "vocab": 32000, "heads": 32, "kv_heads": 8, "size": 128},
    **{"width": 14336, "experts": 8, "chosen": 2},
}
QWEN = {
    **{"d": 2048, "vocab": 151936, "heads": 32, "kv_heads": 4, "size": 128},
    **{"width": 768, "experts": 128, "chosen": 8, "norms": True},
}
DEEPSEEK = {
    **{"d": 7168, "vocab": 129280, "heads": 128, "size": 128, "rotary": 64},
    **{"query_rank": 1536, "rank": 512, "hidden": 18432},
    **{"width": 2048, "experts": 256, "chosen": 8, "shared": 2048},
}
GPT_OSS = {
    **{"d": 2880, "vocab": 201088, "heads": 64, "kv_heads": 8, "size": 64},
    **{"width": 2880, "experts": 32, "chosen": 4, "bias": True},
}


def cases(
    family: str,
    model: str,
    sizes: dict[str, Any],
    plan: tuple[str, str, Table, Any] | None = None,
) -> list[Case]:
    """A family without an axis for experts, with one, and with heads alone."""
    at, there = EASYDEL_AT.format(family), ("expert", "fsdp", None, None)
    both = {at: (EASYDEL_EXPERT, None), MAXTEXT_AT: (MAXTEXT, None)}
    case = Case(
        family,
        model,
        functools.partial(Decoder, sizes),
        GRID,
        {at: (EASYDEL, None)},
        variant="whole_experts",
        tokens={at: (None, "fsdp", None, None)},
    )
    tokens = dict.fromkeys(both, there)
    found = [
        case,
        dataclasses.replace(case, mesh=WITH_EXPERTS, tables=both, tokens=tokens),
    ]
    if plan is not None:
        name, version, own, stream = plan
        at = TRANSFORMERS_AT.format(name, version)
        alone, tokens = {at: (own, None)}, {at: stream}
        found.append(dataclasses.replace(case, mesh=HEADS, tables=alone, tokens=tokens))
    return found


CASES = [
    *cases("mixtral", "Mixtral 8x7B", MIXTRAL, ("mixtral", *PLAN)),
    *cases("qwen3_moe", "Qwen3 30B-A3B", QWEN, ("qwen3_moe", *PLAN)),
    Case(
        "qwen3_moe",
        "Qwen3 30B-A3B",
        functools.partial(Decoder, QWEN),
        "expert=4,tensor=4",
        {TUNIX_AT: (TUNIX, TUNIX_STREAM)},
        variant="whole_experts",
        tokens={TUNIX_AT: ("expert", None, None, None)},
    ),
    *cases("deepseek_v3", "DeepSeek V3", DEEPSEEK, ("deepseek_v2", *PLAN)),
    *cases("gpt_oss", "gpt-oss 20B", GPT_OSS, ("gpt_oss", "5.0.0", *OF_EXPERTS)),
]
