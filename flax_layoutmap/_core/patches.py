"""Replace methods of classes while a block runs, in all threads."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class _Patch(NamedTuple):
    plain: Any  # the original
    blocks: set[object]  # those in force


# Re-entrant: the garbage collector may end an abandoned block at any point of the code
# below, in the thread that holds the lock. The record is right at each of these points.
_LOCK = threading.RLock()
_PATCHED: dict[tuple[type, str], _Patch] = {}


@contextlib.contextmanager
def patched(owner: type, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a method (or slot) of a class by `wrap` of it, in all threads.

    Blocks nest, and the last to end restores the original, so `wrap` must not depend
    on the block.
    """
    key, block = (owner, name), object()
    try:
        with _LOCK:
            patch = _PATCHED.get(key) or _Patch(vars(owner)[name], set())
            patch.blocks.add(block)
            _PATCHED[key] = patch
            setattr(owner, name, wrap(patch.plain))
        yield
    finally:
        with _LOCK:
            patch = _PATCHED.get(key)
            if patch is not None:
                patch.blocks.discard(block)
                if not patch.blocks:
                    setattr(owner, name, patch.plain)
                    _PATCHED.pop(key, None)
