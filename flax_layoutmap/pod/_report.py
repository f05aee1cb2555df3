"""PodReport: the result of a plan or a compile, with assertions for tests."""

import dataclasses
import json
from collections.abc import Collection, Iterable
from typing import IO, TYPE_CHECKING, Any, Literal

from flax_layoutmap._core.errors import LayoutError
from flax_layoutmap._show.table import human_bytes
from flax_layoutmap._show.terminal import show
from flax_layoutmap.pod import _assertions, _report_text
from flax_layoutmap.pod._records import Findings, Kind

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

Format = Literal["text", "markdown", "json"]

# Below this many bytes on the wire in a step, `expect` looks away: the mean of a loss,
# the norm of gradients.
_SMALL = 64 * 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class PodReport(Findings):
    """The collectives, memory, reshards and fit of a step on a mesh.

    Made by `flm.pod.plan` and `flm.pod.compile`.

    Attributes:
        engine: the source: `"plan"` (XLA's partitioner), `"compile"` (the compiler for
            TPUs) or `"estimate"` (Shardy's passes).
        step: name of the step.
        mesh: the mesh, without devices.
        topology: the slices that it is on, or None.
        platform: what the step was lowered for: `"tpu"`, `"cuda"`, `"rocm"` or `"cpu"`.
        fits: whether the compiler accepts it; of a plan, False where what is at rest is
            too much already, else None.
        memory: bytes on one device.
        collectives: in the order of the program.
        reshards: values that a layout or a constraint forces to another sharding;
            parameters that are gathered for use are among the collectives only.
        hosts: what each host holds and reads; empty without a topology.
        flops_per_device: operations of the matrix products of a step, on one device.
        flops_total: the same if no device did the work of another.
        compute_seconds: the least time for them; None without a topology.
        seconds_bound: axes (`"fsdp"`, `"data (DCN)"`) → least time of their
            collectives, bandwidth alone: no latency, no overlap.
        drift: state that leaves the step in another layout than it came in.
        unrecognised: what could not be read in the program → how often.
        unrecognised_at: the same → the lines of the step that it comes from, each once;
            of a plan.
        warnings: what is worth a look.
        took_seconds: how long it took to find out.
        replan: what `with_layout` calls; None but for a plan.
        values: what `shardings` calls; None but for a plan.
        paths: every leaf of the arguments, so that `forbid` knows a path that is none.
    """

    __module__ = "flax_layoutmap.pod"

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: all but the program, which `with_layout` would need."""
        return {**self.__dict__, "replan": None, "values": None}

    # ------------------------------------------------------------------- output

    def report(self, format: Format = "text", *, width: int | None = None) -> str:
        """Return the report as text, Markdown or JSON.

        Args:
            format: `"text"`, `"markdown"`, or `"json"` (schema 1).
            width: of the text, in characters; None for as wide as it gets.

        Raises:
            LayoutError: there is no such format.
        """
        if format == "json":
            return json.dumps(self.to_json(), indent=1)
        if format == "text":
            return _report_text.as_text(self, width)
        if format == "markdown":
            return _report_text.as_markdown(self)
        raise LayoutError(
            f'format must be "text", "markdown" or "json", got {format!r}'
        )

    def show(self, file: IO[str] | None = None) -> None:
        """Print the report, in colours on a terminal.

        Args:
            file: where to; None for standard output.
        """
        show(
            lambda width: _report_text.coloured(self, width),
            lambda width: self.report(width=width),
            file,
        )

    def __rich_console__(
        self, console: "Console", options: "ConsoleOptions"
    ) -> "Iterable[Text]":
        return _report_text.coloured(self, options.max_width)

    def __str__(self) -> str:
        return self.report()

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values, schema 1."""
        return {"schema": 1, **_report_text.as_json(self)}

    # ---------------------------------------------------------------- questions

    def wire_bytes(self, axis: str | None = None, kind: Kind | None = None) -> int:
        """Return the bytes that one device sends in a step.

        Args:
            axis: over this mesh axis only.
            kind: by collectives of this kind only.

        Raises:
            LayoutError: there is no such axis or kind.
        """
        if axis is not None:
            _assertions.check_axis(self, axis)
        if kind is not None:
            _assertions.check_kind(kind)
        return sum(
            one.wire_bytes_per_step
            for one in self.collectives
            if (axis is None or axis in one.axes) and kind in (None, one.kind)
        )

    def expect(
        self,
        *,
        axis: str,
        kinds: Collection[Kind] | Kind,
        small_bytes: int = _SMALL,
        unrecognised: bool = False,
    ) -> None:
        """Assert that exactly these kinds of collectives run over an axis.

        One whose axes are not known counts for every axis.

        Args:
            axis: a mesh axis.
            kinds: such as `{"all-reduce"}`; `set()` for none.
            small_bytes: collectives of one kind over the same axes do not count where
                they send less than this together in a step.
            unrecognised: whether it may pass where not all of the program was read.

        Raises:
            AssertionError: other kinds run over it, or one of them does not; or
                `report.unrecognised` is not empty.
            LayoutError: there is no such axis or kind.
        """
        _assertions.expect(self, axis, kinds, small_bytes, unrecognised)

    def forbid(
        self,
        *,
        path: str | None = None,
        kind: Kind | None = None,
        axis: str | None = None,
        source: str | None = None,
        small_bytes: int = 0,
        unrecognised: bool = False,
    ) -> None:
        """Assert that no collective matches.

        One whose axes are not known counts for every axis.

        Args:
            path: regex, searched in the path of the leaf that is moved.
            kind: such as `"all-gather"`.
            axis: a mesh axis.
            source: regex, searched in the line that it comes from, such as
                `"model.py:36 Attention.__call__"`.
            small_bytes: those of one kind over the same axes do not count where they
                send less than this together in a step.
            unrecognised: whether it may pass where not all of the program was read.

        Raises:
            AssertionError: there is one; all are listed. Or `report.unrecognised` is
                not empty.
            LayoutError: nothing is forbidden, there is no such axis, kind or leaf, or,
                in a plan, nothing comes from such a line.
        """
        _assertions.forbid(self, path, kind, axis, source, small_bytes, unrecognised)

    def compare(self, other: "PodReport") -> str:
        """Compare with another report in a table.

        Args:
            other: of another layout, mesh, or engine.

        Raises:
            LayoutError: it is no report.
        """
        if not isinstance(other, PodReport):
            raise LayoutError(
                f"compare needs another report, got {other!r}; make one with "
                "report.with_layout(layout_map) or flm.pod.plan(step, …)"
            )
        return _report_text.comparison(self, other)

    def with_layout(self, layout_map: Any) -> "PodReport":
        """Plan the same step with other rules, without tracing it again.

        Constraints inside of the model stay as they were traced: rules for activations
        and names have no effect here, and the report warns where they are others.

        Args:
            layout_map: other rules; their mesh must have the same axes, or none.

        Raises:
            LayoutError: this report is none of a plan, or the mesh is another.
            ResolveError: the step's arguments do not fit the rules.
        """
        if self.replan is None:
            raise LayoutError(
                f"a report of {self.engine!r} has no program to lay out again; use "
                "flm.pod.plan(step, …).with_layout(layout_map)"
            )
        return self.replan(layout_map)

    def shardings(self, pattern: str = "") -> list[tuple[str, str, str]]:
        """Return the shardings of the values in the program, by operation.

        Args:
            pattern: regex, searched in `"dot_general model.py:36 Attention.__call__"`.

        Returns:
            For each operation: what it is and where it comes from, its type, its spec.

        Raises:
            LayoutError: this report is none of a plan, or the regex is none.
        """
        _assertions.check_pattern("pattern", pattern)
        if self.values is None:
            raise LayoutError(
                f"a report of {self.engine!r} has no shardings of values; use "
                "flm.pod.plan(step, …).shardings()"
            )
        return self.values(pattern)

    def __repr__(self) -> str:
        sent = human_bytes(self.wire_bytes())
        return (
            f"<PodReport of {self.engine}: {self.step} on {self.mesh}, "
            f"{len(self.collectives)} collectives, {sent} sent per device>"
        )
