"""`nnx.Optimizer`s made in a layout_map_scope equal those of `create_optimizer`."""

import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from shards import assert_lies

import flax_layoutmap as flm

COLUMN, ROW = ((), ("model",)), (("model",), ())
X = jnp.ones((4, 8))


def rules(mesh: flm.DeviceMesh, **more: Any) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map["d1/kernel"] = (None, "model")
    layout_map["d2/kernel"] = ("model", None)
    layout_map.update(more)
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
    found = leaves_of(optimizer)
    (one,) = (v for path, v in found.items() if path.endswith(f"mu/{of}"))
    return one.get_value()


def assert_same(optimizer: Any, other: Any) -> None:
    """The same graph, metadata, values and shards."""
    assert nnx.graphdef(optimizer) == nnx.graphdef(other)
    found, wanted = leaves_of(optimizer), leaves_of(other)
    assert found.keys() == wanted.keys()
    for path, variable in found.items():
        assert variable.get_metadata() == wanted[path].get_metadata(), path
        one, two = variable.get_value(), wanted[path].get_value()
        assert one.dtype == two.dtype
        index = {shard.device: shard.index for shard in one.addressable_shards}
        for shard in two.addressable_shards:
            assert index[shard.device] == shard.index, path
        np.testing.assert_array_equal(one, two, err_msg=path)


# Those that keep copies of the parameters are computed from the finished ones.
TRANSFORMATIONS: dict[str, Any] = {
    "adamw": lambda: optax.adamw(1e-3),
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=4),
    "chain": lambda: optax.chain(optax.clip(1.0), optax.sgd(1e-2, momentum=0.9)),
    "schedule free": lambda: optax.contrib.schedule_free_adamw(1e-3),
    "multi step": lambda: optax.MultiSteps(optax.adam(1e-3), 2),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.adam)(1e-3),
}


@pytest.mark.parametrize("names", [None, ("data", None)], ids=["plain", "annotated"])
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_as_one_made_after_the_block(
    mesh: flm.DeviceMesh, name: str, names: Any
) -> None:
    layout_map, tx = rules(mesh), TRANSFORMATIONS[name]()
    with flm.layout_map_scope(layout_map):
        model = Model(nnx.Rngs(0), names)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        before = optimizer, optimizer.opt_state, optimizer.step
    assert all(
        now is then
        for now, then in zip(
            (optimizer, optimizer.opt_state, optimizer.step), before, strict=True
        )
    )
    after = flm.create_optimizer(model, tx, wrt=nnx.Param, layout_map=layout_map)
    assert_same(optimizer, after)


def test_moments_lie_as_the_parameters_and_train(mesh: flm.DeviceMesh) -> None:
    layout_map = rules(mesh)
    with flm.layout_map_scope(layout_map):
        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    assert_lies(moments(optimizer, "d1/kernel"), COLUMN, mesh)
    assert_lies(moments(optimizer, "d2/kernel"), ROW, mesh)
    assert_lies(optimizer.step.get_value(), (), mesh)

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    jitted = flm.jit(step, layout_map=layout_map, donate_argnames=("optimizer",))
    losses = [float(jitted(model, optimizer, X)) for _ in range(2)]
    assert losses[1] < losses[0]
    assert_lies(moments(optimizer, "d1/kernel"), COLUMN, mesh)


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_rules_for_the_state(kind: str) -> None:
    mesh = flm.DeviceMesh((2, 4), ("data", "model"), axis_types=kind)
    layout_map = rules(mesh)
    layout_map.optimizer["d1/kernel"] = ("data", "model")
    with flm.layout_map_scope(layout_map):
        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    assert_lies(moments(optimizer, "d1/kernel"), (("data",), ("model",)), mesh)
    assert_lies(moments(optimizer, "d2/kernel"), ROW, mesh)
    assert_lies(model.d1.kernel[...], COLUMN, mesh)


