"""Fold the rows of a report: leaves that differ in the indices of their paths alone."""

import itertools
import re
from collections.abc import Hashable, Sequence
from typing import NamedTuple

# A whole part (`layers/0`), or a part of a name between underscores (`layers_0`);
# neither `conv2` nor more digits than the places of a list would have.
_INDEX = re.compile(r"(?<![^/_])(0|[1-9][0-9]{0,8})(?=[/_]|$)")

# Runs of indices that are written before `…`.
_RUNS = 6

Indices = tuple[int, ...]
Relation = tuple[tuple[str, ...], tuple[int | None, ...]]


class Fold(NamedTuple):
    """Leaves that are shown as one."""

    text: str  # the path, with `{0..79}` for the indices 0 to 79
    members: tuple[int, ...]  # positions, ascending
    slots: tuple[str, ...] = ()  # of several members: the text of each index

    def spell(self, relation: Relation) -> str:
        """The path with this relation to that of every member."""
        texts, indices = relation
        slots = self.slots or _INDEX.split(self.text)[1::2]
        slots = slots[len(slots) - len(indices) :] if indices else ()
        spelled = [
            slot if index is None else str(index)
            for slot, index in zip(slots, indices, strict=True)
        ]
        return _join(texts, spelled)


def fold(paths: Sequence[str], alike: Sequence[Hashable]) -> list[Fold]:
    """Fold the paths that differ in indices alone, in the order of their first members.

    Paths with different values in `alike` are not folded together.

    >>> [row.text for row in fold(["a/0/w", "a/1/w", "a/2/w", "b"], [0, 0, 0, 0])]
    ['a/{0..2}/w', 'b']
    >>> [row.text for row in fold(["a_0", "a_1", "a_2", "a_4"], "xxyx")]
    ['a_{0,1,4}', 'a_2']
    """
    groups: dict[Hashable, dict[Indices, int]] = {}
    for at, (path, key) in enumerate(zip(paths, alike, strict=True)):
        pieces = _INDEX.split(path)
        group = groups.setdefault((tuple(pieces[::2]), key), {})
        group[tuple(map(int, pieces[1::2]))] = at
    folds: list[Fold] = []
    for (texts, _), group in groups.items():  # pyright: ignore[reportGeneralTypeIssues]
        for box in _boxes(list(group)):
            members = [group[indices] for indices in itertools.product(*box)]
            folds.append(_fold_of(texts, box, members))
    return sorted(folds, key=lambda row: row.members[0])


def relation(path: str, other: str) -> Relation:
    """How another path relates to this one: its texts, and which indices are equal.

    Indices are compared from the right. `Fold.spell` writes the other path of all
    leaves with the same relation.

    >>> relation("mu/layers/7/w", "layers/7/w")
    (('layers/', '/w'), (None,))
    """
    mine = _INDEX.split(path)[1::2]
    pieces = _INDEX.split(other)
    theirs = pieces[1::2]
    # Each index of the other needs a counterpart, whose slot it takes.
    if len(theirs) > len(mine):
        return (other,), ()
    tail = mine[len(mine) - len(theirs) :]
    same = [None if a == b else int(b) for a, b in zip(tail, theirs, strict=True)]
    return tuple(pieces[::2]), tuple(same)


def natural_key(path: str) -> list[str | int]:
    """Sort `layers/2` before `layers/10`."""
    pieces = enumerate(re.split(r"([0-9]+)", path))
    return [int(piece) if at % 2 else piece for at, piece in pieces]


def spell_indices(indices: Sequence[int]) -> str:
    """Ascending indices in the notation of a shell; many runs are abbreviated.

    >>> spell_indices([7]), spell_indices([0, 1, 2, 3, 5]), spell_indices([0, 2, 4, 6])
    ('7', '{0..3,5}', '{0..6..2}')
    """
    if len(indices) == 1:
        return str(indices[0])
    step = indices[1] - indices[0]
    regular = all(b - a == step for a, b in itertools.pairwise(indices))
    if step > 1 and regular and len(indices) > 3:
        return f"{{{indices[0]}..{indices[-1]}..{step}}}"
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    texts = [
        f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run))
        for run in runs
    ]
    if len(texts) > _RUNS:
        texts = [*texts[: _RUNS - 3], "…", texts[-1]]
    return f"{{{','.join(texts)}}}"


def _boxes(tuples: list[Indices]) -> list[list[list[int]]]:
    """Cut a set of indices into products of sets, one set per slot."""
    if not tuples[0]:
        return [[]]
    rests: dict[int, list[Indices]] = {}
    for indices in tuples:
        rests.setdefault(indices[0], []).append(indices[1:])
    same: dict[tuple[Indices, ...], list[int]] = {}
    for first, rest in rests.items():
        same.setdefault(tuple(sorted(rest)), []).append(first)
    return [
        [sorted(firsts), *box]
        for rest, firsts in same.items()
        for box in _boxes(list(rest))
    ]


def _fold_of(
    texts: Sequence[str], box: Sequence[Sequence[int]], members: Sequence[int]
) -> Fold:
    slots = tuple(map(spell_indices, box))
    several = slots if len(members) > 1 else ()
    return Fold(_join(texts, slots), tuple(sorted(members)), several)


def _join(texts: Sequence[str], slots: Sequence[str]) -> str:
    pairs = itertools.zip_longest(texts, slots, fillvalue="")
    return "".join(itertools.chain.from_iterable(pairs))
