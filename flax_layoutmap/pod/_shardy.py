"""Read collectives, reshards and operations of a module that Shardy has laid out.

Shardy's passes insert a collective wherever a value changes its sharding. Here they are
counted, times the loops around them, as an estimate of the compiled program: a sum of
all-reduces is one all-reduce, an all-reduce of which only slices are used is a
reduce-scatter, and equal gathers of a value are one.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flax_layoutmap.pod._mlir import (
    Array,
    Attributes,
    AxisRef,
    functions,
    is_shared,
    maker_of,
    parts,
)
from flax_layoutmap.pod._records import Kind
from flax_layoutmap.pod._shardy_ops import (
    COPIES,
    MOVES,
    OWN,
    RAGGED,
    RAGGED_DOT,
    UPDATES,
    added_up,
    copied_operand,
    hides_work,
    is_filled,
    last_of,
    location_of,
    looked_up,
    manual_collective,
    moved_axes,
    multiplications,
    operands_of,
    scattered,
    target_of,
    trip_count,
)

# A gather for a use so many operations later is another one on TPUs, as XLA's pass
# schedule-aware-collective-cse merges near ones alone: in the steps of
# benchmarks/pod_steps.py and suggest.py there is one where there are up to 199 between,
# and two from 210 on. `_merge.py` has the rule for a partitioned program.
_FAR = 205
_ONE_ROUND = "loop of unknown length, counted as one round"
# Custom operations, of which Shardy supports some.
_NO_RULE = ("stablehlo.custom_call", "chlo.")
# The result of these is a sum over devices if the operand is one.
_KEEPS_SUMS = (COPIES - {"stablehlo.slice", "stablehlo.dynamic_slice"}) | {
    "sdy.all_slice"
}


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """The loops, branches and shard_maps around an operation."""

    times: int = 1  # executions in a step
    scope: tuple[int, ...] = ()  # the loops and branches around it, by number
    cuts: int = 0  # into how many parts a shard_map splits the work; 0 outside of one


@dataclasses.dataclass(slots=True)
class Found:
    """A collective in the program."""

    kind: Kind
    axes: tuple[AxisRef, ...]
    shape: tuple[int, ...]  # of the payload on one device
    element: str
    place: Place
    location: str  # as MLIR writes it
    leaf: int | None = None  # the argument that it moves, or whose gradient it sums
    is_merged: bool = False  # whether another one sums this, too


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """A value that changes its sharding, by one collective or several."""

    name: str  # of the operation that made the value
    before: Array
    after: Array
    leaf: int | None  # the argument that it is
    executions: int
    location: str
    gathers_only: bool


@dataclasses.dataclass(slots=True)
class LaidOut:
    """The contents of a module."""

    arguments: list[Array] = dataclasses.field(default_factory=list)
    results: list[Array] = dataclasses.field(default_factory=list)
    collectives: list[Found] = dataclasses.field(default_factory=list)
    moves: list[Move] = dataclasses.field(default_factory=list)
    # Of matrix products and convolutions: on one device, and on all if none repeats
    # the work of another; and descriptions of those that are not in these.
    flops: int = 0
    flops_whole: int = 0
    more_flops: dict[str, None] = dataclasses.field(default_factory=dict)
    # What could not be counted → locations in the program.
    unrecognised: dict[str, list[str]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )
    branching: int = 0  # conditionals with collectives or products in a branch
    operations: int = 0


def read(
    module: Any,
    attributes: Attributes,
    state: Sequence[tuple[int, int]] = (),
    *,
    for_tpus: bool = False,
) -> LaidOut:
    """Read a module that `Prepared.lay_out` made.

    `state` has positions of results and of the arguments that they update: sums that a
    result is computed from are those of the argument's gradient. `for_tpus` counts
    collectives as the compiler for TPUs has them, as in `_merge.merge`.
    """
    walk = _Walk(attributes, _FAR if for_tpus else None)
    walk.function(functions(module)["main"])
    walk.name_gradients(state)
    return walk.found


class _Walk:
    """One walk through a module, from loop to loop."""

    def __init__(self, attributes: Attributes, far: float | None = None) -> None:
        """`far`: operations after which a value is gathered again; None: never."""
        self.attributes = attributes
        self.far = math.inf if far is None else far
        self.found = LaidOut()
        self.scopes = 0
        self.arrays: dict[Any, Array] = {}
        self.leaves: dict[Any, int] = {}
        self.ends: Sequence[Any] = ()
        # A value → an equal one, such as the operand of a loop that does not change.
        self.same: dict[Any, Any] = {}
        # An argument of the body of a shard_map → the operand that it is a part of.
        self.whole: dict[Any, Any] = {}
        # The result of an operation with regions → the results of these.
        self.sources: dict[Any, Sequence[Any]] = {}
        # A move of a value to a layout → the result of the first such move, and where.
        self.first: dict[Any, tuple[Any, int]] = {}
        # A value → the collectives that it is the result of, and the sums that it is.
        self.made_by: dict[Any, tuple[int, ...]] = {}
        self.sums: dict[Any, tuple[int, ...]] = {}
        # A value that was moved to another layout → the move.
        self.moves: dict[Any, Move] = {}
        self.handlers: dict[str, Callable[[Any, Place], None]] = {
            "sdy.all_reduce": self.all_reduce,
            **dict.fromkeys(MOVES, self.move),
            "stablehlo.add": self.add,
            **dict.fromkeys(OWN, self.own),
            "stablehlo.dot_general": self.product,
            "stablehlo.convolution": self.product,
            "stablehlo.while": self.loop,
            "stablehlo.case": self.branches,
            "stablehlo.if": self.branches,
            "sdy.manual_computation": self.manual,
            "sdy.named_computation": self.named,
        }

    def function(self, main: Any) -> None:
        block = main.regions[0].blocks[0]
        given: Sequence[Any] = ()
        if "arg_attrs" in main.attributes:
            given = list(main.attributes["arg_attrs"])
        for at, argument in enumerate(block.arguments):
            own = given[at] if at < len(given) else {}
            dims = None
            if "sdy.sharding" in own:
                dims = self.attributes.of(own["sdy.sharding"])
            self.arrays[argument] = self.attributes.array(argument, dims)
            self.leaves[argument] = at
            self.found.arguments.append(self.arrays[argument])
        self.block(block, Place())
        self.ends = list(last_of(block).operands)
        self.found.results = [*map(self.array, self.ends)]
        self.found.moves = list(self.moves.values())

    # ------------------------------------------------------------------- values

    def root(self, value: Any) -> Any:
        """The first of the values that are equal to one."""
        while value in self.same:
            value = self.same[value]
        return value

    def array(self, value: Any) -> Array:
        value = self.root(value)
        if value not in self.arrays:
            op = maker_of(value)
            dims = None if op is None else self.attributes.dims(op, value)
            self.arrays[value] = self.attributes.array(value, dims)
        return self.arrays[value]

    def leaf(self, value: Any) -> int | None:
        """The argument of the step that a value is a copy or a part of."""
        while True:
            value = self.root(value)
            op = maker_of(value)
            if value in self.leaves:
                return self.leaves[value]
            if value in self.whole:
                value = self.whole[value]
            elif op is not None and op.name in COPIES | MOVES.keys() | {
                "sdy.all_slice"
            }:
                value = copied_operand(value, op)
            else:
                return None

    def sums_of(self, value: Any) -> tuple[int, ...]:
        """The sums that a value is, if it and what it is a copy of are used once."""
        while not is_shared(value):
            op = maker_of(value)
            if value in self.sums:
                return self.sums[value]
            if op is None or op.name not in _KEEPS_SUMS:
                break
            value = copied_operand(value, op)
        return ()

    def name_gradients(self, state: Sequence[tuple[int, int]]) -> None:
        """Set the leaf of the sums that new state is computed from."""
        seen: set[Any] = set()
        for result, leaf in state:
            for at in self.sums_behind(self.ends[result], seen):
                one = self.found.collectives[at]
                one.leaf = leaf if one.leaf is None else one.leaf

    def sums_behind(self, value: Any, seen: set[Any]) -> Iterator[int]:
        """The sums that a value is computed from elementwise, and their gathers."""
        todo = [value]
        while todo:
            one = todo.pop()
            if one in seen:
                continue
            seen.add(one)
            op = maker_of(one)
            if op is not None and op.name in ("sdy.all_reduce", "sdy.all_gather"):
                yield from self.made_by.get(self.root(one), ())
            if one in self.sources:
                todo += self.sources[one]
            elif op is not None and one in self.same:
                todo.append(self.same[one])
            elif op is not None and op.name == "stablehlo.scatter":
                todo.append(op.operands[0])
            elif op is not None and op.name in UPDATES:
                todo += op.operands

    # -------------------------------------------------------------- collectives

    def note(self, what: str, op: Any) -> None:
        """Record an operation that is not counted, or not as XLA moves it."""
        self.found.unrecognised[what].append(self.attributes.location(op))

    def count(
        self,
        kind: Kind,
        axes: tuple[AxisRef, ...],
        shape: tuple[int, ...],
        op: Any,
        place: Place,
        leaf: int | None,
    ) -> int:
        """Add a collective; return its position."""
        element = self.attributes.type_of(op.results[0])[1]
        where = location_of(op, self.attributes)
        found = self.found.collectives
        found.append(Found(kind, axes, shape, element, place, where, leaf))
        return len(found) - 1

    def all_reduce(self, op: Any, place: Place) -> None:
        """Count an all-reduce, as a reduce-scatter if only slices of it are used."""
        axes = self.attributes.axes_in(op.attributes["reduction_axes"])
        if parts(axes) == 1:
            return
        leaf, result, source = None, op.results[0], maker_of(op.operands[0])
        if source is not None and source.name == "stablehlo.gather":
            leaf = self.leaf(source.operands[0])  # an embedding
        shape = self.array(result).local_shape
        scatters = scattered(op, axes, self.attributes)
        if source is not None and source.name == "stablehlo.scatter":
            # Rows of an embedding are not scattered over a part of the axes.
            scatters = scatters if len(scatters) == len(axes) else ()
        rest = tuple(axis for axis in axes if axis not in scatters)
        made: list[int] = []
        if scatters:
            kind, moved = "reduce-scatter", shape
            rows = added_up(op, self.array(result), self.array)
            if rows is not None and self.is_smaller(rows, result):
                kind, moved = "all-to-all", self.array(rows).local_shape
            made.append(self.count(kind, scatters, moved, op, place, leaf))
            shape = (-(-math.prod(shape) // parts(scatters)),)
        if parts(rest) > 1:
            made.append(self.count("all-reduce", rest, shape, op, place, leaf))
        self.made_by[result] = self.sums[result] = tuple(made)

    def add(self, op: Any, place: Place) -> None:
        """Merge a sum of all-reduces: it is one all-reduce of a sum."""
        first, second = (self.sums_of(one) for one in op.operands)
        found = self.found.collectives
        if not first or len(first) != len(second):
            return
        pairs = [(found[a], found[b]) for a, b in zip(first, second, strict=True)]
        if all(_alike(one, other) for one, other in pairs):
            self.sums[op.results[0]] = first
            for one, other in pairs:
                other.is_merged = one is not other

    def move(self, op: Any, place: Place) -> None:
        """Count a change of layout; the same change of a value counts once, if near."""
        operand, result = op.operands[0], op.results[0]
        before, after = self.array(operand), self.array(result)
        key = place.scope, op.name, after.dims, self.root(operand)
        now = self.found.operations
        first, then = self.first.setdefault(key, (result, now))
        if now - then > self.far:
            first = result
        axes = moved_axes(op, before.dims, after.dims, self.attributes)
        if first != result:
            self.same[result] = first
        elif parts(axes) > 1 and not is_filled(operand):
            kind, shape, leaf = MOVES[op.name], after.local_shape, self.leaf(operand)
            rows = looked_up(op, before.dims, after.dims)
            if rows is not None and self.is_smaller(rows, result):
                kind, shape = "all-to-all", self.array(rows).local_shape
            at = self.count(kind, axes, shape, op, place, leaf)
            self.made_by[result] = (at,)
            self.note_move(op, before, after, place, leaf)

    def is_smaller(self, value: Any, other: Any) -> bool:
        return self.array(value).local_bytes < self.array(other).local_bytes

    def note_move(
        self, op: Any, before: Array, after: Array, place: Place, leaf: int | None
    ) -> None:
        operand, only = self.root(op.operands[0]), op.name == "sdy.all_gather"
        earlier = self.moves.get(operand)
        maker = maker_of(operand)
        name = "argument" if maker is None else maker.name
        # There and back are two moves.
        if earlier is not None and earlier.before.dims != after.dims:
            del self.moves[operand]
            before, name = earlier.before, earlier.name
            only = only and earlier.gathers_only
        where = location_of(op, self.attributes)
        move = Move(name, before, after, leaf, place.times, where, only)
        self.moves[op.results[0]] = move

    def own(self, op: Any, place: Place) -> None:
        """Count a collective in a shard_map."""
        name = target_of(op)
        kind, axes = manual_collective(name, op, self.attributes.sizes)
        if kind is None:
            self.note(f"{name} over devices that are no mesh axes, not counted", op)
            return
        if parts(axes) == 1:
            return
        if name == RAGGED:
            what = f"{name} with data-dependent sizes, counted as if all rows were sent"
            self.note(what, op)
        gives = kind in ("all-gather", "all-to-all") and name != RAGGED
        for result, operand in zip(op.results, op.operands, strict=False):
            shape = self.array(result if gives else operand).local_shape
            self.count(kind, axes, shape, op, place, self.leaf(operand))

    # ------------------------------------------------------------------- blocks

    def block(self, block: Any, place: Place) -> None:
        """Read a block; most operations have nothing to count."""
        handlers = self.handlers
        for op in block.operations:
            self.found.operations += 1
            operation = op.operation
            name = operation.name
            handler = handlers.get(name)
            if handler is not None:
                handler(operation, place)
            elif name.startswith(_NO_RULE):
                self.without_rule(operation, place)

    def inner(self, place: Place) -> tuple[int, ...]:
        """The scope of another loop or branch."""
        self.scopes += 1
        return (*place.scope, self.scopes)

    def loop(self, op: Any, place: Place) -> None:
        condition, body = op.regions[0].blocks[0], op.regions[1].blocks[0]
        count = trip_count(condition, body, op.operands)
        if count is None:
            self.note(_ONE_ROUND, op)
        ends = list(last_of(body).operands)
        given = zip(
            op.operands, op.results, condition.arguments, body.arguments, strict=True
        )
        for at, (operand, result, tested, argument) in enumerate(given):
            self.same[tested] = operand
            if ends[at] == argument:  # loop-invariant
                self.same[argument] = self.same[result] = operand
            else:
                self.arrays[argument] = self.array(result)
                self.sources[result] = [ends[at], operand]
        before = self.found.flops
        within = Place(place.times * (count or 1), self.inner(place), place.cuts)
        self.block(condition, within)
        self.block(body, within)
        if count is None and self.found.flops > before:
            self.found.more_flops[_ONE_ROUND] = None

    def branches(self, op: Any, place: Place) -> None:
        """Count every branch: which one runs is not in the program."""
        blocks = [region.blocks[0] for region in op.regions]
        counted = 0
        for block in blocks:
            before = self.found.flops, len(self.found.collectives)
            self.block(block, Place(place.times, self.inner(place), place.cuts))
            counted += before != (self.found.flops, len(self.found.collectives))
        self.found.branching += counted > 0
        for at, result in enumerate(op.results):
            self.sources[result] = [last_of(block).operands[at] for block in blocks]

    def named(self, op: Any, place: Place) -> None:
        """Read a computation in the place of a call."""
        block = op.regions[0].blocks[0]
        self.same.update(zip(block.arguments, op.operands, strict=True))
        self.block(block, place)
        self.same.update(zip(op.results, last_of(block).operands, strict=True))

    def manual(self, op: Any, place: Place) -> None:
        """Read the body of a shard_map: its shapes are those of single devices."""
        block = op.regions[0].blocks[0]
        dims, cuts = operands_of(op, self.attributes)
        for at, argument in enumerate(block.arguments):
            self.arrays[argument] = self.attributes.array(argument, dims[at])
            self.whole[argument] = op.operands[at]
        # In one shard_map inside of another, both cut.
        self.block(block, Place(place.times, place.scope, (place.cuts or 1) * cuts))
        ends = last_of(block).operands
        self.sources.update((op.results[at], [end]) for at, end in enumerate(ends))

    # ----------------------------------------------------------------- products

    def product(self, op: Any, place: Place) -> None:
        """Add the operations of a matrix product or a convolution."""
        local, whole = multiplications(op, self.array)
        self.found.flops += 2 * place.times * local
        self.found.flops_whole += 2 * place.times * whole * (place.cuts or 1)

    def without_rule(self, op: Any, place: Place) -> None:
        """Note an operation that Shardy may have no rule for and then replicates."""
        name = target_of(op)
        if place.cuts and name == RAGGED:
            self.own(op, place)
        elif "sdy.sharding" not in op.attributes and any(
            parts(axes) > 1 for one in op.operands for axes in self.array(one).dims
        ):
            what = f"{name} of sharded arrays, not counted"
            self.note(what, op)
            if name == RAGGED_DOT:
                self.found.more_flops[what] = None
        elif name == RAGGED_DOT:
            self.product(op, place)
        elif place.cuts and hides_work(op):
            self.note(f"{name} in a shard_map, not counted", op)


def _alike(one: Found, other: Found) -> bool:
    """Whether two sums are over the same axes, in the same loop or branch."""
    key = one.kind, one.axes, one.place.scope
    return key == (other.kind, other.axes, other.place.scope)
