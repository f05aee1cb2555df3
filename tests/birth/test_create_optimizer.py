"""create_optimizer, and optimizers of a scope: where state lies, what it shares."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from shards import Dims, assert_lies, grid, leaves_of, plain

import flax_layoutmap as flm

ROW, COLUMN = (("model",), ()), ((), ("model",))


class Stacked(nnx.Module):
    """A square kernel and a stack of square kernels: shapes say nothing here."""

    def __init__(self) -> None:
        self.square = nnx.Param(jnp.arange(64.0).reshape(8, 8))
        self.stack = nnx.Param(jnp.arange(512.0).reshape(8, 8, 8))
        self.bias = nnx.Param(jnp.zeros(8))


STACKED: dict[str, Dims] = {
    "square": (("model",), ("data",)),
    "stack": ((), ("data",), ("model",)),
    "bias": (("model",),),
}


def stacked_rules(mesh: flm.DeviceMesh) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map["square"] = ("model", "data")
    layout_map["stack"] = (None, "data", "model")
    layout_map["bias"] = ("model",)
    return layout_map


def zero(mesh: flm.DeviceMesh) -> flm.LayoutMap:
    """Kernels are replicated, their moments sharded."""
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map.optimizer["kernel"] = ("data", None)
    return layout_map


def linear() -> nnx.Linear:
    return nnx.Linear(8, 8, rngs=nnx.Rngs(0))


contrib: Any = optax.contrib
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam": lambda: optax.adam(1e-3),
    "prodigy": lambda: contrib.prodigy(),
    "dog": lambda: contrib.dog(),
    "schedule free": lambda: contrib.schedule_free_adamw(1e-3),
    "noise": lambda: optax.chain(
        optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.adam(1e-3)
    ),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "auto") for name in OPTIMIZERS), ("adam", "explicit")],
)
def test_state_is_that_of_the_eager_optimizer_and_its_own(name: str, kind: str) -> None:
    """In structure and values; moments lie as their parameters; both can be donated."""
    mesh, tx = grid(kind), OPTIMIZERS[name]()
    layout_map = stacked_rules(mesh)
    model = flm.create(Stacked, layout_map)
    optimizer = flm.create_optimizer(model, tx, layout_map)
    eager = nnx.Optimizer(Stacked(), tx, wrt=nnx.Param)
    assert nnx.graphdef(optimizer) == nnx.graphdef(eager)
    found, wanted = leaves_of(nnx.state(optimizer)), leaves_of(nnx.state(eager))
    assert found.keys() == wanted.keys()
    for path, leaf in found.items():
        dims = STACKED.get(path.rpartition("/")[2], ()) if leaf.ndim else ()
        assert_lies(leaf, dims, mesh)
        np.testing.assert_allclose(plain(leaf), plain(wanted[path]), rtol=1e-6)

    def advanced(tree: Any) -> Any:
        is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
        return jax.tree.map(lambda x: x if is_key(x) else x + 1, tree)

    both = nnx.state(model), nnx.state(optimizer)
    jax.jit(advanced, donate_argnums=0)(both)  # none of them is donated twice
    nnx.Optimizer(Stacked(), tx, wrt=nnx.Param)  # tx has what it holds


def test_only_what_is_trained_has_state(mesh: flm.DeviceMesh) -> None:
    layout_map = stacked_rules(mesh)
    model = flm.create(Stacked, layout_map)
    stack = nnx.All(nnx.Param, nnx.PathContains("stack"))
    optimizer = flm.create_optimizer(model, optax.adam(1e-3), layout_map, wrt=stack)
    moments = [leaf for leaf in jax.tree.leaves(nnx.state(optimizer)) if leaf.ndim]
    assert len(moments) == 2
    for leaf in moments:
        assert_lies(leaf, STACKED["stack"], mesh)


def test_moments_follow_the_model_not_the_rules(mesh: flm.DeviceMesh) -> None:
    layout_map = stacked_rules(mesh)
    model = flm.create(Stacked, layout_map)
    other = flm.LayoutMap(mesh, strict=False)
    other["square"] = ("data", None)
    other.place(model)
    optimizer = flm.create_optimizer(model, optax.sgd(1e-2, momentum=0.9), layout_map)
    assert_lies(optimizer.opt_state[0].trace["square"][...], (("data",), ()), mesh)


# ----------------------------------------------------------------- by which map


def kernel_of(optimizer: Any) -> Any:
    return getattr(optimizer, "opt_state", optimizer)[0].mu["kernel"][...]


def test_the_optimizer_section_of_the_map_decides(mesh: flm.DeviceMesh) -> None:
    layout_map, tx = zero(mesh), optax.adam(1e-3)
    model = flm.create(linear, layout_map)
    for given in (model, nnx.clone(model), {"kernel": model.kernel[...]}):
        optimizer = flm.create_optimizer(given, tx, layout_map)
        assert_lies(kernel_of(optimizer), (("data",), ()), mesh)
    with flm.layout_map_scope(layout_map):
        params = {"kernel": model.kernel[...]}
        assert_lies(kernel_of(flm.create_optimizer(params, tx)), (("data",), ()), mesh)
    wanted = layout_map.resolve(
        {"model": model, "optimizer": flm.create_optimizer(model, tx, layout_map)}
    )["optimizer/opt_state/0/mu/kernel"]
    assert wanted.layout == flm.TensorLayout(("data", None), mesh)


def test_optimizer_rules_go_to_the_mesh_of_the_model(mesh: flm.DeviceMesh) -> None:
    model = flm.create(linear, flm.LayoutMap(mesh, strict=False))
    tx = optax.adam(1e-3)
    for other in ("model=8", "model=2,data=4", None):
        plan = flm.LayoutMap(None if other is None else flm.DeviceMesh(other))
        # Rules for parameters do not count here, nor do their axes.
        plan["kernel"] = ("model", None)
        plan.optimizer["kernel"] = ("model", None)
        assert_lies(kernel_of(flm.create_optimizer(model, tx, plan)), ROW, mesh)
    plan = flm.LayoutMap("x=8")
    plan["kernel"] = ("x", None)
    flm.create_optimizer(model, tx, plan)
    plan.optimizer["kernel"] = ("x", None)
    with pytest.raises(
        flm.errors.RuleError, match="rule 'kernel'.*'x'.*has no such axis"
    ):
        flm.create_optimizer(model, tx, plan)


@pytest.mark.parametrize("names", [("model", None), ("rows", "fsdp")])
def test_the_metadata_of_flax_for_optimizers(mesh: flm.DeviceMesh, names: Any) -> None:
    """Where no optimizer rule is; statistics follow it, too."""
    axes = nnx.logical_axis_rules([("rows", "model")])

    def make() -> Any:
        value = jnp.ones((8, 8))
        return nnx.Dict(kernel=nnx.Param(value, optimizer_sharding=names))

    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map["kernel"] = (None, "data")
    with axes:
        model = flm.create(make, layout_map)
        assert_lies(model["kernel"][...], ((), ("data",)), mesh)
        optimizer = flm.create_optimizer(model, optax.adam(1e-3), layout_map)
        assert_lies(kernel_of(optimizer), ROW, mesh)
        tx = optax.adafactor(1e-3, min_dim_size_to_factor=4)
        found = leaves_of(nnx.state(flm.create_optimizer(model, tx, layout_map)))
        for path, leaf in found.items():
            if path.endswith("v_row/kernel"):
                assert_lies(leaf, (("model",),), mesh)
        layout_map.optimizer["kernel"] = ("data", None)
        optimizer = flm.create_optimizer(model, optax.adam(1e-3), layout_map)
        assert_lies(kernel_of(optimizer), (("data",), ()), mesh)


# --------------------------------------------------- made in a layout_map_scope


def model_rules(mesh: flm.DeviceMesh) -> flm.LayoutMap:
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


def moment(optimizer: Any, of: str) -> Any:
    """The first moment of a parameter."""
    leaves = leaves_of(nnx.state(optimizer))
    (leaf,) = (leaf for path, leaf in leaves.items() if path.endswith(f"mu/{of}"))
    return leaf


def assert_same(optimizer: Any, other: Any) -> None:
    """The same graph, metadata, values and shards."""
    assert nnx.graphdef(optimizer) == nnx.graphdef(other)
    leaves, wanted = leaves_of(nnx.state(optimizer)), leaves_of(nnx.state(other))
    assert leaves.keys() == wanted.keys()
    for path, leaf in leaves.items():
        same = wanted[path]
        assert leaf.sharding.is_equivalent_to(same.sharding, leaf.ndim), path
        assert leaf.dtype == same.dtype
        np.testing.assert_array_equal(leaf, same, err_msg=path)


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
    layout_map, tx = model_rules(mesh), TRANSFORMATIONS[name]()
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
    assert_lies(moment(early, "kernel"), ROW, mesh)
    assert_lies(moment(whole, "second/kernel"), ROW, mesh)
    assert_lies(moment(whole, "first/d1/kernel"), COLUMN, mesh)
    assert_lies(moment(part, "d1/kernel"), COLUMN, mesh)
    assert not [path for path in leaves_of(nnx.state(part)) if path.endswith("bias")]
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
    layout_map = model_rules(mesh)
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
        assert_lies(moment(trained, "d1/kernel"), COLUMN, mesh)
        assert_lies(moment(trained, "d2/kernel"), ROW, mesh)
    after = flm.create_optimizer(trainer.model, ADAM, layout_map=layout_map)
    assert_same(trainer.optimizer, after)


def test_of_a_model_of_another_block(mesh: flm.DeviceMesh) -> None:
    """It has values at once, and follows the model where that is on a mesh."""
    tx = optax.adafactor(1e-3, min_dim_size_to_factor=4)
    plain, layout_map = Model(nnx.Rngs(0)), model_rules(mesh)
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
    assert len(moment(of_plain, "d1/kernel").sharding.device_set) == 1
    for model, optimizer in ((born, of_born), (inner, of_inner), (outer, of_outer)):
        after = flm.create_optimizer(model, tx, layout_map=layout_map)
        assert_same(optimizer, after)


def test_nobody_keeps_the_optimizer_or_the_model(mesh: flm.DeviceMesh) -> None:
    with flm.layout_map_scope(model_rules(mesh)):
        optimizer, model = adam(Model(nnx.Rngs(0))), Model(nnx.Rngs(0))
        adam(model)
    assert_lies(moment(optimizer, "d1/kernel"), COLUMN, mesh)
    refs = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [ref() for ref in refs] == [None, None]
