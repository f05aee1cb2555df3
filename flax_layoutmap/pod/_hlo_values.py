"""Follow the values of a compiled program backwards, from results to arguments.

A value goes through fusions, loops, branches, tuples and transfers between slices.
`trips` finds the trip count of a loop; `origin` follows what a collective moves to the
argument that it is a part of, or to the parameters that it is computed from;
`results_of` follows a result through the elementwise operations of an optimizer to the
collectives that sum its gradient; `Sources` names the leaf and the source line.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from flax_layoutmap.pod._hlo_text import (
    Frames,
    Instruction,
    Line,
    Module,
    arrays_of,
    has_source,
    operand_names,
    rendezvous,
)

# The place of a call: the computation that it is in, and the calling instruction.
Call = tuple[str, Instruction]

_COLLECTIVE = re.compile(
    r"(all-reduce(?:-scatter)?|all-gather|reduce-scatter|all-to-all|collective-permute)"
    r"(-start)?"
)
# Operations that copy or convert all elements.
_COPIES = frozenset("bitcast convert copy copy-done copy-start reshape".split())
_MOVES = _COPIES.union(
    """
    all-gather all-gather-done all-gather-start all-to-all async-done async-update
    bitcast-convert call-done collective-permute collective-permute-done
    collective-permute-start dynamic-slice opt-barrier recv-done reduce-precision
    send-done slice slice-done slice-start transpose
    """.split()
)
_ELEMENTWISE = frozenset(
    """
    abs add clamp concatenate divide maximum minimum multiply negate pad power rsqrt
    select sign sqrt subtract
    """.split()
)
# A value that is computed from parameters by these is one of the parameters.
_COMPUTES = _ELEMENTWISE | {"broadcast", "dot", "exponential", "log", "tanh"}
_CONSTANTS = frozenset(("constant", "iota", "partition-id"))
_CALLS = frozenset(("fusion", "call", "call-start", "async-start"))
_CALLED = re.compile(r"\b(?:calls|to_apply)=%?([\w.\-]+)")
_BODY = re.compile(r"\bbody=%?([\w.\-]+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
# The parts of one array, concatenated again after they were moved separately.
_JOINS = '"ConcatBitcast"'
_STEPS = 400
# A program of many layers without a scan has this many values behind its results.
_STEPS_OF_RESULTS = 500_000
_DEEP = 64


# --------------------------------------------------------------------- trip counts

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_LOOP_PARTS = re.compile(r"\b(body|condition|calls)=%?([\w.\-]+)")
_CONSTANT = re.compile(r"[su](?:8|16|32|64)\[\]\S* constant\((-?\d+)\)")


def trips(module: Module, where: str, loop: Instruction) -> int | None:
    """The trip count of a loop; None if unknown.

    The CPU compiler writes it down. The TPU's does not: it is found from the start
    (a constant in the initial tuple), the bound (the one constant of the condition),
    and the step (what the body adds), which is 2 for the loops of collective matrix
    products, and the start 1 where the first iteration was peeled off.
    """
    known = _KNOWN.search(loop.attributes)
    if known:
        return int(known[1])
    called = dict(_LOOP_PARTS.findall(loop.attributes))
    condition, body = called.get("condition", ""), called.get("body", "")
    lines = module.computations.get(condition, [])
    used = {name for line in lines for name in operand_names(line.text)}
    at = {
        int(found[1])
        for line in lines
        if " get-tuple-element(" in line.text
        and line.name in used
        and (found := _INDEX.search(line.text))
    }
    below = any("direction=LT" in line.text for line in lines)
    bounds = {bound for bound in _constants(module, condition, set()) if bound > 0}
    if len(bounds) != 1 or len(at) != 1 or not below:
        return None
    index, end = at.pop(), bounds.pop()
    initial = module.instruction(where, loop.operands[0] if loop.operands else None)
    start = _number(_element(module, where, initial, index))
    step = _step(module, body, index)
    if start is None or step is None:
        return None
    return max(0, -(-(end - start) // step))


def _step(module: Module, body: str, index: int) -> int | None:
    """The positive constant that the body adds to an element; else None."""
    line = _element(module, body, module.root(body), index)
    added = None if line is None else line.instruction
    if added is None or added.opcode != "add":
        return None
    numbers = [_number(_copied(module, body, name)) for name in added.operands]
    steps = [number for number in numbers if number is not None and number > 0]
    return steps[0] if len(steps) == 1 else None


def _constants(module: Module, computation: str, seen: set[str]) -> set[int]:
    """The integer constants of a computation and those that it calls."""
    if computation in seen:
        return set()
    seen.add(computation)
    found: set[int] = set()
    for line in module.computations.get(computation, []):
        number = _number(line)
        found |= set() if number is None else {number}
        for _, name in _LOOP_PARTS.findall(line.text):
            found |= _constants(module, name, seen)
    return found


def _element(
    module: Module, where: str, given: Instruction | None, index: int
) -> Line | None:
    """The line of one element of a tuple, behind copies of it."""
    if given is None or given.opcode != "tuple" or index >= len(given.operands):
        return None
    return _copied(module, where, given.operands[index])


def _copied(module: Module, where: str, name: str) -> Line | None:
    """The line of the value that an instruction copies or converts."""
    for _ in range(32):
        line = module.by_name.get((where, name))
        one = None if line is None else line.instruction
        if one is None or one.opcode not in _COPIES or len(one.operands) != 1:
            return line
        name = one.operands[0]
    return None


def _number(line: Line | None) -> int | None:
    """The value of an integer constant; None for other lines."""
    found = None if line is None else _CONSTANT.search(line.text)
    return int(found[1]) if found else None


# -------------------------------------------------------------------------- values

# Computation and name of a collective → its operand → results of the program.
Results = dict[tuple[str, str], dict[int, list[int]]]


@dataclasses.dataclass(frozen=True, slots=True)
class _Value:
    """The result of an instruction, or an element of it, in one call."""

    module: Module
    where: str
    name: str
    calls: tuple[Call, ...] = ()
    # Indices of the elements of nested tuples, the innermost last.
    wanted: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for the same value."""
        calls = tuple((where, call.name) for where, call in self.calls)
        return self.where, self.name, self.wanted, calls

    def instruction(self) -> Instruction | None:
        return self.module.instruction(self.where, self.name)

    def of(
        self, names: Sequence[str], wanted: tuple[int, ...] | None = None
    ) -> Iterator["_Value"]:
        """Operands of its instruction."""
        for name in names:
            given = self.wanted if wanted is None else wanted
            yield dataclasses.replace(self, name=name, wanted=given)

    def in_tuples(self, own: Instruction) -> Iterator["_Value"]:
        """The tuple that it is an element of, or that element of a tuple."""
        index = _INDEX.search(own.attributes)
        if own.opcode == "tuple" and self.wanted:
            at = self.wanted[-1]
            yield from self.of(own.operands[at : at + 1], self.wanted[:-1])
        elif own.opcode == "get-tuple-element" and index is not None:
            yield from self.of(own.operands[:1], (*self.wanted, int(index[1])))

    def sent(self, own: Instruction) -> Iterator["_Value"]:
        """The value that another slice sends to a `recv`."""
        send = self.module.sends.get((self.where, rendezvous(own.attributes)))
        if send is not None:
            yield dataclasses.replace(self, name=send.name, wanted=())

    def into(self, call: Instruction) -> Iterator["_Value"]:
        """The results of the called computations: of a conditional, all of them."""
        calls = (*self.calls, (self.where, call))
        for name in _called(call) if len(self.calls) <= _DEEP else ():
            root = self.module.root(name)
            if root is not None:
                yield _Value(self.module, name, root.name, calls, self.wanted)

    def out(self) -> Iterator["_Value"]:
        """The operand of the call that a parameter of a computation is."""
        number = self.module.parameter_number(self.where, self.name)
        if not self.calls or number is None:
            return
        where, call = self.calls[-1]
        if call.opcode == "conditional":
            names = _called(call)
            number = names.index(self.where) + 1 if self.where in names else 0
        for name in call.operands[number : number + 1]:
            yield _Value(self.module, where, name, self.calls[:-1], self.wanted)


