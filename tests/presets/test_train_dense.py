"""A train step by a preset on eight devices is the step on one, and lies as it says."""

import functools
import warnings
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from pods import compiled
from presets.decoders import TOKENS, Decoder, train_step
from shards import Dims, assert_lies, on_axes_of

import flax_layoutmap as flm

pytestmark = pytest.mark.slow

MESHES = ["fsdp=2,tensor=4", "data=2,fsdp=2,tensor=2", "fsdp=8", "tensor=8"]
# With so large an epsilon a step is a smooth function of the gradients, also of those
# that are nearly 0, and differs as little as they do.
ADAMW = optax.adamw(1e-2, eps=1e-3)
CASES: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "llama": ("llama", "untied", {}),
    "llama, tied": ("llama", None, {"tied": True}),
    "mistral, two heads of keys": ("mistral", None, {"kv_heads": 2}),
    "qwen2": ("qwen2", "untied", {"bias": True}),
    "qwen3": ("qwen3", None, {"norms": True}),
}
F, T, WHOLE = ("fsdp",), ("tensor",), ()
ROLES: dict[str, Dims] = {
    "embed/embedding": (T, F),
    "query/kernel": (F, T, WHOLE),
    "key/kernel": (F, T, WHOLE),
    "value/kernel": (F, T, WHOLE),
    "query/bias": (T, WHOLE),
    "key/bias": (T, WHOLE),
    "value/bias": (T, WHOLE),
    "out/kernel": (T, WHOLE, F),
    "gate/kernel": (F, T),
    "up/kernel": (F, T),
    "down/kernel": (T, F),
    "lm_head/kernel": (F, T),
}


def leaves_of(node: Any) -> dict[str, Any]:
    """Path → array of the parameters, or of moments of them."""
    flat = nnx.to_flat_state(nnx.state(node) if isinstance(node, nnx.Module) else node)
    return {"/".join(map(str, path)): leaf.get_value() for path, leaf in flat}


def expected_dims(path: str, name: str, mesh: flm.DeviceMesh) -> Dims:
    """The mesh axes of each dim, of a path in a case."""
    family, variant, sizes = CASES[name]
    role = "/".join(path.split("/")[-2:])
    if role not in ROLES:
        return (WHOLE,)  # norms
    dims = ROLES[role]
    if (family == "mistral" or variant == "untied") and role == "embed/embedding":
        dims = (WHOLE, (*T, *F))
    if role.split("/")[0] in ("key", "value"):
        if sizes.get("kv_heads", 4) % mesh.axis_sizes.get("tensor", 1):
            dims = tuple(WHOLE if dim == T else dim for dim in dims)
    return on_axes_of(mesh, dims)


@functools.cache
def on_one_device(name: str) -> tuple[Any, Any, Any, float]:
    """Parameters before a step; after it, with its first moments; and the loss."""
    model = Decoder(**CASES[name][2])
    before = jax.tree.map(np.asarray, leaves_of(model))
    optimizer = nnx.Optimizer(model, ADAMW, wrt=nnx.Param)
    loss = nnx.jit(train_step)(model, optimizer, TOKENS)
    assert loss.devices() == {jax.devices()[0]}
    moments = jax.tree.map(np.asarray, leaves_of(optimizer.opt_state[0].mu))
    return before, jax.tree.map(np.asarray, leaves_of(model)), moments, float(loss)


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        *(("llama", axes) for axes in MESHES),
        # Two heads of keys divide by two devices of `tensor`, and not by four.
        *(("mistral, two heads of keys", axes) for axes in MESHES[:2]),
        ("llama, tied", "tensor=8"),
        ("qwen2", "fsdp=2,tensor=4"),
        ("qwen3", "data=2,fsdp=2,tensor=2"),
    ],
)
def test_a_step_is_that_of_one_device(name: str, axes: str) -> None:
    family, variant, sizes = CASES[name]
    mesh = flm.DeviceMesh(axes)
    layout_map = flm.presets.load(family, mesh, variant=variant)
    before, after, moments, wanted_loss = on_one_device(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error", flm.LayoutWarning)
        model = flm.create(lambda: Decoder(**sizes), layout_map)
        optimizer = flm.create_optimizer(model, ADAMW, wrt=nnx.Param)
        for path, array in leaves_of(model).items():
            assert_lies(array, expected_dims(path, name, mesh), mesh)
            np.testing.assert_allclose(array, before[path], atol=1e-6, err_msg=path)
        step = flm.jit(train_step, layout_map=layout_map)
        loss = step(model, optimizer, TOKENS)
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-6)
    state = optimizer.opt_state[0]
    for found, wanted in (
        (leaves_of(model), after),
        (leaves_of(state.mu), moments),
        (leaves_of(state.nu), None),
    ):
        assert found.keys() == after.keys()
        for path, array in found.items():
            assert_lies(array, expected_dims(path, name, mesh), mesh)
            if wanted is not None:
                np.testing.assert_allclose(
                    array, wanted[path], atol=2e-6, rtol=2e-5, err_msg=path
                )
    for path, array in after.items():
        # The same added to all keys changes no attention.
        if not path.endswith("key/bias"):
            assert np.abs(array - before[path]).max() > 1e-4, path


