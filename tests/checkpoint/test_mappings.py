"""Each family's mapping against the tensors of published files, and there and back."""

import math
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from mapped_families import FAMILIES, TINY, write_headers
from safetensors.numpy import load_file, save_file
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
        flm.checkpoint.restore_safetensors(tmp_path, more, **options)


# The others have scales; see `test_mappings_numbers`.
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
    found = flm.checkpoint.restore_safetensors(
        tmp_path, target, layout_map=rules, mapping=mapping
    )
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
