"""The order of a program's operations, as XLA hands them to Shardy.

Where two layouts meet, Shardy keeps the first. XLA writes a program depth first, each
operation behind its operands: from what has an effect and no users, such as a group of
values that are laid out alike, then from what it gives back. JAX writes it as it was
traced. Seen with XLA's dumps and the compilers of jax 0.10, on 2026-11-23.
"""

from collections.abc import Iterator
from typing import Any

from flax_layoutmap.pod._operations import maker_of

_EFFECT = "has_side_effect"


def order_as_xla(block: Any) -> None:
    """Orders the operations of a block, and of those below.

    Args:
        block: the block, which is changed. What nothing needs comes last.
    """
    *own, end = [one.operation for one in block.operations]
    index = {op: at for at, op in enumerate(own)}
    done: set[int] = set()
    for root in (*filter(_has_an_effect, own), end, *own):
        for op in _behind_its_operands(root, index, done):
            op.move_before(end)
    for op in own:
        for region in op.regions:
            for inner in region.blocks:
                order_as_xla(inner)


def _has_an_effect(op: Any) -> bool:
    """Whether an operation that nothing uses is there for something else."""
    if not len(op.results):
        return True
    says_so = _EFFECT in op.attributes and "true" in str(op.attributes[_EFFECT])
    return says_so and not any(len(list(result.uses)) for result in op.results)


def _behind_its_operands(
    root: Any, index: dict[Any, int], done: set[int]
) -> Iterator[Any]:
    """What an operation of a block needs, and itself; without what was given before.

    Args:
        root: the operation.
        index: of each operation of the block but its last, where it is.
        done: those that were given before, to which these are added.
    """
    waiting = [(root, False)]
    while waiting:
        op, has_operands = waiting.pop()
        at = index.get(op)
        if at in done:
            continue
        if has_operands:
            if at is not None:
                done.add(at)
                yield op
            continue
        waiting.append((op, True))
        makers = [maker_of(value) for value in _used_by(op)]
        waiting += [(one, False) for one in reversed(makers) if one in index]


def _used_by(op: Any) -> Iterator[Any]:
    """What an operation uses, those in its regions too."""
    yield from op.operands
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _used_by(inner.operation)
