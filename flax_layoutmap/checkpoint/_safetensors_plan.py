"""What restoring safetensors will read, and all that is wrong with it, before."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from flax_layoutmap._core.errors import CheckpointError, ResolveError, did_you_mean
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.resolve import resolve
from flax_layoutmap._rules.records import show_shape
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._tree.paths import Flat, escape
from flax_layoutmap.checkpoint._leaves import Leaf, leaf_of, result_of
from flax_layoutmap.checkpoint._mapping import NameMapping, Recipe, Source
from flax_layoutmap.checkpoint._mapping_blocks import whole
from flax_layoutmap.checkpoint._options import Options
from flax_layoutmap.checkpoint._safetensors_file import Stored
from flax_layoutmap.checkpoint._target import own_sharding, shardings_by_path

# Names that look alike are looked for among so many in all; more would take too long.
_COMPARISONS = 500_000


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """One leaf to restore.

    Attributes:
        recipe: which tensors it is made of.
        stored: the leaf as the tensors make it.
        result: the leaf to make of that.
        sharding: where it goes; None for a Python value or a NumPy array.
    """

    recipe: Recipe
    stored: Leaf
    result: Leaf
    sharding: Any


@dataclasses.dataclass
class Plan:
    """What to read, and what is wrong.

    Attributes:
        reads: path → leaf to restore.
        problems: one text each; nothing is read unless this is empty.
        made: path → sharding of the leaves that the target makes.
        resolution: what the rules say; None without rules, or if they do not fit.
        keys: path → keys of the nested dict, without a target.
    """

    reads: dict[str, Read] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)
    made: dict[str, Any] = dataclasses.field(default_factory=dict)
    resolution: Resolution | None = None
    keys: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def nested(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values by path, as a nested dict."""
        tree: dict[str, Any] = {}
        for path, value in values.items():
            *above, last = self.keys[path]
            node = tree
            for key in above:
                node = node.setdefault(key, {})
            node[last] = value
        return tree


def plan_without_target(
    stored: Stored, rules: RuleSet | None, options: Options
) -> Plan:
    """Plans to restore all tensors under their own names, laid out by the rules.

    Raises:
        CheckpointError: there are no rules, or the names make no nested dict.
    """
    if rules is None:
        raise CheckpointError(
            f"cannot restore {stored.where} without layouts: pass layout_map=, on the "
            "mesh to restore to, or a target that has shardings"
        )
    keys = {_path_of(name): name.split(".") for name in stored.tensors}
    _check_nesting(stored, keys)
    selection = options.selection
    plan = Plan(problems=selection.useless(keys), keys=keys)
    tensors = dict(zip(keys, stored.tensors.values(), strict=True))
    chosen = {path: t for path, t in tensors.items() if path in selection}
    abstract = {
        path: jax.ShapeDtypeStruct(t.shape, t.dtype) for path, t in chosen.items()
    }
    try:
        plan.resolution = resolve(plan.nested(abstract), rules)
    except ResolveError as error:
        plan.problems += error.problems or [str(error)]
    shardings = shardings_by_path(plan.resolution)
    for path, tensor in chosen.items():
        recipe = Recipe(
            (whole(tensor.name, tensor.shape),), {tensor.name: tensor.shape}
        )
        _add(plan, stored, path, recipe, None, shardings.get(path), options)
    return plan


def _path_of(name: str) -> str:
    return "/".join(escape(part) for part in name.split("."))


def _check_nesting(stored: Stored, keys: Mapping[str, list[str]]) -> None:
    """Raises CheckpointError where one name is the beginning of another."""
    inner = {
        "/".join(map(escape, k[:n])) for k in keys.values() for n in range(1, len(k))
    }
    clashes = sorted(inner & set(keys))
    if clashes:
        name = ".".join(keys[clashes[0]])
        other = next(n for n in stored.tensors if n.startswith(f"{name}."))
        raise CheckpointError(
            f"{stored.where} has tensors {name!r} and {other!r}, which make no nested "
            "dict; pass a target, and a mapping"
        )


def plan_for_target(
    stored: Stored,
    flat: Flat,
    tree: Any,
    rules: RuleSet | None,
    names: NameMapping,
    options: Options,
    can_make: bool,
) -> Plan:
    """Plans to restore the leaves of a target.

    Args:
        stored: the checkpoint.
        flat: the flattened target.
        tree: the target, as it can be resolved.
        rules: the rules; None takes each leaf's own sharding.
        names: what the leaves are made of.
        options: what else was asked for.
        can_make: whether the target is a function, which can make leaves.
    """
    paths, selection = flat.full_paths(), options.selection
    plan = Plan(problems=selection.useless(paths))
    shardings: Mapping[str, Any] = {}
    if rules is not None:
        try:
            plan.resolution = resolve(tree, rules)
        except ResolveError as error:
            plan.problems += error.problems or [str(error)]
        shardings = shardings_by_path(plan.resolution)
    used: set[str] = set()
    for path, own_path, value in zip(paths, flat.paths, flat.leaves, strict=True):
        source = names.source(own_path, path)
        if path not in selection:
            used |= _tensors_of(source, stored, value)
            _keep(plan, path, value, "include or exclude leaves it out")
            continue
        recipe, missing = _recipe(plan, stored, path, source, value)
        if missing is not None:
            _miss(plan, path, value, missing, shardings, options, can_make)
        if recipe is None:
            used |= _tensors_of(source, stored, value)
            continue
        used.update(recipe.shapes)
        leaf = leaf_of(path, value)
        if leaf is None:
            kind = type(value).__qualname__
            plan.problems.append(f"{path}: the {kind} in the target is no array")
            continue
        sharding = shardings.get(path)
        if rules is None:
            sharding, problem = own_sharding(leaf, value)
            if problem is not None:
                plan.problems.append(f"{leaf.name}: {problem}")
                continue
        _add(plan, stored, path, recipe, leaf, sharding, options)
    if options.unexpected == "error":
        plan.problems += _unexpected(stored, used, names)
    return plan


