"""Meshes on TPU slices: where their places are, and what cannot be made as it is."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flax_layoutmap as flm
from flax_layoutmap._topologies import topology
from flax_layoutmap.pod._links import seconds_bound
from flax_layoutmap.pod._placed import devices_of, placed

CROSSING = {"topology": "v5e:2x2", "slices": 2}


def on(line: str, name: str, slices: int = 1) -> Any:
    mesh = flm.DeviceMesh.abstract(line)
    return placed(mesh.axis_names, mesh.shape, topology(name, slices=slices))


def here(monkeypatch: pytest.MonkeyPatch, name: str, slices: int = 1) -> list[Any]:
    """Makes jax.devices() those of a topology."""
    found = devices_of(topology(name, slices=slices))
    monkeypatch.setattr(jax, "devices", lambda *_: found)
    return found


def plan(mesh: str, **more: Any) -> flm.pod.PodReport:
    """A step with one matrix of 1 MiB, its batch over all axes."""
    names = tuple(part.partition("=")[0] for part in mesh.split(","))
    layout_map = flm.LayoutMap(batch=names)
    layout_map["w"] = None

    def step(params: Any, x: Any) -> Any:
        gradient = jax.grad(lambda params: ((x @ params["w"]) ** 2).sum())(params)
        return jax.tree.map(lambda a, b: a - b, params, gradient)

    params = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
    x = jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    more = {"layout_map": layout_map, "donate_argnames": "params", **more}
    return flm.pod.plan(step, params, x, mesh=mesh, **more)


# --------------------------------------------------------------- stand-ins of devices


def test_devices_in_the_order_of_the_hosts() -> None:
    """Ids, hosts and places as libtpu 0.0.42 gives them for these topologies."""
    flat = devices_of(topology("v5e:4x4"))
    assert [chip.coords for chip in flat[:6]] == [
        *((0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)),
        *((2, 0, 0), (3, 0, 0)),
    ]
    assert [chip.process_index for chip in flat] == [
        h for h in range(4) for _ in "4444"
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
    hosts = [device.process_index for device in mesh.devices.flat]
    assert list(on(line, name).process_of) == hosts and not on(line, name).trouble


def test_several_slices_as_hybrid_orders_them(monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, "v6e:4x4", 2)
    mesh = flm.DeviceMesh.hybrid(ici="fsdp=4,tensor=4", dcn="data=2")
    hosts = [device.process_index for device in mesh.devices.flat]
    found = on("data=2,fsdp=4,tensor=4", "v6e:4x4", 2)
    assert list(found.process_of) == hosts and found.spans == ((), (1,), (0,))


def test_dims_that_an_axis_has_for_itself() -> None:
    assert on("fsdp=16,tensor=4", "v5p:4x4x4").spans == ((1, 2), (0,))
    assert on("fsdp=8,tensor=8", "v5p:4x4x4").spans == (None, None)
    assert on("fsdp=64,core=2", "tpu7x:4x4x4").spans == ((0, 1, 2), ())


# ---------------------------------------------------- meshes that cannot be as they are


def test_a_mesh_that_would_split_a_dim(monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, "v6e:16x16")
    with pytest.raises(flm.MeshError) as caught:
        flm.DeviceMesh("fsdp=32,tensor=8")
    assert str(caught.value).startswith(
        "the mesh fsdp=32,tensor=8 does not fit the links of the slice without "
        "splitting one of its physical axes; choose sizes that do, or pass "
        "allow_split_physical_axes=True (some axes are slower then): Failed to find"
    )
    assert isinstance(caught.value.__cause__, NotImplementedError)
    mesh = flm.DeviceMesh("fsdp=32,tensor=8", allow_split_physical_axes=True)
    assert mesh.shape == (32, 8)
    hosts = [device.process_index for device in mesh.devices.flat]
    assert list(on("fsdp=32,tensor=8", "v6e:16x16").process_of) == hosts


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        (
            "data=2,fsdp=4,tensor=4",
            'write flm.DeviceMesh.hybrid(ici={"fsdp": 4, "tensor": 4}, '
            'dcn={"data": 2})',
        ),
        ("fsdp=32", 'write flm.DeviceMesh.hybrid(ici={"fsdp": 16}, dcn={"fsdp": 2})'),
        ("a=1,b=32", 'hybrid(ici={"b": 16}, dcn={"a": 1, "b": 2})'),
    ],
)
def test_a_mesh_over_several_slices(
    line: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here(monkeypatch, "v6e:4x4", 2)
    with pytest.raises(flm.MeshError) as caught:
        flm.DeviceMesh(line)
    said = "the devices are of 2 slices, and the mesh "
    assert str(caught.value).startswith(f"{said}{line} does not say which axes are")
    assert str(caught.value).endswith(advice)
    made = eval(
        advice[advice.index("flm") :] if "flm" in advice else f"flm.DeviceMesh.{advice}"
    )
    assert str(made) == line


def test_slices_that_no_axis_goes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, "v6e:4x4", 3)
    with pytest.raises(flm.MeshError, match="put an axis of size 3 first, and use"):
        flm.DeviceMesh("data=4,model=12")


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
    (warning,) = plan(mesh, **more).warnings
    assert "does not fit the links of" in warning and warning.endswith(call)
    here(monkeypatch, more["topology"], more.get("slices", 1))
    assert str(eval(call)) == mesh


@pytest.mark.parametrize(("mesh", "slices"), [("a=10,b=32", 1), ("a=20,b=32", 2)])
def test_where_jax_cannot_split(
    mesh: str, slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX loses devices of 20 chips along a dim, in 0.8.1 and in 0.10.2."""
    found = on(mesh, "v5p:4x4x20", slices)
    assert found.trouble.endswith(f'flm.DeviceMesh("{mesh}", devices=jax.devices())')
    devices = here(monkeypatch, "v5p:4x4x20", slices)
    assert list(found.process_of) == [chip.process_index for chip in devices]
    assert str(eval(found.trouble[found.trouble.index("flm.") :])) == mesh
    with pytest.raises(flm.MeshError, match="JAX finds no order of the devices"):
        if slices == 1:
            flm.DeviceMesh(mesh, allow_split_physical_axes=True)
        flm.DeviceMesh.hybrid("a=10,b=32", "a=2", allow_split_physical_axes=True)


