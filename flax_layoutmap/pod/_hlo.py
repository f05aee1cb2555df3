"""Collectives out of the text of a compiled program.

Every line that communicates ends in one of three places: it is read, it repeats an
operation that was read (the TPU compiler writes one asynchronous gather into several
fusions), or it is listed as not recognised. None is dropped.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from flax_layoutmap.pod._hlo_frames import Frames
from flax_layoutmap.pod._hlo_groups import Grid, groups_of, pairs_of
from flax_layoutmap.pod._hlo_loops import trips
from flax_layoutmap.pod._hlo_origin import Call, origin
from flax_layoutmap.pod._hlo_text import (
    Array,
    Instruction,
    Line,
    Module,
    Type,
    arrays_of,
    read_line,
    split,
)
from flax_layoutmap.pod._records import Collective, Kind

_KINDS: dict[str, Kind] = {
    "all-reduce": "all-reduce",
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
    "collective-permute": "collective-permute",
}
# What goes between slices, by the name that the runtime has for it.
_BETWEEN_SLICES: dict[str, Kind] = {
    "ALL_REDUCE": "all-reduce",
    "ALL_GATHER": "all-gather",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_COMMUNICATES = re.compile(
    r"[\s)}](?:(?:all|collective|reduce-scatter|ragged)(?:-[a-z]+)*|send|recv)\("
)
# Kernels that are called by name and, by that name, communicate.
_CALLS_OUT = re.compile(
    r'custom_call_target="[^"]*(?:all_?reduce|all_?gather|all_?to_?all|'
    r'reduce_?scatter|collective_?permute|ragged|remote)[^"]*"',
    re.IGNORECASE,
)
# Whatever its name, what has groups or pairs of devices communicates.
_GROUPED = re.compile(r"\b(?:replica_groups|source_target_pairs)=")
_END = re.compile(r"-(done|update)$")
_REFERENCE = re.compile(r"(\w+)=(%[\w.\-]+|\{%[^{}]*\})")
_ATTRIBUTE = '{}="?([^",}}]+)'
_CHAIN = re.compile(_ATTRIBUTE.format("chain_id"))
_CHANNEL = re.compile(r"\bchannel_id=(\d+)")
_TRANSFER = re.compile(_ATTRIBUTE.format("_xla_megascale_transfer_type"))
_RENDEZVOUS = re.compile(_ATTRIBUTE.format("_xla_host_transfer_rendezvous"))
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """What a compiled program communicates.

    Attributes:
        collectives: one record for each operation and place that it is called from.
        unrecognised: what was seen and not read, as text; each is one line of the
            program or one loop whose length is not known.
        repeated: lines that belong to an operation that another line stands for.
        idle: lines that move nothing: each device is alone in its group.
        notes: what the counts leave open.
    """

    collectives: tuple[Collective, ...]
    unrecognised: tuple[str, ...]
    repeated: int
    idle: int
    notes: tuple[str, ...]


def read_program(
    text: str,
    names: Iterable[str],
    sizes: Iterable[int],
    *,
    slice_of: Iterable[int] = (),
    paths: Sequence[str] = (),
) -> Program:
    """Reads the collectives of a compiled program, by mesh axis.

    Args:
        text: what `compiled.as_text()` gives, or a dump of the optimised program.
        names: names of the mesh axes.
        sizes: their sizes.
        slice_of: slice of each place of the mesh, row by row; empty for one slice.
        paths: path of the leaf that each argument of the program is, in order.
    """
    sizes, slices = tuple(sizes), tuple(slice_of)
    found = _PARTITIONS.search(text[: text.find("\n")])
    count = int(np.prod(sizes, dtype=np.int64))
    # A program for several slices counts the places of one of them.
    partitions = int(found[1]) if found else count
    if slices and partitions != count and partitions * len(set(slices)) != count:
        partitions = count
    grid = Grid(tuple(names), sizes, slices, partitions)
    return _Reader(text, grid, paths).read()


@dataclasses.dataclass(slots=True)
class _Found:
    """A line that was reached: how often it runs, and what it is."""

    line: Line
    instruction: Instruction
    home: str
    executions: int
    calls: tuple[Call, ...]


class _Reader:
    def __init__(self, text: str, grid: Grid, paths: Sequence[str]) -> None:
        self.module: Module = split(text)
        self.frames = Frames(text)
        self.grid = grid
        self.paths = paths
        self.seen: dict[int, Line] = {}
        self.found: list[_Found] = []
        self.trouble: dict[int, str] = {}
        self.loops: dict[str, None] = {}
        self.branching: dict[str, None] = {}
        self.idle = 0
        self.active = _active(self.module)

    def read(self) -> Program:
        if self.module.entry is not None:
            self.walk(self.module.entry, 1, (), ())
        collectives, repeated = [], 0
        for group in _operations(self.found):
            best = min(group, key=lambda found: found.executions)
            repeated += len({found.line.number for found in group}) - 1
            made = self.collective(best)
            if made is not None:
                collectives.append(made)
        for line in self.unreached():
            self.seen[line.number] = line
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
        """Follows everything that a computation calls."""
        if computation in above:
            self.loops[f"{computation} calls itself; its inner calls are left out"] = (
                None
            )
            return
        above = (*above, computation)
        for line in self.active[computation]:
            instruction = _read_alone(line.text)
            if instruction is None:
                self.seen[line.number] = line
                self.trouble[line.number] = f"cannot be read: {_short(line.text)}"
                continue
            if _communicates(line.text, instruction):
                self.seen[line.number] = line
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
        names = [
            name
            for key, written in _REFERENCE.findall(instruction.attributes)
            if key != "control_predecessors"
            for name in re.findall(r"%([\w.\-]+)", written)
            if name in self.active
        ]
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
        elif opcode == "recv" and _rendezvous(instruction) in self.sent:
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
        return {
            found[1]
            for line in self.lines()
            if " send(" in line.text and (found := _RENDEZVOUS.search(line.text))
        }

    def lines(self) -> Iterator[Line]:
        for lines in self.module.computations.values():
            yield from lines
        yield from self.module.loose

    def unreached(self) -> Iterator[Line]:
        for line in self.lines():
            if line.number not in self.seen and _may_communicate(line.text):
                instruction = _read_alone(line.text)
                if instruction is None or _communicates(line.text, instruction):
                    yield line

    def collective(self, found: _Found) -> Collective | None:
        """The record of one operation; None, and a reason kept, where it has none."""
        if found.instruction.opcode == "send":
            made = self.between_slices(found)
        else:
            made = self.within(found)
        if isinstance(made, str):
            at = found.line
            self.trouble[at.number] = f"{made}: {_short(at.text)}"
            return None
        return made

    def within(self, found: _Found) -> Collective | str | None:
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
            return None
        if kind == "all-reduce" and self.scatters(found.home):
            kind = "reduce-scatter"
        elif kind == "reduce-scatter":
            arrays = _widened(arrays, groups.shape[1])
        crosses = self.grid.crosses(groups)
        return self.record(found, kind, axes, arrays, groups.shape[1], crosses)

    def between_slices(self, found: _Found) -> Collective | str:
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
    ) -> Collective:
        size = sum(array.bytes for array in arrays)
        path, source = self.whence(found)
        return Collective(
            kind=kind,
            axes=axes,
            bytes=size,
            wire_bytes=wire_bytes(kind, size, members),
            executions=found.executions,
            dtype=arrays[0].dtype,
            shape=arrays[0].shape,
            path=path,
            source=source,
            over_dcn=over_dcn,
        )

    def whence(self, found: _Found) -> tuple[str | None, str | None]:
        """The leaf that is moved, and the line that the operation comes from."""
        own = found.instruction
        came = origin(self.module, found.home, own, found.calls)
        at = came.argument
        if at is None:
            name = _OP_NAME.search(own.attributes)
            at = None if name is None else self.arguments.get(name[1])
        path = self.paths[at] if at is not None and at < len(self.paths) else None
        for attributes in (own.attributes, *came.attributes):
            source = self.frames.source(attributes)
            if source is not None:
                return path, source
        return path, None

    @functools.cached_property
    def arguments(self) -> dict[str, int]:
        """What the program calls an argument → its position, where one has the name."""
        found: dict[str, list[int]] = collections.defaultdict(list)
        entry = self.module.entry or ""
        for line in self.module.computations.get(entry, []):
            number = self.module.parameter_number(entry, line.name or "")
            name = _OP_NAME.search(line.text)
            if number is not None and name is not None:
                found[name[1]].append(number)
        return {name: at[0] for name, at in found.items() if len(at) == 1}

    def scatters(self, home: str) -> bool:
        """Whether a fusion is a reduce-scatter: an all-reduce that keeps a slice."""
        return home.startswith("all-reduce-scatter") and any(
            "dynamic-slice(" in line.text for line in self.module.computations[home]
        )


def wire_bytes(kind: Kind, size: int, members: int) -> int:
    """What one device sends, on a ring: `size` as `Collective.bytes` says."""
    if kind == "collective-permute" or members < 1:
        return size
    if kind == "all-reduce":
        return 2 * size * (members - 1) // members
    return size * (members - 1) // members


def _operations(found: Iterable[_Found]) -> Iterable[list[_Found]]:
    """Lines that are one operation, together.

    A gather that runs beside other work is written into each of the fusions that it
    runs beside, with one chain of its own. All else is an operation by itself.
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


