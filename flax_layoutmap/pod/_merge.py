"""Merge the collectives of a partitioned program as XLA does on every accelerator.

The partitioner makes a collective for each operation that needs one. What XLA changes
afterwards is done here: equal operations become one; a sum of all-reduces becomes one
all-reduce of a sum; an all-reduce of which every device keeps its slice becomes a
reduce-scatter. Without this, what a device sends is 1.3 to 2.2 times too much.
"""

import collections
import dataclasses
import functools
import math
import re

from flax_layoutmap.pod._hlo_groups import groups_of
from flax_layoutmap.pod._hlo_text import Instruction, Line, Module, arrays_of, split

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
        # A name → that of an equal operation before it.
        self.same: dict[str, str] = {}
        # Instructions with the first of equal operations as operands.
        self.ops: dict[str, Instruction] = {}
        self.users: dict[str, list[Instruction]] = collections.defaultdict(list)
        first: dict[object, str] = {}
        for name, line in self.lines.items():
            assert line.instruction is not None
            operands = [self.same.get(each, each) for each in line.instruction.operands]
            op = dataclasses.replace(line.instruction, operands=tuple(operands))
            self.ops[name] = op
            for operand in operands:
                self.users[operand].append(op)
            if op.opcode not in _APART and "rng" not in op.opcode:
                equal = first.setdefault(self.key(op), name)
                if equal != name and (op.opcode == "all-gather" or not op.root):
                    self.same[name] = equal

    def changes(self) -> dict[Line, Instruction]:
        """The lines that change → their new instructions."""
        made: dict[Line, Instruction] = {}
        joined = self.joined()
        for name, line in self.lines.items():
            op = line.instruction
            assert op is not None
            if name in self.same:
                if _COLLECTIVE.search(line.text):
                    made[line] = _copied(op, self.same[name])
            elif name in joined or op.opcode in _MOVES and self.is_uniform(name):
                made[line] = _copied(op, op.operands[0])
            elif op.opcode == "all-reduce" and self.is_scattered(op):
                made[line] = dataclasses.replace(op, opcode="all-reduce-scatter")
        return made

    # ------------------------------------------------------------ equal operations

    def key(self, op: Instruction) -> object:
        """Equal for equal operations."""
        if op.opcode == "all-gather":
            arrays = [(array.dtype, array.bytes) for array in arrays_of(op.type)]
            sources = [self.behind(name, _TURNED) for name in op.operands]
            return *arrays, *sources, self.groups(op)
        # Constants and the like have no operands: their text tells them apart.
        written = "" if op.operands else _unnamed(self.lines[op.name].text)
        rest = _APPLIED.sub(lambda name: self.body(name[1]), _unnamed(op.attributes))
        return op.opcode, op.operands, op.type, rest, written

    def behind(self, name: str, opcodes: frozenset[str]) -> str:
        """The value that another is made of by some operations."""
        while (op := self.ops.get(name)) and op.opcode in opcodes:
            name = op.operands[0]
        return name

    def is_uniform(self, name: str) -> bool:
        """Whether what is moved is a scalar constant, the same on all devices."""
        op = self.ops.get(self.behind(self.ops[name].operands[0], _COPIES_OF_ONE))
        return op is not None and op.opcode == "constant" and op.shape == ()

    def _body(self, computation: str) -> str:
        """The text of a reduction with numbers for names: equal ones have many."""
        lines = self.module.computations.get(computation, ())
        text = "\n".join(_UNLIKE.sub("", line.text) for line in lines)
        numbers: dict[str, int] = {}
        return _NAME.sub(
            lambda name: str(numbers.setdefault(name[0], len(numbers))), text
        )

    # ------------------------------------------------------------------------ sums

    def joined(self) -> set[str]:
        """All-reduces that are merged into another, to whose result they are added."""
        # A value → the all-reduces that it is the sum of, and how it is sliced.
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
        """Whether an all-reduce is a sum, and not a maximum or another reduction."""
        applied = _APPLIED.search(op.attributes)
        root = None if applied is None else self.module.root(applied[1])
        return root is not None and root.opcode == "add"

    def groups(self, op: Instruction) -> object:
        groups = groups_of(op.attributes, self.partitions)
        return op.attributes if groups is None else groups.tobytes()

    def is_scattered(self, op: Instruction) -> bool:
        """Whether every device keeps a slice of an all-reduce alone."""
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
        """The first slice of a value of which only slices are used; else None."""
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
    """A copy in the place of an instruction, through which values can be followed."""
    metadata = _METADATA.search(op.attributes)
    attributes = metadata[0] if metadata else ""
    return dataclasses.replace(op, opcode="copy", operands=(of,), attributes=attributes)


def _unnamed(text: str) -> str:
    """The text of an operation without its name and number, for comparison."""
    return _UNLIKE.sub("", text.partition(" = ")[2] if " = " in text[:200] else text)
