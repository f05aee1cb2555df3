"""Places that are counted: `logits[jnp.arange(n), labels]`.

The compiler for TPUs writes so, before Shardy lays out the program, a scatter that says
that each row has its own place, such as the gradient of `jnp.take_along_axis`. Gathers
are left. Its partitioner sees counted places again, and moves nothing.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from flax_layoutmap.pod._operations import maker_of

GATHER, SCATTER = "stablehlo.gather", "stablehlo.scatter"
_COPIES = ("stablehlo.convert", "stablehlo.reshape", "stablehlo.optimization_barrier")
_CONSTANTS = ("stablehlo.constant", "sdy.constant")
_SHARDING, _JOIN = "sdy.sharding", "stablehlo.concatenate"
_BROADCAST, _SELECT = "stablehlo.broadcast_in_dim", "stablehlo.select"


def count_rows(block: Any) -> None:
    """Writes scatters of single elements in a block and below as counted places.

    Args:
        block: the block, which is changed. Nothing of it is laid out yet.
    """
    for op in list(_lookups(block)):
        if op.name == SCATTER:
            _count(op)


def _count(op: Any) -> None:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    numbers, place = _Numbers(op), _place_of(op)
    at, places = numbers.vector_dim, op.operands[place]
    shape = list(places.type.shape)
    # Of slices, such as what is written to a cache, both ways are laid out alike.
    if not numbers.own or numbers.window or at != len(shape) - 1:
        return
    with ir.InsertionPoint(op), op.location:
        kind = ir.RankedTensorType.get([*shape[:at], 1], places.type.element_type)
        rows = [stablehlo.IotaOp(kind, dim).result for dim in numbers.own_places]
        joined = stablehlo.ConcatenateOp([*rows, *_columns(places)], at)
        op.operands[place] = joined.result
    numbers.gone = sorted([*numbers.gone, *numbers.own])
    numbers.write(op, {}, [*numbers.own, *numbers.indexed])


def _columns(places: Any) -> list[Any]:
    """The elements of each place, one by one."""
    from jaxlib.mlir.dialects import stablehlo

    shape = list(places.type.shape)
    if shape[-1] == 1:
        return [places]
    columns = []
    for at in range(shape[-1]):
        start, end = [0] * len(shape), list(shape)
        start[-1], end[-1] = at, at + 1
        made = stablehlo.SliceOp(places, start, end, [1] * len(shape))
        columns.append(made.result)
    return columns


def _place_of(op: Any) -> int:
    """Which operand of a lookup is the places."""
    return (len(op.operands) - 1) // 2 if op.name == SCATTER else 1


def say_what_is_counted(block: Any) -> None:
    """Rewrites lookups in a block and below, where rows are counted along a dim.

    Args:
        block: the block, which is changed. Its values have their shardings: Shardy
            decides them before, as it does where XLA asks it.
    """
    for op in list(_lookups(block)):
        _rewrite(op)


def _lookups(block: Any) -> Iterator[Any]:
    """The gathers and scatters in a block and below."""
    for op in block.operations:
        operation = op.operation
        for region in operation.regions:
            for inner in region.blocks:
                yield from _lookups(inner)
        if operation.name in (GATHER, SCATTER):
            yield operation


def _rewrite(op: Any) -> None:
    """Takes out of the places of a lookup those that are counted.

    Places that every device has are left: then each looks among its own rows.
    """
    places = op.operands[_place_of(op)]
    joined, table = maker_of(places), op.operands[0].type.shape
    numbers = _Numbers(op)
    at = numbers.vector_dim
    if joined is None or joined.name != _JOIN:
        return
    columns = list(joined.operands)
    elements = places.type.shape[at:] == [len(columns)]
    if not elements or any(column.type.shape[at:] != [1] for column in columns):
        return
    own = dict(zip(numbers.own, numbers.own_places, strict=True))
    sharded, left = _sharded_dims(joined), []
    for column, dim in zip(columns, numbers.indexed, strict=True):
        along = _counted(column)
        if along in own.values():
            return  # along a diagonal, which no compiler sees
        if along not in sharded or dim not in numbers.gone:
            left.append((column, dim))
        elif table[dim] == places.type.shape[along]:
            own[dim] = along
        else:
            left.append((column, dim))
    if not left or len(left) == len(columns):
        return
    numbers.write(op, own, [dim for _, dim in left])
    _look_up(op, joined, [column for column, _ in left], at)


def _sharded_dims(op: Any) -> set[int]:
    """The dims along which the result of an operation is sharded."""
    from jaxlib.mlir.dialects import sdy

    if _SHARDING not in op.attributes:
        return set()
    given = sdy.TensorShardingPerValueAttr(op.attributes[_SHARDING]).shardings[0]
    dims = sdy.TensorShardingAttr(given).dimension_shardings
    axes = (sdy.DimensionShardingAttr(dim).axes for dim in dims)
    return {at for at, names in enumerate(axes) if len(names)}


def _look_up(op: Any, joined: Any, columns: Sequence[Any], at: int) -> None:
    """Gives a lookup other places, laid out as those that it had."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    with ir.InsertionPoint(op), op.location:
        made = stablehlo.ConcatenateOp(columns, at)
    made.attributes[_SHARDING] = joined.attributes[_SHARDING]
    op.operands[list(op.operands).index(joined.results[0])] = made.result


