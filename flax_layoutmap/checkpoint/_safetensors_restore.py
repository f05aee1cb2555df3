"""flm.checkpoint.restore_safetensors."""

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_layoutmap._core.errors import CheckpointError, meant
from flax_layoutmap._core.processes import Agreement
from flax_layoutmap._resolve.resolve import resolve
from flax_layoutmap._rules.records import Shape, show_shape
from flax_layoutmap._show.progress import shown_progress
from flax_layoutmap._tree.paths import escape
from flax_layoutmap.checkpoint._join import Held, Plan, Read, join, opened
from flax_layoutmap.checkpoint._lazy import (
    Array,
    Box,
    empty_like,
    from_mxfp4,
    full,
    scaled,
)
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
        progress: as in `restore`; or a function that is called after each leaf with the
            bytes of the leaves so far, and of all.

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
    check_devices("restore_safetensors", options.rules, None)
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

    def scales(self, stored: Stored, name: str) -> tuple[str, Shape] | None:
        """Name and shape of the scales of a tensor; None if it needs none."""
        step, dtype = self.recipe.dequantize, stored.tensors[name].dtype
        is_float8 = dtype.itemsize == 1 and is_floating(dtype)
        if step is None or not (step.is_mxfp4 or is_float8):
            return None
        return step.scales(name, self.shapes[name])

    def needed(self, stored: Stored) -> dict[str, Shape]:
        """Name → shape in the files, of the tensors and of their scales."""
        found: dict[str, Shape] = {}
        for name, shape in self.shapes.items():
            scales = self.scales(stored, name)
            found[name] = shape
            if scales is not None:
                found[scales[0]] = scales[1]
            if scales is not None and self.is_mxfp4:
                found[name] = (*scales[1], 16)
        return found

    @property
    def is_mxfp4(self) -> bool:
        return self.recipe.dequantize is not None and self.recipe.dequantize.is_mxfp4

    def leaf(self, path: str, stored: Stored, value: Any) -> Leaf:
        """Describe the leaf, by the dtype that fits the target least.

        If that one can be converted, the others can.
        """
        product = np.dtype(jnp.bfloat16)
        kinds = {
            product if self.scales(stored, name) else stored.tensors[name].dtype
            for name in self.shapes
        }
        if self.recipe.dtype is not None:
            kinds = {self.recipe.dtype}
        wanted = getattr(value, "dtype", None)
        dtype = min(kinds, key=lambda kind: (kind == wanted, is_floating(kind)))
        return Leaf(path, "array", np.shape(value), dtype)


def _plan(
    stored: Stored, names: NameMapping, options: Options
) -> tuple[Plan, dict[str, Maker]]:
    """Join the tensors of a checkpoint with the leaves of the target."""
    target = opened(options.target)
    options = options.among(target.flat)
    problems: list[str] = []
    used: set[str] = set()
    absent: dict[str, str] = {}
    makers: dict[str, Maker] = {}
    wanted, near = target.leaves, _hints(stored)
    for (path, value), short in zip(wanted.items(), target.flat.paths, strict=True):
        is_selected, shape = path in options.selection, np.shape(value)
        recipe = names.recipe(short, path)
        try:
            maker = _maker(recipe, shape, stored)
        except ValueError as error:
            if is_selected:
                problems.append(
                    f"{path} {show_shape(shape)}: the mapping's steps do not make this "
                    f"shape: {error}"
                )
            continue
        if isinstance(maker, Maker):
            needed = maker.needed(stored)
            used.update(needed)
            wrong = _wrong_tensor(maker, needed, shape, stored) if is_selected else None
            if wrong is not None:
                problems.append(f"{path} {show_shape(shape)}: {wrong}")
            elif is_selected:
                makers[path] = maker
        elif is_selected:
            text = f"there is no tensor {maker!r} in {stored.where}{near(maker)}"
            absent[path] = text if maker else names.unmatched(short)
    if options.unexpected == "error":
        problems += _unexpected(stored, used, names)
    held = Held(
        {
            path: maker.leaf(path, stored, wanted[path])
            for path, maker in makers.items()
        },
        absent,
        {path: f" (tensor {next(iter(m.shapes))!r})" for path, m in makers.items()},
        problems=tuple(problems),
    )
    rules = options.rules
    plan = join(held, target, rules, lambda: resolve(target.tree, rules), options)
    return plan, makers


def _maker(recipe: Recipe | None, shape: Shape, stored: Stored) -> Maker | str:
    """The maker of a leaf by the first name that exists, else a tensor that does not.

    Without a recipe, that is "".
    """
    if recipe is None:
        return ""
    absent = []
    for name in recipe.names:
        shapes = recipe.tensors(name, shape)
        missing = [tensor for tensor in shapes if tensor not in stored.tensors]
        if not missing:
            return Maker(recipe, name, shapes)
        absent += missing
    return absent[0]


