"""A PodReport as text, Markdown, colours or plain JSON values."""

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flax_layoutmap._core.errors import visible
from flax_layoutmap._rules.serialise import mesh_to_json
from flax_layoutmap._show.table import (
    Grid,
    Line,
    cut,
    cut_path,
    human_bytes,
    human_share,
    markdown_list,
    markdown_table,
    markdown_text,
)
from flax_layoutmap._show.terminal import coloured_grid, coloured_lines, wrapped
from flax_layoutmap._tree.paths import fold
from flax_layoutmap.pod._records import (
    Collective,
    Drift,
    Findings,
    Host,
    Reshard,
)

if TYPE_CHECKING:
    from rich.text import Text

# Rows of the second table; the others are in the JSON form.
_ROWS = 20
# The least width of a cell, in characters.
_CELL = 16


def as_text(report: Findings, width: int | None) -> str:
    """Title, two tables, remarks."""
    parts = _parts(report, width)
    return "\n".join(
        part.text() if isinstance(part, Grid) else "\n".join(part) for part in parts
    )


def coloured(report: Findings, width: int) -> "Iterator[Text]":
    """The lines of the text for rich; without colours, those of the text."""
    axes = report.mesh.axis_names
    for part in _parts(report, width):
        if isinstance(part, Grid):
            yield from coloured_grid(part, axes)
        else:
            yield from coloured_lines(part, axes)


def _parts(report: Findings, width: int | None) -> Iterator[Grid | list[str]]:
    """Tables, and lines between them."""
    yield [title(report), ""]
    yield _by_axis(report)
    largest, more = _largest(report, width)
    if largest.lines:
        yield [""]
        yield largest
        yield from [[more]] if more else []
    yield ["", *wrapped(remarks(report), width)]


def as_markdown(report: Findings) -> str:
    """The same as Markdown."""
    parts = [f"**{markdown_text(title(report))}**"]
    largest, more = _largest(report, None)
    for grid in (_by_axis(report), largest):
        if grid.lines:
            parts.append(markdown_table(grid, ("path", "source")))
    lines = [more] if more else []
    return "\n\n".join([*parts, markdown_list([*lines, *remarks(report)])])


def as_json(report: Findings) -> dict[str, Any]:
    """Plain JSON values."""
    memory, topology = report.memory, report.topology
    names = [field.name for field in dataclasses.fields(Findings)]
    left_out = ("replan", "values", "paths")
    return {
        **{n: _plain(getattr(report, n)) for n in names if n not in left_out},
        "mesh": mesh_to_json(report.mesh),
        "topology": None if topology is None else str(topology),
        "memory": {
            **_plain(memory),
            "at_rest_bytes": memory.at_rest_bytes,
            "headroom_bytes": memory.headroom_bytes,
        },
    }


def _plain(value: Any) -> Any:
    """Records as dicts, and tuples as lists."""
    if isinstance(value, tuple):
        return [*map(_plain, value)]
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: _plain(getattr(value, field.name)) for field in fields}
    return value


def title(report: Findings) -> str:
    """The title of the report."""
    where = "" if report.platform == "tpu" else f" ({report.platform})"
    if report.topology is not None:
        where = f" ({report.topology})"
    return visible(
        f"{report.engine} of {report.step} on mesh {report.mesh}{where}: "
        f"{report.mesh.size} devices"
    )


# ------------------------------------------------------------------------- tables


def _by_axis(report: Findings) -> Grid:
    """One row per axes and kind, the most bytes first."""
    sums: dict[tuple[str, str], list[int]] = {}
    by_axes: dict[str, int] = {}
    for one in report.collectives:
        axes = axes_text(one)
        row = sums.setdefault((axes, one.kind), [0, 0, 0])
        row[0] += one.executions
        row[1] += one.bytes_per_step
        row[2] += one.wire_bytes_per_step
        by_axes[axes] = by_axes.get(axes, 0) + one.wire_bytes_per_step
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
    lines = tuple(Line(cells[:shown]) for cells in rows)
    return Grid(names[:shown], (False, False, True, True, True, True)[:shown], lines)


