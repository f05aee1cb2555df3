"""What restoring safetensors will read, and all that is wrong with it, before."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding

from flax_layoutmap._errors import CheckpointError, ResolveError, closest
from flax_layoutmap._paths import Flat, escape
from flax_layoutmap._records import show_shape
from flax_layoutmap._resolution import Resolution
from flax_layoutmap._resolve import resolve
from flax_layoutmap._rules import RuleSet
from flax_layoutmap.checkpoint._leaves import Leaf, leaf_of, result_of
from flax_layoutmap.checkpoint._mapping import NameMapping, Recipe, Source
from flax_layoutmap.checkpoint._mapping_blocks import whole
from flax_layoutmap.checkpoint._safetensors_file import Opened
from flax_layoutmap.checkpoint._selection import Selection

# Names that look alike are looked for this often; after that it would take too long.
_HINTS = 50


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
        unexpected: likewise, for tensors that no leaf is made of.
        resolution: what the rules say; None without rules, or if they do not fit.
        keys: path → keys of the nested dict, without a target.
    """

    reads: dict[str, Read] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)
    unexpected: list[str] = dataclasses.field(default_factory=list)
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
    stored: Opened, rules: RuleSet | None, selection: Selection, dtype: Any
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
    shardings = _shardings(plan.resolution)
    for path, tensor in chosen.items():
        recipe = Recipe(
            (whole(tensor.name, tensor.shape),), {tensor.name: tensor.shape}
        )
        _add(plan, stored, path, recipe, None, shardings.get(path), dtype)
    return plan


def _path_of(name: str) -> str:
    return "/".join(escape(part) for part in name.split("."))


def _check_nesting(stored: Opened, keys: Mapping[str, list[str]]) -> None:
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
    stored: Opened,
    flat: Flat,
    tree: Any,
    rules: RuleSet | None,
    names: NameMapping,
    selection: Selection,
    dtype: Any,
) -> Plan:
    """Plans to restore the leaves of a target.

    Args:
        stored: the checkpoint.
        flat: the flattened target.
        tree: the target, as it can be resolved.
        rules: the rules; None takes each leaf's own sharding.
        names: what the leaves are made of.
        selection: which leaves to restore; the others keep the target's value.
        dtype: the `dtype` argument of `restore_safetensors`.
    """
    paths = flat.full_paths()
    plan = Plan(problems=selection.useless(paths))
    shardings: Mapping[str, Any] = {}
    if rules is not None:
        try:
            plan.resolution = resolve(tree, rules)
        except ResolveError as error:
            plan.problems += error.problems or [str(error)]
        shardings = _shardings(plan.resolution)
    used: set[str] = set()
    unmapped: list[str] = []
    for path, own_path, value in zip(paths, flat.paths, flat.leaves, strict=True):
        source = names.source(own_path, path)
        recipe = None
        if source is not None:
            recipe = _recipe(plan, stored, path, source, value, path in selection)
            used.update(*([recipe.shapes] if recipe is not None else [source.names]))
        if path not in selection:
            plan.problems += _kept_problem(path, value)
            continue
        if source is None:
            unmapped.append(f"{path} {show_shape(_shape(value))}")
        leaf = leaf_of(path, value)
        if leaf is None:
            kind = type(value).__qualname__
            plan.problems.append(f"{path}: the {kind} in the target is no array")
        if recipe is None or leaf is None:
            continue
        sharding = shardings.get(path)
        if rules is None:
            sharding, problem = _own_sharding(leaf, value)
            if problem is not None:
                plan.problems.append(f"{leaf.name}: {problem}")
                continue
        _add(plan, stored, path, recipe, leaf, sharding, dtype)
    plan.problems += [
        f"{name}: no entry of the mapping matches; add (path, name of the tensor), or "
        "leave it out with exclude="
        for name in unmapped
    ]
    plan.unexpected = _unexpected(stored, used, names)
    return plan


# ------------------------------------------------------------------- details


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))


def _recipe(
    plan: Plan, stored: Opened, path: str, source: Source, value: Any, wanted: bool
) -> Recipe | None:
    """How to make a leaf; None where it cannot be, which is noted if it is wanted."""
    shape = _shape(value)
    try:
        recipes = source.recipes(shape)
    except ValueError as error:
        if wanted:
            plan.problems.append(
                f"{path} {show_shape(shape)}: the mapping's steps do not make this "
                f"shape: {error}"
            )
        return None
    for recipe in recipes:
        if all(name in stored.tensors for name in recipe.shapes):
            break
    else:
        recipe = recipes[0]
        if wanted:
            plan.problems += _missing(plan, stored, path, shape, recipe)
        return None
    wrong = [
        f"{path} {show_shape(shape)}: needs {stored.tensors[name]} to have the shape "
        f"{show_shape(needed)}; build the target with the sizes of the checkpoint, or "
        "change the steps of the mapping"
        for name, needed in recipe.shapes.items()
        if stored.tensors[name].shape != needed
    ]
    if wanted:
        plan.problems += wrong[:3]
    return None if wrong and wanted else recipe


def _missing(
    plan: Plan, stored: Opened, path: str, shape: tuple[int, ...], recipe: Recipe
) -> list[str]:
    """Problems of a leaf whose tensors are not there."""
    absent = [name for name in recipe.shapes if name not in stored.tensors]
    many = len(absent) > 1
    near = []
    if len(plan.problems) < _HINTS:
        near = closest(absent[0], stored.tensors)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    more = f" and {len(absent) - 1} more" if many else ""
    return [
        f"{path} {show_shape(shape)}: there {'are' if many else 'is'} no tensor"
        f"{'s' if many else ''} {absent[0]!r}{more} in {stored.where}{hint}"
    ]


def _kept_problem(path: str, value: Any) -> list[str]:
    if not isinstance(value, jax.ShapeDtypeStruct):
        return []
    return [
        f"{path} {show_shape(value.shape)}: include or exclude leaves it out, and the "
        "target is abstract, so there is no value to keep; give a concrete target"
    ]


def _unexpected(stored: Opened, used: set[str], names: NameMapping) -> list[str]:
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
    stored: Opened,
    path: str,
    recipe: Recipe,
    target: Leaf | None,
    sharding: Any,
    dtype: Any,
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
        result = result_of(held, target, dtype)
        if isinstance(result, str):
            first = stored.tensors[next(iter(recipe.shapes))]
            plan.problems.append(f"{held.name}: {result} ({first})")
            return
        if sharding is None and target is not None and target.is_numpy:
            result = dataclasses.replace(result, is_numpy=True)
        if result.is_python or result.is_numpy:
            sharding = None
        plan.reads[path] = Read(recipe, held, result, sharding)


def _own_sharding(leaf: Leaf, value: Any) -> tuple[Any, str | None]:
    """The sharding that a leaf of the target has, or what is wrong with it."""
    if leaf.is_python or leaf.is_numpy:
        return None, None
    sharding = value.sharding
    if sharding is None:
        return None, "the target has no sharding for it; pass layout_map="
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        return None, "the target's sharding has no devices; pass layout_map="
    try:
        sharding.shard_shape(leaf.shape)
    except ValueError as error:
        return None, f"the target's sharding does not fit it: {error}"
    return sharding, None


def _shardings(resolution: Resolution | None) -> dict[str, NamedSharding]:
    if resolution is None:
        return {}
    return dict(zip(resolution.paths, resolution.sharding_list(), strict=True))
