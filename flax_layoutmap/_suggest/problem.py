"""A step that was lowered once, and what a search may decide about it.

The outputs of modules are lowered with sharding constraints, which carry the paths of
their modules in their names; a candidate changes or drops them.
"""

import collections
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._layout_map import LayoutMap
from flax_layoutmap._resolve.resolve import resolve_origins
from flax_layoutmap._rules.matching import Rule
from flax_layoutmap._suggest.candidate import (
    Candidate,
    Group,
    Node,
    Point,
    Spec,
    groups_of,
)
from flax_layoutmap._suggest.shorten import shorten
from flax_layoutmap.convert._compress import INDEX
from flax_layoutmap.convert._shardings import NEVER_ASKED
from flax_layoutmap.pod._lowered import Lowered
from flax_layoutmap.pod._mlir import bytes_of, functions
from flax_layoutmap.pod._passes import UNCONSTRAINED, Prepared, constraints_in, prepare
from flax_layoutmap.pod._shardy_ops import COPIES

_POINT = re.compile(r"(activations|names)\[([^\]]*)\]")
# Parameters of fewer bytes than this share of all stay replicated.
_LITTLE = 1e-3


def of_layers(path: str) -> str:
    """The path with `0` for each index of a layer, which has parts of its own.

    >>> of_layers("layers/11/attention/kernel"), of_layers("layers/11/kernel")
    ('layers/0/attention/kernel', 'layers/11/kernel')
    """

    def written(index: re.Match[str]) -> str:
        return "0" if path.count("/", index.end()) > 1 else index[0]

    return INDEX.sub(written, path)


# What has the entries of its operand in the same order, if their number is the same.
_SAME_ENTRIES = ("sdy.sharding_constraint", "stablehlo.convert", "stablehlo.slice")


def _are_taken_singly(value: Any) -> bool:
    """Whether a loop takes the entries of the first dim of an array one by one."""
    for use in value.uses:
        op = use.owner.operation
        if op.name == "stablehlo.while":
            inside = op.regions[1].blocks[0].arguments[use.operand_number]
            users = [one.owner.operation for one in inside.uses]
            if any(
                user.name == "stablehlo.dynamic_slice"
                and user.results[0].type.shape[0] == 1
                for user in users
            ):
                return True
        elif op.name in _SAME_ENTRIES:
            (result,) = op.results
            same = result.type.shape[0] == value.type.shape[0]
            if same and _are_taken_singly(result):
                return True
    return False


def _uses(block: Any, given: Mapping[Any, int]) -> Iterator[int]:
    """The arguments of a program as it uses them; a copy is no use."""
    own = dict(given)
    for each in block.operations:
        op = each.operation
        if op.name in COPIES and op.operands[0] in own:
            own[op.results[0]] = own[op.operands[0]]
        elif not op.regions:
            yield from (own[one] for one in op.operands if one in own)
        for region in op.regions:
            for inner in region.blocks:
                taken = zip(inner.arguments, op.operands, strict=False)
                yield from _uses(
                    inner, {one: own[of] for one, of in taken if of in own}
                )


def seed_rules(mesh: DeviceMesh) -> LayoutMap:
    """Rules that replicate everything, with a constraint on each output."""
    rules = LayoutMap(mesh, batch=(), strict=False, indivisible="replicate")
    rules[".*"] = None
    rules.names[".*"] = (...,)
    rules.activations.add(Rule(".*", (...,), rank="skip"))
    return rules


