"""Read the collectives from the text of a compiled program.

Every line that communicates is handled in one of three ways: it is read, it repeats an
operation that was read (the TPU compiler writes one asynchronous gather into several
fusions), or it is listed as not recognised. None is dropped.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from flax_layoutmap.pod._hlo_groups import Grid, groups_of, pairs_of
from flax_layoutmap.pod._hlo_text import (
    Array,
    Instruction,
    Line,
    Module,
    Type,
    active,
    arrays_of,
    called_by,
    communicates,
    may_communicate,
    read_alone,
    rendezvous,
    split,
)
from flax_layoutmap.pod._hlo_values import Call, Sources, trips
from flax_layoutmap.pod._records import Collective, Kind

_KINDS: dict[str, Kind] = {
    "all-reduce": "all-reduce",
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    # As `_merge.py` writes an all-reduce of which every device keeps its part.
    "all-reduce-scatter": "reduce-scatter",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
    "collective-permute": "collective-permute",
}
# Transfers between slices, by the runtime's name.
_BETWEEN_SLICES: dict[str, Kind] = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_END = re.compile(r"-(done|update)$")
_ATTRIBUTE = '{}="?([^",}}]+)'
_CHAIN = re.compile(_ATTRIBUTE.format("chain_id"))
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_TRANSFER = re.compile(_ATTRIBUTE.format("_xla_megascale_transfer_type"))


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """The communication of a compiled program."""

    # One for each operation and call of its computation; several if it was merged from
    # operations of several leaves.
    collectives: tuple[Collective, ...]
    # Lines that could not be read, and loops of unknown length.
    unread: tuple[str, ...]
    # Lines that repeat an operation of another line.
    repeated: int
    # Lines that move nothing, as each device is alone in its group.
    idle: int
    # Warnings about the counts.
    notes: tuple[str, ...]


def read_program(
    program: str | Module,
    names: Iterable[str],
    sizes: Iterable[int],
    *,
    slice_of: Iterable[int] = (),
    crossing: Collection[str] = (),
    paths: Sequence[str] = (),
    results: Mapping[int, str] | None = None,
    parameters: Collection[int] = (),
    new_parameters: Collection[int] = (),
) -> Program:
    """Read the collectives of a compiled program, by mesh axis.

    Args:
        program: what `compiled.as_text()` gives, or a dump of the optimised program.
        names: names of the mesh axes.
        sizes: their sizes.
        slice_of: slice of each place of the mesh, row by row; empty for one slice.
        crossing: axes that cross slices, where `slice_of` is empty.
        paths: path of each argument of the program.
        results: position of a result → path of the leaf that it updates, which the sums
            that it is computed from get; of several results the first counts.
        parameters: positions of the arguments that are parameters.
        new_parameters: positions of the results that are.
    """
    sizes, slices = tuple(sizes), tuple(slice_of)
    module = split(program) if isinstance(program, str) else program
    count = math.prod(sizes)
    # A program for several slices counts the places of one of them.
    partitions = module.partitions or count
    if slices and partitions != count and partitions * len(set(slices)) != count:
        partitions = count
    grid = Grid(tuple(names), sizes, slices, partitions)
    sources = Sources(module, paths, results or {}, parameters, new_parameters)
    return _Reader(module, grid, sources, frozenset(crossing)).read()


@dataclasses.dataclass(slots=True)
class _Found:
    """A line that communicates, in one call of its computation."""

    line: Line
    instruction: Instruction
    home: str
    executions: int
    calls: tuple[Call, ...]


class _Reader:
    def __init__(
        self, module: Module, grid: Grid, sources: Sources, crossing: frozenset[str]
    ) -> None:
        self.module = module
        self.crossing = crossing
        self.grid = grid
        self.sources_of = sources
        self.seen: set[int] = set()
        self.found: list[_Found] = []
        self.trouble: dict[int, str] = {}
        self.loops: dict[str, None] = {}
        self.branching: dict[str, None] = {}
        self.idle = 0
        self.active = active(module)

    def read(self) -> Program:
        if self.module.entry is not None:
            self.walk(self.module.entry, 1, (), ())
        collectives: list[Collective] = []
        repeated = 0
        for group in _operations(self.found):
            best = min(group, key=lambda found: found.executions)
            repeated += len({found.line.number for found in group}) - 1
            collectives += self.collective(best)
        for line in self.unreached():
            self.seen.add(line.number)
            self.trouble[line.number] = f"not reached: {_short(line.text)}"
        unread = (*self.loops, *(self.trouble[at] for at in sorted(self.trouble)))
        return Program(tuple(collectives), unread, repeated, self.idle, self.notes())

    def notes(self) -> tuple[str, ...]:
        if not self.branching:
            return ()
        names = ", ".join(self.branching)
        return (f"each device takes one branch of {names}; all branches are counted",)

    def walk(
        self,
        computation: str,
        executions: int,
        above: tuple[str, ...],
        calls: tuple[Call, ...],
    ) -> None:
        """Visit a computation and those that it calls."""
        if computation in above:
            self.loops[f"{computation} calls itself; its inner calls are left out"] = (
                None
            )
            return
        above = (*above, computation)
        for line in self.active[computation]:
            instruction = read_alone(line)
            if instruction is None:
                self.seen.add(line.number)
                self.trouble[line.number] = f"cannot be read: {_short(line.text)}"
                continue
            if communicates(line.text, instruction):
                self.seen.add(line.number)
                self.visit(_Found(line, instruction, computation, executions, calls))
            times = executions
            if instruction.opcode == "while":
                times *= self.trips_of(computation, instruction)
            elif _END.search(instruction.opcode):
                continue
            for called in self.called(instruction):
                call = (computation, instruction)
                self.walk(called, times, above, (*calls, call))

    def trips_of(self, computation: str, instruction: Instruction) -> int:
        count = trips(self.module, computation, instruction)
        if count is None:
            self.loops[
                f"loop {instruction.name}: how often it runs is not in the program; "
                "counted once"
            ] = None
            return 1
        return count

    def called(self, instruction: Instruction) -> list[str]:
        names = [n for n in called_by(instruction.attributes) if n in self.active]
        if instruction.opcode == "conditional" and names:
            self.branching[instruction.name] = None
        return names

    def visit(self, found: _Found) -> None:
        line, instruction, home = found.line, found.instruction, found.home
        opcode = instruction.opcode
        if _END.search(opcode):
            start = instruction.operands[0] if instruction.operands else ""
            if (home, start) not in self.module.by_name:
                self.trouble[line.number] = (
                    f"its start is not there: {_short(line.text)}"
                )
        elif opcode == "recv" and rendezvous(instruction.attributes) in self.sent:
            pass
        elif opcode in ("send", "recv") and not _TRANSFER.search(line.text):
            self.trouble[line.number] = f"unknown form: {_short(line.text)}"
        elif opcode == "recv":
            self.trouble[line.number] = f"its send is not there: {_short(line.text)}"
        elif opcode == "send" or opcode.removesuffix("-start") in _KINDS:
            self.found.append(found)
        else:
            self.trouble[line.number] = f"unknown form: {_short(line.text)}"

    @functools.cached_property
    def sent(self) -> set[str | None]:
        """Names under which something is sent to another slice."""
        sends = (line.text for line in self.lines() if " send(" in line.text)
        return {rendezvous(text) for text in sends} - {None}

    def lines(self) -> Iterator[Line]:
        for lines in self.module.computations.values():
            yield from lines
        yield from self.module.loose

    def unreached(self) -> Iterator[Line]:
        for line in self.lines():
            if line.number not in self.seen and may_communicate(line.text):
                instruction = read_alone(line)
                if instruction is None or communicates(line.text, instruction):
                    yield line

    def collective(self, found: _Found) -> list[Collective]:
        """The records of one operation; else the reason is in `trouble`."""
        if found.instruction.opcode == "send":
            made = self.between_slices(found)
        else:
            made = self.within(found)
        if isinstance(made, str):
            at = found.line
            self.trouble[at.number] = f"{made}: {_short(at.text)}"
            return []
        return made

    def within(self, found: _Found) -> list[Collective] | str:
        instruction = found.instruction
        kind = _KINDS[instruction.opcode.removesuffix("-start")]
        arrays = _payload(kind, instruction)
        if not arrays:
            return "its type cannot be read"
        if kind == "collective-permute":
            groups = pairs_of(instruction.attributes)
        else:
            groups = groups_of(instruction.attributes, self.grid.partitions)
        if groups is None:
            return "its groups cannot be read"
        axes = self.grid.axes(groups)
        if axes is None:
            return "its groups are not of this mesh"
        if not axes:
            self.idle += 1
            return []
        if kind == "all-reduce" and self.scatters(found.home):
            kind = "reduce-scatter"
        elif instruction.opcode.startswith("reduce-scatter"):
            arrays = _widened(arrays, groups.shape[1])
        crosses = self.grid.crosses(groups) or not self.crossing.isdisjoint(axes)
        return self.record(found, kind, axes, arrays, groups.shape[1], crosses)

    def between_slices(self, found: _Found) -> list[Collective] | str:
        transfer = _TRANSFER.search(found.line.text)
        sent_as = transfer[1] if transfer else ""
        kind = _BETWEEN_SLICES.get(sent_as)
        # The token and the context follow what is sent.
        parts = found.instruction.type
        arrays = arrays_of(parts[0]) if isinstance(parts, tuple) and parts else []
        if kind is None or not arrays:
            return f"unknown transfer {sent_as!r}"
        slices = self.grid.slices
        if kind == "all-gather":
            arrays = _widened(arrays, slices)
        axes = self.grid.axes_between_slices()
        return self.record(found, kind, axes, arrays, slices, True)

    def record(
        self,
        found: _Found,
        kind: Kind,
        axes: tuple[str, ...],
        arrays: list[Array],
        members: int,
        over_dcn: bool,
    ) -> list[Collective]:
        """One record for each leaf that the operation moves, usually one."""
        own = found.instruction
        paths, source = self.sources_of(found.home, own, found.calls)
        parts = {paths[0]: arrays}
        if len(set(paths)) > 1 and len(paths) == len(arrays):
            parts = collections.defaultdict(list)
            for path, array in zip(paths, arrays, strict=True):
                parts[path].append(array)
        records = []
        for these_paths, these in parts.items():
            size = sum(array.bytes for array in these)
            records.append(
                Collective(
                    kind=kind,
                    axes=axes,
                    bytes=size,
                    wire_bytes=wire_bytes(kind, size, members),
                    executions=found.executions,
                    dtype=these[0].dtype,
                    shape=these[0].shape,
                    path=these_paths[0] if these_paths else None,
                    joined=these_paths[1:],
                    source=source,
                    over_dcn=over_dcn,
                )
            )
        return records

    def scatters(self, home: str) -> bool:
        """Whether a fusion is a reduce-scatter: an all-reduce that keeps a slice."""
        return home.startswith("all-reduce-scatter") and any(
            "dynamic-slice(" in line.text for line in self.module.computations[home]
        )


def wire_bytes(kind: Kind, size: int, members: int) -> int:
    """Bytes that one device sends on a ring; `size` is `Collective.bytes`."""
    if kind == "collective-permute" or members < 1:
        return size
    if kind == "all-reduce":
        return 2 * size * (members - 1) // members
    return size * (members - 1) // members


def _operations(found: Iterable[_Found]) -> Iterable[list[_Found]]:
    """Group the lines of one operation.

    An asynchronous gather is in each of the fusions that it overlaps with, with one
    chain id. Any other line is an operation by itself.
    """
    groups: dict[tuple[object, ...], list[_Found]] = collections.defaultdict(list)
    for at, one in enumerate(found):
        attributes = one.instruction.attributes
        chain, channel = _CHAIN.search(attributes), _CHANNEL.search(attributes)
        key: tuple[object, ...] = (at,)
        if chain and channel:
            key = (one.instruction.opcode, chain[1], channel[1])
        groups[key].append(one)
    return groups.values()


def _payload(kind: Kind, instruction: Instruction) -> list[Array]:
    """The result of a collective, without the context of an asynchronous start."""
    parts: Type = instruction.type
    starts = instruction.opcode.endswith("-start")
    if starts and kind != "all-reduce" and isinstance(parts, tuple):
        # Operand, result, context.
        return arrays_of(parts[1]) if len(parts) > 1 else []
    return arrays_of(parts)


def _widened(arrays: list[Array], times: int) -> list[Array]:
    return [dataclasses.replace(array, bytes=array.bytes * times) for array in arrays]


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 160 else f"{text[:159]}…"
