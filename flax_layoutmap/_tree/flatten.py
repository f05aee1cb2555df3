"""Flatten any tree: each leaf with its path, its section and its role.

The children of a node are those that JAX lists (`tree_flatten_with_path`); plain dicts
are sorted here, as JAX sorts them. The tree is cut into sections: a module inside a
dict, Linen's `params`, an optimizer state.
"""

import collections
import dataclasses
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx
from flax.core.meta import AxisMetadata
from flax.nnx import OptState, RngState

from flax_layoutmap._core.errors import StructureError
from flax_layoutmap._tree.flax_internals import is_nnx_object, metadata_of, nnx_state
from flax_layoutmap._tree.graph import Names, names_of_shared, other_names
from flax_layoutmap._tree.paths import (
    Flat,
    Role,
    Roots,
    Section,
    escape,
    is_optax_state,
    is_optimizer,
    is_optimizer_with_model,
    is_train_state,
    key_of,
)

# Metadata of a Variable about its layout.
_LAYOUT_METADATA = frozenset(("layout", "out_sharding", "sharding_names", "sharding"))


def plain_tree(tree: Any) -> Any:
    """The tree with each NNX object replaced by its `nnx.State`."""
    if is_nnx_object(tree):
        return nnx_state(tree)
    nodes, treedef = jax.tree.flatten(tree, is_leaf=is_nnx_object)
    if not any(map(is_nnx_object, nodes)):
        return tree
    return treedef.unflatten([nnx_state(x) if is_nnx_object(x) else x for x in nodes])


def flatten(tree: Any, names: Names | None = None) -> Flat:
    """Flatten any tree with its paths.

    `names` has the paths of shared Variables, if the tree does not show them.
    """
    flattening = _Flattening()
    flattening.section(tree, "", "parameter", is_root=True)
    flat = flattening.flat()
    paths = _without_saved_boxes(tree, flat)
    if flat.has_objects and names is None:
        names = names_of_shared(tree)
    if names or paths is not flat.paths:
        flat = dataclasses.replace(flat, paths=paths)
        flat = dataclasses.replace(flat, others=other_names(flat, names or {}))
    if flattening.has_odd_keys:
        _check_that_paths_differ(flat.full_paths())
    return flat


def _check_that_paths_differ(paths: Sequence[str]) -> None:
    if len(set(paths)) < len(paths):
        path = next(p for p, count in collections.Counter(paths).items() if count > 1)
        raise StructureError(
            f"two different keys both have the path {path!r} (an int and a string, for "
            "example): rename one, so that rules can distinguish them"
        )


# Kinds of nodes. Boxes are Variables (`random` for random state, `moment` for optimizer
# state) and Linen's; a `model` is an NNX object, a State or a TrainState; a
# `tuple` may be a state of optax.
_Kind = Literal[
    "leaf", "box", "random", "moment", "linen", "model", "tuple", "dict", "node"
]
_BOXES = ("box", "random", "moment", "linen")
_WHOLE = ("leaf", *_BOXES)


