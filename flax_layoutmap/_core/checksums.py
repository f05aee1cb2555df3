"""Checksums of leaves: the same for every sharding, mesh and number of processes.

The checksum of an array is a sum over its bits as 64-bit words `w`, modulo 2^64:

    label + Σ w · m_1(j) · m_2(i_2) · m_3(i_3) · …

`j` counts the words along the last dim (smaller elements are packed into words along
it, 16 bytes are two words), `i_2`, `i_3`, … the other dims from the last one back, and
each `m` is an odd number mixed from the index. `label` is a hash of dtype and shape.

A sum of integers does not depend on its order, so that each shard adds its part where
it is. Any change within one word, such as a flipped bit, changes the checksum; changes
of several words escape with a chance of 2^-64 if they are like random numbers; the weak
place is two flips of the last bit of words (the sign of every second float32), which
cancel. It does not protect against attacks.
"""

import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_MODULUS = 1 << 64
_ROW_BITS = 14
_ROW = 1 << _ROW_BITS
# Threads sum arrays in pieces of this size, along the first dim of at most this length.
_PIECE_BYTES, _PIECE_ROWS = 1 << 22, 1 << 17
_THREADS = 1 + min(16, os.cpu_count() or 1)
# Bits per element of dtypes that are narrower than the byte that holds them.
_PACKED = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4, "int2": 2, "uint2": 2}

_Index = tuple[int, ...]


def checksums(values: Mapping[str, Any], *, alone: bool = False) -> dict[str, str]:
    """The checksums of values, 16 hexadecimal digits each, the same on every process.

    With several processes this is a collective over the same paths in the same order;
    values that are not spread over processes count as process 0 has them. `alone` sums
    this process's own values without the others. PRNG keys count as their key data.
    """
    plain = {path: _without_keys(value) for path, value in values.items()}
    first = alone or jax.process_index() == 0
    own = {path: v for path, v in plain.items() if first or _is_spread(v)}
    on_devices = {path: v for path, v in own.items() if _is_on_accelerator(v)}
    on_host = {path: v for path, v in own.items() if path not in on_devices}
    with ThreadPoolExecutor(_THREADS) as pool:
        sums = _sum_on_host(on_host, pool)
        if on_devices:
            # In a thread, where the caller's mesh and transfer guard do not apply.
            sums |= pool.submit(_sum_on_devices, on_devices, pool).result()
    totals = [sums.get(path, 0) % _MODULUS for path in plain]
    if not alone:
        totals = _over_processes(totals)
    return {
        path: f"{(total + _label(value)) % _MODULUS:016x}"
        for (path, value), total in zip(plain.items(), totals, strict=True)
    }


def json_digest(value: Any) -> str:
    """A digest of JSON values, 16 hexadecimal digits, for any order of keys."""
    return f"{_hash(json.dumps(value, sort_keys=True)):016x}"


# ---------------------------------------------------------------- multipliers


