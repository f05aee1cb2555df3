"""Write safetensors under names of their own, and rename them at the end.

At any time a folder has the old model or the new one. The files of a model in several
files have a random tag in their names, and the index names them: renaming it replaces
the model. `model.safetensors` counts before an index, so it is renamed last, or removed
last. Writers that rename at the same time take turns, by a lock on the folder. Each
has a lock on its hidden folder, so that the next one removes what a killed one left.
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from flax_layoutmap._rules.records import Shape, show_shape
from flax_layoutmap.checkpoint._leaves import grouped
from flax_layoutmap.checkpoint._safetensors import INDEX, NAMES, SINGLE, WRITTEN, Array

_HIDDEN = re.compile(r"\..+\.safetensors\.[0-9a-f]{8}\.unfinished")


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


class Writer:
    """Writes a model to a place; `files` are its tensors by the names of the files.

    Call `start`, `add` for each tensor in their order, `finish`, and `clean_up`
    whatever happens.
    """

    def __init__(self, place: str, tensors: Sequence[Made], max_file_bytes: float):
        self._is_file = place.endswith(".safetensors")
        path = place if self._is_file else os.path.join(place, SINGLE)
        self._folder, single = os.path.split(path)
        self._tag = os.urandom(4).hex()
        hidden = f".{single}.{self._tag}.unfinished"
        self._hidden = os.path.join(self._folder, hidden)
        self._lock = contextlib.ExitStack()
        limit = math.inf if self._is_file else max_file_bytes
        groups = grouped(tensors, lambda tensor: tensor.nbytes, limit)
        # Wide dtypes come first, which aligns all.
        groups = [sorted(group, key=lambda t: -t.dtype.itemsize) for group in groups]
        names = [single]
        if len(groups) > 1:
            of = f"of-{len(groups):05}.safetensors"
            numbers = range(1, len(groups) + 1)
            names = [f"model-{self._tag}-{number:05}-{of}" for number in numbers]
        self.files = dict(zip(names, groups, strict=True))

    def cannot_write(self, overwrite: bool) -> list[str]:
        if os.path.lexists(self._folder) and not os.path.isdir(self._folder):
            return [f"{self._folder} is a file, not a directory"]
        names = [*self.files] if self._is_file else self._written()
        for path in (os.path.join(self._folder, name) for name in names):
            if os.path.lexists(path) and not overwrite:
                return [f"{path} exists; save to another path, or pass overwrite=True"]
        return []

    def _written(self) -> list[str]:
        names = os.listdir(self._folder) if os.path.isdir(self._folder) else []
        return sorted(name for name in names if WRITTEN.fullmatch(name))

    def start(self, texts: Mapping[str, str]) -> None:
        os.makedirs(self._folder, exist_ok=True)
        with _turn(self._folder):
            for left in filter(_HIDDEN.fullmatch, os.listdir(self._folder)):
                with _turn(os.path.join(self._folder, left), wait=False) as is_free:
                    if is_free:  # its writer was killed
                        shutil.rmtree(os.path.join(self._folder, left), True)
            os.mkdir(self._hidden)
            self._lock.enter_context(_turn(self._hidden))
        for file, tensors in self.files.items():
            self._append(file, _header(tensors, texts))

    def add(self, file: str, tensor: Made, values: np.ndarray) -> None:
        values = np.ascontiguousarray(values, tensor.dtype)
        self._append(file, values.reshape(-1).view(np.uint8).data)

    def finish(self) -> None:
        """Rename all files to their places, and remove an older model there."""
        names = [*self.files]
        if len(names) > 1:
            names.append(INDEX)
            self._append(INDEX, _index(self.files))
        for name in names:
            with open(os.path.join(self._hidden, name), "rb") as stream:
                os.fsync(stream.fileno())
        with _turn(self._folder):
            for name in names:
                os.replace(
                    os.path.join(self._hidden, name), os.path.join(self._folder, name)
                )
            for name in [] if self._is_file else self._written():
                with contextlib.suppress(FileNotFoundError):
                    if name not in names:
                        os.remove(os.path.join(self._folder, name))

    def clean_up(self) -> None:
        shutil.rmtree(self._hidden, ignore_errors=True)
        self._lock.close()

    def _append(self, file: str, content: Any) -> None:
        with open(os.path.join(self._hidden, file), "ab") as stream:
            stream.write(content)


@contextlib.contextmanager
def _turn(folder: str, wait: bool = True) -> Iterator[bool]:
    """Lock a folder, if the system can; yield whether it is locked."""
    try:
        import fcntl

        lock = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        yield False
        return
    is_locked = False
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = True
        yield is_locked
    finally:
        os.close(lock)


def _index(files: Mapping[str, Sequence[Made]]) -> bytes:
    total = sum(t.nbytes for tensors in files.values() for t in tensors)
    names = {t.name: file for file, tensors in files.items() for t in tensors}
    data = {
        "metadata": {"total_size": total},
        "weight_map": dict(sorted(names.items())),
    }
    return json.dumps(data, indent=2).encode()


def _header(tensors: Sequence[Made], texts: Mapping[str, str]) -> bytes:
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
