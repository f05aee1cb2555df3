"""What is read from a laid-out module, as plain records."""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flax_layoutmap.pod._attributes import AxisRef
from flax_layoutmap.pod._records import Kind
from flax_layoutmap.pod._values import Value

Scope = tuple[int, ...]  # the loops around an operation, by number


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where in the program the walk is.

    Attributes:
        times: how often what stands there runs in a step.
        scope: the loops around it.
        cuts: inside of a shard_map, into how many parts its axes cut the work; else 0.
    """

    times: int
    scope: Scope
    cuts: int = 0


@dataclasses.dataclass(slots=True)
class Found:
    """A collective as it stands in the program.

    Attributes:
        kind: what it does.
        axes: the axes it runs over.
        shape: payload on one device.
        element: MLIR's name of its element type.
        executions: how often it runs in a step.
        location: where it comes from, as MLIR writes it.
        scope: the loops around it.
        leaf: the argument that it moves, or whose gradient it sums.
        made_of: the largest parameter in what it moves or sums, if only parameters are,
            and those that it was joined with.
        into: the collective that it is one with, or None.
        of_rows: whether it sums gradients of looked-up rows.
        is_whole: whether Shardy scatters this sum, and the TPU compiler does not.
        source: the value of the program that it moves or sums, where that may be named.
        moved: the value in its new layout, of what is moved as it is; several where
            equal moves are one.
    """

    kind: Kind
    axes: tuple[AxisRef, ...]
    shape: tuple[int, ...]
    element: str
    executions: int
    location: str
    scope: Scope = ()
    leaf: int | None = None
    made_of: tuple[int, ...] = ()
    into: int | None = None
    of_rows: bool = False
    is_whole: bool = False
    source: Any = None
    moved: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class Move:
    """A value that changes its sharding, by one collective or several.

    Attributes:
        before: the value.
        after: the same in the other layout.
        executions: how often.
        location: where, as MLIR writes it.
        gathers_only: whether it is only gathered.
        leaf: the argument that it is, or is made of.
    """

    before: Value
    after: Value
    executions: int
    location: str
    gathers_only: bool
    leaf: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PerRound:
    """A value that is moved whole in each round of a loop, which takes a slice of it.

    Attributes:
        value: as it is outside of the loop.
        rounds: how often.
        location: where it is sliced, as MLIR writes it.
    """

    value: Value
    rounds: int
    location: str


@dataclasses.dataclass(slots=True)
class Spread:
    """What was read from a module.

    Attributes:
        sizes: axis name → size.
        arguments: the arguments of the step.
        results: its results.
        collectives: in the order of the program.
        moves: values that change their sharding.
        per_round: values that are moved in each round of a loop, to be sliced.
        flops: of matrix products and convolutions, on one device.
        flops_whole: the same on all devices if none did another's work.
        unrecognised: what could not be counted → the places in the program.
        moved_operands: how many operands of products, made of more than parameters, are
            moved along dims that are summed.
        moved_to_sum: where some are moved so that they are sharded along such a dim.
        branching: how many conditionals have any of this in a branch.
        operations: how many operations there are.
        gradients_of: position of a result → the sums that it is made from; and what was
            looked at before, which is not again, and for which result.
        name_updates: value → the argument that it is a part of the new value of; names
            what else an optimizer moves after these.
    """

    sizes: dict[str, int]
    arguments: list[Value]
    results: list[Value] = dataclasses.field(default_factory=list)
    collectives: list[Found] = dataclasses.field(default_factory=list)
    moves: dict[int, Move] = dataclasses.field(default_factory=dict)
    per_round: list[PerRound] = dataclasses.field(default_factory=list)
    flops: int = 0
    flops_whole: int = 0
    unrecognised: dict[str, list[str]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )
    moved_operands: int = 0
    moved_to_sum: list[str] = dataclasses.field(default_factory=list)
    branching: int = 0
    operations: int = 0
    gradients_of: Callable[[int, dict[Any, int]], Iterable[Value]] = lambda at, seen: ()
    name_updates: Callable[[Mapping[Any, int]], None] = lambda owners: None
