"""Checksums do not depend on sharding and detect changes; restore names the leaf."""

import hashlib
import itertools
import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from same import refused

import flax_layoutmap as flm
from flax_layoutmap._core import checksums as module
from flax_layoutmap._core.checksums import checksums

# What version 0.1 recorded for the values of the test below.
OLDER = ["b36d937b0eef47cb", "85e40b2fdc894b77", "386866fdbd9fd4aa", "a3c3e528d4cf7475"]

DTYPES = [
    *("float32", "bfloat16", "float8_e4m3fn", "int8", "bool", "uint16", "int4"),
    *("float64", "complex64", "complex128"),
]
MASK = (1 << 64) - 1
LOW = (1 << 14) - 1
USED_BITS = {"int4": 15, "bool": 1}


def random(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """An array of random bits."""
    kind, rng = jnp.dtype(dtype), np.random.default_rng(seed)
    if dtype in USED_BITS:
        return np.asarray(rng.integers(0, 2, shape)).astype(kind)
    size = math.prod(shape) * kind.itemsize
    return np.frombuffer(rng.bytes(size), kind).reshape(shape)


def mixed(at: int, seed: int) -> int:
    """The multiplier of an index, in Python's own integers."""
    z = (at + (seed << 48)) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return (z ^ (z >> 31)) | 1


def by_definition(value: np.ndarray) -> str:
    """The checksum as the module's documentation has it, one word after the other."""
    label = f"{value.dtype.name} {value.shape}".encode()
    total = int.from_bytes(hashlib.blake2b(label, digest_size=8).digest(), "big")
    value = np.atleast_1d(value)
    content = value.view(np.uint8).reshape(*value.shape[:-1], -1)
    content = content & np.uint8(USED_BITS.get(value.dtype.name, 255))
    margins = [(0, 0)] * (content.ndim - 1) + [(0, -content.shape[-1] % 8)]
    for index, word in np.ndenumerate(np.pad(content, margins).view("<u8")):
        factor = 1
        for dim, i in enumerate(reversed(index)):
            factor *= mixed(i & LOW, 2 * dim + 1) * mixed(i >> 14, 2 * dim + 2)
        total += int(word) * factor
    return f"{total & MASK:016x}"


def of(value: Any) -> str:
    return checksums({"x": value})["x"]


SHAPES = st.lists(st.integers(1, 9), max_size=4).map(tuple)


@hypothesis.given(st.sampled_from(DTYPES), SHAPES)
def test_they_are_what_the_definition_says(dtype: str, shape: Any) -> None:
    value = random(dtype, shape)
    assert of(value) == by_definition(value) == of(np.copy(value, order="F"))


@pytest.mark.parametrize("shape", [(70_001,), (40_000, 3), (2, 3, 17_000)], ids=str)
def test_large_arrays_too(shape: tuple[int, ...]) -> None:
    """Indices with more than 14 bits, and in pieces."""
    value = random("float32", shape)
    with mock.patch.object(module, "_PIECE_BYTES", 100_000):
        assert of(value) == by_definition(value)


def test_those_of_older_versions_are_the_same() -> None:
    values = {
        "a": np.arange(6, dtype=np.float32),
        "b": 3,
        "c": np.zeros((0, 2)),
        "d": "x",
    }
    assert list(checksums(values).values()) == OLDER


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "complex64"])
def test_they_do_not_depend_on_the_sharding(dtype: str) -> None:
    value = random(dtype, (16, 8, 24))
    devices = np.array(jax.devices())
    grids = [devices.reshape(2, 4), devices[::-1].reshape(4, 2), devices[3:4, None]]
    specs = [(), (None, "b"), ("a", None, "b"), (None, None, ("b", "a"))]
    for grid, spec in itertools.product(grids, specs):
        mesh = Mesh(grid, ("a", "b"))
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        assert of(jax.device_put(value, sharding)) == of(value)


def test_other_values_have_other_checksums() -> None:
    value = random("float32", (64, 64))
    others = [
        *(value, np.roll(value, 1, axis=0), value.T, value[:63], value.view(np.int32)),
        *(0, True, 0.0, "", "0", np.zeros((0,)), np.zeros((0, 2))),
        *(jax.random.key(0), jnp.zeros(1), -jnp.zeros(1)),
    ]
    assert len({of(value) for value in others}) == len(others)
    assert of(jax.random.key(0)) == of(jax.random.key_data(jax.random.key(0)))


def test_a_leaf_that_is_not_as_it_was_saved_is_named(tmp_path: Path) -> None:
    rules: Any = {"layout_map": flm.LayoutMap("data=8", strict=False)}
    flm.checkpoint.save(tmp_path / "a", {"layer": {"w": jnp.arange(8.0)}, "n": 3})
    file = tmp_path / "a/_CHECKPOINT_METADATA"
    data = json.loads(file.read_text("utf-8"))
    record = data["custom_metadata"]["flax_layoutmap"]
    del record["digest"]  # which older versions did not write
    record["checksums"]["layer/w"] = "0" * 16
    file.write_text(json.dumps(data), "utf-8")
    said = ("1 problem", "- layer/w (8,): ", "not those that were saved")
    with refused(*said):
        flm.checkpoint.restore(tmp_path / "a", **rules)
    with refused(*said):
        flm.checkpoint.verify(tmp_path / "a")
    restored = flm.checkpoint.restore(tmp_path / "a", verify=False, **rules)
    assert (np.asarray(restored["layer"]["w"]) == np.arange(8)).all()
