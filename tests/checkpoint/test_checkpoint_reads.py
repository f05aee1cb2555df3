"""Bytes needed and bytes read, compared with brute force over every chunk."""

import itertools
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from flax_layoutmap.checkpoint._reads import (
    aligned_sharding,
    extent_of,
    processes_of,
)


def chunks_touched(shape: Any, chunk: Any, index: Any) -> set[tuple[int, ...]]:
    spans = [part.indices(length) for part, length in zip(index, shape, strict=True)]
    return set(
        itertools.product(
            *(
                range(start // step, -(-stop // step))
                for step, (start, stop, _) in zip(chunk, spans, strict=True)
            )
        )
    )


def by_hand(
    shape: Any, chunk: Any, sharding: NamedSharding, per_process: int
) -> tuple[list[int], list[int]]:
    """Needed and read elements of each process, one chunk after the other."""
    indices = sharding.devices_indices_map(shape)
    mesh: Any = sharding.mesh
    devices = list(mesh.devices.flat)
    needed, read = [], []
    for start in range(0, len(devices), per_process):
        own = [indices[device] for device in devices[start : start + per_process]]
        distinct = {
            tuple(p.indices(n) for p, n in zip(index, shape, strict=True)): index
            for index in own
        }
        needed.append(
            sum(
                math.prod(stop - start for start, stop, _ in spans)
                for spans in distinct
            )
        )
        touched = set().union(*(chunks_touched(shape, chunk, i) for i in own))
        read.append(
            sum(
                math.prod(
                    min(step, length - at * step)
                    for at, step, length in zip(cell, chunk, shape, strict=True)
                )
                for cell in touched
            )
        )
    return needed, read


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, Any, NamedSharding, int]:
    sizes, names = draw(
        st.sampled_from(
            [
                ((1,), "a"),
                ((1,), "a"),
                ((8,), "a"),
                ((2, 4), "ab"),
                ((2, 2, 2), "abc"),
                ((3, 2), "ab"),
            ]
        )
    )
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    mesh = Mesh(devices, tuple(names))
    ndim = draw(st.integers(0, 3))
    axes = draw(st.permutations(list(names)))
    dims: list[list[str]] = [[] for _ in range(ndim)]
    for axis in axes[: draw(st.integers(0, len(axes)))] if ndim else []:
        dims[draw(st.integers(0, ndim - 1))].append(axis)
    shape = tuple(
        math.prod(mesh.shape[axis] for axis in own) * draw(st.integers(1, 6))
        for own in dims
    )
    chunk = tuple(draw(st.integers(1, length)) for length in shape)
    spec = PartitionSpec(*(tuple(own) or None for own in dims))
    per_process = draw(st.sampled_from([1, 2, 3, 4, mesh.size]))
    return shape, chunk, NamedSharding(mesh, spec), per_process


@settings(max_examples=300, deadline=None)
@given(cases())
def test_every_process_reads_the_chunks_that_its_shards_touch(case: Any) -> None:
    shape, chunk, sharding, per_process = case
    found = extent_of(shape, chunk, sharding, per_process)
    needed, read = by_hand(shape, chunk, sharding, per_process)
    assert found.needed.tolist() == needed
    assert found.read.tolist() == read


@settings(max_examples=200, deadline=None)
@given(cases())
def test_an_aligned_sharding_cuts_no_chunk(case: Any) -> None:
    shape, chunk, sharding, _ = case
    aligned = aligned_sharding(shape, chunk, sharding.mesh)
    here: Any = aligned.mesh
    there: Any = sharding.mesh
    assert list(here.devices.flat) == list(there.devices.flat)
    if 0 in shape:
        return
    for index in aligned.devices_indices_map(shape).values():
        for part, step, length in zip(index, chunk, shape, strict=True):
            start, stop, _ = part.indices(length)
            assert start % step == 0 and (stop % step == 0 or stop == length)


def test_rows_are_read_once_where_columns_are_wanted() -> None:
    mesh = AbstractMesh((8,), ("x",))
    columns = NamedSharding(mesh, PartitionSpec(None, "x"))
    direct = extent_of((64, 64), (8, 64), columns, 2)
    assert direct.needed.tolist() == [1024] * 4 and direct.read.tolist() == [4096] * 4
    aligned = aligned_sharding((64, 64), (8, 64), mesh)
    # Where types are left out, Explicit ones are the default from jax 0.11.1 on.
    assert {*aligned.mesh.axis_types} == {AxisType.Auto}
    assert extent_of((64, 64), (8, 64), aligned, 2).read.tolist() == [1024] * 4


def test_processes_of_a_mesh_with_devices() -> None:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    assert processes_of(mesh, None).count == 1
    found = processes_of(mesh, 3)
    assert found.of_device.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert found.names == (0, 1, 2)


def test_bytes_in_a_database_of_several_levels(tmp_path: Path) -> None:
    """A tree of nodes: names are cut where a node's keys begin alike."""
    import tensorstore

    from flax_layoutmap.checkpoint._orbax import stored_bytes

    spec = {
        "driver": "ocdbt",
        "base": {"driver": "file", "path": f"{tmp_path}/state/"},
        "config": {"max_decoded_node_bytes": 200, "max_inline_value_bytes": 8},
    }
    store = tensorstore.KvStore.open(spec).result()
    expected: dict[str, int] = {}
    for at in range(40):
        name = f"layers.{at % 10}.kernel"
        content = bytes(20 + at)
        expected[name] = expected.get(name, 0) + len(content)
        store.write(f"{name}/c/{at}/0", content).result()
        store.write(f"{name}/zarr.json", b"{}").result()  # held in the node itself
    store.write("step/c", b"1").result()
    base = {"driver": "file", "path": f"{tmp_path}/state/"}
    opened = tensorstore.KvStore.open(base).result()
    manifest: Any = tensorstore.ocdbt.dump(opened).result()
    assert manifest["versions"][-1]["root_height"] > 1
    assert stored_bytes(str(tmp_path / "state")) == {**expected, "step": 0}
    assert stored_bytes(str(tmp_path / "nothing")) == {}
