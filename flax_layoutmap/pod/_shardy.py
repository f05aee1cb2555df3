"""Reads a module that Shardy has laid out: collectives, reshards, matrix products.

Loops are multiplied. Five things are counted as the compiler does them, not as they
are written: a chain of additions of all-reduces is one all-reduce; a sum that is sliced
later is scattered; equal gathers of one value are one gather if they are close to each
other; rows are looked up in sharded tables, and slices written along sharded dims, as
the partitioner of XLA does it.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from flax_layoutmap.pod._attributes import (
    Attributes,
    AxisRef,
    Dims,
    functions,
    mesh_sizes,
)
from flax_layoutmap.pod._dataflow import Dataflow
from flax_layoutmap.pod._distances import Distances
from flax_layoutmap.pod._lookup_ops import GATHER, SCATTER, LookupOps
from flax_layoutmap.pod._loops import trip_count
from flax_layoutmap.pod._made_of import MadeOf
from flax_layoutmap.pod._manual import (
    RAGGED,
    hides_work,
    manual_collective,
    operands_of,
    target_of,
)
from flax_layoutmap.pod._operations import (
    MOVING,
    RAGGED_DOT,
    changed_axes,
    is_shared,
    last_of,
    location_of,
    maker_of,
    multiplications,
)
from flax_layoutmap.pod._records import Kind
from flax_layoutmap.pod._shifts import SHIFTING, shifts
from flax_layoutmap.pod._slices import (
    TAKE,
    TOP_K,
    WRITE,
    gathered,
    moved_to_slice,
    written_whole,
)
from flax_layoutmap.pod._spread import Found, Move, PerRound, Scope, Spread
from flax_layoutmap.pod._sums import added, gathered_from, partial_results, scattered
from flax_layoutmap.pod._values import Value, parts

# Operations of other compilers, some of which Shardy knows.
_NO_RULE = ("stablehlo.custom_call", "chlo.")
# What an operation inside of shard_map says for itself.
_MANUAL = (
    "stablehlo.all_reduce",
    "stablehlo.all_gather",
    "stablehlo.reduce_scatter",
    "stablehlo.all_to_all",
    "stablehlo.collective_permute",
    "stablehlo.collective_broadcast",
)


def read(
    module: Any,
    attributes: Attributes | None = None,
    *,
    partitions: bool = True,
    for_tpus: bool = False,
    roles: Sequence[str] = (),
) -> Spread:
    """Walks through a module that `spread` made.

    Args:
        module: the module.
        attributes: what reads its operations, and has read others of this program.
        partitions: whether XLA's own partitioner does lookups, not Shardy.
        for_tpus: whether equal gathers stay apart where their uses are.
        roles: the role of each argument, to name what is made of parameters alone.
    """
    known = attributes or Attributes(mesh_sizes(module))
    return _Walk(module, known, partitions, for_tpus, roles).run()


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Where in the program the walk is.

    Attributes:
        times: how often what stands there runs in a step.
        scope: the loops around it.
        cuts: inside of a shard_map, into how many parts its axes cut the work; else 0.
    """

    times: int
    scope: Scope
    cuts: int = 0


def _key(value: Value, place: _Place) -> Any:
    """The same for gathers that the compiler makes one of."""
    return place.scope, id(value.root), value.root_dims(), value.element


