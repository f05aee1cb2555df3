"""`nnx.Optimizer`s made in a `layout_map_scope`: their state follows the parameters.

Its model may have no values yet. Then the optimizer is traced, as a model is, and its
state is computed at the end of the block, after the model.
"""

import inspect
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from flax_layoutmap._birth.create import layouts_of
from flax_layoutmap._birth.scope_birth import AfterTheScope, Birth
from flax_layoutmap._core.errors import StructureError
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
    variables_of,
)
from flax_layoutmap._tree.objects import objects_in

_FROM_PARAMETER = ("out_sharding", "sharding_rules")


class Follower:
    """An optimizer of a block.

    Attributes:
        models: the objects that it was made of; they live as long as it does.
        birth: how its state is made; None if it has it already.
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
        # What it was made of, by path: a parameter may be given another value later.
        self._before = {} if self._model is None else _leaves(self._params(optimizer))

    def _params(self, optimizer: Any) -> Any:
        return nnx_state(self._model, optimizer.wrt)

    @property
    def optimizer(self) -> Any:
        """The optimizer; None if it was collected."""
        return self._optimizer()

    def owns(self, part: Any) -> bool:
        """Whether a Variable is its own, and not that of its model."""
        return id(part) in self._own

    def resolve(
        self, rules: RuleSet, shardings: dict[int, Any]
    ) -> tuple[Any, Resolution] | None:
        """Its own state with its Resolution; None where the model is on no mesh.

        Args:
            rules: the rules of the block, of which the section `optimizer` counts.
            shardings: id of a leaf of a model → its sharding. What else is needed
                to make the state is added.

        Raises:
            StructureError: what it was made of is part of no model.
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
            # Where `wrt` selects nothing, there are counters only.
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
        """Values that are in no model any more, but that the state may need."""
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
        """Make its state, or move it, and give it to the optimizer.

        Args:
            state: its own state, and
            resolution: its Resolution, both from `resolve`.
            values: id of a leaf → the array in its place; the new ones are added.

        Returns:
            All arrays of the state.
        """
        leaves, shardings = flatten(state).leaves, resolution.sharding_list()
        if self.birth is not None:
            own = dict(zip(map(id, leaves), shardings, strict=True))
            paths = dict(zip(map(id, leaves), resolution.paths, strict=True))
            values |= self.birth.make(own, paths, values)
        new = [
            put(values.get(id(leaf), leaf), own)
            for leaf, own in zip(leaves, shardings, strict=True)
        ]
        treedef = jax.tree.structure(state)
        nnx.update(self.optimizer, jax.tree.unflatten(treedef, new))
        self._settle_metadata(state)
        return new

    def _settle_metadata(self, state: Any) -> None:
        """Metadata that Flax copied from parameters, before a rule overruled it."""
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
    """A parameter in its final sharding; in none where that is on no mesh."""
    own = shardings.get(id(leaf))
    if own is None:
        if isinstance(leaf, AfterTheScope):
            return leaf
        own = getattr(leaf, "sharding", None)
        if not isinstance(own, NamedSharding) or not isinstance(own.mesh, Mesh):
            own = None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=own)


def _model_among(cls: type, args: Sequence[Any], kw: Mapping[str, Any]) -> Any:
    """The argument that an optimizer trains; None where it makes its model itself."""
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
