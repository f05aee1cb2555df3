"""Flatten a tree node by node, for every kind of node."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.core import FrozenDict
from flax.core.meta import AxisMetadata
from flax.nnx import OptState, RngState

from flax_layoutmap._core.errors import StructureError
from flax_layoutmap._tree.flax_internals import is_nnx_object, metadata_of, nnx_state
from flax_layoutmap._tree.paths import (
    LAYOUT_METADATA,
    Block,
    Flat,
    Names,
    Role,
    Roots,
    Section,
    is_optax_state,
    is_optimizer,
    is_optimizer_with_model,
    is_train_state,
    key_of,
)

# What a node of some type is; found once per type and walk.
_LEAF, _DICT, _MAPPING, _BOX, _NONE, _OTHER = range(6)


class Walk:
    """Flattens one tree: a loop over plain containers, methods for other types.

    Faster than `tree_flatten_with_path`: a parent's path is made once, not once per
    leaf, and no key objects are made.
    """

    def __init__(self, fold: Callable[[str], str]) -> None:
        self.flat = Flat()
        self.kinds: dict[type, int] = {}
        self.names = Names(fold)
        self.box_roles: dict[type, tuple[bool, bool]] = {}
        self.base = ""  # prefix of the current section
        self.unseen = 0  # how many characters of it rules do not see
        self.role: Role = "parameter"
        self.start = 0
        self.node: Any = None

    def flatten(self, tree: Any) -> Flat:
        self.root(tree, is_whole=True)
        self._close()
        return self.flat

    # ---------------------------------------------------------------- sections

    def _close(self) -> None:
        stop = len(self.flat.paths)
        if stop > self.start:
            own = self.base, self.role, self.node, self.unseen
            self.flat.sections.append(Section(self.start, stop, *own))
        self.start = stop

    def section(
        self, prefix: str, role: Role, node: Any, tree: Any, is_whole: bool = False
    ) -> None:
        """Walk `tree` as a section of its own, below the current one."""
        self._close()
        before = self.base, self.role, self.node
        self.base, self.role, self.node = self.base + prefix, role, node
        self.root(tree, is_whole)
        self._close()
        self.base, self.role, self.node = before

    def root(self, tree: Any, is_whole: bool = False) -> None:
        """Walk a tree whose paths start here; `is_whole` for the user's whole tree."""
        if isinstance(tree, Roots):
            for name, part in tree.trees.items():
                role: Role = "optimizer" if name == "opt_state" else "parameter"
                self.unseen = 0 if _is_of_flax(part) else len(name) + 1
                self.section(f"{name}/", role, None, part, is_whole=True)
            return
        if is_train_state(tree):
            self.train_state(tree)
            return
        if self.role != "optimizer" and is_optax_state(tree):
            self._close()
            self.role = "optimizer"
        is_tree = self.separate(tree, is_whole)
        if is_tree is None:
            self.walk(tree, "", "")
        else:
            self.split(tree, is_tree)

    def separate(self, tree: Any, is_whole: bool) -> Callable[[Any, Any], bool] | None:
        """Which children, by key and value, are separate trees; None: not any."""
        is_state = isinstance(tree, nnx.State)
        if is_state and self.is_optimizer_with_model(tree):
            return _is_model
        if self.role != "parameter" or not isinstance(tree, Mapping):
            return None
        if not is_state and "params" in tree:
            return self.is_params  # Linen variables
        if self.holds_optimizer(tree):  # States of several NNX objects
            return lambda _, child: isinstance(child, Mapping)
        if is_whole and not is_state and any(map(self.is_variables, tree.values())):
            # `{"model": variables, "step": 3}`
            return lambda _, child: self.is_variables(child)
        return None

    def split(
        self, tree: Mapping[Any, Any], is_tree: Callable[[Any, Any], bool]
    ) -> None:
        """Walk a mapping of which some children are separate trees."""
        for key in self.ordered(tree, ""):
            child, name = tree[key], self.names[key]
            if is_tree(key, child):
                self.section(f"{name[0]}/", "parameter", None, child)
            else:
                self.child(child, name, "", "")

    def is_params(self, key: Any, child: Any) -> bool:
        """Whether a child of Linen variables is its parameters."""
        return key == "params" and self.kind(child) != _LEAF

    def is_variables(self, node: Any) -> bool:
        """Whether a node is Linen variables (or a dict of `params` and others)."""
        if self.kind(node) not in (_DICT, _MAPPING) or isinstance(node, nnx.State):
            return False
        return isinstance(node.get("params"), Mapping)

    def holds_optimizer(self, tree: Mapping[Any, Any]) -> bool:
        """Whether a child is the state of an `nnx.Optimizer` (or a TrainState's)."""
        children = tree.raw_mapping if isinstance(tree, nnx.State) else tree
        return any(
            self.kind(child) in (_DICT, _MAPPING)
            and ("opt_state" in child or isinstance(child.get("step"), OptState))
            for child in children.values()
        )

    def is_optimizer_with_model(self, tree: nnx.State) -> bool:
        """Whether a State is that of an `nnx.ModelAndOptimizer`."""
        if self.role == "optimizer":
            return is_optimizer_with_model(self.node) and "model" in tree
        if "model" not in tree or not isinstance(tree.get("step"), OptState):
            return False
        # An optimizer without state has no opt_state.
        return set(tree) <= {"model", "opt_state", "step"}

    def train_state(self, state: Any) -> None:
        """Parameters are named within `params/`; `opt_state` belongs to them."""
        for entry, child in self.one_level(state, ""):
            key = key_of(entry)
            if self.is_params(key, child):
                self.section("params/", "parameter", None, child)
            elif key == "opt_state":
                self.section("opt_state/", "optimizer", state, child)
            else:
                self.child(child, self.names[key], "", "")

    # ---------------------------------------------------------------- the walk

    def kind(self, node: Any) -> int:
        node_type = type(node)
        found = self.kinds.get(node_type)
        if found is None:
            found = self.kinds[node_type] = _kind_of(node)
        return found

    def walk(self, node: Any, prefix: str, folded: str) -> None:
        """Walk a node whose children have paths that start with `prefix`."""
        kind = self.kind(node)
        if kind == _DICT or kind == _MAPPING:
            self.mapping(_inside(node), prefix, folded)
        elif kind == _LEAF:
            # The whole section is one leaf: its path is empty but for its prefix.
            self.leaf(node, prefix.removesuffix("/"), folded.removesuffix("/"))
        elif kind == _BOX:
            self.box(node, prefix.removesuffix("/"), folded.removesuffix("/"))
        elif kind == _OTHER:
            self.other(node, prefix, folded)

    def mapping(self, node: Any, prefix: str, folded: str) -> None:
        """Walk a dict; the hot loop, so dicts in dicts are met right here."""
        flat, kinds, names = self.flat, self.kinds, self.names
        paths, leaves = flat.paths, flat.leaves
        run: list[str] = []
        for key in self.ordered(node, prefix) if len(node) > 1 else node:
            child = node[key]
            part, short = names[key]
            kind = kinds.get(type(child))
            if kind == _LEAF:
                paths.append(prefix + part)
                leaves.append(child)
                run.append(short)
            else:
                if run:
                    self.block(folded, run)
                    run = []
                if kind == _DICT and part != "opt_state":
                    self.mapping(child, f"{prefix}{part}/", f"{folded}{short}/")
                else:
                    self.child(child, (part, short), prefix, folded)
        if run:
            self.block(folded, run)

    def block(self, folded: str, names: list[str]) -> None:
        """Note the folded paths of the last leaves."""
        start = len(self.flat.paths) - len(names)
        self.flat.blocks.append(Block(start, folded, tuple(names)))

    def child(self, node: Any, name: tuple[str, str], prefix: str, folded: str) -> None:
        kind = self.kind(node)
        part, short = name
        if kind == _LEAF:
            self.leaf(node, prefix + part, folded + short)
        elif kind == _BOX:
            self.box(node, prefix + part, folded + short)
        elif kind != _NONE and not self.special(node, part, prefix):
            below, below_folded = f"{prefix}{part}/", f"{folded}{short}/"
            if kind == _OTHER:
                self.other(node, below, below_folded)
            else:
                self.mapping(_inside(node), below, below_folded)

    def special(self, node: Any, part: str, prefix: str) -> bool:
        """Walk a node if it starts its own section, and return whether it does."""
        below = f"{prefix}{part}/"
        if self.role == "optimizer" and not is_optimizer(node):
            return False  # optax keeps moments of a module as a module
        if is_nnx_object(node):
            self.flat.has_objects = True
            role: Role = "optimizer" if is_optimizer(node) else "parameter"
            self.section(below, role, node, nnx_state(node))
        elif part == "opt_state" or is_optax_state(node):
            self.section(below, "optimizer", None, node)
        elif isinstance(node, nnx.State) or is_train_state(node):
            self.section(below, "parameter", None, node)
        else:
            return False
        return True

    def ordered(self, node: Any, prefix: str) -> Any:
        """The keys of a mapping in JAX's order."""
        keys = list(node)
        if type(node) is not OrderedDict:
            try:
                keys.sort()
            except TypeError as error:
                raise StructureError(_mixed_keys(keys, prefix)) from error
        try:
            "".join(keys)
        except TypeError:  # keys other than strings, which may read the same
            self.unique([self.names[key][0] for key in keys], prefix)
        return keys

    def unique(self, parts: list[str], prefix: str) -> None:
        seen: set[str] = set()
        for part in parts:
            if part in seen:
                path = self.base + prefix + part
                raise StructureError(
                    f"two different keys both have the path {path!r} (an int and a "
                    "string, say): rename one, so that rules can distinguish them"
                )
            seen.add(part)

    def leaf(self, node: Any, path: str, folded: str) -> None:
        flat = self.flat
        flat.blocks.append(Block(len(flat.paths), folded, ("",)))
        flat.paths.append(path)
        flat.leaves.append(node)

    def box(self, node: Any, path: str, folded: str) -> None:
        """A Variable or Linen box: its content has the path of the box."""
        flat, start = self.flat, len(self.flat.paths)
        if isinstance(node, nnx.Variable):
            metadata = metadata_of(node)
            # An empty tuple has a meaning too: replicated.
            annotated = any(metadata.get(key) is not None for key in LAYOUT_METADATA)
            content = node.get_raw_value()
        else:
            annotated = True
            content = node.value  # pyright: ignore[reportAttributeAccessIssue]
        flag = self.box_roles.get(type(node))
        if flag is None:
            flag = self.box_roles[type(node)] = (
                isinstance(node, OptState),
                isinstance(node, RngState),
            )
        if flag[0] and self.role != "optimizer":
            self._close()
            before, self.role = self.role, "optimizer"
            self.content(content, path, folded)
            self._close()
            self.role = before
        else:
            self.content(content, path, folded)
        if flag[1]:
            flat.fixed.update(range(start, len(flat.paths)))
        if annotated and len(flat.paths) == start + 1:
            flat.annotations[start] = node

    def content(self, node: Any, path: str, folded: str) -> None:
        if self.kind(node) == _LEAF:
            self.leaf(node, path, folded)
        else:
            below = f"{path}/" if path else ""
            self.walk(node, below, f"{folded}/" if folded else "")

    def other(self, node: Any, prefix: str, folded: str) -> None:
        """Lists, tuples, NNX objects, and every other registered node."""
        if is_nnx_object(node):
            self.flat.has_objects = True
            state = nnx_state(node)
            if is_optimizer(node):
                self._close()
                self.role, self.node = "optimizer", node
                if not prefix and self.is_optimizer_with_model(state):
                    self.split(state, _is_model)
                    return
            self.walk(state, prefix, folded)
            return
        if type(node) in (list, tuple):
            for index, child in enumerate(node):
                self.child(child, self.names[index], prefix, folded)
            return
        children = self.one_level(node, prefix)
        self.unique([self.names[key_of(entry)][0] for entry, _ in children], prefix)
        for entry, child in children:
            self.child(child, self.names[key_of(entry)], prefix, folded)

    def one_level(self, node: Any, prefix: str) -> list[tuple[Any, Any]]:
        """The children of any registered node, with their key entries."""
        try:
            children, _ = jax.tree_util.tree_flatten_with_path(
                node, is_leaf=lambda child: child is not node
            )
        except (TypeError, ValueError) as error:
            where = (self.base + prefix).removesuffix("/") or "the tree"
            raise StructureError(f"{where} cannot be flattened: {error}") from error
        return [(key[0] if key else "", child) for key, child in children]


