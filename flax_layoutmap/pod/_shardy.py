"""An estimate of a step's collectives, from a module that Shardy has laid out.

It counts the collectives that Shardy's passes write, times the loops around them. A
chain of additions of all-reduces is one all-reduce, a sum that is sliced later is a
reduce-scatter, and equal gathers of one value are one. Matrix products and reshards are
exact; what XLA's partitioner adds is not in it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from flax_layoutmap.pod._dataflow import Dataflow, added, gathered_from, scattered
from flax_layoutmap.pod._mlir import Attributes, AxisRef, functions, mesh_sizes
from flax_layoutmap.pod._records import Kind
from flax_layoutmap.pod._shardy_ops import (
    MOVING,
    OWN,
    RAGGED,
    RAGGED_DOT,
    changed_axes,
    hides_work,
    is_shared,
    last_of,
    location_of,
    manual_collective,
    multiplications,
    operands_of,
    target_of,
    trip_count,
)
from flax_layoutmap.pod._values import Found, Move, Place, Spread, Value, parts


class Collectives:
    """The collectives of one module.

    Args:
        values: its values.
        found: what is read from it, to which they are added.
    """

    def __init__(self, values: Dataflow, found: Spread) -> None:
        self._values = values
        self._found = found
        self._attributes = values.attributes
        self._gathered: dict[Any, Value] = {}

    def say(self, what: str, op: Any) -> None:
        """Something that could not be counted, or not as XLA moves it."""
        self._found.unrecognised[what].append(self._attributes.location(op))

    # --------------------------------------------------------------- sums and moves

    def all_reduce(self, op: Any, place: Place) -> None:
        """A sum of what the devices have: whole, or in parts."""
        axes = self._attributes.axes_in(op.attributes["reduction_axes"])
        value = self._moved(op)
        if parts(axes) == 1:
            return
        leaf, shape = gathered_from(op, self._values), value.local_shape
        scatters = scattered(op, axes, self._attributes)
        rest = tuple(axis for axis in axes if axis not in scatters)
        if scatters:
            at = self._add("reduce-scatter", scatters, shape, value, op, place, leaf)
            value.sums = (at,)
            shape = (-(-math.prod(shape) // parts(scatters)),)
        if rest and parts(rest) > 1:
            at = self._add("all-reduce", rest, shape, value, op, place, leaf)
            value.sums = (*value.sums, at)
        value.index = value.sums[0] if value.sums else None
        value.shared = is_shared(op.results[0])

    def add_sums(self, op: Any, place: Place) -> None:
        """A sum of all-reduces is one all-reduce of a sum."""
        operands = [self._values.of(one) for one in op.operands]
        if any(one.sums for one in operands):
            value = self._values.of(op.results[0])
            sums = [() if one.shared else one.sums for one in operands]
            value.sums = added(self._found.collectives, *sums)
            value.shared = bool(value.sums) and is_shared(op.results[0])

    def slice(self, op: Any, place: Place) -> None:
        """A value of which each device takes its part."""
        operand, value = self._values.of(op.operands[0]), self._moved(op)
        value.leaf, value.sums = operand.leaf, operand.sums
        value.shared = bool(value.sums) and (operand.shared or is_shared(op.results[0]))

    def move(self, op: Any, place: Place) -> None:
        """A value that gets another layout."""
        name, operand = op.name, self._values.of(op.operands[0])
        value = self._moved(op)
        key = place.scope, name, id(operand), value.dims
        known = self._gathered.get(key)
        if known is not None:
            self._values.say(op.results[0], known)
            return
        self._gathered[key] = value
        value.leaf = operand.leaf
        axes = changed_axes(name, operand.dims, value.dims)
        if parts(axes) > 1:
            shape, leaf = value.local_shape, value.leaf
            value.index = self._add(MOVING[name], axes, shape, value, op, place, leaf)
            self._note_move(op, operand, value, place)

    def _moved(self, op: Any) -> Value:
        """The result of an operation that moves its operand."""
        dims = self._attributes.of(op.attributes["out_sharding"])
        result = op.results[0]
        return self._values.say(result, self._values.new(op.name, result, dims))

    def _note_move(self, op: Any, operand: Value, value: Value, place: Place) -> None:
        earlier = self._found.moves.get(id(operand))
        only, before = op.name == "sdy.all_gather", operand
        # There and back are two moves.
        if earlier is not None and earlier.before.dims != value.dims:
            del self._found.moves[id(operand)]
            before, only = earlier.before, only and earlier.gathers_only
        where = location_of(op, self._attributes)
        move = Move(before, value, place.times, where, only)
        self._found.moves[id(value)] = move

    # ---------------------------------------------------------------- in shard_map

    def own(self, op: Any, place: Place) -> None:
        """A collective that the program itself asks for, inside of a shard_map."""
        name, values = target_of(op), self._values.results(op)
        kind, axes = manual_collective(name, op, self._found.sizes)
        if kind is None:
            what = f"{name} over devices that are no mesh axes, not counted"
            self.say(what, op)
            return
        if parts(axes) == 1:
            return
        if name == RAGGED:
            what = f"{name} of rows that the data says, counted as if all were sent"
            self.say(what, op)
        gives = kind in ("all-gather", "all-to-all") and name != RAGGED
        for at, value in enumerate(values):
            operand = self._values.of(op.operands[at])
            shape = (value if gives else operand).local_shape
            self._add(kind, axes, shape, value, op, place, operand.leaf)

    def _add(
        self,
        kind: Kind,
        axes: tuple[AxisRef, ...],
        shape: tuple[int, ...],
        value: Value,
        op: Any,
        place: Place,
        leaf: int | None,
    ) -> int:
        """Adds a collective; returns its position."""
        where, element = location_of(op, self._attributes), value.element
        scope = place.scope
        one = Found(kind, axes, shape, element, place.times, where, scope, leaf)
        self._found.collectives.append(one)
        return len(self._found.collectives) - 1


_ONE_ROUND = "loop of unknown length, counted as one round"
# Operations of other compilers, some of which Shardy knows.
_NO_RULE = ("stablehlo.custom_call", "chlo.")


def read(module: Any, attributes: Attributes | None = None) -> Spread:
    """Walks through a module that `spread` made.

    Args:
        module: the module.
        attributes: what reads its operations, and has read others of this program.
    """
    return _Walk(module, attributes or Attributes(mesh_sizes(module))).run()


class _Walk:
    """One walk through a module, from loop to loop."""

    def __init__(self, module: Any, attributes: Attributes) -> None:
        self.main = functions(module)["main"]
        self.attributes = attributes
        self.values = Dataflow(attributes)
        self.found = Spread(mesh_sizes(module), [])
        self.loops = 0
        self.collectives = collectives = Collectives(self.values, self.found)
        self.handlers: dict[str, Callable[[Any, Place], None]] = {
            "sdy.all_reduce": collectives.all_reduce,
            "sdy.all_slice": collectives.slice,
            **dict.fromkeys(MOVING, collectives.move),
            "stablehlo.add": collectives.add_sums,
            **dict.fromkeys(OWN, collectives.own),
            "stablehlo.dot_general": self._product,
            "stablehlo.convolution": self._product,
            "stablehlo.while": self._loop,
            "stablehlo.case": self._branches,
            "stablehlo.if": self._branches,
            "sdy.manual_computation": self._manual,
            "sdy.named_computation": self._named,
        }

    def run(self) -> Spread:
        block = self.main.regions[0].blocks[0]
        given: Sequence[Any] = ()
        if "arg_attrs" in self.main.attributes:
            given = list(self.main.attributes["arg_attrs"])
        for at, argument in enumerate(block.arguments):
            own = given[at] if at < len(given) else {}
            dims = None
            if "sdy.sharding" in own:
                dims = self.attributes.of(own["sdy.sharding"])
            value = self.values.new("argument", argument, dims)
            value.leaf = at
            self.found.arguments.append(self.values.say(argument, value))
        self._block(block, Place(1, ()))
        ends = last_of(block).operands
        self.found.results = [*map(self.values.of, ends)]
        self.found.gradients_of = lambda at, seen: self.values.gradients_of(
            ends[at], seen
        )
        return self.found

    # ------------------------------------------------------------------- blocks

    def _block(self, block: Any, place: Place) -> None:
        """Walks through a block; of most operations nothing is read here."""
        handlers = self.handlers
        for op in block.operations:
            operation = op.operation
            name = operation.name
            handler = handlers.get(name)
            if handler is not None:
                handler(operation, place)
            elif name.startswith(_NO_RULE):
                self._without_rule(operation, place)
        self.found.operations += len(block.operations)

    def _loop(self, op: Any, place: Place) -> None:
        condition, body = op.regions[0].blocks[0], op.regions[1].blocks[0]
        count = trip_count(condition, body, op.operands)
        if count is None:
            self.collectives.say(_ONE_ROUND, op)
        self.loops += 1
        dims = self.attributes.per_value(op)
        values, ends = self.values, last_of(body).operands
        same = [
            end == argument for end, argument in zip(ends, body.arguments, strict=True)
        ]
        for at, argument in enumerate(body.arguments):
            if same[at]:  # in every round
                values.say(argument, values.of(op.operands[at]))
            else:
                own = dims[at] if at < len(dims) else None
                values.say(argument, values.new("loop", argument, own))
        for argument, operand in zip(condition.arguments, op.operands, strict=True):
            values.say(argument, values.of(operand))
        times, scope = place.times * (count or 1), (*place.scope, self.loops)
        before = self.found.flops
        for block in (condition, body):
            self._block(block, Place(times, scope, place.cuts))
        if count is None and self.found.flops > before:
            self.found.more_flops[_ONE_ROUND] = None
        for at, result in enumerate(op.results):
            if same[at]:
                values.say(result, values.of(op.operands[at]), (op.operands[at],))
                continue
            own = dims[at] if at < len(dims) else None
            made = values.new("stablehlo.while", result, own)
            values.say(result, made, (ends[at], op.operands[at]))

    def _branches(self, op: Any, place: Place) -> None:
        """Every branch is counted: which one runs is not in the program."""
        blocks = [region.blocks[0] for region in op.regions]
        counted = 0
        for block in blocks:
            before = self.found.flops, len(self.found.collectives)
            self._block(block, place)
            counted += before != (self.found.flops, len(self.found.collectives))
        self.found.branching += counted > 0
        for at, value in enumerate(self.values.results(op)):
            ends = [last_of(block).operands[at] for block in blocks]
            self.values.say(op.results[at], value, ends)

    def _named(self, op: Any, place: Place) -> None:
        """A computation that stands in the place of a call."""
        block = op.regions[0].blocks[0]
        for argument, operand in zip(block.arguments, op.operands, strict=True):
            self.values.say(argument, self.values.of(operand))
        self._block(block, place)
        for result, end in zip(op.results, last_of(block).operands, strict=True):
            self.values.say(result, self.values.of(end), (end,))

    def _manual(self, op: Any, place: Place) -> None:
        """The body of a shard_map: its shapes are those of single devices."""
        block, values = op.regions[0].blocks[0], self.values
        dims, cuts = operands_of(op, self.attributes)
        for at, argument in enumerate(block.arguments):
            value = values.new("manual", argument, dims[at])
            value.leaf = values.of(op.operands[at]).leaf
            values.say(argument, value)
        # In one shard_map inside of another, both cut.
        self._block(block, Place(place.times, place.scope, (place.cuts or 1) * cuts))
        dims, ends = self.attributes.per_value(op, "out_shardings"), last_of(block)
        for at, result in enumerate(op.results):
            made = values.new("manual", result, dims[at])
            values.say(result, made, (ends.operands[at],))

    # ----------------------------------------------------------------- products

    def _product(self, op: Any, place: Place) -> None:
        """Adds the operations of a matrix product, or of a convolution."""
        local, whole = multiplications(op, self.values.of)
        self.found.flops += 2 * place.times * local
        self.found.flops_whole += 2 * place.times * whole * (place.cuts or 1)

    def _without_rule(self, op: Any, place: Place) -> None:
        """What Shardy may have no rule for: then it is made whole on every device."""
        name = target_of(op)
        if place.cuts and name == RAGGED:
            self.collectives.own(op, place)
        elif "sdy.sharding" not in op.attributes and self._has_sharded(op):
            what = f"{name} of sharded arrays, not counted"
            self.collectives.say(what, op)
            if name == RAGGED_DOT:
                self.found.more_flops[what] = None
        elif name == RAGGED_DOT:
            self._product(op, place)
        elif place.cuts and hides_work(op):
            self.collectives.say(f"{name} in a shard_map, not counted", op)

    def _has_sharded(self, op: Any) -> bool:
        """Whether any operand is sharded."""
        operands = map(self.values.of, op.operands)
        return any(parts(axes) > 1 for one in operands for axes in one.dims)
