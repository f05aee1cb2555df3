"""The tables of `pod_compile.py` and its targets, from the rows of its cases."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Row = Mapping[str, Any]
MIB, GIB = 2**20, 2**30
# Over an axis, what is less than this share of all traffic is in the noise of a loss.
LEAST = 0.001
# Of what is sent for a parameter; the compiler moves the odd rows of a tile by itself.
ODD = 0.05
# Parameters for which less is sent in a step are scales of norms.
SMALL = 64 * 1024
MEMORY = (
    "case | options | plan, CPU s | compile, s | CPU s | arguments, ours, GiB | "
    "compiler's | apart | peak | limit | fits"
)
AXES = "case | axes | plan | plain loops | plan is | default | plan is"
KINDS = "case | options | axes | plan | compiler"


def name_of(row: Row) -> str:
    """`8B, 2 × v5e:16x16, fsdp=32 tensor=8, 512×4096`."""
    case = row["case"]
    slices = f"{case['slices']} × " if case["slices"] > 1 else ""
    mesh = " ".join(part for part in case["mesh"].split(",") if not part.endswith("=1"))
    return (
        f"{case['model']}, {slices}{case['topology']}, {mesh}, "
        f"{case['batch']}×{case['length']}"
    )


def show(rows: list[dict[str, Any]]) -> int:
    """Prints all; 1 where a target is missed."""
    _table(MEMORY, map(_memory_row, rows))
    print("What a device sends in a step, MiB:")
    _table(AXES, _axis_rows(rows))
    print("By kind: how often (MiB):")
    _table(KINDS, (line for row in rows for line in _kind_rows(row)))
    for row in rows:
        for text in (row.get("error"), *_differences(row)):
            if text:
                print(f"- {_named(row)}: {_line(text)}")
    print()
    met = True
    for text, missed in _targets(rows):
        print(f"{'FAIL' if missed else 'PASS'}  {text}")
        for one in missed:
            print(f"      {one}")
        met = met and not missed
    return 0 if met else 1


def _table(header: str, rows: Iterable[list[str]]) -> None:
    print(f"\n| {header} |\n|{'--|' * (header.count('|') + 1)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print()


def _memory_row(row: Row) -> list[str]:
    head = [name_of(row), row["options"]]
    planned, compiled = row.get("plan"), row.get("compile")
    if planned is None:
        return [*head, *["—"] * 9]
    ours = f"{planned['arguments'] / GIB:.3f}"
    plan = f"{planned['seconds']:.1f}"
    if compiled is None:
        return [*head, plan, "—", "—", ours, *["—"] * 5]
    theirs, apart = "—", "—"
    if compiled["fits"]:
        theirs = f"{compiled['arguments'] / GIB:.3f}"
        apart = f"{_apart(planned['arguments'], compiled['arguments']):+.2%}"
    return [
        *(*head, plan, f"{compiled['seconds']:.0f}", f"{row['compiler_cpu']:.0f}"),
        *(ours, theirs, apart, f"{compiled['peak'] / GIB:.2f}"),
        f"{compiled['limit'] / GIB:.2f}",
        "yes" if compiled["fits"] else "no",
    ]


def _axis_rows(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    """A line for each case and axes, with both options side by side."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(name_of(row), {})[row["options"]] = row
    for name, by in cases.items():
        sent = {
            options: {axes: rest for axes, *rest in _axes(row)}
            for options, row in by.items()
        }
        for axes in sorted({axes for found in sent.values() for axes in found}):
            planned = max(found.get(axes, [0])[0] for found in sent.values())
            line = [name, axes, f"{planned / MIB:,.0f}"]
            for options in ("plain", "default"):
                compiled = sent.get(options, {}).get(axes, [0, 0])[1]
                line.append(f"{compiled / MIB:,.0f}" if sent.get(options) else "—")
                apart = f"{_apart(planned, compiled):+.1%}"
                line.append(apart if compiled else "—")
            yield line


def _kind_rows(row: Row) -> Iterator[list[str]]:
    for axes, _, _ in _axes(row):
        yield [
            *(name_of(row), row["options"], axes),
            _kinds(row["plan"]["axes"].get(axes, {})),
            _kinds(row["compile"]["axes"].get(axes, {})),
        ]


def _axes(row: Row) -> list[tuple[str, int, int]]:
    """Axes with bytes planned and compiled, of a case that was compiled and fits."""
    if not row.get("compile") or not row["compile"]["fits"]:
        return []
    planned, compiled = _sent(row["plan"]), _sent(row["compile"])
    least = LEAST * sum(planned.values())
    return [
        (axes, planned.get(axes, 0), compiled.get(axes, 0))
        for axes in sorted({*planned, *compiled})
        if max(planned.get(axes, 0), compiled.get(axes, 0))
        >= (MIB if _crosses(row, axes) else least)
    ]


def _crosses(row: Row, axes: str) -> bool:
    """Whether it goes between slices, where a byte takes long."""
    return row["case"]["slices"] > 1 and "data" in axes.split("+")


