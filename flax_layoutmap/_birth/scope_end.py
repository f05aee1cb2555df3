"""The end of a `layout_map_scope` block: objects → models → layouts → arrays."""

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from flax_layoutmap._birth.create import hashes_of, made_from, refuse_unfit
from flax_layoutmap._birth.scope_birth import AfterTheScope, Birth, BlockState
from flax_layoutmap._birth.scope_optimizer import Follower
from flax_layoutmap._core.errors import StructureError, warn
from flax_layoutmap._core.processes import Agreement, Parts, digest_of_value
from flax_layoutmap._place.annotations import settle_metadata
from flax_layoutmap._place.place import put
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.resolve import remember_rules, resolve
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.flax_internals import is_nnx_object, nnx_state, objects_of
from flax_layoutmap._tree.graph import update
from flax_layoutmap._tree.objects import arrays_as_data, refuse_left_over


@dataclasses.dataclass(frozen=True)
class Made:
    """What was made in a block.

    Attributes:
        rules: the rules of the block.
        block: its state.
        births: the constructors that were traced.
        modules: the modules.
        followers: the optimizers.
        settled: arrays that an inner block has laid out.
        parts: ids of the modules and their parts, those of inner blocks too.
        hidden: names of classes, and how many were made inside of a transformation.
    """

    rules: RuleSet
    block: BlockState
    births: tuple[Birth, ...]
    modules: tuple[Any, ...]
    followers: tuple[Follower, ...]
    settled: tuple[Any, ...]
    parts: frozenset[int]
    hidden: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class _Model:
    """A finished model, as far as no inner block has laid it out.

    Attributes:
        root: the module.
        state: its Variables and arrays.
        leaves: their values.
        paths: where these are.
    """

    root: Any
    state: Any
    leaves: Sequence[Any]
    paths: Sequence[str]


@dataclasses.dataclass(frozen=True)
class _Layouts:
    """The layouts of what was made.

    Attributes:
        models: each model with its Resolution.
        followers: each optimizer with its own state and the Resolution of that.
        shardings: id of a leaf → its sharding.
        paths: id of a leaf → its path.
    """

    models: Sequence[tuple[_Model, Resolution]]
    followers: Sequence[tuple[Follower, Any, Resolution]]
    shardings: Mapping[int, Any]
    paths: Mapping[int, str]


def fill(made: Made) -> list[Any]:
    """Make the arrays of a block; return all that are laid out now."""
    models = _models(made)
    layouts = _layouts(made, models)
    return [*_arrays(made, layouts), *made.settled]


def _models(made: Made) -> list[_Model]:
    """The modules that are part of no other one, and what is to be laid out of them.

    Raises:
        StructureError: a model would keep a value that is not made.
    """
    for module in made.modules:
        arrays_as_data(module, AfterTheScope)  # a value of the block was set
    graphs = {id(module): objects_of(module) for module in made.modules}
    inner = {
        id(node)
        for module in made.modules
        for node in graphs[id(module)]
        if node is not module
    }
    roots = [module for module in made.modules if id(module) not in inner]
    _warn_of_lost(made, [node for root in roots for node in graphs[id(root)]])
    models = []
    for root in roots:
        state = _own(made, nnx_state(root))
        if jax.tree.leaves(state):
            flat = flatten(state)
            _check_complete(made, graphs[id(root)], flat.leaves, flat.paths)
            models.append(_Model(root, state, flat.leaves, flat.paths))
    return models


def _own(made: Made, state: Any) -> Any:
    """A State without what an inner block has laid out, or an outer one will."""
    settled = set(map(id, made.settled))

    def is_others(leaf: Any) -> bool:
        if isinstance(leaf, AfterTheScope) and leaf.block is not made.block:
            return leaf.block.stage == "open"
        return id(leaf) in settled

    return nnx.from_flat_state(
        (path, part)
        for path, part in nnx.to_flat_state(state)
        if not all(map(is_others, jax.tree.leaves(part)))
        and not any(follower.owns(part) for follower in made.followers)
    )


def _check_complete(
    made: Made, nodes: Iterable[Any], leaves: Sequence[Any], paths: Sequence[str]
) -> None:
    """Raise where a model would keep a value that is not made."""
    for leaf, path in zip(leaves, paths, strict=True):
        if isinstance(leaf, AfterTheScope) and leaf.block is not made.block:
            raise StructureError(leaf.why_not())
        refuse_left_over(leaf, f"{path or 'the model'} is")
    for node in filter(is_nnx_object, nodes):
        for name, value in vars(node).items():
            if isinstance(value, AfterTheScope):
                if name not in map(str, nnx_state(node)):
                    raise StructureError(
                        f"{type(node).__name__}.{name} was set to a value of the "
                        "layout_map_scope block, where this version of flax sees no "
                        "array: set an nnx.Variable, or set it after the block"
                    )


