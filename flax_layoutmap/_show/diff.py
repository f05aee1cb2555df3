"""Compare two Resolutions: the changes, the bytes that devices receive, a report."""

import collections
import dataclasses
import difflib
import functools
import itertools
import json
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np

from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._core.grid import Placement, received
from flax_layoutmap._core.layout import is_offloaded
from flax_layoutmap._rules.rules import SECTIONS
from flax_layoutmap._show.report import ROLES, array_text
from flax_layoutmap._show.snapshot import (
    CHANGES,
    Change,
    LeafChange,
    LeafRecord,
    MeshShape,
    Snapshot,
    mesh_text,
    record_json,
    rule_text,
)
from flax_layoutmap._show.table import (
    Cells,
    Grid,
    as_markdown,
    cut,
    cut_under_headings,
    human_bytes,
    markdown_list,
    path_cell,
)
from flax_layoutmap._show.terminal import (
    NOTEBOOK_WIDTH,
    as_html,
    coloured_grid,
    coloured_lines,
    show,
    wrapped,
)
from flax_layoutmap._tree.paths import Fold, apart, fold, natural_key, relation

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text


@dataclasses.dataclass(frozen=True, slots=True)
class ResolutionDiff:
    """What changes from one Resolution to another, and what it costs; see
    `Resolution.diff`.

    Attributes:
        mesh: the mesh before and after, as text.
        rules: rules and options that differ: `"- …"` before, `"+ …"` after.
        changes: the leaves that differ, sorted by path.
        unchanged: how many leaves do not.
        bytes_per_device: role → bytes in device memory before and after, per device.
        host_bytes_per_device: the same in host memory.
        received_bytes: per device of the mesh after, row by row, the bytes that it
            has to be sent for the leaves that moved; empty without a mesh.
        assumption: what the count of these bytes assumes.
        axes: names of the mesh axes, those of before first.
    """

    mesh: tuple[str, str]
    rules: tuple[str, ...]
    changes: tuple[LeafChange, ...]
    unchanged: int
    bytes_per_device: Mapping[str, tuple[int, int]]
    host_bytes_per_device: Mapping[str, tuple[int, int]]
    received_bytes: tuple[int, ...]
    assumption: str
    axes: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """Whether mesh, rules and all leaves are the same."""
        return not self.changes and not self.rules and self.mesh[0] == self.mesh[1]

    def of(self, change: Change) -> tuple[LeafChange, ...]:
        """The changes of one kind, such as `"moved"`."""
        return tuple(one for one in self.changes if one.change == change)

    def report(
        self,
        format: Literal["text", "markdown", "json"] = "text",
        *,
        fold: bool = True,
        width: int | None = None,
    ) -> str:
        """Mesh and rules, the leaves that changed, and totals.

        Args:
            format: `"text"`, `"markdown"`, or `"json"` (schema 1, never folded).
            fold: as for `Resolution.report`.
            width: as for `Resolution.report`.

        Raises:
            LayoutError: there is no such format.
        """
        if format == "json":
            return json.dumps(self.to_json(), indent=1)
        if format == "markdown":
            return _markdown(self, fold)
        if format == "text":
            parts = _parts(self, fold, width)
            return "\n".join(
                part.text() if isinstance(part, Grid) else part for part in parts
            )
        raise LayoutError(
            f'format must be "text", "markdown" or "json", got {format!r}'
        )

    def to_json(self) -> dict[str, Any]:
        """The differences as plain JSON values, schema 1."""
        before, after = self.mesh
        return {
            "schema": 1,
            "is_empty": self.is_empty,
            "mesh": {"before": before, "after": after},
            "rules": list(self.rules),
            "changes": [
                {
                    "path": one.path,
                    "change": one.change,
                    "before": None if one.before is None else record_json(one.before),
                    "after": None if one.after is None else record_json(one.after),
                    "received_bytes": one.received_bytes,
                    "all_received_bytes": one.all_received_bytes,
                }
                for one in self.changes
            ],
            "unchanged": self.unchanged,
            "bytes_per_device": {
                role: {"before": old, "after": new}
                for role, (old, new) in self.bytes_per_device.items()
            },
            "host_bytes_per_device": {
                role: {"before": old, "after": new}
                for role, (old, new) in self.host_bytes_per_device.items()
            },
            "received_bytes": list(self.received_bytes),
            "assumption": self.assumption,
        }

    def show(self, file: IO[str] | None = None, *, fold: bool = True) -> None:
        """Print the report as `Resolution.show` does."""
        show(
            lambda width: _coloured(self, fold, width),
            lambda width: self.report(fold=fold, width=width),
            file,
        )

    def __rich_console__(
        self, console: "Console", options: "ConsoleOptions"
    ) -> "Iterator[Text]":
        return _coloured(self, True, options.max_width)

    def _repr_html_(self) -> str:
        return as_html(_coloured(self, True, NOTEBOOK_WIDTH))

    def __repr__(self) -> str:
        counts = collections.Counter(one.change for one in self.changes)
        found = [f"{counts[kind]} {kind}" for kind in CHANGES if counts[kind]]
        most = max(self.received_bytes, default=0)
        cost = f", at most {human_bytes(most)} per device to send" if most else ""
        return f"ResolutionDiff({', '.join(found) or 'no leaf changed'}{cost})"


