"""flm.checkpoint.save_safetensors: from the leaves of a tree to tensors in files."""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from flax_layoutmap._core.checksums import on_host
from flax_layoutmap._core.processes import Agreement
from flax_layoutmap._rules.records import Shape, show_shape
from flax_layoutmap._show.terminal import shown_progress
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.paths import Flat, Leaf
from flax_layoutmap.checkpoint._leaves import (
    Selection,
    check_bytes,
    floating_dtype,
    is_floating,
    leaf_of,
    mesh_of,
    no_value,
    problem_list,
)
from flax_layoutmap.checkpoint._mapping import UNMATCHED, NameMapping, undone
from flax_layoutmap.checkpoint._places import on_first_process
from flax_layoutmap.checkpoint._safetensors import (
    NAMES,
    Box,
    Lazy,
    assembled,
    box_shape,
    full,
    local,
)
from flax_layoutmap.checkpoint._safetensors_write import Made, Writer
from flax_layoutmap.checkpoint._steps import Step


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
    progress: bool | None = None,
) -> None:
    """Save a tree as safetensors, with the names and layout of Hugging Face.

    Every process of a job calls it with the same arguments. Process 0 writes one tensor
    after another, and holds at most two copies of one. Whatever ends the program, the
    folder has the old model or the new one; of several programs that save to it at
    once, the model of one.

    Args:
        path: a directory, which is created if needed and may hold other files
            (`config.json`); or one file, `….safetensors`.
        tree: NNX modules, States, Linen variables or any tree of arrays.
        mapping: the mapping of `restore_safetensors`; each step is undone. Of several
            names the first is written. The leaves made of one tensor must cover it.
        include: as in `restore`: which leaves are saved.
        exclude: as in `restore`.
        dtype: a floating-point dtype for all floating-point arrays; None keeps theirs.
        max_file_bytes: the maximal size of a file in a directory, unless one tensor is
            larger. Several files have an index, and a random tag in their names.
        overwrite: replace the model in the directory, or the file, when the new one is
            complete beside it. Other files stay; `model….safetensors` with the names
            that this function or `transformers` gives them are the model.
        metadata: texts for the headers, beside `{"format": "pt"}` for `transformers`.
        progress: as in `restore`.

    Example:
        >>> import tempfile, jax.numpy as jnp, flax_layoutmap as flm
        >>> path = tempfile.mkdtemp()
        >>> flm.checkpoint.save_safetensors(path, {"up": {"kernel": jnp.ones((8, 4))}})

    Plain JAX: `safetensors.flax.save_file({name: array, …}, file)`, with the whole
    model on one host.
    """
    place = local(path)
    check_bytes("max_file_bytes", max_file_bytes)
    names = NameMapping(mapping)
    selection = Selection(include, exclude)
    wanted = None if dtype is None else floating_dtype(dtype)
    with Agreement(f"saving {place}", mesh_of(tree, None)) as agreement:
        flat = flatten(tree)
        tensors, problems = _plan(flat, names, selection, wanted)
        for name, text in (metadata or {}).items():
            if not (isinstance(name, str) and isinstance(text, str)):
                problems.append(f"metadata={{{name!r}: {text!r}}}: give texts alone")
        writer = Writer(place, tensors, max_file_bytes)
        if jax.process_index() == 0:
            problems += writer.cannot_write(overwrite)
        if problems:
            raise problem_list(f"cannot save to {place}", problems)
        agreement.add(lambda: {"leaves": [f"{tensor}" for tensor in tensors]})
    _write(place, writer, {"format": "pt", **(metadata or {})}, progress)


# ---------------------------------------------------------------------------- plan


def _plan(
    flat: Flat, names: NameMapping, selection: Selection, dtype: Any
) -> tuple[list[Made], list[str]]:
    problems = selection.useless(flat.full_paths())
    draft = _Draft()
    for record, value in zip(flat.records, flat.leaves, strict=True):
        if record.full_path in selection:
            try:
                draft.add(*_made(record, value, names, dtype))
            except ValueError as error:
                shape = show_shape(np.shape(value))
                problems.append(f"{record.full_path} {shape}: {error}")
    if not problems:
        draft.assemble()
        problems += draft.problems
    if not draft.tensors and not problems:
        problems.append("the tree holds no array")
    return [*draft.tensors.values()], problems


def _made(
    record: Leaf, value: Any, names: NameMapping, dtype: Any
) -> tuple[Made, Sequence[Step]]:
    """A leaf and the steps to undo; ValueError if it cannot be saved."""
    path = record.full_path
    leaf = leaf_of(path, value)
    if leaf is None or leaf.kind != "array":
        raise ValueError(
            f"{type(value).__qualname__ if leaf is None else leaf} is not an array of "
            "numbers; save nnx.state(model, nnx.Param), or leave it out with exclude="
        )
    if not path:
        raise ValueError("the tree is a single leaf; save it under a key: {'w': …}")
    if missing := no_value(value, "save_safetensors"):
        raise ValueError(missing)
    is_sharded = isinstance(getattr(value, "sharding", None), NamedSharding)
    if isinstance(value, jax.Array) and jax.process_count() > 1 and not is_sharded:
        raise ValueError("it has no NamedSharding; place it with layout_map.place")
    recipe = names.recipe_of(record)
    if recipe is None:
        raise ValueError(UNMATCHED)
    if any(step.key[0] == "mxfp4" for step in recipe.steps):
        raise ValueError(
            "cannot be saved in MXFP4; save it by a mapping without "
            "dequantize('mxfp4'), such as mappings.gpt_oss(mxfp4=False)"
        )
    if dtype is None or not is_floating(leaf.dtype):
        dtype = leaf.dtype
    if dtype not in NAMES:
        raise ValueError(f"safetensors cannot hold {dtype}; pass dtype=, or convert it")
    name, recipe = recipe.names[0], recipe.without_scales()
    if name == "__metadata__":
        raise ValueError("'__metadata__' names the texts of the header; rename it")
    recipe.shapes(name, leaf.shape)
    is_jax = isinstance(value, jax.Array)
    fetched = functools.partial(_fetched, value)
    values = Lazy(leaf.shape, fetched) if is_jax else np.asarray(value)
    return Made(name, dtype, values, path), recipe.steps


