"""Train the model of train_lm.py in Linen, with a TrainState and plain `jax.jit`.

The loop is the user's own: `layout_map.shardings(state)` is a tree of `NamedSharding`
in the structure of `state`, which is what `jax.jit` takes.
"""

import argparse
import math
import os
import sys
import tempfile
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from train_lm import batch_of, compare, read_source

import flax_layoutmap as flm

BATCH, SEQ, DIM, HEADS = 16, 64, 64, 4


class LanguageModel(nn.Module):
    """A decoder over bytes: two layers, learned positions."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(256, DIM, name="embed")(tokens)
        x = x + self.param("positions", nn.initializers.normal(0.02), (SEQ, DIM))
        mask = nn.make_causal_mask(tokens)
        for i in range(2):
            attention = nn.SelfAttention(HEADS, use_bias=False, name=f"attention_{i}")
            x = x + attention(nn.RMSNorm()(x), mask)
            wide = nn.Dense(4 * DIM, use_bias=False, name=f"up_{i}")(nn.RMSNorm()(x))
            x = x + nn.Dense(DIM, use_bias=False, name=f"down_{i}")(nn.gelu(wide))
        return nn.Dense(256, use_bias=False, name="head")(nn.RMSNorm()(x))


def layout_map_for(mesh: flm.DeviceMesh) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh)
    layout_map["embed/embedding"] = ("model", None)
    layout_map[r"attention_\d/(query|key|value)/kernel"] = (None, "model", None)
    layout_map[r"attention_\d/out/kernel"] = ("model", None, None)
    layout_map[r"(up_\d|head)/kernel"] = (None, "model")
    layout_map[r"down_\d/kernel"] = ("model", None)
    layout_map["positions|scale"] = None  # replicated, on purpose
    return layout_map


def train_step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
    def mean_loss(params: dict) -> jax.Array:
        logits = state.apply_fn({"params": params}, tokens[:, :-1])
        labels = tokens[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, gradients = jax.value_and_grad(mean_loss)(state.params)
    return state.apply_gradients(grads=gradients), loss


def train(
    state: TrainState, layout_map: flm.LayoutMap, text: np.ndarray, until: int
) -> tuple[TrainState, list[float]]:
    """Go on from the state's own step; return the state and the loss of each step."""
    shardings, mesh = layout_map.shardings(state), layout_map.device_mesh
    rows = flm.TensorLayout(("data", None), mesh).sharding()
    replicated = flm.TensorLayout(None, mesh).sharding()
    inputs, outputs = (shardings, rows), (shardings, replicated)
    step = jax.jit(
        train_step, in_shardings=inputs, out_shardings=outputs, donate_argnums=0
    )
    losses = []
    for number in range(int(state.step), until):
        state, loss = step(state, batch_of(text, number, BATCH, SEQ, seed=0))
        losses.append(float(loss))
    return state, losses


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", 8)
    ways = math.gcd(jax.device_count(), HEADS)
    here = layout_map_for(flm.DeviceMesh(f"data=-1,model={ways}"))
    there = here.on(flm.DeviceMesh(f"data={ways},model=-1"))
    text, model, tx = read_source(), LanguageModel(), optax.adamw(3e-3)

    def make_state() -> TrainState:
        params = model.init(jax.random.key(0), jnp.zeros((1, SEQ), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    here.resolve(make_state).show()
    state, _ = train(flm.create(make_state, here), here, text, steps // 2)
    with tempfile.TemporaryDirectory() as folder:
        path, target = Path(folder) / "checkpoint", jax.eval_shape(make_state)
        flm.checkpoint.save(path, state, layout_map=here)
        _, expected = train(state, here, text, steps)
        state = flm.checkpoint.restore(path, target, layout_map=there)
    _, losses = train(state, there, text, steps)
    runs = {"uninterrupted": expected, f"restored on {there.device_mesh}": losses}
    return 0 if compare(runs, steps // 2, tolerance=0.01) else 1


if __name__ == "__main__":
    sys.exit(main())
