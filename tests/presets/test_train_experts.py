"""One training step on 8 devices with the preset equals the step on one device."""

import functools
import re
import warnings
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from presets.models._small_experts import VOCAB, Decoder
from shards import Dims, assert_lies, lies, on_axes_of

import flax_layoutmap as flm

pytestmark = pytest.mark.slow

MESH = "fsdp=2,expert=2,tensor=2"
TOKENS = np.arange(8 * 9, dtype=np.int32).reshape(8, 9) * 7 % VOCAB
F, T, E, BOTH = ("fsdp",), ("tensor",), ("expert",), ("fsdp", "expert")
# What a path ends with (a pattern), and the axes of each dim; all else is replicated.
DIMS: dict[str, Dims] = {
    "embed/embedding": (T, BOTH),
    "lm_head/kernel": (BOTH, T),
    "(query|key|value)/kernel": (BOTH, T, ()),
    "(query|key|value)/bias": (T, ()),
    "attention/out/kernel": (T, (), BOTH),
    "sinks": (T,),
    "(q|kv)_a/kernel": (BOTH, ()),
    "(q|kv)_b/kernel": (BOTH, T, ()),
    "router/kernel": (BOTH, ()),
    "experts/(gate|up)/kernel": (E, F, T),
    "experts/(gate|up)/bias": (E, T),
    "experts/down/kernel": (E, T, F),
    "experts/down/bias": (E, ()),
    "shared/up/kernel": (BOTH, T),
    "shared/down/kernel": (T, BOTH),
}
ALL = ("expert", "tensor")
WHOLE: dict[str, Dims] = {
    "experts/(gate|up)/kernel": (ALL, F, ()),
    "experts/(gate|up)/bias": (ALL, ()),
    "experts/down/kernel": (ALL, (), F),
    "experts/down/bias": (ALL, ()),
}
FAMILIES = ["deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe"]


def train_step(model: nnx.Module, optimizer: nnx.Optimizer, tokens: Any) -> Any:
    def mean_loss(model: Any) -> jax.Array:
        logits, labels = model(tokens[:, :-1]), tokens[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, gradients = nnx.value_and_grad(mean_loss)(model)
    optimizer.update(model, gradients)
    return loss


def leaves_of(node: Any) -> dict[str, Any]:
    """Path → array."""
    flat = nnx.to_flat_state(nnx.state(node))
    return {"/".join(map(str, path)): leaf.get_value() for path, leaf in flat}


def dims_of(path: str, array: Any, table: Any = DIMS) -> Dims:
    found = [dims for end, dims in table.items() if re.search(f"{end}$", path)]
    assert len(found) <= 1, path
    return found[0] if found else ((),) * array.ndim


# A large eps: adam divides by a gradient's size, also where that is rounding.
ADAMW = optax.adamw(1e-2, eps=1e-4)


@functools.cache
def on_one_device(family: str) -> tuple[Any, Any, Any]:
    """Parameters and optimizer after a step, and the loss."""
    model = Decoder(family, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, ADAMW, wrt=nnx.Param)
    loss = nnx.jit(train_step)(model, optimizer, TOKENS)
    one, other = (jax.tree.map(np.asarray, leaves_of(x)) for x in (model, optimizer))
    return one, other, loss


@pytest.mark.parametrize(
    ("family", "variant", "axes"),
    [
        *((family, None, MESH) for family in FAMILIES),
        ("gpt_oss", "whole_experts", MESH),
        *((family, None, "fsdp=8") for family in ("mixtral", "deepseek_v3")),
    ],
)
def test_a_step_on_8_devices_equals_one_on_one_device(
    family: str, variant: str | None, axes: str
) -> None:
    def make() -> Decoder:
        return Decoder(family, nnx.Rngs(0))

    layout_map = flm.presets.load(family, axes, variant=variant)
    table = DIMS | (WHOLE if variant else {})
    mesh = layout_map.device_mesh
    assert mesh is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error", flm.LayoutWarning)
        model = flm.create(make, layout_map)
        optimizer = flm.create_optimizer(model, ADAMW, wrt=nnx.Param)
        step = flm.jit(train_step, layout_map=layout_map)
        loss = step(model, optimizer, TOKENS)
    one, alone, expected = on_one_device(family)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for found, values in ((model, one), (optimizer, alone)):
        assert leaves_of(found).keys() == values.keys()
        for path, array in leaves_of(found).items():
            dims = on_axes_of(mesh, dims_of(path, array, table))
            assert_lies(array, dims, mesh)
            np.testing.assert_allclose(
                array, values[path], rtol=1e-4, atol=1e-5, err_msg=path
            )


def test_the_comparison_of_shards_finds_another_layout() -> None:
    """The control: the layouts of a preset without the axis of experts."""
    mesh = flm.DeviceMesh(MESH)
    layout_map = flm.presets.load("mixtral", mesh)
    layout_map["experts/down/kernel"] = (None, "tensor", "fsdp")
    model = flm.create(lambda: Decoder("mixtral", nnx.Rngs(0)), layout_map)
    arrays = leaves_of(model)
    wrong = {
        path
        for path in arrays
        if not lies(arrays[path], dims_of(path, arrays[path]), mesh)
    }
    assert wrong == {"layers/0/experts/down/kernel"}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_recognised(family: str) -> None:
    model = nnx.eval_shape(lambda: Decoder(family, nnx.Rngs(0)))
    assert flm.presets.recognise(model).families == (family,)
