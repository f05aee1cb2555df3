"""Read the collectives from the text of a compiled program.

Every line that communicates is handled in one of three ways: it is read, it repeats an
operation that was read (the TPU compiler writes one asynchronous gather into several
fusions), or it is listed as unread. None is dropped.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from flax_layoutmap.pod._flops import trips
from flax_layoutmap.pod._hlo_groups import Grid, groups_of, pairs_of
from flax_layoutmap.pod._hlo_sources import Sources
from flax_layoutmap.pod._hlo_text import (
    Array,
    Instruction,
    Line,
    Module,
    arrays_of,
    called_by,
    rendezvous,
    split,
)
from flax_layoutmap.pod._hlo_values import Call
from flax_layoutmap.pod._records import KINDS, Collective, Kind

_KINDS: dict[str, Kind] = {
    **{kind: kind for kind in KINDS},
    # As `_merge.py` writes an all-reduce of which every device keeps its part.
    "all-reduce-scatter": "reduce-scatter",
    "ragged-all-to-all": "all-to-all",
}
# Transfers between slices, by the runtime's name.
_BETWEEN_SLICES: dict[str, Kind] = {
    **{kind.upper().replace("-", "_"): kind for kind in KINDS},
    "ONE_TO_ONE": "collective-permute",
}
_UNKNOWN = "how often it runs is not in the program; counted once"
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
    return _Reader(module, grid, sources, crossing).read()


@dataclasses.dataclass(frozen=True, slots=True)
class _Site:
    """A line that communicates, in one call of its computation."""

    line: Line
    op: Instruction
    home: str
    executions: int
    calls: tuple[Call, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Moved:
    """What an operation moves, and between which devices."""

    kind: Kind
    axes: tuple[str, ...]
    arrays: list[Array]
    members: int
    over_dcn: bool


@dataclasses.dataclass(slots=True)
class _Reader:
    module: Module
    grid: Grid
    sources: Sources
    crossing: Collection[str]
    active: dict[str, list[Line]] = dataclasses.field(default_factory=dict)
    seen: set[Line] = dataclasses.field(default_factory=set)
    # Of each operation the line that runs least often.
    sites: dict[object, _Site] = dataclasses.field(default_factory=dict)
    trouble: dict[object, str] = dataclasses.field(default_factory=dict)
    branching: dict[str, None] = dataclasses.field(default_factory=dict)

    def read(self) -> Program:
        self.walk(self.module.entry, 1, ())
        collectives: list[Collective] = []
        for site in self.sites.values():
            between = site.op.opcode == "send"
            moved = self.between_slices(site) if between else self.within(site)
            if isinstance(moved, str):
                self.fails(site.line, moved)
            elif moved.axes or between:  # else each device is alone in its group
                collectives += self.records(site, moved)
        for lines in self.module.computations.values():
            for line in lines:
                if line not in self.seen and line.communicates:
                    self.fails(line, "not reached")
        notes: tuple[str, ...] = ()
        if self.branching:
            names = ", ".join(self.branching)
            notes = (f"each device takes one branch of {names}; all are counted",)
        return Program(tuple(collectives), tuple(self.trouble.values()), notes)

    def fails(self, line: Line, why: str) -> None:
        text = " ".join(line.text.split())
        text = text if len(text) <= 160 else f"{text[:159]}…"
        self.trouble[line] = f"{why}: {text}"

    def lines_of(self, home: str) -> list[Line]:
        """The lines of a computation that communicate, or call one that does."""
        if home not in self.active:
            self.active[home] = [
                line
                for line in self.module.computations.get(home, ())
                if line.communicates or any(map(self.lines_of, called_by(line.text)))
            ]
        return self.active[home]

    def walk(self, home: str, executions: int, calls: tuple[Call, ...]) -> None:
        """Visit a computation and those that it calls."""
        for line in self.lines_of(home):
            op = line.instruction
            self.seen.add(line)
            if op is None:
                self.fails(line, "cannot be read")
                continue
            if line.communicates:
                self.visit(_Site(line, op, home, executions, calls))
            times = executions
            if op.opcode == "while":
                count = trips(self.module, home, op)
                if count is None:
                    self.trouble[op.name] = f"loop {op.name}: {_UNKNOWN}"
                times *= 1 if count is None else count
            elif _END.search(op.opcode):
                continue
            called = list(filter(self.lines_of, called_by(op.attributes)))
            if op.opcode == "conditional" and called:
                self.branching[op.name] = None
            for name in called:
                self.walk(name, times, (*calls, (home, op)))

    def visit(self, site: _Site) -> None:
        """Keep a line that communicates, unless it ends what another began."""
        op, between_slices = site.op, _TRANSFER.search(site.line.text)
        if _END.search(op.opcode):
            if (site.home, *op.operands[:1]) not in self.module.by_name:
                self.fails(site.line, "its start is not there")
        elif op.opcode == "recv" and between_slices:
            name = rendezvous(op.attributes)
            if name not in (sent for _, sent in self.module.sends):
                self.fails(site.line, "its send is not there")
        elif op.opcode.removesuffix("-start") in _KINDS or between_slices:
            self.keep(site)
        else:
            self.fails(site.line, "unknown form")

    def keep(self, site: _Site) -> None:
        """Keep a line, which is an operation, or one of several lines of one.

        An asynchronous gather is in each of the fusions that it overlaps with, with one
        chain id.
        """
        attributes = site.op.attributes
        chain, channel = _CHAIN.search(attributes), _CHANNEL.search(attributes)
        key: object = len(self.sites)
        if chain and channel:
            key = (site.op.opcode, chain[1], channel[1])
        if site.executions < self.sites.setdefault(key, site).executions:
            self.sites[key] = site

    def within(self, site: _Site) -> _Moved | str:
        """What an operation within a slice moves; else why it cannot be read."""
        op = site.op
        opcode = op.opcode.removesuffix("-start")
        kind, parts = _KINDS[opcode], op.type
        if opcode != op.opcode and kind != "all-reduce" and isinstance(parts, tuple):
            parts = parts[1]  # of operand, result, context
        arrays = arrays_of(parts)
        if not arrays:
            return "its type cannot be read"
        if kind == "collective-permute":
            groups = pairs_of(op.attributes)
        else:
            groups = groups_of(op.attributes, self.grid.partitions)
        if groups is None:
            return "its groups cannot be read"
        axes, members = self.grid.axes(groups), groups.shape[1]
        if axes is None:
            return "its groups are not of this mesh"
        if kind == "all-reduce" and self.scatters(site.home):
            kind = "reduce-scatter"
        elif opcode == "reduce-scatter":
            arrays = _widened(arrays, members)
        crosses = self.grid.crosses(groups) or not set(axes).isdisjoint(self.crossing)
        return _Moved(kind, axes, arrays, members, crosses)

    def between_slices(self, site: _Site) -> _Moved | str:
        """What is sent to another slice; else why it cannot be read."""
        transfer = _TRANSFER.search(site.line.text)
        sent_as = transfer[1] if transfer else ""
        # The token and the context follow what is sent.
        parts = site.op.type
        arrays = arrays_of(parts[0]) if isinstance(parts, tuple) and parts else []
        if sent_as not in _BETWEEN_SLICES or not arrays:
            return f"unknown transfer {sent_as!r}"
        kind, slices = _BETWEEN_SLICES[sent_as], self.grid.slices
        if kind == "all-gather":
            arrays = _widened(arrays, slices)
        return _Moved(kind, self.grid.axes_between_slices(), arrays, slices, True)

    def records(self, site: _Site, moved: _Moved) -> Iterator[Collective]:
        """One record for each leaf that the operation moves, usually one."""
        paths, source = self.sources(site.home, site.op, site.calls)
        parts = {paths[0]: moved.arrays}
        if len(paths) == len(moved.arrays):
            parts = collections.defaultdict(list)
            for path, array in zip(paths, moved.arrays, strict=True):
                parts[path].append(array)
        for leaves, arrays in parts.items():
            size = sum(array.bytes for array in arrays)
            yield Collective(
                kind=moved.kind,
                axes=moved.axes,
                bytes=size,
                wire_bytes=wire_bytes(moved.kind, size, moved.members),
                executions=site.executions,
                dtype=arrays[0].dtype,
                shape=arrays[0].shape,
                path=leaves[0] if leaves else None,
                joined=leaves[1:],
                source=source,
                over_dcn=moved.over_dcn,
            )

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


def _widened(arrays: list[Array], times: int) -> list[Array]:
    return [dataclasses.replace(array, bytes=array.bytes * times) for array in arrays]
