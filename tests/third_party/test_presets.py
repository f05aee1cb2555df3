"""Presets on published models: their leaves, and a train step on eight devices."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from shapes import axes_of
from shards import assert_lies

import flax_layoutmap as flm
from third_party.published import TOKENS, leaves_of, next_token_loss

pytestmark = [
    pytest.mark.slow,
    # Tunix writes `sharding=`, which Flax has renamed, and reads `.value`.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

MESHES = ["fsdp=2,tensor=4", "data=2,fsdp=2,tensor=2"]
ADAMW = optax.adamw(1e-2, eps=1e-3)
# Layers, vocabulary, model, heads, heads of keys, head dim, hidden units.
SIZES = {"L": 2, "V": 256, "d": 64, "H": 8, "K": 4, "s": 16, "f": 96}


def package(name: str) -> Any:
    """A module of a library."""
    top = name.partition(".")[0]
    if top == "transformers":
        pytest.importorskip(
            "transformers.modeling_flax_utils",
            reason="The package transformers is not installed, or has no Flax models: "
            "they were removed in 5.0.",
        )
    return pytest.importorskip(
        name, reason=f"The package {top} is not installed, or not all that it imports."
    )


# ------------------------------------------------------------------------- Tunix


def of_tunix(name: str, *, tied: bool | None = None, **more: Any) -> Any:
    """A small model of Tunix."""
    module = package(f"tunix.models.{name}.model")
    sizes: dict[str, Any] = {
        "num_layers": SIZES["L"],
        "embed_dim": SIZES["d"],
        "hidden_dim": SIZES["f"],
        "num_heads": SIZES["H"],
        "num_kv_heads": SIZES["K"],
        "head_dim": SIZES["s"],
    }
    if name.startswith("gemma"):
        sizes["num_embed"] = SIZES["V"]
    else:
        sizes |= {"vocab_size": SIZES["V"], "rope_theta": 10_000, "norm_eps": 1e-6}
        key = "weight_tying" if name == "llama3" else "use_tied_embedding"
        sizes[key] = bool(tied)
    config = module.ModelConfig(**sizes | more)
    classes = {"llama3": "Llama3", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    classes |= {"gemma": "Gemma", "gemma3": "Gemma3"}
    return getattr(module, classes[name])(config, rngs=nnx.Rngs(0))


def gemma(generation: int, **more: Any) -> Any:
    if generation == 3:
        kind = {"param_dtype": jnp.float32}  # not bfloat16
        return of_tunix("gemma3", sliding_window_size=8, **kind, **more)
    kinds = package("tunix.models.gemma.model").AttentionType
    return of_tunix(
        "gemma",
        final_logit_softcap=None,
        use_post_attn_norm=generation == 2,
        use_post_ffw_norm=generation == 2,
        attention_types=(kinds.GLOBAL,) * SIZES["L"],
        **more,
    )


TUNIX: dict[tuple[str, str], Callable[[], Any]] = {
    ("llama", "tunix"): lambda: of_tunix("llama3"),
    ("llama", "tunix, tied"): lambda: of_tunix("llama3", tied=True),
    ("qwen2", "tunix"): lambda: of_tunix("qwen2"),
    ("qwen3", "tunix"): lambda: of_tunix("qwen3", head_dim=32),
    ("qwen3_moe", "tunix"): lambda: of_tunix(
        "qwen3", num_experts=8, num_experts_per_tok=2
    ),
    ("gemma", "tunix, 1"): lambda: gemma(1),
    ("gemma", "tunix, 1, without groups"): lambda: gemma(1, num_kv_heads=SIZES["H"]),
    ("gemma", "tunix, 2"): lambda: gemma(2),
    ("gemma", "tunix, 3"): lambda: gemma(3),
}


def loss_of_tunix(model: Any, tokens: Any) -> Any:
    rows, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
    causal = jnp.tril(jnp.ones((length, length), bool))
    mask = jnp.broadcast_to(causal, (rows, length, length))
    logits, _ = model(tokens, positions, None, mask)
    return next_token_loss(logits, tokens)


# ------------------------------------------------------------------ transformers


def of_transformers(name: str, **sizes: Any) -> Any:
    """A Flax class of transformers 4, without weights."""
    module = package("transformers")
    config = getattr(module, f"{name}Config")(**sizes)
    head = {"GPT2": "LMHeadModel", "T5": "ForConditionalGeneration"}
    model = getattr(module, f"Flax{name}{head.get(name, 'ForCausalLM')}")
    return model(config, _do_init=False)


LLAMA_SIZES = {
    "hidden_size": SIZES["d"],
    "intermediate_size": SIZES["f"],
    "num_hidden_layers": SIZES["L"],
    "num_attention_heads": SIZES["H"],
    "num_key_value_heads": SIZES["K"],
    "head_dim": SIZES["s"],  # of Gemma
    "vocab_size": SIZES["V"],
    "max_position_embeddings": 32,
}
GPT2_SIZES = {"n_embd": 128, "n_layer": 2, "n_head": 8, "vocab_size": 259}
LINEN: dict[tuple[str, str], Callable[[], Any]] = {
    ("llama", "linen"): lambda: of_transformers("Llama", **LLAMA_SIZES),
    ("mistral", "linen"): lambda: of_transformers("Mistral", **LLAMA_SIZES),
    ("gemma", "linen, 1"): lambda: of_transformers("Gemma", **LLAMA_SIZES),
    ("gpt2_transposed", "linen"): lambda: of_transformers(
        "GPT2", n_positions=32, **GPT2_SIZES
    ),
}


def t5(monkeypatch: pytest.MonkeyPatch, gated: bool) -> Any:
    """T5 names an argument of `jnp.clip` by what is no longer its name."""
    clip = jnp.clip
    monkeypatch.setattr(
        jnp, "clip", lambda x, a_min=None, a_max=None: clip(x, a_min, a_max)
    )
    return of_transformers(
        "T5",
        d_model=128,
        d_kv=32,
        d_ff=192,
        num_layers=2,
        num_heads=8,
        vocab_size=512,
        relative_attention_num_buckets=32,
        feed_forward_proj="gated-gelu" if gated else "relu",
        tie_word_embeddings=not gated,
    )


# ------------------------------------------------------------------------- tests


def ids(models: dict[tuple[str, str], Any]) -> list[Any]:
    return [pytest.param(*key, id="-".join(key)) for key in models]


def assert_is_of(family: str, model: Any) -> None:
    """The preset has a rule for each leaf, and is the one that is detected."""
    mesh = flm.DeviceMesh.abstract(MESHES[0])
    resolution = flm.presets.load(family, mesh).resolve(model)
    assert not resolution.unmatched and not resolution.fallbacks
    detected = flm.presets.load(flm.presets.family_of(model), mesh).resolve(model)
    # Mistral is Llama in a variant, which is chosen later.
    plain = "llama" if family == "mistral" else family
    wanted = flm.presets.load(plain, mesh).resolve(model)
    assert [leaf.layout for leaf in detected] == [leaf.layout for leaf in wanted]


@pytest.mark.parametrize(("family", "spelling"), ids(TUNIX))
def test_leaves_of_tunix(family: str, spelling: str) -> None:
    assert_is_of(family, nnx.eval_shape(TUNIX[family, spelling]))


@pytest.mark.parametrize(("family", "spelling"), ids(LINEN))
def test_leaves_of_transformers(family: str, spelling: str) -> None:
    assert_is_of(family, LINEN[family, spelling]().params_shape_tree)


@pytest.mark.parametrize("gated", [False, True])
def test_leaves_of_t5(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_is_of("t5", t5(monkeypatch, gated).params_shape_tree)


def assert_as_the_preset_says(arrays: dict[str, Any], resolution: Any) -> None:
    """Each shard is where the Resolution has it."""
    assert arrays
    for path, array in arrays.items():
        leaf = resolution[path]
        dims = tuple(
            axes if isinstance(axes, tuple) else (axes,) if axes else ()
            for axes in axes_of(leaf)
        )
        assert_lies(array, dims, resolution.mesh)


def assert_close(
    found: dict[str, Any], wanted: dict[str, Any], atol: float = 5e-6
) -> None:
    assert found.keys() == wanted.keys()
    for path, array in found.items():
        np.testing.assert_allclose(
            np.asarray(array, np.float32),
            np.asarray(wanted[path], np.float32),
            atol=atol,
            rtol=5e-5,
            err_msg=path,
        )


def tunix_step(model: Any, optimizer: Any, tokens: Any) -> Any:
    loss, gradients = nnx.value_and_grad(loss_of_tunix)(model, tokens)
    optimizer.update(model, gradients)
    return loss


@functools.cache
def tunix_on_one_device(family: str, spelling: str) -> tuple[Any, float]:
    model = TUNIX[family, spelling]()
    optimizer = nnx.Optimizer(model, ADAMW, wrt=nnx.Param)
    loss = float(nnx.jit(tunix_step)(model, optimizer, TOKENS))
    return jax.tree.map(np.asarray, leaves_of(model)), loss


@pytest.mark.parametrize(
    ("family", "spelling", "axes"),
    [
        *itertools.product(["llama", "qwen2", "qwen3"], ["tunix"], MESHES),
        *itertools.product(["gemma"], ["tunix, 2", "tunix, 3"], MESHES),
        ("qwen3_moe", "tunix", "fsdp=2,expert=2,tensor=2"),
    ],
)
def test_a_step_of_tunix(family: str, spelling: str, axes: str) -> None:
    make = TUNIX[family, spelling]
    wanted, wanted_loss = tunix_on_one_device(family, spelling)
    layout_map = flm.presets.load(family, flm.DeviceMesh(axes))
    model = flm.create(make, layout_map)
    optimizer = flm.create_optimizer(model, ADAMW, layout_map, wrt=nnx.Param)
    loss = flm.jit(tunix_step, layout_map=layout_map)(model, optimizer, TOKENS)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-5)
    found = leaves_of(model)
    assert_as_the_preset_says(found, layout_map.resolve(model))
    assert_close(found, wanted)
