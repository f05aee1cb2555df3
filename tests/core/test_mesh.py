"""DeviceMesh: from shapes, lines and meshes, with and without devices."""

import pickle
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh

import flax_layoutmap as flm
from flax_layoutmap._core.mesh import as_mesh

NAMES = ("data", "model")


def test_keras_constructor(mesh: flm.DeviceMesh) -> None:
    assert mesh.shape == mesh.devices.shape == (2, 4)
    assert (mesh.axis_names, mesh.axis_sizes) == (NAMES, {"data": 2, "model": 4})
    assert mesh.size == 8 and not mesh.is_abstract
    assert set(mesh.devices.flat) == set(jax.devices())
    assert mesh.jax_mesh is mesh.backend_mesh


@pytest.mark.parametrize(
    "given",
    [
        ("data=2,model=4",),
        ("data=2,model=-1",),
        (" data = 2 , model = 4 ",),
        ({"data": 2, "model": 4},),
        ({"data": -1, "model": np.int64(4)},),
        ((-1, 4), NAMES),
        ([2, -1], NAMES),
        ((np.int64(2), 4), NAMES),
        (np.array([2, 4]), NAMES),
    ],
    ids=str,
)
def test_ways_to_write_a_mesh(given: Any, mesh: flm.DeviceMesh) -> None:
    assert flm.DeviceMesh(*given) == mesh
    if len(given) == 1:
        assert as_mesh(*given) == mesh


def test_one_axis_and_abstract_meshes() -> None:
    planned = flm.DeviceMesh.abstract({"data": 2, "model": 4})
    assert planned == flm.DeviceMesh.abstract(np.array([2, 4]), NAMES)
    for size in (8, np.int64(8), np.array(8)):
        assert flm.DeviceMesh(size, ("data",)) == flm.DeviceMesh("data=8")


def test_existing_meshes_are_taken_as_they_are(mesh: flm.DeviceMesh) -> None:
    types = (AxisType.Explicit,) * 2
    explicit = Mesh(np.array(jax.devices()).reshape(4, 2), NAMES, axis_types=types)
    assert flm.DeviceMesh(explicit).jax_mesh is explicit
    assert flm.DeviceMesh(mesh) == mesh == as_mesh(mesh.jax_mesh)
    assert flm.DeviceMesh(AbstractMesh((4,), ("x",))).is_abstract
    both = AbstractMesh((2, 4), NAMES, axis_types=(AxisType.Auto, AxisType.Explicit))
    with pytest.raises(flm.errors.MeshError, match="make it with axes of one type"):
        flm.DeviceMesh(both)
    more: Any
    for more in ({"axis_names": NAMES}, {"devices": [1]}, {"axis_types": "explicit"}):
        with pytest.raises(flm.errors.MeshError, match="takes an existing mesh as it"):
            flm.DeviceMesh(mesh, **more)


def test_a_subset_of_the_devices_in_the_given_order() -> None:
    devices = jax.devices()[5:1:-1]
    mesh = flm.DeviceMesh((2, 2), NAMES, devices=devices)
    assert list(mesh.devices.flat) == devices
    as_array = np.array(devices).reshape(2, 2)
    assert flm.DeviceMesh("data=-1", devices=as_array).shape == (4,)


def test_axes_are_auto_unless_said_otherwise() -> None:
    assert flm.DeviceMesh((8,), ("x",)).axis_types == (AxisType.Auto,)
    explicit = flm.DeviceMesh((2, 4), NAMES, axis_types="explicit")
    assert explicit.axis_types == (AxisType.Explicit,) * 2
    assert repr(explicit) == "DeviceMesh('data=2,model=4', axis_types=explicit)"
    types = (AxisType.Explicit,) * 2
    assert flm.DeviceMesh((2, 4), NAMES, axis_types=types) == explicit


def test_equality_and_hash(mesh: flm.DeviceMesh, abstract_mesh: flm.DeviceMesh) -> None:
    assert mesh == flm.DeviceMesh((2, 4), NAMES)
    assert hash(mesh) == hash(flm.DeviceMesh((2, 4), NAMES))
    assert mesh not in [
        abstract_mesh,
        flm.DeviceMesh((4, 2), NAMES),
        flm.DeviceMesh((2, 4), ("data", "x")),
        flm.DeviceMesh((2, 4), NAMES, axis_types="explicit"),
        flm.DeviceMesh((2, 4), NAMES, devices=jax.devices()[::-1]),
        mesh.jax_mesh,
    ]


def test_immutable(mesh: flm.DeviceMesh) -> None:
    with pytest.raises(AttributeError, match="cannot assign to field '_mesh'"):
        mesh._mesh = None  # type: ignore[assignment]


def test_pickles_with_and_without_devices(
    mesh: flm.DeviceMesh, abstract_mesh: flm.DeviceMesh
) -> None:
    backwards = flm.DeviceMesh((2, 4), NAMES, devices=jax.devices()[::-1])
    manual = flm.DeviceMesh(AbstractMesh((2,), ("x",), axis_types=(AxisType.Manual,)))
    for made in (mesh, abstract_mesh, backwards, manual):
        again = pickle.loads(pickle.dumps(made))
        assert again == made and hash(again) == hash(made)
        assert again.axis_types == made.axis_types
        assert again.is_abstract == made.is_abstract
    again = pickle.loads(pickle.dumps(backwards))
    assert list(again.devices.flat) == jax.devices()[::-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((2, 4),), "needs a size and a name for each axis"),
        (((), ()), "needs a size and a name for each axis"),
        (((8,), NAMES), "needs a size and a name for each axis"),
        (((8,), "data"), "needs a size and a name for each axis"),
        (((2, 4), ("data", "")), "an axis name must be a non-empty string"),
        (((2, 4), ("data", 3)), "an axis name must be a non-empty string"),
        (((2, 4.0), NAMES), "size of axis 'model' must be an int of 1 or more, or -1"),
        (((True, 8), NAMES), "the size of axis 'data' must be an int"),
        (("data=2,model",), "cannot read the mesh line 'data=2,model'"),
        (("data=2,=4",), "an axis name must be a non-empty string"),
        (("data=two",), "cannot read the mesh line 'data=two'"),
        (("",), "cannot read the mesh line ''"),
        (({"data": 8}, ("data",)), "each axis, got shape={'data': 8} and"),
        ((np.array([2.0, 4.0]), NAMES), "must be an int of 1 or more, or -1, got 2.0"),
        (
            ((2,), ("x",), [0, 1]),
            "devices must be JAX devices, such as jax.devices()[:4], or na",
        ),
    ],
)
def test_bad_shapes(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(flm.errors.MeshError) as caught:
        flm.DeviceMesh(*arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "kinds", [None, 3, AxisType.Manual, ("auto", None), ("auto", "explicit"), ()]
)
def test_bad_axis_types(kinds: Any) -> None:
    with pytest.raises(flm.errors.MeshError) as caught:
        flm.DeviceMesh((2, 4), NAMES, axis_types=kinds)
    assert f"one type for all axes, got {kinds!r}" in str(caught.value)


@pytest.mark.parametrize("thing", [3, (2, 4), jax.sharding.PartitionSpec("data")])
def test_not_a_mesh(thing: Any, mesh: flm.DeviceMesh) -> None:
    assert as_mesh(None) is None and as_mesh(mesh) is mesh
    with pytest.raises(flm.errors.MeshError, match="not a mesh"):
        as_mesh(thing)
