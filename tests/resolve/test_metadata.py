"""Layout metadata of Variables and Linen boxes."""

import re
import warnings
from typing import Any

import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from flax.linen import spmd
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import flax_layoutmap as flm

P = PartitionSpec


def variable(**metadata: Any) -> nnx.Variable[Any]:
    with nnx.use_eager_sharding(False):
        return nnx.Param(jnp.zeros((8, 8)), **metadata)


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

    layout_map, other = flm.LayoutMap(mesh), flm.DeviceMesh("model=8")
    layout_map["large"] = None
    with pytest.warns(flm.LayoutWarning) as caught:
        model = layout_map.place(flm.create(lambda: make(other), layout_map))
    [warning] = caught
    text = (
        "explicit layout: small (8,8): its layout is on DeviceMesh('model=8'), the "
        f"rules are on {mesh!r}, to which this leaf is moved: write layout.on(mesh) "
        "with the mesh of the rules, or a layout without a mesh"
    )
    assert text in str(warning.message)
    wanted = flm.TensorLayout((None, "model"), mesh)
    assert flm.dtensor.fetch_layout(model["small"]) == wanted
    same = flm.DeviceMesh(mesh.shape, mesh.axis_names, axis_types="explicit")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for own in (None, mesh, same, flm.DeviceMesh.abstract(str(mesh))):
            flm.create(lambda own=own: make(own), layout_map)
    text = (
        "the explicit layout (None, 'model') of another mesh, DeviceMesh('model=8'): "
        "the mesh 'data=8' has no axis 'model'"
    )
    with pytest.raises(flm.errors.ResolveError, match=re.escape(text)):
        flm.resolve(make(other), flm.LayoutMap("data=8"))


def test_empty_names_are_metadata(abstract_mesh: flm.DeviceMesh) -> None:
    layout_map = flm.LayoutMap(abstract_mesh, strict=False)
    resolution = layout_map.resolve({"a": variable(out_sharding=()), "b": variable()})
    assert [leaf.reason for leaf in resolution] == ["flax metadata", "no rule"]
    assert resolution["a"].layout.is_replicated and resolution.unmatched == ("b",)


def test_other_things_may_be_called_layout(abstract_mesh: flm.DeviceMesh) -> None:
    tree = {str(x): variable(layout=x) for x in ("NCHW", 3, None, object())}
    resolution = flm.LayoutMap(abstract_mesh, strict=False).resolve(tree)
    assert len(resolution.unmatched) == len(tree)


NAMES = st.permutations([None, "x", "y", "data", "model"]).map(lambda x: x[:2])
RULES = st.lists(
    st.tuples(st.sampled_from(["x", "y"]), st.sampled_from([None, "data", "model"])),
    max_size=3,
)


@given(NAMES, RULES, st.sampled_from(["context", "box"]))
@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_names_become_the_axes_that_flax_gives(
    kind: str, names: list[str | None], rules: Any, where: str
) -> None:
    """Of those on the mesh; Linen's rules go by priority, and use an axis once."""
    mesh = flm.DeviceMesh.abstract((2, 4), ("data", "model"))
    box: Any = {}
    if kind == "nnx":
        box = {"sharding_rules": rules} if where == "box" else {}
        leaf: Any = variable(out_sharding=tuple(names), **box)
    else:
        box = rules if where == "box" else None
        leaf = nn.LogicallyPartitioned(jnp.zeros((8, 8)), tuple(names), rules=box)
    with nn.logical_axis_rules(rules if where == "context" else []):
        if kind == "nnx":
            renamed = dict(rules)  # the last rule counts
            spec = [renamed.get(name, name) for name in names]
        else:
            spec = list(spmd.logical_to_mesh(P(*names), rules))
        kept = [axis if axis in mesh.axis_names else None for axis in spec]
        assume(len(set(kept) - {None}) == len([axis for axis in kept if axis]))
        resolution = flm.LayoutMap(mesh).resolve({"w": leaf})
    assert resolution["w"].layout == flm.TensorLayout(
        tuple(kept) if any(kept) else (), mesh
    )
    assert resolution["w"].reason == "flax metadata"


def test_linen_boxes_without_rules_name_mesh_axes(
    abstract_mesh: flm.DeviceMesh,
) -> None:
    box = nn.Partitioned(jnp.zeros((8, 8)), names=("data", None))  # type: ignore[arg-type]
    with nn.logical_axis_rules([("data", "model")]):
        leaf = flm.LayoutMap(abstract_mesh).resolve({"w": box})["w"]
    assert leaf.layout.axes == ("data", None)


def test_place_leaves_the_boxes_that_it_was_given() -> None:
    layout_map = flm.LayoutMap(flm.DeviceMesh((2, 4), ("data", "model")), strict=False)
    layout_map["kernel"] = (None, "model")
    boxed = {"kernel": nn.Partitioned(jnp.ones((4, 8)), names=("data", None))}
    placed = layout_map.place(boxed)
    assert placed["kernel"].names == (None, "model")
    assert tuple(placed["kernel"].value.sharding.spec) == (None, "model")
    assert boxed["kernel"].names == ("data", None)
