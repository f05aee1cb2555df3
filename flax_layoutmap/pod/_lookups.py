"""Rows looked up in a table, and their gradients added up, as XLA partitions both.

Shardy would gather the table. XLA's SPMD partitioner decides anew, for each gather and
scatter: it groups the devices by the dims of the table that are sharded, or by those of
the tokens, and does what is left within a group. Of the ways, it takes the one whose
largest operation needs the least memory, then the one that sends least; within a group
it looks no further when it compares. Compared with what XLA's compiler for CPUs logs
and makes, and with the TPU compiler's programs.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Literal

from flax_layoutmap.pod._attributes import AxisRef
from flax_layoutmap.pod._records import Kind
from flax_layoutmap.pod._values import parts

# Generations whose compiler moves the table or the rows as Shardy says.
SHARDY_ALONE = ("tpu7x",)

Axes = tuple[AxisRef, ...]
# What is moved.
What = Literal["table", "rows", "tokens"]


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A collective of a lookup.

    Attributes:
        what: what it moves, or sums.
        kind: what it does; a sum of which each device keeps a part is a reduce-scatter.
        axes: the axes that it runs over.
        shape: its payload on one device.
    """

    what: What
    kind: Kind
    axes: Axes
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Lookup:
    """A lookup, or the sum of its gradients, within a group of devices.

    Attributes:
        adds: whether rows are added to the table, instead of taken from it.
        sizes: rows of the table, elements of a row, and tokens.
        table: axes of the rows of the table, and of the elements of a row.
        tokens: axes of the tokens.
        rows: axes of the rows that are taken or added, and of their elements.
        mesh: the axes of the group.
        bytes: of an element of the table, and of a token.
        is_zero: whether rows are added to zeros, which need not be gathered.
    """

    adds: bool
    sizes: tuple[int, int, int]
    table: tuple[Axes, Axes]
    tokens: Axes
    rows: tuple[Axes, Axes]
    mesh: Axes
    bytes: tuple[int, int]
    is_zero: bool = True

    def part(self, what: What, *axes: Axes) -> tuple[int, ...]:
        """The shape of the table, the rows or the tokens with its dims on axes."""
        size, width, count = self.sizes
        whole = {"table": (size, width), "rows": (count, width), "tokens": (count,)}
        cuts = [*map(parts, axes), 1, 1]
        return tuple(-(-n // cut) for n, cut in zip(whole[what], cuts, strict=False))

    def without(self, axes: Axes) -> Axes:
        """The axes of the group that are left without others."""
        gone = {
            name: parts([one for one in axes if one[0] == name]) for name, _ in axes
        }
        left = [(name, size // gone.get(name, 1)) for name, size in self.mesh]
        return tuple(one for one in left if one[1] > 1)


@dataclasses.dataclass(frozen=True, slots=True)
class _Way:
    """A way to do it: what comes before, a lookup within smaller groups, and after."""

    before: tuple[Step, ...]
    inner: Lookup
    after: tuple[Step, ...]


@functools.lru_cache(maxsize=256)
def steps_of(one: Lookup) -> tuple[Step, ...]:
    """The collectives of a lookup, in their order."""
    ways = [way for way in (_by_width(one), _by_size(one), _by_tokens(one)) if way]
    if not ways:
        return tuple(_made_whole(one))
    way = min(ways, key=_cost)
    before = [
        step
        for step in way.before
        if not (one.adds and one.is_zero and step.what == "table")
    ]
    return (*before, *steps_of(way.inner), *way.after)


def _cost(way: _Way) -> tuple[int, int]:
    """Bytes of the largest operation, and bytes that are sent."""
    inner = way.inner
    item, token = inner.bytes
    memory = math.prod(inner.part("tokens")) * token
    memory += math.prod(inner.part("table")) * item
    memory += math.prod(inner.part("rows")) * item
    sent = 0
    for step in (*way.before, *_made_whole(inner), *way.after):
        size = math.prod(step.shape) * (token if step.what == "tokens" else item)
        part = size // parts(step.axes)
        if step.kind in ("all-reduce", "reduce-scatter"):
            needed, moved = size, 2 * size
        elif step.kind == "all-gather":
            needed, moved = size + part, size - part
        else:
            permutes = step.kind == "collective-permute"
            needed, moved = 2 * size, size if permutes else size - part
        memory, sent = max(memory, needed), sent + moved
    return memory, sent


def _made_whole(one: Lookup) -> Iterator[Step]:
    """Everything is gathered within the group, along the last dim first."""
    given: list[tuple[What, tuple[Axes, ...]]] = [
        ("table", one.table),
        ("tokens", (one.tokens,)),
    ]
    if one.adds:
        given.append(("rows", one.rows))
    for what, dims in given:
        yield from _gathered(one, what, dims)


def _gathered(
    one: Lookup, what: What, dims: Sequence[Axes], gone: Sequence[Axes] | None = None
) -> Iterator[Step]:
    """Gathers over some of the axes of the dims, or over all; the last dim first."""
    left = list(dims)
    for at in reversed(range(len(left))):
        axes = left[at] if gone is None else gone[at]
        if axes:
            left[at] = _less(left[at], axes)
            yield Step(what, "all-gather", axes, one.part(what, *left))


# --------------------------------------------------------------------------- ways


def _by_width(one: Lookup) -> _Way | None:
    """A group has the same elements of each row."""
    group = one.table[1]
    if not group:
        return None
    size, width, count = one.sizes
    mesh = one.without(group)
    outer = () if _meet(one.rows[0], group) else one.rows[0]
    (tokens,), moved = _regrouped(one, "tokens", (one.tokens,), group)
    rows = tuple(_resharded(one, *_ends(one, one.rows, (outer, group))))
    inner = dataclasses.replace(
        one,
        sizes=(size, -(-width // parts(group)), count),
        table=(one.table[0], ()),
        tokens=tokens,
        rows=(outer, ()),
        mesh=mesh,
    )
    return _Way((*moved, *(rows if one.adds else ())), inner, () if one.adds else rows)


def _by_size(one: Lookup) -> _Way | None:
    """A group has the same rows; what is not among them is zero, or left out."""
    group = one.table[0]
    if not group:
        return None
    size, width, count = one.sizes
    (tokens,), moved = _regrouped(one, "tokens", (one.tokens,), group)
    rows, changed = _regrouped(one, "rows", one.rows, group)
    if tokens and not any(rows):
        rows, changed = (tokens, ()), ()
    elif rows[0] and not tokens:
        tokens = rows[0]
    inner = dataclasses.replace(
        one,
        sizes=(-(-size // parts(group)), width, count),
        table=((), one.table[1]),
        tokens=tokens,
        rows=(rows[0], rows[1]),
        mesh=one.without(group),
    )
    if one.adds:
        return _Way((*moved, *changed), inner, ())
    after = (rows[0], rows[1])
    summed = Step("rows", "all-reduce", group, one.part("rows", *after))
    return _Way(moved, inner, (summed, *_resharded(one, after, one.rows)))


def _by_tokens(one: Lookup) -> _Way | None:
    """A group has the same tokens."""
    group = one.tokens
    if not group:
        return None
    size, width, count = one.sizes
    inside = () if _meet(one.rows[1], group) else one.rows[1]
    table, moved = _regrouped(one, "table", one.table, group)
    inner = dataclasses.replace(
        one,
        sizes=(size, width, -(-count // parts(group))),
        table=(table[0], table[1]),
        tokens=(),
        rows=((), inside),
        mesh=one.without(group),
    )
    rows = tuple(_resharded(one, *_ends(one, one.rows, (group, inside))))
    if not one.adds:
        return _Way(moved, inner, rows)
    placed = (table[0], table[1])
    return _Way((*rows, *moved), inner, tuple(_summed(one, group, placed)))


def _summed(one: Lookup, group: Axes, placed: tuple[Axes, Axes]) -> Iterator[Step]:
    """The sum of what each group has added, from a layout to that of the table."""
    cuts = [
        parts(own) // parts(now) for own, now in zip(one.table, placed, strict=True)
    ]
    # Each device keeps a part of a single dim, and no two the same.
    scatters = sorted(cuts) == [1, parts(group)]
    kind: Kind = "reduce-scatter" if scatters else "all-reduce"
    yield Step("table", kind, group, one.part("table", *placed))
    cut = all(
        own[: len(now)] == now for own, now in zip(one.table, placed, strict=True)
    )
    if not cut:
        axes = _named(one.mesh, (*sum((*one.table, *placed), ()), *group))
        yield Step("table", "collective-permute", axes, one.part("table", *one.table))


def _ends(
    one: Lookup, own: tuple[Axes, Axes], other: tuple[Axes, Axes]
) -> tuple[tuple[Axes, Axes], tuple[Axes, Axes]]:
    """From where to where rows go: they come in where they are added."""
    return (own, other) if one.adds else (other, own)


# ------------------------------------------------------------------------- layouts


def _regrouped(
    one: Lookup, what: What, dims: Sequence[Axes], group: Axes
) -> tuple[tuple[Axes, ...], tuple[Step, ...]]:
    """A layout in which all devices of a group can have the same, and how to get there.

    Parts are kept in number, as far as there are devices for them, from the last dim
    on; where they are on axes of the group, they go to others.
    """
    axes = tuple(axis for dim in dims for axis in dim)
    if not _meet(axes, group):
        return tuple(dims), ()
    copies = parts(one.mesh) // parts(axes)
    left = parts(group) // math.gcd(parts(group), copies)
    gathered, counts = left, []
    for dim in dims:
        shared = math.gcd(parts(dim), left)
        counts.append(parts(dim) // shared)
        left //= shared
    if left > 1:
        gathered, counts = parts(axes), [1] * len(dims)
    rest, placed = one.without(group), []
    for count in counts:
        own, rest = _taken(rest, count)
        placed.append(own)
    apart = tuple(_less(dim, group) for dim in dims)
    minor = all(dim[: len(own)] == own for dim, own in zip(dims, apart, strict=True))
    if minor and [parts(dim) for dim in apart] == counts:
        gone = tuple(_less(dim, left) for dim, left in zip(dims, apart, strict=True))
        return apart, tuple(_gathered(one, what, dims, gone))
    over = _named(one.mesh, (*axes, *sum(placed, ()), *group))
    steps = [Step(what, "collective-permute", over, one.part(what, *dims))]
    if gathered > 1:
        members = _members(group, gathered)
        steps.append(Step(what, "all-gather", members, one.part(what, *placed)))
    return tuple(placed), tuple(steps)


def _resharded(
    one: Lookup, before: tuple[Axes, Axes], after: tuple[Axes, Axes]
) -> Iterator[Step]:
    """How rows get from a layout to another; where XLA sees no way, all of them go."""
    gone = [_less(old, new) for old, new in zip(before, after, strict=True)]
    come = [_less(new, old) for old, new in zip(before, after, strict=True)]
    lost, new = gone[0] + gone[1], come[0] + come[1]
    if not lost:
        return
    apart = not _meet(lost, new)
    if apart and gone[0] and come[0]:
        axes = _named(one.mesh, lost + new)
        yield Step("rows", "collective-permute", axes, one.part("rows", *after))
    elif apart:
        # What is cut is cut first.
        kept = [_less(old, lost) + add for old, add in zip(before, come, strict=True)]
        yield Step("rows", "all-gather", lost, one.part("rows", *kept))
    elif bool(gone[0]) != bool(come[0]) and new[: len(lost)] == lost:
        yield Step("rows", "all-to-all", lost, one.part("rows", *after))
    else:
        yield from _gathered(one, "rows", before)


def _meet(some: Axes, others: Axes) -> bool:
    """Whether axes have a name in common."""
    return not {name for name, _ in some}.isdisjoint(name for name, _ in others)


def _less(axes: Axes, others: Axes) -> Axes:
    return tuple(axis for axis in axes if axis not in others)


def _taken(rest: Axes, count: int) -> tuple[Axes, Axes]:
    """Axes for a number of parts, the first ones first, and those that are left."""
    own, left = [], []
    for name, size in rest:
        shared = math.gcd(size, count)
        count //= shared
        own += [(name, shared)] if shared > 1 else []
        left += [(name, size // shared)] if size > shared else []
    return tuple(own), tuple(left)


def _members(group: Axes, count: int) -> Axes:
    """The axes along which so many devices of a group exchange what they have.

    What was there twice stays apart along the last axis.
    """
    found: list[AxisRef] = []
    left = count
    for name, size in group:
        if left % size and size % left:
            return tuple((name, 1) for name, _ in group[:-1]) + ((group[-1][0], count),)
        if left > 1:
            found.append((name, min(size, left)))
        left = max(1, left // size)
    return tuple(found)


def _named(mesh: Axes, axes: Axes) -> Axes:
    """The axes of the mesh that have one of these names, once each."""
    names = {name for name, _ in axes}
    return tuple(axis for axis in mesh if axis[0] in names)