# ------------------------------------------------------------------- the comparison


def difference(before: Snapshot, after: Snapshot) -> ResolutionDiff:
    """Compare what two Resolutions decided."""
    same, assumption = _same_devices(before, after)
    # Elements that each device receives; many leaves have equal placements.
    elements = functools.cache(functools.partial(received, same=same))
    paths = sorted({**before.leaves, **after.leaves}, key=natural_key)
    meshes = [mesh for mesh in (before.mesh, after.mesh) if mesh is not None]
    total = np.zeros(math.prod(meshes[1].shape) if len(meshes) == 2 else 0, np.int64)
    changes = []
    for path in paths:
        old, new = before.leaves.get(path), after.leaves.get(path)
        change, each = _change_of(old, new, elements)
        if change is None:
            continue
        sent = (None, None) if change == "moved" else (0, 0)
        if each is not None:
            # A leaf may be on a larger mesh of its own.
            total = np.pad(total, (0, max(len(each) - len(total), 0)))
            total[: len(each)] += each
            sent = int(each.max()), int(each.sum())
        changes.append(LeafChange(path, change, old, new, *sent))
    return ResolutionDiff(
        mesh=(mesh_text(before.mesh, after.mesh), mesh_text(after.mesh, before.mesh)),
        rules=tuple(_rules(before.rules, after.rules)),
        changes=tuple(changes),
        unchanged=len(paths) - len(changes),
        bytes_per_device=_held(before, after, on_host=False),
        host_bytes_per_device=_held(before, after, on_host=True),
        received_bytes=tuple(total.tolist()),
        assumption=assumption,
        axes=tuple(dict.fromkeys(itertools.chain(*(mesh.axes for mesh in meshes)))),
    )


def _same_devices(before: Snapshot, after: Snapshot) -> tuple[list[int] | None, str]:
    """Which device before each device after is, as for `received`; and as text."""
    if before.mesh is None or after.mesh is None:
        return None, "without a mesh before and after, nothing is counted"
    if before.devices is None or after.devices is None:
        same, text = None, "device n of the one mesh is device n of the other"
        text += ", row by row"
    else:
        at = {device: n for n, device in enumerate(before.devices)}
        same = [at.get(device, -1) for device in after.devices]
        text = "devices are identified by their ids"
    return same, (
        f"{text}; a device keeps the overlap of its old and its new shard, a new one "
        "holds nothing; added and reshaped leaves are not counted"
    )


def _held(
    before: Snapshot, after: Snapshot, *, on_host: bool
) -> dict[str, tuple[int, int]]:
    """Role → bytes per device before and after, in the memory of host or device."""

    def held(some: Snapshot, role: str) -> int:
        return sum(
            leaf.bytes_per_device
            for leaf in some.leaves.values()
            if leaf.role == role and is_offloaded(leaf.memory_kind) is on_host
        )

    return {role: (held(before, role), held(after, role)) for role in ROLES}


def _change_of(
    before: LeafRecord | None,
    after: LeafRecord | None,
    elements: Callable[..., np.ndarray],
) -> tuple[Change | None, np.ndarray | None]:
    """What changed, and the bytes that each device receives, without a mesh None."""
    if before is None:
        return "added", None
    if after is None:
        return "removed", None
    if (before.shape, before.dtype) != (after.shape, after.dtype):
        return "reshaped", None
    each = _received_bytes(before, after, elements)
    if _place(before) != _place(after) or (each is not None and each.any()):
        return "moved", each
    return (None if _why(before) == _why(after) else "decided"), None


def _received_bytes(
    before: LeafRecord, after: LeafRecord, elements: Callable[..., np.ndarray]
) -> np.ndarray | None:
    old, new = before.mesh, after.mesh
    if old is None or new is None or after.shard_shape is None:
        return None
    if before.memory_kind != after.memory_kind:
        return np.full(math.prod(new.shape), after.bytes_per_device)
    shard = math.prod(after.shard_shape)
    itemsize = after.bytes_per_device // shard if shard else 0
    places = _placement(before.dims, old), _placement(after.dims, new)
    return elements(before.shape, *places) * itemsize


