"""Each file of a checkpoint removed, cut, zeroed and with a bit flipped; other places.

A damaged checkpoint raises a CheckpointError that names it, or, where the file is not
needed, restores the right values; never wrong ones.
"""

import contextlib
import gc
import json
import shutil
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from same import refused

import flax_layoutmap as flm
from flax_layoutmap.checkpoint import _orbax

# Orbax abandons its other reads when one fails, and Python says so.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
]

ERROR, VALUES, EITHER = "an error", "the values", "one or the other"

# File → what comes of removing it, and of cutting or zeroing it. The first that fits
# counts. Which files below `d` are still in use, only OCDBT knows.
FILES = {
    "_CHECKPOINT_METADATA": (ERROR, ERROR),
    "commit_success.txt": (VALUES, VALUES),
    "orbax.checkpoint": (VALUES, VALUES),
    "state/_METADATA": (ERROR, ERROR),
    "state/_strings.json": (ERROR, ERROR),
    "state/manifest.ocdbt": (ERROR, ERROR),
    # Holds the implementation of PRNG keys, which is in our metadata as well.
    "state/array_metadatas/process_0": (VALUES, ERROR),
    "state/d/*": (ERROR, ERROR),
    "state/ocdbt.process_0/manifest.ocdbt": (VALUES, VALUES),
    "state/ocdbt.process_0/d/*": (EITHER, EITHER),
}

DAMAGES: dict[str, Callable[[Path], object]] = {
    "removed": Path.unlink,
    "cut": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "zeroed": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "emptied": lambda file: file.write_bytes(b""),
}


def tree() -> dict[str, Any]:
    """All kinds of leaves; arrays in the index (small) and in files of their own."""
    numbers = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    return {
        "large": {"w": jnp.asarray(numbers)},
        "small": jnp.arange(3),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 2),
        "empty": jnp.zeros((0, 2)),
        "step": 12345678901,
        "flag": True,
        "text": "hello",
    }


def layout_map() -> flm.LayoutMap:
    rules = flm.LayoutMap(flm.DeviceMesh("data=2,model=4"), strict=False)
    rules["large/w"] = ("model", "data")
    return rules


