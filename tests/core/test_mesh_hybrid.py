"""Meshes over several slices: the place of each device, and errors."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import mesh_utils

import flax_layoutmap as flm
from flax_layoutmap._core.mesh_shape import granules_of, hybrid_grid


@dataclasses.dataclass(frozen=True)
class Chip:
    """As much of a TPU device as the order of a mesh asks for."""

    id: int
    process_index: int
    slice_index: int
    platform: str = "none"
    device_kind: str = "none"


def chips(slices: int, each: int, hosts: int = 2) -> list[Any]:
    return [
        Chip(s * each + at, s * hosts + at * hosts // each, s)
        for s in range(slices)
        for at in range(each)
    ]


def test_slow_axes_are_over_slices() -> None:
    grid, names = hybrid_grid({"fsdp": 4, "tensor": 2}, {"data": 3}, chips(3, 8), False)
    assert names == ("data", "fsdp", "tensor") and grid.shape == (3, 4, 2)
    for number, part in enumerate(grid):
        assert {chip.slice_index for chip in part.flat} == {number}


def test_an_axis_of_both_is_over_slices_first() -> None:
    grid, names = hybrid_grid({"fsdp": 4}, {"fsdp": 2}, chips(2, 4), False)
    assert names == ("fsdp",)
    assert [chip.slice_index for chip in grid] == [0] * 4 + [1] * 4


def test_the_order_of_the_devices_does_not_matter() -> None:
    mixed = [*reversed(chips(2, 4))]
    grid, _ = hybrid_grid({"model": 4}, {"data": 2}, mixed, False)
    assert [{chip.slice_index for chip in row} for row in grid] == [{0}, {1}]


def test_processes_where_there_are_no_slices(mesh: flm.DeviceMesh) -> None:
    kind, found = granules_of(jax.devices())
    assert kind == "process" and list(found) == [0] and len(found[0]) == 8
    own = flm.DeviceMesh.hybrid("fsdp=-1,tensor=2", "data=-1")
    assert (str(own), own.size) == ("data=1,fsdp=4,tensor=2", 8)
    assert set(own.devices.flat) == set(jax.devices())
    some = flm.DeviceMesh.hybrid({"x": 4}, {"y": 1}, devices=jax.devices()[4:])
    assert [device.id for device in some.devices.flat] == [4, 5, 6, 7]
    kinds = flm.DeviceMesh.hybrid("a=8", "b=1", axis_types="explicit").axis_types
    assert {kind.name for kind in kinds} == {"Explicit"}


def test_several_slices_on_one_host_count_by_slice() -> None:
    kind, found = granules_of(chips(2, 4, hosts=1))
    assert kind == "slice" and [len(some) for some in found.values()] == [4, 4]


def test_one_slice() -> None:
    one = chips(1, 4)
    assert granules_of(one)[0] == "process", "not TPUs: the number says nothing"
    tpus = [dataclasses.replace(chip, platform="tpu") for chip in one]
    kind, found = granules_of(tpus)
    assert kind == "slice" and [len(some) for some in found.values()] == [4]


@pytest.mark.parametrize(
    ("ici", "dcn", "devices", "text"),
    [
        (
            {"model": 4},
            {"data": 4},
            chips(2, 4),
            "dcn={'data': 4} is for 4 slices, but there are 2: slice 0 has 4 devices "
            "(0 to 3) of 2 hosts (processes 0, 1); slice 1 has 4 devices (4 to 7) of 2 "
            "hosts (processes 2, 3)",
        ),
        (
            {"model": 8},
            {"data": 2},
            chips(2, 4),
            "ici={'model': 8} is for 8 devices in each slice, but there are 4: slice 0",
        ),
        (
            {"model": 4},
            {"data": 2},
            chips(2, 4)[:-1],
            "the slices have different numbers of devices, so they make no mesh",
        ),
    ],
)
def test_sizes_that_do_not_fit(ici: Any, dcn: Any, devices: Any, text: str) -> None:
    with pytest.raises(flm.errors.MeshError) as caught:
        hybrid_grid(ici, dcn, devices, False)
    assert text in str(caught.value)


def test_many_slices_are_not_all_listed() -> None:
    with pytest.raises(flm.errors.MeshError, match=r"(?m)… 12 more$"):
        hybrid_grid({"model": 4}, {"data": 2}, chips(20, 4), False)


def test_links_that_would_have_to_be_split(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*_: Any, **options: Any) -> np.ndarray:
        assert options["allow_split_physical_axes"] is False
        raise NotImplementedError("Failed to find assignment")

    monkeypatch.setattr(mesh_utils, "create_hybrid_device_mesh", cannot)
    with pytest.raises(
        flm.errors.MeshError, match="pass allow_split_physical_axes=True"
    ) as e:
        hybrid_grid({"model": 4}, {"data": 2}, chips(2, 4), False)
    assert isinstance(e.value.__cause__, NotImplementedError)


def test_sizes_as_a_user_writes_them() -> None:
    with pytest.raises(flm.errors.MeshError, match="only one axis may have size -1"):
        flm.DeviceMesh.hybrid("a=-1,b=-1", "c=1")
    with pytest.raises(flm.errors.MeshError, match="8 devices do not divide by"):
        flm.DeviceMesh.hybrid("a=-1,b=3", "c=1")
    with pytest.raises(
        flm.errors.MeshError, match="is for 2 processes, but there are 1"
    ):
        flm.DeviceMesh.hybrid("a=8", {"c": 2})
