"""flm.checkpoint.restore_safetensors."""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_layoutmap._core.errors import CheckpointError, did_you_mean
from flax_layoutmap._core.processes import Agreement
from flax_layoutmap._resolve.resolve import resolve
from flax_layoutmap._rules.records import Shape, show_shape
from flax_layoutmap._show.progress import shown_progress
from flax_layoutmap._tree.paths import escape
from flax_layoutmap.checkpoint._join import Plan, Read, join, opened
from flax_layoutmap.checkpoint._lazy import Array, Box, full
from flax_layoutmap.checkpoint._leaves import TYPES, Leaf, is_floating, problem_list
from flax_layoutmap.checkpoint._mapping import NameMapping, Recipe
from flax_layoutmap.checkpoint._options import (
    Missing,
    Options,
    Unexpected,
    check_devices,
    checked_options,
)
from flax_layoutmap.checkpoint._safetensors import (
    Files,
    Stored,
    local,
    open_safetensors,
)
from flax_layoutmap.checkpoint._steps import is_scaled


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
    progress: bool | None = None,
) -> Any:
    r"""Restore safetensors (such as Hugging Face's) directly into shards.

    Headers, names, shapes, dtypes and rules are checked before any data is read; one
    error lists every problem, with equal ones of several layers in one line. Then each
    process reads its own shards, leaf by leaf, from files that are mapped into memory:
    of narrow columns, whole pages are read.

    Args:
        path: a `.safetensors` file, a `model.safetensors.index.json`, or a directory
            with either (the file counts before the index), or with several files; on a
            disk.
        target: the tree to restore into, as in `restore`. None: a dict of all tensors
            by their names, which are the paths that rules see.
        layout_map: the rules, as in `restore`.
        mesh: a mesh of devices for the rules of `layout_map`.
        mapping: entries `(path, name)` or `(path, name, steps)`; the first that matches
            a leaf counts. The path is a regular expression for the leaf's whole path,
            as rules see it. The name is that of the tensor, with `\1` or `\g<name>` for
            groups of the path; or a tuple of names, of which the first that exists is
            used. The steps, one or a tuple, turn the tensor into the leaf: see
            `flm.checkpoint.mappings`, which also has ready mappings. `(None, name)`,
            with a regular expression, lists tensors that no leaf needs. None maps a
            leaf `a/b/c` to the tensor `a.b.c`.
        include: as in `restore`.
        exclude: as in `restore`.
        dtype: as in `restore`.
        missing: as in `restore`, for leaves whose tensors do not exist or that no entry
            of the mapping matches.
        unexpected: as in `restore`, for tensors that no leaf uses.
        progress: as in `restore`.

    Returns:
        The target's own type, as `restore` does; or a dict by names.

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
    if mapping is not None and target is None:
        raise CheckpointError(
            "a mapping says what the leaves of a target are made of, so it needs one; "
            "without a target the tensors come back under their own names"
        )
    names = NameMapping(mapping)
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
    check_devices("restore_safetensors", options)
    with Agreement(f"restoring {options.path}", options.job_mesh) as agreement:
        stored = open_safetensors(options.path)
        if target is None:
            options = _for_all(stored, options)
        plan, makers = _plan(stored, names, options)
        if plan.problems:
            raise problem_list(f"cannot restore {options.path}", plan.problems)
        if plan.resolution is not None:
            plan.resolution.announce()
        agreement.add(lambda: _parts(stored, plan))
    return plan.tree(_read(stored, plan, makers, progress))


def _for_all(stored: Stored, options: Options) -> Options:
    """The options with a target that has the selected tensors under their own names."""
    if options.rules is None:
        raise CheckpointError(
            f"cannot restore {stored.where} without layouts: pass layout_map=, on the "
            "mesh to restore to, or a target that has shardings"
        )
    useless = options.selection.useless(map(escape, stored.tensors))
    if useless:
        raise problem_list(f"cannot restore {options.path}", useless)
    target = {
        name: jax.ShapeDtypeStruct(tensor.shape, tensor.dtype)
        for name, tensor in stored.tensors.items()
        if escape(name) in options.selection
    }
    return dataclasses.replace(options, target=target, unexpected="ignore")


def _parts(stored: Stored, plan: Plan) -> dict[str, list[str]]:
    """Lines that must be equal in all processes."""
    return {
        "files": [f"{t} {t.dtype} {t.offset}" for t in stored.tensors.values()],
        "leaves": [
            f"{path}: {read.result}, {read.sharding}"
            for path, read in plan.reads.items()
        ],
    }


# ---------------------------------------------------------------------- plan


@dataclasses.dataclass(frozen=True)
class Maker:
    """How a leaf is made: the recipe, the name that exists, and the tensors' shapes."""

    recipe: Recipe
    name: str
    shapes: Mapping[str, Shape]

    def leaf(self, path: str, stored: Stored, value: Any) -> Leaf:
        """Describe the leaf, by the dtype that fits the target least.

        If that one can be converted, the others can.
        """
        kinds = {stored.tensors[name].dtype for name in self.shapes}
        if any(map(is_scaled, self.recipe.steps)):
            kinds = {np.dtype(jnp.bfloat16)}
        wanted = getattr(value, "dtype", None)
        dtype = min(kinds, key=lambda kind: (kind == wanted, is_floating(kind)))
        return Leaf(path, "array", np.shape(value), dtype)

    def problem(self, shape: Shape, stored: Stored) -> str | None:
        """The problem with the first tensor that has another shape."""
        for name, size in self.shapes.items():
            if stored.tensors[name].shape != size:
                return (
                    f"needs {stored.tensors[name]} to have the shape "
                    f"{show_shape(size)}; {_other_linear(self, shape, stored)}build "
                    "the target with the sizes of the checkpoint, or change the steps "
                    "of the mapping"
                )
        return None


