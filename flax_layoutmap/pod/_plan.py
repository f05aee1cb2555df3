"""plan and compile: the report of a step on a pod slice, without devices."""

import collections
import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import Any

from flax_layoutmap._core.errors import LayoutError, MeshError, did_you_mean
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._core.topologies import Topology
from flax_layoutmap._core.topologies import topology as topology_of
from flax_layoutmap._show.progress import shown_progress
from flax_layoutmap._show.table import human_bytes
from flax_layoutmap.pod._aot import (
    Compiled,
    check_libtpu,
    compile_for,
)
from flax_layoutmap.pod._estimate import Planner
from flax_layoutmap.pod._hlo import Program
from flax_layoutmap.pod._hlo_text import Frames
from flax_layoutmap.pod._lower import lower_step, rules_and_mesh
from flax_layoutmap.pod._lowered import Lowered
from flax_layoutmap.pod._partition import (
    NotScaled,
    code_of,
    code_to_partition,
    partitioning,
    read_step,
)
from flax_layoutmap.pod._passes import prepare
from flax_layoutmap.pod._placement import seconds_bound
from flax_layoutmap.pod._records import Collective, Memory
from flax_layoutmap.pod._report import PodReport

_PLATFORMS = ("tpu", "cuda", "rocm", "cpu")
_MOVED = (
    "activations that are moved to another layout, counted as XLA's partitioner does "
    "it; the compiler for TPUs may move them otherwise (see flm.pod.compile)"
)
# Ends of findings that the partitioner does not make: custom kernels in a shard_map,
# ragged collectives.
_IN_SHARD_MAPS = ("in a shard_map, not counted", "counted as if all rows were sent")
_MOVES = ("all-gather", "all-to-all", "collective-permute")
# On the 22 steps of benchmarks/pod_steps.py, where the compiler for TPUs differs by
# more than 5 %, such moves send more than this share of the bytes over some axes.
_MUCH = 0.25
# Axes over which less than this share of all bytes is sent do not count.
_LITTLE = 0.001


