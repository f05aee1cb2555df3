"""Count the elements of an array that each process needs and has to read.

A checkpoint holds arrays in chunks, and a process reads whole chunks: every one that a
shard on one of its devices touches, each once. Where the shards are cut along another
dim than the chunks, all processes read almost everything. So an array can be read in a
sharding whose shards are whole chunks, and be resharded on the devices.

Nothing here reads anything: it is arithmetic on shapes.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from flax_layoutmap._rules.records import Shape

AnyMesh = Mesh | AbstractMesh


class PerProcess(Mapping[int, float]):
    """`process_index` → bytes, compactly: plans hold one for each leaf."""

    __slots__ = ("counts", "names")

    def __init__(self, names: tuple[int, ...], counts: np.ndarray) -> None:
        self.names = names
        self.counts = counts

    def __getitem__(self, process: int) -> float:
        try:
            return float(self.counts[self.names.index(process)])
        except ValueError:
            raise KeyError(process) from None

    def __iter__(self) -> Iterator[int]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __mul__(self, factor: float) -> "PerProcess":
        return PerProcess(self.names, self.counts * factor)

    def __repr__(self) -> str:
        return repr(dict(self))


def total_of(several: Iterable[PerProcess]) -> dict[int, int]:
    """Process → the sum, in ascending order."""
    by_names: dict[tuple[int, ...], np.ndarray] = {}
    for one in several:
        before = by_names.get(one.names)
        by_names[one.names] = one.counts if before is None else before + one.counts
    sums: dict[int, float] = {}
    for names, counts in by_names.items():
        for process, count in zip(names, counts.tolist(), strict=True):
            sums[process] = sums.get(process, 0.0) + count
    return {process: round(sums[process]) for process in sorted(sums)}


@dataclasses.dataclass(frozen=True)
class Extent:
    """Elements of an array, per process.

    `needed` are those of its distinct shards, `read` those of all chunks that they
    touch.
    """

    needed: np.ndarray
    read: np.ndarray


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes of a mesh, numbered from 0 among those that have devices.

    `of_device` has the number of each device's process, in mesh order; `names` the
    `process_index` of each.
    """

    of_device: np.ndarray
    count: int
    names: tuple[int, ...]


@functools.lru_cache(maxsize=64)
def processes_of(mesh: AnyMesh, devices_per_process: int | None) -> Processes:
    """The processes of a mesh; `devices_per_process` applies to an abstract one."""
    if isinstance(mesh, Mesh) and devices_per_process is None:
        owners = np.array([device.process_index for device in mesh.devices.flat])
    else:
        owners = np.arange(mesh.size) // (devices_per_process or mesh.size)
    names, of_device = np.unique(owners, return_inverse=True)
    return Processes(of_device, len(names), tuple(int(name) for name in names))


def extent_of(
    shape: Shape,
    chunk: Shape,
    sharding: NamedSharding,
    devices_per_process: int | None = None,
) -> Extent:
    """The elements of an array that each process needs and reads.

    `chunk` is the shape of all chunks but the last ones of a dim; `sharding` divides
    every dim.
    """
    dims = _dims(sharding, len(shape))
    blocks = _blocks(sharding.mesh, dims, devices_per_process)
    size = math.prod(
        length // parts for length, parts in zip(shape, blocks.parts, strict=True)
    )
    needed = blocks.count * size
    read = np.ones_like(needed)
    for dim, (length, step) in enumerate(zip(shape, chunk, strict=True)):
        width = length // blocks.parts[dim]
        cells = [_cells(length, step, width, parts) for parts in blocks.subsets[dim]]
        covered = np.array([held.sum() for held in cells])
        read = read * covered[blocks.subset_of[dim]]
    for process, rows in blocks.irregular.items():
        read[process] = _irregular(shape, chunk, blocks.parts, rows)
    return Extent(needed, read)


