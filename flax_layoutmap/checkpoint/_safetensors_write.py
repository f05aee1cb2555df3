"""Write safetensors under names of their own, and rename them at the end.

At any time a folder has the old model or the new one. The files of a model in several
files have a random tag in their names, and the index names them: renaming it replaces
the model. `model.safetensors` counts before an index, so it is renamed last, or removed
last. Writers that rename at the same time take turns, by a lock on the folder.
"""

import contextlib
import dataclasses
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from flax_layoutmap._rules.records import Shape, show_shape
from flax_layoutmap.checkpoint._lazy import Array
from flax_layoutmap.checkpoint._safetensors import INDEX, NAMES, SINGLE, WRITTEN


@dataclasses.dataclass(frozen=True)
class Made:
    """A tensor to save, or a part of one, and the paths of the leaves that make it."""

    name: str
    dtype: Any
    values: Array
    paths: str

    @property
    def shape(self) -> Shape:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {show_shape(self.shape)} of {self.paths}"


def cannot_write(place: str, overwrite: bool) -> list[str]:
    """The reason why nothing can be written to a place, or an empty list."""
    folder = os.path.dirname(place) if _is_file(place) else place
    if os.path.lexists(folder) and not os.path.isdir(folder):
        return [f"{folder} is a file, not a directory"]
    names = [os.path.basename(place)] if _is_file(place) else _written(place)
    taken = [name for name in names if os.path.lexists(os.path.join(folder, name))]
    if taken and not overwrite:
        path = os.path.join(folder, taken[0])
        return [f"{path} exists; save to another path, or pass overwrite=True"]
    return []


def _is_file(place: str) -> bool:
    return place.endswith(".safetensors")


def _written(folder: str) -> list[str]:
    """Names of a model's files in a directory."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(name for name in names if WRITTEN.fullmatch(name))


class Writer:
    """Writes `tensors` one after another to a place, in that order.

    Call `start`, `add` for each tensor, `finish`, and `clean_up` whatever happens.
    """

    def __init__(
        self,
        place: str,
        tensors: Sequence[Made],
        max_file_bytes: float,
        texts: Mapping[str, str],
    ) -> None:
        self._place, self._texts = place, texts
        self._folder = os.path.dirname(place) if _is_file(place) else place
        self._tag = os.urandom(4).hex()
        self._single = os.path.basename(place) if _is_file(place) else SINGLE
        hidden = f".{self._single}.{self._tag}.unfinished"
        self._hidden = os.path.join(self._folder, hidden)
        limit = math.inf if _is_file(place) else max_file_bytes
        self._files = self._named(_groups(tensors, limit))
        self.tensors = [tensor for held in self._files.values() for tensor in held]
        self._todo = [file for file, held in self._files.items() for _ in held]
        self._made_folder, self._stream = False, None

    def _named(self, groups: list[list[Made]]) -> dict[str, list[Made]]:
        """File name → its tensors; wide dtypes come first, which aligns all."""
        groups = [sorted(group, key=lambda t: -t.dtype.itemsize) for group in groups]
        if len(groups) == 1:
            return {self._single: groups[0]}
        of = f"of-{len(groups):05}.safetensors"
        return {
            f"model-{self._tag}-{number:05}-{of}": group
            for number, group in enumerate(groups, 1)
        }

    def start(self) -> None:
        """Make the hidden folder that the files are written in."""
        self._made_folder = not os.path.isdir(self._folder)
        os.makedirs(self._folder, exist_ok=True)
        os.mkdir(self._hidden)

    def add(self, tensor: Made, values: np.ndarray) -> None:
        """Write the next tensor."""
        file = self._todo.pop(0)
        if self._stream is None:
            self._stream = open(os.path.join(self._hidden, file), "wb")
            self._stream.write(_header(self._files[file], self._texts))
        made = np.ascontiguousarray(values, tensor.dtype)
        self._stream.write(made.reshape(-1).view(np.uint8).data)
        if not self._todo or self._todo[0] != file:
            _close(self._stream)
            self._stream = None

    def finish(self) -> None:
        """Rename all files to their places, and remove an older model there."""
        names = [*self._files]
        if len(names) > 1:
            names.append(INDEX)
            with open(os.path.join(self._hidden, INDEX), "wb") as stream:
                stream.write(_index(self._files))
                _close(stream)
        with _turn(self._folder):
            for name in names:
                os.replace(
                    os.path.join(self._hidden, name), os.path.join(self._folder, name)
                )
            if not _is_file(self._place):
                self._remove(
                    name for name in _written(self._folder) if name not in names
                )
        self._made_folder = False

    def clean_up(self) -> None:
        """Remove what is not part of a model, after `finish` or in its place."""
        with contextlib.suppress(OSError, ValueError):
            if self._stream is not None:
                self._stream.close()
        shutil.rmtree(self._hidden, ignore_errors=True)
        if not self._is_published():
            self._remove(name for name in self._files if self._tag in name)
        if self._made_folder:
            with contextlib.suppress(OSError):
                os.rmdir(self._folder)

    def _is_published(self) -> bool:
        """Whether the index of the folder is that of this writer."""
        try:
            with open(os.path.join(self._folder, INDEX), "rb") as stream:
                return next(iter(self._files)).encode() in stream.read()
        except OSError:
            return False

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.remove(os.path.join(self._folder, name))


def _groups(tensors: Sequence[Made], limit: float) -> list[list[Made]]:
    """The tensors in groups of at most `limit` bytes; a larger one is alone."""
    groups: list[list[Made]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    return groups


@contextlib.contextmanager
def _turn(folder: str) -> Iterator[None]:
    """Hold a lock on a folder, where the system has such locks."""
    try:
        import fcntl

        lock = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        yield
        return
    try:
        with contextlib.suppress(OSError):  # a network file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


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
