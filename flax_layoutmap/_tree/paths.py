"""Paths: one canonical string for each leaf of any tree.

A path joins the keys of a leaf by `/`: `decoder/layers/0/mlp/up/kernel`. The same
leaf has the same path whether it comes from a module, an `nnx.State`, a dict, boxed or
unboxed Linen variables, an optimizer state or a checkpoint:

- the key `value` that an NNX Variable or a Linen box adds does not appear (the type of
  the node says so, never the name);
- a module is read through `nnx.state`, so that a tied Variable appears once; its other
  paths are names of the same leaf;
- a `/` inside a key is written `%2F`, and a `%` as `%25`, so that paths stay unique;
  characters without a glyph are written as in a URL (a line break is `%0A`), so that a
  path is one line wherever it is shown.

A tree is cut into sections: a module inside a dict, Linen's `params`, an optimizer
state. Rules see the path within its section, so that they hold for any wrapping, and
longer forms of it if they name the section; see `forms`.
"""

import bisect
import dataclasses
import functools
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple
from urllib.parse import quote, unquote

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from flax_layoutmap._tree.flax_internals import is_nnx_object

Role = Literal["parameter", "optimizer", "other"]

# How many other names of a leaf messages show.
_MOST_SHOWN = 2

_NUMBER = re.compile("[0-9]+")


class Leaf(NamedTuple):
    """The names of one leaf of a tree.

    Attributes:
        path: path within the section.
        prefix: what precedes it in the whole tree: `model/params/`, or nothing.
        role: whether the section holds parameters or the state of an optimizer.
        others: the other paths of a shared Variable, in any order.
    """

    path: str
    prefix: str
    role: Role
    others: tuple[str, ...] = ()

    @property
    def full_path(self) -> str:
        """Path within the whole tree."""
        return self.prefix + self.path if self.path else self.prefix.removesuffix("/")

    def names(self) -> tuple[str, ...]:
        """Every path within the whole tree: several for a shared Variable."""
        return self.full_path, *(self.prefix + other for other in self.others)

    def label(self) -> str:
        """Its names, for messages: `decoder/w = embed/embedding`."""
        more = " = …" if len(self.others) > _MOST_SHOWN else ""
        return " = ".join(self.names()[: _MOST_SHOWN + 1]) + more


class Section(NamedTuple):
    """Consecutive leaves whose paths start at one node."""

    start: int  # position of the first leaf
    stop: int  # position after the last leaf
    prefix: str
    role: Role


