"""A small decoder whose layers have experts, on a mesh axis of their own.

Each token goes to two of eight experts, through one-hot tensors as in GShard; pairs of
constraints move what is sent from the devices that have the sequences to those that
have the experts, and back.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pod_plan
from flax import nnx

import flax_layoutmap as flm

CONFIG = pod_plan.Config(
    dim=2048, layers=8, heads=16, kv_heads=8, hidden=4096, vocab=32768
)
EXPERTS, CHOSEN = 8, 2
# Places for the tokens of one sequence at one expert, over an even share of them.
ROOM = 1.25


class Experts(nnx.Module):
    def __init__(self, config: pod_plan.Config, rngs: nnx.Rngs):
        start = nnx.initializers.lecun_normal(batch_axis=0)
        up, down = (config.dim, config.hidden), (config.hidden, config.dim)

        def weights(shape: tuple[int, int]) -> nnx.Param:
            return nnx.Param(start(rngs.params(), (EXPERTS, *shape), config.dtype))

        self.router = nnx.Linear(
            config.dim, EXPERTS, use_bias=False, param_dtype=jnp.float32, rngs=rngs
        )
        self.gate, self.up, self.down = weights(up), weights(up), weights(down)

    def __call__(self, x: jax.Array) -> jax.Array:
        put = flm.distribute_tensor
        to, back = (put(one.astype(x.dtype), "routes") for one in self.routes(x))
        sent = put(jnp.einsum("bsec,bsd->ebcd", to, x), "with the tokens")
        sent = put(sent, "with the experts")
        gate = put(jnp.einsum("ebcd,edf->ebcf", sent, self.gate[...]), "hidden")
        made = put(jnp.einsum("ebcd,edf->ebcf", sent, self.up[...]), "hidden")
        made = jnp.einsum("ebcf,efd->ebcd", nnx.silu(gate) * made, self.down[...])
        made = put(put(made, "with the experts"), "with the tokens")
        return jnp.einsum("bsec,ebcd->bsd", back, made)

    def routes(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Where each token goes, and with which weight it comes back."""
        weights = jax.nn.softmax(self.router(x.astype(jnp.float32)))
        best, chosen = jax.lax.top_k(weights, CHOSEN)
        picked = jax.nn.one_hot(chosen, EXPERTS)
        order = jnp.cumsum(picked.sum(2), 1)[:, :, None] * picked - 1
        room = int(ROOM * CHOSEN * x.shape[1] / EXPERTS)
        places = jax.nn.one_hot(order.astype(jnp.int32), room) * picked[..., None]
        return places.sum(2), jnp.einsum("bsk,bskec->bsec", best, places)


class Block(nnx.Module):
    def __init__(self, config: pod_plan.Config, rngs: nnx.Rngs):
        kinds: dict[str, Any] = {"dtype": config.dtype, "param_dtype": config.dtype}
        self.attention = pod_plan.Attention(config, rngs)
        self.experts = Experts(config, rngs)
        self.norm1 = nnx.RMSNorm(config.dim, **kinds, rngs=rngs)
        self.norm2 = nnx.RMSNorm(config.dim, **kinds, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = flm.distribute_tensor(x + self.attention(self.norm1(x)), "residual")
        y = self.experts(self.norm2(x))
        return flm.distribute_tensor(x + y, "residual")


class Decoder(nnx.Module):
    def __init__(self, config: pod_plan.Config, *, rngs: nnx.Rngs):
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

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = flm.distribute_tensor(self.embed(tokens), "residual")

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def through(x: jax.Array, block: Block) -> jax.Array:
            return block(x)

        return self.head(self.norm(through(x, self.layers)))


TOKENS = ("fsdp", "expert")
RULES = flm.LayoutMap(batch=TOKENS)
RULES["embed/embedding"] = ("tensor", TOKENS)
RULES["head/kernel"] = (TOKENS, "tensor")
RULES["(query|key|value)/kernel"] = (None, TOKENS, "tensor", None)
RULES["out/kernel"] = (None, "tensor", None, TOKENS)
RULES["experts/(gate|up)"] = (None, "expert", "fsdp", "tensor")
RULES["experts/down"] = (None, "expert", "tensor", "fsdp")
RULES["router/kernel"] = None
RULES["norm"] = None
RULES.names["residual"] = (TOKENS, None, None)
RULES.names["routes"] = (TOKENS, None, None, None)
RULES.names["with the tokens"] = (None, TOKENS, None, None)
RULES.names["with the experts"] = ("expert", "fsdp", None, None)
RULES.names["hidden"] = ("expert", "fsdp", None, "tensor")


@flm.jit(layout_map=RULES, donate_argnames=("model", "optimizer"))
def train_step(model: Decoder, optimizer: nnx.Optimizer, tokens: jax.Array):
    def loss_of(model: Decoder) -> jax.Array:
        logits = model(tokens[:, :-1]).astype(jnp.float32)
        wanted = tokens[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, wanted).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def abstract_state(config: pod_plan.Config) -> tuple[Decoder, nnx.Optimizer]:
    def make():
        model = Decoder(config, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(3e-4), wrt=nnx.Param)

    return nnx.eval_shape(make)
