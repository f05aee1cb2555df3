"""Suggestion: the rules that were found, and what was tried."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from flax_layoutmap._layout_map import LayoutMap
from flax_layoutmap._lint.issue import numbered, quoted
from flax_layoutmap._show.table import Grid, Line, human_bytes
from flax_layoutmap._show.terminal import Shown, coloured_grid, coloured_lines, wrapped
from flax_layoutmap.pod import PodReport
from flax_layoutmap.pod._report_text import seconds_text
from flax_layoutmap.pod._topologies import GENERATIONS

if TYPE_CHECKING:
    from rich.text import Text

ASSUMED = GENERATIONS["v5p"]  # without a topology
GIVEN = "the rules given"
_SECONDS_EACH = 2e-6  # of each collective, whatever its size


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """Rules that were tried, and the report of a step with them.

    Attributes:
        name: what each axis does (`"data over fsdp"`), or `"the rules given"`.
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
        """The time of a step, for comparing: nothing overlaps, nothing was timed."""
        report, where = self.plan, self.plan.topology
        chip = ASSUMED if where is None else where.generation
        links = sum(report.seconds_bound.values())
        if where is None and chip.link_bytes_per_second is not None:
            links = report.wire_bytes() / (2 * chip.link_bytes_per_second)
        moved = sum(sent.bytes_per_step for sent in report.collectives)
        starts = sum(sent.executions for sent in report.collectives) * _SECONDS_EACH
        read = (report.memory.at_rest_bytes + moved) / chip.hbm_bytes_per_second
        return links + starts + max(report.flops_per_device / chip.flops, read)

    @property
    def held_bytes(self) -> int:
        """The peak of memory of a device, or what is at rest where that is unknown."""
        return self.plan.memory.peak_bytes or self.plan.memory.at_rest_bytes

    @property
    def fits(self) -> bool:
        """Whether a device can hold it, as far as that is known."""
        return self.plan.fits is not False and self.held_bytes <= self.limit_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suggestion(Shown):
    """Rules for a step on a mesh, from `flm.suggest`; print it.

    Attributes:
        step: name of the step.
        tried: the layouts that were tried, the best first.
        why: one sentence.
        notes: what else to know.
    """

    __module__ = "flax_layoutmap"
    step: str
    tried: tuple[Choice, ...]
    why: str
    notes: tuple[str, ...] = ()

    @property
    def layout_map(self) -> LayoutMap:
        """The rules; `layout_map.to_file("rules.toml")` keeps them."""
        return self.tried[0].layout_map

    @property
    def plan(self) -> PodReport:
        """The report of the step with these rules."""
        return self.tried[0].plan

    @property
    def fits(self) -> bool:
        """Whether a device can hold the step, as far as that is known."""
        return self.tried[0].fits

    def _lines(self, width: int | None) -> "Iterator[Text]":
        mesh, where = self.plan.mesh, self.plan.topology
        axes = mesh.axis_names
        place = f" ({where})" if where is not None else ""
        heading = f"suggestion for {self.step} on mesh {mesh}{place}"
        first = [f"{heading}: {mesh.size} devices", self.why]
        yield from coloured_lines([*wrapped(first, width), ""], axes)
        if self.tried[0].name != GIVEN:
            yield from coloured_lines([*wrapped(self._code(), None), ""], axes)
        yield from coloured_grid(self._table(), axes)
        yield from coloured_lines(["", *wrapped(self._remarks(), width)], axes)

    def _code(self) -> list[str]:
        """The lines that make a map of these rules; they run without the devices."""
        rules = self.layout_map.freeze()
        mesh = quoted(str(rules.mesh))
        return [
            f"# on the devices: mesh = flm.DeviceMesh({mesh})",
            f"mesh = flm.DeviceMesh.abstract({mesh})",
            f"layout_map = flm.LayoutMap(mesh, batch={rules.batch})".replace("'", '"'),
            *(
                line if {*rule.pattern} & {*"\"'"} else line.replace("'", '"')
                for rule in numbered(rules)
                for line in [rule.with_pattern(rule.pattern)]
            ),
        ]

    def _table(self) -> Grid:
        lines = []
        for choice in self.tried:
            held = human_bytes(choice.held_bytes) + ", too much" * (not choice.fits)
            sent = human_bytes(choice.plan.wire_bytes())
            cells = (choice.name, seconds_text(choice.seconds), sent, held)
            lines.append(Line(cells, mark="" if choice.fits else "warning"))
        names = ("layout", "a step", "sends", "holds")
        return Grid(names, (False, True, True, True), tuple(lines))

    def _remarks(self) -> Iterator[str]:
        yield from self.notes
        yield f"limit of memory: {human_bytes(self.tried[0].limit_bytes)} per device"
        yield f"asked: {self.plan.engine}; nothing was timed"
        if self.plan.topology is None:
            links = f"a {ASSUMED.name} whose axes each have links"
            yield f"assumed: {links}; pass topology= for another"

    def to_json(self) -> dict[str, Any]:
        """Return the rules and what was tried as plain JSON values, schema 2."""
        figures = ("name", "fits", "seconds", "held_bytes", "limit_bytes")
        tried = [
            {name: getattr(choice, name) for name in figures}
            | {"rules": choice.layout_map.to_json(), "plan": choice.plan.to_json()}
            for choice in self.tried
        ]
        words = {"step": self.step, "why": self.why, "notes": list(self.notes)}
        return {"schema": 2, **words, "fits": self.fits, "tried": tried}

    def __str__(self) -> str:
        return self.report(width=80)

    def __repr__(self) -> str:
        seconds = seconds_text(self.tried[0].seconds)
        return f"<Suggestion for {self.step} on {self.plan.mesh}: {seconds} a step>"
