"""The structure and the values of NNX objects, shared Variables, and constants."""

import dataclasses
import io
import itertools
import pickle
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from flax_layoutmap._tree.flax_internals import children_of, is_nnx_object
from flax_layoutmap._tree.paths import Flat, join_keys

# Names the `nnx.update_context` of changes of structure.
TAG = "flax_layoutmap"


class Graph:
    """A snapshot of NNX objects.

    Attributes:
        graphdefs: the structure of each object.
        parts: the Variables, and the arrays in no Variable, in the order of the graphs.
        values: the value of each part.
        leaves: the leaves of `values`, whose structure is `treedef`.
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
        """Flatten these objects; their graphdefs tell which nodes this graph has."""
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
        """Whether both have the same objects, with the same structure and shapes."""
        return (
            list(map(id, self.nodes)) == list(map(id, other.nodes))
            and self.treedef == other.treedef
            and list(map(np.shape, self.leaves)) == list(map(np.shape, other.leaves))
            and _are_equal(self.graphdefs, other.graphdefs)
        )


def _are_equal(first: Any, second: Any) -> bool:
    try:
        return bool(first == second)
    except ValueError:  # constants such as NumPy arrays
        return False


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, slots=True)
class ObjectNumber:
    """Stands for an NNX object or a Variable in a function's result, by its number."""

    number: int


def without_objects(tree: Any, nodes: Iterable[Any]) -> tuple[Any, bool]:
    """Replace these nodes in a result by `ObjectNumber`s, and tell if any were there.

    An `nnx.State` stays as it is: it holds values.
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
    """The inverse of `without_objects`."""
    return jax.tree.map(
        lambda node: nodes[node.number] if isinstance(node, ObjectNumber) else node,
        tree,
        is_leaf=lambda node: isinstance(node, ObjectNumber),
    )


# ------------------------------------------------------------- shared Variables

# Each path of a shared Variable → all of its paths.
Names = Mapping[str, tuple[str, ...]]

# The most paths of a Variable that are looked for.
_MOST_NAMES = 256


def other_names(flat: Flat, names: Names) -> dict[int, tuple[str, ...]]:
    """The other paths of shared Variables within their sections, by position."""
    others: dict[int, tuple[str, ...]] = {}
    for at, path in enumerate(flat.full_paths() if names else ()):
        if path in names:
            prefix = flat.section(at).prefix
            inside = [x for x in names[path] if x.startswith(prefix) and x != path]
            others[at] = tuple(x.removeprefix(prefix) for x in inside)
    return others


def names_of_shared(tree: Any) -> Names:
    """The paths of the shared Variables of all NNX objects in a tree."""
    names: dict[str, tuple[str, ...]] = {}
    nodes, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_nnx_object)
    for keys, node in nodes:
        if is_nnx_object(node):
            start = "".join(f"{part}/" for part in [join_keys(keys)] if keys)
            for paths in _paths_of_shared(node):
                full = tuple(start + path for path in paths)
                names |= dict.fromkeys(full, full)
    return names


def _paths_of_shared(root: Any) -> Iterator[list[str]]:
    """The paths of each Variable that an NNX object holds more than once."""
    edges: dict[int, list[tuple[int, str]]] = {id(root): []}  # node → its parents
    nodes, is_shared = [root], False
    for node in nodes:
        for keys, child in children_of(node):
            if id(child) in edges:
                is_shared = True
            else:
                edges[id(child)] = []
                nodes.append(child)
            edges[id(child)].append((id(node), join_keys(keys)))

    def paths(node: int, below: frozenset[int] = frozenset()) -> Iterator[str]:
        for parent, name in edges[node]:
            if parent == id(root):
                yield name
            elif parent not in below:  # objects may contain each other
                yield from (f"{p}/{name}" for p in paths(parent, below | {node}))

    for node in nodes if is_shared else ():
        # Rules do not apply to random state, which all layers may share.
        if isinstance(node, nnx.Variable) and not isinstance(node, nnx.RngState):
            names = [*itertools.islice(paths(id(node)), _MOST_NAMES)]
            if len(names) > 1:
                yield names


# ------------------------------------------------------------------- constants

_BY_IDENTITY = (jax.Array, nnx.Pytree, nnx.Variable)


class Uncomparable(TypeError):
    """A constant (in `args`), or a call as a whole, cannot be compared."""


def is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def contents(value: Any) -> Any:
    """A hashable description of a value: equal for values that hold the same.

    Parts are compared by `==`, hash and type; JAX arrays and NNX objects by identity;
    unhashable values by the parts that `pickle` finds. Raises Uncomparable if `pickle`
    finds none.
    """
    text = io.BytesIO()
    reader = _Reader(text, protocol=4)
    try:
        reader.dump(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise Uncomparable(reader.last) from error
    return text.getvalue(), tuple(reader.parts)


class _Reader(pickle.Pickler):
    """Writes the structure of a value; its hashable parts are collected in `parts`."""

    last: Any = None

    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.parts: list[Any] = []

    def persistent_id(self, value: Any) -> int | None:
        if isinstance(value, _BY_IDENTITY):
            # Equal only to a method of the same object, which it keeps alive.
            self.parts.append(types.MethodType(id, value))
        elif type(value) is not tuple and is_hashable(value):
            self.parts.append((type(value), value, hash(value)))
        else:
            self.last = value
            return None
        return len(self.parts)

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, jax.tree_util.PyTreeDef):
            return list, ((value.node_data(), value.children()),)
        if isinstance(value, types.MappingProxyType):
            return dict, (dict(value),)
        return NotImplemented
