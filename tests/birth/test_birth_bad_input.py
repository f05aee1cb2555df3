"""Unusual constructors: an error with a workaround, or the right model.

Afterwards nothing is left of it: no context is changed, and the next model is right.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import NamedSharding, PartitionSpec
from shards import assert_lies

import flax_layoutmap as flm

COLUMN = ((), ("model",))


def rules(mesh: flm.DeviceMesh) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map["kernel"] = (None, "model")
    return layout_map


@pytest.fixture(autouse=True)
def usable_afterwards(mesh: flm.DeviceMesh) -> Iterator[None]:
    yield
    assert nnx.using_eager_sharding()
    assert jax.sharding.get_abstract_mesh().empty
    with flm.layout_map_scope(rules(mesh)):
        model = layer(nnx.Rngs(0))
    for kernel in (model.kernel, flm.create(layer, rules(mesh), nnx.Rngs(0)).kernel):
        assert_lies(kernel[...], COLUMN, mesh)
    assert len(layer(nnx.Rngs(0)).kernel[...].sharding.device_set) == 1


def layer(rngs: nnx.Rngs) -> Any:
    return nnx.Linear(8, 8, kernel_init=nnx.initializers.ones, rngs=rngs)


class _Model(nnx.Module):
    """One layer, and whatever else the test does in the constructor."""

    def __init__(self, also: Callable[[Any, Any], Any] | None = None) -> None:
        rngs = nnx.Rngs(0)
        self.layer = layer(rngs)
        if also is not None:
            also(self, rngs)


Model: Any = _Model  # typed as Any: the tests set attributes on it


# ---------------------------------------------------------------------- what raises


class Stop(BaseException):
    """As a KeyboardInterrupt: no Exception."""


@pytest.mark.parametrize("error", [ZeroDivisionError, flm.errors.StructureError, Stop])
def test_a_constructor_that_raises_half_way(
    mesh: flm.DeviceMesh, born: Any, error: Any
) -> None:
    seen: list[Any] = []

    def also(model: Any, rngs: Any) -> None:
        seen.append(weakref.ref(model))
        raise error("no")

    with pytest.raises(error, match="no"):
        born(lambda: Model(also), rules(mesh))
    gc.collect()
    assert seen and all(ref() is None for ref in seen)  # nothing half-built is kept


def _number(kernel: Any) -> float:
    return float(kernel.sum()) / 8


def _mask(kernel: Any) -> float:
    return kernel[kernel > 0].size / 8


@pytest.mark.parametrize("read", [_number, _mask])
def test_what_reads_values(mesh: flm.DeviceMesh, born: Any, read: Any) -> None:
    def also(model: Any, rngs: Any) -> None:
        model.total = nnx.Param(jnp.full(8, read(model.layer.kernel[...])))

    with pytest.raises(
        flm.errors.StructureError, match=r"(?s)reads the value .*layout_map\.place"
    ):
        born(lambda: Model(also), rules(mesh))


# ------------------------------------------------------------ wrong arguments


def extra(value: Any) -> Callable[[], Any]:
    def also(model: Any, rngs: Any) -> None:
        model.extra = nnx.Variable(value)

    return lambda: Model(also)


async def coroutine() -> Any:
    return layer(nnx.Rngs(0))


NOT_MODELS: list[tuple[Any, str]] = [
    (linen.Dense(8), "pass a function: lambda: module.init(key, x)"),
    (layer(nnx.Rngs(0)), "was given a Linear that exists already; pass a function"),
    (3, "needs a function that makes the model, got a int"),
    (lambda: None, "gives None: let it return the model"),
    (coroutine, "coroutine gives a coroutine, as it is async: let it return the model"),
    (extra(np.array(["a", "b"])), "extra is a NumPy array of <U1: set it after"),
    (extra(np.zeros(3, [("a", "f4")])), "extra is a NumPy array of [('a'"),
    (extra(np.array([1, 2**40])), "int64 with numbers that int32 does not hold: set"),
]


@pytest.mark.parametrize(("make", "text"), NOT_MODELS)
def test_what_makes_no_model(mesh: flm.DeviceMesh, make: Any, text: str) -> None:
    with pytest.raises(flm.errors.StructureError) as caught:
        flm.create(make, rules(mesh))
    assert text in str(caught.value)


SGD = optax.sgd(1e-3)
NO_OPTIMIZERS: list[tuple[Any, Any, Any, str]] = [
    (layer, 3e-4, nnx.Param, "such as optax.adamw(3e-4), as tx; got 0.0003"),
    (lambda _: 3, SGD, nnx.Param, "or a tree of arrays as model; got the int 3"),
    (lambda _: {"w": [1.0]}, SGD, nnx.Param, "as model; w/0 is the float 1.0"),
    (layer, SGD, nnx.BatchStat, "BatchStat selects no Variables of the Linear, which"),
    (lambda _: {}, SGD, nnx.Param, "are not on a mesh:\n  - (there are no parameters)"),
    (
        lambda _: {"kernel": np.ones((8, 8))},
        SGD,
        nnx.Param,
        "not on a mesh:\n  - kernel (8,8): None\nmake the model with flm.create(make",
    ),
]


@pytest.mark.parametrize(("make", "tx", "wrt", "text"), NO_OPTIMIZERS)
def test_what_has_no_optimizer(
    mesh: flm.DeviceMesh, make: Any, tx: Any, wrt: Any, text: str
) -> None:
    layout_map = rules(mesh)
    model = layout_map.place(layer(nnx.Rngs(0))) if make is layer else make(None)
    with pytest.raises(flm.LayoutError) as caught:
        flm.create_optimizer(model, tx, layout_map, wrt=wrt)
    assert text in str(caught.value)
    with pytest.raises(flm.errors.RuleError, match="needs the map .*: pass it"):
        flm.create_optimizer(model, SGD)


def test_an_abstract_variable_stays_abstract(mesh: flm.DeviceMesh, born: Any) -> None:
    def also(model: Any, rngs: Any) -> None:
        model.extra = nnx.Variable(jax.ShapeDtypeStruct((3,), jnp.float32))

    model = born(lambda: Model(also), rules(mesh))
    assert model.extra.get_value() == jax.ShapeDtypeStruct((3,), jnp.float32)
    assert_lies(model.layer.kernel[...], COLUMN, mesh)


def test_an_abstract_argument_that_is_read(mesh: flm.DeviceMesh) -> None:
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)

    def make(n: int, *, cfg: Any) -> Any:
        return {"kernel": cfg["x"] * n}

    with pytest.raises(
        flm.errors.StructureError, match=r"an argument is abstract, .*\(8,8\).*pass an"
    ):
        flm.create(make, rules(mesh), 2, cfg={"x": x})
    made = flm.create(lambda x: {"kernel": jnp.ones(x.shape)}, rules(mesh), x)
    assert_lies(made["kernel"], COLUMN, mesh)


# --------------------------------------------------------------- switches of JAX


@pytest.mark.parametrize(
    "switch", [jax.disable_jit, jax.checking_leaks, lambda: jax.debug_nans(True)]
)
def test_switches_for_debugging(mesh: flm.DeviceMesh, born: Any, switch: Any) -> None:
    with switch():
        model = born(Model, rules(mesh))
    assert_lies(model.layer.kernel[...], COLUMN, mesh, np.ones((8, 8), np.float32))


# -------------------------------------------------------- inside of transformations


def _scaled(x: Any) -> Callable[[Any, Any], Any]:
    def also(model: Any, rngs: Any) -> None:
        model.total = nnx.Param(x * jnp.ones(8))

    return also


def test_create_of_a_traced_argument(mesh: flm.DeviceMesh) -> None:
    layout_map = rules(mesh)

    @jax.jit
    def made(x: Any) -> Any:
        return nnx.state(flm.create(lambda x: Model(_scaled(x)), layout_map, x))

    state = made(jnp.float32(3))
    assert_lies(state["layer"]["kernel"].get_value(), COLUMN, mesh)
    assert_lies(state["total"].get_value(), ((),), mesh, np.full(8, 3.0, np.float32))

    def total(x: Any) -> Any:
        return flm.create(lambda: Model(_scaled(x)), layout_map).total[...].sum()

    np.testing.assert_allclose(jax.grad(total)(jnp.float32(3)), 8.0)


def test_ours_inside_of_a_constructor(mesh: flm.DeviceMesh, born: Any) -> None:
    layout_map = rules(mesh)

    def also(model: Any, rngs: Any) -> None:
        model.made = flm.create(lambda: layer(nnx.Rngs(0)), layout_map)
        with flm.layout_map_scope(layout_map):
            model.scoped = layer(rngs)
        where = NamedSharding(mesh.jax_mesh, PartitionSpec("data"))  # type: ignore[arg-type]
        model.fixed = nnx.Param(jax.lax.with_sharding_constraint(jnp.ones(8), where))
        model.put = nnx.Param(jax.device_put(jnp.ones(8), jax.devices()[3]))
        model.jitted = nnx.jit(layer)(rngs)

    model = born(lambda: Model(also), layout_map)
    for part in (model.layer, model.made, model.scoped, model.jitted):
        assert_lies(part.kernel[...], COLUMN, mesh)
    for part in (model.fixed, model.put):
        assert_lies(part[...], ((),), mesh, np.ones(8, np.float32))
