"""Estimate the report of a lowered step with Shardy's passes, for any rules."""

import dataclasses
import functools
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import AxisType

from flax_layoutmap._core.axes import dim_axes
from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._core.topologies import Topology
from flax_layoutmap._resolve.resolve import rule_set_of
from flax_layoutmap._rules.records import show_shape, show_spec
from flax_layoutmap._rules.rules import RuleSet
from flax_layoutmap._show.table import human_bytes
from flax_layoutmap.pod._hlo import wire_bytes
from flax_layoutmap.pod._lowered import Lowered
from flax_layoutmap.pod._mlir import (
    Attributes,
    Dims,
    bytes_of,
    dtype_name,
    functions,
    mesh_of,
    operation_name,
    parts,
    source_line,
    spec_text,
)
from flax_layoutmap.pod._passes import Prepared, Specs
from flax_layoutmap.pod._placement import hosts_of, memory_of, placed, seconds_bound
from flax_layoutmap.pod._records import Collective, Drift, Reshard
from flax_layoutmap.pod._report import PodReport
from flax_layoutmap.pod._shardy import Found, LaidOut, read
from flax_layoutmap.pod._tpu import as_compiled


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
        # in_shardings that differ from the first rules do not count for these.
        lowered = dataclasses.replace(self.lowered, wanted={})
        other = dataclasses.replace(self, lowered=lowered)
        return other.estimate(start, specs, tuple(_traced_before(self.rules, given)))

    def estimate(
        self, start: float, specs: Specs | None = None, notes: tuple[str, ...] = ()
    ) -> PodReport:
        """The report by Shardy's passes; see `Prepared.lay_out` for the specs."""
        leaves, sizes = self.lowered.leaves, self.mesh.axis_sizes
        module = self.prepared.lay_out(specs, self.lowered.pairs)
        attributes, state = self.prepared.attributes, self.lowered.state()
        on_tpus = self.topology is not None  # as for a plan
        found = read(module, attributes, state, for_tpus=on_tpus)
        collectives = collectives_of(found, self.lowered, sizes, self.topology)
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
                *_warnings_of(found, self.lowered, self.mesh, self.topology),
            ),
            took_seconds=time.perf_counter() - start,
            replan=self.with_layout,
            values=functools.partial(_listing, module),
            paths=tuple(leaf.path for leaf in leaves),
        )


def _traced_before(first: RuleSet | None, given: RuleSet) -> Iterator[str]:
    """Warn if other rules differ in sections that the program was traced with."""
    for section in ("activations", "names"):
        before = () if first is None else getattr(first, section)
        if getattr(given, section) != before:
            yield (
                f"these rules have other {section}, which are in the program as it was "
                "traced, and have no effect here; plan again with these rules: "
                "flm.pod.plan(step, …, layout_map=layout_map)"
            )


def collectives_of(
    found: LaidOut,
    lowered: Lowered,
    sizes: Mapping[str, int],
    topology: Topology | None,
) -> tuple[Collective, ...]:
    """The records of the collectives of a program, merged ones once."""
    return tuple(
        record
        for one in found.collectives
        if not one.is_merged
        for record in _record(one, lowered, sizes, topology)
    )


def _record(
    one: Found, lowered: Lowered, sizes: Mapping[str, int], topology: Topology | None
) -> Iterator[Collective]:
    """The records of a collective, as the compiler makes it."""
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
    return as_compiled(whole, sizes, topology)


def _reshards(found: LaidOut, lowered: Lowered) -> tuple[Reshard, ...]:
    """Values that change their sharding, but for parameters gathered for use."""
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
    """Without axes of a single device."""
    return tuple(tuple(axis for axis in axes if axis[1] > 1) for axes in dims)


# Arrays in a closure below this are tables of constants.
_CLOSED_OVER = 1 << 20
# Unrolled layers from which on a scan compiles much faster.
_DEEP = 12
# State below this is not worth donating.
_UNDONATED = 1 << 20

# `layers/3/`, `layers_3/` and `Dense_3/` of Linen, `block3/`; `weights/3` of a list.
_INDEX = re.compile(r"(?<=[A-Za-z_./-])\d+(?=/|$)")


def _warnings_of(
    found: LaidOut, lowered: Lowered, mesh: DeviceMesh, topology: Topology | None
) -> Iterator[str]:
    """The warnings of the report."""
    yield from lowered.notes
    if topology is not None:
        trouble = placed(mesh.axis_names, mesh.shape, topology).trouble
        if trouble:
            yield trouble
    yield from _unsharded(found, mesh)
    yield from _overruled(found, lowered, mesh)
    yield from _closed_over(lowered)
    yield from _undonated(found, lowered)
    for what in found.more_flops:
        yield f"matrix products that are not all counted: {what}"
    if found.branching:
        count = found.branching
        which = "a conditional" if count == 1 else f"{count} conditionals"
        yield f"each device takes one branch of {which}; all branches are counted"
    layers = _layers(found, lowered)
    if layers > _DEEP:
        yield (
            f"{layers} unrolled layers in the program, "
            f"{found.operations} operations: with nnx.scan the compiler takes a half "
            "to a quarter of the time, and a fifth of the memory"
        )


