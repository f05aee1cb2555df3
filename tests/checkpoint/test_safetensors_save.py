"""save_safetensors: what other readers read, and failures that leave no files."""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.flax
import safetensors.numpy
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from same import refused
from test_safetensors_reading import evaluate, pipelines

import flax_layoutmap as flm
from flax_layoutmap.checkpoint import _safetensors_write
from flax_layoutmap.checkpoint import mappings as m
from flax_layoutmap.checkpoint._mapping import Source
from flax_layoutmap.checkpoint._mapping_steps import Split

P = PartitionSpec
RNG = np.random.default_rng(0)
A = RNG.normal(size=(8, 16)).astype(np.float32)


def save(*args: Any, **options: Any) -> None:
    flm.checkpoint.save_safetensors(*args, **options)


def load(folder: Path) -> dict[str, np.ndarray]:
    """All tensors, as the package `safetensors` reads them."""
    found: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= safetensors.numpy.load_file(file)
    return found


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ------------------------------------------------------------------------ what is there


def test_one_file_that_other_readers_know(tmp_path: Path, mesh: flm.DeviceMesh) -> None:
    tree = {
        "a": {"b": jax.device_put(A, NamedSharding(mesh.jax_mesh, P("data", "model")))},
        "half": jnp.arange(5, dtype=jnp.bfloat16),
        "flags": np.array([True, False, True]),
        "step": jnp.int32(7),
        "none": np.zeros((0, 3), np.float32),
        "big": np.arange(3).astype(">i8"),
    }
    save(tmp_path / "new", tree, metadata={"made": "here"})
    assert names(tmp_path / "new") == ["model.safetensors"]
    file = tmp_path / "new" / "model.safetensors"
    with safetensors.safe_open(file, "np") as opened:
        assert opened.metadata() == {"format": "pt", "made": "here"}
    found: dict[str, Any] = safetensors.flax.load_file(file)
    assert set(found) == {"a.b", "half", "flags", "step", "none", "big"}
    np.testing.assert_array_equal(found["a.b"], A, strict=True)
    assert found["half"].dtype == jnp.bfloat16 and found["half"][3] == 3
    assert found["flags"].tolist() == [True, False, True]
    assert np.shape(found["step"]) == () and found["step"] == 7
    assert found["none"].shape == (0, 3)
    assert found["big"].tolist() == [0, 1, 2]


