"""A resolved tree as text, Markdown or JSON, from plain records."""

import dataclasses
import difflib
import functools
import itertools
import json
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from flax_layoutmap._core.errors import LayoutError, visible
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._rules.announce import Remark
from flax_layoutmap._rules.records import (
    Columns,
    Decision,
    ResolvedLeaf,
    Shape,
    Totals,
    because,
    leaf_bytes,
    leaf_json,
    show_shape,
    show_spec,
)
from flax_layoutmap._rules.rules import Rule, RuleSet
from flax_layoutmap._rules.serialise import mesh_to_json, rules_to_json
from flax_layoutmap._show.leaf_table import Texts, fitted, full, path_cell
from flax_layoutmap._show.table import Grid, as_markdown, human_bytes, human_share
from flax_layoutmap._show.terminal import coloured_grid, coloured_lines, wrapped
from flax_layoutmap._tree.fold import Fold, apart, fold, relation
from flax_layoutmap._tree.paths import Role

if TYPE_CHECKING:
    from rich.text import Text

Format = Literal["text", "markdown", "json"]

# Unmatched leaves that are alike are worth a warning when they hold this share of the
# bytes, or that share of what each device holds: the first is small on many devices.
LARGE_SHARE = 0.01
_LARGE_HELD = 0.1

# Unused rules for which a path that looks alike is looked for, and among how many; it
# takes a while.
_HINTS = 10
_MOST_PATHS = 2000
# Below this likeness a path is none that the pattern was to match; of what no rule
# matches, below the second; above the third it is misspelt rather than renamed.
_ALIKE, _RENAMED, _MISSPELT = 0.4, 0.6, 0.85

# So many lines that say the same are made one.
_MANY = 4

_ROLES: tuple[tuple[Role, str], ...] = (
    ("parameter", "parameters"),
    ("optimizer", "optimizer state"),
    ("other", "other"),
)

# Reasons that nobody asked for.
UNMATCHED = {
    "no rule": "is matched by no rule",
    "unknown optimizer state": "is optimizer state of an unknown kind",
}

# Reasons in a few characters.
_CODES = {
    "explicit layout": "explicit",
    "flax metadata": "metadata",
    "follows kernel": "kernel's",
    "follows parameter": "follows",
    "no rule": "none",
    "not an array": "no array",
    "own layout": "own",
    "random state": "random",
    "unknown optimizer state": "unknown",
}

# A cell of the column "rule" with the number of one.
_NUMBERED = re.compile(r"(optimizer |)(\d+) (.*)", re.DOTALL)


class Table(Protocol):
    """What of a Resolution is shown."""

    rules: RuleSet

    def __iter__(self) -> Iterator[ResolvedLeaf]: ...
    def columns(self, wanted: Callable[[Decision], bool] | None = None) -> Columns: ...
    def totals(self, role: Role | None = None) -> Totals: ...
    def inner_paths(self, role: Role) -> dict[str, str]: ...
    def parameter_paths(self) -> Iterator[tuple[str, bool]]: ...
    @property
    def mesh(self) -> DeviceMesh | None: ...
    @property
    def replicated_share(self) -> float: ...
    @property
    def unused_rules(self) -> tuple[Rule, ...]: ...


def report(
    table: Table, format: Format, *, folded: bool = True, width: int | None = None
) -> str:
    """The whole table, then totals and remarks; see `Resolution.report`."""
    if format == "json":
        return json.dumps(to_json(table), indent=1)
    if format == "text":
        grid, lines = _parts(table, folded, width)
        return "\n".join([grid.text(), "", *lines])
    if format == "markdown":
        return as_markdown(*_parts(table, folded, None))
    raise LayoutError(f'format must be "text", "markdown" or "json", got {format!r}')


