"""The format of safetensors: headers, the tensors of a checkpoint, and their memory.

A file is the length of its header (8 bytes, little-endian), the header (JSON: name →
dtype, shape, first and last byte), and the numbers, without holes. Large checkpoints
are several files and `model.safetensors.index.json`, which lists each file's tensors.

The package `safetensors` does not read float8 to NumPy (0.8.0), and does not give the
place of a tensor in its file. The tests compare with it.
"""

import dataclasses
import json
import math
import mmap
import os
import re
from typing import Any

import jax.numpy as jnp
import numpy as np

from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap._rules.records import Shape, show_shape
from flax_layoutmap.checkpoint._lazy import Array, Lazy
from flax_layoutmap.checkpoint._leaves import problem_list

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

DTYPES: dict[str, np.dtype[Any]] = {
    **{"F64": np.dtype("f8"), "F32": np.dtype("f4"), "F16": np.dtype("f2")},
    "BF16": np.dtype(jnp.bfloat16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
    **{
        f"{kind}{8 * n}": np.dtype(f"{kind.lower()}{n}")
        for kind in "IU"
        for n in (8, 4, 2, 1)
    },
    "BOOL": np.dtype("?"),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

# The files that `save_safetensors` writes in a folder, of this version and of old ones.
# Those with a tag of their writer belong to a model only if an index names them.
WRITTEN = re.compile(
    r"model(?:-(?P<tag>[0-9a-f]{8}))?(?:-\d{5}-of-\d{5})?\.safetensors(?:\.index\.json)?"
)

# The limits of the format's own library, and NumPy's largest array.
_HEADER_BYTES, _MOST_BYTES, _MOST_DIMS = 100_000_000, 2**63 - 1, 32


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
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"tensor {self.name!r} {show_shape(self.shape)}"


@dataclasses.dataclass(frozen=True)
class Stored:
    """The headers of a checkpoint; `tensors` are in file and byte order."""

    where: str
    tensors: dict[str, Tensor]


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
        for name in found.keys() & tensors.keys():
            problems.append(
                f"{file}: {tensors[name].file} has a tensor {name!r} as well; pass "
                "the path of one of the files, or remove the other"
            )
        tensors |= found
    if index is not None and not problems:
        held = {name: os.path.basename(t.file) for name, t in tensors.items()}
        problems = [
            f"{where}: the index says that {name!r} is in {index.get(name)}, but it is "
            f"in {held.get(name)}"
            for name in {**index, **held}
            if index.get(name) != held.get(name)
        ]
    if problems:
        raise problem_list(f"cannot read {where}", problems)
    return Stored(where, tensors)


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
        return _files_of_index(where) if where.endswith(".json") else ((where,), None)
    if not os.path.isdir(where):
        raise CheckpointError(
            f"there is no file or directory {where}; a model of the Hugging Face Hub "
            "is downloaded with huggingface_hub.snapshot_download, which says where"
        )
    # The single file counts, as in `transformers`; `Writer` depends on it.
    single, index = os.path.join(where, SINGLE), os.path.join(where, INDEX)
    if os.path.exists(single):
        return (single,), None
    if os.path.exists(index):
        return _files_of_index(index)
    try:
        names = sorted(os.listdir(where))
    except OSError as error:
        raise CheckpointError(f"cannot read {where}: {error.strerror}") from error
    files = [os.path.join(where, name) for name in names if _is_complete(name)]
    if not files:
        raise CheckpointError(
            f"the directory {where} has no .safetensors files; it holds {names[:5]}"
        )
    return tuple(files), None


def _is_file_name(name: str) -> bool:
    """Whether it names a visible .safetensors file in the same directory."""
    if name.startswith(".") or "\\" in name:
        return False
    return os.path.basename(name) == name and name.endswith(".safetensors")


def _is_complete(name: str) -> bool:
    """Whether a file is a model, or a part of one, without an index that names it."""
    ours = WRITTEN.fullmatch(name)
    return _is_file_name(name) and (ours is None or ours["tag"] is None)


def _files_of_index(index: str) -> tuple[tuple[str, ...], dict[str, str]]:
    try:
        with open(index, "rb") as file:
            data = _parsed(file.read(), index)
    except OSError as error:
        raise CheckpointError(f"cannot read {index}: {error.strerror}") from error
    names = data.get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CheckpointError(
            f"{index}: it has no 'weight_map', which says which file holds which tensor"
        )
    folder = os.path.dirname(index)
    files = {str(file): os.path.join(folder, str(file)) for file in names.values()}
    problems = [
        f"{index}: it names {file!r}, which is not a .safetensors file beside it; was "
        "the download complete?"
        for file, path in files.items()
        if not _is_file_name(file) or not os.path.isfile(path)
    ]
    if problems:
        raise problem_list(f"cannot read {folder}", problems)
    return tuple(files.values()), names


# -------------------------------------------------------------------- one header


def read_header(file: str) -> dict[str, Tensor]:
    """Name → tensor of one file, in the order of their bytes."""
    try:
        with open(file, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > min(_HEADER_BYTES, size - 8):
                raise CheckpointError(
                    f"{file}: the header is said to have {length} bytes, the file has "
                    f"{size} and headers at most {_HEADER_BYTES}; it is cut off (was "
                    "the download complete?), or not a safetensors file"
                )
            text = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    entries = _parsed(text, file)
    entries.pop("__metadata__", None)
    begin, problems, spans = 8 + length, [], []
    for name, entry in entries.items():
        problem = _entry_problem(entry, size - begin)
        if problem is not None:
            problems.append(f"{file}: tensor {name!r}: {problem}")
            continue
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        first, last = entry["data_offsets"]
        spans.append((first, last, Tensor(name, dtype, shape, file, begin + first)))
    spans.sort(key=lambda span: span[:2])
    end = 0
    for first, last, tensor in spans if not problems else ():
        if first != end:
            problems.append(
                f"{file}: tensor {tensor.name!r} begins at byte {first} of the data, "
                f"but the one before it ends at {end}"
            )
        end = last
    if end != size - begin and not problems:
        problems.append(f"{file}: {size - begin - end} bytes follow the last tensor")
    if problems:
        raise problem_list(f"cannot read {file}", problems)
    return {tensor.name: tensor for _, _, tensor in spans}


def _parsed(text: bytes, file: str) -> dict[str, Any]:
    """The JSON object in a header or an index."""
    try:
        found = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: the {'index' if file.endswith('.json') else 'header'} is not "
            f"valid JSON: {error}"
        ) from error
    if not isinstance(found, dict):
        raise CheckpointError(
            f"{file}: expected a JSON object, got a {type(found).__name__}"
        )
    return found


def _entry_problem(entry: Any, size: int) -> str | None:
    """The problem with a single entry of a header, or None."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(
        entry
    ):
        return "its entry must have dtype, shape and data_offsets"
    name, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(name, str) or name not in DTYPES:
        return f"the dtype {name!r} is not known; known are {', '.join(DTYPES)}"
    width = DTYPES[name].itemsize
    if (
        not _are_counts(shape)
        or len(shape) > _MOST_DIMS
        or math.prod(dim for dim in shape if dim) * width > _MOST_BYTES
    ):
        return f"the shape {str(shape)[:80]} is invalid"
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[1] > size:
        return (
            f"the data_offsets {str(offsets)[:80]} are invalid; the file has {size} "
            "bytes of data: was it cut off?"
        )
    count = math.prod(shape) * width
    if offsets[1] - offsets[0] != count:
        return (
            f"it has {offsets[1] - offsets[0]} bytes, but {name} "
            f"{show_shape(tuple(shape))} takes {count}"
        )
    return None


def _are_counts(values: Any) -> bool:
    """Whether it is a list of integers that fit into 64 bits and are not negative."""
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value <= _MOST_BYTES for value in values
    )


# ---------------------------------------------------------------- tensors in memory


class Files:
    """The files of a checkpoint, mapped into memory when a tensor is first needed."""

    def __init__(self) -> None:
        self._maps: dict[str, mmap.mmap] = {}

    def tensor(self, tensor: Tensor) -> Array:
        """A tensor; its numbers are read from the file when they are used."""
        if 0 in tensor.shape:
            return np.zeros(tensor.shape, tensor.dtype)
        held = self._map(tensor)
        if tensor.dtype != np.bool_:
            return np.ndarray(tensor.shape, tensor.dtype, held, tensor.offset)
        raw = np.ndarray(tensor.shape, np.uint8, held, tensor.offset)
        return Lazy(tensor.shape, lambda box: _checked_bools(tensor, raw[box]))

    def _map(self, tensor: Tensor) -> mmap.mmap:
        file = tensor.file
        try:
            if file not in self._maps:
                with open(file, "rb") as stream:
                    access = mmap.ACCESS_READ
                    self._maps[file] = mmap.mmap(stream.fileno(), 0, access=access)
            size = os.path.getsize(file)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{tensor} in {file} cannot be read: {error}"
            ) from error
        if size < tensor.offset + tensor.nbytes:
            raise CheckpointError(
                f"{tensor}: {file} was cut to {size} bytes since its header was read"
            )
        return self._maps[file]

    def release(self) -> None:
        """Let the system take back the memory of what was read so far."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for held in self._maps.values():
                held.madvise(mmap.MADV_DONTNEED)


def _checked_bools(tensor: Tensor, raw: np.ndarray) -> np.ndarray:
    """The bytes as bools; NumPy would accept those that are neither 0 nor 1."""
    if raw.max(initial=0) > 1:
        raise CheckpointError(
            f"{tensor} in {tensor.file} has a byte {raw.max()}, and a BOOL is 0 or 1; "
            "the file is damaged, or was written wrongly: download it again, or leave "
            "the leaf out with exclude="
        )
    return raw.view(np.bool_)
