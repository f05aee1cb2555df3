"""Prepare programs for XLA's partitioner, and merge collectives in its results.

The CPU client partitions a program as JAX wrote it. The compiler for TPUs normalises it
first: calls are inlined, a scatter with batch dims gets iota indices, and a product
with a vector in each batch becomes a multiplication and a sum. Without this, 33 instead
of 44 of the 57 figures of `benchmarks/plan.py` are within 5 % of libtpu's.

The partitioner inserts a collective for each operation that needs it. The merges that
XLA applies afterwards on every accelerator are applied here: equal operations become
one; a sum of all-reduces becomes an all-reduce of a sum; an all-reduce of which every
device keeps a slice becomes a reduce-scatter. Without this, the bytes that a device
sends are overestimated by a factor of 1.3 to 2.2.
"""

import collections
import dataclasses
import functools
import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from flax_layoutmap.pod._ask import Code
from flax_layoutmap.pod._hlo import groups_of
from flax_layoutmap.pod._hlo_text import Instruction, Line, Module, arrays_of, split
from flax_layoutmap.pod._lower import functions_of, operations_in

# ------------------------------------------------------------------------ before

# JAX lowers library functions once for all calls, without a source line.
_HAS_FILE = re.compile(r'"[^"]+":\d+:\d+')


def code_of(lowered: Any) -> Code:
    """The bytecode of a lowered step, for another process."""
    return _code(lowered.compiler_ir("stablehlo").operation)


def code_to_partition(lowered: Any) -> Code:
    """The bytecode of a lowered step in normal form."""
    module = lowered.compiler_ir("stablehlo").operation
    with module.context:
        module = module.clone()
        for op in list(operations_in(_inlined(module))):
            if op.name == "stablehlo.scatter":
                _index_rows(op)
            elif op.name == "stablehlo.dot_general":
                _multiply(op)
        return _code(module)


def _code(module: Any) -> Code:
    written = io.BytesIO()
    with module.context:
        module.write_bytecode(written)
        main = functions_of(module)["main"]
        free = [True] * len(main.attributes["function_type"].value.results)
        if "res_attrs" in main.attributes:
            given = main.attributes["res_attrs"]
            free = ["sdy.sharding" not in result for result in given]
    return Code(written.getvalue(), free)


def _inlined(module: Any) -> Any:
    functions, done = functions_of(module), set[str]()

    def flatten(name: str) -> Any:
        for op in [] if name in done else list(operations_in(functions[name])):
            if op.name in ("func.call", "call"):
                _inline(op, flatten(op.attributes["callee"].value))
        done.add(name)
        return functions[name]

    return flatten("main")


def _inline(call: Any, callee: Any) -> None:
    """Replace a call by a copy of the called function."""
    with ir.InsertionPoint(call):
        copy = callee.operation.clone()
    block = copy.regions[0].blocks[0]
    for argument, operand in zip(block.arguments, call.operands, strict=True):
        argument.replace_all_uses_with(operand)
    *body, end = block.operations
    for op in operations_in(copy):
        if not _HAS_FILE.search(str(op.location)):
            op.location = call.location
    for op in body:
        op.operation.move_before(call)
    for result, value in zip(call.results, end.operation.operands, strict=True):
        result.replace_all_uses_with(value)
    call.erase()
    copy.erase()


def _index_rows(op: Any) -> None:
    """Replace the batch dims of a scatter of elements by iota indices."""
    name = "scatter_dimension_numbers"
    numbers = stablehlo.ScatterDimensionNumbers(op.attributes[name])
    batch = list(numbers.input_batching_dims)
    place, at = (len(op.operands) - 1) // 2, numbers.index_vector_dim
    indices = op.operands[place]
    shape = list(indices.type.shape)
    # Scatters of slices, such as cache updates, are sharded the same either way.
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
    numbers = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    batch = numbers.lhs_batching_dimensions, numbers.rhs_batching_dimensions
    summed = numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions
    # A label for each dim: "b0" for batch dims, "s0" for summed dims.
    labels = [
        _labels(value.type.rank, {"b": batch[at], "s": summed[at]}, "lr"[at])
        for at, value in enumerate(op.operands)
    ]
    unshared = [[label for label in each if label[0] in "lr"] for each in labels]
    if len(summed[0]) and all(unshared):
        return
    result = [*(f"b{n}" for n in range(len(batch[0]))), *unshared[0], *unshared[1]]
    # If dims are summed, one side has the dims of both, and keeps its order.
    product = max(labels, key=len) if len(summed[0]) else result
    sizes: dict[str, int] = {}
    for each, value in zip(labels, op.operands, strict=True):
        sizes |= dict(zip(each, value.type.shape, strict=True))
    element = op.results[0].type.element_type
    with ir.InsertionPoint(op), op.location:
        kind = ir.RankedTensorType.get([sizes[label] for label in product], element)
        factors = []
        for each, value in zip(labels, op.operands, strict=True):
            dims = sorted(map(product.index, each))
            order = [product[dim] for dim in dims]
            value_kind = ir.RankedTensorType.get(value.type.shape, element)
            turned = _transposed(stablehlo.convert(value_kind, value), each, order)
            places = ir.DenseI64ArrayAttr.get(dims)
            factors.append(stablehlo.broadcast_in_dim(kind, turned, places))
        made = stablehlo.multiply(*factors)
        if len(summed[0]):
            left = [label for label in product if label[0] != "s"]
            kind = ir.RankedTensorType.get([sizes[label] for label in left], element)
            dims = [dim for dim, label in enumerate(product) if label[0] == "s"]
            made = _transposed(_sum(made, kind, dims), left, result)
    op.results[0].replace_all_uses_with(made)
    op.erase()


