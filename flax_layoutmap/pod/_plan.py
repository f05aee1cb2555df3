"""plan and compile: the report of a step on a pod slice, without devices."""

import collections
import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from flax_layoutmap._core.errors import LayoutError, MeshError, did_you_mean
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._rules.records import show_shape
from flax_layoutmap._show.table import human_bytes
from flax_layoutmap._show.terminal import shown_progress
from flax_layoutmap.pod._ask import (
    Answer,
    check_libtpu,
    compile_for,
    has_libtpu,
    partition_for,
)
from flax_layoutmap.pod._bounds import dcn_axes, memory_of, seconds_bound
from flax_layoutmap.pod._flops import flops_of
from flax_layoutmap.pod._hlo import Program, read_program
from flax_layoutmap.pod._hlo_sources import Frames
from flax_layoutmap.pod._hlo_text import Array, Module, split
from flax_layoutmap.pod._lower import Lowered, lower_step, rules_and_mesh
from flax_layoutmap.pod._merge import merge
from flax_layoutmap.pod._records import Drift, Engine, Memory
from flax_layoutmap.pod._report import PodReport
from flax_layoutmap.pod._rewrite import code_of, code_to_partition
from flax_layoutmap.pod._topologies import Topology
from flax_layoutmap.pod._topologies import topology as topology_of

_PLATFORMS = ("tpu", "cuda", "rocm", "cpu")
_ENGINES = ("libtpu", "partitioner")
# Constants, and state that is not donated, of fewer bytes are not worth a warning.
_MANY_BYTES = 1 << 20


def plan(
    step: Any,
    *args: Any,
    mesh: Any = None,
    layout_map: Any = None,
    topology: Any = None,
    slices: int | None = None,
    donate_argnames: str | Iterable[str] = (),
    platform: str = "tpu",
    engine: Engine | None = None,
    timeout: float = 300.0,
    **kwargs: Any,
) -> PodReport:
    """Plan the collectives and memory of a step on a mesh, in seconds.

    The step is traced and lowered for a mesh without devices, and another process asks
    libtpu, which compiles it as on the slice, or XLA's partitioner, which is part of
    jaxlib. Nothing is allocated, whatever the size of the model or of the mesh. The
    report says who was asked. The partitioner's figures are within 25 % of libtpu's for
    most axes, and leave out what the compiler needs beside the arguments.

    Args:
        step: a function, or what `flm.jit`, `jax.jit` or `nnx.jit` made of one.
        *args: its arguments: arrays, `jax.ShapeDtypeStruct`s, NNX objects with either
            (`nnx.eval_shape(make)`). State is laid out by the rules, data over the
            `batch` axes, as `flm.jit` does it.
        mesh: as a line, `"fsdp=16,tensor=4"`, or anything that `DeviceMesh` accepts;
            devices are not needed. With a topology one size may be -1. None takes that
            of the rules.
        layout_map: the rules; None takes those of a function of `flm.jit`. A function
            of `jax.jit` needs none where its arguments have shardings; its in_shardings
            move arguments that the rules place otherwise.
        topology: as for `flm.pod.topology`, such as `"v5p:4x4x4"`: adds the limit of
            memory and the least time on the links.
        slices: how many slices of it.
        donate_argnames: arguments that are given away, beside those that `flm.jit` was
            told, and state; a function of `jax.jit` donates its own alone.
        platform: `"tpu"`, `"cuda"`, `"rocm"` or `"cpu"`: what to lower for.
        engine: `"libtpu"` or `"partitioner"`. None takes libtpu where it is installed
            and there is a topology. The partitioner takes up to 2,048 devices.
        timeout: seconds after which the other process is ended.
        **kwargs: arguments of the step by name.

    Returns:
        The report.

    Raises:
        LayoutError: the step needs real values, calls back into Python, or has no
            rules; there is no such platform or engine; XLA or libtpu refuses the step,
            dies, or does not finish in time.
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
        >>> mesh = "data=128,model=16"
        >>> report = flm.pod.plan(step, params, x, mesh=mesh, layout_map=layout_map)
        >>> report.expect(axis="model", kinds={"all-reduce"}, small_bytes=0)
        >>> report.memory.at_rest["parameter"]
        4096
    """
    start = time.perf_counter()
    platform = "cuda" if platform == "gpu" else platform
    _check_choice("platform", platform, _PLATFORMS)
    where = None if topology is None else topology_of(topology, slices=slices)
    if where is not None and platform != "tpu":
        raise MeshError(
            f"{where} is of TPUs, and platform={platform!r} is not: leave out the "
            'topology, or take platform="tpu"'
        )
    if where is None and slices is not None:
        raise MeshError('slices of which topology? pass topology="v5p:4x4x4" too')
    if engine is not None:
        _check_choice("engine", engine, _ENGINES)
    if engine == "libtpu" and where is None:
        raise MeshError(
            'engine="libtpu" needs the slice that it compiles for: pass '
            'topology="v5p:4x4x4"'
        )
    if engine == "libtpu":
        check_libtpu()
    rules, on = rules_and_mesh(step, args, kwargs, mesh, layout_map, where)
    lowered = lower_step(step, args, kwargs, rules, donate_argnames, platform, on)
    made = _Plan(lowered, on, where, platform, timeout)
    with shown_progress(f"planning {lowered.name}"):
        if engine == "libtpu" or (where and not engine and has_libtpu()):
            report = made.by_libtpu(insists=engine is not None)
        else:
            report = made.by_partitioner()
    return dataclasses.replace(report, took_seconds=time.perf_counter() - start)


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
    **kwargs: Any,
) -> PodReport:
    """Plan a step with libtpu, and with options of its compiler.

    As `flm.pod.plan(…, engine="libtpu")`, whose arguments, results and errors it has,
    with these differences:

    Args:
        topology: required.
        timeout: seconds after which the compiler is ended.
        compiler_options: options of XLA by name, such as
            `{"xla_tpu_max_hbm_size_mib": 14000}` for a smaller budget of memory.

    Raises:
        LayoutError: libtpu is missing, refuses the step, dies, or does not finish in
            time; or the options set `xla_dump_to`.

    Example:
        >>> import jax, jax.numpy as jnp, flax_layoutmap as flm
        >>> x = jax.ShapeDtypeStruct((6, 6), jnp.float32)
        >>> flm.pod.compile(jnp.sin, x, topology="v5e:3x3", mesh="data=9")
        Traceback (most recent call last):
        flax_layoutmap.errors.MeshError: there is no slice v5e:3x3: slices have two
        dims, and come in few shapes. The nearest: v5e:2x4, v5e:4x4, v5e:2x2

    Plain JAX: `jax.jit(step).lower(…).compile()` with shardings over the devices of
    `jax.experimental.topologies.get_topology_desc`, in a process that libtpu may end.
    """
    start = time.perf_counter()
    where = topology_of(topology, slices=slices)
    check_libtpu()
    rules, on = rules_and_mesh(step, args, kwargs, mesh, layout_map, where)
    lowered = lower_step(step, args, kwargs, rules, donate_argnames, "tpu", on)
    made = _Plan(lowered, on, where, "tpu", timeout, compiler_options)
    with shown_progress(f"compiling {lowered.name} for {where}"):
        report = made.by_libtpu(insists=True)
    return dataclasses.replace(report, took_seconds=time.perf_counter() - start)


