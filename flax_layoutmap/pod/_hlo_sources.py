"""The leaf and the source line of each collective of a compiled program."""

import dataclasses
import functools
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from flax_layoutmap.pod._hlo_text import Instruction, Line, Module, operand_names
from flax_layoutmap.pod._hlo_values import Call, Results, Value, origin, results_of

_FIELD = re.compile(r"(\w+)=(\d+)")
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
# Frames of these libraries are skipped; a model may be installed with pip, too.
_LIBRARIES = re.compile(
    r"-packages[/\\](?:jax|jaxlib|flax|optax|chex)[/\\]|[/\\]contextlib\.py$"
)
_STEPS = 400
_OURS = f"{Path(__file__).parents[1]}{os.sep}"


class Frames:
    """The tables at the head of a program: files, functions, lines, stacks."""

    def __init__(self, text: str) -> None:
        self._files = _rows(text, "FileNames")
        self._functions = _rows(text, "FunctionNames")
        self._places = _rows(text, "FileLocations")
        self._frames = _rows(text, "StackFrames")

    def source(self, attributes: str) -> str | None:
        """`"model.py:36 Attention.__call__"`: the innermost frame of the user."""
        written = _FRAME.search(attributes)
        at = int(written[1]) if written else 0
        innermost: str | None = None
        while at in self._frames:
            frame = _fields(self._frames[at])
            place = _fields(self._places[frame["file_location_id"]])
            file = _plain(self._files[place["file_name_id"]])
            function = _plain(self._functions.get(place.get("function_name_id", 0), ""))
            function = function.replace(".<locals>", "")
            name = re.split(r"[/\\]", file)[-1]
            source = f"{name}:{place.get('line', 0)} {function}".rstrip()
            innermost = innermost or source
            if not _LIBRARIES.search(file) and not file.startswith(_OURS):
                return source
            # Printed one too high: 1 means no parent.
            at = frame.get("parent_frame_id", 1) - 1
        return innermost


def _rows(text: str, table: str) -> Mapping[int, str]:
    rows = re.search(rf"^{table}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
    split = [row.split(" ", 1) for row in rows[1].splitlines()] if rows else []
    return {int(number): rest for number, rest in split}


def _fields(row: str) -> Mapping[str, int]:
    return {name: int(value) for name, value in _FIELD.findall(row)}


def _plain(row: str) -> str:
    """A text, in which what is not ASCII is escaped byte by byte."""
    row = row.strip('"').encode().decode("unicode_escape")
    return row.encode("latin-1").decode("utf-8", "replace")


@dataclasses.dataclass(frozen=True)
class Sources:
    """Paths and lines of the collectives of one program.

    The attributes are as `read_program` takes them.
    """

    module: Module
    paths: Sequence[str]
    results: Mapping[int, str]
    parameters: Collection[int]
    new_parameters: Collection[int]

    def __call__(
        self, home: str, op: Instruction, calls: Sequence[Call]
    ) -> tuple[list[tuple[str, ...]], str | None]:
        """The paths of the leaves that each operand is or updates; the source line."""
        paths: list[tuple[str, ...]] = []
        attributes = [op.attributes]
        if not _FRAME.search(op.attributes):
            attributes.append(self._reader(home, op.name))
        updated = self._sums.get((home, op.name), {})
        for place, operand in enumerate(op.operands or ("",)):
            start = Value(self.module, home, operand, tuple(calls))
            arguments, passed = origin(start, self.parameters)
            attributes += passed
            if arguments and self.paths:
                paths.append(tuple(self.paths[at] for at in arguments))
            else:
                leaves = [self.results[result] for result in updated.get(place, ())]
                paths.append(tuple(dict.fromkeys(leaves)))
        sources = map(self._frames.source, attributes)
        return paths, next((source for source in sources if source is not None), None)

    @functools.cached_property
    def _frames(self) -> Frames:
        return Frames(self.module.text)

    @functools.cached_property
    def _sums(self) -> Results:
        return results_of(self.module, list(self.results), self.new_parameters)

    @functools.cached_property
    def _readers(self) -> Mapping[tuple[str, str], Line]:
        """Computation and name of a value → the first line that reads it."""
        readers: dict[tuple[str, str], Line] = {}
        for home, lines in self.module.computations.items():
            for line in lines:
                for name in operand_names(line.text):
                    readers.setdefault((home, name), line)
        return readers

    def _reader(self, home: str, name: str) -> str:
        """The first line that reads a value and has a source line, through copies.

        The partitioner of jaxlib 0.12 gives the collectives that it inserts none.
        """
        for _ in range(_STEPS):
            line = self._readers.get((home, name))
            if line is None:
                break
            if _FRAME.search(line.text):
                return line.text
            name = line.name
        return ""
