"""Suggestion: rules that were found, with their cost beside that of others."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any

from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._core.mesh import DeviceMesh
from flax_layoutmap._core.topologies import Topology
from flax_layoutmap._layout_map import LayoutMap
from flax_layoutmap._rules.serialise import mesh_to_json
from flax_layoutmap._show.table import (
    Grid,
    markdown_list,
    markdown_table,
    markdown_text,
)
from flax_layoutmap._show.terminal import (
    NOTEBOOK_WIDTH,
    as_html,
    coloured_grid,
    coloured_lines,
    show,
    wrapped,
)
from flax_layoutmap._suggest import report_text
from flax_layoutmap._suggest.price import ASSUMED, Cost, cost_of_report
from flax_layoutmap._suggest.rules import as_code
from flax_layoutmap._suggest.search import Step
from flax_layoutmap.pod._report import Format, PodReport
from flax_layoutmap.pod._report_text import not_read, seconds_text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

_NOT_COUNTED = (
    "not counted: sending while computing, what the compiler merges or moves, work "
    "other than matrix products"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """Rules for a step and what it costs with them; one column of a `Suggestion`.

    Attributes:
        layout_map: the rules.
        estimate: the cost as the search counts it, by Shardy's passes.
        plan: `flm.pod.plan` of the rules, by XLA's partitioner, or `flm.pod.compile`
            with `check="compile"`; None without a check.
    """

    layout_map: LayoutMap
    estimate: Cost
    plan: PodReport | None = None

    @property
    def cost(self) -> Cost:
        """The cost by the check, or the estimate without one.

        The partitioner does not know the peak of memory, which is then the estimate.
        """
        if self.plan is None:
            return self.estimate
        peak = self.plan.memory.peak_bytes or self.estimate.peak_bytes
        return dataclasses.replace(cost_of_report(self.plan), peak_bytes=peak)

    @property
    def checked_by(self) -> str:
        """Who made the plan."""
        is_compiled = self.plan is not None and self.plan.engine == "compile"
        return "the compiler for TPUs" if is_compiled else "XLA's partitioner"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suggestion:
    """Rules for a step on a mesh, from `flm.suggest`; print it.

    Attributes:
        choices: `"suggested"`, and what it was compared with: `"runner-up"` (other axes
            for the batch), `"full sharding"` (the batch over all axes that it
            divides by, each large parameter over all axes), `"today"` (the rules that
            were given); each as far as there is one.
        step: name of the step.
        topology: the slices, or None.
        limit_bytes: the limit of memory of one device.
        trail: the stages of the search, with the best of each.
        is_complete: whether the search ended by itself.
        notes: what else is worth a look.
        took_seconds: how long it took.
        explained: what `explain` calls; None in a copy or a pickle.
    """

    __module__ = "flax_layoutmap"
    choices: Mapping[str, Choice]
    step: str
    topology: Topology | None
    limit_bytes: int
    trail: tuple[Step, ...]
    is_complete: bool
    notes: tuple[str, ...]
    took_seconds: float = dataclasses.field(default=0.0, compare=False)
    explained: Callable[[str], str] | None = dataclasses.field(compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """What is copied or pickled: all but the program, which `explain` needs."""
        return {**self.__dict__, "explained": None}

    @property
    def layout_map(self) -> LayoutMap:
        """The rules; `layout_map.to_file("rules.toml")` keeps them."""
        return self.choices["suggested"].layout_map

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh, without devices."""
        mesh = self.layout_map.device_mesh
        assert mesh is not None
        return mesh

    @property
    def cost(self) -> Cost:
        """What a step costs with them."""
        return self.choices["suggested"].cost

    @property
    def plan(self) -> PodReport | None:
        """`flm.pod.plan` or `flm.pod.compile` of the rules; None without a check."""
        return self.choices["suggested"].plan

    @property
    def fits(self) -> bool:
        """Whether the estimated peak of memory is below the limit."""
        return report_text.fits(self.cost, self.limit_bytes)

    @property
    def is_today_better(self) -> bool:
        """Whether to keep the current rules, as the report then says."""
        return report_text.is_today_better(self._costs, self.limit_bytes)

    @property
    def _costs(self) -> dict[str, Cost]:
        return {name: one.cost for name, one in self.choices.items()}

    def explain(self, path: str) -> str:
        """Tell what the best other layout of a parameter would cost.

        After an interrupt it may cost less than the suggested one.

        Args:
            path: the path of the parameter, or the end of it.

        Raises:
            KeyError: no parameter has this path, or several end with it.
            LayoutError: this is a copy, or was pickled.
        """
        if self.explained is None:
            raise LayoutError(
                "explain has no program to price layouts of: a copy of a suggestion, "
                "or one that was pickled, is without; use flm.suggest(step, …).explain"
            )
        return self.explained(path)

    # ------------------------------------------------------------------- output

    def report(self, format: Format = "text", *, width: int | None = None) -> str:
        """Return the rules as code, the costs in a table, and notes.

        Args:
            format: `"text"`, `"markdown"`, or `"json"` (schema 1).
            width: of the text, in characters; None for 80.

        Raises:
            LayoutError: there is no such format.
        """
        if format == "json":
            return json.dumps(self.to_json(), indent=1)
        if format == "text":
            heading, code, grid, notes = self._parts(width or report_text.WIDTH)
            lines = "\n".join(heading), code, grid.text(), "\n".join(notes)
            return "\n\n".join(lines)
        if format == "markdown":
            (title, *heading), code, grid, notes = self._parts(None)
            fenced = f"```python\n{code}\n```"
            return "\n\n".join(
                [
                    f"**{markdown_text(title)}**",
                    markdown_list(heading),
                    fenced,
                    markdown_table(grid, ()),
                    markdown_list(notes),
                ]
            )
        raise LayoutError(
            f'format must be "text", "markdown" or "json", got {format!r}'
        )

    def show(self, file: IO[str] | None = None) -> None:
        """Print the report, in colours on a terminal.

        Args:
            file: where to; None for standard output.
        """
        show(self._coloured, lambda width: self.report(width=width), file)

    def _coloured(self, width: int) -> "Iterator[Text]":
        """The lines of the text for rich; without colours, those of the text."""
        from rich.text import Text

        axes = self.mesh.axis_names
        heading, code, grid, notes = self._parts(width)
        yield from coloured_lines([*heading, ""], axes)
        yield from map(Text, [*code.splitlines(), ""])
        yield from coloured_grid(grid, axes)
        yield from coloured_lines(["", *notes], axes)

    def _parts(self, width: int | None) -> tuple[list[str], str, Grid, list[str]]:
        """Title and verdict, the rules as code, the table, notes."""
        where = "" if self.topology is None else f" ({self.topology})"
        title = (
            f"suggestion for {self.step} on mesh {self.mesh}{where}: "
            f"{self.mesh.size} devices"
        )
        given = self._costs, self.limit_bytes, self.is_complete
        verdict = [*report_text.verdict(*given)]
        if not self.is_complete:
            verdict.insert(0, "interrupted: this is the best so far")
        heading = wrapped([title, *verdict], width)
        code = as_code(self.layout_map.freeze())
        if self.is_today_better:
            code = f"# found by the search; the current rules are better\n{code}"
        notes = wrapped([*self._notes()], width)
        return heading, code, report_text.table(self._costs), notes

    def _notes(self) -> Iterator[str]:
        yield from self.notes
        yield from self._how_sure()
        if self.topology is None:
            yield (
                f"assumed: speed and memory of {ASSUMED.name}, and links of its own "
                'for each axis; for others, topology="v5e:4x4"'
            )
        yield _NOT_COUNTED
        tried, took = self.trail[-1].tried, self.took_seconds
        yield f"tried: {tried} layouts, took {took:.1f} s; the best after each stage:"
        for step in self.trail:
            yield f"  {step.what}: {seconds_text(step.seconds)}"

    def _how_sure(self) -> Iterator[str]:
        suggested = self.choices["suggested"]
        if suggested.plan is None:
            yield (
                "how sure: nothing was timed; all figures are estimates of the search, "
                "not checked"
            )
            return
        peak = "an estimate, too"
        if suggested.plan.memory.peak_bytes is not None:
            peak = "the compiler's own"
        yield (
            "how sure: nothing was timed; a step is estimated at "
            f"{seconds_text(self.cost.seconds)} with the collectives that "
            f"{suggested.checked_by} makes, and at "
            f"{seconds_text(suggested.estimate.seconds)} with those that the search "
            f"expected; memory at the peak is {peak}"
        )
        for what in not_read(suggested.plan):
            yield f"unrecognised: {what}"

    def to_json(self) -> dict[str, Any]:
        """Return the rules, costs and trail as plain JSON values, schema 1."""
        choices = {
            name: {
                "rules": one.layout_map.to_json(),
                "is_checked": one.plan is not None,
                "seconds": one.cost.seconds,
                **dataclasses.asdict(one.cost),
            }
            for name, one in self.choices.items()
        }
        return {
            "schema": 1,
            "step": self.step,
            "mesh": mesh_to_json(self.mesh),
            "topology": None if self.topology is None else str(self.topology),
            "fits": self.fits,
            "limit_bytes": self.limit_bytes,
            "is_complete": self.is_complete,
            "choices": choices,
            "notes": list(self.notes),
            "trail": [dataclasses.asdict(step) for step in self.trail],
            "took_seconds": self.took_seconds,
        }

    def __rich_console__(
        self, console: "Console", options: "ConsoleOptions"
    ) -> "Iterator[Text]":
        return self._coloured(options.max_width)

    def _repr_html_(self) -> str:
        return as_html(self._coloured(NOTEBOOK_WIDTH))

    def __str__(self) -> str:
        return self.report()

    def __repr__(self) -> str:
        return (
            f"<Suggestion for {self.step} on {self.mesh}: "
            f"{seconds_text(self.cost.seconds)} a step>"
        )
