"""Find the leaf that a collective moves or sums, and its Python source line."""

import collections
import dataclasses
import functools
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from flax_layoutmap.pod._hlo_text import Instruction, Module
from flax_layoutmap.pod._hlo_values import Call, origin, results_of

_PAIRS = re.compile(r"(\w+)=(\d+)")
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
# What older versions write in its place; it has no function.
_LINE = re.compile(r'\bsource_file="([^"]+)" source_line=(\d+)')
_ESCAPED = re.compile(rb"\\([\\'\"]|[0-3][0-7]{2})")
# Frames of these are not the user's own.
_LIBRARIES = re.compile(r"(?:site|dist)-packages[/\\]")
_OURS = f"{Path(__file__).parents[1]}{os.sep}"


class Frames:
    """The tables at the head of a program: files, functions, lines, stacks."""

    def __init__(self, text: str) -> None:
        self._files = _texts(text, "FileNames")
        self._functions = _texts(text, "FunctionNames")
        self._places = _numbers(text, "FileLocations")
        self._frames = _numbers(text, "StackFrames")

    def source(self, attributes: str) -> str | None:
        """`"model.py:36 Attention.__call__"`: the innermost frame of the user."""
        line = _LINE.search(attributes)
        if line:
            return f"{_file_name(_plain(line[1]))}:{line[2]}"
        found = _FRAME.search(attributes)
        at = int(found[1]) if found else 0
        innermost: str | None = None
        seen: set[int] = set()
        while at in self._frames and at not in seen:
            seen.add(at)
            frame = self._frames[at]
            place = self._places.get(frame.get("file_location_id", 0), {})
            file = self._files.get(place.get("file_name_id", 0))
            if file is not None:
                function = self._functions.get(place.get("function_name_id", 0), "")
                function = function.replace(".<locals>", "")  # as in a plan
                written = (
                    f"{_file_name(file)}:{place.get('line', 0)} {function}".rstrip()
                )
                innermost = innermost or written
                if not _LIBRARIES.search(file) and not file.startswith(_OURS):
                    return written
            # Printed one too high: 1 means no parent.
            at = frame.get("parent_frame_id", 1) - 1
        return innermost


def _file_name(path: str) -> str:
    return re.split(r"[/\\]", path)[-1]


def _rows(text: str, table: str) -> list[tuple[int, str]]:
    found = re.search(rf"^{table}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
    rows = found[1].splitlines() if found else []
    split = [row.split(" ", 1) for row in rows]
    return [(int(number), rest) for number, rest in split]


def _texts(text: str, table: str) -> Mapping[int, str]:
    return {number: _plain(rest.strip('"')) for number, rest in _rows(text, table)}


def _plain(text: str) -> str:
    """A text that XLA wrote: bytes that are not of ASCII are octal numbers there."""

    def byte(found: re.Match[bytes]) -> bytes:
        one = found[1]
        return bytes([int(one, 8)]) if len(one) == 3 else one

    return _ESCAPED.sub(byte, text.encode()).decode("utf-8", "replace")


def _numbers(text: str, table: str) -> Mapping[int, Mapping[str, int]]:
    return {
        number: {name: int(value) for name, value in _PAIRS.findall(rest)}
        for number, rest in _rows(text, table)
    }


_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


class Sources:
    """Paths and lines of the collectives of one program."""

    def __init__(
        self,
        module: Module,
        paths: Sequence[str],
        results: Mapping[int, str],
        parameters: Collection[int],
        new_parameters: Collection[int],
    ) -> None:
        self.module = module
        self.frames = Frames(module.text)
        self.paths = paths
        self.results = results
        self.parameters = parameters
        self.summed = results_of(module, list(results), new_parameters)

    def __call__(
        self, home: str, own: Instruction, calls: Sequence[Call]
    ) -> tuple[list[tuple[str, ...]], str | None]:
        """The leaf that each operand is, or those that it becomes; and the line."""
        paths: list[tuple[str, ...]] = []
        attributes = [own.attributes]
        to = self.summed.get((home, own.name), {})
        for place, operand in enumerate(own.operands or ("",)):
            one = dataclasses.replace(own, operands=(operand,))
            came = origin(self.module, home, one, calls, self.parameters)
            attributes += came.attributes
            made_of = came.arguments
            if not made_of and len(own.operands) == 1:
                name = _OP_NAME.search(own.attributes)
                at = None if name is None else self.arguments.get(name[1])
                made_of = [] if at is None else [at]
            if made_of and max(made_of) < len(self.paths):
                paths.append(tuple(self.paths[at] for at in made_of))
            else:
                into = [self.results[result] for result in to.get(place, ())]
                paths.append(tuple(dict.fromkeys(into)))
        found = (self.frames.source(text) for text in attributes)
        return paths, next((source for source in found if source is not None), None)

    @functools.cached_property
    def arguments(self) -> dict[str, int]:
        """What the program calls an argument → its position, where one has the name."""
        found: dict[str, list[int]] = collections.defaultdict(list)
        entry = self.module.entry or ""
        for line in self.module.computations.get(entry, []):
            number = self.module.parameter_number(entry, line.name or "")
            name = _OP_NAME.search(line.text)
            if number is not None and name is not None:
                found[name[1]].append(number)
        return {name: at[0] for name, at in found.items() if len(at) == 1}
