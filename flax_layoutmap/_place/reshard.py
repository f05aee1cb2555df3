"""Move a tree of arrays to other layouts, in chunks.

XLA moves some arrays through a full copy on every device (on jax 0.10.2, one in eight
of the pairs of layouts on eight devices). So the leaves move in groups of `max_bytes`,
and a larger leaf in slices.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from flax_layoutmap._core.checksums import checksums
from flax_layoutmap._core.errors import LayoutError, bullet_list
from flax_layoutmap._core.jax_internals import memory_of
from flax_layoutmap._core.processes import Agreement
from flax_layoutmap._place.annotations import settle_metadata
from flax_layoutmap._place.place import (
    check_movable,
    is_placed,
    need_devices,
    put,
    with_leaves,
)
from flax_layoutmap._place.slices import cut_of, in_slices, memory_kind
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.resolve import resolve, rule_set_of
from flax_layoutmap._rules.records import show_shape
from flax_layoutmap._show.progress import shown_progress
from flax_layoutmap._tree.flatten import flatten


def reshard(
    tree: Any,
    to: Any,
    *,
    max_bytes: int = 1 << 30,
    donate: bool = False,
    verify: bool = True,
    progress: bool | None = None,
) -> Any:
    """Move a whole tree to other layouts or another mesh, in chunks.

    For a model that is trained in one layout and serves in another. A device holds at
    most its shards before and after, and the temporaries of one chunk. What moves is
    in `flm.resolve(tree, before).diff(flm.resolve(tree, after))`.

    With several processes, all call it, and both meshes have the same devices.

    Args:
        tree: a module (updated in place and returned), or any tree of arrays.
        to: a `LayoutMap` or `RuleSet` with a mesh of devices, or the Resolution of
            this tree on one.
        max_bytes: the size of a chunk: of the leaves that move at the same time, and
            of the slices of a larger leaf, along its longest dim. NumPy arrays, and
            arrays in other memory than the devices' default, move whole.
        donate: delete the arrays of `tree` chunk by chunk, except where a device keeps
            its part. An interrupt leaves the moved leaves of a module in the new
            layout; of any other tree they are lost.
        verify: compare a checksum of each JAX array before and after, as those of
            checkpoints. It reads the array twice.
        progress: show a bar; None: once it has taken 2 seconds, on a
            terminal.

    Returns:
        The tree with its leaves in the new layouts; those that have it already are
        the same arrays. What stays on its device may share memory with `tree`, as in
        `jax.device_put`: a step that donates the one deletes it from the other, too.

    Raises:
        ResolveError: leaves do not fit the rules; nothing was moved.
        MeshError: no mesh, or one without devices; or devices of other processes.
        LayoutError: the Resolution is of another tree; a leaf is abstract, traced or
            deleted, or is donated and at two paths; or a moved leaf is not equal to
            the original.

    Example:
        >>> import jax, flax_layoutmap as flm
        >>> train, serve = (flm.LayoutMap(mesh) for mesh in ("fsdp=8", "tensor=8"))
        >>> train["kernel"], serve["kernel"] = ("fsdp", None), (None, "tensor")
        >>> params = train.place({"kernel": jax.numpy.ones((16, 16))})
        >>> params = flm.reshard(params, serve, donate=True)
        >>> tuple(params["kernel"].sharding.spec)
        (None, 'tensor')

    Plain JAX: `jax.device_put(tree, shardings)`.
    """
    if not isinstance(max_bytes, int | np.integer) or max_bytes < 1:
        raise LayoutError(f"max_bytes={max_bytes!r}: a chunk is a number of bytes")
    resolution = _resolved(tree, to)
    leaves = flatten(tree).leaves
    moves = _moves(leaves, resolution)
    _check(moves, leaves, resolution, donate)
    with Agreement("moving a tree", resolution.mesh) as agreement:
        agreement.add(resolution.fingerprint_lines)
        agreement.add(lambda: {"moved leaves": [move.path for move in moves]})
        agreement.add(lambda: {"options": f"max_bytes={max_bytes}, verify={verify}"})
    total, done = sum(move.bytes for move in moves), Counter[str]()
    new = list(leaves)
    try:
        with shown_progress("moving", total, progress, done.total):
            for chunk in _chunks(moves, max_bytes):
                moved = _moved(chunk, max_bytes, verify, done)
                for move, value in moved:
                    for at in move.places:
                        new[at] = value
                for move in chunk if donate else ():
                    _delete(move, max_bytes)
    except BaseException:  # an interrupt too leaves a module whole
        if donate:
            with_leaves(tree, new)
        raise
    return settle_metadata(with_leaves(tree, new), resolution)


@dataclasses.dataclass(frozen=True)
class _Move:
    """An array that moves: its path, its places among the leaves, and where to."""

    path: str
    places: tuple[int, ...]
    value: Any
    sharding: NamedSharding

    @property
    def bytes(self) -> int:
        return getattr(self.value, "nbytes", 0)


def _resolved(tree: Any, to: Any) -> Resolution:
    """The Resolution of the tree, after its warnings; its mesh has devices."""
    if isinstance(to, Resolution):
        own = flatten(tree)
        shapes = [tuple(getattr(leaf, "shape", ())) for leaf in own.leaves]
        if (own.full_paths(), shapes) != (list(to.paths), list(to.shapes)):
            raise LayoutError(
                "reshard(tree, to): this Resolution is of another tree; resolve this "
                "one, flm.resolve(tree, layout_map), or pass the layout_map"
            )
        resolution = to
    else:
        resolution = resolve(tree, rule_set_of(to, "reshard(tree, to)"))
    need_devices(resolution, "reshard")
    resolution.announce()
    return resolution


def _moves(leaves: Sequence[Any], resolution: Resolution) -> list[_Move]:
    """One move for each array and sharding, in the order of the leaves."""
    found: dict[tuple[int, NamedSharding], _Move] = {}
    shardings = resolution.sharding_list()
    for at, (path, leaf, sharding) in enumerate(
        zip(resolution.paths, leaves, shardings, strict=True)
    ):
        move = found.get((id(leaf), sharding)) or _Move(path, (), leaf, sharding)
        move = dataclasses.replace(move, places=(*move.places, at))
        found[id(leaf), sharding] = move
    return [
        move
        for move in found.values()
        if isinstance(move.value, Tracer)
        or not is_placed(move.value, move.sharding)
        or move.value.is_deleted()
    ]


def _check(
    moves: Sequence[_Move], leaves: Sequence[Any], resolution: Resolution, donate: bool
) -> None:
    """Raise LayoutError for what cannot be moved, before anything is."""
    check_movable("reshard", leaves, resolution)
    problems = []
    paths_of: dict[int, list[str]] = {}
    for path, leaf in zip(resolution.paths, leaves, strict=True):
        paths_of.setdefault(id(leaf), []).append(path)
    sharing = _sharing_memory(resolution.paths, leaves) if donate else {}
    for move in moves:
        named = f"{move.path} {show_shape(getattr(move.value, 'shape', ()))}"
        paths = paths_of[id(move.value)]
        if isinstance(move.value, Tracer):
            problems.append(f"{named} is traced: call reshard outside of jit")
        elif isinstance(move.value, jax.Array) and move.value.is_deleted():
            problems.append(f"{named} was donated or deleted before")
        elif isinstance(move.value, jax.Array) and _is_cut_short(move.value.dtype):
            problems.append(
                f"{named} is {move.value.dtype}, which JAX moves with 64-bit types "
                "alone: call reshard in a block of jax.enable_x64(True)"
            )
        elif donate and len(paths) > len(move.places):
            problems.append(
                f"{named} is also at {', '.join(paths[1:])}, in another layout: use "
                "donate=False"
            )
        elif move.path in sharing:
            problems.append(
                f"{named} shares memory with {sharing[move.path]}: use donate=False"
            )
        elif _is_out_of_reach(move):
            problems.append(
                f"{named} is on devices of other processes, too, and not all of them "
                "are in the new mesh: save a checkpoint and restore it there"
            )
    if problems:
        raise LayoutError(f"reshard moved nothing:\n{bullet_list(problems)}")


def _sharing_memory(paths: Sequence[str], leaves: Sequence[Any]) -> dict[str, str]:
    """Path of an array → that of another one, with which it shares memory."""
    holders: dict[Any, tuple[str, int]] = {}
    found: dict[str, str] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
            continue
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        if is_key or not leaf.size or leaf.is_deleted():
            continue
        for shard in leaf.addressable_shards:
            place = memory_of(shard.data)
            if place is None:
                continue
            other, same = holders.setdefault(place, (path, id(leaf)))
            if same != id(leaf):
                found |= {path: other, other: path}
    return found


def _is_out_of_reach(move: _Move) -> bool:
    """Whether an array of several processes would move to other devices."""
    x = move.value
    is_spread = isinstance(x, jax.Array) and not x.is_fully_addressable
    return is_spread and x.sharding.device_set != move.sharding.device_set


def _is_cut_short(dtype: Any) -> bool:
    """Whether JAX takes arrays of a dtype for those of a narrower one, as now set."""
    known = jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
    return known != dtype


def _chunks(moves: Sequence[_Move], max_bytes: int) -> Iterator[list[_Move]]:
    """Consecutive moves of at most `max_bytes` together, or a larger one alone."""
    chunk: list[_Move] = []
    held = 0
    for move in moves:
        if chunk and held + move.bytes > max_bytes:
            yield chunk
            chunk, held = [], 0
        chunk.append(move)
        held += move.bytes
    if chunk:
        yield chunk


def _moved(
    chunk: Sequence[_Move],
    max_bytes: int,
    verify: bool,
    done: Counter[str],
) -> list[tuple[_Move, Any]]:
    """Move the leaves of a chunk, wait for them, and compare their checksums.

    `done` counts the bytes of each path.
    """
    arrays = [move for move in chunk if isinstance(move.value, jax.Array)]
    before = checksums({m.path: m.value for m in arrays}) if verify else {}
    moved = [(move, _put(move, max_bytes, done)) for move in chunk]
    jax.block_until_ready([value for _, value in moved])
    done.update({move.path: move.bytes - done[move.path] for move in chunk})
    after = checksums({m.path: value for m, value in moved if m.path in before})
    wrong = [path for path in before if before[path] != after[path]]
    if wrong:
        raise LayoutError(
            "reshard moved leaves that are not equal to the originals: "
            f"{', '.join(wrong)}; go back to a checkpoint, and report both layouts"
        )
    return moved


def _delete(move: _Move, max_bytes: int) -> None:
    """Delete the array of a donated leaf, except where a device keeps its part."""
    if isinstance(move.value, jax.Array):
        is_cut = cut_of(move.value, move.sharding, max_bytes) is not None
        if is_cut or not _keeps_a_part(move):
            move.value.delete()


def _put(move: _Move, max_bytes: int, done: Counter[str]) -> Any:
    """Move a leaf, in slices if it is large."""
    cut = cut_of(move.value, move.sharding, max_bytes)
    if cut is None:
        return put(move.value, move.sharding)

    def report(size: int) -> None:
        done[move.path] += size

    return in_slices(move.value, move.sharding, cut, report)


def _keeps_a_part(move: _Move) -> bool:
    """Whether a device keeps its part of an array in a move: JAX may not copy it.

    (Nor does it with `device_put(may_alias=False)`; its `donate=True` deletes few
    arrays; jax 0.10.2.)
    """
    x, target = move.value, move.sharding
    before = x.sharding.addressable_devices_indices_map(x.shape)
    after = target.addressable_devices_indices_map(x.shape)
    return memory_kind(x.sharding) == memory_kind(target) and any(
        before.get(device) == index for device, index in after.items()
    )
