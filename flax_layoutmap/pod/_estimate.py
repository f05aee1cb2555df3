"""Estimate the report of a lowered step with Shardy's passes, for any rules."""

import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping
from typing import Any

from jax.sharding import AxisType

from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._core.topologies import Topology
from flax_layoutmap._resolve.resolve import rule_set_of
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap.pod._findings import listing, warnings_of
from flax_layoutmap.pod._hlo import wire_bytes
from flax_layoutmap.pod._links import seconds_bound
from flax_layoutmap.pod._lowered import Lowered
from flax_layoutmap.pod._memory import hosts_of, memory_of
from flax_layoutmap.pod._mlir import (
    Dims,
    bytes_of,
    dtype_name,
    operation_name,
    parts,
    source_line,
    spec_text,
)
from flax_layoutmap.pod._passes import Prepared, Specs
from flax_layoutmap.pod._records import Collective, Drift, Reshard
from flax_layoutmap.pod._report import PodReport
from flax_layoutmap.pod._shardy import Found, LaidOut, read
from flax_layoutmap.pod._tpu_sums import within_and_between


@dataclasses.dataclass(frozen=True, slots=True)
class Planner:
    """A lowered step on a mesh, to be estimated under one rule set after another."""

    lowered: Lowered
    mesh: DeviceMesh
    topology: Topology | None
    prepared: Prepared
    platform: str = "tpu"
    rules: RuleSet | None = None

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
        """The report by Shardy's passes; see `Prepared.lay_out` for the specs."""
        leaves, sizes = self.lowered.leaves, self.mesh.axis_sizes
        module = self.prepared.lay_out(specs, self.lowered.pairs)
        found = read(module, self.prepared.attributes, self.lowered.state())
        collectives = tuple(
            record
            for one in found.collectives
            if not one.is_merged
            for record in _record(one, self.lowered, sizes, self.topology)
        )
        memory = memory_of(found.arguments, leaves, self.topology)
        if self.platform != "tpu":
            memory = dataclasses.replace(memory, padding_bytes=0)
        fits, compute, bound = None, None, {}
        if self.topology is not None:
            compute = found.flops / self.topology.generation.flops
            bound = seconds_bound(collectives, sizes, self.topology)
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
            collectives=collectives,
            reshards=_reshards(found, self.lowered),
            hosts=hosts_of(found.arguments, leaves, sizes, self.topology),
            flops_per_device=found.flops,
            flops_total=found.flops_whole,
            compute_seconds=compute,
            seconds_bound=bound,
            drift=_drift(found, self.lowered),
            unrecognised={what: len(at) for what, at in found.unrecognised.items()},
            unrecognised_at={
                what: tuple(dict.fromkeys(filter(None, map(source_line, places))))
                for what, places in found.unrecognised.items()
            },
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
    """Check other rules against what was traced with the first ones."""
    for section in ("activations", "names"):
        before = () if first is None else getattr(first, section)
        if getattr(given, section) != before:
            yield (
                f"these rules have other {section}, which are in the program as it was "
                "traced, and have no effect here; plan again with these rules: "
                "flm.pod.plan(step, …, layout_map=layout_map)"
            )


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
        executions=one.place.times,
        dtype=dtype_name(one.element),
        shape=one.shape,
        path=None if one.leaf is None else lowered.leaves[one.leaf].path,
        source=source_line(one.location),
    )
    if topology is None or topology.slices == 1:
        return iter((whole,))
    return within_and_between(whole, sizes, topology)


def _reshards(found: LaidOut, lowered: Lowered) -> tuple[Reshard, ...]:
    """What changes its sharding, without parameters that are gathered to be used."""
    records = []
    for move in found.moves:
        leaf = move.leaf
        if leaf is not None and move.gathers_only:
            if lowered.leaves[leaf].role == "parameter":
                continue
        name = operation_name(move.location) or move.name.rpartition(".")[2]
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


def _drift(found: LaidOut, lowered: Lowered) -> tuple[Drift, ...]:
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