def coloured(table: Table, width: int, *, folded: bool = True) -> "Iterator[Text]":
    """The lines of the report for rich; without colours, those of the text."""
    grid, lines = _parts(table, folded, width)
    axes = () if table.mesh is None else table.mesh.axis_names
    yield from coloured_grid(grid, axes)
    yield from coloured_lines(["", *lines], axes)


def remarks(
    table: Table, *, large_only: bool = False, folded: bool = False
) -> list[str]:
    """Unused rules, unmatched leaves, fallbacks: one line each.

    Args:
        table: the Resolution.
        large_only: only those that are worth a warning.
        folded: whether leaves that are alike share a line.
    """
    if large_only:
        return [one.text for one in warnings(table)]
    leaves = table.columns(_is_unplaced)
    groups, total, held = _unplaced(table, leaves, folded)
    found = [_remark(*group, total, held) for group in groups]
    lines = [head + hint for head, hint, _ in _unused(table, hints=True)]
    return lines + (_together(found, total) if folded else [one.line for one in found])


def warnings(table: Table, besides: Sequence[Table] = ()) -> list[Remark]:
    """The remarks that are worth a warning; leaves that are alike share one.

    Left out are fallbacks other than of annotations that name no axis of the mesh, and
    leaves that are few, of their kind: with less than 1 % of the bytes and 10 % of what
    a device holds.

    Args:
        table: the Resolution.
        besides: others of the same rules: what they use is not unused.
    """
    inner = functools.cache(table.inner_paths)
    every = functools.cache(lambda role: frozenset(inner(role).values()))
    # A warning tells of what was renamed: other hints take longer than all else.
    unused = _unused(table, besides, hints=False)
    found = [Remark(head + hint, head, every(role)) for head, hint, role in unused]
    leaves = table.columns(_is_unplaced)
    groups, total, held = _unplaced(table, leaves, folded=True)
    for some, shape, row, whole in groups:
        if row.warns and row.reason == "explicit layout":
            about = f"explicit layout: {row.fallback}"
            text = (
                f"explicit layout: {path_cell(some)} {show_shape(shape)}: "
                f"{row.fallback}"
            )
        elif not is_large(whole, total, held):
            continue
        elif row.reason in UNMATCHED:
            about = row.reason
            text = _remark(some, shape, row, whole, total, held).line
        elif row.warns:
            about = f"annotation: {row.fallback}"
            text = (
                f"annotation: {path_cell(some)} {show_shape(shape)}: {row.fallback}; "
                "map the names by Flax's logical_axis_rules, or add a rule for it"
            )
        else:
            continue
        role = leaves.roles[some.members[0]]
        own = inner("optimizer" if role == "optimizer" else "parameter")
        names = (leaves.paths[at] for at in some.members)
        found.append(Remark(text, about, frozenset(own.get(n, n) for n in names)))
    return found


def _is_unplaced(row: Decision) -> bool:
    return row.reason in UNMATCHED or bool(row.fallback)


def _unplaced(
    table: Table, leaves: Columns, folded: bool
) -> tuple[list[tuple[Fold, Shape, Decision, int]], int, int]:
    """Leaves that are not placed, or not fully, and how many bytes those alike have.

    Also the bytes of the whole tree, and those that each device holds.
    """
    if not leaves.rows:
        return [], 1, 1
    groups = []
    for some in _folds(leaves, folded):
        at = some.members[0]
        shape, row = leaves.shapes[at], leaves.rows[at]
        whole = len(some.members) * leaf_bytes(shape, leaves.dtypes[at])
        groups.append((some, shape, row, whole))
    sums = table.totals()
    return groups, sums.total_bytes or 1, sums.bytes_per_device or 1


@dataclasses.dataclass(frozen=True, slots=True)
class _Remark:
    """A line about leaves that are alike, and what it shares with others."""

    line: str
    leaf: str  # the leaves alone
    about: str  # what is said of them
    leaves: int
    bytes: int


def is_large(whole: int, total: int, held: int) -> bool:
    """Whether so many bytes are worth a warning where no rule places them."""
    return whole > LARGE_SHARE * total or whole > _LARGE_HELD * held