def test_each_tensor_begins_at_a_multiple_of_its_elements_size(tmp_path: Path) -> None:
    tree = {"a": np.ones(3, np.int8), "b": np.ones(3), "c": np.ones(1, np.float16)}
    save(tmp_path / "x.safetensors", tree)
    data = (tmp_path / "x.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    for name, size in (("a", 1), ("b", 8), ("c", 2)):
        assert header[name]["data_offsets"][0] % size == 0
    assert names(tmp_path) == ["x.safetensors"]


def test_several_files_and_their_index(tmp_path: Path) -> None:
    tree = {f"w{at}": np.full((4, 4), at, np.float32) for at in range(5)}
    told: list[tuple[int, int]] = []
    save(tmp_path, tree, max_file_bytes=130, progress=lambda *x: told.append(x))
    files = [f"model-0000{at}-of-00003.safetensors" for at in (1, 2, 3)]
    assert names(tmp_path) == [*files, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 320}
    for name, file in index["weight_map"].items():
        held = safetensors.numpy.load_file(tmp_path / file)
        np.testing.assert_array_equal(held[name], tree[name])
    assert set(index["weight_map"]) == set(tree)
    assert told == [(64 * at, 320) for at in range(1, 6)]


def test_dtype_and_selection(tmp_path: Path) -> None:
    tree = {"w": jnp.ones(3), "n": jnp.arange(3), "x": jax.random.key(0)}
    save(tmp_path, tree, dtype="bfloat16", exclude="x")
    found: dict[str, Any] = safetensors.flax.load_file(tmp_path / "model.safetensors")
    assert found["w"].dtype == jnp.bfloat16
    assert found["n"].dtype == jnp.int32
    save(tmp_path, tree, include="^n$", overwrite=True)
    assert set(load(tmp_path)) == {"n"}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_layers_of_a_sharded_stack(kind: AxisType, tmp_path: Path) -> None:
    grid = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
    value = RNG.normal(size=(4, 8, 16)).astype(np.float32)
    sharding = NamedSharding(grid, P("data", None, "model"))
    tree = {"w": jax.device_put(value, sharding)}
    save(tmp_path, tree, mapping=[("w", "h.{layer}.w", (m.transpose(), m.stack(0)))])
    found = load(tmp_path)
    assert len(found) == 4
    for at in range(4):
        np.testing.assert_array_equal(found[f"h.{at}.w"], value[at].T)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_saving_undoes_any_steps(data: st.DataObject, tmp_path: Path) -> None:
    name, steps, _, shape = data.draw(pipelines())
    if any(isinstance(step, Split) for step in steps):
        return  # of which one leaf alone makes no whole tensor
    try:
        recipe = Source((name,), steps).recipes(shape)[0]
    except ValueError:
        return
    tensors = {
        held: RNG.integers(0, 99, size).astype(np.int32)
        for held, size in recipe.shapes.items()
    }
    leaf = evaluate(name, steps, tensors)
    save(tmp_path, {"w": leaf}, mapping=[("w", name, steps)], overwrite=True)
    found = load(tmp_path)
    assert found.keys() == tensors.keys()
    for held, value in tensors.items():
        np.testing.assert_array_equal(found[held], value, strict=True)


# ---------------------------------------------------------------------- what is refused


def deleted() -> jax.Array:
    x = jnp.ones(3) + 1
    x.delete()
    return x


def mapped(*entries: Any) -> dict[str, Any]:
    return {"mapping": list(entries)}


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], tuple[str, ...]]] = {
    "a number": (lambda: {"w": 3}, {}, ("w: a Python int is no array",)),
    "keys": (
        lambda: nnx.Dropout(0.1, rngs=nnx.Rngs(0)),
        {},
        ("rngs/key: key<fry> () (PRNG keys) is no array", "nnx.Param"),
    ),
    "an object": (lambda: {"w": object()}, {}, ("w: object is no array",)),
    "abstract": (
        lambda: {"w": jax.ShapeDtypeStruct((3,), "float32")},
        {},
        ("w: it is abstract",),
    ),
    "deleted": (lambda: {"w": deleted()}, {}, ("w: it was deleted",)),
    "a single leaf": (lambda: A, {}, ("the tree is a single leaf",)),
    "nothing": (lambda: {}, {}, ("the tree holds no array",)),
    "a dtype": (
        lambda: {"w": np.ones(2, np.complex64)},
        {},
        ("w: safetensors cannot hold complex64",),
    ),
    "no entry": (
        lambda: {"w": A},
        mapped(("v", "v")),
        ("w (8,16): no entry of the mapping matches",),
    ),
    "steps": (
        lambda: {"w": A},
        mapped(("w", "w", m.stack(2))),
        ("{layer} for stack",),
    ),
    "rank": (
        lambda: {"w": A},
        mapped(("w", "w", m.rearrange("a -> a"))),
        ("w (8,16): the mapping's steps do not make this shape",),
    ),
    "two leaves, one name": (
        lambda: {"v": A, "w": A},
        mapped(("[vw]", "t")),
        ("v, w: some elements of the tensor 't' would be written twice",),
    ),
    "two shapes, one name": (
        lambda: {"v": A, "w": A[0]},
        mapped(("[vw]", "t")),
        ("w: would make the tensor 't' float32 (16,), and v float32 (8,16)",),
    ),
    "one part twice": (
        lambda: {"v": A, "w": A},
        mapped(("[vw]", "t", m.split(1, 1, 2))),
        ("v, w: some elements", "twice"),
    ),
    "a part alone": (
        lambda: {"w": A},
        mapped(("w", "t", m.split(1, 1, 2))),
        ("w: make only a part of the tensor 't' (8,32)",),
    ),
    "names that differ in the dots": (
        lambda: {"a": {"b": A}, "a.b": A},
        {},
        ("a/b, a.b: some elements of the tensor 'a.b' would be written twice",),
    ),
    "a wrong dtype": (lambda: {"w": A}, {"dtype": "int8"}, ("is not floating-point",)),
    "no dtype": (lambda: {"w": A}, {"dtype": "floaty"}, ("is no dtype",)),
    "nothing found": (lambda: {"w": A}, {"include": "x"}, ("finds no leaf",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_tree_that_is_refused(name: str, tmp_path: Path) -> None:
    make, options, texts = REFUSED[name]
    with refused(*texts):
        save(tmp_path / "new", make(), **options)
    assert names(tmp_path) == []


def test_inside_of_jit(tmp_path: Path) -> None:
    with refused("w: it is traced"):
        jax.jit(lambda x: save(tmp_path, {"w": x}))(A)


def test_what_is_there_is_replaced_only_on_request(tmp_path: Path) -> None:
    tree = {f"w{at}": A + at for at in range(3)}
    save(tmp_path, tree, max_file_bytes=1)
    (tmp_path / "config.json").write_text("{}")
    save_file = tmp_path / "adapter.safetensors"
    save(save_file, {"adapter": A})
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    with refused("00001-of-00003.safetensors exists"):
        save(tmp_path, {"w": A})
    with refused("adapter.safetensors exists; save to"):
        save(save_file, {"w": A})
    assert {n: (tmp_path / n).read_bytes() for n in names(tmp_path)} == before
    save(tmp_path, {"w": A}, overwrite=True)
    assert names(tmp_path) == [
        "adapter.safetensors",
        "config.json",
        "model.safetensors",
    ]
    save(save_file, {"w": A + 1}, overwrite=True)
    np.testing.assert_array_equal(safetensors.numpy.load_file(save_file)["w"], A + 1)


def test_places_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with refused("is a file, not a directory"):
        save(tmp_path / "file", {"w": A})
    monkeypatch.setattr(_safetensors_write.os, "access", lambda path, mode: False)
    with pytest.raises(
        flm.errors.CheckpointError, match=f"{tmp_path} cannot be written to"
    ):
        save(tmp_path / "a" / "b", {"w": A})
    with refused("local files only, not at gs://"):
        save("gs://bucket/model", {"w": A})


# --------------------------------------------------------------- failures in the middle


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("at", [1, 5])
def test_a_full_disk_leaves_nothing_behind(
    existing: bool, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {f"w{number}": A + number for number in range(4)}
    folder = tmp_path / "made"
    if existing:
        save(folder, {"old": A})
    before = {name: (folder / name).read_bytes() for name in existing and names(folder)
              or ()}  # fmt: skip
    plain, calls = _safetensors_write.os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == at:
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(descriptor)

    monkeypatch.setattr(_safetensors_write.os, "fsync", full)
    with refused(str(folder), "No space left on device", "nothing was left behind"):
        save(folder, tree, max_file_bytes=600, overwrite=True)
    assert len(calls) == at
    if existing:
        assert {n: (folder / n).read_bytes() for n in names(folder)} == before
    else:
        assert names(tmp_path) == []


def test_too_little_space_is_seen_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 100

    monkeypatch.setattr(_safetensors_write.shutil, "disk_usage", lambda path: Usage)
    with pytest.raises(
        flm.errors.CheckpointError, match="512 bytes are to be .* 100 are free"
    ):
        save(tmp_path / "made", {"w": A})
    assert names(tmp_path) == []


def test_a_program_that_stops_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(BaseException):
        pass

    def stop(done: int, total: int) -> None:
        raise Stop

    with pytest.raises(Stop):
        save(tmp_path / "made", {"v": A, "w": A}, progress=stop)
    assert names(tmp_path) == []


def test_what_a_killed_save_left_does_no_harm(
    tmp_path: Path, mesh: flm.DeviceMesh
) -> None:
    save(tmp_path, {"old": A})
    unfinished = tmp_path / ".model.unfinished"
    unfinished.mkdir()
    (unfinished / "model-00001-of-00009.safetensors").write_bytes(b"half")
    found = flm.checkpoint.restore_safetensors(
        tmp_path, layout_map=flm.LayoutMap(mesh, strict=False)
    )
    assert set(found) == {"old"}
    save(tmp_path, {"v": A, "w": A}, max_file_bytes=1, overwrite=True)
    assert set(load(tmp_path)) == {"v", "w"}
    assert len(names(tmp_path)) == 3
