"""The report of a lowered step: by XLA's partitioner, or an estimate by Shardy."""

import collections
import dataclasses
import functools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import AxisType

from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._core.topologies import Topology
from flax_layoutmap._resolve.resolve import rule_set_of
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap.pod._findings import listing, warnings_of
from flax_layoutmap.pod._hlo import Program, wire_bytes
from flax_layoutmap.pod._links import seconds_bound
from flax_layoutmap.pod._lowered import Lowered
from flax_layoutmap.pod._memory import hosts_of, memory_of
from flax_layoutmap.pod._mlir import Dims, operation_name, source_line
from flax_layoutmap.pod._partition import NotScaled, code_to_partition, partitioning
from flax_layoutmap.pod._passes import Prepared, Specs
from flax_layoutmap.pod._records import Collective, Drift, Reshard
from flax_layoutmap.pod._report import PodReport
from flax_layoutmap.pod._shardy import read
from flax_layoutmap.pod._tpu_sums import within_and_between
from flax_layoutmap.pod._values import (
    Found,
    Spread,
    bytes_of,
    dtype_name,
    parts,
    spec_text,
)

_MOVED = (
    "activations that are moved to another layout, counted as XLA's partitioner does "
    "it; the compiler for TPUs may move them otherwise (flm.pod.compile says it)"
)
# What no partitioner sees into: a kernel of the user's, rows that the data counts.
_IN_SHARD_MAPS = ("in a shard_map, not counted", "counted as if all were sent")
_MOVES = ("all-gather", "all-to-all", "collective-permute")
# Found on the 22 steps of benchmarks/pod_steps.py: where the compiler for TPUs differs
# by more than 5 %, more than this share of what is sent over some axes is such moves.
_MUCH = 0.25
# Axes over which less than this share of all is sent are of no consequence.
_LITTLE = 0.001


@dataclasses.dataclass(frozen=True, slots=True)
class Planner:
    """A lowered step, to be laid out as often as one likes."""

    lowered: Lowered
    mesh: DeviceMesh
    topology: Topology | None
    prepared: Prepared
    platform: str = "tpu"
    rules: RuleSet | None = None

    def plan(self, start: float, timeout: float) -> PodReport:
        """The report with the collectives of XLA's partitioner.

        Args:
            start: when the plan began, by the performance counter.
            timeout: seconds after which the partitioner is ended.

        Raises:
            LayoutError: the partitioner refused the program, died, or did not finish.
        """
        if self.mesh.size == 1:
            nothing = Program((), (), 0, 0, ())
            return _with_collectives(self.estimate(start), nothing, start)
        code = code_to_partition(self.lowered.lowered, as_tpus=self.platform == "tpu")
        sizes, where, estimate = self.mesh.axis_sizes, self.topology, None
        try:
            with partitioning(
                self.lowered, code, sizes, where, timeout=timeout
            ) as program:
                estimate = self.estimate(start)
                return _with_collectives(estimate, program(), start)
        except NotScaled as why:
            what = f"the collectives are an estimate: {why}"
            estimate = estimate or self.estimate(start)
            return dataclasses.replace(
                estimate,
                unrecognised={**estimate.unrecognised, what: 1},
                took_seconds=time.perf_counter() - start,
            )

    def with_layout(self, layout_map: Any) -> PodReport:
        """The report for other rules; the program is not lowered again."""
        start = time.perf_counter()
        given = rule_set_of(layout_map, "with_layout")
        if AxisType.Explicit in self.mesh.axis_types:
            raise LayoutError(
                f"the axes of {self.mesh} are explicit: layouts are part of the types "
                "that the step was traced with; plan again with these rules: "
                "flm.pod.plan(step, …, layout_map=layout_map)"
            )
        if given.mesh is not None and given.mesh.axis_sizes != self.mesh.axis_sizes:
            raise LayoutError(
                f"the plan is for the mesh {self.mesh}, and these rules are for "
                f"{given.mesh}; plan again for another mesh: flm.pod.plan(step, …)"
            )
        given = given.on(self.mesh)
        specs = self.lowered.specs_under(given)
        # What in_shardings said instead of the first rules is of no matter now.
        lowered = dataclasses.replace(self.lowered, wanted={})
        other = dataclasses.replace(self, lowered=lowered)
        return other.estimate(start, specs, tuple(_traced_before(self.rules, given)))

    def estimate(
        self, start: float, specs: Specs | None = None, notes: tuple[str, ...] = ()
    ) -> PodReport:
        """The report by Shardy's passes; see `Prepared.spread` for the specs."""
        leaves, sizes = self.lowered.leaves, self.mesh.axis_sizes
        module = self.prepared.spread(specs, self.lowered.pairs)
        found = read(module, self.prepared.attributes)
        _name_gradients(found, self.lowered)
        collectives_ = tuple(
            record
            for one in found.collectives
            if one.into is None
            for record in _record(one, self.lowered, sizes, self.topology)
        )
        memory = memory_of(found.arguments, leaves, self.topology)
        if self.platform != "tpu":
            memory = dataclasses.replace(memory, padding_bytes=0)
        fits, compute, bound = None, None, {}
        if self.topology is not None:
            compute = found.flops / self.topology.generation.flops
            bound = seconds_bound(collectives_, sizes, self.topology)
            if (memory.headroom_bytes or 0) < 0:
                fits = False
        return PodReport(
            engine="estimate",
            step=self.lowered.name,
            mesh=self.mesh,
            topology=self.topology,
            platform=self.platform,
            fits=fits,
            memory=memory,
            collectives=collectives_,
            reshards=_reshards(found, self.lowered),
            hosts=hosts_of(found.arguments, leaves, sizes, self.topology),
            flops_per_device=found.flops,
            flops_total=found.flops_whole,
            compute_seconds=compute,
            seconds_bound=bound,
            drift=_drift(found, self.lowered),
            unrecognised={what: len(at) for what, at in found.unrecognised.items()},
            unrecognised_at=_lines(found.unrecognised),
            warnings=(
                *notes,
                *warnings_of(found, self.lowered, self.mesh, self.topology),
            ),
            took_seconds=time.perf_counter() - start,
            replan=self.with_layout,
            values=functools.partial(listing, module),
            paths=tuple(leaf.path for leaf in leaves),
        )