def _called(call: Instruction) -> list[str]:
    """The computations that an instruction takes its result from."""
    if call.opcode == "conditional":
        found = _BRANCHES.search(call.attributes)
        names = found[1].split(",") if found else []
        return [name.strip().lstrip("%") for name in names]
    found = (_BODY if call.opcode == "while" else _CALLED).search(call.attributes)
    return [found[1]] if found else []


# --------------------------------------------------------------------- to arguments


@dataclasses.dataclass(slots=True)
class Origin:
    """The arguments that a value comes from."""

    # Position of the argument that the value is a part of, or those of the parameters
    # that it is computed from, the largest first; empty for other values.
    arguments: list[int]
    # Attributes of the instructions on the way, the nearest first.
    attributes: list[str]


def origin(
    module: Module,
    where: str,
    start: Instruction,
    calls: Sequence[Call],
    parameters: Collection[int] = (),
) -> Origin:
    """Follow the first operand of an instruction backwards.

    `calls` are those by which its computation was reached, the outermost first;
    `parameters` are the arguments that are parameters of the model.
    """
    found, sizes, computed = Origin([], []), dict[int, int](), False
    todo = [_Value(module, where, name, tuple(calls)) for name in start.operands[:1]]
    for _ in range(_STEPS):
        if not todo:
            break
        value = todo.pop()
        own = value.instruction()
        if own is None:
            return found
        if not computed:
            found.attributes.append(own.attributes)
        number = module.parameter_number(value.where, value.name)
        if number is not None and value.where == module.entry:
            sizes[number] = sum(array.bytes for array in arrays_of(own.type))
            continue
        before = list(_before(value, own))
        if not before and own.opcode in _COMPUTES:
            computed, before = True, list(value.of(own.operands))
        if not before and not (computed and own.opcode in _CONSTANTS):
            return found
        todo += reversed(before)
    is_one = len(sizes) == 1 and not computed
    if not todo and (is_one or sizes and sizes.keys() <= set(parameters)):
        found.arguments = sorted(sizes, key=lambda at: -sizes[at])
    return found