def plan(
    step: Any,
    *args: Any,
    mesh: Any = None,
    layout_map: Any = None,
    topology: Any = None,
    slices: int | None = None,
    donate_argnames: str | Iterable[str] = (),
    platform: str = "tpu",
    timeout: float = 300.0,
    **kwargs: Any,
) -> PodReport:
    """Plan the collectives and memory of a step on a mesh, in seconds.

    The step is traced and lowered for a mesh without devices. Its collectives are those
    that XLA's partitioner makes, which runs in another process, by the CPU client of
    jaxlib; for TPUs, with the known rules of their compiler. Reshards, hosts, drift and
    operations are read from Shardy's passes. Nothing is allocated, whatever the size of
    the model or of the mesh. What the compiler does afterwards (its own memory,
    fusions, overlap) is not in it: `flm.pod.compile` reports that.

    On more than 2,048 devices, which the CPU client does not take, the collectives are
    scaled from two smaller meshes. In `with_layout` they are an estimate from Shardy's
    passes alone: the report's `engine` is `"estimate"`.

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
        donate_argnames: arguments that are given away, beside those that `flm.jit` was
            told, and state; a function of `jax.jit` donates its own alone.
        platform: `"tpu"`, `"cuda"`, `"rocm"` or `"cpu"`: what to lower for.
        timeout: seconds after which the partitioner is ended.
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
    with shown_progress(f"planning {lowered.name}"):
        prepared = prepare(lowered.lowered, as_tpus=platform == "tpu")
        made = Planner(lowered, own, where, prepared, platform, rules)
        return planned(made, start, timeout)


def planned(step: Planner, start: float, timeout: float) -> PodReport:
    """The report with the collectives of XLA's partitioner.

    `start` is when the plan began, by `time.perf_counter`.
    """
    if step.mesh.size == 1:
        nothing = Program((), (), 0, 0, ())
        return _with_collectives(step.estimate(start), nothing, start)
    code = code_to_partition(step.lowered.lowered, as_tpus=step.platform == "tpu")
    sizes, where, estimate = step.mesh.axis_sizes, step.topology, None
    try:
        with partitioning(step.lowered, code, sizes, where, timeout=timeout) as program:
            estimate = step.estimate(start)
            return _with_collectives(estimate, program(), start)
    except NotScaled as why:
        what = f"the collectives are an estimate: {why}"
        estimate = estimate or step.estimate(start)
        return dataclasses.replace(
            estimate,
            unrecognised={**estimate.unrecognised, what: 1},
            took_seconds=time.perf_counter() - start,
        )


def _with_collectives(estimate: PodReport, program: Program, start: float) -> PodReport:
    """The estimate with the collectives of a partitioned program."""
    where, sizes = estimate.topology, estimate.mesh.axis_sizes
    found = program.collectives
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


def _moved_activations(collectives: Iterable[Collective]) -> tuple[str, ...]:
    """The source lines of moved activations; empty if these are few."""
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


def compile(
    step: Any,
    *args: Any,
    topology: Any,
    slices: int | None = None,
    mesh: Any = None,
    layout_map: Any = None,
    donate_argnames: str | Iterable[str] = (),
    timeout: float = 900.0,
    compiler_options: Mapping[str, Any] | None = None,
    exact_memory: bool = False,
    **kwargs: Any,
) -> PodReport:
    """Compile a step ahead of time for TPU slices without devices.

    The step is lowered here, as for `flm.pod.plan`, and compiled by libtpu in another
    process, which may die or hang without harm. What that gives beyond a plan: whether
    the step fits; the collectives as they will run, after the compiler has merged,
    moved and split them; the traffic between slices; and its warnings. Hosts, reshards,
    drift and operations are the plan's. One compile runs at a time on a machine.

    The process is ended when the compiler has its final program and has assigned its
    memory, which takes seconds; what it would do after that is code generation.

    Args:
        step: a function, or what `flm.jit`, `jax.jit` or `nnx.jit` made of one.
        *args: its arguments, as for `flm.pod.plan`.
        topology: as for `flm.pod.topology`, such as `"v5p:4x4x4"`.
        slices: how many slices of it. The first axes of the mesh go over them.
        mesh: as for `flm.pod.plan`; one size may be -1.
        layout_map: the rules, as for `flm.pod.plan`.
        donate_argnames: arguments that are given away, beside those that `flm.jit` was
            told, and state; a function of `jax.jit` donates its own alone.
        timeout: seconds after which the compiler is ended, with the wait for another
            compile.
        compiler_options: options of XLA by name, such as
            `{"xla_tpu_max_hbm_size_mib": 14000}` for a smaller budget of memory.
        exact_memory: wait for the whole compile, minutes for a large step, and take the
            peak of memory from the executable. Otherwise it is what the compiler
            allocates for arguments and temporaries, gaps between them included.
        **kwargs: arguments of the step by name.

    Returns:
        The report. Where the step does not fit, `fits` is False, and the collectives
        are those of the plan.

    Raises:
        LayoutError: libtpu is missing; the compiler refused the step, died, or did not
            finish in time; the step needs real values, or has no rules; the options
            set `xla_dump_to`.
        MeshError: there is no such topology, or the mesh does not fill it.
        RuleError: a rule names an axis that the mesh does not have.
        ResolveError: the arguments do not fit the rules on this mesh.

    Example:
        >>> import jax, jax.numpy as jnp, flax_layoutmap as flm
        >>> x = jax.ShapeDtypeStruct((6, 6), jnp.float32)
        >>> flm.pod.compile(jnp.sin, x, topology="v5e:3x3", mesh="data=9")
        Traceback (most recent call last):
        flax_layoutmap.errors.MeshError: there is no slice v5e:3x3: slices of two dims
        come in few shapes. The nearest: v5e:2x4, v5e:4x4, v5e:2x2
        see: docs/errors.md#mesherror

        `docs/pod_compile.md` shows a report.

    Plain JAX: `jax.jit(step).lower(…).compile()` with shardings over the devices of
    `jax.experimental.topologies.get_topology_desc`, in a process that libtpu may end.
    """
    start = time.perf_counter()
    where = topology_of(topology, slices=slices)
    check_libtpu()
    rules, own = rules_and_mesh(step, args, kwargs, mesh, layout_map, where)
    lowered = lower_step(step, args, kwargs, rules, donate_argnames, "tpu", own)
    ends = start + timeout
    with shown_progress(f"compiling {lowered.name} for {where}"):
        done = compile_for(
            code_of(lowered.lowered.compiler_ir("stablehlo").operation),
            where,
            own.axis_sizes,
            timeout=timeout,
            options=compiler_options,
            exact_memory=exact_memory,
        )
        left = None if done.text is not None else ends - time.perf_counter()
        found = _planned(lowered, own, where, start, left)
    if done.text is None:
        report = _too_large(found, done)
    else:
        report = _compiled(found, done, done.text, lowered, where)
    return dataclasses.replace(report, took_seconds=time.perf_counter() - start)


def _planned(
    lowered: Lowered,
    mesh: DeviceMesh,
    where: Topology,
    start: float,
    timeout: float | None,
) -> PodReport:
    """The parts of the report that are not the compiler's; fewer if Shardy fails.

    With a timeout, in seconds, the collectives are planned, else estimated.
    """
    try:
        made = Planner(lowered, mesh, where, prepare(lowered.lowered))
        if timeout is None:
            found = made.estimate(start)
        else:
            found = planned(made, start, timeout)
    except LayoutError as error:
        found = PodReport(
            engine="compile",
            step=lowered.name,
            mesh=mesh,
            topology=where,
            warnings=(f"without a plan: {error}",),
        )
    return dataclasses.replace(found, engine="compile", replan=None, values=None)


def _too_large(planned: PodReport, done: Compiled) -> PodReport:
    assert done.too_large is not None
    needed, there = done.too_large
    memory = dataclasses.replace(
        planned.memory,
        peak_bytes=needed,
        limit_bytes=there,
        note="the compiler's figures: arguments, results and temporaries together",
    )
    problem = (
        f"does not fit: the step needs {human_bytes(needed)} on a device, and the "
        f"compiler allows {human_bytes(there)} ({human_bytes(needed - there)} too "
        "much); shard more, take a smaller batch per device, or rematerialise. The "
        "collectives are the plan's"
    )
    warnings = (problem, *planned.warnings, *done.warnings, *_rematerialised(done))
    return dataclasses.replace(planned, fits=False, memory=memory, warnings=warnings)


def _compiled(
    planned: PodReport, done: Compiled, text: str, lowered: Lowered, where: Topology
) -> PodReport:
    sizes = planned.mesh.axis_sizes
    slice_of = done.slice_of if where.slices > 1 else ()
    program = read_step(text, lowered, sizes, slice_of)
    return dataclasses.replace(
        planned,
        fits=True,
        memory=_memory(planned.memory, done),
        collectives=program.collectives,
        seconds_bound=seconds_bound(program.collectives, sizes, where),
        unrecognised=dict(collections.Counter(program.unrecognised)),
        unrecognised_at={},
        warnings=(
            *planned.warnings,
            *done.warnings,
            *_rematerialised(done),
            *program.notes,
        ),
    )


def _memory(planned: Memory, done: Compiled) -> Memory:
    found = done.memory
    at_rest = planned.at_rest_bytes
    peak, note = found.get("peak"), "the peak is that of the executable; "
    if peak is None:
        peak = found.get("allocated")
        note = (
            "the peak is what the compiler allocates, gaps included; "
            "exact_memory=True waits for the executable's own; "
        )
    return dataclasses.replace(
        planned,
        padding_bytes=max(0, found.get("arguments", at_rest) - at_rest),
        temporary_bytes=found.get("temporary"),
        peak_bytes=peak,
        note=f"{note}the runtime, other programs and host buffers come on top",
    )


def _rematerialised(done: Compiled) -> list[str]:
    """A warning for each array that is gathered in full to change its sharding."""
    text = done.text or ""
    frames = Frames(text)
    warnings = []
    for name, kind in done.rematerialised:
        at = text.find(f'op_name="{name}"')
        line = text[at : text.find("\n", at)] if at >= 0 else ""
        source = frames.source(line)
        warnings.append(
            f"involuntary rematerialization of {name} {kind}"
            + (f" at {source}" if source else "")
            + ": the compiler makes the whole array on every device to change its "
            "sharding; see the reshards, and constrain it in two steps or not at all"
        )
    return warnings