class Problem:
    """A lowered step, its groups, points and classes."""

    def __init__(self, lowered: Lowered, mesh: DeviceMesh) -> None:
        """`lowered` is by `seed_rules`."""
        self.lowered = lowered
        self.mesh = mesh
        self.sizes = {name: n for name, n in mesh.axis_sizes.items() if n > 1}
        self.prepared: Prepared = prepare(lowered.lowered)
        shorten(self.prepared.module)
        self.data = [
            (at, shape)
            for at, shape in enumerate(self._shapes)
            if lowered.leaves[at].role == "data" and shape and not self._is_key(at)
        ]
        self.groups = self._groups()
        # The constraints of no point, by position.
        self.dropped: list[int] = []
        self.points = self._points()

    @functools.cached_property
    def _arguments(self) -> list[Any]:
        main = functions(self.prepared.module)["main"]
        return list(main.regions[0].blocks[0].arguments)

    @functools.cached_property
    def _shapes(self) -> list[tuple[int, ...]]:
        return [tuple(one.type.shape) for one in self._arguments]

    def _is_key(self, at: int) -> bool:
        """Whether an argument is a PRNG key of the old style, which is replicated."""
        kind = self._arguments[at].type
        return str(kind.element_type) == "ui32" and list(kind.shape) in ([2], [4])

    def _dims_of(self, at: int) -> tuple[int, ...]:
        """The dims of an argument, without one that a loop takes singly."""
        argument = self._arguments[at]
        first = 1 if _are_taken_singly(argument) else 0
        return tuple(range(first, len(argument.type.shape)))

    @functools.cached_property
    def kept(self) -> dict[int, Spec]:
        """The specs of data that came with a sharding, which it keeps."""
        are_kept = self.lowered.layouts.are_kept(self.mesh)
        specs = [
            tuple(tuple(name for name, _ in axes if name in self.sizes) for axes in own)
            for own in self.prepared.arguments(self.prepared.module)
        ]
        # in_shardings of jax.jit are in the program alone.
        return {
            at: specs[at]
            for at, _ in self.data
            if are_kept[self.lowered.kept[at]] or any(specs[at])
        }

    @functools.cached_property
    def rows(self) -> dict[int, int]:
        """The dim of the batch, of each array with as many rows as the largest of data.

        It is the first, but for micro-batches or positions that a loop takes singly.
        """
        dims = {at: next(iter(self._dims_of(at)), 0) for at, _ in self.data}
        counts = {at: shape[dims[at]] for at, shape in self.data}
        largest = max(self.data, key=lambda one: math.prod(one[1]), default=None)
        return {
            at: dim
            for at, dim in dims.items()
            if largest is not None and counts[at] == counts[largest[0]]
        }

    def _groups(self) -> list[Group]:
        layouts, leaves = self.lowered.layouts, self.lowered.leaves
        place: dict[int, int] = {}  # number of a leaf of state → that of the argument
        at_of = {leaf: at for at, leaf in enumerate(self.lowered.kept)}
        resolved = [*resolve_origins(layouts.origins, seed_rules(self.mesh).freeze())]
        leaf = state = 0
        for part in layouts.parts:
            for _ in part.leaves:
                if part.name in layouts.names:
                    if leaf in at_of:
                        place[state] = at_of[leaf]
                    state += 1
                leaf += 1
        origins = layouts.origins
        owned = collections.defaultdict(list)
        for number, origin in enumerate(origins.state or ()):
            if origin is None or origin.owner is None or origin.dims is None:
                continue
            if origin.owner in origins.owners and number in place:
                owner = place.get(origins.owners[origin.owner])
                owned[owner].append((place[number], origin.dims))
        found = collections.defaultdict(list)
        for number, at in place.items():
            is_asked = resolved[number].reason not in NEVER_ASKED
            if is_asked and leaves[at].role in ("parameter", "other"):
                found[of_layers(leaves[at].path), self._shapes[at]].append(at)
        elements = [self.prepared.attributes.type_of(one)[1] for one in self._arguments]
        sizes = {
            key: sum(bytes_of(key[1], elements[at]) for at in own)
            for key, own in found.items()
        }
        least = _LITTLE * sum(sizes.values())
        groups = [
            Group(
                path=key[0],
                paths=tuple(leaves[at].path for at in own),
                shape=key[1],
                bytes=sizes[key],
                arguments=tuple(own),
                state=tuple(pair for at in own for pair in owned[at]),
                dims=self._dims_of(own[0]) if sizes[key] > least else (),
            )
            for key, own in found.items()
        ]
        # Not by names, nor by the order of arguments.
        main = functions(self.prepared.module)["main"].regions[0].blocks[0]
        given = {argument: at for at, argument in enumerate(self._arguments)}
        used = list(dict.fromkeys(_uses(main, given)))
        rank = {at: place for place, at in enumerate(used)}

        def order(group: Group) -> tuple[int, tuple[int, ...], int]:
            first = min(rank.get(at, len(used)) for at in group.arguments)
            return -group.bytes, group.shape, first

        return sorted(groups, key=order)

    def _points(self) -> list[Point]:
        places: dict[tuple[str, str], list[tuple[int, tuple[int, ...]]]] = {}
        parameters = {group.path for group in self.groups} | {
            path for group in self.groups for path in group.paths
        }
        for at, op in enumerate(constraints_in(self.prepared.module)):
            name = self.prepared.attributes.location(op).partition('"')[2]
            named = _POINT.findall(name.partition('"')[0])
            if named and not named[-1][1]:  # a whole model: rules are for its parts
                self.dropped.append(at)
            elif named:
                place = at, tuple(op.results[0].type.shape)
                places.setdefault(named[-1], []).append(place)
        found: dict[tuple[str, str, tuple[int, ...], bool], dict[str, list[int]]] = {}
        for (section, path), own in places.items():  # in the order of the program
            shapes = {shape for _, shape in own}
            shape = tuple(math.gcd(*sizes) for sizes in zip(*shapes, strict=False))
            has_one_rank = len({*map(len, shapes)}) == 1
            if not has_one_rank:  # a dim behind the first may be another one in each
                shape = shape[:1]
            below = f"{path}/"
            has_parts = any("/" in one.partition(below)[2] for one in parameters)
            layer = of_layers(f"{below}output/0" if has_parts else f"{below}output")
            key = section, layer, shape, has_one_rank
            found.setdefault(key, {})[path] = [at for at, _ in own]
        return [
            Point(section, (*own,), shape, (*itertools.chain(*own.values()),), same)
            for (section, _, shape, same), own in found.items()
        ]

    # ------------------------------------------------------------------ classes

    @functools.cached_property
    def batch_class(self) -> frozenset[Node]:
        """The dims that follow the rows of the data."""
        axes = min(self.batches, key=self._parts)
        if not axes:
            return frozenset()
        return self._followers(
            {at: (*[()] * dim, axes) for at, dim in self.rows.items()}
        )

    @functools.cached_property
    def classes(self) -> list[frozenset[Node]]:
        """Sets of dims that follow one another, those of the most bytes first."""
        found: dict[frozenset[Node], None] = {}
        smallest_first = sorted(self.sizes, key=self.sizes.__getitem__)
        seen: set[Node] = set()
        for number, group in enumerate(self.groups):
            for dim in group.dims:
                node, size = ("parameter", number, dim), group.shape[dim]
                fit = [axis for axis in smallest_first if self.divides(size, (axis,))]
                if node in seen or not fit or node in self.batch_class:
                    continue
                dims = range(len(group.shape))
                spec = [(fit[0],) if one == dim else () for one in dims]
                own = self._followers({at: spec for at in group.arguments}) | {node}
                seen |= {one for one in own if one[0] == "parameter"}
                found[own] = None
        return sorted(found, key=self._order)

    def _order(self, nodes: frozenset[Node]) -> tuple[Any, ...]:
        """By the bytes of the parameters of a class, then by the sizes of its dims."""
        own = [(number, dim) for kind, number, dim in nodes if kind == "parameter"]
        weight = sum(self.groups[number].bytes for number, _ in own)
        sizes = sorted((self.groups[number].shape[dim] for number, dim in own))
        return -weight, [-size for size in sizes], sorted(nodes)

    def has_most(self, nodes: frozenset[Node]) -> bool:
        """Whether a class has dims of most large groups."""
        large = sum(1 for group in self.groups if group.dims)
        return len(groups_of(nodes)) > large / 2

    @functools.cached_property
    def model_dim(self) -> frozenset[Node]:
        """The class of most large groups, if there is one such class alone."""
        most = [own for own in self.classes if self.has_most(own)]
        return most[0] if len(most) == 1 else frozenset()

    @functools.cached_property
    def batches(self) -> list[tuple[str, ...]]:
        """The sets of axes that the batch may be split over, the largest first.

        If rows came split over axes, these are the only set.
        """
        given = (self.kept[at][dim] for at, dim in self.rows.items() if at in self.kept)
        if axes := next(filter(None, given), ()):
            return [axes]
        rows = [shape[self.rows[at]] for at, shape in self.data if at in self.rows]
        found = [
            axes
            for count in range(len(self.sizes), -1, -1)
            for axes in itertools.combinations(self.sizes, count)
            if not axes or any(self.divides(size, axes) for size in rows)
        ]
        return found if len(found) == 1 else [axes for axes in found if axes]

    def _followers(self, seeds: Mapping[int, Any]) -> frozenset[Node]:
        arguments, operands = self.prepared.spread(seeds)
        found: set[Node] = set()

        def add(kind: str, number: int, dims: Sequence[Any]) -> None:
            found.update((kind, number, dim) for dim, axes in enumerate(dims) if axes)

        for number, group in enumerate(self.groups):
            add("parameter", number, arguments[group.arguments[0]])
        for number, (at, _) in enumerate(self.data):
            add("data", number, arguments[at])
        for number, point in enumerate(self.points):
            for at in point.constraints:
                if any(operands.get(at, ())):
                    add("output", number, operands[at])
                    break
        return frozenset(found)

    # --------------------------------------------------------------- candidates

    def divides(self, size: int, axes: Sequence[str]) -> bool:
        """Whether a dim of this size can be split over some axes."""
        return size % self._parts(axes) == 0

    def _parts(self, axes: Sequence[str]) -> int:
        return math.prod(self.sizes[axis] for axis in axes)

    def batch_of_data(self, batch: tuple[str, ...]) -> tuple[str, ...]:
        """The axes that rules give to the first dims of data, which all divide or none.

        Without them, the layouts of outputs have the batch. Data that is kept as it
        came does not count.
        """
        return () if self.undivided(batch) else batch

    def undivided(self, axes: Sequence[str]) -> list[int]:
        """The data whose first dim cannot be split over some axes."""
        free = ((at, shape) for at, shape in self.data if at not in self.kept)
        return [at for at, shape in free if not self.divides(shape[0], axes)]

    def point_spec(self, number: int, candidate: Candidate) -> Spec:
        """The layout of an output under a rule.

        An axis that is of the batch and of a class goes to one of the two.
        """
        point = self.points[number]
        found: list[tuple[str, ...]] = [()] * len(point.shape)
        by_batch = [
            (axis, dim)
            for dim, follows in enumerate(self._follow_batch(number))
            if follows
            for axis in candidate.batch
        ]
        by_class = [
            (axis, dim)
            for axis, at in sorted(candidate.placed)
            for dim in range(len(point.shape))
            if ("output", number, dim) in self.classes[at]
        ]
        is_turned = number in candidate.turned
        used: set[str] = set()
        for axis, dim in by_class + by_batch if is_turned else by_batch + by_class:
            if axis not in used and self.divides(point.shape[dim], (*found[dim], axis)):
                used.add(axis)
                found[dim] += (axis,)
        return tuple(found)

    @functools.cached_property
    def exchanges(self) -> dict[int, list[frozenset[int]]]:
        """Classes that named layouts have beside the batch → points that may be turned.

        As of tokens by expert: from where they are to the devices of their experts. Of
        the named ones all are, or one; the outputs of modules between them always.
        """
        found = {}
        for number, nodes in enumerate(self.classes):
            own = {at for kind, at, _ in nodes if kind == "output"}
            both = {at for at in own if any(self._follow_batch(at))}
            named = {at for at in both if self.points[at].section == "names"}
            if named and not self.has_most(nodes):
                one_by_one = (both - named | {at} for at in sorted(named))
                found[number] = [*map(frozenset, (both, *one_by_one))]
        return found

    def arguments(self, candidate: Candidate) -> dict[int, Spec]:
        """The specs of the program's arguments."""
        batch = self.batch_of_data(candidate.batch)
        found: dict[int, Spec] = {
            at: (batch, *[()] * (len(shape) - 1)) for at, shape in self.data
        }
        found |= self.kept
        for group, spec in zip(self.groups, candidate.specs, strict=True):
            found.update(dict.fromkeys(group.arguments, spec))
            for at, dims in group.state:
                found[at] = tuple(() if dim is None else spec[dim] for dim in dims)
        return found

    def constraints(self, candidate: Candidate) -> dict[int, Any]:
        """The specs of the program's constraints; None for one without a rule."""
        found: dict[int, Any] = dict.fromkeys(self.dropped)
        for number, point in enumerate(self.points):
            spec: Any = None
            is_turned = number in candidate.turned
            if candidate.fixed is None and point.has_one_rank:
                spec = [
                    axes if follows or is_turned and axes else UNCONSTRAINED
                    for axes, follows in zip(
                        self.point_spec(number, candidate),
                        self._follow_batch(number),
                        strict=True,
                    )
                ]
            elif number in (candidate.fixed or ()):
                spec = self.point_spec(number, candidate)
            found.update(dict.fromkeys(point.constraints, spec))
        return found

    def _follow_batch(self, number: int) -> list[bool]:
        """Whether each dim of an output follows the batch."""
        dims = range(len(self.points[number].shape))
        return [("output", number, dim) in self.batch_class for dim in dims]

    def lay_out(self, candidate: Candidate) -> Any:
        """The program under a candidate, with collectives."""
        return self.prepared.lay_out(
            self.arguments(candidate),
            self.lowered.pairs,
            self.constraints(candidate),
        )
