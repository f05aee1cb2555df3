"""The Flax (Linen) models of Hugging Face's `transformers` 4: five architectures."""

import functools
from typing import Any, NamedTuple

import jax
import pytest
from shards import Dims

import flax_layoutmap as flm
from third_party.published import (
    COLUMN,
    DATA,
    MODEL,
    ROW,
    assert_equal,
    assert_model_lies,
    born,
    by_jit,
    made_in_scope,
    strict_map,
)

hf: Any = pytest.importorskip(
    "transformers", reason="The package transformers (below 5) is not installed."
)
pytest.importorskip(
    "transformers.modeling_flax_utils",
    reason="The installed transformers has no Flax models: they were removed in 5.0.",
)

pytestmark = pytest.mark.slow


class Family(NamedTuple):
    """One architecture, the rules that its users would write, and what they mean.

    Attributes:
        model: name of its class.
        config: name of the class of its configuration.
        sizes: arguments of the configuration.
        rules: pattern → layout.
        dims: path → the mesh axes of each dim; all other leaves are replicated.
        options: further arguments of the model.
    """

    model: str
    config: str
    sizes: dict[str, Any]
    rules: dict[str, Any]
    dims: dict[str, Dims]
    options: dict[str, Any] = {}


def of_layers(table: dict[str, Dims], layers: int = 2) -> dict[str, Dims]:
    """The table with `{n}` written out for each layer."""
    return {
        path.format(n=n): dims for path, dims in table.items() for n in range(layers)
    }


KERNELS = {"column": (DATA, MODEL), "row": (MODEL, DATA)}

FAMILIES = {
    "llama": Family(
        "FlaxLlamaForCausalLM",
        "LlamaConfig",
        {
            "vocab_size": 64,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
        {
            "embed_tokens/embedding": KERNELS["row"],
            "self_attn/(q|k|v)_proj/kernel": KERNELS["column"],
            "self_attn/o_proj/kernel": KERNELS["row"],
            "mlp/(gate|up)_proj/kernel": KERNELS["column"],
            "mlp/down_proj/kernel": KERNELS["row"],
            "lm_head/kernel": KERNELS["column"],
            "norm/weight": None,
        },
        of_layers(
            {
                "model/embed_tokens/embedding": ROW,
                "model/layers/{n}/self_attn/q_proj/kernel": COLUMN,
                "model/layers/{n}/self_attn/k_proj/kernel": COLUMN,
                "model/layers/{n}/self_attn/v_proj/kernel": COLUMN,
                "model/layers/{n}/self_attn/o_proj/kernel": ROW,
                "model/layers/{n}/mlp/gate_proj/kernel": COLUMN,
                "model/layers/{n}/mlp/up_proj/kernel": COLUMN,
                "model/layers/{n}/mlp/down_proj/kernel": ROW,
                "lm_head/kernel": COLUMN,
            }
        ),
    ),
    "gpt2": Family(
        "FlaxGPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 4},
        {
            "wte/embedding": KERNELS["row"],
            "wpe/embedding": (None, MODEL),
            # FlaxConv1D keeps its kernel as (out, in).
            "attn/c_attn/kernel|mlp/c_fc/kernel": KERNELS["row"],
            "c_proj/kernel": KERNELS["column"],
            "(c_attn|c_fc)/bias": (MODEL,),
            "ln_|c_proj/bias": None,
        },
        of_layers(
            {
                "transformer/wte/embedding": ROW,
                "transformer/wpe/embedding": ((), ("model",)),
                "transformer/h/{n}/attn/c_attn/kernel": ROW,
                "transformer/h/{n}/attn/c_attn/bias": (("model",),),
                "transformer/h/{n}/attn/c_proj/kernel": COLUMN,
                "transformer/h/{n}/mlp/c_fc/kernel": ROW,
                "transformer/h/{n}/mlp/c_fc/bias": (("model",),),
                "transformer/h/{n}/mlp/c_proj/kernel": COLUMN,
            }
        ),
    ),
}


def model_of(name: str, **options: Any) -> Any:
    """The published class, built from a small configuration with random weights."""
    family = FAMILIES[name]
    config = getattr(hf, family.config)(**family.sizes)
    return getattr(hf, family.model)(config, **family.options, **options)


def weights_of(name: str) -> Any:
    """Its weights, by the way that `transformers` documents for sharded ones."""
    model = model_of(name, _do_init=False)
    return model.init_weights(jax.random.PRNGKey(0), model.input_shape)


@functools.cache
def expected(name: str) -> Any:
    """What `jax.jit` makes of it."""
    return by_jit(functools.partial(weights_of, name))


def map_of(name: str, mesh: flm.DeviceMesh) -> flm.LayoutMap:
    """The rules of a family."""
    return strict_map(mesh, FAMILIES[name].rules)


@pytest.mark.parametrize("name", FAMILIES)
def test_created_in_shards(name: str, mesh: flm.DeviceMesh) -> None:
    weights = born(functools.partial(weights_of, name), map_of(name, mesh))
    assert_model_lies(weights, FAMILIES[name].dims, mesh)
    assert_equal(weights, expected(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_made_in_a_scope(name: str, mesh: flm.DeviceMesh) -> None:
    """The class makes its own weights, in `__init__`, as most users have it."""
    layout_map = map_of(name, mesh)
    model = made_in_scope(functools.partial(model_of, name), layout_map)
    assert_model_lies(model.params, FAMILIES[name].dims, mesh)
    assert_equal(model.params, expected(name))
    # A model of the scope makes sharded weights after it too.
    later = made_in_scope(functools.partial(model_of, name, _do_init=False), layout_map)
    again = later.init_weights(jax.random.PRNGKey(0), later.input_shape)
    assert_model_lies(again, FAMILIES[name].dims, mesh)


def test_not_in_a_scope_it_lies_on_one_device(mesh: flm.DeviceMesh) -> None:
    """The control of the above."""
    with pytest.raises(AssertionError):
        assert_model_lies(weights_of("llama"), FAMILIES["llama"].dims, mesh)