def _before(value: _Value, own: Instruction) -> Iterator[_Value]:
    """The value that an instruction moves; several if it selects one of them."""
    if own.opcode in ("tuple", "get-tuple-element"):
        yield from value.in_tuples(own)
    elif own.opcode == "parameter":
        yield from value.out()
    elif own.opcode == "while":
        if _is_kept(value, own):
            yield from value.of(own.operands[:1])
    elif own.opcode in _CALLS or own.opcode == "conditional":
        yield from value.into(own)
    elif own.opcode == "select":
        yield from value.of(_unmasked(value, own.operands))
    elif own.opcode == "recv":
        yield from value.sent(own)
    elif own.opcode in _MOVES | {"gather", "send"} or _JOINS in own.attributes:
        yield from value.of(own.operands[:1])


def _unmasked(value: _Value, operands: Sequence[str]) -> list[str]:
    """The operands of a select that are not broadcast constants.

    In a lookup in a sharded table each device has zeros for rows of other devices.
    """
    made = [value.module.instruction(value.where, name) for name in operands[1:]]
    kept = zip(operands[1:], made, strict=True)
    return [name for name, one in kept if one is None or one.opcode != "broadcast"]


def _is_kept(value: _Value, loop: Instruction) -> bool:
    """Whether the element of a loop that is followed is loop-invariant."""
    body = _called(loop)
    made = value.module.root(body[0]) if body and value.wanted else None
    if made is None or made.opcode != "tuple" or value.wanted[-1] >= len(made.operands):
        return False
    kept = value.module.instruction(body[0], made.operands[value.wanted[-1]])
    index = None if kept is None else _INDEX.search(kept.attributes)
    return (
        kept is not None
        and kept.opcode == "get-tuple-element"
        and index is not None
        and int(index[1]) == value.wanted[-1]
    )


# --------------------------------------------------------------------- from results


def results_of(
    module: Module, order: Sequence[int], parameters: Collection[int] = ()
) -> Results:
    """Find the result of the program that each collective contributes to elementwise.

    Of several results the first in `order` counts, but for `parameters`, which are
    first: the compiler packs small sums of several into one array.
    """
    found: Results = collections.defaultdict(dict)
    entry = module.entry or ""
    root = module.root(entry)
    if root is None:
        return {}
    seen: set[tuple[object, ...]] = set()
    steps = 0
    for result in order:
        several = result in parameters
        own = set[tuple[object, ...]]() if several else seen
        todo = [_Value(module, entry, root.name, (), (result,))]
        while todo and steps < _STEPS_OF_RESULTS:
            value = todo.pop()
            if value.key in own or len(value.calls) + len(value.wanted) > _DEEP:
                continue
            own.add(value.key)
            steps += 1
            instruction = value.instruction()
            if instruction is None:
                continue
            place = _place_in(value, instruction)
            if place is not None:
                named = found[value.where, value.name].setdefault(place, [result])
                if several and result not in named:
                    named.append(result)
            todo += _made_from(value, instruction)
        seen |= own
    return dict(found)


