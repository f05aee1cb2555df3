"""Each family's mapping against the tensors of published files, and there and back."""

import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mapped_families import FAMILIES, TINY, write_headers
from same import assert_placed, assert_same, refused
from shapes import nested

import flax_layoutmap as flm

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


def abstract(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    kinds = {p: jax.ShapeDtypeStruct(shape, "bfloat16") for p, shape in shapes.items()}
    return nested(kinds)


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
    target = abstract(leaves)
    assert not layout_map.resolve(target).unmatched
    layout_map["too_many"] = None
    options: dict[str, Any] = {
        "layout_map": layout_map,
        "mapping": family.entries(family.published, scanned),
        "dtype": "target",
    }
    with refused(": 1 problem\n", "too_many (3,): no entry of the mapping matches"):
        more = {**target, "too_many": jax.ShapeDtypeStruct((3,), "float32")}
        flm.checkpoint.restore_safetensors(tmp_path, more, **options)


def tree_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    values = {p: rng.normal(size=shape) for p, shape in shapes.items()}
    return nested({path: x.astype(jnp.bfloat16) for path, x in values.items()})


# Nothing is saved in MXFP4.
SAVED = [case for case in CASES if case.values[0] != "gpt_oss, MXFP4"]


@pytest.mark.parametrize(("name", "scanned"), SAVED)
def test_there_and_back(name: str, scanned: bool, tmp_path: Path) -> None:
    """Sharded by the preset; the tensors have the published names."""
    family = FAMILIES[name]
    shapes = family.model(TINY, scanned)
    rules = flm.presets.load(family.preset, "fsdp=2,expert=2,tensor=2")
    model = rules.place(tree_of(shapes))
    mapping = family.entries(TINY, scanned)
    flm.checkpoint.save_safetensors(tmp_path, model, mapping=mapping)
    stored = {leaf.path: leaf.shape for leaf in flm.checkpoint.inspect(tmp_path).leaves}
    expected = {
        re.sub(PREFIXES, "", tensor): shape
        for tensor, shape in family.stored(TINY).items()
        if not tensor.endswith("_scale_inv")
        if not re.fullmatch(family.left_out, tensor)
    }
    assert {re.sub(PREFIXES, "", t): stored[t] for t in stored} == expected
    target = abstract(shapes)
    found = flm.checkpoint.restore_safetensors(
        tmp_path, target, layout_map=rules, mapping=mapping
    )
    assert_same(found, model)
    resolution = rules.resolve(target)
    assert_placed(found, resolution)
    assert not list(flm.lint(resolution)), str(flm.lint(resolution))
