"""Paths: one canonical string for each leaf of any tree.

A path joins the keys of a leaf by `/`: `decoder/layers/0/mlp/up/kernel`. The same
leaf has the same path whether it comes from a module, an `nnx.State`, a dict, boxed or
unboxed Linen variables, an optimizer state or a checkpoint:

- the key `value` that an NNX Variable or a Linen box adds does not appear (the type of
  the node says so, never the name);
- a module is read through `nnx.state`, so that a tied Variable appears once;
- a `/` inside a key is written `%2F`, and a `%` as `%25`, so that paths stay unique.

Rules see the path of a parameter within its own tree of parameters, so a tree is cut
into sections: a module inside a dict, Linen's `params`, an optimizer state.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx
from flax.core import FrozenDict
from flax.core.meta import AxisMetadata
from flax.nnx import OptState, RngState
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from flax_layoutmap._errors import StructureError
from flax_layoutmap._flax_internals import is_nnx_object, metadata_of, nnx_state

Role = Literal["parameter", "optimizer", "other"]

# Metadata of a Variable that says something about its layout.
LAYOUT_METADATA = ("layout", "out_sharding", "sharding_names", "sharding")


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """A run of leaves whose paths start at one node.

    Attributes:
        start: position of the first leaf.
        stop: position after the last leaf.
        prefix: what the path of the whole tree has before the section's own paths.
        role: what the leaves are.
        node: the object, for an optimizer or a train state; else None.
    """

    start: int
    stop: int
    prefix: str
    role: Role
    node: Any = None


@dataclasses.dataclass(slots=True)
class Flat:
    """A tree, flattened: columns with one entry per leaf, in JAX's leaf order.

    Attributes:
        paths: path of each leaf within its section.
        names: last part of each path, folded.
        runs: (start, folded path of the parent with a final `/`) of each run of
            leaves with one parent.
        leaves: the leaves themselves.
        sections: the sections, in order, without gaps.
        annotations: position → the Variable or box with layout metadata.
        fixed: positions of leaves that no rule may shard (random state).
        has_objects: whether NNX objects were read through `nnx.state`.
    """

    paths: list[str] = dataclasses.field(default_factory=list)
    names: list[str] = dataclasses.field(default_factory=list)
    runs: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    leaves: list[Any] = dataclasses.field(default_factory=list)
    sections: list[Section] = dataclasses.field(default_factory=list)
    annotations: dict[int, Any] = dataclasses.field(default_factory=dict)
    fixed: set[int] = dataclasses.field(default_factory=set)
    has_objects: bool = False

    def full_paths(self) -> list[str]:
        """Path of each leaf within the whole tree."""
        if all(not section.prefix for section in self.sections):
            return self.paths
        full: list[str] = []
        for section in self.sections:
            prefix = section.prefix
            own = self.paths[section.start : section.stop]
            full.extend(prefix + p if p else prefix.removesuffix("/") for p in own)
        return full


@jax.tree_util.register_pytree_with_keys_class
class Roots:
    """Several trees under names, such as the arguments of a function.

    Unlike in a dict, rules see the path of a parameter within its own tree.
    """

    def __init__(self, trees: Mapping[str, Any]) -> None:
        self.trees = dict(trees)

    def tree_flatten_with_keys(self) -> tuple[list[Any], tuple[str, ...]]:
        """Children in the order given; the names are static."""
        children = [(DictKey(name), tree) for name, tree in self.trees.items()]
        return children, tuple(self.trees)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], trees: Any) -> "Roots":
        """The inverse."""
        return cls(dict(zip(names, trees, strict=True)))


def escape(key: object) -> str:
    """One part of a path, from one key."""
    text = key if isinstance(key, str) else str(key)
    if "/" in text or "%" in text:
        text = text.replace("%", "%25").replace("/", "%2F")
    return text


def unescape(part: str) -> str:
    """The key that `escape` made a part of."""
    return part.replace("%2F", "/").replace("%25", "%")


def key_of(entry: Any) -> Any:
    """The bare key in one entry of a JAX key path."""
    if isinstance(entry, DictKey | FlattenedIndexKey):
        return entry.key
    if isinstance(entry, SequenceKey):
        return entry.idx
    if isinstance(entry, GetAttrKey):
        return entry.name
    return str(entry).strip(".[]'\"")


def join_keys(entries: Any) -> str:
    """The path of a JAX key path."""
    return "/".join(escape(key_of(entry)) for entry in entries)


def plain_tree(tree: Any) -> Any:
    """The tree with each NNX object replaced by its `nnx.State`."""
    if is_nnx_object(tree):
        return nnx_state(tree)
    return jax.tree.map(
        lambda node: nnx_state(node) if is_nnx_object(node) else node,
        tree,
        is_leaf=is_nnx_object,
    )


def flatten(tree: Any, fold: Callable[[str], str] = str) -> Flat:
    """Flattens any tree with its paths.

    Args:
        tree: the tree.
        fold: makes parts of paths that are to be one question equal; see `Folding`.

    Raises:
        StructureError: two leaves would have one path, or a node cannot be flattened.
    """
    flat = _Walk(fold).flatten(tree)
    plain = _saved_state(tree, flat)
    return flat if plain is tree else _Walk(fold).flatten(plain)


def _saved_state(tree: Any, flat: Flat) -> Any:
    """Orbax's metadata of an `nnx.State`, or of a dict of some, without the boxes.

    There the Variables have become dicts with the one key `value`. A single parameter
    may be called so; where every leaf is, these are the boxes. Other trees stay.
    """
    types = {
        kind: kind.__module__.startswith("orbax.")
        for kind in set(map(type, flat.leaves))
    }
    if not isinstance(tree, Mapping) or not any(types.values()):
        return tree
    boxed: dict[str, bool] = {}  # of each child of the root
    for path, leaf in zip(flat.full_paths(), flat.leaves, strict=True):
        child = path.partition("/")[0]
        is_box = path.endswith("/value") and types[type(leaf)]
        boxed[child] = boxed.get(child, True) and is_box
    if all(boxed.values()):
        return _without_saved_boxes(tree)
    children = {
        key: _without_saved_boxes(child)
        for key, child in tree.items()
        if boxed.get(escape(key))
        and isinstance(child, Mapping)
        and set(child) != {"value"}
    }
    return {**tree, **children} if children else tree


def _without_saved_boxes(tree: Any) -> Any:
    if not isinstance(tree, Mapping):
        return tree
    if set(tree) == {"value"} and not isinstance(tree["value"], Mapping | list):
        return tree["value"]
    return {key: _without_saved_boxes(child) for key, child in tree.items()}


def is_train_state(node: Any) -> bool:
    """Whether a node has what Flax's TrainStates have: params, opt_state and tx."""
    return (
        dataclasses.is_dataclass(node)
        and hasattr(node, "params")
        and hasattr(node, "opt_state")
        and hasattr(node, "tx")
    )


