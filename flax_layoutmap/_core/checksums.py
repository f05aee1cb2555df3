"""Checksums of leaves: the same for every sharding, mesh and number of processes.

The checksum of an array is a sum over its bits as 64-bit words `w`, modulo 2^64:

    label + Σ w · m_1(j) · m_2(i_2) · m_3(i_3) · …

`j` counts the words along the last dim (smaller elements are packed into words along
it, 16 bytes are two words), `i_2`, `i_3`, … the other dims from the last one back, and
each `m` is an odd number mixed from the index. `label` is a hash of dtype and shape.

A sum of integers does not depend on its order, so that each shard adds its part on the
device or host that holds it. A change that is not 0 modulo 2^64 stays so when it is
multiplied by an odd number: any change within one word, a flipped bit above all,
always changes the checksum. Changes of several words escape with a chance of 2^-64
if they are like random numbers, and of about 2^-(63 - b) if bit `b` of a word is the
lowest that any of them changes: the weak place is two flips of the last bit of words,
the sign of every second float32, which cancel. What closes it (a multiplier for each
half of a word) takes two to three times as long. It does not protect against attacks.
"""

import functools
import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_MODULUS = 1 << 64

# An index is split into `high` and `low`, its last bits, whose multipliers are in a
# table: m(i) = m_high(i >> 14) * m_low(i & (2**14 - 1)).
_SPLIT = 14
_LOW = 1 << _SPLIT

# Fewer words than these in a row make a pass over rows slow.
_SHORT = 32
# Arrays are cut into pieces of this size for the threads.
_PIECE_BYTES = 1 << 23
_THREADS = min(16, os.cpu_count() or 1)

# Devices in the host's own memory, where compiling takes longer than it saves.
_HOST_PLATFORMS = ("cpu",)

# Bits per element of dtypes that are narrower than the byte that holds them.
_PACKED = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4, "int2": 2, "uint2": 2}


def checksums(values: Mapping[str, Any], *, alone: bool = False) -> dict[str, str]:
    """The checksums of values, 16 hexadecimal digits each, the same on every process.

    With several processes this is a collective over the same paths in the same order;
    values that are not spread over processes count as process 0 has them. `alone` sums
    this process's own values without the others. PRNG keys count as their key data.
    """
    plain = {path: _without_keys(value) for path, value in values.items()}
    sums = dict.fromkeys(plain, 0)
    own = {
        path: value
        for path, value in plain.items()
        if alone or jax.process_index() == 0 or _is_spread(value)
    }
    programs = {path: _program_of(value) for path, value in own.items()}
    on_devices = {path: run for path, run in programs.items() if run is not None}
    on_host = {path: own[path] for path, run in programs.items() if run is None}
    with ThreadPoolExecutor(_THREADS) as pool:
        # In a thread, where the caller's mesh and transfer guard do not apply.
        started = pool.submit(_start_on_devices, on_devices, own)
        for path, total in _on_host(on_host, pool):
            sums[path] += total
        for path, total in pool.submit(_of_devices, started.result(), own).result():
            sums[path] += total
    totals = [total % _MODULUS for total in sums.values()]
    if not alone:
        totals = _over_processes(totals)
    return {
        path: as_text(total, value)
        for (path, value), total in zip(plain.items(), totals, strict=True)
    }


def json_digest(value: Any) -> str:
    """A digest of JSON values, 16 hexadecimal digits, for any order of keys."""
    return f"{_hash(json.dumps(value, sort_keys=True)):016x}"


def as_text(total: int, value: Any) -> str:
    """The checksum of a value, given the sum over all its blocks."""
    label = _label(value.dtype, value.shape) if _is_array(value) else 0
    return f"{(total + label) % _MODULUS:016x}"


@functools.lru_cache(maxsize=1024)
def _label(dtype: Any, shape: tuple[int, ...]) -> int:
    return _hash(f"{dtype.name} {shape}")