def _labels(rank: int, kinds: Mapping[str, Sequence[int]], other: str) -> list[str]:
    known = {
        dim: f"{kind}{n}" for kind, at in kinds.items() for n, dim in enumerate(at)
    }
    return [known.get(dim, f"{other}{dim}") for dim in range(rank)]


def _transposed(value: Any, labels: Sequence[str], order: Sequence[str]) -> Any:
    if [*labels] == [*order]:
        return value
    dims = [labels.index(label) for label in order]
    return stablehlo.transpose(value, ir.DenseI64ArrayAttr.get(dims))


def _sum(value: Any, kind: Any, dims: list[int]) -> Any:
    scalar = ir.RankedTensorType.get([], kind.element_type)
    zero = stablehlo.convert(scalar, mlir.ir_constant(np.int32(0)))
    made = stablehlo.ReduceOp([kind], [value], [zero], ir.DenseI64ArrayAttr.get(dims))
    body = made.body.blocks.append(scalar, scalar)
    with ir.InsertionPoint(body):
        stablehlo.return_([stablehlo.add(*body.arguments)])
    return made.result


# ------------------------------------------------------------------------- after

_COLLECTIVE = re.compile(r" (?:all-reduce|all-gather|all-to-all|collective-permute)\(")
_PASSED = frozenset(("convert", "reshape", "transpose", "copy", "bitcast"))
_TURNED = frozenset(("transpose", "reverse", "copy", "bitcast", "reshape"))
_SUMS = frozenset(("add", "subtract"))
_COPIES_OF_ONE = _TURNED | {"slice", "dynamic-slice", "convert", "broadcast"}
_MOVES = frozenset(("all-gather", "all-to-all", "collective-permute"))
# Equal operations of these kinds are not merged.
_APART = frozenset(("parameter", "send", "recv", "infeed", "outfeed", "custom-call"))
_METADATA = re.compile(r", metadata=\{[^{}]*\}")
_UNLIKE = re.compile(
    rf", channel_id=\d+|{_METADATA.pattern}|, frontend_attributes=\{{[^{{}}]*\}}"
)
_NAME = re.compile(r"%[\w.\-]+")
_APPLIED = re.compile(r"to_apply=%([\w.\-]+)")


def merge(text: str) -> Module:
    """Merge the collectives of a partitioned program, for `read_program`."""
    module = split(text)
    changes: dict[Line, Instruction] = {}
    for lines in module.computations.values():
        if any(_COLLECTIVE.search(line.text) for line in lines):
            changes |= _Merged(module, lines).changes()
    return module.changed(changes)


