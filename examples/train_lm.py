"""Train a byte-level language model on the source of Python's standard library.

    python examples/train_lm.py                     # 2 to 3 minutes on two CPU cores
    python examples/train_lm.py --dim 1024 --layers 16 --batch 128 --seq 1024
    python examples/multi_host/run_here.py          # the same in two processes

It runs on all accelerators that JAX finds, else on 8 virtual CPU devices. Half way it
saves a checkpoint and goes on. Then it restores the checkpoint on another mesh and on
one device, goes on from there, and shows that the losses are those of the first run.
"""

import argparse
import math
import os
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich import progress
from rich.console import Console
from rich.table import Table

import flax_layoutmap as flm


def layout_map_for(mesh: flm.DeviceMesh) -> flm.LayoutMap:
    """Every layout of the job; the model below names no mesh axis."""
    layout_map = flm.LayoutMap(mesh)
    layout_map["embed/embedding"] = ("model", None)
    layout_map["attention/(query|key|value)/kernel"] = (None, "model", None)
    layout_map["attention/out/kernel"] = ("model", None, None)
    layout_map["(gate|up)/kernel"] = (None, "model")
    layout_map["down/kernel"] = ("model", None)
    layout_map["norm/scale"] = None  # replicated, on purpose
    layout_map.names["hidden"] = ("data", None, None)
    layout_map.names["heads"] = ("data", None, "model", None)
    return layout_map


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions: turn each pair of features by an angle that grows with time."""
    half = x.shape[-1] // 2
    frequencies = 10_000 ** (-jnp.arange(half) / half)
    angles = jnp.arange(x.shape[1])[:, None, None] * frequencies
    (a, b), sin, cos = jnp.split(x, 2, axis=-1), jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Attention(nnx.Module):
    def __init__(self, dim: int, heads: int, *, rngs: nnx.Rngs):
        linear = partial(nnx.LinearGeneral, use_bias=False, rngs=rngs)
        self.query = linear(dim, (heads, dim // heads))
        self.key = linear(dim, (heads, dim // heads))
        self.value = linear(dim, (heads, dim // heads))
        self.out = linear((heads, dim // heads), dim, axis=(-2, -1))

    def __call__(self, x: jax.Array) -> jax.Array:
        query = flm.distribute_tensor(rotate(self.query(x)), "heads")
        key = flm.distribute_tensor(rotate(self.key(x)), "heads")
        value = flm.distribute_tensor(self.value(x), "heads")
        return self.out(jax.nn.dot_product_attention(query, key, value, is_causal=True))


class Block(nnx.Module):
    def __init__(self, dim: int, heads: int, *, rngs: nnx.Rngs):
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.attention_norm = nnx.RMSNorm(dim, rngs=rngs)
        self.attention = Attention(dim, heads, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(dim, rngs=rngs)
        self.gate, self.up = linear(dim, 3 * dim), linear(dim, 3 * dim)
        self.down = linear(3 * dim, dim)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        y = self.mlp_norm(x)
        x = x + self.down(nnx.silu(self.gate(y)) * self.up(y))
        return flm.distribute_tensor(x, "hidden")


class LanguageModel(nnx.Module):
    def __init__(self, dim: int, layers: int, heads: int, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, dim, rngs=rngs)
        self.layers = nnx.List(Block(dim, heads, rngs=rngs) for _ in range(layers))
        self.norm = nnx.RMSNorm(dim, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = flm.distribute_tensor(self.embed(tokens), "hidden")
        for block in self.layers:
            x = block(x)
        return self.embed.attend(self.norm(x))  # the embedding is the head, too


def read_source(limit_bytes: int = 4_000_000) -> np.ndarray:
    """The top-level modules of the standard library, one after another, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    return np.frombuffer(text[:limit_bytes], np.uint8)


def batch_of(
    text: np.ndarray, step: int, batch: int, seq: int, seed: int
) -> np.ndarray:
    """The bytes, `(batch, seq + 1)`, of one step: they depend on its number alone."""
    starts = np.random.default_rng((seed, step)).integers(len(text) - seq, size=batch)
    return text[starts[:, None] + np.arange(seq + 1)].astype(np.int32)


