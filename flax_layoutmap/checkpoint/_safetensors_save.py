"""flm.checkpoint.save_safetensors."""

import dataclasses
import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from numpy.lib.stride_tricks import as_strided

from flax_layoutmap._errors import CheckpointError
from flax_layoutmap._flatten import flatten
from flax_layoutmap._paths import Flat
from flax_layoutmap._processes import Agreement
from flax_layoutmap._records import Shape, show_shape
from flax_layoutmap.checkpoint._leaves import (
    is_floating,
    leaf_of,
    mesh_of,
    problem_list,
)
from flax_layoutmap.checkpoint._mapping import NameMapping, Recipe
from flax_layoutmap.checkpoint._mapping_blocks import Block, Range, full_index
from flax_layoutmap.checkpoint._safetensors_file import NAMES, local
from flax_layoutmap.checkpoint._safetensors_write import Entry, Writer, cannot_write
from flax_layoutmap.checkpoint._selection import Selection


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
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Saves a tree as safetensors, with the names and layout of Hugging Face.

    Process 0 writes, one tensor after another: at no time is more of the model than
    that in its memory. Every process of a job calls it with the same arguments.

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
        progress: called on process 0 after each tensor with the bytes that are written
            and those that will be.

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
    selection = Selection(include, exclude)
    wanted = _checked_dtype(dtype)
    with Agreement(f"saving {place}", mesh_of(tree, None)) as agreement:
        flat = flatten(tree)
        plan = _planned(flat, names, selection, wanted)
        if jax.process_index() == 0:
            problem = cannot_write(place, overwrite)
            plan.problems += [] if problem is None else [problem]
        if plan.problems:
            raise problem_list(f"cannot save to {place}", plan.problems)
        agreement.add(lambda: {"leaves": _digest(plan)})
    writer = None
    if jax.process_index() == 0:
        sizes = [Entry(t.name, t.dtype, t.shape) for t in plan.tensors]
        texts = {"format": "pt", **(metadata or {})}
        writer = Writer(place, sizes, max_file_bytes, texts)
    _write(place, plan, flat.leaves, writer, progress)


# ------------------------------------------------------------------------ planning


@dataclasses.dataclass(frozen=True)
class _Part:
    """What one leaf gives to a tensor.

    Attributes:
        leaf: position of the leaf.
        path: its path.
        index: the box of the leaf that is needed.
        blocks: which of its elements goes where.
    """

    leaf: int
    path: str
    index: tuple[Range, ...]
    blocks: tuple[Block, ...]


@dataclasses.dataclass
class _Tensor:
    name: str
    dtype: Any
    shape: Shape
    parts: list[_Part] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Plan:
    tensors: list[_Tensor] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)


def _checked_dtype(dtype: Any) -> Any:
    if dtype is None:
        return None
    try:
        wanted = np.dtype(dtype)
    except TypeError as error:
        raise CheckpointError(f"dtype={dtype!r} is no dtype: {error}") from error
    if not is_floating(wanted) or wanted not in NAMES:
        raise CheckpointError(
            f"dtype={wanted} is not floating-point, or safetensors have no such dtype"
        )
    return wanted


def _planned(flat: Flat, names: NameMapping, selection: Selection, dtype: Any) -> _Plan:
    plan = _Plan(problems=selection.useless(flat.full_paths()))
    tensors: dict[str, _Tensor] = {}
    columns = zip(flat.full_paths(), flat.paths, flat.leaves, strict=True)
    for at, (path, own_path, value) in enumerate(columns):
        if path not in selection:
            continue
        problem = _value_problem(path, value)
        if problem is not None:
            plan.problems.append(f"{path}: {problem}")
            continue
        source = names.source(own_path, path)
        if source is None:
            plan.problems.append(
                f"{path} {show_shape(value.shape)}: no entry of the mapping matches; "
                "add (path, name of the tensor), or leave it out with exclude="
            )
            continue
        try:
            recipe = source.recipes(tuple(value.shape))[0]
        except ValueError as error:
            plan.problems.append(
                f"{path} {show_shape(value.shape)}: the mapping's steps do not make "
                f"this shape: {error}"
            )
            continue
        own = np.dtype(value.dtype).newbyteorder("=")
        kind = dtype if dtype is not None and is_floating(own) else own
        if kind not in NAMES:
            plan.problems.append(
                f"{path}: safetensors cannot hold {kind}; pass dtype=, or convert it"
            )
            continue
        _add(plan, tensors, at, path, recipe, kind)
    if not tensors and not plan.problems:
        plan.problems.append("the tree holds no array")
    plan.tensors = list(tensors.values())
    if not plan.problems:
        plan.problems += [text for t in plan.tensors for text in _coverage(t)]
    return plan


def _value_problem(path: str, value: Any) -> str | None:
    """Why a leaf cannot be saved, or None."""
    leaf = leaf_of(path, value)
    if leaf is None or leaf.kind != "array":
        kind = type(value).__qualname__ if leaf is None else str(leaf)
        return (
            f"{kind} is no array of numbers; save nnx.state(model, nnx.Param), or "
            "leave it out with exclude="
        )
    if not path:
        return "the tree is a single leaf; save it under a key: {'name': leaf}"
    if isinstance(value, Tracer):
        return "it is traced; call save_safetensors outside of jit"
    if isinstance(value, jax.ShapeDtypeStruct):
        return "it is abstract and has no value; make it first, with flm.create"
    if isinstance(value, jax.Array) and value.is_deleted():
        return "it was deleted, as by donating it to jit; save what jit returned"
    if isinstance(value, jax.Array) and jax.process_count() > 1:
        if value.is_fully_addressable or not isinstance(value.sharding, NamedSharding):
            return (
                "only this process has it; place it on the mesh of all processes with "
                "layout_map.place(tree)"
            )
    return None


