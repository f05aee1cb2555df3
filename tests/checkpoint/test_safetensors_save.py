"""save_safetensors: what other readers read, and whole models whatever happens."""

import builtins
import contextlib
import errno
import itertools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.flax
import safetensors.numpy
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from same import refused

import flax_layoutmap as flm
from flax_layoutmap.checkpoint import mappings as m

P = PartitionSpec
RNG = np.random.default_rng(0)
A = RNG.normal(size=(8, 16)).astype(np.float32)
save = flm.checkpoint.save_safetensors


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
    # Each tensor begins at a multiple of the size of its elements.
    length = int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8 : 8 + length])
    for name, size in (("big", 8), ("a.b", 4), ("half", 2)):
        assert (8 + length + header[name]["data_offsets"][0]) % size == 0


def test_several_files_and_their_index(tmp_path: Path) -> None:
    tree = {f"w{at}": np.full((4, 4), at, np.float32) for at in range(5)}
    save(tmp_path, tree, max_file_bytes=130)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 320}
    assert set(index["weight_map"]) == set(tree)
    files = set(index["weight_map"].values())
    assert len(files) == 3 and len(names(tmp_path)) == 4
    for name, file in index["weight_map"].items():
        held = safetensors.numpy.load_file(tmp_path / file)
        np.testing.assert_array_equal(held[name], tree[name])


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


# ---------------------------------------------------------------------- what is refused


KEYS = {"key": jax.eval_shape(lambda: jax.random.key(0))}
SPLIT = m.split(1, 1, 2)
REFUSED: list[tuple[Any, Any, str]] = [
    ({"__metadata__": A}, None, "names the texts of the"),
    ({"w": 3}, None, "w (): a Python int is not an array"),
    (KEYS, None, "key (): key<fry> () (PRNG keys) is not an array"),
    ({"w": jax.ShapeDtypeStruct((3,), "int8")}, None, "w (3,): it is abstract"),
    (A, None, "the tree is a single leaf"),
    ({}, None, "the tree holds no array"),
    ({"w": np.ones(2, jnp.int4)}, None, "w (2,): safetensors cannot hold int4"),
    ({"w": A}, ("w", "w_blocks", m.dequantize("mxfp4")), "cannot be saved in MXFP4"),
    ({"w": A}, ("v", "v"), "w (8,16): no entry of the mapping"),
    ({"v": A, "w": A}, ("[vw]", "t"), "v, w: would both write the tensor 't'"),
    (
        {"v": A, "w": A},
        ("[vw]", "t", SPLIT),
        "v, w: do not make the tensor 't' (8,32), each",
    ),
    ({"w": A}, ("w", "t", SPLIT), "w: do not make the tensor 't' (8,32), each"),
]


@pytest.mark.parametrize(("tree", "entry", "text"), REFUSED)
def test_a_tree_that_is_refused(
    tree: Any, entry: Any, text: str, tmp_path: Path
) -> None:
    with refused(text):
        save(tmp_path / "new", tree, mapping=None if entry is None else [entry])
    assert names(tmp_path) == []


def test_what_is_there_is_replaced_only_on_request(tmp_path: Path) -> None:
    save(tmp_path, {f"w{at}": A + at for at in range(3)}, max_file_bytes=1)
    (tmp_path / "config.json").write_text("{}")
    adapter = tmp_path / "adapter.safetensors"
    save(adapter, {"adapter": A})
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    with refused("00001-of-00003.safetensors exists"):
        save(tmp_path, {"w": A})
    with refused("adapter.safetensors exists; save to"):
        save(adapter, {"w": A})
    assert {n: (tmp_path / n).read_bytes() for n in names(tmp_path)} == before
    save(tmp_path, {"w": A}, overwrite=True)
    kept = ["adapter.safetensors", "config.json", "model.safetensors"]
    assert names(tmp_path) == kept
    save(adapter, {"w": A + 1}, overwrite=True)
    np.testing.assert_array_equal(safetensors.numpy.load_file(adapter)["w"], A + 1)


def test_places_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused("is a file, not a directory"):
        save(tmp_path / "file", {"w": A})
    with refused("cannot save to", "Not a directory"):
        save(tmp_path / "file" / "below", {"w": A})


# --------------------------------------------------------------- failures in the middle

CALLS = [(os, name) for name in ("replace", "remove", "mkdir", "fsync", "rmdir")]
CALLS += [(os, "makedirs"), (os, "unlink"), (builtins, "open")]