def _largest(report: Findings, width: int | None) -> tuple[Grid, str]:
    """The leaves or source lines that send the most bytes, and the remainder."""
    rows = grouped(report.collectives)
    names = ("path", "axes", "kind", "source", "times", "sent/device")
    right = (False, False, False, False, True, True)
    shown = [
        (row.path, row.axes, row.kind, row.source, str(row.times), row.sent_text)
        for row in rows[:_ROWS]
    ]
    grid = Grid(names, right, tuple(Line(cells) for cells in shown))
    more = ""
    if len(rows) > _ROWS:
        rest = sum(row.sent for row in rows[_ROWS:])
        more = f"… and {len(rows) - _ROWS} more, {human_bytes(rest)}"
    if width is None or grid.width() <= width:
        return grid, more
    bare = grid.width() - sum(grid.widths()[at] for at in (0, 3))
    room = max((width - bare) // 2, _CELL)
    fitted = [(cut_path(c[0], room), *c[1:3], cut(c[3], room), *c[4:]) for c in shown]
    return Grid(names, right, tuple(Line(cells) for cells in fitted)), more


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """Equal collectives of all layers."""

    path: str
    axes: str
    kind: str
    source: str
    times: int
    sent: int

    @property
    def sent_text(self) -> str:
        return human_bytes(self.sent)


def grouped(collectives: Sequence[Collective]) -> list[Row]:
    """One row per path, source, kind and axes; layers are folded."""
    sums: dict[tuple[str, str, str, str], list[int]] = {}
    for one in collectives:
        source = one.source or ""
        key = (one.path or "-", axes_text(one), one.kind, source)
        row = sums.setdefault(key, [0, 0])
        row[0] += one.executions
        row[1] += one.wire_bytes_per_step
    alike: dict[tuple[Any, ...], dict[str, list[int]]] = {}
    for (path, *rest), row in sums.items():
        alike.setdefault((*rest, *row), {})[path] = row
    found = []
    for (axes, kind, source, times, sent), members in alike.items():
        for some in fold(list(members), [0] * len(members)):
            count = len(some.members)
            text = some.text if count == 1 else f"{some.text} ×{count}"
            found.append(Row(text, axes, kind, source, times * count, sent * count))
    return sorted(found, key=lambda row: (-row.sent, row.path, row.kind, row.source))


def lines_of(collectives: Sequence[Collective]) -> list[str]:
    """Collectives as lines of a message."""
    return [
        f"{row.kind} over {row.axes} of {row.path}"
        + (f" at {row.source}" if row.source else "")
        + f": {row.times} times, {row.sent_text} sent per device in a step"
        for row in grouped(collectives)
    ]


def axes_text(one: Collective) -> str:
    """`fsdp`, `data+fsdp`, `data (DCN)`; `?` where they were not recognised."""
    text = "+".join(one.axes) or "?"
    return f"{text} (DCN)" if one.over_dcn else text


def seconds_text(seconds: float) -> str:
    """`0.0123` → `12 ms`."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.2g} µs"


# ------------------------------------------------------------------------ remarks


def remarks(report: Findings) -> list[str]:
    """The lines below the tables."""
    lines = [*_memory(report), *_compute(report)]
    if not report.collectives:
        lines.append("collectives: none")
    elif report.seconds_bound:
        lines.append("at least: by bandwidth alone; no latency, no overlap")
    lines += _reshards(report.reshards)
    lines += _drifts(report.drift)
    if report.drift:
        lines.append(
            "drift: each step moves this state back; give jit out_shardings, or use "
            "flm.jit, which keeps it"
        )
    lines += [f"unrecognised: {text}" for text in not_read(report)]
    lines += [f"warning: {text}" for text in report.warnings]
    if report.hosts:
        lines.append(_hosts(report.hosts))
    lines.append(f"took {report.took_seconds:.1f} s")
    return lines


def not_read(report: Findings) -> list[str]:
    """The parts that were not read, with counts and the first three source lines."""
    found = []
    for what, times in report.unrecognised.items():
        lines = report.unrecognised_at.get(what, ())
        more = [f"{len(lines) - 3} more"] if len(lines) > 3 else []
        where = ", ".join([*lines[:3], *more])
        found.append(f"{what} ({times})" + (f"; at {where}" if where else ""))
    return found


def _drifts(drift: Sequence[Drift]) -> Iterator[str]:
    keys = [(one.before, one.after) for one in drift]
    for some in fold([one.path for one in drift], keys):
        before, after = keys[some.members[0]]
        yield f"drift: {some.text} came as {before}, left as {after}"


def _by_role(sizes: Mapping[str, int]) -> str:
    """`3 MiB per device (parameter 1 MiB, optimizer 2 MiB)`."""
    parts = [f"{role} {human_bytes(size)}" for role, size in sizes.items()]
    listed = f" ({', '.join(parts)})" if len(parts) > 1 else ""
    return f"{human_bytes(sum(sizes.values()))} per device{listed}"


def _memory(report: Findings) -> Iterator[str]:
    memory = report.memory
    padding = ""
    if memory.padding_bytes and report.topology is not None:
        padding = f"; tiles of a TPU add {human_bytes(memory.padding_bytes)}"
    yield f"at rest: {_by_role(memory.at_rest)}{padding}"
    if memory.host_at_rest:
        yield f"at rest in host memory: {_by_role(memory.host_at_rest)}"
    if memory.temporary_bytes is not None:
        yield f"temporary: {human_bytes(memory.temporary_bytes)} per device"
    if memory.peak_bytes is not None:
        yield f"peak: {human_bytes(memory.peak_bytes)} per device"
    if memory.limit_bytes is not None:
        head = memory.headroom_bytes or 0
        said = (
            f"{human_bytes(head)} left" if head >= 0 else f"{human_bytes(-head)} short"
        )
        verdict = "whether it fits is unknown"
        if report.fits is not None:
            verdict = "it fits" if report.fits else "it does not fit"
        limit = human_bytes(memory.limit_bytes)
        yield f"limit: {limit} per device, {said}; {verdict}"
    if memory.note:
        yield f"memory: {memory.note}"


def _compute(report: Findings) -> Iterator[str]:
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
        text += (
            f"; {ratio:.2f} times an even share: devices along some axis do the same "
            "work"
        )
    yield text


def _reshards(reshards: Sequence[Reshard]) -> Iterator[str]:
    """One line for equal reshards, such as those of every layer."""
    count = collections.Counter(reshards)
    alike: dict[Any, list[Reshard]] = {}
    for one, times in count.items():
        key = (dataclasses.replace(one, path=None), one.path is None, times)
        alike.setdefault(key, []).append(one)
    rows = []
    for (_, _, times), members in alike.items():
        one = members[0]
        paths = [member.path or one.value for member in members]
        for some in fold(paths, [0] * len(paths)):
            number = times * len(some.members)
            rows.append(_reshard(one, some.text + (f" ×{number}" * (number > 1))))
    yield from rows[:_ROWS]
    if len(rows) > _ROWS:
        yield f"reshard: … and {len(rows) - _ROWS} more, which to_json() lists"


def _reshard(one: Reshard, name: str) -> str:
    where = f" at {one.source}" if one.source else ""
    shape = ",".join(map(str, one.shape))
    note = f"; {one.note}" if one.note else ""
    times = "once" if one.executions == 1 else f"{one.executions} times"
    return (
        f"reshard: {name} [{shape}]{where}: {one.before} → {one.after}, {times}, "
        f"{human_bytes(one.bytes)} per device each{note}"
    )


def _hosts(hosts: Sequence[Host]) -> str:
    reads = [host.reads_bytes for host in hosts]
    holds = [host.holds_bytes for host in hosts]
    data = [host.data_bytes for host in hosts]
    return (
        f"hosts: {len(hosts)} with {len(hosts[0].devices)} devices each; a host holds "
        f"{_range(holds)} of state, reads {_range(reads)} of it in a restore and "
        f"{_range(data)} of data in a step (devices as DeviceMesh orders them)"
    )


def _range(sizes: Sequence[int]) -> str:
    low, high = human_bytes(min(sizes)), human_bytes(max(sizes))
    return low if low == high else f"{low} to {high}"


def comparison(first: Findings, second: Findings) -> str:
    """Two reports side by side."""
    rows = [
        ("at rest", first.memory.at_rest_bytes, second.memory.at_rest_bytes),
        *_on_host(first, second),
        ("operations", first.flops_per_device, second.flops_per_device),
    ]
    sums = []
    for report in (first, second):
        sent: collections.Counter[tuple[str, str]] = collections.Counter()
        for one in report.collectives:
            sent[axes_text(one), one.kind] += one.wire_bytes_per_step
        sums.append(sent)
    rows += [
        (" ".join(key), sums[0][key], sums[1][key])
        for key in sorted({*sums[0], *sums[1]})
    ]
    rows.append(("all collectives", sums[0].total(), sums[1].total()))
    lines = []
    for name, before, after in rows:
        show = (lambda n: f"{n:.3g}") if name == "operations" else human_bytes
        lines.append(Line((name, show(before), show(after), _change(before, after))))
    names, right = ("per device", "1", "2", "change"), (False, True, True, True)
    table = Grid(names, right, tuple(lines)).text()
    return "\n".join([f"1: {title(first)}", f"2: {title(second)}", "", table])


def _on_host(first: Findings, second: Findings) -> list[tuple[str, int, int]]:
    """The row of state in host memory, where one of two reports has some."""
    before = sum(first.memory.host_at_rest.values())
    after = sum(second.memory.host_at_rest.values())
    return [("at rest in host memory", before, after)] if before or after else []


def _change(before: int, after: int) -> str:
    if before == after:
        return "same"
    if not before:
        return "new"
    if not after:
        return "gone"
    if after >= 10 * before:
        return f"{after / before:.3g} times"
    share = (after - before) / before
    return f"{'+' if share > 0 else '-'}{human_share(abs(share))}"
