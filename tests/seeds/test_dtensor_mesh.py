"""DeviceMesh as DTensor's `Mesh`: names, numbers, text and bytes."""

import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from multiprocess import launch
from vectors import Difference, Vector, check, differing, load, mesh_of, or_refused

import flax_layoutmap as flm
from flax_layoutmap._core.dtensor_format import (
    mesh_text,
    read_mesh_proto,
    read_mesh_text,
)
from flax_layoutmap._core.mesh_shape import key_of, long_name

CPUS = [f"CPU:{at}" for at in range(8)]
SIX = flm.DeviceMesh.from_dtensor(CPUS[:6], [("x", 3), ("y", 2)])

# ------------------------------------------------------ against TensorFlow's answers

MEMBERS: dict[str, Any] = {
    "dim_names": lambda mesh, _: mesh.dim_names,
    "shape": lambda mesh, _: mesh.shape,
    "size": lambda mesh, _: mesh.size,
    "strides": lambda mesh, _: mesh.strides,
    "coords": lambda mesh, v: [
        or_refused(lambda at=at: mesh.coords(at)) for at in range(len(v["coords"]))
    ],
    "unravel": lambda mesh, _: [list(at.values()) for at in places(mesh)],
    "contains": lambda mesh, _: [name for name in "abcxyz" if mesh.contains_dim(name)],
    "sizes": lambda mesh, _: [mesh.dim_size(name) for name in mesh.dim_names],
    "unknown_dim_size": lambda mesh, _: mesh.dim_size("unknown"),
}
WITH_DEVICES: dict[str, Any] = {
    "local_ids": lambda mesh, _: mesh.local_device_ids(),
    "locations": lambda mesh, _: [
        list(at.values()) for at in mesh.local_device_locations()
    ],
    "device_type": lambda mesh, _: mesh.device_type(),
}
DIFFERENT = {
    "coords": Difference(
        "the original starts again at 0 after the last device",
        where=lambda v: True,
        ours=lambda v: v["coords"][: v["size"]] + [None, None],
    ),
}


def places(mesh: flm.DeviceMesh) -> list[dict[str, int]]:
    found = mesh.unravel_index()
    assert list(found) == list(range(mesh.size))
    assert all(list(at) == mesh.dim_names for at in found.values())
    return list(found.values())


def test_members() -> None:
    vectors = load("meshes")
    assert len(vectors) == 26
    check(vectors, mesh_of, MEMBERS, DIFFERENT)


def test_members_that_speak_of_devices() -> None:
    vectors = [vector for vector in load("meshes") if vector["size"] <= 8]
    assert len(vectors) > 12
    check(vectors, mesh_of, WITH_DEVICES, {})


@pytest.mark.parametrize("vector", load("meshes"), ids=lambda v: str(v["dims"]))
def test_text_and_proto_of_every_size(vector: Vector) -> None:
    proto = read_mesh_text(vector["text"])
    assert proto.name == vector["name"]
    assert mesh_text(proto) == vector["text"]
    assert proto.SerializeToString().hex() == vector["proto"]
    assert read_mesh_proto(bytes.fromhex(vector["proto"])) == proto
    mesh = mesh_of(vector)
    assert flm.DeviceMesh.from_string(vector["text"]) == mesh
    assert flm.DeviceMesh.from_proto(bytes.fromhex(vector["proto"])) == mesh
    assert mesh.is_abstract == (vector["size"] > 8)
    if not mesh.is_abstract:
        proto.ClearField("name")  # ours have none
        assert mesh.as_proto() == proto and mesh.to_string() == mesh_text(proto)


TEXTS: dict[str, Any] = {
    "again": lambda _, v: mesh_text(read_mesh_text(v["text"])),
    "proto": lambda _, v: read_mesh_text(v["text"]).SerializeToString().hex(),
}


def test_texts_of_meshes() -> None:
    """As in TensorFlow, but for ids that are not its own, and devices that it forgets.

    Its constructor wants ids that go up by one, and its text does not ask; 2.21 forgets
    the devices of all processes where use_xla_spmd follows them.
    """
    vectors = [vector for vector in load("texts") if vector["kind"] == "mesh"]
    assert len(vectors) > 20
    answers = [*differing(vectors, TEXTS)]
    for vector, member, answer in answers:
        text = vector["text"]
        if "|1,0|" in text or "|0,7|" in text:
            assert answer is None
        else:
            assert text.count("|") == 6 and text.endswith("|use_xla_spmd")
            assert answer == text if member == "again" else answer.endswith("3801")
    assert len(answers) == 6


def test_devices_that_are_elsewhere_make_it_abstract() -> None:
    grids = set()
    for vector in load("texts"):
        if "TPU" in vector["text"] and or_refused(
            lambda: read_mesh_text(vector["text"])  # noqa: B023
        ):
            mesh = flm.DeviceMesh.from_string(vector["text"])
            assert mesh.is_abstract
            grids.add(str(mesh))
    assert grids == {"x=2", "x=2,y=2", "x=1,y=2"}
    here = flm.DeviceMesh.from_string("|x=3|*CPU")
    assert list(here.devices) == jax.devices()[:3]


