"""fetch_layout, is_distributed and check_layout: known layouts, never guesses."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import NamedSharding, PartitionSpec
from shards import assert_lies, bare

import flax_layoutmap as flm
from flax_layoutmap._core.jax_internals import memory_of

P = PartitionSpec
X = np.arange(64, dtype=np.float32).reshape(8, 8)
LAYOUTS = [("data", None), (None, None), (None, "model"), (("data", "model"), None)]


@pytest.mark.parametrize("axes", LAYOUTS)
def test_an_array(mesh: flm.DeviceMesh, axes: Any) -> None:
    layout = flm.TensorLayout(axes, mesh)
    x = flm.relayout(X, layout)
    for holder in (x, nnx.Param(x), linen.Partitioned(x, names=("a", "b"))):
        assert flm.dtensor.fetch_layout(holder) == layout
        assert flm.dtensor.is_distributed(holder)
        flm.dtensor.check_layout(holder, layout)


def test_every_dim_has_an_entry(mesh: flm.DeviceMesh) -> None:
    """However JAX spells the spec."""
    for spec in (P("data"), P("data", None), P(("data",), None)):
        x = jax.device_put(X, NamedSharding(bare(mesh), spec))
        assert flm.dtensor.fetch_layout(x) == flm.TensorLayout(("data", None), mesh)
    scalar = flm.dtensor.fetch_layout(flm.relayout(1.0, mesh))
    assert scalar == flm.TensorLayout.replicated(mesh, 0)


def test_plain_values() -> None:
    for value in (None, 1, 2.5, True, 1j):
        assert flm.dtensor.fetch_layout(value) is None
        assert not flm.dtensor.is_distributed(value)
    for value in (X, jnp.asarray(X), jax.device_put(X, jax.devices()[1])):
        assert not flm.dtensor.is_distributed(value)
        with pytest.raises(flm.LayoutError, match="flm.relayout"):
            flm.dtensor.fetch_layout(value)


def test_abstract_arrays(abstract_mesh: flm.DeviceMesh) -> None:
    layout = flm.TensorLayout(("data", None), abstract_mesh)
    struct = jax.ShapeDtypeStruct((8, 8), "float32", sharding=layout.sharding())
    assert flm.dtensor.fetch_layout(struct) == layout


def test_explicit_axes_inside_jit() -> None:
    mesh = flm.DeviceMesh((2, 4), ("data", "model"), axis_types="explicit")
    layout = flm.TensorLayout(("data", None), mesh)
    seen = []

    def look(x: Any) -> Any:
        seen.append(flm.dtensor.fetch_layout(x))
        flm.dtensor.check_layout(x, layout)
        return x

    jax.jit(look)(flm.relayout(X, layout))
    assert seen[0].equivalent(layout, 2) and seen[0].device_mesh.is_abstract


@pytest.mark.parametrize("look", [flm.dtensor.fetch_layout, flm.dtensor.is_distributed])
def test_never_a_false_replicated(mesh: flm.DeviceMesh, look: Any) -> None:
    """JAX's own type of such a value says that nothing is sharded."""
    x = flm.relayout(X, flm.TensorLayout((None, "model"), mesh))
    for way in (jax.jit, jax.vmap, lambda f: jax.jit(jax.grad(f))):
        with pytest.raises(flm.LayoutError, match="Auto axes"):
            way(lambda x: (look(x), jnp.sum(x))[1])(x)


def test_while_differentiating_outside_of_jit(mesh: flm.DeviceMesh) -> None:
    layout = flm.TensorLayout((None, "model"), mesh)
    seen = []

    def loss(x: Any) -> Any:
        seen.extend([flm.dtensor.fetch_layout(x), flm.dtensor.is_distributed(x)])
        return jnp.sum(x)

    jax.grad(loss)(flm.relayout(X, layout))
    jax.grad(lambda x: jnp.sum(jax.grad(loss)(x)))(flm.relayout(X, layout))
    assert seen == [layout, True] * 2


def test_check_layout(mesh: flm.DeviceMesh) -> None:
    x = flm.relayout(X, flm.TensorLayout(("data", None), mesh))
    same = flm.DeviceMesh((2, 4), ("data", "model"), mesh.devices.ravel())
    abstract = flm.DeviceMesh.abstract((2, 4), ("data", "model"))
    other = flm.DeviceMesh((2, 4), ("data", "model"), jax.devices()[::-1])
    good = [("data", None), P("data"), ("data", ...), ("match", None)]
    bad = [("data",), ("model", None), None, (None, "data"), ("data", "model")]
    for axes in good:
        flm.dtensor.check_layout(x, axes)
        for at in (mesh, same, abstract):
            flm.dtensor.check_layout(x, flm.TensorLayout(axes, at))
        with pytest.raises(flm.LayoutError, match="has the layout"):
            flm.dtensor.check_layout(x, flm.TensorLayout(axes, other))
    for axes in bad:
        for layout in (axes, flm.TensorLayout(axes, mesh)):
            with pytest.raises(flm.LayoutError, match="has the layout"):
                flm.dtensor.check_layout(x, layout)


# ------------------------------------------------------------- boxes that would move


class Plain(linen.meta.AxisMetadata[Any]):
    """A box that has no more than reading it needs."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def unbox(self) -> Any:
        return self.held

    replace_boxed = add_axis = remove_axis = None  # type: ignore[assignment]


def boxes(x: Any, mesh: Any) -> list[Any]:
    """Boxes whose own `unbox` moves the array to `data`, and others."""
    box: Any = linen.Partitioned
    logical: Any = linen.LogicallyPartitioned
    moving = box(x, names=("data", None), mesh=mesh)
    return [
        moving,
        box(x, names=("data", None)),
        box(moving, names=("model", None), mesh=mesh),
        logical(x, names=("rows", None), mesh=mesh, rules=(("rows", "data"),)),
        nnx.Param(moving),
        Plain(x),
        Plain(moving),
    ]


@pytest.mark.parametrize("context", [False, True])
def test_reading_a_box_moves_nothing(mesh: flm.DeviceMesh, context: bool) -> None:
    layout = flm.TensorLayout((None, None), mesh)
    x = flm.relayout(X, layout)
    with jax.set_mesh(bare(mesh)) if context else contextlib.nullcontext():
        moved = linen.meta.unbox(boxes(x, bare(mesh))[0])
        assert (
            flm.dtensor.fetch_layout(moved) != layout
        )  # or this test would show nothing
        for box in boxes(x, bare(mesh)):
            assert flm.dtensor.fetch_layout(box) == layout
            assert flm.dtensor.is_distributed(box)
            flm.dtensor.check_layout(box, layout)
            assert_lies(flm.relayout_like(X, box), ((), ()), mesh, X)
            parts = flm.dtensor.unpack(box)
            assert [part.shape for part in parts] == [(8, 8)] * 8
            pointers = [memory_of(part) for part in parts]
            assert pointers == [memory_of(p) for p in flm.dtensor.unpack(x)]
