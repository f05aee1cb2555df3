"""Constructors in a `layout_map_scope`: traced, and what stands for their results."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from flax_layoutmap._birth.arrays import arrays_of
from flax_layoutmap._core.mesh import spread
from flax_layoutmap._tree.flax_internals import is_nnx_object, nnx_state, objects_of
from flax_layoutmap._tree.parts import objects_in
from flax_layoutmap._tree.placeholder import AfterTheScope, Fate
from flax_layoutmap._tree.trace import trace


class Together(nnx.Pytree):
    """A new object and the arguments that it may hold, as one graph."""

    def __init__(self, made: Any, inputs: Sequence[Any]) -> None:
        self.made = nnx.data(made)
        self.inputs = nnx.data(list(inputs))


class Birth:
    """A traced constructor, and the leaves that stand for what it computes.

    Attributes:
        traced: the trace.
        leaves: what stands for the values that it computes.
    """

    def __init__(self, make: Callable[..., Any], args: Any, kw: Any, fate: Fate):
        def both(*args: Any, **kw: Any) -> Any:
            return Together(make(*args, **kw), objects_in((args, kw)))

        traced = self.traced = trace(both, args, kw, own_objects=True)
        shapes = traced.values_of(jax.tree.leaves(traced.abstract))
        self.leaves = [AfterTheScope(leaf.shape, leaf.dtype, fate) for leaf in shapes]

    def objects(self) -> Together | None:
        """The new object and the arguments, with what stands for their values.

        None if they do not hold all of it: an attribute that is no Variable is no data
        for flax 0.12.4 while it is a shape.
        """
        together = self.traced.rebuild(self.traced.leaves_of(self.leaves))
        seen = set(map(id, jax.tree.leaves(nnx_state(together))))
        return together if all(id(leaf) in seen for leaf in self.leaves) else None

    def at_once(self, mesh: Mesh) -> Together:
        """The new object and the arguments, with their values, in parts on a mesh."""
        wanted = [spread(leaf.shape, mesh) for leaf in self.leaves]
        made, _ = arrays_of(self.traced, wanted)
        return self.traced.rebuild(self.traced.leaves_of(made))

    def settle(self, together: Together, nodes: Sequence[Any]) -> Any:
        """The new object; its arguments go on, as if the constructor had run.

        Args:
            together: from `objects` or `at_once`.
            nodes: the NNX objects among the arguments.
        """
        if nodes:
            _, inputs = arrays_of(self.traced, [None] * self.traced.made)
            self.traced.update_inputs(inputs)
            _replace(together.made, together.inputs, nodes)
        return together.made

    def make(
        self,
        shardings: Mapping[int, Any],
        paths: Mapping[int, str],
        values: Mapping[int, Any] | None = None,
    ) -> dict[int, Any]:
        """Id of a leaf → its value, for those that have a sharding.

        Args:
            shardings: id of a leaf → its sharding.
            paths: id of such a leaf → what to call it in the log.
            values: id of an argument that had no value → its value.
        """
        wanted = [shardings.get(id(leaf)) for leaf in self.leaves]
        traced = self.traced
        if values:
            inputs = tuple(values.get(id(x), x) for x in traced.inputs)
            traced = dataclasses.replace(traced, inputs=inputs)
        names = [paths.get(id(leaf), "") for leaf in self.leaves]
        made, _ = arrays_of(traced, wanted, names=names)
        leaves = (leaf for leaf in self.leaves if id(leaf) in shardings)
        return {id(leaf): value for leaf, value in zip(leaves, made, strict=True)}


def _replace(module: Any, copies: Sequence[Any], originals: Sequence[Any]) -> None:
    """Puts the arguments themselves where a module holds their copies."""
    own: dict[int, Any] = {}
    for copy, original in zip(copies, originals, strict=True):
        parts = zip(objects_of(copy), objects_of(original), strict=True)
        own.update({id(part): whole for part, whole in parts})
    for node in objects_of(module):
        if id(node) in own or not is_nnx_object(node):
            continue
        for name, value in vars(node).items():
            if id(value) in own:
                vars(node)[name] = own[id(value)]
