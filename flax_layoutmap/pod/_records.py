"""Records of the results of a plan or a compile."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._core.topologies import Topology

Engine = Literal["plan", "compile", "estimate"]

Kind = Literal[
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
]
KINDS: tuple[Kind, ...] = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective operation of a step.

    Attributes:
        kind: what it does.
        axes: the mesh axes it runs over; empty where they were not recognised.
        bytes: payload of one execution on one device, before the wire factor: the
            operand of an all-reduce, a reduce-scatter or a permute, the result of an
            all-gather or an all-to-all.
        wire_bytes: what one device sends in one execution.
        executions: how often it runs in one step, loops multiplied.
        dtype: such as `"bfloat16"`.
        shape: shape of the payload on one device.
        path: the argument leaf that it moves, or whose gradient; None for others.
        joined: other leaves that it moves or sums, as they were joined with that one
            before.
        source: `"model.py:36 Attention.__call__"`; None where it is not known.
        over_dcn: whether it crosses slices.
    """

    __module__ = "flax_layoutmap.pod"
    kind: Kind
    axes: tuple[str, ...]
    bytes: int
    wire_bytes: int
    executions: int
    dtype: str
    shape: tuple[int, ...]
    path: str | None = None
    joined: tuple[str, ...] = ()
    source: str | None = None
    over_dcn: bool = False

    @property
    def bytes_per_step(self) -> int:
        """Payload of all executions, on one device."""
        return self.bytes * self.executions

    @property
    def wire_bytes_per_step(self) -> int:
        """What one device sends in one step."""
        return self.wire_bytes * self.executions


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reshard:
    """A value that a layout or a constraint forces to another sharding.

    Attributes:
        value: what is moved, as the program calls it: `"dot_general"`, a path.
        before: spec it has, `"P(data, -)"`.
        after: spec it must have.
        shape: global shape.
        dtype: such as `"bfloat16"`.
        bytes: bytes of one device's part afterwards.
        executions: how often in one step.
        path: the argument leaf, or None.
        source: the line of the program, or None.
        note: what the compiler says of it, such as an involuntary rematerialization.
    """

    __module__ = "flax_layoutmap.pod"
    value: str
    before: str
    after: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    executions: int = 1
    path: str | None = None
    source: str | None = None
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one device.

    Attributes:
        at_rest: role of the arguments (`"parameter"`, `"optimizer"`, `"data"`,
            `"other"`) → bytes of their shards in the memory of the device.
        host_at_rest: the same for the shards that a `memory_kind` keeps on its host.
        padding_bytes: what the tiles of the accelerator add to them; an estimate in a
            plan.
        temporary_bytes: what the step needs besides; None where it is not known.
        peak_bytes: the most that is in use at a time, or, where the compiler was ended
            before it made code, all that it allocates; None where neither is known.
        limit_bytes: what the compiler allows on the device; None without a topology.
        note: what the figures leave out.
    """

    __module__ = "flax_layoutmap.pod"
    at_rest: Mapping[str, int] = dataclasses.field(default_factory=dict)
    host_at_rest: Mapping[str, int] = dataclasses.field(default_factory=dict)
    padding_bytes: int = 0
    temporary_bytes: int | None = None
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    note: str = ""

    @property
    def at_rest_bytes(self) -> int:
        """Bytes of all arguments in device memory, before tile padding."""
        return sum(self.at_rest.values())

    @property
    def headroom_bytes(self) -> int | None:
        """The limit minus the peak, or minus the bytes at rest if no peak is known."""
        if self.limit_bytes is None:
            return None
        used = self.peak_bytes
        if used is None:
            used = self.at_rest_bytes + self.padding_bytes
        return self.limit_bytes - used


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The bytes that one host holds and reads.

    Attributes:
        index: its process index.
        slice_index: the slice it is in.
        devices: positions of its devices in the mesh, row by row.
        holds_bytes: bytes of state on all its devices, copies counted.
        reads_bytes: distinct bytes of state: what it reads in a restore.
        data_bytes: distinct bytes of the step's data: its part of each batch.
    """

    __module__ = "flax_layoutmap.pod"
    index: int
    slice_index: int
    devices: tuple[int, ...]
    holds_bytes: int
    reads_bytes: int
    data_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A leaf of the state whose layout differs before and after the step.

    Attributes:
        path: path of the leaf in the arguments.
        before: spec of the argument.
        after: spec of the result.
    """

    __module__ = "flax_layoutmap.pod"
    path: str
    before: str
    after: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
    """The fields of a PodReport, which documents them."""

    engine: Engine
    step: str
    mesh: DeviceMesh
    topology: Topology | None = None
    platform: str = "tpu"
    fits: bool | None = None
    memory: Memory = dataclasses.field(default_factory=Memory)
    collectives: tuple[Collective, ...] = ()
    reshards: tuple[Reshard, ...] = ()
    hosts: tuple[Host, ...] = ()
    flops_per_device: int = 0
    flops_total: int = 0
    compute_seconds: float | None = None
    seconds_bound: Mapping[str, float] = dataclasses.field(default_factory=dict)
    drift: tuple[Drift, ...] = ()
    unrecognised: Mapping[str, int] = dataclasses.field(default_factory=dict)
    unrecognised_at: Mapping[str, tuple[str, ...]] = dataclasses.field(
        default_factory=dict
    )
    warnings: tuple[str, ...] = ()
    took_seconds: float = dataclasses.field(default=0.0, compare=False)
    replan: Callable[[Any], Any] | None = dataclasses.field(
        default=None, repr=False, compare=False
    )
    values: Callable[[str], list[tuple[str, str, str]]] | None = dataclasses.field(
        default=None, repr=False, compare=False
    )
    paths: tuple[str, ...] = dataclasses.field(default=(), repr=False, compare=False)
