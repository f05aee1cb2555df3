"""Read the collectives from the text of a compiled program.

Every line that communicates is handled in one of three ways: it is read, it repeats an
operation that was read (the TPU compiler writes an asynchronous gather into several
fusions), or it is listed as unread. No line is dropped.

A collective runs over the axes along which the coordinates in its groups differ.
`replica_groups` has four forms: lists, an iota with a transposition, a mesh with
anonymous axes, and such a mesh over other device ids.
"""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from flax_layoutmap.pod._flops import trips
from flax_layoutmap.pod._hlo_text import (
    Array,
    Instruction,
    Line,
    Module,
    arrays_of,
    called_by,
    split,
)
from flax_layoutmap.pod._hlo_values import Call, Sources
from flax_layoutmap.pod._report_text import KINDS, Collective, Kind

_KINDS: dict[str, Kind] = {
    **{kind: kind for kind in KINDS},
    # Written by `merge` for an all-reduce of which every device keeps its part.
    "all-reduce-scatter": "reduce-scatter",
    "ragged-all-to-all": "all-to-all",
}
# Transfers between slices, by their name in the runtime.
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


# ------------------------------------------------------------------------------ groups

_IOTA = re.compile(
    r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?(?!T\()"
)
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"
    r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?\s*\{([^}]*)\}"
)
_LISTS = re.compile(r"replica_groups=\{((?:\{[\d, ]*\},?\s*)*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?\s*)*)\}")
_MESH_AXIS = re.compile(r"'([^']+)'=(\d+)")
# `'a'`, or a part of the axis: `'a':(2)4` has size 4, after a factor of 2.
_PICKED_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


class _Unread(Exception):
    """An operation cannot be read; the text says why."""


