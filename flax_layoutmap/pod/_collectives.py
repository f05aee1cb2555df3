"""Counts the collectives of a module that Shardy has laid out, one operation at a time.

The walk (`_shardy.py`) says where in the program each operation stands.
"""

import math
from collections.abc import Sequence
from typing import Any

from flax_layoutmap.pod._attributes import AxisRef
from flax_layoutmap.pod._dataflow import Dataflow
from flax_layoutmap.pod._distances import Distances
from flax_layoutmap.pod._lookup_ops import SCATTER, LookupOps
from flax_layoutmap.pod._made_of import MadeOf
from flax_layoutmap.pod._manual import RAGGED, manual_collective, target_of
from flax_layoutmap.pod._operations import (
    MOVING,
    changed_axes,
    is_asked,
    is_shared,
    location_of,
    maker_of,
)
from flax_layoutmap.pod._product_dims import summed_dims
from flax_layoutmap.pod._records import Kind
from flax_layoutmap.pod._slices import gathered, moved_to_slice, written_whole
from flax_layoutmap.pod._spread import Found, Move, PerRound, Place, Spread
from flax_layoutmap.pod._sums import added, gathered_from, partial_results, scattered
from flax_layoutmap.pod._values import Value, parts


class Collectives:
    """The collectives of one module.

    Args:
        values: its values.
        found: what is read from it, to which they are added.
        roles: the role of each argument of the step, to name what is made of parameters
            alone.
        partitions: whether XLA's own partitioner does lookups, not Shardy.
        for_tpus: whether equal gathers stay apart where their uses are.

    Attributes:
        at: the number of the operation in its block, which the walk sets.
    """

    def __init__(
        self,
        values: Dataflow,
        found: Spread,
        roles: Sequence[str],
        *,
        partitions: bool,
        for_tpus: bool,
    ) -> None:
        self.at = 0
        self._values = values
        self._found = found
        self._attributes = values.attributes
        self._parameters = {at for at, role in enumerate(roles) if role == "parameter"}
        self._made_of = MadeOf(values, found.arguments, roles)
        self._gathered: dict[Any, Value] = {}
        self._distances = Distances() if for_tpus else None
        self._lookups = LookupOps(values.attributes, values) if partitions else None

    # --------------------------------------------------------------- sums and moves

    def all_reduce(self, op: Any, place: Place) -> None:
        """A sum of what the devices have: whole, in parts, or of a lookup."""
        axes = self._attributes.axes_in(op.attributes["reduction_axes"])
        value = self._moved(op)
        if self._is_replaced(op):
            operand = self._values.of(op.operands[0])
            value.sums, value.index = operand.sums, operand.index
            value.leaf, value.shared = operand.leaf, is_shared(op.results[0])
            return
        if parts(axes) == 1:
            return
        leaf, source = gathered_from(op, self._values), op.operands[0]
        partial = partial_results(op, self._values)
        if partial is not None:
            self._add("all-gather", axes, partial, value, op, place, leaf, source)
            return
        scatters = scattered(op, axes, self._attributes)
        of_rows = getattr(maker_of(source), "name", "") == SCATTER
        rest = tuple(axis for axis in axes if axis not in scatters)
        shape = value.local_shape
        if scatters:
            kind = "reduce-scatter"
            self._add(kind, scatters, shape, value, op, place, leaf, source)
            self._found.collectives[-1].of_rows = of_rows
            value.sums = (len(self._found.collectives) - 1,)
            shape = (-(-math.prod(shape) // parts(scatters)),)
        if rest and parts(rest) > 1:
            self._add("all-reduce", rest, shape, value, op, place, leaf, source)
            self._found.collectives[-1].of_rows = of_rows
            value.sums = (*value.sums, len(self._found.collectives) - 1)
        value.index = value.sums[0] if value.sums else None
        value.shared = is_shared(op.results[0])

    def _moved(self, op: Any) -> Value:
        """The result of an operation that moves its operand."""
        dims = self._attributes.of(op.attributes["out_sharding"])
        result = op.results[0]
        return self._values.say(result, self._values.new(op.name, result, dims))

    def add_sums(self, op: Any, place: Place) -> None:
        """A sum of all-reduces is one all-reduce of a sum."""
        operands = [self._values.with_sums(one) for one in op.operands]
        if any(operands):
            value = self._values.of(op.results[0])
            sums = [() if one is None or one.shared else one.sums for one in operands]
            value.sums = added(self._found.collectives, *sums)
            value.shared = bool(value.sums) and is_shared(op.results[0])

    def move(self, op: Any, place: Place) -> None:
        """A value that gets another layout."""
        name, operand = op.name, self._values.of(op.operands[0])
        value = self._moved(op)
        value.leaf, value.base, value.order = operand.leaf, operand.root, operand.order
        value.is_uniform = operand.is_uniform
        replaced = self._is_replaced(op)
        if replaced:
            value.index = operand.index
            self._note_operand(op, operand, value)
        if name == "sdy.all_slice" or value.is_uniform or replaced:
            value.sums = operand.sums
            value.shared = operand.shared or (
                bool(operand.sums) and is_shared(op.results[0])
            )
            return
        key = _key(value, place)
        again = name in ("sdy.all_gather", "sdy.all_to_all")
        known = self._gathered.get(key) if again else None
        if known is not None and not self._is_far(key, op):
            value.index = known.index
            if known.index is not None:
                self._found.collectives[known.index].moved.append(op.results[0])
            return
        axes = changed_axes(name, operand.dims, value.dims)
        if parts(axes) > 1:
            kind = MOVING[name]
            leaf, source = value.leaf, op.operands[0]
            self._add(kind, axes, value.local_shape, value, op, place, leaf, source)
            self._found.collectives[-1].moved.append(op.results[0])
            self._note_product(op, operand, value)
            value.index = len(self._found.collectives) - 1
            self._note_move(op, operand, value, place)
        self._keep(key, value, op)

    def _note_product(self, op: Any, operand: Value, value: Value) -> None:
        """An operand of a product that XLA may leave where it is."""
        one = self._found.collectives[-1]
        if one.made_of or one.leaf in self._parameters:
            return
        summed = self._note_operand(op, operand, value)
        if op.name != "sdy.all_to_all" or is_asked(op, self._attributes):
            return
        if any(set(value.dims[dim]) - set(operand.dims[dim]) for dim in summed):
            where = location_of(op, self._attributes)
            self._found.moved_to_sum.append(where)

    def _note_operand(self, op: Any, operand: Value, value: Value) -> set[int]:
        """The dims of a value that products sum over; whether it is moved along one."""
        summed = summed_dims(op)
        if any(operand.dims[dim] != value.dims[dim] for dim in summed):
            self._found.moved_operands += 1
        return summed

    def _keep(self, key: Any, value: Value, op: Any) -> None:
        """Remembers what was gathered."""
        self._gathered.setdefault(key, value)
        if self._distances is not None:
            self._distances.add(key, op.results[0], self.at)

    def _is_far(self, key: Any, op: Any) -> bool:
        """Whether the compiler gathers again what was gathered before."""
        distances = self._distances
        return distances is not None and distances.is_far(key, op.results[0], self.at)

    def _note_move(self, op: Any, operand: Value, value: Value, place: Place) -> None:
        earlier = self._found.moves.get(id(operand))
        only, before, leaf = op.name == "sdy.all_gather", operand, operand.leaf
        made_of = self._found.collectives[-1].made_of
        if leaf is None and made_of:
            leaf = made_of[0]
        # There and back are two moves.
        if earlier is not None and earlier.before.dims != value.dims:
            del self._found.moves[id(operand)]
            before, only = earlier.before, only and earlier.gathers_only
            leaf = earlier.leaf
        where = location_of(op, self._attributes)
        move = Move(before, value, place.times, where, only, leaf)
        self._found.moves[id(value)] = move

    # ------------------------------------------------------------------- slices

    def write(self, op: Any, place: Place) -> None:
        """A slice that XLA writes into what it gathers before."""
        dims = self._attributes.per_value(op)
        if not dims or not any(dims[0]):
            return
        cut = written_whole(op, dims[0], self._attributes)
        base, value = self._values.of(op.operands[0]), self._values.of(op.results[0])
        if not cut or base.is_uniform:
            return
        whole = base
        for after in gathered(base, cut):
            key = _key(after, place)
            if key not in self._gathered or self._is_far(key, op):
                axes = changed_axes("sdy.all_gather", whole.dims, after.dims)
                shape, leaf, source = after.local_shape, base.leaf, op.operands[0]
                self._add("all-gather", axes, shape, base, op, place, leaf, source)
                self._keep(key, after, op)
            whole = after
        # What was written into is whole as well.
        written = value.laid_out(whole.dims)
        self._keep(_key(written, place), written, op)

    def take(self, op: Any, place: Place) -> None:
        """A slice that XLA takes from something else than Shardy."""
        source = moved_to_slice(op, self._values)
        if source is None:
            return
        if place.scope and self._values.is_from_outside(source, op):
            value, where = self._values.of(source), location_of(op, self._attributes)
            self._found.per_round.append(PerRound(value, place.times, where))
        elif maker_of(op.operands[0]).name != "sdy.all_gather":
            what = "dynamic_slice along a sharded dim, not counted as XLA moves it"
            self.say(what, op)

    def say(self, what: str, op: Any) -> None:
        """Something that could not be counted, or not as XLA moves it."""
        self._found.unrecognised[what].append(self._attributes.location(op))

    # ------------------------------------------------------------------ lookups

    def _is_replaced(self, op: Any) -> bool:
        """Whether XLA does something else for a lookup."""
        return self._lookups is not None and self._lookups.replace(op)

    def lookup(self, op: Any, place: Place) -> None:
        """Rows of a table that are taken, or added to it."""
        if self._lookups is None or place.cuts:
            return
        value, sums = self._values.of(op.results[0]), []
        for one in self._lookups.steps(op, place.scope):
            step, what = one.step, one.value or value
            source = op.operands[0] if step.what == "table" else None
            leaf, shape = one.leaf, step.shape
            self._add(step.kind, step.axes, shape, what, op, place, leaf, source)
            if one.is_sum:
                self._found.collectives[-1].of_rows = op.name == SCATTER
                sums.append(len(self._found.collectives) - 1)
        if sums:
            value.sums, value.index = tuple(sums), sums[0]
            value.shared = is_shared(op.results[0])

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
            leaf, source = operand.leaf, op.operands[at]
            self._add(kind, axes, shape, value, op, place, leaf, source)

    def _add(
        self,
        kind: Kind,
        axes: tuple[AxisRef, ...],
        shape: tuple[int, ...],
        value: Value,
        op: Any,
        place: Place,
        leaf: int | None,
        source: Any = None,
    ) -> None:
        """Adds a collective; of a source, what it moves, no leaf need be known."""
        made_of: tuple[int, ...] = ()
        if leaf is None and source is not None:
            made_of = self._made_of.parameters(source)
        found = Found(
            kind,
            axes,
            shape,
            value.element,
            place.times,
            location_of(op, self._attributes),
            place.scope,
            leaf,
            made_of,
            source=source,
        )
        self._found.collectives.append(found)


def _key(value: Value, place: Place) -> Any:
    """The same for gathers that the compiler makes one of."""
    return place.scope, id(value.root), value.root_dims(), value.element
