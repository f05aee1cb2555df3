"""Files that are truncated, have wrong headers, or contradict their index."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax_layoutmap.checkpoint._safetensors_header import DTYPES, open_safetensors
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from same import refused

import flax_layoutmap as flm
from flax_layoutmap.checkpoint import _safetensors_restore, mappings

A = np.arange(12, dtype=np.float32).reshape(3, 4)
B = np.arange(4, dtype=np.int64)


def written(header: Any, data: bytes, *, length: int | None = None) -> bytes:
    """A file with any header: JSON values, or bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    return size.to_bytes(8, "little") + text + data


def entry(
    shape: list[Any], first: Any, last: Any, dtype: Any = "F32", **more: Any
) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last], **more}


GOOD = {"a": entry([3, 4], 0, 48), "b": entry([4], 48, 80, "I64")}
DATA = A.tobytes() + B.tobytes()


def good(**changed: Any) -> dict[str, Any]:
    return {**GOOD, **changed}


# Name → a damaged file, and what the error must say.
DAMAGED: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "empty": (b"", ("it has 0 bytes", "no safetensors file")),
    "seven bytes": (b"1234567", ("it has 7 bytes",)),
    "data cut": (written(GOOD, DATA[:-1]), ("'b'", "data end at byte 80", "has 79")),
    "header cut": (written(GOOD, DATA)[:50], ("header", "cut off")),
    "header length beyond the file": (
        written(GOOD, DATA, length=10_000),
        ("said to have 10000 bytes", "cut off"),
    ),
    "huge header": (
        written(GOOD, DATA, length=2**63),
        ("said to have 9223372036854775808 bytes", "at most 100000000"),
    ),
    "not JSON": (written(b"{hello", b""), ("no valid JSON",)),
    "not UTF-8": (written(b'{"\xff": 1}', b""), ("no valid JSON", "utf-8")),
    "not an object": (written([1], b""), ("expected a JSON object, got a list",)),
    "deep JSON": (written(b"[" * 200_000, b""), ("no valid JSON",)),
    "long number": (
        written(b'{"a": ' + b"1" * 5000 + b"}", b""),
        ("no valid JSON", "digit"),
    ),
    "a name twice": (
        written(b'{"a": 1, "a": 2}', b""),
        ("the name 'a' occurs twice",),
    ),
    "metadata": (written(good(__metadata__=3), DATA), ("'__metadata__'",)),
    "entry": (written(good(a=3), DATA), ("'a'", "must have dtype, shape")),
    "no dtype": (written(good(a={"shape": []}), DATA), ("'a'", "must have dtype")),
    "unknown dtype": (
        written(good(a=entry([3, 4], 0, 48, "F31")), DATA),
        ("'a'", "dtype 'F31' is not known", "BF16"),
    ),
    "dtype of a wrong kind": (
        written(good(a=entry([3, 4], 0, 48, ["F32"])), DATA),
        ("'a'", "is not known"),
    ),
    "negative size": (written(good(a=entry([-3, 4], 0, 48)), DATA), ("the shape",)),
    "fractional size": (written(good(a=entry([3.0, 4], 0, 48)), DATA), ("the shape",)),
    "true as a size": (written(good(a=entry([True, 4], 0, 16)), DATA), ("shape",)),
    "infinite size": (
        written(b'{"a": {"dtype":"F32","shape":[Infinity],"data_offsets":[0,4]}}', b""),
        ("the shape",),
    ),
    "many dims": (written(good(a=entry([1] * 99, 0, 4)), DATA), ("the shape",)),
    "gigantic": (
        written(good(a=entry([2**62, 2**62], 0, 48)), DATA),
        ("larger than any memory",),
    ),
    "empty but gigantic": (
        written(good(a=entry([0, 2**62, 2**62], 0, 0)), DATA),
        ("larger than any memory",),
    ),
    "more than 64 bits": (written(good(a=entry([2**64], 0, 48)), DATA), ("shape",)),
    "offsets": (written(good(a=entry([3, 4], 48, 0)), DATA), ("data_offsets [48, 0]",)),
    "three offsets": (
        written(good(a={**GOOD["a"], "data_offsets": [0, 1, 2]}), DATA),
        ("data_offsets",),
    ),
    "beyond the file": (
        written(good(b=entry([4], 4800, 4832, "I64")), DATA),
        ("'b'", "data end at byte 4832", "has 80"),
    ),
    "size is not shape × dtype": (
        written(good(a=entry([3, 5], 0, 48)), DATA),
        ("'a'", "it has 48 bytes, but F32 (3,5) takes 60"),
    ),
    "overlap": (
        written(good(b=entry([4], 40, 72, "I64")), DATA),
        ("'b' overlaps 'a'",),
    ),
    "hole": (
        written(good(b=entry([4], 56, 88, "I64")), DATA + bytes(8)),
        ("'b' begins 8 bytes after 'a'",),
    ),
    "hole at the start": (
        written({"b": entry([4], 8, 40, "I64")}, bytes(40)),
        ("begins 8 bytes after the header",),
    ),
    "bytes at the end": (
        written(GOOD, DATA + b"more"),
        ("4 bytes follow 'b', which is the last",),
    ),
}


