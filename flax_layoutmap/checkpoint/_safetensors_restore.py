"""flm.checkpoint.restore_safetensors."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_layoutmap._core.errors import CheckpointError, meant
from flax_layoutmap._core.processes import Agreement
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.resolve import resolve
from flax_layoutmap._rules.records import show_shape
from flax_layoutmap._tree.paths import escape
from flax_layoutmap.checkpoint._join import Held, Target, join, opened
from flax_layoutmap.checkpoint._leaves import (
    Leaf,
    is_floating,
    problem_list,
)
from flax_layoutmap.checkpoint._mapping import NameMapping, Recipe
from flax_layoutmap.checkpoint._mapping_blocks import whole
from flax_layoutmap.checkpoint._mapping_steps import Mxfp4
from flax_layoutmap.checkpoint._options import (
    Missing,
    Options,
    Unexpected,
    check_devices,
    checked_options,
)
from flax_layoutmap.checkpoint._safetensors_header import (
    NUMBER,
    Stored,
    Tensor,
    local,
    open_safetensors,
)
from flax_layoutmap.checkpoint._safetensors_read import TensorPlan, read_tensors


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
    error lists every problem. Then each process reads the bytes of its own shards (and
    gaps under 32 KiB between them), leaf by leaf, without communication.

    Args:
        path: a `.safetensors` file, a `model.safetensors.index.json`, or a directory
            with either, or with several files; on a disk.
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
            bytes that this process has read, and the total that it will read.

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
    return planned.plan.tree(read_tensors(planned, progress))


def _checked_mapping(mapping: Sequence[Any] | None, target: Any) -> NameMapping:
    if mapping is not None and target is None:
        raise CheckpointError(
            "a mapping says what the leaves of a target are made of, so it needs one; "
            "without a target the tensors come back under their own names"
        )
    return NameMapping(mapping)


def _parts(planned: TensorPlan) -> dict[str, list[str]]:
    """Lines that must be equal in all processes."""
    return {
        "files": [
            f"{t.name} {t.dtype} {show_shape(t.shape)} {t.offset}"
            for t in planned.stored.tensors.values()
        ],
        "leaves": [
            f"{path}: {read.result}, {read.sharding}"
            for path, read in planned.plan.reads.items()
        ],
    }


# ---------------------------------------------------------------------- plan


# What a float8 tensor counts as, times its scales.
BFLOAT16 = np.dtype(jnp.bfloat16)
# Similar names are searched for among so many in all; more would take too long.
_COMPARISONS = 500_000


def plan_tensors(stored: Stored, names: NameMapping, options: Options) -> TensorPlan:
    """Join the tensors of a checkpoint with the leaves of the target."""
    if options.target is None:
        return _without_target(stored, options)
    target = opened(options.target)
    return _with_target(stored, target, names, options.among(target.flat))


def _without_target(stored: Stored, options: Options) -> TensorPlan:
    """Plan to restore all tensors under their own names, laid out by the rules."""
    rules, selection = options.rules, options.selection
    if rules is None:
        raise CheckpointError(
            f"cannot restore {stored.where} without layouts: pass layout_map=, on the "
            "mesh to restore to, or a target that has shardings"
        )
    tensors = {escape(name): tensor for name, tensor in stored.tensors.items()}
    recipes = {
        path: Recipe((whole(t.name, t.shape),), {t.name: t.shape})
        for path, t in tensors.items()
    }
    held = Held(
        {path: Leaf(path, "array", t.shape, t.dtype) for path, t in tensors.items()},
        sources={path: f" ({tensor})" for path, tensor in tensors.items()},
    )

    def resolve_selected() -> Resolution:
        abstract = {
            tensor.name: jax.ShapeDtypeStruct(tensor.shape, tensor.dtype)
            for path, tensor in tensors.items()
            if path in selection
        }
        return resolve(abstract, rules)

    plan = join(held, None, rules, resolve_selected, options)
    return TensorPlan(stored, plan, recipes)


def _with_target(
    stored: Stored, target: Target, names: NameMapping, options: Options
) -> TensorPlan:
    """Plan to restore the leaves of a target."""
    wanted, selection = target.leaves, options.selection
    problems: list[str] = []
    used: set[str] = set()
    absent: dict[str, str] = {}
    recipes: dict[str, Recipe] = {}
    for (path, value), own in zip(wanted.items(), target.flat.paths, strict=True):
        name = f"{path} {show_shape(_shape(value))}"
        source = names.source(own, path)
        try:
            choices = [] if source is None else source.recipes(_shape(value))
        except ValueError as error:
            if path in selection:
                problems.append(
                    f"{name}: the mapping's steps do not make this shape: {error}"
                )
            continue
        recipe = _present(choices, stored)
        needed = {} if recipe is None else _needed(recipe, stored)
        used.update(needed)
        if path not in selection:
            continue
        if recipe is not None:
            wrong = _wrong_tensors(name, needed, recipe, stored)
            problems += wrong
            recipes |= {} if wrong else {path: recipe}
        elif choices:
            few = len(absent) * len(stored.forms) < _COMPARISONS
            absent[path] = _absent(stored, choices[0], hint=few)
        else:
            absent[path] = names.unmatched(own)
    if options.unexpected == "error":
        problems += _unexpected(stored, used, names)
    held = Held(
        {path: _leaf(path, r, stored, wanted[path]) for path, r in recipes.items()},
        absent,
        {path: f" ({_first(r, stored)})" for path, r in recipes.items()},
        problems=tuple(problems),
    )
    rules = options.rules
    plan = join(held, target, rules, lambda: resolve(target.tree, rules), options)
    return TensorPlan(stored, plan, recipes)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))


def _present(recipes: Sequence[Recipe], stored: Stored) -> Recipe | None:
    """The first recipe whose tensors all exist."""
    for recipe in recipes:
        if all(name in stored.tensors for name in recipe.shapes):
            return recipe
    return None


def _first(recipe: Recipe, stored: Stored) -> Tensor:
    return stored.tensors[next(iter(recipe.shapes))]


def _needed(recipe: Recipe, stored: Stored) -> dict[str, tuple[int, ...]]:
    """Name → required shape of the tensors of a recipe, and of their scales."""
    found: dict[str, tuple[int, ...]] = {}
    for name in recipe.shapes:
        found |= recipe.stored(name, stored.tensors[name].dtype)
    return found


def _leaf(path: str, recipe: Recipe, stored: Stored, value: Any) -> Leaf:
    """Describe a leaf made of tensors, by the dtype that fits the target least.

    If that one can be converted, the others can.
    """
    dtype = recipe.dtype
    if dtype is None:
        held = {name: stored.tensors[name].dtype for name in recipe.shapes}
        kinds = {
            BFLOAT16 if recipe.scales(name, kind) else kind
            for name, kind in held.items()
        }
        wanted = getattr(value, "dtype", None)
        dtype = min(kinds, key=lambda kind: (kind == wanted, is_floating(kind)))
    return Leaf(path, "array", _shape(value), dtype)


def _wrong_tensors(
    name: str, needed: Mapping[str, tuple[int, ...]], recipe: Recipe, stored: Stored
) -> list[str]:
    """A problem for each tensor that is absent or of another shape or dtype."""
    is_packed, wrong = isinstance(recipe.dequantize, Mxfp4), []
    for tensor, shape in needed.items():
        found = stored.tensors.get(tensor)
        if found is None:
            wrong.append(
                f"{name}: is made of a tensor in {'MXFP4' if is_packed else 'float8'}, "
                f"whose scales {tensor!r} are not in {stored.where}; leave dequantize "
                "out of the entry to restore it without"
            )
        elif found.shape != shape:
            wrong.append(
                f"{name}: needs {found} to have the shape {show_shape(shape)}; build "
                "the target with the sizes of the checkpoint, or change the steps of "
                "the mapping"
            )
        elif is_packed and found.dtype != np.uint8:
            wrong.append(
                f"{name}: needs {found} to be uint8, as MXFP4 is, not {found.dtype}; "
                "leave dequantize out of the entry to restore it as it is"
            )
    return wrong[:3]  # the layers of a stack are all alike


def _absent(stored: Stored, recipe: Recipe, *, hint: bool) -> str:
    """The message that tensors are missing."""
    absent = [name for name in recipe.shapes if name not in stored.tensors]
    near = _near(absent[0], stored) if hint else ""
    if len(absent) == 1:
        return f"there is no tensor {absent[0]!r} in {stored.where}{near}"
    return (
        f"there are no tensors {absent[0]!r} and {len(absent) - 1} more in "
        f"{stored.where}{near}"
    )


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
            scaled = name.removesuffix(end) + weight
            if name.endswith(end) and scaled in used:
                return f"; to multiply {scaled!r} by it, add {step} to its steps"
        return ""

    return [
        f"{tensor}: no leaf of the target is made of it; to leave it out, add "
        f"(None, {_as_pattern(name)}) to the mapping, or pass unexpected='ignore'"
        f"{hint(name)}"
        for name, tensor in stored.tensors.items()
        if name not in used and not names.ignores(name)
    ]


def _as_pattern(name: str) -> str:
    return "r" + repr(name.replace(".", r"\.")).replace("\\\\", "\\")