def _check_choice(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise LayoutError(
            f"there is no {name} {value!r}{did_you_mean(value, known)}; they are "
            f"{', '.join(known)}"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """A lowered step, and where it is to run."""

    lowered: Lowered
    mesh: DeviceMesh
    topology: Topology | None
    platform: str
    timeout: float  # seconds
    options: Mapping[str, Any] | None = None  # of libtpu's compiler

    def by_partitioner(self) -> PodReport:
        """The report by XLA's partitioner."""
        normal = code_to_partition if self.platform == "tpu" else code_of
        code = normal(self.lowered.program)
        answer = partition_for(code, self.mesh.size, timeout=self.timeout)
        assert answer.program is not None
        return self.report("partitioner", answer.given, merge(answer.program))

    def by_libtpu(self, *, insists: bool) -> PodReport:
        """The report by libtpu; by the partitioner where it has none.

        That is where the step does not fit, or, unless it `insists` on libtpu, where
        libtpu fails.
        """
        assert self.topology is not None
        code = code_of(self.lowered.program)
        sizes = self.mesh.axis_sizes
        try:
            answer = compile_for(
                code, self.topology, sizes, timeout=self.timeout, options=self.options
            )
        except LayoutError as error:
            if insists:
                raise
            report = self.by_partitioner()
            text = f"libtpu failed, and XLA's partitioner was asked instead: {error}"
            return dataclasses.replace(report, warnings=(text, *report.warnings))
        if answer.program is None:
            return _too_large(self.by_partitioner(), answer)
        slice_of = answer.slice_of if self.topology.slices > 1 else ()
        module = split(answer.program)
        report = self.report("libtpu", answer.given, module, slice_of)
        warnings = (*report.warnings, *answer.warnings, *_rematerialised(answer))
        memory = _memory(report.memory, answer)
        return dataclasses.replace(report, fits=True, memory=memory, warnings=warnings)

    def report(
        self, engine: Engine, given: str, module: Module, slice_of: Sequence[int] = ()
    ) -> PodReport:
        """The report of a program; `given` is that before it was partitioned."""
        lowered, where, sizes = self.lowered, self.topology, self.mesh.axis_sizes
        before = split(given)
        shards = module.parameters()
        program = self.read(module, slice_of)
        memory = memory_of(shards, lowered.leaves, where)
        flops = flops_of(module)
        compute, bound = None, {}
        if where is not None:
            compute = flops / where.generation.flops
            bound = seconds_bound(program.collectives, sizes, where)
        whole = before.parameters()
        warnings = _warnings_of(lowered, whole, shards, self.mesh)
        return PodReport(
            engine=engine,
            step=lowered.name,
            mesh=self.mesh,
            topology=where,
            platform=self.platform,
            fits=False if (memory.headroom_bytes or 0) < 0 else None,
            memory=memory,
            collectives=program.collectives,
            flops_per_device=flops,
            flops_total=flops_of(before),
            compute_seconds=compute,
            seconds_bound=bound,
            drift=tuple(_drift(lowered, shards, module.results())),
            unread=collections.Counter(program.unread),
            warnings=(*warnings, *program.notes),
            paths=tuple(leaf.path for leaf in lowered.leaves),
        )

    def read(self, module: Module, slice_of: Sequence[int]) -> Program:
        """The collectives, with the paths of the step's leaves."""
        lowered, sizes = self.lowered, self.mesh.axis_sizes
        leaves = enumerate(lowered.leaves)
        parameters = {at for at, leaf in leaves if leaf.role == "parameter"}
        return read_program(
            module,
            sizes.keys(),
            sizes.values(),
            slice_of=slice_of,
            crossing=() if slice_of else dcn_axes(sizes, self.topology),
            paths=[leaf.path for leaf in lowered.leaves],
            results={r: lowered.leaves[at].path for r, at in lowered.state()},
            parameters=parameters,
            new_parameters=[r for r, at in lowered.updates.items() if at in parameters],
        )


def _warnings_of(
    lowered: Lowered, whole: Sequence[Array], shards: Sequence[Array], mesh: DeviceMesh
) -> Iterator[str]:
    """The warnings about arguments: `whole`, and their shards on a device."""
    yield from lowered.notes
    if mesh.size > 1 and whole and list(whole) == list(shards):
        yield (
            f"no argument is sharded over {mesh}: every device does the whole step; "
            "pass layout_map=layout_map, or arguments with shardings"
        )
    large = [each for each in lowered.constants if each[1] >= _MANY_BYTES]
    if large:
        shapes = ", ".join(show_shape(shape) for shape, _ in large[:4])
        size = human_bytes(sum(size for _, size in large))
        yield (
            f"{lowered.name} closes over arrays ({shapes}; {size}): constants of the "
            "program, which every device holds in full; pass them as arguments"
        )
    leaves = lowered.leaves
    kept = [at for at in lowered.updates.values() if not leaves[at].is_donated]
    kept = [at for at in kept if leaves[at].role != "data"]
    held = sum(shards[at].bytes for at in kept)
    if held >= _MANY_BYTES:
        yield (
            f"state that is not donated, such as {leaves[kept[0]].path}: where the "
            "results are its new values, old and new are held at the same time, "
            f"{human_bytes(held)} more per device; use donate_argnames"
        )


def _drift(
    lowered: Lowered, shards: Sequence[Array], results: Sequence[Array]
) -> Iterator[Drift]:
    """State whose shards have another shape after the step."""
    for result, argument in sorted(lowered.updates.items()):
        leaf = lowered.leaves[argument]
        before, after = shards[argument].shape, results[result].shape
        if leaf.role != "data" and before != after:
            yield Drift(path=leaf.path, before=before, after=after)


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
    warnings = (problem, *report.warnings, *answer.warnings, *_rematerialised(answer))
    return dataclasses.replace(report, fits=False, memory=memory, warnings=warnings)


def _memory(memory: Memory, answer: Answer) -> Memory:
    return dataclasses.replace(
        memory,
        temporary_bytes=answer.memory.get("temporary"),
        peak_bytes=answer.memory.get("allocated"),
        note="the peak is what libtpu allocates, gaps included; the runtime, other "
        "programs and host buffers come on top",
    )


def _rematerialised(answer: Answer) -> list[str]:
    """A warning for each array that is gathered in full to change its sharding."""
    text = answer.program or ""
    frames = Frames(text)
    warnings = []
    for name, kind in answer.rematerialised:
        at = text.find(f'op_name="{name}"')
        line = text[at : text.find("\n", at)] if at >= 0 else ""
        source = frames.source(line)
        warnings.append(
            f"involuntary rematerialization of {name} {kind}"
            + (f" at {source}" if source else "")
            + ": the compiler makes the whole array on every device to change its "
            "sharding; constrain it in two steps or not at all"
        )
    return warnings
