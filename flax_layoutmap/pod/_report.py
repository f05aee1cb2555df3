"""PodReport: the result of a plan or a compile, with assertions for tests."""

import dataclasses
import json
import re
from collections.abc import Collection, Iterable, Sequence
from typing import IO, TYPE_CHECKING, Any, Literal

from flax_layoutmap._core.errors import LayoutError, bullet_list, did_you_mean
from flax_layoutmap._show.table import human_bytes
from flax_layoutmap._show.terminal import NOTEBOOK_WIDTH, as_html, show
from flax_layoutmap.pod import _report_text
from flax_layoutmap.pod._records import KINDS, Collective, Findings, Kind

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text


Format = Literal["text", "markdown", "json"]

# Collectives that send fewer bytes than this in a step do not count for `expect`, such
# as the mean of a loss or the norm of gradients.
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

    def _repr_html_(self) -> str:
        return as_html(_report_text.coloured(self, NOTEBOOK_WIDTH))

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
            _check_axis(self, axis)
        if kind is not None:
            _check_kind(kind)
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
        wanted = {kinds} if isinstance(kinds, str) else set(kinds)
        for kind in wanted:
            _check_kind(kind)
        _check_axis(self, axis)
        every = [one for one in self.collectives if _may_be_over(one, axis)]
        large = _large(every, small_bytes)
        other = [one for one in large if one.kind not in wanted]
        missing = sorted(wanted - {one.kind for one in large if axis in one.axes})
        lines = _report_text.lines_of(other)
        lines += [f"{kind}: expected, and none runs over it" for kind in missing]
        if lines:
            raise AssertionError(
                f"over axis {axis!r} of mesh {self.mesh} {self.step} was expected to "
                f"run {', '.join(sorted(wanted)) or 'no collectives'}:\n"
                f"{bullet_list(lines)}"
            )
        _check_all_read(self, unrecognised)

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
        given = {"path": path, "kind": kind, "axis": axis, "source": source}
        what = ", ".join(f"{key}={value!r}" for key, value in given.items() if value)
        if not what:
            raise LayoutError(
                'forbid what? pass path="embed", kind="all-gather", axis="tensor" or '
                'source="model.py:36"'
            )
        _check_pattern("source", source)
        _check_pattern("path", path)
        if kind is not None:
            _check_kind(kind)
        if axis is not None:
            _check_axis(self, axis)
        _check_path(self, path)
        _check_source(self, source)
        some = [
            one
            for one in self.collectives
            if (axis is None or _may_be_over(one, axis))
            and kind in (None, one.kind)
            and any(_matches(path, leaf) for leaf in (one.path, *one.joined))
            and _matches(source, one.source)
        ]
        found = _large(some, small_bytes)
        if found:
            raise AssertionError(
                f"{self.step} on mesh {self.mesh} was to have no collective with "
                f"{what}:\n{bullet_list(_report_text.lines_of(found))}"
            )
        _check_all_read(self, unrecognised)

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
        _check_pattern("pattern", pattern)
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


def _may_be_over(one: Collective, axis: str) -> bool:
    """Whether a collective may run over an axis: its own axes may be unknown."""
    return not one.axes or axis in one.axes


def _large(some: Iterable[Collective], small_bytes: int) -> list[Collective]:
    """Those of a kind and axes that send at least so many bytes together in a step."""
    alike: dict[tuple[str, tuple[str, ...]], list[Collective]] = {}
    for one in some:
        alike.setdefault((one.kind, one.axes), []).append(one)
    return [
        one
        for members in alike.values()
        if sum(member.wire_bytes_per_step for member in members) >= small_bytes
        for one in members
    ]


def _check_all_read(report: PodReport, unrecognised: bool) -> None:
    """Raise AssertionError if a part of the program was not read."""
    if report.unrecognised and not unrecognised:
        parts = bullet_list(_report_text.not_read(report))
        raise AssertionError(
            f"the {report.engine} found nothing against it, but did not read all of "
            f"{report.step} on mesh {report.mesh}:\n{parts}\n"
            "pass unrecognised=True where these may do what they like"
        )


def _check_path(report: PodReport, path: str | None) -> None:
    if not path or not report.paths:
        return
    if not any(re.search(path, one) for one in report.paths):
        parts = {part for one in report.paths for part in (one, *one.split("/"))}
        raise LayoutError(
            f"no leaf of the arguments of {report.step} is like {path!r}"
            f"{did_you_mean(path, parts)}, so that nothing would be forbidden"
        )


def _check_source(report: PodReport, source: str | None) -> None:
    """Raise LayoutError for a source without operations; only a plan lists them."""
    if not source or report.values is None:
        return
    known = [one.source for one in (*report.collectives, *report.reshards)]
    if any(line is not None and _matches(source, line) for line in known):
        return
    lines = {text.partition(" ")[2] for text, _, _ in report.values("")} - {""}
    if not any(re.search(source, line) for line in lines):
        parts = {part for line in lines for part in (line, *line.split(" "))}
        raise LayoutError(
            f"no operation of {report.step} comes from a line like {source!r}"
            f"{did_you_mean(source, parts)}, so that nothing would be forbidden"
        )


def _check_axis(report: PodReport, axis: str) -> None:
    """Raise LayoutError for an axis that the mesh does not have."""
    names: Sequence[str] = report.mesh.axis_names
    if axis not in names:
        raise LayoutError(
            f"the mesh {report.mesh} has no axis {axis!r}{did_you_mean(axis, names)}"
        )


def _check_kind(kind: str) -> None:
    """Raise LayoutError for an unknown kind."""
    if kind not in KINDS:
        raise LayoutError(
            f"there is no collective {kind!r}{did_you_mean(kind, KINDS)}; the kinds "
            f"are {', '.join(KINDS)}"
        )


def _check_pattern(name: str, pattern: str | None) -> None:
    """Raise LayoutError for an invalid regular expression."""
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise LayoutError(
            f"{name}={pattern!r} is no regular expression: {error}; write a literal "
            "bracket as \\(, or use re.escape"
        ) from error


def _matches(pattern: str | None, text: str | None) -> bool:
    if pattern is None:
        return True
    return text is not None and re.search(pattern, text) is not None
