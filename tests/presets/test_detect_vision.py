"""Detection of encoders and diffusion models by the paths of their parameters."""

import importlib
from typing import Any

import pytest
from presets.models import dit, siglip, unet, vit, whisper
from shapes import nested, struct

import flax_layoutmap as flm

FAMILIES = ("whisper", "vit", "siglip", "clip", "unet", "dit")
SPELLINGS = [
    pytest.param(family, shapes, id=f"{family}-{spelling}")
    for family in FAMILIES
    for spelling, shapes in importlib.import_module(
        f"presets.models.{family}"
    ).SPELLINGS.items()
]


def tree(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    return nested({path: struct(*shape) for path, shape in shapes.items()})


@pytest.mark.parametrize(("family", "shapes"), SPELLINGS)
def test_each_spelling_is_of_its_family_alone(
    family: str, shapes: dict[str, tuple[int, ...]]
) -> None:
    found = flm.presets.recognise(tree(shapes))
    assert found.families == (family,), str(found)
    mesh = flm.DeviceMesh.abstract("fsdp=2,tensor=2")
    assert flm.presets.detect(tree(shapes), mesh) == flm.presets.load(family, mesh)


def test_why_a_model_is_of_no_other_family() -> None:
    rejected = flm.presets.recognise(tree(whisper.hugging_face())).rejected
    assert "no path matches" in rejected["dit"]
    rejected = flm.presets.recognise(tree(siglip.hugging_face())).rejected
    assert rejected["clip"] == "no path matches 'class_embedding$'"
    assert rejected["vit"].startswith("no path matches")


def test_a_layer_that_no_rule_knows_is_a_reason() -> None:
    shapes = vit.hugging_face() | {"vit.pooler.mixer.weight": (64, 64)}
    mesh = flm.DeviceMesh.abstract("fsdp=2")
    with pytest.raises(flm.errors.RuleError) as error:
        flm.presets.detect(tree(shapes), mesh)
    assert "vit: no rule for vit.pooler.mixer.weight (64,64)" in str(error.value)


def test_a_pipeline_of_two_families_is_of_none() -> None:
    both = tree({f"unet/{path}": s for path, s in unet.linen(unet.diffusers()).items()})
    both |= tree({f"dit/{path}": s for path, s in dit.SPELLINGS["dit, nnx"].items()})
    assert not flm.presets.recognise(both).families
