"""The structure and the values of NNX objects, and new values for them."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

# Names the `nnx.update_context` of changes of structure.
TAG = "flax_layoutmap"


class Graph:
    """NNX objects as they are at this moment.

    Attributes:
        graphdefs: the structure of each object.
        parts: the Variables, and the arrays in no Variable, in the order of the graphs.
        values: what these hold.
        leaves: the arrays in all of them; `treedef` is that of `values`.
        nodes: all objects and Variables; their order numbers them in the graphdefs.
    """

    def __init__(self, objects: Iterable[Any], tag: str | None = None) -> None:
        """Flatten the objects; `tag` names an `nnx.update_context`."""
        with nnx.split_context(tag) as splitting:
            flat = [splitting.flatten(node) for node in objects]
            self._numbers = splitting.ref_index
        self.nodes = list(self._numbers)
        self.graphdefs = tuple(graphdef for graphdef, _ in flat)
        self.parts: list[Any] = [part for _, state in flat for part in state.leaves]
        self.values = [
            part.get_raw_value() if isinstance(part, nnx.Variable) else part
            for part in self.parts
        ]
        self.leaves, self.treedef = jax.tree.flatten(self.values)

    def after(self, objects: Iterable[Any]) -> "Graph":
        """These objects now; their graphdefs tell which nodes were here before."""
        with nnx.update_context(TAG) as context:
            context.inner_ref_outer_index = self._numbers
            return Graph(objects, TAG)

    def spans(self) -> list[range]:
        """Per part, the positions of its leaves."""
        starts = [0]
        for treedef in self.treedef.children():
            starts.append(starts[-1] + treedef.num_leaves)
        return [range(a, b) for a, b in zip(starts, starts[1:], strict=False)]

    def owners(self) -> list[nnx.Variable[Any] | None]:
        """Per leaf, the Variable that holds it."""
        return [
            part if isinstance(part, nnx.Variable) else None
            for part, span in zip(self.parts, self.spans(), strict=True)
            for _ in span
        ]

    def is_like(self, other: "Graph") -> bool:
        """Whether it has the same objects, in the same structure and shapes."""
        return (
            list(map(id, self.nodes)) == list(map(id, other.nodes))
            and self.treedef == other.treedef
            and list(map(np.shape, self.leaves)) == list(map(np.shape, other.leaves))
            and _are_equal(self.graphdefs, other.graphdefs)
        )


def _are_equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except ValueError:  # constants such as NumPy arrays
        return False


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, slots=True)
class ObjectNumber:
    """Stands for an NNX object or a Variable, by its number, in a function's result."""

    number: int


def without_objects(tree: Any, nodes: Iterable[Any]) -> tuple[Any, bool]:
    """A result with `ObjectNumber` for each of these nodes, and whether there is one.

    An `nnx.State` has none: it holds values.
    """
    number = {id(node): at for at, node in enumerate(nodes)}
    replaced: list[int] = []

    def replace(node: Any) -> Any:
        if id(node) not in number:
            return node
        replaced.append(number[id(node)])
        return ObjectNumber(replaced[-1])

    def stops(node: Any) -> bool:
        return id(node) in number or isinstance(node, nnx.State)

    return jax.tree.map(replace, tree, is_leaf=stops), bool(replaced)


def with_objects(tree: Any, nodes: Sequence[Any]) -> Any:
    """The result again; the inverse of `without_objects`."""
    return jax.tree.map(
        lambda node: nodes[node.number] if isinstance(node, ObjectNumber) else node,
        tree,
        is_leaf=lambda node: isinstance(node, ObjectNumber),
    )