def train_step(
    model: LanguageModel, optimizer: nnx.Optimizer, tokens: jax.Array
) -> jax.Array:
    """One step of training, as it would be written for one device."""

    def mean_loss(model: LanguageModel) -> jax.Array:
        logits, labels = model(tokens[:, :-1]), tokens[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, gradients = nnx.value_and_grad(mean_loss)(model)
    optimizer.update(model, gradients)
    return loss


def train(
    title: str, step: Callable, training: dict[str, Any], batches: Callable, until: int
) -> list[float]:
    """Go on from the optimizer's own step; return the loss of each step."""
    model, optimizer = training["model"], training["optimizer"]
    first, losses, began = int(optimizer.step[...]), [], math.nan
    with progress.Progress(
        f"{title:<27}",
        progress.BarColumn(20),
        progress.MofNCompleteColumn(),
        "{task.fields[status]}",
    ) as bars:
        bar = bars.add_task("", total=until, completed=first, status="compiling")
        for number in range(first, until):
            tokens = batches(number)
            losses.append(float(step(model, optimizer, tokens)))
            if number == first:
                began = time.perf_counter()  # not before: the first step compiles
            seconds = time.perf_counter() - began
            speed = (number - first) * tokens[:, 1:].size / seconds
            status = f"loss {losses[-1]:.3f} {speed:9,.0f} tokens/s"
            bars.update(bar, advance=1, status=status)
    return losses


def compare(runs: dict[str, list[float]], first: int, tolerance: float) -> bool:
    """Print the losses side by side; True if all runs agree with the first one."""
    losses = np.array(list(runs.values())).T
    difference = np.abs(losses - losses[:, :1]).max()
    table = Table("step", *runs, title="Loss in nats per byte")
    for row in np.unique(np.linspace(0, len(losses) - 1, 6).astype(int)):
        table.add_row(str(first + row), *(f"{loss:.6f}" for loss in losses[row]))
    Console().print(table)
    agree = bool(difference <= tolerance)  # False for NaN, too
    verdict = "within" if agree else "MORE THAN"
    print(f"Largest difference: {difference:.1e}, {verdict} the tolerance {tolerance}.")
    return agree


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train, save, restore, go on.")
    sizes = {"steps": 300, "batch": 16, "seq": 128, "dim": 128, "layers": 2, "heads": 4}
    for name, default in {**sizes, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mesh", help="such as data=2,model=-1")
    parser.add_argument("--other-mesh", help="the mesh to restore on")
    parser.add_argument("--checkpoint-dir", help="where to keep the checkpoint")
    parser.add_argument("--distributed", action="store_true", help="many processes")
    parser.add_argument("--tolerance", type=float, default=0.01, help="nats per byte")
    options = parser.parse_args()
    if options.distributed and options.checkpoint_dir is None:
        parser.error("--distributed needs a --checkpoint-dir that all processes see")
    return options


def main() -> int:
    options = read_options()
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", 8)
    if options.distributed:
        flm.keras.initialize()  # every process is told, or finds out, which one it is
    if jax.process_index() > 0:
        sys.stdout = open(os.devnull, "w")  # process 0 speaks for all
    ways = math.gcd(jax.device_count(), options.heads)
    mesh = flm.DeviceMesh(options.mesh or f"data=-1,model={ways}")
    others = []
    if jax.process_count() == 1:
        others.append(flm.DeviceMesh("data=1,model=1", devices=jax.devices()[:1]))
    if jax.device_count() > 1:
        other_mesh = options.other_mesh or f"data=-1,model={max(1, ways // 2)}"
        others.insert(0, flm.DeviceMesh(other_mesh))
    else:
        print("There is only one device; the checkpoint is restored on the same one.")

    def make_model() -> LanguageModel:
        rngs = nnx.Rngs(options.seed)
        return LanguageModel(options.dim, options.layers, options.heads, rngs=rngs)

    def make_training() -> dict[str, Any]:
        model = make_model()
        return {"model": model, "optimizer": nnx.Optimizer(model, tx, wrt=nnx.Param)}

    def batches(step: int) -> np.ndarray:
        return batch_of(text, step, options.batch, options.seq, options.seed)

    text, steps, half = read_source(), options.steps, options.steps // 2
    peak = 0.75 / options.dim
    tx = optax.adamw(optax.warmup_cosine_decay_schedule(0, peak, steps // 10, steps))
    jit = partial(flm.jit, train_step, donate_argnames=("model", "optimizer"))

    layout_map = layout_map_for(mesh)
    layout_map.resolve(make_model).show()
    model = flm.create(make_model, layout_map)
    optimizer = flm.create_optimizer(model, tx, layout_map, wrt=nnx.Param)
    training: dict[str, Any] = {"model": model, "optimizer": optimizer}
    step = jit(layout_map=layout_map)
    before = train(f"on {mesh}", step, training, batches, half)
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(options.checkpoint_dir or temporary) / f"step-{half}"
        flm.checkpoint.save(path, training, layout_map=layout_map, overwrite=True)
        after = train("uninterrupted", step, training, batches, steps)
        runs = {"uninterrupted": after}
        for other in others:
            there, target = layout_map.on(other), nnx.eval_shape(make_training)
            training = flm.checkpoint.restore(path, target, layout_map=there)
            step, title = jit(layout_map=there), f"restored on {other}"
            runs[title] = train(title, step, training, batches, steps)
    start, end = (before + after)[0], np.mean(after[-10:])
    print(f"In {steps} steps: from {start:.2f} to {end:.2f} nats per byte.")
    return 0 if compare(runs, half, options.tolerance) else 1


if __name__ == "__main__":
    sys.exit(main())
