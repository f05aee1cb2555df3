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


def cases() -> list[Any]:
    found = []
    for family, spelling, shapes in SPELLINGS:
        has_experts = any("expert" in path for path in shapes)
        for mesh in MESHES + (WITH_EXPERTS if has_experts else []):
            name = f"{family}-{spelling}-{mesh}"
            found.append(pytest.param(family, shapes, mesh, id=name))
    return found


@pytest.mark.parametrize(("family", "shapes", "mesh"), cases())
def test_everything_large_is_sharded_over_every_axis(
    family: str, shapes: dict[str, tuple[int, ...]], mesh: str
) -> None:
    layout_map = flm.presets.load(family, flm.DeviceMesh.abstract(mesh))
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
