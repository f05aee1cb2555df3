"""Paths: one canonical string for each leaf of any tree.

A path joins the keys of a leaf by `/`: `decoder/layers/0/mlp/up/kernel`. The same
leaf has the same path whether it comes from a module, an `nnx.State`, a dict, boxed or
unboxed Linen variables, an optimizer state or a checkpoint:

- the key `value` that an NNX Variable or a Linen box adds does not appear (the type of
  the node says so, never the name);
- a module is read through `nnx.state`, so that a tied Variable appears once;
- a `/` inside a key is written `%2F`, and a `%` as `%25`, so that paths stay unique;
  so is, as in a URL, what has no glyph (a line break is `%0A`), so that a path is one
  line wherever it is shown.

A tree is cut into sections: a module inside a dict, Linen's `params`, an optimizer
state. Rules see the path whole, and also without the names that lead to its section, so
that they hold for any wrapping; see `forms`.
"""

import bisect
import dataclasses
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple
from urllib.parse import quote, unquote

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from flax_layoutmap._tree.flax_internals import is_nnx_object
from flax_layoutmap._tree.structure import Structure

Role = Literal["parameter", "optimizer", "other"]

# Metadata of a Variable about its layout.
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
        unseen: how many characters of the prefix the rules do not see.
    """

    start: int
    stop: int
    prefix: str
    role: Role
    node: Any = None
    unseen: int = 0

    def forms(self, path: str) -> tuple[str, ...]:
        """The forms that rules see of a path within it."""
        return forms(self.seen, path)

    @property
    def seen(self) -> str:
        """What of the prefix the rules see."""
        return self.prefix[self.unseen :]


class Block(NamedTuple):
    """A run of leaves with one beginning of their folded paths.

    Attributes:
        start: position of the first leaf.
        folded: how the folded paths of all its leaves begin.
        names: how each goes on.
    """

    start: int
    folded: str
    names: tuple[str, ...]


@dataclasses.dataclass(slots=True)
class Flat:
    """A tree, flattened: columns with one entry per leaf, in JAX's leaf order.

    Attributes:
        paths: path of each leaf within its section.
        blocks: the folded paths, in order, without gaps.
        leaves: the leaves themselves.
        sections: the sections, in order, without gaps.
        annotations: position → the Variable or box with layout metadata.
        fixed: positions of leaves that no rule may shard (random state).
        has_objects: whether NNX objects were read through `nnx.state`.
        treedef: JAX's structure of the tree, where it is known.
        structure: what recognises such a tree, where it is known.
    """

    paths: list[str] = dataclasses.field(default_factory=list)
    blocks: list[Block] = dataclasses.field(default_factory=list)
    leaves: list[Any] = dataclasses.field(default_factory=list)
    sections: list[Section] = dataclasses.field(default_factory=list)
    annotations: dict[int, Any] = dataclasses.field(default_factory=dict)
    fixed: set[int] = dataclasses.field(default_factory=set)
    has_objects: bool = False
    treedef: Any = None
    structure: Structure | None = None

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

    def section(self, at: int) -> Section:
        """The section of a leaf."""
        return self.sections[bisect.bisect_right(self.sections, at, key=_START) - 1]

    def forms(self, at: int, path: str | None = None) -> tuple[str, ...]:
        """The path of a leaf in each form that rules see, whole first.

        Args:
            at: position of the leaf.
            path: another path within its section, as if it were there.
        """
        return self.section(at).forms(self.paths[at] if path is None else path)

    def representatives(self) -> Iterator[int]:
        """One position for each path but for its numbers, as far as that is known."""
        seen = set()
        for block in self.blocks:
            key = self.section(block.start).prefix, block.folded, block.names
            if key not in seen:
                seen.add(key)
                yield from range(block.start, block.start + len(block.names))

    def every_form(self) -> Iterator[str]:
        """All forms of the paths of all leaves."""
        for section in self.sections:
            for path in self.paths[section.start : section.stop]:
                yield from section.forms(path)


_START = operator.attrgetter("start")


def forms(prefix: str, path: str) -> tuple[str, ...]:
    """The forms of a path that rules see: a rule is for it if it matches one of them.

    Args:
        prefix: what leads to its section, `state/params/`, or nothing.
        path: the path within the section, `up/kernel`.

    Returns:
        The path whole, and then with less and less of the prefix:
        `state/params/up/kernel`, `params/up/kernel`, `up/kernel`.
    """
    if not prefix:
        return (path,)
    whole = prefix + path if path else prefix[:-1]
    return (whole, *forms(prefix.partition("/")[2], path))


@jax.tree_util.register_pytree_with_keys_class
class Roots:
    """Several trees under names, such as the arguments of a function.

    Each is a section. Rules see the name of an object of Flax, as they would in a dict,
    but not that of a container of arrays, which may be data: for the rule `b`, each
    `batch` would be a parameter. A name may be a path.
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
    # Of a str-Enum, the value.
    text = str.__str__(key) if isinstance(key, str) else str(key)
    if "/" in text or "%" in text:
        text = text.replace("%", "%25").replace("/", "%2F")
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else quote(letter, errors="surrogatepass")
        for letter in text
    )


def unescape(part: str) -> str:
    """The key that `escape` made a part of."""
    return unquote(part, errors="surrogatepass")


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
    # By its own attributes: an nnx.Rngs returns a stream for any name.
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
        # optax's lookahead keeps two copies of the parameters in a tuple of its own.
        is_copies = type(node).__name__ == "LookaheadParams"
        return type(node).__module__.split(".")[0] == "optax" and not is_copies
    return bool(node) and all(part is None or is_optax_state(part) for part in node)


class Names(dict[Any, tuple[str, str]]):
    """Key of a mapping → its part, and the part folded."""

    def __init__(self, fold: Callable[[str], str]) -> None:
        super().__init__()
        self.fold = fold

    def __missing__(self, key: Any) -> tuple[str, str]:
        part = escape(key)
        self[key] = found = (part, self.fold(part))
        return found