def _mixed(at: np.ndarray, seed: int) -> np.ndarray:
    """An odd number for each index: the mixing of SplitMix64."""
    z = (at + np.uint64(seed << 48)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


@functools.lru_cache(maxsize=32)
def _mixed_row(dim: int) -> np.ndarray:
    return _mixed(np.arange(_ROW, dtype=np.uint64), 2 * dim + 1)


# Of the many leaves and pieces of a model, most have one of a few shapes.
@functools.lru_cache(maxsize=64)
def _multipliers(shape: _Index, start: _Index, dim: int) -> np.ndarray:
    """The multipliers of a block of words, flattened; `dim` is its last one.

    Dims are counted from the array's last one. An index is split into its last 14 bits
    and the rest, whose multipliers are multiplied.
    """
    row = np.ones(1, np.uint64)
    for axis, (size, first) in enumerate(zip(shape, start, strict=True)):
        own, offset = dim + len(shape) - 1 - axis, first % _ROW
        ends = first >> _ROW_BITS, ((first + size - 1) >> _ROW_BITS) + 1
        high = _mixed(np.arange(*ends, dtype=np.uint64), 2 * own + 2)
        numbers = np.multiply.outer(high, _mixed_row(own)).reshape(-1)
        row = np.multiply.outer(row, numbers[offset : offset + size]).reshape(-1)
    return row


# --------------------------------------------------------------- on the host


def _sum_on_host(values: Mapping[str, Any], pool: ThreadPoolExecutor) -> dict[str, int]:
    sums = dict.fromkeys(values, 0)
    pieces: list[tuple[str, np.ndarray, _Index]] = []
    for path, value in values.items():
        if _is_array(value):
            pieces += [(path, *piece) for piece in _pieces(value)]
        else:
            sums[path] = _hash(f"{type(value).__name__} {value!r}")
    paths, blocks, starts = zip(*pieces, strict=True) if pieces else ((), (), ())
    run = pool.map if sum(block.nbytes for block in blocks) > _PIECE_BYTES else map
    for path, total in zip(paths, run(_block_sum, blocks, starts), strict=True):
        sums[path] += total
    return sums


def _pieces(value: Any) -> Iterator[tuple[np.ndarray, _Index]]:
    """The parts of an array that this process sums, and the index where each starts."""
    blocks = [(value, (0,) * value.ndim)]
    if _is_jax(value):
        shards = _first_shards(value.sharding, value.shape)
        blocks = [(value.addressable_data(number), start) for number, start in shards]
    for array, start in blocks:
        block = np.atleast_1d(np.asarray(array))
        if block.size == 0:
            continue
        rows = min(max(1, len(block) * _PIECE_BYTES // block.nbytes), _PIECE_ROWS)
        for at in range(0, len(block), rows):
            first, *others = start or (0,)
            yield block[at : at + rows], (first + at, *others)


@functools.lru_cache(maxsize=512)
def _first_shards(sharding: Any, shape: _Index) -> list[tuple[int, _Index]]:
    """Number and start of the shards to sum here, so that each part is summed once."""
    indices = sharding.devices_indices_map(shape)
    starts = {d: tuple(part.start or 0 for part in i) for d, i in indices.items()}
    first = {start: device for device, start in reversed(starts.items())}
    here = [device for device in starts if device in sharding.addressable_devices]
    return [(n, starts[d]) for n, d in enumerate(here) if first[starts[d]] == d]


def _block_sum(block: np.ndarray, start: _Index) -> int:
    """The part of an array's sum that a block adds."""
    words, start = _words(block, start)
    shape, dim = words.shape, 0
    while shape:
        count = 1  # of dims that are summed at once: long rows are faster
        while count < len(shape) and math.prod(shape[-count - 1 :]) <= _ROW:
            count += 1
        row = _multipliers(shape[-count:], start[-count:], dim)
        # For integers einsum is faster than dot, and it lets other threads run.
        words = np.einsum("ij,j->i", words.reshape(-1, row.size), row)
        shape, start, dim = shape[:-count], start[:-count], dim + count
    return int(words[0])


def _words(block: np.ndarray, start: _Index) -> tuple[np.ndarray, _Index]:
    """The 64-bit words of a block, and the index of the first one."""
    packed = _PACKED.get(block.dtype.name)
    native = block.astype(block.dtype.newbyteorder("="), copy=False)
    block, size = np.ascontiguousarray(native), block.itemsize
    *outer, first = start
    if size >= 8:
        return block.view(np.uint64), (*outer, first * (size // 8))
    block = block.view(f"u{size}")
    if packed:
        block = block & np.uint8((1 << packed) - 1)
    per, length = 8 // size, block.shape[-1]
    before, after = first % per, -(first + length) % per
    if before or after:
        # Words at the edges are shared with other blocks, whose elements are 0 here.
        whole = np.zeros((*block.shape[:-1], before + length + after), block.dtype)
        whole[..., before : before + length] = block
        block = whole
    return block.view(np.uint64), (*outer, first // per)


# ---------------------------------------------------------------- on devices


def _is_on_accelerator(value: Any) -> bool:
    """Whether the devices that hold an array sum it; else the host does."""
    is_plain = _is_jax(value) and value.dtype.name not in _PACKED
    if not is_plain or value.size == 0 or value.dtype.itemsize > 4:
        return False
    if not value.sharding.addressable_devices:
        return False
    device = next(iter(value.sharding.device_set))
    in_own_memory = value.sharding.memory_kind in (None, device.default_memory().kind)
    return in_own_memory and device.platform != "cpu"


def _sum_on_devices(
    values: Mapping[str, Any], pool: ThreadPoolExecutor
) -> dict[str, int]:
    """The sums, each counted by the first process that has the array."""
    kinds = {path: (v.sharding, v.shape, v.dtype) for path, v in values.items()}
    # Threads compile; the programs of all processes must run in the same order.
    unlike = list(dict.fromkeys(kinds.values()))
    programs = dict(zip(unlike, pool.map(_program, unlike), strict=True))
    with jax.enable_x64(True):
        sums = {path: programs[kinds[path]](value) for path, value in values.items()}
    counted_by = {
        path: min(device.process_index for device in kinds[path][0].device_set)
        for path in sums
    }
    here = [path for path in sums if counted_by[path] == jax.process_index()]
    return {path: int(np.asarray(sums[path].addressable_data(0))) for path in here}


@functools.lru_cache(maxsize=512)
def _program(kind: tuple[Any, _Index, Any]) -> Callable[[Any], Any]:
    """The program that sums arrays; XLA divides it as they are sharded."""
    sharding, shape, dtype = kind
    *outer, last = shape or (1,)
    bits = dtype.itemsize * 8
    per = 64 // bits
    shifts = np.arange(0, 64, bits, dtype=np.uint64)
    words = _multipliers((-(-last // per),), (0,), 0)
    factors = [(words[:, None] << shifts).reshape(-1)[:last]]
    for dim, size in enumerate(reversed(outer), 1):
        factors.append(_multipliers((size,), (0,), dim))

    def total(value: Any, factors: Any) -> Any:
        value = value.astype(np.uint8) if value.dtype == np.bool_ else value
        value = value.reshape(shape or (1,))
        sums = jax.lax.bitcast_convert_type(value, f"uint{bits}").astype(np.uint64)
        for dim, factor in enumerate(factors):
            sums = sums * factor.reshape(-1, *(1,) * dim)
        return jnp.sum(sums, dtype=np.uint64)

    with jax.enable_x64(True):
        example = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        compiled = jax.jit(total).lower(example, factors).compile()
    return lambda value: compiled(value, factors)


# --------------------------------------------------------------------- pieces


def _is_jax(value: Any) -> bool:
    return isinstance(value, jax.Array)


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray | np.generic)


def _is_spread(value: Any) -> bool:
    """Whether several processes hold the parts of an array."""
    return _is_jax(value) and not value.is_fully_addressable


def _without_keys(value: Any) -> Any:
    if _is_jax(value) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(value)
    return value


def _label(value: Any) -> int:
    return _label_of(value.dtype, value.shape) if _is_array(value) else 0


@functools.lru_cache(maxsize=1024)
def _label_of(dtype: Any, shape: _Index) -> int:
    return _hash(f"{dtype.name} {shape}")


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
