"""Write safetensors files under temporary names, renamed when all are complete.

Not written by the package `safetensors`, which takes all tensors of a file at once:
here a file is written tensor by tensor, as they arrive from the devices.
"""

import dataclasses
import functools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from flax_layoutmap._core.mesh import retyped
from flax_layoutmap._rules.records import Shape
from flax_layoutmap._show.progress import shown_progress
from flax_layoutmap.checkpoint._leaves import in_portions
from flax_layoutmap.checkpoint._mapping_blocks import Block, Range, full_index
from flax_layoutmap.checkpoint._places import on_first_process
from flax_layoutmap.checkpoint._safetensors_header import INDEX, NAMES, SINGLE

_OWN_NAMES = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
)


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of a tensor that one leaf gives.

    `leaf` is its position, `index` the box of it that is needed, and `blocks` say where
    its elements go.
    """

    leaf: int
    path: str
    index: tuple[Range, ...]
    blocks: tuple[Block, ...]


@dataclasses.dataclass(frozen=True)
class Made:
    """A tensor to save, and the parts that leaves give to it."""

    name: str
    dtype: Any
    shape: Shape
    parts: list[Part] = dataclasses.field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def cannot_write(place: str, overwrite: bool) -> str | None:
    """The reason why nothing can be written to a place, or None."""
    folder = os.path.dirname(place) if _is_file(place) else place
    if os.path.lexists(folder) and not os.path.isdir(folder):
        return f"{folder} is a file, not a directory"
    above = folder
    while not os.path.exists(above):
        above = os.path.dirname(above)
    if not os.access(above, os.W_OK | os.X_OK):
        return f"the directory {above} cannot be written to"
    taken = (
        [place] if _is_file(place) else [os.path.join(place, n) for n in _own(place)]
    )
    taken = [path for path in taken if os.path.lexists(path)]
    if taken and not overwrite:
        return f"{taken[0]} exists; save to another path, or pass overwrite=True"
    return None


def _is_file(place: str) -> bool:
    return place.endswith(".safetensors")


def _own(folder: str) -> list[str]:
    """Names of a model's files in a directory."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(name for name in names if _OWN_NAMES.fullmatch(name))


def distributed(
    place: str, tensors: Sequence[Made], max_file_bytes: float
) -> dict[str, list[Made]]:
    """File name → its tensors, filled in the order of the tree.

    Within a file, wide dtypes come first, so that every tensor is aligned to its
    elements.
    """
    limit = math.inf if _is_file(place) else max_file_bytes
    groups = [
        sorted(group, key=lambda t: -t.dtype.itemsize)
        for group in in_portions(tensors, lambda t: t.nbytes, limit)
    ]
    if _is_file(place):
        return {os.path.basename(place): groups[0]}
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {
        f"model-{number:05}-of-{len(groups):05}.safetensors": group
        for number, group in enumerate(groups, 1)
    }


class Writer:
    """Writes the tensors of `files` one after another.

    Files are written in a hidden folder beside their final place; `finish` moves them,
    and `clean_up` removes what was not finished.
    """

    def __init__(
        self, place: str, files: Mapping[str, Sequence[Made]], texts: Mapping[str, str]
    ) -> None:
        self._place, self._files, self._texts = place, files, texts
        self._folder = os.path.dirname(place) if _is_file(place) else place
        name = os.path.basename(place) if _is_file(place) else "model"
        self._hidden = os.path.join(self._folder, f".{name}.unfinished")
        self._made_folder = not os.path.isdir(self._folder)
        self._todo = [file for file, held in files.items() for _ in held]
        self._stream: Any = None

    def add(self, values: np.ndarray) -> None:
        """Write the next tensor."""
        file = self._todo.pop(0)
        if self._stream is None:
            self._stream = self._opened(file)
        self._stream.write(values.data)
        if not self._todo or self._todo[0] != file:
            _close(self._stream)
            self._stream = None

    def finish(self) -> None:
        """Move all files to their places, and remove an older model there."""
        new = [*self._files]
        if len(self._files) > 1:
            new.append(INDEX)
            stream = open(os.path.join(self._hidden, INDEX), "wb")
            stream.write(_index(self._files))
            _close(stream)
        # Were the process killed while files are moved, some would be missing, which is
        # noticed; old and new ones side by side might not be.
        for name in () if _is_file(self._place) else _own(self._folder):
            os.remove(os.path.join(self._folder, name))
        for name in new:
            os.replace(
                os.path.join(self._hidden, name), os.path.join(self._folder, name)
            )
        self._made_folder = False

    def clean_up(self) -> None:
        """Remove what was not finished."""
        if self._stream is not None:
            try:
                self._stream.close()
            except OSError:
                pass  # what it would still write is removed below
        shutil.rmtree(self._hidden, ignore_errors=True)
        if self._made_folder and os.path.isdir(self._folder):
            if not os.listdir(self._folder):
                os.rmdir(self._folder)

    def _opened(self, file: str) -> Any:
        if file == next(iter(self._files)):
            os.makedirs(self._folder, exist_ok=True)
            shutil.rmtree(self._hidden, ignore_errors=True)  # of a save that was killed
            os.mkdir(self._hidden)
            total = sum(t.nbytes for held in self._files.values() for t in held)
            free = shutil.disk_usage(self._folder).free
            if total > free:
                raise OSError(f"{total} bytes are to be written, and {free} are free")
        stream = open(os.path.join(self._hidden, file), "wb")
        stream.write(_header(self._files[file], self._texts))
        return stream


