"""flm.checkpoint.save_safetensors: from the leaves of a tree to tensors in files."""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from flax_layoutmap._core.mesh import retyped
from flax_layoutmap._core.processes import Agreement
from flax_layoutmap._rules.records import Shape, show_shape
from flax_layoutmap._show.progress import shown_progress
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.paths import Flat
from flax_layoutmap.checkpoint._lazy import (
    Array,
    Box,
    Lazy,
    assembled,
    box_shape,
    full,
)
from flax_layoutmap.checkpoint._leaves import (
    is_floating,
    leaf_of,
    mesh_of,
    no_value,
    problem_list,
)
from flax_layoutmap.checkpoint._mapping import NameMapping, Recipe, undone
from flax_layoutmap.checkpoint._options import (
    Selection,
    checked_selection,
    floating_dtype,
)
from flax_layoutmap.checkpoint._places import on_first_process
from flax_layoutmap.checkpoint._safetensors import NAMES, local
from flax_layoutmap.checkpoint._safetensors_write import Made, Writer, cannot_write
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

    Process 0 writes one tensor after another, and holds at most two copies of one
    tensor. Every process of a job calls it with the same arguments.

    The files are written under hidden names, which no other writer has, and renamed at
    the end. Whatever ends the program, the folder has the old model or the new one; of
    several programs that save to one folder, it has the model of one.

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
            larger. Several files have an index, and a random tag in their names.
        overwrite: replace the model in the directory, or the file, when the new one is
            complete beside it. Other files stay; `model….safetensors` with the names
            that this function or `transformers` gives them are the model.
        metadata: texts for the headers; `{"format": "pt"}`, which `transformers`
            requires, is added.
        progress: whether process 0 shows on stderr how much has been written; None: as
            in `restore`.

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
    wanted = None if dtype is None else floating_dtype(dtype, f"dtype={dtype!r}")
    with Agreement(f"saving {place}", mesh_of(tree, None)) as agreement:
        flat = flatten(tree)
        tensors, problems = _plan(flat, names, selection, wanted)
        for name, text in (metadata or {}).items():
            if not (isinstance(name, str) and isinstance(text, str)):
                problems.append(f"metadata={{{name!r}: {text!r}}}: give texts alone")
        if jax.process_index() == 0:
            problems += cannot_write(place, overwrite)
        if problems:
            raise problem_list(f"cannot save to {place}", problems)
        agreement.add(lambda: {"leaves": [f"{tensor}" for tensor in tensors]})
    texts = {"format": "pt", **(metadata or {})}
    writer = Writer(place, tensors, max_file_bytes, texts)
    _write(place, writer, progress)


# ---------------------------------------------------------------------------- plan


def _plan(
    flat: Flat, names: NameMapping, selection: Selection, dtype: Any
) -> tuple[list[Made], list[str]]:
    """Plan the tensors to make of a tree, in its order; list all problems."""
    problems = selection.useless(flat.full_paths())
    draft = _Draft()
    columns = zip(flat.full_paths(), flat.paths, flat.leaves, strict=True)
    for path, short, value in columns:
        if path not in selection:
            continue
        if problem := _value_problem(path, value):
            problems.append(f"{path}: {problem}")
            continue
        recipe = names.recipe(short, path)
        recipe = None if recipe is None else recipe.without_scales()
        kind = np.dtype(value.dtype).newbyteorder("=")
        kind = dtype if dtype is not None and is_floating(kind) else kind
        problem = _recipe_problem(names, short, recipe, kind, value.shape)
        if problem is not None:
            problems.append(f"{path} {show_shape(value.shape)}: {problem}")
        elif recipe is not None:
            made = Made(recipe.names[0], kind, _on_host(value), path)
            draft.add(made, recipe.steps)
    problems = problems or draft.finish()
    if not draft.tensors and not problems:
        problems.append("the tree holds no array")
    return [*draft.tensors.values()], problems


def _value_problem(path: str, value: Any) -> str | None:
    """The reason why a leaf cannot be saved, or None."""
    leaf = leaf_of(path, value)
    if leaf is None or leaf.kind != "array":
        kind = type(value).__qualname__ if leaf is None else str(leaf)
        return (
            f"{kind} is not an array of numbers; save nnx.state(model, nnx.Param), or "
            "leave it out with exclude="
        )
    if not path:
        return "the tree is a single leaf; save it under a key: {'name': leaf}"
    problem = no_value(value, "save_safetensors")
    if problem is None and isinstance(value, jax.Array):
        if not isinstance(value.sharding, NamedSharding) and jax.process_count() > 1:
            return "it has no NamedSharding; place it with layout_map.place(tree)"
    return problem


def _recipe_problem(
    names: NameMapping, path: str, recipe: Recipe | None, dtype: Any, shape: Shape
) -> str | None:
    """The reason why a mapping cannot be undone for a leaf, or None."""
    if recipe is None:
        return names.unmatched(path)
    if any(step.key[0] == "mxfp4" for step in recipe.steps):
        return (
            "cannot be saved in MXFP4; save it by a mapping without "
            "dequantize('mxfp4'), such as mappings.gpt_oss(mxfp4=False)"
        )
    if recipe.names[0] == "__metadata__":
        return "'__metadata__' names the texts of the header; give it another name"
    if dtype not in NAMES:
        return f"safetensors cannot hold {dtype}; pass dtype=, or convert it"
    try:
        recipe.shapes(recipe.names[0], shape)
    except ValueError as error:
        return f"the mapping's steps do not make this shape: {error}"
    return None