class _Merged:
    """The collectives of one computation, merged."""

    def __init__(self, module: Module, lines: list[Line]) -> None:
        self.module = module
        self.partitions = module.partitions or 1
        self.body = functools.cache(self._body)
        self.lines = {line.name: line for line in lines if line.instruction is not None}
        # A name → the name of an equal earlier operation.
        self.same: dict[str, str] = {}
        # Instructions whose operands are the first of equal operations.
        self.ops: dict[str, Instruction] = {}
        self.users: dict[str, list[Instruction]] = collections.defaultdict(list)
        first: dict[object, str] = {}
        for name, line in self.lines.items():
            assert line.instruction is not None
            operands = list(map(self.first, line.instruction.operands))
            op = dataclasses.replace(line.instruction, operands=tuple(operands))
            self.ops[name] = op
            for operand in operands:
                self.users[operand].append(op)
            if op.opcode not in _APART and "rng" not in op.opcode:
                equal = first.setdefault(self.key(op), name)
                if equal != name and (op.opcode == "all-gather" or not op.root):
                    self.same[name] = equal

    def first(self, operand: str) -> str:
        """The name of the first value equal to `w`, or to its element `w#1`."""
        name, *indices = operand.split("#")
        return "#".join([self.same.get(name, name), *indices])

    def changes(self) -> dict[Line, Instruction]:
        """Changed lines → their new instructions."""
        made: dict[Line, Instruction] = {}
        joined = self.joined()
        for name, line in self.lines.items():
            op = line.instruction
            assert op is not None
            if name in self.same:
                if _COLLECTIVE.search(line.text):
                    made[line] = _copied(op, self.same[name])
            elif name in joined:
                made[line] = _copied(op, op.operands[0])
            elif op.opcode == "all-reduce" and self.is_scattered(op):
                made[line] = dataclasses.replace(op, opcode="all-reduce-scatter")
        return made

    # ------------------------------------------------------------ equal operations

    def key(self, op: Instruction) -> object:
        """A key that is the same for equal operations."""
        if op.opcode == "all-gather":
            arrays = [(array.dtype, array.bytes) for array in arrays_of(op.type)]
            sources = [self.behind(name, _TURNED) for name in op.operands]
            return *arrays, *sources, self.groups(op)
        # Operations without operands, such as constants, differ in their text.
        written = "" if op.operands else _unnamed(self.lines[op.name].text)
        rest = _APPLIED.sub(lambda name: self.body(name[1]), _unnamed(op.attributes))
        return op.opcode, op.operands, op.type, rest, written

    def behind(self, name: str, opcodes: frozenset[str]) -> str:
        """The value from which these operations make a value."""
        while (op := self.ops.get(name)) and op.opcode in opcodes:
            name = op.operands[0]
        return name

    def _body(self, computation: str) -> str:
        """The text of a reduction with numbered names, to find equal reductions."""
        lines = self.module.computations.get(computation, ())
        text = "\n".join(_UNLIKE.sub("", line.text) for line in lines)
        numbers: dict[str, int] = {}
        return _NAME.sub(
            lambda name: str(numbers.setdefault(name[0], len(numbers))), text
        )

    # ------------------------------------------------------------------------ sums

    def joined(self) -> set[str]:
        """All-reduces that are merged into another, as their results are added."""
        # A value → the all-reduces whose sum it is, and how it is sliced.
        sums: dict[str, tuple[list[Instruction], object]] = {}
        joined: set[str] = set()
        for op in self.ops.values():
            if op.name in self.same or not op.operands:
                continue
            before = [sums.get(name) for name in op.operands]
            parts = op.operands[:1] if op.opcode == "dynamic-slice" else op.operands
            if op.opcode == "all-reduce" and len(parts) == 1 and self.adds(op):
                sums[op.name] = [op], None
            elif before[0] is None or any(len(self.users[name]) > 1 for name in parts):
                continue
            elif op.opcode in _PASSED:
                sums[op.name] = before[0]
            elif op.opcode == "dynamic-slice" and before[0][1] is None:
                sums[op.name] = before[0][0], (op.type, *op.operands[1:])
            elif op.opcode in _SUMS and before[1] is not None:
                (first, sliced), (second, other) = before[0], before[1]
                if self.groups(first[0]) == self.groups(second[0]) and sliced == other:
                    sums[op.name] = first + second, sliced
                    joined.update(each.name for each in second)
        return joined

    def adds(self, op: Instruction) -> bool:
        """Whether an all-reduce is a sum, not a maximum or another reduction."""
        applied = _APPLIED.search(op.attributes)
        root = None if applied is None else self.module.root(applied[1])
        return root is not None and root.opcode == "add"

    def groups(self, op: Instruction) -> object:
        groups = groups_of(op.attributes, self.partitions)
        return op.attributes if groups is None else groups.tobytes()

    def is_scattered(self, op: Instruction) -> bool:
        """Whether every device only keeps a slice of an all-reduce."""
        first = self.slice_of(op.name) if len(op.operands) == 1 else None
        groups = groups_of(op.attributes, self.partitions)
        if first is None or groups is None:
            return False
        whole, part = self.ops[first.operands[0]].shape, first.shape
        if whole is None or part is None or op.shape is None:
            return False
        members, count = groups.shape[1], math.prod(op.shape)
        cut = [dim for dim, size in enumerate(part) if size < whole[dim]]
        return members > 1 and len(cut) == 1 and math.prod(part) * members == count

    def slice_of(self, name: str) -> Instruction | None:
        """The first slice of a value if only its slices are used; else None."""
        todo, seen, first = [name], {name}, None
        for value in todo:
            if not self.users[value]:
                return None
            for user in self.users[value]:
                if user.opcode == "dynamic-slice" and user.operands[0] == value:
                    first = first or user
                elif user.opcode not in _PASSED and user.opcode not in _SUMS:
                    return None
                elif user.name not in seen:
                    seen.add(user.name)
                    todo.append(user.name)
        return first


def _copied(op: Instruction, of: str) -> Instruction:
    """A copy that replaces an instruction, so that values can be followed."""
    metadata = _METADATA.search(op.attributes)
    attributes = metadata[0] if metadata else ""
    return dataclasses.replace(op, opcode="copy", operands=(of,), attributes=attributes)


def _unnamed(text: str) -> str:
    """The text of an operation without its name and number, for comparison."""
    return _UNLIKE.sub("", text.partition(" = ")[2] if " = " in text[:200] else text)
