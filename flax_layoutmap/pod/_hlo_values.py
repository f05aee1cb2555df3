"""Follow the values of a compiled program backwards, from results to arguments.

Values are followed through fusions, loops, branches, tuples and transfers between
slices. `origin` follows the operand of a collective to the argument that it is a part
of, or to the parameters that it is computed from; `results_of` follows a result through
the elementwise operations of an optimizer to the collectives that sum its gradient.
"""

import collections
import dataclasses
import functools
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from flax_layoutmap.pod._hlo_text import (
    Instruction,
    Line,
    Module,
    arrays_of,
    called_by,
    operand_names,
    rendezvous,
)

# A call: the computation that contains it, and the calling instruction.
Call = tuple[str, Instruction]
# Computation and name of a collective → its operand → results of the program.
Results = dict[tuple[str, str], dict[int, list[int]]]

_COLLECTIVE = re.compile(
    r"(all-reduce(?:-scatter)?|all-gather|reduce-scatter|all-to-all|collective-permute)"
    r"(-start)?"
)
_ELEMENTWISE = frozenset(
    """
    abs add clamp concatenate divide maximum minimum multiply negate pad power rsqrt
    select sign sqrt subtract
    """.split()
)
# Operation → number of operands that it moves (converts, slices, sends).
_MOVED = dict.fromkeys(
    """
    all-gather all-gather-done all-gather-start all-to-all async-done async-update
    bitcast bitcast-convert call-done collective-permute collective-permute-done
    collective-permute-start convert copy copy-done copy-start dynamic-slice opt-barrier
    recv-done reduce-precision reshape send-done slice slice-done slice-start transpose
    """.split(),
    1,
)
_MOVED_TO_COLLECTIVE = {**_MOVED, "gather": 1, "send": 1}
_MOVED_TO_RESULT = {
    **_MOVED,
    **dict.fromkeys(_ELEMENTWISE, 1000),
    "dynamic-update-slice": 2,
    "scatter": 1,
}
# A value that these compute from parameters counts as the parameters.
_COMPUTES = _ELEMENTWISE | {"broadcast", "dot", "exponential", "log", "tanh"}
_CONSTANTS = frozenset(("constant", "iota", "partition-id"))
_CALLS = frozenset(("fusion", "call", "call-start", "async-start", "conditional"))
# Concatenates the parts of an array that were moved separately.
_JOINS = '"ConcatBitcast"'
_STEPS = 400
# A program with many unrolled layers has as many values before its results.
_STEPS_OF_RESULTS = 500_000
_DEEPEST_TUPLE = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """The result of an instruction, or an element of a tuple, in a call."""

    module: Module
    where: str
    name: str
    calls: tuple[Call, ...] = ()
    # Indices of the elements of nested tuples, the innermost last.
    wanted: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        """A key that is equal for the same value."""
        calls = tuple((where, call.name) for where, call in self.calls)
        return self.where, self.name, self.wanted, calls

    @property
    def instruction(self) -> Instruction | None:
        """The instruction that computes it; None if it cannot be read."""
        return self.module.instruction(self.where, self.name)

    def before(self, op: Instruction, *, sums: bool) -> Iterator["Value"]:
        """The values from which it is made; `op` is its instruction.

        With `sums`, these are all values that it is computed from elementwise, as by an
        optimizer, including sums over devices and previous rounds of a loop. Otherwise,
        it is the value that it was moved from, or several if it is one of them.
        """
        opcode, operands = op.opcode, op.operands
        place = self.place_in(op) if sums else None
        moved = _MOVED_TO_RESULT if sums else _MOVED_TO_COLLECTIVE
        if place is not None:
            wanted = self.wanted[:-1] if len(operands) > 1 else self.wanted
            yield from self.of(operands[place : place + 1], wanted)
        elif opcode == "tuple" and self.wanted:
            at = self.wanted[-1]
            yield from self.of(operands[at : at + 1], self.wanted[:-1])
        elif opcode == "get-tuple-element":
            yield from self.of(operands[:1], (*self.wanted, op.number or 0))
        elif opcode == "parameter":
            if sums and self.calls and self.calls[-1][1].opcode == "while":
                root = self.module.root(self.where)  # of the previous round
                yield from self.of([root.name] if root else [])
            yield from self._out(op.number or 0)
        elif opcode == "while":
            if sums or self._is_kept(op):
                yield from self.of(operands[:1])
            if sums:
                yield from self._into(op)
        elif opcode in _CALLS:
            yield from self._into(op)
        elif opcode == "recv":
            send = self.module.sends.get((self.where, rendezvous(op.attributes)))
            yield from self.of([send.name] if send else [], ())
        elif opcode == "select":
            yield from self.of(operands[1:] if sums else self._unmasked(operands))
        elif opcode in moved:
            yield from self.of(operands[: moved[opcode]])
        elif _JOINS in op.attributes:
            yield from self.of(operands if sums else operands[:1])

    def place_in(self, op: Instruction) -> int | None:
        """The operand of a collective whose result it is; else None."""
        if op.opcode == "send":
            return 0
        if not _COLLECTIVE.fullmatch(op.opcode):
            return None
        return self.wanted[-1] if len(op.operands) > 1 and self.wanted else 0

    def of(
        self, names: Sequence[str], wanted: tuple[int, ...] | None = None
    ) -> Iterator["Value"]:
        """Values of the same computation, by name."""
        for name in names:
            given = self.wanted if wanted is None else wanted
            yield dataclasses.replace(self, name=name, wanted=given)

    def _into(self, call: Instruction) -> Iterator["Value"]:
        """The results of the called computations; all branches of a conditional."""
        calls = (*self.calls, (self.where, call))
        for name in _called(call):
            root = self.module.root(name)
            if root is not None:
                yield Value(self.module, name, root.name, calls, self.wanted)

    def _out(self, number: int) -> Iterator["Value"]:
        """The operand of the call for a parameter of its computation."""
        if not self.calls:
            return
        where, call = self.calls[-1]
        if call.opcode == "conditional":
            branches = _called(call)
            number = branches.index(self.where) + 1 if self.where in branches else 0
        for name in call.operands[number : number + 1]:
            yield Value(self.module, where, name, self.calls[:-1], self.wanted)

    def _unmasked(self, operands: Sequence[str]) -> list[str]:
        """The operands of a select that are not broadcast constants.

        In a lookup in a sharded table, rows of other devices are masked with zeros.
        """
        ops = [(name, self.module.instruction(self.where, name)) for name in operands]
        return [name for name, op in ops[1:] if op is None or op.opcode != "broadcast"]

    def _is_kept(self, loop: Instruction) -> bool:
        """Whether it is an element that a loop returns unchanged."""
        for result in self._into(loop) if self.wanted else ():
            root = result.instruction
            if root is not None and root.opcode == "tuple":
                for element in result.before(root, sums=False):
                    op = element.instruction
                    if op is not None and op.opcode == "get-tuple-element":
                        return op.number == self.wanted[-1]
        return False


