"""The Python line that an instruction of a compiled program comes from."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

_PAIRS = re.compile(r"(\w+)=(\d+)")
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
# What older versions write in its place; it has no function.
_LINE = re.compile(r'\bsource_file="([^"]+)" source_line=(\d+)')
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
            return f"{_file_name(line[1])}:{line[2]}"
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
                function = function.replace(".<locals>", "")  # as a plan says it
                written = (
                    f"{_file_name(file)}:{place.get('line', 0)} {function}".rstrip()
                )
                innermost = innermost or written
                if not _LIBRARIES.search(file) and not file.startswith(_OURS):
                    return written
            # Printed one too high: 1 says that there is no parent.
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
    return {number: rest.strip('"') for number, rest in _rows(text, table)}


def _numbers(text: str, table: str) -> Mapping[int, Mapping[str, int]]:
    return {
        number: {name: int(value) for name, value in _PAIRS.findall(rest)}
        for number, rest in _rows(text, table)
    }
