"""flm.checkpoint.save_safetensors, and the plan of which leaves make each tensor."""

import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from flax_layoutmap._core.errors import CheckpointError
from flax_layoutmap._core.processes import Agreement
from flax_layoutmap._rules.records import show_shape
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.paths import Flat
from flax_layoutmap.checkpoint._leaves import (
    is_floating,
    leaf_of,
    mesh_of,
    no_value,
    problem_list,
)
from flax_layoutmap.checkpoint._mapping import NameMapping, Recipe
from flax_layoutmap.checkpoint._mapping_blocks import Block
from flax_layoutmap.checkpoint._mapping_steps import Mxfp4
from flax_layoutmap.checkpoint._options import (
    Selection,
    checked_selection,
    floating_dtype,
)
from flax_layoutmap.checkpoint._safetensors_header import NAMES, local
from flax_layoutmap.checkpoint._safetensors_write import (
    Made,
    Part,
    Writer,
    cannot_write,
    distributed,
    write,
)

# Threads take turns: a save removes what others have left unfinished in a directory.
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
    """Save a tree as safetensors, with the names and layout of Hugging Face.

    Process 0 writes one tensor after another, and holds at most two copies of one
    tensor. Every process of a job calls it with the same arguments. Threads of a
    process take turns.

    Args:
        path: a directory, which is created if needed and may hold other files
            (`config.json`); or one file, `….safetensors`.
        tree: NNX modules, States, Linen variables or any tree of arrays.
        mapping: the mapping of `restore_safetensors`; each step is undone. Of several
            names the first is written. The leaves made of one tensor must cover it.
            None maps a leaf `a/b/c` to the tensor `a.b.c`.
        include: one or several regular expressions; only leaves in whose full path one
            of them is found are saved.
        exclude: likewise; leaves in whose path one is found are not saved.
        dtype: a floating-point dtype for all floating-point arrays; None keeps theirs.
        max_file_bytes: the maximal size of a file in a directory, unless one tensor is
            larger. Several files have an index.
        overwrite: replace the model in the directory, or the file, when the new one is
            complete beside it.
        metadata: texts for the headers; `{"format": "pt"}`, which `transformers`
            requires, is added.
        progress: whether process 0 shows on stderr how much has been written; None: as
            in `restore`. Or a function that process 0 calls after each tensor
            with the bytes written so far, and the total.

    Raises:
        CheckpointError: leaves cannot be saved (one error lists all), the path is
            taken, or writing failed; no file is then left behind under its final name.

    Example:
        >>> import tempfile, jax.numpy as jnp, flax_layoutmap as flm
        >>> path = tempfile.mkdtemp()
        >>> flm.checkpoint.save_safetensors(path, {"up": {"kernel": jnp.ones((8, 4))}})
        >>> layout_map = flm.LayoutMap("data=-1", strict=False)
        >>> flm.checkpoint.restore_safetensors(path, layout_map=layout_map).keys()
        dict_keys(['up.kernel'])

    Plain JAX: `safetensors.flax.save_file({name: array, …}, file)`, with the whole
    model on one host.
    """
    place = local(path)
    names = NameMapping(mapping)
    selection = checked_selection(include, exclude)
    wanted = None if dtype is None else _checked_dtype(dtype)
    with _TURN:
        with Agreement(f"saving {place}", mesh_of(tree, None)) as agreement:
            flat = flatten(tree)
            tensors, problems = _plan(flat, names, selection.among(flat), wanted)
            taken = None
            if jax.process_index() == 0:
                taken = cannot_write(place, overwrite)
            problems += [] if taken is None else [taken]
            if problems:
                raise problem_list(f"cannot save to {place}", problems)
            agreement.add(lambda: {"leaves": _lines(tensors)})
        files = distributed(place, tensors, max_file_bytes)
        writer = None
        if jax.process_index() == 0:
            writer = Writer(place, files, {"format": "pt", **(metadata or {})})
        order = [tensor for held in files.values() for tensor in held]
        write(place, order, flat.leaves, writer, progress)


def _checked_dtype(dtype: Any) -> Any:
    wanted = floating_dtype(dtype, f"dtype={dtype!r}")
    if wanted not in NAMES:
        raise CheckpointError(f"dtype={wanted}: safetensors have no such dtype")
    return wanted


def _lines(tensors: Sequence[Made]) -> list[str]:
    """Lines that must be equal in all processes."""
    return [
        f"{t.name} {t.dtype} {show_shape(t.shape)} "
        f"{[(part.path, part.index) for part in t.parts]}"
        for t in tensors
    ]