def is_optimizer(node: Any) -> bool:
    """Whether an NNX object is an optimizer: it has opt_state and tx."""
    # By its own attributes: an nnx.Rngs has a stream for any name it is asked for.
    return is_nnx_object(node) and {"opt_state", "tx"} <= vars(node).keys()


def is_optimizer_with_model(node: Any) -> bool:
    """Whether an NNX object is an `nnx.ModelAndOptimizer`."""
    return is_optimizer(node) and is_nnx_object(getattr(node, "model", None))


def parameter_keys(flat: Flat) -> dict[int, str]:
    """Position → a unique key, for each leaf of the parameter sections.

    The key is the path within the section, as an optimizer state has it; where an
    earlier section (another model) has that one, the path within the whole tree.
    """
    keys: dict[int, str] = {}
    taken: set[str] = set()
    for section in flat.sections:
        if section.role == "parameter":
            for at in range(section.start, section.stop):
                if at not in flat.fixed:
                    key = flat.paths[at]
                    key = section.prefix + key if key in taken else key
                    while key in taken:  # the path within a section is that of a leaf
                        key = f"./{key}"
                    taken.add(key)
                    keys[at] = key
    return keys


def is_optax_state(node: Any) -> bool:
    """Whether a node is a state of optax, or a tuple of some."""
    if not isinstance(node, tuple):
        return False
    if hasattr(node, "_fields"):
        return type(node).__module__.split(".")[0] == "optax"
    return bool(node) and all(part is None or is_optax_state(part) for part in node)


