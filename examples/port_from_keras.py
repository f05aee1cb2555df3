"""A Keras `ModelParallel` script ported to Flax NNX with its rules unchanged.

    python examples/port_from_keras.py              # under a minute on two CPU cores

It trains a small GPT on the source text of Python's own library, on all accelerators
that JAX finds, else on 8 virtual CPU devices. Keras need not be installed. The script
that it comes from:

    mesh = keras.distribution.DeviceMesh((2, 4), ("data", "model"))
    layout_map = keras.distribution.LayoutMap(mesh)
    for path, axes in RULES.items():
        layout_map[path] = tuple(axes)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="data")
    )
    model = GPT(name="gpt")
    model.compile("adam", loss)
    model.fit(batches)

What changed, and why:

- `LayoutMap(mesh, match="fullmatch", batch="data")`: a pattern must match the whole
  path, as in Keras since 3.14 (for older scripts leave `match` out), and the map itself
  knows the axis of the batch. Lists are layouts as they are; Keras's page says so, its
  code wants tuples.
- Nothing is set for the whole process: `flm.create` and `flm.jit` take the map.
- Keras makes paths of the names of layers, Flax of attributes. So the attributes below
  have the names of the Keras layers, and three things stay different; see `RENAMED`.
- A rule that matches nothing is reported with the closest path; in Keras the weight
  is replicated in silence.
"""

import argparse
import math
import os
import re
import sys
from functools import partial

import jax
import numpy as np
import optax
from flax import nnx
from train_lm import batch_of, read_source

import flax_layoutmap as flm

# As it stands in the Keras script. The last one is for what a layer returns.
RULES = {
    ".*token_embedding/embeddings": ("model", None),
    ".*position_embedding/embeddings": [None, "model"],
    ".*decoder_block.*attention/(query|key|value)/kernel": (None, "model", None),
    ".*decoder_block.*attention/attention_output/kernel": ["model", None, None],
    ".*decoder_block.*ffw_gating.kernel": (None, "model"),
    ".*decoder_block.*ffw_linear.kernel": ("model", None),
    ".*decoder_block.*ffw_gating/output": ("data", None, "model"),
}

# From a path here to the path in Keras: pattern, replacement, why.
RENAMED = [
    (r"^", "gpt/", "a subclassed Keras model puts its own name first"),
    (
        r"decoder_block/(\d+)",
        r"decoder_block_\1",
        "a list has numbers, layers have names",
    ),
    (r"norm/scale$", "norm/gamma", "the weights of LayerNorm have other names"),
    (r"norm/bias$", "norm/beta", "the weights of LayerNorm have other names"),
]

BATCH, SEQ, DIM, HEADS, BLOCKS = 16, 64, 64, 4, 2


class Embedding(nnx.Module):
    """Not `nnx.Embed`, whose weight is called `embedding`: the rules say `…s`."""

    def __init__(self, rows: int, *, rngs: nnx.Rngs) -> None:
        draw = nnx.initializers.normal(0.02)
        self.embeddings = nnx.Param(draw(rngs.params(), (rows, DIM)))


class Attention(nnx.Module):
    """Not `nnx.MultiHeadAttention`, whose last layer is called `out`."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        linear = partial(nnx.LinearGeneral, use_bias=False, rngs=rngs)
        self.query = linear(DIM, (HEADS, DIM // HEADS))
        self.key = linear(DIM, (HEADS, DIM // HEADS))
        self.value = linear(DIM, (HEADS, DIM // HEADS))
        self.attention_output = linear((HEADS, DIM // HEADS), DIM, axis=(-2, -1))

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = self.query(x), self.key(x), self.value(x)
        mixed = jax.nn.dot_product_attention(*heads, is_causal=True)
        return self.attention_output(mixed)


class DecoderBlock(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.LayerNorm(DIM, rngs=rngs)
        self.attention = Attention(rngs=rngs)
        self.ffw_norm = nnx.LayerNorm(DIM, rngs=rngs)
        self.ffw_gating = nnx.Linear(DIM, 4 * DIM, use_bias=False, rngs=rngs)
        self.ffw_linear = nnx.Linear(4 * DIM, DIM, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffw_linear(nnx.gelu(self.ffw_gating(self.ffw_norm(x))))


class GPT(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.token_embedding = Embedding(256, rngs=rngs)
        self.position_embedding = Embedding(SEQ, rngs=rngs)
        self.decoder_block = nnx.List(DecoderBlock(rngs=rngs) for _ in range(BLOCKS))
        self.final_norm = nnx.LayerNorm(DIM, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        table = self.token_embedding.embeddings[...]
        x = table[tokens] + self.position_embedding.embeddings[...]
        for block in self.decoder_block:
            x = block(x)
        return self.final_norm(x) @ table.T  # the embedding is the head, too


def keras_path(path: str) -> str:
    """The path that the weight has in the Keras model."""
    for pattern, replacement, _ in RENAMED:
        path = re.sub(pattern, replacement, path)
    return path


def make_model() -> GPT:
    return GPT(rngs=nnx.Rngs(0))


def layout_map_for(mesh: flm.DeviceMesh) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh, match="fullmatch", batch="data")
    layout_map.update(RULES)
    layout_map[".*norm/(scale|bias)"] = None  # replicated: said, so that none is told
    return layout_map


def show_paths(layout_map: flm.LayoutMap) -> None:
    """Print where the paths differ; of several blocks, those of the first."""
    paths = [leaf.path for leaf in layout_map.resolve(make_model)]
    paths = [path for path in paths if not re.search(r"block/[1-9]", path)]
    width = max(map(len, paths))
    print("Where this differs from Keras:")
    for _, replacement, why in RENAMED:
        print(f"  {replacement.replace(chr(92) + '1', '0'):<16} {why}")
    print(f"\n{'here':<{width}}   in Keras")
    for path in paths:
        print(f"{path:<{width}}   {keras_path(path)}")
    print()


def main() -> int:
    parser = argparse.ArgumentParser(description="Rules of Keras, a model in Flax.")
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", 8)
    ways = math.gcd(flm.keras.get_device_count(), HEADS)
    layout_map = layout_map_for(flm.DeviceMesh(f"data=-1,model={ways}"))
    show_paths(layout_map)
    layout_map.resolve(make_model).show()
    output = "decoder_block/0/ffw_gating/output"
    print(f"\nWhat a layer returns, in flm.jit: {output} -> {layout_map[output]}\n")

    model = flm.create(make_model, layout_map)
    optimizer = flm.create_optimizer(model, optax.adam(3e-3), wrt=nnx.Param)

    @flm.jit(layout_map=layout_map, donate_argnames=("model", "optimizer"))
    def train_step(
        model: GPT, optimizer: nnx.Optimizer, tokens: jax.Array
    ) -> jax.Array:
        def mean_loss(model: GPT) -> jax.Array:
            logits, labels = model(tokens[:, :-1]), tokens[:, 1:]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean()

        loss, gradients = nnx.value_and_grad(mean_loss)(model)
        optimizer.update(model, gradients)
        return loss

    text, losses = read_source(), []
    for step in range(steps):
        tokens = batch_of(text, step, BATCH, SEQ, seed=0)
        losses.append(float(train_step(model, optimizer, tokens)))
        if step % max(1, steps // 10) == 0 or step == steps - 1:
            print(f"step {step:4}   loss {losses[-1]:.3f} nats per byte")
    fell = bool(np.mean(losses[-3:]) < losses[0])  # False for NaN, too
    print("The loss fell." if fell else "THE LOSS DID NOT FALL.")
    return 0 if fell else 1


if __name__ == "__main__":
    sys.exit(main())
