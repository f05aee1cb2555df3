"""A small scanned decoder whose names say nothing, and a step that trains it."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

HEADS, VOCAB, LAYERS = 4, 512, 2
BATCH, LENGTH = 16, 32


class Block(nnx.Module):
    """Attention and a gated MLP; `names` are those of its five kernels."""

    def __init__(self, names: str, dim: int, rngs: nnx.Rngs):
        self.names = names
        heads = HEADS, dim // HEADS
        shapes: list[Any] = [
            ((dim,), (3, *heads)),
            (heads, (dim,)),
            ((dim,), (4 * dim,)),
            ((dim,), (4 * dim,)),
            ((4 * dim,), (dim,)),
        ]
        for name, (inputs, outputs) in zip(names, shapes, strict=True):
            axis = tuple(range(-len(inputs), 0))
            kernel = nnx.LinearGeneral(
                inputs, outputs, axis=axis, use_bias=False, rngs=rngs
            )
            setattr(self, name, kernel)

    def __call__(self, x: jax.Array) -> jax.Array:
        together, out, gate, up, down = (getattr(self, name) for name in self.names)
        mixed = jax.nn.dot_product_attention(*jnp.moveaxis(together(x), -3, 0))
        x = x + out(mixed)
        return x + down(nnx.silu(gate(x)) * up(x))


class Decoder(nnx.Module):
    """`names`: of the kernels of a layer, then of table, layers and head."""

    def __init__(self, names: str, dim: int, rngs: nnx.Rngs):
        self.names = names

        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap
        def layers(rngs: nnx.Rngs) -> Block:
            return Block(names[:5], dim, rngs)

        table, stack, head = names[5:]
        setattr(self, table, nnx.Embed(VOCAB, dim, rngs=rngs))
        setattr(self, stack, layers(rngs))
        setattr(self, head, nnx.Linear(dim, VOCAB, use_bias=False, rngs=rngs))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        table, stack, head = (getattr(self, name) for name in self.names[5:])

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def through(x: jax.Array, block: Block) -> jax.Array:
            return block(x)

        return head(through(table(tokens), stack))


def train_step(model: Decoder, optimizer: nnx.Optimizer, tokens: jax.Array) -> Any:
    def loss_of(model: Decoder) -> jax.Array:
        logits = model(tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def make(names: str = "abcdefgh", dim: int = 64) -> tuple[Decoder, nnx.Optimizer]:
    model = Decoder(names, dim, nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


TOKENS = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
# Large enough that sending bytes takes longer than starting collectives.
LONG = jax.ShapeDtypeStruct((64, 1024), jnp.int32)


def large(names: str = "abcdefgh") -> tuple[Any, ...]:
    return (train_step, *nnx.eval_shape(lambda: make(names, 4096)), LONG)
