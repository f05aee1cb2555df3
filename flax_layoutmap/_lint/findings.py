"""The findings of checks, with rules by number and similar leaves grouped."""

import collections
import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from flax_layoutmap._core.errors import RuleError
from flax_layoutmap._lint.report import Severity
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._rules.matching import Rule
from flax_layoutmap._rules.records import Decision, leaf_bytes, section_of, show_shape

NUMBER = re.compile(r"\d+")
_KINDS = {"rules": "rule", "optimizer": "optimizer rule", "names": "name"}


class Numbered(NamedTuple):
    """A rule and where it stands; as text `rule 3 'up/kernel' → (None, 'model')`."""

    section: str
    number: int
    rule: Rule

    def __str__(self) -> str:
        return f"{self.kind} {self.number} {self.pattern!r} → {self.rule.layout}"

    @property
    def kind(self) -> str:
        """`rule`, or `optimizer rule` and the like in other sections."""
        return _KINDS.get(self.section, "activation rule")

    @property
    def pattern(self) -> str:
        return self.rule.pattern

    @property
    def key(self) -> str:
        """`layout_map.optimizer["kernel"]`."""
        return self.key_of(self.pattern)

    def key_of(self, pattern: str) -> str:
        """The key of another pattern in its section."""
        section = "" if self.section == "rules" else f".{self.section}"
        is_plain = not set(pattern) & set("\"\\'\n")
        text = f'"{pattern}"' if is_plain else repr(pattern)
        return f"layout_map{section}[{text}]"

    @property
    def axes(self) -> str:
        """The layout as code: `(None, 'model')`, or `None`."""
        return "None" if self.rule.layout.is_replicated else str(self.rule.layout)


class Refused(NamedTuple):
    """What was given as a rule and is none; as text with the reason."""

    section: str
    number: int
    pattern: str | None
    error: RuleError

    def __str__(self) -> str:
        return f"rule {self.number}: {self.error}"

    @property
    def escaped(self) -> str:
        """The pattern as one that matches just its text."""
        return re.escape(self.pattern or "")


@dataclasses.dataclass(slots=True)
class Group:
    """Leaves with one decision whose paths differ in numbers only.

    As text `layers/0/up/kernel (64,256) and 79 more alike`.

    Attributes:
        row: the decision.
        at: position of the first of them.
        path: its path.
        shape: its shape.
        leaves: how many there are.
        bytes: bytes of their global arrays.
    """

    row: Decision
    at: int
    path: str
    shape: tuple[int, ...]
    leaves: int = 0
    bytes: int = 0

    def __str__(self) -> str:
        more = f" and {self.leaves - 1} more alike" if self.leaves > 1 else ""
        return f"{self.path or 'the leaf'} {show_shape(self.shape)}{more}"

    @property
    def whole(self) -> str:
        """What every device holds in full."""
        return "it" if self.leaves == 1 else f"all {self.leaves}"


class Finding:
    """What a check found: the name of its row in the table, and what fills its texts.

    Args:
        row: the name: a code, and what tells several rows of one code apart.
        rule: the rule that it is about, `{rule}` in a text.
        leaf: the leaves that it is about, `{leaf}` in a text.
        severity: another one than the table says, or None.
        path: the path of one leaf, where there is no `leaf`.
        leaves: how many there are.
        section: the section, where there is no `rule`.
        **words: what else the texts name.
    """

    __slots__ = (
        "row",
        "rule",
        "leaf",
        "severity",
        "path",
        "leaves",
        "section",
        "words",
    )

    def __init__(
        self,
        row: str,
        rule: Numbered | Refused | None = None,
        leaf: Group | None = None,
        *,
        severity: Severity | None = None,
        path: str | None = None,
        leaves: int = 0,
        section: str = "rules",
        **words: Any,
    ) -> None:
        self.row, self.rule, self.leaf = row, rule, leaf
        self.severity: Severity | None = severity
        self.path, self.leaves, self.section = path, leaves, section
        self.words = words


