"""Each preset on each spelling of its family, on meshes of one, two and three axes."""

import importlib
import math
import pkgutil
from typing import Any

import pytest
from presets import models
from shapes import nested, struct

import flax_layoutmap as flm

FAMILIES = [
    module.name
    for module in pkgutil.iter_modules(models.__path__)
    if not module.name.startswith("_")
]
SPELLINGS = [
    (family, spelling, shapes)
    for family in FAMILIES
    for spelling, shapes in importlib.import_module(
        f"presets.models.{family}"
    ).SPELLINGS.items()
]
MESHES = ["fsdp=4", "tensor=4", "fsdp=2,tensor=4", "data=2,fsdp=2,tensor=2"]
# Axes of these families that experts are sharded over.
WITH_EXPERTS = ["fsdp=2,expert=2", "fsdp=2,expert=2,tensor=2", "data=2,expert=4"]
# Meshes with the axis that variants put elsewhere.
VARIANTS = {
    "untied": (("llama", "qwen2", "qwen3", "t5"), MESHES[1:]),
    "whole_experts": (
        ("deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe"),
        [*MESHES[1:], WITH_EXPERTS[1]],
    ),
}


def cases() -> list[Any]:
    found = []
    for family, spelling, shapes in SPELLINGS:
        has_experts = any("expert" in path for path in shapes)
        meshes = {None: MESHES + (WITH_EXPERTS if has_experts else [])}
        meshes |= {
            variant: meshes
            for variant, (families, meshes) in VARIANTS.items()
            if family in families
        }
        for variant, mesh in ((one, mesh) for one in meshes for mesh in meshes[one]):
            name = f"{family}-{spelling}-{mesh}" + (f"-{variant}" if variant else "")
            found.append(pytest.param(family, variant, shapes, mesh, id=name))
    return found


@pytest.mark.parametrize(("family", "variant", "shapes", "mesh"), cases())
def test_everything_large_is_sharded_over_every_axis(
    family: str, variant: str | None, shapes: dict[str, tuple[int, ...]], mesh: str
) -> None:
    target = flm.DeviceMesh.abstract(mesh)
    layout_map = flm.presets.load(family, target, variant=variant)
    tree = nested({path: struct(*shape) for path, shape in shapes.items()})
    resolution = layout_map.resolve(tree)
    assert not resolution.unmatched
    assert not resolution.fallbacks
    assert not list(flm.lint(resolution)), str(flm.lint(resolution))
    total = sum(map(math.prod, shapes.values()))
    for axis in layout_map.device_mesh.axis_names:  # pyright: ignore
        if axis != "data":
            over = sum(
                math.prod(leaf.shape)
                for leaf in resolution
                if axis in leaf.layout.axis_names
            )
            assert over >= 0.95 * total, axis


def test_every_family_is_tested() -> None:
    assert set(FAMILIES) == set(flm.presets.names())