def _active(module: Module) -> dict[str, list[Line]]:
    """Computations that communicate or call one that does → the lines that matter."""
    names = set(module.computations)
    calls: dict[str, dict[int, set[str]]] = {}
    own: dict[str, set[int]] = {}
    callers: dict[str, set[str]] = collections.defaultdict(set)
    for name, lines in module.computations.items():
        own[name] = {line.number for line in lines if _may_communicate(line.text)}
        calls[name] = {}
        for line in lines:
            if "=%" in line.text or "={%" in line.text:
                targets = {
                    target
                    for _, written in _REFERENCE.findall(line.text)
                    for target in re.findall(r"%([\w.\-]+)", written)
                } & names
                if targets:
                    calls[name][line.number] = targets
                for target in targets:
                    callers[target].add(name)
    active: set[str] = set()
    waiting = [name for name, numbers in own.items() if numbers]
    while waiting:
        name = waiting.pop()
        if name not in active:
            active.add(name)
            waiting += callers[name]
    if module.entry is not None:
        active.add(module.entry)
    return {
        name: [
            line
            for line in module.computations[name]
            if line.number in own[name] or calls[name].get(line.number, set()) & active
        ]
        for name in active
    }


def _read_alone(text: str) -> Instruction | None:
    """Reads a line; None where another operation that communicates is on it too."""
    instruction = read_line(text)
    if instruction is None:
        return None
    # A quote that does not end may hide anything.
    whole = text.count('"') % 2 == 0
    named = _COMMUNICATES.findall(_QUOTED.sub('""', text) if whole else text)
    own = _COMMUNICATES.match(f" {instruction.opcode}(") is not None
    return instruction if len(named) <= own else None


