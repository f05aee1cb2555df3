"""Meshes over several slices: the place of each device, and errors."""

import dataclasses
from typing import Any

import jax
import pytest

import flax_layoutmap as flm
from flax_layoutmap._core.mesh_shape import hybrid_grid, one_slice_grid


@dataclasses.dataclass(frozen=True)
class Chip:
    """As much of a device as the order of a mesh asks for."""

    id: int
    process_index: int
    slice_index: int
    platform: str = "none"
    device_kind: str = "none"
    core_on_chip: int = 0

    @property
    def coords(self) -> tuple[int, int, int]:
        return (self.id, 0, 0)


def chips(slices: int, each: int, hosts: int = 2) -> list[Any]:
    return [
        Chip(s * each + at, s * hosts + at * hosts // each, s)
        for s in range(slices)
        for at in range(each)
    ]


@pytest.mark.parametrize(
    ("ici", "dcn", "shape"),
    [
        ({"fsdp": 4, "tensor": 2}, {"data": 3}, {"data": 3, "fsdp": 4, "tensor": 2}),
        ({"fsdp": -1}, "data=-1", {"data": 3, "fsdp": 8}),
        ("fsdp=8", {"fsdp": 3}, {"fsdp": 24}),  # over slices first
    ],
)
def test_slow_axes_are_over_slices(ici: Any, dcn: Any, shape: dict[str, int]) -> None:
    grid, names = hybrid_grid(ici, dcn, [*reversed(chips(3, 8))], False)
    assert dict(zip(names, grid.shape, strict=True)) == shape
    numbers = [chip.slice_index for chip in grid.flat]
    assert numbers == [0] * 8 + [1] * 8 + [2] * 8


def test_processes_where_there_are_no_slices() -> None:
    grid, _ = hybrid_grid("x=4", "y=2", chips(1, 8, hosts=2), False)
    assert [{chip.process_index for chip in row} for row in grid] == [{0}, {1}]
    own = flm.DeviceMesh.hybrid("fsdp=-1,tensor=2", "data=-1", axis_types="explicit")
    assert (str(own), own.size) == ("data=1,fsdp=4,tensor=2", 8)
    assert {kind.name for kind in own.axis_types} == {"Explicit"}
    some = flm.DeviceMesh.hybrid({"x": 4}, {"y": 1}, devices=jax.devices()[4:])
    assert [device.id for device in some.devices.flat] == [4, 5, 6, 7]


def test_one_slice_of_tpus_on_several_hosts_is_one() -> None:
    one = [dataclasses.replace(chip, platform="tpu") for chip in chips(1, 4)]
    grid, _ = hybrid_grid("x=4", "y=-1", one, False)
    assert grid.shape == (1, 4)


@pytest.mark.parametrize(
    ("ici", "dcn", "devices", "text"),
    [
        ("x=4", "y=4", chips(2, 4), "on 8 devices of 2 slices: Number of slices 2"),
        ("x=8", "y=2", chips(2, 4), "ici={'x': 8} and dcn={'y': 2} on 8 devices of 2"),
        ("x=4", "y=2", chips(2, 4)[:-1], "on 7 devices of 2 slices: Number of dev"),
        ("a=8", {"c": 2}, jax.devices, "on 8 devices of 1 processes: Number of slices"),
        ("a=-1,b=-1", "c=1", jax.devices, "only one axis may have size -1"),
        ("a=-1,b=3", "c=1", jax.devices, "8 devices are not divisible by"),
    ],
)
def test_sizes_that_do_not_fit(ici: Any, dcn: Any, devices: Any, text: str) -> None:
    devices = devices() if callable(devices) else devices
    with pytest.raises(flm.errors.MeshError) as caught:
        hybrid_grid(ici, dcn, devices, False)
    assert text in str(caught.value)


def test_several_slices_are_for_hybrid() -> None:
    text = "(?s)the mesh x=8: .* use.flm.DeviceMesh.hybrid for several slices"
    with pytest.raises(flm.errors.MeshError, match=text):
        one_slice_grid((8,), ("x",), chips(2, 4), False)