def _remark(
    some: Fold, shape: Shape, row: Decision, whole: int, total: int, held: int
) -> _Remark:
    name, count = path_cell(some), len(some.members)
    reason, fallback = row.reason, row.fallback
    if reason not in UNMATCHED:
        line = f"fallback: {name}: {fallback}"
        return _Remark(line, name, f"fallback: {fallback}", count, whole)
    because = f" ({fallback})" if fallback else ""
    them = "it" if count == 1 else "each"
    share = f"{human_share(whole / total)} of the bytes"
    if whole <= LARGE_SHARE * total and is_large(whole, total, held):
        share += f", {human_share(whole / held)} of what each device holds"
    name += f" {show_shape(shape)}"
    return _Remark(
        f"unmatched: {name} {UNMATCHED[reason]}{because}, so every device holds "
        f"{them} in full ({share})",
        f"{name}, {share.removesuffix(' of the bytes')}",
        f"unmatched: every device holds in full what {UNMATCHED[reason]}{because}",
        count,
        whole,
    )


def _together(found: Sequence[_Remark], total: int) -> list[str]:
    """Lines that say the same of many leaves, as one and a list."""
    same: dict[str, list[_Remark]] = {}
    for one in found:
        same.setdefault(one.about, []).append(one)
    lines: list[str] = []
    for about, group in same.items():
        if len(group) < _MANY:
            lines += [one.line for one in group]
            continue
        leaves = sum(one.leaves for one in group)
        share = human_share(sum(one.bytes for one in group) / total)
        lines.append(f"{about}: {leaves} leaves, {share} of the bytes")
        lines += [f"  {one.leaf}" for one in group]
    return lines


def to_json(table: Table) -> dict[str, Any]:
    """The table as plain JSON values, schema 1."""
    sums = table.totals()
    leaves = list(table)
    return {
        "schema": 1,
        "rules": rules_to_json(table.rules),
        "leaves": [_leaf_json(leaf, table.mesh) for leaf in leaves],
        "totals": {role: dataclasses.asdict(table.totals(role)) for role, _ in _ROLES},
        "total_bytes": sums.total_bytes,
        "bytes_per_device": sums.bytes_per_device,
        "replicated_share": table.replicated_share,
        "unused_rules": [rule.pattern for rule in table.unused_rules],
        "unmatched": [leaf.path for leaf in leaves if leaf.reason in UNMATCHED],
        "fallbacks": {
            leaf.path: leaf.fallback
            for leaf in leaves
            if leaf.fallback and leaf.reason not in UNMATCHED
        },
    }


def _leaf_json(leaf: ResolvedLeaf, mesh: DeviceMesh | None) -> dict[str, Any]:
    own = leaf.layout.device_mesh
    return {
        **leaf_json(leaf),
        "note": leaf.note,
        "memory_kind": leaf.layout.memory_kind,
        "mesh": None if own in (None, mesh) else mesh_to_json(own),
    }


def _parts(table: Table, folded: bool, width: int | None) -> tuple[Grid, list[str]]:
    """The table, and the lines below it."""
    leaves = table.columns()
    folds = _folds(leaves, folded)
    texts = _texts(folds, leaves, table)
    grid = full(texts) if width is None else fitted(texts, width)
    lines = [*_notes(texts, grid), *_totals(table), *remarks(table, folded=folded)]
    return grid, wrapped(lines, width)


def _folds(leaves: Columns, folded: bool) -> list[Fold]:
    """Leaves as rows: those that are alike in all but the indices in their paths."""
    if not folded:
        return apart(leaves.paths)
    numbers: dict[Hashable, int] = {}  # a number for each kind of leaf
    known: dict[int, int] = {}  # many leaves share one decision
    keys: list[int] = []
    for path, shape, dtype, row, role in zip(*leaves, strict=True):
        same = known.get(id(row))
        if same is None:
            why = (row.reason, row.rule, row.fallback, row.note)
            said = (row.spec, row.mesh, row.memory_kind, row.shard_shape, why)
            same = known[id(row)] = numbers.setdefault(said, len(numbers))
        owner = None if row.owner is None else _owner_key(path, row.owner)
        kind = (shape, dtype, role, owner, same)
        keys.append(numbers.setdefault(kind, len(numbers)))
    return fold(leaves.paths, keys)


