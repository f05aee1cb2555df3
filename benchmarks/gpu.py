"""One accelerator: a training step, dispatch, birth, host memory and checkpoints.

    python benchmarks/gpu.py            # a few minutes on one GPU
    python benchmarks/gpu.py --tiny     # seconds of work, on any device: does it run?
    python benchmarks/gpu.py --only step birth

Each row of a table does the same by other means, in a process of its own, one after the
other on the same device. Prints a Markdown table for each part: medians, memory of the
device in MiB as its runtime counts it (empty on CPUs).
"""

import argparse
import dataclasses
import datetime
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _decoders import Config, Decoder
from _decoders import step as decoder_step
from checkpoint import forget
from flax import nnx

import flax_layoutmap as flm

Figures = dict[str, float]
MIB = 2**20
WARM_UP, CHECKPOINTS = 3, 3


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large everything is.

    Attributes:
        decoder: the decoder of all parts but `dispatch`.
        batch: sequences and tokens of a step.
        layers: small layers of `dispatch`.
        rounds: steps that are timed.
    """

    decoder: Config
    batch: tuple[int, int]
    layers: int
    rounds: int


# 188 M parameters.
DECODER = Config(
    dim=1024,
    layers=12,
    heads=16,
    kv_heads=16,
    hidden=2816,
    vocab=16384,
    scanned=False,
    named=False,
)
TINY = dataclasses.replace(
    DECODER, dim=64, layers=2, heads=4, kv_heads=4, hidden=128, vocab=256
)
FULL_SIZES = Sizes(DECODER, (16, 1024), layers=48, rounds=30)
TINY_SIZES = Sizes(TINY, (2, 16), layers=4, rounds=3)


class Small(nnx.Module):
    """Layers with next to nothing to compute."""

    def __init__(self, layers: int, *, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List(nnx.Linear(64, 64, rngs=rngs) for _ in range(layers))

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x


def small_step(model: Small, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    loss, gradients = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, gradients)
    return loss


def with_optimizer(make_model: Callable[[], nnx.Module]) -> dict[str, Any]:
    """A model and its optimizer."""
    model = make_model()
    optimizer = nnx.Optimizer(model, optax.adamw(3e-4), wrt=nnx.Param)
    return {"model": model, "optimizer": optimizer}


Make = Callable[[Sizes], dict[str, Any]]


def make_decoder(sizes: Sizes) -> dict[str, Any]:
    return with_optimizer(lambda: Decoder(sizes.decoder, rngs=nnx.Rngs(0)))


def make_small(sizes: Sizes) -> dict[str, Any]:
    return with_optimizer(lambda: Small(sizes.layers, rngs=nnx.Rngs(0)))


def rules() -> flm.LayoutMap:
    """Rules for one device, where no layout splits anything."""
    mesh = flm.DeviceMesh("data=1", devices=jax.devices()[:1])
    layout_map = flm.LayoutMap(mesh)
    layout_map[".*"] = None
    return layout_map


# ------------------------------------------------------------------------- measuring


def memory(**names: str) -> Figures:
    """Memory of the device as its runtime counts it; nothing where it does not."""
    counted = jax.devices()[0].memory_stats() or {}
    return {shown: counted[key] / MIB for key, shown in names.items() if key in counted}


def repeated(call: Callable[[], Any], rounds: int) -> Figures:
    """The median time of a step until its loss is there, and the peak of memory."""
    for _ in range(WARM_UP):
        jax.block_until_ready(call())
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    counted = memory(bytes_in_use="at rest, MiB", peak_bytes_in_use="peak, MiB")
    return {"ms a step": statistics.median(times) * 1e3, **counted}


def once(call: Callable[[], Any]) -> Figures:
    """The time of a call in a fresh process, until all that it makes is there."""
    start = time.perf_counter()
    made = call()
    jax.block_until_ready(nnx.state(made) if isinstance(made, dict) else made)
    seconds = time.perf_counter() - start
    counted = memory(bytes_in_use="at rest, MiB", peak_bytes_in_use="peak, MiB")
    return {"seconds": seconds, **counted}


# ------------------------------------------------------------------- steps and births


def data_of(sizes: Sizes, step: Any) -> jax.Array:
    """What a step is called with."""
    if step is small_step:
        return jnp.ones((8, 64))
    rows, length = sizes.batch
    key, vocab = jax.random.key(0), sizes.decoder.vocab
    return jax.random.randint(key, (rows, length + 1), 0, vocab)


def by_hand(sizes: Sizes, make: Make, step: Any, *, host: bool = False) -> Figures:
    """`jax.jit` on the leaves of the state, which it donates."""
    x, objects = data_of(sizes, step), make(sizes)
    moments = len(jax.tree.leaves(nnx.state(objects["optimizer"])))
    graphdef, state = nnx.split(tuple(objects.values()))
    leaves, treedef = jax.tree.flatten(state)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    pinned = device.with_memory_kind("pinned_host")
    shardings = [device] * len(leaves)
    if host:
        shardings[-moments:] = [
            pinned if leaf.ndim else device for leaf in leaves[-moments:]
        ]
    held = [jax.device_put(leaves, shardings)]
    del objects, state, leaves

    def on_leaves(leaves: list[jax.Array], x: jax.Array) -> Any:
        fetched = jax.device_put(leaves, jax.memory.Space.Device) if host else leaves
        objects = nnx.merge(graphdef, jax.tree.unflatten(treedef, fetched))
        loss = step(*objects, x)
        return jax.tree.leaves(nnx.state(objects)), loss

    jitted = jax.jit(on_leaves, donate_argnums=0, out_shardings=(shardings, device))

    def call() -> jax.Array:
        held[0], loss = jitted(held[0], x)
        return loss

    return repeated(call, sizes.rounds)


def by_nnx(sizes: Sizes, make: Make, step: Any) -> Figures:
    """`nnx.jit` on the objects."""
    x, objects = data_of(sizes, step), make(sizes)
    jitted = nnx.jit(step, donate_argnums=(0, 1))
    return repeated(lambda: jitted(*objects.values(), x), sizes.rounds)


def by_ours(sizes: Sizes, make: Make, step: Any, *, host: bool = False) -> Figures:
    """`flm.jit` on the objects."""
    layout_map = rules()
    if host:
        pinned = flm.TensorLayout((...,), memory_kind="pinned_host")
        layout_map.optimizer[".*"] = pinned
    x, objects = data_of(sizes, step), flm.create(lambda: make(sizes), layout_map)
    donated = ("model", "optimizer")
    jitted = flm.jit(step, layout_map=layout_map, donate_argnames=donated)
    return repeated(lambda: jitted(*objects.values(), x), sizes.rounds)


def born_eagerly(sizes: Sizes) -> Figures:
    return once(lambda: make_decoder(sizes))


def born_by_hand(sizes: Sizes) -> Figures:
    """`jax.jit` of the constructor, one program for all."""
    return once(lambda: jax.jit(lambda: nnx.state(make_decoder(sizes)))())


def born_by_ours(sizes: Sizes) -> Figures:
    layout_map = rules()
    figures = once(lambda: flm.create(lambda: make_decoder(sizes), layout_map))
    resolution = layout_map.resolve(lambda: make_decoder(sizes))
    return figures | {"the report says, MiB": resolution.bytes_per_device / MIB}


# ------------------------------------------------------------------------ checkpoints


def seconds_with(
    sizes: Sizes, save: Callable[[str, Any], Any], load: Callable[[str, Any], Any]
) -> Figures:
    """Times of a save and a restore of the decoder and its moments in float32."""
    wide = dataclasses.replace(sizes.decoder, dtype=jnp.float32)
    wide_sizes = dataclasses.replace(sizes, decoder=wide)
    objects = flm.create(lambda: make_decoder(wide_sizes), rules())
    times: dict[str, list[float]] = {"save, s": [], "restore, s": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(CHECKPOINTS):
            path = f"{folder}/{number}"
            start = time.perf_counter()
            save(path, objects)
            times["save, s"].append(time.perf_counter() - start)
            forget(path)
            start = time.perf_counter()
            jax.block_until_ready(nnx.state(load(path, wide_sizes)))
            times["restore, s"].append(time.perf_counter() - start)
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(objects)))
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {"MiB": stored / MIB, **medians}


def orbax_checkpoints(sizes: Sizes) -> Figures:
    import orbax.checkpoint as ocp

    checkpointer = ocp.StandardCheckpointer()
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def save(path: str, objects: Any) -> None:
        checkpointer.save(path, nnx.to_pure_dict(nnx.state(objects)))
        checkpointer.wait_until_finished()

    def load(path: str, sizes: Sizes) -> Any:
        # As ours: from a function that makes the objects to the objects.
        graphdef, state = nnx.split(nnx.eval_shape(lambda: make_decoder(sizes)))
        target = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            nnx.to_pure_dict(state),
        )
        nnx.replace_by_pure_dict(state, checkpointer.restore(path, target))
        return nnx.merge(graphdef, state)

    return seconds_with(sizes, save, load)


def our_checkpoints(sizes: Sizes) -> Figures:
    layout_map = rules()

    def load(path: str, sizes: Sizes) -> Any:
        make = functools.partial(make_decoder, sizes)
        return flm.checkpoint.restore(path, make, layout_map=layout_map)

    def save(path: str, objects: Any) -> None:
        flm.checkpoint.save(path, objects, layout_map=layout_map)

    return seconds_with(sizes, save, load)


# -------------------------------------------------------------------------- the tables

DECODER_STEP = {"make": make_decoder, "step": decoder_step}
SMALL_STEP = {"make": make_small, "step": small_step}
PARTS: dict[str, dict[str, Callable[[Sizes], Figures]]] = {
    "step": {
        "`jax.jit` on the leaves": functools.partial(by_hand, **DECODER_STEP),
        "`nnx.jit`": functools.partial(by_nnx, **DECODER_STEP),
        "**flm.jit**": functools.partial(by_ours, **DECODER_STEP),
    },
    "dispatch": {
        "`jax.jit` on the leaves": functools.partial(by_hand, **SMALL_STEP),
        "`nnx.jit`": functools.partial(by_nnx, **SMALL_STEP),
        "**flm.jit**": functools.partial(by_ours, **SMALL_STEP),
    },
    "birth": {
        "eager constructor": born_eagerly,
        "`jax.jit` of the constructor": born_by_hand,
        "**flm.create**": born_by_ours,
    },
    "host": {
        "`jax.jit`, moments in `pinned_host`": functools.partial(
            by_hand, **DECODER_STEP, host=True
        ),
        "**flm.jit**, moments in `pinned_host`": functools.partial(
            by_ours, **DECODER_STEP, host=True
        ),
    },
    "checkpoint": {
        "`ocp.StandardCheckpointer`": orbax_checkpoints,
        "**flm.checkpoint**": our_checkpoints,
    },
}


def measured(part: str, row: str, tiny: bool) -> Figures:
    """Run one row in a process of its own."""
    command = [sys.executable, __file__, "--only", part, "--row", row]
    command += ["--tiny"] * tiny
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def print_table(part: str, cells: dict[str, Figures]) -> None:
    """One part as Markdown."""
    heads = list(dict.fromkeys(head for cell in cells.values() for head in cell))
    print(f"\n| {part} | " + " | ".join(heads) + " |")
    print("|---|" + "--:|" * len(heads))
    for row, cell in cells.items():
        shown = [f"{cell[head]:,.2f}" if head in cell else "" for head in heads]
        print(f"| {row} | " + " | ".join(shown) + " |", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--row", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row:
        warnings.simplefilter("ignore")
        sizes = TINY_SIZES if given.tiny else FULL_SIZES
        print(json.dumps(PARTS[given.only[0]][given.row](sizes)))
        return
    # The parent asks a child for the device: two processes may not share its memory.
    device = subprocess.run(
        [sys.executable, "-c", "import jax; print(jax.devices()[0].device_kind)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    names = ("jax", "flax", "orbax-checkpoint")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    print(f"{datetime.date.today()}, {device}, {versions}")
    for part in given.only:
        rows = PARTS[part]
        print_table(part, {row: measured(part, row, given.tiny) for row in rows})


if __name__ == "__main__":
    main()
