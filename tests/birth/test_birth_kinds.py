"""Every kind of model equals the eager constructor's.

The graph with all metadata, the values, the counters of the random streams, and where
each kernel lies.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from shards import assert_as_eager, assert_lies

import flax_layoutmap as flm

pytestmark = pytest.mark.optimised

uniform = nnx.initializers.uniform(1.0)
X = jnp.ones((2, 8))


def layer(rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(8, 8, kernel_init=uniform, rngs=rngs)


class Holder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, build: Callable[[nnx.Rngs], dict[str, Any]]):
        for name, part in build(rngs).items():
            setattr(self, name, part)


@nnx.split_rngs(splits=3)
@nnx.vmap
def stacked(rngs: nnx.Rngs) -> Any:
    return layer(rngs)


def lora(rngs: nnx.Rngs) -> dict[str, Any]:
    base = layer(rngs)
    lora = nnx.LoRA(8, 2, 8, base_module=base, rngs=rngs)
    return {
        "base": base,
        "lora": lora,
        "own": nnx.LoRALinear(8, 8, lora_rank=2, rngs=rngs),
    }


def attention(rngs: nnx.Rngs) -> dict[str, Any]:
    made = nnx.MultiHeadAttention(
        4, 16, decode=True, dropout_rate=0.1, kernel_init=uniform, rngs=rngs
    )
    made.init_cache((2, 5, 16))
    return {"attention": made}


class Scaled(nnx.Param):
    """Another value is stored, read and written than is given."""

    def create_value(self, value: Any, **_: Any) -> Any:
        return value * 2

    def get_value(self, **options: Any) -> Any:
        return super().get_value(**options) * 3


class Tagged(nnx.Variable):
    pass


def custom(rngs: nnx.Rngs) -> dict[str, Any]:
    def value() -> Any:
        return jax.random.uniform(rngs.params(), (8, 8))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hooks are deprecated
        hooked = nnx.Param(value(), on_create_value=_double, on_get_value=_double)
    init = nnx.with_metadata(uniform, note="of the initialiser")
    return {
        "scaled": nnx.Dict(kernel=Scaled(value())),
        "tagged": nnx.Dict(kernel=Tagged(value(), tag="x", number=3)),
        "hooked": nnx.Dict(kernel=hooked),
        "noted": nnx.Linear(8, 8, kernel_init=init, rngs=rngs),
        "tree": nnx.Variable({"a": jnp.ones(3), "b": [jnp.zeros(2)]}),
    }


def _double(variable: Any, value: Any) -> Any:
    return value * 2


def wrapped(rngs: nnx.Rngs) -> dict[str, Any]:
    return {
        "weight": nnx.WeightNorm(layer(rngs), rngs=rngs),
        "spectral": nnx.SpectralNorm(layer(rngs), rngs=rngs),
    }


KINDS: dict[str, Callable[[nnx.Rngs], dict[str, Any]]] = {
    "stacked by vmap": lambda rngs: {"layers": stacked(rngs)},
    "LoRA": lora,
    "random state": lambda rngs: {
        "first": layer(rngs),
        "drop": nnx.Dropout(0.5, rngs=rngs),
        "fork": rngs.fork(),
        "again": layer(rngs),
        "rngs": rngs,
    },
    "attention": attention,
    "custom Variables": custom,
    "wrapped": wrapped,
    "arrays as attributes": lambda rngs: {
        "first": layer(rngs),
        "table": jnp.arange(8, dtype=jnp.float32),
        "other": nnx.data(jnp.ones((8, 8))),
        "tables": nnx.List([jnp.ones(8)]),
    },
}


def rules(mesh: flm.DeviceMesh) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map["kernel"] = (..., "model")
    return layout_map


@pytest.mark.parametrize("kind", KINDS)
def test_as_the_eager_constructor(mesh: flm.DeviceMesh, born: Any, kind: str) -> None:
    def make(rngs: nnx.Rngs) -> Any:
        return Holder(rngs, KINDS[kind])

    other = nnx.Rngs(0, dropout=1)
    eager = make(other)
    rngs = nnx.Rngs(0, dropout=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", flm.LayoutWarning)
        model = born(make, rules(mesh), rngs)
    assert_as_eager(model, eager, rules(mesh))
    for name in ("default", "dropout"):
        assert rngs[name]() == other[name]()


# ----------------------------------------------------------------------- references


@pytest.mark.parametrize("kind", ["ref", "hijax"])
def test_references_are_made_afterwards(
    mesh: flm.DeviceMesh, born: Any, kind: str
) -> None:
    options: Any = {kind: True}

    def make(rngs: nnx.Rngs | None) -> Any:
        defaults: Any = nnx.var_defaults
        with defaults(**options):
            return layer(rngs or nnx.Rngs(0))

    for rngs in (nnx.Rngs(0), None):  # an Rngs of its own counts with such Variables
        with pytest.raises(
            flm.errors.StructureError, match=rf"{kind}=True is a reference"
        ) as told:
            born(make, rules(mesh), rngs)
        advice = f"nnx.with_vars((model, optimizer), {kind}=True)"
        assert advice in str(told.value)
    model = born(layer, rules(mesh), nnx.Rngs(0))
    optimizer = flm.create_optimizer(model, optax.adam(1e-3), rules(mesh))
    both = {"model": model, "optimizer": optimizer, "nnx": nnx, kind: True}
    model, optimizer = eval(advice, both)
    mu = optimizer.opt_state[0].mu.kernel
    assert model.kernel.get_metadata()[kind] and mu.get_metadata()[kind]
    assert_lies(model.kernel.get_value(), ((), ("model",)), mesh)
    assert_lies(mu.get_value(), ((), ("model",)), mesh)
    np.testing.assert_allclose(model(X), layer(nnx.Rngs(0))(X), rtol=1e-5)
    with pytest.raises(flm.errors.StructureError, match=f"{kind}=True is a reference"):
        flm.create_optimizer(model, optax.adam(1e-3), rules(mesh))
    rngs = nnx.with_vars(nnx.Rngs(0), **options)
    with pytest.raises(flm.errors.StructureError, match=f"{kind}=True is a reference"):
        flm.create(layer, rules(mesh), rngs)
