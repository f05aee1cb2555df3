"""The scenes of a whole model, and of two models compared.

Leaves of equal shape, layout, rule and explanation are of one kind.
"""

import collections
import dataclasses
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._rules.records import (
    Decision,
    Shape,
    because,
    leaf_bytes,
    show_shape,
    show_spec,
)
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._show.remarks import UNMATCHED, explain, remarks
from flax_layoutmap._show.resolved_table import ResolvedTable
from flax_layoutmap._tree.paths import Role
from flax_layoutmap.draw import _bars, _forest
from flax_layoutmap.draw._scene import (
    NEUTRAL,
    BarScene,
    Kind,
    ModelScene,
    Shade,
    View,
)

Leaf = tuple[str, Shape, Any, Decision, Role]

# The most leaves without a rule for which the closest rule is searched one by one; of
# further ones, those whose paths differ only in numbers share the text of the first.
_ASKED = 100

# Width of the outline of an array, in points.
_OUTLINE = 170.0

ROLES: tuple[tuple[Role, str], ...] = (
    ("parameter", "Parameters"),
    ("optimizer", "Optimizer"),
    ("other", "Other"),
)

# The most remarks to show.
_REMARKS = 50

_NOTHING = (
    "there is nothing to draw: the Resolution has no leaves; resolve a model: "
    "flm.draw.model(layout_map.resolve(model))"
)


# ------------------------------------------------------------------ kinds of leaves


class Kinds:
    """The kinds of leaves, collected leaf by leaf.

    `alike` has per kind the first one that differs in its explanation at most; `specs`
    has the specs as text, by `Kind.shade`.
    """

    def __init__(self) -> None:
        self.kinds: list[Kind] = []
        self.alike: list[int] = []
        self.specs: list[str] = []
        self._known: dict[tuple[Any, ...], int] = {}
        self._first: dict[Kind, int] = {}
        self._asked = 0

    def of(self, table: ResolvedTable, at: int, leaf: Leaf) -> int:
        """The position of the kind of a leaf, added if it is new."""
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
    # Without the name of the owner, the text is equal for all layers.
    if row.reason == "follows parameter":
        return "follows its parameter"
    if row.reason == "follows kernel":
        return "as its kernel"
    return because(row, rules, short=True)


def _outline(shape: Shape, shard: Shape) -> tuple[int, ...]:
    """Sides of an array and of one shard, in points, with the aspect ratio limited."""
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
    same = len(os.path.commonprefix([path.split("/"), parts]))
    if not same:
        return (owner,)
    return (-same, "".join(f"/{part}" for part in parts[same:]))


