"""The scenes of a whole model, and of two models compared."""

import collections
import dataclasses
from collections.abc import Iterator, Sequence

from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._rules.records import leaf_bytes, show_spec
from flax_layoutmap._show.remarks import remarks
from flax_layoutmap._show.resolved_table import ResolvedTable
from flax_layoutmap._tree.paths import Role
from flax_layoutmap.draw import _bars, _forest
from flax_layoutmap.draw._kinds import Kinds, Leaf
from flax_layoutmap.draw._scene import (
    NEUTRAL,
    BarScene,
    Kind,
    ModelScene,
    Shade,
    View,
)

ROLES: tuple[tuple[Role, str], ...] = (
    ("parameter", "Parameters"),
    ("optimizer", "Optimizer"),
    ("other", "Other"),
)

# Nobody reads more remarks than these.
_REMARKS = 50

_NOTHING = (
    "there is nothing to draw: the Resolution has no leaves; resolve a model: "
    "flm.draw.model(layout_map.resolve(model))"
)


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
    """Give each spec a colour, or one with a pattern; what is replicated has none."""
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