def test_what_does_not_fit_is_told_before_anything_is_made(
    mesh: flm.DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flax_layoutmap._birth.scope_birth import Birth

    monkeypatch.setattr(Birth, "make", None)
    layout_map = rules(mesh)
    layout_map.optimizer["d1/bias"] = ("model", None)
    kept: list[Any] = []
    with pytest.raises(flm.errors.ResolveError, match="d1/bias"):
        with flm.layout_map_scope(layout_map):
            kept.append(Model(nnx.Rngs(0)))
            kept.append(nnx.Optimizer(kept[0], optax.adam(1e-2), wrt=nnx.Param))
    with pytest.raises(
        flm.errors.StructureError, match="block failed: make the model again"
    ):
        kept[1].step[...]


# ------------------------------------------------------------------ of which model


class Holder(nnx.Module):
    def __init__(self, **parts: Any) -> None:
        for name, part in parts.items():
            setattr(self, name, part)


ADAM = optax.adam(1e-2)


def adam(model: Any, wrt: Any = nnx.Param) -> Any:
    return nnx.Optimizer(model, ADAM, wrt=wrt)


def test_of_an_assembled_model_and_of_parts(mesh: flm.DeviceMesh) -> None:
    """The final path of the model decides, and that of the optimizer's is its own."""
    layout_map = flm.LayoutMap(mesh, match="fullmatch", strict=False)
    layout_map["second/kernel"] = ("model", None)
    layout_map["first/d1/kernel"] = (None, "model")
    with flm.layout_map_scope(layout_map):
        first, second = Model(nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(1))
        early = adam(second)
        model = Holder(first=first, second=second)
        whole, part = adam(model), adam(first, nnx.PathContains("kernel"))
        of_state = adam(nnx.state(second, nnx.Param))
    assert_lies(moments(early, "kernel"), ROW, mesh)
    assert_lies(moments(of_state, "kernel"), ROW, mesh)
    assert_lies(moments(whole, "second/kernel"), ROW, mesh)
    assert_lies(moments(whole, "first/d1/kernel"), COLUMN, mesh)
    assert_lies(moments(part, "d1/kernel"), COLUMN, mesh)
    assert not [path for path in leaves_of(part) if path.endswith("bias")]


def test_tied_weights_have_one_moment(mesh: flm.DeviceMesh) -> None:
    with flm.layout_map_scope(rules(mesh)):
        model: Any = Model(nnx.Rngs(0))
        model.again = model.d1
        optimizer = adam(model)
    assert model.again is model.d1
    paths = [path for path in leaves_of(optimizer) if "/mu/" in path]
    assert len(paths) == 4
    after = flm.create_optimizer(model, ADAM)
    assert_same(optimizer, after)


def test_with_its_model_inside(mesh: flm.DeviceMesh) -> None:
    with flm.layout_map_scope(rules(mesh)):
        model = Model(nnx.Rngs(0))
        both = nnx.ModelAndOptimizer(model, optax.adam(1e-2))
        alone = nnx.ModelAndOptimizer(Model(nnx.Rngs(1)), optax.adam(1e-2))
    assert both.model is model
    for own in (both, alone):
        assert_lies(own.model.d1.kernel[...], COLUMN, mesh)
        assert_lies(moments(own, "d1/kernel"), COLUMN, mesh)
        assert_lies(moments(own, "d2/kernel"), ROW, mesh)


class Averaged(nnx.Optimizer):
    """A copy of the model, a number, and arguments in another order."""

    def __init__(self, tx: Any, net: Any, *, rate: float) -> None:
        super().__init__(net, tx, wrt=nnx.Param)
        self.ema = nnx.clone(net)
        self.rate = nnx.Variable(jnp.float32(rate))


def test_a_subclass(mesh: flm.DeviceMesh) -> None:
    with flm.layout_map_scope(rules(mesh)):
        model = Model(nnx.Rngs(0))
        optimizer = Averaged(ADAM, model, rate=0.5)
    plain = Averaged(ADAM, model, rate=0.5)
    assert nnx.graphdef(optimizer) == nnx.graphdef(plain)
    assert_lies(moments(optimizer, "d1/kernel"), COLUMN, mesh)
    assert_lies(optimizer.ema.d2.kernel[...], ROW, mesh)
    np.testing.assert_array_equal(optimizer.ema.d2.kernel[...], model.d2.kernel[...])
    assert optimizer.ema.d2 is not model.d2
    assert float(optimizer.rate[...]) == 0.5


class OfItsOwn(nnx.Optimizer):
    def __init__(self, rngs: nnx.Rngs, tx: Any) -> None:
        self.model = Model(rngs)
        super().__init__(self.model, tx, wrt=nnx.Param)


def test_a_subclass_that_makes_its_model(mesh: flm.DeviceMesh) -> None:
    rngs, other = nnx.Rngs(0), nnx.Rngs(0)
    tx = optax.adafactor(1e-3, min_dim_size_to_factor=4)
    with flm.layout_map_scope(rules(mesh)):
        optimizer = OfItsOwn(rngs, tx)
    Model(other)
    assert rngs.default.count[...] == other.default.count[...]
    assert_lies(optimizer.model.d1.kernel[...], COLUMN, mesh)
    found = leaves_of(optimizer)
    (columns,) = (v for p, v in found.items() if p.endswith("v_col/d1/kernel"))
    assert_lies(columns.get_value(), (("model",),), mesh)


@pytest.mark.parametrize("way", ["made before", "made inside"])
def test_in_a_module(mesh: flm.DeviceMesh, way: str) -> None:
    """A trainer is a module; what it holds is laid out once."""

    class Trainer(nnx.Module):
        def __init__(self, rngs: Any, tx: Any) -> None:
            self.model = Model(rngs)
            self.optimizer = nnx.Optimizer(self.model, tx, wrt=nnx.Param)

    tx = optax.adafactor(1e-3, min_dim_size_to_factor=4)
    with flm.layout_map_scope(rules(mesh, **{"optimizer.*kernel": ("data", None)})):
        if way == "made inside":
            trainer: Any = Trainer(nnx.Rngs(0), tx)
        else:
            model = Model(nnx.Rngs(0))
            optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
            trainer = Holder(model=model, optimizer=optimizer)
    assert_lies(trainer.model.d1.kernel[...], COLUMN, mesh)
    after = flm.create_optimizer(trainer.model, tx)
    assert_same(trainer.optimizer, after)


def test_several(mesh: flm.DeviceMesh) -> None:
    with flm.layout_map_scope(rules(mesh)):
        models = [Model(nnx.Rngs(0)), Model(nnx.Rngs(1))]
        optimizers = [adam(model) for model in [*models, models[0]]]
    for optimizer in optimizers:
        assert_lies(moments(optimizer, "d1/kernel"), COLUMN, mesh)


def test_of_a_model_made_before(mesh: flm.DeviceMesh) -> None:
    """It follows that: on the mesh, on one device, or moved by the block."""
    plain, moved = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    born = flm.create(lambda: Model(nnx.Rngs(0)), rules(mesh))
    with flm.layout_map_scope(rules(mesh)):
        of_plain, of_born, of_moved = adam(plain), adam(born), adam(moved)
        assert of_plain.step[...] == 0  # it has its values
        holder: Any = Holder(part=moved)
    assert len(moments(of_plain, "d1/kernel").sharding.device_set) == 1
    for model, optimizer in ((born, of_born), (moved, of_moved)):
        assert_lies(model.d1.kernel[...], COLUMN, mesh)
        assert_same(optimizer, flm.create_optimizer(model, ADAM))
    assert holder.part is moved


@pytest.mark.parametrize("before", [False, True])
def test_of_no_parameters(mesh: flm.DeviceMesh, before: bool) -> None:
    """As the eager one, on the mesh: it has counters only."""
    tx = optax.adam(1e-3)
    made = flm.create(lambda: Model(nnx.Rngs(0)), rules(mesh)) if before else None
    with flm.layout_map_scope(rules(mesh)):
        model = made or Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)
    plain = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)
    assert nnx.graphdef(optimizer) == nnx.graphdef(plain)
    found = leaves_of(optimizer)
    assert found.keys() == leaves_of(plain).keys() and len(found) == 2
    for variable in found.values():
        assert_lies(variable.get_value(), (), mesh)
    assert_lies(model.d1.kernel[...], COLUMN, mesh)


