"""What the presets of encoders and diffusion models do with single leaves."""

import importlib
from typing import Any

import pytest
from presets.models import vit, whisper
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
        if any(sharded) or family != "siglip":  # SigLIP's residual biases are, too
            lies = [axes == ("tensor",) for axes in own][-len(sharded) :]
            assert lies == sharded, path
        biases += 1
    assert biases


def test_the_vocabulary_of_whisper_is_not_what_is_sharded() -> None:
    """51,865 tokens are 5 · 11 · 23 · 41."""
    resolution = resolved("whisper", whisper.hugging_face(vocab=51865))
    tokens = resolution["model.decoder.embed_tokens.weight"]
    assert tokens.layout.dims(2) == ((), ("tensor", "fsdp"))
    assert not resolution.fallbacks
    assert not list(flm.lint(resolution))


def test_a_number_of_classes_that_does_not_divide_is_reported() -> None:
    """ImageNet has 21,843 classes."""
    shapes = vit.hugging_face() | {
        "classifier.weight": (21843, 64),
        "classifier.bias": (21843,),
    }
    resolution = resolved("vit", shapes)
    assert resolution["classifier.weight"].layout.dims(2) == ((), ("fsdp",))
    found = [str(fallback) for fallback in resolution.fallbacks]
    assert len(found) == 2 and all("classifier" in text for text in found)


def test_layers_of_an_unet_follow_each_other_on_the_tensor_axis() -> None:
    shapes = importlib.import_module("presets.models.unet").SPELLINGS["nnx"]
    resolution = resolved("unet", shapes)
    at = "down_blocks/0/resnets/0"
    first, second = f"{at}/conv1/kernel", f"{at}/conv2/kernel"
    assert resolution[first].layout.dims(4) == ((), (), (), ("fsdp", "tensor"))
    assert resolution[second].layout.dims(4) == ((), (), ("fsdp", "tensor"), ())
