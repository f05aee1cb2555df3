"""flm.checkpoint.restore_safetensors."""

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap._core.processes import Agreement
from flax_layoutmap._place.place import put
from flax_layoutmap._rules.records import Shape
from flax_layoutmap.checkpoint._join import Read
from flax_layoutmap.checkpoint._leaves import TYPES, problem_list
from flax_layoutmap.checkpoint._mapping import NameMapping, Recipe
from flax_layoutmap.checkpoint._mapping_blocks import Range, pieces_of
from flax_layoutmap.checkpoint._options import Missing, Unexpected, checked_options
from flax_layoutmap.checkpoint._progress import is_shown, shown_progress
from flax_layoutmap.checkpoint._restore import check_devices
from flax_layoutmap.checkpoint._safetensors_header import (
    Stored,
    local,
    open_safetensors,
)
from flax_layoutmap.checkpoint._safetensors_plan import TensorPlan, plan_tensors
from flax_layoutmap.checkpoint._safetensors_read import Files, Piece, bytes_to_read

Index = tuple[Range, ...]


def restore_safetensors(
    path: str | os.PathLike[str],
    target: Any = None,
    *,
    layout_map: Any = None,
    mesh: Any = None,
    mapping: Sequence[Any] | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    dtype: Any = None,
    missing: Missing = "error",
    unexpected: Unexpected = "error",
    progress: bool | Callable[[int, int], object] | None = None,
) -> Any:
    r"""Restore safetensors (such as Hugging Face's) directly into shards.

    Headers, names, shapes, dtypes and rules are checked before a number is read; one
    error lists every problem. Then each process reads the bytes of its own shards and
    no others (but for gaps under 32 KiB between them), leaf by leaf, without talking to
    the other processes.

    Args:
        path: a `.safetensors` file, a `model.safetensors.index.json`, or a directory
            with either, or with several files; on a disk.
        target: what to restore into, as for `restore`: modules, States, Linen variables
            or any tree, concrete or abstract, or a function that makes one. None: a
            nested dict of all tensors, cut at the dots of their names.
        layout_map: the rules, on a mesh of devices. None: the shardings that the leaves
            of the target have.
        mesh: a mesh of devices for the rules of `layout_map`.
        mapping: what a leaf is made of: entries `(path, name)` or `(path, name,
            steps)`. The path is a regular expression for the whole path of a leaf, as
            rules see it; the first entry that matches counts. The name is that of the
            tensor, with `\1` or `\g<name>` for groups of the path; or a tuple of names,
            to take the first that is there. The steps, one or a tuple, lead from the
            tensor to the leaf: see `flm.checkpoint.mappings`, which has ready mappings
            as well.
            `(None, name)`, with a regular expression, names tensors that no leaf needs.
            None: a leaf `a/b/c` is the tensor `a.b.c`.
        include: a regular expression, or several, searched in the full paths of leaves;
            only leaves that one of them finds are restored.
        exclude: likewise; leaves that one of them finds keep their values.
        dtype: a floating-point dtype for all floating-point arrays, or `"target"` for
            the target's, or pairs of a regular expression and one of these. No other
            numbers are ever converted.
        missing: what to do about leaves whose tensors are not there, or that no entry
            of the mapping matches: `"error"`, `"keep"` the target's values, or
            `"init"`: make them, with the function that the target is.
        unexpected: what to do about tensors that no leaf of the target is made of:
            `"error"` or `"ignore"`.
        progress: whether process 0 shows on stderr how much has been read; None: if
            that is a terminal. Or a function that is called after each leaf with the
            bytes that this process has read, and those that it will have read.

    Returns:
        The target's own type, as `restore` does; or a nested dict.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or it does not fit
            the target or the rules. A concrete target is then as it was.
        MeshError: the rules have no mesh of devices.

    Example:
        >>> import tempfile, jax.numpy as jnp, flax_layoutmap as flm
        >>> path = tempfile.mkdtemp()
        >>> flm.checkpoint.save_safetensors(path, {"up": {"weight": jnp.ones((4, 8))}})
        >>> layout_map = flm.LayoutMap("data=-1")
        >>> layout_map["kernel"] = ("data", None)
        >>> target = {"up": {"kernel": jnp.zeros((8, 4))}}
        >>> mapping = [(r"(.*)/kernel", r"\1.weight", flm.checkpoint.mappings.linear())]
        >>> restored = flm.checkpoint.restore_safetensors(
        ...     path, target, layout_map=layout_map, mapping=mapping
        ... )
        >>> kernel = restored["up"]["kernel"]
        >>> kernel.shape, tuple(kernel.sharding.spec)
        ((8, 4), ('data',))

    Plain JAX: `jax.make_array_from_callback(shape, sharding, lambda index: …)` for each
    leaf, with `safetensors.safe_open(file, "np").get_slice(name)[index]`.
    """
    names = _checked_mapping(mapping, target)
    options = checked_options(
        local(path),
        target,
        layout_map=layout_map,
        mesh=mesh,
        include=include,
        exclude=exclude,
        dtype=dtype,
        missing=missing,
        unexpected=unexpected,
    )
    if mesh is not None and options.rules is None:
        raise CheckpointError(
            "mesh= is the mesh for the rules of layout_map=; pass these as well"
        )
    check_devices("restore_safetensors", options.rules, None)
    with Agreement(f"restoring {options.path}", options.job_mesh) as agreement:
        planned = plan_tensors(open_safetensors(options.path), names, options)
        if planned.plan.problems:
            raise problem_list(f"cannot restore {options.path}", planned.plan.problems)
        if planned.plan.resolution is not None:
            planned.plan.resolution.announce()
        agreement.add(lambda: _parts(planned))
    return planned.plan.tree(_read(planned, progress))