def _called(call: Instruction) -> list[str]:
    """The computations that compute the result of an instruction."""
    return called_by(call.attributes)[call.opcode == "while" :]  # after its condition


def origin(
    start: Value, parameters: Collection[int] = ()
) -> tuple[list[int], list[str]]:
    """Follow a value to arguments; `parameters` are the model's arguments.

    Returns:
        The position of the argument that it is a part of, or the positions of the
        parameters that it is computed from (largest first), or empty; and the
        attributes of the instructions on the way (nearest first).
    """
    attributes, sizes, computed = list[str](), dict[int, int](), False
    todo = [start]
    for _ in range(_STEPS):
        if not todo:
            break
        value = todo.pop()
        op = value.instruction
        if op is None:
            return [], attributes
        if not computed:
            attributes.append(op.attributes)
        if op.opcode == "parameter" and value.where == value.module.entry:
            sizes[op.number or 0] = sum(array.bytes for array in arrays_of(op.type))
            continue
        before = list(value.before(op, sums=False))
        if not before and op.opcode in _COMPUTES:
            computed, before = True, list(value.of(op.operands))
        if not before and not (computed and op.opcode in _CONSTANTS):
            return [], attributes
        todo += reversed(before)
    is_one = len(sizes) == 1 and not computed
    if not todo and (is_one or sizes and sizes.keys() <= set(parameters)):
        return sorted(sizes, key=lambda at: -sizes[at]), attributes
    return [], attributes


def results_of(
    module: Module, order: Sequence[int], parameters: Collection[int] = ()
) -> Results:
    """Find the results of the program that each collective contributes to elementwise.

    The first result in `order` wins. `parameters`, which come first, are all kept, as
    the compiler packs the small sums of several into an array.
    """
    results: Results = collections.defaultdict(dict)
    root = module.root(module.entry)
    if root is None:
        return {}
    seen: set[tuple[object, ...]] = set()
    steps = 0
    for result in order:
        several = result in parameters
        passed = set[tuple[object, ...]]() if several else seen
        todo = [Value(module, module.entry, root.name, (), (result,))]
        while todo and steps < _STEPS_OF_RESULTS:
            value = todo.pop()
            op, key = value.instruction, value.key
            if op is None or key in passed or len(value.wanted) > _DEEPEST_TUPLE:
                continue
            passed.add(key)
            steps += 1
            place = value.place_in(op)
            if place is not None:
                named = results[value.where, value.name].setdefault(place, [result])
                if several and result not in named:
                    named.append(result)
            todo += value.before(op, sums=True)
        seen |= passed
    return dict(results)


