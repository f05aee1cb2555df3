"""Warnings of a plan about the arguments of the step."""

from collections.abc import Iterator, Sequence

from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._rules.records import show_shape
from flax_layoutmap._show.table import human_bytes
from flax_layoutmap.pod._hlo_text import Array
from flax_layoutmap.pod._lower import Lowered

# Arrays in a closure below this are tables of constants.
_CLOSED_OVER = 1 << 20
# State below this is not worth donating.
_UNDONATED = 1 << 20


def warnings_of(
    lowered: Lowered, whole: Sequence[Array], shards: Sequence[Array], mesh: DeviceMesh
) -> Iterator[str]:
    """The warnings about arguments: `whole`, and their shards on a device."""
    yield from lowered.notes
    if mesh.size > 1 and whole and list(whole) == list(shards):
        yield (
            f"no argument is sharded over {mesh}: every device does the whole step; "
            "pass layout_map=layout_map, or arguments with shardings"
        )
    yield from _closed_over(lowered)
    yield from _undonated(lowered, shards)


def _closed_over(lowered: Lowered) -> Iterator[str]:
    large = [each for each in lowered.constants if each[1] >= _CLOSED_OVER]
    if large:
        shapes = ", ".join(show_shape(shape) for shape, _ in large[:4])
        size = human_bytes(sum(size for _, size in large))
        yield (
            f"{lowered.name} closes over {_count(large, 'array')} ({shapes}; {size}): "
            "constants of the program, which every device holds in full; pass them as "
            "arguments"
        )


def _undonated(lowered: Lowered, shards: Sequence[Array]) -> Iterator[str]:
    kept = [
        at
        for at in lowered.updates.values()
        if not lowered.leaves[at].is_donated and lowered.leaves[at].role != "data"
    ]
    size = sum(shards[at].bytes for at in kept)
    if size >= _UNDONATED:
        yield (
            f"{_count(kept, 'leaf')} of state, such as {lowered.leaves[kept[0]].path}, "
            f"{'is' if len(kept) == 1 else 'are'} not donated: where the results are "
            f"their new values, old and new are held at the same time, "
            f"{human_bytes(size)} more per device; use donate_argnames"
        )


def _count(some: Sequence[object], noun: str) -> str:
    if len(some) == 1:
        return f"1 {noun}"
    return f"{len(some)} {'leaves' if noun == 'leaf' else f'{noun}s'}"
