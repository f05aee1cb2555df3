"""A train step by a preset on Explicit axes is that on Auto axes, for each family."""

from functools import partial
from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx
from pods import compiled
from presets.decoders import TOKENS, Decoder
from presets.models import _small_experts, _small_stock

import flax_layoutmap as flm

pytestmark = pytest.mark.slow

AXES, WITH_EXPERTS = "data=2,fsdp=2,tensor=2", "fsdp=2,expert=2,tensor=2"


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


IMAGES, WORDS = random(8, 8, 8, 3), TOKENS[:, :8] % _small_stock.VOCAB
# Family → its mesh, its model, and what that takes.
CASES: dict[str, Any] = {
    "clip": (AXES, _small_stock.CLIP, IMAGES, WORDS),
    "dit": (AXES, _small_stock.DiT, IMAGES, random(8), np.arange(8)),
    "gemma": (AXES, lambda rngs: Decoder(norms=True, tied=True), WORDS),
    "gpt2": (AXES, _small_stock.GPT2, WORDS),
    "siglip": (AXES, _small_stock.SigLIP, IMAGES, WORDS),
    "t5": (AXES, _small_stock.T5, WORDS),
    "whisper": (AXES, _small_stock.Whisper, random(8, 16, 6), WORDS),
} | {
    family: (WITH_EXPERTS, partial(_small_experts.Decoder, family), WORDS)
    for family in ("deepseek_v3", "mixtral", "qwen3_moe")
}


def train_step(model: Any, optimizer: Any, inputs: Any) -> Any:
    def mean_loss(model: Any) -> Any:
        made = model(*inputs)
        wanted = np.linspace(-1, 1, made.shape[-1], dtype=np.float32)
        return ((made - wanted) ** 2).mean()

    loss, gradients = nnx.value_and_grad(mean_loss)(model)
    optimizer.update(model, gradients)
    return loss


def gathers_of_updates(collectives: Any) -> int:
    """Bytes of what is gathered in the update: parameters, and Adam's two moments."""
    return sum(
        one.bytes_per_step
        for one in collectives
        if one.kind == "all-gather" and (one.source or "").endswith("train_step")
    )


@pytest.mark.parametrize("family", CASES)
def test_a_step_on_explicit_axes_is_that_on_auto_axes(family: str) -> None:
    axes, make, *inputs = CASES[family]
    losses, found = [], []
    for kind in ("auto", "explicit"):
        mesh = flm.DeviceMesh(axes, axis_types=kind)
        layout_map = flm.presets.load(family, mesh)
        model = layout_map.place(make(rngs=nnx.Rngs(0)))
        # With so large an epsilon, a gradient that is nearly 0 makes no step.
        optimizer = flm.create_optimizer(model, optax.adam(1e-2, eps=1e-3))
        step = flm.jit(train_step, layout_map=layout_map)
        found.append(compiled(step, model, optimizer, inputs, mesh=mesh))
        losses.append([float(step(model, optimizer, inputs)) for _ in range(2)])
    np.testing.assert_allclose(*losses, rtol=1e-6)
    assert losses[0][0] != losses[0][1]
    auto, explicit = (sum(one.bytes_per_step for one in each) for each in found)
    if family == "dit":
        # The patches that a DiT returns are whole on each device of `tensor`.
        assert 0.95 * auto < explicit < 1.02 * auto
        return
    # Where the gradient of a replicated parameter is in parts, XLA updates it in parts
    # on Auto axes, and gathers it and its moments. By its type it is gathered first.
    gathered = gathers_of_updates(found[0])
    assert not gathers_of_updates(found[1])
    assert explicit == auto - gathered + gathered // 3


def test_fsdp_on_explicit_axes() -> None:
    """A model of any names, also where other axes of the mesh are Auto."""
    losses, sent = [], []
    for kind in ("auto", "explicit", ("auto", "explicit")):
        mesh = flm.DeviceMesh((2, 4), ("data", "fsdp"), axis_types=kind)
        batch = "fsdp" if isinstance(kind, tuple) else None  # axes of one type
        model = _small_stock.GPT2(nnx.Rngs(0))
        layout_map = flm.presets.fsdp(model, mesh, min_size=256, batch=batch)
        assert len(layout_map.activations) == (kind != "auto")
        layout_map.place(model)
        optimizer = flm.create_optimizer(model, optax.adam(1e-2, eps=1e-3))
        step = flm.jit(train_step, layout_map=layout_map)
        collectives = compiled(step, model, optimizer, [WORDS], mesh=mesh)
        sent.append(sum(one.bytes_per_step for one in collectives))
        losses.append([float(step(model, optimizer, [WORDS])) for _ in range(2)])
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-6)
    assert losses[0][0] != losses[0][1]
    assert sent[1] <= sent[0]