def _owner_key(path: str, owner: str) -> Hashable:
    """Equal for leaves whose owners have the same relation to their paths."""
    # `mu/layers/7/w` ends in its owner: what is in front of it says enough.
    if path.endswith(f"/{owner}"):
        return path.count("/", 0, len(path) - len(owner))
    return relation(path, owner)


def _texts(folds: Sequence[Fold], leaves: Columns, table: Table) -> Texts:
    if len(folds) < len(leaves.rows):
        firsts = [found.members[0] for found in folds]
        leaves = Columns._make([column[at] for at in firsts] for column in leaves)
    shapes, dtypes, rows = leaves.shapes, leaves.dtypes, leaves.rows
    counts = [len(found.members) for found in folds]
    rows = [
        row
        if row.owner is None or many == 1
        else dataclasses.replace(row, owner=found.spell(relation(path, row.owner)))
        for found, many, path, row in zip(
            folds, counts, leaves.paths, rows, strict=True
        )
    ]
    names = {dtype: "-" if dtype is None else str(dtype) for dtype in set(dtypes)}
    shards = [row.shard_shape for row in rows]
    return Texts(
        folds=folds,
        shapes=[
            "-" if dtype is None else show_shape(shape)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ],
        dtypes=[names[dtype] for dtype in dtypes],
        specs=[_spec(row, table.mesh) for row in rows],
        rules=[visible(because(row, table.rules, short=True)) for row in rows],
        codes=list(map(_code, rows)),
        shards=["-" if shard is None else show_shape(shard) for shard in shards],
        bytes=[
            human_bytes(many * leaf_bytes(shard or shape, dtype))
            for many, shard, shape, dtype in zip(
                counts, shards, shapes, dtypes, strict=True
            )
        ],
        marks=[
            "warning" if row.reason in UNMATCHED or row.fallback else "" for row in rows
        ],
    )


def _spec(row: Decision, mesh: DeviceMesh | None) -> str:
    spec = show_spec(row.spec)
    spec += f" {row.memory_kind}" if row.memory_kind else ""
    return spec + (f" on {row.mesh}" if row.mesh not in (None, mesh) else "")


def _code(row: Decision) -> str:
    """Why, in a few characters."""
    if row.rule is None:
        return _CODES.get(row.reason, row.reason)
    return (
        f"opt {row.rule + 1}" if row.reason == "optimizer rule" else f"{row.rule + 1}"
    )


def _notes(texts: Texts, grid: Grid) -> Iterator[str]:
    """What the table does not say by itself."""
    at = grid.names.index("rule")
    cells = [line.cells[at] for line in grid.lines if line.mark != "heading"]
    cut = {rule for rule, c in zip(texts.rules, cells, strict=True) if c != rule}
    found = [match for rule in cut if (match := _NUMBERED.fullmatch(rule))]
    for match in sorted(found, key=lambda match: (match[1], int(match[2]))):
        yield f"{match[1]}rule {match[2]}: {match[3]}"
    many = max((len(fold.members) for fold in texts.folds), default=1)
    if many > 1:
        yield f"×{many}: {many} leaves that are alike, with the sum of their bytes"


