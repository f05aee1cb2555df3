"""The format of safetensors: headers, and the tensors of a checkpoint.

A file is the length of its header (8 bytes, little-endian), the header (JSON: name →
dtype, shape, first and last byte), and the numbers. Large checkpoints are several files
and `model.safetensors.index.json`, which lists each file's tensors.

The package `safetensors` does not read float8 to NumPy (0.8.0), and does not give the
place of a tensor in its file. The tests compare with it.
"""

import dataclasses
import json
import math
import os
import re
from collections.abc import Iterator
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
    "F8_E8M0": np.dtype(jnp.float8_e8m0fnu),
    **{
        f"{kind}{8 * n}": np.dtype(f"{kind.lower()}{n}")
        for kind in "IU"
        for n in (8, 4, 2, 1)
    },
    **{"BOOL": np.dtype("?"), "C64": np.dtype("c8")},
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


def read_headers(where: str) -> dict[str, Tensor]:
    """Name → tensor of a checkpoint; one error lists every problem."""
    tensors: dict[str, Tensor] = {}
    problems: list[str] = []
    try:
        files, index = _files_of(where)
        for tensor in (t for file in files for t in _read_header(file, problems)):
            name, file = tensor.name, tensor.file
            if index is not None and index.get(name) != os.path.basename(file):
                continue
            if (other := tensors.setdefault(name, tensor)) is not tensor:
                problems.append(
                    f"{file}: {other.file} has a tensor {name!r} as well; pass the "
                    "path of one of the files, or remove the other"
                )
    except OSError as error:
        raise CheckpointError(f"cannot read {where}: {error}") from error
    for name, file in (index or {}).items():
        if name not in tensors and not problems:
            problems.append(f"{where}: it says that {name!r} is in {file}, wrongly")
    if problems:
        raise problem_list(f"cannot read {where}", problems)
    return tensors


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
                "Hub is downloaded with huggingface_hub.snapshot_download"
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


def _read_header(file: str, problems: list[str]) -> Iterator[Tensor]:
    """The tensors of one file; adds the problems with them to a list."""
    with open(file, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        begin = 8 + length
        if begin > size:
            problems.append(
                f"{file}: the header is said to have {length} bytes, the file has "
                f"{size}; it is cut off (was the download complete?), or not a "
                "safetensors file"
            )
            return
        entries = _parsed(stream.read(length), file)
    entries.pop("__metadata__", None)
    for name, entry in entries.items():
        try:
            dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
            first, last = entry["data_offsets"]
            tensor = Tensor(name, dtype, shape, file, begin + first)
            is_sound = all(type(n) is int and n >= 0 for n in (*shape, first, last))
            if is_sound and tensor.nbytes == last - first and begin + last <= size:
                yield tensor
                continue
        except (LookupError, TypeError, ValueError):
            pass
        problems.append(
            f"{file}: tensor {name!r}: {str(entry)[:80]} is not a place of a tensor in "
            f"the {size - begin} bytes of data; was the file cut off?"
        )


def _parsed(text: bytes, file: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
        if isinstance(value, dict):
            return value
        why: Any = f"a {type(value).__name__}, not an object"
    except (ValueError, RecursionError) as error:
        why = error
    kind = "index" if file.endswith(".json") else "header"
    raise CheckpointError(f"{file}: the {kind} is not valid JSON: {why}")


def mapped(tensor: Tensor) -> Array:
    """A tensor whose numbers are read from the file when they are used."""
    if 0 in tensor.shape:
        return np.zeros(tensor.shape, tensor.dtype)
    is_bool = tensor.dtype == np.bool_
    dtype = np.uint8 if is_bool else tensor.dtype
    try:
        values = np.memmap(tensor.file, dtype, "r", tensor.offset, tensor.shape)
    except (OSError, ValueError) as error:  # it was removed, or cut
        raise CheckpointError(f"{tensor} cannot be read: {error}") from error
    # NumPy and XLA expect that a bool is 0 or 1.
    return Lazy(tensor.shape, lambda box: values[box] != 0) if is_bool else values
