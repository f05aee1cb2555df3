"""Suggestion: the rules that were found, and what was tried."""

import dataclasses
import operator
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._core.topologies import GENERATIONS
from flax_layoutmap._layout_map import LayoutMap
from flax_layoutmap._rules.serialise import mesh_to_json
from flax_layoutmap._show.table import Grid, Line, human_bytes
from flax_layoutmap._show.terminal import Shown, coloured_grid, coloured_lines, wrapped
from flax_layoutmap._suggest.rules import as_code
from flax_layoutmap.pod import PodReport
from flax_layoutmap.pod._report_text import seconds_text

if TYPE_CHECKING:
    from rich.text import Text

# What is assumed without a topology.
ASSUMED = GENERATIONS["v5p"]
GIVEN = "the rules given"
# Of each collective, whatever its size.
_SECONDS_EACH = 2e-6
# Times that differ by a smaller share count as equal.
_EQUAL = 1e-3


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """Rules that were tried, and the report of a step with them.

    Attributes:
        name: what each axis does, such as `"data over fsdp+tensor"`, or `"the rules
            given"`.
        layout_map: the rules.
        plan: the report of `flm.pod.plan`.
        limit_bytes: what a device may hold.
    """

    name: str
    layout_map: LayoutMap
    plan: PodReport
    limit_bytes: int

    @property
    def seconds(self) -> float:
        """The time of a step, for comparing: nothing overlaps, and nothing was timed.

        The collectives at the speed of the links, 2 µs for each, and the matrix
        products at the peak of the device or, if that takes longer, one read of the
        arguments and of what the collectives move.
        """
        report, where = self.plan, self.plan.topology
        chip = ASSUMED if where is None else where.generation
        links = sum(report.seconds_bound.values())
        if where is None and chip.link_bytes_per_second is not None:
            links = self.sent_bytes / (2 * chip.link_bytes_per_second)
        moved = sum(one.bytes_per_step for one in report.collectives)
        starts = sum(one.executions for one in report.collectives) * _SECONDS_EACH
        read = (report.memory.at_rest_bytes + moved) / chip.hbm_bytes_per_second
        return links + starts + max(report.flops_per_device / chip.flops, read)

    @property
    def sent_bytes(self) -> int:
        """What a device sends in a step."""
        return self.plan.wire_bytes()

    @property
    def held_bytes(self) -> int:
        """The peak of memory of a device, or what is at rest where that is unknown."""
        return self.plan.memory.peak_bytes or self.plan.memory.at_rest_bytes

    @property
    def fits(self) -> bool:
        """Whether a device can hold it, as far as that is known."""
        return self.plan.fits is not False and self.held_bytes <= self.limit_bytes


def best_first(choices: Iterable[Choice]) -> tuple[Choice, ...]:
    """What fits by time, of equal times by memory; then the rest by memory."""
    fitting, rest = [], []
    for choice in sorted(choices, key=operator.attrgetter("held_bytes")):
        (fitting if choice.fits else rest).append(choice)
    least = min((choice.seconds for choice in fitting), default=0.0)
    fitting.sort(key=lambda choice: max(choice.seconds, least * (1 + _EQUAL)))
    return (*fitting, *rest)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suggestion(Shown):
    """Rules for a step on a mesh, from `flm.suggest`; print it.

    Attributes:
        step: name of the step.
        tried: the layouts that were tried, the best first.
        why: one sentence.
        notes: what else to know.
        took_seconds: wall-clock seconds of the whole call.
    """

    __module__ = "flax_layoutmap"
    step: str
    tried: tuple[Choice, ...]
    why: str
    notes: tuple[str, ...] = ()
    took_seconds: float = dataclasses.field(default=0.0, compare=False)

    @property
    def layout_map(self) -> LayoutMap:
        """The rules; `layout_map.to_file("rules.toml")` keeps them."""
        return self.tried[0].layout_map

    @property
    def plan(self) -> PodReport:
        """The report of the step with these rules."""
        return self.tried[0].plan

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh, without devices."""
        return self.plan.mesh

    @property
    def fits(self) -> bool:
        """Whether a device can hold the step, as far as that is known."""
        return self.tried[0].fits

    @property
    def _is_compiled(self) -> bool:
        """Whether libtpu was asked, which knows the peak of memory."""
        return self.plan.memory.peak_bytes is not None

    def _lines(self, width: int | None) -> "Iterator[Text]":
        from rich.text import Text

        axes, where = self.mesh.axis_names, self.plan.topology
        place = f" ({where})" if where is not None else ""
        heading = f"suggestion for {self.step} on mesh {self.mesh}{place}"
        yield from coloured_lines(
            [*wrapped([f"{heading}: {self.mesh.size} devices", self.why], width), ""],
            axes,
        )
        if self.tried[0].name != GIVEN:
            yield from map(Text, [*as_code(self.layout_map.freeze()), ""])
        yield from coloured_grid(self._table(), axes)
        yield from coloured_lines(["", *wrapped([*self._notes()], width)], axes)

    def _table(self) -> Grid:
        memory = ("at rest", "peak") if self._is_compiled else ("at rest",)
        rows = []
        for choice in self.tried:
            held = human_bytes(choice.held_bytes)
            cells = [
                choice.name,
                seconds_text(choice.seconds),
                human_bytes(choice.sent_bytes),
                human_bytes(choice.plan.memory.at_rest_bytes),
            ]
            cells[3 + self._is_compiled :] = [held + ", too much" * (not choice.fits)]
            rows.append(Line(tuple(cells), mark="" if choice.fits else "warning"))
        names = ("layout", "a step", "sends", *memory)
        return Grid(names, (False, *[True] * (len(names) - 1)), tuple(rows))

    def _notes(self) -> Iterator[str]:
        yield from self.notes
        yield f"limit of memory: {human_bytes(self.tried[0].limit_bytes)} per device"
        if self.plan.topology is None:
            yield (
                f"assumed: speed and memory of {ASSUMED.name}, and links of its own "
                'for each axis; for others, topology="v5e:4x4"'
            )
        yield (
            "how sure: nothing was timed; a time is that of the collectives, one after "
            "the other, and of the matrix products at the peak of the device"
        )
        asked = "libtpu" if self._is_compiled else "XLA's partitioner"
        yield f"asked: {asked}; took {self.took_seconds:.1f} s"

    def to_json(self) -> dict[str, Any]:
        """Return the rules and what was tried as plain JSON values, schema 2."""
        where = self.plan.topology
        return {
            "schema": 2,
            "step": self.step,
            "mesh": mesh_to_json(self.mesh),
            "topology": None if where is None else str(where),
            "fits": self.fits,
            "why": self.why,
            "tried": [
                {
                    "name": choice.name,
                    "fits": choice.fits,
                    "seconds": choice.seconds,
                    "sent_bytes": choice.sent_bytes,
                    "at_rest_bytes": choice.plan.memory.at_rest_bytes,
                    "peak_bytes": choice.plan.memory.peak_bytes,
                    "limit_bytes": choice.limit_bytes,
                    "rules": choice.layout_map.to_json(),
                }
                for choice in self.tried
            ],
            "notes": list(self.notes),
            "took_seconds": self.took_seconds,
        }

    def __str__(self) -> str:
        return self.report(width=80)

    def __repr__(self) -> str:
        seconds = seconds_text(self.tried[0].seconds)
        return f"<Suggestion for {self.step} on {self.mesh}: {seconds} a step>"
