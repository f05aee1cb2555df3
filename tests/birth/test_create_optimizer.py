"""create_optimizer: where state lies, what it is made by, what it shares."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from shards import KINDS, Dims, assert_lies, grid, leaves_of, plain

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
    "sgd": lambda: optax.sgd(1e-2, momentum=0.9),
    "chain": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.scale_by_adam(), optax.trace(0.9)
    ),
    "multi step": lambda: optax.MultiSteps(optax.adam(1e-3), 2),
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


@pytest.mark.parametrize("kind", KINDS)
def test_adafactor_statistics_lie_as_rows_and_columns(kind: str) -> None:
    mesh = grid(kind)
    tx = optax.adafactor(1e-3, min_dim_size_to_factor=4, momentum=0.9)
    layout_map = stacked_rules(mesh)
    optimizer = flm.create_optimizer(flm.create(Stacked, layout_map), tx, layout_map)
    found = leaves_of(nnx.state(optimizer))
    # Of the last two dims, the row statistics keep the first, the columns the last.
    statistics: dict[str, Dims] = {
        "v_row/square": (("model",),),
        "v_col/square": (("data",),),
        "v_row/stack": ((), ("data",)),
        "v_col/stack": ((), ("model",)),
        "v/bias": (("model",),),
    }
    ema = {f"ema/{name}": dims for name, dims in STACKED.items()}
    for path, dims in (statistics | ema).items():
        (leaf,) = (leaf for key, leaf in found.items() if key.endswith(f"/{path}"))
        assert_lies(leaf, dims, mesh)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_the_state_of_a_tree_of_parameters(kind: str) -> None:
    mesh, tx = grid(kind), optax.adam(1e-3)
    layout_map = flm.LayoutMap(mesh, strict=False)
    layout_map["up/kernel"] = (None, "model")
    params = flm.create(
        lambda: {"up": {"kernel": jnp.ones((8, 16)), "bias": jnp.ones(16)}}, layout_map
    )
    state: Any = flm.create_optimizer(params, tx, layout_map)
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))
    for moments in (state[0].mu, state[0].nu):
        assert_lies(moments["up"]["kernel"], COLUMN, mesh)
        assert_lies(moments["up"]["bias"], ((),), mesh)
    assert_lies(state[0].count, (), mesh, np.int32(0))


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
