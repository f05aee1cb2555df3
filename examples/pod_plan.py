"""Plan Llama-like decoders on TPU slices without devices, about a second each.

    python examples/pod_plan.py                  1B, 8B and 70B on three topologies
    python examples/pod_plan.py --model=8B       one of them
    python examples/pod_plan.py --compile        the first one by the compiler too

No device, no TPU library, no weights: the models are shapes, the meshes are names.
Only `--compile` needs libtpu (pip install 'flax-layoutmap[tpu-aot]').
"""

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import flax_layoutmap as flm


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a decoder."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int = 128256
    dtype: Any = jnp.bfloat16


CONFIGS = {
    "1B": Config(dim=2048, layers=16, heads=32, kv_heads=8, hidden=8192),
    "8B": Config(dim=4096, layers=32, heads=32, kv_heads=8, hidden=14336),
    "70B": Config(dim=8192, layers=80, heads=64, kv_heads=8, hidden=28672),
    "405B": Config(dim=16384, layers=126, heads=128, kv_heads=8, hidden=53248),
}


# ---------------------------------------------------------------------- the model


def rotate(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 1e4 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


class Attention(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        size = config.dim // config.heads

        def linear(fan_in, fan_out):
            return nnx.LinearGeneral(
                fan_in,
                fan_out,
                axis=(-2, -1) if isinstance(fan_in, tuple) else -1,
                use_bias=False,
                dtype=config.dtype,
                param_dtype=config.dtype,
                rngs=rngs,
            )

        self.query = linear(config.dim, (config.heads, size))
        self.key = linear(config.dim, (config.kv_heads, size))
        self.value = linear(config.dim, (config.kv_heads, size))
        self.out = linear((config.heads, size), config.dim)

    def __call__(self, x):
        query, key = rotate(self.query(x)), rotate(self.key(x))
        mixed = jax.nn.dot_product_attention(query, key, self.value(x), is_causal=True)
        return self.out(mixed)


class Block(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        def linear(fan_in, fan_out):
            return nnx.Linear(
                fan_in,
                fan_out,
                use_bias=False,
                dtype=config.dtype,
                param_dtype=config.dtype,
                rngs=rngs,
            )

        self.attention = Attention(config, rngs)
        self.gate = linear(config.dim, config.hidden)
        self.up = linear(config.dim, config.hidden)
        self.down = linear(config.hidden, config.dim)
        kinds: dict[str, Any] = {"dtype": config.dtype, "param_dtype": config.dtype}
        self.norm1 = nnx.RMSNorm(config.dim, **kinds, rngs=rngs)
        self.norm2 = nnx.RMSNorm(config.dim, **kinds, rngs=rngs)

    def __call__(self, x):
        x = flm.distribute_tensor(x + self.attention(self.norm1(x)), "residual")
        y = self.norm2(x)
        y = self.down(nnx.silu(self.gate(y)) * self.up(y))
        return flm.distribute_tensor(x + y, "residual")


class Decoder(nnx.Module):
    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        dtype = config.dtype
        kinds: dict[str, Any] = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        self.embed = nnx.Embed(config.vocab, config.dim, **kinds)
        self.norm = nnx.RMSNorm(config.dim, **kinds)
        self.head = nnx.Linear(config.dim, config.vocab, use_bias=False, **kinds)

        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap
        def make_layers(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs)

        self.layers = make_layers(rngs)

    def __call__(self, tokens):
        x = flm.distribute_tensor(self.embed(tokens), "residual")

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def through(x, block):
            return block(x)

        return self.head(self.norm(through(x, self.layers)))


# ----------------------------------------------------------- rules, step, and plan

RULES = flm.LayoutMap(batch=("data", "fsdp"))
RULES["embed/embedding"] = ("tensor", "fsdp")
RULES["head/kernel"] = ("fsdp", "tensor")
RULES["(query|key|value)/kernel"] = (None, "fsdp", "tensor", None)
RULES["out/kernel"] = (None, "tensor", None, "fsdp")
RULES["(gate|up)/kernel"] = (None, "fsdp", "tensor")
RULES["down/kernel"] = (None, "tensor", "fsdp")
RULES["norm"] = None
RULES.names["residual"] = (("data", "fsdp"), None, None)


@flm.jit(layout_map=RULES, donate_argnames=("model", "optimizer"))
def train_step(model, optimizer, tokens):
    def loss_of(model):
        logits = model(tokens[:, :-1]).astype(jnp.float32)
        wanted = tokens[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, wanted).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def abstract_state(config: Config) -> tuple[Decoder, nnx.Optimizer]:
    def make():
        model = Decoder(config, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(3e-4), wrt=nnx.Param)

    return nnx.eval_shape(make)


# Topology, slices, mesh, sequences in a batch, tokens in a sequence. The last mesh
# splits a physical axis of the slice: 70B has eight heads for keys, so that tensor=16,
# which would not, is too many. The report warns of it.
PLANS = [
    ("v5e:4x4", 1, "data=1,fsdp=4,tensor=4", 16, 2048),
    ("v5p:4x4x4", 1, "data=1,fsdp=16,tensor=4", 64, 4096),
    ("v6e:16x16", 2, "data=2,fsdp=32,tensor=8", 256, 4096),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=[*CONFIGS], action="append")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    for name in options.model or ["1B", "8B", "70B"]:
        model, optimizer = abstract_state(CONFIGS[name])
        for topology, slices, mesh, batch, length in PLANS:
            tokens = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
            step = (train_step, model, optimizer, tokens)
            where = {"mesh": mesh, "topology": topology, "slices": slices}
            print(f"\n== {name}, {batch} sequences of {length} tokens")
            report = flm.pod.plan(*step, **where)
            report.show()
            # What a test of these rules would say.
            report.forbid(path="kernel", axis="tensor")
            report.forbid(path="kernel", axis="data", kind="all-gather")
            if options.compile:
                compiled = flm.pod.compile(*step, **where)
                compiled.show()
                print(f"\n{report.compare(compiled)}")
                return


if __name__ == "__main__":
    main()
