"""What a search has found, beside what it is compared with, as a Suggestion."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

from flax_layoutmap._core.errors import LayoutError, closest
from flax_layoutmap._rules.records import show_shape
from flax_layoutmap._show.terminal import wrapped
from flax_layoutmap._suggest.candidate import Candidate, Spec
from flax_layoutmap._suggest.moves import fully_sharded, single
from flax_layoutmap._suggest.price import Cost
from flax_layoutmap._suggest.problem import Problem
from flax_layoutmap._suggest.report_text import WIDTH, next_best, peak_of
from flax_layoutmap._suggest.rules import layout_text, rules_of
from flax_layoutmap._suggest.search import Search
from flax_layoutmap._suggest.suggestion import Choice, Suggestion
from flax_layoutmap.pod._report import PodReport
from flax_layoutmap.pod._report_text import seconds_text

# Candidate → its rules and costs; None: those of the current rules.
_Columns = dict[Candidate | None, Choice]

# Of times that differ by a smaller share, the one with less memory is suggested.
_SAME = 1e-3
# Parameters that are named in an error.
_LISTED = 10


def compared(
    search: Search,
    today: Choice | None,
    report: Callable[..., PodReport] | None,
) -> Suggestion:
    """What a search has found; `report` makes that of a `layout_map`."""
    problem, limit = search.problem, search.limit_bytes
    columns: _Columns = {}
    full = fully_sharded(problem)

    def choice(one: Candidate) -> Choice:
        return Choice(rules_of(problem, one), search.price.with_peak(one))

    def rank(cost: Cost) -> tuple[int, float]:
        return max(0, peak_of(cost) - limit), cost.seconds

    with search.until_over():
        # What XLA's partitioner may find better: the second best, full sharding.
        full = search.ruled_as_best(full)
        found = [search.best, *map(search.ruled_as_best, search.second()), full]
        for one in dict.fromkeys(found):
            columns[one] = choice(one)
    if search.best not in columns:
        columns = {search.best: choice(search.best)}
    if today is not None:
        columns[None] = today
    notes = list[str]()
    if search.is_complete and report is not None:
        columns, notes = _checked(columns, report)
    ranked = sorted(filter(None, columns), key=lambda one: rank(columns[one].cost))
    excess, seconds = rank(columns[ranked[0]].cost)
    most = excess, seconds * (1 + _SAME)
    same = [one for one in ranked if rank(columns[one].cost) <= most]
    chosen = min(same, key=lambda one: peak_of(columns[one].cost))
    others = [one for one in ranked if one != chosen]
    best = columns[search.best]
    is_overruled = rank(best.estimate) < rank(columns[chosen].estimate)
    if is_overruled and search.best not in same:
        notes.append(_overruled(best, columns[chosen]))
    names: dict[Candidate | None, str] = {chosen: "suggested"}
    for one in [one for one in others if one != full][:1]:
        names[one] = "runner-up"
    names.setdefault(full, "full sharding")
    names[None] = "today"
    return Suggestion(
        choices={name: columns[one] for one, name in names.items() if one in columns},
        step=problem.lowered.name,
        topology=search.price.topology,
        limit_bytes=limit,
        trail=tuple(search.trail),
        is_complete=search.is_complete,
        notes=(*_unused(problem, chosen), *notes),
        explained=functools.partial(_explained, search, chosen),
    )


def _checked(
    columns: _Columns, report: Callable[..., PodReport]
) -> tuple[_Columns, list[str]]:
    """The choices with their plans; without any, and the reason, if one fails."""
    try:
        return {
            one: dataclasses.replace(own, plan=report(layout_map=own.layout_map))
            for one, own in columns.items()
        }, []
    except KeyboardInterrupt:  # the search is not lost
        return columns, ["not checked: the check was interrupted"]
    except LayoutError as error:
        return columns, [f"not checked: {first_of(error)}".splitlines()[0]]


def first_of(error: LayoutError) -> str:
    """The first problem of an error, and how many more there are."""
    first, *more = getattr(error, "problems", ()) or [str(error)]
    return f"{first} (and {len(more)} more)" if more else first


def _unused(problem: Problem, chosen: Candidate) -> Iterator[str]:
    specs = [*problem.arguments(chosen).values()]
    specs += [problem.point_spec(number, chosen) for number in chosen.fixed or ()]
    used = {axis for spec in specs for axes in spec for axis in axes}
    dims = [group.shape[dim] for group in problem.groups for dim in group.dims]
    # Without batch axes, what the axis of the fewest devices does not divide.
    batch = chosen.batch or (min(problem.sizes, key=problem.sizes.__getitem__),)
    if used.issuperset(chosen.batch) and (why := _not_split(problem, batch)):
        yield f"no data is split over the batch: {why}"
    for axis, size in problem.sizes.items():
        if axis in used:
            continue
        why = f"no batch and no dim of a large parameter divides by {size}"
        fits = any(axis in own for own in problem.batches)
        if fits or any(problem.divides(dim, (axis,)) for dim in dims):
            why = "nothing that was tried with it gains"
        yield (
            f"unused: axis {axis} of the mesh, so that its {size} devices do the same "
            f"work; {_not_split(problem, (axis,)) or why}"
        )


def _not_split(problem: Problem, axes: Sequence[str]) -> str:
    """Why rules split no data over some axes, and what to do; else empty.

    Rows behind micro-batches are not meant, which the layouts of outputs split.
    """
    found = [at for at in problem.undivided(axes) if not problem.rows.get(at)]
    if not found:
        return ""
    path, shape = problem.lowered.leaves[found[0]].path, dict(problem.data)[found[0]]
    more = f" (and {len(found) - 1} more)" if found[1:] else ""
    count = math.prod(problem.sizes[axis] for axis in axes)
    return (
        f"the first dim of {path} {show_shape(shape)}{more} does not divide by {count}"
        "; pad or broadcast it, or give it a sharding, so that rules can split the rest"
    )


def _overruled(best: Choice, chosen: Choice) -> str:
    """What the search found best, and the check does not."""
    text = seconds_text
    return (
        f"overruled: by {best.checked_by} a step takes {text(best.cost.seconds)} with "
        f"what the search found best, which it had estimated at "
        f"{text(best.estimate.seconds)}; what is suggested takes "
        f"{text(chosen.cost.seconds)}, estimated at {text(chosen.estimate.seconds)}"
    )


def _explained(search: Search, chosen: Candidate, path: str) -> str:
    """`Suggestion.explain`: price the other layouts of one group."""
    problem, price = search.problem, search.price
    number = _group_of(problem, path)
    group, own = problem.groups[number], chosen.specs[number]
    lines = [f"{path}: {layout_text(own)}"]
    others = dict.fromkeys(
        single(problem, number, (axis,), dim, chosen)
        for axis in problem.sizes
        for dim in (None, *group.dims)
    )
    others = [one for one in others if _sets(one.specs[number]) != _sets(own)]
    if others:
        best = min(others, key=lambda one: (search.excess(one), price.of(one).seconds))
        text = layout_text(best.specs[number])
        is_over = search.excess(best) > search.excess(chosen)
        lines.append(next_best(text, price.of(best), price.of(chosen), is_over))
    elif group.dims:
        lines.append("none of its dims divides by another axis")
    else:
        lines.append("it is too small to be sharded: no other layout was tried")
    return "\n".join(wrapped(lines, WIDTH))


def _sets(spec: Spec) -> list[set[str]]:
    """The axes of each dim, whose order makes no difference in cost."""
    return [set(axes) for axes in spec]


def _group_of(problem: Problem, path: str) -> int:
    """The number of the group that has a path, or the only one with such an end."""
    paths = {one: at for at, group in enumerate(problem.groups) for one in group.paths}
    if path in paths:
        return paths[path]
    ends = {at: one for one, at in paths.items() if one.endswith(f"/{path}")}
    if len(ends) == 1:
        return next(iter(ends))
    if ends:
        more = f" and {len(ends) - _LISTED} more" if len(ends) > _LISTED else ""
        listed = ", ".join([*ends.values()][:_LISTED])
        raise KeyError(f"{path!r} is the end of several paths: {listed}{more}")
    near = ", ".join(closest(path, paths, count=3))
    hint = f"; the closest are {near}" if near else ""
    raise KeyError(f"no parameter has the path {path!r}{hint}")
