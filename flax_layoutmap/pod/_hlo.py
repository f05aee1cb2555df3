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
from collections.abc import Collection, Iterable, Mapping, Sequence

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
    """The communication of a compiled program.

    Attributes:
        collectives: one for each operation and call of its computation; several if it
            was merged from operations of several leaves.
        unread: lines that could not be read, and loops of unknown length.
        notes: warnings about the counts.
    """

    collectives: tuple[Collective, ...]
    unread: tuple[str, ...]
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
    # A program for several slices counts the places of one of them.
    grid = Grid(tuple(names), sizes, slices, module.partitions or math.prod(sizes))
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
        self.active = active(module)

    def read(self) -> Program:
        if self.module.entry is not None:
            self.walk(self.module.entry, 1, ())
        collectives: list[Collective] = []
        for group in _operations(self.found):
            collectives += self.collective(min(group, key=lambda f: f.executions))
        for lines in self.module.computations.values():
            for line in lines:
                if line.number not in self.seen and may_communicate(line.text):
                    op = line.instruction
                    if op is None or communicates(line.text, op):
                        self.fails(line, "not reached")
        notes: tuple[str, ...] = ()
        if self.branching:
            names = ", ".join(self.branching)
            notes = (f"each device takes one branch of {names}; all are counted",)
        unread = (*self.loops, *(self.trouble[at] for at in sorted(self.trouble)))
        return Program(tuple(collectives), unread, notes)

    def fails(self, line: Line, why: str) -> None:
        text = " ".join(line.text.split())
        text = text if len(text) <= 160 else f"{text[:159]}…"
        self.trouble[line.number] = f"{why}: {text}"

    def walk(self, home: str, executions: int, calls: tuple[Call, ...]) -> None:
        """Visit a computation and those that it calls."""
        for line in self.active[home]:
            op = line.instruction
            self.seen.add(line.number)
            if op is None:
                self.fails(line, "cannot be read")
                continue
            if communicates(line.text, op):
                self.visit(_Found(line, op, home, executions, calls))
            times = executions
            if op.opcode == "while":
                times *= self.trips_of(home, op)
            elif _END.search(op.opcode):
                continue
            called = [name for name in called_by(op.attributes) if name in self.active]
            if op.opcode == "conditional" and called:
                self.branching[op.name] = None
            for name in called:
                self.walk(name, times, (*calls, (home, op)))

    def trips_of(self, home: str, op: Instruction) -> int:
        count = trips(self.module, home, op)
        if count is None:
            why = "how often it runs is not in the program; counted once"
            self.loops[f"loop {op.name}: {why}"] = None
        return 1 if count is None else count

    def visit(self, found: _Found) -> None:
        line, op = found.line, found.instruction
        opcode = op.opcode
        if _END.search(opcode):
            if (found.home, *op.operands[:1]) not in self.module.by_name:
                self.fails(line, "its start is not there")
        elif opcode == "recv" and rendezvous(op.attributes) in self.sent:
            pass
        elif opcode == "recv" and _TRANSFER.search(line.text):
            self.fails(line, "its send is not there")
        elif opcode == "send" and _TRANSFER.search(line.text):
            self.found.append(found)
        elif opcode.removesuffix("-start") in _KINDS:
            self.found.append(found)
        else:
            self.fails(line, "unknown form")

    @functools.cached_property
    def sent(self) -> set[str | None]:
        """Names under which something is sent to another slice."""
        return {name for _, name in self.module.sends} - {None}

    def collective(self, found: _Found) -> list[Collective]:
        """The records of one operation; else the reason is in `trouble`."""
        if found.instruction.opcode == "send":
            made = self.between_slices(found)
        else:
            made = self.within(found)
        if isinstance(made, str):
            self.fails(found.line, made)
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
        if not axes:  # each device is alone in its group
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