def _place_in(value: _Value, own: Instruction) -> int | None:
    """The operand of a collective that a value is the result of; else None."""
    if own.opcode == "send":
        return 0
    if not _COLLECTIVE.fullmatch(own.opcode):
        return None
    return value.wanted[-1] if len(own.operands) > 1 and value.wanted else 0


def _made_from(value: _Value, own: Instruction) -> Iterator[_Value]:
    """The values that one is computed from elementwise."""
    opcode, operands, place = own.opcode, own.operands, _place_in(value, own)
    if place is not None:
        wanted = value.wanted[:-1] if len(operands) > 1 else value.wanted
        yield from value.of(operands[place : place + 1], wanted)
    elif opcode in ("tuple", "get-tuple-element"):
        yield from value.in_tuples(own)
    elif opcode == "parameter":
        if value.calls and value.calls[-1][1].opcode == "while":
            root = value.module.root(value.where)  # of the previous iteration
            yield from value.of([root.name] if root else [])
        yield from value.out()
    elif opcode == "while" or opcode == "conditional" or opcode in _CALLS:
        if opcode == "while":
            yield from value.of(operands[:1])
        yield from value.into(own)
    elif opcode == "recv":
        yield from value.sent(own)
    elif opcode in _ELEMENTWISE or opcode in _MOVES:
        yield from value.of(operands[opcode == "select" :])
    elif opcode == "dynamic-update-slice":
        yield from value.of(operands[:2])
    elif opcode == "scatter":
        yield from value.of(operands[:1])
    elif _JOINS in own.attributes:
        yield from value.of(operands)


# ------------------------------------------------------------------ leaf and line


class Sources:
    """Paths and lines of the collectives of one program."""

    def __init__(
        self,
        module: Module,
        paths: Sequence[str],
        results: Mapping[int, str],
        parameters: Collection[int],
        new_parameters: Collection[int],
    ) -> None:
        self.module = module
        self.frames = Frames(module.text)
        self.paths = paths
        self.results = results
        self.parameters = parameters
        self.readers_of = functools.cache(self._readers_of)
        self.summed = results_of(module, list(results), new_parameters)

    def __call__(
        self, home: str, own: Instruction, calls: Sequence[Call]
    ) -> tuple[list[tuple[str, ...]], str | None]:
        """The paths of the leaves that each operand is or updates; the source line."""
        paths: list[tuple[str, ...]] = []
        attributes = [own.attributes]
        if not has_source(own.attributes):
            attributes.append(self.reader(home, own.name))
        to = self.summed.get((home, own.name), {})
        for place, operand in enumerate(own.operands or ("",)):
            one = dataclasses.replace(own, operands=(operand,))
            came = origin(self.module, home, one, calls, self.parameters)
            attributes += came.attributes
            made_of = came.arguments
            if made_of and max(made_of) < len(self.paths):
                paths.append(tuple(self.paths[at] for at in made_of))
            else:
                into = [self.results[result] for result in to.get(place, ())]
                paths.append(tuple(dict.fromkeys(into)))
        found = (self.frames.source(text) for text in attributes)
        return paths, next((source for source in found if source is not None), None)

    def reader(self, home: str, name: str) -> str:
        """The first line that reads a value and has a source line, through copies.

        The partitioner of jaxlib 0.12 gives the collectives that it inserts none.
        """
        for _ in range(_STEPS):
            line = self.readers_of(home).get(name)
            if line is None or line.name is None or has_source(line.text):
                return "" if line is None else line.text
            name = line.name
        return ""

    def _readers_of(self, home: str) -> Mapping[str, Line]:
        """Name of a value of a computation → the first line that reads it."""
        found: dict[str, Line] = {}
        for line in self.module.computations.get(home, []):
            for name in operand_names(line.text):
                found.setdefault(name, line)
        return found