def _plan(
    stored: Stored, names: NameMapping, options: Options
) -> tuple[Plan, dict[str, Maker]]:
    """Join the tensors of a checkpoint with the leaves of the target."""
    target = opened(options.target)
    problems: dict[str, str] = {}
    absent: dict[str, str] = {}
    makers: dict[str, Maker] = {}
    wanted, alike = target.leaves, _by_numbers(stored)
    for (path, value), short in zip(wanted.items(), target.flat.paths, strict=True):
        recipe, shape = names.recipe(short, path), np.shape(value)
        if recipe is None:
            absent[path] = names.unmatched(short)
            continue
        try:
            maker = _maker(recipe, shape, stored)
        except ValueError as error:
            problems[path] = f"the mapping's steps do not make this shape: {error}"
            continue
        if isinstance(maker, str):
            near = did_you_mean(maker, alike.get(_numbers(maker), ()))
            absent[path] = f"there is no tensor {maker!r} in {stored.where}{near}"
            continue
        makers[path] = maker
        if problem := maker.problem(shape, stored):
            problems[path] = problem
    texts = [
        f"{path} {show_shape(np.shape(wanted[path]))}: {problem}"
        for path, problem in problems.items()
        if path in options.selection
    ]
    if options.unexpected == "error":
        used = {name for maker in makers.values() for name in maker.shapes}
        texts += _unexpected(stored, used, names)
    plan = join(
        {
            path: maker.leaf(path, stored, wanted[path])
            for path, maker in makers.items()
            if path in options.selection and path not in problems
        },
        target,
        options,
        lambda: resolve(target.tree, options.rules),
        absent=absent,
        sources={p: f" (tensor {next(iter(m.shapes))!r})" for p, m in makers.items()},
        problems=texts,
    )
    return plan, makers


def _maker(recipe: Recipe, shape: Shape, stored: Stored) -> Maker | str:
    """The maker by the first name that exists, else a tensor that does not."""
    absent = []
    for name in recipe.names:
        used, plain = recipe, recipe.without_scales()
        held = [stored.tensors.get(tensor) for tensor in plain.shapes(name, shape)]
        if not any(t and t.dtype.itemsize == 1 and is_floating(t.dtype) for t in held):
            used = plain
        shapes = used.shapes(name, shape)
        missing = [tensor for tensor in shapes if tensor not in stored.tensors]
        if not missing:
            return Maker(used, name, shapes)
        absent += missing
    return absent[0]


