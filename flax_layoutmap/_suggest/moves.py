"""Changes of a candidate: axes on classes, storage over axes, single groups."""

import dataclasses
from collections.abc import Iterator

from flax_layoutmap._suggest.candidate import Candidate, Spec, groups_of
from flax_layoutmap._suggest.problem import Problem


def fits(problem: Problem, shape: tuple[int, ...], spec: Spec) -> bool:
    """Whether each dim divides by its axes."""
    return all(
        problem.divides(size, axes) for size, axes in zip(shape, spec, strict=True)
    )


def fully_sharded(problem: Problem, batch: tuple[str, ...] | None = None) -> Candidate:
    """The batch over some axes, and each large parameter over the same.

    Without axes, the batch over the most that it divides by, and parameters over all.
    Of state that has the batch in it, such as the cache of a decoder, that dim.
    """
    axes = tuple(problem.sizes) if batch is None else batch
    rows = max(problem.batches, key=len) if batch is None else batch
    specs = tuple(
        tuple(
            rows
            if ("parameter", number, dim) in problem.batch_class
            and dim in group.dims
            and problem.divides(size, rows)
            else ()
            for dim, size in enumerate(group.shape)
        )
        for number, group in enumerate(problem.groups)
    )
    return stored(problem, axes, Candidate(rows, specs))


def starts(
    problem: Problem, batch: tuple[str, ...], most_last: bool
) -> Iterator[Candidate]:
    """The batch over some axes, and the others on all classes.

    With parameters stored over the axes of the batch and not, each of these axes given
    to a class, too, and none.
    """
    current = fully_sharded(problem, batch)
    for axis in problem.sizes:
        if axis not in batch:
            current = with_classes(problem, current, axis, most_last)
    for one in (current, not_stored(problem, batch, current)):
        yield one
        for number, choices in problem.exchanges.items():
            for axis in batch:
                yield exchanged(problem, axis, number, choices[0], one)


def storages(problem: Problem, current: Candidate) -> Iterator[Candidate]:
    """Parameters stored over all axes or one, and not."""
    axes = tuple(problem.sizes)
    for own in dict.fromkeys([axes, *((axis,) for axis in axes)]):
        yield stored(problem, own, current)
        yield not_stored(problem, own, current)


def on_class(problem: Problem, number: int, current: Candidate) -> Iterator[Candidate]:
    """Another axis on a class, or none."""
    for axis in problem.sizes:
        if axis not in current.batch:
            yield switched(problem, axis, number, current)
            continue
        for points in problem.exchanges.get(number, ()):
            yield exchanged(problem, axis, number, points, current)


def stored(problem: Problem, axes: tuple[str, ...], current: Candidate) -> Candidate:
    """Shard each large parameter over axes, beside what shards it already."""
    specs = list(current.specs)
    for axis in axes:
        for number, spec in enumerate(specs):
            specs[number] = _with_storage(problem, number, spec, axis, current.batch)
    return dataclasses.replace(current, specs=tuple(specs))


def not_stored(
    problem: Problem, axes: tuple[str, ...], current: Candidate
) -> Candidate:
    """Shard state over axes only where a class or the batch has them."""
    specs = [list(spec) for spec in current.specs]
    for axis in axes:
        placed = _placed_nodes(problem, current, axis) | problem.batch_class
        for number, spec in enumerate(specs):
            for dim, own in enumerate(spec):
                if ("parameter", number, dim) not in placed:
                    spec[dim] = tuple(one for one in own if one != axis)
    return dataclasses.replace(current, specs=tuple(map(tuple, specs)))


def switched(problem: Problem, axis: str, number: int, current: Candidate) -> Candidate:
    """Place an axis on a class, instead of those in its way, or take it away."""
    if (axis, number) in current.placed:
        return without(problem, current, axis, number)
    groups = groups_of(problem.classes[number])
    for own, other in current.placed:
        if own == axis and groups & groups_of(problem.classes[other]):
            current = without(problem, current, axis, other)
    return with_class(problem, current, axis, number)


def exchanged(
    problem: Problem,
    axis: str,
    number: int,
    points: frozenset[int],
    current: Candidate,
) -> Candidate:
    """Give an axis of the batch to a class, too, and to it alone in some points."""
    if (axis, number) not in current.placed:
        current = switched(problem, axis, number, current)
    return dataclasses.replace(current, turned=points)