def _warn_of_lost(made: Made, nodes: Iterable[Any]) -> None:
    """Warn of modules that were made inside of a transformation, and are lost."""
    others = {id(node): node for node in nodes if id(node) not in made.parts}
    found = collections.Counter(type(node).__name__ for node in others.values())
    lost = [name for name, count in made.hidden.items() if found[name] < count]
    if lost:
        warn(
            f"layout_map_scope: {', '.join(lost)} was made inside of a "
            "transformation (nnx.vmap, jax.jit) and is part of no model of the "
            "block, so it stays where it was made, unless it is abstract "
            "(nnx.eval_shape): make it in the __init__ of a module, or with "
            "flm.create(make, layout_map)"
        )


def _layouts(made: Made, models: Sequence[_Model]) -> _Layouts:
    """Resolve the models, then the optimizers; all processes agree on the result."""
    shardings: dict[int, Any] = {}
    paths: dict[int, str] = {}
    with Agreement("creating the models of a scope", made.rules.mesh) as agreement:
        found = [resolve(model.state, made.rules) for model in models]
        for model, resolution in zip(models, found, strict=True):
            names = resolution.paths
            refuse_unfit(names, model.leaves, "layout_map_scope")
            wanted = zip(model.leaves, resolution.sharding_list(), names, strict=True)
            for leaf, sharding, name in wanted:
                shardings.setdefault(id(leaf), sharding)
                paths.setdefault(id(leaf), name)
        following = [
            (follower, *plan)
            for follower in made.followers
            if (plan := follower.resolve(made.rules, shardings)) is not None
        ]
        plans = [resolution for _, _, resolution in following]
        every = [*found, *plans]
        leaves = [leaf for model in models for leaf in model.leaves]
        leaves += [leaf for _, state, _ in following for leaf in flatten(state).leaves]
        births = [*made.births, *(f.birth for f, _, _ in following if f.birth)]
        agreement.add(lambda: _made_from(births, leaves, every))
        for number, resolution in enumerate(every):
            group = found if number < len(found) else plans
            resolution.announce(besides=[f for f in group if f is not resolution])
            parts = resolution.fingerprint_lines
            agreement.add(lambda p=parts, n=number: _numbered(p(), n))
    return _Layouts(list(zip(models, found, strict=True)), following, shardings, paths)


def _made_from(
    births: Sequence[Birth], leaves: Sequence[Any], found: Sequence[Resolution]
) -> Parts:
    """What the leaves of all models are made from; their values, if they are here."""
    hashes: dict[int, str] = {}
    for birth in births:
        hashes |= zip(map(id, birth.leaves), hashes_of(birth.traced), strict=True)
    paths = [
        f"model {at}: {path}" for at, one in enumerate(found) for path in one.paths
    ]
    own = [hashes.get(id(leaf)) or digest_of_value(leaf) for leaf in leaves]
    return made_from(paths, own)


def _numbered(parts: Mapping[str, list[str]], number: int) -> dict[str, list[str]]:
    return {f"model {number}: {name}": part for name, part in parts.items()}


def _arrays(made: Made, layouts: _Layouts) -> list[Any]:
    """Make the arrays, and give them to the models and then to the optimizers."""
    values: dict[int, Any] = {}
    for birth in made.births:
        values |= birth.make(layouts.shardings, layouts.paths)
    arrays: list[Any] = []
    for model, resolution in layouts.models:
        new = [
            # An abstract leaf of the user's own stays one.
            leaf
            if type(leaf) is jax.ShapeDtypeStruct
            else put(values.get(id(leaf), leaf), own)
            for leaf, own in zip(model.leaves, resolution.sharding_list(), strict=True)
        ]
        update(model.root, jax.tree.unflatten(jax.tree.structure(model.state), new))
        settle_metadata(model.state, resolution)  # its Variables are the model's own
        remember_rules(model.root, resolution.rules)
        for leaf, array in zip(model.leaves, new, strict=True):
            values.setdefault(id(leaf), array)
        arrays += new
    for follower, state, resolution in layouts.followers:
        arrays += follower.fill(state, resolution, values)
    return arrays