# ------------------------------------------------------------------- details


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))


def _recipe(
    plan: Plan, stored: Stored, path: str, source: Source | None, value: Any
) -> tuple[Recipe | None, str | None]:
    """How to make a leaf, or why nothing is there for it; None for both if it is wrong.

    What is wrong is noted in the plan.
    """
    shape = _shape(value)
    if source is None:
        return None, (
            "no entry of the mapping matches; add (path, name of the tensor), or leave "
            "it out with exclude="
        )
    try:
        recipes = source.recipes(shape)
    except ValueError as error:
        plan.problems.append(
            f"{path} {show_shape(shape)}: the mapping's steps do not make this shape: "
            f"{error}"
        )
        return None, None
    recipe = _present(recipes, stored)
    if recipe is None:
        compared = len(plan.problems) * len(stored.tensors)
        return None, _absent(stored, recipes[0], hint=compared < _COMPARISONS)
    wrong = [
        f"{path} {show_shape(shape)}: needs {stored.tensors[name]} to have the shape "
        f"{show_shape(needed)}; build the target with the sizes of the checkpoint, or "
        "change the steps of the mapping"
        for name, needed in recipe.shapes.items()
        if stored.tensors[name].shape != needed
    ]
    # The layers of a stack are all alike.
    plan.problems += wrong[:3]
    return (None, None) if wrong else (recipe, None)


def _present(recipes: Sequence[Recipe], stored: Stored) -> Recipe | None:
    """The first one all of whose tensors are there."""
    for recipe in recipes:
        if all(name in stored.tensors for name in recipe.shapes):
            return recipe
    return None


def _tensors_of(source: Source | None, stored: Stored, value: Any) -> set[str]:
    """Names of the tensors that a leaf would be made of."""
    if source is None:
        return set()
    try:
        recipe = _present(source.recipes(_shape(value)), stored)
    except ValueError:
        return set()  # it is not restored, so that it need not fit
    return set() if recipe is None else set(recipe.shapes)


def _absent(stored: Stored, recipe: Recipe, *, hint: bool) -> str:
    """Says which tensors are not there."""
    absent = [name for name in recipe.shapes if name not in stored.tensors]
    meant = did_you_mean(absent[0], stored.tensors) if hint else ""
    if len(absent) == 1:
        return f"there is no tensor {absent[0]!r} in {stored.where}{meant}"
    return (
        f"there are no tensors {absent[0]!r} and {len(absent) - 1} more in "
        f"{stored.where}{meant}"
    )


def _miss(
    plan: Plan,
    path: str,
    value: Any,
    why: str,
    shardings: Mapping[str, Any],
    options: Options,
    can_make: bool,
) -> None:
    """Notes a leaf that the checkpoint has nothing for."""
    name = f"{path} {show_shape(_shape(value))}"
    if options.missing == "keep":
        _keep(plan, path, value, why)
    elif options.missing == "error":
        plan.problems.append(f"{name}: {why}")
    elif not can_make:
        plan.problems.append(
            f'{name}: {why}; missing="init" needs a function as target, which makes '
            "it: lambda: Model(rngs=nnx.Rngs(0))"
        )
    elif path not in shardings and not plan.problems:
        plan.problems.append(
            f'{name}: {why}; missing="init" needs layout_map= to say where it goes'
        )
    else:
        plan.made[path] = shardings.get(path)


def _keep(plan: Plan, path: str, value: Any, why: str) -> None:
    """Notes a leaf that keeps the value that the target has."""
    if isinstance(value, jax.ShapeDtypeStruct):
        plan.problems.append(
            f"{path} {show_shape(value.shape)}: {why}, and the target is abstract, so "
            "there is no value to keep; give a concrete target"
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


def _add(
    plan: Plan,
    stored: Stored,
    path: str,
    recipe: Recipe,
    target: Leaf | None,
    sharding: Any,
    options: Options,
) -> None:
    """Adds a leaf to the plan, or what is wrong with its dtype."""
    shape = target.shape if target is not None else [*recipe.shapes.values()][0]
    kinds: Sequence[Any] = [
        *dict.fromkeys(stored.tensors[name].dtype for name in recipe.shapes)
    ]
    if recipe.dtype is not None:
        kinds = [recipe.dtype]
    for kind in kinds:
        held = Leaf(path, "array", shape, kind)
        result = result_of(held, target, options.dtypes.of(path))
        if isinstance(result, str):
            first = stored.tensors[next(iter(recipe.shapes))]
            plan.problems.append(f"{held.name}: {result} ({first})")
            return
        if sharding is None and target is not None and target.is_numpy:
            result = dataclasses.replace(result, is_numpy=True)
        if result.is_python or result.is_numpy:
            sharding = None
        plan.reads[path] = Read(recipe, held, result, sharding)
