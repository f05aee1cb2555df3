"""The NNX models of `google-tunix`, whose Variables are annotated with other axes."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from shards import Dims, assert_lies, bare

import flax_layoutmap as flm
from third_party.published import (
    TOKENS,
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

_WHY = "The package google-tunix is not installed, or not all that it imports."
llama: Any = pytest.importorskip("tunix.models.llama3.model", reason=_WHY)
gemma: Any = pytest.importorskip("tunix.models.gemma3.model", reason=_WHY)
qwix: Any = pytest.importorskip("qwix", reason="The package qwix is not installed.")

pytestmark = [
    pytest.mark.slow,
    # Tunix writes `sharding=`, which Flax has renamed, and reads `.value`.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

SIZES = {"embed_dim": 32, "hidden_dim": 64, "num_heads": 8, "head_dim": 8}


def make_llama() -> Any:
    config = llama.ModelConfig(
        num_layers=1,
        vocab_size=64,
        num_kv_heads=4,
        rope_theta=10_000,
        norm_eps=1e-5,
        **SIZES,
    )
    return llama.Llama3(config, rngs=nnx.Rngs(0))


def make_gemma() -> Any:
    """In bfloat16; its embeddings are also its head."""
    config = gemma.ModelConfig(
        num_layers=1, num_embed=64, num_kv_heads=4, sliding_window_size=8, **SIZES
    )
    return gemma.Gemma3(config, rngs=nnx.Rngs(0))


FSDP, TP = ("fsdp",), ("tp",)
NORM: Dims = (TP,)
DENSE: dict[str, Dims] = {
    "mlp/gate_proj/kernel": (FSDP, TP),
    "mlp/up_proj/kernel": (FSDP, TP),
    "mlp/down_proj/kernel": (TP, FSDP),
}
ATTENTION: dict[str, Dims] = {
    "attn/q_proj/w": (FSDP, TP, ()),
    "attn/k_proj/w": (FSDP, TP, ()),
    "attn/v_proj/w": (FSDP, TP, ()),
    "attn/o_proj/w": (TP, (), FSDP),
    "input_layernorm/w": NORM,
    "post_attention_layernorm/w": NORM,
}
ENDS: dict[str, Dims] = {
    "embedder/input_embedding": (TP, FSDP),
    "final_norm/w": NORM,
    "lm_head/w": (FSDP, TP),
}


def in_the_layer(table: dict[str, Dims]) -> dict[str, Dims]:
    return {f"layers/0/{path}": dims for path, dims in table.items()}


# What their own annotations say; all other leaves are replicated.
MODELS: dict[str, tuple[Callable[[], Any], dict[str, Dims]]] = {
    "llama3": (make_llama, {**ENDS, **in_the_layer(ATTENTION | DENSE)}),
    "gemma3": (
        make_gemma,
        {
            "embedder/input_embedding": (TP, FSDP),
            "final_norm/scale": NORM,
            **in_the_layer(
                {
                    **DENSE,
                    "attn/q_einsum/w": (TP, FSDP, ()),
                    "attn/kv_einsum/w": ((), TP, FSDP, ()),
                    "attn/attn_vec_einsum/w": (TP, (), FSDP),
                    "pre_attention_norm/scale": NORM,
                    "post_attention_norm/scale": NORM,
                    "pre_ffw_norm/scale": NORM,
                    "post_ffw_norm/scale": NORM,
                }
            ),
        },
    ),
}


def their_mesh(kind: Any = "auto") -> flm.DeviceMesh:
    """A mesh with the axes that the models name."""
    return flm.DeviceMesh((2, 4), ("fsdp", "tp"), axis_types=kind)


@functools.cache
def expected(name: str) -> Any:
    """What `jax.jit` makes of it."""
    return by_jit(MODELS[name][0])


@pytest.mark.parametrize("name", MODELS)
def test_annotations_are_enough(name: str) -> None:
    """No rules, no mesh in context."""
    make, dims = MODELS[name]
    layout_map = strict_map(their_mesh(), {})
    model = born(make, layout_map)
    assert_model_lies(model, dims, their_mesh())
    assert_equal(model, expected(name))
    inside = made_in_scope(make, layout_map)
    assert_model_lies(inside, dims, their_mesh())
    assert_equal(inside, model)
    assert nnx.graphdef(model) == nnx.graphdef(inside) == nnx.graphdef(make())


RULES: dict[str, Any] = {
    "embedder/input_embedding": ("model", "data"),
    "attn/(q|k|v)_proj/w": ("data", "model", None),
    "attn/o_proj/w": ("model", None, "data"),
    "mlp/(gate|up)_proj/kernel": ("data", "model"),
    "mlp/down_proj/kernel": ("model", "data"),
    "lm_head/w": (None, "model"),
    "norm/w": None,
}
_RENAMED = {"fsdp": "data", "tp": "model"}


def renamed(dims: Dims) -> Dims:
    return tuple(tuple(_RENAMED[axis] for axis in axes) for axes in dims)


BY_RULES: dict[str, Dims] = {
    path: renamed(dims)
    for path, dims in MODELS["llama3"][1].items()
    if "norm" not in path
} | {"lm_head/w": ((), ("model",))}


@pytest.mark.parametrize("how", [born, made_in_scope])
def test_rules_win_over_annotations(
    how: Callable[..., Any], mesh: flm.DeviceMesh
) -> None:
    """Their axes are not even on this mesh; what they say is corrected."""
    layout_map = strict_map(mesh, RULES)
    model = how(make_llama, layout_map)
    assert_model_lies(model, BY_RULES, mesh)
    assert_equal(model, expected("llama3"))
    attention = model.layers[0].attn
    assert attention.o_proj.w.get_metadata("out_sharding") == ("model", None, "data")
    wanted = leaves_of(nnx.get_named_sharding(nnx.state(model), bare(mesh)))
    for path, array in leaves_of(model).items():
        assert array.sharding.is_equivalent_to(wanted[path], array.ndim), path
    text = layout_map.resolve(model).explain("layers/0/attn/o_proj/w")
    assert "rule 3 'attn/o_proj/w'" in text


def loss_of(model: Any, tokens: Any) -> Any:
    """Next-token loss of a model of Tunix."""
    rows, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
    causal = jnp.tril(jnp.ones((length, length), bool))
    mask = jnp.broadcast_to(causal, (rows, length, length))
    logits, _ = model(tokens, positions, None, mask)
    return next_token_loss(logits, tokens)


def test_steps_with_adamw() -> None:
    layout_map = strict_map(their_mesh(), {})
    model = born(make_llama, layout_map)
    before = float(loss_of(make_llama(), jnp.asarray(TOKENS)))
    optimizer, losses = trained(model, optax.adamw(1e-3), layout_map, loss_of)
    np.testing.assert_allclose(losses[0], before, rtol=1e-4)
    dims = MODELS["llama3"][1]
    assert_model_lies(optimizer.opt_state[0].mu, dims, their_mesh())
    assert_model_lies(optimizer.opt_state[0].nu, dims, their_mesh())


@pytest.mark.parametrize("when", ["inside", "after"])
def test_lora_follows_its_kernel(when: str) -> None:
    """Tunix trains such models: `qwix` adds the matrices."""
    provider = qwix.LoraProvider(
        module_path=".*(q_proj|down_proj).*", rank=4, alpha=2.0
    )

    def with_lora(model: Any) -> Any:
        inputs = model.get_model_input()
        return qwix.apply_lora_to_model(model, provider, rngs=nnx.Rngs(1), **inputs)

    layout_map = strict_map(their_mesh(), {})
    if when == "inside":
        model = born(lambda: with_lora(make_llama()), layout_map)
    else:
        model = layout_map.place(with_lora(born(make_llama, layout_map)))
    of_layer: dict[str, Dims] = {
        "attn/q_proj/w_lora_a": (FSDP, ()),
        "attn/q_proj/w_lora_b": ((), TP, ()),
        "mlp/down_proj/kernel_lora_a": (TP, ()),
        "mlp/down_proj/kernel_lora_b": ((), FSDP),
    }
    dims = MODELS["llama3"][1] | in_the_layer(of_layer)
    assert_model_lies(model, dims, their_mesh())
    optimizer = flm.create_optimizer(
        model, optax.adamw(1e-3), layout_map, wrt=nnx.LoRAParam
    )
    assert_model_lies(optimizer.opt_state[0].mu, in_the_layer(of_layer), their_mesh())


def test_quantised_inside(mesh: flm.DeviceMesh) -> None:
    """int8 kernels lie as their kernel would; size-1 dims of scales are whole."""
    rule = qwix.QuantizationRule(module_path=".*", weight_qtype="int8")

    def make() -> Any:
        model = make_llama()
        provider = qwix.PtqProvider([rule])
        return qwix.quantize_model(model, provider, **model.get_model_input())

    leaves = leaves_of(born(make, strict_map(mesh, RULES)))
    kernel = leaves["layers/0/mlp/down_proj/kernel/array/qvalue"]
    scale = leaves["layers/0/mlp/down_proj/kernel/array/scale"]
    assert kernel.dtype == jnp.int8
    assert_lies(kernel, (("model",), ("data",)), mesh)
    assert scale.shape == (1, 32)
    assert_lies(scale, ((), ("data",)), mesh)