@dataclasses.dataclass(frozen=True, eq=False)
class Flat:
    """The leaves of a tree, in JAX's order.

    Attributes:
        paths: path of each leaf within its section.
        sections: the sections, in order.
        leaves: the leaves themselves.
        annotations: position → the Variable or Linen box with layout metadata.
        fixed: positions of random state, which no rule shards.
        nodes: prefix of a section of optimizer state → the `nnx.Optimizer` or the
            TrainState that holds it.
        has_objects: whether NNX objects were read through `nnx.state`.
        unseen: beginnings of prefixes that rules do not see, see `Roots`.
        others: position → the other paths of a shared Variable within the section.
    """

    paths: Sequence[str]
    sections: Sequence[Section]
    leaves: Sequence[Any] = ()
    annotations: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    fixed: Set[int] = frozenset()
    nodes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    has_objects: bool = False
    unseen: Sequence[str] = ()
    others: Mapping[int, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def records(self) -> list[Leaf]:
        """The names of each leaf."""
        return [
            Leaf(path, prefix, role, self.others.get(at, ()))
            for start, stop, prefix, role in self.sections
            for at, path in enumerate(self.paths[start:stop], start)
        ]

    def section(self, at: int) -> Section:
        place = bisect.bisect(self.sections, at, key=operator.attrgetter("start"))
        return self.sections[place - 1]

    def full_paths(self) -> list[str]:
        """Path of each leaf within the whole tree."""
        return [
            prefix + path if path else prefix.removesuffix("/")
            for start, stop, prefix, _ in self.sections
            for path in self.paths[start:stop]
        ]

    def roles(self) -> list[Role]:
        return [s.role for s in self.sections for _ in range(s.start, s.stop)]

    def forms(self, at: int, path: str | None = None) -> tuple[str, ...]:
        """The forms that rules see of a leaf's path, or another path in its section."""
        prefix = self.section(at).prefix
        for name in self.unseen:
            prefix = prefix.removeprefix(name)
        return forms(prefix, self.paths[at] if path is None else path)

    def forms_of_names(self, at: int) -> list[tuple[str, ...]]:
        """The forms of each path of a leaf: several for a shared Variable."""
        others = self.others.get(at, ())
        return [self.forms(at), *(self.forms(at, path) for path in others)]

    def representatives(self) -> Iterable[int]:
        """One position for each distinct path, ignoring numbers in it."""
        paths = _NUMBER.sub("0", "\n".join(self.paths)).split("\n")
        first: dict[tuple[str, str], int] = {}
        for start, stop, prefix, _ in self.sections:
            for at in range(start, stop):
                first.setdefault((prefix, paths[at]), at)
        return first.values()

    def every_form(self) -> Iterator[str]:
        """All forms of the paths of all leaves."""
        for at in range(len(self.paths)):
            for forms_of_name in self.forms_of_names(at):
                yield from forms_of_name


def forms(prefix: str, path: str) -> tuple[str, ...]:
    """The forms of a path that rules see; a rule applies if it matches one of them.

    >>> forms("state/params/", "up/kernel")
    ('state/params/up/kernel', 'params/up/kernel', 'up/kernel')
    """
    if not prefix:
        return (path,)
    whole = prefix + path if path else prefix[:-1]
    return (whole, *forms(prefix.partition("/")[2], path))


@jax.tree_util.register_pytree_with_keys_class
class Roots:
    """Several trees under names, such as the arguments of a function.

    Each is a section, in the order given. Rules see the name of a Flax object, as they
    would in a dict, but not that of a container of arrays, which may be data: a rule
    `batch` would then match every batch. A name may be a path.
    """

    def __init__(self, trees: Mapping[str, Any]) -> None:
        self.trees = dict(trees)

    def tree_flatten_with_keys(self) -> tuple[list[Any], tuple[str, ...]]:
        """Children in the order given; the names are static."""
        children = [(DictKey(name), tree) for name, tree in self.trees.items()]
        return children, tuple(self.trees)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], trees: Any) -> "Roots":
        """The inverse of `tree_flatten_with_keys`."""
        return cls(dict(zip(names, trees, strict=True)))


def escape(key: object) -> str:
    """The part of a path for a key."""
    # The value of a str-Enum, not its name.
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
    """The inverse of `escape`, as a string."""
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
    """Whether a node has the fields of Flax's TrainStates: params, opt_state, tx."""
    names = ("params", "opt_state", "tx")
    return dataclasses.is_dataclass(node) and all(hasattr(node, x) for x in names)


def is_optimizer(node: Any) -> bool:
    """Whether an NNX object is an optimizer: it has opt_state and tx."""
    # Not by hasattr: an nnx.Rngs has a stream for any name.
    return is_nnx_object(node) and {"opt_state", "tx"} <= vars(node).keys()


def is_optimizer_with_model(node: Any) -> bool:
    """Whether an NNX object is an `nnx.ModelAndOptimizer`."""
    return is_optimizer(node) and is_nnx_object(getattr(node, "model", None))


def parameter_keys(flat: Flat) -> dict[int, str]:
    """Position → a unique key, for each leaf of the parameter sections.

    The key is the path within the section, as an optimizer state has it, or the path
    within the whole tree if an earlier section (another model) has that key.
    """
    keys: dict[int, str] = {}
    taken: set[str] = set()
    for start, stop, prefix, role in flat.sections:
        for at in range(start, stop) if role == "parameter" else ():
            if at not in flat.fixed:
                path = flat.paths[at]
                key = prefix + path if path in taken else path
                while key in taken:  # it is also the path of a leaf in its section
                    key = f"./{key}"
                taken.add(key)
                keys[at] = key
    return keys


def is_optax_state(node: Any) -> bool:
    """Whether a node is a state of optax, or a tuple of such states."""
    if not isinstance(node, tuple):
        return False
    if hasattr(node, "_fields"):
        # optax's lookahead keeps two copies of the parameters in a tuple of its own.
        is_copies = type(node).__name__ == "LookaheadParams"
        return type(node).__module__.split(".")[0] == "optax" and not is_copies
    return bool(node) and all(part is None or is_optax_state(part) for part in node)
