"""What the presets of encoders and diffusion models do with single leaves."""

import importlib
from typing import Any

import pytest
from presets.models import whisper
from shapes import nested, struct

import flax_layoutmap as flm

Shapes = dict[str, tuple[int, ...]]
MESH = flm.DeviceMesh.abstract("data=2,fsdp=2,tensor=2")
FAMILIES = ("whisper", "vit", "siglip", "clip", "unet", "dit")
SPELLINGS = [
    pytest.param(family, shapes, id=f"{family}-{spelling}")
    for family in FAMILIES
    for spelling, shapes in importlib.import_module(
        f"presets.models.{family}"
    ).SPELLINGS.items()
]


def resolved(family: str, shapes: Shapes, mesh: Any = MESH) -> flm.Resolution:
    tree = nested({path: struct(*shape) for path, shape in shapes.items()})
    return flm.presets.load(family, mesh).resolve(tree)


@pytest.mark.parametrize(("family", "shapes"), SPELLINGS)
def test_a_bias_is_sharded_as_the_outputs_of_its_kernel(
    family: str, shapes: Shapes
) -> None:
    layouts = {leaf.path: leaf.layout for leaf in resolved(family, shapes)}
    biases = 0
    for path, shape in shapes.items():
        bias = path.replace("kernel", "bias").replace("weight", "bias")
        rank = len(shape)
        if bias == path or rank < 2 or bias not in layouts:
            continue
        kernel, own = layouts[path].dims(rank), layouts[bias].dims(len(shapes[bias]))
        size = shapes[bias][-1]
        outputs = kernel[:1] if "weight" in path else kernel[-1:]
        if "kernel" in path and size != shape[-1]:  # heads are (heads, head dim)
            outputs = kernel[-2:]
        sharded = [axes == ("tensor",) for axes in outputs]
        assert [axes == ("tensor",) for axes in own][-len(sharded) :] == sharded, path
        biases += 1
    assert biases


def test_the_vocabulary_of_whisper_falls_back_and_is_reported() -> None:
    """51,865 tokens are 5 · 11 · 23 · 41."""
    resolution = resolved("whisper", whisper.hugging_face(vocab=51865))
    (fallback,) = resolution.fallbacks
    tokens = resolution["model.decoder.embed_tokens.weight"]
    assert str(tokens.path) in str(fallback)
    assert tokens.layout.dims(2) == ((), ("fsdp",))
    assert [finding.code for finding in flm.lint(resolution)] == ["LM104"]


def test_layers_of_an_unet_follow_each_other_on_the_tensor_axis() -> None:
    shapes = importlib.import_module("presets.models.unet").SPELLINGS["nnx"]
    resolution = resolved("unet", shapes)
    at = "down_blocks/0/resnets/0"
    first, second = f"{at}/conv1/kernel", f"{at}/conv2/kernel"
    assert resolution[first].layout.dims(4) == ((), (), ("fsdp",), ("tensor",))
    assert resolution[second].layout.dims(4) == ((), (), ("tensor",), ("fsdp",))