def test_another_batch_is_another_step() -> None:
    """The control: the comparison above would see a wrong gradient."""
    _, after, _, _ = on_one_device("llama")
    model = Decoder()
    optimizer = nnx.Optimizer(model, ADAMW, wrt=nnx.Param)
    nnx.jit(train_step)(model, optimizer, TOKENS[:4])
    kernel = leaves_of(model)["layers/0/mlp/up/kernel"]
    wanted = after["layers/0/mlp/up/kernel"]
    assert not np.allclose(kernel, wanted, atol=2e-6, rtol=2e-5)


def test_outputs_of_layers_lie_as_the_activation_rules_say() -> None:
    layout_map = flm.presets.load("llama", flm.DeviceMesh(MESHES[0]))
    model = flm.create(Decoder, layout_map)
    mesh = layout_map.device_mesh
    assert mesh is not None
    x = model.embed(TOKENS)
    with flm.activation_scope(layout_map, model):
        block = model.layers[0]
        residual, query = block(x), block.attention.query(x)
    assert_lies(residual, (F, WHOLE, WHOLE), mesh)
    assert_lies(query, (F, WHOLE, T, WHOLE), mesh)
    plain = model.layers[0](x)
    np.testing.assert_allclose(residual, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "llama, tied"])
def test_explicit_axes(name: str) -> None:
    """The same model, and as the classes are sharded a loss as on Auto axes."""
    family, variant, sizes = CASES[name]
    losses, sent = [], []
    for kind in ("auto", "explicit"):
        mesh = flm.DeviceMesh("fsdp=2,tensor=4", axis_types=kind)
        layout_map = flm.presets.load(family, mesh, variant=variant)
        model = flm.create(lambda: Decoder(**sizes), layout_map)
        optimizer = flm.create_optimizer(model, ADAMW, wrt=nnx.Param)
        step = flm.jit(
            train_step if kind == "auto" else train_step_with_sharded_classes,
            layout_map=layout_map,
        )
        collectives = compiled(step, model, optimizer, TOKENS, mesh=mesh)
        sent.append(sum(one.bytes_per_step for one in collectives))
        losses.append([float(step(model, optimizer, TOKENS)) for _ in range(2)])
    np.testing.assert_allclose(*losses, rtol=1e-6)
    # The final norm of an untied model sums over `tensor`, and then sends less.
    assert 0.99 * sent[0] < sent[1] <= sent[0]


def train_step_with_sharded_classes(model: Any, optimizer: Any, tokens: Any) -> Any:
    losses_of: Any = jax.sharding.auto_axes(
        optax.softmax_cross_entropy_with_integer_labels, out_sharding=jax.P("fsdp")
    )

    def loss_of(model: Any) -> Any:
        return losses_of(model(tokens[:, :-1]), tokens[:, 1:]).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def test_two_heads_of_keys_leave_their_outputs_whole() -> None:
    layout_map = flm.presets.load("llama", flm.DeviceMesh(MESHES[0]))
    mesh = layout_map.device_mesh
    assert mesh is not None
    model = flm.create(lambda: Decoder(kv_heads=2), layout_map)
    x = model.embed(TOKENS)
    with flm.activation_scope(layout_map, model):
        key = model.layers[0].attention.key(x)
    assert_lies(key, (F, WHOLE, WHOLE, WHOLE), mesh)