def _sent(said: Mapping[str, Any]) -> dict[str, int]:
    return {
        axes: sum(sent for _, sent in kinds.values())
        for axes, kinds in said["axes"].items()
    }


def _kinds(kinds: Mapping[str, Any]) -> str:
    large = [item for item in kinds.items() if item[1][1] >= 0.05 * MIB]
    large.sort(key=lambda item: -item[1][1])
    return ", ".join(
        f"{times} {kind} ({sent / MIB:,.0f})" for kind, (times, sent) in large
    )


def _apart(ours: float, theirs: float) -> float:
    return ours / theirs - 1 if theirs else 0.0


def _differences(row: Row) -> list[str]:
    """What is planned for a parameter and not compiled, or the other way round."""
    if not row.get("compile") or not row["compile"]["fits"]:
        return []
    lines = []
    planned, compiled = row["plan"]["groups"], row["compile"]["groups"]
    for path in sorted({*planned, *compiled}):
        groups = planned.get(path, {}), compiled.get(path, {})
        if max(map(_total, groups)) < SMALL:
            continue
        ours, theirs = map(_large, groups)
        kinds = row["options"] == "plain"
        if ours != theirs if kinds else set(ours) != set(theirs):
            lines.append(f"{path}: planned {_said(ours)}, compiled {_said(theirs)}")
    return lines


def _large(group: Mapping[str, Mapping[str, int]]) -> dict[str, set[str]]:
    """Axes → kinds, of what is more than the odd rows."""
    least = ODD * _total(group)
    found = {
        axes: {kind for kind, sent in kinds.items() if sent >= least}
        for axes, kinds in group.items()
    }
    return {axes: kinds for axes, kinds in found.items() if kinds}


def _total(group: Mapping[str, Mapping[str, int]]) -> int:
    return sum(sum(kinds.values()) for kinds in group.values())


def _said(group: Mapping[str, set[str]]) -> str:
    return "; ".join(
        f"{', '.join(sorted(kinds))} over {axes}"
        for axes, kinds in sorted(group.items())
    )


def _targets(rows: list[dict[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """What is asked, and the rows that miss it."""
    yield (
        f"all {len(rows)} cases have an answer",
        [f"{name_of(row)}: {_line(row['error'])}" for row in rows if "error" in row],
    )
    answered = [row for row in rows if "compile" in row]
    fit = [row for row in answered if row["compile"]["fits"]]
    far = [
        (_apart(row["plan"]["arguments"], row["compile"]["arguments"]), row)
        for row in fit
    ]
    yield (
        f"arguments within 2 % of the compiler's, {len(far)} cases",
        [f"{_named(row)}: {apart:+.2%}" for apart, row in far if abs(apart) > 0.02],
    )
    yield (
        "nothing in the programs is unrecognised",
        [_named(row) for row in answered if row["compile"]["unrecognised"]],
    )
    dense = [row for row in fit if row["case"]["model"] != "experts"]
    plain = [row for row in dense if row["options"] == "plain"]
    yield (
        f"plain options, dense: bytes within 5 % over every axis, {len(plain)} cases",
        [
            f"{_named(row)}, {axes}: {planned / MIB:,.0f} and {compiled / MIB:,.0f} MiB"
            for row in plain
            for axes, planned, compiled in _axes(row)
            if abs(_apart(planned, compiled)) > 0.05 or not compiled
        ],
    )
    for options in ("plain", "default"):
        these = [row for row in dense if row["options"] == options]
        what = "axes and kinds" if options == "plain" else "axes"
        yield (
            f"{options} options, dense: the same {what} for every parameter, "
            f"{len(these)} cases",
            [
                f"{_named(row)}: {len(found)} differ"
                for row in these
                if (found := _differences(row))
            ],
        )
    for row in fit:
        if row["case"]["model"] == "experts":
            yield from _experts_targets(row)


def _experts_targets(row: Row) -> Iterator[tuple[str, list[str]]]:
    axes = _axes(row)
    planned, compiled = sum(one[1] for one in axes), sum(one[2] for one in axes)
    ratio = planned / compiled if compiled else float("inf")
    yield (
        f"{_named(row)}: all bytes within 1.5 times: {ratio:.2f} times",
        [] if 1 / 1.5 <= ratio <= 1.5 else [f"{planned:,} planned, {compiled:,}"],
    )
    orders = [_ranked(row["plan"]), _ranked(row["compile"])]
    yield (
        f"{_named(row)}: mesh axes in the same order of bytes, {', '.join(orders[0])}",
        [] if orders[0] == orders[1] else [f"compiled: {', '.join(orders[1])}"],
    )


def _ranked(said: Mapping[str, Any]) -> list[str]:
    """The mesh axes, the one with most bytes first."""
    sums: dict[str, int] = {}
    for axes, sent in _sent(said).items():
        for axis in axes.split("+"):
            sums[axis] = sums.get(axis, 0) + sent
    return sorted(sums, key=lambda axis: -sums[axis])


def _named(row: Row) -> str:
    return f"{name_of(row)}, {row['options']}"


def _line(text: str) -> str:
    return " ".join(text.split())[-400:]