class _Walk:
    """One walk through a module, from loop to loop."""

    def __init__(
        self,
        module: Any,
        attributes: Attributes,
        partitions: bool,
        for_tpus: bool,
        roles: Sequence[str],
    ) -> None:
        self.main = functions(module)["main"]
        self.attributes = attributes
        self.values = Dataflow(attributes)
        self.found = Spread(mesh_sizes(module), [])
        self.made_of = MadeOf(self.values, self.found.arguments, roles)
        self.loops = 0
        self.gathered: dict[Any, Value] = {}
        self.at = 0
        self.distances = Distances() if for_tpus else None
        self.lookups = LookupOps(attributes, self.values) if partitions else None
        self.handlers: dict[str, Callable[[Any, _Place], None]] = {
            "sdy.all_reduce": self._all_reduce,
            "sdy.all_slice": self._move,
            **dict.fromkeys(MOVING, self._move),
            "stablehlo.add": self._add_sums,
            GATHER: self._lookup,
            SCATTER: self._lookup,
            "stablehlo.dot_general": self._product,
            **dict.fromkeys(SHIFTING, self._shift),
            WRITE: self._write,
            TAKE: self._take,
            "stablehlo.convolution": self._convolution,
            RAGGED_DOT: self._ragged_product,
            "stablehlo.while": self._loop,
            "stablehlo.case": self._branches,
            "stablehlo.if": self._branches,
            "sdy.manual_computation": self._manual,
            "sdy.named_computation": self._named,
            **dict.fromkeys(_MANUAL, self._own_collective),
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
        self._block(block, _Place(1, ()))
        ends = last_of(block).operands
        self.found.results = [*self.values.every(ends)]
        self.found.gradients_of = lambda at, seen: self.values.gradients_of(
            ends[at], seen
        )
        return self.found

    # ------------------------------------------------------------------- blocks

    def _block(self, block: Any, place: _Place) -> None:
        """Walks through a block; of most operations nothing is read here."""
        handlers, at = self.handlers, -1
        for at, op in enumerate(block.operations):
            operation = op.operation
            name = operation.name
            handler = handlers.get(name)
            if handler is not None:
                self.at = at
                handler(operation, place)
            elif name.startswith(_NO_RULE):
                self._without_rule(operation, place)
        self.found.operations += at + 1

    def _loop(self, op: Any, place: _Place) -> None:
        condition, body = op.regions[0].blocks[0], op.regions[1].blocks[0]
        count = trip_count(condition, body, op.operands)
        if count is None:
            self.found.unrecognised["loop of unknown length, counted as one round"] += 1
        self.loops += 1
        dims = self.attributes.per_value(op)
        values, ends = self.values, last_of(body).operands
        same = [
            end == argument for end, argument in zip(ends, body.arguments, strict=True)
        ]
        for at, argument in enumerate(body.arguments):
            if same[at]:  # in every round
                values.enter(argument, op.operands[at])
            else:
                own = dims[at] if at < len(dims) else None
                values.say(argument, values.new("loop", argument, own))
        times, scope = place.times * (count or 1), (*place.scope, self.loops)
        self._block(body, _Place(times, scope, place.cuts))
        for at, result in enumerate(op.results):
            if same[at]:
                values.say(result, values.of(op.operands[at]), (op.operands[at],))
                continue
            own = dims[at] if at < len(dims) else None
            made = values.new("stablehlo.while", result, own)
            values.say(result, made, (ends[at], op.operands[at]))

    def _branches(self, op: Any, place: _Place) -> None:
        """Every branch is counted: which one runs is not in the program."""
        blocks = [region.blocks[0] for region in op.regions]
        counted = 0
        for block in blocks:
            before = self.found.flops, len(self.found.collectives)
            self._block(block, place)
            counted += before != (self.found.flops, len(self.found.collectives))
        self.found.branching += counted > 0
        dims = self.attributes.per_value(op)
        for at, result in enumerate(op.results):
            ends = [last_of(block).operands[at] for block in blocks]
            own = dims[at] if at < len(dims) else None
            self.values.say(result, self.values.new(op.name, result, own), ends)

    def _named(self, op: Any, place: _Place) -> None:
        """A computation that stands in the place of a call."""
        block = op.regions[0].blocks[0]
        for argument, operand in zip(block.arguments, op.operands, strict=True):
            self.values.enter(argument, operand)
        self._block(block, place)
        for result, end in zip(op.results, last_of(block).operands, strict=True):
            self.values.say(result, self.values.of(end), (end,))

    def _manual(self, op: Any, place: _Place) -> None:
        """The body of a shard_map: its shapes are those of single devices."""
        block, values = op.regions[0].blocks[0], self.values
        dims, cuts = operands_of(op, self.attributes)
        for at, argument in enumerate(block.arguments):
            value = values.new("manual", argument, dims[at])
            value.leaf = values.of(op.operands[at]).leaf
            values.enter(argument, op.operands[at], value)
        # In one shard_map inside of another, both cut.
        self._block(block, _Place(place.times, place.scope, (place.cuts or 1) * cuts))
        dims, ends = self.attributes.per_value(op, "out_shardings"), last_of(block)
        for at, result in enumerate(op.results):
            made = values.new("manual", result, dims[at])
            values.say(result, made, (ends.operands[at],))

    # -------------------------------------------------------------- collectives

    def _all_reduce(self, op: Any, place: _Place) -> None:
        axes = self.attributes.axes_in(op.attributes["reduction_axes"])
        value = self._moved(op)
        if self._is_replaced(op):
            operand = self.values.of(op.operands[0])
            value.sums, value.index = operand.sums, operand.index
            value.leaf, value.shared = operand.leaf, is_shared(op.results[0])
            return
        if parts(axes) == 1:
            return
        leaf, source = gathered_from(op, self.values), op.operands[0]
        partial = partial_results(op, self.values)
        if partial is not None:
            self._add("all-gather", axes, partial, value, op, place, leaf, source)
            return
        scatters = scattered(op, axes, self.attributes)
        rest = tuple(axis for axis in axes if axis not in scatters)
        shape = value.local_shape
        if scatters:
            kind = "reduce-scatter"
            self._add(kind, scatters, shape, value, op, place, leaf, source)
            value.sums = (len(self.found.collectives) - 1,)
            shape = (-(-math.prod(shape) // parts(scatters)),)
        if rest and parts(rest) > 1:
            self._add("all-reduce", rest, shape, value, op, place, leaf, source)
            value.sums = (*value.sums, len(self.found.collectives) - 1)
        value.index = value.sums[0] if value.sums else None
        value.shared = is_shared(op.results[0])

    def _moved(self, op: Any) -> Value:
        """The result of an operation that moves its operand."""
        dims = self.attributes.of(op.attributes["out_sharding"])
        result = op.results[0]
        return self.values.say(result, self.values.new(op.name, result, dims))

    def _add_sums(self, op: Any, place: _Place) -> None:
        """A sum of all-reduces is one all-reduce of a sum."""
        operands = [self.values.with_sums(one) for one in op.operands]
        if any(operands):
            value = self.values.of(op.results[0])
            sums = [() if one is None or one.shared else one.sums for one in operands]
            value.sums = added(self.found.collectives, *sums)
            value.shared = bool(value.sums) and is_shared(op.results[0])

    def _move(self, op: Any, place: _Place) -> None:
        name, operand = op.name, self.values.of(op.operands[0])
        value = self._moved(op)
        value.leaf, value.base, value.order = operand.leaf, operand.root, operand.order
        value.is_uniform = operand.is_uniform
        replaced = self._is_replaced(op)
        if replaced:
            value.index = operand.index
        if name == "sdy.all_slice" or value.is_uniform or replaced:
            value.sums = operand.sums
            value.shared = operand.shared or (
                bool(operand.sums) and is_shared(op.results[0])
            )
            return
        key = _key(value, place)
        known = self.gathered.get(key) if name == "sdy.all_gather" else None
        if known is not None and not self._is_far(key, op):
            value.index = known.index
            return
        axes = changed_axes(name, operand.dims, value.dims)
        if parts(axes) > 1:
            kind = MOVING[name]
            leaf, source = value.leaf, op.operands[0]
            self._add(kind, axes, value.local_shape, value, op, place, leaf, source)
            value.index = len(self.found.collectives) - 1
            self._note_move(op, operand, value, place)
        self._keep(key, value, op)

    def _keep(self, key: Any, value: Value, op: Any) -> None:
        """Remembers what was gathered."""
        self.gathered.setdefault(key, value)
        if self.distances is not None:
            self.distances.add(key, op.results[0], self.at)

    def _is_far(self, key: Any, op: Any) -> bool:
        """Whether the compiler gathers again what was gathered before."""
        distances = self.distances
        return distances is not None and distances.is_far(key, op.results[0], self.at)

    def _note_move(self, op: Any, operand: Value, value: Value, place: _Place) -> None:
        earlier = self.found.moves.get(id(operand))
        only = op.name == "sdy.all_gather"
        before = operand
        # There and back are two moves.
        if earlier is not None and earlier.before.dims != value.dims:
            del self.found.moves[id(operand)]
            before, only = earlier.before, only and earlier.gathers_only
        move = Move(before, value, place.times, location_of(op, self.attributes), only)
        self.found.moves[id(value)] = move

    # ------------------------------------------------------------------- slices

    def _write(self, op: Any, place: _Place) -> None:
        """A slice that XLA writes into what it gathers before."""
        dims = self.attributes.per_value(op)
        if not dims or not any(dims[0]):
            return
        cut = written_whole(op, dims[0], self.attributes)
        base, value = self.values.of(op.operands[0]), self.values.of(op.results[0])
        if not cut or base.is_uniform:
            return
        whole = base
        for after in gathered(base, cut):
            key = _key(after, place)
            if key not in self.gathered or self._is_far(key, op):
                axes = changed_axes("sdy.all_gather", whole.dims, after.dims)
                shape, leaf, source = after.local_shape, base.leaf, op.operands[0]
                self._add("all-gather", axes, shape, base, op, place, leaf, source)
                self._keep(key, after, op)
            whole = after
        # What was written into is whole as well.
        written = value.laid_out(whole.dims)
        self._keep(_key(written, place), written, op)

    def _take(self, op: Any, place: _Place) -> None:
        """A slice that XLA takes from something else than Shardy."""
        source = moved_to_slice(op, self.values)
        if source is None:
            return
        if place.scope and self.values.is_from_outside(source):
            value, where = self.values.of(source), location_of(op, self.attributes)
            self.found.per_round.append(PerRound(value, place.times, where))
        elif maker_of(op.operands[0]).name != "sdy.all_gather":
            what = "dynamic_slice along a sharded dim, not counted as XLA moves it"
            self.found.unrecognised[what] += 1

    # ------------------------------------------------------------------ lookups

    def _is_replaced(self, op: Any) -> bool:
        """Whether XLA does something else for a lookup."""
        return self.lookups is not None and self.lookups.replace(op)

    def _lookup(self, op: Any, place: _Place) -> None:
        """Rows of a table that are taken, or added to it."""
        if self.lookups is None or place.cuts:
            return
        value, sums = self.values.of(op.results[0]), []
        for one in self.lookups.steps(op, place.scope):
            step, what = one.step, one.value or value
            source = op.operands[0] if step.what == "table" else None
            leaf, shape = one.leaf, step.shape
            self._add(step.kind, step.axes, shape, what, op, place, leaf, source)
            if one.is_sum:
                sums.append(len(self.found.collectives) - 1)
        if sums:
            value.sums, value.index = tuple(sums), sums[0]
            value.shared = is_shared(op.results[0])

    def _own_collective(self, op: Any, place: _Place) -> None:
        """A collective that the program itself asks for, inside of a shard_map."""
        name, values = target_of(op), self.values.results(op)
        kind, axes = manual_collective(name, op, self.found.sizes)
        if kind is None:
            what = f"{name} over devices that are no mesh axes, not counted"
            self.found.unrecognised[what] += 1
            return
        if parts(axes) == 1:
            return
        if name == RAGGED:
            what = f"{name} of rows that the data says, counted as if all were sent"
            self.found.unrecognised[what] += 1
        gives = kind in ("all-gather", "all-to-all") and name != RAGGED
        for at, value in enumerate(values):
            operand = self.values.of(op.operands[at])
            shape = (value if gives else operand).local_shape
            leaf, source = operand.leaf, op.operands[at]
            self._add(kind, axes, shape, value, op, place, leaf, source)

    def _add(
        self,
        kind: Kind,
        axes: tuple[AxisRef, ...],
        shape: tuple[int, ...],
        value: Value,
        op: Any,
        place: _Place,
        leaf: int | None,
        source: Any = None,
    ) -> None:
        """Adds a collective; of a source, what it moves, no leaf need be known."""
        made_of = None
        if leaf is None and source is not None:
            made_of = self.made_of.parameter(source)
        found = Found(
            kind,
            axes,
            shape,
            value.element,
            place.times,
            location_of(op, self.attributes),
            place.scope,
            leaf,
            made_of,
        )
        self.found.collectives.append(found)

    def _without_rule(self, op: Any, place: _Place) -> None:
        """What Shardy may have no rule for: then it is made whole on every device."""
        name = target_of(op)
        if place.cuts:
            if name == RAGGED:
                self._own_collective(op, place)
            elif hides_work(op):
                self.found.unrecognised[f"{name} in a shard_map, not counted"] += 1
        elif "sdy.sharding" not in op.attributes and self._has_sharded(op):
            self.found.unrecognised[f"{name} of sharded arrays, not counted"] += 1
        elif name == TOP_K and moved_to_slice(op, self.values) is not None:
            what = "top_k along a sharded dim, not counted as XLA moves it"
            self.found.unrecognised[what] += 1

    def _has_sharded(self, op: Any) -> bool:
        """Whether any operand is sharded."""
        operands = self.values.every(op.operands)
        return any(parts(axes) > 1 for one in operands for axes in one.dims)

    # ----------------------------------------------------------------- products

    def _product(self, op: Any, place: _Place) -> None:
        """Adds the operations of a matrix product, or of a convolution."""
        local, whole = multiplications(op, self.values.of)
        self.found.flops += 2 * place.times * local
        self.found.flops_whole += 2 * place.times * whole * (place.cuts or 1)

    def _convolution(self, op: Any, place: _Place) -> None:
        self._say_if_shifted(op, self.values.of(op.operands[0]).dims)
        self._product(op, place)

    def _shift(self, op: Any, place: _Place) -> None:
        dims = self.attributes.per_value(op)
        if dims:
            self._say_if_shifted(op, dims[0])

    def _say_if_shifted(self, op: Any, dims: Dims) -> None:
        """What XLA moves after Shardy."""
        if any(dims) and shifts(op, dims, self.attributes):
            name = op.name.rpartition(".")[2]
            what = f"{name} along a sharded dim, which moves elements, not counted"
            self.found.unrecognised[what] += 1

    def _ragged_product(self, op: Any, place: _Place) -> None:
        """A product with a matrix for each group of rows; Shardy has no rule for it."""
        if "sdy.sharding" not in op.attributes and self._has_sharded(op):
            self.found.unrecognised[f"{op.name} of sharded arrays, not counted"] += 1
        else:
            self._product(op, place)
