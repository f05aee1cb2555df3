"""Files that are truncated, have wrong headers, or contradict their index."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from same import refused

import flax_layoutmap as flm

restore: Any = flm.checkpoint.restore_safetensors
A = np.arange(12, dtype=np.float32).reshape(3, 4)
B = np.arange(4, dtype=np.int64)


def written(header: Any, data: bytes, *, length: int | None = None) -> bytes:
    """A file with any header: JSON values, or bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    return size.to_bytes(8, "little") + text + data


def entry(shape: list[Any], first: Any, last: Any, dtype: Any = "F32") -> Any:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


GOOD = {"a": entry([3, 4], 0, 48), "b": entry([4], 48, 80, "I64")}
DATA = A.tobytes() + B.tobytes()


def target() -> dict[str, Any]:
    return {"a": jnp.zeros((3, 4)), "b": np.zeros(4, np.int64)}


def rules() -> flm.LayoutMap:
    return flm.LayoutMap(flm.DeviceMesh("data=2,model=4"), strict=False)


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_file_that_changes_after_its_header_was_read(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rules are resolved between the headers and the data."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(written(GOOD, DATA))
    into = target()
    before = into["a"]

    def announce(resolution: Any) -> None:
        file.write_bytes(written(GOOD, DATA[:20])) if damage == "cut" else file.unlink()

    monkeypatch.setattr(flm.Resolution, "announce", announce)
    with refused(
        "a: tensor 'a' (3,4)",
        "greater than file size" if damage == "cut" else "No such",
    ):
        restore(tmp_path, into, layout_map=rules())
    assert into["a"] is before


# ---------------------------------------------------------------------- several files

FIRST, SECOND = (f"model-0000{at}-of-00002.safetensors" for at in (1, 2))
INDEX = "model.safetensors.index.json"
ONLY_A = written({"a": GOOD["a"]}, A.tobytes())


def two_files(folder: Path, **index: str) -> None:
    save_file({"a": A}, folder / FIRST)
    save_file({"b": B}, folder / SECOND)
    names = {"a": FIRST, "b": SECOND} | index
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))


def held(path: Path) -> set[str]:
    return {leaf.path for leaf in flm.checkpoint.inspect(path).leaves}


def test_files_with_an_index_or_without(tmp_path: Path) -> None:
    two_files(tmp_path)
    # Beside an index, other files do not count.
    save_file({"a": A}, tmp_path / "consolidated.safetensors")
    assert held(tmp_path) == held(tmp_path / INDEX) == {"a", "b"}
    found = restore(tmp_path / INDEX, target(), layout_map=rules())
    np.testing.assert_array_equal(found["a"], A)
    (tmp_path / "consolidated.safetensors").unlink()
    (tmp_path / INDEX).unlink()
    assert held(tmp_path) == {"a", "b"}
    # A single file counts before an index.
    two_files(tmp_path)
    save_file({"c": A}, tmp_path / "model.safetensors")
    assert held(tmp_path) == {"c"} and held(tmp_path / INDEX) == {"a", "b"}
    # Files of a save that was killed have no index.
    for file in tmp_path.iterdir():
        file.unlink()
    save_file({"a": A}, tmp_path / "model-0123abcd-00001-of-00002.safetensors")
    with refused("no .safetensors files; it holds"):
        restore(tmp_path, layout_map=rules())


BAD_FOLDERS: dict[str, tuple[dict[str, str], dict[str, bytes | None], str]] = {
    "a missing file": ({"b": "c.safetensors"}, {}, "it names 'c.safetensors', which"),
    "a missing tensor": ({"c": FIRST}, {}, f"'c' is not in {FIRST}, as it"),
    "another file": ({"a": SECOND, "b": FIRST}, {}, f"'a' is not in {SECOND}, as it"),
    "elsewhere": ({"b": "../x.safetensors"}, {}, "'../x.safetensors', which is not"),
    "no names": ({}, {INDEX: b"{}"}, "no 'weight_map'"),
    "cut": ({}, {INDEX: b"{"}, "index is not valid"),
    "cut data": ({}, {FIRST: ONLY_A[:-1]}, "bytes of data; was the file cut off?"),
    "cut header": ({}, {FIRST: ONLY_A[:20]}, "it is cut off (was the download"),
    "twice": ({}, {INDEX: None, "x.safetensors": ONLY_A}, "has a tensor 'a' as well"),
}


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_a_bad_folder_is_an_error(name: str, tmp_path: Path) -> None:
    index, files, text = BAD_FOLDERS[name]
    two_files(tmp_path, **index)
    for file, data in files.items():
        (tmp_path / file).unlink(missing_ok=True)
        if data is not None:
            (tmp_path / file).write_bytes(data)
    with refused(str(tmp_path), text):
        restore(tmp_path, target(), layout_map=rules())


