"""Models restored from `transformers` checkpoints compute the same numbers."""

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
    name: str, scanned: bool, flat: bool, tmp_path: Path
) -> None:
    style = name.removesuffix("_sharded")
    folder, preset = hf_models.GOLDEN / f"hf_{name}", style.replace("gemma2", "gemma")
    options = {"post_norms": True} if style == "gemma2" else {}
    mapping = getattr(mappings, preset)(scanned=scanned, **options)
    rules = flm.presets.load(preset, "fsdp=4,tensor=2")

    def make() -> hf_models.Decoder:
        return hf_models.Decoder(style, scanned, flat, nnx.Rngs(0))

    model: Any = flm.checkpoint.restore_safetensors(
        folder, make, layout_map=rules, mapping=mapping
    )
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    sharded = 0
    for leaf, wanted in zip(leaves, rules.resolve(make).sharding_list(), strict=True):
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
