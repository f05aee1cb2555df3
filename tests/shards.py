"""Compare the shards of each device with those computed without JAX."""

import itertools
from typing import Any

import jax
import numpy as np
from flax import nnx

import flax_layoutmap as flm
from flax_layoutmap._tree.flatten import flatten

# Per dim of an array: the mesh axes that it lies on, first the slowest.
Dims = tuple[tuple[str, ...], ...]


def bare(mesh: flm.DeviceMesh) -> Any:
    """The mesh as JAX takes it (typed as Any: it may be abstract)."""
    return mesh.jax_mesh


def grid(kind: Any = "auto") -> flm.DeviceMesh:
    """The usual mesh of eight devices, with axes of a type."""
    return flm.DeviceMesh((2, 4), ("data", "model"), axis_types=kind)


KINDS = ("auto", "explicit")


def leaves_of(tree: Any) -> dict[str, Any]:
    """Path → leaf."""
    flat = flatten(tree)
    return dict(zip(flat.full_paths(), flat.leaves, strict=True))


def plain(leaf: Any) -> np.ndarray:
    """A leaf as NumPy has it; of a PRNG key its data."""
    is_key = jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def expected_index(
    dims: Dims, shape: tuple[int, ...], mesh: flm.DeviceMesh, at: tuple[int, ...]
) -> tuple[slice, ...]:
    """The part of an array that the device at grid position `at` holds."""
    position = dict(zip(mesh.axis_names, at, strict=True))
    index = []
    for axes, size in zip(dims, shape, strict=True):
        part, parts = 0, 1
        for axis in axes:
            part = part * mesh.axis_sizes[axis] + position[axis]
            parts *= mesh.axis_sizes[axis]
        width = size // parts
        index.append(slice(part * width, (part + 1) * width))
    return tuple(index)


def on_axes_of(mesh: flm.DeviceMesh, dims: Dims) -> Dims:
    """Dims without the axes that the mesh does not have."""
    return tuple(tuple(a for a in dim if a in mesh.axis_names) for dim in dims)


def assert_lies(
    array: Any, dims: Dims, mesh: flm.DeviceMesh, value: Any = None
) -> None:
    """Every device of the mesh holds its part of the array, in bytes and in values."""
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(array)
        assert data.ndim == array.ndim + 1
        array, dims = data, (*dims, ())
    value = np.asarray(array if value is None else value)
    shards = {shard.device: shard for shard in array.addressable_shards}
    assert set(shards) == set(mesh.devices.flat)
    assert len(array.addressable_shards) == mesh.size
    for at in itertools.product(*map(range, mesh.shape)):
        shard = shards[mesh.devices[at]]
        index = expected_index(dims, array.shape, mesh, at)
        found = tuple(
            slice(*part.indices(size)[:2])
            for part, size in zip(shard.index, array.shape, strict=True)
        )
        assert found == index, (at, found, index)
        assert shard.data.nbytes == value[index].nbytes
        np.testing.assert_array_equal(np.asarray(shard.data), value[index])


def assert_as_eager(tree: Any, eager: Any, layout_map: Any) -> None:
    """The graph and the values of an eager object, in the shards of the rules."""
    if isinstance(tree, nnx.Pytree):
        assert nnx.graphdef(tree) == nnx.graphdef(eager)
    found, wanted = leaves_of(tree), leaves_of(eager)
    assert found.keys() == wanted.keys()
    for leaf, (path, other), row in zip(
        found.values(), wanted.items(), flm.resolve(eager, layout_map), strict=True
    ):
        other = (
            other if hasattr(other, "dtype") else jax.numpy.asarray(other)
        )  # a number
        assert leaf.dtype == other.dtype, path
        assert_lies(leaf, row.layout.dims(leaf.ndim), layout_map.device_mesh)
        close = plain(leaf).astype(float), plain(other).astype(float)
        np.testing.assert_allclose(*close, rtol=1e-5, err_msg=path)


def lies(array: Any, dims: Dims, mesh: flm.DeviceMesh) -> bool:
    """Whether `assert_lies` finds nothing."""
    try:
        assert_lies(array, dims, mesh)
    except AssertionError:
        return False
    return True