def single(
    problem: Problem,
    number: int,
    axes: tuple[str, ...],
    dim: int | None,
    current: Candidate,
) -> Candidate:
    """Another dim for axes in a single group; the same if that does not divide."""
    spec = _moved(current.specs[number], axes, dim)
    if not fits(problem, problem.groups[number].shape, spec):
        return current
    specs = list(current.specs)
    specs[number] = spec
    return dataclasses.replace(current, specs=tuple(specs))


def in_group(problem: Problem, number: int, current: Candidate) -> Iterator[Candidate]:
    """Other dims of a single group for the axes of the batch, and for each other."""
    others = [(axis,) for axis in problem.sizes if axis not in current.batch]
    for axes in [current.batch, *others]:
        for dim in (None, *problem.groups[number].dims):
            yield single(problem, number, axes, dim, current)


def with_classes(
    problem: Problem, current: Candidate, axis: str, most_last: bool
) -> Candidate:
    """Place an axis on all classes, each where no other has it.

    With `most_last`, that of most parameters, as the model dim, comes last.
    """
    counts = [len(groups_of(nodes)) for nodes in problem.classes]

    def is_last(number: int) -> bool:
        return most_last and counts[number] == max(counts)

    for number in sorted(range(len(counts)), key=is_last):
        current = with_class(problem, current, axis, number)
    return current


def with_class(
    problem: Problem, current: Candidate, axis: str, number: int
) -> Candidate:
    """Place an axis on a class of dims; what was stored there moves to other dims."""
    specs = list(current.specs)
    for kind, group, dim in sorted(problem.classes[number]):
        if kind != "parameter" or dim not in problem.groups[group].dims:
            continue
        shape, spec = problem.groups[group].shape, specs[group]
        if not problem.divides(shape[dim], (axis,)):
            continue
        if _placed_in(problem, current, axis, group):
            continue  # another class has it on another dim
        moved = _moved(spec, (axis,), dim)
        displaced = moved[dim][1:]
        spec = tuple((axis,) if at == dim else axes for at, axes in enumerate(moved))
        for one in displaced:
            spec = _with_storage(problem, group, spec, one, current.batch)
        specs[group] = spec
    if tuple(specs) == current.specs:
        return current
    placed = current.placed | {(axis, number)}
    return dataclasses.replace(current, specs=tuple(specs), placed=placed)


def without(problem: Problem, current: Candidate, axis: str, number: int) -> Candidate:
    """Take an axis from a class."""
    specs = list(current.specs)
    for kind, group, dim in problem.classes[number]:
        if kind == "parameter":
            specs[group] = tuple(
                tuple(one for one in axes if one != axis) if at == dim else axes
                for at, axes in enumerate(specs[group])
            )
    placed = current.placed - {(axis, number)}
    return dataclasses.replace(current, specs=tuple(specs), placed=placed)


def _placed_nodes(problem: Problem, current: Candidate, axis: str) -> set[object]:
    return {
        node
        for own, number in current.placed
        if own == axis
        for node in problem.classes[number]
    }


def _placed_in(problem: Problem, current: Candidate, axis: str, group: int) -> bool:
    """Whether a class has an axis on a dim of a group."""
    nodes = _placed_nodes(problem, current, axis)
    return any(
        ("parameter", group, dim) in nodes
        for dim, axes in enumerate(current.specs[group])
        if axis in axes
    )


def _moved(spec: Spec, axes: tuple[str, ...], dim: int | None) -> Spec:
    """The spec with axes first on a dim, or on none."""
    return tuple(
        (axes if at == dim else ()) + tuple(one for one in own if one not in axes)
        for at, own in enumerate(spec)
    )


def _with_storage(
    problem: Problem, number: int, spec: Spec, axis: str, batch: tuple[str, ...]
) -> Spec:
    """The spec with an axis of storage, beside others of storage if there are some.

    It goes to the model dim if the group has it, else to the largest dim; of equal ones
    to the last, as `presets.fsdp` does it. On TPUs gradients that are summed along the
    model dim send the least.
    """
    group = problem.groups[number]
    if not group.dims or any(axis in axes for axes in spec):
        return spec

    def rank(dim: int) -> tuple[bool, bool, int, int]:
        is_free = set(spec[dim]) <= set(batch)
        is_model_dim = ("parameter", number, dim) in problem.model_dim
        return is_free, is_model_dim, group.shape[dim], dim

    for dim in sorted(group.dims, key=rank, reverse=True):
        new = tuple(
            (*axes, axis) if at == dim else axes for at, axes in enumerate(spec)
        )
        if fits(problem, group.shape, new):
            return new
    return spec
