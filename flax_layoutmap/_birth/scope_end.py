"""The end of a `layout_map_scope` block: objects → models → layouts → arrays.

The state of an `nnx.Optimizer` made in the block follows the parameters. If its model
has no values yet, the optimizer is traced, as a model is, and its state is computed
after the model.
"""

import collections
import dataclasses
import inspect
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from flax_layoutmap._birth.create import layouts_of, refuse_unfit
from flax_layoutmap._birth.scope_birth import AfterTheScope, Birth, BlockState
from flax_layoutmap._birth.slices import trace_lines
from flax_layoutmap._core.errors import StructureError, warn
from flax_layoutmap._core.processes import Agreement
from flax_layoutmap._place.annotations import settle_metadata
from flax_layoutmap._place.place import put
from flax_layoutmap._resolve.resolution import Resolution
from flax_layoutmap._resolve.resolve import resolve, resolve_tree
from flax_layoutmap._resolve.state_dims import owner_of
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._tree.flatten import flatten
from flax_layoutmap._tree.flax_internals import (
    is_nnx_object,
    metadata_of,
    nnx_state,
    objects_of,
    variables_of,
)
from flax_layoutmap._tree.graph import update
from flax_layoutmap._tree.objects import arrays_as_data, objects_in, refuse_left_over

# ---------------------------------------------------------------------- optimizers

_FROM_PARAMETER = ("out_sharding", "sharding_rules")


class Follower:
    """An optimizer of a block.

    Attributes:
        models: the objects that it was made from; they live as long as it does.
        birth: the traced constructor; None if the state has values already.
    """

    def __init__(
        self, optimizer: Any, cls: type, args: Any, kw: Any, birth: Birth | None = None
    ) -> None:
        self.models = objects_in((args, kw))
        self._optimizer = weakref.ref(optimizer)
        self._name = cls.__name__
        self._model = _model_among(cls, args, kw)
        others = {id(v) for node in self.models for v in variables_of(node)}
        self._own = {id(v) for v in variables_of(optimizer)} - others
        self.birth = birth
        # The parameters by path: one may be given another value later.
        self._before = {} if self._model is None else _leaves(self._params(optimizer))

    def _params(self, optimizer: Any) -> Any:
        return nnx_state(self._model, optimizer.wrt)

    @property
    def optimizer(self) -> Any:
        """The optimizer; None if it was garbage collected."""
        return self._optimizer()

    def owns(self, part: Any) -> bool:
        """Whether a Variable is the optimizer's own, and not its model's."""
        return id(part) in self._own

    def resolve(
        self, rules: RuleSet, shardings: dict[int, Any]
    ) -> tuple[Any, Resolution] | None:
        """Its own state with its Resolution; None if the model is on no mesh.

        `shardings` maps the id of a leaf of a model to its sharding; leaves that the
        state is computed from are added.

        Raises:
            StructureError: a parameter of it is part of no model.
        """
        optimizer = self.optimizer
        state = nnx.from_flat_state(
            (path, part)
            for path, part in nnx.to_flat_state(nnx_state(optimizer))
            if self.owns(part)
        )
        if self._model is None:
            resolution = resolve(optimizer, rules)
        else:
            params = self._params(optimizer)
            placed = jax.tree.map(lambda leaf: _placed(leaf, shardings), params)
            self._check_placed(placed)
            known = [leaf.sharding for leaf in jax.tree.leaves(placed)]
            if not all(known):
                return None
            # If `wrt` selects nothing, there are only counters.
            layouts, mesh = layouts_of(placed) if known else ([], rules.mesh)
            self._add_inputs(shardings, _leaves(placed))
            own = rules.with_changes(rules=(), names=(), activations=())
            resolution = resolve_tree(
                state, own.on(mesh), params, optimizer.tx, layouts
            )
        leaves = flatten(state).leaves
        for leaf, wanted in zip(leaves, resolution.sharding_list(), strict=True):
            shardings[id(leaf)] = wanted
        return state, resolution

    def _add_inputs(self, shardings: dict[int, Any], now: Mapping[str, Any]) -> None:
        """Add values that are in no model any more, but that the state may need."""
        for path, leaf in self._before.items():
            if isinstance(leaf, AfterTheScope) and path in now:
                if now[path].shape == leaf.shape:
                    shardings.setdefault(id(leaf), now[path].sharding)

    def _check_placed(self, params: Any) -> None:
        """Raise where a parameter will have no value."""
        for path, leaf in _leaves(params).items():
            if isinstance(leaf, AfterTheScope):
                raise StructureError(
                    f"the {self._name} made in the layout_map_scope block trains "
                    f"{path} {tuple(leaf.shape)}, which is part of no model at its "
                    "end: keep the model, or make the optimizer after the block"
                )

    def fill(
        self, state: Any, resolution: Resolution, values: dict[int, Any]
    ) -> list[Any]:
        """Make its state, or move it, and update the optimizer; return the arrays.

        `state` and `resolution` are from `resolve`; `values` maps the id of a leaf to
        its array, and the new ones are added.
        """
        leaves, shardings = flatten(state).leaves, resolution.sharding_list()
        if self.birth is not None:
            own = dict(zip(map(id, leaves), shardings, strict=True))
            values |= self.birth.make(own, values)
        new = [
            put(values.get(id(leaf), leaf), own)
            for leaf, own in zip(leaves, shardings, strict=True)
        ]
        treedef = jax.tree.structure(state)
        nnx.update(self.optimizer, jax.tree.unflatten(treedef, new))
        self._settle_metadata(state)
        return new

    def _settle_metadata(self, state: Any) -> None:
        """Update metadata that Flax copied from parameters before a rule changed it."""
        if self._model is None:
            return
        flat = nnx.to_flat_state(self._params(self.optimizer))
        owners = {"/".join(map(str, path)): variable for path, variable in flat}
        for path, part in nnx.to_flat_state(state):
            owner = owner_of("/".join(map(str, path)), owners)
            if owner is None or not isinstance(part, nnx.Variable):
                continue
            known = metadata_of(owners[owner])
            if "optimizer_sharding" in known:
                continue
            for name in _FROM_PARAMETER:
                if name in known and name in metadata_of(part):
                    part.set_metadata(name, known[name])