# --------------------------------------------------------------- the page's own call


def test_the_constructor_of_the_page() -> None:
    devices = ["TPU:0", "TPU:1", "TPU:2", "TPU:3", "TPU:4", "TPU:5"]
    with pytest.warns(flm.LayoutWarning) as caught:
        mesh = flm.DeviceMesh.from_dtensor(devices, [("x", 3), ("y", 2)])
    assert mesh == flm.DeviceMesh.abstract("x=3,y=2")
    assert "the mesh is abstract: TPU:0, TPU:1, " in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = mesh.to_string()  # of another job, or of none: nothing to warn of
        assert flm.DeviceMesh.from_string(text) == mesh
    assert SIX.shape == (3, 2)
    assert list(SIX.devices.flat) == jax.devices()[:6]
    assert SIX == flm.DeviceMesh((3, 2), ("x", "y"), devices=jax.devices()[:6])
    assert flm.DeviceMesh.from_dtensor(jax.devices()[:6], {"x": 3, "y": -1}) == SIX


def test_the_constructor_keeps_the_order() -> None:
    mesh = flm.DeviceMesh.from_dtensor(["cpu:5", "cpu:2"], [("x", 2)])
    assert [device.id for device in mesh.devices.flat] == [5, 2]
    again = flm.DeviceMesh.from_string(mesh.to_string())
    assert again == mesh
    assert mesh.local_device_ids() == [0, 1]  # Places, not JAX's ids.
    assert [name[-5:] for name in mesh.local_devices()] == ["CPU:5", "CPU:2"]


def test_axes_that_are_read_are_auto() -> None:
    mesh = flm.DeviceMesh("x=8", axis_types="explicit")
    again = flm.DeviceMesh.from_string(mesh.to_string())
    assert again == flm.DeviceMesh("x=8") == flm.DeviceMesh.from_proto(mesh.as_proto())


@pytest.mark.parametrize(
    ("devices", "dims", "message"),
    [
        (CPUS[:5], [("x", 3), ("y", 2)], "needs 6 devices, but there are 5"),
        (["CPU:0", "CPU:0"], [("x", 2)], "holds one device twice"),
        (["TPU:0", "/device:TPU:0"], [("x", 2)], "holds one device twice"),
        (["CPU"], [("x", 1)], "cannot read the device 'CPU'"),
        (CPUS, [("x", 2), ("x", 4)], "axis names must differ"),
        ([0, 1], [("x", 2)], "devices must be JAX devices, such as"),
        (CPUS, [], "needs a size and a name for each axis"),
        ([], [("x", 1)], "needs 1 devices, but there are 0"),
    ],
)
def test_wrong_devices(devices: list[Any], dims: Any, message: str) -> None:
    with pytest.raises(flm.errors.MeshError) as caught:
        flm.DeviceMesh.from_dtensor(devices, dims)
    assert message in str(caught.value)


# ---------------------------------------------------------------------------- devices


@pytest.mark.parametrize(
    "name", ["cpu:3", "CPU:3", "/device:CPU:3", "/job:worker/replica:0/task:1/cpu:3"]
)
def test_names_of_devices(name: str) -> None:
    device = jax.devices()[3]
    assert key_of(name) == key_of(long_name(device)) == key_of(device) == ("cpu", 3)


def test_devices_by_name_as_in_keras() -> None:
    mesh = flm.DeviceMesh(
        (2, 2), ("data", "model"), ["cpu:4", "cpu:1", "cpu:0", "cpu:7"]
    )
    assert [device.id for device in mesh.devices.flat] == [4, 1, 0, 7]
    mixed = flm.DeviceMesh((2,), ("x",), devices=["cpu:1", jax.devices()[0]])
    assert [device.id for device in mixed.devices.flat] == [1, 0]
    with pytest.raises(
        flm.errors.MeshError, match="no devices cpu:8, gpu:0; this job has cpu:0"
    ):
        flm.DeviceMesh((3,), ("x",), devices=["cpu:8", "cpu:0", "gpu:0"])
    with pytest.raises(flm.errors.MeshError, match="holds one device twice"):
        flm.DeviceMesh((2,), ("x",), devices=["cpu:1", "cpu:1"])


def test_members_of_an_abstract_mesh() -> None:
    mesh = flm.DeviceMesh.abstract("x=3,y=2")
    assert mesh.local_devices() == mesh.local_device_locations() == []
    assert (mesh.num_local_devices(), SIX.num_local_devices()) == (0, 6)
    assert flm.DeviceMesh.from_string(mesh.to_string()) == mesh
    assert flm.DeviceMesh.from_proto(mesh.as_proto()) == mesh
    with pytest.raises(flm.errors.MeshError, match="has no devices"):
        mesh.device_type()


