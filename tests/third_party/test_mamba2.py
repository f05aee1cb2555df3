"""The NNX state-space model of `mamba2-jax`: no annotations, no attention."""

from typing import Any

import optax
import pytest
from flax import nnx
from shards import Dims, assert_lies

import flax_layoutmap as flm
from third_party.published import (
    assert_equal,
    assert_model_lies,
    born,
    by_jit,
    leaves_of,
    made_in_scope,
    next_token_loss,
    strict_map,
    trained,
)

mamba: Any = pytest.importorskip(
    "mamba2_jax", reason="The package mamba2-jax is not installed."
)

pytestmark = pytest.mark.slow

RULES: dict[str, Any] = {
    "embedder/embedding": ("model", "data"),
    "mixer/in_proj/kernel": ("data", "model"),
    "mixer/out_proj/kernel": ("model", "data"),
    "conv1d/conv/kernel": (None, None, "model"),
    "conv1d/conv/bias|(A_log|D|dt_bias)$": ("model",),
    "norm/weight": None,
}


def make() -> Any:
    config = mamba.Mamba2Config(
        vocab_size=64,
        hidden_size=32,
        state_size=8,
        head_dim=8,
        num_hidden_layers=2,
        chunk_size=8,
    )
    return mamba.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0))


DIMS: dict[str, Dims] = {"backbone/embedder/embedding": (("model",), ("data",))}
for _n in range(2):
    _mixer = f"backbone/layers/{_n}/mixer"
    DIMS[f"{_mixer}/in_proj/kernel"] = (("data",), ("model",))
    DIMS[f"{_mixer}/out_proj/kernel"] = (("model",), ("data",))
    DIMS[f"{_mixer}/conv1d/conv/kernel"] = ((), (), ("model",))
    for _name in ("conv1d/conv/bias", "A_log", "D", "dt_bias"):
        DIMS[f"{_mixer}/{_name}"] = (("model",),)


def test_born_in_shards_and_in_a_scope(mesh: flm.DeviceMesh) -> None:
    layout_map = strict_map(mesh, RULES)
    model = born(make, layout_map)
    assert_model_lies(model, DIMS, mesh)
    assert_equal(model, by_jit(make))
    inside = made_in_scope(make, layout_map)
    assert_model_lies(inside, DIMS, mesh)
    assert_equal(inside, model)
    assert nnx.graphdef(model) == nnx.graphdef(inside) == nnx.graphdef(make())


def loss_of(model: Any, tokens: Any) -> Any:
    return next_token_loss(model(tokens)["logits"], tokens)


def test_steps_with_adafactor(mesh: flm.DeviceMesh) -> None:
    layout_map = strict_map(mesh, RULES)
    model = born(make, layout_map)
    tx = optax.adafactor(1e-3, min_dim_size_to_factor=16)
    optimizer, _ = trained(model, tx, layout_map, loss_of)
    assert_model_lies(model, DIMS, mesh)
    rows = leaves_of(optimizer.opt_state[0].v_row)
    columns = leaves_of(optimizer.opt_state[0].v_col)
    path = "backbone/layers/0/mixer/in_proj/kernel"
    assert rows[path].shape == (32,) and columns[path].shape == (152,)
    assert_lies(rows[path], (("data",),), mesh)
    assert_lies(columns[path], (("model",),), mesh)