# ---------------------------------------------------------------------------- plan


def _plan(
    flat: Flat, names: NameMapping, selection: Selection, dtype: Any
) -> tuple[list[Made], list[str]]:
    """Plan the tensors to make of a tree, in its order; list all problems."""
    problems = selection.useless(flat.full_paths())
    tensors: dict[str, Made] = {}
    columns = zip(flat.full_paths(), flat.paths, flat.leaves, strict=True)
    for at, (path, own_path, value) in enumerate(columns):
        if path not in selection:
            continue
        problem = _value_problem(path, value)
        if problem is not None:
            problems.append(f"{path}: {problem}")
            continue
        source = names.source(own_path, path)
        if source is None:
            problems.append(
                f"{path} {show_shape(value.shape)}: {names.unmatched(own_path)}"
            )
            continue
        try:
            recipe = source.recipes(tuple(value.shape))[0]
        except ValueError as error:
            problems.append(
                f"{path} {show_shape(value.shape)}: the mapping's steps do not make "
                f"this shape: {error}"
            )
            continue
        if isinstance(recipe.dequantize, Mxfp4):
            problems.append(
                f"{path} {show_shape(value.shape)}: cannot be saved in MXFP4; save it "
                "by a mapping without dequantize('mxfp4'), such as "
                "mappings.gpt_oss(mxfp4=False)"
            )
            continue
        own = np.dtype(value.dtype).newbyteorder("=")
        kind = dtype if dtype is not None and is_floating(own) else own
        if kind not in NAMES:
            problems.append(
                f"{path}: safetensors cannot hold {kind}; pass dtype=, or convert it"
            )
            continue
        problems += _add(tensors, at, path, recipe, kind)
    if not tensors and not problems:
        problems.append("the tree holds no array")
    if not problems:
        problems += [text for t in tensors.values() for text in _coverage(t)]
    return list(tensors.values()), problems


def _value_problem(path: str, value: Any) -> str | None:
    """The reason why a leaf cannot be saved, or None."""
    leaf = leaf_of(path, value)
    if leaf is None or leaf.kind != "array":
        kind = type(value).__qualname__ if leaf is None else str(leaf)
        return (
            f"{kind} is no array of numbers; save nnx.state(model, nnx.Param), or "
            "leave it out with exclude="
        )
    if not path:
        return "the tree is a single leaf; save it under a key: {'name': leaf}"
    problem = no_value(value, "save_safetensors")
    if problem is None and isinstance(value, jax.Array):
        if not isinstance(value.sharding, NamedSharding) and jax.process_count() > 1:
            return "it has no NamedSharding; place it with layout_map.place(tree)"
    return problem


def _add(
    tensors: dict[str, Made],
    at: int,
    path: str,
    recipe: Recipe,
    dtype: Any,
) -> list[str]:
    """Add a leaf's parts to its tensors; return the problems."""
    problems = []
    blocks: dict[str, list[Block]] = {name: [] for name in recipe.shapes}
    for block in recipe.blocks:
        blocks[block.tensor].append(block)
    for name, own in blocks.items():
        shape = recipe.shapes[name]
        tensor = tensors.setdefault(name, Made(name, dtype, shape))
        if (tensor.dtype, tensor.shape) != (dtype, shape):
            problems.append(
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
        tensor.parts.append(Part(at, path, index, tuple(own)))
    return problems


def _coverage(tensor: Made) -> list[str]:
    """A problem if elements of a tensor come from no leaf, or from two."""
    blocks = [block for part in tensor.parts for block in part.blocks]
    total = math.prod(tensor.shape)
    given = sum(math.prod(block.shape) for block in blocks)
    is_twice = given > total
    if given == total and len(blocks) > 1:
        seen = np.zeros(total, bool)
        for block in blocks:
            factors = [factor for dim in block.dims for factor in dim]
            shape, strides = ([f[at] for f in factors] for at in (0, 1))
            np.ndarray(shape, bool, seen, block.offset, strides)[...] = True
        is_twice = not seen.all()
    paths = ", ".join(dict.fromkeys(part.path for part in tensor.parts))
    if is_twice:
        return [
            f"{paths}: some elements of the tensor {tensor.name!r} would be written "
            "twice; give one of the leaves another name, or leave it out with exclude="
        ]
    if given < total:
        return [
            f"{paths}: make only a part of the tensor {tensor.name!r} "
            f"{show_shape(tensor.shape)}; the mapping lacks leaves for the rest"
        ]
    return []
