"""Writing safetensors files, which appear under their names when all is written."""

import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flax_layoutmap.checkpoint._safetensors_file import INDEX, NAMES, SINGLE
from flax_layoutmap.checkpoint._safetensors_parts import Made

_OWN_NAMES = re.compile(
    r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
)


_UNFINISHED = ".unfinished"


def cannot_write(place: str, overwrite: bool) -> str | None:
    """Why nothing can be written to a place, or None."""
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
    """Names of the files of a model in a directory."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(name for name in names if _OWN_NAMES.fullmatch(name))


def distributed(
    place: str, tensors: Sequence[Made], max_file_bytes: float
) -> dict[str, list[Made]]:
    """Name of a file → its tensors, in the order of the tree.

    Within a file, wide dtypes come first, so that each tensor begins at a multiple of
    its element's size.
    """
    limit = math.inf if _is_file(place) else max_file_bytes
    groups: list[list[Made]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    groups = [sorted(group, key=lambda t: -t.dtype.itemsize) for group in groups]
    if _is_file(place):
        return {os.path.basename(place): groups[0]}
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {
        f"model-{number:05}-of-{len(groups):05}.safetensors": group
        for number, group in enumerate(groups, 1)
    }


def _hidden(file: str) -> str:
    """The name of a file while it is written."""
    return f".{file}{_UNFINISHED}"


def _unfinished(folder: str) -> list[str]:
    """Names of the files that a save was writing, be it one that was killed."""
    return [
        name
        for name in os.listdir(folder)
        if name.startswith(".")
        and name.endswith(_UNFINISHED)
        and _OWN_NAMES.fullmatch(name[1:].removesuffix(_UNFINISHED))
    ]


class Writer:
    """Writes tensors one after another.

    Files are written under other names; `finish` gives them theirs, and `clean_up`
    removes what is left of them.

    Args:
        place: a directory, or a file.
        files: name of a file → its tensors, in the order in which they come.
        texts: the metadata of each header.
    """

    def __init__(
        self, place: str, files: Mapping[str, Sequence[Made]], texts: Mapping[str, str]
    ) -> None:
        self._place, self._files, self._texts = place, files, texts
        self._folder = os.path.dirname(place) if _is_file(place) else place
        self._made_folder = not os.path.isdir(self._folder)
        self._todo = [file for file, held in files.items() for _ in held]
        self._stream: Any = None
        self._written: list[str] = []

    def add(self, values: np.ndarray) -> None:
        """Writes the next tensor.

        Raises:
            OSError: that failed.
        """
        file = self._todo.pop(0)
        if file not in self._written:
            self._open(file)
        self._stream.write(values.data)
        if not self._todo or self._todo[0] != file:
            self._close()

    def finish(self) -> None:
        """Puts all files in their places, and removes an older model from there.

        Raises:
            OSError: that failed.
        """
        index = len(self._files) > 1
        if index:
            self._write_index()
        if not _is_file(self._place):
            # Were the process killed while names change, files would be missing, which
            # is noticed; old and new ones side by side might not be.
            for name in _own(self._folder):
                os.remove(os.path.join(self._folder, name))
            for name in set(_unfinished(self._folder)) - set(
                map(_hidden, self._written)
            ):
                os.remove(os.path.join(self._folder, name))
        for file in [*self._files, *([INDEX] if index else [])]:
            os.replace(self._hidden(file), os.path.join(self._folder, file))
        self._written.clear()
        self._made_folder = False

    def clean_up(self) -> None:
        """Removes what was not finished."""
        if self._stream is not None:
            try:
                self._stream.close()
            except OSError:
                pass  # what it would still write is removed below
        for file in self._written:
            path = self._hidden(file)
            if os.path.exists(path):
                os.remove(path)
        if self._made_folder and os.path.isdir(self._folder):
            if not os.listdir(self._folder):
                os.rmdir(self._folder)

    def _hidden(self, file: str) -> str:
        return os.path.join(self._folder, _hidden(file))

    def _open(self, file: str) -> None:
        os.makedirs(self._folder, exist_ok=True)
        if not self._written:
            self._check_space()
        self._written.append(file)
        self._stream = open(self._hidden(file), "wb")
        self._stream.write(_header(self._files[file], self._texts))

    def _check_space(self) -> None:
        total = sum(t.nbytes for held in self._files.values() for t in held)
        free = shutil.disk_usage(self._folder).free
        if total > free:
            raise OSError(f"{total} bytes are to be written, and {free} are free")

    def _close(self) -> None:
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        self._stream = None

    def _write_index(self) -> None:
        total = sum(t.nbytes for held in self._files.values() for t in held)
        names = {t.name: file for file, held in self._files.items() for t in held}
        data = {
            "metadata": {"total_size": total},
            "weight_map": dict(sorted(names.items())),
        }
        self._written.append(INDEX)
        with open(self._hidden(INDEX), "w", encoding="utf-8") as stream:
            json.dump(data, stream, indent=2)
            stream.flush()
            os.fsync(stream.fileno())


def _header(tensors: Sequence[Made], texts: Mapping[str, str]) -> bytes:
    """The first bytes of a file."""
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
