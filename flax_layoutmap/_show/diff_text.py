"""The differences of two Resolutions as text, Markdown, JSON and colours."""

import dataclasses
import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._show.report import short_dtype
from flax_layoutmap._show.snapshot import (
    CHANGES,
    Change,
    LeafChange,
    LeafRecord,
    record_json,
)
from flax_layoutmap._show.table import (
    Grid,
    Line,
    as_markdown,
    cut,
    cut_cell,
    headed,
    human_bytes,
    markdown_list,
    path_cell,
    with_headings,
)
from flax_layoutmap._show.terminal import coloured_grid, coloured_lines, wrapped
from flax_layoutmap._tree.fold import Fold, apart, fold, relation

if TYPE_CHECKING:
    from rich.text import Text

_ROLES = {"parameter": "parameters", "optimizer": "optimizer state", "other": "other"}
_SIGNS = {"added": "+", "removed": "-", "reshaped": "~", "moved": "→", "decided": "="}

# A path in fewer characters says too little; with fewer than these, columns are left
# out for it.
_PATH, _ROOM = 16, 26


class Diff(Protocol):
    """What of a ResolutionDiff is shown."""

    @property
    def mesh(self) -> tuple[str, str]: ...
    @property
    def rules(self) -> tuple[str, ...]: ...
    @property
    def changes(self) -> tuple[LeafChange, ...]: ...
    @property
    def unchanged(self) -> int: ...
    @property
    def bytes_per_device(self) -> Mapping[str, tuple[int, int]]: ...
    @property
    def received_bytes(self) -> tuple[int, ...]: ...
    @property
    def assumption(self) -> str: ...
    @property
    def axes(self) -> tuple[str, ...]: ...
    @property
    def is_empty(self) -> bool: ...


def report(diff: Diff, format: str, folded: bool, width: int | None) -> str:
    """See `ResolutionDiff.report`."""
    if format == "json":
        return json.dumps(to_json(diff), indent=1)
    if format == "text":
        above, grid, below = _parts(diff, folded, width)
        table = [] if grid is None else ["", grid.text(), ""]
        return "\n".join([*above, *table, *below])
    if format == "markdown":
        return _markdown(diff, folded)
    raise LayoutError(f'format must be "text", "markdown" or "json", got {format!r}')


def _markdown(diff: Diff, folded: bool) -> str:
    _, grid, below = _parts(diff, folded, None)
    parts = []
    if diff.mesh[0] != diff.mesh[1]:
        parts.append(markdown_list([_mesh(diff)]))
    if diff.rules:
        parts.append("\n".join(["```diff", *diff.rules, "```"]))
    parts.append(markdown_list(below) if grid is None else as_markdown(grid, below))
    return "\n\n".join(parts)


def _mesh(diff: Diff) -> str:
    return f"mesh: {diff.mesh[0]} → {diff.mesh[1]}"


def coloured(diff: Diff, folded: bool, width: int) -> "Iterator[Text]":
    """The lines of the report for rich; without colours, those of the text."""
    above, grid, below = _parts(diff, folded, width)
    yield from coloured_lines(above, diff.axes)
    if grid is not None:
        yield from coloured_lines([""], ())
        yield from coloured_grid(grid, diff.axes)
        yield from coloured_lines([""], ())
    yield from coloured_lines(below, diff.axes)


def to_json(diff: Diff) -> dict[str, Any]:
    """See `ResolutionDiff.to_json`."""
    before, after = diff.mesh
    return {
        "schema": 1,
        "is_empty": diff.is_empty,
        "mesh": {"before": before, "after": after},
        "rules": list(diff.rules),
        "changes": [
            {
                "path": one.path,
                "change": one.change,
                "before": None if one.before is None else record_json(one.before),
                "after": None if one.after is None else record_json(one.after),
                "received_bytes": one.received_bytes,
                "all_received_bytes": one.all_received_bytes,
            }
            for one in diff.changes
        ],
        "unchanged": diff.unchanged,
        "bytes_per_device": {
            role: {"before": old, "after": new}
            for role, (old, new) in diff.bytes_per_device.items()
        },
        "received_bytes": list(diff.received_bytes),
        "assumption": diff.assumption,
    }


def _parts(
    diff: Diff, folded: bool, width: int | None
) -> tuple[list[str], Grid | None, list[str]]:
    """The lines above the table, the table, and the lines below it."""
    above = []
    if diff.mesh[0] != diff.mesh[1]:
        above.append(_mesh(diff))
    if diff.rules:
        above += ["rules:", *(f"  {line}" for line in diff.rules)]
    folds = _folds(diff.changes, folded)
    grid = _fitted(diff.changes, folds, width) if folds else None
    return wrapped(above, width), grid, wrapped(list(_totals(diff)), width)


