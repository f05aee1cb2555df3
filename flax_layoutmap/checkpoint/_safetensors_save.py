"""flm.checkpoint.save_safetensors."""

import functools
import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap._core.processes import Agreement
from flax_layoutmap._rules.records import Shape
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap.checkpoint._leaves import mesh_of, problem_list
from flax_layoutmap.checkpoint._mapping import NameMapping
from flax_layoutmap.checkpoint._mapping_blocks import Range, full_index
from flax_layoutmap.checkpoint._options import checked_selection, floating_dtype
from flax_layoutmap.checkpoint._progress import shown_progress
from flax_layoutmap.checkpoint._safetensors_file import NAMES, local
from flax_layoutmap.checkpoint._safetensors_parts import Made, SavePlan, plan_to_save
from flax_layoutmap.checkpoint._safetensors_write import (
    Writer,
    cannot_write,
    distributed,
)

# Threads take turns: a save sweeps up what others have left unfinished in a directory.
_TURN = threading.RLock()


def save_safetensors(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    mapping: Sequence[Any] | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    dtype: Any = None,
    max_file_bytes: float = 5e9,
    overwrite: bool = False,
    metadata: Mapping[str, str] | None = None,
    progress: bool | Callable[[int, int], object] | None = None,
) -> None:
    """Saves a tree as safetensors, with the names and layout of Hugging Face.

    Process 0 writes, one tensor after another, and holds no more of the model than two
    copies of one tensor. Every process of a job calls it with the same arguments.
    Threads of a process take turns.

    Args:
        path: a directory, which is made if need be and may hold other files
            (`config.json`); or one file, `….safetensors`.
        tree: NNX modules, States, Linen variables or any tree of arrays.
        mapping: as for `restore_safetensors`, and the same: each step is undone. Of
            several names the first is written. Leaves of which one tensor is made must
            make all of it. None: a leaf `a/b/c` becomes the tensor `a.b.c`.
        include: a regular expression, or several, searched in the full paths of leaves;
            only leaves that one of them finds are saved.
        exclude: likewise; leaves that one of them finds are not saved.
        dtype: a floating-point dtype for all floating-point arrays; None keeps theirs.
        max_file_bytes: how large a file in a directory gets at most, unless a single
            tensor is larger. If one is not enough, an index tells which file has what.
        overwrite: replace the model in the directory, or the file. It stays until the
            new one is complete beside it.
        metadata: texts for the headers; `{"format": "pt"}`, which `transformers` asks
            for, is added.
        progress: whether process 0 shows on stderr how much has been written; None: if
            that is a terminal. Or a function that process 0 calls after each tensor
            with the bytes that are written, and those that will be.

    Raises:
        CheckpointError: leaves cannot be saved (one error lists all), the path is
            taken, or writing failed; no file is then left behind under its final name.

    Example:
        >>> import tempfile, jax.numpy as jnp, flax_layoutmap as flm
        >>> path = tempfile.mkdtemp()
        >>> flm.checkpoint.save_safetensors(path, {"up": {"kernel": jnp.ones((8, 4))}})
        >>> layout_map = flm.LayoutMap("data=-1", strict=False)
        >>> flm.checkpoint.restore_safetensors(path, layout_map=layout_map).keys()
        dict_keys(['up'])

    Plain JAX: `safetensors.flax.save_file({name: array, …}, file)`, with the whole
    model on one host.
    """
    place = local(path)
    names = NameMapping(mapping)
    selection = checked_selection(include, exclude)
    wanted = _checked_dtype(dtype)
    with _TURN:
        with Agreement(f"saving {place}", mesh_of(tree, None)) as agreement:
            flat = flatten(tree)
            plan = plan_to_save(flat, names, selection.among(flat), wanted)
            if jax.process_index() == 0:
                problem = cannot_write(place, overwrite)
                plan.problems += [] if problem is None else [problem]
            if plan.problems:
                raise problem_list(f"cannot save to {place}", plan.problems)
            agreement.add(lambda: {"leaves": _digest(plan)})
        files = distributed(place, plan.tensors, max_file_bytes)
        writer = None
        if jax.process_index() == 0:
            writer = Writer(place, files, {"format": "pt", **(metadata or {})})
        order = [tensor for held in files.values() for tensor in held]
        _write(place, order, flat.leaves, writer, progress)


def _checked_dtype(dtype: Any) -> Any:
    if dtype is None:
        return None
    wanted = floating_dtype(dtype, f"dtype={dtype!r}")
    if wanted not in NAMES:
        raise CheckpointError(f"dtype={wanted}: safetensors have no such dtype")
    return wanted