# ------------------------------------------------------------------------- processes


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "job_part",
    ["written-2", pytest.param("written-4", marks=pytest.mark.slow)],
    indirect=True,
)
def test_several_processes(job_part: launch.Part) -> None:
    answers = [one.answer for one in job_part.ended]
    first = answers[0]
    assert sum((answer["ids"] for answer in answers), []) == list(range(8))
    places = sum((answer["places"] for answer in answers), [])
    grid = [{"data": at // 4, "model": at % 4} for at in range(8)]
    assert places == grid
    listed: list[str] = []
    for answer in answers:
        assert answer["again"] == [True] * 4
        _, dims, ids, local_ids, local, every = answer["text"].split("|")
        assert (dims, ids) == ("data=2,model=4", "0,1,2,3,4,5,6,7")
        assert local_ids == ",".join(map(str, answer["ids"]))
        listed = every.split(",")
        assert [listed[at] for at in answer["ids"]] == local.split(",")
        proto = read_mesh_proto(bytes.fromhex(answer["bytes"]))
        assert proto == read_mesh_text(answer["text"])
    assert "task:0/" in listed[0] and f"task:{job_part.processes - 1}/" in listed[7]
    # Each says what is its own.
    assert len({answer["text"] for answer in answers}) == job_part.processes
    assert all(answer["pickle"] == first["pickle"] for answer in answers)
    assert all(answer["offsets"] == first["offsets"] for answer in answers)
    # The devices of the other processes have ids that this process has not.
    assert flm.DeviceMesh.from_string(first["text"]) == flm.DeviceMesh.abstract(
        "data=2,model=4"
    )
    with pytest.raises(flm.errors.MeshError, match="there are no devices cpu:"):
        pickle.loads(bytes.fromhex(first["pickle"]))


# ------------------------------------------------------------------ text and protos


def test_names_that_text_cannot_hold() -> None:
    for name in ("a|b", "a,b", "a=b", "a b"):
        mesh = flm.DeviceMesh.abstract((2,), (name,))
        with pytest.raises(flm.errors.MeshError, match="cannot hold the name"):
            mesh.to_string()
        assert flm.DeviceMesh.from_proto(mesh.as_proto()) == mesh


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("", "x=2", "|x=2|0,1", "|x|0,1|0|cpu:0", "|x=2|0,b||"), "it must be name|x"),
        (("|x=2|0,1|0,1|cpu:0", "|x=2|0,1|0,0|cpu:0,cpu:1"), "a device for each local"),
        (("|x=2|0,1|||cpu:0",), "a global device for each place, or none"),
        (("|x=2|0,2||", "|x=0|||"), "consecutive device ids, one for each place"),
        (("|x=2,x=1|0,1||",), "axis names must differ"),
        (("||0||",), "needs a size and a name for each axis"),
        (("|x=1|0|0|CPU",), "cannot read the device 'CPU'"),
        (("|x=2|0,1|0,1|cpu:0,cpu:0",), "holds one device twice"),
    ],
)
def test_damaged_text(texts: tuple[str, ...], message: str) -> None:
    for text in texts:
        with pytest.raises(flm.errors.MeshError) as caught:
            flm.DeviceMesh.from_string(text)
        assert message in str(caught.value)


def test_damaged_protos() -> None:
    written = SIX.as_proto().SerializeToString()
    read = []
    for end in range(len(written)):
        try:
            read.append(flm.DeviceMesh.from_proto(written[:end]))
        except flm.errors.MeshError:
            pass
    # All that is lost there is the devices; these are the bytes of an abstract mesh.
    assert read == [flm.DeviceMesh.abstract("x=3,y=2")]
    layout = flm.TensorLayout(("x",), SIX)
    for wrong in (b"\xff\xff", "|x=2|0,1||", None, layout, layout.as_proto()):
        with pytest.raises(flm.errors.MeshError, match="MeshProto"):
            flm.DeviceMesh.from_proto(wrong)


MEMBERS_OF_DTENSOR = """
    as_proto contains_dim coords device_type dim_names dim_size from_proto from_string
    global_device_ids local_device_ids local_device_locations local_devices
    num_local_devices shape size strides to_string unravel_index
"""
NOT_HERE = """
    from_device host_mesh is_remote is_single_device min_global_device_id name
    single_device use_xla_spmd
"""
MEMBERS_OF_OURS = """
    abstract axis_names axis_sizes axis_types backend_mesh devices hybrid from_dtensor
    is_abstract jax_mesh
"""


def test_golden_list_of_members() -> None:
    public = {name for name in dir(flm.DeviceMesh) if not name.startswith("_")}
    assert not public & {*NOT_HERE.split()}
    assert public == {*MEMBERS_OF_DTENSOR.split(), *MEMBERS_OF_OURS.split()}


def test_every_name_is_in_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text()
    table = text[text.index("| DTensor | here |") :]
    names = [*MEMBERS_OF_DTENSOR.split(), *NOT_HERE.split()]
    assert [n for n in names if not re.search(rf"`(Mesh)?\.{n}\b", table)] == []


@pytest.mark.parametrize("wrong", [-1, 6, 7, 1.5, 1.0, "a", "1", None], ids=str)
def test_device_ids_are_whole_numbers_of_the_mesh(wrong: Any) -> None:
    assert SIX.coords(np.int64(3)) == SIX.coords(3) == (1, 1)  # pyright: ignore
    text = f"the device ids 0 to 5, got {wrong!r}"
    with pytest.raises(flm.errors.MeshError, match=text):
        SIX.coords(wrong)
