"""The lines of a PodReport."""

import collections
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from flax_layoutmap._core.errors import visible
from flax_layoutmap._show.table import Grid, Line, cut_path, fold, human_bytes
from flax_layoutmap._show.terminal import coloured_grid, coloured_lines, wrapped
from flax_layoutmap.pod._records import Collective, axes_text

if TYPE_CHECKING:
    from rich.text import Text

# A `PodReport`, whose module imports this one.
Report = Any
# Rows of the second table; the others are in the JSON form.
_ROWS = 20
# The least width of a cell, in characters.
_CELL = 16


def lines(report: Report, width: int | None) -> "Iterator[Text]":
    """Title, two tables, remarks."""
    axes = report.mesh.axis_names
    largest, more = _largest(report, width)
    yield from coloured_lines([*wrapped([title(report)], width), ""], axes)
    yield from coloured_grid(_by_axis(report), axes)
    if largest.lines:
        yield from coloured_lines([""], axes)
        yield from coloured_grid(largest, axes)
        yield from coloured_lines([more] if more else [], axes)
    yield from coloured_lines(["", *wrapped(_remarks(report), width)], axes)


def title(report: Report) -> str:
    """The title of the report."""
    where = "" if report.platform == "tpu" else f" ({report.platform})"
    if report.topology is not None:
        where = f" ({report.topology})"
    devices = "1 device" if report.mesh.size == 1 else f"{report.mesh.size} devices"
    return visible(
        f"plan of {report.step} on mesh {report.mesh}{where}: {devices}, by "
        f"{report.engine}"
    )


# ------------------------------------------------------------------------- tables


def _by_axis(report: Report) -> Grid:
    """One row per axes and kind, the most bytes first."""
    sums: dict[tuple[str, str], list[int]] = {}
    by_axes: collections.Counter[str] = collections.Counter()
    for collective in report.collectives:
        axes = axes_text(collective)
        row = sums.setdefault((axes, collective.kind), [0, 0, 0])
        row[0] += collective.executions
        row[1] += collective.bytes_per_step
        row[2] += collective.wire_bytes_per_step
        by_axes[axes] += collective.wire_bytes_per_step
    order = sorted(sums, key=lambda key: (-by_axes[key[0]], key[0], -sums[key][2]))
    rows, last = [], None
    for axes, kind in order:
        times, payload, sent = sums[axes, kind]
        bound = report.seconds_bound.get(axes)
        seconds = "" if bound is None or axes == last else seconds_text(bound)
        cells = (axes, kind, str(times), human_bytes(payload), human_bytes(sent))
        rows.append((*cells, seconds))
        last = axes
    names = ("axes", "kind", "times", "payload", "sent/device", "at least")
    shown = 6 if report.seconds_bound else 5
    written = tuple(Line(cells[:shown]) for cells in rows)
    return Grid(names[:shown], (False, False, True, True, True, True)[:shown], written)


def _largest(report: Report, width: int | None) -> tuple[Grid, str]:
    """The collectives that send the most, and a line about the others."""
    rows = grouped(report.collectives)
    names = ("path", "axes", "kind", "source", "times", "sent/device")
    right = (False, False, False, False, True, True)
    shown = [
        (
            row.path,
            row.axes,
            row.kind,
            row.source,
            str(row.times),
            human_bytes(row.sent),
        )
        for row in rows[:_ROWS]
    ]
    grid = Grid(names, right, tuple(map(Line, shown)))
    more = ""
    if len(rows) > _ROWS:
        rest = sum(row.sent for row in rows[_ROWS:])
        more = f"… and {len(rows) - _ROWS} more, {human_bytes(rest)}"
    if width is None or grid.width() <= width:
        return grid, more
    bare = grid.width() - sum(grid.widths()[at] for at in (0, 3))
    room = max((width - bare) // 2, _CELL)
    short = functools.partial(cut_path, width=room)
    fitted = [(short(c[0]), *c[1:3], short(c[3]), *c[4:]) for c in shown]
    return Grid(names, right, tuple(map(Line, fitted))), more


class Row(NamedTuple):
    """Equal collectives of all layers."""

    path: str
    axes: str
    kind: str
    source: str
    times: int
    sent: int


def grouped(collectives: Sequence[Collective]) -> list[Row]:
    """One row per path, source, kind and axes; layers are folded."""
    sums: dict[tuple[str, str, str, str], list[int]] = {}
    for collective in collectives:
        axes, source = axes_text(collective), collective.source or ""
        key = (collective.path or "-", axes, collective.kind, source)
        row = sums.setdefault(key, [0, 0])
        row[0] += collective.executions
        row[1] += collective.wire_bytes_per_step
    alike: dict[tuple[Any, ...], list[str]] = {}
    for (path, *rest), row in sums.items():
        alike.setdefault((*rest, *row), []).append(path)
    rows = []
    for (axes, kind, source, times, sent), paths in alike.items():
        for some in fold(paths, [0] * len(paths)):
            count = len(some.members)
            text = some.text if count == 1 else f"{some.text} ×{count}"
            rows.append(Row(text, axes, kind, source, times * count, sent * count))
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


def _remarks(report: Report) -> list[str]:
    """The lines below the tables."""
    found = [*_memory(report), *_compute(report)]
    if not report.collectives:
        found.append("collectives: none")
    elif report.seconds_bound:
        found.append("at least: by bandwidth alone; no latency, no overlap")
    if report.engine == "partitioner" and report.collectives:
        found.append(_accuracy(report))
    for drift in report.drift:
        before, after = (",".join(map(str, s)) for s in (drift.before, drift.after))
        found.append(
            f"drift: {drift.path} comes in shards of [{before}] and leaves in shards "
            f"of [{after}]; each step moves it back: give jit out_shardings, or use "
            "flm.jit, which keeps it"
        )
    found += [f"unread: {what} ({times})" for what, times in report.unread.items()]
    found += [f"warning: {text}" for text in report.warnings]
    return [*found, f"took {report.took_seconds:.1f} s"]


def _accuracy(report: Report) -> str:
    if report.platform != "tpu":
        return (
            "accuracy: by XLA's partitioner; the compiler of the platform may merge or "
            "split collectives afterwards"
        )
    return (
        "accuracy: by XLA's partitioner, within 25 % of libtpu for most axes; libtpu, "
        "where it is installed and has a topology, gives exact figures"
    )


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


def _compute(report: Report) -> Iterator[str]:
    if not report.flops_per_device:
        return
    seconds = report.compute_seconds
    bound = "" if seconds is None else f", at least {seconds_text(seconds)}"
    even = report.flops_total / report.mesh.size
    ratio = report.flops_per_device / even if even else 1.0
    text = (
        f"matrix products: {report.flops_per_device:.3g} operations per device{bound}"
    )
    if ratio > 1.005:
        text += f"; {ratio:.2f} times an even share: devices duplicate work"
    yield text


# --------------------------------------------------------------------- comparison


def comparison(first: Report, second: Report) -> str:
    """Two reports side by side."""
    reports = (first, second)
    figures: dict[str, list[int]] = {
        "at rest": [report.memory.at_rest_bytes for report in reports],
        "at rest in host memory": [
            sum(report.memory.host_at_rest.values()) for report in reports
        ],
        "operations": [report.flops_per_device for report in reports],
    }
    for at, report in enumerate(reports):
        for each in report.collectives:
            row = figures.setdefault(f"{axes_text(each)} {each.kind}", [0, 0])
            row[at] += each.wire_bytes_per_step
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
