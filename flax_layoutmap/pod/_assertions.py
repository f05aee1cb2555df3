"""Assertions on a report for tests: `expect` and `forbid`."""

import re
from collections.abc import Collection, Iterable, Sequence

from flax_layoutmap._core.errors import LayoutError, bullet_list, did_you_mean
from flax_layoutmap.pod._records import KINDS, Collective, Findings, Kind
from flax_layoutmap.pod._report_text import lines_of, not_read


def expect(
    report: Findings,
    axis: str,
    kinds: Collection[Kind] | Kind,
    small_bytes: int,
    unrecognised: bool,
) -> None:
    """`PodReport.expect`."""
    wanted = {kinds} if isinstance(kinds, str) else set(kinds)
    for kind in wanted:
        check_kind(kind)
    check_axis(report, axis)
    every = [one for one in report.collectives if _may_be_over(one, axis)]
    large = _large(every, small_bytes)
    other = [one for one in large if one.kind not in wanted]
    missing = sorted(wanted - {one.kind for one in large if axis in one.axes})
    lines = lines_of(other)
    lines += [f"{kind}: expected, and none runs over it" for kind in missing]
    if lines:
        raise AssertionError(
            f"over axis {axis!r} of mesh {report.mesh} {report.step} was expected to "
            f"run {', '.join(sorted(wanted)) or 'no collectives'}:\n"
            f"{bullet_list(lines)}"
        )
    _check_all_read(report, unrecognised)


def forbid(
    report: Findings,
    path: str | None,
    kind: Kind | None,
    axis: str | None,
    source: str | None,
    small_bytes: int,
    unrecognised: bool,
) -> None:
    """`PodReport.forbid`."""
    if not (path or kind or axis or source):
        raise LayoutError(
            'forbid what? pass path="embed", kind="all-gather", axis="tensor" or '
            'source="model.py:36"'
        )
    check_pattern("source", source)
    check_pattern("path", path)
    if kind is not None:
        check_kind(kind)
    if axis is not None:
        check_axis(report, axis)
    _check_path(report, path)
    _check_source(report, source)
    some = [
        one
        for one in report.collectives
        if (axis is None or _may_be_over(one, axis))
        and kind in (None, one.kind)
        and any(_matches(path, leaf) for leaf in (one.path, *one.joined))
        and _matches(source, one.source)
    ]
    found = _large(some, small_bytes)
    if found:
        said = {"path": path, "kind": kind, "axis": axis, "source": source}
        what = ", ".join(f"{key}={value!r}" for key, value in said.items() if value)
        raise AssertionError(
            f"{report.step} on mesh {report.mesh} was to have no collective with "
            f"{what}:\n{bullet_list(lines_of(found))}"
        )
    _check_all_read(report, unrecognised)


def _may_be_over(one: Collective, axis: str) -> bool:
    """Whose axes are not known may run over any."""
    return not one.axes or axis in one.axes


def _large(some: Iterable[Collective], small_bytes: int) -> list[Collective]:
    """Those that send so much together with their like: of layers one by one, too."""
    alike: dict[tuple[str, tuple[str, ...]], list[Collective]] = {}
    for one in some:
        alike.setdefault((one.kind, one.axes), []).append(one)
    return [
        one
        for members in alike.values()
        if sum(member.wire_bytes_per_step for member in members) >= small_bytes
        for one in members
    ]


def _check_all_read(report: Findings, unrecognised: bool) -> None:
    """Of a program that was not read as a whole, nothing can be asserted."""
    if report.unrecognised and not unrecognised:
        raise AssertionError(
            f"the {report.engine} found nothing against it, but did not read all of "
            f"{report.step} on mesh {report.mesh}:\n{bullet_list(not_read(report))}\n"
            "pass unrecognised=True where these may do what they like"
        )


def _check_path(report: Findings, path: str | None) -> None:
    if not path or not report.paths:
        return
    if not any(re.search(path, one) for one in report.paths):
        parts = {part for one in report.paths for part in (one, *one.split("/"))}
        raise LayoutError(
            f"no leaf of the arguments of {report.step} is like {path!r}"
            f"{did_you_mean(path, parts)}, so that nothing would be forbidden"
        )


def _check_source(report: Findings, source: str | None) -> None:
    """Raise for a line without operations; only a plan has all of them."""
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


def check_axis(report: Findings, axis: str) -> None:
    """Raise LayoutError for an axis that the mesh does not have."""
    names: Sequence[str] = report.mesh.axis_names
    if axis not in names:
        raise LayoutError(
            f"the mesh {report.mesh} has no axis {axis!r}{did_you_mean(axis, names)}"
        )


def check_kind(kind: str) -> None:
    """Raise LayoutError for a kind that there is not."""
    if kind not in KINDS:
        raise LayoutError(
            f"there is no collective {kind!r}{did_you_mean(kind, KINDS)}; the kinds "
            f"are {', '.join(KINDS)}"
        )


def check_pattern(name: str, pattern: str | None) -> None:
    """Raise LayoutError for what is no regular expression."""
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