class _Names(dict[Any, tuple[str, str]]):
    """Key of a mapping → its part, and the part folded."""

    def __init__(self, fold: Callable[[str], str]) -> None:
        super().__init__()
        self.fold = fold

    def __missing__(self, key: Any) -> tuple[str, str]:
        part = escape(key)
        self[key] = found = (part, self.fold(part))
        return found


# What a node of some type is; found once per type and walk.
_LEAF, _DICT, _MAPPING, _BOX, _NONE, _OTHER = range(6)


class _Walk:
    """Flattens one tree. A loop over plain containers, and a step for each other type.

    Faster than `tree_flatten_with_path`: a parent's path is made once, not once per
    leaf, and no key objects are made.
    """

    def __init__(self, fold: Callable[[str], str]) -> None:
        self.flat = Flat()
        self.kinds: dict[type, int] = {}
        self.names = _Names(fold)
        self.box_roles: dict[type, tuple[bool, bool]] = {}
        self.base = ""  # prefix of the current section
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
            self.flat.sections.append(
                Section(self.start, stop, self.base, self.role, self.node)
            )
        self.start = stop

    def section(
        self, prefix: str, role: Role, node: Any, tree: Any, is_whole: bool = False
    ) -> None:
        """Walks `tree` as a section of its own, below the current one."""
        self._close()
        before = self.base, self.role, self.node
        self.base, self.role, self.node = self.base + prefix, role, node
        self.root(tree, is_whole)
        self._close()
        self.base, self.role, self.node = before

    def root(self, tree: Any, is_whole: bool = False) -> None:
        """Walks a tree whose paths start here; it may be a whole one of the user's."""
        if isinstance(tree, Roots):
            for name, part in tree.trees.items():
                role: Role = "optimizer" if name == "opt_state" else "parameter"
                self.section(f"{escape(name)}/", role, None, part, is_whole=True)
        elif is_train_state(tree):
            self.train_state(tree)
        elif self.role != "optimizer" and is_optax_state(tree):
            self._close()
            self.role = "optimizer"
            self.walk(tree, "", "")
        elif isinstance(tree, nnx.State) and self.is_optimizer_with_model(tree):
            self.optimizer_with_model(tree)
        elif self.role == "parameter" and isinstance(tree, Mapping):
            if not isinstance(tree, nnx.State) and "params" in tree:
                self.variables(tree)
            elif self.holds_optimizer(tree):
                self.model_and_optimizer(tree)
            elif is_whole and self.holds_variables(tree):
                self.holder_of_variables(tree)
            else:
                self.walk(tree, "", "")
        else:
            self.walk(tree, "", "")

    def variables(self, tree: Mapping[str, Any]) -> None:
        """Linen variables: parameters are named within `params/`."""
        for key in self.ordered(tree, ""):
            child = tree[key]
            if key == "params" and self.kind(child) != _LEAF:
                self.section("params/", "parameter", None, child)
            else:
                self.child(child, self.names[key], "", "")

    def is_variables(self, node: Any) -> bool:
        """Whether a node is Linen variables (or a dict of `params` and others)."""
        if self.kind(node) not in (_DICT, _MAPPING) or isinstance(node, nnx.State):
            return False
        return isinstance(node.get("params"), Mapping)

    def holds_variables(self, tree: Mapping[Any, Any]) -> bool:
        """Whether a child is Linen variables."""
        if isinstance(tree, nnx.State):
            return False
        return any(map(self.is_variables, tree.values()))

    def holder_of_variables(self, tree: Mapping[Any, Any]) -> None:
        """`{"model": variables, "step": 3}`: the variables are a tree by themselves."""
        for key in self.ordered(tree, ""):
            child, name = tree[key], self.names[key]
            if self.is_variables(child):
                self.section(f"{name[0]}/", "parameter", None, child)
            else:
                self.child(child, name, "", "")

    def holds_optimizer(self, tree: Mapping[Any, Any]) -> bool:
        """Whether a child is the state of an `nnx.Optimizer` (or a TrainState's)."""
        children = tree.raw_mapping if isinstance(tree, nnx.State) else tree
        return any(
            self.kind(child) in (_DICT, _MAPPING)
            and ("opt_state" in child or isinstance(child.get("step"), OptState))
            for child in children.values()
        )

    def model_and_optimizer(self, tree: Mapping[Any, Any]) -> None:
        """States of several NNX objects, one an optimizer: each is a tree by itself."""
        for key in self.ordered(tree, ""):
            child, name = tree[key], self.names[key]
            if isinstance(child, Mapping):
                self.section(f"{name[0]}/", "parameter", None, child)
            else:
                self.child(child, name, "", "")

    def is_optimizer_with_model(self, tree: nnx.State) -> bool:
        """Whether a State is that of an `nnx.ModelAndOptimizer`."""
        if self.role == "optimizer":
            return is_optimizer_with_model(self.node) and "model" in tree
        if "model" not in tree or not isinstance(tree.get("step"), OptState):
            return False
        # Without opt_state where the optimizer keeps nothing.
        return set(tree) <= {"model", "opt_state", "step"}

    def optimizer_with_model(self, tree: nnx.State) -> None:
        """The model is a tree by itself; the rest belongs to it."""
        for key in self.ordered(tree, ""):
            child, name = tree[key], self.names[key]
            if key == "model" and isinstance(child, nnx.State):
                self.section("model/", "parameter", None, child)
            else:
                self.child(child, name, "", "")

    def train_state(self, state: Any) -> None:
        """Parameters are named within `params/`; `opt_state` belongs to them."""
        for entry, child in self.one_level(state, ""):
            key = key_of(entry)
            if key == "params" and self.kind(child) != _LEAF:
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
        """Walks a node whose children have paths that start with `prefix`."""
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
        """Walks a dict; the hot loop, so dicts in dicts are met right here."""
        flat, kinds, names = self.flat, self.kinds, self.names
        paths, parts, leaves = flat.paths, flat.names, flat.leaves
        in_run = False
        for key in self.ordered(node, prefix) if len(node) > 1 else node:
            child = node[key]
            part, short = names[key]
            kind = kinds.get(type(child))
            if kind == _LEAF:
                if not in_run:
                    flat.runs.append((len(paths), folded))
                    in_run = True
                paths.append(prefix + part)
                parts.append(short)
                leaves.append(child)
            else:
                in_run = False
                if kind == _DICT and part != "opt_state":
                    self.mapping(child, f"{prefix}{part}/", f"{folded}{short}/")
                else:
                    self.child(child, (part, short), prefix, folded)

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
        """Walks a node that starts a section of its own; says whether it did."""
        below = f"{prefix}{part}/"
        if is_nnx_object(node):
            self.flat.has_objects = True
            role: Role = "optimizer" if is_optimizer(node) else "parameter"
            self.section(below, role, node, nnx_state(node))
        elif self.role == "optimizer":
            return False
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
                    "string, say): rename one, so that rules can tell them apart"
                )
            seen.add(part)

    def leaf(self, node: Any, path: str, folded: str) -> None:
        flat = self.flat
        flat.runs.append((len(flat.paths), ""))
        flat.paths.append(path)
        flat.names.append(folded)
        flat.leaves.append(node)

    def box(self, node: Any, path: str, folded: str) -> None:
        """A Variable or Linen box: its content has the path of the box."""
        flat, start = self.flat, len(self.flat.paths)
        if isinstance(node, nnx.Variable):
            metadata = metadata_of(node)
            # An empty tuple says something too: replicated.
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
                    self.optimizer_with_model(state)
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