class _Flattening:
    """Names the leaves of one tree, section by section."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.leaves: list[Any] = []
        self.here: tuple[str, Role] = "", "parameter"  # prefix and role of the section
        self.starts: list[tuple[int, str, Role]] = [(0, *self.here)]
        self.annotations: dict[int, Any] = {}
        self.fixed: set[int] = set()
        self.nodes: dict[str, Any] = {}
        self.kinds: dict[type, _Kind] = {}
        self.parts: dict[Any, str] = {}
        self.unseen: list[str] = []
        self.has_objects = False
        self.has_odd_keys = False  # keys that are not strings, but may read the same

    def flat(self) -> Flat:
        """All leaves and sections that were added."""
        sections: list[Section] = []
        stops = [*(start for start, *_ in self.starts[1:]), len(self.paths)]
        for (start, prefix, role), stop in zip(self.starts, stops, strict=True):
            if sections and sections[-1][2:] == (prefix, role):
                start = sections.pop().start
            if start < stop:
                sections.append(Section(start, stop, prefix, role))
        return Flat(
            self.paths,
            sections,
            self.leaves,
            self.annotations,
            self.fixed,
            self.nodes,
            self.has_objects,
            self.unseen,
        )

    def enter(self, prefix: str, role: Role) -> None:
        """Start a section: leaves that are added from now on belong to it."""
        self.here = prefix, role
        self.starts.append((len(self.paths), prefix, role))

    def section(
        self, tree: Any, prefix: str, role: Role, *, is_root: bool = False
    ) -> None:
        """Add the leaves of a tree as a section.

        `is_root`: it is the user's whole tree, or one of several arguments.
        """
        if isinstance(tree, Roots):
            for name, part in tree.trees.items():
                role = "optimizer" if name == "opt_state" else "parameter"
                if self.kind(part) != "model":
                    self.unseen.append(f"{name}/")
                self.section(part, f"{prefix}{name}/", role, is_root=True)
            return
        around, separate = self.here, set[Any]()
        if is_nnx_object(tree):
            if is_optimizer(tree):
                role, self.nodes[prefix] = "optimizer", tree
                separate = {"model"} if is_optimizer_with_model(tree) else set()
            tree, self.has_objects = nnx_state(tree), True
        elif is_optax_state(tree):
            role = "optimizer"
        elif is_train_state(tree):
            self.nodes[f"{prefix}opt_state/"] = tree
        separate = separate or self.separate(tree, role, is_root)
        self.enter(prefix, role)
        if separate:
            self.split(tree, separate)
        elif self.kind(tree) in _WHOLE:
            self.add(tree, None)
        else:
            self.below(tree, "")
        self.enter(*around)

    def separate(self, tree: Any, role: Role, is_root: bool) -> set[Any]:
        """The keys of the children that are sections by themselves."""
        if is_train_state(tree):
            return self.params(tree.params)
        if role != "parameter" or not isinstance(tree, Mapping):
            return set()
        is_state = isinstance(tree, nnx.State)
        children = tree.raw_mapping if is_state else tree
        if is_state and _is_optimizer_with_model(children):
            return {"model"}
        if not is_state and "params" in tree:  # Linen variables
            return self.params(tree["params"])
        if any(map(_holds_optimizer, children.values())):  # States of NNX objects
            return {key for key, x in children.items() if isinstance(x, Mapping)}
        if is_root and not is_state:  # `{"model": variables, "step": 3}`
            return {key for key, x in children.items() if _is_variables(x)}
        return set()

    def split(self, tree: Any, separate: set[Any]) -> None:
        """Add the leaves of a tree with children that are sections by themselves."""
        prefix, _ = self.here
        for key, child in self.children(tree, ""):
            part = self.part(key)
            if key in separate and isinstance(tree, nnx.State):
                child = nnx.State(child)  # as parts of a State are
            if self.is_optimizer_state(key, child):
                self.section(child, f"{prefix}{part}/", "optimizer")
            elif key in separate:
                self.section(child, f"{prefix}{part}/", "parameter")
            else:
                self.add(child, part)

    def params(self, tree: Any) -> set[str]:
        """`"params"`, unless the parameters are a single array."""
        return set() if self.kind(tree) == "leaf" else {"params"}

    def below(self, node: Any, start: str) -> None:
        """Add the leaves below a node; the hot loop."""
        kinds, parts, is_bare = self.kinds, self.parts, _LAYOUT_METADATA.isdisjoint
        for key, child in self.children(node, start):
            path = start + (parts.get(key) or self.part(key))
            kind = kinds.get(type(child)) or self.kind(child)
            while kind == "dict" and len(child) == 1 and key != "opt_state":
                [(key, child)] = child.items()
                path += "/" + (parts.get(key) or self.part(key))
                kind = kinds.get(type(child)) or self.kind(child)
            if kind == "leaf":
                self.paths.append(path)
                self.leaves.append(child)
            elif kind == "box":
                value = child.get_raw_value()
                if kinds.get(type(value)) == "leaf" and is_bare(metadata_of(child)):
                    self.paths.append(path)
                    self.leaves.append(value)
                else:
                    self.box(child, kind, path)
            elif kind == "dict" and key != "opt_state":
                self.below(child, path + "/")
            elif self.is_optimizer_state(key, child):
                self.section(child, f"{self.here[0]}{path}/", "optimizer")
            else:
                self.add(child, path)

    def add(self, node: Any, path: str | None) -> None:
        """Add the leaves of a node; the path of a root is None, as "" may be a key."""
        kind, start = self.kind(node), "" if path is None else f"{path}/"
        prefix, role = self.here
        if kind == "leaf":
            self.paths.append(path or "")
            self.leaves.append(node)
        elif kind in _BOXES:
            self.box(node, kind, path)
        elif is_optimizer(node) if role == "optimizer" else self.is_section(node):
            self.section(node, prefix + start, "parameter")
        else:
            self.below(node, start)

    def is_optimizer_state(self, key: Any, node: Any) -> bool:
        """Whether a child is optimizer state by its name."""
        is_named = key == "opt_state" and self.here[1] == "parameter"
        return is_named and self.kind(node) not in _WHOLE

    def is_section(self, node: Any) -> bool:
        """Whether a node among parameters always starts a section."""
        kind = self.kind(node)
        return kind == "model" or (kind == "tuple" and is_optax_state(node))

    def box(self, box: Any, kind: _Kind, path: str | None) -> None:
        """Add the content of a Variable or a Linen box, under the path of the box."""
        first, around = len(self.leaves), self.here
        if kind != "linen":
            metadata, value = metadata_of(box), box.get_raw_value()
            # An empty tuple counts too: it means replicated.
            is_annotated = not _LAYOUT_METADATA.isdisjoint(metadata) and any(
                metadata.get(key) is not None for key in _LAYOUT_METADATA
            )
        else:
            value, is_annotated = box.value, True
        is_moment = kind == "moment" and around[1] != "optimizer"
        if is_moment:
            self.enter(around[0], "optimizer")
        self.add(value, path)
        if is_moment:
            self.enter(*around)
        if is_annotated and len(self.leaves) == first + 1:
            self.annotations[first] = box
        if kind == "random":
            self.fixed.update(range(first, len(self.leaves)))

    def part(self, key: Any) -> str:
        """Escape a key for a path, and remember it."""
        self.parts[key] = part = escape(key)
        self.has_odd_keys |= type(key) is not str
        return part

    def kind(self, node: Any) -> _Kind:
        kind = self.kinds.get(type(node))
        if kind is None:
            kind = self.kinds[type(node)] = _kind_of(node)
        return kind

    def children(self, node: Any, start: str) -> Iterable[tuple[Any, Any]]:
        """The children of a node with their keys, in JAX's order."""
        try:
            if type(node) is dict:
                return sorted(node.items(), key=operator.itemgetter(0))
            if is_nnx_object(node):
                node, self.has_objects = nnx_state(node), True
            if isinstance(node, nnx.State):
                return self.children(node.raw_mapping, start)
            children, _ = jax.tree_util.tree_flatten_with_path(
                node, is_leaf=lambda child: child is not node
            )
        except (TypeError, ValueError) as error:
            raise _refused(self.here[0] + start, node, error) from error
        return [(key_of(entries[0]), child) for entries, child in children if entries]


