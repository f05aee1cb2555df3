"""Read and check the headers of safetensors files before any data.

A file is the length of its header (8 bytes, little-endian), the header (JSON: name →
dtype, shape, first and last byte), and the numbers, without holes. Large checkpoints
are several files and `model.safetensors.index.json`, which lists each file's tensors.

Not read by the package `safetensors`: it does not expose the byte offsets of a tensor,
which planned reads need; few of its errors name a tensor; and a restore would need one
more package. The tests compare with it.
"""

import collections
import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap._rules.records import Shape, show_shape
from flax_layoutmap.checkpoint._leaves import problem_list

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": jnp.bfloat16,
        "F8_E4M3": jnp.float8_e4m3fn,
        "F8_E5M2": jnp.float8_e5m2,
        "I64": np.int64,
        "I32": np.int32,
        "I16": np.int16,
        "I8": np.int8,
        "U64": np.uint64,
        "U32": np.uint32,
        "U16": np.uint16,
        "U8": np.uint8,
        "BOOL": np.bool_,
    }.items()
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

NUMBER = re.compile(r"\d+")

# The limits of the format's own library, and NumPy's largest array.
_HEADER_BYTES = 100_000_000
_MOST_BYTES = 2**63 - 1
_MOST_DIMS = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a file, in C order from byte `offset`."""

    name: str
    dtype: np.dtype[Any]
    shape: Shape
    file: str
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"tensor {self.name!r} {show_shape(self.shape)} in {self.file}"


@dataclasses.dataclass(frozen=True)
class Stored:
    """The headers of a checkpoint; `tensors` are in file and byte order."""

    where: str
    files: tuple[str, ...]
    tensors: dict[str, Tensor]

    @functools.cached_property
    def forms(self) -> dict[str, str]:
        """Name of a tensor with 0 for each number → the first such name."""
        found: dict[str, str] = {}
        for name in self.tensors:
            found.setdefault(NUMBER.sub("0", name), name)
        return found


def open_safetensors(path: str | os.PathLike[str]) -> Stored:
    """Read and check the headers of a checkpoint; one error lists every problem.

    `path` is a file, an index, or a directory with `model.safetensors`, an index or
    other `.safetensors` files.
    """
    where = local(path)
    files, index = _files_of(where)
    problems: list[str] = []
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            found = read_header(file)
        except CheckpointError as error:
            problems += error.problems or [str(error)]
            continue
        for name, tensor in found.items():
            if name in tensors:
                problems.append(
                    f"{file}: {tensors[name].file} has a tensor {name!r} as well; pass "
                    "the path of one of the files, or remove the other"
                )
            tensors[name] = tensor
    if index is not None and not problems:
        problems += _index_problems(where, index, tensors)
    if problems:
        raise problem_list(f"cannot read {where}", problems)
    return Stored(where, files, tensors)


def local(path: str | os.PathLike[str]) -> str:
    """The absolute path; URLs are refused."""
    text = os.fspath(path)
    if "://" in text:
        raise CheckpointError(
            f"safetensors are read and written in local files only, not at {text}; "
            "copy them to a disk or mount the storage"
        )
    return os.path.abspath(os.path.expanduser(text))


# ------------------------------------------------------------------ which files


def _files_of(where: str) -> tuple[tuple[str, ...], dict[str, str] | None]:
    """The files of a checkpoint; with an index, also tensor name → file name."""
    if os.path.isfile(where):
        if not where.endswith(".json"):
            return (where,), None
        return _files_of_index(where)
    if not os.path.isdir(where):
        raise CheckpointError(
            f"there is no file or directory {where}; a model of the Hugging Face Hub "
            "is downloaded with huggingface_hub.snapshot_download, which says where"
        )
    single, index = os.path.join(where, SINGLE), os.path.join(where, INDEX)
    if os.path.exists(single) and os.path.exists(index):
        raise CheckpointError(
            f"the directory {where} has both {SINGLE} and {INDEX}, which may differ; "
            "pass the path of the one to read"
        )
    if os.path.exists(single):
        return (single,), None
    if os.path.exists(index):
        return _files_of_index(index)
    try:
        names = sorted(os.listdir(where))
    except OSError as error:
        raise CheckpointError(f"cannot read {where}: {error.strerror}") from error
    files = [os.path.join(where, name) for name in names if _is_file_name(name)]
    if not files:
        raise CheckpointError(
            f"the directory {where} has no .safetensors files; it holds {names[:5]}"
        )
    return tuple(files), None


def _is_file_name(name: str) -> bool:
    """Whether it names a visible .safetensors file in the same directory."""
    plain = os.path.basename(name) == name and not name.startswith(".")
    return plain and "\\" not in name and name.endswith(".safetensors")


def _files_of_index(index: str) -> tuple[tuple[str, ...], dict[str, str]]:
    try:
        with open(index, "rb") as file:
            data = _parsed(file.read(), index)
    except OSError as error:
        raise CheckpointError(f"cannot read {index}: {error.strerror}") from error
    found = data.get("weight_map")
    if not isinstance(found, dict) or not found:
        raise CheckpointError(
            f"{index}: it has no 'weight_map', which says which file holds which tensor"
        )
    folder, problems = os.path.dirname(index), []
    files = {}
    for name, file in found.items():
        if not isinstance(file, str) or not _is_file_name(file):
            problems.append(
                f"{index}: tensor {name!r} is said to be in {file!r}, which is no name "
                "of a .safetensors file beside the index"
            )
        elif file not in files:
            files[file] = os.path.join(folder, file)
            if not os.path.isfile(files[file]):
                problems.append(
                    f"{index}: it names {file}, for {name!r} and others, but there is "
                    "no such file; was the download complete?"
                )
    if problems:
        raise problem_list(f"cannot read {folder}", problems)
    return tuple(files.values()), found


def _index_problems(
    where: str, index: Mapping[str, str], tensors: dict[str, Tensor]
) -> list[str]:
    problems = []
    for name, file in index.items():
        if name not in tensors or os.path.basename(tensors[name].file) != file:
            problems.append(f"{file}: the index says it has {name!r}, but it has not")
    problems += [
        f"{tensor.file}: the index does not name its tensor {name!r}"
        for name, tensor in tensors.items()
        if name not in index
    ]
    return problems


# -------------------------------------------------------------------- one header


def read_header(file: str) -> dict[str, Tensor]:
    """Name → tensor of one file, in the order of their bytes."""
    try:
        with open(file, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            start = stream.read(8)
            if len(start) < 8:
                raise CheckpointError(
                    f"{file}: it has {size} bytes, no safetensors file; was the "
                    "download complete?"
                )
            length = int.from_bytes(start, "little")
            if length > min(_HEADER_BYTES, size - 8):
                raise CheckpointError(
                    f"{file}: the header is said to have {length} bytes, the file has "
                    f"{size} and headers at most {_HEADER_BYTES}; it is cut off, or no "
                    "safetensors file"
                )
            text = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    entries = _parsed(text, file)
    if not isinstance(entries.pop("__metadata__", {}), dict):
        raise CheckpointError(f"{file}: the '__metadata__' of the header is no object")
    return _tensors(entries, file, 8 + length, size - 8 - length)


def _parsed(text: bytes, file: str) -> dict[str, Any]:
    """The JSON object in a header or an index."""
    try:
        found = json.loads(text.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: the {'index' if file.endswith('.json') else 'header'} is no "
            f"valid JSON, or not of this format: {error}"
        ) from error
    if not isinstance(found, dict):
        raise CheckpointError(
            f"{file}: expected a JSON object, got a {type(found).__name__}"
        )
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = collections.Counter(name for name, _ in pairs)
        twice = names.most_common(1)[0][0]
        raise ValueError(f"the name {twice!r} occurs twice")
    return found


def _tensors(
    entries: Mapping[str, Any], file: str, begin: int, size: int
) -> dict[str, Tensor]:
    """Check the entries of a header against the bytes that follow it."""
    spans: list[tuple[int, int, Tensor]] = []
    problems: list[str] = []
    for name, entry in entries.items():
        problem = _entry_problem(entry, size)
        if problem is not None:
            problems.append(f"{file}: tensor {name!r}: {problem}")
            continue
        first, last = entry["data_offsets"]
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        spans.append((first, last, Tensor(name, dtype, shape, file, begin + first)))
    spans.sort(key=lambda span: span[:2])
    if not problems:
        problems += _span_problems(spans, file, size)
    if problems:
        raise problem_list(f"cannot read {file}", problems)
    return {tensor.name: tensor for _, _, tensor in spans}


def _entry_problem(entry: Any, size: int) -> str | None:
    """The problem with a single entry, or None."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(
        entry
    ):
        return "its entry must have dtype, shape and data_offsets"
    name, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(name, str) or name not in DTYPES:
        return f"the dtype {name!r} is not known; known are {', '.join(DTYPES)}"
    if not _are_counts(shape) or len(shape) > _MOST_DIMS:
        return f"the shape {str(shape)[:80]} is invalid"
    count = math.prod(shape)
    held = math.prod(size for size in shape if size) * DTYPES[name].itemsize
    if held > _MOST_BYTES:
        return f"the shape {show_shape(tuple(shape))} is larger than any memory"
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"the data_offsets {str(offsets)[:80]} are invalid"
    if offsets[1] > size:
        return (
            f"its data end at byte {offsets[1]}, the file has {size} bytes of data; it "
            "is cut off, or the header is wrong"
        )
    if offsets[1] - offsets[0] != count * DTYPES[name].itemsize:
        return (
            f"it has {offsets[1] - offsets[0]} bytes, but {name} "
            f"{show_shape(tuple(shape))} takes {count * DTYPES[name].itemsize}"
        )
    return None


def _are_counts(values: Any) -> bool:
    """Whether it is a list of integers that fit into 64 bits and are not negative."""
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value <= _MOST_BYTES for value in values
    )


def _span_problems(
    spans: list[tuple[int, int, Tensor]], file: str, size: int
) -> list[str]:
    """Problems of overlapping tensors, and of bytes that belong to none."""
    problems, end, before = [], 0, "the header"
    for first, last, tensor in spans:
        if first != end:
            what = "overlaps" if first < end else f"begins {first - end} bytes after"
            problems.append(f"{file}: tensor {tensor.name!r} {what} {before}")
        end, before = last, repr(tensor.name)
    if end != size and not problems:
        problems.append(
            f"{file}: {size - end} bytes follow {before}, which is the last tensor"
        )
    return problems