# --------------------------------------------------------------------- source lines

_FIELD = re.compile(r"(\w+)=(\d+)")
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
# Frames of these libraries are skipped, but not of models installed with pip.
_LIBRARIES = re.compile(
    r"-packages[/\\](?:jax|jaxlib|flax|optax|chex)[/\\]|[/\\]contextlib\.py$"
)
_OURS = f"{Path(__file__).parents[1]}{os.sep}"


class Frames:
    """The tables at the start of a program: files, functions, lines, stacks."""

    def __init__(self, text: str) -> None:
        self._files = _rows(text, "FileNames")
        self._functions = _rows(text, "FunctionNames")
        self._places = _rows(text, "FileLocations")
        self._frames = _rows(text, "StackFrames")

    def source(self, attributes: str) -> str | None:
        """`"model.py:36 Attention.__call__"`: the innermost frame of the user."""
        written = _FRAME.search(attributes)
        at = int(written[1]) if written else 0
        innermost: str | None = None
        while at in self._frames:
            frame = _fields(self._frames[at])
            place = _fields(self._places[frame["file_location_id"]])
            file = _plain(self._files[place["file_name_id"]])
            function = _plain(self._functions.get(place.get("function_name_id", 0), ""))
            function = function.replace(".<locals>", "")
            name = re.split(r"[/\\]", file)[-1]
            source = f"{name}:{place.get('line', 0)} {function}".rstrip()
            innermost = innermost or source
            if not _LIBRARIES.search(file) and not file.startswith(_OURS):
                return source
            # Numbers are too high by 1, and 1 means no parent.
            at = frame.get("parent_frame_id", 1) - 1
        return innermost


def _rows(text: str, table: str) -> Mapping[int, str]:
    rows = re.search(rf"^{table}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
    split = [row.split(" ", 1) for row in rows[1].splitlines()] if rows else []
    return {int(number): rest for number, rest in split}


def _fields(row: str) -> Mapping[str, int]:
    return {name: int(value) for name, value in _FIELD.findall(row)}


def _plain(row: str) -> str:
    """Decode a text in which bytes of non-ASCII characters are escaped."""
    row = row.strip('"').encode().decode("unicode_escape")
    return row.encode("latin-1").decode("utf-8", "replace")


@dataclasses.dataclass(frozen=True)
class Sources:
    """Paths and source lines of the collectives of a program.

    The attributes are as for `read_program`.
    """

    module: Module
    paths: Sequence[str]
    results: Mapping[int, str]
    parameters: Collection[int]
    new_parameters: Collection[int]

    def __call__(
        self, home: str, op: Instruction, calls: Sequence[Call]
    ) -> tuple[list[tuple[str, ...]], str | None]:
        """The paths of each operand, or of leaves that it updates; and the source."""
        paths: list[tuple[str, ...]] = []
        attributes = [op.attributes]
        if not _FRAME.search(op.attributes):
            attributes.append(self._reader(home, op.name))
        updated = self._sums.get((home, op.name), {})
        for place, operand in enumerate(op.operands or ("",)):
            start = Value(self.module, home, operand, tuple(calls))
            arguments, passed = origin(start, self.parameters)
            attributes += passed
            if arguments and self.paths:
                paths.append(tuple(self.paths[at] for at in arguments))
            else:
                leaves = [self.results[result] for result in updated.get(place, ())]
                paths.append(tuple(dict.fromkeys(leaves)))
        sources = map(self._frames.source, attributes)
        return paths, next((source for source in sources if source is not None), None)

    @functools.cached_property
    def _frames(self) -> Frames:
        return Frames(self.module.text)

    @functools.cached_property
    def _sums(self) -> Results:
        return results_of(self.module, list(self.results), self.new_parameters)

    @functools.cached_property
    def _readers(self) -> Mapping[tuple[str, str], Line]:
        """Computation and name of a value → the first line that reads it."""
        readers: dict[tuple[str, str], Line] = {}
        for home, lines in self.module.computations.items():
            for line in lines:
                for name in operand_names(line.text):
                    readers.setdefault((home, name.partition("#")[0]), line)
        return readers

    def _reader(self, home: str, name: str) -> str:
        """The first line that reads a value, through copies, and has a source line.

        In jaxlib 0.12, collectives that the partitioner inserts have none.
        """
        for _ in range(_STEPS):
            line = self._readers.get((home, name))
            if line is None:
                break
            if _FRAME.search(line.text):
                return line.text
            name = line.name
        return ""