def _unsharded(found: LaidOut, mesh: DeviceMesh) -> Iterator[str]:
    values = found.arguments
    if mesh.size == 1 or not values or found.collectives:
        return
    if not any(parts(axes) > 1 for value in values for axes in value.dims):
        yield (
            f"no argument is sharded over {mesh}, so that every device does the whole "
            "step; pass layout_map=layout_map, or arguments with shardings"
        )


def _overruled(found: LaidOut, lowered: Lowered, mesh: DeviceMesh) -> Iterator[str]:
    """Arguments whose in_shardings of jax.jit differ from the rules."""
    gone = []
    for at, spec in lowered.wanted.items():
        value = found.arguments[at]
        entries = [dim_axes(entry) for entry in spec]
        entries += [()] * (len(value.dims) - len(entries))
        wanted = [
            [a for a in axes if mesh.axis_sizes.get(a, 1) > 1] for axes in entries
        ]
        own = [[name for name, size in axes if size > 1] for axes in value.dims]
        if own != wanted:
            where = lowered.leaves[at].path, spec_text(value.dims), show_spec(spec)
            gone.append(where)
    if gone:
        path, own, spec = gone[0]
        yield (
            f"{lowered.name} has in_shardings of its own, which count here and not the "
            f"rules: {_leaves(gone)}, such as {path}, which is {own}, and {spec} by "
            "the rules; a call would refuse arrays with the shardings of the rules"
        )


def _closed_over(lowered: Lowered) -> Iterator[str]:
    large = [one for one in lowered.constants if one[1] >= _CLOSED_OVER]
    if large:
        shapes = ", ".join(show_shape(shape) for shape, _ in large[:4])
        size = human_bytes(sum(size for _, size in large))
        arrays = "1 array" if len(large) == 1 else f"{len(large)} arrays"
        yield (
            f"{lowered.name} closes over {arrays} ({shapes}; {size}): constants of the "
            "program, which every device holds in full; pass them as arguments"
        )


def _undonated(found: LaidOut, lowered: Lowered) -> Iterator[str]:
    kept = [
        at
        for at in lowered.updates.values()
        if not lowered.leaves[at].is_donated and lowered.leaves[at].role != "data"
    ]
    size = sum(found.arguments[at].local_bytes for at in kept)
    if size >= _UNDONATED:
        yield (
            f"{_leaves(kept)} of state, such as {lowered.leaves[kept[0]].path}, "
            f"{'is' if len(kept) == 1 else 'are'} not donated: old and new are held at "
            f"the same time, {human_bytes(size)} more per device; use donate_argnames"
        )


def _leaves(some: Sequence[object]) -> str:
    return "1 leaf" if len(some) == 1 else f"{len(some)} leaves"


def _layers(found: LaidOut, lowered: Lowered) -> int:
    """The number of equal layers, by the indices in the paths of parameters."""
    indices: dict[Any, set[str]] = {}
    for leaf, value in zip(lowered.leaves, found.arguments, strict=True):
        if leaf.role == "parameter":
            for index in _INDEX.finditer(leaf.path):
                place = leaf.path[: index.start()] + leaf.path[index.end() :]
                indices.setdefault((place, value.shape), set()).add(index[0])
    return max(map(len, indices.values()), default=0)


def _listing(module: Any, pattern: str) -> list[tuple[str, str, str]]:
    """Operation and source, type and spec of each value; equal ones once."""
    attributes = Attributes(mesh_of(module)[1])
    found: dict[tuple[str, str, str], None] = {}
    for op in _operations(functions(module).values()):
        location = attributes.location(op)
        name = operation_name(location) or op.name.rpartition(".")[2]
        text = f"{name} {source_line(location) or ''}".strip()
        if re.search(pattern, text):
            for result, dims in zip(op.results, attributes.per_value(op), strict=False):
                shape, element = attributes.type_of(result)
                sizes = ",".join(map(str, shape))
                kind = f"{dtype_name(element)}[{sizes}]"
                found[text, kind, spec_text(dims)] = None
    return list(found)


def _operations(ops: Iterable[Any]) -> Iterator[Any]:
    """All operations in the regions of some, in order, each before those in it."""
    for outer in ops:
        for region in outer.operation.regions:
            for block in region.blocks:
                for op in block.operations:
                    yield op.operation
                    yield from _operations([op])