def _wrong_tensor(
    maker: Maker, needed: Mapping[str, Shape], shape: Shape, stored: Stored
) -> str | None:
    """The problem with the first tensor that is absent or of another shape or dtype."""
    for name, size in needed.items():
        tensor = stored.tensors.get(name)
        if tensor is None:
            return (
                f"is made of a tensor in {'MXFP4' if maker.is_mxfp4 else 'float8'}, "
                f"whose scales {name!r} are not in {stored.where}; leave dequantize "
                "out of the entry to restore it without"
            )
        if tensor.shape != size:
            return (
                f"needs {tensor} to have the shape {show_shape(size)}; "
                f"{_other_linear(maker, shape, stored)}build the target with the sizes "
                "of the checkpoint, or change the steps of the mapping"
            )
        if maker.is_mxfp4 and tensor.dtype != np.uint8:
            return (
                f"needs {tensor} to be uint8, as MXFP4 is, not {tensor.dtype}; leave "
                "dequantize out of the entry to restore it as it is"
            )
    return None


def _other_linear(maker: Maker, shape: Shape, stored: Stored) -> str:
    """The arguments of `linear` with which the tensors have the right shapes."""
    for kind in ("outputs", "inputs"):
        for count in range(1, len(shape)):
            other = maker.recipe.with_linear(**{kind: count})
            tensors = other.tensors(maker.name, shape)
            if all(stored.tensors[n].shape == size for n, size in tensors.items()):
                return f"write linear({kind}={count}), which fits; or "
    return ""


def _hints(stored: Stored) -> Callable[[str], str]:
    """A function that says which tensor a name most likely misspells.

    Numbers are not compared: the names of all layers are alike, and are too many.
    """
    forms = {re.sub(r"\d+", "0", name): name for name in reversed(stored.tensors)}
    meant_by = functools.cache(lambda form: meant(form, forms))

    def hint(name: str) -> str:
        form = re.sub(r"\d+", "0", name)
        near, numbers = meant_by(form), iter(re.findall(r"\d+", name))
        if near is None or near == form:
            return ""
        text = re.sub(r"\d+", lambda _: next(numbers, "0"), near)
        return f"; did you mean {text if text in stored.tensors else forms[near]!r}?"

    return hint


def _unexpected(stored: Stored, used: set[str], names: NameMapping) -> list[str]:
    """A problem for the tensors that no leaf uses, one for all layers."""
    kinds: dict[str, list[str]] = {}
    for name in stored.tensors:
        if name not in used and not names.ignores(name):
            kind = re.sub(r"(?<=\.)\d+(?=\.)", r"\\d+", name).replace(".", r"\.")
            kinds.setdefault(kind, []).append(name)
    tied = "; where the model ties its output to the embedding, pass tied=True"
    others = {kind: f" and {len(own) - 1} like it" for kind, own in kinds.items()}
    return [
        f"{stored.tensors[first]}{others[kind] if more else ''}: no leaf "
        f"of the target is made of it; to leave it out, add (None, r'{kind}') to the "
        f"mapping, or pass unexpected='ignore'{tied if 'lm_head' in first else ''}"
        for kind, (first, *more) in kinds.items()
    ]


# ---------------------------------------------------------------------- read


def _read(
    stored: Stored,
    plan: Plan,
    makers: Mapping[str, Maker],
    progress: bool | Callable[[int, int], object] | None,
) -> dict[str, Any]:
    """Path → restored value of every leaf of the plan."""
    sizes = {
        path: read.stored.dtype.itemsize * int(np.prod(read.result.shape))
        for path, read in plan.reads.items()
    }
    files, total, done = Files(), sum(sizes.values()), 0
    shown = False if callable(progress) else progress
    found: dict[str, Any] = {}
    before: Any = None
    with shown_progress(f"restoring {stored.where}", total, shown, lambda: done):
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
            if callable(progress):
                progress(done, total)
    return found


def _value(files: Files, stored: Stored, maker: Maker, read: Read) -> Any:
    """Make a leaf of its tensors."""
    result, sharding, step = read.result, read.sharding, maker.recipe.dequantize
    dtype = read.stored.dtype if result.is_python else result.dtype

    def tensor(name: str) -> Array:
        values: Any = files.tensor(stored.tensors[name])
        scales = maker.scales(stored, name)
        if scales is None or step is None:
            return values
        factors: Any = files.tensor(stored.tensors[scales[0]])
        if step.is_mxfp4:
            return from_mxfp4(values, factors, dtype)
        return scaled(values, factors, step.block, dtype)

    leaf = maker.recipe.leaf(maker.name, result.shape, dtype, tensor)
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
    """A box of a leaf, which nothing else holds, in the order of the file."""
    value = np.asarray(leaf[box])
    if value.flags.writeable and value.dtype == dtype:
        return value
    made = empty_like(value, value.shape, dtype)
    made[...] = value
    return made