def test_a_plan_of_a_mesh_that_fits_says_nothing() -> None:
    assert not plan("fsdp=16,tensor=4", topology="v5p:4x4x4").warnings
    # jax.make_mesh splits those of v5e unasked.
    assert not plan("fsdp=8,tensor=2", topology="v5e:4x4").warnings


def test_a_plan_refuses_a_mesh_that_lies_over_no_slices() -> None:
    with pytest.raises(flm.MeshError, match="put an axis of size 3 first"):
        plan("data=4,model=12", topology="v5e:4x4", slices=3)


def test_tpus_and_another_platform() -> None:
    with pytest.raises(flm.MeshError) as caught:
        plan("data=8", topology="v5e:2x4", platform="gpu")
    assert str(caught.value) == (
        "v5e:2x4 is of TPUs, and platform='cuda' is not: leave out the topology, or "
        'take platform="tpu"'
    )


@pytest.mark.parametrize(("platform", "added"), [("tpu", 508), ("gpu", 0)])
def test_only_tpus_have_tiles(platform: str, added: int) -> None:
    x = jax.ShapeDtypeStruct((), jnp.float32)
    rules = flm.LayoutMap(batch=None)
    found = flm.pod.plan(jnp.sin, x, mesh="data=8", layout_map=rules, platform=platform)
    assert found.memory.padding_bytes == added


# ----------------------------------------------------------------- hosts and the links


