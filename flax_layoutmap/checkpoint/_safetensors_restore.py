"""flm.checkpoint.restore_safetensors."""

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
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.resolve import resolve
from flax_layoutmap._rules.records import Shape, show_shape
from flax_layoutmap._show.progress import shown_progress
from flax_layoutmap._tree.paths import escape, fold
from flax_layoutmap.checkpoint._join import Held, Plan, Read, Target, join, opened
from flax_layoutmap.checkpoint._lazy import (
    Array,
    Box,
    box_shape,
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
    NUMBER,
    Files,
    Stored,
    local,
    open_safetensors,
)
from flax_layoutmap.checkpoint._steps import MXFP4_BLOCK, Dequantize, Mxfp4


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
            bytes of the shards that this process has made, and will have made at the
            end. Copies on several devices count once.

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
        plan, makers = plan_tensors(stored, names, options)
        if plan.problems:
            raise problem_list(f"cannot restore {options.path}", folded(plan.problems))
        if plan.resolution is not None:
            plan.resolution.announce()
        agreement.add(lambda: _parts(stored, plan))
    return plan.tree(_read(stored, plan, makers, progress))


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

# Of a recipe, the name that exists.
Made = tuple[Recipe, str]

# What a float8 tensor counts as, times its scales.
BFLOAT16 = np.dtype(jnp.bfloat16)
# Similar names are searched for among so many in all; more would take too long.
_COMPARISONS = 500_000


def plan_tensors(
    stored: Stored, names: NameMapping, options: Options
) -> tuple[Plan, dict[str, Made]]:
    """Join the tensors of a checkpoint with the leaves of the target."""
    if options.target is not None:
        target = opened(options.target)
        return _with_target(stored, target, names, options.among(target.flat))
    rules, selection = options.rules, options.selection
    if rules is None:
        raise CheckpointError(
            f"cannot restore {stored.where} without layouts: pass layout_map=, on the "
            "mesh to restore to, or a target that has shardings"
        )
    tensors = {escape(name): tensor for name, tensor in stored.tensors.items()}

    def resolve_selected() -> Resolution:
        abstract = {
            tensor.name: jax.ShapeDtypeStruct(tensor.shape, tensor.dtype)
            for path, tensor in tensors.items()
            if path in selection
        }
        return resolve(abstract, rules)

    held = Held(
        {path: Leaf(path, "array", t.shape, t.dtype) for path, t in tensors.items()},
        sources={path: f" ({tensor})" for path, tensor in tensors.items()},
    )
    makers = {path: (Recipe((t.name,)), t.name) for path, t in tensors.items()}
    return join(held, None, rules, resolve_selected, options), makers


def _with_target(
    stored: Stored, target: Target, names: NameMapping, options: Options
) -> tuple[Plan, dict[str, Made]]:
    """Plan to restore the leaves of a target."""
    wanted, selection = target.leaves, options.selection
    problems: list[str] = []
    used: set[str] = set()
    absent: dict[str, str] = {}
    makers: dict[str, Made] = {}
    leaves: dict[str, Leaf] = {}
    sources: dict[str, str] = {}
    for (path, value), short in zip(wanted.items(), target.flat.paths, strict=True):
        shape = np.shape(value)
        recipe = names.recipe(short, path)
        try:
            choices = (
                {n: recipe.tensors(n, shape) for n in recipe.names} if recipe else {}
            )
        except ValueError as error:
            if path in selection:
                problems.append(
                    f"{path} {show_shape(shape)}: the mapping's steps do not make this "
                    f"shape: {error}"
                )
            continue
        there = (n for n, t in choices.items() if t.keys() <= stored.tensors.keys())
        name = next(there, None)
        if recipe is None or name is None:
            if path in selection:
                few = len(absent) * len(stored.forms) < _COMPARISONS
                missing = (
                    _absent(stored, next(iter(choices.values())), few)
                    if choices
                    else None
                )
                absent[path] = missing or names.unmatched(short)
            continue
        needed = _with_scales(recipe, choices[name], stored)
        used.update(needed)
        if path not in selection:
            continue
        wrong = _wrong_tensors(recipe, name, shape, needed, stored)
        problems += [f"{path} {show_shape(shape)}: {text}" for text in wrong[:1]]
        if not wrong:
            makers[path] = recipe, name
            leaves[path] = _leaf(path, recipe, choices[name], stored, value)
            sources[path] = f" ({stored.tensors[next(iter(choices[name]))]})"
    if options.unexpected == "error":
        problems += _unexpected(stored, used, names)
    held = Held(leaves, absent, sources, problems=tuple(problems))
    rules = options.rules
    plan = join(held, target, rules, lambda: resolve(target.tree, rules), options)
    return plan, makers


