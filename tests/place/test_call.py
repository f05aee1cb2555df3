"""call_with_layout: results computed in their layout."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from shards import assert_lies, bare

import flax_layoutmap as flm

X = np.arange(64, dtype=np.float32).reshape(8, 8)


def test_none_calls_the_function() -> None:
    assert (
        flm.dtensor.call_with_layout(lambda a, *, b: a + b, None, "text", b="!")
        == "text!"
    )


@pytest.mark.parametrize("kinds", ["auto", "explicit", ("explicit", "auto")], ids=str)
def test_constructors(kinds: Any) -> None:
    """What is no array stays as it is: shapes, dtypes, functions."""
    mesh = flm.DeviceMesh((2, 4), ("data", "model"), axis_types=kinds)
    layout = flm.TensorLayout(("data", "model"), mesh)
    zeros = flm.dtensor.call_with_layout(
        jnp.zeros, layout, shape=(8, 8), dtype=jnp.int32
    )
    assert_lies(zeros, (("data",), ("model",)), mesh, np.zeros((8, 8), np.int32))
    make = nnx.initializers.uniform()
    key = jax.random.key(0)
    drawn = flm.dtensor.call_with_layout(make, layout, key, (8, 8))
    assert_lies(
        drawn, (("data",), ("model",)), mesh, jax.jit(lambda k: make(k, (8, 8)))(key)
    )
    sines = flm.dtensor.call_with_layout(jnp.square, layout, X)
    assert_lies(sines, (("data",), ("model",)), mesh, X * X)


def test_trees(mesh: flm.DeviceMesh) -> None:
    rows, columns = (flm.TensorLayout(a, mesh) for a in (("data", ...), (..., "model")))

    def make(x: Any) -> Any:
        return {"a": x, "b": [x[0], x], "c": x}

    same = flm.dtensor.call_with_layout(make, rows, X)
    assert_lies(same["b"][0], (("data",),), mesh, X[0])
    found = flm.dtensor.call_with_layout(make, {"a": rows, "b": columns, "c": None}, X)
    assert_lies(found["a"], (("data",), ()), mesh, X)
    assert_lies(found["b"][0], (("model",),), mesh, X[0])
    assert_lies(found["b"][1], ((), ("model",)), mesh, X)
    np.testing.assert_array_equal(found["c"], X)
    pair = flm.dtensor.call_with_layout(lambda x: (x, x), (rows, columns), X)
    assert_lies(pair[1], ((), ("model",)), mesh, X)


def test_bare_axes_take_the_default_mesh(mesh: flm.DeviceMesh) -> None:
    with flm.dtensor.default_mesh(mesh):
        made = flm.dtensor.call_with_layout(jnp.ones, ("data", None), (8, 8))
    assert_lies(made, (("data",), ()), mesh, np.ones((8, 8), np.float32))


def test_inside_jit(mesh: flm.DeviceMesh) -> None:
    layout = flm.TensorLayout((None, "model"), mesh)
    with jax.set_mesh(bare(mesh)):
        found = jax.jit(lambda x: flm.dtensor.call_with_layout(jnp.square, layout, x))(
            X
        )
    assert_lies(found, ((), ("model",)), mesh, X * X)