def test_what_a_host_reads_where_its_chips_are() -> None:
    """A host of 2x2 chips has two places along each of these axes."""
    layout_map = flm.LayoutMap(batch="data")
    layout_map["w"] = (None, "tensor")
    found = flm.pod.plan(
        lambda params, x: (x @ params["w"]).sum(),
        {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)},
        jax.ShapeDtypeStruct((64, 64), jnp.float32),
        mesh="data=16,tensor=4",
        layout_map=layout_map,
        topology="v5p:4x4x4",
    )
    size = 64 * 64 * 4
    read = {(host.reads_bytes, host.data_bytes) for host in found.hosts}
    assert read == {(2 * size // 4, 2 * size // 16)}
    places = np.concatenate([host.devices for host in found.hosts])
    assert sorted(places) == list(range(64))


MATRIX = 512 * 512 * 4


@pytest.mark.parametrize(
    ("mesh", "inner"), [("data=8", "data"), ("data=2,fsdp=4", "fsdp")]
)
def test_sums_within_slices_first(mesh: str, inner: str) -> None:
    """As libtpu 0.0.42 compiles it: of four chips, each sends a quarter between."""
    found = plan(mesh, **CROSSING)
    rows = [
        (c.kind, c.axes, c.bytes, c.wire_bytes, c.over_dcn) for c in found.collectives
    ]
    assert rows == [
        ("reduce-scatter", (inner,), MATRIX, MATRIX * 3 // 4, False),
        ("all-reduce", ("data",), MATRIX // 4, MATRIX // 4, True),
        ("all-gather", (inner,), MATRIX, MATRIX * 3 // 4, False),
    ]
    assert {c.path for c in found.collectives} == {"params/w"}
    v5e = topology("v5e:2x2").generation
    assert v5e.dcn_bytes_per_second and v5e.link_bytes_per_second
    # Two links of a corner, which close to no ring.
    assert found.seconds_bound == pytest.approx(
        {
            inner: MATRIX * 1.5 / (2 * v5e.link_bytes_per_second),
            "data (DCN)": MATRIX / 4 / v5e.dcn_bytes_per_second,
        }
    )
    for line in found.report().splitlines():
        if line.startswith("data (DCN)"):
            assert line.endswith("83.9 µs")


@pytest.mark.parametrize(
    ("mesh", "topology", "size", "kinds"),
    [
        ("data=2,fsdp=16", "v5e:4x4", 16 * 1024, ["all-reduce", "all-reduce"]),
        (
            "data=2,fsdp=16",
            "v5e:4x4",
            16 * 1024 + 1,
            ["all-reduce", "all-reduce", "all-gather"],
        ),
        (
            "data=2,fsdp=4,tensor=4",
            "v5e:4x4",
            2**20,
            ["reduce-scatter", "all-reduce", "all-gather"],
        ),
        ("data=2,fsdp=4,tensor=4", "v5e:4x4", 4096, ["all-reduce", "all-reduce"]),
        (
            "data=4,fsdp=8",
            "v5e:4x4",
            2**20,
            ["all-reduce", "all-reduce", "all-gather"],
        ),
        (
            "data=2,fsdp=8",
            "v5p:2x2x2",
            2**20,
            ["all-reduce", "all-reduce", "all-gather"],
        ),
        (
            "data=2,fsdp=8",
            "tpu7x:2x2x1",
            2**20,
            ["reduce-scatter", "all-reduce", "all-gather"],
        ),
        ("data=2,fsdp=8", "v5e:2x4", 8192, ["all-reduce", "all-reduce"]),
    ],
)
def test_sums_that_every_device_needs(
    mesh: str, topology: str, size: int, kinds: list[str]
) -> None:
    """As libtpu 0.0.42 compiles them: a tile is 1,024 elements.

    Where the devices of a slice have no tile each, all of it goes between slices; over
    all devices of a square slice, or one with three dims, sums are not scattered.
    """
    count = 1
    for part in mesh.split(",tensor")[0].split(","):
        count *= int(part.partition("=")[2])
    spec = jax.sharding.PartitionSpec(("data", "fsdp"))
    found = flm.pod.plan(
        flm.jit(
            lambda x: (x * 2).sum(0),
            layout_map=flm.LayoutMap(strict=False),
            in_shardings={"x": spec},
            out_shardings=jax.sharding.PartitionSpec(),
        ),
        jax.ShapeDtypeStruct((count, size), jnp.float32),
        mesh=mesh,
        topology=topology,
        slices=2,
    )
    assert [c.kind for c in found.collectives] == kinds
    between = [c.shape for c in found.collectives if c.over_dcn]
    within = count // 2
    share = size if len(kinds) == 2 else -(-size // within)
    assert between == [(share,)]


@pytest.mark.parametrize("axes", ["data=2,fsdp=4,tensor=4", "fsdp=8,tensor=4"])
def test_sums_that_are_scattered_over_slices_are_whole(axes: str) -> None:
    """As libtpu 0.0.42 compiles them: summed on all devices, then cut."""
    names = tuple(name for name in ("data", "fsdp") if name in axes)
    spec = jax.sharding.PartitionSpec(names)
    found = flm.pod.plan(
        flm.jit(
            lambda x: (x * 2).sum(0),
            layout_map=flm.LayoutMap(strict=False),
            in_shardings={"x": spec},
            out_shardings=spec,
        ),
        jax.ShapeDtypeStruct((8, 1024, 1024), jnp.float32),
        mesh=axes,
        topology="v5e:4x4",
        slices=2,
    )
    size = 1024 * 1024 * 4
    assert [(c.kind, c.bytes, c.over_dcn) for c in found.collectives] == [
        ("reduce-scatter", size, False),
        ("all-reduce", size // 4, True),
        ("all-gather", size, False),
    ]


def test_an_all_to_all_is_sent_once() -> None:
    def step(x: Any) -> Any:
        spec = jax.sharding.PartitionSpec(None, "data")
        return jax.lax.with_sharding_constraint(x, spec)

    found = flm.pod.plan(
        step,
        jax.ShapeDtypeStruct((512, 512), jnp.float32),
        mesh="data=8",
        layout_map=flm.LayoutMap(batch="data"),
        **CROSSING,
    )
    part = MATRIX // 8
    assert [(c.kind, c.wire_bytes, c.over_dcn) for c in found.collectives] == [
        ("all-to-all", part * 3 // 8, False),
        ("all-to-all", part // 2, True),
    ]


def test_an_axis_that_shares_dims_may_use_every_link() -> None:
    one = flm.pod.Collective(
        kind="all-gather",
        axes=("fsdp",),
        bytes=9 * 10**9,
        wire_bytes=9 * 10**9,
        executions=1,
        dtype="bfloat16",
        shape=(),
    )
    v5p = topology("v5p:4x4x4")
    # Six links of 9e10 bytes/s for what has no dims of its own, four for two dims.
    split = seconds_bound([one], {"fsdp": 8, "tensor": 8}, v5p)
    assert split == pytest.approx({"fsdp": 0.1 / 6})
    whole = seconds_bound([one], {"fsdp": 16, "tensor": 4}, v5p)
    assert whole == pytest.approx({"fsdp": 0.1 / 4})