def test_in_blocks_in_blocks(mesh: flm.DeviceMesh) -> None:
    """The block of the model makes the state."""
    outer, inner = rules(mesh), rules(mesh)
    inner.replace("d1/kernel", ("data", None))
    with flm.layout_map_scope(outer):
        first = Model(nnx.Rngs(0))
        with flm.layout_map_scope(inner):
            of_first, second = adam(first), Model(nnx.Rngs(1))
            of_second = adam(second)
            pair: Any = Holder(model=second, optimizer=of_second, other=of_first)
        assert_lies(moments(of_second, "d1/kernel"), (("data",), ()), mesh)
        before = moments(of_second, "d1/kernel")
        again = adam(second)
    assert_lies(moments(of_first, "d1/kernel"), COLUMN, mesh)
    assert_lies(moments(again, "d1/kernel"), (("data",), ()), mesh)
    assert moments(of_second, "d1/kernel") is before and pair.other is of_first


def test_nobody_keeps_the_optimizer_or_the_model(mesh: flm.DeviceMesh) -> None:
    with flm.layout_map_scope(rules(mesh)):
        optimizer = adam(Model(nnx.Rngs(0)))
        model = Model(nnx.Rngs(0))
        adam(model)
        del model
    gc.collect()
    assert_lies(moments(optimizer, "d1/kernel"), COLUMN, mesh)
    with pytest.raises(flm.errors.StructureError) as caught:
        with flm.layout_map_scope(rules(mesh)):
            model = Model(nnx.Rngs(0))
            optimizer = adam(nnx.state(model, nnx.Param))
            del model
            gc.collect()
    assert str(caught.value) == (
        "the Optimizer made in the layout_map_scope block trains d1/bias (16,), which "
        "is part of no model at its end: keep the model, or make the optimizer after "
        "the block"
    )


