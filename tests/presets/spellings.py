"""The table `spellings.txt`: paths of small models, and the axes of their dims."""

import itertools
import re
from pathlib import Path
from typing import Any

from shapes import nested, struct

AXES = {"t": "tensor", "f": "fsdp expert", "z": "fsdp", "e": "expert", "-": ""}
WIDTHS = {"t": 128, "f": 64, "z": 64, "e": 8, "-": 4}
# Path → the letters of each dim.
Spelling = dict[str, tuple[str, ...]]


def written_out(path: str) -> list[str]:
    """The paths that one with choices `(a|b)` stands for."""
    parts = re.split(r"\(([^)]*)\)", path)
    choices = [part.split("|") if at % 2 else [part] for at, part in enumerate(parts)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def read() -> dict[tuple[str, str], Spelling]:
    """(family, spelling) → path → letters of its dims."""
    found: dict[tuple[str, str], Spelling] = {}
    text = (Path(__file__).parent / "spellings.txt").read_text(encoding="utf-8")
    prefix, dims, table = "", (), Spelling()
    for line in text.replace("\n    ", " ").splitlines():
        head = re.fullmatch(r"\[(\w+): ([^\]]*)\](?: ~ (.*))?", line)
        if head is not None:
            prefix, table = head[3] or "", {}
            found[head[1], head[2]] = table
        elif not line.startswith("#"):
            letters, _, paths = line.partition("|")
            dims = tuple(letters.split())
            for path in paths.replace("~", prefix).split():
                table |= dict.fromkeys(written_out(path), dims)
    return found


SPELLINGS = read()


def shape_of(dims: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(min(WIDTHS[letter] for letter in dim) for dim in dims)


def tree_of(spelling: Spelling) -> Any:
    """The model, as a tree of shapes."""
    return nested({path: struct(*shape_of(dims)) for path, dims in spelling.items()})


def dims_on(mesh: Any, dims: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of each dim, of those that the mesh has."""
    named = [" ".join(AXES[letter] for letter in dim).split() for dim in dims]
    return tuple(
        tuple(axis for axis in dim if axis in mesh.axis_names) for dim in named
    )


def stacked(spelling: Spelling) -> Spelling:
    """The same with the arrays of all layers as one, along dim 0."""
    return {
        re.sub(r"\b(layers|h)/0/", r"\1/", path): dims
        if "/0/" not in path
        else ("-", *dims)
        for path, dims in spelling.items()
    }
