"""Where the operand of a collective comes from: an argument of the program, or a line.

The value is followed backwards through everything that only moves it: copies, slices,
fusions of such, loops that carry it, other collectives, the look-up of its rows.
"""

import dataclasses
import re
from collections.abc import Sequence

from flax_layoutmap.pod._hlo_text import Instruction, Module

# The place of a call: the computation that it is in, and the calling instruction.
Call = tuple[str, Instruction]

MOVES = frozenset(
    (
        *("copy", "copy-start", "copy-done", "bitcast", "convert", "reshape"),
        *("transpose", "slice", "slice-start", "slice-done", "dynamic-slice"),
        *("all-gather", "all-gather-start", "all-gather-done", "all-to-all"),
        *("collective-permute", "collective-permute-start"),
        *("collective-permute-done", "opt-barrier", "async-done"),
        *("async-update", "call-done", "bitcast-convert", "reduce-precision"),
    )
)
CALLS = frozenset(("fusion", "call", "call-start", "async-start"))
CALLED = re.compile(r"\b(?:calls|to_apply)=%?([\w.\-]+)")
BODY = re.compile(r"\bbody=%?([\w.\-]+)")
_INDEX = re.compile(r"\bindex=(\d+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_STEPS = 400


@dataclasses.dataclass(slots=True)
class Origin:
    """What was found on the way back.

    Attributes:
        argument: position of the argument that the value is, or is a part of; None
            where it was computed.
        attributes: attributes of the instructions on the way, the nearest first.
    """

    argument: int | None
    attributes: list[str]


def origin(
    module: Module, where: str, start: Instruction, calls: Sequence[Call]
) -> Origin:
    """Follows the first operand of an instruction backwards.

    Args:
        module: the program.
        where: the computation of the instruction.
        start: the instruction.
        calls: how the computation was reached, the outermost call first.
    """
    walk = _Walk(module, where, list(calls))
    found = Origin(None, [])
    step = start.operands[0] if start.operands else None
    for _ in range(_STEPS):
        current = None if step is None else module.instruction(walk.where, step)
        if current is None:
            return found
        found.attributes.append(current.attributes)
        if current.opcode == "parameter" and walk.where == module.entry:
            found.argument = module.parameter_number(walk.where, current.name)
            return found
        step = walk.back(current)
    return found


@dataclasses.dataclass(slots=True)
class _Walk:
    module: Module
    where: str
    calls: list[Call]
    # Which elements of tuples are followed, the innermost last.
    wanted: list[int] = dataclasses.field(default_factory=list)

    def back(self, current: Instruction) -> str | None:
        """The name of what an instruction moves; None where it computes."""
        opcode, operands = current.opcode, current.operands
        if opcode == "get-tuple-element":
            index = _INDEX.search(current.attributes)
            if index is None or not operands:
                return None
            self.wanted.append(int(index[1]))
            return operands[0]
        if opcode == "tuple":
            at = self.wanted.pop() if self.wanted else -1
            return operands[at] if 0 <= at < len(operands) else None
        if opcode == "parameter":
            return self.out(current)
        if opcode == "while":
            return operands[0] if operands and self.carried(current) else None
        if opcode in CALLS:
            return self.into(current)
        if opcode == "gather":
            return operands[0] if operands else None
        if opcode == "select":
            return self.unmasked(operands)
        # The parts of one array, put together again after they were moved apart.
        joins = '"ConcatBitcast"' in current.attributes
        return operands[0] if operands and (opcode in MOVES or joins) else None

    def unmasked(self, operands: Sequence[str]) -> str | None:
        """What is kept where a mask has it; None where there are two such values.

        Each device looks up what it has of a table, and puts zeros for the rest.
        """
        given = []
        for name in operands[1:]:
            made = self.module.instruction(self.where, name)
            if made is None or made.opcode != "broadcast":
                given.append(name)
        return given[0] if len(given) == 1 else None

    def into(self, call: Instruction) -> str | None:
        """The root of what is called."""
        called = CALLED.search(call.attributes)
        root = None if called is None else self.module.root(called[1])
        if called is None or root is None or len(self.calls) > 64:
            return None
        self.calls.append((self.where, call))
        self.where = called[1]
        return root

    def out(self, parameter: Instruction) -> str | None:
        """The operand that a parameter stands for."""
        number = self.module.parameter_number(self.where, parameter.name)
        if not self.calls or number is None:
            return None
        inner = self.where
        self.where, call = self.calls.pop()
        if call.opcode == "conditional":
            branches = BRANCHES.search(call.attributes)
            names = [] if branches is None else branches[1].split(",")
            plain = [name.strip().lstrip("%") for name in names]
            number = plain.index(inner) + 1 if inner in plain else -1
        return call.operands[number] if 0 <= number < len(call.operands) else None

    def carried(self, loop: Instruction) -> bool:
        """Whether a loop gives back the element that is followed as it got it."""
        body = BODY.search(loop.attributes)
        root = None if body is None else self.module.root(body[1])
        if body is None or root is None or not self.wanted:
            return False
        made = self.module.instruction(body[1], root)
        at = self.wanted[-1]
        if made is None or made.opcode != "tuple" or at >= len(made.operands):
            return False
        kept = self.module.instruction(body[1], made.operands[at])
        index = None if kept is None else _INDEX.search(kept.attributes)
        return kept is not None and (
            kept.opcode == "get-tuple-element"
            and index is not None
            and int(index[1]) == at
        )