def _kind_of(node: Any) -> _Kind:
    if isinstance(node, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return "leaf"
    if isinstance(node, nnx.Variable):
        is_moment, is_random = isinstance(node, OptState), isinstance(node, RngState)
        return "moment" if is_moment else "random" if is_random else "box"
    if isinstance(node, AxisMetadata) and hasattr(node, "value"):
        return "linen"
    if is_nnx_object(node) or isinstance(node, nnx.State) or is_train_state(node):
        return "model"
    if isinstance(node, tuple):
        return "tuple"
    if type(node) is dict:
        return "dict"
    return "leaf" if jax.tree_util.all_leaves([node]) else "node"


def _is_optimizer_with_model(children: Mapping[Any, Any]) -> bool:
    """Whether these are the children of an `nnx.ModelAndOptimizer`'s State."""
    # An optimizer without state has no opt_state.
    return (
        "model" in children
        and isinstance(children.get("step"), OptState)
        and set(children) <= {"model", "opt_state", "step"}
    )


def _holds_optimizer(node: Any) -> bool:
    """Whether a node is the state of an `nnx.Optimizer` or a TrainState."""
    if not isinstance(node, Mapping):
        return False
    return "opt_state" in node or isinstance(node.get("step"), OptState)


def _is_variables(node: Any) -> bool:
    """Whether a node is Linen variables (or a dict of `params` and others)."""
    if not isinstance(node, Mapping) or isinstance(node, nnx.State):
        return False
    return isinstance(node.get("params"), Mapping)


def _refused(where: str, node: Any, error: Exception) -> StructureError:
    name = where.removesuffix("/") or "the tree"
    if isinstance(node, Mapping):
        keys = list(node)
        kinds = sorted({type(key).__name__ for key in keys})
        return StructureError(
            f"{name} has keys of types that cannot be sorted together "
            f"({', '.join(kinds)}: {keys[:4]!r}), so JAX cannot flatten it: use "
            "keys of one type"
        )
    return StructureError(f"{name} cannot be flattened: {error}")


# ------------------------------------------------------------- metadata of Orbax


def _without_saved_boxes(tree: Any, flat: Flat) -> Sequence[str]:
    """Paths in Orbax's metadata of an `nnx.State`, or of a dict of States, unboxed.

    In such metadata a Variable is a dict with the single key `value`. A parameter may
    have that name too, so it counts as a box only if every leaf of the State has it.
    """
    kinds = set(map(type, flat.leaves))
    orbax = {kind: kind.__module__.startswith("orbax.") for kind in kinds}
    if not any(orbax.values()) or not isinstance(tree, Mapping):
        return flat.paths
    folders = {escape(key) for key, x in tree.items() if isinstance(x, Mapping)}
    full, boxed = flat.full_paths(), dict[str, bool]()  # of each child of the root
    for path, value in zip(full, flat.leaves, strict=True):
        child = path.partition("/")[0]
        is_box = path.endswith("/value") and orbax[type(value)]
        boxed[child] = boxed.get(child, True) and is_box

    def is_boxed(path: str) -> bool:
        child, _, below = path.partition("/")
        is_in_state = boxed[child] and child in folders and below != "value"
        return is_in_state or all(boxed.values())

    return [
        path.removesuffix("value").removesuffix("/") if is_boxed(whole) else path
        for path, whole in zip(flat.paths, full, strict=True)
    ]
