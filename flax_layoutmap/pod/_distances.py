"""How far apart two gathers of one value are, as the TPU compiler measures it.

Its partitioner gathers for each use. A later pass (schedule-aware-collective-cse) makes
one of equal gathers, but not of those that are more than 100 apart: what was gathered
would be kept for too long. It goes by the height of an operation above the end of its
block: one more than that of its users, and one more again for each further user.

Its program has fewer operations than this one. For kernels of queries, keys and values
in five small decoders, libtpu 0.0.42 makes one of gathers that are up to 108 apart
here, and leaves those from 112 on; by its own count, in one dump of that pass, it makes
one of those that are 88 apart and leaves 116 and 118, here 94, 124 and 126. That was in
JAX's order; in XLA's, the decoders of `benchmarks/pod_compile.py` agree as before.
"""

from collections.abc import Iterator
from typing import Any

from flax_layoutmap.pod._operations import maker_of

FAR = 110
# They are of values that are no operands of theirs.
_BRANCHES = ("stablehlo.case", "stablehlo.if")


class Distances:
    """The heights of operations, of each block that is asked for."""

    def __init__(self) -> None:
        self._known: dict[Any, dict[Any, int]] = {}
        self._first: dict[Any, tuple[Any, int]] = {}

    def add(self, key: Any, result: Any, at: int) -> None:
        """Remembers a gather of a value, where it is the first one.

        Args:
            key: the same for equal gathers.
            result: its result.
            at: its number in its block.
        """
        self._first.setdefault(key, (result, at))

    def is_far(self, key: Any, result: Any, at: int) -> bool:
        """Whether a gather stays beside the first that is equal."""
        first, before = self._first[key]
        # Few are this close together, and have so many more users below them.
        if at - before <= FAR:
            return False
        block = maker_of(first).block
        if maker_of(result).block != block:
            return False
        heights = self._known.get(block)
        if heights is None:
            heights = self._known[block] = _heights(block)
        ends = [end for use in first.uses for end in use.owner.results]
        lowest = min((heights.get(end, 0) for end in ends), default=0)
        return lowest - heights[result] > FAR


def _heights(block: Any) -> dict[Any, int]:
    """The height of each result of a block."""
    above: dict[Any, list[int]] = {}
    heights: dict[Any, int] = {}
    operations = [op.operation for op in block.operations]
    for op in reversed(operations):
        height = 0
        for result in op.results:
            for one in reversed(above.get(result, ())):
                height = (one if one > height else height) + 1
            heights[result] = height
        used = op.operands
        if op.name in _BRANCHES:
            used = {*used, *_captured(op)}
        elif len(used) > 1:
            used = {*used}
        for operand in used:
            users = above.get(operand)
            if users is None:
                above[operand] = [height]
            else:
                users.append(height)
    return heights


def _captured(op: Any) -> Iterator[Any]:
    """What the operations in the branches of a conditional are of."""
    for region in op.regions:
        for inner in region.blocks[0].operations:
            yield from inner.operands
            yield from _captured(inner)
