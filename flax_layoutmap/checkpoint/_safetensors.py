"""The format of safetensors: headers, the tensors of a checkpoint, and their memory.

A file is the length of its header (8 bytes, little-endian), the header (JSON: name →
dtype, shape, first and last byte), and the numbers. Large checkpoints are several files
and `model.safetensors.index.json`, which lists each file's tensors.

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
    """The headers of a checkpoint."""

    where: str
    tensors: dict[str, Tensor]


def open_safetensors(path: str | os.PathLike[str]) -> Stored:
    """Read and check the headers of a checkpoint; one error lists every problem.

    `path` is a file, an index, or a directory with `model.safetensors`, an index or
    other `.safetensors` files.
    """
    where = local(path)
    try:
        files, index = _files_of(where)
        headers = {file: _read_header(file) for file in files}
    except OSError as error:
        raise CheckpointError(f"cannot read {where}: {error}") from error
    problems = [text for _, texts in headers.values() for text in texts]
    tensors: dict[str, Tensor] = {}
    for file, (held, _) in headers.items():
        for name, tensor in held.items():
            if index is not None and index.get(name) != os.path.basename(file):
                continue
            if name in tensors:
                problems.append(
                    f"{file}: {tensors[name].file} has a tensor {name!r} as well; pass "
                    "the path of one of the files, or remove the other"
                )
            tensors[name] = tensor
    for name, file in (index or {}).items():
        if name not in tensors and not problems:
            problems.append(f"{where}: it says that {name!r} is in {file}, wrongly")
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


def _files_of(where: str) -> tuple[list[str], dict[str, str] | None]:
    """The files of a checkpoint; with an index, also tensor name → file name."""
    if not os.path.isdir(where):
        if not os.path.exists(where):
            raise CheckpointError(
                f"there is no file or directory {where}; a model of the Hugging Face "
                "Hub is downloaded with huggingface_hub.snapshot_download, which says "
                "where"
            )
        return _files_of_index(where) if where.endswith(".json") else ([where], None)
    # The single file counts, as in `transformers`; `Writer` depends on it.
    for name in (SINGLE, INDEX):
        if os.path.exists(os.path.join(where, name)):
            return _files_of(os.path.join(where, name))
    names = sorted(os.listdir(where))
    files = [os.path.join(where, name) for name in names if _is_complete(name)]
    if not files:
        raise CheckpointError(
            f"the directory {where} has no .safetensors files; it holds {names[:5]}"
        )
    return files, None


def _is_complete(name: str) -> bool:
    """Whether a file is a model, or a part of one, without an index that names it."""
    ours = WRITTEN.fullmatch(name)
    is_visible = name.endswith(".safetensors") and not name.startswith(".")
    return is_visible and (ours is None or ours["tag"] is None)


def _files_of_index(index: str) -> tuple[list[str], dict[str, str]]:
    with open(index, "rb") as file:
        names = _parsed(file.read(), index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CheckpointError(
            f"{index}: it has no 'weight_map', which says which file holds which tensor"
        )
    folder = os.path.dirname(index)
    files = {str(file): os.path.join(folder, str(file)) for file in names.values()}
    problems = [
        f"{index}: it names {file!r}, which is not a file beside it; was the download "
        "complete?"
        for file, path in files.items()
        if os.path.basename(file) != file or not os.path.isfile(path)
    ]
    if problems:
        raise problem_list(f"cannot read {folder}", problems)
    return [*files.values()], names


# -------------------------------------------------------------------- one header


def _read_header(file: str) -> tuple[dict[str, Tensor], list[str]]:
    """Name → tensor of one file, and the problems with them."""
    with open(file, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        begin = 8 + length
        if begin > size:
            return {}, [
                f"{file}: the header is said to have {length} bytes, the file has "
                f"{size}; it is cut off (was the download complete?), or not a "
                "safetensors file"
            ]
        entries = _parsed(stream.read(length), file)
    entries.pop("__metadata__", None)
    tensors, problems = {}, []
    for name, entry in entries.items():
        try:
            dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
            first, last = entry["data_offsets"]
            tensor = Tensor(name, dtype, shape, file, begin + first)
            is_sound = all(type(n) is int and n >= 0 for n in (*shape, first, last))
            if is_sound and tensor.nbytes == last - first and begin + last <= size:
                tensors[name] = tensor
        except (LookupError, TypeError, ValueError):
            pass
        if name not in tensors:
            problems.append(
                f"{file}: tensor {name!r}: {str(entry)[:80]} is not a place of a tensor"
                f" in the {size - begin} bytes of data; was the file cut off?"
            )
    return tensors, problems


def _parsed(text: bytes, file: str) -> dict[str, Any]:
    """The JSON object in a header or an index."""
    try:
        found = json.loads(text)
        if isinstance(found, dict):
            return found
        why: Any = f"a {type(found).__name__}, not an object"
    except (ValueError, RecursionError) as error:
        why = error
    kind = "index" if file.endswith(".json") else "header"
    raise CheckpointError(f"{file}: the {kind} is not valid JSON: {why}")


# ---------------------------------------------------------------- tensors in memory


class Files:
    """The files of a checkpoint, mapped into memory when a tensor is first needed."""

    def __init__(self) -> None:
        self._maps: dict[str, mmap.mmap] = {}

    def tensor(self, tensor: Tensor) -> Array:
        """A tensor; its numbers are read from the file when they are used."""
        if 0 in tensor.shape:
            return np.zeros(tensor.shape, tensor.dtype)
        is_bool = tensor.dtype == np.bool_
        dtype = np.dtype(np.uint8) if is_bool else tensor.dtype
        try:
            if tensor.file not in self._maps:
                with open(tensor.file, "rb") as stream:
                    held = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
                self._maps[tensor.file] = held
            size = os.path.getsize(tensor.file)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{tensor} cannot be read: {error}") from error
        if size < tensor.offset + tensor.nbytes:
            raise CheckpointError(
                f"{tensor}: {tensor.file} was cut to {size} bytes since its header was "
                "read"
            )
        mapped = self._maps[tensor.file]
        values = np.ndarray(tensor.shape, dtype, mapped, tensor.offset)
        # NumPy and XLA expect that a bool is 0 or 1.
        return Lazy(tensor.shape, lambda box: values[box] != 0) if is_bool else values

    def release(self) -> None:
        """Let the system take back the memory of what was read so far."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for held in self._maps.values():
                held.madvise(mmap.MADV_DONTNEED)
