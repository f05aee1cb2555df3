"""jit on plain trees: which are state, shardings of results, explicit layouts."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec
from shards import assert_lies, bare, grid, lies
from steps import BATCH, COLUMN, ROW, X

import flax_layoutmap as flm

P = PartitionSpec


def rules(mesh: Any, **options: Any) -> flm.LayoutMap:
    layout_map = flm.LayoutMap(mesh, **options)
    layout_map["w|kernel"] = (None, "model")
    layout_map["b|bias"] = None
    return layout_map


def make_params() -> dict[str, Any]:
    return {"b": jnp.zeros(8), "w": jnp.asarray(X)}


def put(mesh: flm.DeviceMesh, spec: PartitionSpec, value: Any = X) -> Any:
    return jax.device_put(value, NamedSharding(bare(mesh), spec))


@contextlib.contextmanager
def refuses(error: type[Exception], *texts: str) -> Iterator[None]:
    """The block raises exactly this kind of error, with these words."""
    with pytest.raises(error) as caught:
        yield
    assert type(caught.value) is error
    for text in texts:
        assert text in str(caught.value)


# --------------------------------------------------------- parameters are state


def test_parameters_from_the_host_come_in_by_the_rules() -> None:
    mesh = grid()
    step = flm.jit(lambda params: params, layout_map=rules(mesh, strict=False))
    for given in ({"w": X}, {"layers": [{"w": jnp.asarray(X)}]}, {"params": {"w": X}}):
        (w,) = jax.tree.leaves(step(given))
        assert_lies(w, COLUMN, mesh, X)
    with refuses(flm.LayoutError, "params/w (8,8): wanted P(-, model)"):
        step({"w": put(mesh, P("data"))})


def test_the_state_of_an_optimizer_that_is_elsewhere() -> None:
    mesh = grid()
    layout_map = rules(mesh, strict=False)
    model = flm.create(lambda: nnx.Linear(8, 8, rngs=nnx.Rngs(0)), layout_map)
    optimizer = flm.create_optimizer(model, optax.adam(1e-3), layout_map)
    moment = optimizer.opt_state[0].mu["kernel"]
    moment.set_value(put(mesh, P("data"), moment.get_value()))
    step = flm.jit(
        lambda model, optimizer: optimizer.update(model, nnx.state(model, nnx.Param)),
        layout_map=layout_map,
    )
    with refuses(
        flm.LayoutError,
        "optimizer/opt_state/0/mu/kernel (8,8): wanted P(-, model) on mesh",
        "\nmake state with flm.create and flm.create_optimizer, or place all of it "
        "first, under these names: "
        "layout_map.place({'model': model, 'optimizer': optimizer})",
    ):
        step(model, optimizer)


# ------------------------------------------------------------------------- data


def test_results_like_data_on_the_mesh_stay_there() -> None:
    mesh = grid()
    layout_map = flm.LayoutMap(mesh, strict=False)
    step = flm.jit(
        lambda carry, x: ({"a": carry["a"] + x.sum(), "n": carry["n"] + 1}, x),
        layout_map=layout_map,
    )
    carry = {"a": put(mesh, P(None, "model")), "n": put(mesh, P(), np.int32(0))}
    for count in range(1, 4):
        carry, _ = step(carry, X)
        assert_lies(carry["a"], COLUMN, mesh)
        assert int(carry["n"]) == count and step._cache_size() == 1
    # Other places are another program, as the results lie there.
    other, _ = step({**carry, "a": put(mesh, P("model"))}, X)
    assert_lies(other["a"], ROW, mesh)
    assert step._cache_size() == 2
    # Without a map too.
    bare_step = flm.jit(lambda carry: {"a": carry["a"] * 2})
    assert_lies(bare_step({"a": put(mesh, P(None, "model"))})["a"], COLUMN, mesh)


def test_old_style_keys_are_replicated() -> None:
    mesh = grid()
    layout_map = flm.LayoutMap(mesh, batch=("data", "model"), strict=False)
    step = flm.jit(
        lambda key, batch: (key, batch["key"], batch["x"]), layout_map=layout_map
    )
    for key in (
        jax.random.PRNGKey(3),
        np.asarray(jax.random.PRNGKey(3)),
        np.arange(4, dtype=np.uint32),
    ):
        found, inside, x = step(key, {"key": key, "x": np.arange(8, dtype=np.uint32)})
        assert_lies(found, ((),), mesh, key)
        assert_lies(inside, ((),), mesh, key)
        assert_lies(x, (("data", "model"),), mesh)
    with refuses(flm.LayoutError, "batch/key (4,): dim 0 of size 4"):
        step(key, {"key": np.arange(4), "x": X})


# ---------------------------------------------------------------- new states


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_new_states_are_laid_out_by_the_rules(kind: str) -> None:
    mesh = grid(kind)
    layout_map = rules(mesh)
    dense, tx = linen.Dense(8), optax.adam(1e-3)

    def train_state(key: Any) -> Any:
        params = dense.init(key, X)["params"]
        return TrainState.create(apply_fn=dense.apply, params=params, tx=tx)

    key = jax.random.key(0)

    def update(state: Any, x: Any) -> Any:
        def loss_of(params: Any) -> Any:
            return state.apply_fn({"params": params}, x).sum()

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return {"state": state.apply_gradients(grads=grads), "loss": (loss, None)}

    first = state = flm.jit(train_state, layout_map=layout_map)(key)
    step = flm.jit(update, layout_map=layout_map, donate_argnames="state")
    for count in range(3):
        for tree in (state.params, state.opt_state[0].mu, state.opt_state[0].nu):
            assert_lies(tree["kernel"], COLUMN, mesh)
            assert_lies(tree["bias"], ((),), mesh)
        assert_lies(state.step, (), mesh, np.int32(count))
        state = step(state, X)["state"]
    assert type(state) is TrainState and first.params["kernel"].is_deleted()
    assert step._cache_size() == 1

    variables = flm.jit(lambda k: dense.init(k, X), layout_map=layout_map)(key)
    assert_lies(variables["params"]["kernel"], COLUMN, mesh)
    assert_lies(variables["params"]["bias"], ((),), mesh)

    def module_state(rngs: Any) -> Any:
        return {"state": nnx.state(nnx.Linear(8, 8, rngs=rngs)), "x": [X]}

    found = flm.jit(module_state, layout_map=layout_map)(nnx.Rngs(0))
    assert_lies(found["state"]["kernel"][...], COLUMN, mesh)

    params = flm.create(make_params, layout_map)
    opt_state = flm.jit(lambda params: tx.init(params), layout_map=layout_map)(params)
    assert_lies(opt_state[0].mu["w"], COLUMN, mesh)
    assert_lies(opt_state[0].mu["b"], ((),), mesh)


def test_other_results_are_left_to_the_compiler() -> None:
    mesh = grid()
    layout_map = rules(mesh, strict=False)
    step = flm.jit(lambda x: {"w": x, "loss": x.sum()}, layout_map=layout_map)
    assert not lies(step(X)["w"], COLUMN, mesh)
    step = flm.jit(lambda x: {"params": {"w": x}}, layout_map=layout_map)
    assert_lies(step(X)["params"]["w"], COLUMN, mesh)
    # Without rules there is nothing to ask.
    assert flm.jit(lambda x: {"params": x})(X)["params"].shape == (8, 8)


def test_new_states_that_do_not_fit() -> None:
    mesh = grid()
    step = flm.jit(lambda x: (0, {"params": {"w": x}}), layout_map=rules(mesh))
    with refuses(
        flm.errors.ResolveError,
        "the result/1/params/w (8,6): ",
        "dim 1 of size 6 does not",
    ):
        step(X[:, :6])
    layout_map = rules(mesh, strict=False)
    layout = flm.TensorLayout(("model", None))
    # What the caller says himself is not asked for.
    step = flm.jit(
        lambda x: {"params": {"w": x}}, layout_map=layout_map, out_shardings=layout
    )
    assert_lies(step(X[:, :6])["params"]["w"], ROW, mesh)


def test_rules_used_by_the_result_alone_are_used() -> None:
    layout_map = rules(grid(), strict=True)
    make = flm.jit(
        lambda rngs: nnx.state(nnx.Linear(8, 8, rngs=rngs)), layout_map=layout_map
    )
    assert_lies(make(nnx.Rngs(0))["kernel"][...], COLUMN, grid())
    layout_map["nowhere"] = None
    with refuses(flm.errors.ResolveError, "strict: 1 finding", "nowhere"):
        make(nnx.Rngs(0))


# ---------------------------------------------------- layouts given by hand


def test_axes_are_a_layout_of_in_and_out_shardings() -> None:
    mesh = grid()
    layout_map = flm.LayoutMap(mesh, strict=False)
    for axes, dims in (
        (("data", None), BATCH),
        ((("data", "model"), None), ((("data", "model")), ())),
        ((("data",), ("model",)), (("data",), ("model",))),
    ):
        step = flm.jit(
            lambda x, tree: (x, tree, x),
            layout_map=layout_map,
            in_shardings={"x": axes, "tree": {"a": axes, "b": None}},
            out_shardings=(None, None, axes),
        )
        x, tree, last = step(X, {"a": [X, X], "b": X})
        for leaf in (x, *tree["a"], last):
            assert_lies(leaf, dims, mesh, X)
    # A tuple of layouts is a tree as before.
    step = flm.jit(
        lambda x: (x, x), layout_map=layout_map, out_shardings=(("model", None), None)
    )
    assert_lies(step(X)[0], ROW, mesh, X)


def test_bad_axes_name_the_argument() -> None:
    layout_map = flm.LayoutMap(grid(), strict=False)
    for given, error, text in (
        (("dta", None), flm.errors.RuleError, "names the axis 'dta'"),
        ("data", flm.errors.RuleError, "a layout cannot be a string"),
        (("data", "data"), flm.errors.RuleError, "'data' twice"),
        ((None, None, "data"), flm.LayoutError, "has 3 dims, the array has 2"),
        (3, flm.errors.RuleError, "not a layout: 3"),
    ):
        step = flm.jit(lambda x: x, layout_map=layout_map, in_shardings={"x": given})
        with refuses(error, "in_shardings['x']: ", text):
            step(X)
        step = flm.jit(lambda x: x, layout_map=layout_map, out_shardings=given)
        with refuses(error, "out_shardings: ", text):
            step(X)
    step = flm.jit(lambda x: x, in_shardings={"x": ("data", None)})
    with refuses(flm.errors.MeshError, "in_shardings['x']: no mesh for the layout"):
        step(X)
