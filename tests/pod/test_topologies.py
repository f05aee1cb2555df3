"""TPU slices by name: available sizes, their properties, and errors."""

import math
from typing import Any

import pytest

from flax_layoutmap._core.errors import MeshError
from flax_layoutmap.pod._topologies import GENERATIONS, shapes_of, topology

# Name → shape, devices and hosts of one slice.
KNOWN: dict[str, tuple[tuple[int, ...], int, int]] = {
    "v2:4x4": ((4, 4), 32, 4),
    "v3-2048": ((32, 32), 2048, 256),
    "v4-8": ((2, 2, 1), 4, 1),
    "v4:4x4x8": ((4, 4, 8), 128, 32),
    "v5e:2x4": ((2, 4), 8, 1),
    "v5litepod-16": ((4, 4), 16, 4),
    "v5e-256": ((16, 16), 256, 64),
    "v5p-128": ((4, 4, 4), 64, 16),
    "v5p:16x16x24": ((16, 16, 24), 6144, 1536),
    "v6e-8": ((2, 4), 8, 1),
    "tpu7x:2x2x1": ((2, 2, 1), 8, 1),
    "tpu7x:16x24x24": ((16, 24, 24), 18432, 2304),
    # Of several shapes with as many chips, the most compact.
    "v5p-768": ((4, 8, 12), 384, 96),
    "v5p-12160": ((4, 20, 76), 6080, 1520),
    "tpu7x-13824": ((12, 24, 24), 13824, 1728),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_slices(name: str) -> None:
    shape, devices, hosts = KNOWN[name]
    slices = topology(name)
    assert (slices.shape, slices.devices, slices.hosts) == (shape, devices, hosts)
    assert topology(slices.name) == slices


SPELLINGS = ["v5litepod-16", "V5E:4X4", "v5e=4x4", "v5e_4x4", "TPU v5 lite:4x4"]


@pytest.mark.parametrize("written", [*SPELLINGS, "v5lite-16", " v5e-16 "])
def test_spellings(written: str) -> None:
    assert topology(written) == topology("v5e:4x4")


@pytest.mark.parametrize("name", GENERATIONS)
def test_every_shape_is_read_back(name: str) -> None:
    generation = GENERATIONS[name]
    shapes = shapes_of(generation)
    assert len(shapes) == len(set(shapes))
    assert max(map(math.prod, shapes)) == generation.max_chips
    for shape in shapes[:: max(1, len(shapes) // 40)]:
        found = topology(f"{name}:{'x'.join(map(str, shape))}")
        assert found.shape == shape and found.generation is generation
        assert found.hosts * math.prod(found.chips_per_host) == math.prod(shape)


@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("v5e:8x8", (False, False)),
        ("v5e:8x16", (False, True)),
        ("v6e:16x16", (True, True)),
        ("v3:16x32", (False, True)),
        ("v5p:2x4x4", (False, False, False)),
        ("v5p:4x4x4", (True, True, True)),
        ("tpu7x:4x4x12", (True, True, True)),
    ],
)
def test_rings(name: str, wrap: tuple[bool, ...]) -> None:
    assert topology(name).wrap == wrap


def test_what_the_compiler_is_told() -> None:
    assert topology("v5p:4x4x4", slices=2).compiler_arguments() == (
        "v5p:4x4x4",
        {
            "chips_per_host_bounds": (2, 2, 1),
            "wrap": (True, True, True),
            "chip_config_name": "megacore",
            "num_slices": 2,
        },
    )
    assert topology("v5e:2x4").compiler_arguments() == (
        "v5e:2x4",
        {"chips_per_host_bounds": (2, 4, 1), "wrap": (False, False, False)},
    )


def test_several_slices() -> None:
    two = topology("v6e:16x16", slices=2)
    assert (two.devices, two.hosts) == (512, 128)
    assert str(two) == "2 × v6e:16x16" and two.name == "v6e:16x16"
    assert topology(two) is not None and topology(two) == two
    assert topology(two, slices=3).slices == 3


@pytest.mark.parametrize(
    ("name", "slices", "text"),
    [
        ("v5p", 1, "not a topology: 'v5p'; write \"v5p:4x4x4\" (chips along each dim)"),
        (64, 1, "not a topology: 64; write"),
        (
            "v5litepood-16",
            1,
            "'v5litepood'; did you mean 'v5litepod'?; known are v2",
        ),
        (
            "v5p:4x4x5",
            1,
            "there is no slice v5p:4x4x5; the nearest are v5p:4x4x4, v5p:4x4x8, "
            "v5p:4x4x12. A shape is in chips, short dims first, a number in "
            "TensorCores, two to a chip; larger ones have slices=",
        ),
        ("v5e:32x32", 1, "the nearest are v5e:16x16, v5e:8x16, v5e:8x8. A"),
        ("v5p-101", 1, "there is no slice v5p-101; "),
        ("v5p:4x4x4", 0, "slices must be a whole number, 1 or more, got 0"),
    ],
)
def test_refused(name: Any, slices: int, text: str) -> None:
    with pytest.raises(MeshError) as caught:
        topology(name, slices=slices)
    assert text in str(caught.value)
