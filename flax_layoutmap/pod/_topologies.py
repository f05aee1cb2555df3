"""TPU generations as plain data, and their slices by name.

The figures are those that the compiler does not report: memory, links, slice sizes.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from flax_layoutmap._core.errors import MeshError, did_you_mean
from flax_layoutmap._core.mesh_shape import over_slices

Shape = tuple[int, ...]
# Chips on one host along each dim; smaller slices have one host.
_HOST: Shape = (2, 2, 1)
_NAME = re.compile(
    r"(?P<generation>[a-z0-9 ]+?)\s*"
    r"(?:[:=_](?P<shape>\d+(?:x\d+)*)|-(?P<count>\d+))"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Generation:
    """One generation of TPU.

    Attributes:
        name: for example `"v5p"`.
        dims: dims of the network between chips: 2 or 3.
        devices_per_chip: JAX devices on one chip.
        megacore: whether the two cores of a chip are one device.
        counts_cores: whether an accelerator type counts TensorCores, two to a chip;
            otherwise it counts chips.
        max_chips: chips of the largest slice.
        small_shapes: shapes that are smaller than the general rule allows.
        hbm_limit_bytes: memory of one device that the compiler lets a program use.
        hbm_bytes_per_second: bandwidth of this memory.
        flops: peak of one device in bfloat16, in floating-point operations per second.
        link_bytes_per_second: bandwidth of a link between chips, in one direction;
            None if unknown.
        dcn_bytes_per_second: share of a chip in the network between slices; None if
            unknown.
    """

    __module__ = "flax_layoutmap.pod"
    name: str
    dims: int
    devices_per_chip: int
    megacore: bool
    counts_cores: bool
    max_chips: int
    small_shapes: tuple[Shape, ...]
    hbm_limit_bytes: int
    hbm_bytes_per_second: float
    flops: float
    link_bytes_per_second: float | None
    dcn_bytes_per_second: float | None

    @property
    def max_dim(self) -> int | None:
        """With two dims, the side of a full pod, whose links form a ring; else None."""
        return self.small_shapes[-1][-1] if self.dims == 2 else None


_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_FLAT_V2 = ((2, 2), (4, 4), (8, 8), (8, 16), (16, 16))
_FLAT_V3 = ((2, 2), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16), (16, 32), (32, 32))
_CUBE = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))  # and shapes of whole 4x4x4 cubes
_CUBE_7 = ((1, 1, 1), *_CUBE)

# In the order of the fields of a Generation. Units after the shapes: GiB, GB/s memory,
# 10**12 operations/s, GB/s link, GB/s network.
# fmt: off
_TABLE = (
    ("v2", 2, 2, False, True, 256, _FLAT_V2, 7.48, 358, 22.5, None, None),
    ("v3", 2, 2, False, True, 1024, _FLAT_V3, 15.48, 412.5, 61.5, 100, None),
    ("v4", 3, 1, True, True, 4096, _CUBE, 30.75, 1230, 275, 45, 6.25),
    ("v5e", 2, 1, False, False, 256, _FLAT, 15.75, 820, 197, 45, 3.125),
    ("v5p", 3, 1, True, True, 6144, _CUBE, 95.74, 2460, 459, 90, 6.25),
    ("v6e", 2, 1, False, False, 256, _FLAT, 31.25, 1640, 918, 90, 12.5),
    ("tpu7x", 3, 2, False, True, 9216, _CUBE_7, 94.75, 3700, 1153.5, 100, 12.5),
)
# fmt: on
GENERATIONS = {
    row[0]: Generation(
        *row[:7],
        hbm_limit_bytes=round(row[7] * 2**30),
        hbm_bytes_per_second=row[8] * 1e9,
        flops=row[9] * 1e12,
        link_bytes_per_second=row[10] and row[10] * 1e9,
        dcn_bytes_per_second=row[11] and row[11] * 1e9,
    )
    for row in _TABLE
}

# Sources: devices_per_chip and hbm_limit_bytes were measured with libtpu 0.0.42 (the
# limit is in its error), 2026-11. max_chips, small_shapes, flops and
# dcn_bytes_per_second: Google Cloud TPU documentation and MaxText's table of slices,
# 2026-11; v4's network: jax-ml/scaling-book, 2025-02. hbm_bytes_per_second: TpuInfo
# of jax.experimental.pallas.tpu, 2026-11. link_bytes_per_second: jax-ml/scaling-book,
# 2025-02; tpu7x from the Google Cloud TPU documentation. Rings: MaxText's table; v2 and
# v3 inferred from their pods.
ALIASES = {
    "v5": "v5p",
    "v5litepod": "v5e",
    "v5lite": "v5e",
    "v5 lite": "v5e",
    "v6 lite": "v6e",
    "trillium": "v6e",
    "v7x": "tpu7x",
    "ironwood": "tpu7x",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Topology:
    """One or more slices of TPU chips, from `flm.pod.topology`.

    Attributes:
        generation: the figures of the generation.
        shape: chips along each dim of a slice.
        slices: the number of slices, connected by the network of the data center.
    """

    __module__ = "flax_layoutmap.pod"
    generation: Generation
    shape: Shape
    slices: int

    @property
    def name(self) -> str:
        """The name, for example `"v5p:4x4x4"`, without the number of slices."""
        return f"{self.generation.name}:{_by_x(self.shape)}"

    @property
    def chips_per_host(self) -> Shape:
        """Chips of a host (one process) along each dim."""
        if self.generation.dims == 2 and math.prod(self.shape) <= 8:
            return self.shape  # v5e and v6e have hosts with eight chips
        return tuple(map(min, _HOST, self.shape))

    @property
    def devices(self) -> int:
        """JAX devices of all slices."""
        chips = math.prod(self.shape) * self.slices
        return chips * self.generation.devices_per_chip

    @property
    def hosts(self) -> int:
        """Hosts (one process each) of all slices."""
        return self.slices * math.prod(self.shape) // math.prod(self.chips_per_host)

    @property
    def wrap(self) -> tuple[bool, ...]:
        """For each dim, whether the links form a ring."""
        if self.generation.dims == 2:
            return tuple(size == self.generation.max_dim for size in self.shape)
        return (all(size % 4 == 0 for size in self.shape),) * 3

    def compiler_arguments(self) -> tuple[str, dict[str, Any]]:
        """Return the arguments of `jax.experimental.topologies.get_topology_desc`.

        By default it has no rings, and each core of v4 is a device.
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


