"""A lowered step as XLA's partitioner wants it.

The CPU client partitions a program as JAX wrote it. The compiler for TPUs brings it
into a normal form before: calls are inlined, a scatter with batch dims gets iota
indices, and a product with a vector in each batch becomes a multiplication and a sum.
Without this, 33 instead of 46 of the 57 figures of `benchmarks/plan.py` are within 5 %
of libtpu's.
"""

import io
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from flax_layoutmap.pod._ask import Code

_CALLS = ("func.call", "call")
_DIMS = "dot_dimension_numbers"
_HAS_FILE = re.compile(r'"[^"]+":\d+:\d+')


def code_of(lowered: Any) -> Code:
    """The code of a lowered step, for another process."""
    return _code(lowered.compiler_ir("stablehlo").operation)


def code_to_partition(lowered: Any) -> Code:
    """The code of a lowered step in normal form."""
    module = lowered.compiler_ir("stablehlo").operation
    with module.context:
        module = module.clone()
        functions = _functions(module)
        _inline_calls(functions)
        for op in list(_nested([functions["main"]])):
            if op.name == "stablehlo.scatter":
                _index_rows(op)
            elif op.name == "stablehlo.dot_general":
                _multiply(op)
        return _code(module)


def _code(module: Any) -> Code:
    with module.context:
        main, written = _functions(module)["main"], io.BytesIO()
        module.write_bytecode(written)
        kind = main.attributes["function_type"].value
        return Code(
            written.getvalue(),
            _without_sharding(main, "arg_attrs", len(kind.inputs)),
            _without_sharding(main, "res_attrs", len(kind.results)),
        )


def _without_sharding(main: Any, name: str, count: int) -> list[bool]:
    if name not in main.attributes:
        return [True] * count
    return ["sdy.sharding" not in each for each in main.attributes[name]]


def _functions(module: Any) -> dict[str, Any]:
    """The functions of a module by name; the step itself is `main`."""
    return {
        str(op.attributes["sym_name"]).strip('"'): op
        for op in module.regions[0].blocks[0].operations
        if op.operation.name == "func.func"
    }


# -------------------------------------------------------------------------- inlining


def _nested(operations: Iterable[Any]) -> Iterator[Any]:
    """Operations, each after those in its regions."""
    for op in operations:
        for region in op.regions:
            for block in region.blocks:
                yield from _nested(block.operations)
        yield op.operation


def _inline_calls(functions: dict[str, Any]) -> None:
    """Inline the calls in `main`, and in what it calls once for all callers."""
    done: set[str] = set()

    def flatten(name: str) -> None:
        if name in done:
            return
        done.add(name)
        for op in list(_nested(functions[name].regions[0].blocks[0].operations)):
            if op.name in _CALLS:
                callee = str(op.attributes["callee"]).lstrip("@").strip('"')
                flatten(callee)
                _inline(op, functions[callee])

    flatten("main")


def _inline(call: Any, callee: Any) -> None:
    copy = callee.operation.clone()
    block = copy.regions[0].blocks[0]
    # Uses are replaced in the copy, where there are few.
    for argument, operand in zip(block.arguments, call.operands, strict=True):
        argument.replace_all_uses_with(operand)
    *body, end = block.operations
    _give_location(body, call.location)
    for op in body:
        op.operation.move_before(call)
    for result, value in zip(call.results, end.operation.operands, strict=True):
        result.replace_all_uses_with(value)
    call.erase()
    copy.erase()


def _give_location(operations: Iterable[Any], caller: Any) -> None:
    """Give operations without a source line that of their call.

    A function of JAX is lowered once for all calls, without a source line.
    """
    # Locations of operations → those that they get.
    known: dict[Any, Any] = {}
    for op in _nested(operations):
        old = op.location
        if old.attr not in known:
            text = str(old)
            name = text.partition('"')[2].partition('"')[0]
            new = ir.Location.name(name, caller) if name else caller
            known[old.attr] = old if _HAS_FILE.search(text) else new
        op.location = known[old.attr]


# ------------------------------------------------------------------------- rewriting


