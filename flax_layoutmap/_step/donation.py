"""Donated arrays: none is deleted, used twice, or shares its memory with another one.

Two arrays share memory if they were put on a mesh from one array. To donate one of them
and use the other ends the process (jax 0.10.2), or fails while it runs (jax 0.12.0).
"""

import collections
import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.core import Tracer

from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._core.jax_internals import memory_of
from flax_layoutmap._place.place import put
from flax_layoutmap._step.arguments import Call
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.paths import Roots


def are_deleted(leaves: Sequence[Any]) -> bool:
    """Whether one of these is a deleted array."""
    try:
        # The method of the type is much faster than an attribute of each array.
        return any(map(type(leaves[0]).is_deleted, leaves))
    except (AttributeError, IndexError, TypeError):  # none, or other things too
        return any(x.is_deleted() for x in leaves if is_array(x))


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array of JAX, with values."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)


def deleted_paths(arguments: Mapping[str, Any]) -> list[str]:
    """Paths of the arrays that are deleted, in arguments by name."""
    flat = flatten(Roots(arguments))
    pairs = zip(flat.full_paths(), flat.leaves, strict=True)
    return [path for path, leaf in pairs if are_deleted([leaf])]


def separate(program: Any, call: Call, leaves: list[Any]) -> None:
    """Copy the leaves of state that share memory with other arrays of a call.

    Raises:
        LayoutError: an array is donated and used twice.
    """
    shared = sharing(program, leaves)
    count = collections.Counter(map(id, leaves if shared else ()))
    for at in set(shared) & {*program.donated}:
        if count[id(leaves[at])] > 1:
            pairs = zip(leaves, call.table, strict=True)
            paths = [a.path(n) for x, (a, n) in pairs if x is leaves[at]]
            raise LayoutError(
                f"{' and '.join(paths[:4])} are one array, which is donated: it cannot "
                "be used twice; copy it first, jax.numpy.copy(x), or do not donate it"
            )
    for at in shared:
        leaves[at] = put(jax.numpy.copy(leaves[at]), leaves[at].sharding)


def sharing(program: Any, leaves: Sequence[Any], *, is_sure: bool = False) -> list[int]:
    """Positions of the leaves of state that share memory with other arrays.

    Also those of an array that is donated and used twice.
    Of state that is known to share none (`is_sure`: all of it), only what looks like
    data is compared.
    """
    compared: Iterable[int] = program.alike
    if not is_sure:
        is_double = len(set(map(id, leaves))) < len(leaves)
        if is_double or not are_apart([leaves[at] for at in program.state]):
            compared = range(len(leaves))
    if not compared:
        return []
    parts = {at: _buffers_of(leaves[at]) for at in compared}
    count = collections.Counter(id(leaves[at]) for at in parts)
    arrays = {id(leaves[at]): part for at, part in parts.items()}
    uses = collections.Counter(itertools.chain.from_iterable(arrays.values()))
    # All state is recorded as apart later, also what is not donated here.
    shared = {at for at in program.donated if count[id(leaves[at])] > 1}
    return sorted(
        shared.union(
            at for at in program.state if any(uses[x] > 1 for x in parts.get(at, ()))
        )
    )


def _buffers_of(leaf: Any) -> set[Any]:
    """The memory of an array in this process, to compare."""
    if not is_array(leaf) or not leaf.size:
        return {id(leaf)}
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    count = len(leaf.sharding.addressable_devices)
    parts = [leaf.addressable_data(at) for at in range(count)]
    return set(map(memory_of, parts)) - {None} or {id(leaf)}


# For the last few calls, references to arrays that share memory with no others, as a
# program has written them, or they were compared before.
_APART: dict[int, Sequence[Any]] = {}
_NUMBERS = itertools.count(1)


def are_apart(arrays: Iterable[Any]) -> bool:
    """Whether all of these are known to share memory with no others."""
    try:
        # An array has one reference while that lives.
        left = set(map(id, map(weakref.ref, arrays)))
    except TypeError:  # not arrays
        return False
    for known in reversed(list(_APART.values())):
        left.difference_update(map(id, known))
        if not left:
            break
    return not left


def note_apart(
    program: Any, state: Sequence[Any], new: Any, result: Any, key: int = 0
) -> None:
    """Record the arrays that share memory with no others after a call.

    `state` are references to its state then; records with one `key` replace each other.
    """
    apart = state if program.donated else [*map(weakref.ref, jax.tree.leaves(new))]
    if program.gives_trees:
        key, apart = 0, [*apart, *map(weakref.ref, jax.tree.leaves(result))]
    key = key or next(_NUMBERS)
    _APART.pop(key, None)
    _APART[key] = apart
    for oldest in list(_APART)[:-8]:
        _APART.pop(oldest, None)