class Model:
    """A Resolution that is checked.

    Attributes:
        resolution: the Resolution.
        tile: rows and columns; `"tpu"`; or None: a TPU's where the mesh has TPUs.
        max_replicated: the share of the bytes that every device may hold in full.
        is_spared: whether a leaf does not count, by its path.
    """

    def __init__(
        self,
        resolution: Resolution,
        tile: Any,
        max_replicated: float | None,
        is_spared: Callable[[str], bool],
    ) -> None:
        self.resolution, self.tile = resolution, tile
        self.max_replicated, self.is_spared = max_replicated, is_spared

    @functools.cached_property
    def unused(self) -> list[Numbered]:
        """The rules that match no leaf."""
        rules = self.resolution.rules
        unused = set(map(id, self.resolution.unused_rules))
        return [
            Numbered(section, number, rule)
            for section in ("rules", "optimizer")
            for number, rule in enumerate(getattr(rules, section), start=1)
            if id(rule) in unused
        ]

    @functools.cached_property
    def sizes(self) -> dict[int, int]:
        """Bytes of all leaves of each decision, by its id."""
        rows, dtypes = self.resolution._rows, self.resolution.dtypes
        # Leaves of one decision have one shape.
        first = dict(zip(map(id, rows), self.resolution.shapes, strict=True))
        found = dict.fromkeys(first, 0)
        for dtype in set(dtypes):
            own = [id(row) for row, at in zip(rows, dtypes, strict=True) if at == dtype]
            for key, count in collections.Counter(own).items():
                found[key] += leaf_bytes(first[key], dtype) * count
        return found

    @functools.cached_property
    def total(self) -> int:
        """Bytes of all leaves; 1 where there are none."""
        return sum(self.sizes.values()) or 1

    def rule_of(self, row: Decision) -> Numbered | None:
        """The rule that decided."""
        if row.rule is None:
            return None
        section = "optimizer" if row.reason == "optimizer rule" else "rules"
        rule = section_of(row, self.resolution.rules)[row.rule]
        return Numbered(section, row.rule + 1, rule)

    def suggested(self, leaf: Group) -> str:
        """A rule for leaves, as code."""
        return suggested(self.resolution, leaf.path, leaf.shape)


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
    dtypes, shapes, rows = resolution.dtypes, resolution.shapes, resolution._rows
    for at in [at for at, known in enumerate(map(id, rows)) if known in keys]:
        if role is None or roles[at] == role:
            row, dtype = rows[at], dtypes[at]
            key = id(row), NUMBER.sub("0", paths[at])
            group = found.get(key)
            if group is None:
                group = found[key] = Group(row, at, paths[at], shapes[at])
            group.leaves += 1
            sized = id(row), dtype
            if sized not in sizes:
                sizes[sized] = leaf_bytes(shapes[at], dtype)
            group.bytes += sizes[sized]
    return list(found.values())


def suggested(resolution: Resolution, path: str, shape: tuple[int, ...]) -> str:
    """A rule for a leaf, as code: its largest dim that divides, on an axis."""
    parts = NUMBER.sub(r"\\d+", path).split("/")
    quote = "r" if "\\" in "/".join(parts[-2:]) else ""
    key = f'layout_map[{quote}"{"/".join(parts[-2:]) or ".*"}"]'
    sizes = {} if resolution.mesh is None else resolution.mesh.axis_sizes
    names = [n for n in sizes if sizes[n] > 1 and n not in resolution.rules.batch]
    for axis in names or [n for n in sizes if sizes[n] > 1]:
        fitting = [dim for dim, size in enumerate(shape) if size % sizes[axis] == 0]
        if fitting:
            best = max(fitting, key=lambda dim: (shape[dim], dim))
            axes = tuple(axis if dim == best else None for dim in range(len(shape)))
            return f"{key} = {axes}  # or None: replicated, on purpose"
    return f"{key} = None  # replicated, on purpose"