def _close(stream: Any) -> None:
    """Flush a file to disk and close it."""
    with stream:
        stream.flush()
        os.fsync(stream.fileno())


def _index(files: Mapping[str, Sequence[Made]]) -> bytes:
    """The content of the index file."""
    total = sum(t.nbytes for held in files.values() for t in held)
    names = {t.name: file for file, held in files.items() for t in held}
    data = {
        "metadata": {"total_size": total},
        "weight_map": dict(sorted(names.items())),
    }
    return json.dumps(data, indent=2).encode()


def _header(tensors: Sequence[Made], texts: Mapping[str, str]) -> bytes:
    """The length and the header that a file begins with."""
    header: dict[str, Any] = {"__metadata__": dict(texts)}
    at = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


# ----------------------------------------------------- tensors, one after another


def write(
    place: str,
    order: Sequence[Made],
    leaves: Sequence[Any],
    writer: Writer | None,
    progress: bool | Callable[[int, int], object] | None,
) -> None:
    """Bring each tensor to process 0, which writes it."""
    written, total = 0, sum(tensor.nbytes for tensor in order)
    shown = False if callable(progress) else progress

    def together(action: Callable[[Writer], None]) -> None:
        on_first_process(
            lambda: None if writer is None else action(writer),
            lambda why: f"cannot save to {place}: {why}; nothing was left behind",
        )

    try:
        with shown_progress(f"saving {place}", total, shown, lambda: written):
            for tensor in order:
                parts = [_fetched(leaves[p.leaf], p.index) for p in tensor.parts]
                together(functools.partial(_add, tensor, parts))
                written += tensor.nbytes
                if writer is not None and callable(progress):
                    progress(written, total)
            together(Writer.finish)
    finally:
        if writer is not None:
            writer.clean_up()


def _add(tensor: Made, parts: Sequence[np.ndarray], writer: Writer) -> None:
    writer.add(_made(tensor, parts))


def _made(tensor: Made, parts: Sequence[np.ndarray]) -> np.ndarray:
    """The bytes of a tensor, assembled from its parts."""
    made: Any = np.empty(tensor.nbytes, np.uint8)
    size = tensor.dtype.itemsize
    for part, value in zip(tensor.parts, parts, strict=True):
        for block in part.blocks:
            piece = block.piece(part.index, value)
            steps = [stride * size for stride in piece.strides]
            shape, begin = piece.out.shape, piece.offset * size
            view = np.ndarray(shape, tensor.dtype, made, begin, steps)
            np.copyto(view, piece.out, casting="unsafe")
    return made


def _fetched(leaf: Any, index: tuple[Range, ...]) -> np.ndarray:
    """A box of a leaf on the host; a collective over processes."""
    box = [slice(*part) for part in index]
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)[*box, ...]
    whole = index == full_index(leaf.shape)
    if leaf.is_fully_addressable and whole:
        # Not np.asarray(leaf), which would keep the copy for as long as the leaf lives.
        made = np.empty(leaf.shape, leaf.dtype)
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0:
                made[shard.index] = np.asarray(shard.data)
        return made
    leaf = _on_auto_axes(leaf)
    starts = tuple(start for start, _ in index)
    sizes = tuple(stop - start for start, stop in index)
    if leaf.is_fully_addressable:
        return np.asarray(_slicer(sizes, None)(leaf, starts))
    everywhere = NamedSharding(leaf.sharding.mesh, PartitionSpec())
    part = _slicer(sizes, everywhere)(leaf, starts)
    if jax.process_index():
        jax.block_until_ready(part)
        return np.empty(0)
    return np.asarray(part)


@functools.lru_cache(maxsize=256)
def _slicer(sizes: Shape, sharding: Any) -> Callable[..., jax.Array]:
    options = {} if sharding is None else {"out_shardings": sharding}
    return jax.jit(lambda x, starts: jax.lax.dynamic_slice(x, starts, sizes), **options)


def _on_auto_axes(leaf: jax.Array) -> jax.Array:
    """The array on Auto axes; JAX cannot slice sharded dims on Explicit ones."""
    sharding = leaf.sharding
    if not isinstance(sharding, NamedSharding):
        return leaf
    own: Any = sharding.mesh  # of devices, as there is an array
    if AxisType.Explicit not in own.axis_types:
        return leaf
    mesh = retyped(own, AxisType.Auto)
    auto = NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    shards = [shard.data for shard in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(leaf.shape, auto, shards)
