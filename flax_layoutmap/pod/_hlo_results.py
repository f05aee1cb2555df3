"""Which result of the program a collective is summed for: the gradient's parameter.

The results are followed backwards through all that an optimizer does with a gradient,
element by element, and no further: not into a matrix product, a reduction, a broadcast.
"""

import collections
import dataclasses
import re
from collections.abc import Collection, Iterator, Sequence

from flax_layoutmap.pod._hlo_origin import CALLS, MOVES, Call, called
from flax_layoutmap.pod._hlo_text import Instruction, Module, rendezvous

_COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?"
)
_ELEMENTWISE = frozenset(
    (
        *("add", "subtract", "multiply", "divide", "negate", "sqrt", "rsqrt"),
        *("power", "maximum", "minimum", "clamp", "abs", "sign", "concatenate"),
        *("select", "pad"),
    )
)
_INDEX = re.compile(r"\bindex=(\d+)")
# A program of many layers without a scan has this many values behind its results.
_STEPS = 500_000
_DEEP = 64

# Computation and name of a collective → its operand → results of the program.
Results = dict[tuple[str, str], dict[int, list[int]]]


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


def results_of(
    module: Module, order: Sequence[int], parameters: Collection[int] = ()
) -> Results:
    """Says for which result each collective on the way to one is.

    Args:
        module: the program.
        order: positions of the results to follow; what is on the way to several is the
            first one's.
        parameters: the first ones of these, of which one array may hold several: the
            compiler packs small sums.
    """
    found: Results = collections.defaultdict(dict)
    walk = _Walk(module, found)
    root = module.root(module.entry) if module.entry else None
    for result in order:
        if module.entry is not None and root is not None:
            several = result in parameters
            walk.follow(_At(module.entry, root, (result,)), result, several)
    return dict(found)


class _Walk:
    def __init__(self, module: Module, found: Results) -> None:
        self.module = module
        self.found = found
        self.seen: set[tuple[object, ...]] = set()
        self.steps = 0

    def follow(self, start: _At, result: int, several: bool) -> None:
        todo, seen = [start], set() if several else self.seen
        while todo and self.steps < _STEPS:
            at = todo.pop()
            if at.key in seen or len(at.calls) + len(at.wanted) > _DEEP:
                continue
            seen.add(at.key)
            self.steps += 1
            instruction = self.module.instruction(at.where, at.name)
            if instruction is not None:
                todo += self.before(at, instruction, result, several)
        self.seen |= seen

    def note(self, at: _At, place: int, result: int, several: bool) -> None:
        """Says of an operand of a collective that it is for a result."""
        found = self.found[at.where, at.name].setdefault(place, [result])
        if several and result not in found:
            found.append(result)

    def before(
        self, at: _At, own: Instruction, result: int, several: bool
    ) -> Iterator[_At]:
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
                self.note(at, place, result, several)
            wanted = at.wanted[:-1] if many else at.wanted
            yield from self.of(at, operands[place : place + 1], wanted)
        elif opcode == "recv":
            send = self.module.sends.get((at.where, rendezvous(own.attributes)))
            if send is not None:
                self.note(dataclasses.replace(at, name=send.name), 0, result, several)
                yield from self.of(at, send.operands[:1], ())
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
        for name in called(call):
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
            names = called(call)
            number = names.index(at.where) + 1 if at.where in names else 0
        if number < len(call.operands):
            yield _At(where, call.operands[number], at.wanted, at.calls[:-1])
