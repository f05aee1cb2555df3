"""jit on plain trees: which are state, shardings of results, explicit layouts."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from shards import assert_lies, bare, grid
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


# ---------------------------------------------------- layouts given by hand


def test_layouts_of_in_and_out_shardings() -> None:
    mesh = grid()
    layout_map = flm.LayoutMap(mesh, strict=False)
    for axes, dims in (
        (("data", None), BATCH),
        ((("data", "model"), None), ((("data", "model")), ())),
        ((("data",), ("model",)), (("data",), ("model",))),
        (P(None, "model"), COLUMN),
        (flm.TensorLayout((None, "model")), COLUMN),
        (NamedSharding(bare(mesh), P(None, "model")), COLUMN),
    ):
        step = flm.jit(
            lambda x, tree: (x, tree, x),
            layout_map=layout_map,
            in_shardings={"x": axes, "tree": {"a": axes, "b": None}},
            donate_argnames="tree",  # state is overridden, too
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


def test_bad_layouts_name_the_argument() -> None:
    layout_map = flm.LayoutMap(grid(), strict=False)
    for given, error, text in (
        (("dta", None), flm.errors.RuleError, "names the axis 'dta'"),
        ("data", flm.errors.RuleError, "a layout cannot be a string"),
        (("data", "data"), flm.errors.RuleError, "'data' twice"),
        ((None, None, "data"), flm.LayoutError, "has 3 dims, the array has 2"),
        (3, flm.errors.RuleError, "not a layout: 3"),
        ((None, "model"), flm.LayoutError, "dim 1 of size 6 is not divisible"),
    ):
        step = flm.jit(lambda x: x, layout_map=layout_map, in_shardings={"x": given})
        with refuses(error, "in_shardings['x']: ", text):
            step(X[:, :6])
        step = flm.jit(lambda x: x, layout_map=layout_map, out_shardings=given)
        with refuses(error, "out_shardings: ", text):
            step(X[:, :6])
    with refuses(flm.LayoutError, "in_shardings['x'] must be one sharding"):
        flm.jit(lambda x: x, in_shardings={"x": [None]})({"a": X})
    step = flm.jit(lambda x: x, layout_map=layout_map, in_shardings={"x": P("data")})
    with refuses(flm.LayoutError, "x (8,8): wanted P(data) on mesh"):
        step(put(grid(), P(None, "data")))
    with refuses(flm.LayoutError, "in_shardings is a mapping from the name of an"):
        flm.jit(lambda x: x, in_shardings=(None,))  # type: ignore[arg-type]
    step = flm.jit(lambda x: x, in_shardings={"x": ("data", None)})
    with refuses(flm.errors.MeshError, "in_shardings['x']: no mesh for the layout"):
        step(X[:, :6])
