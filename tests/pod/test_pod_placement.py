"""Meshes on TPU slices: places, hosts, memory, links, and errors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pods import MEGATRON, PARAMS, X, rules, sgd, struct
from pods import plan as plan_of

import flax_layoutmap as flm
from flax_layoutmap._core.topologies import topology
from flax_layoutmap.pod._mlir import Array
from flax_layoutmap.pod._placement import devices_of, placed, seconds_bound, tiled_bytes
from flax_layoutmap.pod._records import Kind
from flax_layoutmap.pod._report_text import axes_text


def on(line: str, name: str, slices: int = 1) -> Any:
    mesh = flm.DeviceMesh.abstract(line)
    return placed(mesh.axis_names, mesh.shape, topology(name, slices=slices))


def here(monkeypatch: pytest.MonkeyPatch, name: str, slices: int = 1) -> list[Any]:
    """Makes jax.devices() those of a topology."""
    found = devices_of(topology(name, slices=slices))
    monkeypatch.setattr(jax, "devices", lambda *_: found)
    return found


def hosts_of(mesh: flm.DeviceMesh) -> list[int]:
    return [device.process_index for device in mesh.devices.flat]


def warnings_on(mesh: str, **more: Any) -> tuple[str, ...]:
    """Those of a step that has no other warnings."""
    return flm.pod.plan(jnp.sin, X, mesh=mesh, layout_map=rules(None), **more).warnings


# --------------------------------------------------------------- stand-ins of devices


def test_devices_in_the_order_of_the_hosts() -> None:
    """Ids, hosts and places as libtpu 0.0.42 gives them for these topologies."""
    flat = devices_of(topology("v5e:4x4"))
    assert [chip.coords for chip in flat[:6]] == [
        *((0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)),
        *((2, 0, 0), (3, 0, 0)),
    ]
    assert [chip.process_index for chip in flat] == [
        host for host in range(4) for _ in range(4)
    ]
    cores = devices_of(topology("tpu7x:2x2x2"))
    assert [(chip.coords, chip.core_on_chip) for chip in cores[:3]] == [
        *(((0, 0, 0), 0), ((0, 0, 0), 1), ((1, 0, 0), 0))
    ]
    assert (cores[8].coords, cores[8].process_index) == ((0, 0, 1), 1)
    two = devices_of(topology("v5p:2x2x4", slices=2))
    assert (two[16].coords, two[16].process_index, two[16].slice_index) == (
        *((0, 0, 0), 4, 1),
    )


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("data=16,tensor=4", "v5p:4x4x4"),
        ("data=2,tensor=4", "v5e:2x4"),
        ("fsdp=8,tensor=2", "v5e:4x4"),
        ("fsdp=4,tensor=4", "tpu7x:2x2x2"),
        ("data=8,tensor=4", "v3:4x4"),
    ],
)
def test_as_jax_orders_them(
    line: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan, DeviceMesh and jax.make_mesh have one order."""
    devices = here(monkeypatch, name)
    mesh = flm.DeviceMesh(line)
    theirs = jax.make_mesh(
        mesh.shape, mesh.axis_names, devices=devices, axis_types=mesh.axis_types
    )
    assert [d.id for d in mesh.devices.flat] == [d.id for d in theirs.devices.flat]
    found = on(line, name)
    assert list(found.process_of) == hosts_of(mesh) and not found.trouble
    assert not warnings_on(line, topology=name)


def test_several_slices_as_hybrid_orders_them(monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, "v6e:4x4", 2)
    mesh = flm.DeviceMesh.hybrid(ici="fsdp=4,tensor=4", dcn="data=2")
    found = on("data=2,fsdp=4,tensor=4", "v6e:4x4", 2)
    assert list(found.process_of) == hosts_of(mesh)
    assert found.spans == ((), (1,), (0,))


def test_dims_that_an_axis_has_for_itself() -> None:
    assert on("fsdp=16,tensor=4", "v5p:4x4x4").spans == ((1, 2), (0,))
    assert on("fsdp=8,tensor=8", "v5p:4x4x4").spans == (None, None)
    assert on("fsdp=64,core=2", "tpu7x:4x4x4").spans == ((0, 1, 2), ())


# ---------------------------------------------------- meshes that cannot be as they are