def _is_model(key: Any, child: Any) -> bool:
    """Whether a child of the State of an `nnx.ModelAndOptimizer` is the model."""
    return key == "model" and isinstance(child, nnx.State)


def _is_of_flax(node: Any) -> bool:
    """Whether a node is a module, a State or a TrainState, and no mere container."""
    return is_nnx_object(node) or isinstance(node, nnx.State) or is_train_state(node)


def _inside(node: Any) -> Any:
    """The plain dict in a State; other mappings as they are."""
    return node.raw_mapping if isinstance(node, nnx.State) else node


def _kind_of(node: Any) -> int:
    if isinstance(node, nnx.Variable):
        return _BOX
    if isinstance(node, AxisMetadata) and hasattr(node, "value"):
        return _BOX
    if type(node) in (dict, OrderedDict):
        return _DICT
    if isinstance(node, nnx.State | FrozenDict):
        return _MAPPING
    if node is None:
        return _NONE
    if isinstance(node, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return _LEAF
    if is_nnx_object(node):
        return _OTHER
    return _LEAF if jax.tree_util.all_leaves([node]) else _OTHER


def _mixed_keys(keys: list[Any], prefix: str) -> str:
    kinds = sorted({type(key).__name__ for key in keys})
    where = prefix.removesuffix("/") or "the tree"
    return (
        f"{where} has keys of types that cannot be sorted together ({', '.join(kinds)}:"
        f" {keys[:4]!r}), so JAX cannot flatten it: use keys of one type"
    )
