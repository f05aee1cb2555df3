"""Records of the results of a plan."""

import dataclasses
from collections.abc import Mapping
from typing import Literal, get_args

Engine = Literal["libtpu", "partitioner"]

Kind = Literal[
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective operation of a step.

    Attributes:
        kind: what it does.
        axes: the mesh axes it runs over; empty where they are unknown.
        bytes: payload of one execution on one device, before the wire factor: the
            operand of an all-reduce, a reduce-scatter or a permute, the result of an
            all-gather or an all-to-all.
        wire_bytes: what one device sends in one execution.
        executions: how often it runs in one step, loops multiplied.
        dtype: such as `"bfloat16"`.
        shape: shape of the payload on one device.
        path: the argument leaf that it moves, or whose gradient; None for others, such
            as activations.
        joined: other leaves that it moves or sums, as they were joined with that one
            before.
        source: `"model.py:36 Attention.__call__"`; None where it is unknown.
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


def axes_text(collective: Collective) -> str:
    """`fsdp`, `data+fsdp`, `data (DCN)`; `?` where they are unknown."""
    text = "+".join(collective.axes) or "?"
    return f"{text} (DCN)" if collective.over_dcn else text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one device.

    Attributes:
        at_rest: role of the arguments (`"parameter"`, `"optimizer"`, `"data"`,
            `"other"`) → bytes of their shards in the memory of the device.
        host_at_rest: the same for the shards that a `memory_kind` keeps on its host.
        temporary_bytes: what the step needs besides, by libtpu; None without it.
        peak_bytes: all that libtpu allocates, gaps included; None without it.
        limit_bytes: what the compiler allows on the device; None without a topology.
        note: what the figures leave out.
    """

    __module__ = "flax_layoutmap.pod"
    at_rest: Mapping[str, int] = dataclasses.field(default_factory=dict)
    host_at_rest: Mapping[str, int] = dataclasses.field(default_factory=dict)
    temporary_bytes: int | None = None
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    note: str = ""

    @property
    def at_rest_bytes(self) -> int:
        """Bytes of all arguments in device memory, without padding."""
        return sum(self.at_rest.values())

    @property
    def headroom_bytes(self) -> int | None:
        """The limit minus the peak, or minus the bytes at rest if no peak is known."""
        if self.limit_bytes is None:
            return None
        used = self.at_rest_bytes if self.peak_bytes is None else self.peak_bytes
        return self.limit_bytes - used


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A leaf of the state whose layout differs before and after the step.

    Attributes:
        path: path of the leaf in the arguments.
        before: shape of one device's shard of the argument.
        after: the same of the result.
    """

    __module__ = "flax_layoutmap.pod"
    path: str
    before: tuple[int, ...]
    after: tuple[int, ...]
