"""Which result of the program a collective is summed for: the gradient's parameter.

The results are followed backwards through all that an optimizer does with a gradient,
element by element, and no further: not into a matrix product, a reduction, a broadcast.
"""

import collections
import dataclasses
import re
from collections.abc import Iterator, Sequence

from flax_layoutmap.pod._hlo_origin import BODY, BRANCHES, CALLED, CALLS, MOVES, Call
from flax_layoutmap.pod._hlo_text import Instruction, Module

_COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?"
)
_ELEMENTWISE = frozenset(
    (
        *("add", "subtract", "multiply", "divide", "negate", "sqrt", "rsqrt"),
        *("power", "maximum", "minimum", "clamp", "abs", "sign", "concatenate"),
        *("select", "pad", "recv-done", "send-done"),
    )
)
_INDEX = re.compile(r"\bindex=(\d+)")
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="?([^",}]+)')
# A program of many layers without a scan has this many values behind its results.
_STEPS = 500_000
_DEEP = 64

# Computation and name of a collective → its operand → result of the program.
Results = dict[tuple[str, str], dict[int, int]]


@dataclasses.dataclass(frozen=True, slots=True)
class _At:
    """A value: an element of what an instruction gives, in one call of its home."""

    where: str
    name: str
    wanted: tuple[int, ...] = ()
    calls: tuple[Call, ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for the same value."""
        calls = tuple((where, call.name) for where, call in self.calls)
        return self.where, self.name, self.wanted, calls


def results_of(module: Module, order: Sequence[int]) -> Results:
    """Says for which result each collective on the way to one is.

    Args:
        module: the program.
        order: positions of the results to follow; what is on the way to several is the
            first one's.
    """
    found: Results = collections.defaultdict(dict)
    walk = _Walk(module, found)
    root = module.root(module.entry) if module.entry else None
    for result in order:
        if module.entry is not None and root is not None:
            walk.follow(_At(module.entry, root, (result,)), result)
    return dict(found)


class _Walk:
    def __init__(self, module: Module, found: Results) -> None:
        self.module = module
        self.found = found
        self.seen: set[tuple[object, ...]] = set()
        self.sends = dict(_sends(module))

    def follow(self, start: _At, result: int) -> None:
        todo = [start]
        while todo and len(self.seen) < _STEPS:
            at = todo.pop()
            if at.key in self.seen or len(at.calls) + len(at.wanted) > _DEEP:
                continue
            self.seen.add(at.key)
            instruction = self.module.instruction(at.where, at.name)
            if instruction is not None:
                todo += self.before(at, instruction, result)

    def before(self, at: _At, own: Instruction, result: int) -> Iterator[_At]:
        """The values that one is made from, where it is made element by element."""
        opcode, operands = own.opcode, own.operands
        if opcode == "parameter":
            yield from self.out(at)
        elif opcode == "while" or opcode == "conditional" or opcode in CALLS:
            if opcode == "while":
                yield from self.of(at, operands[:1])
            yield from self.into(at, own)
        elif opcode == "get-tuple-element":
            index = _INDEX.search(own.attributes)
            if index:
                wanted = (*at.wanted, int(index[1]))
                yield from self.of(at, operands[:1], wanted)
        elif opcode == "tuple" or _COLLECTIVE.fullmatch(opcode):
            many = len(operands) > 1 or opcode == "tuple"
            place = at.wanted[-1] if many and at.wanted else 0
            if opcode != "tuple":
                self.found[at.where, at.name].setdefault(place, result)
            wanted = at.wanted[:-1] if many else at.wanted
            yield from self.of(at, operands[place : place + 1], wanted)
        elif opcode == "recv":
            yield from self.other_side(at, own, result)
        elif opcode in _ELEMENTWISE or opcode in MOVES:
            yield from self.of(at, operands[opcode == "select" :])
        elif opcode == "dynamic-update-slice":
            yield from self.of(at, operands[:2])
        elif '"ConcatBitcast"' in own.attributes:
            yield from self.of(at, operands)

    def of(
        self, at: _At, names: Sequence[str], wanted: tuple[int, ...] | None = None
    ) -> Iterator[_At]:
        for name in names:
            given = at.wanted if wanted is None else wanted
            yield dataclasses.replace(at, name=name, wanted=given)

    def into(self, at: _At, call: Instruction) -> Iterator[_At]:
        """What the computations that are called give back."""
        calls = (*at.calls, (at.where, call))
        for name in _called(call):
            root = self.module.root(name)
            if root is not None:
                yield _At(name, root, at.wanted, calls)

    def out(self, at: _At) -> Iterator[_At]:
        """What a parameter stands for; in a loop, the round before too."""
        number = self.module.parameter_number(at.where, at.name)
        if not at.calls or number is None:
            return
        where, call = at.calls[-1]
        if call.opcode == "while":
            root = self.module.root(at.where)
            if root is not None:
                yield dataclasses.replace(at, name=root)
        elif call.opcode == "conditional":
            names = _called(call)
            number = names.index(at.where) + 1 if at.where in names else 0
        if number < len(call.operands):
            yield _At(where, call.operands[number], at.wanted, at.calls[:-1])

    def other_side(self, at: _At, own: Instruction, result: int) -> Iterator[_At]:
        """What was sent between slices for this to be received."""
        name = _RENDEZVOUS.search(own.attributes)
        send = self.sends.get((at.where, name[1])) if name else None
        if send is not None:
            self.found[at.where, send.name].setdefault(0, result)
            yield from self.of(at, send.operands[:1], ())


def _called(call: Instruction) -> list[str]:
    if call.opcode == "conditional":
        branches = BRANCHES.search(call.attributes)
        names = branches[1].split(",") if branches else []
        return [name.strip().lstrip("%") for name in names]
    pattern = BODY if call.opcode == "while" else CALLED
    found = pattern.search(call.attributes)
    return [found[1]] if found else []


def _sends(module: Module) -> Iterator[tuple[tuple[str, str], Instruction]]:
    """Computation and rendezvous → what is sent there to another slice."""
    for computation, lines in module.computations.items():
        for line in lines:
            if " send(" in line.text and line.name is not None:
                own = module.instruction(computation, line.name)
                name = _RENDEZVOUS.search(line.text)
                if own is not None and name is not None:
                    yield (computation, name[1]), own
