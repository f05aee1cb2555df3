"""Group leaves by shape, layout, rule and explanation."""

import dataclasses
import re
from typing import Any

from flax_layoutmap._rules.records import (
    Decision,
    Shape,
    because,
    leaf_bytes,
    show_shape,
    show_spec,
)
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._show.remarks import UNMATCHED, explain
from flax_layoutmap._show.resolved_table import ResolvedTable
from flax_layoutmap._tree.paths import Role
from flax_layoutmap.draw._scene import Kind

Leaf = tuple[str, Shape, Any, Decision, Role]

# For so many leaves without a rule the closest rule is looked for one by one; of more
# than these, those whose paths differ in numbers alone share the words of the first.
_ASKED = 100

# Width of the outline of an array, in points.
_OUTLINE = 170.0


class Kinds:
    """The kinds of leaves, found one leaf after the other.

    Attributes:
        kinds: all that were found.
        alike: per kind, the first one that differs in its explanation at most.
        specs: the specs in them, as text, by `Kind.shade`.
    """

    def __init__(self) -> None:
        self.kinds: list[Kind] = []
        self.alike: list[int] = []
        self.specs: list[str] = []
        self._known: dict[tuple[Any, ...], int] = {}
        self._first: dict[Kind, int] = {}
        self._asked = 0

    def of(self, table: ResolvedTable, at: int, leaf: Leaf) -> int:
        """The position of the kind of a leaf of a Resolution."""
        path, shape, dtype, row, _ = leaf
        asks = ""
        if row.reason == "no rule":
            self._asked += 1
            asks = path if self._asked <= _ASKED else re.sub(r"\d+", "0", path)
        key = (
            shape,
            dtype,
            row.spec,
            row.shard_shape,
            row.reason,
            row.rule,
            row.matched,
            row.memory_kind,
            row.fallback,
            row.note,
            _owner_pieces(path, row.owner),
            asks,
            id(table),
        )
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = len(self.kinds)
            kind = self._kind(leaf, table.rules)
            self.alike.append(self._first.setdefault(kind, found))
            text = explain(table.leaf(at), row, table.rules)
            said = pieces(text, path, row.owner)
            self.kinds.append(dataclasses.replace(kind, explain=said))
        return found

    def _kind(self, leaf: Leaf, rules: RuleSet) -> Kind:
        _, shape, dtype, row, _ = leaf
        spec, shard = show_spec(row.spec), row.shard_shape
        if spec not in self.specs:
            self.specs.append(spec)
        is_unmatched = row.reason in UNMATCHED
        return Kind(
            shape=show_shape(shape),
            dtype="-" if dtype is None else str(dtype),
            shade=self.specs.index(spec),
            rule=_rule(row, rules),
            shard="-" if shard is None else show_shape(shard),
            total_bytes=leaf_bytes(shape, dtype),
            bytes_per_device=leaf_bytes(shard or shape, dtype),
            mark="unmatched" if is_unmatched else "fallback" if row.fallback else "",
            outline=_outline(shape, shard or shape),
            explain=(),
        )


def _rule(row: Decision, rules: RuleSet) -> str:
    # Words that do not name the owner are the same for all layers.
    if row.reason == "follows parameter":
        return "follows its parameter"
    if row.reason == "follows kernel":
        return "as its kernel"
    return because(row, rules, short=True)


def _outline(shape: Shape, shard: Shape) -> tuple[int, ...]:
    """Sides of an array and of one shard, in points, of a ratio that can be drawn."""
    if not shape or 0 in shape:
        return ()
    tall, wide = shape[-2:] if len(shape) > 1 else (1, 5)
    ratio = min(4.0, max(0.5, wide / tall))
    width = min(_OUTLINE, _OUTLINE * ratio / 1.4)
    sides = (width, width / ratio)
    parts = [own / whole for own, whole in zip(shard, shape, strict=True)][-2:]
    down, across = parts if len(parts) > 1 else (1.0, *parts)
    return (
        *map(round, sides),
        max(1, round(sides[0] * across)),
        max(1, round(sides[1] * down)),
    )


def _owner_pieces(path: str, owner: str | None) -> tuple[str | int, ...]:
    """The path that a leaf follows, by parts of its own path, as in `Kind.explain`.

    >>> _owner_pieces("mu/0/up/kernel", "0/up/kernel")
    (3,)
    >>> _owner_pieces("0/up/lora_a", "0/up/kernel")
    (-2, '/kernel')
    """
    if owner is None or path == owner:
        return () if owner is None else (0,)
    parts = owner.split("/")
    if path.endswith(f"/{owner}"):
        return (len(parts),)
    same = 0
    for own, other in zip(path.split("/"), parts, strict=False):
        if own != other:
            break
        same += 1
    if not same:
        return (owner,)
    return (-same, "".join(f"/{part}" for part in parts[same:]))


def pieces(text: str, path: str, owner: str | None) -> tuple[str | int, ...]:
    """The explanation of a leaf, with numbers in place of its path.

    Args:
        text: the words.
        path: path of the leaf: the first word.
        owner: what the leaf follows.

    Returns:
        Texts and numbers: 0 for the path, n for its last n parts.

    >>> pieces("a/b (8,)\\n  because: follows b", "a/b", "b")
    (0, ' (8,)\\n  because: follows ', 1)
    """
    rest, named = text.removeprefix(path), _owner_pieces(path, owner)
    for start, name, said in (
        ("\n  because: follows ", owner, named),
        ("\n  because: from the layout of ", owner, named),
        (f"\n  {repr(path)[0]}", path, (0,)),  # "… is matched by no rule"
    ):
        before, found, after = rest.partition(f"{start}{name}")
        if found and name is not None:
            parts = (0, before + start, *said, after)
            return tuple(part for part in parts if part != "")
    return (0, rest)
