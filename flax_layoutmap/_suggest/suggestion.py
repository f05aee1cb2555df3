"""Suggestion: rules that were found, with their cost beside that of others."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._core.topologies import Topology
from flax_layoutmap._layout_map import LayoutMap
from flax_layoutmap._show.table import human_bytes, text_table
from flax_layoutmap._suggest.price import ASSUMED, Cost
from flax_layoutmap._suggest.rules import as_code
from flax_layoutmap._suggest.search import Step
from flax_layoutmap.pod._report import PodReport
from flax_layoutmap.pod._report_text import seconds_text

_NOT_PRICED = (
    "not priced: overlap of collectives and products, what a compiler merges or moves, "
    "work that is no matrix product"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suggestion:
    """Rules for a step on a mesh, from `flm.suggest`.

    Attributes:
        layout_map: the rules; `layout_map.to_file("rules.toml")` keeps them.
        cost: what a step costs with them, an estimate by Shardy's passes.
        fully_sharded: the same with the batch and each parameter over all axes.
        second: the same for the best with other axes for the batch; None where there
            is none.
        today: the same for the rules that were given; None without.
        second_layout_map: the rules of the second.
        report: `flm.pod.plan` of the rules, by XLA's partitioner, or `flm.pod.compile`
            with `check="compile"`; None where the search was interrupted, or
            `check=False`.
        step: name of the step.
        mesh: the mesh.
        topology: the slices, or None.
        limit_bytes: the limit of memory of one device; None without.
        fits: whether the estimated peak of memory is below the limit, and the report
            does not say otherwise.
        trail: the steps of the search.
        is_complete: whether it ended by itself.
        notes: what else is worth a look.
        took_seconds: how long it took.
    """

    __module__ = "flax_layoutmap"
    layout_map: LayoutMap
    cost: Cost
    fully_sharded: Cost
    second: Cost | None
    today: Cost | None
    second_layout_map: LayoutMap | None
    report: PodReport | None
    step: str
    mesh: DeviceMesh
    topology: Topology | None
    limit_bytes: int | None
    fits: bool
    trail: tuple[Step, ...]
    is_complete: bool
    notes: tuple[str, ...] = ()
    took_seconds: float = dataclasses.field(compare=False)
    explained: Callable[[str], str] = dataclasses.field(repr=False, compare=False)

    def explain(self, path: str) -> str:
        """Tell what the best other layout of a parameter would cost.

        Args:
            path: the path of the parameter, within the arguments or its model.

        Raises:
            KeyError: no parameter has this path.
        """
        return self.explained(path)

    def to_json(self) -> dict[str, Any]:
        """Return the rules, costs and trail as plain JSON values."""
        costs = {
            name: None if cost is None else dataclasses.asdict(cost)
            for name, cost in self._costs().items()
        }
        return {
            "step": self.step,
            "mesh": dict(self.mesh.axis_sizes),
            "rules": self.layout_map.to_json(),
            "costs": costs,
            "limit_bytes": self.limit_bytes,
            "fits": self.fits,
            "is_complete": self.is_complete,
            "notes": [*self._notes()],
            "trail": [dataclasses.asdict(step) for step in self.trail],
        }

    def _costs(self) -> dict[str, Cost | None]:
        return {
            "suggested": self.cost,
            "second": self.second,
            "full sharding": self.fully_sharded,
            "today": self.today,
        }

    def __str__(self) -> str:
        return "\n\n".join(self._parts())

    def _parts(self) -> Iterator[str]:
        where = "" if self.topology is None else f" ({self.topology})"
        yield (
            f"suggestion for {self.step} on mesh {self.mesh}{where}: "
            f"{self.mesh.size} devices"
        )
        yield as_code(self.layout_map.freeze())
        yield self._table()
        yield "\n".join(self._notes())

    def _table(self) -> str:
        named = self._costs().items()
        costs = {name: cost for name, cost in named if cost is not None}
        axes = dict.fromkeys(
            axis
            for cost in costs.values()
            for axis, size in cost.sent_bytes.items()
            if size > cost.total_sent_bytes / 1000
        )
        cells: dict[str, Callable[[Cost], str]] = {
            "a step, at least": lambda one: seconds_text(one.seconds),
            "  links": lambda one: seconds_text(one.link_seconds),
            "  matrix products": lambda one: seconds_text(one.compute_seconds),
        }
        if any(one.memory_seconds > one.compute_seconds for one in costs.values()):
            cells["  or reads of memory"] = lambda one: seconds_text(one.memory_seconds)
        for axis in axes:
            cells[f"sent over {axis}"] = functools.partial(_sent, axis)
        cells["at rest"] = lambda one: human_bytes(one.at_rest_bytes)
        cells["peak, estimated"] = lambda one: human_bytes(one.peak_bytes or 0)
        rows = [[name, *map(text, costs.values())] for name, text in cells.items()]
        header = ["per device", *costs]
        right = [False, *[True] * len(costs)]
        return text_table(header, rows, right)

    def _notes(self) -> Iterator[str]:
        yield from self.notes
        yield from self._memory_notes()
        if self.topology is None:
            yield (
                f"no topology: links and products of {ASSUMED.name} are assumed, each "
                "axis with a ring of its own"
            )
        yield from self._sureness()
        yield _NOT_PRICED
        tried = self.trail[-1].tried if self.trail else 0
        ended = "" if self.is_complete else ", interrupted: the best so far"
        yield f"tried {tried} layouts{ended}; took {self.took_seconds:.1f} s"
        for step in self.trail:
            yield f"  {step.what}: {seconds_text(step.seconds)} ({step.tried} tried)"

    def _memory_notes(self) -> Iterator[str]:
        if self.limit_bytes is None or self.cost.peak_bytes is None:
            return
        limit = human_bytes(self.limit_bytes)
        if self.report is not None and self.report.fits is False:
            yield self.report.warnings[0]
            return
        if self.fits:
            yield f"limit: {limit} per device"
            return
        rest = dict(self.cost.at_rest)
        rest["gradients and activations"] = (
            self.cost.peak_bytes - self.cost.at_rest_bytes
        )
        held = ", ".join(f"{name} {human_bytes(size)}" for name, size in rest.items())
        yield (
            f"does not fit: the least peak that was found is "
            f"{human_bytes(self.cost.peak_bytes)} per device, the limit {limit}; "
            f"it holds {held}"
        )

    def _sureness(self) -> Iterator[str]:
        if self.report is None:
            yield "an estimate by Shardy's passes, not checked by XLA's partitioner"
            return
        planned, own = self.report.wire_bytes(), self.cost.total_sent_bytes
        share = f"{planned / own - 1:+.1%}" if own else "none expected"
        is_compiled = self.report.engine == "compile"
        who = "the compiler for TPUs" if is_compiled else "XLA's partitioner"
        yield (
            f"checked by {who}: {human_bytes(planned)} sent ({share} of the estimate)"
        )
        if self.report.unrecognised:
            yield f"unrecognised: {'; '.join(self.report.unrecognised)}"


def _sent(axis: str, cost: Cost) -> str:
    return human_bytes(cost.sent_bytes.get(axis, 0))


def best_other(
    path: str, layout: str, own: Cost, others: Sequence[tuple[str, Cost]]
) -> str:
    """The text for a parameter and its best other layout."""
    if not others:
        return f"{path}: {layout}; it was given no other layout"
    text, cost = min(others, key=lambda pair: pair[1].seconds)
    share = cost.seconds / own.seconds - 1
    sent = cost.total_sent_bytes - own.total_sent_bytes
    rest = cost.at_rest_bytes - own.at_rest_bytes
    return (
        f"{path}: {layout}\n"
        f"the second choice, {text}, makes a step {seconds_text(cost.seconds)} instead "
        f"of {seconds_text(own.seconds)} ({share:+.1%}), with "
        f"{_more(sent)} sent and {_more(rest)} at rest"
    )


def _more(count: int) -> str:
    if count == 0:
        return "as much"
    return f"{human_bytes(abs(count))} {'more' if count > 0 else 'less'}"
