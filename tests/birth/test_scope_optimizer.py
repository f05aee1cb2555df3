"""`nnx.Optimizer`s made in a layout_map_scope equal those of `create_optimizer`."""

import gc
import weakref
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from shards import assert_lies

import flax_layoutmap as flm

COLUMN, ROW = ((), ("model",)), (("model",), ())


def rules(mesh: flm.DeviceMesh) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map["d1/kernel"] = (None, "model")
    layout_map["d2/kernel"] = ("model", None)
    return layout_map


class Model(nnx.Module):
    """Two layers; with `names`, annotated ones."""

    def __init__(self, rngs: nnx.Rngs, names: Any = None) -> None:
        init: Any = nnx.initializers.normal(1.0)
        if names is not None:
            init = nnx.with_metadata(init, out_sharding=names)
        self.d1 = nnx.Linear(8, 16, kernel_init=init, rngs=rngs)
        self.d2 = nnx.Linear(16, 8, kernel_init=init, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.d2(self.d1(x))


def leaves_of(node: Any) -> dict[str, Any]:
    flat = nnx.to_flat_state(nnx.state(node))
    return {"/".join(map(str, path)): variable for path, variable in flat}


def moments(optimizer: Any, of: str) -> Any:
    """The first moment of a parameter."""
    leaves = leaves_of(optimizer)
    (variable,) = (v for path, v in leaves.items() if path.endswith(f"mu/{of}"))
    return variable.get_value()


def assert_same(optimizer: Any, other: Any) -> None:
    """The same graph, metadata, values and shards."""
    assert nnx.graphdef(optimizer) == nnx.graphdef(other)
    leaves, wanted = leaves_of(optimizer), leaves_of(other)
    assert leaves.keys() == wanted.keys()
    for path, variable in leaves.items():
        assert variable.get_metadata() == wanted[path].get_metadata(), path
        array, expected = variable.get_value(), wanted[path].get_value()
        assert array.dtype == expected.dtype
        index = {shard.device: shard.index for shard in array.addressable_shards}
        for shard in expected.addressable_shards:
            assert index[shard.device] == shard.index, path
        np.testing.assert_array_equal(array, expected, err_msg=path)


ADAM = optax.adam(1e-2)
# Those that keep copies of the parameters are computed from the finished ones.
TRANSFORMATIONS: dict[str, Any] = {
    "adamw": lambda: optax.adamw(1e-3),
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=4),
    "schedule free": lambda: optax.contrib.schedule_free_adamw(1e-3),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.adam)(1e-3),
}


@pytest.mark.parametrize("names", [None, ("data", None)], ids=["plain", "annotated"])
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_as_one_made_after_the_block(
    mesh: flm.DeviceMesh, name: str, names: Any
) -> None:
    layout_map, tx = rules(mesh), TRANSFORMATIONS[name]()
    layout_map.optimizer["d2/kernel"] = ("data", "model")
    with flm.layout_map_scope(layout_map):
        model: Any = Model(nnx.Rngs(0), names)
        model.again = model.d1  # tied weights have one moment
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        other = flm.create_optimizer(model, tx)
        step = optimizer.step
    assert optimizer.step is step
    assert_same(optimizer, other)
    after = flm.create_optimizer(model, tx, wrt=nnx.Param, layout_map=layout_map)
    assert_same(optimizer, after)


def adam(model: Any, wrt: Any = nnx.Param) -> Any:
    return nnx.Optimizer(model, ADAM, wrt=wrt)


def test_of_an_assembled_model_of_parts_and_of_several(mesh: flm.DeviceMesh) -> None:
    """The final path of the model decides, and that of the optimizer's is its own."""
    layout_map = flm.LayoutMap(mesh, match="fullmatch", strict=False)
    layout_map["model/second/kernel"] = ("model", None)
    layout_map["model/first/d1/kernel"] = (None, "model")
    with flm.layout_map_scope(layout_map):
        first, second = Model(nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(1))
        early = adam(second)
        model = nnx.Dict(first=first, second=second)
        whole, part = adam(model), adam(first, nnx.PathContains("kernel"))
        trainer = nnx.Dict(model=model, optimizer=whole)
    assert_lies(moments(early, "kernel"), ROW, mesh)
    assert_lies(moments(whole, "second/kernel"), ROW, mesh)
    assert_lies(moments(whole, "first/d1/kernel"), COLUMN, mesh)
    assert_lies(moments(part, "d1/kernel"), COLUMN, mesh)
    assert not [path for path in leaves_of(part) if path.endswith("bias")]
    assert trainer["optimizer"] is whole