def aligned_sharding(
    shape: Shape, chunk: Shape, mesh: Mesh | AbstractMesh
) -> NamedSharding:
    """A sharding over the devices of a mesh whose shards are whole chunks.

    The number of devices is split into prime factors, the outermost first, since a
    process has neighbouring devices; each factor goes to the dim with the most chunks
    left for it. Factors that fit no dim replicate.
    """
    factored = _factored(mesh)
    left = list(shape)
    dims: list[list[str]] = [[] for _ in shape]
    for name, size in _sizes(factored):
        fits = [
            at
            for at, (now, step) in enumerate(zip(left, chunk, strict=True))
            if now % size == 0 and (now // size) % step == 0
        ]
        if fits:
            best = max(fits, key=lambda at: left[at] // chunk[at])
            left[best] //= size
            dims[best].append(name)
    spec = PartitionSpec(*(tuple(axes) if axes else None for axes in dims))
    return NamedSharding(factored, spec)


# -------------------------------------------------------------------- details


@functools.lru_cache(maxsize=64)
def _factored(mesh: AnyMesh) -> AnyMesh:
    """The same devices on a mesh whose axes have prime sizes."""
    factors: list[int] = []
    for size in mesh.shape.values():
        factors += _primes(size)
    factors = factors or [1]  # a mesh without axes is none
    names = tuple(f"part{at}" for at in range(len(factors)))
    types = (AxisType.Auto,) * len(factors)
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices.reshape(factors), names, axis_types=types)
    return AbstractMesh(tuple(factors), names, axis_types=types)


@functools.lru_cache(maxsize=64)
def _sizes(mesh: AnyMesh) -> tuple[tuple[str, int], ...]:
    return tuple(mesh.shape.items())


def _primes(number: int) -> list[int]:
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors


def _dims(sharding: NamedSharding, ndim: int) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of every dim."""
    entries = (*sharding.spec, *[None] * (ndim - len(sharding.spec)))
    return tuple(
        (entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in entries
    )


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """The parts of an array that each process has, for any shape.

    `parts` counts the parts of each dim. `subsets` has, per dim, the different sets of
    parts that processes have, and `subset_of` (dim, process) which one each has.
    `count` is the number of distinct blocks of each process. `irregular` has, for
    processes whose blocks are not a product of such sets, one row of parts per block.
    """

    parts: tuple[int, ...]
    subsets: tuple[tuple[tuple[int, ...], ...], ...]
    subset_of: np.ndarray
    count: np.ndarray
    irregular: dict[int, np.ndarray]


@functools.lru_cache(maxsize=1024)
def _blocks(
    mesh: AnyMesh, dims: tuple[tuple[str, ...], ...], devices_per_process: int | None
) -> _Blocks:
    processes = processes_of(mesh, devices_per_process)
    sizes = dict(mesh.shape)
    grid = np.indices(tuple(sizes.values())).reshape(len(sizes), mesh.size)
    along = dict(zip(sizes, grid, strict=True))
    parts = tuple(math.prod(sizes[axis] for axis in axes) for axes in dims)
    at = np.zeros((mesh.size, len(dims)), np.int64)
    for dim, axes in enumerate(dims):
        for axis in axes:
            at[:, dim] = at[:, dim] * sizes[axis] + along[axis]
    known: list[dict[tuple[int, ...], int]] = [{} for _ in dims]
    subset_of = np.zeros((len(dims), processes.count), np.int64)
    count = np.zeros(processes.count, np.int64)
    irregular = {}
    order = np.argsort(processes.of_device, kind="stable")
    ends = np.cumsum(np.bincount(processes.of_device, minlength=processes.count))
    for process, own in enumerate(np.split(order, ends[:-1])):
        # NumPy 2.0.0 cannot make rows without columns unique.
        rows = np.unique(at[own], axis=0) if dims else at[own[:1]]
        count[process] = len(rows)
        combinations = 1
        for dim in range(len(dims)):
            subset = tuple(np.unique(rows[:, dim]).tolist())
            combinations *= len(subset)
            subset_of[dim, process] = known[dim].setdefault(subset, len(known[dim]))
        if combinations != len(rows):
            irregular[process] = rows
    subsets = tuple(tuple(found) for found in known)
    return _Blocks(parts, subsets, subset_of, count, irregular)


def _cells(length: int, step: int, width: int, parts: Sequence[int]) -> np.ndarray:
    """The length of each chunk of a dim; 0 for chunks that no part touches."""
    edges = np.arange(0, length, step)
    held = np.minimum(step, length - edges)
    touched = np.zeros(len(edges), bool)
    for part in parts:
        touched[part * width // step : -(-(part + 1) * width // step)] = True
    return np.where(touched, held, 0)


def _irregular(
    shape: Shape, chunk: Shape, parts: Sequence[int], rows: np.ndarray
) -> int:
    """Elements of the chunks that some blocks touch."""
    along = [
        [_cells(length, step, length // count, (part,)) for part in range(count)]
        for length, step, count in zip(shape, chunk, parts, strict=True)
    ]
    grid = [-(-length // step) for length, step in zip(shape, chunk, strict=True)]
    held = np.zeros(grid, np.int64)
    for row in rows:
        block = np.ones((1,) * len(grid), np.int64)
        for dim, part in enumerate(row):
            cells = along[dim][part]
            block = block * cells.reshape(
                [-1 if d == dim else 1 for d in range(len(grid))]
            )
        held = np.maximum(held, block)
    return int(held.sum())
