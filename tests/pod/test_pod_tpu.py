"""Gradient sums as libtpu 0.0.42 compiles them, within and across slices.

The tables are of single gradients and collectives, as compiled one by one.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from pods import rules, struct

import flax_layoutmap as flm
from flax_layoutmap._core.topologies import topology
from flax_layoutmap.pod._hlo import wire_bytes
from flax_layoutmap.pod._records import Collective, Kind
from flax_layoutmap.pod._tpu import as_compiled, scatters

ROWS, LANES = ("fsdp", "tensor"), ("tensor", "fsdp")
HEADS, OUT = ("fsdp", "tensor", None), ("tensor", None, "fsdp")


def is_whole(
    shape: tuple[int, ...],
    layout: tuple[str | None, ...],
    name: str = "v5e:16x16",
    mesh: tuple[int, int] = (32, 8),
    slices: int = 1,
    item: int = 2,
    called: str = "",
) -> bool:
    """Whether the gradient of a kernel is summed whole over `fsdp`.

    Args:
        shape: of the kernel.
        layout: of the kernel.
        name: the topology.
        mesh: sizes of `fsdp` and `tensor`.
        slices: how many slices.
        item: bytes of an element.
        called: the sum's name in the program.
    """
    sizes = {"fsdp": mesh[0], "tensor": mesh[1], None: 1}
    parts = zip(shape, layout, strict=True)
    part = tuple(size // sizes[axis] for size, axis in parts)
    asked = scatters(topology(name, slices=slices))
    return not asked(part, layout.index("fsdp"), item, mesh[0], called)


@pytest.mark.parametrize(
    ("shape", "layout", "whole"),
    [
        ((4096, 14336), ROWS, False),
        ((4096, 8 * 128), ROWS, False),
        ((14336, 4096), LANES, True),
        ((14336, 8192), LANES, False),
        ((4096, 8, 128), HEADS, True),
        ((4096, 16, 128), HEADS, False),
        ((4096, 32, 128), HEADS, False),
        ((65536, 8, 128), HEADS, True),
        ((32, 128, 4096), OUT, True),
        ((32, 128, 8192), OUT, False),
        ((8, 128, 8192), OUT, False),
        # 16,032 columns on a device fill no tiles: the rows lie along the lanes.
        ((4096, 128256), ROWS, True),
        ((8192, 128256), ROWS, False),
        ((8192, 131072), ROWS, False),
    ],
)
def test_parts_of_a_device(shape: Any, layout: Any, whole: bool) -> None:
    assert is_whole(shape, layout) == whole
    assert not is_whole(shape, layout, "tpu7x:4x4x8")
    # The rows of an embedding are added up in other ways.
    assert not is_whole(shape, layout, called="jit(step)/scatter-add")


def test_wider_elements_fill_a_chunk_with_fewer() -> None:
    assert not is_whole((14336, 4096), LANES, item=4)


@pytest.mark.parametrize(
    ("name", "slices", "mesh", "whole"),
    [
        ("v5e:2x2", 1, (4, 1), False),
        ("v5e:2x4", 1, (8, 1), False),
        ("v5e:4x4", 1, (16, 1), True),
        ("v5e:4x4", 1, (8, 2), False),
        ("v5e:4x4", 2, (16, 1), True),
        ("v5e:4x8", 1, (32, 1), False),
        ("v5e:8x16", 1, (128, 1), False),
        ("v5e:16x16", 1, (256, 1), True),
        ("v6e:4x4", 1, (16, 1), True),
        ("v5p:2x2x1", 1, (4, 1), False),
        ("v5p:2x2x2", 1, (8, 1), True),
        ("v5p:4x4x4", 1, (64, 1), True),
        ("v4:2x2x1", 1, (4, 1), False),
        ("v3:4x4", 1, (32, 1), True),
        ("v3:4x8", 1, (64, 1), False),
        ("tpu7x:2x2x1", 1, (8, 1), False),
    ],
)
def test_over_all_devices_of_a_slice(
    name: str, slices: int, mesh: tuple[int, int], whole: bool
) -> None:
    assert is_whole((16384, 1024), ("fsdp", None), name, mesh, slices) == whole


# Rows and columns on each of 256 devices of a slice of 2,048 chips.
FEW = {
    **dict.fromkeys(((8, 1024), (16, 3584), (32, 640), (32, 896)), True),
    **dict.fromkeys(((32, 1408), (32, 3584), (48, 3584)), True),
    **dict.fromkeys(((16, 1536), (32, 128), (32, 3072), (32, 4608)), False),
    **dict.fromkeys(((64, 640), (64, 3584), (96, 3584)), False),
}


@pytest.mark.parametrize(("part", "whole"), FEW.items())
def test_few_rows_over_256_devices(part: tuple[int, int], whole: bool) -> None:
    shape = (part[0] * 256, part[1] * 8)
    assert is_whole(shape, ROWS, "v5p:8x16x16", (256, 8)) == whole


# Topology and mesh → tiles of rows of each device's part, 256 elements of two bytes.
UNEVEN = {
    ("v6e:16x16", 32, 8): {
        **dict.fromkeys((17, 61, 103, 126, 134, 202, 335, 1340, 2000), False),
        **dict.fromkeys((1164, 13 * 107, 14 * 107, 24 * 167, 36 * 107), False),
        **dict.fromkeys((107, 113, 127, 251, 254, 501, 1004, 2004, 12 * 113), True),
    },
    ("v6e:16x16", 64, 4): {29: False, 53: False, 61: True, 67: True},
    ("v6e:16x16", 16, 16): {167: False, 251: True, 22 * 251: True, 26 * 251: False},
    ("v6e:16x16", 8, 32): {251: False, 501: False, 1021: True},
    ("v5e:16x16", 32, 8): {47: False, 53: True, 6 * 107: True, 7 * 107: False},
    ("v5p:4x4x4", 16, 4): {83: False, 97: True, 10 * 113: True, 12 * 113: False},
    ("v4:4x4x4", 16, 4): {83: False, 113: True},
    ("tpu7x:4x4x4", 16, 8): {211: False, 223: False},
}


@pytest.mark.parametrize("where", UNEVEN, ids=str)
def test_rows_that_do_not_come_out_even(where: tuple[str, int, int]) -> None:
    name, fsdp, tensor = where
    found = {
        tiles: is_whole((256 * fsdp, 8 * tiles * tensor), ROWS, name, (fsdp, tensor))
        for tiles in UNEVEN[where]
    }
    assert found == UNEVEN[where]


def planned(shape: Any, layout: Any, **where: Any) -> Any:
    """A step with one kernel, that is used forward and back."""
    inner = 2 if layout == OUT else 1

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            y = jnp.tensordot(x, params["w"], inner)
            return (y.astype(jnp.float32) ** 2).mean()

        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params))

    return flm.pod.plan(
        step,
        {"w": struct(*shape, dtype=jnp.bfloat16)},
        struct(2**21, *shape[:inner], dtype=jnp.bfloat16),
        mesh="fsdp=32,tensor=8",
        layout_map=rules("fsdp", w=layout),
        donate_argnames="params",
        **where,
    )


V5E: dict[str, Any] = {"topology": "v5e:16x16"}


@pytest.mark.parametrize(
    ("shape", "layout", "where", "whole"),
    [
        ((4096, 14336), ROWS, V5E, False),
        ((14336, 4096), LANES, V5E, True),
        ((4096, 8, 128), HEADS, V5E, True),
        ((32, 128, 8192), OUT, V5E, False),
        ((14336, 4096), LANES, {}, False),
        ((14336, 4096), LANES, {"platform": "cuda"}, False),
    ],
)
def test_plans_have_whole_sums(
    shape: Any, layout: Any, where: Any, whole: bool
) -> None:
    found = {
        one.kind: one.wire_bytes
        for one in planned(shape, layout, **where).collectives
        if one.path == "params/w" and one.kind != "all-gather"
    }
    sent = 2 * math.prod(shape) // 8 * 31 // 32
    assert found == ({"all-reduce": 2 * sent} if whole else {"reduce-scatter": sent})


# ------------------------------------------------------------- over several slices


def compiled_as(
    kind: Kind, name: str, mesh: str, axes: str, *shape: int, slices: int = 1
) -> list[Collective]:
    """What a collective becomes on slices."""
    sizes = flm.DeviceMesh.abstract(mesh).axis_sizes
    size, over = 4 * math.prod(shape), tuple(axes.split(","))
    members = math.prod(sizes[axis] for axis in over)
    whole = Collective(
        kind=kind,
        axes=over,
        bytes=size,
        wire_bytes=wire_bytes(kind, size, members),
        executions=1,
        dtype="float32",
        shape=shape,
    )
    return list(as_compiled(whole, sizes, topology(name, slices=slices)))


@pytest.mark.parametrize(
    ("name", "mesh", "axes", "kinds"),
    [
        # An axis of four times half a dim.
        ("v5p:4x4x4", "a=8,b=8", "a,b", ["all-reduce", "all-reduce"]),
        ("v4:4x4x4", "a=8,b=8", "a,b", ["all-reduce", "all-reduce"]),
        ("v5p:4x4x4", "a=8,b=8", "a", ["all-gather", "reduce-scatter"]),
        ("v5p:4x4x4", "a=2,b=8,c=4", "a,b", ["all-gather", "reduce-scatter"]),
        # Axes of whole dims.
        ("v5p:4x4x4", "a=16,b=4", "a,b", ["all-gather", "all-reduce"]),
        ("v5p:4x4x8", "a=4,b=32", "a,b", ["all-gather", "all-reduce"]),
        ("tpu7x:4x4x4", "a=8,b=16", "a,b", ["all-gather", "reduce-scatter"]),
        # Of two dims.
        ("v5e:4x4", "a=8,b=2", "a,b", ["all-gather", "all-reduce"]),
        ("v6e:8x8", "a=16,b=4", "a,b", ["all-gather", "all-reduce"]),
        ("v5e:2x4", "a=2,b=4", "a,b", ["all-gather", "reduce-scatter"]),
    ],
)
def test_over_all_devices(name: str, mesh: str, axes: str, kinds: list[Kind]) -> None:
    """As compiled for kernels of 4096 x 4096 that are gathered and summed."""
    given: list[Kind] = ["all-gather", "reduce-scatter"]
    for kind, wanted in zip(given, kinds, strict=True):
        (one,) = compiled_as(kind, name, mesh, axes, 4096, 4096)
        sizes = flm.DeviceMesh.abstract(mesh).axis_sizes
        members = math.prod(sizes[axis] for axis in one.axes)
        sent = wire_bytes(wanted, 4 * 4096 * 4096, members)
        assert (one.kind, one.wire_bytes) == (wanted, sent)


def over_slices(kind: Kind, name: str, mesh: str, *shape: int) -> list[Collective]:
    """What a collective over `data` and `fsdp` becomes on two slices."""
    names = flm.DeviceMesh.abstract(mesh).axis_names
    axes = ",".join(axis for axis in names if axis != "tensor")
    return compiled_as(kind, name, mesh, axes, *shape, slices=2)


# Where every device keeps the sum, and where the devices of a slice have no tile each.
SCATTERED: list[Kind] = ["reduce-scatter", "all-reduce", "all-gather"]
SUMMED: list[Kind] = ["all-reduce", "all-reduce", "all-gather"]
SMALL: list[Kind] = ["all-reduce", "all-reduce"]


@pytest.mark.parametrize(
    ("mesh", "name", "size", "kinds"),
    [
        ("data=2,fsdp=16", "v5e:4x4", 16 * 1024, SMALL),
        ("data=2,fsdp=16", "v5e:4x4", 16 * 1024 + 1, SUMMED),
        ("data=2,fsdp=4,tensor=4", "v5e:4x4", 2**20, SCATTERED),
        ("data=2,fsdp=4,tensor=4", "v5e:4x4", 4096, SMALL),
        ("data=4,fsdp=8", "v5e:4x4", 2**20, SUMMED),
        ("data=2,fsdp=8", "v5p:2x2x2", 2**20, SUMMED),
        ("data=2,fsdp=8", "tpu7x:2x2x1", 2**20, SCATTERED),
        ("data=2,fsdp=8", "v5e:2x4", 8192, SMALL),
        ("fsdp=8,tensor=4", "v5e:4x4", 2**20, SCATTERED),
    ],
)
def test_sums_over_slices(mesh: str, name: str, size: int, kinds: list[Kind]) -> None:
    """A tile is 1,024 elements; without one for each, all of it goes between."""
    within = math.prod(
        int(part.partition("=")[2])
        for part in mesh.split(",")
        if not part.startswith("tensor")
    )
    found = over_slices("all-reduce", name, mesh, size)
    assert [one.kind for one in found] == kinds
    share = size if kinds == SMALL else -(-size // (within // 2))
    assert [one.shape for one in found if one.over_dcn] == [(share,)]
    # Summed on all devices, then cut.
    scattered = over_slices("reduce-scatter", name, mesh, size)
    assert [(one.kind, one.bytes) for one in scattered] == [
        (one.kind, one.bytes) for one in found
    ]


def test_an_all_to_all_is_sent_once() -> None:
    found = over_slices("all-to-all", "v5e:2x2", "data=8", 512, 64)
    size = 512 * 64 * 4
    assert [(one.wire_bytes, one.over_dcn) for one in found] == [
        (size // 2 * 3 // 4, False),
        (size // 2, True),
    ]
    (gather, share) = over_slices("all-gather", "v5e:2x2", "data=8", 512, 64)
    assert (gather.bytes, gather.over_dcn, share.bytes) == (size, False, size // 4)


@pytest.mark.parametrize(
    ("mesh", "inner"), [("data=8", "data"), ("data=2,fsdp=4", "fsdp")]
)
def test_plans_sum_within_slices_first(mesh: str, inner: str) -> None:
    """Of four chips, each sends a quarter between."""

    def step(params: Any, x: Any) -> Any:
        gradient = jax.grad(lambda params: ((x @ params["w"]) ** 2).sum())(params)
        return jax.tree.map(lambda a, b: a - b, params, gradient)

    found = flm.pod.plan(
        step,
        {"w": struct(512, 512)},
        struct(1024, 512),
        mesh=mesh,
        layout_map=rules(("data", inner) if inner == "fsdp" else "data", w=None),
        donate_argnames="params",
        topology="v5e:2x2",
        slices=2,
    )
    size = 512 * 512 * 4
    assert [
        (one.kind, one.axes, one.bytes, one.wire_bytes, one.over_dcn)
        for one in found.collectives
    ] == [
        ("reduce-scatter", (inner,), size, size * 3 // 4, False),
        ("all-reduce", ("data",), size // 4, size // 4, True),
        ("all-gather", (inner,), size, size * 3 // 4, False),
    ]
    assert {one.path for one in found.collectives} == {"params/w"}
    v5e = topology("v5e:2x2").generation
    assert v5e.dcn_bytes_per_second and v5e.link_bytes_per_second
    # Two links of a corner, which close to no ring.
    assert found.seconds_bound == pytest.approx(
        {
            inner: size * 1.5 / (2 * v5e.link_bytes_per_second),
            "data (DCN)": size / 4 / v5e.dcn_bytes_per_second,
        }
    )
    rows = [row for row in found.report().splitlines() if row.startswith("data (DCN)")]
    assert rows[0].endswith("83.9 µs")