def pieces(text: str, path: str, owner: str | None) -> tuple[str | int, ...]:
    """The explanation of a leaf, with numbers for its path, as in `Kind.explain`.

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


# --------------------------------------------------------------------------- scenes


def scene(
    resolution: ResolvedTable, optimizer: ResolvedTable | None = None
) -> ModelScene:
    """The scene of a model and of its optimizer; see `flm.draw.model`."""
    leaves = [(resolution, *found) for found in _leaves(resolution)]
    if optimizer is not None and optimizer is not resolution:
        # Its own parameters are those of the model, or a copy of them.
        leaves = [found for found in leaves if found[2][4] != "optimizer"]
        leaves += [
            (optimizer, *found)
            for found in _leaves(optimizer)
            if found[1][4] != "parameter"
        ]
    if not leaves:
        raise LayoutError(_NOTHING)
    kinds = Kinds()
    of_leaf = [kinds.of(*found) for found in leaves]
    shades, ranked = _ranked(kinds, of_leaf)
    views = []
    for role, title in ROLES:
        chosen = [at for at, (_, _, leaf) in enumerate(leaves) if leaf[4] == role]
        if chosen:
            paths = [leaves[at][2][0] for at in chosen]
            ids = [of_leaf[at] for at in chosen]
            views.append(_view(title, paths, ids, ranked, kinds.alike))
    mesh = resolution.mesh
    name = "no mesh" if mesh is None else f"mesh {mesh}"
    return ModelScene(
        title=f"Layouts on {name}",
        mesh="" if mesh is None else str(mesh),
        devices=0 if mesh is None else mesh.size,
        shades=shades,
        kinds=tuple(ranked),
        views=tuple(views),
        remarks=_some(remarks(resolution, folded=True)),
        bars=_bars.scene(views, ranked, shades, name),
    )


def _leaves(table: ResolvedTable) -> Iterator[tuple[int, Leaf]]:
    return enumerate(zip(*table.columns(), strict=True))


def _ranked(
    kinds: Kinds, of_leaf: Sequence[int]
) -> tuple[tuple[Shade, ...], list[Kind]]:
    """The specs by their bytes, and the kinds with the new positions of their specs."""
    sums: collections.Counter[int] = collections.Counter()
    for kind, many in collections.Counter(of_leaf).items():
        found = kinds.kinds[kind]
        sums[found.shade] += many * found.bytes_per_device
    order = sorted(range(len(kinds.specs)), key=lambda at: (-sums[at], at))
    shades = _shaded([(kinds.specs[at], sums[at]) for at in order])
    ranked = [
        dataclasses.replace(kind, shade=order.index(kind.shade)) for kind in kinds.kinds
    ]
    return shades, ranked


def _shaded(specs: Sequence[tuple[str, int]]) -> tuple[Shade, ...]:
    """Give each spec a colour; what is replicated is grey."""
    made: list[Shade] = []
    used = 0
    for text, count in specs:
        is_replicated = text == "replicated"
        made.append(Shade(text, NEUTRAL if is_replicated else used, count))
        used += not is_replicated
    return tuple(made)


def _view(
    title: str,
    paths: Sequence[str],
    of_leaf: Sequence[int],
    kinds: Sequence[Kind],
    alike: Sequence[int],
) -> View:
    root = _forest.grow(paths, of_leaf)
    # Folding comes first: it finds which modules are alike.
    fewer = _forest.folded(root, alike)
    folded = _forest.forest(_forest.joined(fewer), kinds)
    flat = _forest.forest(_forest.joined(root), kinds)
    found = [kinds[kind] for kind in of_leaf]
    return View(
        title=title,
        leaves=len(paths),
        total_bytes=sum(kind.total_bytes for kind in found),
        bytes_per_device=sum(kind.bytes_per_device for kind in found),
        replicated_bytes=sum(
            kind.total_bytes
            for kind in found
            if kind.bytes_per_device == kind.total_bytes
        ),
        folded=folded,
        flat=None if len(flat.names) == len(folded.names) else flat,
    )


def _some(lines: Sequence[str]) -> tuple[str, ...]:
    more = len(lines) - _REMARKS
    if more <= 1:
        return tuple(lines)
    return (*lines[:_REMARKS], f"and {more:,} more; resolution.remarks() lists all")


def compared(
    before: ResolvedTable, after: ResolvedTable, names: tuple[str, str]
) -> BarScene:
    """The scene of `flm.draw.compare`."""
    specs: collections.Counter[str] = collections.Counter()
    listed = []
    for resolution in (before, after):
        sizes = [
            (path, show_spec(row.spec), leaf_bytes(row.shard_shape or shape, dtype))
            for path, shape, dtype, row, _ in zip(*resolution.columns(), strict=True)
        ]
        for _, spec, size in sizes:
            specs[spec] += size
        listed.append(sizes)
    if not specs:
        raise LayoutError(_NOTHING)
    shades = _shaded(specs.most_common())
    at = {shade.text: position for position, shade in enumerate(shades)}
    first, second = (
        [(path, at[spec], size) for path, spec, size in sizes] for sizes in listed
    )
    meshes = tuple(
        "no mesh" if one.mesh is None else str(one.mesh) for one in (before, after)
    )
    return _bars.compared(first, second, shades, names, (meshes[0], meshes[1]))