def test_a_mesh_that_would_split_a_dim(monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, "v6e:16x16")
    with pytest.raises(flm.errors.MeshError) as caught:
        flm.DeviceMesh("fsdp=32,tensor=8")
    assert str(caught.value).startswith(
        "the mesh fsdp=32,tensor=8 does not fit the links of the slice without "
        "splitting one of its physical axes; choose sizes that do, or pass "
        "allow_split_physical_axes=True (some axes are slower then): Failed to find"
    )
    assert isinstance(caught.value.__cause__, NotImplementedError)
    mesh = flm.DeviceMesh("fsdp=32,tensor=8", allow_split_physical_axes=True)
    assert mesh.shape == (32, 8)
    assert list(on("fsdp=32,tensor=8", "v6e:16x16").process_of) == hosts_of(mesh)


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        (
            "data=2,fsdp=4,tensor=4",
            'flm.DeviceMesh.hybrid(ici={"fsdp": 4, "tensor": 4}, dcn={"data": 2})',
        ),
        ("fsdp=32", 'flm.DeviceMesh.hybrid(ici={"fsdp": 16}, dcn={"fsdp": 2})'),
        ("a=1,b=32", 'flm.DeviceMesh.hybrid(ici={"b": 16}, dcn={"a": 1, "b": 2})'),
    ],
)
def test_a_mesh_over_several_slices(
    line: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here(monkeypatch, "v6e:4x4", 2)
    with pytest.raises(flm.errors.MeshError) as caught:
        flm.DeviceMesh(line)
    said = "the devices are of 2 slices, and the mesh "
    assert str(caught.value).startswith(f"{said}{line} does not say which axes are")
    assert str(caught.value).endswith(f"write {advice}")
    assert str(eval(advice)) == line


def test_slices_that_no_axis_goes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, "v6e:4x4", 3)
    with pytest.raises(
        flm.errors.MeshError, match="put an axis of size 3 first, and use"
    ):
        flm.DeviceMesh("data=4,model=12")
    with pytest.raises(flm.errors.MeshError, match="put an axis of size 3 first"):
        warnings_on("data=4,model=12", topology="v5e:4x4", slices=3)


