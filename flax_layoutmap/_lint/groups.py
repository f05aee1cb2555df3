"""The leaves of a Resolution, those that are alike together."""

import collections
import dataclasses
import re
from collections.abc import Callable
from typing import Any

from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._rules.records import Decision, leaf_bytes, show_shape

NUMBER = re.compile(r"\d+")


@dataclasses.dataclass(slots=True)
class Group:
    """Leaves with one decision whose paths differ in numbers only.

    Attributes:
        row: the decision.
        at: position of the first of them.
        path: its path.
        leaves: how many there are.
        bytes: bytes of their global arrays.
    """

    row: Decision
    at: int
    path: str
    leaves: int = 0
    bytes: int = 0

    def named(self, resolution: Resolution) -> str:
        """`layers/0/up/kernel (64,256) and 79 more alike`."""
        more = f" and {self.leaves - 1} more alike" if self.leaves > 1 else ""
        return (
            f"{self.path or 'the leaf'} {show_shape(resolution.shapes[self.at])}{more}"
        )

    @property
    def whole(self) -> str:
        """What every device holds in full."""
        return "it" if self.leaves == 1 else f"all {self.leaves}"

    @property
    def where(self) -> dict[str, Any]:
        """The fields of an Issue that say where."""
        return {"path": self.path, "leaves": self.leaves, "bytes": self.bytes}


def groups(
    resolution: Resolution, wanted: Callable[[Decision], bool], role: str | None = None
) -> list[Group]:
    """The leaves of some decisions, those that are alike together."""
    keys = {key for key, row in resolution._distinct.items() if wanted(row)}
    if not keys:
        return []
    found: dict[Any, Group] = {}
    sizes: dict[Any, int] = {}  # leaves of one decision have one shape
    roles, paths = resolution._roles(), resolution.paths
    dtypes = resolution.dtypes
    rows = resolution._rows
    for at in [at for at, known in enumerate(map(id, rows)) if known in keys]:
        if role is None or roles[at] == role:
            row, dtype = rows[at], dtypes[at]
            key = id(row), NUMBER.sub("0", paths[at])
            group = found.get(key)
            if group is None:
                group = found[key] = Group(row, at, paths[at])
            group.leaves += 1
            sized = id(row), dtype
            if sized not in sizes:
                sizes[sized] = leaf_bytes(resolution.shapes[at], dtype)
            group.bytes += sizes[sized]
    return list(found.values())


def suggested(resolution: Resolution, path: str, shape: tuple[int, ...]) -> str:
    """A rule for a leaf, as code: its largest dim that divides, on an axis."""
    parts = NUMBER.sub(r"\\d+", path).split("/")
    quote = "r" if "\\" in "/".join(parts[-2:]) else ""
    key = f'layout_map[{quote}"{"/".join(parts[-2:]) or ".*"}"]'
    mesh, best = resolution.mesh, None
    if mesh is not None:
        sizes = mesh.axis_sizes
        names = [n for n in sizes if sizes[n] > 1 and n not in resolution.rules.batch]
        for axis in names or [n for n in sizes if sizes[n] > 1]:
            fitting = [d for d, size in enumerate(shape) if size % sizes[axis] == 0]
            if fitting and best is None:
                best = axis, max(fitting, key=lambda dim: (shape[dim], dim))
    if best is None:
        return f"{key} = None  # replicated, on purpose"
    axes = tuple(best[0] if dim == best[1] else None for dim in range(len(shape)))
    return f"{key} = {axes}  # or None: replicated, on purpose"


def total_of(resolution: Resolution) -> int:
    """Bytes of all leaves; 1 where there are none."""
    return sum(bytes_of_decisions(resolution).values()) or 1


def bytes_of_decisions(resolution: Resolution) -> dict[int, int]:
    """Bytes of all leaves of each decision, by its id."""
    rows, dtypes = resolution._rows, resolution.dtypes
    # Leaves of one decision have one shape.
    first = dict(zip(map(id, rows), resolution.shapes, strict=True))
    found = dict.fromkeys(first, 0)
    for dtype in set(dtypes):
        own = [id(row) for row, at in zip(rows, dtypes, strict=True) if at == dtype]
        for key, count in collections.Counter(own).items():
            found[key] += leaf_bytes(first[key], dtype) * count
    return found