def test_a_parameter_that_is_replaced(mesh: flm.DeviceMesh) -> None:
    """The state is of the value that there was."""
    tx = optax.contrib.schedule_free_adamw(1e-3)
    with flm.layout_map_scope(rules(mesh)):
        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        model.d1.kernel.set_value(jnp.full((8, 16), 7.0))
    np.testing.assert_array_equal(model.d1.kernel[...], np.full((8, 16), 7.0))
    found = leaves_of(optimizer)
    (copy,) = (v for p, v in found.items() if p.endswith("z/d1/kernel"))
    assert_lies(copy.get_value(), COLUMN, mesh)
    wanted = flm.create(lambda: Model(nnx.Rngs(0)), rules(mesh)).d1.kernel
    np.testing.assert_array_equal(copy.get_value(), wanted[...])


def test_one_that_reads_values(mesh: flm.DeviceMesh) -> None:
    def init(params: Any) -> Any:
        total = float(sum(x.sum() for x in jax.tree.leaves(params)))
        return {"total": jnp.float32(total)}

    tx = optax.GradientTransformation(init, optax.identity().update)
    with pytest.raises(
        flm.errors.StructureError, match="Optimizer needs the values of a mod"
    ):
        with flm.layout_map_scope(rules(mesh)):
            nnx.Optimizer(Model(nnx.Rngs(0)), tx, wrt=nnx.Param)


def test_optax_alone_makes_no_full_copies(mesh: flm.DeviceMesh) -> None:
    """`tx.init` of values that are not there: not full moments in silence."""
    with flm.layout_map_scope(rules(mesh)):
        model = Model(nnx.Rngs(0))
        for tx in (optax.adam(1e-3), optax.adam(1e-3, mu_dtype=jnp.bfloat16)):
            with pytest.raises(
                flm.errors.StructureError, match="exists only after the block"
            ):
                tx.init(nnx.state(model, nnx.Param))


def test_the_optimizer_refuses_to_update_in_the_block(mesh: flm.DeviceMesh) -> None:
    with flm.layout_map_scope(rules(mesh)):
        model = Model(nnx.Rngs(0))
        optimizer = adam(model)
        with pytest.raises(
            flm.errors.StructureError, match="exists only after the block"
        ):
            optimizer.update(model, nnx.state(model, nnx.Param))
    assert optimizer.step[...] == 0


def test_what_a_block_has_made_can_be_collected(mesh: flm.DeviceMesh) -> None:
    with flm.layout_map_scope(rules(mesh)):
        model = Model(nnx.Rngs(0))
        optimizer = adam(model)
    refs = weakref.ref(model), weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_strict_rules_count_the_state_too(mesh: flm.DeviceMesh) -> None:
    def build(pattern: str) -> None:
        layout_map = flm.LayoutMap(mesh, strict=True)
        layout_map["d1/kernel"] = (None, "model")
        layout_map["d2/kernel|bias"] = None
        layout_map.optimizer[pattern] = ("data", "model")
        with flm.layout_map_scope(layout_map):
            kept.append(Model(nnx.Rngs(0)))
            kept.append(adam(kept[0]))

    kept: list[Any] = []
    build("d1/kernel")
    assert_lies(moments(kept[1], "d1/kernel"), (("data",), ("model",)), mesh)
    kept.clear()
    with pytest.raises(flm.errors.ResolveError, match="unused: .*'d3/kernel'"):
        build("d3/kernel")
