"""Layout metadata of Variables and Linen boxes."""

import re
import warnings
from typing import Any

import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec

import flax_layoutmap as flm
from flax_layoutmap._resolve.leaves import mark_of, mesh_axes

P = PartitionSpec


def variable(**metadata: Any) -> nnx.Variable[Any]:
    with nnx.use_eager_sharding(False):
        return nnx.Param(jnp.zeros((2, 2)), **metadata)


@pytest.mark.parametrize("value", [(), [], P()])
def test_an_empty_layout_says_replicated(
    value: Any, abstract_mesh: flm.DeviceMesh
) -> None:
    layout_map = flm.LayoutMap(abstract_mesh, unmatched="error")
    layout_map["ruled"] = ("data", None)
    tree = {"ruled": variable(layout=value)}
    leaf = layout_map.resolve(tree)["ruled"]
    assert leaf.layout.is_replicated and leaf.reason == "explicit layout"


def test_an_explicit_layout_on_another_mesh(mesh: flm.DeviceMesh) -> None:
    """Its axes on the mesh of the map, and a warning; also of a small leaf."""

    def make(own: Any) -> Any:
        layout = flm.TensorLayout((None, "model"), own)
        param = nnx.Param(jnp.zeros((8, 8)), layout=layout)
        return {"small": param, "large": nnx.Param(jnp.zeros((128, 128)))}

    layout_map = flm.LayoutMap(mesh)
    layout_map["large"] = None
    other = flm.DeviceMesh("model=8")
    with pytest.warns(flm.LayoutWarning) as caught:
        model = flm.create(lambda: make(other), layout_map)
        model = layout_map.place(model)
    [warning] = caught
    assert (
        "explicit layout: small (8,8): its layout is on DeviceMesh('model=8'), the "
        f"rules are on {mesh!r}, to which this leaf is moved: write layout.on(mesh) "
        "with the mesh of the rules, or a layout without a mesh" in str(warning.message)
    )
    assert flm.dtensor.fetch_layout(model["small"]) == flm.TensorLayout(
        (None, "model"), mesh
    )
    assert "its layout is on" in layout_map.resolve(model).explain("small")

    same = flm.DeviceMesh(mesh.shape, mesh.axis_names, axis_types="explicit")
    plan = flm.DeviceMesh.abstract(str(mesh))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for own in (None, mesh, same, plan):
            flm.create(lambda own=own: make(own), layout_map)
        flm.create(lambda: make(other), flm.LayoutMap(mesh, strict=False))

    lacking = flm.LayoutMap("data=8")
    text = (
        "the explicit layout (None, 'model') of another mesh, DeviceMesh('model=8'): "
        "the mesh 'data=8' has no axis 'model'"
    )
    with pytest.raises(flm.errors.ResolveError, match=re.escape(text)):
        flm.create(lambda: make(other), lacking)


def test_empty_names_are_metadata(abstract_mesh: flm.DeviceMesh) -> None:
    layout_map = flm.LayoutMap(abstract_mesh, strict=False)
    resolution = layout_map.resolve({"a": variable(out_sharding=()), "b": variable()})
    assert [leaf.reason for leaf in resolution] == ["flax metadata", "no rule"]
    assert resolution["a"].layout.is_replicated and resolution.unmatched == ("b",)


def test_other_things_may_be_called_layout() -> None:
    for value in ("NCHW", 3, None, object()):
        mark = mark_of(variable(layout=value))
        assert (mark.layout, mark.problem) == (None, None)


def test_nnx_rules_rename() -> None:
    mark = mark_of(
        variable(out_sharding=("a", "b"), sharding_rules=[("a", "data"), ["b", None]])
    )
    assert mesh_axes(mark) == ((("data",), ()), ())
    plain = mark_of(variable(out_sharding=("a", "model")))
    assert mesh_axes(plain) == ((("a",), ("model",)), ())
    with nnx.logical_axis_rules([("a", ("data", "model"))]):
        assert mesh_axes(plain)[0] == (("data", "model"), ("model",))
        assert mesh_axes(mark)[0] == (("data",), ())  # its own rules come first


def test_linen_boxes() -> None:
    box: Any = nn.Partitioned(jnp.zeros((2, 2)), names=("data", None))  # type: ignore[arg-type]
    mark = mark_of(box)
    assert (mark.kind, mark.names) == ("mesh", (("data",), ()))
    with nn.logical_axis_rules([("data", "model")]):
        assert mesh_axes(mark) == ((("data",), ()), ())  # a mesh axis already


def test_linen_rules_go_by_priority_and_axes_are_used_once() -> None:
    box: Any = nn.LogicallyPartitioned(jnp.zeros((2, 2)), names=("x", "y"))  # type: ignore[arg-type]
    mark = mark_of(box)
    assert mark.kind == "linen"
    assert mesh_axes(mark) == (((), ()), ("x", "y"))
    with nn.logical_axis_rules([("y", "data"), ("x", "data"), ("x", "model")]):
        assert mesh_axes(mark) == ((("model",), ("data",)), ())
    with nn.logical_axis_rules([("y", None)]):
        assert mesh_axes(mark) == (((), ()), ("x",))


def test_something_else_with_names() -> None:
    class Record:
        names = ("a", None)
        rules = (("a", "data"),)

    assert mesh_axes(mark_of(Record())) == ((("data",), ()), ())


def test_place_leaves_the_boxes_that_it_was_given() -> None:
    layout_map = flm.LayoutMap(flm.DeviceMesh((2, 4), ("data", "model")), strict=False)
    layout_map["kernel"] = (None, "model")
    boxed = {"kernel": nn.Partitioned(jnp.ones((4, 8)), names=("data", None))}
    placed = layout_map.place(boxed)
    assert placed["kernel"].names == (None, "model")
    assert tuple(placed["kernel"].value.sharding.spec) == (None, "model")
    assert boxed["kernel"].names == ("data", None)