class _Draft:
    """Undoes the steps of leaves.

    A split leaf is a part of what the steps before it make; once all parts are there,
    they are assembled, and these steps are undone.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Made] = {}
        self.problems: list[str] = []
        # Tensor, steps up to the split → place in the whole, part, the steps.
        self._parts: dict[Any, list[tuple[Any, Made, Sequence[Step]]]] = {}

    def add(self, made: Made, steps: Sequence[Step]) -> None:
        """Undo steps, up to a split."""
        splits = [(at, step.place) for at, step in enumerate(steps) if step.place]
        at, place_of = splits[-1] if splits else (-1, None)
        for name, values in undone(made.name, steps[at + 1 :], made.values):
            part = dataclasses.replace(made, name=name, values=values)
            if place_of is not None:
                key = (name, tuple(step.key for step in steps[:at]))
                place = place_of(values.shape)
                self._parts.setdefault(key, []).append((place, part, steps[:at]))
            elif (other := self.tensors.setdefault(name, part)) is not part:
                self.problems.append(
                    f"{other.paths}, {made.paths}: would both write the tensor "
                    f"{name!r}; give one of the leaves another name, or leave it out "
                    "with exclude="
                )

    def assemble(self) -> None:
        """Assemble all parts, those with the most steps before them first."""
        while self._parts:
            parts = self._parts.pop(max(self._parts, key=lambda key: len(key[1])))
            (shape, axis, _), first, before = parts[0]
            paths = ", ".join(dict.fromkeys(part.paths for _, part, _ in parts))
            covered = [n for place, _, _ in parts for n in range(shape[axis])[place[2]]]
            if len({(*place[:2], part.dtype) for place, part, _ in parts}) > 1:
                problem = "have other shapes or dtypes"
            elif len(covered) > len(set(covered)):
                problem = "would write some elements twice"
            elif len(covered) < shape[axis]:
                problem = "make only a part; the mapping lacks leaves for the rest"
            else:
                chosen = [(place[2], part.values) for place, part, _ in parts]
                values = assembled(shape, axis, chosen, first.dtype)
                self.add(dataclasses.replace(first, values=values, paths=paths), before)
                continue
            self.problems.append(
                f"{paths}: {problem}, of the tensor {first.name!r} {show_shape(shape)}"
            )


# ----------------------------------------------------- tensors, one after another


def _write(
    place: str, writer: Writer, texts: Mapping[str, str], progress: bool | None
) -> None:
    """Bring each tensor to process 0, which writes it."""
    done, total = 0, sum(t.nbytes for held in writer.files.values() for t in held)

    def on_first(action: Callable[..., None], *args: Any) -> None:
        on_first_process(
            lambda: action(*args),
            lambda why: f"cannot save to {place}: {why}; what was there is unchanged",
        )

    try:
        on_first(writer.start, texts)
        with shown_progress(f"saving {place}", total, progress, lambda: done):
            for file, tensors in writer.files.items():
                for tensor in tensors:
                    values = np.asarray(tensor.values[full(tensor.shape)])
                    on_first(writer.add, file, tensor, values)
                    done += tensor.nbytes
            on_first(writer.finish)
    finally:
        if jax.process_index() == 0:
            writer.clean_up()


def _fetched(leaf: jax.Array, box: Box) -> np.ndarray:
    """A box of an array; a collective if several processes have parts of it."""
    if leaf.is_fully_addressable and box == full(leaf.shape):
        made = np.empty(leaf.shape, leaf.dtype)
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0:
                made[shard.index] = on_host(shard.data)
        return made
    if not isinstance(leaf.sharding, NamedSharding):
        return np.asarray(leaf[box])
    starts = tuple(part.start for part in box)
    return np.asarray(_slicer(box_shape(box), leaf.sharding.mesh)(leaf, starts))


@functools.lru_cache(maxsize=256)
def _slicer(sizes: Shape, mesh: Any) -> Callable[..., jax.Array]:
    def cut(x: jax.Array, starts: Any) -> jax.Array:
        return jax.lax.dynamic_slice(x, starts, sizes)

    everywhere = NamedSharding(mesh, PartitionSpec())
    # JAX cannot slice sharded dims on Explicit axes.
    on_auto_axes = jax.sharding.auto_axes(cut, out_sharding=everywhere)
    return jax.jit(on_auto_axes, out_shardings=everywhere)