def _totals(table: Table) -> list[str]:
    roles = [(role, name, table.totals(role)) for role, name in _ROLES]
    roles = [found for found in roles if found[2].leaves]
    lines = []
    for role, name, sums in roles:
        leaves = "1 leaf" if sums.leaves == 1 else f"{sums.leaves} leaves"
        line = (
            f"{name}: {leaves}, {human_bytes(sums.total_bytes)}, "
            f"{human_bytes(sums.bytes_per_device)} per device"
        )
        # Of one role alone, the last line says it; counters are never sharded.
        several = len(roles) > 1 and role != "other"
        if several and sums.total_bytes and table.replicated_share:
            share = human_share(sums.replicated_bytes / sums.total_bytes)
            line += f"; {share} replicated"
        lines.append(line)
    sums = table.totals()
    where = "no mesh" if table.mesh is None else f"mesh {table.mesh}"
    share = human_share(table.replicated_share)
    lines.append(
        f"{where}: {human_bytes(sums.bytes_per_device)} per device of "
        f"{human_bytes(sums.total_bytes)}; {share} of the bytes replicated"
    )
    return lines


def _unused(
    table: Table, besides: Sequence[Table] = (), *, hints: bool
) -> list[tuple[str, str, Role]]:
    """A line for each unused rule, with its hint, and the role that it is for."""
    numbers = {id(rule): at + 1 for at, rule in enumerate(table.rules.rules)}
    lines: list[tuple[str, str, Role]] = []
    elsewhere = [set(map(id, other.unused_rules)) for other in besides]
    for rule in table.unused_rules:
        if not all(id(rule) in unused for unused in elsewhere):
            continue
        number = numbers.get(id(rule))
        name = f"rule {number}" if number else "optimizer rule"
        hint = ""
        if len(lines) < _HINTS:
            near = nearest(rule.pattern, table.parameter_paths(), free_only=not hints)
            hint = "" if near is None else near.hint
        head = f"unused: {name} {rule.pattern!r} matches no leaf"
        lines.append((head, hint, "parameter" if number else "optimizer"))
    return lines


@dataclasses.dataclass(frozen=True, slots=True)
class Near:
    """A path that a rule without a match may have been meant for.

    Attributes:
        ending: its last parts, as many as the pattern has.
        likeness: of the two, 0 to 1.
        is_free: whether no rule matches it, as after a renaming.
    """

    ending: str
    likeness: float
    is_free: bool

    @property
    def hint(self) -> str:
        """The end of a message."""
        if self.is_free and self.likeness < _MISSPELT:
            return f"; {self.ending!r} is matched by none"
        return f"; the closest path ends in {self.ending!r}"


def nearest(
    pattern: str, paths: Iterable[tuple[str, bool]], *, free_only: bool = False
) -> Near | None:
    """The path that is most like a pattern, rather one that no rule matches.

    Args:
        pattern: the pattern.
        paths: paths, and whether no rule matches them.
        free_only: whether to look at those alone.
    """
    parts = pattern.count("/") + 1
    endings: dict[str, bool] = {}
    for path, is_free in itertools.islice(paths, _MOST_PATHS):
        ending = "/".join(path.split("/")[-parts:])
        endings[ending] = endings.get(ending, False) or is_free
    free = [ending for ending, is_free in endings.items() if is_free]
    found = _most_alike(pattern, free, _RENAMED)
    if found is not None or free_only:
        return found and Near(*found, True)
    found = _most_alike(pattern, endings, _ALIKE)
    return found and Near(*found, endings[found[0]])


def _most_alike(
    pattern: str, endings: Iterable[str], least: float
) -> tuple[str, float] | None:
    """What `difflib.get_close_matches` finds first, with fewer of its comparisons."""
    matcher = difflib.SequenceMatcher(b=pattern)
    bounds = []
    for ending in endings:
        matcher.set_seq1(ending)
        bounds.append((min(matcher.real_quick_ratio(), matcher.quick_ratio()), ending))
    best = least, ""
    for bound, ending in sorted(bounds, reverse=True):
        if bound < best[0]:
            break  # the others can be no better
        matcher.set_seq1(ending)
        best = max(best, (matcher.ratio(), ending))
    return (best[1], best[0]) if best[1] else None