@pytest.fixture(scope="module", autouse=True)
def abandoned_reads_end_here() -> Iterator[None]:
    """So that Python does not speak of them in the next file of tests."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("intact") / "checkpoint"
    placed = layout_map().place({"large": tree()["large"]})
    flm.checkpoint.save(path, {**tree(), **placed}, layout_map=layout_map())
    return path


def files_of(checkpoint: Path, pattern: str) -> list[str]:
    """The files that a line of `FILES` speaks of."""
    every = [p.relative_to(checkpoint) for p in checkpoint.rglob("*") if p.is_file()]
    return sorted(
        name
        for name in map(Path.as_posix, every)
        if next((p for p in FILES if fnmatch(name, p)), None) == pattern
    )


def outcome(checkpoint: Path) -> str:
    """Restores; says how it ended. Anything but these two fails the test."""
    try:
        restored = flm.checkpoint.restore(checkpoint, layout_map=layout_map())
    except flm.errors.CheckpointError as error:
        assert str(checkpoint) in str(error)
        return ERROR
    expected = tree()
    keys, expected_keys = restored.pop("keys"), expected.pop("keys")
    assert keys.dtype == expected_keys.dtype
    np.testing.assert_array_equal(
        jax.random.key_data(keys), jax.random.key_data(expected_keys)
    )
    assert jax.tree.structure(restored) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, restored, expected)
    assert restored["large"]["w"].sharding.shard_shape((64, 64)) == (16, 32)
    return VALUES


def test_control_the_intact_one_restores(intact: Path) -> None:
    assert outcome(intact) == VALUES


def test_every_file_is_spoken_of(intact: Path) -> None:
    spoken_of = {name for pattern in FILES for name in files_of(intact, pattern)}
    every = {p.relative_to(intact).as_posix() for p in intact.rglob("*") if p.is_file()}
    assert every == spoken_of
    # Orbax 0.12.2 writes no commit_success.txt on a local disk.
    for pattern in FILES.keys() - {"commit_success.txt"}:
        assert files_of(intact, pattern), pattern


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("pattern", FILES)
def test_damaged_file(pattern: str, damage: str, intact: Path, tmp_path: Path) -> None:
    expected = FILES[pattern][0 if damage == "removed" else 1]
    outcomes, inspected = set(), []
    for number, name in enumerate(files_of(intact, pattern)):
        copy = tmp_path / str(number)
        shutil.copytree(intact, copy)
        DAMAGES[damage](copy / name)
        outcomes.add(outcome(copy))
        inspected.append(said_by_inspect(copy))
        assert inspected[-1] is None or Path(name).name in inspected[-1]
    if expected == EITHER:
        assert outcomes == {ERROR, VALUES}, "the arrays' own files are among them"
    else:
        assert outcomes <= {expected}
    refused = len(inspected) - inspected.count(None)
    whole = ("state/_METADATA", "state/manifest.ocdbt", "state/d/*")
    if pattern in ("_CHECKPOINT_METADATA", *whole):
        assert refused == len(inspected)
    elif pattern == "state/ocdbt.process_0/d/*":
        # One file has the arrays; that it is zeroed, only `verify` finds.
        assert refused == (0 if damage == "zeroed" else 1)
    elif pattern == "state/ocdbt.process_0/manifest.ocdbt":
        assert refused == 0


def said_by_inspect(checkpoint: Path) -> str | None:
    try:
        flm.checkpoint.inspect(checkpoint)
    except flm.errors.CheckpointError as error:
        assert str(checkpoint) in str(error)
        return str(error)
    return None


def text_of_error(path: Path, **options: Any) -> str:
    with pytest.raises(flm.errors.CheckpointError) as caught:
        flm.checkpoint.restore(path, layout_map=layout_map(), **options)
    return str(caught.value)


def test_messages_name_the_leaf_or_the_files(intact: Path, tmp_path: Path) -> None:
    for damage, damaged in DAMAGES.items():
        arrays = tmp_path / damage
        shutil.copytree(intact, arrays)
        for name in files_of(intact, "state/ocdbt.process_0/d/*"):
            damaged(arrays / name)
        text = text_of_error(arrays)
        assert text.startswith(f"cannot read the checkpoint {arrays}: leaf 'large/w': ")
        assert "tensorstore_spec" not in text and len(text) < 900

    index = tmp_path / "index"
    shutil.copytree(intact, index)
    (index / "state" / "manifest.ocdbt").unlink()
    text = text_of_error(index)
    assert f"the checkpoint {index} is damaged: {index}" in text
    assert "state/manifest.ocdbt: is missing" in text

    strings = tmp_path / "strings"
    shutil.copytree(intact, strings)
    (strings / "state" / "_strings.json").write_bytes(b"")
    assert "_strings.json" in text_of_error(strings)
    # What is not asked for need not be whole.
    rest = flm.checkpoint.restore(strings, layout_map=layout_map(), exclude="text")
    assert rest["step"] == 12345678901


def test_a_python_bool_of_plain_orbax(tmp_path: Path) -> None:
    v1: Any = ocp.v1
    v1.save(tmp_path / "plain", {"w": np.ones(8, np.float32), "flag": True})
    with refused("writes Python bools, which it cann"):
        flm.checkpoint.inspect(tmp_path / "plain")


# ------------------------------------------------------------------ flipped bits

DATA, LOSS = {"position": 12_345, "seed": [1, 2]}, {"loss": 0.125}
HALF = {"dtype": {"large": jnp.bfloat16}}


class Batches:
    """A data iterator, as far as a checkpoint sees it."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


def loop(directory: Path) -> flm.checkpoint.Checkpointer:
    return flm.checkpoint.Checkpointer(directory, layout_map=layout_map())


def by_checkpointer(step: Path) -> Any:
    checkpointer, batches = loop(step.parent), Batches(None)
    restored = checkpointer.restore(data=batches)
    return restored, batches.state, checkpointer.metadata()


