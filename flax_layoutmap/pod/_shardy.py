"""Reads a module that Shardy has laid out: collectives, reshards, matrix products.

Loops are multiplied. These are counted as the compiler does them, not as they are
written: a chain of additions of all-reduces is one all-reduce; a sum that is sliced
later is scattered; equal gathers of one value are one gather if they are close to each
other; rows are looked up in sharded tables, and slices written along sharded dims, as
the partitioner of XLA does it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from flax_layoutmap.pod._attributes import Attributes, Dims, functions, mesh_sizes
from flax_layoutmap.pod._collectives import Collectives
from flax_layoutmap.pod._dataflow import Dataflow
from flax_layoutmap.pod._lookup_ops import GATHER, SCATTER, looks_up_rows
from flax_layoutmap.pod._loops import trip_count
from flax_layoutmap.pod._manual import RAGGED, hides_work, operands_of, target_of
from flax_layoutmap.pod._operations import (
    MOVING,
    RAGGED_DOT,
    in_groups,
    last_of,
    multiplications,
)
from flax_layoutmap.pod._otherwise import (
    GATHERED,
    JOIN,
    OTHERWISE,
    PERMUTE,
    Otherwise,
    adds_places,
    moves_parts,
)
from flax_layoutmap.pod._shifts import SHIFTING, shifts
from flax_layoutmap.pod._slices import TAKE, TOP_K, WRITE, moved_to_slice
from flax_layoutmap.pod._spread import Place, Spread
from flax_layoutmap.pod._updates import name_updates
from flax_layoutmap.pod._values import parts

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
        for_tpus: whether the compiler is that for TPUs: equal gathers stay apart where
            their uses are, and some operations are done in its own way.
        roles: the role of each argument, to name what is made of parameters alone.
    """
    known = attributes or Attributes(mesh_sizes(module))
    return _Walk(module, known, partitions, for_tpus, roles).run()


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
        self.values = Dataflow(attributes, for_tpus=for_tpus)
        self.found = Spread(mesh_sizes(module), [])
        self.roles = roles
        self.otherwise = Otherwise(self.values, for_tpus=for_tpus)
        self.partitions, self.for_tpus = partitions, for_tpus
        self.loops = 0
        self.collectives = collectives = Collectives(
            self.values, self.found, roles, partitions=partitions, for_tpus=for_tpus
        )
        self.handlers: dict[str, Callable[[Any, Place], None]] = {
            "sdy.all_reduce": collectives.all_reduce,
            "sdy.all_slice": collectives.move,
            **dict.fromkeys(MOVING, collectives.move),
            "stablehlo.add": collectives.add_sums,
            GATHERED: self._gather,
            PERMUTE: self._permute,
            GATHER: self._lookup,
            SCATTER: self._lookup,
            "stablehlo.dot_general": self._product,
            **dict.fromkeys(OTHERWISE, self._say_if_otherwise),
            **dict.fromkeys(SHIFTING, self._shift),
            WRITE: collectives.write,
            TAKE: collectives.take,
            "stablehlo.convolution": self._convolution,
            RAGGED_DOT: self._ragged_product,
            "stablehlo.sort": self._sort,
            "stablehlo.while": self._loop,
            "stablehlo.case": self._branches,
            "stablehlo.if": self._branches,
            "sdy.manual_computation": self._manual,
            "sdy.named_computation": self._named,
            **dict.fromkeys(_MANUAL, collectives.own),
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
        self.found.results = [*self.values.every(ends)]
        self.found.gradients_of = lambda at, seen: self.values.gradients_of(
            ends[at], seen, at
        )
        self.found.name_updates = lambda owners: name_updates(
            self.found, self.values, self.roles, owners
        )
        return self.found

    # ------------------------------------------------------------------- blocks

    def _block(self, block: Any, place: Place) -> None:
        """Walks through a block; of most operations nothing is read here."""
        handlers, at = self.handlers, -1
        for at, op in enumerate(block.operations):
            operation = op.operation
            name = operation.name
            handler = handlers.get(name)
            if handler is not None:
                self.collectives.at = at
                handler(operation, place)
            elif name.startswith(_NO_RULE):
                self._without_rule(operation, place)
        self.found.operations += at + 1

    def _loop(self, op: Any, place: Place) -> None:
        condition, body = op.regions[0].blocks[0], op.regions[1].blocks[0]
        count = trip_count(condition, body, op.operands)
        if count is None:
            self.collectives.say("loop of unknown length, counted as one round", op)
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
        for argument, operand in zip(condition.arguments, op.operands, strict=True):
            values.say(argument, values.of(operand))
        times, scope = place.times * (count or 1), (*place.scope, self.loops)
        self._block(condition, Place(times, scope, place.cuts))
        self._block(body, Place(times, scope, place.cuts))
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
        dims = self.attributes.per_value(op)
        for at, result in enumerate(op.results):
            ends = [last_of(block).operands[at] for block in blocks]
            own = dims[at] if at < len(dims) else None
            self.values.say(result, self.values.new(op.name, result, own), ends)

    def _named(self, op: Any, place: Place) -> None:
        """A computation that stands in the place of a call."""
        block = op.regions[0].blocks[0]
        for argument, operand in zip(block.arguments, op.operands, strict=True):
            self.values.enter(argument, operand)
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
            values.enter(argument, op.operands[at], value)
        # In one shard_map inside of another, both cut.
        self._block(block, Place(place.times, place.scope, (place.cuts or 1) * cuts))
        dims, ends = self.attributes.per_value(op, "out_shardings"), last_of(block)
        for at, result in enumerate(op.results):
            made = values.new("manual", result, dims[at])
            values.say(result, made, (ends.operands[at],))

    # ------------------------------------------------------------ what is not read

    def _without_rule(self, op: Any, place: Place) -> None:
        """What Shardy may have no rule for: then it is made whole on every device."""
        name = target_of(op)
        if place.cuts:
            if name == RAGGED:
                self.collectives.own(op, place)
            elif hides_work(op):
                self.collectives.say(f"{name} in a shard_map, not counted", op)
        elif "sdy.sharding" not in op.attributes and self._has_sharded(op):
            self.collectives.say(f"{name} of sharded arrays, not counted", op)
        elif name == TOP_K and moved_to_slice(op, self.values) is not None:
            what = "top_k along a sharded dim, not counted as XLA moves it"
            self.collectives.say(what, op)
        else:
            self._say_if_otherwise(op, place)

    def _say_if_otherwise(self, op: Any, place: Place) -> None:
        """What XLA does in its own way."""
        what = self.otherwise.says(op)
        if what is not None:
            self.collectives.say(what, op)

    def _lookup(self, op: Any, place: Place) -> None:
        self.collectives.lookup(op, place)
        if self.partitions and not looks_up_rows(op):
            self._say_if_otherwise(op, place)

    def _sort(self, op: Any, place: Place) -> None:
        """The compiler for TPUs sorts places, too, where equal elements keep theirs."""
        if self.for_tpus and self.partitions and adds_places(op, self.values):
            moved = self.values.of(op.operands[0])
            if moved.name == "sdy.all_to_all" and moved.index is not None:
                one = self.found.collectives[moved.index]
                plain = {"leaf": None, "made_of": (), "source": None}
                places = dataclasses.replace(one, element="i32", **plain)
                self.found.collectives.append(places)

    def _gather(self, op: Any, place: Place) -> None:
        if not self.partitions or not self.otherwise.leaves_out(op):
            self.collectives.move(op, place)
            return
        operand, result = self.values.of(op.operands[0]), op.results[0]
        value = operand.laid_out(self.attributes.of(op.attributes["out_sharding"]))
        self.values.say(result, value)

    def _permute(self, op: Any, place: Place) -> None:
        self.collectives.move(op, place)
        if moves_parts(op, self.values):
            what = "move between parts of an axis, not counted as XLA does it"
            self.collectives.say(what, op)

    def _has_sharded(self, op: Any) -> bool:
        """Whether any operand is sharded."""
        operands = self.values.every(op.operands)
        return any(parts(axes) > 1 for one in operands for axes in one.dims)

    # ----------------------------------------------------------------- products

    def _product(self, op: Any, place: Place) -> None:
        """Adds the operations of a matrix product, or of a convolution."""
        local, whole = multiplications(op, self.values.of)
        self.found.flops += 2 * place.times * local
        self.found.flops_whole += 2 * place.times * whole * (place.cuts or 1)

    def _convolution(self, op: Any, place: Place) -> None:
        self._say_if_shifted(op, self.values.of(op.operands[0]).dims)
        if in_groups(op) and self._has_sharded(op):
            what = (
                "convolution in groups of sharded arrays, not counted as XLA moves it"
            )
            self.collectives.say(what, op)
        self._product(op, place)

    def _shift(self, op: Any, place: Place) -> None:
        dims = self.attributes.per_value(op)
        if dims and self._say_if_shifted(op, dims[0]):
            return
        if op.name == JOIN:
            self._say_if_otherwise(op, place)

    def _say_if_shifted(self, op: Any, dims: Dims) -> bool:
        """What XLA moves after Shardy."""
        is_shifted = any(dims) and shifts(op, dims, self.attributes)
        if is_shifted:
            name = op.name.rpartition(".")[2]
            what = f"{name} along a sharded dim, which moves elements, not counted"
            self.collectives.say(what, op)
        return is_shifted

    def _ragged_product(self, op: Any, place: Place) -> None:
        """A product with a matrix for each group of rows; Shardy has no rule for it."""
        if "sdy.sharding" not in op.attributes and self._has_sharded(op):
            self.collectives.say(f"{op.name} of sharded arrays, not counted", op)
        else:
            self._product(op, place)
