"""Which numbers of which tensor a leaf has: each step of a family against NumPy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mapped_families import FAMILIES
from safetensors.numpy import save_file
from same import refused
from shapes import nested

import flax_layoutmap as flm
from flax_layoutmap.checkpoint import _safetensors_read, _safetensors_scales
from flax_layoutmap.checkpoint import mappings as m

Tensors = dict[str, np.ndarray]
A, E = "model.layers.1.self_attn.", "model.layers.1.mlp.experts."
W = "model.layers.1.block_sparse_moe."
T, V, C = "decoder.block.1.layer.", "vit.encoder.layer.1.", "vision_model."


def each(tensors: Tensors, name: str) -> np.ndarray:
    """The kernels of all experts."""
    return np.stack([tensors[name.format(e)].T for e in range(4)])


# Family, leaf of layer 1, and what it is made of; heads are 4 or 2, of 8.
LEAVES: list[tuple[str, str, Callable[[Tensors], np.ndarray]]] = [
    (
        "llama",
        "layers/1/attention/query/kernel",
        lambda t: t[f"{A}q_proj.weight"].reshape(4, 8, 32).transpose(2, 0, 1),
    ),
    (
        "mistral",
        "layers/1/attention/out/kernel",
        lambda t: t[f"{A}o_proj.weight"].reshape(32, 4, 8).transpose(1, 2, 0),
    ),
    (
        "qwen2",
        "layers/1/attention/key/bias",
        lambda t: t[f"{A}k_proj.bias"].reshape(2, 8),
    ),
    ("qwen3", "layers/1/attention/key_norm/scale", lambda t: t[f"{A}k_norm.weight"]),
    (
        "gemma",
        "layers/1/mlp_norm/scale",
        lambda t: t["model.layers.1.post_attention_layernorm.weight"],
    ),
    (
        "gemma 3",
        "layers/1/attention_post_norm/scale",
        lambda t: t["model.layers.1.post_attention_layernorm.weight"],
    ),
    (
        "gemma 3, with vision",
        "layers/1/mlp_norm/scale",
        lambda t: t["language_model.model.layers.1.pre_feedforward_layernorm.weight"],
    ),
    (
        "gpt2",
        "layers/1/attention/key/kernel",
        lambda t: t["h.1.attn.c_attn.weight"][:, 32:64].reshape(32, 4, 8),
    ),
    ("gpt2", "layers/1/mlp/up/kernel", lambda t: t["h.1.mlp.c_fc.weight"]),
    ("mixtral", "layers/1/mlp/router/kernel", lambda t: t[f"{W}gate.weight"].T),
    (
        "mixtral",
        "layers/1/mlp/experts/gate/kernel",
        lambda t: each(t, f"{W}experts.{{}}.w1.weight"),
    ),
    (
        "mixtral",
        "layers/1/mlp/experts/up/kernel",
        lambda t: each(t, f"{W}experts.{{}}.w3.weight"),
    ),
    (
        "mixtral",
        "layers/1/mlp/experts/down/kernel",
        lambda t: each(t, f"{W}experts.{{}}.w2.weight"),
    ),
    (
        "mixtral, fused",
        "layers/1/mlp/experts/gate/kernel",
        lambda t: t[f"{E}gate_up_proj"][:, :32].transpose(0, 2, 1),
    ),
    (
        "qwen3_moe, fused",
        "layers/1/mlp/experts/up/kernel",
        lambda t: t[f"{E}gate_up_proj"][:, 32:].transpose(0, 2, 1),
    ),
    (
        "qwen3_moe, fused",
        "layers/1/mlp/experts/down/kernel",
        lambda t: t[f"{E}down_proj"].transpose(0, 2, 1),
    ),
    (
        "qwen3_moe",
        "layers/1/mlp/experts/up/kernel",
        lambda t: each(t, f"{E}{{}}.up_proj.weight"),
    ),
    (
        "deepseek_v3",
        "layers/1/attention/q_b/kernel",
        lambda t: t[f"{A}q_b_proj.weight"].reshape(4, 12, 16).transpose(2, 0, 1),
    ),
    (
        "deepseek_v3",
        "layers/1/attention/kv_b/kernel",
        lambda t: t[f"{A}kv_b_proj.weight"].reshape(4, 14, 20).transpose(2, 0, 1),
    ),
    (
        "deepseek_v3",
        "layers/1/mlp/router/bias",
        lambda t: t["model.layers.1.mlp.gate.e_score_correction_bias"],
    ),
    (
        "deepseek_v3",
        "layers/0/mlp/up/kernel",
        lambda t: t["model.layers.0.mlp.up_proj.weight"].T,
    ),
    (
        "deepseek_v3",
        "layers/1/mlp/shared_experts/up/kernel",
        lambda t: t["model.layers.1.mlp.shared_experts.up_proj.weight"].T,
    ),
    (
        "gpt_oss",
        "layers/1/mlp/experts/gate/kernel",
        lambda t: t[f"{E}gate_up_proj"][..., ::2],
    ),
    (
        "gpt_oss",
        "layers/1/mlp/experts/up/kernel",
        lambda t: t[f"{E}gate_up_proj"][..., 1::2],
    ),
    ("gpt_oss", "layers/1/mlp/experts/down/kernel", lambda t: t[f"{E}down_proj"]),
    (
        "gpt_oss",
        "layers/1/mlp/experts/up/bias",
        lambda t: t[f"{E}gate_up_proj_bias"][:, 1::2],
    ),
    (
        "gpt_oss, in MXFP4",
        "layers/1/mlp/experts/gate/blocks",
        lambda t: t[f"{E}gate_up_proj_blocks"][:, ::2],
    ),
    (
        "gpt_oss, in MXFP4",
        "layers/1/mlp/experts/up/scales",
        lambda t: t[f"{E}gate_up_proj_scales"][:, 1::2],
    ),
    (
        "t5",
        "decoder/layers/1/cross_attention/key/kernel",
        lambda t: (
            t[f"{T}1.EncDecAttention.k.weight"].reshape(4, 8, 32).transpose(2, 0, 1)
        ),
    ),
    (
        "t5",
        "decoder/layers/1/mlp/gate/kernel",
        lambda t: t[f"{T}2.DenseReluDense.wi_0.weight"].T,
    ),
    (
        "t5",
        "decoder/layers/1/mlp/up/kernel",
        lambda t: t[f"{T}2.DenseReluDense.wi_1.weight"].T,
    ),
    ("t5, 1.0", "lm_head/kernel", lambda t: t["shared.weight"].T),
    (
        "whisper",
        "encoder/conv1/kernel",
        lambda t: t["model.encoder.conv1.weight"].transpose(2, 1, 0),
    ),
    (
        "whisper",
        "decoder/layers/1/mlp_norm/bias",
        lambda t: t["model.decoder.layers.1.final_layer_norm.bias"],
    ),
    (
        "vit",
        "patch_embedding/kernel",
        lambda t: t["vit.embeddings.patch_embeddings.projection.weight"].transpose(
            2, 3, 1, 0
        ),
    ),
    (
        "vit",
        "layers/1/attention/out/kernel",
        lambda t: t[f"{V}attention.output.dense.weight"].T.reshape(4, 8, 32),
    ),
    ("vit", "layers/1/mlp/down/kernel", lambda t: t[f"{V}output.dense.weight"].T),
    (
        "clip",
        "vision/layers/1/mlp/down/bias",
        lambda t: t[f"{C}encoder.layers.1.mlp.fc2.bias"],
    ),
    ("clip", "vision/pre_norm/scale", lambda t: t[f"{C}pre_layrnorm.weight"]),
]


def numbered(family: str) -> Tensors:
    """The tensors of a tiny model, in which no two numbers are equal."""
    found, start = {}, 0
    for name, shape in FAMILIES[family].stored(FAMILIES[family].tiny).items():
        size = int(np.prod(shape))
        numbers = np.arange(start, start + size, dtype=np.int32)
        found[name], start = numbers.reshape(shape), start + size
    return found


@pytest.mark.parametrize(
    ("family", "path", "made"), LEAVES, ids=[f"{f}-{p}" for f, p, _ in LEAVES]
)
def test_a_leaf_has_the_right_numbers(
    family: str, path: str, made: Callable[[Tensors], np.ndarray], tmp_path: Path
) -> None:
    tensors = numbered(family)
    save_file(tensors, tmp_path / "model.safetensors")
    expected = made(tensors)
    own = FAMILIES[family]
    assert (
        own.model(own.tiny, scanned=False).get(path, expected.shape) == expected.shape
    )
    found = flm.checkpoint.restore_safetensors(
        tmp_path,
        nested({path: np.zeros(expected.shape, np.int32)}),
        mapping=own.entries(own.tiny, False),
        unexpected="ignore",
    )
    [leaf] = jax.tree.leaves(found)
    np.testing.assert_array_equal(leaf, expected)


def test_stacks_begin_with_their_own_layer(tmp_path: Path) -> None:
    """The layers with experts of DeepSeek V3 come after the dense ones."""
    tensors, own = numbered("deepseek_v3"), FAMILIES["deepseek_v3"]
    save_file(tensors, tmp_path / "model.safetensors")
    target = nested(
        {
            f"{stack}/attention/kv_a/kernel": np.zeros((count, 32, 24), np.int32)
            for stack, count in (("dense_layers", 1), ("moe_layers", 2))
        }
    )
    found = flm.checkpoint.restore_safetensors(
        tmp_path, target, mapping=own.entries(own.tiny, True), unexpected="ignore"
    )
    for stack, numbers in (("dense_layers", [0]), ("moe_layers", [1, 2])):
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


@pytest.fixture(params=[1 << 20, 64])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all numbers multiplied at once, and with few."""
    monkeypatch.setattr(_safetensors_scales, "_PRODUCTS", request.param)


