"""Gradients that a plan for TPUs has as whole sums, as the compiler makes them."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import flax_layoutmap as flm
from flax_layoutmap.pod._whole_sums import tiled_dims

ROWS, LANES = ("fsdp", "tensor"), ("tensor", "fsdp")
HEADS, OUT = ("fsdp", "tensor", None), ("tensor", None, "fsdp")

# The kernel, its layout, and whether libtpu 0.0.42 sums its gradient whole on v5e:16x16
# with fsdp=32, tensor=8: as compiled, one by one.
COMPILED = [
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
    # 16,032 columns on a device fill no tiles, so that the rows lie along the lanes.
    ((4096, 128256), ROWS, True),
    ((8192, 128256), ROWS, False),
    ((8192, 131072), ROWS, False),
]


def planned(shape: Any, layout: Any, dtype: Any = jnp.bfloat16, **where: Any) -> Any:
    """A step with one kernel, that is used forward and back."""
    layout_map = flm.LayoutMap(batch="fsdp")
    layout_map["w"] = layout
    inner = 2 if layout == OUT else 1

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            y = jnp.tensordot(x, params["w"], inner)
            return (y.astype(jnp.float32) ** 2).mean()

        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params))

    params = {"w": jax.ShapeDtypeStruct(shape, dtype)}
    x = jax.ShapeDtypeStruct((2**21, *shape[:inner]), dtype)
    where = {"mesh": "fsdp=32,tensor=8", "topology": "v5e:16x16", **where}
    return flm.pod.plan(
        step, params, x, layout_map=layout_map, donate_argnames="params", **where
    )


def sums(report: Any) -> dict[str, int]:
    """Kind → bytes sent, of the sums of the gradient."""
    return {
        one.kind: one.wire_bytes
        for one in report.collectives
        if one.path == "params/w" and one.kind != "all-gather"
    }


@pytest.mark.parametrize(("shape", "layout", "whole"), COMPILED)
def test_as_the_compiler_does_it(shape: Any, layout: Any, whole: bool) -> None:
    found = sums(planned(shape, layout))
    size = 2 * int(jnp.prod(jnp.array(shape))) // 8
    if whole:
        assert found == {"all-reduce": 2 * (size * 31 // 32)}
    else:
        assert found == {"reduce-scatter": size * 31 // 32}


def test_wider_elements_fill_a_chunk_with_fewer() -> None:
    found = sums(planned((14336, 4096), LANES, jnp.float32))
    assert set(found) == {"reduce-scatter"}


@pytest.mark.parametrize(
    ("topology", "slices", "mesh", "whole"),
    [
        ("v5e:2x2", 1, "fsdp=4", False),
        ("v5e:2x4", 1, "fsdp=8", False),
        ("v5e:4x4", 1, "fsdp=16", True),
        ("v5e:4x4", 1, "fsdp=8,tensor=2", False),
        ("v5e:4x4", 2, "data=2,fsdp=16", True),
        ("v5e:4x8", 1, "fsdp=32", False),
        ("v5e:8x16", 1, "fsdp=128", False),
        ("v5e:16x16", 1, "fsdp=256", True),
        ("v6e:4x4", 1, "fsdp=16", True),
        ("v5p:2x2x1", 1, "fsdp=4", False),
        ("v5p:2x2x2", 1, "fsdp=8", True),
        ("v5p:4x4x4", 1, "fsdp=64", True),
        ("v4:2x2x1", 1, "fsdp=4", False),
        ("v3:4x4", 1, "fsdp=32", True),
        ("v3:4x8", 1, "fsdp=64", False),
        ("tpu7x:2x2x1", 1, "fsdp=8", False),
    ],
)
def test_over_all_devices_of_a_slice(
    topology: str, slices: int, mesh: str, whole: bool
) -> None:
    """As libtpu 0.0.42 compiles single gradients; over two slices, a gated layer."""
    where = {"topology": topology, "slices": slices, "mesh": mesh}
    found = sums(planned((16384, 1024), ("fsdp", None), **where))
    assert ("all-reduce" if whole else "reduce-scatter") in found


@pytest.mark.parametrize(
    ("rows", "width", "whole"),
    [
        (8, 1024, True),
        (16, 1536, False),
        (16, 3584, True),
        (32, 128, False),
        (32, 640, True),
        (32, 896, True),
        (32, 1408, True),
        (32, 3072, False),
        (32, 3584, True),
        (32, 4608, False),
        (48, 3584, True),
        (64, 640, False),
        (64, 3584, False),
        (96, 3584, False),
    ],
)
def test_few_rows_over_256_devices(rows: int, width: int, whole: bool) -> None:
    """As libtpu 0.0.42 compiles single gradients for a slice of 2,048 chips."""
    where = {"topology": "v5p:8x16x16", "mesh": "fsdp=256,tensor=8"}
    found = sums(planned((rows * 256, width * 8), ROWS, **where))
    assert set(found) == {"all-reduce" if whole else "reduce-scatter"}


@pytest.mark.parametrize(
    "where",
    [
        {"topology": None},
        {"topology": None, "platform": "cuda"},
        {"topology": "tpu7x:4x4x8"},
    ],
    ids=["no topology", "gpus", "tpu7x"],
)
def test_elsewhere_they_are_scattered(where: Any) -> None:
    report = planned((14336, 4096), LANES, **where)
    assert set(sums(report)) == {"reduce-scatter"}
    assert not [text for text in report.warnings if "whole" in text]


def test_it_is_said_and_other_rules_change_it() -> None:
    report = planned((14336, 4096), LANES)
    (text,) = (one for one in report.warnings if "whole" in one)
    assert text == (
        "the TPU compiler sums 1 gradient whole on every device (if it makes no loop "
        "of permutes of it, which flm.pod.compile shows), which sends 13.6 MiB more in "
        "a step than reduce-scatters would: params/w; it scatters a sum along its "
        "lanes in parts of 512 bytes (256 elements of bfloat16) only, not across a dim "
        "of one element, not over all devices of a square or cubic slice, and few rows "
        "not always over 256: shard another dim, or over fewer devices"
    )
    rules = flm.LayoutMap(batch="fsdp")
    rules["w"] = ROWS
    again = report.with_layout(rules)
    assert set(sums(again)) == {"reduce-scatter"}
    assert not [one for one in again.warnings if "whole" in one]


@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((128, 1792), (0, 1)),
        ((8, 128, 32), (2, 1)),
        ((4, 128, 128), (1, 2)),
        ((1792, 320), (1, 0)),
        ((1792, 384), (0, 1)),
        ((2, 1024, 2048), (1, 2)),
    ],
)
def test_the_dims_of_tiles(shape: Any, dims: Any) -> None:
    assert tiled_dims(shape) == dims


# Tiles of rows on a device → whether libtpu 0.0.42 sums the gradient whole, as 256
# elements of two bytes are each device's part: as compiled, one by one.
PIECES = {
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


@pytest.mark.parametrize(
    ("where", "tiles", "whole"),
    [(where, *item) for where, items in PIECES.items() for item in items.items()],
)
def test_rows_that_do_not_come_out_even(
    where: tuple[str, int, int], tiles: int, whole: bool
) -> None:
    topology, fsdp, tensor = where
    shape = (256 * fsdp, 8 * tiles * tensor)
    mesh = f"fsdp={fsdp},tensor={tensor}"
    found = sums(planned(shape, ROWS, topology=topology, mesh=mesh))
    assert set(found) == {"all-reduce" if whole else "reduce-scatter"}
