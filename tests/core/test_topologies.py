"""TPU slices by name: available sizes, their properties, and errors."""

import math
from typing import Any

import pytest

from flax_layoutmap._core.errors import MeshError
from flax_layoutmap._core.topologies import (
    ALIASES,
    GENERATIONS,
    SOURCES,
    shapes_of,
    topology,
)

# Name → shape, accelerator type, devices and hosts of one slice.
KNOWN: dict[str, tuple[tuple[int, ...], str, int, int]] = {
    "v2:4x4": ((4, 4), "v2-32", 32, 4),
    "v3-2048": ((32, 32), "v3-2048", 2048, 256),
    "v4-8": ((2, 2, 1), "v4-8", 4, 1),
    "v4:4x4x8": ((4, 4, 8), "v4-256", 128, 32),
    "v5e:1x1": ((1, 1), "v5litepod-1", 1, 1),
    "v5e:2x4": ((2, 4), "v5litepod-8", 8, 1),
    "v5litepod-16": ((4, 4), "v5litepod-16", 16, 4),
    "v5e-256": ((16, 16), "v5litepod-256", 256, 64),
    "v5p-8": ((2, 2, 1), "v5p-8", 4, 1),
    "v5p-128": ((4, 4, 4), "v5p-128", 64, 16),
    "v5p:16x16x24": ((16, 16, 24), "v5p-12288", 6144, 1536),
    "v6e-8": ((2, 4), "v6e-8", 8, 1),
    "v6e:16x16": ((16, 16), "v6e-256", 256, 64),
    "tpu7x-2": ((1, 1, 1), "tpu7x-2", 2, 1),
    "tpu7x-128": ((4, 4, 4), "tpu7x-128", 128, 16),
    "tpu7x:16x24x24": ((16, 24, 24), "tpu7x-18432", 18432, 2304),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_slices(name: str) -> None:
    shape, kind, devices, hosts = KNOWN[name]
    found = topology(name)
    assert found.shape == shape
    assert found.accelerator_type == kind
    assert (found.devices, found.hosts) == (devices, hosts)
    assert topology(found.name) == found and topology(kind) == found
    assert found.devices == found.hosts * found.devices_per_host


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
        assert found.hosts * math.prod(found.chips_per_host) == found.chips
        assert math.prod(topology(found.accelerator_type).shape) == math.prod(shape)


# Of several shapes with as many chips, the accelerator type names the most compact.
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("v5p-768", (4, 8, 12)),
        ("v5p-3072", (8, 12, 16)),
        ("v5p-8960", (8, 20, 28)),
        ("v5p-12160", (4, 20, 76)),
        ("tpu7x-6912", (12, 12, 24)),
        ("tpu7x-13824", (12, 24, 24)),
        ("v4-1536", (8, 8, 12)),
    ],
)
def test_accelerator_types_take_the_most_compact_shape(
    name: str, shape: tuple[int, ...]
) -> None:
    assert topology(name).shape == shape


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
    assert topology("v4:4x4x8_twisted").compiler_arguments()[0] == "v4:4x4x8_twisted"


def test_several_slices() -> None:
    two = topology("v6e:16x16", slices=2)
    assert (two.devices, two.devices_per_slice, two.hosts) == (512, 256, 128)
    assert str(two) == "2 × v6e:16x16" and two.name == "v6e:16x16"
    assert topology(two) is not None and topology(two) == two
    assert topology(two, slices=3).slices == 3
    assert topology(two, chips_per_host=(2, 4)).hosts == 64


def test_hosts_can_be_given() -> None:
    assert topology("v5e:2x4", chips_per_host=(2, 2)).hosts == 2
    assert topology("v5e:2x4", chips_per_host=[2, 2]).hosts == 2


def test_a_device_is_what_the_generation_says() -> None:
    memory = {name: entry.hbm_limit_bytes for name, entry in GENERATIONS.items()}
    for name, entry in GENERATIONS.items():
        # A program is left with a little less than there is.
        assert 0.9 < memory[name] / entry.hbm_bytes < 1, name
    # Two cores of v4 and v5p are one device; a chip of tpu7x is two.
    assert GENERATIONS["v4"].megacore and GENERATIONS["v5p"].megacore
    assert topology("tpu7x:2x2x1").devices == 8
    assert topology("v4:2x2x1").devices == 4
    assert round(memory["tpu7x"] / 2**30, 2) == 94.75