class _Numbers:
    """What a lookup says of its dims, under one name for gathers and scatters.

    Attributes:
        own, own_places: dims of the table in which each row has its own place, and the
            dims of the places that they go with.
        gone: dims of the table that the rows do not have.
        indexed: the dim that each element of a place is of.
        vector_dim: the dim of the places along which one place is written.
        window: the dims of what is looked up that lie beside each other in the table;
            none for single elements.
    """

    def __init__(self, op: Any) -> None:
        from jaxlib.mlir.dialects import stablehlo

        if op.name == GATHER:
            given = stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
            self.own = list(given.operand_batching_dims)
            self.own_places = list(given.start_indices_batching_dims)
            self.gone = list(given.collapsed_slice_dims)
            self.indexed = list(given.start_index_map)
            self.window = list(given.offset_dims)
        else:
            name = "scatter_dimension_numbers"
            given = stablehlo.ScatterDimensionNumbers(op.attributes[name])
            self.own = list(given.input_batching_dims)
            self.own_places = list(given.scatter_indices_batching_dims)
            self.gone = list(given.inserted_window_dims)
            self.indexed = list(given.scattered_dims_to_operand_dims)
            self.window = list(given.update_window_dims)
        self.vector_dim = given.index_vector_dim

    def write(self, op: Any, own: dict[int, int], indexed: Sequence[int]) -> None:
        """Gives a lookup other dims.

        Args:
            op: the lookup.
            own: dim of the table → dim of the places, where each row has its own.
            indexed: the dims that are still looked up.
        """
        from jaxlib.mlir.dialects import stablehlo

        dims = sorted(own)
        gone = [dim for dim in self.gone if dim not in own]
        pairs = [own[dim] for dim in dims]
        given = (self.window, gone, dims, pairs, list(indexed), self.vector_dim)
        with op.context:
            if op.name == GATHER:
                made = stablehlo.GatherDimensionNumbers.get(*given)
                op.attributes["dimension_numbers"] = made
            else:
                made = stablehlo.ScatterDimensionNumbers.get(*given)
                op.attributes["scatter_dimension_numbers"] = made


def _counted(value: Any) -> int | None:
    """The dim along which a value counts from zero; None where it does not."""
    from jaxlib.mlir import ir

    maker = maker_of(value)
    if maker is None:
        return None
    shape = value.type.shape
    if maker.name == "stablehlo.iota":
        return ir.IntegerAttr(maker.attributes["iota_dimension"]).value
    if maker.name in _CONSTANTS:
        return _written_out(maker.attributes["value"], shape)
    if maker.name == _BROADCAST:
        source = maker.operands[0]
        along = _counted(source)
        if along is None:
            return None
        dims = ir.DenseI64ArrayAttr(maker.attributes["broadcast_dimensions"])
        return dims[along] if source.type.shape[along] == shape[dims[along]] else None
    if maker.name == _SELECT:
        return _counted(maker.operands[2]) if _counts_from_the_end(maker) else None
    if maker.name not in _COPIES:
        return None
    source = maker.operands[list(maker.results).index(value)]
    along = _counted(source)
    return None if along is None else _after_reshape(source.type.shape, shape, along)


def _written_out(numbers: Any, shape: Sequence[int]) -> int | None:
    """The dim along which the numbers of a constant count: `np.arange(n)`."""
    from jaxlib.mlir import ir

    long = [dim for dim, size in enumerate(shape) if size != 1]
    if len(long) != 1 or not isinstance(numbers, ir.DenseIntElementsAttr):
        return None
    given = np.array(numbers).ravel()
    return long[0] if np.array_equal(given, np.arange(shape[long[0]])) else None


def _after_reshape(before: Sequence[int], after: Sequence[int], dim: int) -> int | None:
    """Where a dim is after a reshape; None where it is not there as it was."""
    left = math.prod(before[:dim])
    for at, size in enumerate(after):
        if size == before[dim] and math.prod(after[:at]) == left:
            return at
    return None


def _counts_from_the_end(select: Any) -> bool:
    """Whether something else is chosen for negative places alone."""
    test = maker_of(select.operands[0])
    if test is None or test.name != "stablehlo.compare":
        return _is_zero(select.operands[0])  # of numpy's places, that is known
    is_less = "LT" in str(test.attributes["comparison_direction"])
    same = test.operands[0] == select.operands[2]
    return is_less and same and _is_zero(test.operands[1])


def _is_zero(value: Any) -> bool:
    """Whether all of a value is zero, or false."""
    from jaxlib.mlir import ir

    maker = maker_of(value)
    while maker is not None and maker.name == _BROADCAST:
        maker = maker_of(maker.operands[0])
    if maker is None or maker.name not in _CONSTANTS:
        return False
    numbers = ir.DenseElementsAttr(maker.attributes["value"])
    return numbers.is_splat and not ir.IntegerAttr(numbers.get_splat_value()).value
