"""Checksums of leaves: the same for every sharding, mesh and number of processes.

The checksum of an array is a sum over its bits as 64-bit words `w`, modulo 2^64:

    label + Σ w · m_1(j) · m_2(i_2) · m_3(i_3) · …

`j` is the index of the word along the last dim (smaller elements are packed into words,
16-byte elements take two), `i_2`, `i_3`, … are the indices along the other dims from
last to first, and each `m` is an odd number hashed from the index. `label` is a hash of
dtype and shape.

Each process sums its own shards with NumPy; shards on accelerators are copied to the
host first. A change within one word, such as a flipped bit, always changes the
checksum. Random changes to several words go unnoticed with probability 2^-64, but
flipping the top bits of two words cancels out.
"""

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_MODULUS = 1 << 64
_ROW_BITS = 14
_ROW = 1 << _ROW_BITS
# Arrays are summed in pieces of this size, along the first dim of at most this length.
_PIECE_BYTES, _PIECE_ROWS = 1 << 22, 1 << 17
_THREADS = 1 + min(16, os.cpu_count() or 1)
# Bits per element of dtypes that are narrower than the byte that holds them.
_PACKED = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4, "int2": 2, "uint2": 2}

_Index = tuple[int, ...]


def checksums(values: Mapping[str, Any], *, alone: bool = False) -> dict[str, str]:
    """The checksums of values, 16 hexadecimal digits each, the same on every process.

    With several processes this is a collective: all must pass the same paths in the
    same order. For values that do not span processes, process 0's count. `alone` sums
    only this process's values. PRNG keys count as their key data.
    """
    plain = {path: _without_keys(value) for path, value in values.items()}
    is_first = alone or jax.process_index() == 0
    counted = [
        value if is_first or not getattr(value, "is_fully_addressable", True) else None
        for value in plain.values()
    ]
    # In threads, where the caller's mesh and transfer guard do not apply.
    with ThreadPoolExecutor(_THREADS) as pool:
        sums = np.array([*pool.map(_leaf_sum, counted)], np.uint64)
    if plain and not alone and jax.process_count() > 1:
        from jax.experimental import multihost_utils

        with jax.enable_x64(True):
            sums = multihost_utils.process_allgather(sums).reshape(-1, len(sums)).sum(0)
    return {
        path: f"{(_label(value) + total) % _MODULUS:016x}"
        for (path, value), total in zip(plain.items(), sums.tolist(), strict=True)
    }


def json_digest(value: Any) -> str:
    """A digest of JSON values, 16 hexadecimal digits, whatever the order of keys."""
    return f"{_hash(json.dumps(value, sort_keys=True)):016x}"


@functools.lru_cache(maxsize=1024)
def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _label(value: Any) -> int:
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return _hash(f"{value.dtype.name} {value.shape}")
    return _hash(f"{type(value).__name__} {value!r}")


def _without_keys(value: Any) -> Any:
    dtype = getattr(value, "dtype", None)
    is_key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return jax.random.key_data(value) if is_key else value


def _leaf_sum(value: Any) -> int:
    """The sum over this process's shards; replicas of a shard count once per job."""
    if isinstance(value, np.ndarray | np.generic):
        return _array_sum(value, (0,) * value.ndim) % _MODULUS
    sums = (
        _array_sum(shard.data, tuple(part.start or 0 for part in shard.index))
        for shard in getattr(value, "addressable_shards", ())
        if shard.replica_id == 0
    )
    return sum(sums) % _MODULUS


def _array_sum(array: Any, start: _Index) -> int:
    """The sum of an array that starts at the index `start` of its leaf."""
    if not array.size:
        return 0
    block, (first, *others) = np.atleast_1d(on_host(array)), start or (0,)
    rows = min(max(1, len(block) * _PIECE_BYTES // block.nbytes), _PIECE_ROWS)
    return sum(
        _block_sum(block[at : at + rows], (first + at, *others))
        for at in range(0, len(block), rows)
    )


def on_host(array: Any) -> np.ndarray:
    """The values of a NumPy array, or of a JAX array on one device."""
    if isinstance(array, jax.Array) and next(iter(array.devices())).platform != "cpu":
        # JAX keeps the host copy as long as the Array object; this one is short-lived.
        args = array.shape, array.sharding, [array]
        array = jax.make_array_from_single_device_arrays(*args)
    return np.asarray(array)


# ---------------------------------------------------------------- multipliers


def _mixed(at: np.ndarray, seed: int) -> np.ndarray:
    """An odd number for each index: the mixing of SplitMix64."""
    z = (at + np.uint64(seed << 48)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


# Most of the many leaves and pieces of a model have one of a few shapes.
@functools.lru_cache(maxsize=64)
def _multipliers(size: int, start: int, dim: int) -> np.ndarray:
    """The multipliers of some indices of a dim; the last dim of an array is dim 0.

    Each is the product of a number for the last 14 bits and one for the other bits.
    """
    at = np.arange(start, start + size, dtype=np.uint64)
    low, high = at % np.uint64(_ROW), at >> np.uint64(_ROW_BITS)
    return _mixed(low, 2 * dim + 1) * _mixed(high, 2 * dim + 2)


def _block_sum(block: np.ndarray, start: _Index) -> int:
    words, start = _words(block, start)
    dims = range(words.ndim)[::-1]
    *outer, row = map(_multipliers, words.shape, start, dims)
    while outer and outer[-1].size * row.size <= _ROW:  # long rows are faster
        row = np.multiply.outer(outer.pop(), row).reshape(-1)
    # For integers einsum is faster than dot, and it lets other threads run.
    sums = np.einsum("ij,j->i", words.reshape(-1, row.size), row)
    for factors in reversed(outer):
        sums = np.einsum("ij,j->i", sums.reshape(-1, factors.size), factors)
    return int(sums[0])


def _words(block: np.ndarray, start: _Index) -> tuple[np.ndarray, _Index]:
    """The 64-bit words of a block, and the index of the first one."""
    packed = _PACKED.get(block.dtype.name)
    block = np.ascontiguousarray(block, block.dtype.newbyteorder("="))
    *outer, first = start
    size = block.itemsize
    if size >= 8:
        return block.view(np.uint64), (*outer, first * (size // 8))
    block = block.view(f"u{size}")
    if packed:
        block = block & np.uint8((1 << packed) - 1)
    per, length = 8 // size, block.shape[-1]
    before, after = first % per, -(first + length) % per
    if before or after:
        # Words at the edges are shared with other blocks, whose elements are 0 here.
        edges = [(0, 0)] * (block.ndim - 1)
        block = np.pad(block, [*edges, (before, after)])
    return block.view(np.uint64), (*outer, first // per)