class Grid:
    """The mesh, with devices numbered as in a compiled program.

    The first axes go over the slices. The `partitions` of a program for several slices
    may be the devices of a single slice.
    """

    def __init__(
        self, names: Sequence[str], sizes: Sequence[int], slices: int, partitions: int
    ) -> None:
        self.names, self.slices, self.partitions = names, slices, partitions
        count = math.prod(sizes)
        firsts = np.arange(slices) * (count // slices)
        self._firsts = np.unravel_index(firsts, sizes)
        # For each id in the program: its slice and its coordinates.
        places = np.arange(min(partitions, count))
        self._slice_of = places * slices // count
        self._coordinates = np.unravel_index(places, sizes)

    def axes(self, groups: np.ndarray) -> tuple[str, ...]:
        """The axes along which the members of a group differ."""
        if groups.size and groups.max() >= len(self._slice_of):
            raise _Unread("its groups are not of this mesh")
        coordinates = zip(self.names, self._coordinates, strict=True)
        return tuple(name for name, each in coordinates if _differ(each[groups]))

    def crosses(self, groups: np.ndarray) -> bool:
        """Whether a group has members on different slices."""
        return _differ(self._slice_of[groups])

    def axes_between_slices(self) -> tuple[str, ...]:
        """The axes along which the slice changes."""
        firsts = zip(self.names, self._firsts, strict=True)
        return tuple(name for name, each in firsts if _differ(each[None]))


def _differ(groups: np.ndarray) -> bool:
    return bool((groups != groups[:, :1]).any())


def groups_of(attributes: str, partitions: int) -> np.ndarray | None:
    """The groups of a collective, one per row; None if they cannot be read."""
    try:
        if iota := _IOTA.search(attributes):
            return _ids(*iota.group(2, 3)).reshape(_numbers(iota[1]))
        if mesh := _MESH.search(attributes):
            return _of_mesh(*mesh.groups())
        if lists := _LISTS.search(attributes):
            rows = [_numbers(row) for row in re.findall(r"\{([^}]*)\}", lists[1])]
            # An empty list means all devices.
            return np.array(rows or [range(partitions)], dtype=np.int64)
    except (KeyError, ValueError):  # an unknown axis; sizes that do not fit
        pass
    return None


def pairs_of(attributes: str) -> np.ndarray | None:
    """Source and target of a permute, a row for each pair that moves data."""
    written = _PAIRS.search(attributes)
    if written is None:
        return None
    pairs = np.array(_numbers(written[1]), dtype=np.int64).reshape(-1, 2)
    return pairs[pairs[:, 0] != pairs[:, 1]]


def _numbers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


def _ids(shape: str, order: str | None) -> np.ndarray:
    """Devices `[2,4]` numbered row by row, then transposed by `T(1,0)`."""
    dims = _numbers(shape)
    ids = np.arange(math.prod(dims)).reshape(dims)
    return (ids if order is None else ids.transpose(_numbers(order))).reshape(-1)


def _of_mesh(
    written: str, shape: str | None, order: str | None, names: str
) -> np.ndarray:
    axes = {name: int(size) for name, size in _MESH_AXIS.findall(written)}
    ids = _ids(shape or str(math.prod(axes.values())), order)
    # Axes are split where their parts begin or end.
    sizes: list[int] = []
    picked: list[int] = []
    parts = collections.defaultdict(list)
    for name, before, size in _PICKED_AXIS.findall(names):
        start, whole = int(before or 1), axes[name]
        parts[name].append(range(start, start * int(size or whole)))
    for name, whole in axes.items():
        ends = (end for part in parts[name] for end in (part.start, part.stop))
        cuts = {1, whole, *ends}
        for start, end in itertools.pairwise(sorted(cuts)):
            if any(start in part for part in parts[name]):
                picked.append(len(sizes))
            sizes.append(end // start)
    rest = [at for at in range(len(sizes)) if at not in picked]
    width = math.prod(sizes[at] for at in picked)
    return ids.reshape(sizes).transpose(rest + picked).reshape(-1, width)


# -------------------------------------------------------------------------- collectives


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """The communication of a compiled program."""

    collectives: tuple[Collective, ...]  # for each operation and call
    unread: tuple[str, ...]  # lines that could not be read, loops of unknown length
    notes: tuple[str, ...]  # warnings about the counts


def read_program(
    program: str | Module,
    sizes: Mapping[str, int],
    *,
    slices: int = 1,
    paths: Sequence[str] = (),
    results: Mapping[int, str] | None = None,
    parameters: Collection[int] = (),
    new_parameters: Collection[int] = (),
) -> Program:
    """Read the collectives of a compiled program, by mesh axis.

    Args:
        program: the text of `compiled.as_text()`, or a dump of the optimised program.
        sizes: name of each mesh axis → its size.
        slices: number of slices, over which the first axes go.
        paths: path of each argument.
        results: result → path of the leaf that it updates; earlier entries win.
        parameters: the arguments that are parameters.
        new_parameters: the results that are new parameters.
    """
    module = split(program) if isinstance(program, str) else program
    shape = tuple(sizes.values())
    grid = Grid(tuple(sizes), shape, slices, module.partitions or math.prod(shape))
    sources = Sources(module, paths, results or {}, parameters, new_parameters)
    return _Reader(module, grid, sources).read()


@dataclasses.dataclass(frozen=True, slots=True)
class _Site:
    """A line that communicates, in one call of its computation."""

    line: Line
    op: Instruction
    home: str
    executions: int
    calls: tuple[Call, ...]


@dataclasses.dataclass(slots=True)
class _Reader:
    module: Module
    grid: Grid
    sources: Sources
    active: dict[str, list[Line]] = dataclasses.field(default_factory=dict)
    seen: set[Line] = dataclasses.field(default_factory=set)
    # For each operation, the line that runs least often.
    sites: dict[object, _Site] = dataclasses.field(default_factory=dict)
    trouble: dict[object, str] = dataclasses.field(default_factory=dict)
    branching: dict[str, None] = dataclasses.field(default_factory=dict)

    def read(self) -> Program:
        self.walk(self.module.entry, 1, ())
        collectives: list[Collective] = []
        for site in self.sites.values():
            try:
                collectives += self.records(site)
            except _Unread as why:
                self.fails(site.line, str(why))
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
        """The lines of a computation that communicate, directly or in a call."""
        if home not in self.active:
            self.active[home] = [
                line
                for line in self.module.computations.get(home, ())
                if line.communicates or any(map(self.lines_of, called_by(line.text)))
            ]
        return self.active[home]

    def walk(self, home: str, executions: int, calls: tuple[Call, ...]) -> None:
        """Visit a computation and the computations that it calls."""
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
        """Keep a line that communicates, unless it ends an operation begun before."""
        opcode, between_slices = site.op.opcode, _TRANSFER.search(site.line.text)
        if _END.search(opcode) or opcode == "recv" and between_slices:
            return
        if opcode.removesuffix("-start") in _KINDS or between_slices:
            self.keep(site)
        else:
            self.fails(site.line, "unknown form")

    def keep(self, site: _Site) -> None:
        """Keep a line, merged with other lines of the same operation.

        An asynchronous gather is in each of the fusions that it overlaps with, with the
        same chain id.
        """
        attributes = site.op.attributes
        chain, channel = _CHAIN.search(attributes), _CHANNEL.search(attributes)
        key: object = len(self.sites)
        if chain and channel:
            key = (site.op.opcode, chain[1], channel[1])
        if site.executions < self.sites.setdefault(key, site).executions:
            self.sites[key] = site

    def within(self, site: _Site) -> tuple[Kind, list[Array], np.ndarray]:
        """Kind, arrays and groups of an operation within a slice."""
        op = site.op
        opcode = op.opcode.removesuffix("-start")
        kind, parts = _KINDS[opcode], op.type
        if opcode != op.opcode and kind != "all-reduce" and isinstance(parts, tuple):
            parts = parts[1]  # the result, of (operand, result, context)
        if kind == "collective-permute":
            groups = pairs_of(op.attributes)
        else:
            groups = groups_of(op.attributes, self.grid.partitions)
        if groups is None:
            raise _Unread("its groups cannot be read")
        arrays = arrays_of(parts)
        if kind == "all-reduce" and self.scatters(site.home):
            kind = "reduce-scatter"
        elif opcode == "reduce-scatter":
            arrays = _widened(arrays, groups.shape[1])
        return kind, arrays, groups

    def between_slices(self, site: _Site) -> tuple[Kind, list[Array]]:
        """Kind and arrays of a transfer to another slice."""
        transfer = _TRANSFER.search(site.line.text)
        sent_as = transfer[1] if transfer else ""
        if sent_as not in _BETWEEN_SLICES:
            raise _Unread(f"unknown transfer {sent_as!r}")
        # Token and context follow the arrays.
        kind, parts = _BETWEEN_SLICES[sent_as], site.op.type
        arrays = arrays_of(parts[0]) if isinstance(parts, tuple) and parts else []
        return kind, _widened(arrays, self.grid.slices if kind == "all-gather" else 1)

    def records(self, site: _Site) -> Iterator[Collective]:
        """A record for each leaf that an operation moves, usually a single leaf."""
        if site.op.opcode == "send":
            kind, arrays = self.between_slices(site)
            axes, members = self.grid.axes_between_slices(), self.grid.slices
            over_dcn = True
        else:
            kind, arrays, groups = self.within(site)
            axes, members = self.grid.axes(groups), groups.shape[1]
            over_dcn = self.grid.crosses(groups)
        if not arrays:
            raise _Unread("its type cannot be read")
        if not axes and not over_dcn:
            return  # each device is alone in its group
        paths, source = self.sources(site.home, site.op, site.calls)
        parts = {paths[0]: arrays}
        if len(paths) == len(arrays):
            parts = collections.defaultdict(list)
            for path, array in zip(paths, arrays, strict=True):
                parts[path].append(array)
        for leaves, moved in parts.items():
            size = sum(array.bytes for array in moved)
            yield Collective(
                kind=kind,
                axes=axes,
                bytes=size,
                wire_bytes=wire_bytes(kind, size, members),
                executions=site.executions,
                dtype=moved[0].dtype,
                shape=moved[0].shape,
                path=leaves[0] if leaves else None,
                joined=leaves[1:],
                source=source,
                over_dcn=over_dcn,
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