class _Draft:
    """Undoes the steps of leaves.

    A split leaf is a part of what the steps before it make; once all parts are there,
    they are assembled, and these steps are undone.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Made] = {}
        # Tensor, steps up to the split → place in the whole, part.
        self._parts: dict[Any, list[tuple[Any, Made]]] = {}
        self._problems: list[str] = []

    def add(self, made: Made, steps: Sequence[Step]) -> None:
        """Undo steps, up to a split."""
        splits = [at for at, step in enumerate(steps) if step.place is not None]
        rest = steps[splits[-1] + 1 :] if splits else steps
        place = steps[splits[-1]].place if splits else None
        for name, values in undone(made.name, rest, made.values):
            part = dataclasses.replace(made, name=name, values=values)
            if place is not None:
                key = (name, tuple(steps[: splits[-1]]))
                self._parts.setdefault(key, []).append((place(values.shape), part))
            elif (before := self.tensors.setdefault(name, part)) is not part:
                self._problems.append(
                    f"{before.paths}, {made.paths}: would both write the tensor "
                    f"{name!r}; give one of the leaves another name, or leave it out "
                    "with exclude="
                )

    def finish(self) -> list[str]:
        """Assemble the parts; return the problems with them."""
        while self._parts:
            key = max(self._parts, key=lambda key: len(key[1]))
            parts = self._parts.pop(key)
            (shape, axis, _), first = parts[0]
            paths = ", ".join(dict.fromkeys(part.paths for _, part in parts))
            covered = [
                at for (_, _, chosen), _ in parts for at in range(shape[axis])[chosen]
            ]
            if len({(*place[:2], part.dtype) for place, part in parts}) > 1:
                problem = "have other shapes or dtypes"
            elif len(covered) > len(set(covered)):
                problem = "would write some elements twice"
            elif len(covered) < shape[axis]:
                problem = "make only a part; the mapping lacks leaves for the rest"
            else:
                chosen = [(place[2], part.values) for place, part in parts]
                values = assembled(shape, axis, chosen, first.dtype)
                whole = dataclasses.replace(first, values=values, paths=paths)
                self.add(whole, key[1])
                continue
            self._problems.append(
                f"{paths}: {problem}, of the tensor {first.name!r} {show_shape(shape)}"
            )
        return self._problems


# ----------------------------------------------------- tensors, one after another


def _write(place: str, writer: Writer, progress: bool | None) -> None:
    """Bring each tensor to process 0, which writes it."""
    done, total = 0, sum(tensor.nbytes for tensor in writer.tensors)

    def together(action: Callable[[], None]) -> None:
        on_first_process(
            action,
            lambda why: f"cannot save to {place}: {why}; what was there is unchanged",
        )

    try:
        together(writer.start)
        with shown_progress(f"saving {place}", total, progress, lambda: done):
            for tensor in writer.tensors:
                values = np.asarray(tensor.values[full(tensor.shape)])
                together(functools.partial(writer.add, tensor, values))
                done += tensor.nbytes
            together(writer.finish)
    finally:
        if jax.process_index() == 0:
            writer.clean_up()


def _on_host(leaf: Any) -> Array:
    """A leaf whose boxes are fetched when they are used; a collective of processes."""
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf)
    return Lazy(leaf.shape, lambda box: _fetched(leaf, box))


def _fetched(leaf: jax.Array, box: Box) -> np.ndarray:
    if leaf.is_fully_addressable and box == full(leaf.shape):
        # Not np.asarray(leaf), which would keep the copy for as long as the leaf lives.
        made = np.empty(leaf.shape, leaf.dtype)
        for shard in leaf.addressable_shards:
            if shard.replica_id == 0:
                made[shard.index] = np.asarray(shard.data)
        return made
    leaf = _on_auto_axes(leaf)
    starts = tuple(part.start for part in box)
    if leaf.is_fully_addressable:
        return np.asarray(_slicer(box_shape(box), None)(leaf, starts))
    sharding: Any = leaf.sharding
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    return np.asarray(_slicer(box_shape(box), everywhere)(leaf, starts))


@functools.lru_cache(maxsize=256)
def _slicer(sizes: Shape, sharding: Any) -> Callable[..., jax.Array]:
    options = {} if sharding is None else {"out_shardings": sharding}
    return jax.jit(lambda x, starts: jax.lax.dynamic_slice(x, starts, sizes), **options)


def _on_auto_axes(leaf: jax.Array) -> jax.Array:
    """The array on Auto axes; JAX cannot slice sharded dims on Explicit ones."""
    sharding = leaf.sharding
    if not isinstance(sharding, NamedSharding):
        return leaf
    mesh: Any = sharding.mesh  # of devices, as there is an array
    if AxisType.Explicit not in mesh.axis_types:
        return leaf
    auto = NamedSharding(
        retyped(mesh, AxisType.Auto), sharding.spec, memory_kind=sharding.memory_kind
    )
    shards = [shard.data for shard in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(leaf.shape, auto, shards)