def topology(name: "str | Topology", *, slices: int | None = None) -> Topology:
    """Return the topology of a TPU slice from its name.

    Args:
        name: `"v5p:4x4x4"` (chips along each dim), or an accelerator type
            (`"v5p-128"`, `"v5litepod-16"`), for the shape closest to a cube; or a
            Topology.
        slices: the number of slices; 1 by default.

    Example:
        >>> import flax_layoutmap as flm
        >>> slices = flm.pod.topology("v5p-128", slices=2)
        >>> str(slices), slices.devices, slices.hosts
        ('2 × v5p:4x4x4', 128, 32)

    Plain JAX: `jax.experimental.topologies.get_topology_desc`, which needs libtpu and
    accepts shapes that do not exist.
    """
    if slices is not None and (not isinstance(slices, int) or slices < 1):
        raise MeshError(f"slices must be a whole number, 1 or more, got {slices!r}")
    if isinstance(name, Topology):
        return dataclasses.replace(name, slices=slices or name.slices)
    parts = _NAME.fullmatch(name.strip().lower()) if isinstance(name, str) else None
    if parts is None:
        raise MeshError(
            f'not a topology: {name!r}; write "v5p:4x4x4" (chips along each dim) or an '
            'accelerator type, "v5p-128"'
        )
    generation = _generation(parts["generation"])
    if parts["count"] is not None:
        shape = _shape_of_count(generation, int(parts["count"]))
    else:
        shape = tuple(map(int, parts["shape"].split("x")))
        if shape not in shapes_of(generation):
            raise _no_slice(generation, f":{_by_x(shape)}", math.prod(shape))
    return Topology(generation, shape, slices or 1)


def topology_or_none(name: Any, slices: int | None) -> Topology | None:
    """The topology of a plan, which may have none."""
    return topology(name, slices=slices) if name or slices is not None else None


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
    generation = GENERATIONS.get(ALIASES.get(short, short))
    if generation is None:
        known = [*GENERATIONS, *ALIASES]
        raise MeshError(
            f"there is no TPU generation {written.strip()!r}"
            f"{did_you_mean(short, known)}; known are {', '.join(GENERATIONS)}"
        )
    return generation


def _shape_of_count(generation: Generation, count: int) -> Shape:
    """The most compact shape of an accelerator type."""
    chips = count / 2 if generation.counts_cores else count
    fitting = [s for s in shapes_of(generation) if math.prod(s) == chips]
    if not fitting:
        raise _no_slice(generation, f"-{count}", chips)
    return min(fitting, key=lambda shape: (sum(shape), shape))


def _no_slice(generation: Generation, asked: str, chips: float) -> MeshError:
    """The error for a shape or number of chips that no slice has."""

    def distance(shape: Shape) -> tuple[float, Shape]:
        return abs(math.log(math.prod(shape) / max(chips, 1))), shape

    nearest = sorted(shapes_of(generation), key=distance)[:3]
    listed = ", ".join(f"{generation.name}:{_by_x(shape)}" for shape in nearest)
    unit = "TensorCores, two to a chip" if generation.counts_cores else "chips"
    return MeshError(
        f"there is no slice {generation.name}{asked}; the nearest are {listed}. A "
        f"shape is in chips, short dims first, a number in {unit}; larger ones have "
        "slices="
    )


def _by_x(shape: Shape) -> str:
    return "x".join(map(str, shape))


# ------------------------------------------------------------- meshes on slices


def split_over_slices(
    sizes: Mapping[str, int], topology: Topology
) -> tuple[list[int], list[int]]:
    """The sizes of the mesh axes inside a slice, and over the slices."""
    count = math.prod(sizes.values())
    line = ",".join(f"{name}={size}" for name, size in sizes.items())
    if count != topology.devices:
        raise MeshError(
            f"the mesh {line} has {count:,} devices, and {topology} has "
            f"{topology.devices:,}; change a size, or write -1 for one of them"
        )
    between = over_slices(tuple(sizes.values()), topology.slices)
    if between is None:
        raise MeshError(
            f"the mesh {line} does not lie on {topology}: the first axes go over the "
            f"{topology.slices} slices; put an axis of size {topology.slices} first"
        )
    within = [size // part for size, part in zip(sizes.values(), between, strict=True)]
    return within, between
