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
import itertools
import operator
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
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
    """A run of leaves whose paths start at one node."""

    start: int  # position of the first leaf
    stop: int  # position after the last leaf
    prefix: str  # what precedes the section's paths in the tree
    role: Role
    node: Any = None  # the optimizer or train state
    unseen: int = 0  # how many characters of the prefix rules do not see

    def forms(self, path: str) -> tuple[str, ...]:
        """The forms that rules see of a path within it."""
        return forms(self.seen, path)

    @property
    def seen(self) -> str:
        """What of the prefix the rules see."""
        return self.prefix[self.unseen :]


class Block(NamedTuple):
    """A run of leaves whose folded paths start alike."""

    start: int  # position of the first leaf
    folded: str  # the common beginning of the folded paths
    names: tuple[str, ...]  # the rest of each


@dataclasses.dataclass(slots=True)
class Flat:
    """A tree, flattened: columns with one entry per leaf, in JAX's leaf order.

    `paths` are within the section; `blocks` and `sections` are in order, without gaps;
    `annotations` maps positions to Variables or boxes with layout metadata; `fixed` has
    the positions that no rule may shard (random state); `has_objects`: NNX objects were
    read through `nnx.state`; `treedef` and `structure` may be unknown.
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
        """The forms that rules see of a leaf's path, or of another in its section."""
        return self.section(at).forms(self.paths[at] if path is None else path)

    def representatives(self) -> Iterator[int]:
        """One position for each distinct folded path, as far as blocks tell."""
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

    Each is a section. Rules see the name of a Flax object, as they would in a dict, but
    not that of a container of arrays, which may be data: the rule `b` would match every
    `batch`. A name may be a path.
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

    The key is the path within the section, as an optimizer state has it, or the path
    within the whole tree if an earlier section (another model) has that key.
    """
    keys: dict[int, str] = {}
    taken: set[str] = set()
    for section in flat.sections:
        if section.role == "parameter":
            for at in range(section.start, section.stop):
                if at not in flat.fixed:
                    key = flat.paths[at]
                    key = section.prefix + key if key in taken else key
                    while key in taken:  # a leaf has the path within a section
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


# ------------------------------------------------------------------------- folded paths


# A whole part (`layers/0`), the end of a name (`layers_0`, `block0`) or what stands
# between underscores. Escapes in a path (`%2F`, `%A6`) hold no index, and neither do
# more digits than the places of a list would have.
_INDEX = re.compile(r"(?<![0-9%])(?<!%[A-F])(0|[1-9][0-9]{0,8})(?=[/_]|$)")

_TO_LAST_INDEX = re.compile(".*" + _INDEX.pattern)

# Names such as `w1`, `w3` or `conv2` are rarely places in a list: fewer than these
# of them stay apart.
_GLUED = 4

# Runs of indices that are written before `…`.
_RUNS = 6

Indices = tuple[int, ...]
Relation = tuple[tuple[str, ...], tuple[int | None, ...]]


class Fold(NamedTuple):
    """Leaves that are shown as one."""

    text: str  # the path, with `{0..79}` for the indices 0 to 79
    members: tuple[int, ...]  # positions, ascending
    slots: tuple[str, ...] = ()  # of several members: the text of each index
    varied: int = 0  # end of the last index in the text that varies

    @property
    def head(self) -> int:
        """The length of the beginning of the text, which leaves below one node share.

        It ends with the `/` after the last index that stands for several; without such
        an index, after the last index.
        """
        last = None if self.varied else _TO_LAST_INDEX.match(self.text)
        end = self.varied if last is None else last.end()
        return self.text.find("/", end) + 1 if end else 0

    def spell(self, relation: Relation) -> str:
        """The path with this relation to that of every member."""
        texts, indices = relation
        own = self.slots or _INDEX.split(self.text)[1::2]
        slots = own[len(own) - len(indices) :] if indices else ()
        spelled = [
            slot if index is None else str(index)
            for slot, index in zip(slots, indices, strict=True)
        ]
        return _join(texts, spelled)


def fold(paths: Sequence[str], alike: Sequence[Hashable]) -> list[Fold]:
    """Fold the paths that differ in indices alone, in the order of their first members.

    Paths with different values in `alike` are not folded together.

    >>> [row.text for row in fold(["a/0/w", "a/1/w", "a/2/w", "b"], [0, 0, 0, 0])]
    ['a/{0..2}/w', 'b']
    >>> [row.text for row in fold(["a_0", "a_1", "a_2", "a_4"], "xxyx")]
    ['a_{0,1,4}', 'a_2']
    """
    groups: dict[Hashable, dict[Indices, int]] = {}
    for at, (path, key) in enumerate(zip(paths, alike, strict=True)):
        pieces = _INDEX.split(path)
        group = groups.setdefault((tuple(pieces[::2]), key), {})
        group[tuple(map(int, pieces[1::2]))] = at
    folds: list[Fold] = []
    for (texts, _), group in groups.items():  # pyright: ignore[reportGeneralTypeIssues]
        for box in _boxes(list(group), texts):
            members = [group[indices] for indices in itertools.product(*box)]
            folds.append(_fold_of(texts, box, members))
    return sorted(folds, key=lambda row: row.members[0])


def apart(paths: Sequence[str]) -> list[Fold]:
    """Every path by itself."""
    return [Fold(path, (at,)) for at, path in enumerate(paths)]


def relation(path: str, other: str) -> Relation:
    """How another path relates to this one: its texts, and which indices are equal.

    Indices are compared from the right. Leaves whose other paths have the same relation
    to their own can be folded; `Fold.spell` writes the other path for all of them.

    >>> relation("mu/layers/7/w", "layers/7/w")
    (('layers/', '/w'), (None,))
    """
    mine = _INDEX.split(path)[1::2]
    pieces = _INDEX.split(other)
    theirs = pieces[1::2]
    # Each index of the other needs a counterpart, whose slot it takes.
    if len(theirs) > len(mine):
        return (other,), ()
    tail = mine[len(mine) - len(theirs) :]
    same = [None if a == b else int(b) for a, b in zip(tail, theirs, strict=True)]
    return tuple(pieces[::2]), tuple(same)


def natural_key(path: str) -> tuple[tuple[str | int, ...], ...]:
    """Sort `layers/2` before `layers/10`."""
    key: list[tuple[str | int, ...]] = []
    for at, piece in enumerate(re.split(r"([0-9]+)", path)):
        digits = piece.lstrip("0")
        key.append((1, len(digits), digits, piece) if at % 2 else (0, piece))
    return tuple(key)


def spell_indices(indices: Sequence[int]) -> str:
    """Ascending indices in the notation of a shell; many runs are abbreviated.

    >>> spell_indices([7]), spell_indices([0, 1, 2, 3, 5]), spell_indices([0, 2, 4, 6])
    ('7', '{0..3,5}', '{0..6..2}')
    """
    if len(indices) == 1:
        return str(indices[0])
    step = indices[1] - indices[0]
    regular = all(b - a == step for a, b in itertools.pairwise(indices))
    if step > 1 and regular and len(indices) > 3:
        return f"{{{indices[0]}..{indices[-1]}..{step}}}"
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    texts = [
        f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run))
        for run in runs
    ]
    if len(texts) > _RUNS:
        texts = [*texts[: _RUNS - 3], "…", texts[-1]]
    return f"{{{','.join(texts)}}}"


def _boxes(tuples: list[Indices], texts: Sequence[str]) -> list[list[list[int]]]:
    """Cut a set of indices into products of sets, one set per slot."""
    if not tuples[0]:
        return [[]]
    rests: dict[int, list[Indices]] = {}
    for indices in tuples:
        rests.setdefault(indices[0], []).append(indices[1:])
    same: dict[tuple[Indices, ...], list[int]] = {}
    for first, rest in rests.items():
        same.setdefault(tuple(sorted(rest)), []).append(first)
    boxes = []
    for rest, firsts in same.items():
        glued = texts[0][-1:] not in ("", "/", "_")
        choices = (
            [[at] for at in firsts] if glued and len(firsts) < _GLUED else [firsts]
        )
        for box in _boxes(list(rest), texts[1:]):
            boxes += [[sorted(choice), *box] for choice in choices]
    return boxes


def _fold_of(
    texts: Sequence[str], box: Sequence[Sequence[int]], members: Sequence[int]
) -> Fold:
    slots = tuple(map(spell_indices, box))
    text = _join(texts, slots)
    if len(members) == 1:
        return Fold(text, tuple(members))
    last = max(at for at, some in enumerate(box) if len(some) > 1)
    varied = len(_join(texts[: last + 1], slots[: last + 1]))
    return Fold(text, tuple(sorted(members)), slots, varied)


def _join(texts: Sequence[str], slots: Sequence[str]) -> str:
    mixed = itertools.chain.from_iterable(
        itertools.zip_longest(texts, slots, fillvalue="")
    )
    return "".join(mixed)
