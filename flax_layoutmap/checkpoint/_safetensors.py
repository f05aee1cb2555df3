"""flm.checkpoint.restore_safetensors."""

import hashlib
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from flax_layoutmap._errors import CheckpointError, MeshError
from flax_layoutmap._flatten import flatten
from flax_layoutmap._place import put, settle_metadata
from flax_layoutmap._processes import Agreement
from flax_layoutmap._rules import RuleSet
from flax_layoutmap.checkpoint._leaves import (
    TYPES,
    fits_jax,
    is_floating,
    mesh_of,
    problem_list,
)
from flax_layoutmap.checkpoint._mapping import NameMapping
from flax_layoutmap.checkpoint._mapping_blocks import Range, dummy, pieces_of
from flax_layoutmap.checkpoint._record import rules_of
from flax_layoutmap.checkpoint._safetensors_file import Opened, local, open_safetensors
from flax_layoutmap.checkpoint._safetensors_plan import (
    Plan,
    Read,
    plan_for_target,
    plan_without_target,
)
from flax_layoutmap.checkpoint._safetensors_read import Files, Piece, bytes_to_read
from flax_layoutmap.checkpoint._selection import Selection
from flax_layoutmap.checkpoint._target import opened

Index = tuple[Range, ...]


def restore_safetensors(
    path: str | os.PathLike[str],
    target: Any = None,
    *,
    layout_map: Any = None,
    mapping: Sequence[Any] | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    dtype: Any = None,
    unexpected: Literal["error", "ignore"] = "error",
    progress: Callable[[int, int], object] | None = None,
) -> Any:
    r"""Restores safetensors (of Hugging Face, say), each leaf straight into its shards.

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
            the target's. No other numbers are ever converted.
        unexpected: what to do about tensors that no leaf of the target is made of.
        progress: called after each leaf with the bytes that this process has read and
            those that it will have read at the end.

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
    place = local(path)
    rules = rules_of(layout_map)
    names = _checked_mapping(mapping, target)
    selection = Selection(include, exclude)
    dtype = _checked_options(dtype, unexpected, target)
    _check_mesh(rules)
    with Agreement(f"restoring {place}", mesh_of(target, rules)) as agreement:
        stored = open_safetensors(place)
        tree, rebuild = opened(target)
        flat = flatten(tree)
        if target is None:
            plan = plan_without_target(stored, rules, selection, dtype)
        else:
            plan = plan_for_target(stored, flat, tree, rules, names, selection, dtype)
            if unexpected == "error":
                plan.problems += plan.unexpected
        if plan.problems:
            raise problem_list(f"cannot restore {place}", plan.problems)
        if plan.resolution is not None:
            plan.resolution.announce()
        agreement.add(lambda: _parts(stored, plan))
    values = _read(stored, plan, progress)
    if target is None:
        return plan.nested(values)
    leaves = dict(zip(flat.full_paths(), flat.leaves, strict=True))
    result = rebuild([*(leaves | values).values()])
    if plan.resolution is not None:
        result = settle_metadata(result, plan.resolution)
    return result


# --------------------------------------------------------------------- checks


def _checked_mapping(mapping: Sequence[Any] | None, target: Any) -> NameMapping:
    if mapping is not None and target is None:
        raise CheckpointError(
            "a mapping says what the leaves of a target are made of, so it needs one; "
            "without a target the tensors come back under their own names"
        )
    return NameMapping(mapping)


def _checked_options(dtype: Any, unexpected: str, target: Any) -> Any:
    if unexpected not in ("error", "ignore"):
        raise CheckpointError(f'unexpected={unexpected!r} is not "error" or "ignore"')
    if dtype is None:
        return None
    if isinstance(dtype, str) and dtype == "target":
        if target is None:
            raise CheckpointError(
                'dtype="target" needs a target; without one name the dtype itself'
            )
        return dtype
    try:
        wanted = np.dtype(dtype)
    except TypeError as error:
        raise CheckpointError(f"dtype={dtype!r} is no dtype: {error}") from error
    if not is_floating(wanted) or not fits_jax(wanted):
        raise CheckpointError(
            f"dtype={wanted} is not floating-point, or needs jax_enable_x64; only "
            "floating-point arrays are converted, and only to floating-point"
        )
    return wanted


def _check_mesh(rules: RuleSet | None) -> None:
    if rules is None or (rules.mesh is not None and not rules.mesh.is_abstract):
        return
    have = "no mesh" if rules.mesh is None else repr(rules.mesh)
    raise MeshError(
        f"restore_safetensors needs a mesh of devices, the rules have {have}; use "
        "layout_map.on(flm.DeviceMesh(...))"
    )


def _parts(stored: Opened, plan: Plan) -> dict[str, str]:
    """What all processes must mean alike."""
    held = [
        (tensor.name, str(tensor.dtype), tensor.shape, tensor.offset)
        for tensor in stored.tensors.values()
    ]
    wanted = [
        (read.result.path, str(read.result), str(read.sharding))
        for read in plan.reads.values()
    ]
    return {"files": _digest(held), "leaves": _digest(wanted)}


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


# -------------------------------------------------------------------- reading


def _read(
    stored: Opened, plan: Plan, progress: Callable[[int, int], object] | None
) -> dict[str, Any]:
    """Path → restored value of every leaf of the plan."""
    groups = _together(list(plan.reads.values()))
    planned = 0
    if progress is not None:
        planned = sum(planned_bytes(stored, group) for group in groups)
    made: dict[str, Any] = {}
    with Files() as files:
        for group in groups:
            made |= _read_group(files, stored, group)
            if progress is not None:
                progress(files.bytes_read, planned)
    return {path: made[path] for path in plan.reads}


def _together(reads: list[Read]) -> list[list[Read]]:
    """Leaves that are cut from the same tensors are read together."""
    group_of: dict[str, int] = {}
    groups: dict[int, list[Read]] = {}
    for number, read in enumerate(reads):
        known = {group_of[name] for name in read.recipe.shapes if name in group_of}
        first, *others = sorted(known) or [number]
        members = groups.setdefault(first, [])
        for other in others:
            members += groups.pop(other)
        members.append(read)
        for name in (name for member in members for name in member.recipe.shapes):
            group_of[name] = first
    return list(groups.values())


def planned_bytes(stored: Opened, group: Sequence[Read]) -> int:
    """How many bytes this process will read for leaves that are read together."""
    pieces: dict[str, list[Piece]] = {}
    for read in group:
        for index in _indices(read):
            shape = tuple(stop - start for start, stop in index)
            out = dummy(shape, read.result.dtype)
            _collect(pieces, read, index, out)
    return sum(bytes_to_read(stored.tensors[name], own) for name, own in pieces.items())


def _read_group(files: Files, stored: Opened, group: list[Read]) -> dict[str, Any]:
    pieces: dict[str, list[Piece]] = {}
    buffers: list[dict[Index, np.ndarray]] = []
    for read in group:
        own = {}
        for index in _indices(read):
            out = np.empty([stop - start for start, stop in index], _dtype(read))
            _collect(pieces, read, index, out)
            own[index] = out
        buffers.append(own)
    for name, parts in pieces.items():
        files.read(stored.tensors[name], parts)
    return {
        read.result.path: _made(read, own)
        for read, own in zip(group, buffers, strict=True)
    }


def _collect(
    pieces: dict[str, list[Piece]], read: Read, index: Index, out: np.ndarray
) -> None:
    for name, piece in pieces_of(read.recipe.blocks, index, out):
        pieces.setdefault(name, []).append(piece)


def _dtype(read: Read) -> Any:
    return read.stored.dtype if read.result.is_python else read.result.dtype


def _indices(read: Read) -> dict[Index, list[Any]]:
    """The boxes of a leaf that this process needs, each with its devices."""
    shape = read.result.shape
    if read.sharding is None:
        return {tuple((0, size) for size in shape): []}
    found: dict[Index, list[Any]] = {}
    for device, index in read.sharding.addressable_devices_indices_map(shape).items():
        box = tuple(
            part.indices(size)[:2] for part, size in zip(index, shape, strict=True)
        )
        found.setdefault(box, []).append(device)
    return found


def _made(read: Read, buffers: dict[Index, np.ndarray]) -> Any:
    """The leaf, of its parts on the host; copies of a part come from one buffer."""
    result, sharding = read.result, read.sharding
    if sharding is None:
        [value] = buffers.values()
        return TYPES[result.kind](value.item()) if result.is_python else value
    if math.prod(result.shape) == 0:
        return put(np.zeros(result.shape, result.dtype), sharding)
    arrays = [
        jax.device_put(
            buffers[index],
            SingleDeviceSharding(device, memory_kind=sharding.memory_kind),
        )
        for index, devices in _indices(read).items()
        for device in devices
    ]
    return jax.make_array_from_single_device_arrays(result.shape, sharding, arrays)
