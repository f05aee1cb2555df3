"""A Resolution → the scene of a whole model."""

import collections
import dataclasses
import re
from collections.abc import Sequence
from typing import Any, Protocol

from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._rules.records import (
    Columns,
    Decision,
    Shape,
    because,
    leaf_bytes,
    show_shape,
    show_spec,
)
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._tree.paths import Role
from flax_layoutmap.draw import _bars, _forest
from flax_layoutmap.draw._explained import owner_pieces, pieces
from flax_layoutmap.draw._scene import (
    NEUTRAL,
    BarScene,
    Kind,
    Mark,
    ModelScene,
    Shade,
    View,
)

Leaf = tuple[str, Shape, Any, Decision, Role]

ROLES: tuple[tuple[Role, str], ...] = (
    ("parameter", "Parameters"),
    ("optimizer", "Optimizer"),
    ("other", "Other"),
)

# For so many leaves without a rule the closest rule is looked for one by one; of more
# than these, those whose paths differ in numbers alone share the words of the first.
_ASKED = 100

# Nobody reads more remarks than these.
_REMARKS = 50

# Width of the outline of an array, in points.
_OUTLINE = 170.0

_NOTHING = (
    "there is nothing to draw: the Resolution has no leaves; resolve a model: "
    "flm.draw.model(layout_map.resolve(model))"
)


class Resolved(Protocol):
    """What is drawn of a `Resolution`."""

    rules: RuleSet

    def columns(self) -> Columns: ...
    def explain(self, path: str) -> str: ...
    def remarks(self, *, fold: bool = False) -> list[str]: ...
    @property
    def mesh(self) -> DeviceMesh | None: ...


class Kinds:
    """What leaves have in common, found one leaf after the other."""

    def __init__(self) -> None:
        self.kinds: list[Kind] = []
        self.alike: list[int] = []
        self.shades: list[str] = []
        self._known: dict[tuple[Any, ...], int] = {}
        self._first: dict[Kind, int] = {}
        self._asked = 0

    def of(self, leaf: Leaf, resolution: Resolved) -> int:
        """The position of the kind of a leaf."""
        path, shape, dtype, row, _ = leaf
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
            owner_pieces(path, row.owner),
            self._path_key(path) if row.reason == "no rule" else "",
            id(resolution),
        )
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = len(self.kinds)
            self._add(leaf, resolution)
        return found

    def _path_key(self, path: str) -> str:
        self._asked += 1
        return path if self._asked <= _ASKED else re.sub(r"\d+", "0", path)

    def _add(self, leaf: Leaf, resolution: Resolved) -> None:
        path, shape, dtype, row, _ = leaf
        spec = show_spec(row.spec)
        if spec not in self.shades:
            self.shades.append(spec)
        kind = Kind(
            shape=show_shape(shape),
            dtype="-" if dtype is None else str(dtype),
            shade=self.shades.index(spec),
            rule=_rule(row, resolution.rules),
            shard="-" if row.shard_shape is None else show_shape(row.shard_shape),
            total_bytes=leaf_bytes(shape, dtype),
            bytes_per_device=leaf_bytes(row.shard_shape or shape, dtype),
            mark=_mark(row),
            outline=_outline(shape, row.shard_shape or shape),
            explain=(),
        )
        self.alike.append(self._first.setdefault(kind, len(self.kinds)))
        text = resolution.explain(path)
        self.kinds.append(
            dataclasses.replace(kind, explain=pieces(text, path, row.owner))
        )


def _rule(row: Decision, rules: RuleSet) -> str:
    # Words that do not name the owner are the same for all layers.
    if row.reason == "follows parameter":
        return "follows its parameter"
    if row.reason == "follows kernel":
        return "as its kernel"
    return because(row, rules, short=True)


def _outline(shape: Shape, shard: Shape) -> tuple[int, ...]:
    """An array as it would look, were its sides not too unlike to be drawn."""
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


def _mark(row: Decision) -> Mark:
    if row.reason in ("no rule", "unknown optimizer state"):
        return "unmatched"
    return "fallback" if row.fallback else ""


def scene(resolution: Resolved, optimizer: Resolved | None = None) -> ModelScene:
    """The scene of a model and of its optimizer; see `flm.draw.model`."""
    leaves = [(leaf, resolution) for leaf in zip(*resolution.columns(), strict=True)]
    if optimizer is not None and optimizer is not resolution:
        # Its own parameters are those of the model, or a copy of them.
        leaves = [pair for pair in leaves if pair[0][4] != "optimizer"]
        leaves += [
            (leaf, optimizer)
            for leaf in zip(*optimizer.columns(), strict=True)
            if leaf[4] != "parameter"
        ]
    if not leaves:
        raise LayoutError(_NOTHING)
    kinds = Kinds()
    of_leaf = [kinds.of(leaf, source) for leaf, source in leaves]
    shades, ranked = _ranked(kinds, of_leaf)
    views = []
    for role, title in ROLES:
        chosen = [at for at, (leaf, _) in enumerate(leaves) if leaf[4] == role]
        if chosen:
            paths = [leaves[at][0][0] for at in chosen]
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
        remarks=_some(resolution.remarks(fold=True)),
        bars=_bars.scene(views, ranked, shades, name),
    )


def _ranked(
    kinds: Kinds, of_leaf: Sequence[int]
) -> tuple[tuple[Shade, ...], list[Kind]]:
    """The specs by the bytes that lie so, and the kinds with their new positions."""
    sums: collections.Counter[int] = collections.Counter()
    for kind, many in collections.Counter(of_leaf).items():
        found = kinds.kinds[kind]
        sums[found.shade] += many * found.bytes_per_device
    order = sorted(range(len(kinds.shades)), key=lambda at: (-sums[at], at))
    shades = shaded([(kinds.shades[at], sums[at]) for at in order])
    ranked = [
        dataclasses.replace(kind, shade=order.index(kind.shade)) for kind in kinds.kinds
    ]
    return shades, ranked


def shaded(specs: Sequence[tuple[str, int]]) -> tuple[Shade, ...]:
    """Gives each spec a colour, or one with a pattern; what is replicated has none."""
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
    # First, since it finds what is alike.
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


def _some(remarks: Sequence[str]) -> tuple[str, ...]:
    more = len(remarks) - _REMARKS
    if more <= 1:
        return tuple(remarks)
    return (*remarks[:_REMARKS], f"and {more:,} more; resolution.remarks() lists all")


def compared(before: Resolved, after: Resolved, names: tuple[str, str]) -> BarScene:
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
    shades = shaded(specs.most_common())
    at = {shade.text: position for position, shade in enumerate(shades)}
    first, second = (
        [(path, at[spec], size) for path, spec, size in sizes] for sizes in listed
    )
    meshes = tuple(
        "no mesh" if one.mesh is None else str(one.mesh) for one in (before, after)
    )
    return _bars.compared(first, second, shades, names, (meshes[0], meshes[1]))