class Averaged(nnx.Optimizer):
    """A copy of the model, a number, and arguments in another order."""

    def __init__(self, tx: Any, net: Any, *, rate: float) -> None:
        super().__init__(net, tx, wrt=nnx.Param)
        self.ema = nnx.clone(net)
        self.rate = nnx.Variable(jnp.float32(rate))


class Trainer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, tx: Any) -> None:
        self.model = Model(rngs)
        self.optimizer = nnx.Optimizer(self.model, tx, wrt=nnx.Param)


def test_subclasses_and_trainers(mesh: flm.DeviceMesh) -> None:
    layout_map = rules(mesh)
    with flm.layout_map_scope(layout_map):
        model = Model(nnx.Rngs(0))
        averaged = Averaged(ADAM, model, rate=0.5)
        both = nnx.ModelAndOptimizer(model, ADAM)
        alone = nnx.ModelAndOptimizer(Model(nnx.Rngs(1)), ADAM)
        trainer = Trainer(nnx.Rngs(0), ADAM)
    assert nnx.graphdef(averaged) == nnx.graphdef(Averaged(ADAM, model, rate=0.5))
    np.testing.assert_array_equal(averaged.ema.d2.kernel[...], model.d2.kernel[...])
    assert averaged.ema.d2 is not model.d2 and float(averaged.rate[...]) == 0.5
    assert_lies(averaged.ema.d2.kernel[...], ROW, mesh)
    assert both.model is model
    for trained in (both, alone, trainer):
        assert_lies(trained.model.d1.kernel[...], COLUMN, mesh)
        assert_lies(moments(trained, "d1/kernel"), COLUMN, mesh)
        assert_lies(moments(trained, "d2/kernel"), ROW, mesh)
    after = flm.create_optimizer(trainer.model, ADAM, layout_map=layout_map)
    assert_same(trainer.optimizer, after)


def test_of_a_model_of_another_block(mesh: flm.DeviceMesh) -> None:
    """It has values at once, and follows the model where that is on a mesh."""
    tx = optax.adafactor(1e-3, min_dim_size_to_factor=4)
    plain, layout_map = Model(nnx.Rngs(0)), rules(mesh)
    born = flm.create(lambda: Model(nnx.Rngs(0)), layout_map)
    with flm.layout_map_scope(layout_map):
        of_plain, of_born = adam(plain), nnx.Optimizer(born, tx, wrt=nnx.Param)
        outer = Model(nnx.Rngs(0))
        with flm.layout_map_scope(layout_map):
            inner, of_outer = (
                Model(nnx.Rngs(0)),
                nnx.Optimizer(outer, tx, wrt=nnx.Param),
            )
        of_inner = nnx.Optimizer(inner, tx, wrt=nnx.Param)
        assert of_plain.step[...] == of_born.step[...] == 0
    assert len(moments(of_plain, "d1/kernel").sharding.device_set) == 1
    for model, optimizer in ((born, of_born), (inner, of_inner), (outer, of_outer)):
        after = flm.create_optimizer(model, tx, layout_map=layout_map)
        assert_same(optimizer, after)


def test_nobody_keeps_the_optimizer_or_the_model(mesh: flm.DeviceMesh) -> None:
    with flm.layout_map_scope(rules(mesh)):
        optimizer, model = adam(Model(nnx.Rngs(0))), Model(nnx.Rngs(0))
        adam(model)
    assert_lies(moments(optimizer, "d1/kernel"), COLUMN, mesh)
    refs = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_strict_rules_of_the_state(mesh: flm.DeviceMesh) -> None:
    layout_map = flm.LayoutMap(mesh, strict=True)
    layout_map.update({"d1/kernel": (None, "model"), "d2/kernel|bias": None})
    layout_map.optimizer["d1/kernel"] = ("data", "model")
    with flm.layout_map_scope(layout_map):
        model = Model(nnx.Rngs(0))
        optimizer = adam(model)
    assert_lies(moments(optimizer, "d1/kernel"), (("data",), ("model",)), mesh)
    layout_map.optimizer["d3/kernel"] = None
    with pytest.raises(flm.errors.ResolveError, match="unused: .*'d3/kernel'"):
        with flm.layout_map_scope(layout_map):
            model = Model(nnx.Rngs(0))
            optimizer = adam(model)