def restoring(*target: Any, **options: Any) -> Callable[[Path], Any]:
    def way(step: Path) -> Any:
        options.setdefault("layout_map", layout_map())
        return flm.checkpoint.restore(step, *target, **options)

    return way


# Name → a way to restore a step that says nothing of checking.
WAYS: dict[str, Callable[[Path], Any]] = {
    "no target": restoring(),
    "a target": lambda step: restoring(tree())(step),
    "a part": restoring(include=["large", "keys", "empty", "text"]),
    "another dtype": restoring(**HALF),
    "another mesh": restoring(
        layout_map=layout_map().on(flm.DeviceMesh("data=4,model=2"))
    ),
    "other pieces": restoring(strategy="aligned", host_memory=20_000),
    "Checkpointer": by_checkpointer,
}


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("steps")
    placed = layout_map().place({"large": tree()["large"]})
    loop(directory).save(7, {**tree(), **placed}, data=Batches(DATA), metadata=LOSS)
    return directory


def spots(step: Path, count: int) -> Iterator[tuple[str, int, int]]:
    """File, byte and bit of flips all over a step: half of them in the largest file."""
    rng = np.random.default_rng(21)
    files = [p for p in step.rglob("*") if p.is_file() and p.stat().st_size]
    files.sort(key=lambda file: file.stat().st_size)
    # The name of our record among them, and that of its place.
    first = files.index(step / "_CHECKPOINT_METADATA")
    content = files[first].read_bytes()
    for name in (b"custom_metadata", b"flax_layoutmap", b"digest", b"checksums"):
        yield files[first].relative_to(step).as_posix(), content.index(name) + 2, 1
    for number in range(count):
        file = files[-1 if number % 2 else number // 2 % len(files)]
        at = int(rng.integers(file.stat().st_size))
        yield file.relative_to(step).as_posix(), at, int(rng.integers(8))


def flipped(steps: Path, directory: Path, spot: tuple[str, int, int]) -> Path:
    """The step in a copy of its directory, with one bit flipped."""
    shutil.copytree(steps, directory)
    name, at, bit = spot
    file = directory / "7" / name
    content = bytearray(file.read_bytes())
    content[at] ^= 1 << bit
    file.write_bytes(content)
    return directory / "7"


def comparable(result: Any) -> Any:
    """What a restore gave, with all that may be wrong of it."""

    def leaf(value: Any) -> Any:
        if not isinstance(value, jax.Array | np.ndarray):
            return type(value), value
        where = str(getattr(value, "sharding", "host"))
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return str(value.dtype), where, np.asarray(jax.random.key_data(value)).data
        return str(value.dtype), value.shape, where, np.asarray(value).tobytes()

    return jax.tree.map(leaf, result)


def test_no_flipped_bit_restores_in_silence(steps: Path, tmp_path: Path) -> None:
    expected = {name: comparable(way(steps / "7")) for name, way in WAYS.items()}
    unchecked = comparable(restoring(verify=False)(steps / "7"))
    assert unchecked == expected["no target"]
    refused, wrong_if_unchecked = 0, 0
    for number, spot in enumerate(spots(steps / "7", 40)):
        step = flipped(steps, tmp_path / str(number), spot)
        for name in ("no target", list(WAYS)[number % len(WAYS)]):
            try:
                result = comparable(WAYS[name](step))
            except flm.errors.CheckpointError:
                refused += 1
            else:
                assert result == expected[name], (spot, name)
        # The control: these flips do change values.
        with contextlib.suppress(flm.errors.CheckpointError):
            result = comparable(restoring(verify=False)(step))
            wrong_if_unchecked += result != unchecked
    assert refused > 40
    assert wrong_if_unchecked > 10


def test_another_digit_beside_the_arrays(steps: Path, tmp_path: Path) -> None:
    """JSON that is as good as before, of a loss and of a data iterator."""
    shutil.copytree(steps, tmp_path / "a")
    step = tmp_path / "a" / "7"
    replaced(step / "_CHECKPOINT_METADATA", '"loss": 0.125', '"loss": 0.625')
    replaced(step / "data/process_0.json", "12345", "12745")
    for way in (lambda: loop(step.parent).metadata(), lambda: restoring()(step)):
        with pytest.raises(flm.errors.CheckpointError) as caught:
            way()
        assert str(caught.value) == (
            f"the checkpoint {step} is damaged: its metadata are not those that were "
            "saved ('custom_metadata' in its file _CHECKPOINT_METADATA); restore "
            "another checkpoint, or this one as it seems to be, with verify=False"
        )
    found = restoring(verify=False)(step)
    assert comparable(found) == comparable(restoring()(steps / "7"))
    said = f"the states of data in {step} are damaged: .*differs from what was saved"
    with pytest.raises(flm.errors.CheckpointError, match=said):
        loop(step.parent).data_states()


def replaced(file: Path, old: str, new: str) -> None:
    text = file.read_text("utf-8")
    assert text.count(old) == 1
    file.write_text(text.replace(old, new), "utf-8")


def test_checkpoints_of_versions_without_digests(steps: Path, tmp_path: Path) -> None:
    shutil.copytree(steps, tmp_path / "old")
    step = tmp_path / "old" / "7"
    data = json.loads((step / "_CHECKPOINT_METADATA").read_text("utf-8"))
    del data["custom_metadata"]["flax_layoutmap"]["digest"]
    (step / "_CHECKPOINT_METADATA").write_text(json.dumps(data), "utf-8")
    state = json.loads((step / "data/process_0.json").read_text("utf-8"))
    del state["digest"]
    (step / "data/process_0.json").write_text(json.dumps(state), "utf-8")
    for name, way in WAYS.items():
        assert comparable(way(step)) == comparable(way(steps / "7")), name
    assert flm.checkpoint.verify(step).leaves == 6
    # Their arrays are compared all the same.
    record = data["custom_metadata"]["flax_layoutmap"]
    record["checksums"]["small"] = "0123456789abcdef"
    del record["checksums"]["keys"]
    (step / "_CHECKPOINT_METADATA").write_text(json.dumps(data), "utf-8")
    with refused(
        "2 problems",
        "small (3,): its data are not those that were saved",
        "keys (2,): there is no checksum of it in the metadata",
    ):
        restoring()(step)


def test_casts_are_read_in_portions(
    steps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both dtypes are on the devices for a while; so not of all leaves at once."""
    read, seen = _orbax.read_arrays, []

    def counted(path: Any, wanted: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append({name for name, value in wanted.items() if value is not ...})
        return read(path, wanted, *args, **kwargs)

    monkeypatch.setattr(_orbax, "read_arrays", counted)
    restoring(**HALF)(steps / "7")
    assert {"large/w"} in seen and len(seen) == 2
    seen.clear()
    restoring()(steps / "7")
    assert len(seen) == 1


# -------------------------------------------------------------- our own metadata


def with_record(intact: Path, copy: Path, change: Callable[[Any], Any]) -> Path:
    """A copy of the checkpoint with another record of ours."""
    shutil.copytree(intact, copy)
    file = copy / "_CHECKPOINT_METADATA"
    data = json.loads(file.read_text("utf-8"))
    custom = data["custom_metadata"]
    custom["flax_layoutmap"] = change(custom["flax_layoutmap"])
    file.write_text(json.dumps(data), "utf-8")
    return copy


def without_path(path: str) -> Callable[[Any], Any]:
    def change(record: Any) -> Any:
        record["sections"][0]["paths"].remove(path)
        return record

    return change


def as_leaf(path: str, **entry: Any) -> Callable[[Any], Any]:
    def change(record: Any) -> Any:
        record["leaves"][path] = entry
        return record

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda record: None, "has no metadata of flax_layoutmap"),
        (lambda record: {}, "was saved with schema None"),
        (lambda record: {**record, "schema": 2}, "was saved with schema 2 by"),
        (lambda record: {"schema": 1}, "is damaged: KeyError('sections')"),
        (lambda record: {**record, "sections": 3}, "is damaged: TypeError("),
        (lambda record: {**record, "random": ["no"]}, "is damaged: KeyError('no')"),
        (without_path("empty"), "is damaged: KeyError('empty')"),
        (without_path("small"), "Orbax holds leaves that its metadata does not list"),
        (
            lambda record: {**record, "leaves": {"keys": {"kind": "key"}}},
            "is damaged: Orbax has no leaf 'empty'",
        ),
        (
            as_leaf("keys", kind="key", implementation="mine"),
            "leaf 'keys' cannot be read: ",
        ),
        (as_leaf("keys", kind="key"), "leaf 'keys' cannot be read: 'implementation'"),
        (as_leaf("step"), "leaf 'step' cannot be read: it is no array, but 0"),
        (as_leaf("small", kind="lock"), "it is of the unknown kind 'lock'"),
    ],
)
def test_damaged_record(
    change: Callable[[Any], Any], text: str, intact: Path, tmp_path: Path
) -> None:
    copy = with_record(intact, tmp_path / "copy", change)
    said = text_of_error(copy)
    assert text in said and str(copy) in said


def test_a_record_with_a_leaf_of_another_kind(intact: Path, tmp_path: Path) -> None:
    copy = with_record(intact, tmp_path / "copy", as_leaf("step", kind="string"))
    assert "step (): Orbax read the int" in text_of_error(copy, verify=False)
    assert "its metadata are not those that were saved" in text_of_error(copy)


# ------------------------------------------------------------- places that are none


def test_missing(intact: Path, tmp_path: Path) -> None:
    shutil.copytree(intact, tmp_path / "step_100")
    said = text_of_error(tmp_path / "step_10")
    assert f"there is no checkpoint at {tmp_path / 'step_10'}; did you mean" in said
    assert "'step_100'" in said
    said = text_of_error(tmp_path / "no" / "a")
    assert f"there is no directory {tmp_path / 'no'}" in said


def test_empty_file_and_other_directories(intact: Path, tmp_path: Path) -> None:
    assert "is no checkpoint: the directory is empty" in text_of_error(tmp_path)
    (tmp_path / "file").write_text("x")
    assert "is a file; a checkpoint is a directory" in text_of_error(tmp_path / "file")
    said = text_of_error(tmp_path)
    assert "is no checkpoint: it has no file _CHECKPOINT_METADATA" in said
    shutil.copytree(intact, tmp_path / "1000")
    assert "it holds checkpoints: 1000" in text_of_error(tmp_path)
    said = text_of_error(tmp_path / "1000" / "state")
    assert f"the checkpoint is the directory above it, {tmp_path / '1000'}" in said


def test_unfinished(intact: Path, tmp_path: Path) -> None:
    unfinished = tmp_path / "a.orbax-checkpoint-tmp"
    shutil.copytree(intact, unfinished)
    said = text_of_error(unfinished)
    assert f"{unfinished} is an unfinished checkpoint" in said
    assert "restore an earlier one" in said and said_by_inspect(unfinished) == said
    said = text_of_error(tmp_path / "a")
    assert f"its save did not finish ({unfinished} is there)" in said


@pytest.mark.parametrize("left", [[".replaced"], [".replaced", ".replacement"]])
def test_interrupted_overwrite(left: list[str], intact: Path, tmp_path: Path) -> None:
    for suffix in left:
        shutil.copytree(intact, tmp_path / f"a{suffix}")
    said = text_of_error(tmp_path / "a")
    assert "overwriting it was interrupted, and" in said
    assert all(str(tmp_path / f"a{suffix}") in said for suffix in left)
    # And what is left can be restored as it is.
    assert outcome(tmp_path / "a.replaced") == VALUES


def test_a_checkpoint_may_be_moved(intact: Path, tmp_path: Path) -> None:
    shutil.copytree(intact, tmp_path / "elsewhere")
    assert outcome(tmp_path / "elsewhere") == VALUES