def _traced_before(first: RuleSet | None, given: RuleSet) -> Iterator[str]:
    """What other rules say of what was traced with the first ones."""
    for section in ("activations", "names"):
        before = () if first is None else getattr(first, section)
        if getattr(given, section) != before:
            yield (
                f"these rules have other {section}, which are in the program as it was "
                "traced, and have no effect here; plan again with these rules: "
                "flm.pod.plan(step, …, layout_map=layout_map)"
            )


# -------------------------------------------------------------------- partitioned


def _with_collectives(estimate: PodReport, program: Program, start: float) -> PodReport:
    """An estimate with the collectives of a partitioned program instead."""
    where, sizes = estimate.topology, estimate.mesh.axis_sizes
    found = _with_functions(program.collectives, estimate)
    bound = {} if where is None else seconds_bound(found, sizes, where)
    at = _moved_activations(found) if where is not None else ()
    hidden = {
        what: count
        for what, count in estimate.unrecognised.items()
        if what.endswith(_IN_SHARD_MAPS)
    }
    unread = hidden | dict(collections.Counter(program.unrecognised))
    lines = {what: estimate.unrecognised_at[what] for what in hidden}
    return dataclasses.replace(
        estimate,
        engine="plan",
        collectives=found,
        seconds_bound=bound,
        unrecognised=unread | ({_MOVED: len(at)} if at else {}),
        unrecognised_at=lines | ({_MOVED: at} if at else {}),
        took_seconds=time.perf_counter() - start,
    )


def _with_functions(
    collectives: Sequence[Collective], estimate: PodReport
) -> tuple[Collective, ...]:
    """Adds the functions to lines, where XLA leaves them out (with jax 0.8)."""
    if all(" " in (one.source or " ") for one in collectives):
        return tuple(collectives)
    operations = estimate.values("") if estimate.values else []
    lines = [text.partition(" ")[2] for text, _, _ in operations]
    named = {line.partition(" ")[0]: line for line in lines}
    return tuple(
        dataclasses.replace(one, source=named.get(one.source or "", one.source))
        for one in collectives
    )


