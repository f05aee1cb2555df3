"""TensorLayout: axes, specs in normal form, shard shapes, checks."""

from typing import Any

import pytest
from jax.sharding import NamedSharding, PartitionSpec

import flax_layoutmap as flm
from flax_layoutmap._core.axes import normal_spec

P = PartitionSpec


@pytest.mark.parametrize(
    ("axes", "shape", "spec"),
    [
        (("data", "model"), (4, 8), P("data", "model")),
        (["data", None], (4, 8), P("data")),
        ((None, "model"), (4, 8), P(None, "model")),
        ((("data", "model"), None), (16, 3), P(("data", "model"))),
        ((["model", "data"],), (16,), P(("model", "data"))),
        ((..., "model"), (3, 5, 8), P(None, None, "model")),
        (("data", ...), (4,), P("data")),
        (("data", ..., "model"), (4, 3, 3, 8), P("data", None, None, "model")),
        ((), (4, 8), P()),
        (None, (4, 8), P()),
        (P("data"), (4, 8), P("data")),
        (P("data", None), (4, 8, 2), P("data")),
        (P(), (), P()),
        (("data", None), (0, 3), P("data")),
    ],
)
def test_axes_and_their_spec(
    axes: Any, shape: tuple[int, ...], spec: PartitionSpec, mesh: flm.DeviceMesh
) -> None:
    layout = flm.TensorLayout(axes, mesh)
    assert layout.spec(len(shape)) == spec
    sharding = layout.sharding(len(shape))
    assert sharding == NamedSharding(mesh.jax_mesh, spec)
    assert layout.shard_shape(shape) == sharding.shard_shape(shape)


def test_one_normal_form_makes_equal_layouts_equal(mesh: flm.DeviceMesh) -> None:
    same = [("data", None), [("data",), ()], ("data", []), (["data"], None)]
    layouts = {flm.TensorLayout(axes, mesh) for axes in same}
    assert len(layouts) == 1
    assert layouts.pop().spec() == P("data")
    assert normal_spec([("data",), (), ()]) == P("data")
    assert flm.TensorLayout(P("data", None), mesh) != flm.TensorLayout(P("data"), mesh)
    assert flm.TensorLayout(P(None, None)) == flm.TensorLayout(())


def test_equivalent_across_abstract_and_concrete(
    mesh: flm.DeviceMesh, abstract_mesh: flm.DeviceMesh
) -> None:
    layout = flm.TensorLayout(("data", None), mesh)
    assert layout != layout.on(abstract_mesh)
    assert layout.equivalent(layout.on(abstract_mesh), 2)
    assert layout.equivalent(flm.TensorLayout(P("data"), mesh), 2)
    assert not layout.equivalent(flm.TensorLayout((None, "data"), mesh), 2)
    assert not layout.equivalent(flm.TensorLayout(("data", None)), 2)
    other = flm.DeviceMesh.abstract("data=4,model=2")
    assert not layout.equivalent(layout.on(other), 2)
    pinned = flm.TensorLayout(("data", None), mesh, memory_kind="pinned_host")
    assert not layout.equivalent(pinned, 2)


def test_from_a_named_sharding(mesh: flm.DeviceMesh) -> None:
    sharding = NamedSharding(mesh.jax_mesh, P("data"), memory_kind="pinned_host")
    layout = flm.TensorLayout(sharding)
    assert layout.device_mesh == mesh
    assert layout.memory_kind == "pinned_host"
    assert layout.sharding(2) == sharding
    elsewhere = flm.TensorLayout(sharding, flm.DeviceMesh.abstract("data=8"))
    assert elsewhere.device_mesh == flm.DeviceMesh.abstract("data=8")


def test_on_another_mesh(mesh: flm.DeviceMesh, abstract_mesh: flm.DeviceMesh) -> None:
    layout = flm.TensorLayout(("data", "model"), abstract_mesh, memory_kind="device")
    moved = flm.TensorLayout(("data", "model"), mesh, memory_kind="device")
    assert layout.on(mesh) == moved and layout.on(abstract_mesh) is layout
    # Axes without a mesh are checked when it comes.
    for bare in (layout, layout.on(None), flm.TensorLayout(("model",))):
        with pytest.raises(flm.errors.RuleError, match="has no such axis"):
            bare.on("x=8")


def test_repr_can_be_read_back(abstract_mesh: flm.DeviceMesh) -> None:
    layout = flm.TensorLayout((..., ("data", "model"), None))
    assert repr(layout) == "TensorLayout((..., ('data', 'model'), None))"
    assert eval(repr(layout), {"TensorLayout": flm.TensorLayout}) == layout
    assert repr(flm.TensorLayout(None)) == "TensorLayout(())"
    assert repr(flm.TensorLayout(("data",), abstract_mesh, memory_kind="device")) == (
        "TensorLayout(('data',), DeviceMesh('data=2,model=4', abstract), "
        "memory_kind='device')"
    )


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"data": 0}, "not a layout"),
        ((1, "data"), "not a layout"),
        ((("data", None),), "not a layout"),
        (P(..., "data"), "may hold one '...'"),
        ((("data", "data"),), "uses the mesh axis 'data' twice"),
        (("data", ("model", "data")), "uses the mesh axis 'data' twice"),
    ],
)
def test_bad_axes(axes: Any, message: str, mesh: flm.DeviceMesh) -> None:
    with pytest.raises(flm.errors.RuleError) as caught:
        flm.TensorLayout(axes, mesh)
    assert message in str(caught.value)


def test_a_tuple_names_every_dim(mesh: flm.DeviceMesh) -> None:
    layout = flm.TensorLayout(("data", "model"), mesh)
    for shape in ((4,), (4, 8, 2), ()):
        with pytest.raises(
            flm.LayoutError, match=f"2 dims, the array has {len(shape)}"
        ):
            layout.shard_shape(shape)


def test_an_ellipsis_before_a_sharded_dim_needs_the_rank() -> None:
    with pytest.raises(flm.LayoutError, match=r"pass the rank, .spec\(ndim\)"):
        flm.TensorLayout((..., "data")).spec()
    assert flm.TensorLayout(("data", ..., None)).spec() == P("data")
    assert flm.TensorLayout(("data", ...)).spec() == P("data")


def test_indivisible(mesh: flm.DeviceMesh) -> None:
    with pytest.raises(flm.LayoutError) as caught:
        flm.TensorLayout((None, "model"), mesh).shard_shape((4, 10))
    assert str(caught.value) == (
        "shape (4, 10): dim 1 of size 10 is not divisible by mesh axis 'model' of "
        "size 4"
    )
    with pytest.raises(flm.LayoutError, match=r"'data' \(2\) × 'model' \(4\), 8 tog"):
        flm.TensorLayout((("data", "model"),), mesh).shard_shape((12,))


@pytest.mark.parametrize("axes", [None, (), [], (...,), (..., None)], ids=str)
def test_what_says_replicated(axes: Any, abstract_mesh: flm.DeviceMesh) -> None:
    """All are one layout, of any rank; `(None, None)` is for two dims."""
    layout = flm.TensorLayout(axes, abstract_mesh)
    assert layout == flm.TensorLayout(None, abstract_mesh)
    assert str(layout) == "replicated"
    assert layout.is_replicated and layout.rank is None
    for shape in ((), (3,), (3, 5)):
        assert layout.shard_shape(shape) == shape
    two = flm.TensorLayout((None, None), abstract_mesh)
    assert two.is_replicated and two.rank == 2
    with pytest.raises(flm.LayoutError, match="has 2 dims, the array has 1"):
        two.shard_shape((3,))