def _scales(recipe: Recipe, name: str, shape: Shape, stored: Stored) -> Any:
    """Name and shape of the scales of a tensor; None if it needs none."""
    step, dtype = recipe.dequantize, stored.tensors[name].dtype
    if isinstance(step, Dequantize) and not (
        dtype.itemsize == 1 and is_floating(dtype)
    ):
        return None
    return None if step is None else step.scales(name, shape)


def _with_scales(
    recipe: Recipe, tensors: Mapping[str, Shape], stored: Stored
) -> dict[str, Shape]:
    """Name → shape in the files, of the tensors of a recipe and of their scales."""
    found: dict[str, Shape] = {}
    for name, shape in tensors.items():
        scales = _scales(recipe, name, shape, stored)
        if isinstance(recipe.dequantize, Mxfp4):
            shape = (*scales[1], MXFP4_BLOCK // 2)
        found[name] = shape
        if scales is not None:
            found[scales[0]] = scales[1]
    return found


def _leaf(
    path: str, recipe: Recipe, tensors: Mapping[str, Shape], stored: Stored, value: Any
) -> Leaf:
    """Describe a leaf made of tensors, by the dtype that fits the target least.

    If that one can be converted, the others can.
    """
    dtype = recipe.dtype
    if dtype is None:
        kinds = {
            BFLOAT16
            if _scales(recipe, name, shape, stored)
            else stored.tensors[name].dtype
            for name, shape in tensors.items()
        }
        wanted = getattr(value, "dtype", None)
        dtype = min(kinds, key=lambda kind: (kind == wanted, is_floating(kind)))
    return Leaf(path, "array", np.shape(value), dtype)


# ------------------------------------------------------------------- problems


def _wrong_tensors(
    recipe: Recipe,
    name: str,
    shape: Shape,
    needed: Mapping[str, Shape],
    stored: Stored,
) -> list[str]:
    """A problem for each tensor that is absent or of another shape or dtype."""
    is_packed, wrong = isinstance(recipe.dequantize, Mxfp4), []
    for tensor, size in needed.items():
        found = stored.tensors.get(tensor)
        if found is None:
            wrong.append(
                f"is made of a tensor in {'MXFP4' if is_packed else 'float8'}, whose "
                f"scales {tensor!r} are not in {stored.where}; leave dequantize out of "
                "the entry to restore it without"
            )
        elif found.shape != size:
            fix = _other_linear(recipe, name, shape, stored)
            wrong.append(
                f"needs {found} to have the shape {show_shape(size)}; {fix}build the "
                "target with the sizes of the checkpoint, or change the steps of the "
                "mapping"
            )
        elif is_packed and found.dtype != np.uint8:
            wrong.append(
                f"needs {found} to be uint8, as MXFP4 is, not {found.dtype}; leave "
                "dequantize out of the entry to restore it as it is"
            )
    return wrong


def _other_linear(recipe: Recipe, name: str, shape: Shape, stored: Stored) -> str:
    """The arguments of `linear` with which the tensors have the right shapes."""
    for call, other in recipe.with_linear(shape):
        try:
            tensors = other.tensors(name, shape)
        except ValueError:
            continue
        if all(stored.tensors[n].shape == size for n, size in tensors.items()):
            return f"with {call} in its steps it has; else "
    return ""


def _absent(stored: Stored, tensors: Mapping[str, Shape], hint: bool) -> str:
    """The message that tensors are missing."""
    names = [name for name in tensors if name not in stored.tensors]
    near = _near(names[0], stored) if hint else ""
    what = f"is no tensor {names[0]!r}"
    if len(names) > 1:
        what = f"are no tensors {names[0]!r} and {len(names) - 1} more"
    return f"there {what} in {stored.where}{near}"


def _near(name: str, stored: Stored) -> str:
    """A hint to the tensor that a name most likely misspells.

    Numbers are not compared: the names of all layers are alike, and are too many.
    """
    form = meant(NUMBER.sub("0", name), stored.forms)
    if form is None or form == NUMBER.sub("0", name):
        return ""
    numbers = iter(NUMBER.findall(name))
    found = NUMBER.sub(lambda _: next(numbers, "0"), form)
    return (
        f"; did you mean {found if found in stored.tensors else stored.forms[form]!r}?"
    )


def _unexpected(stored: Stored, used: set[str], names: NameMapping) -> list[str]:
    """A problem for each tensor that no leaf uses."""

    def hint(name: str) -> str:
        if name == "lm_head.weight":
            return "; where the model ties its output to the embedding, pass tied=True"
        for end, weight, step in (
            ("_scale_inv", "", "dequantize()"),
            ("_scales", "_blocks", "dequantize('mxfp4')"),
        ):
            tensor = name.removesuffix(end) + weight
            if name.endswith(end) and tensor in used:
                return f"; to multiply {tensor!r} by it, add {step} to its steps"
        return ""

    return [
        f"tensor {name} {show_shape(tensor.shape)}: no leaf of the target is made of "
        f"it; to leave it out, add (None, {_as_pattern(name)}) to the mapping, or pass "
        f"unexpected='ignore'{hint(name)}"
        for name, tensor in stored.tensors.items()
        if name not in used and not names.ignores(name)
    ]


def _as_pattern(name: str) -> str:
    return "r" + repr(name.replace(".", r"\.")).replace("\\\\", "\\")


_IN_A_NAME = re.compile(r"(?<=[/.'])\d+(?=[/.'\\])")


def folded(problems: Sequence[str]) -> list[str]:
    """The problems, where equal ones of several layers are one.

    A problem begins with the path of a leaf. The numbers of layers in the names that
    follow may be those of the path.
    """
    paths = [text.split(" (")[0] for text in problems]
    rests = []
    for path, text in zip(paths, problems, strict=True):
        own = _IN_A_NAME.findall(f"/{path}/".replace(" ", "/"))

        def mark(number: re.Match[str], own: list[str] = own) -> str:
            return f"{{{own.index(number[0])}}}" if number[0] in own else number[0]

        rests.append(_IN_A_NAME.sub(mark, text[len(path) :]))
    lines = []
    for row in fold(paths, rests):
        first = row.members[0]
        if len(row.members) == 1:
            lines.append(problems[first])
            continue
        rest = rests[first]
        for at, slot in enumerate(row.slots):
            rest = rest.replace(f"{{{at}}}", slot)
        lines.append(f"{row.text}{rest}")
    return lines


# ---------------------------------------------------------------------- read


def _read(
    stored: Stored,
    plan: Plan,
    makers: Mapping[str, Made],
    progress: bool | Callable[[int, int], object] | None,
) -> dict[str, Any]:
    """Path → restored value of every leaf of the plan."""
    total = sum(map(_bytes_of, plan.reads.values()))
    tell = progress if callable(progress) else None
    shown = False if callable(progress) else progress
    found: dict[str, Any] = {}
    files, done, before = Files(), 0, None
    with shown_progress(f"restoring {stored.where}", total, shown, lambda: done):
        for path, read in plan.reads.items():
            try:
                found[path] = _value(files, stored, makers[path], read)
            except CheckpointError as error:
                raise CheckpointError(f"{path}: {error}") from error
            # Transfers overlap with the reads of the next leaf.
            jax.block_until_ready(before)
            before = found[path]
            done += _bytes_of(read)
            files.release()
            if tell is not None:
                tell(done, total)
    return found


def _value(files: Files, stored: Stored, made: Made, read: Read) -> Any:
    """Make a leaf of the tensors of its recipe."""
    (recipe, name), result, sharding = made, read.result, read.sharding
    shape = result.shape
    dtype = read.stored.dtype if result.is_python else result.dtype
    shapes = recipe.tensors(name, shape)

    def tensor(name: str) -> Array:
        values = files.tensor(stored.tensors[name])
        scales = _scales(recipe, name, shapes[name], stored)
        if scales is None:
            return values
        factors: Any = files.tensor(stored.tensors[scales[0]])
        if isinstance(recipe.dequantize, Dequantize):
            return scaled(values, factors, recipe.dequantize.block, dtype)
        return from_mxfp4(values, factors, dtype)

    leaf = recipe.leaf(name, shape, dtype, tensor)
    if sharding is None:
        value = _in_memory(leaf, full(shape), dtype)
        return TYPES[result.kind](value.item()) if result.is_python else value
    held: dict[Any, np.ndarray] = {}

    def shard(index: Any) -> np.ndarray:
        box = _box(index, shape)
        if str(box) not in held:
            held[str(box)] = _in_memory(leaf, box, dtype)
        return held[str(box)]

    # A process without a device of this mesh has no arrays, so pass the dtype.
    return jax.make_array_from_callback(shape, sharding, shard, dtype=dtype)


def _in_memory(leaf: Array, box: Box, dtype: Any) -> np.ndarray:
    """A box of a leaf, which nothing else holds, in the order of the file."""
    value = np.asarray(leaf[box])
    if value.flags.writeable and value.dtype == dtype:
        return value
    return np.array(value, dtype, order="K")


def _box(index: Any, shape: Shape) -> Box:
    return tuple(
        slice(*part.indices(size)[:2]) for part, size in zip(index, shape, strict=True)
    )


def _bytes_of(read: Read) -> int:
    """Bytes of the shards of this process; copies count once."""
    if read.result.is_python:
        return read.stored.dtype.itemsize
    size = _elements_here(read.sharding, read.result.shape)
    return size * read.result.dtype.itemsize


@functools.lru_cache(maxsize=1024)
def _elements_here(sharding: Any, shape: Shape) -> int:
    if sharding is None:
        return int(np.prod(shape))
    indices = sharding.addressable_devices_indices_map(shape).values()
    boxes = {str(box): box for box in (_box(index, shape) for index in indices)}
    return sum(int(np.prod(box_shape(box))) for box in boxes.values())