def block_sum(block: np.ndarray, start: Sequence[int]) -> int:
    """The part of an array's sum that a host block adds; `start` is its first index."""
    if block.size == 0:
        return 0
    if not block.dtype.isnative:
        block = block.astype(block.dtype.newbyteorder("="))
    words, first = _words(np.ascontiguousarray(block), tuple(start) or (0,))
    return _block(words, first) % _MODULUS


# ---------------------------------------------------------------- multipliers


def _mixed(at: Any, seed: int) -> Any:
    """An odd number for each index: the mixing of SplitMix64, for NumPy and for JAX."""
    z = (at + np.uint64(seed)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def _seeds(dim: int) -> tuple[int, int]:
    """Seeds for the low and high part of indices of a dim, counted from the last."""
    return (2 * dim + 1) << 48, (2 * dim + 2) << 48


@functools.lru_cache(maxsize=32)
def _low(dim: int) -> np.ndarray:
    return _mixed(np.arange(_LOW, dtype=np.uint64), _seeds(dim)[0])


@functools.lru_cache(maxsize=4096)
def _high(dim: int, number: int) -> int:
    return int(_mixed(np.array([number], np.uint64), _seeds(dim)[1])[0])


# Of the many leaves and pieces of a model, most have one of a few shapes.
@functools.lru_cache(maxsize=128)
def _table(shape: tuple[int, ...], start: tuple[int, ...], dim: int) -> np.ndarray:
    """The low multipliers of the words of a block, flattened.

    `shape` counts words in some dims, `start` has the low bits of the first index,
    `dim` is the last of these dims, counted from the array's last one.
    """
    table = np.ones(1, np.uint64)
    for axis, (size, first) in enumerate(zip(shape, start, strict=True)):
        own = _low(dim + len(shape) - 1 - axis)[first : first + size]
        table = np.multiply.outer(table, own).reshape(-1)
    return table


# --------------------------------------------------------------- on the host


def _words(
    block: np.ndarray, start: tuple[int, ...]
) -> tuple[np.ndarray, tuple[int, ...]]:
    """The words of a block, and the index of the first one."""
    size = block.dtype.itemsize
    packed = _packed_bits(block.dtype)
    if packed:
        block = block.view(np.uint8) & np.uint8((1 << packed) - 1)
    *outer, first = start
    if size >= 8:
        return block.view(np.uint64), (*outer, first * (size // 8))
    per = 8 // size
    length = block.shape[-1]
    before, after = first % per, -(first + length) % per
    if before or after:
        # Words at the edges are shared with other blocks, whose elements are 0 here.
        sizes = (*block.shape[:-1], before + length + after)
        padded = np.zeros(sizes, f"u{size}")
        padded[..., before : before + length] = block.view(f"u{size}")
        block = padded
    return block.view(np.uint64), (*outer, first // per)


@functools.lru_cache(maxsize=64)
def _packed_bits(dtype: Any) -> int:
    """Bits per element of a dtype narrower than a byte; else 0."""
    return _PACKED.get(dtype.name, 0)


def _block(words: np.ndarray, start: tuple[int, ...]) -> int:
    """The sum over a block of words, not reduced modulo 2^64.

    The block is cut at the ends of the tables of low multipliers, so that the high
    multipliers of each part are one factor.
    """
    cuts = [
        [0, *range(_LOW - first % _LOW, size, _LOW), size]
        for size, first in zip(words.shape, start, strict=True)
    ]
    total = 0
    for part in itertools.product(*map(itertools.pairwise, cuts)):
        at = [first + low for first, (low, _) in zip(start, part, strict=True)]
        factor = math.prod(
            _high(words.ndim - 1 - axis, index >> _SPLIT)
            for axis, index in enumerate(at)
        )
        low = tuple(index & (_LOW - 1) for index in at)
        box = tuple(slice(*ends) for ends in part)
        total += factor * _low_sum(words[box], low, 0)
    return total


def _low_sum(words: np.ndarray, start: tuple[int, ...], dim: int) -> int:
    """The sum of words, each times its low multipliers; `dim` is their last dim."""
    axis, row = words.ndim, 1
    while axis and (row < _SHORT or row * words.shape[axis - 1] <= _LOW):
        axis -= 1
        row *= words.shape[axis]
    table = _table(words.shape[axis:], start[axis:], dim)
    if not axis:
        return int(np.dot(words.reshape(-1), table))
    # For integers einsum is faster than dot, and it lets other threads run.
    sums = np.einsum("ij,j->i", words.reshape(-1, row), table)
    return _low_sum(
        sums.reshape(words.shape[:axis]), start[:axis], dim + words.ndim - axis
    )


def _on_host(
    values: Mapping[str, Any], pool: ThreadPoolExecutor
) -> Iterator[tuple[str, int]]:
    """(path, partial sum) of the values that are summed on the host."""
    batches: list[Future[list[tuple[str, int]]]] = []
    batch: list[tuple[str, np.ndarray, tuple[int, ...]]] = []
    held = 0
    for path, value in values.items():
        if not _is_array(value):
            yield path, _hash(f"{type(value).__name__} {value!r}")
            continue
        for block, start in _host_blocks(value):
            batch.append((path, block, start))
            held += block.nbytes
            if held >= _PIECE_BYTES:
                batches.append(pool.submit(_sums, batch))
                batch, held = [], 0
    yield from _sums(batch)
    for found in batches:
        yield from found.result()


def _sums(
    batch: Iterable[tuple[str, np.ndarray, tuple[int, ...]]],
) -> list[tuple[str, int]]:
    return [(path, block_sum(block, start)) for path, block, start in batch]


def _host_blocks(value: Any) -> Iterator[tuple[np.ndarray, tuple[int, ...]]]:
    """The blocks that this process sums, in pieces, and where each starts."""
    if not isinstance(value, jax.Array):
        yield from _pieces(np.asarray(value), (0,) * value.ndim)
        return
    for number, start in _first_holders(value.sharding, value.shape):
        yield from _pieces(np.asarray(value.addressable_data(number)), start)


@functools.lru_cache(maxsize=512)
def _first_holders(
    sharding: Any, shape: tuple[int, ...]
) -> list[tuple[int, tuple[int, ...]]]:
    """The shards of this process to sum, so that each part of an array is summed once.

    Each is its number among the addressable shards and the index where it starts.
    """
    seen, found = set(), []
    own = sharding.addressable_devices
    numbers: dict[Any, int] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        start = tuple(part.start or 0 for part in index)
        if device in own:
            numbers[device] = len(numbers)
        if start not in seen and device in own:
            found.append((numbers[device], start))
        seen.add(start)
    return found


def _pieces(
    block: np.ndarray, start: tuple[int, ...]
) -> Iterator[tuple[np.ndarray, tuple[int, ...]]]:
    if block.nbytes <= 2 * _PIECE_BYTES or block.ndim == 0:
        yield block, start
        return
    rows = max(1, len(block) * _PIECE_BYTES // block.nbytes)
    for at in range(0, len(block), rows):
        yield block[at : at + rows], (start[0] + at, *start[1:])


# ---------------------------------------------------------------- on devices

_Program = Callable[[Any], Any]


def _program_of(value: Any) -> _Program | None:
    """The program that sums an array on its devices; None if the host sums it."""
    if not isinstance(value, jax.Array) or value.size == 0:
        return None
    sharding = value.sharding
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    device = sharding.mesh.devices.flat[0]
    in_own_memory = sharding.memory_kind in (None, device.default_memory().kind)
    is_wide = value.dtype.itemsize > 4 or value.dtype.kind == "c"
    if device.platform in _HOST_PLATFORMS or not in_own_memory or is_wide:
        return None
    return program(sharding, value.shape, value.dtype)


@functools.lru_cache(maxsize=512)
def program(sharding: NamedSharding, shape: tuple[int, ...], dtype: Any) -> _Program:
    """The program that sums each shard on its device, without communication.

    Returns one number per device, in mesh order; call it with 64-bit types enabled.
    """
    spec = (*sharding.spec, *(None,) * (len(shape) - len(sharding.spec)))

    def part(shard: Any) -> Any:
        sizes = shard.shape or (1,)
        numbers, bits = _numbers(shard.reshape(sizes))
        along = zip((spec or (None,))[::-1], sizes[::-1], strict=True)
        for dim, (axes, size) in enumerate(along):
            start = jax.lax.axis_index(axes) if axes else np.int32(0)
            start = start.astype(np.uint64) * np.uint64(size)
            weights = _weights(dim, start, size, bits if dim == 0 else 64)
            numbers = jnp.sum(numbers * weights, axis=-1, dtype=np.uint64)
        return numbers[None]

    mesh = sharding.mesh
    mapped = jax.shard_map(
        part,
        mesh=mesh,
        in_specs=PartitionSpec(*spec),
        out_specs=PartitionSpec(mesh.axis_names),
        check_vma=False,
    )
    return jax.jit(mapped)


def _numbers(shard: Any) -> tuple[Any, int]:
    """The bits of each element as an integer, and the bits it takes of a word."""
    name = shard.dtype.name
    width = _packed_bits(shard.dtype) or shard.dtype.itemsize * 8
    if name == "bool":
        shard = shard.astype(np.uint8)
    own = jax.lax.bitcast_convert_type(shard, f"uint{width}")
    return own.astype(np.uint64), max(width, 8)


def _weights(dim: int, start: Any, size: int, bits: int) -> Any:
    """The multipliers of a range of elements of `bits` bits, packed into words."""
    at = jnp.arange(size, dtype=np.uint64) + start
    per = np.uint64(64 // bits)
    word, inside = at // per, at % per
    low, high = _seeds(dim)
    weights = _mixed(word & np.uint64(_LOW - 1), low)
    weights = weights * _mixed(word >> np.uint64(_SPLIT), high)
    weights = weights << (inside * np.uint64(bits % 64))
    # Otherwise XLA would compute them again for every row.
    return jax.lax.optimization_barrier(weights) if size <= _LOW else weights


def _start_on_devices(
    programs: Mapping[str, _Program], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Start all programs, and the transfers of their results to the host."""
    with jax.enable_x64(True):
        started = {path: run(values[path]) for path, run in programs.items()}
    for result in started.values():
        for shard in result.addressable_shards:
            shard.data.copy_to_host_async()
    return started


def _of_devices(
    results: Mapping[str, Any], values: Mapping[str, Any]
) -> list[tuple[str, int]]:
    """(path, partial sum) from the programs on the devices of this process."""
    return [
        (path, int(np.asarray(result.addressable_data(number))[0]))
        for path, result in results.items()
        for number, _ in _first_holders(values[path].sharding, values[path].shape)
    ]


# --------------------------------------------------------------------- pieces


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray | np.generic)


def _is_spread(value: Any) -> bool:
    """Whether several processes hold the parts of an array."""
    return isinstance(value, jax.Array) and not value.is_fully_addressable


def _without_keys(value: Any) -> Any:
    is_key = isinstance(value, jax.Array) and jnp.issubdtype(
        value.dtype, jax.dtypes.prng_key
    )
    return jax.random.key_data(value) if is_key else value


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _over_processes(sums: list[int]) -> list[int]:
    """Add up the sums of all processes."""
    if jax.process_count() == 1 or not sums:
        return sums
    from jax.experimental import multihost_utils

    # As 32-bit halves, since JAX truncates 64 bits by default.
    own = np.array(sums, np.uint64).view(np.uint32)
    gathered = np.asarray(multihost_utils.process_allgather(own))
    parts = gathered.reshape(jax.process_count(), -1).view(np.uint64)
    return [sum(part) % _MODULUS for part in parts.T.tolist()]