@contextlib.contextmanager
def failing(at: int, error: BaseException, after: bool) -> Iterator[list[str]]:
    """Raises in call number `at` to the file system, before or after its work."""
    seen: list[str] = []

    def patched(name: str, plain: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            seen.append(name)
            is_it = len(seen) == at + 1
            if is_it and not after:
                raise error
            result = plain(*args, **options)
            if is_it:
                raise error
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module, name in CALLS:
            patch.setattr(module, name, patched(name, getattr(module, name)))
        yield seen


def model(value: int, files: int) -> dict[str, np.ndarray]:
    return {f"w{at}": np.full(4, value, np.float32) for at in range(files)}


def value_of(folder: Path) -> int | None:
    """The value of the model in a folder, which must be whole; None without a model."""
    rules = flm.LayoutMap("data=-1", strict=False)
    try:
        found: Any = flm.checkpoint.restore_safetensors(folder, layout_map=rules)
    except flm.errors.CheckpointError as error:
        assert "no .safetensors files" in str(error) or "no file or dir" in str(error)
        return None
    [value] = {float(x) for leaf in found.values() for x in np.asarray(leaf)}
    assert len(found) == {1: 1, 2: 3, 3: 1, 4: 3}[int(value)]
    return int(value)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("old", [None, 1, 2])
@pytest.mark.parametrize("new", [3, 4])
def test_the_old_model_or_the_new_one_whatever_fails(
    old: int | None, new: int, after: bool, tmp_path: Path
) -> None:
    """1 and 3 are models in one file, 2 and 4 in three."""
    errors = (KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device"))
    values = set()
    for error, at in itertools.product(errors, range(1000)):
        folder = tmp_path / f"{type(error).__name__}-{at}"
        if old is not None:
            save(folder, model(old, 1 if old == 1 else 3), max_file_bytes=16)
            (folder / "mine.json").write_text("{}")
        options = {"max_file_bytes": 16, "overwrite": True}
        arrays = model(new, 1 if new == 3 else 3)
        said: BaseException | None = None
        with failing(at, error, after) as seen:
            try:
                save(folder, arrays, **options)
            except (KeyboardInterrupt, flm.errors.CheckpointError) as caught:
                said = caught
        value = value_of(folder)
        values.add(value)
        assert value == new or (value == old and said is not None), seen
        # The next save succeeds, and leaves nothing else behind.
        save(folder, arrays, **options)
        assert value_of(folder) == new
        rest = [n for n in names(folder) if not n.startswith(".")]
        expected = (1 if new == 3 else 4) + (old is not None)
        assert len(rest) == expected, rest
        assert (folder / "mine.json").exists() == (old is not None)
        if len(seen) <= at:
            break
    assert values == {old, new}


EXPORT = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
import flax_layoutmap as flm

path, value, files, rounds = Path(sys.argv[1]), *map(int, sys.argv[2:])
replace = os.replace
os.replace = lambda *args: (time.sleep(0.01), replace(*args))
if not rounds:
    os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
model = {f"w{at}": np.full(4, value, np.float32) for at in range(files)}
options = {"max_file_bytes": 16, "overwrite": True}
for number in range(rounds or 1):
    (path / f"{number}-{value}").touch()
    while rounds and len(list(path.glob(f"{number}-*"))) < 2:
        time.sleep(0.001)
    flm.checkpoint.save_safetensors(path / f"model{number}", model, **options)
"""


def exports(path: Path, *models: tuple[int, int], rounds: int = 0) -> list[int]:
    """Exit codes of processes that export at once; without rounds they are killed."""
    started = []
    for value, files in models:
        args = ["-c", EXPORT, *map(str, (path, value, files, rounds))]
        out, err = path / f"{value}.out", path / f"{value}.err"
        started.append(forks.Process(args, {}, out, err))
    return [process.wait() for process in started]


@pytest.mark.parametrize("other", [(1, 1), (2, 3)], ids=["a file", "files"])
def test_two_processes_that_export_at_once_leave_one_whole_model(
    other: tuple[int, int], tmp_path: Path
) -> None:
    assert exports(tmp_path, other, (4, 3), rounds=6) == [0, 0]
    for folder in tmp_path.glob("model*"):
        value = value_of(folder)
        assert value in (other[0], 4)
        assert len(names(folder)) == (1 if value == 1 else 4)


def test_what_a_killed_export_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "model0"
    assert exports(tmp_path, (2, 3)) == [-signal.SIGKILL]
    [left] = names(folder)
    assert left.endswith(".unfinished")
    save(folder, model(1, 1))
    assert names(folder) == ["model.safetensors"]