def _digest(plan: SavePlan) -> str:
    parts = [
        (t.name, str(t.dtype), t.shape, [(p.path, p.index) for p in t.parts])
        for t in plan.tensors
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


# ------------------------------------------------------------------------- writing


def _write(
    place: str,
    order: Sequence[Made],
    leaves: Sequence[Any],
    writer: Writer | None,
    progress: bool | Callable[[int, int], object] | None,
) -> None:
    """Brings one tensor after another to process 0, which writes it."""
    written, total = 0, sum(tensor.nbytes for tensor in order)
    shown = False if callable(progress) else progress
    error: OSError | None = None
    try:
        with shown_progress(f"saving {place}", total, shown, lambda: written):
            for tensor in order:
                parts = [_fetched(leaves[p.leaf], p.index) for p in tensor.parts]
                if writer is not None:
                    error = _tried(functools.partial(_add, writer, tensor, parts))
                _raise_together(place, error)
                written += tensor.nbytes
                if writer is not None and callable(progress):
                    progress(written, total)
            if writer is not None:
                error = _tried(writer.finish)
            _raise_together(place, error)
    finally:
        if writer is not None:
            writer.clean_up()


def _add(writer: Writer, tensor: Made, parts: Sequence[np.ndarray]) -> None:
    writer.add(_made(tensor, parts))


def _tried(action: Callable[[], None]) -> OSError | None:
    try:
        action()
    except OSError as error:
        return error
    return None


def _raise_together(place: str, error: OSError | None) -> None:
    """Raises on every process what failed on the one that writes."""
    failed = error is not None
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        failed = bool(multihost_utils.broadcast_one_to_all(np.bool_(failed)))
    if failed:
        why = "process 0 failed" if error is None else error.strerror or str(error)
        raise CheckpointError(
            f"cannot save to {place}: {why}; nothing was left behind"
        ) from error


def _made(tensor: Made, parts: Sequence[np.ndarray]) -> np.ndarray:
    """The bytes of a tensor, of what the leaves give to it."""
    made: Any = np.empty(tensor.nbytes, np.uint8)
    size = tensor.dtype.itemsize
    for part, value in zip(tensor.parts, parts, strict=True):
        for block in part.blocks:
            piece = block.piece(part.index, value)
            steps = [stride * size for stride in piece.strides]
            shape, begin = piece.out.shape, piece.offset * size
            view = np.ndarray(shape, tensor.dtype, made, begin, steps)
            np.copyto(view, piece.out, casting="unsafe")
    return made


def _fetched(leaf: Any, index: tuple[Range, ...]) -> np.ndarray:
    """A box of a leaf, on the host; in a job of several processes a collective."""
    box = [slice(*part) for part in index]
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)[*box, ...]
    whole = index == full_index(leaf.shape)
    if leaf.is_fully_addressable and whole:
        # Not np.asarray(leaf), which would keep the copy for as long as the leaf lives.
        made = np.empty(leaf.shape, leaf.dtype)
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0:
                made[shard.index] = np.asarray(shard.data)
        return made
    leaf = _on_auto_axes(leaf)
    starts = tuple(start for start, _ in index)
    sizes = tuple(stop - start for start, stop in index)
    if leaf.is_fully_addressable:
        return np.asarray(_slicer(sizes, None)(leaf, starts))
    everywhere = NamedSharding(leaf.sharding.mesh, PartitionSpec())
    part = _slicer(sizes, everywhere)(leaf, starts)
    if jax.process_index():
        jax.block_until_ready(part)
        return np.empty(0)
    return np.asarray(part)


@functools.lru_cache(maxsize=256)
def _slicer(sizes: Shape, sharding: Any) -> Callable[..., jax.Array]:
    options = {} if sharding is None else {"out_shardings": sharding}
    return jax.jit(lambda x, starts: jax.lax.dynamic_slice(x, starts, sizes), **options)


def _on_auto_axes(leaf: jax.Array) -> jax.Array:
    """The same array on Auto axes; on Explicit ones JAX cuts no sharded dim."""
    sharding = leaf.sharding
    if not isinstance(sharding, NamedSharding):
        return leaf
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return leaf
    names = sharding.mesh.axis_names
    mesh = Mesh(
        np.asarray(sharding.mesh.devices),
        names,
        axis_types=(AxisType.Auto,) * len(names),
    )
    auto = NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    shards = [shard.data for shard in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(leaf.shape, auto, shards)
