"""The records of a PodReport, and its text."""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from flax_layoutmap._core.errors import visible
from flax_layoutmap._show.table import Grid, Line, cut_path, fold, human_bytes
from flax_layoutmap._show.terminal import coloured_grid, coloured_lines, wrapped

if TYPE_CHECKING:
    from rich.text import Text

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
        kind: for example `"all-reduce"`.
        axes: the mesh axes it runs over; empty if unknown.
        bytes: payload of an execution on one device, before the wire factor: the
            operand of an all-reduce, a reduce-scatter or a permute, the result of an
            all-gather or an all-to-all.
        wire_bytes: bytes that one device sends in an execution.
        executions: how often it runs in a step, including loops.
        dtype: for example `"bfloat16"`.
        shape: shape of the payload on one device.
        path: the argument leaf that it moves, or whose gradient it sums; None for
            others, such as activations.
        joined: other leaves that it moves or sums together with `path`.
        source: `"model.py:36 Attention.__call__"`; None if unknown.
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
    def paths(self) -> tuple[str, ...]:
        """All leaves that it moves or sums."""
        return () if self.path is None else (self.path, *self.joined)

    @property
    def bytes_per_step(self) -> int:
        """Payload of all executions, on one device."""
        return self.bytes * self.executions

    @property
    def wire_bytes_per_step(self) -> int:
        """Bytes that one device sends in a step."""
        return self.wire_bytes * self.executions


def axes_text(collective: Collective) -> str:
    """`fsdp`, `data+fsdp`, `data (DCN)`; `?` if they are unknown."""
    text = "+".join(collective.axes) or "?"
    return f"{text} (DCN)" if collective.over_dcn else text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one device.

    Attributes:
        at_rest: role of the arguments (`"parameter"`, `"optimizer"`, `"data"`,
            `"other"`) → bytes of their shards in the memory of the device.
        host_at_rest: the same for shards that a `memory_kind` keeps in host memory.
        temporary_bytes: further memory that the step needs; None without libtpu.
        peak_bytes: everything that libtpu allocates, including gaps; None without it.
        limit_bytes: the compiler's limit on the device; None without a topology.
        note: memory that the figures leave out.
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


# --------------------------------------------------------------------------- text

# A `PodReport`, whose module imports this one.
Report = Any
# Rows of the second table; the others are in the JSON form.
_ROWS = 20
# The least width of a cell, in characters.
_CELL = 16


def lines(report: Report, width: int | None) -> "Iterator[Text]":
    axes = report.mesh.axis_names
    yield from coloured_lines([*wrapped([title(report)], width), ""], axes)
    yield from coloured_grid(_by_axis(report), axes)
    rows = grouped(report.collectives)
    if rows:
        yield from coloured_lines([""], axes)
        yield from coloured_grid(_largest(rows[:_ROWS], width), axes)
    if more := rows[_ROWS:]:
        size = human_bytes(sum(row.sent for row in more))
        yield from coloured_lines([f"… and {len(more)} more, {size}"], axes)
    yield from coloured_lines(["", *wrapped(_remarks(report), width)], axes)


def title(report: Report) -> str:
    where = f" ({report.topology})" if report.topology else ""
    devices = "1 device" if report.mesh.size == 1 else f"{report.mesh.size} devices"
    return visible(
        f"plan of {report.step} on mesh {report.mesh}{where}: {devices}, by "
        f"{report.engine}"
    )


# ------------------------------------------------------------------------- tables


def sums_by(
    collectives: Iterable[Collective], key: Callable[[Collective], Any]
) -> dict[Any, tuple[int, int, int]]:
    """Key → executions, payload and sent bytes of its collectives in a step."""
    sums: dict[Any, tuple[int, int, int]] = {}
    for each in collectives:
        times, payload, sent = sums.get(key(each), (0, 0, 0))
        payload, sent = payload + each.bytes_per_step, sent + each.wire_bytes_per_step
        sums[key(each)] = times + each.executions, payload, sent
    return sums


def _by_axis(report: Report) -> Grid:
    """A row per axes and kind, sorted by bytes (largest first)."""
    sums = sums_by(report.collectives, lambda each: (axes_text(each), each.kind))
    by_axes: collections.Counter[str] = collections.Counter()
    for (axes, _), (_, _, sent) in sums.items():
        by_axes[axes] += sent
    order = sorted(sums, key=lambda key: (-by_axes[key[0]], key[0], -sums[key][2]))
    rows, bounds = [], dict(report.seconds_bound)
    for axes, kind in order:
        times, payload, sent = sums[axes, kind]
        bound = bounds.pop(axes, None)  # once for all kinds
        seconds = "" if bound is None else seconds_text(bound)
        sizes = human_bytes(payload), human_bytes(sent)
        rows.append((axes, kind, str(times), *sizes, seconds))
    names = ("axes", "kind", "times", "payload", "sent/device", "at least")
    shown = 6 if report.seconds_bound else 5
    written = tuple(Line(cells[:shown]) for cells in rows)
    return Grid(names[:shown], (False, False, True, True, True, True)[:shown], written)