def _moved_activations(collectives: Iterable[Collective]) -> tuple[str, ...]:
    """The lines of moves that TPUs may do otherwise; empty where they are few."""
    sent: collections.Counter[tuple[str, ...]] = collections.Counter()
    moved: collections.Counter[tuple[str, ...]] = collections.Counter()
    lines: collections.Counter[str] = collections.Counter()
    for one in collectives:
        size = one.wire_bytes_per_step
        sent[one.axes] += size
        if one.path is None and one.kind in _MOVES:
            moved[one.axes] += size
            lines[one.source or "an operation without a line"] += size
    little = sum(sent.values()) * _LITTLE
    if all(moved[axes] <= max(little, sent[axes] * _MUCH) for axes in sent):
        return ()
    return tuple(line for line, _ in lines.most_common())


# ------------------------------------------------------------------------ records


def _name_gradients(found: Spread, lowered: Lowered) -> None:
    """Gives the sums of gradients the paths of their parameters."""
    order = {"parameter": 0, "optimizer": 1}
    pairs = sorted(
        lowered.pairs.items(),
        key=lambda pair: order.get(lowered.leaves[pair[1]].role, 2),
    )
    seen: set[Any] = set()
    for result, argument in pairs:
        if lowered.leaves[argument].role not in order:
            continue
        for value in found.gradients_of(result, seen):
            for at in value.sums or (() if value.index is None else (value.index,)):
                one = found.collectives[at]
                if one.leaf is None:
                    one.leaf = argument


def _lines(unrecognised: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """The lines of the user's program, each once."""
    return {
        what: tuple(dict.fromkeys(filter(None, map(source_line, places))))
        for what, places in unrecognised.items()
    }


def _record(
    one: Found, lowered: Lowered, sizes: Mapping[str, int], topology: Topology | None
) -> Iterator[Collective]:
    """A collective; several, where it goes within slices and between them."""
    size = bytes_of(one.shape, one.element)
    whole = Collective(
        kind=one.kind,
        axes=tuple(axis for axis in sizes if axis in {name for name, _ in one.axes}),
        bytes=size,
        wire_bytes=wire_bytes(one.kind, size, parts(one.axes)),
        executions=one.executions,
        dtype=dtype_name(one.element),
        shape=one.shape,
        path=None if one.leaf is None else lowered.leaves[one.leaf].path,
        source=source_line(one.location),
    )
    if topology is None or topology.slices == 1:
        return iter((whole,))
    return within_and_between(whole, sizes, topology)


def _reshards(found: Spread, lowered: Lowered) -> tuple[Reshard, ...]:
    """What changes its sharding, without parameters that are gathered to be used."""
    records = []
    for move in found.moves.values():
        leaf = move.before.leaf
        if leaf is not None and move.gathers_only:
            if lowered.leaves[leaf].role == "parameter":
                continue
        name = operation_name(move.location) or move.before.name.rpartition(".")[2]
        records.append(
            Reshard(
                value=name,
                before=spec_text(move.before.dims),
                after=spec_text(move.after.dims),
                shape=move.after.shape,
                dtype=dtype_name(move.after.element),
                bytes=move.after.local_bytes,
                executions=move.executions,
                path=None if leaf is None else lowered.leaves[leaf].path,
                source=source_line(move.location),
            )
        )
    return tuple(sorted(records, key=lambda one: -one.bytes * one.executions))


def _drift(found: Spread, lowered: Lowered) -> tuple[Drift, ...]:
    records = []
    for result, argument in sorted(lowered.updates.items()):
        leaf = lowered.leaves[argument]
        before, after = found.arguments[argument], found.results[result]
        if leaf.role == "data" or _plain(before.dims) == _plain(after.dims):
            continue
        records.append(
            Drift(
                path=leaf.path,
                before=spec_text(before.dims),
                after=spec_text(after.dims),
            )
        )
    return tuple(records)


def _plain(dims: Dims) -> Dims:
    """Without axes of a single device, which are of no consequence."""
    return tuple(tuple(axis for axis in axes if axis[1] > 1) for axes in dims)