@pytest.mark.parametrize(
    ("mesh", "more", "call"),
    [
        (
            "fsdp=8,tensor=8",
            {"topology": "v5p:4x4x4"},
            'flm.DeviceMesh("fsdp=8,tensor=8", allow_split_physical_axes=True)',
        ),
        (
            "data=2,fsdp=32,tensor=8",
            {"topology": "v6e:16x16", "slices": 2},
            'flm.DeviceMesh.hybrid(ici={"fsdp": 32, "tensor": 8}, dcn={"data": 2}, '
            "allow_split_physical_axes=True)",
        ),
    ],
)
def test_a_plan_says_how_to_make_its_mesh(
    mesh: str, more: Any, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (warning,) = [text for text in warnings_on(mesh, **more) if "links" in text]
    assert "does not fit the links of" in warning and warning.endswith(call)
    here(monkeypatch, more["topology"], more.get("slices", 1))
    assert str(eval(call)) == mesh


@pytest.mark.skipif(
    jax.__version_info__ >= (0, 11),
    reason="JAX orders devices of 20 chips along a dim from 0.11 on.",
)
@pytest.mark.parametrize(("mesh", "slices"), [("a=10,b=32", 1), ("a=20,b=32", 2)])
def test_where_jax_cannot_split(
    mesh: str, slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to jax 0.10.2 JAX loses devices of 20 chips along a dim."""
    found = on(mesh, "v5p:4x4x20", slices)
    assert found.trouble.endswith(f'flm.DeviceMesh("{mesh}", devices=jax.devices())')
    devices = here(monkeypatch, "v5p:4x4x20", slices)
    assert list(found.process_of) == [chip.process_index for chip in devices]
    assert str(eval(found.trouble[found.trouble.index("flm.") :])) == mesh
    with pytest.raises(flm.errors.MeshError, match="JAX finds no order of the devices"):
        if slices == 1:
            flm.DeviceMesh(mesh, allow_split_physical_axes=True)
        flm.DeviceMesh.hybrid("a=10,b=32", "a=2", allow_split_physical_axes=True)


# ----------------------------------------------------------------- what a topology adds


def test_hosts_and_traffic_between_slices() -> None:
    found = flm.pod.plan(
        lambda params, x: {"w": params["w"] - 0.1 * jax.grad(loss)(params["w"], x)},
        {"w": struct(2048, 4096, dtype=jnp.bfloat16)},
        struct(65536, 2048, dtype=jnp.bfloat16),
        mesh={"data": -1, "fsdp": 16, "tensor": 16},
        layout_map=rules(("data", "fsdp"), w=("fsdp", "tensor")),
        topology="v6e:16x16",
        slices=2,
        donate_argnames="params",
    )
    assert found.mesh.axis_sizes == {"data": 2, "fsdp": 16, "tensor": 16}
    v6e = topology("v6e:16x16").generation
    assert found.memory.limit_bytes == v6e.hbm_limit_bytes
    assert found.fits is None
    crossing = {one.axes for one in found.collectives if one.over_dcn}
    assert ("data",) in crossing and ("fsdp",) not in crossing
    assert all("data" in axes for axes in crossing)
    assert set(found.seconds_bound) == {axes_text(c) for c in found.collectives}
    part = 2048 * 4096 * 2 // 256
    batch = 65536 * 2048 * 2 // 32
    assert len(found.hosts) == 128
    assert [host.slice_index for host in found.hosts] == [0] * 64 + [1] * 64
    # Two by two along the axes fsdp and tensor: four parts of w, two of the batch.
    assert {(h.holds_bytes, h.reads_bytes, h.data_bytes) for h in found.hosts} == {
        (4 * part, 4 * part, 2 * batch)
    }


def loss(w: Any, x: Any) -> Any:
    return ((x @ w) ** 2).mean()


def test_what_a_host_reads_where_its_chips_are() -> None:
    """A host of 2x2 chips has two places along each of these axes."""
    found = flm.pod.plan(
        lambda params, x: (x @ params["w"]).sum(),
        {"w": struct(64, 64)},
        struct(64, 64),
        mesh="data=16,tensor=4",
        layout_map=rules(w=(None, "tensor")),
        topology="v5p:4x4x4",
    )
    size = 64 * 64 * 4
    read = {(host.reads_bytes, host.data_bytes) for host in found.hosts}
    assert read == {(2 * size // 4, 2 * size // 16)}
    places = np.concatenate([host.devices for host in found.hosts])
    assert sorted(places) == list(range(64))


def test_what_is_at_rest_alone_may_be_too_much() -> None:
    found = flm.pod.plan(
        lambda params: {"w": params["w"] * 2},
        {"w": struct(1 << 20, 1 << 18)},
        mesh="data=16",
        layout_map=rules(w=("data", None)),
        topology="v5e:4x4",
        donate_argnames="params",
    )
    assert found.fits is False
    assert "short; it does not fit" in found.report()


def test_tiles_are_of_tpus_alone() -> None:
    def text(**more: Any) -> str:
        return plan_of(sgd, PARAMS, X, layout_map=rules(**MEGATRON), **more).report()

    assert "tiles of a TPU" not in text(platform="gpu")
    assert "tiles of a TPU add" in text(topology="v5e:2x4")
    for platform, added in (("tpu", 508), ("gpu", 0)):
        found = flm.pod.plan(
            jnp.sin, struct(), mesh="data=8", layout_map=rules(None), platform=platform
        )
        assert found.memory.padding_bytes == added


@pytest.mark.parametrize(
    ("shape", "element", "factor"),
    [
        ((3, 3, 64, 64), "f32", 2.0),
        ((7, 7, 3, 64), "bf16", 16 / 7),
        ((4096, 3), "f32", 4 / 3),
        ((4096, 14336), "bf16", 1.0),
        # A scalar takes 512 bytes.
        ((), "f32", 128),
    ],
)
def test_tiles_as_the_compiler_pads(
    shape: tuple[int, ...], element: str, factor: float
) -> None:
    """Argument bytes of libtpu 0.0.42 for arrays of these shapes, as measured."""
    value = Array(shape, element, ((),) * len(shape))
    assert tiled_bytes(value) / value.local_bytes == pytest.approx(factor, rel=1e-3)


# ------------------------------------------------------------------------- the links


def sends(kind: Kind, axis: str) -> flm.pod.Collective:
    size = 9 * 10**9
    return flm.pod.Collective(
        kind=kind,
        axes=(axis,),
        bytes=size,
        wire_bytes=size,
        executions=1,
        dtype="bfloat16",
        shape=(),
    )


@pytest.mark.parametrize(
    ("sizes", "bound"),
    [
        # Rings of 9e10 bytes/s each way: fsdp on two dims of the slice, tensor on one.
        ({"fsdp": 16, "tensor": 4}, {"fsdp": 0.1 / 4, "tensor": 0.1 / 2}),
        # Six links for what has no dims of its own.
        ({"fsdp": 8, "tensor": 8}, {"fsdp": 0.1 / 6, "tensor": 0.1 / 6}),
    ],
)
def test_least_time_on_the_links(
    sizes: dict[str, int], bound: dict[str, float]
) -> None:
    both = [sends("all-gather", "fsdp"), sends("all-reduce", "tensor")]
    assert seconds_bound(both, sizes, topology("v5p:4x4x4")) == pytest.approx(bound)
