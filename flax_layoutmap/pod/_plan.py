"""plan and compile: the report of a step on a pod slice, without devices."""

import collections
import dataclasses
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flax_layoutmap._core.errors import LayoutError, MeshError, did_you_mean
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._show.table import human_bytes
from flax_layoutmap._show.terminal import shown_progress
from flax_layoutmap.pod._ask import Answer, ask, has_libtpu
from flax_layoutmap.pod._flops import flops_of
from flax_layoutmap.pod._hlo import Program, read_program
from flax_layoutmap.pod._hlo_text import Array, Module, split
from flax_layoutmap.pod._lower import (
    MANY_BYTES,
    Leaf,
    Lowered,
    lower_step,
    rules_and_mesh,
)
from flax_layoutmap.pod._partitioner import code_of, code_to_partition, merge
from flax_layoutmap.pod._report import PodReport
from flax_layoutmap.pod._report_text import Collective, Engine, Memory, axes_text
from flax_layoutmap.pod._topologies import (
    Topology,
    split_over_slices,
    topology_or_none,
)

_ENGINES = ("libtpu", "partitioner")
_ROLES = ("parameter", "optimizer", "data", "other")


def plan(
    step: Any,
    *args: Any,
    mesh: Any = None,
    layout_map: Any = None,
    topology: Any = None,
    slices: int | None = None,
    donate_argnames: str | Iterable[str] = (),
    engine: Engine | None = None,
    timeout: float = 600.0,
    compiler_options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> PodReport:
    """Plan the collectives and memory of a step on a mesh, in seconds.

    The step is traced and lowered for a mesh without devices. Another process then runs
    libtpu, which compiles it as for the slice, or XLA's partitioner, which is part of
    jaxlib. No arrays are allocated, whatever the size of the model or the mesh. The
    partitioner's figures are within 25 % of libtpu's for most axes, and leave out the
    memory that the compiler needs besides the arguments.

    Args:
        step: a function, planned as `flm.jit` runs it, or the result of `flm.jit`,
            `jax.jit` or `nnx.jit`; options of the last two are ignored.
        *args: its arguments: arrays, `jax.ShapeDtypeStruct`s, or NNX objects with
            either (`nnx.eval_shape(make)`). State is laid out by the rules, data over
            the `batch` axes.
        mesh: `"fsdp=16,tensor=4"`, or anything that `DeviceMesh` accepts; devices are
            not needed. With a topology, one size may be -1. None takes the mesh of the
            rules.
        layout_map: the rules; None takes the rules of an `flm.jit` function.
        topology: as for `flm.pod.topology`, such as `"v5p:4x4x4"`: adds the memory
            limit and the minimum time on the links.
        slices: the number of slices.
        donate_argnames: arguments that are donated, and are state.
        engine: `"libtpu"` or `"partitioner"`. None takes libtpu if it is installed and
            there is a topology. The partitioner supports up to 2,048 devices.
        timeout: seconds after which the other process is ended.
        compiler_options: options of libtpu by name, such as
            `{"xla_tpu_max_hbm_size_mib": 14000}` for a smaller memory budget.
        **kwargs: keyword arguments of the step.

    Raises:
        LayoutError: the step calls back into Python, or has no rules; or XLA or libtpu
            rejects the step, crashes, or does not finish in time.
        MeshError: the mesh does not fit on the topology.

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
        >>> mesh = "data=128,model=16"
        >>> report = flm.pod.plan(step, params, x, mesh=mesh, layout_map=layout_map)
        >>> report.expect(axis="model", kinds={"all-reduce"}, small_bytes=0)
        >>> report.memory.at_rest["parameter"]
        4096
    """
    start = time.perf_counter()
    if engine not in (None, *_ENGINES):
        raise LayoutError(
            f"there is no engine {engine!r}{did_you_mean(engine, _ENGINES)}; they are "
            f"{', '.join(_ENGINES)}"
        )
    where = topology_or_none(topology, slices)
    if engine == "libtpu" and where is None:
        raise MeshError(
            'engine="libtpu" needs the slice that it compiles for: pass '
            'topology="v5p:4x4x4"'
        )
    rules, on = rules_and_mesh(step, mesh, layout_map, where)
    if rules is None:
        raise LayoutError("plan needs rules: pass layout_map=, or a step of flm.jit")
    lowered = lower_step(step, args, kwargs, rules, donate_argnames)
    made = _Plan(lowered, on, where, timeout, compiler_options or {})
    with shown_progress(f"planning {lowered.name}"):
        if engine == "libtpu" or (where and not engine and has_libtpu()):
            report = made.by_libtpu(insists=engine is not None)
        else:
            report = made.by_partitioner()
    return dataclasses.replace(report, took_seconds=time.perf_counter() - start)


def compile(step: Any, *args: Any, topology: Any, **options: Any) -> PodReport:
    """Plan a step with libtpu: `flm.pod.plan(…, engine="libtpu")`.

    Args:
        step: as for `flm.pod.plan`.
        *args: as for `flm.pod.plan`.
        topology: the slice to compile for.
        **options: the other arguments of `flm.pod.plan`.

    Example:
        >>> import jax.numpy as jnp, flax_layoutmap as flm
        >>> flm.pod.compile(jnp.sin, 1.0, topology="v5e:3x3", mesh="data=9")
        Traceback (most recent call last):
        flax_layoutmap.errors.MeshError: there is no slice v5e:3x3; the nearest are
        v5e:2x4, v5e:4x4, v5e:2x2. A shape is in chips, short dims first, a number in
        chips; larger ones have slices=

    Plain JAX: `jax.jit(step).lower(…).compile()` with shardings over the devices of
    `jax.experimental.topologies.get_topology_desc`, in a process that libtpu may end.
    """
    return plan(step, *args, topology=topology, engine="libtpu", **options)


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """A lowered step, and where it would run."""

    lowered: Lowered
    mesh: DeviceMesh
    topology: Topology | None
    timeout: float  # seconds
    options: Mapping[str, Any]  # for libtpu's compiler

    def by_partitioner(self) -> PodReport:
        code = code_to_partition(self.lowered.program)
        sizes = self.mesh.axis_sizes
        answer = ask(code, sizes, None, timeout=self.timeout, options={})
        assert answer.program is not None
        return self.report("partitioner", answer.given, merge(answer.program))

    def by_libtpu(self, *, insists: bool) -> PodReport:
        """The report by libtpu, or else by the partitioner.

        The partitioner is used if the step does not fit, or, unless the user `insists`
        on libtpu, if libtpu fails.
        """
        assert self.topology is not None
        code, sizes = code_of(self.lowered.program), self.mesh.axis_sizes
        where: dict[str, Any] = {"timeout": self.timeout, "options": self.options}
        try:
            answer = ask(code, sizes, self.topology, **where)
        except LayoutError as error:
            if insists:
                raise
            text = f"libtpu failed, and XLA's partitioner was asked instead: {error}"
            return _warned(self.by_partitioner(), text)
        if answer.program is None:
            return _too_large(self.by_partitioner(), answer)
        report = self.report("libtpu", answer.given, split(answer.program))
        memory = dataclasses.replace(
            report.memory,
            temporary_bytes=answer.memory["temporary"],
            peak_bytes=answer.memory["allocated"],
            note="the peak is what libtpu allocates, gaps included; the runtime, other "
            "programs and host buffers come on top",
        )
        report = dataclasses.replace(report, fits=True, memory=memory)
        return _warned(report, after=answer.warnings)

    def report(self, engine: Engine, given: str, module: Module) -> PodReport:
        """The report of a program; `given` is its text before partitioning."""
        lowered, where = self.lowered, self.topology
        shards = module.parameters()
        program = self.read(module)
        memory = _memory_of(shards, lowered.leaves, where)
        flops = flops_of(module)
        compute, bound = None, {}
        if where is not None:
            compute = flops / where.generation.flops
            bound = _seconds_bound(program.collectives, self.mesh.axis_sizes, where)
        warnings = _warnings_of(lowered, shards)
        return PodReport(
            engine=engine,
            step=lowered.name,
            mesh=self.mesh,
            topology=where,
            fits=False if (memory.headroom_bytes or 0) < 0 else None,
            memory=memory,
            collectives=program.collectives,
            flops_per_device=flops,
            flops_total=flops_of(split(given)),
            compute_seconds=compute,
            seconds_bound=bound,
            unread=collections.Counter(program.unread),
            warnings=(*warnings, *program.notes),
            paths=tuple(leaf.path for leaf in lowered.leaves),
        )

    def read(self, module: Module) -> Program:
        """Read the collectives, with the paths of the step's leaves."""
        leaves, updates = self.lowered.leaves, self.lowered.updates
        parameters = {n for n, leaf in enumerate(leaves) if leaf.role == "parameter"}
        new = [r for r, at in updates.items() if at in parameters]
        # A gradient used for both counts as the parameter's, which is first.
        new_state = [r for r, at in updates.items() if leaves[at].role == "optimizer"]
        return read_program(
            module,
            self.mesh.axis_sizes,
            slices=1 if self.topology is None else self.topology.slices,
            paths=[leaf.path for leaf in leaves],
            results={r: leaves[updates[r]].path for r in (*new, *new_state)},
            parameters=parameters,
            new_parameters=new,
        )


def _memory_of(
    shards: Sequence[Array], leaves: Sequence[Leaf], topology: Topology | None
) -> Memory:
    sums: dict[str, int] = dict.fromkeys(_ROLES, 0)
    on_host = dict(sums)
    for shard, leaf in zip(shards, leaves, strict=True):
        (on_host if leaf.is_on_host else sums)[leaf.role] += shard.bytes
    return Memory(
        at_rest={role: size for role, size in sums.items() if size},
        host_at_rest={role: size for role, size in on_host.items() if size},
        limit_bytes=None if topology is None else topology.generation.hbm_limit_bytes,
        note="excludes other memory of the step, such as activations",
    )


def _seconds_bound(
    collectives: Sequence[Collective], sizes: Mapping[str, int], topology: Topology
) -> dict[str, float]:
    """Axes (`"fsdp"`, `"data+fsdp"`, `"data (DCN)"`) → minimum seconds in a step.

    Only bandwidth counts: no latency, no overlap. An axis that covers whole dims of the
    slice uses their links; other axes may use every link of a chip. Links of unknown
    bandwidth are left out.
    """
    within, _ = split_over_slices(sizes, topology)
    dims = _dims_of_axes(dict(zip(sizes, within, strict=True)), topology.shape)
    seconds: dict[str, float] = {}
    for collective in collectives:
        speed = _speed(collective, dims, topology) if collective.axes else None
        if speed:
            key = axes_text(collective)
            sent = collective.wire_bytes_per_step / speed
            seconds[key] = seconds.get(key, 0.0) + sent
    return seconds


def _dims_of_axes(
    sizes: Mapping[str, int], shape: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """The dims of a slice that each axis covers in full; all dims if it shares one."""
    every = tuple(dim for dim, size in enumerate(shape) if size > 1)
    left, dims = list(every), dict[str, tuple[int, ...]]()
    for name, size in sizes.items():
        choices = (
            some
            for count in range(len(left) + 1)
            for some in itertools.combinations(left, count)
            if math.prod(shape[dim] for dim in some) == size
        )
        dims[name] = next(choices, every)
        left = [dim for dim in left if dim not in dims[name] or dims[name] == every]
    return dims


def _speed(
    collective: Collective, dims: Mapping[str, tuple[int, ...]], topology: Topology
) -> float | None:
    """Bytes per second that a device can send for a collective."""
    generation = topology.generation
    each = generation.devices_per_chip
    if collective.over_dcn:
        dcn = generation.dcn_bytes_per_second
        return None if dcn is None else dcn / each
    if generation.link_bytes_per_second is None:
        return None
    used = {dim for axis in collective.axes for dim in dims[axis]}
    links = sum(2 if topology.wrap[dim] else 1 for dim in used)
    return links * generation.link_bytes_per_second / each


def _warned(
    report: PodReport, *before: str, after: Iterable[str] = (), **changes: Any
) -> PodReport:
    warnings = (*before, *report.warnings, *after)
    return dataclasses.replace(report, warnings=warnings, **changes)


def _warnings_of(lowered: Lowered, shards: Sequence[Array]) -> Iterator[str]:
    """The warnings about arguments; a device holds their `shards`."""
    yield from lowered.notes
    leaves = lowered.leaves
    kept = [at for at in lowered.updates.values() if not leaves[at].is_donated]
    kept = [at for at in kept if leaves[at].role != "data"]
    held = sum(shards[at].bytes for at in kept)
    if held >= MANY_BYTES:
        yield (
            f"state that is not donated, such as {leaves[kept[0]].path}: where the "
            "results are its new values, old and new are held at the same time, "
            f"{human_bytes(held)} more per device; use donate_argnames"
        )


def _too_large(report: PodReport, answer: Answer) -> PodReport:
    assert answer.too_large is not None
    needed, there = answer.too_large
    memory = dataclasses.replace(
        report.memory,
        peak_bytes=needed,
        limit_bytes=there,
        note="libtpu's figures: arguments, results and temporaries together",
    )
    problem = (
        f"does not fit: the step needs {human_bytes(needed)} on a device, and libtpu "
        f"allows {human_bytes(there)} ({human_bytes(needed - there)} too much); shard "
        "more, take a smaller batch per device, or rematerialise. The collectives are "
        "those of XLA's partitioner"
    )
    given: dict[str, Any] = {"after": answer.warnings, "fits": False, "memory": memory}
    return _warned(report, problem, **given)
