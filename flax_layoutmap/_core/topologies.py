"""TPU generations as plain data, each figure with its source, and their slices.

The figures are what the compiler does not report: memory, links, available sizes.
A slice is named as `"v5p:4x4x4"` (chips along each dim) or by its accelerator type,
`"v5p-128"`.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

from flax_layoutmap._core.errors import MeshError, did_you_mean

Shape = tuple[int, ...]
# Chips on one host along each dim; a slice that is smaller has one host.
_HOST: Shape = (2, 2, 1)
_NAME = re.compile(
    r"(?P<generation>[a-z0-9 ]+?)\s*"
    r"(?:[:=_](?P<shape>\d+(?:x\d+)*)(?P<twisted>_twisted)?|-(?P<count>\d+))"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Generation:
    """One generation of TPU.

    Attributes:
        name: `"v5p"`.
        device_kind: what `jax.Device.device_kind` says.
        dims: dims of the network between the chips: 2 or 3.
        devices_per_chip: JAX devices on one chip.
        megacore: whether the two cores of a chip are one device.
        counts_cores: whether an accelerator type counts TensorCores, two to a chip;
            otherwise it counts chips.
        max_chips: chips of the largest slice.
        small_shapes: the shapes below those of the general rule.
        hbm_bytes: memory of one device, as built.
        hbm_limit_bytes: what the compiler lets a program use of it.
        hbm_bytes_per_second: how fast one device reads it.
        flops: peak of one device in bfloat16, in floating-point operations per second.
        link_bytes_per_second: one link between chips, in one direction; None where
            it is not known.
        dcn_bytes_per_second: share of one chip in the network between slices; None
            where it is not known.
    """

    __module__ = "flax_layoutmap.pod"
    name: str
    device_kind: str
    dims: int
    devices_per_chip: int
    megacore: bool
    counts_cores: bool
    max_chips: int
    small_shapes: tuple[Shape, ...]
    hbm_bytes: int
    hbm_limit_bytes: int
    hbm_bytes_per_second: float
    flops: float
    link_bytes_per_second: float | None
    dcn_bytes_per_second: float | None

    @property
    def max_dim(self) -> int | None:
        """For two dims, the side of a whole pod, whose links form a ring."""
        return self.small_shapes[-1][-1] if self.dims == 2 else None


_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_FLAT_V2 = ((2, 2), (4, 4), (8, 8), (8, 16), (16, 16))
_FLAT_V3 = ((2, 2), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16), (16, 32), (32, 32))
_CUBE = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))  # and of whole 4x4x4 cubes
_CUBE_7 = ((1, 1, 1), *_CUBE)

# In the order of the fields of a Generation. Memory is in GiB, as built and as the
# compiler lets a program use it; then 10**12 operations, and GB, each second.
# fmt: off
_TABLE = (
    ("v2", "TPU v2", 2, 2, False, True, 256, _FLAT_V2, 8, 7.48, 22.5, None, None),
    ("v3", "TPU v3", 2, 2, False, True, 1024, _FLAT_V3, 16, 15.48, 61.5, 100, None),
    ("v4", "TPU v4", 3, 1, True, True, 4096, _CUBE, 32, 30.75, 275, 45, 6.25),
    ("v5e", "TPU v5 lite", 2, 1, False, False, 256, _FLAT, 16, 15.75, 197, 45, 3.125),
    ("v5p", "TPU v5", 3, 1, True, True, 6144, _CUBE, 96, 95.74, 459, 90, 6.25),
    ("v6e", "TPU v6 lite", 2, 1, False, False, 256, _FLAT, 32, 31.25, 918, 90, 12.5),
    ("tpu7x", "TPU7x", 3, 2, False, True, 9216, _CUBE_7, 96, 94.75, 1153.5, 100, 12.5),
)
# fmt: on
# GB that one device reads from its memory each second.
_READS = dict(v2=358, v3=412.5, v4=1230, v5e=820, v5p=2460, v6e=1640, tpu7x=3700)


def _per_second(giga: float | None) -> float | None:
    return None if giga is None else giga * 1e9


GENERATIONS = {
    row[0]: Generation(
        *row[:8],
        hbm_bytes=row[8] * 2**30,
        hbm_limit_bytes=round(row[9] * 2**30),
        hbm_bytes_per_second=_READS[row[0]] * 1e9,
        flops=row[10] * 1e12,
        link_bytes_per_second=_per_second(row[11]),
        dcn_bytes_per_second=_per_second(row[12]),
    )
    for row in _TABLE
}

# Field of a Generation → where its figures are from, and when they were read.
SOURCES = {
    "devices_per_chip": "measured with libtpu 0.0.42, 2026-11",
    "hbm_limit_bytes": "measured with libtpu 0.0.42 (the limit in its error), 2026-11",
    "max_chips": "Google Cloud TPU documentation, pages v2 to tpu7x, 2026-11",
    "small_shapes": "Google Cloud TPU documentation, MaxText's table, 2026-11",
    "hbm_bytes": (
        "Google Cloud TPU documentation, 2026-11; v5e and v6e say GB there; v5p: "
        "jax-ml/scaling-book, 2025-02, as the documentation has 95 GiB, which are "
        "less than the compiler lets a program use"
    ),
    "hbm_bytes_per_second": (
        "TpuInfo.mem_bw_bytes_per_second of jax.experimental.pallas.tpu, 2026-11; "
        "v2, v3 and tpu7x: half of the chip's"
    ),
    "flops": "Google Cloud TPU documentation, pages v2 to tpu7x, 2026-11",
    "wrap": "MaxText's table of slices, 2026-11; v2 and v3 inferred from their pods",
    "link_bytes_per_second": (
        "jax-ml/scaling-book, 2025-02; tpu7x: 1200 GB/s both ways over 6 links, from "
        "the Google Cloud TPU documentation, 2026-11"
    ),
    "dcn_bytes_per_second": (
        "Google Cloud TPU documentation, 2026-11; v4: 25 GB/s for each host of 4 "
        "chips, from jax-ml/scaling-book, 2025-02"
    ),
}

ALIASES = {
    "v5": "v5p",
    "v5litepod": "v5e",
    "v5lite": "v5e",
    "v5 lite": "v5e",
    "v6 lite": "v6e",
    "trillium": "v6e",
    "7x": "tpu7x",
    "v7x": "tpu7x",
    "tpu7": "tpu7x",
    "ironwood": "tpu7x",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Topology:
    """One or more slices of TPU chips, from `flm.pod.topology`.

    Attributes:
        generation: the generation's figures.
        shape: chips along each dim of one slice.
        slices: how many slices, joined by the network of the data center.
        chips_per_host: chips of one host along each dim, as one process has them.
        twisted: whether the ring of the slice is twisted.
    """

    __module__ = "flax_layoutmap.pod"
    generation: Generation
    shape: Shape
    slices: int
    chips_per_host: Shape
    twisted: bool

    @property
    def name(self) -> str:
        """Name such as `"v5p:4x4x4"`, without the number of slices."""
        twisted = "_twisted" if self.twisted else ""
        return f"{self.generation.name}:{_by_x(self.shape)}{twisted}"

    @property
    def accelerator_type(self) -> str:
        """Type such as `"v5p-128"`, which counts TensorCores, or chips (v5e, v6e)."""
        name = "v5litepod" if self.generation.name == "v5e" else self.generation.name
        each = 2 if self.generation.counts_cores else 1
        return f"{name}-{self.chips_per_slice * each}"

    @property
    def chips_per_slice(self) -> int:
        """Chips of one slice."""
        return math.prod(self.shape)

    @property
    def chips(self) -> int:
        """Chips of all slices."""
        return self.chips_per_slice * self.slices

    @property
    def devices_per_slice(self) -> int:
        """JAX devices of one slice."""
        return self.chips_per_slice * self.generation.devices_per_chip

    @property
    def devices(self) -> int:
        """JAX devices of all slices."""
        return self.devices_per_slice * self.slices

    @property
    def devices_per_host(self) -> int:
        """JAX devices of one process."""
        return math.prod(self.chips_per_host) * self.generation.devices_per_chip

    @property
    def hosts(self) -> int:
        """Hosts (one process each) of all slices."""
        return self.devices // self.devices_per_host

    @property
    def wrap(self) -> tuple[bool, ...]:
        """For each dim, whether the links form a ring."""
        if self.generation.dims == 2:
            return tuple(size == self.generation.max_dim for size in self.shape)
        return (all(size % 4 == 0 for size in self.shape),) * 3

    def compiler_arguments(self) -> tuple[str, dict[str, Any]]:
        """Return the arguments of `jax.experimental.topologies.get_topology_desc`.

        Without them the compiler takes a slice that has no rings, the two cores of a
        v4 chip as two devices, and hosts of four chips everywhere.
        """
        wrap, host = self.wrap, self.chips_per_host
        options: dict[str, Any] = {
            "chips_per_host_bounds": (*host, *(1,) * (3 - len(host))),
            "wrap": (*wrap, *(False,) * (3 - len(wrap))),
        }
        if self.generation.megacore:
            options["chip_config_name"] = "megacore"
        if self.slices > 1:
            options["num_slices"] = self.slices
        return self.name, options

    def __str__(self) -> str:
        return f"{self.slices} × {self.name}" if self.slices > 1 else self.name


def topology(
    name: "str | Topology", *, slices: int | None = None, chips_per_host: Any = None
) -> Topology:
    """Return the topology of a TPU slice from its name.

    Args:
        name: `"v5p:4x4x4"`, chips along each dim, or an accelerator type,
            `"v5p-128"`, `"v5litepod-16"`, which takes the shape closest to a cube. In
            3 dims, `_twisted` may follow the shape. A Topology is taken as it is.
        slices: how many such slices; 1 where it is left out.
        chips_per_host: chips of one host along each dim, where it is not the usual:
            `(2, 2)` for a `v5e:2x4` on two hosts.

    Raises:
        MeshError: there is no such generation or slice; the nearest are named.

    Example:
        >>> import flax_layoutmap as flm
        >>> slices = flm.pod.topology("v5p-128", slices=2)
        >>> str(slices), slices.devices, slices.hosts
        ('2 × v5p:4x4x4', 128, 32)

    Plain JAX: `jax.experimental.topologies.get_topology_desc`, which needs libtpu,
    and takes shapes that do not exist.
    """
    if isinstance(name, Topology):
        kept = name.slices if slices is None else _checked_slices(slices)
        host = name.chips_per_host
        if chips_per_host is not None:
            host = _checked_host(name.generation, name.shape, chips_per_host)
        return dataclasses.replace(name, slices=kept, chips_per_host=host)
    found = _NAME.fullmatch(name.strip().lower()) if isinstance(name, str) else None
    if found is None:
        raise MeshError(
            f'not a topology: {name!r}; write "v5p:4x4x4" (chips along each dim) or an '
            'accelerator type, "v5p-128"'
        )
    generation = _generation(found["generation"])
    if found["count"] is not None:
        shape = _shape_of_count(generation, int(found["count"]))
    else:
        shape = tuple(map(int, found["shape"].split("x")))
        _require_shape(generation, shape)
    twisted = found["twisted"] is not None
    if twisted and not _twistable(shape):
        raise MeshError(
            f"{generation.name}:{_by_x(shape)} cannot be twisted: only n x n x 2n and "
            "n x 2n x 2n with n a multiple of 4 can, such as 4x4x8; leave out _twisted"
        )
    count = 1 if slices is None else _checked_slices(slices)
    host = _checked_host(generation, shape, chips_per_host)
    return Topology(generation, shape, count, host, twisted)


@functools.cache
def shapes_of(generation: Generation) -> tuple[Shape, ...]:
    """Every shape that a slice of the generation can have, smallest first."""
    if generation.dims == 2:
        return generation.small_shapes
    cubes = _cubes(generation.max_chips // 64)
    return (*generation.small_shapes, *sorted(cubes, key=lambda s: (math.prod(s), s)))


def _cubes(count: int) -> Iterator[Shape]:
    """Slices of whole 4x4x4 cubes, at most `count`, short dims first."""
    for first in range(1, count + 1):
        for second in range(first, count // first + 1):
            for third in range(second, count // (first * second) + 1):
                yield 4 * first, 4 * second, 4 * third


def _generation(written: str) -> Generation:
    short = written.strip().removeprefix("tpu ").strip()
    found = GENERATIONS.get(ALIASES.get(short, short))
    if found is None:
        known = [*GENERATIONS, *ALIASES]
        raise MeshError(
            f"there is no TPU generation {written.strip()!r}"
            f"{did_you_mean(short, known)}; known are {', '.join(GENERATIONS)}"
        )
    return found


def _require_shape(generation: Generation, shape: Shape) -> None:
    if shape in shapes_of(generation):
        return
    name = f"{generation.name}:{_by_x(shape)}"
    chips = math.prod(shape)
    if len(shape) != generation.dims:
        why = f"{generation.name} has {generation.dims} dims, not {len(shape)}"
    elif chips > generation.max_chips:
        why = _too_many(generation, chips)
    elif tuple(sorted(shape)) in shapes_of(generation):
        why = "the short dims come first"
    elif generation.dims == 3:
        why = "each dim is a multiple of 4, unless the slice is smaller than 4x4x4"
    else:
        why = "slices of two dims come in few shapes"
    nearest = (f"{generation.name}:{_by_x(s)}" for s in _nearest(generation, shape))
    raise MeshError(
        f"there is no slice {name}: {why}. The nearest: {', '.join(nearest)}"
    )


def _nearest(generation: Generation, shape: Shape) -> list[Shape]:
    wanted = tuple(sorted(max(size, 1) for size in shape))
    padded = (1,) * max(0, generation.dims - len(wanted)) + wanted

    def distance(other: Shape) -> tuple[float, int]:
        sizes = math.log(math.prod(other)) - math.log(math.prod(wanted))
        pairs = itertools.zip_longest(sorted(other), padded, fillvalue=1)
        return abs(sizes), sum(abs(mine - its) for mine, its in pairs)

    return sorted(shapes_of(generation), key=distance)[:3]


def _shape_of_count(generation: Generation, count: int) -> Shape:
    each = 2 if generation.counts_cores else 1
    sizes = sorted({math.prod(shape) for shape in shapes_of(generation)})
    if count % each == 0 and count // each in sizes:
        same = [s for s in shapes_of(generation) if math.prod(s) * each == count]
        return min(same, key=lambda shape: (sum(shape), shape))
    if count > generation.max_chips * each:
        why = _too_many(generation, count // each)
    else:
        why = "the number counts "
        why += "TensorCores, two to a chip" if each == 2 else "chips"
    nearest = sorted(sizes, key=lambda size: abs(size * each - count))[:3]
    written = ", ".join(f"{generation.name}-{n * each}" for n in sorted(nearest))
    raise MeshError(
        f"there is no slice {generation.name}-{count}: {why}. The nearest: {written}"
    )


def _too_many(generation: Generation, chips: int) -> str:
    return (
        f"{chips:,} chips are more than the {generation.max_chips:,} of the largest "
        "slice; take several, slices=…"
    )


def _twistable(shape: Shape) -> bool:
    if len(shape) != 3 or any(size % 4 for size in shape):
        return False
    first, second, third = shape
    return third == 2 * first and second in (first, third)


def _checked_slices(slices: int) -> int:
    if isinstance(slices, bool) or not isinstance(slices, int) or slices < 1:
        raise MeshError(f"slices must be a whole number, 1 or more, got {slices!r}")
    return slices


def _checked_host(generation: Generation, shape: Shape, given: Any) -> Shape:
    if given is None:
        if generation.max_dim is not None and math.prod(shape) <= 8:
            # Slices of v5e and v6e with eight chips are on one host.
            return shape
        usual = _HOST[: len(shape)]
        return tuple(map(min, usual, shape))
    host = tuple(given) if isinstance(given, tuple | list) else ()
    if len(host) == len(shape) and all(
        isinstance(part, int) and part > 0 and size % part == 0
        for part, size in zip(host, shape, strict=True)
    ):
        return host
    raise MeshError(
        f"chips_per_host must divide the slice {_by_x(shape)} dim by dim, got "
        f"{given!r}; for example {tuple(map(min, _HOST[: len(shape)], shape))}"
    )


def _by_x(shape: Shape) -> str:
    return "x".join(map(str, shape))
