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

import flax_layoutmap as flm
from flax_layoutmap.checkpoint import mappings

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