def test_every_figure_has_a_source() -> None:
    fields = set(GENERATIONS["v5p"].__dataclass_fields__)
    # The rest are names and kinds, or how an accelerator type counts.
    plain = {"name", "device_kind", "dims", "megacore", "counts_cores", "max_dim"}
    assert set(SOURCES) == (fields - plain) | {"wrap"}
    assert all("20" in source for source in SOURCES.values())


def test_aliases_lead_to_generations() -> None:
    assert set(ALIASES.values()) <= set(GENERATIONS)
    assert not set(ALIASES) & set(GENERATIONS)


# ------------------------------------------------------------------------ bad input

NEAREST_TO_LARGE = "The nearest: v5e:16x16, v5e:8x16, v5e:8x8"
REFUSED: list[tuple[Any, str]] = [
    (
        "v5p",
        "not a topology: 'v5p'; write \"v5p:4x4x4\" (chips along each dim) or an "
        'accelerator type, "v5p-128"',
    ),
    (
        64,
        'not a topology: 64; write "v5p:4x4x4" (chips along each dim) or an '
        'accelerator type, "v5p-128"',
    ),
    (
        "v5litepood-16",
        "there is no TPU generation 'v5litepood'; did you mean 'v5litepod'?; known "
        "are v2, v3, v4, v5e, v5p, v6e, tpu7x",
    ),
    (
        "v5p:4x4x5",
        "there is no slice v5p:4x4x5: each dim is a multiple of 4, unless the slice "
        "is smaller than 4x4x4. The nearest: v5p:4x4x4, v5p:4x4x8, v5p:4x4x12",
    ),
    (
        "v5e:32x32",
        "there is no slice v5e:32x32: 1,024 chips are more than the 256 of the "
        f"largest slice; take several, slices=…. {NEAREST_TO_LARGE}",
    ),
    (
        "v5e:4x4x4",
        "there is no slice v5e:4x4x4: v5e has 2 dims, not 3. The nearest: v5e:8x8, "
        "v5e:4x8, v5e:8x16",
    ),
    (
        "v5p:8x4x4",
        "there is no slice v5p:8x4x4: the short dims come first. The nearest: "
        "v5p:4x4x8, v5p:4x4x12, v5p:4x4x4",
    ),
    (
        "v6e:3x3",
        "there is no slice v6e:3x3: slices of two dims come in few shapes. The "
        "nearest: v6e:2x4, v6e:4x4, v6e:2x2",
    ),
    (
        "v5p-100",
        "there is no slice v5p-100: the number counts TensorCores, two to a chip. "
        "The nearest: v5p-32, v5p-64, v5p-128",
    ),
    (
        "v6e-500",
        "there is no slice v6e-500: 500 chips are more than the 256 of the largest "
        "slice; take several, slices=…. The nearest: v6e-64, v6e-128, v6e-256",
    ),
    (
        "v6e-100",
        "there is no slice v6e-100: the number counts chips. The nearest: v6e-32, "
        "v6e-64, v6e-128",
    ),
    (
        "v5p-16384",
        "there is no slice v5p-16384: 8,192 chips are more than the 6,144 of the "
        "largest slice; take several, slices=…. The nearest: v5p-12032, v5p-12160, "
        "v5p-12288",
    ),
    (
        "v5p:4x4x4_twisted",
        "v5p:4x4x4 cannot be twisted: only n x n x 2n and n x 2n x 2n with n a "
        "multiple of 4 can, such as 4x4x8; leave out _twisted",
    ),
]
REFUSED_OPTIONS: list[tuple[Any, dict[str, Any], str]] = [
    *((name, {}, text) for name, text in REFUSED),
    (
        "v5p:4x4x4",
        {"slices": 0},
        "slices must be a whole number, 1 or more, got 0",
    ),
    (
        "v5e:4x4",
        {"chips_per_host": (3, 1)},
        "chips_per_host must divide the slice 4x4 dim by dim, got (3, 1); for "
        "example (2, 2)",
    ),
]


@pytest.mark.parametrize(("name", "options", "text"), REFUSED_OPTIONS)
def test_refused(name: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(MeshError) as caught:
        topology(name, **options)
    assert str(caught.value) == text