@pytest.mark.usefixtures("products")
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
        own = product(weight, scales, block).astype(dtype)
        expected.append(own.reshape(4, 75, IN).transpose(2, 0, 1))
    save_file(tensors, tmp_path / "model.safetensors")
    steps = (m.dequantize(block=block), m.linear(), m.stack(field="expert"))
    rules = flm.LayoutMap(mesh, strict=False)
    rules["kernel"] = layout
    read: list[tuple[int, int]] = []
    found = flm.checkpoint.restore_safetensors(
        tmp_path,
        {"kernel": jax.ShapeDtypeStruct((4, IN, 4, 75), dtype)},
        layout_map=rules,
        mapping=[("kernel", "e.{expert}.weight", steps)],
        dtype="target",
        progress=lambda done, total: read.append((done, total)),
    )
    np.testing.assert_array_equal(found["kernel"], np.stack(expected), strict=True)
    assert not found["kernel"].sharding.is_fully_replicated
    [(done, total)] = read
    assert done == total


def test_parts_of_a_float8_tensor(tmp_path: Path) -> None:
    """Two leaves that share a tensor, one of which takes the numbers as they are."""
    weight, scales = scaled(np.random.default_rng(0))
    tensors = {"w": weight, "w_scale_inv": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    mapping = [
        ("a", "w", (m.split(0, 1, 2), m.dequantize())),
        ("b", "w", m.split(0, 0, 2)),
    ]
    target = {
        "a": np.zeros((OUT // 2, IN), jnp.bfloat16),
        "b": np.zeros((OUT // 2, IN), jnp.float8_e4m3fn),
    }
    found = flm.checkpoint.restore_safetensors(tmp_path, target, mapping=mapping)
    both = product(weight, scales).astype(jnp.bfloat16)
    np.testing.assert_array_equal(found["a"], both[OUT // 2 :])
    np.testing.assert_array_equal(found["b"], weight[: OUT // 2])


def test_tensors_that_are_not_float8_need_no_scales(tmp_path: Path) -> None:
    """Bfloat16 weights of the same model, as `save_safetensors` writes them."""
    value = np.ones((4, 6), jnp.bfloat16)
    mapping = [("a", "w", m.dequantize())]
    flm.checkpoint.save_safetensors(tmp_path, {"a": value}, mapping=mapping)
    found = flm.checkpoint.restore_safetensors(tmp_path, {"a": value}, mapping=mapping)
    np.testing.assert_array_equal(found["a"], value, strict=True)


def test_float8_kept_with_its_scales(tmp_path: Path) -> None:
    """The published tensors of DeepSeek V3, bit for bit."""
    own = FAMILIES["deepseek_v3, float8 kept"]
    weight, scales = scaled(np.random.default_rng(0))
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = {name: weight, f"{name}_scale_inv": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    layer = {
        "kernel": np.zeros((IN, OUT), jnp.float8_e4m3fn),
        "kernel_scale": np.zeros((2, 3), np.float32),
    }
    found = flm.checkpoint.restore_safetensors(
        tmp_path,
        {"layers": [{"mlp": {"up": layer}}]},
        mapping=own.entries(own.tiny, False),
    )
    up = found["layers"][0]["mlp"]["up"]
    np.testing.assert_array_equal(up["kernel"], weight.T, strict=True)
    np.testing.assert_array_equal(up["kernel_scale"], scales.T, strict=True)


def restore(tensors: Tensors, path: Path, steps: Any, shape: Any = (OUT, IN)) -> Any:
    save_file(tensors, path / "model.safetensors")
    target = {"kernel": np.zeros(shape, jnp.bfloat16)}
    mapping = [("kernel", "w", steps)]
    return flm.checkpoint.restore_safetensors(
        path, target, mapping=mapping, dtype="target"
    )


def test_errors_of_scales(tmp_path: Path) -> None:
    weight, scales = scaled(np.random.default_rng(0))
    with refused(
        "kernel (300,200): is made of a tensor in float8, whose scales 'w_scale_inv' "
        "are not in",
        "leave dequantize out of the entry",
    ):
        restore({"w": weight}, tmp_path, m.dequantize())
    tensors = {"w": weight, "w_scale_inv": scales}
    with refused(
        "kernel (300,200): needs tensor 'w_scale_inv' (3,2)", "have the shape (5,4)"
    ):
        restore(tensors, tmp_path, m.dequantize(block=64))
    with refused(
        "tensor 'w_scale_inv' (3,2) in",
        "no leaf of the target is made of it",
        "to multiply 'w' by it, add dequantize() to its steps",
    ):
        restore(tensors, tmp_path, ())
    with refused("kernel (60000,): the mapping's steps", "in dims of their own"):
        join = (m.dequantize(), m.rearrange("out into -> (out into)", into=IN))
        restore(tensors, tmp_path, join, shape=(OUT * IN,))
    with refused("dequantize is for tensors of two dims, not (3,2,2)"):
        restore(tensors, tmp_path, m.dequantize(), shape=(3, 2, 2))
    with refused("dequantize(block=0)"):
        m.dequantize(block=0)


# --------------------------------------------------------------------------- MXFP4

# The numbers of four bits, as `transformers` lists them (integrations/mxfp4.py).
FP4_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FP4_VALUES += [-value for value in FP4_VALUES]


def packed(rng: np.random.Generator, *shape: int) -> Tensors:
    """Blocks and scales of a tensor with every exponent that keeps it finite."""
    *before, last = shape
    return {
        "_blocks": rng.integers(0, 256, (*before, last // 32, 16), np.uint8),
        "_scales": rng.integers(0, 253, (*before, last // 32), np.uint8),
    }


def unpacked(tensors: Tensors) -> np.ndarray:
    """`convert_moe_packed_tensors` of `transformers`, before its transposition."""
    blocks, exponents = tensors["_blocks"], tensors["_scales"].astype(np.int32) - 127
    table = np.array(FP4_VALUES, np.float32)
    numbers = np.empty((*blocks.shape[:-1], 32), np.float32)
    numbers[..., 0::2] = table[blocks & 0x0F]
    numbers[..., 1::2] = table[blocks >> 4]
    numbers = np.ldexp(numbers, exponents[..., None])
    return numbers.reshape(*blocks.shape[:-2], -1).astype(jnp.bfloat16)


def bits(array: Any) -> np.ndarray:
    """The bits, in which 0.0 and -0.0 differ."""
    return np.asarray(array).view(np.uint16)


@pytest.mark.parametrize("gap", [32 << 10, 0])
@pytest.mark.parametrize("block", [8 << 20, 96])
@pytest.mark.parametrize(
    "layout",
    [("model", "data", None), (None, "model", "data"), ("data", None, "model"), None],
)
def test_mxfp4_to_bfloat16(
    layout: Any,
    block: int,
    gap: int,
    mesh: flm.DeviceMesh,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The experts of gpt-oss: gate and up alternate in one tensor."""
    monkeypatch.setattr(_safetensors_read, "GAP_BYTES", gap)
    monkeypatch.setattr(_safetensors_read, "BLOCK_BYTES", block)
    rng, at = np.random.default_rng(0), "model.layers.0.mlp.experts."
    fused, down = packed(rng, 4, 2 * 64, 96), packed(rng, 4, 96, 64)
    tensors = {f"{at}gate_up_proj{end}": value for end, value in fused.items()}
    tensors |= {f"{at}down_proj{end}": value for end, value in down.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    both = unpacked(fused).transpose(0, 2, 1)
    expected = {
        "gate": both[..., 0::2],
        "up": both[..., 1::2],
        "down": unpacked(down).transpose(0, 2, 1),
    }
    assert all(np.isfinite(value).all() for value in expected.values())
    rules = flm.LayoutMap(mesh, strict=False)
    rules["kernel"] = layout
    kernels = {
        name: {"kernel": jax.ShapeDtypeStruct(value.shape, value.dtype)}
        for name, value in expected.items()
    }
    read: list[tuple[int, int]] = []
    found = flm.checkpoint.restore_safetensors(
        tmp_path,
        {"layers": [{"mlp": {"experts": kernels}}]},
        layout_map=rules,
        mapping=m.gpt_oss(),
        progress=lambda done, total: read.append((done, total)),
    )
    for name, value in expected.items():
        leaf = found["layers"][0]["mlp"]["experts"][name]["kernel"]
        assert leaf.sharding.is_fully_replicated == (layout is None)
        np.testing.assert_array_equal(bits(leaf), bits(value), strict=True)
    done, total = read[-1]
    assert done == total
    if block == 8 << 20:  # each byte once
        assert done == sum(value.nbytes for value in tensors.values())


def test_numbers_of_mxfp4_are_those_of_ml_dtypes() -> None:
    """All bytes with all scales, by the dtypes of the numbers and of the scales."""
    import ml_dtypes

    codes = np.arange(256, dtype=np.uint8)
    blocks = np.tile(codes.reshape(-1, 16), (253, 1))
    scales = np.repeat(np.arange(253, dtype=np.uint8), 16)
    numbers = np.stack([blocks & 15, blocks >> 4], -1).reshape(-1, 32)
    expected = numbers.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    expected *= scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)[:, None]
    found = _safetensors_scales.from_mxfp4(blocks, scales)
    np.testing.assert_array_equal(found, expected.reshape(-1))
    both = unpacked({"_blocks": blocks, "_scales": scales})
    np.testing.assert_array_equal(bits(found.astype(jnp.bfloat16)), bits(both.ravel()))


def test_a_part_of_mxfp4_reads_its_blocks_alone(tmp_path: Path) -> None:
    """One expert of four, and a row that is no whole number of reads."""
    tensors = packed(np.random.default_rng(0), 4, 6, 64)
    held = {f"w{end}": value for end, value in tensors.items()}
    save_file(held, tmp_path / "model.safetensors")
    numbers, read = unpacked(tensors), []
    for part, expected, blocks in (
        (m.split(0, 2, 4), numbers[2:3], 6 * 2),
        (m.split(2, 5, (3, 3, 3, 3, 3, 5, 44)), numbers[..., 15:20], 4 * 6 * 2 - 1),
    ):
        found = flm.checkpoint.restore_safetensors(
            tmp_path,
            {"kernel": np.zeros(expected.shape, jnp.bfloat16)},
            mapping=[("kernel", "w_blocks", (m.dequantize("mxfp4"), part))],
            progress=lambda done, total: read.append((done, total)),
        )
        np.testing.assert_array_equal(bits(found["kernel"]), bits(expected))
        assert read.pop() == (blocks * 17, blocks * 17)


def test_errors_of_mxfp4(tmp_path: Path) -> None:
    held = packed(np.random.default_rng(0), 6, 64)
    tensors = {f"w{end}": value for end, value in held.items()}
    step = m.dequantize("mxfp4")

    def restored(tensors: Tensors, steps: Any, shape: Any = (6, 64)) -> None:
        save_file(tensors, tmp_path / "model.safetensors")
        flm.checkpoint.restore_safetensors(
            tmp_path,
            {"kernel": np.zeros(shape, jnp.bfloat16)},
            mapping=[("kernel", "w_blocks", steps)],
        )

    restored(tensors, step)  # without a mistake
    with refused(
        "kernel (6,64): is made of a tensor in MXFP4, whose scales 'w_scales' are not",
        "leave dequantize out of the entry",
    ):
        restored({"w_blocks": tensors["w_blocks"]}, step)
    with refused("needs tensor 'w_blocks' (6,2,16)", "have the shape (6,4,16)"):
        restored(tensors, step, (6, 128))
    with refused("blocks of 32 numbers along the last dim", "do not make (6,63)"):
        restored(tensors, step, (6, 63))
    with refused(
        "needs tensor 'w_scales' (6,2)", "to be uint8, as MXFP4 is, not float32"
    ):
        restored(tensors | {"w_scales": np.ones((6, 2), np.float32)}, step)
    with refused(
        "tensor 'w_scales' (6,2) in",
        "to multiply 'w_blocks' by it, add dequantize('mxfp4') to its steps",
    ):
        restored(tensors, ())
    with refused("block= and suffix= are for float8; write dequantize('mxfp4')"):
        m.dequantize("mxfp4", block=64)
    with refused("dequantize('int4'): the formats are 'float8' and 'mxfp4'"):
        m.dequantize("int4")  # type: ignore[arg-type]
    with refused(
        "kernel (6,64): cannot be saved in MXFP4",
        "such as mappings.gpt_oss(mxfp4=False)",
    ):
        flm.checkpoint.save_safetensors(
            tmp_path / "out",
            {"kernel": np.zeros((6, 64), jnp.bfloat16)},
            mapping=[("kernel", "w_blocks", step)],
        )


def test_a_hint_has_the_layer_of_the_leaf(tmp_path: Path) -> None:
    """Names of other layers are alike, and not meant."""
    tensors = {f"h.{n}.up_proj.weight": np.zeros((2, 2)) for n in range(12)}
    save_file(tensors, tmp_path / "model.safetensors")
    for name, hint in (
        (r"h.\1.up_prj.weight", "; did you mean 'h.11.up_proj.weight'?"),
        (r"h.1\1.up_proj.weight", "'h.111.up_proj.weight' in"),
    ):
        with refused(hint):
            flm.checkpoint.restore_safetensors(
                tmp_path,
                {"h": {"11": np.zeros((2, 2))}},
                mapping=[(r"h/(\d+)", name)],
                unexpected="ignore",
            )


@pytest.mark.parametrize("scanned", [False, True])
def test_a_mapping_for_other_layers(scanned: bool, tmp_path: Path) -> None:
    """Stacked layers with a mapping for numbered ones, and the reverse."""
    save_file(numbered("llama"), tmp_path / "model.safetensors")
    layer = {"mlp_norm": {"scale": np.zeros((2, 32) if scanned else 32)}}
    target = {"layers": layer if scanned else [layer, layer]}
    mapping = m.llama(scanned=not scanned)
    path = "layers/mlp_norm/scale" if scanned else "layers/0/mlp_norm/scale"
    other = "layers/0/mlp_norm/scale" if scanned else "layers/mlp_norm/scale"
    fix = f"no entry of the mapping matches, but one would match {other}; pass scanned="
    with refused(path, f"{fix}{scanned} to the function"):
        flm.checkpoint.restore_safetensors(
            tmp_path, target, mapping=mapping, unexpected="ignore"
        )
    with refused(path, f"{fix}{scanned} to the function"):
        flm.checkpoint.save_safetensors(tmp_path / "saved", target, mapping=mapping)