def _index_rows(op: Any) -> None:
    """Replace the batch dims of a scatter of elements by iota indices."""
    name = "scatter_dimension_numbers"
    numbers = stablehlo.ScatterDimensionNumbers(op.attributes[name])
    batch = list(numbers.input_batching_dims)
    place, at = (len(op.operands) - 1) // 2, numbers.index_vector_dim
    indices = op.operands[place]
    shape = list(indices.type.shape)
    # Slices, such as what is written to a cache, are sharded alike either way.
    if not batch or len(numbers.update_window_dims) or at != len(shape) - 1:
        return
    with ir.InsertionPoint(op), op.location:
        kind = ir.RankedTensorType.get([*shape[:at], 1], indices.type.element_type)
        rows = [
            stablehlo.IotaOp(kind, dim).result
            for dim in numbers.scatter_indices_batching_dims
        ]
        op.operands[place] = stablehlo.ConcatenateOp([*rows, indices], at).result
    inserted = sorted([*numbers.inserted_window_dims, *batch])
    indexed = [*batch, *numbers.scattered_dims_to_operand_dims]
    with op.context:
        made = stablehlo.ScatterDimensionNumbers.get([], inserted, [], [], indexed, at)
        op.attributes[name] = made


def _multiply(op: Any) -> None:
    """Replace a product with a vector in each batch by a multiplication and a sum."""
    numbers = stablehlo.DotDimensionNumbers(op.attributes[_DIMS])
    batch = numbers.lhs_batching_dimensions, numbers.rhs_batching_dimensions
    summed = numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions
    free = [
        [dim for dim in range(value.type.rank) if dim not in (*batch[at], *summed[at])]
        for at, value in enumerate(op.operands)
    ]
    if len(summed[0]) and all(free):
        return
    result, shape = op.results[0], list(op.operands[0].type.shape)
    count, end = len(batch[0]), result.type.rank
    sizes = [*result.type.shape, *[shape[dim] for dim in summed[0]]]
    places = [range(count, count + len(free[0])), range(count + len(free[0]), end)]
    with ir.InsertionPoint(op), op.location:
        wanted = ir.RankedTensorType.get(sizes, result.type.element_type)
        factors = []
        for at, value in enumerate(op.operands):
            kind = ir.RankedTensorType.get(value.type.shape, wanted.element_type)
            order = [*batch[at], *free[at], *summed[at]]
            turned = _transposed(stablehlo.convert(kind, value), order, {})
            dims = [*range(count), *places[at], *range(end, len(sizes))]
            dims = ir.DenseI64ArrayAttr.get(dims)
            factors.append(stablehlo.broadcast_in_dim(wanted, turned, dims))
        made = stablehlo.multiply(*factors)
        if len(summed[0]):
            made = _sum(made, result.type, list(range(end, len(sizes))))
    result.replace_all_uses_with(made)
    op.erase()


# A transpose of these is the operation on transposed operands.
_ELEMENTWISE = ("convert", "multiply", "add", "subtract", "select", "compare")
# Operations before a product that are transposed at most: a residual stream is long.
_MOST_TRANSPOSED = 100


def _transposed(
    value: Any, order: list[int], done: dict[Any, Any], left: int = _MOST_TRANSPOSED
) -> Any:
    """Transpose a value, by transposing what it is computed from where possible.

    `done` has the values that were transposed in this order; `left` is the number of
    operations that it may still go back.
    """
    if value.type.rank < len(order) or order == sorted(order):
        return value
    if value in done:
        return done[value]
    shape: list[int] = [value.type.shape[dim] for dim in order]
    op: Any = value.owner  # a block, which has no name, for an argument of one
    kind = ir.RankedTensorType.get(shape, value.type.element_type)
    name = getattr(op, "name", "").removeprefix("stablehlo.")
    if name == "broadcast_in_dim" and left:
        dims = [order.index(dim) for dim in op.attributes["broadcast_dimensions"]]
        inner = sorted(range(len(dims)), key=lambda at: dims[at])
        given = _transposed(op.operands[0], inner, {}, left - 1)
        places = ir.DenseI64ArrayAttr.get(sorted(dims))
        done[value] = stablehlo.broadcast_in_dim(kind, given, places)
    elif name in _ELEMENTWISE and left:
        done[value] = ir.Operation.create(
            op.name,
            results=[kind],
            operands=[_transposed(each, order, done, left - 1) for each in op.operands],
            attributes={each: op.attributes[each] for each in op.attributes},
        ).results[0]
    else:
        done[value] = stablehlo.transpose(value, ir.DenseI64ArrayAttr.get(order))
    return done[value]


def _sum(value: Any, kind: Any, dims: list[int]) -> Any:
    scalar = ir.RankedTensorType.get([], kind.element_type)
    zero = stablehlo.convert(scalar, mlir.ir_constant(np.int32(0)))
    made = stablehlo.ReduceOp([kind], [value], [zero], ir.DenseI64ArrayAttr.get(dims))
    body = made.body.blocks.append(scalar, scalar)
    with ir.InsertionPoint(body):
        stablehlo.return_([stablehlo.add(*body.arguments)])
    return made.result
