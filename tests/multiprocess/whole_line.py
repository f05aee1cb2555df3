"""End to end: rules → model → training → checkpoint → another mesh → training.

A part (see `launch`), imported by the test too, which does the same in one process.
"""

import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import flax_layoutmap as flm
from multiprocess import births

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 32, 16, 4, 8, 8
TX = optax.adamw(1e-2)
FIRST, OTHER = "data=2,model=4", "data=4,model=2"


class Block(nnx.Module):
    """Attention and an MLP, with dropout, so that random state is on the line."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        options: Any = {"use_bias": False, "rngs": rngs}
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, **options)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, **options)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, **options)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        x = x + self.attention(x)
        hidden = flm.distribute_tensor(nnx.silu(self.up(x)), "hidden")
        x = x + self.dropout(self.down(hidden))
        return self.embed.attend(x)


def rules(mesh: str) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(flm.DeviceMesh(mesh), strict=True)
    layout_map["embed/embedding"] = ("model", None)
    layout_map["up/kernel"] = (None, "model")
    layout_map["down/kernel"] = ("model", None)
    layout_map["attention/(query|key|value)/kernel"] = ("data", "model", None)
    layout_map["attention/out/kernel"] = ("model", None, "data")
    layout_map.names["hidden"] = ("data", None, "model")
    return layout_map


def make() -> dict[str, Any]:
    """Model and optimizer, the same in every process."""
    model = Block(nnx.Rngs(0))
    return {"model": model, "optimizer": nnx.Optimizer(model, TX, wrt=nnx.Param)}


def batch(step: int) -> np.ndarray:
    """The whole batch of a step, on the host: (examples, tokens)."""
    return np.random.default_rng(step).integers(VOCABULARY, size=(BATCH, LENGTH + 1))


def make_step(layout_map: flm.LayoutMap) -> Any:
    @flm.jit(layout_map=layout_map, donate_argnames=("model", "optimizer"))
    def train_step(
        model: Block, optimizer: nnx.Optimizer[Any], tokens: jax.Array
    ) -> jax.Array:
        def loss_of(model: Block) -> jax.Array:
            logits = model(tokens[:, :-1])
            losses = optax.softmax_cross_entropy_with_integer_labels(
                logits, tokens[:, 1:]
            )
            return losses.mean()

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return loss

    return train_step


def train(layout_map: flm.LayoutMap, state: dict[str, Any], steps: int) -> list[float]:
    """Trains from `state["step"]` on; returns the losses."""
    train_step = make_step(layout_map)
    first = int(state["step"])
    losses = [
        float(train_step(state["model"], state["optimizer"], batch(step)))
        for step in range(first, first + steps)
    ]
    state["step"] = first + steps
    return losses


def begin(layout_map: flm.LayoutMap) -> dict[str, Any]:
    """Model and optimizer, sharded from birth, at step 0."""
    model = flm.create(lambda: make()["model"], layout_map)
    optimizer = flm.create_optimizer(model, TX, layout_map)
    return {"model": model, "optimizer": optimizer, "step": 0}


def check_plan(layout_map: flm.LayoutMap, state: dict[str, Any]) -> None:
    """One process alone plans the step; the others know nothing of it."""
    model, optimizer = state["model"], state["optimizer"]
    report = flm.pod.plan(make_step(layout_map), model, optimizer, batch(0))
    report.forbid(path="kernel", axis="model")
    assert ("all-reduce", ("model",)) in {(c.kind, c.axes) for c in report.collectives}
    parts = [
        leaf.addressable_shards[0].data.nbytes
        for leaf in jax.tree.leaves((nnx.state(model), nnx.state(optimizer)))
    ]
    at_rest = report.memory.at_rest
    assert sum(parts) == sum(at_rest.values()) - at_rest["data"], at_rest
    print(report)


def state_of(state: dict[str, Any]) -> dict[str, Any]:
    return {name: nnx.state(state[name]) for name in ("model", "optimizer")}


def shards(trees: Any, layout_map: flm.LayoutMap) -> dict[str, list[Any]]:
    """Path → [place on the mesh, part of the array, checksum] of each shard here."""
    mesh = layout_map.device_mesh
    assert mesh is not None
    line = [device.id for device in mesh.devices.flat]
    found = {}
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(trees):
        path = jax.tree_util.keystr(key_path, simple=True, separator="/")
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        found[path] = [
            [
                line.index(shard.device.id),
                str(shard.index),
                zlib.crc32(np.asarray(shard.data).tobytes()),
            ]
            for shard in leaf.addressable_shards
        ]
    return found


def main(folder: Path) -> dict[str, Any]:
    """All of it; every process answers with the losses and the shards that it has.

    With more than two processes with other kinds of births, but without the plan and
    steps after the checkpoint.
    """
    process, short = jax.process_index(), jax.process_count() > 2
    after = 0 if short else 3
    first = rules(FIRST)
    if process == 0:
        print(first.resolve(lambda: make()["model"]).report())
    state = begin(first)
    if process == 0 and not short:
        check_plan(first, state)
    born = shards(state_of(state), first)
    if short:
        born |= shards(dict(births.births()), first)
    before = train(first, state, 3)
    path = folder / "checkpoint"
    flm.checkpoint.save(path, state, layout_map=first)
    saved = shards(state_of(state), first)
    uninterrupted = train(first, state, after)

    other = rules(OTHER)
    target = {**nnx.eval_shape(make), "step": 0}
    restored = flm.checkpoint.restore(path, target, layout_map=other)
    moved = shards(state_of(restored), other)
    resumed = train(other, restored, after)
    return {
        "before": before,
        "uninterrupted": uninterrupted,
        "resumed": resumed,
        "born": born,
        "saved": saved,
        "moved": moved,
    }