def test_places_that_are_no_checkpoint(tmp_path: Path) -> None:
    for place, text in (
        (tmp_path / "nowhere", "/nowhere; a model of the Hugging Face"),
        (tmp_path, "no .safetensors files; it holds"),
        ("gs://bucket/model", "local files only, not at gs://"),
    ):
        with refused(text):
            restore(place, layout_map=rules())


# ------------------------------------------------------------------------- any damage

FLOAT_FILE = written(
    {"a": entry([3, 4], 0, 48), "b": entry([2, 2], 48, 64, "F32")}, bytes(range(64))
)
HEADER = 8 + int.from_bytes(FLOAT_FILE[:8], "little")
EDITS = st.lists(st.tuples(st.integers(0, HEADER - 1), st.integers(0, 255)), max_size=4)
TEXT = st.sampled_from([b"0", b"9", b"-", b"e", b'"', b"[", b"{", b",", b" ", b"F16"])
INSERTIONS = st.lists(st.tuples(st.integers(8, HEADER), TEXT))


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=EDITS, insertions=INSERTIONS, cut=st.just(0) | st.integers(1, 200))
@example(edits=[(7, 255)], insertions=[], cut=0)
@example(edits=[], insertions=[(HEADER - 1, b"F16")], cut=0)
@example(edits=[], insertions=[], cut=len(FLOAT_FILE))
@example(edits=[(0, 255), (1, 255), (2, 255), (3, 255)], insertions=[], cut=0)
def test_any_damage_is_an_error_or_harmless(
    edits: list[tuple[int, int]],
    insertions: list[tuple[int, bytes]],
    cut: int,
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
    data = data[: len(data) - cut]
    file = tmp_path / "model.safetensors"
    file.write_bytes(data)
    try:
        found = restore(file, layout_map=rules())
    except flm.errors.CheckpointError as error:
        assert str(file) in str(error)
        return
    # What is accepted are bytes of the file.
    header = json.loads(bytes(data[8 : 8 + int.from_bytes(data[:8], "little")]))
    header.pop("__metadata__", None)
    begin = 8 + int.from_bytes(data[:8], "little")
    assert header.keys() == found.keys()
    for name, value in found.items():
        first, last = header[name]["data_offsets"]
        assert list(value.shape) == header[name]["shape"]
        assert np.asarray(value).tobytes() == data[begin + first : begin + last]


def test_any_names(tmp_path: Path) -> None:
    names = [
        "",
        "a.",
        "a..",
        "value",
        "a.value",
        "b/value",
        "é\ud800",
        "%2F",
        "\\",
        "'",
    ]
    header = {n: entry([], 4 * at, 4 * at + 4) for at, n in enumerate(names)}
    data = np.arange(len(names), dtype=np.float32).tobytes()
    file = tmp_path / "model.safetensors"
    file.write_bytes(written(header, data))
    found = restore(file, layout_map=rules())
    assert list(map(float, found.values())) == [names.index(name) for name in found]
    target = {f"t{at}": np.float32(-1) for at in range(len(names))}
    escaped = (name.replace("\\", r"\\") for name in names)
    again = restore(file, target, mapping=[*zip(target, escaped, strict=True)])
    assert [float(again[path]) for path in target] == [*range(len(names))]


# ------------------------------------------------------------------------------ dtypes

DTYPES = {f"{k}{8 * n}": f"{k.lower()}{n}" for k in "FIU" for n in (1, 2, 4, 8)}
DTYPES |= {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
del DTYPES["F8"]
FLOATS = [name for name in DTYPES if name[0] in "FB"]
DTYPES |= {"BOOL": "bool", "C64": "complex64", "F8_E8M0": "float8_e8m0fnu"}


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_read_written_and_cast(name: str, tmp_path: Path) -> None:
    dtype = np.dtype(DTYPES[name])
    plain = np.array([[0, 0.5, -2], [3, 4, 96]], np.float32)
    positive = np.abs(plain) + (name == "F8_E8M0")  # which has no zero
    values = (plain if name in FLOATS else positive).astype(dtype)
    header = {"a": entry([2, 3], 0, values.nbytes, name)}
    file = tmp_path / "model.safetensors"
    file.write_bytes(written(header, values.tobytes()))
    found = restore(tmp_path, {"a": np.zeros((2, 3), dtype)})
    np.testing.assert_array_equal(found["a"], values, strict=True)
    flm.checkpoint.save_safetensors(tmp_path / "again.safetensors", found)
    again = (tmp_path / "again.safetensors").read_bytes()
    assert again.endswith(values.tobytes()) and f'"{name}"'.encode() in again
    for other in FLOATS if name in FLOATS else ():
        into = {"a": np.zeros((2, 3), DTYPES[other])}
        cast = restore(file, into, dtype="target")["a"]
        assert cast.dtype == DTYPES[other]
        np.testing.assert_array_equal(cast.astype(np.float32), plain)
        if other != "F64":  # which JAX has only with x64
            cast = restore(file, layout_map=rules(), dtype=DTYPES[other])["a"]
            assert cast.dtype == DTYPES[other]
            np.testing.assert_array_equal(cast.astype(np.float32), plain)
