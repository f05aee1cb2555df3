"""Steps, arguments and meshes that flm.pod.plan accepts, and errors for others."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from pods import (
    MEGATRON,
    MESH,
    PARAMS,
    SQUARE,
    X,
    kinds,
    loss_of,
    plan,
    rules,
    sgd,
    struct,
)

import flax_layoutmap as flm

P = PartitionSpec
BY_RULES: dict[str, Any] = {"layout_map": rules(**MEGATRON)}


def jax_mesh_of(mesh: flm.DeviceMesh) -> Any:
    return mesh.jax_mesh


# --------------------------------------------------------- modules, jits, and rules


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(16, 32, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(32, 16, use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(nnx.relu(self.up(x)))


def abstract_net() -> Any:
    def make() -> Any:
        model = Net(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    return nnx.eval_shape(make)


def net_step(model: Any, optimizer: Any, x: Any) -> Any:
    loss, gradients = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
    optimizer.update(model, gradients)
    return loss


NET = {"up/kernel": ("data", "model"), "down/kernel": ("model", "data")}


def test_modules_as_with_jit() -> None:
    model, optimizer = abstract_net()
    layout_map = rules(**NET)
    report = plan(net_step, model, optimizer, X, layout_map=layout_map)
    resolved = layout_map.on(flm.DeviceMesh.abstract(MESH)).resolve(model)
    # Two moments of each parameter, and two counters.
    assert report.memory.at_rest == {
        "parameter": resolved.bytes_per_device,
        "optimizer": 2 * resolved.bytes_per_device + 8,
        "data": 512 * 16 * 4 // 2,
    }
    found = kinds(report)
    assert found["all-gather", ("data",), "model/up/kernel"] == 1
    assert found["reduce-scatter", ("data",), "model/up/kernel"] == 1
    (source,) = {one.source for one in report.collectives if one.axes == ("model",)}
    # The line is the user's, where Flax makes the product.
    assert re.fullmatch(r"test_plan_inputs.py:\d+ Net.__call__", source or "")


@pytest.mark.parametrize("jit", [flm.jit, jax.jit, nnx.jit])
def test_every_kind_of_function_gives_the_same_plan(jit: Any) -> None:
    layout_map = rules(**NET)
    jitted, plain = (
        plan(step, *abstract_net(), X, layout_map=layout_map)
        for step in (jit(net_step), net_step)
    )
    assert kinds(jitted) == kinds(plain) and jitted.memory == plain.memory


def test_methods_of_jit() -> None:
    class Trainer:
        rate = 0.1

        @functools.partial(jax.jit, static_argnums=0)
        def step(self, params: Any, x: Any) -> Any:
            gradients = jax.grad(loss_of)(params, x)
            return jax.tree.map(lambda p, g: p - self.rate * g, params, gradients)

    assert plan(Trainer().step, PARAMS, X, **BY_RULES).collectives


def test_a_step_of_flm_jit_brings_its_rules_and_donation() -> None:
    layout_map = rules(**NET).on(flm.DeviceMesh.abstract(MESH))
    step = flm.jit(
        net_step, layout_map=layout_map, donate_argnames=("model", "optimizer")
    )
    report = flm.pod.plan(step, *abstract_net(), X)
    assert (report.step, str(report.mesh)) == ("net_step", MESH)
    assert report.warnings == ()


def test_a_mesh_of_any_size() -> None:
    layout_map = rules(**{"up/kernel": (None, "tensor")}, down=("tensor", None))
    mesh = {"data": 256, "tensor": 8}
    data = struct(4608, 16)
    report = plan(net_step, *abstract_net(), data, mesh=mesh, layout_map=layout_map)
    assert report.mesh.size == 2048
    assert report.memory.at_rest["parameter"] == 2 * 16 * 32 * 4 // 8
    with pytest.raises(flm.errors.MeshError) as caught:
        mesh["data"] *= 2
        plan(net_step, *abstract_net(), data, mesh=mesh, layout_map=layout_map)
    assert str(caught.value).startswith(
        "XLA's partitioner takes at most 2,048 devices, and the mesh has 4,096: plan "
        "on a mesh with a shorter batch axis"
    )


def explicit_step(params: Any, x: Any) -> Any:
    return jax.nn.relu(x @ params["up"]).sum()


def test_real_arrays_of_a_step_that_is_running(mesh: flm.DeviceMesh) -> None:
    layout_map = rules(**MEGATRON).on(mesh)
    step = flm.jit(sgd, layout_map=layout_map, donate_argnames="params")
    arrays = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), PARAMS)
    x = np.ones((512, 16), np.float32)
    params, _ = step(layout_map.place(arrays), x)
    wanted = kinds(plan(sgd, PARAMS, X, **BY_RULES))
    for given in (params, jax.tree.map(np.asarray, params)):
        assert kinds(flm.pod.plan(step, given, x)) == wanted
    params, _ = step(params, x)
    assert step._cache_size() == 1
    larger = flm.pod.plan(step, params, x, mesh="data=16,model=2")
    assert larger.memory.at_rest["data"] == 512 * 16 * 4 // 16


# ---------------------------------------------------------------------- arguments

UP, DATA = 16 * 8 * 4, 256 * 16 * 4


def product(params: Any, other: Any, x: Any) -> Any:
    return (x @ params["up"]) * other


@pytest.mark.parametrize(
    ("step", "args", "kwargs", "wanted"),
    [
        (
            jax.jit(lambda params, unused, x: x @ params["up"]),
            (PARAMS, struct(8, 5), X),
            {},
            {"parameter": UP, "data": DATA},
        ),
        (jax.jit(product), (PARAMS, 3, X), {}, {"parameter": UP, "data": DATA + 4}),
        (product, (PARAMS, 3), {"x": X}, {"parameter": UP, "data": DATA + 4}),
        (lambda params, x: None, (PARAMS, X), {}, {}),
        (jax.jit(lambda params, x: None), (PARAMS, X), {}, {}),
        (lambda: jnp.ones(8).sum(), (), {}, {}),
    ],
)
def test_arguments(step: Any, args: Any, kwargs: Any, wanted: dict[str, int]) -> None:
    """By name, of numbers, and unused ones, which JAX leaves out."""
    report = plan(step, *args, **kwargs, **BY_RULES)
    assert report.memory.at_rest == wanted and report.collectives == ()


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(jnp.int8, 64), (jnp.int4, 32), (jnp.float8_e4m3fn, 64), (jnp.float32, 256)],
)
def test_quantised_matrices_are_parameters_and_keys_are_not(
    dtype: Any, size: int
) -> None:
    def step(state: Any, x: Any) -> Any:
        return (x @ state["w"].astype(x.dtype)).sum()

    key = jax.eval_shape(lambda: jax.random.key(0))
    state = {"w": struct(16, 32, dtype=dtype), "key": key, "step": struct(dtype=int)}
    report = plan(step, state, X, layout_map=rules(w=("data", "model")))
    assert report.memory.at_rest["parameter"] == size


class Block(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones((16, 16)))
        self.keys = nnx.Cache(jnp.zeros((8, 32, 16)))


def decode(model: Any, x: Any) -> Any:
    model.keys[...] = model.keys[...] + 1
    return x @ model.w


def decode_in_linen(model: Any, x: Any) -> Any:
    cache = jax.tree.map(lambda a: a + 1, model["cache"])
    return {**model, "cache": cache}, x @ model["params"]["w"]


CACHE = {"attention": {"keys": struct(8, 32, 16)}}


@pytest.mark.parametrize(
    ("step", "model"),
    [
        (decode, nnx.eval_shape(Block)),
        (decode_in_linen, {"params": SQUARE, "cache": CACHE}),
    ],
)
def test_caches_are_no_parameters(step: Any, model: Any) -> None:
    layout = rules(w=("model", None), keys=("data", None, None))
    report = plan(step, model, X, layout_map=layout, donate_argnames="model")
    assert report.memory.at_rest["parameter"] == 16 * 16 * 4 // 4
    assert report.memory.at_rest["other"] == 8 * 32 * 16 * 4 // 2


# ------------------------------------------------------------------------- meshes


def constrained(mesh: flm.DeviceMesh) -> Any:
    sharding = NamedSharding(jax_mesh_of(mesh), P("data"))
    return lambda p, x: jax.lax.with_sharding_constraint(x @ p["w"], sharding)


def mapped(mesh: flm.DeviceMesh) -> Any:
    specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
    call = jax.shard_map(lambda w, x: x @ w, mesh=jax_mesh_of(mesh), **specs)
    return lambda p, x: call(p["w"], x)


SPREAD: dict[str, Any] = {"layout_map": rules(w=("data", "model"))}


@pytest.mark.parametrize("make", [constrained, mapped])
def test_a_step_that_names_another_mesh(make: Any, mesh: flm.DeviceMesh) -> None:
    """Silently it would be without layouts where the number of devices is the same."""
    step = make(mesh)
    for other in ("data=4,model=2", "model=4,data=2", "data=16,model=4"):
        with pytest.raises(flm.errors.MeshError) as caught:
            plan(step, SQUARE, X, mesh=other, **SPREAD)
        said = str(caught.value)
        assert said.startswith(
            f"<lambda> is planned for the mesh {other}, but names another mesh"
        )
        assert "in a NamedSharding or a jax.shard_map(mesh=…); name only axes" in said
    assert plan(step, SQUARE, X, **SPREAD).collectives


def without_mesh(p: Any, x: Any) -> Any:
    specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
    return jax.shard_map(lambda w, x: x @ w, **specs)(p["w"], x)


def from_context(p: Any, x: Any) -> Any:
    sharding = NamedSharding(jax.sharding.get_abstract_mesh(), P("data"))
    return jax.lax.with_sharding_constraint(x @ p["w"], sharding)


ROWS_ALONE = flm.DeviceMesh.abstract("rows=64")


@pytest.mark.parametrize(
    "step",
    [
        without_mesh,
        from_context,
        lambda p, x: jax.lax.with_sharding_constraint(x @ p["w"], P("data")),
        lambda p, x: flm.distribute_tensor(x @ p["w"], ("data", None)),
    ],
)
def test_a_step_that_names_axes_alone(step: Any) -> None:
    """As under jax.set_mesh, which needs devices; with another mesh in context, too."""
    found = plan(step, SQUARE, X, mesh="data=16,model=4", **SPREAD)
    assert found.collectives and not found.unread
    with jax.sharding.use_abstract_mesh(jax_mesh_of(ROWS_ALONE)):
        again = plan(step, SQUARE, X, mesh="data=16,model=4", **SPREAD)
    assert kinds(again) == kinds(found)


def test_explicit_axes() -> None:
    mesh = flm.DeviceMesh.abstract(MESH, axis_types="explicit")
    report = plan(explicit_step, PARAMS, X, **BY_RULES, mesh=mesh)
    assert kinds(report) == {
        ("all-reduce", ("model",), None): 1,
        ("all-reduce", ("data",), None): 1,
    }


# ------------------------------------------------------------------- what is refused


def test_what_the_step_itself_raises_is_raised() -> None:
    with pytest.raises(KeyError, match="upp"):
        plan(lambda p, x: x @ p["upp"], PARAMS, X, **BY_RULES)


def calls_back(params: Any, x: Any) -> Any:
    jax.debug.print("loss {}", x.sum())
    return x @ params["up"]


def planned(step: Any = sgd, params: Any = PARAMS, x: Any = X, **options: Any) -> Any:
    return lambda: plan(step, params, x, **{**BY_RULES, **options})


SMALL = NamedSharding(jax_mesh_of(flm.DeviceMesh.abstract(MESH)), P("data"))
OWN = jax.ShapeDtypeStruct((6, 16), jnp.float32, sharding=SMALL)
MODEL: Any = nnx.eval_shape(lambda: Net(nnx.Rngs(0)))
EXPLICIT = flm.DeviceMesh.abstract(MESH, axis_types="explicit")
REFUSED: list[tuple[Any, type[Exception], str]] = [
    (
        planned(mesh=None),
        flm.errors.MeshError,
        'a mesh is missing: pass mesh="fsdp=16,tensor=4", or rules that have one',
    ),
    (
        planned(layout_map=None),
        flm.LayoutError,
        "plan needs rules: pass layout_map=, or a step of flm.jit",
    ),
    (
        planned(engine="libtup"),
        flm.LayoutError,
        "there is no engine 'libtup'; did you mean 'libtpu'?; they are libtpu, "
        "partitioner",
    ),
    (
        planned(slices=2),
        flm.errors.MeshError,
        'not a topology: None; write "v5p:4x4x4" (chips along each dim) or an '
        'accelerator type, "v5p-128"',
    ),
    (
        planned(calls_back),
        flm.LayoutError,
        "calls_back cannot be lowered without devices (",
    ),
    (
        lambda: plan(lambda x: MODEL(x), X, layout_map=rules(up=(None, "model"))),
        flm.LayoutError,
        "<lambda> uses a jax.ShapeDtypeStruct that is not among its arguments (",
    ),
    (
        planned(x=OWN, mesh="data=4,model=4"),
        flm.LayoutError,
        "x (6,16) came with a sharding that does not fit the mesh data=4,model=4: "
        "shape (6, 16): dim 0 of size 6 is not divisible by mesh axis 'data' of size "
        "4; pass its shape alone, jax.ShapeDtypeStruct(x.shape, x.dtype)",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_messages(call: Any, error: type[Exception], message: str) -> None:
    """A message that ends with "(" is a part of what is said."""
    with pytest.raises(error) as caught:
        call()
    said = str(caught.value)
    assert message in said if message.endswith("(") else said == message