def _checked_mapping(mapping: Sequence[Any] | None, target: Any) -> NameMapping:
    if mapping is not None and target is None:
        raise CheckpointError(
            "a mapping says what the leaves of a target are made of, so it needs one; "
            "without a target the tensors come back under their own names"
        )
    return NameMapping(mapping)


def _parts(planned: TensorPlan) -> dict[str, str]:
    """What must be equal in all processes."""
    held = [
        (tensor.name, str(tensor.dtype), tensor.shape, tensor.offset)
        for tensor in planned.stored.tensors.values()
    ]
    wanted = [
        (path, str(read.result), str(read.sharding))
        for path, read in planned.plan.reads.items()
    ]
    return {"files": _digest(held), "leaves": _digest(wanted)}


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


# -------------------------------------------------------------------- reading


def _read(
    planned: TensorPlan, progress: bool | Callable[[int, int], object] | None
) -> dict[str, Any]:
    """Path → restored value of every leaf of the plan."""
    stored, reads = planned.stored, planned.plan.reads
    made = {path: _empty(read) for path, read in reads.items() if _is_empty(read)}
    groups = _together(planned)
    tell = progress if callable(progress) else None
    shown = False if callable(progress) else progress
    total = 0
    if tell is not None or is_shown(shown):
        # The arrays are never touched, so they take no memory.
        total = sum(_bytes_of(stored, _buffers(planned, group)) for group in groups)
    with Files() as files:
        what = f"restoring {stored.where}"
        with shown_progress(what, total, shown, lambda: files.bytes_read):
            before: dict[str, Any] = {}
            for group in groups:
                new = _read_group(files, planned, group)
                # Transfers overlap with the reads of the next group.
                jax.block_until_ready([*before.values()])
                made |= new
                before = new
                if tell is not None:
                    tell(files.bytes_read, total)
    return {path: made[path] for path in reads}


def _together(planned: TensorPlan) -> list[list[str]]:
    """Paths of leaves in groups: those cut from the same tensors are read together."""
    group_of: dict[str, int] = {}
    groups: dict[int, list[str]] = {}
    for number, (path, read) in enumerate(planned.plan.reads.items()):
        if _is_empty(read):
            continue
        names = planned.recipes[path].shapes
        known = {group_of[name] for name in names if name in group_of}
        first, *others = sorted(known) or [number]
        members = groups.setdefault(first, [])
        for other in others:
            members += groups.pop(other)
        members.append(path)
        group_of |= {name: first for p in members for name in planned.recipes[p].shapes}
    return list(groups.values())


