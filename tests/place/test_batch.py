"""Host batches: global arrays over the batch axes, and padding with a mask."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import NamedSharding, PartitionSpec
from multiprocess import launch
from shards import assert_lies, bare

import flax_layoutmap as flm
from flax_layoutmap._core.jax_internals import memory_of
from flax_layoutmap._place.batch import has_rows


@pytest.fixture(scope="module")
def layout_map(mesh: flm.DeviceMesh) -> flm.LayoutMap:
    """No rules; batches lie on 'data', of size 2."""
    return flm.LayoutMap(mesh, strict=False)


@pytest.fixture(scope="module")
def wide(mesh: flm.DeviceMesh) -> flm.LayoutMap:
    """Batches lie on all eight devices."""
    return flm.LayoutMap(mesh, batch=("model", "data"), strict=False)


# --------------------------------------------------------- distribute_batch


def test_rows_are_split_and_all_else_is_whole(
    mesh: flm.DeviceMesh, layout_map: flm.LayoutMap, wide: flm.LayoutMap
) -> None:
    x = np.arange(96, dtype=np.float32).reshape(8, 12)
    batch = {"x": x, "y": [x[:, :3, None], None], "n": 3, "lr": np.float32(0.5)}
    made = flm.distribute_batch(batch, layout_map)
    assert_lies(made["x"], (("data",), ()), mesh, x)
    assert_lies(made["y"][0], (("data",), (), ()), mesh, x[:, :3, None])
    assert made["y"][1] is None
    assert_lies(made["n"], (), mesh, np.int32(3))
    assert_lies(made["lr"], (), mesh, batch["lr"])
    made = flm.distribute_batch((x,), wide.freeze())
    assert_lies(made[0], (("model", "data"), ()), mesh, x)
    no_axis = flm.LayoutMap(mesh, batch=())
    assert_lies(flm.distribute_batch(x[:5], no_axis), ((), ()), mesh, x[:5])


def test_keys_are_replicated(mesh: flm.DeviceMesh, layout_map: flm.LayoutMap) -> None:
    batch = {
        "key": jax.random.key(1),
        "keys": jax.random.split(jax.random.key(1), 8),
        "old": jax.random.PRNGKey(1),
        "labels": np.array([5, 6], np.uint32),  # NumPy's are rows, whatever their shape
    }
    made = flm.distribute_batch(batch, layout_map)
    assert_lies(made["key"], (), mesh)
    assert_lies(made["keys"], ((),), mesh)
    assert_lies(made["old"], ((),), mesh, batch["old"])
    assert_lies(made["labels"], (("data",),), mesh, batch["labels"])
    assert made["key"].dtype == batch["key"].dtype
    numbers = jax.numpy.arange(4, dtype=jnp.int32)
    assert [has_rows(x) for x in (*batch.values(), numbers, 3, np.float32(3))] == [
        *(False, False, False, True, True, False, False)
    ]


def test_arrays_are_moved_and_those_that_are_there_are_not_copied(
    mesh: flm.DeviceMesh, layout_map: flm.LayoutMap
) -> None:
    host = np.arange(32, dtype=np.float32).reshape(8, 4)
    other = flm.DeviceMesh("x=4", devices=jax.devices()[4:])
    # The same place in another spelling.
    longer = NamedSharding(bare(mesh), PartitionSpec("data", None))
    sources = {
        "uncommitted": jnp.asarray(host),
        "on one device": jax.device_put(host, jax.devices()[5]),
        "on the mesh": flm.distribute_tensor(
            host, flm.TensorLayout((None, "model"), mesh)
        ),
        "on another mesh": flm.distribute_tensor(
            host, flm.TensorLayout(("x", None), other)
        ),
        "there": jax.device_put(host, longer),
    }
    made = flm.distribute_batch(sources, layout_map)
    for name, array in made.items():
        assert_lies(array, (("data",), ()), mesh, host)
        assert not sources[name].is_deleted()
    shards = (made["there"].addressable_shards, sources["there"].addressable_shards)
    for new, old in zip(*shards, strict=True):
        assert memory_of(old.data) == memory_of(new.data)
    again = flm.distribute_batch(made, layout_map)
    assert all(again[name] is made[name] for name in made)


class Loaded:
    """An array of another library, as a data loader may give it."""

    def __init__(self, value: np.ndarray) -> None:
        self.value = value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.value


def test_arrays_of_other_libraries(
    mesh: flm.DeviceMesh, layout_map: flm.LayoutMap
) -> None:
    host = np.arange(6, dtype=np.int32).reshape(3, 2)
    padded, mask = flm.pad_batch({"x": Loaded(host)}, layout_map)
    assert padded["x"].tolist() == [[0, 1], [2, 3], [4, 5], [4, 5]]
    made = flm.distribute_batch({"x": Loaded(padded["x"])}, layout_map)
    assert_lies(made["x"], (("data",), ()), mesh, padded["x"])


def test_a_jitted_step_takes_it_as_it_is() -> None:
    """The same program for every batch, the padded one too."""
    layout_map = flm.LayoutMap("data=4,model=2")
    traced = []

    @flm.jit(layout_map=layout_map)
    def mean(batch: dict[str, Any], mask: jax.Array) -> Any:
        traced.append(batch["x"].shape)
        return batch["x"].sum(axis=1).mean(where=mask)

    for count in (8, 8, 5):
        x = np.random.default_rng(count).normal(size=(count, 3)).astype(np.float32)
        padded = flm.pad_batch({"x": x}, layout_map, size=8)
        batch, mask = flm.distribute_batch(padded, layout_map)
        np.testing.assert_allclose(mean(batch, mask), x.sum(1).mean(), rtol=1e-5)
    assert traced == [(8, 3)]


# ---------------------------------------------------------------- pad_batch


def test_padding_by_a_map(layout_map: flm.LayoutMap, wide: flm.LayoutMap) -> None:
    x = np.arange(9, dtype=np.int8).reshape(3, 3)
    padded, mask = flm.pad_batch((x, x[:, 0], 7), layout_map)
    assert padded[0].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [6, 7, 8]]
    assert padded[1].tolist() == [0, 3, 6, 6] and padded[2] == 7
    assert mask.dtype == np.bool_ and mask.tolist() == [True] * 3 + [False]
    assert len(flm.pad_batch(x, wide)[1]) == 8


def test_padding_by_a_number_and_to_a_size(abstract_mesh: flm.DeviceMesh) -> None:
    x = np.ones((5, 2))
    assert flm.pad_batch(x, 4)[0].shape == (8, 2)
    assert flm.pad_batch(x, np.int64(3))[0].shape == (6, 2)
    assert flm.pad_batch(x, size=7)[0].shape == (7, 2)
    assert flm.pad_batch(x, 4, size=12)[0].shape == (12, 2)
    planned = flm.LayoutMap(abstract_mesh, batch=("data", "model"))
    assert flm.pad_batch(x, planned)[0].shape == (8, 2)  # needs no devices


def test_what_divides_is_not_copied(layout_map: flm.LayoutMap) -> None:
    batch = {"x": np.ones((4, 2)), "y": jnp.ones(4), "z": Loaded(np.ones(4))}
    padded, mask = flm.pad_batch(batch, layout_map)
    assert padded is batch
    assert mask.tolist() == [True] * 4
    assert flm.pad_batch(batch, 4, size=4)[0] is batch


def test_what_is_refused(layout_map: flm.LayoutMap) -> None:
    masked = np.ma.masked_array(np.arange(6.0), mask=[False, True] * 3)
    with pytest.raises(flm.LayoutError, match="x: a masked array, whose mask"):
        flm.pad_batch({"x": masked}, 4)
    step = jax.jit(lambda x: flm.distribute_batch({"x": x}, layout_map))
    with pytest.raises(flm.LayoutError, match=r"x: a traced value \(4,\)"):
        step(np.ones(4))


def test_a_process_without_rows(layout_map: flm.LayoutMap) -> None:
    empty = np.ones((0, 3), np.float32)
    padded, mask = flm.pad_batch(empty, layout_map, size=4)
    assert padded.shape == (4, 3) and not padded.any() and not mask.any()
    padded, mask = flm.pad_batch(empty, layout_map)
    assert padded is empty and mask.shape == (0,)


ARRAYS = st.integers(0, 9).flatmap(
    lambda rows: st.dictionaries(
        st.sampled_from("abc"),
        hnp.arrays(
            st.sampled_from(["float32", "int8", "bool", "complex64", "uint32"]),
            hnp.array_shapes(min_dims=0, max_dims=2, max_side=3).map(
                lambda rest: (rows, *rest)
            ),
        ),
        min_size=1,
    )
)


@settings(max_examples=60)
@given(ARRAYS, st.integers(1, 6))
def test_the_mask_gives_the_original_back(
    batch: dict[str, np.ndarray], multiple: int
) -> None:
    rows = len(next(iter(batch.values())))
    padded, mask = flm.pad_batch(batch, multiple)
    assert len(mask) % multiple == 0 and rows <= len(mask) < rows + multiple
    assert mask.sum() == rows and mask[:rows].all()
    for name, host in batch.items():
        assert padded[name].shape == (len(mask), *host.shape[1:])
        assert padded[name].dtype == host.dtype
        np.testing.assert_array_equal(padded[name][mask], host)
        added = padded[name][~mask]
        expected = host[-1:] if rows else np.zeros_like(added)
        np.testing.assert_array_equal(added, np.broadcast_to(expected, added.shape))


# ------------------------------------------------------ several processes

OWN_ROWS = (
    "LayoutError: the batch does not divide over the batch axes ('data',): dim 0 of "
    "size 7 is not divisible by 4, as this process fills 4 of the 8 parts; pad it, "
    "batch, mask = flm.pad_batch(batch, layout_map), or drop the rest"
)
ALL_ROWS = (
    "LayoutError: the batch does not divide over the batch axes ('data',): dim 0 of "
    "size 5 is not divisible by mesh axis 'data' of size 8; pad it, batch, mask = "
    'flm.pad_batch(batch, layout_map, rows="global"), or drop the rest'
)
NO_DEVICE = (
    "MeshError: process 1 has no device on the mesh of the rules; use a mesh over all "
    "processes, or call distribute_batch only in the processes [0]"
)
GLOBAL_ROWS = "\n  - a (16,), global already\n  - b (16,), of 32 rows in all\n"


@pytest.mark.multiprocess
@pytest.mark.parametrize("job_part", ["batches-2"], indirect=True)
def test_two_processes_pass_their_rows(job_part: launch.Part) -> None:
    launch.all_hold(job_part.ended, 21)
    first, second = (one.answer["cases"] for one in job_part.ended)
    # The one that fails has its own error, and the other is told.
    assert second.pop("rows that do not divide") == OWN_ROWS
    text = f"process 1 failed: {OWN_ROWS}"
    assert text in first.pop("rows that do not divide")
    assert second.pop("without a device") == NO_DEVICE
    assert first.pop("without a device") == "fine"
    assert first == second and first["all rows"] == ALL_ROWS
    assert GLOBAL_ROWS in first["a global array of other rows"]
    text = "\n  - flags: a global array (16,); pad first, distribute then\n"
    assert text in first["padding a global array"]
    text = "but they hold {0: [0, 1, 2], 1: [0, 2, 3]}; use"
    assert text in first["overlapping"]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("job_part", ["batches-4"], indirect=True)
def test_four_processes_of_which_two_hold_one_part(job_part: launch.Part) -> None:
    launch.all_hold(job_part.ended, 9)
