"""The tree of modules and leaves, with repeated layers folded into one."""

import dataclasses
import re
from collections.abc import Iterable, Sequence

from flax_layoutmap._tree.paths import spell_indices
from flax_layoutmap.draw import _treemap
from flax_layoutmap.draw._scene import Forest, Kind

# Width by height of the two canvases: a screen, and a phone held upright.
WIDE = 2.0
TALL = 0.72

# `layers_3` of Linen, `3` of NNX.
_INDEX = re.compile(r"(?P<stem>(?:.*_)?)(?P<index>0|[1-9]\d*)")


@dataclasses.dataclass(slots=True, eq=False)
class Node:
    """A module, or a leaf; `like` is equal for those that hold the same.

    It is -1 until the tree is folded.
    """

    name: str
    kind: int = -1
    count: int = 1
    children: "list[Node]" = dataclasses.field(default_factory=list)
    like: int = -1


def grow(paths: Iterable[str], kinds: Iterable[int]) -> Node:
    """The tree of these paths; modules with one child are one with it.

    Args:
        paths: of the leaves, parts joined by `/`.
        kinds: position of the kind of each leaf.
    """
    root = Node("")
    modules: dict[str, Node] = {}

    for path, kind in zip(paths, kinds, strict=True):
        new = [path]
        # A key may be empty, so that "/w" is not at the top.
        above, slash, _ = path.rpartition("/")
        while slash and above not in modules:
            new.append(above)
            above, slash, _ = above.rpartition("/")
        parent = modules[above] if slash else root
        for module in reversed(new[1:]):
            made = modules[module] = Node(module.rpartition("/")[2])
            parent.children.append(made)
            parent = made
        parent.children.append(Node(path.rpartition("/")[2], kind))
    for found in (root, *modules.values()):
        found.children = _in_order(found.children)
    return root


def _in_order(children: list[Node]) -> list[Node]:
    """Siblings with an index by their index, from where the first of them stands.

    Keys of a dict are sorted as text, so that layer 10 comes before layer 2.
    """
    starts: dict[str, int] = {}
    keys: dict[int, tuple[int, int]] = {}
    for at, child in enumerate(children):
        found = _indexed(child.name)
        stem, index = found or ("", 0)
        keys[id(child)] = (starts.setdefault(stem, at) if found else at, index)
    return sorted(children, key=lambda child: keys[id(child)]) if starts else children


def _indexed(name: str) -> tuple[str, int] | None:
    """`layers_3` → `("layers_", 3)`."""
    if not name[-1:].isdecimal():
        return None
    found = _INDEX.fullmatch(name)
    return None if found is None else (found["stem"], int(found["index"]))


def joined(node: Node) -> Node:
    """The tree with every module below the root that has one child one with it."""
    made: dict[int, Node] = {}
    for each in _from_below(node):
        children = [
            _with_its_child(made[id(child)]) if child.children else child
            for child in each.children
        ]
        made[id(each)] = Node(each.name, each.kind, each.count, children, each.like)
    return made[id(node)]


def _from_below(root: Node) -> list[Node]:
    """The root and all modules, each behind what is in it; however deep they are."""
    found = [root]
    for node in found:
        found += [child for child in node.children if child.children]
    return found[::-1]


def _with_its_child(node: Node) -> Node:
    if len(node.children) == 1:
        (only,) = node.children
        name, count = f"{node.name}/{only.name}", node.count * only.count
        return Node(name, only.kind, count, only.children, only.like)
    return node


def folded(root: Node, alike: Sequence[int]) -> Node:
    """The tree with siblings that differ in their index alone made one.

    They are alike when they hold leaves of the same kinds under the same names.

    Args:
        root: the tree.
        alike: per kind, the first kind that counts as the same.
    """
    known: dict[tuple[object, ...], int] = {}
    made: dict[int, Node] = {}
    for node in _from_below(root):
        made[id(node)] = _folded(node, alike, known, made)
    return made[id(root)]


def _folded(
    node: Node,
    alike: Sequence[int],
    known: dict[tuple[object, ...], int],
    inner: dict[int, Node],
) -> Node:
    """One node, after those in it; it stays the object it is if nothing is folded."""
    groups: dict[tuple[str, int | None], list[tuple[int, Node]]] = {}
    for child in node.children:
        if child.children:
            child = inner[id(child)]
        else:
            child.like = known.setdefault((alike[child.kind],), len(known))
        found = _indexed(child.name)
        key = (child.name, None) if found is None else (found[0], child.like)
        groups.setdefault(key, []).append((found[1] if found else 0, child))
    made = [_merged(stem, group) for (stem, _), group in groups.items()]
    contents = tuple([part for at in made for part in (at.name, at.like, at.count)])
    like = known.setdefault(contents, len(known))
    if made != node.children:
        return Node(node.name, node.kind, 1, made, like)
    node.like = like
    return node


def _merged(stem: str, group: list[tuple[int, Node]]) -> Node:
    first = group[0][1]
    if len(group) == 1:
        return first
    name = stem + spell_indices(sorted(index for index, _ in group))
    return Node(name, first.kind, len(group), first.children, first.like)


def forest(root: Node, kinds: Sequence[Kind]) -> Forest:
    """The tree as columns, with its tree-maps."""
    names: list[str] = []
    parents: list[int] = []
    own: list[int] = []
    counts: list[int] = []
    likes: list[int] = []
    times: list[int] = []  # how many leaves of the tree a node stands for
    stack = [(root, -1, 1)]
    while stack:
        node, parent, above = stack.pop()
        at = len(names)
        names.append(node.name)
        parents.append(parent)
        own.append(node.kind)
        likes.append(node.like)
        counts.append(node.count)
        times.append(above * node.count)
        stack.extend((child, at, times[at]) for child in reversed(node.children))
    weights = [
        kinds[kind].bytes_per_device * many if kind >= 0 else 0
        for kind, many in zip(own, times, strict=True)
    ]
    for at in range(len(names) - 1, 0, -1):
        weights[parents[at]] += weights[at]
    maps = [_treemap.layout(parents, weights, likes, each) for each in (WIDE, TALL)]
    return Forest(
        tuple(names), tuple(parents), tuple(own), tuple(counts), maps[0], maps[1]
    )