@dataclasses.dataclass(frozen=True)
class _Buffers:
    """What this process reads of some leaves, and into which arrays.

    Attributes:
        arrays: path → box of the leaf that a device here needs → array for it.
        pieces: name of a tensor → the parts of it that go into these arrays.
    """

    arrays: Mapping[str, Mapping[Index, np.ndarray]]
    pieces: Mapping[str, Sequence[Piece]]


def _buffers(planned: TensorPlan, paths: Sequence[str]) -> _Buffers:
    pieces: dict[str, list[Piece]] = {}
    arrays: dict[str, dict[Index, np.ndarray]] = {}
    for path in paths:
        read, recipe = planned.plan.reads[path], planned.recipes[path]
        arrays[path] = {}
        for box in _boxes(read.sharding, read.result.shape):
            out = _buffer(read, recipe, tuple(stop - start for start, stop in box))
            arrays[path][box] = out
            for name, piece in pieces_of(recipe.blocks, box, out):
                pieces.setdefault(name, []).append(piece)
    return _Buffers(arrays, pieces)


def _bytes_of(stored: Stored, buffers: _Buffers) -> int:
    """How many bytes this process will read to fill some arrays."""
    parts = buffers.pieces.items()
    return sum(bytes_to_read(stored.tensors[name], own) for name, own in parts)


def _read_group(
    files: Files, planned: TensorPlan, paths: Sequence[str]
) -> dict[str, Any]:
    """Path → value, of leaves that are read together."""
    buffers = _buffers(planned, paths)
    for name, parts in buffers.pieces.items():
        try:
            files.read(planned.stored.tensors[name], parts)
        except CheckpointError as error:
            users = [path for path in paths if name in planned.recipes[path].shapes]
            raise CheckpointError(f"{', '.join(users)}: {error}") from error
    return {
        path: _made(planned.plan.reads[path], arrays)
        for path, arrays in buffers.arrays.items()
    }


def _buffer(read: Read, recipe: Recipe, shape: Shape) -> np.ndarray:
    """An array to read into, whose memory has the order of the file.

    What transposes is then JAX, on the way to the device, which is quicker than NumPy.
    """
    if read.sharding is None:
        dtype = read.stored.dtype if read.result.is_python else read.result.dtype
        return np.empty(shape, dtype)
    order = recipe.order
    made = np.empty([shape[dim] for dim in order], read.result.dtype)
    return made.transpose(np.argsort(order))


def _is_empty(read: Read) -> bool:
    return 0 in read.result.shape


def _empty(read: Read) -> Any:
    """A leaf without elements, for which nothing is read."""
    value = np.zeros(read.result.shape, read.result.dtype)
    return value if read.sharding is None else put(value, read.sharding)


@functools.lru_cache(maxsize=1024)
def _boxes(sharding: Any, shape: Shape) -> dict[Index, list[Any]]:
    """The boxes of an array that this process needs, each with its devices.

    Many leaves have the same ones.
    """
    if sharding is None:
        return {tuple((0, size) for size in shape): []}
    found: dict[Index, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        box = tuple(
            part.indices(size)[:2] for part, size in zip(index, shape, strict=True)
        )
        found.setdefault(box, []).append(device)
    return found


def _made(read: Read, buffers: Mapping[Index, np.ndarray]) -> Any:
    """The leaf, of its parts on the host; copies of a part come from one buffer."""
    result, sharding = read.result, read.sharding
    if sharding is None:
        [value] = buffers.values()
        return TYPES[result.kind](value.item()) if result.is_python else value
    arrays = [
        jax.device_put(
            buffers[index],
            SingleDeviceSharding(device, memory_kind=sharding.memory_kind),
        )
        for index, devices in _boxes(sharding, result.shape).items()
        for device in devices
    ]
    # A process without a device of this mesh has no arrays, so pass the dtype.
    return jax.make_array_from_single_device_arrays(
        result.shape, sharding, arrays, dtype=result.dtype
    )
