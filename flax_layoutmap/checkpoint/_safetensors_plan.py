"""Plan a restore from safetensors: join tensors by a mapping of names."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from flax_layoutmap._core.errors import CheckpointError, did_you_mean
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.resolve import resolve
from flax_layoutmap._rules.records import show_shape
from flax_layoutmap._tree.paths import escape, unescape
from flax_layoutmap.checkpoint._join import Held, Plan, Target, join, opened
from flax_layoutmap.checkpoint._leaves import Leaf, is_floating
from flax_layoutmap.checkpoint._mapping import NameMapping, Recipe
from flax_layoutmap.checkpoint._mapping_blocks import whole
from flax_layoutmap.checkpoint._options import Options
from flax_layoutmap.checkpoint._orbax import nested
from flax_layoutmap.checkpoint._safetensors_header import Stored, Tensor

# Similar names are searched for among so many in all; more would take too long.
_COMPARISONS = 500_000


@dataclasses.dataclass(frozen=True)
class TensorPlan:
    """A plan, and the tensors that its leaves are made of.

    Attributes:
        stored: the checkpoint.
        plan: what to read.
        recipes: path of a leaf → how it is made of tensors.
    """

    stored: Stored
    plan: Plan
    recipes: Mapping[str, Recipe]


def plan_tensors(stored: Stored, names: NameMapping, options: Options) -> TensorPlan:
    """Join the tensors of a checkpoint with the leaves of the target.

    Raises:
        CheckpointError: without a target, there are no rules, or the names make no
            nested dict.
    """
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
    tensors = {
        "/".join(map(escape, name.split("."))): tensor
        for name, tensor in stored.tensors.items()
    }
    _check_nesting(stored, list(tensors))
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
            path: jax.ShapeDtypeStruct(tensor.shape, tensor.dtype)
            for path, tensor in tensors.items()
            if path in selection
        }
        return resolve(nested(abstract, unescape), rules)

    plan = join(held, None, rules, resolve_selected, options)
    return TensorPlan(stored, plan, recipes)


def _check_nesting(stored: Stored, paths: Sequence[str]) -> None:
    """Raise CheckpointError where one name is the beginning of another."""
    parts = [path.split("/") for path in paths]
    above = {"/".join(own[:n]) for own in parts for n in range(1, len(own))}
    clashes = sorted(above & set(paths))
    if clashes:
        name = ".".join(map(unescape, clashes[0].split("/")))
        other = next(n for n in stored.tensors if n.startswith(f"{name}."))
        raise CheckpointError(
            f"{stored.where} has tensors {name!r} and {other!r}, which make no nested "
            "dict; pass a target, and a mapping"
        )


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
        used.update(() if recipe is None else recipe.shapes)
        if path not in selection:
            continue
        if recipe is not None:
            wrong = _wrong_shapes(name, recipe, stored)
            problems += wrong
            recipes |= {} if wrong else {path: recipe}
        elif choices:
            few = len(absent) * len(stored.tensors) < _COMPARISONS
            absent[path] = _absent(stored, choices[0], hint=few)
        else:
            absent[path] = (
                "no entry of the mapping matches; add (path, name of the tensor), or "
                "leave it out with exclude="
            )
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
    """The first one all of whose tensors are there."""
    for recipe in recipes:
        if all(name in stored.tensors for name in recipe.shapes):
            return recipe
    return None


def _first(recipe: Recipe, stored: Stored) -> Tensor:
    return stored.tensors[next(iter(recipe.shapes))]


def _leaf(path: str, recipe: Recipe, stored: Stored, value: Any) -> Leaf:
    """The leaf that tensors make; of their dtypes, the one that fits the target least.

    If that one can be converted, the others can.
    """
    dtype = recipe.dtype
    if dtype is None:
        kinds = {stored.tensors[name].dtype for name in recipe.shapes}
        wanted = getattr(value, "dtype", None)
        dtype = min(kinds, key=lambda kind: (kind == wanted, is_floating(kind)))
    return Leaf(path, "array", _shape(value), dtype)


def _wrong_shapes(name: str, recipe: Recipe, stored: Stored) -> list[str]:
    wrong = [
        f"{name}: needs {stored.tensors[tensor]} to have the shape "
        f"{show_shape(needed)}; build the target with the sizes of the checkpoint, or "
        "change the steps of the mapping"
        for tensor, needed in recipe.shapes.items()
        if stored.tensors[tensor].shape != needed
    ]
    return wrong[:3]  # the layers of a stack are all alike


def _absent(stored: Stored, recipe: Recipe, *, hint: bool) -> str:
    """List the tensors that are missing."""
    absent = [name for name in recipe.shapes if name not in stored.tensors]
    meant = did_you_mean(absent[0], stored.tensors) if hint else ""
    if len(absent) == 1:
        return f"there is no tensor {absent[0]!r} in {stored.where}{meant}"
    return (
        f"there are no tensors {absent[0]!r} and {len(absent) - 1} more in "
        f"{stored.where}{meant}"
    )


def _unexpected(stored: Stored, used: set[str], names: NameMapping) -> list[str]:
    """A problem for each tensor that no leaf is made of."""
    tied = "; where the model ties its output to the embedding, pass tied=True"
    return [
        f"{tensor}: no leaf of the target is made of it; to leave it out, add "
        f"(None, {_as_pattern(name)}) to the mapping, or pass unexpected='ignore'"
        f"{tied if name == 'lm_head.weight' else ''}"
        for name, tensor in stored.tensors.items()
        if name not in used and not names.ignores(name)
    ]


def _as_pattern(name: str) -> str:
    return "r" + repr(name.replace(".", r"\.")).replace("\\\\", "\\")
