"""Each family's mapping against the tensors of published files, and there and back."""

import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from mapped_families import FAMILIES, TINY, write_headers
from safetensors.numpy import load_file, save_file
from same import assert_placed, assert_same, refused
from shapes import nested

import flax_layoutmap as flm
from flax_layoutmap.checkpoint import mappings as m

restore = flm.checkpoint.restore_safetensors
CASES = [
    pytest.param(name, scanned, id=f"{name}{', scanned' if scanned else ''}")
    for name in FAMILIES
    for scanned in (False, True)
]

# DeepSeek V3 has 91,991 tensors: once is enough, stacked, where each comes from many.
LARGE = "deepseek_v3, float8"
PUBLISHED = [case for case in CASES if case.values[0] != LARGE] + [
    pytest.param(LARGE, True, id=f"{LARGE}, scanned", marks=pytest.mark.slow)
]
# Of several names of a tensor, the first is written.
PREFIXES = r"^(language_model\.|transformer\.)"


def abstract(shapes: dict[str, tuple[int, ...]], dtype: str) -> dict[str, Any]:
    return nested(
        {p: jax.ShapeDtypeStruct(shape, dtype) for p, shape in shapes.items()}
    )


@pytest.mark.parametrize(("name", "scanned"), PUBLISHED)
def test_published_tensors_make_every_leaf(
    name: str, scanned: bool, tmp_path: Path
) -> None:
    """No tensor is forgotten, and all shapes are right; no number is read.

    One leaf too many is the only problem, so that nothing is read.
    """
    family = FAMILIES[name]
    leaves = family.model(family.published, scanned)
    if family.parameters is not None:
        assert sum(map(math.prod, leaves.values())) == family.parameters
    write_headers(tmp_path, family.stored(family.published))
    layout_map = flm.presets.load(family.preset, "fsdp=2,tensor=2,expert=2")
    target = abstract(leaves, "bfloat16")
    assert not layout_map.resolve(target).unmatched
    layout_map["too_many"] = None
    options: dict[str, Any] = {
        "layout_map": layout_map,
        "mapping": family.entries(family.published, scanned),
        "dtype": "target",
    }
    with refused(": 1 problem\n", "too_many (3,): no entry of the mapping matches"):
        more = {**target, "too_many": jax.ShapeDtypeStruct((3,), "float32")}
        restore(tmp_path, more, **options)


# The others have scales; see below.
PLAIN = [case for case in CASES if not re.search("MXFP4|float8", str(case.values[0]))]


@pytest.mark.parametrize(("name", "scanned"), PLAIN)
def test_there_and_back(name: str, scanned: bool, tmp_path: Path) -> None:
    """Every number is in its place, sharded by the preset, and goes back to it."""
    family, start, held = FAMILIES[name], 0, dict[str, np.ndarray]()
    for tensor, shape in family.stored(TINY).items():
        numbers = np.arange(start, start + math.prod(shape), dtype=np.float32)
        held[tensor], start = numbers.reshape(shape), start + numbers.size
    save_file(held, tmp_path / "model.safetensors")
    rules = flm.presets.load(family.preset, "fsdp=2,expert=2,tensor=2")
    mapping = family.entries(TINY, scanned)
    target = abstract(family.model(TINY, scanned), "float32")
    found = restore(tmp_path, target, layout_map=rules, mapping=mapping)
    assert_same(found, nested(family.values(held, TINY, scanned)))
    resolution = rules.resolve(target)
    assert_placed(found, resolution)
    assert not list(flm.lint(resolution)), str(flm.lint(resolution))
    flm.checkpoint.save_safetensors(tmp_path / "new", found, mapping=mapping)
    saved = load_file(tmp_path / "new" / "model.safetensors")
    needed = family.stored(TINY, needed=True)
    assert {re.sub(PREFIXES, "", tensor) for tensor in needed} == {
        re.sub(PREFIXES, "", tensor) for tensor in saved
    }
    by_name = {re.sub(PREFIXES, "", tensor): held[tensor] for tensor in held}
    for tensor, numbers in saved.items():
        np.testing.assert_array_equal(numbers, by_name[re.sub(PREFIXES, "", tensor)])


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


def packed(rng: np.random.Generator, *shape: int) -> dict[str, np.ndarray]:
    """Blocks and scales of a tensor with every exponent that keeps it finite."""
    *before, last = shape
    return {
        "_blocks": rng.integers(0, 256, (*before, last // 32, 16), np.uint8),
        "_scales": rng.integers(0, 253, (*before, last // 32), np.uint8),
    }


def unpacked(tensors: dict[str, np.ndarray]) -> np.ndarray:
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
