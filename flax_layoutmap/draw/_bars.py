"""Bars of bytes per device by module, for one or two Resolutions."""

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence

from flax_layoutmap._show.table import human_bytes
from flax_layoutmap.draw._scene import Bar, BarScene, Forest, Kind, Shade, View

Size = tuple[str, int, int]  # path of a leaf, position of its shade, bytes per device

# The most bars; the last one has the rest.
_BARS = 12

# The least share of all bytes for which a module has a bar of its own.
_WORTH = 1 / 50

# Modules with at least this ratio of sizes count as equal.
_ALIKE = 0.98

# The least number of names with an index that are layers.
_LAYERS = 3

# The indices of folded layers: `{0..31}`.
_FOLDED = re.compile(r"\{[\d,.]+\}")

_NUMBERED = re.compile(r"(.*_)?(0|[1-9]\d*)")


def scene(
    views: Sequence[View], kinds: Sequence[Kind], shades: tuple[Shade, ...], where: str
) -> BarScene:
    """The bars of one Resolution."""
    # Folded layers are counted together.
    sizes = [size for view in views for size in _sizes(view.folded, kinds)]
    per_device = sum(view.bytes_per_device for view in views)
    total = sum(view.total_bytes for view in views)
    replicated = sum(view.replicated_bytes for view in views)
    share = replicated / total if total else 0.0
    line = (
        f"{where}: {human_bytes(per_device)} per device of {human_bytes(total)}; "
        f"{share:.1%} of the bytes replicated"
    )
    return BarScene(
        title="Bytes per device by module",
        lines=(line,),
        shades=shades,
        bars=_bars([sizes]),
        names=("bytes per device",),
        total=per_device,
    )


def _sizes(forest: Forest, kinds: Sequence[Kind]) -> Iterator[Size]:
    paths, times = [""], [1]
    for at in range(1, len(forest.names)):
        parent = forest.parents[at]
        name = _FOLDED.sub("*", forest.names[at])
        paths.append(f"{paths[parent]}/{name}" if parent else name)
        times.append(times[parent] * forest.counts[at])
        if forest.kinds[at] >= 0:
            kind = kinds[forest.kinds[at]]
            yield paths[at], kind.shade, kind.bytes_per_device * times[at]


def compared(
    before: Sequence[Size],
    after: Sequence[Size],
    shades: tuple[Shade, ...],
    names: tuple[str, str],
    meshes: tuple[str, str],
) -> BarScene:
    """The bars of two Resolutions, side by side."""
    sums = [sum(size for _, _, size in sizes) for sizes in (before, after)]
    return BarScene(
        title=f"Bytes per device by module, {names[0]} and {names[1]}",
        lines=tuple(
            f"{name}: {human_bytes(total)} per device on {mesh}"
            for name, total, mesh in zip(names, sums, meshes, strict=True)
        ),
        shades=shades,
        bars=_bars([after, before]),
        names=names,
        total=sums[1],
        total_before=sums[0],
    )


@dataclasses.dataclass(slots=True, eq=False)
class _Module:
    """The bytes per device below one path, by shade, of each Resolution."""

    path: str
    sizes: tuple[collections.Counter[int], ...]
    children: "dict[str, _Module]" = dataclasses.field(default_factory=dict)

    @property
    def weight(self) -> int:
        return max(own.total() for own in self.sizes)


def _bars(listed: Sequence[Sequence[Size]]) -> tuple[Bar, ...]:
    """One bar per module, down to where there are enough of them.

    The layers of a model are one module. The largest modules are taken apart first.
    """
    root = _modules(listed)
    chosen = [module for module in _opened(root) if module.weight]
    chosen.sort(key=lambda module: -module.weight)
    many = min(_BARS - 1, sum(_is_large(module, root) for module in chosen))
    rest = chosen[many:]
    if len(rest) > 1:
        sums = tuple(map(_empty, listed))
        for module in rest:
            for total, own in zip(sums, module.sizes, strict=True):
                total.update(own)
        chosen = [*chosen[:many], _Module(f"{len(rest)} others", sums)]
    return tuple(
        Bar(module.path or "(root)", *map(_parts, module.sizes)) for module in chosen
    )


def _parts(sizes: collections.Counter[int]) -> tuple[tuple[int, int], ...]:
    return tuple(pair for pair in sorted(sizes.items()) if pair[1])


def _empty(_: object) -> collections.Counter[int]:
    return collections.Counter()


def _modules(listed: Sequence[Sequence[Size]]) -> _Module:
    """The leaves of each Resolution in one tree of modules, layers as one."""
    layers = _layer_names(path for sizes in listed for path, _, _ in sizes)
    root = _Module("", tuple(map(_empty, listed)))
    for at, sizes in enumerate(listed):
        for path, shade, size in sizes:
            node, above = root, ""
            node.sizes[at][shade] += size
            for part in path.split("/"):
                part = layers.get(part, part)
                above = f"{above}/{part}" if above else part
                if part not in node.children:
                    new = _Module(above, tuple(map(_empty, listed)))
                    node.children[part] = new
                node = node.children[part]
                node.sizes[at][shade] += size
    return root


def _layer_names(paths: Iterable[str]) -> dict[str, str]:
    """`3` → `*`, and `layers_3` → `layers_*` where there are several."""
    stems: dict[str, set[str]] = {}
    modules = {path.rpartition("/") for path in paths}
    names = {name for _, _, name in modules}
    for above in {above for above, _, _ in modules}:
        names.update(above.split("/"))
    for part in names:
        found = _NUMBERED.fullmatch(part)
        if found is not None:
            stems.setdefault(found[1] or "", set()).add(part)
    return {
        part: f"{stem}*"
        for stem, parts in stems.items()
        if not stem or len(parts) >= _LAYERS
        for part in parts
    }


def _is_large(module: _Module, root: _Module) -> bool:
    """Whether a module is worth a bar, in one of the Resolutions."""
    return any(
        own.total() >= whole.total() * _WORTH
        for own, whole in zip(module.sizes, root.sizes, strict=True)
        if whole.total()
    )


def _opened(root: _Module) -> list[_Module]:
    """Modules that hold everything, the largest ones taken apart."""
    chosen, closed = [_innermost(root)], []
    while chosen:
        largest = max(chosen, key=lambda module: module.weight)
        # Modules of equal size (both moments of an optimizer) are treated alike.
        peers = [m for m in chosen if m.weight >= largest.weight * _ALIKE]
        chosen = [module for module in chosen if module not in peers]
        inner = [_innermost(m) for peer in peers for m in peer.children.values()]
        large = sum(_is_large(m, root) for m in (*chosen, *closed, *inner))
        fits = large < _BARS and largest.weight * _BARS >= root.weight
        whole = [peer for peer in peers if not peer.children]
        if inner and (fits or not (chosen or closed or whole)):
            chosen += inner
            closed += whole
        else:
            closed += peers
    return closed


def _innermost(module: _Module) -> _Module:
    while len(module.children) == 1:
        (module,) = module.children.values()
    return module
