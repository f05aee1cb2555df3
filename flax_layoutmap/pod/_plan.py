"""plan: the collectives and memory of a step on any mesh, without devices."""

import collections
import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Any

from flax_layoutmap._core.errors import LayoutError, MeshError, did_you_mean
from flax_layoutmap._core.topologies import topology as topology_of
from flax_layoutmap.pod._estimate import Planner
from flax_layoutmap.pod._hlo import Program
from flax_layoutmap.pod._links import seconds_bound
from flax_layoutmap.pod._lower import lower_step, rules_and_mesh
from flax_layoutmap.pod._partition import NotScaled, code_to_partition, partitioning
from flax_layoutmap.pod._passes import prepare
from flax_layoutmap.pod._records import Collective
from flax_layoutmap.pod._report import PodReport

_PLATFORMS = ("tpu", "cuda", "rocm", "cpu")
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
    fusions, overlap) is not in it: `flm.pod.compile` says that.

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
        donate_argnames: arguments that are given away, where `step` is a function.
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
    made = Planner(lowered, own, where, prepare(lowered.lowered), platform, rules)
    return planned(made, start, timeout)


def planned(step: Planner, start: float, timeout: float) -> PodReport:
    """The report with the collectives of XLA's partitioner.

    Args:
        step: the step.
        start: when the plan began, by the performance counter.
        timeout: seconds after which the partitioner is ended.

    Raises:
        LayoutError: the partitioner refused the program, died, or did not finish.
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
    """Add the functions to lines, where XLA leaves them out (with jax 0.8)."""
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