def _may_communicate(text: str) -> bool:
    patterns = (_COMMUNICATES, _CALLS_OUT, _GROUPED)
    return any(pattern.search(text) for pattern in patterns)


def _communicates(text: str, instruction: Instruction) -> bool:
    """Whether a line that was read is one that moves data between devices."""
    opcode = instruction.opcode
    if opcode == "custom-call":
        return bool(_CALLS_OUT.search(text))
    named = _COMMUNICATES.match(f" {opcode}(")
    return bool(named or _GROUPED.search(instruction.attributes))


def _payload(kind: Kind, instruction: Instruction) -> list[Array]:
    """What a collective moves: its result, less the context of what is only started."""
    parts: Type = instruction.type
    starts = instruction.opcode.endswith("-start")
    if starts and kind != "all-reduce" and isinstance(parts, tuple):
        # Operand, result, context.
        return arrays_of(parts[1]) if len(parts) > 1 else []
    return arrays_of(parts)


def _widened(arrays: list[Array], times: int) -> list[Array]:
    return [dataclasses.replace(array, bytes=array.bytes * times) for array in arrays]


def _rendezvous(instruction: Instruction) -> str | None:
    found = _RENDEZVOUS.search(instruction.attributes)
    return found[1] if found else None


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 160 else f"{text[:159]}…"
