"""Compare two trees path by path and bit by bit, and errors by their text."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shards import leaves_of as by_path

import flax_layoutmap as flm


def bits(value: Any) -> Any:
    """What two equal leaves have in common, down to the bit."""
    if isinstance(value, str | bool | int | float | complex):
        return type(value), value
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(value))
        return str(value.dtype), data.shape, data.tobytes()
    array = np.asarray(value)
    return str(array.dtype), array.shape, array.tobytes()


def assert_same(got: Any, expected: Any) -> None:
    """Equal paths, and bit-equal leaves."""
    left, right = by_path(got), by_path(expected)
    assert sorted(left) == sorted(right)
    for path in left:
        assert bits(left[path]) == bits(right[path]), path


def assert_placed(tree: Any, resolution: flm.Resolution) -> None:
    """Every array lies as a Resolution says: the right part on the right device."""
    leaves = by_path(tree)
    assert sorted(leaves) == sorted(resolution.paths)
    wanted = dict(zip(resolution.paths, resolution.sharding_list(), strict=True))
    sharded = 0
    for path, leaf in leaves.items():
        if not isinstance(leaf, jax.Array):
            continue
        sharding = wanted[path]
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), path
        assert leaf.sharding.mesh == sharding.mesh, path  # pyright: ignore
        sharded += not leaf.sharding.is_fully_replicated
        places = sharding.devices_indices_map(leaf.shape)
        assert {s.device for s in leaf.addressable_shards} == set(places)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            continue
        whole = np.asarray(leaf)
        for shard in leaf.addressable_shards:
            assert shard.index == places[shard.device], path
            part = np.asarray(shard.data)
            assert part.shape == sharding.shard_shape(leaf.shape), path
            assert part.tobytes() == whole[shard.index].tobytes(), path
    assert sharded or resolution.mesh is None or resolution.mesh.size == 1


@contextlib.contextmanager
def refused(*phrases: str) -> Iterator[None]:
    """Expects one CheckpointError whose text has all the phrases."""
    with pytest.raises(flm.errors.CheckpointError) as caught:
        yield
    for phrase in phrases:
        assert phrase in str(caught.value), str(caught.value)