def _add(
    plan: _Plan,
    tensors: dict[str, _Tensor],
    at: int,
    path: str,
    recipe: Recipe,
    dtype: Any,
) -> None:
    """Notes what a leaf gives to its tensors."""
    blocks: dict[str, list[Block]] = {name: [] for name in recipe.shapes}
    for block in recipe.blocks:
        blocks[block.tensor].append(block)
    for name, own in blocks.items():
        shape = recipe.shapes[name]
        tensor = tensors.setdefault(name, _Tensor(name, dtype, shape))
        if (tensor.dtype, tensor.shape) != (dtype, shape):
            plan.problems.append(
                f"{path}: would make the tensor {name!r} {dtype} {show_shape(shape)}, "
                f"and {tensor.parts[0].path} {tensor.dtype} {show_shape(tensor.shape)}"
            )
            continue
        low = [min(at) for at in zip(*(block.start for block in own), strict=True)]
        ends = [
            [s + n for s, n in zip(block.start, block.shape, strict=True)]
            for block in own
        ]
        high = [max(at) for at in zip(*ends, strict=True)]
        index = tuple(zip(low, high, strict=True))
        tensor.parts.append(_Part(at, path, index, tuple(own)))


def _coverage(tensor: _Tensor) -> list[str]:
    """A problem if some elements of a tensor come from no leaf, or from two."""
    blocks = [block for part in tensor.parts for block in part.blocks]
    total = math.prod(tensor.shape)
    whole = len(blocks) == 1 and math.prod(blocks[0].shape) == total
    if whole or total == 0:
        return []
    # Elements that always go together are counted as one.
    views, unit = [], total
    for block in blocks:
        factors = sorted(
            (f for dim in block.dims for f in dim if f[0] > 1), key=lambda f: -f[1]
        )
        while len(factors) > 1 and factors[-1][0] * factors[-1][1] == factors[-2][1]:
            (outer, _), (inner, stride) = factors[-2:]
            factors[-2:] = [(outer * inner, stride)]
        run = factors[-1][0] if factors and factors[-1][1] == 1 else 1
        unit = math.gcd(unit, run, block.offset, *(s for _, s in factors if s > 1))
        views.append((block.offset, factors))
    count = np.zeros(total // unit, np.int32)
    for offset, factors in views:
        shape = [n // unit if s == 1 else n for n, s in factors] or [1]
        steps = [(1 if s == 1 else s // unit) * 4 for _, s in factors] or [4]
        view = as_strided(count[offset // unit :], shape, steps)
        view += 1
    paths = ", ".join(dict.fromkeys(part.path for part in tensor.parts))
    if (count > 1).any():
        return [
            f"{paths}: some elements of the tensor {tensor.name!r} would be written "
            "twice; give one of the leaves another name, or leave it out with exclude="
        ]
    if (count == 0).any():
        return [
            f"{paths}: make only a part of the tensor {tensor.name!r} "
            f"{show_shape(tensor.shape)}; the mapping lacks leaves for the rest"
        ]
    return []


def _digest(plan: _Plan) -> str:
    parts = [
        (t.name, str(t.dtype), t.shape, [(p.path, p.index) for p in t.parts])
        for t in plan.tensors
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


# ------------------------------------------------------------------------- writing


def _write(
    place: str,
    plan: _Plan,
    leaves: Sequence[Any],
    writer: Writer | None,
    progress: Callable[[int, int], object] | None,
) -> None:
    """Brings one tensor after another to process 0, which writes it."""
    done, total = 0, sum(math.prod(t.shape) * t.dtype.itemsize for t in plan.tensors)
    error: OSError | None = None
    try:
        for tensor in plan.tensors if writer is None else writer.order(plan.tensors):
            parts = [_fetched(leaves[part.leaf], part.index) for part in tensor.parts]
            if writer is not None:
                error = _tried(lambda t=tensor, p=parts: writer.add(_made(t, p)))
            _raise_together(place, error)
            done += math.prod(tensor.shape) * tensor.dtype.itemsize
            if writer is not None and progress is not None:
                progress(done, total)
        if writer is not None:
            error = _tried(writer.finish)
        _raise_together(place, error)
    finally:
        if writer is not None:
            writer.clean_up()


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


def _made(tensor: _Tensor, parts: Sequence[np.ndarray]) -> np.ndarray:
    """A tensor, of what the leaves give to it."""
    made = np.empty(math.prod(tensor.shape), tensor.dtype)
    for part, value in zip(tensor.parts, parts, strict=True):
        for block in part.blocks:
            piece = block.piece(part.index, value)
            steps = [stride * made.itemsize for stride in piece.strides]
            begin = made[piece.offset :]
            view = as_strided(begin, piece.out.shape, steps)
            np.copyto(view, piece.out, casting="unsafe")
    return made


def _fetched(leaf: Any, index: tuple[Range, ...]) -> np.ndarray:
    """A box of a leaf, on the host; in a job of several processes a collective."""
    box = tuple(slice(*part) for part in index)
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)[box]
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
