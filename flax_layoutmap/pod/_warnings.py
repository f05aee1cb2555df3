"""What of a planned step is worth a look before it runs."""

import re
from collections.abc import Iterator

from flax_layoutmap._records import show_shape
from flax_layoutmap._table import human_bytes
from flax_layoutmap.pod._abstract_call import Lowered
from flax_layoutmap.pod._shardy import Spread

# Arrays in a closure below this are tables of constants.
_CLOSED_OVER = 1 << 20
# So many equal layers one after the other are slow to compile.
_DEEP = 12
# State below this is not worth donating.
_UNDONATED = 1 << 20

_INDEX = re.compile(r"(?<=/)\d+(?=/)")


def warnings_of(found: Spread, lowered: Lowered) -> Iterator[str]:
    """One text per finding.

    Args:
        found: what was read from the program.
        lowered: the program.
    """
    large = [one for one in lowered.constants if one[1] >= _CLOSED_OVER]
    if large:
        shapes = ", ".join(show_shape(shape) for shape, _ in large[:4])
        size = human_bytes(sum(size for _, size in large))
        arrays = "1 array" if len(large) == 1 else f"{len(large)} arrays"
        yield (
            f"{lowered.name} closes over {arrays} ({shapes}; {size}): constants of the "
            "program, which every device holds in full; pass them as arguments"
        )
    kept = [
        at
        for at in lowered.pairs.values()
        if not lowered.leaves[at].is_donated and lowered.leaves[at].role != "data"
    ]
    size = sum(found.arguments[at].local_bytes for at in kept)
    if size >= _UNDONATED:
        yield (
            f"{len(kept)} leaves of state, such as {lowered.leaves[kept[0]].path}, are "
            f"not donated: old and new are held at the same time, {human_bytes(size)} "
            "more per device; use donate_argnames"
        )
    layers = _layers(lowered)
    if layers > _DEEP:
        yield (
            f"{layers} layers stand one after the other in the program, "
            f"{found.operations} operations: with nnx.scan the compiler takes a half "
            "to a quarter of the time, and a fifth of the memory"
        )


def _layers(lowered: Lowered) -> int:
    """How many equal layers the parameters are numbered by."""
    indices: dict[str, set[str]] = {}
    for leaf in lowered.leaves:
        if leaf.role == "parameter":
            for index in _INDEX.finditer(leaf.path):
                place = leaf.path[: index.start()] + leaf.path[index.end() :]
                indices.setdefault(place, set()).add(index[0])
    return max(map(len, indices.values()), default=0)
