"""Where the operand of a collective comes from: an argument of the program, or a line.

The value is followed backwards through everything that only moves it: copies, slices,
fusions of such, loops that carry it, branches, other collectives, also those between
slices, and the look-up of its rows.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence

from flax_layoutmap.pod._hlo_text import Instruction, Module, rendezvous

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
        *("send-done", "recv-done"),
    )
)
CALLS = frozenset(("fusion", "call", "call-start", "async-start"))
_CALLED = re.compile(r"\b(?:calls|to_apply)=%?([\w.\-]+)")
BODY = re.compile(r"\bbody=%?([\w.\-]+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_JOINS = '"ConcatBitcast"'
_STEPS = 400
_DEEP = 64


def called(call: Instruction) -> list[str]:
    """The computations that an instruction takes its result from."""
    if call.opcode == "conditional":
        found = _BRANCHES.search(call.attributes)
        names = found[1].split(",") if found else []
        return [name.strip().lstrip("%") for name in names]
    found = (BODY if call.opcode == "while" else _CALLED).search(call.attributes)
    return [found[1]] if found else []


@dataclasses.dataclass(slots=True)
class Origin:
    """What was found on the way back.

    Attributes:
        argument: position of the argument that the value is, or is a part of; None
            where it was computed, or may be of several arguments.
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
    found = Origin(None, [])
    arguments: set[int | None] = set()
    todo = [_At(module, where, name, tuple(calls)) for name in start.operands[:1]]
    for _ in range(_STEPS):
        if not todo:
            break
        at = todo.pop()
        current = module.instruction(at.where, at.name)
        before: list[_At] = []
        if current is not None:
            found.attributes.append(current.attributes)
            if current.opcode == "parameter" and at.where == module.entry:
                arguments.add(module.parameter_number(at.where, at.name))
                continue
            before = list(at.before(current))
        if not before:
            arguments.add(None)
        todo += reversed(before)
    if not todo and len(arguments) == 1:
        (found.argument,) = arguments
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class _At:
    """A value: an element of what an instruction gives, in one call of its home."""

    module: Module
    where: str
    name: str
    calls: tuple[Call, ...]
    # Which elements of tuples are followed, the innermost last.
    wanted: tuple[int, ...] = ()

    def before(self, own: Instruction) -> Iterator["_At"]:
        """What an instruction moves; several where it takes one of them."""
        opcode, operands = own.opcode, own.operands
        if opcode == "get-tuple-element":
            index = _INDEX.search(own.attributes)
            if index is not None:
                yield from self.of(operands[:1], (*self.wanted, int(index[1])))
        elif opcode == "tuple":
            if self.wanted:
                at = self.wanted[-1]
                yield from self.of(operands[at : at + 1], self.wanted[:-1])
        elif opcode == "parameter":
            yield from self.out()
        elif opcode == "while":
            if self.carried(own):
                yield from self.of(operands[:1])
        elif opcode in CALLS or opcode == "conditional":
            yield from self.into(own)
        elif opcode == "select":
            yield from self.of(self.unmasked(operands))
        elif opcode == "recv":
            send = self.module.sends.get((self.where, rendezvous(own.attributes)))
            yield from self.of(send.operands[:1] if send else (), ())
        # The parts of one array, put together again after they were moved apart.
        elif opcode in MOVES or opcode == "gather" or _JOINS in own.attributes:
            yield from self.of(operands[:1])

    def of(
        self, names: Sequence[str], wanted: tuple[int, ...] | None = None
    ) -> Iterator["_At"]:
        for name in names:
            given = self.wanted if wanted is None else wanted
            yield dataclasses.replace(self, name=name, wanted=given)

    def unmasked(self, operands: Sequence[str]) -> list[str]:
        """What is kept where a mask has it.

        Each device looks up what it has of a table, and puts zeros for the rest.
        """
        given = []
        for name in operands[1:]:
            made = self.module.instruction(self.where, name)
            if made is None or made.opcode != "broadcast":
                given.append(name)
        return given

    def into(self, call: Instruction) -> Iterator["_At"]:
        """The root of what is called; of a conditional, of each branch."""
        for name in called(call) if len(self.calls) <= _DEEP else ():
            root = self.module.root(name)
            if root is not None:
                calls = (*self.calls, (self.where, call))
                yield _At(self.module, name, root, calls, self.wanted)

    def out(self) -> Iterator["_At"]:
        """The operand that a parameter stands for."""
        number = self.module.parameter_number(self.where, self.name)
        if not self.calls or number is None:
            return
        where, call = self.calls[-1]
        if call.opcode == "conditional":
            names = called(call)
            number = names.index(self.where) + 1 if self.where in names else 0
        for name in call.operands[number : number + 1]:
            yield _At(self.module, where, name, self.calls[:-1], self.wanted)

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
