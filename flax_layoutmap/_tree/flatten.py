"""Flatten any tree with its paths.

Trees with repeated structure, such as stacks of layers, are flattened by JAX (in C++),
and equal sub-structures are named once. Other trees are walked node by node (`walk`).
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from flax.nnx import OptState, RngState

from flax_layoutmap._core.errors import StructureError
from flax_layoutmap._tree.flax_internals import is_nnx_object, nnx_state
from flax_layoutmap._tree.paths import (
    LAYOUT_METADATA,
    Block,
    Flat,
    Names,
    Section,
    escape,
)
from flax_layoutmap._tree.structure import ARRAYS, Signatures, Structure, container
from flax_layoutmap._tree.walk import Walk


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
    """Flatten any tree with its paths; `fold` merges parts that rules treat alike."""
    try:
        return _flatten(tree, fold)
    except (RecursionError, SystemError):  # the latter of JAX's own flattening
        depth, path = _deepest(tree)
        limit = sys.getrecursionlimit()
        if 3 * depth < limit:
            raise  # the tree is not the cause
        raise StructureError(
            f"the tree is nested {depth} levels deep, at {path}, which is more than "
            f"Python's recursion limit of {limit} allows for; make it flatter, or call "
            f"sys.setrecursionlimit({10 * depth}) before"
        ) from None


def _deepest(tree: Any) -> tuple[int, str]:
    """The depth of nested containers, and where the deepest path begins."""
    depth, first = 0, ""
    stack: list[tuple[Any, int, str]] = [(tree, 0, "")]
    while stack:
        node, level, path = stack.pop()
        node = node.raw_mapping if type(node) is nnx.State else node
        items: Any = ()
        if isinstance(node, Mapping):
            items = node.items()
        elif isinstance(node, list | tuple):
            items = enumerate(node)
        if level > depth:
            depth, first = level, path
        for key, child in items:
            below = f"{path}{escape(key)}/" if level < 3 else path
            stack.append((child, level + 1, below))
    return depth, repr(f"{first}…")


def _flatten(tree: Any, fold: Callable[[str], str]) -> Flat:
    flat = _flatten_repeats(tree, fold)
    if flat is not None:
        return flat
    flat = Walk(fold).flatten(tree)
    plain = _saved_state(tree, flat)
    return flat if plain is tree else Walk(fold).flatten(plain)


def _saved_state(tree: Any, flat: Flat) -> Any:
    """Orbax's metadata of an `nnx.State`, or of a dict of States, without the boxes.

    There a Variable is a dict with the one key `value`. A single parameter may have
    that name, so it is a box only where every leaf of the State has it.
    """
    types = {kind: _is_orbax(kind) for kind in set(map(type, flat.leaves))}
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


# ------------------------------------------------------------ repeated structure

# The largest sub-tree that is named at once: a layer, not a stack of them.
_BLOCK_LEAVES = 64
# With more different sub-trees than this, `Walk` is faster.
_TEMPLATES = 256
# Sets of shapes per template whose signatures are cached.
_SHAPES = 8


class _Irregular(Exception):
    """The tree has a node that only `Walk` can flatten."""


class _Template(NamedTuple):
    """The leaves of one sub-structure: paths below its root, plain and folded.

    A path begins with a `/`, or is empty where the sub-structure is a leaf.
    """

    paths: tuple[str, ...]
    names: tuple[str, ...]
    fixed: tuple[int, ...]


def _flatten_repeats(tree: Any, fold: Callable[[str], str]) -> Flat | None:
    """Flatten dicts and lists of arrays, or a State; None for any other tree."""
    if type(tree) is nnx.State:
        children: Any = tree.raw_mapping
    elif type(tree) is dict:
        children = tree
    else:
        return None
    if any(map(is_nnx_object, children.values())):
        return None
    try:
        leaves, treedef = jax.tree.flatten(tree)
        kinds = list(map(type, leaves))
        if any(issubclass(k, nnx.Pytree) or _is_orbax(k) for k in set(kinds)):
            return None
        return _Repeats(fold, leaves, kinds).flatten(treedef)
    except (_Irregular, TypeError, ValueError):
        return None  # the walk raises the error, if there is one


def _is_orbax(kind: type) -> bool:
    return kind.__module__.startswith("orbax.")


class _Repeats:
    """Names the leaves of one tree from its structure alone.

    Methods that descend return the node's signature (see `structure`), or None where a
    leaf is not an array.
    """

    def __init__(
        self, fold: Callable[[str], str], leaves: list[Any], kinds: list[type]
    ) -> None:
        self.flat = Flat(leaves=leaves)
        self.names = Names(fold)
        self.templates: dict[Any, _Template] = {}
        self.in_state = False
        self.signatures = Signatures()
        # id of a template → columns of a block, and its signature
        self.seen: dict[int, list[tuple[Any, Any]]] = {}
        self.columns: tuple[list[Any], ...] | None = None
        first = dict(zip(kinds, leaves, strict=True))
        if all(isinstance(leaf, ARRAYS) for leaf in first.values()):
            shapes = [leaf.shape for leaf in leaves]
            self.columns = kinds, shapes, [leaf.dtype for leaf in leaves]

    def flatten(self, treedef: Any) -> Flat:
        flat = self.flat
        flat.treedef = treedef
        kind, keys = treedef.node_data()
        self.in_state = kind is nnx.State
        if self.in_state or "params" not in keys:
            root = self.down(treedef, "", "", is_root=True)
            self.close("")
        else:
            root = self.variables(keys, treedef.children())
        if self.columns is not None:
            flat.structure = Structure(root)
        return flat

    def variables(self, keys: Sequence[Any], children: Sequence[Any]) -> Any:
        """Linen variables: parameters are named within `params/`."""
        made: dict[Any, Any] = {}
        for key, child in zip(keys, children, strict=True):
            if key == "params":
                self.close("")
                if child.node_data() is None or not child.num_leaves:
                    raise _Irregular
                made[key] = self.down(child, "", "")
                self.close("params/")
            else:
                part, short = self.part(key)
                made[key] = self.child(child, part, short)
        self.close("")
        return container(dict, made)

    def close(self, prefix: str) -> None:
        """End a section, if there is anything in it."""
        sections, stop = self.flat.sections, len(self.flat.paths)
        start = sections[-1].stop if sections else 0
        if stop > start:
            sections.append(Section(start, stop, prefix, "parameter"))

    def child(self, treedef: Any, path: str, folded: str) -> Any:
        """A child as one block of leaves, or one level further down."""
        if treedef.num_leaves > _BLOCK_LEAVES:
            return self.down(treedef, path + "/", folded + "/")
        template = self.templates.get(treedef)
        if template is None:
            template = self.template(treedef)
        flat, start = self.flat, len(self.flat.paths)
        if template.paths:
            flat.blocks.append(Block(start, folded, template.names))
            flat.paths += [path + below for below in template.paths]
            if template.fixed:
                flat.fixed.update(start + at for at in template.fixed)
        return self.signature(treedef, template, start)

    def signature(self, treedef: Any, template: _Template, start: int) -> Any:
        """The signature of a block; the same object for all equal blocks."""
        if self.columns is None:
            return None
        stop = start + len(template.paths)
        own = [column[start:stop] for column in self.columns]
        seen = self.seen.setdefault(id(template), [])
        for columns, signature in seen:
            if columns == own:
                return signature
        block = jax.tree.unflatten(treedef, self.flat.leaves[start:stop])
        try:
            signature = self.signatures.of(block)
        except RecursionError:
            self.columns = None  # too deep for a signature
            return None
        if len(seen) < _SHAPES:
            seen.append((own, signature))
        return signature

    def down(self, treedef: Any, path: str, folded: str, is_root: bool = False) -> Any:
        keys = self.keys(treedef, is_root)
        if keys is None:
            raise _Irregular  # a Variable of many leaves
        names, child = self.names, self.child
        made: list[Any] = []
        for key, below in zip(keys, treedef.children(), strict=True):
            part, short = names[key]
            made.append(child(below, path + part, folded + short))
        kind = treedef.node_data()[0]
        if kind is not list:
            return container(kind, dict(zip(keys, made, strict=True)))
        return container(list, made)

    def template(self, treedef: Any) -> _Template:
        found = self.templates.get(treedef)
        if found is not None:
            return found
        paths: list[str] = []
        names: list[str] = []
        fixed: list[int] = []
        keys = self.keys(treedef)
        if keys is None:
            paths, names = [""], [""]
            if _holds_random_state(treedef):
                fixed = [0]
        else:
            for key, child in zip(keys, treedef.children(), strict=True):
                part, short = self.names[key]
                below = self.template(child)
                fixed += [len(paths) + at for at in below.fixed]
                paths += [f"/{part}{path}" for path in below.paths]
                names += [f"/{short}{name}" for name in below.names]
        if len(self.templates) == _TEMPLATES:
            raise _Irregular
        made = _Template(tuple(paths), tuple(names), tuple(fixed))
        self.templates[treedef] = made
        return made

    def keys(self, treedef: Any, is_root: bool = False) -> Sequence[Any] | None:
        """The keys of a node; None for a leaf, or a Variable that holds one."""
        data = treedef.node_data()
        if data is None:
            return None
        kind, static = data
        if kind is type(None):
            return ()
        if kind is dict or (kind is nnx.State and is_root):
            keys: Sequence[Any] = static
        elif kind is list:
            keys = range(len(treedef.children()))
        else:
            if not _is_plain_variable(treedef):
                raise _Irregular
            return None
        if len({self.part(key)[0] for key in keys}) < len(keys):
            raise _Irregular
        return keys

    def part(self, key: Any) -> tuple[str, str]:
        """The part of a path, plain and folded, of a key that starts no section."""
        found = self.names[key]
        if found[0] == "opt_state" or (found[0] == "params" and not self.in_state):
            raise _Irregular
        return found


def _is_plain_variable(treedef: Any) -> bool:
    """Whether a node is a Variable with one leaf and without layout metadata."""
    kind, static = treedef.node_data()
    if not issubclass(kind, nnx.Variable) or issubclass(kind, OptState):
        return False
    metadata = dict(static)
    if any(metadata.get(key) is not None for key in LAYOUT_METADATA):
        return False
    (content,) = treedef.children()
    return content.node_data() is None


def _holds_random_state(treedef: Any) -> bool:
    data = treedef.node_data()
    return data is not None and issubclass(data[0], RngState)
