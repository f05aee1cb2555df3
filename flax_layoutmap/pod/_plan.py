"""plan: what a step does on a mesh of any size, in about a second, without devices."""

import dataclasses
import functools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import AxisType

from flax_layoutmap._errors import LayoutError, MeshError, did_you_mean
from flax_layoutmap._mesh import DeviceMesh
from flax_layoutmap._resolve import rule_set_of
from flax_layoutmap._rules import RuleSet
from flax_layoutmap._topologies import Topology
from flax_layoutmap._topologies import topology as topology_of
from flax_layoutmap.pod._abstract_call import lower_step
from flax_layoutmap.pod._attributes import Dims
from flax_layoutmap.pod._between import within_and_between
from flax_layoutmap.pod._hlo import wire_bytes
from flax_layoutmap.pod._hosts import hosts_of
from flax_layoutmap.pod._links import seconds_bound
from flax_layoutmap.pod._listing import listing
from flax_layoutmap.pod._lookups import SHARDY_ALONE
from flax_layoutmap.pod._lowered import Lowered
from flax_layoutmap.pod._memory import memory_of
from flax_layoutmap.pod._passes import Prepared, Specs, prepare
from flax_layoutmap.pod._plan_mesh import rules_and_mesh
from flax_layoutmap.pod._precision import convert_before_moves
from flax_layoutmap.pod._records import Collective, Drift, Reshard
from flax_layoutmap.pod._report import PodReport
from flax_layoutmap.pod._shardy import read
from flax_layoutmap.pod._sources import operation_name, source_line
from flax_layoutmap.pod._spread import Found, Spread
from flax_layoutmap.pod._values import (
    bytes_of,
    dtype_name,
    parts,
    spec_text,
)
from flax_layoutmap.pod._warnings import warnings_of
from flax_layoutmap.pod._whole_sums import sum_whole

# The partitioner of XLA may gather the other operand.
_MOVED_TO_SUM = (
    "product with an operand that is moved to be sharded along the summed dim, not "
    "counted as XLA moves it"
)
_PLATFORMS = ("tpu", "cuda", "rocm", "cpu")


