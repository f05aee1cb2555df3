"""Safetensors: headers, and tensors that are read a box at a time.

A file is the length of its header (8 bytes, little-endian), the header (JSON: name →
dtype, shape, first and last byte), and the numbers. Large checkpoints are several files
and `model.safetensors.index.json`, which lists each file's tensors.

The package `safetensors` does not give the place of a tensor in its file, nor float8 to
NumPy (0.8.0). A tensor is a NumPy array of mapped memory, and an operation on it a
`Lazy`, which turns a box of its result into boxes of its inputs.
"""

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap._rules.records import Shape, show_shape
from flax_layoutmap.checkpoint._places import absolute, is_url

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

DTYPES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype(jnp.bfloat16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "F8_E8M0": np.dtype(jnp.float8_e8m0fnu),
    **{"BOOL": np.dtype("?"), "C64": np.dtype("c8"), "F64": np.dtype("f8")},
    **{"F32": np.dtype("f4"), "F16": np.dtype("f2")},
    **{f"I{8 * n}": np.dtype(f"i{n}") for n in (8, 4, 2, 1)},
    **{f"U{8 * n}": np.dtype(f"u{n}") for n in (8, 4, 2, 1)},
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

    @property
    def is_float8(self) -> bool:
        return self.dtype.name.startswith("float8")

    def __str__(self) -> str:
        return f"tensor {self.name!r} {show_shape(self.shape)}"


def read_headers(where: str) -> dict[str, Tensor]:
    """Name → tensor of a checkpoint."""
    tensors: dict[str, Tensor] = {}
    try:
        files, index = _files_of(where)
        for tensor in (tensor for file in files for tensor in _read_header(file)):
            name, file = tensor.name, tensor.file
            if index is not None and index.get(name) != os.path.basename(file):
                continue
            if (other := tensors.setdefault(name, tensor)) is not tensor:
                raise CheckpointError(
                    f"{file}: {other.file} has a tensor {name!r} as well; pass the "
                    "path of one of the files, or remove the other"
                )
    except OSError as error:
        raise CheckpointError(f"cannot read {where}: {error}") from error
    for name, file in (index or {}).items():
        if name not in tensors:
            raise CheckpointError(f"{where}: {name!r} is not in {file}, as it says")
    return tensors


def local(path: str | os.PathLike[str]) -> str:
    """The absolute path; URLs are refused."""
    where = absolute(path)
    if is_url(where):
        raise CheckpointError(
            f"safetensors are read and written in local files only, not at {where}; "
            "copy them to a disk or mount the storage"
        )
    return where


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
    files = [name for name in names if re.fullmatch(r"[^.].*\.safetensors", name)]
    # A part with a tag counts only if an index names it.
    tagged = {x[0] for x in map(WRITTEN.fullmatch, files) if x and x["tag"]}
    if not {*files} - tagged:
        raise CheckpointError(
            f"the directory {where} has no .safetensors files; it holds {names[:5]}"
        )
    return [os.path.join(where, name) for name in files if name not in tagged], None


def _files_of_index(index: str) -> tuple[list[str], dict[str, str]]:
    with open(index, "rb") as file:
        names = _parsed(file.read(), index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise CheckpointError(
            f"{index}: it has no 'weight_map', which says which file holds which tensor"
        )
    folder = os.path.dirname(index)
    files = {str(file): os.path.join(folder, str(file)) for file in names.values()}
    for file, path in files.items():
        if os.path.basename(file) != file or not os.path.isfile(path):
            raise CheckpointError(
                f"{index}: it names {file!r}, which is not a file beside it; was the "
                "download complete?"
            )
    return [*files.values()], names


def _read_header(file: str) -> Iterator[Tensor]:
    with open(file, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        begin = 8 + length
        if begin > size:
            raise CheckpointError(
                f"{file}: the header is said to have {length} bytes, the file has "
                f"{size}; it is cut off (was the download complete?), or not a "
                "safetensors file"
            )
        entries = _parsed(stream.read(length), file)
    entries.pop("__metadata__", None)
    for name, entry in entries.items():
        try:
            dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
            first, last = entry["data_offsets"]
            tensor = Tensor(name, dtype, shape, file, begin + first)
            is_sound = all(type(n) is int and n >= 0 for n in (*shape, first, last))
            if not is_sound or tensor.nbytes != last - first or begin + last > size:
                raise ValueError
        except (LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{file}: tensor {name!r}: {str(entry)[:80]} is not a place of a "
                f"tensor in the {size - begin} bytes of data; was the file cut off?"
            ) from error
        yield tensor


def _parsed(text: bytes, file: str) -> dict[str, Any]:
    try:
        if isinstance(value := json.loads(text), dict):
            return value
        raise ValueError(f"a {type(value).__name__}, not an object")
    except (ValueError, RecursionError) as error:
        kind = "index" if file.endswith(".json") else "header"
        message = f"{file}: the {kind} is not valid JSON: {error}"
        raise CheckpointError(message) from error


# ------------------------------------------------------------------- boxes of arrays

Box = tuple[slice, ...]  # starts and stops, without None and without steps
Sizes = Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Lazy:
    """An array of which `read` returns a box.

    Boxes may be read wider than needed where a dim was joined or split, never narrower.
    """

    shape: Shape
    read: Callable[[Box], np.ndarray]

    def __getitem__(self, box: Box) -> np.ndarray:
        return self.read(box)


Array = np.ndarray | Lazy


def nothing(shape: Iterable[int]) -> Lazy:
    return Lazy(tuple(shape), lambda box: np.empty(box_shape(box)))


def full(shape: Iterable[int]) -> Box:
    return tuple(slice(0, size) for size in shape)


def box_shape(box: Box) -> Shape:
    return tuple(part.stop - part.start for part in box)


def replaced(items: tuple[Any, ...], axis: int, *new: Any) -> tuple[Any, ...]:
    return (*items[:axis], *new, *items[axis + 1 :])


def transposed(x: Array, axes: Sequence[int]) -> Lazy:
    back = [axes.index(dim) for dim in range(len(axes))]
    return Lazy(
        tuple(x.shape[dim] for dim in axes),
        lambda box: x[tuple(box[dim] for dim in back)].transpose(axes),
    )


def entries(x: Array, axis: int, chosen: slice) -> Lazy:
    start, _, step = chosen.indices(x.shape[axis])
    size = len(range(*chosen.indices(x.shape[axis])))

    def read(box: Box) -> np.ndarray:
        first, count = start + box[axis].start * step, box_shape(box)[axis]
        within = slice(first, first + max(0, (count - 1) * step + 1))
        every = (*[slice(None)] * axis, slice(None, None, step))
        return x[replaced(box, axis, within)][every]

    return Lazy(replaced(x.shape, axis, size), read)


def entry(x: Array, axis: int, at: int) -> Lazy:
    def read(box: Box) -> np.ndarray:
        return x[(*box[:axis], slice(at, at + 1), *box[axis:])].squeeze(axis)

    return Lazy(replaced(x.shape, axis), read)


def with_dim(x: Array, axis: int) -> Lazy:
    shape = (*x.shape[:axis], 1, *x.shape[axis:])
    return Lazy(shape, lambda box: np.expand_dims(x[replaced(box, axis)], axis))


def assembled(
    shape: Shape, axis: int, parts: Sequence[tuple[slice, Array]], dtype: Any
) -> Lazy:
    """An array whose entries along a dim come from several, which are cast."""

    def read(box: Box) -> np.ndarray:
        wanted, made = range(box[axis].start, box[axis].stop), None
        for chosen, x in parts:
            held = range(*chosen.indices(shape[axis]))
            low, high = (
                min(max(0, -(-(end - held.start) // held.step)), len(held))
                for end in (wanted.start, wanted.stop)
            )
            if low < high:
                values = x[replaced(box, axis, slice(low, high))]
                if made is None:
                    made = np.empty_like(values, dtype, "K", shape=box_shape(box))
                first = held[low] - wanted.start
                to = slice(first, first + (high - low - 1) * held.step + 1, held.step)
                made[replaced(full(made.shape), axis, to)] = values
        return np.empty(box_shape(box), dtype) if made is None else made

    return Lazy(shape, read)


def unflattened(x: Array, sizes: Sizes) -> Lazy:
    def read(box: Box) -> np.ndarray:
        outer, rows, inner = [], [], []
        rest = list(box)
        for group in sizes:
            first, *others = (rest.pop(0) for _ in group)
            stride = math.prod(group[1:])
            outer.append(slice(first.start * stride, first.stop * stride))
            rows += [first.stop - first.start, *group[1:]]
            inner += [slice(None), *others]
        return x[tuple(outer)].reshape(rows)[tuple(inner)]

    return Lazy(tuple(size for group in sizes for size in group), read)


def flattened(x: Array, sizes: Sizes) -> Lazy:
    """The reverse of `unflattened`; dims that are joined are read whole."""

    def read(box: Box) -> np.ndarray:
        pairs = [*zip(sizes, box, strict=True)]
        inner = [full(group) if len(group) > 1 else (part,) for group, part in pairs]
        values = x[tuple(part for parts in inner for part in parts)]
        joined = values.reshape([math.prod(box_shape(parts)) for parts in inner])
        rest = (part if len(group) > 1 else slice(None) for group, part in pairs)
        return joined[tuple(rest)]

    return Lazy(tuple(math.prod(group) for group in sizes), read)


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


def scaled(weights: Array, scales: Array, block: int, dtype: Any) -> Lazy:
    """A matrix whose blocks of `block` rows and columns have a scale each."""

    def product(box: Box) -> np.ndarray:
        rows, columns = (np.arange(part.start, part.stop) // block for part in box)
        each = scales[full(scales.shape)][np.ix_(rows, columns)].astype(np.float32)
        return weights[box].astype(np.float32) * each

    return Lazy(weights.shape, lambda box: _by_rows(product, box, dtype))


# Elements that are multiplied by scales at a time, in float32.
_PRODUCTS = 1 << 20


def _by_rows(product: Callable[[Box], np.ndarray], box: Box, dtype: Any) -> np.ndarray:
    """A box of products, some rows at a time, which bounds the memory in float32."""
    made = np.empty(box_shape(box), dtype)
    first, *rest = box
    rows = max(1, _PRODUCTS // max(1, math.prod(box_shape(tuple(rest)))))
    for start in range(first.start, first.stop, rows):
        some = slice(start, min(start + rows, first.stop))
        to = slice(some.start - first.start, some.stop - first.start)
        made[to] = product((some, *rest))
    return made


# Numbers of a block of MXFP4, which have one scale.
MXFP4_BLOCK = 32

# Each byte of MXFP4 as its two numbers: the low four bits come first.
_BYTES = np.arange(256, dtype=np.uint8)
_NUMBERS = np.stack([_BYTES & 15, _BYTES >> 4], axis=-1).view(jnp.float4_e2m1fn)
_PAIRS = _NUMBERS.astype(np.float32)


def from_mxfp4(blocks: Array, scales: Array, dtype: Any) -> Lazy:
    """Blocks (…, n / 32, 16) and scales (…, n / 32), both uint8, as numbers (…, n).

    A scale is a power of two, and its byte the exponent plus 127 (float8_e8m0fnu):
    https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
    """

    def product(box: Box) -> np.ndarray:
        *before, last = box
        first, end = last.start // MXFP4_BLOCK, -(-last.stop // MXFP4_BLOCK)
        held = (*before, slice(first, end))
        numbers = _PAIRS[blocks[(*held, slice(0, 16))]]
        exponents = np.ascontiguousarray(scales[held]).view(jnp.float8_e8m0fnu)
        numbers *= exponents.astype(np.float32)[..., None, None]
        joined = numbers.reshape(*box_shape(tuple(before)), -1)
        skip = last.start - first * MXFP4_BLOCK
        return joined[..., skip : skip + last.stop - last.start]

    shape = (*scales.shape[:-1], scales.shape[-1] * MXFP4_BLOCK)
    return Lazy(shape, lambda box: _by_rows(product, box, dtype))