def _largest(rows: "Sequence[Row]", width: int | None) -> Grid:
    names = ("path", "axes", "kind", "source", "times", "sent/device")
    right = (False, False, False, False, True, True)
    cells = [(*map(str, row[:-1]), human_bytes(row.sent)) for row in rows]
    grid = Grid(names, right, tuple(map(Line, cells)))
    if width is None or grid.width() <= width:
        return grid
    widths = grid.widths()
    short = max((width - grid.width() + widths[0] + widths[3]) // 2, _CELL)
    cells = [
        (cut_path(c[0], short), *c[1:3], cut_path(c[3], short), *c[4:]) for c in cells
    ]
    return Grid(names, right, tuple(map(Line, cells)))


class Row(NamedTuple):
    """The same collective in all layers."""

    path: str
    axes: str
    kind: str
    source: str
    times: int
    sent: int


def grouped(collectives: Sequence[Collective]) -> list[Row]:
    """A row per path, source, kind and axes; layers are folded."""
    sums = sums_by(
        collectives,
        lambda c: (c.path or "-", axes_text(c), c.kind, c.source or ""),
    )
    alike: dict[tuple[Any, ...], list[str]] = {}
    for (path, *rest), (times, _, sent) in sums.items():
        alike.setdefault((*rest, times, sent), []).append(path)
    rows = []
    for (axes, kind, source, times, sent), paths in alike.items():
        for some in fold(paths, [0] * len(paths)):
            n = len(some.members)
            rows.append(Row(some.cell, axes, kind, source, n * times, n * sent))
    return sorted(rows, key=lambda row: (-row.sent, row.path, row.kind, row.source))


def lines_of(collectives: Sequence[Collective]) -> list[str]:
    """Collectives as lines of a message."""
    return [
        f"{row.kind} over {row.axes} of {row.path}"
        + (f" at {row.source}" if row.source else "")
        + f": {row.times} times, {human_bytes(row.sent)} sent per device in a step"
        for row in grouped(collectives)
    ]


def seconds_text(seconds: float) -> str:
    """`0.0123` → `12 ms`."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.2g} µs"


# ------------------------------------------------------------------------ remarks


def _remarks(report: Report) -> Iterator[str]:
    yield from _memory(report)
    if report.flops_per_device:
        yield _products(report)
    if not report.collectives:
        yield "collectives: none"
    elif report.seconds_bound:
        yield "at least: by bandwidth alone; no latency, no overlap"
    if report.engine == "partitioner" and report.collectives:
        yield (
            "accuracy: by XLA's partitioner, within 25 % of libtpu for most axes; "
            "libtpu, where it is installed and has a topology, gives exact figures"
        )
    yield from (f"unread: {what} ({times})" for what, times in report.unread.items())
    yield from (f"warning: {text}" for text in report.warnings)
    yield f"took {report.took_seconds:.1f} s"


def _by_role(sizes: Mapping[str, int]) -> str:
    """`3 MiB per device (parameter 1 MiB, optimizer 2 MiB)`."""
    parts = [f"{role} {human_bytes(size)}" for role, size in sizes.items()]
    listed = f" ({', '.join(parts)})" if len(parts) > 1 else ""
    return f"{human_bytes(sum(sizes.values()))} per device{listed}"


def _memory(report: Report) -> Iterator[str]:
    memory = report.memory
    yield f"at rest: {_by_role(memory.at_rest)}"
    if memory.host_at_rest:
        yield f"at rest in host memory: {_by_role(memory.host_at_rest)}"
    if memory.temporary_bytes is not None:
        yield f"temporary: {human_bytes(memory.temporary_bytes)} per device"
    if memory.peak_bytes is not None:
        yield f"peak: {human_bytes(memory.peak_bytes)} per device"
    if memory.limit_bytes is not None:
        head = memory.headroom_bytes or 0
        said = "left" if head >= 0 else "short"
        verdict = "whether it fits is unknown"
        if report.fits is not None:
            verdict = "it fits" if report.fits else "it does not fit"
        limit = human_bytes(memory.limit_bytes)
        yield f"limit: {limit} per device, {human_bytes(abs(head))} {said}; {verdict}"
    if memory.note:
        yield f"memory: {memory.note}"


def _products(report: Report) -> str:
    text = f"matrix products: {report.flops_per_device:.3g} operations per device"
    if report.compute_seconds is not None:
        text += f", at least {seconds_text(report.compute_seconds)}"
    even = report.flops_total / report.mesh.size
    ratio = report.flops_per_device / even if even else 1.0
    if ratio > 1.005:
        text += f"; {ratio:.2f} times an even share: devices duplicate work"
    return text


# --------------------------------------------------------------------- comparison


def comparison(first: Report, second: Report) -> str:
    """Two reports side by side."""
    reports = (first, second)
    figures: dict[str, list[int]] = {
        "at rest": [report.memory.at_rest_bytes for report in reports],
        "operations": [report.flops_per_device for report in reports],
    }
    for at, report in enumerate(reports):
        by_kind = sums_by(report.collectives, lambda c: f"{axes_text(c)} {c.kind}")
        for name, (_, _, sent) in by_kind.items():
            figures.setdefault(name, [0, 0])[at] = sent
    figures["all collectives"] = [report.wire_bytes() for report in reports]
    rows = []
    for name, (before, after) in figures.items():
        text = (lambda n: f"{n:.3g}") if name == "operations" else human_bytes
        if before or after or name in ("at rest", "all collectives"):
            times = f"{after / before:.3g}×" if before else "new"
            change = "same" if before == after else times
            rows.append(Line((name, text(before), text(after), change)))
    names, right = ("per device", "1", "2", "change"), (False, True, True, True)
    table = Grid(names, right, tuple(rows)).text()
    return "\n".join([f"1: {title(first)}", f"2: {title(second)}", "", table])