def plan(
    step: Any,
    *args: Any,
    mesh: Any = None,
    layout_map: Any = None,
    topology: Any = None,
    slices: int | None = None,
    donate_argnames: str | Iterable[str] = (),
    platform: str = "tpu",
    **kwargs: Any,
) -> PodReport:
    """Says which collectives a step runs on a mesh, and what it holds, in a second.

    The step is traced and lowered for a mesh without devices, and laid out by Shardy's
    own passes; nothing is compiled and nothing is allocated, whatever the size of the
    model or of the mesh. What the compiler does afterwards (its own memory, fusions,
    overlap) is not in it: `flm.pod.compile` says that.

    Args:
        step: a function, or what `flm.jit`, `jax.jit` or `nnx.jit` made of one.
        *args: its arguments: arrays, `jax.ShapeDtypeStruct`s, NNX objects with either
            (`nnx.eval_shape(make)`). State is laid out by the rules, data over the
            `batch` axes, as `flm.jit` does it.
        mesh: as a line, `"fsdp=16,tensor=4"`, or anything that `DeviceMesh` accepts;
            devices are not needed. With a topology one size may be -1. None takes that
            of the rules.
        layout_map: the rules; None takes those of a function of `flm.jit`. A function
            of `jax.jit` needs none where its arguments have shardings.
        topology: as for `flm.pod.topology`, such as `"v5p:4x4x4"`: adds the limit of
            memory, the hosts, and the least time on the links.
        slices: how many slices of it.
        donate_argnames: arguments that are given away, where `step` is a function.
        platform: `"tpu"`, `"cuda"`, `"rocm"` or `"cpu"`: what to lower for.
        **kwargs: arguments of the step by name.

    Returns:
        The report.

    Raises:
        LayoutError: the step needs real values, calls back into Python, or has no
            rules; there is no such platform; or this jaxlib lacks the passes.
        MeshError: there is no mesh, or it does not fill the topology, or its first
            axes do not go over the slices; or the topology is of another platform.
        RuleError: a rule names an axis that the mesh does not have.
        ResolveError: the arguments do not fit the rules on this mesh.

    Example:
        >>> import jax, jax.numpy as jnp, flax_layoutmap as flm
        >>> layout_map = flm.LayoutMap(batch="data")
        >>> layout_map["up"] = (None, "model")
        >>> layout_map["down"] = ("model", None)
        >>> def step(params, x):
        ...     return ((x @ params["up"]) @ params["down"]).sum()
        >>> params = {"up": jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)}
        >>> params["down"] = jax.ShapeDtypeStruct((256, 64), jnp.bfloat16)
        >>> x = jax.ShapeDtypeStruct((512, 64), jnp.bfloat16)
        >>> mesh = "data=256,model=16"
        >>> report = flm.pod.plan(step, params, x, mesh=mesh, layout_map=layout_map)
        >>> report.expect(axis="model", kinds={"all-reduce"}, small_bytes=0)
        >>> report.memory.at_rest["parameter"]
        4096
    """
    start = time.perf_counter()
    platform = "cuda" if platform == "gpu" else platform
    if platform not in _PLATFORMS:
        raise LayoutError(
            f"there is no platform {platform!r}{did_you_mean(platform, _PLATFORMS)}; "
            f"they are {', '.join(_PLATFORMS)}"
        )
    where = None if topology is None else topology_of(topology, slices=slices)
    if where is not None and platform != "tpu":
        raise MeshError(
            f"{where} is of TPUs, and platform={platform!r} is not: leave out the "
            'topology, or take platform="tpu"'
        )
    if topology is None and slices is not None:
        raise MeshError('slices of which topology? pass topology="v5p:4x4x4" too')
    rules, own = rules_and_mesh(step, args, kwargs, mesh, layout_map, where)
    lowered = lower_step(step, args, kwargs, rules, donate_argnames, platform, own)
    prepared = prepare(lowered.lowered, for_tpus=platform == "tpu")
    made = _Plan(lowered, own, where, prepared, platform, rules)
    return made.report(start)


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """A lowered step, to be laid out as often as one likes."""

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
        return other.report(start, specs, tuple(_traced_before(self.rules, given)))

    def _laid_out(self, specs: Specs | None) -> tuple[Any, Spread]:
        """The program in a layout, and what was read from it."""
        where, prepared = self.topology, self.prepared
        partitions = where is None or where.generation.name not in SHARDY_ALONE
        roles = [leaf.role for leaf in self.lowered.leaves]

        def laid_out(products: bool) -> tuple[Any, Spread]:
            module = prepared.spread(specs, self.lowered.pairs, products=products)
            for_tpus, known = self.platform == "tpu", prepared.attributes
            found = read(
                module, known, partitions=partitions, for_tpus=for_tpus, roles=roles
            )
            return module, found

        module, found = laid_out(products=False)
        if found.moved_operands or found.per_round:
            per_round = found.per_round
            module, found = laid_out(products=True)
            found.per_round = per_round
            if found.moved_to_sum:
                found.unrecognised[_MOVED_TO_SUM] += found.moved_to_sum
        return module, found

    def report(
        self, start: float, specs: Specs | None = None, notes: tuple[str, ...] = ()
    ) -> PodReport:
        """The report; see `Prepared.spread` for the specs."""
        leaves, sizes = self.lowered.leaves, self.mesh.axis_sizes
        module, found = self._laid_out(specs)
        _name_gradients(found, self.lowered)
        if self.topology is not None:
            sum_whole(found, self.topology)
            convert_before_moves(found)
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
            engine="plan",
            step=self.lowered.name,
            mesh=self.mesh,
            topology=self.topology,
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


# ------------------------------------------------------------------------ records


def _name_gradients(found: Spread, lowered: Lowered) -> None:
    """Gives the sums of gradients the paths of their parameters."""
    order = {"parameter": 0, "optimizer": 1}
    pairs = sorted(
        lowered.pairs.items(),
        key=lambda pair: order.get(lowered.leaves[pair[1]].role, 2),
    )
    seen: dict[Any, int] = {}
    for result, argument in pairs:
        if lowered.leaves[argument].role not in order:
            continue
        for value in found.gradients_of(result, seen):
            for at in value.sums or (() if value.index is None else (value.index,)):
                one = found.collectives[at]
                if one.leaf is None:
                    one.leaf = argument
    found.name_updates({value: lowered.pairs[at] for value, at in seen.items()})


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
    leaves = one.made_of if one.leaf is None else (one.leaf,)
    paths = tuple(lowered.leaves[at].path for at in leaves)
    whole = Collective(
        kind=one.kind,
        axes=tuple(axis for axis in sizes if axis in {name for name, _ in one.axes}),
        bytes=size,
        wire_bytes=wire_bytes(one.kind, size, parts(one.axes)),
        executions=one.executions,
        dtype=dtype_name(one.element),
        shape=one.shape,
        path=paths[0] if paths else None,
        joined=paths[1:],
        source=source_line(one.location),
    )
    if topology is None:
        return iter((whole,))
    return within_and_between(whole, one, sizes, topology)


def _reshards(found: Spread, lowered: Lowered) -> tuple[Reshard, ...]:
    """What changes its sharding, without parameters that are gathered to be used."""
    records = []
    for move in found.moves.values():
        leaf = move.leaf
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
