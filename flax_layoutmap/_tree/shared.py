"""The other names of NNX Variables that several objects share, such as a tied table."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import nnx

from flax_layoutmap._tree.flax_internals import children_of, is_nnx_object
from flax_layoutmap._tree.paths import Flat, join_keys

# Each path of a shared Variable → all of its paths.
Names = Mapping[str, tuple[str, ...]]

# Names of one Variable that are looked for.
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
            elif parent not in below:  # an object may hold one that holds it
                yield from (f"{p}/{name}" for p in paths(parent, below | {node}))

    for node in nodes if is_shared else ():
        # No rule is for random state, which every layer may share.
        if isinstance(node, nnx.Variable) and not isinstance(node, nnx.RngState):
            some = [*itertools.islice(paths(id(node)), _MOST_NAMES)]
            if len(some) > 1:
                yield some