def _other_linear(maker: Maker, shape: Shape, stored: Stored) -> str:
    """The arguments of `linear` with which the tensors have the right shapes."""
    for kind in ("outputs", "inputs"):
        for count in range(1, len(shape)):
            shapes = maker.recipe.with_linear(**{kind: count}).shapes(maker.name, shape)
            if all(stored.tensors[n].shape == size for n, size in shapes.items()):
                return f"write linear({kind}={count}), which fits; or "
    return ""


def _numbers(name: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\d+", name))


def _by_numbers(stored: Stored) -> dict[tuple[str, ...], list[str]]:
    """The names of tensors by the numbers in them; those of one layer are few."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name in stored.tensors:
        found.setdefault(_numbers(name), []).append(name)
    return found


def _unexpected(stored: Stored, used: set[str], names: NameMapping) -> list[str]:
    """A problem for the tensors that no leaf uses, one for all layers."""
    kinds: dict[str, list[str]] = {}
    for name in stored.tensors:
        if name not in used and not names.ignores(name):
            kind = re.sub(r"(?<=\.)\d+(?=\.)", r"\\d+", name).replace(".", r"\.")
            kinds.setdefault(kind, []).append(name)
    tied = "; where the model ties its output to the embedding, pass tied=True"
    return [
        f"{stored.tensors[first]}{f' and {len(more)} like it' if more else ''}: no "
        f"leaf of the target is made of it; to leave it out, add (None, r'{kind}') to "
        f"the mapping, or pass unexpected='ignore'{tied if 'lm_head' in first else ''}"
        for kind, (first, *more) in kinds.items()
    ]


# ---------------------------------------------------------------------- read


def _read(
    stored: Stored, plan: Plan, makers: Mapping[str, Maker], progress: bool | None
) -> dict[str, Any]:
    """Path → restored value of every leaf of the plan."""
    sizes = {
        path: read.stored.dtype.itemsize * int(np.prod(read.result.shape))
        for path, read in plan.reads.items()
    }
    files, total, done = Files(), sum(sizes.values()), 0
    found: dict[str, Any] = {}
    before: Any = None
    with shown_progress(f"restoring {stored.where}", total, progress, lambda: done):
        for path, read in plan.reads.items():
            try:
                found[path] = _value(files, stored, makers[path], read)
            except CheckpointError as error:
                raise CheckpointError(f"{path}: {error}") from error
            # Transfers overlap with the reads of the next leaf.
            jax.block_until_ready(before)
            before = found[path]
            files.release()
            done += sizes[path]
    return found


def _value(files: Files, stored: Stored, maker: Maker, read: Read) -> Any:
    """Make a leaf of its tensors."""
    result, sharding = read.result, read.sharding
    dtype = read.stored.dtype if result.is_python else result.dtype
    leaf = maker.recipe.leaf(
        maker.name, result.shape, dtype, lambda name: files.tensor(stored.tensors[name])
    )
    if sharding is None:
        value = _in_memory(leaf, full(result.shape), dtype)
        return TYPES[result.kind](value.item()) if result.is_python else value
    made: dict[str, np.ndarray] = {}

    def shard(index: Any) -> np.ndarray:
        box = tuple(
            slice(*part.indices(size)[:2])
            for part, size in zip(index, result.shape, strict=True)
        )
        if str(box) not in made:  # copies are read once
            made[str(box)] = _in_memory(leaf, box, dtype)
        return made[str(box)]

    # A process without a device of this mesh has no arrays, so pass the dtype.
    return jax.make_array_from_callback(result.shape, sharding, shard, dtype=dtype)


def _in_memory(leaf: Array, box: Box, dtype: Any) -> np.ndarray:
    """A box of a leaf, not a view of a file, in the order of the file.

    JAX transposes on the way to the device, faster than NumPy.
    """
    value = np.asarray(leaf[box])
    if value.flags.writeable and value.dtype == dtype:
        return value
    return np.array(value, dtype, order="K")
