"""Which numbers of which tensor a leaf has: each step of a family against NumPy."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from mapped_families import FAMILIES, TINY
from safetensors.numpy import save_file
from same import refused
from shapes import nested

import flax_layoutmap as flm
from flax_layoutmap.checkpoint import mappings as m

Tensors = dict[str, np.ndarray]
Value = Callable[[np.ndarray], np.ndarray]
restore = flm.checkpoint.restore_safetensors


# What is made of the weight `w` of a tensor.
MADE: dict[str, Value] = {
    "same": lambda w: w,
    "turned": lambda w: w.swapaxes(-1, -2),
    "heads": lambda w: w.reshape(4, -1, w.shape[-1]).transpose(2, 0, 1),
    "from heads": lambda w: w.T.reshape(4, -1, len(w)),
    "second of three": lambda w: w[:, 32:64].reshape(32, 4, 8),
    "even": lambda w: w[..., ::2],
    "odd": lambda w: w[..., 1::2],
    "conv1d": lambda w: w.transpose(2, 1, 0),
    "conv2d": lambda w: w.transpose(2, 3, 1, 0),
}
# Family; leaf; tensor, with `{}` for all experts; what is made of it. `L.` is layer 1
# of the decoders, and a leaf of which no layer is named is in it.
TABLE = """
llama; attention/query/kernel; L.self_attn.q_proj.weight; heads
qwen3; attention/key_norm/scale; L.self_attn.k_norm.weight; same
gemma 3, with vision; mlp_norm/scale; language_model.L.pre_feedforward_layernorm.weight; same
gpt2; attention/key/kernel; h.1.attn.c_attn.weight; second of three
mixtral; mlp/router/kernel; L.block_sparse_moe.gate.weight; turned
mixtral; mlp/experts/gate/kernel; L.block_sparse_moe.experts.{}.w1.weight; turned
mixtral; mlp/experts/up/kernel; L.block_sparse_moe.experts.{}.w3.weight; turned
mixtral; mlp/experts/down/kernel; L.block_sparse_moe.experts.{}.w2.weight; turned
qwen3_moe; mlp/experts/up/kernel; L.mlp.experts.{}.up_proj.weight; turned
deepseek_v3; attention/kv_b/kernel; L.self_attn.kv_b_proj.weight; heads
deepseek_v3; mlp/router/bias; L.mlp.gate.e_score_correction_bias; same
deepseek_v3; 0/mlp/up/kernel; model.layers.0.mlp.up_proj.weight; turned
gpt_oss; mlp/experts/gate/kernel; L.mlp.experts.gate_up_proj; even
gpt_oss; mlp/experts/up/kernel; L.mlp.experts.gate_up_proj; odd
gpt_oss; mlp/experts/down/kernel; L.mlp.experts.down_proj; same
gpt_oss; mlp/experts/up/bias; L.mlp.experts.gate_up_proj_bias; odd
t5; decoder/1/cross_attention/key/kernel; decoder.block.1.layer.1.EncDecAttention.k.weight; heads
t5; decoder/1/mlp/gate/kernel; decoder.block.1.layer.2.DenseReluDense.wi_0.weight; turned
t5; decoder/1/mlp/up/kernel; decoder.block.1.layer.2.DenseReluDense.wi_1.weight; turned
t5, 1.0; /lm_head/kernel; shared.weight; turned
whisper; /encoder/conv1/kernel; model.encoder.conv1.weight; conv1d
vit; /patch_embedding/kernel; vit.embeddings.patch_embeddings.projection.weight; conv2d
vit; attention/out/kernel; vit.encoder.layer.1.attention.output.dense.weight; from heads
clip; /vision/pre_norm/scale; vision_model.pre_layrnorm.weight; same
"""  # noqa: E501
LEAVES = [line.split("; ") for line in TABLE.strip().splitlines()]


def path_of(leaf: str) -> str:
    """The path: `/a` as it is, `1/a` or `a` of a layer, `side/1/a` of one of a side."""
    if leaf.startswith("/"):
        return leaf[1:]
    side, _, rest = leaf.partition("/1/")
    if rest:
        return f"{side}/layers/1/{rest}"
    return f"layers/{leaf}" if leaf[0].isdigit() else f"layers/1/{leaf}"


def numbered(family: str) -> Tensors:
    """The tensors of a tiny model, in which no two numbers are equal."""
    found, start = {}, 0
    for name, shape in FAMILIES[family].stored(TINY).items():
        size = int(np.prod(shape))
        numbers = np.arange(start, start + size, dtype=np.int32)
        found[name], start = numbers.reshape(shape), start + size
    return found


@pytest.mark.parametrize("case", LEAVES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_a_leaf_has_the_right_numbers(case: list[str], tmp_path: Path) -> None:
    family, path, made = FAMILIES[case[0]], path_of(case[1]), MADE[case[3]]
    name = re.sub(r"\bL\.", "model.layers.1.", case[2])
    tensors = numbered(case[0])
    save_file(tensors, tmp_path / "model.safetensors")
    if "{}" in name:
        expected = np.stack([made(tensors[name.format(at)]) for at in range(4)])
    else:
        expected = made(tensors[name])
    shape = family.model(TINY, scanned=False).get(path, expected.shape)
    assert shape == expected.shape
    found = restore(
        tmp_path,
        nested({path: np.zeros(expected.shape, np.int32)}),
        mapping=family.entries(TINY, False),
        unexpected="ignore",
    )
    [leaf] = jax.tree.leaves(found)
    np.testing.assert_array_equal(leaf, expected)


def test_stacks_begin_with_their_own_layer(tmp_path: Path) -> None:
    """The layers with experts of DeepSeek V3 come after the dense ones."""
    tensors, family = numbered("deepseek_v3"), FAMILIES["deepseek_v3"]
    save_file(tensors, tmp_path / "model.safetensors")
    stacks = {"dense_layers": [0], "moe_layers": [1, 2]}
    shapes = {
        f"{stack}/attention/kv_a/kernel": np.zeros((len(numbers), 32, 24), np.int32)
        for stack, numbers in stacks.items()
    }
    mapping = family.entries(TINY, True)
    found = restore(tmp_path, nested(shapes), mapping=mapping, unexpected="ignore")
    for stack, numbers in stacks.items():
        kernel = found[stack]["attention"]["kv_a"]["kernel"]
        for at, layer in enumerate(numbers):
            name = f"model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight"
            np.testing.assert_array_equal(kernel[at], tensors[name].T)


# -------------------------------------------------------------------------- float8

# Two experts, (out, in), in which the last blocks are not whole.
OUT, IN = 2 * 3 * 50, 200


def scaled(rng: np.random.Generator, block: int = 128) -> tuple[np.ndarray, np.ndarray]:
    weight = rng.normal(size=(OUT, IN)).astype(jnp.float8_e4m3fn)
    scales = rng.random((-(-OUT // block), -(-IN // block))).astype(np.float32)
    return weight, scales


def product(weight: np.ndarray, scales: np.ndarray, block: int = 128) -> np.ndarray:
    """In float32."""
    each = np.repeat(np.repeat(scales, block, 0), block, 1)[:OUT, :IN]
    return weight.astype(np.float32) * each


@pytest.mark.parametrize("block", [128, 48])
@pytest.mark.parametrize(
    "layout", [("model", "data", None, None), (None, "data", "model", None)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_float8_times_its_scales(
    block: int, layout: Any, dtype: str, mesh: flm.DeviceMesh, tmp_path: Path
) -> None:
    """Experts with a dim for heads, (experts, in, heads, out), as one sharded leaf."""
    rng, tensors, expected = np.random.default_rng(0), {}, []
    for expert in range(4):
        weight, scales = scaled(rng, block)
        tensors[f"e.{expert}.weight"] = weight
        tensors[f"e.{expert}.weight_scale_inv"] = scales
        value = product(weight, scales, block).astype(dtype)
        expected.append(value.reshape(4, 75, IN).transpose(2, 0, 1))
    save_file(tensors, tmp_path / "model.safetensors")
    steps = (m.dequantize(block=block), m.linear(), m.stack(field="expert"))
    rules = flm.LayoutMap(mesh, strict=False)
    rules["kernel"] = layout
    found = restore(
        tmp_path,
        {"kernel": jax.ShapeDtypeStruct((4, IN, 4, 75), dtype)},
        layout_map=rules,
        mapping=[("kernel", "e.{expert}.weight", steps)],
        dtype="target",
    )
    np.testing.assert_array_equal(found["kernel"], np.stack(expected), strict=True)
    assert not found["kernel"].sharding.is_fully_replicated


def test_float8_parts_and_tensors_that_are_kept(tmp_path: Path) -> None:
    """Parts of a tensor, times their scales and as they are, and bfloat16 as it is."""
    weight, scales = scaled(np.random.default_rng(0))
    plain = np.full((4, 6), 1.5, jnp.bfloat16)
    tensors = {"w": weight, "w_scale_inv": scales, "plain": plain}
    # More numbers than are multiplied at a time.
    tensors["x"] = np.ones((3000, 700), jnp.float8_e4m3fn)
    tensors["x_scale_inv"] = np.arange(24 * 6, dtype=np.float32).reshape(24, 6)
    save_file(tensors, tmp_path / "model.safetensors")
    mapping = [
        ("a", "w", (m.split(0, 1, 2), m.dequantize())),
        ("b", "w", m.split(0, 0, 2)),
        ("c", "plain", m.dequantize()),
        ("large", "x", m.dequantize()),
    ]
    half = (OUT // 2, IN)
    target = {"a": np.zeros(half, jnp.bfloat16), "c": np.zeros_like(plain)}
    target["b"] = np.zeros(half, jnp.float8_e4m3fn)
    target["large"] = np.zeros((3000, 700), jnp.bfloat16)
    found = restore(tmp_path, target, mapping=mapping)
    both = product(weight, scales).astype(jnp.bfloat16)
    np.testing.assert_array_equal(found["a"], both[OUT // 2 :])
    np.testing.assert_array_equal(found["b"], weight[: OUT // 2])
    np.testing.assert_array_equal(found["c"], plain, strict=True)
    each = tensors["x_scale_inv"].repeat(128, 0).repeat(128, 1)[:3000, :700]
    np.testing.assert_array_equal(found["large"], each.astype(jnp.bfloat16))


# --------------------------------------------------------------------------- MXFP4


def packed(rng: np.random.Generator, *shape: int) -> Tensors:
    """Blocks and scales of a tensor with every exponent that keeps it finite."""
    *before, last = shape
    return {
        "_blocks": rng.integers(0, 256, (*before, last // 32, 16), np.uint8),
        "_scales": rng.integers(0, 253, (*before, last // 32), np.uint8),
    }


def unpacked(tensors: Tensors) -> np.ndarray:
    """By the dtypes of the numbers and of the scales; exact in bfloat16."""
    blocks, scales = tensors["_blocks"], tensors["_scales"]
    pairs = np.stack([blocks & 15, blocks >> 4], -1).view(ml_dtypes.float4_e2m1fn)
    numbers = pairs.reshape(*blocks.shape[:-1], 32).astype(np.float64)
    factors = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    numbers *= factors[..., None]
    return numbers.reshape(*blocks.shape[:-2], -1).astype(jnp.bfloat16)


def bits(array: Any) -> np.ndarray:
    """The bits, in which 0.0 and -0.0 differ."""
    return np.asarray(array).view(np.uint16)


@pytest.mark.parametrize(
    "layout", [("model", "data", None), ("data", None, "model"), None]
)
def test_mxfp4_to_bfloat16(layout: Any, mesh: flm.DeviceMesh, tmp_path: Path) -> None:
    """The experts of gpt-oss: gate and up alternate in one tensor."""
    rng, at = np.random.default_rng(0), "model.layers.0.mlp.experts."
    fused, down = packed(rng, 4, 2 * 64, 96), packed(rng, 4, 96, 64)
    tensors = {f"{at}gate_up_proj{end}": value for end, value in fused.items()}
    tensors |= {f"{at}down_proj{end}": value for end, value in down.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    both = unpacked(fused).swapaxes(1, 2)
    expected = {"gate": both[..., 0::2], "up": both[..., 1::2]}
    expected["down"] = unpacked(down).swapaxes(1, 2)
    assert all(np.isfinite(value).all() for value in expected.values())
    rules = flm.LayoutMap(mesh, strict=False)
    rules["kernel"] = layout
    kernels = {
        name: {"kernel": jax.ShapeDtypeStruct(value.shape, value.dtype)}
        for name, value in expected.items()
    }
    target = {"layers": [{"mlp": {"experts": kernels}}]}
    found = restore(tmp_path, target, layout_map=rules, mapping=m.gpt_oss())
    for name, value in expected.items():
        leaf = found["layers"][0]["mlp"]["experts"][name]["kernel"]
        assert leaf.sharding.is_fully_replicated == (layout is None)
        np.testing.assert_array_equal(bits(leaf), bits(value), strict=True)


def test_parts_of_mxfp4(tmp_path: Path) -> None:
    """One expert of four, a row that ends within blocks, and all bytes and scales."""
    codes = np.tile(np.arange(256, dtype=np.uint8).reshape(-1, 16), (253, 1))
    every = {"_blocks": codes, "_scales": np.repeat(np.arange(253, dtype=np.uint8), 16)}
    step, tensors = m.dequantize("mxfp4"), packed(np.random.default_rng(0), 4, 6, 64)
    rest = (3, 3, 3, 3, 3, 5, 44)
    for parts, of, expected in (
        ((m.split(0, 2, 4),), tensors, unpacked(tensors)[2:3]),
        ((m.split(2, 5, rest),), tensors, unpacked(tensors)[..., 15:20]),
        ((), every, unpacked(every)),
    ):
        held = {f"w{end}": value for end, value in of.items()}
        save_file(held, tmp_path / "model.safetensors")
        target = {"kernel": np.zeros(expected.shape, jnp.bfloat16)}
        mapping = [("kernel", "w_blocks", (step, *parts))]
        found = restore(tmp_path, target, mapping=mapping)
        np.testing.assert_array_equal(bits(found["kernel"]), bits(expected))


# --------------------------------------------------------------- scales that are wrong

MATRIX, BLOCKS = (300, 200), (6, 64)
FLOAT8: Any = dict(
    zip(("w", "w_scale_inv"), scaled(np.random.default_rng(0)), strict=True)
)
FOUR = {f"w{end}": v for end, v in packed(np.random.default_rng(0), 6, 64).items()}
WRONG: dict[str, tuple[Any, ...]] = {
    "no scales": (
        *({"w": FLOAT8["w"]}, "w", m.dequantize(), MATRIX),
        "kernel (300,200): there is no tensor 'w_scale_inv'",
    ),
    "other blocks": (
        *(FLOAT8, "w", m.dequantize(block=64), MATRIX),
        "needs tensor 'w_scale_inv' (3,2) to have the shape (5,4)",
    ),
    "not multiplied": (FLOAT8, "w", (), MATRIX, "w_scale_inv (3,2): no leaf"),
    "three dims": (FLOAT8, "w", m.dequantize(), (3, 2, 2), "of two dims, not (3,2,2)"),
    "parts of blocks": (
        *(FOUR, "w_blocks", m.dequantize("mxfp4"), (6, 63)),
        "blocks of 32 numbers along the last dim, which do not make (6,63)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_scales_that_are_wrong(name: str, tmp_path: Path) -> None:
    tensors, tensor, steps, shape, text = WRONG[name]
    save_file(tensors, tmp_path / "model.safetensors")
    target = {"kernel": np.zeros(shape, jnp.bfloat16)}
    mapping = [("kernel", tensor, steps)]
    with refused(text):
        restore(tmp_path, target, mapping=mapping, dtype="target")