def _totals(diff: Diff) -> Iterator[str]:
    counts: dict[Change, int] = dict.fromkeys(CHANGES, 0)
    for one in diff.changes:
        counts[one.change] += 1
    words: Mapping[Change, str] = {"decided": "placed alike for another reason"}
    told = [
        f"{count} {words.get(change, change)}"
        for change, count in counts.items()
        if count
    ]
    if diff.is_empty:
        yield f"no difference: {diff.unchanged} leaves lie as before, on {diff.mesh[0]}"
    else:
        told += [f"{diff.unchanged} as before"] if diff.unchanged else []
        yield f"leaves: {', '.join(told)}"
    for role, (before, after) in diff.bytes_per_device.items():
        if before or after:
            yield f"{_ROLES[role]}: {_change(before, after)} per device"
    if counts["moved"]:
        most, total = max(diff.received_bytes, default=0), sum(diff.received_bytes)
        if total:
            yield (
                f"to send: at most {human_bytes(most)} to one device, "
                f"{human_bytes(total)} in all"
            )
        elif diff.received_bytes:
            yield "to send: nothing; every device has what it is to hold"
        yield f"assumed: {diff.assumption}"


def _change(before: int, after: int) -> str:
    if before == after:
        return human_bytes(before)
    share = f" ({(after - before) / before:+.1%})" if before else ""
    return f"{human_bytes(before)} → {human_bytes(after)}{share}"


def _folds(changes: Sequence[LeafChange], folded: bool) -> list[Fold]:
    paths = [one.path for one in changes]
    if not folded:
        return apart(paths)
    keys = [
        (one.change, one.received_bytes, _alike(one.before), _alike(one.after))
        for one in changes
    ]
    return fold(paths, keys)


def _alike(leaf: LeafRecord | None) -> Hashable:
    """The leaf, but for the indices in its path and in that of its owner."""
    if leaf is None:
        return None
    owner = None if leaf.owner is None else relation(leaf.path, leaf.owner)
    return dataclasses.replace(leaf, path="", owner=None), owner


def _fitted(
    changes: Sequence[LeafChange], folds: Sequence[Fold], width: int | None
) -> Grid:
    """As much as fits: everything; no shards; one column for all but the path."""
    paths = [path_cell(fold) for fold in folds]
    some = [(changes[fold.members[0]], len(fold.members)) for fold in folds]
    grid = _wide(some, paths)
    if width is None or grid.width() <= width:
        return grid
    grid = _wide(some, paths, shards=False)
    if grid.width() <= width:
        return grid
    blank = [""] * len(some)
    for count in (True, False):
        bare = _narrow(some, blank, blank, count).width() - len("pathchange")
        texts = [_text(one) for one, _ in some]
        room = width - bare - max(map(len, texts))
        if room >= _ROOM:
            break
    else:
        texts = [cut(text, max(width - bare - _PATH, _PATH)) for text in texts]
        room = max(width - bare - max(map(len, texts)), _PATH)
    if max(map(len, paths)) <= room:
        return _narrow(some, paths, texts, count)
    heads, paths = headed(folds, room)
    paths = [cut_cell(path, room) for path in paths]
    return with_headings(_narrow(some, paths, texts, count), heads)


def _wide(
    some: Sequence[tuple[LeafChange, int]], paths: Sequence[str], shards: bool = True
) -> Grid:
    columns: dict[str, Sequence[str]] = {
        "change": [one.change for one, _ in some],
        "path": paths,
        "array": [_both(one, _array) for one, _ in some],
        "spec": [_both(one, lambda leaf: leaf.spec) for one, _ in some],
    }
    if shards:
        columns["shard"] = [_both(one, _shard) for one, _ in some]
    rules = [_rule(one) for one, _ in some]
    if any(rules):
        columns["rule"] = rules
    columns["bytes/device"] = [_bytes(one, count) for one, count in some]
    columns["to send"] = [_to_send(one, count) for one, count in some]
    return _grid(some, columns)


def _narrow(
    some: Sequence[tuple[LeafChange, int]],
    paths: Sequence[str],
    texts: Sequence[str],
    bytes: bool,
) -> Grid:
    columns: dict[str, Sequence[str]] = {
        "": [_SIGNS[one.change] for one, _ in some],
        "path": paths,
        "change": texts,
    }
    if bytes:
        columns["bytes/device"] = [_bytes(one, count) for one, count in some]
    columns["to send"] = [_to_send(one, count) for one, count in some]
    return _grid(some, columns)


def _grid(
    some: Sequence[tuple[LeafChange, int]], columns: Mapping[str, Sequence[str]]
) -> Grid:
    rows = zip(*columns.values(), strict=True)
    lines = [
        Line(tuple(cells), one.change)
        for cells, (one, _) in zip(rows, some, strict=True)
    ]
    right = tuple(name in ("bytes/device", "to send") for name in columns)
    return Grid(tuple(columns), right, tuple(lines))


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
    """What is so before and after; once, where it is the same."""
    texts = [text(leaf) for leaf in (one.before, one.after) if leaf is not None]
    return " → ".join(dict.fromkeys(texts))


def _rule(one: LeafChange) -> str:
    """The rule, where it is another one; else nothing."""
    text = _both(one, lambda leaf: leaf.why)
    return text if " → " in text else ""


def _array(leaf: LeafRecord) -> str:
    if leaf.dtype is None:
        return "-"
    return f"{short_dtype(leaf.dtype)}[{','.join(map(str, leaf.shape))}]"


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