def _placement(dims: tuple[tuple[str, ...], ...], mesh: MeshShape) -> Placement:
    axes = tuple(tuple(map(mesh.axes.index, names)) for names in dims)
    return Placement(mesh.shape, axes)


def _place(leaf: LeafRecord) -> tuple[Any, ...]:
    return leaf.dims, leaf.shard_shape, leaf.memory_kind


def _why(leaf: LeafRecord) -> tuple[Any, ...]:
    return leaf.role, leaf.reason, leaf.pattern, leaf.owner, leaf.fallback


def _rules(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Options and rules that differ, as lines."""
    for name in sorted((before.keys() | after.keys()) - {"schema", "mesh", *SECTIONS}):
        if before.get(name) != after.get(name):
            yield f"- {name} = {before.get(name)!r}"
            yield f"+ {name} = {after.get(name)!r}"
    for name in SECTIONS:
        section = "" if name == "rules" else f"{name} "
        old, new = (list(map(rule_text, rules[name])) for rules in (before, after))
        matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
        for kind, a, b, c, d in matcher.get_opcodes():
            if kind != "equal":
                yield from (f"- {section}{at + 1} {old[at]}" for at in range(a, b))
                yield from (f"+ {section}{at + 1} {new[at]}" for at in range(c, d))


# ----------------------------------------------------------------------- the report

# Least width of a path; below the second, columns are left out for it.
_PATH, _ROOM = 16, 26
_SIGNS = {"added": "+", "removed": "-", "reshaped": "~", "moved": "→", "decided": "="}
_WIDE = ["change", "path", "array", "spec", "shard", "rule", "bytes/device", "to send"]
_NARROW = ["", "path", "change", "bytes/device", "to send"]


def _markdown(diff: ResolutionDiff, folded: bool) -> str:
    parts = []
    if diff.mesh[0] != diff.mesh[1]:
        parts.append(markdown_list([_mesh(diff)]))
    if diff.rules:
        parts.append("\n".join(["```diff", *diff.rules, "```"]))
    grid, lines = _grid(diff.changes, folded, None), list(_totals(diff))
    parts.append(markdown_list(lines) if grid is None else as_markdown(grid, lines))
    return "\n\n".join(parts)


def _coloured(diff: ResolutionDiff, folded: bool, width: int) -> "Iterator[Text]":
    """The lines of the report for rich; without colours, those of the text."""
    for part in _parts(diff, folded, width):
        if isinstance(part, Grid):
            yield from coloured_grid(part, diff.axes)
        else:
            yield from coloured_lines([part], diff.axes)


def _parts(
    diff: ResolutionDiff, folded: bool, width: int | None
) -> Iterator[str | Grid]:
    """The lines above the table, the table, and the lines below it."""
    above = [] if diff.mesh[0] == diff.mesh[1] else [_mesh(diff)]
    if diff.rules:
        above += ["rules:", *(f"  {line}" for line in diff.rules)]
    yield from wrapped(above, width)
    grid = _grid(diff.changes, folded, width)
    if grid is not None:
        yield from ("", grid, "")
    yield from wrapped(list(_totals(diff)), width)


def _mesh(diff: ResolutionDiff) -> str:
    return f"mesh: {diff.mesh[0]} → {diff.mesh[1]}"


def _totals(diff: ResolutionDiff) -> Iterator[str]:
    counts = {change: len(diff.of(change)) for change in CHANGES}
    words: Mapping[str, str] = {"decided": "with the same layout for another reason"}
    some = [f"{n} {words.get(change, change)}" for change, n in counts.items() if n]
    if diff.is_empty:
        yield f"no difference: {diff.unchanged} leaves as before, on {diff.mesh[0]}"
    else:
        some += [f"{diff.unchanged} as before"] if diff.unchanged else []
        yield f"leaves: {', '.join(some)}"
    for role, name in ROLES.items():
        before, after = diff.bytes_per_device[role]
        if before or after:
            yield f"{name}: {_change(before, after)} per device"
        before, after = diff.host_bytes_per_device[role]
        if before or after:
            yield f"{name}: {_change(before, after)} per device in host memory"
    if counts["moved"]:
        most, total = max(diff.received_bytes, default=0), sum(diff.received_bytes)
        if total:
            yield (
                f"to send: at most {human_bytes(most)} to one device, "
                f"{human_bytes(total)} in all"
            )
        elif diff.received_bytes:
            yield "to send: nothing; every device has all of its new shards"
        yield f"assumed: {diff.assumption}"


def _change(before: int, after: int) -> str:
    if before == after:
        return human_bytes(before)
    share = f" ({(after - before) / before:+.1%})" if before else ""
    return f"{human_bytes(before)} → {human_bytes(after)}{share}"


def _grid(
    changes: Sequence[LeafChange], folded: bool, width: int | None
) -> Grid | None:
    """The table of the leaves that changed; None where there are none."""
    if not changes:
        return None
    paths = [one.path for one in changes]
    folds = fold(paths, list(map(_key, changes))) if folded else apart(paths)
    some = [(changes[fold.members[0]], len(fold.members)) for fold in folds]
    cells = Cells([one.change for one, _ in some], ("bytes/device", "to send"))
    cells.put("change", [one.change for one, _ in some])
    cells.put("", [_SIGNS[one.change] for one, _ in some])
    cells.put("path", list(map(path_cell, folds)))
    cells.put("array", [_both(one, _array) for one, _ in some])
    cells.put("spec", [_both(one, lambda leaf: leaf.spec) for one, _ in some])
    cells.put("shard", [_both(one, _shard) for one, _ in some])
    cells.put("rule", [_rule(one) for one, _ in some])
    cells.put("bytes/device", [_bytes(one, count) for one, count in some])
    cells.put("to send", [_to_send(one, count) for one, count in some])
    return _fitted(cells, folds, [_text(one) for one, _ in some], width)


def _fitted(
    cells: Cells, folds: Sequence[Fold], texts: Sequence[str], width: int | None
) -> Grid:
    """As much as fits: everything; no shards; one column for all but the path."""
    has_rules = any(cells.columns["rule"])
    wide = [name for name in _WIDE if name != "rule" or has_rules]
    for names in (wide, [name for name in wide if name != "shard"]):
        if width is None or cells.room(names, width) >= 0:
            return cells.grid(names)
    cells.put("change", texts)
    names, room = _NARROW, cells.room(_NARROW, width, "path")
    if room < _ROOM:
        names = [name for name in _NARROW if name != "bytes/device"]
        room = cells.room(names, width, "path")
    if room < _ROOM:
        most = max(room + cells.widths["change"] - _PATH, _PATH)
        cells.put("change", [cut(text, most) for text in texts])
        room = max(cells.room(names, width, "path"), _PATH)
    if cells.widths["path"] <= room:
        return cells.grid(names)
    return cut_under_headings(cells, names, folds, room)


def _key(one: LeafChange) -> Hashable:
    """Equal for changes that are folded into one row."""
    return one.change, one.received_bytes, _alike(one.before), _alike(one.after)


def _alike(leaf: LeafRecord | None) -> Hashable:
    """The leaf, but for the indices in its path and in that of its owner."""
    if leaf is None:
        return None
    owner = None if leaf.owner is None else relation(leaf.path, leaf.owner)
    return dataclasses.replace(leaf, path="", owner=None), owner


def _text(one: LeafChange) -> str:
    """What changed, in one cell."""
    if one.change == "reshaped":
        return _both(one, _array)
    if one.change == "decided":
        return _both(one, lambda leaf: leaf.why)
    spec = _both(one, lambda leaf: leaf.spec)
    if one.change == "moved":
        return spec if " → " in spec else f"{spec} {_both(one, _shard)}"
    return f"{_both(one, _array)} {spec}"


def _both(one: LeafChange, text: Callable[[LeafRecord], str]) -> str:
    """A text before and after; once, where it is the same."""
    texts = [text(leaf) for leaf in (one.before, one.after) if leaf is not None]
    return " → ".join(dict.fromkeys(texts))


def _rule(one: LeafChange) -> str:
    """The rule, where it is another one; else nothing."""
    text = _both(one, lambda leaf: leaf.why)
    return text if " → " in text else ""


def _array(leaf: LeafRecord) -> str:
    return array_text(leaf.shape, leaf.dtype)


def _shard(leaf: LeafRecord) -> str:
    if leaf.shard_shape is None:
        return "-"
    return f"[{','.join(map(str, leaf.shard_shape))}]"


def _bytes(one: LeafChange, count: int) -> str:
    return _both(one, lambda leaf: human_bytes(count * leaf.bytes_per_device))


def _to_send(one: LeafChange, count: int) -> str:
    if one.change != "moved":
        return ""
    if one.received_bytes is None:
        return "?"
    return human_bytes(count * one.received_bytes)
