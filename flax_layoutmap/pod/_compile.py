"""compile: ahead-of-time TPU compilation of a step, without devices."""

import collections
import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import Any

from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._core.topologies import Topology
from flax_layoutmap._core.topologies import topology as topology_of
from flax_layoutmap._show.table import human_bytes
from flax_layoutmap.pod._aot import (
    Compiled,
    check_libtpu,
    compile_for,
    split_over_slices,
)
from flax_layoutmap.pod._estimate import Planner
from flax_layoutmap.pod._hlo_source import Frames
from flax_layoutmap.pod._links import seconds_bound
from flax_layoutmap.pod._lower import lower_step, rules_and_mesh
from flax_layoutmap.pod._lowered import Lowered
from flax_layoutmap.pod._partition import code_of, read_step
from flax_layoutmap.pod._passes import prepare
from flax_layoutmap.pod._plan import planned as planned_by_xla
from flax_layoutmap.pod._records import Memory
from flax_layoutmap.pod._report import PodReport


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
        donate_argnames: arguments that are given away, where `step` is a function.
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

        `docs/pod_compile.md` shows a report.

    Plain JAX: `jax.jit(step).lower(…).compile()` with shardings over the devices of
    `jax.experimental.topologies.get_topology_desc`, in a process that libtpu may end.
    """
    start = time.perf_counter()
    where = topology_of(topology, slices=slices)
    check_libtpu()
    rules, own = rules_and_mesh(step, args, kwargs, mesh, layout_map, where)
    split_over_slices(own.shape, where)
    lowered = lower_step(step, args, kwargs, rules, donate_argnames, "tpu", own)
    ends = start + timeout
    done = compile_for(
        code_of(lowered.lowered),
        where,
        own.shape,
        timeout=timeout,
        options=compiler_options,
        exact_memory=exact_memory,
    )
    left = None if done.text is not None else ends - time.perf_counter()
    planned = _planned(lowered, own, where, start, left)
    if done.text is None:
        report = _too_large(planned, done)
    else:
        report = _compiled(planned, done, done.text, lowered, where)
    return dataclasses.replace(report, took_seconds=time.perf_counter() - start)


def _planned(
    lowered: Lowered,
    mesh: DeviceMesh,
    where: Topology,
    start: float,
    timeout: float | None,
) -> PodReport:
    """The parts of the report that are not the compiler's; partial if Shardy fails.

    Args:
        lowered: the step.
        mesh: the mesh.
        where: the topology.
        start: when the compile began.
        timeout: seconds that are left to plan the collectives; None for an estimate.
    """
    try:
        made = Planner(lowered, mesh, where, prepare(lowered.lowered))
        if timeout is None:
            planned = made.estimate(start)
        else:
            planned = planned_by_xla(made, start, timeout)
    except LayoutError as error:
        planned = PodReport(
            engine="compile",
            step=lowered.name,
            mesh=mesh,
            topology=where,
            warnings=(f"without a plan: {error}",),
        )
    return dataclasses.replace(planned, engine="compile", replan=None, values=None)


def _too_large(planned: PodReport, done: Compiled) -> PodReport:
    assert done.too_large is not None
    needed, there = done.too_large
    memory = dataclasses.replace(
        planned.memory,
        peak_bytes=needed,
        limit_bytes=there,
        note="the compiler's figures: arguments, results and temporaries together",
    )
    said = (
        f"does not fit: the step needs {human_bytes(needed)} on a device, and the "
        f"compiler allows {human_bytes(there)} ({human_bytes(needed - there)} too "
        "much); shard more, take a smaller batch per device, or rematerialise. The "
        "collectives are the plan's"
    )
    warnings = (said, *planned.warnings, *done.warnings, *_rematerialised(done))
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