def target() -> dict[str, Any]:
    return {"a": jnp.zeros((3, 4)), "b": np.zeros(4, np.int64)}


def rules() -> flm.LayoutMap:
    return flm.LayoutMap(flm.DeviceMesh("data=2,model=4"), strict=False)


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_an_error_that_names_it(name: str, tmp_path: Path) -> None:
    data, texts = DAMAGED[name]
    file = tmp_path / "model.safetensors"
    file.write_bytes(data)
    into = target()
    before = dict(into)
    with refused(str(file), *texts):
        flm.checkpoint.restore_safetensors(tmp_path, into, layout_map=rules())
    assert all(into[key] is before[key] for key in before)


def test_the_good_file_of_these_tests_is_good(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(written(GOOD, DATA))
    found = flm.checkpoint.restore_safetensors(file, target(), layout_map=rules())
    np.testing.assert_array_equal(found["a"], A)
    np.testing.assert_array_equal(found["b"], B)
    assert isinstance(found["b"], np.ndarray)  # without x64, JAX has no int64


def test_all_problems_of_all_files_are_in_one_error(tmp_path: Path) -> None:
    bad = good(a=entry([3, 4], 0, 48, "F31"), b=entry([5], 48, 80, "I64"))
    (tmp_path / "one.safetensors").write_bytes(written(bad, DATA))
    (tmp_path / "two.safetensors").write_bytes(b"")
    with pytest.raises(flm.errors.CheckpointError) as caught:
        open_safetensors(tmp_path)
    assert len(caught.value.problems) == 3
    assert "3 problems" in str(caught.value)


def test_a_file_that_is_cut_after_its_header_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(written(GOOD, DATA))
    into = target()
    before = into["a"]

    def opened(path: Any) -> Any:
        found = open_safetensors(path)
        file.write_bytes(written(GOOD, DATA[:20]))
        return found

    monkeypatch.setattr(_safetensors_restore, "open_safetensors", opened)
    with pytest.raises(
        flm.errors.CheckpointError, match="tensor 'a'.*it was cut since"
    ):
        flm.checkpoint.restore_safetensors(tmp_path, into, layout_map=rules())
    assert into["a"] is before

    def gone(path: Any) -> Any:
        file.write_bytes(written(GOOD, DATA))
        found = open_safetensors(path)
        file.unlink()
        return found

    monkeypatch.setattr(_safetensors_restore, "open_safetensors", gone)
    with refused("cannot be read: No such file"):
        flm.checkpoint.restore_safetensors(tmp_path, into, layout_map=rules())


# ---------------------------------------------------------------------- several files


def two_files(folder: Path) -> dict[str, str]:
    save_file({"a": A}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": B}, folder / "model-00002-of-00002.safetensors")
    return {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
    }


def write_index(folder: Path, names: Any) -> Path:
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return index


def test_files_with_an_index_or_without(tmp_path: Path) -> None:
    names = two_files(tmp_path)
    assert set(open_safetensors(tmp_path).tensors) == {"a", "b"}
    index = write_index(tmp_path, names)
    # Beside an index, other files do not count.
    save_file({"a": A}, tmp_path / "consolidated.safetensors")
    assert set(open_safetensors(tmp_path).tensors) == {"a", "b"}
    assert open_safetensors(index).files == tuple(
        str(tmp_path / name) for name in names.values()
    )
    found = flm.checkpoint.restore_safetensors(index, target(), layout_map=rules())
    np.testing.assert_array_equal(found["a"], A)


def other(**changed: str) -> Callable[[Path, dict[str, str]], Any]:
    return lambda folder, names: write_index(folder, {**names, **changed})


BAD_FOLDERS: dict[
    str, tuple[Callable[[Path, dict[str, str]], Any], tuple[str, ...]]
] = {
    "an index that names a missing file": (
        other(b="model-00003-of-00003.safetensors"),
        ("names model-00003-of-00003.safetensors", "no such file", "download"),
    ),
    "an index that names a missing tensor": (
        other(c="model-00001-of-00002.safetensors"),
        ("model-00001-of-00002.safetensors", "says it has 'c', but it has not"),
    ),
    "an index that puts a tensor elsewhere": (
        other(a="model-00002-of-00002.safetensors"),
        ("model-00002-of-00002.safetensors", "says it has 'a', but it has not"),
    ),
    "an index that lacks a tensor": (
        lambda folder, names: (
            write_index(folder, {"a": names["a"]})
            and None
            or save_file({"a": A, "z": A}, folder / names["a"])
        ),
        ("the index does not name its tensor 'z'",),
    ),
    "an index that leads elsewhere": (
        other(b="../model.safetensors"),
        ("'../model.safetensors'", "no name of a .safetensors file beside"),
    ),
    "an index without names": (
        lambda folder, names: write_index(folder, {}),
        ("has no 'weight_map'",),
    ),
    "an index that is cut": (
        lambda folder, names: (folder / "model.safetensors.index.json").write_text("{"),
        ("index.json", "no valid JSON"),
    ),
    "the same name in two files": (
        lambda folder, names: save_file({"a": A}, folder / "other.safetensors"),
        ("other.safetensors", "has a tensor 'a' as well"),
    ),
    "a single file and an index": (
        lambda folder, names: (
            write_index(folder, names),
            save_file({"a": A}, folder / "model.safetensors"),
        ),
        ("has both model.safetensors and model.safetensors.index.json",),
    ),
}


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_a_bad_folder_is_an_error(name: str, tmp_path: Path) -> None:
    prepare, texts = BAD_FOLDERS[name]
    prepare(tmp_path, two_files(tmp_path))
    with refused(str(tmp_path), *texts):
        open_safetensors(tmp_path)


def test_places_that_are_no_checkpoint(tmp_path: Path) -> None:
    with refused("/nowhere; a model of the Hugging Face"):
        open_safetensors(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("hello")
    with refused("no .safetensors files; it holds"):
        open_safetensors(tmp_path)
    with refused("local files only, not at gs://"):
        open_safetensors("gs://bucket/model")
    file = tmp_path / "model.safetensors"
    file.mkdir()
    with pytest.raises(flm.errors.CheckpointError, match="cannot read .*directory"):
        open_safetensors(tmp_path)


# ------------------------------------------------------------------------- any damage

FLOAT_FILE = written(
    {"a": entry([3, 4], 0, 48), "b": entry([2, 2], 48, 64, "F32")}, bytes(range(64))
)
HEADER = 8 + int.from_bytes(FLOAT_FILE[:8], "little")
EDITS = st.lists(
    st.tuples(st.integers(0, HEADER - 1), st.integers(0, 255)), min_size=1, max_size=4
)
TEXT = st.sampled_from([b"0", b"9", b"-", b"e", b'"', b"[", b"{", b",", b" ", b"F16"])


@settings(max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=EDITS, insertions=st.lists(st.tuples(st.integers(8, HEADER), TEXT)))
@example(edits=[(7, 255)], insertions=[])
@example(edits=[(0, 255), (1, 255), (2, 255), (3, 255)], insertions=[])
def test_any_edit_of_a_header_is_an_error_or_harmless(
    edits: list[tuple[int, int]],
    insertions: list[tuple[int, bytes]],
    tmp_path: Path,
) -> None:
    data = bytearray(FLOAT_FILE)
    for at, value in edits:
        data[at] = value
    for at, text in insertions:
        data[at:at] = text
    if insertions:
        length = int.from_bytes(data[:8], "little") + sum(len(t) for _, t in insertions)
        data[:8] = (length % 2**64).to_bytes(8, "little")
    file = tmp_path / "model.safetensors"
    file.write_bytes(data)
    try:
        found = open_safetensors(file)
    except flm.errors.CheckpointError as error:
        assert str(file) in str(error)
        return
    # What is accepted covers the bytes of the file, each once.
    held = sorted((t.offset, t.offset + t.nbytes) for t in found.tensors.values())
    ends = [8 + int.from_bytes(data[:8], "little"), *(last for _, last in held)]
    assert [first for first, _ in held] == ends[:-1]
    assert ends[-1] == len(data)
    assert sum(t.nbytes for t in found.tensors.values()) <= len(data)
    try:
        values: Any = flm.checkpoint.restore_safetensors(file, layout_map=rules())
    except flm.errors.CheckpointError as error:
        assert str(file) in str(error)
        return
    assert set(values) == set(found.tensors)
    for name, tensor in found.tensors.items():
        value = values[name]
        raw = bytes(data)[tensor.offset : tensor.offset + tensor.nbytes]
        assert (value.shape, value.dtype) == (tensor.shape, tensor.dtype)
        assert np.asarray(value).tobytes() == raw


NAMES = st.text(st.sampled_from("a.b/%é\ud800 '0"), max_size=5) | st.text(
    st.characters(exclude_characters="{"), max_size=8
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.lists(NAMES, min_size=1, max_size=4, unique=True))
@example(names=[""])
@example(names=["a.", "a.."])
@example(names=["value", "a.value", "b/value"])
def test_any_names(names: list[str], tmp_path: Path) -> None:
    header = {n: entry([], 4 * at, 4 * at + 4) for at, n in enumerate(names)}
    data = np.arange(len(names), dtype=np.float32).tobytes()
    file = tmp_path / "model.safetensors"
    file.write_bytes(written(header, data))
    target = {f"t{at}": np.float32(-1) for at in range(len(names))}
    if "__metadata__" in names:
        return
    found: Any = flm.checkpoint.restore_safetensors(file, layout_map=rules())
    assert {name: float(value) for name, value in found.items()} == {
        name: at for at, name in enumerate(names)
    }
    mapping = [
        (path, n.replace("\\", r"\\")) for path, n in zip(target, names, strict=True)
    ]
    again = flm.checkpoint.restore_safetensors(file, target, mapping=mapping)
    assert [float(again[path]) for path in target] == [*range(len(names))]


# ------------------------------------------------------------------------------ dtypes


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_read_and_written(name: str, tmp_path: Path) -> None:
    dtype = DTYPES[name]
    values = np.array([[0, 1, 2], [3, 4, 5]], np.float32).astype(dtype)
    size = values.nbytes
    header = {"a": entry([2, 3], 0, size, name)}
    (tmp_path / "model.safetensors").write_bytes(written(header, values.tobytes()))
    into = {"a": np.zeros((2, 3), dtype)}
    found = flm.checkpoint.restore_safetensors(tmp_path, into)
    assert found["a"].dtype == dtype
    np.testing.assert_array_equal(found["a"], values)
    flm.checkpoint.save_safetensors(tmp_path / "again.safetensors", found)
    again = open_safetensors(tmp_path / "again.safetensors").tensors["a"]
    assert again.dtype == dtype
    assert Path(again.file).read_bytes()[again.offset :] == values.tobytes()


FLOATS = [name for name in DTYPES if name[0] in "FB" and name != "BOOL"]


@pytest.mark.parametrize("name", FLOATS)
def test_every_float_is_cast_to_every_other(name: str, tmp_path: Path) -> None:
    values = np.array([[0, 0.5, -2], [3, 4, 96]], np.float32)
    data = values.astype(DTYPES[name]).tobytes()
    header = {"a": entry([2, 3], 0, len(data), name)}
    (tmp_path / "model.safetensors").write_bytes(written(header, data))
    for other in FLOATS:
        into = {"a": np.zeros((2, 3), DTYPES[other])}
        found = flm.checkpoint.restore_safetensors(tmp_path, into, dtype="target")
        assert found["a"].dtype == DTYPES[other]
        np.testing.assert_array_equal(found["a"].astype(np.float32), values)
        if other == "F64":
            continue  # JAX has it only with x64
        found = flm.checkpoint.restore_safetensors(
            tmp_path, layout_map=rules(), dtype=DTYPES[other]
        )
        assert found["a"].dtype == DTYPES[other]
        np.testing.assert_array_equal(found["a"].astype(np.float32), values)
        flm.checkpoint.save_safetensors(
            tmp_path / "other.safetensors", found, dtype=DTYPES[name], overwrite=True
        )
        again = (tmp_path / "other.safetensors").read_bytes()
        assert again.endswith(data)


def test_dtypes_are_those_of_the_package(tmp_path: Path) -> None:
    save_file(
        {
            "bf16": np.ones(2, ml_dtypes.bfloat16),
            "f8": np.ones(2, ml_dtypes.float8_e4m3fn),
            "bool": np.array([True, False]),
        },
        tmp_path / "model.safetensors",
    )
    found = open_safetensors(tmp_path).tensors
    assert {name: str(tensor.dtype) for name, tensor in found.items()} == {
        "bf16": "bfloat16",
        "f8": "float8_e4m3fn",
        "bool": "bool",
    }


def test_no_file_stays_open(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(written(GOOD, DATA))
    before = len(os.listdir("/proc/self/fd"))
    flm.checkpoint.restore_safetensors(tmp_path, target(), layout_map=rules())
    assert len(os.listdir("/proc/self/fd")) == before


# ------------------------------------------------------------------------- bools


def bools(file: Path, rows: list[list[int]]) -> Path:
    """A file with `mask` after `a`, its bytes as they are given."""
    content = np.array(rows, np.uint8)
    header = {"a": GOOD["a"], "mask": entry([*content.shape], 48, 48 + content.size)}
    header["mask"]["dtype"] = "BOOL"
    file.write_bytes(written(header, A.tobytes() + content.tobytes()))
    return file


@pytest.mark.parametrize(
    "axes", [None, ("model", None), (None, "model"), (None, "data")]
)
@pytest.mark.parametrize("byte", [2, 128, 255])
def test_a_bool_is_0_or_1(axes: Any, byte: int, tmp_path: Path) -> None:
    rows = [[0, 1] * 4, [1] * 8, [0] * 8, [1, 1, 0, byte] * 2]
    file = bools(tmp_path / "model.safetensors", rows)
    layout_map = rules()
    layout_map["mask"] = axes
    target = {"model": {"mask": jnp.zeros((4, 8), bool)}}
    before = target["model"]["mask"]
    mapping = [("model/mask", "mask"), (None, "a")]
    first = file.stat().st_size - 5
    restores: dict[str, Callable[[], Any]] = {
        "model/mask": lambda: flm.checkpoint.restore_safetensors(
            file, target, layout_map=layout_map, mapping=mapping
        ),
        "mask": lambda: flm.checkpoint.restore_safetensors(file, layout_map=layout_map),
        "x": lambda: flm.checkpoint.restore_safetensors(
            file,
            {"x": np.zeros((8, 4), bool)},
            mapping=[("x", "mask", mappings.transpose()), (None, "a")],
        ),
    }
    for leaf, restore in restores.items():
        with pytest.raises(flm.errors.CheckpointError) as caught:
            restore()
        assert str(caught.value) == (
            f"{leaf}: tensor 'mask' (4,8) in {file}: byte {first} of the file is "
            f"{byte}, and a BOOL is 0 or 1; the file is damaged, or was written "
            "wrongly: download it again, or leave the leaf out with exclude="
        )
    assert target["model"]["mask"] is before
    # What is not asked for is not looked at; and the control.
    rest = flm.checkpoint.restore_safetensors(
        file, layout_map=layout_map, exclude="mask"
    )
    np.testing.assert_array_equal(rest["a"], A)
    bools(file, np.minimum(rows, 1).tolist())
    for restore in restores.values():
        restore()


# ------------------------------------------------------------------ many tensors


def many(folder: Path, count: int) -> Path:
    """A folder with an index of so many empty tensors."""
    folder.mkdir()
    names = [f"t{at}.weight" for at in range(count)]
    header = dict.fromkeys(names, entry([0, 4], 0, 0))
    (folder / "one.safetensors").write_bytes(written(header, b""))
    index = {"weight_map": dict.fromkeys(names, "one.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def calls_of_ours(function: Callable[[], Any]) -> int:
    """How many functions of the package a call comes to."""
    package, count = str(Path(flm.__file__).parent), 0

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(package)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_an_empty_tensor_costs_little(tmp_path: Path) -> None:
    """And the next one no more: 100,000 of them took half a minute."""

    def restore(count: int, folder: Path) -> Callable[[], Any]:
        abstract = jax.ShapeDtypeStruct((0, 4), jnp.float32)
        target = {f"t{at}": {"weight": abstract} for at in range(count)}
        return lambda: [
            flm.checkpoint.restore_safetensors(folder, layout_map=rules()),
            flm.checkpoint.restore_safetensors(folder, target, layout_map=rules()),
        ]

    sizes = (100, 200, 400)
    folders = {count: many(tmp_path / str(count), count) for count in sizes}
    found = [calls_of_ours(restore(count, folders[count])) for count in sizes]
    first, second = found[1] - found[0], found[2] - found[1]
    assert first / 100 < 180
    assert second / 200 < first / 100 * 1.1


def test_a_name_that_occurs_twice_among_many(tmp_path: Path) -> None:
    """Comparing each name with each other one would take minutes."""
    file = tmp_path / "model.safetensors"
    names = [f'"t{at}": 1' for at in range(200_000)]
    names.append(names[-1])
    file.write_bytes(written(f"{{{', '.join(names)}}}".encode(), b""))
    with refused("the name 't199999' occurs twice"):
        open_safetensors(file)