def _leaves(tree: Any) -> dict[str, Any]:
    """Path → leaf."""
    flat = flatten(tree)
    return dict(zip(flat.paths, flat.leaves, strict=True))


def _placed(leaf: Any, shardings: Mapping[int, Any]) -> Any:
    """A parameter in its final sharding; without one if that is on no mesh."""
    own = shardings.get(id(leaf))
    if own is None:
        if isinstance(leaf, AfterTheScope):
            return leaf
        own = getattr(leaf, "sharding", None)
        if not isinstance(own, NamedSharding) or not isinstance(own.mesh, Mesh):
            own = None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=own)


def _model_among(cls: type, args: Sequence[Any], kw: Mapping[str, Any]) -> Any:
    """The argument that an optimizer trains; None if it makes its model itself."""
    try:
        given = inspect.signature(cls.__init__).bind(None, *args, **kw).arguments
    except (TypeError, ValueError):
        given = dict(kw)
    if "model" in given:
        return given["model"]
    of_kind = [
        node
        for node in [*args, *kw.values()]
        if isinstance(node, nnx.State)
        or (is_nnx_object(node) and not isinstance(node, nnx.Rngs))
    ]
    return of_kind[0] if of_kind else None


# ------------------------------------------------------------------------- models


@dataclasses.dataclass(frozen=True)
class Made:
    """What was made in a block.

    Attributes:
        births: the traced constructors.
        followers: the optimizers.
        settled: arrays that an inner block has laid out.
        parts: ids of the modules and their parts, those of inner blocks too.
        hidden: class names → how many were made inside a transformation.
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
    """A finished model, without what an inner block has laid out."""

    root: Any
    state: Any
    leaves: Sequence[Any]
    paths: Sequence[str]


@dataclasses.dataclass(frozen=True)
class _Layouts:
    """Each model with its Resolution, each optimizer with its own state and Resolution.

    `shardings` and `paths` are those of each leaf, by its id.
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
    """The modules that are part of no other one, and their state to lay out.

    Raises:
        StructureError: a model would keep a placeholder.
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
    """Raise where a model would keep a placeholder."""
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
    """Warn of modules that were made inside a transformation, and are not laid out."""
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
        births = [*made.births, *(f.birth for f, _, _ in following if f.birth)]
        lines = (line for birth in births for line in trace_lines(birth.traced))
        agreement.add(lambda: {"keys and constants": list(lines)})
        for number, resolution in enumerate(every):
            group = found if number < len(found) else plans
            resolution.announce(besides=[f for f in group if f is not resolution])
            parts = resolution.fingerprint_lines
            agreement.add(lambda p=parts, n=number: _numbered(p(), n))
    return _Layouts(list(zip(models, found, strict=True)), following, shardings, paths)


def _numbered(parts: Mapping[str, list[str]], number: int) -> dict[str, list[str]]:
    return {f"model {number}: {name}": part for name, part in parts.items()}


def _arrays(made: Made, layouts: _Layouts) -> list[Any]:
    """Make the arrays, and assign them to the models and then to the optimizers."""
    values: dict[int, Any] = {}
    for birth in made.births:
        values |= birth.make(layouts.shardings)
    arrays: list[Any] = []
    for model, resolution in layouts.models:
        new = [
            # A user's own abstract leaf stays abstract.
            leaf
            if type(leaf) is jax.ShapeDtypeStruct
            else put(values.get(id(leaf), leaf), own)
            for leaf, own in zip(model.leaves, resolution.sharding_list(), strict=True)
        ]
        update(model.root, jax.tree.unflatten(jax.tree.structure(model.state), new))
        settle_metadata(model.state, resolution)  # its Variables are the model's own
        for leaf, array in zip(model.leaves, new, strict=True):
            values.setdefault(id(leaf), array)
        arrays += new
    for follower, state, resolution in layouts.followers:
        arrays += follower.fill(state, resolution, values)
    return arrays
