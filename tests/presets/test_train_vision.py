"""One training step on 8 devices with the preset equals the step on one device."""

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from presets.models._small_vision import LATENTS, PIXELS, TEXT, UNet, ViT
from shards import Dims, assert_lies, lies, on_axes_of

import flax_layoutmap as flm

pytestmark = pytest.mark.slow

MESHES = ["fsdp=2,tensor=4", "data=2,fsdp=2,tensor=2"]
BATCH = 8
F, T = ("fsdp",), ("tensor",)
# What a path ends with (a pattern), and the axes of each dim; all else is replicated.
VIT: dict[str, Dims] = {
    "projection/kernel": ((), (), (), T),
    "pos_embeddings/pos_embeddings": ((), (), T),
    "(query|key|value)/kernel": (F, T, ()),
    "(query|key|value)/bias": (T, ()),
    "out/kernel": (T, (), F),
    "(linear1|classifier)/kernel": (F, T),
    "(projection|linear1|classifier)/bias": (T,),
    "linear2/kernel": (T, F),
}
UNET: dict[str, Dims] = {
    "conv_in/kernel": ((), (), (), F),
    "conv_out/kernel": ((), (), F, ()),
    "conv1/kernel": ((), (), (), F + T),
    "(conv2|conv_shortcut|proj_in|proj_out|conv)/kernel": ((), (), F + T, ()),
    "(linear_1|time_emb_proj|to_[qkv]|net/0/proj)/kernel": (F, T),
    "(linear_2|to_out/0|net/2)/kernel": (T, F),
    "(linear_1|time_emb_proj|net/0/proj)/bias": (T,),
}


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


INPUTS = {
    "vit": (random(BATCH, PIXELS, PIXELS, 3),),
    "unet": (
        random(BATCH, PIXELS, PIXELS, LATENTS),
        random(BATCH),
        random(BATCH, 6, TEXT),
    ),
}
MODELS: dict[str, tuple[Callable[..., nnx.Module], dict[str, Dims]]] = {
    "vit": (ViT, VIT),
    "unet": (UNet, UNET),
}


def train_step(model: nnx.Module, optimizer: nnx.Optimizer, inputs: Any) -> Any:
    def mean_loss(model: Any) -> jax.Array:
        made = model(*inputs)
        wanted = jnp.linspace(-1, 1, made.shape[-1])
        return jnp.mean((made - wanted) ** 2)

    loss, gradients = nnx.value_and_grad(mean_loss)(model)
    optimizer.update(model, gradients)
    return loss


def leaves_of(node: Any) -> dict[str, Any]:
    """Path → array."""
    flat = nnx.to_flat_state(nnx.state(node))
    return {"/".join(map(str, path)): leaf.get_value() for path, leaf in flat}


def dims_of(family: str, path: str, array: Any) -> Dims:
    dims = MODELS[family][1]
    found = [axes for end, axes in dims.items() if re.search(f"(^|/){end}$", path)]
    assert len(found) <= 1, path
    return found[0] if found else ((),) * array.ndim


# A large eps: adam divides by a gradient's size, also where that is rounding.
ADAMW = optax.adamw(1e-2, eps=1e-4)


@functools.cache
def on_one_device(family: str) -> tuple[Any, Any, Any, Any]:
    """Parameters before a step; these and the optimizer after it; and the loss."""
    model = MODELS[family][0](nnx.Rngs(0))
    before = jax.tree.map(np.asarray, leaves_of(model))
    optimizer = nnx.Optimizer(model, ADAMW, wrt=nnx.Param)
    loss = nnx.jit(train_step)(model, optimizer, INPUTS[family])
    after = (jax.tree.map(np.asarray, leaves_of(one)) for one in (model, optimizer))
    return before, *after, loss


@pytest.mark.parametrize(
    ("family", "mesh_line", "kind"),
    [
        *((family, MESHES[0], "explicit") for family in MODELS),
        *((family, MESHES[1], "auto") for family in MODELS),
        ("vit", "fsdp=8", "auto"),
    ],
)
def test_a_step_on_8_devices_equals_one_on_one_device(
    family: str, mesh_line: str, kind: str
) -> None:
    def make() -> nnx.Module:
        return MODELS[family][0](nnx.Rngs(0))

    layout_map = flm.presets.load(family, flm.DeviceMesh(mesh_line, axis_types=kind))
    mesh = layout_map.device_mesh
    assert mesh is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error", flm.LayoutWarning)
        model = flm.create(make, layout_map)
        optimizer = flm.create_optimizer(model, ADAMW, wrt=nnx.Param)
        step = flm.jit(train_step, layout_map=layout_map)
        loss = step(model, optimizer, INPUTS[family])
    before, one, alone, expected = on_one_device(family)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for found, values in ((model, one), (optimizer, alone)):
        assert leaves_of(found).keys() == values.keys()
        for path, array in leaves_of(found).items():
            dims = on_axes_of(mesh, dims_of(family, path, array))
            assert_lies(array, dims, mesh)
            np.testing.assert_allclose(
                array, values[path], rtol=1e-4, atol=1e-5, err_msg=path
            )
    assert any(np.any(one[path] != values) for path, values in before.items())


def test_the_comparison_of_shards_finds_another_layout() -> None:
    """The control: one rule of the preset is changed."""
    mesh = flm.DeviceMesh(MESHES[0])
    layout_map = flm.presets.load("vit", mesh)
    layout_map["linear2/kernel"] = ("fsdp", "tensor")
    arrays = leaves_of(flm.create(lambda: ViT(nnx.Rngs(0)), layout_map))
    wrong = {
        path
        for path, array in arrays.items()
        if not lies(array, dims_of("vit", path, array), mesh)
    }
    assert wrong == {"layers/0/linear2/kernel"}


@pytest.mark.parametrize("family", MODELS)
def test_the_model_is_recognised(family: str) -> None:
    model = nnx.eval_shape(lambda: MODELS[family][0](nnx.Rngs(0)))
    assert flm.presets.recognise(model).families == (family,)
