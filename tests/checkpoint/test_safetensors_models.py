"""Models restored from `transformers` checkpoints compute the same numbers."""

from functools import partial
from pathlib import Path
from typing import Any

import hf_models
import jax
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import save_file

import flax_layoutmap as flm
from flax_layoutmap.checkpoint import mappings

PARTS = ("query", "key", "value")
MAPPINGS = {
    "llama": mappings.llama,
    "gemma": mappings.gemma,
    "gemma2": partial(mappings.gemma, post_norms=True),
    "gpt2": mappings.gpt2,
}


def layout_map(mesh: flm.DeviceMesh) -> flm.LayoutMap:
    rules = flm.LayoutMap(mesh, strict=False)
    rules["embedding"] = ("model", "data")
    rules["lm_head/kernel"] = ("data", "model")
    rules["attention/(query|key|value)/kernel"] = (..., "data", None, "model")
    rules["attention/(query|key|value)/bias"] = (..., "model")
    rules["attention/out/kernel"] = (..., "data", None, "model")
    rules["(gate|up)/kernel"] = (..., "data", "model")
    rules["down/kernel"] = (..., "model", "data")
    rules["(norm/(scale|bias)|(out|up|down)/bias)"] = None
    return rules


def flat_layout_map(mesh: flm.DeviceMesh) -> flm.LayoutMap:
    rules = flm.LayoutMap(mesh, strict=False)
    rules["embedding"] = (None, ("data", "model"))
    rules["attention/.*/kernel"] = (..., "model", "data")
    rules["(gate|up|down)/kernel"] = (..., "data", "model")
    return rules


def tensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors, as the package `safetensors` reads them."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "np") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "scanned", "flat"),
    [
        ("llama", False, False),
        ("llama_sharded", True, False),
        ("gemma", False, True),
        ("gemma2", False, False),
        ("gpt2", False, False),
        ("gpt2", True, True),
    ],
)
def test_logits_are_those_of_pytorch(
    name: str, scanned: bool, flat: bool, mesh: flm.DeviceMesh, tmp_path: Path
) -> None:
    style = name.removesuffix("_sharded")

    def make() -> hf_models.Decoder:
        rngs = nnx.Rngs(0)
        return hf_models.Decoder(style, scanned=scanned, flat=flat, rngs=rngs)

    folder = hf_models.GOLDEN / f"hf_{name}"
    rules = flat_layout_map(mesh) if flat else layout_map(mesh)
    mapping = MAPPINGS[style](scanned=scanned)
    model: Any = flm.checkpoint.restore_safetensors(
        folder, make, layout_map=rules, mapping=mapping
    )
    resolution = rules.resolve(make)
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert len(leaves) == len(list(resolution))
    sharded = 0
    for leaf, wanted in zip(leaves, resolution.sharding_list(), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim)
        sharded += not leaf.sharding.is_fully_replicated
    assert sharded > len(leaves) / 3
    tokens, logits = hf_models.golden(name)
    found = nnx.jit(lambda model, tokens: model(tokens))(model, tokens)
    np.testing.assert_allclose(found, logits, rtol=1e-5, atol=2e-5)
    # And back: the same tensors, bit for bit.
    flm.checkpoint.save_safetensors(
        tmp_path, nnx.state(model, nnx.Param), mapping=mapping, max_file_bytes=40_000
    )
    there, here = tensors(folder), tensors(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert there.keys() == here.keys()
    for held, value in there.items():
        np.testing.assert_array_equal(here[held], value, strict=True)


def test_gpt2_without_a_prefix_and_with_masks(
    mesh: flm.DeviceMesh, tmp_path: Path
) -> None:
    """As the first checkpoints of GPT-2 are."""
    there = tensors(hf_models.GOLDEN / "hf_gpt2")
    here = {name.removeprefix("transformer."): value for name, value in there.items()}
    for layer in range(2):
        here[f"h.{layer}.attn.bias"] = np.tri(64, dtype=np.float32)[None, None]
        here[f"h.{layer}.attn.masked_bias"] = np.full(1, -1e4, np.float32)
    save_file(here, tmp_path / "model.safetensors")

    def make() -> hf_models.Decoder:
        return hf_models.Decoder("gpt2", rngs=nnx.Rngs(0))

    options = {"layout_map": layout_map(mesh), "mapping": mappings.gpt2()}
    model: Any = flm.checkpoint.restore_safetensors(tmp_path, make, **options)
    kernel = model.layers[1].attention.key.kernel[...]
    fused = there["transformer.h.1.attn.c_attn.weight"]
    np.testing.assert_array_equal(kernel, fused[:, 32:64].reshape(32, 4, 8))


@pytest.mark.parametrize("scanned", [False, True])
def test_biases_and_norms_of_queries(
    scanned: bool, mesh: flm.DeviceMesh, tmp_path: Path
) -> None:
    """As Qwen's models have them."""
    here = {}
    for layer in range(2):
        attention = f"model.layers.{layer}.self_attn"
        for number, part in enumerate("qkv"):
            bias = np.arange(32, dtype=np.float32) + 100 * layer + 1000 * number
            here[f"{attention}.{part}_proj.bias"] = bias
        here[f"{attention}.q_norm.weight"] = np.full(8, layer, np.float32)
    save_file(here, tmp_path / "model.safetensors")

    def leaves(lead: tuple[int, ...]) -> dict[str, Any]:
        parts = {part: {"bias": np.zeros((*lead, 4, 8), np.float32)} for part in PARTS}
        norm = {"scale": np.zeros((*lead, 8), np.float32)}
        return {"attention": {**parts, "query_norm": norm}}

    target = {"layers": leaves((2,)) if scanned else [leaves(()), leaves(())]}
    mapping = mappings.llama(scanned=scanned)
    found = flm.checkpoint.restore_safetensors(tmp_path, target, mapping=mapping)
    flat = np.arange(32, dtype=np.float32).reshape(4, 8)
    for layer in range(2):
        for number, part in enumerate(PARTS):
            if scanned:
                bias = found["layers"]["attention"][part]["bias"][layer]
            else:
                bias = found["layers"][layer]["attention"][part]["bias"]
            np.testing.assert_array_equal(bias, flat + 100 * layer + 1000 * number)
    flm.checkpoint.save_safetensors(tmp_path / "again", found, mapping=mapping)
    again = tensors(tmp_path / "again")
    assert again.keys() == here.keys()
    for name, value in here.items():
        np.testing.assert_array_equal(again[name], value)
