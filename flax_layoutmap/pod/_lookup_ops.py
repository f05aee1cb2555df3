"""Lookups in a laid-out module: which operations they are, and what Shardy adds.

The module has the collectives that Shardy would do before and after a lookup. XLA does
others (`_lookups.py`), from the same layout to the same layout.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from flax_layoutmap.pod._attributes import Attributes, Dims
from flax_layoutmap.pod._dataflow import Dataflow
from flax_layoutmap.pod._lookups import Axes, Lookup, Step, steps_of
from flax_layoutmap.pod._operations import MOVING, is_asked, last_of, maker_of
from flax_layoutmap.pod._spread import Scope
from flax_layoutmap.pod._sums import scattered
from flax_layoutmap.pod._values import Value, bytes_of

GATHER, SCATTER = "stablehlo.gather", "stablehlo.scatter"
_MOVES = (*MOVING, "sdy.all_slice")


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """A lookup in the program.

    Attributes:
        lookup: what it looks up, and in which layouts.
        table: the table, as it is before Shardy moves it.
        tokens: the tokens, likewise.
        result: the result, in the layout in which it is used.
        instead: the results of operations that Shardy adds, and XLA does not.
    """

    lookup: Lookup
    table: Value
    tokens: Value
    result: Any
    instead: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Moved:
    """A collective of a lookup in the program.

    Attributes:
        step: what it is.
        value: what it moves; None for the rows.
        leaf: the argument that it moves, or takes rows of.
        is_sum: whether it is of the result, which is what is left when all are done.
    """

    step: Step
    value: Value | None
    leaf: int | None
    is_sum: bool


class LookupOps:
    """The lookups of a module, each read once."""

    def __init__(self, attributes: Attributes, values: Dataflow) -> None:
        self._attributes = attributes
        self._values = values
        self._known: dict[Any, Asked | None] = {}
        self._instead: set[Any] = set()
        self._done: set[Any] = set()

    def of(self, op: Any) -> Asked | None:
        """The lookup that a gather or a scatter is; None for others."""
        key = op.results[0]
        if key not in self._known:
            found = self._read(op)
            self._known[key] = found
            if found is not None:
                self._instead.update(found.instead)
        return self._known[key]

    def steps(self, op: Any, scope: Scope) -> Iterator[Moved]:
        """The collectives of a lookup, without those that were there before."""
        asked = self.of(op)
        if asked is None:
            return
        adds = asked.lookup.adds
        steps = steps_of(asked.lookup)
        for step in steps:
            value = {"table": asked.table, "tokens": asked.tokens}.get(step.what)
            if value is not None and not (adds and step.what == "table"):
                key = (scope, id(value.root), step)
                if key in self._done:
                    continue
                self._done.add(key)
            sums = step.kind in ("all-reduce", "reduce-scatter")
            if sums and step is steps[-1]:
                made = maker_of(asked.result)
                if scattered(made, step.axes, self._attributes) == step.axes:
                    step = dataclasses.replace(step, kind="reduce-scatter")
            # Rows that are gathered or summed are still those of the table.
            rows = step.what == "rows" and (adds or step.kind == "all-to-all")
            leaf = None if rows or step.what == "tokens" else asked.table.leaf
            yield Moved(step, value, leaf, sums or adds and step.what == "table")

    def replace(self, op: Any) -> bool:
        """Whether a lookup does this otherwise: an operation that moves or sums."""
        result = op.results[0]
        if result in self._instead:
            return True
        while (user := _only_user(result)) is not None:
            if user.name in (GATHER, SCATTER):
                return self.of(user) is not None and op.results[0] in self._instead
            if user.name not in _MOVES:
                return False
            result = user.results[0]
        return False

    def _read(self, op: Any) -> Asked | None:
        adds = op.name == SCATTER
        if not looks_up_rows(op):
            return None
        instead: list[Any] = []
        table, tokens, *added = [self._before(one, instead) for one in op.operands]
        after, result = self._after(op.results[0], instead)
        kept, rows = (after, added[0].dims) if adds else (table.dims, after)
        shape = self._attributes.type_of(op.operands[2] if adds else op.results[0])[0]
        lookup = Lookup(
            adds=adds,
            sizes=(table.shape[0], table.shape[1], math.prod(shape[:-1])),
            table=(_flat(kept[:1]), _flat(kept[1:])),
            tokens=_flat(tokens.dims[: len(shape) - 1]),
            rows=(_flat(rows[:-1]), _flat(rows[-1:])),
            mesh=tuple(one for one in self._attributes.sizes.items() if one[1] > 1),
            bytes=(bytes_of((1,), table.element), bytes_of((1,), tokens.element)),
            is_zero=table.is_uniform,
        )
        # Of a table that every device holds, Shardy and XLA do the same.
        if not any(lookup.table):
            return None
        return Asked(lookup, table, tokens, result, tuple(instead))

    def _before(self, value: Any, instead: list[Any]) -> Value:
        """What an operand is before Shardy moves it for this lookup alone."""
        maker = maker_of(value)
        while maker is not None and maker.name in _MOVES:
            if _only_user(value) is None or is_asked(maker, self._attributes):
                break
            instead.append(value)
            value = maker.operands[0]
            maker = maker_of(value)
        return self._values.of(value)

    def _after(self, result: Any, instead: list[Any]) -> tuple[Dims, Any]:
        """The layout in which the result is used, and the first that has it."""
        dims: Dims = ()
        per_value = self._attributes.per_value(result.owner)
        if per_value:
            dims = per_value[0]
        ends = [result]
        while users := self._same_move([use.owner for end in ends for use in end.uses]):
            ends = [user.results[0] for user in users]
            instead += ends
            dims = self._attributes.of(users[0].attributes["out_sharding"])
        return dims or ((),) * len(self._attributes.type_of(result)[0]), ends[0]

    def _same_move(self, owners: Sequence[Any]) -> list[Any]:
        """The users of a value, where all of them move it to one layout."""
        users = [owner.operation for owner in owners]
        for user in users:
            if user.name not in (*_MOVES, "sdy.all_reduce") or is_asked(
                user, self._attributes
            ):
                return []
        layouts = {user.attributes["out_sharding"] for user in users}
        return users if len(layouts) == 1 else []


def looks_up_rows(op: Any) -> bool:
    """Whether a gather, or a scatter, takes or adds whole rows of a matrix."""
    return _adds_rows(op) if op.name == SCATTER else _takes_rows(op)


def _only_user(value: Any) -> Any:
    """The operation that uses a value, where it is one."""
    uses = iter(value.uses)
    use = next(uses, None)
    return None if use is None or next(uses, None) else use.owner.operation


def _flat(dims: Dims) -> Axes:
    """The axes of some dims, without those of a single device."""
    return tuple(axis for axes in dims for axis in axes if axis[1] > 1)


def _takes_rows(op: Any) -> bool:
    """Whether a gather takes whole rows of a matrix."""
    from jaxlib.mlir.dialects import stablehlo

    numbers = stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    return (
        len(op.operands[0].type.shape) == 2
        and list(numbers.collapsed_slice_dims) == [0]
        and list(numbers.start_index_map) == [0]
        and not list(numbers.operand_batching_dims)
        and list(numbers.offset_dims) == [len(op.results[0].type.shape) - 1]
        and list(op.attributes["slice_sizes"]) == [1, op.operands[0].type.shape[1]]
    )


def _adds_rows(op: Any) -> bool:
    """Whether a scatter adds whole rows to a matrix."""
    from jaxlib.mlir.dialects import stablehlo

    if len(op.operands) != 3 or len(op.operands[0].type.shape) != 2:
        return False
    numbers = stablehlo.ScatterDimensionNumbers(
        op.attributes["scatter_dimension_numbers"]
    )
    body = op.regions[0].blocks[0]
    total = maker_of(last_of(body).operands[0])
    rows = op.operands[2].type.shape
    return (
        list(numbers.inserted_window_dims) == [0]
        and list(numbers.scattered_dims_to_operand_dims) == [0]
        and not list(numbers.input_batching_dims)
        and list(numbers.update_window_dims) == [len(rows) - 1]
        and rows[-1] == op.operands[0].type.shape[1]
        and total is not None
        and total.name == "stablehlo.add"
    )
